"""Groups whose survivors go on: who they are is agreed, soon, and never twice."""

from __future__ import annotations

import contextlib
import math
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from fault_injection import PATIENCE_S, SOON_S, Told, die, die_within, error_of
from leaks import nothing_is_left
from namespaces import Host, cabled_hosts

import ferro_dist as fd
from ferro_dist.rendezvous.address import derived_unix_addr, parse_addresses, resolve
from ferro_dist.rendezvous.authentication import Claim, Role, group_digest, introduce
from ferro_dist.rendezvous.event_loop import Dialler, EventLoop
from ferro_dist.testing import RankDeath, run_ranks

TRANSPORTS = ("host", "tcp")
# Half of it is what a silent rank is waited for, and a quarter what is left for the others then.
# A busy machine may keep an honest rank from running that long.
SILENCE_S = 8.0
SHORT_S = 2.0
# Nothing that is known to be dead is waited for, for half of this.
SHRINK_S = 60.0
PORT = 29556

World = tuple[int, tuple[int, ...]]  # size, and who dies

ONE_DEATH: tuple[World, ...] = tuple(
    (size, (victim,)) for size in (2, 3, 4) for victim in range(size)
)
MORE_DEATHS: tuple[World, ...] = (
    (4, (0, 1)),
    (4, (0, 3)),
    (4, (1, 2)),
    (3, (0, 1)),
    (4, (0, 1, 2)),
)


def one_hot_sum(group: fd.Backend, world_size: int, original_rank: int) -> list[float]:
    """Reduce an array that shows who took part."""
    x = np.zeros(world_size)
    x[original_rank] = original_rank + 1
    return list(fd.allreduce(x, group))


def expected_sum(world_size: int, survivors: Sequence[int]) -> list[float]:
    return [float(rank + 1) if rank in survivors else 0.0 for rank in range(world_size)]


def call_until_it_fails(group: fd.Backend) -> Told:
    def repeat() -> None:
        while True:
            fd.allreduce(np.ones(1000), group)

    return error_of(repeat)


def die_among(group: fd.Backend, victims: Sequence[int]) -> Told:
    """Die once all have come; others return what they are told, perhaps on their way."""
    if group.rank in victims:
        fd.allreduce(np.ones(1000), group)
        die()
    return call_until_it_fails(group)


def check_survivors(outcomes: Sequence[Any], victims: Sequence[int]) -> None:
    """Every survivor reports (survivors, rank, sum); they agree, and the rest died."""
    survivors = tuple(rank for rank in range(len(outcomes)) if rank not in victims)
    for rank, outcome in enumerate(outcomes):
        if rank in victims:
            assert outcome == RankDeath(-signal.SIGKILL)
        else:
            members, new_rank, total = outcome
            assert members == survivors
            assert new_rank == survivors.index(rank)
            assert total == expected_sum(len(outcomes), survivors)


def go_on_after_deaths(backend: fd.Backend, victims: Sequence[int]) -> Any:
    rank, world_size = backend.rank, backend.world_size
    error = die_among(backend, victims)
    assert error.kind == "PeerLostError", error
    start_s = time.monotonic()
    with backend.shrink(SHRINK_S) as group:
        total = one_hot_sum(group, world_size, rank)
        assert time.monotonic() - start_s < SOON_S
        assert type(group) is type(backend)
        assert group.timeout == backend.timeout
        assert backend.is_closed
        return group.survivors, group.rank, total


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize(("world_size", "victims"), ONE_DEATH)
def test_the_others_go_on_after_a_death(
    world_size: int, victims: Sequence[int], transport: str
) -> None:
    outcomes = run_ranks(
        world_size, go_on_after_deaths, victims, backend=transport, may_die=victims
    )
    check_survivors(outcomes, victims)


@pytest.mark.parametrize(("world_size", "victims"), MORE_DEATHS)
def test_the_others_go_on_after_several_deaths_at_once(
    world_size: int, victims: Sequence[int]
) -> None:
    check_survivors(run_ranks(world_size, go_on_after_deaths, victims, may_die=victims), victims)


