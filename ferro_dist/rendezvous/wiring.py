"""Ranks that can exchange byte strings connect to each other, each pair in its best way.

These are the steps of a rendezvous that follow once there is an `Exchange`:

2. All tell each other about themselves: host, address, cores.
3. Ranks of one host connect to the lowest of them, which makes a segment of shared
   memory and passes its descriptor on.
4. Ranks that share no memory connect two sockets per pair, the higher to the lower rank.
5. All confirm. Nothing listens any more.
"""

from __future__ import annotations

import array
import contextlib
import os
import socket
import stat
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

from ferro_dist.errors import CollectiveMismatch, Io
from ferro_dist.network_interfaces import is_loopback
from ferro_dist.rendezvous.address import Target, listen, target_of, wildcard_target
from ferro_dist.rendezvous.authentication import Claim, Role, group_digest, introduce
from ferro_dist.rendezvous.control_plane import Exchange
from ferro_dist.rendezvous.event_loop import READ, Acceptor, Dialler
from ferro_dist.rendezvous.frame import Conversation, ProtocolError
from ferro_dist.rendezvous.machine import peer_credentials
from ferro_dist.rendezvous.member import Member, Place, count_cores, group_by_host

__all__ = ["CreateSegment", "Group", "Wiring", "wire"]

SEGMENT_MESSAGE = struct.Struct("!QQ")  # device and inode of the segment
PORT = struct.Struct("!H")
SOCKET_ROLES = (Role.COLLECTIVE, Role.POINT_TO_POINT)

CreateSegment = Callable[[int], int]
"""Makes shared memory for so many ranks and returns its descriptor."""


class Adopted(Protocol):
    """What is made from a wiring, and undone if not all ranks get that far."""

    def close(self) -> None: ...


Group = TypeVar("Group", bound=Adopted)
Said = TypeVar("Said")


@dataclass
class Wiring:
    """A group's connections, ready for the engine. Whoever takes a descriptor over owns it.

    Attributes
    ----------
    rank, world_size : int
    hosts : tuple of tuple of int
        The ranks, by the memory they share; each host ascending, hosts by lowest rank.
    segment_fd : int or None
        Shared memory of this host's ranks; None for a rank that shares with nobody.
    sockets : dict of int to tuple of int
        For each peer that shares no memory: sockets for collectives and for
        point-to-point messages. Non-blocking, TCP_NODELAY, not inherited.
    num_colocated : int
        Ranks of this machine, itself included: those that share memory, and those that
        could but do not.
    num_cores : int
        Cores that they may use together.
    addresses : tuple of str
        Where this rank reaches each rank's host; for `connect_through`.
    token : bytes
        The secret that the group was made with; for `connect_through`.
    group_id : bytes
        Identifies the group; known only to its ranks.
    spans_networks : bool
        Whether some ranks cannot reach each other over the loopback.
    """

    rank: int
    world_size: int
    hosts: tuple[tuple[int, ...], ...]
    segment_fd: int | None = None
    sockets: dict[int, tuple[int, int]] = field(default_factory=dict)
    num_colocated: int = 1
    num_cores: int = 1
    addresses: tuple[str, ...] = ()
    token: bytes = field(default=b"", repr=False)
    group_id: bytes = field(default=b"", repr=False)
    spans_networks: bool = False

    @property
    def spans_memories(self) -> bool:
        """Whether some ranks share no memory."""
        return len(self.hosts) > 1

    @property
    def local_ranks(self) -> tuple[int, ...]:
        """The ranks that share memory with this one, itself included."""
        return next(host for host in self.hosts if self.rank in host)

    def close(self) -> None:
        """Close every descriptor that nobody has taken. Idempotent."""
        fds = [fd for pair in self.sockets.values() for fd in pair]
        if self.segment_fd is not None:
            fds.append(self.segment_fd)
        self.sockets, self.segment_fd = {}, None
        for fd in fds:
            os.close(fd)


def wire(
    exchange: Exchange,
    token: bytes,
    create_segment: CreateSegment | None,
    place: Place,
    adopt: Callable[[Wiring], Group],
) -> Group:
    """Connect this rank to all others and return what `adopt` makes; on failure, tell them why."""
    try:
        return _Wirer(exchange, token, create_segment, place).wire(adopt)
    except ProtocolError as error:
        failure = Io(f"rendezvous: another rank sent {error}", op="init", rank=exchange.rank)
        exchange.fail(failure)
        raise failure from error
    except BaseException as error:
        exchange.fail(error)
        raise


