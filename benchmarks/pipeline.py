"""How much longer a pipeline's step takes than its schedule says, beside torch's pipelining.

    python benchmarks/pipeline.py
    python benchmarks/pipeline.py --quick --output pipeline.jsonl
    python benchmarks/pipeline.py --plot docs/pipeline-run.png

The ideal is the makespan of the schedule on paper, with messages that take no time. How long an
action takes is measured on the same ranks right after the steps: that of a sleep, or for real
compute that of a stage on a microbatch, while the other ranks do the same. Stages that sleep let
ranks outnumber cores. Both systems run the same modules with the same schedule, in turns, each in
processes of its own. A step is timed from a barrier on to its end on the slowest rank.

The goals: 1F1B with real compute at most 1.02 of ideal, with 8 sleeping stages 1.03, ZB-V 1.08,
4 MiB activations 1.08; 60 µs an action for the executor itself. torch's pipelining on Gloo
measured 1.04 to 1.07, 1.10, 1.23, and 1.2 to 1.7 when the goals were set.

--plot measures nothing: it draws a step of ferro_dist under ZB-H1, for the README.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import measure
from pipeline_probes import PROBES, run_probe
from pipeline_stages import ACTION_S
from pipeline_systems import Case, Sample, draw_ours, run_ours, run_torch

from ferro_dist.parallel.schedules import complete, simulate
from ferro_dist.testing import run_ranks

KIB = 1 << 10
FLOATS_PER_KIB = KIB // 4

CASES = [
    Case("compute", "1f1b", 2, 8, 256, 512, "compute"),
    Case("256 KiB", "1f1b", 8, 16, 1, 256 * FLOATS_PER_KIB, "sleep", ACTION_S),
    Case("zb_v", "zb_v", 4, 8, 1, 256 * FLOATS_PER_KIB, "sleep", ACTION_S),
    # The same work on each rank as under ZB-V, in one stage.
    Case("1f1b for zb_v", "1f1b", 4, 8, 1, 256 * FLOATS_PER_KIB, "sleep", 2 * ACTION_S),
    Case("4 MiB", "1f1b", 4, 8, 1, 4096 * FLOATS_PER_KIB, "sleep", ACTION_S),
    Case("empty", "1f1b", 2, 16, 1, 256, "empty"),
]
DRAWN = Case("drawn", "zb_h1", 4, 8, 1, FLOATS_PER_KIB, "sleep", 2 * ACTION_S)
GOALS = {"compute": 1.02, "256 KiB": 1.03, "zb_v": 1.08, "4 MiB": 1.08}


def main(arguments: Sequence[str] | None = None) -> None:
    options = _parse(arguments)
    if options.plot is not None:
        run_ranks(DRAWN.ranks, draw_ours, DRAWN, str(options.plot), timeout=240)
        measure.say(f"wrote {options.plot}")
        return
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # a host's name need not have an address
    chosen = [case for case in CASES if options.cases is None or case.name in options.cases]
    with measure.RecordFile(options.output, "pipeline") as file:
        for case in chosen:
            file.write(_measure(case, options))
        for name in PROBES if options.cases is None else ():
            file.write(_probe(name))


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    at_least, names = measure.at_least, [case.name for case in CASES]
    parser.add_argument("--rounds", type=at_least(1), help="turns of each system; default 3")
    parser.add_argument("--steps", type=at_least(1), help="steps in a turn; default 4")
    parser.add_argument(
        "--cases",
        type=measure.listed(measure.one_of(names)),
        help=f"any of {','.join(names)}; without it also probes of what is computed",
    )
    parser.add_argument("--quick", action="store_true", help="one turn of two steps")
    parser.add_argument("--plot", type=measure.new_file, help="only draw a step, into this file")
    parser.add_argument(
        "--output",
        type=measure.new_file,
        help="JSON lines; default: benchmarks/results/pipeline.jsonl",
    )
    options = parser.parse_args(arguments)
    options.rounds = options.rounds or (1 if options.quick else 3)
    options.steps = options.steps or (2 if options.quick else 4)
    return options


def _measure(case: Case, options: argparse.Namespace) -> dict[str, Any]:
    steps = options.steps * (10 if case.kind == "empty" else 1)
    samples: dict[str, list[Sample]] = {"ferro_dist": [], "torch": []}
    for turn in range(options.rounds):
        for system in measure.rotated(list(samples), turn):
            samples[system] += _run(system, case, steps)
    record = {"benchmark": "pipeline", **case._asdict(), "nbytes": 4 * case.rows * case.width}
    record["ideal_s"] = _ideal_s(case, [s for own in samples.values() for s in own])
    for system, own in samples.items():
        record[system] = _figures(case, own, record["ideal_s"])
    record["overhead_us_per_action"] = max(s.overhead_us for s in samples["ferro_dist"])
    record["peak_live"] = [s.peak_live for s in samples["ferro_dist"][: case.ranks]]
    _show(case, record)
    return record


def _run(system: str, case: Case, steps: int) -> list[Sample]:
    """Take one turn of a system; a sample of each rank."""
    if system == "ferro_dist":
        return run_ranks(case.ranks, run_ours, case, steps, timeout=240)
    with tempfile.TemporaryDirectory() as folder:
        meeting = str(Path(folder, "meeting"))
        return run_ranks(case.ranks, run_torch, case, steps, meeting, backend="none", timeout=240)


def _ideal_s(case: Case, samples: Sequence[Sample]) -> float:
    action_s = measure.p50([sample.action_s for sample in samples])
    if case.kind == "compute":
        return (case.num_microbatches + case.ranks - 1) * action_s
    lists = complete(case.schedule, case.ranks, case.num_microbatches)
    return simulate(lists, {"F": action_s, "I": action_s, "W": action_s}).makespan_s


def _figures(case: Case, samples: Sequence[Sample], ideal_s: float) -> dict[str, Any]:
    by_round = [samples[i : i + case.ranks] for i in range(0, len(samples), case.ranks)]
    steps = [
        step for ranks in by_round for step in measure.slowest_rank([r.steps_s for r in ranks])
    ]
    p50_s = measure.p50(steps)
    return {
        "p50_s": p50_s,
        "best_s": min(steps),
        "p95_s": measure.p95(steps),
        "ratio": p50_s / ideal_s if ideal_s else None,
        "best_ratio": min(steps) / ideal_s if ideal_s else None,
        "samples": len(steps),
    }


def _show(case: Case, record: dict[str, Any]) -> None:
    ours, theirs = record["ferro_dist"], record["torch"]
    if case.kind == "empty":
        actions = len(complete(case.schedule, case.ranks, case.num_microbatches)[0])
        measure.say(
            f"{case.name:<14} {1e6 * ours['p50_s'] / actions:.0f} µs an action, of which the "
            f"executor {record['overhead_us_per_action']:.0f}; torch "
            f"{1e6 * theirs['p50_s'] / actions:.0f} µs"
        )
        return
    goal = f"goal {GOALS[case.name]}" if case.name in GOALS else ""
    measure.say(
        f"{case.name:<14} ideal {1e3 * record['ideal_s']:.1f} ms; times ideal: ferro_dist "
        f"{ours['ratio']:.3f} (best {ours['best_ratio']:.3f}), torch {theirs['ratio']:.3f} "
        f"(best {theirs['best_ratio']:.3f}) {goal}; live {record['peak_live']}"
    )


def _probe(name: str) -> dict[str, Any]:
    outcomes = {system: run_probe(name, system) for system in ("ferro_dist", "torch")}
    measure.say(f"probe {name:<28} " + ", ".join(f"{s}: {o}" for s, o in outcomes.items()))
    return {"benchmark": "pipeline", "name": f"probe: {name}", **outcomes}


if __name__ == "__main__":
    main()
