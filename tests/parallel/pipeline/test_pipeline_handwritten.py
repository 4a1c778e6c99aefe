"""Stages written by hand, over NumPy; and, as they start quickly, what needs many processes."""

from __future__ import annotations

import contextlib
import operator
import os
import signal
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal
from ranks_as_threads import OnRanks

import ferro_dist as fd
from ferro_dist.parallel.schedules import placement_for
from ferro_dist.testing import RankDeath, run_ranks

Array = np.ndarray[Any, Any]

WIDTH = 4
CASES = [
    ("gpipe", 2, 1),
    ("1f1b", 3, 1),
    ("zb_h1", 4, 1),
    ("interleaved_1f1b", 2, 2),
    ("zb_v", 2, 2),
]


class Layer:
    """y = tanh(x @ weight + bias)."""

    def __init__(self, seed: int) -> None:
        rng = np.random.default_rng(seed)
        self.weights = {"weight": rng.normal(size=(WIDTH, WIDTH)), "bias": rng.normal(size=WIDTH)}
        self.gradients = {name: np.zeros_like(value) for name, value in self.weights.items()}

    def parameters(self) -> dict[str, Array]:
        return self.weights

    def grads(self) -> dict[str, Array]:
        return self.gradients

    def forward(self, x: Array) -> tuple[Array, Any]:
        y = np.tanh(x @ self.weights["weight"] + self.weights["bias"])
        return y, (x, y)

    def backward(self, saved: Any, gradient: Array) -> Array:
        self.add_gradients(saved, gradient)
        return self.of_input(saved, gradient)

    def of_input(self, saved: Any, gradient: Array) -> Array:
        product: Array = (gradient * (1 - saved[1] ** 2)) @ self.weights["weight"].T
        return product

    def add_gradients(self, saved: Any, gradient: Array) -> None:
        x, y = saved
        before = gradient * (1 - y**2)
        self.gradients["weight"] += x.T @ before
        self.gradients["bias"] += before.sum(axis=0)


class DividedLayer(Layer):
    """The same, with a backward in two parts."""

    def backward(self, saved: Any, gradient: Array) -> Array:
        raise AssertionError("a schedule with I and W runs no B")

    def backward_input(self, saved: Any, gradient: Array) -> Array:
        return self.of_input(saved, gradient)

    def backward_weight(self, saved: Any, gradient: Array) -> None:
        self.add_gradients(saved, gradient)


def square(output: Array, target: Array) -> tuple[float, Array]:
    error = output - target
    return float((error**2).mean()), 2 * error / error.size


def batch(rows: int) -> tuple[Array, Array]:
    rng = np.random.default_rng(3)
    return rng.normal(size=(rows, WIDTH)), rng.normal(size=(rows, WIDTH))


def run_whole(layers: list[Layer], x: Array, y: Array) -> tuple[float, Array]:
    saved = []
    h = x
    for layer in layers:
        h, kept = layer.forward(h)
        saved.append(kept)
    loss, gradient = square(h, y)
    for layer, kept in zip(reversed(layers), reversed(saved), strict=True):
        layer.add_gradients(kept, gradient)
        gradient = layer.of_input(kept, gradient)
    return loss, gradient


@pytest.mark.parametrize("checkpoint", [False, True])
@pytest.mark.parametrize("rows", [1, 6, 7])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_step_equals_the_unpipelined_layers(
    on_ranks: OnRanks, case: tuple[str, int, int], rows: int, checkpoint: bool
) -> None:
    schedule, num_ranks, per_rank = case
    placement = placement_for(schedule, num_ranks, per_rank)
    kind = DividedLayer if schedule == "zb_h1" else Layer
    x, y = batch(rows)

    def body(backend: Any) -> Any:
        layers = {s: kind(s) for s, rank in enumerate(placement) if rank == backend.rank}
        module: Any = list(layers.values()) if per_rank > 1 else next(iter(layers.values()))
        pipe = fd.Pipeline(module, backend, min(rows, 3), schedule, checkpoint=checkpoint)
        loss = pipe.step(x, y, square)
        return loss, layers, pipe.input_grad

    whole = [Layer(stage) for stage in range(len(placement))]
    loss, input_gradient = run_whole(whole, x, y)
    outcomes = on_ranks(num_ranks, body)
    for ours, layers, _ in outcomes:
        assert ours == pytest.approx(loss, rel=1e-12)
        for stage, layer in layers.items():
            for name, gradient in layer.grads().items():
                assert_allclose(gradient, whole[stage].grads()[name], rtol=1e-10)
    assert_allclose(outcomes[0][2], input_gradient, rtol=1e-10)
    assert all(gradient is None for _, _, gradient in outcomes[1:])


