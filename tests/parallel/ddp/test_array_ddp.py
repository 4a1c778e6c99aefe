"""DDP of arrays: overlap by hand, weights, ranks without data, and any layout of buckets."""

from __future__ import annotations

import threading
import time
import weakref
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.testing import assert_array_equal
from parallel.refused_reduction import assert_refusal_is_told
from ranks_as_threads import OnRanks

import ferro_dist as fd

Array = np.ndarray[Any, Any]
OVERLAP = pytest.mark.parametrize("overlap", [False, "always"])


class Layers:
    """Three layers of weight and bias. Gradients are what `fill` makes them."""

    def __init__(self) -> None:
        self.weights = {
            f"{layer}.{kind}": np.zeros(4) for layer in "abc" for kind in ("weight", "bias")
        }
        self.gradients = {name: np.zeros(4) for name in self.weights}

    def parameters(self) -> dict[str, Array]:
        return self.weights

    def grads(self) -> dict[str, Array]:
        return self.gradients

    def fill(self, value: float, layer: str = "") -> None:
        for number, (name, gradient) in enumerate(self.gradients.items()):
            if name.startswith(layer):
                gradient[:] = value + number


def expected(mean: float) -> dict[str, list[float]]:
    return {name: [mean + number] * 4 for number, name in enumerate(Layers().weights)}


def as_lists(gradients: dict[str, Array]) -> dict[str, list[float]]:
    return {name: gradient.tolist() for name, gradient in gradients.items()}


def weights_of(layers: Layers) -> dict[str, Array]:
    return layers.weights


def test_type_hints_let_a_wrapper_stand_for_its_module(on_ranks: OnRanks) -> None:
    def body(backend: Any) -> int:
        return len(weights_of(fd.DDP(Layers(), backend)))  # what is tested is that mypy takes this

    assert on_ranks(1, body) == [6]


@OVERLAP
@pytest.mark.parametrize("own_buffers", [False, True], ids=["copied", "in buckets"])
def test_layers_that_are_ready_are_reduced_while_backward_goes_on(
    on_ranks: OnRanks, overlap: Any, own_buffers: bool
) -> None:
    def body(backend: Any) -> Any:
        ddp = fd.DDP(Layers(), backend, bucket_mb=1e-4, overlap=overlap)
        if own_buffers:
            ddp.gradients = ddp.gradient_buffers()
        for step in range(3):
            for layer in "cba":
                ddp.module.fill(backend.rank + step, layer)
                ddp.ready(layer)
            ddp.sync_gradients()
            assert as_lists(ddp.gradients) == expected(1 + step)
        assert ddp.statistics().is_overlapped == bool(overlap)
        return len(ddp.statistics().buckets)

    assert on_ranks(3, body) == [6] * 3


def test_a_bucket_ends_when_it_is_reduced_and_not_when_that_is_seen(on_ranks: OnRanks) -> None:
    def body(backend: Any) -> None:
        layers = Layers()
        layers.weights = {name: np.zeros(1 << 14) for name in layers.weights}
        layers.gradients = {name: np.zeros(1 << 14) for name in layers.weights}
        ddp = fd.DDP(layers, backend, bucket_mb=1e-4, overlap="always")
        for _ in range(2):  # the first agrees on the order
            ddp.ready("c")
            fd.barrier(backend)  # it comes behind what is under way
            reduced_s = time.perf_counter()
            ddp.ready("b")
            ddp.ready("a")
            ddp.sync_gradients()
        first = ddp.statistics().buckets[0]
        assert first.start_s < first.end_s < reduced_s

    on_ranks(2, body)


@OVERLAP
def test_a_rank_that_does_not_come_within_the_timeout_of_the_group_is_named(
    on_ranks: OnRanks, overlap: Any
) -> None:
    have_made, has_given_up = threading.Barrier(2), threading.Event()

    def body(backend: Any) -> Any:
        ddp = fd.DDP(Layers(), backend, overlap=overlap)
        have_made.wait(60)
        if backend.rank == 1:
            has_given_up.wait(60)
            return None
        backend.timeout = 0.2
        try:
            ddp.sync_gradients()
        except fd.Timeout as error:
            return error.missing
        finally:
            has_given_up.set()

    assert on_ranks(2, body) == [(1,), None]


