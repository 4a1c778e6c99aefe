"""Ranks that are threads, for the tests of training."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from typing import Any

import pytest

import ferro_dist as fd

__all__ = ["OnRanks", "on_ranks", "traces_in_threads"]

OnRanks = Callable[..., list[Any]]


@contextlib.contextmanager
def _no_collection() -> Iterator[None]:
    """Collect no garbage while ranks are threads.

    torch's checkpoint reads the state of the process's generator, under a lock of the generator's
    and with an allocation. A collection there frees tensors, which lets go of the interpreter's
    lock; another thread that comes to read the state has that one, and waits for the other.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


@pytest.fixture
def on_ranks() -> OnRanks:
    """Run ``body(backend, *arguments)`` on each rank of a simulated group.

    Returns what the bodies return, by rank, or raises the first error of any. Only what reference
    counts free is freed meanwhile.
    """

    def run(world_size: int, body: Callable[..., Any], *arguments: Any) -> list[Any]:
        def rank(backend: Any) -> Any:
            # Left by an error, the group is closed: peers that wait are told.
            with backend:
                return body(backend, *arguments)

        group = fd.SimulatedBackend.create_group(world_size)
        with _no_collection(), ThreadPoolExecutor(world_size) as threads:
            ranks = [threads.submit(rank, backend) for backend in group]
            done, _ = wait(ranks, return_when=FIRST_EXCEPTION)
            failed = [future for future in ranks if future in done and future.exception()]
        return [future.result() for future in failed or ranks]

    return run


@pytest.fixture
def traces_in_threads() -> None:
    """Let torch note in a thread that stays that there is no GPU, before others trace graphs.

    What a torch with CUDA then puts in a GPU's place belongs to the first thread that traces, and
    is used after the end of that thread, too (pull request 178950 of pytorch mends it).
    """
    torch: Any = pytest.importorskip("torch")
    note = getattr(torch._C, "_ensureCUDADeviceGuardSet", None)
    if note is not None:
        note()
