"""Groups: what they tell of themselves, how they are split, and how they end."""

from __future__ import annotations

import gc
import hashlib
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
from backends.contract.case import Group, case, clone, raised
from numpy.testing import assert_array_equal

import ferro_dist as fd
from ferro_dist import (
    ChannelClosed,
    CollectiveMismatch,
    DistributedError,
    InvalidRank,
    LockPoisoned,
    P2POp,
    SelfSend,
    Timeout,
)


@case()
def a_group_tells_of_itself(group: Group) -> None:
    ranks = fd.all_gather(np.array([group.rank]), group)
    assert_array_equal(ranks, np.arange(group.world_size))
    assert group.name in ("host", "tcp", "simulated", "mpi", "nccl", "hybrid")
    assert group.timeout > 0
    assert not group.is_closed
    assert f"rank {group.rank} of {group.world_size}" in repr(group)


# Splitting


@case()
def split_makes_a_group_in_the_given_order(group: Group) -> None:
    members = list(range(group.world_size))[::-2]
    part = group.split(members)
    if group.rank not in members:
        assert part is None
        return
    with part:
        assert (part.rank, part.world_size) == (members.index(group.rank), len(members))
        assert part.name == group.name
        assert_array_equal(fd.all_gather(np.array([group.rank]), part), members)


@case(min_ranks=2)
def a_part_tells_which_ranks_of_the_whole_it_has(group: Group) -> None:
    world_size = group.world_size
    assert group.global_ranks == tuple(range(world_size))
    backwards = group.split(range(world_size)[::-1])
    with backwards:
        assert backwards.global_ranks == tuple(range(world_size)[::-1])
        part = backwards.split([1, 0])  # the last rank but one, and the last
        if part is not None:
            with part:
                assert part.global_ranks == (world_size - 2, world_size - 1)


@case(min_ranks=2)
def errors_name_the_part_of_a_group_that_they_are_of(group: Group) -> None:
    last = group.world_size - 1
    backwards = group.split(range(group.world_size)[::-1])
    with backwards:
        if backwards.rank != last:  # rank 0 of the whole, which stays away
            error = raised(Timeout, fd.barrier, backwards, timeout=0.1)
            assert (error.rank, error.global_ranks) == (backwards.rank, backwards.global_ranks)
            assert f"of group ({last}, " in str(error)
        fd.barrier(group)
        backwards.timeout = 1.0  # for its end: NCCL waits for the others, who have left


@case(min_ranks=2)
def errors_before_a_call_carry_the_part_of_a_group(group: Group) -> None:
    with group.split(range(group.world_size)[::-1]) as backwards:
        error = raised(SelfSend, fd.send, np.ones(1), backwards, backwards.rank)
        assert error.global_ranks == backwards.global_ranks


@case(min_ranks=2)
def errors_of_a_split_name_the_part_of_a_group_that_is_split(group: Group) -> None:
    with group.split(range(group.world_size)[::-1]) as backwards:
        expected = ("split", backwards.rank, backwards.global_ranks)
        error: DistributedError = raised(InvalidRank, backwards.split, [group.world_size])
        assert (error.op, error.rank, error.global_ranks) == expected
        error = raised(CollectiveMismatch, backwards.split, [backwards.rank])
        assert (error.op, error.rank, error.global_ranks) == expected
        assert f"of group ({group.world_size - 1}, " in str(error)


@case(min_ranks=2)
def work_names_the_part_of_a_group_that_it_is_of(group: Group) -> None:
    backwards = group.split(range(group.world_size)[::-1])
    with backwards:
        if backwards.rank != backwards.world_size - 1:  # rank 0 of the whole, which stays away
            work = fd.barrier(backwards, timeout=0.1, async_op=True)
            error = raised(Timeout, work.wait)
            assert (error.rank, error.global_ranks) == (backwards.rank, backwards.global_ranks)
        fd.barrier(group)


