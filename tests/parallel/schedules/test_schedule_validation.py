"""What `validate` lets pass, and what it says of the rest."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from parallel.schedules.pipeline_oracle import Oracle, random_lists

from ferro_dist.parallel.schedules import (
    InvalidSchedule,
    complete,
    format_schedule,
    insert_messages,
    parse_schedule,
    validate,
)
from ferro_dist.parallel.schedules.dependencies import Dependencies, OrderedRun

TIMES = {"F": 1, "B": 1, "I": 1, "W": 1, "REDUCE": 1}

randoms = st.randoms(use_true_random=False)


@st.composite
def schedules(draw: st.DrawFn) -> list[list[str]]:
    num_ranks = draw(st.integers(1, 4))
    num_stages = num_ranks + draw(st.integers(0, 3))
    return random_lists(draw(randoms), num_ranks, num_stages, draw(st.integers(1, 4)))


def with_messages(lists: list[list[str]], prefetch: int) -> list[list[str]]:
    completed = insert_messages(parse_schedule(lists), prefetch=prefetch)
    return [[str(action) for action in actions] for actions in completed]


@given(schedules())
def test_whatever_can_be_run_is_sound(lists: list[list[str]]) -> None:
    validate(lists)


@given(schedules(), st.integers(0, 3))
def test_inserted_messages_can_be_run_without_buffers(
    lists: list[list[str]], prefetch: int
) -> None:
    completed = with_messages(lists, prefetch)
    validate(completed)
    assert Oracle(completed, TIMES, is_unbuffered=True).run().makespan is not None


@given(schedules(), st.booleans(), randoms)
def test_validate_and_the_oracle_agree_on_lists_in_disorder(
    lists: list[list[str]], has_messages: bool, rng: random.Random
) -> None:
    if has_messages:
        lists = with_messages(lists, 1)
    actions = rng.choice(lists)
    for _ in range(rng.randrange(1, 4)):
        i = rng.randrange(len(actions))
        actions.insert(rng.randrange(len(actions)), actions.pop(i))
    can_end = Oracle(lists, TIMES, is_unbuffered=True).run().makespan is not None
    assert is_sound(lists) == can_end


def is_sound(lists: list[list[str]]) -> bool:
    try:
        validate(lists)
    except InvalidSchedule:
        return False
    return True


@given(schedules(), randoms)
def test_an_action_may_be_neither_missing_nor_there_twice(
    lists: list[list[str]], rng: random.Random
) -> None:
    lists = with_messages(lists, 1)
    actions = rng.choice(lists)
    i = rng.randrange(len(actions))
    twice = [[*a, a[i]] if a is actions else a for a in lists]
    missing = [[*a[:i], *a[i + 1 :]] if a is actions else a for a in lists]
    with pytest.raises(InvalidSchedule, match="already"):
        validate(twice, num_microbatches=99)
    assert not is_sound(missing)


# The words of an error

FAULTS: list[tuple[list[str], str, tuple[Any, Any, str]]] = [
    (["0F0 0B0", "1B0 1F0"], "Rank 1 is held up at position 0, 1B0", (1, 0, "1B0")),
    (["0F0 0B0 1F0", "1B0"], "Rank 1, position 0: 1B0: rank 0 has stage 1", (1, 0, "1B0")),
    (["0F0 0B0 0B0", "1F0 1B0"], "it stands at rank 0, position 1: 0B0 already", (0, 2, "0B0")),
    (["0F0", "1F0 1B0"], "The list of rank 0 lacks 0B0", (0, None, "0B0")),
    (["0F0 0I0", "1F0 1B0"], "The list of rank 0 lacks 0W0", (0, None, "0W0")),
    (["0F0 0W0", "1F0 1B0"], "The list of rank 0 lacks 0I0", (0, None, "0I0")),
    (["0F0 0I0 0W0 0B0", "1F0 1B0"], "0I0: it is part of 0B0, which is there too", (0, 1, "0I0")),
    (["0B0", "1F0 1B0"], "The list of rank 0 lacks 0F0", (0, None, "0F0")),
    (["0F0 0B0 0F1 0B1", "1F0 1B0"], "The list of rank 1 lacks 1F1", (1, None, "1F1")),
    (["0F0 0B0", "2F0 2B0"], "No rank has stage 1", (None, None, "None")),
    (["0F0 0B0", ""], "Rank 1 has no stage", (1, None, "None")),
    (["0REDUCE"], "no microbatch", (None, None, "None")),
    (["0F0 0B0 0REDUCE", "1F0 1B0"], "The list of rank 1 lacks 1REDUCE", (1, None, "1REDUCE")),
    (["0F0 0REDUCE 0B0"], "Rank 0 is held up at position 1, 0REDUCE", (0, 1, "0REDUCE")),
    (
        ["0F0 0SEND_F0 0B0", "1RECV_F0 1F0 1B0 1SEND_B0"],
        "The list of rank 0 lacks 0RECV_B0",
        (0, None, "0RECV_B0"),
    ),
    (
        ["0F0 0SEND_B0 0B0 1F0 1B0"],
        "no activation or gradient goes that way",
        (0, 1, "0SEND_B0"),
    ),
    (
        ["0F0 0SEND_F0 1RECV_F0 1F0 1B0 0B0"],
        "no activation or gradient goes that way",
        (0, 1, "0SEND_F0"),
    ),
    (
        [
            "0F0 0F1 0SEND_F0 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1",
            "1RECV_F1 1RECV_F0 1F0 1F1 1B0 1B1 1SEND_B0 1SEND_B1",
        ],
        "rank 0 sends 0SEND_F0 before .*; post 1RECV_F0 first",
        (1, 0, "1RECV_F1"),
    ),
    (
        # Each rank sends before it receives: sound with buffers alone.
        [
            "0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1",
            "1RECV_F0 1F0 1B0 1SEND_B0 1RECV_F1 1F1 1B1 1SEND_B1",
        ],
        r"3, 0SEND_F1, which waits for 1RECV_F1 \(rank 1, position 4\)\. Rank 1 .* 1SEND_B0",
        (0, 3, "0SEND_F1"),
    ),
]  # fmt: skip


@pytest.mark.parametrize(("lists", "message", "place"), FAULTS)
def test_an_error_names_rank_position_and_action(
    lists: list[str], message: str, place: tuple[Any, Any, str]
) -> None:
    with pytest.raises(InvalidSchedule, match=message) as caught:
        validate(lists)
    error = caught.value
    assert (error.rank, error.position, str(error.action)) == place


def test_a_send_is_after_what_it_sends() -> None:
    lists = complete("1f1b", 2, 1)
    lists[0][0], lists[0][2] = lists[0][2], lists[0][0]
    with pytest.raises(InvalidSchedule, match="0SEND_F0, which waits for 0F0"):
        validate(lists)


def test_numbers_of_ranks_and_microbatches_may_be_demanded() -> None:
    lists = ["0F0 0B0", "1F0 1B0"]
    validate(lists, num_ranks=2, num_microbatches=1)
    with pytest.raises(InvalidSchedule, match="for 2 ranks, not for 4"):
        validate(lists, num_ranks=4)
    with pytest.raises(ValueError, match="num_ranks must be an integer of at least 1, not '2'"):
        validate(lists, num_ranks="2")  # type: ignore[arg-type]
    with pytest.raises(InvalidSchedule, match="lacks 0F1"):
        validate(lists, num_microbatches=2)
    with pytest.raises(InvalidSchedule, match="microbatch 0 is the last"):
        validate(["0F0 0B0 0F1 0B1"], num_microbatches=1)


def test_a_phase_holds_nothing_of_the_other() -> None:
    validate(["0F0", "1F0"], phase="forward")
    validate(["0B0", "1I0 1W0"], phase="backward")
    with pytest.raises(InvalidSchedule, match="a forward has no such action"):
        validate(["0F0 0B0", "1F0"], phase="forward")
    with pytest.raises(InvalidSchedule, match="a backward has no such action"):
        validate(["0B0", "1F0 1B0"], phase="backward")
    with pytest.raises(ValueError, match="phase must be one of"):
        validate(["0F0"], phase="both")


def test_huge_numbers_are_refused_without_counting_up_to_them() -> None:
    for text in ("999999999999F0 0B0", "0F999999999999 0B0"):
        with pytest.raises(InvalidSchedule):
            validate([text])


@pytest.mark.parametrize("name", ["1f1b", "zb_v", "interleaved_1f1b"])
def test_the_proof_looks_at_each_action_a_few_times_at_most(name: str) -> None:
    stages_per_rank = 1 if name == "1f1b" else 2
    lists = complete(name, 64 // stages_per_rank, 256)
    dependencies = Dependencies(lists)
    num_looks = 0

    def counted(action: Any) -> Any:
        nonlocal num_looks
        num_looks += 1
        return dependencies.of_unbuffered(action)

    assert not OrderedRun(lists, counted).stuck
    assert num_looks <= 2 * sum(map(len, lists))


def test_a_sound_schedule_survives_being_written_down() -> None:
    lists = complete("zb_v", 3, 4, reduces_gradients=True)
    validate(format_schedule(lists))
