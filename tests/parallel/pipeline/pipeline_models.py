"""Models in parts, run through a pipeline and, for comparison, without one."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import pytest
import torch
from ranks_as_threads import OnRanks
from torch import nn

import ferro_dist as fd
from ferro_dist.parallel.schedules import placement_for

Tree = Any

WIDTH = 5
# Schedule, ranks, stages on a rank: 2, 3 and 4 of each.
SCHEDULES = [
    *(("gpipe", ranks, 1) for ranks in (2, 3, 4)),
    *(("1f1b", ranks, 1) for ranks in (2, 3, 4)),
    *(("zb_h1", ranks, 1) for ranks in (2, 3, 4)),
    *(("interleaved_1f1b", ranks, 2) for ranks in (2, 3, 4)),
    ("interleaved_1f1b", 2, 3),
    *(("zb_v", ranks, 2) for ranks in (2, 3, 4)),
]
ONE_OF_EACH = [
    ("gpipe", 2, 1),
    ("1f1b", 3, 1),
    ("zb_h1", 3, 1),
    ("interleaved_1f1b", 2, 2),
    ("zb_v", 2, 2),
]


class Case(NamedTuple):
    """A schedule and its size."""

    schedule: str
    num_ranks: int
    stages_per_rank: int

    @property
    def num_stages(self) -> int:
        return self.num_ranks * self.stages_per_rank

    def stages_of(self, rank: int) -> list[int]:
        placement = placement_for(self.schedule, self.num_ranks, self.stages_per_rank)
        return [stage for stage, other in enumerate(placement) if other == rank]


class Result(NamedTuple):
    """What a step leaves behind."""

    loss: float
    gradients: dict[str, torch.Tensor | None]
    input_gradient: torch.Tensor | None


class Block(nn.Module):
    """Two layers and a residual."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(x)))


def chain(num_stages: int, part: Callable[[int], nn.Module] = lambda _: Block()) -> nn.Sequential:
    """Make a model of so many parts, always the same one, in float64."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(*(part(stage) for stage in range(num_stages))).double()


def batch(rows: int, seed: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, WIDTH, generator=generator, dtype=torch.float64)
    return x, torch.randn(rows, WIDTH, generator=generator, dtype=torch.float64)


def mean_square(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return nn.functional.mse_loss(output, target)


def run_whole(
    model: nn.Module, x: torch.Tensor, target: Any, loss_fn: Any = mean_square, steps: int = 1
) -> Result:
    """Run a model as everybody does."""
    x = x.clone().requires_grad_(x.is_floating_point())
    for _ in range(steps):
        loss = loss_fn(model(x), target)
        loss.backward()
    return Result(float(loss.detach()), gradients_of(model), x.grad)


def run_pipelined(
    on_ranks: OnRanks,
    case: Case,
    model: nn.Module,
    x: torch.Tensor,
    target: Any,
    num_microbatches: int,
    loss_fn: Any = mean_square,
    steps: int = 1,
    **options: Any,
) -> Result:
    """Run a copy of it in a pipeline, and bring together what the ranks have."""
    x = x.clone().requires_grad_(x.is_floating_point())

    def body(backend: Any) -> tuple[float, dict[str, Any]]:
        whole = copy.deepcopy(model)
        stages = case.stages_of(backend.rank)
        with make_pipeline(whole, case, backend, num_microbatches, **options) as pipe:
            for _ in range(steps):
                is_first, is_last = 0 in stages, case.num_stages - 1 in stages
                loss = pipe.step(
                    x if is_first else None,
                    target if is_last else None,
                    loss_fn if is_last else None,
                )
        return loss, {f"{s}.{n}": g for s in stages for n, g in gradients_of(whole[s]).items()}

    outcomes = on_ranks(case.num_ranks, body)
    losses = {loss for loss, _ in outcomes}
    assert len(losses) == 1, "every rank has the same loss"
    gradients = {name: g for _, own in outcomes for name, g in own.items()}
    return Result(losses.pop(), gradients, x.grad)


def make_pipeline(
    model: nn.Sequential, case: Case, backend: Any, num_microbatches: int, **options: Any
) -> fd.Pipeline[Any]:
    own = [model[stage] for stage in case.stages_of(backend.rank)]
    module = own[0] if case.stages_per_rank == 1 else own
    return fd.Pipeline(module, backend, num_microbatches, case.schedule, **options)


def gradients_of(module: nn.Module) -> dict[str, torch.Tensor | None]:
    return {name: parameter.grad for name, parameter in module.named_parameters()}


def assert_same(pipelined: Result, whole: Result) -> None:
    assert pipelined.loss == pytest.approx(whole.loss, rel=1e-12)
    assert pipelined.gradients.keys() == whole.gradients.keys()
    for name, gradient in whole.gradients.items():
        assert_equal_gradients(pipelined.gradients[name], gradient, name)
    assert_equal_gradients(pipelined.input_gradient, whole.input_gradient, "input")


def assert_equal_gradients(
    ours: torch.Tensor | None, theirs: torch.Tensor | None, name: str
) -> None:
    if theirs is None or ours is None:
        assert ours is theirs, name
        return
    torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12, msg=lambda m: f"{name}: {m}")


def by_name(case: Sequence[Any]) -> str:
    return f"{case[0]}-{case[1]}x{case[2]}"
