"""What the ranks of `test_mpi.py` do; run as a program under an MPI launcher.

Rank 0 reads names from its standard input: of cases of the contract, and of functions
here. All ranks run each, and rank 0 answers with one line of JSON: for every rank its
traceback, or null.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import json
import os
import signal
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
from mpi4py import MPI
from numpy.testing import assert_array_equal

sys.path.insert(0, str(Path(__file__).parents[1]))

from backends.contract.case import Group, assert_same_bits, clone, raised
from backends.contract.reference import data, reduced
from backends.contract.suite import CASES
from fault_injection import wait_until_called

import ferro_dist as fd
from ferro_dist import ChannelClosed, LockPoisoned, MpiBackend, P2POp, ReduceOp, Timeout
from ferro_dist.backends import mpi_memory
from ferro_dist.backends.mpi_agreement import Fingerprint
from ferro_dist.backends.mpi_progress import Steps
from ferro_dist.cores import count_own
from ferro_dist.rendezvous import machine

SUM, MEAN, PROD, MIN, MAX = ReduceOp

GROUP_TIMEOUT_S = 60.0
# A rank that not even that ended writes where it stands, and exits.
DEADLINE_S = 200.0
# What the first test after a long pause may wait for its ranks to look.
LONGEST_NAP_S = 0.05


def random_floats_have_the_same_bits_everywhere(group: Group) -> None:
    rng = np.random.default_rng(group.rank)
    for dtype in ("float32", "float64", "complex64"):
        for count in (1, 7, 4096, 100_003):
            x = rng.standard_normal(2 * count).view("c16").astype(dtype)
            for op in (SUM, MEAN, PROD):
                assert_same_bits(group, fd.allreduce(x, group, op))


def large_arrays_go_in_pieces(group: Group) -> None:
    """With a small limit in place of 2^31: the path is the same."""
    rank, size = group.rank, group.world_size
    limit, mpi_memory.MAX_COUNT = mpi_memory.MAX_COUNT, 1000
    try:
        every = [data(peer, (size * 1001,), "float32") for peer in range(size)]
        x, own = every[rank], slice(rank * 1001, (rank + 1) * 1001)
        total = reduced(every, SUM)
        assert_array_equal(fd.allreduce(x, group), total)
        assert_array_equal(fd.reduce_scatter(x, group), total[own])
        assert_array_equal(fd.broadcast(x, group, size - 1), every[-1])
        assert_array_equal(fd.all_gather(x, group), np.concatenate(every))
        y = fd.all_to_all(x, group)
        assert_array_equal(y, np.concatenate([other[own] for other in every]))
        counts = [1001] * size
        z = fd.all_to_all(x, group, send_counts=counts, recv_counts=counts)
        assert_array_equal(z, y)
        gathered = fd.gather(x, group)
        out = np.empty_like(x)
        fd.scatter(gathered, group, out=out)
        assert_array_equal(out, x)
        _pass_round_the_ring(group, every)
    finally:
        mpi_memory.MAX_COUNT = limit


def _pass_round_the_ring(group: Group, every: list[Any]) -> None:
    rank, size = group.rank, group.world_size
    if size > 1:
        out = np.empty_like(every[rank])
        right, left = (rank + 1) % size, (rank - 1) % size
        fd.batch([P2POp("send", every[rank], right), P2POp("recv", out, left)], group)
        assert_array_equal(out, every[left])


def blocks_beyond_one_unit_keep_their_order(group: Group) -> None:
    limit, mpi_memory.MAX_COUNT = mpi_memory.MAX_COUNT, 1000
    try:
        x = np.arange(400_001, dtype=np.int64) + group.rank  # 3 MiB and a bit
        y = fd.all_gather(x, group)
        ranks = range(group.world_size)
        assert_array_equal(y, np.concatenate([np.arange(400_001) + rank for rank in ranks]))
    finally:
        mpi_memory.MAX_COUNT = limit


def arrays_that_share_no_byte_are_taken(group: Group) -> None:
    """Nothing may lie anywhere, and of an array with gaps only a copy is read."""
    rank, other = group.rank, group.rank ^ 1
    pair = group.split([0, 1])
    if rank > 1:
        return
    with pair:
        memory = np.arange(10.0) + 10 * rank
        fd.sendrecv(memory[4:0:-1], memory[5:9], pair, other, other)
        assert_array_equal(memory[5:9], np.arange(4, 0, -1) + 10 * other)
        x, out = (memory[2:][:0], memory[:4]) if rank == 0 else (memory[:4], memory[6:][:0])
        sent, received = ([0, 0], [0, 4]) if rank == 0 else ([4, 0], [0, 0])
        fd.all_to_all(x, pair, out=out, send_counts=sent, recv_counts=received)
        assert_array_equal(memory[:4], np.arange(4) + 10)


def a_given_communicator_is_duplicated(group: Group) -> None:
    comm = MPI.COMM_WORLD.Split(MPI.COMM_WORLD.rank % 2)
    with MpiBackend(comm) as half:
        assert half.world_size == comm.size
        assert fd.allreduce(np.ones(1), half)[0] == comm.size
    comm.Barrier()
    comm.Free()


def what_is_no_communicator_is_refused(group: Group) -> None:
    raised(TypeError, MpiBackend, MPI.COMM_NULL)
    raised(TypeError, MpiBackend, "world")
    raised(ValueError, MpiBackend, timeout=0)


def ranks_share_the_cores_of_their_own_host(group: Group) -> None:
    assert group.cores_per_rank == count_own() / group.world_size
    own_host, machine.host_identity = machine.host_identity, lambda: f"{group.rank}"
    try:
        with MpiBackend() as spread:
            assert spread.cores_per_rank == count_own()
    finally:
        machine.host_identity = own_host


def a_forked_child_is_refused(group: Group) -> None:
    work = fd.allreduce(np.ones(1), group, async_op=True)
    calls = [MpiBackend, lambda: fd.allreduce(np.ones(1), group), work.wait, work.is_completed]
    # Work that is done before the fork may be queried; a group of one is done at once.
    for call in calls[: 3 if work.is_completed() else 4]:
        child = os.fork()
        if child == 0:
            os._exit(exit_code_of_refused(call))
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert work.result() == group.world_size


def exit_code_of_refused(call: Callable[[], Any]) -> int:
    try:
        call()
    except LockPoisoned as error:
        return 0 if "forked" in str(error) else 2
    except BaseException:
        return 1
    return 3


def groups_that_were_left_are_freed(group: Group) -> None:
    """MPI libraries have some thousand communicators; a leak would show after many."""
    from ferro_dist.backends import mpi_farewell

    for _ in range(30):
        with clone(group) as other:
            fd.barrier(other)
    fd.barrier(group)
    deadline = time.monotonic() + DEADLINE_S / 2
    while mpi_farewell._leaving and time.monotonic() < deadline:
        mpi_farewell.free_left_groups()
    assert not mpi_farewell._leaving


def a_group_that_is_dropped_is_left(group: Group) -> None:
    other = clone(group)
    if group.rank == 0:
        del other
        gc.collect()
    else:
        error = raised(ChannelClosed, fd.barrier, other)
        assert error.peer == 0
        assert "left the group" in str(error)
        other.close()  # else whenever the collector comes, and rank 0 could not free it before
    fd.barrier(group)


def arrays_of_a_group_that_is_dropped_stay_while_mpi_uses_them(group: Group) -> None:
    from ferro_dist.backends import mpi_farewell

    other = clone(group)
    out = np.zeros(1 << 18)
    memory = weakref.ref(out)
    work: Any = fd.broadcast(out, other, 1, out=out, async_op=True)
    fd.barrier(group)  # everybody has sent its fingerprint, and the root gone no further
    if group.rank == 0:
        while not other._requests.num_under_way:
            assert not work.is_completed()
        gc.collect()
        del work, out, other
        gc.collect()
        assert memory() is not None
        (unsound,) = (left for left in mpi_farewell._leaving if not left._is_sound)
        mpi_farewell._leaving.remove(unsound)
    fd.barrier(group)
    if group.rank != 0:
        other.close()


def messages_left_behind_do_not_reach_the_next_group(group: Group) -> None:
    for _ in range(5):
        other = clone(group)
        if other.rank == 0:
            fd.send(np.zeros(3), other, 1)
        other.close()
        fd.barrier(group)
        with clone(group) as following:
            if following.rank == 0:
                fd.send(np.ones(3), following, 1)
            if following.rank == 1:
                assert (fd.recv(np.empty(3), following, 0) == 1).all()


def late_ranks_are_named_by_the_timeout(group: Group) -> None:
    other = clone(group)  # not closed: a job ends well all the same
    if group.rank == 0:
        error = raised(Timeout, fd.allreduce, np.ones(1), other, timeout=0.3)
        assert error.missing == tuple(range(1, group.world_size))
        assert (error.op, error.rank, error.sequence) == ("allreduce", 0, 0)
        poisoned = raised(LockPoisoned, fd.barrier, other)
        assert str(poisoned.__cause__) == str(error)
        assert str(poisoned).splitlines()[1:] == ["Make a new group."]
    fd.barrier(group)


def the_cause_of_an_ended_part_names_its_ranks(group: Group) -> None:
    part = group.split([1, 0])
    if group.rank == 0:
        error = raised(Timeout, fd.barrier, part, timeout=0.1)
        cause: Any = raised(LockPoisoned, fd.barrier, part).__cause__
        assert cause.global_ranks == (1, 0)
        assert str(cause) == str(error)
        assert "group (1, 0)" in str(cause)
    fd.barrier(group)
    if part is not None:
        part.close()


def a_call_behind_another_keeps_its_own_timeout(group: Group) -> None:
    other = clone(group)
    if group.rank == 0:
        work = fd.allreduce(np.ones(1), other, async_op=True)
        error = raised(Timeout, fd.barrier, other, timeout=0.3)
        assert (error.op, error.sequence) == ("barrier", 1)
        assert error.missing == tuple(range(1, group.world_size))
        assert str(raised(Timeout, work.wait)) == str(error)
    fd.barrier(group)
    other.close()


def a_failure_is_told_to_all_ranks(group: Group) -> None:
    """Who waits longer need not: the group has ended when one rank has given up."""
    other = clone(group)
    if group.rank == 0:
        raised(Timeout, fd.recv, np.empty(1), other, 1, timeout=0.1)
    else:
        error = raised(Timeout, fd.allreduce, np.ones(1), other)
        assert (error.op, error.missing) == ("allreduce", (1,))
        assert "rank 0 gave up waiting for rank 1" in str(error)
    other.close()
    fd.barrier(group)


def an_error_keeps_nothing_of_who_waited(group: Group) -> None:
    other = clone(group)
    if group.rank == 0:
        work = fd.allreduce(np.ones(1), other, async_op=True, timeout=0.1)
        kept = [_wait_in_vain(work) for _ in range(2)]
        gc.collect()
        assert [array() for array in kept] == [None, None]
    fd.barrier(group)
    other.close()


def an_error_keeps_nothing_of_what_was_handled_when_it_came(group: Group) -> None:
    other = clone(group)
    if group.rank == 0:
        kept = _receive_in_vain_while_handling(other)
        gc.collect()
        assert kept() is None
        cause: Any = raised(LockPoisoned, fd.barrier, other).__cause__
        assert (cause.op, cause.peer) == ("recv", 1)
    if group.rank == 1:
        other.close()
    fd.barrier(group)
    other.close()


def _receive_in_vain_while_handling(group: Group) -> weakref.ref[Any]:
    array = np.empty(1)
    try:
        raise LookupError
    except LookupError:
        with contextlib.suppress(ChannelClosed):
            fd.recv(np.empty(1), group, 1)
    return weakref.ref(array)


def _wait_in_vain(work: Any) -> weakref.ref[Any]:
    array = np.empty(1)
    with contextlib.suppress(Timeout):
        work.wait()
    return weakref.ref(array)


def control_c_ends_a_wait(group: Group) -> None:
    other = clone(group)
    if group.rank == 0:
        thread = threading.Thread(target=_interrupt_the_wait)
        thread.start()
        started = time.monotonic()
        try:
            fd.barrier(other)
        except KeyboardInterrupt:
            assert time.monotonic() - started < GROUP_TIMEOUT_S / 2
        else:
            raise AssertionError("nobody else was there")
        raised(LockPoisoned, fd.barrier, other)
        thread.join()
    fd.barrier(group)
    other.close()


class Fed(Exception):
    """What a signal handler of these tests raises: any exception ends a wait. It has no copies."""

    def __init__(self) -> None:
        super().__init__("fed")


def control_c_ends_a_call_that_has_not_begun_to_wait(group: Group) -> None:
    """The others hear of it at once, not in the next call of the rank that was interrupted."""
    _strike_and_hear(group, "reach", KeyboardInterrupt)


def any_exception_of_a_handler_ends_a_wait(group: Group) -> None:
    """Its caller gets it as it is, and no call goes on that nobody knows of."""
    for where in ("reach", "_pause"):  # inside a step, and between two
        _strike_and_hear(group, where, Fed)


def _strike_and_hear(group: Group, where: str, kind: type[BaseException]) -> None:
    """Raise in a call, as a signal handler does when the call enters a function of this name."""
    other = clone(group)
    if group.rank == 0:
        sys.setprofile(partial(_strike, where, kind))
        raised(kind, fd.allreduce, np.ones(1), other)
        assert kind.__name__ in str(raised(LockPoisoned, fd.barrier, other))
        fd.barrier(group)
    else:
        fd.barrier(group)  # rank 0 finds nobody, and waits
        error = raised(ChannelClosed, fd.allreduce, np.ones(1), other)
        assert error.peer == 0
        assert "rank 0 was interrupted" in str(error)
    other.close()


def an_exception_that_strikes_a_call_is_raised_once(group: Group) -> None:
    """By whatever drives that call; all waits for it end with an error of ours."""
    for is_driven_by_itself in (False, True):
        other = clone(group)
        if group.rank == 0:
            work: Any = fd.recv(np.empty(1), other, 1, async_op=True)
            sys.setprofile(partial(_strike, "recv", Fed))
            raised(Fed, work.wait if is_driven_by_itself else partial(fd.barrier, other))
            for _ in range(2):
                error = raised(ChannelClosed, work.wait)
                assert "recv was interrupted on rank 0 by Fed" in str(error)
        else:
            error = raised(ChannelClosed, fd.recv, np.empty(1), other, 0)
            assert "rank 0 was interrupted" in str(error)
        fd.barrier(group)
        other.close()


def _strike(
    where: str, kind: type[BaseException], frame: FrameType, event: str, _argument: object
) -> None:
    if (event, frame.f_code.co_name) == ("call", where):
        sys.setprofile(None)
        raise kind


def a_batch_names_who_left(group: Group) -> None:
    """Its first message ends the group, and the second must not be the one that tells."""
    other = clone(group)
    if group.rank == 0:
        other.close()
    if group.rank == 1:  # alone: from there the others would hear of it
        while not other._agreement.has_left(0):
            other._progress.advance()
        x, out = np.zeros(1), np.zeros(1)
        ops = [P2POp("send", x, 0), P2POp("recv", out, 0)]
        error = raised(ChannelClosed, fd.batch, ops, other)
        assert (error.op, error.peer) == ("batch", 0)
        assert str(raised(LockPoisoned, fd.barrier, other).__cause__) == str(error)
    fd.barrier(group)
    other.close()


def a_rank_that_leaves_in_a_call_ends_it_for_the_others(group: Group) -> None:
    """It has come to the call, so that no goodbye says who is missing."""
    other = clone(group)
    if group.rank == 0:
        work = fd.allreduce(np.ones(1), other, async_op=True)
        other.close()
        raised(ChannelClosed, work.wait)
    fd.barrier(group)  # if the others had come before it left, it might have done its part
    if group.rank != 0:
        error = raised(ChannelClosed, fd.allreduce, np.ones(1), other)
        assert (error.op, error.peer) == ("allreduce", 0)
        assert "rank 0 left the group in a call" in str(error)
    fd.barrier(group)
    other.close()


def work_that_only_has_to_be_looked_at_is_over_when_a_rank_leaves(group: Group) -> None:
    """The last message has come, though nobody has asked for it."""
    other = clone(group)
    y = np.empty(1)
    if group.rank == 0:
        fd.recv(y, other, 1, async_op=True)
    elif group.rank == 1:
        fd.send(np.ones(1), other, 0)
    fd.barrier(group)
    if group.rank == 0:
        other.close()
        assert y == 1
    else:
        error = raised(ChannelClosed, fd.recv, y, other, 0)
        assert "in a call" not in str(error)
    fd.barrier(group)
    other.close()


def a_signal_handler_may_close_amid_a_step(group: Group) -> None:
    other = clone(group)
    previous = signal.signal(signal.SIGUSR1, lambda *_: other.close())

    def move() -> Steps:
        signal.raise_signal(signal.SIGUSR1)
        yield

    try:
        raised(ChannelClosed, other._collective, Fingerprint("barrier"), move, False, None)
    finally:
        signal.signal(signal.SIGUSR1, previous)
    assert other.is_closed
    fd.barrier(group)


def _interrupt_the_wait() -> None:
    wait_until_called("_pause")
    os.kill(os.getpid(), signal.SIGINT)


def a_group_left_amid_the_comparison_of_counts_is_not_freed(group: Group) -> None:
    """MPI would wait in Free for the ranks that have not begun the comparison."""
    from ferro_dist.backends import mpi_farewell

    other = clone(group)
    counts = [1] * group.world_size
    x = np.zeros(group.world_size)
    work: Any = fd.all_to_all(x, other, send_counts=counts, recv_counts=counts, async_op=True)
    fd.barrier(group)  # everybody has sent its fingerprint, and gone no further
    if group.rank == 0:
        while other._agreement.awaited():
            assert not work.is_completed()
        other.interrupt(KeyboardInterrupt())
    other.close()
    if group.rank == 0:
        (unsound,) = (left for left in mpi_farewell._leaving if not left._is_sound)
        mpi_farewell._leaving.remove(unsound)
    fd.barrier(group)


def main() -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)  # MPI launchers may ignore it
    comm = MPI.COMM_WORLD
    group: Group = MpiBackend(timeout=GROUP_TIMEOUT_S)
    say(comm.gather(None))
    while (name := next_name(comm)) != "exit":
        faulthandler.dump_traceback_later(DEADLINE_S, exit=True)
        outcomes = comm.gather(outcome_of(name, group))
        faulthandler.cancel_dump_traceback_later()
        say(outcomes)
    group.close()


def say(outcomes: list[str | None] | None) -> None:
    """Answer, on rank 0, which alone has the outcomes; the first answer means: ready."""
    if outcomes is not None:
        sys.stdout.write(json.dumps(outcomes) + "\n")
        sys.stdout.flush()


def next_name(comm: MPI.Intracomm) -> str:
    """Return what rank 0 is told to run, on all ranks."""
    words = np.zeros(100, np.uint8)
    if comm.rank == 0:
        name = sys.stdin.readline().strip().encode()
        words[: len(name)] = list(name)
    wait_asleep(comm.Ibcast(words))
    return words.tobytes().rstrip(b"\0").decode()


def wait_asleep(request: MPI.Request) -> None:
    """Wait, less often awake the longer it takes: jobs that have no test to run are many.

    A blocking call would spin, on cores that others need.
    """
    nap_s = 0.0005
    while not request.Test():
        time.sleep(nap_s)
        nap_s = min(1.1 * nap_s, LONGEST_NAP_S)


def outcome_of(name: str, group: Group) -> str | None:
    body = CASES[name].run if name in CASES else globals()[name]
    try:
        body(group)
    except BaseException:
        return traceback.format_exc()
    return None


if __name__ == "__main__":
    main()
