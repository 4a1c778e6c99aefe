"""The pass that gives a schedule its sends and receives."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Sequence

from ferro_dist.parallel.schedules.action import Action, ActionKind
from ferro_dist.parallel.schedules.arguments import check_count
from ferro_dist.parallel.schedules.dependencies import Dependencies, Key, OrderedRun
from ferro_dist.parallel.schedules.notation import WrittenSchedule, parse_schedule
from ferro_dist.parallel.schedules.validation import validate

__all__ = ["insert_messages"]

Queue = tuple[int, int]
"""The ranks that send and receive: their messages keep one order."""


def insert_messages(
    schedule: WrittenSchedule, *, prefetch: int = 1, phase: str = "step"
) -> list[list[Action]]:
    """Add messages to lists of actions, replacing those that they have.

    1. Send each output and each input gradient to another rank right after the action that
       made it.
    2. Post each receive `prefetch` actions ahead of the one that needs it: the message travels
       while those run.
    3. Post the receives of a queue in the order in which their messages are sent, which makes
       some of them earlier.
    4. Run the lists as if no send were buffered. If all ranks are stuck in sends, post the
       receives that they wait for at the point where the receiving ranks are stuck themselves.

    Cost: linear in the actions.

    Parameters
    ----------
    schedule : lists of Action or of text
    prefetch : int, default 1
        At least 0. Each further action ahead costs a receive buffer, and helps where a message
        takes longer than an action.
    phase : {"step", "forward", "backward"}, default "step"
        See `validate`.

    Returns
    -------
    list of list of Action

    Raises
    ------
    InvalidSchedule
        The schedule is not sound.
    """
    prefetch = check_count("prefetch", prefetch, least=0)
    lists = [[a for a in actions if not a.kind.is_message] for actions in parse_schedule(schedule)]
    validate(lists, phase=phase)
    return _MessagePass(lists, prefetch).lists()


class _MessagePass:
    """The lists in slots: slot i of a rank holds what it does between compute i-1 and compute i.

    In a slot, receives are posted before sends are started: posting never blocks, and the other
    side's send may wait for it. Reductions come last: nobody waits for them.
    """

    def __init__(self, lists: list[list[Action]], prefetch: int) -> None:
        self._computed = [[a for a in actions if a.kind.is_compute] for actions in lists]
        self._reductions = _reductions_after(lists)
        self._prefetch = prefetch
        self._dependencies = Dependencies(lists)
        self._placement = self._dependencies.placement
        self._slot_of: dict[Key, int] = {
            action: slot for actions in self._computed for slot, action in enumerate(actions)
        }
        self._send_after: dict[Action, Action] = {}
        self._queues = self._collect_sends()
        self._post_slot: dict[Action, int] = {}
        for sends in self._queues.values():
            self._choose_slots(sends)
        self._post_for_stuck_senders()

    def lists(self) -> list[list[Action]]:
        """Return the lists with messages."""
        posts: dict[tuple[int, int], list[Action]] = defaultdict(list)
        for (_, receiver), sends in self._queues.items():
            for send in sends:
                posts[receiver, self._post_slot[send.other_side]].append(send.other_side)
        return [self._list_of(rank, posts) for rank in range(len(self._computed))]

    def _list_of(self, rank: int, posts: dict[tuple[int, int], list[Action]]) -> list[Action]:
        result: list[Action] = []
        following: list[Action] = []
        for slot, action in enumerate(self._computed[rank]):
            result += posts.get((rank, slot), [])
            result += following
            result.append(action)
            following = [self._send_after[action]] if action in self._send_after else []
            following += self._reductions.get(action, [])
        return result + following

    def _collect_sends(self) -> dict[Queue, list[Action]]:
        queues: dict[Queue, list[Action]] = defaultdict(list)
        for rank, actions in enumerate(self._computed):
            for action in actions:
                send = self._dependencies.send_of(action)
                if send is not None:
                    self._send_after[action] = send
                    queues[rank, self._placement[send.other_side.stage]].append(send)
        return queues

    def _choose_slots(self, sends: list[Action]) -> None:
        slot_of_next = len(self._slot_of)
        for send in reversed(sends):
            receive = send.other_side
            ahead = self._slot_of[self._consumer(receive)] - self._prefetch
            slot_of_next = min(slot_of_next, max(0, ahead))
            self._post_slot[receive] = slot_of_next

    def _consumer(self, receive: Action) -> Key:
        stage, kind, microbatch = receive
        if kind is ActionKind.RECV_ACTIVATION:
            return (stage, ActionKind.FORWARD, microbatch)
        return self._dependencies.backward(stage, microbatch)

    def _post_for_stuck_senders(self) -> None:
        lists = self.lists()
        slots = [_slots_of(actions) for actions in lists]
        run = OrderedRun(lists, Dependencies(lists).of_unbuffered)
        while run.stuck:
            # A sound schedule has no other reason for all ranks to be stuck: some are in sends.
            receive = next(needed for needed in run.stuck.values() if needed.kind.is_recv)
            receiver = self._placement[receive.stage]
            self._post_slot[receive] = slots[receiver][run.positions[receiver]]
            run.release(receive)


def _slots_of(actions: Sequence[Action]) -> list[int]:
    """Return the slot of each position, which is the number of compute actions before it."""
    return [0, *itertools.accumulate(int(action.kind.is_compute) for action in actions)]


def _reductions_after(lists: list[list[Action]]) -> dict[Action, list[Action]]:
    """Return the reductions by the compute action that they follow."""
    reductions: dict[Action, list[Action]] = defaultdict(list)
    for actions in lists:
        last = actions[0]
        for action in actions:
            if action.kind.is_compute:
                last = action
            else:
                reductions[last].append(action)
    return reductions
