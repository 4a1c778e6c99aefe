"""A pipeline does what the model does without one: losses, gradients, and the ways to get them."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
from ranks_as_threads import OnRanks

torch = pytest.importorskip("torch", reason="torch is not installed")

from parallel.pipeline.pipeline_models import (  # noqa: E402 - needs torch
    ONE_OF_EACH,
    SCHEDULES,
    Case,
    assert_same,
    batch,
    by_name,
    chain,
    gradients_of,
    make_pipeline,
    mean_square,
    run_pipelined,
    run_whole,
)
from torch import nn  # noqa: E402

import ferro_dist as fd  # noqa: E402
from ferro_dist.parallel.schedules import (  # noqa: E402
    PipelineSchedule,
    complete,
    pipeline_schedule_of,
)
from ferro_dist.testing import run_ranks  # noqa: E402

DEADLINE_S = 300.0  # a busy machine takes long to import torch alone

# Rows and microbatches: one, fewer than stages, even, uneven.
BATCHES = [(3, 1), (4, 2), (8, 4), (11, 5)]


@pytest.mark.parametrize("cases", [SCHEDULES, ONE_OF_EACH], ids=["all", "one of each"])
def test_every_schedule_is_among_those_tested(cases: list[tuple[str, int, int]]) -> None:
    assert {pipeline_schedule_of(case[0]) for case in cases} == set(PipelineSchedule)


@pytest.mark.parametrize(("rows", "num_microbatches"), BATCHES)
@pytest.mark.parametrize("case", SCHEDULES, ids=by_name)
def test_step_equals_the_unpipelined_model(
    on_ranks: OnRanks, case: tuple[str, int, int], rows: int, num_microbatches: int
) -> None:
    whole = Case(*case)
    model = chain(whole.num_stages)
    x, y = batch(rows)
    pipelined = run_pipelined(on_ranks, whole, model, x, y, num_microbatches)
    assert_same(pipelined, run_whole(model, x, y))


@pytest.mark.parametrize("case", SCHEDULES, ids=by_name)
def test_gradients_add_up_over_steps_without_zero_grad(
    on_ranks: OnRanks, case: tuple[str, int, int]
) -> None:
    model = chain(Case(*case).num_stages)
    x, y = batch(7)
    pipelined = run_pipelined(on_ranks, Case(*case), model, x, y, 3, steps=2)
    assert_same(pipelined, run_whole(model, x, y, steps=2))


@pytest.mark.parametrize("case", ONE_OF_EACH, ids=by_name)
def test_forward_and_backward_equal_a_step(on_ranks: OnRanks, case: tuple[str, int, int]) -> None:
    size = Case(*case)
    model = chain(size.num_stages)
    x, y = batch(6)

    def body(backend: Any) -> Any:
        own = copy.deepcopy(model)
        given = x.clone().requires_grad_()
        pipe = make_pipeline(own, size, backend, 3)
        outputs = pipe.forward(given if 0 in pipe.stage_numbers else None)
        assert len(outputs) == 3
        gradients = None
        if size.num_stages - 1 in pipe.stage_numbers:
            for output, target in zip(outputs, y.chunk(3), strict=True):
                (mean_square(output, target) / 3).backward()
            gradients = [output.grad for output in outputs]
        pipe.backward(outputs, gradients)
        return {s: own[s] for s in pipe.stage_numbers}, given.grad

    expected = run_whole(model, x, y)
    outcomes = on_ranks(size.num_ranks, body)
    for stages, _ in outcomes:
        for number, stage in stages.items():
            for name, parameter in stage.named_parameters():
                torch.testing.assert_close(parameter.grad, expected.gradients[f"{number}.{name}"])
    torch.testing.assert_close(outcomes[0][1], expected.input_gradient)


@pytest.mark.parametrize("case", ONE_OF_EACH, ids=by_name)
def test_eval_gives_the_model_output_and_changes_nothing(
    on_ranks: OnRanks, case: tuple[str, int, int]
) -> None:
    size = Case(*case)
    model = chain(size.num_stages, lambda _: nn.Sequential(nn.BatchNorm1d(5), nn.Dropout(0.5)))
    x, _ = batch(7)

    def body(backend: Any) -> Any:
        own = copy.deepcopy(model)
        own[0].eval()
        pipe = make_pipeline(own, size, backend, 2)
        output = pipe.eval(x if 0 in pipe.stage_numbers else None)
        assert all(stage.training == (number != 0) for number, stage in enumerate(own))
        assert all(int(s[0].num_batches_tracked) == 0 for s in own)
        return output, size.num_stages - 1 in pipe.stage_numbers

    model_output = copy.deepcopy(model).eval()(x)
    for output, is_last in on_ranks(size.num_ranks, body):
        assert (output is not None) == is_last
        if is_last:
            torch.testing.assert_close(output, model_output)


class Merging(nn.Module):
    """Adds one weight to another for evaluation, and takes it away again for training."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Parameter(torch.ones(5, 5), requires_grad=False)
        self.change = nn.Parameter(torch.full((5, 5), 0.5))
        self.is_merged = False

    def train(self, mode: bool = True) -> Any:
        if self.is_merged == mode:
            self.base.data += -self.change.data if mode else self.change.data
            self.is_merged = not mode
        return super().train(mode)

    def forward(self, x: Any) -> Any:
        return x @ (self.base if self.is_merged else self.base + self.change)


