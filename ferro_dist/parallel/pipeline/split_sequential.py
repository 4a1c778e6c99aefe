"""Cutting a chain of layers into stages of about the same cost."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
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
        There are fewer layers than stages, or a weight too many or too few, or one that is
        negative, or their sum is not finite.

    Notes
    -----
    Dynamic programming over the place of the last cut, in num_stages * layers**2 steps: once for
    the cost of the most expensive stage, and once more for the most even stages within it.

    A weight that layers of several stages share is trained apart on each of their ranks, unless it
    is among the `tied` of `Pipeline`.

    Examples
    --------
    >>> split_sequential([1, 2, 3, 4, 5, 6], 3, weights=[1, 1, 1, 1, 1, 5])
    [[1, 2], [3, 4, 5], [6]]
    """
    count = arguments.named_integer("split_sequential", "num_stages", num_stages)
    num_layers = _num_layers(module)
    if not 1 <= count <= num_layers:
        raise ValueError(f"split_sequential: {num_layers} layers cannot be cut into {count} stages")
    costs = [_num_elements(layer) for layer in module] if weights is None else _costs(weights)
    if len(costs) != num_layers:
        raise ValueError(
            f"split_sequential: there are {len(costs)} weights for {num_layers} layers"
        )
    if not (all(cost >= 0 for cost in costs) and sum(costs) < math.inf):
        raise ValueError("split_sequential: weights are at least 0, and their sum finite")
    cuts = _cut(costs, count)
    return [module[first:end] for first, end in itertools.pairwise(cuts)]


def _cut(costs: Sequence[float], num_stages: int) -> list[int]:
    """Return where stages begin, and the end."""
    total = list(itertools.accumulate(costs, initial=0.0))
    highest, _ = _best_cut(total, num_stages, max)
    _, cuts = _best_cut(total, num_stages, _with_square, highest)
    return cuts


def _best_cut(
    total: Sequence[float],
    num_stages: int,
    rate: Callable[[float, float], float],
    limit: float = math.inf,
) -> tuple[float, list[int]]:
    """Return the cuts rated lowest, and the rating, if no stage may cost more than a limit.

    `total` is what the layers before each place cost together. `rate` takes the rating of some
    stages and the cost of one more.
    """
    num_layers = len(total) - 1
    # By end: the best for the layers before it, cut into the stages considered so far.
    best: dict[int, tuple[float, list[int]]] = {0: (0.0, [0])}
    for stage in range(1, num_stages + 1):
        found: dict[int, tuple[float, list[int]]] = {}
        for end in range(stage, num_layers - (num_stages - stage) + 1):
            rated = [
                (rate(rating, total[end] - total[begin]), [*cuts, end])
                for begin, (rating, cuts) in best.items()
                if begin < end and total[end] - total[begin] <= limit
            ]
            if rated:
                found[end] = min(rated)
        best = found
    return best[num_layers]


def _with_square(squares: float, cost: float) -> float:
    return squares + cost * cost


def _num_layers(module: Any) -> int:
    """Return the number of layers, once a slice of them is known to be possible."""
    try:
        if isinstance(module, (str, bytes)):
            raise TypeError("text has no layers")
        module[:0]
        return len(module)
    except (TypeError, LookupError, AttributeError):
        raise TypeError(
            "split_sequential: module must be a torch.nn.Sequential, or a list of layers, not "
            f"{type(module).__qualname__}; a model of another form is cut by hand, a module for "
            "each stage"
        ) from None


def _costs(weights: Sequence[float]) -> list[float]:
    try:
        return [arguments.as_float(cost) for cost in arguments.in_order(weights)]
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
