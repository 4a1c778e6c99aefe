"""The contract's cases, which hold arrays of the host, on a group that takes a GPU's.

Each call is made on copies that lie in the GPU's memory as the case's arrays lie in the
host's: with their strides, their overlaps, and fences around them. What it has written is
copied back, once the group's work is done.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from gpu.exclusions import reduces
from gpu.gpu_arrays import GpuArrays

from ferro_dist import P2POp, Work
from ferro_dist.backends.bound import BoundBackend
from ferro_dist.reduce_op import ReduceOp

__all__ = ["OnDevice"]

Array = Any

_FENCE = 64
_PATTERN = 0xA5
_ARRAYS = {"recv": 1, "send": 1}  # leading arguments that are arrays; the other calls have two


class OnDevice(BoundBackend):
    """A group of GPUs, for callers that hold NumPy arrays.

    Parameters
    ----------
    group : NcclBackend or HybridBackend
    arrays : GpuArrays
        The library whose arrays the group is given.
    """

    has_own_memory = False  # a case's array of `empty` is a copy on the host

    def __init__(self, group: Any, arrays: GpuArrays) -> None:
        self.group = group
        self.arrays = arrays
        self.name = group.name
        self._pending: list[_Copied] = []
        self._bind(self._Calls(self))

    @property
    def rank(self) -> int:
        rank: int = self.group.rank
        return rank

    @property
    def world_size(self) -> int:
        size: int = self.group.world_size
        return size

    @property
    def timeout(self) -> float:
        seconds: float = self.group.timeout
        return seconds

    @timeout.setter
    def timeout(self, seconds: float) -> None:
        self.group.timeout = seconds

    @property
    def is_closed(self) -> bool:
        is_closed: bool = self.group.is_closed
        return is_closed

    @property
    def global_ranks(self) -> tuple[int, ...]:
        global_ranks: tuple[int, ...] = self.group.global_ranks
        return global_ranks

    def interrupt(self, error: BaseException) -> None:
        self.group.interrupt(error)

    def close(self) -> None:
        self.group.close()

    def empty(self, shape: int | Sequence[int], dtype: Any) -> Any:
        return self.arrays.download(getattr(self.group, "nccl", self.group).empty(shape, dtype))

    def split(self, members: Sequence[int], timeout: float | None = None) -> OnDevice | None:
        part = self.group.split(members, timeout)
        return None if part is None else OnDevice(part, self.arrays)

    def shrink(self, timeout: float | None = None) -> OnDevice:
        return OnDevice(self.group.shrink(timeout), self.arrays)

    def reduces(self, name: str, op: ReduceOp) -> bool | None:
        """Whether NCCL has a reduction; see `backends.contract.reference.reduces`."""
        return reduces(name, op, self.world_size)

    def settle(self) -> None:
        """Wait for the group's work, and raise what became of it."""
        nccl = getattr(self.group, "nccl", self.group)
        nccl.synchronize()

    class _Calls:
        def __init__(self, on_device: OnDevice) -> None:
            self._on_device = on_device

        def __getattr__(self, name: str) -> Any:
            if name == "batch":
                return self._on_device._on_own_stream(self._on_device._batch)
            return self._on_device._on_own_stream(partial(self._on_device._call, name))

    def _on_own_stream(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            with self.arrays.own_stream():
                return function(*args)

        return call

    def _call(self, name: str, *args: Any) -> Any:
        is_async = args[-3]
        if name == "barrier":
            outcome = self.group.barrier(*args)
            return self._finished(outcome, None, None) if is_async else self._drain()
        count = _ARRAYS.get(name, 2)
        hosts = args[:count]
        placed = _Placed(self.arrays, hosts)
        outcome = getattr(self.group, name)(*placed.devices, *args[count:])
        out = hosts[-1] if name != "send" else None
        if is_async:
            return self._finished(outcome, placed, out)
        result = self._deliver(outcome, placed, out)
        self.settle()
        placed.check_inputs(out)
        return result

    def _batch(self, ops: Sequence[P2POp], is_async: bool, timeout: Any, tag: int) -> Any:
        placed = _Placed(self.arrays, [op.array for op in ops])
        on_gpu = [
            P2POp("send" if op.is_send else "recv", x, op.peer)
            for op, x in zip(ops, placed.devices, strict=True)
        ]
        outcome = self.group.batch(on_gpu, is_async, timeout, tag)
        outs = [op.array for op in ops if not op.is_send]
        if is_async:
            return self._finished(outcome, placed, outs)
        self._deliver(None, placed, outs)
        return self.settle()

    def _finished(self, work: Any, placed: _Placed | None, out: Any) -> _Copied:
        assert isinstance(work, Work)
        copied = _Copied(self, work, placed, out)
        self._pending.append(copied)
        return copied

    def _drain(self) -> None:
        """Copy back what calls have written that nobody waited for."""
        for copied in list(self._pending):
            copied.wait()

    def _deliver(self, outcome: Any, placed: _Placed, out: Any) -> Any:
        """Copy back; return the case's own array where the call has returned its copy."""
        written = out if isinstance(out, list) else [out] if out is not None else []
        for host in written:
            placed.copy_back(host)
        if outcome is None:
            return None
        if out is not None:
            assert any(outcome is device for device in placed.devices), "another array came back"
            return out
        assert self.arrays.owns(outcome), f"a {type(outcome)} came back"
        return self.arrays.download(outcome)


class _Copied(Work):
    """Work whose results are copied to the host by whoever waits for it first."""

    def __init__(self, on_device: OnDevice, work: Work, placed: _Placed | None, out: Any) -> None:
        self._on_device = on_device
        self._work = work
        self._placed = placed
        self._out = out
        self._is_copied = False
        self._result: Any = None

    def wait(self, timeout: float | None = None) -> None:
        with self._on_device.arrays.own_stream():
            self._wait(timeout)

    def _wait(self, timeout: float | None) -> None:
        self._work.wait(timeout)
        if self._is_copied:
            return
        outcome = self._work.result()
        if self._placed is not None:
            self._result = self._on_device._deliver(outcome, self._placed, self._out)
        self._on_device.settle()
        self._is_copied = True
        self._on_device._pending.remove(self)

    def is_completed(self) -> bool:
        return self._work.is_completed()

    def result(self, timeout: float | None = None) -> Any:
        self.wait(timeout)
        return self._result


@dataclass(frozen=True)
class _Block:
    """Bytes of the host that lie together, and their copy between two fences."""

    low: int
    high: int
    raw: Array


class _Placed:
    """Copies of a call's arrays. What is none of NumPy's, or of no dtype, is passed as it is."""

    def __init__(self, arrays: GpuArrays, hosts: Sequence[Any]) -> None:
        self._arrays = arrays
        self._hosts = [np.asarray(x) if isinstance(x, np.generic) else x for x in hosts]
        self._blocks = [self._upload(*span) for span in _spans(self._hosts)]
        views = {id(x): self._view(x) for x in self._hosts if _is_placed(x)}
        self.devices = [views.get(id(x), x) for x in self._hosts]

    def _upload(self, low: int, high: int) -> _Block:
        fenced = np.full(high - low + 2 * _FENCE, _PATTERN, np.uint8)
        fenced[_FENCE : len(fenced) - _FENCE] = _bytes_at(low, high)
        return _Block(low, high, self._arrays.upload(fenced))

    def _view(self, x: Array) -> Array:
        low, _ = _bounds(x)
        block = self._block_at(low)
        first = _FENCE + x.ctypes.data - block.low
        strides = [step // x.itemsize for step in x.strides]
        return self._arrays.view(block.raw, first, x.dtype, x.shape, strides)

    def copy_back(self, host: Array) -> None:
        """Copy what was written for `host` into it."""
        for x, device in zip(self._hosts, self.devices, strict=True):
            if x is host and _is_placed(x):
                host[...] = self._arrays.download(device)
                self._check_fences(host)

    def _check_fences(self, host: Array) -> None:
        low, _ = _bounds(host)
        raw = self._arrays.download(self._block_at(low).raw)
        fences = np.concatenate([raw[:_FENCE], raw[len(raw) - _FENCE :]])
        assert (fences == _PATTERN).all(), "bytes around the output were written"

    def _block_at(self, address: int) -> _Block:
        # The last one that begins before: the end of another may be where it begins.
        return [block for block in self._blocks if block.low <= address][-1]

    def check_inputs(self, out: Array) -> None:
        """Compare what was only read with what it was."""
        for x, device in zip(self._hosts, self.devices, strict=True):
            if x is not out and _is_placed(x) and (out is None or not np.may_share_memory(x, out)):
                now = self._arrays.download(device)
                assert now.tobytes() == x.tobytes(), "an input was written"


def _is_placed(x: Any) -> bool:
    return isinstance(x, np.ndarray) and x.dtype.isnative and x.dtype.kind not in "OUSMm"


def _bounds(x: Array) -> tuple[int, int]:
    if x.size == 0:
        return x.ctypes.data, x.ctypes.data
    steps = [step * (extent - 1) for step, extent in zip(x.strides, x.shape, strict=True)]
    start = x.ctypes.data
    return (
        start + sum(step for step in steps if step < 0),
        start + sum(step for step in steps if step > 0) + x.itemsize,
    )


def _spans(hosts: Sequence[Any]) -> list[tuple[int, int]]:
    """Return the bytes of all arrays, those that overlap together."""
    spans: list[tuple[int, int]] = []
    for low, high in sorted(_bounds(x) for x in hosts if _is_placed(x)):
        if spans and low < spans[-1][1]:
            spans[-1] = spans[-1][0], max(high, spans[-1][1])
        else:
            spans.append((low, high))
    return spans


def _bytes_at(low: int, high: int) -> np.ndarray[Any, Any]:
    block = (ctypes.c_uint8 * (high - low)).from_address(low)
    return np.ctypeslib.as_array(block)
