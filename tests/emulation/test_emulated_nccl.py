"""The emulated NCCL computes, fails and waits as the real one does."""

from __future__ import annotations

import ctypes
import os
import signal
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from emulation.c_calls import (
    ABORTED,
    AVG,
    CUDA_ERROR,
    DEFAULT,
    DELAY_US,
    DTYPES,
    IN_PROGRESS,
    INTERNAL,
    INVALID_ARGUMENT,
    INVALID_USAGE,
    MAX,
    MIN,
    PROD,
    REMOTE,
    SUCCESS,
    SUM,
    SYSTEM,
    LongConfig,
    Nccl,
    NcclError,
    SignalDescriptor,
    UniqueId,
    end_of_child,
    shared_id,
    size,
)
from leaks import settled

import ferro_dist as fd
from ferro_dist.testing import RankDeath, run_ranks

COUNT = 37
FLOAT32 = DTYPES[np.dtype("float32")]


def run_emulated(world_size: int, body: Callable[..., Any], *args: Any, **options: Any) -> Any:
    return run_ranks(world_size, body, *args, backend="none", emulate_gpu=True, **options)


def floats(numbers: list[Any]) -> np.ndarray[Any, Any]:
    return np.array(numbers, np.float32)


# Results


def values(dtype: np.dtype[Any], rank: int, count: int) -> np.ndarray[Any, Any]:
    """Small numbers of which sums and products are exact in every dtype."""
    return ((np.arange(count) + rank) % 3 + (rank == 0)).astype(dtype)


def expected(dtype: np.dtype[Any], op: int, world_size: int, count: int) -> np.ndarray[Any, Any]:
    wide = np.float64 if dtype.kind not in "iu" else np.int64
    inputs = np.stack([values(dtype, rank, count).astype(wide) for rank in range(world_size)])
    if op == AVG and dtype.kind not in "iu":
        share = np.float64(np.asarray(1 / world_size).astype(dtype))
        scaled = (inputs * share).astype(dtype).astype(wide)
        return np.asarray(scaled.sum(0).astype(dtype))
    reductions: dict[int, Callable[[int], Any]] = {
        SUM: inputs.sum,
        PROD: inputs.prod,
        MAX: inputs.max,
        MIN: inputs.min,
        AVG: lambda axis: inputs.sum(axis) // world_size,
    }
    return np.asarray(reductions[op](0)).astype(dtype)


def try_every_reduction(rank: int, world_size: int, addr: str) -> list[str]:
    nccl = Nccl()
    comm = nccl.communicator(world_size, shared_id(addr), rank)
    stream = nccl.gpu.stream()
    wrong = []
    with stream:
        for dtype, number in DTYPES.items():
            for op in (SUM, PROD, MAX, MIN, AVG):
                whole = values(dtype, rank, COUNT * world_size)
                want = expected(dtype, op, world_size, COUNT * world_size)
                a = nccl.gpu.array(whole)
                out = {
                    "allreduce": nccl.gpu.empty(whole.shape, dtype),
                    "reduce": nccl.gpu.empty(whole.shape, dtype),
                    "reduce_scatter": nccl.gpu.empty(COUNT, dtype),
                }
                n = size(whole.size)
                nccl.AllReduce(a, out["allreduce"], n, number, op, comm, stream)
                nccl.Reduce(a, out["reduce"], n, number, op, world_size - 1, comm, stream)
                nccl.ReduceScatter(a, out["reduce_scatter"], size(COUNT), number, op, comm, stream)
                wanted = {
                    "allreduce": want,
                    "reduce": want if rank == world_size - 1 else None,
                    "reduce_scatter": want[rank * COUNT : (rank + 1) * COUNT],
                }
                for name, result in wanted.items():
                    got = out[name].numpy()
                    if result is not None and not same(got, result, op):
                        wrong.append(f"{name} {dtype} {op}: {got} instead of {result}")
    nccl.CommDestroy(comm)
    return wrong


def same(got: np.ndarray[Any, Any], want: np.ndarray[Any, Any], op: int) -> bool:
    if op != AVG or got.dtype.kind in "iu":
        return got.tobytes() == want.tobytes()
    # An average is rounded between steps: two units in the last place.
    error = np.abs(got.astype(float) - want.astype(float))
    return bool((error <= 2 * float(_epsilon(got.dtype)) * np.abs(want.astype(float))).all())


def _epsilon(dtype: np.dtype[Any]) -> Any:
    import ml_dtypes

    return ml_dtypes.finfo(dtype).eps


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_every_reduction_of_every_dtype_matches_numpy(world_size: int) -> None:
    assert run_emulated(world_size, try_every_reduction) == [[]] * world_size


def try_every_movement(rank: int, world_size: int, addr: str) -> dict[str, list[float]]:
    nccl = Nccl()
    comm = nccl.communicator(world_size, shared_id(addr), rank)
    stream = nccl.gpu.stream()
    root = world_size - 1
    n = size(2)
    with stream:
        pair = nccl.gpu.array(floats([rank, 10 * rank]))
        row = nccl.gpu.array(np.arange(2 * world_size, dtype=np.float32) + 100 * rank)
        outs = {
            name: nccl.gpu.array(np.full(2 * world_size, -1, np.float32))
            for name in ("all_gather", "gather", "all_to_all", "scatter", "broadcast")
        }
        nccl.AllGather(pair, outs["all_gather"], n, FLOAT32, comm, stream)
        nccl.Gather(pair, outs["gather"], n, FLOAT32, root, comm, stream)
        nccl.AlltoAll(row, outs["all_to_all"], n, FLOAT32, comm, stream)
        nccl.Scatter(row, outs["scatter"], n, FLOAT32, root, comm, stream)
        nccl.Broadcast(pair, outs["broadcast"], n, FLOAT32, root, comm, stream)
        results = {name: out.numpy().tolist() for name, out in outs.items()}
    nccl.CommDestroy(comm)
    return results


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_movements_put_everything_in_its_place(world_size: int) -> None:
    root = world_size - 1
    pairs = [number for rank in range(world_size) for number in (rank, 10 * rank)]
    rest = [-1] * (2 * world_size - 2)
    for rank, results in enumerate(run_emulated(world_size, try_every_movement)):
        at = [2 * rank, 2 * rank + 1]
        assert results == {
            "all_gather": pairs,
            "gather": pairs if rank == root else [-1, -1, *rest],
            "all_to_all": [100 * peer + i for peer in range(world_size) for i in at],
            "scatter": [100 * root + i for i in at] + rest,
            "broadcast": [root, 10 * root, *rest],
        }


