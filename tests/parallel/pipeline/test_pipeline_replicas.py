"""Pipelines side by side: gradients of replicas are averaged while the pipelines drain."""

from __future__ import annotations

import copy
import threading
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from ranks_as_threads import OnRanks

torch = pytest.importorskip("torch", reason="torch is not installed")

from parallel.pipeline.pipeline_models import (  # noqa: E402 - needs torch
    WIDTH,
    Block,
    Case,
    assert_equal_gradients,
    batch,
    by_name,
    chain,
    gradients_of,
    make_pipeline,
    mean_square,
    run_whole,
)
from torch import nn  # noqa: E402

import ferro_dist as fd  # noqa: E402
from ferro_dist._launch.ranks import OF_A_STAGE, TRACEBACK  # noqa: E402
from ferro_dist.parallel.pipeline import outcome  # noqa: E402
from ferro_dist.parallel.pipeline.activation_channel import Receiver, Sender  # noqa: E402
from ferro_dist.parallel.pipeline.gradient_reduction import GradientReduction  # noqa: E402
from ferro_dist.parallel.pipeline.stage import Stage  # noqa: E402
from ferro_dist.parallel.schedules import ActionKind  # noqa: E402

CASES = [
    ("gpipe", 2, 1),
    ("1f1b", 2, 1),
    ("zb_h1", 2, 1),
    ("interleaved_1f1b", 2, 2),
    ("zb_v", 2, 2),
    ("zb_h1", 3, 1),
]


def run_on_grid(
    on_ranks: OnRanks, case: Case, model: nn.Sequential, body: Callable[..., Any], **options: Any
) -> list[Any]:
    def on_rank(backend: Any) -> Any:
        with fd.RankGrid(backend, pipeline=case.num_ranks) as grid:
            own = copy.deepcopy(model)
            pipe = make_pipeline(own, case, grid.pipeline, 3, dp=grid.data, **options)
            return body(pipe, own, grid.data.rank)

    return on_ranks(2 * case.num_ranks, on_rank)


@pytest.mark.parametrize("steps", [1, 2])
@pytest.mark.parametrize("average", ["mean", "sum"])
@pytest.mark.parametrize("case", CASES, ids=by_name)
def test_replicas_have_the_gradient_of_all_their_batches(
    on_ranks: OnRanks, case: tuple[str, int, int], average: str, steps: int
) -> None:
    size = Case(*case)
    model = chain(size.num_stages)
    x, y = batch(12)

    def body(pipe: Any, own: Any, replica: int) -> Any:
        if replica == 1:  # what replicas start with is the first one's
            for parameter in own.parameters():
                parameter.data.zero_()
        share = slice(6 * replica, 6 * replica + 6)
        for _ in range(steps):
            loss = pipe.step(x[share], y[share], mean_square)
        kinds = [action.kind for action in pipe._lists[pipe.backend.rank]]
        assert kinds.count(ActionKind.REDUCE) == size.stages_per_rank
        return loss, {s: own[s] for s in pipe.stage_numbers}

    factor = 1 if average == "mean" else 2
    expected = run_whole(model, x, y, lambda o, t: factor * mean_square(o, t), steps=steps)
    for loss, stages in run_on_grid(on_ranks, size, model, body, average=average):
        assert loss == pytest.approx(expected.loss, rel=1e-12)
        for number, stage in stages.items():
            for name, parameter in stage.named_parameters():
                theirs = expected.gradients[f"{number}.{name}"]
                assert_equal_gradients(parameter.grad, theirs, f"{number}.{name}")


@pytest.mark.parametrize("case", CASES, ids=by_name)
def test_ranks_start_exactly_what_their_lists_hold(
    on_ranks: OnRanks, monkeypatch: pytest.MonkeyPatch, case: tuple[str, int, int]
) -> None:
    """Reductions among it: that of a stage starts while the others still run backward."""
    started: dict[int, list[str]] = defaultdict(list)  # by thread

    def note(owner: type, method: str, action_of: Callable[..., object]) -> None:
        call = getattr(owner, method)

        def noted(*arguments: Any) -> Any:
            started[threading.get_ident()].append(str(action_of(*arguments)))
            return call(*arguments)

        monkeypatch.setattr(owner, method, noted)

    note(Stage, "forward", lambda stage, m, *_: f"{stage.number}F{m}")
    note(Stage, "backward", lambda stage, m, _: f"{stage.number}B{m}")
    note(Stage, "backward_input", lambda stage, m, _: f"{stage.number}I{m}")
    note(Stage, "backward_weight", lambda stage, m: f"{stage.number}W{m}")
    note(Sender, "send", lambda sender, peer, receive, *_: receive.other_side)
    note(Receiver, "post", lambda receiver, receive: receive)
    note(GradientReduction, "start", lambda sums: f"{sums._weights[0].stage.number}REDUCE")
    size = Case(*case)
    x, y = batch(6)

    def body(pipe: Any, own: Any, replica: int) -> None:
        pipe.step(x, y, mean_square)
        expected = [str(action) for action in pipe._lists[pipe.backend.rank]]
        assert started[threading.get_ident()] == expected

    run_on_grid(on_ranks, size, chain(size.num_stages), body)


