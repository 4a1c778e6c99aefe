"""DDP of torch modules on processes: what threads of one process cannot show, and a death."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from integrations.torch.torch_cases import (  # noqa: E402 - needs torch
    STEPS,
    Branches,
    Case,
    Repeated,
    build,
    cnn,
    loss_of_output,
    mean_square,
    optimizer_of,
    reentrant,
    state_of,
    train_gan,
)
from integrations.torch.torch_failures import Dies, lose_rank_1  # noqa: E402
from integrations.torch.torch_scale import Scale, gradients_of, scale  # noqa: E402
from torch import nn  # noqa: E402

import ferro_dist as fd  # noqa: E402
from ferro_dist.testing import RankDeath, run_ranks  # noqa: E402

DEADLINE_S = 300.0  # a busy machine takes long to import torch alone


class BiasFirst(nn.Module):
    """The parameters of `Scale`, in another order."""

    def __init__(self) -> None:
        super().__init__()
        self.bias, self.weight = (nn.Parameter(torch.zeros(1)) for _ in range(2))


# Where torch's DDP is silently wrong, or raises. The ranks' inputs are 1 and 2.


def two_backwards(ddp: Any, rank: int) -> None:
    y = ddp(rank + 1.0)
    y.sum().backward(retain_graph=True)
    (10 * y).sum().backward()
    assert gradients_of(ddp) == (16.5, 11)


def unfrozen_after_wrapping(ddp: Any, rank: int) -> None:
    ddp.module.weight.requires_grad_(False)
    ddp(rank + 1.0).sum().backward()
    assert gradients_of(ddp) == (None, 1)
    ddp.module.weight.requires_grad_(True)
    ddp.zero_grad()
    ddp(rank + 1.0).sum().backward()
    assert gradients_of(ddp) == (1.5, 1)


def unused_on_one_rank(ddp: Any, rank: int) -> None:
    (ddp(2.0) if rank else ddp.module.bias * 4).sum().backward()
    assert gradients_of(ddp) == (1, 2.5)


def output_in_an_object(ddp: Any, rank: int) -> None:
    y = ddp.module(rank + 1.0)  # past the wrapper: no output is seen at all
    (lambda: y)().sum().backward()
    assert gradients_of(ddp) == (1.5, 1)


def accumulated(ddp: Any, rank: int) -> None:
    with ddp.no_sync():
        ddp(rank + 1.0).sum().backward()
    ddp(10 * (rank + 1.0)).sum().backward()
    assert gradients_of(ddp) == (16.5, 2)


def weighted(ddp: Any, rank: int) -> None:
    with ddp.no_sync():
        ddp(rank + 1.0).sum().backward()
    ddp.sync_gradients(weight=[1, 3][rank])
    assert gradients_of(ddp) == (1.75, 1)


def uneven(ddp: Any, rank: int) -> None:
    with ddp.join():
        for _ in range(rank + 1):
            ddp.zero_grad()
            ddp(2.0).sum().backward()
        # Rank 0 has left when rank 1 takes its second step.
        assert gradients_of(ddp) == ((1, 0.5) if rank else (2, 1))


def compiled(ddp: Any, rank: int) -> None:
    torch.compile(ddp, backend="eager")(torch.full((1,), rank + 1.0).double()).sum().backward()
    assert gradients_of(ddp) == (1.5, 1)


PROBES: list[Callable[[Any, int], None]] = [
    two_backwards,
    unfrozen_after_wrapping,
    unused_on_one_rank,
    output_in_an_object,
    accumulated,
    weighted,
    uneven,
    compiled,
]


def probe(backend: Any) -> None:
    torch.set_num_threads(1)
    for check in PROBES:
        for overlap in (False, "always"):
            ddp = scale(backend, overlap=overlap)
            check(ddp, backend.rank)
            ddp.verify()
    for other in (BiasFirst(), Scale().float(), Scale().requires_grad_(False)):
        with pytest.raises(fd.CollectiveMismatch, match="rank 1"):
            fd.DDP(other if backend.rank else Scale(), backend)
    layers = fd.DDP(Repeated(reentrant).double(), backend, bucket_mb=1e-5, overlap="always")
    plain = copy.deepcopy(layers.module)
    for step in range(2):
        x = torch.ones(2, 6, dtype=torch.float64)
        layers(x).sum().backward()
        plain(x).sum().backward()
        for ours, theirs in zip(layers.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(ours.grad, theirs.grad, msg=f"step {step}")
    branches = fd.DDP(Branches(), backend)
    branches(torch.ones(1, 6), ["left", "right"][backend.rank]).sum().backward()
    assert branches.module.never.weight.grad is None
    assert branches.module.left.weight.grad is not None


@pytest.mark.parametrize("transport", ["host", "tcp"])
def test_no_gradient_is_silently_wrong(transport: str) -> None:
    run_ranks(2, probe, backend=transport, timeout=DEADLINE_S)


# Batches that are normalized together, and two models that train against each other


def images(rows: int) -> Any:
    return torch.randn(rows, 3, 6, 6, generator=torch.Generator().manual_seed(3)).double()


def train_cnn(net: Any, rows: slice) -> dict[str, Any]:
    optimizer = optimizer_of(net)
    for step in range(STEPS):
        mean_square(net(images(12)[rows] + step)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return state_of(net)


def make_cnn() -> Any:
    return build(Case(cnn, loss_of_output))


def train_both(backend: Any) -> list[dict[str, Any]]:
    torch.set_num_threads(1)
    net = fd.convert_sync_batchnorm(make_cnn(), backend)
    rows = slice(backend.rank, None, backend.world_size)
    trained = [
        train_cnn(fd.DDP(net, backend, sync_buffers=False), rows),
        train_gan(lambda module: fd.DDP(module, backend), [backend.rank]),
    ]
    return [{name: value.numpy() for name, value in state.items()} for state in trained]


def test_a_cnn_with_sync_batch_norm_and_a_gan_equal_one_process() -> None:
    torch.set_num_threads(1)
    alone = [
        train_cnn(make_cnn(), slice(None)),
        train_gan(lambda module: module, [0, 1]),
    ]
    for trained in run_ranks(2, train_both, timeout=DEADLINE_S):
        for state, expected in zip(trained, alone, strict=True):
            for name, value in state.items():
                # float64 sums in another order, over 20 steps; statistics of a batch divide by
                # their spread, which makes more of it than in `assert_trained_alike`.
                bound = {"rtol": 1e-8, "atol": 1e-9}
                torch.testing.assert_close(torch.as_tensor(value), expected[name], **bound)


# A rank that dies


@pytest.mark.parametrize(
    ("overlap", "steps_in_backward"), [(False, True), ("always", False)], ids=["after", "beside"]
)
def test_survivors_of_a_death_in_backward_go_on(overlap: Any, steps_in_backward: bool) -> None:
    first, dead, last = run_ranks(
        3, lose_rank_1, Dies, overlap, steps_in_backward, may_die=[1], timeout=DEADLINE_S
    )
    assert isinstance(dead, RankDeath)
    assert first == last
