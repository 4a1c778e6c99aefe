"""A rank does not come, or calls something else: the others say which, and in time."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from fault_injection import (
    COLLECTIVES,
    MESSAGES,
    PATIENCE_S,
    SOON_S,
    Lesson,
    Pulse,
    Told,
    call_of,
    error_of,
    meet,
    public_name,
    run_undisturbed,
    state_of,
)

import ferro_dist as fd
from ferro_dist.testing import run_ranks

LARGE = 3_000_000  # floats: no buffer takes that much ahead
TIMEOUT_S = 0.3
# What must pass, but not before ranks that a busy machine keeps from running have come.
LONG_TIMEOUT_S = 2.5


def timed_error_of(call: Callable[[], Any]) -> tuple[Told, float]:
    start = time.monotonic()
    error = error_of(call)
    return error, time.monotonic() - start


def meet_over(backend: fd.Backend, fifo: str) -> int:
    """Open `fifo`, to which rank 0 alone writes: its end is rank 0's."""
    file = os.open(fifo, os.O_WRONLY if backend.rank == 0 else os.O_RDONLY)
    meet(backend, 0)
    return file


def wait_for_an_absent_rank(
    backend: fd.HostBackend, op: str, fifo: str
) -> tuple[Told, float] | None:
    file = meet_over(backend, fifo)
    if backend.rank == 1:
        assert os.read(file, 1) == b""
        return None
    backend.timeout = TIMEOUT_S
    outcome = timed_error_of(call_of(op, backend, LARGE))
    os.close(file)
    return outcome


@pytest.mark.parametrize("transport", ["host", "tcp"])
@pytest.mark.parametrize("op", [*COLLECTIVES, *MESSAGES])
def test_every_call_ends_with_its_timeout_and_names_who_is_missing(
    op: str, transport: str, fifo: str
) -> None:
    outcome, _ = run_ranks(2, wait_for_an_absent_rank, op, fifo, backend=transport)
    error, elapsed_s = outcome
    assert (error.kind, error.peer, error.missing) == ("Timeout", 1, (1,)), error
    assert error.op == ("send" if op == "send_recv" else public_name(op))
    # The contract says a second more, of which a busy machine knows nothing.
    assert TIMEOUT_S <= elapsed_s < SOON_S


def wait_for_absent_ranks(backend: fd.Backend) -> tuple[Told, Told, Lesson]:
    pulse = Pulse()
    fd.barrier(backend)
    if backend.rank < 2:
        first = error_of(lambda: fd.allreduce(np.ones(1), backend, timeout=LONG_TIMEOUT_S))
    else:
        # Elsewhere: waiting for a message that nobody sends.
        first = error_of(lambda: fd.recv(np.empty(1), backend, 5 - backend.rank))
    lesson = pulse.end()
    return first, error_of(lambda: fd.barrier(backend)), lesson


@pytest.mark.parametrize("transport", ["host", "tcp"])
def test_all_missing_ranks_are_named_to_all(transport: str) -> None:
    outcomes = run_undisturbed(
        lambda: run_ranks(4, wait_for_absent_ranks, backend=transport),
        lambda outcomes: [outcome[-1] for outcome in outcomes],
    )
    for first, later, _ in outcomes:
        assert first.kind == "Timeout"
        assert first.peer == 2
        assert (later.kind, later.cause) == ("LockPoisoned", "Timeout")
        assert first.missing == (2, 3), first


def wait_for_each_other(backend: fd.Backend) -> list[Told]:
    """Give up at the same moment, again and again: which of the two is first is chance."""
    errors = []
    for _ in range(40):
        group = backend.split([0, 1])
        assert group is not None
        with group:
            out, peer = np.empty(1), 1 - backend.rank
            errors.append(error_of(lambda: fd.recv(out, group, peer, timeout=0.02)))  # noqa: B023
            fd.barrier(backend)
    return errors


@pytest.mark.parametrize("transport", ["host", "tcp"])
def test_two_that_give_up_at_once_name_the_same_rank(transport: str) -> None:
    outcomes = run_ranks(2, wait_for_each_other, backend=transport, timeout=250)
    for left, right in zip(*outcomes, strict=True):
        assert (left.kind, left.missing) == (right.kind, right.missing), (left, right)
        for told in (left, right):
            assert f"rank {told.peer} gave up waiting for rank {told.peer}" not in told.message


def wait_elsewhere(backend: fd.Backend) -> Told:
    if backend.rank == 0:
        return error_of(lambda: fd.recv(np.empty(1), backend, 1, timeout=TIMEOUT_S))
    return error_of(lambda: fd.allreduce(np.ones(1), backend))


