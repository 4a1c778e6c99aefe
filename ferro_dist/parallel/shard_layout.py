"""Which rank owns which elements of a set of parameters, and where they lie in one array.

The array has one row for each rank, all of the same length, so that reduce_scatter gives each rank
its own row and all_gather gives all ranks all rows:

    row of rank r:  | fragment | fragment | ... | one lane per fragment | padding |

A fragment is a range of one parameter's elements. Lane *i* says, as in a bucket of `DDP`,
whether a rank had a gradient for fragment *i*; reduced, whether any rank had.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

__all__ = ["Fragment", "ShardLayout"]

_ROW_ALIGNMENT = 16
"""Elements: rows start on a cache line in dtypes of 32 bits and more."""


class Fragment(NamedTuple):
    """Elements of one parameter that one rank owns."""

    parameter: int
    start: int
    stop: int
    offset: int
    """Where in the rank's row the first of them lies."""

    @property
    def size(self) -> int:
        """Number of elements."""
        return self.stop - self.start

    @property
    def place(self) -> slice:
        """Where in the row the fragment lies."""
        return slice(self.offset, self.offset + self.size)


class ShardLayout:
    """A division of parameters among ranks.

    Parameters
    ----------
    counts : sequence of int
        Elements of each parameter.
    world_size : int
    divides_parameters : bool
        Whether a parameter may be divided between ranks: then all own the same number of elements.
        Otherwise each parameter, the largest first, goes to the rank that has the fewest elements
        so far.

    Attributes
    ----------
    fragments : tuple of tuple of Fragment
        Those of each rank.
    lanes_offset : int
        First of the lanes in a row.
    row_count : int
        Elements in a row.
    """

    def __init__(self, counts: Sequence[int], world_size: int, divides_parameters: bool) -> None:
        divide = _cut_evenly if divides_parameters else _deal_out
        self.fragments = tuple(tuple(owned) for owned in divide(counts, world_size))
        ends = [owned[-1].place.stop for owned in self.fragments if owned]
        self.lanes_offset = max(ends, default=0)
        num_lanes = max(map(len, self.fragments))
        self.row_count = _rounded_up(self.lanes_offset + num_lanes, _ROW_ALIGNMENT)


def _cut_evenly(counts: Sequence[int], world_size: int) -> list[list[Fragment]]:
    share = -(-sum(counts) // world_size)
    owned: list[list[Fragment]] = [[] for _ in range(world_size)]
    position = 0  # in all parameters, one after the other
    for parameter, count in enumerate(counts):
        start = 0
        while start < count:
            rank, offset = divmod(position, share)
            stop = min(count, start + share - offset)
            owned[rank].append(Fragment(parameter, start, stop, offset))
            position += stop - start
            start = stop
    return owned


def _deal_out(counts: Sequence[int], world_size: int) -> list[list[Fragment]]:
    owned: list[list[Fragment]] = [[] for _ in range(world_size)]
    ends = [0] * world_size
    for parameter in sorted(range(len(counts)), key=lambda each: (-counts[each], each)):
        count = counts[parameter]
        if count:
            rank = ends.index(min(ends))
            owned[rank].append(Fragment(parameter, 0, count, ends[rank]))
            ends[rank] += count
    return owned


def _rounded_up(count: int, multiple: int) -> int:
    return -(-count // multiple) * multiple
