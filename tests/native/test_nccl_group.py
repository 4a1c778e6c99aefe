"""Groups over NCCL: order between streams, lifetime of arrays, timeouts. GPUs are emulated."""

from __future__ import annotations

import contextlib
import gc
import os
import sys
import threading
import time
import weakref
from typing import Any

import numpy as np
import pytest
from nccl_ranks import (
    TIMEOUT_S,
    connect,
    ends_before_arrays_are_dropped,
    full,
    hold,
    ranked,
    ranks,
    shallow_gpu,
    values,
)

from ferro_dist import interop
from ferro_dist.errors import DistributedError, InvalidArray, Io, LockPoisoned, Timeout
from ferro_dist.reduce_op import ReduceOp
from ferro_dist.testing import emulated_gpu

SUM = ReduceOp.SUM
DELAY_US = 2_000  # of every operation in a stream: far more than a call takes


def make_group(backend: Any) -> Any:
    communicator = connect(backend)
    from ferro_dist._native.nccl_group import NcclGroup

    return NcclGroup(communicator, interop)


def chain_calls(backend: Any) -> list[float]:
    gpu = emulated_gpu()
    group = make_group(backend)
    gpu.set_delay(DELAY_US)
    with gpu.stream():
        x = gpu.array(np.ones(4, np.float32))  # still being copied when the call is made
        out = gpu.empty(4)
        for _ in range(5):
            group.allreduce(x, out, SUM, False, None, 0)
            group.allreduce(out, x, SUM, False, None, 0)
        result = values(x)  # queued behind the last call, and nothing else waits for it
    gpu.set_delay(0)
    group.close()
    return result


def test_calls_come_after_and_before_the_callers_work() -> None:
    assert ranks(2, chain_calls) == [[1024.0] * 4] * 2


def wait_later(backend: Any) -> list[list[float]]:
    gpu = emulated_gpu()
    group = make_group(backend)
    gpu.set_delay(DELAY_US)
    with gpu.stream():
        arrays = [ranked(backend.rank, 4) for _ in range(4)]
        works = [group.allreduce(x, x, SUM, True, None, 0) for x in arrays]
        for work in works:
            work.wait()
        results = [values(work.result()) for work in works]
    assert all(work.is_completed() for work in works)
    gpu.set_delay(0)
    group.close()
    return results


def test_work_orders_the_callers_stream_when_it_is_waited_for() -> None:
    assert ranks(2, wait_later) == [[[1.0, 3.0, 5.0, 7.0]] * 4] * 2


def hold_until_done(backend: Any) -> None:
    gpu = emulated_gpu()
    group = make_group(backend)
    go_on = hold(gpu)
    x = ranked(backend.rank, 4)
    references = sys.getrefcount(x)
    group.allreduce(x, x, SUM, False, None, 0)
    assert sys.getrefcount(x) > references
    assert group.num_in_flight == 1
    go_on()
    group.synchronize()
    assert group.num_in_flight == 0
    assert sys.getrefcount(x) == references
    group.close()


def test_arrays_in_flight_are_kept_until_the_gpu_is_done() -> None:
    ranks(2, hold_until_done)


def miss_a_call(backend: Any) -> str:
    group = make_group(backend)
    if backend.rank == 1:
        backend.barrier(False, None, 0)
        group.abort()
        return ""
    x = ranked(0)

    def call_and_wait() -> None:
        group.allreduce(x, x, SUM, False, 0.2, 0)  # returns, unless the launch alone takes too long
        group.synchronize(20)

    with pytest.raises(Timeout) as raised:
        call_and_wait()
    with pytest.raises(LockPoisoned):
        group.allreduce(x, x, SUM, False, None, 0)
    backend.barrier(False, None, 0)
    group.close()
    return str(raised.value)


def test_call_that_the_others_do_not_make_times_out_and_ends_the_group() -> None:
    assert "ncclAllReduce" in ranks(2, miss_a_call)[0]


def drop_arrays_of_a_call_that_was_given_up(backend: Any) -> list[bool]:
    group = make_group(backend)
    ended: list[bool] = []
    if backend.rank == 0:
        ended = ends_before_arrays_are_dropped(
            group.communicator, lambda x: group.allreduce(x, x, SUM, False, 0.2, 0)
        )
    backend.barrier(False, None, 0)
    group.abort()
    return ended


