"""Groups of GPUs, over NCCL."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ferro_dist import arguments, interop
from ferro_dist._native.cuda_libraries import load_nccl
from ferro_dist.backends import results
from ferro_dist.backends.base import P2POp
from ferro_dist.backends.bound import BoundBackend
from ferro_dist.deadline import Deadline
from ferro_dist.errors import DistributedError, UnsupportedOp
from ferro_dist.reduce_op import ReduceOp
from ferro_dist.work import Work

if TYPE_CHECKING:
    from ferro_dist._native.cuda_stream import Stream
    from ferro_dist._native.nccl import Communicator, UniqueId
    from ferro_dist._native.nccl_group import NcclGroup

__all__ = [
    "END_GRACE_S",
    "WATCHDOG_GRACE_S",
    "NcclBackend",
    "dtype_to_nccl",
    "get_unique_id",
    "is_nccl_available",
    "reduce_op_to_nccl",
]

WATCHDOG_GRACE_S = 10.0
"""How much longer than its timeout a host waits for a call's work on the GPU.

Time for the watchdog, which ends the group once the call is overdue: its error says why.
"""
END_GRACE_S = 10.0
"""How long closing waits for the other ranks to close, when all calls are done."""


def is_nccl_available() -> bool:
    """Whether NCCL can be loaded and this process sees a GPU."""
    try:
        load_nccl()
        from ferro_dist._native.cuda_runtime import device_count

        return device_count() > 0
    except DistributedError:  # including that of a broken driver
        return False


def get_unique_id() -> UniqueId:
    """Make the identifier of a new group, on one rank, for all of them.

    Returns
    -------
    UniqueId
        128 bytes: ``bytes(unique_id)`` is what another rank's `NcclBackend` takes.

    Raises
    ------
    BackendUnavailable
        NCCL is not installed.
    """
    unique_id: UniqueId = load_nccl().get_unique_id()
    return unique_id


def reduce_op_to_nccl(op: ReduceOp | str) -> int:
    """Return NCCL's number of a reduction (``ncclRedOp_t``).

    Parameters
    ----------
    op : ReduceOp or str

    Raises
    ------
    BackendUnavailable
        NCCL is not installed.
    UnsupportedOp
        There is no such reduction.
    """
    number: int = load_nccl().reduce_op_to_nccl(op)
    return number


def dtype_to_nccl(dtype: Any) -> int:
    """Return NCCL's number of a dtype (``ncclDataType_t``).

    Parameters
    ----------
    dtype : anything that NumPy takes, or "bfloat16"

    Raises
    ------
    BackendUnavailable
        NCCL is not installed.
    InvalidArray, UnsupportedOp
        There is no such dtype, or not in NCCL.
    """
    number: int = load_nccl().dtype_to_nccl(interop.dtype_name(interop.dtype_code(dtype)))
    return number


class NcclBackend(BoundBackend):
    """One rank of a group of GPUs, whose arrays NCCL moves without a detour.

    Calls do not block the host: they run on the stream on which the caller's library currently
    works. With ``async_op=True`` they wait for what that stream was given before, run on the
    group's own, and `Work.wait` makes the caller's stream wait for the result. The calls of a group
    run in the order in which they are made. Arrays in flight stay referenced.

    An array of which DLPack alone is known is used on the legacy default stream, after what its
    library was given before.

    Arrays in host memory are refused: `HybridBackend` takes both kinds.

    Parameters
    ----------
    rank, world_size : int
    unique_id : UniqueId or bytes
        From `get_unique_id` on one rank; the same on all.
    device : int, optional
        The GPU of this rank; by default this thread's current one. Make it the current one of each
        thread that calls: CUDA may otherwise put a context, of hundreds of megabytes, on that
        thread's own, which for a new thread is GPU 0.
    timeout : float
        Seconds after which making the group gives up, and after which a call that is
        still under way ends the group.
    config : dict, optional
        Options of NCCL by the names that ``Communicator.init_rank`` takes: ``"min_ctas"``,
        ``"max_ctas"``, ``"cga_cluster_size"``, ``"net_name"``, ``"traffic_class"`` and others. With
        ``{"blocking": True}`` NCCL does not start a thread for each call of more than one rank, but
        no timeout applies while it connects ranks.
    alarm : object, optional
        What `heed` takes, for the making of the group.

    Raises
    ------
    BackendUnavailable
        NCCL is not installed or too old, or there is no GPU.
    InvalidRank, InvalidWorldSize
        Rank and world size do not fit each other.
    Timeout
        Not all ranks came.

    Notes
    -----
    NCCL does not compare the ranks' calls or tags: a wrong count on one rank causes a hang or a
    wrong result, where the engine's backends raise `CollectiveMismatch`. Nor does it tell who
    is missing: `Timeout.missing` is empty, and when a rank leaves, the others' calls end only
    when they time out. `HybridBackend` improves on the last two for ranks of one host. Sums of
    16-bit floats are rounded as NCCL does it.

    NCCL does not reduce integers of 16 bits, nor multiply complex numbers (`UnsupportedOp`). Floats
    of 8 bits it reduces, save for MEAN, from NCCL 2.24 and sm_90 on.

    CUDA loads a kernel when it is first launched, and may wait for all that the GPU was given
    before, while other threads' calls of CUDA wait for that. Where it holds up what another rank
    waits for, ``CUDA_MODULE_LOADING=EAGER`` in the environment loads all kernels at the start.

    Calls can be captured in a CUDA graph, which must be destroyed before the group is closed: NCCL
    waits for it. Make each kind of call once before it is captured: NCCL connects ranks in the
    first one, which may invalidate a capture. So may the end of any group while another thread
    captures in CUDA's global mode, the default: NCCL then frees memory, in threads of its own. No
    timeout applies to what a graph replays: if a rank does not replay it, the others' GPUs wait
    until the group is aborted. A barrier is refused where it would become part of a graph: after an
    asynchronous call in a capture, and while the group's own stream is captured. Raw calls, which
    run on that stream, do become part of the graph: if the capture began on another stream, make
    that one wait for the group's own after the last of them.

    NCCL connects ranks in the first call that needs it, which returns, even if it is asynchronous,
    only once they have all made it. Two ranks must connect alike: if the first thing that one sends
    the other is part of a `sendrecv` or `batch` that receives from it, too, so must the other's be.
    """

    name = "nccl"

    _group: NcclGroup

    def __init__(
        self,
        rank: int,
        world_size: int,
        unique_id: UniqueId | bytes,
        *,
        device: int | None = None,
        timeout: float = 300.0,
        config: dict[str, Any] | None = None,
        alarm: object = None,
    ) -> None:
        options = dict(config or {})
        communicator = _connect(rank, world_size, unique_id, device, timeout, options, alarm)
        self._init_from(communicator, None, options)

    @classmethod
    def with_stream(
        cls,
        rank: int,
        world_size: int,
        unique_id: UniqueId | bytes,
        stream: Any,
        *,
        device: int | None = None,
        timeout: float = 300.0,
        config: dict[str, Any] | None = None,
    ) -> NcclBackend:
        """Make a group that works on the caller's stream, in order with what else is on it.

        Parameters and errors not listed here are those of `NcclBackend`.

        Parameters
        ----------
        stream : stream
            From torch, CuPy or cuda-python, anything with ``__cuda_stream__``, or its address. It
            still belongs to the caller, and must outlive the group.

        Returns
        -------
        NcclBackend

        Raises
        ------
        ValueError
            It is ``cudaStreamPerThread``, which is a different stream in each thread.
        """
        lent = _lend(stream, device)  # an unsuitable stream is refused before the ranks connect
        options = dict(config or {})
        communicator = _connect(rank, world_size, unique_id, device, timeout, options)
        return cls.__new__(cls)._init_from(communicator, lent, options)

    def _init_from(
        self, communicator: Communicator, stream: Any, config: dict[str, Any]
    ) -> NcclBackend:
        """Make this the group of the communicator, in place of __init__."""
        from ferro_dist._native.nccl_group import NcclGroup, NcclWork

        Work.register(NcclWork)
        self._bind(NcclGroup(communicator, results, stream))
        self._config = config
        return self

    @property
    def device(self) -> int:
        """The number of this rank's GPU in this process."""
        return self._group.communicator.device

    @property
    def comm(self) -> Communicator:
        """NCCL's communicator, for what only NCCL has: groups, windows, one-sided calls."""
        return self._group.communicator

    @property
    def config(self) -> dict[str, Any]:
        """The NCCL options with which the group was made."""
        return dict(self._config)

    @property
    def stream(self) -> Stream:
        """The group's own stream, for asynchronous calls and raw ones; for all if it was given."""
        return self._group.stream

    def synchronize(self, timeout: float | None = None) -> None:
        """Block until all calls made so far are done.

        Raises
        ------
        Timeout
            Some are not done after `timeout` seconds, by default the backend's.
        """
        self._group.synchronize(timeout)

    def heed(self, alarm: object) -> None:
        """End the group when a host group of the same ranks loses one of them.

        Parameters
        ----------
        alarm : object
            From ``alarm()`` of the host group.
        """
        self._group.heed(alarm)

    @property
    def moves_host_arrays(self) -> bool:
        return False

    def attend(self, fd: int, members: Sequence[int]) -> None:
        """Note calls in the memory behind `fd`, shared with other ranks; called before the first.

        Errors then name ranks that have not made a call. See ``NcclGroup.attend``.
        """
        self._group.attend(fd, members)

    def check_batch(self, ops: Sequence[P2POp], timeout: float | None, tag: int) -> None:
        """Raise what `batch` would raise for these arguments; launch nothing."""
        self._group.check_batch(ops, timeout, tag)

    def leave(self) -> None:
        """Wait for what is under way, and tell ranks that `attend` that no call will follow."""
        self._group.leave()

    def abort(self) -> None:
        """Leave the group at once, whatever is under way. Other ranks are not told."""
        self._group.abort()

    def interrupt(self, error: BaseException) -> None:
        """End the group on this rank, because `error` struck between calls that belong together.

        NCCL tells nobody: the others' calls end when they time out. `HybridBackend` tells them.
        """
        self._group.abort()

    def close(self, timeout: float | None = None) -> None:
        """End this rank's side, once what is under way is done. Idempotent.

        Waits for the other ranks to do the same, at most `timeout` seconds, by default the
        group's.
        """
        self._group.close(timeout)

    def empty(self, shape: int | Sequence[int], dtype: Any) -> Any:
        """Make an uninitialized array in memory that NCCL has allocated.

        It is a torch tensor if torch is imported, else a CuPy array if that is. NCCL rounds up to
        2 MiB, and before 2.26 to 512 MiB where GPUs multicast, as those with NVSwitch do.

        Raises
        ------
        UnsupportedOp
            Neither is imported.
        """
        self._check_open("empty")
        dims = arguments.check_shape(shape)
        return interop.nccl_empty(dims, interop.dtype_code(dtype), self.device)

    def split(self, members: Sequence[int], timeout: float | None = None) -> NcclBackend | None:
        with self._splitting():
            self._check_open("split")
            chosen = arguments.check_members(members, rank=self.rank, world_size=self.world_size)
            deadline = Deadline(self._seconds(timeout))
            self._check_agreement(chosen, deadline)
            is_member = self.rank in chosen
            key = chosen.index(self.rank) if is_member else 0
            color = 0 if is_member else None
            communicator = self.comm.split(color, key, timeout=deadline.remaining_s, **self._config)
        if communicator is None:
            return None
        group = type(self).__new__(type(self))._init_from(communicator, None, self._config)
        return group._set_global_ranks(self, chosen)

    def _check_open(self, op: str) -> None:
        if self.is_closed:
            raise arguments.closed_error(op, rank=self.rank)

    def _check_agreement(self, members: tuple[int, ...], deadline: Deadline) -> None:
        """Raise CollectiveMismatch unless all ranks of the group have named the same members."""
        from ferro_dist._native.cuda_memory import DeviceMemory, copy_async
        from ferro_dist._native.cuda_stream import Stream

        masks = np.zeros((self.world_size, self.world_size), np.int32)
        masks[self.rank, list(members)] = np.arange(1, len(members) + 1)
        own = DeviceMemory(masks[0].nbytes, self.device)
        gathered = DeviceMemory(masks.nbytes, self.device)
        # Not the group's stream: waiting for that would never end if ranks stay away, and ignore
        # Ctrl-C; besides, when a call raises, its buffers must not still be in use there.
        stream = Stream(self.device)
        copy_async(own.address, masks[self.rank].ctypes.data, masks[0].nbytes, stream)
        stream.synchronize()
        self.all_gather(own, gathered, True, deadline.remaining_s, 0)
        self._group.synchronize(deadline.remaining_s + WATCHDOG_GRACE_S)
        copy_async(masks.ctypes.data, gathered.address, masks.nbytes, stream)
        stream.synchronize()
        arguments.check_same_members([row.tobytes() for row in masks], members, rank=self.rank)

    def shrink(self, timeout: float | None = None) -> NcclBackend:
        raise UnsupportedOp(
            "shrink: NCCL cannot tell which ranks are left. HybridBackend can. Before an error has "
            "ended the group, name them: backend.comm.shrink(excluded, abort=True); afterwards let "
            "those that are left make a new NcclBackend.",
            op="shrink",
            rank=self.rank,
        )

    # Raw device pointers, for callers that have no arrays. They run on the group's own stream, with
    # which the caller must put its own work in order: `stream`, `synchronize`. As all calls of the
    # group they are launched at once; those of `comm` may be part of a block of NCCL's.

    def allreduce_raw(self, sendbuf: int, recvbuf: int, count: int, dtype: int, op: int) -> None:
        """Reduce `count` elements of device memory over all ranks.

        Parameters
        ----------
        sendbuf, recvbuf : int
            Device addresses; the same for in place.
        count : int
        dtype : int
            ``ncclDataType_t``: `dtype_to_nccl`.
        op : int
            ``ncclRedOp_t``: `reduce_op_to_nccl`.
        """
        self._group.allreduce_raw(sendbuf, recvbuf, count, dtype, op)

    def broadcast_raw(self, sendbuf: int, recvbuf: int, count: int, dtype: int, root: int) -> None:
        """Copy `count` elements of the root's `sendbuf` to every rank's `recvbuf`."""
        self._group.broadcast_raw(sendbuf, recvbuf, count, dtype, root)

    def all_gather_raw(self, sendbuf: int, recvbuf: int, sendcount: int, dtype: int) -> None:
        """Gather `sendcount` elements of every rank, in rank order."""
        self._group.all_gather_raw(sendbuf, recvbuf, sendcount, dtype)

    def reduce_scatter_raw(
        self, sendbuf: int, recvbuf: int, recvcount: int, dtype: int, op: int
    ) -> None:
        """Reduce ``world_size * recvcount`` elements and leave each rank with its own chunk."""
        self._group.reduce_scatter_raw(sendbuf, recvbuf, recvcount, dtype, op)


def _lend(stream: Any, device: int | None) -> Stream:
    """Borrow a stream; the default one by its other name, as null means none to the binding."""
    from ferro_dist._native.cuda_runtime import current_device
    from ferro_dist._native.cuda_stream import LEGACY_STREAM, STREAM_PER_THREAD, Stream

    number = current_device() if device is None else device
    lent = Stream.borrow(stream, number)
    if lent.handle == STREAM_PER_THREAD:
        raise ValueError(
            "A group needs a single stream; cudaStreamPerThread is a different one in each thread."
        )
    return lent if lent.handle else Stream.borrow(LEGACY_STREAM, number)


def _connect(
    rank: int,
    world_size: int,
    unique_id: UniqueId | bytes,
    device: int | None,
    timeout: float,
    config: dict[str, Any],
    alarm: object = None,
) -> Communicator:
    rank, world_size = arguments.check_place(rank, world_size)
    seconds = arguments.check_timeout(timeout)
    nccl = load_nccl()
    if not isinstance(unique_id, nccl.UniqueId):
        unique_id = nccl.UniqueId(unique_id)
    communicator: Communicator = nccl.Communicator.init_rank(
        world_size, unique_id, rank, device=device, timeout=seconds, alarm=alarm, **config
    )
    return communicator
