"""The command line of ferrorun, checked.

Parsed by hand: argparse would take the script's options for ferrorun's own, and it and getopt take
6 ms to load, a quarter of what starting a job may cost.
"""

from __future__ import annotations

import os
import stat

from ferro_dist.cores import count_own

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

EXIT_USAGE = 2
EXIT_NOT_FOUND = 127

# What the engine can name in an error: kMaxWorldSize of csrc/ferro/error.hpp.
MAX_WORLD_SIZE = 8190

# Where the libraries are that --emulate-gpu puts in place of the real ones.
EMULATION_DIR = os.path.join(os.path.dirname(os.path.dirname(__file__)), "_emulation")

# What the launcher tells a rank about itself; --env may not contradict it.
IDENTITY = (
    "FERRO_RANK",
    "FERRO_WORLD_SIZE",
    "FERRO_LOCAL_RANK",
    "FERRO_LOCAL_WORLD_SIZE",
    "FERRO_ADDR",
    "FERRO_LISTEN_FD",
    "FERRO_DIST_EPOCH",
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "GROUP_RANK",
    "GROUP_WORLD_SIZE",
    "ROLE_RANK",
    "ROLE_WORLD_SIZE",
)

# What is behind these names differs from process to process: only rank 0 has the standard input.
_STREAMS = ("/dev/stdin", "/dev/fd/", "/proc/self/fd/")


class LaunchError(Exception):
    """The job cannot be started; `exit_code` says by whose fault."""

    def __init__(self, message: str, exit_code: int = EXIT_USAGE) -> None:
        super().__init__(message)
        self.exit_code = exit_code


class Options:
    """The command line, checked and with its defaults filled in."""

    def __init__(self, cores: Sequence[int]) -> None:
        self.cores = cores
        self.nproc = len(cores)
        self.nnodes = 1
        self.node_rank = 0
        self.endpoint: tuple[str, int] | None = None
        self.token = ""
        self.env: dict[str, str] = {}
        self.is_bound_to_core = False
        self.log_dir: str | None = None
        self.emulates_gpu = False
        self.keeps_going = False
        self.is_module = False
        self.is_python = True
        self.is_dry_run = False
        self.wants_help = False
        self.wants_version = False
        self.command: list[str] = []

    @property
    def world_size(self) -> int:
        """Ranks on all hosts together."""
        return self.nnodes * self.nproc


SHORT_NAMES = {"-n": "--nproc", "-m": "--module", "-h": "--help"}
# As mpiexec and torchrun call it.
ALIASES = {"-np": "--nproc", "--nproc-per-node": "--nproc", "--nproc_per_node": "--nproc"}
# Without a value: the attribute of Options that each sets, and to what.
FLAGS = {
    "--module": ("is_module", True),
    "--no-python": ("is_python", False),
    "--emulate-gpu": ("emulates_gpu", True),
    "--keep-going": ("keeps_going", True),
    "--dry-run": ("is_dry_run", True),
    "--help": ("wants_help", True),
    "--version": ("wants_version", True),
}
TAKING_VALUES = (
    "--nproc",
    "--env",
    "--bind-to",
    "--log-dir",
    "--nnodes",
    "--node-rank",
    "--rdzv-endpoint",
)


def parse(argv: Sequence[str], environ: Mapping[str, str], cores: Sequence[int]) -> Options:
    """Read the options up to the script, and check that they go together."""
    options = Options(cores)
    pairs, options.command = _split(argv)
    for name, value in pairs:
        _apply(options, name, value)
    if not (options.wants_help or options.wants_version):
        _check_hosts(options, environ, is_nproc_given="--nproc" in dict(pairs))
        _check_command(options)
        _check_emulation(options)
    return options


def _split(argv: Sequence[str]) -> tuple[list[tuple[str, str]], list[str]]:
    """Return ferrorun's options as pairs of long name and value, and the words after them."""
    pairs = []
    words = list(argv)
    while words and words[0].startswith("-") and words[0] != "-":
        word = words.pop(0)
        if word == "--":
            break
        name, has_value, value = _name_and_value(word)
        if name not in FLAGS and name not in TAKING_VALUES:
            raise LaunchError(f"there is no option {name} (see ferrorun --help)")
        if has_value and name in FLAGS:
            raise LaunchError(f"{name} takes no value")
        if not has_value and name in TAKING_VALUES:
            if not words:
                raise LaunchError(f"{name} needs a value (see ferrorun --help)")
            value = words.pop(0)
        pairs.append((name, value))
    return pairs, words


def _name_and_value(word: str) -> tuple[str, bool, str]:
    if word.startswith("--") or word in ALIASES:
        name, separator, value = word.partition("=")
        return ALIASES.get(name, name), bool(separator), value
    return SHORT_NAMES.get(word[:2], word[:2]), len(word) > 2, word[2:]


