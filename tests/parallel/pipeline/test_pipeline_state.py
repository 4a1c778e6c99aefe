"""What a stage holds beside its microbatch: random numbers, statistics, tied weights, hooks."""

from __future__ import annotations

import copy
import itertools
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from parallel.pipeline.pipeline_models import (  # noqa: E402 - needs torch
    ONE_OF_EACH,
    SCHEDULES,
    WIDTH,
    Block,
    Case,
    assert_equal_gradients,
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
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

import ferro_dist as fd  # noqa: E402
from ferro_dist.integrations.torch import random as torch_random  # noqa: E402
from ferro_dist.parallel.pipeline.stage import microbatch_seed  # noqa: E402

OnRanks = Callable[..., list[Any]]

KEPT_AND_CHECKPOINTED = [
    *(pytest.param(case, {}, id=f"{by_name(case)}-kept") for case in SCHEDULES),
    *(
        pytest.param(case, {"checkpoint": True}, id=f"{by_name(case)}-checkpointed")
        for case in ONE_OF_EACH
    ),
]


# Random numbers


def noisy(_: int) -> nn.Module:
    return nn.Sequential(Block(), nn.Dropout(0.4))


def run_noisy(model: nn.Sequential, x: Any, y: Any, num_microbatches: int, steps: int) -> Any:
    """Run without a pipeline, microbatch by microbatch, with the numbers a pipeline draws."""
    for step in range(steps):
        for m, (part, target) in enumerate(
            zip(x.tensor_split(num_microbatches), y.tensor_split(num_microbatches), strict=True)
        ):
            h = part
            for number, stage in enumerate(model):
                torch.manual_seed(microbatch_seed(7, step, number, m))
                h = stage(h)
            (mean_square(h, target) * len(part) / len(x)).backward()
    return model


@pytest.mark.parametrize(("case", "options"), KEPT_AND_CHECKPOINTED)
def test_dropout_does_not_depend_on_the_schedule(
    on_ranks: OnRanks, case: tuple[str, int, int], options: Any
) -> None:
    model = chain(Case(*case).num_stages, noisy)
    x, y = batch(7)
    state = torch.get_rng_state()
    pipelined = run_pipelined(on_ranks, Case(*case), model, x, y, 3, steps=2, seed=7, **options)
    assert torch.equal(torch.get_rng_state(), state), "the user's own numbers go on as they were"
    with torch.random.fork_rng():
        expected = run_noisy(copy.deepcopy(model), x, y, 3, 2)
    for name, parameter in expected.named_parameters():
        assert_equal_gradients(pipelined.gradients[name], parameter.grad, name)


def test_forward_that_runs_twice_without_a_seed_draws_the_same_numbers(on_ranks: OnRanks) -> None:
    """Otherwise backward would be that of an output which nobody was sent."""

    def body(backend: Any) -> Any:
        stage = nn.Sequential(nn.Linear(WIDTH, 512), nn.Dropout(0.5), nn.Linear(512, WIDTH))
        masks: list[bytes] = []
        stage[1].register_forward_hook(lambda _, x, y: masks.append((y != 0).numpy().tobytes()))
        pipe = fd.Pipeline(stage.double(), backend, 2, "gpipe", seed=None, checkpoint=True)
        pipe.step(*batch(2), mean_square)
        return masks

    for masks in on_ranks(2, body):
        assert sorted(masks[:2]) == sorted(masks[2:])
        assert masks[0] != masks[1]


def test_masks_differ_between_microbatches_steps_and_stages() -> None:
    keys = [(s, i, st, m) for s in (0, 1) for i in (0, 1) for st in (0, 1) for m in (0, 1)]
    assert len({microbatch_seed(*key) for key in keys}) == len(keys)


# Statistics


class Centred(nn.Module):
    """Subtracts a running mean: a buffer that is replaced, over one that is written to."""

    total: Any
    count: Any
    ones: Any

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("total", torch.zeros(WIDTH))
        self.register_buffer("count", torch.zeros(()))
        self.register_buffer("ones", torch.ones((), dtype=torch.float64).expand(WIDTH))

    def forward(self, x: Any) -> Any:
        self.total = self.total + x.detach().mean(0)
        self.count.add_(1)
        return torch.tanh(x - self.total / self.count) * self.ones


@pytest.mark.parametrize(("case", "options"), KEPT_AND_CHECKPOINTED)
def test_statistics_count_each_microbatch_once(
    on_ranks: OnRanks, case: tuple[str, int, int], options: Any
) -> None:
    size = Case(*case)
    layers = Block, Centred, lambda: nn.BatchNorm1d(WIDTH)
    model = chain(size.num_stages, lambda _: nn.Sequential(*(layer() for layer in layers)))
    x, y = batch(8)

    def body(backend: Any) -> Any:
        own = copy.deepcopy(model)
        pipe = make_pipeline(own, size, backend, 2, **options)
        pipe.step(x, y, mean_square)
        return {s: own[s] for s in pipe.stage_numbers}

    expected = copy.deepcopy(model)
    for part, target in zip(x.chunk(2), y.chunk(2), strict=True):
        (mean_square(expected(part), target) / 2).backward()
    for stages in on_ranks(size.num_ranks, body):
        for number, stage in stages.items():
            for name, value in stage.named_buffers():
                torch.testing.assert_close(value, expected[number].get_buffer(name))
            for name, value in stage.named_parameters():
                theirs = expected[number].get_parameter(name).grad
                assert_equal_gradients(value.grad, theirs, name)


# Plans


def test_plan_before_the_first_step_leaves_no_trace(on_ranks: OnRanks) -> None:
    layers = Block, Centred, lambda: nn.BatchNorm1d(WIDTH), lambda: nn.Dropout(0.4)
    model = chain(2, lambda _: nn.Sequential(*(layer() for layer in layers)))
    x, y = batch(8)

    def body(backend: Any, has_plan: bool) -> Any:
        own = copy.deepcopy(model)[backend.rank]
        own[0].up.bias.grad = torch.ones_like(own[0].up.bias)
        pipe = fd.Pipeline(own, backend, 4, "zb_h1", seed=7)
        given = x.clone().requires_grad_()
        planned = pipe.plan(given, y, mean_square) if has_plan else None
        loss = pipe.step(given, y, mean_square)
        gradients = {**gradients_of(own), "input": given.grad}
        return loss, gradients, dict(own.named_buffers()), planned

    for planned, plain in zip(on_ranks(2, body, True), on_ranks(2, body, False), strict=True):
        assert planned[0] == plain[0]
        for ours, theirs in zip(planned[1:3], plain[1:3], strict=True):
            for name, value in theirs.items():
                assert value is ours[name] or torch.equal(ours[name], value), name


def test_plan_before_the_first_step_calls_no_hook_on_an_added_gradient(on_ranks: OnRanks) -> None:
    """An optimizer may step in it."""

    def body(backend: Any) -> None:
        stage = Block().double()
        optimizer = torch.optim.SGD(stage.parameters(), 0.1)
        called: list[Any] = []

        def step(weight: Any) -> None:
            called.append(weight)
            optimizer.step()

        handles = [p.register_post_accumulate_grad_hook(step) for p in stage.parameters()]
        before = copy.deepcopy(stage.state_dict())
        pipe = fd.Pipeline(stage, backend, 1)
        pipe.plan(*batch(4), mean_square)
        assert not called
        assert all(torch.equal(before[name], value) for name, value in stage.state_dict().items())
        handles[0].remove()
        pipe.step(*batch(4), mean_square)
        assert len(called) == len(handles) - 1

    on_ranks(2, body)


def test_plan_that_fails_at_once_leaves_gradients(on_ranks: OnRanks) -> None:
    def body(backend: Any) -> None:
        stage = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LazyBatchNorm1d()).double()
        pipe = fd.Pipeline(stage, backend, 1)
        gradient = stage[0].weight.grad = torch.ones_like(stage[0].weight)
        with pytest.raises((ValueError, fd.StageFailed), match="uninitialized"):  # a buffer
            pipe.plan(*batch(4), mean_square)
        assert stage[0].weight.grad is gradient

    on_ranks(2, body)


