"""Buckets in GPU memory that NCCL has allocated and registered.

Everything is done in the order of the stream on which the caller's library currently works, and the
host waits only where it has to look at what was reduced:

- A rank that contributed all gradients of a bucket knows that each has a contributor. One that did
  not reads the lanes, once the bucket's allreduce is done.
- A mean of contributors takes their number from the lanes.

Anything beyond moving memory, such as multiplying or converting, is left to the array library.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from ferro_dist import interop
from ferro_dist._native.cuda_memory import copy_async, fill_async
from ferro_dist._native.cuda_runtime import DeviceGuard
from ferro_dist._native.cuda_stream import Stream, current_stream_of_array
from ferro_dist.parallel.buckets.bucket import Bucket, BucketLayout
from ferro_dist.parallel.buckets.gpu_memory import GpuMemory, free_unused_memory

__all__ = ["GpuBucket"]

Array = Any
NumpyArray = np.ndarray[Any, Any]


class GpuBucket(Bucket):
    """Gradients on a GPU that are reduced together, as views of one flat array.

    Parameters
    ----------
    index, members, layout
        As `Bucket` takes them.
    memory : GpuMemory
    wire_dtype : numpy.dtype, optional
        The dtype as which the content is reduced.
    kept : dict, optional
        As `Bucket` takes it.

    Attributes
    ----------
    buffer, flat : array
        The same array, of the module's library.
    """

    is_on_gpu = True

    def __init__(
        self,
        index: int,
        members: Sequence[int],
        layout: BucketLayout,
        memory: GpuMemory,
        wire_dtype: np.dtype[Any] | None = None,
        kept: dict[str, Any] | None = None,
    ) -> None:
        self._set_layout(index, members, layout, kept)
        self._on_device = functools.partial(DeviceGuard, memory.device)
        self._memory = memory
        whole = memory.empty(layout.count + self._tail_count, layout.dtype)
        self.buffer = self.flat = whole[: layout.count]
        # What a rank that contributes all gradients copies to the tail.
        self._full_tail = whole[layout.count :]
        self._tail = whole[layout.lanes_offset : layout.count]
        self.wire = self._flat_wire = (
            self.buffer if wire_dtype is None else memory.empty(layout.count, wire_dtype)
        )
        self.views = list(map(self.new_view, range(len(members))))
        self._view = interop.as_view(self.buffer)
        self._address = self._view.address
        self.reset()
        self._fill_at_once()

    def reset(self) -> None:
        super().reset()
        free_unused_memory()  # gradients from before the buckets were laid out again
        self._reduced_tail: NumpyArray | None = None
        self._streams: set[int] = set()  # of this round's gradients
        self._waited_for: set[int] = set()

    # Lanes. They and the controls behind them are the bucket's tail.

    def clear(self) -> None:
        with self._working_stream() as stream:
            fill_async(self._address, 0, self.layout.nbytes, stream)
        self.is_full = False

    def _fill_at_once(self) -> None:
        """Fill new memory at once: what comes may be done on any stream, without a wait."""
        full = self._new_tail([True] * len(self.members))
        with self._on_device():
            stream = Stream()  # which has nothing else to do first
            fill_async(self._address, 0, self.layout.nbytes, stream)
            full_address = interop.as_view(self._full_tail).address
            copy_async(full_address, full.ctypes.data, full.nbytes, stream)
            stream.synchronize()
        self.is_full = False

    def mark(self, is_contributed: Sequence[bool] | None = None) -> None:
        if is_contributed is None or all(is_contributed):
            for target, content in self.mark_all():
                self._assign(target, content)
            return
        self.is_full = False
        self._upload(self._new_tail(is_contributed), self._tail_address)

    def mark_all(self) -> list[tuple[Array, Array]]:
        self.is_full = True
        # Not from the host: a graph may hold this, and nothing waits.
        return [(self._tail, self._full_tail)]

    def set_control(self, control: int, is_set: bool) -> None:
        if is_set:
            offset = (self.layout.controls_offset + control) * self.layout.dtype.itemsize
            self._upload(np.ones(1, self.layout.dtype), self._address + offset)

    def has_control(self, control: int) -> bool:
        return bool(self._read_tail()[self.layout.controls_offset - self.layout.count :][control])

    def _reduced_lanes(self) -> NumpyArray:
        return self._read_tail()[: len(self.members)]

    @property
    def _tail_count(self) -> int:
        return self.layout.count - self.layout.lanes_offset

    @property
    def _tail_address(self) -> int:
        return self._address + self.layout.lanes_offset * self.layout.dtype.itemsize

    def _new_tail(self, is_contributed: Sequence[bool]) -> NumpyArray:
        tail: NumpyArray = np.zeros(self._tail_count, self.layout.dtype)
        tail[: len(self.members)] = is_contributed
        return tail

    def _read_tail(self) -> NumpyArray:
        """Wait for the reduction on the host, and return the reduced tail."""
        if self._reduced_tail is None:
            if self.work is not None:
                self.work.wait(self._memory.patience_s)  # has a deadline, and sees the group end
            tail: NumpyArray = np.empty(self._tail_count, self.layout.dtype)
            with self._working_stream() as stream:
                copy_async(tail.ctypes.data, self._tail_address, tail.nbytes, stream)
                stream.synchronize()
            self._reduced_tail = tail
        return self._reduced_tail

    # Gradients

    def new_view(self, position: int) -> Array:
        layout = self.layout
        return self._memory.view(self.buffer, layout.offsets[position], layout.specs[position])

    def put_in(self, position: int, gradient: Array | None) -> None:
        if gradient is not None:
            self._assign(self.views[position], gradient)
            return
        view = interop.as_view(self.views[position])
        with self._working_stream() as stream:
            fill_async(view.address, 0, view.nbytes, stream)

    def take_out(self, position: int, gradient: Array) -> None:
        self._assign(gradient, self.views[position])

    def copy(self) -> Array:
        return interop.copy(self.flat)

    def _assign(self, target: Array, source: Array) -> None:
        to, of = interop.as_view(target), interop.as_view(source)
        if not (to.is_contiguous and of.is_contiguous):
            target[...] = source
        elif to.address != of.address:
            with self._on_device():
                copy_async(to.address, of.address, of.nbytes, self._current_stream())

    def _upload(self, host: NumpyArray, address: int) -> None:
        with self._working_stream() as stream:
            copy_async(address, host.ctypes.data, host.nbytes, stream)
        # A GPU that reaches all of the host's memory (Grace) reads it only when the copy runs.
        self._memory.keep(host)

    # Streams

    def note_stream(self) -> None:
        self._streams.add(current_stream_of_array(self._view))  # for every gradient

    def join_streams(self) -> None:
        # If the user's forward used several streams, so does backward.
        current = self._current_stream()
        self._waited_for = self._streams - {current}
        for stream in self._waited_for:
            self._order(stream, current)
        self._streams = {current}

    def release_streams(self) -> None:
        for stream in self._waited_for:
            self._order(self._current_stream(), stream)

    def _current_stream(self) -> int:
        return current_stream_of_array(self._view)

    def _order(self, earlier: int, later: int) -> None:
        device = self._memory.device
        with self._on_device():
            event = Stream.borrow(earlier, device).record()
            Stream.borrow(later, device).wait(event)

    @contextlib.contextmanager
    def _working_stream(self) -> Iterator[Stream]:
        """Make the GPU current, as its default stream may be meant; yield the stream to work on."""
        with self._on_device():
            yield Stream.borrow(self._current_stream(), self._memory.device)
