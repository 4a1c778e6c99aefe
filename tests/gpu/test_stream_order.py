"""Calls in order with the caller's stream and with each other: and tests that can tell.

Every program here ends with right numbers because of one wait between streams. Each runs
twice: as it is, and with a library before the emulated CUDA runtime that leaves the wait
out. There its numbers must be wrong.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gpu.gpu_ranks import connect, ranks

import ferro_dist as fd
from ferro_dist.testing import RankDeath, emulated_gpu

# Of every operation in a stream: far more than a call takes, on a busy machine, too.
DELAY_US = 10_000
RUNS = 20


# Programs of one rank. NCCL copies its input then, in order with its stream, as with many.


def read_late_input(group: Any, gpu: Any) -> list[float]:
    """What the caller's stream has yet to write is what NCCL reads: the wait on arrival."""
    x, out = gpu.array(np.zeros(4)), gpu.empty(4, "float64")
    with late_stream(gpu):
        overwrite(gpu, x, 7.0)
        fd.allreduce(x, group, out=out, async_op=True)
        group.synchronize()
    return values(gpu, out)


def use_result_once_waited_for(group: Any, gpu: Any) -> list[float]:
    """What the caller queues after `Work.wait` finds the result: the wait at hand-back."""
    x, out, kept = gpu.array(np.full(4, 7.0)), gpu.array(np.zeros(4)), gpu.array(np.zeros(4))
    with late_stream(gpu):
        keep_busy(group, gpu)
        work = fd.allreduce(x, group, out=out, async_op=True)
        work.wait()
        copy(gpu, kept, out)
    return values(gpu, kept)


def read_what_a_call_in_the_background_writes(group: Any, gpu: Any) -> list[float]:
    """Nobody has waited for it, but a call runs after all that were made before."""
    x, between, out = gpu.array(np.full(4, 7.0)), gpu.array(np.zeros(4)), gpu.array(np.zeros(4))
    with late_stream(gpu):
        keep_busy(group, gpu)
        fd.allreduce(x, group, out=between, async_op=True)
        fd.allreduce(between, group, out=out)
    return values(gpu, out)


def read_what_a_call_on_another_stream_writes(group: Any, gpu: Any) -> list[float]:
    x, between, out = gpu.array(np.full(4, 7.0)), gpu.array(np.zeros(4)), gpu.array(np.zeros(4))
    with late_stream(gpu):
        for _ in range(5):
            copy(gpu, between, between)
        fd.allreduce(x, group, out=between)
        with gpu.stream():
            fd.allreduce(between, group, out=out)
            gpu.synchronize()
    return values(gpu, out)


def use_results_at_once(group: Any, gpu: Any) -> list[float]:
    """What the caller queues behind a call finds its result, and overwrites its input in time."""
    x, out = gpu.array(np.full(4, 7.0)), gpu.array(np.zeros(4))
    last = gpu.array(np.zeros(4))
    with late_stream(gpu):
        keep_busy(group, gpu)
        fd.broadcast(x, group, out=out)
        copy(gpu, x, last)  # zeros, once NCCL has read x
        copy(gpu, last, out)
    return values(gpu, last)


PROGRAMS = {
    program.__name__: program
    for program in (
        read_late_input,
        use_result_once_waited_for,
        use_results_at_once,
        read_what_a_call_in_the_background_writes,
        read_what_a_call_on_another_stream_writes,
    )
}


@contextlib.contextmanager
def late_stream(gpu: Any) -> Iterator[None]:
    """Work on a new stream while every operation of all streams is late."""
    gpu.synchronize()
    gpu.set_delay(DELAY_US)
    with gpu.stream():
        yield
        gpu.synchronize()
        gpu.set_delay(0)


def keep_busy(group: Any, gpu: Any) -> None:
    """Let the group's own stream be later than the caller's."""
    scratch = gpu.array(np.zeros(4))
    for _ in range(10):
        fd.allreduce(scratch, group, out=scratch, async_op=True)


def overwrite(gpu: Any, x: Any, value: float) -> None:
    source = gpu.array(np.full(x.shape, value, x.dtype))
    copy(gpu, x, source)


def copy(gpu: Any, target: Any, source: Any) -> None:
    from ferro_dist._native.cuda_memory import copy_async

    copy_async(target.address, source.address, source.nbytes, gpu.current_stream)


def values(gpu: Any, x: Any) -> list[float]:
    listed: list[float] = gpu.copy_out(x).tolist()
    return listed


def run_program(name: str) -> list[float]:
    """Run a program in this process, with a group of its own."""
    gpu = emulated_gpu()
    made: Any = fd.NcclBackend(0, 1, fd.get_unique_id(), timeout=30)
    with made as group:
        fd.allreduce(gpu.array(np.ones(1)), group, async_op=True)
        group.synchronize()
        return PROGRAMS[name](group, gpu)


