"""What only groups of processes have: how they come to be."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest

import ferro_dist as fd
from ferro_dist import rendezvous
from ferro_dist._native.host import create_segment
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

    def record(step: Callable[..., Any]) -> Callable[..., Any]:
        def recorded(*args: Any) -> Any:
            timeouts.append(args[-2])
            return step(*args)

        return recorded

    backend.all_gather, backend.batch = record(backend.all_gather), record(backend.batch)
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


def cores_of_a_rank(backend: fd.Backend) -> float:
    return backend.cores_per_rank


def test_ranks_of_one_machine_compete_for_its_cores_also_over_tcp() -> None:
    together, apart = (run_ranks(3, cores_of_a_rank, backend=name) for name in ("host", "tcp"))
    assert apart == together
