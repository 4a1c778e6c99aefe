"""The examples of pipelines run, and learn what they should."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="torch is not installed")

EXAMPLES = Path(__file__).parent.parent.parent / "examples"
DEADLINE_S = 500


def run(ranks: int, script: str, *arguments: str) -> str:
    command = [sys.executable, "-m", "ferro_dist.launch", "-n", str(ranks), str(EXAMPLES / script)]
    ran = subprocess.run(
        [*command, *arguments], capture_output=True, text=True, timeout=DEADLINE_S, check=False
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return ran.stdout


def test_transformer_learns_from_the_documents() -> None:
    output = run(2, "pipeline_torch.py", "--steps", "25", "--schedule", "zb_h1")
    losses = [float(loss) for loss in re.findall(r"loss (\d+\.\d+)", output)]
    assert losses[0] > 4.0
    assert losses[-1] < 3.4
    assert "predicted" in output
    assert re.search(r"live on rank 0 +2 +2", output)


def test_grid_of_ranks_equals_one_process() -> None:
    losses = re.findall(r"loss (\d\.\d+)", run(4, "pipeline_and_ddp.py"))
    assert len(losses) == 2
    assert losses[0] == losses[1]


@pytest.mark.parametrize(("script", "ranks"), [("pipeline_torch", 2), ("pipeline_and_ddp", 4)])
def test_one_rank_alone_is_told_how_to_start_it(script: str, ranks: int) -> None:
    ran = subprocess.run(
        [sys.executable, str(EXAMPLES / f"{script}.py")],
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    assert ran.returncode == 1
    assert ran.stderr.endswith(f": ferrorun -n {ranks} examples/{script}.py\n")
    assert "Traceback" not in ran.stderr
