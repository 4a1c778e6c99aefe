"""The header of a message between stages, 256 bytes: its fields, then the description's beginning.

Descriptions are seldom longer than what fits, so that one message of fixed size announces the rest.
"""

from __future__ import annotations

import enum
import struct
from typing import Any, NamedTuple

import numpy as np

__all__ = ["HEADER_NBYTES", "ROOM_NBYTES", "Header", "MessageKind", "PipelineCall", "RunId"]

_FIELDS = struct.Struct("<IBIiiII?I")
HEADER_NBYTES = 256
ROOM_NBYTES = HEADER_NBYTES - _FIELDS.size
"""How much of a description a header has room for."""


class PipelineCall(enum.IntEnum):
    """A method of `Pipeline` that all ranks call together."""

    STEP = 0
    FORWARD = 1
    BACKWARD = 2
    EVAL = 3
    PLAN = 4

    @property
    def is_training(self) -> bool:
        """Whether its forwards keep what backwards need."""
        return self is not PipelineCall.EVAL

    @property
    def phase(self) -> str | None:
        """The half of the schedule that it runs, as `one_phase` names it; None for all of it."""
        if self is PipelineCall.BACKWARD:
            return "backward"
        return "forward" if self in (PipelineCall.FORWARD, PipelineCall.EVAL) else None


class MessageKind(enum.IntEnum):
    """What a message brings."""

    ABORT = 0  # nothing, and nothing more will come in this step
    ACTIVATION = 1
    GRADIENT = 2
    MEETING = 3  # nothing but the sender's run


class RunId(NamedTuple):
    """One run of a pipeline: its number, and the method that was called."""

    number: int
    call: PipelineCall

    def check(self, theirs: RunId, peer: int) -> None:
        """Raise RuntimeError if a header tells that its sender makes another call."""
        if theirs != self:
            raise RuntimeError(
                f"Pipeline: rank {peer} has called {theirs}, and this rank {self}. All ranks of a "
                "pipeline must make the same calls in the same order"
            )

    def __str__(self) -> str:
        return f"{self.call.name.lower()}(), its run {self.number}"


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
        head = _FIELDS.pack(*self.run_id, *self[1:]) + description[:ROOM_NBYTES]
        return np.frombuffer(head.ljust(HEADER_NBYTES, b"\0"), np.uint8)

    @classmethod
    def unpack(cls, received: np.ndarray[Any, Any]) -> tuple[Header, bytes]:
        """Return the header, and as much of the description as it has room for."""
        head = received.tobytes()
        number, call, *fields = _FIELDS.unpack_from(head)
        header = cls(RunId(number, PipelineCall(call)), *fields)
        return header, head[_FIELDS.size : _FIELDS.size + header.description_nbytes]
