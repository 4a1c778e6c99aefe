"""Pictures of schedules."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest

from ferro_dist.parallel.schedules import (
    InvalidSchedule,
    complete,
    interleaved_1f1b,
    one_f_one_b,
    plot,
    simulate,
    zb_h1,
    zb_v,
)


@pytest.fixture(scope="module", autouse=True)
def _matplotlib(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Let matplotlib open the fonts that it keeps open, before descriptors are counted."""
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    plot({"title": one_f_one_b(1, 1)}, tmp_path_factory.mktemp("fonts") / "first.png")


def texts(path: Path) -> list[str]:
    return re.findall(r"<text[^>]*>([^<]*)</text>", path.read_text())


def test_a_schedule_is_drawn_with_ranks_microbatches_and_its_bubble(tmp_path: Path) -> None:
    path = plot(one_f_one_b(2, 3), tmp_path / "schedule.svg")
    assert path == tmp_path / "schedule.svg"
    drawn = texts(path)
    assert {"rank 0", "rank 1", "forward", "backward", "idle"} <= set(drawn)
    assert drawn.count("2") >= 4  # forward and backward of microbatch 2 on two ranks
    assert "makespan 12 · idle 33.3% of useful time" in drawn


def test_png_is_drawn_too(tmp_path: Path) -> None:
    path = plot(zb_v(3, 5), str(tmp_path / "schedule.png"))
    assert path.read_bytes().startswith(b"\x89PNG")


def test_several_runs_share_one_scale(tmp_path: Path) -> None:
    halves = {"F": 0.5, "I": 0.5, "W": 0.5}
    runs = {"1F1B": one_f_one_b(4, 8), "ZB-V": simulate(zb_v(4, 8), halves)}
    drawn = texts(plot(runs, tmp_path / "runs.svg"))
    assert {"1F1B", "ZB-V", "input gradient", "weight gradient"} <= set(drawn)
    assert "makespan 33 · idle 37.5% of useful time" in drawn
    assert "makespan 25.5 · idle 6.2% of useful time" in drawn


def test_a_measured_run_is_drawn_over_its_ideal(tmp_path: Path) -> None:
    lists = complete("zb_h1", 2, 4, reduces_gradients=True)
    times = {"F": 1.0, "I": 1.0, "W": 1.0, "REDUCE": 0.5}
    ideal = simulate(lists, times)
    measured = [
        (span.rank, str(span.action), 100 + 1.1 * span.start_s, 100 + 1.1 * span.end_s)
        for span in reversed(ideal.spans)
    ]
    path = plot(measured, tmp_path / "run.svg", ideal=ideal, time_label="time, s")
    drawn = texts(path)
    assert {"ideal, behind", "reduction", "time, s"} <= set(drawn)
    assert any(text.endswith("· 1.100 × ideal") for text in drawn)


def test_messages_in_a_timeline_are_left_out(tmp_path: Path) -> None:
    run = [(0, "0F0", 0.0, 1.0), (0, "0SEND_F0", 1.0, 1.1), (1, "1F0", 1.2, 2.0)]
    assert "forward" in texts(plot(run, tmp_path / "run.svg"))


def test_microbatches_that_do_not_fit_into_their_boxes_are_left_out(tmp_path: Path) -> None:
    drawn = texts(plot(interleaved_1f1b(4, 64, 3), tmp_path / "many.svg"))
    assert "17" not in drawn


def test_the_same_picture_has_the_same_bytes(tmp_path: Path) -> None:
    paths = [plot(zb_h1(3, 4), tmp_path / f"{i}.svg") for i in range(2)]
    assert paths[0].read_bytes() == paths[1].read_bytes()


def test_nothing_is_left_in_matplotlibs_settings(tmp_path: Path) -> None:
    import matplotlib

    before = dict(matplotlib.rcParams)
    plot(one_f_one_b(2, 2), tmp_path / "schedule.png")
    assert dict(matplotlib.rcParams) == before


def test_without_matplotlib_it_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ImportError, match="pip install matplotlib"):
        plot(one_f_one_b(2, 2), tmp_path / "schedule.png")


@pytest.mark.parametrize(
    ("run", "message"),
    [
        ([(0, "0F0", 0.0, 1.0), (0, "0F1", 1.0)], "Entry 1 of the timeline"),
        ([(0, "0Q0", 0.0, 1.0)], "Entry 0 of the timeline .* is no action"),
        ([(-1, "0F0", 0.0, 1.0)], "rank is negative"),
        ([(0, "0F0", 2.0, 1.0)], "end before its start"),
        ([(0, "0F0", 0.0, float("nan"))], "end before its start"),
        ([(0, "0SEND_F0", 0.0, 1.0)], "holds no F, B, I, W"),
        (["0F0 0B0", "1F0"], "lacks 1B0"),
        (5, "one list of actions for each rank"),
    ],
)
def test_what_cannot_be_drawn_is_refused(tmp_path: Path, run: Any, message: str) -> None:
    with pytest.raises((InvalidSchedule, ValueError), match=message):
        plot(run, tmp_path / "schedule.png")
    assert not list(tmp_path.iterdir())
