"""Many conversations over sockets, driven by one thread.

A conversation is a generator that knows bytes and nothing of sockets (see
`ferro_dist.rendezvous.frame.Conversation`); a `Stream` holds one over a socket. An `Acceptor`
answers every connection and keeps only those that prove to belong to the group; a `Dialler`
connects again and again until somebody proves it. None of them waits for another.
"""

from __future__ import annotations

import contextlib
import errno
import heapq
import itertools
import os
import selectors
import socket
import time
from collections.abc import Callable
from typing import Any

from ferro_dist.errors import Io
from ferro_dist.rendezvous.address import Target
from ferro_dist.rendezvous.authentication import Claim, answer
from ferro_dist.rendezvous.frame import Conversation, ProtocolError

__all__ = ["READ", "Acceptor", "Dialler", "EventLoop", "Stream", "describe_error"]

READ, WRITE = selectors.EVENT_READ, selectors.EVENT_WRITE

HANDSHAKE_S = 2.0
# How long a dialler waits for an answer once it has waited in vain several times.
MAX_PATIENCE_S = 16.0
RECV_NBYTES = 1 << 16
# Turns that one socket gets before the others have theirs.
MAX_TURNS = 64
MAX_ACCEPTS = 16
# Strangers that may be halfway through the handshake, besides all the ranks.
MAX_STRANGERS = 64
FIRST_PAUSE_S = 0.001
MAX_PAUSE_S = 0.1
# A pause is this fraction of the time waited so far: 5 ms after a tenth of a second.
PAUSE_GROWTH = 0.05

# A signal that comes just before the kernel waits is noticed only after the wait.
MAX_SELECT_S = 0.1

TOO_MANY_FILES = frozenset({errno.EMFILE, errno.ENFILE})


class Timer:
    """A call in the future, until it is cancelled."""

    __slots__ = ("callback",)

    def __init__(self, callback: Callable[[], None]) -> None:
        self.callback: Callable[[], None] | None = callback

    def cancel(self) -> None:
        """Keep the call from being made."""
        self.callback = None


class EventLoop:
    """Waits for sockets and timers.

    At its end it closes the sockets that it was given and that nobody has taken back: a
    KeyboardInterrupt may come wherever they are being made, connected or accepted.
    """

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._sockets: set[socket.socket] = set()
        self._timers: list[tuple[float, int, Timer]] = []
        self._order = itertools.count()

    def own(self, sock: socket.socket) -> socket.socket:
        """Take a socket over, until `unwatch`; returns it."""
        self._sockets.add(sock)
        return sock

    def watch(self, sock: socket.socket, events: int, callback: Callable[[int], None]) -> None:
        """Own a socket and call back with its events; replaces an earlier request."""
        self.own(sock)
        if self.is_watched(sock):
            self._selector.modify(sock, events, callback)
        else:
            self._selector.register(sock, events, callback)

    def unwatch(self, sock: socket.socket) -> None:
        """Give a socket back to the caller."""
        if self.is_watched(sock):
            self._selector.unregister(sock)
        self._sockets.discard(sock)

    def is_watched(self, sock: socket.socket) -> bool:
        """Whether the loop calls back with a socket's events."""
        fileno = sock.fileno()
        # By number: for a socket it does not know, the mapping would put its repr into a KeyError.
        return fileno >= 0 and fileno in (self._selector.get_map() or {})

    def discard(self, sock: socket.socket) -> None:
        """Unwatch a socket and close it."""
        self.unwatch(sock)
        sock.close()

    def call_at(self, when: float, callback: Callable[[], None]) -> Timer:
        """Call back once `time.monotonic` has reached `when`."""
        timer = Timer(callback)
        heapq.heappush(self._timers, (when, next(self._order), timer))
        return timer

    def run_until(self, is_done: Callable[[], bool], until: float) -> bool:
        """Serve sockets and timers; return whether `is_done` came before `until`."""
        while not is_done():
            now = time.monotonic()
            if now >= until:
                return False
            self._call_due_timers(now)
            if is_done():
                break
            due = min(until, self._timers[0][0]) if self._timers else until
            pause = min(max(0.0, due - time.monotonic()), MAX_SELECT_S)
            for key, events in self._selector.select(pause):
                # An earlier callback of this round may have closed it.
                if isinstance(key.fileobj, socket.socket) and self.is_watched(key.fileobj):
                    key.data(events)
        return True

    def _call_due_timers(self, now: float) -> None:
        while self._timers and self._timers[0][0] <= now:
            callback = heapq.heappop(self._timers)[2].callback
            if callback is not None:
                callback()

    def close(self) -> None:
        """Close every socket that is still owned."""
        for sock in self._sockets:
            sock.close()
        self._sockets.clear()
        self._selector.close()
        # The timers' callbacks refer to this loop and its sockets: break the cycle.
        self._timers.clear()


