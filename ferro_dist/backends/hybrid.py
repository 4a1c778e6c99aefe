"""Groups that move arrays in both kinds of memory: the host's and the GPUs'."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ferro_dist import arguments, interop
from ferro_dist._native.cuda_libraries import load_nccl
from ferro_dist.backends.base import Array, Backend, P2POp
from ferro_dist.backends.host import HostBackend
from ferro_dist.backends.nccl import END_GRACE_S, NcclBackend, get_unique_id
from ferro_dist.backends.nccl_attendance import share_attendance
from ferro_dist.deadline import Deadline
from ferro_dist.errors import (
    BackendUnavailable,
    ChannelClosed,
    CollectiveMismatch,
    DistributedError,
    Io,
    PeerLostError,
)
from ferro_dist.work import JointWork, Work

if TYPE_CHECKING:
    from ferro_dist._native.nccl import UniqueId

__all__ = ["HybridBackend"]

_UNIQUE_ID_NBYTES = 128


class HybridBackend(Backend):
    """One rank of a group that has a GPU on every rank.

    Each call is routed by where its array lives: GPU arrays go to NCCL, all others and `barrier` to
    the host engine. The same program runs on both.

    Parameters
    ----------
    rank, world_size, addr, token, listener, group, epoch
        As `HostBackend` takes them.
    unique_id : UniqueId or bytes, optional
        As `NcclBackend` takes it. By default rank 0 makes one and sends it to the others.
    device : int, optional
        The GPU of this rank, which becomes this thread's current one; by default the current one.
    timeout : float
        The timeout of both sides, in seconds.
    config : dict, optional
        Options of NCCL: see `NcclBackend`.

    Raises
    ------
    BackendUnavailable
        Some rank has no NCCL or no GPU. The group is made on all ranks or on none.
    CollectiveMismatch
        The ranks passed different unique ids, or only some of them passed one.

    Notes
    -----
    Calls on GPU arrays are not compared: see `NcclBackend`.

    Ranks that share memory, that is, within a host, learn what `NcclBackend` cannot tell:
    `Timeout.missing` names the ranks that have not made a call on GPU arrays, and if a rank leaves
    the group without making a call, the others' call soon raises `ChannelClosed`. A death is a
    `PeerLostError` wherever it happens.
    """

    name = "hybrid"

    def __init__(
        self,
        rank: int,
        world_size: int,
        addr: str | None,
        unique_id: UniqueId | bytes | None = None,
        *,
        device: int | None = None,
        timeout: float = 300.0,
        config: dict[str, Any] | None = None,
        token: bytes | str | None = None,
        listener: socket.socket | None = None,
        group: str = "world",
        epoch: str = "",
    ) -> None:
        host = HostBackend(
            rank,
            world_size,
            addr,
            token=token,
            timeout=timeout,
            listener=listener,
            group=group,
            epoch=epoch,
        )
        try:
            self._init_from(host, _join_gpus(host, unique_id, device, config))
        except BaseException:
            host.close()  # so the others, who wait for this rank, hear of it
            raise

    def _init_from(self, host: HostBackend, nccl: NcclBackend) -> None:
        """Make this the group of both sides, in place of __init__."""
        self._host = host
        self._nccl = nccl
        self._survivors = host.survivors
        nccl._set_global_ranks(host, range(host.world_size))
        # The survivors' host side, and their ranks here, while `shrink` has not connected their
        # GPUs.
        self._next: HostBackend | None = None
        self._members = tuple(range(host.world_size))
        # Between ranks of one host NCCL does not notice that one has died.
        nccl.heed(host.alarm())
        try:
            share_attendance(host, nccl)
        except BaseException:
            nccl.abort()
            raise

    def _new_from(self, host: HostBackend, nccl: NcclBackend) -> HybridBackend:
        """Return another group of this class."""
        group = type(self).__new__(type(self))
        group._init_from(host, nccl)
        return group

    @property
    def tcp(self) -> HostBackend:
        """The group's host side: shared memory inside a host, TCP between hosts."""
        return self._host

    @property
    def nccl(self) -> NcclBackend:
        """The group's GPU side."""
        return self._nccl

    def synchronize_nccl(self, timeout: float | None = None) -> None:
        """Block until all calls on GPU arrays made so far are done: `NcclBackend.synchronize`."""
        self._nccl.synchronize(timeout)

    @property
    def rank(self) -> int:
        return self._host.rank

    @property
    def world_size(self) -> int:
        return self._host.world_size

    @property
    def timeout(self) -> float:
        return self._host.timeout

    @timeout.setter
    def timeout(self, seconds: float) -> None:
        self._host.timeout = seconds
        self._nccl.timeout = seconds

    @property
    def is_closed(self) -> bool:
        return self._host.is_closed and self._next is None

    @property
    def device(self) -> int:
        """The number of this rank's GPU in this process."""
        return self._nccl.device

    @property
    def cores_per_rank(self) -> float:
        return self._host.cores_per_rank

    def interrupt(self, error: BaseException) -> None:
        self._host.interrupt(error)  # its alarm ends the GPU side, here and on the others

    def close(self) -> None:
        try:
            self._nccl.leave()  # the host side notices who dies meanwhile
        finally:
            try:
                # The host side closes first: ranks that wait for this one there hear of it at once,
                # while NCCL ends with all ranks together.
                self._host.close()
                if self._next is not None:
                    self._next.close()
                    self._next = None
            finally:
                self._nccl.close(min(self.timeout, END_GRACE_S))

    def empty(self, shape: int | Sequence[int], dtype: Any) -> Any:
        """Make an uninitialized array that all ranks of the host can reach.

        For the GPU memory that suits NCCL best: ``backend.nccl.empty``.
        """
        return self._host.empty(shape, dtype)

    def split(self, members: Sequence[int], timeout: float | None = None) -> HybridBackend | None:
        deadline = Deadline(self._seconds(timeout))
        try:
            host = self._host.split(members, deadline.remaining_s)
        except Io:
            # Ranks outside have not heard of it, and are on their way to the GPUs' part.
            with contextlib.suppress(DistributedError):
                nccl = self._nccl.split(members, deadline.remaining_s)
                if nccl is not None:
                    nccl.close()
            raise
        try:
            nccl = self._nccl.split(members, deadline.remaining_s)
            if host is None or nccl is None:
                return None
            return self._new_from(host, nccl)
        except BaseException as error:
            if host is not None:
                host.close()
            if not isinstance(error, DistributedError):
                self.interrupt(error)  # the others may be waiting for this rank
            raise

    @property
    def global_ranks(self) -> tuple[int, ...]:
        return self._host.global_ranks

    @property
    def survivors(self) -> tuple[int, ...]:
        return self._survivors

    def shrink(self, timeout: float | None = None) -> HybridBackend:
        deadline = Deadline(self._seconds(timeout))
        # GPU work under way may be waiting for a rank that is gone, so it ends first.
        self._nccl.abort()
        try:
            while True:
                self._shrink_host(deadline)
                try:
                    return self._successor(deadline)
                except (PeerLostError, ChannelClosed):
                    # A member was lost while the GPUs connected: the others begin again.
                    if time.monotonic() >= deadline.at:
                        raise
        except DistributedError as error:
            if self._next is not None:
                arguments.name_ranks_of_parent(error, self._members, self.rank)
            error.op = "shrink"
            arguments.name_group(error, self)
            raise

    def _shrink_host(self, deadline: Deadline) -> None:
        """Make `_next` the host side of those that are left."""
        host = (self._next or self._host).shrink(deadline.remaining_s)
        self._members = tuple(self._members[member] for member in host.survivors)
        self._next = host

    def _successor(self, deadline: Deadline) -> HybridBackend:
        """Connect the GPUs of `_next`, and make a group of both."""
        host, nccl = self._next, self._nccl
        assert host is not None
        host.timeout = deadline.remaining_s
        try:
            group = self._new_from(host, _join_gpus(host, None, nccl.device, nccl.config))
        except BackendUnavailable:  # on all ranks
            raise
        except BaseException as error:
            host.interrupt(error)  # the others may be waiting for this rank
            raise
        group.timeout = self.timeout
        group._survivors, self._next = self._members, None
        return group

    # Calls, by where the array lives; `call` is the rest of what `Backend`'s method takes

    def _side(self, array: Array) -> Backend:
        return self._nccl if interop.is_on_gpu(array) else self._host

    def allreduce(self, x: Array, *call: Any) -> Array | Work:
        return self._side(x).allreduce(x, *call)

    def broadcast(self, x: Array, *call: Any) -> Array | Work:
        return self._side(x).broadcast(x, *call)

    def reduce(self, x: Array, *call: Any) -> Array | Work | None:
        return self._side(x).reduce(x, *call)

    def all_gather(self, x: Array, *call: Any) -> Array | Work:
        return self._side(x).all_gather(x, *call)

    def reduce_scatter(self, x: Array, *call: Any) -> Array | Work:
        return self._side(x).reduce_scatter(x, *call)

    def all_to_all(self, x: Array, *call: Any) -> Array | Work:
        return self._side(x).all_to_all(x, *call)

    def gather(self, x: Array, *call: Any) -> Array | Work | None:
        return self._side(x).gather(x, *call)

    def scatter(self, x: Array | None, out: Array, root: int, *call: Any) -> Array | Work:
        # x is read on the root only.
        root = arguments.check_root("scatter", root, rank=self.rank, world_size=self.world_size)
        known = x if out is None or (x is not None and root == self.rank) else out
        side = self._host if known is None else self._side(known)
        return side.scatter(x, out, root, *call)

    def barrier(self, *call: Any) -> Work | None:
        work: Work | None = self._host.barrier(*call)
        return work

    def send(self, x: Array, *call: Any) -> Work | None:
        return self._side(x).send(x, *call)

    def recv(self, out: Array, *call: Any) -> Array | Work:
        return self._side(out).recv(out, *call)

    def sendrecv(self, x: Array, out: Array, *call: Any) -> Array | Work:
        side = self._side(x)
        if self._side(out) is not side:
            arguments.raise_mixed_devices("sendrecv", rank=self.rank)
        return side.sendrecv(x, out, *call)

    def batch(
        self, ops: Sequence[P2POp], async_op: bool, timeout: float | None, tag: int
    ) -> Work | None:
        ops_of: dict[Backend, list[P2POp]] = {self._nccl: [], self._host: []}
        for op in ops:
            ops_of[self._side(op.array)].append(op)
        sides = [side for side, own in ops_of.items() if own]
        if len(sides) < 2:
            return (sides or [self._host])[0].batch(ops, async_op, timeout, tag)
        # Started together: a message on one side may be answered on the other. Everything that can
        # be wrong with the arguments is found before: the host side checks its own first.
        self._nccl.check_batch(ops_of[self._nccl], timeout, tag)
        works = [side.batch(ops_of[side], True, timeout, tag) for side in (self._host, self._nccl)]
        both = JointWork([work for work in works if work is not None])
        if async_op:
            return both
        both.wait()
        return None


