"""What a stage holds beside its microbatch: random numbers, statistics, tied weights."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from ranks_as_threads import OnRanks

torch = pytest.importorskip("torch", reason="torch is not installed")

from parallel.pipeline.pipeline_models import (  # noqa: E402 - needs torch
    ONE_OF_EACH,
    SCHEDULES,
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
    run_pipelined,
    run_whole,
)
from torch import nn  # noqa: E402

import ferro_dist as fd  # noqa: E402
from ferro_dist.parallel.pipeline.stage import microbatch_seed  # noqa: E402

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
    assert (
        "float32 of shape (2, 2) on rank 0, float32 of shape (3, 2) on rank 1"
        in on_ranks(2, body, [{"w": "weight"}] * 2)[0]
    )
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
