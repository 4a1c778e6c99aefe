"""What NumPy says that each collective gives."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import ml_dtypes
import numpy as np
from backends.contract.case import Array, Group
from numpy.testing import assert_array_equal

import ferro_dist as fd
from ferro_dist.reduce_op import ReduceOp

__all__ = [
    "COLLECTIVES",
    "COMPLEX",
    "DTYPES",
    "FLOATS",
    "INTEGERS",
    "LOW_PRECISION",
    "MOVED_ONLY",
    "REDUCING",
    "ROOTED",
    "assert_equal",
    "call",
    "data",
    "dtype_of",
    "expected",
    "has_own_memory",
    "has_reduction",
    "input_shape",
    "inputs",
    "reduced",
    "reduces",
    "shape_of_result",
]

SUM, MEAN, PROD, MIN, MAX = ReduceOp

INTEGERS = ("int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64")
LOW_PRECISION = ("float16", "bfloat16")
FLOATS = (*LOW_PRECISION, "float32", "float64")
COMPLEX = ("complex64", "complex128")
MOVED_ONLY = ("float8_e4m3fn", "float8_e5m2")
DTYPES = (*INTEGERS, *FLOATS, *COMPLEX, *MOVED_ONLY, "bool")

COLLECTIVES = (
    "allreduce",
    "broadcast",
    "reduce",
    "all_gather",
    "reduce_scatter",
    "all_to_all",
    "gather",
    "scatter",
)
REDUCING = ("allreduce", "reduce", "reduce_scatter")
ROOTED = ("broadcast", "reduce", "gather", "scatter")


def dtype_of(name: str) -> np.dtype[Any]:
    return np.dtype(getattr(ml_dtypes, name, None) or name)


def has_reduction(name: str, op: ReduceOp) -> bool:
    if name in INTEGERS:
        return op is not MEAN
    if name in COMPLEX:
        return op in (SUM, MEAN, PROD)
    return name in FLOATS or (name == "bool" and op in (MIN, MAX))


def reduces(group: Group, name: str, op: ReduceOp) -> bool | None:
    """Whether a group has this reduction; None where it has one that is no part of the contract."""
    own: Callable[[str, ReduceOp], bool | None] | None = getattr(group, "reduces", None)
    return has_reduction(name, op) if own is None else own(name, op)


def has_own_memory(group: Group) -> bool:
    """Whether the arrays of `fd.empty` lie elsewhere than NumPy's."""
    own: bool = getattr(group, "has_own_memory", group.name not in ("tcp", "mpi"))
    return own


def assert_equal(ours: Array, theirs: Array) -> None:
    """Do as assert_array_equal, which takes three times as long over arrays that are equal."""
    if not np.array_equal(ours, theirs):
        assert_array_equal(ours, theirs)


def data(rank: int, shape: Sequence[int], name: str) -> Array:
    """Small numbers: every sum and product of four of them is exact in every dtype."""
    values: Array = (np.arange(3) + rank) % 3 + (0 if name == "bool" else 1)
    if name in COMPLEX:
        values = values + 1j * ((values + rank) % 2)
    # Repeated, not computed anew: ranks make millions of these.
    count = math.prod(shape)
    rows = np.repeat(values.astype(dtype_of(name))[np.newaxis], -(-count // 3), axis=0)
    return rows.ravel()[:count].reshape(shape)


def input_shape(op: str, shape: Sequence[int], world_size: int) -> tuple[int, ...]:
    """Return the shape of an input whose chunks, where it has some, have this shape."""
    if op not in ("reduce_scatter", "all_to_all", "scatter"):
        return tuple(shape)
    first, *others = shape or (1,)
    return (first * world_size, *others)


def inputs(op: str, group: Group, shape: Sequence[int], name: str) -> list[Array]:
    """Return the inputs of all ranks."""
    whole = input_shape(op, shape, group.world_size)
    return [data(rank, whole, name) for rank in range(group.world_size)]


def reduced(arrays: Sequence[Array], op: ReduceOp) -> Array:
    """Reduce as NumPy does: sums of 16-bit floats in float32; integers wrap around."""
    dtype = arrays[0].dtype
    stacked = np.stack(arrays)
    if dtype.name in LOW_PRECISION:
        stacked = stacked.astype(np.float32)
    if op is MEAN:
        total = stacked.sum(axis=0, dtype=stacked.dtype)
        return (total / np.array(len(arrays), stacked.dtype)).astype(dtype)
    if op in (SUM, PROD):
        ufunc: Any = np.add if op is SUM else np.multiply
        return ufunc.reduce(stacked, axis=0, dtype=stacked.dtype).astype(dtype)
    return (np.minimum if op is MIN else np.maximum).reduce(stacked, axis=0).astype(dtype)


def _chunk(array: Array, rank: int, world_size: int) -> Array:
    rows = len(array) // world_size
    return array[rank * rows : (rank + 1) * rows]


def expected(
    op: str, arrays: Sequence[Array], rank: int, *, reduce_op: ReduceOp = SUM, root: int = 0
) -> Array:
    """Return what `rank` must get where all ranks give `arrays`; None if nothing."""
    size = len(arrays)
    if rank != root and op in ("reduce", "gather"):
        return None
    if op in ("allreduce", "reduce"):
        return reduced(arrays, reduce_op)
    if op == "broadcast":
        return arrays[root]
    if op in ("all_gather", "gather"):
        return np.concatenate([np.atleast_1d(array) for array in arrays])
    if op == "reduce_scatter":
        return _chunk(reduced(arrays, reduce_op), rank, size)
    if op == "all_to_all":
        return np.concatenate([_chunk(array, rank, size) for array in arrays])
    return _chunk(arrays[root], rank, size)


def shape_of_result(op: str, x_shape: Sequence[int], world_size: int) -> tuple[int, ...]:
    first, *others = x_shape or (1,)
    if op in ("all_gather", "gather"):
        return (first * world_size, *others)
    if op in ("reduce_scatter", "scatter"):
        return (first // world_size, *others)
    return tuple(x_shape)


def call(
    op: str,
    group: Group,
    x: Array,
    *,
    reduce_op: ReduceOp | str = SUM,
    root: int = 0,
    out: Array = None,
    **options: Any,
) -> Any:
    """Call the collective of this name. Away from the root of a scatter, x tells the shape."""
    function = getattr(fd, op)
    if op == "scatter" and group.rank != root:
        if out is None:
            out = np.empty(shape_of_result(op, x.shape, group.world_size), x.dtype)
        x = None
    if op == "reduce":
        return fd.reduce(x, group, reduce_op, root, out=out, **options)
    if op in REDUCING:
        return function(x, group, reduce_op, out=out, **options)
    if op in ROOTED:
        return function(x, group, root, out=out, **options)
    return function(x, group, out=out, **options)
