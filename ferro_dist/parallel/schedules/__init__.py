"""Schedules of a pipeline as data: made, checked, simulated and drawn apart from the executor.

Reading order: `action` (what a list is made of, and how it is to be run), `builtin` (the
schedules), `messages` and `reductions` (the passes), `validation`, `simulation`, `synthesis`,
`plot`.
"""

from __future__ import annotations

from ferro_dist.parallel.schedules.action import NO_MICROBATCH, Action, ActionKind
from ferro_dist.parallel.schedules.builtin import (
    gpipe,
    interleaved_1f1b,
    one_f_one_b,
    zb_h1,
    zb_v,
)
from ferro_dist.parallel.schedules.invalid_schedule import InvalidSchedule
from ferro_dist.parallel.schedules.messages import insert_messages
from ferro_dist.parallel.schedules.notation import format_schedule, parse_schedule
from ferro_dist.parallel.schedules.pipeline_schedule import (
    PipelineSchedule,
    built_in,
    complete,
    generate,
    one_phase,
    pipeline_schedule_of,
    placement_for,
)
from ferro_dist.parallel.schedules.placement import loop_placement, placement_of, v_placement
from ferro_dist.parallel.schedules.plot import plot
from ferro_dist.parallel.schedules.reductions import insert_reductions
from ferro_dist.parallel.schedules.simulation import Simulation, simulate
from ferro_dist.parallel.schedules.synthesis import synthesize
from ferro_dist.parallel.schedules.timeline import Span
from ferro_dist.parallel.schedules.validation import validate

__all__ = [
    "NO_MICROBATCH",
    "Action",
    "ActionKind",
    "InvalidSchedule",
    "PipelineSchedule",
    "Simulation",
    "Span",
    "built_in",
    "complete",
    "format_schedule",
    "generate",
    "gpipe",
    "insert_messages",
    "insert_reductions",
    "interleaved_1f1b",
    "loop_placement",
    "one_f_one_b",
    "one_phase",
    "parse_schedule",
    "pipeline_schedule_of",
    "placement_for",
    "placement_of",
    "plot",
    "simulate",
    "synthesize",
    "v_placement",
    "validate",
    "zb_h1",
    "zb_v",
]
