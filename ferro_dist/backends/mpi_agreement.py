"""Whether all ranks of an MPI group call the same collective, found before data moves.

Every rank sends 48 bytes to every other and compares what it receives. That costs world_size - 1
small messages per rank, and gives what MPI does not offer: a mismatch is an error with names
instead of wrong data, and a rank that never comes is known by its number. All ranks see the same
fingerprints, so all reach the same verdict.

The same messages report that a rank has left the group, or that the group failed on it.
"""

from __future__ import annotations

import dataclasses
import zlib
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from ferro_dist.arguments import SEE_ITS_OUTPUT, UnevenCounts, elements, mismatch_error
from ferro_dist.backends.mpi_progress import Requests
from ferro_dist.errors import ChannelClosed, CollectiveMismatch
from ferro_dist.interop import dtype_name
from ferro_dist.reduce_op import ReduceOp

__all__ = ["Agreement", "Failure", "Fingerprint", "left_error"]

# Numbers on the wire.
_OPS = (
    "allreduce",
    "broadcast",
    "reduce",
    "all_gather",
    "reduce_scatter",
    "all_to_all",
    "gather",
    "scatter",
    "barrier",
    "split",
)
_GOODBYE, _FAILURE = len(_OPS), len(_OPS) + 1
_NONE = -1
_UNEVEN = -2
_TAG = 0


@dataclasses.dataclass(frozen=True)
class Fingerprint:
    """What ranks must agree on. Fields that a collective does not use keep their defaults."""

    op: str
    reduce_op: int = _NONE
    dtype: int = _NONE
    root: int = _NONE
    count: int = _NONE
    tag: int = 0

    @classmethod
    def of_members(cls, members: Sequence[int]) -> Fingerprint:
        """Make the fingerprint of a split."""
        return cls("split", count=zlib.crc32(repr(tuple(members)).encode()))

    @classmethod
    def of_uneven(cls, dtype: int, tag: int) -> Fingerprint:
        """Make the fingerprint of an all_to_all whose counts differ from rank to rank."""
        return cls("all_to_all", dtype=dtype, count=_UNEVEN, tag=tag)

    def to_words(self) -> tuple[int, ...]:
        op = _OPS.index(self.op)
        return op, self.reduce_op, self.dtype, self.root, self.count, self.tag

    @classmethod
    def from_words(cls, words: Sequence[int]) -> Fingerprint:
        op, *others = words
        return cls(_OPS[op], *others)

    def __str__(self) -> str:
        return f"{self.op}({', '.join(self._arguments())})"

    def _arguments(self) -> Iterator[str]:
        if self.op == "split":
            yield f"members of checksum {self.count:08x}"
            return
        if self.reduce_op != _NONE:
            yield ReduceOp(self.reduce_op).name.lower()
        if self.dtype != _NONE:
            yield dtype_name(self.dtype)
        if self.count != _NONE:
            yield "uneven counts" if self.count == _UNEVEN else f"count {self.count}"
        if self.root != _NONE:
            yield f"root {self.root}"
        if self.tag:
            yield f"tag {self.tag}"


_WORDS = len(dataclasses.fields(Fingerprint))


@dataclasses.dataclass(frozen=True)
class Failure:
    """Why a group ended, as one rank tells the others.

    Attributes
    ----------
    kind : str
        ``"timeout"``, ``"left"``, ``"interrupted"`` or ``"error"``.
    culprit : int
        The rank at fault; -1 if none can be named.
    reporter : int
        The rank that reports this.
    """

    kind: str
    culprit: int
    reporter: int

    KINDS = ("timeout", "left", "interrupted", "error")

    def to_words(self) -> tuple[int, ...]:
        return _FAILURE, self.KINDS.index(self.kind), self.culprit, 0, 0, 0

    @classmethod
    def from_words(cls, words: Sequence[int], reporter: int) -> Failure:
        return cls(cls.KINDS[words[1]], words[2], reporter)

    def __str__(self) -> str:
        who = "the group" if self.culprit < 0 else f"rank {self.culprit}"
        if self.kind == "left" and self.culprit == self.reporter:
            return f"{who} left the group in a call"
        return {
            "timeout": f"rank {self.reporter} gave up waiting for {who}",
            "left": f"{who} left the group while rank {self.reporter} still needed it",
            "interrupted": (
                f"rank {self.reporter} was interrupted by an exception inside a call of this group"
            ),
            "error": f"a call of this group failed on rank {self.reporter}",
        }[self.kind]


