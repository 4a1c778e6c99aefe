"""Trees: flattened, written as text, and put together again."""

from __future__ import annotations

import json
import math
from collections import OrderedDict, UserDict, namedtuple
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ferro_dist.parallel.pipeline import pytree

CONSTANTS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()
TREES = st.recursive(
    CONSTANTS | st.builds(np.array, st.integers(0, 9)),
    lambda inner: (
        st.lists(inner)
        | st.lists(inner).map(tuple)
        | st.dictionaries(st.text() | st.integers() | st.booleans(), inner)
    ),
    max_leaves=12,
)


@given(TREES)
def test_trees_come_back_as_they_were(tree: Any) -> None:
    structure, arrays = pytree.flatten(tree)
    again = pytree.from_lists(json.loads(json.dumps(structure)))
    assert again == structure
    assert hash(again) == hash(structure)
    assert repr(pytree.unflatten(again, arrays)) == repr(tree)


@given(TREES)
def test_gradients_are_found_by_the_places_of_their_arrays(tree: Any) -> None:
    structure, arrays = pytree.flatten(tree)
    shapes = [array.shape for array in arrays]
    found = pytree.gradients_like(structure, shapes, tree, "given", "array")
    assert len(found) == len(arrays)
    assert all(a is b for a, b in zip(found, arrays, strict=True))
    none = pytree.gradients_like(structure, shapes, None, "given", "array")
    assert none == [None] * len(arrays)


def test_values_that_compare_equal_have_different_structures() -> None:
    structures = [pytree.flatten(value)[0] for value in (1, True, 1.0, 0.0, -0.0, 0, False, None)]
    assert len(set(structures)) == len(structures)


def test_nan_travels() -> None:
    structure, _ = pytree.flatten([math.nan, math.inf])
    back = pytree.unflatten(pytree.from_lists(json.loads(json.dumps(structure))), [])
    assert math.isnan(back[0])
    assert back[1] == math.inf


Pair = namedtuple("Pair", "a b")  # noqa: PYI024 - what users have


@pytest.mark.parametrize(
    "tree", [{1, 2}, object(), b"bytes", 1j, Pair(1, 2), OrderedDict(a=1), [lambda: 0]]
)
def test_other_types_are_refused_by_name(tree: Any) -> None:
    with pytest.raises(TypeError, match="Pipeline: what travels between stages"):
        pytree.flatten(tree)


@pytest.mark.parametrize("key", [None, (1, 2), np.int64(3)])
def test_keys_of_other_types_are_refused_as_keys(key: Any) -> None:
    with pytest.raises(TypeError, match="keys that are bool, int, float or str, not ") as caught:
        pytree.flatten({key: 1})
    assert str(caught.value).endswith(repr(key))


@pytest.mark.parametrize(
    ("tree", "plain"),
    [(Pair(1, 2), "tuple"), (OrderedDict(a=1), "dict"), (UserDict(a=1), "dict")],
)
def test_subclasses_are_refused_with_what_to_make_of_them(tree: Any, plain: str) -> None:
    with pytest.raises(TypeError, match=f"would get a plain {plain}, so make one of it"):
        pytree.flatten(tree)


@pytest.mark.parametrize(
    ("gradient", "error", "words"),
    [
        ((np.ones(1),), ValueError, "1 gradients for a tuple of 2"),
        (np.ones((2, 1)), TypeError, "type ndarray for a tuple"),  # two rows are no two arrays
        ((np.ones(1), {"c": None}), ValueError, "gradients of .'c'. for a dict"),
        ((np.ones(1), np.ones(3)), TypeError, "type ndarray for a dict"),
        ((np.ones(1), {"b": 2.0}), TypeError, "given a float where the gradient of an array"),
        ((np.ones(1), {"b": np.ones(1)}), ValueError, "shape .1,. for an array of shape .3,."),
    ],
)
def test_gradient_of_another_form_is_refused(
    gradient: Any, error: type[Exception], words: str
) -> None:
    structure, arrays = pytree.flatten((np.ones(1), {"b": np.ones(3)}))
    shapes = [array.shape for array in arrays]
    with pytest.raises(error, match=words):
        pytree.gradients_like(structure, shapes, gradient, "given", "array")
