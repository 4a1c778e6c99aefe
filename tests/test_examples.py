"""Each example runs as its docstring says, on ranks of this machine, and learns."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"


def run(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *command],
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
        # Where there is a GPU, two processes would each take most of its memory.
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
    )


def output_of(num_ranks: int, script: str, *arguments: str) -> str:
    launch = "-m", "ferro_dist.launch", "-n", str(num_ranks)
    ran = run(*launch, str(EXAMPLES / script), *arguments)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return ran.stdout


@pytest.mark.parametrize(
    ("name", "library", "epochs"),
    [("ddp_numpy", "numpy", 4), ("ddp_torch", "torch", 2), ("ddp_jax", "jax", 4)],
)
def test_an_example_learns(name: str, library: str, epochs: int) -> None:
    pytest.importorskip(library, reason=f"{library} is not installed")
    output = output_of(2, f"{name}.py", "--epochs", str(epochs))
    lines = [line for line in output.splitlines() if "epoch" in line]
    assert len(lines) == epochs, "one rank speaks for all"
    accuracy = re.search(r"test accuracy ([\d.]+)%", lines[-1])
    assert accuracy is not None
    assert float(accuracy[1]) > 85


def test_a_transformer_in_a_pipeline_learns_from_the_documents() -> None:
    pytest.importorskip("torch", reason="torch is not installed")
    output = output_of(2, "pipeline_torch.py", "--steps", "25", "--schedule", "zb_h1")
    losses = [float(loss) for loss in re.findall(r"loss (\d+\.\d+)", output)]
    assert losses[0] > 4.0
    assert losses[-1] < 3.4
    assert "predicted" in output
    assert re.search(r"live on rank 0 +2 +2", output)


def test_a_grid_of_ranks_equals_one_process() -> None:
    pytest.importorskip("torch", reason="torch is not installed")
    losses = re.findall(r"loss (\d\.\d+)", output_of(4, "pipeline_and_ddp.py"))
    assert len(losses) == 2
    assert losses[0] == losses[1]


@pytest.mark.parametrize(("script", "ranks"), [("pipeline_torch", 2), ("pipeline_and_ddp", 4)])
def test_one_rank_alone_is_told_how_to_start_it(script: str, ranks: int) -> None:
    pytest.importorskip("torch", reason="torch is not installed")
    ran = run(str(EXAMPLES / f"{script}.py"))
    assert ran.returncode == 1
    assert ran.stderr.endswith(f": ferrorun -n {ranks} examples/{script}.py\n")
    assert "Traceback" not in ran.stderr