def _join_gpus(
    host: HostBackend,
    unique_id: UniqueId | bytes | None,
    device: int | None,
    config: dict[str, Any] | None,
) -> NcclBackend:
    """Connect the GPUs of a group's ranks, after making sure that all ranks have one."""
    _check_all_have_gpus(host, device)
    given = None if unique_id is None else bytes(load_nccl().UniqueId(unique_id))
    _check_same_unique_id(host, given)
    if unique_id is None:
        unique_id = _exchange_unique_id(host)
    return _connect_gpus(host, unique_id, device, config)


def _check_all_have_gpus(host: HostBackend, device: int | None) -> None:
    problem = _why_no_gpu(device)
    have_problems = host.all_gather(np.array([bool(problem)]), None, False, None, 0)
    if have_problems.any():
        ranks = ", ".join(map(str, np.flatnonzero(have_problems)))
        raise BackendUnavailable(
            f"No HybridBackend can be made, since NCCL cannot be used on rank {ranks}. "
            + (problem or "The error there says why."),
            op="init",
            rank=host.rank,
        )


def _connect_gpus(
    host: HostBackend,
    unique_id: UniqueId | bytes,
    device: int | None,
    config: dict[str, Any] | None,
) -> NcclBackend:
    try:
        return NcclBackend(
            *(host.rank, host.world_size, unique_id),
            device=device,
            timeout=host.timeout,
            config=config,
            alarm=host.alarm(),
        )
    except BaseException as error:
        host.interrupt(error)  # the others wait for this rank in NCCL, and heed the alarm
        raise


