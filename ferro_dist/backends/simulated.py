"""Ranks as threads of one process: for tests, teaching and notebooks."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence

from ferro_dist._native.host import Communicator
from ferro_dist.backends import results
from ferro_dist.backends.engine import EngineBackend
from ferro_dist.errors import InvalidWorldSize

__all__ = ["SimulatedBackend"]


class SimulatedBackend(EngineBackend):
    """One rank of a group whose ranks are threads of this process.

    It is the engine of `HostBackend`, with the same algorithms, checks and errors,
    over memory that the threads share anyway. Each rank's calls are made by a thread
    of its own; one thread cannot play two ranks, as each would wait for the other.
    """

    name = "simulated"

    def __init__(self, communicator: Communicator, siblings: _Siblings) -> None:
        super().__init__(communicator)
        self._siblings = siblings
        self._num_splits = 0

    @classmethod
    def create_group(cls, world_size: int, *, timeout: float = 300.0) -> list[SimulatedBackend]:
        """Make all ranks of a group, one for each thread that will play one.

        Parameters
        ----------
        world_size : int
        timeout : float
            Seconds after which a blocking call gives up.

        Returns
        -------
        list of SimulatedBackend, by rank
        """
        if isinstance(world_size, bool) or not isinstance(world_size, int) or world_size < 1:
            raise InvalidWorldSize(f"world_size must be a positive integer, not {world_size!r}.")
        num_cores = len(os.sched_getaffinity(0))
        siblings = _Siblings()
        return [
            cls(communicator, siblings)
            for communicator in Communicator.create_group(world_size, num_cores, timeout, results)
        ]

    def split(
        self, members: Sequence[int], timeout: float | None = None
    ) -> SimulatedBackend | None:
        chosen = self._check_members(members, timeout)
        key = self._num_splits
        self._num_splits += 1
        if self.rank == chosen[0]:
            self._siblings.publish(key, self.create_group(len(chosen), timeout=self.timeout))
        self.barrier(False, timeout, 0)
        if self.rank not in chosen:
            return None
        return self._siblings.take(key, chosen.index(self.rank))


class _Siblings:
    """Groups that were split off and wait for their ranks."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._groups: dict[int, dict[int, SimulatedBackend]] = {}

    def publish(self, key: int, group: list[SimulatedBackend]) -> None:
        with self._lock:
            self._groups[key] = dict(enumerate(group))

    def take(self, key: int, rank: int) -> SimulatedBackend:
        with self._lock:
            group = self._groups[key]
            backend = group.pop(rank)
            if not group:
                del self._groups[key]
            return backend