class Stream:
    """A conversation over a connected socket.

    Reads exactly the bytes that the conversation asks for: what follows on the
    socket belongs to whoever takes it over.

    Parameters
    ----------
    on_done : callable
        Takes the socket, now unwatched, and what the conversation returned.
    on_failed : callable
        Takes an OSError or ProtocolError; the socket is closed by then.
    on_progress : callable
        Called after bytes have come in and the conversation has had them.
    """

    def __init__(
        self,
        loop: EventLoop,
        sock: socket.socket,
        conversation: Conversation,
        on_done: Callable[[socket.socket, Any], None],
        on_failed: Callable[[Exception], None],
        on_progress: Callable[[], None] = lambda: None,
    ) -> None:
        self.socket = sock
        self._loop = loop
        self._conversation = conversation
        self._on_done = on_done
        self._on_failed = on_failed
        self._on_progress = on_progress
        self._incoming = bytearray()
        self._outgoing = bytearray()
        self._wanted = 0
        self._has_ended = False
        self._result: Any = None
        loop.watch(sock, READ, self._on_ready)

    def start(self) -> None:
        """Let the conversation say its first words. May call back at once."""
        self._attempt(lambda: self._converse(next(self._conversation)))

    def write(self, data: bytes) -> None:
        """Send bytes outside the conversation."""
        self._outgoing += data
        self._attempt(lambda: None)

    @property
    def is_flushed(self) -> bool:
        """Whether the kernel has taken all that was written."""
        return not self._outgoing

    @property
    def is_open(self) -> bool:
        """Whether the conversation goes on."""
        return self._loop.is_watched(self.socket)

    def close(self) -> None:
        """End the conversation and close the socket, calling nobody back."""
        self._conversation.close()
        self._loop.discard(self.socket)

    def _on_ready(self, events: int) -> None:
        if events & READ:
            self._attempt(self._read)
            self._on_progress()
        else:
            self._attempt(lambda: None)

    def _attempt(self, step: Callable[[], None]) -> None:
        # Callbacks are called outside the try: what they raise is for the caller of the loop.
        failure: Exception | None = None
        try:
            step()
            self._flush()
        except StopIteration as stop:
            failure = self._end(stop.value)
        except (OSError, ProtocolError) as error:
            if isinstance(error, ProtocolError):
                self._end(None)  # what was said last may tell the other end why
            # Its traceback would lead back here, and keep the loop's caller alive, and the group.
            failure = error.with_traceback(None)
        if failure is not None:
            self.close()
            self._on_failed(failure)
        elif self._has_ended and self.is_flushed and self.is_open:
            self._loop.unwatch(self.socket)
            self._on_done(self.socket, self._result)

    def _end(self, result: Any) -> Exception | None:
        self._has_ended, self._result = True, result
        try:
            self._flush()
        except OSError as error:
            return error.with_traceback(None)
        return None

    def _converse(self, wanted: int | bytes) -> None:
        while not isinstance(wanted, int) or wanted == 0:
            if not isinstance(wanted, int):
                self._outgoing += wanted
            wanted = self._conversation.send(b"")
        self._wanted = wanted

    def _read(self) -> None:
        for _ in range(MAX_TURNS):
            missing = self._wanted - len(self._incoming)
            try:
                data = self.socket.recv(min(missing, RECV_NBYTES))
            except BlockingIOError:
                return
            if not data:
                raise ConnectionResetError(errno.ECONNRESET, "the other end closed the connection")
            self._incoming += data
            if len(data) == missing:
                message = bytes(self._incoming)
                self._incoming.clear()
                self._converse(self._conversation.send(message))

    def _flush(self) -> None:
        while self._outgoing:
            try:
                sent = self.socket.send(self._outgoing)
            except BlockingIOError:
                break
            except OSError:
                if self._has_ended:
                    raise
                # The other end has left. It may have said why, which is still to be read.
                sent = len(self._outgoing)
            del self._outgoing[:sent]
        events = (0 if self._has_ended else READ) | (WRITE if self._outgoing else 0)
        if events:
            self._loop.watch(self.socket, events, self._on_ready)


