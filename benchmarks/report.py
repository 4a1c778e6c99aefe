"""The results of `collectives.py` as a table, as records, and as a plot."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import measure
from cases import Case
from peers import System


@dataclasses.dataclass(frozen=True)
class Burst:
    """The times of one turn, with the round trips between the cores right before and after.

    A time is the mean of `calls_per_time` calls in a row.
    """

    times_ns: list[float]
    calls_per_time: int
    before_ns: float | None
    after_ns: float | None
    far_ns: float

    @property
    def distance(self) -> str:
        """Where the two cores were: "near", "far", "moved" meanwhile, or "unknown"."""
        if self.before_ns is None or self.after_ns is None:
            return "unknown"
        is_far = {self.before_ns >= self.far_ns, self.after_ns >= self.far_ns}
        if len(is_far) == 2:
            return "moved"
        return "far" if is_far.pop() else "near"


@dataclasses.dataclass(frozen=True)
class Result:
    """Everything measured of one system in one case."""

    system: System
    case: Case
    bursts: list[Burst]

    @property
    def label(self) -> str:
        return f"{self.system.name} {self.case.memory}" if self.system.is_ours else self.system.name

    def times_ns(self, distance: str | None = None) -> list[float]:
        """Collect the times of all bursts, or of those at one distance."""
        chosen = [burst for burst in self.bursts if distance in (None, burst.distance)]
        return [time for burst in chosen for time in burst.times_ns]

    def p50_us(self, distance: str | None = None) -> float:
        return measure.p50(self.times_ns(distance)) / 1e3

    def p95_us(self, distance: str | None = None) -> float:
        return measure.p95(self.times_ns(distance)) / 1e3

    def to_json(self) -> dict[str, Any]:
        distances = sorted({burst.distance for burst in self.bursts})
        return {
            "benchmark": "collectives",
            "system": self.system.family,
            "configuration": self.system.configuration,
            # Of a path only the file's name: the folders of this machine tell a reader nothing.
            "environment": {
                name: value.rpartition("/")[2] if value.startswith("/") else value
                for name, value in self.system.environment.items()
            },
            **self.case.to_json(),
            "nbytes": self.case.nbytes,
            **self._figures(None),
            "calls_per_sample": self.bursts[0].calls_per_time,
            "by_distance": {distance: self._figures(distance) for distance in distances},
            "bursts_p50_us_and_round_trips_ns": [
                [round(measure.p50(burst.times_ns) / 1e3, 4), burst.before_ns, burst.after_ns]
                for burst in self.bursts
            ],
        }

    def _figures(self, distance: str | None) -> dict[str, Any]:
        p50_us = self.p50_us(distance)
        return {
            "p50_us": round(p50_us, 4),
            "p95_us": round(self.p95_us(distance), 4),
            "algbw_gb_s": round(measure.algbw_gb_s(self.case.nbytes, p50_us / 1e6), 4),
            "busbw_gb_s": round(self.busbw_gb_s(p50_us), 4),
            "samples": len(self.times_ns(distance)),
        }

    def busbw_gb_s(self, p50_us: float) -> float:
        case = self.case
        return measure.busbw_gb_s(case.collective, case.ranks, case.nbytes, p50_us / 1e6)


# Tables

_HEADER = (
    f"{'size':>9} {'system':<32} {'cores':<5} {'p50 us':>10} {'p95 us':>10} "
    f"{'algbw':>7} {'busbw':>7}  against the best peer of its kind"
)


def print_table(results: Sequence[Result]) -> None:
    """Print one collective: for each size ours, the best of each peer, and all that is untuned."""
    if not results:
        return
    case = results[0].case
    measure.say(f"\n{case.collective}, {case.ranks} ranks, {case.dtype}; bandwidths in GB/s")
    measure.say(_HEADER)
    for same_case in _by_size(results):
        distance = usual_distance(same_case)
        comparable = [result for result in same_case if result.times_ns(distance)]
        best = {tuned: best_peer(comparable, distance, is_tuned=tuned) for tuned in (True, False)}
        for result in _worth_showing(comparable, distance):
            measure.say(_row(result, distance, best[result.system.is_tuned]))


def usual_distance(results: Iterable[Result]) -> str:
    """Find the distance between the cores in most of these bursts."""
    distances = [burst.distance for result in results for burst in result.bursts]
    comparable = [distance for distance in distances if distance != "moved"]
    return statistics.mode(comparable or distances)


def best_peer(results: Iterable[Result], distance: str, *, is_tuned: bool) -> Result | None:
    """Find the fastest configuration of any peer, of the tuned ones or of the others."""
    peers = [r for r in results if not r.system.is_ours and r.system.is_tuned == is_tuned]
    return min(peers, key=lambda result: result.p50_us(distance), default=None)


def _by_size(results: Sequence[Result]) -> list[list[Result]]:
    sizes = sorted({result.case.size for result in results})
    return [[result for result in results if result.case.size == size] for size in sizes]


def _worth_showing(results: Sequence[Result], distance: str) -> list[Result]:
    tuned = [result for result in results if result.system.is_tuned]
    ours = [result for result in tuned if result.system.is_ours]
    untuned = [result for result in results if not result.system.is_tuned]
    return ours + best_of_each_family(tuned, distance) + untuned


def best_of_each_family(results: Sequence[Result], distance: str) -> list[Result]:
    """Find the fastest configuration of each peer."""
    peers = [result for result in results if not result.system.is_ours]
    families = dict.fromkeys(result.system.family for result in peers)
    return [
        min(
            (result for result in peers if result.system.family == family),
            key=lambda result: result.p50_us(distance),
        )
        for family in families
    ]


def _row(result: Result, distance: str, best: Result | None) -> str:
    p50_us = result.p50_us(distance)
    algbw = measure.algbw_gb_s(result.case.nbytes, p50_us / 1e6)
    row = (
        f"{measure.format_size(result.case.nbytes):>9} {result.label:<32} {distance:<5.5} "
        f"{p50_us:>10.2f} {result.p95_us(distance):>10.2f} "
        f"{algbw:>7.2f} {result.busbw_gb_s(p50_us):>7.2f}"
    )
    if best is None:
        return row
    if result.system.is_ours:
        return f"{row}  {best.p50_us(distance) / p50_us:.2f} x {best.system.name}"
    return f"{row}  {'best' if result is best else ''}".rstrip()


# The plot


def plot(results: Sequence[Result], path: Path) -> Path | None:
    """Draw time over size, one panel for each collective; None without matplotlib or sizes."""
    try:
        import matplotlib
    except ImportError:
        return None
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    panels = list(dict.fromkeys((r.case.collective, r.case.ranks) for r in results))
    panels = [panel for panel in panels if panel[0] != "barrier"]
    if not panels:
        return None
    columns = min(3, len(panels))
    rows = -(-len(panels) // columns)
    figure, axes = plt.subplots(rows, columns, figsize=(5 * columns, 4 * rows), squeeze=False)
    for axis, (collective, ranks) in zip(axes.flat, panels, strict=False):
        chosen = [r for r in results if (r.case.collective, r.case.ranks) == (collective, ranks)]
        _draw(axis, chosen)
        axis.set_title(f"{collective}, {ranks} ranks")
    for axis in list(axes.flat)[len(panels) :]:
        axis.set_axis_off()
    # Not every system takes part in the first panel.
    known = [zip(*axis.get_legend_handles_labels(), strict=True) for axis in axes.flat]
    lines = {label: line for pairs in known for line, label in pairs}
    axes.flat[0].legend(lines.values(), lines.keys(), fontsize="small")
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plt.close(figure)
    return path


_COLOURS = {"gloo": "tab:green", "openmpi": "tab:orange", "mpich": "tab:purple"}
_OUR_STYLES = {"plain": "-", "symmetric": "--", "torch": ":"}


def _draw(axis: Any, results: Sequence[Result]) -> None:
    lines: dict[str, tuple[list[int], list[float], dict[str, Any]]] = {}
    for same_case in _by_size(results):
        distance = usual_distance(same_case)
        comparable = [result for result in same_case if result.times_ns(distance)]
        for result in _worth_showing(comparable, distance):
            label, style = _style(result)
            sizes, times, _ = lines.setdefault(label, ([], [], style))
            sizes.append(result.case.nbytes)
            times.append(result.p50_us(distance))
    for label, (sizes, times, style) in lines.items():
        axis.loglog(sizes, times, label=label, marker=".", **style)
    axis.set_xlabel("bytes")
    axis.set_ylabel("median time, µs")
    axis.grid(visible=True, which="major", alpha=0.3)


def _style(result: Result) -> tuple[str, dict[str, Any]]:
    family, memory = result.system.family, result.case.memory
    if result.system.is_ours:
        style = {"color": "tab:blue", "linestyle": _OUR_STYLES[memory]}
        if result.system.is_tuned:
            return f"ferro_dist, {memory}", style
        return f"ferro_dist, {memory}, untuned", {**style, "alpha": 0.4}
    if result.system.is_tuned:
        return f"{family}, best tuned", {"color": _COLOURS[family]}
    return f"{family}, untuned", {"color": _COLOURS[family], "linestyle": ":", "alpha": 0.6}
