"""Collectives give what NumPy gives, wherever the arrays lie."""

from __future__ import annotations

import time
from typing import Any

import ml_dtypes
import numpy as np
from backends.contract.case import Array, Group, assert_same_bits, case
from backends.contract.reference import (
    COLLECTIVES,
    COMPLEX,
    DTYPES,
    FLOATS,
    INTEGERS,
    LOW_PRECISION,
    REDUCING,
    ROOTED,
    assert_equal,
    call,
    data,
    dtype_of,
    expected,
    has_own_memory,
    inputs,
    reduced,
    reduces,
    shape_of_result,
)
from numpy.testing import assert_array_equal

import ferro_dist as fd
from ferro_dist.arguments import reduce_op_of
from ferro_dist.reduce_op import ReduceOp

SUM, MEAN, PROD, MIN, MAX = ReduceOp

SHAPES: tuple[tuple[int, ...], ...] = ((), (0,), (1,), (5,), (3, 4), (2, 0, 3), (1000,))

# float32, about every size at which a backend takes another way: what fits into a header
# (56 bytes) or a message's cell (40), what is worth reading where it stands (8 KiB), what
# fits into a frame (32 KiB) or a header's annex (64 KiB), one slot and half of a staging
# window (64 KiB, 1 MiB), and all of it (MANY).
COUNTS = (1, 10, 13, 14, 15, 2047, 2048, 2049, 8192, 16384, 16385, 50_001, 262_145)
MANY = 655_363
# A broadcast of symmetric memory is read where it stands from 512 KiB, with two ranks from 2 MiB.
BROADCAST = (131_071, 131_072, 524_287, 524_288)
ODD_NBYTES = (55, 56, 57, 8191, 65_535, 65_537, 1_048_577)

SYMMETRIC = ("symmetric", "symmetric_in_place", "symmetric_input", "mixed")
MEMORY = ("plain", "out", "in_place", "gaps", *SYMMETRIC)


def _in_memory(group: Group, *kinds: str) -> list[str]:
    """Return these kinds of memory, without those that are no different from others here."""
    return [kind for kind in kinds if has_own_memory(group) or kind not in SYMMETRIC]