@pytest.mark.parametrize("transport", ["host", "tcp"])
def test_a_rank_that_gives_up_in_another_call_is_not_said_to_wait_for_itself(
    transport: str,
) -> None:
    first, *others = run_ranks(3, wait_elsewhere, backend=transport)
    assert [told.missing for told in others] == [first.missing] * 2
    for told in others:
        assert (told.kind, told.peer) == ("Timeout", told.missing[0])
    if first.missing == (0, 1):
        for told in (first, *others):
            assert "deadlock: ranks 0 and 1 wait for each other" in told.message, told
        return
    assert "no data from rank 1" in first.message
    for told in others:
        if told.peer == 0:
            assert "rank 0 gave up waiting in another call" in told.message, told
        else:
            assert re.search(r"rank 0 gave up waiting for (this rank|rank 1)\.", told.message), told


# What each rank does while rank 0 loses its patience, and whom all then hold responsible.
WAITS: dict[str, tuple[tuple[str, ...], tuple[int, ...]]] = {
    "chain of 3": (("recv 1", "recv 2", "away"), (2,)),
    "chain of 4": (("recv 1", "send 2", "recv 3", "away"), (3,)),
    "behind a stopped rank": (("recv 1", "recv 2", "stop"), (2,)),
    "message behind a collective": (("allreduce", "recv 2", "away"), (2,)),
    "in the background": (("recv 1", "allreduce later", "recv 1"), (1,)),
    "behind one at work": (("recv 1", "allreduce later", "away"), (1,)),
    "chain to one at work": (("recv 1", "recv 2 amid", "allreduce later", "away"), (2,)),
    "message behind a stopped rank's collective": (("recv 1 amid", "allreduce now", "stop"), (2,)),
    "beside another thread": (("recv 1", "recv 0 beside"), (1,)),
    "both receive": (("recv 1", "recv 0"), (0, 1)),
    "both receive amid a collective": (("recv 1 amid", "recv 0 amid", "away"), (0, 1)),
    "all send": (("send 1", "send 2", "send 0"), (0, 1, 2)),
    "circle elsewhere": (("recv 1", "recv 2", "recv 3", "recv 2"), (2, 3)),
    "collective and message": (("allreduce", "recv 0"), (0, 1)),
    "message and Work.wait": (("recv 1", "allreduce now"), (0, 1)),
}
NOT_WAITING = ("away", "stop", "allreduce later")
IN_THREADS = [name for name in WAITS if "stopped" not in name]
# Over sockets, it may be what others have sent in a collective that is late.
OVER_SOCKETS = [
    name for name in WAITS if name not in ("collective and message", "message and Work.wait")
]


def wait_for_others(backend: fd.Backend, name: str) -> tuple[Told | None, Lesson]:
    actions, _ = WAITS[name]
    group = backend.split(range(backend.world_size))
    assert group is not None
    pids = fd.all_gather(np.array([os.getpid()]), backend)
    action, _, rest = actions[backend.rank].partition(" ")
    peer, _, circumstance = rest.partition(" ")
    array = np.ones(LARGE if action == "send" else 1)
    group.timeout = LONG_TIMEOUT_S if backend.rank == 0 else PATIENCE_S
    calls: dict[str, Callable[[], Any]] = {
        "recv": lambda: fd.recv(array, group, int(peer)),
        "send": lambda: fd.send(array, group, int(peer)),
        "allreduce": lambda: fd.allreduce(array, group),
    }

    pulse = Pulse()
    error = work = begun = None
    if circumstance == "amid" or peer in ("later", "now"):
        begun = fd.allreduce(np.ones(1), group, timeout=PATIENCE_S, async_op=True)
    if action == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif peer == "now":
        assert begun is not None
        error = error_of(begun.wait)
    elif action != "away" and peer != "later":
        if circumstance == "beside":
            with ThreadPoolExecutor(1) as pool:
                work = pool.submit(fd.recv, array, group, int(peer), async_op=True).result()
        error = error_of(calls[action])
    lesson = pulse.end()
    if backend.rank == 0 and "stop" in actions:
        os.kill(int(pids[actions.index("stop")]), signal.SIGCONT)
    fd.barrier(backend)
    if work is not None:
        error = error_of(work.wait)
    if begun is not None:
        error_of(begun.wait)
    group.close()
    return error, lesson


