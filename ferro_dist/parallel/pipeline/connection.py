"""What the ranks of a pipeline do once, before the first of all steps.

1. The ranks of a pipeline compare how many replicas they have; each looks at its own stages.
2. The ranks of a pipeline compare their arguments; replicas compare these and their weights; then
   the ranks of a pipeline compare what is tied.
3. Weights that are tied, or replicas, become equal, and what sums their gradients is made.

A problem found in one part, even by the replicas of a single stage, is known on all ranks before
any of them goes on to the next part: none is left waiting for one that has raised.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ferro_dist.parallel.interruption import interrupt, telling
from ferro_dist.parallel.manifest import agree_on_manifest
from ferro_dist.parallel.pipeline.activation_channel import ArraySpec
from ferro_dist.parallel.pipeline.executor import PipelineContext
from ferro_dist.parallel.pipeline.gpu_channels import make_gpu_channels
from ferro_dist.parallel.pipeline.gradient_reduction import GradientReduction
from ferro_dist.parallel.pipeline.outcome import BadArgument, run_on_all
from ferro_dist.parallel.pipeline.replicas import connect_replicas, describe_state
from ferro_dist.parallel.pipeline.stage import Stage
from ferro_dist.parallel.pipeline.tied_weights import (
    Members,
    TiedWeight,
    agree_on_ties,
    find_tied_weights,
    split_for_ties,
    tie_weights,
)
from ferro_dist.parallel.schedules import Action

if TYPE_CHECKING:
    from ferro_dist.backends.base import Backend
    from ferro_dist.parallel.pipeline.arguments import PipelineOptions

__all__ = ["Connection", "connect"]


class Connection:
    """One rank's side of a connected pipeline.

    Attributes
    ----------
    context : PipelineContext
    ties : list of GradientReduction
        Those that this rank takes part in.
    """

    def __init__(self, context: PipelineContext) -> None:
        self.context = context
        self.ties: list[GradientReduction] = []
        self._groups: list[Backend] = []  # made for ties
        self._trained: dict[int, set[tuple[str, ArraySpec]]] = {}

    def make(
        self,
        schedule: Sequence[Sequence[Action]],
        weights: Mapping[str, TiedWeight],
        ties: Mapping[Members, Sequence[str]],
    ) -> None:
        """Make weights equal, and prepare to sum their gradients. Called by all ranks together."""
        options, stages = self.context.options, self.context.stages
        backend, bucket_nbytes = options.backend, options.bucket_nbytes
        reductions: dict[int, GradientReduction] = {}
        with telling(self._interrupt):
            if options.replicas is not None:
                actions = schedule[backend.rank]
                reductions = connect_replicas(
                    stages, actions, options.replicas, options.op, bucket_nbytes
                )
            groups = split_for_ties(ties, backend)
            self._groups = [group for group in groups.values() if group is not backend]
            self.ties = tie_weights(weights, ties, groups, bucket_nbytes)
            for tie in self.ties:
                tie.equalize()
            channels = make_gpu_channels(schedule, backend, options.timeout)
        self.context = self.context._replace(reductions=reductions, gpu_channels=channels)
        if self.reductions:
            self._trained = {number: _specs(stage) for number, stage in stages.items()}

    @property
    def reductions(self) -> list[GradientReduction]:
        """Those of ties, then those over replicas: in this order they set gradients aside.

        Ties are summed last. What was there before a step must stay out of all sums, so it is for
        them to set it aside, and to add it again.
        """
        return [*self.ties, *self.context.reductions.values()]

    def check_weights(self) -> None:
        """Raise BadArgument if other weights are trained than those that were made equal."""
        for number, before in self._trained.items():
            changed = _specs(self.context.stages[number]) ^ before
            if changed:
                raise BadArgument from ValueError(
                    f"Pipeline: {min(changed)[0]!r} of stage {number} was frozen, unfrozen, added, "
                    "removed, moved or given another dtype or shape since the first step, and "
                    "gradients of replicas or tied weights are summed. Make a new Pipeline"
                )

    def sum_ties(self) -> None:
        """Add up the gradients of tied weights. Called by all ranks together."""
        with telling(self._interrupt):
            for tie in self.ties:
                tie.start()
                tie.finish()

    def close(self) -> None:
        """Leave the groups, and close the channels between GPUs. Idempotent."""
        with contextlib.ExitStack() as ends:
            if self.context.gpu_channels is not None:
                ends.callback(self.context.gpu_channels.close)
            for group in reversed(self._groups):
                ends.callback(group.close)

    def abort(self) -> None:
        """End the channels between GPUs at once, whatever is under way."""
        if self.context.gpu_channels is not None:
            self.context.gpu_channels.abort()

    def _interrupt(self, error: BaseException) -> None:
        """Tell the others that this rank will not make the calls for which they wait."""
        options = self.context.options
        for group in (*self._groups, options.backend, options.replicas):
            interrupt(group, error)


def connect(
    stages: Mapping[int, Stage],
    schedule: Sequence[Sequence[Action]],
    options: PipelineOptions,
    settings: Sequence[str],
) -> Connection:
    """Make sure that all ranks agree and start from the same weights.

    Parameters
    ----------
    stages : mapping of int to Stage
        This rank's.
    schedule : sequence of sequence of Action
        That of a step.
    options : PipelineOptions
    settings : sequence of str
        What must be equal on all ranks.

    Raises
    ------
    CollectiveMismatch
        The ranks differ; on every rank.
    ValueError, TypeError
        Unsuitable weights; raised on every rank.
    """
    backend, replicas = options.backend, options.replicas

    def on_all(part: Callable[[], Any]) -> Any:
        return run_on_all(part, backend, replicas)

    _agree_on_having_replicas(backend, replicas)
    weights = on_all(lambda: find_tied_weights(options.tied, stages))
    tag = on_all(lambda: agree_on_manifest(settings, backend, op="Pipeline"))
    if replicas is not None:
        lines = [*settings, *on_all(lambda: describe_state(stages))]
        on_all(lambda: agree_on_manifest(lines, replicas, op="Pipeline", member="replica"))
    ties = on_all(lambda: agree_on_ties(weights, backend))

    context = PipelineContext(options, tag, stages, {}, gpu_channels=None, forecasts={})
    connection = Connection(context)
    with contextlib.ExitStack() as undo:
        undo.callback(connection.close)
        on_all(lambda: connection.make(schedule, weights, ties))
        undo.pop_all()
    return connection


def _agree_on_having_replicas(backend: Backend, replicas: Backend | None) -> None:
    """Raise CollectiveMismatch unless all ranks of a pipeline have as many replicas.

    Before all that ends with an exchange among replicas: the others would take no part in it. Those
    in other pipelines learn of it as their group ends or times out.
    """
    count = None if replicas is None else replicas.world_size
    lines = [f"replicas={count}"]
    try:
        run_on_all(lambda: agree_on_manifest(lines, backend, op="Pipeline"), backend, None)
    except BaseException as error:
        interrupt(replicas, error)
        raise


def _specs(stage: Stage) -> set[tuple[str, ArraySpec]]:
    """Return the name of each weight, with its dtype, shape and memory."""
    return {(name, stage.describe(weight)) for name, weight in stage.parameters().items()}
