"""A rank is killed: every other rank says so, and names the same one."""

from __future__ import annotations

import os
import random
import select
import signal
import socket
import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from fault_injection import (
    COLLECTIVES,
    MESSAGES,
    PATIENCE_S,
    Told,
    call_of,
    die,
    die_within,
    error_of,
    meet,
    public_name,
    told,
)

import ferro_dist as fd
from ferro_dist.errors import DistributedError
from ferro_dist.rendezvous.machine import peer_credentials
from ferro_dist.testing import RankDeath, run_ranks

SMALL, LARGE = 1, 3_000_000  # floats: one cache line, and dozens of rounds of staging


def repeat_until_error(
    backend: fd.Backend, op: str, count: int, victim: int, delay_s: float
) -> Told:
    call = call_of(op, backend, count)
    meet(backend, victim)
    if backend.rank == victim:
        die_within(delay_s)
    return repeat(call)


def repeat(call: Callable[[], Any]) -> Told:
    try:
        while True:
            call()
    except DistributedError as error:
        return told(error)


def check_survivors(outcomes: Sequence[Any], victim: int, op: str = "") -> list[Told]:
    assert outcomes[victim] == RankDeath(-signal.SIGKILL)
    survivors = [outcome for rank, outcome in enumerate(outcomes) if rank != victim]
    for outcome in survivors:
        assert (outcome.kind, outcome.peer) == ("PeerLostError", victim), outcome
        assert f"rank {victim} died" in outcome.message
        assert outcome.sequence is not None
        if op:
            assert outcome.op == op
            assert outcome.message.startswith(f"{op} #{outcome.sequence} failed on rank")
    return survivors


def a_moment() -> random.Random:
    """Return a source of moments, the same in every run of a test."""
    return random.Random(os.environ["PYTEST_CURRENT_TEST"])


@pytest.mark.parametrize("count", [SMALL, LARGE], ids=["small", "large"])
@pytest.mark.parametrize("world_size", [2, 3, 4])
@pytest.mark.parametrize("op", COLLECTIVES)
def test_survivors_name_a_rank_killed_in_a_collective(op: str, world_size: int, count: int) -> None:
    moment = a_moment()
    victim = moment.randrange(world_size)
    outcomes = run_ranks(
        world_size, repeat_until_error, op, count, victim, moment.uniform(0, 0.02), may_die=[victim]
    )
    survivors = check_survivors(outcomes, victim, public_name(op))
    sequences = [outcome.sequence for outcome in survivors if outcome.sequence is not None]
    assert max(sequences) - min(sequences) <= 1, "no rank gets further ahead than one collective"


@pytest.mark.parametrize("count", [SMALL, LARGE], ids=["small", "large"])
@pytest.mark.parametrize("op", MESSAGES)
def test_survivors_name_a_rank_killed_while_messages_travel(op: str, count: int) -> None:
    moment = a_moment()
    world_size = 2 if op == "send_recv" else moment.choice([2, 3, 4])
    victim = moment.randrange(world_size)
    outcomes = run_ranks(
        world_size, repeat_until_error, op, count, victim, moment.uniform(0, 0.02), may_die=[victim]
    )
    check_survivors(outcomes, victim)


@pytest.mark.parametrize("count", [SMALL, LARGE], ids=["small", "large"])
@pytest.mark.parametrize("op", ["allreduce", "barrier", "broadcast", "send_recv"])
def test_survivors_over_tcp_name_the_killed_rank(op: str, count: int) -> None:
    moment = a_moment()
    world_size = 2 if op == "send_recv" else 3
    victim = moment.randrange(world_size)
    outcomes = run_ranks(
        world_size,
        repeat_until_error,
        op,
        count,
        victim,
        moment.uniform(0, 0.05),
        may_die=[victim],
        backend="tcp",
    )
    check_survivors(outcomes, victim)


def wait_for_a_rank_that_dies_idle(backend: fd.Backend, op: str) -> Told:
    meet(backend, 1)
    if backend.rank == 1:
        # The others are in their call by then, or on their way to it.
        die_within(0.01)
        threading.Event().wait(PATIENCE_S)
    return error_of(call_of(op, backend, SMALL))


