"""What becomes of groups, arrays and processes in the wrong order. GPUs are emulated."""

from __future__ import annotations

import contextlib
import gc
import os
import resource
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gpu.gpu_ranks import abort_under_load, connect, ranks
from leaks import settled

import ferro_dist as fd
from ferro_dist.errors import ChannelClosed, LockPoisoned, Timeout, UnsupportedOp
from ferro_dist.testing import emulated_gpu, run_ranks

GROUPS = 1000
WARM_UP = 50


# Many groups


def make_groups(rank: int, world_size: int, addr: str) -> tuple[int, ...]:
    gpu = emulated_gpu()
    x = gpu.array(np.ones(4))
    before = (0, 0, 0, 0)
    for number in range(GROUPS):
        if number == WARM_UP:
            before = held(gpu)
        group = fd.NcclBackend(0, 1, fd.get_unique_id(), timeout=30)
        fd.allreduce(x, group, out=x)
        group.close()
    gc.collect()

    def left() -> bool:
        return any(now > then for now, then in zip(held(gpu)[:3], before[:3], strict=True))

    settled(left, False)  # a stream may be on its way out
    return tuple(now - then for now, then in zip(held(gpu), before, strict=True))


def held(gpu: Any) -> tuple[int, int, int, int]:
    """Descriptors, threads, streams, and megabytes of resident memory."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    megabytes = pages * os.sysconf("SC_PAGE_SIZE") >> 20
    threads = len(os.listdir("/proc/self/task"))
    return len(os.listdir("/proc/self/fd")), threads, gpu.stream_count, megabytes


@pytest.mark.timeout(1200)  # a busy machine takes minutes for so many
def test_a_thousand_groups_leave_nothing() -> None:
    [(descriptors, threads, streams, megabytes)] = ranks(1, make_groups, timeout=1000)
    assert descriptors <= 0
    assert threads <= 0
    assert streams <= 0
    assert megabytes <= 8


# Memory on GPUs that are not this rank's


def work_on_the_second_gpu(rank: int, world_size: int, addr: str) -> list[bool]:
    gpu = emulated_gpu(devices=2)
    from ferro_dist._native.cuda_runtime import set_device
    from ferro_dist._native.nccl_memory import NcclMemory

    set_device(1)
    x = gpu.array(np.ones(4))
    with connect("nccl", rank, world_size, addr) as group:
        fd.allreduce(x, group)
        # Asked by nobody else, a thread of ours finds out that the call is done.
        while group._group.num_in_flight > 0:
            time.sleep(0.001)
        registration = group.comm.register(x)
        del registration
        memory = NcclMemory(64, 1)
        del memory
    gc.collect()
    return [gpu.has_context(number) for number in range(2)]


def test_nothing_is_put_on_gpus_that_are_not_used() -> None:
    assert run_ranks(1, work_on_the_second_gpu, backend="none") == [[False, True]]


def drop_a_group_elsewhere(rank: int, world_size: int, addr: str) -> list[bool]:
    """A thread begins on the first GPU, and the collector may run in any."""
    gpu = emulated_gpu(devices=2)
    from ferro_dist._native.cuda_runtime import set_device

    set_device(1)
    x = gpu.array(np.ones(4))
    held = [connect("nccl", rank, world_size, addr)]
    fd.allreduce(x, held[0])
    held[0].synchronize()
    dropped, num_streams = weakref.ref(held[0]), gpu.stream_count
    thread = threading.Thread(target=held.clear)
    thread.start()
    thread.join()
    gc.collect()
    assert dropped() is None
    assert settled(lambda: gpu.stream_count < num_streams, True)
    return [gpu.has_context(number) for number in range(2)]


def test_a_group_that_is_dropped_by_any_thread_puts_nothing_on_other_gpus() -> None:
    assert run_ranks(1, drop_a_group_elsewhere, backend="none") == [[False, True]]


def drop_memory_of_nccl_elsewhere(rank: int, world_size: int, addr: str) -> list[Any]:
    gpu = emulated_gpu(devices=2)
    from ferro_dist._native.cuda_memory import location_of
    from ferro_dist._native.cuda_runtime import set_device
    from ferro_dist._native.nccl_memory import NcclMemory
    from ferro_dist.parallel.buckets.gpu_memory import GpuMemory, free_unused_memory

    set_device(1)
    x = gpu.array(np.ones(4))
    with connect("nccl", rank, world_size, addr) as group:
        memory, bucket = NcclMemory(4), GpuMemory(group, x).empty(4, np.float32)
        addresses = [memory.address, bucket.address]
        held = [memory, bucket]
        del memory, bucket
        with ThreadPoolExecutor(1) as thread:
            thread.submit(held.clear).result()

        def places() -> list[str]:
            free_unused_memory()  # as each round does
            return [location_of(address)[0] for address in addresses]

        freed = ["unregistered"] * 2
        assert settled(places, freed) == freed
        return [gpu.has_context(number) for number in range(2)]


def test_memory_of_nccl_that_any_thread_drops_puts_nothing_on_other_gpus() -> None:
    assert run_ranks(1, drop_memory_of_nccl_elsewhere, backend="none") == [[False, True]]


def drop_memory_of_nccl_without_threads(rank: int, world_size: int, addr: str) -> list[str]:
    """Drop it in a thread that is on another GPU, where no more threads can be made."""
    emulated_gpu(devices=2)
    from ferro_dist._native.cuda_memory import location_of
    from ferro_dist._native.cuda_runtime import set_device
    from ferro_dist._native.nccl_memory import NcclMemory

    set_device(1)
    held = [NcclMemory(4)]
    addresses = [held[0].address]
    end = threading.Event()
    with ThreadPoolExecutor(1) as thread:
        thread.submit(held.clear).result()  # makes the thread that frees
        held.append(NcclMemory(4))
        addresses.append(held[0].address)
        # More than the stacks of ended threads that the C library keeps for new ones.
        idle = [threading.Thread(target=end.wait, daemon=True) for _ in range(8)]
        for each in idle:
            each.start()
        limits = resource.getrlimit(resource.RLIMIT_AS)
        in_use = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (in_use + (1 << 20), limits[1]))
        with pytest.raises(RuntimeError, match="can't start new thread"):
            threading.Thread(target=int).start()
        thread.submit(held.clear).result()
        resource.setrlimit(resource.RLIMIT_AS, limits)
        end.set()
    freed = ["unregistered"] * 2
    return settled(lambda: [location_of(address)[0] for address in addresses], freed)


def test_memory_of_nccl_is_freed_where_no_more_threads_can_be_made() -> None:
    outcome = run_ranks(1, drop_memory_of_nccl_without_threads, backend="none")
    assert outcome == [["unregistered"] * 2]


def drop_small_things_elsewhere(rank: int, world_size: int, addr: str) -> list[bool]:
    gpu = emulated_gpu(devices=2)
    from ferro_dist._native.cuda_memory import DeviceMemory, PinnedMemory, location_of
    from ferro_dist._native.cuda_runtime import set_device
    from ferro_dist._native.cuda_stream import Event, Stream

    set_device(1)
    num_streams = gpu.stream_count
    memory, stream, closed = DeviceMemory(4), Stream(), (DeviceMemory(4), Stream())
    addresses = [memory.address, closed[0].address]
    held = [memory, PinnedMemory(4), stream, Event(), stream.record()]
    del memory, stream

    def let_go() -> None:
        held.clear()
        for each in closed:
            each.close()

    thread = threading.Thread(target=let_go)
    thread.start()
    thread.join()
    assert settled(lambda: gpu.stream_count, num_streams) == num_streams  # one may still work
    assert [location_of(address)[0] for address in addresses] == ["unregistered"] * 2
    return [gpu.has_context(number) for number in range(2)]


def test_what_any_thread_drops_puts_nothing_on_other_gpus() -> None:
    assert run_ranks(1, drop_small_things_elsewhere, backend="none") == [[False, True]]


# Ends that nobody ordered


def drop_groups(rank: int, world_size: int, addr: str) -> None:
    gpu = emulated_gpu(delay_us=300)
    x = gpu.array(np.ones(4))
    for _ in range(10):
        group = connect("nccl", rank, world_size, f"{addr}-{_}")
        fd.allreduce(x, group, out=x)
        dropped = weakref.ref(group)
        del group
        gc.collect()
        assert dropped() is None


def test_groups_dropped_without_close_end_by_themselves() -> None:
    ranks(2, drop_groups)


def close_with_work(rank: int, world_size: int, addr: str, kind: str) -> list[float]:
    gpu = emulated_gpu(delay_us=2_000)
    group = connect(kind, rank, world_size, addr)
    x = gpu.array(np.ones(4))
    for _ in range(5):
        fd.allreduce(x, group, out=x, async_op=True)
    group.close()  # waits for them
    numbers: list[float] = x.numpy().tolist()
    with pytest.raises(ChannelClosed):
        fd.allreduce(x, group)
    return numbers


@pytest.mark.parametrize("kind", ["nccl", "hybrid"])
def test_close_waits_for_work_in_flight(kind: str) -> None:
    assert ranks(2, close_with_work, kind) == [[32.0] * 4] * 2


def abort_in_the_middle(rank: int, world_size: int, addr: str) -> tuple[int, str]:
    gpu = emulated_gpu(delay_us=100)
    group = connect("nccl", rank, world_size, addr)
    return abort_under_load(group, gpu.array(np.ones(1000)), gpu.stream(), 20)


def test_abort_from_another_thread_ends_the_calls() -> None:
    for numbers, ended in ranks(2, abort_in_the_middle):
        assert numbers >= 20
        assert ended == "ChannelClosed"


def abort_on_all_ranks(rank: int, world_size: int, addr: str) -> tuple[str, int | None]:
    """Each finds that the other has left, too, which is not why its own calls fail."""
    x = emulated_gpu().array(np.ones(4))
    with (
        connect("hybrid", rank, world_size, addr) as group,
        fd.NcclBackend(0, 1, fd.get_unique_id()) as other,
    ):
        group.nccl.abort()
        fd.barrier(group)
        for _ in range(10):  # the watchdog looks after both groups before it lets go of this array
            fd.allreduce(x, other)
            assert settled(lambda: other._group.num_in_flight, 0) == 0
        with pytest.raises(ChannelClosed) as told:
            fd.allreduce(x, group)
        return str(told.value), told.value.peer


def test_a_rank_that_aborts_is_told_so_whoever_else_does() -> None:
    message = "allreduce: This rank has aborted the communicator, or its calls."
    assert ranks(2, abort_on_all_ranks) == [(message, None)] * 2


def abort_with_a_graph(rank: int, world_size: int, addr: str) -> tuple[float, str]:
    """A graph that captured a call keeps NCCL from freeing its communicator, and nothing else."""
    gpu = emulated_gpu()
    group = connect("nccl", rank, world_size, addr)
    x = gpu.array(np.ones(4))
    fd.allreduce(x, group, out=x)
    group.synchronize()
    stream = gpu.stream()
    with gpu.capture(stream) as graph:
        fd.allreduce(x, group, out=x)
    group.abort()
    assert not group.comm.is_closed
    with connect("nccl", rank, world_size, f"{addr}-again") as other:
        y = float(fd.allreduce(gpu.array(np.ones(4)), other).numpy()[0])
    with pytest.raises(Timeout, match="graphs") as told:
        group.close(0.1)
    graph.close()
    group.close()
    assert group.comm.is_closed
    return y, str(told.value)


def test_a_graph_that_lives_holds_up_only_its_own_communicator() -> None:
    for y, message in ranks(2, abort_with_a_graph):
        assert y == 2.0
        assert "delete them" in message


def abandon_a_capture(rank: int, world_size: int, addr: str) -> None:
    gpu = emulated_gpu()
    x = gpu.array(np.ones(4))
    group = connect("nccl", rank, world_size, addr)
    fd.allreduce(x, group, out=x)  # connects the ranks, for which a capture cannot wait
    with contextlib.suppress(KeyError), gpu.capture(gpu.stream()):
        fd.allreduce(x, group, out=x)
        raise KeyError
    group.close(timeout=20)  # else a Timeout: NCCL waits for the graph


def test_a_capture_that_was_abandoned_keeps_no_group() -> None:
    ranks(2, abandon_a_capture)


def wait_in_a_capture(rank: int, world_size: int, addr: str) -> list[float]:
    gpu = emulated_gpu()
    x = gpu.array(np.ones(4))
    group = connect("nccl", rank, world_size, addr)
    fd.allreduce(x, group)
    for async_op in (False, True):
        with gpu.capture(gpu.stream()) as graph:
            work = fd.allreduce(x, group, out=x, async_op=True)
            with pytest.raises(UnsupportedOp, match="graph"):
                fd.barrier(group, async_op=async_op)
            work.wait()
            fd.allreduce(x, group, out=x)
        graph.launch()
        gpu.synchronize()
        graph.close()
    fd.barrier(group)
    numbers: list[float] = x.numpy().tolist()
    group.close()
    return numbers


def test_a_barrier_is_refused_where_it_would_become_part_of_a_graph() -> None:
    """The host would wait for nothing; the capture and the group go on."""
    assert ranks(2, wait_in_a_capture) == [[16.0] * 4] * 2


def abort_beside_a_capture(rank: int, world_size: int, addr: str) -> list[float]:
    """NCCL waits for its work when it aborts, and does so in a thread of the reaper's."""
    gpu = emulated_gpu()
    x = gpu.array(np.ones(4))
    stream = gpu.stream()
    groups = [connect("nccl", rank, world_size, f"{addr}-{number}") for number in range(2)]
    for group in groups:
        fd.allreduce(x, group)
        group.synchronize()
    with gpu.capture(stream) as graph:
        groups[0].abort()
        fd.allreduce(x, groups[1], out=x)
    with stream:
        graph.launch()
        numbers: list[float] = x.numpy().tolist()
    graph.close()
    groups[1].close()
    return numbers