def test_arrays_of_a_call_that_was_given_up_are_kept_to_the_groups_end() -> None:
    """NCCL's own thread may still begin the call."""
    assert ranks(2, drop_arrays_of_a_call_that_was_given_up) == [[True], []]


def exchange_in_a_ring(backend: Any) -> list[list[float]]:
    gpu = emulated_gpu()
    group = make_group(backend)
    after, before = (backend.rank + 1) % 3, (backend.rank - 1) % 3
    out = gpu.empty(8)
    group.sendrecv(ranked(backend.rank), out, after, before, False, None, 0)
    received = values(out)
    send_counts = [1, 2, 3]
    recv_counts = [backend.rank + 1] * 3
    uneven = gpu.empty(sum(recv_counts))
    group.all_to_all(ranked(10 * backend.rank, 6), uneven, send_counts, recv_counts, False, None, 0)
    group.barrier(False, None, 0)
    result = [received, values(uneven)]
    group.close()
    return result


def test_messages_and_uneven_exchanges_arrive() -> None:
    results = ranks(3, exchange_in_a_ring)
    starts = [0, 1, 3]
    for rank, (received, uneven) in enumerate(results):
        assert received == [float(i + (rank - 1) % 3) for i in range(8)]
        first = starts[rank]
        expected = [10.0 * peer + first + i for peer in range(3) for i in range(rank + 1)]
        assert uneven == expected


def capture_a_call(backend: Any) -> list[float]:
    gpu = emulated_gpu()
    group = make_group(backend)
    x = ranked(backend.rank, 4)
    group.allreduce(x, x, SUM, False, None, 0)  # connects, which no graph can hold
    group.synchronize()
    with gpu.stream() as stream:
        with gpu.capture(stream) as graph:
            group.allreduce(x, x, SUM, False, None, 0)
        for _ in range(3):
            graph.launch(stream)
        result = values(x)
    del graph
    group.close()
    return result


def test_calls_can_be_captured_into_a_graph() -> None:
    assert ranks(2, capture_a_call) == [[8.0, 24.0, 40.0, 56.0]] * 2


def capture_alone(backend: Any) -> list[bool]:
    """What a capture has reached is captured itself."""
    gpu = emulated_gpu()
    group = make_group(backend)
    x = ranked(backend.rank, 4)
    group.allreduce(x, x, SUM, False, None, 0)
    group.synchronize()
    is_reached = []
    for is_async in (False, True):
        with gpu.stream() as stream, gpu.capture(stream) as graph:
            group.allreduce(x, x, SUM, is_async, None, 0)
            is_reached.append(group.stream.is_capturing())
        graph.close()
    group.close()
    return is_reached


def test_only_asynchronous_calls_need_the_groups_own_stream() -> None:
    assert ranks(2, capture_alone) == [[False, True]] * 2


def call_on_the_default_stream_beside_a_capture(backend: Any, is_known: bool) -> list[float]:
    """CUDA would refuse what the call does there, and end the capture, which is somebody else's."""
    gpu = emulated_gpu()
    group = make_group(backend)
    x, y = ranked(backend.rank, 4), ranked(backend.rank, 4)
    given = y if is_known else DlpackArray(y)  # whose library would make that stream wait, too
    group.allreduce(x, x, SUM, False, None, 0)
    group.synchronize()
    refusals = []

    def call() -> None:
        with pytest.raises(Io, match="The default stream cannot be used") as raised:
            group.allreduce(given, given, SUM, False, None, 0)
        refusals.append(raised)

    with gpu.stream(is_blocking=True) as stream:
        with gpu.capture(stream) as graph:
            thread = threading.Thread(target=call)
            thread.start()
            thread.join()
            group.allreduce(x, x, SUM, False, None, 0)
        graph.launch(stream)
        captured = values(x)
    assert len(refusals) == 1
    group.allreduce(y, y, SUM, False, None, 0)
    result = values(y)
    del graph
    group.close()
    return [captured[0], result[0]]


@pytest.mark.parametrize("is_known", [True, False])
def test_a_call_that_would_spoil_a_capture_is_refused(is_known: bool) -> None:
    assert ranks(2, call_on_the_default_stream_beside_a_capture, is_known) == [[2.0, 1.0]] * 2


