"""Validation: the proof that lists of actions are a schedule that its ranks can run to the end.

1. Census: each action is in one list, each stage on one rank, and every stage has the
   same microbatches.
2. Completeness: each stage runs forward, and backward in one part or in two, for every
   microbatch.
3. Messages, if there are any: whatever crosses from rank to rank is sent and received once,
   and each pair of ranks agrees on the order.
4. Progress: all lists reach their ends, with sends that last until the receive is posted.
   One run proves it for all timings; see `OrderedRun`.

Cost: linear in the actions.
"""

from __future__ import annotations

from collections import defaultdict

from ferro_dist.parallel.schedules.action import NO_MICROBATCH, Action, ActionKind, B, F, I, W
from ferro_dist.parallel.schedules.arguments import check_count
from ferro_dist.parallel.schedules.dependencies import Dependencies, OrderedRun
from ferro_dist.parallel.schedules.invalid_schedule import InvalidSchedule
from ferro_dist.parallel.schedules.notation import Schedule, WrittenSchedule, parse_schedule

__all__ = ["PHASES", "check_content", "stuck_error", "validate"]

PHASES = ("step", "forward", "backward")
"""What a schedule may hold: both forwards and backwards, or one of them alone."""


def validate(
    schedule: WrittenSchedule,
    *,
    num_ranks: int | None = None,
    num_microbatches: int | None = None,
    phase: str = "step",
) -> None:
    """Prove that a schedule is sound.

    Parameters
    ----------
    schedule : lists of Action or of text
        One for each rank, with or without messages and reductions.
    num_ranks, num_microbatches : int, optional
        How many there must be; by default, as many as the lists have.
    phase : {"step", "forward", "backward"}, default "step"

    Raises
    ------
    InvalidSchedule
        It is not. The error names rank, position and action of the first fault.
    """
    lists = parse_schedule(schedule)
    if num_ranks is not None and check_count("num_ranks", num_ranks) != len(lists):
        raise InvalidSchedule(f"The schedule is for {len(lists)} ranks, not for {num_ranks}.")
    dependencies = check_content(lists, num_microbatches, phase)
    run = OrderedRun(lists, dependencies.of_unbuffered)
    if run.stuck:
        raise stuck_error(lists, run)


def check_content(
    lists: list[list[Action]], num_microbatches: int | None, phase: str
) -> Dependencies:
    """Do all of `validate` but the proof of progress, for callers that run the lists anyway."""
    if phase not in PHASES:
        raise ValueError(f"phase must be one of {', '.join(map(repr, PHASES))}, not {phase!r}.")
    census = _Census(lists, num_microbatches)
    census.check_stages()
    census.check_microbatches(phase)
    dependencies = Dependencies(lists)
    if dependencies.has_messages:
        _check_messages(census, dependencies)
    return dependencies


class _Census:
    """Where each action stands."""

    def __init__(self, lists: list[list[Action]], num_microbatches: int | None) -> None:
        self.lists = lists
        self.rank_of: dict[Action, int] = {}
        self.stage_ranks: dict[int, int] = {}
        for rank, actions in enumerate(lists):
            for position, action in enumerate(actions):
                self._count(rank, position, action)
        highest = max(action.microbatch for action in self.rank_of)
        if highest == NO_MICROBATCH:
            raise InvalidSchedule("The schedule has no microbatch.")
        self.num_microbatches = highest + 1
        if num_microbatches is not None:
            self.num_microbatches = check_count("num_microbatches", num_microbatches)

    def whereabouts(self, action: Action) -> str:
        """Return where an action stands, in words."""
        rank = self.rank_of[action]
        return f"rank {rank}, position {self.lists[rank].index(action)}: {action}"

    def fault(self, action: Action, text: str) -> InvalidSchedule:
        """Return the error about an action that is in the lists."""
        rank = self.rank_of[action]
        position = self.lists[rank].index(action)
        return _fault(rank, position, action, text)

    def missing(self, action: Action, reason: str) -> InvalidSchedule:
        """Return the error about an action that is not in the lists."""
        rank = self.stage_ranks.get(action.stage)
        where = "The schedule" if rank is None else f"The list of rank {rank}"
        return InvalidSchedule(f"{where} lacks {action}: {reason}.", rank=rank, action=action)

    def check_stages(self) -> None:
        num_stages = max(self.stage_ranks) + 1
        for stage in range(num_stages):
            if stage not in self.stage_ranks:
                raise InvalidSchedule(
                    f"No rank has stage {stage}, but there is a stage {num_stages - 1}."
                )
        for rank in range(len(self.lists)):
            if rank not in self.stage_ranks.values():
                raise InvalidSchedule(f"Rank {rank} has no stage.", rank=rank)

    def check_microbatches(self, phase: str) -> None:
        for action in self.rank_of:
            if action.microbatch >= self.num_microbatches:
                raise self.fault(action, f"microbatch {self.num_microbatches - 1} is the last")
            self._check_phase(action, phase)
        for stage in range(len(self.stage_ranks)):
            for microbatch in range(self.num_microbatches):
                if phase != "backward":
                    self._check_forward(stage, microbatch)
                if phase != "forward":
                    self._check_backward(stage, microbatch)
        self._check_reductions()

    def _count(self, rank: int, position: int, action: Action) -> None:
        if action in self.rank_of:
            text = f"it stands at {self.whereabouts(action)} already"
            raise _fault(rank, position, action, text)
        owner = self.stage_ranks.setdefault(action.stage, rank)
        if owner != rank:
            raise _fault(rank, position, action, f"rank {owner} has stage {action.stage}")
        self.rank_of[action] = rank

    def _check_phase(self, action: Action, phase: str) -> None:
        is_of_forward = action.kind in (F, *_FORWARD_MESSAGES)
        if phase == ("backward" if is_of_forward else "forward"):
            raise self.fault(action, f"a {phase} has no such action")

    def _check_forward(self, stage: int, microbatch: int) -> None:
        if (stage, F, microbatch) not in self.rank_of:
            raise self.missing(Action(stage, F, microbatch), "every stage runs forward once")

    def _check_backward(self, stage: int, microbatch: int) -> None:
        whole, *halves = (Action(stage, kind, microbatch) for kind in (B, I, W))
        present = [half for half in halves if half in self.rank_of]
        if whole in self.rank_of:
            if present:
                raise self.fault(present[0], f"it is part of {whole}, which is there too")
        elif not present:
            raise self.missing(whole, f"nor has it {halves[0]} and {halves[1]} in its place")
        elif len(present) == 1:
            absent = next(half for half in halves if half not in present)
            raise self.missing(absent, f"a backward in two parts, as by {present[0]}, needs both")

    def _check_reductions(self) -> None:
        reductions = [Action(stage, ActionKind.REDUCE) for stage in self.stage_ranks]
        absent = [action for action in reductions if action not in self.rank_of]
        if absent and len(absent) < len(reductions):
            raise self.missing(absent[0], "other stages reduce their gradients")


