"""How the gradients of the ranks are combined: mean, sum, or mean of the contributors."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from ferro_dist.parallel.bucket import COUNTABLE, Bucket, real_parts
from ferro_dist.reduce_op import ReduceOp

__all__ = ["REDUCE_OPS", "Averaging"]

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
    def num_counters(self) -> int:
        """Lanes of each gradient, so many that none has to count further than it can."""
        if self.name != "contributors":
            return 1
        return -(-self.world_size // COUNTABLE)

    def counter(self, rank: int) -> int:
        """Return which of a gradient's lanes this rank writes to."""
        return rank // COUNTABLE if self.name == "contributors" else 0

    @property
    def is_idempotent(self) -> bool:
        """Whether a gradient that is equal on all ranks stays the same."""
        return self.name == "mean"

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


def _divide(arrays: Iterable[Any], count: int) -> None:
    for array in arrays:
        array /= count
