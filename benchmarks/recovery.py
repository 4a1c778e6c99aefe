"""How long a group takes to go on after one of its ranks was killed.

Each round starts ranks, kills one inside an allreduce, and takes three times on every
survivor: until it was told (`PeerLostError`), until `shrink` had made the new group, and
until the next allreduce had its result. All of them count from the kill; a round is as
slow as its slowest survivor.

    python benchmarks/recovery.py
    python benchmarks/recovery.py --quick --output recovery.jsonl

Absolute times depend on how busy the machine is: with less than a core for each rank, the
survivors wait for each other to run.
"""

from __future__ import annotations

import argparse
import os
import signal
import time
from typing import Any

import measure
import numpy as np

import ferro_dist as fd
from ferro_dist.testing import run_ranks

TRANSPORTS = ("host", "tcp")
STAGES = ("told", "shrunk", "reduced")
COUNT = 1000
VICTIM = 1
WARM_UP = 20
SHRINK_S = 20.0


def main() -> None:
    options = parse_arguments()
    measure.say(f"{'':12}{'':8}{'p50 ms':>26}{'p95 ms':>26}")
    measure.say(f"{'transport':12}{'ranks':8}" + "".join(f"{s:>9}" for s in STAGES * 2))
    with measure.RecordFile(options.output, "recovery") as file:
        for transport in TRANSPORTS:
            for world_size in options.ranks:
                record = measure_case(transport, world_size, options.rounds)
                show(record)
                file.write(record)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    at_least = measure.at_least
    parser.add_argument(
        "--ranks", type=measure.listed(at_least(2)), default="2,3,4", help="before the kill"
    )
    parser.add_argument("--rounds", type=at_least(1), help="kills of each case; default 30")
    parser.add_argument("--quick", action="store_true", help="5 rounds")
    parser.add_argument("--output", type=measure.new_file, help="file for the JSON lines")
    options = parser.parse_args()
    options.rounds = options.rounds or (5 if options.quick else 30)
    return options


def measure_case(transport: str, world_size: int, rounds: int) -> dict[str, Any]:
    times_ms: dict[str, list[float]] = {stage: [] for stage in STAGES}
    for _ in range(rounds):
        for stage, time_ms in one_kill(transport, world_size).items():
            times_ms[stage].append(time_ms)
    return {
        "benchmark": "recovery",
        "transport": transport,
        "world_size": world_size,
        "rounds": rounds,
        "num_cores": len(os.sched_getaffinity(0)),
        **{
            f"{stage}_{figure.__name__}_ms": round(figure(values), 3)
            for stage, values in times_ms.items()
            for figure in (measure.p50, measure.p95)
        },
    }


def one_kill(transport: str, world_size: int) -> dict[str, float]:
    """Return the slowest survivor's times."""
    outcomes = run_ranks(world_size, recover, backend=transport, may_die=(VICTIM,))
    killed_s = outcomes[0][0]
    survivors = [moments for _, moments in (outcomes[r] for r in range(world_size) if r != VICTIM)]
    return {
        stage: 1e3 * (max(moments) - killed_s)
        for stage, moments in zip(STAGES, zip(*survivors, strict=True), strict=True)
    }


def recover(backend: fd.Backend) -> tuple[float, list[float]]:
    """Return when the victim was killed, as it had announced, and the moments of this rank."""
    x = np.ones(COUNT, np.float32)
    for _ in range(WARM_UP):
        fd.allreduce(x, backend)
    # CLOCK_MONOTONIC: one clock for all processes of a machine.
    announced = fd.broadcast(np.array([time.monotonic() + 0.02]), backend, root=VICTIM)
    try:
        while True:
            fd.allreduce(x, backend)
            if backend.rank == VICTIM and time.monotonic() >= announced[0]:
                os.kill(os.getpid(), signal.SIGKILL)
    except fd.PeerLostError:
        moments = [time.monotonic()]
    with backend.shrink(SHRINK_S) as group:
        moments.append(time.monotonic())
        total = fd.allreduce(x, group)
        moments.append(time.monotonic())
        if total[0] != group.world_size:
            raise RuntimeError(f"the sum of {group.world_size} ones is {total[0]}")
    return float(announced[0]), moments


def show(record: dict[str, Any]) -> None:
    columns = [record[f"{stage}_p{percent}_ms"] for percent in (50, 95) for stage in STAGES]
    measure.say(
        f"{record['transport']:12}{record['world_size']:<8}"
        + "".join(f"{value:9.2f}" for value in columns)
    )


if __name__ == "__main__":
    main()
