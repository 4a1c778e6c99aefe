"""The picture of a schedule: ranks as lanes, time to the right, a box for each action."""

from __future__ import annotations

import colorsys
import math
import os
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from ferro_dist.parallel.schedules.action import ActionKind
from ferro_dist.parallel.schedules.notation import WrittenSchedule
from ferro_dist.parallel.schedules.simulation import Simulation, simulate
from ferro_dist.parallel.schedules.timeline import Span, busy_times

__all__ = ["Drawable", "plot"]

Drawable = WrittenSchedule | Simulation | Sequence[Span]
"""A schedule, a simulation of one, or the spans of a run."""

Colour = tuple[float, float, float]

# They differ in lightness, too: distinguishable with any colour blindness, in all shades.
COLOURS: Mapping[ActionKind, str] = {
    ActionKind.FORWARD: "#3b69d6",
    ActionKind.BACKWARD: "#993f30",
    ActionKind.BACKWARD_INPUT: "#57bf7d",
    ActionKind.BACKWARD_WEIGHT: "#d6ac2e",
    ActionKind.REDUCE: "#3e1d53",
}
NAMES: Mapping[ActionKind, str] = {
    ActionKind.FORWARD: "forward",
    ActionKind.BACKWARD: "backward",
    ActionKind.BACKWARD_INPUT: "input gradient",
    ActionKind.BACKWARD_WEIGHT: "weight gradient",
    ActionKind.REDUCE: "reduction",
}
IDLE = "#eeeeec"
INK = "#2b2b2b"
BRIGHT = 0.35
"""The luminance from which a box has dark numbers."""

WIDTH_IN = 12.0
LANE_IN = 0.34
"""Height of a rank's lane; 1 in the units of the vertical axis."""

BOX = 0.84
BOX_BEFORE_IDEAL = 0.52
IDEAL = 0.92
REDUCTION = 0.16

LANE_WIDTH_PT = WIDTH_IN * 72 * 0.94
BOX_MARGIN_PT = 2.0
LARGEST_FONT_PT = 8.0
SMALLEST_FONT_PT = 4.5
DIGIT_WIDTH = 0.64
"""How wide a digit of the default font is, as a share of the font's size."""


def plot(
    run: Drawable | Mapping[str, Drawable],
    path: str | os.PathLike[str],
    *,
    ideal: Drawable | None = None,
    time_label: str = "time",
) -> Path:
    """Draw what each rank does when, into a file.

    Idle time shows as the lane's grey background. The stages of a rank have shades of one colour,
    the first the lightest.

    Parameters
    ----------
    run : schedule, Simulation or list of Span, or mapping of titles to these
        Spans may be measured, as those of a `PipelinePlan`. Several runs are drawn one below the
        other on one scale of time.
    path : path
        Its suffix gives the format: ``.svg``, ``.png``, ``.pdf``.
    ideal : schedule, Simulation or list of Span, optional
        Drawn pale behind the run.
    time_label : str, default "time"

    Returns
    -------
    pathlib.Path
        Of the picture.

    Raises
    ------
    ImportError
        matplotlib is not installed.
    InvalidSchedule
        A schedule that is not sound.
    ValueError
        There is nothing to draw, or the suffix names no kind of picture.

    Examples
    --------
    This makes ``docs/schedules.png``; if a rank has two stages, each is half as large:

    >>> halves = {"F": 0.5, "I": 0.5, "W": 0.5}
    >>> runs = {
    ...     "GPipe": gpipe(4, 8),
    ...     "1F1B": one_f_one_b(4, 8),
    ...     "interleaved 1F1B": simulate(interleaved_1f1b(4, 8, 2), halves),
    ...     "ZB-H1": zb_h1(4, 8),
    ...     "ZB-V": simulate(zb_v(4, 8), halves),
    ... }
    >>> plot(runs, "docs/schedules.png", time_label="time, in forwards")
    """
    matplotlib = _matplotlib()
    if not Path(path).suffix.strip("."):
        raise ValueError(f"A plot's path must end in a format, such as .svg or .png, not {path!r}.")
    titled = run if isinstance(run, Mapping) else {"": run}
    if not titled:
        raise ValueError("There is no run to plot: the mapping of titles is empty.")
    behind = [] if ideal is None else _spans(ideal)
    panels = [_Panel(title, _spans(one), behind) for title, one in titled.items()]
    # Text as text, and the same bytes for the same picture.
    style = {"svg.fonttype": "none", "svg.hashsalt": "ferro_dist", "font.size": 9.0}
    with matplotlib.rc_context(style):
        figure = _figure(panels, time_label)
        metadata = {"Date": None} if Path(path).suffix.lower() == ".svg" else None
        figure.savefig(path, dpi=120, metadata=metadata)
    return Path(path)


