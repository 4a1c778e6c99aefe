"""What `import ferro_dist` and its first use cost, beside NumPy's own import.

    python benchmarks/import_time.py
    python benchmarks/import_time.py --quick --output import_time.jsonl

Each sample is a new interpreter that times the statement inside it: what the interpreter
itself takes to start is not counted. The statements take turns. The first use is an
allreduce in a world of one, import included; it contains NumPy's import.
"""

from __future__ import annotations

import argparse
import subprocess
import sys

import measure

TIMEOUT_S = 60.0
BASE = "import numpy"
FIRST_USE = """\
import ferro_dist, numpy
with ferro_dist.init() as backend:
    ferro_dist.allreduce(numpy.ones(3), backend)
"""
STATEMENTS = {
    BASE: BASE,
    "import ferro_dist": "import ferro_dist",
    "import, first allreduce": FIRST_USE,
    "import ferro_dist.launch": "import ferro_dist.launch",
}
TIMED = """\
import sys, time
sys.path[:] = filter(None, sys.path)  # without the working directory, which may be a source tree
started = time.perf_counter()
{statement}
elapsed = time.perf_counter() - started
print(elapsed)
"""


def main() -> int:
    options = parse_arguments()
    samples: dict[str, list[float]] = {name: [] for name in STATEMENTS}
    with measure.RecordFile(options.output, "import-time") as file:
        try:
            compare(samples, options.rounds)
        finally:
            if all(samples.values()):
                show(samples)
                file.write(*records(samples))
    return 0


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=measure.at_least(1), help="samples of each; default 40")
    parser.add_argument("--quick", action="store_true", help="10 rounds")
    parser.add_argument("--output", type=measure.new_file, help="file for the JSON lines")
    options = parser.parse_args()
    options.rounds = options.rounds or (10 if options.quick else 40)
    return options


def compare(samples: dict[str, list[float]], rounds: int) -> None:
    """Add the seconds of each to `samples`. One round more goes first, to fill the page cache."""
    for number in range(rounds + 1):
        for name, statement in measure.rotated(list(STATEMENTS.items()), number):
            elapsed_s = time_in_new_interpreter(statement)
            if number > 0:
                samples[name].append(elapsed_s)


def time_in_new_interpreter(statement: str) -> float:
    ran = subprocess.run(
        [sys.executable, "-c", TIMED.format(statement=statement)],
        check=True,
        stdout=subprocess.PIPE,
        text=True,
        timeout=TIMEOUT_S,
    )
    return float(ran.stdout)


def show(samples: dict[str, list[float]]) -> None:
    base_s = measure.p50(samples[BASE])
    measure.say("milliseconds")
    measure.say(f"{'':26}{'runs':>6}{'min':>9}{'p50':>9}{'p95':>9}{'to NumPy':>10}")
    for name, times in samples.items():
        low, middle, high = (1e3 * f(times) for f in (min, measure.p50, measure.p95))
        ratio = middle / (base_s * 1e3)
        measure.say(f"{name:26}{len(times):6}{low:9.1f}{middle:9.1f}{high:9.1f}{ratio:9.2f}x")


def records(samples: dict[str, list[float]]) -> list[dict[str, object]]:
    base_s = measure.p50(samples[BASE])
    return [
        {
            "benchmark": "import_time",
            "statement": name,
            "runs": len(times),
            "min_s": min(times),
            "p50_s": measure.p50(times),
            "p95_s": measure.p95(times),
            "p50_ratio_to_numpy": measure.p50(times) / base_s,
        }
        for name, times in samples.items()
    ]


if __name__ == "__main__":
    sys.exit(main())