def die_when_connected(backend: fd.Backend) -> Any:
    """Lose rank 1, then rank 2 with its connections to the others of the new group in hand."""
    rank, world_size = backend.rank, backend.world_size
    die_among(backend, [1])
    if rank == 2:
        backend._new_from = lambda _wiring: die()  # type: ignore[attr-defined]
    with backend.shrink(PATIENCE_S) as group:
        return group.survivors, group.rank, one_hot_sum(group, world_size, rank)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_member_that_dies_with_its_new_connections_is_left_out(transport: str) -> None:
    outcomes = run_ranks(4, die_when_connected, backend=transport, may_die=[1, 2])
    check_survivors(outcomes, [1, 2])


def go_on_after_each_death(backend: fd.Backend, victims: Sequence[int]) -> Any:
    rank, world_size = backend.rank, backend.world_size
    group = backend
    for victim in victims:
        die_among(group, [group.rank] if rank == victim else [])
        group = group.shrink(SHRINK_S)
    with group:
        return group.survivors, group.rank, one_hot_sum(group, world_size, rank)


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("victims", [(0, 1), (2, 0), (3, 1)])
def test_a_group_that_has_shrunk_can_shrink_again(victims: Sequence[int], transport: str) -> None:
    outcomes = run_ranks(4, go_on_after_each_death, victims, backend=transport, may_die=victims)
    last = [rank for rank in range(4) if rank not in victims]
    # Numbers of the group before, which had three ranks.
    before = [rank for rank in range(4) if rank != victims[0]]
    for new_rank, rank in enumerate(last):
        assert outcomes[rank][0] == tuple(before.index(member) for member in last)
        assert outcomes[rank][1:] == (new_rank, expected_sum(4, last))


def survive_a_death_within(backend: fd.HostBackend, first: int, second: int, delay_s: float) -> Any:
    """Shrink as often as it takes: who dies late may have become a member."""
    rank, world_size = backend.rank, backend.world_size
    die_among(backend, [first])
    if rank == second:
        die_within(delay_s)
    group = backend
    group.timeout = SILENCE_S
    while True:
        group = group.shrink()
        try:
            while group.world_size == world_size - 1:
                fd.barrier(group)  # until the second one is dead
            total = one_hot_sum(group, world_size, rank)
        except (fd.PeerLostError, fd.Timeout):
            continue
        group.close()
        return total


@pytest.mark.parametrize("delay_ms", [0, 2, 5, 9, 15])
@pytest.mark.parametrize("second", [0, 2])
def test_a_death_while_shrinking_leaves_the_others_one_group(second: int, delay_ms: int) -> None:
    victims = (1, second)
    outcomes = run_ranks(4, survive_a_death_within, 1, second, delay_ms / 1e3, may_die=victims)
    survivors = [rank for rank in range(4) if rank not in victims]
    for rank in survivors:
        assert outcomes[rank] == expected_sum(4, survivors)


def shrink_healthy(backend: fd.Backend) -> Any:
    rank, world_size = backend.rank, backend.world_size
    assert backend.survivors == tuple(range(world_size))
    with backend.shrink(SHRINK_S) as group:
        return group.survivors, group.rank, one_hot_sum(group, world_size, rank)


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_a_healthy_group_becomes_another_of_the_same_ranks(world_size: int, transport: str) -> None:
    check_survivors(run_ranks(world_size, shrink_healthy, backend=transport), ())


def shrink_and_close(backend: fd.Backend) -> None:
    with backend.shrink(SILENCE_S):
        raise fd.DistributedError("the rank went on")


