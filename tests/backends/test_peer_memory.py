"""Large arrays are read out of their ranks' memory where that is permitted, else staged."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import socket
from collections.abc import Callable
from functools import partial

import numpy as np
import numpy.typing as npt
import pytest
from sandbox import READ_CALL, forbid, prctl, refuse

import ferro_dist as fd
from ferro_dist.testing import run_ranks

Integers = npt.NDArray[np.int64]

COUNT = 1 << 17  # elements a rank gives to each other one: enough to be read in place
REDUCED_COUNT = (1 << 18) + 1000  # of an array that is reduced, the same
WHOLE_COUNT = (1 << 15) + 1000  # the same with two ranks: each of them reads all of it
PULLED = ("broadcast", "all_gather", "all_to_all", "allreduce", "reduce_scatter")
PR_SET_DUMPABLE = 4
PR_SET_PTRACER, PR_SET_PTRACER_ANY = 0x59616D61, ctypes.c_ulong(-1)

# What each rank has mapped ahead of its group: see `join`.
_mapped: list[mmap.mmap] = []


def join(rank: int, world_size: int, addr: str, peer_reads: str) -> fd.HostBackend:
    # Forked alike, ranks would map the segment at one address: a read of a peer's memory in place
    # of one's own would get the right bytes.
    _mapped.append(mmap.mmap(-1, (rank + 1) << 23))
    os.environ["FERRO_DIST_PEER_READS"] = peer_reads
    with contextlib.suppress(OSError):  # where the kernel has no Yama, it needs no permission
        prctl(PR_SET_PTRACER, PR_SET_PTRACER_ANY, 0, 0, 0)
    return fd.HostBackend(rank, world_size, addr, timeout=60.0)


def refuse_reads() -> None:
    """Let process_vm_readv of other processes fail on this thread, as in many containers."""
    refuse(READ_CALL, unless_about=os.getpid())


def values(rank: int, count: int = COUNT) -> Integers:
    x: Integers = np.arange(count, dtype=np.int64) * 7 + 1000003 * rank
    return x


def move(backend: fd.Backend, is_symmetric: bool = False) -> None:
    """Call every collective, and check what came."""
    rank, ranks = backend.rank, range(backend.world_size)

    def own(x: Integers) -> Integers:
        if not is_symmetric:
            return x
        y: Integers = fd.empty(x.shape, x.dtype, backend)
        y[...] = x
        return y

    everybodys = np.stack([values(peer) for peer in ranks])
    np.testing.assert_array_equal(fd.all_gather(own(values(rank)), backend), everybodys.ravel())
    short = fd.all_gather(values(rank, 10), backend)  # staged, behind one that was not
    np.testing.assert_array_equal(short, everybodys[:, :10].ravel())
    x = own(values(rank, COUNT * backend.world_size))
    chunk = slice(rank * COUNT, (rank + 1) * COUNT)
    exchanged = np.concatenate([values(peer, x.size)[chunk] for peer in ranks])
    np.testing.assert_array_equal(fd.all_to_all(x, backend), exchanged)
    fd.all_to_all(x, backend, out=x)
    np.testing.assert_array_equal(x, exchanged)
    for count in WHOLE_COUNT, REDUCED_COUNT:
        reduce(backend, own, count)
    np.testing.assert_array_equal(pass_on(own(values(rank)), backend), values(ranks[rank - 1]))
    for root in ranks:
        got = fd.broadcast(own(values(rank)), backend, root)
        np.testing.assert_array_equal(got, values(root))
        x = own(values(rank))
        fd.broadcast(x, backend, root, out=x)
        np.testing.assert_array_equal(x, values(root))
        gathered = fd.gather(own(values(rank)), backend, root)
        if rank == root:
            np.testing.assert_array_equal(gathered, everybodys.ravel())
        whole = own(values(root, COUNT * backend.world_size))
        out = np.empty(COUNT, np.int64)
        fd.scatter(whole if rank == root else None, backend, root, out=out)
        np.testing.assert_array_equal(out, values(root, whole.size)[chunk])


def pass_on(x: Integers, backend: fd.Backend) -> Integers:
    """Send `x` to the next rank and return what the one before has sent."""
    before, after = ((backend.rank + step) % backend.world_size for step in (-1, 1))
    received: Integers = fd.sendrecv(x, np.empty_like(x), backend, after, before)
    return received


def reduce(backend: fd.Backend, own: Callable[[Integers], Integers], count: int) -> None:
    """Call what every rank gives to and takes from, in place and not, and check the sums."""
    rank, ranks = backend.rank, range(backend.world_size)
    x = values(rank, count)
    total = np.sum([values(peer, count) for peer in ranks], axis=0)
    np.testing.assert_array_equal(fd.allreduce(own(x), backend), total)
    out = x if rank == 0 else np.empty_like(x)  # in place on one rank, not on others
    fd.allreduce(x, backend, out=out)
    np.testing.assert_array_equal(out, total)
    x = own(values(rank, count * backend.world_size))
    chunk = slice(rank * count, (rank + 1) * count)
    total = np.sum([values(peer, x.size) for peer in ranks], axis=0)[chunk]
    np.testing.assert_array_equal(fd.reduce_scatter(x, backend), total)
    fd.reduce_scatter(x, backend, out=x[chunk])
    np.testing.assert_array_equal(x[chunk], total)


def move_repeatedly(rank: int, world_size: int, addr: str, peer_reads: str) -> None:
    with join(rank, world_size, addr, peer_reads) as backend:
        for turn in range(4):
            # Also where some ranks' arrays are symmetric and others' are not.
            move(backend, is_symmetric=turn == 3 and rank == 1)


@pytest.mark.parametrize("peer_reads", ["automatic", "always", "never"])
@pytest.mark.parametrize("world_size", [2, 3])
def test_arrays_arrive_however_they_are_moved(world_size: int, peer_reads: str) -> None:
    run_ranks(world_size, partial(move_repeatedly, peer_reads=peer_reads), backend="none")


def broadcast_from_symmetric_memory(rank: int, world_size: int, addr: str) -> None:
    with join(rank, world_size, addr, "always") as backend:
        for _ in range(2):  # from the second one on, they are pulled
            np.testing.assert_array_equal(fd.broadcast(values(rank, COUNT), backend), values(0))
        forbid(READ_CALL, unless_about=os.getpid())
        for count in (COUNT >> 3, COUNT >> 1, COUNT, COUNT << 1):
            x = fd.empty(count, "int64", backend)
            for turn in range(2):
                x[...] = values(rank + turn, count)
                got = fd.broadcast(x, backend)
                np.testing.assert_array_equal(got, values(turn, count))


# Staged or read where it is mapped, a copy of it needs no system call.
@pytest.mark.parametrize("world_size", [2, 3])
def test_symmetric_memory_is_never_pulled(world_size: int) -> None:
    run_ranks(world_size, broadcast_from_symmetric_memory, backend="none")


def move_where_one_says_never(rank: int, world_size: int, addr: str) -> None:
    move_repeatedly(rank, world_size, addr, "never" if rank == 1 else "always")


def move_after_a_refusal(rank: int, world_size: int, addr: str) -> None:
    if rank == 1:
        refuse_reads()
    move_repeatedly(rank, world_size, addr, "always")


def sums_of_floats(rank: int, world_size: int, addr: str) -> list[bytes]:
    rng = np.random.default_rng(rank)
    found = []
    for dtype in ("float32", "float16", "complex64"):
        x = rng.normal(size=2 * REDUCED_COUNT).astype(dtype)
        for peer_reads in ("always", "never"):
            with join(rank, world_size, f"{addr}.{dtype}.{peer_reads}", peer_reads) as backend:
                for _ in range(2):
                    total = fd.allreduce(x, backend, "mean")
                found.append(total.tobytes())
    return found


@pytest.mark.parametrize("world_size", [2, 3])
def test_the_bits_of_a_sum_do_not_depend_on_how_arrays_are_moved(world_size: int) -> None:
    results = run_ranks(world_size, sums_of_floats, backend="none")
    assert all(result == results[0] for result in results)
    assert results[0][0::2] == results[0][1::2]


needs_seccomp = pytest.mark.skipif(READ_CALL is None, reason="no number of the call is known here")


@needs_seccomp
def test_arrays_are_staged_where_one_rank_may_not_read() -> None:
    run_ranks(3, move_after_a_refusal, backend="none")


def test_one_rank_that_reads_nobody_is_enough() -> None:
    run_ranks(3, move_where_one_says_never, backend="none")


def receive_after_small_sums(rank: int, world_size: int, addr: str) -> None:
    def sum_twice() -> None:  # leaves them in both headers of each rank
        for _ in range(2):
            fd.allreduce(np.ones(56, np.uint8), backend)

    with join(rank, world_size, addr, "never" if rank == 1 else "always") as backend:
        whole, out = values(0, COUNT * world_size), np.empty(COUNT, np.int64)
        for _ in range(2):  # in the first, ranks find out whom they can read
            sum_twice()
            np.testing.assert_array_equal(fd.broadcast(values(rank), backend), values(0))
            sum_twice()
            fd.scatter(whole if rank == 0 else None, backend, out=out)
            np.testing.assert_array_equal(out, whole[rank * COUNT : (rank + 1) * COUNT])


@pytest.mark.parametrize("world_size", [2, 3])
def test_a_receiver_that_reads_nobody_says_so(world_size: int) -> None:
    run_ranks(world_size, receive_after_small_sums, backend="none")


def call_after_a_late_refusal(
    rank: int, world_size: int, addr: str, collective: str, is_lender_private: bool
) -> str:
    with join(rank, world_size, addr, "always") as backend:
        call = getattr(fd, collective)
        x = values(rank, 2 * REDUCED_COUNT)
        for _ in range(2):
            before = call(x, backend)
        if rank == 0 and is_lender_private:
            prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)
        if rank == 1:
            refuse_reads()
        try:
            got = call(x, backend)
        except fd.errors.DistributedError as error:
            return str(error)
        np.testing.assert_array_equal(got, before)
        return "arrived"


@needs_seccomp
@pytest.mark.parametrize("collective", ["allreduce", "reduce_scatter"])
def test_a_reduction_whose_inputs_cannot_be_read_ends_the_group(collective: str) -> None:
    body = partial(call_after_a_late_refusal, collective=collective, is_lender_private=False)
    lender, reader = run_ranks(2, body, backend="none")
    assert "cannot read the array of rank 0: Operation not permitted" in reader
    assert "Reported by rank 1" in lender


def move_after_a_late_refusal(rank: int, world_size: int, addr: str) -> None:
    with join(rank, world_size, addr, "always") as backend:
        x = values(rank, COUNT * world_size)
        everybodys = np.stack([values(peer, x.size) for peer in range(world_size)])
        for turn in range(6):
            if turn == 3 and rank == world_size - 1:
                refuse_reads()
            np.testing.assert_array_equal(fd.all_gather(x, backend), everybodys.ravel())
            own = everybodys.reshape(world_size, world_size, COUNT)[:, rank]
            np.testing.assert_array_equal(fd.all_to_all(x, backend), own.ravel())
            for root in range(world_size):
                np.testing.assert_array_equal(fd.broadcast(x, backend, root), everybodys[root])
                part = fd.scatter(
                    x if rank == root else None, backend, root, out=np.empty(COUNT, np.int64)
                )
                np.testing.assert_array_equal(part, everybodys[root, rank * COUNT :][:COUNT])
        # Reductions cannot be repeated. By now the rank offers to read no more.
        move(backend)
        move(backend)


@needs_seccomp
@pytest.mark.parametrize("world_size", [2, 3])
def test_what_cannot_be_read_is_staged_instead(world_size: int) -> None:
    run_ranks(world_size, move_after_a_late_refusal, backend="none")


@needs_seccomp
@pytest.mark.parametrize("collective", PULLED)
def test_who_gives_up_privileges_lends_nothing_more(collective: str) -> None:
    body = partial(call_after_a_late_refusal, collective=collective, is_lender_private=True)
    told = run_ranks(2, body, backend="none")
    assert told == ["arrived", "arrived"]


def pass_on_after_a_late_refusal(rank: int, world_size: int, addr: str) -> None:
    with join(rank, world_size, addr, "always") as backend:
        for is_refused in (False, True):
            if is_refused and rank == 1:
                refuse_reads()
            for turn in range(3):
                x = values(rank, 4 * COUNT) + turn
                expected = values(1 - rank, 4 * COUNT) + turn
                np.testing.assert_array_equal(pass_on(x, backend), expected)


@needs_seccomp
def test_a_message_that_cannot_be_read_arrives_all_the_same() -> None:
    run_ranks(2, pass_on_after_a_late_refusal, backend="none")


def make_group_with(rank: int, world_size: int, addr: str) -> None:
    with pytest.raises(ValueError, match="FERRO_DIST_PEER_READS"):
        join(rank, world_size, addr, "sometimes")
    listener = socket.create_server(("127.0.0.1", 0))
    with pytest.raises(ValueError, match="FERRO_DIST_PEER_READS"):
        fd.HostBackend(0, 2, None, listener=listener)
    assert listener.fileno() < 0  # whoever is given it closes it


def test_an_unknown_setting_is_refused() -> None:
    run_ranks(1, make_group_with, backend="none")
