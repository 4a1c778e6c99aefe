"""Pipeline-parallel training: each rank has a part of the model, microbatches pass through.

A model is cut into stages, a batch into microbatches. Activations flow from stage to stage,
gradients flow back, and while one stage works on one microbatch its neighbours work on others. The
order is given by a schedule: see `ferro_dist.parallel.schedules`. The results do not depend on it:
neither the loss nor the gradients of weights and input, random numbers and statistics.

A step on each rank:

1. The ranks compare what they are about to do, before the first of all steps.
2. The rank runs its list of actions (`executor`).
3. All ranks exchange the loss, or what went wrong (`outcome`).

References
----------
Y. Huang et al., "GPipe: Efficient Training of Giant Neural Networks using Pipeline
Parallelism", NeurIPS 2019.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from ferro_dist import arguments
from ferro_dist.errors import ChannelClosed
from ferro_dist.parallel.buckets.bucket import bucket_nbytes_of
from ferro_dist.parallel.interruption import interrupt, telling
from ferro_dist.parallel.pipeline.activation_channel import meet
from ferro_dist.parallel.pipeline.arguments import (
    PipelineOptions,
    check_groups,
    checked_average,
    checked_count,
    checked_seed,
    checked_ties,
    modules_of,
    stages_on_rank,
)
from ferro_dist.parallel.pipeline.connection import Connection, connect
from ferro_dist.parallel.pipeline.ends import (
    BackwardEnds,
    Ends,
    EndStages,
    EvaluationEnds,
    ForwardEnds,
    TrainingEnds,
)
from ferro_dist.parallel.pipeline.executor import Measurements, Program, StepRun
from ferro_dist.parallel.pipeline.message_header import PipelineCall, RunId
from ferro_dist.parallel.pipeline.outcome import run_on_all, share_outcome
from ferro_dist.parallel.pipeline.plan import PipelinePlan, make_plan
from ferro_dist.parallel.schedules import (
    PipelineSchedule,
    built_in,
    complete,
    format_schedule,
    insert_reductions,
    one_phase,
    placement_of,
)

if TYPE_CHECKING:
    from ferro_dist.backends.base import Backend
    from ferro_dist.parallel.schedules.notation import WrittenSchedule

__all__ = ["Pipeline"]

ModuleT = TypeVar("ModuleT")
Tree = Any


class Pipeline(Generic[ModuleT]):
    """One rank's part of a pipeline.

    Every rank makes one with the same arguments, except for the module, and makes the same calls.

    Parameters
    ----------
    module : torch.nn.Module, JaxStage, or object with forward and backward
        This rank's stage; its only argument is what the previous stage returns. A list (or
        ModuleList) of stages, in order, if the schedule has several on each rank;
        `ferro_dist.parallel.schedules.placement_for` tells which. What each kind must have:
        `ferro_dist.integrations.jax.stage.JaxStage` for functions of JAX,
        `ferro_dist.parallel.pipeline.handwritten_stage` for NumPy and CuPy.
    backend : Backend
        The pipeline's group, of two ranks or more; closing it is left to the caller.
    num_microbatches : int
        The number of parts into which a batch is cut.
    schedule : PipelineSchedule, str, or one list or line of actions for each rank
        ``"gpipe"``, ``"1f1b"``, ``"interleaved_1f1b"``, ``"zb_h1"``, ``"zb_v"``, or a schedule of
        your own: see `ferro_dist.parallel.schedules.parse_schedule`.
    dp : Backend, optional
        The group of this rank's replicas in other pipelines, see `RankGrid`. The first call gives
        them all the weights and buffers of the first, gradients and loss are averaged over them,
        and all of them make the same calls, `eval` and `plan` as well. From then on buffers are
        each replica's own: `convert_sync_batchnorm` makes those of BatchNorm equal.
    average : {"mean", "sum"}, default "mean"
        How the gradients and losses of replicas are combined.
    tied : mapping of str to parameter, optional
        Weights shared by several ranks, under the same name on each of them. A parameter is given
        as itself, or by the name that its stage has for it. The first call gives it the value that
        it has on the lowest of these ranks; all get the sum of its gradients.
    checkpoint : bool or sequence of int, default False
        Whether all stages, or which of them, keep only their input, and run forward again before
        backward; until then their weights must stay as they are. The last stage runs `loss_fn`
        again, too: what that counts, it counts twice. Forward is run again just once, even if the
        schedule divides backwards, as zero bubble does. Not so torch.utils.checkpoint inside a
        stage: if backwards are divided, it runs its part again for each layer in it, and its
        selective contexts, which allow a single backward, raise. The second forward draws the same
        random numbers as the first, but others from a generator of the stage's own, or of Python
        or NumPy: the gradients would not be those of the loss.
    seed : int or None, default 0
        The random numbers of each forward depend on this, the step, the stage and the microbatch,
        which is numbered across all replicas (`microbatch_seed`). With None, torch modules draw
        from the user's generator, as without a pipeline; if checkpointed, they draw from it a seed
        for each forward. A stage that takes an `rng` gets an unpredictable one. A new pipeline
        counts steps from 0: to go on from a saved state, give it another seed, or it draws the same
        numbers again.
    bucket_mb : float, default 25
        Largest bucket of gradients, in MiB.
    timeout : float, optional
        Seconds that a rank waits for a message, which its sender may have to compute first; the
        backend's own by default.

    Attributes
    ----------
    schedule : PipelineSchedule or list of list of Action
    num_microbatches : int
    module : object

    Raises
    ------
    ValueError, TypeError
        Bad arguments. Nothing was sent.
    ChannelClosed
        A group is closed.
    InvalidWorldSize
        The group has one rank.
    UnsupportedOp
        The group moves only GPU arrays; but stages also send each other descriptions in host
        memory.
    InvalidSchedule
        The schedule is not sound, or does not fit this group.

    Notes
    -----
    Activations are trees: arrays, None, bools, numbers, str, and tuples, lists and dicts of these.
    Shapes may differ between microbatches and steps. Floating-point arrays carry gradients back.

    With `HybridBackend`, arrays in GPU memory go from GPU to GPU and are received on the stage's
    device; the host waits for none of them, but does wait for the loss. `JaxStage` passes its
    arrays through the host.

    An array that a stage returns belongs to the pipeline: the stage must not write to it later. A
    stage must not write into its input. Between ranks, arrays become those of the receiving stage's
    library; two stages of one rank that follow each other must be of the same.

    Pipelines that share a group run one at a time. Those that run in several threads at once each
    need a group of their own, such as `split` makes.

    torch has one generator per process, so with a `seed`, ranks that are threads run forward one at
    a time. Modules of your own that wait for other ranks need None there; `SyncBatchNorm` does not.
    Such ranks do run backward at the same time: dropout inside torch.utils.checkpoint, which draws
    again in backward, gets other numbers then than in forward; with `checkpoint` it gets the same.

    Where a schedule divides backwards, as zero bubble does, hooks of tensors inside a torch stage
    (``tensor.register_hook``) may be called twice: with the gradient, and later with zeros, when
    what they return is not used. Full hooks of modules and hooks of parameters are called once.

    Each rank has the gradients of its own stages, and no ``clip_grad_norm_`` sees any others. To
    clip by the norm of the whole model, `allreduce` the sums of squares over `backend`, with tied
    weights counted on one rank, and scale by the same factor on all ranks. Nor does a
    ``torch.amp.GradScaler`` see what overflows in other stages, so that ranks would skip different
    steps; bfloat16 needs none.

    A step that fails ends the groups of the `SyncBatchNorm` layers in its stages, in which replicas
    may be waiting: convert the modules again before the next step.

    In the first step the ranks compare schedules and numbers of microbatches; if these differ, all
    ranks raise `CollectiveMismatch`. With `dp` or `tied`, weights may not be frozen, unfrozen,
    added, removed, moved or reshaped after it: make a new pipeline.

    Examples
    --------
    >>> stages = split_sequential(model, backend.world_size)
    >>> pipe = Pipeline(stages[backend.rank], backend, num_microbatches=8, schedule="1f1b")
    >>> for x, y in batches:
    ...     loss = pipe.step(x, target=y, loss_fn=loss_fn)
    ...     optimizer.step()
    ...     optimizer.zero_grad()

    Several stages on each rank:

    >>> placement = placement_for("zb_v", backend.world_size)
    >>> stages = split_sequential(model, len(placement))
    >>> own = [stage for stage, rank in zip(stages, placement) if rank == backend.rank]
    >>> pipe = Pipeline(own, backend, num_microbatches=8, schedule="zb_v")
    """

    def __init__(
        self,
        module: ModuleT,
        backend: Backend,
        num_microbatches: int,
        schedule: PipelineSchedule | str | WrittenSchedule = PipelineSchedule.ONE_F_ONE_B,
        *,
        dp: Backend | None = None,
        average: str = "mean",
        tied: Mapping[str, Any] | None = None,
        checkpoint: bool | Sequence[int] = False,
        seed: int | None = 0,
        bucket_mb: float = 25,
        timeout: float | None = None,
    ) -> None:
        check_groups(backend, dp)
        self._options = PipelineOptions(
            backend=backend,
            replicas=dp,
            num_microbatches=checked_count(num_microbatches),
            op=checked_average(average),
            bucket_nbytes=bucket_nbytes_of(bucket_mb, "Pipeline"),
            timeout=None if timeout is None else arguments.check_timeout(timeout),
            seed=checked_seed(seed),
            tied=checked_ties(tied),
        )
        self._module = module
        modules = modules_of(module)
        member = built_in(schedule)
        self._name = "written" if member is None else member.name.lower()
        self._lists = complete(
            schedule,
            backend.world_size,
            self.num_microbatches,
            len(modules) if member is PipelineSchedule.INTERLEAVED_1F1B else None,
            reduces_gradients=dp is not None,
        )
        self._schedule = self._lists if member is None else member
        self._placement = placement_of(self._lists)
        self._stages = stages_on_rank(modules, self._placement, backend.rank, checkpoint)
        self._programs: dict[str | None, Program] = {}  # by phase
        self._connection: Connection | None = None
        self._is_closed = False
        self._num_runs = 0
        self._pending_forward: ForwardEnds | None = None
        self._input_grad: Tree = None
        self._last_step: Measurements | None = None

    # What it is

    @property
    def schedule(self) -> Any:
        """The schedule used by this pipeline."""
        return self._schedule

    @property
    def num_microbatches(self) -> int:
        """The number of microbatches."""
        return self._options.num_microbatches

    @property
    def module(self) -> ModuleT:
        """This rank's stage or stages, as they were given."""
        return self._module

    @property
    def backend(self) -> Backend:
        """The pipeline's group."""
        return self._options.backend

    @property
    def num_stages(self) -> int:
        """The number of stages of the whole pipeline."""
        return len(self._placement)

    @property
    def stage_numbers(self) -> tuple[int, ...]:
        """The stages of this rank."""
        return tuple(self._stages)

    @property
    def input_grad(self) -> Tree:
        """The gradient of the last step's loss with respect to `x`, on the first stage's rank.

        A tree like `x`; None where there is no gradient, and on all other ranks. With torch,
        backward has gone on already from tensors that require grad, into whatever computed them:
        the ``grad`` of those that are leaves has been added to. With replicas whose gradients are
        averaged, it is the gradient of this pipeline's own loss, as under DDP: the module that
        computes `x` is expected to be averaged over the replicas, too.
        """
        return self._input_grad

    # What it does

    def step(
        self,
        x: Tree = None,
        target: Tree = None,
        loss_fn: Callable[..., Any] | None = None,
        *,
        weight: Any = None,
    ) -> float:
        """Run a batch forward and backward, and add to the gradients of all weights.

        Parameters
        ----------
        x : tree of arrays, on the rank of the first stage
            Cut along the first dimension of every array. Other ranks may omit it.
        target : tree of arrays, on the rank of the last stage
            Cut in the same way.
        loss_fn : function, on the rank of the last stage
            Maps output and target of a microbatch to its mean loss. Without a target it is called
            with the output alone; without a loss_fn the output is the loss. For a hand-written
            stage a loss_fn returns the loss and its gradient. Weights of its own are not averaged
            over replicas: keep those in the last stage.
        weight : sequence of numbers, on the rank of the last stage
            How much each microbatch, or each row, counts, among those of all replicas; for instance
            its number of tokens. The loss of a microbatch of weight 0 may be 0 / 0 if it is
            `loss_fn` that divides, and not the stage: what comes before the output has no gradient
            of it then. Weights inside `loss_fn`, or of a stage that divides, would get NaN.
            By default microbatches count by their rows, so that the loss is the mean over the
            batch, however unevenly it is cut.

        Returns
        -------
        float
            The loss of the batch, the same on every rank. Gradients are those of this loss.

        Raises
        ------
        ValueError, TypeError
            A bad `x`, `target`, `loss_fn` or `weight`; raised on every rank. Nothing was computed.
        StageFailed
            A stage raised an exception; raised on every rank. The group stays usable.
        CollectiveMismatch
            The ranks' pipelines were made with different arguments; raised on every rank.
        ChannelClosed
            A rank has left, or ranks make different calls. The group is unusable afterwards.
        PeerLostError, Timeout
            A rank died or is silent. The group is unusable afterwards.
        """
        ends = TrainingEnds(self._end_stages, x, target, loss_fn, weight)
        loss = self._train(PipelineCall.STEP, ends)
        self._input_grad = ends.deliver_input_gradient()
        return loss

    def forward(self, input: Tree = None) -> list[Tree]:  # noqa: A002 - as torch's modules name it
        """Run forward for all microbatches, and keep what `backward` needs.

        Parameters
        ----------
        input : tree of arrays, on the rank of the first stage

        Returns
        -------
        list of tree
            The output of this rank's last stage for each microbatch. On the rank of the pipeline's
            last stage, that is the output of the model.

        Raises
        ------
        ValueError, TypeError, StageFailed, PeerLostError, Timeout
            As for `step`.
        """
        self._pending_forward = None  # this drops what it had kept
        ends = ForwardEnds(self._end_stages, input, source=max(self._stages))
        self._forget()
        self._run(PipelineCall.FORWARD, ends)
        self._pending_forward = ends
        return ends.outputs

    def backward(self, outputs: Sequence[Tree], grad_outputs: Sequence[Tree] | None = None) -> None:
        """Run backward for all microbatches of the last `forward`.

        Parameters
        ----------
        outputs : sequence of tree
            What the last `forward` has returned, as it is. Good for one call, even if that raises.
        grad_outputs : sequence of tree, on the rank of the last stage
            The gradient of each output; nothing is scaled. May be omitted if outputs are scalars.

        Raises
        ------
        RuntimeError
            There was no `forward` before.
        ValueError, TypeError, StageFailed, PeerLostError, Timeout
            As for `step`.
        """
        self._check_open()
        forward = self._pending_forward
        if forward is None:
            raise RuntimeError("Pipeline: backward needs a forward before it")
        self._pending_forward = None
        ends = BackwardEnds(forward, outputs, grad_outputs)
        self._train(PipelineCall.BACKWARD, ends)
        self._input_grad = ends.deliver_input_gradient()

    def eval(self, x: Tree = None) -> Tree:
        """Run forward without gradients, in evaluation mode.

        Parameters
        ----------
        x : tree of arrays, on the rank of the first stage

        Returns
        -------
        tree
            The whole batch's output on the rank of the last stage, elsewhere None. Arrays are
            joined along their first dimension, those without any are stacked.

        Raises
        ------
        ValueError
            The outputs of microbatches cannot be joined: they differ in more than their rows.
        ValueError, TypeError, StageFailed, PeerLostError, Timeout
            As for `step`.
        """
        ends = EvaluationEnds(self._end_stages, x, self.num_stages - 1)
        with contextlib.ExitStack() as modes:

            def prepare() -> None:
                for stage in self._stages.values():
                    modes.enter_context(stage.evaluation())

            self._run(PipelineCall.EVAL, ends, prepare)
        return ends.whole_output

    def plan(
        self,
        x: Tree = None,
        target: Tree = None,
        loss_fn: Callable[..., Any] | None = None,
    ) -> PipelinePlan:
        """Measure how long actions and messages take, and simulate the schedule with these times.

        Called by all ranks. After a step, the times are those of that step, and its real timeline
        is given next to the simulated one. On a GPU these are the times to queue work, not those to
        do it. Before the first step, `x`, `target` and `loss_fn` are needed as for `step`: a step
        is run just to time it, and leaves no trace in weights, gradients and statistics.

        Returns
        -------
        PipelinePlan
            The same on all ranks. Prints as a table; ``plan.plot(path)`` draws it.

        Raises
        ------
        RuntimeError
            Another rank makes another call. The group is unusable afterwards.
        ValueError, TypeError, StageFailed, PeerLostError, Timeout
            As for `step`.
        """
        self._meet(PipelineCall.PLAN)
        if self._last_step is None:
            with contextlib.ExitStack() as untouched:

                def protect() -> None:
                    for stage in self._stages.values():
                        untouched.enter_context(stage.untouched())

                run_on_all(protect, self.backend, self._options.replicas)
                # Whatever takes longer the first time must not be taken for the rule.
                for _ in range(2):
                    self._train(
                        PipelineCall.STEP, TrainingEnds(self._end_stages, x, target, loss_fn, None)
                    )
            self._num_runs -= 2
        assert self._last_step is not None
        with telling(self._interrupt):
            return make_plan(self._lists, self._last_step, self.backend)

    def close(self) -> None:
        """Leave the groups that were made for tied weights and between GPUs. Idempotent.

        Afterwards, all calls that ranks make together raise ChannelClosed, on every rank.
        """
        self._is_closed = True
        if self._connection is not None:
            self._connection.close()

    def __enter__(self) -> Pipeline[ModuleT]:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None and self._connection is not None:
            # Report the exception now: the other ranks may never come to close the channels between
            # GPUs together with this rank.
            self._connection.abort()
        self.close()

    def __repr__(self) -> str:
        stages = ", ".join(map(str, self._stages))
        return (
            f"<Pipeline rank {self.backend.rank} of {self.backend.world_size}, stages {stages} "
            f"of {self.num_stages}, {self.num_microbatches} microbatches, {self._name}>"
        )

    # Runs

    def _train(self, call: PipelineCall, ends: TrainingEnds | BackwardEnds) -> float:
        """Run something with a backward in it, and reduce what it adds to the gradients."""
        connection = self._connected()
        reductions = connection.reductions

        def prepare() -> None:
            connection.check_weights()
            for reduction in reductions:
                reduction.set_aside()

        try:
            loss = self._run(call, ends, prepare)
            connection.sum_ties()
        except BaseException:
            for reduction in reductions:
                reduction.restore()
            raise
        return loss

    def _run(
        self,
        call: PipelineCall,
        ends: Ends,
        prepare: Callable[[], None] = lambda: None,
    ) -> float:
        """Run what `call` asks for; return the loss, or raise what went wrong anywhere."""
        if call is PipelineCall.STEP:
            self._pending_forward = None
            self._forget()
        context, program = self._connected().context, self._program(call)
        run = StepRun(context, program, ends, RunId(self._num_runs, call))
        self._num_runs += 1
        options = self._options
        failure: BaseException | None = None
        try:
            loss, failure = self._attempt(run, ends, prepare)
            loss = share_outcome(
                options.backend, options.replicas, failure, run.where, loss, options.is_averaged
            )
        except BaseException as error:
            if call.is_training:  # around an evaluation, what a forward has kept is still good
                self._forget()
            if error is not failure and not isinstance(error, Exception):
                self._interrupt(error)  # a second Ctrl-C: the others do not know of it
            raise
        finally:
            with telling(self._interrupt):  # of a Ctrl-C; threads that nobody joins must end, too
                run.close()
        if call is PipelineCall.STEP:
            self._last_step = run.measurements
        return loss

    def _attempt(
        self, run: StepRun, ends: Ends, prepare: Callable[[], None]
    ) -> tuple[float, BaseException | None]:
        """Do this rank's part; return its part of the loss, and what went wrong here."""
        try:
            prepare()
            run.execute()
            return ends.finish(), None
        except BaseException as error:
            with telling(self._interrupt):
                run.abandon(error)
            return 0.0, error

    def _meet(self, call: PipelineCall) -> None:
        """Raise on all ranks if one that this rank has messages for makes another call."""
        context, program = self._connected().context, self._program(PipelineCall.STEP)
        senders = program.expected.keys()
        receivers = {peer for action, peer in program.peer_of.items() if action.kind.is_send}
        link = context.link(RunId(self._num_runs, call))
        # Replicas, too, have to hear of it.
        run_on_all(lambda: meet(link, receivers, senders), self.backend, self._options.replicas)

    def _interrupt(self, error: BaseException) -> None:
        for group in (self.backend, self._options.replicas):
            interrupt(group, error)

    def _forget(self) -> None:
        for stage in self._stages.values():
            stage.forget()

    @property
    def _end_stages(self) -> EndStages:
        first, last = self._stages.get(0), self._stages.get(self.num_stages - 1)
        return EndStages(first, last, self._placement[0], self._options)

    def _program(self, call: PipelineCall) -> Program:
        phase = call.phase
        program = self._programs.get(phase)
        if program is None:
            lists = self._lists if phase is None else one_phase(self._lists, phase)
            if call is PipelineCall.BACKWARD and self._options.replicas is not None:
                lists = insert_reductions(lists)
            program = self._programs[phase] = Program(lists, self.backend.rank)
        return program

    # The first run

    def _connected(self) -> Connection:
        self._check_open()
        if self._connection is None:
            settings = self._manifest()
            self._connection = connect(self._stages, self._lists, self._options, settings)
        return self._connection

    def _check_open(self) -> None:
        if self._is_closed:  # whether or not this rank has a tied weight, whose group has ended
            raise ChannelClosed(
                "Pipeline: it was closed. Make a new one.", op="Pipeline", rank=self.backend.rank
            )

    def _manifest(self) -> list[str]:
        digest = hashlib.sha256(format_schedule(self._lists).encode()).hexdigest()[:12]
        options = self._options
        return [
            f"num_microbatches={options.num_microbatches}",
            f"schedule={self._name} of {self.num_stages} stages (digest {digest})",
            f"seed={options.seed}",
            f"average={options.op.name.lower()}",
            f"bucket_nbytes={options.bucket_nbytes}",
        ]
