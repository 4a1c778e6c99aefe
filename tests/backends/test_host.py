"""What only groups of processes have: how they come to be."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ferro_dist as fd
from ferro_dist import rendezvous
from ferro_dist._native.host import create_segment
from ferro_dist.arguments import of_group
from ferro_dist.deadline import Deadline
from ferro_dist.rendezvous.wiring import _Wirer
from ferro_dist.testing import RankDeath, run_ranks

TIMEOUT_S = 60.0


def die_instead(wiring: rendezvous.Wiring) -> rendezvous.Wiring:
    os.kill(os.getpid(), signal.SIGKILL)
    return wiring


def die_while_joining(rank: int, world_size: int, addr: str) -> str:
    """Be killed once all others may have registered with each other."""
    if rank == 1:
        rendezvous.connect(
            rank,
            world_size,
            addr,
            create_segment=create_segment,
            adopt=die_instead,
        )
    started = time.monotonic()
    with pytest.raises(fd.PeerLostError) as raised:
        fd.HostBackend(rank, world_size, addr, timeout=TIMEOUT_S)
    assert raised.value.peer == 1
    return "in time" if time.monotonic() - started < TIMEOUT_S / 2 else "at the timeout"


@pytest.mark.parametrize("world_size", [2, 3])
def test_a_death_before_the_group_stands_is_told_to_all(world_size: int) -> None:
    told = run_ranks(world_size, die_while_joining, backend="none", may_die=[1])
    assert told == ["in time", RankDeath(-signal.SIGKILL), *["in time"] * (world_size - 2)]


def record_the_steps_of_a_split(backend: fd.HostBackend) -> list[float]:
    timeouts: list[float] = []

    gather = backend._gather_for_split

    def recorded(blob: bytes, deadline: Deadline) -> list[bytes]:
        timeouts.append(deadline.remaining_s)
        return gather(blob, deadline)

    backend._gather_for_split = recorded  # type: ignore[method-assign]
    part = backend.split([1, 0], timeout=TIMEOUT_S)
    assert part is not None
    part.close()
    return timeouts


@pytest.mark.parametrize("transport", ["host", "tcp"])
def test_all_steps_of_a_split_have_one_timeout(transport: str) -> None:
    for timeouts in run_ranks(2, record_the_steps_of_a_split, backend=transport):
        assert len(timeouts) > 2
        assert max(timeouts) <= TIMEOUT_S
        assert all(earlier > later for earlier, later in pairwise(timeouts))


def split_while_a_message_is_under_way(backend: fd.HostBackend) -> None:
    x, out = np.array([7]), np.zeros(1, np.int64)
    sent = fd.send(x, backend, 1, async_op=True) if backend.rank == 0 else None
    part = backend.split([0, 1])
    if sent is not None:
        sent.wait()
    if backend.rank == 1:
        assert fd.recv(out, backend, 0)[0] == 7
    if part is not None:
        with part:
            assert fd.allreduce(np.ones(1), part)[0] == 2


# Not in the contract: on a GPU a split comes after the send, in the order of the stream, and so
# waits for the receive that follows it.
@pytest.mark.parametrize("transport", ["host", "tcp"])
def test_messages_under_way_are_not_taken_for_those_of_a_split(transport: str) -> None:
    run_ranks(3, split_while_a_message_is_under_way, backend=transport)


def disagree_and_die_in_a_part(backend: fd.HostBackend) -> list[fd.DistributedError]:
    part = backend.split([3, 1])
    if part is None:
        return []
    errors: list[fd.DistributedError] = []
    with pytest.raises(fd.CollectiveMismatch) as disagreement:
        fd.allreduce(np.ones(1 + part.rank), part)
    errors.append(disagreement.value)
    if part.rank == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(fd.PeerLostError) as death:
        fd.recv(np.ones(1), part, 0)
    errors.append(death.value)
    with part.shrink() as rest:
        assert (rest.global_ranks, rest.survivors) == ((1,), (1,))
    with pytest.raises(fd.PeerLostError) as death:
        fd.recv(np.ones(1), backend, 3)
    errors.append(death.value)
    return errors


@pytest.mark.parametrize("transport", ["host", "tcp"])
def test_errors_in_a_part_of_a_group_name_its_ranks_in_the_whole(transport: str) -> None:
    _, errors, *_ = run_ranks(4, disagree_and_die_in_a_part, backend=transport, may_die=[3])
    disagreement, death, in_the_whole = errors
    assert "allreduce #0 failed on rank 1 of group (3, 1): the ranks disagree" in str(disagreement)
    assert "recv #0 failed on rank 1 of group (3, 1): rank 0 died" in str(death)
    assert disagreement.global_ranks == death.global_ranks == (3, 1)
    assert death.global_ranks[death.peer] == 3
    assert "failed on rank 1: rank 3 died" in str(in_the_whole)
    assert in_the_whole.global_ranks is None


def disagree_on_parts_of_a_part(backend: fd.HostBackend) -> fd.DistributedError | None:
    part = backend.split([2, 1])
    if part is None:
        return None
    with part, pytest.raises(fd.CollectiveMismatch) as disagreement:
        part.split([part.rank])
    return disagreement.value


def shrink_a_part_alone(backend: fd.HostBackend) -> fd.DistributedError | None:
    part = backend.split([2, 1])
    try:
        if part is None or part.rank == 0:
            return None
        with pytest.raises(fd.Timeout) as absence:
            part.shrink(timeout=0.5)
        return absence.value
    finally:
        fd.barrier(backend)


def test_errors_of_a_split_name_the_part_of_a_group_that_was_to_be_split() -> None:
    _, *errors = run_ranks(3, disagree_on_parts_of_a_part)
    assert [error.global_ranks for error in errors] == [(2, 1), (2, 1)]
    assert all("These are ranks of group (2, 1)." in str(error) for error in errors)


def test_errors_of_shrink_name_the_part_of_a_group_that_was_to_shrink() -> None:
    _, error, _ = run_ranks(3, shrink_a_part_alone, backend="tcp")
    assert (error.missing, error.global_ranks) == ((0,), (2, 1))
    assert "These are ranks of group (2, 1)." in str(error)


def test_errors_in_a_large_part_of_a_group_name_some_of_its_ranks() -> None:
    assert of_group(tuple(range(0, 32, 2))) == f" of group ({', '.join(map(str, range(0, 32, 2)))})"
    assert of_group(tuple(range(1, 1001))) == (
        " of group (1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, ..., 1000)"
    )


def die_while_splitting(backend: fd.HostBackend) -> tuple[str, int | None, str]:
    """Be killed when the members have begun to connect to each other."""
    if backend.rank == 3:
        _Wirer._connect_sockets = lambda *_: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[method-assign]
    try:
        backend.split([3, 0, 2])
        fd.barrier(backend)  # where ranks outside may be by now
    except fd.DistributedError as error:
        return type(error).__name__, error.peer, str(error)
    raise AssertionError("rank 3 did not die")


def test_a_death_in_a_split_is_told_to_all_in_numbers_of_the_parent() -> None:
    *survivors, _ = run_ranks(4, die_while_splitting, backend="tcp", may_die=[3])
    for kind, peer, message in survivors:
        assert (kind, peer) == ("PeerLostError", 3)
        assert "rank 3 died" in message


def fail_while_splitting(backend: fd.HostBackend) -> tuple[int | None, int | None, str]:
    def fail(*_: Any) -> None:
        raise OSError("no luck")

    if backend.rank == 2:
        # While the other one waits for its connection.
        _Wirer._connect_sockets = fail  # type: ignore[method-assign, assignment]
    try:
        assert backend.split([2, 0]) is None
    except fd.Io as error:
        outcome = error.rank, error.peer, str(error)
    else:
        outcome = backend.rank, None, ""
    fd.barrier(backend)  # the group stays usable
    return outcome


def test_a_failure_in_a_split_is_told_in_numbers_of_the_parent() -> None:
    first, second, third = run_ranks(3, fail_while_splitting, backend="tcp")
    assert first[:2] == (0, 2)
    assert "new group are [2, 0] of this one" in first[2]
    assert second == (1, None, "")
    assert third[0] == 2
    assert "no luck" in third[2]


def lack_descriptors(rank: int, world_size: int, addr: str) -> tuple[int | None, str]:
    if rank == 1:
        in_use = len(os.listdir("/proc/self/fd"))
        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (in_use + 6, hard))
    with pytest.raises(fd.Io) as raised:
        fd.TcpBackend(rank, world_size, addr, timeout=TIMEOUT_S)
    return raised.value.peer, str(raised.value)


def test_a_rank_that_lacks_descriptors_is_named_to_the_others() -> None:
    first, (_, own), third = run_ranks(3, lack_descriptors, backend="none")
    assert "oo many open files" in own
    for peer, message in (first, third):
        assert peer == 1
        assert "rank 1 failed" in message
        assert "oo many open files" in message


def limit_address_space(nbytes: int) -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (nbytes, hard))


def address_space_in_use() -> int:
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()


def reduce_under_a_limit(rank: int, world_size: int, addr: str) -> list[float]:
    limit_address_space(address_space_in_use() + (1 << 30))
    with fd.HostBackend(rank, world_size, addr, timeout=TIMEOUT_S) as backend:
        x = fd.empty((1000,), "float32", backend)
        x[:] = 1
        with contextlib.ExitStack() as stack:
            groups: list[fd.Backend] = [backend]
            for _ in range(5):
                part = backend.split(range(world_size))
                assert part is not None
                groups.append(stack.enter_context(part))
            return [float(fd.allreduce(x, group)[0]) for group in groups]


def test_symmetric_memory_reserves_no_more_than_a_part_of_a_limited_address_space() -> None:
    assert run_ranks(2, reduce_under_a_limit, backend="none") == [[2] * 6] * 2


def reserved_by_a_group(backend: fd.HostBackend) -> int:
    before = address_space_in_use()
    part = backend.split(range(backend.world_size))
    assert part is not None
    with part:
        return address_space_in_use() - before


def test_a_group_leaves_address_space_for_others() -> None:
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    for reserved in run_ranks(4, reserved_by_a_group):
        assert reserved < max(3 << 40, 3 * memory)


def lack_address_space(rank: int, world_size: int, addr: str) -> tuple[str, str]:
    if rank == 1:
        limit_address_space(address_space_in_use() + (64 << 20))
    with pytest.raises((MemoryError, fd.Io)) as raised:
        fd.HostBackend(rank, world_size, addr, timeout=TIMEOUT_S)
    return type(raised.value).__name__, str(raised.value)


def test_a_rank_that_lacks_address_space_is_named_to_the_others() -> None:
    first, second = run_ranks(2, lack_address_space, backend="none")
    assert (first[0], second[0]) == ("Io", "MemoryError")
    assert "rank 1 failed" in first[1]
    for _, message in (first, second):
        assert "ulimit -v" in message


def lack_address_space_for_a_part(backend: fd.HostBackend) -> tuple[int | None, str]:
    if backend.rank == 1:
        limit_address_space(address_space_in_use() + (64 << 20))
    with pytest.raises(fd.Io) as raised:
        backend.split([0, 1])
    limit_address_space(resource.getrlimit(resource.RLIMIT_AS)[1])
    with backend.split([0, 1]) as part:  # type: ignore[union-attr]
        fd.barrier(part)
    return raised.value.rank, str(raised.value)


def test_a_group_outlives_a_split_for_which_a_rank_lacks_address_space() -> None:
    first, second = run_ranks(2, lack_address_space_for_a_part)
    assert (first[0], second[0]) == (0, 1)
    for _, message in (first, second):
        assert "Rank 1 could not make its part of the group" in message
        assert "ulimit -v" in message


def lack_threads(backend: fd.HostBackend) -> str:
    x, out = np.ones((2, 20_000))  # of small ones, the caller's thread does most
    allreduce = fd.allreduce  # whose module is loaded when it is first used
    limit_address_space(address_space_in_use())  # none for another thread's stack
    with pytest.raises(fd.Io) as raised:
        allreduce(x, backend, out=out, async_op=True)
    limit_address_space(resource.getrlimit(resource.RLIMIT_AS)[1])
    assert allreduce(x, backend)[0] == 2
    return str(raised.value)


def test_a_thread_that_cannot_be_started_is_named_and_leaves_the_group_usable() -> None:
    for message in run_ranks(2, lack_threads):
        assert "starting the thread ferro-progress" in message


def cores_of_a_rank(backend: fd.Backend) -> float:
    return backend.cores_per_rank


def test_ranks_of_one_machine_compete_for_its_cores_also_over_tcp() -> None:
    together, apart = (run_ranks(3, cores_of_a_rank, backend=name) for name in ("host", "tcp"))
    assert apart == together


@pytest.mark.parametrize("name", ["host", "tcp"])
def test_init_takes_a_backend_that_is_named_at_run_time(name: str) -> None:
    with fd.init(0, 1, backend=name) as backend:  # mypy would refuse a str that is not declared
        assert backend.name == name


@pytest.mark.parametrize("name", ["mpi", ["host"], None])
def test_init_names_the_backends_that_there_are(name: Any) -> None:
    with pytest.raises(ValueError, match='"host", "tcp" or "hybrid"'):
        fd.init(0, 1, backend=name)


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("gloo", '"host"'),
        ("nccl", '"hybrid"'),
        ("mpi", "MpiBackend"),
        ("simulated", "create_group"),
    ],
)
def test_init_tells_what_goes_by_another_name(name: Any, hint: str) -> None:
    with pytest.raises(ValueError, match=f"not '{name}'; .*{hint}"):
        fd.init(0, 1, backend=name)
