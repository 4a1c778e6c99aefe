"""What is measured: a collective on some bytes, its input, and the result it must give."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import numpy.typing as npt

BLOCKING = (
    "allreduce",
    "broadcast",
    "all_gather",
    "reduce_scatter",
    "all_to_all",
    "send_recv",
    "sendrecv",
    "barrier",
)
ASYNCHRONOUS = ("iallreduce", "isend_irecv")
"""Submitted, then waited for; by MPI's names."""

BETWEEN_TWO = ("send_recv", "sendrecv", "isend_irecv")
"""A ping-pong, and messages both ways at the same time."""

DTYPES = {"float32": 4, "float16": 2, "bfloat16": 2, "float64": 8}
"""Bytes of an element."""

Floats = npt.NDArray[np.float32]


@dataclasses.dataclass(frozen=True)
class Case:
    """One collective at one size.

    Attributes
    ----------
    size : int
        Bytes asked for: of a rank's larger buffer, as nccl-tests counts.
    memory : str
        ``"plain"`` NumPy arrays, ``"symmetric"`` ones from `ferro_dist.empty`, or
        ``"torch"`` tensors. Peers use the arrays they are fastest with.
    """

    collective: str
    size: int
    ranks: int
    dtype: str = "float32"
    memory: str = "plain"

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @property
    def chunk(self) -> int:
        """Elements per rank, where the collective splits its buffer."""
        return max(1, self.size // DTYPES[self.dtype] // self.ranks)

    @property
    def is_split(self) -> bool:
        """Whether the larger buffer holds one chunk for each rank."""
        return self.collective in ("all_gather", "reduce_scatter", "all_to_all")

    @property
    def total(self) -> int:
        """Elements of the larger buffer."""
        if self.collective == "barrier":
            return 0
        return self.chunk * self.ranks if self.is_split else max(1, self.size // DTYPES[self.dtype])

    @property
    def nbytes(self) -> int:
        """Bytes really moved: at least one element a rank."""
        return self.total * DTYPES[self.dtype]

    @property
    def input_count(self) -> int:
        return self.chunk if self.collective == "all_gather" else self.total

    @property
    def output_count(self) -> int:
        """Elements of the separate output; 0 where the collective works in place."""
        if self.collective in ("allreduce", "iallreduce", "broadcast", "barrier"):
            return 0
        return self.chunk if self.collective == "reduce_scatter" else self.total

    @property
    def calls_per_statement(self) -> int:
        """How many collectives one run of the statement is.

        The root of a broadcast goes round, and a message comes back: otherwise the
        sender could run ahead, and the figure would be a rate instead of a time.
        """
        return {"broadcast": self.ranks, "send_recv": 2}.get(self.collective, 1)

    def input_of(self, rank: int) -> Floats:
        """Small integers, so that every dtype sums them exactly in any order."""
        return (np.arange(self.input_count, dtype=np.int64) * 3 % 7 % 5 + rank % 3).astype(
            np.float32
        )

    def expected_on(self, rank: int) -> Floats:
        """Compute what the output, or in place the input, holds after one statement."""
        if self.collective in BETWEEN_TWO:
            partner = rank ^ 1
            # The last of an odd number has no partner, and receives nothing.
            return self.input_of(partner) if partner < self.ranks else self.input_of(rank) * 0
        if self.collective == "broadcast":
            return self.input_of(0)
        inputs: list[Floats] = [self.input_of(peer) for peer in range(self.ranks)]
        own = slice(rank * self.chunk, (rank + 1) * self.chunk)
        if self.collective in ("allreduce", "iallreduce"):
            return _sum(inputs)
        if self.collective == "reduce_scatter":
            return _sum([x[own] for x in inputs])
        if self.collective == "all_to_all":
            return np.concatenate([x[own] for x in inputs])
        return np.concatenate(inputs)


def _sum(arrays: list[Floats]) -> Floats:
    total = np.zeros_like(arrays[0])
    for array in arrays:
        total += array
    return total
