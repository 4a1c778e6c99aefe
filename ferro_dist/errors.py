"""What can go wrong, sorted by whose fault it is.

Every error derives from `DistributedError` and carries the facts as attributes,
so that a program can act on them without reading the message. The docstrings
say whether the group survives.
"""

from __future__ import annotations

from collections.abc import Sequence

__all__ = [
    "BackendUnavailable",
    "ChannelClosed",
    "CollectiveMismatch",
    "DistributedError",
    "GpuFallbackWarning",
    "InvalidArray",
    "InvalidRank",
    "InvalidWorldSize",
    "Io",
    "LockPoisoned",
    "NoConnection",
    "PeerLostError",
    "SelfSend",
    "SizeMismatch",
    "Timeout",
    "UnsupportedOp",
]


class DistributedError(RuntimeError):
    """Base of the errors that ferro_dist defines; wrong types and values are Python's own.

    Ranks are numbered as in the group of the call. Where that is a part of another group, messages
    name it by its members' ranks there: rank 1 of group (1, 3) is 3 in the whole.

    Attributes
    ----------
    op : str or None
        The call that failed, by its public name: ``"allreduce"``.
    rank : int or None
        The rank that raises.
    peer : int or None
        The rank at fault, where one can be named.
    sequence : int or None
        The number of the call in its group, counted from 0; None if it had not begun. Collectives
        are counted alike on all ranks; calls that send or receive are counted apart, by each rank
        for itself.
    global_ranks : tuple of int or None
        `Backend.global_ranks` of the group, where they differ from its own numbers.
    """

    def __init__(
        self,
        message: str,
        *,
        op: str | None = None,
        rank: int | None = None,
        peer: int | None = None,
        sequence: int | None = None,
        global_ranks: tuple[int, ...] | None = None,
    ) -> None:
        super().__init__(message)
        self.op = op
        self.rank = rank
        self.peer = peer
        self.sequence = sequence
        self.global_ranks = global_ranks


# The caller's fault: raised before anything is sent; the group is unharmed.


class InvalidWorldSize(DistributedError, ValueError):
    """A world size that is not positive, or that the ranks do not agree on."""


class InvalidRank(DistributedError, ValueError):
    """A rank, root or peer outside ``range(world_size)``, or a rank that is already taken."""


class SelfSend(DistributedError, ValueError):
    """A message from a rank to itself."""


class InvalidArray(DistributedError, TypeError):
    """An array that cannot be sent or written: its layout, byte order, dtype, device or flags."""


class SizeMismatch(DistributedError, ValueError):
    """Sizes that do not fit each other.

    Raised for an ``out`` of the wrong size before anything is sent, and for a
    message that does not fit its receive: it is then dropped. The group stays usable.
    """


class UnsupportedOp(DistributedError, TypeError):
    """An operation that this backend, dtype or device does not have."""


class BackendUnavailable(DistributedError, ImportError):
    """A backend whose library is missing or too old; the message says what to install."""


# Disagreement between ranks: found before a byte moves; the group stays usable.


class CollectiveMismatch(SizeMismatch):
    """Ranks called different collectives, or the same one with different arguments.

    Raised on every rank. No array was touched.
    """


# The world's fault: the group is poisoned afterwards.


class Timeout(DistributedError, TimeoutError):
    """Not every rank arrived in time. The group is unusable afterwards.

    Except for a ``Work.wait(timeout)`` that gives up: the call then goes on, as does the group.

    Attributes
    ----------
    missing : tuple of int
        The ranks that did not come. A rank that was itself waiting is not among them: the one that
        it was waiting for, in the end, takes its place, as far as that is known. In a deadlock, all
        ranks that wait for each other. Empty where nobody can be named, as with NCCL alone.
    seconds : float
        How long this rank waited.
    """

    def __init__(
        self,
        message: str,
        *,
        missing: Sequence[int] = (),
        seconds: float = 0.0,
        op: str | None = None,
        rank: int | None = None,
        peer: int | None = None,
        sequence: int | None = None,
        global_ranks: tuple[int, ...] | None = None,
    ) -> None:
        super().__init__(
            message, op=op, rank=rank, peer=peer, sequence=sequence, global_ranks=global_ranks
        )
        self.missing = tuple(missing)
        self.seconds = seconds


class ChannelClosed(DistributedError):
    """A peer left the group or was interrupted, or this rank closed the group.

    The group is unusable afterwards.
    """


class PeerLostError(ChannelClosed):
    """A peer died, or its host has not answered for 10 seconds.

    Every survivor names the same peer. The group is unusable afterwards.
    """


class Io(DistributedError, OSError):
    """A system call failed. The group is unusable afterwards."""


class NoConnection(Io):
    """A connection could not be made, or the other end could not prove its membership."""


class LockPoisoned(DistributedError):
    """The group ended with an earlier error, its ``__cause__``, or went on without this rank.

    Go on in the group that ``backend.shrink()`` makes, or make a new one. Also raised in a forked
    child that uses its parent's group.
    """


class GpuFallbackWarning(RuntimeWarning):
    """A collective on a GPU array goes through host memory."""
