"""The state of optimizers, sent between ranks as ``torch.save`` writes it.

It is read with ``weights_only``, so that no rank runs another's code.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping, MutableMapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ferro_dist.collective import broadcast
from ferro_dist.parallel.interruption import KnownToAll

if TYPE_CHECKING:
    from ferro_dist.backends.base import Backend

__all__ = ["broadcast_optimizer", "broadcast_saved", "loaded"]


def loaded(data: bytes) -> Any:
    """Return what was saved, with all tensors in host memory."""
    return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)


def broadcast_saved(
    op: str,
    what: str,
    content: Callable[[], Any],
    backend: Backend,
    root: int,
    device: Any,
    tag: int = 0,
) -> bytes:
    """Give every rank what the root has, as `loaded` reads it. Two broadcasts.

    Parameters
    ----------
    op, what : str
        Who asks, and for what, for the error: ``"the state of SGD"``.
    content : callable
        Returns dicts, lists, tensors and numbers, also NumPy's; called on the root alone.
    backend : Backend
    root : int
    device : torch.device
        Where tensors are that the group moves.
    tag : int

    Raises
    ------
    KnownToAll
        There is something else in it, which cannot be sent. Raised on all ranks.
    """
    data, is_saved = _saved(content) if backend.rank == root else (b"", True)
    header = torch.tensor([len(data), is_saved], device=device)
    length, is_saved = broadcast(header, backend, root, tag=tag).tolist()
    if root == backend.rank:
        sent = torch.frombuffer(bytearray(data), dtype=torch.uint8).to(device)
    else:
        sent = torch.empty(length, dtype=torch.uint8, device=device)
    received: bytes = broadcast(sent, backend, root, out=sent, tag=tag).cpu().numpy().tobytes()
    if not is_saved:
        raise KnownToAll(
            f"{op}: {what} cannot be given to other ranks: it may hold tensors, numbers, strings, "
            f"dicts, lists and tuples. {received.decode()}"
        )
    return received


def _saved(content: Callable[[], Any]) -> tuple[bytes, bool]:
    """Return what ``torch.save`` writes, or the reason why that is not sent; and which it is."""
    buffer = io.BytesIO()
    try:
        torch.save(_plain(content()), buffer)
        loaded(buffer.getvalue())
    except Exception as error:
        # Torch surrounds its message with advice that is meant for files.
        reason = error.__context__ or error
        return (str(reason) or type(reason).__name__).encode(), False
    return buffer.getvalue(), True


def broadcast_optimizer(op: str, optimizer: Any, backend: Backend, root: int, device: Any) -> None:
    """Give the optimizer of every rank the state and options of the root's, on behalf of `op`.

    Raises
    ------
    KnownToAll
        As `broadcast_saved`.
    """
    what = f"the state of {type(optimizer).__name__}"
    received = broadcast_saved(op, what, optimizer.state_dict, backend, root, device)
    if backend.rank != root:
        _load_exactly(optimizer, loaded(received))


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
