"""The executor: runs one rank's list of actions, and nothing else.

`ferro_dist.parallel.schedules.action` tells what each action asks for. Beyond that:

- Between a stage's forward and its backward nothing is kept here: an input goes to its stage
  with the forward, an output to the sender, or to the next stage if that is on this rank.
- Sends are batches under way; each action first releases those that have ended.
- If this rank raises, it still owes its peers an end of the step: see `StepRun.abandon`.
"""

from __future__ import annotations

import contextlib
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from ferro_dist.parallel.pipeline import pytree
from ferro_dist.parallel.pipeline.activation_channel import (
    Forecasts,
    Link,
    Parcel,
    Receiver,
    Sender,
)
from ferro_dist.parallel.pipeline.ends import Ends
from ferro_dist.parallel.pipeline.message_header import RunId
from ferro_dist.parallel.pipeline.outcome import among_replicas
from ferro_dist.parallel.pipeline.stage import ForwardInput, Stage, microbatch_seed
from ferro_dist.parallel.schedules import Action, ActionKind, Span, placement_of

if TYPE_CHECKING:
    from ferro_dist.parallel.pipeline.arguments import PipelineOptions
    from ferro_dist.parallel.pipeline.gpu_channels import GpuChannels
    from ferro_dist.parallel.pipeline.gradient_reduction import GradientReduction

__all__ = ["Measurements", "PipelineContext", "Program", "StepRun"]

Gradients = Sequence[Any]


class Program:
    """One rank's list, with the peer of each message.

    Parameters
    ----------
    schedule : sequence of sequence of Action
        A sound one, with messages.
    rank : int

    Attributes
    ----------
    actions : list of Action
    peer_of : dict of Action to int
        Of each send and receive.
    expected : dict of int to list of Action
        The receives from each peer, in order.
    num_stages : int
        Of the whole pipeline.
    is_local : dict of int to bool
        Whether each stage is on this rank.
    """

    def __init__(self, schedule: Sequence[Sequence[Action]], rank: int) -> None:
        placement = placement_of(schedule)
        self.actions = list(schedule[rank])
        self.num_stages = len(placement)
        self.peer_of = {
            action: placement[action.other_side.stage]
            for action in self.actions
            if action.kind.is_message
        }
        self.expected: dict[int, list[Action]] = defaultdict(list)
        for action in self.actions:
            if action.kind.is_recv:
                self.expected[self.peer_of[action]].append(action)
        self.is_local = {s: rank == other for s, other in enumerate(placement)}


class PipelineContext(NamedTuple):
    """What all steps of a pipeline have in common."""

    options: PipelineOptions
    tag: int
    stages: Mapping[int, Stage]
    reductions: Mapping[int, GradientReduction]
    gpu_channels: GpuChannels | None
    forecasts: Forecasts

    def link(self, run_id: RunId) -> Link:
        options = self.options
        return Link(options.backend, self.gpu_channels, self.tag, run_id, options.timeout)


class Measurements(NamedTuple):
    """What a run tells of itself afterwards, without the batch that it was given."""

    spans: list[Span]
    peak_live: int
    message_nbytes: dict[int, int]
    overhead_s: float


