"""Torch tensors over memory that is not torch's: a NumPy array's, or a group's."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import torch

from ferro_dist.integrations.torch.inference_mode import outside_inference_mode

if TYPE_CHECKING:
    from ferro_dist.backends.base import Backend

__all__ = ["as_tensor", "zeros_in_group"]

Tensor: TypeAlias = Any


def as_tensor(buffer: np.ndarray[Any, Any]) -> Tensor:
    """Return torch's view of a NumPy array, which may be written to outside inference mode, too."""
    with outside_inference_mode():
        if buffer.dtype.isbuiltin == 2:  # of ml_dtypes, which torch does not accept from NumPy
            bits = buffer.view(f"u{buffer.itemsize}")
            return torch.from_numpy(bits).view(getattr(torch, buffer.dtype.name))
        return torch.from_numpy(buffer)


def zeros_in_group(
    shape: int | tuple[int, ...], dtype: torch.dtype, device: torch.device, backend: Backend
) -> Tensor:
    """Return zeros on a device; on the CPU in memory that the ranks of a host share."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    return as_tensor(backend.empty(shape, dtype)).zero_()