def come_and_get_no_further(backend: fd.HostBackend) -> Told:
    other = backend.split([0, 1])
    assert other is not None
    if backend.rank == 1:
        make = backend._new_from

        def make_late(wiring: Any) -> fd.HostBackend:
            fd.recv(np.empty(0), other, 0)  # rank 0 waits for this rank no more
            return make(wiring)

        backend._new_from = make_late  # type: ignore[method-assign]
    error = error_of(lambda: backend.shrink(timeout=SILENCE_S))
    # For one that is still in the barrier, a rank that ends without a farewell has died.
    with other:
        if backend.rank == 0:
            fd.send(np.empty(0), other, 1)
        fd.barrier(other)
    return error


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_rank_that_came_is_not_said_not_to_have_come(transport: str) -> None:
    error, _ = run_ranks(2, come_and_get_no_further, backend=transport)
    assert (error.kind, error.op, error.missing) == ("Timeout", "shrink", (1,)), error
    assert error.message.startswith("shrink: rank 1 came, but without a connection"), error


def outlive_a_stopped_rank(backend: fd.HostBackend, victim: int) -> Any:
    rank, world_size = backend.rank, backend.world_size
    pids = fd.all_gather(np.array([os.getpid()]), backend)
    if rank == victim:
        os.kill(os.getpid(), signal.SIGSTOP)
        return [call_until_it_fails(backend), error_of(lambda: shrink_and_close(backend))]
    backend.timeout = 0.5
    assert call_until_it_fails(backend).kind == "Timeout"
    try:
        group = backend.shrink(SILENCE_S)
        group.timeout = PATIENCE_S
        with group:
            return group.survivors, group.rank, one_hot_sum(group, world_size, rank)
    except fd.Timeout as error:
        return error.missing
    finally:
        if rank == min({0, 1} - {victim}):
            os.kill(int(pids[victim]), signal.SIGCONT)


@pytest.mark.parametrize(("world_size", "victim"), [(2, 0), (2, 1), (3, 0), (3, 2)])
def test_a_stopped_rank_is_left_out_and_told_so(world_size: int, victim: int) -> None:
    outcomes = run_ranks(world_size, outlive_a_stopped_rank, victim)
    first, late = outcomes[victim]
    assert first.kind in ("Timeout", "ChannelClosed")
    assert late.kind == "LockPoisoned", late
    assert "left out" in late.message
    outcomes[victim] = RankDeath(-signal.SIGKILL)
    check_survivors(outcomes, (victim,))


@pytest.mark.parametrize("victim", [0, 2])
def test_without_shared_memory_a_majority_goes_on(victim: int) -> None:
    outcomes = run_ranks(3, outlive_a_stopped_rank, victim, backend="tcp")
    _, late = outcomes[victim]
    assert late.kind == "Timeout", late
    assert (late.op, late.rank) == ("shrink", victim)
    outcomes[victim] = RankDeath(-signal.SIGKILL)
    check_survivors(outcomes, (victim,))


@pytest.mark.parametrize("victim", [0, 1])
def test_of_two_ranks_without_shared_memory_the_lower_goes_on(victim: int) -> None:
    outcomes = run_ranks(2, outlive_a_stopped_rank, victim, backend="tcp")
    _, late = outcomes[victim]
    if victim == 0:
        assert outcomes[1] == (0,)  # missing: it may go on yet, and does
        assert late.message == "the rank went on"
    else:
        assert outcomes[0] == ((0,), 0, [1.0, 0.0])
        assert late.kind == "Timeout", late


def fail_after_a_death(backend: fd.HostBackend, victim: int, culprit: int) -> Told:
    die_among(backend, [victim])
    if backend.rank == culprit:

        def fail(wiring: Any) -> fd.HostBackend:
            raise OSError("the disk is on fire")

        backend._new_from = fail  # type: ignore[method-assign]
    return error_of(lambda: backend.shrink(PATIENCE_S))


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_failing_survivor_is_named_by_its_rank_in_the_old_group(transport: str) -> None:
    _, first, second, third = run_ranks(4, fail_after_a_death, 0, 2, backend=transport, may_die=[0])
    assert "rank 2 failed" in second.message, second
    for error in (first, third):
        assert (error.kind, error.op, error.peer) == ("Io", "shrink", 2), error
        assert "Ranks 0, 1, ... of the new group are [1, 2, 3] of this one." in error.message


