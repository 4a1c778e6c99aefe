"""Memory that one rank does not get, and what the others hear of it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

import ferro_dist as fd


def assert_lack_is_told(
    on_ranks: Callable[..., list[Any]],
    monkeypatch: pytest.MonkeyPatch,
    make: Callable[[Any], object],
) -> None:
    """Let `make` construct what asks its backend for memory."""
    empty = fd.SimulatedBackend.empty
    told = threading.Barrier(3)

    def refuse(backend: Any, *args: Any) -> Any:
        if backend.rank == 1:
            raise MemoryError("no room")
        return empty(backend, *args)

    def body(backend: Any) -> None:
        error = MemoryError if backend.rank == 1 else fd.DistributedError
        with pytest.raises(error, match=r"no room|rank 1 was interrupted"):
            make(backend)
        told.wait(60)  # before any rank leaves the group

    monkeypatch.setattr(fd.SimulatedBackend, "empty", refuse)
    on_ranks(3, body)
