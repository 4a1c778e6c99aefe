"""Notation: schedules as text, and how to parse those that users write."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from ferro_dist.arguments import in_order
from ferro_dist.parallel.schedules.action import NO_MICROBATCH, Action, ActionKind
from ferro_dist.parallel.schedules.invalid_schedule import InvalidSchedule

__all__ = ["Schedule", "WrittenSchedule", "format_schedule", "parse_schedule"]

Schedule = Sequence[Sequence[Action]]
"""The list of each rank."""

WrittenSchedule = str | Iterable[str | Iterable[str | Action]]
"""A schedule as users may write it; see `parse_schedule`."""


def parse_schedule(schedule: WrittenSchedule) -> list[list[Action]]:
    """Return every rank's list of actions.

    Parameters
    ----------
    schedule : str, or sequence of str or of sequences of str and Action
        One text with a line for each rank, or a text or a list for each rank. In a text, actions
        are separated by blanks or commas.

    Raises
    ------
    InvalidSchedule
        Something in it is no action; the error says where. Whether the schedule is sound is checked
        by `validate`.

    Examples
    --------
    >>> parse_schedule(["0F0 0B0", "1F0, 1B0"])
    [[0F0, 0B0], [1F0, 1B0]]
    """
    try:
        if isinstance(schedule, str):
            rows: list[object] = [*schedule.strip().splitlines()]
        else:
            rows = list(in_order(schedule))
    except TypeError:
        raise InvalidSchedule(
            f"A schedule is one list of actions for each rank, not {schedule!r}."
        ) from None
    lists = [_parse_row(rank, row) for rank, row in enumerate(rows)]
    if not any(lists):
        raise InvalidSchedule("The schedule holds no action.")
    return lists


def format_schedule(schedule: WrittenSchedule) -> str:
    """Return the text of a schedule, a line for each rank."""
    return "\n".join(" ".join(map(str, actions)) for actions in parse_schedule(schedule))


def _parse_row(rank: int, row: Any) -> list[Action]:
    try:
        if isinstance(row, Action):
            raise TypeError  # it is iterable too, as the tuple that it is
        entries = row.replace(",", " ").split() if isinstance(row, str) else list(in_order(row))
    except TypeError:
        raise InvalidSchedule(
            f"The schedule of rank {rank} must be a list of actions, not {row!r}.", rank=rank
        ) from None
    return [_parse_entry(rank, position, entry) for position, entry in enumerate(entries)]


def _parse_entry(rank: int, position: int, entry: object) -> Action:
    try:
        action = Action.parse(entry) if isinstance(entry, str) else entry
        if not isinstance(action, Action):
            raise TypeError(f"{entry!r} is not an action but {type(entry).__name__}.")
        _check_fields(action)
    except (TypeError, ValueError) as error:
        raise InvalidSchedule(
            f"Rank {rank}, position {position}: {error}",
            rank=rank,
            position=position,
            action=entry,
        ) from None
    return action


def _check_fields(action: Action) -> None:
    stage, kind, microbatch = action
    is_whole = type(stage) is int and type(microbatch) is int
    is_kind = isinstance(kind, ActionKind)
    if is_whole and is_kind and stage >= 0:
        if kind is ActionKind.REDUCE and microbatch == NO_MICROBATCH:
            return
        if kind is not ActionKind.REDUCE and microbatch >= 0:
            return
    raise ValueError(
        f"Action(stage={stage!r}, kind={kind!r}, microbatch={microbatch!r}) needs a stage and a "
        "microbatch of at least 0 and an ActionKind, and REDUCE no microbatch."
    )