def test_microbatch_without_weight_may_have_no_loss(on_ranks: OnRanks) -> None:
    x, y = batch(4)

    def undefined_first(output: Array, target: Array) -> tuple[float, Array]:
        loss, gradient = square(output, target)
        factor = np.nan if np.array_equal(target, y[:2]) else 1.0
        return factor * loss, factor * gradient

    def body(backend: Any) -> Any:
        layer = Layer(backend.rank)
        pipe = fd.Pipeline(layer, backend, 2)
        loss = pipe.step(x, y, undefined_first, weight=[0, 3] if backend.rank == 1 else None)
        return loss, layer.grads()

    whole = [Layer(0), Layer(1)]
    expected, _ = run_whole(whole, x[2:], y[2:])
    for (loss, gradients), layer in zip(on_ranks(2, body), whole, strict=True):
        assert loss == pytest.approx(expected, rel=1e-12)
        for name, gradient in gradients.items():
            assert_allclose(gradient, layer.grads()[name], rtol=1e-10)


class Loss:
    """The mean square of its input; of the kind that is given."""

    def __init__(self, kind: Callable[[Any], Any]) -> None:
        self.kind = kind

    def forward(self, x: Array) -> tuple[Any, Any]:
        return self.kind((x**2).mean()), x

    def backward(self, x: Array, gradient: Array) -> Array:
        product: Array = 2 * x / x.size * gradient
        return product


@pytest.mark.parametrize("kind", [float, np.float64, np.asarray, np.atleast_1d])
@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1"])
def test_last_stage_may_return_the_loss(
    on_ranks: OnRanks, schedule: str, kind: Callable[[Any], Any]
) -> None:
    x, _ = batch(7)

    def body(backend: Any) -> Any:
        module: Any = Loss(kind) if backend.rank == 1 else Layer(0)
        return fd.Pipeline(module, backend, 3, schedule).step(x), module

    whole = Layer(0)
    y, saved = whole.forward(x)
    whole.add_gradients(saved, 2 * y / y.size)
    (loss, layer), (same_loss, _) = on_ranks(2, body)
    assert loss == same_loss == pytest.approx((y**2).mean(), rel=1e-12)
    for name, gradient in layer.grads().items():
        assert_allclose(gradient, whole.grads()[name], rtol=1e-10)


def test_last_stage_that_returns_no_loss_is_told(on_ranks: OnRanks) -> None:
    def body(backend: Any) -> None:
        with pytest.raises(fd.StageFailed, match=r"without a loss_fn, .* not float64 of shape"):
            fd.Pipeline(Layer(0), backend, 2).step(batch(4)[0])

    on_ranks(2, body)


def test_loss_fn_is_given_a_number_as_it_is(on_ranks: OnRanks) -> None:
    def loss_fn(output: Any) -> Any:
        assert type(output) is float
        return output, 1.0

    def body(backend: Any) -> Any:
        module: Any = Loss(float) if backend.rank else Layer(0)
        module.backward = lambda saved, _: np.zeros((2, WIDTH))
        return fd.Pipeline(module, backend, 2).step(batch(4)[0], loss_fn=loss_fn)

    assert len(set(on_ranks(2, body))) == 1


def test_stage_may_be_written_in_c(on_ranks: OnRanks) -> None:
    class Pair:
        forward = operator.itemgetter(0, 1)  # python cannot tell its parameters

        def backward(self, saved: Array, gradient: Array) -> Any:
            return gradient, None

    x, y = batch(4)

    def body(backend: Any) -> Any:
        module: Any = Layer(0) if backend.rank else Pair()
        return fd.Pipeline(module, backend, 2).step((x, x), y, square)

    expected, _ = run_whole([Layer(0)], x, y)
    assert on_ranks(2, body) == pytest.approx([expected] * 2)


