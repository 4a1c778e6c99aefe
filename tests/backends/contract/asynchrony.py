"""Calls that run while their caller goes on."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
from backends.contract.case import Group, case, clone, raised
from backends.contract.reference import COLLECTIVES, call, expected, inputs
from numpy.testing import assert_array_equal

import ferro_dist as fd
from ferro_dist import CollectiveMismatch, Timeout, Work


@case(each=COLLECTIVES)
def gives_the_same_asynchronously(group: Group, op: str) -> None:
    for count in (4, 40_000):
        arrays = inputs(op, group, (count,), "float64")
        wanted = expected(op, arrays, group.rank)
        x = arrays[group.rank]
        work = call(op, group, x, async_op=True)
        assert isinstance(work, Work)
        result = work.result()
        assert work.result() is result
        assert work.is_completed()
        out = None if wanted is None else np.empty_like(wanted)
        written = call(op, group, x, out=out, async_op=True).result()
        if wanted is None:
            assert result is None
            assert written is None
        else:
            assert_array_equal(result, wanted)
            assert written is out
            assert_array_equal(out, wanted)


@case()
def calls_end_in_the_order_of_submission(group: Group) -> None:
    counts = [1, 1000, 100_000, 3, 100_000, 2] * 3
    works = [fd.allreduce(np.full(n, i), group, async_op=True) for i, n in enumerate(counts)]
    fd.barrier(group, async_op=True).wait()
    for number, (work, count) in enumerate(zip(works, counts, strict=True)):
        assert work.is_completed()
        assert_array_equal(work.result(), np.full(count, number * group.world_size))


@case()
def a_synchronous_call_queues_behind_the_others(group: Group) -> None:
    works = [fd.allreduce(np.full(60_000, i), group, async_op=True) for i in range(4)]
    y = fd.allreduce(np.full(5, 9), group)
    assert all(work.is_completed() for work in works)
    assert (y == 9 * group.world_size).all()
    for number, work in enumerate(works):
        assert (work.result() == number * group.world_size).all()


@case()
def work_without_a_result_gives_none(group: Group) -> None:
    for work in (fd.barrier(group, async_op=True), fd.batch([], group, async_op=True)):
        assert work.wait() is None
        assert work.result() is None


@case()
def polling_sees_the_end(group: Group) -> None:
    work = fd.broadcast(np.full(9, group.rank), group, async_op=True)
    deadline = time.monotonic() + 20
    while not work.is_completed():
        assert time.monotonic() < deadline
    assert (work.result() == 0).all()


@case(min_ranks=2)
def waiting_may_be_given_up_and_taken_up_again(group: Group) -> None:
    work = fd.recv(np.empty(1), group, 1, async_op=True) if group.rank == 0 else None
    if work is not None:
        for seconds in (0.0, 1e-3, 0.02):
            error = raised(Timeout, work.wait, seconds)
            assert "wait again" in str(error)
            assert error.seconds >= seconds
        raised(Timeout, work.result, 0.01)
        assert not work.is_completed()
    fd.barrier(group)
    if group.rank == 1:
        fd.send(np.ones(1), group, 0)
    if work is not None:
        work.wait(20.0)
        work.wait(0.0)
        assert work.result()[0] == 1


@case(min_ranks=2)
def who_gives_up_waiting_for_a_message_hears_who_is_missing(group: Group) -> None:
    work = fd.recv(np.empty(1), group, 1, async_op=True) if group.rank == 0 else None
    if work is not None:
        error = raised(Timeout, work.wait, 0.01)
        assert (error.op, error.rank, error.missing) == ("recv", 0, (1,))
    fd.barrier(group)
    if group.rank == 1:
        fd.send(np.ones(1), group, 0)
    if work is not None:
        work.wait()


@case(min_ranks=2)
def who_gives_up_waiting_for_a_collective_hears_who_is_missing(group: Group) -> None:
    if group.rank == 0:
        works = [fd.barrier(group, async_op=True), fd.allreduce(np.ones(2), group, async_op=True)]
        others = tuple(range(1, group.world_size))
        error = raised(Timeout, works[0].wait, 0.05)
        while not error.missing:  # the call has yet to begin
            error = raised(Timeout, works[0].wait, 0.05)
        assert (error.op, error.rank) == ("barrier", 0)
        assert isinstance(error.sequence, int)
        # Over hosts those that a rank itself waits for: of another host, its leader.
        assert set(error.missing) <= set(others)
        # It has not begun: whom it waits for is whom the one before it waits for.
        behind = raised(Timeout, works[1].wait, 0.0)
        assert (behind.op, behind.rank) == ("allreduce", 0)
        assert behind.missing
        assert set(behind.missing) <= set(others)
        for peer in others:
            fd.send(np.ones(1), group, peer)
        for work in works:
            work.wait()
    else:
        fd.recv(np.empty(1), group, 0)
        fd.barrier(group)
        fd.allreduce(np.ones(2), group)


@case()
def to_wait_for_what_is_no_time_is_refused(group: Group) -> None:
    for work in (fd.barrier(group, async_op=True), fd.batch([], group, async_op=True)):
        for seconds in (-1.0, float("nan")):
            raised(ValueError, work.wait, seconds)
        for no_number in ("1", True):
            raised(TypeError, work.wait, no_number)
        work.wait()


@case(min_ranks=2)
def arrays_live_until_their_call_is_done(group: Group) -> None:
    """The caller drops everything at once: the call owns what it reads and writes."""
    other = clone(group)
    if group.rank == 0:
        out = np.zeros(50_000)
        dropped = weakref.ref(out)
        fd.recv(out, other, 1, async_op=True)
        del out
        gc.collect()
        assert dropped() is not None
    fd.barrier(group)
    if group.rank == 1:
        fd.send(np.ones(50_000), other, 0)
        fd.send(np.ones(1), other, 0)
    if group.rank == 0:
        fd.recv(np.empty(1), other, 1)  # behind the one that was dropped
    other.close()
    if group.rank == 0:
        gc.collect()
        assert dropped() is None
    fd.barrier(group)


@case()
def work_that_was_waited_for_holds_nothing_back(group: Group) -> None:
    x = np.zeros(50_000)
    dropped = weakref.ref(x)
    fd.allreduce(x, group, out=x, async_op=True).wait()
    del x
    gc.collect()
    assert dropped() is None


@case()
def work_that_was_dropped_holds_nothing_back_once_another_begins(group: Group) -> None:
    x = np.zeros(50_000)
    dropped = weakref.ref(x)
    fd.allreduce(x, group, async_op=True)
    del x
    fd.barrier(group)
    fd.barrier(group, async_op=True).wait()
    gc.collect()
    assert dropped() is None


@case()
def work_that_is_dropped_is_done_all_the_same(group: Group) -> None:
    outs = [np.zeros(30_000) for _ in range(4)]
    for out in outs:
        fd.allreduce(np.ones(30_000), group, out=out, async_op=True)
    gc.collect()
    fd.barrier(group)
    for out in outs:
        assert (out == group.world_size).all()


@case()
def inputs_with_gaps_are_copied_and_kept(group: Group) -> None:
    works = []
    for number in range(5):
        table = np.full((300, 300), number)
        works.append(fd.allreduce(table.T[::3], group, async_op=True))
        del table
    for number, work in enumerate(works):
        assert_array_equal(work.result(), np.full((100, 300), number * group.world_size))


@case(min_ranks=2)
def a_mismatch_is_raised_by_every_wait(group: Group) -> None:
    x = np.ones(3 + group.rank % 2)
    work = fd.allreduce(x, group, async_op=True)
    following = fd.allreduce(np.ones(2), group, async_op=True)
    raised(CollectiveMismatch, work.wait)
    raised(CollectiveMismatch, work.result)
    assert work.is_completed()
    assert (following.result() == group.world_size).all()


@case()
def two_groups_are_used_by_two_threads(group: Group) -> None:
    with clone(group) as other:
        _at_once(lambda: _sum_often(group), lambda: _sum_often(other))


@case(min_ranks=2)
def messages_and_collectives_go_on_in_two_threads(group: Group) -> None:
    right, left = (group.rank + 1) % group.world_size, (group.rank - 1) % group.world_size

    def pass_on() -> None:
        for number in range(40):
            out = np.empty(2000, np.int64)
            fd.sendrecv(np.full(2000, number), out, group, right, left)
            assert (out == number).all()

    _at_once(lambda: _sum_often(group), pass_on)


@case(min_ranks=2)
def two_threads_wait_for_two_messages(group: Group) -> None:
    if group.rank == 0:
        outs = [np.empty(1, np.int64) for _ in range(2)]
        works = [fd.recv(out, group, 1, async_op=True) for out in outs]
        _at_once(*(work.wait for work in works))
        assert outs == [1, 2]
    if group.rank == 1:
        for number in (1, 2):
            fd.send(np.array([number]), group, 0)
    fd.barrier(group)


@case(min_ranks=3)
def a_receive_that_waits_holds_up_no_message_of_another_peer(group: Group) -> None:
    """Rank 1 sends only what rank 0 has received from rank 2 meanwhile."""

    def pass_on(src: int, dst: int) -> None:
        fd.send(fd.recv(np.empty(1, np.int64), group, src), group, dst)

    if group.rank == 0:
        work = fd.recv(np.empty(1, np.int64), group, 1, async_op=True)
        _at_once(work.wait, lambda: pass_on(2, 1))
        assert work.result()[0] == 7
    if group.rank == 1:
        pass_on(0, 0)
    if group.rank == 2:
        fd.send(np.array([7]), group, 0)


def _sum_often(group: Group) -> None:
    for number in range(40):
        y = fd.allreduce(np.full(10 + 3000 * (number % 2), number), group)
        assert (y == number * group.world_size).all()


def _at_once(*functions: Callable[[], Any]) -> None:
    """Run functions in threads of their own, and raise the first error of any."""
    failures: list[BaseException] = []

    def run(function: Callable[[], Any]) -> None:
        try:
            function()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=run, args=(function,)) for function in functions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]
