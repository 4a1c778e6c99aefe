"""The tensors in what a forward returns."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, TypeAlias

import torch

__all__ = ["find_tensors"]

Tensor: TypeAlias = Any

# Objects nested deeper are, in practice, no outputs but models, caches, data sets.
MAX_DEPTH = 8


def find_tensors(outputs: object) -> Iterator[Tensor]:
    """Yield the tensors in `outputs` that require grad, each once.

    Looks into mappings, sequences, sets, dataclasses and other objects with attributes, but not
    into modules, and only to a limited depth.
    """
    seen: dict[int, object] = {}  # keeps the objects alive, so that no id is reused
    level: list[object] = [outputs]
    for _ in range(MAX_DEPTH):
        deeper: list[object] = []
        for thing in level:
            if id(thing) in seen:
                continue
            seen[id(thing)] = thing
            if not isinstance(thing, torch.Tensor):
                deeper.extend(_parts_of(thing))
            elif thing.requires_grad:
                yield thing
        level = deeper


def _parts_of(thing: object) -> Iterable[object]:
    if isinstance(thing, (str, bytes, int, float, complex, type, torch.nn.Module)) or thing is None:
        return ()
    if isinstance(thing, Mapping):
        return [*thing.values(), *getattr(thing, "__dict__", {}).values()]
    if isinstance(thing, (list, tuple, set, frozenset)):
        return thing
    slots = (
        getattr(thing, name)
        for cls in type(thing).__mro__
        for name in _names(getattr(cls, "__slots__", ()))
        if hasattr(thing, name)
    )
    return [*getattr(thing, "__dict__", {}).values(), *slots]


def _names(slots: str | Iterable[str]) -> Iterable[str]:
    return (slots,) if isinstance(slots, str) else slots
