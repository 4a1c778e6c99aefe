"""This process's place in the world, from its arguments or from what started it.

Known are ferrorun, torchrun (and anything else that sets ``RANK`` and
``WORLD_SIZE``), Open MPI, MPICH and its kin (PMI), and Slurm. They are asked in this
order, and who comes later must not contradict: a variable that was left behind in a
shell would otherwise give every process the same rank. A launcher that only started
the launcher which started us (``srun torchrun ...``) contradicts nobody.
"""

from __future__ import annotations

import contextlib
import os
import re
import socket
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace

from ferro_dist.arguments import integer
from ferro_dist.errors import InvalidRank, InvalidWorldSize, NoConnection
from ferro_dist.rendezvous.address import (
    derived_addr,
    derived_unix_addr,
    format_host_port,
    parse_addresses,
)
from ferro_dist.rendezvous.authentication import token_source

__all__ = ["Placement", "first_host", "placement"]

Environ = Mapping[str, str]

# Processes between a launcher and its ranks may be shells; these are the launchers' own.
LAUNCHER_PROCESSES = frozenset(
    {"hydra_pmi_proxy", "mpiexec", "mpiexec.gforker", "mpirun", "orted", "prted", "prterun"}
)


@dataclass(frozen=True)
class Placement:
    """Which rank this is, among how many, and where rank 0 is found.

    Attributes
    ----------
    addr : str or None
        What `ferro_dist.rendezvous.connect` takes; None for a world of one.
    local_rank, local_world_size : int or None
        The place among the ranks of this host; None if nobody said.
    launcher : str
        ``"arguments"``, ``"ferrorun"``, ``"torchrun"``, ``"openmpi"``, ``"mpich"``,
        ``"slurm"``, or ``"none"`` for a world of one that nobody asked for.
    token_source : str
        Where the token is: a variable's name, or ``"file"``.
    epoch : str
        Tells this attempt of a job from those before it; the same on all ranks.
    """

    rank: int
    world_size: int
    addr: str | None
    local_rank: int | None
    local_world_size: int | None
    launcher: str
    token_source: str
    epoch: str
    listen_fd: int | None = None

    def listener(self) -> socket.socket | None:
        """Return a copy of the socket that ferrorun listens at for rank 0, if it does.

        None in a process that has inherited the variable and not the socket.
        """
        if self.rank > 0 or self.listen_fd is None or self.addr is None:
            return None
        with contextlib.suppress(OSError):
            sock = _socket_at(os.dup(self.listen_fd))
            if self._is_own(sock):
                os.set_inheritable(sock.fileno(), False)
                return sock
            sock.close()
        return None

    def _is_own(self, sock: socket.socket) -> bool:
        is_listening = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
        name = sock.getsockname()
        ports = {address.port for address in parse_addresses(self.addr or "")}
        return bool(is_listening) and isinstance(name, tuple) and name[1] in ports


def _socket_at(fd: int) -> socket.socket:
    """Make a socket of a descriptor, which is closed if it is none."""
    try:
        return socket.socket(fileno=fd)
    except OSError:
        os.close(fd)
        raise


@dataclass(frozen=True)
class _Source:
    """What one launcher says, and which variables said it."""

    launcher: str
    rank_variable: str
    size_variable: str
    rank: int
    world_size: int
    local_rank: int | None
    local_world_size: int | None
    num_hosts: int | None  # the machines, or launchers, that share the ranks; None if unknown

    def __str__(self) -> str:
        return (
            f"{self.launcher} says rank {self.rank} of {self.world_size} "
            f"({self.rank_variable}, {self.size_variable})"
        )

    @property
    def is_single_host(self) -> bool:
        """Whether all ranks are known to be on this host."""
        return self.num_hosts == 1

    def is_at_place_of(self, other: _Source) -> bool:
        """Whether rank and world size are the same."""
        return (self.rank, self.world_size) == (other.rank, other.world_size)

    def agrees_with(self, other: _Source) -> bool:
        """Whether both mean the same place, or `other` only started this one's launcher."""
        if self.is_at_place_of(other):
            return True
        if self.num_hosts is None:
            return False
        # mpirun starts its daemons by srun, on fewer hosts than it uses itself.
        is_mpi_on_slurm = other.launcher == "slurm" and self.launcher in ("openmpi", "mpich")
        return is_mpi_on_slurm or other.world_size in (1, self.num_hosts)


