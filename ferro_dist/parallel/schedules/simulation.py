"""Simulation: what a schedule costs in time and memory, without running it.

Ranks run their lists as the executor does (see `ferro_dist.parallel.schedules.action`):

- A compute action starts when the one before it has ended and its input has arrived.
- A message leaves when it is sent and its receive is posted, and arrives `latency` later, though
  never before the one ahead of it in its queue. Neither end waits.
- Reductions of a rank run one after the other, in parallel with compute.

Cost: linear in the actions.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from ferro_dist.parallel.schedules.action import Action, ActionKind
from ferro_dist.parallel.schedules.arguments import one_per
from ferro_dist.parallel.schedules.dependencies import Dependencies, Key, OrderedRun
from ferro_dist.parallel.schedules.durations import UNIT_DURATIONS, Durations, DurationsLike
from ferro_dist.parallel.schedules.notation import Schedule, WrittenSchedule, parse_schedule
from ferro_dist.parallel.schedules.timeline import Span, busy_times
from ferro_dist.parallel.schedules.validation import check_content, stuck_error

__all__ = ["Simulation", "simulate", "simulate_checked"]


@dataclass(frozen=True)
class Simulation:
    """What a schedule would do.

    Attributes
    ----------
    spans : list of Span
        Compute and reductions, each rank's in its order.
    num_ranks : int
    makespan_s : float
        From the start of the first action to the end of the last.
    busy_s : list of float
        How long each rank computes.
    peak_live : list of int
        For each rank, the most (stage, microbatch) pairs that were live at a time.
    peak_microbatches : list of float
        The same divided by the rank's number of stages: in microbatches of its whole share.
    peak_nbytes : list of float or None
        For each rank, the most memory that live microbatches held; None without `memory`.
    """

    spans: list[Span] = field(repr=False)  # hundreds, as a rule
    num_ranks: int
    makespan_s: float
    busy_s: list[float]
    peak_live: list[int]
    peak_microbatches: list[float]
    peak_nbytes: list[float] | None

    @property
    def bubble(self) -> float:
        """Idle time divided by useful time, summed over all ranks."""
        useful_s = math.fsum(self.busy_s)
        return (self.makespan_s * self.num_ranks - useful_s) / useful_s if useful_s else 0.0


def simulate(
    schedule: WrittenSchedule,
    durations: DurationsLike = UNIT_DURATIONS,
    latency: float | Iterable[float] = 0.0,
    memory: float | Iterable[float] | None = None,
    *,
    phase: str = "step",
) -> Simulation:
    """Run a schedule on paper.

    Parameters
    ----------
    schedule : lists of Action or of text
        One for each rank. Without messages in them, receives count as posted from the start.
    durations : mapping
        Time of each kind, or of each stage and kind; see `Durations`.
    latency : float or sequence of float, default 0
        Time that a message takes between ranks: one for all, or one for each pair of neighbouring
        stages; the same in both directions.
    memory : float or sequence of float, optional
        Bytes that a live microbatch holds: one number for all stages, or one for each.
    phase : {"step", "forward", "backward"}, default "step"

    Raises
    ------
    InvalidSchedule
        See `validate`.
    ValueError
        Durations, latencies or memory lack a stage, are negative, or so large that their sum is not
        finite.

    Examples
    --------
    >>> simulate(one_f_one_b(4, 8)).bubble
    0.375
    """
    lists = parse_schedule(schedule)
    dependencies = check_content(lists, None, phase)
    return simulate_checked(lists, dependencies, Durations(durations), latency, memory)


def simulate_checked(
    schedule: Schedule,
    dependencies: Dependencies,
    durations: Durations,
    latency: float | Iterable[float] = 0.0,
    memory: float | Iterable[float] | None = None,
) -> Simulation:
    """Simulate what has passed `check_content`; see `simulate`."""
    run = _PaperRun(schedule, dependencies, durations, latency)
    residents = _Residents(schedule)
    num_stages = len(run.placement)
    peak_nbytes = None if memory is None else residents.peaks(one_per("memory", memory, num_stages))
    peak_live = [round(peak) for peak in residents.peaks([1.0] * num_stages)]
    makespan_s = max((span.end_s for span in run.spans), default=0.0)
    # No rank is busy for longer, so all sums of times are finite, too.
    if makespan_s * len(schedule) == math.inf:
        raise ValueError("durations and latencies are too large: their sum is not finite.")
    return Simulation(
        spans=run.spans,
        num_ranks=len(schedule),
        makespan_s=makespan_s,
        busy_s=busy_times(run.spans, len(schedule)),
        peak_live=peak_live,
        peak_microbatches=[peak / run.placement.count(rank) for rank, peak in enumerate(peak_live)],
        peak_nbytes=peak_nbytes,
    )


class _PaperRun:
    """The clocks of ranks, messages and reductions while the lists run."""

    def __init__(
        self,
        schedule: Schedule,
        dependencies: Dependencies,
        durations: Durations,
        latency: float | Iterable[float],
    ) -> None:
        self.spans: list[Span] = []
        self._durations = durations
        self._dependencies = dependencies
        self.placement = self._dependencies.placement
        self._latency = one_per("latency", latency, len(self.placement) - 1)
        self._clock = [0.0] * len(schedule)
        self._reducing_until = [0.0] * len(schedule)
        self._done_at: dict[Key, float] = {}
        self._last_arrival: dict[tuple[int, int], float] = defaultdict(float)
        run = OrderedRun(schedule, dependencies.of, self._run)
        if run.stuck:
            raise stuck_error(schedule, run)

    def _run(self, rank: int, action: Action, needed: Sequence[Key]) -> None:
        if action.kind.is_compute:
            self._compute(rank, action, needed)
        elif action.kind is ActionKind.REDUCE:
            self._reduce(rank, action)
        else:
            self._exchange(rank, action)

    def _compute(self, rank: int, action: Action, needed: Sequence[Key]) -> None:
        start = self._clock[rank]
        for other in needed:
            start = max(start, self._available_at(action, other))
        end = start + self._durations.of(action)
        self._clock[rank] = self._done_at[action] = end
        self.spans.append(Span(rank, action, start, end))

    def _available_at(self, action: Key, needed: Key) -> float:
        """Return when the result of another action that this one needs is on its rank."""
        done_at = self._done_at[needed]
        stage, other = action[0], needed[0]
        if self._dependencies.has_messages or self.placement[stage] == self.placement[other]:
            return done_at
        return done_at + self._latency[min(stage, other)]

    def _reduce(self, rank: int, action: Action) -> None:
        start = max(self._clock[rank], self._reducing_until[rank])
        end = self._reducing_until[rank] = start + self._durations.of(action)
        self.spans.append(Span(rank, action, start, end))

    def _exchange(self, rank: int, action: Action) -> None:
        """Note when a send or receive came up; the later one of the two decides the arrival."""
        other_side = action.other_side
        now = self._clock[rank]
        other = self._done_at.get(other_side)
        if other is None:
            self._done_at[action] = now
            return
        send = action if action.kind.is_send else other_side
        queue = (self.placement[send.stage], self.placement[send.other_side.stage])
        latency = self._latency[min(action.stage, other_side.stage)]
        arrival = max(max(now, other) + latency, self._last_arrival[queue])
        self._last_arrival[queue] = arrival
        self._done_at[action] = self._done_at[other_side] = arrival


class _Residents:
    """Which microbatches become live on each rank, and cease to be, in the order of its list.

    Both happen on one rank, so its list alone decides what is live together.
    """

    def __init__(self, schedule: Schedule) -> None:
        self._changes = [
            [(a.stage, _LIFE[a.kind]) for a in actions if a.kind in _LIFE] for actions in schedule
        ]

    def peaks(self, memory: Sequence[float]) -> list[float]:
        """Return the most that the live microbatches of each rank hold at any time.

        `memory` is what each holds, by stage.
        """
        return [self._peak(changes, memory) for changes in self._changes]

    @staticmethod
    def _peak(changes: list[tuple[int, int]], memory: Sequence[float]) -> float:
        live = peak = 0.0
        for stage, sign in changes:
            live += sign * memory[stage]
            peak = max(peak, live)
        return peak


_LIFE = {
    ActionKind.FORWARD: +1,
    ActionKind.BACKWARD: -1,
    ActionKind.BACKWARD_WEIGHT: -1,
}
