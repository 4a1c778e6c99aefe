"""The counter of in-place writes that torch keeps for each tensor."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.parameter import is_lazy

__all__ = ["version_counter"]


def version_counter(tensor: Any) -> int | None:
    """Return the counter, which views share with their base; None if there is none.

    Tensors of inference mode, uninitialized parameters and other objects have none.
    """
    if not isinstance(tensor, torch.Tensor) or is_lazy(tensor) or tensor.is_inference():
        return None
    return int(tensor._version)
