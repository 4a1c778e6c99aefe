"""What a collective demands of its arguments, the same for every backend.

Every check here is made before anything is sent, so the group survives its error. A backend that
checks in compiled code calls the corresponding function here once the check has failed, so that
what several of them demand is put into words once. What only one of them demands, it says itself.
The words that errors of several backends share stand here, too.
"""

from __future__ import annotations

import contextlib
import math
import operator
from collections.abc import KeysView, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Any, NamedTuple, NoReturn, TypeVar

from ferro_dist.errors import (
    ChannelClosed,
    CollectiveMismatch,
    DistributedError,
    InvalidArray,
    InvalidRank,
    InvalidWorldSize,
    SelfSend,
    SizeMismatch,
    Timeout,
    UnsupportedOp,
)
from ferro_dist.reduce_op import ReduceOp

__all__ = [
    "SEE_ITS_OUTPUT",
    "UnevenCounts",
    "as_float",
    "attach_reason",
    "check_disjoint",
    "check_members",
    "check_out_dtype",
    "check_peer",
    "check_place",
    "check_reduction",
    "check_root",
    "check_same_members",
    "check_shape",
    "check_size",
    "check_tag",
    "check_timeout",
    "check_wait_timeout",
    "check_world_size",
    "closed_error",
    "describe_ranks",
    "elements",
    "first_line",
    "in_order",
    "integer",
    "is_reducible",
    "mismatch_error",
    "name_call",
    "name_group",
    "name_ranks_of_parent",
    "named_integer",
    "of_group",
    "per_rank_count",
    "raise_missing_array",
    "raise_mixed_devices",
    "raise_out_of_reach",
    "raise_overlap",
    "reduce_op_of",
    "uneven_counts",
]

MAX_WORLD_SIZE = 8190  # what the engine can name in an error: kMaxWorldSize of error.hpp
MAX_COUNT = (1 << 59) - 1  # of the widest elements, 16 bytes, NumPy can still express the size

SEE_ITS_OUTPUT = "Its own output may say why. "  # in errors that blame a rank which is gone

_MAX_NAMED = 16  # ranks, or members of a group, in the text of an error

_T = TypeVar("_T")

_INTEGERS = frozenset({"int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64"})
_REAL_FLOATS = frozenset({"float16", "bfloat16", "float32", "float64"})
_COMPLEX = frozenset({"complex64", "complex128"})
# Looking a name up in the enum itself takes three times as long as a small call.
_REDUCE_OPS = {op.name.lower(): op for op in ReduceOp}

_REDUCIBLE = {
    ReduceOp.SUM: _INTEGERS | _REAL_FLOATS | _COMPLEX,
    ReduceOp.MEAN: _REAL_FLOATS | _COMPLEX,
    ReduceOp.PROD: _INTEGERS | _REAL_FLOATS | _COMPLEX,
    ReduceOp.MIN: _INTEGERS | _REAL_FLOATS | {"bool"},
    ReduceOp.MAX: _INTEGERS | _REAL_FLOATS | {"bool"},
}


def integer(value: object) -> int:
    """Return an integer of any library as an int; raise TypeError for a bool or anything else."""
    try:
        if not _is_bool(value):
            return operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        pass
    raise TypeError(f"{value!r} is of type {type(value).__name__}, not an integer")


def named_integer(op: str, name: str, value: object) -> int:
    """Return an argument that is an integer; raise TypeError with its name for anything else."""
    try:
        return integer(value)
    except TypeError:
        raise TypeError(f"{op}: {name} must be an integer, not {value!r:.50}") from None


def as_float(value: Any) -> float:
    """Return a number as a float; raise TypeError or ValueError for anything that is none."""
    try:
        return float(value)
    except OverflowError:  # an int or a fraction
        return math.inf if value > 0 else -math.inf


def in_order(values: _T) -> _T:
    """Return what was given for a sequence; raise TypeError for a set, a mapping or text.

    All can be iterated over, but a set in an order that nobody meant, perhaps another one on each
    rank, and a mapping gives its keys. Who asks for the keys, which count as a set, means them, and
    they have the order of the mapping.
    """
    if isinstance(values, (AbstractSet, Mapping, str, bytes)) and not isinstance(values, KeysView):
        raise TypeError(f"a {type(values).__name__} is not a sequence: give a list")
    return values