@case()
def a_group_of_one_is_a_group(group: Group) -> None:
    for member in range(group.world_size):
        part = group.split([member])
        assert (part is None) == (group.rank != member)
        if part is not None:
            with part:
                assert (part.rank, part.world_size) == (0, 1)
                assert fd.allreduce(np.array([5]), part)[0] == 5
                fd.barrier(part)
                work = fd.all_gather(np.ones((2, 3)), part, async_op=True)
                assert work.result().shape == (2, 3)


@case(min_ranks=2)
def disjoint_groups_work_at_the_same_time(group: Group) -> None:
    parts = [group.split(range(first, group.world_size, 2)) for first in (0, 1)]
    own = parts[group.rank % 2]
    assert parts[1 - group.rank % 2] is None
    members = range(group.rank % 2, group.world_size, 2)
    # The odd ranks do more, and other things: nothing couples the two groups.
    with own:
        for number in range(20 + 20 * (group.rank % 2)):
            assert fd.allreduce(np.array([group.rank + number]), own)[0] == sum(
                members
            ) + number * len(members)
        if group.rank % 2:
            fd.barrier(own)
    assert fd.allreduce(np.ones(30_000), group)[0] == group.world_size


@case()
def groups_are_split_again(group: Group) -> None:
    with clone(group) as outer, clone(outer) as inner:
        reversed_ranks = list(range(group.world_size))[::-1]
        with inner.split(reversed_ranks) as innermost:
            assert innermost.rank == group.world_size - 1 - group.rank
            for used in (innermost, group, inner, outer):
                x = np.full(20_000, used.rank)
                assert fd.allreduce(x, used, "max")[0] == group.world_size - 1


@case()
def a_group_outlives_the_one_it_was_split_from(group: Group) -> None:
    parent = clone(group)
    child = clone(parent)
    parent.close()
    assert parent.is_closed
    assert not child.is_closed
    assert (fd.allreduce(np.ones(20_000), child) == group.world_size).all()
    child.close()


@case()
def a_group_inherits_the_timeout(group: Group) -> None:
    with clone(group) as other:
        other.timeout = 1234.5
        assert other.timeout == 1234.5
        with clone(other) as inner:
            assert inner.timeout == 1234.5
        for bad in (0, -1.0, float("nan")):
            raised(ValueError, setattr, other, "timeout", bad)
        assert other.timeout == 1234.5


@case(min_ranks=2)
def members_that_disagree_are_a_mismatch(group: Group) -> None:
    members = [1, 0] if group.rank == group.world_size - 1 else [0, 1]
    error = raised(CollectiveMismatch, group.split, members)
    assert error.op == "split"
    assert error.rank == group.rank
    assert error.peer != group.rank
    fd.barrier(group)


@case(min_ranks=2)
def mismatches_of_a_split_and_another_call_name_both(group: Group) -> None:
    if group.rank == 0:
        error = raised(CollectiveMismatch, group.split, [0])
    else:
        digest = np.zeros(hashlib.sha256().digest_size, np.uint8)  # looks like what a split sends
        error = raised(CollectiveMismatch, fd.all_gather, digest, group)
    assert "rank 0 called split(" in str(error)
    assert "rank 1 called all_gather(" in str(error)
    assert error.op == ("all_gather" if group.rank else "split")
    fd.barrier(group)


# Ending


def _every_call(group: Group) -> list[Any]:
    x = np.ones(group.world_size)
    other = 1 if group.rank == 0 else 0
    calls: list[Any] = [
        lambda: fd.allreduce(x, group),
        lambda: fd.broadcast(x, group),
        lambda: fd.reduce(x, group),
        lambda: fd.all_gather(x, group),
        lambda: fd.reduce_scatter(x, group),
        lambda: fd.all_to_all(x, group),
        lambda: fd.gather(x, group),
        lambda: fd.scatter(x, group, out=np.empty(1)),
        lambda: fd.barrier(group),
        lambda: fd.allreduce(x, group, async_op=True),
        lambda: fd.barrier(group, async_op=True),
        lambda: fd.batch([], group),
        lambda: group.split([0]),
    ]
    if group.world_size > 1:
        calls += [
            lambda: fd.send(x, group, other),
            lambda: fd.recv(x, group, other),
            lambda: fd.sendrecv(x, np.empty(1), group, other, other),
            lambda: fd.batch([P2POp("send", x, other)], group),
            lambda: fd.send(x, group, other, async_op=True),
        ]
    return calls


