"""What the ranks of `test_mpi.py` do; run as a program under an MPI launcher.

Rank 0 reads names of functions from its standard input. All ranks run each, and rank 0
answers with one line of JSON: for every rank its traceback, or null.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
from mpi4py import MPI
from numpy.testing import assert_array_equal

from ferro_dist.backends import mpi_memory
from ferro_dist.backends.base import P2POp
from ferro_dist.backends.mpi import MpiBackend
from ferro_dist.errors import (
    ChannelClosed,
    CollectiveMismatch,
    InvalidArray,
    InvalidRank,
    LockPoisoned,
    SelfSend,
    SizeMismatch,
    Timeout,
    UnsupportedOp,
)
from ferro_dist.reduce_op import ReduceOp
from ferro_dist.work import Work

Array = Any
Group = Any  # an MpiBackend; that a result is no Work is known from the arguments
Body = Callable[[Group], None]

SUM, MEAN, PROD, MIN, MAX = ReduceOp
NOW: tuple[bool, None, int] = (False, None, 0)
"""Synchronous, with the backend's timeout and no tag."""
LATER: tuple[bool, None, int] = (True, None, 0)

INTEGERS = ["int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64"]
FLOATS = ["float16", "bfloat16", "float32", "float64"]
COMPLEX = ["complex64", "complex128"]
MOVED_ONLY = ["float8_e4m3fn", "float8_e5m2"]
SHAPES: list[tuple[int, ...]] = [(), (0,), (1,), (5,), (3, 4), (1000,)]


def dtype_of(name: str) -> np.dtype[Any]:
    return np.dtype(getattr(ml_dtypes, name, None) or name)


def data(rank: int, shape: tuple[int, ...], name: str) -> Array:
    """Small numbers: every sum and product of four of them is exact in every dtype."""
    count = int(np.prod(shape))
    values = (np.arange(count) + rank) % 3 + (0 if name == "bool" else 1)
    if name in COMPLEX:
        return (values + 1j * ((values + rank) % 2)).astype(name).reshape(shape)
    return values.astype(dtype_of(name)).reshape(shape)


def all_data(backend: Group, shape: tuple[int, ...], name: str) -> list[Array]:
    return [data(rank, shape, name) for rank in range(backend.world_size)]


def expected_reduction(arrays: list[Array], op: ReduceOp) -> Array:
    wide = np.array([x.astype("complex128" if x.dtype.kind == "c" else "float64") for x in arrays])
    functions: dict[ReduceOp, Any] = {SUM: np.sum, MEAN: np.mean, PROD: np.prod}
    result = {**functions, MIN: np.min, MAX: np.max}[op](wide, axis=0)
    return np.asarray(result).astype(arrays[0].dtype)


def assert_same_bits(backend: Group, x: Array) -> None:
    for other in MPI.COMM_WORLD.allgather(x.tobytes()):
        assert other == x.tobytes(), "ranks differ"


def supported() -> list[tuple[str, ReduceOp]]:
    found = [(name, op) for name in INTEGERS for op in (SUM, PROD, MIN, MAX)]
    found += [(name, op) for name in FLOATS for op in ReduceOp]
    found += [(name, op) for name in COMPLEX for op in (SUM, MEAN, PROD)]
    return [*found, ("bool", MIN), ("bool", MAX)]


# Results


def allreduce_equals_numpy(backend: Group) -> None:
    results = []
    for name, op in supported():
        for shape in SHAPES:
            x = data(backend.rank, shape, name)
            before = x.copy()
            y = backend.allreduce(x, None, op, *NOW)
            results.append(y.tobytes())
            assert_array_equal(y, expected_reduction(all_data(backend, shape, name), op))
            assert y.dtype == x.dtype
            assert y.shape == shape
            assert_array_equal(x, before)
    assert_same_bits(backend, np.frombuffer(b"".join(results), np.uint8))


