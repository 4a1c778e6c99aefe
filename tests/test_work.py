"""Work of several parts: how long each is waited for, and what its errors are."""

from __future__ import annotations

import os
import time

import pytest

from ferro_dist.errors import SizeMismatch, Timeout
from ferro_dist.work import JointWork, Work


class Part(Work):
    """Work that is done after some milliseconds, and notes how long it was given."""

    def __init__(
        self, seconds: float = 0, error: Exception | None = None, *, is_done: bool = True
    ) -> None:
        self.seconds = seconds
        self.error = error
        self.is_done = is_done
        self.was_awaited = False
        self.given: float | None = None

    def wait(self, timeout: float | None = None) -> None:
        self.was_awaited = True
        self.given = timeout
        started = time.monotonic()
        while time.monotonic() < started + self.seconds:
            os.sched_yield()
        if self.error is not None:
            raise self.error

    def is_completed(self) -> bool:
        return self.is_done

    def result(self, timeout: float | None = None) -> None:
        self.wait(timeout)


def test_parts_of_joint_work_have_one_timeout() -> None:
    first, second = Part(seconds=0.01), Part()
    both = JointWork([first, second], "result")
    both.wait(5.0)
    assert first.given is not None
    assert second.given is not None
    assert second.given <= first.given - 0.01
    assert both.result() == "result"
    assert second.given is None  # without limit


def test_a_part_that_fails_leaves_no_other_under_way() -> None:
    first, second = Part(error=SizeMismatch("too long")), Part()
    with pytest.raises(SizeMismatch):
        JointWork([first, second]).wait()
    assert second.was_awaited


def test_a_part_under_way_hides_the_failure_of_another() -> None:
    """Its array may not be touched yet, which an error that ends the call would deny."""
    first = Part(error=SizeMismatch("too long"))
    second = Part(error=Timeout("still under way"), is_done=False)
    both = JointWork([first, second])
    with pytest.raises(Timeout):
        both.wait(0)
    second.error, second.is_done = None, True
    with pytest.raises(SizeMismatch):
        both.wait(0)