def test_trees_and_random_numbers(on_ranks: OnRanks) -> None:
    class Drops:
        def forward(self, x: Any, rng: Any) -> Any:
            mask = rng.random(x["h"].shape) < 0.5
            return {**x, "h": x["h"] * mask, "drawn": float(mask.mean())}, mask

        def backward(self, mask: Any, gradient: Any) -> Any:
            assert gradient["drawn"] is None
            assert gradient["ids"] is None
            return {"h": gradient["h"] * mask}

    def loss(output: Any) -> Any:
        return output["h"].sum(), {"h": np.ones_like(output["h"]), "ids": None, "drawn": None}

    def body(backend: Any, schedule: str) -> Any:
        pipe = fd.Pipeline(Drops(), backend, 3, schedule, seed=5)
        x = {"h": np.ones((6, 8)), "ids": np.arange(6), "none": None}
        return pipe.step(x, loss_fn=loss), pipe.input_grad

    outcomes = [on_ranks(2, body, schedule) for schedule in ("gpipe", "1f1b", "zb_h1")]
    losses = {loss for ranks in outcomes for loss, _ in ranks}
    assert len(losses) == 1
    masks = [ranks[0][1]["h"] for ranks in outcomes]
    assert_allclose(masks[0], masks[1])
    assert_allclose(masks[0], masks[2])
    assert 0 < masks[0].mean() < masks[0].max()
    assert outcomes[0][0][1]["ids"] is None


def test_forward_that_runs_twice_without_a_seed_draws_the_same_numbers(on_ranks: OnRanks) -> None:
    class Drops:
        def __init__(self) -> None:
            self.masks: list[Array] = []

        def forward(self, x: Any, rng: Any) -> Any:
            self.masks.append(rng.random(x.shape) < 0.5)
            return x * self.masks[-1], self.masks[-1]

        def backward(self, mask: Any, gradient: Any) -> Any:
            return gradient * mask

    def body(backend: Any) -> Any:
        stage = Drops()
        pipe = fd.Pipeline(stage, backend, 2, "gpipe", seed=None, checkpoint=True)
        pipe.step(np.ones((2, 512)), loss_fn=lambda y: (y.sum(), np.ones_like(y)))
        return [mask.tobytes() for mask in stage.masks]

    for masks in on_ranks(2, body):
        assert sorted(masks[:2]) == sorted(masks[2:])
        assert masks[0] != masks[1]


class Chain:
    """Layers one after the other."""

    def __init__(self, layers: list[Layer]) -> None:
        self.layers = layers

    def forward(self, x: Array) -> tuple[Array, Any]:
        saved = []
        for layer in self.layers:
            x, kept = layer.forward(x)
            saved.append(kept)
        return x, saved

    def backward(self, saved: Any, gradient: Array) -> Array:
        for layer, kept in zip(reversed(self.layers), reversed(saved), strict=True):
            gradient = layer.backward(kept, gradient)
        return gradient


def test_plan_before_the_first_step_leaves_what_is_in_a_stage(on_ranks: OnRanks) -> None:
    def body(backend: Any) -> None:
        layers = [Layer(0), Layer(1)]
        gradients = [layer.gradients["weight"] for layer in layers]
        stage = Chain(layers)
        pipe = fd.Pipeline(stage, backend, 2)
        pipe.plan(*batch(4), square)
        assert stage.layers is layers
        assert not any(gradient.any() for gradient in gradients)
        pipe.step(*batch(4), square)
        assert all(gradient.any() for gradient in gradients)

    on_ranks(2, body)


def test_eval_puts_outputs_together(on_ranks: OnRanks) -> None:
    x, _ = batch(7)

    def body(backend: Any) -> Any:
        return fd.Pipeline(Layer(backend.rank), backend, 3).eval(x)

    expected = Layer(1).forward(Layer(0).forward(x)[0])[0]
    nothing, output = on_ranks(2, body)
    assert nothing is None
    assert_allclose(output, expected)


