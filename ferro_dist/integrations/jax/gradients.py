"""Buckets of pytrees of gradients, for JAX: reduced after a step, or while its backward runs."""

from __future__ import annotations

import contextlib
import functools
import re
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from ferro_dist.collective import allreduce, broadcast
from ferro_dist.errors import CollectiveMismatch
from ferro_dist.parallel.buckets.bucket import (
    Bucket,
    BucketLayout,
    ParameterSpec,
    assign_buckets,
    real_parts,
)
from ferro_dist.parallel.buckets.compression import (
    Compression,
    UserReduction,
    reduce_by,
    wire_dtype,
)
from ferro_dist.parallel.ddp.participation import RollCall
from ferro_dist.parallel.ddp.statistics import BucketTimes, Statistics
from ferro_dist.parallel.interruption import interrupt, telling
from ferro_dist.parallel.manifest import explain_mismatch
from ferro_dist.reduce_op import ReduceOp

if TYPE_CHECKING:
    from ferro_dist.backends.base import Backend
    from ferro_dist.work import Work

__all__ = ["ReducerContext", "TreeReducer", "await_callbacks"]

NumpyArray = np.ndarray[Any, Any]


@dataclass
class ReducerContext:
    """What the reducers of a wrapper have in common, one for each structure of tree."""

    backend: Backend
    reduce_op: ReduceOp
    bucket_nbytes: int
    compress: Compression
    is_overlapped: bool
    is_local: bool = False
    most_buckets: int = 0
    """The most that a reducer has had so far: another rank may have as many calls under way."""
    statistics: Statistics = field(default_factory=Statistics)

    def explained(self, error: CollectiveMismatch, lines: Sequence[str]) -> CollectiveMismatch:
        """Return the error that says how the trees of the ranks differ, if they do."""
        return explain_mismatch(error, lines, self.backend, "DDP", self.most_buckets)