class _Wirer:
    """The steps on one rank."""

    def __init__(
        self, exchange: Exchange, token: bytes, create_segment: CreateSegment | None, place: Place
    ) -> None:
        self._exchange = exchange
        self._loop = exchange.loop
        self._rank = exchange.rank
        self._token = token
        self._create_segment = create_segment
        self._place = place
        self._members: list[Member] = []
        self._group_id = b""

    def wire(self, adopt: Callable[[Wiring], Group]) -> Group:
        own = Member.own(self._create_segment is not None, self._place)
        # Listen before anybody can know the name.
        with listen(Target(socket.AF_UNIX, own.socket_name)) as server:
            parts = self._exchange.all_gather(own.encode())
            self._members = self._parse_each(Member.decode, parts)
            self._group_id = group_digest("wiring", self._members[0].nonce)
            self._check_agreement()
            wiring = self._plan()
            try:
                self._connect(wiring, server)
                # Before the commit, which notices ranks that die: once it is over, they must
                # already be watched by the group.
                group = self._adopted(adopt, wiring)
            except BaseException:
                wiring.close()
                raise
            try:
                self._exchange.commit()
            except BaseException:
                group.close()
                raise
        return group

    def _adopted(self, adopt: Callable[[Wiring], Group], wiring: Wiring) -> Group:
        try:
            return adopt(wiring)
        except Io as error:
            raise Io(
                f"{error}\nRank {self._rank} could not make its part of the group",
                op="init",
                rank=self._rank,
            ) from error

    def _connect(self, wiring: Wiring, server: socket.socket) -> None:
        leader, *others = wiring.local_ranks
        if others and leader == self._rank:
            wiring.segment_fd = self._make_segment(len(wiring.local_ranks))
        with contextlib.ExitStack() as stack:
            listener = None
            if len(wiring.hosts) > 1:
                listener = stack.enter_context(listen(self._interface(wiring.addresses)))
            # Everything that can fail on one rank alone has been done: ranks that wait from here on
            # know that the others are on their way.
            ports = self._exchange_ports(listener.getsockname()[1] if listener else 0)
            self._share_segment(wiring, server)
            if listener is not None:
                self._connect_sockets(wiring, listener, ports)

    def _check_agreement(self) -> None:
        wanted = [member.shared_memory for member in self._members]
        if len(set(wanted)) > 1:
            other = wanted.index(not wanted[0])
            raise CollectiveMismatch(
                f"rendezvous: rank {wanted.index(True)} shares memory with others on its host, "
                f"rank {wanted.index(False)} does not: make the same kind of "
                "group on all ranks, HostBackend or TcpBackend",
                op="init",
                rank=self._rank,
                peer=other,
            )

    def _plan(self) -> Wiring:
        # They compete for cores, whether or not they share memory.
        host = self._members[self._rank].host
        colocated = [member for member in self._members if member.host == host]
        return Wiring(
            self._rank,
            self._exchange.world_size,
            self._agree_on_hosts(),
            num_colocated=len(colocated),
            num_cores=count_cores(colocated),
            addresses=self._place.addresses_of(self._rank, self._members),
            token=self._token,
            group_id=self._group_id,
            spans_networks=len({member.network for member in self._members}) > 1,
        )

    # Step 3: shared memory

    def _agree_on_hosts(self) -> tuple[tuple[int, ...], ...]:
        """Group the ranks by memory: those that name one host, and can reach its lowest rank."""
        hosts = group_by_host(self._members)
        if all(len(host) == 1 for host in hosts):
            return hosts
        leader = next(host for host in hosts if self._rank in host)[0]
        can_reach = leader == self._rank or _can_reach(self._members[leader])
        answers = self._exchange.all_gather(b"\x01" if can_reach else b"\x00")
        apart = {rank for rank, answer in enumerate(answers) if answer != b"\x01"}
        together = (tuple(rank for rank in host if rank not in apart) for host in hosts)
        return tuple(sorted([*together, *((rank,) for rank in apart)]))

    def _share_segment(self, wiring: Wiring, server: socket.socket) -> None:
        if all(len(host) == 1 for host in wiring.hosts):
            return
        leader, *others = wiring.local_ranks
        if not others:
            self._exchange.wait(lambda: True, list)  # takes part in the others' rounds
        elif wiring.segment_fd is not None:
            self._serve_segment(wiring.segment_fd, others, server)
        else:
            wiring.segment_fd = self._receive_segment(leader)

    def _make_segment(self, num_ranks: int) -> int:
        assert self._create_segment is not None
        try:
            fd = self._create_segment(num_ranks)
        except Io as error:
            raise Io(
                f"{error}\nRank {self._rank} makes the shared memory of its host's ranks. A "
                "security module, or the limit of file sizes ('ulimit -f'), may forbid it; "
                "TcpBackend needs none",
                op="init",
                rank=self._rank,
            ) from error
        return _checked_fd(fd)

    def _serve_segment(self, fd: int, ranks: Sequence[int], server: socket.socket) -> None:
        status = os.fstat(fd)
        message = SEGMENT_MESSAGE.pack(status.st_dev, status.st_ino)
        unserved = set(ranks)

        def serve(sock: socket.socket, claim: Claim) -> None:
            # A rank that has ended meanwhile is told of by the exchange, which knows its name.
            with sock, contextlib.suppress(BrokenPipeError, ConnectionResetError):
                if claim.role is Role.SEGMENT and claim.rank in unserved:
                    socket.send_fds(sock, [message], [fd])
                    unserved.remove(claim.rank)

        with self._accept(server, serve, len(ranks)):
            self._exchange.wait(lambda: not unserved, lambda: sorted(unserved))

    def _receive_segment(self, leader: int) -> int:
        target = Target(socket.AF_UNIX, self._members[leader].socket_name)
        sockets: list[socket.socket] = []
        is_ready: list[int] = []

        def await_segment(sock: socket.socket) -> None:
            sockets.append(sock)
            self._loop.watch(sock, READ, is_ready.append)

        with self._dial(target, Role.SEGMENT, leader, await_segment):
            self._exchange.wait(lambda: bool(is_ready), lambda: [leader])
        self._loop.unwatch(sockets[0])
        with sockets[0] as sock:
            return _receive_fd(sock, self._rank, leader)

    # Step 4: sockets

    def _connect_sockets(
        self, wiring: Wiring, listener: socket.socket, ports: Sequence[int]
    ) -> None:
        with contextlib.ExitStack() as stack:
            mesh = _Mesh(wiring)
            stack.callback(mesh.close)
            stack.enter_context(self._accept(listener, mesh.take, 2 * wiring.world_size))
            for peer, role in mesh.to_dial():
                target = target_of(wiring.addresses[peer], ports[peer])
                dialler = self._dial(target, role, peer, mesh.taker(peer, role))
                mesh.diallers[peer, role] = stack.enter_context(dialler)
            self._exchange.wait(mesh.is_complete, mesh.missing, mesh.describe_failures)
            mesh.hand_over()

    def _interface(self, addresses: Sequence[str]) -> Target:
        own = addresses[self._rank]
        if is_loopback(own) and not all(map(is_loopback, addresses)):
            # Other hosts reach this one at an address that it does not know.
            return wildcard_target(0)
        return target_of(own, 0)

    def _exchange_ports(self, port: int) -> list[int]:
        parts = self._exchange.all_gather(PORT.pack(port))
        return self._parse_each(_parse_port, parts)

    def _parse_each(self, parse: Callable[[bytes], Said], parts: Sequence[bytes]) -> list[Said]:
        return [self._parse(parse, rank, part) for rank, part in enumerate(parts)]

    def _parse(self, parse: Callable[[bytes], Said], rank: int, part: bytes) -> Said:
        try:
            return parse(part)
        except ProtocolError as error:
            what = f"rendezvous: rank {rank} sent {error}"
            raise Io(what, op="init", rank=self._rank, peer=rank) from error

    # Connections of the group

    def _accept(
        self,
        listener: socket.socket,
        on_accepted: Callable[[socket.socket, Claim], None],
        num_ranks: int,
    ) -> contextlib.AbstractContextManager[Acceptor]:
        return contextlib.closing(
            Acceptor(
                self._loop,
                listener,
                self._token,
                self._rank,
                self._group_id,
                on_accepted,
                num_ranks,
            )
        )

    def _dial(
        self,
        target: Target,
        role: Role,
        peer: int,
        on_connected: Callable[[socket.socket], None],
    ) -> contextlib.AbstractContextManager[Dialler]:
        claim = Claim(role, self._rank, self._exchange.world_size, self._group_id)

        def conversation(be_patient: Callable[[], None]) -> Conversation:
            return introduce(self._token, claim, peer, be_patient)

        dialler = Dialler(self._loop, target, conversation, on_connected)
        dialler.dial()
        return contextlib.closing(dialler)


