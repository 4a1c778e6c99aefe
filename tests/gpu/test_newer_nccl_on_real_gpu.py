"""What NCCL has learnt since its floor, on a real GPU that several ranks share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from gpu.gpu_ranks import connect
from gpu.real_gpu import need, share_gpu

import ferro_dist as fd
from ferro_dist._native.cuda_libraries import load_nccl
from ferro_dist.errors import DistributedError, InvalidArray
from ferro_dist.testing import run_ranks

DEADLINE_S = 120.0
TIMEOUT_S = 60.0
pytestmark = pytest.mark.timeout(300)


def ranks(world_size: int, since: tuple[int, ...], body: Callable[..., Any]) -> list[Any]:
    """Run `body` on ranks that share the GPU; skip where NCCL is older than `since`."""
    need("torch")
    version = run_ranks(1, nccl_version, backend="none")[0]
    if version < since:
        have, needed = (".".join(map(str, each)) for each in (version, since))
        pytest.skip(f"NCCL here is {have}, and this came with {needed}")
    return run_ranks(world_size, body, backend="none", timeout=DEADLINE_S)


def nccl_version(rank: int, world_size: int, addr: str) -> tuple[int, ...]:
    share_gpu(rank)
    version: tuple[int, ...] = load_nccl().get_version()
    return version


def numbers(count: int = 4) -> Any:
    import torch

    return torch.arange(float(count), device="cuda")


def sum_over(communicator: Any) -> float:
    import torch

    x = torch.ones(1, device="cuda")
    communicator.allreduce(x, x)
    total: float = x.item()
    return total


def shrink(rank: int, world_size: int, addr: str) -> tuple[int, int, float] | None:
    share_gpu(rank)
    with fd.HostBackend(rank, world_size, f"{addr}-host") as host:
        group = connect("nccl", rank, world_size, addr)
        sum_over(group.comm)
        if rank == 1:
            group.close()
            fd.barrier(host)
            return None
        smaller = group.comm.shrink([1])
        outcome = smaller.rank, smaller.world_size, sum_over(smaller)
        smaller.close()
        group.close()
        fd.barrier(host)
        return outcome


def test_a_shrunk_communicator_works_without_the_excluded() -> None:
    assert ranks(3, (2, 27), shrink) == [(0, 2, 2.0), None, (1, 2, 2.0)]


def grow(rank: int, world_size: int, addr: str) -> tuple[int, int, float]:
    """Ranks 0 and 1 are there, and rank 2 joins."""
    share_gpu(rank)
    nccl = load_nccl()
    with fd.HostBackend(rank, world_size, f"{addr}-host") as host:
        small, mine = None, np.zeros(128, np.uint8)
        if rank < 2:
            small = connect("nccl", rank, 2, f"{addr}-pair")
            if rank == 0:
                mine[:] = np.frombuffer(bytes(small.comm.unique_id()), np.uint8)
        shared = nccl.UniqueId(fd.broadcast(mine, host).tobytes())
        if small is None:
            grown = nccl.Communicator.join(3, shared, 2, device=0, timeout=TIMEOUT_S)
        else:
            grown = small.comm.grow(3, shared if rank == 0 else None)
            assert sum_over(small.comm) == 2  # the parent goes on
            small.close()
        outcome = grown.rank, grown.world_size, sum_over(grown)
        grown.close()
        fd.barrier(host)
    return outcome


def test_a_communicator_grows_by_ranks_that_join() -> None:
    assert ranks(3, (2, 29, 2), grow) == [(rank, 3, 3.0) for rank in range(3)]


def revoke(rank: int, world_size: int, addr: str) -> float:
    """Rank 1 never calls; the others stop waiting, and go on without it."""
    import torch

    share_gpu(rank)
    with fd.HostBackend(rank, world_size, f"{addr}-host") as host:
        group = connect("nccl", rank, world_size, addr)
        sum_over(group.comm)  # connects the ranks, for which the call below would wait otherwise
        if rank == 1:
            fd.barrier(host)
            group.abort()
            return 0.0
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            x = numbers()
            group.comm.allreduce(x, x)
        group.comm.revoke()
        stream.synchronize()  # what was under way has ended
        with pytest.raises(DistributedError):
            group.comm.allreduce(x, x)
        smaller = group.comm.shrink([1])
        total = sum_over(smaller)
        smaller.close()
        fd.barrier(host)
        group.abort()
        return total


def test_revoke_stops_what_hangs_and_shrink_follows() -> None:
    assert ranks(3, (2, 29, 2), revoke) == [2.0, 0.0, 2.0]


def suspend(rank: int, world_size: int, addr: str) -> tuple[bool, float]:
    share_gpu(rank)
    group = connect("nccl", rank, world_size, addr)
    comm, x = group.comm, numbers()
    assert sum_over(comm) == 2
    before = comm.memory_statistics()
    assert before["total"] == before["persistent"] + before["suspendable"]
    assert not before["is_suspended"]
    comm.suspend()
    assert comm.memory_statistics()["is_suspended"]
    with pytest.raises(DistributedError, match="suspended: resume it first"):
        comm.allreduce(x, x)
    comm.resume()
    with pytest.raises(DistributedError, match="not suspended"):
        comm.resume()
    assert not comm.memory_statistics()["is_suspended"]
    outcome = before["total"] > 0, sum_over(comm)
    group.close()
    return outcome


def test_a_suspended_communicator_works_once_it_is_resumed() -> None:
    assert ranks(2, (2, 29, 7), suspend) == [(True, 2.0)] * 2


def put(rank: int, world_size: int, addr: str) -> list[list[float]]:
    import torch

    share_gpu(rank)
    group = connect("nccl", rank, world_size, addr)
    comm, peer, stream = group.comm, 1 - rank, torch.cuda.current_stream()
    memory = torch.from_dlpack(group.empty((1 << 14,), "float32"))
    memory.zero_()
    x = memory[1000:1004]
    x.copy_(numbers() + rank)
    window = comm.register_window(memory)
    sum_over(comm)
    with pytest.raises(InvalidArray, match="no symmetric window"):
        comm.put(numbers(), peer, window)
    comm.put(x, peer, window, 64)
    comm.wait_signal(peer, stream=stream)
    first = memory[16:20].tolist()
    comm.put(x, peer, window, 0)
    comm.wait_signal(peer, stream=stream)
    comm.signal(peer, stream=stream)
    comm.wait_signal(peer, stream=stream)
    second = memory[:4].tolist()
    window.close()
    group.close()
    return [first, second]


def test_a_rank_writes_into_anothers_window() -> None:
    expected = [[(np.arange(4.0) + 1 - rank).tolist()] * 2 for rank in range(2)]
    assert ranks(2, (2, 29, 2), put) == expected
