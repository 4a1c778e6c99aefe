"""Does a pipeline compute what the model computes? Cases in which one may be silently wrong.

Each probe runs a small model on two ranks under one system, and without a pipeline. The outcome
is ``"right"``, ``"raises"`` (told, on some rank), or ``"silently wrong"``.
"""

from __future__ import annotations

import copy
import math
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

import ferro_dist as fd
from ferro_dist.testing import RankFailed, run_ranks

WIDTH = 4
NUM_MICROBATCHES = 4
Tensor = Any


def _model(has_norm: bool) -> nn.Sequential:
    torch.manual_seed(0)
    norm: Callable[[], nn.Module] = (lambda: nn.BatchNorm1d(WIDTH)) if has_norm else nn.Tanh
    return nn.Sequential(
        *(nn.Sequential(nn.Linear(WIDTH, WIDTH), norm()) for _ in range(2))
    ).double()


def _batch(rows: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    x, y = torch.randn(2, rows, WIDTH, generator=generator, dtype=torch.float64)
    return x, y


def _loss(output: Tensor, target: Tensor) -> Tensor:
    return nn.functional.mse_loss(output, target)


class _Probe:
    """A case: how many rows and steps, and what is compared."""

    def __init__(
        self, rows: int = 8, steps: int = 1, has_norm: bool = False, of_input: bool = False
    ) -> None:
        self.rows = rows
        self.steps = steps
        self.has_norm = has_norm
        self.of_input = of_input

    def expected(self) -> list[dict[str, Tensor]]:
        """Return by stage what must come out."""
        model = _model(self.has_norm)
        x, y = _batch(self.rows)
        x.requires_grad_()
        for _ in range(self.steps):
            if not self.has_norm:
                _loss(model(x), y).backward()
                continue
            for part, target in zip(
                x.chunk(NUM_MICROBATCHES), y.chunk(NUM_MICROBATCHES), strict=True
            ):
                (_loss(model(part), target) / NUM_MICROBATCHES).backward()
        results = [_results(stage) for stage in model]
        if self.of_input:
            results[0]["input"] = x.grad
        return results


PROBES = {
    "two steps without zero_grad": _Probe(steps=2),
    "BatchNorm statistics": _Probe(has_norm=True),
    "uneven last microbatch": _Probe(rows=7),
    "the input's gradient": _Probe(of_input=True),
    "replicas with zero bubble": _Probe(),
}
_WITH_REPLICAS = "replicas with zero bubble"


def run_probe(name: str, system: str) -> str:
    """Run one probe under one system."""
    ranks = 4 if name == _WITH_REPLICAS else 2
    with tempfile.TemporaryDirectory() as folder:
        meeting = str(Path(folder, "meeting"))
        try:
            outcomes = run_ranks(ranks, _play, name, system, meeting, backend="none", timeout=60)
        except RankFailed:
            return "raises"
    if any(outcome == "raises" for outcome in outcomes):
        return "raises"
    return "right" if all(outcome == "right" for outcome in outcomes) else "silently wrong"


def _play(rank: int, world_size: int, addr: str, name: str, system: str, meeting: str) -> str:
    torch.set_num_threads(1)
    probe = PROBES[name]
    stage_number = rank % 2
    play = _play_ours if system == "ferro_dist" else _play_torch
    try:
        found = play(rank, world_size, addr, name, meeting)
    except Exception:
        return "raises"
    expected = probe.expected()[stage_number]
    is_right = all(
        found[key] is not None and torch.allclose(found[key], value, rtol=1e-8)
        for key, value in expected.items()
    )
    return "right" if is_right else "silently wrong"


def _play_ours(rank: int, world_size: int, addr: str, name: str, meeting: str) -> Any:
    probe = PROBES[name]
    x, y = _batch(probe.rows)
    with fd.HostBackend(rank, world_size, addr) as backend:
        stage = copy.deepcopy(_model(probe.has_norm)[rank % 2])
        if name == _WITH_REPLICAS:
            with fd.RankGrid(backend, pipeline=2) as grid:
                x, y = x.chunk(2)[grid.data.rank], y.chunk(2)[grid.data.rank]
                pipe = fd.Pipeline(stage, grid.pipeline, NUM_MICROBATCHES, "zb_h1", dp=grid.data)
                pipe.step(x, y, _loss)
                return _results(stage)
        x.requires_grad_(probe.of_input)
        pipe = fd.Pipeline(stage, backend, NUM_MICROBATCHES, "1f1b")
        for _ in range(probe.steps):
            pipe.step(x, y, _loss)
        return {**_results(stage), "input": x.grad}


def _play_torch(rank: int, world_size: int, addr: str, name: str, meeting: str) -> Any:
    import datetime

    import torch.distributed as dist

    dist.init_process_group(
        "gloo",
        init_method=f"file://{meeting}",
        rank=rank,
        world_size=world_size,
        timeout=datetime.timedelta(seconds=20),
    )
    try:
        if name == _WITH_REPLICAS:
            return _torch_with_replicas(rank)
        return _torch_alone(rank, PROBES[name])
    finally:
        dist.destroy_process_group()


def _torch_alone(rank: int, probe: _Probe) -> Any:
    from torch.distributed import pipelining

    x, y = _batch(probe.rows)
    x.requires_grad_(probe.of_input)
    module = _model(probe.has_norm)[rank]
    stage = pipelining.PipelineStage(module, rank, 2, torch.device("cpu"))
    schedule = pipelining.Schedule1F1B(stage, NUM_MICROBATCHES, loss_fn=_loss)
    for _ in range(probe.steps):
        schedule.step(x) if rank == 0 else schedule.step(target=y)
    return {**_results(module), "input": x.grad}


def _torch_with_replicas(rank: int) -> Any:
    import torch.distributed as dist
    from torch.distributed import pipelining
    from torch.nn.parallel import DistributedDataParallel

    replica, number = divmod(rank, 2)
    rows = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    columns = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    x, y = (t.chunk(2)[replica] for t in _batch(8))
    module = _model(has_norm=False)[number]
    replicated = DistributedDataParallel(module, process_group=columns[number])
    stage = pipelining.PipelineStage(
        replicated, number, 2, torch.device("cpu"), group=rows[replica]
    )
    schedule = pipelining.ScheduleInterleavedZeroBubble([stage], NUM_MICROBATCHES, loss_fn=_loss)
    schedule.step(x) if number == 0 else schedule.step(target=y)
    return _results(module)


def _results(stage: nn.Module) -> dict[str, Tensor]:
    return {
        **{name: parameter.grad for name, parameter in stage.named_parameters()},
        **{
            name: value
            for name, value in stage.named_buffers()
            if not math.isnan(float(value.sum())) and name.endswith(("mean", "var"))
        },
    }
