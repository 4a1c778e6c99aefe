"""The handle of a call that runs in the background."""

from __future__ import annotations

import abc
from typing import Any

__all__ = ["CompletedWork", "Work"]


class Work(abc.ABC):
    """A collective or message under way. Keeps its arrays alive until it is done.

    Dropping the last reference does not cancel the call. Closing the group does, and so does
    dropping the last reference to its `Backend`.
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
            The error's `missing` names the ranks that it waits for, which NCCL does not tell.
        DistributedError
            Whatever error the call met. Every wait raises it again.
        """

    @abc.abstractmethod
    def is_completed(self) -> bool:
        """Whether the call has ended, with success or an error. Never blocks."""

    @abc.abstractmethod
    def result(self, timeout: float | None = None) -> Any:
        """Wait, then return what the call would have returned without ``async_op``."""


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
