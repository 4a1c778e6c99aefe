"""Groups of processes: shared memory inside a host, TCP between hosts."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ferro_dist import arguments, rendezvous
from ferro_dist._native.host import Communicator, create_segment
from ferro_dist.backends import results
from ferro_dist.backends.base import P2POp
from ferro_dist.backends.engine import EngineBackend, peer_reads
from ferro_dist.deadline import Deadline
from ferro_dist.errors import DistributedError, Io
from ferro_dist.rendezvous.connection import naming_ranks_of_parent
from ferro_dist.rendezvous.wiring import CreateSegment, Group, Wiring

__all__ = ["HostBackend", "TcpBackend"]


class HostBackend(EngineBackend):
    """One rank of a group of processes.

    Ranks of one host share memory, ranks of different hosts are connected by TCP; a
    group may span hosts.

    Parameters
    ----------
    rank, world_size : int
    addr : str or None
        ``"host:port"`` at which rank 0 listens while the group is made. None if there is only one
        rank.
    token : bytes or str, optional
        The secret that all ranks prove to know. Default: ``FERRO_DIST_TOKEN``, else,
        for ranks of one machine, a file that only this user can read.
    timeout : float
        Seconds after which making the group gives up, as does any blocking call that names no
        timeout of its own.
    listener : socket, optional
        On rank 0: a socket that listens at `addr` already. It is closed once the ranks have
        connected or failed to.
    group, epoch : str, optional
        Distinguish groups that use the same address; the same on all ranks.

    Raises
    ------
    InvalidRank, InvalidWorldSize, NoConnection, Timeout, PeerLostError, CollectiveMismatch, Io
        As for `ferro_dist.init`.
    ValueError, TypeError
        A bad `timeout`, `token` or `listener`, or such a value of ``FERRO_DIST_PEER_READS``.

    Notes
    -----
    Large arrays are read directly from the other ranks' memory (``process_vm_readv``) where the
    kernel permits it and it is faster; ``FERRO_DIST_PEER_READS=never`` forbids it. Under Yama's
    ``kernel.yama.ptrace_scope=1``, the default of some distributions, the kernel does not permit it
    between ranks. ferro_dist does not ask for it by ``prctl(PR_SET_PTRACER, PR_SET_PTRACER_ANY)``,
    which would let every process of this user read their memory. A program may do so in each rank
    before its first large collective; ``os.getppid()`` as the second argument admits only the
    launcher and what that has started.
    """

    name = "host"
    _shares_memory = True

    def __init__(
        self,
        rank: int,
        world_size: int,
        addr: str | None,
        *,
        token: bytes | str | None = None,
        timeout: float = 300.0,
        listener: socket.socket | None = None,
        group: str = "world",
        epoch: str = "",
    ) -> None:
        timeout = arguments.check_timeout(timeout)
        # First _read_settings, before another rank knows of this one; then the ranks connect; then
        # _init_from, before they confirm to each other: from then on the group notices deaths.
        rendezvous.connect(
            rank,
            world_size,
            addr,
            token=token,
            timeout=timeout,
            create_segment=self._create_segment,
            listener=listener,
            group=group,
            epoch=epoch,
            check=self._read_settings,
            adopt=lambda wiring: self._init_from(wiring, timeout),
        )

    @property
    def _create_segment(self) -> CreateSegment | None:
        return create_segment if self._shares_memory else None

    def _read_settings(self) -> None:
        self._peer_reads = peer_reads()

    def _init_from(self, wiring: Wiring, timeout: float) -> HostBackend:
        """Make this the group that was wired, in place of __init__."""
        collective_sockets, message_sockets = [-1] * wiring.world_size, [-1] * wiring.world_size
        for peer, (collective, message) in wiring.sockets.items():
            collective_sockets[peer], message_sockets[peer] = collective, message
        wiring.sockets = {}  # the communicator's from here on
        try:
            communicator = Communicator.connect(
                wiring.rank,
                wiring.world_size,
                wiring.hosts,
                -1 if wiring.segment_fd is None else wiring.segment_fd,
                collective_sockets,
                message_sockets,
                wiring.num_colocated,
                wiring.num_cores,
                self._peer_reads,
                timeout,
                results,
            )
        finally:
            wiring.close()
        super().__init__(
            communicator, [fd for fd in (*collective_sockets, *message_sockets) if fd >= 0]
        )
        self._wiring = wiring
        return self

    def _new_from(self, wiring: Wiring) -> HostBackend:
        """Make a group of this one's kind."""
        group = self.__class__.__new__(self.__class__)
        group._peer_reads = self._peer_reads
        return group._init_from(wiring, self.timeout)

    @property
    def cores_per_rank(self) -> float:
        return self._wiring.num_cores / self._wiring.num_colocated

    def split(self, members: Sequence[int], timeout: float | None = None) -> HostBackend | None:
        deadline = Deadline(self._seconds(timeout))
        with self._splitting():
            chosen = self._check_members(members, deadline.remaining_s)

            def gather(blob: bytes) -> list[bytes]:
                # By collectives, in which ranks outside take part, and not by messages among the
                # members: those of the program may be under way, and would be taken for these.
                blobs = self._gather_for_split(blob, deadline)
                return [blobs[member] for member in chosen]

            def adopt(wiring: Wiring) -> HostBackend:
                try:
                    return self._new_from(wiring)._set_global_ranks(self, chosen)
                except MemoryError as error:
                    # The others are told of this one, so this group need not end, as it does where
                    # memory runs out between two steps.
                    raise Io(str(error), op="init", rank=self.rank) from error

            if self.rank not in chosen:
                if len(chosen) > 1:
                    rendezvous.stand_by(lambda: gather(b""))
                return None
            with naming_ranks_of_parent(chosen, self.rank):
                return rendezvous.connect_through(
                    gather,
                    chosen.index(self.rank),
                    len(chosen),
                    token=self._wiring.token,
                    timeout=deadline.remaining_s,
                    create_segment=self._create_segment,
                    addresses=[self._wiring.addresses[member] for member in chosen],
                    adopt=adopt,
                )

    def _gather_for_split(self, blob: bytes, deadline: Deadline) -> list[bytes]:
        """Exchange byte strings among all ranks: first sizes, then contents."""
        own = np.array([len(blob)])
        sizes = self._group.gather_for_split(own, deadline.remaining_s).ravel()
        padded = np.frombuffer(blob.ljust(int(sizes.max())), np.uint8)
        rows = self._group.gather_for_split(padded, deadline.remaining_s)
        rows = rows.reshape(self.world_size, -1)
        return [row[:size].tobytes() for row, size in zip(rows, sizes, strict=True)]

    def shrink(self, timeout: float | None = None) -> HostBackend:
        seconds = self._time_to_shrink(timeout)
        try:
            survivors, group = rendezvous.connect_survivors(
                self._group,
                self._wiring,
                create_segment=self._create_segment,
                adopt=self._new_from,
                timeout=seconds,
            )
        except DistributedError as error:
            arguments.name_group(error, self)
            raise
        return self._succeeded_by(group, survivors)

    @property
    def local_ranks(self) -> tuple[int, ...]:
        """The ranks that share memory with this one, itself included, ascending."""
        return self._wiring.local_ranks

    def share_memory(self, create: CreateSegment, adopt: Callable[[int], Group]) -> Group:
        """Give all `local_ranks`, which call this together, a piece of memory besides the group's.

        Parameters
        ----------
        create : callable
            Makes the memory for so many ranks, on the lowest of them, and returns its descriptor.
        adopt : callable
            Is given a descriptor of the memory, which is closed afterwards. What it returns is
            closed if some other rank fails.
        """
        members = self.local_ranks
        deadline = Deadline(self.timeout)

        def adopt_wiring(wiring: Wiring) -> Group:
            with contextlib.closing(wiring):
                assert wiring.segment_fd is not None
                return adopt(wiring.segment_fd)

        return rendezvous.connect_through(
            lambda blob: self._gather_by_messages(blob, members, deadline),
            members.index(self.rank),
            len(members),
            token=self._wiring.token,
            timeout=deadline.remaining_s,
            create_segment=create,
            addresses=[self._wiring.addresses[member] for member in members],
            adopt=adopt_wiring,
        )

    def _gather_by_messages(
        self, blob: bytes, members: Sequence[int], deadline: Deadline
    ) -> list[bytes]:
        """Exchange byte strings among `members` alone, by messages: first sizes, then contents."""
        sizes = {peer: np.empty(1, np.int64) for peer in members if peer != self.rank}
        self._exchange(np.array([len(blob)]), sizes, deadline)
        blobs = {peer: np.empty(int(size[0]), np.uint8) for peer, size in sizes.items()}
        self._exchange(np.frombuffer(blob, np.uint8), blobs, deadline)
        return [blob if member == self.rank else blobs[member].tobytes() for member in members]

    def _exchange(self, own: Any, outs: dict[int, Any], deadline: Deadline) -> None:
        """Send `own` to every peer in `outs`, and receive there what that one sends."""
        ops = []
        for peer, out in outs.items():
            ops += [P2POp("send", own, peer), P2POp("recv", out, peer)]
        self.batch(ops, False, deadline.remaining_s, 0)


class TcpBackend(HostBackend):
    """`HostBackend` without shared memory: every two ranks are connected by TCP.

    For measurements, and for ranks of one machine that cannot share memory. Parameters and errors
    are those of `HostBackend`.
    """

    name = "tcp"
    _shares_memory = False
