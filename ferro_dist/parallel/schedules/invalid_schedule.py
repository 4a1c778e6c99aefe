"""The error that every check of a schedule raises."""

from __future__ import annotations

from ferro_dist.errors import DistributedError

__all__ = ["InvalidSchedule"]


class InvalidSchedule(DistributedError, ValueError):
    """Lists of actions that no group of ranks can run to the end, or that are no actions.

    Attributes
    ----------
    rank : int or None
        The rank in whose list the fault is.
    position : int or None
        Index in that list.
    action : Action or str or None
        What stands there, or what is missing.
    """

    def __init__(
        self,
        message: str,
        *,
        rank: int | None = None,
        position: int | None = None,
        action: object = None,
    ) -> None:
        super().__init__(message, rank=rank)
        self.position = position
        self.action = action
