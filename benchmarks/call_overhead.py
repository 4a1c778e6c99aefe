"""What a call costs before anything moves: from Python to the engine and back.

A group of one has nothing to communicate, so `fd.allreduce(x, backend, out=x)` of one
element is arguments, checks, the border to C++ and back. Beside it: the same through
mpi4py on ``MPI.COMM_SELF``, torch.distributed on its fake backend, and the floor, a
Python function that takes the same arguments and does nothing.

    python benchmarks/call_overhead.py
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import os
import statistics
import warnings
from collections.abc import Callable
from typing import Any

# Before mpi4py reads it: locks between threads are not what is compared.
os.environ.setdefault("MPI4PY_RC_THREAD_LEVEL", "single")

import measure
import numpy as np

CALLS = 2_000


@dataclasses.dataclass
class Contestant:
    """One way to make the call."""

    name: str
    statement: str
    loop: measure.Loop
    times_ns: list[float] = dataclasses.field(default_factory=list)


class MissingError(Exception):
    """A contestant cannot take part; the message says why."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="fewer rounds")
    parser.add_argument("--output", help="file for the JSON lines")
    options = parser.parse_args()
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    with contextlib.ExitStack() as stack:
        contestants = enter_all(stack)
        run_rounds(contestants, 20 if options.quick else 200)
    print_table(contestants)
    run = measure.describe_run()
    path = measure.output_path(options.output, "call_overhead")
    measure.write_json_lines(path, ({**record(each), **run} for each in contestants))
    measure.say(f"\nwrote {path}")


def enter_all(stack: contextlib.ExitStack) -> list[Contestant]:
    makers = (floor, ferro_dist_numpy, ferro_dist_torch, mpi, torch_fake)
    return [each for make in makers for each in enter(make, stack)]


def enter(
    make: Callable[[contextlib.ExitStack], list[Contestant]], stack: contextlib.ExitStack
) -> list[Contestant]:
    try:
        return make(stack)
    except MissingError as reason:
        measure.say(f"missing: {reason}")
        return []


def run_rounds(contestants: list[Contestant], rounds: int) -> None:
    """Let all take turns, so that a busy machine is busy for all."""
    with measure.GarbageCollectorOff():
        for turn in range(rounds + 1):
            for contestant in contestants:
                elapsed = measure.time_ns(contestant.loop, CALLS)
                if turn:  # the first warms up
                    contestant.times_ns.append(elapsed / CALLS)


def print_table(contestants: list[Contestant]) -> None:
    measure.say(f"\n{'ns a call':<34} {'p50':>8} {'p95':>8}  statement")
    for each in contestants:
        p50 = statistics.median(each.times_ns)
        p95 = measure.percentile(each.times_ns, 95)
        measure.say(f"{each.name:<34} {p50:>8.0f} {p95:>8.0f}  {each.statement}")


def record(contestant: Contestant) -> dict[str, Any]:
    return {
        "benchmark": "call_overhead",
        "name": contestant.name,
        "statement": contestant.statement,
        "p50_ns": round(statistics.median(contestant.times_ns), 1),
        "p95_ns": round(measure.percentile(contestant.times_ns, 95), 1),
        "samples": len(contestant.times_ns),
        "calls_per_sample": CALLS,
    }


# Contestants


def floor(stack: contextlib.ExitStack) -> list[Contestant]:
    def nothing(x: Any, backend: Any, *, out: Any = None) -> Any:
        return x

    names = {"nothing": nothing, "x": np.zeros(1, np.float32), "backend": None}
    return [contestant("Python function that does nothing", "nothing(x, backend, out=x)", names)]


def ferro_dist_numpy(stack: contextlib.ExitStack) -> list[Contestant]:
    names = ferro_dist_names(stack)
    names["x"] = np.zeros(1, np.float32)
    return [
        contestant("ferro_dist, NumPy", "allreduce(x, backend, out=x)", names),
        contestant("ferro_dist, NumPy, new result", "allreduce(x, backend)", names),
        contestant(
            "ferro_dist, NumPy, through a Work",
            "allreduce(x, backend, out=x, async_op=True).wait()",
            names,
        ),
        contestant("ferro_dist, barrier", "barrier(backend)", names),
    ]


def ferro_dist_torch(stack: contextlib.ExitStack) -> list[Contestant]:
    torch = import_torch()
    names = ferro_dist_names(stack)
    names["x"] = torch.zeros(1)
    return [
        contestant("ferro_dist, torch", "allreduce(x, backend, out=x)", names),
        contestant("ferro_dist, torch, new result", "allreduce(x, backend)", names),
    ]


def ferro_dist_names(stack: contextlib.ExitStack) -> dict[str, Any]:
    try:
        import ferro_dist as fd
    except ImportError as error:
        raise MissingError(f"ferro_dist is not installed: {error}") from None
    backend = stack.enter_context(fd.HostBackend(0, 1, None))
    return {"allreduce": fd.allreduce, "barrier": fd.barrier, "backend": backend}


def mpi(stack: contextlib.ExitStack) -> list[Contestant]:
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        raise MissingError(f"mpi4py or its MPI library: {error}".splitlines()[0]) from None
    x = np.zeros(1, np.float32)
    names = {"Allreduce": MPI.COMM_SELF.Allreduce, "IN_PLACE": MPI.IN_PLACE, "x": x}
    names["spelled_out"] = [x, 1, MPI.FLOAT]
    library = MPI.Get_library_version().split()[0].strip(",")
    return [
        contestant(f"mpi4py on {library}", "Allreduce(IN_PLACE, x)", names),
        contestant(f"mpi4py on {library}, type given", "Allreduce(IN_PLACE, spelled_out)", names),
    ]


def torch_fake(stack: contextlib.ExitStack) -> list[Contestant]:
    torch = import_torch()
    try:
        import torch.distributed as dist
        from torch.testing._internal.distributed.fake_pg import FakeStore
    except ImportError as error:
        raise MissingError(f"torch.distributed's fake backend: {error}") from None
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    stack.callback(dist.destroy_process_group)
    names = {"all_reduce": dist.all_reduce, "x": torch.zeros(1)}
    return [contestant("torch.distributed, fake backend", "all_reduce(x)", names)]


def import_torch() -> Any:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            import torch
    except ImportError:
        raise MissingError("torch is not installed: pip install torch") from None
    torch.set_num_threads(1)
    return torch


def contestant(name: str, statement: str, names: dict[str, Any]) -> Contestant:
    return Contestant(name, statement, measure.compile_loop(statement, names))


if __name__ == "__main__":
    main()