def placement(
    rank: int | None = None,
    world_size: int | None = None,
    addr: str | None = None,
    environ: Environ = os.environ,
) -> Placement:
    """Find this process's place.

    Parameters
    ----------
    rank, world_size : int, optional
        Given together, they are the answer, whatever the environment says. One
        alone must agree with the environment, which gives the other.
    addr : str, optional
        Where rank 0 listens; default from the environment.
    environ : mapping, optional

    Returns
    -------
    Placement
        A world of one if neither arguments nor environment say anything.

    Raises
    ------
    InvalidRank, InvalidWorldSize
        A value is no rank or world size, or two sources contradict each other; the
        message names the variables.
    NoConnection
        The ranks are several, and nothing says where rank 0 is.
    """
    if rank is not None and world_size is not None:
        sources = [_from_arguments(rank, world_size)]
    else:
        sources = _from_environment(environ)
        _check_argument(sources[0] if sources else None, rank, world_size)
    if not sources:
        _check_unread(environ)
        return Placement(0, 1, None, 0, 1, "none", token_source(environ), "")
    source = _complete(sources)
    is_alone = source.world_size == 1
    return Placement(
        rank=source.rank,
        world_size=source.world_size,
        addr=None if is_alone else _find_addr(sources, addr, environ),
        local_rank=0 if is_alone else source.local_rank,
        local_world_size=1 if is_alone else source.local_world_size,
        launcher=source.launcher,
        token_source=token_source(environ),
        epoch=_epoch(source, environ),
        listen_fd=_integer(environ, "FERRO_LISTEN_FD") if addr is None else None,
    )


def _check_unread(environ: Environ) -> None:
    """Refuse to be a world of one where a launcher started several, and did not say how many.

    Bare ``prterun`` does so; Open MPI's ``mpiexec`` says it in variables of its own.
    """
    if "PMIX_RANK" in environ:
        raise InvalidWorldSize(
            "PMIX_RANK is set, but nothing says how many ranks there are: start the job with "
            "Open MPI's mpiexec (or prterun --personality ompi), or give rank and world_size."
        )


def _from_arguments(rank: int, world_size: int) -> _Source:
    size, number = _index(world_size), _index(rank)
    if size is None or size < 1:
        raise InvalidWorldSize(f"world_size must be a positive int, got {world_size!r}")
    if number is None or not 0 <= number < size:
        raise InvalidRank(f"rank must be an int from 0 to {size - 1}, got {rank!r}")
    return _Source("arguments", "rank", "world_size", number, size, None, None, None)


def _index(value: object) -> int | None:
    """Return an int, or what stands for one, like NumPy's; None for anything else."""
    try:
        return integer(value)
    except TypeError:
        return None


def _check_argument(source: _Source | None, rank: int | None, world_size: int | None) -> None:
    if rank is not None and (source is None or source.rank != rank):
        raise InvalidRank(
            f"rank={rank!r} was given without world_size, and "
            + (f"{source}" if source else "the environment says nothing")
            + ": give both"
        )
    if world_size is not None and (source is None or source.world_size != world_size):
        if source is None and type(world_size) is int and world_size == 1:
            return
        raise InvalidWorldSize(
            f"world_size={world_size!r} was given without rank, and "
            + (f"{source}" if source else "the environment says nothing")
            + ": give both"
        )


def _from_environment(environ: Environ) -> list[_Source]:
    """Return all that say the same place, the one to believe first."""
    sources = [source for find in _FINDERS if (source := find(environ)) is not None]
    for other in sources[1:]:
        if not sources[0].agrees_with(other):
            error = InvalidWorldSize if _differ_in_size(sources[0], other) else InvalidRank
            raise error(
                f"{sources[0]}, {other}. Unset the variables that are left from something else, "
                "or give rank and world_size as arguments"
            )
    return [source for source in sources if source.is_at_place_of(sources[0])]


def _complete(sources: list[_Source]) -> _Source:
    """Return the first source, with what it leaves open from the others."""
    return replace(
        sources[0],
        local_rank=_first(source.local_rank for source in sources),
        local_world_size=_first(source.local_world_size for source in sources),
        num_hosts=_first(source.num_hosts for source in sources),
    )


def _first(values: Iterable[int | None]) -> int | None:
    return next((value for value in values if value is not None), None)


def _differ_in_size(one: _Source, other: _Source) -> bool:
    return one.world_size != other.world_size


# The launchers


def _from_ferrorun(environ: Environ) -> _Source | None:
    return _read(
        environ,
        "ferrorun",
        ("FERRO_RANK", "FERRO_WORLD_SIZE", "FERRO_LOCAL_RANK", "FERRO_LOCAL_WORLD_SIZE"),
    )


