"""An exception on a single rank, reported to those that would wait for it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from ferro_dist.errors import DistributedError, InvalidArray

if TYPE_CHECKING:
    from ferro_dist.backends.base import Backend

__all__ = ["KnownToAll", "interrupt", "telling"]


class KnownToAll(ValueError):
    """Raised on every rank alike, from what all have told each other; the group stays usable."""


@contextlib.contextmanager
def telling(tell: Callable[[BaseException], object]) -> Iterator[None]:
    """Tell the others if only this rank fails: they go on to collectives that it skips."""
    try:
        yield
    except BaseException as error:
        if not _is_known_to_all(error):
            tell(error)
        raise


def interrupt(backend: Backend, error: BaseException) -> None:
    """End a group on all ranks; where there are no others, nobody waits."""
    if backend.world_size > 1:
        backend.interrupt(error)


def _is_known_to_all(error: BaseException) -> bool:
    """Whether the other ranks get this error, or one with the same cause, by themselves."""
    if isinstance(error, InvalidArray):
        return False
    return isinstance(error, (DistributedError, KnownToAll))
