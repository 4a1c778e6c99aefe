"""How ranks exchange what they must know about each other where a group exists already.

They use collectives of that group, the parent of the new one. Only these tell of a rank that has
died: so ranks that wait for sockets meanwhile come together every few milliseconds.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Sequence

from ferro_dist.deadline import Deadline
from ferro_dist.rendezvous.control_plane import (
    VERDICT_FRACTION,
    VERDICT_S,
    Exchange,
    as_distributed,
)
from ferro_dist.rendezvous.event_loop import EventLoop
from ferro_dist.rendezvous.frame import MAX_MISSING, ProtocolError, decode_error, encode_error

__all__ = ["ParentExchange", "stand_by"]

ROUND_S = 0.015  # how often ranks that wait for sockets hear from each other


class ParentExchange(Exchange):
    """The collectives of an existing group.

    Parameters
    ----------
    all_gather : callable
        Gathers byte strings of any length from the ranks of the new group.
    """

    # What a part begins with.
    WELL, FAILED, DONE = b"\x00", b"\x01", b"\x02"

    def __init__(
        self,
        loop: EventLoop,
        all_gather: Callable[[bytes], Sequence[bytes]],
        rank: int,
        world_size: int,
        deadline: Deadline,
    ) -> None:
        super().__init__(loop, rank, world_size, deadline)
        self._all_gather = all_gather
        self._is_agreed = False

    def all_gather(self, part: bytes) -> list[bytes]:
        return self._gather(self.WELL, part)

    def commit(self) -> None:
        self._gather(self.DONE, b"")

    def _gather(self, state: bytes, part: bytes) -> list[bytes]:
        # If the parent itself fails, there is nobody left to tell.
        self._is_agreed = True
        parts = [bytes(part) for part in self._all_gather(state + part)]
        if len(parts) != self.world_size:
            raise ValueError(f"all_gather gave {len(parts)} parts to a group of {self.world_size}")
        for theirs in parts:
            if theirs[:1] == self.FAILED:
                raise decode_error(theirs[1:], self.rank)
        self._is_agreed = False
        self.have_all_come = True
        return [theirs[1:] for theirs in parts]

    def wait(
        self,
        is_done: Callable[[], bool],
        missing: Callable[[], Sequence[int]],
        hint: Callable[[], str] = lambda: "",
    ) -> None:
        # In rounds: a rank that fails or dies meanwhile could tell the others in no other way.
        until = self.deadline.at - min(VERDICT_S, VERDICT_FRACTION * self.deadline.seconds)
        while True:
            self.loop.run_until(is_done, min(time.monotonic() + ROUND_S, until))
            late = [] if is_done() else missing()
            every = self.all_gather(json.dumps(late[:MAX_MISSING]).encode())
            awaited = sorted({rank for part in every for rank in _ranks_in(part)})
            if not awaited:
                return
            if time.monotonic() >= until:
                raise self.timeout(late or awaited, hint())

    def fail(self, error: BaseException) -> None:
        # The others are on their way to the next all_gather: take part, and say why.
        if self._is_agreed or not isinstance(error, Exception):
            return
        with contextlib.suppress(Exception):
            self._all_gather(self.FAILED + encode_error(as_distributed(error, self.rank)))


def stand_by(gather_all: Callable[[], Sequence[bytes]]) -> None:
    """Take part in the all_gathers of a group in the making to which this rank will not belong.

    Parameters
    ----------
    gather_all : callable
        Contributes nothing, and returns what the ranks of that group have contributed.
    """
    last = (ParentExchange.FAILED, ParentExchange.DONE)
    while not any(part.startswith(last) for part in gather_all()):
        pass


def _ranks_in(part: bytes) -> list[int]:
    try:
        ranks = json.loads(part)
    except ValueError as error:
        raise ProtocolError("no list of ranks") from error
    if type(ranks) is not list or not all(type(rank) is int for rank in ranks):
        raise ProtocolError("no list of ranks")
    return ranks
