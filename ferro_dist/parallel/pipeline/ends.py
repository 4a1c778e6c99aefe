"""The two ends of a pipeline, for each kind of run.

On the rank of the first stage inputs are cut from the batch and their gradients are joined; on the
rank of the last, losses or outputs are collected. The other ranks have the same objects, but do not
use them.
"""

from __future__ import annotations

import inspect
import math
import operator
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ferro_dist.collective import all_gather
from ferro_dist.parallel.pipeline import pytree
from ferro_dist.parallel.pipeline.activation_channel import Parcel
from ferro_dist.parallel.pipeline.microbatches import Microbatches, concatenate, shares_of_weight
from ferro_dist.parallel.pipeline.outcome import BadArgument, among_replicas
from ferro_dist.parallel.pipeline.stage import LossOf, Stage

if TYPE_CHECKING:
    from ferro_dist.parallel.pipeline.arguments import PipelineOptions

__all__ = ["BackwardEnds", "EndStages", "Ends", "EvaluationEnds", "ForwardEnds", "TrainingEnds"]

Array = Any
NumpyArray = np.ndarray[Any, Any]
Tree = Any
Gradients = Sequence[Any]
LossFn = Callable[..., Any]


class EndStages(NamedTuple):
    """The first and the last stage of a pipeline, each if it is on this rank."""

    first: Stage | None
    last: Stage | None
    first_rank: int
    """The rank of the first stage."""
    options: PipelineOptions


class Ends:
    """What all kinds have in common: the first stage's input and its gradient."""

    def __init__(self, stages: EndStages) -> None:
        self._stages = stages
        self._first, self._last, self._first_rank, self._options = stages
        self._num_microbatches = self._options.num_microbatches
        self._x: Microbatches | None = None
        self._input_gradients: dict[int, Gradients] = {}

    def begin(self) -> None:
        """Check what the user gave; raise BadArgument if it is not usable."""
        try:
            self._check()
        except (TypeError, ValueError) as error:
            raise BadArgument from error

    def _check(self) -> None:
        raise NotImplementedError

    def abandon(self) -> None:
        """Take part in what other ranks wait for in their `begin`, if this rank has not yet."""

    def first_input(self, microbatch: int) -> Parcel:
        assert self._x is not None
        assert self._first is not None
        return self._x.parcel(microbatch, self._first.microbatch_input)

    def last_gradient(self, microbatch: int) -> Gradients:
        """Return the gradients of the last stage's output, or the scale of its loss."""
        raise NotImplementedError

    def loss_of(self, microbatch: int, inputs: Parcel) -> LossOf | None:
        """Return what turns the output of the last stage for these inputs into a loss, or None."""
        return None

    def put_output(self, stage: int, microbatch: int, output: Parcel) -> None:
        return

    def put_input_gradient(self, microbatch: int, gradients: Gradients) -> None:
        self._input_gradients[microbatch] = gradients

    def finish(self) -> float:
        """Bring together what came out; return this rank's part of the loss.

        Raises BadArgument if the parts do not fit together.
        """
        return 0.0

    def _cut_input(self, x: Tree) -> None:
        if self._first is None:
            return
        if x is None:
            raise ValueError(f"Pipeline: rank {self._first_rank} must provide input")
        self._x = Microbatches(x, self._num_microbatches, "input", self._first.check_given)

    def deliver_input_gradient(self) -> Tree:
        """Return the gradient of the input, and put it where the user expects it."""
        x = self._x
        if self._first is None or x is None or not self._input_gradients:
            return None
        columns = zip(*(g for _, g in sorted(self._input_gradients.items())), strict=True)
        pairs = zip(columns, x.arrays, strict=True)
        arrays = [_whole(gradients, array, x, self._first) for gradients, array in pairs]
        self._first.deliver_input_gradients(x.arrays, arrays)
        return pytree.unflatten(x.structure, arrays)