@pytest.mark.parametrize("transport", ["host", "tcp"])
@pytest.mark.parametrize("op", ["allreduce", "barrier"])
def test_survivors_name_a_rank_killed_outside_the_group(op: str, transport: str) -> None:
    outcomes = run_ranks(3, wait_for_a_rank_that_dies_idle, op, may_die=[1], backend=transport)
    check_survivors(outcomes, 1, op)


def receive_from_the_dead_and_from_the_silent(backend: fd.Backend) -> Told:
    meet(backend, 2)
    if backend.rank == 2:
        die_within(0.01)
        threading.Event().wait(PATIENCE_S)
    # Ranks 0 and 1 wait for each other: what they learn does not come from a broken channel.
    return error_of(lambda: fd.recv(np.empty(4), backend, 1 - backend.rank))


@pytest.mark.parametrize("transport", ["host", "tcp"])
def test_a_receive_from_a_living_rank_ends_when_another_rank_dies(transport: str) -> None:
    outcomes = run_ranks(
        3, receive_from_the_dead_and_from_the_silent, may_die=[2], backend=transport
    )
    check_survivors(outcomes, 2, "recv")


def call_after_a_death(backend: fd.Backend, fifo: str) -> list[Told]:
    # Rank 0 alone writes to it, so that its end is seen as the end of the file.
    file = os.open(fifo, os.O_WRONLY if backend.rank == 0 else os.O_RDONLY)
    meet(backend, 0)
    if backend.rank == 0:
        die()
    assert os.read(file, 1) == b""
    os.close(file)
    return [error_of(lambda: fd.allreduce(np.ones(1), backend)) for _ in range(2)]


@pytest.mark.parametrize("transport", ["host", "tcp"])
def test_the_first_call_after_a_death_tells_of_it_and_later_ones_refuse(
    transport: str, fifo: str
) -> None:
    outcomes = run_ranks(3, call_after_a_death, fifo, may_die=[0], backend=transport)
    check_survivors([outcomes[0], outcomes[1][0], outcomes[2][0]], 0, "allreduce")
    for _, later in outcomes[1:]:
        assert (later.kind, later.peer, later.cause) == ("LockPoisoned", 0, "PeerLostError")


def hold_works_over_a_death(backend: fd.Backend, victim: int) -> list[Told]:
    meet(backend, victim)
    peer = 1 - backend.rank if backend.rank < 2 else 0
    if backend.rank == victim:
        die_within(0.02)
        threading.Event().wait(PATIENCE_S)
    large = np.ones(LARGE, np.float32)
    works = [
        fd.recv(np.empty(3), backend, victim, async_op=True),
        fd.recv(np.empty(3), backend, peer, async_op=True),
        fd.allreduce(large, backend, async_op=True),
        fd.allreduce(np.ones(2), backend, async_op=True),
        fd.barrier(backend, async_op=True),
    ]
    outcomes = [error_of(work.wait) for work in works]
    assert all(work.is_completed() for work in works)
    again = [error_of(work.wait) for work in works]
    assert [outcome.kind for outcome in again] == ["PeerLostError"] * len(works)
    return outcomes


@pytest.mark.parametrize("transport", ["host", "tcp"])
def test_all_pending_work_ends_with_the_same_error_on_every_survivor(transport: str) -> None:
    outcomes = run_ranks(3, hold_works_over_a_death, 2, may_die=[2], backend=transport)
    for told_by_works in outcomes[:2]:
        for outcome in told_by_works:
            assert (outcome.kind, outcome.peer) == ("PeerLostError", 2), outcome
        ops = [outcome.op for outcome in told_by_works]
        assert ops == ["recv", "recv", "allreduce", "allreduce", "barrier"]


def outlive_a_parent(backend: fd.Backend, fifo: str) -> Told:
    meet(backend, 1)
    if backend.rank == 1:
        lifeline = os.open(fifo, os.O_RDONLY)
        if os.fork() == 0:
            # The child keeps what it inherited of the victim until the test lets it go.
            os.read(lifeline, 1)
            os._exit(0)
        die_within(0.01)
    return repeat(call_of("allreduce", backend, SMALL))