def reduce_large_in_place(rank: int, world_size: int, addr: str) -> bool:
    nccl = Nccl()
    comm = nccl.communicator(world_size, shared_id(addr), rank)
    a = nccl.gpu.array(np.full(1_000_003, rank + 1, np.float32))
    nccl.AllReduce(a, a, size(a.size), FLOAT32, SUM, comm, DEFAULT)
    is_right = bool((a.numpy() == 3).all())
    nccl.CommDestroy(comm)
    return is_right


def test_arrays_larger_than_the_staging_buffers_are_reduced_in_place() -> None:
    assert run_emulated(2, reduce_large_in_place) == [True, True]


def premultiply(rank: int, world_size: int, addr: str) -> list[list[float]]:
    nccl = Nccl()
    comm = nccl.communicator(world_size, shared_id(addr), rank)
    other = nccl.communicator(1, bytes(nccl.unique_id()), 0)
    a = nccl.gpu.array(floats([1, 2, 3]))
    results = []
    for is_on_host in (1, 0):
        scalar = floats([rank + 0.5])
        on_device = nccl.gpu.array(scalar)
        where = scalar.ctypes.data_as(ctypes.c_void_p) if is_on_host else on_device
        op = ctypes.c_int()
        nccl.RedOpCreatePreMulSum(ctypes.byref(op), where, FLOAT32, is_on_host, comm)
        out = a.empty()
        nccl.AllReduce(a, out, size(3), FLOAT32, op, comm, DEFAULT)
        results.append(out.numpy().tolist())
        with pytest.raises(NcclError, match="of this communicator"):
            nccl.AllReduce(a, out, size(3), FLOAT32, op, other, DEFAULT)
        nccl.RedOpDestroy(op, comm)
    nccl.CommDestroy(other)
    nccl.CommDestroy(comm)
    return results


def test_premultiplied_sums_belong_to_their_communicator() -> None:
    for results in run_emulated(2, premultiply):
        assert results == [[2, 4, 6], [2, 4, 6]]


# Messages


def exchange_grouped(rank: int, world_size: int, addr: str) -> list[list[float]]:
    nccl = Nccl()
    comm = nccl.communicator(world_size, shared_id(addr), rank)
    outs = [nccl.gpu.empty(50_000) for _ in range(world_size)]
    ins = [
        nccl.gpu.array(np.full(50_000, 10 * rank + peer, np.float32)) for peer in range(world_size)
    ]
    nccl.GroupStart()
    for peer in range(world_size):
        nccl.Send(ins[peer], size(50_000), FLOAT32, peer, comm, DEFAULT)
        nccl.Recv(outs[peer], size(50_000), FLOAT32, peer, comm, DEFAULT)
    nccl.GroupEnd()
    results = [np.unique(out.numpy()).tolist() for out in outs]
    nccl.CommDestroy(comm)
    return results


def test_grouped_messages_progress_together() -> None:
    for rank, results in enumerate(run_emulated(3, exchange_grouped)):
        assert results == [[10 * peer + rank] for peer in range(3)]


def send_before_receive(rank: int, world_size: int, addr: str) -> int:
    """Both send first: neither is done, until they are aborted."""
    nccl = Nccl()
    comm = nccl.communicator(world_size, shared_id(addr), rank, blocking=0)
    nccl.settle(comm)
    a, b = nccl.gpu.empty(1), nccl.gpu.empty(1)
    stream = nccl.gpu.stream()
    nccl.GroupStart()  # connects them: else not even the first call below would end
    nccl.Send(a, size(1), FLOAT32, 1 - rank, comm, stream)
    nccl.Recv(b, size(1), FLOAT32, 1 - rank, comm, stream)
    nccl.GroupEnd()
    nccl.settle(comm)
    nccl.Send(a, size(1), FLOAT32, 1 - rank, comm, stream)
    nccl.settle(comm)
    nccl.Recv(b, size(1), FLOAT32, 1 - rank, comm, stream)
    nccl.settle(comm)
    threading.Event().wait(0.3)  # a deadlock is shown by nothing but time
    status: int = nccl.gpu.cudart.cudaStreamQuery(ctypes.c_void_p(stream.handle))
    nccl.CommAbort(comm)
    stream.synchronize()
    return status


def test_ungrouped_sends_in_a_circle_deadlock() -> None:
    assert run_emulated(2, send_before_receive) == [600, 600]


def call_before_the_other(rank: int, world_size: int, addr: str) -> list[int]:
    nccl = Nccl()
    comm = nccl.communicator(world_size, shared_id(addr), rank, blocking=0)
    nccl.settle(comm)
    a = nccl.gpu.array(floats([1]))
    states = []
    with fd.HostBackend(rank, world_size, f"{addr}-host") as host:
        for is_first in (True, False):
            if rank == 1:
                fd.barrier(host)
            nccl.AllReduce(a, a, size(1), FLOAT32, SUM, comm, DEFAULT)
            if rank == 0:
                states.append(nccl.state(comm) if is_first else nccl.settle(comm))
                fd.barrier(host)
            nccl.settle(comm)
    nccl.gpu.synchronize()
    nccl.CommDestroy(comm)
    return states


def test_the_first_call_waits_for_the_others() -> None:
    assert run_emulated(2, call_before_the_other)[0] == [IN_PROGRESS, SUCCESS]


def connect_differently(rank: int, world_size: int, addr: str) -> int:
    nccl = Nccl()
    comm = nccl.communicator(world_size, shared_id(addr), rank, blocking=0)
    nccl.settle(comm)
    a, b = nccl.gpu.empty(1), nccl.gpu.empty(1)
    nccl.GroupStart()
    if rank == 0:
        nccl.Send(a, size(1), FLOAT32, 1, comm, DEFAULT)
    nccl.Recv(b, size(1), FLOAT32, 1 - rank, comm, DEFAULT)
    nccl.GroupEnd()
    state = nccl.settle(comm) if rank == 1 else SUCCESS
    nccl.CommAbort(comm)
    return state