def test_a_capture_goes_on_while_a_group_is_aborted() -> None:
    assert ranks(2, abort_beside_a_capture) == [[2.0] * 4] * 2


def call_from_two_threads(rank: int, world_size: int, addr: str) -> list[float]:
    """One communicator, whose calls come one after the other: here all are alike."""
    gpu = emulated_gpu()
    with connect("nccl", rank, world_size, addr) as group:
        arrays = [gpu.array(np.ones(100)) for _ in range(2)]

        def call(x: Any) -> None:
            with gpu.stream():
                for _ in range(100):
                    fd.allreduce(x, group, out=x, op="max")

        threads = [threading.Thread(target=call, args=(x,)) for x in arrays]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        group.synchronize()
        return [float(x.numpy().max()) for x in arrays]


def test_calls_from_two_threads_are_serialized() -> None:
    assert ranks(2, call_from_two_threads) == [[1.0, 1.0]] * 2


def fork_and_call(rank: int, world_size: int, addr: str, kind: str) -> int:
    gpu = emulated_gpu()
    with connect(kind, rank, world_size, addr) as group:
        x = gpu.array(np.ones(4))
        work = fd.allreduce(x, group, async_op=True)
        getattr(group, "nccl", group).synchronize()
        # A result's memory would be refused by CUDA first.
        calls = (lambda: fd.allreduce(x, group, out=x), work.wait, work.is_completed)
        child = os.fork()
        if child == 0:
            try:
                for call in calls:
                    with pytest.raises(LockPoisoned):
                        call()
                group.close()  # as the end of a ``with`` block would
                os._exit(7)
            finally:
                os._exit(1)
        _, status = os.waitpid(child, 0)
        assert fd.allreduce(x, group).numpy().tolist() == [world_size] * 4
        return os.waitstatus_to_exitcode(status)


