"""Arguments of calls in an MPI group, checked before anything is sent."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from ferro_dist import arguments
from ferro_dist.backends.base import Array
from ferro_dist.backends.mpi_memory import Source, Target, overlap
from ferro_dist.backends.mpi_reduction import Reduction, reduction_of
from ferro_dist.backends.results import allocate_chunk, allocate_gathered
from ferro_dist.errors import UnsupportedOp
from ferro_dist.interop import (
    CPU,
    BufferView,
    allocate,
    as_output,
    as_view,
    contiguous,
    dtype_name,
)
from ferro_dist.reduce_op import ReduceOp

__all__ = ["Operands"]


class Operands:
    """Makes the operands of one rank's calls from what its caller gave.

    Each method names the public call in its errors.
    """

    def __init__(self, mpi: Any, rank: int, world_size: int) -> None:
        self._mpi = mpi
        self._rank = rank
        self._world_size = world_size

    def root(self, op: str, root: int) -> int:
        return arguments.check_root(op, root, rank=self._rank, world_size=self._world_size)

    def chunk(self, op: str, count: int) -> int:
        """Return the size of one rank's part of `x`, which has `count` elements."""
        return arguments.per_rank_count(
            op, "x", count, rank=self._rank, world_size=self._world_size
        )

    def source(self, op: str, x: Array) -> Source:
        view = as_view(x)
        self._check_device(op, view)
        return Source(view if view.is_contiguous else as_view(contiguous(x)))

    def output_view(self, op: str, out: Array) -> BufferView:
        view = as_output(out)
        self._check_device(op, view)
        return view

    def target(
        self,
        op: str,
        x: Array,
        source: Source,
        out: Array | None,
        count: int,
        make: Callable[[], Array] | None = None,
        *,
        in_place: int | None = 0,
    ) -> Target:
        """Check `out`, or make room for the result (by default an array like `x`).

        `in_place` is the offset in bytes from the start of `x` at which an `out` that shares its
        memory must begin; None if it may not share it.
        """
        if out is None:
            made = allocate(x) if make is None else make()
            return Target(made, as_output(made), x)
        view = self.output_view(op, out)
        dtypes = dtype_name(source.view.dtype), dtype_name(view.dtype)
        arguments.check_out_dtype(op, *dtypes, rank=self._rank)
        arguments.check_size(op, "out", view.count, count, rank=self._rank)
        is_in_place = in_place is not None and view.address == source.view.address + in_place
        if not is_in_place and overlap(source.view, view):
            arguments.raise_overlap(op, rank=self._rank)
        return Target(out, view, None)

    def gathering_target(self, op: str, x: Array, source: Source, out: Array | None) -> Target:
        count = source.view.count * self._world_size
        own = -self._rank * source.view.nbytes
        make = partial(allocate_gathered, x, self._world_size)
        return self.target(op, x, source, out, count, make, in_place=own)

    def scatter_operands(
        self, x: Array | None, out: Array | None, root: int
    ) -> tuple[Source | None, Target]:
        if self._rank != root:
            if out is None:
                why = "only the root knows the shape of a chunk"
                arguments.raise_missing_array("scatter", "out", why, rank=self._rank)
            return None, Target(out, self.output_view("scatter", out), None)
        if x is None:
            why = f"rank {root} is the root, whose array is scattered"
            arguments.raise_missing_array("scatter", "x", why, rank=self._rank)
        source = self.source("scatter", x)
        chunk = self.chunk("scatter", source.view.count)
        own = self._rank * chunk * source.view.itemsize
        make = partial(allocate_chunk, x, self._world_size)
        return source, self.target("scatter", x, source, out, chunk, make, in_place=own)

    def reduction(self, op: str, source: Source, reduce_op: ReduceOp) -> Reduction:
        name = dtype_name(source.view.dtype)
        arguments.check_reduction(op, name, reduce_op, rank=self._rank)
        return reduction_of(self._mpi, name, reduce_op)

    def _check_device(self, op: str, view: BufferView) -> None:
        if view.device_type != CPU:
            raise UnsupportedOp(
                f"{op}: the mpi backend moves arrays in host memory, and this one is on "
                f"GPU {view.device_id}. Copy it to the host first.",
                op=op,
                rank=self._rank,
            )