@pytest.mark.parametrize("transport", ["host", "tcp"])
def test_a_living_child_does_not_hide_the_death_of_its_parent(transport: str, fifo: str) -> None:
    lifeline = os.open(fifo, os.O_RDWR)
    try:
        outcomes = run_ranks(3, outlive_a_parent, fifo, may_die=[1], backend=transport)
    finally:
        os.close(lifeline)
    check_survivors(outcomes, 1, "allreduce")


def outlive_a_rank_with_much_memory(backend: fd.Backend) -> Told:
    if backend.rank == 0:
        resident = np.ones(1 << 27, np.float32)  # 512 MiB, every page touched
        assert resident[-1] == 1
    meet(backend, 0)
    if backend.rank == 0:
        die_within(0.01)
    return repeat(call_of("allreduce", backend, SMALL))


@pytest.mark.parametrize("transport", ["host", "tcp"])
def test_survivors_name_a_rank_killed_with_much_memory(transport: str) -> None:
    outcomes = run_ranks(2, outlive_a_rank_with_much_memory, may_die=[0], backend=transport)
    check_survivors(outcomes, 0, "allreduce")


def outlive_two(backend: fd.Backend) -> Told:
    other = fd.broadcast(np.array([os.getpid()]), backend, 2)
    meet(backend, 1)
    if backend.rank == 1:
        # Only this rank knows that all have met: it takes the other along.
        threading.Timer(0.01, die_with, (int(other[0]),)).start()
    return repeat(call_of("allreduce", backend, LARGE))


def die_with(other: int) -> None:
    os.kill(other, signal.SIGKILL)
    die()


def test_survivors_of_two_deaths_name_the_same_one() -> None:
    outcomes = run_ranks(4, outlive_two, may_die=[1, 2])
    assert all(isinstance(outcomes[victim], RankDeath) for victim in (1, 2))
    told_by_survivors = [outcomes[0], outcomes[3]]
    assert [outcome.kind for outcome in told_by_survivors] == ["PeerLostError"] * 2
    assert outcomes[0].peer in (1, 2)
    assert outcomes[0].peer == outcomes[3].peer


def die_before_the_segment_comes(rank: int, world_size: int, addr: str) -> Told:
    if rank == 0:
        send_fds = socket.send_fds

        def send_late(sock: socket.socket, *what: Any) -> int:
            socket.send_fds = send_fds
            pid, _ = peer_credentials(sock)
            os.kill(pid, signal.SIGKILL)
            ended = select.poll()
            ended.register(sock, 0)
            assert ended.poll(PATIENCE_S * 1e3)
            return send_fds(sock, *what)

        socket.send_fds = send_late  # type: ignore[assignment]
    return error_of(lambda: fd.HostBackend(rank, world_size, addr, timeout=PATIENCE_S))


def test_a_rank_that_dies_before_the_segment_comes_is_named() -> None:
    outcomes = run_ranks(3, die_before_the_segment_comes, backend="none", may_die=[1, 2])
    victim = outcomes.index(RankDeath(-signal.SIGKILL))
    survivors = [outcome for rank, outcome in enumerate(outcomes) if rank != victim]
    assert [(each.kind, each.peer) for each in survivors] == [("PeerLostError", victim)] * 2


def outlive_a_rank_of_two_groups(backend: fd.Backend) -> list[Told]:
    low, high = backend.split([0, 1]), backend.split([2, 3])
    pair = low or high
    assert pair is not None
    meet(backend, 3)
    if backend.rank == 3:
        die_within(0.01)
    everybody = repeat(call_of("allreduce", backend, SMALL))
    if backend.rank < 2:
        # Nobody of this group died.
        assert fd.allreduce(np.ones(1), pair).tolist() == [2.0]
        pair.close()
        return [everybody]
    return [everybody, repeat(call_of("allreduce", pair, SMALL))]


@pytest.mark.parametrize("transport", ["host", "tcp"])
def test_a_death_ends_only_the_groups_that_the_rank_was_in(transport: str) -> None:
    outcomes = run_ranks(4, outlive_a_rank_of_two_groups, may_die=[3], backend=transport)
    check_survivors([*(outcome[0] for outcome in outcomes[:3]), outcomes[3]], 3)
    in_pair = outcomes[2][1]
    assert (in_pair.kind, in_pair.peer) == ("PeerLostError", 1)