@OVERLAP
def test_ranks_may_differ_in_what_is_ready_and_when(on_ranks: OnRanks, overlap: Any) -> None:
    def body(backend: Any) -> Any:
        ddp = fd.DDP(Layers(), backend, bucket_mb=1e-4, overlap=overlap)
        ddp.module.fill(backend.rank)
        for layer in ["abc", "ca", ""][backend.rank]:
            ddp.ready(layer)
        ddp.sync_gradients()
        return as_lists(ddp.gradients)

    assert on_ranks(3, body) == [expected(1)] * 3


@OVERLAP
def test_layers_may_be_ready_before_others_have_gradients(on_ranks: OnRanks, overlap: Any) -> None:
    class Growing(Layers):
        def grads(self) -> dict[str, Array]:
            return dict(self.gradients)

    def body(backend: Any) -> Any:
        ddp = fd.DDP(Growing(), backend, bucket_mb=1e-4, overlap=overlap)
        complete, ddp.module.gradients = ddp.module.gradients, {}
        with pytest.raises(ValueError, match=r"no gradient of 'c\.weight'"):
            ddp.ready("c")
        for layer in "cba":
            ddp.gradients.update((n, g) for n, g in complete.items() if n.startswith(layer))
            complete[f"{layer}.bias"][:] = backend.rank
            ddp.ready(layer)
        ddp.sync_gradients()
        assert as_lists(ddp.gradients) == {n: [float(n.endswith("bias"))] * 4 for n in complete}
        del ddp.gradients["a.bias"]
        ddp.ready("c")
        with pytest.raises(ValueError, match=r"no gradient of 'a\.bias'"):
            ddp.sync_gradients()

    on_ranks(3, body)


def test_what_is_wrong_with_ready_is_said(on_ranks: OnRanks) -> None:
    def body(backend: Any) -> None:
        ddp = fd.DDP(Layers(), backend)
        with pytest.raises(ValueError, match="no parameter 'd'"):
            ddp.ready("d")
        ddp.ready("a.weight")
        with pytest.raises(ValueError, match=r"'a\.weight' was ready before"):
            ddp.ready("a")
        with pytest.raises(ValueError, match="neither grads nor weight"):
            ddp.sync_gradients(weight=1)
        ddp.sync_gradients()
        ddp.ready("a")
        ddp.sync_gradients()
        with pytest.raises(ValueError, match="no gradients of its own"):
            fd.DDP([np.zeros(1)], backend).ready(0)

    on_ranks(2, body)


def test_a_gradient_that_is_refused_when_ready_is_told_on_the_others(on_ranks: OnRanks) -> None:
    met = threading.Barrier(2)

    def body(backend: Any) -> str:
        ddp = fd.DDP(Layers(), backend, bucket_mb=1e-4)
        buffers = ddp.gradient_buffers()
        if backend.rank == 0:
            ddp.gradients = {**buffers, "c.bias": buffers["a.bias"]}
        try:
            ddp.ready("c")
            ddp.sync_gradients()
        except Exception as error:
            told = str(error)
        met.wait()  # no error is due to a rank's leaving
        return told

    first, second = on_ranks(2, body)
    assert "'c.bias' shares memory" in first
    assert "rank 0 was interrupted" in second


def test_gradients_stay_as_they_are_inside_no_sync(on_ranks: OnRanks) -> None:
    def body(backend: Any) -> Any:
        ddp = fd.DDP(Layers(), backend)
        ddp.module.fill(backend.rank)
        with ddp.no_sync():
            ddp.ready("c")
            ddp.sync_gradients()
        return as_lists(ddp.gradients)

    assert on_ranks(2, body) == [expected(0), expected(1)]


@pytest.mark.parametrize(("average", "factor"), [("mean", 1 / 4), ("sum", 1)])
def test_a_weight_multiplies_what_a_rank_gives(
    on_ranks: OnRanks, average: str, factor: float
) -> None:
    def body(backend: Any) -> Any:
        gradient = np.array([4.0 + 4 * backend.rank])
        ddp = fd.DDP([np.zeros(1)], backend, average=average)
        ddp.sync_gradients([gradient], weight=[3, 1][backend.rank])
        return gradient.item()

    assert on_ranks(2, body) == [factor * 20] * 2


