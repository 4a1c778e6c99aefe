"""Cutting a chain of layers into stages of about the same cost."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

from ferro_dist import arguments

__all__ = ["split_sequential"]


def split_sequential(
    module: Any, num_stages: int, weights: Sequence[float] | None = None
) -> list[Any]:
    """Cut a chain into stages such that the most expensive one is as cheap as possible.

    Parameters
    ----------
    module : torch.nn.Sequential, or sequence of layers
        A slice of it must be of the same kind.
    num_stages : int
        At most the number of layers: every stage has at least one.
    weights : sequence of float, optional
        What each layer costs, in any unit; for instance its measured time. By default the
        number of its parameters.

    Returns
    -------
    list of slices of `module`

    Raises
    ------
    TypeError
        `module` has no slices, `num_stages` is no integer, or `weights` holds no numbers.
    ValueError
        There are fewer layers than stages, or a weight too many or too few, or one that is negative
        or not finite.

    Notes
    -----
    Dynamic programming over the place of the last cut, in num_stages * layers**2 steps. Among
    equally good cuts, the one with the most even stages is taken.

    Examples
    --------
    >>> split_sequential([1, 2, 3, 4, 5, 6], 3, weights=[1, 1, 1, 1, 1, 5])
    [[1, 2, 3], [4, 5], [6]]
    """
    count = arguments.integer(num_stages)
    num_layers = _num_layers(module)
    if not 1 <= count <= num_layers:
        raise ValueError(f"split_sequential: {num_layers} layers cannot be cut into {count} stages")
    costs = [_num_elements(layer) for layer in module] if weights is None else _costs(weights)
    if len(costs) != num_layers:
        raise ValueError(
            f"split_sequential: there are {len(costs)} weights for {num_layers} layers"
        )
    if not all(0 <= cost < math.inf for cost in costs):
        raise ValueError("split_sequential: a weight is a number of at least 0, and finite")
    cuts = _cut(costs, count)
    return [module[first:end] for first, end in itertools.pairwise(cuts)]


def _cut(costs: Sequence[float], num_stages: int) -> list[int]:
    """Return where stages begin, and the end."""
    total = [0.0]
    for cost in costs:
        total.append(total[-1] + cost)
    num_layers = len(costs)
    # best[end]: for the layers before `end`, cut into the stages considered so far, the highest
    # cost of a stage, then the sum of squares, and the cuts.
    best = {0: (0.0, 0.0, [0])}
    for stage in range(1, num_stages + 1):
        ends = range(stage, num_layers - (num_stages - stage) + 1)
        best = {
            end: min(
                (
                    max(highest, total[end] - total[begin]),
                    squares + (total[end] - total[begin]) ** 2,
                    [*cuts, end],
                )
                for begin, (highest, squares, cuts) in best.items()
                if begin < end
            )
            for end in ends
        }
    return best[num_layers][2]


def _num_layers(module: Any) -> int:
    """Return the number of layers, once a slice of them is known to be possible."""
    try:
        if isinstance(module, (str, bytes)):
            raise TypeError("text has no layers")
        module[:0]
        return len(module)
    except (TypeError, KeyError, AttributeError):
        raise TypeError(
            "split_sequential: module must be a torch.nn.Sequential, or a list of layers, not "
            f"{type(module).__qualname__}; a model of another form is cut by hand, a module for "
            "each stage"
        ) from None


def _costs(weights: Sequence[float]) -> list[float]:
    try:
        return [float(cost) for cost in weights]
    except (TypeError, ValueError):
        raise TypeError(
            "split_sequential: weights must be a sequence of numbers, one for each layer"
        ) from None


def _num_elements(layer: Any) -> float:
    parameters = getattr(layer, "parameters", None)
    if not callable(parameters):
        return 1.0
    arrays = parameters()
    arrays = arrays.values() if hasattr(arrays, "values") else arrays
    return float(sum(math.prod(array.shape) for array in arrays))
