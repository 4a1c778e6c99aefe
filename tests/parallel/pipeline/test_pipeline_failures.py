"""What goes wrong on one rank is told on all, and hangs none."""

from __future__ import annotations

import contextlib
import copy
import gc
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from ranks_as_threads import OnRanks

torch = pytest.importorskip("torch", reason="torch is not installed")

from parallel.pipeline.pipeline_models import (  # noqa: E402 - needs torch
    ONE_OF_EACH,
    WIDTH,
    Block,
    Case,
    batch,
    by_name,
    chain,
    make_pipeline,
    mean_square,
)
from torch import nn  # noqa: E402

import ferro_dist as fd  # noqa: E402
from ferro_dist.parallel.exchange import all_gather_bytes  # noqa: E402
from ferro_dist.parallel.pipeline import connection as pipeline_connection  # noqa: E402
from ferro_dist.parallel.pipeline import outcome, pipeline  # noqa: E402
from ferro_dist.parallel.pipeline import plan as pipeline_plan  # noqa: E402
from ferro_dist.parallel.pipeline.activation_channel import Receiver, Sender  # noqa: E402
from ferro_dist.parallel.pipeline.handwritten_stage import HandwrittenStage  # noqa: E402
from ferro_dist.parallel.schedules import Action  # noqa: E402


def raised_by(call: Callable[[], Any]) -> BaseException | None:
    try:
        call()
    except BaseException as error:
        return error
    return None


# Arguments of the constructor


def test_constructor_wants_microbatches() -> None:
    with contextlib.ExitStack() as stack:
        for backend in map(stack.enter_context, fd.SimulatedBackend.create_group(2)):
            for count in (0, -1):
                with pytest.raises(ValueError, match="num_microbatches must be > 0"):
                    fd.Pipeline(nn.Identity(), backend, count, "gpipe")
            for too_many in (10**9, 1 << 70):  # for which there would be no memory
                with pytest.raises(ValueError, match="num_microbatches must be at most"):
                    fd.Pipeline(nn.Identity(), backend, too_many, "gpipe")
            for no_count in ("4", 2.0, None, True):
                with pytest.raises(TypeError, match="num_microbatches must be an integer"):
                    fd.Pipeline(nn.Identity(), backend, no_count, "gpipe")  # type: ignore[arg-type]


def test_constructor_wants_two_ranks() -> None:
    with (
        fd.SimulatedBackend.create_group(1)[0] as alone,
        pytest.raises(fd.InvalidWorldSize, match=r"world_size must be >= 2 .* got 1"),
    ):
        fd.Pipeline(nn.Identity(), alone, 2, fd.PipelineSchedule.ONE_F_ONE_B)


@pytest.mark.parametrize(
    ("module", "options", "error", "words"),
    [
        (nn.Identity(), {"schedule": "2f2b"}, ValueError, "no schedule '2f2b'"),
        (nn.Identity(), {"schedule": ["0F0", "1F0"]}, ValueError, "."),
        (nn.Identity(), {"schedule": ["0F0 0B0"]}, ValueError, "1 ranks, not for 2"),
        (object(), {}, TypeError, "a stage is a torch.nn.Module"),
        (nn.Identity(), {"average": "median"}, ValueError, "average must be"),
        (nn.Identity(), {"bucket_mb": 0}, ValueError, "bucket_mb must be"),
        (nn.Identity(), {"timeout": -1}, ValueError, "timeout must be"),
        (nn.Identity(), {"seed": "x"}, TypeError, "seed must be an integer or None"),
        (nn.Identity(), {"seed": 1.5}, TypeError, "seed must be an integer or None, not 1.5"),
        (nn.Identity(), {"schedule": "zb_v"}, ValueError, "stages 0, 3, .* is 1. Give a list"),
        ([nn.Identity()] * 2, {}, ValueError, "In a list, each one is a stage"),
        ([], {}, ValueError, "module is empty"),
        (nn.Identity, {}, TypeError, "not the class Identity: make one"),
        (nn.Identity(), {"bucket_mb": "25"}, ValueError, "bucket_mb must be"),
        (nn.Identity(), {"average": []}, ValueError, "average must be"),
        (nn.Identity(), {"checkpoint": 1}, TypeError, "checkpoint must be True, False or"),
        (nn.Identity(), {"checkpoint": {0: False}}, TypeError, "checkpoint must be True, False or"),
        (nn.Identity(), {"checkpoint": [0, 2]}, ValueError, r"names stages \[2\]"),
        (nn.Identity(), {"tied": ["w"]}, TypeError, "tied must be a dict"),
        (nn.Identity(), {"tied": {1: "w"}}, TypeError, "tied weight must be a str, not 1"),
        (nn.Identity(), {"dp": 2}, TypeError, "dp must be a group"),
    ],
)
def test_constructor_checks_its_arguments(
    module: Any, options: dict[str, Any], error: type[Exception], words: str
) -> None:
    with contextlib.ExitStack() as stack:
        group = [stack.enter_context(b) for b in fd.SimulatedBackend.create_group(2)]
        with pytest.raises(error, match=words):
            fd.Pipeline(module, group[0], 1, **{"schedule": "1f1b", **options})


