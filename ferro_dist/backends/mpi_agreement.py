"""Whether all ranks of an MPI group call the same collective, found before data moves.

Every rank sends 48 bytes to every other and compares what it gets. That costs
world_size - 1 small messages a rank, and buys what MPI does not offer: a mismatch is
an error with names instead of wrong data, and of a rank that never comes the number
is known. All ranks see the same words, so all come to the same verdict.
"""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from ferro_dist.arguments import UnevenCounts
from ferro_dist.errors import CollectiveMismatch
from ferro_dist.interop import dtype_name
from ferro_dist.reduce_op import ReduceOp

__all__ = ["Agreement", "Fingerprint"]

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
_NONE = -1
_UNEVEN = -2


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


class Agreement:
    """The exchange of fingerprints in one group; used for one collective at a time.

    Parameters
    ----------
    mpi : module
        ``mpi4py.MPI``.
    comm : MPI.Intracomm
        Used for nothing else but collectives.
    """

    def __init__(self, mpi: Any, comm: Any) -> None:
        self._mpi = mpi
        self._comm = comm
        self._rank: int = comm.rank
        self._world_size: int = comm.size
        self._own = np.zeros(_WORDS, np.int64)
        self._all = np.zeros((self._world_size, _WORDS), np.int64)
        peers = [peer for peer in range(self._world_size) if peer != self._rank]
        self._receives = {peer: comm.Recv_init(self._all[peer], source=peer) for peer in peers}
        self._sends = [comm.Send_init(self._own, dest=peer) for peer in peers]
        self._is_under_way = False

    def reach(self, fingerprint: Fingerprint) -> Iterator[None]:
        """Exchange fingerprints; raise CollectiveMismatch if they are not all the same."""
        self._own[:] = self._all[self._rank] = fingerprint.to_words()
        requests = [*self._receives.values(), *self._sends]
        if requests:
            self._mpi.Prequest.Startall(requests)
            self._is_under_way = True
            while not self._mpi.Request.Testall(requests):
                yield
            self._is_under_way = False
        self._check(fingerprint)

    def reach_on_counts(self, counts: UnevenCounts) -> Iterator[None]:
        """Compare what each rank sends with what its peers expect; raise alike on all ranks."""
        sent_to_us = np.zeros(self._world_size, np.int64)
        request = self._comm.Ialltoall(np.array(counts.send, np.int64), sent_to_us)
        while not request.Test():
            yield
        verdict = np.array([_NONE, 0, 0], np.int64)  # sender, what it sends, what is expected
        for sender in np.flatnonzero(sent_to_us != counts.recv)[:1]:
            verdict[:] = sender, sent_to_us[sender], counts.recv[sender]
        verdicts = np.zeros((self._world_size, 3), np.int64)
        request = self._comm.Iallgather(verdict, verdicts)
        while not request.Test():
            yield
        self._check_verdicts(verdicts)

    def awaited(self) -> list[int]:
        """Return the ranks that have not sent their fingerprint yet."""
        if not self._is_under_way:
            return []
        return [peer for peer, receive in self._receives.items() if not receive.Test()]

    def close(self) -> None:
        """Give back what MPI holds; also in the middle of an exchange."""
        for receive in self._receives.values():
            if self._is_under_way and not receive.Test():
                receive.Cancel()
                receive.Wait()
            receive.Free()
        for send in self._sends:
            if not self._is_under_way or send.Test():
                send.Free()
        self._receives, self._sends, self._is_under_way = {}, [], False

    def _check(self, own: Fingerprint) -> None:
        differing = np.flatnonzero((self._all != self._all[0]).any(axis=1))
        if not len(differing):
            return
        other = int(differing[0])
        sides = [
            f"rank {rank} called {Fingerprint.from_words(self._all[rank].tolist())}"
            for rank in (0, other)
        ]
        raise CollectiveMismatch(
            f"{', '.join(sides)}. All ranks must make the same calls in the same order; "
            "no array was touched.",
            op=own.op,
            rank=self._rank,
            peer=0 if self._rank == other else other,
        )

    def _check_verdicts(self, verdicts: Any) -> None:
        for receiver, (sender, sent, expected) in enumerate(verdicts.tolist()):
            if sender == _NONE:
                continue
            raise CollectiveMismatch(
                f"all_to_all: rank {sender} sends {sent} elements to rank {receiver}, which "
                f"expects {expected}. send_counts[{receiver}] of rank {sender} must equal "
                f"recv_counts[{sender}] of rank {receiver}; no array was touched.",
                op="all_to_all",
                rank=self._rank,
                peer=receiver if self._rank == sender else sender,
            )
