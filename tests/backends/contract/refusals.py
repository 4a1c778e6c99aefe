"""What is refused, and that the group goes on as if it had not been asked.

Most cases let one rank alone make the bad call: had it sent anything, the other ranks'
next collective would not match.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from backends.contract.case import Group, assert_same_bits, case, raised
from backends.contract.reference import (
    COLLECTIVES,
    DTYPES,
    REDUCING,
    ROOTED,
    call,
    dtype_of,
    reduces,
)
from numpy.testing import assert_array_equal

import ferro_dist as fd
from ferro_dist import (
    CollectiveMismatch,
    DistributedError,
    InvalidArray,
    InvalidRank,
    P2POp,
    SelfSend,
    SizeMismatch,
    UnsupportedOp,
)
from ferro_dist.reduce_op import ReduceOp

# For what the arguments alone decide, before anything is sent.
_ENOUGH_RANKS = 2


def _goes_on(group: Group) -> None:
    assert fd.allreduce(np.ones(2), group)[0] == group.world_size


def _refused(
    group: Group, kind: type[Exception], function: Callable[..., Any], *args: Any, **options: Any
) -> None:
    """Make a call that must be refused on this rank, and check what the error carries."""
    error: Any = raised(kind, function, *args, **options)
    if isinstance(error, DistributedError):
        assert error.rank == group.rank
        assert error.op is not None
        assert type(error) is kind, f"{type(error).__name__} instead of {kind.__name__}"
    assert str(error)


# Ranks


@case(each=ROOTED, max_ranks=_ENOUGH_RANKS)
def refuses_what_is_no_rank(group: Group, op: str) -> None:
    x = np.ones(group.world_size)
    if group.rank == 0:
        for root in (group.world_size, -1, 2**40, 1.0, "0", None, True):
            error: Any = raised(
                InvalidRank,
                call,
                op,
                group,
                x,
                root=root,
                out=None if op != "scatter" else x[:1].copy(),
            )
            assert (error.op, error.rank) == (op, 0)
            assert repr(root) in str(error)
    _goes_on(group)


@case(max_ranks=_ENOUGH_RANKS)
def messages_to_no_rank_are_refused(group: Group) -> None:
    x, own = np.ones(1), group.rank
    peer: Any
    for peer in (group.world_size, -1, 1.5, None):
        _refused(group, InvalidRank, fd.send, x, group, peer)
        _refused(group, InvalidRank, fd.recv, x, group, peer)
        _refused(group, InvalidRank, fd.batch, [P2POp("send", x, peer)], group)
    _refused(group, SelfSend, fd.send, x, group, own)
    _refused(group, SelfSend, fd.recv, x, group, own, async_op=True)
    _refused(group, SelfSend, fd.batch, [P2POp("recv", x, own)], group)
    if group.world_size > 1:
        other = (own + 1) % group.world_size
        _refused(group, SelfSend, fd.sendrecv, x, np.empty(1), group, other, own)
        _refused(group, SelfSend, fd.sendrecv, x, np.empty(1), group, own, other)
        # The first of the batch is fine, and must not be sent alone.
        _refused(group, SelfSend, fd.batch, [P2POp("send", x, other), P2POp("send", x, own)], group)
    _goes_on(group)


@case(max_ranks=_ENOUGH_RANKS)
def members_that_are_no_group_are_refused(group: Group) -> None:
    for members in ([], [0, 0], [group.world_size], [-1], [0.0], ["0"]):
        _refused(group, InvalidRank, group.split, members)
    _goes_on(group)


# Arrays


@case(each=COLLECTIVES, max_ranks=_ENOUGH_RANKS)
def refuses_arrays_it_cannot_write(group: Group, op: str) -> None:
    x = np.ones(4 * group.world_size, np.float32)
    wanted = call(op, group, x)
    if wanted is None:
        return _goes_on(group)
    frozen = np.zeros_like(wanted)
    frozen.flags.writeable = False
    outs: list[tuple[type[Exception], Any]] = [
        (InvalidArray, frozen),
        (InvalidArray, np.zeros(2 * wanted.size, np.float32)[::2]),
        (InvalidArray, np.zeros(wanted.shape, np.float64)),
        (InvalidArray, np.zeros(wanted.shape, ">f4")),
        (InvalidArray, np.zeros(wanted.shape, object)),
        (InvalidArray, bytes(wanted.nbytes)),
        (InvalidArray, 5),
        (SizeMismatch, np.zeros(wanted.size + 1, np.float32)),
        (SizeMismatch, np.zeros(0, np.float32)),
    ]
    if group.rank == 0:
        for kind, out in outs:
            _refused(group, kind, call, op, group, x, out=out)
            _refused(group, kind, call, op, group, x, out=out, async_op=True)
    return _goes_on(group)


@case(each=COLLECTIVES, max_ranks=_ENOUGH_RANKS)
def refuses_arrays_it_cannot_read(group: Group, op: str) -> None:
    count = 2 * group.world_size
    if group.rank == 0:
        masked = np.ma.masked_array(np.ones(count), np.arange(count) % 2)
        for x in (
            np.ones(count, ">f4"),
            np.ones(count, object),
            np.zeros(count, "U3"),
            np.zeros(count, "datetime64[s]"),
            np.zeros(count, [("a", "i4")]),
            np.zeros(count, np.longdouble),
            masked,
            [1.0] * count,
            None,
            "text",
            3.5,
        ):
            _refused(group, InvalidArray, call, op, group, x)
    _goes_on(group)


@case(each=COLLECTIVES, max_ranks=_ENOUGH_RANKS)
def refuses_arrays_that_overlap(group: Group, op: str) -> None:
    size = group.world_size
    memory = np.zeros(40 * size * size, np.float32)
    x = memory[: 4 * size]
    wanted = call(op, group, x)
    if group.rank == 0 and wanted is not None:
        _refused(group, InvalidArray, call, op, group, x, out=memory[1 : wanted.size + 1])
    fd.barrier(group)
    assert (memory == 0).all()


@case(min_ranks=2, max_ranks=_ENOUGH_RANKS)
def sendrecv_refuses_arrays_that_overlap(group: Group) -> None:
    memory = np.zeros(10)
    other = (group.rank + 1) % group.world_size
    for out in (memory[:5], memory[3:8]):
        _refused(group, InvalidArray, fd.sendrecv, memory[:5], out, group, other, other)
    error = raised(InvalidArray, fd.sendrecv, memory, memory, group, other, other)
    assert "Pass arrays that do not share memory" in str(error)
    _goes_on(group)


@case(min_ranks=2)
def batch_refuses_to_receive_into_what_it_sends_or_receives(group: Group) -> None:
    memory = np.zeros(10)
    other = (group.rank + 1) % group.world_size
    op: Any
    for op, array in (("send", memory[:5]), ("send", memory[2:3]), ("recv", memory[4:])):
        messages = [P2POp("recv", memory[1:6], other), P2POp(op, array, other)]
        for ops in (messages, messages[::-1]):
            _refused(group, InvalidArray, fd.batch, ops, group)
    _goes_on(group)
    left, x = (group.rank - 1) % group.world_size, np.arange(5.0)
    ops = [P2POp("send", part, other) for part in (x, x[2:])]
    fd.batch(ops + [P2POp("recv", np.empty(n), left) for n in (5, 3)], group)


@case(max_ranks=_ENOUGH_RANKS)
def missing_arrays_are_refused(group: Group) -> None:
    if group.rank == 0:
        error = raised(InvalidArray, fd.scatter, None, group, 0, out=np.empty(1))
        assert (error.op, error.rank) == ("scatter", 0)
    else:
        raised(InvalidArray, fd.scatter, None, group, 0)
    _goes_on(group)


@case(min_ranks=2, max_ranks=_ENOUGH_RANKS)
def chunks_that_come_out_unequal_are_refused(group: Group) -> None:
    x = np.ones(2 * group.world_size + 1)
    for op in ("reduce_scatter", "all_to_all", "scatter"):
        if group.rank == 0:
            _refused(group, SizeMismatch, call, op, group, x)
    # The elements divide evenly, the rows do not: only `out` could tell the shape.
    if group.rank == 0:
        rows = np.ones((1, 2 * group.world_size))
        _refused(group, SizeMismatch, fd.reduce_scatter, rows, group)
    _goes_on(group)
    y = fd.reduce_scatter(np.ones((1, 2 * group.world_size)), group, out=np.empty(2))
    assert (y == group.world_size).all()


@case(max_ranks=_ENOUGH_RANKS)
def bad_uneven_counts_are_refused(group: Group) -> None:
    size = group.world_size
    x, ones = np.ones(size), [1] * size
    if group.rank == 0:
        for send, recv in (
            (ones, None),
            (None, ones),
            ([*ones, 1], ones),
            (ones, []),
            ([2] * size, ones),
            ([1.0] * size, ones),
            (ones, ["1"] * size),
            ([size, *[0] * (size - 1)], ones) if size > 1 else ([2], [1]),
            ([-1, *[2] * (size - 1)], ones),
            (ones, 1),
            (dict.fromkeys(range(size)), ones),
            (ones, [1 << 70, *ones[1:]]),
            (ones, [*ones[1:], 1 << 59]),
        ):
            _refused(
                group, SizeMismatch, fd.all_to_all, x, group, send_counts=send, recv_counts=recv
            )
        _refused(
            group,
            SizeMismatch,
            fd.all_to_all,
            x,
            group,
            out=np.empty(size + 1),
            send_counts=ones,
            recv_counts=ones,
        )
        _refused(
            group, InvalidArray, fd.all_to_all, x, group, out=x, send_counts=ones, recv_counts=ones
        )
    _goes_on(group)


@case(max_ranks=_ENOUGH_RANKS)
def uneven_chunks_in_arrays_that_overlap_are_refused(group: Group) -> None:
    counts = [2] * group.world_size
    nbytes = sum(counts)
    memory = np.zeros(nbytes + 1, np.uint8)
    if group.rank == 0:
        for first in (0, 1):
            _refused(
                group,
                InvalidArray,
                fd.all_to_all,
                memory[:nbytes],
                group,
                out=memory[first : first + nbytes],
                send_counts=counts,
                recv_counts=counts,
            )
    _goes_on(group)


# Options


@case(each=REDUCING, max_ranks=_ENOUGH_RANKS)
def refuses_reductions_that_do_not_exist(group: Group, op: str) -> None:
    for name in DTYPES:
        for reduce_op in ReduceOp:
            if reduces(group, name, reduce_op) is not False or group.rank != 0:
                continue
            x = np.ones(group.world_size, dtype_of(name))
            error: Any = raised(UnsupportedOp, call, op, group, x, reduce_op=reduce_op)
            assert (error.op, error.rank) == (op, 0)
            assert name in str(error)
            if reduce_op is ReduceOp.MEAN and "int" in name:
                assert "use SUM and divide" in str(error)
    for bad in ("median", "", 7):
        raised(UnsupportedOp, call, op, group, np.ones(group.world_size), reduce_op=bad)
    _goes_on(group)


@case(each=REDUCING, max_ranks=_ENOUGH_RANKS)
def of_two_mistakes_that_in_the_output_is_named(group: Group, op: str) -> None:
    if group.rank == 0:
        x, out = np.ones(group.world_size, np.int32), np.ones(group.world_size + 1, np.int32)
        raised(SizeMismatch, call, op, group, x, out=out, reduce_op=ReduceOp.MEAN)
    _goes_on(group)


@case(max_ranks=_ENOUGH_RANKS)
def timeouts_that_are_no_time_are_refused(group: Group) -> None:
    x = np.ones(group.world_size)
    other = (group.rank + 1) % group.world_size
    for seconds in (0, 0.0, -1, -0.0, float("nan"), float("-inf")):
        for is_async in (False, True):
            options: dict[str, Any] = {"timeout": seconds, "async_op": is_async}
            raised(ValueError, fd.allreduce, x, group, **options)
            raised(ValueError, fd.barrier, group, **options)
            raised(ValueError, fd.batch, [], group, **options)
            if group.world_size > 1:
                raised(ValueError, fd.send, x, group, other, **options)
    raised(TypeError, fd.barrier, group, timeout="soon")
    assert fd.allreduce(x, group, timeout=float("inf"))[0] == group.world_size
    work = fd.allreduce(x, group, timeout=float("inf"), async_op=True)
    for bad in (-1.0, float("nan")):
        raised(ValueError, work.wait, bad)
        raised(ValueError, work.result, bad)
    work.wait(float("inf"))
    assert work.result()[0] == group.world_size


@case(max_ranks=_ENOUGH_RANKS)
def tags_that_are_no_tag_are_refused(group: Group) -> None:
    for tag in (-1, 2**32):
        raised(OverflowError, fd.barrier, group, tag=tag)
    raised(TypeError, fd.barrier, group, tag="1")
    fd.barrier(group, tag=2**32 - 1)
    _goes_on(group)


@case(max_ranks=_ENOUGH_RANKS)
def dtypes_that_do_not_exist_are_refused(group: Group) -> None:
    for dtype in ("float7", object, ">f4", "U3", "datetime64[s]"):
        raised(InvalidArray, fd.empty, 3, dtype, group)
    for shape in (-1, (2, -3)):
        raised(ValueError, fd.empty, shape, "int8", group)
    raised((MemoryError, ValueError, OverflowError), fd.empty, 2**62, "float64", group)  # type: ignore[arg-type]
    _goes_on(group)


# Disagreement


def _check_mismatch(group: Group, words: tuple[str, str], function: Callable[[], Any]) -> None:
    """Make calls that differ on the last rank: all ranks get the same words, and go on."""
    error = raised(CollectiveMismatch, function)
    last = group.world_size - 1
    text = str(error)
    assert f"rank 0 called {words[0]}" in text, text
    assert f"rank {last} called {words[1]}" in text, text
    assert error.rank == group.rank
    assert error.peer == (0 if group.rank == last else last)
    assert error.sequence is not None
    sequences = fd.all_gather(np.array([error.sequence]), group)
    assert (sequences == error.sequence).all()
    told = text.partition("disagree: ")[2]
    assert_same_bits(group, np.frombuffer(told.encode(), np.uint8))


@case(each=COLLECTIVES, min_ranks=2)
def mismatches_are_raised_on_all_ranks(group: Group, op: str) -> None:
    """In dtype, count, root, reduce op, tag and op, for small and large arrays."""
    is_last = group.rank == group.world_size - 1
    for count in (group.world_size, 30_000 * group.world_size):
        x = np.full(count, 1.0, np.float32)
        more = np.full(2 * count, 1.0, np.float32)

        def go(x: Any = x, **options: Any) -> Callable[[], Any]:
            return lambda: call(op, group, x, **options)

        same = f"{op}(", f"{op}("
        differing = [
            (same, go(x.astype("f8") if is_last else x)),
            (same, go(more if is_last else x)),
            (same, go(x, tag=5 if is_last else 6)),
            ((f"{op}(", "barrier"), (lambda: fd.barrier(group)) if is_last else go(x)),
        ]
        if op in REDUCING:
            words = f"{op}(sum", f"{op}(max"
            differing.append((words, go(x, reduce_op="max" if is_last else "sum")))
        if op in ROOTED:
            differing.append((same, go(x, root=1 if is_last else 0)))
        for words, function in differing:
            _check_mismatch(group, words, function)
        assert (x == 1).all()
        assert_array_equal(fd.allreduce(x, group), group.world_size * x)


@case(each=COLLECTIVES, min_ranks=2)
def mismatches_leave_outputs_untouched(group: Group, op: str) -> None:
    is_last = group.rank == group.world_size - 1
    for make in (np.empty, lambda shape, dtype: fd.empty(shape, dtype, group)):
        for count in (2 * group.world_size, 40_000 * group.world_size):
            x = make(count, np.float32)
            x[:] = group.rank
            wanted = call(op, group, x)
            out = None if wanted is None else make(wanted.shape, np.float32)
            if out is not None:
                out[:] = -1
            raised(CollectiveMismatch, call, op, group, x, out=out, tag=int(is_last))
            fd.barrier(group)
            assert (x == group.rank).all()
            assert out is None or (out == -1).all()


@case(min_ranks=2)
def mismatches_name_what_differs(group: Group) -> None:
    x, is_last = np.ones(4, np.float32), group.rank == group.world_size - 1
    sides = {
        "count 4": lambda: fd.allreduce(x[: 3 if is_last else 4], group),
        "float64": lambda: fd.allreduce(x.astype("f8") if is_last else x, group),
        "mean": lambda: fd.allreduce(x, group, "mean" if is_last else "sum"),
        "root 1": lambda: fd.broadcast(x, group, 1 if is_last else 0),
        "tag 77": lambda: fd.barrier(group, tag=77 if is_last else 0),
        "all_gather": lambda: fd.all_gather(x, group) if is_last else fd.gather(x, group),
    }
    for words, function in sides.items():
        error = raised(CollectiveMismatch, function)
        assert words in str(error), error
    _goes_on(group)


@case(min_ranks=2)
def uneven_counts_that_disagree_are_a_mismatch(group: Group) -> None:
    ones = [1] * group.world_size
    x, recv = np.ones(group.world_size), list(ones)
    if group.rank == 1:
        recv[0] = 3
    out = np.full(sum(recv), 5.0)
    error = raised(
        CollectiveMismatch, fd.all_to_all, x, group, out=out, send_counts=ones, recv_counts=recv
    )
    assert "rank 0 sends 1 element to rank 1, which expects 3" in str(error)
    peer = 0 if group.rank == 1 else 1
    assert (error.op, error.rank, error.peer) == ("all_to_all", group.rank, peer)
    fd.barrier(group)
    assert (out == 5).all()
    # Even on one rank, uneven on another.
    options = {"send_counts": ones, "recv_counts": ones} if group.rank else {}
    raised(CollectiveMismatch, fd.all_to_all, x, group, **options)
    _goes_on(group)


@case(min_ranks=2)
def mismatches_one_after_the_other_are_all_found(group: Group) -> None:
    for number in range(20):
        raised(CollectiveMismatch, fd.allreduce, np.ones(2 + group.rank % 2), group)
        if number % 3 == 0:
            _goes_on(group)
    fd.barrier(group)
