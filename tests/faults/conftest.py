"""Fixtures of the fault tests."""

from __future__ import annotations

import os
from pathlib import Path

import pytest


@pytest.fixture
def fifo(tmp_path: Path) -> str:
    """Return the path of a named pipe, by which processes learn of each other's end."""
    path = tmp_path / "fifo"
    os.mkfifo(path)
    return str(path)
