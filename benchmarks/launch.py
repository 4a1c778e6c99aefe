"""What a launcher costs: two ranks that do nothing, under each launcher and under none.

    python benchmarks/launch.py
    python benchmarks/launch.py --quick --output launch.jsonl

The launchers take turns. The floor is the two interpreters started by hand: what is above
it is the launcher's own. Absolute times depend on how busy the machine is; compare them
within one run.
"""

from __future__ import annotations

import argparse
import functools
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import measure

RANKS = 2
RANK_COMMAND = [sys.executable, "-c", "pass"]
TIMEOUT_S = 60.0
FLOOR = "no launcher"

Start = Callable[[], None]


def main() -> int:
    options = parse_arguments()
    starts, missing = find_launchers()
    for name, reason in missing.items():
        measure.warn(f"{name}: {reason}")
    samples: dict[str, list[float]] = {name: [] for name in starts}
    with measure.RecordFile(options.output, "launch") as file:
        try:
            compare(starts, samples, options.rounds, options.slow_rounds)
        finally:
            if all(samples.values()):
                show(samples)
                file.write(*records(samples, missing))
    return 0


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    at_least = measure.at_least
    parser.add_argument("--rounds", type=at_least(1), help="runs of each launcher; default 40")
    parser.add_argument(
        "--slow-rounds", type=at_least(1), help="runs of torchrun, seconds each; default 5"
    )
    parser.add_argument("--quick", action="store_true", help="10 rounds, 2 of torchrun")
    parser.add_argument("--output", type=measure.new_file, help="file for the JSON lines")
    options = parser.parse_args()
    options.rounds = options.rounds or (10 if options.quick else 40)
    options.slow_rounds = options.slow_rounds or (2 if options.quick else 5)
    return options


# What is compared


def find_launchers() -> tuple[dict[str, Start], dict[str, str]]:
    """Return every launcher that is installed, and why the others are not there."""
    commands = {
        "ferrorun": find("ferrorun", "-n", str(RANKS), "--no-python"),
        "MPICH mpiexec": find("mpiexec.hydra", "-n", str(RANKS)),
        "Open MPI mpiexec": find("prterun", *openmpi_options(), "-n", str(RANKS)),
        "torchrun": find("torchrun", f"--nproc-per-node={RANKS}", "--no-python"),
    }
    starts: dict[str, Start] = {FLOOR: start_by_hand}
    missing = {}
    for name, command in commands.items():
        if command is None:
            missing[name] = "not installed"
            continue
        failure = try_once(command)
        if failure:
            missing[name] = failure
        else:
            starts[name] = functools.partial(run, command)
    return starts, missing


def openmpi_options() -> list[str]:
    options = ["--personality", "ompi", "--map-by", ":OVERSUBSCRIBE", "--bind-to", "none"]
    return ["--allow-run-as-root", *options] if os.geteuid() == 0 else options


def find(program: str, *options: str) -> list[str] | None:
    """Return the command that runs the ranks; a program beside this Python goes first."""
    beside = Path(sys.executable).with_name(program)
    path = str(beside) if beside.exists() else shutil.which(program)
    if path is None:
        return None
    return [path, *options, *RANK_COMMAND]


def try_once(command: list[str]) -> str:
    """Run a launcher outside the comparison; return the reason if it does not work here."""
    try:
        run(command)
    except subprocess.CalledProcessError as error:
        return f"exits with code {error.returncode} here"
    except subprocess.TimeoutExpired:
        return f"does not end within {TIMEOUT_S:.0f} s here"
    return ""


def run(command: list[str]) -> None:
    subprocess.run(
        command,
        check=True,
        timeout=TIMEOUT_S,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )


def start_by_hand() -> None:
    ranks = [subprocess.Popen(RANK_COMMAND, stdin=subprocess.DEVNULL) for _ in range(RANKS)]
    for rank in ranks:
        if rank.wait(TIMEOUT_S):
            raise subprocess.CalledProcessError(rank.returncode, RANK_COMMAND)


# The comparison


def compare(
    starts: dict[str, Start], samples: dict[str, list[float]], rounds: int, slow_rounds: int
) -> None:
    """Add the seconds of each run to `samples`; in every round the launchers take turns."""
    for number in range(rounds):
        for name, start in measure.rotated(list(starts.items()), number):
            if name == "torchrun" and number >= slow_rounds:
                continue
            started = time.perf_counter()
            start()
            samples[name].append(time.perf_counter() - started)


def show(samples: dict[str, list[float]]) -> None:
    floor = measure.p50(samples[FLOOR])
    measure.say(f"{RANKS} ranks that do nothing, ms")
    measure.say(f"{'':18}{'runs':>6}{'min':>9}{'p50':>9}{'p95':>9}{'over floor':>12}")
    for name, times in samples.items():
        low, middle, high = (1e3 * f(times) for f in (min, measure.p50, measure.p95))
        over = middle - floor * 1e3
        measure.say(f"{name:18}{len(times):6}{low:9.1f}{middle:9.1f}{high:9.1f}{over:12.1f}")


def records(samples: dict[str, list[float]], missing: dict[str, str]) -> list[dict[str, object]]:
    floor = measure.p50(samples[FLOOR])
    measured: list[dict[str, object]] = [
        {
            "benchmark": "launch",
            "launcher": name,
            "ranks": RANKS,
            "runs": len(times),
            "min_s": min(times),
            "p50_s": measure.p50(times),
            "p95_s": measure.p95(times),
            "p50_over_floor_s": measure.p50(times) - floor,
        }
        for name, times in samples.items()
    ]
    absent: list[dict[str, object]] = [
        {"benchmark": "launch", "launcher": name, "missing": why} for name, why in missing.items()
    ]
    return measured + absent


if __name__ == "__main__":
    sys.exit(main())