@pytest.mark.parametrize("average", ["mean", "sum"])
def test_input_gradient_is_that_of_the_own_loss(on_ranks: OnRanks, average: str) -> None:
    """As under DDP: whatever computes the input has its gradients averaged or summed, too."""
    model = chain(2)
    x, y = batch(12)

    def body(pipe: Any, own: Any, replica: int) -> None:
        share = slice(6 * replica, 6 * replica + 6)
        given = x[share].clone().requires_grad_()
        pipe.step(given, y[share], mean_square)
        if 0 in pipe.stage_numbers:
            expected = run_whole(copy.deepcopy(model), x[share], y[share])
            assert_equal_gradients(given.grad, expected.input_gradient, "input")

    run_on_grid(on_ranks, Case("1f1b", 2, 1), model, body, average=average)


@pytest.mark.parametrize("average", ["mean", "sum"])
def test_tokens_are_counted_over_all_replicas(on_ranks: OnRanks, average: str) -> None:
    model = chain(2)
    x, y = batch(12)
    weight = [1.0, 2.0, 0.0, 4.0, 5.0, 6.0]

    def body(pipe: Any, own: Any, replica: int) -> Any:
        share = slice(6 * replica, 6 * replica + 6)
        loss = pipe.step(x[share], y[share], mean_square, weight=weight[3 * replica :][:3])
        return loss, {s: own[s] for s in pipe.stage_numbers}

    parts = [mean_square(model(a), b) for a, b in zip(x.chunk(6), y.chunk(6), strict=True)]
    expected = sum(w * part for w, part in zip(weight, parts, strict=True)) / sum(weight)
    expected.backward()
    outcomes = run_on_grid(on_ranks, Case("1f1b", 2, 1), model, body, average=average)
    for loss, stages in outcomes:
        assert loss == pytest.approx(float(expected.detach()), rel=1e-12)
        for number, stage in stages.items():
            for name, parameter in stage.named_parameters():
                torch.testing.assert_close(parameter.grad, model[number].get_parameter(name).grad)


def test_weight_on_one_replica_alone_is_told_on_all(on_ranks: OnRanks) -> None:
    model = chain(2)
    x, y = batch(6)

    def body(pipe: Any, own: Any, replica: int) -> None:
        with pytest.raises(ValueError, match="on all replicas or on none"):
            pipe.step(x, y, mean_square, weight=[1, 1, 1] if replica else None)
        pipe.step(x, y, mean_square)

    run_on_grid(on_ranks, Case("1f1b", 2, 1), model, body)


@pytest.mark.parametrize("where", ["argument", "forward"])
@pytest.mark.parametrize("case", CASES, ids=by_name)
def test_failure_of_one_pipeline_reaches_the_others(
    on_ranks: OnRanks, case: tuple[str, int, int], where: str
) -> None:
    size = Case(*case)
    model = chain(size.num_stages)
    x, y = batch(6)

    def fail(_: Any) -> Any:
        raise ZeroDivisionError("the stage's own words")

    def body(pipe: Any, own: Any, replica: int) -> str:
        pipe.step(x, y, mean_square)
        given: Any = x
        if replica == 1 and where == "argument":
            given = None
        elif replica == 1:
            own[1].forward = fail
        with pytest.raises((ValueError, fd.StageFailed)) as caught:
            pipe.step(given, y, mean_square)
        own[1].__dict__.pop("forward", None)
        if where == "forward":
            assert isinstance(caught.value, fd.StageFailed)
            assert caught.value.replica == 1
            assert f"on rank {caught.value.peer} of replica 1: " in str(caught.value)
        assert pipe.step(x, y, mean_square) > 0
        return str(caught.value)

    (message,) = set(run_on_grid(on_ranks, size, model, body))
    assert ("provide input" if where == "argument" else "the stage's own words") in message


@pytest.mark.parametrize("failure", [None, ZeroDivisionError("the stage's own words")])
def test_end_of_some_replicas_group_is_told_in_their_whole_pipelines(
    on_ranks: OnRanks, failure: Exception | None
) -> None:
    met = threading.Barrier(4)

    def body(backend: Any) -> str:
        with fd.RankGrid(backend, pipeline=2) as grid:
            error = None
            try:
                if backend.rank == 3:  # gone before the exchange among replicas
                    outcome._exchange(grid.pipeline, None, 0.0)
                    grid.data.close()
                    grid.pipeline.close()
                else:
                    own = failure if backend.rank == 0 else None
                    outcome.share_outcome(grid.pipeline, grid.data, own)
            except (fd.ChannelClosed, fd.StageFailed) as raised:
                error = raised
            met.wait()  # no error of another rank is due to this one's leaving
            return str(error)

    first, second, third, _ = on_ranks(4, body)
    if failure is None:
        assert "another group of rank 1 of replica 0 has ended" in first
        assert "left the group" in first
    else:
        assert "the stage's own words" in first
        assert "A group has ended, too: make new groups for all replicas;" in first
    assert "left the group" in second
    assert "left the group" in third