def test_constructor_wants_groups() -> None:
    with contextlib.ExitStack() as stack:
        group = [stack.enter_context(b) for b in fd.SimulatedBackend.create_group(2)]
        message = r"backend must be a group, .* not Identity; the order is Pipeline\(module, "
        with pytest.raises(TypeError, match=message):
            fd.Pipeline(group[0], nn.Identity(), 2)
        with pytest.raises(ValueError, match="replicas in other pipelines, not the pipeline's own"):
            fd.Pipeline(nn.Identity(), group[0], 2, dp=group[0])


def test_constructor_refuses_closed_groups() -> None:
    with contextlib.ExitStack() as stack:
        closed = [stack.enter_context(b) for b in fd.SimulatedBackend.create_group(2)]
    with contextlib.ExitStack() as stack:
        group = [stack.enter_context(b) for b in fd.SimulatedBackend.create_group(2)]
        with pytest.raises(fd.ChannelClosed, match="the group given as backend is closed"):
            fd.Pipeline(nn.Identity(), closed[0], 2)
        with pytest.raises(fd.ChannelClosed, match="the group given as dp is closed"):
            fd.Pipeline(nn.Identity(), group[0], 2, dp=closed[0])


# Arguments of a step


@pytest.mark.parametrize(
    ("x", "target", "loss_fn", "weight", "error", "words"),
    [
        (None, batch(4)[1], mean_square, None, ValueError, "rank 0 must provide input"),
        (torch.tensor(1.0), None, None, None, ValueError, "must have at least 1 dimension"),
        (batch(1)[0], batch(1)[1], mean_square, None, ValueError, "2 microbatches. Drop it"),
        ((batch(4)[0], batch(5)[0]), None, None, None, ValueError, "different numbers of rows"),
        ({"a": 3}, None, None, None, ValueError, "holds no array"),
        (batch(4)[0], batch(4)[1], None, None, ValueError, "without a loss_fn"),
        (batch(4)[0], batch(4)[1], "mse", None, TypeError, "loss_fn must be callable"),
        (batch(4)[0], batch(4)[1], mean_square, [1.0], ValueError, "weight has 1 numbers"),
        (batch(4)[0], batch(4)[1], mean_square, [0.0, 0.0], ValueError, "all weights are 0"),
        (batch(4)[0], batch(4)[1], mean_square, [-1.0, 2.0], ValueError, "at least 0"),
        (batch(4)[0], batch(4)[1], mean_square, [-1.0, 2.0, 1.0, 1.0], ValueError, "at least 0"),
        (batch(4)[0], batch(4)[1], mean_square, [10**400, 1], ValueError, "and finite"),
        (batch(4)[0], batch(4)[1], mean_square, [1e308, 1e308], ValueError, "sum is not finite"),
        (batch(4)[0], (batch(6)[1],), lambda o, _: o.sum(), None, ValueError, "target has 6 rows"),
        (batch(4)[0], batch(6)[1], mean_square, None, ValueError, "target has 6 rows, the input 4"),
        (batch(4)[0].numpy(), batch(4)[1], mean_square, None, TypeError, "input holds a numpy"),
        (3.0, batch(4)[1], mean_square, None, ValueError, "input holds no array"),
        (b"", batch(4)[1], mean_square, None, TypeError, "^Pipeline: what travels"),
        ({None: batch(4)[0]}, None, None, None, TypeError, "^Pipeline: what travels"),
        (batch(4)[0], None, mean_square, None, ValueError, "give the target, too"),
        (batch(4)[0], None, nn.MSELoss(), None, ValueError, "give the target, too"),
        (batch(4)[0], batch(4)[1], nn.MSELoss, None, TypeError, r"make one: MSELoss\(\)"),
        (batch(4)[0], batch(4)[1], mean_square, "ab", TypeError, "weight must be a sequence"),
        (batch(4)[0], batch(4)[1], mean_square, "12", TypeError, "weight must be a sequence"),
        (batch(4)[0], batch(4)[1], mean_square, {0: 1, 1: 1}, TypeError, "weight must be a seq"),
        (batch(4)[0], batch(4)[1], mean_square, {1, 2}, TypeError, "weight must be a sequence"),
        (batch(4)[0].to_sparse(), batch(4)[1], mean_square, None, TypeError, "give to_dense"),
    ],
)
@pytest.mark.parametrize("num_ranks", [2, 3])
def test_bad_arguments_raise_the_same_on_every_rank(
    on_ranks: OnRanks,
    num_ranks: int,
    x: Any,
    target: Any,
    loss_fn: Any,
    weight: Any,
    error: type[Exception],
    words: str,
) -> None:
    model = chain(num_ranks)
    good_x, good_y = batch(4)

    def body(backend: Any) -> str:
        pipe = fd.Pipeline(model[backend.rank], backend, 2, "1f1b")
        is_last = backend.rank == num_ranks - 1
        with pytest.raises(error, match=words) as caught:
            pipe.step(
                x if backend.rank == 0 else None,
                target if is_last else None,
                loss_fn if is_last else None,
                weight=weight if is_last else None,
            )
        assert not isinstance(caught.value, fd.StageFailed)
        pipe.step(good_x, good_y, mean_square)  # the group stays usable
        return str(caught.value)

    assert len(set(on_ranks(num_ranks, body))) == 1


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_weight_that_nobody_would_count_by_is_told(on_ranks: OnRanks, schedule: str) -> None:
    def body(backend: Any) -> None:
        pipe = fd.Pipeline(Block().double(), backend, 2, schedule)
        weight = [1.0, 3.0]
        with pytest.raises(ValueError, match=r"first stage was given a weight, .* Give it there"):
            pipe.step(*batch(4), mean_square, weight=weight if backend.rank == 0 else None)
        pipe.step(*batch(4), mean_square, weight=weight)

    on_ranks(3, body)


