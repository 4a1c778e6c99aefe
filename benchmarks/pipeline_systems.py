"""A pipeline's step under ferro_dist, and under torch.distributed.pipelining on Gloo."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from pipeline_stages import Compute, Sleeper, cheap_loss, mean_sleep_s
from torch import nn

import ferro_dist as fd
from ferro_dist.parallel.schedules import placement_for


class Case(NamedTuple):
    """A pipeline to measure."""

    name: str
    schedule: str
    ranks: int
    num_microbatches: int
    rows: int
    width: int
    """Of a microbatch."""
    kind: str
    """``"sleep"``, ``"compute"`` or ``"empty"``."""
    action_s: float = 0.0

    def stages_of(self, rank: int) -> list[int]:
        placement = placement_for(self.schedule, self.ranks)
        return [stage for stage, other in enumerate(placement) if other == rank]

    def module(self) -> nn.Module:
        if self.kind == "sleep":
            return Sleeper(self.action_s, self.width)
        return Compute(self.width) if self.kind == "compute" else nn.Identity()

    def batch(self) -> Any:
        if self.kind == "sleep":
            return torch.ones(self.num_microbatches, 1, requires_grad=True)
        return torch.randn(self.rows * self.num_microbatches, self.width)


Step = Callable[[], Any]


class Sample(NamedTuple):
    """What one rank has measured."""

    steps_s: list[float]
    action_s: float
    """How long a sleep lasts, or forward and backward of a microbatch, on all ranks at once."""
    overhead_us: float
    peak_live: int


def run_ours(backend: Any, case: Case, steps: int) -> Sample:
    """Be one rank of ferro_dist's pipeline."""
    times, pipe = _run_ours(backend, case, case.batch(), steps)
    plan = pipe.plan()
    overhead_us = 1e6 * plan.overhead_s[backend.rank] / len(pipe._lists[backend.rank])
    return Sample(times, _action_s(case), overhead_us, plan.peak_live[backend.rank])


def draw_ours(backend: Any, case: Case, path: str) -> None:
    """Be one rank of it; the first draws the last of a few steps."""
    # With a small input, too: the first stage then divides its backward as the others do.
    x = torch.zeros(case.num_microbatches, case.width, requires_grad=True)
    _, pipe = _run_ours(backend, case, (x, case.batch()), 3)
    plan = pipe.plan()
    if backend.rank == 0:
        plan.plot(path)


def _run_ours(backend: Any, case: Case, x: Any, steps: int) -> tuple[list[float], Any]:
    torch.set_num_threads(1)
    modules = [case.module() for _ in case.stages_of(backend.rank)]
    module = modules if len(modules) > 1 else modules[0]
    pipe = fd.Pipeline(module, backend, case.num_microbatches, case.schedule)
    target = torch.zeros(case.rows * case.num_microbatches, 1)
    times = _time_steps(
        lambda: pipe.step(x, target, cheap_loss), lambda: fd.barrier(backend), steps
    )
    return times, pipe


def run_torch(
    rank: int, world_size: int, addr: str, case: Case, steps: int, meeting: str
) -> Sample:
    """Be one rank of torch's."""
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{meeting}", rank=rank, world_size=world_size
    )
    try:
        schedule = _torch_schedule(case, rank)
        x = case.batch()
        target = torch.zeros(len(x), 1)
        is_last = len(placement_for(case.schedule, case.ranks)) - 1 in case.stages_of(rank)

        def step() -> None:
            inputs = (x,) if rank == 0 else ()
            schedule.step(*inputs, **({"target": target} if is_last else {}))

        times = _time_steps(step, dist.barrier, steps)
        return Sample(times, _action_s(case), 0.0, 0)
    finally:
        dist.destroy_process_group()


def _torch_schedule(case: Case, rank: int) -> Any:
    from torch.distributed import pipelining

    num_stages = len(placement_for(case.schedule, case.ranks))
    stages = [
        pipelining.PipelineStage(case.module(), stage, num_stages, torch.device("cpu"))
        for stage in case.stages_of(rank)
    ]
    if case.schedule == "zb_v":
        return pipelining.ScheduleZBVZeroBubble(stages, case.num_microbatches, loss_fn=cheap_loss)
    return pipelining.Schedule1F1B(stages[0], case.num_microbatches, loss_fn=cheap_loss)


def _time_steps(step: Step, barrier: Step, steps: int) -> list[float]:
    """Return the times of all but the first one, which makes connections.

    A barrier before each, outside of its time: Gloo's takes longer.
    """
    times = []
    for _ in range(steps + 1):
        barrier()
        started_s = time.perf_counter()
        step()
        times.append(time.perf_counter() - started_s)
    barrier()  # what follows begins on all ranks at once
    return times[1:]


def _action_s(case: Case) -> float:
    if case.kind == "sleep":
        return mean_sleep_s(case.action_s)
    if case.kind == "empty":
        return 0.0
    stage = case.module()
    x = torch.randn(case.rows, case.width, requires_grad=True)
    times = []
    for _ in range(3 * case.num_microbatches):
        started_s = time.perf_counter()
        output = stage(x)
        output.backward(output)
        times.append(time.perf_counter() - started_s)
    return statistics.median(times)
