"""What is left when groups are gone: nothing."""

from __future__ import annotations

import gc
import os
import signal
import threading
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from fault_injection import PATIENCE_S, call_of, die_within, error_of, meet
from leaks import nothing_is_left

import ferro_dist as fd
from ferro_dist.testing import run_ranks

KIB = 1 << 10
MIB = 1 << 20

GROUPS: dict[str, Callable[..., fd.Backend]] = {"host": fd.HostBackend, "tcp": fd.TcpBackend}


def shared_mappings() -> list[str]:
    with open("/proc/self/maps", encoding="utf-8") as file:
        return [line for line in file if "memfd:ferro_dist" in line]


def resident_nbytes() -> int:
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGESIZE")


def check_growth(
    make_and_close: Callable[[], None],
    times: int,
    largest: Callable[[int], int] = lambda grown_nbytes: grown_nbytes,
) -> None:
    """Fail if lives of a group leave something; ranks that share one agree by `largest`."""
    for _ in range(20):  # what is made once: caches, arenas, the interpreter's own
        make_and_close()
    gc.collect()
    with nothing_is_left():
        # What leaks does so each time; an arena that the allocator makes for a thread comes once.
        # A leak of one segment in all lives would be more, a leak of a kilobyte in each, too.
        grown: list[int] = []
        while len(grown) < 3 and (not grown or grown[-1] >= times * KIB):
            resident = resident_nbytes()
            for _ in range(times):
                make_and_close()
            gc.collect()
            grown.append(largest(resident_nbytes() - resident))
    assert grown[-1] < times * KIB, grown


def leave_with_the_collector_off(rank: int, world_size: int, addr: str) -> None:
    gc.disable()
    group = fd.TcpBackend(rank, world_size, addr, timeout=PATIENCE_S)
    fd.barrier(group)
    with group:
        kept = weakref.ref(group)
    del group
    assert kept() is None


def test_a_group_that_was_closed_does_not_wait_for_the_collector() -> None:
    run_ranks(3, leave_with_the_collector_off, backend="none")


def simulate() -> None:
    group = fd.SimulatedBackend.create_group(2)
    work = fd.allreduce(np.ones(3), group[0], async_op=True)
    assert fd.allreduce(np.ones(3), group[1]).tolist() == [2.0] * 3
    work.wait()
    for backend in group:
        backend.close()


def be_alone() -> None:
    with fd.HostBackend(0, 1, None) as backend:
        x = fd.empty(1000, "float32", backend)
        x[:] = 2
        assert fd.allreduce(x, backend, out=x)[-1] == 2
        fd.barrier(backend, async_op=True).wait()


def abandon() -> None:
    group = fd.SimulatedBackend.create_group(2)
    fd.allreduce(np.ones(3), group[0], async_op=True)
    fd.recv(np.ones(3), group[1], 0, async_op=True)


class Tagged(np.ndarray[Any, Any]):
    """An array that knows the group it is used in."""

    group: fd.Backend


def abandon_a_cycle() -> None:
    group = fd.SimulatedBackend.create_group(2)
    x = np.ones(3).view(Tagged)
    x.group = group[0]
    fd.recv(x, group[0], 1, async_op=True)
    fd.allreduce(x, group[0], out=x, async_op=True)
    del group, x
    gc.collect()


def fail() -> None:
    group = fd.SimulatedBackend.create_group(2)
    assert error_of(lambda: fd.barrier(group[0], timeout=1e-6)).kind == "Timeout"
    assert error_of(lambda: fd.barrier(group[1])).kind == "Timeout"


@pytest.mark.timeout(1200)  # for a busy machine
@pytest.mark.parametrize(
    ("life", "times"),
    [(simulate, 200), (be_alone, 200), (abandon, 200), (abandon_a_cycle, 200), (fail, 200)],
)
def test_groups_leave_nothing_behind(life: Callable[[], None], times: int) -> None:
    check_growth(life, times)


def split_often(backend: fd.Backend, times: int) -> None:
    def split_and_close() -> None:
        pair = backend.split([1, 0])
        assert pair is not None
        assert fd.allreduce(np.ones(1), pair).tolist() == [2.0]
        pair.close()

    def largest(grown_nbytes: int) -> int:
        return int(fd.allreduce(np.array([grown_nbytes]), backend, "max")[0])

    check_growth(split_and_close, times, largest)


@pytest.mark.parametrize("transport", GROUPS)
def test_groups_that_are_split_off_leave_nothing_behind(transport: str) -> None:
    run_ranks(2, split_often, 300, backend=transport, timeout=250)


