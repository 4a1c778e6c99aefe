"""Calls under way in an MPI group: what drives them, for how long, and how they fail.

A call is a generator that starts its MPI requests and yields while they are not complete. MPI makes
progress only inside its own functions, so waiting for any call drives all of them. Calls of one
lane run one after the other: the collectives of a group, because every rank must start them in the
same order; the messages of each direction to each peer, because they must match in the order of the
program.
"""

from __future__ import annotations

import copy
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Hashable, Iterator, Sequence
from typing import Any, ClassVar

from ferro_dist.arguments import check_wait_timeout, describe_ranks, first_line, name_group
from ferro_dist.errors import DistributedError, LockPoisoned, SizeMismatch, Timeout
from ferro_dist.work import Work

__all__ = ["Call", "MpiWork", "Progress", "Requests", "Steps", "mpi_lock"]

Steps = Generator[None, None, Any]
"""Yields while it waits for MPI; what it returns is the call's result."""

# MPI may have been initialised for one thread at a time. Held for a step, never for a wait.
mpi_lock = threading.RLock()

_abandoned: list[Any] = []  # what MPI may still write to: see `Call.fail`

# After this long without success a waiting thread sleeps between two checks: a little slower than
# MPI could be, but it leaves the core to others.
_EAGER_S = 0.5
_NAP_S = 0.0005


class Call:
    """One collective or message, from its submission to its end.

    Parameters
    ----------
    op : str
        Public name, for errors.
    lane : hashable
        Calls of the same lane run one after the other.
    begin : callable
        Holds the arrays, and makes the generator that does the work of the call that it is given;
        see `Steps`.
    awaited : callable
        The ranks that are known to be late, asked on a timeout.
    timeout_s : float
        Counted from `start_clock`: at once if the caller blocks, else from the moment when somebody
        waits for the call and its lane has reached it.
    sequence : int or None
        The number of the call in its group. Messages get theirs when they are submitted.
    """

    def __init__(
        self,
        op: str,
        lane: Hashable,
        begin: Callable[[Call], Steps],
        awaited: Callable[[], list[int]],
        timeout_s: float,
        sequence: int | None = None,
    ) -> None:
        self.op = op
        self.lane = lane
        self.sequence = sequence
        self.timeout_s = timeout_s
        self.awaited = awaited
        self.is_done = False
        self.result: Any = None
        self.error: BaseException | None = None
        self._is_advancing = False
        self._waited_since: float | None = None
        self._begin: Callable[[Call], Steps] | None = begin
        # Made by the first step: it refers to this call, and one that is refused before must not
        # keep its arrays until the collector comes.
        self._steps: Steps | None = None

    @property
    def label(self) -> str:
        return self.op if self.sequence is None else f"{self.op} #{self.sequence}"

    def start_clock(self) -> None:
        """Note that somebody waits from now on, if nobody has before."""
        if self._waited_since is None:
            self._waited_since = time.monotonic()

    def elapsed_s(self) -> float:
        """Return for how long it has been waited for."""
        return 0.0 if self._waited_since is None else time.monotonic() - self._waited_since

    def advance(self, own_errors: tuple[type[Exception], ...]) -> None:
        """Do what can be done without waiting.

        Of what is raised meanwhile, `own_errors` end the call, for whoever waits for it. Anything
        else is passed on, and its `Progress` must end the call: it comes from a signal handler, as
        Ctrl-C does, and is the program's own.
        """
        if self._is_advancing or self._begin is None:
            return  # a signal handler has interrupted or ended it, and looks after the group
        self._is_advancing = True
        try:
            if self._steps is None:
                self._steps = self._begin(self)
            next(self._steps)
        except StopIteration as end:
            self._finish(end.value, None)
        except own_errors as error:
            self._finish(None, error)
        finally:
            self._is_advancing = False

    def fail(self, error: DistributedError) -> None:
        """End the call with this error, whatever it is doing."""
        if self.is_done:
            return
        # MPI cannot be told to forget its requests and may still write into their
        # arrays: those stay for as long as the process does. A generator that Ctrl-C or the
        # collector has ended holds them no more.
        _abandoned.append((self._begin, self._steps))
        self._finish(None, error)

    def _finish(self, result: Any, error: BaseException | None) -> None:
        self.result, self.error = result, error
        self.is_done = True
        self._begin = self._steps = None  # releases the arrays

    def value(self) -> Any:
        """Return the result of a call that has ended, or raise its error."""
        if self.error is not None:
            # A copy: with each raise of one and the same, its traceback would grow by frames that
            # keep the caller's arrays alive.
            raise copy.copy(self.error)
        return self.result


