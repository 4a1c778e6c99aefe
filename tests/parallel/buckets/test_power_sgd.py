"""PowerSGD: what it sends, what it leaves out, and that it gives that back."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal
from ranks_as_threads import OnRanks

import ferro_dist as fd
from ferro_dist.parallel.buckets.bucket import BucketLayout, ParameterSpec
from ferro_dist.parallel.buckets.power_sgd import PowerSGD
from ferro_dist.testing import run_ranks

Array = np.ndarray[Any, Any]


def gradients_of(rank: int, step: int, dtype: Any = "float32") -> list[Array]:
    rng = np.random.default_rng([rank, step])
    shapes = [(40, 30), (16, 4, 3, 3), (50,), (3, 3)]
    return [rng.normal(size=shape).astype(dtype) for shape in shapes]


def mean_of(world_size: int, step: int) -> list[Array]:
    of_ranks = [gradients_of(rank, step) for rank in range(world_size)]
    return [np.mean(each, axis=0) for each in zip(*of_ranks, strict=True)]


class FlatGradients:
    """Gradients in one array: what PowerSGD reads of a bucket."""

    is_on_gpu = False

    def __init__(self, gradients: list[Array]) -> None:
        dtype = gradients[0].dtype
        specs = [ParameterSpec(str(i), g.shape, dtype) for i, g in enumerate(gradients)]
        self.layout = BucketLayout(specs)
        self.kept: dict[str, Any] = {}
        self.flags: list[bool] | None = None  # each has a contributor
        self.buffer = np.zeros(self.layout.count, dtype)
        self.views = [
            self.buffer[offset : offset + spec.count].reshape(spec.shape)
            for spec, offset in zip(specs, self.layout.offsets, strict=True)
        ]

    def reduced(
        self, compress: PowerSGD, gradients: list[Array], backend: Any, op: Any = fd.ReduceOp.MEAN
    ) -> list[Array]:
        for view, gradient in zip(self.views, gradients, strict=True):
            view[...] = gradient
        bucket: Any = self
        compress(bucket, backend, op)
        return [view.copy() for view in self.views]

    def contributed(self) -> list[bool] | None:
        return self.flags


def reduced(compress: PowerSGD, gradients: list[Array], backend: Any) -> list[Array]:
    return FlatGradients(gradients).reduced(compress, gradients, backend)


def average(
    backend: Any, steps: int, dtype: Any = "float32", op: Any = fd.ReduceOp.MEAN
) -> tuple[list[list[Array]], list[Array]]:
    """Return what is given in each step, and the errors after the last."""
    compress = PowerSGD(2)
    bucket: Any = FlatGradients(gradients_of(0, 0, dtype))
    given = [
        bucket.reduced(compress, gradients_of(backend.rank, step, dtype), backend, op)
        for step in range(steps)
    ]
    return given, list(bucket.kept.values())


def test_small_gradients_are_averaged_as_they_are(on_ranks: OnRanks) -> None:
    expected = mean_of(3, 0)
    for (given, *_), _ in on_ranks(3, average, 1):
        for i in (2, 3):
            assert_allclose(given[i], expected[i], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", ["float16", ml_dtypes.bfloat16, "float32", "float64"])
def test_all_ranks_get_the_same_bits(on_ranks: OnRanks, dtype: Any) -> None:
    (first, _), *others = on_ranks(3, average, 3, dtype)
    for given, _ in others:
        for step in range(3):
            for a, b in zip(first[step], given[step], strict=True):
                assert a.dtype == np.dtype(dtype)
                assert_array_equal(a, b)


def test_processes_get_the_same_bits() -> None:
    (first, _), (second, _) = run_ranks(2, average, 3)
    for a, b in zip(first[-1], second[-1], strict=True):
        assert_array_equal(a, b)


def test_what_is_given_has_the_rank(on_ranks: OnRanks) -> None:
    for given, _ in on_ranks(2, average, 2):
        assert np.linalg.matrix_rank(given[1][0]) == 2
        assert np.linalg.matrix_rank(given[1][1].reshape(16, 36)) == 2


@pytest.mark.parametrize(("op", "factor"), [(fd.ReduceOp.MEAN, 1), (fd.ReduceOp.SUM, 2)])
def test_nothing_is_lost(on_ranks: OnRanks, op: Any, factor: int) -> None:
    """What was given, and the errors that are still to come, add up to all gradients."""
    steps = 6
    outcomes = on_ranks(2, average, steps, "float32", op)
    for i in range(2):
        wanted = sum(factor * mean_of(2, step)[i] for step in range(steps))
        given = sum(outcomes[0][0][step][i] for step in range(steps))
        kept = factor * np.mean([errors[i] for _, errors in outcomes], axis=0)
        # Six float32 sums of values of order one.
        assert_allclose(given + kept.reshape(given.shape), wanted, atol=1e-4)


def test_what_is_left_out_waits_while_no_rank_has_a_gradient(on_ranks: OnRanks) -> None:
    def body(backend: Any) -> None:
        compress, shape = PowerSGD(2), (40, 30)
        gradient = np.random.default_rng(backend.rank).normal(size=shape)
        bucket = FlatGradients([gradient])
        bucket.reduced(compress, [gradient], backend)
        before = bucket.kept["0"].copy()
        bucket.flags = [False]
        (given,) = bucket.reduced(compress, [np.zeros(shape)], backend)
        assert_array_equal(given, 0)
        assert_array_equal(bucket.kept["0"], before)

    on_ranks(2, body)


def low_rank(backend: Any) -> Array:
    rng = np.random.default_rng(backend.rank)
    gradient = np.outer(rng.normal(size=60), rng.normal(size=40))
    return reduced(PowerSGD(2), [gradient], backend)[0]


def test_a_mean_of_low_rank_is_exact(on_ranks: OnRanks) -> None:
    generators = [np.random.default_rng(rank) for rank in range(2)]
    mean = sum(np.outer(rng.normal(size=60), rng.normal(size=40)) for rng in generators) / 2
    for given in on_ranks(2, low_rank):
        assert_allclose(given, mean, atol=1e-10)


def count_elements(backend: Any) -> int:
    counts: list[int] = []
    allreduce = backend.allreduce

    def counted(x: Any, *arguments: Any) -> Any:
        counts.append(x.size)
        return allreduce(x, *arguments)

    backend.allreduce = counted
    gradients = [np.ones((200, 100), "float32"), np.ones(7, "float32")]
    reduced(PowerSGD(4), gradients, backend)
    return sum(counts)


def test_the_factors_are_all_that_is_sent(on_ranks: OnRanks) -> None:
    assert on_ranks(2, count_elements) == [4 * (200 + 100) + 7] * 2


def descend(backend: Any, compressed: bool) -> float:
    """Least squares with a matrix of weights; each rank has half of the rows."""
    rng = np.random.default_rng(3)
    x, truth = rng.normal(size=(64, 20)), rng.normal(size=(20, 24))
    y = x @ truth
    own = slice(backend.rank, None, backend.world_size)
    weights = np.zeros_like(truth)
    compress, bucket = PowerSGD(2), FlatGradients([weights])
    for _ in range(300):
        gradient = x[own].T @ (x[own] @ weights - y[own]) / 32
        if compressed:
            (gradient,) = bucket.reduced(compress, [gradient], backend)
        else:
            fd.allreduce(gradient, backend, "mean", out=gradient)
        weights -= 0.2 * gradient
    return float(np.abs(weights - truth).max())


def test_descent_comes_where_it_comes_uncompressed(on_ranks: OnRanks) -> None:
    assert max(on_ranks(2, descend, False)) < 1e-3
    assert max(on_ranks(2, descend, True)) < 1e-2


def poisoned(backend: Any) -> tuple[list[Array], list[Array]]:
    compress = PowerSGD(2)
    bad, good = gradients_of(backend.rank, 0), gradients_of(backend.rank, 1)
    if backend.rank == 1:
        bad[0][0, 0] = np.inf
    bucket = FlatGradients(bad)
    return bucket.reduced(compress, bad, backend), bucket.reduced(compress, good, backend)


def test_infinity_is_passed_on_and_forgotten(on_ranks: OnRanks) -> None:
    for bad, good in on_ranks(2, poisoned):
        assert np.isnan(bad[0]).all()
        assert np.isfinite(bad[1]).all()
        assert all(np.isfinite(gradient).all() for gradient in good)


def overflowing(backend: Any) -> tuple[Array, Array]:
    compress = PowerSGD(2)
    large, small = (np.full((64, 64), value, np.float16) for value in (40_000, 1))
    bucket = FlatGradients([large])
    (bad,) = bucket.reduced(compress, [large], backend, fd.ReduceOp.SUM)
    (good,) = bucket.reduced(compress, [small], backend, fd.ReduceOp.SUM)
    return bad, good


def test_a_sum_too_large_for_its_dtype_is_forgotten(on_ranks: OnRanks) -> None:
    for bad, good in on_ranks(2, overflowing):
        assert np.isnan(bad).all()
        assert (good == 2).all()


def test_complex_gradients_are_averaged_as_they_are(on_ranks: OnRanks) -> None:
    def body(backend: Any) -> Array:
        gradient = np.full((40, 40), backend.rank + 2j, "complex64")
        return reduced(PowerSGD(1), [gradient], backend)[0]

    for gradient in on_ranks(2, body):
        assert_array_equal(gradient, np.full((40, 40), 0.5 + 2j))


def test_one_rank_alone_leaves_nothing_out(on_ranks: OnRanks) -> None:
    def body(backend: Any) -> Array:
        return reduced(PowerSGD(1), gradients_of(0, 0), backend)[0]

    assert_array_equal(on_ranks(1, body)[0], gradients_of(0, 0)[0])


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda each: pickle.loads(pickle.dumps(each))])
def test_a_copy_begins_anew(on_ranks: OnRanks, copied: Any) -> None:
    def body(backend: Any) -> None:
        used = PowerSGD(2)
        gradients = gradients_of(backend.rank, 0)
        first = reduced(used, gradients, backend)
        again = reduced(copied(used), gradients, backend)
        for a, b in zip(again, first, strict=True):
            assert_array_equal(a, b)

    on_ranks(2, body)


def test_parameters_on_a_gpu_are_refused() -> None:
    on_host, on_gpu = (
        ParameterSpec(name, (8, 8), np.dtype("f4"), is_on_gpu=name == "gpu")
        for name in ("host", "gpu")
    )
    PowerSGD(1).check_reach([on_host])
    with pytest.raises(fd.InvalidArray, match="parameter 'gpu' is on a GPU"):
        PowerSGD(1).check_reach([on_host, on_gpu])


@pytest.mark.parametrize("rank", [0, -1])
def test_a_rank_below_one_is_refused(rank: int) -> None:
    with pytest.raises(ValueError, match="at least 1"):
        PowerSGD(rank)


@pytest.mark.parametrize("rank", [1.5, None, True, "4"])
def test_a_rank_that_is_no_integer_is_refused(rank: Any) -> None:
    with pytest.raises(TypeError, match=r"PowerSGD: rank .* not an integer"):
        PowerSGD(rank)
