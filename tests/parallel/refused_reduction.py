"""A reduction of the user's own that fails on one rank, and what the others hear of it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

import ferro_dist as fd


def reduce_but_on_rank_1(bucket: Any, backend: Any, op: Any) -> None:
    if backend.rank == 1:
        raise KeyError("no such reduction")
    fd.allreduce(bucket.gradients, backend, op, out=bucket.gradients)


def assert_refusal_is_told(on_ranks: Callable[..., list[Any]], make: Callable[..., Any]) -> None:
    """Let `make` wrap a module that has gradients; it takes what `DDP` takes after it."""
    told = threading.Barrier(2)

    def body(backend: Any) -> None:
        ddp = make(backend, compress=reduce_but_on_rank_1)
        error: Any = KeyError if backend.rank == 1 else fd.DistributedError
        with pytest.raises(error, match=r"no such reduction|rank 1"):
            ddp.sync_gradients()
        told.wait(60)  # before any rank leaves the group

    on_ranks(2, body)
