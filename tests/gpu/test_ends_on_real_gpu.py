"""Groups on a real GPU whose ranks stay away, leave or die, and their ends of all kinds."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
from gpu.gpu_ranks import abort_under_load, connect
from gpu.real_gpu import need, share_gpu
from leaks import settled
from visible_gpus import with_gpus

import ferro_dist as fd
from ferro_dist.errors import ChannelClosed, DistributedError, Timeout
from ferro_dist.testing import RankDeath, run_ranks

DEADLINE_S = 200.0
# What must pass, but not before ranks that take turns on a GPU have come.
LATE_S = 5.0
GROUPS = 40
WARM_UP = 10
pytestmark = pytest.mark.timeout(600)


def ranks(world_size: int, body: Callable[..., Any], *args: Any, **options: Any) -> list[Any]:
    need("torch")
    options = {"backend": "none", "timeout": DEADLINE_S, **options}
    return run_ranks(world_size, body, *args, **options)


def ones(count: int = 1000) -> Any:
    import torch

    return torch.ones(count, device="cuda")


def connected(kind: str, rank: int, world_size: int, addr: str) -> Any:
    """Make a group whose ranks NCCL has connected."""
    share_gpu(rank)
    group = connect(kind, rank, world_size, addr)
    fd.allreduce(ones(), group)
    nccl_of(group).synchronize()
    return group


def nccl_of(group: Any) -> Any:
    return getattr(group, "nccl", group)


def call_and_wait(group: Any) -> None:
    fd.allreduce(ones(), group)
    nccl_of(group).synchronize()


def call_without_end(group: Any) -> None:
    while True:
        call_and_wait(group)


# Ranks that do not call


def miss_a_call(rank: int, world_size: int, addr: str, kind: str) -> tuple[Any, ...]:
    """Rank 1 waits for the others to give up; NCCL's kernels of the others have begun."""
    with fd.HostBackend(rank, world_size, f"{addr}-host") as host:
        group = connected(kind, rank, world_size, addr)
        told = None
        if rank != 1:
            nccl_of(group).timeout = LATE_S
            with pytest.raises(Timeout) as told:
                call_and_wait(nccl_of(group))
            with pytest.raises(fd.LockPoisoned):
                call_and_wait(group)
        fd.barrier(host)
        nccl_of(group).abort()
        group.close()
    return (told.value.op, told.value.missing, str(told.value)) if told else ()


@pytest.mark.parametrize("kind", ["nccl", "hybrid"])
def test_ranks_that_do_not_call_are_a_timeout(kind: str) -> None:
    op, missing, message = ranks(2, miss_a_call, kind)[0]
    assert op == "allreduce"
    assert missing == ((1,) if kind == "hybrid" else ())
    assert (
        "rank 1 has not made the call" if kind == "hybrid" else "other ranks are missing"
    ) in message


def connect_alone(rank: int, world_size: int, addr: str) -> str:
    share_gpu(rank)
    with pytest.raises(Timeout) as told:
        fd.NcclBackend(0, 2, fd.get_unique_id(), timeout=2.0)
    return str(told.value)


def test_a_group_whose_ranks_do_not_all_come_is_a_timeout() -> None:
    assert "other ranks are missing" in ranks(1, connect_alone)[0]


# Ranks that end


def end_suddenly(rank: int, world_size: int, addr: str, kind: str) -> tuple[str, Any]:
    group = connected(kind, rank, world_size, addr)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    if kind == "nccl":
        group.timeout = LATE_S
    with pytest.raises(DistributedError) as told:
        call_without_end(group)
    nccl_of(group).abort()
    group.close()
    return type(told.value).__name__, getattr(told.value, "peer", None)


@pytest.mark.parametrize("kind", ["nccl", "hybrid"])
def test_a_killed_rank_ends_the_others_calls(kind: str) -> None:
    outcomes = ranks(2, end_suddenly, kind, may_die=[1])
    assert outcomes[1] == RankDeath(-signal.SIGKILL)
    if kind == "hybrid":
        assert outcomes[0] == ("PeerLostError", 1)
    else:  # over sockets NCCL notices, in shared memory it does not
        assert outcomes[0][0] in ("PeerLostError", "Timeout")


def go_on_without_it(rank: int, world_size: int, addr: str) -> list[float]:
    group = connected("hybrid", rank, world_size, addr)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(fd.PeerLostError):
        call_without_end(group)
    with group.shrink() as left:
        total: list[float] = fd.allreduce(ones(2) * (rank + 1), left).tolist()
    group.close()
    return total


