"""Replicas of a pipeline's stages: made equal, and their gradients reduced."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from ferro_dist.collective import broadcast
from ferro_dist.parallel.pipeline.gradient_reduction import GradientReduction, Weight
from ferro_dist.parallel.pipeline.stage import Stage
from ferro_dist.parallel.schedules import Action, ActionKind
from ferro_dist.reduce_op import ReduceOp

if TYPE_CHECKING:
    from ferro_dist.backends.base import Backend

__all__ = ["connect_replicas", "describe_state"]

_ADDS_TO_GRADIENTS = (ActionKind.BACKWARD, ActionKind.BACKWARD_WEIGHT)


def describe_state(stages: Mapping[int, Stage]) -> list[str]:
    """Return a line for each weight and buffer, equal on all replicas if these match.

    Raises
    ------
    ValueError, InvalidArray
        One cannot be made equal.
    """
    lines = []
    for number, stage in stages.items():
        stage.check_lasting(stage.parameters())
        for name, array in {**stage.parameters(), **stage.buffers()}.items():
            stage.check_shareable(f"{name!r} of stage {number}", array)
            lines.append(f"{name!r} of stage {number}: {stage.describe(array)}")
    return lines


def connect_replicas(
    stages: Mapping[int, Stage],
    actions: Sequence[Action],
    replicas: Backend,
    op: ReduceOp,
    bucket_nbytes: int,
) -> dict[int, GradientReduction]:
    """Give all replicas the weights and buffers of the first one. Called by all of them.

    Parameters
    ----------
    stages : mapping of int to Stage
        This rank's.
    actions : sequence of Action
        This rank's list.
    replicas : Backend
    op : ReduceOp
    bucket_nbytes : int

    Returns
    -------
    dict of int to GradientReduction
        For each stage that has weights of its own.
    """
    reductions = {}
    for number, weights in _weights_by_stage(stages, actions).items():
        if weights:
            reductions[number] = GradientReduction(weights, replicas, op, bucket_nbytes)
            reductions[number].equalize()
        stage = stages[number]
        for name, value in stage.buffers().items():
            stage.load(name, broadcast(stage.plain(value), replicas))
    return reductions


def _weights_by_stage(
    stages: Mapping[int, Stage], actions: Sequence[Action]
) -> dict[int, list[Weight]]:
    """Assign each weight to the stage of this rank that is the last to add to its gradient.

    By backwards: their order is that of `Pipeline.backward`, too, and that of a written schedule's
    reductions need not be.
    """
    touched = [action.stage for action in actions if action.kind in _ADDS_TO_GRADIENTS]
    weights: dict[int, list[Weight]] = {number: [] for number in stages}
    seen: dict[int, object] = {}  # kept, so that no later one gets the id of an earlier one
    for number in dict.fromkeys(reversed(touched)):
        stage = stages[number]
        for name in stage.parameters():
            owner = stage.gradient_owner(name)
            if id(owner) not in seen:
                seen[id(owner)] = owner
                weights[number].append(Weight(stage, name))
    return weights
