"""Pictures of one data-parallel step: what each rank computes, and what travels meanwhile."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

__all__ = ["duration_s", "plot", "write_trace"]

Step = dict[str, Any]
"""What a rank says of one step: see ``ddp_worker.py``. All ranks have one clock."""

# The colours of `ferro_dist.parallel.schedules.plot`: colour-blind readers can tell them apart.
_COLOURS = {"forward": "#3b69d6", "backward": "#993f30", "optimizer": "#d6ac2e"}
_BUCKETS, _EXPOSED = "#57bf7d", "#2b2b2b"


def plot(steps: Sequence[Step], path: Path, title: str = "") -> Path | None:
    """Draw two lanes for each rank, the time that nothing hides shaded; None without matplotlib."""
    try:
        import matplotlib
    except ImportError:
        return None
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axis = plt.subplots(figsize=(12, 1.3 + 0.8 * len(steps)), layout="constrained")
    origin_s = min(step["begin_s"] for step in steps)
    for rank, step in enumerate(steps):
        _draw(axis, step, origin_s, lane=-2.4 * rank)
    lanes = [(-2.4 * rank - part, rank, part) for rank in range(len(steps)) for part in (0, 1)]
    axis.set_yticks([lane for lane, _, _ in lanes])
    axis.set_yticklabels(
        [f"rank {rank} {'communication' if part else 'computation'}" for _, rank, part in lanes]
    )
    axis.tick_params(axis="y", length=0)
    axis.spines[:].set_visible(False)
    axis.set_xlim(0, 1e3 * duration_s(steps))
    axis.set_xlabel("time, ms")
    axis.set_title(title)
    _explain(figure)
    figure.savefig(path, dpi=120)
    plt.close(figure)
    return path


def duration_s(steps: Sequence[Step]) -> float:
    """How long a step took, from the first rank's start to the last one's end."""
    ends_s = [step["end_s"] for step in steps]
    return float(max(ends_s) - min(step["begin_s"] for step in steps))


def write_trace(steps: Sequence[Step], path: Path) -> Path:
    """Write what `plot` draws for ``chrome://tracing`` and Perfetto."""
    origin_s = min(step["begin_s"] for step in steps)
    events: list[dict[str, Any]] = []
    for rank, step in enumerate(steps):
        events += _names(rank)
        for name, begin_s, end_s in _computation(step):
            events.append(_event(rank, 0, name, begin_s - origin_s, end_s - origin_s))
        for number, bucket in enumerate(step["buckets"]):
            begin_s, end_s = bucket["start_s"] - origin_s, bucket["end_s"] - origin_s
            event = _event(rank, 1, f"bucket {number}", begin_s, end_s)
            event["args"] = {key: bucket[key] for key in ("nbytes", "ready_s", "exposed_s")}
            event["args"]["ready_s"] -= origin_s
            events.append(event)
    path.write_text(json.dumps({"traceEvents": events}), encoding="utf-8")
    return path


def _computation(step: Step) -> list[tuple[str, float, float]]:
    return [
        ("forward", step["begin_s"], step["forward_end_s"]),
        ("backward", step["forward_end_s"], step["compute_end_s"]),
        ("optimizer", step["backward_end_s"], step["end_s"]),
    ]


def _names(rank: int) -> list[dict[str, Any]]:
    lanes = enumerate(("computation", "communication"))
    return [
        {"ph": "M", "pid": rank, "name": "process_name", "args": {"name": f"rank {rank}"}},
        *(
            {"ph": "M", "pid": rank, "tid": lane, "name": "thread_name", "args": {"name": name}}
            for lane, name in lanes
        ),
    ]


def _event(rank: int, lane: int, name: str, begin_s: float, end_s: float) -> dict[str, Any]:
    times = {"ts": begin_s * 1e6, "dur": (end_s - begin_s) * 1e6}
    return {"ph": "X", "pid": rank, "tid": lane, "name": name, **times}


def _draw(axis: Any, step: Step, origin_s: float, lane: float) -> None:
    def box(y: float, begin_s: float, end_s: float, **style: Any) -> None:
        axis.barh(
            y, (end_s - begin_s) * 1e3, 0.8, (begin_s - origin_s) * 1e3, edgecolor="white", **style
        )

    # Between the end of backward's work and its return, a rank does nothing but wait.
    exposed = (step["compute_end_s"] - origin_s) * 1e3, (step["backward_end_s"] - origin_s) * 1e3
    axis.fill_between(exposed, lane + 0.5, lane - 1.5, color=_EXPOSED, alpha=0.2, linewidth=0)
    for name, begin_s, end_s in _computation(step):
        box(lane, begin_s, end_s, color=_COLOURS[name])
    for bucket in step["buckets"]:
        box(lane - 1, bucket["start_s"], bucket["end_s"], color=_BUCKETS)


def _explain(figure: Any) -> None:
    from matplotlib.patches import Patch

    patches = [Patch(color=colour, label=name) for name, colour in _COLOURS.items()]
    patches.append(Patch(color=_BUCKETS, label="bucket"))
    patches.append(Patch(color=_EXPOSED, alpha=0.2, label="exposed: backward waits"))
    figure.legend(
        handles=patches, loc="outside lower center", ncols=len(patches), frameon=False, fontsize=9
    )