@pytest.mark.parametrize(
    ("forward", "loss_fn", "words"),
    [
        (lambda self, x: x, square, "must return \\(output, saved\\)"),
        (lambda self, x: (x.astype(">f8"), x), square, r"InvalidArray in stage 0, microbatch 0"),
        (Layer.forward, lambda o, t: 0.0, "must return \\(loss, gradient\\)"),
        (Layer.forward, lambda o, t: (o - t, o), r"one real number, not float64 of shape \(2, 4\)"),
        (Layer.forward, lambda o, t: (np.complex64(1), o), "one real number, not complex64"),
        (Layer.forward, lambda o, t: (None, o), "one real number, not a NoneType"),
        (Layer.forward, lambda o, t: (0.0, o[0]), r"shape \(4,\) for an output of shape \(2, 4\)"),
        (Layer.forward, lambda o, t: (0.0, (o,)), "loss_fn returned a tuple where"),
    ],
)
def test_contract_that_is_not_kept_is_told(
    on_ranks: OnRanks, forward: Any, loss_fn: Any, words: str
) -> None:
    kind = type("Odd", (Layer,), {"forward": forward})

    def body(backend: Any) -> None:
        with pytest.raises(fd.StageFailed, match=words):
            fd.Pipeline(kind(0), backend, 2, "1f1b").step(*batch(4), loss_fn)

    on_ranks(2, body)


def test_checkpointed_module_may_write_into_its_input(on_ranks: OnRanks) -> None:
    class InPlace(Layer):
        def forward(self, x: Array) -> tuple[Array, Any]:
            np.tanh(x, out=x)
            return super().forward(x)

        def of_input(self, saved: Any, gradient: Array) -> Array:
            product: Array = super().of_input(saved, gradient) * (1 - saved[0] ** 2)
            return product

    def body(backend: Any, checkpoint: bool) -> Any:
        layer = InPlace(backend.rank)
        pipe = fd.Pipeline(layer, backend, 2, "1f1b", checkpoint=checkpoint)
        return pipe.step(*batch(4), square), layer.grads()["weight"]

    for kept, again in zip(on_ranks(2, body, False), on_ranks(2, body, True), strict=True):
        assert kept[0] == again[0]
        assert_allclose(kept[1], again[1])


def of_another_byte_order(weight: Array) -> Array:
    return weight.astype(">f8")


def read_only(weight: Array) -> Array:
    weight.flags.writeable = False
    return weight


@pytest.mark.parametrize("change", [of_another_byte_order, read_only])
@pytest.mark.parametrize("use", ["tied", "dp"])
def test_weight_that_cannot_be_shared_is_told_on_every_rank(
    on_ranks: OnRanks, use: str, change: Callable[[Array], Array]
) -> None:
    def body(backend: Any) -> str:
        with fd.RankGrid(backend, pipeline=2) as grid:
            layer = Layer(0)
            if backend.rank == 3:
                layer.weights["weight"] = change(layer.weights["weight"])
            options: Any = {"dp": grid.data} if use == "dp" else {"tied": {"w": "weight"}}
            pipe = fd.Pipeline(layer, grid.pipeline, 2, **options)
            if use == "tied" and grid.data.rank == 0:
                pipe.step(*batch(4), square)
                return ""
            with pytest.raises(fd.InvalidArray) as caught:
                pipe.step(*batch(4), square)
            return str(caught.value)

    assert len(set(on_ranks(4, body)) - {""}) == 1


class LostInTie(Layer):
    """Cannot tell its gradients once a backward has run."""

    has_run = False

    def backward(self, saved: Any, gradient: Array) -> Array:
        self.has_run = True
        return super().backward(saved, gradient)

    def grads(self) -> dict[str, Array]:
        if self.has_run:
            raise ZeroDivisionError("the stage's own words")
        return super().grads()


class OwnParameters(Layer):
    """Nothing is tied, so that nobody asks for arrays."""

    def parameters(self) -> Any:
        return [object(), 0.5, *self.weights.values()]


@pytest.mark.parametrize("has_one_gradient", [False, True])
def test_stages_of_a_rank_may_share_a_weight_and_its_gradient(
    on_ranks: OnRanks, has_one_gradient: bool
) -> None:
    def body(backend: Any) -> Any:
        with fd.RankGrid(backend, pipeline=2) as grid:
            first, second = Layer(0), Layer(0)
            second.weights = first.weights
            if has_one_gradient:
                second.gradients = first.gradients
            schedule = "interleaved_1f1b"
            pipe = fd.Pipeline([first, second], grid.pipeline, 2, schedule, dp=grid.data)
            x, y = batch(4)
            pipe.step((grid.data.rank + 1) * x, y, square)
            total = first.gradients["weight"].copy()
            if not has_one_gradient:
                total += second.gradients["weight"]
            fd.allreduce(total, grid.pipeline, out=total)
            return total

    layers = [Layer(0) for _ in range(4)]
    x, y = batch(4)
    for factor in (1, 2):
        run_whole(layers, factor * x, y)
    expected = sum(layer.gradients["weight"] for layer in layers) / 2
    for total in on_ranks(4, body):
        assert_allclose(total, expected, rtol=1e-12)