def test_forward_outlives_an_evaluation_that_fails(on_ranks: OnRanks) -> None:
    model = chain(2)
    x, _ = batch(4)

    def body(backend: Any) -> Any:
        stage = copy.deepcopy(model)[backend.rank]
        pipe = fd.Pipeline(stage, backend, 2, "gpipe")
        outputs = pipe.forward(x)
        with pytest.raises(ValueError, match="input has 1 rows"):
            pipe.eval(x[:1])
        gradients = [torch.ones(2, WIDTH).double()] * 2
        pipe.backward(outputs, gradients if backend.rank == 1 else None)
        return stage.up.weight.grad

    gradients = on_ranks(2, body)
    model(x).sum().backward()
    for gradient, stage in zip(gradients, model, strict=True):
        torch.testing.assert_close(gradient, stage.up.weight.grad)


class Counts(nn.Module):
    """Its outputs do not have the form that they would have for the whole batch."""

    def __init__(self, form: Callable[[Any], Any]) -> None:
        super().__init__()
        self.form = form

    def forward(self, x: Any) -> Any:
        return self.form(x)


@pytest.mark.parametrize(
    ("form", "words"),
    [
        (lambda x: (x, len(x)), r"no array: .*'int', 3.*'int', 2"),
        (lambda x: (x,) * len(x), "differ in their structure"),
        (lambda x: {f"of {len(x)}": x}, "differ in their structure"),
        (lambda x: x.t(), r"their shapes are \(5, 3\), \(5, 2\)"),
        (lambda x: x if len(x) == 3 else x.sum(), r"their shapes are \(3, 5\), \(\)"),
    ],
)
def test_outputs_that_cannot_be_joined_are_told_on_every_rank(
    on_ranks: OnRanks, form: Callable[[Any], Any], words: str
) -> None:
    def body(backend: Any) -> Any:
        stage = chain(1) if backend.rank == 0 else Counts(form)
        pipe = fd.Pipeline(stage, backend, 2)
        x, _ = batch(5)
        with pytest.raises(ValueError, match=words):
            pipe.eval(x)
        return len(pipe.forward(x))

    assert on_ranks(2, body) == [2, 2]


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
def test_nested_input_is_told_on_every_rank(on_ranks: OnRanks) -> None:
    def body(backend: Any) -> None:
        pipe = fd.Pipeline(nn.Linear(2, 2), backend, 2, "1f1b")
        x = torch.nested.nested_tensor([torch.ones(1, 2), torch.ones(2, 2)])
        with pytest.raises(TypeError, match="input holds a nested tensor"):
            pipe.eval(x)

    on_ranks(2, body)


def test_module_that_refuses_evaluation_is_told_on_every_rank(on_ranks: OnRanks) -> None:
    class Refuses(nn.Linear):
        def train(self, mode: bool = True) -> Any:
            if not mode:
                raise NotImplementedError("this module has no mode")
            return super().train(mode)

    def body(backend: Any) -> None:
        stage = nn.Sequential(nn.Dropout(), Refuses(2, 2)) if backend.rank else nn.Linear(2, 2)
        pipe = fd.Pipeline(stage, backend, 1, "1f1b")
        with pytest.raises(fd.StageFailed, match="this module has no mode"):
            pipe.eval(torch.ones(1, 2))
        assert all(module.training for module in stage.modules())

    on_ranks(2, body)


def test_backward_of_an_earlier_forward_is_told(on_ranks: OnRanks) -> None:
    def body(backend: Any) -> None:
        pipe = fd.Pipeline(nn.Linear(WIDTH, WIDTH).double(), backend, 2, "1f1b")
        earlier, later = pipe.forward(batch(4)[0]), pipe.forward(batch(4)[0])
        with pytest.raises(ValueError, match="the outputs of the last forward"):
            pipe.backward(earlier, [torch.ones_like(output) for output in later])

    on_ranks(2, body)


def test_backward_without_forward_is_told(on_ranks: OnRanks) -> None:
    def body(backend: Any) -> None:
        pipe = fd.Pipeline(nn.Linear(WIDTH, WIDTH).double(), backend, 2, "gpipe")
        with pytest.raises(RuntimeError, match="needs a forward"):
            pipe.backward([])
        for outputs, gradients, words in (
            ([], None, "the 2 outputs of forward, not 0"),
            (None, None, "need grad_outputs"),
            (None, [torch.ones(2, WIDTH)], "wants 2 grad_outputs, not 1"),
            (None, [torch.ones(2, 1)] * 2, r"gradient of shape \(2, 1\) for an output of"),
            ("abc", None, "a list of the 2 outputs of forward, not str"),
            (None, torch.ones(2, 2, WIDTH), "a list of 2 grad_outputs, not Tensor"),
            (None, [batch(2)[0].numpy()] * 2, "grad_outputs holds a numpy.ndarray"),
            (None, [1.0, 1.0], "grad_outputs holds a float where"),
        ):
            made = pipe.forward(batch(4)[0])
            with pytest.raises((TypeError, ValueError), match=words):
                pipe.backward(made if outputs is None else outputs, gradients)

    on_ranks(2, body)


