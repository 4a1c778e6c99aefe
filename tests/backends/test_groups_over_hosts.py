"""Groups over several hosts: shared memory inside, TCP between.

The hosts are network namespaces; see `namespaces`.
"""

from __future__ import annotations

import itertools
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from backends.contract.case import Group
from backends.contract.reference import COLLECTIVES, call, expected, inputs
from backends.contract.suite import CASES, names_for
from fault_injection import (
    SOON_S,
    Lesson,
    Pulse,
    Told,
    call_of,
    die,
    error_of,
    run_undisturbed,
)
from leaks import nothing_is_left
from namespaces import Host, cabled_hosts
from numpy.testing import assert_array_equal

import ferro_dist as fd
from ferro_dist.testing import RankDeath, run_ranks

Layout = tuple[tuple[int, ...], ...]  # the ranks of each host

LAYOUTS: tuple[Layout, ...] = (
    ((0, 1), (2, 3)),
    ((0, 1, 2), (3,)),
    ((0,), (1, 2)),
    ((0, 2), (1, 3)),
    ((0, 3), (1,), (2,)),
)
FOUR_ON_TWO = (LAYOUTS[0], LAYOUTS[1], LAYOUTS[3])
PORT = 29555  # the namespaces are this test's own: nobody else can be there
TIMEOUT_S = 60.0
# What must pass, but not before ranks that a busy machine keeps from running have come.
SHORT_S = 2.0
SHRINK_S = 10.0  # half of it is for ranks that may still come

# float32, about the sizes at which a group over hosts takes another way: what travels with
# the headers, what is worth cutting into one part for each plane, what outgrows every
# window and socket buffer.
COUNTS = (0, 1, 1000, 8192, 8193, 20_000, 300_000)
MANY = 2_000_003


@pytest.fixture
def hosts() -> Iterator[list[Host]]:
    with cabled_hosts(3) as hosts:
        yield hosts


def run_on(
    hosts: Sequence[Host], layout: Layout, body: Callable[..., Any], *args: Any
) -> list[Any]:
    """Call ``body(group, *args)`` on every rank, each on its host; a rank may die."""
    world_size = sum(len(ranks) for ranks in layout)
    return run_ranks(
        world_size,
        on_its_host,
        tuple(hosts),
        layout,
        body,
        args,
        backend="none",
        timeout=8 * TIMEOUT_S,
        may_die=range(world_size),
    )


def on_its_host(
    rank: int,
    world_size: int,
    _: str,
    hosts: Sequence[Host],
    layout: Layout,
    body: Callable[..., Any],
    args: Sequence[Any],
) -> Any:
    host = next(number for number, ranks in enumerate(layout) if rank in ranks)
    hosts[host].enter()
    addr = f"{hosts[0].address}:{PORT}"
    with fd.HostBackend(rank, world_size, addr, timeout=TIMEOUT_S) as group:
        assert hosts_of(group) == layout
        return body(group, *args)


def hosts_of(group: Group) -> Layout:
    """Which ranks share memory: a group keeps it to itself, as it changes no result."""
    return group._wiring.hosts  # type: ignore[no-any-return]


def name_of(layout: Layout) -> str:
    return "|".join("".join(map(str, ranks)) for ranks in layout)


each_layout = pytest.mark.parametrize("layout", LAYOUTS, ids=name_of)


# What is computed and moved


# Equal hosts, unequal ones, and more than two.
@pytest.mark.parametrize("layout", [LAYOUTS[0], LAYOUTS[2], LAYOUTS[4]], ids=name_of)
def test_a_group_over_hosts_keeps_the_contract(hosts: list[Host], layout: Layout) -> None:
    run_on(hosts, layout, keep_the_contract)


def keep_the_contract(group: Group) -> None:
    for name in names_for(group.world_size):
        if CASES[name].library:
            continue  # which library an array is of matters above the transports
        try:
            CASES[name].run(group)
        except BaseException as error:
            raise AssertionError(f"the case {name} failed") from error


@each_layout
def test_collectives_over_hosts_equal_numpy(hosts: list[Host], layout: Layout) -> None:
    run_on(hosts, layout, equal_numpy, COUNTS)


