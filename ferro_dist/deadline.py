"""One timeout for a call of several steps."""

from __future__ import annotations

import math
import time

__all__ = ["Deadline"]

# Long enough for a step to find out who is late, and short compared with any timeout.
SHORTEST_STEP_S = 1e-3


class Deadline:
    """The moment at which a call must have ended."""

    def __init__(self, timeout: float) -> None:
        self.seconds = timeout
        self.at = time.monotonic() + timeout if math.isfinite(timeout) else math.inf

    @property
    def remaining_s(self) -> float:
        """The timeout of the next step, even if the time is up."""
        return max(SHORTEST_STEP_S, self.at - time.monotonic())

    def __str__(self) -> str:
        return f"within {self.seconds:.1f} s"
