"""A forked child must not touch its parent's groups, and cannot harm them."""

from __future__ import annotations

import gc
import multiprocessing
import os
import sys
import traceback
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from fault_injection import COLLECTIVES, call_of, error_of

import ferro_dist as fd
from ferro_dist.testing import run_ranks

# Pythons from 3.12 on warn of what these tests do on purpose.
pytestmark = pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")


def fork() -> int:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return os.fork()


def exit_code_of(body: Callable[[], Any]) -> int:
    """Run `body` in a forked child, to the end of an interpreter: exit handlers and all."""
    pid = fork()
    if pid == 0:
        code = 1
        try:
            body()
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            import atexit

            atexit._run_exitfuncs()
            sys.stderr.flush()
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def check_refused(call: Callable[[], Any]) -> None:
    error = error_of(call)
    assert error.kind == "LockPoisoned", error
    assert "forked child" in error.message


def use_in_child(backend: fd.Backend) -> None:
    work = fd.recv(np.empty(3), backend, 1 - backend.rank, async_op=True)
    done = fd.barrier(backend, async_op=True)
    done.wait()
    symmetric = fd.empty(100, "float64", backend)

    def child() -> None:
        for op in (*COLLECTIVES, "sendrecv", "batch"):
            check_refused(call_of(op, backend, 10))
        check_refused(lambda: fd.send(np.ones(3), backend, 1 - backend.rank))
        check_refused(lambda: fd.recv(np.ones(3), backend, 1 - backend.rank))
        check_refused(lambda: fd.barrier(backend, async_op=True))
        check_refused(work.wait)
        check_refused(work.result)
        check_refused(lambda: fd.empty(3, "float32", backend))
        check_refused(lambda: backend.split([0]))
        check_refused(backend.shrink)
        check_refused(work.is_completed)
        assert done.is_completed()
        assert symmetric.shape == (100,)
        backend.close()
        backend.close()

    assert exit_code_of(child) == 0
    # All of it works as before for the parent.
    fd.send(np.ones(3), backend, 1 - backend.rank)
    work.wait()
    assert fd.allreduce(np.ones(3), backend, out=symmetric[:3]).tolist() == [2.0] * 3


@pytest.mark.parametrize("transport", ["host", "tcp"])
def test_every_use_in_a_child_is_refused_and_the_parent_goes_on(transport: str) -> None:
    run_ranks(2, use_in_child, backend=transport)


def shrink_in_child(backend: fd.Backend) -> None:
    assert exit_code_of(lambda: check_refused(backend.shrink)) == 0
    assert fd.allreduce(np.ones(3), backend).tolist() == [1.0] * 3


@pytest.mark.parametrize("transport", ["host", "tcp"])
def test_a_child_does_not_succeed_its_parent_who_is_alone(transport: str) -> None:
    run_ranks(1, shrink_in_child, backend=transport)


def drop_in_child(backend: fd.Backend) -> None:
    holder: list[Any] = [
        backend.split([0, 1]),
        fd.empty(1 << 20, "float32", backend),
        fd.recv(np.empty(3), backend, 1 - backend.rank, async_op=True),
    ]
    holder.append(holder)

    def child() -> None:
        holder.clear()
        gc.collect()

    assert exit_code_of(child) == 0
    pair, symmetric, work, _ = holder
    symmetric[:] = backend.rank
    assert fd.allreduce(symmetric, pair)[-1] == 1
    fd.send(np.ones(3), backend, 1 - backend.rank)
    work.wait()


@pytest.mark.parametrize("transport", ["host", "tcp"])
def test_collecting_a_group_in_a_child_is_harmless(transport: str) -> None:
    run_ranks(2, drop_in_child, backend=transport)


def fork_beside_calls(backend: fd.Backend) -> None:
    peer = 1 - backend.rank
    for _ in range(8):
        works = [fd.allreduce(np.ones(100_000), backend, async_op=True) for _ in range(3)]
        works.append(
            fd.sendrecv(np.ones(50_000), np.empty(50_000), backend, peer, peer, async_op=True)
        )
        assert exit_code_of(gc.collect) == 0
        for work in works:
            work.wait()


@pytest.mark.parametrize("transport", ["host", "tcp"])
def test_children_may_come_and_go_while_work_is_under_way(transport: str) -> None:
    run_ranks(2, fork_beside_calls, backend=transport)


def do_nothing() -> None:
    pass


def use_multiprocessing(backend: fd.Backend) -> None:
    context = multiprocessing.get_context("fork")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        children = [context.Process(target=do_nothing) for _ in range(3)]
        for child in children:
            child.start()
        assert fd.allreduce(np.ones(1), backend).tolist() == [2.0]
        for child in children:
            child.join()
            assert child.exitcode == 0
    assert fd.allreduce(np.ones(1), backend).tolist() == [2.0]


@pytest.mark.parametrize("transport", ["host", "tcp"])
def test_children_of_multiprocessing_exit_well_and_harm_nothing(transport: str) -> None:
    run_ranks(2, use_multiprocessing, backend=transport)


def close_beside_a_child(backend: fd.Backend, fifo: str) -> str:
    if backend.rank == 1:
        return error_of(lambda: fd.recv(np.empty(1), backend, 0)).kind
    lifeline = os.open(fifo, os.O_RDONLY)
    if fork() == 0:
        os.read(lifeline, 1)
        os._exit(0)
    backend.close()
    return "closed"


@pytest.mark.parametrize("transport", ["host", "tcp"])
def test_a_living_child_does_not_hide_that_its_parent_left(transport: str, fifo: str) -> None:
    lifeline = os.open(fifo, os.O_RDWR)
    try:
        outcomes = run_ranks(2, close_beside_a_child, fifo, backend=transport)
    finally:
        os.close(lifeline)
    assert outcomes == ["closed", "ChannelClosed"]


def reuse_numbers_in_a_grandchild(backend: fd.Backend) -> None:
    def child() -> None:
        # These take the numbers of the sockets that the fork closed.
        files = [os.open("/dev/null", os.O_RDONLY) for _ in range(20)]

        def grandchild() -> None:
            for file in files:
                os.fstat(file)

        assert exit_code_of(grandchild) == 0

    assert exit_code_of(child) == 0
    fd.barrier(backend)


def test_a_grandchild_keeps_its_files() -> None:
    run_ranks(2, reuse_numbers_in_a_grandchild, backend="tcp")


def take_numbers_of_a_closed_group(backend: fd.Backend) -> None:
    backend.close()
    files = [os.open("/dev/null", os.O_RDONLY) for _ in range(20)]

    def child() -> None:
        for file in files:
            os.fstat(file)

    assert exit_code_of(child) == 0


def test_a_child_keeps_files_with_the_numbers_of_a_closed_groups_sockets() -> None:
    run_ranks(2, take_numbers_of_a_closed_group, backend="tcp")


def join_anew(rank: int, world_size: int, addr: str) -> float:
    """Each rank is a forked child of a process that holds a group of its own."""
    with fd.HostBackend(0, 1, None) as outer:
        results, sending = os.pipe()
        pid = fork()
        if pid == 0:
            with fd.HostBackend(rank, world_size, addr) as backend:
                os.write(sending, b"%d" % fd.allreduce(np.ones(1), backend)[0])
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        assert fd.allreduce(np.ones(1), outer).tolist() == [1.0]
        return float(os.read(results, 10))


def test_a_child_may_make_groups_of_its_own() -> None:
    assert run_ranks(2, join_anew, backend="none") == [2.0, 2.0]
