"""The command line of ferrorun, checked.

getopt stops at the first argument that is no option, which is what keeps the script's
own options out of our way; it also loads faster than argparse.
"""

from __future__ import annotations

import getopt
import os

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

EXIT_USAGE = 2
EXIT_NOT_FOUND = 127

# What the launcher says of a rank; --env may not contradict it.
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
)


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
        self.is_module = False
        self.is_python = True
        self.is_dry_run = False
        self.wants_help = False
        self.command: list[str] = []

    @property
    def world_size(self) -> int:
        """Ranks on all hosts together."""
        return self.nnodes * self.nproc


LONG_OPTIONS = ["nproc=", "module", "no-python", "env=", "bind-to=", "log-dir=", "dry-run"]
LONG_OPTIONS += ["help", "nnodes=", "node-rank=", "rdzv-endpoint="]


def parse(argv: Sequence[str], environ: Mapping[str, str], cores: Sequence[int]) -> Options:
    """Read the command line.

    getopt stops at the first argument that is no option, which is what keeps the
    script's own options out of our way.
    """
    options = Options(cores)
    try:
        pairs, options.command = getopt.getopt(list(argv), "n:mh", LONG_OPTIONS)
    except getopt.GetoptError as error:
        raise LaunchError(f"{error} (see ferrorun --help)") from None
    for name, value in pairs:
        _apply(options, name, value)
    if not options.wants_help:
        _check_hosts(options, environ, is_nproc_given={"-n", "--nproc"} & {n for n, _ in pairs})
        _check_command(options)
    return options


def _apply(options: Options, name: str, value: str) -> None:
    if name in ("-n", "--nproc"):
        options.nproc = _integer(name, value, minimum=1)
    elif name in ("-m", "--module"):
        options.is_module = True
    elif name == "--no-python":
        options.is_python = False
    elif name == "--env":
        key, variable = _env(value)
        options.env[key] = variable
    elif name == "--bind-to":
        if value not in ("core", "none"):
            raise LaunchError(f"--bind-to takes core or none, not {value!r}")
        options.is_bound_to_core = value == "core"
    elif name == "--log-dir":
        options.log_dir = value
    elif name == "--dry-run":
        options.is_dry_run = True
    elif name == "--nnodes":
        options.nnodes = _integer(name, value, minimum=1)
    elif name == "--node-rank":
        options.node_rank = _integer(name, value, minimum=0)
    elif name == "--rdzv-endpoint":
        options.endpoint = _endpoint(value)
    else:
        options.wants_help = True


def _integer(name: str, value: str, minimum: int) -> int:
    if not (value.isascii() and value.isdigit() and int(value) >= minimum):
        raise LaunchError(f"{name} takes a whole number of at least {minimum}, not {value!r}")
    return int(value)


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
    if not (host and separator and port.isascii() and port.isdigit() and 0 < int(port) < 65535):
        raise LaunchError(
            f"--rdzv-endpoint takes host:port with a port from 1 to 65534, not {value!r}"
        )
    return host, int(port)


def _check_hosts(options: Options, environ: Mapping[str, str], is_nproc_given: object) -> None:
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
    if not options.command:
        raise LaunchError("no script given (see ferrorun --help)")
    is_script = options.is_python and not options.is_module
    if is_script and not os.path.exists(options.command[0]):
        raise LaunchError(f"cannot find {options.command[0]}", EXIT_NOT_FOUND)


def usable_cores() -> list[int]:
    """Return the cores this process may run on, no more of them than its CPU quota pays for."""
    cores = sorted(os.sched_getaffinity(0))
    return cores[: max(1, min(len(cores), int(_cpu_quota())))]


def _cpu_quota() -> float:
    """Return how many cores' worth of time the control group grants (v2, else v1)."""
    try:
        with open("/sys/fs/cgroup/cpu.max") as file:
            quota, period = file.read().split()
    except (OSError, ValueError):
        try:
            with open("/sys/fs/cgroup/cpu/cpu.cfs_quota_us") as file:
                quota = file.read()
            with open("/sys/fs/cgroup/cpu/cpu.cfs_period_us") as file:
                period = file.read()
        except OSError:
            return 1e6
    has_limit = quota.strip().isdigit() and int(period) > 0
    return int(quota) / int(period) if has_limit else 1e6
