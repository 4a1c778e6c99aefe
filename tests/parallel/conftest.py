"""What the tests of parallel training share."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from typing import Any

import pytest

import ferro_dist as fd

OnRanks = Callable[..., list[Any]]


@pytest.fixture
def on_ranks() -> OnRanks:
    """Run ``body(backend, *arguments)`` on each rank of a simulated group.

    Returns what the bodies return, by rank, or raises the first error of any.
    """

    def run(world_size: int, body: Callable[..., Any], *arguments: Any) -> list[Any]:
        def rank(backend: Any) -> Any:
            # Left by an error, the group is closed: peers that wait are told.
            with backend:
                return body(backend, *arguments)

        group = fd.SimulatedBackend.create_group(world_size)
        with ThreadPoolExecutor(world_size) as threads:
            ranks = [threads.submit(rank, backend) for backend in group]
            done, _ = wait(ranks, return_when=FIRST_EXCEPTION)
            failed = [future for future in ranks if future in done and future.exception()]
        return [future.result() for future in failed or ranks]

    return run
