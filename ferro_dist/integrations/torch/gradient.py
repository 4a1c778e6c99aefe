"""One gradient of torch: its dtype, its sum with another, and copies of it, dense or not."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import torch

__all__ = ["add", "as_dense", "copy_or_clear", "dtype_of_gradient"]

Tensor: TypeAlias = Any


def dtype_of_gradient(parameter: Tensor) -> Any:
    """Return the dtype of ``grad``, which may differ from the parameter's."""
    return parameter.grad_dtype or parameter.dtype


def add(a: Tensor, b: Tensor) -> Tensor:
    """Return the sum of two gradients, of which any may be sparse."""
    # torch adds a sparse tensor to a dense one, but not the other way round.
    return b + a if a.layout is not torch.strided else a + b


def as_dense(gradient: Tensor) -> Tensor:
    """Return a gradient as a dense tensor; itself, if it is one."""
    return gradient if gradient.layout is torch.strided else gradient.to_dense()


def copy_or_clear(slots: Sequence[Tensor], gradients: Sequence[Tensor | None]) -> None:
    """Copy gradients to their slots, zeros for absent ones. Some may be there already."""
    pairs = list(zip(slots, gradients, strict=True))
    absent = [slot for slot, gradient in pairs if gradient is None]
    if absent:
        torch._foreach_zero_(absent)
    # A sparse one comes from a function that could not be known beforehand.
    given = [(slot, as_dense(g)) for slot, g in pairs if g is not None and g is not slot]
    if given:
        torch._foreach_copy_([slot for slot, _ in given], [dense for _, dense in given])
