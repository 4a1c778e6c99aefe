"""The header of a message between stages, 256 bytes: its fields, then the description's beginning.

Descriptions are seldom longer than what fits, so that one message of fixed size announces the rest.
"""

from __future__ import annotations

import enum
import struct
from typing import Any, NamedTuple

import numpy as np

__all__ = ["HEADER_NBYTES", "ROOM_NBYTES", "Header", "MessageKind", "RunId"]

_FIELDS = struct.Struct("<IBIiiII?I")
HEADER_NBYTES = 256
ROOM_NBYTES = HEADER_NBYTES - _FIELDS.size
"""How much of a description a header has room for."""

_CALLS = ("step", "forward", "backward", "eval", "plan")


class MessageKind(enum.IntEnum):
    """What a message brings."""

    ABORT = 0  # nothing, and nothing more will come in this step
    ACTIVATION = 1
    GRADIENT = 2
    MEETING = 3  # nothing but the sender's run


class RunId(NamedTuple):
    """One run of a pipeline: its number, and the method that was called."""

    number: int
    call: str

    def check(self, theirs: RunId, peer: int) -> None:
        """Raise RuntimeError if a header tells that its sender makes another call."""
        if theirs != self:
            raise RuntimeError(
                f"Pipeline: rank {peer} has called {theirs.call}(), its run {theirs.number}, and "
                f"this rank {self.call}(), its run {self.number}. All ranks of a "
                "pipeline must make the same calls in the same order"
            )


class Header(NamedTuple):
    """All but the description. Stage and microbatch are those of the receiver's action."""

    run_id: RunId
    kind: int
    stage: int = 0
    microbatch: int = 0
    rows: int = 0
    total_rows: int = 0
    is_weighted: bool = False
    description_nbytes: int = 0

    def pack(self, description: bytes = b"") -> np.ndarray[Any, Any]:
        """Return the bytes to send, with as much of the description as there is room for."""
        number, call = self.run_id
        fields = _FIELDS.pack(number, _CALLS.index(call), *self[1:])
        head = fields + description[:ROOM_NBYTES]
        return np.frombuffer(head.ljust(HEADER_NBYTES, b"\0"), np.uint8)

    @classmethod
    def unpack(cls, received: np.ndarray[Any, Any]) -> tuple[Header, bytes]:
        """Return the header, and as much of the description as it has room for."""
        head = received.tobytes()
        number, call, *fields = _FIELDS.unpack_from(head)
        header = cls(RunId(number, _CALLS[call]), *fields)
        return header, head[_FIELDS.size : _FIELDS.size + header.description_nbytes]
