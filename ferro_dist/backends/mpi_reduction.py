"""How MPI reduces each dtype so that all ranks end with the same bits.

MPI requires identical results on all ranks for its own operations, and implementations comply where
a ∘ b and b ∘ a have the same bits. That leaves four cases to take care of:

- float16 and bfloat16, which MPI does not know: widened to float32, reduced, rounded once.
- MIN and MAX of floats: MPI compares with ``<``, so that the results for NaN and signed
  zeros depend on the order of the operands. Done by NumPy, in rank order.
- PROD of complex numbers: the two products of the imaginary part may be fused with the
  sum in one order only. Done by NumPy, in rank order.
- SUM of integers of 8 and 16 bits: MPI leaves open what an overflow gives, and Open MPI
  saturates, but only in the part of an array that it vectorizes. Done by NumPy, which wraps around.

The sign and the payload of a NaN that a SUM or PROD of NaNs gives are not specified.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np

from ferro_dist.reduce_op import ReduceOp

__all__ = ["Reduction", "reduction_of"]

Array = np.ndarray[Any, Any]

_NARROW_FLOATS = frozenset({"float16", "bfloat16"})
_NARROW_INTEGERS = frozenset({"int8", "uint8", "int16", "uint16"})
_UFUNCS = {
    ReduceOp.SUM: np.add,
    ReduceOp.PROD: np.multiply,
    ReduceOp.MIN: np.minimum,
    ReduceOp.MAX: np.maximum,
}

# MPI has few slots for user-defined operations, so they are made once per process.
_ordered_ops: dict[tuple[ReduceOp, str], Any] = {}


@dataclasses.dataclass(frozen=True)
class Reduction:
    """One reduction of one dtype, ready to be handed to MPI.

    Attributes
    ----------
    mpi_op : MPI.Op
    mpi_type : MPI.Datatype
        Of `working_dtype`.
    working_dtype : dtype
        The dtype that MPI adds up; wider than the array's if MPI lacks that.
    is_mean : bool
        Whether the sum is to be divided by the number of ranks.
    """

    mpi_op: Any
    mpi_type: Any
    working_dtype: np.dtype[Any]
    is_mean: bool

    def is_direct(self, dtype: np.dtype[Any]) -> bool:
        """Whether MPI can work on arrays of this dtype as they are."""
        return self.working_dtype == dtype

    def finish(self, total: Array, world_size: int, result: Array) -> None:
        """Turn what MPI left in `total` into the `result`, which may be the same array."""
        # Infinity and NaN are results like any other: warnings, which the user may have turned into
        # errors, are for computations of his own.
        with np.errstate(all="ignore"):
            if self.is_mean:
                # Part by part: NumPy's quotient of complex numbers is rounded twice, and where one
                # part is infinite it makes the other a NaN.
                parts = total.view(total.real.dtype)
                np.divide(parts, world_size, out=parts)
            if total is not result:
                result[:] = total


def reduction_of(mpi: Any, name: str, reduce_op: ReduceOp) -> Reduction:
    """Find how MPI does this; the dtype `name` supports the reduction."""
    working = "float32" if name in _NARROW_FLOATS else name
    return Reduction(
        mpi_op=_operation(mpi, working, reduce_op),
        mpi_type=_datatype(mpi, working),
        working_dtype=np.dtype(working),
        is_mean=reduce_op is ReduceOp.MEAN,
    )


def _operation(mpi: Any, working: str, reduce_op: ReduceOp) -> Any:
    if working == "bool":
        return mpi.LAND if reduce_op is ReduceOp.MIN else mpi.LOR
    if reduce_op in (ReduceOp.SUM, ReduceOp.MEAN):
        return _ordered_op(mpi, working, reduce_op) if working in _NARROW_INTEGERS else mpi.SUM
    is_float, is_complex = working.startswith("float"), working.startswith("complex")
    if is_complex or (is_float and reduce_op is not ReduceOp.PROD):
        return _ordered_op(mpi, working, reduce_op)
    return {ReduceOp.PROD: mpi.PROD, ReduceOp.MIN: mpi.MIN, ReduceOp.MAX: mpi.MAX}[reduce_op]


def _datatype(mpi: Any, working: str) -> Any:
    named = {
        "bool": mpi.C_BOOL,
        "float32": mpi.FLOAT,
        "float64": mpi.DOUBLE,
        "complex64": mpi.C_FLOAT_COMPLEX,
        "complex128": mpi.C_DOUBLE_COMPLEX,
    }
    return named.get(working) or getattr(mpi, f"{working.upper()}_T")


def _ordered_op(mpi: Any, working: str, reduce_op: ReduceOp) -> Any:
    """Make an operation that MPI applies in rank order and therefore alike on all ranks."""
    key = reduce_op, working
    if key not in _ordered_ops:
        function = _in_place(_UFUNCS[reduce_op], np.dtype(working))
        _ordered_ops[key] = mpi.Op.Create(function, commute=False)
    return _ordered_ops[key]


def _in_place(ufunc: np.ufunc, dtype: np.dtype[Any]) -> Callable[[Any, Any, Any], None]:
    def apply(lower: Any, higher: Any, datatype: Any) -> None:
        # MPI leaves the result of (lower ranks) ∘ (higher ranks) in the second buffer.
        first, second = np.frombuffer(lower, dtype), np.frombuffer(higher, dtype)
        with np.errstate(all="ignore"):
            ufunc(first, second, out=second)

    return apply
