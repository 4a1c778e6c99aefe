"""Placement: which rank has which stage.

A placement is a list with the rank of each stage.
"""

from __future__ import annotations

from ferro_dist.parallel.schedules.arguments import check_count
from ferro_dist.parallel.schedules.invalid_schedule import InvalidSchedule
from ferro_dist.parallel.schedules.notation import Schedule, WrittenSchedule, parse_schedule

__all__ = ["loop_placement", "placement_in", "placement_of", "stages_of_v", "v_placement"]


def loop_placement(num_ranks: int, stages_per_rank: int = 1) -> list[int]:
    """Deal the stages out to the ranks, round after round: 0 1 2 0 1 2."""
    count = check_count("stages_per_rank", stages_per_rank)
    return list(range(check_count("num_ranks", num_ranks))) * count


def v_placement(num_ranks: int) -> list[int]:
    """Give the stages to the ranks down and up again: 0 1 2 2 1 0."""
    ranks = range(check_count("num_ranks", num_ranks))
    return [*ranks, *reversed(ranks)]


def stages_of_v(rank: int, num_ranks: int) -> tuple[int, int]:
    """Return the two stages that a rank has in `v_placement`."""
    return rank, 2 * num_ranks - 1 - rank


def placement_of(schedule: WrittenSchedule) -> list[int]:
    """Return the rank of each stage of a sound schedule."""
    lists = parse_schedule(schedule)
    try:
        return placement_in(lists)
    except KeyError as stage:
        raise InvalidSchedule(f"The schedule has later stages, but no stage {stage}.") from None


def placement_in(lists: Schedule) -> list[int]:
    """Return the rank of each stage, read off the lists of a sound schedule."""
    ranks = {action.stage: rank for rank, actions in enumerate(lists) for action in actions}
    return [ranks[stage] for stage in range(len(ranks))]
