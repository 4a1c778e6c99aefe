"""What the ranks write, on its way to the launcher's own output: whole lines, marked."""

from __future__ import annotations

import os
import select
import time
from collections import deque

from ferro_dist._launch.command_line import LaunchError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

    from ferro_dist._launch.command_line import Options

EXIT_CANNOT_WRITE = 1
READ_NBYTES = 1 << 16
# Ranks that write faster than the reader reads are held up beyond this.
QUEUE_NBYTES = 1 << 20
# Longer lines are broken, so that a rank that never ends a line cannot exhaust memory.
LINE_NBYTES = 1 << 26
TAIL_NBYTES = 1 << 16  # a traceback and more, unless it is very deep
# poll() promises that this much can be written to a pipe without blocking.
PIPE_NBYTES = select.PIPE_BUF
COLOURS = (36, 33, 32, 35, 34, 96, 93, 92, 95, 94)


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
        self._tail = bytearray()
        self.partial_since = 0.0  # when the unfinished line began to come, if there is one
        self._partial: list[bytes] = []
        self._partial_nbytes = 0

    @property
    def tail(self) -> bytes:
        """The latest of it, TAIL_NBYTES at most."""
        return bytes(self._tail[-TAIL_NBYTES:])

    @property
    def has_partial(self) -> bool:
        """Whether an unfinished line waits for its end."""
        return self._partial_nbytes > 0

    def read(self) -> bytes | None:
        """Return what has arrived: empty at the end of the stream, None if nothing has."""
        try:
            return os.read(self.fd, READ_NBYTES)
        except BlockingIOError:
            return None

    def feed(self, data: bytes) -> bytes:
        """Take `data` in and return the lines that it completes."""
        end = data.rfind(b"\n") + 1
        lines = self._pop_partial() + data[:end] if end else b""
        if end < len(data):
            if not self._partial:
                self.partial_since = time.monotonic()
            self._partial.append(data[end:])
            self._partial_nbytes += len(data) - end
        if self._partial_nbytes > LINE_NBYTES:
            lines += self._pop_partial() + b"\n"
        self._remember(lines)
        return lines

    def take_partial(self) -> bytes:
        """Give up the unfinished line, however long it took to come."""
        partial = self._pop_partial()
        self._remember(partial)
        return partial

    def _pop_partial(self) -> bytes:
        partial = b"".join(self._partial)
        self._partial.clear()
        self._partial_nbytes = 0
        return partial

    def _remember(self, text: bytes) -> None:
        self._tail += text[-TAIL_NBYTES:]
        if len(self._tail) > 2 * TAIL_NBYTES:  # not each time, since all that stays is moved
            del self._tail[:-TAIL_NBYTES]


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
        self._is_dropping = False
        self.error: OSError | None = None

    @property
    def blocked_fd(self) -> int | None:
        """Where the queue's head is to go, None if the queue is empty."""
        return self._queue[0][0] if self._queue else None

    @property
    def is_settled(self) -> bool:
        """Whether everything that will be written has been."""
        return self._is_dropping or not self._queue

    @property
    def is_full(self) -> bool:
        """Whether the ranks must wait for the reader."""
        return self._queued_nbytes > QUEUE_NBYTES

    def shows_partial_lines(self, stream: Stream) -> bool:
        """Whether a person may be waiting for a line that has no end yet."""
        return stream.target in self._terminals

    def write(self, stream: Stream, text: bytes) -> None:
        """Show lines of a rank, each with its mark; the last one may be unfinished."""
        if self._is_dropping:
            return
        mark = self._mark(stream)
        is_continued = self._unfinished is stream
        self.end_line(unless=stream)
        end = b"\n" if text.endswith(b"\n") else b""
        body = text[:-1] if end else text
        body = body.replace(b"\n", b"\n" + mark)
        if stream.target in self._terminals:
            # What a progress bar overwrites includes the mark.
            body = body.replace(b"\r", b"\r" + mark)
        self._put(stream.target, b"".join((b"" if is_continued else mark, body, end)))
        self._unfinished = None if end else stream

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
            except BlockingIOError:
                written = 0  # Somebody else set the descriptor non-blocking, and was faster.
            except OSError as error:
                self._break(fd, error)
                return
            self._queued_nbytes -= written
            if written < len(data):
                self._queue.appendleft((fd, data[written:]))
            if not written:
                return

    def drop(self) -> None:
        """Forget what has not been written, and wait for no reader from now on."""
        self._is_dropping = True
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


def _is_writable(fd: int) -> bool:
    poller = select.poll()
    poller.register(fd, select.POLLOUT)
    return bool(poller.poll(0))
