"""ferrorun: start the ranks of a job on this host, and leave nothing behind.

Three kinds of process take part. Any of them may be killed at any moment.

front
    What the user's shell started. It owns the terminal and turns each signal into
    one byte on the control pipe.
supervisor
    The front's child, in a process group of its own, out of reach of the terminal.
    It starts the ranks, copies their output and reaps them. End of file on the
    control pipe means that the front is dead: everything is killed.
ranks
    The supervisor's children, each in its own process group. The kernel kills them
    when the supervisor dies (PR_SET_PDEATHSIG).

Front and supervisor are both subreapers: a process that a rank left behind, even one
that made itself a daemon, becomes the child of whichever of the two is alive, where it
is found and stopped.

This module imports neither the rest of ferro_dist nor argparse, dataclasses, typing or
subprocess, which would take longer to load than two ranks take to start.
"""

from __future__ import annotations

import ctypes
import errno
import getopt
import os
import select
import signal
import socket
import sys
import time
from collections import deque

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from typing import NoReturn

__all__ = ["main"]

USAGE = """\
usage: ferrorun [options] script.py [arguments]
       ferrorun [options] -m module [arguments]
       ferrorun [options] --no-python command [arguments]

Start the ranks of a job on this host. Each line of their output is marked with the
rank it comes from. The first rank that fails ends the job: its exit code is the job's.
Processes that the ranks leave behind are stopped when the last rank has ended.

  -n, --nproc N          ranks on this host (default: its usable cores)
  -m, --module           run a module, as python -m does
      --no-python        run any command instead of a Python script
      --env KEY=VALUE    set a variable for every rank; may be repeated
      --bind-to core     bind each rank to one core, in turn (default: none)
      --log-dir DIR      also write each rank's output to DIR/rank<N>.log
      --dry-run          print what would be run, and run nothing
  -h, --help             print this text

Several hosts; run ferrorun once on each, with the same -n and FERRO_DIST_TOKEN:
      --nnodes N               number of hosts (default: 1)
      --node-rank I            which of them this is, from 0 (default: 0)
      --rdzv-endpoint H:P      address of host 0 and a free port there; the next port
                               is announced as MASTER_PORT

exit code: the first failing rank's (128 + number for a signal); 2 for a bad option;
127 for a command that cannot be found, 126 for one that cannot be run; 141 when
nobody reads the output any more.
"""

EXIT_USAGE = 2
EXIT_CANNOT_LISTEN = 1
EXIT_CANNOT_WRITE = 1
EXIT_CANNOT_RUN = 126
EXIT_NOT_FOUND = 127
EXIT_SIGNALLED = 128  # plus the signal's number

# SIGTERM to SIGKILL. With the kill itself, stragglers are gone within 5 s.
GRACE_S = 4.0
# SIGKILL to giving up on a process that the kernel does not let die (state D).
UNKILLABLE_S = 2.0
# A terminal shows an unfinished line (a prompt, a progress bar) after this long.
PARTIAL_LINE_S = 0.1

READ_NBYTES = 1 << 16
# Ranks that write faster than the reader reads are held up beyond this.
QUEUE_NBYTES = 1 << 20
# Longer lines are broken, so that a rank which never ends one cannot exhaust memory.
LINE_NBYTES = 1 << 26
# poll() promises that this much can be written to a pipe without blocking.
PIPE_NBYTES = select.PIPE_BUF
LAST_LINE_LENGTH = 300

STOPPING = frozenset({signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM})
FORWARDED = STOPPING | {signal.SIGUSR1, signal.SIGUSR2, signal.SIGTSTP, signal.SIGCONT}
FROM_TERMINAL = 0x80  # set in a control byte, beside the signal's number
SI_KERNEL = 0x80  # siginfo's si_code of a signal that the terminal sent

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36

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
# What an outer launcher said of us; it is not true of our ranks.
FOREIGN_IDENTITY: tuple[str, ...] = ("SLURM_PROCID", "SLURM_LOCALID", "SLURM_STEP_NUM_TASKS")
FOREIGN_IDENTITY += ("MPI_LOCALRANKID", "MPI_LOCALNRANKS", "FERRO_LISTEN_FD")
FOREIGN_PREFIXES = ("OMPI_COMM_WORLD_", "PMI_", "PMIX_", "TORCHELASTIC_")

COLOURS = (36, 33, 32, 35, 34, 96, 93, 92, 95, 94)


