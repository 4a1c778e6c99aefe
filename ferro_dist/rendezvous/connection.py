"""Ranks that know nothing but an address become a group whose members are connected.

1. Rank 0 listens; the others dial until it comes. Every connection, these and all
   that follow, begins with the proof that both ends know the token (`authentication`).
2. to 5. They tell each other who they are, and connect to each other (`wiring`).

A rank that fails anywhere on the way tells the others why, and all raise within the timeout.
Nothing listens any more once the group is complete.
"""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from ferro_dist.arguments import check_place, check_timeout, name_ranks_of_parent
from ferro_dist.cores import count_own
from ferro_dist.deadline import Deadline
from ferro_dist.errors import DistributedError, Io, NoConnection, Timeout
from ferro_dist.network_interfaces import is_loopback, is_wildcard
from ferro_dist.rendezvous.address import (
    Address,
    Target,
    is_taken,
    listen,
    listening_targets,
    parse_addresses,
    resolve,
)
from ferro_dist.rendezvous.authentication import (
    HOW_TO_SET_A_TOKEN,
    Claim,
    Role,
    find_token,
    group_digest,
)
from ferro_dist.rendezvous.control_plane import Coordinator, Exchange, Participant
from ferro_dist.rendezvous.event_loop import EventLoop, describe_error
from ferro_dist.rendezvous.member import Member, Place
from ferro_dist.rendezvous.parent_exchange import ParentExchange, stand_by
from ferro_dist.rendezvous.wiring import CreateSegment, Group, Wiring, wire

__all__ = [
    "KnownPlace",
    "Wiring",
    "connect",
    "connect_through",
    "naming_ranks_of_parent",
    "os_errors_as_io",
    "stand_by",
    "try_to_listen",
    "world_of_one",
]

# A rank 0 that finds its address taken asks there whether another rank 0 of its group has it.
DUPLICATE_CHECK_S = 0.5


def connect(
    rank: int,
    world_size: int,
    addr: str | None,
    *,
    create_segment: CreateSegment | None,
    adopt: Callable[[Wiring], Group],
    token: bytes | str | None = None,
    timeout: float = 300.0,
    listener: socket.socket | None = None,
    group: str = "world",
    epoch: str = "",
    check: Callable[[], object] = lambda: None,
    environ: Mapping[str, str] = os.environ,
) -> Group:
    """Connect the ranks of a group to each other.

    Parameters
    ----------
    rank, world_size : int
    addr : str or None
        Where rank 0 listens: ``"host:port"``, ``"unix:@name"`` (one host), or several
        separated by commas. None if there is only one rank.
    create_segment : callable or None
        Makes shared memory for so many ranks and returns its descriptor. Called on the lowest rank
        of each host that has several. None: sockets, even between ranks of one host.
    adopt : callable
        Makes the group from the wiring, as soon as this rank is connected and before it is known
        that all are: from then on the group notices ranks that die. It is closed if an error
        follows.
    token : bytes, optional
        The group's secret. Default: ``FERRO_DIST_TOKEN``, the descriptor
        ``FERRO_DIST_TOKEN_FD``, else, on this machine alone, a file of this user.
    timeout : float, optional
        Seconds from here until all ranks are connected.
    listener : socket, optional
        On rank 0: a socket that listens at `addr` already. It is closed in every case.
    group, epoch : str, optional
        These distinguish groups with the same token; the same on all ranks.
    check : callable, optional
        Called while no other rank knows of this one yet: what it raises concerns nobody else.
    environ : mapping of str to str
        The environment variables that tell the token, and whether ferrorun listens at `addr`.

    Returns
    -------
    What `adopt` has made.

    Raises
    ------
    InvalidRank, InvalidWorldSize
        Rank and world size do not fit; a rank was started twice; world sizes differ.
    NoConnection
        The address is taken, or the listener there does not know the token.
    Timeout
        Not all ranks came; the error names the missing ones, on every rank that did come.
    PeerLostError
        A rank ended while the group was being made.
    Io
        A system call failed on some rank; the error says which.
    TypeError, ValueError
        `listener` is no socket, or does not listen.
    """
    with contextlib.ExitStack() as stack:
        stack.enter_context(os_errors_as_io(rank))
        if listener is not None:
            _check_is_socket(listener)
            stack.callback(listener.close)
            _check_listens(listener)
        check()
        rank, world_size = check_place(rank, world_size)
        deadline = Deadline(check_timeout(timeout))
        if world_size == 1:
            return adopt(world_of_one())
        claim = Claim(Role.CONTROL, rank, world_size, group_digest(group, epoch))
        entrance = _Entrance(claim, addr, listener, deadline, token, environ)
        loop = EventLoop()
        stack.callback(loop.close)
        exchange = entrance.open(loop)
        return wire(exchange, entrance.token, create_segment, entrance, adopt)


