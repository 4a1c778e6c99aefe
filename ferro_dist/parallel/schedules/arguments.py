"""Checks of the numbers that the functions on schedules take."""

from __future__ import annotations

import math
from collections.abc import Iterable

from ferro_dist.arguments import as_float, in_order, integer

__all__ = ["check_count", "one_per"]


def check_count(name: str, value: object, least: int = 1) -> int:
    """Return an integer as an int; raise ValueError for anything else, or one that is too small."""
    try:
        count = integer(value)
    except TypeError:
        count = least - 1
    if count < least:
        raise ValueError(f"{name} must be an integer of at least {least}, not {value!r}.")
    return count


def one_per(name: str, value: float | Iterable[float], count: int) -> list[float]:
    """Return `count` numbers: those given, or the single one given for all.

    Raises ValueError if there are more or fewer, or one is negative or infinite, and TypeError for
    anything that is no number.
    """
    try:
        if isinstance(value, Iterable):
            numbers = [as_float(number) for number in in_order(value)]
        else:
            numbers = [as_float(value)] * count
    except (TypeError, ValueError):
        raise TypeError(f"{name} must be one number, or {count}, not {value!r}.") from None
    if len(numbers) != count:
        raise ValueError(f"{name} must be one number, or {count}, not {len(numbers)}.")
    if not all(0 <= number < math.inf for number in numbers):
        raise ValueError(f"{name} must be finite and not negative, and is {value!r}.")
    return numbers
