"""Schedules made to measure: never worse than the built-in ones, and within their memory."""

from __future__ import annotations

import math
import random
from collections import defaultdict
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ferro_dist.parallel.schedules import (
    ActionKind,
    generate,
    loop_placement,
    one_f_one_b,
    placement_for,
    simulate,
    synthesize,
    v_placement,
    validate,
    zb_h1,
)
from ferro_dist.parallel.schedules.durations import Durations
from ferro_dist.parallel.schedules.list_scheduling import Policy, Problem, schedule_greedily
from ferro_dist.parallel.schedules.synthesis import _policies

THIRDS = {"F": 1.0, "I": 1.0, "W": 1.0}
BUILTIN = [("gpipe", 1), ("1f1b", 1), ("zb_h1", 1), ("zb_v", 2), ("interleaved_1f1b", 2)]

few = settings(max_examples=25)
seconds = st.floats(0.1, 10)


@st.composite
def costs(draw: st.DrawFn, num_stages: int) -> dict[Any, float]:
    return {(s, kind): draw(seconds) for s in range(num_stages) for kind in ("F", "I", "W")}


@few
@given(st.data(), st.integers(1, 4), st.integers(1, 6), st.sampled_from(BUILTIN))
def test_it_is_never_slower_than_a_built_in_schedule_that_fits(
    data: st.DataObject, p: int, m: int, name_and_stages: tuple[str, int]
) -> None:
    name, stages_per_rank = name_and_stages
    durations = data.draw(costs(p * stages_per_rank))
    latency = data.draw(st.sampled_from([0.0, 0.5]))
    builtin = simulate(generate(name, p, m), durations, latency)
    cap = max(builtin.peak_microbatches)
    lists = synthesize(
        durations,
        cap,
        placement=placement_for(name, p),
        num_microbatches=m,
        latency=latency,
    )
    validate(lists, num_ranks=p, num_microbatches=m)
    ours = simulate(lists, durations, latency)
    assert ours.makespan_s <= builtin.makespan_s * (1 + 1e-12)
    assert max(ours.peak_microbatches) <= cap * (1 + 1e-9)


@few
@given(st.data(), st.integers(1, 4), st.integers(1, 6), st.integers(0, 3))
def test_it_keeps_within_the_memory_of_each_rank(
    data: st.DataObject, p: int, m: int, more: int
) -> None:
    placement = [*range(p), *data.draw(st.lists(st.integers(0, p - 1), max_size=3))]
    placement = data.draw(st.permutations(placement))
    memory = [float(data.draw(st.integers(1, 5))) for _ in placement]
    caps = [float(more)] * p
    for nbytes, rank in zip(memory, placement, strict=True):
        caps[rank] += nbytes
    durations = data.draw(costs(len(placement)))
    lists = synthesize(durations, caps, placement=placement, num_microbatches=m, memory=memory)
    validate(lists, num_ranks=p, num_microbatches=m)
    peaks = simulate(lists, durations, memory=memory).peak_nbytes
    assert peaks is not None
    assert all(peak <= cap for peak, cap in zip(peaks, caps, strict=True))


@given(st.data(), st.integers(1, 4), st.integers(1, 5))
def test_every_policy_makes_a_sound_schedule_that_fits(data: st.DataObject, p: int, m: int) -> None:
    placement = data.draw(st.permutations([*range(p), *range(p), *range(p)]))
    problem = Problem(
        placement=placement,
        num_microbatches=m,
        durations=Durations(data.draw(costs(len(placement)))),
        latency=[data.draw(seconds)] * (len(placement) - 1),
        memory=[1.0] * len(placement),
        capacity=[float(data.draw(st.integers(3, 9)))] * p,
    )
    flags = st.booleans()
    shares = st.floats(0, 1)
    policy = data.draw(st.builds(Policy, flags, flags, flags, flags, shares, shares))
    lists = schedule_greedily(problem, policy)
    validate(lists, num_ranks=p, num_microbatches=m)
    assert max(simulate(lists).peak_live) <= problem.capacity[0]


@pytest.mark.parametrize(
    ("placement", "capacity", "count"),
    [
        (loop_placement(4), math.inf, 10),
        (loop_placement(4), 4.0, 30),
        (v_placement(4), math.inf, 20),
        (v_placement(4), 4.0, 60),
    ],
)
def test_policies_that_cannot_differ_are_tried_once(
    placement: list[int], capacity: float, count: int
) -> None:
    stages = len(placement)
    problem = Problem(
        placement, 8, Durations(THIRDS), [0.0] * (stages - 1), [1.0] * stages, [capacity] * 4
    )
    assert len(list(_policies(problem))) == count


@few
@given(st.data())
def test_a_stage_sums_its_gradients_in_the_order_of_its_microbatches(data: st.DataObject) -> None:
    lists = synthesize(data.draw(costs(4)), 3, placement=v_placement(2), num_microbatches=5)
    of_stage: dict[tuple[int, str], list[int]] = defaultdict(list)
    for actions in lists:
        for stage, kind, microbatch in actions:
            of_stage[stage, "B" if kind in ("B", "W") else kind.value].append(microbatch)
    assert all(order == sorted(order) for order in of_stage.values())


