"""How the ranks of a group in the making exchange what they must know about each other.

They use a star with rank 0 at its centre; `parent_exchange` has what they use where a group exists
already. In either case a rank that fails tells the others why.
"""

from __future__ import annotations

import abc
import contextlib
import os
import socket
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from ferro_dist.arguments import describe_ranks
from ferro_dist.deadline import Deadline
from ferro_dist.errors import (
    DistributedError,
    InvalidRank,
    InvalidWorldSize,
    Io,
    NoConnection,
    PeerLostError,
    Timeout,
)
from ferro_dist.rendezvous.address import Address, Target
from ferro_dist.rendezvous.authentication import AuthenticationFailed, Claim, Role, introduce
from ferro_dist.rendezvous.event_loop import Acceptor, Dialler, EventLoop, Stream
from ferro_dist.rendezvous.frame import (
    MAX_CONTRIBUTION_NBYTES,
    Conversation,
    FrameKind,
    ProtocolError,
    decode_error,
    encode_error,
    encode_frame,
    max_gathered_nbytes,
    pack_list,
    read_frame,
    unpack_list,
)
from ferro_dist.rendezvous.machine import peer_credentials

__all__ = [
    "VERDICT_FRACTION",
    "VERDICT_S",
    "Coordinator",
    "Exchange",
    "Participant",
    "as_distributed",
]

# A rank that failed waits this long for the others to read why.
FAREWELL_S = 0.3
# After a failure, rank 0 still tells ranks that come within this time.
LATECOMERS_S = 0.4
# A rank whose time is up waits this long for rank 0 to say who was missing.
VERDICT_S = 0.5
# What remains of the timeout for telling the others that it is over.
VERDICT_FRACTION = 0.1
# A rank that knows why it does not reach another gives up this much before its time is up, or
# VERDICT_FRACTION of what remains: if the last rank came late, its answers are to come, too. The
# others, who may have begun earlier, only know who is missing.
FIRST_HAND_S = 10.0
# A restarted rank 0 may find its predecessor's listener, with another token, for a moment.
AUTHENTICATION_GRACE_S = 3.0


class Exchange(abc.ABC):
    """What the wiring of a group needs of the ranks' connection to each other."""

    def __init__(self, loop: EventLoop, rank: int, world_size: int, deadline: Deadline) -> None:
        self.loop = loop
        self.rank = rank
        self.world_size = world_size
        self.deadline = deadline
        self.have_all_come = False

    @abc.abstractmethod
    def all_gather(self, part: bytes) -> list[bytes]:
        """Give every rank the parts of all. Raises what any rank has failed with."""

    @abc.abstractmethod
    def commit(self) -> None:
        """Return once all ranks have come here: the group exists on all of them."""

    @abc.abstractmethod
    def fail(self, error: BaseException) -> None:
        """Tell the other ranks why this one gives up. Never raises."""

    def wait(
        self,
        is_done: Callable[[], bool],
        missing: Callable[[], Sequence[int]],
        hint: Callable[[], str] = lambda: "",
    ) -> None:
        """Serve the loop until `is_done`; a Timeout names the ranks that are `missing`."""
        lead = min(FIRST_HAND_S, VERDICT_FRACTION * self.deadline.remaining_s)
        if self.loop.run_until(is_done, self.deadline.at - lead):
            return
        reason = hint()
        if reason or not self.loop.run_until(is_done, self.deadline.at):
            raise self.timeout(missing(), reason)

    def timeout(self, missing: Sequence[int], hint: str = "") -> Timeout:
        """Return the error of ranks that did not come in time, or came and got no further."""
        if self.have_all_come:
            what = "came, but without a connection to every other"
            remedy = (
                "Check that they still run, and that their hosts reach each other at any port: a "
                "firewall may leave only that of rank 0 open"
            )
        else:
            what = "did not come"
            remedy = "Check that they were started, with the same address and token"
        return Timeout(
            f"rendezvous: {describe_ranks(missing)} of {self.world_size} {what} "
            f"{self.deadline}.{hint} {remedy}; pass a larger timeout if they are only slow.",
            op="init",
            rank=self.rank,
            peer=missing[0] if len(missing) == 1 else None,
            missing=missing,
            seconds=self.deadline.seconds,
        )