def test_hook_that_is_removed_in_a_plan_stays_away(on_ranks: OnRanks) -> None:
    def body(backend: Any) -> None:
        stage = Block().double()
        called: list[Any] = []
        hook = stage.up.weight.register_post_accumulate_grad_hook(called.append)
        removal = stage.register_forward_pre_hook(lambda *_: hook.remove())
        pipe = fd.Pipeline(stage, backend, 1)
        pipe.plan(*batch(4), mean_square)
        removal.remove()
        pipe.step(*batch(4), mean_square)
        assert not called

    on_ranks(2, body)


def test_plan_is_the_same_on_all_ranks_and_shows_the_run(on_ranks: OnRanks) -> None:
    model = chain(2)
    x, y = batch(8)

    def body(backend: Any) -> Any:
        pipe = fd.Pipeline(copy.deepcopy(model)[backend.rank], backend, 4, "1f1b")
        pipe.step(x, y, mean_square)
        return pipe.plan()

    plan, other = on_ranks(2, body)
    assert str(plan) == str(other)
    assert plan.peak_live == [2, 1]
    assert plan.predicted.peak_live == [2, 1]
    assert len(plan.spans) == 2 * (4 + 4)
    assert plan.durations.keys() == {(stage, kind) for stage in (0, 1) for kind in "FB"}
    assert plan.makespan_s > 0