def _fault(rank: int, position: int, action: Action, text: str) -> InvalidSchedule:
    return InvalidSchedule(
        f"Rank {rank}, position {position}: {action}: {text}.",
        rank=rank,
        position=position,
        action=action,
    )


# Messages

_FORWARD_MESSAGES = (ActionKind.SEND_ACTIVATION, ActionKind.RECV_ACTIVATION)


def _check_messages(census: _Census, dependencies: Dependencies) -> None:
    sends = filter(None, map(dependencies.send_of, census.rank_of))
    needed = {side for send in sends for side in (send, send.other_side)}
    present = [a for a in census.rank_of if a.kind.is_message]
    for action in present:
        if action not in needed:
            raise census.fault(action, "no activation or gradient goes that way between ranks")
    for action in sorted(needed.difference(present)):
        raise census.missing(action, "stages on different ranks need a message")
    _check_order(census, present)


def _check_order(census: _Census, messages: list[Action]) -> None:
    sent: dict[tuple[int, int], list[Action]] = defaultdict(list)
    posted: dict[tuple[int, int], list[Action]] = defaultdict(list)
    for action in messages:
        rank, other_side = census.rank_of[action], action.other_side
        peer = census.rank_of[other_side]
        if action.kind.is_send:
            sent[rank, peer].append(other_side)
        else:
            posted[peer, rank].append(action)
    for queue, receives in posted.items():
        if receives != sent[queue]:
            raise _disorder(census, receives, sent[queue])


def _disorder(census: _Census, receives: list[Action], expected: list[Action]) -> InvalidSchedule:
    receive, first = next(
        pair for pair in zip(receives, expected, strict=True) if pair[0] != pair[1]
    )
    send = first.other_side
    text = f"rank {census.rank_of[send]} sends {send} before ({census.whereabouts(send)})"
    return census.fault(receive, f"{text}; post {first} first")


# Progress


def stuck_error(schedule: Schedule, run: OrderedRun) -> InvalidSchedule:
    """Return the error about lists that wait for each other, naming who waits for whom."""
    position_of = {
        action: (rank, position)
        for rank, actions in enumerate(schedule)
        for position, action in enumerate(actions)
    }
    waits_for = {rank: position_of[needed][0] for rank, needed in run.stuck.items()}
    cycle = _cycle(waits_for)
    lines = []
    for rank in cycle:
        position, needed = run.positions[rank], run.stuck[rank]
        other_rank, other_position = position_of[needed]
        lines.append(
            f"Rank {rank} is held up at position {position}, {schedule[rank][position]}, which "
            f"waits for {needed} (rank {other_rank}, position {other_position})."
        )
    position = run.positions[cycle[0]]
    return InvalidSchedule(
        f"The schedule cannot go on. {' '.join(lines)}",
        rank=cycle[0],
        position=position,
        action=schedule[cycle[0]][position],
    )


def _cycle(waits_for: dict[int, int]) -> list[int]:
    """Return ranks of which each waits for the next, and the last for the first."""
    path = [min(waits_for)]
    while (following := waits_for[path[-1]]) not in path:
        path.append(following)
    return path[path.index(following) :]