def test_eval_returns_to_training_as_modules_do_it(on_ranks: OnRanks) -> None:
    x, y = batch(4)

    def body(backend: Any) -> Any:
        stage = nn.Sequential(Merging(), nn.Sequential(Merging()).eval()).double()
        pipe = fd.Pipeline(stage, backend, 2, "1f1b")
        pipe.eval(x)
        assert [module.training for module in stage.modules()] == [True, True, False, False]
        assert [stage[0].is_merged, stage[1][0].is_merged] == [False, True]
        pipe.step(x, y, mean_square)
        return stage[0].change.grad

    for gradient in on_ranks(2, body):
        assert gradient is not None


def test_backwards_of_scalar_outputs_need_no_gradients(on_ranks: OnRanks) -> None:
    model = chain(2)
    x, _ = batch(4)

    class Last(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, h: Any) -> Any:
            return self.inner(h).square().mean()

    def body(backend: Any) -> Any:
        own = copy.deepcopy(model)
        stage = own[0] if backend.rank == 0 else Last(own[1])
        pipe = fd.Pipeline(stage, backend, 2, "1f1b")
        pipe.backward(pipe.forward(x if backend.rank == 0 else None))
        return own[backend.rank]

    (2 * Last(model[1])(model[0](x))).backward()  # a mean over half of the rows, twice
    for rank, stage in enumerate(on_ranks(2, body)):
        for name, parameter in stage.named_parameters():
            torch.testing.assert_close(parameter.grad, model[rank].get_parameter(name).grad)


def test_schedules_of_ones_own_are_run_as_they_are(on_ranks: OnRanks) -> None:
    model = chain(2)
    x, y = batch(4)
    written = ["0F0 0F1 0I1 0I0 0W0 0W1", "1F0 1F1 1B1 1B0"]

    def body(backend: Any) -> Any:
        own = copy.deepcopy(model)
        pipe = fd.Pipeline(own[backend.rank], backend, 2, written)
        assert [list(map(str, row)) for row in pipe.schedule] == [
            list(map(str, row)) for row in complete(written, 2, 2)
        ]
        pipe.step(x, y, mean_square)
        ran = [str(span.action) for span in pipe.plan().spans if span.rank == backend.rank]
        return own[backend.rank], ran

    expected = run_whole(model, x, y)
    for rank, (stage, ran) in enumerate(on_ranks(2, body)):
        assert ran == written[rank].split()
        for name, parameter in stage.named_parameters():
            torch.testing.assert_close(parameter.grad, expected.gradients[f"{rank}.{name}"])


def test_weights_of_microbatches_and_of_rows_count(on_ranks: OnRanks) -> None:
    model = chain(2)
    x, y = batch(5)
    weight = [3.0, 0.0, 1.0, 2.0, 5.0]

    def body(backend: Any, m: int, weights: Any) -> Any:
        own = copy.deepcopy(model)
        pipe = fd.Pipeline(own[backend.rank], backend, m, "1f1b")
        return pipe.step(x, y, mean_square, weight=weights), own[0].up.weight.grad

    each = [float(mean_square(model(x[i : i + 1]), y[i : i + 1]).detach()) for i in range(5)]
    expected = float(np.average(each, weights=weight))
    for weights in (weight, np.array(weight), torch.tensor(weight)):
        loss, _ = on_ranks(2, lambda b, w=weights: body(b, 5, w))[1]
        assert loss == pytest.approx(expected, rel=1e-12)
    halves = [mean_square(model(x[:3]), y[:3]), mean_square(model(x[3:]), y[3:])]
    loss, gradient = on_ranks(2, lambda b: body(b, 2, weight))[0]
    whole = (4 * halves[0] + 7 * halves[1]) / 11
    whole.backward()
    assert loss == pytest.approx(float(whole.detach()), rel=1e-12)
    torch.testing.assert_close(gradient, model[0].up.weight.grad)