@pytest.mark.parametrize("kind", ["nccl", "hybrid"])
def test_a_forked_child_is_refused_and_the_parent_goes_on(kind: str) -> None:
    assert ranks(2, fork_and_call, kind) == [7, 7]


FORKED = """
import os
import warnings
warnings.simplefilter("ignore", DeprecationWarning)  # of forks beside threads, from Python 3.12 on
group = connect()
fd.allreduce(x, group)
child = os.fork()
if child == 0:
    raise SystemExit(7)  # through the interpreter's end, where the parent's group is its to find
_, status = os.waitpid(child, 0)
group.close()
raise SystemExit(os.waitstatus_to_exitcode(status))
"""


def test_a_forked_child_may_exit_as_any_program() -> None:
    assert run(FORKED) == (7, "")


# Results


def read_results_after_the_end(rank: int, world_size: int, addr: str, kind: str) -> list[Any]:
    x = emulated_gpu().array(np.ones(4))
    with connect(kind, rank, world_size, addr) as group:
        closed, aborted = group.split([0, 1]), group.split([0, 1])
        right, unknown = (fd.allreduce(x, part, async_op=True) for part in (closed, aborted))
        closed.close()
        getattr(aborted, "nccl", aborted).abort()
        with pytest.raises(ChannelClosed):
            unknown.result()
        aborted.close()
    right.wait(1)
    results: list[Any] = right.result().numpy().tolist()
    return results


