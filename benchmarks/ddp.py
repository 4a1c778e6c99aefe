"""What data parallelism adds to a step: ferro_dist.DDP beside torch's, on Gloo, in one run.

    python benchmarks/ddp.py --quick
    python benchmarks/ddp.py --ranks 2,4
    python benchmarks/ddp.py --models mlp --plot
    python benchmarks/ddp.py --ranks 1 --models 300x4KiB   # DDP's own time, nothing is sent
    python benchmarks/ddp.py --transport gpu               # beside torch's on NCCL
    python benchmarks/ddp.py --draw docs/ddp-step.png

Each rank alternates between two kinds of steps of its own model: without communication,
and data-parallel. What is added is the difference of their medians, each step counted as
the slowest rank's. A rank has one thread. The systems take turns, torch's DDP in several
configurations, of which the best counts for each model. If there are fewer GPUs than ranks,
ranks share them.

--plot also draws one step of ferro_dist, as lanes of computation and communication with the
time shaded in which backward waits, and writes the same as a Chrome trace. --draw measures
nothing: it draws a step of layers that sleep, for the README, the quickest of 20.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ddp_timeline
import measure
from group import CaseRefused, Group, SystemFailed, scratch_directory, start_all
from peers import System, ferrorun

WORKER = str(Path(__file__).parent / "ddp_worker.py")
MODELS = ("mlp", "gpt", "300x4KiB")
TRANSPORTS = ("host", "tcp", "gpu")
TOLERANCE = 1e-4  # of float32 gradients, summed in another order

_VIEWS = {"gradient_as_bucket_view": True, "static_graph": True}
TORCH_CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "default": {},
    "static_views": _VIEWS,
    "one_bucket": {**_VIEWS, "bucket_cap_mb": 1000},
    "unbound": _VIEWS,
}


def main() -> int:
    measure.exit_on_sigterm()
    options = parse_arguments()
    if options.draw is not None:
        draw_asleep(options.draw)
        return 0
    results: list[Result] = []
    with measure.RecordFile(options.output, f"ddp-{options.transport}") as file:
        for ranks in options.ranks:
            results += compare(ranks, options, file)
    if options.plot:
        for result in results:
            draw(result, file.path)
    return 0 if results else 1


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add, listed, at_least = parser.add_argument, measure.listed, measure.at_least
    add("--quick", action="store_true", help="few rounds, and torch in two configurations")
    add("--ranks", type=listed(at_least(1)), default="2", help="for example 2,4")
    add(
        "--models",
        type=listed(measure.one_of(MODELS)),
        default=",".join(MODELS),
        help=f"any of {','.join(MODELS)}",
    )
    add("--transport", default="host", choices=TRANSPORTS, help="of ferro_dist")
    add("--rounds", type=at_least(1), help="how often each system gets its turn")
    add("--steps", type=at_least(1), help="steps of each kind in a turn")
    add("--plot", action="store_true", help="draw a step of ferro_dist, and write its trace")
    add("--draw", type=measure.new_file, help="only draw a step of sleeping layers, into this file")
    add("--output", type=measure.new_file, help="file for the JSON lines; pictures stand beside it")
    options = parser.parse_args()
    options.rounds = options.rounds or (3 if options.quick else 10)
    options.steps = options.steps or (5 if options.quick else 20)
    return options


@dataclass
class Result:
    """One system on one model: the seconds of each step on the slowest rank.

    A parameter is one of the model's arrays here, whatever its size.
    """

    system: System
    model: str
    ranks: int
    num_parameters: int
    alone_s: list[float] = field(default_factory=list)
    parallel_s: list[float] = field(default_factory=list)
    steps: list[ddp_timeline.Step] = field(default_factory=list)

    @property
    def added_ms(self) -> float:
        """The median step, less the median step without communication."""
        return (measure.p50(self.parallel_s) - measure.p50(self.alone_s)) * 1e3

    @property
    def added_us_per_parameter(self) -> float:
        return self.added_ms * 1e3 / self.num_parameters

    def to_json(self) -> dict[str, Any]:
        return {
            "benchmark": "ddp",
            "system": self.system.name,
            "model": self.model,
            "ranks": self.ranks,
            "steps": len(self.alone_s),
            "added_ms": round(self.added_ms, 3),
            "added_us_per_parameter": round(self.added_us_per_parameter, 3),
            **{
                f"{kind}_{figure.__name__}_ms": round(figure(times) * 1e3, 3)
                for kind, times in (("alone", self.alone_s), ("parallel", self.parallel_s))
                for figure in (measure.p50, measure.p95)
            },
        }


def systems(ranks: int, options: argparse.Namespace) -> Iterator[System]:
    command = ferrorun(ranks, WORKER)
    threads = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    if options.transport == "gpu":  # CUDA and NCCL have threads of their own
        threads["BENCHMARK_UNBOUND"] = "1"
    ours = {**threads, "BENCHMARK_SETTINGS": "{}"}
    yield System("ferro_dist", options.transport, "FerroDdp", command, ours)
    for name, settings in TORCH_CONFIGURATIONS.items():
        if options.quick and name not in ("static_views", "one_bucket"):
            continue
        if name == "unbound" and options.transport == "gpu":  # as all are
            continue
        environment = {**threads, "BENCHMARK_SETTINGS": json.dumps(settings)}
        if name == "unbound":
            environment["BENCHMARK_UNBOUND"] = "1"
        yield System("torch", name, "TorchDdp", command, environment)


def compare(ranks: int, options: argparse.Namespace, file: measure.RecordFile) -> list[Result]:
    with scratch_directory() as directory, contextlib.ExitStack() as stack:
        chosen = systems(ranks, options)
        groups = start_all(chosen, ranks, options.transport, directory, stack)
        results: list[Result] = []
        for model in options.models:
            found = measure_model(model, ranks, groups, options)
            show(found)
            file.write(*(result.to_json() for result in found))
            results += found
        for group in groups:
            group.dismiss()
        return results


def measure_model(
    model: str, ranks: int, groups: list[Group], options: argparse.Namespace
) -> list[Result]:
    results = {}
    for group in (group for group in groups if group.is_alive):
        with excused(group, model):
            results[group.system.name] = prepare(group, model, ranks)
    contestants = [group for group in groups if group.system.name in results]
    for turn in range(options.rounds):
        for group in measure.rotated([each for each in contestants if each.is_alive], turn):
            with excused(group, model):
                sample(group, results[group.system.name], options.steps)
    if options.plot:
        for group in contestants:
            if group.system.is_ours and group.is_alive:
                with excused(group, model):
                    results[group.system.name].steps = group.order(do="trace")
    return [result for result in results.values() if result.alone_s]


@contextlib.contextmanager
def excused(group: Group, model: str) -> Iterator[None]:
    """Let the others go on where one system does not."""
    try:
        yield
    except (CaseRefused, SystemFailed) as error:
        measure.say(f"without {group.system.name} on {model}: {error}")


def prepare(group: Group, model: str, ranks: int) -> Result:
    """Have all ranks make the model, and check the gradients of its first step."""
    answers = group.order(do="prepare", model=model)
    if not are_averaged(answers):
        raise CaseRefused("its gradients are not the average of the ranks'")
    return Result(group.system, model, ranks, answers[0]["num_parameters"])


def are_averaged(answers: list[dict[str, float]]) -> bool:
    # A slope is linear in the gradients: that along their average is the average of slopes.
    expected = statistics.mean(each["slope_alone"] for each in answers)
    return all(
        abs(each["slope_parallel"] - expected) <= TOLERANCE * each["terms"] for each in answers
    )


def sample(group: Group, result: Result, steps: int) -> None:
    by_rank = group.order(do="sample", times=steps)
    result.alone_s += measure.slowest_rank([alone for alone, _ in by_rank])
    result.parallel_s += measure.slowest_rank([parallel for _, parallel in by_rank])


def show(results: list[Result]) -> None:
    if not results:
        return
    peers = [result.added_ms for result in results if not result.system.is_ours]
    measure.say(f"\n{results[0].model}, {results[0].ranks} ranks, ms")
    heads = f"{'alone':>9}{'parallel':>10}{'added':>8}{'us a parameter':>16}{'of best peer':>14}"
    measure.say(f"{'':24}{heads}")
    for result in results:
        alone, parallel = (
            1e3 * measure.p50(times) for times in (result.alone_s, result.parallel_s)
        )
        line = f"{result.system.name:24}{alone:9.2f}{parallel:10.2f}{result.added_ms:8.2f}"
        line += f"{result.added_us_per_parameter:16.2f}"
        if peers and min(peers) > 0:
            line += f"{result.added_ms / min(peers):14.2f}"
        measure.say(line)


def draw(result: Result, path: Path) -> None:
    if not result.steps:
        return
    name = f"{path.stem}-{result.model}-{result.ranks}-ranks"
    title = f"One step of {result.model} on {result.ranks} ranks"
    trace = ddp_timeline.write_trace(result.steps, path.with_name(f"{name}.trace.json"))
    picture = ddp_timeline.plot(result.steps, path.with_name(f"{name}.png"), title)
    measure.say(f"wrote {trace}")
    measure.say(f"wrote {picture}" if picture else "no picture: matplotlib is not installed")


def draw_asleep(path: Path) -> None:
    """Draw a step that overlaps on any number of cores, since its layers need none."""
    settings = json.dumps({"bucket_mb": 8, "overlap": "always"})
    environment = {"OMP_NUM_THREADS": "1", "BENCHMARK_SETTINGS": settings}
    system = System("ferro_dist", "host", "FerroDdp", ferrorun(2, WORKER), environment)
    with scratch_directory() as directory, contextlib.ExitStack() as stack:
        (group,) = start_all([system], 2, "host", directory, stack)
        prepare(group, "asleep", 2)
        steps = min((group.order(do="trace") for _ in range(20)), key=ddp_timeline.duration_s)
        group.dismiss()
    if ddp_timeline.plot(steps, path) is None:
        raise SystemExit("no picture: matplotlib is not installed")
    measure.say(f"wrote {path}")


if __name__ == "__main__":
    sys.exit(main())
