"""What a pipeline demands of its arguments. Nothing is sent before all of it holds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from ferro_dist import arguments
from ferro_dist.errors import InvalidWorldSize, UnsupportedOp
from ferro_dist.parallel.buckets.averaging import REDUCE_OPS
from ferro_dist.parallel.group_checks import check_group
from ferro_dist.parallel.integration import TORCH_MODULE_LIST, has_base
from ferro_dist.parallel.pipeline.stage import Stage, make_stage
from ferro_dist.reduce_op import ReduceOp

if TYPE_CHECKING:
    from ferro_dist.backends.base import Backend

__all__ = [
    "PipelineOptions",
    "check_groups",
    "checked_average",
    "checked_count",
    "checked_seed",
    "checked_ties",
    "modules_of",
    "stages_on_rank",
]

MOST_MICROBATCHES = 1 << 20
"""Each rank keeps the lists of all. With more, it would run out of memory before saying why."""


class PipelineOptions(NamedTuple):
    """What `Pipeline` was asked for, checked."""

    backend: Backend
    replicas: Backend | None
    num_microbatches: int
    op: ReduceOp
    """How gradients and losses of replicas are combined."""
    tied: Mapping[str, Any]
    seed: int | None
    bucket_nbytes: int
    timeout: float | None

    @property
    def is_averaged(self) -> bool:
        """Whether gradients and losses of replicas are averaged, not summed."""
        return self.op is ReduceOp.MEAN

    @property
    def first_microbatch(self) -> int:
        """The first number of this pipeline, as microbatches are numbered across all replicas."""
        return 0 if self.replicas is None else self.replicas.rank * self.num_microbatches


def stages_on_rank(
    modules: Sequence[Any], placement: Sequence[int], rank: int, checkpoint: bool | Sequence[int]
) -> dict[int, Stage]:
    """Return this rank's stages by their numbers."""
    numbers = [stage for stage, other in enumerate(placement) if other == rank]
    if len(numbers) != len(modules):
        raise ValueError(_wrong_number(rank, numbers, len(modules)))
    is_checkpointed = _checkpointed(checkpoint, len(placement))
    stages: dict[int, Stage] = {}
    for number, module in zip(numbers, modules, strict=True):
        stages[number] = stage = make_stage(module)
        stage.number = number
        stage.is_checkpointed = is_checkpointed[number]
    for number in stages:
        if number + 1 in stages:
            _check_neighbours(stages[number], stages[number + 1])
    return stages


def _wrong_number(rank: int, numbers: Sequence[int], num_modules: int) -> str:
    """Return the words of the error if a rank has not one module for each of its stages."""
    stages = ("stage " if len(numbers) == 1 else "stages ") + ", ".join(map(str, numbers))
    remedy = (
        "Give a list of modules, one for each of them"
        if num_modules < len(numbers)
        else "In a list, each one is a stage: put the layers of one stage into one module, as "
        "torch.nn.Sequential"
    )
    return (
        f"Pipeline: by the schedule rank {rank} has {stages}, but the number of modules given is "
        f"{num_modules}. {remedy}"
    )


def _check_neighbours(stage: Stage, following: Stage) -> None:
    """Raise TypeError unless the second of two stages on one rank takes what the first returns."""
    libraries = {stage.library, following.library} - {None}
    if len(libraries) > 1:
        raise TypeError(
            f"Pipeline: stages {stage.number} and {following.number} are on one rank, where arrays "
            f"are handed on as they are, but the first is of {stage.library} and the second of "
            f"{following.library}. Put them on different ranks, or make both of one library"
        )


def _checkpointed(checkpoint: bool | Sequence[int], num_stages: int) -> list[bool]:
    """Return for each stage of the pipeline whether it is checkpointed."""
    if isinstance(checkpoint, bool):
        return [checkpoint] * num_stages
    try:
        if isinstance(checkpoint, Mapping):
            raise TypeError  # its keys would count, whatever it says of them
        chosen = {arguments.integer(stage) for stage in checkpoint}
    except TypeError:
        raise TypeError(
            f"Pipeline: checkpoint must be True, False or numbers of stages, not {checkpoint!r}"
        ) from None
    unknown = sorted(chosen - set(range(num_stages)))
    if unknown:
        raise ValueError(
            f"Pipeline: checkpoint names stages {unknown} of a pipeline that has {num_stages}, "
            "counted from 0"
        )
    return [stage in chosen for stage in range(num_stages)]


def modules_of(module: Any) -> list[Any]:
    """Return the modules of a rank: those in a list or ModuleList, or the single one given."""
    is_list = isinstance(module, (list, tuple)) or has_base(module, TORCH_MODULE_LIST)
    if is_list and not len(module):
        raise ValueError("Pipeline: module is empty; every rank has a stage, or several in a list")
    return list(module) if is_list else [module]


def checked_count(num_microbatches: int) -> int:
    """Return the number of microbatches; raise unless it is a positive integer."""
    count = arguments.named_integer("Pipeline", "num_microbatches", num_microbatches)
    if count < 1:
        raise ValueError(f"Pipeline: num_microbatches must be > 0, got {count}")
    if count > MOST_MICROBATCHES:
        raise ValueError(
            f"Pipeline: num_microbatches must be at most {MOST_MICROBATCHES}, got {count}; it is "
            "the number of parts of a batch, not their size"
        )
    return count


def checked_seed(seed: Any) -> int | None:
    """Return the seed; raise unless it is an integer or None."""
    if seed is None:
        return None
    try:
        return arguments.integer(seed)
    except TypeError:
        raise TypeError(f"Pipeline: seed must be an integer or None, not {seed!r}") from None


def checked_ties(tied: Any) -> dict[str, Any]:
    """Return the tied weights by name."""
    if tied is None:
        return {}
    if not isinstance(tied, Mapping):
        raise TypeError(
            f"Pipeline: tied must be a dict of a name to a parameter, not {type(tied).__qualname__}"
        )
    for name in tied:
        if not isinstance(name, str):
            raise TypeError(f"Pipeline: the name of a tied weight must be a str, not {name!r}")
    return dict(tied)


def check_groups(backend: Any, replicas: Any) -> None:
    """Raise unless these are a pipeline's group and, if there are any, that of its replicas."""
    order = "; the order is Pipeline(module, backend, num_microbatches, schedule)"
    check_group("Pipeline", backend, hint=order)
    if replicas is not None:
        check_group("Pipeline", replicas, name="dp")
    if replicas is backend:
        raise ValueError(
            "Pipeline: dp must be the group of this rank's replicas in other pipelines, not the "
            "pipeline's own: see RankGrid"
        )
    if not backend.moves_host_arrays:
        raise UnsupportedOp(
            "Pipeline: each activation comes with a header in host memory that describes it, but "
            f"{type(backend).__name__} moves only GPU arrays. Use HybridBackend: activations "
            "still go from GPU to GPU",
            op="Pipeline",
            rank=backend.rank,
        )
    if backend.world_size < 2:
        raise InvalidWorldSize(
            f"Pipeline: world_size must be >= 2 for pipeline parallelism, got {backend.world_size}",
            op="Pipeline",
            rank=backend.rank,
        )


def checked_average(average: Any) -> ReduceOp:
    """Return the reduction that `average` names; raise unless it is "mean" or "sum"."""
    if not isinstance(average, str) or average not in REDUCE_OPS:
        raise ValueError(f"Pipeline: average must be 'mean' or 'sum', not {average!r}")
    return REDUCE_OPS[average]
