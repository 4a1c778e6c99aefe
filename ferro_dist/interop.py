"""Arrays of any library, in and out, without importing the library.

Reading is `as_view`; where a result must be made, `allocate` makes the memory to write
into and `deliver` turns what was written into an array of the input's library:

=====================  ============================  ===================================
input                  `allocate` gives              `deliver` gives
=====================  ============================  ===================================
NumPy                  NumPy                         the same array
torch, CuPy            the same library and device   the same array
JAX                    NumPy, on the host            JAX, over the same memory if it can
any other              NumPy                         the same array
=====================  ============================  ===================================

Arrays of NumPy's subclasses (``memmap``, ``matrix``) are read as the arrays that they
are below; results are plain arrays. A masked array is refused: its mask would be lost.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np

from ferro_dist._native.buffer_view import BufferView, as_output, as_view
from ferro_dist.dtypes import DTYPE_NAMES
from ferro_dist.errors import InvalidArray

__all__ = [
    "BufferView",
    "allocate",
    "as_output",
    "as_view",
    "contiguous",
    "deliver",
    "dtype_code",
    "dtype_name",
    "numpy_dtype",
    "shape_of",
]

Array = Any

_CODES = {name: code for code, name in enumerate(DTYPE_NAMES)}

# What XLA demands of memory that it takes over without a copy.
_JAX_ALIGNMENT = 64


def contiguous(x: Array) -> Array:
    """Return `x` if it is C-contiguous, else a C-contiguous copy of the same library.

    A torch tensor that requires grad is detached: the copy is for reading.
    """
    return _library_of(x).contiguous(x)


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
        `x` lives on a device and its library is none that this module knows.
    """
    return _library_of(x).allocate(x, shape)


def deliver(x: Array, written: Array) -> Array:
    """Turn what `allocate` made for `x`, now written, into an array of the library of `x`.

    `written` must not be touched afterwards: the result may share its memory.
    """
    return _library_of(x).deliver(x, written)


def shape_of(x: Array) -> tuple[int, ...]:
    """Return the shape of an array, or of anything with the buffer protocol."""
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
    except TypeError:
        resolved = None
    if resolved is None or not resolved.isnative or resolved.name not in _CODES:
        raise InvalidArray(f"there is no dtype {dtype!r} here, but {', '.join(DTYPE_NAMES)}")
    return _CODES[resolved.name]


# Libraries


class _Library:
    """NumPy arrays, and what all other libraries do alike."""

    def contiguous(self, x: Array) -> Array:
        return x if x.flags.c_contiguous else np.array(x, order="C")

    def allocate(self, x: Array, shape: Sequence[int] | None) -> Array:
        return np.empty(x.shape if shape is None else shape, x.dtype)

    def deliver(self, x: Array, written: Array) -> Array:
        return written


class _Torch(_Library):
    def contiguous(self, x: Array) -> Array:
        return x.detach().contiguous()

    def allocate(self, x: Array, shape: Sequence[int] | None) -> Array:
        torch = sys.modules["torch"]
        if shape is None:  # half the time of the general way
            return torch.empty_like(x, memory_format=torch.contiguous_format)
        return torch.empty(shape, dtype=x.dtype, device=x.device)


class _CuPy(_Library):
    def contiguous(self, x: Array) -> Array:
        with x.device:
            return x if x.flags.c_contiguous else x.copy(order="C")

    def allocate(self, x: Array, shape: Sequence[int] | None) -> Array:
        cupy = sys.modules["cupy"]
        with x.device:
            return cupy.empty(x.shape if shape is None else shape, x.dtype)


class _Jax(_Library):
    def contiguous(self, x: Array) -> Array:
        return np.asarray(x, order="C")

    def allocate(self, x: Array, shape: Sequence[int] | None) -> Array:
        return _empty_aligned(x.shape if shape is None else shape, x.dtype)

    def deliver(self, x: Array, written: Array) -> Array:
        jax = sys.modules["jax"]
        # An array that the user has put on a device stays there; others follow the default.
        device = next(iter(x.devices())) if _is_committed(x) else None
        return jax.device_put(written, device)


class _Buffer(_Library):
    """Anything else that `as_view` can read. Results are NumPy arrays."""

    def contiguous(self, x: Array) -> Array:
        if as_view(x).is_contiguous:
            return x
        return np.array(memoryview(x) if _has_buffer(x) else np.from_dlpack(x), order="C")

    def allocate(self, x: Array, shape: Sequence[int] | None) -> Array:
        view = as_view(x)
        if view.device_type != 1:
            raise InvalidArray(
                f"cannot make a result like this {type(x).__qualname__}: its library is not one "
                "that ferro_dist can allocate with (torch, CuPy). Pass `out`."
            )
        return np.empty(shape_of(x) if shape is None else shape, numpy_dtype(view.dtype))


_NUMPY, _TORCH, _CUPY, _JAX, _BUFFER = _Library(), _Torch(), _CuPy(), _Jax(), _Buffer()


_libraries: dict[type, _Library] = {np.ndarray: _NUMPY}


def _library_of(x: Array) -> _Library:
    return _libraries.get(type(x)) or _find_library(type(x))


def _find_library(cls: type) -> _Library:
    library = _library_by_descent(cls)
    if len(_libraries) < 256:  # a program that makes types without end must not fill memory
        _libraries[cls] = library
    return library


def _library_by_descent(cls: type) -> _Library:
    """Tell whose arrays these are by the classes that theirs descends from."""
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
    return _BUFFER


def _has_buffer(x: Array) -> bool:
    try:
        memoryview(x).release()
    except (BufferError, TypeError, ValueError):
        return False
    return True


def _shape_of_buffer(x: Array) -> tuple[int, ...]:
    try:
        return memoryview(x).shape or ()
    except TypeError:
        as_view(x)  # says what is wrong with x, better than Python does
        raise


def _is_committed(x: Array) -> bool:
    return bool(getattr(x, "committed", getattr(x, "_committed", False)))


def _empty_aligned(shape: Sequence[int], dtype: np.dtype[Any]) -> np.ndarray[Any, Any]:
    nbytes = math.prod(shape) * dtype.itemsize
    block = np.empty(nbytes + _JAX_ALIGNMENT, np.uint8)
    start = -block.ctypes.data % _JAX_ALIGNMENT
    return block[start : start + nbytes].view(dtype).reshape(shape)
