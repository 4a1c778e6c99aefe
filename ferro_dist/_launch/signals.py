"""Which signals the job obeys, and how they were handled before it started."""

from __future__ import annotations

import signal

STOPPING = frozenset({signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM})
TERMINAL_SENDS = frozenset({signal.SIGHUP, signal.SIGINT, signal.SIGQUIT})
FORWARDED = STOPPING | {signal.SIGUSR1, signal.SIGUSR2, signal.SIGTSTP, signal.SIGCONT}
FROM_TERMINAL = 0x80  # set in a control byte, together with the signal's number
EXIT_SIGNALLED = 128  # plus the signal's number


class InheritedSignals:
    """How signals were handled before the launcher, to be restored in the ranks."""

    def __init__(self) -> None:
        self.ignored = {s for s in FORWARDED if signal.getsignal(s) is signal.SIG_IGN}
        # A signal ignored by nohup or a shell's & stays ignored.
        self.forwarded = FORWARDED - self.ignored
        # If it stayed ignored, the kernel would reap the children before the launcher can.
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        # Blocked before the fork, so that none is lost in between; the front takes them one by one
        # with sigwaitinfo, which tells who sent them.
        self.mask = signal.pthread_sigmask(signal.SIG_BLOCK, self.forwarded | {signal.SIGCHLD}) - {
            signal.SIGCHLD
        }

    def shield_supervisor(self) -> None:
        """Leave the front's signals to the front, even if one is sent to this process, too."""
        for signum in FORWARDED - {signal.SIGCONT}:
            signal.signal(signum, signal.SIG_IGN)
        # Writing to the terminal from the background must not stop the supervisor.
        signal.signal(signal.SIGTTOU, signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_SETMASK, self.mask)

    def restore_in_rank(self) -> None:
        """Undo `shield_supervisor`, and what Python does to signals when it starts."""
        ours = {signal.SIGPIPE, signal.SIGXFSZ, signal.SIGTTOU, signal.SIGCHLD}
        for signum in (FORWARDED | ours) - self.ignored:
            signal.signal(signum, signal.SIG_DFL)


def name_of(signum: int) -> str:
    """Return ``SIGTERM`` for 15; real-time signals have only numbers."""
    try:
        return signal.Signals(signum).name
    except ValueError:
        return f"signal {signum}"