class Acceptor:
    """Answers connections to a listening socket.

    Parameters
    ----------
    listener : socket
        Owned from here on.
    token, rank, group_id
        What to prove, and to whom; see `authentication.answer`.
    on_accepted : callable
        Takes the socket and the claim of a dialler that has proved to belong to the group.
    num_ranks : int
        How many may legitimately come at once. If far more do, the oldest handshake under way is
        ended: an honest one takes a millisecond, and is tried again.
    """

    def __init__(
        self,
        loop: EventLoop,
        listener: socket.socket,
        token: bytes,
        rank: int,
        group_id: bytes,
        on_accepted: Callable[[socket.socket, Claim], None],
        num_ranks: int,
    ) -> None:
        self.num_strangers = 0
        self.last_stranger = ""
        self._loop = loop
        self._listener = listener
        self._group_id = group_id
        self._conversation: Callable[[], Conversation] = lambda: answer(token, rank, group_id)
        self._on_accepted = on_accepted
        self._max_pending = MAX_STRANGERS + 2 * num_ranks
        self._pending: dict[Stream, Timer] = {}
        listener.setblocking(False)
        loop.watch(listener, READ, self._on_ready)

    def close(self) -> None:
        """Stop listening; end the handshakes under way."""
        for stream in list(self._pending):
            self._forget(stream)
            stream.close()
        self._loop.discard(self._listener)

    def describe_strangers(self) -> str:
        """Return a sentence about connections that were turned away, or nothing."""
        if not self.num_strangers:
            return ""
        return (
            f" {self.num_strangers} connection(s) did not authenticate, the last one: "
            f"{self.last_stranger}."
        )

    def _on_ready(self, _: int) -> None:
        for _ in range(MAX_ACCEPTS):
            try:
                sock = self._loop.own(self._listener.accept()[0])
            except OSError as error:
                if error.errno in TOO_MANY_FILES:
                    raise _too_many_files(error) from error
                # Nobody more, or accept(2) reports a connection that ended before its turn.
                return
            self._welcome(sock)

    def _welcome(self, sock: socket.socket) -> None:
        set_options(sock)
        if len(self._pending) >= self._max_pending:
            self._drop(next(iter(self._pending)), "too many connections at once")
        stream = Stream(
            self._loop,
            sock,
            self._conversation(),
            lambda sock, claim: self._finish(stream, sock, claim),
            lambda error: self._drop(stream, describe_error(error)),
        )
        self._pending[stream] = self._loop.call_at(
            time.monotonic() + HANDSHAKE_S,
            lambda: self._drop(stream, f"silent for {HANDSHAKE_S:.0f} s"),
        )
        stream.start()

    def _finish(self, stream: Stream, sock: socket.socket, claim: Claim) -> None:
        self._forget(stream)
        if claim.group_id == self._group_id:
            self._on_accepted(sock, claim)
        else:
            sock.close()

    def _drop(self, stream: Stream, reason: str) -> None:
        self._forget(stream)
        stream.close()
        self.num_strangers += 1
        self.last_stranger = reason

    def _forget(self, stream: Stream) -> None:
        self._pending.pop(stream).cancel()