def come_without_a_report(backend: fd.HostBackend) -> Any:
    """Be a rank that stops right after it has proved itself to the coordinator."""
    if backend.rank == 0:
        with backend.shrink(SHORT_S) as group:
            return group.survivors
    wiring = backend._wiring
    key = ("succession", wiring.group_id.hex())
    (address,) = parse_addresses(derived_unix_addr(*key, 0))
    (target,) = resolve(address, wiring.token, math.inf)
    claim = Claim(Role.CONTROL, backend.rank, backend.world_size, group_digest(*key))
    connected: list[socket.socket] = []
    with contextlib.closing(EventLoop()) as loop:
        Dialler(
            loop,
            target,
            lambda be_patient: introduce(wiring.token, claim, 0, be_patient),
            connected.append,
        ).dial()
        assert loop.run_until(lambda: bool(connected), time.monotonic() + PATIENCE_S)
    with connected[0] as sock:
        sock.settimeout(PATIENCE_S)
        with sock.makefile("rb") as file:
            return file.read()


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_rank_that_has_not_said_everything_is_told_that_it_is_left_out(transport: str) -> None:
    """It would take the coordinator for lost, and of two ranks each would go on alone."""
    survivors, answer = run_ranks(2, come_without_a_report, backend=transport)
    assert survivors == (0,)
    assert b"left out. When rank 0 decided" in answer


def shrink_alone(backend: fd.Backend) -> None:
    if backend.rank == 0:
        start_s = time.monotonic()
        with pytest.raises(fd.Timeout, match="no majority") as error:
            backend.shrink(SHORT_S)
        assert error.value.missing == (1, 2)
        # It gives up after half of the time.
        assert SHORT_S / 2 <= error.value.seconds <= time.monotonic() - start_s
    fd.barrier(backend)


def test_a_rank_that_finds_no_majority_tells_how_long_it_waited() -> None:
    run_ranks(3, shrink_alone, backend="tcp")


def leave_one_behind(backend: fd.Backend) -> Any:
    if backend.rank == 2:
        return [
            error_of(lambda: fd.barrier(backend)),
            error_of(lambda: fd.barrier(backend)),
            error_of(lambda: backend.shrink(SILENCE_S)),
        ]
    with backend.shrink(SILENCE_S) as group:
        fd.barrier(group)
        return group.survivors


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_rank_inside_a_call_of_the_old_group_is_told(transport: str) -> None:
    *survivors, errors = run_ranks(3, leave_one_behind, backend=transport)
    assert survivors == [(0, 1), (0, 1)]
    told, again, late = errors
    assert told.kind == again.kind == "LockPoisoned"
    assert "shrink()" in told.message
    assert again.cause == "LockPoisoned"
    assert late.kind == ("LockPoisoned" if transport == "host" else "Timeout"), late


def shrink_after_one_left(backend: fd.Backend, is_interrupted: bool) -> Any:
    rank, world_size = backend.rank, backend.world_size
    if rank == 1:
        fd.allreduce(np.ones(1000), backend)
        if is_interrupted:
            backend.interrupt(KeyError("no such batch"))
        backend.close()
        return error_of(backend.shrink)
    assert call_until_it_fails(backend).kind == "ChannelClosed"
    start_s = time.monotonic()
    with backend.shrink(SHRINK_S) as group:
        assert time.monotonic() - start_s < SOON_S
        return group.survivors, group.rank, one_hot_sum(group, world_size, rank)


@pytest.mark.parametrize("is_interrupted", [False, True], ids=["closed", "interrupted"])
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_rank_that_left_is_not_waited_for(transport: str, is_interrupted: bool) -> None:
    outcomes = run_ranks(3, shrink_after_one_left, is_interrupted, backend=transport)
    assert outcomes[1].kind == "ChannelClosed"
    outcomes[1] = RankDeath(-signal.SIGKILL)
    check_survivors(outcomes, (1,))


