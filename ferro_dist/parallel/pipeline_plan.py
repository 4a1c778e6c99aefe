"""What a schedule should take by what its actions took, beside what it did take."""

from __future__ import annotations

import json
import statistics
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ferro_dist.parallel.exchange import all_gather_bytes
from ferro_dist.parallel.schedules import Action, Simulation, Span, simulate
from ferro_dist.point_to_point import recv, send

if TYPE_CHECKING:
    from ferro_dist.backends.base import Backend
    from ferro_dist.parallel.executor import StepRun

__all__ = ["PipelinePlan", "make_plan"]

_NUM_PINGS = 5


@dataclass(frozen=True)
class PipelinePlan:
    """A schedule, simulated with measured times, and the run that they were measured in.

    Attributes
    ----------
    schedule : list of list of Action
    durations : dict of (int, str) to float
        Seconds of each kind of action on each stage; medians.
    latency_s : float
        Of a small message between neighbours.
    predicted : Simulation
    spans : list of Span
        The run, by the clock of rank 0.
    peak_live : list of int
        The most microbatches that were live on each rank, times its stages.
    overhead_s : list of float
        What each rank spent neither computing nor waiting.
    """

    schedule: list[list[Action]]
    durations: dict[tuple[int, str], float]
    latency_s: float
    predicted: Simulation
    spans: list[Span]
    peak_live: list[int]
    overhead_s: list[float]

    @property
    def makespan_s(self) -> float:
        """How long the run took, from the first action to the end of the last."""
        return max(span.end_s for span in self.spans) - min(span.start_s for span in self.spans)

    @property
    def bubble(self) -> float:
        """Idle time over useful time in the run."""
        useful_s = sum(span.end_s - span.start_s for span in self.spans)
        return (self.makespan_s * len(self.schedule) - useful_s) / useful_s

    @property
    def overhead_us_per_action(self) -> float:
        """What an action cost beyond its own time, on the rank where it was most."""
        pairs = zip(self.overhead_s, self.schedule, strict=True)
        return max(1e6 * seconds / len(actions) for seconds, actions in pairs if actions)

    def plot(self, path: Any) -> None:
        """Draw the run, and behind it the simulated one; needs matplotlib."""
        from ferro_dist.parallel.schedules.plot import plot

        plot(self.spans, path, ideal=self.predicted.spans)

    def __str__(self) -> str:
        rows = [
            ("makespan, ms", 1e3 * self.predicted.makespan_s, 1e3 * self.makespan_s, ".2f"),
            ("idle / useful time", self.predicted.bubble, self.bubble, ".3f"),
            *(
                (f"live on rank {rank}", predicted, real, "d")
                for rank, (predicted, real) in enumerate(
                    zip(self.predicted.peak_live, self.peak_live, strict=True)
                )
            ),
        ]
        lines = [f"{'':<20}{'predicted':>12}{'real':>12}"]
        lines += [f"{name:<20}{a:>12{form}}{b:>12{form}}" for name, a, b, form in rows]
        lines.append(f"executor {self.overhead_us_per_action:.0f} µs an action")
        return "\n".join(lines)


def make_plan(lists: list[list[Action]], run: StepRun, backend: Backend) -> PipelinePlan:
    """Bring together what all ranks have measured. Called by all ranks."""
    offset_s, latency_s = _compare_clocks(backend)
    own = {
        "spans": [(str(s.action), s.start_s - offset_s, s.end_s - offset_s) for s in run.spans],
        "latency_s": latency_s,
        "overhead_s": run.overhead_s,
        "peak_live": run.peak_live,
    }
    measured = [json.loads(m) for m in all_gather_bytes(json.dumps(own).encode(), backend)]
    spans = [
        Span(rank, Action.parse(text), start_s, end_s)
        for rank, of_rank in enumerate(measured)
        for text, start_s, end_s in of_rank["spans"]
    ]
    durations = _medians(spans)
    latency_s = max(of_rank["latency_s"] for of_rank in measured)
    return PipelinePlan(
        lists,
        durations,
        latency_s,
        simulate(lists, durations, latency_s),
        spans,
        [of_rank["peak_live"] for of_rank in measured],
        [of_rank["overhead_s"] for of_rank in measured],
    )


def _medians(spans: Sequence[Span]) -> dict[tuple[int, str], float]:
    times: dict[tuple[int, str], list[float]] = defaultdict(list)
    for span in spans:
        times[span.action.stage, span.action.kind.value].append(span.end_s - span.start_s)
    return {key: statistics.median(values) for key, values in times.items()}


def _compare_clocks(backend: Backend) -> tuple[float, float]:
    """Return how far this rank's clock is ahead of rank 0's, and the time a message takes.

    Rank 0 asks each rank for its time. The answer of the quickest round was given halfway.
    """
    mine = np.empty(1)
    if backend.rank != 0:
        for _ in range(_NUM_PINGS):
            recv(mine, backend, 0)
            mine[0] = time.perf_counter()
            send(mine, backend, 0)
        recv(answer := np.empty(2), backend, 0)
        return float(answer[0]), float(answer[1])
    latency_s = 0.0
    for rank in range(1, backend.world_size):
        rounds = [_ping(backend, rank, mine) for _ in range(_NUM_PINGS)]
        round_trip_s, offset_s = min(rounds)
        latency_s = max(latency_s, round_trip_s / 2)
        send(np.array([offset_s, round_trip_s / 2]), backend, rank)
    return 0.0, latency_s


def _ping(backend: Backend, rank: int, theirs: np.ndarray[Any, Any]) -> tuple[float, float]:
    asked_s = time.perf_counter()
    send(theirs, backend, rank)
    recv(theirs, backend, rank)
    answered_s = time.perf_counter()
    return answered_s - asked_s, float(theirs[0]) - (asked_s + answered_s) / 2
