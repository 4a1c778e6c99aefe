"""Large arrays are read out of their ranks' memory where that is permitted, else staged."""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
import socket
from functools import partial

import numpy as np
import numpy.typing as npt
import pytest

import ferro_dist as fd
from ferro_dist.testing import run_ranks

Integers = npt.NDArray[np.int64]

COUNT = 1 << 17  # elements a rank gives to each other one: enough to be read in place
PR_SET_DUMPABLE, PR_SET_SECCOMP, PR_SET_NO_NEW_PRIVS = 4, 22, 38
PR_SET_PTRACER, PR_SET_PTRACER_ANY = 0x59616D61, ctypes.c_ulong(-1)
READ_CALL = {"x86_64": 310, "aarch64": 270}.get(platform.machine())


def join(rank: int, world_size: int, addr: str, peer_reads: str) -> fd.HostBackend:
    os.environ["FERRO_DIST_PEER_READS"] = peer_reads
    with contextlib.suppress(OSError):  # where the kernel has no Yama, it needs no permission
        prctl(PR_SET_PTRACER, PR_SET_PTRACER_ANY, 0, 0, 0)
    return fd.HostBackend(rank, world_size, addr, timeout=60.0)


def prctl(*args: object) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(*args) != 0:
        raise OSError(ctypes.get_errno(), "prctl")


def refuse_reads() -> None:
    """Let process_vm_readv of other processes fail on this thread, as in many containers."""

    class Instruction(ctypes.Structure):
        _fields_ = (
            ("code", ctypes.c_ushort),
            ("jt", ctypes.c_ubyte),
            ("jf", ctypes.c_ubyte),
            ("k", ctypes.c_uint),
        )

    class Program(ctypes.Structure):
        _fields_ = (("len", ctypes.c_ushort), ("filter", ctypes.POINTER(Instruction)))

    assert READ_CALL is not None
    instructions = (Instruction * 6)(
        Instruction(0x20, 0, 0, 0),  # load the number of the call
        Instruction(0x15, 0, 3, READ_CALL),
        Instruction(0x20, 0, 0, 16),  # load its first argument
        Instruction(0x15, 1, 0, os.getpid()),
        Instruction(0x06, 0, 0, 0x00050001),  # EPERM
        Instruction(0x06, 0, 0, 0x7FFF0000),  # allow
    )
    prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    prctl(PR_SET_SECCOMP, 2, ctypes.byref(Program(len(instructions), instructions)), 0, 0)


def values(rank: int, count: int = COUNT) -> Integers:
    x: Integers = np.arange(count, dtype=np.int64) * 7 + 1000003 * rank
    return x


def move(backend: fd.Backend, is_symmetric: bool = False) -> None:
    """Call everything that only moves, and check what came."""
    rank, ranks = backend.rank, range(backend.world_size)

    def own(x: Integers) -> Integers:
        if not is_symmetric:
            return x
        y: Integers = fd.empty(x.shape, x.dtype, backend)
        y[...] = x
        return y

    everybodys = np.stack([values(peer) for peer in ranks])
    np.testing.assert_array_equal(fd.all_gather(own(values(rank)), backend), everybodys.ravel())
    x = own(values(rank, COUNT * backend.world_size))
    chunk = slice(rank * COUNT, (rank + 1) * COUNT)
    exchanged = np.concatenate([values(peer, x.size)[chunk] for peer in ranks])
    np.testing.assert_array_equal(fd.all_to_all(x, backend), exchanged)
    fd.all_to_all(x, backend, out=x)
    np.testing.assert_array_equal(x, exchanged)
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


def move_repeatedly(rank: int, world_size: int, addr: str, peer_reads: str) -> None:
    with join(rank, world_size, addr, peer_reads) as backend:
        for turn in range(4):
            # Also where some ranks' arrays are symmetric and others' are not.
            move(backend, is_symmetric=turn == 3 and rank == 1)


@pytest.mark.parametrize("peer_reads", ["automatic", "always", "never"])
@pytest.mark.parametrize("world_size", [2, 3])
def test_arrays_arrive_however_they_are_moved(world_size: int, peer_reads: str) -> None:
    run_ranks(world_size, partial(move_repeatedly, peer_reads=peer_reads), backend="none")


def move_where_one_says_never(rank: int, world_size: int, addr: str) -> None:
    move_repeatedly(rank, world_size, addr, "never" if rank == 1 else "always")


def move_after_a_refusal(rank: int, world_size: int, addr: str) -> None:
    if rank == 1:
        refuse_reads()
    move_repeatedly(rank, world_size, addr, "always")


needs_seccomp = pytest.mark.skipif(READ_CALL is None, reason="no number of the call is known here")


@needs_seccomp
def test_arrays_are_staged_where_one_rank_may_not_read() -> None:
    run_ranks(3, move_after_a_refusal, backend="none")


def test_one_rank_that_reads_nobody_is_enough() -> None:
    run_ranks(3, move_where_one_says_never, backend="none")


def gather_after_a_late_refusal(
    rank: int, world_size: int, addr: str, is_lender_private: bool
) -> str:
    with join(rank, world_size, addr, "always") as backend:
        x, everybodys = values(rank), np.concatenate([values(0), values(1)])
        for _ in range(2):
            fd.all_gather(x, backend)
        if rank == 0 and is_lender_private:
            prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)
        if rank == 1:
            refuse_reads()
        try:
            got = fd.all_gather(x, backend)
        except fd.errors.DistributedError as error:
            return str(error)
        np.testing.assert_array_equal(got, everybodys)
        return "arrived"


@needs_seccomp
def test_a_read_that_fails_ends_the_group_on_all_ranks() -> None:
    lender, reader = run_ranks(
        2, partial(gather_after_a_late_refusal, is_lender_private=False), backend="none"
    )
    assert "cannot read the array of rank 0: Operation not permitted" in reader
    assert "Reported by rank 1" in lender


@needs_seccomp
def test_who_gives_up_privileges_lends_nothing_more() -> None:
    told = run_ranks(
        2, partial(gather_after_a_late_refusal, is_lender_private=True), backend="none"
    )
    assert told == ["arrived", "arrived"]


def make_group_with(rank: int, world_size: int, addr: str) -> None:
    with pytest.raises(ValueError, match="FERRO_DIST_PEER_READS"):
        join(rank, world_size, addr, "sometimes")
    listener = socket.create_server(("127.0.0.1", 0))
    with pytest.raises(ValueError, match="FERRO_DIST_PEER_READS"):
        fd.HostBackend(0, 2, None, listener=listener)
    assert listener.fileno() < 0  # whoever is given it closes it


def test_an_unknown_setting_is_refused() -> None:
    run_ranks(1, make_group_with, backend="none")
