"""The survivors of a group agree on who they are, and connect anew.

1. Each rank turns to the lowest one that it does not know to be lost, at an address that
   follows from what only the group's ranks know. Being lost is certain: the kernel said
   so, or the rank closed the group. That lowest rank is the coordinator; the others tell
   it whom they know to be lost.
2. The coordinator waits for all that are not lost. Ranks that are silent are given half
   of the timeout. Then it decides on the members, and tells them.
3. The members connect as the ranks of any group do (`wiring`). Who is lost meanwhile is
   left out: they begin again at 1, among themselves.

A coordinator that is lost is followed by the next rank, one that is silent as well: the
first has half of the timeout, the next half of what remains, and so on.

There is never a second successor. Where all ranks share memory, a word in it takes the
first decision and no other. Elsewhere the members must be more than half of the ranks
that are not lost, or half of them with the lowest: a stopped rank that goes on, and
finds nobody, is not a majority. Ranks once left out stay out.
"""

from __future__ import annotations

import contextlib
import math
import socket
import time
from collections.abc import Callable, Collection, Iterable
from typing import Protocol

from ferro_dist.errors import (
    DistributedError,
    LockPoisoned,
    NoConnection,
    PeerLostError,
    Timeout,
)
from ferro_dist.rendezvous.address import (
    Target,
    derived_ports,
    derived_unix_addr,
    is_taken,
    listen,
    parse_addresses,
    resolve,
    target_of,
    wildcard_target,
)
from ferro_dist.rendezvous.authentication import Claim, Role, group_digest, introduce
from ferro_dist.rendezvous.connection import (
    KnownPlace,
    check_timeout,
    system_errors,
    try_to_listen,
    world_of_one,
)
from ferro_dist.rendezvous.control_plane import (
    Coordinator,
    Deadline,
    Exchange,
    Participant,
    describe_ranks,
)
from ferro_dist.rendezvous.event_loop import READ, Acceptor, Dialler, EventLoop, Stream
from ferro_dist.rendezvous.frame import (
    Conversation,
    FrameKind,
    ProtocolError,
    decode_error,
    encode_error,
    encode_frame,
    read_frame,
)
from ferro_dist.rendezvous.wiring import Segment, Wiring, wire

__all__ = ["Predecessor", "connect_survivors"]

# How often a waiting rank looks at what the old group knows.
FIRST_LOOK_S = 0.0005
MAX_LOOK_S = 0.02
LOOK_GROWTH = 0.05
# A failure's text and numbers; see `frame.encode_error`.
MAX_ANSWER_NBYTES = 16 * 1024


class Predecessor(Protocol):
    """What the old group knows of its ranks; see `_native.host.Communicator`."""

    def lost_ranks(self) -> list[int]:
        """Return the ranks that are certain to take part no more."""

    def successor(self) -> int:
        """Return the rank that decided who goes on, or -1."""

    def claim_succession(self, former: int, decider: int) -> bool:
        """Make that rank `decider` if it was `former`."""


def connect_survivors(
    predecessor: Predecessor,
    parent: Wiring,
    *,
    create_segment: Segment,
    timeout: float,
    shared_memory: bool = True,
) -> tuple[tuple[int, ...], Wiring]:
    """Connect those ranks of a group that go on; called by each of them.

    Parameters
    ----------
    predecessor : Predecessor
    parent : Wiring
        The old group's.
    create_segment, shared_memory
        As for `connect`.
    timeout : float
        Seconds until the members are connected; half of it until silent ranks are left out.

    Returns
    -------
    members : tuple of int
        Their ranks in the old group, ascending; the same on all of them.
    wiring : Wiring

    Raises
    ------
    LockPoisoned
        The others went on without this rank.
    Timeout
        Silent ranks kept the others from deciding, or from connecting, in time.
    NoConnection, Io
        As for `connect`.
    """
    if parent.world_size == 1:
        return (0,), world_of_one()
    try:
        with system_errors(parent.rank):
            return _Succession(
                predecessor, parent, create_segment, shared_memory, check_timeout(timeout)
            ).run()
    except DistributedError as error:
        error.op, error.rank = "shrink", parent.rank
        raise


