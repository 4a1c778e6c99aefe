"""Each example runs as its docstring says, on two ranks, and learns."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"


@pytest.mark.parametrize(
    ("name", "library", "epochs"),
    [("ddp_numpy", "numpy", 4), ("ddp_torch", "torch", 2), ("ddp_jax", "jax", 4)],
)
def test_an_example_learns(name: str, library: str, epochs: int) -> None:
    pytest.importorskip(library, reason=f"{library} is not installed")
    command = ["-m", "ferro_dist.launch", "-n", "2", str(EXAMPLES / f"{name}.py")]
    ran = subprocess.run(
        [sys.executable, *command, "--epochs", str(epochs)],
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
        # Where there is a GPU, two processes would each take most of its memory.
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
    )
    assert ran.returncode == 0, ran.stderr
    lines = [line for line in ran.stdout.splitlines() if "epoch" in line]
    assert len(lines) == epochs, "one rank speaks for all"
    accuracy = re.search(r"test accuracy ([\d.]+)%", lines[-1])
    assert accuracy is not None
    assert float(accuracy[1]) > 85
