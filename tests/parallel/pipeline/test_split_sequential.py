"""Chains of layers, cut into stages of about the same cost."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import ferro_dist as fd


@given(
    st.lists(st.integers(0, 20), min_size=1, max_size=7).flatmap(
        lambda costs: st.tuples(st.just(costs), st.integers(1, len(costs)))
    )
)
def test_no_other_cut_is_cheaper_at_worst_or_more_even(
    case: tuple[list[int], int],
) -> None:
    costs, num_stages = case
    stages = fd.split_sequential(costs, num_stages, weights=costs)
    assert [cost for stage in stages for cost in stage] == costs
    assert all(stages)
    cuts = itertools.combinations(range(1, len(costs)), num_stages - 1)
    best = min(
        _unevenness([costs[a:b] for a, b in itertools.pairwise([0, *cut, len(costs)])])
        for cut in cuts
    )
    assert _unevenness(stages) == best


def _unevenness(stages: list[list[int]]) -> tuple[int, int]:
    return max(map(sum, stages)), sum(sum(stage) ** 2 for stage in stages)


def test_the_most_even_cut_need_not_begin_with_the_cheapest_stages() -> None:
    costs = [1, 5, 3, 2, 6]
    assert fd.split_sequential(costs, 4, weights=costs) == [[1, 5], [3], [2], [6]]


def test_weights_may_be_so_large_that_their_squares_are_infinite() -> None:
    assert fd.split_sequential([1, 2, 3, 4], 2, weights=[1e200] * 4) == [[1, 2], [3, 4]]


def test_parameters_are_counted_by_default() -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed")
    nn = torch.nn
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4), nn.Linear(4, 40))
    stages = fd.split_sequential(model, 2)
    assert [len(stage) for stage in stages] == [3, 1]
    assert all(isinstance(stage, nn.Sequential) for stage in stages)
    assert stages[1][0] is model[3]


@pytest.mark.parametrize(
    ("num_stages", "weights", "words"),
    [
        (4, None, "3 layers cannot be cut into 4"),
        (0, None, "cannot be cut into 0"),
        (2, [1, 2], "2 weights for 3 layers"),
        (2, [1, -2, 3], "at least 0"),
        (2, [1, float("nan"), 3], "at least 0"),
        (2, [1, 10**400, 3], "their sum finite"),
        (2, [1e308, 1e308, 1], "their sum finite"),
    ],
)
def test_cuts_that_cannot_be_are_told(num_stages: int, weights: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        fd.split_sequential([1, 2, 3], num_stages, weights)


@pytest.mark.parametrize(
    "module", [None, 3, "abc", {"a": 1}, object(), (x for x in "ab"), np.ones(())]
)
def test_what_has_no_layers_is_told(module: Any) -> None:
    with pytest.raises(TypeError, match=r"must be a torch\.nn\.Sequential, or a list of layers"):
        fd.split_sequential(module, 2)


def test_number_of_stages_that_is_none_is_told() -> None:
    with pytest.raises(TypeError, match=r"num_stages must be an integer, not 2\.0"):
        fd.split_sequential([1, 2, 3], 2.0)  # type: ignore[arg-type]


@pytest.mark.parametrize("weights", [3, ["a", "b", "c"], [None] * 3, {1, 2, 3}, "123"])
def test_weights_that_are_no_numbers_are_told(weights: Any) -> None:
    with pytest.raises(TypeError, match="weights must be a sequence of numbers"):
        fd.split_sequential([1, 2, 3], 2, weights)
