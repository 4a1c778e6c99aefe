"""GPU memory for what is reduced again and again: NCCL's, before 2.26 CUDA's; registered with NCCL.

The allocators of GPU libraries reuse memory in the order of a stream, so that nobody has to wait
before releasing an array that the GPU still reads. NCCL's does not. Memory to which nobody refers
any more is therefore kept here until the stream on which its last user worked at that time has
passed that point.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import numpy as np

from ferro_dist import interop
from ferro_dist.backends.nccl import WATCHDOG_GRACE_S
from ferro_dist.parallel.buckets.bucket import ParameterSpec, view_of

if TYPE_CHECKING:
    from ferro_dist._native.cuda_memory import GpuBytes
    from ferro_dist._native.cuda_stream import Event
    from ferro_dist.backends.base import Backend
    from ferro_dist.backends.nccl import NcclBackend

__all__ = ["GpuMemory", "free_unused_memory"]

Array = Any

_FRUGAL_NCCL = (2, 26)


class GpuMemory:
    """The memory of a group's GPU, as arrays of one library.

    Parameters
    ----------
    backend : NcclBackend or HybridBackend
    like : array
        An array of the library; may be on the host.
    view : callable
        Makes the slot of a gradient in a flat array, as `bucket.view_of` does.

    Attributes
    ----------
    device : int
    patience_s : float
        How long a host may wait for a call before it gives up.
    """

    def __init__(
        self,
        backend: Backend,
        like: Array,
        view: Callable[[Array, int, ParameterSpec], Array] = view_of,
    ) -> None:
        group = getattr(backend, "nccl", backend)  # a HybridBackend's GPU side
        self._group = cast("NcclBackend", group)
        self._like = like
        self.view = view
        self.device = self._group.device
        self.patience_s = backend.timeout + WATCHDOG_GRACE_S
        self._probe: Array = None

    def empty(self, count: int, dtype: Any) -> Array:
        """Make an uninitialized vector that is registered with the group's communicator."""
        free_unused_memory()
        if self._probe is None:
            self._probe = self._make_probe()
        nbytes = max(1, count * np.dtype(dtype).itemsize)
        memory = _RegisteredMemory(nbytes, self._group, self._probe)
        return interop.array_over(memory, (count,), np.dtype(dtype), self._like)

    def keep(self, held: object) -> None:
        """Keep an object until the library's current stream has done what it was given so far."""
        _free_later(_PendingFree((held,), self._probe, None))

    def _make_probe(self) -> Array:
        """Make an unused array, to ask its library for any thread's current stream."""
        from ferro_dist._native.cuda_memory import DeviceMemory

        memory = DeviceMemory(1, self.device)  # NCCL would take megabytes for it
        return interop.array_over(memory, (1,), np.dtype(np.uint8), self._like)


class _RegisteredMemory:
    """GPU memory that stays registered with a communicator while arrays use it."""

    def __init__(self, nbytes: int, group: NcclBackend, probe: Array) -> None:
        self._probe = probe
        self._memory = _allocate(nbytes, group.device)
        self._registration = group.comm.register(self._memory)
        self.address, self.nbytes, self.device = self._memory.address, nbytes, group.device

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        interface: dict[str, Any] = self._memory.__cuda_array_interface__
        return interface

    def __del__(self) -> None:
        if not hasattr(self, "_registration") or sys.is_finalizing():
            return
        from ferro_dist._native.cuda_runtime import current_device

        pending = _PendingFree((self._memory, self._registration), self._probe, None)
        if current_device() == self.device:
            _free_later(pending)
        else:  # any thread may run the collector: CUDA would make a context on that one's GPU
            _pending.append(pending)


def _allocate(nbytes: int, device: int) -> GpuBytes:
    from ferro_dist._native.cuda_memory import DeviceMemory
    from ferro_dist._native.nccl_library import get_version
    from ferro_dist._native.nccl_memory import NcclMemory

    # Before 2.26 NCCL rounds up to half a gigabyte on GPUs that support multicast (with NVSwitch).
    if get_version() < _FRUGAL_NCCL:
        return DeviceMemory(nbytes, device)
    return NcclMemory(nbytes, device)


class _PendingFree(NamedTuple):
    """Memory to which nobody refers any more, and when it may be freed.

    Attributes
    ----------
    held : tuple
        The last references to it.
    probe : array
        Tells its library's current stream.
    event : Event or None
        Where that stream was when the last user let go. None while the stream is captured: the
        event would become part of the graph.
    """

    held: tuple[Any, ...]
    probe: Array
    event: Event | None

    def still_pending(self) -> _PendingFree | None:
        """Return this with its event, recorded now if it had none; None once that has passed."""
        from ferro_dist._native.cuda_runtime import DeviceGuard
        from ferro_dist._native.cuda_stream import Stream, current_stream_of_array

        device = interop.as_view(self.probe).device_id
        with DeviceGuard(device):
            stream: Stream = Stream.borrow(current_stream_of_array(self.probe), device)
            if stream.is_capturing():  # nor may events be queried
                return self
            event = self.event or stream.record()
            return None if event.is_done() else self._replace(event=event)


# Appending and popping are atomic: several threads may release memory.
_pending: list[_PendingFree] = []


def _free_later(pending: _PendingFree) -> None:
    # Its event is recorded before other threads can find it: they work on streams of their own.
    left = pending.still_pending()
    if left is not None:
        _pending.append(left)
    free_unused_memory()


def free_unused_memory() -> None:
    """Free the memory that no stream uses any more."""
    if not _pending:
        return
    waiting = []
    with contextlib.suppress(IndexError):  # empty, perhaps because of another thread
        while _pending:
            left = _pending.pop().still_pending()
            if left is not None:
                waiting.append(left)
    _pending.extend(waiting)
