"""The simulator, beside one that shares no code with it."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from parallel.schedules.pipeline_oracle import Oracle, random_lists

from ferro_dist.parallel.schedules import (
    InvalidSchedule,
    complete,
    gpipe,
    insert_messages,
    insert_reductions,
    interleaved_1f1b,
    one_f_one_b,
    parse_schedule,
    simulate,
    zb_h1,
    zb_v,
)
from ferro_dist.parallel.schedules.dependencies import Dependencies
from ferro_dist.parallel.schedules.durations import Durations
from ferro_dist.parallel.schedules.simulation import simulate_checked

times = st.fixed_dictionaries({kind: st.integers(1, 4) for kind in ("F", "B", "I", "W", "REDUCE")})


@st.composite
def schedules(draw: st.DrawFn) -> list[list[str]]:
    num_ranks = draw(st.integers(1, 4))
    num_stages = num_ranks + draw(st.integers(0, 3))
    rng = draw(st.randoms(use_true_random=False))
    lists = random_lists(rng, num_ranks, num_stages, draw(st.integers(1, 4)))
    if draw(st.booleans()):
        with_messages = insert_messages(parse_schedule(lists), prefetch=draw(st.integers(0, 3)))
        lists = [[str(action) for action in actions] for actions in with_messages]
    if draw(st.booleans()):
        reduced = insert_reductions(parse_schedule(lists))
        lists = [[str(action) for action in actions] for actions in reduced]
    return lists


@given(schedules(), times, st.integers(0, 5))
def test_it_agrees_with_the_oracle(
    lists: list[list[str]], durations: dict[str, int], latency: int
) -> None:
    ours = simulate(lists, durations, latency)
    theirs = Oracle(lists, durations, latency).run()
    assert ours.makespan_s == theirs.makespan
    assert ours.busy_s == theirs.busy
    assert ours.peak_live == theirs.peak_live
    starts = {str(s.action): s.start_s for s in ours.spans if s.action.kind.is_compute}
    assert starts == theirs.starts


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "interleaved_1f1b", "zb_h1", "zb_v"])
@pytest.mark.parametrize("latency", [0, 1, 7])
def test_it_agrees_with_the_oracle_on_schedules_in_use(name: str, latency: int) -> None:
    durations = {"F": 2, "B": 5, "I": 3, "W": 2, "REDUCE": 4}
    lists = complete(name, 3, 7, reduces_gradients=True)
    theirs = Oracle([[str(a) for a in actions] for actions in lists], durations, latency).run()
    assert simulate(lists, durations, latency).makespan_s == theirs.makespan


@given(schedules(), times)
def test_the_bubble_is_idle_over_useful_time(
    lists: list[list[str]], durations: dict[str, int]
) -> None:
    run = simulate(lists, durations)
    idle_s = sum(run.makespan_s - busy_s for busy_s in run.busy_s)
    assert run.bubble == pytest.approx(idle_s / sum(run.busy_s))


# Durations


def test_a_backward_takes_as_long_as_its_parts_unless_told_otherwise() -> None:
    assert simulate(["0F0 0B0"], {"F": 1, "I": 2, "W": 3}).makespan_s == 6
    assert simulate(["0F0 0B0"], {"F": 1, "I": 2, "W": 3, "B": 4}).makespan_s == 5


def test_the_time_of_a_stage_goes_before_the_time_of_all() -> None:
    run = simulate(["0F0 0B0", "1F0 1B0"], {"F": 1, "B": 2, (1, "F"): 10, (0, "B"): 20})
    assert [(str(s.action), s.end_s - s.start_s) for s in run.spans] == [
        ("0F0", 1), ("1F0", 10), ("1B0", 2), ("0B0", 20)
    ]  # fmt: skip


def test_a_stage_may_be_an_integer_of_numpy() -> None:
    times: dict[Any, Any] = {"F": 1, "B": 2, (np.int64(1), "F"): Fraction(7, 2)}
    assert simulate(["0F0 0B0", "1F0 1B0"], times).makespan_s == 1 + 3.5 + 2 + 2


def test_the_slowest_stage_holds_up_the_others() -> None:
    times = {"F": 1, "B": 2, (1, "F"): 4, (1, "B"): 8}
    assert simulate(one_f_one_b(3, 8), times).makespan_s == 1 + 8 * 12 + 2


BAD_DURATIONS: list[tuple[Any, type[Exception], str]] = [
    ({"F": 1}, ValueError, r"lack B on stage 1: give 'B' .*, or both 'I' and 'W'\.$"),
    ({"F": 1, "I": 1}, ValueError, "lack B on stage 1"),
    ({}, ValueError, "lack F on stage 0"),
    ({(0, "F"): 1, "B": 1}, ValueError, r"'F' for all stages or \(1, 'F'\)"),
    ({"F": -1, "B": 1}, ValueError, "must be finite and not negative"),
    ({"F": math.nan, "B": 1}, ValueError, "must be finite"),
    ({"F": math.inf, "B": 1}, ValueError, "must be finite"),
    ({"F": 10**400, "B": 1}, ValueError, "must be finite"),
    ({"F": "1", "B": 1}, TypeError, "must be a number"),
    ({"F": np.ones(2), "B": 1}, TypeError, "must be a number"),
    ({"F": True, "B": 1}, TypeError, "must be a number"),
    ({"X": 1}, ValueError, "cannot have an entry for 'X'"),
    ({"SEND_F": 1}, ValueError, "cannot have an entry for 'SEND_F'"),
    ({("F", 0): 1}, ValueError, "cannot have an entry for"),
    ({(-1, "F"): 1}, ValueError, "cannot have an entry for"),
    ({0: 1}, ValueError, "cannot have an entry for 0"),
    ({(True, "F"): 1}, ValueError, "cannot have an entry for"),
    ([1, 2], TypeError, "must map kinds to times"),
]


@pytest.mark.parametrize(("durations", "error", "message"), BAD_DURATIONS)
def test_durations_are_checked(durations: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        simulate(["0F0 0B0", "1F0 1B0"], durations)


def test_times_whose_sum_is_not_finite_are_refused() -> None:
    for durations, latency in (({"F": 1e308, "B": 1e308}, 0), ({"F": 1, "B": 1}, 1e308)):
        with pytest.raises(ValueError, match="their sum is not finite"):
            simulate(one_f_one_b(4, 8), durations, latency)


def test_numbers_of_numpy_are_numbers() -> None:
    times = {"F": np.float32(1), "B": np.int64(2)}
    run = simulate(["0F0 0B0", "1F0 1B0"], times, np.float64(1), np.array([3, 4]))
    assert run.makespan_s == 8
    assert run.peak_nbytes == [3, 4]


# Latency


def test_latency_is_paid_on_the_way_down_and_up() -> None:
    assert simulate(one_f_one_b(3, 1), latency=10).makespan_s == 9 + 4 * 10
    assert simulate(one_f_one_b(3, 1), latency=[10, 1]).makespan_s == 9 + 2 * 11


def test_stages_of_one_rank_pay_none() -> None:
    assert simulate(zb_v(1, 1), latency=10).makespan_s == 6


def test_an_early_receive_hides_latency_that_a_late_one_shows() -> None:
    def makespan_s(prefetch: int) -> float:
        return simulate(insert_messages(zb_h1(4, 16), prefetch=prefetch), latency=0.5).makespan_s

    assert makespan_s(1) < makespan_s(0)


@pytest.mark.parametrize("latency", [-1, math.inf, math.nan, [1], [1, 2, 3], [1, -1]])
def test_latency_is_checked(latency: Any) -> None:
    with pytest.raises(ValueError, match="latency must be"):
        simulate(one_f_one_b(3, 1), latency=latency)


@pytest.mark.parametrize(
    "no_number", ["x", "12", None, [None, 1], [[1, 2], [3, 4]], {1, 2}, {0: 1}]
)
@pytest.mark.parametrize("name", ["latency", "memory"])
def test_what_is_no_number_is_refused_by_name(name: str, no_number: Any) -> None:
    if name == "memory" and no_number is None:
        no_number = [None] * 3  # None alone is the default
    with pytest.raises(TypeError, match=f"{name} must be one number, or"):
        simulate(one_f_one_b(3, 1), **{name: no_number})


# Memory


def test_memory_is_counted_in_bytes_of_each_stage() -> None:
    lists = interleaved_1f1b(2, 4, 2)
    assert simulate(lists).peak_nbytes is None
    assert simulate(lists, memory=10).peak_nbytes == [50, 30]
    assert simulate(gpipe(2, 3), memory=[100, 7]).peak_nbytes == [300, 21]
    with pytest.raises(ValueError, match="memory must be one number, or 2"):
        simulate(gpipe(2, 3), memory=[1, 2, 3])


def test_a_microbatch_lives_until_its_weight_gradient_is_done() -> None:
    assert simulate(["0F0 0I0 0F1 0I1 0W0 0W1"]).peak_live == [2]
    assert simulate(["0F0 0B0 0F1 0B1"]).peak_live == [1]


# Reductions, phases and faults


def test_reductions_run_beside_compute_one_after_the_other() -> None:
    run = simulate(["0F0 1F0 1B0 1REDUCE 0B0 0REDUCE"], {"F": 1, "B": 2, "REDUCE": 5})
    assert run.makespan_s == 4 + 5 + 5
    assert run.busy_s == [6]


def test_one_phase_may_be_simulated_alone() -> None:
    assert simulate(["0F0 0F1", "1F0 1F1"], phase="forward").makespan_s == 3


def test_it_prints_without_its_many_spans() -> None:
    shown = repr(simulate(["0F0 0F1", "1F0 1F1"], phase="forward"))
    assert "makespan_s=3" in shown
    assert "spans" not in shown


def test_it_looks_at_each_action_a_few_times_at_most() -> None:
    class Counted(Dependencies):
        num_looks = 0

        def of(self, action: Any) -> Any:
            self.num_looks += 1
            return super().of(action)

    lists = complete("zb_v", 32, 256)
    dependencies = Counted(lists)
    run = simulate_checked(lists, dependencies, Durations({"F": 1, "I": 1, "W": 1}))
    assert len(run.spans) == sum(action.kind.is_compute for actions in lists for action in actions)
    assert dependencies.num_looks <= 2 * sum(map(len, lists))


def test_an_unsound_schedule_is_refused() -> None:
    with pytest.raises(InvalidSchedule, match="lacks 1F0"):
        simulate(["0F0 0B0", "1B0"])
    with pytest.raises(InvalidSchedule, match="held up at position 0"):
        simulate(["0F0 0B0", "1B0 1F0"])
    with pytest.raises(InvalidSchedule, match="held up at position 0"):
        simulate(["2F0 0F0", "1F0"], phase="forward")
