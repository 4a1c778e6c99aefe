"""The built-in schedules, and the passes that complete them."""

from __future__ import annotations

import itertools
from collections import defaultdict
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from parallel.schedules.pipeline_oracle import Oracle

from ferro_dist.parallel.schedules import (
    Action,
    ActionKind,
    InvalidSchedule,
    PipelineSchedule,
    complete,
    format_schedule,
    generate,
    gpipe,
    insert_messages,
    insert_reductions,
    interleaved_1f1b,
    loop_placement,
    one_f_one_b,
    one_phase,
    pipeline_schedule_of,
    placement_for,
    placement_of,
    simulate,
    v_placement,
    validate,
    zb_h1,
    zb_v,
)

NAMES = ["gpipe", "1f1b", "interleaved_1f1b", "zb_h1", "zb_v"]
TIMES = {"F": 1, "B": 2, "I": 1, "W": 1, "REDUCE": 1}

names = st.sampled_from(NAMES)
ranks = st.integers(1, 8)
microbatches = st.integers(1, 24)


def texts(schedule: list[list[Action]]) -> list[list[str]]:
    return [[str(action) for action in actions] for actions in schedule]


# Soundness


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("integer", [np.int64, np.array])
def test_counts_may_be_integers_of_any_type(name: str, integer: Any) -> None:
    lists = complete(name, integer(2), integer(3))
    assert lists == complete(name, 2, 3)
    assert {type(number) for row in lists for a in row for number in (a.stage, a.microbatch)} == {
        int
    }


def test_prefetch_may_be_an_integer_of_any_type() -> None:
    lists = gpipe(2, 2)
    assert insert_messages(lists, prefetch=np.array(1)) == insert_messages(lists)  # type: ignore[arg-type]


@given(names, ranks, microbatches, st.booleans(), st.integers(0, 3))
def test_every_schedule_of_any_size_is_sound(
    name: str, p: int, m: int, reduces: bool, prefetch: int
) -> None:
    lists = complete(name, p, m, reduces_gradients=reduces)
    validate(insert_messages(lists, prefetch=prefetch), num_ranks=p, num_microbatches=m)


@given(ranks, microbatches, st.integers(1, 5))
def test_interleaving_needs_no_divisible_number_of_microbatches(p: int, m: int, v: int) -> None:
    lists = complete("interleaved_1f1b", p, m, v)
    validate(lists, num_ranks=p, num_microbatches=m)
    assert placement_of(lists) == loop_placement(p, v)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("p", "m"), [(1, 1), (1, 3), (2, 1), (3, 2), (4, 3), (4, 9), (5, 5)])
def test_the_oracle_runs_every_schedule_to_its_end_without_buffers(
    name: str, p: int, m: int
) -> None:
    lists = texts(complete(name, p, m, reduces_gradients=True))
    assert Oracle(lists, TIMES, is_unbuffered=True).run().makespan is not None


@given(names, ranks, microbatches)
def test_a_stage_sums_its_gradients_in_the_order_of_its_microbatches(
    name: str, p: int, m: int
) -> None:
    of_stage: dict[tuple[int, ActionKind], list[int]] = defaultdict(list)
    for action in itertools.chain.from_iterable(generate(name, p, m)):
        of_stage[action.stage, action.kind].append(action.microbatch)
    assert all(order == list(range(m)) for order in of_stage.values())


# What they look like


def test_gpipe_runs_all_forwards_first() -> None:
    assert format_schedule(gpipe(2, 2)) == "0F0 0F1 0B0 0B1\n1F0 1F1 1B0 1B1"


def test_1f1b_warms_up_as_long_as_the_first_gradient_takes() -> None:
    assert format_schedule(one_f_one_b(3, 4)).splitlines() == [
        "0F0 0F1 0F2 0B0 0F3 0B1 0B2 0B3",
        "1F0 1F1 1B0 1F2 1B1 1F3 1B2 1B3",
        "2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3",
    ]


def test_interleaved_1f1b_is_megatrons_where_that_exists() -> None:
    assert format_schedule(interleaved_1f1b(2, 4, 2)).splitlines() == [
        "0F0 0F1 2F0 2F1 0F2 2B0 0F3 2B1 2F2 0B0 2F3 0B1 2B2 2B3 0B2 0B3",
        "1F0 1F1 3F0 3B0 3F1 3B1 1F2 1B0 1F3 1B1 3F2 3B2 3F3 3B3 1B2 1B3",
    ]


