"""Timeline: when each rank ran what, simulated or measured."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from ferro_dist.parallel.schedules.action import Action

__all__ = ["Span", "busy_times"]


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