@pytest.mark.parametrize("kind", ["nccl", "hybrid"])
def test_results_outlive_a_group_that_was_closed_but_not_one_that_was_aborted(kind: str) -> None:
    assert ranks(2, read_results_after_the_end, kind) == [[2.0] * 4] * 2


def stop_what_waits(rank: int, world_size: int, addr: str, how: str) -> None:
    """Rank 1 never makes the call that rank 0 stops."""
    x = emulated_gpu().array(np.ones(4))
    with connect("hybrid", rank, world_size, addr) as group:
        fd.allreduce(x, group)  # connects the ranks, for which the call below would wait otherwise
        if rank == 0:
            unknown = fd.allreduce(x, group, async_op=True)
            comm = group.nccl.comm
            _ = comm.revoke() if how == "revoke" else comm.shrink([1], abort=True)
            refused: list[Callable[[], Any]] = [
                unknown.result,
                lambda: unknown.wait(60),
                group.synchronize_nccl,
                lambda: fd.allreduce(x, group),
            ]
            for each in refused:
                with pytest.raises(ChannelClosed, match="aborted"):
                    each()
        fd.barrier(group)
        group.nccl.abort()


@pytest.mark.parametrize("how", ["revoke", "shrink"])
def test_calls_that_were_stopped_have_no_result(how: str) -> None:
    ranks(2, stop_what_waits, how)


