"""An exception on a single rank, reported to those that would wait for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from ferro_dist.errors import DistributedError, InvalidArray

if TYPE_CHECKING:
    from ferro_dist.backends.base import Backend

__all__ = ["KnownToAll", "interrupt", "telling"]


class KnownToAll(ValueError):
    """Raised on every rank alike, from what all have told each other; the group stays usable."""


class telling:  # noqa: N801 - reads as contextlib's do; a generator costs thrice as much per step
    """Tell the others if only this rank fails: they go on to collectives that it skips."""

    __slots__ = ("_tell",)

    def __init__(self, tell: Callable[[BaseException], object]) -> None:
        self._tell = tell

    def __enter__(self) -> None:
        return

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None and not _is_known_to_all(error):
            self._tell(error)


def interrupt(backend: Backend | None, error: BaseException) -> None:
    """End a group, if there is one, on all ranks; where there are no others, nobody waits."""
    if backend is not None and backend.world_size > 1:
        backend.interrupt(error)


def _is_known_to_all(error: BaseException) -> bool:
    """Whether the other ranks get this error, or one with the same cause, by themselves."""
    if isinstance(error, InvalidArray):
        return False
    return isinstance(error, (DistributedError, KnownToAll))