class Views(Layer):
    """Makes its arrays when it is asked for them, each row of the weight as one."""

    def parameters(self) -> Any:
        return [*self.weights["weight"], self.weights["bias"]]

    def grads(self) -> Any:
        return [*self.gradients["weight"], self.gradients["bias"]]


def test_gradients_may_be_views_of_a_moment(on_ranks: OnRanks) -> None:
    def body(backend: Any) -> Any:
        with fd.RankGrid(backend, pipeline=2) as grid:
            stage = Views(0)
            pipe = fd.Pipeline(stage, grid.pipeline, 2, dp=grid.data)
            x, y = batch(4)
            pipe.step((grid.data.rank + 1) * x, y, square)
            for gradient in stage.gradients.values():
                assert_array_equal(*fd.all_gather(gradient[None], grid.data))

    on_ranks(4, body)


def copies(arrays: dict[str, Array]) -> dict[str, Array]:
    return {name: array.copy() for name, array in arrays.items()}


@pytest.mark.parametrize(
    ("method", "returned", "words"),
    [
        ("grads", copies, "makes a new array for '.*' at each call, where"),
        ("parameters", copies, "makes a new array for '.*' at each call, where"),
        ("grads", lambda _: {}, "^Pipeline: grads.. of stage 0 lacks 'weight'"),
        ("grads", dict.fromkeys, "^Pipeline: grads.. of stage 0 lacks 'weight'"),
        ("parameters", dict.fromkeys, "^None is not an array"),
        ("grads", lambda _: None, "^Pipeline: grads.. of Odd must return .* not NoneType"),
    ],
)
@pytest.mark.parametrize("use", ["tied", "dp"])
def test_arrays_that_cannot_be_written_to_are_told_on_every_rank(
    on_ranks: OnRanks, use: str, method: str, returned: Callable[[Any], Any], words: str
) -> None:
    whole = getattr(Layer, method)
    kind = type("Odd", (Layer,), {method: lambda self: returned(whole(self))})

    def body(backend: Any) -> str:
        with fd.RankGrid(backend, pipeline=2) as grid:
            options: Any = {"dp": grid.data} if use == "dp" else {"tied": {"w": "weight"}}
            layer = kind(0) if grid.pipeline.rank == 0 else Layer(0)
            pipe = fd.Pipeline(layer, grid.pipeline, 2, **options)
            with pytest.raises((TypeError, ValueError), match=words) as caught:
                pipe.step(*batch(4), square)
            return str(caught.value)

    assert len(set(on_ranks(4, body))) == 1


def test_parameters_that_are_no_method_are_told_to_replicas(on_ranks: OnRanks) -> None:
    kind = type("Odd", (Layer,), {"parameters": property(Layer.parameters)})

    def body(backend: Any) -> None:
        with fd.RankGrid(backend, pipeline=2) as grid:
            pipe = fd.Pipeline(kind(0), grid.pipeline, 2, dp=grid.data)
            with pytest.raises(TypeError, match=r"Odd\.parameters must be a method, not dict"):
                pipe.step(*batch(4), square)

    on_ranks(4, body)


def test_replicas_may_have_a_stage_without_weights(on_ranks: OnRanks) -> None:
    def body(backend: Any) -> Any:
        with fd.RankGrid(backend, pipeline=2) as grid:
            module: Any = Loss(float) if grid.pipeline.rank else Layer(0)
            pipe = fd.Pipeline(module, grid.pipeline, 2, dp=grid.data)
            return pipe.step(batch(4)[0])

    assert len(set(on_ranks(4, body))) == 1


def test_gradients_may_be_of_a_dtype_that_does_not_travel(on_ranks: OnRanks) -> None:
    def body(backend: Any) -> Any:
        layer = Layer(0)
        layer.gradients["weight"] = layer.gradients["weight"].astype(np.longdouble)
        with fd.RankGrid(backend, pipeline=2) as grid:
            pipe = fd.Pipeline(layer, grid.pipeline, 2, dp=grid.data)
            x, y = batch(4)
            pipe.step((grid.data.rank + 1) * x, y, square)
            assert_array_equal(
                *fd.all_gather(layer.gradients["weight"].astype(float)[None], grid.data)
            )

    on_ranks(4, body)