class StepRun:
    """One run of one program.

    Parameters
    ----------
    context : PipelineContext
    program : Program
    ends : Ends
    run_id : RunId
        Its number is the same on all ranks, and unique to this run.

    Attributes
    ----------
    spans : list of Span
        The compute actions, by this rank's clock.
    waited_s : float
        How long this rank waited for messages and for the ends of its sends and reductions.
    overhead_s : float
        How long it neither computed nor waited.
    peak_live : int
        The most pairs of stage and microbatch that were between forward and backward.
    message_nbytes : dict of int to int
        The largest message of this rank between a stage and the next, by the number of the former;
        counts only what goes from host to host.
    where : tuple of int or None
        Stage and microbatch being computed.
    """

    def __init__(
        self,
        context: PipelineContext,
        program: Program,
        ends: Ends,
        run_id: RunId,
    ) -> None:
        self._receivers: dict[int, Receiver] = {}  # first of all: `__del__` looks here
        self.spans: list[Span] = []
        self.waited_s = 0.0
        self.overhead_s = 0.0
        self.peak_live = 0
        self.message_nbytes: dict[int, int] = defaultdict(int)
        self.where: tuple[int, int] | None = None
        self._context = context
        self._program = program
        self._ends = ends
        self._run_id = run_id
        self._is_training = run_id.call.is_training
        self._position = 0
        self._num_live = 0
        self._link = context.link(run_id)
        self._sender = Sender(self._link)
        self._inputs: dict[tuple[int, int], Parcel] = {}
        self._gradients: dict[tuple[int, int], Gradients] = {}
        self._to_send: dict[Action, Parcel] = {}
        self._started_reductions: list[GradientReduction] = []

    @property
    def measurements(self) -> Measurements:
        return Measurements(self.spans, self.peak_live, self.message_nbytes, self.overhead_s)

    def execute(self) -> None:
        """Run the list to its end."""
        begun_s = time.perf_counter()
        for stage in self._context.stages.values():
            stage.note_thread()
        self._ends.begin()
        for position, action in enumerate(self._program.actions):
            self._position = position
            _DO[action.kind](self, action)
            self._sender.release_sent()
        self._position = len(self._program.actions)
        started_s = time.perf_counter()
        self._sender.wait()
        with among_replicas(self._context.options.replicas):
            for reduction in self._started_reductions:
                reduction.finish()
        ended_s = time.perf_counter()
        self.waited_s += ended_s - started_s
        computed_s = sum(span.end_s - span.start_s for span in self.spans)
        self.overhead_s = ended_s - begun_s - self.waited_s - computed_s

    def abandon(self, failure: BaseException) -> None:
        """Give up, and let no other rank wait for this one.

        Each peer to which this rank still owes a message is told that nothing will come, and gives
        up in its turn. What peers have sent, or are still sending, is received and dropped. This
        rank takes part in exchanges and reductions, as replicas wait in them; nobody uses the
        results. Modules may exchange something with their replicas themselves, as `SyncBatchNorm`
        does: how often they still would is unknown, so the groups in which they do so end.
        """
        left = self._program.actions[self._position :]
        # The pipeline's group may have ended but not that of the replicas, or the other way round.
        # Errors raised here are consequences: why the step failed is known already.
        for stage in self._context.stages.values():
            stage.interrupt(failure)
        with contextlib.suppress(Exception):
            self._ends.abandon()
        with contextlib.suppress(Exception):
            self._dismiss_peers(left)
        with contextlib.suppress(Exception):
            for action in left:
                if action.kind is ActionKind.REDUCE:
                    self._reduce(action)
            for reduction in self._started_reductions:
                reduction.finish()

    def close(self) -> None:
        """End the threads."""
        for receiver in self._receivers.values():
            receiver.end()
        for receiver in self._receivers.values():
            receiver.join()
        self._receivers.clear()
        for stage in self._context.stages.values():
            stage.pool.trim()

    def __del__(self) -> None:
        # Ctrl-C may have come before `close`, or into it: these threads would wait for ever.
        for receiver in self._receivers.values():
            receiver.end()

    def _dismiss_peers(self, left: Sequence[Action]) -> None:
        for peer in self._program.expected:
            self._receiver(peer).drain()
        owed = Counter(self._program.peer_of[a] for a in left if a.kind.is_send)
        for peer in owed:
            self._sender.abort(peer)
        self._sender.wait()

    # Compute

    def _forward(self, action: Action) -> None:
        number, _, microbatch = action
        stage = self._context.stages[number]
        parcel = self._input_of(number, microbatch)
        seed = self._seed_of(number, microbatch)
        is_last = number == self._program.num_stages - 1
        self.where = number, microbatch
        started_s = time.perf_counter()
        if self._is_training:
            loss_of = self._ends.loss_of(microbatch, parcel) if is_last else None
            output = stage.forward(microbatch, ForwardInput(parcel, seed, loss_of))
        else:
            output = stage.evaluate(ForwardInput(parcel, seed))
        self._note(action, started_s)
        self._num_live += self._is_training
        self.peak_live = max(self.peak_live, self._num_live)
        self._ends.put_output(number, microbatch, output)
        if is_last:
            return
        if self._program.is_local[number + 1]:
            self._inputs[number + 1, microbatch] = output
        else:
            self._to_send[Action(number, ActionKind.SEND_ACTIVATION, microbatch)] = output

    def _seed_of(self, stage: int, microbatch: int) -> int | None:
        options = self._context.options
        if options.seed is None:
            return None
        # Replicas have different data, and must not drop the same parts of it.
        counted = options.first_microbatch + microbatch
        return microbatch_seed(options.seed, self._run_id.number, stage, counted)

    def _backward(self, action: Action) -> None:
        number, kind, microbatch = action
        stage = self._context.stages[number]
        gradients = self._gradient_of(number, microbatch)
        self.where = number, microbatch
        started_s = time.perf_counter()
        if kind is ActionKind.BACKWARD:
            of_input = stage.backward(microbatch, gradients)
            self._num_live -= 1
        else:
            of_input = stage.backward_input(microbatch, gradients)
        self._note(action, started_s)
        if number == 0:
            self._ends.put_input_gradient(microbatch, of_input)
            return
        of_input = stage.converted(of_input)
        if self._program.is_local[number - 1]:
            self._gradients[number - 1, microbatch] = of_input
        else:
            self._to_send[Action(number, ActionKind.SEND_GRADIENT, microbatch)] = _packed(of_input)

    def _backward_weight(self, action: Action) -> None:
        self.where = action.stage, action.microbatch
        started_s = time.perf_counter()
        self._context.stages[action.stage].backward_weight(action.microbatch)
        self._num_live -= 1
        self._note(action, started_s)

    def _note(self, action: Action, started_s: float) -> None:
        self.where = None
        rank = self._context.options.backend.rank
        self.spans.append(Span(rank, action, started_s, time.perf_counter()))

    def _input_of(self, stage: int, microbatch: int) -> Parcel:
        if stage == 0:
            return self._ends.first_input(microbatch)
        if self._program.is_local[stage - 1]:
            return self._inputs.pop((stage, microbatch))
        return self._take(Action(stage, ActionKind.RECV_ACTIVATION, microbatch))

    def _gradient_of(self, stage: int, microbatch: int) -> Gradients:
        if stage == self._program.num_stages - 1:
            return self._ends.last_gradient(microbatch)
        if self._program.is_local[stage + 1]:
            gradients = self._gradients.pop((stage, microbatch))
        else:
            gradients = _unpacked(self._take(Action(stage, ActionKind.RECV_GRADIENT, microbatch)))
        return self._context.stages[stage].converted(gradients)

    # Messages

    def _take(self, receive: Action) -> Parcel:
        started_s = time.perf_counter()
        parcel = self._receivers[self._program.peer_of[receive]].take(receive)
        self.waited_s += time.perf_counter() - started_s
        return parcel

    def _post(self, receive: Action) -> None:
        self._receiver(self._program.peer_of[receive]).post(receive)

    def _send(self, send: Action) -> None:
        stage = self._context.stages[send.stage]
        parcel = self._to_send.pop(send)
        self.where = send.stage, send.microbatch
        receive = send.other_side
        nbytes = self._sender.send(self._program.peer_of[send], receive, parcel, stage.describe)
        self.where = None
        boundary = min(send.stage, receive.stage)
        self.message_nbytes[boundary] = max(self.message_nbytes[boundary], nbytes)

    def _reduce(self, action: Action) -> None:
        reduction = self._context.reductions.get(action.stage)
        if reduction is not None:
            reduction.start()
            self._started_reductions.append(reduction)

    def _receiver(self, peer: int) -> Receiver:
        receiver = self._receivers.get(peer)
        if receiver is None:
            receiver = Receiver(
                self._link,
                peer,
                self._program.expected[peer],
                self._context.stages.__getitem__,
                self._context.forecasts,
            )
            receiver.start()
            self._receivers[peer] = receiver
        return receiver


# Functions, not bound methods: a run that referred to itself would keep its batch until Python's
# collector of cycles runs.
_DO: Mapping[ActionKind, Callable[[StepRun, Action], None]] = {
    ActionKind.FORWARD: StepRun._forward,
    ActionKind.BACKWARD: StepRun._backward,
    ActionKind.BACKWARD_INPUT: StepRun._backward,
    ActionKind.BACKWARD_WEIGHT: StepRun._backward_weight,
    ActionKind.SEND_ACTIVATION: StepRun._send,
    ActionKind.SEND_GRADIENT: StepRun._send,
    ActionKind.RECV_ACTIVATION: StepRun._post,
    ActionKind.RECV_GRADIENT: StepRun._post,
    ActionKind.REDUCE: StepRun._reduce,
}


def _packed(gradients: Gradients) -> Parcel:
    """Make a message of gradients, some of which are None."""
    structure = tuple(pytree.ARRAY if g is not None else ("none",) for g in gradients)
    return Parcel(("list", *structure), [g for g in gradients if g is not None])


def _unpacked(parcel: Parcel) -> Gradients:
    gradients: Gradients = pytree.unflatten(parcel.structure, parcel.arrays)
    return gradients