# Disagreement


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (lambda rank: {"num_microbatches": 2 + rank}, "num_microbatches=2"),
        (lambda rank: {"schedule": ["1f1b", "gpipe"][rank]}, "schedule=one_f_one_b"),
        (lambda rank: {"seed": rank}, "seed=0"),
    ],
)
def test_ranks_that_disagree_are_told_before_the_first_microbatch(
    on_ranks: OnRanks, options: Any, words: str
) -> None:
    def body(backend: Any) -> int:
        stage = Counting()
        chosen = {"num_microbatches": 2, "schedule": "1f1b", **options(backend.rank)}
        pipe = fd.Pipeline(stage, backend, **chosen)
        with pytest.raises(fd.CollectiveMismatch, match=words):
            pipe.step(torch.zeros(6, WIDTH))
        return stage.calls

    assert on_ranks(2, body) == [0, 0]


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Any) -> Any:
        self.calls += 1
        return x


@pytest.mark.parametrize("calls", [("step", "eval"), ("eval", "step"), ("forward", "step")])
def test_ranks_that_make_different_calls_do_not_wait(
    on_ranks: OnRanks, calls: tuple[str, str]
) -> None:
    met = threading.Barrier(2)

    def body(backend: Any) -> str:
        pipe = fd.Pipeline(Block().double(), backend, 2, "1f1b")
        x, y = batch(4)
        step = {"step": lambda: pipe.step(x, y, mean_square)}
        call = {**step, "eval": lambda: pipe.eval(x), "forward": lambda: pipe.forward(x)}
        error = raised_by(call[calls[backend.rank]])
        met.wait()
        return f"{type(error).__name__}: {error}"

    errors = on_ranks(2, body)
    assert "was interrupted by an exception inside a call" in errors[0]
    assert f"rank 0 has called {calls[0]}(), its run 0, and this rank {calls[1]}()" in errors[1]


@pytest.mark.parametrize("planner", [0, 1, 2])
@pytest.mark.parametrize("call", ["step", "eval"])
def test_plan_on_one_rank_keeps_none_waiting(on_ranks: OnRanks, planner: int, call: str) -> None:
    met = threading.Barrier(3)

    def body(backend: Any) -> str:
        pipe = fd.Pipeline(Block().double(), backend, 2, "1f1b")
        x, y = batch(4)
        pipe.step(x, y, mean_square)
        calls = {"step": lambda: pipe.step(x, y, mean_square), "eval": lambda: pipe.eval(x)}
        error = raised_by(pipe.plan if backend.rank == planner else calls[call])
        met.wait()
        return f"{type(error).__name__}: {error}"

    errors = on_ranks(3, body)
    assert any(f"{call}()" in error and "plan()" in error for error in errors)
    assert all("plan()" in error or "was interrupted" in error for error in errors), errors


def test_plan_before_any_step_on_one_rank_keeps_none_waiting(on_ranks: OnRanks) -> None:
    met = threading.Barrier(2)

    def body(backend: Any) -> bool:
        pipe = fd.Pipeline(Block().double(), backend, 2, "1f1b")
        call = pipe.plan if backend.rank == 0 else pipe.step
        error = raised_by(lambda: call(*batch(4), mean_square))
        met.wait()
        return isinstance(error, (RuntimeError, fd.DistributedError)) and not isinstance(
            error, fd.Timeout
        )

    assert on_ranks(2, body) == [True, True]


def test_plan_that_one_rank_does_not_make_is_told_to_replicas(on_ranks: OnRanks) -> None:
    met = threading.Barrier(4)

    def body(backend: Any) -> BaseException | None:
        with fd.RankGrid(backend, pipeline=2) as grid:
            pipe = fd.Pipeline(Block().double(), grid.pipeline, 2, dp=grid.data)
            x, y = batch(4)
            evaluates = backend.rank == 1
            error = raised_by(lambda: pipe.eval(x) if evaluates else pipe.plan(x, y, mean_square))
            met.wait()  # no error of another rank is due to this one's leaving
        return error

    for error in on_ranks(4, body):
        assert isinstance(error, (RuntimeError, fd.ChannelClosed)), error


# Stages that raise


class Faulty(nn.Module):
    """Raises in the forward, or in the backward, of its n-th microbatch."""

    def __init__(self, inner: nn.Module, where: str, at: int) -> None:
        super().__init__()
        self.inner = inner
        self.where = where
        self.left = at

    def forward(self, x: Any) -> Any:
        if self.where == "forward":
            self.count()
        y = self.inner(x)
        if self.where == "backward":
            y.register_hook(lambda _: self.count())
        return y

    def count(self) -> None:
        self.left -= 1
        if self.left < 0:
            raise ZeroDivisionError("the stage's own words")


@pytest.mark.parametrize("at", [0, 3])
@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("case", [*ONE_OF_EACH, ("1f1b", 4, 1), ("zb_v", 4, 2)], ids=by_name)
def test_exception_of_a_stage_reaches_every_rank(
    on_ranks: OnRanks, case: tuple[str, int, int], where: str, at: int
) -> None:
    size = Case(*case)
    x, y = batch(8)

    def body(backend: Any, faulty: int) -> None:
        model = chain(size.num_stages)
        pipe = make_pipeline(model, size, backend, 4)
        pipe.step(x, y, mean_square)
        model[faulty] = Faulty(model[faulty], where, at)
        pipe = make_pipeline(model, size, backend, 4)
        with pytest.raises(fd.StageFailed) as caught:
            pipe.step(x, y, mean_square)
        error = caught.value
        assert error.stage == faulty
        assert error.peer is not None
        assert faulty in size.stages_of(error.peer)
        assert f"ZeroDivisionError in stage {faulty}" in str(error)
        assert "the stage's own words" in str(error)
        assert "in count" in error.traceback_text
        assert isinstance(error.__cause__, ZeroDivisionError) == (error.peer == backend.rank)
        # The group, and the pipeline, go on.
        model[faulty].where = "nowhere"
        pipe.step(x, y, mean_square)

    for faulty in range(size.num_stages):
        on_ranks(size.num_ranks, body, faulty)


