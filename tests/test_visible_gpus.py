"""Tests see no GPU; those that want one see what whoever started pytest sees."""

from __future__ import annotations

import os

import pytest
from visible_gpus import hide_gpus, show_gpus, with_gpus

VARIABLES = ("CUDA_VISIBLE_DEVICES", "JAX_PLATFORMS")


def test_no_test_sees_a_gpu_unasked() -> None:
    assert [os.environ.get(name) for name in VARIABLES] == ["", "cpu"]


def test_who_asks_sees_what_there_was(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.endswith(VARIABLES)]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    found = dict(os.environ)
    for _ in range(2):  # in pytest, and in a worker of xdist
        hide_gpus()
    assert [os.environ[name] for name in VARIABLES] == ["", "cpu"]
    assert with_gpus(os.environ) == found
    show_gpus()
    assert [os.environ.get(name) for name in VARIABLES] == ["1", None]