class Coordinator(Exchange):
    """Rank 0's end of the star.

    Parameters
    ----------
    listener : socket or None
        Owned from here on. None if the ranks are given to `take`.
    claim : Claim
        Rank 0's own; the others must claim the same world size and group.
    """

    def __init__(
        self,
        loop: EventLoop,
        listener: socket.socket | None,
        token: bytes,
        claim: Claim,
        deadline: Deadline,
    ) -> None:
        super().__init__(loop, 0, claim.world_size, deadline)
        self._streams: dict[int, Stream] = {}
        self._parts: dict[int, deque[bytes]] = {r: deque() for r in range(claim.world_size)}
        self._outcasts: list[Stream] = []
        self._failure: DistributedError | None = None
        self._verdict: DistributedError | None = None
        self._is_over = False
        self._acceptor: Acceptor | None = None
        if listener is not None:
            self._acceptor = Acceptor(
                loop, listener, token, 0, claim.group_id, self._on_accepted, claim.world_size
            )

    def take(self, rank: int, sock: socket.socket, greeting: bytes) -> None:
        """Take the connection of a rank that has proved itself already, and greet it."""
        stream = self._stream_of(rank, sock)
        self._streams[rank] = stream
        stream.start()
        stream.write(greeting)

    def all_gather(self, part: bytes) -> list[bytes]:
        parts = self._gather(part)
        self._send_to_all(parts)
        return parts

    def commit(self) -> None:
        parts = self._gather(b"")
        # From here on ranks may leave: they have everything they need.
        self._is_over = True
        self._send_to_all(parts)

    def _gather(self, part: bytes) -> list[bytes]:
        self._parts[0].append(part)
        self.wait(lambda: all(self._parts.values()), self._missing)
        self.have_all_come = True
        return [parts.popleft() for parts in self._parts.values()]

    def _send_to_all(self, parts: Sequence[bytes]) -> None:
        frame = encode_frame(FrameKind.GATHERED, pack_list(parts))
        for stream in self._streams.values():
            stream.write(frame)
        self.wait(lambda: not self._unflushed(), self._unflushed)

    def timeout(self, missing: Sequence[int], hint: str = "") -> Timeout:
        strangers = self._acceptor.describe_strangers() if self._acceptor is not None else ""
        return super().timeout(missing, hint + strangers)

    def fail(self, error: BaseException) -> None:
        self._is_over = True
        self._verdict = as_distributed(error, 0)
        self._tell_all(self._verdict)
        if isinstance(error, Exception) and not isinstance(error, Timeout):
            self._let_in_latecomers()
            self._tell_all(self._verdict)

    def _tell_all(self, verdict: DistributedError) -> None:
        farewell(self.loop, [*self._streams.values(), *self._outcasts], verdict)

    def _let_in_latecomers(self) -> None:
        """Give them another moment: they would wait for a rank 0 that is gone."""
        until = time.monotonic() + LATECOMERS_S
        with contextlib.suppress(Exception):
            self.loop.run_until(lambda: len(self._streams) == self.world_size - 1, until)

    def _missing(self) -> list[int]:
        return [rank for rank, parts in self._parts.items() if not parts]

    def _unflushed(self) -> list[int]:
        return [rank for rank, s in self._streams.items() if s.is_open and not s.is_flushed]

    def _on_accepted(self, sock: socket.socket, claim: Claim) -> None:
        if claim.role is not Role.CONTROL:
            sock.close()
            return
        stream = self._stream_of(claim.rank, sock)
        mistake = self._mistake_in(claim, sock)
        if mistake is None:
            self._streams[claim.rank] = stream
        else:
            self._outcasts.append(stream)
            if not self._is_over:
                raise mistake
        stream.start()
        if self._verdict is not None:
            stream.write(encode_frame(FrameKind.FAILURE, encode_error(self._verdict)))

    def _stream_of(self, rank: int, sock: socket.socket) -> Stream:
        stream = Stream(
            self.loop,
            sock,
            self._hear(rank),
            lambda sock, result: None,
            lambda error: self._on_lost(rank, stream, error),
            lambda: self._raise_failure(rank),
        )
        return stream

    def _mistake_in(self, claim: Claim, sock: socket.socket) -> DistributedError | None:
        """Return what is wrong with how a rank was started."""
        if claim.world_size != self.world_size:
            return InvalidWorldSize(
                f"rendezvous: rank {claim.rank} ({describe_peer(sock)}) was started with world "
                f"size {claim.world_size}, rank 0 with {self.world_size}",
                op="init",
                rank=0,
                peer=claim.rank,
            )
        if claim.rank == 0 or claim.rank in self._streams:
            first = self._streams.get(claim.rank)
            who = describe_peer(first.socket) if first else f"process {os.getpid()}"
            return InvalidRank(
                f"rendezvous: rank {claim.rank} was started twice: {who} and {describe_peer(sock)}",
                op="init",
                rank=0,
                peer=claim.rank,
            )
        return None

    def _hear(self, rank: int) -> Conversation:
        while True:
            kind, body = yield from read_frame(MAX_CONTRIBUTION_NBYTES)
            if kind is FrameKind.CONTRIBUTION:
                self._parts[rank].append(body)
            elif kind is FrameKind.FAILURE:
                self._failure = decode_error(body, 0)
            else:
                raise ProtocolError(f"rank {rank} sent a frame that only rank 0 may send")

    def _raise_failure(self, rank: int) -> None:
        failure, self._failure = self._failure, None
        if failure is None or self._is_over:
            return
        if isinstance(failure, Timeout) and not failure.missing:
            # That rank's time is up earlier; who is missing is known only here. This rank may have
            # yet to give its part, too, because it waits for one of them.
            missing = self._missing()
            others = [each for each in missing if each != self.rank]
            failure = self.timeout(others or missing, f" Rank {rank} waits no longer.")
        raise failure

    def _on_lost(self, rank: int, stream: Stream, error: Exception) -> None:
        self._raise_failure(rank)
        if self._is_over or self._streams.get(rank) is not stream:
            return
        raise PeerLostError(
            f"rendezvous: rank {rank} ended while the group was being made ({error})",
            op="init",
            rank=0,
            peer=rank,
        )


