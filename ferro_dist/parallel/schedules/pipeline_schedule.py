"""The built-in schedules by name, and how a name becomes the lists that ranks run."""

from __future__ import annotations

import enum

from ferro_dist.parallel.schedules import builtin
from ferro_dist.parallel.schedules.action import Action, ActionKind, F
from ferro_dist.parallel.schedules.arguments import check_count
from ferro_dist.parallel.schedules.invalid_schedule import InvalidSchedule
from ferro_dist.parallel.schedules.messages import insert_messages
from ferro_dist.parallel.schedules.notation import WrittenSchedule, parse_schedule
from ferro_dist.parallel.schedules.placement import loop_placement, v_placement
from ferro_dist.parallel.schedules.reductions import insert_reductions
from ferro_dist.parallel.schedules.validation import validate

__all__ = [
    "PipelineSchedule",
    "built_in",
    "complete",
    "generate",
    "one_phase",
    "pipeline_schedule_of",
    "placement_for",
]


class PipelineSchedule(enum.IntEnum):
    """The order in which the ranks of a pipeline run forwards and backwards.

    Functions accept a member or its name in lower case, such as ``"zb_v"``, and ``"1f1b"`` for
    `ONE_F_ONE_B`.
    """

    GPIPE = 0
    ONE_F_ONE_B = 1
    INTERLEAVED_1F1B = 2
    ZB_H1 = 3
    ZB_V = 4


def pipeline_schedule_of(schedule: PipelineSchedule | str) -> PipelineSchedule:
    """Return the built-in schedule that this is or names; raise InvalidSchedule for others."""
    if isinstance(schedule, PipelineSchedule):
        return schedule
    member = _BY_NAME.get(schedule.lower()) if isinstance(schedule, str) else None
    if member is None:
        names = ", ".join(map(repr, _BY_NAME))
        raise InvalidSchedule(
            f"There is no schedule {schedule!r}; use one of {names}. A schedule of your own is a "
            "sequence with the actions of each rank, or a text with a line for each."
        )
    return member


def built_in(schedule: PipelineSchedule | str | WrittenSchedule) -> PipelineSchedule | None:
    """Return the built-in schedule that this is or names; None if it is written out."""
    is_written = isinstance(schedule, str) and len(schedule.split()) > 1
    if isinstance(schedule, (PipelineSchedule, str)) and not is_written:
        return pipeline_schedule_of(schedule)
    return None


_BY_NAME = {
    "gpipe": PipelineSchedule.GPIPE,
    "1f1b": PipelineSchedule.ONE_F_ONE_B,
    "one_f_one_b": PipelineSchedule.ONE_F_ONE_B,
    "interleaved_1f1b": PipelineSchedule.INTERLEAVED_1F1B,
    "zb_h1": PipelineSchedule.ZB_H1,
    "zb_v": PipelineSchedule.ZB_V,
}


def placement_for(
    schedule: PipelineSchedule | str, num_ranks: int, stages_per_rank: int | None = None
) -> list[int]:
    """Return the rank of each stage under a built-in schedule.

    Parameters
    ----------
    schedule : PipelineSchedule or str
    num_ranks : int
    stages_per_rank : int, optional
        By default 2 for interleaved 1F1B, the only one with a choice: ZB-V has 2, the others 1.
    """
    member = pipeline_schedule_of(schedule)
    count = _stages_per_rank(member, stages_per_rank)
    return (
        v_placement(num_ranks)
        if member is PipelineSchedule.ZB_V
        else loop_placement(num_ranks, count)
    )


def generate(
    schedule: PipelineSchedule | str | WrittenSchedule,
    num_ranks: int,
    num_microbatches: int,
    stages_per_rank: int | None = None,
) -> list[list[Action]]:
    """Return the lists of a built-in schedule, or those of a written one once they are checked.

    Parameters
    ----------
    schedule : PipelineSchedule, str, or sequence with the actions of each rank
        A name, or a schedule written out: see `parse_schedule`.
    num_ranks, num_microbatches : int
        At least 1.
    stages_per_rank : int, optional
        As for `placement_for`; ignored for a schedule that is written out.

    Raises
    ------
    InvalidSchedule
        There is no such schedule, it cannot have so many stages, or it is not sound.
    """
    member = built_in(schedule)
    if member is None:
        assert not isinstance(schedule, PipelineSchedule)
        lists = parse_schedule(schedule)
        validate(lists, num_ranks=num_ranks, num_microbatches=num_microbatches)
        return lists
    count = _stages_per_rank(member, stages_per_rank)
    if member is PipelineSchedule.INTERLEAVED_1F1B:
        return builtin.interleaved_1f1b(num_ranks, num_microbatches, count)
    return _GENERATORS[member](num_ranks, num_microbatches)


_GENERATORS = {
    PipelineSchedule.GPIPE: builtin.gpipe,
    PipelineSchedule.ONE_F_ONE_B: builtin.one_f_one_b,
    PipelineSchedule.ZB_H1: builtin.zb_h1,
    PipelineSchedule.ZB_V: builtin.zb_v,
}


def complete(
    schedule: PipelineSchedule | str | WrittenSchedule,
    num_ranks: int,
    num_microbatches: int,
    stages_per_rank: int | None = None,
    *,
    reduces_gradients: bool = False,
) -> list[list[Action]]:
    """Return the lists that an executor runs: with messages, and proven to be sound.

    Parameters
    ----------
    schedule, num_ranks, num_microbatches, stages_per_rank
        As for `generate`. Messages and reductions of a written schedule are kept.
    reduces_gradients : bool, default False
        Whether gradients are summed over replicas of the pipeline.

    Raises
    ------
    InvalidSchedule
        As for `generate`.
    """
    lists = generate(schedule, num_ranks, num_microbatches, stages_per_rank)
    kinds = {action.kind for actions in lists for action in actions}
    if reduces_gradients and ActionKind.REDUCE not in kinds:
        lists = insert_reductions(lists)
    if not any(kind.is_message for kind in kinds):
        lists = insert_messages(lists)
    validate(lists, num_ranks=num_ranks, num_microbatches=num_microbatches)
    return lists


def one_phase(schedule: WrittenSchedule, phase: str) -> list[list[Action]]:
    """Return the forwards or the backwards of a schedule alone, with their messages.

    Either half of a sound schedule is sound: neither forwards nor their messages wait for anything
    else.

    Parameters
    ----------
    schedule : lists of Action or of text
        A sound one. Its messages and reductions are left out.
    phase : {"forward", "backward"}
    """
    if phase not in ("forward", "backward"):
        raise ValueError(f"phase must be 'forward' or 'backward', not {phase!r}.")
    lists = [
        [a for a in actions if a.kind.is_compute and (a.kind is F) == (phase == "forward")]
        for actions in parse_schedule(schedule)
    ]
    return insert_messages(lists, phase=phase)


def _stages_per_rank(schedule: PipelineSchedule, count: int | None) -> int:
    usual = 2 if schedule in (PipelineSchedule.INTERLEAVED_1F1B, PipelineSchedule.ZB_V) else 1
    if count is None:
        return usual
    count = check_count("stages_per_rank", count)
    if count == usual or schedule is PipelineSchedule.INTERLEAVED_1F1B:
        return count
    raise InvalidSchedule(
        f"{schedule.name.lower()} runs {usual} stage{'s' if usual > 1 else ''} on each rank, not "
        f"{count}. interleaved_1f1b runs any number of them."
    )
