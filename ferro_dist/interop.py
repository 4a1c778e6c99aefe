"""Arrays of any library, in and out, without importing the library.

`as_view` reads them; for a result, `allocate` makes the memory to write into and `deliver` turns
what was written into an array of the input's library:

=====================  ============================  ===================================
input                  `allocate` gives              `deliver` gives
=====================  ============================  ===================================
NumPy                  NumPy                         the same array
torch, CuPy            the same library and device   the same array
JAX, on the host       NumPy                         JAX, over the same memory if it can
JAX, on a GPU          memory of that GPU            JAX, over the same memory
any other              NumPy                         the same array
=====================  ============================  ===================================

NumPy's subclasses (``memmap``, ``matrix``) are read as the plain arrays underneath; results are
plain arrays. A masked array is refused, as its mask would be lost.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import cache
from typing import Any

import numpy as np

from ferro_dist._native.buffer_view import BufferView, as_output, as_view
from ferro_dist.dtypes import DTYPE_NAMES
from ferro_dist.errors import InvalidArray, UnsupportedOp

__all__ = [
    "CPU",
    "CUDA",
    "BufferView",
    "aligned_empty",
    "allocate",
    "array_over",
    "as_output",
    "as_view",
    "concatenate",
    "content_of",
    "contiguous",
    "copy",
    "deliver",
    "dtype_code",
    "dtype_name",
    "empty_beside",
    "have_same_address",
    "is_on_gpu",
    "jax_committed_sharding",
    "jax_full_width",
    "nccl_empty",
    "numpy_dtype",
    "outside_inference_mode",
    "same_stream",
    "shape_of",
]

Array = Any

_CODES = {name: code for code, name in enumerate(DTYPE_NAMES)}

CPU, CUDA = 1, 2
"""Values of `BufferView.device_type`, which are DLPack's."""

_EMULATION = "ferro_dist._emulation.gpu"

# A cache line; also what XLA demands of memory that it takes over without a copy.
_ALIGNMENT_NBYTES = 64


def contiguous(x: Array) -> Array:
    """Return `x` if it is C-contiguous, else a C-contiguous copy of the same library.

    A torch tensor that requires grad is detached: the copy is for reading.
    """
    return _library_of(x).contiguous(x)


def copy(x: Array) -> Array:
    """Return a C-contiguous copy of `x`, of the same library and on the same device."""
    return _library_of(x).copy(x)


def content_of(x: Array) -> bytes:
    """Return the bytes of the elements in C order, once the current stream's work is done."""
    whole = contiguous(x)
    view = as_view(whole)
    if view.device_type != CUDA:
        return ctypes.string_at(view.address, view.nbytes)
    from ferro_dist._native.cuda_memory import copy_async
    from ferro_dist._native.cuda_runtime import DeviceGuard
    from ferro_dist._native.cuda_stream import Stream, current_stream_of_array

    host = np.empty(view.nbytes, np.uint8)
    with DeviceGuard(view.device_id):
        stream = Stream.borrow(current_stream_of_array(whole), view.device_id)
        copy_async(host.ctypes.data, view.address, view.nbytes, stream)
        stream.synchronize()
    return host.tobytes()


def have_same_address(x: Array, y: Array) -> bool:
    """Whether two arrays of one shape begin at one address, or have no elements to write to."""
    if x is y:  # of any dtype
        return True
    one, other = as_view(x), as_view(y)
    return one.address == other.address or not one.count


def is_on_gpu(x: Array) -> bool:
    """Whether only a GPU can reach the memory of `x`."""
    return as_view(x).device_type == CUDA


def nccl_empty(shape: Sequence[int], code: int, device: int) -> Array:
    """Make an uninitialized array over memory that NCCL allocates on a GPU.

    Parameters
    ----------
    shape : sequence of int
    code : int
        A `BufferView.dtype`.
    device : int

    Returns
    -------
    array
        From torch if that is imported, else from CuPy.

    Raises
    ------
    UnsupportedOp
        Neither is.
    """
    from ferro_dist._native.nccl_memory import NcclMemory

    dtype = numpy_dtype(code)
    library = next((each for each in (_EMULATED, _TORCH, _CUPY) if each.has_gpu()), None)
    if library is None:
        raise UnsupportedOp(
            "empty: GPU memory can only become an array of torch or CuPy, and neither is imported. "
            "Import one first."
        )
    return library.over(NcclMemory(max(1, math.prod(shape) * dtype.itemsize), device), shape, dtype)


