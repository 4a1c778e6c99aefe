"""A regression by torch, on rows that ranks share: what steps together are compared with."""

from __future__ import annotations

from typing import Any

import torch

ROWS = 12


def randomize(net: Any) -> Any:
    """With a generator of its own: ranks are threads, that of torch is for all of them."""
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for p in net.parameters():
            p.copy_(torch.randn(p.shape, generator=generator) / 3)
    return net.double()


def loss_of(net: Any, rows: slice) -> Any:
    generator = torch.Generator().manual_seed(11)
    x = torch.randn(ROWS, 7, generator=generator, dtype=torch.float64)
    y = torch.randn(ROWS, 3, generator=generator, dtype=torch.float64)
    return torch.nn.functional.mse_loss(net(x[rows]), y[rows])


def backward(net: Any, rows: slice) -> None:
    loss_of(net, rows).backward()


def own(backend: Any) -> slice:
    return slice(backend.rank, None, backend.world_size)


def weights(net: Any) -> list[Any]:
    return [value.detach().tolist() for value in net.state_dict().values()]


def assert_same(actual: list[Any], expected: list[Any]) -> None:
    # Means of other order: some units in the last place of float64 at each of 20 steps.
    for a, b in zip(actual, expected, strict=True):
        torch.testing.assert_close(torch.tensor(a), torch.tensor(b), rtol=1e-8, atol=1e-9)
