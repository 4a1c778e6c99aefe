"""NcclBackend: what the contract does not ask of every backend."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from gpu.gpu_ranks import connect, ranks

import ferro_dist as fd
from ferro_dist.errors import (
    BackendUnavailable,
    ChannelClosed,
    InvalidArray,
    InvalidRank,
    SizeMismatch,
    UnsupportedOp,
)
from ferro_dist.testing import emulated_gpu, run_ranks


def refuse_host_arrays(rank: int, world_size: int, addr: str) -> None:
    gpu = emulated_gpu()
    with connect("nccl", rank, world_size, addr) as group:
        host, device = np.ones(4), gpu.array(np.ones(4))
        calls: list[Callable[[], Any]] = [
            lambda: fd.allreduce(host, group),
            lambda: fd.all_gather(bytearray(4), group),
            lambda: fd.send(host, group, 1 - rank),
            lambda: fd.recv(host, group, 1 - rank),
            lambda: fd.batch([fd.P2POp("send", host, 1 - rank)], group),
        ]
        for call in calls:
            with pytest.raises(UnsupportedOp, match="HybridBackend") as told:
                call()
            assert told.value.rank == rank
        with pytest.raises(InvalidArray, match="different devices"):  # by a HybridBackend, too
            fd.allreduce(device, group, out=host)
        assert fd.allreduce(device, group).numpy().tolist() == [2] * 4


def test_host_arrays_are_refused_and_hybrid_groups_named() -> None:
    ranks(2, refuse_host_arrays)


def refuse_outputs(rank: int, world_size: int, addr: str) -> None:
    gpu = emulated_gpu()
    with connect("nccl", rank, world_size, addr) as group:
        x = gpu.array(np.ones(4, np.float32))
        with pytest.raises(InvalidArray, match="contiguous"):
            fd.allreduce(x, group, out=gpu.empty(8)[::2])
        with pytest.raises(InvalidArray, match="float64"):
            fd.allreduce(x, group, out=gpu.empty(4, "float64"))
        with pytest.raises(SizeMismatch):
            fd.allreduce(x, group, out=gpu.empty(5))
        assert fd.allreduce(x, group).numpy().tolist() == [2] * 4


def test_outputs_that_do_not_fit_are_refused_and_the_group_goes_on() -> None:
    ranks(2, refuse_outputs)


def work_on_own_stream(rank: int, world_size: int, addr: str) -> list[float]:
    """On the caller's stream, nothing needs to be ordered."""
    gpu = emulated_gpu(delay_us=2_000)
    stream = gpu.stream()
    unique_id = fd.get_unique_id()
    group = fd.NcclBackend.with_stream(
        *(0, 1, unique_id, stream), timeout=20, config={"max_ctas": 4}
    )
    assert group.config == {"max_ctas": 4}
    assert group.stream.handle == stream.handle
    with group, stream:
        x = gpu.array(np.ones(4))
        for _ in range(10):
            fd.allreduce(x, group, out=x)
        numbers: list[float] = x.numpy().tolist()
    stream.synchronize()  # it is still the caller's
    return numbers


def test_a_group_may_work_on_the_callers_stream() -> None:
    assert ranks(1, work_on_own_stream) == [[1] * 4]


def work_on_the_default_stream(rank: int, world_size: int, addr: str) -> int:
    emulated_gpu()
    with pytest.raises(TypeError, match="stream"):
        fd.NcclBackend.with_stream(0, 1, fd.get_unique_id(), "no stream")
    with contextlib.closing(
        fd.NcclBackend.with_stream(0, 1, fd.get_unique_id(), 0, timeout=20)
    ) as group:
        return group.stream.handle


def test_the_default_stream_is_not_taken_for_none() -> None:
    assert ranks(1, work_on_the_default_stream) == [1]  # cudaStreamLegacy