def array_over(memory: Any, shape: Sequence[int], dtype: np.dtype[Any], like: Array) -> Array:
    """Make an array of the library of `like` over memory of a GPU, which it keeps alive.

    Parameters
    ----------
    memory : object
        Has ``address``, ``nbytes``, ``device`` and ``__cuda_array_interface__`` as uint8.
    shape : sequence of int
    dtype : numpy.dtype
    like : array

    Raises
    ------
    InvalidArray
        Its library cannot do so.
    """
    return _library_of(like).over(memory, shape, dtype)


def allocate(x: Array, shape: Sequence[int] | None = None) -> Array:
    """Make uninitialized memory for a result, to be handed to `deliver` once written.

    Parameters
    ----------
    x : array
        Gives the library, the dtype and the device.
    shape : sequence of int, optional
        That of `x` if not given.

    Returns
    -------
    array, C-contiguous
        Of the library of `x` where that is mutable, else a NumPy array.

    Raises
    ------
    InvalidArray
        `x` is on a device and this module does not know its library.
    """
    return _library_of(x).allocate(x, shape)


def outside_inference_mode(x: Array) -> AbstractContextManager[Any]:
    """Return a context in which new arrays like `x` can be written to at any later time.

    What torch makes in inference mode, which the caller may be in, can be written to in that mode
    alone. For other libraries the context does nothing.
    """
    return _library_of(x).outside_inference_mode()


def empty_beside(x: Array, shape: Sequence[int], dtype: np.dtype[Any]) -> Array:
    """Make an uninitialized array of any dtype, of the library of `x` and on its GPU.

    Raises
    ------
    InvalidArray
        This module cannot allocate with its library.
    """
    return _library_of(x).empty_beside(x, shape, dtype)


def same_stream(x: Array) -> Callable[[], AbstractContextManager[Any]]:
    """Return a context maker that gives another thread the GPU of `x` and the stream current here.

    Array libraries keep the current device and stream per thread, and free memory in the order of
    the stream that was current when it was allocated.
    """
    return _library_of(x).same_stream(x)


def concatenate(parts: Sequence[Array]) -> Array:
    """Join arrays of one library along their first axis. Those without axes are stacked."""
    return _library_of(parts[0]).concatenate(parts)


def deliver(x: Array, written: Array) -> Array:
    """Turn what `allocate` made for `x`, now written, into an array of the library of `x`.

    `written` must not be touched afterwards: the result may share its memory.
    """
    return _library_of(x).deliver(x, written)


def aligned_empty(shape: Sequence[int], dtype: np.dtype[Any]) -> np.ndarray[Any, Any]:
    """Make an uninitialized NumPy array on a cache line, which JAX takes over without a copy."""
    nbytes = math.prod(shape) * dtype.itemsize
    block = np.empty(nbytes + _ALIGNMENT_NBYTES, np.uint8)
    start = -block.ctypes.data % _ALIGNMENT_NBYTES
    return block[start : start + nbytes].view(dtype).reshape(shape)


def jax_full_width() -> AbstractContextManager[Any]:
    """Return a context in which JAX takes over 64-bit numbers as they are.

    Unless jax_enable_x64 is set, perhaps in some threads only, it would silently narrow them to 32
    bits. Its own 64-bit arrays keep their width when they are copied or moved, and so do ours.
    """
    enable_x64 = getattr(sys.modules["jax"], "enable_x64", None)  # from JAX 0.8 on
    if enable_x64 is None:
        enable_x64 = importlib.import_module("jax.experimental").enable_x64
    context: AbstractContextManager[Any] = enable_x64(True)
    return context


def jax_committed_sharding(x: Array) -> Any:
    """Return the sharding of a JAX array that is committed to its devices, else None.

    For `jax.device_put`: a result becomes committed to the same devices as the array that it
    replaces, or is left uncommitted on JAX's default device.
    """
    is_committed = getattr(x, "committed", getattr(x, "_committed", False))
    return x.sharding if is_committed else None


def shape_of(x: Array) -> tuple[int, ...]:
    """Return the shape of an array, or of anything that `as_view` can read."""
    shape = getattr(x, "shape", None)
    return tuple(_shape_of_buffer(x) if shape is None else shape)


