"""Fixtures of the fault tests."""

from __future__ import annotations

import multiprocessing
import os
from pathlib import Path

import pytest

import ferro_dist.testing  # before the line below, which it would undo

# What these files import is loaded once, not by every rank.
multiprocessing.set_forkserver_preload(
    ["ferro_dist", "ferro_dist.backends.host", ferro_dist.testing.__name__, "pytest"]
)


@pytest.fixture
def fifo(tmp_path: Path) -> str:
    """Return the path of a named pipe, by which processes learn of each other's end."""
    path = tmp_path / "fifo"
    os.mkfifo(path)
    return str(path)