def test_plan_counts_what_messages_take(on_ranks: OnRanks) -> None:
    class Widen(nn.Module):
        def forward(self, x: Any) -> Any:
            return x.repeat(1, 100_000)

    def body(backend: Any) -> Any:
        stages = [nn.Linear(WIDTH, WIDTH).double(), Widen(), nn.Identity(), nn.Identity()]
        own = [stages[stage] for stage in ((0, 3), (1, 2))[backend.rank]]
        pipe = fd.Pipeline(own, backend, 2, "zb_v")
        pipe.step(batch(2)[0], loss_fn=torch.mean)
        return pipe.plan()

    plan, _ = on_ranks(2, body)
    narrow = 8 * WIDTH
    assert plan.message_nbytes == [narrow, 0, 100_000 * narrow]
    assert [seconds > 0 for seconds in plan.latency_s] == [True, False, True]


# Checkpoints


@pytest.mark.parametrize("which", [True, [0], [1, 2]])
@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1"])
def test_checkpointed_stages_have_the_same_gradients(
    on_ranks: OnRanks, schedule: str, which: Any
) -> None:
    model = chain(3)
    x, y = batch(7)
    pipelined = run_pipelined(on_ranks, Case(schedule, 3, 1), model, x, y, 3, checkpoint=which)
    assert_same(pipelined, run_whole(model, x, y))


def test_checkpointed_stage_that_writes_into_its_input_is_told(on_ranks: OnRanks) -> None:
    """Run again, it would see what it has written: with no error, and other gradients."""
    x, y = batch(4)

    def body(backend: Any) -> None:
        model = chain(2, lambda _: nn.Sequential(nn.Hardtanh(inplace=True), Block()))
        stage = model[0] if backend.rank == 0 else model[1][1]
        pipe = fd.Pipeline(stage, backend, 2, "1f1b", checkpoint=[0])
        with pytest.raises(fd.StageFailed, match=r"stage 0 is checkpointed, .* has been written"):
            pipe.step(x.clone(), y, mean_square)

    on_ranks(2, body)


def test_input_that_changes_before_a_checkpoint_is_run_again_is_told(on_ranks: OnRanks) -> None:
    def body(backend: Any) -> None:
        pipe = fd.Pipeline(Block().double(), backend, 2, "1f1b", checkpoint=True)
        x, _ = batch(4)
        outputs = pipe.forward(x)
        x += 1
        with pytest.raises(fd.StageFailed, match=r"stage 0 is checkpointed, .* pass a copy"):
            pipe.backward(outputs, [torch.ones_like(output) for output in outputs])

    on_ranks(2, body)


@pytest.mark.parametrize(
    "change",
    [
        lambda stage: torch.optim.SGD(stage.parameters(), 0.1).step(),
        lambda stage: setattr(stage.up, "weight", nn.Parameter(stage.up.weight + 1)),
    ],
    ids=["written", "replaced"],
)
def test_weight_that_changes_before_a_checkpoint_is_run_again_is_told(
    on_ranks: OnRanks, change: Callable[[Any], object]
) -> None:
    """Its gradient would be that of another model; without a checkpoint, autograd tells."""

    def body(backend: Any) -> None:
        stage = Block().double()
        pipe = fd.Pipeline(stage, backend, 2, "1f1b", checkpoint=True)
        pipe.step(*batch(4), mean_square)
        outputs = pipe.forward(batch(4)[0])
        change(stage)
        with pytest.raises(fd.StageFailed, match=r"its weight 'up\.weight' has been written to or"):
            pipe.backward(outputs, [torch.ones_like(output) for output in outputs])
        pipe.step(*batch(4), mean_square)

    on_ranks(2, body)