@pytest.mark.parametrize("case", ONE_OF_EACH, ids=by_name)
def test_microbatch_without_weight_may_have_no_loss(
    on_ranks: OnRanks, case: tuple[str, int, int]
) -> None:
    """All its tokens may be ignored, so that their mean is 0 / 0."""
    size = Case(*case)
    model = chain(size.num_stages)
    x, _ = batch(6)
    mask = torch.tensor([0.0, 0.0, 1.0, 1.0, 0.0, 1.0], dtype=torch.float64)

    def masked_mean(output: Any, mask: Any) -> Any:
        return (output.square().sum(1) * mask).sum() / mask.sum()

    def body(backend: Any) -> Any:
        own = copy.deepcopy(model)
        pipe = make_pipeline(own, size, backend, 3)
        is_last = size.num_stages - 1 in pipe.stage_numbers
        loss = pipe.step(x, mask, masked_mean, weight=mask if is_last else None)
        return loss, {stage: own[stage] for stage in pipe.stage_numbers}

    expected = run_whole(model, x, mask, masked_mean)
    for loss, stages in on_ranks(size.num_ranks, body):
        assert loss == pytest.approx(expected.loss, rel=1e-12)
        for number, stage in stages.items():
            for name, parameter in stage.named_parameters():
                torch.testing.assert_close(parameter.grad, expected.gradients[f"{number}.{name}"])


@pytest.mark.parametrize("checkpoint", [False, True])
@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1"])
def test_microbatch_without_weight_may_have_no_loss_in_a_stage_that_returns_its_input(
    on_ranks: OnRanks, schedule: str, checkpoint: bool
) -> None:
    x, _ = batch(4)
    mask = torch.tensor([1.0, 1.0, 0.0, 0.0], dtype=torch.float64)

    def masked_mean(output: Any, mask: Any) -> Any:
        return (output.square().sum(1) * mask).sum() / mask.sum()

    def body(backend: Any) -> Any:
        stage = chain(1)[0] if backend.rank == 0 else nn.Identity()
        pipe = fd.Pipeline(stage, backend, 2, schedule, checkpoint=checkpoint)
        pipe.step(x, mask, masked_mean, weight=mask if backend.rank == 1 else None)
        return gradients_of(stage)

    model = chain(1)[0]
    masked_mean(model(x), mask).backward()
    gradients, _ = on_ranks(2, body)
    for name, gradient in gradients_of(model).items():
        torch.testing.assert_close(gradients[name], gradient)


def test_microbatches_may_change_shape_from_step_to_step(on_ranks: OnRanks) -> None:
    model = chain(3)
    batches = [batch(rows, seed=rows) for rows in (6, 9, 4)]

    def body(backend: Any) -> Any:
        pipe = fd.Pipeline(copy.deepcopy(model)[backend.rank], backend, 3, "zb_h1")
        return [pipe.step(x, y, mean_square) for x, y in batches]

    expected = [run_whole(copy.deepcopy(model), x, y).loss for x, y in batches]
    for losses in on_ranks(3, body):
        assert losses == pytest.approx(expected, rel=1e-12)


def test_attributes_are_what_was_given() -> None:
    group = fd.SimulatedBackend.create_group(2)
    module = nn.Linear(2, 2)
    pipe = fd.Pipeline(module, group[0], 4, fd.PipelineSchedule.GPIPE)
    assert pipe.schedule == fd.PipelineSchedule.GPIPE
    assert pipe.num_microbatches == 4
    assert pipe.module is module
    assert fd.Pipeline(module, group[0], 4, "1f1b").schedule == fd.PipelineSchedule.ONE_F_ONE_B
    assert repr(pipe) == "<Pipeline rank 0 of 2, stages 0 of 2, 4 microbatches, gpipe>"
    for backend in group:
        backend.close()


def _body_of_a_process(backend: Any, case: tuple[str, int, int]) -> Any:
    torch.set_num_threads(1)
    size = Case(*case)
    model = chain(size.num_stages)
    x, y = batch(9)
    given = x.clone().requires_grad_()
    pipe = make_pipeline(model, size, backend, 4)
    loss = pipe.step(given, y, mean_square)
    gradients = {
        f"{s}.{n}": p.grad.numpy()
        for s in pipe.stage_numbers
        for n, p in model[s].named_parameters()
    }
    return loss, gradients, None if given.grad is None else given.grad.numpy()


@pytest.mark.parametrize("kind", ["host", "tcp"])
@pytest.mark.parametrize("case", [("1f1b", 3, 1), ("zb_v", 2, 2)], ids=by_name)
def test_processes_do_as_threads_do(kind: str, case: tuple[str, int, int]) -> None:
    model = chain(Case(*case).num_stages)
    x, y = batch(9)
    whole = run_whole(model, x, y)
    outcomes = run_ranks(case[1], _body_of_a_process, case, backend=kind, timeout=DEADLINE_S)
    for loss, gradients, _ in outcomes:
        assert loss == pytest.approx(whole.loss, rel=1e-12)
        for name, gradient in gradients.items():
            np.testing.assert_allclose(
                gradient, np.asarray(whole.gradients[name]), rtol=1e-9, atol=1e-12
            )
    np.testing.assert_allclose(
        outcomes[0][2], np.asarray(whole.input_gradient), rtol=1e-9, atol=1e-12
    )
