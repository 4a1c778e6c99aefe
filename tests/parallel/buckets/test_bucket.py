"""The assignment of parameters to buckets, and the layout of a bucket."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Sequence
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.testing import assert_array_equal

from ferro_dist._native.host import copy_plain
from ferro_dist.parallel.buckets.averaging import Averaging
from ferro_dist.parallel.buckets.bucket import (
    ALIGNMENT_NBYTES,
    Bucket,
    BucketLayout,
    ParameterSpec,
    assign_buckets,
)

DTYPES = [np.dtype(t) for t in ("float16", "float32", "float64", "complex128", ml_dtypes.bfloat16)]

shapes = st.lists(st.integers(0, 40), max_size=3).map(tuple)
parameter_lists = st.lists(st.tuples(shapes, st.sampled_from(DTYPES)), max_size=30).map(
    lambda rows: [ParameterSpec(f"p{i}", shape, dtype) for i, (shape, dtype) in enumerate(rows)]
)
limits = st.integers(1, 1 << 20)


def spec(name: str, count: int, dtype: str = "float32") -> ParameterSpec:
    return ParameterSpec(name, (count,), np.dtype(dtype))


def names(buckets: Sequence[Sequence[ParameterSpec]]) -> list[list[str]]:
    return [[p.name for p in bucket] for bucket in buckets]


def make_bucket(specs: Sequence[ParameterSpec]) -> Bucket:
    layout = BucketLayout(specs, num_controls=1)
    buffer = np.full(layout.count, np.nan, layout.dtype)
    return Bucket(0, range(len(specs)), layout, buffer, lambda array: array)


@given(parameter_lists, limits, limits)
def test_every_parameter_is_in_one_bucket(
    parameters: list[ParameterSpec], limit: int, first: int
) -> None:
    buckets = assign_buckets(parameters, limit, first)
    assert sorted(p.name for b in buckets for p in b) == sorted(p.name for p in parameters)
    assert all(buckets)


@given(parameter_lists, limits, limits)
def test_a_bucket_has_one_dtype(parameters: list[ParameterSpec], limit: int, first: int) -> None:
    for bucket in assign_buckets(parameters, limit, first):
        assert len({p.dtype for p in bucket}) == 1


@given(parameter_lists, limits, limits)
def test_a_bucket_of_several_parameters_keeps_the_limit(
    parameters: list[ParameterSpec], limit: int, first: int
) -> None:
    for bucket in assign_buckets(parameters, limit, first):
        assert len(bucket) == 1 or sum(p.padded_nbytes for p in bucket) <= limit
        if parameters[0] in bucket and first < limit:
            assert len(bucket) == 1 or sum(p.padded_nbytes for p in bucket[:-1]) < first


@given(parameter_lists, limits, limits)
def test_buckets_and_their_parameters_are_in_the_order_of_readiness(
    parameters: list[ParameterSpec], limit: int, first: int
) -> None:
    position = {p.name: i for i, p in enumerate(parameters)}
    buckets = [[position[p.name] for p in b] for b in assign_buckets(parameters, limit, first)]
    assert all(b == sorted(b) for b in buckets)
    assert [b[-1] for b in buckets] == sorted(b[-1] for b in buckets)


@given(parameter_lists, limits)
def test_a_bucket_is_closed_only_by_a_parameter_that_does_not_fit(
    parameters: list[ParameterSpec], limit: int
) -> None:
    buckets = assign_buckets(parameters, limit, limit)
    for dtype in DTYPES:
        same = [b for b in buckets if b[0].dtype == dtype]
        for bucket, following in itertools.pairwise(same):
            assert sum(p.padded_nbytes for p in [*bucket, following[0]]) > limit


def test_the_first_bucket_is_small() -> None:
    parameters = [spec(name, 16) for name in "abcdef"]
    buckets = assign_buckets(parameters, bucket_nbytes=4 * 64, first_bucket_nbytes=2 * 64)
    assert names(buckets) == [["a", "b"], ["c", "d", "e", "f"]]


def test_the_first_bucket_is_not_closed_while_next_to_nothing_is_in_it() -> None:
    parameters = [spec("bias", 16), spec("weight", 3 * 16), spec("next", 16)]
    buckets = assign_buckets(parameters, bucket_nbytes=4 * 64, first_bucket_nbytes=2 * 64)
    assert names(buckets) == [["bias", "weight"], ["next"]]


def test_a_parameter_larger_than_the_limit_has_its_own_bucket() -> None:
    parameters = [spec("a", 16), spec("huge", 10_000), spec("b", 16)]
    assert names(assign_buckets(parameters, 128, 128)) == [["a"], ["huge"], ["b"]]


def test_dtypes_that_alternate_do_not_split_buckets() -> None:
    parameters = [spec(f"{i}", 4, ("float32", "float64")[i % 2]) for i in range(6)]
    assert names(assign_buckets(parameters, 1 << 20, 1 << 20)) == [["0", "2", "4"], ["1", "3", "5"]]


def test_no_parameters_need_no_bucket() -> None:
    assert assign_buckets([], 1, 1) == []


@given(st.lists(shapes, min_size=1, max_size=10), st.sampled_from(DTYPES))
def test_gradients_are_aligned_and_share_no_element(
    rows: list[tuple[int, ...]], dtype: np.dtype[np.generic]
) -> None:
    layout = BucketLayout([ParameterSpec(f"p{i}", shape, dtype) for i, shape in enumerate(rows)])
    elements: list[int] = []
    for offset, parameter in zip(layout.offsets, layout.specs, strict=True):
        assert offset * dtype.itemsize % ALIGNMENT_NBYTES == 0
        elements += range(offset, offset + parameter.count)
    elements += range(layout.lanes_offset, layout.count)
    assert len(elements) == len(set(elements))
    assert max(elements) == layout.count - 1


@pytest.mark.parametrize(
    "gradient",
    [
        np.arange(300_000, dtype="f4"),
        np.arange(600_000, dtype="f4")[::2],  # with gaps
        np.arange(300_000, dtype="f8"),
    ],
    ids=["alike", "with gaps", "another dtype"],
)
def test_large_gradients_of_any_layout_come_to_their_place(
    gradient: np.ndarray[Any, Any],
) -> None:
    bucket = make_bucket([spec("a", 3), spec("b", gradient.size)])
    assert bucket.layout.streamed == [1]
    bucket.put_in(1, gradient)
    assert_array_equal(bucket.views[1], gradient)
    bucket.put_in(1, None)
    assert not bucket.views[1].any()


def plainly(places: list[Any], arrays: list[Any], **settings: int) -> list[int]:
    return copy_plain(
        places, arrays, **{"streamed_nbytes": 1 << 20, "limit_nbytes": sys.maxsize, **settings}
    )


@given(st.lists(st.integers(0, 300), max_size=8), st.integers(0, 3000))
def test_plain_arrays_are_copied_whatever_their_sizes(counts: list[int], streamed: int) -> None:
    arrays = [np.arange(count) + 1.0 for count in counts]
    places = [np.zeros(count) for count in counts]
    assert plainly(places, arrays, streamed_nbytes=streamed) == []
    for place, array in zip(places, arrays, strict=True):
        assert_array_equal(place, array)


@pytest.mark.parametrize(
    "array",
    [
        None,
        "text",
        [1.0, 1.0, 1.0, 1.0],
        np.ones(5),
        np.ones(4, "f4"),
        np.ones(4, ">f8"),
        np.ones(8)[::2],
        np.ones(4, object),
    ],
    ids=["None", "text", "list", "longer", "dtype", "byte order", "gaps", "object"],
)
def test_what_is_not_plain_is_left(array: Any) -> None:
    places = [np.zeros(4), np.zeros(4)]
    assert plainly(places, [array, np.ones(4)]) == [0]
    assert_array_equal(places, [[0] * 4, [1] * 4])


def test_places_that_cannot_be_written_are_left() -> None:
    locked = np.zeros(4)
    locked.flags.writeable = False
    places = [locked, np.zeros(8)[::2], None]
    assert plainly(places, [np.ones(4)] * 3) == [0, 1, 2]
    assert not locked.any()


def test_an_array_that_overlaps_its_place_is_left() -> None:
    memory = np.arange(6.0)
    assert plainly([memory[1:]], [memory[:-1]]) == [0]
    assert plainly([memory[:4].reshape(2, 2)], [memory[:4]]) == []  # it is there
    assert_array_equal(memory, np.arange(6))


def test_large_arrays_are_left_if_asked_to() -> None:
    places = [np.zeros(4), np.zeros(3)]
    assert plainly(places, [np.ones(4), np.ones(3)], limit_nbytes=32) == [0]
    assert not places[0].any()
    assert places[1].all()


def test_nothing_is_copied_if_an_array_lies_in_the_place_of_another() -> None:
    memory = np.arange(8.0)
    start = memory.__array_interface__["data"][0]
    bounds = {"start": start, "stop": start + memory.nbytes}
    assert plainly([memory[:4], memory[4:]], [memory[:4], np.ones(4)], **bounds) == []
    assert_array_equal(memory, [0, 1, 2, 3, 1, 1, 1, 1])
    assert plainly([memory[:4], memory[4:]], [np.ones(4), memory[3:7]], **bounds) == [0, 1]
    assert_array_equal(memory, [0, 1, 2, 3, 1, 1, 1, 1])


def test_each_array_must_have_a_place() -> None:
    with pytest.raises(ValueError, match="2 places for 1 arrays"):
        plainly([np.zeros(4)] * 2, [np.ones(4)])


def test_gradients_are_views_of_the_buffer() -> None:
    bucket = make_bucket([ParameterSpec("w", (2, 3), np.dtype("float32")), spec("b", 3)])
    bucket.views[0][1, 2] = 5
    bucket.views[1][0] = 7
    assert bucket.buffer[5] == 5
    assert bucket.buffer[16] == 7
    assert bucket.gradients.size == 32


@given(st.permutations(range(4)))
def test_a_view_has_the_memory_order_of_its_parameter(axes: list[int]) -> None:
    shape = (2, 3, 4, 5)
    stored = np.empty([shape[axis] for axis in axes])
    parameter = stored.transpose([axes.index(axis) for axis in range(4)])
    bucket = make_bucket([ParameterSpec("w", shape, parameter.dtype, tuple(axes))])
    assert bucket.views[0].shape == shape
    assert bucket.views[0].strides == parameter.strides


@given(st.data(), st.lists(st.integers(0, 3), max_size=4).map(tuple))
def test_the_strides_of_a_place_are_those_of_its_view(data: Any, shape: tuple[int, ...]) -> None:
    axes = data.draw(st.sampled_from([(), tuple(data.draw(st.permutations(range(len(shape)))))]))
    bucket = make_bucket([ParameterSpec("w", shape, np.dtype("float32"), axes)])
    nbytes = tuple(4 * stride for stride in bucket.layout.strides[0])
    assert bucket.views[0].strides == nbytes


def test_what_was_marked_is_known_once_it_is_reduced() -> None:
    bucket = make_bucket([spec("a", 3), spec("b", 2)])
    bucket.mark()
    assert bucket.contributed() is None
    bucket.mark([False, True])
    assert bucket.contributed() == [False, True]


@given(st.lists(st.integers(0, 256), min_size=1, max_size=4), st.sampled_from(DTYPES))
def test_contributors_are_counted_exactly(counts: list[int], dtype: np.dtype[np.generic]) -> None:
    Averaging("contributors", 256).check_countable("p0", dtype)
    specs = [ParameterSpec(f"p{i}", (1,), dtype) for i in range(len(counts))]
    bucket = make_bucket(specs)
    total = np.zeros_like(bucket.lanes)
    for rank in range(256):
        bucket.mark([rank < count for count in counts])
        # As the engine does: sums of 16-bit floats are rounded once, at the end.
        total = (total.astype("complex128") + bucket.lanes).real.astype(dtype)
    bucket.lanes[:] = total
    assert bucket.contributors() == counts


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_padding_is_zero_whatever_the_memory_held(dtype: np.dtype[np.generic]) -> None:
    bucket = make_bucket([ParameterSpec("a", (), dtype), ParameterSpec("empty", (0, 4), dtype)])
    assert_array_equal(bucket.buffer, np.zeros_like(bucket.buffer))
    assert [view.shape for view in bucket.views] == [(), (0, 4)]


def test_what_is_empty_is_of_every_bucket() -> None:
    bucket = make_bucket([spec("a", 3), ParameterSpec("none", (0, 2), np.dtype("f4"))])
    assert all(map(bucket.contains, [bucket.gradients, *bucket.views, np.zeros((2, 0))]))
    assert not bucket.contains(np.zeros(3, "f4"))
    assert not bucket.contains([bucket.gradients])
