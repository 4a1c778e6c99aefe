"""What the backends over the host engine share; see `host` and `simulated`."""

from __future__ import annotations

import atexit
import contextlib
import functools
import hashlib
import math
import os
import sys
import weakref
from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

import numpy as np

from ferro_dist import arguments, interop
from ferro_dist._native.host import PEER_READS, Communicator, HostWork, begin_exit
from ferro_dist.backends.bound import BoundBackend
from ferro_dist.work import Work

__all__ = ["EngineBackend", "peer_reads"]

Work.register(HostWork)

_Group = TypeVar("_Group", bound="EngineBackend")


def peer_reads() -> int:
    """Return how large arrays move between the ranks of a host, as FERRO_DIST_PEER_READS says.

    Returns
    -------
    int
        The engine's number for it. ``automatic``: arrays are read directly from their rank's memory
        where that is permitted and has been faster; ``always``: wherever it is permitted;
        ``never``.

    Raises
    ------
    ValueError
        The variable says anything else.
    """
    value = os.environ.get("FERRO_DIST_PEER_READS", "automatic")
    if value not in PEER_READS:
        raise ValueError(f"FERRO_DIST_PEER_READS is {value!r}; use one of {', '.join(PEER_READS)}")
    return PEER_READS[value]


class EngineBackend(BoundBackend):
    """A group run by the host engine."""

    _group: Communicator

    def __init__(self, communicator: Communicator, sockets: Sequence[int] = ()) -> None:
        self._survivors: tuple[int, ...] = ()
        self._sockets = tuple(sockets)
        self._bind(communicator)
        # Not left to the collector, which would free the arrays of work under way before the engine
        # that writes to them. Also called at exit, while calls under way still have an interpreter
        # to come back to. It refers to the engine alone: a reference to the arrays of work under
        # way would keep alive a group to which one of them refers.
        self._finalizer = weakref.finalize(self, communicator.closer().close)
        _keep_threads_from_a_dying_interpreter()
        if self._sockets:
            _holders_of_sockets.add(self)

    def alarm(self) -> object:
        """Return what tells a GPU group of the same ranks that one is lost; see its `heed`."""
        return self._group.alarm()

    def empty(self, shape: int | Sequence[int], dtype: Any) -> Any:
        resolved = interop.numpy_dtype(interop.dtype_code(dtype))
        dims = arguments.check_shape(shape)
        nbytes = math.prod(dims) * resolved.itemsize
        if nbytes > sys.maxsize:
            raise MemoryError(f"no room for {nbytes} bytes")
        memory = self._group.allocate(nbytes)
        if memory is None:
            return np.empty(dims, resolved)
        buffer: Any = memory  # has the buffer protocol, which a stub cannot say before Python 3.12
        return np.ndarray(dims, resolved, buffer=buffer)

    @property
    def survivors(self) -> tuple[int, ...]:
        return self._survivors or super().survivors

    def interrupt(self, error: BaseException) -> None:
        if not self.is_closed:
            self._group.interrupt(error)

    def _time_to_shrink(self, timeout: float | None) -> float:
        """Return a timeout for `shrink`, if this rank may call it at all."""
        seconds = self._seconds(timeout)
        self._group.check_own()  # else a child alone in its group would end its parent's
        if self.is_closed:
            raise arguments.closed_error("shrink", rank=self.rank)
        return seconds

    def _succeeded_by(self, group: _Group, survivors: tuple[int, ...]) -> _Group:
        """Leave the group for another one."""
        group._survivors = survivors
        # Not just closed: ranks that were left out, and only come now, must not take this for the
        # end of one rank, and go on as if the group were theirs.
        self._group.supersede()
        self.close()
        return group._set_global_ranks(self, survivors)

    def close(self) -> None:
        if self._group.close():
            self._finalizer.detach()

    @contextlib.contextmanager
    def _splitting(self) -> Iterator[None]:
        try:
            with super()._splitting():
                yield
        except BaseException as error:  # leaving it halfway through ends the group
            if isinstance(error, MemoryError) or not isinstance(error, Exception):
                self._group.interrupt(error)
            raise

    def _check_members(self, members: Sequence[int], timeout: float) -> tuple[int, ...]:
        """Return `members` once all ranks of this group have named the same ones."""
        chosen = arguments.check_members(members, rank=self.rank, world_size=self.world_size)
        digest = np.frombuffer(hashlib.sha256(repr(chosen).encode()).digest(), np.uint8)
        digests = self._group.gather_for_split(digest, timeout).reshape(self.world_size, -1)
        arguments.check_same_members([row.tobytes() for row in digests], chosen, rank=self.rank)
        return chosen


@functools.cache
def _keep_threads_from_a_dying_interpreter() -> None:
    # Exit handlers run last in, first out: this one before those of the finalizers, which
    # the first of them registered, and which wake the threads.
    atexit.register(begin_exit)


_holders_of_sockets: weakref.WeakSet[EngineBackend] = weakref.WeakSet()


def _release_sockets_in_child() -> None:
    """Close a forked child's copies: while they are open, peers would not see the parent die."""
    for backend in list(_holders_of_sockets):
        # Those of a closed group may have been closed by now, and their numbers be those of other
        # files, as they soon may be here.
        for fd in () if backend.is_closed else backend._sockets:
            with contextlib.suppress(OSError):
                os.close(fd)
    _holders_of_sockets.clear()


os.register_at_fork(after_in_child=_release_sockets_in_child)