def test_interleaving_one_stage_is_1f1b() -> None:
    assert interleaved_1f1b(4, 7, 1) == one_f_one_b(4, 7)


def test_zb_h1_puts_weights_off_by_as_many_as_the_ranks_number() -> None:
    assert format_schedule(zb_h1(3, 4)).splitlines() == [
        "0F0 0F1 0F2 0I0 0W0 0F3 0I1 0W1 0I2 0W2 0I3 0W3",
        "1F0 1F1 1I0 1F2 1I1 1W0 1F3 1I2 1W1 1I3 1W2 1W3",
        "2F0 2I0 2F1 2I1 2F2 2I2 2W0 2F3 2I3 2W1 2W2 2W3",
    ]


def test_zb_v_is_the_papers_for_two_ranks() -> None:
    assert format_schedule(zb_v(2, 3)).splitlines() == [
        "0F0 0F1 0F2 3F0 3I0 3W0 3F1 3I1 3W1 0I0 0W0 3F2 3I2 3W2 0I1 0W1 0I2 0W2",
        "1F0 2F0 1F1 2F1 2I0 2W0 1F2 1I0 1W0 2F2 2I1 2W1 1I1 2I2 1I2 1W1 2W2 1W2",
    ]


# Figures


@pytest.mark.parametrize(("p", "m"), [(1, 1), (2, 2), (4, 4), (4, 7), (8, 16), (5, 33)])
def test_the_bubbles_are_those_of_the_papers(p: int, m: int) -> None:
    half = {"F": 0.5, "I": 0.5, "W": 0.5}
    assert simulate(gpipe(p, m)).bubble == pytest.approx((p - 1) / m)
    assert simulate(one_f_one_b(p, m)).bubble == pytest.approx((p - 1) / m)
    assert simulate(zb_h1(p, m)).bubble == pytest.approx((p - 1) / (3 * m))
    if m >= 2 * p - 1:
        assert simulate(zb_v(p, m), half).bubble == pytest.approx((p - 1) / (6 * m))
    for v in (2, 3, 5):
        assert simulate(interleaved_1f1b(p, m, v)).bubble == pytest.approx((p - 1) / (v * m))


@given(
    st.integers(1, 9), st.integers(1, 9), st.integers(1, 9), st.integers(1, 6), st.integers(0, 9)
)
def test_the_bubble_of_zb_h1_depends_on_the_parts_of_a_backward(
    f: int, i: int, w: int, p: int, more: int
) -> None:
    m = p + more
    bubble = simulate(zb_h1(p, m), {"F": f, "I": i, "W": w}).bubble
    # With longer weight gradients than the rest, it is the warm-up that counts.
    assert bubble == pytest.approx((p - 1) * (f + i - min(f, i, w)) / (m * (f + i + w)))


@pytest.mark.parametrize(("p", "m"), [(1, 1), (2, 4), (4, 8), (4, 12), (8, 16)])
def test_the_live_microbatches_are_those_of_the_papers(p: int, m: int) -> None:
    assert simulate(gpipe(p, m)).peak_microbatches == [m] * p
    assert simulate(one_f_one_b(p, m)).peak_microbatches == [p - r for r in range(p)]
    assert simulate(zb_h1(p, m)).peak_microbatches == [p] * p
    assert simulate(zb_v(p, m)).peak_microbatches == [p] * p
    for v in (2, 3, 4) if m >= 2 * p else ():
        peaks = simulate(interleaved_1f1b(p, m, v)).peak_live
        assert peaks == [v * p + p - 1 - 2 * r for r in range(p)]


@given(ranks, microbatches)
def test_fewer_microbatches_never_need_more_memory_than_there_are(p: int, m: int) -> None:
    for name in NAMES:
        assert max(simulate(generate(name, p, m)).peak_microbatches) <= m
    assert max(simulate(one_f_one_b(p, m)).peak_microbatches) == min(p, m)


# Names and placements


@pytest.mark.parametrize("member", PipelineSchedule)
def test_a_schedule_may_be_named(member: PipelineSchedule) -> None:
    assert pipeline_schedule_of(member.name.lower()) is member
    assert pipeline_schedule_of(member) is member
    assert generate(member, 3, 4) == generate(member.name.lower(), 3, 4)


