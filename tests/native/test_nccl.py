"""Communicators: their calls, groups and ends, over emulated GPUs."""

from __future__ import annotations

import contextlib
import gc
import os
import pickle
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from nccl_ranks import (
    TIMEOUT_S,
    connect,
    ends_before_arrays_are_dropped,
    ranked,
    ranks,
    values,
    wait_until_stuck,
)

import ferro_dist as fd
from ferro_dist._emulation.gpu import array_over
from ferro_dist._native.cuda_libraries import load_nccl
from ferro_dist.errors import (
    BackendUnavailable,
    ChannelClosed,
    DistributedError,
    InvalidArray,
    InvalidRank,
    InvalidWorldSize,
    LockPoisoned,
    SelfSend,
    SizeMismatch,
    Timeout,
    UnsupportedOp,
)
from ferro_dist.reduce_op import ReduceOp
from ferro_dist.testing import emulated_gpu, run_ranks

# Collectives


def call_every_collective(backend: Any) -> dict[str, list[Any]]:
    gpu = emulated_gpu()
    with_peer = 1 - backend.rank
    communicator = connect(backend)
    x = ranked(backend.rank)
    out = {
        name: gpu.empty(8) for name in ("allreduce", "broadcast", "reduce", "all_to_all", "recv")
    }
    out |= {name: gpu.empty(16) for name in ("all_gather", "gather")}
    out |= {name: gpu.empty(4) for name in ("reduce_scatter", "scatter")}
    communicator.allreduce(x, out["allreduce"])
    communicator.broadcast(x, out["broadcast"], 1)
    communicator.reduce(x, out["reduce"], 0, ReduceOp.MAX)
    communicator.all_gather(x, out["all_gather"])
    communicator.reduce_scatter(x, out["reduce_scatter"])
    communicator.all_to_all(x, out["all_to_all"])
    communicator.gather(x, out["gather"], 0)
    communicator.scatter(x if backend.rank == 0 else None, out["scatter"], 0)
    group = load_nccl().Group
    with group():
        communicator.send(x, with_peer)
        communicator.recv(out["recv"], with_peer)
    result = {name: values(array) for name, array in out.items()}
    communicator.close()
    return result


def test_collectives_match_their_definition() -> None:
    first, second = ranks(2, call_every_collective)
    x = [np.arange(8.0), np.arange(8.0) + 1]
    for result in (first, second):
        assert result["allreduce"] == (x[0] + x[1]).tolist()
        assert result["broadcast"] == x[1].tolist()
        assert result["all_gather"] == np.concatenate(x).tolist()
    assert first["reduce"] == np.maximum(*x).tolist()
    assert first["gather"] == np.concatenate(x).tolist()
    assert [first["reduce_scatter"], second["reduce_scatter"]] == (x[0] + x[1]).reshape(
        2, 4
    ).tolist()
    assert [first["scatter"], second["scatter"]] == x[0].reshape(2, 4).tolist()
    assert first["all_to_all"] == [*x[0][:4], *x[1][:4]]
    assert second["all_to_all"] == [*x[0][4:], *x[1][4:]]
    assert [first["recv"], second["recv"]] == [x[1].tolist(), x[0].tolist()]


def sum_of_dtype(backend: Any, dtype: str) -> list[Any]:
    communicator = connect(backend)
    x = ranked(backend.rank, 4, dtype)
    communicator.allreduce(x, x)
    result = values(x)
    communicator.close()
    return result


@pytest.mark.parametrize(
    "dtype",
    ["int8", "uint8", "int32", "uint32", "int64", "uint64", "float16", "float32", "float64"],
)
def test_every_dtype_of_nccl_is_summed(dtype: str) -> None:
    assert ranks(2, sum_of_dtype, dtype) == [[1, 3, 5, 7]] * 2


def multiply_and_sum(backend: Any) -> list[Any]:
    communicator = connect(backend)
    x, out = ranked(backend.rank, 4), emulated_gpu().empty(4)
    weighted = communicator.premul_sum(10.0**backend.rank, "float32")
    communicator.allreduce(x, out, weighted)
    result = values(out)
    weighted.close()
    communicator.close()
    return result


def test_premul_sum_weighs_each_rank() -> None:
    assert ranks(2, multiply_and_sum) == [[10, 21, 32, 43]] * 2


def drop_premul_sum_in_a_group(backend: Any) -> list[Any]:
    """The reduction is nobody's but the group's, which has still to be launched."""
    communicator, other = connect(backend), connect(backend)
    x, out, unused = ranked(backend.rank, 4), emulated_gpu().empty(4), ranked(0)
    memory, registration = weakref.ref(unused.memory), other.register(unused)
    with load_nccl().Group():
        communicator.allreduce(x, out, communicator.premul_sum(10.0**backend.rank, "float32"))
        del unused, registration
        gc.collect()
        while memory() is not None:  # the reaper gives back what it was given before, too
            os.sched_yield()
    result = values(out)
    for each in (communicator, other):
        each.close()
    return result


def test_a_group_keeps_the_reductions_of_its_operations() -> None:
    assert ranks(2, drop_premul_sum_in_a_group) == [[10, 21, 32, 43]] * 2


def close_what_a_group_uses(backend: Any) -> list[float]:
    """NCCL would not recover from it."""
    from ferro_dist._native.nccl_memory import NcclMemory

    communicator = connect(backend)
    x, out, memory = ranked(backend.rank, 4), emulated_gpu().empty(4), NcclMemory(4096)
    reduction = communicator.premul_sum(2.0, "float32")
    window = communicator.register_window(memory)
    part = array_over(memory, (4,), np.dtype("float32"))

    def close_within(resource: Any, call: Callable[[], None]) -> None:
        with load_nccl().Group():
            communicator.allreduce(x, out)
            call()
            resource.close()

    with pytest.raises(ValueError, match="closed"):
        close_within(reduction, lambda: communicator.allreduce(x, out, reduction))
    with pytest.raises(ValueError, match="closed"):
        close_within(window, lambda: communicator.put(part, 1 - backend.rank, window))
    with load_nccl().Group():
        with contextlib.suppress(KeyError), load_nccl().Group():
            inner = communicator.premul_sum(2.0, "float32")
            communicator.allreduce(x, out, inner)
            raise KeyError
        inner.close()  # no longer part of the outer group
        communicator.allreduce(x, out)
    result = values(out)
    communicator.close()
    return result


def test_a_group_is_not_launched_without_what_it_uses() -> None:
    assert ranks(2, close_what_a_group_uses) == [[1, 3, 5, 7]] * 2


def collect_cycles(backend: Any) -> list[Any]:
    """The collector clears what a cycle holds before it frees it."""
    gpu = emulated_gpu()
    communicator = connect(backend)
    x = gpu.array(np.ones(4, np.float32))
    for make in (
        lambda: communicator.register(x),
        lambda: communicator.premul_sum(2.0, "float32"),
    ):
        cycle: list[Any] = [make()]
        cycle.append(cycle)
        del cycle
        gc.collect()
    x = ranked(backend.rank, 2)
    communicator.allreduce(x, x)
    result = values(x)
    communicator.close()
    return result


def test_what_a_communicator_keeps_may_be_part_of_a_cycle() -> None:
    assert ranks(2, collect_cycles) == [[1, 3]] * 2


def move_float8(backend: Any) -> list[Any]:
    os.environ["FERRO_EMULATION_COMPUTE_CAPABILITY"] = "89"
    gpu = emulated_gpu()
    communicator = connect(backend)
    x = gpu.array((np.arange(4) + backend.rank).astype(ml_dtypes.float8_e4m3fn))
    for reduction in ("allreduce", "reduce_scatter"):
        out = x if reduction == "allreduce" else gpu.empty(2, x.dtype)
        with pytest.raises(UnsupportedOp, match="sm_90"):
            getattr(communicator, reduction)(x, out)
    with pytest.raises(UnsupportedOp, match="sm_90"):
        communicator.premul_sum(2.0, "float8_e4m3fn")
    number, stream = fd.dtype_to_nccl("float8_e4m3fn"), gpu.stream()
    with pytest.raises(UnsupportedOp, match=r"allreduce: NCCL reduces float8_e4m3fn on.*sm_90"):
        communicator.allreduce_raw(x.address, x.address, 4, number, 0, stream)
    communicator.broadcast(x, x, 1)
    gpu.synchronize()
    communicator.broadcast_raw(x.address, x.address, 3, number, 0, stream)
    gpu.synchronize()
    result = values(x)
    communicator.close()
    return result