def check_who_is_missing(name: str, run: Callable[[], list[Any]]) -> None:
    actions, missing = WAITS[name]
    waiting = [rank for rank, action in enumerate(actions) if action not in NOT_WAITING]
    outcomes = run_undisturbed(run, lambda outcomes: [outcomes[rank][-1] for rank in waiting])
    for rank in waiting:
        told = outcomes[rank][0]
        assert (told.kind, told.missing, told.peer) == ("Timeout", missing, missing[0]), told
        assert ("wait for each other" in told.message) == (len(missing) > 1), told
    if name.startswith("chain"):
        told = outcomes[0][0]
        assert f"no data from rank 1, which rank {missing[0]} holds up, for" in told.message, told


@pytest.mark.parametrize(
    ("transport", "name"),
    [("host", name) for name in WAITS] + [("tcp", name) for name in OVER_SOCKETS],
)
def test_those_are_named_at_whom_the_waits_end(transport: str, name: str) -> None:
    world_size = len(WAITS[name][0])
    check_who_is_missing(
        name, lambda: run_ranks(world_size, wait_for_others, name, backend=transport)
    )


@pytest.mark.parametrize("name", IN_THREADS)
def test_those_are_named_at_whom_the_waits_of_threads_end(name: str) -> None:
    world_size = len(WAITS[name][0])

    def run() -> list[Any]:
        with ThreadPoolExecutor(world_size) as pool:
            group = fd.SimulatedBackend.create_group(world_size)
            outcomes = list(pool.map(wait_for_others, group, [name] * world_size))
        for backend in group:
            backend.close()
        return outcomes

    check_who_is_missing(name, run)


def wait_for_one_stopped_in_a_barrier(backend: fd.Backend) -> Told | None:
    pids = fd.all_gather(np.array([os.getpid()]), backend)
    error = work = None
    group = backend.split(range(3))
    assert group is not None
    with group:
        if backend.rank == 1:
            # Its thread sleeps until a message comes, from whomever.
            work = fd.recv(np.empty(1), group, 0, async_op=True)
        if backend.rank == 2:
            for peer in (0, 1):
                fd.recv(np.empty(0), backend, peer)
                while state_of(int(pids[peer])) != "S":  # until it sleeps in its barrier
                    os.sched_yield()
            group.timeout = TIMEOUT_S
            os.kill(int(pids[1]), signal.SIGSTOP)
            error = error_of(lambda: (fd.barrier(group), fd.recv(np.empty(1), group, 1)))
            os.kill(int(pids[1]), signal.SIGCONT)
        else:
            fd.send(np.empty(0), backend, 2)
            with contextlib.suppress(fd.Timeout):
                fd.barrier(group)
        fd.barrier(backend)
        if work is not None:
            error_of(work.wait)
    return error


def test_a_rank_that_was_stopped_in_a_wait_that_is_over_is_missing() -> None:
    error = run_ranks(3, wait_for_one_stopped_in_a_barrier, backend="host")[2]
    assert error is not None
    assert (error.kind, error.missing) == ("Timeout", (1,)), error
    assert "deadlock" not in error.message


def outlast_a_stopped_rank(
    backend: fd.HostBackend, op: str, count: int
) -> tuple[Told, float, Lesson]:
    pulse = Pulse()
    call = call_of(op, backend, count)
    pids = fd.all_gather(np.array([os.getpid()]), backend)
    victim = backend.world_size - 1
    if backend.rank == victim:
        # From another thread, at any moment of the calls that follow.
        threading.Timer(0.02, os.kill, [os.getpid(), signal.SIGSTOP]).start()
    else:
        backend.timeout = LONG_TIMEOUT_S

    def repeat() -> None:
        while True:
            start_s[0] = time.monotonic()
            call()

    start_s = [0.0]
    error = error_of(repeat)
    lesson = pulse.end()
    if backend.rank == 0:
        while state_of(int(pids[victim])) != "T":
            os.sched_yield()  # it may have been missing before it stopped
        os.kill(int(pids[victim]), signal.SIGCONT)
    return error, lesson.learnt_s - start_s[0], lesson


def run_beside_a_stopped_rank(op: str, count: int, world_size: int, transport: str) -> list[Any]:
    return run_undisturbed(
        lambda: run_ranks(world_size, outlast_a_stopped_rank, op, count, backend=transport),
        lambda outcomes: [outcome[-1] for outcome in outcomes[:-1]],
    )