def test_two_ranks_must_connect_alike() -> None:
    assert run_emulated(2, connect_differently) == [SUCCESS, INTERNAL]


# Mistakes


def disagree(rank: int, world_size: int, addr: str, log: str, about: str) -> tuple[int, str]:
    nccl = Nccl()
    os.dup2(os.open(f"{log}.{rank}", os.O_CREAT | os.O_WRONLY), 2)
    comm = nccl.communicator(world_size, shared_id(addr), rank)
    a = nccl.gpu.array(np.zeros(8, np.float32))
    count, op = 8, ctypes.c_int(SUM)
    if rank == 1 and about == "the count":
        count = 7
    elif rank == 1:
        one = ctypes.c_float(1)
        nccl.RedOpCreatePreMulSum(ctypes.byref(op), ctypes.byref(one), FLOAT32, 1, comm)
    nccl.AllReduce(a, a, size(count), FLOAT32, op, comm, DEFAULT)
    nccl.gpu.synchronize()
    state = nccl.state(comm)
    nccl.CommAbort(comm)
    with open(f"{log}.{rank}") as file:
        return state, file.read()


def test_a_sum_is_not_a_premultiplied_sum(tmp_path: Any) -> None:
    for state, text in run_emulated(2, disagree, str(tmp_path / "log"), "the operation"):
        assert state == INVALID_ARGUMENT
        assert "operation 0" in text
        assert "operation 5" in text


def test_ranks_that_disagree_are_told(tmp_path: Any) -> None:
    for state, text in run_emulated(2, disagree, str(tmp_path / "log"), "the count"):
        assert state == INVALID_ARGUMENT
        assert "ncclAllReduce of 8 elements of float32" in text
        assert "ncclAllReduce of 7 elements of float32" in text


def register_on_one_rank(rank: int, world_size: int, addr: str, log: str) -> tuple[int, int, str]:
    nccl = Nccl()
    os.dup2(os.open(f"{log}.{rank}", os.O_CREAT | os.O_WRONLY), 2)
    comm = nccl.communicator(world_size, shared_id(addr), rank)
    a = nccl.gpu.array(np.zeros(8, np.float32))
    handle = ctypes.c_void_p()
    nccl.CommRegister(comm, a, size(32), ctypes.byref(handle))
    states = []
    for _ in range(2):
        nccl.AllReduce(a, a, size(8), FLOAT32, SUM, comm, DEFAULT)
        nccl.gpu.synchronize()
        states.append(nccl.state(comm))
        if rank == 1 and not states[1:]:
            nccl.CommDeregister(comm, handle)
    nccl.CommAbort(comm)
    with open(f"{log}.{rank}") as file:
        return states[0], states[1], file.read()


def test_memory_is_registered_on_all_ranks_or_on_none(tmp_path: Any) -> None:
    for first, second, text in run_emulated(2, register_on_one_rank, str(tmp_path / "log")):
        assert (first, second) == (SUCCESS, INVALID_ARGUMENT)
        assert text.count("ncclAllReduce of 8 elements of float32") == 2
        assert text.count("of registered memory") == 1


def receive_less(rank: int, world_size: int, addr: str) -> int:
    nccl = Nccl()
    comm = nccl.communicator(world_size, shared_id(addr), rank)
    a = nccl.gpu.empty(8)
    if rank == 0:
        nccl.Send(a, size(8), FLOAT32, 1, comm, DEFAULT)
    else:
        nccl.Recv(a, size(4), FLOAT32, 0, comm, DEFAULT)
    nccl.gpu.synchronize()
    state = nccl.state(comm)
    nccl.CommAbort(comm)
    return state


def test_a_message_of_another_size_is_an_error_on_both_sides() -> None:
    assert run_emulated(2, receive_less) == [INVALID_ARGUMENT] * 2


def pass_nonsense(rank: int, world_size: int, addr: str) -> dict[str, int]:
    nccl = Nccl()
    comm = nccl.communicator(1, shared_id(addr), 0)
    a, host = nccl.gpu.empty(8), np.zeros(8, np.float32)
    freed = nccl.gpu.empty(8)
    address = ctypes.c_void_p(freed.address)
    del freed
    host_pointer = host.ctypes.data_as(ctypes.c_void_p)

    def status(*args: Any) -> int:
        return nccl.result("AllReduce", *args, comm, DEFAULT)

    return {
        "too many": status(a, a, size(9), FLOAT32, SUM),
        "host memory": status(host_pointer, a, size(8), FLOAT32, SUM),
        "freed memory": status(address, a, size(8), FLOAT32, SUM),
        "overlap": status(a[:4], a[1:5], size(4), FLOAT32, SUM),
        "dtype": status(a, a, size(8), 12, SUM),
        "operation": status(a, a, size(8), FLOAT32, 5),
        "root": nccl.result("Broadcast", a, a, size(8), FLOAT32, 1, comm, DEFAULT),
        "alone": nccl.result("Send", a, size(8), FLOAT32, 0, comm, DEFAULT),
        "config": nccl.result(
            "CommInitRankConfig",
            ctypes.byref(ctypes.c_void_p()), 1, nccl.unique_id(), 0,
            ctypes.byref(ctypes.create_string_buffer(256)),
        ),
    }  # fmt: skip


def test_wrong_arguments_are_refused_before_anything_is_launched() -> None:
    [found] = run_emulated(1, pass_nonsense)
    assert found.pop("alone") == INVALID_USAGE
    assert set(found.values()) == {INVALID_ARGUMENT}, found


