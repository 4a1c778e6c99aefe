"""GPU arrays through a group of the engine, which reaches no GPU: by way of host memory.

Only if the user has asked for it, by ``FERROTORCH_ENABLE_GPU_FALLBACK``: the detour is long, and a
program that takes it unnoticed is slow for no apparent reason. Unset, empty, ``0`` and ``false``
mean no. Each call that takes it warns.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Protocol

from ferro_dist import arguments
from ferro_dist.errors import GpuFallbackWarning, UnsupportedOp

if TYPE_CHECKING:
    from ferro_dist._native.buffer_view import BufferView
    from ferro_dist._native.cuda_memory import PinnedMemory
    from ferro_dist._native.cuda_stream import Event, Stream

__all__ = ["VARIABLE", "check_enabled", "is_enabled", "round_trip"]

VARIABLE = "FERROTORCH_ENABLE_GPU_FALLBACK"

_PACKAGE = f"{Path(__file__).parent}{os.sep}"

# Large enough that a copy runs at the bus's speed, small enough that the first comes soon.
_PIECE_NBYTES = 4 << 20
# One being filled, one being communicated, one being emptied.
_NUM_BUFFERS = 3

# Every call warns, not only the first of each line. The user's own filters take precedence.
warnings.simplefilter("always", GpuFallbackWarning, append=True)


class Run(Protocol):
    """The call, on host memory: addresses and a count of elements."""

    def __call__(self, source: int, target: int, count: int) -> None: ...


def is_enabled() -> bool:
    """Whether the user has asked for the detour through host memory."""
    return os.environ.get(VARIABLE, "").strip().lower() not in ("", "0", "false")


def check_enabled(op: str, rank: int) -> None:
    """Warn that `op` goes through host memory; raise UnsupportedOp if it may not."""
    if not is_enabled():
        arguments.raise_out_of_reach(
            op,
            rank=rank,
            alternative=f" With {VARIABLE}=1 in the environment it is copied there and back, at a "
            "tenth of the speed or less.",
        )
    called, depth = _call_of_user(op)
    warnings.warn(
        f"{called} of a GPU array goes through host memory, which is slow. Use HybridBackend, "
        f"or unset {VARIABLE} to make this an error.",
        GpuFallbackWarning,
        stacklevel=depth,
    )


def _call_of_user(op: str) -> tuple[str, int]:
    """Return `op` as the user called it, and the stack level of that call for `check_enabled`."""
    frame: FrameType | None = sys._getframe(1)
    called, depth = op, 1
    while frame is not None and frame.f_code.co_filename.startswith(_PACKAGE):
        if frame.f_code.co_name == f"gpu_{op}":
            called = f"gpu_{op}"
        frame = frame.f_back
        depth += 1
    return called, depth


def round_trip(
    source: BufferView | None, target: BufferView | None, run: Run, *, is_elementwise: bool
) -> None:
    """Run a call on copies of GPU arrays, and copy the result back.

    Blocks until the result is on the GPU. All copies run on the stream on which the arrays' library
    works now.

    Steps, for each piece of `_PIECE_NBYTES` of a call that works element by element: copy
    it to pinned memory, run the call on it, copy the result to the GPU. The copy of the
    next piece runs while this one is communicated, and so does the copy back of the one before.
    A call that moves elements between ranks goes in one piece.

    Parameters
    ----------
    source, target : BufferView or None
        What is read and what is written, contiguous; None for nothing.
    run : callable
    is_elementwise : bool
        Source and target have equal size, and element i of one depends on elements i alone.
    """
    from ferro_dist._native.cuda_runtime import DeviceGuard, current_device

    view = source or target
    assert view is not None
    with DeviceGuard(view.device_id if view.device_id >= 0 else current_device()):
        stream, *others = [_stream_of(each) for each in (source, target) if each is not None]
        # Arrays of two libraries may be worked on in two streams: both come first. The host waits:
        # for an event the device of the stream would have to be known, which not all arrays tell.
        for other in others:
            other.synchronize()
        if is_elementwise:
            _in_pieces(source, target, run, view, stream)
        else:
            _in_one(source, target, run, stream)


def _stream_of(view: BufferView) -> Stream:
    from ferro_dist._native.cuda_runtime import current_device
    from ferro_dist._native.cuda_stream import Stream, current_stream_of_array

    stream = Stream.borrow(current_stream_of_array(view.owner), current_device())
    if stream.is_capturing():
        raise UnsupportedOp("A call through host memory cannot be captured in a CUDA graph.")
    return stream


def _in_one(source: BufferView | None, target: BufferView | None, run: Run, stream: Stream) -> None:
    from ferro_dist._native.cuda_memory import copy_async

    sizes = [each.nbytes for each in (source, target) if each is not None]
    with _buffers(sizes, stream) as buffers:
        sent = 0 if source is None else buffers[0].address
        received = 0 if target is None else buffers[-1].address
        if source is not None:
            copy_async(sent, source.address, source.nbytes, stream)
            stream.synchronize()
        run(sent, received, 0)
        if target is not None:
            copy_async(target.address, received, target.nbytes, stream)


def _in_pieces(
    source: BufferView | None, target: BufferView | None, run: Run, view: BufferView, stream: Stream
) -> None:
    pieces = list(_pieces(view.count, view.itemsize))
    with _buffers([_PIECE_NBYTES] * min(len(pieces), _NUM_BUFFERS), stream) as buffers:

        def bring(index: int) -> Event | None:
            if source is None or index >= len(pieces):
                return None
            _copy(buffers[index % _NUM_BUFFERS], source, pieces[index], stream, is_back=False)
            return stream.record()

        arrival = bring(0)
        departures: list[Event | None] = [None] * len(pieces)
        for index, piece in enumerate(pieces):
            # Behind the copy that empties the same buffer, in the order of the stream.
            next_arrival = bring(index + 1)
            emptied = departures[index - _NUM_BUFFERS] if index >= _NUM_BUFFERS else None
            for event in (arrival, emptied):
                if event is not None:
                    event.synchronize()
            buffer = buffers[index % _NUM_BUFFERS]
            run(buffer.address, buffer.address, len(piece))
            if target is not None:
                _copy(buffer, target, piece, stream, is_back=True)
                departures[index] = stream.record()
            arrival = next_arrival


def _pieces(count: int, itemsize: int) -> Iterator[range]:
    """Yield the elements of each piece, up to the first that is not full, which may be empty.

    So ranks whose counts differ also differ in some piece, and notice the mismatch. If the last
    piece were full, a rank with fewer pieces would be done while the others wait for it.
    """
    step = _PIECE_NBYTES // itemsize
    for first in range(0, count + 1, step):
        yield range(first, min(count, first + step))


def _copy(
    buffer: PinnedMemory, view: BufferView, piece: range, stream: Stream, *, is_back: bool
) -> None:
    from ferro_dist._native.cuda_memory import copy_async

    on_gpu = view.address + piece.start * view.itemsize
    ends = (on_gpu, buffer.address) if is_back else (buffer.address, on_gpu)
    copy_async(*ends, len(piece) * view.itemsize, stream)


# Of `_PIECE_NBYTES` each: pinning memory takes milliseconds. Guarded by the lock.
_spare: list[PinnedMemory] = []
_spare_lock = threading.Lock()


@contextlib.contextmanager
def _buffers(sizes: Sequence[int], stream: Stream) -> Iterator[list[PinnedMemory]]:
    """Lend buffers of these sizes or more, until what `stream` does with them is done."""
    lent = [_take_buffer(nbytes) for nbytes in sizes]
    try:
        yield lent
    finally:
        stream.synchronize()
        usual = [buffer for buffer in lent if buffer.nbytes == _PIECE_NBYTES]
        with _spare_lock:
            _spare.extend(usual[: max(0, _NUM_BUFFERS - len(_spare))])


def _take_buffer(nbytes: int) -> PinnedMemory:
    from ferro_dist._native.cuda_memory import PinnedMemory

    if nbytes > _PIECE_NBYTES:
        return PinnedMemory(nbytes)
    with _spare_lock:
        if _spare:
            return _spare.pop()
    return PinnedMemory(_PIECE_NBYTES)
