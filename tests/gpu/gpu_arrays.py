"""Arrays of a GPU, of whichever library: bytes go up, are looked at as arrays, and come down."""

from __future__ import annotations

import abc
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import ml_dtypes
import numpy as np

from ferro_dist.testing import emulated_gpu

__all__ = ["EmulatedArrays", "GpuArrays", "TorchArrays"]

Array = Any


class GpuArrays(abc.ABC):
    """What the tests need of a library."""

    def __init__(self) -> None:
        self._of_thread = threading.local()

    @abc.abstractmethod
    def upload(self, raw: np.ndarray[Any, Any]) -> Array:
        """Copy a vector of bytes to the GPU."""

    @abc.abstractmethod
    def view(
        self, raw: Array, first: int, dtype: Any, shape: Sequence[int], strides: Sequence[int]
    ) -> Array:
        """Look at uploaded bytes, from the one numbered `first`; strides are in elements."""

    @abc.abstractmethod
    def download(self, x: Array) -> np.ndarray[Any, Any]:
        """Copy an array to the host, after what is queued on the current stream."""

    @abc.abstractmethod
    def owns(self, x: Array) -> bool:
        """Whether `x` is one of this library, on the GPU."""

    @abc.abstractmethod
    def new_stream(self) -> AbstractContextManager[Any]:
        """Make a stream, which is the thread's current one while it is entered."""

    def own_stream(self) -> AbstractContextManager[Any]:
        """Return the stream that this thread has to itself.

        On the default one, calls of two threads would wait for each other.
        """
        if not hasattr(self._of_thread, "stream"):
            self._of_thread.stream = self.new_stream()
        stream: AbstractContextManager[Any] = self._of_thread.stream
        return stream

    def array(self, values: Any, dtype: Any = None) -> Array:
        """Copy `values` to the GPU."""
        host = np.ascontiguousarray(values, dtype)
        raw = self.upload(np.frombuffer(host.tobytes(), np.uint8).copy())
        strides = [step // host.dtype.itemsize for step in host.strides]
        return self.view(raw, 0, host.dtype, np.shape(values), strides[: np.ndim(values)])


class EmulatedArrays(GpuArrays):
    def __init__(self) -> None:
        super().__init__()
        self._gpu = emulated_gpu()

    def upload(self, raw: np.ndarray[Any, Any]) -> Array:
        return self._gpu.array(raw)

    def view(
        self, raw: Array, first: int, dtype: Any, shape: Sequence[int], strides: Sequence[int]
    ) -> Array:
        from ferro_dist._native.emulated_array import EmulatedArray

        start = raw.address + first
        return EmulatedArray(raw.memory, start, tuple(shape), tuple(strides), dtype, raw.device)

    def download(self, x: Array) -> np.ndarray[Any, Any]:
        return self._gpu.copy_out(x)

    def owns(self, x: Array) -> bool:
        return type(x).__name__ == "EmulatedArray"

    def new_stream(self) -> AbstractContextManager[Any]:
        return self._gpu.stream()


class TorchArrays(GpuArrays):
    def __init__(self) -> None:
        import torch

        super().__init__()
        self._torch = torch

    def upload(self, raw: np.ndarray[Any, Any]) -> Array:
        return self._torch.from_numpy(raw).cuda()

    def view(
        self, raw: Array, first: int, dtype: Any, shape: Sequence[int], strides: Sequence[int]
    ) -> Array:
        wanted = np.dtype(dtype)
        # Torch looks at nothing backwards: what lies so is a copy, the other way round.
        backwards = [axis for axis, step in enumerate(strides) if step < 0]
        start = first // wanted.itemsize
        start += sum(strides[axis] * (shape[axis] - 1) for axis in backwards)
        typed = getattr(self._torch, wanted.name)
        forwards = self._torch.empty(0, dtype=typed, device=raw.device).set_(
            raw.untyped_storage(), start, tuple(shape), tuple(map(abs, strides))
        )
        return forwards.flip(backwards) if backwards else forwards

    def download(self, x: Array) -> np.ndarray[Any, Any]:
        name = str(x.dtype).removeprefix("torch.")
        # A copy, whose strides are those of its shape: what has no or one element may have any.
        packed = x.clone(memory_format=self._torch.contiguous_format).reshape(-1)
        raw = packed.view(self._torch.uint8).cpu().numpy()
        values: np.ndarray[Any, Any] = raw.view(getattr(ml_dtypes, name, None) or name)
        return values.reshape(tuple(x.shape))

    def owns(self, x: Array) -> bool:
        return isinstance(x, self._torch.Tensor) and x.is_cuda

    def new_stream(self) -> AbstractContextManager[Any]:
        # One stream may be entered again; the context of it may not.
        stream = self._torch.cuda.Stream()
        return _Entered(lambda: self._torch.cuda.stream(stream))


class _Entered(AbstractContextManager[Any]):
    """Enters a context made anew each time."""

    def __init__(self, make: Callable[[], AbstractContextManager[Any]]) -> None:
        self._make = make
        self._entered: list[AbstractContextManager[Any]] = []

    def __enter__(self) -> Any:
        self._entered.append(self._make())
        return self._entered[-1].__enter__()

    def __exit__(self, *raised: object) -> None:
        self._entered.pop().__exit__(*raised)  # type: ignore[arg-type]