def wait_on_the_default_stream_beside_a_capture(backend: Any) -> list[float]:
    gpu = emulated_gpu()
    group = make_group(backend)
    x = ranked(1, 4)
    with gpu.stream():
        go_on = hold(gpu)
        work = group.allreduce(x, x, SUM, True, None, 0)
    refusals = []

    def wait() -> None:
        with pytest.raises(Io, match="The default stream cannot be used") as raised:
            work.wait()
        refusals.append(raised)

    with gpu.stream(is_blocking=True) as stream, gpu.capture(stream) as graph:
        thread = threading.Thread(target=wait)
        thread.start()
        thread.join()
    graph.close()
    assert len(refusals) == 1
    go_on()
    work.wait()
    result = values(x)
    group.close()
    return result


def test_a_wait_that_would_spoil_a_capture_is_refused() -> None:
    assert ranks(1, wait_on_the_default_stream_beside_a_capture) == [[1.0, 2.0, 3.0, 4.0]]


def drop_the_group(backend: Any) -> int:
    gpu = emulated_gpu()
    group = make_group(backend)
    go_on = hold(gpu)
    x = ranked(backend.rank, 4)
    references = sys.getrefcount(x)
    group.allreduce(x, x, SUM, False, None, 0)
    del group
    gc.collect()
    held = sys.getrefcount(x) - references
    go_on()
    gpu.synchronize()
    while sys.getrefcount(x) > references:  # the watchdog sees to it, within this test's time
        os.sched_yield()  # lets go of the GIL, as any program does now and then
    return held


def test_group_that_is_dropped_keeps_its_arrays_until_the_gpu_is_done() -> None:
    assert min(ranks(2, drop_the_group)) > 0


def drop_a_group_while_a_stream_is_full(backend: Any) -> None:
    gpu = shallow_gpu()
    stream, x = gpu.stream(), ranked(0)
    group = make_group(backend)
    group.allreduce(x, x, SUM, True, None, 0)
    group.synchronize()
    with full(stream):
        del group


def test_a_group_may_be_dropped_while_cuda_keeps_another_thread_waiting() -> None:
    ranks(1, drop_a_group_while_a_stream_is_full)


def make_a_group_while_a_stream_is_full(backend: Any) -> None:
    gpu = shallow_gpu()
    communicator = connect(backend)
    from ferro_dist._native.nccl_group import NcclGroup

    with full(gpu.stream()):
        group = NcclGroup(communicator, interop)
    group.close()


def test_a_group_may_be_made_while_cuda_keeps_another_thread_waiting() -> None:
    ranks(1, make_a_group_while_a_stream_is_full)


def call_while_letting_go(backend: Any) -> list[int]:
    """An array's end makes another call, as code of other threads may at the same moment."""
    gpu = emulated_gpu()
    group = make_group(backend)
    x, y, out = ranked(0), ranked(0), gpu.empty(8)
    seen = []
    held = []

    def call_again() -> None:
        group.synchronize()
        held.append(hold(gpu))
        group.allreduce(y, y, SUM, False, None, 0)
        seen.append(group.num_in_flight)

    weakref.finalize(out.memory, call_again)
    group.allreduce(x, out, SUM, False, None, 0)
    del out
    group.synchronize()  # lets go of the output
    seen.append(group.num_in_flight)
    (go_on,) = held
    go_on()
    group.synchronize()
    seen.append(group.num_in_flight)
    group.close()
    return seen


def test_a_call_made_while_arrays_are_let_go_keeps_its_own() -> None:
    assert ranks(1, call_while_letting_go) == [[1, 1, 0]]


def hold_works(backend: Any) -> list[int]:
    """Another thread lets go of calls at every moment, also before this one has noted its own."""
    gpu = emulated_gpu()
    group = make_group(backend)
    x, out = ranked(0), gpu.empty(8)
    references = sys.getrefcount(x)
    is_over = threading.Event()

    def let_go() -> None:
        while not is_over.is_set():
            group.synchronize()

    thread = threading.Thread(target=let_go)
    thread.start()
    works = [group.allreduce(x, out, SUM, True, None, 0) for _ in range(500)]
    is_over.set()
    thread.join()
    group.synchronize()
    held = sys.getrefcount(x) - references
    assert all(work.is_completed() and work.result() is out for work in works)
    group.close()
    return [held, group.num_in_flight]


def test_work_that_is_done_holds_no_inputs() -> None:
    assert ranks(1, hold_works) == [[0, 0]]


