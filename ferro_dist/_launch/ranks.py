"""The ranks as processes: how they are forked, signalled and remembered."""

from __future__ import annotations

import contextlib
import errno
import os
import signal

from ferro_dist._launch.kernel import PR_SET_PDEATHSIG, exit_with, prctl
from ferro_dist._launch.output import TAIL_NBYTES, Log, Stream
from ferro_dist._launch.signals import EXIT_SIGNALLED, InheritedSignals

TYPE_CHECKING = False
if TYPE_CHECKING:
    from ferro_dist._launch.plan import RankCommand

EXIT_CANNOT_RUN = 126
LAST_LINE_LENGTH = 300
TRACEBACK = "Traceback (most recent call last):"
FRAME = '\n  File "'
EXCEPTION_LINES = 8
# Between an exception and the one that was raised because of it, or while it was handled.
LINKS = (
    "The above exception was the direct cause of the following exception:",
    "During handling of the above exception, another exception occurred:",
)
# What a rank raises because another has ended.
LOSSES = "PeerLostError", "ChannelClosed", "LockPoisoned"
# What stands in the message of a pipeline's StageFailed, before the traceback at its end.
OF_A_STAGE = "zero the gradients before the next step."
GROUP_TRACEBACK = "  + Exception Group Traceback (most recent call last):"


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
        # A rank that runs as another user cannot be signalled; the job's deadline reports it.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            if self.has_group:
                os.killpg(self.pid, signum)
            else:
                os.kill(self.pid, signum)

    def has_lost_another(self) -> bool:
        """Whether its last exception, on standard error, comes of the end of another rank."""
        text = self._errors()
        begin = text.rfind(TRACEBACK)
        while (before := text[: max(begin, 0)].rstrip()).endswith(LINKS):
            begin = max(before.rfind(TRACEBACK), 0)
        if before.endswith(OF_A_STAGE):
            # All ranks raise it; on the one whose stage it was, it has a cause.
            text = before[: max(before.rfind(TRACEBACK), 0)]
            return not text.rstrip().endswith(LINKS[0])
        return any(name in text[begin:] for name in LOSSES)

    def last_words(self) -> str:
        """Return ``": "`` and how standard error ends, or nothing if it is empty."""
        import re

        text = self._errors()
        text = re.sub(r"\x1b\[[0-?]*[ -/]*[@-~]", "", text)
        words = "".join(c for c in ending(text) if c.isprintable()).strip()
        return f": {words}" if words else ""

    def _errors(self) -> str:
        """Return the end of standard error; of a traceback that began before, as if it did here."""
        tail = self.streams[1].tail
        text = tail.decode(errors="replace")
        is_cut = len(tail) == TAIL_NBYTES and TRACEBACK not in text and FRAME in text
        return "\n".join((TRACEBACK, *text.splitlines()[1:])) if is_cut else text


def ending(text: str) -> str:
    """Return the last line of a program's errors.

    If it ends an exception of several lines, by message or by notes, the first of these as well.
    """
    lines = [line for line in text.splitlines() if line.strip()]
    if lines and lines[-1].strip(" -") == "+" and (words := _ending_of_group(lines)):
        return words
    end = len(lines)
    traceback = max((n for n, line in enumerate(lines) if line.startswith(TRACEBACK)), default=end)
    first = next((n for n in range(traceback + 1, end) if not lines[n][0].isspace()), end)
    last = lines[-1].strip()[:LAST_LINE_LENGTH] if lines else ""
    # The rest may also come from a program that went on. Hence both lines, and few between.
    if 1 < end - first <= EXCEPTION_LINES:
        return f"{lines[first][:LAST_LINE_LENGTH]} ... {last}"
    return last


def _ending_of_group(lines: list[str]) -> str:
    """Return what an exception group says, and the last line of its last exception.

    They stand in a frame whose bottom says nothing.
    """
    if GROUP_TRACEBACK in lines:
        lines = lines[len(lines) - lines[::-1].index(GROUP_TRACEBACK) :]
    own = next((line[4:] for line in lines if line.startswith("  | ") and line[4:5] > " "), "")
    last = next((line.strip(" |") for line in lines[::-1] if line.strip().startswith("|")), "")
    return " ... ".join(words[:LAST_LINE_LENGTH] for words in (own, last) if words)


class Spawner:
    """Forks the ranks. Only the main thread may: PR_SET_PDEATHSIG looks at the thread."""

    def __init__(
        self,
        signals: InheritedSignals,
        terminal_group: int | None,
        sockets: list[int],
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
        pipes: list[int] = []
        try:
            for _ in range(3):
                pipes += os.pipe()
            pid = os.fork()
        except OSError:
            for fd in pipes:
                os.close(fd)
            raise
        out_read, out_write, err_read, err_write, error_read, error_write = pipes
        if pid == 0:
            stdin = 0 if has_stdin else self._devnull
            exit_with(
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
        """Close what only the ranks need now; MASTER_PORT stays taken."""
        for listener in self._sockets[:1]:
            os.close(listener)
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


def _set_group(pid: int, group: int | None) -> None:
    # Called by parent and child alike, so that the group exists for whichever is first.
    try:
        os.setpgid(pid, group or 0)
    except (PermissionError, ProcessLookupError):
        if pid == 0:
            raise