def _is_bool(value: object) -> bool:
    # By name, so that NumPy need not be imported.
    return type(value).__name__ in ("bool", "bool_")


# Errors


def name_call(error: Exception, op: str, backend: Any) -> None:
    """Add what code that knows only arrays, or NCCL's or MPI's group, could not say.

    Done in the public functions, where a `try` costs nothing as long as nothing is raised. They
    have not checked `backend` either: if it is no group, that was the mistake.
    """
    if not isinstance(getattr(backend, "rank", None), int):
        raise TypeError(
            f"{op}: backend must be a group, such as init() makes, not {backend!r:.80}."
        ) from error
    if not isinstance(error, DistributedError):
        return
    if error.op is None:
        error.op = op
        error.args = (f"{op}: {error}",)
    if error.rank is None:
        error.rank = backend.rank
    name_group(error, backend)


def name_group(error: DistributedError, backend: Any) -> None:
    """Let an error in a part of a group say which part, in its text where that names ranks."""
    global_ranks = getattr(backend, "global_ranks", ())  # a program's own stand-in may have none
    if error.global_ranks is not None or global_ranks == tuple(range(len(global_ranks))):
        return
    error.global_ranks = global_ranks
    names_ranks = isinstance(error, (Timeout, CollectiveMismatch)) or (
        error.peer is not None and isinstance(error, ChannelClosed)
    )
    if names_ranks:
        error.args = (f"{error}\nThese are ranks{of_group(global_ranks)}.",)


def name_ranks_of_parent(error: DistributedError, members: Sequence[int], rank: int) -> None:
    """Let an error among `members` name ranks of the group that they are from.

    There this rank is `rank`, and `members` are the ranks of the new group, in its order.
    """
    error.args = (f"{error}\nRanks 0, 1, ... of the new group are {list(members)} of this one.",)
    error.rank, error.global_ranks = rank, None
    error.peer = None if error.peer is None else members[error.peer]
    if isinstance(error, Timeout):
        error.missing = tuple(members[missing] for missing in error.missing)


def of_group(global_ranks: Sequence[int] | None) -> str:
    """Name a group that is a part of another, to follow "rank 1"; return "" if it is none."""
    if global_ranks is None:
        return ""
    names = [str(rank) for rank in global_ranks]
    if len(names) > _MAX_NAMED:
        names[_MAX_NAMED - 2 : -1] = ["..."]
    return f" of group ({', '.join(names)})"


def describe_ranks(ranks: Sequence[int]) -> str:
    """Return "rank 3", "ranks 1, 2, 5" and so on; only the first if there are many."""
    shown = ", ".join(map(str, ranks[:_MAX_NAMED]))
    more = " and more" if len(ranks) > _MAX_NAMED else ""
    return f"rank {shown}" if len(ranks) == 1 else f"ranks {shown}{more}"


def closed_error(
    op: str | None = None,
    *,
    rank: int | None,
    peer: int | None = None,
    sequence: int | None = None,
    global_ranks: tuple[int, ...] | None = None,
) -> ChannelClosed:
    """Make the error of a call on a rank that has closed its group."""
    call = "" if op is None else f"{op}: " if sequence is None else f"{op} #{sequence}: "
    return ChannelClosed(
        f"{call}This rank has closed the group. Make a new one.",
        op=op,
        rank=rank,
        peer=peer,
        sequence=sequence,
        global_ranks=global_ranks,
    )


def first_line(error: BaseException) -> str:
    """Return how an error's message begins, or the name of an error that has none."""
    try:
        lines = str(error).splitlines()
    except Exception:  # of a program's own kind
        lines = []
    return lines[0] if lines else type(error).__name__


def attach_reason(error: ChannelClosed, reason: BaseException) -> None:
    """Make the exception for which a peer has left the cause of this rank's error.

    The error then need not point to that rank's output.
    """
    error.args = (str(error).replace(SEE_ITS_OUTPUT, ""),)
    error.__cause__ = reason


def mismatch_error(where: str, difference: str, **facts: Any) -> CollectiveMismatch:
    """Make the error of ranks that called different collectives, as `difference` says."""
    # Most programs give no tags, and would take one for noise.
    hint = (
        "A tag that is not your own marks a call that DDP or ShardedOptimizer made.\n"
        if "tag " in difference
        else ""
    )
    return CollectiveMismatch(
        f"{where}: the ranks disagree: {difference}.\n{hint}"
        "Nothing was sent; the group is still usable.",
        **facts,
    )


