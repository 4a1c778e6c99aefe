"""How buckets travel: as they are, as 16-bit floats, or by a user's own reduction."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from ferro_dist.interop import dtype_code, numpy_dtype
from ferro_dist.parallel.bucket import Bucket
from ferro_dist.reduce_op import ReduceOp

if TYPE_CHECKING:
    from ferro_dist.backends.base import Backend

__all__ = ["Compression", "check_compress", "wire_dtype"]

Compression: TypeAlias = "str | Callable[[Bucket, Backend, ReduceOp], object] | None"

_WIRE_DTYPES = {"fp16": "float16", "bf16": "bfloat16"}
_WIDE = ("float32", "float64")


def check_compress(compress: object) -> None:
    """Raise ValueError or TypeError if there is no such compression."""
    if isinstance(compress, type):
        raise TypeError(
            f"compress takes an instance or a function, not the class {compress.__name__}: "
            f"{compress.__name__}()"
        )
    if compress is None or callable(compress):
        return
    if isinstance(compress, str) and compress in _WIRE_DTYPES:
        return
    message = f"compress must be None, 'fp16', 'bf16' or callable, not {compress!r}"
    raise ValueError(message) if isinstance(compress, str) else TypeError(message)


def wire_dtype(compress: Compression, dtype: np.dtype[Any]) -> np.dtype[Any] | None:
    """Return the dtype as which gradients of this dtype travel; None for their own.

    Only real floats that are wider than it are converted.
    """
    if not isinstance(compress, str) or dtype.name not in _WIDE:
        return None
    return numpy_dtype(dtype_code(_WIRE_DTYPES[compress]))
