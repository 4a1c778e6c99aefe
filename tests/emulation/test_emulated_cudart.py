"""The emulated CUDA runtime does, and forbids, what the real one does."""

from __future__ import annotations

import ctypes
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from emulation.c_calls import ABORTED, DELAY_US, end_of_child
from nccl_ranks import hold

from ferro_dist.testing import emulated_gpu, run_ranks

NOT_READY = 600
HOST_FUNCTION = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


def run_alone(body: Any, *args: Any) -> Any:
    """Run `body` in a process with emulated GPUs: the tests' own must stay without."""
    return run_ranks(1, body, *args, backend="none", emulate_gpu=True)[0]


def queue_two_copies(rank: int, world_size: int, addr: str) -> tuple[int, float, list[float]]:
    gpu = emulated_gpu(delay_us=50_000)
    stream, other = gpu.stream(), gpu.stream()
    with stream:
        a = gpu.empty(4)
        source = np.arange(4, dtype=np.float32)
        gpu.cudart.cudaMemsetAsync(ctypes.c_void_p(a.address), 1, ctypes.c_size_t(16), _p(stream))
        gpu.cudart.cudaMemcpyAsync(
            _p(a.address),
            source.ctypes.data_as(ctypes.c_void_p),
            ctypes.c_size_t(16),
            1,
            _p(stream),
        )
        early = gpu.cudart.cudaStreamQuery(_p(stream))
        source[:] = 9  # pageable: taken when the call returned
        idle = gpu.cudart.cudaStreamQuery(_p(other))
        return early, idle, a.numpy().tolist()


def test_streams_are_asynchronous_and_keep_their_order() -> None:
    assert run_alone(queue_two_copies) == (NOT_READY, 0, [0, 1, 2, 3])


def copy_across_streams(rank: int, world_size: int, addr: str, does_wait: bool) -> int:
    """Count how often a copy in a second stream finds what a first one wrote."""
    gpu = emulated_gpu(delay_us=DELAY_US)
    first, second = gpu.stream(), gpu.stream()
    found = 0
    for turn in range(20):
        a = gpu.array(np.zeros(64, np.float32), stream=first)
        b = gpu.empty(64)
        first.synchronize()
        with first:
            fresh = gpu.array(np.full(64, turn + 1, np.float32))
            copy(gpu, a, fresh, first)
        if does_wait:
            gpu.order(first, second)
        copy(gpu, b, a, second)
        with second:
            found += bool((b.numpy() == turn + 1).all())
        first.synchronize()
    return found


@pytest.mark.parametrize("does_wait", [True, False])
def test_a_missing_wait_shows(does_wait: bool) -> None:
    found = run_alone(copy_across_streams, does_wait)
    # In nearly every run, but a busy machine may now and then let the second stream come late.
    assert found == 20 if does_wait else found <= 10


def order_with_legacy_stream(rank: int, world_size: int, addr: str) -> list[int]:
    gpu = emulated_gpu()
    seen = []
    for is_blocking in (True, False):
        stream = gpu.stream(is_blocking=is_blocking)
        a = gpu.array(np.zeros(4, np.int32), stream=0)
        gpu.synchronize()
        with stream:
            go_on = hold(gpu)
        fill(gpu, a, 1, stream)
        fill(gpu, a, 2, 0)  # after the blocking stream's work, before the other's
        if is_blocking:
            assert gpu.cudart.cudaStreamQuery(_p(0)) == NOT_READY
        else:
            gpu.synchronize(0)
        go_on()
        gpu.synchronize()
        seen.append(int(a.numpy().view(np.uint8)[0]))
    return seen


def test_the_legacy_stream_waits_for_blocking_streams_alone() -> None:
    assert run_alone(order_with_legacy_stream) == [2, 1]


def free_in_flight() -> None:
    gpu = emulated_gpu(delay_us=DELAY_US)
    stream = gpu.stream()
    for is_early in (False, True):  # first as it should be: a process' first calls take long
        a, b = gpu.empty(1000), gpu.empty(1000)
        copy(gpu, b, a, stream)
        if not is_early:
            stream.synchronize()
        del b
        stream.synchronize()


def count_faults(rank: int, world_size: int, addr: str) -> list[tuple[int, str]]:
    return [end_of_child(free_in_flight) for _ in range(40)]


def test_memory_freed_in_flight_faults_in_95_percent_of_runs() -> None:
    ends = run_alone(count_faults)
    faults = [text for ended_by, text in ends if ended_by == ABORTED]
    assert len(faults) >= 38, ends
    assert "cudaMemcpyAsync, in stream 0x" in faults[0]
    assert "of 4000 bytes of device memory" in faults[0]
    assert "that was freed" in faults[0]