def test_1f1b_has_the_name_that_everybody_uses() -> None:
    assert pipeline_schedule_of("1f1b") is PipelineSchedule.ONE_F_ONE_B


@pytest.mark.parametrize("unknown", ["", "2f2b", "zb-v", 1, None, "0F0 0B0"])
def test_an_unknown_name_is_refused_with_those_that_there_are(unknown: Any) -> None:
    with pytest.raises(InvalidSchedule, match="'gpipe', '1f1b'"):
        pipeline_schedule_of(unknown)


@pytest.mark.parametrize("name", NAMES)
def test_stages_are_where_the_placement_says(name: str) -> None:
    assert placement_of(generate(name, 4, 3)) == placement_for(name, 4)


def test_placements_go_round_or_down_and_up() -> None:
    assert loop_placement(3, 2) == [0, 1, 2, 0, 1, 2]
    assert v_placement(3) == [0, 1, 2, 2, 1, 0]


@pytest.mark.parametrize(
    ("name", "count"), [("gpipe", 2), ("1f1b", 2), ("zb_h1", 3), ("zb_v", 1), ("zb_v", 3)]
)
def test_only_interleaving_has_a_choice_of_stages(name: str, count: int) -> None:
    with pytest.raises(InvalidSchedule, match="on each rank"):
        generate(name, 2, 2, count)


@pytest.mark.parametrize("bad", [0, -1, 1.5, None, "2", True])
def test_sizes_must_be_positive_integers(bad: Any) -> None:
    for function in (gpipe, one_f_one_b, interleaved_1f1b, zb_h1, zb_v):
        with pytest.raises(ValueError, match="num_ranks must be an integer of at least 1"):
            function(bad, 2)
        with pytest.raises(ValueError, match="num_microbatches must be an integer of at least 1"):
            function(2, bad)
    with pytest.raises(ValueError, match="stages_per_rank must be an integer of at least 1"):
        interleaved_1f1b(2, 2, bad)


@pytest.mark.parametrize("bad", [0, -1, 1.0, "2", True])
def test_placements_need_positive_integers(bad: Any) -> None:
    for name in NAMES:
        with pytest.raises(ValueError, match="num_ranks must be an integer of at least 1"):
            placement_for(name, bad)
        with pytest.raises(ValueError, match="stages_per_rank must be an integer of at least 1"):
            placement_for(name, 2, bad)
    with pytest.raises(ValueError, match="stages_per_rank must be an integer of at least 1"):
        loop_placement(2, bad)


def test_a_written_schedule_is_checked_against_the_pipeline() -> None:
    written = ["0F0 0B0", "1F0 1B0"]
    assert format_schedule(generate(written, 2, 1)) == "0F0 0B0\n1F0 1B0"
    assert generate("0F0 0B0\n1F0 1B0\n", 2, 1) == generate(written, 2, 1)
    with pytest.raises(InvalidSchedule, match="for 2 ranks, not for 3"):
        generate(written, 3, 1)
    with pytest.raises(InvalidSchedule, match="lacks 0F1"):
        generate(written, 2, 2)


# Messages


def test_receives_are_posted_one_action_ahead_and_sends_follow_at_once() -> None:
    assert format_schedule(insert_messages(one_f_one_b(2, 3))).splitlines() == [
        "0F0 0RECV_B0 0SEND_F0 0F1 0SEND_F1 0B0 0RECV_B1 0F2 0RECV_B2 0SEND_F2 0B1 0B2",
        "1RECV_F0 1F0 1RECV_F1 1B0 1SEND_B0 1F1 1RECV_F2 1B1 1SEND_B1 1F2 1B2 1SEND_B2",
    ]


def test_stages_of_one_rank_exchange_no_messages() -> None:
    assert format_schedule(insert_messages(zb_v(2, 1))).splitlines() == [
        "3RECV_F0 0F0 0SEND_F0 3F0 3I0 0RECV_B0 3SEND_B0 3W0 0I0 0W0",
        "1RECV_F0 1F0 2RECV_B0 2F0 2SEND_F0 2I0 2W0 1I0 1SEND_B0 1W0",
    ]
    assert insert_messages(interleaved_1f1b(1, 2, 3)) == interleaved_1f1b(1, 2, 3)


