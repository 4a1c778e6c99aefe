"""How the gradients of the ranks are combined: mean, sum, or mean of the contributors."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from ferro_dist.errors import InvalidArray
from ferro_dist.parallel.buckets.bucket import Bucket, real_parts
from ferro_dist.reduce_op import ReduceOp

__all__ = ["REDUCE_OPS", "Averaging", "check_averageable"]

GRADIENT_DTYPES = ("float16", "bfloat16", "float32", "float64", "complex64", "complex128")

REDUCE_OPS = {"mean": ReduceOp.MEAN, "sum": ReduceOp.SUM}
"""Averages that are a single reduction. The mean's division is part of it."""


@dataclass(frozen=True)
class Averaging:
    """One of the three, in terms of reductions of buckets.

    Parameters
    ----------
    name : {"mean", "sum", "contributors"}
        ``"contributors"`` divides each gradient by the number of ranks that had one.
    world_size : int

    Raises
    ------
    ValueError
        There is no such average.
    """

    name: str
    world_size: int

    def __post_init__(self) -> None:
        if self.name not in ("mean", "sum", "contributors"):
            raise ValueError(
                f"DDP: average must be 'mean', 'sum' or 'contributors', not {self.name!r}"
            )

    @property
    def reduce_op(self) -> ReduceOp:
        """The reduction of buckets."""
        return REDUCE_OPS.get(self.name, ReduceOp.SUM)

    @property
    def is_idempotent(self) -> bool:
        """Whether a gradient that is equal on all ranks stays the same."""
        return self.name == "mean"

    def check_countable(self, name: str, dtype: np.dtype[Any]) -> None:
        """Raise ValueError if a gradient travels as a dtype that cannot count all ranks."""
        if self.name != "contributors":
            return
        limit = 1
        while complex(dtype.type(limit + 1)) == limit + 1:
            limit *= 2
        if self.world_size > limit:
            raise ValueError(
                f"DDP: the gradient of {name!r} travels as {dtype.name}, where "
                f"average='contributors' counts up to {limit} ranks, not {self.world_size}. Use "
                "average='mean' or 'sum', or let it travel as a wider dtype."
            )

    def complete(self, bucket: Bucket) -> None:
        """Divide what has been summed by the number of contributors."""
        if self.name != "contributors":
            return
        counts, dtype = bucket.contributors(), bucket.layout.dtype
        if len(set(counts)) == 1 and counts[0]:
            _divide(real_parts(bucket.gradients, dtype), counts[0])
            return
        for gradient, count in zip(bucket.views, counts, strict=True):
            if count > 1:
                _divide(real_parts(gradient, dtype), count)


def check_averageable(what: str, dtype: np.dtype[Any], remedy: str = "", op: str = "DDP") -> None:
    """Raise InvalidArray, on behalf of `op`, unless gradients of this dtype are averaged.

    `what` names whose they are: ``"parameter 'weight'"``.
    """
    if dtype.name not in GRADIENT_DTYPES:
        raise InvalidArray(
            f"{op}: {what} is {dtype}; gradients are averaged in {', '.join(GRADIENT_DTYPES)}."
            f"{remedy}",
            op=op,
        )


def _divide(arrays: Iterable[Any], count: int) -> None:
    for array in arrays:
        array /= count