def test_checkpointed_forward_may_write_its_weights(on_ranks: OnRanks) -> None:
    model = nn.Sequential(nn.Embedding(9, WIDTH, max_norm=0.5), Block()).double()

    def body(backend: Any, checkpoint: bool) -> Any:
        stage = copy.deepcopy(model)[backend.rank]
        pipe = fd.Pipeline(stage, backend, 3, "gpipe", checkpoint=checkpoint)
        pipe.step(torch.arange(9), batch(9)[1], mean_square)
        return next(stage.parameters()).grad

    assert torch.equal(on_ranks(2, body, True)[0], on_ranks(2, body, False)[0])


def test_checkpointed_stages_run_again_in_the_modes_of_their_forward(on_ranks: OnRanks) -> None:
    model = chain(2, lambda _: nn.Sequential(Block(), nn.BatchNorm1d(WIDTH), nn.Dropout(0.5)))
    x, _ = batch(8)

    def body(backend: Any, checkpoint: bool) -> Any:
        stage = copy.deepcopy(model)[backend.rank]
        stage[1].eval()
        pipe = fd.Pipeline(stage, backend, 2, "1f1b", checkpoint=checkpoint)
        outputs = pipe.forward(x)
        stage.eval()
        stage[1].train()
        pipe.backward(outputs, [torch.ones_like(output) for output in outputs])
        assert [part.training for part in stage] == [False, True, False]
        return gradients_of(stage)

    for checkpointed, kept in zip(on_ranks(2, body, True), on_ranks(2, body, False), strict=True):
        for name, gradient in kept.items():
            assert torch.equal(checkpointed[name], gradient), name


