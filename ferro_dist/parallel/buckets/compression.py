"""How buckets travel: as they are, as 16-bit floats, or by a user's own reduction."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from ferro_dist.collective import allreduce
from ferro_dist.interop import dtype_code, numpy_dtype
from ferro_dist.parallel.buckets.bucket import Bucket
from ferro_dist.parallel.buckets.power_sgd import PowerSGD
from ferro_dist.reduce_op import ReduceOp
from ferro_dist.work import Work

if TYPE_CHECKING:
    from ferro_dist.backends.base import Backend

__all__ = ["Compression", "UserReduction", "check_compress", "name_of", "reduce_by", "wire_dtype"]

UserReduction: TypeAlias = "Callable[[Bucket, Backend, ReduceOp], object]"
Compression: TypeAlias = "str | UserReduction | None"

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


def name_of(compress: Compression) -> str:
    """Name what is equal on all ranks: a function's name, not where it lies in memory."""
    if isinstance(compress, PowerSGD) or not callable(compress):
        return repr(compress)
    return getattr(compress, "__qualname__", type(compress).__qualname__)


def reduce_by(
    reduction: UserReduction, bucket: Bucket, backend: Backend, op: ReduceOp, tag: int
) -> None:
    """Let a user's own reduction reduce a bucket, and wait for it.

    Raises
    ------
    TypeError
        It returned an array outside of the bucket.
    """
    # The lanes must arrive as they are, whatever is done to the gradients.
    lanes = bucket.buffer[bucket.layout.lanes_offset :]
    allreduce(lanes, backend, op, out=lanes, tag=tag)
    result = reduction(bucket, backend, op)
    for each in result if isinstance(result, (list, tuple)) else [result]:
        if isinstance(each, Work):
            each.wait()
        elif each is not None and not bucket.contains(each):
            raise TypeError(
                "DDP: compress must reduce the gradients in place, in bucket.gradients or "
                f"bucket.views. It returned {type(each).__name__}, which is not of the bucket."
            )