def work_on_the_default_stream_of_another_gpu(rank: int, world_size: int, addr: str) -> list[float]:
    """The default stream is that of the thread's current GPU, which is not the group's here."""
    gpu = emulated_gpu(devices=2, delay_us=2_000)
    with gpu.device(1):
        stream = gpu.stream()
        x = gpu.array(np.ones(4), stream=stream)
    group = fd.NcclBackend.with_stream(0, 1, fd.get_unique_id(), 0, device=1, timeout=20)
    with group, stream:
        fd.allreduce(x, group, out=x)
        fd.allreduce(x, group, out=x, async_op=True).wait()
        assert gpu.current_device == 0
        numbers: list[float] = x.numpy().tolist()
    return numbers


def test_a_group_may_work_on_the_default_stream_of_another_gpu() -> None:
    body = work_on_the_default_stream_of_another_gpu
    assert run_ranks(1, body, backend="none") == [[1] * 4]


def work_on_the_stream_of_a_thread(rank: int, world_size: int, addr: str) -> None:
    emulated_gpu()
    of_thread = 2  # cudaStreamPerThread
    with pytest.raises(ValueError, match="a different one in each thread"):
        # The second rank never comes, and is not waited for.
        fd.NcclBackend.with_stream(0, 2, fd.get_unique_id(), of_thread, timeout=20)


def test_the_default_stream_of_a_thread_is_refused_before_ranks_connect() -> None:
    ranks(1, work_on_the_stream_of_a_thread)


def split_alone(rank: int, world_size: int, addr: str) -> None:
    emulated_gpu()
    with connect("nccl", rank, world_size, addr) as group:
        if rank == 0:
            with pytest.raises((fd.Timeout, fd.PeerLostError)):
                group.split([0, 1], timeout=0.5)
        group.abort()


def test_split_does_not_wait_for_ever_for_a_rank_that_stays_away() -> None:
    ranks(2, split_alone)


def split_what_has_failed(rank: int, world_size: int, addr: str) -> None:
    gpu = emulated_gpu()
    with connect("nccl", rank, world_size, addr) as group:
        gpu.set_faults("point=allreduce,act=remote_error")
        x = gpu.array(np.ones(4))
        with pytest.raises(fd.DistributedError):
            fd.allreduce(x, group, async_op=True).wait(10)
        gpu.set_delay(2_000)  # copies are under way for longer than the call
        with pytest.raises(fd.LockPoisoned):
            group.split([0])
        gpu.synchronize()  # a copy that finds its memory freed would end the process


def test_split_of_a_failed_group_leaves_no_copies_behind() -> None:
    ranks(1, split_what_has_failed)


def use_raw_pointers(rank: int, world_size: int, addr: str) -> list[list[float]]:
    gpu = emulated_gpu()
    with connect("nccl", rank, world_size, addr) as group:
        x, many = gpu.array(np.arange(4, dtype=np.float32) + rank), gpu.empty(8)
        gpu.synchronize()
        float32, total = fd.dtype_to_nccl("float32"), fd.reduce_op_to_nccl("sum")
        assert (float32, total, fd.reduce_op_to_nccl(fd.ReduceOp.MEAN)) == (7, 0, 4)
        group.all_gather_raw(x.address, many.address, 4, float32)
        group.allreduce_raw(x.address, x.address, 4, float32, total)
        part = gpu.empty(2)
        group.reduce_scatter_raw(x.address, part.address, 2, float32, total)
        group.broadcast_raw(x.address, x.address, 4, float32, 1)
        group.synchronize()
        return [array.numpy().tolist() for array in (many, x, part)]


def test_raw_pointers_are_reduced_on_the_groups_stream() -> None:
    for rank, (many, x, part) in enumerate(ranks(2, use_raw_pointers)):
        assert many == [0, 1, 2, 3, 1, 2, 3, 4]
        assert x == [1, 3, 5, 7]
        assert part == [[2, 6], [10, 14]][rank]


def capture_raw_calls(rank: int, world_size: int, addr: str) -> list[float]:
    gpu = emulated_gpu()
    x, stream = gpu.array(np.ones(2, "float32")), gpu.stream()
    with connect("nccl", rank, world_size, addr) as group:
        fd.allreduce(x, group)  # connects the ranks
        group.synchronize()
        with gpu.capture(stream) as graph:
            fd.allreduce(x, group, out=x, async_op=True).wait()
            group.allreduce_raw(x.address, x.address, 2, fd.dtype_to_nccl("float32"), 0)
            gpu.order(group.stream, stream)
        graph.launch(stream)
        stream.synchronize()
        graph.close()
    result: list[float] = gpu.copy_out(x).tolist()
    return result


