"""The models that ``ddp.py`` trains: much to compute, little, many small parameters, and sleep."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn

__all__ = ["MODELS", "Workload", "make_workload"]


class Workload(NamedTuple):
    """A model, one fixed batch, and what computes the loss of a model or a wrapper of it."""

    model: Any
    batch: tuple[Any, ...]
    loss: Callable[..., Any]

    def to(self, device: str) -> Workload:
        """Return the same on a device."""
        return Workload(self.model.to(device), tuple(x.to(device) for x in self.batch), self.loss)


def make_workload(name: str, rank: int) -> Workload:
    """Make a model, equal on all ranks, and a batch of this rank's own."""
    torch.manual_seed(0)
    return MODELS[name](torch.Generator().manual_seed(1 + rank))


def _mlp(generator: torch.Generator) -> Workload:
    """10.5 M parameters in four matrices."""
    widths = [1024, 2048, 2048, 2048, 10]
    layers: list[nn.Module] = []
    for n, m in itertools.pairwise(widths):
        layers += [nn.Linear(n, m), nn.ReLU()]
    x = torch.randn(32, widths[0], generator=generator)
    y = torch.randint(widths[-1], (32,), generator=generator)
    return Workload(
        nn.Sequential(*layers[:-1]),
        (x, y),
        lambda model, x, y: nn.functional.cross_entropy(model(x), y),
    )


class _Gpt(nn.Module):
    """3.7 M parameters: 8 layers of width 192, 6 heads, tied embeddings."""

    width, num_layers, num_heads, vocabulary, context = 192, 8, 6, 512, 128

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(self.vocabulary, self.width)
        self.positions = nn.Embedding(self.context, self.width)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(
                self.width, self.num_heads, 4 * self.width, 0.0, "gelu", 1e-5, True, True
            )
            for _ in range(self.num_layers)
        )
        self.norm = nn.LayerNorm(self.width)
        mask = nn.Transformer.generate_square_subsequent_mask(self.context)
        self.register_buffer("mask", mask, persistent=False)

    def forward(self, tokens: Any) -> Any:
        x = self.tokens(tokens) + self.positions.weight
        for layer in self.layers:
            x = layer(x, src_mask=self.mask, is_causal=True)
        return self.norm(x) @ self.tokens.weight.T


def _gpt(generator: torch.Generator) -> Workload:
    shape = (4, _Gpt.context + 1)
    tokens = torch.randint(_Gpt.vocabulary, shape, generator=generator)

    def loss(model: Any, tokens: Any) -> Any:
        scores = model(tokens[:, :-1])
        return nn.functional.cross_entropy(scores.flatten(0, 1), tokens[:, 1:].flatten())

    return Workload(_Gpt(), (tokens,), loss)


class _Scales(nn.Module):
    """300 parameters of 4 KiB, and next to nothing to compute."""

    def __init__(self) -> None:
        super().__init__()
        self.scales = nn.ParameterList(nn.Parameter(torch.ones(1024)) for _ in range(300))

    def forward(self, x: Any) -> Any:
        for scale in self.scales:
            x = x * scale
        return x


def _small(generator: torch.Generator) -> Workload:
    x = torch.randn(1, 1024, generator=generator)
    return Workload(_Scales(), (x,), lambda model, x: model(x).square().mean())


class _Sleep(torch.autograd.Function):
    """Takes its time both ways, but no core, so that ranks which share cores keep pace."""

    forward_s, backward_s = 0.01, 0.02

    @staticmethod
    def forward(ctx: Any, x: Any, weight: Any) -> Any:
        ctx.save_for_backward(x, weight)
        time.sleep(_Sleep.forward_s)
        return x * weight[0]

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> tuple[Any, Any]:
        x, weight = ctx.saved_tensors
        time.sleep(_Sleep.backward_s)
        return gradient * weight[0], (gradient * x).sum().expand_as(weight)


class _Asleep(nn.Module):
    """6 layers of 8 MiB."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(torch.ones(1 << 21)) for _ in range(6))

    def forward(self, x: Any) -> Any:
        for weight in self.weights:
            x = _Sleep.apply(x, weight)
        return x


def _asleep(generator: torch.Generator) -> Workload:
    x = torch.randn(8, generator=generator)
    return Workload(_Asleep(), (x,), lambda model, x: model(x).square().mean())


MODELS: dict[str, Callable[[torch.Generator], Workload]] = {
    "mlp": _mlp,
    "gpt": _gpt,
    "300x4KiB": _small,
    "asleep": _asleep,
}
