"""An allreduce on GPUs beside NCCL's own C API, torch.distributed and nccl4py, over sizes.

    python benchmarks/gpu_collectives.py              # one rank for each GPU
    python benchmarks/gpu_collectives.py --ranks 2    # ranks that share one, if there are fewer
    python benchmarks/gpu_collectives.py --emulate    # no GPU: tries the program, times nothing

A sample is the time from the first call of a batch until the GPU has done the last one, divided
by their number, on the slowest rank. All contestants take turns in one process, each with a
communicator of its own on the same libnccl. "C API" is a loop in C around ``ncclAllReduce`` on
one stream: what the library and the hardware need. All work in place. A single rank copies instead,
since in place NCCL has nothing to do for it; torch.distributed can only work in place.

The goals: at most 1.02 of the C API from 1 MiB on, and at most 1 µs more below.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import functools
import itertools
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import measure
import numpy as np

import ferro_dist as fd
from ferro_dist._native.cuda_libraries import load_nccl
from ferro_dist.testing import emulated_gpu, run_ranks, share_gpu

SIZES = "4,1K,16K,256K,1M,4M,16M,64M,256M"
QUICK_SIZES = "4,16K,1M,64M"
ROUNDS = 21
MIN_ROUNDS = 3
SIZE_S = 45.0  # for all rounds of a size: ranks that share a GPU may take seconds for each
BATCH_BYTES = 1 << 30  # moved in one batch, within the bounds that follow
MIN_BATCH, MAX_BATCH = 5, 200
MAX_SHARED_BATCH = 40  # ranks that share a GPU take turns on it, some milliseconds each
TIMEOUT_S = 540.0

FLOAT32, SUM = 7, 0  # ncclDataType_t, ncclRedOp_t

LOOP = f"""
#include <stddef.h>
typedef int AllReduce(const void*, void*, size_t, int, int, void*, void*);
int loop(AllReduce* allreduce, const void* in, void* out, size_t count, void* comm, void* stream,
         int times) {{
  int status = 0;
  for (int i = 0; i < times && status == 0; ++i)
    status = allreduce(in, out, count, {FLOAT32}, {SUM}, comm, stream);
  return status;
}}
"""


class Calls(NamedTuple):
    """The calls of a contestant on an input and an output, which may be the same."""

    make: Callable[[int], Any]
    """Makes so many in a row, without waiting for the GPU."""
    result: Callable[[], Any]
    """Returns the array that holds the result of the last, wherever it is."""


Contestant = Callable[[Any, Any], Calls]
"""Prepares the calls on an input and an output."""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    read_sizes = measure.listed(measure.parse_size)
    parser.add_argument("--ranks", type=measure.at_least(1), help="default: the number of GPUs")
    parser.add_argument("--sizes", type=read_sizes, help=f"bytes; default {SIZES}")
    parser.add_argument("--quick", action="store_true", help="fewer sizes and rounds")
    parser.add_argument("--emulate", action="store_true", help="on emulated GPUs")
    parser.add_argument("--output", type=measure.new_file, help="file for the JSON lines")
    options = parser.parse_args()
    num_gpus = 1 if options.emulate else run_ranks(1, count_gpus, backend="none")[0]
    if num_gpus == 0:
        sys.exit("no GPU here: python -m ferro_dist says why; --emulate tries the program")
    ranks = options.ranks or num_gpus
    sizes = options.sizes or read_sizes(QUICK_SIZES if options.quick else SIZES)
    rounds = MIN_ROUNDS if options.quick else ROUNDS
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        build_loop(Path(folder))
        file = measure.RecordFile(options.output, "gpu-collectives")
        if not options.emulate:
            stack.enter_context(file)
        try:
            plan = (folder, sizes, rounds, num_gpus, options.emulate)
            run_ranks(ranks, measure_all, *plan, timeout=TIMEOUT_S)
        finally:
            records = read_records(folder)
            if records:
                show(records)
            if not options.emulate:
                file.write(*records)
    if options.emulate:
        measure.say("\nemulated: these are no GPU's times; nothing is written")


def build_loop(folder: Path) -> None:
    (folder / "loop.c").write_text(LOOP)
    command = ["cc", "-O2", "-shared", "-fPIC", "-o", str(folder / "loop.so")]
    subprocess.run([*command, str(folder / "loop.c")], check=True)


def count_gpus(rank: int, world_size: int, addr: str) -> int:
    if not fd.is_nccl_available():
        return 0
    from ferro_dist._native.cuda_runtime import device_count

    return device_count()


# What is measured, on every rank


def measure_all(
    host: Any, folder: str, sizes: list[int], rounds: int, num_gpus: int, is_emulated: bool
) -> None:
    """Let all contestants take turns; the first rank writes down each size once it is measured."""
    gpu: Any = EmulatedArrays() if is_emulated else TorchArrays(host.rank % num_gpus)
    is_shared = host.world_size > num_gpus
    if is_shared:
        share_gpu(host.rank)
    most = MAX_SHARED_BATCH if is_shared else MAX_BATCH
    nccl = ".".join(map(str, load_nccl().get_version()))
    about = {"ranks": host.world_size, "gpus": num_gpus, "device": gpu.description, "nccl": nccl}
    with contextlib.ExitStack() as stack:
        makers = (ferro_dist, c_api, torch_distributed, nccl4py)
        made, missing = measure.make_all(makers, host, gpu, Path(folder), stack)
        for reason in missing if host.rank == 0 else ():
            measure.say(f"missing: {reason}")
        contestants = {name: prepare for some in made for name, prepare in some.items()}
        for nbytes in sizes:
            x = gpu.zeros(max(1, nbytes // 4))
            batch = min(most, max(MIN_BATCH, BATCH_BYTES // max(4, nbytes)))
            out = x if host.world_size > 1 else gpu.zeros(max(1, nbytes // 4))
            calls = {name: prepare(x, out) for name, prepare in contestants.items()}
            for name, each in calls.items():
                check_result(host, gpu, name, each, x, out)
            with measure.GarbageCollectorOff():
                times = take_turns(host, gpu, calls, batch, rounds)
            slowest = fd.allreduce(np.array(list(times.values())), host, "max")
            if host.rank == 0:
                by_name = zip(times, slowest.tolist(), strict=True)
                write_down(folder, [record(*each, nbytes, about) for each in by_name])


def check_result(host: Any, gpu: Any, name: str, calls: Calls, x: Any, out: Any) -> None:
    """Let a contestant make one call, and look at its result; leave zeros."""
    out[:] = 0
    x[:] = host.rank + 1
    calls.make(1)
    expected = host.world_size * (host.world_size + 1) / 2
    is_right = bool((gpu.to_numpy(calls.result()) == expected).all())
    x[:] = 0
    gpu.synchronize()
    if not is_right:
        raise AssertionError(f"{name} on {x.shape[0]} elements gave a wrong result")


def take_turns(
    host: Any, gpu: Any, calls: dict[str, Calls], batch: int, rounds: int
) -> dict[str, list[float]]:
    """Seconds a call by contestant, of as many rounds as there is time for."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    began = time.perf_counter()
    for turn in range(rounds + 1):
        for name, each in measure.rotated(list(calls.items()), turn):
            fd.barrier(host)
            started = time.perf_counter()
            each.make(batch)
            gpu.synchronize()
            elapsed = time.perf_counter() - started
            if turn:  # the first warms up
                times[name].append(elapsed / batch)
        longest = fd.allreduce(np.array([time.perf_counter() - began]), host, "max")
        if turn >= MIN_ROUNDS and longest[0] > SIZE_S:  # alike on all ranks
            break
    return times


