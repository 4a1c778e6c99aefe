"""Whether the ranks write to their parameters alike: if not, replicas may have drifted apart.

torch counts the writes to each tensor, whoever makes them, and a step makes as many on every rank.
So each rank counts what was written since the last round, and expects the same count again, or what
came last time after as many such counts in a row: steps may be taken after every fourth round. A
rank that has skipped a step alone, or takes another number of them, is surprised, and so asks all
ranks for their counts, by a lane of a bucket. Only if these differ are the parameters themselves
compared, since they may still be equal: one rank may have put other weights in their place for a
while.

Equal counts prove nothing if forward itself writes what depends on its batch. Whether it writes is
looked at in every round whose number is a power of two, and then parameters are compared.

A rank that steps on the gradients of a backward inside `no_sync` means to be apart from the others
for a while, as in first-order MAML, or in SAM, which looks at the loss elsewhere. Nothing is
compared in the round that follows.

What is written through ``parameter.data`` is not counted.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from ferro_dist.parallel.exchange import all_gather_rows

if TYPE_CHECKING:
    from ferro_dist.backends.base import Backend

__all__ = ["ParameterWrites"]

Tensor: TypeAlias = Any

_VERSION = operator.attrgetter("_version")
_NOTHING_TO_DO = contextlib.nullcontext()


class ParameterWrites:
    """This rank's writes to its parameters.

    Parameters
    ----------
    parameters : iterable of torch.Tensor
    backend : Backend
    """

    def __init__(self, parameters: Iterable[Tensor], backend: Backend) -> None:
        # Of tensors that were made in inference mode torch counts nothing.
        counted = [p for p in parameters if not p.is_inference()]
        self._parameters = counted if backend.world_size > 1 else []
        self._backend = backend
        self._before = self._now()
        self._count = self._last = self._num_alike = self._num_rounds = 0
        # What came last time after a count that had come so many times, if it was another.
        self._next: dict[tuple[int, int], int] = {}
        # Where the count was at the first backward inside `no_sync` since the last round.
        self._before_local: int | None = None
        self._is_apart = False
        self._is_written_by_forward = False
        # The counts of all ranks with which parameters were equal nevertheless, as bytes.
        self._accepted: set[bytes] = set()
        self._of_ranks = b""

    def of_forward(self) -> contextlib.AbstractContextManager[None]:
        """Look at a forward, now and then."""
        number = self._num_rounds + 1
        return _NOTHING_TO_DO if number & (number - 1) else self._look_at_forward()

    @contextlib.contextmanager
    def _look_at_forward(self) -> Iterator[None]:
        before = self._now()
        yield
        self._is_written_by_forward |= self._now() != before

    def begin_local(self) -> None:
        """Note that a backward inside `no_sync` begins."""
        if self._before_local is None:
            self._before_local = self._now()

    def are_unexpected(self) -> bool:
        """Whether parameters should be compared in the round that begins."""
        now = self._now()
        self._count = now - self._before
        self._is_apart = self._before_local not in (None, now)
        expected = self._next.get((self._last, self._num_alike), self._last)
        return not self._is_apart and (self._count != expected or self._is_written_by_forward)

    def end_round(self) -> None:
        """Expect the same again. Not called if all ranks gave the round up: its count goes on."""
        row = self._last, self._num_alike
        self._next.pop(row, None)
        if self._count != self._last:
            self._next[row] = self._count
        self._num_alike = self._num_alike + 1 if self._count == self._last else 1
        self._before += self._count
        self._last, self._before_local = self._count, None
        self._num_rounds += 1

    def are_alike(self) -> bool:
        """Whether parameters need not be compared. Called by all ranks."""
        own = np.array([self._count, self._is_written_by_forward, self._is_apart], np.int64)
        self._is_written_by_forward = False
        counts, by_forward, are_apart = all_gather_rows(own, self._backend).T
        self._of_ranks = counts.tobytes()
        is_known = self._of_ranks in self._accepted or bool((counts == counts[0]).all())
        return bool(are_apart.any()) or (is_known and not by_forward.any())

    def accept(self) -> None:
        """Accept the counts of all ranks, also from now on: parameters are equal."""
        self._accepted.add(self._of_ranks)

    def start_anew(self) -> None:
        """Count from now on: parameters have just been made equal."""
        self._before, self._before_local = self._now(), None

    def _now(self) -> int:
        return sum(map(_VERSION, self._parameters))
