"""Messages between two ranks arrive whole, in order, and beside all collectives."""

from __future__ import annotations

from typing import Any

import numpy as np
from backends.contract.case import Array, Group, case, raised
from backends.contract.reference import DTYPES, data
from numpy.testing import assert_array_equal

import ferro_dist as fd
from ferro_dist import P2POp, SizeMismatch, Work

# About every size at which a message takes another way: a cell's 40 bytes, a piece of
# 32 KiB, a ring of at most 1 MiB, and beyond.
NBYTES = (0, 1, 39, 40, 41, 32_768, 32_769, 262_144, 1_048_576, 1_048_577, 3_000_001)


def _neighbours(group: Group) -> tuple[int, int]:
    return (group.rank + 1) % group.world_size, (group.rank - 1) % group.world_size


@case(min_ranks=2)
def messages_of_every_size_arrive(group: Group) -> None:
    right, left = _neighbours(group)
    for nbytes in NBYTES:
        x, out = data(group.rank, (nbytes,), "uint8"), np.empty(nbytes, np.uint8)
        for dst, src in ((right, left), (left, right)):
            assert fd.sendrecv(x, out, group, dst, src) is out
            assert_array_equal(out, data(src, (nbytes,), "uint8"))


@case(min_ranks=2)
def messages_of_every_dtype_arrive(group: Group) -> None:
    right, left = _neighbours(group)
    for name in DTYPES:
        for shape in ((), (0,), (3, 4), (5000,)):
            x = data(group.rank, shape, name)
            out = np.empty_like(x)
            fd.sendrecv(x, out, group, right, left)
            assert_array_equal(out, data(left, shape, name))
            assert_array_equal(x, data(group.rank, shape, name))


@case(min_ranks=2)
def every_two_ranks_send_both_ways(group: Group) -> None:
    for count in (1, 5000, 400_000):
        for low in range(group.world_size):
            for high in range(low + 1, group.world_size):
                x, out = np.full(count, group.rank), np.empty(count, np.int64)
                if group.rank == low:
                    assert fd.send(x, group, high) is None
                    assert fd.recv(out, group, high) is out
                    assert (out == high).all()
                if group.rank == high:
                    assert fd.recv(out, group, low) is out
                    assert (out == low).all()
                    fd.send(x, group, low)


@case(min_ranks=2)
def messages_arrive_in_the_order_of_sending(group: Group) -> None:
    # More than any channel holds, so that the sender must wait for the receiver.
    if group.rank == 0:
        for number in range(500):
            fd.send(np.full(number % 20, number), group, 1)
    if group.rank == 1:
        for number in range(500):
            out = np.empty(number % 20, np.int64)
            fd.recv(out, group, 0)
            assert (out == number).all()


@case(min_ranks=2)
def small_and_large_messages_keep_their_order(group: Group) -> None:
    counts = [3, 200_000, 1, 0, 5000, 200_000, 2, 0]
    if group.rank == 0:
        for work in [fd.send(np.full(n, i), group, 1, async_op=True) for i, n in enumerate(counts)]:
            work.wait()
    if group.rank == 1:
        outs = [np.empty(n, np.int64) for n in counts]
        works = [fd.recv(out, group, 0, async_op=True) for out in outs]
        for number in (4, 2, 0, 7, 1, 3, 6, 5):
            assert works[number].result() is outs[number]
            assert (outs[number] == number).all()


@case(min_ranks=2)
def a_small_send_needs_no_receiver_yet(group: Group) -> None:
    if group.rank == 0:
        fd.send(np.arange(3), group, 1)
    fd.barrier(group)
    if group.rank == 1:
        assert_array_equal(fd.recv(np.empty(3, np.int64), group, 0), [0, 1, 2])


@case(min_ranks=2)
def what_was_sent_may_be_overwritten(group: Group) -> None:
    if group.rank == 0:
        for count in (3, 100_000):
            x = np.zeros(count)
            fd.send(x, group, 1)
            x[:] = 1
    fd.barrier(group) if group.rank > 1 else None
    if group.rank == 1:
        for count in (3, 100_000):
            assert (fd.recv(np.ones(count), group, 0) == 0).all()
    fd.barrier(group) if group.rank <= 1 else None


@case(min_ranks=2)
def a_batch_moves_everything_at_once(group: Group) -> None:
    """Large messages both ways between all ranks: in any one order this would deadlock."""
    peers = [peer for peer in range(group.world_size) if peer != group.rank]
    for counts in ((4, 1, 0), (300_000, 2, 100_000)):
        outs = {peer: [np.empty(n, np.int64) for n in counts] for peer in peers}
        sends = [
            P2POp("send", np.full(n, 10 * group.rank + i), p)
            for p in peers
            for i, n in enumerate(counts)
        ]
        recvs = [P2POp("recv", out, peer) for peer in peers for out in outs[peer]]
        assert fd.batch([*sends, *recvs], group) is None
        for peer in peers:
            for i, out in enumerate(outs[peer]):
                assert (out == 10 * peer + i).all()
        fd.batch([*recvs, *sends], group, async_op=True).wait()


@case()
def an_empty_batch_is_done(group: Group) -> None:
    assert fd.batch([], group) is None
    work = fd.batch([], group, async_op=True)
    assert isinstance(work, Work)
    assert work.result(10.0) is None


