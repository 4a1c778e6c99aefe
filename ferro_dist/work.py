"""The handle of a call that runs in the background."""

from __future__ import annotations

import abc
import time
from collections.abc import Sequence
from typing import Any

from ferro_dist.arguments import check_wait_timeout
from ferro_dist.errors import DistributedError

__all__ = ["CompletedWork", "JointWork", "Work"]


class Work(abc.ABC):
    """A collective or message under way. Keeps its arrays alive until it is done.

    Dropping the last reference does not cancel the call. Closing the group does, and so does
    dropping the last reference to its `Backend`.

    The rest of a small call may be left undone until this `Work` is asked for, or the next call is
    made: that spares waking a thread. No peer waits for that rest, and the call's `timeout` begins
    to count only then.
    """

    @abc.abstractmethod
    def wait(self, timeout: float | None = None) -> None:
        """Block until the call is done.

        Parameters
        ----------
        timeout : float, optional
            Seconds. None waits for as long as the call itself may take.

        Raises
        ------
        Timeout
            The call is still under way after `timeout`; it goes on, and may be waited for again.
            The error's `missing` names the ranks that it waits for, where that is known: NCCL alone
            does not tell.
        DistributedError
            Whatever error the call met. Every wait raises it again.
        """

    @abc.abstractmethod
    def is_completed(self) -> bool:
        """Whether the call has ended, with success or an error. Never blocks.

        Raises
        ------
        LockPoisoned
            Asked in a forked child about a call that had not ended before the fork.
        """

    @abc.abstractmethod
    def result(self, timeout: float | None = None) -> Any:
        """Wait, then return what the call would have returned without ``async_op``.

        `timeout` and errors are as for `wait`.
        """


class CompletedWork(Work):
    """Work that was done before it could be waited for."""

    def __init__(self, result: Any = None) -> None:
        self._result = result

    def wait(self, timeout: float | None = None) -> None:
        return

    def is_completed(self) -> bool:
        return True

    def result(self, timeout: float | None = None) -> Any:
        return self._result


class JointWork(Work):
    """Several calls that are waited for together, and their common result."""

    def __init__(self, works: Sequence[Work], result: Any = None) -> None:
        self._works = works
        self._result = result

    def wait(self, timeout: float | None = None) -> None:
        deadline = None if timeout is None else time.monotonic() + check_wait_timeout(timeout)
        errors: list[DistributedError] = []
        for work in self._works:
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            try:
                work.wait(left)
            except DistributedError as error:
                if not work.is_completed():
                    raise
                # A message that does not fit does no harm to the others, which must be done with
                # their arrays before the caller may use them again.
                errors.append(error)
        if errors:
            raise errors[0]

    def is_completed(self) -> bool:
        # Every one is queried: under MPI the query is what drives it.
        completed = [work.is_completed() for work in self._works]
        return all(completed)

    def result(self, timeout: float | None = None) -> Any:
        self.wait(timeout)
        return self._result