def misuse_memory(rank: int, world_size: int, addr: str) -> dict[str, int]:
    gpu = emulated_gpu()
    a = gpu.empty(4)
    lib = gpu.cudart
    freed = ctypes.c_void_p()
    lib.cudaMalloc(ctypes.byref(freed), ctypes.c_size_t(16))
    host = np.zeros(4, np.float32)
    pointer = host.ctypes.data_as(ctypes.c_void_p)
    return {
        "free": lib.cudaFree(freed),
        "free twice": lib.cudaFree(freed),
        "copy from freed": lib.cudaMemcpy(pointer, freed, ctypes.c_size_t(16), 2),
        "copy past the end": lib.cudaMemcpy(pointer, _p(a.address), ctypes.c_size_t(32), 2),
        "wrong direction": lib.cudaMemcpy(_p(a.address), pointer, ctypes.c_size_t(16), 2),
        "last error": lib.cudaGetLastError(),
        "no error left": lib.cudaGetLastError(),
        "no such device": lib.cudaSetDevice(1),
        "no such stream": lib.cudaStreamSynchronize(_p(0x1234560)),
    }


def test_misuse_of_memory_is_refused() -> None:
    assert run_alone(misuse_memory) == {
        "free": 0,
        "free twice": 1,
        "copy from freed": 1,
        "copy past the end": 1,
        "wrong direction": 1,
        "last error": 1,
        "no error left": 0,
        "no such device": 101,
        "no such stream": 400,
    }


def fork_after_use(rank: int, world_size: int, addr: str) -> tuple[int, str]:
    gpu = emulated_gpu()
    gpu.empty(1)

    def use() -> None:
        assert gpu.cudart.cudaSetDevice(0) == 3  # cudaErrorInitializationError

    return end_of_child(use)


def test_nothing_works_in_a_forked_child() -> None:
    assert run_alone(fork_after_use) == (0, "")


def measure_events(rank: int, world_size: int, addr: str) -> tuple[bool, bool, float]:
    gpu = emulated_gpu(delay_us=20_000)
    stream = gpu.stream()
    start, end = gpu.event(has_timing=True), gpu.event(has_timing=True)
    a = gpu.empty(4)
    start.record(stream)
    fill(gpu, a, 0, stream)
    end.record(stream)
    was_reached = end.is_reached()
    end.synchronize()
    ms = ctypes.c_float()
    gpu.check(gpu.cudart.cudaEventElapsedTime(ctypes.byref(ms), _p(start), _p(end)))
    return was_reached, end.is_reached(), ms.value


def test_events_tell_when_work_is_done() -> None:
    was_reached, is_reached, ms = run_alone(measure_events)
    assert not was_reached
    assert is_reached
    assert ms >= 20


def capture_two_streams(rank: int, world_size: int, addr: str) -> dict[str, Any]:
    gpu = emulated_gpu(delay_us=300)
    origin, other = gpu.stream(), gpu.stream()
    a, b = gpu.array(np.zeros(4, np.float32)), gpu.array(np.zeros(4, np.float32))
    gpu.synchronize()
    seen: dict[str, Any] = {}
    with gpu.capture(origin) as graph:
        fill(gpu, a, 1, origin)
        gpu.order(origin, other)
        copy(gpu, b, a, other)
        gpu.order(other, origin)
    seen["before"] = b.numpy().tolist()
    graph.launch(origin)
    origin.synchronize()
    seen["after"] = b.numpy().view(np.uint8).tolist()
    graph.close()
    with pytest.raises(RuntimeError, match="unjoined"), gpu.capture(origin):
        fork_and_copy(gpu, origin, other, b, a)
    with pytest.raises(RuntimeError, match="previous error"), gpu.capture(origin):
        seen["query"] = gpu.cudart.cudaStreamQuery(_p(origin))
    with pytest.raises(RuntimeError, match="previous error"), gpu.capture(origin):
        seen["malloc"] = gpu.cudart.cudaMalloc(ctypes.byref(ctypes.c_void_p()), ctypes.c_size_t(4))
    with gpu.capture(origin, "thread_local"):
        gpu.empty(4)  # as libraries allocate
    return seen


def test_capture_records_a_graph_and_forbids_what_a_gpu_does() -> None:
    assert run_alone(capture_two_streams) == {
        "before": [0] * 4,
        "after": [1] * 16,
        "query": 900,
        "malloc": 900,
    }


def run_branches(rank: int, world_size: int, addr: str) -> list[bool]:
    """The first branch of a graph waits for the second, and a launch for the one before."""
    gpu = emulated_gpu()
    origin, other = gpu.stream(), gpu.stream()
    met = threading.Event()
    seen: list[bool] = []
    wait = HOST_FUNCTION(lambda _: seen.append(met.wait(5)))
    go_on = HOST_FUNCTION(lambda _: met.set())
    with gpu.capture(origin) as graph:
        gpu.order(origin, other)
        gpu.check(gpu.cudart.cudaLaunchHostFunc(_p(origin), wait, None))
        gpu.check(gpu.cudart.cudaLaunchHostFunc(_p(other), go_on, None))
        gpu.order(other, origin)
    graph.launch(origin)
    gpu.synchronize()
    met.clear()
    go_on_late = hold(gpu)
    graph.launch(0)
    graph.launch(origin)
    has_begun_early = met.wait(0.1)
    go_on_late()
    gpu.synchronize()
    return [*seen, has_begun_early]