def test_survivors_go_on() -> None:
    outcomes = ranks(3, go_on_without_it, may_die=[1])
    assert outcomes[0] == outcomes[2] == [4.0, 4.0]


def leave_early(rank: int, world_size: int, addr: str) -> tuple[Any, ...]:
    group = connected("hybrid", rank, world_size, addr)
    work = fd.allreduce(ones(), group, async_op=True)
    if rank == 1:
        group.close()
        return ()
    work.wait(LATE_S * 4)
    assert (work.result() == world_size).all()  # what all have called is done
    with pytest.raises(ChannelClosed) as told:
        call_and_wait(group.nccl)
    group.close()
    return told.value.peer, told.value.rank


def test_a_rank_that_leaves_ends_the_calls_that_it_has_not_made() -> None:
    assert ranks(2, leave_early) == [(1, 0), ()]


# Ends of groups


def abort_in_the_middle(rank: int, world_size: int, addr: str) -> tuple[int, str]:
    import torch

    group = connected("nccl", rank, world_size, addr)
    outcome = abort_under_load(group, ones(), torch.cuda.stream(torch.cuda.Stream()), 60)
    torch.cuda.synchronize()  # no kernel is left that waits for another rank
    return outcome


def test_abort_from_another_thread_ends_the_calls() -> None:
    for numbers, ended in ranks(2, abort_in_the_middle):
        assert numbers >= 20
        assert ended in ("ChannelClosed", "LockPoisoned")


def close_with_work(rank: int, world_size: int, addr: str, kind: str) -> list[float]:
    group = connected(kind, rank, world_size, addr)
    x = ones(4)
    for _ in range(5):
        fd.allreduce(x, group, out=x, async_op=True)
    group.close()  # waits for them
    numbers: list[float] = x.tolist()
    with pytest.raises(ChannelClosed):
        fd.allreduce(x, group)
    return numbers


@pytest.mark.parametrize("kind", ["nccl", "hybrid"])
def test_close_waits_for_work_in_flight(kind: str) -> None:
    assert ranks(2, close_with_work, kind) == [[32.0] * 4] * 2


def drop_and_free(rank: int, world_size: int, addr: str) -> list[bool]:
    """Arrays and groups are let go of while the GPU still works for them."""
    import torch

    right = []
    for number in range(3):
        group = connected("nccl", rank, world_size, f"{addr}-{number}")
        torch.cuda._sleep(20_000_000)
        x = torch.full((1 << 20,), rank + 1.0, device="cuda")
        y = fd.allreduce(x, group)
        del x, group
        torch.full((1 << 20,), 100.0, device="cuda")  # where x was, if that were free already
        right.append(bool((y == 3).all()))
    gc.collect()
    return right


def test_what_is_dropped_lives_until_the_gpu_is_done() -> None:
    assert ranks(2, drop_and_free) == [[True] * 3] * 2


def make_groups(rank: int, world_size: int, addr: str) -> tuple[int, ...]:
    share_gpu(rank)
    x = ones()
    before = (0, 0)
    for number in range(GROUPS):
        if number == WARM_UP:
            before = held()
        with fd.NcclBackend(0, 1, fd.get_unique_id()) as group:
            fd.allreduce(x, group, out=x)
    gc.collect()

    def growth() -> tuple[int, ...]:
        return tuple(max(0, now - then) for now, then in zip(held(), before, strict=True))

    return settled(growth, (0, 0))


def held() -> tuple[int, int]:
    """Descriptors and threads."""
    return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))


def test_many_groups_leave_nothing() -> None:
    assert ranks(1, make_groups) == [(0, 0)]


PREAMBLE = """
import torch
import ferro_dist as fd
def connect():
    return fd.NcclBackend(0, 1, fd.get_unique_id(), timeout=60)
x = torch.ones(1 << 20, device="cuda")
"""

STAGES = {
    "unique_id_made": "fd.get_unique_id()",
    "group_in_a_cycle": "group = connect(); cycle = [group]; cycle.append(cycle)",
    "work_in_flight": "group = connect(); torch.cuda._sleep(1 << 28); "
    "work = fd.allreduce(x, group, async_op=True)",
    "group_dropped": "fd.allreduce(x, connect())",
    "group_closed": "group = connect(); fd.allreduce(x, group); group.close()",
    "group_aborted": "group = connect(); fd.allreduce(x, group); group.abort()",
    "graph_held": "group = connect(); fd.allreduce(x, group, out=x); group.synchronize(); "
    "graph = torch.cuda.CUDAGraph()\n"
    "with torch.cuda.graph(graph): fd.allreduce(x, group, out=torch.empty_like(x))\n"
    "graph.replay()",
}