def pass_float8(rank: int, world_size: int, addr: str, setting: str, value: str) -> list[int]:
    os.environ[f"FERRO_EMULATION_{setting}"] = value
    nccl = Nccl()
    comm = nccl.communicator(1, shared_id(addr), 0)
    a = nccl.gpu.empty(8, "uint8")
    number = DTYPES[np.dtype("float8_e4m3fn")]
    return [
        nccl.result("AllReduce", a, a, size(8), number, SUM, comm, DEFAULT),
        nccl.result("Broadcast", a, a, size(8), number, 0, comm, DEFAULT),
    ]


def test_float8_is_reduced_from_sm_90_on_and_known_from_2_24_on() -> None:
    [outcome] = run_emulated(1, pass_float8, "COMPUTE_CAPABILITY", "89")
    assert outcome == [INVALID_ARGUMENT, SUCCESS]
    [outcome] = run_emulated(1, pass_float8, "NCCL_VERSION", "22304")
    assert outcome == [INVALID_ARGUMENT, INVALID_ARGUMENT]


def ask_after_nonsense(rank: int, world_size: int, addr: str) -> list[tuple[int, int]]:
    nccl = Nccl()
    states = []
    for is_in_group in (False, True):
        comm = nccl.communicator(1, shared_id(addr), 0, blocking=0)
        nccl.settle(comm)
        if is_in_group:
            nccl.GroupStart()
        refused = nccl.result("AllReduce", None, None, size(3), FLOAT32, SUM, comm, DEFAULT)
        if is_in_group:
            nccl.result("GroupEnd")
        states.append((refused, nccl.settle(comm)))
        nccl.CommAbort(comm)
    return states


def test_a_refused_argument_is_the_error_of_a_communicator_that_does_not_block() -> None:
    assert run_emulated(1, ask_after_nonsense) == [[(INVALID_ARGUMENT, INVALID_ARGUMENT)] * 2]


def poison_group(rank: int, world_size: int, addr: str) -> tuple[int, int, list[float]]:
    nccl = Nccl()
    comm = nccl.communicator(1, shared_id(addr), 0)
    a, b = nccl.gpu.array(floats([1, 2])), nccl.gpu.array(floats([0, 0]))
    nccl.GroupStart()
    nccl.AllReduce(a, b, size(2), FLOAT32, SUM, comm, DEFAULT)
    bad = nccl.result("AllReduce", a, b, size(3), FLOAT32, SUM, comm, DEFAULT)
    end = nccl.result("GroupEnd")
    return bad, end, b.numpy().tolist()


def test_a_failed_call_in_a_group_launches_none_of_it() -> None:
    assert run_emulated(1, poison_group) == [(INVALID_ARGUMENT, INVALID_ARGUMENT, [0, 0])]


def misuse_communicators(rank: int, world_size: int, addr: str) -> dict[str, tuple[int, str]]:
    def destroy_twice() -> None:
        nccl = Nccl()
        comm = nccl.communicator(1, shared_id(addr), 0)
        nccl.CommDestroy(comm)
        nccl.CommDestroy(comm)

    def call_from_two_threads() -> None:
        nccl = Nccl()
        nccl.gpu.set_faults("point=finalize,act=slow,ms=10000")
        comm = nccl.communicator(1, shared_id(addr), 0)
        threading.Thread(target=nccl.CommFinalize, args=(comm,)).start()
        nccl.await_state(comm, until=lambda state: state == IN_PROGRESS)
        nccl.CommFinalize(comm)

    def use_after_fork() -> None:
        nccl = Nccl()
        comm = nccl.communicator(1, shared_id(addr), 0)
        ended_by, text = end_of_child(lambda: nccl.CommDestroy(comm))
        os.write(2, text.encode())
        os.kill(os.getpid(), ended_by)

    def deregister_in_flight() -> None:
        nccl = Nccl()
        comm = nccl.communicator(1, shared_id(addr), 0)
        a, handle = nccl.gpu.array(floats([1])), ctypes.c_void_p()
        nccl.CommRegister(comm, a, size(4), ctypes.byref(handle))
        nccl.gpu.synchronize()
        nccl.gpu.set_delay(10_000_000)
        nccl.AllReduce(a, a, size(1), FLOAT32, SUM, comm, DEFAULT)
        nccl.CommDeregister(comm, handle)

    def offer_two_ids_to_grow() -> None:
        nccl = Nccl()
        comm = nccl.communicator(1, shared_id(addr), 0)
        for _ in range(2):
            nccl.CommGetUniqueId(comm, ctypes.byref(UniqueId()))

    return {
        "destroy twice": end_of_child(destroy_twice),
        "two threads": end_of_child(call_from_two_threads),
        "fork": end_of_child(use_after_fork),
        "ncclCommDeregister while an operation uses": end_of_child(deregister_in_flight),
        "ncclCommGetUniqueId twice": end_of_child(offer_two_ids_to_grow),
    }


def test_misuse_that_nccl_leaves_undefined_ends_the_process() -> None:
    [found] = run_emulated(1, misuse_communicators)
    assert {ended_by for ended_by, _ in found.values()} == {ABORTED}, found
    assert "ncclCommDestroy on a communicator that was destroyed" in found["destroy twice"][1]
    assert "while another thread is inside ncclCommFinalize" in found["two threads"][1]
    assert "in a forked child" in found["fork"][1]


def destroy_failed(rank: int, world_size: int, addr: str) -> tuple[int, int, list[float]]:
    nccl = Nccl()
    nccl.gpu.set_faults("point=allreduce,act=async_error")
    comm = nccl.communicator(1, shared_id(addr), 0)
    other = nccl.communicator(1, bytes(nccl.unique_id()), 0)
    a, b = nccl.gpu.array(floats([1, 2])), nccl.gpu.array(floats([0, 0]))
    nccl.AllReduce(a, a, size(2), FLOAT32, SUM, comm, DEFAULT)
    nccl.gpu.synchronize()
    destroyed = nccl.result("CommDestroy", comm)
    later = nccl.result("AllReduce", a, b, size(2), FLOAT32, SUM, other, DEFAULT)
    return destroyed, later, b.numpy().tolist()


def test_destroying_a_failed_communicator_leaves_the_thread_in_a_group() -> None:
    assert run_emulated(1, destroy_failed) == [(INTERNAL, SUCCESS, [0, 0])]


