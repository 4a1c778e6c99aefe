"""Collectives of ferro_dist beside torch Gloo, Open MPI and MPICH, interleaved in one run.

    python benchmarks/collectives.py --quick
    python benchmarks/collectives.py --ranks 2,4 --memory plain,symmetric
    python benchmarks/collectives.py --transport tcp

Every system runs under its own launcher and stays alive for the whole run, asleep in a
read. For each collective and size the systems take turns in short bursts, so that
whatever the machine does to one it does to all. Before and after each burst the cache-line
round trip between the first two cores is measured: virtual cores move. The printed table
compares only bursts during which the cores were equally far apart; the records have the
figures of all bursts (`p50_us`), and those by distance.

The time of a collective is that of its slowest rank. Calls shorter than 30 µs are timed
many at a time, back to back.

The same array is sent again and again. If it is read in place, it stays in the reader's cache.
With --fresh every rank writes its input before each call, as a program does that has just computed
it, and calls are timed one by one.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import math
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import measure
import report
from cases import ASYNCHRONOUS, BETWEEN_TWO, BLOCKING, DTYPES, Case
from group import CaseRefused, Group, SystemFailed, scratch_directory, start_all
from peers import SELDOM_BEST, System, systems

SIZES = "4,1K,16K,256K,4M,64M"
QUICK_SIZES = "4,1K,16K,256K,4M"
MEMORIES = ("plain", "symmetric", "torch")
BATCH_NS = 30_000
MAX_SAMPLES = 400
QUICK_SECONDS = 32.0  # with start and end, a minute


def main() -> int:
    measure.exit_on_sigterm()
    options = parse_arguments()
    inputs = "fresh" if options.fresh else "reused"
    about = {"transport": options.transport, "inputs": inputs}
    results: list[report.Result] = []
    budget = Budget(QUICK_SECONDS if options.quick else math.inf, count_cases(options))
    name = f"collectives-{options.transport}"
    with measure.RecordFile(options.output, name, **about) as file:
        for ranks in options.ranks:
            results += compare(ranks, options, budget, file)
    if not results:
        return 1
    plot = report.plot(results, file.path.with_suffix(".png"))
    measure.say(f"wrote {plot}" if plot else "no plot: no matplotlib, or nothing to draw")
    return 0


class Options(argparse.Namespace):
    """What to measure, and for how long."""

    ranks: list[int]
    collectives: list[str]
    sizes: list[int]
    memory: list[str]
    dtype: str
    transport: str
    rounds: int
    burst_ms: float
    far_ns: float
    only: list[str]
    output: Path | None
    quick: bool
    fresh: bool


def parse_arguments(arguments: Sequence[str] | None = None) -> Options:
    parser = make_parser()
    options = parser.parse_args(arguments, namespace=Options())
    fill_in_defaults(options)
    if options.transport == "tcp" and "symmetric" in options.memory:
        parser.error("argument --memory: over TCP no memory is symmetric")
    known = systems(2, options.transport)
    names = [*dict.fromkeys(each.family for each in known), *(each.name for each in known)]
    unknown = set(filter(None, options.only)) - set(names)
    if unknown:
        parser.error(
            f"argument --only: no {', '.join(sorted(unknown))}; there are {', '.join(names)}"
        )
    return options


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add, listed, one_of = parser.add_argument, measure.listed, measure.one_of
    add("--quick", action="store_true", help="under a minute: fewer sizes, rounds and peers")
    add("--ranks", type=listed(measure.at_least(1)), default="2", help="for example 2,4")
    add(
        "--collectives",
        type=listed(one_of((*BLOCKING, *ASYNCHRONOUS))),
        default=",".join(BLOCKING),
        help=f"any of {','.join((*BLOCKING, *ASYNCHRONOUS))}; default: those that block",
    )
    add("--sizes", type=listed(measure.parse_size), help=f"bytes; default {SIZES}")
    add(
        "--memory",
        type=listed(one_of(MEMORIES)),
        help=f"any of {','.join(MEMORIES)}; default plain,symmetric, over TCP plain",
    )
    add("--dtype", default="float32", choices=DTYPES)
    add("--transport", default="host", choices=("host", "tcp"))
    add("--rounds", type=measure.at_least(1), help="how often each system gets its turn")
    add("--burst-ms", type=float, help="about how long a turn lasts")
    add("--far-ns", type=float, default=350.0, help="round trip from which cores count as far")
    add("--only", type=listed(str), default=[], help="systems, for example ferro_dist,openmpi/ucx")
    add("--fresh", action="store_true", help="write the inputs anew before each call")
    add(
        "--output", type=measure.new_file, help="file for the JSON lines; the plot stands beside it"
    )
    return parser


def fill_in_defaults(options: Options) -> None:
    """Choose what was left open: --quick and the transport decide."""
    read_sizes = measure.listed(measure.parse_size)
    options.sizes = options.sizes or read_sizes(QUICK_SIZES if options.quick else SIZES)
    options.rounds = options.rounds or (5 if options.quick else 20)
    options.burst_ms = options.burst_ms or (4 if options.quick else 15)
    usual = ["plain"] if options.transport == "tcp" else ["plain", "symmetric"]
    options.memory = options.memory or usual


class Budget:
    """Time, dealt out evenly to the cases that are still to come."""

    def __init__(self, seconds: float, cases: int) -> None:
        self._end = time.monotonic() + seconds
        self._cases = cases

    def next_deadline(self) -> float:
        """Return when the case that begins now should be over."""
        now = time.monotonic()
        share = (self._end - now) / max(1, self._cases)
        self._cases -= 1
        return now + share


def count_cases(options: Options) -> int:
    return sum(
        len(options.ranks) * (1 if collective == "barrier" else len(options.sizes))
        for collective in options.collectives
    )


def compare(
    ranks: int, options: Options, budget: Budget, file: measure.RecordFile
) -> list[report.Result]:
    """Run every case with one number of ranks; record each, and print each table."""
    with scratch_directory() as directory, contextlib.ExitStack() as stack:
        chosen = [each for each in systems(ranks, options.transport) if is_chosen(each, options)]
        groups = start_all(chosen, ranks, options.transport, directory, stack)
        distance = start_distance(options, directory, stack)
        results: list[report.Result] = []
        said: set[str] = set()
        for collective in options.collectives:
            if collective in BETWEEN_TWO and ranks == 1:
                measure.say(f"without {collective}: a message needs two ranks")
                continue
            found: list[report.Result] = []
            for size in [0] if collective == "barrier" else options.sizes:
                case = Case(collective, size, ranks, options.dtype)
                contest = Contest(case, groups, distance, options, said)
                measured = contest.run(budget.next_deadline())
                file.write(*(result.to_json() for result in measured))
                found += measured
            report.print_table(found)
            results += found
        for group in groups:
            group.dismiss()
        return results


def is_chosen(system: System, options: Options) -> bool:
    """Whether a system is named, itself or by its family; of a family --quick leaves some out."""
    names = set(filter(None, options.only))
    if system.name in names:
        return True
    if options.quick and system.name in SELDOM_BEST:
        return False
    return not names or system.family in names


def start_distance(options: Options, directory: Path, stack: contextlib.ExitStack) -> Group | None:
    if measure.describe_machine()["cores"] < 2:
        return None
    system = System("distance", "two_cores", "Distance")
    groups = start_all([system], 2, options.transport, directory, stack)
    return groups[0] if groups else None


@dataclasses.dataclass
class Contestant:
    """One system with one kind of memory in one case; a burst is `samples` of `times` calls."""

    group: Group
    case: Case
    times: int = 1
    samples: int = 1
    bursts: list[report.Burst] = dataclasses.field(default_factory=list)


class Contest:
    """All systems in turn on one case."""

    def __init__(
        self,
        case: Case,
        groups: list[Group],
        distance: Group | None,
        options: Options,
        said: set[str],
    ) -> None:
        self._case = case
        self._groups = [group for group in groups if group.is_alive]
        self._distance = distance
        self._options = options
        self._said = said

    def run(self, deadline: float) -> list[report.Result]:
        """Prepare, measure in rounds, release; one result for each contestant."""
        contestants = [Contestant(group, case) for group, case in self._entries()]
        contestants = [contestant for contestant in contestants if self._calibrate(contestant)]
        for turn in range(self._options.rounds):
            if turn >= 2 and time.monotonic() > deadline:
                break
            for contestant in measure.rotated(contestants, turn):
                self._burst(contestant)
        self._release()
        return [
            report.Result(contestant.group.system, contestant.case, contestant.bursts)
            for contestant in contestants
            if contestant.bursts
        ]

    def _entries(self) -> Iterator[tuple[Group, Case]]:
        for group in self._groups:
            for memory in self._memories(group.system):
                yield group, dataclasses.replace(self._case, memory=memory)

    def _memories(self, system: System) -> list[str]:
        if not system.is_ours or self._case.collective == "barrier":
            return ["plain"]
        # Symmetric memory is the library's own, and the same however the process is tuned.
        return [m for m in self._options.memory if system.is_tuned or m != "symmetric"]

    def _calibrate(self, contestant: Contestant) -> bool:
        """Check the result once, and find out how many calls make a burst."""
        try:
            self._prepare(contestant)
            # First calls are slow: pages are untouched, and ferro_dist tries two ways to copy.
            pilot = self._sample(contestant, samples=3, times=1)
            if measure.p50(pilot) < 30 * BATCH_NS and not self._options.fresh:
                pilot = self._sample(contestant, samples=5, times=20)
        except (CaseRefused, SystemFailed) as error:
            self._say_without(contestant.group, error)
            return False
        estimate_ns = max(50.0, measure.p50(pilot))
        is_batch = not self._options.fresh
        contestant.times = max(1, math.ceil(BATCH_NS / estimate_ns)) if is_batch else 1
        wanted = self._options.burst_ms * 1e6 / (estimate_ns * contestant.times)
        contestant.samples = max(2, min(MAX_SAMPLES, math.ceil(wanted)))
        return True

    def _say_without(self, group: Group, error: CaseRefused | SystemFailed) -> None:
        is_gone = isinstance(error, SystemFailed)
        where = "from here on" if is_gone else f"in {self._case.collective}"
        self._say_once(f"without {group.system.name} {where}: {error}")

    def _say_once(self, what: str) -> None:
        if what not in self._said:  # not for every size and turn
            self._said.add(what)
            measure.say(what)

    def _release(self) -> None:
        """Let all ranks forget the arrays of this case."""
        for group in self._groups:
            if not group.is_alive:
                continue
            try:
                group.order(do="release")
            except SystemFailed as error:  # it has died since its last turn
                self._say_without(group, error)

    def _prepare(self, contestant: Contestant) -> None:
        contestant.group.order(do="prepare", case=contestant.case.to_json())

    def _burst(self, contestant: Contestant) -> None:
        group = contestant.group
        if not group.is_alive:
            return
        before = self._round_trip_ns()
        try:
            times = self._sample(contestant, contestant.samples, contestant.times)
        except (CaseRefused, SystemFailed) as error:
            self._say_without(group, error)
            return
        after = self._round_trip_ns()
        contestant.bursts.append(
            report.Burst(times, contestant.times, before, after, self._options.far_ns)
        )

    def _sample(self, contestant: Contestant, samples: int, times: int) -> list[float]:
        memory, is_fresh = contestant.case.memory, self._options.fresh
        order = {"memory": memory, "samples": samples, "times": times, "is_fresh": is_fresh}
        times_by_rank = contestant.group.order(do="sample", **order)
        per_call = 1 / self._case.calls_per_statement
        return [time * per_call for time in measure.slowest_rank(times_by_rank)]

    def _round_trip_ns(self) -> float | None:
        if self._distance is None or not self._distance.is_alive:
            return None
        try:
            return float(max(self._distance.order(do="measure")))
        except (CaseRefused, SystemFailed) as error:  # no fault of who is measured
            self._say_once(f"the distance between the cores is unknown: {error}")
            return None


if __name__ == "__main__":
    sys.exit(main())