def allreduce_works_in_place(backend: Group) -> None:
    for name in ("float32", "bfloat16", "int64"):
        x = data(backend.rank, (100,), name)
        assert backend.allreduce(x, x, SUM, *NOW) is x
        assert_array_equal(x, expected_reduction(all_data(backend, (100,), name), SUM))


def allreduce_of_special_values_is_the_same_on_all_ranks(backend: Group) -> None:
    special = np.array([0.0, -0.0, 1.0, np.inf, -np.inf, np.nan], np.float64)
    table = np.stack([np.roll(np.repeat(special, 6), 7 * rank) for rank in range(6)])
    for name in FLOATS:
        rows = table[: backend.world_size].astype(dtype_of(name))
        for op in (MIN, MAX):
            y = backend.allreduce(rows[backend.rank].copy(), None, op, *NOW)
            ufunc = np.minimum if op is MIN else np.maximum
            assert_array_equal(y.astype("f8"), ufunc.reduce(rows.astype("f8"), axis=0))
            assert_same_bits(backend, y)


def half_precision_rounds_once(backend: Group) -> None:
    # 256 + 1 is no bfloat16: rounding after every step would lose each of the ones.
    x = np.array([256.0 if backend.rank == 0 else 1.0], ml_dtypes.bfloat16)
    y = backend.allreduce(x, None, SUM, *NOW)
    total = np.float32(256 + backend.world_size - 1)
    assert y[0] == total.astype(ml_dtypes.bfloat16)


def random_floats_have_the_same_bits_everywhere(backend: Group) -> None:
    rng = np.random.default_rng(backend.rank)
    for dtype in ("float32", "float64", "complex64"):
        for count in (1, 7, 4096, 100_003):
            x = rng.standard_normal(2 * count).astype("f8").view("c16").astype(dtype)
            for op in (SUM, MEAN, PROD):
                assert_same_bits(backend, backend.allreduce(x, None, op, *NOW))


def reduce_gives_the_root_alone_a_result(backend: Group) -> None:
    for root in range(backend.world_size):
        for name in ("float32", "bfloat16", "int32"):
            x = data(backend.rank, (5,), name)
            y = backend.reduce(x, None, SUM, root, *NOW)
            if backend.rank == root:
                assert_array_equal(y, expected_reduction(all_data(backend, (5,), name), SUM))
            else:
                assert y is None
            assert_array_equal(x, data(backend.rank, (5,), name))


def broadcast_copies_the_roots_array(backend: Group) -> None:
    for name in [*INTEGERS, *FLOATS, *COMPLEX, *MOVED_ONLY, "bool"]:
        for root in range(backend.world_size):
            y = backend.broadcast(data(backend.rank, (3, 4), name), None, root, *NOW)
            assert_array_equal(y, data(root, (3, 4), name))


def all_gather_concatenates_in_rank_order(backend: Group) -> None:
    for shape in SHAPES:
        y = backend.all_gather(data(backend.rank, shape, "int32"), None, *NOW)
        blocks = [np.atleast_1d(x) for x in all_data(backend, shape, "int32")]
        assert_array_equal(y, np.concatenate(blocks))


def all_gather_takes_its_input_from_within_out(backend: Group) -> None:
    out = np.zeros(3 * backend.world_size, np.int32)
    own = out[3 * backend.rank :][:3]
    own[:] = backend.rank
    backend.all_gather(own, out, *NOW)
    assert_array_equal(out, np.repeat(np.arange(backend.world_size), 3))


def reduce_scatter_leaves_each_rank_its_chunk(backend: Group) -> None:
    for name, op in supported():
        shape = (2 * backend.world_size, 3)
        y = backend.reduce_scatter(data(backend.rank, shape, name), None, op, *NOW)
        whole = expected_reduction(all_data(backend, shape, name), op)
        assert_array_equal(y, whole[2 * backend.rank :][:2])


