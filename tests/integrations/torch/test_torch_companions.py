"""What stands beside DDP, together with it: clipping, SyncBatchNorm, ZeRO-1, PowerSGD."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable
from typing import Any

import pytest
from ranks_as_threads import OnRanks

import ferro_dist as fd
from ferro_dist.parallel.buckets.power_sgd import PowerSGD

torch = pytest.importorskip("torch", reason="torch is not installed")

from integrations.torch.torch_failures import Raises  # noqa: E402 - needs torch
from integrations.torch.torch_regression import (  # noqa: E402
    assert_same,
    backward,
    loss_of,
    own,
    randomize,
    weights,
)
from torch import nn  # noqa: E402
from torch.nn.utils import clip_grad_norm_  # noqa: E402

STEPS = 20


def make_mlp() -> Any:
    return randomize(
        torch.nn.Sequential(torch.nn.Linear(7, 24), torch.nn.Tanh(), torch.nn.Linear(24, 3))
    )


def make_normalized() -> Any:
    return randomize(
        torch.nn.Sequential(
            *(torch.nn.Linear(7, 9), torch.nn.BatchNorm1d(9), torch.nn.Tanh()),
            torch.nn.Linear(9, 3),
        )
    )


def train(
    net: Any,
    rows: slice,
    clip: float | None,
    optimizer: Any = None,
    clip_by_norm: Callable[[float], Any] | None = None,
) -> list[Any]:
    optimizer = optimizer or torch.optim.AdamW(net.parameters(), lr=0.01)
    clip_by_norm = clip_by_norm or functools.partial(clip_grad_norm_, list(net.parameters()))
    for _ in range(STEPS):
        optimizer.zero_grad()
        backward(net, rows)
        if clip is not None:
            clip_by_norm(clip)
        optimizer.step()
    return weights(net)


@pytest.mark.parametrize("world_size", [2, 3])
def test_averaged_gradients_are_clipped_as_those_of_the_whole_batch(
    on_ranks: OnRanks, world_size: int
) -> None:
    def body(backend: Any) -> Any:
        return train(fd.DDP(make_mlp(), backend), own(backend), clip=0.1)

    expected = train(make_mlp(), slice(None), clip=0.1)
    for outcome in on_ranks(world_size, body):
        assert_same(outcome, expected)


@pytest.mark.parametrize("world_size", [2, 3])
def test_batches_are_normalized_together(on_ranks: OnRanks, world_size: int) -> None:
    def body(backend: Any) -> Any:
        net = fd.convert_sync_batchnorm(make_normalized(), backend)
        return train(fd.DDP(net, backend), own(backend), clip=None)

    expected = train(make_normalized(), slice(None), clip=None)
    for outcome in on_ranks(world_size, body):
        assert_same(outcome, expected)


class Fails(nn.Module):
    """The identity, but for what `where` names."""

    where = ""

    def forward(self, x: Any) -> Any:
        if self.where == "forward":
            raise KeyError("in forward")
        return Raises.apply(x) if self.where == "backward" else x


@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("is_local", [False, True], ids=["averaged", "no_sync"])
def test_an_exception_reaches_those_who_wait_to_normalize(
    on_ranks: OnRanks, where: str, is_local: bool
) -> None:
    told = threading.Barrier(3)

    def body(backend: Any) -> None:
        before, after = Fails(), Fails()
        net = nn.Sequential(before, nn.Linear(2, 2), nn.BatchNorm1d(2), after)
        ddp = fd.DDP(fd.convert_sync_batchnorm(net, backend), backend)
        if backend.rank == 1:
            (before if where == "forward" else after).where = where
        error = KeyError if backend.rank == 1 else fd.DistributedError
        rounds = ddp.no_sync() if is_local else contextlib.nullcontext()
        with rounds, pytest.raises(error, match=r"rank 1|in forward|in backward"):
            ddp(torch.randn(4, 2)).sum().backward()
        told.wait(60)  # before any rank leaves the groups

    on_ranks(3, body)


def test_an_exception_without_gradients_reaches_those_who_wait_to_normalize(
    on_ranks: OnRanks,
) -> None:
    told = threading.Barrier(2)

    def body(backend: Any) -> None:
        net = torch.nn.Sequential(Fails(), torch.nn.BatchNorm1d(2))
        ddp = fd.DDP(fd.convert_sync_batchnorm(net, backend), backend)
        ddp.eval()
        net[0].where = "forward" if backend.rank else ""
        with pytest.raises(KeyError) if backend.rank else contextlib.nullcontext():
            ddp(torch.randn(4, 2))  # nobody waits
        ddp.train()
        error = KeyError if backend.rank else fd.DistributedError
        with torch.no_grad(), pytest.raises(error, match=r"rank 1|in forward"):
            ddp(torch.randn(4, 2))
        told.wait(60)

    on_ranks(2, body)


def test_too_few_values_to_normalize_end_no_group(on_ranks: OnRanks) -> None:
    def body(backend: Any) -> Any:
        net = fd.convert_sync_batchnorm(nn.BatchNorm1d(2), backend)
        ddp = fd.DDP(net, backend)
        with pytest.raises(ValueError, match="1 values for each channel"):
            ddp(torch.ones(1 - backend.rank, 2))
        ddp(torch.ones(2, 2)).sum().backward()
        return net.bias.grad.tolist()

    assert on_ranks(2, body) == [[2, 2]] * 2


def test_a_normalized_module_goes_on_in_a_smaller_group(on_ranks: OnRanks) -> None:
    def body(backend: Any) -> Any:
        net = torch.nn.Sequential(Fails(), torch.nn.BatchNorm1d(2))
        ddp = fd.DDP(fd.convert_sync_batchnorm(net, backend), backend)
        net[0].where = "forward" if backend.rank == 1 else ""
        with pytest.raises((KeyError, fd.DistributedError)):
            ddp(torch.randn(4, 2)).sum().backward()
        net[0].where = ""
        with backend.shrink() as rest:
            net = fd.convert_sync_batchnorm(ddp.into_inner(), rest)
            again = fd.DDP(net, rest)
            again(torch.full((1, 2), rest.rank + 1.0)).sum().backward()
            again.verify()
            return rest.world_size

    assert on_ranks(3, body) == [3] * 3


def test_a_sharded_optimizer_clips_and_steps_averaged_gradients(on_ranks: OnRanks) -> None:
    def body(backend: Any) -> Any:
        net = fd.DDP(make_mlp(), backend)
        optimizer = fd.ShardedOptimizer(
            net.parameters(), torch.optim.AdamW, backend, average=None, lr=0.01
        )
        return train(net, own(backend), 0.1, optimizer, optimizer.clip_grad_norm_)

    expected = train(make_mlp(), slice(None), clip=0.1)
    for outcome in on_ranks(3, body):
        assert_same(outcome, expected)


def whole_loss(net: Any) -> float:
    return float(loss_of(net, slice(None)).detach())


def test_compressed_gradients_train_all_ranks_alike(on_ranks: OnRanks) -> None:
    def body(backend: Any) -> tuple[Any, float]:
        net = make_mlp()  # its first matrix, 24 × 7, is worth a rank of 1
        ddp = fd.DDP(net, backend, compress=PowerSGD(1))
        trained = train(ddp, own(backend), clip=None)
        ddp.verify()
        return trained, whole_loss(net)

    (first, loss), (second, _) = on_ranks(2, body)
    assert first == second
    exact = make_mlp()
    train(exact, slice(None), clip=None)
    # What is left out of a step comes with a later one: most of the way is made.
    assert loss < whole_loss(make_mlp()) - 0.5 * (whole_loss(make_mlp()) - whole_loss(exact))


class Shuffled(nn.Module):
    """Two matrices, of which the gradient of the first is ready first."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.extra = (
            nn.Parameter(torch.zeros(12, 12, dtype=torch.float64)) for _ in range(3)
        )

    def forward(self, slope: Any) -> Any:
        return (self.second * slope).sum().sin() + (self.first * slope).sum()


@pytest.mark.parametrize("cause", ["order", "frozen"])
def test_what_was_left_out_comes_once_buckets_are_laid_out_anew(
    on_ranks: OnRanks, cause: str
) -> None:
    """The first step alone has gradients: what it does not give must come with the others."""

    def slope_of(rank: int) -> Any:
        generator = torch.Generator().manual_seed(rank)
        factors = torch.randn(2, 3, 12, generator=generator, dtype=torch.float64)
        return factors[0].T @ factors[1]

    def body(backend: Any) -> Any:
        net = Shuffled()
        ddp = fd.DDP(net, backend, compress=PowerSGD(1))
        ddp(slope_of(backend.rank)).backward()
        given = [net.first.grad.clone(), net.second.grad.clone()]
        net.extra.requires_grad_(cause == "order")
        for _ in range(30):
            ddp.zero_grad()
            ddp(torch.zeros(12, 12)).backward()
            given[0] += net.first.grad
            given[1] += net.second.grad
        return given

    mean = (slope_of(0) + slope_of(1)) / 2
    for given in on_ranks(2, body):
        for total in given:
            torch.testing.assert_close(total, mean, rtol=1e-9, atol=1e-9)
