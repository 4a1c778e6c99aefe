"""For testing code that runs on many ranks: `run_ranks` plays all of them.

>>> def body(backend):
...     return ferro_dist.allreduce(numpy.ones(2), backend).tolist()
>>> run_ranks(2, body)
[[2.0, 2.0], [2.0, 2.0]]

`body` is a module-level function, so that the processes find it by its name.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import secrets
import signal
import time
import traceback
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

__all__ = ["RankDeath", "RankFailed", "run_ranks"]

# From a server that has imported the package already: a process takes milliseconds
# to start, and inherits no thread, lock or descriptor of the caller.
_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["ferro_dist.backends.host", "ferro_dist.testing"])

# What an interpreter may take to exit once its body has returned.
_EXIT_S = 10.0


class RankFailed(AssertionError):
    """A rank raised, died or did not end in time; the message holds its traceback.

    Attributes
    ----------
    rank : int
    """

    def __init__(self, rank: int, what: str) -> None:
        super().__init__(f"rank {rank} {what}")
        self.rank = rank


@dataclass(frozen=True)
class RankDeath:
    """In place of the result of a rank that ended without one, as it was allowed to.

    Attributes
    ----------
    exitcode : int
        Negative for a signal.
    """

    exitcode: int


@dataclass
class _Rank:
    number: int
    process: BaseProcess
    connection: Connection
    result: Any = None
    is_done: bool = False


@dataclass
class _Run:
    ranks: list[_Rank] = field(default_factory=list)

    @property
    def running(self) -> list[_Rank]:
        return [rank for rank in self.ranks if not rank.is_done]


def run_ranks(
    world_size: int,
    body: Callable[..., Any],
    *args: Any,
    backend: str = "host",
    timeout: float = 60.0,
    may_die: Collection[int] = (),
) -> list[Any]:
    """Run ``body(backend, *args)`` in `world_size` processes and return what each returned.

    Parameters
    ----------
    world_size : int
    body : callable
        A module-level function.
    *args
        Anything that can be pickled; the same for every rank.
    backend : str
        ``"host"`` or ``"tcp"``, or ``"none"`` for a body that makes its own group: it is
        called as ``body(rank, world_size, addr, *args)``, and `addr` suits `HostBackend`.
    timeout : float
        Seconds until all must have ended.
    may_die : collection of int
        Ranks that may end without a result: they get a `RankDeath`.

    Returns
    -------
    list, by rank

    Raises
    ------
    RankFailed
        For the first rank that failed. The others are killed.
    """
    if backend not in ("host", "tcp", "none"):
        raise ValueError(f"backend must be 'host', 'tcp' or 'none', not {backend!r}")
    addr = f"unix:@ferro-dist-test-{secrets.token_hex(8)}"
    token = secrets.token_bytes(16)
    run = _Run()
    with _killing_survivors(run):
        for rank in range(world_size):
            receiving, sending = _CONTEXT.Pipe(duplex=False)
            process = _CONTEXT.Process(
                target=_play,
                args=(sending, backend, rank, world_size, addr, token, timeout, body, args),
                name=f"rank {rank}",
            )
            run.ranks.append(_Rank(rank, process, receiving))
            process.start()
            sending.close()
        _collect(run, time.monotonic() + timeout, set(may_die))
    return [rank.result for rank in run.ranks]


def _play(
    connection: Connection,
    backend: str,
    rank: int,
    world_size: int,
    addr: str,
    token: bytes,
    timeout: float,
    body: Callable[..., Any],
    args: Sequence[Any],
) -> None:
    """Be one rank: in its own process."""
    try:
        if backend == "none":
            os.environ["FERRO_DIST_TOKEN"] = token.hex()
            outcome = ("result", body(rank, world_size, addr, *args))
        else:
            from ferro_dist.backends.host import HostBackend, TcpBackend

            kind = {"host": HostBackend, "tcp": TcpBackend}[backend]
            with kind(rank, world_size, addr, token=token, timeout=timeout) as group:
                outcome = ("result", body(group, *args))
    except BaseException:
        outcome = ("failure", f"raised:\n{traceback.format_exc()}")
    connection.send(outcome)
    connection.close()


def _collect(run: _Run, deadline: float, may_die: set[int]) -> None:
    while running := run.running:
        ready = wait(
            [rank.connection for rank in running] + [rank.process.sentinel for rank in running],
            max(0.0, deadline - time.monotonic()),
        )
        if not ready:
            names = ", ".join(str(rank.number) for rank in running)
            raise RankFailed(running[0].number, f"did not end in time (still running: {names})")
        for rank in running:
            if rank.connection in ready or rank.process.sentinel in ready:
                _settle(rank, may_die)


def _settle(rank: _Rank, may_die: set[int]) -> None:
    """Take a rank's outcome. It may have been sent just before the process ended."""
    kind: str = ""
    value: Any = None
    with contextlib.suppress(EOFError):
        if rank.connection.poll():
            kind, value = rank.connection.recv()
    if kind == "failure":
        raise RankFailed(rank.number, value)
    if kind == "":
        rank.process.join()
        value = RankDeath(rank.process.exitcode or 0)
        if rank.number not in may_die:
            raise RankFailed(rank.number, _describe_end(value.exitcode))
    rank.result, rank.is_done = value, True


def _describe_end(exitcode: int) -> str:
    if exitcode < 0:
        return f"was killed by {signal.Signals(-exitcode).name}"
    return f"ended with code {exitcode} before its body returned"


@contextlib.contextmanager
def _killing_survivors(run: _Run) -> Iterator[None]:
    try:
        yield
    except BaseException:
        for rank in run.ranks:
            if rank.process.is_alive():
                rank.process.kill()
        raise
    finally:
        for rank in run.ranks:
            if rank.process.pid is not None:
                rank.process.join(_EXIT_S)
                rank.process.kill()  # nothing, if it has ended
                rank.process.join()
            rank.process.close()
            rank.connection.close()
