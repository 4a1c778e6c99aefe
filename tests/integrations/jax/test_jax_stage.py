"""Stages that are JAX functions."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from numpy.testing import assert_allclose
from ranks_as_threads import OnRanks

jax = pytest.importorskip("jax", reason="jax is not installed")
jnp = jax.numpy

import ferro_dist as fd  # noqa: E402
from ferro_dist.integrations.jax.stage import JaxStage  # noqa: E402
from ferro_dist.interop import jax_full_width  # noqa: E402
from ferro_dist.parallel.pipeline.stage import make_stage  # noqa: E402
from ferro_dist.parallel.schedules import placement_for  # noqa: E402

WIDTH = 4
CASES = [
    ("gpipe", 2, 1),
    ("1f1b", 3, 1),
    ("zb_h1", 3, 1),
    ("interleaved_1f1b", 2, 2),
    ("zb_v", 2, 2),
]


def make_params(stage: int) -> Any:
    rng = np.random.default_rng(stage)
    weight = jnp.asarray(rng.normal(size=(WIDTH, WIDTH)), jnp.float32)
    return {"weight": weight, "bias": jnp.zeros(WIDTH)}


def apply(params: Any, x: Any) -> Any:
    if not isinstance(x, dict):
        x = {"h": x, "unused": x * 2, "ids": jnp.arange(len(x)), "none": None, "count": 0}
    h = jnp.tanh(x["h"] @ params["weight"] + params["bias"]) + x["ids"][:, None] * 0
    assert isinstance(x["count"], int)
    return {**x, "h": h, "count": x["count"] + 1}


class Handwritten:
    def forward(self, x: Any) -> Any:
        return x, None

    def backward(self, saved: Any, gradient: Any) -> Any:
        return gradient


def loss_fn(output: Any, target: Any) -> Any:
    return ((output["h"] - target) ** 2).mean() * output["count"]


def batch(rows: int) -> Any:
    rng = np.random.default_rng(9)
    x, y = rng.normal(size=(2, rows, WIDTH)).astype(np.float32)
    return jnp.asarray(x), jnp.asarray(y)


@pytest.mark.parametrize("checkpoint", [False, True])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_step_equals_jax_grad(
    on_ranks: OnRanks, case: tuple[str, int, int], checkpoint: bool
) -> None:
    schedule, num_ranks, per_rank = case
    placement = placement_for(schedule, num_ranks, per_rank)
    params = [make_params(stage) for stage in range(len(placement))]
    x, y = batch(7)

    def whole(params: Any, x: Any) -> Any:
        for own in params:
            x = apply(own, x)
        return loss_fn(x, y)

    def body(backend: Any) -> Any:
        stages = {
            s: JaxStage(apply, params[s])
            for s, rank in enumerate(placement)
            if rank == backend.rank
        }
        module: Any = list(stages.values()) if per_rank > 1 else next(iter(stages.values()))
        pipe = fd.Pipeline(module, backend, 3, schedule, checkpoint=checkpoint)
        losses = [pipe.step(x, y, loss_fn) for _ in range(2)]
        return losses, {s: stage.grads for s, stage in stages.items()}, pipe.input_grad

    loss, (gradients, of_input) = jax.value_and_grad(whole, argnums=(0, 1))(params, x)
    outcomes = on_ranks(num_ranks, body)
    for losses, own, _ in outcomes:
        assert losses == pytest.approx([float(loss)] * 2, rel=1e-5)
        for stage, ours in own.items():
            for name, gradient in ours.items():
                theirs = 2 * gradients[stage][name]  # of two steps
                assert_allclose(gradient, theirs, rtol=1e-4, atol=1e-6)
    assert_allclose(outcomes[0][2], of_input, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("schedule", "libraries"), [("1f1b", "jax torch jax"), ("zb_v", "torch jax jax torch")]
)
def test_complex_gradients_pass_between_jax_and_torch(
    on_ranks: OnRanks, schedule: str, libraries: str
) -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed")
    rng = np.random.default_rng(3)
    weights = 0.3 * (rng.normal(size=(4, WIDTH, WIDTH)) + 1j * rng.normal(size=(4, WIDTH, WIDTH)))
    x = (rng.normal(size=(6, WIDTH)) + 1j * rng.normal(size=(6, WIDTH))).astype(np.complex64)

    class Sine(torch.nn.Module):  # type: ignore[name-defined]
        def __init__(self, weight: Any) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.tensor(weight, dtype=torch.complex64))

        def forward(self, x: Any) -> Any:
            return torch.sin(x @ self.weight) / 4

    def sine(weight: Any, x: Any) -> Any:
        return jnp.sin(x @ weight) / 4

    def loss_fn(output: Any) -> Any:
        return (output.real**2).mean() + 2 * output.imag.mean()

    def part(stage: int, library: str) -> Any:
        weight = weights[stage].astype(np.complex64)
        return Sine(weight) if library == "torch" else JaxStage(sine, jnp.asarray(weight))

    of_stage = libraries.split()
    num_ranks = 2 if schedule == "zb_v" else 3
    placement = placement_for(schedule, num_ranks)

    def body(backend: Any) -> Any:
        own = {s: part(s, of_stage[s]) for s, rank in enumerate(placement) if rank == backend.rank}
        pipe = fd.Pipeline(list(own.values()), backend, 2, schedule)
        pipe.step(torch.tensor(x) if of_stage[0] == "torch" else x, loss_fn=loss_fn)
        gradients = {
            s: stage.grads if isinstance(stage, JaxStage) else stage.weight.grad.numpy().conj()
            for s, stage in own.items()
        }
        return gradients, pipe.input_grad

    def whole(weights: Any, x: Any) -> Any:
        for weight in weights[: len(of_stage)]:
            x = sine(weight, x)
        return loss_fn(x)

    expected, of_input = jax.grad(whole, argnums=(0, 1))(jnp.asarray(weights, jnp.complex64), x)
    outcomes = on_ranks(num_ranks, body)
    for gradients, _ in outcomes:
        for stage, gradient in gradients.items():
            assert_allclose(gradient, expected[stage], rtol=1e-3, atol=1e-6)
    if of_stage[0] == "jax":  # torch gives no gradient of tensors that ask for none
        assert_allclose(outcomes[0][1], of_input, rtol=1e-3, atol=1e-6)


def test_stages_of_two_libraries_are_not_neighbours_on_one_rank() -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed")
    group = fd.SimulatedBackend.create_group(2)
    stages = [torch.nn.Identity(), JaxStage(apply, {})]
    with group[1] as backend, group[0]:
        with pytest.raises(TypeError, match="first is of torch and the second of JAX"):
            fd.Pipeline(stages, backend, 2, "zb_v")
        fd.Pipeline(stages, backend, 2, "interleaved_1f1b")
        fd.Pipeline([stages[0], Handwritten()], backend, 2, "zb_v")  # it may well take tensors


def test_a_complex_weight_is_tied_between_jax_and_torch(on_ranks: OnRanks) -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed")
    start = np.array([0.5 + 0.3j, 0.2 - 0.7j], np.complex64)
    x = np.array([[1 + 2j, 0.4 - 1j], [0.3j, 1 - 1j]], np.complex64)

    def scale(weight: Any, x: Any) -> Any:
        return x * weight

    def loss_fn(output: Any) -> Any:
        return (output.real**2).mean() + 2 * output.imag.mean()

    class Scale(torch.nn.Module):  # type: ignore[name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.tensor(start))

        def forward(self, x: Any) -> Any:
            return x * self.weight

    def body(backend: Any) -> Any:
        stage: Any = Scale() if backend.rank else JaxStage(scale, jnp.asarray(start))
        weight = stage.weight if backend.rank else stage.params
        with fd.Pipeline([stage], backend, 2, "1f1b", tied={"weight": weight}) as pipe:
            pipe.step(x, loss_fn=loss_fn)
        return stage.weight.grad.numpy().conj() if backend.rank else stage.grads

    expected = jax.grad(lambda weight: loss_fn(scale(weight, scale(weight, x))))(jnp.asarray(start))
    for gradient in on_ranks(2, body):
        assert_allclose(gradient, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("x", "loss_fn", "words"),
    [
        ([[1.0]], loss_fn, "input holds no array"),
        (memoryview(b"ab"), loss_fn, "not builtins.memoryview"),
        (np.ma.ones((4, WIDTH), np.float32), loss_fn, "input is masked, and would lose its mask"),
        (np.ones((4, WIDTH), np.float32), lambda o, y: o["h"] - y, "one element, not one of shape"),
        (np.ones((4, WIDTH), np.float32), lambda o, y: 1.0, "one element, not a float"),
    ],
)
def test_what_jax_cannot_differentiate_is_told(
    on_ranks: OnRanks, x: Any, loss_fn: Any, words: str
) -> None:
    def body(backend: Any) -> None:
        pipe = fd.Pipeline(JaxStage(apply, make_params(0)), backend, 2)
        with pytest.raises((TypeError, ValueError, fd.StageFailed), match=words):
            pipe.step(x, jnp.ones((4, WIDTH)), loss_fn)

    on_ranks(2, body)


def test_parameters_that_have_no_gradient_are_told() -> None:
    with pytest.raises(TypeError, match=r"params\['count'\] is int32, which has no gradient"):
        JaxStage(apply, {**make_params(0), "count": 3})
    with pytest.raises(TypeError, match=r"params\['activation'\] is a function, which has no"):
        JaxStage(apply, {**make_params(0), "activation": apply})


def test_one_stage_may_stand_in_two_places(on_ranks: OnRanks) -> None:
    def body(backend: Any) -> Any:
        with fd.RankGrid(backend, pipeline=2) as grid:
            stage = JaxStage(apply, make_params(0))
            dp = None if backend.world_size == 2 else grid.data
            pipe = fd.Pipeline([stage, stage], grid.pipeline, 2, "interleaved_1f1b", dp=dp)
            pipe.step(x, y, loss_fn)
            pipe.plan()
            return stage.grads

    x, y = batch(4)

    def whole(params: Any) -> Any:
        h = x
        for stage in range(4):
            h = apply(params[stage % 2], h)
        return loss_fn(h, y)

    gradients = jax.grad(whole)([make_params(0)] * 2)
    for num_ranks in (2, 4):
        for rank, ours in enumerate(on_ranks(num_ranks, body)):
            for name, gradient in gradients[rank % 2].items():
                assert_allclose(ours[name], gradient, rtol=1e-4, atol=1e-6)


def test_microbatch_without_weight_may_have_no_loss(on_ranks: OnRanks) -> None:
    mask = np.array([0, 0, 1, 1], np.float32)

    def masked_mean(output: Any, mask: Any) -> Any:
        return ((output["h"] ** 2).sum(1) * mask).sum() / mask.sum()

    def body(backend: Any) -> Any:
        stage = JaxStage(apply, make_params(backend.rank))
        pipe = fd.Pipeline(stage, backend, 2)
        weight = mask if backend.rank == 1 else None
        return pipe.step(batch(4)[0], mask, masked_mean, weight=weight), stage.grads

    def whole(params: Any) -> Any:
        return masked_mean(apply(params[1], apply(params[0], batch(4)[0])), mask)

    expected, gradients = jax.value_and_grad(whole)([make_params(0), make_params(1)])
    for (loss, ours), theirs in zip(on_ranks(2, body), gradients, strict=True):
        assert loss == pytest.approx(float(expected), rel=1e-5)
        for name, gradient in ours.items():
            assert_allclose(gradient, theirs[name], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("checkpoint", [False, True])
def test_pipelines_may_share_their_stages(on_ranks: OnRanks, checkpoint: bool) -> None:
    """One does not touch what another keeps, whatever place a stage has in it."""
    x, y = batch(4)

    def body(backend: Any) -> Any:
        stages = [JaxStage(apply, make_params(backend.rank + s)) for s in (0, 2)]
        pipe = fd.Pipeline(stages[1], backend, 2, checkpoint=checkpoint)
        outputs = pipe.forward(x)
        two = fd.Pipeline(stages, backend, 2, "interleaved_1f1b", checkpoint=not checkpoint)
        loss = two.step(x, y, loss_fn)
        stages[1].grads = None
        pipe.backward(outputs, [{"h": jnp.ones((2, WIDTH))} for _ in outputs])
        return loss, stages[1].grads

    def run(params: Any, h: Any) -> Any:
        for each in params:
            h = apply(each, h)
        return h

    expected = loss_fn(run([make_params(s) for s in range(4)], x), y)
    last = [make_params(2), make_params(3)]
    gradients = jax.grad(lambda params: run(params, x)["h"].sum())(last)
    for (loss, ours), theirs in zip(on_ranks(2, body), gradients, strict=True):
        assert loss == pytest.approx(float(expected), rel=1e-5)
        for name, gradient in theirs.items():
            assert_allclose(ours[name], gradient, rtol=1e-4, atol=1e-6)


def test_gradients_may_come_in_another_precision(on_ranks: OnRanks) -> None:
    def body(backend: Any) -> Any:
        stage = JaxStage(lambda scale, x: x * scale, jnp.ones((), jnp.bfloat16))
        pipe = fd.Pipeline(stage, backend, 2)
        outputs = pipe.forward(jnp.ones((4, WIDTH), jnp.bfloat16))
        pipe.backward(outputs, [np.ones((2, WIDTH))] * 2)
        return stage.grads

    for gradient in on_ranks(2, body):
        assert gradient.dtype == jnp.bfloat16
        assert gradient == 4 * WIDTH


def test_numbers_are_as_wide_as_on_the_thread_that_calls(on_ranks: OnRanks) -> None:
    x, y = np.random.default_rng(1).normal(size=(2, 4, WIDTH))

    def body(backend: Any) -> Any:
        with jax_full_width():
            stage = JaxStage(lambda weight, x: jnp.tanh(x * weight), np.full(WIDTH, 0.3))
            loss = fd.Pipeline(stage, backend, 2).step(x, y, lambda h, y: ((h - y) ** 2).mean())
            return loss, str(stage.grads.dtype)

    expected = ((np.tanh(np.tanh(x * 0.3) * 0.3) - y) ** 2).mean()
    for loss, dtype in on_ranks(2, body):
        assert loss == pytest.approx(float(expected), rel=1e-14)
        assert dtype == "float64"


def test_keys_do_not_depend_on_the_schedule(on_ranks: OnRanks) -> None:
    def drop(params: Any, x: Any, rng: Any) -> Any:
        return x * jax.random.bernoulli(rng, 0.5, x.shape) * params["scale"]

    def body(backend: Any, schedule: str) -> Any:
        stage = JaxStage(drop, {"scale": jnp.ones(())})
        pipe = fd.Pipeline(stage, backend, 4, schedule)
        return [
            pipe.step(jnp.ones((8, 16)), loss_fn=lambda output: output.mean()) for _ in range(2)
        ]

    runs = [on_ranks(2, body, schedule)[0] for schedule in ("gpipe", "zb_h1")]
    assert runs[0] == runs[1]
    assert runs[0][0] != runs[0][1]


@pytest.mark.parametrize("checkpoint", [False, True])
def test_without_a_seed_each_forward_has_a_key_of_its_own(
    on_ranks: OnRanks, checkpoint: bool
) -> None:
    def drop(params: Any, x: Any, rng: Any) -> Any:
        return x * jax.random.bernoulli(rng, 0.5, x.shape) * params["scale"]

    def body(backend: Any) -> Any:
        stage = JaxStage(drop, {"scale": jnp.ones(())})
        pipe = fd.Pipeline(stage, backend, 2, seed=None, checkpoint=checkpoint)
        steps = []
        for _ in range(2):
            stage.grads = None
            loss = pipe.step(jnp.ones((2, 512)), loss_fn=jnp.mean)
            # The loss is the scale times the share of ones, where both stages have drawn one.
            assert stage.grads["scale"] == pytest.approx(loss)
            steps.append(pipe.input_grad)
        pipe.eval(jnp.ones((2, 512)))
        return steps

    masks = np.concatenate(on_ranks(2, body)[0]) != 0
    assert len({mask.tobytes() for mask in masks}) == 4


def test_keys_have_all_bits_of_a_seed() -> None:
    stage: Any = make_stage(JaxStage(lambda params, x, rng: x, {}))
    seeds = [7, 7 + (1 << 32), 7 + (1 << 62), (1 << 63) - 1]
    keys = [jax.random.key_data(stage._key(seed)).tobytes() for seed in seeds]
    assert len(set(keys)) == len(seeds)


def test_weights_that_begin_as_one_array_are_reduced_each(on_ranks: OnRanks) -> None:
    start = jnp.ones(WIDTH)

    def body(backend: Any) -> Any:
        with fd.RankGrid(backend, pipeline=2) as grid:
            stage = JaxStage(lambda p, x: x * p["a"] * p["b"], {"a": start, "b": start})
            pipe = fd.Pipeline(stage, grid.pipeline, 2, dp=grid.data)
            pipe.step(jnp.full((4, WIDTH), grid.data.rank + 1.0), loss_fn=jnp.mean)
            return [float(gradient.sum()) for gradient in stage.grads.values()]

    assert on_ranks(4, body) == [[1.5, 1.5]] * 4


@pytest.mark.parametrize("tied", [None, {"slope": "['slope']"}])
def test_weights_may_be_numbers(on_ranks: OnRanks, tied: Any) -> None:
    def body(backend: Any) -> Any:
        with fd.RankGrid(backend, pipeline=2) as grid:
            stage = JaxStage(lambda p, x: x * p["slope"] + p["shift"], {"slope": 1.0, "shift": 0.5})
            pipe = fd.Pipeline(stage, grid.pipeline, 2, dp=grid.data, tied=tied)
            pipe.step(jnp.full((4, 1), 2.0 * grid.data.rank), loss_fn=jnp.mean)
            return [float(stage.grads[name]) for name in ("slope", "shift")]

    of_slopes = [1.0, 1.5] if tied is None else [2.5, 2.5]  # the means of 0, 2 and of 0.5, 2.5
    assert on_ranks(4, body) == [[of_slopes[rank % 2], 1.0] for rank in range(4)]


def test_parameters_may_be_replaced_by_those_of_another_tree(on_ranks: OnRanks) -> None:
    def body(backend: Any) -> Any:
        with fd.RankGrid(backend, pipeline=2) as grid:
            # The first kind is in this order, the second in that of the alphabet.
            params = OrderedDict(b=jnp.ones(WIDTH), a=jnp.zeros(WIDTH))
            stage = JaxStage(lambda p, x: x * p["b"] + p["a"], params)
            pipe = fd.Pipeline(stage, grid.pipeline, 2, dp=grid.data, tied={"b": "['b']"})
            x = jnp.full((4, WIDTH), grid.data.rank + 1.0)
            totals = []
            for kind in (OrderedDict, dict):
                stage.params, stage.grads = kind(stage.params), None
                pipe.step(x, loss_fn=jnp.mean)
                totals.append([float(stage.grads[name].sum()) for name in "ab"])
            return totals

    assert on_ranks(4, body) == [[[1, 3], [1, 3]]] * 4


def test_checkpointed_stages_run_again_with_the_parameters_of_their_forward(
    on_ranks: OnRanks,
) -> None:
    def body(backend: Any, checkpoint: bool) -> Any:
        stage = JaxStage(apply, make_params(backend.rank))
        pipe = fd.Pipeline(stage, backend, 2, checkpoint=checkpoint)
        outputs = pipe.forward(batch(4)[0])
        stage.params = make_params(7)
        pipe.backward(outputs, [{"h": jnp.ones((2, WIDTH))} for _ in outputs])
        return stage.grads

    for ours, kept in zip(on_ranks(2, body, True), on_ranks(2, body, False), strict=True):
        for name, gradient in kept.items():
            assert_allclose(ours[name], gradient, rtol=1e-5, atol=1e-6)


def test_replicas_and_ties_reduce_gradients(on_ranks: OnRanks) -> None:
    params = make_params(0)
    x, y = batch(8)

    def body(backend: Any) -> Any:
        with fd.RankGrid(backend, pipeline=2) as grid:
            stage = JaxStage(apply, params if backend.rank == 0 else make_params(backend.rank))
            share = slice(4 * grid.data.rank, 4 * grid.data.rank + 4)
            tied = {"weight": "['weight']", "bias": "['bias']"}
            pipe = fd.Pipeline(stage, grid.pipeline, 2, "zb_h1", dp=grid.data, tied=tied)
            for _ in range(2):
                pipe.step(x[share], y[share], loss_fn)
            assert_allclose(stage.params["weight"], params["weight"])
            return stage.grads

    def whole(params: Any) -> Any:
        return loss_fn(apply(params, apply(params, x)), y)

    expected = jax.grad(whole)(params)
    for gradients in on_ranks(4, body):
        for name, gradient in gradients.items():
            assert_allclose(gradient, 2 * expected[name], rtol=1e-4, atol=1e-6)


def masked() -> Any:
    return np.ma.masked_less(np.zeros((WIDTH, WIDTH), np.float32), 1)


def abstract() -> Any:
    return jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.float32)


def deleted() -> Any:
    weight = jnp.zeros((WIDTH, WIDTH))
    weight.delete()
    return weight


@pytest.mark.parametrize(
    ("weight", "words"),
    [
        (masked, "is masked, and would lose its mask"),
        (abstract, "is a jax.*ShapeDtypeStruct, not an array"),
        (deleted, "was deleted, or donated to a computation"),
    ],
)
def test_weights_without_values_are_told_to_all_before_any_is_shared(
    on_ranks: OnRanks, weight: Callable[[], Any], words: str
) -> None:
    x, y = batch(4)

    def body(backend: Any) -> None:
        with fd.RankGrid(backend, pipeline=2) as grid:
            params = make_params(backend.rank)
            good = params["weight"]
            if backend.rank == 3:
                params["weight"] = weight()
            stage = JaxStage(apply, params)
            pipe = fd.Pipeline(stage, grid.pipeline, 2, dp=grid.data)
            with pytest.raises(fd.InvalidArray, match=rf"\['weight'\].* of stage 1 {words}"):
                pipe.step(x, y, loss_fn)
            stage.params = {**params, "weight": good}
            assert pipe.step(x, y, loss_fn) > 0

    on_ranks(4, body)