class Agreement:
    """The exchange of fingerprints in one group; used for one collective at a time.

    Parameters
    ----------
    mpi : module
        ``mpi4py.MPI``.
    comm : MPI.Intracomm
        Its point-to-point messages belong to this class alone.
    requests : Requests
        Completes MPI's collectives; a comparison of counts makes two of them.
    """

    def __init__(self, mpi: Any, comm: Any, requests: Requests) -> None:
        self._mpi = mpi
        self._comm = comm
        self._requests = requests
        self._rank: int = comm.rank
        self._world_size: int = comm.size
        self._peers = [peer for peer in range(self._world_size) if peer != self._rank]
        self._arriving = np.zeros((len(self._peers), _WORDS), np.int64)
        self._receives = [
            comm.Recv_init(words, source=peer, tag=_TAG)
            for peer, words in zip(self._peers, self._arriving, strict=True)
        ]
        self._sends: list[tuple[Any, Any]] = []  # with what they send, until it is sent
        self._heard: dict[int, deque[list[int]]] = {peer: deque() for peer in self._peers}
        self._departed: set[int] = set()
        self._sequence = 0  # of the collective in progress
        self._is_under_way = False
        self._is_closed = False
        self.failure: Failure | None = None
        if self._receives:
            mpi.Prequest.Startall(self._receives)

    def listen(self) -> None:
        """Take what has arrived. Every rank always has a receive posted for each peer."""
        if self._is_closed or not self._receives:
            return
        for index in self._mpi.Request.Testsome(self._receives) or ():
            peer = self._peers[index]
            self._take(peer, self._arriving[index].tolist())
            if peer not in self._departed:
                self._receives[index].Start()

    def _take(self, peer: int, words: list[int]) -> None:
        if words[0] == _GOODBYE:
            self._departed.add(peer)
        elif words[0] == _FAILURE:
            self.failure = self.failure or Failure.from_words(words, peer)
        else:
            self._heard[peer].append(words)

    def reach(self, fingerprint: Fingerprint, sequence: int) -> Iterator[None]:
        """Exchange fingerprints; raise CollectiveMismatch if they are not all the same.

        Raises ChannelClosed if a rank has left.
        """
        self._sequence = sequence
        self._post(fingerprint.to_words())
        self._is_under_way = True
        while missing := self._missing():
            for peer in missing:
                if self.has_left(peer):
                    raise left_error(fingerprint.op, self._rank, peer, sequence)
            yield
        self._is_under_way = False
        every = {peer: self._heard[peer].popleft() for peer in self._peers}
        every[self._rank] = list(fingerprint.to_words())
        self._check(fingerprint.op, every)

    def reach_on_counts(self, counts: UnevenCounts) -> Iterator[None]:
        """Compare what each rank sends with what its peers expect; raise alike on all ranks.

        Follows `reach`, in the same collective.
        """
        sent_to_us = np.zeros(self._world_size, np.int64)
        request = self._comm.Ialltoall(np.array(counts.send, np.int64), sent_to_us)
        yield from self._requests.complete(request)
        verdict = np.array([_NONE, 0, 0], np.int64)  # sender, what it sends, what is expected
        for sender in np.flatnonzero(sent_to_us != counts.recv)[:1]:
            verdict[:] = sender, sent_to_us[sender], counts.recv[sender]
        verdicts = np.zeros((self._world_size, 3), np.int64)
        request = self._comm.Iallgather(verdict, verdicts)
        yield from self._requests.complete(request)
        self._check_verdicts(verdicts)

    def awaited(self) -> list[int]:
        """Return the ranks that have not sent their fingerprint yet."""
        return self._missing() if self._is_under_way else []

    def has_left(self, peer: int) -> bool:
        """Whether `peer` has said goodbye, and nothing else from it is left to be received."""
        return peer in self._departed and not self._heard[peer]

    @property
    def have_all_left(self) -> bool:
        """Whether nothing can arrive any more."""
        return len(self._departed) == len(self._peers)

    def say_goodbye(self) -> None:
        """Tell all peers that this rank leaves the group."""
        self._post((_GOODBYE, 0, 0, 0, 0, 0))

    def say_failure(self, kind: str, culprit: int) -> None:
        """Tell all peers that the group has ended here."""
        self._post(Failure(kind, culprit, self._rank).to_words())

    def close(self) -> None:
        """Free what MPI holds, even in the middle of an exchange."""
        if self._is_closed:
            return
        self.listen()
        self._is_closed = True
        for peer, receive in zip(self._peers, self._receives, strict=True):
            if peer not in self._departed:
                receive.Cancel()
                receive.Wait()
            receive.Free()

    def _post(self, words: tuple[int, ...]) -> None:
        self._sends = [(request, sent) for request, sent in self._sends if not request.Test()]
        sent = np.array(words, np.int64)
        for peer in self._peers:
            self._sends.append((self._comm.Isend(sent, peer, _TAG), sent))

    def _missing(self) -> list[int]:
        return [peer for peer in self._peers if not self._heard[peer]]

    def _check(self, op: str, every: dict[int, list[int]]) -> None:
        others = [rank for rank in range(self._world_size) if every[rank] != every[0]]
        if not others:
            return
        sides = [
            f"rank {rank} called {Fingerprint.from_words(every[rank])}" for rank in (0, others[0])
        ]
        raise self._mismatch(op, ", ".join(sides), 0, others[0])

    def _mismatch(self, op: str, difference: str, first: int, second: int) -> CollectiveMismatch:
        return mismatch_error(
            f"{op} #{self._sequence} failed on rank {self._rank}",
            difference,
            op=op,
            rank=self._rank,
            peer=first if self._rank == second else second,
            sequence=self._sequence,
        )

    def _check_verdicts(self, verdicts: Any) -> None:
        for receiver, (sender, sent, expected) in enumerate(verdicts.tolist()):
            if sender == _NONE:
                continue
            difference = (
                f"rank {sender} sends {elements(sent)} to rank {receiver}, which expects {expected}"
            )
            raise self._mismatch("all_to_all", difference, sender, receiver)


def left_error(op: str, rank: int, peer: int, sequence: int | None) -> ChannelClosed:
    """Make the error of a call that needs a peer which has closed the group."""
    label = op if sequence is None else f"{op} #{sequence}"
    return ChannelClosed(
        f"{label} failed on rank {rank}: rank {peer} left the group.\n"
        f"{SEE_ITS_OUTPUT}Make a new one.",
        op=op,
        rank=rank,
        peer=peer,
        sequence=sequence,
    )