@pytest.mark.parametrize("weights", [(0, 0), (2.0, None)], ids=["of nothing", "on one"])
@pytest.mark.parametrize("own_buffers", [False, True], ids=["copied", "in buckets"])
def test_gradients_whose_weights_were_refused_may_be_averaged(
    on_ranks: OnRanks, weights: tuple[Any, ...], own_buffers: bool
) -> None:
    def body(backend: Any) -> Any:
        ddp = fd.DDP(Layers(), backend, average="sum")
        if own_buffers:
            ddp.gradients = ddp.gradient_buffers()
        ddp.module.fill(backend.rank)
        with pytest.raises((ValueError, fd.CollectiveMismatch)):
            ddp.sync_gradients(weight=weights[backend.rank])
        ddp.sync_gradients()
        return ddp.gradients["a.bias"].tolist()

    assert on_ranks(2, body) == [[3] * 4] * 2


def test_a_reduction_that_fails_on_one_rank_tells_the_others(on_ranks: OnRanks) -> None:
    assert_refusal_is_told(
        on_ranks, lambda backend, **options: fd.DDP(Layers(), backend, **options)
    )


def test_a_wrapper_that_gave_its_module_back_holds_no_bucket(on_ranks: OnRanks) -> None:
    def body(backend: Any) -> None:
        ddp = fd.DDP(Layers(), backend)
        bucket = weakref.ref(ddp._reducer.buckets[0])
        ddp.into_inner()
        assert bucket() is None

    on_ranks(2, body)


def test_the_mean_of_contributors_counts_them(on_ranks: OnRanks) -> None:
    def body(backend: Any) -> Any:
        grads = {"a": np.full(2, 6.0), "b": np.full(2, 6.0) if backend.rank else None}
        parameters = {"a": np.zeros(2), "b": np.zeros(2)}
        fd.DDP(parameters, backend, average="contributors").sync_gradients(grads)
        return as_lists(grads)  # type: ignore[arg-type]

    assert on_ranks(3, body) == [{"a": [6, 6], "b": [6, 6]}] * 3


@pytest.mark.parametrize("in_torch", [False, True])
@pytest.mark.parametrize("absent", ["", "b"])
@pytest.mark.parametrize("dtype", ["complex64", "complex128"])
def test_the_mean_of_contributors_keeps_what_stands_beside_an_infinity(
    on_ranks: OnRanks, dtype: str, absent: str, in_torch: bool
) -> None:
    if in_torch:
        torch = pytest.importorskip("torch", reason="torch is not installed")

    def body(backend: Any) -> Any:
        share = {"a": [complex(np.inf, 6), 3 + 6j], "b": [complex(-3, np.inf), 3 + 6j]}
        if backend.rank == 0:
            share.pop(absent, None)
        grads = {name: np.array(values, dtype) for name, values in share.items()}
        parameters = {name: np.zeros(2, dtype) for name in "ab"}
        if not in_torch:
            means = fd.DDP(parameters, backend, average="contributors").sync_gradients(grads)
            return as_lists(means)
        net = torch.nn.ParameterDict({n: torch.from_numpy(p) for n, p in parameters.items()})
        for name, gradient in grads.items():
            net[name].grad = torch.from_numpy(gradient)
        means = fd.DDP(net, backend, average="contributors").sync_gradients()
        return {name: mean.tolist() for name, mean in means.items()}

    expected = {"a": [complex(np.inf, 6), 3 + 6j], "b": [complex(-3, np.inf), 3 + 6j]}
    assert on_ranks(3, body) == [expected] * 3


@pytest.mark.parametrize("dtype", ["complex64", "complex128"])
def test_a_weight_keeps_what_stands_beside_an_infinity(on_ranks: OnRanks, dtype: str) -> None:
    def body(backend: Any) -> Any:
        ddp = fd.DDP({"a": np.zeros(2, dtype)}, backend)
        gradient = np.array([complex(np.inf, 6), 3 + 6j], dtype)
        return as_lists(ddp.sync_gradients({"a": gradient}, weight=2.0))

    assert on_ranks(2, body) == [{"a": [complex(np.inf, 6), 3 + 6j]}] * 2


@pytest.mark.parametrize("overlap", [False, "always"])
def test_ranks_may_run_out_of_data_one_by_one(on_ranks: OnRanks, overlap: Any) -> None:
    def body(backend: Any) -> Any:
        ddp = fd.DDP(Layers(), backend, average="contributors", bucket_mb=1e-4, overlap=overlap)
        means = []
        with ddp.join():
            for _ in range(backend.rank + 1):
                ddp.module.fill(backend.rank)
                if backend.rank == 1:
                    ddp.ready("c")
                ddp.sync_gradients()
                means.append(ddp.gradients["a.weight"][0])
                ddp.weights["a.weight"][:] = means[-1]
        ddp.verify()
        return means, ddp.weights["a.weight"][0]

    assert on_ranks(3, body) == [([1], 2), ([1, 1.5], 2), ([1, 1.5, 2], 2)]


