"""What a forward of a torch module depends on, beside its input, weights and random numbers."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

__all__ = ["Buffers", "Surroundings", "uncached_casts", "version"]

Module = Any
Tensor = Any


class _Buffer(NamedTuple):
    owner: Module
    name: str
    tensor: Tensor | None
    value: Tensor | None
    version: int | None

    @property
    def is_as_it_was(self) -> bool:
        """Whether nobody has written to the tensor or put another one in its place."""
        is_here = getattr(self.owner, self.name, None) is self.tensor
        return is_here and version(self.tensor) == self.version


class Buffers:
    """The values that the buffers of a module have now."""

    def __init__(self, module: Module) -> None:
        self._all = [
            _Buffer(
                owner,
                name,
                tensor,
                None if tensor is None else _distinct(tensor.detach()).clone(),
                version(tensor),
            )
            for owner in module.modules()
            for name, tensor in owner._buffers.items()
        ]

    def keep_changed(self) -> None:
        """Keep only what has been changed since."""
        self._all = [buffer for buffer in self._all if not buffer.is_as_it_was]

    def restore(self) -> None:
        """Give the module the tensors that it had, with their values."""
        for owner, name, tensor, value, before in self._all:
            if getattr(owner, name, None) is not tensor:
                setattr(owner, name, tensor)
            if tensor is None:
                continue
            # Autograd may have saved the tensor. If it still has its value, past autograd's notice.
            target = tensor.data if version(tensor) == before else tensor
            with torch.no_grad():
                _distinct(target).copy_(value)


class Surroundings:
    """The precision and the buffers with which a forward begins, for a second run of it.

    By then the caller may have left autocast, and the forwards of later microbatches have written
    to buffers. Of these, only those that the forward itself writes are kept: see `keep_changed`.
    Writes through ``tensor.data`` are not noticed: those buffers are read as they are by then.
    """

    def __init__(self, module: Module) -> None:
        kinds = ["cpu", "cuda"] if torch.cuda.is_initialized() else ["cpu"]
        self._autocasts = [_autocast_as_now(kind) for kind in kinds]
        self._module = module
        self._buffers = Buffers(module)

    def keep_changed(self) -> None:
        """Release copies of buffers that the forward has left alone. Called after it."""
        self._buffers.keep_changed()

    @contextlib.contextmanager
    def again(self) -> Iterator[None]:
        """Return to them for a while. Buffers stay as they are now: they count a forward once."""
        now = Buffers(self._module)
        try:
            self._buffers.restore()
            with contextlib.ExitStack() as stack:
                for autocast in self._autocasts:
                    stack.enter_context(autocast)
                yield
        finally:
            now.restore()


@contextlib.contextmanager
def uncached_casts() -> Iterator[None]:
    """Let autocast keep no weight that it casts.

    Until 2.10, torch takes a weight that was cast without a graph for later forwards with a graph,
    too, which then lead to no gradient of it.
    """
    was_enabled = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(was_enabled)


def version(tensor: Any) -> int | None:
    """Return the counter of writes to a tensor, if it has one."""
    if not isinstance(tensor, torch.Tensor) or tensor.is_inference():
        return None
    return int(tensor._version)


def _distinct(tensor: Tensor) -> Tensor:
    """Return a view without the repetitions of `expand`, to which nothing can be written."""
    if tensor.layout is not torch.strided or 0 not in tensor.stride():
        return tensor
    return tensor[tuple(slice(None) if step else slice(1) for step in tensor.stride())]


def _autocast_as_now(kind: str) -> Any:
    return torch.autocast(
        kind,
        torch.get_autocast_dtype(kind),
        torch.is_autocast_enabled(kind),
        torch.is_autocast_cache_enabled(),
    )