def test_end_of_a_pipeline_is_told_with_the_exception_that_it_came_from(on_ranks: OnRanks) -> None:
    model = chain(2)
    x, y = batch(6)
    met = threading.Barrier(4)

    def body(pipe: Any, own: Any, replica: int) -> str:
        pipe.step(x, y, mean_square)
        is_evaluating = replica == 0 and pipe.backend.rank == 0
        with pytest.raises(Exception) as raised:  # noqa: PT011 - each pipeline has its own
            pipe.eval(x) if is_evaluating else pipe.plan()
        met.wait()  # no error of another rank is due to this one's leaving
        return str(raised.value)

    errors = run_on_grid(on_ranks, Case("1f1b", 2, 1), model, body)
    assert not any("still usable" in error for error in errors)
    for error in errors[2:]:
        assert "A group has ended, too: make new groups for all replicas;" in error


@pytest.mark.parametrize("calls", [("eval", "step"), ("plan", "step"), ("step", "eval")])
def test_replicas_that_make_different_calls_are_told(
    on_ranks: OnRanks, calls: tuple[str, str]
) -> None:
    model = chain(2)
    x, y = batch(6)
    met = threading.Barrier(4)

    def outcome_of(pipe: Any, call: str) -> str:
        arguments = {"step": (x, y, mean_square), "eval": (x,), "plan": ()}[call]
        try:
            return str(getattr(pipe, call)(*arguments))
        except fd.DistributedError as error:
            return f"{type(error).__name__}: {error}"

    def body(pipe: Any, own: Any, replica: int) -> list[str]:
        pipe.step(x, y, mean_square)
        # In the second, nobody is met in the first.
        outcomes = [outcome_of(pipe, call) for call in (calls[replica], "step")]
        met.wait()  # no error of another rank is due to this one's leaving
        return outcomes

    errors = run_on_grid(on_ranks, Case("1f1b", 2, 1), model, body)
    for of_rank in errors:
        assert [error.partition(":")[0] for error in of_rank] == ["ChannelClosed"] * 2
    assert sum("the replicas make different calls" in first for first, _ in errors) >= 2


@pytest.mark.parametrize("has_group_ended", [False, True])
def test_the_launcher_knows_a_failed_stage_by_its_message(has_group_ended: bool) -> None:
    report = outcome.FailureReport(
        "stage", "ValueError", "no such token", TRACEBACK, 1, has_group_ended=has_group_ended
    )
    before, _, traceback_text = str(report.to_error(0)).rpartition("\n\n")
    assert before.endswith(OF_A_STAGE)
    assert traceback_text == TRACEBACK


def test_tied_weights_and_replicas_go_together(on_ranks: OnRanks) -> None:
    model = nn.Sequential(Block(), Block()).double()
    model[1].up.weight = model[0].up.weight
    x, y = batch(12)

    def on_rank(backend: Any) -> Any:
        with fd.RankGrid(backend, pipeline=2) as grid:
            own = copy.deepcopy(model)
            stage = own[grid.pipeline.rank]
            tied = {"up": stage.up.weight}
            pipe = fd.Pipeline(stage, grid.pipeline, 3, "zb_h1", dp=grid.data, tied=tied)
            share = slice(6 * grid.data.rank, 6 * grid.data.rank + 6)
            for _ in range(2):
                pipe.step(x[share], y[share], mean_square)
            return stage.up.weight.grad, stage.down.weight.grad, grid.pipeline.rank

    run_whole(model, x, y, steps=2)
    for tied, own, stage in on_ranks(4, on_rank):
        assert_equal_gradients(tied, model[0].up.weight.grad, "tied")
        assert_equal_gradients(own, model[stage].down.weight.grad, "own")


def test_weight_of_two_stages_is_averaged_after_both_whatever_a_schedule_reduces_first(
    on_ranks: OnRanks,
) -> None:
    schedule = "0F0 2F0 2B0 0B0 0REDUCE 2REDUCE\n1F0 1B0 1REDUCE"
    blocks = chain(2)
    x, y = batch(6)

    def on_rank(backend: Any) -> Any:
        with fd.RankGrid(backend, pipeline=2) as grid:
            own = copy.deepcopy(blocks)
            is_end = grid.pipeline.rank == 0
            stages = [nn.Sequential(own[0]), nn.Sequential(own[0])] if is_end else own[1]
            pipe = fd.Pipeline(stages, grid.pipeline, 1, schedule, dp=grid.data)
            share = slice(3 * grid.data.rank, 3 * grid.data.rank + 3)
            outputs = pipe.forward(x[share])
            gradients = [2 * (outputs[0] - y[share]) / y[share].numel()] if is_end else None
            pipe.backward(outputs, gradients)
            return gradients_of(own[grid.pipeline.rank]), grid.pipeline.rank

    mean_square(nn.Sequential(*blocks, blocks[0])(x), y).backward()
    for gradients, place in on_ranks(4, on_rank):
        for name, expected in gradients_of(blocks[place]).items():
            assert_equal_gradients(gradients[name], expected, name)


def test_evaluation_in_inference_mode_may_come_first(on_ranks: OnRanks) -> None:
    """It is then that replicas and tied weights get the memory in which gradients are summed."""
    x, y = batch(4)

    def body(backend: Any) -> list[Any]:
        with fd.RankGrid(backend, pipeline=2) as grid:
            stage = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)
            tied = {"weight": stage.weight}
            with fd.Pipeline(stage, grid.pipeline, 2, "1f1b", dp=grid.data, tied=tied) as pipe:
                with torch.inference_mode():
                    pipe.eval(x)
                first = pipe.step(x, y, mean_square)
                torch.optim.SGD(stage.parameters(), 0.1).step()
                assert pipe.step(x, y, mean_square) < first
        return [stage.weight, stage.weight.grad]

    for equal in zip(*on_ranks(4, body), strict=True):
        for other in equal[1:]:
            assert torch.equal(equal[0], other)


