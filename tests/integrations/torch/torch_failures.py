"""A torch module on ranks of which one is lost in backward."""

from __future__ import annotations

import copy
import os
import signal
from typing import Any

import pytest
import torch
from fault_injection import meet
from torch import nn

import ferro_dist as fd


class Dies(torch.autograd.Function):
    """The identity, until its gradient is asked for."""

    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        os.kill(os.getpid(), signal.SIGKILL)


class Raises(torch.autograd.Function):
    """The identity, until its gradient is asked for."""

    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        raise KeyError("in backward")


def lose_rank_1(backend: Any, failure: Any, overlap: Any, steps_in_backward: bool) -> float:
    """Let `failure` meet rank 1 in the second backward; return a gradient of those who go on."""
    module = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))
    ddp = fd.DDP(module, backend, bucket_mb=1e-5, overlap=overlap)
    optimizer = torch.optim.Adam(ddp.parameters())
    ddp(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    if steps_in_backward:
        ddp.step_in_backward(optimizer)
    before = copy.deepcopy((module.state_dict(), optimizer.state_dict()))
    meet(backend, 1)
    y = module[:2](torch.ones(1, 4))
    y = module[2:](failure.apply(y) if backend.rank == 1 else y)
    error: Any = KeyError if backend.rank == 1 else fd.DistributedError
    with pytest.raises(error) as caught:
        y.sum().backward()
    if backend.rank != 1:
        assert caught.value.peer == 1
        assert isinstance(caught.value, fd.PeerLostError) == (failure is Dies)
    after = (module.state_dict(), optimizer.state_dict())
    torch.testing.assert_close(after, before, rtol=0, atol=0)
    with backend.shrink() as rest:
        again = fd.DDP(ddp.into_inner(), rest, bucket_mb=1e-5, overlap=overlap)
        again.zero_grad()
        again(torch.full((1, 4), rest.rank + 1.0)).sum().backward()
        again.verify()
        total: float = again.module[0].weight.grad.sum().item()
        return total