class Placed:
    """The arrays of one call, placed in a kind of memory, with fences around the output."""

    _FENCE = 64

    def __init__(self, kind: str, op: str, group: Group, values: Array, root: int) -> None:
        self._is_symmetric = kind.startswith("symmetric") or (
            kind == "mixed" and group.rank % 2 == 0
        )
        self._group = group
        self._fenced: Array = None
        shape = shape_of_result(op, values.shape, group.world_size)
        has_out = op not in ("reduce", "gather") or group.rank == root
        self.is_in_place = kind.endswith("in_place")
        if self.is_in_place and has_out:
            self.x, self.out = self._overlaid(op, values, shape, root)
        else:
            self.x, self.out = self._copy(values, kind), None
            if has_out and kind in ("out", "symmetric", "mixed"):
                self.out = self._fenced_array(shape, values.dtype)

    def _empty(self, shape: tuple[int, ...], dtype: Any) -> Array:
        return fd.empty(shape, dtype, self._group) if self._is_symmetric else np.empty(shape, dtype)

    def _copy(self, values: Array, kind: str) -> Array:
        if kind == "gaps" and values.ndim:
            x = np.empty((*values.shape, 2), values.dtype)[..., 0]
        else:
            x = self._empty(values.shape, values.dtype)
        x[...] = values
        return x

    def _fenced_array(self, shape: tuple[int, ...], dtype: Any) -> Array:
        nbytes = int(np.prod(shape)) * dtype.itemsize
        self._fenced = self._empty((nbytes + 2 * self._FENCE,), np.dtype(np.uint8))
        self._fenced[:] = 0xA5
        return self._fenced[self._FENCE :][:nbytes].view(dtype).reshape(shape)

    def _overlaid(self, op: str, values: Array, shape: tuple[int, ...], root: int) -> Any:
        """Return x and out in one memory: the same, or one the own chunk of the other."""
        rank, size = self._group.rank, self._group.world_size
        if op in ("all_gather", "gather"):
            out = self._empty(shape, values.dtype)
            x = out[rank * (len(out) // size) :][: len(out) // size].reshape(values.shape)
            x[...] = values
            return x, out
        x = self._copy(values, "plain")
        if op == "reduce_scatter" or (op == "scatter" and rank == root):
            return x, x[rank * (len(x) // size) :][: len(x) // size]
        if op == "scatter":
            return x, self._empty(shape, values.dtype)
        return x, x

    def check_fences(self) -> None:
        if self._fenced is not None:
            fence = self._FENCE
            assert (self._fenced[:fence] == 0xA5).all(), "bytes before the output were written"
            assert (self._fenced[-fence:] == 0xA5).all(), "bytes behind the output were written"


def _check(
    kind: str,
    op: str,
    group: Group,
    arrays: list[Array],
    wanted: Array,
    *,
    reduce_op: ReduceOp = SUM,
    root: int = 0,
) -> Array:
    """Call a collective on arrays in a kind of memory and compare all that it did."""
    values = arrays[group.rank]
    placed = Placed(kind, op, group, values, root)
    y = call(op, group, placed.x, reduce_op=reduce_op, root=root, out=placed.out)
    if wanted is None:
        assert y is None
    else:
        assert placed.out is None or y is placed.out
        assert type(y) is np.ndarray
        assert (y.dtype, y.shape) == (wanted.dtype, wanted.shape)
        assert_equal(y, wanted)
    placed.check_fences()
    if not placed.is_in_place:
        assert_equal(placed.x, values)
    return y


# What is computed and moved


@case(each=COLLECTIVES)
def equals_numpy_for_every_dtype(group: Group, op: str) -> None:
    root = group.world_size - 1
    for name in DTYPES:
        for reduce_op in ReduceOp if op in REDUCING else (SUM,):
            if op in REDUCING and not reduces(group, name, reduce_op):
                continue
            arrays = inputs(op, group, (5, 3), name)
            wanted = expected(op, arrays, group.rank, reduce_op=reduce_op, root=root)
            for kind in _in_memory(group, *MEMORY):
                _check(kind, op, group, arrays, wanted, reduce_op=reduce_op, root=root)


@case(each=REDUCING)
def equals_numpy_for_every_dtype_in_bulk(group: Group, op: str) -> None:
    for name in DTYPES:
        for reduce_op in ReduceOp:
            if reduces(group, name, reduce_op):
                arrays = inputs(op, group, (20_011,), name)
                wanted = expected(op, arrays, group.rank, reduce_op=reduce_op)
                for kind in _in_memory(group, "plain", "symmetric"):
                    _check(kind, op, group, arrays, wanted, reduce_op=reduce_op)


@case(each=COLLECTIVES)
def equals_numpy_for_every_shape(group: Group, op: str) -> None:
    for shape in SHAPES:
        arrays = inputs(op, group, shape, "int32")
        wanted = expected(op, arrays, group.rank)
        for kind in _in_memory(group, *MEMORY):
            _check(kind, op, group, arrays, wanted)


@case(each=COLLECTIVES)
def equals_numpy_for_every_size_and_memory(group: Group, op: str) -> None:
    root = group.world_size // 2
    for count in COUNTS:
        arrays = inputs(op, group, (count,), "float32")
        wanted = expected(op, arrays, group.rank, root=root)
        for kind in _in_memory(group, *MEMORY):
            _check(kind, op, group, arrays, wanted, root=root)


@case(each=COLLECTIVES)
def equals_numpy_beyond_every_window(group: Group, op: str) -> None:
    arrays = inputs(op, group, (MANY,), "float32")
    wanted = expected(op, arrays, group.rank)
    for kind in _in_memory(group, "plain", "in_place", "symmetric", "mixed"):
        _check(kind, op, group, arrays, wanted)


@case()
def broadcast_equals_numpy_where_its_way_changes(group: Group) -> None:
    root = group.world_size - 1
    for count in BROADCAST:
        arrays = inputs("broadcast", group, (count,), "float32")
        wanted = expected("broadcast", arrays, group.rank, root=root)
        for kind in _in_memory(group, "plain", *SYMMETRIC):
            _check(kind, "broadcast", group, arrays, wanted, root=root)


@case(each=COLLECTIVES)
def equals_numpy_for_odd_numbers_of_bytes(group: Group, op: str) -> None:
    for count in ODD_NBYTES:
        arrays = inputs(op, group, (count,), "uint8")
        wanted = expected(op, arrays, group.rank)
        for kind in _in_memory(group, "plain", "symmetric", "in_place"):
            _check(kind, op, group, arrays, wanted)


@case(each=ROOTED)
def works_with_every_root(group: Group, op: str) -> None:
    for root in range(group.world_size):
        for count in (3, 30_000):
            arrays = inputs(op, group, (count,), "int64")
            _check(
                "plain", op, group, arrays, expected(op, arrays, group.rank, root=root), root=root
            )
            _check("out", op, group, arrays, expected(op, arrays, group.rank, root=root), root=root)


@case()
def roots_and_peers_may_be_numpy_integers(group: Group) -> None:
    y = fd.broadcast(np.array([group.rank]), group, np.int64(group.world_size - 1))
    assert y[0] == group.world_size - 1


@case()
def reductions_have_names(group: Group) -> None:
    x = np.array([2.0, group.rank])
    size = group.world_size
    wanted = {
        "sum": [2 * size, sum(range(size))],
        "mean": [2, sum(range(size)) / size],
        "prod": [2**size, 0],
        "min": [2, 0],
        "max": [2, size - 1],
    }
    for name, values in wanted.items():
        assert_array_equal(fd.allreduce(x, group, name), values)


@case(each=("sum", "prod"))
def of_integers_wraps_around(group: Group, reduce_op: str) -> None:
    for name in INTEGERS:
        if not reduces(group, name, reduce_op_of(reduce_op)):
            continue
        limits = np.iinfo(name)
        for repeats in (1, 100):  # elements that are alone, and those of whole vectors
            arrays = [
                np.tile(np.array([limits.max, limits.min, limits.max - rank, 3], name), repeats)
                for rank in range(group.world_size)
            ]
            y = fd.allreduce(arrays[group.rank], group, reduce_op)
            assert_array_equal(y, reduced(arrays, reduce_op_of(reduce_op)))


@case(each=("min", "max"))
def of_special_values_equals_numpy(group: Group, reduce_op: str) -> None:
    special = np.array([0.0, -0.0, 1.0, np.inf, -np.inf, np.nan])
    rows = [np.roll(np.repeat(special, 6), 7 * rank) for rank in range(group.world_size)]
    for name in FLOATS:
        for repeats in (1, 400):
            arrays = [np.tile(row, repeats).astype(dtype_of(name)) for row in rows]
            y = fd.allreduce(arrays[group.rank], group, reduce_op)
            wanted = reduced(arrays, reduce_op_of(reduce_op))
            assert_array_equal(y.astype(np.float64), wanted.astype(np.float64))
            assert_same_bits(group, y)


@case()
def means_of_complex_numbers_are_those_of_their_parts(group: Group) -> None:
    parts = np.array([np.inf, 1.0, -np.inf, 0.0, 5.0, -7.0, np.nan, 2.0])
    for name in COMPLEX:
        if not reduces(group, name, MEAN):
            continue
        x = parts.view("c16").astype(name)
        wanted = x.view(x.real.dtype) / group.world_size
        mine = x if group.rank == 0 else np.zeros_like(x)
        for y in (
            fd.allreduce(mine, group, MEAN),
            fd.reduce_scatter(np.tile(mine, group.world_size), group, MEAN),
        ):
            assert_array_equal(y.view(wanted.dtype), wanted)


@case()
def infinities_of_both_signs_add_up_to_nan(group: Group) -> None:
    for name in FLOATS:
        x = np.full(9, -np.inf if group.rank else np.inf).astype(dtype_of(name))
        y = fd.allreduce(x, group).astype(np.float64)
        assert np.isnan(y).all() if group.world_size > 1 else (y == np.inf).all()


@case(each=LOW_PRECISION)
def sums_are_rounded_once(group: Group, name: str) -> None:
    # Multiples of 1/16 below 16: of 8 bits, as bfloat16 has, with sums exact in float32
    # that 16 bits cannot hold.
    arrays = [
        (np.random.default_rng(rank).integers(-255, 256, 70_001) / 16).astype(dtype_of(name))
        for rank in range(group.world_size)
    ]
    for count in (7, 5000, 70_001):
        own = [array[:count] for array in arrays]
        for reduce_op in (SUM, MEAN):
            if reduces(group, name, reduce_op):
                y = fd.allreduce(own[group.rank], group, reduce_op)
                assert_array_equal(y, reduced(own, reduce_op))


@case()
def half_precision_keeps_small_addends(group: Group) -> None:
    # 256 + 1 is no bfloat16: rounding after every step would lose each of the ones.
    x = np.array([256.0 if group.rank == 0 else 1.0], ml_dtypes.bfloat16)
    total = np.float32(256 + group.world_size - 1)
    assert fd.allreduce(x, group)[0] == total.astype(ml_dtypes.bfloat16)


@case(each=("allreduce", "reduce", "reduce_scatter"))
def overflows_without_a_warning(group: Group, op: str) -> None:
    beyond = {"float16": 60_000, "float32": 3e38, "float64": 1.5e308, "complex64": np.inf - 1j}
    for name, value in beyond.items():
        x = np.full(group.world_size, value, name)
        for reduce_op in (SUM, MEAN):
            if group.world_size > 1 and reduces(group, name, reduce_op):
                with np.errstate(all="raise"):
                    y = call(op, group, x, reduce_op=reduce_op)
                if y is not None and reduce_op is SUM:
                    assert np.isinf(y).all()


@case(each=("sum", "mean", "prod"))
def has_the_same_bits_everywhere(group: Group, reduce_op: str) -> None:
    rng = np.random.default_rng(group.rank)
    results = []
    for name in (*FLOATS, "complex64", "complex128"):
        if not reduces(group, name, reduce_op_of(reduce_op)):
            continue
        for count in (1, 7, 4096, 20_003, 100_003):
            x = rng.standard_normal(count).astype(dtype_of(name))
            results.append(fd.allreduce(x, group, reduce_op))
    assert_same_bits(group, *results)


@case(each=("allreduce", "reduce", "reduce_scatter"))
def has_the_same_bits_whoever_comes_late(group: Group, op: str) -> None:
    for count in (5, 3000, 60_000, 300_000):
        x = np.random.default_rng(group.rank).standard_normal(count * group.world_size)
        x = x.astype(np.float32)
        first = call(op, group, x)
        for late in range(group.world_size):
            if group.rank == late:
                _compute_for(1e-3)
            again = call(op, group, x)
            assert (again is None) == (first is None)
            assert first is None or again.tobytes() == first.tobytes()


def _compute_for(seconds: float) -> None:
    """Be late, and busy: a rank that sleeps would be late in another way."""
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        pass


@case()
def sums_of_random_floats_are_close_to_numpys(group: Group) -> None:
    for name, rtol in (("float32", 1e-5), ("float64", 1e-13), ("complex64", 1e-5)):
        arrays = [
            np.random.default_rng(rank).uniform(1, 2, 100_003).astype(name)
            for rank in range(group.world_size)
        ]
        for reduce_op in (SUM, MEAN, PROD):
            if reduces(group, name, reduce_op):
                y = fd.allreduce(arrays[group.rank], group, reduce_op)
                np.testing.assert_allclose(y, reduced(arrays, reduce_op), rtol=rtol)


# Uneven chunks


def _uneven(group: Group, counts: Array, name: str) -> tuple[Array, Array]:
    """Return what this rank gives and gets where rank i sends ``counts[i, j]`` to rank j."""

    def chunk(src: int, dst: int) -> Array:
        return data(10 * src + dst, (int(counts[src, dst]),), name)

    ranks = range(group.world_size)
    x = np.concatenate([chunk(group.rank, peer) for peer in ranks])
    return x, np.concatenate([chunk(peer, group.rank) for peer in ranks])


@case()
def all_to_all_exchanges_uneven_chunks(group: Group) -> None:
    rank, size = group.rank, group.world_size
    ranks = np.arange(size)
    tables = [
        ranks[:, None] + ranks,  # zeros among them
        np.zeros((size, size), int),
        7 * ranks[:, None] + 2 * ranks + 1,
        np.where(ranks[:, None] == 0, 1000, 0) + 0 * ranks,  # rank 0 alone gives
        np.where(ranks == size - 1, 90_000, 1) + 0 * ranks[:, None],  # the last takes most
        50_000 * ranks[:, None] + ranks,
    ]
    for counts in tables:
        for name in ("int16", "complex128"):
            x, wanted = _uneven(group, counts, name)
            send, recv = counts[rank].tolist(), counts[:, rank].tolist()
            y = fd.all_to_all(x, group, send_counts=send, recv_counts=recv)
            assert_array_equal(y, wanted)
            out = fd.empty(wanted.shape, name, group)
            assert fd.all_to_all(x, group, out=out, send_counts=send, recv_counts=recv) is out
            assert_array_equal(out, wanted)
            work = fd.all_to_all(x, group, send_counts=send, recv_counts=recv, async_op=True)
            assert_array_equal(work.result(), wanted)


@case()
def uneven_chunks_keep_whole_rows(group: Group) -> None:
    size = group.world_size
    counts = [6] * size
    x = np.arange(6 * size).reshape(2 * size, 3)
    y = fd.all_to_all(x, group, send_counts=counts, recv_counts=tuple(counts))
    assert y.shape == (2 * size, 3)
    counts = [1] * size
    x = np.arange(size).reshape(1, size)
    assert fd.all_to_all(x, group, send_counts=counts, recv_counts=counts).shape == (1, size)
    # Also where there is no row to see one by: on all ranks but the first, then on all.
    for num_rows in (2, 0):
        given = num_rows if group.rank == 0 else 0
        y = fd.all_to_all(
            np.ones((given * size, 3)),
            group,
            send_counts=[3 * given] * size,
            recv_counts=[3 * num_rows] + [0] * (size - 1),
        )
        assert y.shape == (num_rows, 3)


# Where and when


@case()
def empty_knows_every_dtype(group: Group) -> None:
    for name in DTYPES:
        x = fd.empty((2, 3), name, group)
        assert (x.dtype, x.shape) == (dtype_of(name), (2, 3))
        assert x.flags.c_contiguous
        assert x.flags.writeable
    assert fd.empty(4, np.float32, group).shape == (4,)
    assert fd.empty((), "int8", group).shape == ()
    assert fd.empty((0, 3), "int8", group).size == 0
    assert fd.empty(np.int64(3), "int8", group).shape == (3,)


@case()
def arrays_from_empty_do_not_overlap(group: Group) -> None:
    arrays = [fd.empty(1000 * (1 + i % 3), "uint8", group) for i in range(30)]
    del arrays[::3]
    arrays += [fd.empty(700, "uint8", group) for _ in range(10)]
    for number, array in enumerate(arrays):
        array[:] = number
    for number, array in enumerate(arrays):
        assert (array == number).all()


@case()
def parts_of_symmetric_arrays_are_symmetric_too(group: Group) -> None:
    memory = fd.empty(3 * 50_000, "float32", group)
    for first in (0, 1, 50_001):
        x, out = memory[first:][:50_000], memory[first + 50_000 :][:49_999]
        x[:] = group.rank + 1
        fd.allreduce(x[:49_999], group, out=out)
        assert (out == sum(range(1, group.world_size + 1))).all()


@case()
def symmetric_arrays_may_lie_elsewhere_on_each_rank(group: Group) -> None:
    offset = 100 * group.rank
    x = fd.empty(200_000, "int32", group)[offset:][:150_000]
    x[:] = data(group.rank, (150_000,), "int32")
    for op in COLLECTIVES:
        own = x[: 150_000 // group.world_size * group.world_size]
        arrays = [data(rank, own.shape, "int32") for rank in range(group.world_size)]
        assert_array_equal(call(op, group, own), expected(op, arrays, group.rank))


@case()
def calls_follow_each_other_closely(group: Group) -> None:
    """A rank may be a call ahead of another, never two in the same memory."""
    x = np.zeros(3, np.int64)
    big = np.zeros(20_000, np.int64)
    for number in range(300):
        x[:] = number
        assert (fd.allreduce(x, group) == number * group.world_size).all()
        if number % 10 == 0:
            big[:] = number
            root = number // 10 % group.world_size
            assert (fd.broadcast(big + group.rank, group, root) == number + root).all()
            assert (fd.allreduce(big, group, out=big) == number * group.world_size).all()


@case(min_ranks=2)
def barrier_waits_for_the_last_rank(group: Group) -> None:
    # One clock for all: the ranks of this suite share a machine.
    for last in range(group.world_size):
        fd.barrier(group)
        if group.rank == last:
            _compute_for(5e-3)
        arrived = time.monotonic()
        assert fd.barrier(group) is None
        left = time.monotonic()
        times = fd.all_gather(np.array([[arrived, left]]), group)
        assert times[:, 1].min() >= times[last, 0]