def test_float8_is_moved_by_gpus_that_cannot_add_it() -> None:
    assert ranks(2, move_float8) == [[1, 2, 3, 4]] * 2


def multiply_float8_alone(backend: Any) -> list[Any]:
    communicator = connect(backend)
    with pytest.raises(UnsupportedOp, match="one rank alone"):
        communicator.premul_sum(2.0, "float8_e5m2")
    x = emulated_gpu().empty(4, ml_dtypes.float8_e5m2)
    with pytest.raises(UnsupportedOp, match=r"no MEAN of float8_e5m2.*Use SUM and divide"):
        communicator.allreduce(x, x, ReduceOp.MEAN)
    x = ranked(1, 4)
    communicator.allreduce(x, x, communicator.premul_sum(2.0, "float32"))
    result = values(x)
    communicator.close()
    return result


def test_a_single_rank_multiplies_no_float8() -> None:
    assert ranks(1, multiply_float8_alone) == [[2, 4, 6, 8]]


def multiply_alone_on_another_device(backend: Any) -> list[Any]:
    gpu = emulated_gpu(devices=2)
    nccl = load_nccl()
    communicator = nccl.Communicator.init_rank(1, nccl.get_unique_id(), 0, device=1)
    with gpu.device(1):
        x, stream = gpu.array(np.arange(4.0)), gpu.stream()
        gpu.synchronize()  # the array is not written on that stream
    communicator.allreduce(x, x, communicator.premul_sum(2.0, "float64"), stream=stream)
    stream.synchronize()
    result = values(x)
    communicator.close()
    return result


def test_a_single_rank_computes_on_its_own_device() -> None:
    assert run_ranks(1, multiply_alone_on_another_device) == [[0, 2, 4, 6]]


def average_alone(backend: Any) -> int:
    communicator = connect(backend)
    signalling = np.array([0x7F800001], "uint32")  # any arithmetic makes a quiet NaN of it
    x = emulated_gpu().array(signalling.view("float32"))
    communicator.allreduce(x, x, "mean")
    (bits,) = x.numpy().view("uint32").tolist()
    communicator.close()
    return int(bits)


def test_the_mean_of_a_single_rank_computes_nothing() -> None:
    assert ranks(1, average_alone) == [0x7F800001]


# Groups


def raise_in_a_group(backend: Any) -> list[Any]:
    communicator = connect(backend)
    x = ranked(backend.rank)
    with contextlib.suppress(KeyError), load_nccl().Group():
        communicator.allreduce(x, x)
        raise KeyError
    untouched = values(x)
    communicator.allreduce(x, x)  # both ranks still agree on what comes next
    communicator.close()
    return untouched


def test_group_that_raises_launches_nothing() -> None:
    assert ranks(2, raise_in_a_group) == [[*range(8)], [*range(1, 9)]]


def raise_in_an_inner_group(backend: Any) -> list[Any]:
    communicator = connect(backend)
    group = load_nccl().Group
    outer, inner = ranked(backend.rank), ranked(backend.rank)
    with group():
        communicator.allreduce(outer, outer)
        with contextlib.suppress(KeyError), group():
            communicator.allreduce(inner, inner)
            raise KeyError
    result = [values(outer)[0], values(inner)[0]]
    communicator.close()
    return result


def test_inner_group_that_raises_takes_back_its_part_alone() -> None:
    assert ranks(2, raise_in_an_inner_group) == [[1, 0], [1, 1]]


def take_back_an_inner_group(backend: Any) -> tuple[bool, float]:
    """Nothing of it is left: no array, and no communicator that the outer one cannot have."""
    communicator, blocking = connect(backend), connect(backend, blocking=True)
    group = load_nccl().Group
    outer, inner = ranked(backend.rank), ranked(backend.rank)
    memory = weakref.ref(inner.memory)
    with group():
        communicator.allreduce(outer, outer)
        with contextlib.suppress(KeyError), group():
            blocking.allreduce(inner, inner)
            raise KeyError
        del inner
        gc.collect()
        is_kept = memory() is not None
    result = values(outer)[0]
    for each in (communicator, blocking):
        each.close()
    return is_kept, result


def test_inner_group_that_raises_leaves_nothing_in_the_outer_one() -> None:
    assert ranks(2, take_back_an_inner_group) == [(False, 1.0)] * 2


def call_on_the_stream_of_a_thread(backend: Any) -> list[float]:
    """NCCL has a thread of its own, which has another: nothing would be in order with this one."""
    of_thread = 2  # cudaStreamPerThread
    communicator, blocking = connect(backend), connect(backend, blocking=True)
    x = ranked(backend.rank, 2)
    number = fd.dtype_to_nccl("float32")
    calls: tuple[tuple[Any, ...], ...] = (
        (communicator.allreduce, x, x),
        (communicator.allreduce_coalesced, [x], [x]),
        (communicator.allreduce_raw, x.address, x.address, 2, number, 0),
    )
    for call, *arguments in calls:
        with pytest.raises(UnsupportedOp, match="Pass a stream"):
            call(*arguments, stream=of_thread)
    emulated_gpu().synchronize()
    blocking.allreduce(x, x, stream=of_thread)
    emulated_gpu().synchronize()
    result = values(x)
    for each in (communicator, blocking):
        each.close()
    return result


def test_the_default_stream_of_a_thread_takes_a_communicator_that_blocks() -> None:
    assert ranks(2, call_on_the_stream_of_a_thread) == [[1.0, 3.0]] * 2


def refuse_raw_ranks(backend: Any) -> list[float]:
    communicator = connect(backend)
    gpu = emulated_gpu()
    x, out = ranked(backend.rank, 2), gpu.empty(2)
    at, number, stream = x.address, fd.dtype_to_nccl("float32"), gpu.stream()
    calls: tuple[tuple[Any, ...], ...] = (
        (communicator.broadcast_raw, at, at, 2, number),
        (communicator.reduce_raw, at, at, 2, number, 0),
        (communicator.gather_raw, at, at, 1, number),
        (communicator.scatter_raw, at, at, 1, number),
        (communicator.send_raw, at, 2, number),
        (communicator.recv_raw, at, 2, number),
    )
    for call, *arguments in calls:
        for place in (2, -1):
            with pytest.raises(InvalidRank):
                call(*arguments, place, stream)
    with pytest.raises(SelfSend):
        communicator.send_raw(at, 2, number, backend.rank, stream)
    gpu.synchronize()
    with load_nccl().Group():  # where both ends are in a group, NCCL copies
        communicator.send_raw(at, 2, number, backend.rank, stream)
        communicator.recv_raw(out.address, 2, number, backend.rank, stream)
    gpu.synchronize()
    result = values(out)
    communicator.close()
    return result


def test_ranks_in_raw_calls_are_checked_and_the_communicator_goes_on() -> None:
    assert ranks(2, refuse_raw_ranks) == [[0.0, 1.0], [1.0, 2.0]]


def capture_a_part_of_a_group(backend: Any) -> list[list[float]]:
    """NCCL would refuse it, and a communicator that does not block would end."""
    gpu = emulated_gpu()
    communicator = connect(backend)
    x, y = ranked(backend.rank, 2), ranked(backend.rank, 2)
    communicator.allreduce(x, x)  # connects the ranks, for which a capture cannot wait
    captured, other = gpu.stream(), gpu.stream()
    gpu.synchronize()

    def reduce_on(*streams: Any) -> None:
        with load_nccl().Group():
            for array, stream in zip((x, y), streams, strict=True):
                communicator.allreduce(array, array, stream=stream)

    with gpu.capture(captured) as graph:
        for streams in ((captured, other), (other, captured)):
            with pytest.raises(DistributedError, match="some streams are captured"):
                reduce_on(*streams)
        gpu.order(captured, other)
        reduce_on(captured, other)
        gpu.order(other, captured)
    graph.launch(captured)
    captured.synchronize()
    graph.close()
    reduce_on(captured, other)
    gpu.synchronize()
    result = [values(x), values(y)]
    communicator.close()
    return result


