"""The process that the shell started: it owns the terminal and passes signals on."""

from __future__ import annotations

import os
import signal
import time

from ferro_dist._launch.kernel import (
    PR_SET_CHILD_SUBREAPER,
    UNKILLABLE_S,
    complain,
    descendants,
    exit_with,
    kill_all,
    prctl,
)
from ferro_dist._launch.ranks import EXIT_CANNOT_RUN
from ferro_dist._launch.signals import (
    EXIT_SIGNALLED,
    FROM_TERMINAL,
    InheritedSignals,
    name_of,
)
from ferro_dist._launch.supervisor import supervise

TYPE_CHECKING = False
if TYPE_CHECKING:
    from ferro_dist._launch.command_line import Options

SI_KERNEL = 0x80  # siginfo's si_code of a signal that the terminal sent


def run_job(options: Options) -> int:
    """Fork the supervisor and act as its front; return the job's exit code."""
    signals = InheritedSignals()
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    control_read, control_write = os.pipe()
    # A rank that reads the terminal must be in the foreground group, which is this process's.
    terminal_group = os.getpgrp() if os.isatty(0) else None
    try:
        supervisor = os.fork()
    except OSError as error:  # a limit of processes, such as a container's pids.max
        complain(f"cannot start a job: {error.strerror}")
        return EXIT_CANNOT_RUN
    if supervisor == 0:
        os.close(control_write)
        exit_with(lambda: supervise(options, signals, control_read, terminal_group))
    os.close(control_read)
    # A process that writes to rank 0 must notice when it has stopped reading.
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    status = _relay_signals(supervisor, control_write, signals.forwarded)
    _bury_descendants()
    if status >= 0:
        return status
    complain(f"the supervisor was killed by {name_of(-status)}")
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
    """Kill what a killed supervisor left behind; its children are now this process's."""
    deadline = time.monotonic() + UNKILLABLE_S
    while time.monotonic() < deadline:
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return
        kill_all(descendants(os.getpid()), signal.SIGKILL)
        signal.sigtimedwait({signal.SIGCHLD}, 0.1)
