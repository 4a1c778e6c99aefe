"""Microbatches: a batch cut along its first dimension, and joined again."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

from ferro_dist import arguments, interop
from ferro_dist.parallel.pipeline import pytree
from ferro_dist.parallel.pipeline.activation_channel import Parcel

__all__ = ["Microbatches", "concatenate", "shares_of_weight"]

Array = Any
Tree = Any


class Microbatches:
    """A batch in `num_microbatches` parts, whose sizes differ by one row at most.

    Each array of the tree is cut; everything else is the same in all parts.

    Parameters
    ----------
    batch : tree
    num_microbatches : int
    name : str
        The caller's name for it.
    check : function, optional
        Called with each array and the name; raises TypeError for an array that cannot be cut.

    Attributes
    ----------
    total_rows : int
    """

    def __init__(
        self,
        batch: Tree,
        num_microbatches: int,
        name: str,
        check: Callable[[Array, str], None] = lambda *_: None,
    ) -> None:
        self.structure, self.arrays = pytree.flatten(batch)
        for array in self.arrays:
            check(array, name)
        self.total_rows = _total_rows(self.arrays, name)
        if self.total_rows < num_microbatches:
            raise ValueError(
                f"Pipeline: {name} has {self.total_rows} rows, too few for "
                f"{num_microbatches} microbatches. Drop it, or run it through a Pipeline of fewer"
            )
        share, rest = divmod(self.total_rows, num_microbatches)
        self.starts = [m * share + min(m, rest) for m in range(num_microbatches + 1)]

    def parts_of(self, array: Array) -> list[Array]:
        """Return the parts of one array of the batch."""
        return [array[first:end] for first, end in itertools.pairwise(self.starts)]

    def parcel(self, microbatch: int, prepare: Callable[[Array, Array], Array]) -> Parcel:
        """Return one part. Each array of it is `prepare(part, whole)`."""
        first, end = self.starts[microbatch : microbatch + 2]
        parts = [prepare(array[first:end], array) for array in self.arrays]
        return Parcel(self.structure, parts, end - first, self.total_rows)

    def tree(self, microbatch: int) -> Tree:
        """Return one part in the form of the user's batch."""
        parcel = self.parcel(microbatch, lambda part, _: part)
        return pytree.unflatten(parcel.structure, parcel.arrays)


def shares_of_weight(
    weight: Any, num_microbatches: int, target: Microbatches | None
) -> list[float]:
    """Return each microbatch's weight, the sum of its rows' weights if each row has one."""
    if hasattr(weight, "tolist"):
        weight = weight.tolist()
    try:
        weights = [float(value) for value in arguments.in_order(weight)]
    except (TypeError, ValueError):
        raise TypeError(
            "Pipeline: weight must be a sequence of numbers, one for each microbatch or row"
        ) from None
    except OverflowError:  # an integer that no float can hold
        raise ValueError(_NOT_FINITE) from None
    if not all(0 <= value < float("inf") for value in weights):
        raise ValueError(_NOT_FINITE)
    if target is not None and len(weights) == target.total_rows != num_microbatches:
        starts = target.starts
        weights = [sum(weights[a:b]) for a, b in itertools.pairwise(starts)]
    if len(weights) != num_microbatches:
        rows = "" if target is None else f" or one for each of {target.total_rows} rows"
        raise ValueError(
            f"Pipeline: weight has {len(weights)} numbers; give one for each of "
            f"{num_microbatches} microbatches{rows}"
        )
    return weights


def concatenate(outputs: Sequence[Parcel]) -> Tree:
    """Join the outputs of all microbatches. Arrays without rows are stacked.

    Raises
    ------
    ValueError
        They differ in more than their rows.
    """
    structures = list(dict.fromkeys(parcel.structure for parcel in outputs))
    if len(structures) > 1:
        raise ValueError(
            "Pipeline: outputs of microbatches cannot be joined: they differ in their structure, "
            f"or in what is no array: {structures[0]}, {structures[1]}. {_REMEDY}"
        )
    columns = list(zip(*(parcel.arrays for parcel in outputs), strict=True))
    for column in columns:
        shapes = list(dict.fromkeys(tuple(array.shape) for array in column))
        if len({(len(shape), shape[1:]) for shape in shapes}) > 1:
            raise ValueError(
                "Pipeline: outputs of microbatches cannot be joined along their first dimension: "
                f"their shapes are {', '.join(map(str, shapes))}. {_REMEDY}"
            )
    arrays = [interop.concatenate(column) for column in columns]
    return pytree.unflatten(outputs[0].structure, arrays)


_NOT_FINITE = "Pipeline: a weight is a number of at least 0, and finite"
_REMEDY = "Let the last stage return arrays of one shape per row, or use forward()"


def _total_rows(arrays: Sequence[Array], name: str) -> int:
    if not arrays:
        raise ValueError(
            f"Pipeline: {name} holds no array; give one, or a tuple, list or dict of them"
        )
    for array in arrays:
        if not len(array.shape):
            raise ValueError(f"Pipeline: {name} tensor must have at least 1 dimension")
    counts = sorted({int(array.shape[0]) for array in arrays})
    if len(counts) > 1:
        raise ValueError(f"Pipeline: the arrays of {name} have different numbers of rows: {counts}")
    return counts[0]