class HandwrittenScale:
    """x * scale, in torch but without autograd."""

    def __init__(self) -> None:
        self.scale = {"scale": torch.ones(WIDTH, dtype=torch.float64)}
        self.gradient = {"scale": torch.zeros(WIDTH, dtype=torch.float64)}

    def parameters(self) -> dict[str, Any]:
        return self.scale

    def grads(self) -> dict[str, Any]:
        return self.gradient

    def forward(self, x: Any) -> Any:
        x = torch.as_tensor(x)
        return x * self.scale["scale"], x

    def backward(self, x: Any, gradient: Any) -> Any:
        gradient = torch.as_tensor(gradient)
        self.gradient["scale"] += (gradient * x).sum(0)
        return gradient * self.scale["scale"]


@pytest.mark.parametrize("is_tied", [False, True])
def test_evaluation_in_inference_mode_may_come_first_in_handwritten_stages(
    on_ranks: OnRanks, is_tied: bool
) -> None:
    def body(backend: Any) -> Any:
        with fd.RankGrid(backend, pipeline=2) as grid:
            stage, tied = HandwrittenScale(), {"scale": "scale"} if is_tied else None
            with fd.Pipeline(stage, grid.pipeline, 2, dp=grid.data, tied=tied) as pipe:
                x = torch.full((4, WIDTH), grid.data.rank + 1.0, dtype=torch.float64)
                with torch.inference_mode():
                    pipe.eval(x)
                pipe.step(x, loss_fn=lambda output: (output.sum() / 2, torch.ones_like(output) / 2))
            return stage.gradient["scale"]

    for gradient in on_ranks(4, body):
        assert torch.equal(gradient, torch.full_like(gradient, 3.0 if is_tied else 1.5))


@pytest.mark.parametrize("is_replicated", [False, True])
def test_gradients_are_added_where_they_are(on_ranks: OnRanks, is_replicated: bool) -> None:
    """They may be parts of memory that an optimizer reads as a whole."""
    model = chain(2)
    x, y = batch(12)

    def body(backend: Any) -> Any:
        with fd.RankGrid(backend, pipeline=2) as grid:
            stage = copy.deepcopy(model)[grid.pipeline.rank]
            whole = torch.zeros(sum(p.numel() for p in stage.parameters()), dtype=torch.float64)
            parts = whole.split([p.numel() for p in stage.parameters()])
            for parameter, part in zip(stage.parameters(), parts, strict=True):
                parameter.grad = part.view_as(parameter)
            options = {"dp": grid.data} if is_replicated else {"tied": {"up": stage.up.weight}}
            pipe = fd.Pipeline(stage, grid.pipeline, 3, **options)
            for _ in range(2):
                pipe.step(x, y, mean_square)
            shown = torch.cat([p.grad.flatten() for p in stage.parameters()])
            assert whole.any()
            return torch.equal(whole, shown)

    assert all(on_ranks(4 if is_replicated else 2, body))


