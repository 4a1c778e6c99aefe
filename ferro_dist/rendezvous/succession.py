"""The survivors of a group agree on who they are, and connect again.

1. Each rank turns to the lowest one that it does not know to be lost, at an address that
   follows from what only the group's ranks know. Being lost is certain: the kernel said
   so, or the rank closed the group. That lowest rank is the coordinator; the others tell
   it which ranks they know to be lost.
2. The coordinator waits for all that are not lost. Silent ranks are given half
   of the timeout. Then it decides on the members, and tells them.
3. The members connect as the ranks of any group do (`wiring`). If members are lost meanwhile,
   the others begin again at 1, among themselves.

A coordinator that is lost or silent is succeeded by the next rank: the first has half
of the timeout, the next half of what remains, and so on.

There is never a second successor. Where all ranks share memory, a word in it names the
coordinator that decides; another may take its place only if that one is lost and no
member has heard of its decision, or to carry on with the members that it decided on.
Elsewhere the members must be more than half of the ranks that are not lost, or half of
them including the lowest: a stopped rank that resumes, and finds nobody, is no majority.
"""

from __future__ import annotations

import contextlib
import math
import socket
import time
from collections.abc import Callable, Collection, Iterable
from typing import Generic, NamedTuple, Protocol

from ferro_dist.arguments import check_timeout, describe_ranks
from ferro_dist.deadline import Deadline
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
from ferro_dist.rendezvous.authentication import Claim, Role, group_digest
from ferro_dist.rendezvous.connection import (
    KnownPlace,
    naming_ranks_of_parent,
    os_errors_as_io,
    try_to_listen,
    world_of_one,
)
from ferro_dist.rendezvous.control_plane import (
    Coordinator,
    Exchange,
    Participant,
)
from ferro_dist.rendezvous.event_loop import Acceptor, EventLoop
from ferro_dist.rendezvous.frame import FrameKind, ProtocolError, decode_error
from ferro_dist.rendezvous.roll_call import (
    Answer,
    Roll,
    encode_members,
    encode_report,
    unpack_ranks,
)
from ferro_dist.rendezvous.wiring import CreateSegment, Group, Wiring, wire

__all__ = ["Predecessor", "connect_survivors"]

# How often a waiting rank checks what the old group knows.
FIRST_LOOK_S = 0.0005
MAX_LOOK_S = 0.02
LOOK_GROWTH = 0.05


class Predecessor(Protocol):
    """What the old group knows about its ranks; see `_native.host.Communicator`."""

    def lost_ranks(self) -> list[int]:
        """Return the ranks that will certainly not take part any more."""

    def succession(self) -> int:
        """Return the word by which ranks of one host agree on who decides."""

    def advance_succession(self, before: int, after: int) -> bool:
        """Make the word `after` if it was `before`; return whether it was."""