def _matplotlib() -> Any:
    try:
        import matplotlib
        import matplotlib.figure
    except ImportError as error:
        raise ImportError(
            "A plot needs matplotlib, which is not installed: pip install matplotlib.",
            name="matplotlib",
        ) from error
    return matplotlib


@dataclass(frozen=True)
class _Panel:
    """One run, and what it is compared with."""

    title: str
    spans: list[Span]
    ideal: list[Span]

    @property
    def num_ranks(self) -> int:
        return max(span.rank for span in self.spans) + 1

    @property
    def end_s(self) -> float:
        return max(span.end_s for span in [*self.spans, *self.ideal])

    def caption(self) -> str:
        """Say how long the run took, and how much of that was idle."""
        makespan_s = max(span.end_s for span in self.spans)
        useful_s = sum(busy_times(self.spans, self.num_ranks))
        idle_s = makespan_s * self.num_ranks - useful_s
        text = f"makespan {makespan_s:.4g}"
        if useful_s:
            text += f" · idle {idle_s / useful_s:.1%} of useful time"
        if self.ideal:
            text += f" · {makespan_s / max(span.end_s for span in self.ideal):.3f} × ideal"
        return text


def _spans(run: Drawable) -> list[Span]:
    """Return the spans of a run, which begins at time 0."""
    if isinstance(run, Simulation):
        return run.spans
    if not (isinstance(run, Sequence) and run and isinstance(run[0], Span)):
        return simulate(cast("WrittenSchedule", run)).spans
    spans = cast("Sequence[Span]", run)
    origin_s = min(span.start_s for span in spans)
    return [s._replace(start_s=s.start_s - origin_s, end_s=s.end_s - origin_s) for s in spans]


# Drawing


def _figure(panels: list[_Panel], time_label: str) -> Any:
    import matplotlib.figure

    lanes = [panel.num_ranks for panel in panels]
    height_in = LANE_IN * sum(lanes) + 0.42 * len(panels) + 0.85
    figure = matplotlib.figure.Figure(figsize=(WIDTH_IN, height_in), layout="constrained")
    axes = figure.subplots(
        len(panels), 1, sharex=True, squeeze=False, gridspec_kw={"height_ratios": lanes}
    )[:, 0]
    end_s = max(panel.end_s for panel in panels) or 1.0
    for axis, panel in zip(axes, panels, strict=True):
        _draw_panel(axis, panel, end_s)
    axes[-1].set_xlabel(time_label, parse_math=False)
    _draw_legend(figure, panels)
    return figure


def _draw_panel(axis: Any, panel: _Panel, end_s: float) -> None:
    ranks = range(panel.num_ranks)
    axis.set_xlim(0, end_s)
    axis.set_ylim(panel.num_ranks - 0.5, -0.5)
    axis.set_yticks(ranks, [f"rank {rank}" for rank in ranks])
    axis.tick_params(length=0, labelcolor=INK)
    axis.spines[:].set_visible(False)
    style = {"fontweight": "bold", "color": INK, "fontsize": 10}
    axis.set_title(panel.title, loc="left", parse_math=False, **style)
    axis.set_title(panel.caption(), loc="right", color=INK, fontsize=9)
    own_end_s = max(span.end_s for span in panel.spans)
    for rank in ranks:
        axis.broken_barh([(0, own_end_s)], (rank - IDEAL / 2, IDEAL), color=IDLE, linewidth=0)
    shades = _shades(panel.spans)
    if panel.ideal:
        _draw_boxes(axis, panel.ideal, IDEAL, shades, alpha=0.35)
    _draw_boxes(axis, panel.spans, BOX_BEFORE_IDEAL if panel.ideal else BOX, shades, alpha=1.0)
    _draw_numbers(axis, panel.spans, shades, end_s)


