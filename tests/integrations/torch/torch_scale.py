"""Torch modules of which every gradient, or the order of them, is known by heart."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import nn

import ferro_dist as fd

OVERLAP = pytest.mark.parametrize("overlap", [False, "always"])

torch.set_num_threads(1)


class Scale(nn.Module):
    """y = weight * x + bias, one element each."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1, dtype=torch.float64))
        self.bias = nn.Parameter(torch.zeros(1, dtype=torch.float64))
        self.learning_rate = 0.1

    def forward(self, x: float) -> Any:
        return self.weight * x + self.bias


class Upwards(nn.Module):
    """Layers whose gradients become ready in the order in which they are registered."""

    def __init__(self, layers: Iterable[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x: Any) -> Any:
        for layer in reversed(self.layers):
            x = layer(x)
        return x


def scale(backend: Any, **options: Any) -> Any:
    """Wrap one, with a bucket for each parameter."""
    return fd.DDP(Scale(), backend, bucket_mb=1e-5, **options)


def gradients_of(module: Any) -> tuple[float | None, ...]:
    return tuple(None if p.grad is None else p.grad.item() for p in module.parameters())


def note_copies(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Return a list to which every tensor is added that is copied from now on."""
    copies = []

    def clone(tensor: Any, *args: Any, **kwargs: Any) -> Any:
        copies.append(tensor)
        return torch.clone(tensor, *args, **kwargs)

    monkeypatch.setattr(torch.Tensor, "clone", clone)
    return copies