def all_to_all_exchanges_even_chunks(backend: Group) -> None:
    size = backend.world_size
    x = (np.arange(size * 2) + 100 * backend.rank).reshape(size, 2)
    y = backend.all_to_all(x, None, None, None, *NOW)
    own = 2 * backend.rank
    assert_array_equal(y, [[100 * peer + own, 100 * peer + own + 1] for peer in range(size)])


def all_to_all_exchanges_uneven_chunks(backend: Group) -> None:
    rank, size = backend.rank, backend.world_size
    # Rank r sends r + j elements to rank j: zeros are among them.
    send = [rank + peer for peer in range(size)]
    x = np.concatenate([np.full(count, 10 * rank + peer) for peer, count in enumerate(send)])
    y = backend.all_to_all(x, None, send, send, *NOW)
    assert_array_equal(
        y, np.concatenate([np.full(rank + peer, 10 * peer + rank) for peer in range(size)])
    )


def uneven_chunks_keep_whole_rows(backend: Group) -> None:
    size = backend.world_size
    counts = [6] * size
    x = np.arange(6 * size).reshape(2 * size, 3)
    assert backend.all_to_all(x, None, counts, counts, *NOW).shape == (2 * size, 3)
    counts = [2] * size
    x = np.arange(2 * size).reshape(1, 2 * size)
    broken = counts if size > 1 else [2]
    assert backend.all_to_all(x, None, broken, broken, *NOW).shape == (1, 2 * size)


def gather_collects_on_the_root(backend: Group) -> None:
    for root in range(backend.world_size):
        y = backend.gather(data(backend.rank, (2, 3), "float32"), None, root, *NOW)
        if backend.rank == root:
            assert_array_equal(y, np.concatenate(all_data(backend, (2, 3), "float32")))
        else:
            assert y is None


def scatter_deals_out_the_roots_chunks(backend: Group) -> None:
    for root in range(backend.world_size):
        whole = np.arange(backend.world_size * 4).reshape(-1, 2) + root
        out = np.empty((2, 2), whole.dtype)
        x = whole if backend.rank == root else None
        assert backend.scatter(x, out, root, *NOW) is out
        assert_array_equal(out, whole[2 * backend.rank :][:2])
        # The root knows the shape and may leave out away.
        chunk = backend.scatter(x, None if backend.rank == root else out, root, *NOW)
        assert_array_equal(chunk, whole[2 * backend.rank :][:2])


def barrier_waits_for_the_last_rank(backend: Group) -> None:
    backend.barrier(*NOW)
    last = backend.world_size - 1
    if backend.rank == last:
        time.sleep(0.05)
    arrived = time.monotonic()
    backend.barrier(*NOW)
    left = time.monotonic()
    times = MPI.COMM_WORLD.allgather((arrived, left))
    assert min(left for _, left in times) >= times[last][0]


def large_arrays_go_in_pieces(backend: Group) -> None:
    """With a small limit in place of 2^31: the path is the same."""
    rank, size = backend.rank, backend.world_size
    limit, mpi_memory.MAX_COUNT = mpi_memory.MAX_COUNT, 1000
    try:
        x = data(rank, (size * 1001,), "float32")
        every = all_data(backend, x.shape, "float32")
        total = expected_reduction(every, SUM)
        assert_array_equal(backend.allreduce(x, None, SUM, *NOW), total)
        own = slice(rank * 1001, (rank + 1) * 1001)
        assert_array_equal(backend.reduce_scatter(x, None, SUM, *NOW), total[own])
        assert_array_equal(backend.broadcast(x, None, size - 1, *NOW), every[-1])
        assert_array_equal(backend.all_gather(x, None, *NOW), np.concatenate(every))
        y = backend.all_to_all(x, None, None, None, *NOW)
        assert_array_equal(y, np.concatenate([z[own] for z in every]))
        counts = [1001] * size
        assert_array_equal(backend.all_to_all(x, None, counts, counts, *NOW), y)
        y = backend.gather(x, None, 0, *NOW)
        out = np.empty_like(x)
        backend.scatter(y, out, 0, *NOW)
        assert_array_equal(out, x)
        pass_round_the_ring(backend, x)
    finally:
        mpi_memory.MAX_COUNT = limit