@case()
def a_closed_group_refuses_every_call(group: Group) -> None:
    other = clone(group)
    fd.allreduce(np.ones(1), other, async_op=True).wait()
    other.close()
    other.close()
    assert other.is_closed
    assert "closed" in repr(other)
    assert (other.rank, other.world_size) == (group.rank, group.world_size)
    for call in _every_call(other):
        error = raised(ChannelClosed, call)
        assert "This rank has closed the" in str(error)
        assert error.rank == group.rank
    refused = raised(ChannelClosed, fd.allreduce, np.ones(1), other)
    assert refused.op == "allreduce"
    raised(ChannelClosed, fd.empty, 3, "int8", other)


@case()
def a_refused_call_lets_go_of_its_arrays_at_once(group: Group) -> None:
    """Not when the collector comes, which is not told of their size."""
    other = clone(group)
    other.close()
    gc.disable()
    try:
        x = np.zeros(1)
        dropped = weakref.ref(x)
        raised(ChannelClosed, fd.allreduce, x, other)
        del x
        assert dropped() is None
    finally:
        gc.enable()


@case()
def a_group_is_closed_by_with(group: Group) -> None:
    with clone(group) as other:
        fd.barrier(other)
    assert other.is_closed
    other = clone(group)

    def fail() -> None:
        with other:
            raise LookupError

    raised(LookupError, fail)
    assert other.is_closed


@case()
def symmetric_arrays_outlive_their_group(group: Group) -> None:
    with clone(group) as other:
        x = fd.empty(10_000, "int32", other)
        x[:] = 5
    assert (x == 5).all()
    x += 1
    assert (fd.allreduce(x, group) == 6 * group.world_size).all()


@case(min_ranks=2)
def a_peer_that_left_in_order_is_named(group: Group) -> None:
    other = clone(group, timeout=20)
    if group.rank == 1:
        other.close()
    fd.barrier(group)
    if group.rank != 1:
        error = raised(ChannelClosed, fd.allreduce, np.ones(1), other)
        assert (error.op, error.rank, error.peer) == ("allreduce", group.rank, 1)
        poisoned = raised(LockPoisoned, fd.barrier, other)
        assert repr(poisoned.__cause__) == repr(error)  # perhaps a copy, without a traceback
    other.close()


@case(min_ranks=2)
def an_interruption_ends_the_group_and_names_its_rank(group: Group) -> None:
    other = clone(group, timeout=20)
    if group.rank == 1:
        other.interrupt(KeyError("between two calls"))
        raised(DistributedError, fd.barrier, other)
    else:
        assert raised(DistributedError, fd.barrier, other).peer == 1
    fd.barrier(group)
    other.interrupt(KeyError("of a group that has ended"))
    other.close()
    other.interrupt(KeyError("of a group that was closed"))


@case(min_ranks=2)
def messages_of_a_peer_that_left_still_arrive(group: Group) -> None:
    other = clone(group, timeout=20)
    if group.rank == 1:
        fd.send(np.arange(3), other, 0)
        other.close()
    fd.barrier(group)
    if group.rank == 0:
        assert_array_equal(fd.recv(np.empty(3, np.int64), other, 1), [0, 1, 2])
        error = raised(ChannelClosed, fd.recv, np.empty(3, np.int64), other, 1)
        assert (error.op, error.rank, error.peer) == ("recv", 0, 1)
    fd.barrier(group)  # rank 1 has closed its group but still holds it
    other.close()


@case(min_ranks=2)
def closing_ends_calls_of_other_threads(group: Group) -> None:
    other = clone(group, timeout=20)
    if group.rank == 0:
        errors: list[BaseException] = []
        started = threading.Event()

        def wait() -> None:
            started.set()
            errors.append(raised(DistributedError, fd.barrier, other))

        thread = threading.Thread(target=wait)
        thread.start()
        started.wait()
        pending = fd.recv(np.empty(1), other, 1, async_op=True)
        other.close()
        thread.join()
        assert isinstance(errors[0], ChannelClosed)  # no Timeout of the group's
        raised(ChannelClosed, pending.wait)
    fd.barrier(group)
    other.close()