class Requests:
    """The requests of one group that MPI has not completed."""

    _abandoned: ClassVar[list[Any]] = []
    """Requests that nobody tests any more. They hold the copies that MPI reads and writes."""

    def __init__(self) -> None:
        self.num_under_way = 0

    def complete(self, request: Any) -> Iterator[None]:
        """Wait for a request of MPI, which holds arrays until then."""
        self.num_under_way += 1
        try:
            while not request.Test():
                yield
        except BaseException:  # Ctrl-C, or the collector, which ends the calls of a dropped group
            self._abandoned.append(request)
            raise
        self.num_under_way -= 1


class Progress:
    """All calls of one group, and the error that ended it, if one did.

    Parameters
    ----------
    rank : int
    own_errors : tuple of type
        What a call itself may raise; see `Call.advance`.
    translate : callable
        Makes an error of ferro_dist of what ended a call.
    listen : callable
        Takes in what peers report.
    announce : callable
        Tells the peers of an error that has ended the group here.
    """

    def __init__(
        self,
        rank: int,
        own_errors: tuple[type[Exception], ...],
        translate: Callable[[Call, BaseException], DistributedError],
        listen: Callable[[], None],
        announce: Callable[[DistributedError], None],
    ) -> None:
        self.rank = rank
        self.global_ranks: tuple[int, ...] = ()  # none if they are range(world_size)
        self._own_errors = own_errors
        self._translate = translate
        self._listen = listen
        self._announce = announce
        self._lanes: dict[Hashable, deque[Call]] = {}
        self._pid = os.getpid()
        self.first_error: DistributedError | None = None

    def submit(self, calls: Sequence[Call]) -> None:
        """Queue calls and do the first step of each, if nothing is before it in its lane."""
        with mpi_lock:
            for call in calls:
                if self.first_error is not None:  # perhaps that of the call before
                    call.fail(self.first_error)
                    continue
                self._lanes.setdefault(call.lane, deque()).append(call)
                self._advance_lane(call.lane)

    def check_usable(self, op: str) -> None:
        """Raise what every call on an unusable group raises."""
        self.check_own(op)
        if self.first_error is not None:
            raise LockPoisoned(
                f"{op}: the group ended with an earlier error: "
                f"{first_line(self.first_error)}\nMake a new group.",
                op=op,
                rank=self.rank,
            ) from self.first_error

    def check_own(self, op: str) -> None:
        """Refuse to touch MPI in a forked child."""
        if os.getpid() != self._pid:
            raise LockPoisoned(
                "This group belongs to the parent process: a forked child cannot use it. "
                "Start the child with the spawn method, and make a group there.",
                op=op,
                rank=self.rank,
            )

    def advance(self) -> None:
        """Do one step of every lane's first call."""
        with mpi_lock:
            self._listen()
            for lane in list(self._lanes):
                self._advance_lane(lane)

    def wait(self, call: Call, timeout_s: float | None) -> bool:
        """Drive everything until `call` has ended; False once `timeout_s` is over."""
        started = time.monotonic()
        while True:
            self.advance()
            if call.is_done:
                return True
            now = time.monotonic()
            if timeout_s is not None and now - started >= timeout_s:
                return False
            self._check_expired(call)
            _pause(now - started)

    def poison(self, error: DistributedError, is_announced: bool = False) -> None:
        """End the group: every call under way and every later one fails.

        The peers are told, unless they know (`is_announced`).
        """
        with mpi_lock:
            name_group(error, self)
            if self.first_error is None:
                self.first_error = error
                if not is_announced:
                    self._announce(error)
            for calls in self._lanes.values():
                for call in calls:
                    call.fail(_as_of(call, error))
            self._lanes.clear()

    def first_call(self) -> Call | None:
        """Return the call that has been under way for longest; None if there is none."""
        return next((calls[0] for calls in self._lanes.values() if calls), None)

    def _advance_lane(self, lane: Hashable) -> None:
        calls = self._lanes.get(lane)
        while calls:
            call = calls[0]
            if not call.is_done:
                self._advance_call(call)
            if not call.is_done:
                return
            if not calls or calls[0] is not call:
                return  # a signal handler has done the rest
            calls.popleft()
            self._judge(call)
        self._lanes.pop(lane, None)

    def _advance_call(self, call: Call) -> None:
        try:
            call.advance(self._own_errors)
        except BaseException as error:
            # It can go no further, whoever is told: perhaps one who waits for another call.
            self.poison(self._translate(call, error))
            raise

    def _judge(self, call: Call) -> None:
        """Decide whether the group survives the end of a call."""
        if call.error is None:
            return
        if not isinstance(call.error, DistributedError):
            call.error = self._translate(call, call.error)
        # A copy, as for `Call.value`: nor may it keep the frames of whoever drove the call, or what
        # was being handled there, its context.
        call.error = copy.copy(call.error)
        # Sizes that do not fit are found before anything moves, or after all has moved.
        if not isinstance(call.error, SizeMismatch):
            self.poison(call.error)

    def _check_expired(self, call: Call) -> None:
        """End the group if `call`, or the one whose turn it is, has taken too long."""
        with mpi_lock:
            calls = self._lanes.get(call.lane)
            if not calls:
                return
            calls[0].start_clock()
            for candidate in (calls[0], call):
                elapsed_s = candidate.elapsed_s()
                if elapsed_s >= candidate.timeout_s:
                    self.poison(_timeout(candidate, self.rank, elapsed_s))
                    return


