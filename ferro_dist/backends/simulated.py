"""Ranks as threads of one process: for tests, teaching and notebooks."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from types import TracebackType

from ferro_dist import arguments
from ferro_dist._native.host import Communicator
from ferro_dist.backends import results
from ferro_dist.backends.engine import EngineBackend, peer_reads
from ferro_dist.cores import count_own
from ferro_dist.deadline import Deadline
from ferro_dist.errors import DistributedError, Io, LockPoisoned

__all__ = ["SimulatedBackend"]

# How often a rank that waits for the others checks whether one has left.
LOOK_S = 0.01


class SimulatedBackend(EngineBackend):
    """One rank of a group whose ranks are threads of this process.

    `create_group` makes all of them. They run on the engine of `HostBackend`, with the same
    algorithms, checks and errors, over memory that the threads share anyway. Each rank needs a
    thread of its own: two in one thread would wait for each other. In Python, Ctrl-C interrupts
    only the main thread: ranks in others that wait in vain do so until `timeout`.

    An exception that leaves a rank's ``with`` block is the ``__cause__`` of the `ChannelClosed`
    that the others get: of several threads' exceptions, executors show one.
    """

    name = "simulated"

    def __init__(self, *_arguments: object, **_options: object) -> None:
        raise TypeError(
            "The ranks of a simulated group are made together, and each is given to a thread of "
            "its own: SimulatedBackend.create_group(world_size)."
        )

    def _init_from(self, communicator: Communicator, shared: _SharedState) -> SimulatedBackend:
        """Make this a rank of the group, in place of __init__."""
        super().__init__(communicator)
        self._shared = shared
        self._num_splits = 0
        return self

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

        Raises
        ------
        InvalidWorldSize
            `world_size` is not a positive integer.
        ValueError, TypeError
            `timeout` is not a positive number.
        UnsupportedOp
            There are more ranks than can share memory, which is 1024.
        MemoryError, Io
            There is no room, or no descriptor, for the group's memory.
        """
        world_size = arguments.check_world_size(world_size)
        timeout = arguments.check_timeout(timeout)
        shared = _SharedState()
        return [
            cls.__new__(cls)._init_from(communicator, shared)
            for communicator in Communicator.create_group(
                world_size, count_own(), peer_reads(), timeout, results
            )
        ]

    def split(
        self, members: Sequence[int], timeout: float | None = None
    ) -> SimulatedBackend | None:
        deadline = Deadline(self._seconds(timeout))
        with self._splitting():
            chosen = self._check_members(members, deadline.remaining_s)
            # Counted once all ranks have agreed: a split that one rank got wrong counts for none.
            key = self._num_splits
            self._num_splits += 1
            if self.rank == chosen[0]:
                self._shared.publish(key, self._make_part(len(chosen)))
            try:
                self.barrier(False, deadline.remaining_s, 0)
            except BaseException:
                if self.rank in chosen:
                    self._shared.discard(key, chosen.index(self.rank))
                raise
        if self.rank not in chosen:
            return None
        part = self._shared.take(key, chosen.index(self.rank))
        if isinstance(part, Exception):
            raise Io(
                f"split failed on rank {self.rank}: rank {chosen[0]} cannot make the group: {part}",
                op="split",
                rank=self.rank,
                peer=chosen[0],
            ) from part
        return part._set_global_ranks(self, chosen)

    def _make_part(self, world_size: int) -> Sequence[SimulatedBackend] | Sequence[Exception]:
        """Make the group of a split, or return for each rank the error that prevents it."""
        try:
            return self.create_group(world_size, timeout=self.timeout)
        except (DistributedError, MemoryError) as error:
            return [error] * world_size

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if exc is not None:
            self._group.give_reason(exc)
        super().__exit__(exc_type, exc, traceback)

    def shrink(self, timeout: float | None = None) -> SimulatedBackend:
        seconds = self._time_to_shrink(timeout)
        survivors, group = self._shared.survivors.await_group(
            self.rank,
            lambda: set(range(self.world_size)).difference(self._group.lost_ranks()),
            lambda size: self.create_group(size, timeout=self.timeout),
            time.monotonic() + seconds / 2,
        )
        return self._succeeded_by(group, survivors)


class _SharedState:
    """What the ranks of a group share: the groups that they split off, and how they shrink it."""

    def __init__(self) -> None:
        self.survivors = _Survivors()
        self._lock = threading.Lock()
        # By key, then by rank, what the ranks of each have not taken yet.
        self._groups: dict[int, dict[int, SimulatedBackend | Exception]] = {}
        # (key, rank) of what was discarded before it was published.
        self._discarded: set[tuple[int, int]] = set()

    def publish(self, key: int, group: Sequence[SimulatedBackend] | Sequence[Exception]) -> None:
        with self._lock:
            self._groups[key] = dict(enumerate(group))
            for rank in range(len(group)):
                if (key, rank) in self._discarded:
                    self._discarded.discard((key, rank))
                    self._drop(key, rank)

    def take(self, key: int, rank: int) -> SimulatedBackend | Exception:
        with self._lock:
            return self._drop(key, rank)

    def discard(self, key: int, rank: int) -> None:
        """Drop what `take` would return, also if the group is yet to be published."""
        with self._lock:
            if key in self._groups:
                self._drop(key, rank)
            else:
                self._discarded.add((key, rank))

    def _drop(self, key: int, rank: int) -> SimulatedBackend | Exception:
        group = self._groups[key]
        backend = group.pop(rank)
        if not group:
            del self._groups[key]
        return backend


class _Survivors:
    """Who goes on in a smaller group: those who are present when the first of them decides."""

    def __init__(self) -> None:
        # Guards the rest.
        self._condition = threading.Condition()
        self._present: set[int] = set()
        self._members: tuple[int, ...] = ()
        self._group: dict[int, SimulatedBackend] = {}

    def await_group(
        self,
        rank: int,
        expected: Callable[[], set[int]],
        create_group: Callable[[int], list[SimulatedBackend]],
        until: float,
    ) -> tuple[tuple[int, ...], SimulatedBackend]:
        """Return the members and this rank's backend, once all `expected` came or time is up."""
        with self._condition:
            self._check_undecided(rank)
            self._present.add(rank)
            self._condition.notify_all()
            try:
                self._await_decision(expected, until)
                if not self._members:
                    self._decide(create_group)
            except BaseException:
                self._withdraw(rank)
                raise
            return self._members, self._group.pop(rank)

    def _check_undecided(self, rank: int) -> None:
        if self._members:
            raise LockPoisoned(
                "shrink: this rank was left out: the others had decided who goes on before it "
                "came.\nMake a new group, or call shrink() with a larger timeout on every rank.",
                op="shrink",
                rank=rank,
            )

    def _await_decision(self, expected: Callable[[], set[int]], until: float) -> None:
        while not self._members and not expected() <= self._present:
            left = until - time.monotonic()
            if left <= 0:
                return
            # A rank that closes meanwhile tells nobody here.
            self._condition.wait(min(left, LOOK_S))

    def _decide(self, create_group: Callable[[int], list[SimulatedBackend]]) -> None:
        members = tuple(sorted(self._present))
        self._group = dict(zip(members, create_group(len(members)), strict=True))
        self._members = members
        self._condition.notify_all()

    def _withdraw(self, rank: int) -> None:
        self._present.discard(rank)
        if rank in self._group:
            self._group.pop(rank).close()