@pytest.mark.parametrize("name", NAMES)
def test_messages_that_are_there_are_replaced(name: str) -> None:
    lists = complete(name, 3, 5, reduces_gradients=True)
    assert insert_messages(lists) == lists
    validate(insert_messages(lists, prefetch=2))


def test_receives_that_sends_wait_for_are_posted_in_time() -> None:
    # Posted only when needed, both ranks would be stuck in a send to the other.
    lists = insert_messages(generate(["0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1B1"], 2, 2), prefetch=0)
    assert Oracle(texts(lists), TIMES, is_unbuffered=True).run().makespan is not None


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("p", [2, 4, 8])
def test_receive_buffers_do_not_grow_with_the_microbatches(name: str, p: int) -> None:
    def most_held(m: int) -> int:
        return max(map(_most_held, complete(name, p, m)))

    assert most_held(8 * p) == most_held(4 * p) <= p + 1


def _most_held(actions: list[Action]) -> int:
    """Return the most receives of one rank that were posted and not yet used."""
    held = most = 0
    received = {(a.stage, a.kind.value[-1], a.microbatch) for a in actions if a.kind.is_recv}
    for stage, kind, microbatch in actions:
        held += kind.is_recv
        most = max(most, held)
        way = "F" if kind is ActionKind.FORWARD else "B"
        consumes = kind.is_compute and kind is not ActionKind.BACKWARD_WEIGHT
        held -= consumes and (stage, way, microbatch) in received
    return most


@pytest.mark.parametrize("prefetch", [-1, 1.5, True, None])
def test_prefetch_counts_actions(prefetch: Any) -> None:
    with pytest.raises(ValueError, match="prefetch must be"):
        insert_messages(gpipe(2, 2), prefetch=prefetch)


def test_an_unsound_schedule_gets_no_messages() -> None:
    with pytest.raises(InvalidSchedule, match="lacks 1F0"):
        insert_messages([[Action.parse("0F0"), Action.parse("0B0")], [Action.parse("1B0")]])


# Reductions


@pytest.mark.parametrize("name", NAMES)
def test_a_stage_is_reduced_once_its_last_gradient_is_there(name: str) -> None:
    for actions in complete(name, 4, 6, reduces_gradients=True):
        for action in actions:
            if action.kind is ActionKind.REDUCE:
                later = actions[actions.index(action) + 1 :]
                assert not any(a.stage == action.stage and a.kind.is_compute for a in later)
        stages = {a.stage for a in actions}
        assert sorted(a.stage for a in actions if a.kind is ActionKind.REDUCE) == sorted(stages)


def test_reductions_start_while_other_stages_still_drain() -> None:
    actions = [str(action) for action in insert_reductions(interleaved_1f1b(2, 4, 2))[0]]
    assert actions[-5:] == ["2B3", "2REDUCE", "0B2", "0B3", "0REDUCE"]


def test_a_gradient_is_sent_before_its_stage_is_reduced() -> None:
    actions = [str(a) for a in complete("1f1b", 2, 1, reduces_gradients=True)[1]]
    assert actions[-2:] == ["1SEND_B0", "1REDUCE"]


# One phase

KINDS = {"forward": {"F", "SEND_F", "RECV_F"}, "backward": {"B", "I", "W", "SEND_B", "RECV_B"}}


@given(names, st.integers(1, 5), st.integers(1, 9))
def test_either_phase_of_a_schedule_is_sound_alone(name: str, p: int, m: int) -> None:
    lists = complete(name, p, m, reduces_gradients=True)
    for phase in ("forward", "backward"):
        alone = one_phase(lists, phase)
        validate(alone, num_ranks=p, num_microbatches=m, phase=phase)
        kinds = {a.kind.value for actions in alone for a in actions}
        assert kinds <= KINDS[phase]


def test_the_passes_take_schedules_as_text() -> None:
    text = ["0F0 0B0", "1F0 1B0"]
    assert insert_messages(text) == complete(text, 2, 1)
    assert texts(insert_reductions(text))[1] == ["1F0", "1B0", "1REDUCE"]
    assert texts(one_phase(text, "forward"))[0] == ["0F0", "0SEND_F0"]


def test_there_are_two_phases() -> None:
    with pytest.raises(ValueError, match="'forward' or 'backward'"):
        one_phase(gpipe(2, 2), "step")