class MpiWork(Work):
    """A call of an MPI group that runs in the background.

    MPI makes progress only while some call of its group is waited for, or queried.
    """

    def __init__(self, progress: Progress, call: Call) -> None:
        self._progress = progress
        self._call = call

    def wait(self, timeout: float | None = None) -> None:
        patience = None if timeout is None else check_wait_timeout(timeout)
        try:
            self._progress.check_own(self._call.op)
            if not self._progress.wait(self._call, patience):
                raise _still_running(self._call, self._progress.rank, patience or 0.0)
            self._call.value()
        except DistributedError as error:
            name_group(error, self._progress)
            raise

    def is_completed(self) -> bool:
        if not self._call.is_done:
            self._progress.check_own(self._call.op)
            self._progress.advance()
        return self._call.is_done

    def result(self, timeout: float | None = None) -> Any:
        self.wait(timeout)
        return self._call.value()


def _pause(waited_s: float) -> None:
    if waited_s < _EAGER_S:
        os.sched_yield()
    else:
        time.sleep(_NAP_S)


def _as_of(call: Call, error: DistributedError) -> DistributedError:
    """Return an error that is of no call, as when a rank closes its group, as one of this call."""
    if error.op is not None:
        return error
    of_call = copy.copy(error)
    of_call.op, of_call.sequence = call.op, call.sequence
    return of_call


def _timeout(call: Call, rank: int, elapsed_s: float) -> Timeout:
    missing = call.awaited()
    return Timeout(
        f"{call.label} failed on rank {rank}: {_who(missing)} for {elapsed_s:.1f} s.\n"
        f"{_remedy(missing)}",
        missing=missing,
        seconds=elapsed_s,
        op=call.op,
        rank=rank,
        peer=missing[0] if len(missing) == 1 else None,
        sequence=call.sequence,
    )


def _who(missing: list[int]) -> str:
    if not missing:
        return "all ranks arrived, but MPI has not moved all data"
    return f"nothing from {describe_ranks(missing)}"


def _remedy(missing: list[int]) -> str:
    if not missing:
        return (
            "Check that every rank is still running; pass a larger timeout if they are only slow."
        )
    subject = "it is" if len(missing) == 1 else "they are"
    return (
        f"Check that {describe_ranks(missing)} made the same call; "
        f"pass a larger timeout if {subject} only slow."
    )


def _still_running(call: Call, rank: int, seconds: float) -> Timeout:
    missing = [] if call.is_done else call.awaited()
    waiting = f", waiting for {describe_ranks(missing)}" if missing else ""
    return Timeout(
        f"{call.label} is still under way on rank {rank} after {seconds:g} s{waiting}. "
        "It goes on; wait again.",
        missing=missing,
        seconds=seconds,
        op=call.op,
        rank=rank,
        peer=missing[0] if len(missing) == 1 else None,
        sequence=call.sequence,
    )