class Many:
    """A stage of weights that count nothing; it counts how often it is asked for gradients."""

    def __init__(self, num_weights: int) -> None:
        self.weights = {str(number): np.ones(2) for number in range(num_weights)}
        self.gradients = {name: np.zeros(2) for name in self.weights}
        self.num_calls = 0

    def parameters(self) -> dict[str, Array]:
        return self.weights

    def grads(self) -> dict[str, Array]:
        self.num_calls += 1
        return self.gradients

    def forward(self, x: Array) -> Any:
        return x, None

    def backward(self, saved: None, gradient: Array) -> Any:
        return gradient


def test_gradients_are_asked_for_as_often_however_many_there_are(on_ranks: OnRanks) -> None:
    def body(backend: Any) -> set[int]:
        with fd.RankGrid(backend, pipeline=2) as grid:
            counts = set()
            for stage in Many(2), Many(9):
                pipe = fd.Pipeline(stage, grid.pipeline, 2, dp=grid.data)
                for _ in range(2):
                    stage.num_calls = 0
                    pipe.step(np.ones((4, 3)), loss_fn=lambda y: (1.0, np.ones_like(y)))
                counts.add(stage.num_calls)
            return counts

    assert [len(counts) for counts in on_ranks(4, body)] == [1] * 4


def test_parameters_of_any_kind_are_left_alone(on_ranks: OnRanks) -> None:
    def body(backend: Any) -> float:
        pipe = fd.Pipeline(OwnParameters(backend.rank), backend, 2, "1f1b")
        return pipe.step(*batch(4), square)

    loss, _ = run_whole([Layer(0), Layer(1)], *batch(4))
    assert on_ranks(2, body) == pytest.approx([loss] * 2)


def test_failure_in_a_tie_reaches_the_others_and_leaves_gradients(on_ranks: OnRanks) -> None:
    def body(backend: Any) -> Any:
        layer = (Layer if backend.rank == 0 else LostInTie)(backend.rank)
        layer.gradients["weight"] += 1e6
        pipe = fd.Pipeline(layer, backend, 2, "1f1b", tied={"weight": "weight"})
        with pytest.raises((fd.DistributedError, ZeroDivisionError)) as caught:
            pipe.step(*batch(4), square)
        return type(caught.value), layer.gradients["weight"].min()

    (error, of_first), (own, _) = on_ranks(2, body)
    assert issubclass(error, fd.DistributedError)
    assert own is ZeroDivisionError
    assert of_first > 9e5, "what was there before the step is there again"


def test_received_memory_is_used_again_but_never_while_somebody_looks(on_ranks: OnRanks) -> None:
    class Keeps:
        def __init__(self) -> None:
            self.kept: list[Array] = []

        def forward(self, x: Array) -> Any:
            self.kept.append(x[::2, 1:])
            return x + 1, None

        def backward(self, saved: Any, gradient: Array) -> Array:
            return gradient

    x = np.arange(8.0)[:, None] * np.ones((8, 10_000))

    def body(backend: Any) -> Any:
        stage = Keeps()
        pipe = fd.Pipeline(stage, backend, 4, "1f1b")
        for _ in range(3):
            pipe.step(x, x, square)
        return [float(part[0, 0]) for part in stage.kept], [float(p.std()) for p in stage.kept]

    values, spreads = on_ranks(2, body)[1]
    assert values == [1.0, 3.0, 5.0, 7.0] * 3
    assert spreads == [0.0] * 12


# Processes


class Dying(Layer):
    def __init__(self, seed: int, at: int) -> None:
        super().__init__(seed)
        self.left = at

    def forward(self, x: Array) -> tuple[Array, Any]:
        self.left -= 1
        if self.left < 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().forward(x)


def _lose_a_rank(backend: Any, schedule: str, victim: int, at: int) -> Any:
    stage = Dying(0, at) if backend.rank == victim else Layer(0)
    pipe = fd.Pipeline(stage, backend, 4, schedule)
    try:
        pipe.step(*batch(8), square)
    except fd.DistributedError as error:
        return type(error).__name__, error.peer
    return "no error"