class TreeReducer:
    """Averages trees of one structure, one in each step: the counterpart of `Reducer`.

    That one serves modules which hold their gradients. Here all gradients of a bucket come at once,
    and averages are copied out of it, so that nothing needs to be known of single gradients.

    Buckets are reduced in the same order on all ranks, whatever the order in which they become
    ready: each starts once it and all before it are ready. In the first step that order is a guess;
    later it is the one that rank 0 observed.
    """

    def __init__(
        self,
        context: ReducerContext,
        specs: Sequence[ParameterSpec],
        lines: Sequence[str],
        tag: int,
    ) -> None:
        self._context, self._backend, self._lines, self._tag = context, context.backend, lines, tag
        # Last layers first, as in backward. Names are in natural order: layer 10 after 9.
        positions = {spec.name: position for position, spec in enumerate(specs)}
        ready_order = sorted(specs, key=lambda spec: _natural(spec.name), reverse=True)
        parts = assign_buckets(ready_order, context.bucket_nbytes)
        self.groups = [[positions[spec.name] for spec in part] for part in parts]
        self._specs = tuple(specs)
        self._buckets = self._make_buckets(parts)
        context.most_buckets = max(context.most_buckets, len(parts))
        # Guards the rest; never held while another rank is waited for, but in finish, where
        # this rank has nothing else to do.
        self._lock = threading.Lock()
        self._order = list(range(len(parts)))
        self._is_order_agreed = len(parts) == 1
        self._roll_call = RollCall(self._backend)
        self._times: list[BucketTimes] = []
        self._failure: BaseException | None = None
        self._reset()

    def _make_buckets(self, parts: Sequence[Sequence[ParameterSpec]]) -> list[_Bucket]:
        compress, empty = self._context.compress, self._backend.empty
        buckets: list[_Bucket] = []
        kept: dict[str, Any] = {}
        for number, layout in enumerate(map(BucketLayout, parts)):
            if callable(compress):
                buffer = empty(layout.count, layout.dtype)
                members = self.groups[number]
                bucket = Bucket(number, members, layout, buffer, np.asarray, kept=kept)
                buckets.append(_UserBucket(bucket, compress))
            else:
                dtype = wire_dtype(compress, layout.dtype) or layout.dtype
                buckets.append(_Bucket(layout, empty(layout.lanes_offset, dtype)))
        return buckets

    def _reset(self) -> None:
        self._step: object = None
        self._ready: list[int] = []
        self._works: list[Work | None] = []
        self._own: dict[int, list[NumpyArray]] = {}
        self._factor: float | None = None

    def weigh(self, weight: float) -> None:
        """Give this rank's gradients a weight in the next step."""
        with self._lock, self._failing_for_good():
            participation = self._roll_call.ask(True, weight, self._tag + 1).result()
        self._factor = participation.factor(self._context.reduce_op)

    def ready(self, step: object, number: int, gradients: Sequence[NumpyArray]) -> None:
        """Take the gradients of a bucket, and start all buckets whose turn has come."""
        with self._lock, self._failing_for_good():
            self._enter(step)
            if number in self._ready:
                raise RuntimeError(
                    "tap: a gradient came twice in one step. Call tap() once, outside of vmap."
                )
            self._ready.append(number)
            if self._context.is_local:
                self._own[number] = [gradient.copy() for gradient in gradients]
                return
            self._buckets[number].pack(gradients, self._factor)
            self._times[number].ready_s = perf_counter()
            if self._context.is_overlapped:
                self._start()

    def finish(self, step: object) -> list[NumpyArray]:
        """Return the averages of all leaves: they may be views that the next step overwrites."""
        with self._lock, self._failing_for_good():
            self._enter(step)
            if self._context.is_local:
                return self._end_local()
            self._context.statistics.backward_end_s = perf_counter()
            seen = list(self._ready)
            for number in set(self._order).difference(seen):
                # The loss does not depend on it, on this rank at least.
                self._buckets[number].clear()
                self._ready.append(number)
                self._times[number].ready_s = perf_counter()
            self._start()
            for number, work in zip(self._order, self._works, strict=True):
                self._await(self._times[number], work)
            self._agree_on_order(seen)
            self._reset()
            averages = self._by_leaf([bucket.averages() for bucket in self._buckets])
            self._context.statistics.end_s = perf_counter()
            return averages

    def _end_local(self) -> list[NumpyArray]:
        """Return the gradients of a step as they came, zeros for those that did not."""
        own = self._own
        self._reset()
        zeros = [np.zeros(spec.shape, spec.dtype) for spec in self._specs]
        return self._by_leaf(
            [own.get(n, [zeros[i] for i in group]) for n, group in enumerate(self.groups)]
        )

    def _by_leaf(self, parts: Sequence[Sequence[NumpyArray]]) -> list[NumpyArray]:
        leaves: list[Any] = [None] * len(self._specs)
        for group, part in zip(self.groups, parts, strict=True):
            for position, leaf in zip(group, part, strict=True):
                leaves[position] = leaf
        return leaves

    @contextlib.contextmanager
    def _failing_for_good(self) -> Iterator[None]:
        """Refuse all calls after a step that was given up: its buckets may still be under way.

        Ranks that disagree give up a step together, and can go on.
        """
        self._check_is_well()
        try:
            try:
                yield
            except CollectiveMismatch as error:
                raise self._given_up(error) from None
        except CollectiveMismatch:
            raise
        except BaseException as error:
            self._failure = error
            raise

    def _given_up(self, error: CollectiveMismatch) -> CollectiveMismatch:
        """End the step on all ranks; return what to say of it."""
        for work in filter(None, self._works):
            with contextlib.suppress(CollectiveMismatch):
                work.wait()
        self._reset()
        return self._context.explained(error, self._lines)

    def _check_is_well(self) -> None:
        if self._failure is not None:
            raise RuntimeError(
                f"DDP: an earlier step has failed: {self._failure}\n"
                "Make a new one, over a healthy group."
            ) from self._failure

    def _enter(self, step: object) -> None:
        if self._step is None:
            self._step = step
            if not self._context.is_local:
                self._begin_statistics()
        elif self._step is not step:
            raise RuntimeError(
                "tap: these parameters are tapped a second time before the first is done. Call "
                "tap() once in a step, and use what it returns in all places."
            )

    def _start(self) -> None:
        op = self._context.reduce_op if self._factor is None else ReduceOp.SUM
        while len(self._works) < len(self._order):
            number = self._order[len(self._works)]
            if number not in self._ready:
                return
            times = self._times[number]
            times.start_s = perf_counter()
            work = self._buckets[number].reduce(self._backend, op, self._tag)
            if work is None:
                times.end_s = perf_counter()
                times.exposed_s = times.end_s - times.start_s
            self._works.append(work)

    def _await(self, times: BucketTimes, work: Work | None) -> None:
        if work is None:
            return
        began_s = perf_counter()
        work.wait()
        times.end_s = perf_counter()
        times.exposed_s = times.end_s - began_s

    def _begin_statistics(self) -> None:
        context = self._context
        self._times = [BucketTimes(b.buffer.nbytes, b.layout.names) for b in self._buckets]
        context.statistics = Statistics(
            context.statistics.num_rounds + 1,
            context.is_overlapped,
            perf_counter(),
            buckets=[self._times[number] for number in self._order],
        )

    def _agree_on_order(self, seen: Sequence[int]) -> None:
        if self._is_order_agreed:
            return
        missing = [number for number in self._order if number not in seen]
        order = broadcast(np.array([*seen, *missing]), self._backend, tag=self._tag)
        self._order = order.tolist()
        self._is_order_agreed = True