class Speechless(Exception):
    def __str__(self) -> str:
        raise LookupError


@pytest.mark.parametrize("rank_at_fault", [0, 1])
def test_exception_without_words_is_told_too(on_ranks: OnRanks, rank_at_fault: int) -> None:
    class Raising(nn.Module):
        def forward(self, x: Any) -> Any:
            raise Speechless

    def body(backend: Any) -> None:
        stage = Raising() if backend.rank == rank_at_fault else Block().double()
        pipe = fd.Pipeline(stage, backend, 2)
        words = rf"Speechless in stage {rank_at_fault}, .*\(LookupError in its __str__"
        with pytest.raises(fd.StageFailed, match=words):
            pipe.step(*batch(4), mean_square)

    on_ranks(2, body)


def its_own_cause() -> Exception:
    error = ValueError("first")
    error.__cause__ = error  # as `raise error from error` does
    return error


def a_cause_of_its_cause() -> Exception:
    error, other = ValueError("first"), KeyError("second")
    error.__cause__, other.__cause__ = other, error
    return error


def with_exceptions_that_are_none() -> Exception:
    error = ValueError("first")
    error.exceptions = ["of a library's own"]  # type: ignore[attr-defined]
    return error


def without_traceback() -> Exception:
    text: Any = 5  # where Python expects a line of the source
    return SyntaxError("first", ("file", 1, 1, text))


@pytest.mark.parametrize(
    "make",
    [its_own_cause, a_cause_of_its_cause, with_exceptions_that_are_none, without_traceback],
)
def test_exception_of_an_odd_kind_is_told_too(
    on_ranks: OnRanks, make: Callable[[], Exception]
) -> None:
    class Raising(nn.Module):
        def forward(self, x: Any) -> Any:
            raise make()

    def body(backend: Any) -> None:
        stage = Raising() if backend.rank == 1 else Block().double()
        pipe = fd.Pipeline(stage, backend, 2)
        with pytest.raises(fd.StageFailed, match=r"in stage 1, .*: first") as raised:
            pipe.step(*batch(4), mean_square)
        assert "raise make()" in raised.value.traceback_text

    on_ranks(2, body)


@pytest.mark.parametrize("rank_at_fault", [0, 2])
def test_large_messages_under_way_do_not_hold_up_a_failure(
    on_ranks: OnRanks, rank_at_fault: int
) -> None:
    x = torch.zeros(6, 1 << 20)  # 4 MiB a row: more than any channel buffers

    def body(backend: Any) -> None:
        stage: nn.Module = Scale()
        if backend.rank == rank_at_fault:
            stage = Faulty(stage, "forward", 2)
        pipe = fd.Pipeline(stage, backend, 6, "gpipe")
        with pytest.raises(fd.StageFailed, match=f"in stage {rank_at_fault}"):
            pipe.step(x, loss_fn=lambda output: output.mean())

    on_ranks(3, body)


class Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: Any) -> Any:
        return x * self.scale


def test_two_stages_that_raise_are_told_of_as_one(on_ranks: OnRanks) -> None:
    def body(backend: Any) -> tuple[Any, Any]:
        pipe = fd.Pipeline(Faulty(Block().double(), "backward", 0), backend, 3, "1f1b")
        with pytest.raises(fd.StageFailed) as caught:
            pipe.step(*batch(6), mean_square)
        return caught.value.stage, caught.value.peer

    assert len(set(on_ranks(3, body))) == 1


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
@pytest.mark.parametrize(
    ("output", "words"),
    [
        (lambda x: {x}, "not builtins.set"),
        (lambda x: torch.return_types.max((x, x)), "return_types"),
        (lambda x: x.detach().numpy(), "returns tensors"),
        (lambda x: x.to_sparse(), "returns dense tensors, not torch.sparse_coo"),
        (lambda x: torch.nested.nested_tensor(list(x)), "returns no nested tensor"),
        (lambda x: (x, np.float64(1)), "not numpy.float64"),
    ],
)
def test_output_that_cannot_travel_is_told(on_ranks: OnRanks, output: Any, words: str) -> None:
    class Odd(nn.Module):
        def forward(self, x: Any) -> Any:
            return output(x)

    def body(backend: Any) -> None:
        pipe = fd.Pipeline(Odd() if backend.rank == 0 else Block(), backend, 2, "1f1b")
        with pytest.raises(fd.StageFailed) as caught:
            pipe.step(batch(4)[0])
        assert words in str(caught.value).splitlines()[0]  # a traceback may show the line above

    on_ranks(2, body)