class Dialler:
    """Connects to one target until the acceptor there has proved to belong to the group.

    Parameters
    ----------
    conversation : callable
        Makes the dialler's side of a handshake. It is given a function to call before it gives its
        own proof; from then on the dialler is patient, since the acceptor may count on it.
    on_connected : callable
        Takes the socket.
    on_failed : callable, optional
        Told of each failure, before the next attempt.
    """

    def __init__(
        self,
        loop: EventLoop,
        target: Target,
        conversation: Callable[[Callable[[], None]], Conversation],
        on_connected: Callable[[socket.socket], None],
        on_failed: Callable[[Exception], None] = lambda error: None,
    ) -> None:
        self.target = target
        self.has_been_answered = False
        self.last_error: Exception | None = None
        self.refusal: ProtocolError | None = None  # why the other end was not the right one
        self._loop = loop
        self._conversation = conversation
        self._on_connected = on_connected
        self._on_failed = on_failed
        self._started_at = time.monotonic()
        self._patience_s = HANDSHAKE_S
        self._socket: socket.socket | None = None
        self._stream: Stream | None = None
        self._timer: Timer | None = None

    def dial(self) -> None:
        """Begin an attempt."""
        try:
            self._socket = self._loop.own(socket.socket(self.target.family, socket.SOCK_STREAM))
        except OSError as error:
            if error.errno in TOO_MANY_FILES:
                raise _too_many_files(error) from error
            self._fail(error)
            return
        set_options(self._socket)
        self._timer = self._loop.call_at(time.monotonic() + self._patience_s, self._lose_patience)
        code = self._socket.connect_ex(self.target.sockaddr)
        if code == errno.EINPROGRESS:
            self._loop.watch(self._socket, WRITE, lambda _: self._on_reached())
        elif code:
            self._fail(OSError(code, os.strerror(code)))
        else:
            self._on_reached()

    def close(self) -> None:
        """Give up."""
        if self._timer is not None:
            self._timer.cancel()
        if self._stream is not None:
            self._stream.close()
        if self._socket is not None:
            self._loop.discard(self._socket)
        self._timer = self._stream = self._socket = None

    def describe_failure(self) -> str:
        """Say how the last attempt failed."""
        text = describe_error(self.last_error) if self.last_error else "no answer"
        if self.refusal is None or self.refusal is self.last_error:
            return text
        return f"{text}; before that, {describe_error(self.refusal)}"

    def _on_reached(self) -> None:
        assert self._socket is not None
        code = self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if code:
            self._fail(OSError(code, os.strerror(code)))
        elif self.target.family != socket.AF_UNIX and _is_connected_to_itself(self._socket):
            self._fail(ConnectionRefusedError(errno.ECONNREFUSED, "nobody listens"))
        else:
            self._stream = Stream(
                self._loop,
                self._socket,
                self._conversation(self._be_patient),
                self._finish,
                self._fail,
            )
            self._stream.start()

    def _be_patient(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _finish(self, sock: socket.socket, _: Any) -> None:
        self._be_patient()
        self._timer = self._stream = self._socket = None
        self._on_connected(sock)

    def _fail(self, error: Exception) -> None:
        # A port may be open, as ferrorun's is from the beginning, long before rank 0 comes.
        self.has_been_answered = self._stream is not None and not isinstance(error, TimeoutError)
        self.close()
        self.last_error = error
        if isinstance(error, ProtocolError):
            self.refusal = error
        waited = time.monotonic() - self._started_at
        pause = min(MAX_PAUSE_S, max(FIRST_PAUSE_S, waited * PAUSE_GROWTH))
        self._timer = self._loop.call_at(time.monotonic() + pause, self.dial)
        self._on_failed(error)

    def _lose_patience(self) -> None:
        # Each attempt begins at the end of the listener's queue. Strangers may make that so long
        # that no attempt of HANDSHAKE_S would last until its turn.
        self._patience_s = min(2 * self._patience_s, MAX_PATIENCE_S)
        self._fail(TimeoutError(errno.ETIMEDOUT, "no answer"))


def set_options(sock: socket.socket) -> None:
    """Make a socket non-blocking and prompt."""
    sock.setblocking(False)
    if sock.family != socket.AF_UNIX:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def _is_connected_to_itself(sock: socket.socket) -> bool:
    # A dial to a free local port within the ephemeral range can connect to itself.
    with contextlib.suppress(OSError):
        return bool(sock.getsockname() == sock.getpeername())
    return False


def _too_many_files(error: OSError) -> Io:
    return Io(
        f"no more sockets can be opened: {error.strerror}. A rank needs two for every rank on "
        "another host; raise the limit with 'ulimit -n'",
        op="init",
    )


def describe_error(error: Exception) -> str:
    """Return what went wrong, to stand within a sentence."""
    text = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return text[:1].lower() + text[1:]
