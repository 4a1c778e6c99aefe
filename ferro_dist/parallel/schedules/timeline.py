"""Timeline: when each rank ran what, simulated or measured."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, cast

from ferro_dist.arguments import integer
from ferro_dist.parallel.schedules.action import Action, ActionKind

__all__ = ["Span", "busy_times", "parse_timeline"]


class Span(NamedTuple):
    """One action on its rank, from start to end.

    Times measured on several clocks must have been converted to one of them.
    """

    rank: int
    action: Action
    start_s: float
    end_s: float


def busy_times(spans: Iterable[Span], num_ranks: int) -> list[float]:
    """Return how long each rank computed."""
    busy = [0.0] * num_ranks
    for rank, action, start_s, end_s in spans:
        if action.kind.is_compute:
            busy[rank] += end_s - start_s
    return busy


def parse_timeline(entries: object) -> list[Span] | None:
    """Return the spans of a measured run, from time 0; None for anything but a timeline.

    Parameters
    ----------
    entries : iterable of (rank, action, start_s, end_s)
        Actions as such or as text, times on one clock, in any order. Sends and receives
        are left out.

    Raises
    ------
    ValueError
        It is a timeline, but an entry is invalid, or none is of a compute action.
    """
    if isinstance(entries, str) or not isinstance(entries, Sequence) or not entries:
        return None
    if not (isinstance(entries[0], tuple) and len(entries[0]) == 4):
        return None
    spans = [_parse_entry(position, entry) for position, entry in enumerate(entries)]
    kept = [s for s in spans if s.action.kind.is_compute or s.action.kind is ActionKind.REDUCE]
    if not kept:
        raise ValueError("The timeline holds no F, B, I, W or REDUCE.")
    origin_s = min(span.start_s for span in kept)
    kept.sort(key=lambda span: (span.rank, span.start_s))
    return [s._replace(start_s=s.start_s - origin_s, end_s=s.end_s - origin_s) for s in kept]


def _parse_entry(position: int, entry: object) -> Span:
    try:
        rank, action, start_s, end_s = cast(Any, entry)
        action = Action.parse(action) if isinstance(action, str) else action
        span = Span(integer(rank), Action(*action), float(start_s), float(end_s))
        if span.rank < 0 or not -math.inf < span.start_s <= span.end_s < math.inf:
            raise ValueError("its rank is negative or its end before its start")
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"Entry {position} of the timeline must be (rank, action, start_s, end_s), not "
            f"{entry!r}: {error}"
        ) from None
    return span