class OtherLibrarysArray:
    """An array whose library has its own current stream, and names it with the array."""

    def __init__(self, array: Any, stream: Any) -> None:
        self.array = array
        self.__cuda_array_interface__ = {
            "version": 3,
            "shape": array.shape,
            "typestr": "<f4",
            "strides": None,
            "data": (array.address, False),
            "stream": stream.handle,
        }


def mix_two_libraries(backend: Any, is_async: bool) -> tuple[list[float], list[float]]:
    """The output's library has still to overwrite it, and reads it in its own stream."""
    gpu = emulated_gpu()
    group = make_group(backend)
    here, there = gpu.stream(), gpu.stream()
    with there:
        out = gpu.array(np.zeros(4, np.float32))
        there.synchronize()
        gpu.set_delay(DELAY_US)
        gpu.write(out, np.full(4, -1))
    with here:
        x = gpu.array(np.ones(4, np.float32))
        foreign = OtherLibrarysArray(out, there)
        work = group.allreduce(x, foreign, SUM, is_async, None, 0)
        if is_async:
            work.wait()
    with there:
        first = values(out)
    with here, pytest.raises(InvalidArray, match="two streams"):
        group.communicator.allreduce(x, foreign)
    # As input, while its library is writing it.
    with there:
        gpu.write(out, np.full(4, 5))
    with here:
        group.allreduce(foreign, x, SUM, False, None, 0)
        second = values(x)
    gpu.set_delay(0)
    group.close()
    return first, second


@pytest.mark.parametrize("is_async", [False, True])
def test_a_call_on_arrays_of_two_libraries_is_in_order_with_both(is_async: bool) -> None:
    assert ranks(2, mix_two_libraries, is_async) == [([2.0] * 4, [10.0] * 4)] * 2


class DlpackArray:
    """Of a library that nobody knows."""

    def __init__(self, array: Any) -> None:
        self.__dlpack__ = array.__dlpack__
        self.__dlpack_device__ = array.__dlpack_device__


def reduce_what_dlpack_alone_describes(backend: Any, is_async: bool) -> list[float]:
    """Its library has still to write it, in a stream for which no other waits."""
    gpu = emulated_gpu()
    group = make_group(backend)
    x, out = (gpu.array(np.zeros(4)) for _ in range(2))
    gpu.synchronize()
    gpu.set_delay(DELAY_US)
    with gpu.stream():
        for value in (7, 8, 9):
            gpu.write(x, np.full(4, value))
        work = group.allreduce(DlpackArray(x), DlpackArray(out), SUM, is_async, None, 0)
        if is_async:
            work.wait()
    result = values(out)
    gpu.set_delay(0)
    group.close()
    return result


@pytest.mark.parametrize("is_async", [False, True])
def test_a_call_on_an_array_of_an_unknown_library_comes_after_its_work(is_async: bool) -> None:
    assert ranks(2, reduce_what_dlpack_alone_describes, is_async) == [[18.0] * 4] * 2


def exchange_in_place(backend: Any) -> list[list[float]]:
    gpu = emulated_gpu()
    group = make_group(backend)
    x = ranked(10 * backend.rank, 4)
    results = []
    for out in (x, x[:], x.reshape(2, 2)):
        gpu.write(x, np.arange(4) + 10 * backend.rank)
        group.all_to_all(x, out, None, None, False, None, 0)
        results.append(values(x))
    with pytest.raises(InvalidArray, match="overlap"):
        group.all_to_all(x[:2], x[1:3], None, None, False, None, 0)
    group.close()
    return results


def test_all_to_all_works_in_place_of_the_same_memory() -> None:
    assert ranks(2, exchange_in_place) == [[[0, 1, 10, 11]] * 3, [[2, 3, 12, 13]] * 3]


def notice_without_calling(backend: Any) -> bool:
    group = make_group(backend)
    emulated_gpu().set_faults("point=allreduce,act=async_error")
    x = ranked(backend.rank)
    with contextlib.suppress(DistributedError):  # where the error is there before the call is
        group.allreduce(x, x, SUM, False, None, 0)
    deadline = time.monotonic() + TIMEOUT_S
    while not group.communicator.is_closed and time.monotonic() < deadline:
        pass  # no call of NCCL from this thread: the watchdog is on its own
    was_aborted: bool = group.communicator.is_closed
    group.close()
    return was_aborted


def test_watchdog_aborts_a_communicator_whose_error_nobody_met() -> None:
    assert ranks(2, notice_without_calling) == [True, True]