class _Bucket:
    """Some leaves of one dtype, one after the other in memory that suits the group."""

    def __init__(self, layout: BucketLayout, buffer: NumpyArray) -> None:
        self.layout = layout
        self.buffer = buffer
        self.clear()
        self._views = [
            self.buffer[offset : offset + spec.count].reshape(spec.shape)
            for spec, offset in zip(layout.specs, layout.offsets, strict=True)
        ]

    def pack(self, gradients: Sequence[NumpyArray], factor: float | None) -> None:
        # What is too large for 16 bits becomes infinite, visibly on all ranks.
        with np.errstate(over="ignore"):
            for view, gradient in zip(self._views, gradients, strict=True):
                if factor is None:
                    np.copyto(view, gradient, casting="unsafe")
                elif factor == 0:
                    view.fill(0)  # whatever the gradient was
                else:
                    _multiply(gradient, factor, view)

    def averages(self) -> list[NumpyArray]:
        """Return what has been reduced, as views unless it travelled in another dtype."""
        return [view.astype(self.layout.dtype, copy=False) for view in self._views]

    def clear(self) -> None:
        self.buffer.fill(0)

    def reduce(self, backend: Backend, op: ReduceOp, tag: int) -> Work | None:
        """Start its reduction; None if that is over."""
        buffer = self.buffer
        work: Work = allreduce(buffer, backend, op, out=buffer, async_op=True, tag=tag)
        return work


class _UserBucket(_Bucket):
    """A bucket that is reduced by a user's own reduction."""

    def __init__(self, bucket: Bucket, reduction: UserReduction) -> None:
        super().__init__(bucket.layout, bucket.buffer)
        self._bucket, self._reduction = bucket, reduction

    def reduce(self, backend: Backend, op: ReduceOp, tag: int) -> Work | None:
        self._bucket.mark()  # all gradients are there, if only zeros
        with telling(functools.partial(interrupt, backend)):
            reduce_by(self._reduction, self._bucket, backend, op, tag)
        return None


def _multiply(gradient: NumpyArray, factor: float, out: NumpyArray) -> None:
    parts = real_parts(gradient, gradient.dtype)
    for part, out_part in zip(parts, real_parts(out, out.dtype), strict=True):
        np.multiply(part, np.asarray(factor, part.dtype), out=out_part, casting="unsafe")


def await_callbacks() -> None:
    """Wait for the callbacks of programs that are still running: they use groups, too.

    If an earlier program has failed, JAX says so here, again and again: what needs its results
    raises anyway, and all else, such as a DDP over the group of the survivors, can do without them.
    """
    with contextlib.suppress(Exception):
        jax.effects_barrier()


def _natural(name: str) -> list[tuple[int, str]]:
    """Split a name so that numbers in it compare as numbers."""
    return [
        (int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"(\d+)", name)
    ]