class LaunchError(Exception):
    """The job cannot be started; `exit_code` says by whose fault."""

    def __init__(self, message: str, exit_code: int = EXIT_USAGE) -> None:
        super().__init__(message)
        self.exit_code = exit_code


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv` (default: ``sys.argv[1:]``) and return the exit code."""
    open_standard_fds()
    try:
        options = parse(sys.argv[1:] if argv is None else argv, os.environ, usable_cores())
        if options.wants_help:
            print(USAGE, end="")
            return 0
        if options.is_dry_run:
            print(describe(plan(options, Rendezvous.placeholder(options), os.environ)))
            return 0
    except LaunchError as error:
        print(f"ferrorun: {error}", file=sys.stderr)
        return error.exit_code
    return run_job(options)


# Parse: the command line, checked.


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


# Plan: what each rank is started with. Pure, and what --dry-run shows.


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
        """Return what --dry-run shows: nothing is bound, and no secret is printed."""
        if options.endpoint is None:
            return cls("127.0.0.1:<port>", "127.0.0.1", "<port>", "<secret>", "<fd>")
        host, port = options.endpoint
        fd = "<fd>" if options.node_rank == 0 else None
        return cls(join_host_port(host, port), host, str(port + 1), "<secret>", fd)


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
    argv = [*python, *(["-m"] if options.is_module else []), *options.command]
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
    # The torchrun variables are for programs that know nothing of ferro_dist.
    identity = {
        "RANK": str(rank),
        "WORLD_SIZE": str(options.world_size),
        "LOCAL_RANK": str(local_rank),
        "LOCAL_WORLD_SIZE": str(options.nproc),
    }
    env = {f"FERRO_{key}": value for key, value in identity.items()} | identity
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
    return env | options.env


def _is_foreign(key: str) -> bool:
    return key in FOREIGN_IDENTITY or key.startswith(FOREIGN_PREFIXES)


def _core(options: Options, local_rank: int) -> int | None:
    if not options.is_bound_to_core:
        return None
    return options.cores[local_rank % len(options.cores)]


def describe(commands: Iterable[RankCommand]) -> str:
    """Return the commands as lines that a shell accepts, for --dry-run."""
    import shlex

    lines = []
    for command in commands:
        place = "" if command.core is None else f", bound to core {command.core}"
        lines.append(f"# rank {command.rank}{place}")
        unset = [word for key in command.unset for word in ("-u", key)]
        pairs = [f"{key}={value}" for key, value in command.env.items()]
        lines.append(shlex.join(["env", *unset, *pairs, *command.argv]))
    return "\n".join(lines)


def join_host_port(host: str, port: int) -> str:
    """Return ``host:port``, with brackets around an IPv6 address."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


# Listen: the ports, taken before a rank exists so that no other process can.


def listen(options: Options) -> tuple[Rendezvous, list[socket.socket]]:
    """Take the job's ports.

    Rank 0 inherits the listening socket. MASTER_PORT is for torch, which insists on
    binding it itself: a bound socket that does not listen keeps the kernel from
    giving the port to others, and SO_REUSEADDR lets torch have it nevertheless.

    Returns
    -------
    rendezvous : Rendezvous
    sockets : list of socket
        The listening socket first, if this host has rank 0; keep the rest open for
        as long as the job runs.
    """
    token = options.token or os.urandom(32).hex()
    if options.endpoint is None:
        listener, master = _bind("127.0.0.1", 0), _bind("127.0.0.1", 0)
        listener.listen(socket.SOMAXCONN)
        addr = join_host_port("127.0.0.1", listener.getsockname()[1])
        master_port, fd = str(master.getsockname()[1]), str(listener.fileno())
        return Rendezvous(addr, "127.0.0.1", master_port, token, fd), [listener, master]
    host, port = options.endpoint
    addr, master_port = join_host_port(host, port), str(port + 1)
    if options.node_rank > 0:
        return Rendezvous(addr, host, master_port, token, None), []
    listener = _bind(host, port)
    listener.listen(socket.SOMAXCONN)
    return Rendezvous(addr, host, master_port, token, str(listener.fileno())), [listener]


def _bind(host: str, port: int) -> socket.socket:
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, kind, protocol, _, address = found[0]
        bound = socket.socket(family, kind, protocol)
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
    except OSError as error:
        raise LaunchError(
            f"cannot listen on {join_host_port(host, port)}: {error.strerror}. "
            "Host 0 needs an address of its own and a free port there.",
            EXIT_CANNOT_LISTEN,
        ) from None
    return bound


# Front: the process that the shell started.


class InheritedSignals:
    """How signals were handled before we came, for the ranks to have it so again."""

    def __init__(self) -> None:
        self.ignored = {s for s in FORWARDED if signal.getsignal(s) is signal.SIG_IGN}
        # A signal ignored by nohup or a shell's & stays ignored.
        self.forwarded = FORWARDED - self.ignored
        # If it was ignored, the kernel would reap the children before we can.
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        # Blocked before the fork: none is lost in between, and the front takes them
        # one by one with sigwaitinfo, which tells who sent them.
        self.mask = signal.pthread_sigmask(signal.SIG_BLOCK, self.forwarded | {signal.SIGCHLD}) - {
            signal.SIGCHLD
        }

    def shield_supervisor(self) -> None:
        """Leave the front's signals to the front, even where both are sent one by name."""
        for signum in FORWARDED - {signal.SIGCONT}:
            signal.signal(signum, signal.SIG_IGN)
        # Writing to the terminal from the background must not stop us.
        signal.signal(signal.SIGTTOU, signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_SETMASK, self.mask)

    def restore_in_rank(self) -> None:
        """Undo `shield_supervisor`, and what Python does to signals when it starts."""
        ours = {signal.SIGPIPE, signal.SIGXFSZ, signal.SIGTTOU, signal.SIGCHLD}
        for signum in (FORWARDED | ours) - self.ignored:
            signal.signal(signum, signal.SIG_DFL)


def run_job(options: Options) -> int:
    """Fork the supervisor and stand in front of it; return the job's exit code."""
    signals = InheritedSignals()
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    control_read, control_write = os.pipe()
    # A rank that reads the terminal must be in the foreground group, which is ours.
    terminal_group = os.getpgrp() if os.isatty(0) else None
    supervisor = os.fork()
    if supervisor == 0:
        os.close(control_write)
        _exit_with(lambda: supervise(options, signals, control_read, terminal_group))
    os.close(control_read)
    status = _relay_signals(supervisor, control_write, signals.forwarded)
    _bury_descendants()
    if status >= 0:
        return status
    print(f"ferrorun: the supervisor was killed by {name_of(-status)}", file=sys.stderr)
    return EXIT_SIGNALLED - status


def _relay_signals(supervisor: int, control: int, forwarded: frozenset[signal.Signals]) -> int:
    """Pass every signal on until the supervisor ends; return its exit status."""
    while True:
        info = signal.sigwaitinfo(forwarded | {signal.SIGCHLD})
        if info.si_signo == signal.SIGCHLD:
            pid, status = os.waitpid(supervisor, os.WNOHANG)
            if pid == supervisor:
                return os.waitstatus_to_exitcode(status)
            continue
        origin = FROM_TERMINAL if info.si_code == SI_KERNEL else 0
        try:
            os.write(control, bytes([info.si_signo | origin]))
        except BrokenPipeError:
            continue  # It has just ended: SIGCHLD is next.
        if info.si_signo == signal.SIGTSTP:
            os.kill(os.getpid(), signal.SIGSTOP)


def _bury_descendants() -> None:
    """Kill what a killed supervisor left behind; its children have become ours."""
    deadline = time.monotonic() + UNKILLABLE_S
    while time.monotonic() < deadline:
        kill_all(descendants(os.getpid()), signal.SIGKILL)
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return
        signal.sigtimedwait({signal.SIGCHLD}, 0.1)


def _exit_with(body: Callable[[], int]) -> NoReturn:
    """End a forked process with what `body` returns, never returning into the parent's code."""
    code = 70
    try:
        code = body()
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        os._exit(code)
    raise AssertionError("unreachable")


# Supervisor: starts the ranks, copies their output, reaps them.


def supervise(
    options: Options,
    signals: InheritedSignals,
    control: int,
    terminal_group: int | None,
) -> int:
    """Run the job in the supervisor's process; return its exit code."""
    signals.shield_supervisor()
    os.setpgid(0, 0)
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    output = Output(os.environ)
    try:
        rendezvous, sockets = listen(options)
        logs = open_logs(options)
    except LaunchError as error:
        print(f"ferrorun: {error}", file=sys.stderr)
        return error.exit_code
    commands = plan(options, rendezvous, os.environ)
    spawner = Spawner(signals, terminal_group, sockets)
    return Job(commands, spawner, output, logs, control).run()


class Log:
    """The file that keeps one rank's output as the rank wrote it."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._fd: int | None = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)

    def write(self, text: bytes) -> str | None:
        """Append `text`; on failure close the file and return why."""
        if self._fd is None:
            return None
        try:
            while text:
                text = text[os.write(self._fd, text) :]
        except OSError as error:
            os.close(self._fd)
            self._fd = None
            return f"{self.path} ends here: {error.strerror}"
        return None


def open_logs(options: Options) -> list[Log] | None:
    """Create the directory and a file per rank, or raise before any rank is started."""
    if options.log_dir is None:
        return None
    first = options.node_rank * options.nproc
    try:
        os.makedirs(options.log_dir, exist_ok=True)
        return [
            Log(os.path.join(options.log_dir, f"rank{rank}.log"))
            for rank in range(first, first + options.nproc)
        ]
    except OSError as error:
        message = f"cannot write to --log-dir: {error.filename}: {error.strerror}"
        raise LaunchError(message, EXIT_CANNOT_WRITE) from None


class Stream:
    """Standard output or error of one rank, cut into lines."""

    def __init__(self, fd: int, target: int, rank: int, log: Log | None) -> None:
        os.set_blocking(fd, False)
        self.fd = fd
        self.target = target  # the launcher's descriptor of the same kind
        self.rank = rank
        self.log = log
        self.last_line = b""
        self._partial: list[bytes] = []
        self._partial_nbytes = 0

    @property
    def has_partial(self) -> bool:
        """Whether an unfinished line waits for its end."""
        return self._partial_nbytes > 0

    def read(self) -> bytes | None:
        """Return what is there; empty at the end of the stream, None if it has nothing now."""
        try:
            return os.read(self.fd, READ_NBYTES)
        except BlockingIOError:
            return None

    def feed(self, data: bytes) -> bytes:
        """Take `data` in and return the lines that it completes."""
        end = data.rfind(b"\n") + 1
        lines = self.take_partial() + data[:end] if end else b""
        if end < len(data):
            self._partial.append(data[end:])
            self._partial_nbytes += len(data) - end
        if self._partial_nbytes > LINE_NBYTES:
            lines += self.take_partial() + b"\n"
        if lines:
            self._remember_last_line(lines)
        return lines

    def take_partial(self) -> bytes:
        """Give up the unfinished line, however long it took to come."""
        partial = b"".join(self._partial)
        self._partial.clear()
        self._partial_nbytes = 0
        self._remember_last_line(partial)
        return partial

    def _remember_last_line(self, text: bytes) -> None:
        line = text.rstrip().rpartition(b"\n")[2]
        if line:
            self.last_line = line


class Output:
    """The launcher's own standard output and error.

    Everything goes through one queue, so that what the ranks write to the two keeps
    its order and no line is cut by another, even where both lead to the same place.
    Nothing here blocks: a job whose output nobody reads still obeys signals.
    """

    def __init__(self, environ: Mapping[str, str]) -> None:
        self._queue: deque[tuple[int, memoryview]] = deque()
        self._queued_nbytes = 0
        self._terminals = {fd for fd in (1, 2) if os.isatty(fd)}
        self._has_colour = not environ.get("NO_COLOR") and environ.get("TERM") != "dumb"
        self._unfinished: Stream | None = None  # whose line the terminal's cursor is in
        self._broken: set[int] = set()
        self.error: OSError | None = None

    @property
    def blocked_fd(self) -> int | None:
        """Where the queue's head is to go, None if the queue is empty."""
        return self._queue[0][0] if self._queue else None

    @property
    def is_full(self) -> bool:
        """Whether the ranks must wait for the reader."""
        return self._queued_nbytes > QUEUE_NBYTES

    def shows_partial_lines(self, stream: Stream) -> bool:
        """Whether a person may be waiting for a line that has no end yet."""
        return stream.target in self._terminals

    def write(self, stream: Stream, text: bytes) -> None:
        """Show lines of a rank, each with its mark; the last one may be unfinished."""
        mark = self._mark(stream)
        is_continued = self._unfinished is stream
        self.end_line(unless=stream)
        ends_here = text.endswith(b"\n")
        body = text[:-1] if ends_here else text
        body = body.replace(b"\n", b"\n" + mark)
        if stream.target in self._terminals:
            # What a progress bar overwrites includes the mark.
            body = body.replace(b"\r", b"\r" + mark)
        self._put(stream.target, b"".join((b"" if is_continued else mark, body, text[len(body) :])))
        self._unfinished = None if ends_here else stream

    def end_line(self, unless: Stream | None = None) -> None:
        """Finish the line that the cursor is in, if it is another stream's."""
        if self._unfinished is not None and self._unfinished is not unless:
            self._put(self._unfinished.target, b"\n")
            self._unfinished = None

    def say(self, message: str) -> None:
        """Write a line of the launcher's own to standard error."""
        self.end_line()
        self._put(2, f"ferrorun: {message}\n".encode(errors="surrogateescape"))

    def flush(self) -> None:
        """Write as much as can be written without blocking."""
        while self._queue and _is_writable(self._queue[0][0]):
            fd, data = self._queue.popleft()
            try:
                written = os.write(fd, data[:PIPE_NBYTES])
            except OSError as error:
                self._break(fd, error)
                return
            self._queued_nbytes -= written
            if written < len(data):
                self._queue.appendleft((fd, data[written:]))

    def drop(self) -> None:
        """Forget what has not been written, and all that would follow."""
        self._broken = {1, 2}
        self._queue.clear()
        self._queued_nbytes = 0

    def _put(self, fd: int, data: bytes) -> None:
        if fd not in self._broken:
            self._queue.append((fd, memoryview(data)))
            self._queued_nbytes += len(data)

    def _break(self, fd: int, error: OSError) -> None:
        self.error = self.error or error
        self._broken.add(fd)
        self._queue = deque(item for item in self._queue if item[0] != fd)
        self._queued_nbytes = sum(len(data) for _, data in self._queue)

    def _mark(self, stream: Stream) -> bytes:
        if not (self._has_colour and stream.target in self._terminals):
            return b"[%d] " % stream.rank
        return b"\x1b[%dm[%d]\x1b[0m " % (COLOURS[stream.rank % len(COLOURS)], stream.rank)


class Rank:
    """A rank that was started."""

    def __init__(
        self, command: RankCommand, pid: int, streams: list[Stream], error_fd: int, has_group: bool
    ) -> None:
        self.command = command
        self.pid = pid
        self.streams = streams  # standard output, standard error
        self.has_group = has_group
        self.status = 0  # once it has ended: its exit code, or minus the signal
        self._error_fd = error_fd

    def start_error(self) -> int:
        """Wait until the command runs; return the errno if it cannot, else 0."""
        message = os.read(self._error_fd, 16)
        os.close(self._error_fd)
        return int(message or b"0")

    def signal(self, signum: int) -> None:
        """Send a signal to the rank and to what it started in its process group."""
        try:
            if self.has_group:
                os.killpg(self.pid, signum)
            else:
                os.kill(self.pid, signum)
        except ProcessLookupError:
            pass

    def last_words(self) -> str:
        """Return ``": "`` and the last line of standard error, or nothing if there is none."""
        import re

        line = self.streams[1].last_line[-4 * LAST_LINE_LENGTH :].decode(errors="replace")
        line = re.sub(r"\x1b\[[0-?]*[ -/]*[@-~]", "", line)
        line = "".join(c for c in line if c.isprintable()).strip()
        return f": {line[:LAST_LINE_LENGTH]}" if line else ""


class Spawner:
    """Forks the ranks. Only the main thread may: PR_SET_PDEATHSIG looks at the thread."""

    def __init__(
        self,
        signals: InheritedSignals,
        terminal_group: int | None,
        sockets: list[socket.socket],
    ) -> None:
        self._signals = signals
        self._terminal_group = terminal_group
        self._sockets = sockets
        self._supervisor = os.getpid()
        self._devnull = os.open(os.devnull, os.O_RDONLY)

    def start(self, command: RankCommand, log: Log | None) -> Rank:
        """Fork one rank; `Rank.start_error` tells whether its command could be run."""
        has_stdin = command.rank == 0
        group = self._terminal_group if has_stdin else None
        out_read, out_write = os.pipe()
        err_read, err_write = os.pipe()
        error_read, error_write = os.pipe()
        pid = os.fork()
        if pid == 0:
            stdin = 0 if has_stdin else self._devnull
            _exit_with(
                lambda: self._become(command, group, (stdin, out_write, err_write), error_write)
            )
        _set_group(pid, group)
        for fd in (out_write, err_write, error_write):
            os.close(fd)
        streams = [
            Stream(out_read, 1, command.rank, log),
            Stream(err_read, 2, command.rank, log),
        ]
        return Rank(command, pid, streams, error_read, has_group=group is None)

    def release(self) -> None:
        """Close what is now the ranks' alone; MASTER_PORT stays taken."""
        for listener in self._sockets[:1]:
            listener.close()
        os.dup2(self._devnull, 0)

    def _become(
        self, command: RankCommand, group: int | None, stdio: tuple[int, int, int], error_fd: int
    ) -> int:
        """Turn this forked process into the rank; return only if that fails."""
        try:
            _set_group(0, group)
            prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() != self._supervisor:
                return EXIT_SIGNALLED + signal.SIGKILL  # It died before the prctl.
            for target, fd in enumerate(stdio):
                os.dup2(fd, target)
            if "FERRO_LISTEN_FD" in command.env:
                os.set_inheritable(int(command.env["FERRO_LISTEN_FD"]), True)
            if command.core is not None:
                os.sched_setaffinity(0, {command.core})
            self._signals.restore_in_rank()
            os.execvpe(command.argv[0], command.argv, command.environment(os.environ))
        except OSError as error:
            os.write(error_fd, b"%d" % (error.errno or errno.EIO))
        return EXIT_CANNOT_RUN


class Job:
    """The running job: a single loop over output, signals and ends of processes."""

    def __init__(
        self,
        commands: list[RankCommand],
        spawner: Spawner,
        output: Output,
        logs: list[Log] | None,
        control: int,
    ) -> None:
        self._commands = commands
        self._spawner = spawner
        self._output = output
        self._logs = logs
        self._control: int | None = control
        self._wakeup = _wake_on_sigchld()
        self._ranks: dict[int, Rank] = {}  # the living, by process id
        self._streams: dict[int, Stream] = {}  # the open ones, by descriptor
        self._exit_code: int | None = None  # settled by the first thing that goes wrong
        self._reason = ""
        self._culprit: Rank | None = None
        self._interrupts = 0
        self._was_told_to_stop = False
        self._is_killing = False
        self._deadline: float | None = None  # of the step that is under way
        self._is_finished = False

    def run(self) -> int:
        """Start the ranks, see the job through to its end, and return its exit code."""
        self._start()
        while not (self._is_finished and self._output.blocked_fd is None):
            self._step()
        return self._exit_code or 0

    # Start and end.

    def _start(self) -> None:
        try:
            for index, command in enumerate(self._commands):
                rank = self._spawner.start(command, self._logs[index] if self._logs else None)
                self._ranks[rank.pid] = rank
                self._streams.update((stream.fd, stream) for stream in rank.streams)
        except OSError as error:
            number = len(self._ranks) + self._commands[0].rank
            self._settle(EXIT_CANNOT_RUN, f"cannot start rank {number}: {error.strerror}")
            self._kill()
        self._spawner.release()
        for rank in self._ranks.values():
            self._check_started(rank)
        self._reap()

    def _check_started(self, rank: Rank) -> None:
        error = rank.start_error()
        if not error:
            return
        name = rank.command.argv[0]
        if error == errno.ENOENT:
            self._settle(EXIT_NOT_FOUND, f"cannot find {name}")
        else:
            self._settle(EXIT_CANNOT_RUN, f"cannot run {name}: {os.strerror(error)}")
        self._kill()

    def _settle(self, exit_code: int, reason: str, culprit: Rank | None = None) -> None:
        """Decide how the job ends, unless that is decided already."""
        if self._exit_code is None:
            self._exit_code, self._reason, self._culprit = exit_code, reason, culprit

    def _finish(self) -> None:
        """Show the rest of the output, and last of all why the job ended."""
        for stream in list(self._streams.values()):
            # A process beyond our reach may hold the other end: do not wait for it.
            while self._read(stream):
                pass
            self._close(stream)
        self._output.end_line()
        if self._reason:
            words = self._culprit.last_words() if self._culprit else ""
            self._output.say(self._reason + words)
        self._deadline = None
        self._is_finished = True

    # The loop.

    def _step(self) -> None:
        ready = self._wait()
        for fd in [fd for fd in self._streams if fd in ready]:
            self._read(self._streams[fd])
        if not ready:
            self._show_partial_lines()
        if self._control in ready:
            self._obey()
        if self._wakeup in ready:
            os.read(self._wakeup, READ_NBYTES)
            self._reap()
        if self._deadline is not None and time.monotonic() >= self._deadline:
            self._expire()
        self._output.flush()
        if self._output.error is not None:
            self._lose_output(self._output.error)

    def _wait(self) -> set[int]:
        poller = select.poll()
        poller.register(self._wakeup, select.POLLIN)
        if self._control is not None:
            poller.register(self._control, select.POLLIN)
        for fd in () if self._output.is_full else self._streams:
            poller.register(fd, select.POLLIN)
        if self._output.blocked_fd is not None:
            poller.register(self._output.blocked_fd, select.POLLOUT)
        return {fd for fd, _ in poller.poll(self._timeout_ms())}

    def _timeout_ms(self) -> float | None:
        timeouts = [] if self._deadline is None else [self._deadline - time.monotonic()]
        if any(self._waits_to_be_shown(stream) for stream in self._streams.values()):
            timeouts.append(PARTIAL_LINE_S)
        return max(0.0, min(timeouts) * 1e3) if timeouts else None

    # Output.

    def _read(self, stream: Stream) -> bool:
        """Take in what the stream has now; return whether there may be more."""
        data = stream.read()
        if data == b"":
            self._close(stream)
        elif data:
            self._emit(stream, stream.feed(data))
        return bool(data)

    def _emit(self, stream: Stream, text: bytes) -> None:
        if not text:
            return
        self._output.write(stream, text)
        failure = stream.log.write(text) if stream.log else None
        if failure:
            self._output.say(failure)

    def _close(self, stream: Stream) -> None:
        if self._streams.pop(stream.fd, None) is None:
            return
        os.close(stream.fd)
        if stream.has_partial:
            self._emit(stream, stream.take_partial() + b"\n")

    def _waits_to_be_shown(self, stream: Stream) -> bool:
        return stream.has_partial and self._output.shows_partial_lines(stream)

    def _show_partial_lines(self) -> None:
        for stream in self._streams.values():
            if self._waits_to_be_shown(stream):
                self._emit(stream, stream.take_partial())

    def _lose_output(self, error: OSError) -> None:
        """Stop the job: nobody reads its output any more, or there is no room for it."""
        self._output.error = None
        if error.errno == errno.EPIPE:
            self._settle(EXIT_SIGNALLED + signal.SIGPIPE, "")
        else:
            self._settle(EXIT_CANNOT_WRITE, f"cannot write the ranks' output: {error.strerror}")
        self._stop()

    # Signals.

    def _obey(self) -> None:
        """Do what the front says, or what its end means."""
        assert self._control is not None
        orders = os.read(self._control, PIPE_NBYTES)
        for order in orders:
            self._forward(signal.Signals(order & ~FROM_TERMINAL), bool(order & FROM_TERMINAL))
        if not orders:
            self._control = None
            self._settle(EXIT_SIGNALLED + signal.SIGKILL, "")
            self._output.drop()
            self._kill()

    def _forward(self, signum: signal.Signals, is_from_terminal: bool) -> None:
        self._was_told_to_stop |= signum in STOPPING
        self._interrupts += signum == signal.SIGINT
        for rank in self._ranks.values():
            # The terminal has told its foreground group itself.
            if rank.has_group or not is_from_terminal:
                rank.signal(signum)
        if self._interrupts > 1:
            self._settle(EXIT_SIGNALLED + signal.SIGINT, "interrupted twice: killed all ranks")
            self._kill()
        if self._is_finished and signum in STOPPING:
            self._settle(EXIT_SIGNALLED + signum, "")
            self._output.drop()  # It only waited for a reader.

    # Ends of processes.

    def _reap(self) -> None:
        """Collect every process that has ended, ours and those left to us."""
        ended = []
        has_children = True
        while has_children:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                has_children = False
                break
            if pid == 0:
                break
            if pid in self._ranks:
                rank = self._ranks.pop(pid)
                rank.status = os.waitstatus_to_exitcode(status)
                ended.append(rank)
        self._judge(ended)
        if has_children:
            self._stop_leftovers()
        elif not self._is_finished:
            self._finish()

    def _judge(self, ended: list[Rank]) -> None:
        # The kernel does not tell which of them was first. One that crashed is likelier
        # the cause than one that reports an error, or aborts because it lost its peer.
        ended.sort(key=lambda rank: rank.status >= 0 or rank.status == -signal.SIGABRT)
        for rank in ended:
            if rank.status:
                self._settle(*_verdict(rank), culprit=rank)
                self._stop()

    def _stop_leftovers(self) -> None:
        if self._is_killing:
            self._kill_descendants()
        elif not self._ranks and not self._is_finished:
            kill_all(descendants(os.getpid()), signal.SIGTERM)
            self._deadline = self._deadline or time.monotonic() + GRACE_S

    def _stop(self) -> None:
        """Ask the ranks to end, and see to it that they do."""
        if self._deadline is not None or self._is_finished:
            return
        self._deadline = time.monotonic() + GRACE_S
        # After a Ctrl-C the ranks are ending already; do not disturb their clean-up.
        if not self._was_told_to_stop:
            for rank in self._ranks.values():
                rank.signal(signal.SIGTERM)

    def _expire(self) -> None:
        if not self._is_killing:
            self._kill()
            return
        pids = ", ".join(str(pid) for pid in descendants(os.getpid()))
        self._output.say(f"the kernel does not end these processes: {pids}")
        self._finish()

    def _kill(self) -> None:
        if not self._is_killing:
            self._is_killing = True
            self._deadline = time.monotonic() + UNKILLABLE_S
        for rank in self._ranks.values():
            rank.signal(signal.SIGKILL)
        self._kill_descendants()

    def _kill_descendants(self) -> None:
        # One forked after the list was made becomes our child when its parent dies,
        # and is found when that death is reaped.
        kill_all(descendants(os.getpid()), signal.SIGKILL)


def _verdict(rank: Rank) -> tuple[int, str]:
    number = rank.command.rank
    if rank.status > 0:
        return rank.status, f"rank {number} exited with code {rank.status}"
    return EXIT_SIGNALLED - rank.status, f"rank {number} was killed by {name_of(-rank.status)}"


# The kernel's side.


def open_standard_fds() -> None:
    """Fill closed standard descriptors, so that no pipe of ours takes their numbers."""
    for fd in (0, 1, 2):
        try:
            os.fstat(fd)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)


def prctl(option: int, argument: int) -> None:
    """Call prctl(2) with one argument."""
    libc = ctypes.CDLL(None, use_errno=True)
    zero = ctypes.c_ulong(0)
    if libc.prctl(ctypes.c_int(option), ctypes.c_ulong(argument), zero, zero, zero):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def descendants(root: int) -> list[int]:
    """Return the ids of all processes below `root`."""
    children: dict[int, list[int]] = {}
    for pid in (int(name) for name in os.listdir("/proc") if name.isdigit()):
        try:
            with open(f"/proc/{pid}/stat", "rb") as file:
                # After the name, which may hold anything: state, parent, ...
                parent = int(file.read().rpartition(b")")[2].split()[1])
        except (OSError, IndexError):
            continue  # It has just ended.
        children.setdefault(parent, []).append(pid)
    found = [root]
    for pid in found:
        found += children.get(pid, [])
    return found[1:]


def kill_all(pids: Iterable[int], signum: int) -> None:
    """Send a signal to each of them that is still there."""
    for pid in pids:
        try:
            os.kill(pid, signum)
        except (ProcessLookupError, PermissionError):
            pass  # A set-uid process is not ours to kill; the job's deadline reports it.


def name_of(signum: int) -> str:
    """Return ``SIGTERM`` for 15; real-time signals have only numbers."""
    try:
        return signal.Signals(signum).name
    except ValueError:
        return f"signal {signum}"


def _set_group(pid: int, group: int | None) -> None:
    # Called by parent and child alike, so that the group exists for whichever is first.
    try:
        os.setpgid(pid, group or 0)
    except (PermissionError, ProcessLookupError):
        if pid == 0:
            raise


def _is_writable(fd: int) -> bool:
    poller = select.poll()
    poller.register(fd, select.POLLOUT)
    return bool(poller.poll(0))


def _wake_on_sigchld() -> int:
    """Return a descriptor that becomes readable when a child has ended."""
    read_fd, write_fd = os.pipe()
    os.set_blocking(read_fd, False)
    os.set_blocking(write_fd, False)
    signal.signal(signal.SIGCHLD, lambda signum, frame: None)
    signal.set_wakeup_fd(write_fd, warn_on_full_buffer=False)
    return read_fd


if __name__ == "__main__":
    sys.exit(main())