class TorchArrays:
    def __init__(self, device: int) -> None:
        import torch

        torch.cuda.set_device(device)
        self.torch: Any = torch
        self.description = torch.cuda.get_device_name(device)
        self.synchronize = torch.cuda.synchronize

    def zeros(self, count: int) -> Any:
        return self.torch.zeros(count, device="cuda")

    def to_numpy(self, x: Any) -> Any:
        return x.cpu().numpy()

    def address(self, x: Any) -> int:
        address: int = x.data_ptr()
        return address

    def stream(self) -> int:
        stream: int = self.torch.cuda.current_stream().cuda_stream
        return stream


class EmulatedArrays:
    description = "emulated"

    def __init__(self) -> None:
        self.gpu = emulated_gpu()

    def zeros(self, count: int) -> Any:
        return self.gpu.array(np.zeros(count, np.float32))

    def to_numpy(self, x: Any) -> Any:
        return x.numpy()

    def address(self, x: Any) -> int:
        address: int = x.__cuda_array_interface__["data"][0]
        return address

    def stream(self) -> int:
        return self.gpu.current_stream

    def synchronize(self) -> None:
        self.gpu.synchronize()


# Contestants


def new_unique_id(host: Any) -> bytes:
    own = bytes(fd.get_unique_id()) if host.rank == 0 else bytes(128)
    return bytes(fd.broadcast(np.frombuffer(own, np.uint8), host))


def ferro_dist(
    host: Any, gpu: Any, folder: Path, stack: contextlib.ExitStack
) -> dict[str, Contestant]:
    backend = fd.NcclBackend(host.rank, host.world_size, new_unique_id(host))
    stack.enter_context(backend)
    names = {"allreduce": fd.allreduce, "backend": backend}
    # NCCL starts a thread for each call of the others; no timeout holds in the calls of this one.
    blocking = fd.NcclBackend(
        host.rank, host.world_size, new_unique_id(host), config={"blocking": True}
    )
    stack.enter_context(blocking)
    into_out = functools.partial(loop_over, "allreduce(x, backend, out=out)", "out")
    new = "allreduce(x, backend)"
    return {
        "ferro_dist": functools.partial(into_out, names),
        "ferro_dist, new result": functools.partial(loop_over, new, new, names),
        "ferro_dist, blocking": functools.partial(into_out, {**names, "backend": blocking}),
    }


