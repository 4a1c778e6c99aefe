"""How often a torch tensor was written to."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.parameter import is_lazy

__all__ = ["version"]


def version(tensor: Any) -> int | None:
    """Return the counter of writes to a tensor, if it has one."""
    if not isinstance(tensor, torch.Tensor) or is_lazy(tensor) or tensor.is_inference():
        return None
    return int(tensor._version)
