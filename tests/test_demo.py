"""The demo: what a stranger runs first."""

from __future__ import annotations

import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from numpy.testing import assert_allclose

import ferro_dist as fd
from ferro_dist import demo

TIMEOUT_S = 500
EQUALS = r"equals single-process training: max difference \d\.\de[-+]\d\d"


def run_on_ranks(world_size: int, options: demo.Options) -> list[bool]:
    def rank(backend: Any) -> bool:
        with backend:
            return demo.run(backend, options)

    with ThreadPoolExecutor(world_size) as threads:
        return list(threads.map(rank, fd.SimulatedBackend.create_group(world_size)))


def run_command(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", *command],
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_training_equals_that_of_one_process(
    world_size: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_on_ranks(world_size, demo.Options(epochs=10)) == [True] * world_size
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"1437 handwritten digits, world size {world_size}"
    epochs = [line for line in lines if line.startswith("epoch")]
    assert len(epochs) == 10, "one rank speaks for all"
    epoch = r"epoch  10   loss 0\.\d+   test accuracy  9\d\.\d\d%   +[\d.]+ ms, \d+% of it comm"
    assert re.match(epoch, epochs[-1])
    assert re.fullmatch(r"loss 0\.\d{4}", lines[-4])
    assert re.fullmatch(r"test accuracy 9[678]\.\d\d%", lines[-3])
    assert re.fullmatch(r"time in communication [\d.]+ s of [\d.]+ s", lines[-2])
    assert re.fullmatch(EQUALS, lines[-1])


def test_batches_with_fewer_images_than_ranks_are_trained_on(
    capsys: pytest.CaptureFixture[str],
) -> None:
    # 1437 = 179 * 8 + 5: with 7 ranks all shares are uneven, and in the last some are empty.
    run_on_ranks(7, demo.Options(epochs=1, batch_size=8, hidden=8))
    assert re.search(EQUALS, capsys.readouterr().out)


def test_low_accuracy_is_a_failure(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_on_ranks(2, demo.Options(epochs=1)) == [False, False]
    assert "FAILED: the test accuracy is below 96%" in capsys.readouterr().out


def test_a_difference_is_a_failure(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demo, "ALLOWED_DIFFERENCE", -1.0)
    assert run_on_ranks(2, demo.Options(epochs=10)) == [False, False]
    assert "FAILED: differs from single-process training" in capsys.readouterr().out


@pytest.mark.parametrize(("error", "expected"), [(0.5, 0.5), (-2.0, 2.0), (np.nan, np.inf)])
def test_a_difference_on_any_rank_is_seen_by_all(error: float, expected: float) -> None:
    def rank(backend: Any) -> float:
        with backend:
            model, other = demo.Classifier(8, seed=0), demo.Classifier(8, seed=0)
            if backend.rank == 2:
                model.weights["output.bias"][3] += error
            return demo.largest_difference(model, other, backend)

    with ThreadPoolExecutor(3) as threads:
        assert set(threads.map(rank, fd.SimulatedBackend.create_group(3))) == {expected}


def test_gradients_are_the_slopes_of_the_loss() -> None:
    rng = np.random.default_rng(0)
    model = demo.Classifier(hidden=6, seed=1, inputs=5, classes=4)
    images, labels = rng.normal(size=(7, 5)), rng.integers(0, 4, 7)

    def loss() -> float:
        return float(-np.log(model(images)[np.arange(7), labels]).sum() / 10)

    model.backward(model(images), labels, batch_size=10)
    step = 1e-6
    for name, weight in model.weights.items():
        for index in np.ndindex(weight.shape):
            value = weight[index]
            weight[index] = value + step
            above = loss()
            weight[index] = value - step
            below = loss()
            weight[index] = value
            # Central differences: an error of step**2 in the slope, 1e-16 / step in the loss.
            assert_allclose(model.gradients[name][index], (above - below) / (2 * step), atol=1e-8)


def test_the_wrapped_model_computes_its_gradients_in_symmetric_memory() -> None:
    (backend,) = fd.SimulatedBackend.create_group(1)
    with backend:
        model = demo.Classifier(hidden=8, seed=0)
        model.gradients = fd.DDP(model, backend).gradient_buffers()
        buffers = dict(model.gradients)
        model.backward(model(np.ones((3, 64))), np.arange(3), batch_size=3)
        assert all(model.gradients[name] is buffer for name, buffer in buffers.items())


def test_missing_data_names_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(SystemExit, match=r'pip install "ferro_dist\[demo\]"'):
        demo.Digits.load()


@pytest.mark.parametrize("value", ["0", "-3", "many"])
@pytest.mark.parametrize("option", ["--epochs", "--batch-size", "--hidden"])
def test_options_must_be_positive(
    option: str, value: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as exit_:
        demo.Options.parse([option, value])
    assert exit_.value.code == 2
    assert f"argument {option}: invalid positive value: '{value}'" in capsys.readouterr().err


def test_the_seed_must_not_be_negative(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        demo.Options.parse(["--seed", "-1"])
    assert "invalid natural value: '-1'" in capsys.readouterr().err


def test_options_are_read() -> None:
    arguments = ["--epochs", "3", "--batch-size", "16", "--hidden", "9", "--seed", "5"]
    assert demo.Options.parse(arguments) == demo.Options(3, 16, 9, 5)
    assert demo.Options.parse([]) == demo.Options()


def test_it_runs_alone() -> None:
    result = run_command("ferro_dist.demo")
    assert result.returncode == 0, result.stderr
    assert re.search(EQUALS, result.stdout)


def test_it_runs_under_ferrorun() -> None:
    result = run_command("ferro_dist.launch", "-n", "2", "-m", "ferro_dist.demo")
    assert result.returncode == 0, result.stderr
    assert "world size 2" in result.stdout
    assert re.search(EQUALS, result.stdout)


def test_its_exit_code_is_the_jobs() -> None:
    command = ["ferro_dist.launch", "-n", "2", "-m", "ferro_dist.demo", "--epochs", "1"]
    result = run_command(*command)
    assert result.returncode == 1
    assert "FAILED: the test accuracy is below 96%" in result.stdout