class _Mesh:
    """The sockets between this rank and those with which it shares no memory."""

    def __init__(self, wiring: Wiring) -> None:
        self.diallers: dict[tuple[int, Role], Dialler] = {}
        self._wiring = wiring
        self._peers = sorted(set(range(wiring.world_size)) - set(wiring.local_ranks))
        self._sockets: dict[tuple[int, Role], socket.socket] = {}

    def to_dial(self) -> list[tuple[int, Role]]:
        """List the connections that this rank begins."""
        lower = (peer for peer in self._peers if peer < self._wiring.rank)
        return [(peer, role) for peer in lower for role in SOCKET_ROLES]

    def take(self, sock: socket.socket, claim: Claim) -> None:
        """Keep a connection that another rank has begun."""
        is_expected = claim.rank in self._peers and claim.role in SOCKET_ROLES
        if is_expected and claim.rank > self._wiring.rank:
            self._keep(claim.rank, claim.role, sock)
        else:
            sock.close()

    def taker(self, peer: int, role: Role) -> Callable[[socket.socket], None]:
        """Return what keeps a connection that this rank has begun."""
        return lambda sock: self._keep(peer, role, sock)

    def _keep(self, peer: int, role: Role, sock: socket.socket) -> None:
        # A rank that comes again has lost its earlier connection.
        former = self._sockets.pop((peer, role), None)
        if former is not None:
            former.close()
        self._sockets[peer, role] = sock

    def is_complete(self) -> bool:
        """Whether every connection has been made."""
        return len(self._sockets) == len(self._peers) * len(SOCKET_ROLES)

    def missing(self) -> list[int]:
        """List the peers to which a connection is missing."""
        return [
            peer
            for peer in self._peers
            if not all((peer, role) in self._sockets for role in SOCKET_ROLES)
        ]

    def describe_failures(self) -> str:
        """Say of the first few peers why a connection that this rank has begun is missing."""
        failed: dict[int, Dialler] = {}
        for (peer, role), dialler in self.diallers.items():
            if (peer, role) not in self._sockets:
                failed.setdefault(peer, dialler)
        return "".join(
            f" Rank {self._wiring.rank} could not reach rank {peer} at {dialler.target}: "
            f"{dialler.describe_failure()}."
            for peer, dialler in list(failed.items())[:3]
        )

    def hand_over(self) -> None:
        """Give the descriptors to the wiring."""
        for peer in self._peers:
            collective, point_to_point = (self._sockets.pop((peer, r)) for r in SOCKET_ROLES)
            self._wiring.sockets[peer] = (collective.detach(), point_to_point.detach())

    def close(self) -> None:
        """Close what has not been handed over."""
        for sock in self._sockets.values():
            sock.close()
        self._sockets.clear()