@pytest.mark.parametrize("count", [1, LARGE], ids=["small", "large"])
@pytest.mark.parametrize("op", ["allreduce", "broadcast", "gather", "reduce_scatter", "all_to_all"])
def test_a_stopped_rank_is_named(op: str, count: int) -> None:
    outcomes = run_beside_a_stopped_rank(op, count, 3, "host")
    for error, elapsed_s, _ in outcomes[:2]:
        assert (error.kind, error.peer) == ("Timeout", 2), error
        assert elapsed_s < SOON_S
    told_late, _, _ = outcomes[2]
    assert told_late.kind == "Timeout", told_late
    assert "gave up waiting for this rank" in told_late.message


@pytest.mark.parametrize("op", ["allreduce", "broadcast"])
def test_over_sockets_all_name_the_stopped_rank_and_not_their_neighbours(op: str) -> None:
    # Little enough to be over in time, however busy the machine is, where nobody has stopped.
    outcomes = run_beside_a_stopped_rank(op, LARGE // 10, 4, "tcp")
    for error, elapsed_s, _ in outcomes[:3]:
        assert (error.kind, error.missing) == ("Timeout", (3,)), error
        assert elapsed_s < SOON_S


def queue_behind_a_long_wait(backend: fd.Backend, fifo: str) -> list[tuple[Told, float]]:
    file = meet_over(backend, fifo)
    if backend.rank == 1:
        assert os.read(file, 1) == b""
        return []
    work = fd.barrier(backend, async_op=True)
    in_time = timed_error_of(lambda: work.wait(TIMEOUT_S))
    while not in_time[0].missing:  # it has yet to begin
        in_time = timed_error_of(lambda: work.wait(TIMEOUT_S))
    assert not work.is_completed(), "wait(timeout) must not cancel"
    queued = timed_error_of(lambda: fd.allreduce(np.ones(1), backend, timeout=TIMEOUT_S))
    behind = timed_error_of(work.wait)
    os.close(file)
    return [in_time, queued, behind]


@pytest.mark.parametrize("transport", ["host", "tcp"])
def test_a_call_behind_another_keeps_its_own_timeout(transport: str, fifo: str) -> None:
    outcomes, _ = run_ranks(2, queue_behind_a_long_wait, fifo, backend=transport)
    for error, elapsed_s in outcomes:
        assert (error.kind, error.missing) == ("Timeout", (1,)), error
        assert elapsed_s < SOON_S
    queued, _ = outcomes[1]
    assert "no data from rank 1" in queued.message, queued
    assert "for 0.0 s" not in queued.message, queued


def give_up_in_a_collective(backend: fd.Backend, fifo: str) -> list[Told]:
    file = meet_over(backend, fifo)
    if backend.rank != 0:
        assert os.read(file, 1) == b""
        return []
    works = [fd.allreduce(np.ones(LARGE), backend, async_op=True, timeout=TIMEOUT_S)]
    works.append(fd.barrier(backend, async_op=True))
    errors = [error_of(work.wait) for work in reversed(works)]
    os.close(file)
    return errors


def give_up_in_a_receive(backend: fd.Backend, fifo: str) -> list[Told]:
    file = meet_over(backend, fifo)
    if backend.rank != 0:
        assert os.read(file, 1) == b""
        return []
    works = [
        fd.recv(np.empty(LARGE), backend, 1, async_op=True, timeout=TIMEOUT_S),
        fd.recv(np.empty(LARGE), backend, 2, async_op=True),
    ]
    errors = [error_of(work.wait) for work in reversed(works)]
    os.close(file)
    return errors


@pytest.mark.parametrize("transport", ["host", "tcp"])
@pytest.mark.parametrize("give_up", [give_up_in_a_collective, give_up_in_a_receive])
def test_a_call_ended_by_another_of_its_rank_is_not_said_to_have_given_up(
    transport: str, give_up: Callable[..., list[Told]], fifo: str
) -> None:
    (ended, gave_up), *_ = run_ranks(3, give_up, fifo, backend=transport)
    assert (ended.kind, gave_up.kind) == ("Timeout", "Timeout")
    assert ended.missing == gave_up.missing
    assert "another call of this rank gave up waiting for rank" in ended.message, ended
    assert "no data from rank" in gave_up.message, gave_up


def wait_beside_another_thread(backend: fd.Backend, fifo: str) -> list[Told]:
    file = meet_over(backend, fifo)
    if backend.rank == 1:
        assert os.read(file, 1) == b""
        return []
    errors: list[Told] = []
    thread = threading.Thread(
        target=lambda: errors.append(error_of(lambda: fd.barrier(backend, timeout=PATIENCE_S)))
    )
    thread.start()
    # Whichever is first in, the other waits for it, and this one gives up.
    errors.append(error_of(lambda: fd.barrier(backend, timeout=TIMEOUT_S)))
    thread.join(PATIENCE_S)
    os.close(file)
    return errors


@pytest.mark.parametrize("transport", ["host", "tcp"])
def test_a_thread_that_never_got_its_turn_ends_the_group(transport: str, fifo: str) -> None:
    errors, _ = run_ranks(2, wait_beside_another_thread, fifo, backend=transport)
    assert len(errors) == 2
    assert {error.kind for error in errors} <= {"Timeout", "LockPoisoned"}, errors
    for error in errors:
        is_about_a_turn = "is inside a call of the same group" in error.message
        assert is_about_a_turn == ("Let that call end first" in error.message), error


# What two ranks call, where they should call the same.
DISAGREEMENTS: dict[str, tuple[Callable[[fd.Backend], Any], Callable[[fd.Backend], Any]]] = {
    "op": (lambda b: fd.allreduce(np.ones(4), b), lambda b: fd.broadcast(np.ones(4), b)),
    "barrier": (lambda b: fd.barrier(b), lambda b: fd.allreduce(np.ones(4), b)),
    "count": (lambda b: fd.allreduce(np.ones(4), b), lambda b: fd.allreduce(np.ones(5), b)),
    "large count": (
        lambda b: fd.allreduce(np.ones(LARGE), b),
        lambda b: fd.allreduce(np.ones(LARGE + 1), b),
    ),
    "empty": (lambda b: fd.allreduce(np.ones(0), b), lambda b: fd.allreduce(np.ones(1), b)),
    "dtype of one size": (
        lambda b: fd.allreduce(np.ones(4, np.int64), b),
        lambda b: fd.allreduce(np.ones(4), b),
    ),
    "dtype of one nbytes": (
        lambda b: fd.broadcast(np.ones(4, np.float64), b),
        lambda b: fd.broadcast(np.ones(8, np.float32), b),
    ),
    "reduce op": (
        lambda b: fd.allreduce(np.ones(4), b, fd.ReduceOp.SUM),
        lambda b: fd.allreduce(np.ones(4), b, fd.ReduceOp.MEAN),
    ),
    "root of broadcast": (
        lambda b: fd.broadcast(np.ones(4), b, root=0),
        lambda b: fd.broadcast(np.ones(4), b, root=1),
    ),
    "root of reduce": (
        lambda b: fd.reduce(np.ones(4), b, root=0),
        lambda b: fd.reduce(np.ones(4), b, root=1),
    ),
    "root of gather": (
        lambda b: fd.gather(np.ones(4), b, root=1),
        lambda b: fd.gather(np.ones(4), b, root=0),
    ),
    "order": (lambda b: fd.all_gather(np.ones(4), b), lambda b: fd.reduce_scatter(np.ones(8), b)),
    "tag": (
        lambda b: fd.allreduce(np.ones(4), b, tag=1),
        lambda b: fd.allreduce(np.ones(4), b, tag=2),
    ),
    "even and uneven": (
        lambda b: fd.all_to_all(np.ones(4), b),
        lambda b: fd.all_to_all(np.ones(4), b, send_counts=[2, 2], recv_counts=[2, 2]),
    ),
    "uneven counts": (
        lambda b: fd.all_to_all(np.ones(4), b, send_counts=[1, 3], recv_counts=[1, 2]),
        lambda b: fd.all_to_all(np.ones(4), b, send_counts=[1, 3], recv_counts=[3, 3]),
    ),
}


def disagree(backend: fd.Backend) -> list[Told]:
    errors = []
    for calls in DISAGREEMENTS.values():
        errors.append(error_of(lambda call=calls[backend.rank]: call(backend)))  # type: ignore[misc]
        assert fd.allreduce(np.ones(3), backend).tolist() == [2.0] * 3
    return errors


@pytest.mark.parametrize("transport", ["host", "tcp"])
def test_every_disagreement_is_told_to_both_ranks_and_ends_nothing(transport: str) -> None:
    outcomes = run_ranks(2, disagree, backend=transport)
    for kind, left, right in zip(DISAGREEMENTS, *outcomes, strict=True):
        assert (left.kind, right.kind) == ("CollectiveMismatch", "CollectiveMismatch"), kind
        first_lines = [told.message.splitlines()[0].partition(": ")[2] for told in (left, right)]
        assert "rank 0" in first_lines[0], kind
        assert "rank 1" in first_lines[0], kind
        assert first_lines[0] == first_lines[1], kind