class Merging(nn.Module):
    """Adds a buffer to another while it is evaluated, as layers of low rank do."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("merged", torch.zeros(WIDTH))

    def forward(self, x: Any) -> Any:
        return self.up(x) * (1 + self.merged)

    def train(self, mode: bool = True) -> Any:
        if mode != self.training:
            self.merged.add_(-1 if mode else 1)
        return super().train(mode)


def test_buffers_that_follow_modes_are_right_after_a_checkpoint_is_run_again(
    on_ranks: OnRanks,
) -> None:
    def body(backend: Any) -> None:
        stage = Merging().double()
        pipe = fd.Pipeline(stage, backend, 2, "1f1b", checkpoint=True)
        outputs = pipe.forward(batch(4)[0])
        stage.eval()
        pipe.backward(outputs, [torch.ones_like(output) for output in outputs])
        assert stage.merged.tolist() == [1.0] * WIDTH

    on_ranks(2, body)


@pytest.mark.filterwarnings("ignore:`torch.jit.script")  # of torch's own
@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.jit.script(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH))),
        lambda: nn.Sequential(nn.LazyLinear(WIDTH), nn.Tanh()),
    ],
    ids=["scripted", "lazy"],
)
def test_checkpointed_stages_may_be_scripted_or_lazy(
    on_ranks: OnRanks, make: Callable[[], Any]
) -> None:
    def body(backend: Any, stages: list[Any], checkpoint: bool) -> Any:
        stage = stages[backend.rank]
        pipe = fd.Pipeline(stage, backend, 3, "1f1b", checkpoint=checkpoint)
        pipe.step(*batch(9), mean_square)  # a lazy stage makes its weights in it
        for weight in stage.parameters():
            nn.init.constant_(weight, 0.1)
            weight.grad = None
        pipe.step(*batch(9), mean_square)
        return [weight.grad for weight in stage.parameters()]

    def run(checkpoint: bool) -> list[Any]:
        stages = [make().double() for _ in range(2)]
        return list(itertools.chain(*on_ranks(2, body, stages, checkpoint)))

    assert all(map(torch.equal, run(True), run(False)))


def test_checkpointed_stages_run_again_in_the_precision_of_their_forward(on_ranks: OnRanks) -> None:
    """torch recommends to leave autocast before backward."""
    model = chain(2).float()
    x, _ = batch(4)

    def body(backend: Any, checkpoint: bool) -> Any:
        stage = copy.deepcopy(model)[backend.rank]
        pipe = fd.Pipeline(stage, backend, 2, "1f1b", checkpoint=checkpoint)
        with torch.autocast("cpu", torch.bfloat16):
            outputs = pipe.forward(x.float())
        pipe.backward(outputs, [torch.ones_like(output) for output in outputs])
        return gradients_of(stage)

    for checkpointed, kept in zip(on_ranks(2, body, True), on_ranks(2, body, False), strict=True):
        for name, gradient in kept.items():
            assert torch.equal(checkpointed[name], gradient), name


def test_casts_of_the_first_forward_of_a_checkpointed_stage_are_not_taken_for_the_second(
    on_ranks: OnRanks,
) -> None:
    """The first makes no graph, so its casts would lead to no gradient."""
    x, y = batch(4)

    def body(backend: Any, checkpoint: bool) -> Any:
        stage = nn.Linear(WIDTH, WIDTH)
        nn.init.eye_(stage.weight)
        nn.init.zeros_(stage.bias)
        pipe = fd.Pipeline(stage, backend, 2, "1f1b", checkpoint=checkpoint)
        with torch.autocast("cpu", torch.bfloat16):
            pipe.step(x.float(), y.float(), mean_square)
        return gradients_of(stage)

    for checkpointed, kept in zip(on_ranks(2, body, True), on_ranks(2, body, False), strict=True):
        for name, gradient in kept.items():
            assert torch.equal(checkpointed[name], gradient), name


def test_checkpointed_stage_keeps_no_graph(on_ranks: OnRanks) -> None:
    x, y = batch(8)

    class Watched(Block):
        def forward(self, h: Any) -> Any:
            had_graph.append(torch.is_grad_enabled())
            return super().forward(h)

    had_graph: list[bool] = []

    def body(backend: Any) -> None:
        stage = (Watched() if backend.rank == 0 else Block()).double()
        fd.Pipeline(stage, backend, 4, "gpipe", checkpoint=[0]).step(x, y, mean_square)

    on_ranks(2, body)
    assert had_graph == [False] * 4 + [True] * 4


def test_hooks_that_a_checkpointed_stage_has_on_its_input_count_once(on_ranks: OnRanks) -> None:
    class Scaled(Block):
        def forward(self, h: Any) -> Any:
            h.register_hook(lambda gradient: gradient * 3)
            return super().forward(h)

    model = chain(2, lambda _: Scaled())
    x, y = batch(6)
    pipelined = run_pipelined(on_ranks, Case("1f1b", 2, 1), model, x, y, 2, checkpoint=True)
    assert_same(pipelined, run_whole(model, x, y))


# Tied weights


class Embedding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.linspace(-1, 1, 11 * WIDTH).reshape(11, WIDTH))

    def forward(self, tokens: Any) -> Any:
        return self.table[tokens]


class Head(nn.Module):
    def __init__(self, table: Any) -> None:
        super().__init__()
        self.table = table

    def forward(self, h: Any) -> Any:
        return h @ self.table.t()


def tied_model(num_stages: int) -> nn.Sequential:
    embedding = Embedding()
    middle = chain(num_stages - 2)
    return nn.Sequential(embedding, *middle, Head(embedding.table)).double()


def cross_entropy(output: Any, target: Any) -> Any:
    return nn.functional.cross_entropy(output, target)


@pytest.mark.parametrize("steps", [1, 2])
@pytest.mark.parametrize("case", SCHEDULES, ids=by_name)
def test_tied_weights_have_the_sum_of_their_gradients(
    on_ranks: OnRanks, case: tuple[str, int, int], steps: int
) -> None:
    size = Case(*case)
    model = tied_model(size.num_stages)
    tokens, labels = torch.arange(9) % 11, torch.arange(9) * 3 % 11

    def body(backend: Any) -> Any:
        own = copy.deepcopy(model)
        stages = size.stages_of(backend.rank)
        tied = {}
        if stages[0] == 0 and size.num_stages - 1 not in stages:
            tied = {"table": own[0].table}
        elif stages[-1] == size.num_stages - 1 and 0 not in stages:
            # As it would be loaded: another tensor, and not even equal.
            own[-1].table = nn.Parameter(torch.zeros_like(own[-1].table))
            tied = {"table": "table"}
        with make_pipeline(own, size, backend, 3, tied=tied) as pipe:
            for _ in range(steps):
                pipe.step(tokens, labels, cross_entropy)
            return {s: own[s].table for s in pipe.stage_numbers if s in (0, size.num_stages - 1)}

    run_whole(model, tokens, labels, cross_entropy, steps=steps)
    tables = [table for own in on_ranks(size.num_ranks, body) for table in own.values()]
    assert len(tables) == 2
    for table in tables:
        torch.testing.assert_close(table.detach(), model[0].table.detach())
        torch.testing.assert_close(table.grad, model[0].table.grad)


def test_first_and_last_stage_of_a_rank_share_a_weight_without_a_tie(on_ranks: OnRanks) -> None:
    model, (x, y) = chain(4), batch(5)
    model[3].up.weight = model[0].up.weight  # both on rank 0 under zb_v
    expected = run_whole(copy.deepcopy(model), x, y)

    def body(backend: Any) -> Any:
        own = copy.deepcopy(model)
        tied = {} if backend.rank else {"w": own[0].up.weight}
        with pytest.raises(ValueError, match=r"only rank 0 .* under zb_v, share a weight"):
            make_pipeline(own, Case("zb_v", 2, 2), backend, 3, tied=tied).step(x, y, mean_square)
        make_pipeline(own, Case("zb_v", 2, 2), backend, 3).step(x, y, mean_square)
        return own[0].up.weight.grad

    gradient, _ = on_ranks(2, body)
    assert_equal_gradients(gradient, expected.gradients["0.up.weight"], "shared")


def test_tie_that_does_not_fit_is_told_on_every_rank(on_ranks: OnRanks) -> None:
    def body(backend: Any, ties: list[dict[str, Any]]) -> str:
        pipe = fd.Pipeline(nn.Linear(2, 2 + backend.rank), backend, 1, tied=ties[backend.rank])
        with pytest.raises(ValueError, match="tied weight") as caught:
            pipe.step(torch.zeros(1, 2))
        return str(caught.value)

    for ties in (
        [{"w": "weight"}, {}],
        [{"w": "weight"}, {"w": "weight"}],
        [{"w": "nothing"}, {"w": "weight"}],
        [{"w": "weight", "v": "weight"}, {"w": "weight"}],  # one sum would lack what is in another
    ):
        messages = on_ranks(2, body, ties)
        assert messages[0] == messages[1]
    (message,) = set(on_ranks(2, body, [{"w": "nothing"}, {}]))
    assert message.endswith("that a stage on this rank trains; these are: bias, weight")


def test_tie_that_has_no_shape_yet_is_told_on_every_rank(on_ranks: OnRanks) -> None:
    def body(backend: Any) -> None:
        module = nn.LazyLinear(2) if backend.rank else nn.Linear(2, 2)
        pipe = fd.Pipeline(module, backend, 1, tied={"w": "weight"})
        with pytest.raises(ValueError, match="tied weight 'w' has no shape yet"):
            pipe.step(torch.zeros(1, 2))

    on_ranks(2, body)


def test_tie_by_a_name_that_several_stages_have_is_told_on_every_rank(on_ranks: OnRanks) -> None:
    def body(backend: Any) -> Any:
        own = [nn.Linear(2, 2), nn.Linear(2, 2)]
        schedule = "interleaved_1f1b"
        pipe = fd.Pipeline(own, backend, 1, schedule, tied={"w": "weight"})
        with pytest.raises(ValueError, match=r"one of several parameters .* stages \[0, 2\]"):
            pipe.step(torch.ones(1, 2), torch.ones(1, 2), mean_square)
        own[1].weight = own[0].weight  # the same on each rank, so that the name is clear
        with fd.Pipeline(own, backend, 1, schedule, tied={"w": "weight"}) as pipe:
            pipe.step(torch.ones(1, 2), torch.ones(1, 2), mean_square)
        return own[0].weight.grad

    torch.testing.assert_close(*on_ranks(2, body))


# Hooks and functions of the user


class Doubles(torch.autograd.Function):  # type: ignore[name-defined]
    """A layer in one: its backward computes both gradients at once."""

    @staticmethod
    def forward(ctx: Any, x: Any, weight: Any, calls: list[int]) -> Any:
        ctx.save_for_backward(x, weight)
        ctx.calls = calls
        return x * weight

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        x, weight = ctx.saved_tensors
        ctx.calls[0] += 1
        return gradient * weight, (gradient * x).sum(0), None


class WithFunction(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(1, 2, WIDTH, dtype=torch.float64))
        self.block = Block().double()
        self.calls = [0]

    def forward(self, x: Any) -> Any:
        return self.block(Doubles.apply(x, self.weight, self.calls))


def test_function_that_the_split_would_run_twice_is_told_and_runs_once(on_ranks: OnRanks) -> None:
    model = nn.Sequential(WithFunction(), WithFunction())
    x, y = batch(6)

    def body(backend: Any) -> Any:
        stage = copy.deepcopy(model)[backend.rank]
        fd.Pipeline(stage, backend, 3, "zb_h1").step(x.clone().requires_grad_(), y, mean_square)
        return stage

    with pytest.warns(RuntimeWarning, match="DoublesBackward .* would run twice"):
        stages = on_ranks(2, body)
    expected = run_whole(model, x, y)
    for rank, stage in enumerate(stages):
        assert stage.calls == [3]
        for name, parameter in stage.named_parameters():
            assert_equal_gradients(parameter.grad, expected.gradients[f"{rank}.{name}"], name)


class Products(TorchDispatchMode):
    """Counts matrix products, those of backward included."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        self.count += function.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm)
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("case", [("zb_h1", 3, 1), ("zb_v", 2, 2)], ids=by_name)
def test_a_divided_backward_computes_each_product_once(
    on_ranks: OnRanks, case: tuple[str, int, int]
) -> None:
    size = Case(*case)
    model = chain(size.num_stages)
    x, y = batch(6)

    def body(backend: Any) -> Any:
        pipe = make_pipeline(copy.deepcopy(model), size, backend, 1)
        with Products() as products:
            pipe.step(x.clone().requires_grad_(), y, mean_square)
        return products.count

    with Products() as products:
        run_whole(copy.deepcopy(model), x, y)
    assert sum(on_ranks(size.num_ranks, body)) == products.count > 0


