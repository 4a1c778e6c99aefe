"""Messages between two ranks of an MPI group."""

from __future__ import annotations

from typing import Any

import numpy as np

from ferro_dist import arguments
from ferro_dist.backends.mpi_agreement import Agreement, left_error
from ferro_dist.backends.mpi_farewell import GOODBYE_TAG
from ferro_dist.backends.mpi_memory import Source, Target, block_of
from ferro_dist.backends.mpi_progress import Call, Requests, Steps
from ferro_dist.errors import SizeMismatch
from ferro_dist.interop import BufferView, dtype_name, numpy_dtype

__all__ = ["Messages", "mpi_tag_of"]

# A message's MPI tag tells its dtype and ten bits of a hash of the caller's tag: MPI
# promises tags up to 32767.
_TAG_BITS = 10
_TAG_MULTIPLIER = 2654435761  # Knuth's: all bits of a tag affect the upper ten


class Messages:
    """One rank's sends and receives, on a communicator of their own."""

    def __init__(self, mpi: Any, comm: Any, agreement: Agreement, requests: Requests) -> None:
        self._mpi = mpi
        self._comm = comm
        self._rank: int = comm.rank
        self._agreement = agreement
        self._requests = requests
        self.departed: set[int] = set()
        """Peers whose goodbye, their last message, has been received here."""

    def send(self, source: Source, peer: int, mpi_tag: int, call: Call) -> Steps:
        if self._agreement.has_left(peer):
            raise left_error(call.op, self._rank, peer, call.sequence)
        with block_of(source.view.nbytes) as block:
            yield from self._requests.complete(
                self._comm.Isend([source.octets, *block], peer, mpi_tag)
            )

    def recv(self, target: Target, peer: int, mpi_tag: int, call: Call) -> Steps:
        status = self._mpi.Status()
        message = None
        while message is None:
            if peer in self.departed:
                raise left_error(call.op, self._rank, peer, call.sequence)
            # Any tag: the next message of this peer is the one for this receive.
            message = self._comm.Improbe(peer, self._mpi.ANY_TAG, status)
            if message is None:
                yield
        nbytes, sent_tag = status.Get_elements(self._mpi.BYTE), status.Get_tag()
        fits = nbytes == target.view.nbytes and sent_tag == mpi_tag
        octets = target.octets if fits else np.empty(nbytes, np.uint8)
        with block_of(nbytes) as block:
            yield from self._requests.complete(message.Irecv([octets, *block]))
        if sent_tag == GOODBYE_TAG:
            self.departed.add(peer)
            raise left_error(call.op, self._rank, peer, call.sequence)
        if not fits:
            raise self._mismatch(call, peer, target.view, nbytes, sent_tag, mpi_tag)
        return target.result()

    def _mismatch(
        self, call: Call, peer: int, view: BufferView, nbytes: int, sent_tag: int, mpi_tag: int
    ) -> SizeMismatch:
        sent, expected = sent_tag >> _TAG_BITS, mpi_tag >> _TAG_BITS
        itemsize = numpy_dtype(sent).itemsize
        if (sent, nbytes) != (expected, view.nbytes):
            difference = (
                f"rank {peer} sent {nbytes // itemsize} {dtype_name(sent)}, "
                f"rank {self._rank} expected {view.count} {dtype_name(expected)}"
            )
        else:
            difference = f"ranks {peer} and {self._rank} gave different tags"
        return SizeMismatch(
            f"{call.label} failed on rank {self._rank}: {difference}. The message was dropped.",
            op=call.op,
            rank=self._rank,
            peer=peer,
            sequence=call.sequence,
        )


def mpi_tag_of(view: BufferView, tag: int) -> int:
    """Return the MPI tag: it tells the receiver the dtype and, with luck, the caller's tag."""
    mixed = arguments.check_tag(tag) * _TAG_MULTIPLIER % (1 << 32) >> (32 - _TAG_BITS)
    return view.dtype << _TAG_BITS | mixed