def blocks_beyond_one_unit_keep_their_order(backend: Group) -> None:
    limit, mpi_memory.MAX_COUNT = mpi_memory.MAX_COUNT, 1000
    try:
        x = np.arange(400_001, dtype=np.int64) + backend.rank  # 3 MiB and a bit
        y = backend.all_gather(x, None, *NOW)
        ranks = range(backend.world_size)
        assert_array_equal(y, np.concatenate([np.arange(400_001) + rank for rank in ranks]))
    finally:
        mpi_memory.MAX_COUNT = limit


# Messages


def pass_round_the_ring(backend: Group, x: Array) -> None:
    rank, size = backend.rank, backend.world_size
    out = np.empty_like(x)
    if size > 1:
        right, left = (rank + 1) % size, (rank - 1) % size
        backend.batch([P2POp(True, x, right), P2POp(False, out, left)], *NOW)
        assert_array_equal(out, data(left, x.shape, str(x.dtype)))


def a_batch_passes_a_ring(backend: Group) -> None:
    pass_round_the_ring(backend, data(backend.rank, (100_000,), "float32"))


def sendrecv_moves_both_ways_at_once(backend: Group) -> None:
    rank, size = backend.rank, backend.world_size
    x, out = np.full(500_000, rank), np.empty(500_000, np.int64)
    right, left = (rank + 1) % size, (rank - 1) % size
    assert backend.sendrecv(x, out, right, left, *NOW) is out
    assert (out == left).all()
    assert backend.sendrecv(x, out, left, right, *LATER).result() is out
    assert (out == right).all()


def messages_arrive_in_order(backend: Group) -> None:
    if backend.rank == 0:
        for number in range(20):
            backend.send(np.full(number, number), 1, *NOW)
    if backend.rank == 1:
        for number in range(20):
            out = np.empty(number, np.int64)
            assert backend.recv(out, 0, *NOW) is out
            assert (out == number).all()


def posted_receives_match_in_order(backend: Group) -> None:
    if backend.rank == 0:
        works = [backend.send(np.full(1 + n, n), 1, *LATER) for n in range(5)]
        for work in works:
            assert isinstance(work, Work)
            work.wait()
    if backend.rank == 1:
        outs = [np.empty(1 + n, np.int64) for n in range(5)]
        works = [backend.recv(out, 0, *LATER) for out in outs]
        for n in (4, 2, 0, 1, 3):
            assert works[n].result() is outs[n]
            assert (outs[n] == n).all()


def a_message_that_does_not_fit_is_dropped(backend: Group) -> None:
    if backend.rank == 0:
        backend.send(np.zeros(5), 1, *NOW)
        backend.send(np.zeros(3, np.int64), 1, *NOW)
        backend.send(np.ones(3), 1, False, None, 7)
        backend.send(np.ones(3), 1, *NOW)
    if backend.rank == 1:
        out = np.zeros(3)
        for words in ("5 float64", "3 int64", "different tags"):
            error = raised(SizeMismatch, backend.recv, out, 0, *NOW)
            assert words in str(error)
            assert error.peer == 0
            assert (out == 0).all()
        assert (backend.recv(out, 0, *NOW) == 1).all()
    backend.barrier(*NOW)


# Asynchrony


def async_collectives_run_in_order(backend: Group) -> None:
    arrays = [data(backend.rank, (count,), "float32") for count in (1, 1000, 100_000)]
    works = [backend.allreduce(x, None, SUM, *LATER) for x in arrays]
    barrier = backend.barrier(*LATER)
    assert isinstance(barrier, Work)
    barrier.wait()
    for x, work in zip(arrays, works, strict=True):
        assert work.is_completed()
        every = all_data(backend, x.shape, "float32")
        assert_array_equal(work.result(), expected_reduction(every, SUM))


