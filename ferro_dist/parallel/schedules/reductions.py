"""The pass that gives a schedule its gradient reductions."""

from __future__ import annotations

from collections.abc import Sequence

from ferro_dist.parallel.schedules.action import Action, ActionKind
from ferro_dist.parallel.schedules.notation import WrittenSchedule, parse_schedule

__all__ = ["insert_reductions"]

_LAST_TOUCH = (
    ActionKind.BACKWARD,
    ActionKind.BACKWARD_WEIGHT,
    # What a peer waits for goes first: nobody waits for the sum before the step ends.
    ActionKind.SEND_GRADIENT,
)


def insert_reductions(schedule: WrittenSchedule) -> list[list[Action]]:
    """Reduce each stage's gradients over its replicas as soon as they are complete.

    The reduction of a stage follows its last weight gradient, and so overlaps with what
    is left of the pipeline. All replicas of a rank run the same list, so they start their
    reductions in the same order.

    Parameters
    ----------
    schedule : lists of Action or of text
        With or without messages, without reductions.

    Returns
    -------
    list of list of Action
    """
    return [_with_reductions(actions) for actions in parse_schedule(schedule)]


def _with_reductions(actions: Sequence[Action]) -> list[Action]:
    last = {action.stage: i for i, action in enumerate(actions) if action.kind in _LAST_TOUCH}
    complete_at = {position: stage for stage, position in last.items()}
    result: list[Action] = []
    for position, action in enumerate(actions):
        result.append(action)
        if position in complete_at:
            result.append(Action(complete_at[position], ActionKind.REDUCE))
    return result