class Scaled(torch.autograd.Function):  # type: ignore[name-defined]
    """Keeps things under the names of methods and attributes of autograd's own nodes."""

    @staticmethod
    def forward(ctx: Any, weight: Any) -> Any:
        ctx.name, ctx.variable = "scaled", 3
        return weight * ctx.variable

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        return gradient * ctx.variable


def test_functions_may_keep_what_they_like(on_ranks: OnRanks) -> None:
    class Scales(nn.Linear):
        def forward(self, x: Any) -> Any:
            return nn.functional.linear(x, Scaled.apply(self.weight), self.bias)

    model = chain(2, lambda _: Scales(WIDTH, WIDTH))
    x, y = batch(6)
    pipelined = run_pipelined(on_ranks, Case("zb_h1", 2, 1), model, x, y, 3)
    assert_same(pipelined, run_whole(copy.deepcopy(model), x, y))


@pytest.mark.filterwarnings("ignore:Pipeline stage:RuntimeWarning")
@pytest.mark.parametrize("use_reentrant", [True, False])
def test_modules_may_checkpoint_parts_of_themselves(on_ranks: OnRanks, use_reentrant: bool) -> None:
    class Saving(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = Block().double()

        def forward(self, x: Any) -> Any:
            return checkpoint(self.block, x, use_reentrant=use_reentrant)

    model = nn.Sequential(Saving(), Saving())
    x, y = batch(6)
    pipelined = run_pipelined(on_ranks, Case("zb_h1", 2, 1), model, x, y, 3)
    assert_same(pipelined, run_whole(model, x, y))


@pytest.mark.usefixtures("traces_in_threads")
def test_compiled_modules_are_told_and_run_whole(on_ranks: OnRanks) -> None:
    model = chain(2)
    x, y = batch(6)

    def body(backend: Any) -> Any:
        stage = nn.Sequential(Block(), nn.Linear(WIDTH, WIDTH)).double()
        stage[0].load_state_dict(model[backend.rank].state_dict())
        nn.init.eye_(stage[1].weight)
        nn.init.zeros_(stage[1].bias)
        stage[0].compile(backend="aot_eager")
        pipe = fd.Pipeline(stage, backend, 3, "zb_h1")
        assert pipe.step(x.clone().requires_grad_(), y, mean_square) == pytest.approx(expected.loss)
        return gradients_of(stage[0])

    expected = run_whole(model, x, y)
    with pytest.warns(RuntimeWarning, match="CompiledFunctionBackward .* would run twice"):
        outcomes = on_ranks(2, body)
    for rank, gradients in enumerate(outcomes):
        for name, gradient in gradients.items():
            assert_equal_gradients(gradient, expected.gradients[f"{rank}.{name}"], name)


def test_gradients_that_tensors_retain_count_once(on_ranks: OnRanks) -> None:
    def in_place(gradient: Any) -> None:
        gradient *= 3

    class Retains(Block):
        def forward(self, x: Any) -> Any:
            self.h = self.up(x)
            self.h.retain_grad()
            self.h.register_hook(in_place)
            return self.down(torch.tanh(self.h))

    model = chain(2, lambda _: Retains())
    x, y = batch(4)

    def body(backend: Any) -> Any:
        stage = copy.deepcopy(model)[backend.rank]
        pipe = fd.Pipeline(stage, backend, 1, "zb_h1")
        pipe.step(x.clone().requires_grad_(), y, mean_square)
        return stage

    whole = copy.deepcopy(model)
    run_whole(whole, x, y)
    for ours, theirs in zip(on_ranks(2, body), whole, strict=True):
        torch.testing.assert_close(ours.h.grad, theirs.h.grad)
        torch.testing.assert_close(ours.up.weight.grad, theirs.up.weight.grad)


@pytest.mark.parametrize("case", ONE_OF_EACH, ids=by_name)
def test_hooks_of_parameters_and_tensors_count_once(
    on_ranks: OnRanks, case: tuple[str, int, int]
) -> None:
    size = Case(*case)

    class Hooked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = Block()
            self.last = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Any) -> Any:
            h = self.last(self.block(x))
            if h.requires_grad:
                h.register_hook(lambda g: g * 3)
            return h

    model = chain(size.num_stages, lambda _: Hooked())
    x, y = batch(6)

    def body(backend: Any) -> Any:
        own = copy.deepcopy(model)
        fired = []
        for parameter in own.parameters():
            parameter.register_post_accumulate_grad_hook(lambda p: fired.append(id(p)))
        pipe = make_pipeline(own, size, backend, 3)
        pipe.step(x, y, mean_square)
        ours = [p for s in pipe.stage_numbers for p in own[s].parameters()]
        assert sorted(fired) == sorted([id(p) for p in ours] * 3)
        return {s: own[s] for s in pipe.stage_numbers}

    expected = run_whole(model, x, y)
    for stages in on_ranks(size.num_ranks, body):
        for number, stage in stages.items():
            for name, parameter in stage.named_parameters():
                theirs = expected.gradients[f"{number}.{name}"]
                assert_equal_gradients(parameter.grad, theirs, f"{number}.{name}")