# Ranks


def check_world_size(world_size: int) -> int:
    """Return the number of ranks; raise InvalidWorldSize for anything else."""
    try:
        size = integer(world_size)
    except TypeError:
        size = 0
    if not 1 <= size <= MAX_WORLD_SIZE:
        raise InvalidWorldSize(
            f"world_size must be an integer from 1 to {MAX_WORLD_SIZE}, not {world_size!r:.80}."
        )
    return size


def check_place(rank: int, world_size: int) -> tuple[int, int]:
    """Return rank and world size as ints, if they fit each other.

    Raises InvalidRank, InvalidWorldSize.
    """
    size = check_world_size(world_size)
    if not _is_rank(rank, size):
        raise InvalidRank(f"rank must be an integer from 0 to {size - 1}, not {rank!r:.80}.")
    return integer(rank), size


def check_root(op: str, root: int, *, rank: int, world_size: int) -> int:
    """Return the root; raise InvalidRank unless it is a rank of the group."""
    if not _is_rank(root, world_size):
        raise InvalidRank(
            f"{op}: root {root!r:.80} is not a rank of this group{_ranks(world_size)}.",
            op=op,
            rank=rank,
        )
    return integer(root)


def check_peer(op: str, peer: int, *, rank: int, world_size: int) -> int:
    """Return the peer; raise InvalidRank unless it is a rank, SelfSend if it is the caller."""
    if not _is_rank(peer, world_size):
        raise InvalidRank(
            f"{op}: peer {peer!r:.80} is not a rank of this group{_ranks(world_size)}.",
            op=op,
            rank=rank,
        )
    if integer(peer) == rank:
        raise SelfSend(
            f"{op}: rank {rank} named itself as the peer. Copy the array instead.",
            op=op,
            rank=rank,
            peer=rank,
        )
    return integer(peer)


def check_members(members: Sequence[int], *, rank: int, world_size: int) -> tuple[int, ...]:
    """Return the ranks of a sub-group as a tuple of int.

    Raises InvalidRank for an impossible group, TypeError for anything but a list of ranks.
    """
    try:
        named = tuple(in_order(members))
    except TypeError:
        raise TypeError(f"split: members must be a sequence of ranks, not {members!r}.") from None
    for member in named:
        if not _is_rank(member, world_size):
            raise InvalidRank(
                f"split: member {member!r:.80} is not a rank of this group{_ranks(world_size)}.",
                op="split",
                rank=rank,
            )
    chosen = tuple(map(integer, named))
    if not chosen:
        raise InvalidRank("split: a group needs at least one member.", op="split", rank=rank)
    if len(set(chosen)) != len(chosen):
        twice = next(member for member in chosen if chosen.count(member) > 1)
        raise InvalidRank(
            f"split: rank {twice} is named more than once in {list(chosen)}.",
            op="split",
            rank=rank,
        )
    return chosen


def check_same_members(answers: Sequence[bytes], members: Sequence[int], *, rank: int) -> None:
    """Raise CollectiveMismatch unless all ranks gave the same answer, a digest of their members.

    `members` are those that this rank named.
    """
    for other, theirs in enumerate(answers):
        if theirs != answers[rank]:
            raise CollectiveMismatch(
                f"split: rank {rank} named {list(members)} as members, and rank {other} others.\n"
                "Name the same on all ranks. To make several groups, let all ranks call split for "
                "each in turn; it returns None on those outside. This group is still usable.",
                op="split",
                rank=rank,
                peer=other,
            )


def _is_rank(value: object, world_size: int) -> bool:
    try:
        return 0 <= integer(value) < world_size
    except TypeError:
        return False


def _ranks(world_size: int) -> str:
    if world_size == 1:
        return ", which has rank 0 alone"
    return f", which has ranks 0 to {world_size - 1}"


# Reductions and arrays


def reduce_op_of(op: ReduceOp | str) -> ReduceOp:
    """Return the reduction that `op` is or names; raise UnsupportedOp if there is none."""
    if isinstance(op, str):
        member = _REDUCE_OPS.get(op.lower())
        if member is not None:
            return member
    elif isinstance(op, ReduceOp):
        return op
    names = ", ".join(map(repr, _REDUCE_OPS))
    raise UnsupportedOp(f"There is no reduction {op!r:.80}; use one of {names}.")


