"""What a forward of a torch module depends on, besides its input, weights and random numbers."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from ferro_dist.integrations.torch.version_counter import version_counter

__all__ = ["Buffers", "Modes", "Surroundings"]

Module = Any
Tensor = Any


class _Held(NamedTuple):
    """A tensor that a module has under a name."""

    owner: Module
    name: str
    tensor: Tensor | None
    version: int | None

    @property
    def is_as_it_was(self) -> bool:
        """Whether nobody has written to the tensor or put another one in its place."""
        is_here = getattr(self.owner, self.name, None) is self.tensor
        return is_here and version_counter(self.tensor) == self.version


class Buffers:
    """The values that the buffers of a module have now."""

    def __init__(self, module: Module) -> None:
        self._all = [
            (
                _Held(owner, name, tensor, version_counter(tensor)),
                None if tensor is None else _distinct(tensor.detach()).clone(),
            )
            for owner in module.modules()
            for name, tensor in owner._buffers.items()
        ]

    def keep_changed(self) -> None:
        """Keep only what has been changed since."""
        self._all = [each for each in self._all if not each[0].is_as_it_was]

    def restore(self) -> None:
        """Give the module the tensors that it had, with their values."""
        for (owner, name, tensor, before), value in self._all:
            if getattr(owner, name, None) is not tensor:
                setattr(owner, name, tensor)
            if tensor is None:
                continue
            # Autograd may have saved the tensor. If it still has its value, past autograd's notice.
            target = tensor.data if version_counter(tensor) == before else tensor
            with torch.no_grad():
                _distinct(target).copy_(value)


class Modes:
    """Which of the modules in a module are in training mode now: some may never be."""

    def __init__(self, module: Module) -> None:
        self._all = [(part, part.training) for part in module.modules()]

    def restore(self) -> None:
        """Return to these modes."""
        # By their methods, as some do more than note the mode: a layer may merge weights to
        # evaluate, and must divide them again. Outer modules come first, since theirs call those of
        # inner ones.
        for module, mode in self._all:
            if module.training != mode:
                module.train(mode)
        for module, mode in self._all:
            if module.training != mode:
                module.training = mode


class Surroundings:
    """The precision, modes and buffers with which a forward begins, for a second run of it.

    By then the caller may have left autocast or changed modes, and the forwards of later
    microbatches have written to buffers. Of these, only those that the forward itself writes are
    kept: see `keep_changed`. Writes through ``tensor.data`` are not noticed: those buffers are read
    as they are by then.

    Weights are too large to keep; see `changed_weight`.
    """

    def __init__(self, module: Module) -> None:
        kinds = ["cpu", "cuda"] if torch.cuda.is_initialized() else ["cpu"]
        self._autocasts = [_autocast_as_now(kind) for kind in kinds]
        self._module = module
        self._modes = Modes(module)
        # Past named_parameters(), which takes several times as long.
        self._weights = [
            _Held(owner, name, weight, version_counter(weight))
            for owner in module.modules()
            for name, weight in owner._parameters.items()
            if weight is not None and weight.requires_grad
        ]
        self._buffers = Buffers(module)

    def keep_changed(self) -> None:
        """Release copies of buffers that the forward has left alone. Called after it.

        Weights that it has written, as Embedding(max_norm) does, are no longer looked after:
        forwards of later microbatches write to them, too.
        """
        self._weights = [weight for weight in self._weights if weight.is_as_it_was]
        self._buffers.keep_changed()

    def changed_weight(self) -> str | None:
        """Return the name of a weight that somebody has written to or replaced since, if any."""
        changed = next((weight for weight in self._weights if not weight.is_as_it_was), None)
        if changed is None:
            return None
        prefixes = {owner: name for name, owner in self._module.named_modules()}
        prefix = prefixes.get(changed.owner)
        return f"{prefix}.{changed.name}" if prefix else changed.name

    @contextlib.contextmanager
    def again(self) -> Iterator[None]:
        """Return to them for a while. Buffers stay as they are now: they count a forward once."""
        now, modes = Buffers(self._module), Modes(self._module)
        try:
            self._modes.restore()
            self._buffers.restore()
            with contextlib.ExitStack() as stack:
                for autocast in self._autocasts:
                    stack.enter_context(autocast)
                yield
        finally:
            # Modes first, as before: a module may write to buffers when its mode changes.
            modes.restore()
            now.restore()


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
