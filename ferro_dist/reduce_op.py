"""The reductions that a collective can apply."""

from __future__ import annotations

import enum

from ferro_dist.errors import UnsupportedOp

__all__ = ["ReduceOp"]


class ReduceOp(enum.IntEnum):
    """How elements of different ranks become one.

    Functions accept a member or its name in lower case: ``"sum"``.

    The values are those of ``ferro::ReduceOp`` in ``csrc/ferro/types.hpp``.
    """

    SUM = 0
    MEAN = 1
    PROD = 2
    MIN = 3
    MAX = 4

    @classmethod
    def of(cls, op: ReduceOp | str) -> ReduceOp:
        """Return the member that `op` is or names."""
        if isinstance(op, cls):
            return op
        member = cls.__members__.get(op.upper()) if isinstance(op, str) else None
        if member is None:
            names = ", ".join(repr(name.lower()) for name in cls.__members__)
            raise UnsupportedOp(f"There is no reduction {op!r}, but {names}.")
        return member