def is_reducible(dtype: str, reduce_op: ReduceOp) -> bool:
    """Whether this dtype supports this reduction."""
    return dtype in _REDUCIBLE[reduce_op]


def check_reduction(op: str, dtype: str, reduce_op: ReduceOp, *, rank: int) -> None:
    """Raise UnsupportedOp for a reduction that this dtype does not support."""
    if is_reducible(dtype, reduce_op):
        return
    name = reduce_op.name
    if reduce_op is ReduceOp.MEAN and dtype in _INTEGERS:
        remedy = "the mean of integers is no integer: use SUM and divide, or convert to a float"
    elif dtype == "bool":
        remedy = "bool has MIN (all) and MAX (any)"
    elif dtype in _COMPLEX:
        remedy = "complex numbers have no order; they have SUM, MEAN and PROD"
    else:
        remedy = f"{dtype} can be moved but not reduced: convert to float16 or wider"
    raise UnsupportedOp(f"{op}: {name} of {dtype} does not exist: {remedy}.", op=op, rank=rank)


def check_out_dtype(op: str, x_dtype: str, out_dtype: str, *, rank: int) -> None:
    """Raise InvalidArray unless input and output hold the same kind of element."""
    if x_dtype != out_dtype:
        raise InvalidArray(
            f"{op}: x is {x_dtype} and out is {out_dtype}; they must be the same.",
            op=op,
            rank=rank,
        )


def check_disjoint(ops: Sequence[Any], views: Sequence[Any], *, rank: int) -> None:
    """Raise InvalidArray if a batch receives where another of its messages reads or writes.

    Parameters
    ----------
    ops : sequence of P2POp
    views : sequence of BufferView
        Of their arrays.
    """
    if all(op.is_send for op in ops):
        return
    extents = [
        (view.address, view.address + view.nbytes, op.is_send)
        for op, view in zip(ops, views, strict=True)
        if view.nbytes
    ]
    end_of_any = end_of_received = 0
    for begin, end, is_send in sorted(extents):
        if begin < (end_of_received if is_send else end_of_any):
            what = "an array that is received into overlaps another of the batch"
            raise_overlap("batch", what=what, rank=rank)
        end_of_any = max(end_of_any, end)
        if not is_send:
            end_of_received = max(end_of_received, end)


def raise_overlap(
    op: str, *, rank: int, what: str = "x and out overlap without being in place"
) -> NoReturn:
    """Raise InvalidArray for an array that would be written where the call uses another one."""
    raise InvalidArray(f"{op}: {what}. Pass arrays that do not share memory.", op=op, rank=rank)


def raise_mixed_devices(op: str, *, rank: int) -> NoReturn:
    """Raise InvalidArray for an `out` that is on another device than `x`."""
    raise InvalidArray(
        f"{op}: x and out are on different devices. Pass an out where x is.", op=op, rank=rank
    )


def raise_out_of_reach(op: str, *, rank: int, alternative: str = "") -> NoReturn:
    """Raise UnsupportedOp for a GPU's array that is given to a group of hosts."""
    raise UnsupportedOp(
        f"{op}: the array is on a GPU, which this backend does not reach. Use NcclBackend or "
        f"HybridBackend, or copy it to the host first.{alternative}",
        op=op,
        rank=rank,
    )


def raise_missing_array(op: str, name: str, why: str, *, rank: int) -> NoReturn:
    """Raise InvalidArray for a missing array that this rank must give."""
    raise InvalidArray(f"{op}: {name} is None, but {why}.", op=op, rank=rank)


# Tags and timeouts


def check_tag(tag: int) -> int:
    """Return the tag; raise OverflowError unless it has 32 bits, TypeError if it is no int."""
    try:
        value = integer(tag)
    except TypeError:
        raise TypeError(f"tag must be an integer, not {tag!r:.80}.") from None
    if not 0 <= value < 1 << 32:
        raise OverflowError(f"tag must be from 0 to 2**32 - 1, not {tag!r}.")
    return value


def check_timeout(seconds: float) -> float:
    """Return the timeout of a call as a float; raise ValueError unless it is positive."""
    value = _as_seconds(seconds)
    if not value > 0:
        raise ValueError(f"timeout must be a positive number of seconds, not {seconds!r:.80}.")
    return value