def free_under_nccl(addr: str, blocking: int) -> None:
    nccl = Nccl()
    nccl.gpu.set_delay(DELAY_US)
    comm = nccl.communicator(1, shared_id(addr), 0, blocking)
    nccl.settle(comm)
    stream = nccl.gpu.stream()
    for is_early in (False, True):  # first as it should be: a process' first calls take long
        a, b = nccl.gpu.empty(1000), nccl.gpu.empty(1000)
        nccl.AllReduce(a, b, size(1000), FLOAT32, SUM, comm, stream)
        nccl.settle(comm)
        if not is_early:
            stream.synchronize()
        del a
        stream.synchronize()


def count_faults(rank: int, world_size: int, addr: str, blocking: int) -> list[tuple[int, str]]:
    return [end_of_child(lambda: free_under_nccl(addr, blocking)) for _ in range(40)]


@pytest.mark.parametrize("blocking", [0, 1])
def test_a_buffer_freed_in_flight_faults_in_95_percent_of_runs(blocking: int) -> None:
    [ends] = run_emulated(1, count_faults, blocking)
    faults = [text for ended_by, text in ends if ended_by == ABORTED]
    assert len(faults) >= 38, ends
    assert all("ncclAllReduce, in stream 0x" in text for text in faults)


# Communicators from communicators


def split_and_reduce(rank: int, world_size: int, addr: str, blocking: int) -> Any:
    nccl = Nccl()
    comm = nccl.communicator(world_size, shared_id(addr), rank, blocking)
    nccl.settle(comm)
    child = ctypes.c_void_p()
    color = -1 if rank == 3 else rank % 2
    # Even if it has only begun: the child is there when the parent is ready.
    assert nccl.CommSplit(comm, color, -rank, ctypes.byref(child), None) == SUCCESS
    nccl.settle(comm)
    result = None
    if child:
        nccl.settle(child)
        a = nccl.gpu.array(floats([rank]))
        nccl.AllReduce(a, a, size(1), FLOAT32, SUM, child, DEFAULT)
        nccl.settle(child)
        result = (nccl.ask("CommUserRank", child), nccl.ask("CommCount", child), a.numpy()[0])
        nccl.CommDestroy(child)
    nccl.CommDestroy(comm)
    return result


@pytest.mark.parametrize("blocking", [0, 1])
def test_split_orders_by_key_and_leaves_out_who_has_no_color(blocking: int) -> None:
    results = run_emulated(4, split_and_reduce, blocking)
    assert results == [(1, 2, 2), (0, 1, 1), (0, 2, 2), None]


def shrink_and_grow(rank: int, world_size: int, addr: str) -> list[float] | None:
    nccl = Nccl()
    sums = []

    def reduce_over(comm: ctypes.c_void_p) -> None:
        a = nccl.gpu.array(floats([rank + 1]))
        nccl.AllReduce(a, a, size(1), FLOAT32, SUM, comm, DEFAULT)
        sums.append(float(a.numpy()[0]))

    comm = nccl.communicator(world_size, shared_id(addr), rank)
    reduce_over(comm)
    smaller = ctypes.c_void_p()
    if rank == 1:
        nccl.CommAbort(comm)
    else:
        excluded = (ctypes.c_int * 1)(1)
        nccl.CommShrink(comm, excluded, 1, ctypes.byref(smaller), None, 1)
        reduce_over(smaller)
    larger, new_id = ctypes.c_void_p(), UniqueId()
    if rank == 0:
        nccl.CommGetUniqueId(smaller, ctypes.byref(new_id))
    with fd.HostBackend(rank, world_size, addr) as host:
        shared = fd.broadcast(np.frombuffer(bytes(new_id), np.uint8), host)
    new_id = UniqueId.from_buffer_copy(shared.tobytes())
    if rank == 1:
        nccl.CommGrow(None, 3, ctypes.byref(new_id), 2, ctypes.byref(larger), None)
    else:
        known = ctypes.byref(new_id) if rank == 0 else None
        nccl.CommGrow(smaller, 3, known, -1, ctypes.byref(larger), None)
    reduce_over(larger)
    nccl.CommDestroy(larger)
    return sums


def test_shrink_leaves_ranks_out_and_grow_takes_them_in() -> None:
    assert run_emulated(3, shrink_and_grow) == [[6, 4, 6], [6, 6], [6, 4, 6]]


def make_children_out_of_order(rank: int, world_size: int, addr: str) -> dict[str, int]:
    nccl = Nccl()
    made, other_id = ctypes.c_void_p(), UniqueId()
    out = ctypes.byref(made)

    def make() -> ctypes.c_void_p:
        return nccl.communicator(1, bytes(nccl.unique_id()), 0)

    found = {}
    split, finalized, revoked = make(), make(), make()
    nccl.CommGetUniqueId(split, ctypes.byref(other_id))
    nccl.CommSplit(split, 0, 0, out, None)
    grow = (2, ctypes.byref(other_id), -1, out, None)
    found["grow after split"] = nccl.result("CommGrow", split, *grow)
    found["grow by any id"] = nccl.result("CommGrow", make(), *grow)
    nccl.CommRevoke(revoked, 0)
    found["revoke twice"] = nccl.result("CommRevoke", revoked, 0)
    nccl.CommFinalize(finalized)
    found["revoke after finalize"] = nccl.result("CommRevoke", finalized, 0)
    found["split after finalize"] = nccl.result("CommSplit", finalized, 0, 0, out, None)
    few = LongConfig.of(min_ctas=4)
    found["no maximum"] = nccl.result("CommSplit", make(), 0, 0, out, ctypes.byref(few))
    # A child of options of its own inherits none.
    parent = nccl.communicator(1, bytes(nccl.unique_id()), 0, blocking=0)
    nccl.settle(parent)
    some = LongConfig.of(min_ctas=4, max_ctas=4)
    nccl.CommSplit(parent, 0, 0, out, ctypes.byref(some))
    nccl.settle(parent)
    found["an allreduce of a child"] = nccl.result(
        "AllReduce", nccl.gpu.array(floats([1])), *(None, size(1), FLOAT32, SUM, made, DEFAULT)
    )
    found["its state"] = nccl.state(made)
    return found