class _Succession:
    """The steps on one rank. All ranks here are the old group's."""

    def __init__(
        self,
        predecessor: Predecessor,
        parent: Wiring,
        create_segment: Segment,
        shared_memory: bool,
        timeout: float,
    ) -> None:
        self._predecessor = predecessor
        self._parent = parent
        self._rank = parent.rank
        self._create_segment = create_segment
        self._shared_memory = shared_memory
        self._deadline = Deadline(timeout)
        self._started_at = time.monotonic()
        self._group = group_digest("succession", parent.identity.hex())
        self._candidates = frozenset(range(parent.world_size))
        self._lost: set[int] = set()
        self._silent: set[int] = set()
        self._was_heard = False  # a coordinator let this rank in
        self._is_member = False  # a decision names this rank
        self._decider = -1  # whose decision this rank follows

    def run(self) -> tuple[tuple[int, ...], Wiring]:
        while True:
            self._look()
            leader = min(self._candidates - self._lost - self._silent)
            with contextlib.closing(EventLoop()) as loop:
                take_part = self._coordinate if leader == self._rank else self._follow
                exchange = take_part(loop, leader)
                members = tuple(sorted(self._candidates))
                if exchange is None and members == (self._rank,):
                    return members, world_of_one()
                if exchange is None:
                    continue
                try:
                    return members, self._wire(exchange, members)
                except PeerLostError as error:
                    self._begin_again(error, members)
                except Timeout as error:
                    raise self._timeout([members[rank] for rank in error.missing]) from error

    def _wire(self, exchange: Exchange, members: tuple[int, ...]) -> Wiring:
        views = tuple(self._parent.addresses[member] for member in members)
        return wire(
            exchange,
            self._parent.token,
            self._create_segment,
            self._shared_memory,
            KnownPlace(views),
        )

    def _begin_again(self, error: PeerLostError, members: tuple[int, ...]) -> None:
        if error.peer is None or members[error.peer] in self._lost | {self._rank}:
            raise error
        self._lost.add(members[error.peer])

    # What is known of the others

    def _look(self) -> int:
        """Take over what the old group knows, and return who has decided so far, or -1.

        Raises LockPoisoned if that rank has left this one out.
        """
        decider = self._predecessor.successor()
        self._learn_lost(self._predecessor.lost_ranks())
        if decider in (-1, self._rank, self._decider):
            return decider
        # It may have decided on this rank too, and died before it could say so.
        if decider in self._lost and (self._was_heard or self._is_member):
            return decider
        raise _left_out(self._rank, decider)

    def _learn_lost(self, ranks: Iterable[int]) -> None:
        self._lost.update(ranks)
        self._lost.discard(self._rank)

    def _await(self, loop: EventLoop, is_done: Callable[[], bool], until: float) -> bool:
        """Serve the loop until `is_done`, looking again and again at the old group."""
        while not is_done():
            now = time.monotonic()
            if now >= until:
                return False
            pause = min(MAX_LOOK_S, max(FIRST_LOOK_S, LOOK_GROWTH * (now - self._started_at)))
            loop.run_until(is_done, min(until, now + pause))
            self._learn_lost(self._predecessor.lost_ranks())
        return True

    def _patience_ends_at(self) -> float:
        num_passed = sum(rank < self._rank for rank in self._silent)
        seconds = self._deadline.seconds
        if math.isinf(seconds):
            return math.inf
        return self._started_at + seconds * (1 - 0.5 ** (num_passed + 1))

    def _timeout(self, missing: Collection[int], why: str = "") -> Timeout:
        names = describe_ranks(sorted(missing))
        return Timeout(
            f"shrink: {names} did not come {self._deadline}.{why}\nCheck that every survivor "
            "calls shrink(); pass a larger timeout if some are only slow, or make a new group.",
            peer=min(missing) if len(missing) == 1 else None,
            missing=sorted(missing),
            seconds=self._deadline.seconds,
        )

    # The coordinator

    def _coordinate(self, loop: EventLoop, rank: int) -> Exchange | None:
        """Wait for the others and decide; None if nobody else goes on."""
        roll = _Roll(loop, rank, self._parent.world_size)
        acceptor = Acceptor(
            loop,
            self._listen(rank),
            self._parent.token,
            rank,
            self._group,
            roll.take,
            self._parent.world_size,
        )
        try:
            self._await(loop, lambda: self._is_complete(roll), self._patience_ends_at())
            members = self._decide(roll)
        except DistributedError as error:
            roll.dismiss(roll.present, error)
            raise
        finally:
            acceptor.close()
        roll.dismiss(roll.present - members, _left_out(self._rank, self._rank))
        if len(members) == 1:
            return None
        claim = Claim(Role.CONTROL, 0, len(members), self._group)
        exchange = Coordinator(loop, None, self._parent.token, claim, self._deadline)
        decision = encode_frame(FrameKind.MEMBERS, _pack(members, self._parent.world_size))
        for new_rank, member in enumerate(sorted(members)):
            if member != rank:
                exchange.adopt(new_rank, roll.release(member), decision)
        return exchange

    def _is_complete(self, roll: _Roll) -> bool:
        self._learn_lost(roll.lost)
        for candidates in roll.former_decisions:
            if self._rank not in candidates:
                raise _left_out(self._rank, min(candidates))
            self._candidates &= candidates
            self._is_member = True
        self._look()
        self._silent |= roll.withdrawn
        awaited = self._candidates - self._lost - self._silent - {self._rank}
        return awaited <= roll.present

    def _decide(self, roll: _Roll) -> frozenset[int]:
        members = (self._candidates & roll.present - self._lost) | {self._rank}
        if self._parent.spans_memories:
            self._check_majority(members)
        if not self._predecessor.claim_succession(self._look(), self._rank):
            raise _left_out(self._rank, self._predecessor.successor())
        self._candidates, self._is_member, self._decider = members, True, self._rank
        return members

    def _check_majority(self, members: frozenset[int]) -> None:
        possible = self._candidates - self._lost
        has_lowest = min(possible) in members
        if 2 * len(members) + has_lowest <= len(possible):
            raise self._timeout(
                possible - members,
                " It may be that they go on without this rank: the ranks that came are no "
                "majority of those that are not known to be dead.",
            )

    # The others

    def _follow(self, loop: EventLoop, leader: int) -> Exchange | None:
        """Let the coordinator decide; None if it is lost or silent."""
        answer = _Answer(loop, self._claim_frame())
        claim = Claim(Role.CONTROL, self._rank, self._parent.world_size, self._group)
        answer.dial(self._targets(leader), self._parent.token, claim, leader)

        def is_over() -> bool:
            if not answer.is_connected:
                self._look()
            return answer.is_over or leader in self._lost

        patience = self._patience_ends_at()
        self._await(loop, lambda: answer.is_connected or is_over(), patience)
        if not answer.is_connected:
            answer.close()
            if leader not in self._lost:
                self._silent.add(leader)
            return None
        self._was_heard = True
        try:
            if not self._await(loop, is_over, self._deadline.at):
                raise self._timeout([leader])
        except BaseException:
            answer.withdraw()
            raise
        return self._accept(loop, answer, leader)

    def _accept(self, loop: EventLoop, answer: _Answer, leader: int) -> Exchange | None:
        if answer.kind is None:
            answer.close()
            self._lost.add(leader)
            return None
        try:
            members = self._members_of(answer, leader)
        except BaseException:
            answer.socket.close()
            raise
        self._candidates, self._is_member, self._decider = members, True, leader
        # Ranks of this host that come too late find out here; the coordinator may be elsewhere.
        self._predecessor.claim_succession(-1, leader)
        new_rank = sorted(members).index(self._rank)
        claim = Claim(Role.CONTROL, new_rank, len(members), self._group)
        exchange = Participant(loop, (), self._parent.token, claim, self._deadline)
        exchange.adopt(answer.socket)
        return exchange

    def _members_of(self, answer: _Answer, leader: int) -> frozenset[int]:
        members = _unpack(answer.body, self._parent.world_size)
        if answer.kind is FrameKind.MEMBERS and {leader, self._rank} <= members:
            return members
        failure: Exception = ProtocolError("a decision that says nothing sensible")
        with contextlib.suppress(ProtocolError):
            if answer.kind is FrameKind.FAILURE:
                failure = decode_error(answer.body, self._rank)
        if isinstance(failure, DistributedError):
            raise failure
        raise NoConnection(f"shrink: rank {leader} sent {failure}", peer=leader)

    def _claim_frame(self) -> bytes:
        size = self._parent.world_size
        former = self._candidates if self._is_member else frozenset[int]()
        return encode_frame(FrameKind.CONTRIBUTION, _pack(self._lost, size) + _pack(former, size))

    # Where

    def _key(self, leader: int) -> tuple[object, ...]:
        return "succession", self._parent.identity.hex(), leader

    def _unix_target(self, leader: int) -> Target:
        (address,) = parse_addresses(derived_unix_addr(*self._key(leader)))
        return resolve(address, self._parent.token, self._deadline.at)[0]

    def _targets(self, leader: int) -> list[Target]:
        if not self._parent.spans_networks:
            return [self._unix_target(leader)]
        host = self._parent.addresses[leader]
        return [target_of(host, port) for port in derived_ports(*self._key(leader))]

    def _listen(self, rank: int) -> socket.socket:
        if not self._parent.spans_networks:
            return listen(self._unix_target(rank))
        ports = derived_ports(*self._key(rank))
        for port in ports:
            result = try_to_listen(wildcard_target(port))
            if isinstance(result, socket.socket):
                return result
            if not is_taken(result):
                raise result
        raise NoConnection(
            f"shrink: rank {rank} finds the ports {', '.join(map(str, ports))} taken, at which "
            "the others look for it. Make a new group"
        )