def test_large_collectives_over_hosts_equal_numpy(hosts: list[Host]) -> None:
    # One split into a part for each plane, one not.
    run_on(hosts, LAYOUTS[0], equal_numpy, [MANY], ("allreduce", "broadcast"))
    run_on(hosts, LAYOUTS[1], equal_numpy, [MANY], ("allreduce", "broadcast"))
    run_on(hosts, LAYOUTS[0], equal_numpy, [MANY // 4])


def equal_numpy(group: Group, counts: Sequence[int], ops: Sequence[str] = COLLECTIVES) -> None:
    for op in ops:
        for count in counts:
            root = count % group.world_size
            arrays = inputs(op, group, (count,), "float32")
            y = call(op, group, arrays[group.rank], root=root)
            wanted = expected(op, arrays, group.rank, root=root)
            assert (y is None) == (wanted is None)
            if wanted is not None:
                assert_array_equal(y, wanted)


@each_layout
def test_parts_of_a_group_share_memory_where_they_can(hosts: list[Host], layout: Layout) -> None:
    run_on(hosts, layout, split_every_way, layout)


def split_every_way(group: Group, layout: Layout) -> None:
    first, second = layout[0][0], layout[-1][-1]
    everybody = range(group.world_size)
    for members in (*layout, (first, second), (second, first), tuple(everybody)[1:]):
        part = group.split(members)
        assert (part is None) == (group.rank not in members)
        if part is None:
            continue
        with part:
            places = [
                [members.index(rank) for rank in ranks if rank in members] for ranks in layout
            ]
            assert hosts_of(part) == tuple(sorted(tuple(sorted(p)) for p in places if p))
            assert_array_equal(fd.all_gather(np.array([group.rank]), part), members)
            equal_numpy(part, (5, 100_000))
    fd.barrier(group)


# Disagreeing


@pytest.mark.parametrize("layout", FOUR_ON_TWO, ids=name_of)
def test_a_mismatch_is_raised_on_every_host(hosts: list[Host], layout: Layout) -> None:
    run_on(hosts, layout, disagree)


def disagree(group: Group) -> None:
    for odd, count in itertools.product(range(1, group.world_size), (3, 100_000)):
        disagree_once(group, odd, count)


def disagree_once(group: Group, odd: int, count: int) -> None:
    x = np.full(count, float(group.rank))
    kept = x.copy()
    if group.rank == odd:
        error = error_of(lambda: fd.all_gather(x[:1], group))
    else:
        error = error_of(lambda: fd.allreduce(x, group, out=x))
    assert (error.kind, error.rank) == ("CollectiveMismatch", group.rank)
    assert f"rank 0 called allreduce(sum, float64, count {count})" in error.message
    assert f"rank {odd} called all_gather(float64, count 1)" in error.message
    assert_array_equal(x, kept)
    assert (fd.allreduce(x, group) == sum(range(group.world_size))).all()


# Leaving


def close_and_keep(group: Group) -> None:
    with nothing_is_left():
        part = group.split(range(group.world_size))
        assert part is not None
        fd.barrier(part, async_op=True).wait()
        fd.barrier(group)  # rank 0 ends `part` for all as soon as it misses rank 1
        waiting = threading.Thread(target=error_of, args=[lambda: fd.recv(np.empty(3), part, 1)])
        if part.rank == 0:
            waiting.start()
            waiting.join(0.02)  # where it is by then is left to chance: mostly asleep
        part.close()
        if part.rank == 0:
            waiting.join()
    assert part.is_closed


def test_a_closed_group_over_hosts_that_is_kept_holds_nothing(hosts: list[Host]) -> None:
    run_on(hosts, LAYOUTS[1], close_and_keep)


@pytest.mark.parametrize("leaver", range(4))
def test_a_rank_that_leaves_is_named_on_every_host(hosts: list[Host], leaver: int) -> None:
    for rank, error in enumerate(run_on(hosts, LAYOUTS[0], leave, leaver)):
        if rank != leaver:
            assert (error.kind, error.op, error.rank) == ("ChannelClosed", "allreduce", rank)
            assert error.peer == leaver


def leave(group: Group, leaver: int) -> Told | None:
    x = np.ones(5)
    if group.rank == leaver:
        # Not after a barrier: some might still be inside when the others hear of the end.
        for peer in set(range(group.world_size)) - {leaver}:
            fd.recv(x, group, peer)
        group.close()
        return None
    fd.send(x, group, leaver)
    return error_of(lambda: fd.allreduce(x, group))


# Dying


@pytest.mark.parametrize("victim", range(4))
@pytest.mark.parametrize(
    ("op", "count"),
    [
        ("barrier", 0),
        ("allreduce", 300_000),
        ("all_to_all", 100_000),
        ("send_recv", 100_000),
    ],
)
def test_a_death_is_told_on_every_host(
    hosts: list[Host], tmp_path: Path, victim: int, op: str, count: int
) -> None:
    moment = tmp_path / "died"
    outcomes = run_on(hosts, LAYOUTS[0], outlive, victim, op, count, moment)
    assert outcomes.pop(victim) == RankDeath(-signal.SIGKILL)
    died = float(moment.read_text())
    for error, learnt in outcomes:
        assert (error.kind, error.peer) == ("PeerLostError", victim), error.message
        # News travels in milliseconds, but not to who does not run.
        assert learnt - died < SOON_S


@pytest.mark.parametrize("victim", range(4))
@pytest.mark.parametrize("layout", [LAYOUTS[1], LAYOUTS[4]], ids=name_of)
def test_a_death_is_told_wherever_the_ranks_are(
    hosts: list[Host], tmp_path: Path, layout: Layout, victim: int
) -> None:
    outcomes = run_on(hosts, layout, outlive, victim, "allreduce", 50_000, tmp_path / "died")
    assert outcomes.pop(victim) == RankDeath(-signal.SIGKILL)
    for error, _ in outcomes:
        assert (error.kind, error.peer) == ("PeerLostError", victim), error.message


def outlive(group: Group, victim: int, op: str, count: int, moment: Path) -> tuple[Told, float]:
    """Call the operation again and again until a rank dies; tell of it, and when it was known."""
    repeated = call_of(op, group, count)
    is_under_way = threading.Event()

    def die_under_way() -> None:
        is_under_way.wait()
        moment.write_text(str(time.monotonic()))  # one clock for all: it is one machine
        die()

    if group.rank == victim:
        threading.Thread(target=die_under_way, daemon=True).start()
    error = error_of(lambda: repeat(repeated, is_under_way))
    learnt = time.monotonic()
    assert error_of(lambda: fd.barrier(group)).kind == "LockPoisoned"
    return error, learnt


def repeat(repeated: Callable[[], Any], is_under_way: threading.Event) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    for number in itertools.count():
        repeated()
        if number == 20:
            is_under_way.set()
        assert time.monotonic() < deadline, "the victim is still alive"


def test_a_host_that_dies_is_missed_by_the_other(hosts: list[Host], tmp_path: Path) -> None:
    outcomes = run_on(hosts, LAYOUTS[0], outlive_host, LAYOUTS[0][1])
    assert outcomes[2:] == [RankDeath(-signal.SIGKILL)] * 2
    for error in outcomes[:2]:
        assert (error.kind, error.peer in LAYOUTS[0][1]) == ("PeerLostError", True)


def outlive_host(group: Group, victims: Sequence[int]) -> Told:
    """Let the victims die after the barrier, in which the others may still hear of it."""

    def call_on() -> None:
        fd.barrier(group)
        if group.rank in victims:
            die()
        fd.allreduce(np.ones(5), group)

    return error_of(call_on)


# Falling silent


@pytest.mark.parametrize("victim", range(4))
@pytest.mark.parametrize(("op", "count"), [("barrier", 0), ("allreduce", 300_000)])
def test_a_rank_that_stops_is_named_by_the_timeout_on_every_host(
    hosts: list[Host], victim: int, op: str, count: int
) -> None:
    def run() -> list[Any]:
        outcomes = run_on(hosts, LAYOUTS[0], wait_for_stopped, victim, op, count)
        assert outcomes.pop(victim) == RankDeath(-signal.SIGKILL)
        return outcomes

    outcomes = run_undisturbed(run, lambda outcomes: [outcome[-1] for outcome in outcomes])
    for error, started, lesson in outcomes:
        assert (error.kind, error.op, error.missing) == ("Timeout", op, (victim,)), error.message
        assert lesson.learnt_s - started < SOON_S


@pytest.mark.parametrize("end", [3, 2])
@pytest.mark.parametrize("layout", [LAYOUTS[0], LAYOUTS[3]], ids=name_of)
def test_a_chain_of_messages_is_named_by_its_end_on_every_host(
    hosts: list[Host], layout: Layout, end: int
) -> None:
    outcomes = run_undisturbed(
        lambda: run_on(hosts, layout, wait_in_a_chain, end),
        lambda outcomes: [outcome[-1] for outcome in outcomes[:end]],
    )
    for error, _ in outcomes[:end]:
        assert (error.kind, error.op, error.missing) == ("Timeout", "recv", (end,)), error.message


def wait_in_a_chain(group: Group, end: int) -> tuple[Told, Lesson] | None:
    """Wait for the next rank up to `end`, which only has a collective in the background."""
    outcome = None
    with group.split(range(group.world_size)) as chain:
        work = fd.allreduce(np.ones(1), chain, async_op=True) if group.rank == end else None
        if group.rank < end:
            pulse = Pulse()
            chain.timeout = SHORT_S if group.rank == 0 else TIMEOUT_S
            error = error_of(lambda: fd.recv(np.empty(1), chain, group.rank + 1))
            outcome = error, pulse.end()
        fd.barrier(group)
        if work is not None:
            error_of(work.wait)
    return outcome


def wait_for_stopped(group: Group, victim: int, op: str, count: int) -> tuple[Told, float, Lesson]:
    pulse = Pulse()
    survivors = group.split([rank for rank in range(group.world_size) if rank != victim])
    processes = fd.all_gather(np.array([os.getpid()]), group)
    repeated = call_of(op, group, count)
    repeated()
    if survivors is None:
        os.kill(os.getpid(), signal.SIGSTOP)
    group.timeout = SHORT_S
    started = time.monotonic()
    error = error_of(repeated)
    lesson = pulse.end()
    fd.barrier(survivors)
    if survivors.rank == 0:
        os.kill(processes[victim], signal.SIGKILL)
    survivors.close()
    return error, started, lesson


@pytest.mark.parametrize("layout", LAYOUTS[:2], ids=name_of)
def test_a_cut_cable_is_a_timeout_on_both_sides(hosts: list[Host], layout: Layout) -> None:
    outcomes = run_on(hosts, layout, lose_the_cable, hosts[1], layout[1])
    for rank, (error, elapsed_s, closing_s) in enumerate(outcomes):
        others = layout[0] if rank in layout[1] else layout[1]
        assert (error.kind, error.peer in others) == ("Timeout", True), error.message
        assert elapsed_s < SOON_S
        assert closing_s < SOON_S


def lose_the_cable(group: Group, host: Host, ranks: Sequence[int]) -> tuple[Told, float, float]:
    fd.barrier(group)
    if group.rank == ranks[0]:
        host.cut_cable()
    group.timeout = SHORT_S
    started = time.monotonic()
    error = error_of(lambda: fd.allreduce(np.ones(300_000), group))
    failed = time.monotonic()
    group.close()
    return error, failed - started, time.monotonic() - failed


@pytest.mark.parametrize("kind", ["receive", "send", "allreduce"])
def test_of_hosts_cut_off_from_each_other_one_goes_on(hosts: list[Host], kind: str) -> None:
    layout = ((0, 1), (2, 3))
    outcomes = run_on(hosts, layout, go_on_without_the_others, layout[1], hosts[1].cut_cable, kind)
    assert outcomes == [(0, 1), (0, 1), "Timeout", "Timeout"]


@pytest.mark.skipif(shutil.which("nft") is None, reason="the program nft is not installed")
def test_a_host_behind_a_firewall_is_not_taken_for_dead(hosts: list[Host]) -> None:
    layout = ((0, 1), (2, 3))
    hosts[0].give_up_after(3)  # else a look at the stream is first, and the kernel's reason unknown
    cut = partial(hosts[1].refuse, hosts[0])
    outcomes = run_on(hosts, layout, go_on_without_the_others, layout[1], cut, "send")
    assert outcomes == [(0, 1), (0, 1), "Timeout", "Timeout"]


def go_on_without_the_others(
    group: Group, ranks: Sequence[int], cut: Callable[[], None], kind: str
) -> Any:
    fd.barrier(group)
    if group.rank == 0:
        cut()
    x, opposite = np.ones(3_000_000), (group.rank + 2) % 4
    calls: dict[str, Callable[[], object]] = {
        "receive": lambda: fd.recv(x, group, opposite),  # nothing is on its way
        "send": lambda: fd.send(x, group, opposite),
        "allreduce": lambda: fd.allreduce(x, group),
    }
    error = error_of(calls[kind])
    assert error.kind == "PeerLostError", error.message
    assert "does not answer" in error.message, error.message
    if group.rank in ranks:
        return error_of(lambda: group.shrink(SHRINK_S)).kind
    with group.shrink(SHRINK_S) as rest:
        return rest.survivors