def polling_completes_a_call(backend: Group) -> None:
    work = backend.broadcast(data(backend.rank, (9,), "int16"), None, 0, *LATER)
    deadline = time.monotonic() + 10
    while not work.is_completed():
        assert time.monotonic() < deadline
    assert_array_equal(work.result(), data(0, (9,), "int16"))


def two_groups_are_used_by_two_threads(backend: Group) -> None:
    other = MpiBackend(timeout=20)
    failures: list[BaseException] = []

    def use(group: Group) -> None:
        try:
            for number in range(50):
                y = group.allreduce(np.full(10, number), None, SUM, *NOW)
                assert (y == number * group.world_size).all()
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=use, args=(other,))
    thread.start()
    use(backend)
    thread.join(30)
    assert not thread.is_alive()
    assert not failures, failures
    other.close()


# Groups


def split_makes_a_group_in_the_given_order(backend: Group) -> None:
    members = list(range(backend.world_size))[::-2]
    group = backend.split(members)
    if backend.rank not in members:
        assert group is None
        return
    assert group is not None
    with group:
        assert (group.rank, group.world_size) == (members.index(backend.rank), len(members))
        y = group.all_gather(np.array([backend.rank]), None, *NOW)
        assert_array_equal(y, members)


def a_given_communicator_is_duplicated(backend: Group) -> None:
    comm = MPI.COMM_WORLD.Split(MPI.COMM_WORLD.rank % 2)
    group: Group
    with MpiBackend(comm) as group:
        assert group.world_size == comm.size
        y = group.allreduce(np.ones(1), None, SUM, *NOW)
        assert y[0] == comm.size
    comm.Barrier()
    comm.Free()


def a_closed_group_refuses_calls(backend: Group) -> None:
    group = MpiBackend()
    group.close()
    group.close()
    assert group.is_closed
    raised(ChannelClosed, group.allreduce, np.ones(1), None, SUM, *NOW)
    raised(ChannelClosed, group.barrier, *NOW)


def a_forked_child_is_refused(backend: Group) -> None:
    child = os.fork()
    if child == 0:
        try:
            backend.allreduce(np.ones(1), None, SUM, *NOW)
        except ChannelClosed as error:
            os._exit(0 if "forked" in str(error) else 2)
        except BaseException:
            os._exit(1)
        os._exit(3)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def empty_knows_every_dtype(backend: Group) -> None:
    for name in [*INTEGERS, *FLOATS, *COMPLEX, *MOVED_ONLY, "bool"]:
        assert backend.empty((2, 3), name).dtype == dtype_of(name)
    assert backend.empty(4, np.float32).shape == (4,)


# Other libraries


def torch_tensors_come_back_as_tensors(backend: Group) -> None:
    import torch

    for dtype in (torch.float32, torch.bfloat16, torch.int64):
        x = torch.arange(6).to(dtype).reshape(2, 3) + backend.rank
        y = backend.allreduce(x, None, SUM, *NOW)
        assert isinstance(y, torch.Tensor)
        assert (y.dtype, y.shape) == (dtype, x.shape)
        total = sum(torch.arange(6).reshape(2, 3) + rank for rank in range(backend.world_size))
        assert torch.equal(y, torch.as_tensor(total).to(dtype))
        assert backend.all_gather(x, None, *NOW).shape == (2 * backend.world_size, 3)


def jax_arrays_come_back_as_new_arrays(backend: Group) -> None:
    import jax.numpy as jnp

    x = jnp.arange(5, dtype=jnp.float32)
    y = backend.allreduce(x, None, SUM, *NOW)
    assert type(y) is type(x)
    assert_array_equal(y, np.arange(5) * backend.world_size)
    raised(InvalidArray, backend.allreduce, x, x, SUM, *NOW)


