"""Durations: how long each kind of action takes on each stage."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from ferro_dist.arguments import as_float
from ferro_dist.parallel.schedules.action import Action, ActionKind
from ferro_dist.parallel.schedules.arguments import check_count

__all__ = ["UNIT_DURATIONS", "Durations", "DurationsLike"]

DurationsLike = Mapping[Any, float]
"""Times by kind, or by stage and kind; see `Durations`."""

UNIT_DURATIONS: Mapping[str, float] = {"F": 1.0, "I": 1.0, "W": 1.0}
"""What papers assume: a forward takes as long as each half of a backward."""

_TIMED = (*"FBIW", "REDUCE")


class Durations:
    """Times of actions, in seconds or in any other unit.

    Parameters
    ----------
    times : mapping
        From a kind, ``"F"``, or a stage and a kind, ``(2, "F")``, to a time; the latter takes
        precedence. ``"B"`` defaults to the sum of ``"I"`` and ``"W"``, and ``"REDUCE"`` to 0.

    Raises
    ------
    TypeError, ValueError
        An invalid key or time.
    """

    def __init__(self, times: DurationsLike) -> None:
        if not isinstance(times, Mapping):
            raise TypeError(f"durations must map kinds to times, as {{'F': 1.0}}, not {times!r}.")
        self._times = {_checked_key(key): _checked_time(key, t) for key, t in times.items()}
        self._known: dict[tuple[int, ActionKind], float] = {}

    def of(self, action: Action) -> float:
        """Return the time of an action; raise ValueError if it is not known."""
        key = (action.stage, action.kind)
        time = self._known.get(key)
        if time is None:
            time = self._known[key] = self._find(*key)
        return time

    def has(self, stage: int, kind: ActionKind) -> bool:
        """Whether the time of this kind on this stage was given."""
        return (stage, kind.value) in self._times or (None, kind.value) in self._times

    def _find(self, stage: int, kind: ActionKind) -> float:
        for key in ((stage, kind.value), (None, kind.value)):
            if key in self._times:
                return self._times[key]
        remedy = f"give {kind.value!r} for all stages or ({stage}, {kind.value!r}) for this one"
        if kind is ActionKind.BACKWARD:
            halves = (ActionKind.BACKWARD_INPUT, ActionKind.BACKWARD_WEIGHT)
            if all(self.has(stage, half) for half in halves):
                return sum(self._find(stage, half) for half in halves)
            remedy += ", or both 'I' and 'W'"
        if kind is ActionKind.REDUCE:
            return 0.0
        raise ValueError(f"durations lack {kind.value} on stage {stage}: {remedy}.")


def _checked_key(key: object) -> tuple[int | None, str]:
    stage, kind = key if isinstance(key, tuple) and len(key) == 2 else (None, key)
    try:
        number = None if stage is None else check_count("a stage", stage, least=0)
        if kind not in _TIMED:
            raise ValueError
    except ValueError:
        raise ValueError(
            f"durations cannot have an entry for {key!r}: a key is one of {', '.join(_TIMED)}, or "
            "a stage and one of them."
        ) from None
    return number, str(kind.value if isinstance(kind, ActionKind) else kind)


def _checked_time(key: object, time: object) -> float:
    try:
        if isinstance(time, (bool, str, bytes)):
            raise TypeError
        value = as_float(time)
    except (TypeError, ValueError):
        raise TypeError(f"the duration of {key!r} must be a number, not {time!r}.") from None
    if not 0 <= value < math.inf:
        raise ValueError(f"the duration of {key!r} must be finite and not negative, not {time!r}.")
    return value
