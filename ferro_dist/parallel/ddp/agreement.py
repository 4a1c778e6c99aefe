"""Whether all ranks are about to make the same NCCL calls, which NCCL itself does not compare.

The host side of a group does: a call with a different tag on any rank is a mismatch on all. It
costs a small all_gather in host memory, during backward; the GPU does not wait for it, nor does the
host for the GPU.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ferro_dist.errors import CollectiveMismatch
from ferro_dist.parallel.exchange import Rows

if TYPE_CHECKING:
    from ferro_dist.backends.base import Backend

__all__ = ["Agreement"]


class Agreement:
    """Asks all ranks, in every round, whether they make the same calls.

    Parameters
    ----------
    backend : Backend
        Moves arrays in both kinds of memory.
    """

    def __init__(self, backend: Backend) -> None:
        self._answers = Rows((1,), np.uint8, backend)
        self._is_asked = self._is_any_set = False
        self._mismatch: CollectiveMismatch | None = None

    def ask(self, tag: int, flag: bool) -> None:
        """Ask all ranks; all of them must do so, with this tag if they agree, and any flag."""
        self._mismatch, self._is_any_set = None, False
        self._answers.start(np.array([flag], np.uint8), tag)
        self._is_asked = True

    def is_reached(self) -> bool:
        """Wait for the answer."""
        if self._is_asked:
            self._is_asked = False
            try:
                self._is_any_set = bool(self._answers.wait().any())
            except CollectiveMismatch as error:
                self._mismatch = error
        return self._mismatch is None

    def require(self) -> bool:
        """Wait for the answer; return whether any rank has set its flag.

        Raises
        ------
        CollectiveMismatch
            The ranks do not agree. Raised on all of them.
        """
        if not self.is_reached():
            assert self._mismatch is not None
            raise self._mismatch
        return self._is_any_set
