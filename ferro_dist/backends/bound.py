"""Backends whose calls are directly the methods of a compiled object."""

from __future__ import annotations

from typing import Any

from ferro_dist.backends.base import Backend

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
    """A backend over an object whose methods take the same arguments as `Backend`'s.

    Instances hold these methods in slots: a Python method in between would cost a third of a small
    collective.
    """

    __slots__ = {name: f"As `ferro_dist.{name}`." for name in _CALLS}  # what help() shows
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

    def _bind(self, calls: Any) -> None:
        for name in _CALLS:
            setattr(self, name, getattr(calls, name))
