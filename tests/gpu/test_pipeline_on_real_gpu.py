"""Pipelines of torch modules on a real GPU, which all ranks share, beside the unpipelined model."""

from __future__ import annotations

from typing import Any

import pytest
from gpu.gpu_ranks import connect
from gpu.real_gpu import need, share_gpu

import ferro_dist as fd
from ferro_dist.testing import run_ranks

DEADLINE_S = 300.0
pytestmark = pytest.mark.timeout(900)
CASES = [
    ("gpipe", 2, 1),
    ("1f1b", 3, 1),
    ("zb_h1", 3, 1),
    ("interleaved_1f1b", 2, 2),
    ("zb_v", 2, 2),
]


def ranks(world_size: int, body: Any, *args: Any) -> list[Any]:
    need("torch")
    return run_ranks(world_size, body, *args, backend="none", timeout=DEADLINE_S)


def train_beside_whole(rank: int, world_size: int, addr: str, case: tuple[str, int, int]) -> None:
    import copy

    import torch
    from parallel.pipeline import pipeline_models as models

    share_gpu(rank)
    size = models.Case(*case)
    model = models.chain(size.num_stages).cuda()
    x, y = (part.cuda() for part in models.batch(11))
    whole = models.run_whole(copy.deepcopy(model), x, y, steps=2)
    given = x.clone().requires_grad_()
    torch.cuda.synchronize()
    with connect("hybrid", rank, world_size, addr) as group:
        with (
            torch.cuda.stream(torch.cuda.Stream()),
            models.make_pipeline(model, size, group, 4) as pipe,
        ):
            losses = [pipe.step(given, y, models.mean_square) for _ in range(2)]
        torch.cuda.synchronize()
        assert losses == pytest.approx([whole.loss] * 2, rel=1e-10)
        for stage in pipe.stage_numbers:
            for name, parameter in model[stage].named_parameters():
                theirs = whole.gradients[f"{stage}.{name}"]
                models.assert_equal_gradients(parameter.grad, theirs, name)
        if 0 in pipe.stage_numbers:
            models.assert_equal_gradients(given.grad, whole.input_gradient, "input")


@pytest.mark.parametrize("case", CASES, ids=lambda case: case[0])
def test_step_equals_the_unpipelined_model(case: tuple[str, int, int]) -> None:
    ranks(case[1], train_beside_whole, case)


def train_noisily(rank: int, world_size: int, addr: str, checkpoint: bool) -> Any:
    import torch
    from torch import nn

    share_gpu(rank)
    torch.manual_seed(rank)
    stage = nn.Sequential(nn.Linear(64, 64), nn.Dropout(0.5)).cuda()
    with (
        connect("hybrid", rank, world_size, addr) as group,
        fd.Pipeline(stage, group, 4, "1f1b", checkpoint=checkpoint) as pipe,
    ):
        x = torch.linspace(-1, 1, 64 * 8, device="cuda").reshape(8, 64)
        loss = pipe.step(x, loss_fn=lambda output: output.square().mean())
    return loss, stage[0].weight.grad.sum().item()


def test_dropout_of_a_checkpoint_is_that_of_its_first_forward() -> None:
    kept, again = (ranks(2, train_noisily, checkpoint) for checkpoint in (False, True))
    for ours, theirs in zip(kept, again, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-4)


def pass_while_the_gpu_is_late(rank: int, world_size: int, addr: str) -> None:
    """Receive into memory that was used before, while what used it is still queued."""
    import torch
    from torch import nn

    class Late(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones((), device="cuda"))

        def forward(self, x: Any) -> Any:
            torch.cuda._sleep(2_000_000)
            return x * self.scale

    share_gpu(rank)
    rows, width = 8, 1 << 20
    x = torch.arange(1.0, rows + 1, device="cuda")[:, None].expand(rows, width).contiguous()
    stage = Late()
    with (
        connect("hybrid", rank, world_size, addr) as group,
        fd.Pipeline(stage, group, rows, "1f1b") as pipe,
    ):
        for step in range(1, 6):
            loss = pipe.step(x, loss_fn=lambda output: output.mean())
            assert loss == pytest.approx((rows + 1) / 2)
            assert stage.scale.grad is not None
            assert stage.scale.grad.item() == pytest.approx(step * (rows + 1) / 2)


def test_memory_is_not_received_into_while_it_is_in_use() -> None:
    ranks(2, pass_while_the_gpu_is_late)