def test_raw_calls_behind_an_asynchronous_one_become_part_of_its_graph() -> None:
    assert ranks(2, capture_raw_calls) == [[4.0, 4.0]] * 2


def refuse_raw_arguments(rank: int, world_size: int, addr: str) -> None:
    gpu = emulated_gpu()
    with connect("nccl", rank, world_size, addr) as group:
        x = gpu.array(np.ones(4, np.float32))
        at, float32 = x.address, fd.dtype_to_nccl("float32")
        for root in (2, -1, "0"):
            with pytest.raises(InvalidRank, match="broadcast: root") as told:
                group.broadcast_raw(at, at, 4, float32, root)
            assert told.value.rank == rank
        calls: list[Callable[[int], None]] = [
            lambda count: group.allreduce_raw(at, at, count, float32, 0),
            lambda count: group.broadcast_raw(at, at, count, float32, 0),
            lambda count: group.all_gather_raw(at, at, count, float32),
            lambda count: group.reduce_scatter_raw(at, at, count, float32, 0),
        ]
        for call in calls:
            with pytest.raises(SizeMismatch, match="memory"):
                call(1 << 62)
            with pytest.raises(OverflowError):
                call(-1)
        assert fd.allreduce(x, group).numpy().tolist() == [2] * 4


def test_roots_and_counts_of_raw_calls_are_checked_and_the_group_goes_on() -> None:
    ranks(2, refuse_raw_arguments)


def average_of_three(rank: int, world_size: int, addr: str) -> None:
    """NCCL multiplies by a rounded 1/3 before it adds: no bits to rely on, but their number."""
    gpu = emulated_gpu()
    with connect("nccl", rank, world_size, addr) as group:
        for dtype, rtol in (("float16", 4e-3), ("float32", 4e-7), ("float64", 1e-15)):
            x = np.linspace(1, 2, 1000).astype(dtype)
            y = fd.allreduce(gpu.array(x * (rank + 1)), group, "mean").numpy()
            np.testing.assert_allclose(y.astype(float), 2 * x.astype(float), rtol=rtol)


def test_a_mean_of_three_is_close() -> None:
    ranks(3, average_of_three)


def make_empty(rank: int, world_size: int, addr: str) -> None:
    emulated_gpu()
    with connect("nccl", rank, world_size, addr) as group:
        x = group.empty((3, 2), "float16")
        assert (x.shape, str(x.dtype)) == ((3, 2), "float16")
        with pytest.raises(MemoryError, match="No GPU has room for"):
            group.empty(1 << 62, "float32")
        window = group.comm.register_window(x)
        fd.allreduce(x, group, out=x)
        fd.barrier(group)
        window.close()
    with pytest.raises(ChannelClosed):
        group.empty(3, "int8")


def test_memory_of_nccl_is_an_array() -> None:
    ranks(2, make_empty)


def shrink_alone(rank: int, world_size: int, addr: str) -> None:
    with (
        connect("nccl", rank, world_size, addr) as group,
        pytest.raises(UnsupportedOp, match="HybridBackend can"),
    ):
        group.shrink()


def test_shrink_needs_somebody_who_knows_the_survivors() -> None:
    ranks(1, shrink_alone)


def is_available(rank: int, world_size: int, addr: str, devices: int) -> bool:
    emulated_gpu(devices=devices)
    return fd.is_nccl_available()


def test_nccl_is_available_where_there_is_a_gpu() -> None:
    assert run_ranks(1, is_available, 1, backend="none") == [True]
    assert run_ranks(1, is_available, 0, backend="none") == [False]


def connect_without_gpu(rank: int, world_size: int, addr: str) -> str:
    emulated_gpu(devices=0)
    with pytest.raises(BackendUnavailable) as told:
        fd.NcclBackend(0, 1, fd.get_unique_id())
    return str(told.value)


def test_a_process_without_gpu_is_told_so() -> None:
    assert "GPU" in run_ranks(1, connect_without_gpu, backend="none")[0]
