"""Backends whose calls are directly the methods of a compiled object."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ferro_dist.arguments import check_timeout
from ferro_dist.backends.base import Backend

if TYPE_CHECKING:
    from typing_extensions import Self  # in typing from Python 3.11

    from ferro_dist._native.host import Communicator
    from ferro_dist._native.nccl_group import NcclGroup

__all__ = ["BoundBackend"]

_CALLS = (
    "all_gather",
    "all_to_all",
    "allreduce",
    "barrier",
    "batch",
    "broadcast",
    "gather",
    "recv",
    "reduce",
    "reduce_scatter",
    "scatter",
    "send",
    "sendrecv",
)


class BoundBackend(Backend):
    """A backend over an object with the same properties, and methods of the same arguments.

    Instances hold these methods in slots: a Python method in between would cost a third of a small
    collective.
    """

    __slots__ = {  # what help() shows
        name: f"What `ferro_dist.{name}` calls; it takes all arguments, by position."
        for name in _CALLS
    }
    all_gather: Any
    all_to_all: Any
    allreduce: Any
    barrier: Any
    batch: Any
    broadcast: Any
    gather: Any
    recv: Any
    reduce: Any
    reduce_scatter: Any
    scatter: Any
    send: Any
    sendrecv: Any

    _group: Communicator | NcclGroup  # the object

    def _bind(self, group: Any) -> None:
        self._group = group
        for name in _CALLS:
            setattr(self, name, getattr(group, name))

    def _set_global_ranks(self, parent: Backend, members: Sequence[int]) -> Self:
        super()._set_global_ranks(parent, members)
        if self._global_ranks:
            self._group.set_global_ranks(self._global_ranks)
        return self

    @property
    def rank(self) -> int:
        return self._group.rank

    @property
    def world_size(self) -> int:
        return self._group.world_size

    @property
    def timeout(self) -> float:
        return self._group.timeout

    @timeout.setter
    def timeout(self, seconds: float) -> None:
        self._group.timeout = check_timeout(seconds)

    @property
    def is_closed(self) -> bool:
        return self._group.is_closed