def _check_is_socket(listener: object) -> None:
    if not isinstance(listener, socket.socket):
        raise TypeError(f"listener must be a socket that listens, not {listener!r:.80}.")


def _check_listens(listener: socket.socket) -> None:
    if not listener.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
        raise ValueError("listener must be a socket that listens: call its listen() first.")


def connect_through(
    all_gather: Callable[[bytes], Sequence[bytes]],
    rank: int,
    world_size: int,
    *,
    create_segment: CreateSegment | None,
    adopt: Callable[[Wiring], Group],
    token: bytes,
    timeout: float,
    addresses: Sequence[str],
) -> Group:
    """Connect the ranks of a group by means of an existing group.

    Parameters
    ----------
    all_gather : callable
        Gives every rank of the new group the byte strings of all, in rank order. Ranks of the
        existing group that it needs besides them must `stand_by`, unless the new group has only
        one rank, which calls it not even once.
    rank, world_size : int
        Of the new group.
    token, addresses
        The parent's ``Wiring.token``, and of its ``Wiring.addresses`` those of the new group.
    create_segment, adopt, timeout
        As for `connect`.

    Raises
    ------
    NoConnection, Timeout, PeerLostError
        As for `connect`.
    """
    if world_size == 1:
        return adopt(world_of_one())
    with os_errors_as_io(rank), contextlib.closing(EventLoop()) as loop:
        exchange = ParentExchange(loop, all_gather, rank, world_size, Deadline(timeout))
        return wire(exchange, token, create_segment, KnownPlace(addresses), adopt)


@contextlib.contextmanager
def os_errors_as_io(rank: int) -> Iterator[None]:
    """Turn an OSError into an Io that names this rank."""
    try:
        yield
    except OSError as error:
        if isinstance(error, DistributedError):
            raise
        raise Io(f"rendezvous: rank {rank} failed: {error}", op="init", rank=rank) from error


@contextlib.contextmanager
def naming_ranks_of_parent(members: Sequence[int], rank: int) -> Iterator[None]:
    """Let errors of a rendezvous among `members` name ranks of the group that they are from.

    Those of the group's own calls do so already.
    """
    try:
        yield
    except DistributedError as error:
        if error.op == "init":
            name_ranks_of_parent(error, members, rank)
        raise


def world_of_one() -> Wiring:
    """Return the wiring of a group of one rank, which is connected to nobody."""
    return Wiring(0, 1, ((0,),), num_cores=count_own(), addresses=("127.0.0.1",))


# Where the ranks are


class KnownPlace(Place):
    """The parent group knows the addresses."""

    def __init__(self, addresses: Sequence[str]) -> None:
        self._addresses = tuple(addresses)

    def addresses_of(self, rank: int, members: Sequence[Member]) -> tuple[str, ...]:
        return self._addresses


