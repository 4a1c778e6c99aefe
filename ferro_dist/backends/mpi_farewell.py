"""Groups that this rank has left, and whose communicators its peers still need.

MPI may give the number of a freed communicator to the next one, and messages of the old group that
were never received would then arrive in the new one. So a rank that leaves says goodbye to every
peer, on each of its channels, and frees its communicators only once it has heard the goodbyes of
all: then nothing can be under way. It waits for nobody: each time a group is made or closed, those
that can be freed by then are.
"""

from __future__ import annotations

import atexit
import contextlib
import time
import weakref
from typing import Any

import numpy as np

from ferro_dist.backends.mpi_agreement import Agreement
from ferro_dist.backends.mpi_memory import block_of
from ferro_dist.backends.mpi_progress import mpi_lock

__all__ = ["GOODBYE_TAG", "Farewell", "close_at_exit", "free_left_groups"]

GOODBYE_TAG = 32767
"""The tag of a rank's last message to each peer."""

# How long the interpreter waits at exit for the goodbyes of the other ranks.
_EXIT_S = 1.0

_leaving: list[Farewell] = []
_open_groups: weakref.WeakSet[Any] = weakref.WeakSet()


class Farewell:
    """What is left of a group until all its ranks have left.

    Parameters
    ----------
    mpi : module
    agreement : Agreement
    comms : list of MPI.Intracomm
        To be freed; the last is the one of messages.
    departed : set of int
        Peers whose goodbye has been received among the messages already.
    is_sound : bool
        Whether no request of the group is under way: MPI might wait forever for one in Free.
    """

    def __init__(
        self, mpi: Any, agreement: Agreement, comms: list[Any], departed: set[int], is_sound: bool
    ) -> None:
        self._mpi = mpi
        self._agreement = agreement
        self._comms = comms
        self._messages = comms[-1]
        rank, size = self._messages.rank, self._messages.size
        self._awaited = {peer for peer in range(size) if peer not in (rank, *departed)}
        self._dropping: dict[int, tuple[Any, Any]] = {}
        self._is_sound = is_sound
        agreement.say_goodbye()
        peers = [peer for peer in range(size) if peer != rank]
        self._sends = [self._messages.Isend(b"", peer, GOODBYE_TAG) for peer in peers]

    def begin(self) -> None:
        """Leave, whenever the others have; see `free_left_groups`."""
        _leaving.append(self)

    def finish(self) -> bool:
        """Drop what has arrived; free the communicators, and say so, after the last goodbye."""
        if not self._is_sound:
            return False
        self._agreement.listen()
        for peer in list(self._awaited):
            self._drop_messages(peer)
        self._sends = [request for request in self._sends if not request.Test()]
        if self._awaited or self._sends or not self._agreement.have_all_left:
            return False
        self._agreement.close()
        for comm in self._comms:
            comm.Free()
        return True

    def _drop_messages(self, peer: int) -> None:
        status = self._mpi.Status()
        while self._finish_dropping(peer):
            message = self._messages.Improbe(peer, self._mpi.ANY_TAG, status)
            if message is None:
                return
            nbytes = status.Get_elements(self._mpi.BYTE)
            dropped = np.empty(nbytes, np.uint8)
            with block_of(nbytes) as block:
                self._dropping[peer] = message.Irecv([dropped, *block]), dropped
            if status.Get_tag() == GOODBYE_TAG:
                self._awaited.discard(peer)
                return

    def _finish_dropping(self, peer: int) -> bool:
        """Whether no message of this peer is being received any more."""
        if peer in self._dropping and not self._dropping[peer][0].Test():
            return False
        self._dropping.pop(peer, None)
        return True

    def give_up(self) -> None:
        """Withdraw the receives, so that MPI can be finalised."""
        self._agreement.close()


def free_left_groups() -> None:
    """Free the communicators of groups that all their ranks have left."""
    with mpi_lock:
        # Of a copy: the collector may close another group at any moment, and adds it.
        for farewell in list(_leaving):
            if farewell.finish():
                _leaving.remove(farewell)


def close_at_exit(group: Any) -> None:
    """Make sure that a group is closed at exit: its receives must not outlive MPI."""
    _open_groups.add(group)


@atexit.register
def _leave_all() -> None:
    for group in list(_open_groups):
        with contextlib.suppress(Exception):
            group.close()
    deadline = time.monotonic() + _EXIT_S
    while _leaving and time.monotonic() < deadline:
        free_left_groups()
        time.sleep(0.001)
    for farewell in _leaving:
        with contextlib.suppress(Exception):
            farewell.give_up()