def fail_and_look(rank: int, world_size: int, addr: str, transport: str) -> None:
    with nothing_is_left():
        backend = GROUPS[transport](rank, world_size, addr)
        meet(backend, 1)
        if rank == 1:
            die_within(0.01)
            threading.Event().wait(PATIENCE_S)
        works = [
            fd.recv(np.empty(3), backend, 1, async_op=True),
            fd.barrier(backend, async_op=True),
        ]
        assert [error_of(work.wait).kind for work in works] == ["PeerLostError"] * 2
        assert error_of(call_of("barrier", backend, 1)).kind == "LockPoisoned"
        backend.close()
        del backend, works


@pytest.mark.parametrize("transport", GROUPS)
def test_survivors_of_a_death_keep_nothing_of_the_group(transport: str) -> None:
    names = set(os.listdir("/dev/shm"))
    run_ranks(3, fail_and_look, transport, backend="none", may_die=[1])
    assert {name for name in os.listdir("/dev/shm") if "ferro" in name} <= names


def close_and_keep(rank: int, world_size: int, addr: str, transport: str) -> None:
    with nothing_is_left():
        group = GROUPS[transport](rank, world_size, addr)
        part = group.split(range(world_size))
        assert part is not None
        for backend in (part, group):
            fd.barrier(backend, async_op=True).wait()
            # Too large to be sent by the calling thread.
            x, peer = np.ones(MIB), 1 - rank
            fd.sendrecv(x, np.empty_like(x), backend, peer, peer, async_op=True).wait()
            backend.close()
    assert part.is_closed
    assert group.is_closed
    assert error_of(lambda: fd.barrier(group)).kind == "ChannelClosed"
    assert error_of(lambda: fd.empty(3, "float32", group)).kind == "ChannelClosed"
    assert error_of(group.shrink).kind == "ChannelClosed"


@pytest.mark.parametrize("transport", GROUPS)
def test_a_closed_group_that_is_kept_holds_nothing(transport: str) -> None:
    run_ranks(2, close_and_keep, transport, backend="none")


def send_to_one_that_has_left(backend: fd.Backend) -> Any:
    other = backend.split([0, 1])
    assert other is not None
    if backend.rank == 0:
        backend.close()
        fd.barrier(other)
        return None
    error = error_of(lambda: fd.send(np.ones(64 * MIB, np.uint8), backend, 0, timeout=PATIENCE_S))
    fd.barrier(other)
    return error.kind, error.peer


@pytest.mark.parametrize("transport", GROUPS)
def test_more_than_buffers_take_cannot_be_sent_to_a_closed_group(transport: str) -> None:
    outcomes = run_ranks(2, send_to_one_that_has_left, backend=transport)
    assert outcomes == [None, ("ChannelClosed", 0)]


def test_a_simulated_group_that_is_kept_holds_nothing_once_all_ranks_have_closed() -> None:
    with nothing_is_left():
        group = fd.SimulatedBackend.create_group(3)
        for backend in group:
            fd.recv(np.empty(3), backend, (backend.rank + 1) % 3, async_op=True)
            backend.close()
    assert all(backend.is_closed for backend in group)


@pytest.mark.parametrize("wait", ["recv", "barrier", "recv work", "barrier work"])
@pytest.mark.parametrize("transport", GROUPS)
def test_what_a_call_of_another_thread_needs_goes_with_it(transport: str, wait: str) -> None:
    run_ranks(2, close_under_a_call, transport, wait, backend="none")


def close_under_a_call(rank: int, world_size: int, addr: str, transport: str, wait: str) -> None:
    with nothing_is_left():
        group = GROUPS[transport](rank, world_size, addr)
        if rank == 1:
            assert error_of(lambda: fd.recv(np.empty(3), group, 0)).kind == "ChannelClosed"
        else:
            outcomes = []

            def call() -> None:
                async_op = "work" in wait
                made = (
                    fd.recv(np.empty(3), group, 1, async_op=async_op)
                    if "recv" in wait
                    else fd.barrier(group, async_op=async_op)
                )
                if async_op:
                    assert isinstance(made, fd.Work)
                    made.wait()

            thread = threading.Thread(target=lambda: outcomes.append(error_of(call).kind))
            thread.start()
            # Where it is by then is left to chance: mostly asleep.
            thread.join(0.02)
            group.close()
            thread.join(PATIENCE_S)
            assert outcomes == ["ChannelClosed"]
        group.close()
    assert group.is_closed


