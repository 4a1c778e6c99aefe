"""Memory of arrays as MPI reads and writes it, of any size.

MPI before version 4 counts in 32 bits. Reductions of more elements go in pieces; moved
bytes go as one element of a datatype that is as large as the whole block.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from ferro_dist.backends.base import Array
from ferro_dist.backends.mpi_library import load_mpi
from ferro_dist.interop import BufferView, as_view, deliver, numpy_dtype

__all__ = [
    "Numbers",
    "Source",
    "Target",
    "block_of",
    "chunks_of",
    "is_same_memory",
    "overlap",
    "piece_length",
    "pieces",
]

MAX_COUNT = 2**31 - 1
"""The largest count that every MPI library takes."""

_UNIT_NBYTES = 1 << 20

Numbers = np.ndarray[Any, Any]


class Source:
    """Contiguous memory that is read."""

    def __init__(self, view: BufferView) -> None:
        self.view = view
        self.octets = _octets_of(view)

    @property
    def numbers(self) -> Numbers:
        return self.octets.view(numpy_dtype(self.view.dtype))

    def apart_from(self, target: Target) -> Numbers:
        """Return the bytes, copied if MPI would write them while it reads."""
        return self.octets.copy() if overlap(self.view, target.view) else self.octets


class Target:
    """Contiguous memory that is written, and the array that the caller gets for it."""

    def __init__(self, array: Array, view: BufferView, model: Array | None) -> None:
        self.view = view
        self.octets = _octets_of(view)
        self.is_wanted = True
        self._array = array
        self._model = model

    @classmethod
    def scratch(cls, source: Source) -> Target:
        """Make room for what a reduction needs on ranks that get no result."""
        array = np.empty(source.view.count, numpy_dtype(source.view.dtype))
        target = cls(array, as_view(array), None)
        target.is_wanted = False
        return target

    @property
    def numbers(self) -> Numbers:
        return self.octets.view(numpy_dtype(self.view.dtype))

    def result(self) -> Array | None:
        """Return the caller's `out`, or a new array of the library of the input."""
        if not self.is_wanted:
            return None
        return self._array if self._model is None else deliver(self._model, self._array)


def _octets_of(view: BufferView) -> Numbers:
    if view.nbytes == 0:
        return np.empty(0, np.uint8)
    memory = load_mpi().memory.fromaddress(view.address, view.nbytes, view.is_readonly)
    return np.frombuffer(memory, np.uint8)


def is_same_memory(a: BufferView, b: BufferView) -> bool:
    """Whether both describe the same bytes."""
    return a.address == b.address and a.nbytes == b.nbytes


def overlap(a: BufferView, b: BufferView) -> bool:
    """Whether any byte belongs to both."""
    begin, end = max(a.address, b.address), min(a.address + a.nbytes, b.address + b.nbytes)
    return begin < end


def pieces(array: Numbers) -> Iterator[Numbers]:
    """Cut an array into pieces that MPI can count; an empty one is one empty piece."""
    # Every rank must make the call, even if there is nothing to move.
    for first in range(0, max(1, array.size), MAX_COUNT):
        yield array[first : first + MAX_COUNT]


def piece_length(world_size: int) -> int:
    """Return how many elements of each rank's chunk one call may reduce.

    Counted over all ranks: implementations add the chunks' counts up in an int.
    """
    return max(1, MAX_COUNT // world_size)


@contextlib.contextmanager
def block_of(nbytes: int) -> Iterator[tuple[int, Any]]:
    """Yield count and datatype that describe one rank's `nbytes`."""
    if nbytes <= MAX_COUNT:
        yield nbytes, load_mpi().BYTE
        return
    block = _block_type(0, nbytes)
    try:
        yield 1, block
    finally:
        block.Free()


@contextlib.contextmanager
def chunks_of(
    counts: Sequence[int], itemsize: int
) -> Iterator[tuple[list[int], list[int], list[Any]]]:
    """Yield counts, displacements and datatypes of chunks packed in rank order."""
    ends = np.cumsum(counts, dtype=np.int64) * itemsize
    sizes = [count * itemsize for count in counts]
    starts = [int(end) - size for end, size in zip(ends, sizes, strict=True)]
    if not sizes or max(ends) <= MAX_COUNT:
        yield sizes, starts, [load_mpi().BYTE] * len(sizes)
        return
    # Displacements are ints too: each type carries its own.
    types = [_block_type(start, size) for start, size in zip(starts, sizes, strict=True)]
    try:
        yield [1] * len(sizes), [0] * len(sizes), types
    finally:
        for block in types:
            block.Free()


def _block_type(start: int, nbytes: int) -> Any:
    units, rest = divmod(nbytes, _UNIT_NBYTES)
    unit = load_mpi().BYTE.Create_contiguous(_UNIT_NBYTES)
    block = load_mpi().Datatype.Create_struct(
        [units, rest], [start, start + units * _UNIT_NBYTES], [unit, load_mpi().BYTE]
    )
    unit.Free()
    return block.Commit()