def _shades(spans: Sequence[Span]) -> dict[tuple[int, ActionKind], Colour]:
    """Return the colour of each stage and kind: the stages of a rank from light to dark."""
    stages_of: dict[int, set[int]] = defaultdict(set)
    for span in spans:
        stages_of[span.rank].add(span.action.stage)
    shades = {}
    for stages in stages_of.values():
        for index, stage in enumerate(sorted(stages)):
            darkness = index / len(stages)
            for kind, colour in COLOURS.items():
                shades[stage, kind] = _darkened(colour, darkness)
    return shades


def _darkened(colour: str, darkness: float) -> Colour:
    red, green, blue = (int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5))
    hue, lightness, saturation = colorsys.rgb_to_hls(red, green, blue)
    return colorsys.hls_to_rgb(hue, lightness * (1 - 0.42 * darkness), saturation)


def _draw_boxes(
    axis: Any,
    spans: Sequence[Span],
    height: float,
    shades: Mapping[tuple[int, ActionKind], Colour],
    alpha: float,
) -> None:
    # One collection for each rank and colour: drawing boxes one by one takes minutes for many.
    bars: dict[tuple[int, int, ActionKind], list[tuple[float, float]]] = defaultdict(list)
    for rank, action, start_s, end_s in spans:
        bars[rank, action.stage, action.kind].append((start_s, end_s - start_s))
    for (rank, stage, kind), boxes in bars.items():
        bottom, tall = rank - height / 2, height
        if kind is ActionKind.REDUCE:
            bottom, tall = rank + height / 2 - REDUCTION / 2, REDUCTION
        axis.broken_barh(
            boxes,
            (bottom, tall),
            facecolor=shades.get((stage, kind), COLOURS[kind]),
            edgecolor="white",
            linewidth=0.5,
            alpha=alpha,
        )


def _draw_numbers(
    axis: Any,
    spans: Sequence[Span],
    shades: Mapping[tuple[int, ActionKind], Colour],
    end_s: float,
) -> None:
    """Write microbatch numbers where they fit, for kinds of which half of the boxes have room."""
    of_kind: dict[ActionKind, list[Span]] = defaultdict(list)
    for span in spans:
        if span.action.kind.is_compute:
            of_kind[span.action.kind].append(span)
    for same_kind in of_kind.values():
        size_pt = _number_size_pt(same_kind, end_s)
        if size_pt < SMALLEST_FONT_PT:
            continue
        for rank, action, start_s, box_end_s in same_kind:
            number = str(action.microbatch)
            if _room_pt(box_end_s - start_s, end_s) < size_pt * DIGIT_WIDTH * len(number):
                continue
            axis.text(
                (start_s + box_end_s) / 2,
                rank,
                number,
                size=size_pt,
                color=INK if _luminance(shades[action.stage, action.kind]) > BRIGHT else "white",
                ha="center",
                va="center_baseline",
            )


def _number_size_pt(spans: Sequence[Span], end_s: float) -> float:
    width_s = statistics.median(span.end_s - span.start_s for span in spans)
    num_digits = max(len(str(span.action.microbatch)) for span in spans)
    # A little less, so that boxes of about that width have numbers, too.
    room_pt = 0.85 * _room_pt(width_s, end_s)
    return min(LARGEST_FONT_PT, room_pt / (DIGIT_WIDTH * num_digits))


def _room_pt(width_s: float, end_s: float) -> float:
    return width_s / end_s * LANE_WIDTH_PT - BOX_MARGIN_PT


def _luminance(colour: Colour) -> float:
    """Return how bright a colour looks on a screen, from 0 to 1; approximately."""
    weights = (0.2126, 0.7152, 0.0722)
    return math.fsum(w * math.pow(share, 2.2) for w, share in zip(weights, colour, strict=True))


def _draw_legend(figure: Any, panels: Sequence[_Panel]) -> None:
    from matplotlib.patches import Patch

    present = {span.action.kind for panel in panels for span in panel.spans}
    handles = [
        Patch(facecolor=colour, label=NAMES[kind])
        for kind, colour in COLOURS.items()
        if kind in present
    ]
    handles.append(Patch(facecolor=IDLE, label="idle"))
    if any(panel.ideal for panel in panels):
        handles.append(Patch(facecolor=INK, alpha=0.25, label="ideal, behind"))
    figure.legend(
        handles=handles, loc="outside lower center", ncols=len(handles), frameon=False, fontsize=9
    )