# Interpreter exit

STAGES = {
    "libraries_loaded": "gpu",
    "unique_id_made": "fd.get_unique_id()",
    "group_open": "group = connect()",
    "group_in_a_cycle": "group = connect(); cycle = [group]; cycle.append(cycle)",
    "work_in_flight": "group = connect(); fd.allreduce(x, group, async_op=True)",
    "work_held": "group = connect(); work = fd.allreduce(x, group, async_op=True)",
    "only_work_held": "work = fd.allreduce(x, connect(), async_op=True)",
    "group_dropped": "fd.allreduce(x, connect())",
    "group_closed": "group = connect(); fd.allreduce(x, group); group.close()",
    "group_aborted": "group = connect(); fd.allreduce(x, group); group.abort()",
    "call_that_never_ends": "gpu.set_faults('point=allreduce,act=hang'); group = connect(); "
    "fd.allreduce(x, group)",
    "another_thread_waits": "gpu.set_faults('point=allreduce,act=hang'); group = connect(); "
    "fd.allreduce(x, group); "
    "threading.Thread(target=group.synchronize, daemon=True).start()",
    "registrations_dropped": "group = connect(); "
    "[group.comm.register(gpu.empty(4)) for _ in range(100)]",
    "exception": "group = connect(); fd.allreduce(x, group); raise SystemExit(0)",
}