def test_children_are_made_as_the_real_library_makes_them() -> None:
    assert run_emulated(1, make_children_out_of_order) == [
        {
            "grow after split": INVALID_ARGUMENT,
            "grow by any id": INVALID_ARGUMENT,
            "revoke twice": INVALID_ARGUMENT,
            "revoke after finalize": INVALID_ARGUMENT,
            "split after finalize": INVALID_USAGE,
            "no maximum": INVALID_ARGUMENT,
            "an allreduce of a child": INVALID_ARGUMENT,
            "its state": SUCCESS,  # which a communicator keeps that blocks
        }
    ]


def suspend_what_shares(rank: int, world_size: int, addr: str) -> list[int]:
    nccl = Nccl()
    comm, child = ctypes.c_void_p(), ctypes.c_void_p()
    options = LongConfig.of(split_share=1)
    where = nccl.unique_id()
    nccl.CommInitRankConfig(ctypes.byref(comm), 1, where, 0, ctypes.byref(options))
    nccl.CommSplit(comm, 0, 0, ctypes.byref(child), None)
    refused = [nccl.result("CommSuspend", each, 1) for each in (comm, child)]
    nccl.CommDestroy(child)
    return [*refused, nccl.CommSuspend(comm, 1)]


def test_memory_that_is_shared_is_not_suspended() -> None:
    assert run_emulated(1, suspend_what_shares) == [[INVALID_USAGE, INVALID_USAGE, SUCCESS]]


def init_all(rank: int, world_size: int, addr: str) -> list[float]:
    os.environ["FERRO_EMULATION_DEVICES"] = "2"
    nccl = Nccl()
    comms = (ctypes.c_void_p * 2)()
    nccl.CommInitAll(comms, 2, None)
    arrays = []
    nccl.GroupStart()
    for device, comm in enumerate(comms):
        with nccl.gpu.device(device):
            a = nccl.gpu.array(floats([device + 1]))
            nccl.gpu.synchronize()
        nccl.AllReduce(a, a, size(1), FLOAT32, SUM, ctypes.c_void_p(comm), DEFAULT)
        arrays.append(a)
    nccl.GroupEnd()
    return [float(a.numpy()[0]) for a in arrays]


def test_one_process_may_have_many_ranks() -> None:
    # Not by emulate_gpu: the number of devices comes first.
    assert run_ranks(1, init_all, backend="none") == [[3, 3]]


def share_a_device(rank: int, world_size: int, addr: str) -> tuple[int, str]:
    os.environ["FERRO_EMULATION_DEVICES"] = "2"
    nccl = Nccl()
    try:
        nccl.communicator(world_size, shared_id(addr), rank)
    except NcclError as error:
        return error.code, str(error)
    return SUCCESS, ""


def test_two_ranks_on_one_of_several_devices_are_refused() -> None:
    for code, text in run_ranks(2, share_a_device, backend="none"):
        assert code == INVALID_USAGE
        assert "Duplicate GPU detected" in text


# States and faults


def go_through_states(rank: int, world_size: int, addr: str) -> list[int]:
    nccl = Nccl()
    nccl.gpu.set_faults("point=init,act=slow,ms=3000;point=finalize,act=slow,ms=3000")
    comm = nccl.communicator(world_size, shared_id(addr), rank, blocking=0)
    seen = [nccl.state(comm), nccl.result("CommFinalize", comm), nccl.settle(comm)]
    a = nccl.gpu.array(floats([1]))
    seen += [nccl.AllReduce(a, a, size(1), FLOAT32, SUM, comm, DEFAULT), nccl.settle(comm)]
    seen += [int(a.numpy()[0]), nccl.CommFinalize(comm), nccl.state(comm), nccl.settle(comm)]
    return [*seen, nccl.CommDestroy(comm)]


def test_a_nonblocking_communicator_goes_through_its_states() -> None:
    states = [IN_PROGRESS, INVALID_ARGUMENT, SUCCESS, IN_PROGRESS, SUCCESS]
    ending = [2, IN_PROGRESS, IN_PROGRESS, SUCCESS, SUCCESS]
    assert run_emulated(2, go_through_states) == [states + ending] * 2


def suffer(rank: int, world_size: int, addr: str, act: str) -> tuple[int, int]:
    nccl = Nccl()
    nccl.gpu.set_faults(f"rank=1,point=allreduce,hit=2,act={act}")
    comm = nccl.communicator(world_size, shared_id(addr), rank, blocking=0)
    nccl.settle(comm)
    stream = nccl.gpu.stream()
    a = nccl.gpu.array(floats([1]))
    results = []
    for turn in range(2):
        results.append(nccl.result("AllReduce", a, a, size(1), FLOAT32, SUM, comm, stream))
        nccl.settle(comm)
        if turn == 0:
            stream.synchronize()
    if act == "async_error" or (rank == 1 and act == "remote_error"):
        stream.synchronize()
    state = nccl.settle(comm)
    nccl.CommAbort(comm)
    stream.synchronize()
    return results[1], state


@pytest.mark.parametrize(
    ("act", "result", "state"),
    [
        ("remote_error", IN_PROGRESS, REMOTE),
        ("async_error", IN_PROGRESS, INTERNAL),
        ("system_error", SYSTEM, SYSTEM),
        ("out_of_memory", CUDA_ERROR, CUDA_ERROR),
        ("hang", IN_PROGRESS, SUCCESS),
        ("slow", IN_PROGRESS, SUCCESS),
    ],
)
def test_faults_come_on_demand(act: str, result: int, state: int) -> None:
    assert run_emulated(2, suffer, act) == [(IN_PROGRESS, SUCCESS), (result, state)]


def misspell_a_fault(rank: int, world_size: int, addr: str) -> tuple[int, str]:
    os.environ["FERRO_EMULATION_FAULT"] = "point=allreduce,act=hangs"
    return end_of_child(lambda: Nccl().gpu.array(floats([1])))


def test_a_fault_that_cannot_be_read_ends_the_process() -> None:
    """Else the test that asks for it would pass."""
    [(ended_by, text)] = run_emulated(1, misspell_a_fault)
    assert ended_by == ABORTED
    assert "cannot read the fault 'point=allreduce,act=hangs'" in text


