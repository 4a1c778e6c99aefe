"""Dependencies: what must happen before an action, and how far lists that wait for it get."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence

from ferro_dist.parallel.schedules.action import Action, ActionKind, B, F, I, W
from ferro_dist.parallel.schedules.notation import Schedule
from ferro_dist.parallel.schedules.placement import placement_in

__all__ = ["Dependencies", "Key", "OrderedRun"]

Key = tuple[int, ActionKind, int]
"""An action, or a plain tuple equal to it, which takes a fraction of the time to make."""

SEND_F = ActionKind.SEND_ACTIVATION
RECV_F = ActionKind.RECV_ACTIVATION
SEND_B = ActionKind.SEND_GRADIENT
RECV_B = ActionKind.RECV_GRADIENT


class Dependencies:
    """What each action of a schedule waits for.

    Parameters
    ----------
    schedule : sequence of sequence of Action
        Each action once, each stage on one rank.

    Attributes
    ----------
    placement : list of int
        The rank of each stage.
    has_messages : bool
        Whether sends and receives are in the lists. If not, an activation or gradient is
        wherever it is needed once it has been computed.
    """

    def __init__(self, schedule: Schedule) -> None:
        self.placement = placement_in(schedule)
        self._actions: set[Key] = {action for actions in schedule for action in actions}
        self.has_messages = any(kind.is_message for _, kind, _ in self._actions)
        self._weight_gradients: dict[int, list[Key]] = defaultdict(list)
        for actions in schedule:
            for action in actions:
                if action.kind is B or action.kind is W:
                    self._weight_gradients[action.stage].append(action)

    def of(self, action: Key) -> Sequence[Key]:
        """Return what an action waits for.

        A compute action waits for its receive to be posted and for the send on the other side; a
        send waits for what it sends, but not for its receive.
        """
        stage, kind, microbatch = action
        if kind is F:
            return self._input(stage, microbatch)
        if kind is B or kind is I:
            forward = (stage, F, microbatch)
            gradient = self._output_gradient(stage, microbatch)
            return (forward, *gradient) if forward in self._actions else gradient
        if kind is W:
            return ((stage, I, microbatch),)
        if kind is SEND_F:
            return ((stage, F, microbatch),)
        if kind is SEND_B:
            return (self.backward(stage, microbatch),)
        if kind is ActionKind.REDUCE:
            return self._weight_gradients[stage]
        return ()

    def of_unbuffered(self, action: Key) -> Sequence[Key]:
        """Return what an action waits for if a send lasts until its receive is posted."""
        stage, kind, microbatch = action
        if kind is SEND_F:
            return ((stage, F, microbatch), (stage + 1, RECV_F, microbatch))
        if kind is SEND_B:
            return (self.backward(stage, microbatch), (stage - 1, RECV_B, microbatch))
        return self.of(action)

    def send_of(self, action: Key) -> Action | None:
        """Return the send of what an action makes, if a stage of another rank needs it."""
        stage, kind, microbatch = action
        if kind is F:
            send, neighbour = SEND_F, stage + 1
        elif kind is B or kind is I:
            send, neighbour = SEND_B, stage - 1
        else:
            return None
        if 0 <= neighbour < len(self.placement) and self._is_remote(stage, neighbour):
            return Action(stage, send, microbatch)
        return None

    def backward(self, stage: int, microbatch: int) -> Key:
        """Return the action that makes the gradient of a stage's input: B or I."""
        whole = (stage, B, microbatch)
        return whole if whole in self._actions else (stage, I, microbatch)

    def _is_remote(self, stage: int, neighbour: int) -> bool:
        return self.placement[stage] != self.placement[neighbour]

    def _input(self, stage: int, microbatch: int) -> Sequence[Key]:
        if stage == 0:
            return ()
        if self.has_messages and self._is_remote(stage, stage - 1):
            return ((stage, RECV_F, microbatch), (stage - 1, SEND_F, microbatch))
        return ((stage - 1, F, microbatch),)

    def _output_gradient(self, stage: int, microbatch: int) -> Sequence[Key]:
        if stage == len(self.placement) - 1:
            return ()
        if self.has_messages and self._is_remote(stage, stage + 1):
            return ((stage, RECV_B, microbatch), (stage + 1, SEND_B, microbatch))
        return (self.backward(stage + 1, microbatch),)


class OrderedRun:
    """All lists side by side, each run in its order as far as it can.

    What an action waits for depends neither on time nor on the order in which ranks take their
    turns, so one run stands for all: a rank is stuck here if and only if it always is.

    Parameters
    ----------
    schedule : sequence of sequence of Action
    dependencies : function
        What must have run before an action.
    visit : function, optional
        Called with rank, action and what it has waited for, when the action's turn has come.

    Attributes
    ----------
    positions : list of int
        How far each rank has come.
    stuck : dict of int to Action
        For each rank that cannot go on: the first action that it waits for.
    """

    def __init__(
        self,
        schedule: Schedule,
        dependencies: Callable[[Action], Sequence[Key]],
        visit: Callable[[int, Action, Sequence[Key]], None] | None = None,
    ) -> None:
        self.positions = [0] * len(schedule)
        self.stuck: dict[int, Action] = {}
        self._schedule = schedule
        self._dependencies = dependencies
        self._visit = visit
        self._has_run: set[Key] = set()
        self._waiting: dict[Key, list[int]] = defaultdict(list)
        self._runnable = list(range(len(schedule)))
        self._go_on()

    def release(self, action: Action) -> None:
        """Let those that wait for an action go on as if it had run."""
        self._mark(action)
        self._go_on()

    def _go_on(self) -> None:
        while self._runnable:
            rank = self._runnable.pop()
            self.stuck.pop(rank, None)
            self._advance(rank)

    def _advance(self, rank: int) -> None:
        actions = self._schedule[rank]
        for position in range(self.positions[rank], len(actions)):
            action = actions[position]
            needed = self._dependencies(action)
            for other in needed:
                if other not in self._has_run:
                    self.positions[rank] = position
                    self.stuck[rank] = Action(*other)
                    self._waiting[other].append(rank)
                    return
            if self._visit is not None:
                self._visit(rank, action, needed)
            self._mark(action)
        self.positions[rank] = len(actions)

    def _mark(self, action: Action) -> None:
        self._has_run.add(action)
        if action in self._waiting:
            self._runnable += self._waiting.pop(action)
