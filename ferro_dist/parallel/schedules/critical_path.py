"""The critical path of a simulated schedule, and the changes that could shorten it.

The path is a chain of actions without a pause, from the end of the last action back to time 0: each
starts when the previous one on its rank ends, or when its input arrives. As long as the path stays
the same, so does the makespan. An input cannot arrive before it is made, but the order on a rank
can change.
"""

from __future__ import annotations

from collections.abc import Iterator

from ferro_dist.parallel.schedules.action import Action, W
from ferro_dist.parallel.schedules.dependencies import Dependencies, Key
from ferro_dist.parallel.schedules.simulation import Simulation

__all__ = ["critical_moves"]

Lists = list[list[Action]]


def critical_moves(
    lists: Lists, simulation: Simulation, dependencies: Dependencies
) -> Iterator[Lists]:
    """Yield schedules that break the critical path in one place each.

    Some of them may not be sound, or take more memory. Each stage's actions of a kind stay
    in the order of their microbatches.

    Parameters
    ----------
    lists : list of list of Action
        Compute only.
    simulation : Simulation
        Of these lists.
    dependencies : Dependencies
        Of these lists.
    """
    path = _CriticalPath(lists, simulation, dependencies)
    for rank, first, last in path.blocks():
        actions = lists[rank]
        for position in range(first, last):
            action, following = actions[position : position + 2]
            if action[:2] == following[:2] or action in dependencies.of(following):
                continue
            swapped = [*actions[:position], following, action, *actions[position + 2 :]]
            yield _with_list(lists, rank, swapped)
        for position in range(first, last - 1):
            if actions[position].kind is W:
                yield _with_list(lists, rank, _put_off(actions, position, last))


def _with_list(lists: Lists, rank: int, actions: list[Action]) -> Lists:
    return [*lists[:rank], actions, *lists[rank + 1 :]]


def _put_off(actions: list[Action], position: int, last: int) -> list[Action]:
    """Move a weight gradient behind the action at `last`."""
    stage = actions[position].stage
    order = actions[:position] + actions[position + 1 : last + 1]
    order += [actions[position], *actions[last + 1 :]]
    # It may have moved past others of its stage: restore the order of their microbatches.
    numbers = (a.microbatch for a in actions if a.stage == stage and a.kind is W)
    return [
        Action(stage, W, next(numbers)) if a.stage == stage and a.kind is W else a for a in order
    ]


class _CriticalPath:
    """Where the path runs, as positions in the lists."""

    def __init__(self, lists: Lists, simulation: Simulation, dependencies: Dependencies) -> None:
        self._lists = lists
        self._dependencies = dependencies
        self._start: dict[Key, float] = {}
        self._end: dict[Key, float] = {}
        for span in simulation.spans:
            self._start[span.action], self._end[span.action] = span.start_s, span.end_s
        self._position_of = {
            action: (rank, position)
            for rank, actions in enumerate(lists)
            for position, action in enumerate(actions)
        }

    def blocks(self) -> Iterator[tuple[int, int, int]]:
        """Yield rank, first and last position of each stretch on one rank, latest first."""
        action: Action | None = max(self._position_of, key=lambda a: self._end[a])
        while action is not None:
            rank, last = self._position_of[action]
            position = last
            while position > 0 and self._waits_for_rank(rank, position):
                position -= 1
            if position < last:
                yield rank, position, last
            action = self._latest_input(self._lists[rank][position])

    def _waits_for_rank(self, rank: int, position: int) -> bool:
        before, action = self._lists[rank][position - 1 : position + 1]
        return self._end[before] == self._start[action]

    def _latest_input(self, action: Action) -> Action | None:
        """Return what the action waited for, or None if it waited for nothing."""
        inputs = [Action(*key) for key in self._dependencies.of(action)]
        return max(inputs, key=lambda a: self._end[a]) if inputs else None
