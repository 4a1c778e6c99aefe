"""What the benchmarks say of a failure, and what their figures mean."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import measure
import pytest
from cases import Case
from collectives import Contest, Options, is_chosen, parse_arguments, start_distance
from group import Group, start_all
from peers import systems


@pytest.fixture
def options() -> Options:
    return parse_arguments(["--collectives", "barrier", "--rounds", "2", "--burst-ms", "1"])


@pytest.fixture
def stack() -> Iterator[contextlib.ExitStack]:
    with contextlib.ExitStack() as stack:
        yield stack


@pytest.fixture
def contestant(tmp_path: Path, stack: contextlib.ExitStack) -> Group:
    ours = [each for each in systems(2, "host") if each.name == "ferro_dist/untuned"]
    (group,) = start_all(ours, 2, "host", tmp_path, stack)
    return group


def test_who_is_measured_does_not_pay_for_a_dead_probe(
    contestant: Group,
    options: Options,
    tmp_path: Path,
    stack: contextlib.ExitStack,
    capsys: pytest.CaptureFixture[str],
) -> None:
    probe = start_distance(options, tmp_path, stack)
    if probe is None:
        pytest.skip("there is one core: no distance is measured")
    probe.dismiss()
    contest = Contest(Case("barrier", 0, 2), [contestant], probe, options, set())
    (result,) = contest.run(deadline=float("inf"))
    assert [burst.distance for burst in result.bursts] == ["unknown", "unknown"]
    said = capsys.readouterr().out
    assert said.count("the distance between the cores is unknown: distance/two_cores") == 1
    assert "without" not in said


def test_p50_is_the_median_and_p95_was_measured() -> None:
    times = [1.0, 2.0, 3.0, 10.0]
    assert (measure.p50(times), measure.p95(times)) == (2.5, 10.0)


def test_each_turn_begins_with_another_contestant() -> None:
    assert [measure.rotated(["a", "b", "c"], turn) for turn in (0, 1, 3)] == [
        ["a", "b", "c"], ["b", "c", "a"], ["a", "b", "c"],
    ]  # fmt: skip
    assert measure.rotated([], 1) == []


@pytest.mark.parametrize("given", ["", ","])
def test_only_chooses_every_system_if_it_names_none(given: str) -> None:
    options = parse_arguments(["--only", given])
    assert all(is_chosen(system, options) for system in systems(2, "host"))