class InterruptedLock:
    """A lock at which Ctrl-C comes when it is taken for the second time."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.times = 0

    def acquire(self, blocking: bool = True) -> bool:
        self.times += 1
        if self.times == 2:
            raise KeyboardInterrupt
        return self.lock.acquire(blocking)

    def release(self) -> None:
        self.lock.release()  # raises unless it is held


def test_an_interrupt_while_others_draw_takes_nothing_from_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lock = InterruptedLock()
    monkeypatch.setattr(torch_random, "_lock", lock)
    generator = torch.Generator()
    with (
        pytest.raises(KeyboardInterrupt),
        torch_random.Seeded([generator], 2),
        torch_random.while_others_draw(),
    ):
        lock.lock.acquire()  # another thread's turn
    assert lock.lock.locked()


def test_an_interrupt_after_a_call_of_an_entering_rank_leaves_the_generators_to_others() -> None:
    def interrupt(after: int) -> bool:
        """Enter and leave; press Ctrl-C after so many calls of C, and tell whether it came."""
        seeded = torch_random.Seeded([torch.Generator()], 2)
        calls_left = after

        def count(frame: Any, event: str, _: Any) -> None:
            nonlocal calls_left
            if event == "c_return" and frame.f_code.co_filename == torch_random.__file__:
                calls_left -= 1
                if calls_left == 0:
                    raise KeyboardInterrupt

        sys.setprofile(count)
        try:
            seeded.__enter__()
        except KeyboardInterrupt:
            return True
        finally:
            sys.setprofile(None)
        seeded.__exit__(None, None, None)
        return False

    for after in itertools.count(1):
        came = interrupt(after)
        assert not torch_random._lock.locked(), f"interrupted after call {after}"
        if not came:
            break
    assert after > 3