def in_a_process(name: str, **environment: str) -> list[float]:
    tests = Path(__file__).parents[1]
    path = os.pathsep.join(filter(None, [str(tests), os.environ.get("PYTHONPATH")]))
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            f"from gpu.test_stream_order import *; print(run_program({name!r}))",
        ],
        env={**os.environ, "PYTHONPATH": path, **environment},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    numbers: list[float] = json.loads(done.stdout)
    return numbers


@pytest.mark.parametrize("name", PROGRAMS)
def test_programs_end_with_right_numbers(name: str) -> None:
    assert in_a_process(name) == [7.0] * 4


# Mutation: a libcudart before the emulated one, whose n-th kind of wait does nothing.

MUTANT = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdlib.h>
// The lane's own stream waits for the arrival of its caller's work. Others wait for what was called
// before, or for the lane to hand back its own. They are told apart by the stream that waits, which
// is the lane's in the very first wait.
typedef int (*wait_t)(void*, void*, unsigned);
static void* lane;
int cudaStreamWaitEvent(void* stream, void* event, unsigned flags) {
  static wait_t real;
  if (!real) real = (wait_t)dlsym(RTLD_NEXT, "cudaStreamWaitEvent");
  if (!lane) lane = stream;
  const int is_arrival = stream == lane;
  const char* dropped = getenv("DROPPED_WAIT");
  if (dropped && (dropped[0] == 'a') == is_arrival) return 0;
  return real(stream, event, flags);
}
"""


@pytest.fixture(scope="module")
def mutant(tmp_path_factory: pytest.TempPathFactory) -> Path:
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler to make a mutant with")
    folder = tmp_path_factory.mktemp("mutant")
    (folder / "mutant.c").write_text(MUTANT)
    library = folder / "mutant.so"
    subprocess.run(
        [compiler, "-shared", "-fPIC", "-o", library, folder / "mutant.c", "-ldl"], check=True
    )
    return library


@pytest.mark.parametrize(
    ("dropped", "name"),
    [
        ("arrival", "read_late_input"),
        ("handback", "use_result_once_waited_for"),
        ("earlier_call", "read_what_a_call_in_the_background_writes"),
        ("earlier_call", "read_what_a_call_on_another_stream_writes"),
    ],
)
def test_a_wait_that_is_left_out_shows(mutant: Path, dropped: str, name: str) -> None:
    # A busy machine may run the streams in order all the same, but not time and again.
    runs = (in_a_process(name, LD_PRELOAD=str(mutant), DROPPED_WAIT=dropped) for _ in range(4))
    assert any(numbers != [7.0] * 4 for numbers in runs)


def test_the_mutant_alone_changes_nothing(mutant: Path) -> None:
    assert in_a_process("use_results_at_once", LD_PRELOAD=str(mutant)) == [7.0] * 4


# Memory that is freed in flight


def free_in_flight(rank: int, world_size: int, addr: str) -> None:
    """Give raw pointers of memory that goes at once: nothing keeps it, as arrays are kept."""
    gpu = emulated_gpu(delay_us=DELAY_US)
    with connect("nccl", rank, world_size, addr) as group:
        x = gpu.array(np.ones(1000, np.float32))
        gpu.synchronize()
        float32, total = fd.dtype_to_nccl("float32"), fd.reduce_op_to_nccl("sum")
        group.allreduce_raw(x.address, x.address, 1000, float32, total)
        del x
        group.synchronize()


def test_memory_freed_in_flight_is_noticed() -> None:
    """As in 95 % of runs or more; an emulated operation that is late enough sees all."""
    noticed = 0
    for _ in range(RUNS):
        [outcome] = ranks(1, free_in_flight, may_die=[0])
        noticed += outcome == RankDeath(-signal.SIGABRT)
    assert noticed >= 0.95 * RUNS


def drop_arrays_in_flight(rank: int, world_size: int, addr: str) -> list[float]:
    """The same with arrays: the group keeps them until the GPU is done."""
    gpu = emulated_gpu(delay_us=2_000)
    with connect("nccl", rank, world_size, addr) as group:
        out = gpu.empty(1000)
        for number in range(10):
            x = gpu.array(np.full(1000, number, np.float32))
            fd.allreduce(x, group, out=out)
            del x
        work = fd.allreduce(gpu.array(np.full(1000, 5, np.float32)), group, async_op=True)
        group.synchronize()
        return [float(out.numpy().max()), float(work.result().numpy().max())]


def test_arrays_are_kept_while_they_are_in_flight() -> None:
    assert ranks(2, drop_arrays_in_flight) == [[18.0, 10.0]] * 2