def gaps_in_the_input_are_copied(backend: Group) -> None:
    x = np.arange(12.0).reshape(3, 4).T[::2]
    y = backend.allreduce(x, None, SUM, *NOW)
    assert_array_equal(y, x * backend.world_size)


# What is refused


def raised(kind: type[Exception], function: Any, *args: Any) -> Any:
    try:
        function(*args)
    except kind as error:
        return error
    raise AssertionError(f"{kind.__name__} was not raised")


def bad_arguments_are_refused_before_anything_is_sent(backend: Group) -> None:
    x, size = np.ones(4, np.float32), backend.world_size
    frozen = np.ones(4, np.float32)
    frozen.flags.writeable = False
    raised(InvalidRank, backend.broadcast, x, None, size, *NOW)
    raised(InvalidRank, backend.reduce, x, None, SUM, -1, *NOW)
    raised(InvalidRank, backend.send, x, size, *NOW)
    raised(SelfSend, backend.send, x, backend.rank, *NOW)
    raised(SelfSend, backend.recv, x, backend.rank, *NOW)
    raised(InvalidRank, backend.split, [])
    raised(InvalidRank, backend.split, [0, 0])
    raised(InvalidRank, backend.split, [size])
    raised(SizeMismatch, backend.allreduce, x, np.empty(3, np.float32), SUM, *NOW)
    if size > 1:
        raised(SizeMismatch, backend.reduce_scatter, np.ones(2 * size + 1), None, SUM, *NOW)
    raised(SizeMismatch, backend.all_to_all, x, None, [1], None, *NOW)
    raised(SizeMismatch, backend.all_to_all, x, None, [9] * size, [9] * size, *NOW)
    raised(InvalidArray, backend.allreduce, x, np.empty(4, np.float64), SUM, *NOW)
    raised(InvalidArray, backend.allreduce, x, frozen, SUM, *NOW)
    raised(InvalidArray, backend.allreduce, x, np.empty(8, np.float32)[::2], SUM, *NOW)
    raised(InvalidArray, backend.allreduce, np.array([None]), None, SUM, *NOW)
    raised(InvalidArray, backend.allreduce, x.astype(">f4"), None, SUM, *NOW)
    raised(InvalidArray, backend.scatter, None, None, 0, *NOW)
    raised(ValueError, backend.barrier, False, 0.0, 0)
    assert backend.allreduce(np.ones(1), None, SUM, *NOW)[0] == size


def reductions_that_do_not_exist_are_refused(backend: Group) -> None:
    everything = [*INTEGERS, *FLOATS, *COMPLEX, *MOVED_ONLY, "bool"]
    for name in everything:
        for op in ReduceOp:
            if (name, op) not in supported():
                x = np.ones(1, dtype_of(name))
                error = raised(UnsupportedOp, backend.allreduce, x, None, op, *NOW)
                assert name in str(error)


def mismatches_name_both_sides_and_leave_the_group_usable(backend: Group) -> None:
    def odd() -> Any:
        return x.astype("f8") if backend.rank else x

    x, is_last = np.ones(4, np.float32), backend.rank == backend.world_size - 1
    before = x.copy()
    calls: list[tuple[str, Callable[[], Any]]] = [
        ("count", lambda: backend.allreduce(x[: 3 if is_last else 4], None, SUM, *NOW)),
        ("float64", lambda: backend.allreduce(odd(), None, SUM, *NOW)),
        ("max", lambda: backend.allreduce(x, x, MAX if is_last else SUM, *NOW)),
        ("root", lambda: backend.broadcast(x, x, 1 if is_last else 0, *NOW)),
        ("tag", lambda: backend.barrier(False, None, 5 if is_last else 6)),
        ("split", lambda: backend.split([0, 1] if is_last else [1, 0])),
        (
            "barrier",
            lambda: backend.barrier(*NOW) if is_last else backend.all_gather(x, None, *NOW),
        ),
    ]
    for word, call in calls:
        error = raised(CollectiveMismatch, call)
        assert "rank 0 called" in str(error)
        assert word in str(error), error
        texts = set(MPI.COMM_WORLD.allgather(str(error)))
        assert len(texts) == 1
    assert_array_equal(x, before)
    assert backend.allreduce(x, None, SUM, *NOW)[0] == backend.world_size