@pytest.mark.parametrize("stage", STAGES)
def test_the_interpreter_exits_at_every_stage(stage: str) -> None:
    need("torch")
    done = subprocess.run(
        [sys.executable, "-X", "faulthandler", "-c", PREAMBLE + STAGES[stage]],
        env=with_gpus(os.environ),
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")


# Communicators


def use_a_communicator(rank: int, world_size: int, addr: str) -> None:
    import torch

    from ferro_dist._native.cuda_libraries import load_nccl

    group = connected("nccl", rank, world_size, addr)
    comm, peer, stream = group.comm, 1 - rank, torch.cuda.current_stream()
    x = torch.arange(8.0, device="cuda") + rank
    both = [torch.arange(8.0, device="cuda") + each for each in range(2)]

    def check(out: Any, expected: Any) -> None:
        stream.synchronize()
        assert torch.equal(out, expected), (out, expected)

    def new(count: int) -> Any:
        return torch.zeros(count, device="cuda")

    comm.allreduce(x, out := new(8), stream=stream)
    check(out, both[0] + both[1])
    comm.all_gather(x, out := new(16), stream=stream)
    check(out, torch.cat(both))
    comm.reduce_scatter(x, out := new(4), stream=stream)
    check(out, (both[0] + both[1]).reshape(2, 4)[rank])
    comm.all_to_all(x, out := new(8), stream=stream)
    check(out, torch.cat([each.reshape(2, 4)[rank] for each in both]))
    comm.gather(x, out := new(16), 0, stream=stream)
    if rank == 0:
        check(out, torch.cat(both))
    comm.scatter(x if rank == 0 else None, out := new(4), 0, stream=stream)
    check(out, both[0].reshape(2, 4)[rank])
    comm.broadcast(x, out := new(8), 1, stream=stream)
    check(out, both[1])
    comm.reduce(x, out := new(8), 1, stream=stream)
    if rank == 1:
        check(out, both[0] + both[1])
    with load_nccl().Group():
        comm.send(x, peer, stream=stream)
        comm.recv(out := new(8), peer, stream=stream)
    check(out, both[peer])
    weighted = comm.premul_sum(10.0**rank, "float32")
    comm.allreduce(x, out := new(8), weighted, stream=stream)
    check(out, both[0] + 10 * both[1])
    weighted.close()
    comm.allreduce_coalesced([x, 2 * x], outs := [new(8), new(8)], stream=stream)
    check(outs[1], 2 * outs[0])

    assert (comm.world_size, comm.rank, comm.device) == (2, rank, 0)
    registration = comm.register(x)
    comm.allreduce(x, out := new(8), stream=stream)
    check(out, both[0] + both[1])
    registration.close()
    memory = group.empty(8, "float32")
    memory = torch.from_dlpack(memory)
    memory.copy_(x)
    window = comm.register_window(memory)
    comm.allreduce(memory, memory, stream=stream)
    check(memory, both[0] + both[1])
    window.close()
    with group.split([1, 0]) as part:
        assert part.rank == 1 - rank
        check(fd.broadcast(x, part, 0), both[1])
    alone = group.split([0])
    assert (alone is None) == (rank != 0)
    group.close()


def test_a_communicator_does_what_it_says() -> None:
    ranks(2, use_a_communicator)


# Groups that reach no GPU


def go_by_the_host(group: Any, library: str) -> float:
    share_gpu(group.rank)
    os.environ["FERROTORCH_ENABLE_GPU_FALLBACK"] = "1"
    if library == "torch":
        x = ones(3_000_011)
    elif library == "cupy":
        import cupy

        x = cupy.ones(3_000_011, "float32")
    else:
        import jax.numpy as jnp

        x = jnp.ones(3_000_011, "float32")
    for _ in range(3):
        with pytest.warns(fd.GpuFallbackWarning):
            y = fd.allreduce(x * (group.rank + 1), group)
        assert type(y) is type(x)
        assert (y == 3).all()
        with pytest.warns(fd.GpuFallbackWarning):
            gathered = fd.all_gather(x[:5] * group.rank, group)
    return float(gathered.sum())


@pytest.mark.parametrize("library", ["torch", "cupy", "jax"])
def test_arrays_go_by_the_host_where_that_is_allowed(library: str) -> None:
    need(library)
    assert run_ranks(2, go_by_the_host, library, timeout=DEADLINE_S) == [5.0, 5.0]
