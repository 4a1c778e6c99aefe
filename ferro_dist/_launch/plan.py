"""What each rank is started with. A pure function: --dry-run shows it, the supervisor runs it."""

from __future__ import annotations

import sys

from ferro_dist._launch.command_line import EMULATION_DIR
from ferro_dist.network_interfaces import format_host_port

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from ferro_dist._launch.command_line import Options

# What an outer launcher said about this process; it is not true of its ranks.
FOREIGN_IDENTITY = (
    "FERRO_LISTEN_FD",
    "MPI_LOCALNRANKS",
    "MPI_LOCALRANKID",
    "ROLE_NAME",
    "SLURM_LOCALID",
    "SLURM_PROCID",
    "SLURM_STEP_NUM_TASKS",
)
FOREIGN_PREFIXES = ("OMPI_COMM_WORLD_", "PMI_", "PMIX_", "TORCHELASTIC_")


class Rendezvous:
    """Where the ranks meet, and the secret by which they know each other."""

    def __init__(
        self, addr: str, master_addr: str, master_port: str, token: str, listen_fd: str | None
    ) -> None:
        self.addr = addr
        self.master_addr = master_addr
        self.master_port = master_port
        self.token = token
        self.listen_fd = listen_fd

    @classmethod
    def placeholder(cls, options: Options) -> Rendezvous:
        """Return what --dry-run shows: nothing is bound."""
        if options.endpoint is None:
            return cls("127.0.0.1:<port>", "127.0.0.1", "<port>", "", "<fd>")
        host, port = options.endpoint
        fd = "<fd>" if options.node_rank == 0 else None
        return cls(format_host_port(host, port), host, str(port + 1), "", fd)


class RankCommand:
    """One rank: its command, and how its environment differs from the launcher's."""

    def __init__(
        self,
        rank: int,
        argv: list[str],
        env: dict[str, str],
        unset: list[str],
        core: int | None,
    ) -> None:
        self.rank = rank
        self.argv = argv
        self.env = env
        self.unset = unset
        self.core = core

    def environment(self, environ: Mapping[str, str]) -> dict[str, str]:
        """Return the whole environment of the rank."""
        kept = {key: value for key, value in environ.items() if key not in self.unset}
        return kept | self.env


def plan(options: Options, rendezvous: Rendezvous, environ: Mapping[str, str]) -> list[RankCommand]:
    """Return the commands of this host's ranks, in order of rank."""
    python = [sys.executable] if options.is_python else []
    if options.is_module:
        python.append("-m")
    elif options.is_python and options.command[0].startswith("-"):
        python.append("--")  # else Python would take the script for an option of its own
    argv = [*python, *options.command]
    unset = sorted(key for key in environ if _is_foreign(key))
    return [
        RankCommand(
            options.node_rank * options.nproc + local_rank,
            argv,
            _rank_env(options, rendezvous, environ, local_rank),
            unset,
            _core(options, local_rank),
        )
        for local_rank in range(options.nproc)
    ]


def _rank_env(
    options: Options, rendezvous: Rendezvous, environ: Mapping[str, str], local_rank: int
) -> dict[str, str]:
    rank = options.node_rank * options.nproc + local_rank
    # The torchrun variables are for programs that know nothing of ferro_dist. TORCHELASTIC_* are
    # left out: by these torch would expect an agent, with a store at MASTER_PORT.
    identity = {
        "RANK": str(rank),
        "WORLD_SIZE": str(options.world_size),
        "LOCAL_RANK": str(local_rank),
        "LOCAL_WORLD_SIZE": str(options.nproc),
    }
    env = {f"FERRO_{key}": value for key, value in identity.items()} | identity
    env["GROUP_RANK"], env["GROUP_WORLD_SIZE"] = str(options.node_rank), str(options.nnodes)
    env["ROLE_RANK"], env["ROLE_WORLD_SIZE"] = identity["RANK"], identity["WORLD_SIZE"]
    env["FERRO_ADDR"] = rendezvous.addr
    # Several hosts restart together, and whatever restarts them may count the attempts.
    inherited_epoch = environ.get("FERRO_DIST_EPOCH", "0")
    env["FERRO_DIST_EPOCH"] = inherited_epoch if options.nnodes > 1 else "0"
    env["FERRO_DIST_TOKEN"] = rendezvous.token
    env["MASTER_ADDR"] = rendezvous.master_addr
    env["MASTER_PORT"] = rendezvous.master_port
    if rank == 0 and rendezvous.listen_fd is not None:
        env["FERRO_LISTEN_FD"] = rendezvous.listen_fd
    if "OMP_NUM_THREADS" not in environ:
        cores = 1 if options.is_bound_to_core else len(options.cores) // options.nproc
        env["OMP_NUM_THREADS"] = str(max(1, cores))
    if "PYTHONUNBUFFERED" not in environ:
        env["PYTHONUNBUFFERED"] = "1"
    env |= options.env
    return env | _emulation_env(options, environ) if options.emulates_gpu else env


def _emulation_env(options: Options, environ: Mapping[str, str]) -> dict[str, str]:
    """Let the linker find the emulated libraries first; by default with a GPU for each rank."""
    given = options.env.get("LD_LIBRARY_PATH", environ.get("LD_LIBRARY_PATH", ""))
    name = "FERRO_EMULATION_DEVICES"
    devices = options.env.get(name, environ.get(name, str(options.nproc)))
    path = f"{EMULATION_DIR}:{given}" if given else EMULATION_DIR
    return {"LD_LIBRARY_PATH": path, name: devices}


def _is_foreign(key: str) -> bool:
    return key in FOREIGN_IDENTITY or key.startswith(FOREIGN_PREFIXES)


def _core(options: Options, local_rank: int) -> int | None:
    if not options.is_bound_to_core:
        return None
    return options.cores[local_rank % len(options.cores)]


def describe(commands: Iterable[RankCommand]) -> str:
    """Return the commands as lines that a shell accepts, without the secret, for --dry-run."""
    import shlex

    lines = []
    for command in commands:
        place = "" if command.core is None else f", bound to core {command.core}"
        lines.append(f"# rank {command.rank}{place}")
        unset = [word for key in command.unset for word in ("-u", key)]
        shown = command.env | {"FERRO_DIST_TOKEN": "<secret>"}
        pairs = [f"{key}={value}" for key, value in shown.items()]
        lines.append(shlex.join(["env", *unset, *pairs, *command.argv]))
    return "".join(f"{line}\n" for line in lines)
