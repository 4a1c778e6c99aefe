"""SimulatedBackend: any shape, dtype and counts against NumPy, and what is its own."""

from __future__ import annotations

import contextlib
import gc
import resource
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from backends.contract.reference import (
    COLLECTIVES,
    DTYPES,
    REDUCING,
    call,
    data,
    dtype_of,
    expected,
    has_reduction,
    inputs,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.testing import assert_array_equal

import ferro_dist as fd
from ferro_dist import InvalidWorldSize
from ferro_dist.reduce_op import ReduceOp

Body = Callable[[fd.Backend], Any]
Play = Callable[[int, Body], list[Any]]

ON_RANKS = settings(max_examples=60)

shapes = st.lists(st.integers(0, 6), max_size=3).map(tuple)
counts = st.one_of(st.integers(0, 40), st.integers(2040, 2060), st.integers(16_370, 16_400))


@pytest.fixture(scope="module")
def play() -> Iterator[Play]:
    """Call a body on every rank of a group, which is kept from call to call."""
    groups: dict[int, list[fd.SimulatedBackend]] = {}
    with ThreadPoolExecutor(4) as threads:

        def play(world_size: int, body: Body) -> list[Any]:
            if world_size not in groups:
                groups[world_size] = fd.SimulatedBackend.create_group(world_size, timeout=30)
            return list(threads.map(body, groups[world_size]))

        for size in (1, 2, 3, 4):
            play(size, lambda group: group.barrier(False, None, 0))
        yield play
        for group in groups.values():
            for rank in group:
                rank.close()


def test_finished_work_lets_go_of_x_where_there_is_an_out() -> None:
    (group,) = fd.SimulatedBackend.create_group(1)
    x = np.zeros(1000)
    dropped = weakref.ref(x)
    work = fd.allreduce(x, group, out=np.empty_like(x), async_op=True)
    work.wait()
    del x
    gc.collect()
    assert dropped() is None
    work.result()
    group.close()


def test_no_rank_is_made_alone() -> None:
    with pytest.raises(TypeError, match=r"create_group\(world_size\)"):
        fd.SimulatedBackend(4)


@given(
    size=st.integers(1, 4),
    op=st.sampled_from(COLLECTIVES),
    shape=shapes,
    name=st.sampled_from(DTYPES),
    reduce_op=st.sampled_from(ReduceOp),
    symmetric=st.booleans(),
)
@settings(ON_RANKS)
def test_collectives_equal_numpy_for_any_shape(
    play: Play,
    size: int,
    op: str,
    shape: tuple[int, ...],
    name: str,
    reduce_op: ReduceOp,
    symmetric: bool,
) -> None:
    if op in REDUCING and not has_reduction(name, reduce_op):
        reduce_op = ReduceOp.MAX
        name = "int16"

    def body(group: Any) -> None:
        arrays = inputs(op, group, shape, name)
        x = arrays[group.rank]
        if symmetric:
            x = fd.empty(x.shape, name, group)
            x[...] = arrays[group.rank]
        y = call(op, group, x, reduce_op=reduce_op)
        wanted = expected(op, arrays, group.rank, reduce_op=reduce_op)
        assert (y is None) == (wanted is None)
        if wanted is not None:
            assert (y.shape, y.dtype) == (wanted.shape, wanted.dtype)
            assert_array_equal(y, wanted)

    play(size, body)


@given(
    size=st.integers(1, 4),
    op=st.sampled_from(REDUCING),
    count=counts,
    name=st.sampled_from(["int8", "bfloat16", "float32", "complex128"]),
)
@settings(ON_RANKS)
def test_reductions_equal_numpy_for_any_count(
    play: Play, size: int, op: str, count: int, name: str
) -> None:
    def body(group: Any) -> None:
        arrays = inputs(op, group, (count,), name)
        y = call(op, group, arrays[group.rank])
        if y is not None:
            assert_array_equal(y, expected(op, arrays, group.rank))

    play(size, body)


@given(
    table=st.integers(1, 4).flatmap(
        lambda n: st.lists(
            st.lists(st.integers(0, 3000), min_size=n, max_size=n), min_size=n, max_size=n
        )
    )
)
@settings(ON_RANKS)
def test_uneven_all_to_all_equals_numpy(play: Play, table: list[list[int]]) -> None:
    ranks = range(len(table))

    def body(group: Any) -> None:
        own = group.rank
        x = np.concatenate([data(10 * own + dst, (table[own][dst],), "int32") for dst in ranks])
        recv = [table[src][own] for src in ranks]
        y = fd.all_to_all(x, group, send_counts=table[own], recv_counts=recv)
        assert_array_equal(
            y, np.concatenate([data(10 * src + own, (recv[src],), "int32") for src in ranks])
        )

    play(len(table), body)


@given(
    sizes=st.lists(st.integers(0, 100_000), min_size=1, max_size=12), name=st.sampled_from(DTYPES)
)
@settings(ON_RANKS)
def test_messages_of_any_size_arrive_in_order(play: Play, sizes: list[int], name: str) -> None:
    def body(group: Any) -> None:
        if group.rank == 0:
            for number, size in enumerate(sizes):
                fd.send(data(number, (size,), name), group, 1)
        else:
            for number, size in enumerate(sizes):
                out = fd.recv(np.empty(size, dtype_of(name)), group, 0)
                assert_array_equal(out, data(number, (size,), name))

    play(2, body)


@pytest.mark.parametrize("world_size", [0, -1, 1.0, True, "2", None])
def test_a_world_of_no_size_is_refused(world_size: Any) -> None:
    with pytest.raises(InvalidWorldSize):
        fd.SimulatedBackend.create_group(world_size)


def test_more_ranks_than_can_share_memory_are_refused() -> None:
    with pytest.raises(fd.UnsupportedOp, match="at most 1024 ranks of one host share memory"):
        fd.SimulatedBackend.create_group(1025)


@pytest.mark.parametrize("timeout", [0, -1.0, float("nan")])
def test_a_timeout_that_is_no_time_is_refused(timeout: float) -> None:
    with pytest.raises(ValueError, match="timeout must be"):
        fd.SimulatedBackend.create_group(2, timeout=timeout)


def test_a_group_may_be_given_back_without_closing_it() -> None:
    for group in fd.SimulatedBackend.create_group(3):
        assert group.world_size == 3


def test_errors_of_a_rank_that_has_closed_its_group_name_the_call() -> None:
    group, other = fd.SimulatedBackend.create_group(2)
    work = fd.allreduce(np.ones(3), group, async_op=True)
    for each in (group, other):
        each.close()
    calls: list[tuple[str, Callable[[], Any]]] = [
        ("allreduce #0", work.wait),
        ("barrier", lambda: fd.barrier(group)),
        ("empty", lambda: fd.empty(3, "int8", group)),
        ("split", lambda: group.split([0])),
        ("shrink", group.shrink),
    ]
    for name, refused in calls:
        with pytest.raises(fd.ChannelClosed, match=f"^{name}: This rank has closed the group"):
            refused()


def test_all_members_hear_that_their_group_could_not_be_made() -> None:
    group = fd.SimulatedBackend.create_group(3, timeout=30)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)

    def body(rank: fd.SimulatedBackend) -> fd.Io | None:
        try:
            assert rank.split([1, 2]) is None
        except fd.Io as error:
            return error
        return None

    with ThreadPoolExecutor(3) as threads:
        list(threads.map(lambda rank: rank.barrier(False, None, 0), group))  # all threads run
        resource.setrlimit(resource.RLIMIT_NOFILE, (0, hard))
        try:
            outsider, *members = threads.map(body, group)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        assert outsider is None
        for number, error in enumerate(members, start=1):
            assert error is not None
            assert (error.op, error.rank, error.peer) == ("split", number, 1)
        for part in threads.map(lambda rank: rank.split([0, 1, 2]), group):
            assert part is not None
            part.close()
    for rank in group:
        rank.close()


