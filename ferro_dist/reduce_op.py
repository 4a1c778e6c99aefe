"""The reductions that a collective can apply."""

from __future__ import annotations

import enum

__all__ = ["ReduceOp"]


class ReduceOp(enum.IntEnum):
    """How elements of different ranks become one.

    Functions accept a member or its name in lower case: ``"sum"``. Sums and products of integers
    wrap around. MIN and MAX are NaN if any element is, as in NumPy; on GPUs that is up to NCCL.

    The values are those of ``ferro::ReduceOp`` in ``csrc/ferro/types.hpp``.
    """

    SUM = 0
    MEAN = 1
    PROD = 2
    MIN = 3
    MAX = 4
