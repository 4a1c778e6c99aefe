"""Every element of every parameter has one owner, and one place in the owner's row."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ferro_dist.parallel.shard_layout import ShardLayout

COUNTS = st.lists(st.integers(0, 40), min_size=1, max_size=12)
WORLD_SIZES = st.integers(1, 6)


@given(COUNTS, WORLD_SIZES, st.booleans())
def test_every_element_has_one_owner(counts: list[int], world_size: int, divides: bool) -> None:
    layout = ShardLayout(counts, world_size, divides)
    owned = [
        (fragment.parameter, element)
        for fragments in layout.fragments
        for fragment in fragments
        for element in range(fragment.start, fragment.stop)
    ]
    assert sorted(owned) == [(p, e) for p, count in enumerate(counts) for e in range(count)]


@given(COUNTS, WORLD_SIZES, st.booleans())
def test_fragments_and_lanes_do_not_overlap(
    counts: list[int], world_size: int, divides: bool
) -> None:
    layout = ShardLayout(counts, world_size, divides)
    for fragments in layout.fragments:
        end = 0
        for fragment in fragments:
            assert fragment.offset == end
            end = fragment.place.stop
        assert end <= layout.lanes_offset
        assert layout.lanes_offset + len(fragments) <= layout.row_count


@given(COUNTS, WORLD_SIZES)
def test_cut_parameters_are_owned_in_equal_shares(counts: list[int], world_size: int) -> None:
    layout = ShardLayout(counts, world_size, divides_parameters=True)
    share = -(-sum(counts) // world_size)
    for rank, fragments in enumerate(layout.fragments):
        left = max(0, sum(counts) - rank * share)
        assert sum(fragment.size for fragment in fragments) == min(share, left)


@given(COUNTS, WORLD_SIZES)
def test_whole_parameters_are_not_cut(counts: list[int], world_size: int) -> None:
    layout = ShardLayout(counts, world_size, divides_parameters=False)
    for fragments in layout.fragments:
        for fragment in fragments:
            assert (fragment.start, fragment.stop) == (0, counts[fragment.parameter])


@pytest.mark.parametrize(("counts", "loads"), [([5, 4, 3], [5, 7]), ([1, 1, 1, 9], [9, 3])])
def test_whole_parameters_are_dealt_out_evenly(counts: list[int], loads: list[int]) -> None:
    layout = ShardLayout(counts, 2, divides_parameters=False)
    assert [sum(f.size for f in fragments) for fragments in layout.fragments] == loads