def test_parameter_without_a_gradient_stays_without(on_ranks: OnRanks) -> None:
    class Partly(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used = nn.Linear(WIDTH, WIDTH)
            self.sometimes = nn.Linear(WIDTH, WIDTH)
            self.never = nn.Linear(WIDTH, WIDTH)
            self.register_buffer("flag", torch.zeros(()))

        def forward(self, h: Any) -> Any:
            return self.sometimes(self.used(h)) if (h > 100).any() else self.used(h)

    model = chain(2, lambda _: Partly())
    x, y = batch(12)
    x[7] = 1e3

    def body(pipe: Any, own: Any, replica: int) -> Any:
        share = slice(6 * replica, 6 * replica + 6)
        pipe.step(x[share], y[share], mean_square)
        stage = own[pipe.stage_numbers[0]]
        assert stage.never.weight.grad is None
        return stage.sometimes.weight.grad

    gradients = run_on_grid(on_ranks, Case("1f1b", 2, 1), model, body)
    for a, b in ((gradients[0], gradients[2]), (gradients[1], gradients[3])):
        assert_equal_gradients(a, b, "sometimes")
    assert gradients[0] is not None


class Mixed(nn.Module):
    """Weights of two dtypes in turns, of odd sizes; one is never used."""

    def __init__(self) -> None:
        super().__init__()
        self.scales = nn.Parameter(torch.linspace(0.5, 1.5, WIDTH, dtype=torch.float64))
        self.factors = nn.Parameter(torch.linspace(0.5, 1.5, 3))
        self.unused = nn.Parameter(torch.ones(2, dtype=torch.float64))
        self.scale = nn.Parameter(torch.tensor(2.0, dtype=torch.float64))
        self.shift = nn.Parameter(torch.tensor(0.5))

    def forward(self, h: Any) -> Any:
        return h * self.scales * self.factors.prod().double() * self.scale + self.shift.double()


@pytest.mark.parametrize("bucket_mb", [25, 1e-4, 1e-5])
def test_gradients_of_several_dtypes_and_buckets_are_averaged(
    on_ranks: OnRanks, bucket_mb: float
) -> None:
    model = nn.Sequential(Mixed(), Mixed())
    x, y = batch(12)

    def body(pipe: Any, own: Any, replica: int) -> Any:
        share = slice(6 * replica, 6 * replica + 6)
        pipe.step(x[share], y[share], mean_square)
        return {s: own[s] for s in pipe.stage_numbers}

    expected = run_whole(model, x, y).gradients
    for stages in run_on_grid(on_ranks, Case("1f1b", 2, 1), model, body, bucket_mb=bucket_mb):
        for number, stage in stages.items():
            assert stage.unused.grad is None
            for name in ("scales", "factors", "scale", "shift"):
                ours, theirs = stage.get_parameter(name).grad, expected[f"{number}.{name}"]
                torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


def test_gradients_of_another_dtype_are_averaged_in_it(on_ranks: OnRanks) -> None:
    def body(backend: Any) -> Any:
        with fd.RankGrid(backend, pipeline=2) as grid:
            stage = nn.Linear(1, 1, bias=False).bfloat16()
            stage.weight.data.fill_(1)
            stage.weight.grad_dtype = torch.float32
            pipe = fd.Pipeline(stage, grid.pipeline, 1, dp=grid.data)
            x = torch.full((1, 1), 2.0 ** (-10 * grid.data.rank), dtype=torch.bfloat16)
            pipe.step(x, loss_fn=torch.sum)
            return stage.weight.grad.dtype, stage.weight.grad.item()

    more_than_bfloat16_holds = (1 + 2.0**-10) / 2
    assert on_ranks(4, body) == [(torch.float32, more_than_bfloat16_holds)] * 4


def test_sparse_gradients_are_averaged(on_ranks: OnRanks) -> None:
    model = nn.Sequential(nn.Embedding(5, WIDTH, sparse=True), Block()).double()
    tokens, (_, y) = torch.arange(12) % 5, batch(12)

    def body(pipe: Any, own: Any, replica: int) -> Any:
        share = slice(6 * replica, 6 * replica + 6)
        for _ in range(2):
            pipe.step(tokens[share], y[share], mean_square)
        return own[0].weight.grad if 0 in pipe.stage_numbers else None

    run_whole(model, tokens, y, steps=2)
    for gradient in run_on_grid(on_ranks, Case("1f1b", 2, 1), model, body)[::2]:
        assert_equal_gradients(gradient, model[0].weight.grad.to_dense(), "embedding")


class Scales:
    """A hand-written stage of torch: y = x * weight."""

    def __init__(self) -> None:
        self.weight, self.gradient = torch.full((1, WIDTH), 2.0), torch.zeros(1, WIDTH)
        self.scalar, self.of_scalar = torch.tensor(1.0), torch.tensor(0.0)

    def parameters(self) -> list[Any]:
        return [self.weight, self.scalar]

    def grads(self) -> list[Any]:
        return [self.gradient, self.of_scalar]

    def forward(self, x: Any) -> Any:
        x = torch.as_tensor(x)  # from another rank it comes as NumPy's
        return x * self.weight, x

    def backward(self, x: Any, gradient: Any) -> Any:
        gradient = torch.as_tensor(gradient)
        self.gradient += (gradient * x).sum(0, keepdim=True)
        self.of_scalar += gradient.sum()
        return gradient * self.weight


def test_handwritten_stages_of_torch_are_averaged(on_ranks: OnRanks) -> None:
    def body(backend: Any) -> Any:
        with fd.RankGrid(backend, pipeline=2) as grid:
            stage = Scales()
            pipe = fd.Pipeline(stage, grid.pipeline, 2, "1f1b", dp=grid.data, checkpoint=True)
            x = torch.full((4, WIDTH), grid.data.rank + 1.0)
            for _ in range(2):
                pipe.step(x, loss_fn=lambda y: (float(y.sum()) / 2, torch.full_like(y, 0.5)))
            whole = pipe.eval(x)
            return stage.gradient, stage.of_scalar, whole

    for rank, (gradient, of_scalar, whole) in enumerate(on_ranks(4, body)):
        # Four rows of 1 or 2, times the other stage's weight.
        assert gradient.tolist() == [[2 * 2 * 1.5 * 2 / 2] * WIDTH]
        assert of_scalar.item() == 2 * WIDTH * (2 if rank % 2 == 0 else 1)
        assert whole is None or whole.tolist() == [[4.0 * (rank // 2 + 1)] * WIDTH] * 4


def test_grid_that_cannot_be_made_leaves_no_group_open(
    on_ranks: OnRanks, monkeypatch: pytest.MonkeyPatch
) -> None:
    def body(backend: Any) -> None:
        made: list[Any] = []
        split = type(backend).split

        def split_once(parent: Any, members: Any) -> Any:
            if made:
                raise MemoryError
            made.append(split(parent, members))
            return made[0]

        monkeypatch.setattr(type(backend), "split", split_once)
        with pytest.raises(MemoryError):
            fd.RankGrid(backend, pipeline=1)
        with pytest.raises(fd.ChannelClosed):
            fd.barrier(made[0])

    on_ranks(1, body)


def test_grid_leaves_one_group_even_if_leaving_the_other_fails(
    on_ranks: OnRanks, monkeypatch: pytest.MonkeyPatch
) -> None:
    def body(backend: Any) -> None:
        left: list[Any] = []
        close = type(backend).close

        def close_and_be_interrupted(group: Any) -> None:
            close(group)
            left.append(group)
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(type(backend), "close", close_and_be_interrupted)
            grid = fd.RankGrid(backend, pipeline=1)
            with pytest.raises(KeyboardInterrupt):
                grid.close()
        assert {id(group) for group in left} == {id(grid.pipeline), id(grid.data)}
        grid.close()

    on_ranks(1, body)


def test_replicas_drop_different_numbers(on_ranks: OnRanks) -> None:
    def on_rank(backend: Any) -> Any:
        with fd.RankGrid(backend, pipeline=2) as grid:
            dropout = nn.Dropout(0.5)
            masks: list[list[bool]] = []
            dropout.register_forward_hook(lambda _, x, y: masks.append((y != 0).flatten().tolist()))
            pipe = fd.Pipeline(nn.Sequential(dropout), grid.pipeline, 2, dp=grid.data)
            pipe.step(torch.ones(2, 64, requires_grad=True), loss_fn=torch.sum)
            return masks

    of_first_stages = on_ranks(4, on_rank)[::2]
    masks = [tuple(mask) for masks in of_first_stages for mask in masks]
    assert len(set(masks)) == 4, "each microbatch of each replica has a mask of its own"


def test_weight_that_is_trained_only_later_is_told(on_ranks: OnRanks) -> None:
    """Its gradient would stay that of one replica."""
    model = chain(2)
    x, y = batch(6)

    def body(pipe: Any, own: Any, replica: int) -> str:
        own[0].up.bias.requires_grad_(False)
        pipe.step(x, y, mean_square)
        own[0].up.bias.requires_grad_(True)
        with pytest.raises(ValueError, match=r"'up\.bias' of stage 0 was frozen") as caught:
            pipe.step(x, y, mean_square)
        own[0].up.bias.requires_grad_(False)
        pipe.step(x, y, mean_square)
        return str(caught.value)

    assert len(set(run_on_grid(on_ranks, Case("1f1b", 2, 1), model, body))) == 1


def test_weight_that_gets_another_dtype_is_told(on_ranks: OnRanks) -> None:
    x, y = batch(6)

    def body(pipe: Any, own: Any, replica: int) -> str:
        pipe.step(x, y, mean_square)
        own.float()
        with pytest.raises(ValueError, match="given another dtype or shape") as caught:
            pipe.step(x.float(), y.float(), mean_square)
        own.double()
        pipe.step(x, y, mean_square)
        return str(caught.value)

    assert len(set(run_on_grid(on_ranks, Case("1f1b", 2, 1), chain(2), body))) == 1


@pytest.mark.parametrize("stage", [0, 1])
def test_weight_that_one_replica_alone_freezes_is_told_on_all(
    on_ranks: OnRanks, stage: int
) -> None:
    """Also of the last stage, whose replicas count their weights before anything else."""
    model = chain(2)
    x, y = batch(6)

    def body(pipe: Any, own: Any, replica: int) -> str:
        pipe.step(x, y, mean_square)
        own[stage].up.bias.requires_grad_(replica == 0)
        with pytest.raises(ValueError, match=rf"'up\.bias' of stage {stage} was frozen") as caught:
            pipe.step(x, y, mean_square)
        own[stage].up.bias.requires_grad_(True)
        pipe.step(x, y, mean_square)
        return str(caught.value)

    assert len(set(run_on_grid(on_ranks, Case("1f1b", 2, 1), model, body))) == 1


def test_weights_are_listed_as_often_however_many_there_are(on_ranks: OnRanks) -> None:
    def body(pipe: Any, own: Any, replica: int) -> int:
        pipe.step(x, y, mean_square)
        stage = next(iter(pipe._stages.values()))
        list_all, num_calls = stage.parameters, 0

        def counted() -> Any:
            nonlocal num_calls
            num_calls += 1
            return list_all()

        stage.parameters = counted
        pipe.step(x, y, mean_square)
        return num_calls

    x, y = batch(6)
    size = Case("1f1b", 2, 1)
    models = [chain(2), chain(2, lambda _: nn.Sequential(Block(), Block(), Block()))]
    assert len({n for model in models for n in run_on_grid(on_ranks, size, model, body)}) == 1


@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1"])
def test_stages_may_be_ddp_themselves(on_ranks: OnRanks, schedule: str) -> None:
    """Its hooks fire where weights' gradients are put off, too."""
    model = chain(2)
    x, y = batch(12)

    def on_rank(backend: Any) -> Any:
        with fd.RankGrid(backend, pipeline=2) as grid:
            stage = copy.deepcopy(model)[grid.pipeline.rank]
            pipe = fd.Pipeline(fd.DDP(stage, grid.data), grid.pipeline, 3, schedule)
            share = slice(6 * grid.data.rank, 6 * grid.data.rank + 6)
            pipe.step(x[share], y[share], mean_square)
            return stage, grid.pipeline.rank

    expected = run_whole(model, x, y)
    for stage, number in on_ranks(4, on_rank):
        for name, parameter in stage.named_parameters():
            assert_equal_gradients(parameter.grad, expected.gradients[f"{number}.{name}"], name)


def normalized(_: int) -> nn.Module:
    return nn.Sequential(Block(), nn.BatchNorm1d(WIDTH))


def dropped_and_normalized(_: int) -> nn.Module:
    return nn.Sequential(nn.Dropout(0.3), nn.BatchNorm1d(WIDTH), nn.Dropout(0.3))


def on_normalized_grid(backend: Any, case: Case, whole: Any, body: Callable[..., Any]) -> Any:
    """Run `body` in a pipeline whose stages normalize over all replicas."""
    with fd.RankGrid(backend, pipeline=case.num_ranks) as grid:
        model = copy.deepcopy(whole)
        for stage in case.stages_of(grid.pipeline.rank):
            fd.convert_sync_batchnorm(model[stage], grid.data)
        pipe = make_pipeline(model, case, grid.pipeline, 2, dp=grid.data)
        return body(pipe, model, grid)


def test_masks_of_replicas_that_normalize_together_follow_from_the_seed(on_ranks: OnRanks) -> None:
    size = Case("1f1b", 2, 1)
    x, y = batch(6)
    model = chain(size.num_stages, dropped_and_normalized)

    def body(pipe: Any, own: Any, grid: Any) -> Any:
        pipe.step(x, y, mean_square)
        return [own[s][1].weight.grad for s in pipe.stage_numbers]

    before = torch.random.get_rng_state()
    runs = [on_ranks(4, on_normalized_grid, size, model, body) for _ in range(2)]
    assert torch.equal(torch.random.get_rng_state(), before)
    for one, other in zip(*runs, strict=True):
        for gradient, again in zip(one, other, strict=True):
            torch.testing.assert_close(gradient, again)


@pytest.mark.parametrize("case", CASES, ids=by_name)
def test_replicas_may_normalize_together(on_ranks: OnRanks, case: tuple[str, int, int]) -> None:
    size = Case(*case)
    x, y = batch(12)

    def body(pipe: Any, own: Any, grid: Any) -> Any:
        share = slice(6 * grid.data.rank, 6 * grid.data.rank + 6)
        pipe.step(x[share], y[share], mean_square)
        return {s: own[s] for s in pipe.stage_numbers}

    model = chain(size.num_stages, normalized)
    expected = copy.deepcopy(model)
    of_microbatches = [torch.tensor([0, 1, 2, 6, 7, 8]), torch.tensor([3, 4, 5, 9, 10, 11])]
    for rows in of_microbatches:
        (mean_square(expected(x[rows]), y[rows]) / 2).backward()
    for stages in on_ranks(2 * size.num_ranks, on_normalized_grid, size, model, body):
        for number, stage in stages.items():
            for name, value in stage.named_buffers():
                torch.testing.assert_close(value, expected[number].get_buffer(name))
            for name, parameter in stage.named_parameters():
                theirs = expected[number].get_parameter(name).grad
                assert_equal_gradients(parameter.grad, theirs, f"{number}.{name}")


@pytest.mark.parametrize("where", ["argument", "forward", "backward"])
@pytest.mark.parametrize("stage", [0, 1])
def test_exception_reaches_replicas_that_wait_to_normalize(
    on_ranks: OnRanks, stage: int, where: str
) -> None:
    x, y = batch(6)
    told = threading.Barrier(4)

    def fail(*_: Any) -> None:
        raise ZeroDivisionError("the stage's own words")

    def body(pipe: Any, own: Any, grid: Any) -> str:
        pipe.step(x, y, mean_square)
        given = x
        if grid.data.rank == 1 and where == "argument":
            given = None
        elif grid.data.rank == 1 and where == "forward":
            own[stage][0].register_forward_pre_hook(fail)
        elif grid.data.rank == 1:
            own[stage].register_full_backward_pre_hook(fail)
        with pytest.raises((ValueError, fd.DistributedError)) as caught:
            pipe.step(given, y, mean_square)
        told.wait(60)  # before any rank leaves the groups
        return str(caught.value)

    (message,) = set(
        on_ranks(4, on_normalized_grid, Case("1f1b", 2, 1), chain(2, normalized), body)
    )
    assert ("provide input" if where == "argument" else "the stage's own words") in message


def of_width(width: int) -> dict[str, Any]:
    return {"module": nn.Linear(2, width)}


@pytest.mark.parametrize(
    ("rank", "differs", "words"),
    [
        (2, of_width(3), r"'weight' of stage 0: .*\(2, 2\) on replica 0; .* on rep"),
        (3, of_width(3), r"'weight' of stage 1: .*\(2, 2\) on replica 0; .* on rep"),
        (3, {"num_microbatches": 3}, "num_microbatches=2 on rank 0; num_microbatches=3 on rank 1"),
        (3, {"tied": {"w": "nothing"}}, "tied weight 'w' is no parameter"),
        (3, {"tied": {}}, "only rank 0 has a tied weight 'w'"),
    ],
    ids=["first stage", "last stage", "arguments", "tie", "tie of one"],
)
def test_replicas_that_differ_are_told_on_every_rank(
    on_ranks: OnRanks, rank: int, differs: dict[str, Any], words: str
) -> None:
    def on_rank(backend: Any) -> str:
        with fd.RankGrid(backend, pipeline=2) as grid:
            given = {"module": nn.Linear(2, 2), "num_microbatches": 2, "tied": {"w": "weight"}}
            if backend.rank == rank:
                given |= differs
            pipe = fd.Pipeline(backend=grid.pipeline, dp=grid.data, **given)
            with pytest.raises((TypeError, ValueError), match=words) as caught:
                pipe.step(torch.zeros(6, 2), loss_fn=torch.sum)
            return type(caught.value).__name__ + str(caught.value)

    assert len(set(on_ranks(4, on_rank))) == 1


def test_replicas_that_one_rank_alone_is_given_are_told(on_ranks: OnRanks) -> None:
    def body(backend: Any) -> BaseException | None:
        with fd.RankGrid(backend, pipeline=2) as grid:
            dp = None if backend.rank == 3 else grid.data
            pipe = fd.Pipeline(nn.Linear(2, 2), grid.pipeline, 2, dp=dp)
            try:
                pipe.step(torch.zeros(6, 2), loss_fn=torch.sum)
            except fd.DistributedError as error:
                return error
        return None

    errors = on_ranks(4, body)
    for error in errors[:2]:
        assert isinstance(error, fd.ChannelClosed)
    for error in errors[2:]:
        assert isinstance(error, fd.CollectiveMismatch)
        assert "replicas=2 on rank 0; replicas=None on rank 1" in str(error)


def with_buffer(buffer: Any) -> Any:
    module = nn.Linear(2, 2)
    module.register_buffer("mean", buffer)
    return module


@pytest.mark.parametrize(
    ("module", "words"),
    [
        (with_buffer(torch.ones(1).expand(3)), "'mean' of stage 1 was expanded.*clone"),
        (
            with_buffer(torch.ones(3, dtype=torch.complex64).conj()),
            "'mean' of stage 1: .*conjugation is pending",
        ),
        (with_buffer(torch.ones(3).to_sparse()), "'mean' of stage 1 is torch.sparse_coo"),
        (with_buffer(torch.zeros(3, requires_grad=True)), "'mean' of stage 1 requires grad"),
        (nn.LazyLinear(2), "'weight' of stage 1 has no shape yet. Run a batch"),
    ],
    ids=["expanded", "conjugate", "sparse", "trained", "lazy"],
)
def test_what_cannot_be_given_to_replicas_is_named_on_every_rank(
    on_ranks: OnRanks, module: Any, words: str
) -> None:
    def on_rank(backend: Any) -> None:
        own = module if backend.rank % 2 else with_buffer(torch.ones(3))
        with fd.RankGrid(backend, pipeline=2) as grid:
            pipe = fd.Pipeline(own, grid.pipeline, 2, dp=grid.data)
            with pytest.raises((TypeError, ValueError), match=words):
                pipe.step(torch.zeros(6, 2), loss_fn=torch.sum)

    on_ranks(4, on_rank)


def test_a_parameter_may_be_a_buffer_as_well(on_ranks: OnRanks) -> None:
    def on_rank(backend: Any) -> Any:
        module = nn.Linear(1, 1, bias=False)
        nn.init.ones_(module.weight)
        module.register_buffer("kernel", module.weight)
        with fd.RankGrid(backend, pipeline=2) as grid:
            pipe = fd.Pipeline(module, grid.pipeline, 2, dp=grid.data)
            pipe.step(torch.full((2, 1), float(grid.data.rank)), loss_fn=torch.sum)
        assert module.weight.grad is not None
        return module.weight.grad.item()

    assert on_ranks(4, on_rank) == [0.5] * 4


# The grid


def test_grid_has_pipelines_in_rows_and_replicas_in_columns(on_ranks: OnRanks) -> None:
    def on_rank(backend: Any) -> Any:
        with fd.RankGrid(backend, pipeline=3) as grid:
            mine = np.array([backend.rank])
            row = fd.all_gather(mine, grid.pipeline).tolist()
            column = fd.all_gather(mine, grid.data).tolist()
        assert grid.pipeline.is_closed
        assert grid.data.is_closed
        return row, column

    assert on_ranks(6, on_rank) == [
        ([0, 1, 2], [0, 3]),
        ([0, 1, 2], [1, 4]),
        ([0, 1, 2], [2, 5]),
        ([3, 4, 5], [0, 3]),
        ([3, 4, 5], [1, 4]),
        ([3, 4, 5], [2, 5]),
    ]


@pytest.mark.parametrize("size", [0, -2, 3, 5])
def test_grid_that_does_not_fit_is_refused(size: int) -> None:
    group = fd.SimulatedBackend.create_group(4)
    for backend in group:
        with backend, pytest.raises(fd.InvalidWorldSize, match="cannot be divided"):
            fd.RankGrid(backend, pipeline=size)


def test_grid_names_the_argument_that_is_wrong() -> None:
    with fd.SimulatedBackend.create_group(1)[0] as backend:
        with pytest.raises(TypeError, match="RankGrid: pipeline must be an integer, not '2'"):
            fd.RankGrid(backend, "2")  # type: ignore[arg-type]
        with pytest.raises(TypeError, match=r"RankGrid: backend must be a group, .* not int"):
            fd.RankGrid(2, backend)  # type: ignore[arg-type]