@pytest.mark.parametrize(
    ("loss_fn", "words"),
    [
        (lambda output, target: output - target, "real number, not float64 of shape"),
        (lambda output, target: 1.0, "real number, not 'float'"),
        (lambda output, target: mean_square(output, target) * 1j, "not complex128 of shape"),
        (lambda output, target: mean_square(output.detach(), target), "depends on no weight"),
    ],
)
def test_loss_that_trains_nothing_is_told(on_ranks: OnRanks, loss_fn: Any, words: str) -> None:
    def body(backend: Any) -> None:
        pipe = fd.Pipeline(Block().double(), backend, 2, "1f1b")
        with pytest.raises(fd.StageFailed, match=words):
            pipe.step(batch(4)[0], batch(4)[1], loss_fn)

    on_ranks(2, body)


@pytest.mark.parametrize("call", ["step", "forward"])
def test_inference_mode_is_told_of_where_gradients_are_wanted(on_ranks: OnRanks, call: str) -> None:
    def body(backend: Any) -> float:
        pipe = fd.Pipeline(Block().double(), backend, 2, "1f1b")
        with torch.inference_mode(), pytest.raises(fd.StageFailed, match="call eval"):
            pipe.step(*batch(4), mean_square) if call == "step" else pipe.forward(batch(4)[0])
        with torch.inference_mode():
            pipe.eval(batch(4)[0])
        return pipe.step(*batch(4), mean_square)

    assert min(on_ranks(2, body)) > 0


def test_frozen_stages_need_no_loss_that_depends_on_them(on_ranks: OnRanks) -> None:
    def body(backend: Any) -> float:
        stage = Block().double().requires_grad_(False)
        return fd.Pipeline(stage, backend, 2, "1f1b").step(*batch(4), mean_square)

    assert min(on_ranks(2, body)) > 0


@pytest.mark.parametrize("checkpoint", [False, True])
def test_module_that_writes_into_what_it_has_received_is_told(
    on_ranks: OnRanks, checkpoint: bool
) -> None:
    def body(backend: Any) -> None:
        layers = [nn.ReLU(inplace=True), Block().double()]
        stage = nn.Sequential(*layers[backend.rank == 0 :])
        pipe = fd.Pipeline(stage, backend, 2, "1f1b", checkpoint=checkpoint)
        words = r"stage 1 .*\n?.*as ReLU\(inplace=True\)"
        with pytest.raises(fd.StageFailed, match=words):
            pipe.step(*batch(4), mean_square)

    on_ranks(2, body)


def test_ctrl_c_on_one_rank_is_told_on_the_others(on_ranks: OnRanks) -> None:
    class Interrupted(nn.Module):
        def forward(self, x: Any) -> Any:
            raise KeyboardInterrupt

    def body(backend: Any) -> str:
        stage = Interrupted() if backend.rank == 1 else Block().double()
        pipe = fd.Pipeline(stage, backend, 2, "1f1b")
        return type(raised_by(lambda: pipe.step(*batch(4), mean_square))).__name__

    assert on_ranks(3, body) == ["StageFailed", "KeyboardInterrupt", "StageFailed"]


class ImpatientlyInterrupted(HandwrittenStage):
    """Ctrl-C in its forward, and once more while the step is given up."""

    def forward(self, *_: Any) -> Any:
        raise KeyboardInterrupt("the first")

    def interrupt(self, error: BaseException) -> None:
        raise KeyboardInterrupt("the second")


class Interrupting(Exception):
    """Ctrl-C while its words are put into a report."""

    def __str__(self) -> str:
        raise KeyboardInterrupt("the second")


class InterruptedWhileTold(HandwrittenStage):
    """Ctrl-C while the failure of its forward is told."""

    def forward(self, *_: Any) -> Any:
        raise Interrupting


@pytest.mark.parametrize("failing", [ImpatientlyInterrupted, InterruptedWhileTold])
@pytest.mark.parametrize("at_fault", [0, 1, 2])
def test_second_ctrl_c_keeps_none_waiting_and_leaves_no_thread(
    on_ranks: OnRanks, at_fault: int, failing: type[HandwrittenStage]
) -> None:
    met = threading.Barrier(3)

    def body(backend: Any) -> str:
        kind = failing if backend.rank == at_fault else HandwrittenStage
        pipe = fd.Pipeline(kind(Doubling()), backend, 4)
        error = raised_by(lambda: pipe.step(np.ones((4, 3)), loss_fn=sum_and_ones))
        met.wait()  # no error of another rank is due to this one's leaving
        return f"{type(error).__name__}: {error}"

    errors = on_ranks(3, body)
    assert errors.pop(at_fault) == "KeyboardInterrupt: the second"
    for error in errors:
        assert f"rank {at_fault} was interrupted" in error
    assert not [t for t in threading.enumerate() if t.name.startswith("pipeline-receiver")]


