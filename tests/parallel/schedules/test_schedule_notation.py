"""Actions and schedules as text."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ferro_dist.parallel.schedules import (
    NO_MICROBATCH,
    Action,
    ActionKind,
    InvalidSchedule,
    format_schedule,
    one_f_one_b,
    parse_schedule,
    placement_of,
)

numbers = st.integers(0, 10**6)
actions = st.builds(
    Action, numbers, st.sampled_from([k for k in ActionKind if k is not ActionKind.REDUCE]), numbers
) | st.builds(Action, numbers, st.just(ActionKind.REDUCE), st.just(NO_MICROBATCH))
messages = actions.filter(lambda a: a.kind.is_send or a.kind.is_recv).filter(lambda a: a.stage > 0)


@given(actions)
def test_an_action_is_parsed_from_what_it_prints(action: Action) -> None:
    assert Action.parse(str(action)) == action


def test_actions_print_as_in_the_literature() -> None:
    assert [str(a) for a in one_f_one_b(2, 1)[1]] == ["1F0", "1B0"]
    assert repr([Action(1, ActionKind.BACKWARD_WEIGHT, 3)]) == "[1W3]"
    assert str(Action(2, ActionKind.REDUCE)) == "2REDUCE"


def test_an_action_with_a_kind_of_str_can_be_printed_too() -> None:
    kind: Any = "F"
    assert str(Action(2, kind, 0)) == "2F0"


@pytest.mark.parametrize(
    "text",
    ["", "F", "F0", "2F", "2 F0", "-1F0", "2F-1", "2X0", "2f0", "2F0 2F1", "2REDUCE0", "2SEND0",
     "2SEND_W0", "٢F0", "2F0x", "1.0F0"],
)  # fmt: skip
def test_other_text_is_no_action(text: str) -> None:
    with pytest.raises(ValueError, match="is no action"):
        Action.parse(text)


@pytest.mark.parametrize("thing", [None, 2, b"2F0", Action(2, ActionKind.REDUCE)])
def test_an_action_is_parsed_from_text_alone(thing: Any) -> None:
    with pytest.raises(TypeError, match=f"from text, not from {type(thing).__name__}"):
        Action.parse(thing)


@given(messages)
def test_the_other_side_of_the_other_side_is_the_action(action: Action) -> None:
    assert action.other_side.other_side == action
    assert action.other_side.kind.is_send == action.kind.is_recv


def test_an_activation_goes_to_the_next_stage_and_a_gradient_to_the_one_before() -> None:
    assert str(Action.parse("2SEND_F7").other_side) == "3RECV_F7"
    assert str(Action.parse("2SEND_B7").other_side) == "1RECV_B7"


@pytest.mark.parametrize("text", ["2F0", "2W0", "2REDUCE"])
def test_what_is_no_message_has_no_other_side(text: str) -> None:
    with pytest.raises(ValueError, match="neither a send nor a receive"):
        _ = Action.parse(text).other_side


WRITTEN: list[Any] = [
    "0F0 0B0\n1F0, 1B0\n",
    ["0F0 0B0", "1F0,1B0"],
    [["0F0", "0B0"], ("1F0", "1B0")],
    ([Action.parse("0F0"), "0B0"], (text for text in ("1F0", "1B0"))),
]


@pytest.mark.parametrize("written", WRITTEN, ids=["text", "rows", "strings", "mixed"])
def test_a_schedule_may_be_written_in_several_ways(written: Any) -> None:
    assert format_schedule(parse_schedule(written)) == "0F0 0B0\n1F0 1B0"


def test_a_schedule_is_formatted_and_placed_as_it_is_written() -> None:
    for written in ("0F0 0B0\n1F0, 1B0\n", ["0F0 0B0", "1F0,1B0"]):
        assert format_schedule(written) == "0F0 0B0\n1F0 1B0"
        assert placement_of(written) == [0, 1]
    with pytest.raises(InvalidSchedule, match="but no stage 1"):
        placement_of("0F0 0B0\n2F0 2B0")


def test_the_error_of_an_entry_says_where_it_is() -> None:
    with pytest.raises(InvalidSchedule, match=r"Rank 1, position 2: '1Q0' is no action") as caught:
        parse_schedule(["0F0 0B0", "1F0 1B0 1Q0"])
    assert (caught.value.rank, caught.value.position, caught.value.action) == (1, 2, "1Q0")


@pytest.mark.parametrize(
    "written",
    [
        5, None, [], "", [[], []], [5], [None], [[5]], [[None]], [["0F0", ["0B0"]]], [b"0F0 0B0"],
        [Action(0, ActionKind.FORWARD, 0)], [[Action(-1, ActionKind.FORWARD, 0)]],
        [[Action(0, ActionKind.FORWARD)]], [[Action(0, ActionKind.REDUCE, 0)]],
        [[Action(True, ActionKind.FORWARD, 0)]], [[("0", "F", 0)]],
        [[Action(0, "F", 0)]],  # type: ignore[arg-type]
        [[Action(0.0, ActionKind.FORWARD, 0)]],  # type: ignore[arg-type]
        {"0F0 0B0", "1F0 1B0"}, {"0F0 0B0": 0, "1F0 1B0": 1}, [{"0F0", "0B0"}],
        "1" * 5000 + "F0",
    ],
)  # fmt: skip
def test_what_is_no_schedule_is_refused(written: Any) -> None:
    with pytest.raises(InvalidSchedule):
        parse_schedule(written)