# dtypes


def dtype_name(code: int) -> str:
    """Return the name of a `BufferView.dtype`."""
    return DTYPE_NAMES[code]


@cache
def numpy_dtype(code: int) -> np.dtype[Any]:
    """Return the dtype of NumPy, or of ml_dtypes, for a `BufferView.dtype`."""
    name = DTYPE_NAMES[code]
    if name not in ("bfloat16", "float8_e4m3fn", "float8_e5m2"):
        return np.dtype(name)
    import ml_dtypes  # takes a while to import, and most programs never need it

    dtype: np.dtype[Any] = np.dtype(getattr(ml_dtypes, name))
    return dtype


def dtype_code(dtype: Any) -> int:
    """Return the number that ``ferro::DType`` gives to a dtype.

    Parameters
    ----------
    dtype : str or dtype
        A name or dtype object of NumPy, ml_dtypes, torch or JAX.

    Raises
    ------
    InvalidArray
        There is no such dtype, or its byte order is not this machine's.
    """
    code = _CODES.get(str(dtype).removeprefix("torch."))
    if code is not None:
        return code
    try:
        resolved = np.dtype(dtype)
    except (TypeError, ValueError):  # the latter for an array
        resolved = None
    if resolved is None or not resolved.isnative or resolved.name not in _CODES:
        raise InvalidArray(f"there is no dtype {dtype!r:.80}; use one of {', '.join(DTYPE_NAMES)}")
    return _CODES[resolved.name]


# Libraries


class _Library:
    """NumPy arrays, and what all other libraries have in common with them."""

    def contiguous(self, x: Array) -> Array:
        return x if x.flags.c_contiguous else np.array(x, order="C")

    def copy(self, x: Array) -> Array:
        return np.array(x, order="C")

    def allocate(self, x: Array, shape: Sequence[int] | None) -> Array:
        return np.empty(x.shape if shape is None else shape, x.dtype)

    def outside_inference_mode(self) -> AbstractContextManager[Any]:
        return contextlib.nullcontext()

    def deliver(self, x: Array, written: Array) -> Array:
        return written

    def over(self, memory: Any, shape: Sequence[int], dtype: np.dtype[Any]) -> Array:
        raise InvalidArray("GPU memory can only become an array of torch or CuPy")

    def empty_beside(self, x: Array, shape: Sequence[int], dtype: np.dtype[Any]) -> Array:
        raise InvalidArray(
            f"cannot allocate on the GPU of this {type(x).__module__}.{type(x).__qualname__}: "
            "its library is not one that ferro_dist can allocate with (torch, CuPy)"
        )

    def same_stream(self, x: Array) -> Callable[[], AbstractContextManager[Any]]:
        return contextlib.nullcontext

    def concatenate(self, parts: Sequence[Array]) -> Array:
        return _joined(np, parts)


class _Torch(_Library):
    def contiguous(self, x: Array) -> Array:
        return x.detach().contiguous()

    def copy(self, x: Array) -> Array:
        torch = sys.modules["torch"]
        return x.detach().clone(memory_format=torch.contiguous_format)

    def has_gpu(self) -> bool:
        torch = sys.modules.get("torch")
        return torch is not None and torch.cuda.is_available()

    def over(self, memory: Any, shape: Sequence[int], dtype: np.dtype[Any]) -> Array:
        torch: Any = sys.modules["torch"]
        whole = torch.as_tensor(memory, device=f"cuda:{memory.device}")
        nbytes = math.prod(shape) * dtype.itemsize
        return whole[:nbytes].view(getattr(torch, dtype.name)).reshape(tuple(shape))

    def allocate(self, x: Array, shape: Sequence[int] | None) -> Array:
        torch = sys.modules["torch"]
        if shape is None:  # half the time of the general way; the format alone costs a quarter
            if x.is_contiguous():
                return torch.empty_like(x)
            return torch.empty_like(x, memory_format=torch.contiguous_format)
        return torch.empty(shape, dtype=x.dtype, device=x.device)

    def outside_inference_mode(self) -> AbstractContextManager[Any]:
        mode: AbstractContextManager[Any] = sys.modules["torch"].inference_mode(False)
        return mode

    def empty_beside(self, x: Array, shape: Sequence[int], dtype: np.dtype[Any]) -> Array:
        torch = sys.modules["torch"]
        return torch.empty(tuple(shape), dtype=getattr(torch, dtype.name), device=x.device)

    def same_stream(self, x: Array) -> Callable[[], AbstractContextManager[Any]]:
        cuda = sys.modules["torch"].cuda
        stream = cuda.current_stream(x.device)
        return lambda: cuda.stream(stream)  # and with it its device

    def concatenate(self, parts: Sequence[Array]) -> Array:
        torch = sys.modules["torch"]
        # Autocast has nothing to do here, and raises for float16 where its own dtype is bfloat16.
        with torch.autocast(parts[0].device.type, enabled=False):
            return torch.cat(parts) if parts[0].ndim else torch.stack(parts)