def uneven_counts_that_disagree_are_a_mismatch(backend: Group) -> None:
    rank, size = backend.rank, backend.world_size
    send = [1] * size
    recv = [1] * size
    if rank == 1:
        recv[0] = 3
    error = raised(CollectiveMismatch, backend.all_to_all, np.ones(size), None, send, recv, *NOW)
    assert "rank 0 sends 1 elements to rank 1, which expects 3" in str(error)
    backend.barrier(*NOW)


# Failures that end the group: each makes its own


def a_late_rank_is_named_by_the_timeout(backend: Group) -> None:
    group = MpiBackend()
    if backend.rank == 1:
        backend.barrier(*NOW)
        return
    started = time.monotonic()
    error = raised(Timeout, group.allreduce, np.ones(1), None, SUM, False, 0.3, 0)
    assert 0.3 <= time.monotonic() - started < 1.3
    assert error.missing == (1,)
    assert (error.op, error.rank, error.sequence) == ("allreduce", backend.rank, 0)
    poisoned = raised(LockPoisoned, group.barrier, *NOW)
    assert poisoned.__cause__ is error
    group.close()
    backend.barrier(*NOW)


def a_receive_times_out_and_names_its_peer(backend: Group) -> None:
    group = MpiBackend()
    if backend.rank == 0:
        error = raised(Timeout, group.recv, np.empty(1), 1, False, 0.2, 0)
        assert (error.missing, error.peer) == ((1,), 1)
        group.close()
    backend.barrier(*NOW)


def waiting_for_work_may_give_up_and_try_again(backend: Group) -> None:
    if backend.rank == 0:
        work = backend.recv(np.empty(1), 1, *LATER)
        error = raised(Timeout, work.wait, 0.05)
        assert "wait again" in str(error)
    backend.barrier(*NOW)
    if backend.rank == 1:
        backend.send(np.ones(1), 0, *NOW)
    if backend.rank == 0:
        assert work.result(10.0)[0] == 1


def control_c_ends_a_wait(backend: Group) -> None:
    group = MpiBackend()
    if backend.rank == 0:
        timer = threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT))
        timer.start()
        started = time.monotonic()
        try:
            group.barrier(*NOW)
        except KeyboardInterrupt:
            assert time.monotonic() - started < 1.0
        else:
            raise AssertionError("nobody else was there")
        raised(LockPoisoned, group.barrier, *NOW)
        timer.join()
        group.close()
    backend.barrier(*NOW)


def main() -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)  # MPI launchers may ignore it
    comm = MPI.COMM_WORLD
    while True:
        name = next_name(comm)
        if name == "exit":
            return
        outcomes = comm.gather(outcome_of(globals()[name]))
        if outcomes is not None:
            sys.stdout.write(json.dumps(outcomes) + "\n")
            sys.stdout.flush()


def next_name(comm: MPI.Intracomm) -> str:
    """Return what rank 0 is told to run, on all ranks."""
    words = np.zeros(100, np.uint8)
    if comm.rank == 0:
        name = sys.stdin.readline().strip().encode()
        words[: len(name)] = list(name)
    request = comm.Ibcast(words)
    while not request.Test():
        # A blocking call would spin, and jobs that have no test to run are many.
        time.sleep(0.002)
    return words.tobytes().rstrip(b"\0").decode()


def outcome_of(body: Body) -> str | None:
    try:
        with MpiBackend(timeout=20) as backend:
            body(backend)
    except BaseException:
        return traceback.format_exc()
    return None


if __name__ == "__main__":
    main()
