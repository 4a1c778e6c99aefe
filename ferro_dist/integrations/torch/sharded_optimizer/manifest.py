"""What all ranks must have alike in a `ShardedOptimizer`, as lines of a manifest."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch

from ferro_dist.integrations.torch.gradient import dtype_of_gradient

if TYPE_CHECKING:
    from ferro_dist.reduce_op import ReduceOp

__all__ = ["lines_of", "lines_of_saved", "options_of"]

Tensor = Any


def lines_of(
    groups: Iterable[Mapping[str, Any]],
    optimizer_class: Any,
    op: ReduceOp | None,
    divides_parameters: bool,
) -> list[str]:
    """Return lines for the optimizer, and for the options and parameters of each group."""
    lines = [f"{optimizer_class.__name__}, average {op!r}, divided parameters {divides_parameters}"]
    for number, group in enumerate(groups):
        lines.append(f"group {number} with {_text_of(options_of(group))}")
        lines += [f"parameter {i} {_spec(p)}" for i, p in enumerate(group["params"])]
    return lines


def lines_of_saved(saved: Mapping[str, Any]) -> list[str]:
    """Return lines for what a saved state is of, and from which step, but not for what it is."""
    lines = []
    for number, group in enumerate(saved["param_groups"]):
        lines.append(f"group {number} with {_text_of(options_of(group))}")
        for i, key in enumerate(group["params"]):
            # In full, it would be long; numbers are counts of steps, for instance.
            kept = _text_of(saved["state"].get(key, {}), in_full=False)
            lines.append(f"parameter {i} of group {number} with state {kept}")
    return lines


def options_of(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of a group of parameters."""
    return {key: value for key, value in group.items() if key not in ("params", "param_names")}


def _text_of(value: Any, in_full: bool = True) -> str:
    """Return what is equal on all ranks: the value, not where it lies in memory.

    If not in full, tensors with axes are told by their dtypes and shapes.
    """
    if isinstance(value, torch.Tensor):
        return repr(value.tolist()) if in_full or not value.dim() else _kind_of(value)
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{k!r}: {_text_of(v, in_full)}' for k, v in value.items())}}}"
    if isinstance(value, (list, tuple)):
        return f"({', '.join(_text_of(each, in_full) for each in value)})"
    return re.sub(r" at 0x[0-9a-f]+", "", repr(value))


def _kind_of(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}"


def _spec(p: Tensor) -> str:
    dtype, of_gradient = (str(d).removeprefix("torch.") for d in (p.dtype, dtype_of_gradient(p)))
    gradient = f", gradient {of_gradient}" if of_gradient != dtype else ""
    return f"{dtype} {tuple(p.shape)} on {p.device.type}{gradient}"