def test_a_group_is_captured_as_a_whole_or_not_at_all() -> None:
    assert ranks(2, capture_a_part_of_a_group) == [[[4.0, 12.0], [2.0, 6.0]]] * 2


def drop_a_stream_in_a_group(backend: Any) -> list[float]:
    gpu = emulated_gpu()
    communicator = connect(backend)
    x = ranked(backend.rank, 2)
    number = fd.dtype_to_nccl("float32")
    gpu.synchronize()
    with load_nccl().Group():
        communicator.allreduce(x[:1], x[:1], stream=gpu.stream())
        communicator.allreduce_raw(x[1:].address, x[1:].address, 1, number, 0, gpu.stream())
    gpu.synchronize()
    result = values(x)
    communicator.close()
    return result


def test_a_group_keeps_the_streams_of_its_operations() -> None:
    assert ranks(2, drop_a_stream_in_a_group) == [[1.0, 3.0]] * 2


def end_a_group_elsewhere(backend: Any) -> list[Any]:
    """Its thread goes on collecting, so that it launches there what is called there."""
    communicator = connect(backend)
    group = load_nccl().Group()
    x = ranked(0)
    seen: list[Any] = []

    def end() -> None:
        try:
            group.__exit__(None, None, None)
        except RuntimeError as error:
            seen.append(str(error))

    with group:
        communicator.allreduce(x, x)
        thread = threading.Thread(target=end)
        thread.start()
        thread.join(TIMEOUT_S)
    seen.append(values(x)[1])
    communicator.close()
    return seen


def test_a_group_ends_in_its_own_thread() -> None:
    assert ranks(1, end_a_group_elsewhere) == [
        ["A group must end in the thread in which it began, after those within it.", 1.0]
    ]


def reduce_coalesced(backend: Any) -> list[list[Any]]:
    communicator = connect(backend)
    arrays = [ranked(backend.rank + i, 2) for i in range(50)]
    communicator.allreduce_coalesced(arrays, arrays)
    result = [values(array) for array in arrays]
    communicator.close()
    return result


def test_coalesced_arrays_are_each_reduced() -> None:
    expected = [[2.0 * i + 1, 2.0 * i + 3] for i in range(50)]
    assert ranks(2, reduce_coalesced) == [expected] * 2


def refuse_coalesced_arrays_that_share_memory(backend: Any) -> list[list[float]]:
    communicator: Any = connect(backend)
    x, y = ranked(backend.rank, 8), ranked(backend.rank, 8)
    none = emulated_gpu().empty(0)
    for xs, outs in (
        ([x, x], [y, y]),
        ([x[:4], x[4:]], [y[:4], y[3:7]]),
        ([x, y], [y, emulated_gpu().empty(8)]),
        ([x[:4], x[2:6]], [x[:4], y[:4]]),
    ):
        with pytest.raises(InvalidArray, match="an array of outs overlaps another of"):
            communicator.allreduce_coalesced(xs, outs)
    with pytest.raises(TypeError, match="not a sequence"):
        communicator.allreduce_coalesced({1: x, 2: y}, [x, y])
    both = [x[:4], x[2:6], none], [y[:4], y[4:], none]  # inputs may overlap
    communicator.allreduce_coalesced(*both)
    result = [values(x), values(y)]
    communicator.close()
    return result


def test_coalesced_results_share_no_memory() -> None:
    own = np.arange(8.0)
    for rank, (x, y) in enumerate(ranks(2, refuse_coalesced_arrays_that_share_memory)):
        assert x == list(own + rank)
        assert y == list(2 * np.r_[own[:4], own[2:6]] + 1)


def coalesce_in_a_group(backend: Any) -> list[list[Any]]:
    communicator = connect(backend)
    group = load_nccl().Group
    xs = [ranked(backend.rank, 2) for _ in range(3)]
    with contextlib.suppress(SizeMismatch), group():
        communicator.allreduce(xs[0], xs[0])
        communicator.allreduce_coalesced(xs[1:], [xs[1], emulated_gpu().empty(3)])
    untouched = [values(x) for x in xs]
    with group():
        communicator.allreduce(xs[0], xs[0])
        communicator.allreduce_coalesced(xs[1:], xs[1:])
        before = values(xs[1])  # written down, not launched
    result = [*untouched, before, *(values(x) for x in xs)]
    communicator.close()
    return result


def test_coalesced_arrays_may_be_part_of_a_group() -> None:
    for rank, result in enumerate(ranks(2, coalesce_in_a_group)):
        assert result == [[rank, rank + 1]] * 4 + [[1, 3]] * 3


# Arguments


def refuse_bad_arguments(backend: Any) -> None:
    gpu = emulated_gpu()
    communicator: Any = connect(backend)
    x = ranked(0)
    strided = gpu.array(np.zeros((4, 4), np.float32))[:, 1]
    with pytest.raises(UnsupportedOp, match="HybridBackend"):
        communicator.allreduce(np.zeros(8, np.float32), x)
    with pytest.raises(InvalidArray, match="not C-contiguous"):
        communicator.allreduce(strided, strided)
    with pytest.raises(InvalidArray, match="x is float32 and out is int32"):
        communicator.allreduce(x, gpu.empty(8, "int32"))
    with pytest.raises(SizeMismatch):
        communicator.allreduce(x, gpu.empty(7))
    with pytest.raises(InvalidArray, match="overlap"):
        communicator.allreduce(x[:4], x[2:6])
    with pytest.raises(UnsupportedOp, match="mean of integers"):
        communicator.allreduce(gpu.empty(4, "int32"), gpu.empty(4, "int32"), ReduceOp.MEAN)
    with pytest.raises(UnsupportedOp, match="int16"):
        communicator.allreduce(gpu.empty(4, "int16"), gpu.empty(4, "int16"))
    for root in (2, -1, None, "0", 0.0, True):
        with pytest.raises(InvalidRank):
            communicator.broadcast(x, x, root)
    for op in ("median", None, 99, 2.5, 2):  # 2 is NCCL's MAX, and our PROD
        with pytest.raises(UnsupportedOp, match="There is no reduction"):
            communicator.allreduce(x, x, op)
    with pytest.raises(SelfSend):
        communicator.send(x, backend.rank)
    with pytest.raises(InvalidRank, match="excludes itself"):
        communicator.shrink([backend.rank])
    with pytest.raises(InvalidRank, match="no rank is excluded"):
        communicator.shrink([])
    with pytest.raises(InvalidArray, match="not C-contiguous"):
        communicator.register_window(strided)
    for excluded in (None, 1):
        with pytest.raises(TypeError, match="excluded must be the ranks to leave out"):
            communicator.shrink(excluded)
    for color, key in ((0.5, 0), (0, None), (True, 0)):
        with pytest.raises(TypeError, match=r"split: (color|key) must be an integer, not"):
            communicator.split(color, key)
    for scalar in (None, "2", [1, 2]):
        with pytest.raises(TypeError, match="premul_sum: scalar must be a number, not"):
            communicator.premul_sum(scalar, "float32")
    with pytest.raises(ValueError, match="premul_sum: scalar is an integer beyond all floats"):
        communicator.premul_sum(-(10**400), "float32")
    for stream in ("0", True, -1, 1 << 64):
        with pytest.raises(TypeError, match="or the address of a CUDA stream, not"):
            communicator.allreduce(x, x, stream=stream)
    weighted = communicator.premul_sum(2, "float64")
    with pytest.raises(InvalidArray, match="x is float32, and this PreMulSum multiplies float64"):
        communicator.allreduce(x, x, weighted)
    weighted.close()
    for timeout in (0, -1, float("nan")):
        with pytest.raises(ValueError, match="positive number of seconds"):
            communicator.timeout = timeout
    communicator.allreduce(x, x, "max")  # nothing of it harmed the communicator
    communicator.close()