def test_ctrl_c_while_a_thread_starts_leaves_none(
    on_ranks: OnRanks, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = threading.Thread.start
    interrupted: list[threading.Thread] = []

    def start_and_interrupt(thread: threading.Thread) -> None:
        start(thread)
        if thread.name == "pipeline-receiver-2" and not interrupted:  # rank 1 alone has one
            interrupted.append(thread)
            raise KeyboardInterrupt

    def body(backend: Any) -> tuple[str, float]:
        pipe = fd.Pipeline(HandwrittenStage(Doubling()), backend, 4)

        def step() -> float:
            return pipe.step(np.ones((4, 3)), loss_fn=sum_and_ones)

        return type(raised_by(step)).__name__, step()

    monkeypatch.setattr(threading.Thread, "start", start_and_interrupt)
    errors, losses = zip(*on_ranks(3, body), strict=True)
    assert errors == ("StageFailed", "KeyboardInterrupt", "StageFailed")
    assert set(losses) == {24.0}
    (thread,) = interrupted
    thread.join(timeout=60)
    assert not thread.is_alive()


def test_ctrl_c_while_threads_are_ended_leaves_none(
    on_ranks: OnRanks, monkeypatch: pytest.MonkeyPatch
) -> None:
    end = Receiver.end
    interrupted: list[Receiver] = []

    def interrupt_or_end(receiver: Receiver) -> None:
        if receiver._link.backend.rank == 1 and not interrupted:  # it has two
            interrupted.append(receiver)
            raise KeyboardInterrupt
        end(receiver)

    def body(backend: Any) -> str:
        pipe = fd.Pipeline(HandwrittenStage(Doubling()), backend, 4)
        error = raised_by(lambda: pipe.step(np.ones((4, 3)), loss_fn=sum_and_ones))
        return type(error).__name__

    monkeypatch.setattr(Receiver, "end", interrupt_or_end)
    assert on_ranks(3, body) == ["NoneType", "KeyboardInterrupt", "NoneType"]
    gc.collect()
    for thread in threading.enumerate():
        if thread.name.startswith("pipeline-receiver"):
            thread.join(timeout=60)
            assert not thread.is_alive()


def test_ctrl_c_after_the_last_message_to_a_peer_spoils_no_later_run(
    on_ranks: OnRanks, monkeypatch: pytest.MonkeyPatch
) -> None:
    send = Sender.send
    interrupted: list[int] = []

    def send_and_interrupt(sender: Sender, peer: int, receive: Action, *rest: Any) -> int:
        nbytes = send(sender, peer, receive, *rest)
        if str(receive) == "1RECV_F3" and len(interrupted) < 2:
            interrupted.append(peer)
            raise KeyboardInterrupt
        return nbytes

    def body(backend: Any) -> list[Any]:
        pipe = fd.Pipeline(HandwrittenStage(Doubling()), backend, 4)

        def step() -> float:
            return pipe.step(np.ones((4, 3)), loss_fn=sum_and_ones)

        def plan() -> None:
            pipe.plan(np.ones((4, 3)), loss_fn=sum_and_ones)

        errors = [type(raised_by(call)).__name__ for call in (step, step, plan)]
        return [*errors, step(), step()]

    monkeypatch.setattr(Sender, "send", send_and_interrupt)
    ctrl_c, others = on_ranks(3, body)[:2]
    assert ctrl_c == ["KeyboardInterrupt", "KeyboardInterrupt", "NoneType", 24.0, 24.0]
    assert others == ["StageFailed", "StageFailed", "NoneType", 24.0, 24.0]


@pytest.mark.parametrize(
    ("module", "part"),
    [
        (pipeline_connection, "find_tied_weights"),
        (pipeline_connection, "agree_on_ties"),
        (outcome, "_exchange"),
        (pipeline, "meet"),
    ],
)
def test_ctrl_c_between_the_calls_that_connect_a_pipeline_is_told(
    on_ranks: OnRanks, monkeypatch: pytest.MonkeyPatch, module: Any, part: str
) -> None:
    original = getattr(module, part)
    met = threading.Barrier(3)
    own = threading.local()

    def interrupted(*args: Any) -> Any:
        if own.rank == 1:
            raise KeyboardInterrupt
        return original(*args)

    def body(backend: Any) -> str:
        own.rank = backend.rank
        pipe = fd.Pipeline(HandwrittenStage(Doubling()), backend, 4)
        error = raised_by(lambda: pipe.plan(np.ones((4, 3)), loss_fn=sum_and_ones))
        met.wait()  # no error of another rank is due to this one's leaving
        return f"{type(error).__name__}: {error}"

    monkeypatch.setattr(module, part, interrupted)
    errors = on_ranks(3, body)
    assert errors.pop(1) == "KeyboardInterrupt: "
    for error in errors:
        assert "rank 1 was interrupted" in error


def test_closed_pipeline_is_told_on_every_rank(on_ranks: OnRanks) -> None:
    def body(backend: Any) -> None:
        stage = Block().double()
        tied = None if backend.rank == 1 else {"up": stage.up.weight}
        with fd.Pipeline(stage, backend, 2, tied=tied) as pipe:
            pipe.step(*batch(4), mean_square)
        x, y = batch(4)
        calls: list[Callable[[], Any]] = [
            lambda: pipe.step(x, y, mean_square),
            lambda: pipe.eval(x),
            lambda: pipe.forward(x),
            lambda: pipe.backward([]),
            pipe.plan,
        ]
        for call in calls:
            with pytest.raises(fd.ChannelClosed, match="it was closed"):
                call()
        fd.Pipeline(stage, backend, 2, tied=tied).step(*batch(4), mean_square)

    on_ranks(3, body)


# What is made before the first step, and for a plan


class Doubling:
    """A hand-written stage of one weight."""

    def __init__(self) -> None:
        self.weight, self.gradient = np.full(3, 2.0), np.zeros(3)

    def forward(self, x: Any) -> Any:
        return x * self.weight, x

    def backward(self, x: Any, gradient: Any) -> Any:
        self.gradient += (x * gradient).sum(axis=0)
        return gradient * self.weight

    def parameters(self) -> Any:
        return {"weight": self.weight}

    def grads(self) -> Any:
        return {"weight": self.gradient}


def sum_and_ones(y: Any) -> Any:
    return y.sum(), np.ones_like(y)


def test_stage_that_cannot_be_copied_for_a_plan_is_told_on_every_rank(
    on_ranks: OnRanks,
) -> None:
    def body(backend: Any) -> None:
        stage: Any = Doubling()
        if backend.rank == 1:
            stage.lock = threading.Lock()
        pipe = fd.Pipeline(stage, backend, 2)
        with pytest.raises(TypeError, match=r"a Doubling cannot be copied .* Take a step first"):
            pipe.plan(np.ones((4, 3)), loss_fn=sum_and_ones)
        pipe.step(np.ones((4, 3)), loss_fn=sum_and_ones)
        pipe.plan()

    on_ranks(3, body)


class Several(Exception):
    """Holds others, as an ExceptionGroup does, which Python has from 3.11 on."""

    def __init__(self, *exceptions: Exception) -> None:
        super().__init__("several went wrong")
        self.exceptions = exceptions


def in_a_group(end: Exception) -> Exception:
    return Several(end, Several(end))


def in_a_list(end: Exception) -> Exception:
    error = Several()
    error.exceptions = [end]  # type: ignore[assignment]
    return error


def as_a_cause(end: Exception) -> Exception:
    error = LookupError("no statistics of the others")
    error.__cause__ = end
    return error


@pytest.mark.parametrize("wrapped", [in_a_group, in_a_list, as_a_cause])
def test_end_of_another_group_is_no_cause_even_if_it_is_wrapped(
    on_ranks: OnRanks, wrapped: Callable[[Exception], Exception]
) -> None:
    has_failed = threading.Event()

    class Failing(Doubling):
        def forward(self, x: Any) -> Any:
            has_failed.set()
            raise ZeroDivisionError("the stage's own words")

    class Losing(Doubling):
        """Hears in its second microbatch that another group has ended."""

        def forward(self, x: Any) -> Any:
            if x[0, 0] == 0:
                assert has_failed.wait(60)
                raise wrapped(fd.ChannelClosed("rank 1 left the group"))
            return super().forward(x)

    def body(backend: Any) -> None:
        pipe = fd.Pipeline(Failing() if backend.rank else Losing(), backend, 2, "gpipe")
        with pytest.raises(fd.StageFailed, match="ZeroDivisionError in stage 1"):
            pipe.step(np.array([[1.0] * 3, [0.0] * 3]), loss_fn=sum_and_ones)

    on_ranks(2, body)


@pytest.mark.parametrize("at_fault", [0, 1])
def test_plan_that_one_rank_has_no_memory_for_keeps_none_waiting(
    on_ranks: OnRanks, monkeypatch: pytest.MonkeyPatch, at_fault: int
) -> None:
    met = threading.Barrier(3)

    def fill_up(data: bytes, backend: Any) -> list[bytes]:
        if backend.rank == at_fault:
            raise MemoryError("no room for measurements")
        return all_gather_bytes(data, backend)

    def body(backend: Any) -> BaseException | None:
        pipe = fd.Pipeline(Doubling(), backend, 2)
        pipe.step(np.ones((4, 3)), loss_fn=sum_and_ones)
        error = raised_by(pipe.plan)
        met.wait()  # no error of another rank is due to this one's leaving
        return error

    monkeypatch.setattr(pipeline_plan, "all_gather_bytes", fill_up)
    assert_only_one_ran_out_of_memory(on_ranks(3, body), at_fault)


class Full(HandwrittenStage):
    """Finds no memory for what sums gradients."""

    def new_bucket(self, group: Any, like: Any, count: int) -> Any:
        raise MemoryError("no room for gradients")


@pytest.mark.parametrize("at_fault", [0, 3])
def test_replica_that_cannot_begin_keeps_none_waiting(on_ranks: OnRanks, at_fault: int) -> None:
    met = threading.Barrier(4)

    def body(backend: Any) -> BaseException | None:
        with fd.RankGrid(backend, pipeline=2) as grid:
            stage = (Full if backend.rank == at_fault else HandwrittenStage)(Doubling())
            pipe = fd.Pipeline(stage, grid.pipeline, 2, dp=grid.data)
            error = raised_by(lambda: pipe.step(np.ones((4, 3)), loss_fn=sum_and_ones))
            met.wait()  # no error of another rank is due to this one's leaving
            return error

    assert_only_one_ran_out_of_memory(on_ranks(4, body), at_fault)


@pytest.mark.parametrize("at_fault", [0, 2])
def test_tie_that_cannot_be_made_keeps_none_waiting(on_ranks: OnRanks, at_fault: int) -> None:
    met = threading.Barrier(3)

    def body(backend: Any) -> BaseException | None:
        stage = (Full if backend.rank == at_fault else HandwrittenStage)(Doubling())
        tied = {"one": "weight"} if backend.rank != 1 else None
        pipe = fd.Pipeline(stage, backend, 2, tied=tied)
        error = raised_by(lambda: pipe.step(np.ones((4, 3)), loss_fn=sum_and_ones))
        met.wait()
        return error

    assert_only_one_ran_out_of_memory(on_ranks(3, body), at_fault)


def assert_only_one_ran_out_of_memory(errors: list[Any], at_fault: int) -> None:
    assert isinstance(errors.pop(at_fault), MemoryError)
    for error in errors:
        assert isinstance(error, fd.ChannelClosed)
        assert "was interrupted by an exception inside a call" in str(error)
