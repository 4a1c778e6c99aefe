"""List scheduling: a schedule grown action by action, under a limit on memory.

Whenever a rank is free, it starts what its policy prefers among the actions that could start now.
If there are none, it waits until its next input arrives.

A forward is let in only if the rank could still finish everything it has begun, one microbatch
after the other. This is Dijkstra's banker's algorithm: without it, a rank with several stages fills
its memory with forwards of its first stage, and has no room left for its last one, whose backwards
would free it.

Cost: O(n (log n + k)) for n actions and k live microbatches on a rank.

References
----------
R. L. Graham, "Bounds on Multiprocessing Timing Anomalies", SIAM J. Appl. Math. 1969.
E. W. Dijkstra, "Cooperating sequential processes", 1965: the banker's algorithm.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ferro_dist.parallel.schedules.action import Action, ActionKind, B, F, I, W
from ferro_dist.parallel.schedules.durations import Durations

__all__ = ["Policy", "Problem", "schedule_greedily"]


@dataclass(frozen=True)
class Problem:
    """What a schedule is to be made for.

    Attributes
    ----------
    placement : sequence of int
        The rank of each stage.
    num_microbatches : int
    durations : Durations
    latency : sequence of float
        For each stage but the last, that of messages between it and the next.
    memory : sequence of float
        What a live microbatch of each stage holds.
    capacity : sequence of float
        How much each rank may hold, in the same unit.
    """

    placement: Sequence[int]
    num_microbatches: int
    durations: Durations
    latency: Sequence[float]
    memory: Sequence[float]
    capacity: Sequence[float]

    @property
    def num_ranks(self) -> int:
        """How many ranks the stages are on."""
        return max(self.placement) + 1

    def stages_of(self, rank: int) -> list[int]:
        """Return the stages of a rank, first to last."""
        return [stage for stage, owner in enumerate(self.placement) if owner == rank]

    def travel_time(self, stage: int, neighbour: int) -> float:
        """Return how long a message takes from one stage to the next or the previous one."""
        is_remote = self.placement[stage] != self.placement[neighbour]
        return self.latency[min(stage, neighbour)] if is_remote else 0.0


@dataclass(frozen=True)
class Policy:
    """What a rank prefers among the actions that it could start.

    Attributes
    ----------
    splits_backward : bool
        Whether backwards run in two parts.
    prefers_forward : bool
        Forwards before backwards; otherwise the other way round.
    prefers_late_stages : bool
        Among several stages, the last one first; otherwise the first.
    prompt_weights : bool
        Weight gradients before forwards, so that memory is freed early; otherwise last.
    patience : float
        How long a rank would rather wait for an input that is on its way than start a weight
        gradient, as a share of that gradient's time.
    memory_share : float
        How much of the capacity is used. Fewer forwards at first can mean less waiting later.
    """

    splits_backward: bool = True
    prefers_forward: bool = False
    prefers_late_stages: bool = True
    prompt_weights: bool = False
    patience: float = 0.0
    memory_share: float = 1.0


def schedule_greedily(problem: Problem, policy: Policy) -> list[list[Action]]:
    """Return the schedule that a policy makes.

    Parameters
    ----------
    problem : Problem
        Each rank's capacity is enough for one microbatch on all of its stages.
    policy : Policy
    """
    return _Grower(problem, policy).run()


class _Stage:
    """How far a stage is. Each kind goes through the microbatches in their order."""

    def __init__(self, index: int, is_first: bool, num_microbatches: int) -> None:
        self.index = index
        self.counts = {F: 0, B: 0, I: 0, W: 0}
        # When inputs and gradients arrive, by microbatch, as far as known.
        self.input_at = [0.0] * num_microbatches if is_first else []
        self.gradient_at: list[float] = []


class _Grower:
    """All ranks' lists while they grow, in the order of time."""

    def __init__(self, problem: Problem, policy: Policy) -> None:
        self._problem = problem
        self._policy = policy
        self._durations = problem.durations
        last = len(problem.placement) - 1
        self._stages = [
            _Stage(index, index == 0, problem.num_microbatches) for index in range(last + 1)
        ]
        self._last = last
        self._input_kind = I if policy.splits_backward else B
        self._release_kind = W if policy.splits_backward else B
        self._ranks = [
            [self._stages[stage] for stage in problem.stages_of(rank)]
            for rank in range(problem.num_ranks)
        ]
        self._limits = [self._limit(rank) for rank in range(problem.num_ranks)]
        self._free_at = [0.0] * problem.num_ranks
        self._lists: list[list[Action]] = [[] for _ in range(problem.num_ranks)]
        self._events = [(0.0, rank) for rank in range(problem.num_ranks)]

    def run(self) -> list[list[Action]]:
        while self._events:
            now, rank = heapq.heappop(self._events)
            if now >= self._free_at[rank]:
                choice = self._choose(rank, now)
                if choice is not None:
                    self._start(rank, *choice, now)
        return self._lists

    def _limit(self, rank: int) -> float:
        one_microbatch = sum(self._problem.memory[s] for s in self._problem.stages_of(rank))
        return max(one_microbatch, self._policy.memory_share * self._problem.capacity[rank])

    # Choosing

    def _choose(self, rank: int, now: float) -> tuple[_Stage, ActionKind] | None:
        for kind in self._preferences():
            if kind is W and self._rather_waits(rank, now):
                continue
            for stage in self._in_preferred_order(rank):
                if self._can_start(rank, stage, kind, now):
                    return stage, kind
        return None

    def _preferences(self) -> Iterator[ActionKind]:
        policy = self._policy
        order = [F, self._input_kind] if policy.prefers_forward else [self._input_kind, F]
        if policy.splits_backward:
            order.insert(order.index(F) if policy.prompt_weights else 2, W)
        return iter(order)

    def _in_preferred_order(self, rank: int) -> Iterator[_Stage]:
        stages = self._ranks[rank]
        return reversed(stages) if self._policy.prefers_late_stages else iter(stages)

    def _can_start(self, rank: int, stage: _Stage, kind: ActionKind, now: float) -> bool:
        counts = stage.counts
        if kind is W:
            return counts[W] < counts[I]
        if kind is F:
            return _has_come(stage.input_at, counts[F], now) and self._has_room(rank, stage)
        return self._has_gradient(stage, now)

    def _has_gradient(self, stage: _Stage, now: float) -> bool:
        done = stage.counts[self._input_kind]
        if done >= stage.counts[F]:
            return False
        return stage.index == self._last or _has_come(stage.gradient_at, done, now)

    def _rather_waits(self, rank: int, now: float) -> bool:
        if not self._policy.patience:
            return False
        for stage in self._ranks[rank]:
            until = now + self._policy.patience * self._time(stage, W)
            if self._has_gradient(stage, until):
                return True
            if _has_come(stage.input_at, stage.counts[F], until) and self._has_room(rank, stage):
                return True
        return False

    def _has_room(self, rank: int, stage: _Stage) -> bool:
        """Whether the rank could finish all that it has begun if it lets this forward in."""
        if self._limits[rank] == math.inf:
            return True
        memory, stages = self._problem.memory, self._ranks[rank]
        released = [other.counts[self._release_kind] for other in stages]
        admitted = [other.counts[F] + (other is stage) for other in stages]
        live = sum(
            memory[other.index] * (end - start)
            for other, start, end in zip(stages, released, admitted, strict=True)
        )
        limit = self._limits[rank] * (1 + 1e-9)
        if len(stages) == 1:
            return live <= limit  # nothing else is to come of what it has begun
        for microbatch in range(min(released), max(admitted)):
            held = to_come = 0.0
            for other, start, end in zip(stages, released, admitted, strict=True):
                if microbatch >= end:
                    to_come += memory[other.index]
                elif microbatch >= start:
                    held += memory[other.index]
            if live + to_come > limit:
                return False
            live -= held
        return True

    # Starting

    def _start(self, rank: int, stage: _Stage, kind: ActionKind, now: float) -> None:
        microbatch = stage.counts[kind]
        stage.counts[kind] += 1
        self._lists[rank].append(Action(stage.index, kind, microbatch))
        end = now + self._time(stage, kind)
        self._free_at[rank] = end
        heapq.heappush(self._events, (end, rank))
        if kind is F and stage.index < self._last:
            following = self._stages[stage.index + 1]
            following.input_at.append(self._announce(stage, following, end))
        elif kind is self._input_kind and stage.index > 0:
            previous = self._stages[stage.index - 1]
            previous.gradient_at.append(self._announce(stage, previous, end))

    def _announce(self, stage: _Stage, neighbour: _Stage, end: float) -> float:
        arrival = end + self._problem.travel_time(stage.index, neighbour.index)
        heapq.heappush(self._events, (arrival, self._problem.placement[neighbour.index]))
        return arrival

    def _time(self, stage: _Stage, kind: ActionKind) -> float:
        return self._durations.of(Action(stage.index, kind))


def _has_come(arrivals: list[float], microbatch: int, now: float) -> bool:
    return microbatch < len(arrivals) and arrivals[microbatch] <= now