def lose_a_peer(rank: int, world_size: int, addr: str, log: str) -> int:
    os.environ["FERRO_EMULATION_PEER_DEATH"] = "remote_error"
    nccl = Nccl()
    comm = nccl.communicator(world_size, shared_id(addr), rank, blocking=0)
    nccl.settle(comm)
    before = {name for name in os.listdir("/dev/shm") if "ferro" in name}
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    a = nccl.gpu.array(floats([1]))
    nccl.AllReduce(a, a, size(1), FLOAT32, SUM, comm, DEFAULT)
    state = nccl.await_state(comm, until=lambda state: state not in (SUCCESS, IN_PROGRESS))
    nccl.CommAbort(comm)
    assert not before
    return state


def test_a_killed_rank_leaves_nothing_and_is_noticed_if_asked_for() -> None:
    before = set(os.listdir("/dev/shm"))
    results = run_emulated(2, lose_a_peer, "", may_die=[1])
    assert results == [REMOTE, RankDeath(-signal.SIGKILL)]
    assert not {name for name in set(os.listdir("/dev/shm")) - before if "nccl" in name}


def abort_in_progress(rank: int, world_size: int, addr: str) -> int:
    nccl = Nccl()
    comm = nccl.communicator(2, shared_id(addr), 0, blocking=0)  # rank 1 never comes
    state = nccl.state(comm)
    nccl.CommAbort(comm)
    return state


def test_abort_ends_an_initialization_that_waits() -> None:
    assert run_emulated(1, abort_in_progress) == [IN_PROGRESS]


def abort_behind_another(rank: int, world_size: int, addr: str) -> None:
    """In a group the second communicator waits for the first, which waits for nothing."""
    nccl = Nccl()
    comms = [nccl.communicator(1, shared_id(f"{addr}{i}"), 0, blocking=0) for i in range(2)]
    for comm in comms:
        nccl.settle(comm)
    a = nccl.gpu.array(floats([1]))
    nccl.gpu.set_faults("point=launch,act=hang")
    nccl.GroupStart()
    for comm in comms:
        nccl.AllReduce(a, a, size(1), FLOAT32, SUM, comm, DEFAULT)
    nccl.GroupEnd()
    for comm in reversed(comms):
        nccl.CommAbort(comm)


def test_abort_ends_a_communicator_that_waits_for_another_of_its_group() -> None:
    run_emulated(1, abort_behind_another)


# Windows, graphs


def put_to_the_right(rank: int, world_size: int, addr: str) -> list[float]:
    nccl = Nccl()
    comm = nccl.communicator(world_size, shared_id(addr), rank)
    memory, window = ctypes.c_void_p(), ctypes.c_void_p()
    nccl.MemAlloc(ctypes.byref(memory), size(1 << 20))
    nccl.CommWindowRegister(comm, memory, size(1 << 20), ctypes.byref(window), 1)
    a = nccl.gpu.array(np.full(40_000, rank + 1, np.float32))
    right, left = (rank + 1) % world_size, (rank - 1) % world_size
    own = ctypes.c_void_p((memory.value or 0) + (1 << 19))
    copy = (own, ctypes.c_void_p(a.address), size(4 * a.size), 3)
    nccl.gpu.check(nccl.gpu.cudart.cudaMemcpy(*copy))
    put, signal_0 = (own, size(a.size), FLOAT32, right, window), (0, 0, 0)
    nccl.PutSignal(*put, size(16), *signal_0, comm, DEFAULT)
    awaited = SignalDescriptor(1, left, 0, 0)
    nccl.WaitSignal(1, ctypes.byref(awaited), comm, DEFAULT)
    out = np.zeros(40_000, np.float32)
    source = ctypes.c_void_p((memory.value or 0) + 16)
    nccl.gpu.check(
        nccl.gpu.cudart.cudaMemcpy(out.ctypes.data_as(ctypes.c_void_p), source, size(out.nbytes), 2)
    )
    too_far = nccl.result("PutSignal", *put, size((1 << 20) - 4), *signal_0, comm, DEFAULT)
    from_elsewhere = nccl.result("PutSignal", a, *put[1:], size(0), *signal_0, comm, DEFAULT)
    nccl.CommWindowDeregister(comm, window)
    nccl.MemFree(memory)
    nccl.CommDestroy(comm)
    return [*np.unique(out).tolist(), too_far, from_elsewhere]


def test_puts_arrive_with_their_signal() -> None:
    assert run_emulated(3, put_to_the_right) == [
        [3, INVALID_ARGUMENT, INVALID_ARGUMENT],
        [1, INVALID_ARGUMENT, INVALID_ARGUMENT],
        [2, INVALID_ARGUMENT, INVALID_ARGUMENT],
    ]


def register_without_windows(rank: int, world_size: int, addr: str) -> list[Any]:
    os.environ["NCCL_WIN_ENABLE"] = "0"
    nccl = Nccl()
    comm = nccl.communicator(world_size, shared_id(addr), rank)
    memory, window = ctypes.c_void_p(), ctypes.c_void_p(1)
    nccl.MemAlloc(ctypes.byref(memory), size(1 << 20))
    nccl.CommWindowRegister(comm, memory, size(1 << 20), ctypes.byref(window), 1)
    signal = nccl.result("Signal", 1 - rank, 0, 0, 0, comm, DEFAULT)
    nccl.MemFree(memory)
    nccl.CommDestroy(comm)
    return [window.value, signal]


def test_no_window_is_made_where_nccl_may_not() -> None:
    assert run_emulated(2, register_without_windows) == [[None, INVALID_ARGUMENT]] * 2


