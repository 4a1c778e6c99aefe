"""What the pipelines under measurement compute, the same under every system."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import nn

ACTION_S = 0.01


class _SleepInBackward(torch.autograd.Function):
    """The identity, whose gradient takes a while."""

    @staticmethod
    def forward(ctx: Any, x: Any, seconds: float) -> Any:
        ctx.seconds = seconds
        return _same_memory(x)

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        time.sleep(ctx.seconds)
        # Another tensor: autograd copies the caller's own before it keeps it.
        return _same_memory(gradient), None


class _Grow(torch.autograd.Function):
    """One number in, a large array out, and back: so that only what is between stages is large."""

    @staticmethod
    def forward(ctx: Any, x: Any, large: Any) -> Any:
        ctx.save_for_backward(x)
        return _same_memory(large)

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        (x,) = ctx.saved_tensors
        return _same_memory(x), None


class _Loss(torch.autograd.Function):
    """A loss that costs nothing, with a gradient as large as what it is of."""

    @staticmethod
    def forward(ctx: Any, x: Any, small: Any) -> Any:
        ctx.save_for_backward(x, small)
        return small.sum()

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        x, small = ctx.saved_tensors
        return _same_memory(x), small * gradient


class Sleeper(nn.Module):
    """Sleeps in its forward, in its input's gradient and in its weight's: in place of compute.

    Ranks that outnumber the cores then run as if each had one of its own. A large array
    passes through untouched, and so does its gradient; the weight is applied to a small one.
    """

    def __init__(self, seconds: float, width: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))
        self.large = torch.zeros(1, width)
        self.seconds = seconds

    def forward(self, x: Any, small: Any = None) -> Any:
        if isinstance(x, tuple):  # ferro_dist passes a tuple as one argument, torch as several
            x, small = x
        if small is None:
            x, small = _Grow.apply(x, self.large), x.new_ones(1)
        time.sleep(self.seconds)
        scale = _SleepInBackward.apply(self.scale, self.seconds)
        return _SleepInBackward.apply(x, self.seconds), small * scale


class Compute(nn.Module):
    """Some layers of matrix products."""

    def __init__(self, width: int = 512, depth: int = 4) -> None:
        super().__init__()
        layers = [nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(depth)]
        self.layers = nn.Sequential(*layers)

    def forward(self, x: Any) -> Any:
        return self.layers(x)


def cheap_loss(output: Any, _: Any) -> Any:
    """Return a loss of a stage's output."""
    if isinstance(output, tuple):
        return _Loss.apply(*output)
    return output.flatten()[0] * 1.0  # no view: torch's zero bubble detaches it in place


def _same_memory(x: Any) -> Any:
    """Return another tensor over the same memory: no copy, and to autograd no view either."""
    same = x.new_empty(0)
    return same.set_(x.untyped_storage(), x.storage_offset(), x.size(), x.stride())


def mean_sleep_s(seconds: float = ACTION_S, times: int = 20) -> float:
    """Return how long a sleep really lasts: longer than it is told to."""
    started_s = time.perf_counter()
    for _ in range(times):
        time.sleep(seconds)
    return (time.perf_counter() - started_s) / times