class _Roll:
    """Who has come to the coordinator.

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

    @property
    def present(self) -> frozenset[int]:
        """The ranks that are here."""
        return frozenset(self._sockets)

    def take(self, sock: socket.socket, claim: Claim) -> None:
        """Hear a rank that has proved itself."""
        is_other = claim.rank != self._rank and claim.world_size == self._world_size
        if claim.role is not Role.CONTROL or not is_other:
            sock.close()
            return
        stream = Stream(
            self._loop,
            sock,
            _read_claim(self._world_size),
            lambda sock, said: self._keep(claim.rank, sock, *said),
            lambda error: None,
        )
        stream.start()

    def release(self, rank: int) -> socket.socket:
        """Give away a rank's connection."""
        sock = self._sockets.pop(rank)
        self._loop.unwatch(sock)
        return sock

    def dismiss(self, ranks: Iterable[int], error: DistributedError) -> None:
        """Tell ranks why they cannot go on."""
        frame = encode_frame(FrameKind.FAILURE, encode_error(error))
        for rank in ranks:
            with self.release(rank) as sock, contextlib.suppress(OSError):
                sock.send(frame)

    def _keep(
        self, rank: int, sock: socket.socket, lost: frozenset[int], former: frozenset[int]
    ) -> None:
        if rank in self._sockets:  # it has lost the connection before
            self._loop.discard(self._sockets.pop(rank))
        self._sockets[rank] = sock
        self._loop.watch(sock, READ, lambda _: self._on_word(rank, sock))
        self.lost |= lost
        if former:
            self.former_decisions.add(former)

    def _on_word(self, rank: int, sock: socket.socket) -> None:
        """Strike a rank off: all that one who waits may say is that it gives up."""
        try:
            has_ended = not sock.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return
        except OSError:
            has_ended = True
        (self.lost if has_ended else self.withdrawn).add(rank)
        self._loop.discard(self._sockets.pop(rank))