class _Entrance(Place):
    """Where rank 0 listens and the others dial; tells by which interface peers reach this rank.

    That is the one by which this rank reaches rank 0. The hostname may resolve to another
    interface, or the loopback.
    """

    def __init__(
        self,
        claim: Claim,
        addr: str | None,
        listener: socket.socket | None,
        deadline: Deadline,
        token: bytes | str | None,
        environ: Mapping[str, str],
    ) -> None:
        if addr is None and (listener is None or claim.rank > 0):
            raise NoConnection(
                f"rank {claim.rank} of {claim.world_size} knows no address of rank 0: pass "
                "addr='host:port'",
                op="init",
                rank=claim.rank,
            )
        self._claim = claim
        self._addresses = parse_addresses(addr) if addr is not None else ()
        self._listener = listener
        self._is_held_by_parent = (
            listener is None and "FERRO_LISTEN_FD" in environ and environ.get("FERRO_ADDR") == addr
        )
        self._deadline = deadline
        self.token, self._is_shared = find_token(token, environ, deadline.at)
        self._reached = ""
        self._scope = ""

    def open(self, loop: EventLoop) -> Exchange:
        """Listen, or dial until rank 0 answers."""
        if self._claim.rank > 0:
            return self._dial(loop)
        listener = loop.own(self._listener.dup() if self._listener else self._listen())
        self._learn_from_listener(listener)
        return Coordinator(loop, listener, self.token, self._claim, self._deadline)

    def _dial(self, loop: EventLoop) -> Participant:
        targets = [target for address in self._addresses for target in self._targets(address)]
        exchange = Participant(loop, self._addresses, self.token, self._claim, self._deadline)
        exchange.join(targets)
        self._learn_from_connection(exchange.connection)
        return exchange

    def _targets(self, address: Address) -> list[Target]:
        targets = resolve(address, self.token, self._deadline.at)
        if not self._is_shared and not any(target.is_local for target in targets):
            raise self._refuse(address.text)
        return [target for target in targets if self._is_shared or target.is_local]

    def _refuse(self, where: str) -> NoConnection:
        return NoConnection(
            f"rank 0 at {where} can be reached from other machines, and there is no token that "
            f"proves who belongs to the group: {HOW_TO_SET_A_TOKEN}",
            op="init",
            rank=self._claim.rank,
        )

    def _listen(self) -> socket.socket:
        failures: dict[str, OSError] = {}
        for address in self._addresses:
            result = self._listen_at(address)
            if not isinstance(result, OSError):
                return result
            failures[address.text] = result
        what = "; ".join(f"{text}: {describe_error(error)}" for text, error in failures.items())
        if not any(map(is_taken, failures.values())):
            remedy = "Choose an address of the machine on which rank 0 runs, and a port open to it"
        elif self._is_held_by_parent:
            remedy = (
                "ferrorun's own socket is there, and this is a child process of rank 0 without it. "
                "Keep children from making the group again, in a script by "
                '`if __name__ == "__main__":`; or let subprocess start the child that makes it '
                "with close_fds=False"
            )
        else:
            remedy = "Another program, or rank 0 of another group, may be there: choose another"
        raise NoConnection(f"rank 0 cannot listen at {what}. {remedy}", op="init", rank=0)

    def _listen_at(self, address: Address) -> socket.socket | OSError:
        """Listen at the first available target of an address; return the error if none is."""
        result: socket.socket | OSError = OSError("it has no address")
        for target in self._bindable(address):
            result = try_to_listen(target)
            if not isinstance(result, OSError):
                break
            if is_taken(result):
                self._check_duplicate(address, target)
                break
        return result

    def _bindable(self, address: Address) -> list[Target]:
        targets = self._targets(address)
        return listening_targets(targets) if address.is_named and self._is_shared else targets

    def _check_duplicate(self, address: Address, target: Target) -> None:
        """Raise InvalidRank if another rank 0 of this group holds the address."""
        deadline = Deadline(min(DUPLICATE_CHECK_S, self._deadline.at - time.monotonic()))
        with contextlib.closing(EventLoop()) as loop:
            twin = Participant(loop, [address], self.token, self._claim, deadline)
            try:
                twin.join([target])
                twin.all_gather(b"")
            except (NoConnection, Timeout):
                return

    def _learn_from_listener(self, listener: socket.socket) -> None:
        if listener.family == socket.AF_UNIX:
            return
        host = _host_of(listener.getsockname())
        if not (self._is_shared or is_loopback(host)):
            raise self._refuse(host)
        if listener.family == socket.AF_INET6 and not is_wildcard(host):
            self.loopback = "::1"
        self._set_own_address(host)

    def _learn_from_connection(self, sock: socket.socket) -> None:
        if sock.family == socket.AF_UNIX:
            return
        self._set_own_address(_host_of(sock.getsockname()))
        peer = _host_of(sock.getpeername())
        self._reached = "" if is_loopback(peer) else peer

    def _set_own_address(self, host: str) -> None:
        is_known = not (is_loopback(host) or is_wildcard(host))
        self.own_address, _, self._scope = (host if is_known else "").partition("%")

    def addresses_of(self, rank: int, members: Sequence[Member]) -> tuple[str, ...]:
        near = self._reached or members[0].loopback
        addresses = [self._with_scope(each.address) if each.address else near for each in members]
        if not members[rank].address:
            addresses[rank] = members[0].loopback
        return tuple(addresses)

    def _with_scope(self, host: str) -> str:
        # A link-local address has a meaning only together with this host's interface.
        is_link_local = host.lower().startswith(("fe8", "fe9", "fea", "feb"))
        return f"{host}%{self._scope}" if is_link_local and self._scope else host


def try_to_listen(target: Target) -> socket.socket | OSError:
    """Return a socket that listens there, or the error why there is none."""
    try:
        return listen(target)
    except OSError as error:
        return error.with_traceback(None)  # which would refer to whoever keeps the error


def _host_of(sockaddr: Any) -> str:
    host = str(sockaddr[0]).partition("%")[0]
    host = host.removeprefix("::ffff:") if "." in host else host
    return f"{host}%{sockaddr[3]}" if len(sockaddr) == 4 and sockaddr[3] else host
