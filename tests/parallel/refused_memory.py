"""Memory that one rank does not get, and what the others hear of it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

import ferro_dist as fd


def refuse_memory_of_rank_1(monkeypatch: pytest.MonkeyPatch) -> None:
    empty = fd.SimulatedBackend.empty

    def refuse(backend: Any, *args: Any) -> Any:
        if backend.rank == 1:
            raise MemoryError("no room")
        return empty(backend, *args)

    monkeypatch.setattr(fd.SimulatedBackend, "empty", refuse)


def assert_lack_is_told(
    on_ranks: Callable[..., list[Any]],
    monkeypatch: pytest.MonkeyPatch,
    make: Callable[[Any], object],
) -> None:
    """Let `make` construct what asks its backend for memory."""
    told = threading.Barrier(3)

    def body(backend: Any) -> None:
        error = MemoryError if backend.rank == 1 else fd.DistributedError
        with pytest.raises(error, match=r"no room|rank 1 was interrupted"):
            make(backend)
        told.wait(60)  # before any rank leaves the group

    refuse_memory_of_rank_1(monkeypatch)
    on_ranks(3, body)
