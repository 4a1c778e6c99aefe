"""Synthesis: a schedule made to measure, for stages of any cost.

1. Simulate the built-in schedules for this placement, and those that list scheduling makes under a
   number of policies. Take the one with the shortest makespan that fits the memory.
2. Join the two parts of a backward where that costs nothing: whole backwards are cheaper to run.

The result depends on the arguments alone, so ranks that share them make the same schedule.

References
----------
P. Qi et al., "Zero Bubble Pipeline Parallelism", ICLR 2024: list scheduling of split backwards.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from ferro_dist.arguments import in_order
from ferro_dist.parallel.schedules import builtin
from ferro_dist.parallel.schedules.action import Action, B, F, I, W
from ferro_dist.parallel.schedules.arguments import check_count, one_per
from ferro_dist.parallel.schedules.dependencies import Dependencies
from ferro_dist.parallel.schedules.durations import Durations, DurationsLike
from ferro_dist.parallel.schedules.list_scheduling import Policy, Problem, schedule_greedily
from ferro_dist.parallel.schedules.placement import loop_placement, v_placement
from ferro_dist.parallel.schedules.simulation import Simulation, simulate_checked

__all__ = ["synthesize"]

Lists = list[list[Action]]

SIMULATED_ACTIONS = 200_000
"""Once so many are simulated, no further schedule is made: large ones take seconds, too."""


def synthesize(
    durations: DurationsLike,
    memory_cap: float | Iterable[float] | None = None,
    *,
    placement: Sequence[int],
    num_microbatches: int,
    latency: float | Iterable[float] = 0.0,
    memory: float | Iterable[float] | None = None,
) -> list[list[Action]]:
    """Make a schedule for measured stages, under a limit on memory.

    This simulates the built-in schedules for this placement and up to 60 that list scheduling makes
    (fewer if they are large, or without a limit), and takes the fastest that keeps the limit. So in
    simulation it is never slower than a built-in schedule that keeps the limit; a faster one may
    exist.

    Parameters
    ----------
    durations : mapping
        See `Durations`. Backwards are split only where ``"I"`` and ``"W"`` are given.
    memory_cap : float or sequence of float, optional
        What may be live at once, one number for all ranks or one for each: bytes if `memory` is
        given, else microbatches of a rank's whole share, as in `Simulation.peak_microbatches`. None
        sets no limit.
    placement : sequence of int
        The rank of each stage; see `placement_for`.
    num_microbatches : int
    latency, memory
        As for `simulate`.

    Returns
    -------
    list of list of Action
        Each rank's list, without messages.

    Raises
    ------
    ValueError, TypeError
        The limit is too low for a single microbatch, or an argument is invalid.

    Examples
    --------
    >>> times = {"F": 1.0, "I": 1.1, "W": 0.8, (3, "F"): 1.6}
    >>> lists = synthesize(times, memory_cap=4, placement=[0, 1, 2, 3], num_microbatches=8)
    """
    problem = _problem(durations, memory_cap, placement, num_microbatches, latency, memory)
    return _Search(problem).run()


def _problem(
    durations: DurationsLike,
    memory_cap: float | Iterable[float] | None,
    placement: Sequence[int],
    num_microbatches: int,
    latency: float | Iterable[float],
    memory: float | Iterable[float] | None,
) -> Problem:
    ranks = _checked_placement(placement)
    num_ranks = max(ranks) + 1
    if memory is None:
        held = [1 / ranks.count(rank) for rank in ranks]
    else:
        held = one_per("memory", memory, len(ranks))
    times = Durations(durations)
    for stage, kind in itertools.product(range(len(ranks)), (F, B)):
        times.of(Action(stage, kind))  # raises for a stage of which nothing is known
    caps = [math.inf] * num_ranks
    if memory_cap is not None:
        caps = one_per("memory_cap", memory_cap, num_ranks)
    shares = [0.0] * num_ranks
    for rank, of_stage in zip(ranks, held, strict=True):
        shares[rank] += of_stage
    return Problem(
        placement=ranks,
        num_microbatches=check_count("num_microbatches", num_microbatches),
        durations=times,
        latency=one_per("latency", latency, len(ranks) - 1),
        memory=held,
        capacity=[_capacity(rank, cap, shares[rank]) for rank, cap in enumerate(caps)],
    )


def _checked_placement(placement: Sequence[int]) -> list[int]:
    try:
        given = list(in_order(placement))
    except TypeError:
        raise TypeError(
            f"placement must give the rank of each stage, as [0, 1], not {placement!r}."
        ) from None
    ranks = [check_count("a rank of placement", rank, least=0) for rank in given]
    if not ranks or set(ranks) != set(range(max(ranks) + 1)):
        raise ValueError(f"placement must give stages to every rank from 0 up, not {placement!r}.")
    return ranks


def _capacity(rank: int, cap: float, one_microbatch: float) -> float:
    if cap < one_microbatch * (1 - _ROUNDING):
        raise ValueError(
            f"memory_cap cannot be met: rank {rank} may hold {cap:g}, and a single "
            f"microbatch takes {one_microbatch:g} there. Allow more, or make microbatches smaller."
        )
    return max(cap, one_microbatch)


_ROUNDING = 1e-9
"""How much sums of the same numbers may differ with the order of addition."""


@dataclass(frozen=True)
class _Candidate:
    """A schedule with what is known of it."""

    lists: Lists
    simulation: Simulation

    @property
    def score(self) -> tuple[float, float]:
        """Lower is better: the makespan, then the sum of the times at which ranks end."""
        ends = {span.rank: span.end_s for span in self.simulation.spans}
        return self.simulation.makespan_s, math.fsum(ends.values())


class _Search:
    """Looks for the best schedule, and counts how much more may be simulated for it."""

    def __init__(self, problem: Problem) -> None:
        self._problem = problem
        self._budget = SIMULATED_ACTIONS

    def run(self) -> Lists:
        """Return the best schedule found."""
        best: _Candidate | None = None
        # All of these, whatever it takes: the result must be no worse than any.
        for lists in _builtin_schedules(self._problem):
            best = self._better(best, lists)
        for lists in _greedy_schedules(self._problem):
            best = self._better(best, lists)
            if self._budget <= 0:
                break
        assert best is not None  # list scheduling keeps within the memory
        return self._joined(best).lists

    def _better(self, best: _Candidate | None, lists: Lists) -> _Candidate | None:
        candidate = self._evaluate(lists)
        if candidate is None or (best is not None and best.score <= candidate.score):
            return best
        return candidate

    def _joined(self, candidate: _Candidate) -> _Candidate:
        """Join the parts of backwards on all stages, or else on those where it costs nothing."""
        self._budget = max(self._budget, SIMULATED_ACTIONS // 4)
        stages = range(len(self._problem.placement))
        # The first stage comes first: nobody waits for the gradient of its input.
        for chosen in (set(stages), *({stage} for stage in stages)):
            if self._budget <= 0:
                break
            joined = self._evaluate(_join_backwards(candidate.lists, chosen))
            if joined is not None and joined.score <= candidate.score:
                candidate = joined
        return candidate

    def _evaluate(self, lists: Lists) -> _Candidate | None:
        """Return a candidate, or None if it takes too much memory."""
        problem = self._problem
        self._budget -= sum(map(len, lists))
        simulation = simulate_checked(
            lists, Dependencies(lists), problem.durations, problem.latency, problem.memory
        )
        peaks = simulation.peak_nbytes or []
        pairs = zip(peaks, problem.capacity, strict=True)
        fits = all(peak <= capacity * (1 + _ROUNDING) for peak, capacity in pairs)
        return _Candidate(lists, simulation) if fits else None


def _can_split(problem: Problem) -> bool:
    return all(
        problem.durations.has(stage, kind)
        for stage in range(len(problem.placement))
        for kind in (I, W)
    )


# Candidates


def _builtin_schedules(problem: Problem) -> Iterator[Lists]:
    placement, m, p = list(problem.placement), problem.num_microbatches, problem.num_ranks
    if placement == loop_placement(p):
        yield builtin.gpipe(p, m)
        yield builtin.one_f_one_b(p, m)
        if _can_split(problem):
            yield builtin.zb_h1(p, m)
    elif placement == loop_placement(p, len(placement) // p):
        yield builtin.interleaved_1f1b(p, m, len(placement) // p)
    if placement == v_placement(p) and _can_split(problem):
        yield builtin.zb_v(p, m)


def _greedy_schedules(problem: Problem) -> Iterator[Lists]:
    return (schedule_greedily(problem, policy) for policy in _policies(problem))


def _policies(problem: Problem) -> Iterator[Policy]:
    """Yield policies, the most successful first."""
    # Only those that can differ here: there is no share of no limit, and no choice of one stage.
    shares = (1.0, 0.75, 0.5) if math.isfinite(max(problem.capacity)) else (1.0,)
    has_choice = len(problem.placement) > problem.num_ranks
    are_late = (True, False) if has_choice else (True,)
    if _can_split(problem):
        for share, prompt, patience, late, forward in itertools.product(
            shares, (False, True), (0.0, 0.9), are_late, (False, True)
        ):
            yield Policy(True, forward, late, prompt, patience, share)
    for share, late, forward in itertools.product(shares, are_late, (False, True)):
        yield Policy(False, forward, late, memory_share=share)


def _join_backwards(lists: Lists, stages: set[int]) -> Lists:
    """Join adjacent parts of backwards on these stages."""
    return [list(_join(actions, stages)) for actions in lists]


def _join(actions: Sequence[Action], stages: set[int]) -> Iterator[Action]:
    position = 0
    while position < len(actions):
        action = actions[position]
        stage, kind, microbatch = action
        weights = (stage, W, microbatch)
        if kind is I and stage in stages and actions[position + 1 : position + 2] == [weights]:
            yield Action(stage, B, microbatch)
            position += 1
        else:
            yield action
        position += 1