class _CuPy(_Library):
    def contiguous(self, x: Array) -> Array:
        with x.device:
            return x if x.flags.c_contiguous else x.copy(order="C")

    def copy(self, x: Array) -> Array:
        with x.device:
            return x.copy(order="C")

    def has_gpu(self) -> bool:
        return "cupy" in sys.modules

    def over(self, memory: Any, shape: Sequence[int], dtype: np.dtype[Any]) -> Array:
        cuda: Any = sys.modules["cupy"].cuda
        owner = cuda.UnownedMemory(memory.address, memory.nbytes, memory, memory.device)
        return sys.modules["cupy"].ndarray(tuple(shape), dtype, cuda.MemoryPointer(owner, 0))

    def allocate(self, x: Array, shape: Sequence[int] | None) -> Array:
        cupy = sys.modules["cupy"]
        with x.device:
            return cupy.empty(x.shape if shape is None else shape, x.dtype)

    def empty_beside(self, x: Array, shape: Sequence[int], dtype: np.dtype[Any]) -> Array:
        with x.device:
            return sys.modules["cupy"].empty(shape, dtype)

    def same_stream(self, x: Array) -> Callable[[], AbstractContextManager[Any]]:
        stream = sys.modules["cupy"].cuda.get_current_stream(x.device.id)

        @contextlib.contextmanager
        def enter() -> Iterator[None]:
            with x.device, stream:
                yield

        return enter

    def concatenate(self, parts: Sequence[Array]) -> Array:
        return _joined(sys.modules["cupy"], parts)


class _Jax(_Library):
    def contiguous(self, x: Array) -> Array:
        return np.asarray(x, order="C")

    def allocate(self, x: Array, shape: Sequence[int] | None) -> Array:
        extents = x.shape if shape is None else shape
        if is_on_gpu(x):
            from ferro_dist._native.device_array import DeviceArray

            return DeviceArray(tuple(extents), x.dtype, x.__dlpack_device__()[1])
        return aligned_empty(extents, x.dtype)

    def deliver(self, x: Array, written: Array) -> Array:
        jax = sys.modules["jax"]
        sharding = jax_committed_sharding(x)
        if not isinstance(written, np.ndarray):
            # Whatever stream JAX names, the export makes it wait for the writing.
            device = None if sharding is None else next(iter(x.devices()))
            with jax_full_width():
                return jax.dlpack.from_dlpack(written, device=device)
        with jax_full_width():
            return jax.device_put(written, sharding)

    def concatenate(self, parts: Sequence[Array]) -> Array:
        return _joined(sys.modules["jax"].numpy, parts)


class _Emulated(_Library):
    """Arrays of `ferro_dist.testing.emulated_gpu`."""

    def contiguous(self, x: Array) -> Array:
        return x if x.is_contiguous else x.copy()

    def copy(self, x: Array) -> Array:
        return x.copy()

    def has_gpu(self) -> bool:
        return _EMULATION in sys.modules

    def over(self, memory: Any, shape: Sequence[int], dtype: np.dtype[Any]) -> Array:
        return sys.modules[_EMULATION].array_over(memory, tuple(shape), dtype)

    def allocate(self, x: Array, shape: Sequence[int] | None) -> Array:
        return x.empty(shape)

    def empty_beside(self, x: Array, shape: Sequence[int], dtype: np.dtype[Any]) -> Array:
        with x.memory.gpu.device(x.device):
            return x.memory.gpu.empty(shape, dtype)

    def same_stream(self, x: Array) -> Callable[[], AbstractContextManager[Any]]:
        from ferro_dist._native.emulated_array import current_stream, set_current_stream

        stream = current_stream()

        @contextlib.contextmanager
        def enter() -> Iterator[None]:
            before = current_stream()
            set_current_stream(stream)
            try:
                with x.memory.gpu.device(x.device):
                    yield
            finally:
                set_current_stream(before)

        return enter

    def concatenate(self, parts: Sequence[Array]) -> Array:
        # Row by row: these arrays support nothing else.
        rows = [row for part in parts for row in (part if part.ndim else [part])]
        whole = parts[0].empty((len(rows), *rows[0].shape))
        for number, row in enumerate(rows):
            whole[number] = row
        return whole


