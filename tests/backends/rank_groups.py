"""Groups of ranks that are kept from test to test: starting processes takes longest."""

from __future__ import annotations

import abc
import contextlib
import faulthandler
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from multiprocessing.connection import wait as wait_for_any
from typing import Any

import numpy as np
from backends.contract.case import Group
from backends.contract.suite import CASES
from leaks import nothing_is_left

import ferro_dist as fd
from ferro_dist.testing import run_ranks

__all__ = ["ProcessRanks", "Ranks", "serve", "start"]

# No call waits longer: a case whose ranks go different ways fails with a Timeout.
GROUP_TIMEOUT_S = 60.0
# A rank that not even this ended writes where it stands, and exits.
CASE_DEADLINE_S = 150.0
# All cases of a group together.
JOB_DEADLINE_S = 3600.0


class Ranks(abc.ABC):
    """All ranks of a group, ready to run cases of the contract."""

    @abc.abstractmethod
    def run(self, case: str) -> None:
        """Run a case on all ranks; raise if it fails on any, after which the group is gone."""

    @property
    @abc.abstractmethod
    def is_usable(self) -> bool: ...

    @abc.abstractmethod
    def close(self) -> None: ...


def start(backend: str, world_size: int) -> Ranks:
    if backend == "simulated":
        return ThreadRanks(world_size)
    return ProcessRanks(world_size, serve, backend=backend)


def start_progress(group: Group) -> None:
    """Start the threads that a group has for its asynchronous calls, if they are not small."""
    x = np.zeros(1 << 20, np.uint8)
    fd.allreduce(x, group, async_op=True).wait()
    if group.world_size == 1:
        return
    after, before = (group.rank + 1) % group.world_size, (group.rank - 1) % group.world_size
    fd.sendrecv(x, np.empty_like(x), group, after, before, async_op=True).wait()


class ThreadRanks(Ranks):
    def __init__(self, world_size: int) -> None:
        self._group = fd.SimulatedBackend.create_group(world_size, timeout=GROUP_TIMEOUT_S)
        self._on_each(start_progress)

    def run(self, case: str) -> None:
        self._on_each(CASES[case].run)

    def _on_each(self, body: Any) -> None:
        with ThreadPoolExecutor(len(self._group)) as threads:
            ranks = [threads.submit(body, group) for group in self._group]
            done, _ = wait(ranks, return_when=FIRST_EXCEPTION)
            failed = [rank for rank in ranks if rank in done and rank.exception()]
            if failed:
                self.close()  # or the others would wait for the one that has left
        for rank in failed:
            rank.result()

    @property
    def is_usable(self) -> bool:
        return not self._group[0].is_closed

    def close(self) -> None:
        for group in self._group:
            group.close()


class ProcessRanks(Ranks):
    """The processes of one `run_ranks`, told by pipes what to do next."""

    def __init__(
        self, world_size: int, serve: Callable[..., None], *args: Any, **options: Any
    ) -> None:
        pipes = [Pipe() for _ in range(world_size)]
        self._pipes = [ours for ours, _ in pipes]
        self._theirs = [theirs for _, theirs in pipes]
        self._thread = ThreadPoolExecutor(1)
        self._job: Future[Any] = self._thread.submit(
            *(run_ranks, world_size, serve, self._theirs, *args),
            **{"timeout": JOB_DEADLINE_S, **options},
        )
        self._await_all()

    def run(self, case: str) -> None:
        for pipe in self._pipes:
            pipe.send(case)
        self._await_all()

    def _await_all(self) -> None:
        waiting = list(self._pipes)
        while waiting:
            for pipe in wait_for_any(waiting, 0.1):
                assert isinstance(pipe, Connection)
                pipe.recv()
                waiting.remove(pipe)
            if self._job.done():
                self._job.result()  # raises what a rank has raised

    @property
    def is_usable(self) -> bool:
        return not self._job.done()

    def close(self) -> None:
        for pipe in self._pipes:
            with contextlib.suppress(BrokenPipeError):
                pipe.send(None)
        self._thread.shutdown()
        for pipe in (*self._pipes, *self._theirs):
            pipe.close()
        if not self._job.exception():
            self._job.result()


def serve(group: Group, pipes: list[Connection], has_gpu: bool = False) -> None:
    """Be a rank: run the cases that are named until there are no more."""
    group.timeout = GROUP_TIMEOUT_S
    start_progress(group)
    pipe = pipes[group.rank]
    pipe.send("ready")
    while (name := pipe.recv()) is not None:
        with _exit_after_the_deadline(), nothing_is_left(has_gpu):
            CASES[name].run(group)
        pipe.send("done")


@contextlib.contextmanager
def _exit_after_the_deadline() -> Iterator[None]:
    faulthandler.dump_traceback_later(CASE_DEADLINE_S, exit=True)
    yield
    faulthandler.cancel_dump_traceback_later()
