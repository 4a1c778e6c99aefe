"""Ranks with a GPU each: real ones if there are, else emulated."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
from backends.rank_groups import GROUP_TIMEOUT_S, ProcessRanks, serve, start_progress
from gpu.gpu_arrays import EmulatedArrays, TorchArrays
from gpu.on_device import OnDevice
from gpu.real_gpu import share_gpu

import ferro_dist as fd
from ferro_dist.errors import DistributedError
from ferro_dist.testing import run_ranks

__all__ = ["abort_under_load", "connect", "ranks", "start", "start_on_real_gpus"]


def ranks(world_size: int, body: Callable[..., Any], *args: Any, **options: Any) -> list[Any]:
    """Call `body(rank, world_size, addr, *args)` on ranks with an emulated GPU each."""
    return run_ranks(world_size, body, *args, backend="none", emulate_gpu=True, **options)


def start(backend: str, world_size: int) -> ProcessRanks:
    """Start ranks for the cases of the contract, on emulated GPUs.

    Parameters
    ----------
    backend : str
        ``"nccl"`` or ``"hybrid"`` for arrays of the GPUs, ``"hybrid_host"`` for the host's.
    world_size : int
    """
    return ProcessRanks(world_size, _serve, backend, backend="none", emulate_gpu=True)


def start_on_real_gpus(backend: str, world_size: int) -> ProcessRanks:
    """Start ranks that share a real GPU, with torch's arrays; otherwise as `start`."""
    return ProcessRanks(world_size, _serve_on_real_gpus, backend, backend="none")


def connect(kind: str, rank: int, world_size: int, addr: str, **options: Any) -> Any:
    """Make one rank of an NcclBackend or a HybridBackend."""
    options = {"timeout": GROUP_TIMEOUT_S, **options}
    if kind == "hybrid":
        return fd.HybridBackend(rank, world_size, addr, **options)
    with fd.HostBackend(rank, world_size, addr) as host:
        made = bytes(fd.get_unique_id()) if rank == 0 else bytes(128)
        unique_id = fd.broadcast(np.frombuffer(made, np.uint8), host).tobytes()
        group = fd.NcclBackend(rank, world_size, unique_id, **options)
        fd.barrier(host)
    return group


def abort_under_load(
    group: Any, x: Any, stream: AbstractContextManager[Any], patience_s: float
) -> tuple[int, str]:
    """Abort a group while another thread calls without end; its number of calls, and their end."""
    numbers, ended = 0, ""
    warm = threading.Event()

    def call_until_the_end() -> None:
        nonlocal numbers, ended
        try:
            with stream:
                while True:
                    fd.allreduce(x, group, out=x)
                    numbers += 1
                    if numbers == 20:
                        warm.set()
        except DistributedError as error:
            ended = type(error).__name__

    thread = threading.Thread(target=call_until_the_end)
    thread.start()
    assert warm.wait(patience_s)
    group.abort()
    thread.join(patience_s)
    assert not thread.is_alive()
    group.close()
    return numbers, ended


def _serve(rank: int, world_size: int, addr: str, pipes: list[Connection], backend: str) -> None:
    with connect(backend.partition("_")[0], rank, world_size, addr) as group:
        _start_progress_of_host(group)
        serve(group if backend == "hybrid_host" else OnDevice(group, EmulatedArrays()), pipes)


def _start_progress_of_host(group: Any) -> None:
    if group.name == "hybrid":  # small calls without arrays may need these threads, or not
        start_progress(group)


def _serve_on_real_gpus(
    rank: int, world_size: int, addr: str, pipes: list[Connection], backend: str
) -> None:
    share_gpu(rank)
    with connect(backend, rank, world_size, addr) as group:
        _start_progress_of_host(group)
        serve(OnDevice(group, TorchArrays()), pipes, has_gpu=True)
