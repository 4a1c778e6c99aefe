"""A grid of ranks: pipelines along the rows, replicas of a stage along the columns."""

from __future__ import annotations

import contextlib
from types import TracebackType
from typing import TYPE_CHECKING

from ferro_dist import arguments
from ferro_dist.errors import InvalidWorldSize
from ferro_dist.parallel.group_checks import check_group

if TYPE_CHECKING:
    from ferro_dist.backends.base import Backend

__all__ = ["RankGrid"]


class RankGrid:
    """Divide a group into pipelines and, across them, groups of replicas.

    Rank r of the group is rank ``r % pipeline`` of pipeline ``r // pipeline``: neighbours in a
    pipeline, which exchange most, have neighbouring ranks. Called by all ranks.

    Parameters
    ----------
    backend : Backend
        The group to divide; closing it is left to the caller.
    pipeline : int
        How many ranks a pipeline has; a divisor of the world size.

    Attributes
    ----------
    pipeline : Backend
        This rank's pipeline.
    data : Backend
        This rank's replicas, one in each pipeline, in the order of pipelines.

    Raises
    ------
    InvalidWorldSize
        The ranks cannot be divided like this. Nothing was sent.
    TypeError
        `backend` is no group, or `pipeline` no integer. Nothing was sent.
    CollectiveMismatch, Timeout, PeerLostError, ChannelClosed, Io, NoConnection
        As for `Backend.split`, which makes the groups.

    Examples
    --------
    >>> with RankGrid(backend, pipeline=2) as grid:
    ...     pipe = Pipeline(stage, grid.pipeline, 8, "zb_h1", dp=grid.data)
    """

    def __init__(self, backend: Backend, pipeline: int) -> None:
        check_group("RankGrid", backend)
        size = arguments.named_integer("RankGrid", "pipeline", pipeline)
        if size < 1 or backend.world_size % size:
            raise InvalidWorldSize(
                f"RankGrid: {backend.world_size} ranks cannot be divided into pipelines of {size}",
                op="RankGrid",
                rank=backend.rank,
            )
        world = range(backend.world_size)
        rows = [list(world[first : first + size]) for first in world[::size]]
        columns = [list(world[column::size]) for column in range(size)]
        with contextlib.ExitStack() as groups:
            self.pipeline = _own(backend, rows, groups)
            self.data = _own(backend, columns, groups)
            self._groups = groups.pop_all()

    def close(self) -> None:
        """Leave both groups. Idempotent."""
        self._groups.close()

    def __enter__(self) -> RankGrid:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


def _own(backend: Backend, divided: list[list[int]], groups: contextlib.ExitStack) -> Backend:
    """Split off all groups, as every rank must; return the one that this rank is in."""
    for members in divided:
        group = backend.split(members)
        if group is not None:
            own = group
            groups.callback(group.close)
    return own