class TrainingEnds(Ends):
    """The ends of a step: a batch in, its loss and its gradient out.

    Parameters
    ----------
    x, target, loss_fn, weight
        As in `Pipeline.step`. Weights are summed over the replicas, too.
    """

    def __init__(
        self,
        stages: EndStages,
        x: Tree,
        target: Tree,
        loss_fn: LossFn | None,
        weight: Any,
    ) -> None:
        super().__init__(stages)
        self._given = x, target, weight
        self._is_weighted = weight is not None
        self._loss_fn = loss_fn
        self._target: Microbatches | None = None
        self._weights: list[float] | None = None
        self._is_told = False
        self._scales: dict[int, float] = {}
        self._losses: dict[int, Array] = {}

    def abandon(self) -> None:
        if not self._is_told:
            self._tell_replicas(has_failed=True)

    def first_input(self, microbatch: int) -> Parcel:
        return super().first_input(microbatch)._replace(is_weighted=self._is_weighted)

    def loss_of(self, microbatch: int, inputs: Parcel) -> LossOf:
        loss_fn, target = self._loss_fn, self._target
        if inputs.is_weighted and self._weights is None:
            raise BadArgument from ValueError(
                "Pipeline: only the rank of the first stage was given a weight, but it is the rank "
                "of the last stage that needs it. Give it there"
            )
        # Before the loss, which would broadcast, or raise a different error.
        if target is not None and target.total_rows != inputs.total_rows:
            raise BadArgument from ValueError(
                f"Pipeline: the target has {target.total_rows} rows, the input "
                f"{inputs.total_rows}. Give one row of target for each row of input"
            )
        counts = self._weights is None or self._weights[microbatch] > 0
        if loss_fn is None or target is None:
            return LossOf(loss_fn, counts)
        part = target.tree(microbatch)
        return LossOf(lambda output: loss_fn(output, part), counts)

    def put_output(self, stage: int, microbatch: int, output: Parcel) -> None:
        if self._last is None or stage != self._last.number:
            return
        self._losses[microbatch] = output.arrays[0]
        # By rows, not by microbatches: the mean over an uneven batch is the mean over its rows.
        share = output.rows / output.total_rows
        self._scales[microbatch] = share if self._weights is None else self._weights[microbatch]

    def last_gradient(self, microbatch: int) -> Gradients:
        return [self._scales[microbatch]]

    def finish(self) -> float:
        if self._last is None:
            return 0.0
        counted = {m: scale for m, scale in sorted(self._scales.items()) if scale}
        return sum(self._last.item(self._losses[m]) * s for m, s in counted.items())

    def _check(self) -> None:
        self._check_batch()
        self._count_weights()

    def _check_batch(self) -> None:
        x, target, weight = self._given
        loss_fn = self._loss_fn
        self._cut_input(x)
        if self._last is None:
            return
        if loss_fn is not None and not callable(loss_fn):
            raise TypeError(f"Pipeline: loss_fn must be callable, not {type(loss_fn).__name__}")
        if isinstance(loss_fn, type):
            raise TypeError(
                f"Pipeline: loss_fn is a class; call it to make one: {loss_fn.__qualname__}()"
            )
        if target is None and loss_fn is not None and _wants_target(loss_fn):
            raise ValueError(
                "Pipeline: loss_fn takes an output and a target; give the target, too, to the rank "
                "of the last stage"
            )
        if target is not None:
            if loss_fn is None:
                raise ValueError(
                    "Pipeline: a target is of no use without a loss_fn; give both to the rank of "
                    "the last stage"
                )
            self._target = Microbatches(target, self._num_microbatches, "target")
        if weight is not None:
            self._weights = shares_of_weight(weight, self._num_microbatches, self._target)

    def _count_weights(self) -> None:
        """Turn weights into shares of the whole batch, that of all replicas."""
        with among_replicas(self._options.replicas):
            rows = self._tell_replicas(has_failed=False)
        if rows[:, 0].any():
            return  # the end of the step tells what it was
        if len(set(rows[:, 1])) > 1:
            raise ValueError("Pipeline: give a weight on all replicas or on none")
        if self._weights is not None:
            # An average over replicas divides by their number once more.
            once_more = len(rows) if self._options.is_averaged else 1
            self._divide_weights(float(rows[:, 2].sum()) / once_more)

    def _tell_replicas(self, has_failed: bool) -> NumpyArray:
        """Return for each replica: whether it has failed, has weights, and their sum."""
        self._is_told = True
        weights = self._weights
        row = np.array([has_failed, weights is not None, sum(weights or [])], np.float64)
        replicas = self._options.replicas
        if self._last is None or replicas is None:
            return row[None]
        return np.asarray(all_gather(row, replicas)).reshape(-1, row.size)

    def _divide_weights(self, total: float) -> None:
        if not total > 0:
            raise ValueError("Pipeline: all weights are 0")
        if total == math.inf:
            raise ValueError("Pipeline: weights are too large, their sum is not finite")
        self._weights = [weight / total for weight in self._weights or []]


class ForwardEnds(Ends):
    """The ends of a forward: a batch in, outputs out.

    Parameters
    ----------
    x : tree
    source : int
        The stage whose outputs these are.
    """

    def __init__(self, stages: EndStages, x: Tree, source: int) -> None:
        super().__init__(stages)
        self._given = x
        self._source = source
        self._parcels: dict[int, Parcel] = {}

    def _check(self) -> None:
        self._cut_input(self._given)

    def put_output(self, stage: int, microbatch: int, output: Parcel) -> None:
        if stage == self._source:
            self._parcels[microbatch] = output

    @property
    def outputs(self) -> list[Tree]:
        """The output for each microbatch."""
        return [pytree.unflatten(p.structure, p.arrays) for p in self._in_order()]

    def are_outputs(self, given: Sequence[Tree]) -> bool:
        """Whether these are the outputs, in their order, not merely equal."""
        pairs = zip(self._in_order(), given, strict=True)
        return all(_are_same(own.arrays, pytree.flatten(tree)[1]) for own, tree in pairs)

    def _in_order(self) -> list[Parcel]:
        return [self._parcels[microbatch] for microbatch in sorted(self._parcels)]


