"""Arrays for the results of collectives: what `_native` is given to allocate and deliver with."""

from __future__ import annotations

import math
from typing import Any

from ferro_dist.errors import SizeMismatch
from ferro_dist.interop import allocate, contiguous, copy, deliver, shape_of

__all__ = [
    "allocate",
    "allocate_chunk",
    "allocate_gathered",
    "allocate_rows",
    "contiguous",
    "copy",
    "deliver",
]


def allocate_gathered(x: Any, world_size: int) -> Any:
    """Make an array for `world_size` arrays like `x`, joined along the first axis."""
    rows, *rest = shape_of(x) or (1,)
    return allocate(x, (rows * world_size, *rest))


def allocate_chunk(x: Any, world_size: int) -> Any:
    """Make an array for one of `world_size` equal chunks of `x` along its first axis.

    Raises
    ------
    SizeMismatch
        The first axis does not divide; pass `out` to cut across it.
    """
    rows, *rest = shape_of(x) or (1,)
    if rows % world_size:
        raise SizeMismatch(
            f"The first axis of x, of length {rows}, cannot be split evenly over "
            f"{world_size} ranks. Pass out to cut across it."
        )
    return allocate(x, (rows // world_size, *rest))


def allocate_rows(x: Any, new_count: int) -> Any:
    """Make an array for `new_count` elements, in rows like those of `x` if they fit, else flat."""
    shape = shape_of(x)
    row = math.prod(shape[1:])
    if len(shape) < 2 or not row or new_count % row:
        return allocate(x, (new_count,))
    return allocate(x, (new_count // row, *shape[1:]))