@case(min_ranks=2)
def sendrecv_moves_both_ways_at_once(group: Group) -> None:
    right, left = _neighbours(group)
    x, out = np.full(500_000, group.rank), np.empty(500_000, np.int64)
    assert fd.sendrecv(x, out, group, right, left) is out
    assert (out == left).all()
    assert fd.sendrecv(x, out, group, left, right, async_op=True).result() is out
    assert (out == right).all()


@case(min_ranks=2)
def gaps_are_sent_without_and_refused_for_receiving(group: Group) -> None:
    right, left = _neighbours(group)
    table = np.arange(24.0).reshape(4, 6) + group.rank
    out = np.empty((6, 2))
    fd.sendrecv(table.T[:, ::2], out, group, right, left)
    assert_array_equal(out, (np.arange(24.0).reshape(4, 6) + left).T[:, ::2])


@case(min_ranks=2)
def symmetric_arrays_are_sent_like_others(group: Group) -> None:
    right, left = _neighbours(group)
    x, out = fd.empty(100_000, "int64", group), fd.empty(100_000, "int64", group)
    x[:] = group.rank
    fd.sendrecv(x, out, group, right, left)
    assert (out == left).all()


@case(min_ranks=2)
def receives_may_outstay_collectives(group: Group) -> None:
    right, left = _neighbours(group)
    out = np.empty(1000, np.int64)
    work = fd.recv(out, group, left, async_op=True)
    for number in range(5):
        assert fd.allreduce(np.ones(1 + 10_000 * number), group)[0] == group.world_size
    assert not work.is_completed()
    fd.barrier(group)
    fd.send(np.full(1000, group.rank), group, right)
    assert work.result() is out
    assert (out == left).all()


@case(min_ranks=2)
def messages_overtake_collectives_that_wait(group: Group) -> None:
    """Rank 0's collective cannot end before its message has been answered."""
    if group.rank == 0:
        work = fd.allreduce(np.ones(50_000), group, async_op=True)
        fd.send(np.array([7]), group, 1)
        assert fd.recv(np.empty(1, np.int64), group, 1)[0] == 8
        assert work.result()[0] == group.world_size
    else:
        if group.rank == 1:
            question = fd.recv(np.empty(1, np.int64), group, 0)
            fd.send(question + 1, group, 0)
        fd.allreduce(np.ones(50_000), group)


def _send_that_do_not_fit(group: Group) -> None:
    for x, tag in _misfits():
        fd.send(x, group, 1, tag=tag)


def _misfits() -> list[tuple[Array, int]]:
    return [
        (np.zeros(5), 0),
        (np.zeros(2), 0),
        (np.zeros(0), 0),
        (np.zeros(3, np.int64), 0),
        (np.zeros(3), 7),
        (np.zeros(300_000), 0),
    ]


@case(min_ranks=2)
def a_message_that_does_not_fit_is_dropped(group: Group) -> None:
    if group.rank == 0:
        _send_that_do_not_fit(group)
        fd.send(np.ones(3), group, 1)
    if group.rank == 1:
        out = np.full(3, 5.0)
        numbers = []
        for x, tag in _misfits():
            error: Any = raised(SizeMismatch, fd.recv, out, group, 0)
            assert (error.op, error.rank, error.peer) == ("recv", 1, 0)
            assert str(error).startswith(f"recv #{error.sequence} failed on rank 1")
            numbers.append(error.sequence)
            assert ("tag" if tag else x.dtype.name) in str(error)
            assert str(x.size) in str(error) or tag
            assert (out == 5).all()
        assert np.diff(numbers).tolist() == [1] * (len(numbers) - 1)
        assert (fd.recv(out, group, 0) == 1).all()
    assert fd.allreduce(np.ones(1), group)[0] == group.world_size


@case(min_ranks=2)
def an_awaited_message_that_does_not_fit_is_dropped(group: Group) -> None:
    if group.rank == 0:
        fd.barrier(group)
        _send_that_do_not_fit(group)
        fd.send(np.ones(3), group, 1)
    elif group.rank == 1:
        out = np.full(3, 5.0)
        works = [fd.recv(out, group, 0, async_op=True) for _ in _misfits()]
        fd.barrier(group)
        for work in works:
            raised(SizeMismatch, work.wait)
            raised(SizeMismatch, work.result)  # every wait raises it again
            assert work.is_completed()
        assert (out == 5).all()
        assert (fd.recv(out, group, 0) == 1).all()
    else:
        fd.barrier(group)
    fd.barrier(group)


@case(min_ranks=2)
def a_misfit_in_a_batch_spares_the_rest(group: Group) -> None:
    if group.rank == 0:
        fd.batch([P2POp("send", np.full(n, n), 1) for n in (4, 2, 3)], group)
    if group.rank == 1:
        outs = [np.zeros(n, np.int64) for n in (4, 1, 3)]
        raised(SizeMismatch, fd.batch, [P2POp("recv", out, 0) for out in outs], group)
        assert (outs[0] == 4).all()
        assert (outs[1] == 0).all()
        assert (outs[2] == 3).all()
    fd.barrier(group)


@case(min_ranks=2)
def tags_tell_messages_apart(group: Group) -> None:
    right, left = _neighbours(group)
    for tag in (1, 1023, 2**31, 2**32 - 1):
        x, out = np.array([group.rank]), np.empty(1, np.int64)
        fd.sendrecv(x, out, group, right, left, tag=tag)
        assert out[0] == left