def test_a_block_of_join_without_any_data_ends(on_ranks: OnRanks) -> None:
    def body(backend: Any) -> None:
        ddp = fd.DDP(Layers(), backend)
        with ddp.join():
            pass
        ddp.verify()

    on_ranks(3, body)


def test_a_block_of_join_inside_another_is_refused(on_ranks: OnRanks) -> None:
    def body(backend: Any) -> Any:
        ddp = fd.DDP(Layers(), backend)
        with ddp.join():
            with pytest.raises(RuntimeError, match="inside a block of join"), ddp.join():
                pass
            for _ in range(backend.rank):
                ddp.module.fill(backend.rank)
                ddp.sync_gradients()
        return ddp.gradients["a.weight"][0]

    assert on_ranks(2, body) == [0, 0.5]


def test_parameters_that_differ_in_a_bit_are_found(on_ranks: OnRanks) -> None:
    def body(backend: Any) -> str:
        ddp = fd.DDP(Layers(), backend)
        if backend.rank == 1:
            ddp.weights["b.bias"][3] = -0.0
        with pytest.raises(fd.CollectiveMismatch) as caught:
            ddp.verify()
        return str(caught.value)

    for message in on_ranks(3, body):
        assert "parameter 'b.bias', bits" in message
        assert "on rank 1" in message


@pytest.mark.parametrize(("compress", "dtype"), [("fp16", "float16"), ("bf16", "bfloat16")])
def test_compressed_gradients_travel_as_16_bits(
    on_ranks: OnRanks, compress: str, dtype: str
) -> None:
    def body(backend: Any) -> Any:
        parameters = {"wide": np.zeros(3), "half": np.zeros(3, "float16"), "z": np.zeros(1, "c8")}
        ddp = fd.DDP(parameters, backend, compress=compress)
        sent = {b.layout.dtype.name: b.wire.dtype.name for b in ddp._reducer.buckets}
        assert sent == {"float64": dtype, "float16": "float16", "complex64": "complex64"}
        grads = {name: np.full_like(p, 1 + 2 * backend.rank) for name, p in parameters.items()}
        return [g.tolist() for g in ddp.sync_gradients(grads).values()]

    assert on_ranks(2, body) == [[[2, 2, 2], [2, 2, 2], [2]]] * 2


@settings(
    max_examples=30,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(
    counts=st.lists(st.integers(1, 300), min_size=1, max_size=8),
    dtype=st.sampled_from(["float16", "float32", "float64"]),
    bucket_mb=st.floats(1e-5, 4e-3),
    overlap=st.sampled_from([False, "always"]),
    average=st.sampled_from(["mean", "sum", "contributors"]),
    data=st.data(),
)
def test_any_assignment_to_buckets_gives_the_same_bits(
    on_ranks: OnRanks,
    counts: list[int],
    dtype: str,
    bucket_mb: float,
    overlap: Any,
    average: str,
    data: st.DataObject,
) -> None:
    names = [str(number) for number in range(len(counts))]
    orders = [data.draw(st.permutations(names)) for _ in range(3)]
    num_ready = [data.draw(st.integers(0, len(counts))) for _ in range(3)]

    def body(backend: Any) -> tuple[list[Array], list[Array]]:
        rng = np.random.default_rng(backend.rank)
        own = [rng.normal(size=count).astype(dtype) for count in counts]
        alone = []
        for gradient in own:
            # Each by itself, as a bucket is reduced.
            total = fd.allreduce(gradient, backend, "mean" if average == "mean" else "sum")
            alone.append(total / 3 if average == "contributors" else total)
        ddp = fd.DDP(
            [np.zeros_like(gradient) for gradient in own],
            *(backend,),
            bucket_mb=bucket_mb,
            overlap=overlap,
            average=average,
        )
        for buffer, gradient in zip(ddp.gradient_buffers().values(), own, strict=True):
            buffer[:] = gradient
        for name in orders[backend.rank][: num_ready[backend.rank]]:
            ddp.ready(name)
        ddp.sync_gradients()
        return list(ddp.gradient_buffers().values()), alone

    for gradients, alone in on_ranks(3, body):
        for gradient, expected_bits in zip(gradients, alone, strict=True):
            assert_array_equal(gradient.view("u1"), expected_bits.view("u1"))