class Participant(Exchange):
    """The end of the star at any other rank.

    Parameters
    ----------
    addresses : sequence of Address
        Where rank 0 may be; it is found where somebody proves to be rank 0 of this group.
    """

    def __init__(
        self,
        loop: EventLoop,
        addresses: Sequence[Address],
        token: bytes,
        claim: Claim,
        deadline: Deadline,
    ) -> None:
        super().__init__(loop, claim.rank, claim.world_size, deadline)
        self._addresses = addresses
        self._token = token
        self._claim = claim
        self._stream: Stream | None = None
        self._diallers: list[Dialler] = []
        self._winner: Dialler | None = None
        self._first_unauthenticated_at: float | None = None
        self._parts: deque[list[bytes]] = deque()
        self._failure: DistributedError | None = None
        self._is_committing = False
        self._is_over = False

    @property
    def connection(self) -> socket.socket:
        """The connection to rank 0, whose two addresses are the ones by which hosts are reached."""
        assert self._stream is not None
        return self._stream.socket

    def join(self, targets: Sequence[Target]) -> None:
        """Connect to rank 0, however late it comes.

        Raises
        ------
        NoConnection
            The listener there is not rank 0 of this group.
        Timeout
            Nobody listened there.
        """
        self._diallers = [self._dialler(target) for target in targets]
        for dialler in self._diallers:
            dialler.dial()
        if not self.loop.run_until(lambda: self._stream is not None, self.deadline.at):
            self._raise_unreached()

    def take(self, sock: socket.socket) -> None:
        """Take a connection to rank 0, where each has proved itself to the other."""
        for dialler in self._diallers:
            dialler.close()
        self._stream = Stream(
            self.loop,
            sock,
            self._hear(),
            lambda sock, result: None,
            self._on_lost,
            self._raise_failure,
        )
        self._stream.start()

    def all_gather(self, part: bytes) -> list[bytes]:
        assert self._stream is not None
        self._stream.write(encode_frame(FrameKind.CONTRIBUTION, part))
        if not self.loop.run_until(lambda: bool(self._parts), self.deadline.at):
            self._ask_who_is_missing()
        self.have_all_come = True
        return self._parts.popleft()

    def commit(self) -> None:
        self._is_committing = True
        self.all_gather(b"")
        self._is_over = True

    def fail(self, error: BaseException) -> None:
        was_told = error is self._failure
        self._is_over = True
        if self._stream is not None and not was_told:
            farewell(self.loop, [self._stream], as_distributed(error, self.rank))

    def _dialler(self, target: Target) -> Dialler:
        dialler = Dialler(
            self.loop,
            target,
            lambda be_patient: introduce(
                self._token, self._claim, 0, lambda: self._choose(dialler, be_patient)
            ),
            self.take,
            lambda error: self._on_failed(dialler, error),
        )
        return dialler

    def _choose(self, dialler: Dialler, be_patient: Callable[[], None]) -> None:
        # A listener on every interface answers at several addresses: one of them is enough.
        if self._winner is not None:
            raise ProtocolError("rank 0 has answered at another of its addresses")
        self._winner = dialler
        be_patient()

    def _on_failed(self, dialler: Dialler, error: Exception) -> None:
        if dialler is self._winner:
            self._winner = None
        if not isinstance(error, AuthenticationFailed):
            return
        now = time.monotonic()
        self._first_unauthenticated_at = self._first_unauthenticated_at or now
        is_lasting = now - self._first_unauthenticated_at >= AUTHENTICATION_GRACE_S
        if is_lasting and len(self._addresses) == 1:
            self._raise_unreached()

    def _hear(self) -> Conversation:
        while True:
            kind, body = yield from read_frame(max_gathered_nbytes(self.world_size))
            if kind is FrameKind.GATHERED:
                self._parts.append(unpack_list(body, self.world_size))
            elif kind is FrameKind.FAILURE:
                self._failure = decode_error(body, self.rank)
            else:
                raise ProtocolError("rank 0 sent a frame that it may not send")

    def _raise_failure(self) -> None:
        if self._failure is not None and not self._is_over:
            raise self._failure

    def _on_lost(self, error: Exception) -> None:
        if self._is_over or self._failure is not None:
            return
        if self._is_committing and self._parts:
            # Rank 0 has said its last words, and left.
            return
        raise PeerLostError(
            f"rendezvous: rank 0 ended while the group was being made ({error})",
            op="init",
            rank=self.rank,
            peer=0,
        )

    def _ask_who_is_missing(self) -> NoReturn:
        assert self._stream is not None
        own = self.timeout([])
        self._stream.write(encode_frame(FrameKind.FAILURE, encode_error(own)))
        self.loop.run_until(lambda: False, time.monotonic() + VERDICT_S)
        self._failure = self.timeout([0], " Rank 0 has let this rank in and says nothing more.")
        raise self._failure

    def _raise_unreached(self) -> NoReturn:
        where = " or ".join(address.text for address in self._addresses)
        tried = "; ".join(f"{d.target}: {d.describe_failure()}" for d in self._diallers)
        message = f"rendezvous: rank {self.rank} could not reach rank 0 at {where} "
        facts: dict[str, Any] = {"op": "init", "rank": self.rank, "peer": 0}
        if any(
            dialler.has_been_answered or isinstance(dialler.refusal, AuthenticationFailed)
            for dialler in self._diallers
        ):
            waited = "" if time.monotonic() < self.deadline.at else f"{self.deadline} "
            raise NoConnection(
                f"{message}{waited}({tried}). Something listens there that could not prove to be "
                "of this group: check the address, and that all ranks have the same token",
                **facts,
            )
        raise Timeout(
            f"{message}{self.deadline} ({tried}). Check that rank 0 runs and that this host can "
            "reach it; pass a larger timeout if it is only slow",
            missing=[0],
            seconds=self.deadline.seconds,
            **facts,
        )