@case(min_ranks=2)
def closing_with_calls_queued_fails_them(group: Group) -> None:
    other = clone(group, timeout=20)
    if group.rank == 0:
        works = [fd.allreduce(np.ones(10), other, async_op=True) for _ in range(5)]
        other.close()
        for work in works:
            error = raised(ChannelClosed, work.wait)
            assert (error.op, error.rank) == ("allreduce", 0)
            assert work.is_completed()
    fd.barrier(group)
    other.close()


@case(min_ranks=2)
def a_rank_that_does_not_come_is_named_by_the_timeout(group: Group) -> None:
    late = group.world_size - 1
    other, error = _call_without(late, group, lambda g, s: fd.allreduce(np.ones(1), g, timeout=s))
    if error is not None:
        assert error.missing == (late,)
        assert (error.op, error.rank, error.peer, error.sequence) == (
            "allreduce",
            group.rank,
            late,
            0,
        )
        poisoned = raised(LockPoisoned, fd.barrier, other)
        assert repr(poisoned.__cause__) == repr(error)  # perhaps a copy, without a traceback
        assert isinstance(raised(LockPoisoned, fd.send, np.ones(1), other, late), DistributedError)
    fd.barrier(group)
    other.close()


@case(min_ranks=2)
def a_split_that_a_rank_does_not_call_is_named_by_the_timeout(group: Group) -> None:
    late = group.world_size - 1
    other, error = _call_without(late, group, lambda g, s: g.split([0, late], timeout=s))
    if error is not None:
        assert (error.op, error.missing, error.rank) == ("split", (late,), group.rank)
    fd.barrier(group)
    other.close()


def _call_without(
    late: int, group: Group, call: Callable[[Group, float], Any]
) -> tuple[Group, Timeout | None]:
    """Let all ranks but one make a call; return their group and how it ended, None on that one.

    Again, with more time, where others were missing too: a busy machine may have kept them from
    coming.
    """
    for seconds in (0.1, 1.0, 9.0):
        other, error = clone(group, timeout=20), None
        started = time.monotonic()
        if group.rank != late:
            error = raised(Timeout, call, other, seconds)
        elapsed_s = time.monotonic() - started
        assert elapsed_s < seconds + 9, "the group has a timeout of its own"
        is_clear = error is None or error.missing == (late,)
        facts = fd.all_gather(np.array([[elapsed_s, is_clear]]), group)
        # Who was told may have called later.
        assert facts[:, 0].max() >= seconds / 2
        if facts[:, 1].all():
            break
        other.close()
    return other, error


@case(min_ranks=2)
def a_receive_times_out_and_names_its_peer(group: Group) -> None:
    for is_async in (False, True):
        other = clone(group, timeout=20)
        if group.rank == 0:
            error: Any
            if is_async:
                work = fd.recv(np.empty(1), other, 1, timeout=0.05, async_op=True)
                error = raised(Timeout, work.wait)
            else:
                error = raised(Timeout, fd.recv, np.empty(1), other, 1, timeout=0.05)
            assert (error.op, error.missing, error.peer) == ("recv", (1,), 1)
        fd.barrier(group)
        other.close()


@case(min_ranks=2)
def the_group_knows_its_own_timeout(group: Group) -> None:
    other = clone(group, timeout=0.1)
    if group.rank == 0:
        started = time.monotonic()
        error = raised(Timeout, fd.barrier, other)
        assert time.monotonic() - started < group.timeout / 2
        assert error.seconds >= 0.05
    fd.barrier(group)
    other.close()


@case(min_ranks=2)
def a_queued_call_times_out(group: Group) -> None:
    other = clone(group, timeout=20)
    if group.rank == 0:
        first = fd.allreduce(np.ones(1), other, async_op=True, timeout=0.1)
        second = fd.allreduce(np.ones(1), other, async_op=True)
        assert raised(Timeout, first.wait).missing
        raised(DistributedError, second.wait)
    fd.barrier(group)
    other.close()
