"""The actions that a pipeline's schedule is made of, and what each asks of a rank.

A schedule is one plain list of actions for each rank. A rank starts the actions of its list in
order; nothing else decides what it does next. An action is written as its stage, its kind and
its microbatch:

    ``2F0``        stage 2: forward of microbatch 0
    ``2B0``        its whole backward: gradients of the input and of the weights
    ``2I0`` ``2W0``  the same in two parts: the input's gradient, later the weights'
    ``2SEND_F0``   send the output of 2F0 to the rank of stage 3
    ``2RECV_F0``   receive the input of 2F0 from the rank of stage 1
    ``2SEND_B0``   send the input's gradient, made by 2B0 or 2I0, to the rank of stage 1
    ``2RECV_B0``   receive the output's gradient, for 2B0 or 2I0, from the rank of stage 3
    ``2REDUCE``    sum stage 2's weight gradients over the replicas of the pipeline

How a rank runs its list
------------------------
**Compute** (F, B, I, W) runs on the spot. It first waits until what it needs has been received:
F the stage's input, B and I the gradient of its output. Between two stages of one rank there are no
messages: the output of ``2F0`` is the input of ``3F0``, which stands later in the same list.

**RECV** is posted and never blocks. What it brings belongs to the compute action of the same
stage and microbatch.

**SEND** is started and never blocks compute. What it sends stays allocated until it has ended.

**REDUCE** is started and never blocks compute. It stands after the last B or W of its stage.

The step ends on a rank when its list is through and every message and reduction has ended.

Messages from one rank to another form one queue, whatever they carry: they are received in the
order in which they are sent, and `validate` proves that both lists have that order. The
queues of two pairs of ranks, and the two directions of one pair, must progress independently of
each other: a receive that is posted and still empty holds up no other queue.

`validate` also proves that the lists would run to their ends if each send blocked its rank until
the other side has posted the receive. An executor that starts sends without waiting for them is
never worse off.

What a rank keeps
-----------------
Microbatch *m* of stage *s* is live from the start of ``sFm`` to the end of ``sBm`` or ``sWm``. The
output is needed only until it has been sent; the received input, until backward is done; the
received gradient of the output, until the end of B, or of I if W keeps what it needs of it. A
receive that is posted holds one buffer; `insert_messages` bounds their number.
"""

from __future__ import annotations

import enum
import re
from typing import NamedTuple

__all__ = ["NO_MICROBATCH", "Action", "ActionKind", "B", "F", "I", "W"]

NO_MICROBATCH = -1
"""The microbatch of an action that concerns all microbatches, such as a reduction."""


class ActionKind(str, enum.Enum):
    """What an action does. Compares equal to its text: ``"F"``."""

    FORWARD = "F"
    BACKWARD = "B"
    BACKWARD_INPUT = "I"
    BACKWARD_WEIGHT = "W"
    SEND_ACTIVATION = "SEND_F"
    RECV_ACTIVATION = "RECV_F"
    SEND_GRADIENT = "SEND_B"
    RECV_GRADIENT = "RECV_B"
    REDUCE = "REDUCE"

    @property
    def is_compute(self) -> bool:
        """Whether it runs the stage: F, B, I or W."""
        return self in _COMPUTE

    @property
    def is_send(self) -> bool:
        """Whether it sends a message."""
        return self in _SENDS

    @property
    def is_recv(self) -> bool:
        """Whether it receives a message."""
        return self in _RECVS

    @property
    def is_message(self) -> bool:
        """Whether it sends or receives a message."""
        return self in _OTHER_SIDE


# The letters of the papers.
F = ActionKind.FORWARD
B = ActionKind.BACKWARD
I = ActionKind.BACKWARD_INPUT  # noqa: E741 - hard to tell from 1 and l, but theirs
W = ActionKind.BACKWARD_WEIGHT

_COMPUTE = frozenset({F, B, I, W})
_SENDS = frozenset({ActionKind.SEND_ACTIVATION, ActionKind.SEND_GRADIENT})
_RECVS = frozenset({ActionKind.RECV_ACTIVATION, ActionKind.RECV_GRADIENT})

_OTHER_SIDE = {
    ActionKind.SEND_ACTIVATION: (ActionKind.RECV_ACTIVATION, +1),
    ActionKind.RECV_ACTIVATION: (ActionKind.SEND_ACTIVATION, -1),
    ActionKind.SEND_GRADIENT: (ActionKind.RECV_GRADIENT, -1),
    ActionKind.RECV_GRADIENT: (ActionKind.SEND_GRADIENT, +1),
}

_TEXT = re.compile(
    r"(?P<stage>\d+)(?:(?P<reduce>REDUCE)|(?P<kind>[FBIW]|(?:SEND|RECV)_[FB])(?P<microbatch>\d+))",
    re.ASCII,
)


class Action(NamedTuple):
    """One entry of a rank's list.

    Attributes
    ----------
    stage : int
        A stage of the rank in whose list the action stands, also for sends and receives.
    kind : ActionKind
    microbatch : int
        `NO_MICROBATCH` for a reduction.

    Examples
    --------
    >>> Action.parse("2SEND_F0").other_side
    3RECV_F0
    """

    stage: int
    kind: ActionKind
    microbatch: int = NO_MICROBATCH

    @classmethod
    def parse(cls, text: str) -> Action:
        """Return the action that a text stands for.

        Raises
        ------
        ValueError
            The text is no action.
        TypeError
            It is not a str.
        """
        if not isinstance(text, str):
            raise TypeError(f"an action is parsed from text, not from {type(text).__name__}")
        match = _TEXT.fullmatch(text.strip())
        if match is None:
            raise ValueError(
                f"{text!r} is no action: write a stage, a kind and a microbatch, as in 2F0, 2B0, "
                "2I0, 2W0, 2SEND_F0, 2RECV_F0, 2SEND_B0, 2RECV_B0, or 2REDUCE."
            )
        if match["reduce"]:
            return cls(int(match["stage"]), ActionKind.REDUCE)
        return cls(int(match["stage"]), ActionKind(match["kind"]), int(match["microbatch"]))

    @property
    def other_side(self) -> Action:
        """The receive that a send is for, or the send that a receive is for.

        Its stage is a neighbour of this one; the rank of that stage is the peer.

        Raises
        ------
        ValueError
            The action is neither.
        """
        other = _OTHER_SIDE.get(self.kind)
        if other is None:
            raise ValueError(f"{self} is neither a send nor a receive.")
        kind, step = other
        return Action(self.stage + step, kind, self.microbatch)

    def __str__(self) -> str:
        microbatch = "" if self.microbatch == NO_MICROBATCH else self.microbatch
        kind = getattr(self.kind, "value", self.kind)  # errors show actions with a kind of str, too
        return f"{self.stage}{kind}{microbatch}"

    def __repr__(self) -> str:
        return str(self)  # so that a list of actions prints as it is written