def check_wait_timeout(seconds: float) -> float:
    """Return the timeout of a wait for a `Work`; raise ValueError if it is negative.

    With 0 the wait only looks whether the work is done.
    """
    value = _as_seconds(seconds)
    if not value >= 0:
        raise ValueError(f"timeout must be a number of seconds of at least 0, not {seconds!r:.80}.")
    return value


def _as_seconds(timeout: float) -> float:
    if not _is_bool(timeout):
        try:
            return float(timeout + 0.0)  # not just float(timeout), which accepts "5"
        except OverflowError:  # an integer beyond all floats
            return math.inf if timeout > 0 else -math.inf
        except Exception:  # which one, the library of an array that is no number decides
            with contextlib.suppress(Exception):
                return float(integer(timeout))
    raise TypeError(f"timeout must be a number of seconds, not {timeout!r:.80}.")


# Sizes


def check_shape(shape: int | Sequence[int]) -> tuple[int, ...]:
    """Return the shape of a new array; raise TypeError for no shape, ValueError if negative."""
    dims = (shape,) if isinstance(shape, (str, bytes)) or not isinstance(shape, Sequence) else shape
    try:
        lengths = tuple(map(integer, dims))
    except TypeError:
        raise TypeError(
            f"shape must be an integer or a sequence of them, not {shape!r:.80}."
        ) from None
    if any(length < 0 for length in lengths):
        raise ValueError(f"shape must not be negative, and is {shape!r}.")
    return lengths


def elements(count: int) -> str:
    """Return "1 element", "2 elements" and so on."""
    return "1 element" if count == 1 else f"{count} elements"


def check_size(op: str, name: str, count: int, expected: int, *, rank: int) -> None:
    """Raise SizeMismatch unless the array called `name` has the expected number of elements."""
    if count != expected:
        raise SizeMismatch(
            f"{op}: {name} has {elements(count)} instead of {expected}.", op=op, rank=rank
        )


def per_rank_count(op: str, name: str, count: int, *, rank: int, world_size: int) -> int:
    """Return the size of one rank's chunk; raise SizeMismatch if chunks would be unequal."""
    if count % world_size:
        raise SizeMismatch(
            f"{op}: {name} has {elements(count)}, which cannot be split evenly over {world_size} "
            "ranks.",
            op=op,
            rank=rank,
        )
    return count // world_size


class UnevenCounts(NamedTuple):
    """Elements to and from each rank of an uneven all_to_all, packed in rank order."""

    send: tuple[int, ...]
    recv: tuple[int, ...]


def uneven_counts(
    send_counts: Sequence[int] | None,
    recv_counts: Sequence[int] | None,
    *,
    x_count: int,
    rank: int,
    world_size: int,
) -> UnevenCounts | None:
    """Check the counts of an all_to_all; None if it is even."""
    if send_counts is None and recv_counts is None:
        return None
    if send_counts is None or recv_counts is None:
        given = "recv_counts" if send_counts is None else "send_counts"
        raise _uneven(f"only {given} was given; pass both, or neither for equal chunks", rank)
    send = _counts("send_counts", send_counts, rank, world_size)
    recv = _counts("recv_counts", recv_counts, rank, world_size)
    if sum(send) != x_count:
        what = f"send_counts add up to {sum(send)}, but x has {elements(x_count)}"
        raise _uneven(f"{what}; count elements, not rows", rank)
    if sum(recv) > MAX_COUNT:
        raise _uneven(f"recv_counts add up to {sum(recv)}, more than an array can hold", rank)
    if send[rank] != recv[rank]:
        what = f"rank {rank} sends itself {elements(send[rank])} but expects {recv[rank]}"
        raise _uneven(what, rank, peer=rank)
    return UnevenCounts(send, recv)


def _counts(name: str, counts: Any, rank: int, world_size: int) -> tuple[int, ...]:
    try:
        values = tuple(map(integer, in_order(counts)))
    except TypeError:
        what = f"{name} must be integers, one for each rank, not {counts!r}"
        raise _uneven(what, rank) from None
    if len(values) != world_size or any(value < 0 for value in values):
        raise _uneven(
            f"{name} must be {world_size} integers of at least 0, one for each rank, "
            f"not {list(values)}",
            rank,
        )
    return values


def _uneven(what: str, rank: int, peer: int | None = None) -> SizeMismatch:
    return SizeMismatch(f"all_to_all: {what}.", op="all_to_all", rank=rank, peer=peer)
