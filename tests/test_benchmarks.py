"""What the benchmarks say of a failure, what their options mean, and what their figures."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import gpu_collectives
import import_time
import launch
import measure
import numpy as np
import pytest
import worker
from cases import Case
from collectives import (
    Budget,
    Contest,
    Options,
    compare,
    is_chosen,
    parse_arguments,
    start_distance,
)
from ddp import are_averaged
from group import Group, scratch_directory, start_all
from peers import systems

import ferro_dist as fd

BENCHMARKS = Path(measure.__file__).parent


@pytest.fixture
def options() -> Options:
    return parse_arguments(["--collectives", "barrier", "--rounds", "2", "--burst-ms", "1"])


@pytest.fixture
def stack() -> Iterator[contextlib.ExitStack]:
    with contextlib.ExitStack() as stack:
        yield stack


@pytest.fixture
def folder(stack: contextlib.ExitStack) -> Path:
    """Make a folder with a path short enough for sockets; that of `tmp_path` need not be."""
    return stack.enter_context(scratch_directory())


def read_records(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def start_ours(ranks: int, folder: Path, stack: contextlib.ExitStack) -> Group:
    ours = [each for each in systems(ranks, "host") if each.name == "ferro_dist/untuned"]
    (group,) = start_all(ours, ranks, "host", folder, stack)
    return group


# Failures


def test_who_is_measured_does_not_pay_for_a_dead_probe(
    options: Options,
    folder: Path,
    stack: contextlib.ExitStack,
    capsys: pytest.CaptureFixture[str],
) -> None:
    contestant = start_ours(2, folder, stack)
    probe = start_distance(options, folder, stack)
    if probe is None:
        pytest.skip("there is one core: no distance is measured")
    probe.dismiss()
    contest = Contest(Case("barrier", 0, 2), [contestant], probe, options, set())
    (result,) = contest.run(deadline=float("inf"))
    assert [burst.distance for burst in result.bursts] == ["unknown", "unknown"]
    said = capsys.readouterr().out
    assert said.count("the distance between the cores is unknown: distance/two_cores") == 1
    assert "without" not in said


def test_a_system_that_has_ended_is_named_once(
    options: Options,
    folder: Path,
    stack: contextlib.ExitStack,
    capsys: pytest.CaptureFixture[str],
) -> None:
    contestant = start_ours(1, folder, stack)
    contestant.dismiss()
    said: set[str] = set()
    for _ in range(2):
        contest = Contest(Case("barrier", 0, 1), [contestant], None, options, said)
        assert contest.run(deadline=float("inf")) == []
    assert capsys.readouterr().out.count("without ferro_dist/untuned from here on: ") == 1


def test_what_was_recorded_before_control_c_is_kept(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "records.jsonl"
    path.write_text("an older run\n")
    with contextlib.suppress(KeyboardInterrupt), measure.RecordFile(path, "") as file:
        file.write({"p50_us": 1.0}, {"p50_us": 2.0})
        raise KeyboardInterrupt
    assert [each["p50_us"] for each in read_records(path)] == [1.0, 2.0]
    said = capsys.readouterr().err
    assert f"ended early: {path} has what was recorded until then (2 lines)" in said


def test_a_run_that_has_recorded_nothing_leaves_an_older_file(tmp_path: Path) -> None:
    path = tmp_path / "records.jsonl"
    path.write_text("an older run\n")
    with contextlib.suppress(KeyboardInterrupt), measure.RecordFile(path, ""):
        raise KeyboardInterrupt
    assert path.read_text() == "an older run\n"


class InterruptedFile(measure.RecordFile):
    """Is followed by Ctrl-C once it has the records of the first case."""

    def write(self, *records: Mapping[str, Any]) -> None:
        super().write(*records)
        raise KeyboardInterrupt


def test_a_comparison_records_each_case_before_the_next(tmp_path: Path) -> None:
    options = parse_arguments(["--only", "ferro_dist/untuned", "--rounds", "2", "--burst-ms", "1"])
    path = tmp_path / "records.jsonl"
    with pytest.raises(KeyboardInterrupt):
        compare(1, options, Budget(0.0, 1), InterruptedFile(path, ""))
    assert [(each["collective"], each["size"]) for each in read_records(path)] == [("allreduce", 4)]


def test_rounds_until_control_c_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "records.jsonl"
    monkeypatch.setattr(sys, "argv", ["launch.py", "--output", str(path)])
    numbers = itertools.count()

    def start() -> None:
        if next(numbers) == 3:
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(launch, "find_launchers", lambda: ({launch.FLOOR: start}, {}))
    with pytest.raises(KeyboardInterrupt):
        launch.main()
    assert [each["runs"] for each in read_records(path)] == [3]


def test_sigterm_leaves_nothing_of_a_comparison(folder: Path, tmp_path: Path) -> None:
    program = [sys.executable, "-u", str(BENCHMARKS / "collectives.py")]
    options = ["--only", "ferro_dist/untuned", "--collectives", "barrier", "--rounds", "1000000"]
    comparison = subprocess.Popen(
        [*program, *options, "--output", str(tmp_path / "records.jsonl")],
        env={**os.environ, "TMPDIR": str(folder)},
        stdout=subprocess.PIPE,
        text=True,
    )
    with comparison:
        assert comparison.stdout is not None
        assert "ferro_dist/untuned: " in comparison.stdout.readline()
        comparison.terminate()
    assert comparison.returncode == 128 + signal.SIGTERM
    assert list(folder.iterdir()) == []  # its own folder goes last, after the ranks


class Idle(worker.CollectiveAdapter):
    """Returns from every collective, and does nothing."""

    barrier = "meetings.append(None)"

    def connect(self) -> tuple[int, int]:
        self.meetings: list[None] = []
        return 0, 2

    def about(self) -> str:
        return "idle"

    def names(self) -> dict[str, Any]:
        return {"meetings": self.meetings}

    def statement(self, case: Any) -> str:
        return "pass"

    def array(self, case: Any, count: int) -> Any:
        return np.zeros(count, np.float32)


def test_a_wrong_result_is_told_when_nobody_waits_for_this_rank() -> None:
    adapter = Idle()
    said = worker.answer(adapter, {"do": "prepare", "case": Case("allreduce", 8, 2).to_json()})
    assert said["error"] == "AssertionError: allreduce of 8 bytes gave a wrong result"
    assert len(adapter.meetings) == 2


class PlainMemory:
    """Stands for a GPU."""

    to_numpy = staticmethod(np.asarray)

    def synchronize(self) -> None: ...


@pytest.mark.parametrize(
    ("statement", "result"), [("None", "out"), ("x.fill(7)", "x"), ("x * 7", "x * 7")]
)
def test_a_wrong_result_is_found_wherever_it_is(statement: str, result: str) -> None:
    x, out = np.empty((2, 3), np.float32)
    calls = gpu_collectives.loop_over(statement, result, {}, x, out)
    (host,) = fd.SimulatedBackend.create_group(1)
    with host, pytest.raises(AssertionError, match="it on 3 elements gave a wrong result"):
        gpu_collectives.check_result(host, PlainMemory(), "it", calls, x, out)


def test_gradients_that_are_not_averaged_are_found() -> None:
    alone = {"slope_alone": 1.0, "terms": 2.0}, {"slope_alone": 3.0, "terms": 4.0}
    assert are_averaged([{**each, "slope_parallel": 2.0} for each in alone])
    assert not are_averaged([{**each, "slope_parallel": each["slope_alone"]} for each in alone])


def test_sockets_have_paths_that_the_kernel_takes_however_long_tmpdir_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stack: contextlib.ExitStack
) -> None:
    long = tmp_path / ("x" * 100)
    long.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(long))  # what it has read of TMPDIR
    folder = stack.enter_context(scratch_directory())
    assert start_ours(1, folder, stack).is_alive


# Options


@pytest.mark.parametrize("given", ["", ","])
def test_only_chooses_every_system_if_it_names_none(given: str) -> None:
    options = parse_arguments(["--only", given])
    assert all(is_chosen(system, options) for system in systems(2, "host"))


@pytest.mark.parametrize(
    ("named", "chosen"), [("gloo", ["gloo/default"]), ("gloo/unbound", ["gloo/unbound"])]
)
def test_quick_leaves_out_no_system_that_is_named(named: str, chosen: list[str]) -> None:
    options = parse_arguments(["--quick", "--only", named])
    assert [each.name for each in systems(2, "host") if is_chosen(each, options)] == chosen


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--sizes 4,4X", "argument --sizes: not a size: '4X'; write 4, 16K or 4M"),
        ("--ranks 2,0", "argument --ranks: not a whole number of at least 1: '0'"),
        ("--rounds 0", "argument --rounds: not a whole number of at least 1: '0'"),
        ("--output /", "argument --output: no file can be written at /"),
        ("--collectives scan", "argument --collectives: unknown: 'scan'; choose from allreduce,"),
        ("--only nccl", "argument --only: no nccl; there are ferro_dist, gloo,"),
        (
            "--transport tcp --memory symmetric",
            "argument --memory: over TCP no memory is symmetric",
        ),
    ],
)
def test_an_option_that_cannot_be_is_refused_with_what_can(
    arguments: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        parse_arguments(arguments.split())
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("program", [launch, import_time])
def test_rounds_that_are_given_count_more_than_quick(
    program: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["program", "--quick", "--rounds", "3"])
    assert program.parse_arguments().rounds == 3


# What is measured


def test_the_last_of_three_ranks_has_no_partner(folder: Path, stack: contextlib.ExitStack) -> None:
    options = parse_arguments(["--memory", "plain", "--rounds", "1", "--burst-ms", "1"])
    groups = [start_ours(3, folder, stack)]
    contest = Contest(Case("send_recv", 4, 3), groups, None, options, set())
    (result,) = contest.run(deadline=float("inf"))
    assert result.times_ns()


def test_a_size_below_that_of_an_element_is_one_element() -> None:
    assert Case("allreduce", 4, 2, "float64").nbytes == 8
    assert Case("all_gather", 4, 2, "float64").nbytes == 16


def test_the_package_that_is_imported_is_the_installed_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "ferro_dist.py").write_text("raise ImportError('of the working directory')")
    monkeypatch.chdir(tmp_path)
    assert import_time.time_in_new_interpreter("import ferro_dist") > 0


def test_the_barrier_between_steps_of_a_pipeline_is_not_timed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("torch", reason="torch is not installed")
    import pipeline_systems

    now_s = 0.0

    def wait(seconds: float) -> None:
        nonlocal now_s
        now_s += seconds

    monkeypatch.setattr(time, "perf_counter", lambda: now_s)
    times_s = pipeline_systems._time_steps(lambda: wait(0.25), lambda: wait(8.0), steps=2)
    assert times_s == [0.25, 0.25]


def test_the_step_of_a_pipeline_is_drawn(tmp_path: Path) -> None:
    for library in ("torch", "matplotlib"):
        pytest.importorskip(library, reason=f"{library} is not installed")
    import pipeline

    picture = tmp_path / "step.svg"
    pipeline.main(["--plot", str(picture)])
    assert "rank 3" in picture.read_text()


def test_a_data_parallel_step_is_drawn(tmp_path: Path) -> None:
    for library in ("torch", "matplotlib"):
        pytest.importorskip(library, reason=f"{library} is not installed")
    picture = tmp_path / "step.svg"
    command = [sys.executable, str(BENCHMARKS / "ddp.py"), "--draw", str(picture)]
    subprocess.run(command, check=True, timeout=240)
    assert "rank 1 communication" in picture.read_text()


# Figures and records


def test_p50_is_the_median_and_p95_was_measured() -> None:
    times = [1.0, 2.0, 3.0, 10.0]
    assert (measure.p50(times), measure.p95(times)) == (2.5, 10.0)


def test_each_turn_begins_with_another_contestant() -> None:
    assert [measure.rotated(["a", "b", "c"], turn) for turn in (0, 1, 3)] == [
        ["a", "b", "c"], ["b", "c", "a"], ["a", "b", "c"],
    ]  # fmt: skip
    assert measure.rotated([], 1) == []


def test_a_run_without_ferro_dist_is_described() -> None:
    program = "import measure; print(measure.describe_run()['calls_are_compiled'])"
    ran = subprocess.run(
        [sys.executable, "-S", "-c", program],  # -S: without what is installed
        env={**os.environ, "PYTHONPATH": str(BENCHMARKS)},
        cwd=BENCHMARKS,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (ran.stdout, ran.stderr) == ("False\n", "")