def test_equal_stages_leave_no_bubble_but_the_first_input_takes() -> None:
    placement = placement_for("zb_h1", 4)
    lists = synthesize(THIRDS, 4, placement=placement, num_microbatches=8)
    assert simulate(lists).makespan_s == simulate(zb_h1(4, 8)).makespan_s == 3 + 3 * 8


def test_unequal_stages_gain_by_it() -> None:
    rng = random.Random(11)
    durations: dict[Any, float] = {
        (stage, kind): rng.uniform(0.5, 1.5) for stage in range(4) for kind in ("F", "I", "W")
    }
    lists = synthesize(durations, 8, placement=loop_placement(4), num_microbatches=12)
    builtin_s = [
        simulate(generate(name, 4, 12), durations).makespan_s for name in ("gpipe", "1f1b", "zb_h1")
    ]
    assert simulate(lists, durations).makespan_s < 0.95 * min(builtin_s)


def test_a_single_microbatch_may_be_all_that_fits() -> None:
    for placement in (loop_placement(3), loop_placement(3, 2), v_placement(3)):
        lists = synthesize(THIRDS, 1, placement=placement, num_microbatches=4)
        assert simulate(lists).peak_microbatches == [1, 1, 1]


def test_more_memory_makes_it_no_slower_on_equal_stages() -> None:
    spans = [
        simulate(synthesize(THIRDS, cap, placement=v_placement(4), num_microbatches=10)).makespan_s
        for cap in (1, 2, 3, 4)
    ]
    assert spans == sorted(spans, reverse=True)


def test_a_cap_below_one_microbatch_cannot_be_met() -> None:
    with pytest.raises(ValueError, match=r"rank 0 may hold 0\.5, and a single microbatch takes 1"):
        synthesize(THIRDS, 0.5, placement=[0, 1], num_microbatches=2)
    with pytest.raises(ValueError, match="rank 1 may hold 9, and a single microbatch takes 10"):
        synthesize(THIRDS, 9, placement=[0, 1], num_microbatches=2, memory=[1, 10])


def test_backwards_stay_whole_where_their_parts_were_not_measured() -> None:
    durations = {"F": 1.0, "B": 2.0}
    lists = synthesize(durations, placement=[0, 1, 2], num_microbatches=6)
    assert {a.kind for actions in lists for a in actions} == {
        ActionKind.FORWARD,
        ActionKind.BACKWARD,
    }
    assert simulate(lists, durations).makespan_s == simulate(one_f_one_b(3, 6)).makespan_s


def test_a_backward_is_split_only_where_that_gains() -> None:
    costly = {"F": 1.0, "B": 2.0, "I": 1.9, "W": 1.9}
    lists = synthesize(costly, placement=[0, 1], num_microbatches=16)
    kinds = [a.kind for actions in lists for a in actions]
    assert kinds.count(ActionKind.BACKWARD) > 2 * kinds.count(ActionKind.BACKWARD_INPUT)


def test_the_first_stage_runs_whole_backwards_since_nobody_waits_for_its_gradient() -> None:
    lists = synthesize(THIRDS, 4, placement=[0, 1, 2, 3], num_microbatches=8)
    assert "0B0" in map(str, lists[0])


def test_the_same_arguments_make_the_same_schedule() -> None:
    rng = random.Random(7)
    durations: dict[Any, float] = {
        (stage, kind): rng.random() + 0.1 for stage in range(6) for kind in ("F", "I", "W")
    }
    first, second = (
        synthesize(dict(order), 3, placement=v_placement(3), num_microbatches=7)
        for order in (durations.items(), reversed(durations.items()))
    )
    assert first == second


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"placement": []}, "placement must give stages"),
        ({"placement": [0, 2]}, "placement must give stages"),
        ({"placement": [0, -1]}, "a rank of placement"),
        ({"placement": [0, 1.0]}, "a rank of placement"),
        ({"num_microbatches": 0}, "num_microbatches must be"),
        ({"memory_cap": [1, 2, 3]}, "memory_cap must be one number, or 2"),
        ({"memory_cap": -1}, "memory_cap must be finite and not negative"),
        ({"memory_cap": 10**400}, "memory_cap must be finite"),
        ({"memory": [1]}, "memory must be one number, or 2"),
        ({"latency": [1, 2]}, "latency must be one number, or 1"),
        ({"durations": {"F": 1}}, "lack B on stage 0"),
        ({"durations": {"F": 1, "I": 1}}, "lack B on stage 0"),
    ],
)
def test_arguments_are_checked(arguments: dict[str, Any], message: str) -> None:
    given_: dict[str, Any] = {"durations": THIRDS, "placement": [0, 1], "num_microbatches": 2}
    with pytest.raises(ValueError, match=message):
        synthesize(**{**given_, **arguments})


@pytest.mark.parametrize("placement", [2, None, {0, 1}, {0: 0, 1: 1}])
def test_placement_is_a_sequence(placement: Any) -> None:
    with pytest.raises(TypeError, match="placement must give the rank of each stage"):
        synthesize(THIRDS, placement=placement, num_microbatches=2)