def loop_over(statement: str, result: str, names: dict[str, Any], x: Any, out: Any) -> Calls:
    """Prepare calls of a statement; `result` names what it writes, or is itself a call."""
    names = {**names, "x": x, "out": out}
    loop = measure.compile_loop(statement, names)
    return Calls(
        lambda times: loop(itertools.repeat(None, times)), lambda: eval(result, dict(names))
    )


class UniqueId(ctypes.Structure):
    _fields_ = (("internal", ctypes.c_char * 128),)


def c_api(host: Any, gpu: Any, folder: Path, stack: contextlib.ExitStack) -> dict[str, Contestant]:
    nccl = ctypes.CDLL("libnccl.so.2")  # by its soname: the one that is loaded already
    unique_id = UniqueId.from_buffer_copy(new_unique_id(host))
    communicator = ctypes.c_void_p()
    check(nccl.ncclCommInitRank(ctypes.byref(communicator), host.world_size, unique_id, host.rank))
    stack.callback(nccl.ncclCommDestroy, communicator)
    library = ctypes.CDLL(str(folder / "loop.so"))
    pointer = ctypes.c_void_p
    library.loop.argtypes = [*(pointer,) * 3, ctypes.c_size_t, *(pointer,) * 2, ctypes.c_int]
    allreduce = ctypes.cast(nccl.ncclAllReduce, pointer)

    def prepare(x: Any, out: Any) -> Calls:
        count, stream = int(np.prod(x.shape)), gpu.stream()
        addresses = gpu.address(x), gpu.address(out)

        def make(times: int) -> None:
            check(library.loop(allreduce, *addresses, count, communicator, stream, times))

        return Calls(make, lambda: out)

    return {"C API": prepare}


def check(status: int) -> None:
    if status != 0:
        raise RuntimeError(f"NCCL returned {status}")


def torch_distributed(
    host: Any, gpu: Any, folder: Path, stack: contextlib.ExitStack
) -> dict[str, Contestant]:
    if not isinstance(gpu, TorchArrays):
        raise measure.MissingError("torch.distributed: needs a GPU")
    import torch.distributed as dist

    where = f"file://{folder}/meeting"
    dist.init_process_group("nccl", init_method=where, rank=host.rank, world_size=host.world_size)
    stack.callback(dist.destroy_process_group)
    names = {"all_reduce": dist.all_reduce}
    return {"torch.distributed": functools.partial(loop_over, "all_reduce(x)", "x", names)}


def nccl4py(
    host: Any, gpu: Any, folder: Path, stack: contextlib.ExitStack
) -> dict[str, Contestant]:
    if not isinstance(gpu, TorchArrays):
        raise measure.MissingError("nccl4py: needs a GPU")
    shared = new_unique_id(host)
    x = gpu.zeros(1)
    try:  # young, and its names still change: the others are worth measuring without it
        import nccl.core as nccl

        unique_id = nccl.UniqueId.from_bytes(shared)
        communicator = nccl.Communicator.init(host.world_size, host.rank, unique_id)
        communicator.allreduce(x, x, nccl.SUM)
    except Exception as error:
        raise measure.MissingError(f"nccl4py: {type(error).__name__}: {error}") from error
    stack.callback(communicator.destroy)
    names = {"allreduce": communicator.allreduce, "SUM": nccl.SUM}
    return {"nccl4py": functools.partial(loop_over, "allreduce(x, out, SUM)", "out", names)}


# What it says


def write_down(folder: str, records: Iterable[dict[str, Any]]) -> None:
    with Path(folder, "records").open("a", encoding="utf-8") as file:
        file.writelines(json.dumps(each) + "\n" for each in records)


def read_records(folder: str) -> list[dict[str, Any]]:
    path = Path(folder, "records")
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    return [json.loads(line) for line in lines]


def record(name: str, times: list[float], nbytes: int, about: dict[str, Any]) -> dict[str, Any]:
    p50 = measure.p50(times)
    return {
        "benchmark": "gpu_collectives",
        "collective": "allreduce",
        "name": name,
        "nbytes": nbytes,
        "p50_us": round(1e6 * p50, 3),
        "p95_us": round(1e6 * measure.p95(times), 3),
        "busbw_gb_s": round(measure.busbw_gb_s("allreduce", about["ranks"], nbytes, p50), 2),
        "samples": len(times),
        **about,
    }


def show(records: list[dict[str, Any]]) -> None:
    first = records[0]
    where = f"{first['device']}, NCCL {first['nccl']}"
    measure.say(f"{where}, {first['ranks']} ranks on {first['gpus']} GPUs")
    floor = {each["nbytes"]: each["p50_us"] for each in records if each["name"] == "C API"}
    measure.say(f"\n{'size':>8} {'us a call':>12} {'to C API':>9} {'us more':>9}")
    for each in sorted(records, key=lambda each: each["nbytes"]):
        least = floor[each["nbytes"]]
        measure.say(
            f"{measure.format_size(each['nbytes']):>8} {each['p50_us']:>12.2f} "
            f"{each['p50_us'] / least:>8.3f}x {each['p50_us'] - least:>9.2f}  {each['name']}"
        )


if __name__ == "__main__":
    main()
