"""How long survivors wait until they hear that a rank was killed.

Ranks 0 to n-2 wait in an allreduce that the last rank does not join. That one writes
down the time and kills itself (SIGKILL). A sample is the time from there until the last
survivor has its PeerLostError, with the name of the dead rank, in Python.

    python benchmarks/faults.py                      # 4 ranks, 50 kills
    python benchmarks/faults.py --resident-gb 4      # the victim has memory to give back
    python benchmarks/faults.py --forked-child       # a child keeps all that it inherited
    python benchmarks/faults.py --transport tcp

The goal on one host: median at most 2 ms, 99th percentile at most 20 ms. On a machine
that does other things the scheduler is measured, too.
"""

from __future__ import annotations

import argparse
import os
import signal
import struct
import tempfile
import threading
import time
from collections.abc import Sequence
from typing import Any

import measure
import numpy as np

import ferro_dist as fd
from ferro_dist.testing import run_ranks

TIME = struct.Struct("q")
# The survivors sleep in their call by then; a kill that came earlier would find them awake.
HEAD_START_S = 0.02
CHILD_LIFE_S = 2.0


def main(arguments: Sequence[str] | None = None) -> None:
    options = _parse(arguments)
    measure.say(
        f"{options.kills} kills, {options.ranks} ranks, {options.transport}, "
        f"{options.resident_gb:g} GB resident, {'a' if options.forked_child else 'no'} child"
    )
    latencies_ms: list[float] = []
    with measure.RecordFile(options.output, _name(options)) as file:
        try:
            for _ in range(options.kills):
                latencies_ms += [_kill_once(options)]
        finally:
            if latencies_ms:
                file.write(_summarize(latencies_ms, options))


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    at_least = measure.at_least
    parser.add_argument("--kills", type=at_least(1), default=50)
    parser.add_argument("--ranks", type=at_least(2), default=4)
    parser.add_argument("--transport", choices=["host", "tcp"], default="host")
    parser.add_argument("--resident-gb", type=float, default=0.0, help="memory of the victim")
    parser.add_argument("--forked-child", action="store_true", help="the victim has one alive")
    parser.add_argument(
        "--output",
        type=measure.new_file,
        help="JSON lines; default: benchmarks/results/faults*.jsonl",
    )
    return parser.parse_args(arguments)


def _name(options: argparse.Namespace) -> str:
    parts = ["faults", options.transport]
    if options.resident_gb:
        parts.append(f"{options.resident_gb:g}gb")
    if options.forked_child:
        parts.append("child")
    return "-".join(parts)


def _summarize(latencies_ms: list[float], options: argparse.Namespace) -> dict[str, Any]:
    median, worst = measure.p50(latencies_ms), max(latencies_ms)
    p99 = measure.percentile(latencies_ms, 99)
    measure.say(f"median {median:.2f} ms, p99 {p99:.2f} ms, worst {worst:.2f} ms")
    return {
        "benchmark": "faults",
        "transport": options.transport,
        "ranks": options.ranks,
        "resident_gb": options.resident_gb,
        "forked_child": options.forked_child,
        "median_ms": round(median, 3),
        "p99_ms": round(p99, 3),
        "worst_ms": round(worst, 3),
        "latencies_ms": [round(latency, 3) for latency in latencies_ms],
    }


def _kill_once(options: argparse.Namespace) -> float:
    """Return the milliseconds from the kill until the last survivor knows."""
    victim = options.ranks - 1
    with tempfile.TemporaryDirectory() as folder:
        fifo = os.path.join(folder, "killed_at")
        os.mkfifo(fifo)
        reading = os.open(fifo, os.O_RDWR)
        try:
            told_ns: list[Any] = run_ranks(
                options.ranks,
                _play,
                fifo,
                options.resident_gb,
                options.forked_child,
                backend=options.transport,
                may_die=[victim],
            )
            (killed_ns,) = TIME.unpack(os.read(reading, TIME.size))
        finally:
            os.close(reading)
    return float(max(told_ns[:victim]) - killed_ns) / 1e6


def _play(backend: fd.Backend, fifo: str, resident_gb: float, has_child: bool) -> int:
    victim = backend.world_size - 1
    if backend.rank == victim:
        _prepare_to_die(fifo, resident_gb, has_child, backend)
    fd.barrier(backend)
    try:
        fd.allreduce(np.ones(1), backend)
    except fd.PeerLostError as error:
        told_ns = time.monotonic_ns()
        if error.peer == victim:
            return told_ns
        raise
    raise AssertionError("the victim lives")


def _prepare_to_die(fifo: str, resident_gb: float, has_child: bool, backend: fd.Backend) -> None:
    """Be killed soon after the barrier that the others are in."""
    resident = np.ones(int(resident_gb * 1e9), np.uint8)
    writing = os.open(fifo, os.O_WRONLY)
    if has_child and os.fork() == 0:
        time.sleep(CHILD_LIFE_S)
        os._exit(0)
    fd.barrier(backend)
    threading.Event().wait(HEAD_START_S)
    assert resident.size == 0 or resident[-1] == 1
    os.write(writing, TIME.pack(time.monotonic_ns()))
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    main()