def close_from_a_handler(rank: int, world_size: int, addr: str, transport: str, wait: str) -> None:
    with nothing_is_left():
        group = GROUPS[transport](rank, world_size, addr)
        if rank == 1:
            assert error_of(lambda: fd.recv(np.empty(3), group, 0)).kind == "ChannelClosed"
            group.close()
        else:
            signal.signal(signal.SIGALRM, lambda *_: group.close())
            signal.setitimer(signal.ITIMER_REAL, 0.05)
            call = (
                (lambda: fd.recv(np.empty(3), group, 1))
                if wait == "recv"
                else call_of(wait, group, 1)
            )
            assert error_of(call).kind == "ChannelClosed"
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
    assert group.is_closed


@pytest.mark.parametrize("wait", ["recv", "barrier"])
@pytest.mark.parametrize("transport", GROUPS)
def test_a_handler_that_closes_leaves_nothing_once_its_call_ends(transport: str, wait: str) -> None:
    run_ranks(2, close_from_a_handler, transport, wait, backend="none")


def keep_an_array(rank: int, world_size: int, addr: str) -> None:
    with nothing_is_left():
        group = fd.HostBackend(rank, world_size, addr)
        x = fd.empty(1000, "float64", group)
        x[:] = rank
        fd.allreduce(x, group, out=x)
        group.close()
        assert len(shared_mappings()) == 1
        assert (x == 1).all()
        x[0] = 7
        del x
    assert group.is_closed


def test_an_array_in_symmetric_memory_keeps_that_and_nothing_else() -> None:
    run_ranks(2, keep_an_array, backend="none")


def call_again(backend: fd.Backend, again: str) -> None:
    if again == "allreduce work":
        fd.allreduce(np.ones(1), backend, async_op=True).wait()
    elif again == "allreduce":
        fd.allreduce(np.ones(1), backend)
    else:
        fd.sendrecv(np.ones(1), np.empty(1), backend, 1 - backend.rank, 1 - backend.rank)


def drop_work(backend: fd.Backend, again: str) -> int:
    arrays = [np.ones(10) for _ in range(100)]
    kept = [weakref.ref(x) for x in arrays]
    while arrays:
        x = arrays.pop()
        fd.allreduce(x, backend, out=x, async_op=True)
    del x
    fd.barrier(backend)  # which waits for its turn
    for _ in range(len(kept) + 1):
        call_again(backend, again)
    return sum(reference() is not None for reference in kept)


@pytest.mark.parametrize("again", ["allreduce work", "allreduce", "sendrecv"])
@pytest.mark.parametrize("transport", GROUPS)
def test_arrays_of_work_that_nobody_waited_for_are_let_go(transport: str, again: str) -> None:
    assert run_ranks(2, drop_work, again, backend=transport) == [0, 0]


def drop_receives(backend: fd.Backend, again: str) -> int:
    peer = 1 - backend.rank
    kept = []
    for _ in range(5):
        y = np.empty(1)
        kept.append(weakref.ref(y))
        fd.recv(y, backend, peer, async_op=True)
    del y
    fd.barrier(backend)  # which leaves messages alone
    for _ in kept:
        fd.send(np.ones(1), backend, peer)
    for _ in range(len(kept) + 1):
        if again == "sendrecv":
            call_again(backend, again)
        else:  # too much to begin at once
            x = np.ones(100_000)
            fd.sendrecv(x, np.empty_like(x), backend, peer, peer, async_op=True).wait()
    return sum(reference() is not None for reference in kept)


@pytest.mark.parametrize("again", ["sendrecv", "sendrecv work"])
@pytest.mark.parametrize("transport", GROUPS)
def test_arrays_of_receives_that_nobody_waited_for_are_let_go(transport: str, again: str) -> None:
    assert run_ranks(2, drop_receives, again, backend=transport) == [0, 0]


def report_pid_and_die(rank: int, world_size: int, addr: str, fifo: str) -> None:
    backend = fd.HostBackend(rank, world_size, addr)
    x = fd.empty(1000, "float32", backend)
    fd.recv(np.empty(3), backend, 1 - rank, async_op=True)
    fd.allreduce(x, backend)
    os.write(os.open(fifo, os.O_WRONLY), b"%d " % os.getpid())
    os.kill(os.getpid(), signal.SIGKILL)


def test_ranks_that_are_all_killed_leave_nothing(fifo: str) -> None:
    names = set(os.listdir("/dev/shm"))
    reading = os.open(fifo, os.O_RDWR)
    try:
        run_ranks(2, report_pid_and_die, fifo, backend="none", may_die=[0, 1])
        pids = os.read(reading, 1000).split()
    finally:
        os.close(reading)
    assert pids
    for pid in pids:
        assert not os.path.exists(f"/proc/{pid.decode()}")
    assert {name for name in os.listdir("/dev/shm") if "ferro" in name} <= names