def as_distributed(error: BaseException, rank: int) -> DistributedError:
    """Return an error of this rank in the form that the other ranks raise."""
    if isinstance(error, DistributedError) and not (type(error) is Io and error.peer is None):
        return error
    if not isinstance(error, Exception):
        return PeerLostError(
            f"rendezvous: rank {rank} was interrupted ({type(error).__name__})",
            op="init",
            peer=rank,
        )
    what = str(error) if isinstance(error, Io) else f"{type(error).__name__}: {error}"
    return Io(f"rendezvous: rank {rank} failed: {what}", op="init", peer=rank)


def farewell(loop: EventLoop, streams: Sequence[Stream], error: DistributedError) -> None:
    """Send an error, and wait a little until it has been read: closing at once could lose it."""
    frame = encode_frame(FrameKind.FAILURE, encode_error(error))
    listening = [stream for stream in streams if stream.is_open]
    with contextlib.suppress(Exception):
        for stream in listening:
            stream.write(frame)
        until = time.monotonic() + FAREWELL_S
        loop.run_until(lambda: all(s.is_flushed or not s.is_open for s in listening), until)
        for stream in listening:
            if stream.is_open:
                stream.socket.shutdown(socket.SHUT_WR)
        loop.run_until(lambda: not any(stream.is_open for stream in listening), until)


def describe_peer(sock: socket.socket) -> str:
    """Say who is at the other end of a connection."""
    with contextlib.suppress(OSError):
        if sock.family == socket.AF_UNIX:
            return f"process {peer_credentials(sock)[0]}"
        host, port = sock.getpeername()[:2]
        return f"at {host} port {port}"
    return "gone already"
