"""Stages that are torch modules: what runs again, what is divided, what users hook into."""

from __future__ import annotations

import copy
import itertools
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest
from ranks_as_threads import OnRanks

torch = pytest.importorskip("torch", reason="torch is not installed")

from parallel.pipeline.pipeline_models import (  # noqa: E402 - needs torch
    ONE_OF_EACH,
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


# Generators that ranks share


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