class _Word(NamedTuple):
    """Whose decision is in force on this host, and whether a member knows of it."""

    decider: int = -1
    is_accepted: bool = False

    def pack(self) -> int:
        return 2 * (self.decider + 1) + self.is_accepted

    @classmethod
    def unpack(cls, word: int) -> _Word:
        return cls(word // 2 - 1, bool(word % 2))


def connect_survivors(
    predecessor: Predecessor,
    parent: Wiring,
    *,
    create_segment: CreateSegment | None,
    adopt: Callable[[Wiring], Group],
    timeout: float,
) -> tuple[tuple[int, ...], Group]:
    """Connect those ranks of a group that go on; called by each of them.

    Parameters
    ----------
    predecessor : Predecessor
    parent : Wiring
        The old group's.
    create_segment, adopt
        As for `connect`. `adopt` is called again if members are lost meanwhile.
    timeout : float
        Seconds within which the members are connected; after half, silent ranks are left out.

    Returns
    -------
    members : tuple of int
        Their ranks in the old group, ascending; the same on all of them.
    group
        What `adopt` has made.

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
        return (0,), adopt(world_of_one())
    try:
        with os_errors_as_io(parent.rank):
            seconds = check_timeout(timeout)
            return _Succession(predecessor, parent, create_segment, adopt, seconds).run()
    except DistributedError as error:
        error.op, error.rank = "shrink", parent.rank
        raise


class _Succession(Generic[Group]):
    """The steps on one rank. All rank numbers here are those of the old group."""

    def __init__(
        self,
        predecessor: Predecessor,
        parent: Wiring,
        create_segment: CreateSegment | None,
        adopt: Callable[[Wiring], Group],
        timeout: float,
    ) -> None:
        self._predecessor = predecessor
        self._parent = parent
        self._rank = parent.rank
        self._create_segment = create_segment
        self._adopt = adopt
        self._deadline = Deadline(timeout)
        self._started_at = time.monotonic()
        self._group_id = group_digest("succession", parent.group_id.hex())
        self._candidates = frozenset(range(parent.world_size))
        self._lost: set[int] = set()
        self._silent: set[int] = set()
        self._was_heard = False  # a coordinator let this rank in
        self._is_member = False  # a decision names this rank
        self._decider = -1  # whose decision this rank follows

    def run(self) -> tuple[tuple[int, ...], Group]:
        while True:
            self._look()
            leader = min(self._candidates - self._lost - self._silent)
            with contextlib.closing(EventLoop()) as loop:
                if leader == self._rank:
                    exchange = self._coordinate(loop)
                else:
                    exchange = self._follow(loop, leader)
                members = tuple(sorted(self._candidates))
                if exchange is None and members == (self._rank,):
                    return members, self._adopt(world_of_one())
                if exchange is None:
                    continue
                try:
                    return members, self._wire(exchange, members)
                except PeerLostError as error:
                    self._begin_again(error)
                except Timeout as error:
                    raise self._timeout(error.missing, have_come=True) from error

    def _wire(self, exchange: Exchange, members: tuple[int, ...]) -> Group:
        place = KnownPlace([self._parent.addresses[member] for member in members])
        with naming_ranks_of_parent(members, self._rank):
            return wire(exchange, self._parent.token, self._create_segment, place, self._adopt)

    def _begin_again(self, error: PeerLostError) -> None:
        if error.peer is None or error.peer == self._rank:
            raise error
        self._lost.add(error.peer)
        if time.monotonic() >= self._deadline.at:
            raise self._timeout([error.peer]) from error

    # What is known about the others

    def _look(self) -> _Word:
        """Take over what the old group knows, and return whose decision is in force.

        Raises LockPoisoned if that one has left this rank out.
        """
        word = self._word()
        lost = self._predecessor.lost_ranks()
        self._learn_lost(lost)
        if word.decider in (-1, self._rank, self._decider):
            return word
        # Lost for certain, not just out of reach. If some member knows of its decision, this rank
        # may be a member, too: the one that knows will say so.
        if word.decider in lost and (self._may_be_member or not word.is_accepted):
            return word
        raise _left_out(word.decider)

    @property
    def _may_be_member(self) -> bool:
        return self._was_heard or self._is_member

    def _learn_lost(self, ranks: Iterable[int]) -> None:
        self._lost.update(ranks)
        self._lost.discard(self._rank)

    def _await(self, loop: EventLoop, is_done: Callable[[], bool], until: float) -> bool:
        """Serve the loop until `is_done`, checking the old group again and again."""
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

    def _timeout(
        self, missing: Collection[int], why: str = "", *, have_come: bool = False
    ) -> Timeout:
        names = describe_ranks(sorted(missing))
        if have_come:
            what, remedy = "came, but without a connection to every other", "they still run"
        else:
            what, remedy = "did not come", "every survivor calls shrink()"
        # Not the whole timeout, where no majority has come by half of it.
        waited_s = time.monotonic() - self._started_at
        return Timeout(
            f"shrink: {names} {what} within {waited_s:.1f} s.{why}\nCheck that {remedy}; pass a "
            "larger timeout if some are only slow, or make a new group.",
            peer=min(missing) if len(missing) == 1 else None,
            missing=sorted(missing),
            seconds=waited_s,
        )

    # The coordinator

    def _coordinate(self, loop: EventLoop) -> Exchange | None:
        """Wait for the others and decide; None if nobody else goes on."""
        roll = Roll(loop, self._rank, self._parent.world_size)
        acceptor = Acceptor(
            loop,
            self._listen(),
            self._parent.token,
            self._rank,
            self._group_id,
            roll.take,
            self._parent.world_size,
        )
        try:
            self._await(loop, lambda: self._is_complete(roll), self._patience_ends_at())
            members = self._decide(roll)
        except DistributedError as error:
            roll.dismiss_all_but((), error)
            raise
        finally:
            acceptor.close()
        roll.dismiss_all_but(members, _left_out(self._rank))
        if len(members) == 1:
            return None
        claim = Claim(Role.CONTROL, 0, len(members), self._group_id)
        exchange = Coordinator(loop, None, self._parent.token, claim, self._deadline)
        decision = encode_members(members, self._parent.world_size)
        for new_rank, member in enumerate(sorted(members)):
            if member != self._rank:
                exchange.take(new_rank, roll.release(member), decision)
        return exchange

    def _is_complete(self, roll: Roll) -> bool:
        self._learn_lost(roll.lost)
        for candidates in roll.former_decisions:
            if self._rank not in candidates:
                raise _left_out(min(candidates))
            self._candidates &= candidates
            self._is_member = True
        self._look()
        self._silent |= roll.withdrawn
        awaited = self._candidates - self._lost - self._silent - {self._rank}
        return awaited <= roll.present

    def _decide(self, roll: Roll) -> frozenset[int]:
        members = (self._candidates & roll.present - self._lost) | {self._rank}
        if self._parent.spans_memories:
            self._check_majority(members)
        former = self._look()
        is_bound = former.is_accepted and former.decider != self._rank
        # Nobody else will ever hear of the decision of a rank that goes on alone.
        own = _Word(self._rank, is_accepted=len(members) == 1)
        if (is_bound and not self._is_member) or not self._advance(former, own):
            raise _left_out(self._word().decider)
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
        answer = Answer(loop, self._report_frame())
        claim = Claim(Role.CONTROL, self._rank, self._parent.world_size, self._group_id)
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
        return self._obey(loop, answer, leader)

    def _obey(self, loop: EventLoop, answer: Answer, leader: int) -> Exchange | None:
        if answer.kind is None:
            answer.close()
            self._lost.add(leader)
            return None
        try:
            members = self._members_of(answer, leader)
        except BaseException:
            answer.socket.close()
            raise
        if not self._accept_decision(leader):
            answer.socket.close()
            self._lost.add(leader)
            return None
        self._candidates, self._is_member, self._decider = members, True, leader
        new_rank = sorted(members).index(self._rank)
        claim = Claim(Role.CONTROL, new_rank, len(members), self._group_id)
        exchange = Participant(loop, (), self._parent.token, claim, self._deadline)
        exchange.take(answer.socket)
        return exchange

    def _accept_decision(self, leader: int) -> bool:
        """Put a coordinator's decision in force; False if another has taken its place meanwhile."""
        accepted = _Word(leader, is_accepted=True)
        if self._parent.spans_memories:
            # A majority is in force anyway; this tells ranks of this host that come too late.
            self._advance(self._word(), accepted)
            return True
        is_first = self._advance(_Word(leader), accepted)
        return is_first or self._word() == accepted

    def _word(self) -> _Word:
        return _Word.unpack(self._predecessor.succession())

    def _advance(self, before: _Word, after: _Word) -> bool:
        return self._predecessor.advance_succession(before.pack(), after.pack())

    def _members_of(self, answer: Answer, leader: int) -> frozenset[int]:
        members = unpack_ranks(answer.body, self._parent.world_size)
        if answer.kind is FrameKind.MEMBERS and {leader, self._rank} <= members:
            return members
        failure: Exception = ProtocolError("a decision that says nothing sensible")
        with contextlib.suppress(ProtocolError):
            if answer.kind is FrameKind.FAILURE:
                failure = decode_error(answer.body, self._rank)
        if isinstance(failure, DistributedError):
            raise failure
        raise NoConnection(f"shrink: rank {leader} sent {failure}", peer=leader)

    def _report_frame(self) -> bytes:
        former = self._candidates if self._is_member else ()
        return encode_report(self._lost, former, self._parent.world_size)

    # Where

    def _key(self, leader: int) -> tuple[object, ...]:
        return "succession", self._parent.group_id.hex(), leader

    def _unix_target(self, leader: int) -> Target:
        (address,) = parse_addresses(derived_unix_addr(*self._key(leader)))
        return resolve(address, self._parent.token, self._deadline.at)[0]

    def _targets(self, leader: int) -> list[Target]:
        if not self._parent.spans_networks:
            return [self._unix_target(leader)]
        host = self._parent.addresses[leader]
        return [target_of(host, port) for port in derived_ports(*self._key(leader))]

    def _listen(self) -> socket.socket:
        if not self._parent.spans_networks:
            return listen(self._unix_target(self._rank))
        ports = derived_ports(*self._key(self._rank))
        for port in ports:
            result = try_to_listen(wildcard_target(port))
            if isinstance(result, socket.socket):
                return result
            if not is_taken(result):
                raise result
        raise NoConnection(
            f"shrink: the ports {', '.join(map(str, ports))}, at which the others look for rank "
            f"{self._rank}, are taken. Make a new group"
        )


def _left_out(decider: int) -> LockPoisoned:
    return LockPoisoned(
        f"shrink: this rank was left out. When rank {decider} decided which ranks go on, it had "
        "not come yet.\nMake a new group, or call shrink() with a larger timeout on every rank.",
        peer=decider,
    )
