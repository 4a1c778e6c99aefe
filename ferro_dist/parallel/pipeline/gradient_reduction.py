"""Sums of gradients over ranks that hold the same weights: replicas, or ends of a tie.

Gradients lie in buckets laid out as those of DDP (`ferro_dist.parallel.buckets.bucket`), with a
lane for each that says whether this rank had one. The arrays are of the stages' own libraries,
which copy gradients in and out.

Only what a step adds is summed. What was there before the step has been summed already, and would
otherwise count once for each rank; it is set aside, and added again afterwards.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from ferro_dist.collective import allreduce, broadcast
from ferro_dist.interop import dtype_code, numpy_dtype
from ferro_dist.parallel.buckets.bucket import BucketLayout, ParameterSpec, assign_buckets
from ferro_dist.parallel.pipeline.stage import Stage
from ferro_dist.reduce_op import ReduceOp

if TYPE_CHECKING:
    from ferro_dist.backends.base import Backend
    from ferro_dist.work import Work

__all__ = ["GradientReduction", "Weight"]

Array = Any


class Weight(NamedTuple):
    """One parameter of a stage."""

    stage: Stage
    name: str

    @property
    def value(self) -> Array:
        """The parameter itself."""
        return self.stage.parameter(self.name)


class GradientReduction:
    """The gradients of some weights, summed or averaged over a group.

    Parameters
    ----------
    weights : sequence of Weight
        The same number on every rank of the group, of the same shapes and dtypes, in one order.
    group : Backend
    op : ReduceOp
        `SUM` or `MEAN`.
    bucket_nbytes : int
        The largest bucket; a larger gradient has one to itself.
    """

    def __init__(
        self, weights: Sequence[Weight], group: Backend, op: ReduceOp, bucket_nbytes: int
    ) -> None:
        self._weights = weights
        self._group = group
        self._op = op
        weight_of = {_spec(str(number), weight): weight for number, weight in enumerate(weights)}
        # All leave at once, so that none need be small to leave early.
        parts = assign_buckets(weight_of, bucket_nbytes, first_bucket_nbytes=bucket_nbytes)
        self._buckets = [
            _Bucket(BucketLayout(part), [weight_of[spec] for spec in part], group) for part in parts
        ]
        self._before: list[tuple[Stage, list[str], list[Array | None]]] = []
        self._under_way: list[tuple[_Bucket, Work]] = []

    def equalize(self) -> None:
        """Give every rank the weights of the group's first. Called by all of them."""
        for weight in self._weights:
            value = weight.stage.plain(weight.value)
            weight.stage.load(weight.name, broadcast(value, self._group))

    def set_aside(self) -> None:
        """Start from no gradients. Called before a step."""
        for stage, weights in _by_stage(self._weights):
            names = [weight.name for weight in weights]
            self._before.append((stage, names, stage.take_gradients(names)))

    def start(self) -> None:
        """Start to sum, once the gradients are complete."""
        for bucket in self._buckets:
            bucket.pack()
            array = bucket.array
            work = allreduce(array, self._group, self._op, out=array, async_op=True)
            self._under_way.append((bucket, work))

    def finish(self) -> None:
        """Wait for the sums, and put them where the gradients were."""
        for bucket, work in self._under_way:
            work.wait()
            bucket.unpack()
        self.restore()

    def restore(self) -> None:
        """Add what was set aside, and drop sums that were not waited for."""
        self._under_way.clear()
        for stage, names, before in self._before:
            pairs = [(n, g) for n, g in zip(names, before, strict=True) if g is not None]
            stage.add_gradients([name for name, _ in pairs], [gradient for _, gradient in pairs])
        self._before.clear()


class _Bucket:
    """Some gradients of one dtype and memory, in one array."""

    def __init__(self, layout: BucketLayout, weights: Sequence[Weight], group: Backend) -> None:
        self._first_lane = layout.lanes_offset
        self._stage = weights[0].stage
        self.array = self._stage.new_bucket(group, weights[0].value, layout.count)
        offsets = iter(layout.offsets)
        self._places = [
            (stage, [(w.name, stage.place(self.array, next(offsets), w.value)) for w in of_stage])
            for stage, of_stage in _by_stage(weights)
        ]

    def pack(self) -> None:
        are_there: list[bool] = []
        for stage, places in self._places:
            gradients = stage.gradients([name for name, _ in places])
            stage.write([place for _, place in places], stage.converted(gradients))
            are_there += [gradient is not None for gradient in gradients]
        self._stage.mark(self.array, self._first_lane, are_there)

    def unpack(self) -> None:
        are_there = iter(self._stage.are_marked(self.array, self._first_lane))
        for stage, places in self._places:
            found = [each for each in places if next(are_there)]
            copies = stage.converted(stage.read([place for _, place in found]))
            stage.set_gradients([name for name, _ in found], copies)


def _by_stage(weights: Iterable[Weight]) -> list[tuple[Stage, list[Weight]]]:
    """Divide weights where the stage changes: a stage finds many as fast as one."""
    groups = itertools.groupby(weights, key=lambda weight: weight.stage)
    return [(stage, list(of_stage)) for stage, of_stage in groups]


def _spec(name: str, weight: Weight) -> ParameterSpec:
    spec = weight.stage.describe_gradient(weight.value)
    dtype = numpy_dtype(dtype_code(spec.dtype))
    return ParameterSpec(name, spec.shape, dtype, is_on_gpu=not spec.is_on_host)