def _why_no_gpu(device: int | None) -> str:
    """Make `device` current; return what keeps this rank from using NCCL, "" if nothing does."""
    try:
        load_nccl()
        from ferro_dist._native.cuda_runtime import device_count, device_number, set_device

        if device_count() == 0:
            return "This process sees no GPU."
        if device is not None:
            set_device(device_number(device))
        return ""
    except DistributedError as error:
        return str(error)


def _check_same_unique_id(host: HostBackend, unique_id: bytes | None) -> None:
    """Raise CollectiveMismatch unless all ranks pass the same id, or none: NCCL would wait."""
    none = bytes(1 + _UNIQUE_ID_NBYTES)
    own = none if unique_id is None else b"\1" + unique_id
    gathered: Any = host.all_gather(np.frombuffer(own, np.uint8), None, False, None, 0)
    for other, row in enumerate(gathered.reshape(host.world_size, -1)):
        theirs = row.tobytes()
        if theirs == own:
            continue
        ours = "no unique_id" if own == none else "a unique_id"
        instead = "none" if theirs == none else "one" if own == none else "another"
        raise CollectiveMismatch(
            f"init: the ranks disagree: rank {host.rank} was given {ours}, rank {other} {instead}."
            "\nGive all ranks the same, or none: then rank 0 makes it.",
            op="init",
            rank=host.rank,
            peer=other,
        )


def _exchange_unique_id(host: HostBackend) -> bytes:
    """Return what rank 0 has made, on all ranks."""
    blob = np.zeros(_UNIQUE_ID_NBYTES, np.uint8)
    if host.rank == 0:
        blob[:] = np.frombuffer(bytes(get_unique_id()), np.uint8)
    sent: Any = host.broadcast(blob, None, 0, False, None, 0)
    return bytes(sent.tobytes())
