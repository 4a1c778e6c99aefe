"""What the ranks of a group that has lost members tell the one that decides who goes on.

A rank's report is two sets of ranks, one bit for each rank of the group: whom it knows to
be lost, and the members that a former coordinator decided on, if it heard of them. The
answer is the set of members, or a failure.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Collection, Iterable

from ferro_dist.errors import DistributedError
from ferro_dist.rendezvous.address import Target
from ferro_dist.rendezvous.authentication import Claim, Role, introduce
from ferro_dist.rendezvous.event_loop import READ, Dialler, EventLoop, Stream
from ferro_dist.rendezvous.frame import (
    MAX_CONTRIBUTION_NBYTES,
    Conversation,
    FrameKind,
    ProtocolError,
    encode_error,
    encode_frame,
    read_frame,
)

__all__ = ["Answer", "Roll", "encode_members", "encode_report", "unpack_ranks"]


def encode_report(lost: Iterable[int], former: Iterable[int], world_size: int) -> bytes:
    """Return what a rank says first."""
    body = _pack(lost, world_size) + _pack(former, world_size)
    return encode_frame(FrameKind.CONTRIBUTION, body)


def encode_members(members: Iterable[int], world_size: int) -> bytes:
    """Return the coordinator's decision."""
    return encode_frame(FrameKind.MEMBERS, _pack(members, world_size))


def unpack_ranks(body: bytes, world_size: int) -> frozenset[int]:
    """Return the set of ranks that the body of a decision holds."""
    bits = int.from_bytes(body, "little")
    return frozenset(rank for rank in range(world_size) if bits >> rank & 1)


class Roll:
    """Which ranks have come to the coordinator.

    Attributes
    ----------
    lost : set of int
        Ranks that somebody knows to be lost, or that were here and ended.
    withdrawn : set of int
        Ranks that were here and gave up.
    former_decisions : set of frozenset of int
        Members that an earlier coordinator, lost since, had decided on.
    """

    def __init__(self, loop: EventLoop, rank: int, world_size: int) -> None:
        self.lost: set[int] = set()
        self.withdrawn: set[int] = set()
        self.former_decisions: set[frozenset[int]] = set()
        self._loop = loop
        self._rank = rank
        self._world_size = world_size
        self._sockets: dict[int, socket.socket] = {}
        self._reporting: set[Stream] = set()  # of ranks that have not said everything yet

    @property
    def present(self) -> frozenset[int]:
        """The ranks that are here."""
        return frozenset(self._sockets)

    def take(self, sock: socket.socket, claim: Claim) -> None:
        """Listen to a rank that has proved itself."""
        is_other = claim.rank != self._rank and claim.world_size == self._world_size
        if claim.role is not Role.CONTROL or not is_other:
            sock.close()
            return
        stream = Stream(
            self._loop,
            sock,
            _read_report(self._world_size),
            lambda sock, said: self._keep(stream, claim.rank, *said),
            lambda error: self._reporting.remove(stream),
        )
        self._reporting.add(stream)
        stream.start()

    def release(self, rank: int) -> socket.socket:
        """Hand over a rank's connection."""
        sock = self._sockets.pop(rank)
        self._loop.unwatch(sock)
        return sock

    def dismiss_all_but(self, members: Collection[int], error: DistributedError) -> None:
        """Tell the others why they cannot go on.

        Those too whose report is still to come: a rank whose connection just ended would take the
        coordinator for lost, and might go on by itself.
        """
        frame = encode_frame(FrameKind.FAILURE, encode_error(error))
        late = [stream.socket for stream in self._reporting]
        for sock in late:
            self._loop.unwatch(sock)
        for sock in [*late, *map(self.release, self.present - frozenset(members))]:
            with sock, contextlib.suppress(OSError):
                sock.send(frame)

    def _keep(
        self, stream: Stream, rank: int, lost: frozenset[int], former: frozenset[int]
    ) -> None:
        self._reporting.remove(stream)
        sock = stream.socket
        if rank in self._sockets:  # it has lost the connection before
            self._loop.discard(self._sockets.pop(rank))
        self._sockets[rank] = sock
        self._loop.watch(sock, READ, lambda _: self._on_word(rank, sock))
        self.lost |= lost
        if former:
            self.former_decisions.add(former)

    def _on_word(self, rank: int, sock: socket.socket) -> None:
        """Strike a rank off: a waiting rank may say nothing but that it gives up."""
        try:
            has_ended = not sock.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return
        except OSError:
            has_ended = True
        (self.lost if has_ended else self.withdrawn).add(rank)
        self._loop.discard(self._sockets.pop(rank))


class Answer:
    """A rank's connection to the coordinator, and the coordinator's answer.

    Attributes
    ----------
    is_connected : bool
        Whether each has proved itself to the other.
    is_over : bool
        Whether the coordinator has answered, or ended.
    kind, body
        The answer; `kind` is None if it ended without.
    socket : socket
        The caller's again once there is an answer.
    """

    def __init__(self, loop: EventLoop, report_frame: bytes) -> None:
        self.is_connected = False
        self.is_over = False
        self.kind: FrameKind | None = None
        self.body = b""
        self.socket: socket.socket
        self._loop = loop
        self._report_frame = report_frame
        self._stream: Stream | None = None
        self._diallers: list[Dialler] = []

    def dial(self, targets: Iterable[Target], token: bytes, claim: Claim, leader: int) -> None:
        """Connect, however late the coordinator comes."""
        for target in targets:
            dialler = Dialler(
                self._loop,
                target,
                lambda be_patient: introduce(token, claim, leader, be_patient),
                self._on_connected,
            )
            self._diallers.append(dialler)
            dialler.dial()

    def close(self) -> None:
        """End the connection."""
        for dialler in self._diallers:
            dialler.close()
        if self._stream is not None and self._stream.is_open:
            self._stream.close()

    def withdraw(self) -> None:
        """Tell the coordinator not to count on this rank."""
        if self._stream is not None and self._stream.is_open:
            self._stream.write(encode_frame(FrameKind.FAILURE, b""))
        self.close()

    def _on_connected(self, sock: socket.socket) -> None:
        for dialler in self._diallers:
            dialler.close()
        self.is_connected = True
        self._stream = Stream(
            self._loop, sock, _ask(self._report_frame), self._on_answer, self._on_end
        )
        self._stream.start()

    def _on_answer(self, sock: socket.socket, answer: tuple[FrameKind, bytes]) -> None:
        self.socket = sock
        self.kind, self.body = answer
        self.is_over = True

    def _on_end(self, _: Exception) -> None:
        self.is_over = True


def _ask(report_frame: bytes) -> Conversation:
    yield report_frame
    return (yield from read_frame(MAX_CONTRIBUTION_NBYTES))


def _read_report(world_size: int) -> Conversation:
    nbytes = _packed_nbytes(world_size)
    kind, body = yield from read_frame(2 * nbytes)
    if kind is not FrameKind.CONTRIBUTION or len(body) != 2 * nbytes:
        raise ProtocolError("no report of a survivor")
    return unpack_ranks(body[:nbytes], world_size), unpack_ranks(body[nbytes:], world_size)


def _packed_nbytes(world_size: int) -> int:
    return (world_size + 7) // 8


def _pack(ranks: Iterable[int], world_size: int) -> bytes:
    """Return a set of ranks as one bit for each rank of the group."""
    return sum(1 << rank for rank in ranks).to_bytes(_packed_nbytes(world_size), "little")
