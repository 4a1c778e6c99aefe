"""How much of a network's line rate an allreduce over TCP reaches.

    python benchmarks/line_rate.py
    python benchmarks/line_rate.py --gbit 10 --size 64M --output line_rate.jsonl

Two network namespaces are joined by a virtual cable, both ends of which are shaped to the
rate with `tc`: root is needed, iproute2, and a kernel with veth and tbf. Beside the allreduce
two bare sockets carry as many bytes both ways at once: that is what the line gives.

The congestion control is cubic, as on most systems, whatever this one uses: BBR leaves a few
percent of such a line unused while it probes for more.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import secrets
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import measure

HOSTS = [f"ferrobench{os.getpid()}{end}" for end in "ab"]
ADDRESSES = ["10.9.1.1", "10.9.1.2"]
PORT = 29555  # the namespaces are our own: nobody else can be there
# With Ethernet's usual 1500 the headers alone would take more than 4 % of the line.
MTU = 9000
WARM_UP = 3
TIMEOUT_S = 300.0


def main() -> int:
    options = parse_arguments()
    if options.rank is not None:
        print(json.dumps(be_rank(options.rank, options.size, options.iterations)))
        return 0
    measure.exit_on_sigterm()
    try:
        with shaped_line(options.gbit, options.congestion):
            reports = run_both_ranks(options.size, options.iterations)
    except measure.MissingError as reason:
        measure.warn(f"nothing was measured: no shaped line between two namespaces: {reason}")
        return 1
    with measure.RecordFile(options.output, "line-rate") as file:
        file.write(*records(reports, options))
    return 0


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gbit", type=float, default=10.0, help="rate of the line each way")
    parser.add_argument("--congestion", default="cubic", help="congestion control on the line")
    parser.add_argument("--size", type=measure.parse_size, default=64 << 20)
    parser.add_argument("--iterations", type=measure.at_least(1), default=20)
    parser.add_argument("--output", type=measure.new_file, help="file for the JSON lines")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    return parser.parse_args()


# The line


@contextlib.contextmanager
def shaped_line(gbit: float, congestion: str) -> Iterator[None]:
    """Join two namespaces; `MissingError` tells what the system says if it cannot be."""
    if shutil.which("ip") is None or shutil.which("tc") is None:
        raise measure.MissingError("the programs ip and tc (iproute2) are not installed")
    try:
        try:
            make_line(gbit, congestion)
        except (OSError, subprocess.SubprocessError) as error:
            detail = getattr(error, "stderr", "") or str(error)
            raise measure.MissingError(detail.strip()) from None
        yield
    finally:
        for host in HOSTS:
            subprocess.run(["ip", "netns", "del", host], capture_output=True, check=False)


def make_line(gbit: float, congestion: str) -> None:
    for host in HOSTS:
        run("ip", "netns", "add", host)
    run(*f"ip link add v0 netns {HOSTS[0]} type veth peer name v0 netns {HOSTS[1]}".split())
    for host, address in zip(HOSTS, ADDRESSES, strict=True):
        run(*f"ip -n {host} addr add {address}/24 dev v0".split())
        run(*f"ip -n {host} link set v0 mtu {MTU} up".split())
        run(*f"ip -n {host} link set lo up".split())
        # By the route, since namespaces do not always have a setting of their own.
        route = f"10.9.1.0/24 dev v0 src {address} congctl {congestion}"
        run(*f"ip -n {host} route replace {route}".split())
        # A bucket of 1 ms of the line: the timer that refills it is not finer.
        shape = f"rate {gbit}gbit burst {int(gbit * 1e6 / 8)} latency 20ms"
        run(*f"tc -n {host} qdisc add dev v0 root tbf {shape}".split())


def run(*command: str) -> None:
    subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)


# The ranks


def run_both_ranks(nbytes: int, iterations: int) -> list[dict[str, list[float]]]:
    """Return the seconds of each iteration, by what was measured, for each rank."""
    environment = {**os.environ, "FERRO_DIST_TOKEN": secrets.token_hex(16)}
    options = ["--size", str(nbytes), "--iterations", str(iterations)]
    ranks = [
        subprocess.Popen(
            ["ip", "netns", "exec", host, sys.executable, __file__, "--rank", str(rank), *options],
            env=environment,
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank, host in enumerate(HOSTS)
    ]
    try:
        said = [rank.communicate(timeout=TIMEOUT_S)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    for rank in ranks:
        if rank.returncode != 0:  # it has said why
            raise subprocess.CalledProcessError(rank.returncode, rank.args)
    return [json.loads(text) for text in said]


def be_rank(rank: int, nbytes: int, iterations: int) -> dict[str, list[float]]:
    import numpy as np

    import ferro_dist as fd

    x = np.ones(max(1, nbytes // 4), np.float32)
    out = np.empty_like(x)
    scratch = memoryview(bytearray(1 << 20))
    times: dict[str, list[float]] = {"allreduce": [], "bare sockets": []}
    with fd.TcpBackend(rank, 2, f"{ADDRESSES[0]}:{PORT}", timeout=TIMEOUT_S) as backend:
        bare = connect(rank, lambda: fd.barrier(backend))
        calls: dict[str, Callable[[], Any]] = {
            "allreduce": lambda: fd.allreduce(x, backend, out=out),
            "bare sockets": lambda: exchange(bare, memoryview(x.data).cast("B"), scratch),
        }
        for iteration in range(WARM_UP + iterations):
            for name, call in calls.items():
                fd.barrier(backend)
                started = time.perf_counter()
                call()
                if iteration >= WARM_UP:
                    times[name].append(time.perf_counter() - started)
        fd.barrier(backend)
        bare.close()
    if (out != 2).any():
        raise AssertionError("the sum of two ones is two")
    return times


def connect(rank: int, barrier: Callable[[], Any]) -> socket.socket:
    if rank == 0:
        with socket.create_server((ADDRESSES[0], PORT + 1)) as server:
            barrier()
            return server.accept()[0]
    barrier()
    return socket.create_connection((ADDRESSES[0], PORT + 1), timeout=TIMEOUT_S)


def exchange(bare: socket.socket, data: memoryview, scratch: memoryview) -> None:
    """Send and receive as many bytes at once."""
    sender = threading.Thread(target=bare.sendall, args=(data,))
    sender.start()
    left = len(data)
    while left > 0:
        received = bare.recv_into(scratch[: min(left, len(scratch))])
        if received == 0:
            raise ConnectionError("the other rank has left")
        left -= received
    sender.join()


# The record


def records(
    reports: list[dict[str, list[float]]], options: argparse.Namespace
) -> Iterator[dict[str, Any]]:
    for name in reports[0]:
        seconds = measure.slowest_rank([report[name] for report in reports])
        p50, p95 = measure.p50(seconds), measure.p95(seconds)
        # Of two ranks each sends every byte of the array once.
        gbit = 8 * measure.busbw_gb_s("allreduce", 2, options.size, p50)
        share = gbit / options.gbit
        measure.say(
            f"{name:<13} {measure.format_size(options.size):>8}  p50 {p50 * 1e3:7.2f} ms  "
            f"p95 {p95 * 1e3:7.2f} ms  {gbit:5.2f} of {options.gbit:g} Gb/s = {share:.1%}"
        )
        yield {
            "benchmark": "line_rate",
            "system": name,
            "nbytes": options.size,
            "line_gbit_s": options.gbit,
            "mtu": MTU,
            "congestion_control": options.congestion,
            "p50_us": round(p50 * 1e6, 1),
            "p95_us": round(p95 * 1e6, 1),
            "algbw_gb_s": round(measure.algbw_gb_s(options.size, p50), 4),
            "busbw_gb_s": round(gbit / 8, 4),
            "share_of_line_rate": round(share, 4),
            "samples": len(seconds),
        }


if __name__ == "__main__":
    sys.exit(main())