def _from_torchrun(environ: Environ) -> _Source | None:
    return _read(
        environ,
        "torchrun",
        ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
        "GROUP_WORLD_SIZE",
    )


def _from_openmpi(environ: Environ) -> _Source | None:
    prefix = "OMPI_COMM_WORLD_"
    return _read(
        environ,
        "openmpi",
        (f"{prefix}RANK", f"{prefix}SIZE", f"{prefix}LOCAL_RANK", f"{prefix}LOCAL_SIZE"),
    )


def _from_mpich(environ: Environ) -> _Source | None:
    return _read(environ, "mpich", ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"))


def _from_slurm(environ: Environ) -> _Source | None:
    # A batch script has SLURM_PROCID=0 and SLURM_NTASKS too, but is no task of a step: it
    # would wait for the other ranks for ever. So would an interactive shell (a pty).
    is_step = "SLURM_STEP_ID" in environ and "SLURM_PTY_PORT" not in environ
    if not is_step or (_integer(environ, "SLURM_STEP_NUM_TASKS") or 0) <= 1:
        return None
    if "SLURM_PROCID" not in environ:
        return None
    found = _read(
        environ,
        "slurm",
        ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", ""),
        "SLURM_STEP_NUM_NODES",
    )
    return found and replace(found, local_world_size=_tasks_on_this_node(environ))


def _tasks_on_this_node(environ: Environ) -> int | None:
    """Read ``SLURM_STEP_TASKS_PER_NODE``, such as ``"2(x3),1"``: three nodes with 2, one with 1."""
    counts: list[int] = []
    for part in environ.get("SLURM_STEP_TASKS_PER_NODE", "").split(","):
        match = re.fullmatch(r"([0-9]{1,6})(?:\(x([0-9]{1,6})\))?", part)
        if match is None:
            return None
        counts += [int(match[1])] * int(match[2] or 1)
    node = _integer(environ, "SLURM_NODEID")
    return counts[node] if node is not None and node < len(counts) else None


_FINDERS: tuple[Callable[[Environ], _Source | None], ...] = (
    _from_ferrorun,
    _from_torchrun,
    _from_openmpi,
    _from_mpich,
    _from_slurm,
)


def _read(
    environ: Environ,
    launcher: str,
    variables: tuple[str, str, str, str],
    hosts_variable: str | None = None,
) -> _Source | None:
    """Read what a launcher has set; None if it is not there."""
    rank_variable, size_variable, local_rank_variable, local_size_variable = variables
    if rank_variable not in environ and size_variable not in environ:
        return None
    world_size = _world_size(environ, size_variable, rank_variable)
    rank = _rank(environ, rank_variable, size_variable, world_size)
    local_size = None
    if environ.get(local_size_variable):
        local_size = _world_size(environ, local_size_variable, local_rank_variable)
        if local_size > world_size:
            raise InvalidWorldSize(
                f"{local_size_variable}={local_size} is more than {size_variable}={world_size}"
            )
    local_rank = None
    if environ.get(local_rank_variable):
        limit = local_size or world_size
        local_rank = _rank(environ, local_rank_variable, local_size_variable, limit)
    num_hosts = _integer(environ, hosts_variable) if hosts_variable else None
    if num_hosts is None and local_size is not None:
        num_hosts = -(-world_size // local_size)
    if local_size is None and num_hosts == 1:
        local_size = world_size
    return _Source(
        launcher,
        rank_variable,
        size_variable,
        rank,
        world_size,
        local_rank,
        local_size,
        num_hosts,
    )


def _world_size(environ: Environ, variable: str, other: str) -> int:
    if variable not in environ:
        raise InvalidWorldSize(f"{other}={environ[other]!r} is set, {variable} is not: set both")
    value = _integer(environ, variable)
    if value is None or value < 1:
        raise InvalidWorldSize(f"{variable}={environ[variable]!r} is no positive number")
    return value


def _rank(environ: Environ, variable: str, size_variable: str, size: int) -> int:
    if variable not in environ:
        raise InvalidRank(
            f"{size_variable}={environ[size_variable]!r} is set, {variable} is not: set both"
        )
    value = _integer(environ, variable)
    if value is None:
        raise InvalidRank(f"{variable}={environ[variable]!r} is no rank (0 or more)")
    if value >= size:
        raise InvalidRank(f"{variable}={value} is no rank of {size} ({size_variable})")
    return value


def _integer(environ: Environ, variable: str) -> int | None:
    # int() would also take "1_0", "+1" and digits of other scripts.
    text = environ.get(variable, "").strip()
    return int(text) if re.fullmatch("[0-9]{1,9}", text) else None


# Where rank 0 is


def _find_addr(sources: list[_Source], addr: str | None, environ: Environ) -> str:
    given = addr if addr is not None else environ.get("FERRO_ADDR")
    if given is None:
        derived = (_derive_addr(source, environ) for source in sources)
        given = next((addr for addr in derived if addr is not None), None)
    if given is None:
        raise NoConnection(
            f"{sources[0]}, and nothing says where rank 0 listens: set FERRO_ADDR=host:port on "
            "every rank, host being where rank 0 runs, or pass addr"
        )
    parse_addresses(given)
    return given


def _derive_addr(source: _Source, environ: Environ) -> str | None:
    if source.launcher in ("arguments", "torchrun"):
        return _torchrun_addr(source, environ)
    job = _job_key(source, environ)
    if job is None:
        return None
    if source.is_single_host:
        return derived_unix_addr(source.launcher, *job)
    if source.launcher == "slurm" and environ.get("SLURM_STEP_NODELIST"):
        return derived_addr(first_host(environ["SLURM_STEP_NODELIST"]), "slurm", *job)
    return None


def _torchrun_addr(source: _Source, environ: Environ) -> str | None:
    host, port = environ.get("MASTER_ADDR"), environ.get("MASTER_PORT")
    if not host or not port:
        return None
    own = format_host_port(host.strip("[]"), _master_port(port))
    run = (environ.get("TORCHELASTIC_RUN_ID", ""), own)
    if source.is_single_host and "TORCHELASTIC_RUN_ID" in environ:
        # The agents of several hosts do not count restarts alike, but here is only one.
        return derived_unix_addr("torchrun", *run, environ.get("TORCHELASTIC_RESTART_COUNT", ""))
    derived = derived_addr(host.strip("[]"), "torchrun", *run)
    # The agent holds MASTER_PORT for its store. Without an agent, it is free unless
    # torch.distributed is in use beside us.
    is_held = environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return derived if is_held else f"{own},{derived}"


def _master_port(text: str) -> int:
    port = _integer({"port": text}, "port")
    if port is None or not 1 <= port <= 65535:
        raise NoConnection(f"MASTER_PORT={text!r} is no port (1 to 65535)")
    return port


def _job_key(source: _Source, environ: Environ) -> tuple[str, ...] | None:
    """Return what all ranks of the job know, and no other job has."""
    if source.launcher == "slurm":
        names = ("SLURM_CLUSTER_NAME", "SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT")
        return tuple(environ.get(name, "") for name in names)
    if source.launcher == "openmpi" and environ.get("PMIX_NAMESPACE"):
        return (environ["PMIX_NAMESPACE"],)
    if source.is_single_host:
        return _launcher_process()
    return None


def _launcher_process() -> tuple[str, ...] | None:
    """Return process id and start time of the launcher that this process descends from."""
    pid = os.getppid()
    while pid > 1:
        try:
            with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
                text = file.read()
        except OSError:
            return None
        name = text[text.index("(") + 1 : text.rindex(")")]
        facts = text[text.rindex(")") + 2 :].split()
        if name in LAUNCHER_PROCESSES:
            return str(pid), facts[19]
        pid = int(facts[1])
    return None


def _epoch(source: _Source, environ: Environ) -> str:
    if source.launcher == "ferrorun":
        return environ.get("FERRO_DIST_EPOCH", "")
    if source.launcher == "torchrun":
        run = environ.get("TORCHELASTIC_RUN_ID", "")
        is_counted = source.is_single_host and "TORCHELASTIC_RESTART_COUNT" in environ
        return f"{run}.{environ['TORCHELASTIC_RESTART_COUNT']}" if is_counted else run
    if source.launcher == "slurm":
        return environ.get("SLURM_RESTART_COUNT", "")
    return ""


def first_host(nodelist: str) -> str:
    """Return the first host of a Slurm node list such as ``"rack[1-2]node[07,09-12],login"``.

    Raises
    ------
    NoConnection
        It is no node list.
    """
    end, depth = len(nodelist), 0
    for at, letter in enumerate(nodelist):
        depth += (letter == "[") - (letter == "]")
        if letter == "," and depth == 0:
            end = at
            break
    # Of each bracket, the first number stands for the first host; it keeps its zeros.
    host = re.sub(r"\[([^\[\],-]+)[^\[\]]*\]", r"\1", nodelist[:end]).strip()
    if not re.fullmatch(r"[A-Za-z0-9_.-]+", host):
        raise NoConnection(f"SLURM_STEP_NODELIST={nodelist!r} is no list of hosts")
    return host