class _Answer:
    """A rank's connection to the coordinator, and what that one said.

    Attributes
    ----------
    is_connected : bool
        Each has proved itself to the other.
    is_over : bool
        The coordinator has answered, or ended.
    kind, body
        The answer; `kind` is None if it ended without.
    socket : socket
        Ours again once there is an answer.
    """

    def __init__(self, loop: EventLoop, claim_frame: bytes) -> None:
        self.is_connected = False
        self.is_over = False
        self.kind: FrameKind | None = None
        self.body = b""
        self.socket: socket.socket
        self._loop = loop
        self._claim_frame = claim_frame
        self._stream: Stream | None = None
        self._diallers: list[Dialler] = []

    def dial(self, targets: Iterable[Target], token: bytes, claim: Claim, leader: int) -> None:
        """Connect, however late the coordinator comes."""
        for target in targets:
            dialler = Dialler(
                self._loop,
                target,
                lambda commit: introduce(token, claim, leader, commit),
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
            self._loop, sock, _ask(self._claim_frame), self._on_answer, self._on_end
        )
        self._stream.start()

    def _on_answer(self, sock: socket.socket, answer: tuple[FrameKind, bytes]) -> None:
        self.socket = sock
        self.kind, self.body = answer
        self.is_over = True

    def _on_end(self, _: Exception) -> None:
        self.is_over = True


def _ask(claim_frame: bytes) -> Conversation:
    yield claim_frame
    return (yield from read_frame(MAX_ANSWER_NBYTES))


def _read_claim(world_size: int) -> Conversation:
    nbytes = _packed_nbytes(world_size)
    kind, body = yield from read_frame(2 * nbytes)
    if kind is not FrameKind.CONTRIBUTION or len(body) != 2 * nbytes:
        raise ProtocolError("no claim to a succession")
    return _unpack(body[:nbytes], world_size), _unpack(body[nbytes:], world_size)


def _packed_nbytes(world_size: int) -> int:
    return (world_size + 7) // 8


def _pack(ranks: Iterable[int], world_size: int) -> bytes:
    """Return a set of ranks as one bit for each rank of the group."""
    return sum(1 << rank for rank in ranks).to_bytes(_packed_nbytes(world_size), "little")


def _unpack(body: bytes, world_size: int) -> frozenset[int]:
    bits = int.from_bytes(body, "little")
    return frozenset(rank for rank in range(world_size) if bits >> rank & 1)


def _left_out(rank: int, decider: int) -> LockPoisoned:
    who = "this rank" if decider == rank else f"rank {decider}"
    return LockPoisoned(
        f"shrink: this rank was left out. When {who} decided which ranks go on, it had not come "
        "yet.\nMake a new group, or call shrink() with a larger timeout on every rank.",
        peer=decider,
    )
