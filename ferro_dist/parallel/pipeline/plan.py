"""How long a schedule should take, given the times of its actions, and how long it took."""

from __future__ import annotations

import itertools
import json
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ferro_dist.collective import allreduce
from ferro_dist.parallel.exchange import all_gather_bytes
from ferro_dist.parallel.schedules import Action, Simulation, Span, placement_of, simulate
from ferro_dist.point_to_point import recv, send

if TYPE_CHECKING:
    from ferro_dist.backends.base import Backend
    from ferro_dist.parallel.pipeline.executor import Measurements

__all__ = ["PipelinePlan", "make_plan"]

Bytes = np.ndarray[Any, Any]

_NUM_PINGS = 5


@dataclass(frozen=True)
class PipelinePlan:
    """A schedule, simulated with measured times, and the run that they were measured in.

    Attributes
    ----------
    schedule : list of list of Action
    durations : dict of (int, str) to float
        Seconds of each kind of action on each stage; medians.
    message_nbytes : list of int
        The run's largest message between each stage and the next; counts only what goes from host
        to host.
    latency_s : list of float
        How long a message of that size takes.
    predicted : Simulation
    spans : list of Span
        The run, by the clock of rank 0.
    peak_live : list of int
        The largest number of microbatches live at once on each rank, summed over its stages.
    overhead_s : list of float
        The time that each rank spent neither computing nor waiting.
    """

    schedule: list[list[Action]]
    durations: dict[tuple[int, str], float]
    message_nbytes: list[int]
    latency_s: list[float]
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
        """What an action cost beyond its own time, on the rank where that was largest."""
        pairs = zip(self.overhead_s, self.schedule, strict=True)
        return max(1e6 * seconds / len(actions) for seconds, actions in pairs if actions)

    def plot(self, path: Any) -> None:
        """Draw the run, and behind it the simulated one; needs matplotlib."""
        from ferro_dist.parallel.schedules.plot import plot

        plot(_in_ms(self.spans), path, ideal=_in_ms(self.predicted.spans), time_label="time, ms")

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


def make_plan(lists: list[list[Action]], run: Measurements, backend: Backend) -> PipelinePlan:
    """Bring together what all ranks have measured. Called by all ranks."""
    offset_s = _compare_clocks(backend)
    own = {
        "spans": [(str(s.action), s.start_s - offset_s, s.end_s - offset_s) for s in run.spans],
        "message_nbytes": list(run.message_nbytes.items()),
        "overhead_s": run.overhead_s,
        "peak_live": run.peak_live,
    }
    measured = [json.loads(m) for m in all_gather_bytes(json.dumps(own).encode(), backend)]
    placement = placement_of(lists)
    message_nbytes = [0] * (len(placement) - 1)
    for boundary, nbytes in (pair for of_rank in measured for pair in of_rank["message_nbytes"]):
        message_nbytes[boundary] = max(message_nbytes[boundary], nbytes)
    latency_s = _latencies(placement, message_nbytes, backend)
    spans = [
        Span(rank, Action.parse(text), start_s, end_s)
        for rank, of_rank in enumerate(measured)
        for text, start_s, end_s in of_rank["spans"]
    ]
    durations = _medians(spans)
    return PipelinePlan(
        lists,
        durations,
        message_nbytes,
        latency_s,
        simulate(lists, durations, latency_s),
        spans,
        [of_rank["peak_live"] for of_rank in measured],
        [of_rank["overhead_s"] for of_rank in measured],
    )


def _in_ms(spans: Sequence[Span]) -> list[Span]:
    return [Span(rank, action, 1e3 * start, 1e3 * end) for rank, action, start, end in spans]


def _medians(spans: Sequence[Span]) -> dict[tuple[int, str], float]:
    times: dict[tuple[int, str], list[float]] = defaultdict(list)
    for span in spans:
        times[span.action.stage, span.action.kind.value].append(span.end_s - span.start_s)
    return {key: statistics.median(values) for key, values in times.items()}


def _latencies(
    placement: Sequence[int], message_nbytes: Sequence[int], backend: Backend
) -> list[float]:
    """Return how long a message takes between each stage and the next. Called by all ranks.

    One boundary after the other: at the same time, they would slow each other down.
    """
    latencies = np.zeros(len(placement) - 1)
    for boundary, (rank, other) in enumerate(itertools.pairwise(placement)):
        if rank == other or backend.rank not in (rank, other):
            continue
        message = np.zeros(max(message_nbytes[boundary], 1), np.uint8)
        if backend.rank == other:
            _answer(message, backend, rank)
        else:
            round_trips_s = [_ping(message, backend, other) for _ in range(_NUM_PINGS)]
            latencies[boundary] = min(round_trips_s) / 2
    found: list[float] = allreduce(latencies, backend).tolist()
    return found


def _compare_clocks(backend: Backend) -> float:
    """Return how far this rank's clock is ahead of rank 0's.

    Rank 0 asks each rank for its time, and takes the answer of the quickest round trip as given at
    its middle.
    """
    told = np.empty(1)
    if backend.rank != 0:
        _answer(told, backend, 0, lambda: told.fill(time.perf_counter()))
        recv(told, backend, 0)
        return float(told[0])
    for rank in range(1, backend.world_size):
        rounds = []
        for _ in range(_NUM_PINGS):
            round_trip_s = _ping(told, backend, rank)
            rounds.append((round_trip_s, told[0] - (time.perf_counter() - round_trip_s / 2)))
        send(np.array([min(rounds)[1]]), backend, rank)
    return 0.0


def _ping(message: Bytes, backend: Backend, rank: int) -> float:
    """Send something there and back; return how long that took."""
    asked_s = time.perf_counter()
    send(message, backend, rank)
    recv(message, backend, rank)
    return time.perf_counter() - asked_s


def _answer(
    message: Bytes, backend: Backend, rank: int, write: Callable[[], None] = lambda: None
) -> None:
    """Answer the pings of another rank: return each message, once `write` has written into it."""
    for _ in range(_NUM_PINGS):
        recv(message, backend, rank)
        write()
        send(message, backend, rank)