def _parse_port(part: bytes) -> int:
    if len(part) != PORT.size:
        raise ProtocolError("a port that is none")
    return int.from_bytes(part, "big")


def _can_reach(leader: Member) -> bool:
    """Whether a descriptor could be passed: the socket exists, and is the leader's."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        sock.setblocking(False)
        try:
            sock.connect(leader.socket_name)
            return peer_credentials(sock) == (leader.pid, os.geteuid())
        except OSError:
            return False


def _checked_fd(fd: int) -> int:
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        raise Io(f"rendezvous: descriptor {fd} is no shared memory", op="init")
    return fd


def _receive_fd(sock: socket.socket, rank: int, leader: int) -> int:
    """Receive the segment's descriptor from a socket that is ready."""
    # Not socket.recv_fds: it drops the flag, and a fork in another thread would inherit them.
    space = socket.CMSG_SPACE(array.array("i", [0]).itemsize)
    message, ancillary, flags, _ = sock.recvmsg(
        SEGMENT_MESSAGE.size, space, socket.MSG_CMSG_CLOEXEC
    )
    fds = array.array("i")
    for level, kind, data in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            fds.frombytes(data[: len(data) - len(data) % fds.itemsize])
    is_whole = len(fds) == 1 and not flags & socket.MSG_CTRUNC
    if is_whole and len(message) == SEGMENT_MESSAGE.size:
        status = os.fstat(fds[0])
        if SEGMENT_MESSAGE.unpack(message) == (status.st_dev, status.st_ino):
            return fds[0]
    for fd in fds:
        os.close(fd)
    raise Io(
        f"rendezvous: rank {leader} could not pass its shared memory to rank {rank}. The limit of "
        "open files may be reached ('ulimit -n'), or a security module may forbid it; "
        "TcpBackend needs no shared memory",
        op="init",
        rank=rank,
        peer=leader,
    )