PREAMBLE = """
import atexit
import sys
import threading
import numpy as np
import ferro_dist as fd
from ferro_dist.testing import emulated_gpu
gpu = emulated_gpu(delay_us=500)
def connect():
    return fd.NcclBackend(0, 1, fd.get_unique_id(), timeout=30)
x = gpu.array(np.ones(4))
"""


GRAPH_HELD = """
group = connect()
fd.allreduce(x, group, out=x)
group.synchronize()
stream = gpu.stream()
with gpu.capture(stream) as graph:
    fd.allreduce(x, group, out=x)
graph.launch(stream)
"""


# Exit handlers that are registered before the libraries are loaded run after that which ends the
# communicators.

GROUP_MADE_LATE = """
def work_late():
    with connect() as group:
        fd.allreduce(x, group, out=x)
        group.synchronize()
    print(group.comm, x.numpy(), file=sys.stderr)
atexit.register(work_late)
connect().close()
"""

# Two of the threads that are waited for are the watchdog's: they begin once it knows the
# communicator.
THREAD_CONNECTS = """
import os
def num_threads():
    return len(os.listdir("/proc/self/task"))
def connect_in_vain():
    try:
        fd.NcclBackend(0, 2, unique_id)
    except fd.ChannelClosed as error:
        print(error, file=sys.stderr)
thread = threading.Thread(target=connect_in_vain, daemon=True)
atexit.register(thread.join)
unique_id = fd.get_unique_id()
before = num_threads()
thread.start()
while num_threads() < before + 4:
    os.sched_yield()
"""

# Modules are emptied when threads that want the interpreter are made to exit. This takes so long
# that the one that waits wants it: it looks for signals every 100 ms.
THREAD_CONNECTS_LATE = """
import time
is_ending = threading.Event()
atexit.register(is_ending.set)
unique_id = fd.get_unique_id()
def connect_late():
    is_ending.wait()
    fd.NcclBackend(0, 2, unique_id)
threading.Thread(target=connect_late, daemon=True).start()
class Slow:
    def __del__(self, sleep=time.sleep):
        sleep(0.3)
slow = Slow()
"""


def run(program: str) -> tuple[int, str]:
    done = subprocess.run(
        [sys.executable, "-X", "faulthandler", "-c", PREAMBLE + program],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    return done.returncode, done.stderr


@pytest.mark.parametrize("stage", STAGES)
def test_the_interpreter_exits_at_every_stage(stage: str) -> None:
    assert run(STAGES[stage]) == (0, "")


def test_the_interpreter_exits_though_a_graph_keeps_a_group() -> None:
    """NCCL waits for the graph, and is not waited for without end."""
    code, said = run(GRAPH_HELD)
    assert code == 0
    assert "destroy the graphs first" in said


def test_an_exit_handler_may_make_a_group_and_close_it() -> None:
    expected = "<Communicator rank 0 of 1 on device 0, closed> [1. 1. 1. 1.]\n"
    assert run(GROUP_MADE_LATE) == (0, expected)


def test_a_communicator_in_the_making_is_ended_at_the_exit() -> None:
    assert run(THREAD_CONNECTS) == (0, "This rank has closed the communicator.\n")


def test_the_interpreter_exits_though_a_thread_waits_for_other_ranks() -> None:
    assert run(THREAD_CONNECTS_LATE) == (0, "")