def test_bad_arguments_are_refused_before_anything_is_sent() -> None:
    ranks(2, refuse_bad_arguments)


def refuse_unknown_options(backend: Any) -> None:
    emulated_gpu()
    nccl = load_nccl()

    def make(world_size: Any = 1, rank: Any = 0, device: Any = 0, **options: Any) -> None:
        nccl.Communicator.init_rank(
            world_size, nccl.get_unique_id(), rank, device=device, **options
        ).close()

    with pytest.raises(TypeError, match="max_ctas"):
        make(maximum=3)
    for name, value in (
        ("max_ctas", "3"),
        ("max_ctas", 1.5),
        ("max_ctas", 1 << 40),
        ("net_name", 3),  # bytes(3) would be three zeros
        ("net_name", None),
        ("comm_name", "a\0b"),
    ):
        with pytest.raises(TypeError, match=f"The option {name} must be"):
            make(**{name: value})
    for place in ((2, 2), (2, -1), (2, "0")):
        with pytest.raises(InvalidRank):
            make(*place)
    with pytest.raises(InvalidWorldSize):
        make(0)
    for device in (1, -1):  # with one, it would be made on the current device, and misnamed
        with pytest.raises(BackendUnavailable, match=f"GPU {device} is not among the 1 that"):
            make(device=device)
    with pytest.raises(TypeError, match="number of a GPU"):
        make(device="0")
    for timeout in (0, float("nan")):
        with pytest.raises(ValueError, match="positive number of seconds"):
            make(timeout=timeout)
    for unique_ids in (None, bytes(128), [bytes(128)], [None]):
        with pytest.raises(TypeError, match="a UniqueId or several, not"):
            nccl.Communicator.init_rank(1, unique_ids, 0)
    with pytest.raises(TypeError, match="not a sequence"):
        nccl.Communicator.init_rank(1, {nccl.get_unique_id()}, 0)
    make(comm_name="a", net_name=b"Socket", max_ctas=np.int64(4))


def test_a_least_number_of_ctas_needs_no_greatest() -> None:
    ranks(1, ask_for_ctas)


def ask_for_ctas(backend: Any) -> None:
    communicator = connect(backend, min_ctas=4)
    child = communicator.split(0, 0, min_ctas=np.int64(4))
    assert child is not None
    child.close()
    communicator.close()
    with pytest.raises(DistributedError, match="invalid argument"):
        connect(backend, min_ctas=4, max_ctas=2)


def test_unknown_options_and_places_are_refused() -> None:
    ranks(1, refuse_unknown_options)


def call_what_nobody_made(backend: Any) -> None:
    communicator_class = type(connect(backend))
    empty = communicator_class.__new__(communicator_class)
    for call in (empty.async_error, empty.finalize, empty.last_error, lambda: empty.split(0, 0)):
        with pytest.raises(TypeError, match=r"Communicator\.init_rank"):
            call()
    x = ranked(backend.rank, 4)
    with pytest.raises(TypeError, match=r"Communicator\.init_rank"):
        empty.reduce_scatter(x, x)
    with pytest.raises(TypeError, match=r"Communicator\.init_rank"):
        empty.allreduce_raw(x.address, x.address, 4, fd.dtype_to_nccl("float32"), 0, 0)
    empty.close()


def test_a_communicator_that_was_never_made_is_no_crash() -> None:
    ranks(1, call_what_nobody_made)


def compare_unique_ids(backend: Any) -> None:
    emulated_gpu()
    nccl = load_nccl()
    one, other = nccl.get_unique_id(), nccl.get_unique_id()
    assert one == nccl.UniqueId(bytes(one)) == pickle.loads(pickle.dumps(one))
    assert hash(one) == hash(nccl.UniqueId(bytes(one)))
    assert one != other
    assert len(bytes(one)) == 128
    with pytest.raises(ValueError, match="128 bytes"):
        nccl.UniqueId(b"short")
    with pytest.raises(TypeError, match="made of 128 bytes, not of 128"):
        nccl.UniqueId(128)  # bytes(128) would be so many zeros
    for data in (None, "text"):
        with pytest.raises(TypeError, match="made of 128 bytes"):
            nccl.UniqueId(data)


def test_unique_ids_are_values() -> None:
    ranks(1, compare_unique_ids)


# More communicators


