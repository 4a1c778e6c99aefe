"""Who takes part in a round, and with what weight.

Ranks ask at the beginning of a round, and only where it can matter: inside `DDP.join`, where ranks
run out of data at different times, and where averages are weighted.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ferro_dist.arguments import as_float
from ferro_dist.parallel.exchange import Rows
from ferro_dist.parallel.interruption import KnownToAll
from ferro_dist.reduce_op import ReduceOp

if TYPE_CHECKING:
    from ferro_dist.backends.base import Backend

__all__ = ["REFUSED", "Participation", "RollCall", "WeightError", "check_weight"]

REFUSED = math.nan
"""The weight of a rank whose gradients cannot be weighted."""


class WeightError(KnownToAll):
    """The weights of the ranks allow no average."""


@dataclass(frozen=True)
class Participation:
    """What all ranks know of a round.

    Attributes
    ----------
    present : tuple of int
        The ranks that have gradients to contribute.
    num_weighted : int
        How many of them gave a weight.
    total_weight : float
    own_weight : float
        What this rank gave, or 0.
    """

    present: tuple[int, ...]
    num_weighted: int
    total_weight: float
    own_weight: float

    def factor(self, op: ReduceOp) -> float | None:
        """Return what this rank's gradients are multiplied by; None if they stay as they are.

        The sum of these products over the ranks is the weighted mean if `op` is `MEAN`.

        Raises
        ------
        WeightError
            Only some ranks gave a weight, one gave `REFUSED`, or the sum of all is 0 or infinite.
            Raised on every rank.
        """
        if not self.num_weighted:
            return None
        if self.num_weighted != len(self.present):
            raise WeightError(
                f"DDP: {self.num_weighted} of {len(self.present)} ranks gave a weight. "
                "Give one on every rank, or on none."
            )
        if math.isnan(self.total_weight):
            raise WeightError(
                "DDP.sync_gradients: gradients have been averaged already, without weights, and a "
                "weight would change nothing. Call backward inside no_sync(), then "
                "sync_gradients(weight=...)."
            )
        if not self.total_weight:
            raise WeightError("DDP: the weights of all ranks are 0: there is nothing to average.")
        if math.isinf(self.total_weight):
            raise WeightError("DDP: the sum of the weights of all ranks is infinite.")
        return self.own_weight / self.total_weight if op is ReduceOp.MEAN else self.own_weight


class RollCall:
    """Asks all ranks, in any round, whether they take part and with what weight.

    Parameters
    ----------
    backend : Backend
    """

    def __init__(self, backend: Backend) -> None:
        self._rank = backend.rank
        # Of each rank: whether it is present and weighted, and its weight.
        self._answers = Rows((3,), np.float64, backend)

    def ask(self, is_present: bool, weight: float | None, tag: int) -> RollCall:
        """Ask all ranks; all of them must do so.

        Parameters
        ----------
        is_present : bool
            Whether this rank has gradients to contribute.
        weight : float or None
            How much they count.
        tag : int
        """
        own = np.array([is_present, weight is not None, weight or 0.0])
        self._answers.start(own, tag)
        return self

    def result(self) -> Participation:
        """Wait for the answer."""
        is_present, is_weighted, weights = self._answers.wait().T
        return Participation(
            tuple(np.flatnonzero(is_present).tolist()),
            int(is_weighted.sum()),
            sum(weights.tolist()),
            float(weights[self._rank]),
        )


def check_weight(weight: float | None) -> float | None:
    """Return the weight as a float.

    Raises
    ------
    TypeError, ValueError
        It is not a finite number, or is negative.
    """
    if weight is None:
        return None
    message = f"weight must be a number, not {weight!r}"
    if isinstance(weight, (bool, str)):
        raise TypeError(message)
    try:
        value = as_float(weight)
    except (TypeError, ValueError) as error:  # complex, or of several elements
        raise TypeError(message) from error
    if not 0 <= value < math.inf:
        raise ValueError(f"weight must be a finite number of at least 0, not {weight!r}")
    return value