def _apply(options: Options, name: str, value: str) -> None:
    if name in FLAGS:
        setattr(options, *FLAGS[name])
    elif name == "--nproc":
        options.nproc = _integer(name, value, minimum=1)
    elif name == "--env":
        key, variable = _env(value)
        options.env[key] = variable
    elif name == "--bind-to":
        if value not in ("core", "none"):
            raise LaunchError(f"--bind-to takes core or none, not {value!r}")
        options.is_bound_to_core = value == "core"
    elif name == "--log-dir":
        options.log_dir = value
    elif name == "--nnodes":
        options.nnodes = _integer(name, value, minimum=1)
    elif name == "--node-rank":
        options.node_rank = _integer(name, value, minimum=0)
    else:
        options.endpoint = _endpoint(value)


def _integer(name: str, value: str, minimum: int) -> int:
    if not (_is_number(value) and int(value) >= minimum):
        raise LaunchError(f"{name} takes a whole number of at least {minimum}, not {value!r}")
    return int(value)


def _is_number(text: str) -> bool:
    # Thousands of digits are too many for int().
    return text.isascii() and text.isdigit() and len(text) < 10


def _env(value: str) -> tuple[str, str]:
    key, separator, variable = value.partition("=")
    if not (key and separator):
        raise LaunchError(f"--env takes KEY=VALUE, not {value!r}")
    if key in IDENTITY:
        raise LaunchError(f"--env may not set {key}: ferrorun gives each rank its own")
    return key, variable


def _endpoint(value: str) -> tuple[str, int]:
    host, separator, port = value.rpartition(":")
    host = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    # One below the limit: MASTER_PORT is the next port.
    if not (host and separator and _is_number(port) and 0 < int(port) < 65535):
        raise LaunchError(
            f"--rdzv-endpoint takes host:port with a port from 1 to 65534, not {value!r}"
        )
    return host, int(port)


def _check_hosts(options: Options, environ: Mapping[str, str], is_nproc_given: bool) -> None:
    if options.world_size > MAX_WORLD_SIZE:
        raise LaunchError(f"a job has at most {MAX_WORLD_SIZE} ranks, not {options.world_size}")
    if options.node_rank >= options.nnodes:
        raise LaunchError(f"--node-rank {options.node_rank} is not below --nnodes {options.nnodes}")
    if options.nnodes == 1:
        return
    if options.endpoint is None:
        raise LaunchError("--nnodes needs --rdzv-endpoint host:port, an address of host 0")
    if not is_nproc_given:
        raise LaunchError("--nnodes needs -n, the same on every host")
    options.token = options.env.get("FERRO_DIST_TOKEN", environ.get("FERRO_DIST_TOKEN", ""))
    if not options.token:
        raise LaunchError(
            "several hosts need a shared secret: set FERRO_DIST_TOKEN to the same random text "
            "on each of them, for example the output of: openssl rand -hex 32"
        )


def _check_command(options: Options) -> None:
    if options.is_module and not options.is_python:
        raise LaunchError("-m and --no-python exclude each other")
    if not options.command or not options.command[0]:  # the latter from a shell's unset variable
        raise LaunchError("no script given (see ferrorun --help)")
    if options.is_python and not options.is_module:
        script = options.command[0]
        if _is_stream(script) and options.nproc > 1:
            raise LaunchError(
                f"only one rank could read the script from {script}: write it to a file"
            )


def _is_stream(script: str) -> bool:
    """Tell what can be read only once from a file; raise if there is neither."""
    if script == "-" or os.path.normpath(script).startswith(_STREAMS):
        return True
    try:
        return stat.S_ISFIFO(os.stat(script).st_mode)
    except (OSError, ValueError):
        raise LaunchError(_not_found(script), EXIT_NOT_FOUND) from None


def _not_found(script: str) -> str:
    import shutil  # not when all is well: it would delay every start

    if shutil.which(script) is None:
        return f"cannot find {script}"
    return (
        f"cannot find a script {script}. It is a command: ferrorun runs scripts with Python "
        "itself, and commands after --no-python"
    )


def _check_emulation(options: Options) -> None:
    if not options.emulates_gpu:
        return
    if options.nnodes > 1:
        raise LaunchError("--emulate-gpu works on one host: emulated GPUs share its memory")
    if not os.path.exists(os.path.join(EMULATION_DIR, "libnccl.so.2")):
        raise LaunchError(
            f"the emulated libnccl.so.2 was not built: it is missing in {EMULATION_DIR}"
        )


def usable_cores() -> list[int]:
    """Return the cores that this process may run on, as many as its CPU quota allows."""
    return sorted(os.sched_getaffinity(0))[: count_own()]