def share_with_a_child(backend: Any) -> list[float]:
    """NCCL takes one call at a time on both, and what aborts the child stops the parent's work."""
    gpu = emulated_gpu(faults="point=launch,hit=4,act=slow,ms=50")
    communicator = connect(backend, split_share=True)
    child = communicator.split(0, backend.rank)
    assert child is not None
    for each in (communicator, child):  # the first calls connect the ranks, and so need one order
        x = ranked(backend.rank, 1)
        each.allreduce(x, x)
    results = []

    def call(each: Any) -> None:
        with gpu.stream():
            x = ranked(backend.rank, 1)
            each.allreduce(x, x)
            results.append(values(x)[0])

    threads = [threading.Thread(target=call, args=(each,)) for each in (communicator, child)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    child.abort()
    x = ranked(backend.rank, 1)
    with pytest.raises(ChannelClosed, match="aborted"):
        communicator.allreduce(x, x)
    communicator.close()
    return results


def test_communicators_that_share_resources_take_turns_and_end_together() -> None:
    assert ranks(2, share_with_a_child) == [[1.0, 1.0]] * 2


def reduce_in_one_group(backend: Any) -> list[float]:
    communicator = connect(backend, split_share=True)
    child = communicator.split(0, backend.rank)
    assert child is not None
    x, y = ranked(backend.rank, 1), ranked(backend.rank, 1)
    for _ in range(20):
        with load_nccl().Group():
            communicator.allreduce(x, x, ReduceOp.MAX)
            child.allreduce(y, y, ReduceOp.MAX)
    results = [*values(x), *values(y)]
    child.close()
    communicator.close()
    return results


def test_communicators_that_share_resources_may_be_part_of_one_group() -> None:
    assert ranks(2, reduce_in_one_group) == [[1.0, 1.0]] * 2


def stop_what_shares(backend: Any, stop: str) -> float:
    """What stops one communicator's work stops that of others, but none of what is made later."""
    emulated_gpu()
    communicator = connect(backend, split_share=True, shrink_share=True)
    sibling = communicator.split(0, backend.rank)
    assert sibling is not None
    backend.barrier(False, None, 0)
    if backend.rank == 2:
        communicator.abort()
        return 0
    if stop == "revoke":
        communicator.revoke()
        child = communicator.shrink([2])
    else:
        child = communicator.shrink([2], abort=True)
    with pytest.raises(ChannelClosed, match="aborted"):
        sum_over(sibling)
    communicator.abort()
    total = sum_over(child)
    child.close()
    return total


@pytest.mark.parametrize("stop", ["revoke", "shrink"])
def test_what_stops_the_work_of_a_communicator_fails_those_that_share_with_it(stop: str) -> None:
    assert ranks(3, stop_what_shares, stop) == [2.0, 2.0, 0]


def split_in_two(backend: Any) -> tuple[int, int] | None:
    communicator = connect(backend, comm_name="parent", max_ctas=4)
    part = communicator.split(None if backend.rank == 2 else 0, -backend.rank)
    place = None if part is None else (part.rank, part.world_size)
    if part is not None:
        part.close()
    communicator.close()
    return place


def test_split_orders_ranks_by_key_and_leaves_out_those_without_color() -> None:
    assert ranks(3, split_in_two) == [(1, 2), (0, 2), None]


def fail_under_a_name(backend: Any) -> str:
    """NCCL keeps the address of a communicator's name."""
    gpu = emulated_gpu()
    communicator = connect(backend, comm_name="the" + " parent" * 4)
    others = [bytes([65 + number % 26]) * 31 for number in range(1000)]
    gpu.set_faults("point=allreduce,act=remote_error")
    x = ranked(backend.rank, 2)
    with contextlib.suppress(DistributedError):
        communicator.allreduce(x, x)
        gpu.synchronize()
    communicator.close()
    del others
    return str(load_nccl().get_last_error())


def test_the_name_of_a_communicator_lives_as_long_as_it_does() -> None:
    for words in ranks(2, fail_under_a_name):
        assert words.startswith("the" + " parent" * 4)


def shrink_by_one(backend: Any) -> list[Any] | None:
    communicator = connect(backend)
    if backend.rank == 1:
        communicator.close()
        return None
    smaller = communicator.shrink([1])
    x = ranked(smaller.rank, 2)
    smaller.allreduce(x, x)
    result = values(x)
    smaller.close()
    communicator.close()
    return [smaller.rank, smaller.world_size, result]


def test_shrunk_communicator_works_without_the_excluded() -> None:
    assert ranks(3, shrink_by_one) == [[0, 2, [1, 3]], None, [1, 2, [1, 3]]]


# Ends


def use_after_the_end(backend: Any) -> None:
    closed, aborted = connect(backend), connect(backend)
    closed.close()
    closed.close()
    assert closed.is_closed
    aborted.abort()
    aborted.abort()
    x = ranked(0)
    with pytest.raises(ChannelClosed, match="closed"):
        closed.allreduce(x, x)
    with pytest.raises(ChannelClosed, match="aborted"):
        aborted.allreduce(x, x)


def test_end_is_idempotent_and_refuses_later_calls() -> None:
    ranks(2, use_after_the_end)


def abort_while_another_thread_waits(backend: Any) -> str:
    communicator = connect(backend)
    if backend.rank == 1:
        backend.barrier(False, None, 0)  # never splits: the other rank waits for us
        communicator.abort()
        return ""
    raised: list[BaseException] = []

    def split() -> None:
        try:
            communicator.split(0, 0)
        except DistributedError as error:
            raised.append(error)

    thread = threading.Thread(target=split)
    thread.start()
    backend.barrier(False, None, 0)
    communicator.abort()
    thread.join(TIMEOUT_S / 2)
    assert not thread.is_alive()
    return type(raised[0]).__name__


def test_abort_frees_a_thread_that_waits_in_a_call() -> None:
    assert ranks(2, abort_while_another_thread_waits)[0] == "ChannelClosed"


def wait_for_nobody(backend: Any) -> None:
    emulated_gpu()
    nccl = load_nccl()
    if backend.rank == 0:
        with pytest.raises(Timeout, match="was not done after"):
            nccl.Communicator.init_rank(2, nccl.get_unique_id(), 0, device=0, timeout=0.2)


def test_init_without_the_others_times_out() -> None:
    ranks(2, wait_for_nobody)


def fork_and_call(backend: Any) -> int:
    communicator = connect(backend)
    from ferro_dist._native.nccl_memory import NcclMemory

    x = ranked(0)
    kept = (
        communicator.premul_sum(2.0, "float32"),
        communicator.register(x),
        communicator.register_window(NcclMemory(1 << 12)),
    )
    child = os.fork()
    if child == 0:
        try:
            with pytest.raises(LockPoisoned):
                communicator.allreduce(x, x)
            for each in (*kept, communicator):
                each.close()  # they are the parent's
            os._exit(7)
        finally:
            os._exit(1)
    _, status = os.waitpid(child, 0)
    communicator.allreduce(x, x, kept[0])
    emulated_gpu().synchronize()
    for each in (*kept, communicator):
        each.close()
    return os.waitstatus_to_exitcode(status)


def test_forked_child_is_refused_and_the_parent_goes_on() -> None:
    assert ranks(2, fork_and_call) == [7, 7]


def leave_it_open(backend: Any) -> None:
    communicator = connect(backend)
    x = ranked(0)
    communicator.allreduce(x, x)
    globals()["left_open"] = communicator


def test_interpreter_exits_with_a_communicator_open() -> None:
    ranks(2, leave_it_open)


def drop_without_closing(backend: Any) -> None:
    for _ in range(20):
        connect(backend)
    gpu, communicator = emulated_gpu(), connect(backend)
    gpu.set_faults("point=destroy,act=stuck")
    del communicator
    wait_until_stuck(gpu, 1)  # in the reaper, which keeps nobody else
    gpu.set_faults("")


def test_dropped_communicators_are_ended_by_the_reaper() -> None:
    ranks(2, drop_without_closing)


def close_with_less_patience(backend: Any) -> bool:
    """The first close waits for long; the second one ends what the first began."""
    gpu = emulated_gpu()
    communicator = connect(backend)
    x = ranked(0)
    gpu.set_faults("point=allreduce,act=hang")
    communicator.allreduce(x, x)
    gpu.set_faults("")
    thread = threading.Thread(target=communicator.close)
    thread.start()
    while not is_refused(communicator):
        os.sched_yield()
    communicator.close(timeout=0.2)
    thread.join(TIMEOUT_S / 2)
    return communicator.is_closed and not thread.is_alive()


def is_refused(communicator: Any) -> bool:
    try:
        communicator.async_error()
    except ChannelClosed:
        return True
    return False


def test_a_later_close_may_have_less_patience() -> None:
    assert ranks(1, close_with_less_patience) == [True]


def close_whatever_time_it_takes(backend: Any, timeout: float) -> bool:
    communicator = connect(backend)
    sum_over(communicator)
    if backend.rank == 1:
        backend.barrier(False, None, 0)
        communicator.close()
        return True
    thread = threading.Thread(target=lambda: communicator.close(timeout=timeout))
    thread.start()
    thread.join(0.5)
    waits = thread.is_alive()
    backend.barrier(False, None, 0)
    thread.join(TIMEOUT_S)
    return waits and communicator.is_closed


@pytest.mark.parametrize("timeout", [1e10, float("inf")])
def test_the_end_waits_for_the_others_as_long_as_it_may(timeout: float) -> None:
    """The clock of deadlines counts no further than 292 years."""
    assert ranks(2, close_whatever_time_it_takes, timeout) == [True, True]


def hang_in_the_end(backend: Any) -> tuple[bool, bool]:
    """One communicator's destruction and another's deregistration never return."""
    gpu = emulated_gpu()
    destroyed, registering, healthy = (connect(backend) for _ in range(3))
    registration = registering.register(ranked(0))
    gpu.set_faults("point=destroy,act=stuck;point=deregister,act=stuck")
    thread = threading.Thread(target=destroyed.close)
    try:
        thread.start()
        wait_until_stuck(gpu, 1)
        del registration  # the reaper gives it back
        wait_until_stuck(gpu, 2)
        # The one that hangs in deregistering has the device's lock: the end of the healthy one
        # waits for its time, then aborts.
        healthy.close(timeout=0.2)
        ended = healthy.is_closed, destroyed.is_closed
    finally:
        gpu.set_faults("")
    thread.join(TIMEOUT_S)
    registering.close()
    return ended


def test_a_communicator_that_hangs_in_its_end_holds_up_no_other() -> None:
    assert ranks(1, hang_in_the_end) == [(True, False)]


def drop_one_that_blocks(backend: Any) -> list[float]:
    """NCCL waits in its end for the other rank, which waits for this one in another call."""
    gone, kept = [connect(backend, blocking=True) for _ in range(2)]
    x = ranked(backend.rank)
    for communicator in (gone, kept):
        communicator.allreduce(x, x)
    emulated_gpu().synchronize()
    backend.barrier(False, None, 0)
    is_closed = gone if backend.rank == 1 else None
    del gone, communicator
    gc.collect()
    kept.allreduce(x, x)
    result = values(x)[:2]
    if is_closed is not None:
        is_closed.close()
    kept.close()
    return result


def test_one_that_blocks_in_its_end_holds_up_no_other() -> None:
    assert ranks(2, drop_one_that_blocks) == [[4, 12]] * 2


def forget_a_group(backend: Any) -> None:
    communicator = connect(backend)
    x = ranked(0)
    group = load_nccl().Group()
    group.__enter__()
    address = id(group)
    del group
    gc.collect()
    others = [load_nccl().Group() for _ in range(100)]
    assert address not in map(id, others)  # its memory is still its own
    communicator.allreduce(x, x)


def test_a_group_that_is_open_is_kept_by_its_thread() -> None:
    ranks(1, forget_a_group)


def end_twice(backend: Any) -> None:
    emulated_gpu()
    group = load_nccl().Group()
    with group, pytest.raises(RuntimeError, match="open already"):
        group.__enter__()
    with pytest.raises(RuntimeError, match="not open"):
        group.__exit__(None, None, None)


def test_a_group_is_open_once() -> None:
    ranks(1, end_twice)


def end_the_outer_group_first(backend: Any) -> list[float]:
    communicator = connect(backend)
    x = ranked(backend.rank)
    outer, inner = load_nccl().Group(), load_nccl().Group()
    with outer:
        inner.__enter__()
        communicator.allreduce(x, x)
        with pytest.raises(RuntimeError, match="after those within it"):
            outer.__exit__(None, None, None)
        inner.__exit__(None, None, None)
    result = values(x)
    communicator.close()
    return result


def test_a_group_ends_after_the_groups_within_it() -> None:
    assert ranks(2, end_the_outer_group_first) == [[1, 3, 5, 7, 9, 11, 13, 15]] * 2


def ask_while_locked(backend: Any) -> str:
    """Another thread hangs inside NCCL with the device's lock, and needs the GIL to go on."""
    gpu = emulated_gpu()
    from ferro_dist._native.nccl_memory import NcclMemory

    communicator, other = connect(backend), connect(backend)
    gpu.set_faults("point=mem_alloc,act=stuck")
    thread = threading.Thread(target=NcclMemory, args=(64,))
    thread.start()
    wait_until_stuck(gpu, 1)
    text: str = communicator.last_error()
    gpu.set_faults("")
    thread.join(TIMEOUT_S)
    communicator.close()
    other.close()
    return text


def test_the_last_error_is_told_while_another_thread_hangs() -> None:
    assert ranks(1, ask_while_locked) == [""]


def make_blocking_children(backend: Any) -> list[bool]:
    parent = connect(backend)
    child = parent.split(0, 0, blocking=True)
    assert child is not None
    grandchild = child.split(0, 0)
    assert grandchild is not None
    smaller = child.shrink([1]) if backend.rank == 0 else None
    made = [parent.is_blocking, child.is_blocking, grandchild.is_blocking]
    for each in (smaller, grandchild, child, parent):
        if each is not None:
            each.close()
    return made


def test_children_block_as_their_own_options_say() -> None:
    assert ranks(2, make_blocking_children) == [[False, True, False]] * 2


def raise_in_calls(backend: Any) -> list[int | None]:
    gpu = emulated_gpu()
    nccl = load_nccl()
    communicator = connect(backend)
    backend.barrier(False, None, 0)
    gpu.set_faults("point=allreduce,act=system_error")
    x = ranked(0)
    raised: list[int | None] = []
    with pytest.raises(DistributedError) as told:
        communicator.allreduce(x, x)
    raised.append(told.value.rank)
    communicator.abort()
    for call in (communicator.async_error, lambda: communicator.split(0, 0), communicator.suspend):
        with pytest.raises(DistributedError) as told:
            call()
        raised.append(told.value.rank)
    if backend.rank == 1:
        with pytest.raises(Timeout) as told:
            nccl.Communicator.init_rank(2, nccl.get_unique_id(), 1, device=0, timeout=0.1)
        raised.append(told.value.rank)
    return raised


def test_errors_name_the_rank_that_raises() -> None:
    assert ranks(2, raise_in_calls) == [[0] * 4, [1] * 5]


# What newer versions have


def sum_over(communicator: Any) -> float:
    x = emulated_gpu().array(np.ones(1, np.float32))
    communicator.allreduce(x, x)
    return values(x)[0]


def grow_by_one(backend: Any) -> tuple[int, int, float]:
    """Ranks 0 and 1 are there, and rank 2 joins."""
    emulated_gpu()
    nccl = load_nccl()
    pair = backend.split([0, 1])
    grown = None
    mine = np.zeros(128, np.uint8)
    if pair is not None:
        small = connect(pair)
        if backend.rank == 0:
            mine[:] = np.frombuffer(bytes(small.unique_id()), np.uint8)
    shared = nccl.UniqueId(bytes(fd.broadcast(mine, backend, root=0)))
    if pair is not None:
        grown = small.grow(3, shared if backend.rank == 0 else None, max_ctas=2)
        assert sum_over(small) == 2  # the parent goes on
        small.close()
    else:
        grown = nccl.Communicator.join(3, shared, 2, device=0, timeout=TIMEOUT_S)
    outcome = grown.rank, grown.world_size, sum_over(grown)
    grown.close()
    return outcome


def test_a_communicator_grows_by_ranks_that_join() -> None:
    assert ranks(3, grow_by_one) == [(rank, 3, 3.0) for rank in range(3)]


def divide_by_impossible_numbers(backend: Any) -> int:
    communicator = connect(backend)
    for color in (-1, 1 << 31):
        with pytest.raises(ValueError, match=f"color must be from 0 to .*, and is {color}"):
            communicator.split(color, 0)
    for key in (1 << 31, -1 << 40):
        with pytest.raises(ValueError, match=f"key must be from .*, and is {key}"):
            communicator.split(0, key)
    for world_size in (0, 1, 1 << 31, "2"):
        with pytest.raises(InvalidWorldSize, match="world_size must be"):
            communicator.grow(world_size)  # type: ignore[arg-type]
    child = communicator.split((1 << 31) - 1, -1 << 31)
    assert child is not None
    world_size = child.world_size
    child.close()
    communicator.close()
    return world_size


def test_colors_keys_and_sizes_that_nccl_cannot_take_are_refused() -> None:
    assert ranks(1, divide_by_impossible_numbers) == [1]


def call_without_end(communicator: Any) -> None:
    while True:
        communicator.memory_statistics()


def call_while_it_grows(backend: Any) -> tuple[int, int, float]:
    """NCCL uses the parent's connections until the new ranks are there, without saying so."""
    emulated_gpu()
    nccl = load_nccl()
    pair = backend.split([0, 1])
    mine = np.zeros(128, np.uint8)
    if pair is not None:
        small = connect(pair)
        if backend.rank == 0:
            mine[:] = np.frombuffer(bytes(small.unique_id()), np.uint8)
    shared = nccl.UniqueId(bytes(fd.broadcast(mine, backend, root=0)))
    if pair is not None:
        small.timeout = 0.1
        with ThreadPoolExecutor(1) as thread:
            unique_id = shared if backend.rank == 0 else None
            growing = thread.submit(small.grow, 3, unique_id, timeout=TIMEOUT_S)
            with pytest.raises(Timeout):
                call_without_end(small)
            fd.barrier(backend)
            grown = growing.result()
        grown.timeout = small.timeout = TIMEOUT_S
        assert sum_over(small) == 2  # the parent goes on
        small.close()
    else:
        fd.barrier(backend)
        grown = nccl.Communicator.join(3, shared, 2, device=0, timeout=TIMEOUT_S)
    outcome = grown.rank, grown.world_size, sum_over(grown)
    grown.close()
    return outcome


def test_a_communicator_that_grows_takes_no_other_call() -> None:
    assert ranks(3, call_while_it_grows) == [(rank, 3, 3.0) for rank in range(3)]


def give_up_growing(backend: Any, is_new_missing: bool) -> str:
    """What is being made waits for rank 1, by its parent's connections, or for a new rank."""
    emulated_gpu()
    communicator = connect(backend)
    ended = ""
    unique_id = communicator.unique_id() if backend.rank == 0 else None
    if backend.rank == 0 or is_new_missing:
        with pytest.raises(Timeout) as told:
            communicator.grow(3, unique_id, timeout=0.1)
        ended = str(told.value.op)
        communicator.close()
    fd.barrier(backend)
    communicator.abort()
    return ended


@pytest.mark.parametrize("is_new_missing", [False, True])
def test_a_communicator_that_gives_up_growing_ends(is_new_missing: bool) -> None:
    expected = ["grow", "grow" if is_new_missing else ""]
    assert ranks(2, give_up_growing, is_new_missing) == expected


def connect_by_several_ids(backend: Any) -> float:
    emulated_gpu()
    nccl = load_nccl()
    mine = np.frombuffer(bytes(nccl.get_unique_id()), np.uint8)
    # Of two ranks out of three, as programs with thousands have some roots.
    ids = [nccl.UniqueId(bytes(fd.broadcast(mine, backend, root=root))) for root in (0, 2)]
    with pytest.raises(ValueError, match="empty"):
        nccl.Communicator.init_rank(3, [], backend.rank, device=0)
    communicator = nccl.Communicator.init_rank(3, ids, backend.rank, device=0, timeout=TIMEOUT_S)
    total = sum_over(communicator)
    communicator.close()
    return total


def test_several_unique_ids_make_one_communicator() -> None:
    assert ranks(3, connect_by_several_ids) == [3.0] * 3


def revoke_what_hangs(backend: Any) -> float:
    """Rank 1 never calls; the others stop waiting, and go on without it."""
    gpu = emulated_gpu()
    communicator = connect(backend)
    sum_over(communicator)  # connects the ranks, for which the call below would wait otherwise
    if backend.rank == 1:
        backend.barrier(False, None, 0)
        communicator.abort()
        return 0
    stream = gpu.stream()
    with stream:
        x = ranked(0)
        communicator.allreduce(x, x)
        communicator.revoke()
        stream.synchronize()  # what was under way has ended
    with pytest.raises(DistributedError):
        communicator.allreduce(x, x)
    smaller = communicator.shrink([1])
    total = sum_over(smaller)
    smaller.close()
    communicator.close()
    backend.barrier(False, None, 0)
    return total


def test_revoke_stops_what_hangs_and_shrink_follows() -> None:
    assert ranks(3, revoke_what_hangs) == [2.0, 0, 2.0]


def call_after_the_work_has_ended(backend: Any) -> float:
    revoked, finalized = connect(backend), connect(backend)
    revoked.revoke()
    revoked.revoke()
    with pytest.raises(DistributedError, match="invalid usage: the communicator was revoked"):
        revoked.finalize()
    child = revoked.split(0, 0)
    assert child is not None
    finalized.finalize()
    finalized.finalize()
    x = ranked(0)

    def reduce_in_a_group() -> None:
        with load_nccl().Group():
            finalized.allreduce(x, x)

    calls: tuple[Callable[[], object], ...] = (
        lambda: finalized.allreduce(x, x),
        reduce_in_a_group,
        finalized.revoke,
        finalized.suspend,
        lambda: finalized.split(0, 0),
        lambda: finalized.shrink([1 - backend.rank]),
    )
    for call in calls:
        with pytest.raises(DistributedError, match="was finalized: only its end can follow"):
            call()
    total = sum_over(child)
    for each in (child, revoked, finalized):
        each.close()
    return total


def test_what_cannot_follow_the_end_of_the_work_is_refused() -> None:
    assert ranks(2, call_after_the_work_has_ended) == [2.0] * 2


def suspend_and_resume(backend: Any) -> float:
    communicator = connect(backend)
    before = communicator.memory_statistics()
    assert before["total"] == before["persistent"] + before["suspendable"]
    assert not before["is_suspended"]
    communicator.suspend()
    assert communicator.memory_statistics()["is_suspended"]
    x = ranked(0)
    with pytest.raises(DistributedError, match="suspended: resume it first"):
        communicator.allreduce(x, x)
    with pytest.raises(DistributedError, match="suspended: resume it first"):
        communicator.suspend()
    communicator.resume()
    with pytest.raises(DistributedError, match="not suspended"):
        communicator.resume()
    assert not communicator.memory_statistics()["is_suspended"]
    total = sum_over(communicator)
    communicator.close()
    return total


def test_a_suspended_communicator_works_once_it_is_resumed() -> None:
    assert ranks(2, suspend_and_resume) == [2.0] * 2


def drop_memory_in_use(backend: Any) -> list[float]:
    """NCCL takes memory away while the GPU uses it: first the stream must be done with it."""
    gpu = emulated_gpu()
    from ferro_dist._native.nccl_memory import NcclMemory

    communicator = connect(backend)
    stream = gpu.stream()
    results = []
    for is_closed in (False, True):
        with stream:
            memory = NcclMemory(4096)
            x = array_over(memory, (1024,), np.dtype("float32"))
            gpu.write(x, np.full(1024, 7.0))
            out = gpu.empty(1024)
            stream.synchronize()
            gpu.set_delay(50_000)
            communicator.broadcast(x, out, 0)
            del x
            if is_closed:
                memory.close()
            del memory
            gc.collect()
            results.append(values(out)[-1])
            gpu.set_delay(0)
    communicator.close()
    return results


def test_memory_is_freed_when_the_stream_has_passed_its_use() -> None:
    assert ranks(2, drop_memory_in_use) == [[7.0, 7.0]] * 2


def put_into_the_next_rank(backend: Any) -> list[list[float]]:
    gpu = emulated_gpu(delay_us=300)
    from ferro_dist._native.nccl_memory import NcclMemory

    communicator = connect(backend, num_rma_sig=2)
    right, left = (backend.rank + 1) % 3, (backend.rank - 1) % 3
    memory, unreached = NcclMemory(1 << 16), NcclMemory(1 << 12)
    window = communicator.register_window(memory)
    own = communicator.register_window(unreached, symmetric=False)
    stream = gpu.stream()
    with stream:
        x = array_over(memory, (1 << 14,), np.dtype("float32"))[1000:1004]
        gpu.write(x, np.arange(4.0) + backend.rank)
        for elsewhere in (ranked(0), unreached):
            with pytest.raises(InvalidArray, match="no symmetric window"):
                communicator.put(elsewhere, right, window)
        for count in (0, 1 << 31):
            with pytest.raises(ValueError, match=f"count must be from 1 to .*, and is {count}"):
                communicator.wait_signal(left, count, stream=stream)
        for call in (communicator.signal, communicator.wait_signal):
            with pytest.raises(SelfSend, match="event of CUDA"):
                call(backend.rank, stream=stream)
        for wrong in ({"signal": -1}, {"signal": 2}, {"context": 1}, {"signal": 1 << 31}):
            with pytest.raises(ValueError, match=r"2 signals .* 1 contexts"):
                communicator.signal(left, stream=stream, **wrong)
            with pytest.raises(ValueError, match=r"2 signals .* 1 contexts"):
                communicator.wait_signal(left, stream=stream, **wrong)
        for outside in ((1 << 16) - 12, 1 << 20, 1 << 70, -4):
            with pytest.raises(InvalidArray, match="do not fit into the window of 65536 bytes"):
                communicator.put(x, right, window, outside)
        with pytest.raises(InvalidArray, match="offset 66 is no multiple of the 4 bytes"):
            communicator.put(x, right, window, 66)
        communicator.put(x, right, window, 64)
        communicator.wait_signal(left, stream=stream)
        received = values(array_over(memory, (20,), np.dtype("float32"))[16:])
        # A signal alone: the left one's second put is there once the right one said so.
        communicator.put(x, right, window, 0)
        communicator.signal(left, signal=1, stream=stream)
        communicator.wait_signal(left, stream=stream)
        communicator.wait_signal(right, signal=1, stream=stream)
        second = values(array_over(memory, (4,), np.dtype("float32")))
    other = communicator.split(0, 0)
    assert other is not None
    with pytest.raises(UnsupportedOp, match="another communicator's"):
        other.put(x, right, window)
    other.close()
    own.close()
    window.close()
    window.close()
    with pytest.raises(ValueError, match="closed"):
        communicator.put(x, right, window)
    memory.close()
    communicator.close()
    return [received, second]


def test_puts_and_signals_arrive_in_windows() -> None:
    for rank, received in enumerate(ranks(3, put_into_the_next_rank)):
        assert received == [[float(i + (rank - 1) % 3) for i in range(4)]] * 2


def put_without_windows(backend: Any) -> list[float]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NCCL_WIN_ENABLE", "0")  # as where GPUs do not reach each other's memory
        emulated_gpu()
        from ferro_dist._native.nccl_memory import NcclMemory

        communicator = connect(backend)
        window = communicator.register_window(memory := NcclMemory(1 << 12))
        with pytest.raises(UnsupportedOp, match="NCCL has made no window of this memory"):
            communicator.put(memory, 1 - backend.rank, window)
        window.close()
        x = ranked(backend.rank)
        communicator.allreduce(x, x)
        received = values(x)
        communicator.close()
        return received


def test_memory_of_which_nccl_makes_no_window_is_refused_where_one_is_needed() -> None:
    first, second = ranks(2, put_without_windows)
    assert first == second


def memory_of_nccl(count: int) -> Any:
    from ferro_dist._native.nccl_memory import NcclMemory

    return array_over(NcclMemory(4 * count), (count,), np.dtype("float32"))


def register_in_a_new_thread(backend: Any) -> bool:
    """NCCL asks the driver, which knows no device in a thread that has not used one."""
    communicator = connect(backend)
    x = ranked(0)
    with ThreadPoolExecutor(1) as thread:
        thread.submit(communicator.register, x).result().close()
    communicator.close()
    return True


def test_memory_is_registered_by_threads_that_have_not_used_the_gpu() -> None:
    assert ranks(1, register_in_a_new_thread) == [True]


def forget_beside_a_capture(backend: Any) -> list[float]:
    """What NCCL frees for it would end the capture of another thread."""
    gpu = emulated_gpu()
    communicator, arrays = connect(backend), [memory_of_nccl(1 << 10) for _ in range(2)]
    window, registration = communicator.register_window(arrays[0]), communicator.register(arrays[1])
    stream, x = gpu.stream(), ranked(0)
    communicator.allreduce(x, x)
    gpu.synchronize()

    def forget() -> None:
        window.close()
        registration.close()
        communicator.register(arrays[1]).close()

    with gpu.capture(stream) as graph, ThreadPoolExecutor(1) as thread:
        thread.submit(forget).result()
        communicator.allreduce(x, x)
    graph.launch(stream)
    stream.synchronize()
    result = values(x)
    graph.close()
    communicator.close()
    return result


def test_memory_is_forgotten_beside_a_capture() -> None:
    assert ranks(1, forget_beside_a_capture) == [list(range(8))]


def drop_arrays_of_a_call_that_was_given_up(backend: Any, is_grouped: bool) -> list[bool]:
    communicator = connect(backend)

    def call(x: Any) -> None:
        with load_nccl().Group() if is_grouped else contextlib.nullcontext():
            communicator.allreduce(x, x)

    ended: list[bool] = []
    if backend.rank == 0:
        communicator.timeout = 0.2
        ended = ends_before_arrays_are_dropped(communicator, call)
    backend.barrier(False, None, 0)
    communicator.abort()
    return ended


@pytest.mark.parametrize("is_grouped", [False, True])
def test_arrays_of_a_call_that_was_given_up_are_kept_to_the_communicators_end(
    is_grouped: bool,
) -> None:
    assert ranks(2, drop_arrays_of_a_call_that_was_given_up, is_grouped) == [[True], []]


def drop_what_is_registered(backend: Any) -> list[bool]:
    """NCCL knows of memory until it has been told to forget it."""
    gpu = emulated_gpu()
    communicator = connect(backend)
    arrays = [memory_of_nccl(1 << 20) for _ in range(2)]
    window, registration = communicator.register_window(arrays[0]), communicator.register(arrays[1])
    alive = [weakref.ref(array.memory) for array in arrays]
    gpu.set_faults("point=deregister,act=stuck")
    arrays.clear()
    del window, registration
    gc.collect()
    wait_until_stuck(gpu, 1)
    held = [ref() is not None for ref in alive]
    gpu.set_faults("")
    while alive[1]() is not None:  # the main thread lets go of it, within this test's time
        os.sched_yield()
    held.append(alive[0]() is not None)  # peers may write there until the communicator ends
    communicator.close()
    return [*held, alive[0]() is None]


def test_registered_memory_is_kept_until_nccl_has_forgotten_it() -> None:
    assert ranks(2, drop_what_is_registered) == [[True] * 4] * 2


def drop_a_communicator_with_a_window(backend: Any, is_cycle: bool) -> bool:
    """Peers reach the memory until NCCL is done with the communicator, which takes a while."""
    gpu = emulated_gpu()
    communicator = connect(backend)
    array = memory_of_nccl(1 << 20)
    held: list[Any] = [communicator, communicator.register_window(array), array]
    if is_cycle:  # the collector empties the containers that it finds in one
        held.append(held)
    memory = weakref.ref(array.memory)
    gpu.set_faults("point=destroy,act=stuck")
    del communicator, array, held
    gc.collect()
    is_kept = memory() is not None
    gpu.set_faults("")
    while memory() is not None:  # the main thread lets go of it, within this test's time
        os.sched_yield()
    return is_kept


@pytest.mark.parametrize("is_cycle", [False, True])
def test_windows_of_a_dropped_communicator_keep_their_memory_to_its_end(is_cycle: bool) -> None:
    assert ranks(2, drop_a_communicator_with_a_window, is_cycle) == [True, True]


class Registered:
    """Memory of the GPU that keeps its own registration."""

    def __init__(self, memory: Any, communicator: Any) -> None:
        self.memory = memory
        self.registration = communicator.register(self)

    @property
    def __cuda_array_interface__(self) -> Any:
        return self.memory.__cuda_array_interface__


def drop_memory_that_keeps_its_registration(backend: Any) -> list[str]:
    """The collector, finding the two in a cycle, empties neither while NCCL knows the memory."""
    gpu = emulated_gpu()
    from ferro_dist._native.cuda_memory import DeviceMemory, location_of

    communicator = connect(backend)
    registered = Registered(DeviceMemory(1 << 20), communicator)
    address = registered.memory.address
    gpu.set_faults("point=deregister,act=stuck")
    del registered
    gc.collect()
    wait_until_stuck(gpu, 1)
    kinds = [location_of(address)[0]]
    gpu.set_faults("")
    while location_of(address)[0] == "device":  # freed within this test's time
        os.sched_yield()
    communicator.close()
    return kinds


def test_registered_memory_in_a_cycle_is_kept_until_nccl_has_forgotten_it() -> None:
    assert ranks(1, drop_memory_that_keeps_its_registration) == [["device"]]


def refuse_a_window(backend: Any) -> bool:
    communicator = connect(backend)
    array = memory_of_nccl(1 << 10)
    memory = weakref.ref(array.memory)
    for is_symmetric in (True, False):
        with pytest.raises(InvalidArray, match="multiple of 4096"):
            communicator.register_window(array[1:], symmetric=is_symmetric)
    for register in (communicator.register, communicator.register_window):
        with pytest.raises(InvalidArray, match="the array is empty"):
            register(array[:0])
    del array
    gc.collect()
    is_kept = memory() is not None
    with pytest.raises(DistributedError, match="not allocated with ncclMemAlloc"):
        communicator.register_window(emulated_gpu().empty(1 << 10))
    with pytest.raises(LockPoisoned):
        communicator.async_error()
    communicator.close()
    return is_kept


def test_memory_of_a_refused_window_is_let_go() -> None:
    assert ranks(1, refuse_a_window) == [False]


def reduce_in_windows(backend: Any) -> list[float]:
    """Memory registered in both ways stays usable, and is given back in any order."""
    emulated_gpu()
    from ferro_dist._native.nccl_memory import NcclMemory

    communicator = connect(backend)
    memory = NcclMemory(1 << 12)
    x = array_over(memory, (4,), np.dtype("float32"))
    emulated_gpu().write(x, np.arange(4) + backend.rank)
    window = communicator.register_window(x, symmetric=False)
    registration = communicator.register(x)
    communicator.allreduce(x, x)
    result = values(x)
    registration.close()
    registration.close()
    window.close()
    communicator.close()
    return result


def test_registered_memory_is_reduced() -> None:
    assert ranks(2, reduce_in_windows) == [[1, 3, 5, 7]] * 2
