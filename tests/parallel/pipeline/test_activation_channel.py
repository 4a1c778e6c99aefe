"""What becomes of the sends that a sender has started."""

from __future__ import annotations

from typing import Any

import pytest

from ferro_dist.parallel.pipeline.activation_channel import Link, Sender
from ferro_dist.parallel.pipeline.message_header import PipelineCall, RunId
from ferro_dist.work import Work


class EndsBetweenQuestions(Work):
    """Fails just after it was first asked whether it has ended."""

    def __init__(self) -> None:
        self.is_done = False

    def is_completed(self) -> bool:
        was_done, self.is_done = self.is_done, True
        return was_done

    def wait(self, timeout: float | None = None) -> None:
        raise ConnectionError("the send failed")

    def result(self, timeout: float | None = None) -> None:
        self.wait(timeout)


class OneSend:
    """A backend whose only batch is given."""

    def __init__(self, work: Work) -> None:
        self.work = work

    def batch(self, *_: Any) -> Work:
        return self.work


def test_the_error_of_a_send_that_ends_while_others_are_released_is_raised() -> None:
    backend: Any = OneSend(EndsBetweenQuestions())
    sender = Sender(Link(backend, None, 0, RunId(0, PipelineCall.STEP), None))
    sender.abort(1)
    sender.release_sent()
    with pytest.raises(ConnectionError, match="the send failed"):
        sender.release_sent()
