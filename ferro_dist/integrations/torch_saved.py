"""What ``torch.save`` writes, on its way between ranks: the state of optimizers.

It is read with ``weights_only``: no rank runs code of another.
"""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Any

import torch

from ferro_dist.collective import broadcast

if TYPE_CHECKING:
    from ferro_dist.backends.base import Backend

__all__ = ["broadcast_saved", "loaded", "saved"]


def saved(content: Any) -> bytes:
    """Return what ``torch.save`` writes."""
    buffer = io.BytesIO()
    torch.save(content, buffer)
    return buffer.getvalue()


def loaded(data: bytes) -> Any:
    """Return what was saved, with all tensors in host memory."""
    return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)


def broadcast_saved(data: bytes, backend: Backend, root: int, device: Any, tag: int = 0) -> bytes:
    """Give every rank the root's bytes, by way of tensors on `device`. Two broadcasts."""
    size = torch.tensor([len(data)], device=device)
    length = int(broadcast(size, backend, root, tag=tag))
    if root == backend.rank:
        content = torch.frombuffer(bytearray(data), dtype=torch.uint8).to(device)
    else:
        content = torch.empty(length, dtype=torch.uint8, device=device)
    received: bytes = (
        broadcast(content, backend, root, out=content, tag=tag).cpu().numpy().tobytes()
    )
    return received
