"""What the ranks of the tests of NCCL share: a communicator each, over emulated GPUs."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import ferro_dist as fd
from ferro_dist._native.cuda_libraries import load_nccl
from ferro_dist.errors import Timeout
from ferro_dist.testing import emulated_gpu, run_ranks

if TYPE_CHECKING:
    from ferro_dist._native.nccl import Communicator

TIMEOUT_S = 20.0
# What comes well before any of these tests has taken too long.
PATIENCE_S = 60.0
# Of the streams that `shallow_gpu` has: how many operations they take.
STREAM_DEPTH = 4


def ranks(world_size: int, body: Callable[..., Any], *args: Any) -> list[Any]:
    """Call `body(backend, *args)` on ranks of a HostBackend, with an emulated GPU each."""
    return run_ranks(world_size, body, *args, emulate_gpu=True)


def connect(backend: Any, **config: Any) -> Communicator:
    """Make the communicator of all ranks of `backend`, which carries the unique id."""
    emulated_gpu()
    nccl = load_nccl()
    mine = np.frombuffer(bytes(nccl.get_unique_id()), np.uint8)
    shared = nccl.UniqueId(bytes(fd.broadcast(mine, backend, root=0)))
    communicator: Communicator = nccl.Communicator.init_rank(
        backend.world_size, shared, backend.rank, device=0, timeout=TIMEOUT_S, **config
    )
    return communicator


def ranked(rank: int, count: int = 8, dtype: str = "float32") -> Any:
    """Make an array on the GPU that differs from rank to rank."""
    return emulated_gpu().array(np.arange(count) + rank, dtype=dtype)


def ends_before_arrays_are_dropped(
    communicator: Communicator, call: Callable[[Any], object]
) -> list[bool]:
    """Make a call that times out; return whether the communicator had ended as its array went."""
    ended: list[bool] = []
    x = ranked(0)
    looked = weakref.ref(x.memory, lambda _: ended.append(communicator.is_closed))
    with pytest.raises(Timeout):
        call(x)
    del x
    gc.collect()
    while looked() is not None:  # the main thread lets go of it, within this test's time
        os.sched_yield()
    return ended


def hold(gpu: Any) -> Callable[[], None]:
    """Let the current stream wait until what is returned is called."""
    may_go_on = threading.Event()
    wait = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(lambda _: may_go_on.wait(PATIENCE_S))
    gpu.check(gpu.cudart.cudaLaunchHostFunc(ctypes.c_void_p(gpu.current_stream), wait, None))

    def go_on(_keep: Any = wait) -> None:
        may_go_on.set()

    return go_on


def shallow_gpu() -> Any:
    """Load the emulated libraries, with streams that are soon full."""
    os.environ["FERRO_EMULATION_STREAM_DEPTH"] = str(STREAM_DEPTH)
    return emulated_gpu()


@contextlib.contextmanager
def full(stream: Any) -> Iterator[None]:
    """Keep a thread waiting until there is room in a stream of `shallow_gpu`.

    CUDA then keeps others waiting, too. The block begins with no room; another thread makes some
    soon after, as the block may have to wait for it.
    """
    from ferro_dist._native.cuda_memory import DeviceMemory, fill_async

    memory = DeviceMemory(1)
    with stream:
        go_on = hold(emulated_gpu())
    has_begun = threading.Event()

    def fill() -> None:
        for _ in range(STREAM_DEPTH + 1):
            fill_async(memory.address, 0, 1, stream)

    def make_room() -> None:
        has_begun.wait()
        go_on()

    threads = [threading.Thread(target=each) for each in (fill, make_room)]
    for thread in threads:
        thread.start()
    wait_until_asleep(threads[0])
    has_begun.set()
    try:
        yield
    finally:
        for thread in threads:
            thread.join()
        stream.synchronize()


def wait_until_asleep(thread: threading.Thread) -> None:
    """Return once a thread is kept in a call, with nobody else wanting the interpreter."""
    num_asleep = 0
    while num_asleep < 20:
        time.sleep(0.001)
        stat = Path(f"/proc/self/task/{thread.native_id}/stat").read_text()
        num_asleep = num_asleep + 1 if stat.rpartition(")")[2].split()[0] == "S" else 0


def wait_until_stuck(gpu: Any, count: int) -> None:
    """Return once so many calls of NCCL do not return, as faults on demand have it."""
    while gpu.stuck_count < count:
        os.sched_yield()


def values(array: Any) -> list[float]:
    """Copy an array to the host, once its stream is done."""
    listed: list[float] = emulated_gpu().copy_out(array).tolist()
    return listed
