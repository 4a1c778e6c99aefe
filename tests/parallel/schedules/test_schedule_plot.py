"""Pictures of schedules."""

from __future__ import annotations

import itertools
import re
import sys
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

import numpy as np
import pytest

from ferro_dist.parallel.pipeline.plan import PipelinePlan
from ferro_dist.parallel.schedules import (
    Action,
    ActionKind,
    InvalidSchedule,
    Span,
    complete,
    interleaved_1f1b,
    one_f_one_b,
    plot,
    simulate,
    zb_h1,
    zb_v,
)
from ferro_dist.parallel.schedules.plot import COLOURS, _darkened


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
        Span(rank, action, 100 + 1.1 * start_s, 100 + 1.1 * end_s)
        for rank, action, start_s, end_s in reversed(ideal.spans)
    ]
    path = plot(measured, tmp_path / "run.svg", ideal=ideal, time_label="time, s")
    drawn = texts(path)
    assert {"ideal, behind", "reduction", "time, s"} <= set(drawn)
    assert any(text.endswith("· 1.100 × ideal") for text in drawn)


def test_a_plan_is_drawn_in_milliseconds(tmp_path: Path) -> None:
    lists = complete("1f1b", 2, 4)
    predicted = simulate(lists, {"F": 0.01, "B": 0.02})
    plan = PipelinePlan(lists, {}, [0], [0.0], predicted, predicted.spans, [2, 1], [0.0, 0.0])
    plan.plot(tmp_path / "plan.svg")
    drawn = texts(tmp_path / "plan.svg")
    assert "time, ms" in drawn
    assert any(text.startswith("makespan 150 ") for text in drawn)


def test_numbers_are_left_out_of_boxes_that_are_narrower_than_others(tmp_path: Path) -> None:
    run = [Span(0, Action(0, ActionKind.FORWARD, m), m, m + 0.9) for m in range(10)]
    run.append(Span(0, Action(0, ActionKind.FORWARD, 10), 10, 10.05))
    drawn = texts(plot(run, tmp_path / "run.svg"))
    assert "9" in drawn
    assert "10" not in drawn[drawn.index("9") :]


@pytest.mark.parametrize("seen", ["by all", "without red", "without green", "without blue"])
def test_kinds_are_told_apart_whatever_colours_one_sees(seen: str) -> None:
    kinds = [
        [_darkened(colour, darkness) for darkness in (0.0, 0.5)]
        for kind, colour in COLOURS.items()
        if kind is not ActionKind.REDUCE  # which has a place of its own
    ]
    for one, other in itertools.combinations(kinds, 2):
        for a, b in itertools.product(one, other):
            assert np.linalg.norm(in_cielab(a, seen) - in_cielab(b, seen)) > 15


# G. M. Machado et al., "A Physiologically-based Model for Simulation of Color Vision Deficiency",
# IEEE TVCG 2009: severity 1, for linear RGB.
SEEN: dict[str, Any] = {
    "by all": np.eye(3),
    "without red": [
        [0.1523, 1.0526, -0.2049],
        [0.1145, 0.7863, 0.0992],
        [-0.0039, -0.0481, 1.0520],
    ],
    "without green": [
        [0.3673, 0.8606, -0.2280],
        [0.2801, 0.6725, 0.0474],
        [-0.0118, 0.0429, 0.9689],
    ],
    "without blue": [
        [1.2555, -0.0767, -0.1788],
        [-0.0784, 0.9308, 0.1476],
        [0.0047, 0.6914, 0.3039],
    ],
}
XYZ_OF_RGB = [[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]]
WHITE = [0.9505, 1.0, 1.0888]


def in_cielab(colour: Any, seen: str) -> Any:
    """Return a colour where distances are how different it looks; 2 is just noticed."""
    linear = np.clip(SEEN[seen] @ np.power(colour, 2.2), 0, 1)
    x, y, z = np.cbrt(np.asarray(XYZ_OF_RGB) @ linear / WHITE)
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


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
        (["0F0 0B0", "1F0"], "lacks 1B0"),
        (5, "one list of actions for each rank"),
        ({}, "no run to plot"),
    ],
)
def test_what_cannot_be_drawn_is_refused(tmp_path: Path, run: Any, message: str) -> None:
    with pytest.raises((InvalidSchedule, ValueError), match=message):
        plot(run, tmp_path / "schedule.png")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["schedule", "schedule."])
def test_a_path_that_says_nothing_of_the_kind_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(ValueError, match=r"path must end in a format, such as \.svg"):
        plot(one_f_one_b(2, 2), tmp_path / name)
    assert not list(tmp_path.iterdir())


def test_words_are_drawn_as_they_are(tmp_path: Path) -> None:
    title, label = r"costs $5 & <more>, \frac$", r"time, $\s$"
    run = {title: one_f_one_b(2, 2)}
    picture = plot(run, tmp_path / "schedule.svg", time_label=label).read_text()
    assert escape(title) in picture
    assert label in picture
