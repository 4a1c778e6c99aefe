"""Which tensors of a torch module one rank can give to the others."""

from __future__ import annotations

from typing import Any, TypeAlias

import torch

from ferro_dist import interop
from ferro_dist.errors import InvalidArray

__all__ = ["check_buffer", "check_shareable", "gets_gradient"]

Tensor: TypeAlias = Any


def check_shareable(op: str, what: str, tensor: Tensor) -> None:
    """Raise unless a tensor can be overwritten with that of another rank.

    Parameters
    ----------
    op : str
        Who asks: ``"DDP"``.
    what : str
        Names the tensor: ``"buffer 'mean'"``.
    tensor : torch.Tensor

    Raises
    ------
    ValueError
        It has no shape yet.
    InvalidArray
        It is no plain array, or not where groups reach.
    """
    if torch.nn.parameter.is_lazy(tensor):
        raise ValueError(f"{op}: {what} has no shape yet. Run a batch through the module first.")
    if tensor.device.type not in ("cpu", "cuda"):
        raise InvalidArray(
            f"{op}: {what} is on {tensor.device}, neither on the CPU nor on a CUDA device", op=op
        )
    if tensor.layout is not torch.strided:
        raise InvalidArray(f"{op}: {what} is {tensor.layout}, not strided", op=op)
    data = tensor.detach()
    try:
        interop.as_view(data.resolve_neg())
    except InvalidArray as error:
        raise InvalidArray(f"{op}: {what}: {error}", op=op) from error
    lengths = zip(data.shape, data.stride(), strict=True)
    if data.numel() and any(step == 0 < length - 1 for length, step in lengths):
        raise InvalidArray(
            f"{op}: {what} was expanded: several elements share one place in memory. Make it of "
            ".clone().",
            op=op,
        )


def check_buffer(op: str, what: str, buffer: Tensor, module: Any) -> None:
    """Raise ValueError if backward adds to a buffer's ``grad``, and it is no parameter as well."""
    if gets_gradient(buffer) and all(buffer is not p for p in module.parameters()):
        raise ValueError(
            f"{op}: {what} requires grad, but only gradients of parameters are averaged. If it is "
            "trained, make it a parameter; if not, call requires_grad_(False)."
        )


def gets_gradient(buffer: Tensor) -> bool:
    """Whether backward adds to the ``grad`` of a buffer."""
    # Not what forward has computed and kept.
    return bool(buffer.requires_grad and buffer.is_leaf)
