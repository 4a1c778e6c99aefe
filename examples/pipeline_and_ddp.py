"""Two pipelines side by side: stages along one side of a grid of ranks, replicas along the other.

    ferrorun -n 4 examples/pipeline_and_ddp.py

Each pipeline trains on its share of the batch. Gradients of replicas are averaged while the
pipelines drain, even under a zero-bubble schedule. The result is that of training the whole
model on the whole batch, which rank 0 does for comparison.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn

import ferro_dist as fd

NUM_STAGES = 2
STEPS = 20
ROWS = 32
WIDTH = 16


def make_model() -> nn.Sequential:
    torch.manual_seed(0)
    hidden = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(5)]
    return nn.Sequential(*hidden, nn.Linear(WIDTH, 1)).double()


def make_batches() -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(STEPS, ROWS, WIDTH, generator=generator, dtype=torch.float64)
    return [(x, x.square().mean(dim=1, keepdim=True)) for x in inputs]


def train_whole(model: nn.Sequential, batches: Any) -> float:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for x, y in batches:
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
    return float(loss.detach())


def train_on_grid(model: nn.Sequential, batches: Any, grid: fd.RankGrid) -> float:
    stage = fd.split_sequential(model, NUM_STAGES)[grid.pipeline.rank]
    pipe = fd.Pipeline(stage, grid.pipeline, 4, "zb_h1", dp=grid.data)
    optimizer = torch.optim.SGD(stage.parameters(), lr=0.1)
    loss = 0.0
    for x, y in batches:
        share = slice(grid.data.rank, None, grid.data.world_size)
        loss = pipe.step(x[share], y[share], nn.functional.mse_loss)
        optimizer.step()
        optimizer.zero_grad()
    return loss


def main() -> None:
    torch.set_num_threads(1)
    model, batches = make_model(), make_batches()
    alone = copy.deepcopy(model)
    with fd.init() as backend:
        if backend.world_size % NUM_STAGES:
            raise SystemExit("an even number of ranks: ferrorun -n 4 examples/pipeline_and_ddp.py")
        with fd.RankGrid(backend, pipeline=NUM_STAGES) as grid:
            loss = train_on_grid(model, batches, grid)
    if backend.rank != 0:
        return
    expected = train_whole(alone, batches)
    print(f"{backend.world_size // NUM_STAGES} pipelines of {NUM_STAGES} stages: loss {loss:.6f}")
    print(f"the whole model on the whole batch: loss {expected:.6f}")
    if abs(loss - expected) > 1e-9:
        raise SystemExit("they differ")


if __name__ == "__main__":
    main()