class _Buffer(_Library):
    """Anything else that `as_view` can read. Results are NumPy arrays."""

    def contiguous(self, x: Array) -> Array:
        return x if as_view(x).is_contiguous else self.copy(x)

    def copy(self, x: Array) -> Array:
        if as_view(x).device_type != CPU:
            raise InvalidArray(
                f"cannot copy this {type(x).__qualname__}, whose library is not one that "
                "ferro_dist can allocate with (torch, CuPy). Pass a C-contiguous array, and an "
                "`out` that is another."
            )
        return np.array(memoryview(x) if _has_buffer(x) else _from_dlpack(x), order="C")

    def allocate(self, x: Array, shape: Sequence[int] | None) -> Array:
        view = as_view(x)
        if view.device_type != CPU:
            raise InvalidArray(
                f"cannot make a result like this {type(x).__qualname__}: its library is not one "
                "that ferro_dist can allocate with (torch, CuPy). Pass `out`."
            )
        return np.empty(shape_of(x) if shape is None else shape, numpy_dtype(view.dtype))


_NUMPY, _TORCH, _CUPY, _JAX, _BUFFER = _Library(), _Torch(), _CuPy(), _Jax(), _Buffer()
_EMULATED = _Emulated()


_libraries: dict[type, _Library] = {np.ndarray: _NUMPY}


def _library_of(x: Array) -> _Library:
    return _libraries.get(type(x)) or _find_library(type(x))


def _find_library(cls: type) -> _Library:
    library = _library_by_descent(cls)
    if len(_libraries) < 256:  # a program that keeps making types must not fill memory
        _libraries[cls] = library
    return library


def _library_by_descent(cls: type) -> _Library:
    """Tell whose arrays these are by the base classes of their type."""
    if issubclass(cls, (np.ndarray, np.generic)):
        return _NUMPY
    for base in cls.__mro__:
        package = base.__module__.partition(".")[0]
        if (package, base.__name__) == ("torch", "Tensor"):
            return _TORCH
        if (package, base.__name__) == ("cupy", "ndarray"):
            return _CUPY
        if package in ("jax", "jaxlib"):
            return _JAX
        if (package, base.__name__) == ("ferro_dist", "EmulatedArray"):
            return _EMULATED
    return _BUFFER


def _joined(library: Any, parts: Sequence[Array]) -> Array:
    return library.concatenate(parts) if parts[0].ndim else library.stack(parts)


def _has_buffer(x: Array) -> bool:
    try:
        memoryview(x).release()
    except (BufferError, TypeError, ValueError):
        return False
    return True


def _shape_of_buffer(x: Array) -> tuple[int, ...]:
    if _has_buffer(x):
        return memoryview(x).shape or ()
    if as_view(x).device_type == CPU or not hasattr(x, "__cuda_array_interface__"):
        return tuple(_from_dlpack(x).shape)
    return tuple(x.__cuda_array_interface__["shape"])


def _from_dlpack(x: Array) -> np.ndarray[Any, Any]:
    """Return NumPy's view of an array that speaks DLPack alone."""
    view = as_view(x)  # says what is wrong with x, better than NumPy does
    try:
        return np.from_dlpack(x)
    except (BufferError, RuntimeError, TypeError, ValueError) as error:
        raise InvalidArray(
            f"cannot move this {type(x).__module__}.{type(x).__qualname__} of "
            f"{dtype_name(view.dtype)}: its shape, or a contiguous copy, must come from NumPy, "
            "which cannot read it. Pass a contiguous array that has a `shape`, such as torch's."
        ) from error
