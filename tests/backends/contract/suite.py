"""The contract of `ferro_dist.backends.base`, as cases that the ranks of a group run.

A test of a backend makes groups of 1 to 4 ranks and calls ``CASES[name].run(group)`` on
every rank; `names_for` tells which cases a group of some size has.
"""

from __future__ import annotations

# Importing a module registers its cases.
from backends.contract import (  # noqa: F401
    asynchrony,
    groups,
    libraries,
    messages,
    refusals,
    results,
)
from backends.contract.case import Case, cases

__all__ = ["CASES", "names_for"]

CASES: dict[str, Case] = cases


def names_for(world_size: int) -> list[str]:
    """Name the cases that mean something for this many ranks."""
    return [n for n, case in CASES.items() if case.min_ranks <= world_size <= case.max_ranks]