def test_branches_of_a_graph_run_at_the_same_time_and_its_launches_do_not() -> None:
    assert run_alone(run_branches) == [True, True, True, False]


def ask_the_legacy_stream(rank: int, world_size: int, addr: str, name: str) -> int:
    """Wait for all blocking streams, one of which is being captured."""
    gpu = emulated_gpu()
    stream = gpu.stream(is_blocking=True)
    with (
        pytest.raises(RuntimeError, match="previous error"),
        gpu.capture(stream, "relaxed"),  # in which a thread may wait for anything else
    ):
        error: int = getattr(gpu.cudart, name)(_p(0))
    return error


@pytest.mark.parametrize("name", ["cudaStreamQuery", "cudaStreamSynchronize"])
def test_the_legacy_stream_cannot_be_asked_beside_a_captured_one(name: str) -> None:
    assert run_alone(ask_the_legacy_stream, name) == 906


def call_on_the_first_device(rank: int, world_size: int, addr: str, name: str) -> list[bool]:
    """Use what belongs to the second device in a thread that is still on the first."""
    gpu = emulated_gpu(devices=2)
    gpu.check(gpu.cudart.cudaSetDevice(1))
    stream, event, x = gpu.stream(), ctypes.c_void_p(), gpu.empty(4)
    gpu.check(gpu.cudart.cudaEventCreateWithFlags(ctypes.byref(event), 2))
    arguments: tuple[Any, ...] = {
        "cudaEventRecord": (event, _p(stream)),
        "cudaEventSynchronize": (event,),
        "cudaMemcpyAsync": (_p(x.address), _p(x.address), ctypes.c_size_t(4), 3, _p(stream)),
        "cudaPointerGetAttributes": ((ctypes.c_char * 64)(), _p(x.address)),
        "cudaStreamWaitEvent": (_p(stream), event, 0),
    }[name]
    before = gpu.has_context(0)
    with ThreadPoolExecutor(1) as thread:
        gpu.check(thread.submit(getattr(gpu.cudart, name), *arguments).result())
    after = gpu.has_context(0)
    stream.synchronize()  # else a copy may find its memory freed
    return [before, after]


@pytest.mark.parametrize(
    "name",
    [
        *("cudaEventRecord", "cudaEventSynchronize", "cudaMemcpyAsync"),
        *("cudaPointerGetAttributes", "cudaStreamWaitEvent"),
    ],
)
def test_calls_make_a_context_on_the_current_device(name: str) -> None:
    outcome = run_ranks(1, call_on_the_first_device, name, backend="none")
    assert outcome == [[False, True]]


def run_out_of_memory(rank: int, world_size: int, addr: str) -> list[int]:
    gpu = emulated_gpu(faults="point=malloc,hit=2,act=out_of_memory")
    data = ctypes.c_void_p()
    results = [gpu.cudart.cudaMalloc(ctypes.byref(data), ctypes.c_size_t(8)) for _ in range(3)]
    return [*results, gpu.cudart.cudaMalloc(ctypes.byref(data), ctypes.c_size_t(2**60))]


def test_allocation_fails_on_demand_and_when_there_is_no_room() -> None:
    assert run_alone(run_out_of_memory) == [0, 2, 0, 2]


def make_and_end_streams(rank: int, world_size: int, addr: str) -> int:
    gpu = emulated_gpu()
    for _ in range(200):
        stream = gpu.stream()
        gpu.array(np.zeros(4), stream=stream)
        stream.synchronize()
        del stream
    while gpu.stream_count > 0:  # the last one's thread may take a moment
        pass
    return gpu.stream_count


def test_streams_end_with_their_last_work() -> None:
    assert run_alone(make_and_end_streams) == 0


def fork_and_copy(gpu: Any, stream: Any, other: Any, target: Any, source: Any) -> None:
    gpu.order(stream, other)
    copy(gpu, target, source, other)


def fill(gpu: Any, array: Any, value: int, stream: Any) -> None:
    gpu.check(
        gpu.cudart.cudaMemsetAsync(
            _p(array.address), value, ctypes.c_size_t(array.nbytes), _p(stream)
        )
    )


def copy(gpu: Any, target: Any, source: Any, stream: Any) -> None:
    ends = _p(target.address), _p(source.address)
    gpu.check(gpu.cudart.cudaMemcpyAsync(*ends, ctypes.c_size_t(source.nbytes), 3, _p(stream)))


def _p(value: Any) -> ctypes.c_void_p:
    return ctypes.c_void_p(value if isinstance(value, int) else value.handle)