@pytest.mark.parametrize("kind", ["host", "tcp"])
@pytest.mark.parametrize(("victim", "at"), [(0, 0), (1, 1), (2, 3)])
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb_h1"])
def test_dead_stage_is_a_lost_peer_on_every_other_rank(
    schedule: str, victim: int, at: int, kind: str
) -> None:
    outcomes = run_ranks(3, _lose_a_rank, schedule, victim, at, backend=kind, may_die=[victim])
    assert outcomes[victim] == RankDeath(-signal.SIGKILL)
    survivors = [outcome for rank, outcome in enumerate(outcomes) if rank != victim]
    assert survivors == [("PeerLostError", victim)] * 2


def _error_of_step(pipe: Any) -> tuple[str, int | None, str]:
    with pytest.raises(fd.DistributedError) as caught:
        pipe.step(*batch(8), square)
    return type(caught.value).__name__, caught.value.peer, str(caught.value)


def _lose_a_rank_of_a_grid(backend: Any, victim: int) -> Any:
    with fd.RankGrid(backend, pipeline=2) as grid:
        stage = Dying(0, 1) if backend.rank == victim else Layer(0)
        pipe = fd.Pipeline(stage, grid.pipeline, 4, "1f1b", dp=grid.data)
        told = [_error_of_step(pipe) for _ in range(2)]
        with contextlib.suppress(fd.DistributedError):
            # Whoever leaves first would tell the others of another end.
            fd.barrier(backend)
    return told


@pytest.mark.parametrize("victim", [0, 3])
def test_dead_stage_is_told_in_every_pipeline_of_a_grid(victim: int) -> None:
    outcomes = run_ranks(4, _lose_a_rank_of_a_grid, victim, may_die=[victim])
    for rank, told in enumerate(outcomes):
        if rank == victim:
            continue
        assert [kind for kind, _, _ in told] == ["PeerLostError"] * 2  # nor is it a stage's later
        for _, peer, message in told:
            where = rank // 2 == victim // 2, rank % 2 == victim % 2
            named = {(True, False): victim % 2, (False, True): victim // 2, (False, False): None}
            assert peer == named[where], message
            assert "died" in message


def _wait_for_nobody(backend: Any) -> str:
    pipe = fd.Pipeline(Layer(0), backend, 2, "1f1b")
    pipe.step(*batch(4), square)
    try:
        if backend.rank == 1:
            fd.barrier(backend)  # which rank 0 is not in
        backend.timeout = 0.5
        pipe.step(*batch(4), square)
    except fd.DistributedError as error:
        return type(error).__name__
    return "no error"


def test_rank_that_does_not_come_is_a_timeout() -> None:
    assert run_ranks(2, _wait_for_nobody)[0] == "Timeout"


class NarrowGradient(Layer):
    """Its backward forgets an axis, which the stage before would broadcast."""

    def of_input(self, saved: Any, gradient: Array) -> Array:
        narrow: Array = super().of_input(saved, gradient).sum(axis=1, keepdims=True)
        return narrow


class NamedOutput(Layer):
    """Its output, and the gradient of its input, go by names."""

    def forward(self, x: Any) -> tuple[Any, Any]:
        y, saved = super().forward(x["h"] if isinstance(x, dict) else x)
        return {"h": y}, saved

    def backward(self, saved: Any, gradient: Any) -> Any:
        return {"misnamed": super().backward(saved, gradient["h"])}


def square_of_named(output: Any, target: Array) -> tuple[float, Any]:
    loss, gradient = square(output["h"], target)
    return loss, {"h": gradient}


@pytest.mark.parametrize(
    ("kind", "loss_fn", "words"),
    [
        (NarrowGradient, square, r"gradient of shape \(3, 1\) for an input of shape \(3, 4\)"),
        (NamedOutput, square_of_named, r"gradients of \['misnamed'\] for a dict of \['h'\]"),
    ],
)
def test_gradients_that_do_not_fit_are_told(
    on_ranks: OnRanks, kind: type[Layer], loss_fn: Any, words: str
) -> None:
    x, y = batch(6)

    def body(backend: Any) -> None:
        pipe = fd.Pipeline(kind(backend.rank), backend, 2, "gpipe")
        with pytest.raises((ValueError, RuntimeError), match=words):
            pipe.step(x, y, loss_fn)

    on_ranks(2, body)