class EvaluationEnds(ForwardEnds):
    """The ends of an evaluation: a batch in, and its output out.

    Attributes
    ----------
    whole_output : tree
        The outputs of all microbatches, joined; None on other ranks than the last stage's.
    """

    def __init__(self, stages: EndStages, x: Tree, source: int) -> None:
        super().__init__(stages, x, source)
        self.whole_output: Tree = None

    def finish(self) -> float:
        parcels = self._in_order()
        try:
            self.whole_output = concatenate(parcels) if parcels else None
        except ValueError as error:
            raise BadArgument from error
        return 0.0


class BackwardEnds(Ends):
    """The ends of a backward after a forward: gradients in at the last stage, out at the first."""

    def __init__(
        self, forward: ForwardEnds, outputs: Sequence[Tree], gradients: Sequence[Tree] | None
    ) -> None:
        super().__init__(forward._stages)
        self._x = forward._x
        self._forward = forward
        self._outputs = outputs
        self._given = gradients
        self._gradients: list[Gradients] = []

    def _check(self) -> None:
        if self._last is not None:
            self._gradients = self._checked_gradients()

    def last_gradient(self, microbatch: int) -> Gradients:
        return self._gradients[microbatch]

    def _checked_gradients(self) -> list[Gradients]:
        count = self._num_microbatches
        outputs = _listed(self._outputs, f"the {count} outputs of forward", count)
        if not self._forward.are_outputs(outputs):
            raise ValueError(
                "Pipeline: backward wants the outputs of the last forward, as it has returned "
                "them. What an earlier one has kept is dropped when another begins"
            )
        if self._given is None:
            return [self._unit_gradient(output) for output in outputs]
        gradients = _listed(self._given, f"{count} grad_outputs", count)
        pairs = zip(outputs, gradients, strict=True)
        return [self._gradients_like(output, gradient) for output, gradient in pairs]

    def _gradients_like(self, output: Tree, gradient: Tree) -> Gradients:
        """Return the gradient of each array of an output, from a tree like it."""
        assert self._last is not None
        structure, arrays = pytree.flatten(output)
        shapes = [array.shape for array in arrays]
        gradients = pytree.gradients_like(
            structure, shapes, gradient, "grad_outputs holds", "output"
        )
        for given in gradients:
            if given is not None:
                self._last.check_given(given, "grad_outputs")
        return gradients

    def _unit_gradient(self, output: Tree) -> Gradients:
        _, arrays = pytree.flatten(output)
        if len(arrays) != 1 or arrays[0].ndim:
            raise ValueError(
                "Pipeline: outputs that are not scalars need grad_outputs on the last stage"
            )
        assert self._last is not None
        return [self._last.one_like(arrays[0])]


def _wants_target(loss_fn: LossFn) -> bool:
    """Whether a loss function cannot be called with an output alone, judging by its signature."""
    try:
        # The call of a torch module takes anything, and passes it on.
        signature = inspect.signature(getattr(loss_fn, "forward", loss_fn))
    except (TypeError, ValueError):  # written in C
        return False
    try:
        signature.bind(None)
    except TypeError:
        return True
    return False


def _are_same(arrays: Sequence[Array], others: Sequence[Array]) -> bool:
    return len(arrays) == len(others) and all(map(operator.is_, arrays, others))


def _listed(values: Any, wanted: str, count: int) -> list[Any]:
    """Return the sequence as a list, after checking that it has one entry for each microbatch."""
    if not isinstance(values, (list, tuple)):
        raise TypeError(
            f"Pipeline: backward wants a list of {wanted}, not {type(values).__qualname__}"
        )
    if len(values) != count:
        raise ValueError(f"Pipeline: backward wants {wanted}, not {len(values)}")
    return list(values)


def _whole(
    gradients: Sequence[Array | None], array: Array, x: Microbatches, stage: Stage
) -> Array | None:
    """Join the gradients of the parts of an array; one that nothing depends on has zeros."""
    is_absent = [gradient is None for gradient in gradients]
    if all(is_absent):
        return None
    if any(is_absent):
        pairs = zip(gradients, x.parts_of(array), strict=True)
        gradients = [stage.zeros(part) if given is None else given for given, part in pairs]
    return concatenate([Parcel(pytree.ARRAY, [gradient]) for gradient in gradients])