def replay_graph(rank: int, world_size: int, addr: str) -> list[float]:
    nccl = Nccl()
    comm = nccl.communicator(world_size, shared_id(addr), rank)
    stream, other = nccl.gpu.stream(), nccl.gpu.stream()
    a = nccl.gpu.array(floats([1]), stream=stream)
    stream.synchronize()
    with nccl.gpu.capture(stream) as graph:
        nccl.gpu.order(stream, other)
        nccl.AllReduce(a, a, size(1), FLOAT32, SUM, comm, other)
        nccl.gpu.order(other, stream)
    seen = [float(a.numpy()[0])]
    for _ in range(2):
        graph.launch(stream)
        stream.synchronize()
        seen.append(float(a.numpy()[0]))
    graph.close()
    nccl.CommDestroy(comm)  # would wait for the graph
    return seen


def test_collectives_are_captured_and_replayed() -> None:
    assert run_emulated(2, replay_graph) == [[1, 2, 4]] * 2


def replay_branches(rank: int, world_size: int, addr: str) -> list[float]:
    """NCCL puts the calls of a communicator in order, whatever the graph does."""
    nccl = Nccl()
    comm = nccl.communicator(world_size, shared_id(addr), rank)
    stream, other = nccl.gpu.stream(), nccl.gpu.stream()
    one, two = nccl.gpu.array(floats([1])), nccl.gpu.array(floats([1, 1]))
    nccl.gpu.synchronize()
    with nccl.gpu.capture(stream) as graph:
        nccl.gpu.order(stream, other)
        nccl.AllReduce(one, one, size(1), FLOAT32, MAX, comm, stream)
        nccl.AllReduce(two, two, size(2), FLOAT32, MAX, comm, other)
        nccl.gpu.order(other, stream)
    for _ in range(50):
        graph.launch(stream)
    stream.synchronize()
    graph.close()
    state = nccl.state(comm)
    nccl.CommDestroy(comm)
    return [state, *two.numpy().tolist()]


def test_a_communicators_calls_follow_each_other_in_a_graph() -> None:
    assert run_emulated(2, replay_branches) == [[SUCCESS, 1, 1]] * 2


def capture_a_part_of_a_group(rank: int, world_size: int, addr: str, blocking: int) -> list[int]:
    nccl = Nccl()
    comm = nccl.communicator(1, shared_id(addr), 0, blocking=blocking)
    nccl.settle(comm)
    captured, other = nccl.gpu.stream(), nccl.gpu.stream()
    a, b = nccl.gpu.array(floats([1])), nccl.gpu.array(floats([1]))
    nccl.gpu.synchronize()
    with nccl.gpu.capture(captured) as graph:
        nccl.GroupStart()
        for array, stream in ((a, captured), (b, other)):
            nccl.AllReduce(array, array, size(1), FLOAT32, SUM, comm, stream)
        codes = [nccl.result("GroupEnd"), nccl.settle(comm)]
    graph.close()
    nccl.CommAbort(comm)
    return codes


def test_a_group_goes_into_one_graph_or_into_none() -> None:
    assert run_emulated(1, capture_a_part_of_a_group, 1) == [[INVALID_USAGE, SUCCESS]]
    assert run_emulated(1, capture_a_part_of_a_group, 0) == [[INVALID_USAGE] * 2]


def share_streams(rank: int, world_size: int, addr: str) -> list[list[float]]:
    """Calls in different streams of one communicator follow each other; a group joins them."""
    nccl = Nccl()
    nccl.gpu.set_delay(300)
    comm = nccl.communicator(world_size, shared_id(addr), rank)
    streams = [nccl.gpu.stream() for _ in range(3)]
    arrays = [nccl.gpu.array(floats([i]), stream=s) for i, s in enumerate(streams)]
    for turn in range(4):
        nccl.GroupStart()
        for a, stream in zip(arrays, streams[turn % 3 :] + streams[: turn % 3], strict=True):
            nccl.AllReduce(a, a, size(1), FLOAT32, SUM, comm, stream)
        nccl.GroupEnd()
    nccl.gpu.synchronize()
    results = [a.numpy().tolist() for a in arrays]
    nccl.CommDestroy(comm)
    return results


def test_a_group_orders_the_streams_that_it_uses() -> None:
    assert run_emulated(2, share_streams) == [[[0], [16], [32]]] * 2


def share_a_stream(rank: int, world_size: int, addr: str, blocking: int) -> list[list[float]]:
    nccl = Nccl()
    names = (shared_id(f"{addr}{i}") for i in range(2))
    comms = [nccl.communicator(world_size, name, rank, blocking=blocking) for name in names]
    for comm in comms:
        nccl.settle(comm)
    arrays = [nccl.gpu.array(floats([1])) for _ in comms]
    for _ in range(20):
        nccl.GroupStart()
        for a, comm in zip(arrays, comms, strict=True):
            nccl.AllReduce(a, a, size(1), FLOAT32, MAX, comm, DEFAULT)
        nccl.GroupEnd()
        for comm in comms:
            nccl.settle(comm)
    results = [a.numpy().tolist() for a in arrays]
    for comm in comms:
        nccl.CommDestroy(comm)
    return results


@pytest.mark.parametrize("blocking", [0, 1])
def test_a_group_launches_its_communicators_in_one_order(blocking: int) -> None:
    assert run_emulated(2, share_a_stream, blocking) == [[[1], [1]]] * 2


def make_many(rank: int, world_size: int, addr: str) -> bool:
    nccl = Nccl()

    def make(turn: int) -> None:
        where = shared_id(f"{addr}{turn:04}")
        comm = nccl.communicator(world_size, where, rank)
        a = nccl.gpu.array(floats([1]))
        nccl.AllReduce(a, a, size(1), FLOAT32, SUM, comm, DEFAULT)
        nccl.CommDestroy(comm)

    def open_things() -> tuple[int, int]:
        threads, mappings = len(os.listdir("/proc/self/task")), 0
        with open("/proc/self/maps") as file:
            mappings = sum("ferro-emulated-nccl" in line for line in file)
        return threads + len(os.listdir("/proc/self/fd")), mappings

    def has_more() -> bool:
        return any(now > then for now, then in zip(open_things(), before, strict=True))

    make(0)
    before = open_things()  # a thread may be on its way out
    for turn in range(1, 100):
        make(turn)
    return not settled(has_more, False)


def test_a_hundred_communicators_leave_nothing_open() -> None:
    assert run_emulated(2, make_many) == [True, True]