def shrink_with_work_under_way(backend: fd.Backend) -> Any:
    rank, world_size = backend.rank, backend.world_size
    if rank == 0:
        fd.allreduce(np.ones(1000), backend)
        die()
    works = [fd.allreduce(np.ones(1000), backend, async_op=True) for _ in range(4)]
    assert error_of(works[-1].wait).kind == "PeerLostError"
    with backend.shrink(SHRINK_S) as group:
        for work in works[1:]:
            assert error_of(work.wait).kind == "PeerLostError"
        return group.survivors, group.rank, one_hot_sum(group, world_size, rank)


def test_work_under_way_ends_with_an_error() -> None:
    outcomes = run_ranks(3, shrink_with_work_under_way, may_die=(0,))
    check_survivors(outcomes, (0,))


def leave_nothing(rank: int, world_size: int, addr: str, transport: str) -> Any:
    kind = {"host": fd.HostBackend, "tcp": fd.TcpBackend}[transport]
    with nothing_is_left():
        backend = kind(rank, world_size, addr)
        outcome = go_on_after_deaths(backend, (1,))
        del backend
    return outcome


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_shrinking_leaves_nothing_behind(transport: str) -> None:
    outcomes = run_ranks(3, leave_nothing, transport, backend="none", may_die=(1,))
    check_survivors(outcomes, (1,))


# Several hosts


@pytest.fixture
def hosts() -> Iterator[list[Host]]:
    with cabled_hosts(2) as hosts:
        yield hosts


def on_its_host(
    rank: int, world_size: int, _: str, hosts: Sequence[Host], body: Callable[..., Any], *args: Any
) -> Any:
    """Put the lower half of the ranks on the first host."""
    hosts[2 * rank // world_size].enter()
    addr = f"{hosts[0].address}:{PORT}"
    with fd.HostBackend(rank, world_size, addr, timeout=PATIENCE_S) as backend:
        return body(backend, *args)


@pytest.mark.parametrize(
    ("world_size", "victims"), [(4, (0,)), (4, (3,)), (4, (0, 1)), (2, (0,)), (2, (1,))]
)
def test_groups_over_hosts_shrink(
    hosts: list[Host], world_size: int, victims: Sequence[int]
) -> None:
    outcomes = run_ranks(
        world_size,
        on_its_host,
        hosts,
        go_on_after_deaths,
        victims,
        backend="none",
        may_die=victims,
    )
    check_survivors(outcomes, victims)


# Ranks that are threads


def play(group: Sequence[fd.Backend], body: Callable[[fd.Backend], Any]) -> list[Any]:
    with ThreadPoolExecutor(len(group)) as pool:
        return list(pool.map(body, group))


@pytest.mark.parametrize("gone", [(), (0,), (1, 2)])
def test_simulated_ranks_that_closed_are_left_out(gone: Sequence[int]) -> None:
    def body(backend: fd.Backend) -> Any:
        rank, world_size = backend.rank, backend.world_size
        if rank in gone:
            backend.close()
            return RankDeath(-signal.SIGKILL)
        with backend.shrink(SHRINK_S) as group:
            return group.survivors, group.rank, one_hot_sum(group, world_size, rank)

    check_survivors(play(fd.SimulatedBackend.create_group(4), body), gone)


def test_a_simulated_rank_that_comes_late_is_told() -> None:
    are_gone = threading.Event()

    def body(backend: fd.Backend) -> Any:
        if backend.rank == 0:
            are_gone.wait(PATIENCE_S)
            with backend:
                return error_of(lambda: backend.shrink(SHRINK_S))
        with backend.shrink(SILENCE_S) as group:
            fd.barrier(group)
            are_gone.set()
            return group.survivors

    late, *survivors = play(fd.SimulatedBackend.create_group(3), body)
    assert late.kind == "LockPoisoned"
    assert "left out" in late.message
    assert survivors == [(1, 2), (1, 2)]
