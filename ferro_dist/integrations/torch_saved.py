"""The state of optimizers, sent between ranks as ``torch.save`` writes it.

It is read with ``weights_only``, so that no rank runs another's code.
"""

from __future__ import annotations

import io
from collections.abc import Mapping, MutableMapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ferro_dist.collective import broadcast
from ferro_dist.parallel.interruption import KnownToAll

if TYPE_CHECKING:
    from ferro_dist.backends.base import Backend

__all__ = ["broadcast_optimizer", "broadcast_saved", "loaded", "saved"]

STATE, REFUSAL = "state", "refusal"  # what a message about an optimizer holds


def saved(content: Any) -> bytes:
    """Return what ``torch.save`` writes for dicts, lists, tensors and numbers, also NumPy's."""
    buffer = io.BytesIO()
    torch.save(_plain(content), buffer)
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


def broadcast_optimizer(op: str, optimizer: Any, backend: Backend, root: int, device: Any) -> None:
    """Give the optimizer of every rank the state and options of the root's.

    Raises
    ------
    KnownToAll
        The state holds something that cannot be sent. Raised on all ranks, on behalf of `op`.
    """
    is_root = backend.rank == root
    own = _message_of(optimizer) if is_root else b""
    message = loaded(broadcast_saved(own, backend, root, device))
    if REFUSAL in message:
        raise KnownToAll(
            f"{op}: the state of {type(optimizer).__name__} cannot be given to other ranks: it may "
            f"hold tensors, numbers, strings, dicts, lists and tuples. {message[REFUSAL]}"
        )
    if not is_root:
        _load_exactly(optimizer, message[STATE])


def _message_of(optimizer: Any) -> bytes:
    """Return what others can load: a dict of the state, or of the reason why it is not sent."""
    try:
        data = saved({STATE: optimizer.state_dict()})
        loaded(data)
    except Exception as error:
        # Torch surrounds its message with advice that is meant for files.
        return saved({REFUSAL: str(error.__context__ or error)})
    return data


def _load_exactly(optimizer: Any, state: Any) -> None:
    """Load a state that was saved into an optimizer, with the bits that it had.

    ``load_state_dict`` alone converts all state of a parameter, except ``step``, to the parameter's
    dtype, and leaves a learning rate that is a tensor in host memory.
    """
    options = [dict(group) for group in optimizer.param_groups]
    optimizer.load_state_dict(state)
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    for number, sent in state["state"].items():
        if isinstance(number, int):
            _undo_casts(optimizer.state[parameters[number]], sent)
    for group, before in zip(optimizer.param_groups, options, strict=True):
        for name, value in group.items():
            if isinstance(value, torch.Tensor) and isinstance(before.get(name), torch.Tensor):
                with torch.no_grad():
                    group[name] = before[name].copy_(value)


def _undo_casts(kept: MutableMapping[str, Any], sent: Mapping[str, Any]) -> None:
    for name, value in sent.items():
        now = kept.get(name)
        if isinstance(value, Mapping) and isinstance(now, MutableMapping):
            _undo_casts(now, value)
        elif isinstance(value, torch.Tensor) and isinstance(now, torch.Tensor):
            kept[name] = now if now.dtype is value.dtype else value.to(now.device)


def _plain(content: Any) -> Any:
    """Return the same in types that ``weights_only`` permits."""
    if isinstance(content, np.generic):
        return content.item()
    if isinstance(content, Mapping):
        return {key: _plain(value) for key, value in content.items()}
    if type(content) in (list, tuple):
        return type(content)(map(_plain, content))
    return content