def test_a_group_outlives_a_split_for_which_memory_is_lacking(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def run_out_of_memory(*_: Any, **__: Any) -> None:
        raise MemoryError("no room for a group")

    group = fd.SimulatedBackend.create_group(2, timeout=30)
    monkeypatch.setattr(fd.SimulatedBackend, "create_group", run_out_of_memory)

    def body(rank: fd.SimulatedBackend) -> str:
        with rank:
            with pytest.raises(fd.Io) as failure:
                rank.split([0, 1])
            fd.barrier(rank)
            return str(failure.value)

    with ThreadPoolExecutor(2) as threads:
        for message in threads.map(body, group):
            assert "rank 0 cannot make the group: no room for a group" in message


def test_who_loses_a_rank_that_left_is_told_to_look_at_its_output() -> None:
    first, second = fd.SimulatedBackend.create_group(2)
    second.close()
    with first, pytest.raises(fd.ChannelClosed, match=r"rank 1 left .*\n.*own output may say why"):
        fd.barrier(first)


def _wait_for_work(group: fd.Backend) -> None:
    fd.allreduce(np.ones(3), group, async_op=True).wait()


def _receive(group: fd.Backend) -> None:
    fd.recv(np.empty(3), group, 1)


@pytest.mark.parametrize("lose", [fd.barrier, _receive, _wait_for_work])
def test_who_loses_a_rank_to_an_exception_is_shown_it(lose: Callable[[fd.Backend], Any]) -> None:
    def body(rank: fd.SimulatedBackend) -> None:
        with rank:
            if rank.rank == 1:
                raise ZeroDivisionError("rank 1's own")
            lose(rank)

    group = fd.SimulatedBackend.create_group(2, timeout=30)
    with ThreadPoolExecutor(2) as threads:
        lost, failed = (future.exception() for future in [threads.submit(body, r) for r in group])
    assert isinstance(lost, fd.ChannelClosed)
    assert lost.__cause__ is failed
    assert "rank 1 left" in str(lost)
    assert "own output" not in str(lost)


def test_a_part_of_a_group_is_shown_the_exception_too() -> None:
    def body(rank: fd.SimulatedBackend) -> None:
        pair = rank.split([0, 2])
        with rank:
            if pair is not None:
                with pair:
                    if rank.rank == 2:
                        raise ZeroDivisionError
                    fd.barrier(pair)

    group = fd.SimulatedBackend.create_group(3, timeout=30)
    with ThreadPoolExecutor(3) as threads:
        lost, _, failed = (
            future.exception() for future in [threads.submit(body, r) for r in group]
        )
    assert isinstance(lost, fd.ChannelClosed)
    assert lost.__cause__ is failed


def test_later_calls_are_shown_the_exception_too() -> None:
    first, second = fd.SimulatedBackend.create_group(2, timeout=30)
    with pytest.raises(ZeroDivisionError) as failure, second:
        raise ZeroDivisionError
    with first:
        with pytest.raises(fd.ChannelClosed):
            fd.barrier(first)
        with pytest.raises(fd.LockPoisoned) as refusal:
            fd.barrier(first)
        assert refusal.value.__cause__ is not None
        assert refusal.value.__cause__.__cause__ is failure.value


def test_an_exception_after_close_is_no_reason_for_it() -> None:
    first, second = fd.SimulatedBackend.create_group(2, timeout=30)
    with contextlib.suppress(ZeroDivisionError), second:
        second.close()
        raise ZeroDivisionError
    with first, pytest.raises(fd.ChannelClosed, match="own output may say why") as loss:
        fd.barrier(first)
    assert loss.value.__cause__ is None


def test_an_exception_is_let_go_when_all_ranks_have_left() -> None:
    def fail(rank: fd.SimulatedBackend) -> weakref.ref[Any]:
        x = np.zeros(1000)
        try:
            with rank:
                raise ZeroDivisionError
        except ZeroDivisionError:
            return weakref.ref(x)

    first, second = fd.SimulatedBackend.create_group(2, timeout=30)
    dropped = fail(second)
    with first, contextlib.suppress(fd.ChannelClosed):
        fd.barrier(first)
    assert dropped() is None


@pytest.mark.parametrize("absent", [0, 2])
def test_a_split_that_fails_keeps_no_group(absent: int) -> None:
    def backends() -> int:
        gc.collect()
        return sum(type(each) is fd.SimulatedBackend for each in gc.get_objects())

    group = fd.SimulatedBackend.create_group(3, timeout=30)
    before = backends()
    members = [rank for rank in range(3) if rank != absent]

    def body(rank: fd.SimulatedBackend) -> None:
        if rank.rank == absent:
            rank._check_members(members, 30)  # the first half of a split
            rank.close()
            return
        with pytest.raises(fd.ChannelClosed):
            rank.split(members)

    with ThreadPoolExecutor(3) as threads:
        list(threads.map(body, group))
    assert backends() == before
    for rank in group:
        rank.close()


def test_counts_above_two_to_the_31_are_moved() -> None:
    count = 2**31 + 5
    first, second = fd.SimulatedBackend.create_group(2, timeout=250)
    with first, second, ThreadPoolExecutor(1) as other:
        x = np.zeros(count, np.uint8)
        x[:: 2**20] = 7
        x[-1] = 9
        received = other.submit(fd.broadcast, np.empty(count, np.uint8), second)
        fd.broadcast(x, first, out=x)
        y = received.result()
    assert y.size == count
    assert np.array_equal(x[-(2**20) :], y[-(2**20) :])
    assert np.array_equal(x[:: 2**20], y[:: 2**20])
