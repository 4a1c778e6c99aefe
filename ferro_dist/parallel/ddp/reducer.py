"""Reduce a module's gradients over the ranks, bucket by bucket, in one order on every rank.

One round, with buckets 0 to B-1:

1. `begin`. All gradients are missing.
2. `mark_ready(i)`, whenever a gradient is there. The last one of a bucket packs it: all its
   gradients are copied into the bucket, save those that were computed there, and large ones on the
   CPU, which were copied when they became ready. If rounds are overlapped, and buckets before it
   are under way, the bucket's allreduce starts.
3. `finish`. Buckets with gradients that never came are packed as they are; everything not
   reduced yet is reduced now; the results are handed back.

Ranks may differ in which gradients they have and when, but never get out of step: each reduces
buckets 0 to B-1 in this order in every round. The lanes of a bucket tell what was contributed at
all.

If a backward passes several modules that are reduced separately, the round of each is open until
its end. Only that of the first overlaps: buckets of two that leave when they are ready would do so
in another order on a rank that has other gradients.

Buckets are laid out again after the first round, in the order in which its gradients became ready
on rank 0, and again after the first round in which a parameter is trained that was frozen until
then. In host memory this is done as the next round begins: gradients of the last one are mostly
gone by then, and the new buckets take their place.

A gradient is marked ready a second time if something was added after its bucket was packed, as in a
layer that two re-entrant checkpoints share. If the bucket has not left yet, it is added there;
otherwise the late part waits separately. The last bucket never leaves before backward has ended, so
that a control lane in it can say whether any rank has a late part. If so, all ranks reduce the late
parts in a second pass, add them, and never overlap again. If the last bucket is on a GPU, the
control lanes are read in the first round only, since the host would have to wait for the GPU: a
late gradient in any other round raises.

Another control lane says whether any rank wants the parameters of all ranks to be compared after
the round. Where the host does not read it, a group that can compares calls in host memory, and the
wish goes with them (`ferro_dist.parallel.ddp.agreement`).

References
----------
S. Li et al., "PyTorch Distributed: Experiences on Accelerating Data Parallel Training",
VLDB 2020: why buckets, and why in the order of backward.
"""

from __future__ import annotations

import abc
import bisect
import contextlib
import enum
import functools
import hashlib
import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from ferro_dist.collective import allreduce
from ferro_dist.errors import CollectiveMismatch
from ferro_dist.parallel.buckets.bucket import (
    Bucket,
    BucketLayout,
    BucketMemory,
    ParameterSpec,
    assign_buckets,
)
from ferro_dist.parallel.buckets.compression import reduce_by, wire_dtype
from ferro_dist.parallel.buckets.gpu_memory import GpuMemory
from ferro_dist.parallel.ddp.agreement import Agreement
from ferro_dist.parallel.ddp.participation import Participation, RollCall
from ferro_dist.parallel.ddp.statistics import BucketTimes, Statistics
from ferro_dist.parallel.exchange import broadcast_row
from ferro_dist.parallel.manifest import BUILD_THE_SAME, explain_mismatch
from ferro_dist.reduce_op import ReduceOp
from ferro_dist.work import Work

if TYPE_CHECKING:
    from ferro_dist.backends.base import Backend
    from ferro_dist.parallel.ddp.options import Options

__all__ = ["Call", "Gradients", "NoGradients", "Reducer", "tag_of"]

NumpyArray = np.ndarray[Any, Any]

# Control lanes of the last bucket.
LATE, COMPARE = range(2)
NUM_CONTROLS = 2

LATE_ON_GPU = (
    "DDP: the gradient of {name!r} came once more after its bucket had left, as none did in "
    "the first backward. Construct DDP with overlap=False: buckets leave when backward has ended."
)

FREEZE_BEFORE_JOIN = (
    "Inside join, a rank that has run out of data goes on with what it trained: freeze, unfreeze "
    "and convert parameters before the block. It lacks the last steps of the others, one of which "
    "can give it theirs: broadcast_parameters(root)."
)

# Those with an open round, of each group.
_under_way: weakref.WeakKeyDictionary[Backend, weakref.WeakSet[Reducer]]
_under_way = weakref.WeakKeyDictionary()


class Call(enum.IntEnum):
    """The calls of a round that reduce no bucket, by what stands in their tags for its index."""

    ROLL_CALL = -1
    ORDER = -2
    BUFFERS = -3
    SPARSE = -4
    AGREEMENT = -5


def tag_of(first_tag: int, call: int) -> int:
    """Return the tag of a call: a bucket by its index, others as `Call`."""
    return (first_tag + call) & 0xFFFFFFFF


class Gradients(abc.ABC):
    """Where a module keeps its gradients. Numbers of parameters are those of the specs.

    Attributes
    ----------
    memory : BucketMemory
        Of the buckets of the open round.
    """

    memory = BucketMemory()

    def let_go(self) -> None:
        """Keep no slot that is no gradient any more, so that its memory can be used again."""
        return

    @abc.abstractmethod
    def pack(self, bucket: Bucket, is_leaving: bool) -> None:
        """Copy this rank's gradients into a bucket, zeros for absent ones, and mark them.

        If the bucket is leaving, nothing may be added to its gradients in their slots.
        """

    def pack_one(self, bucket: Bucket, position: int) -> None:
        """Copy a gradient to its slot ahead of the others, if `pack` takes it from there."""
        return

    def pack_late(self, bucket: Bucket) -> None:
        """Copy what has come since the bucket left, zeros elsewhere, and mark nothing."""
        bucket.clear()

    @abc.abstractmethod
    def put(self, bucket: Bucket, is_contributed: Sequence[bool] | None) -> None:
        """Give the results to the module, for gradients that any rank contributed; None for all."""

    def take_back(self) -> None:
        """Undo what `pack` did to the module, as no rank has averaged the gradients."""
        return


class NoGradients(Gradients):
    """The gradients of a rank that has run out of data, and stays only for the others."""

    def pack(self, bucket: Bucket, is_leaving: bool) -> None:
        bucket.clear()

    def put(self, bucket: Bucket, is_contributed: Sequence[bool] | None) -> None:
        return


@dataclass(slots=True)
class _Round:
    """The state of one round, save for what `Reducer.mark_ready` needs for every parameter.

    Attributes
    ----------
    gradients : Gradients
    is_held : bool
        Whether this rank's gradients stay as and where they are until `Reducer.finish`.
    is_overlapped : bool
        Whether buckets leave as soon as they are packed.
    has_roll_call : bool
    wants_comparison : bool
        Whether this rank asks that the parameters of all be compared.
    ready : set of int
        The parameters whose gradients are there, of the first `num_settled` that were reported.
    has_late : bool
        Whether a gradient came after its bucket had left.
    num_sent : int
        How many buckets have left.
    """

    gradients: Gradients = field(default_factory=NoGradients)
    is_held: bool = False
    is_overlapped: bool = False
    has_roll_call: bool = False
    wants_comparison: bool = False
    ready: set[int] = field(default_factory=set)
    num_settled: int = 0
    has_late: bool = False
    num_sent: int = 0


class Reducer:
    """Buckets, and the rounds in which they are reduced.

    Parameters
    ----------
    specs : sequence of ParameterSpec
        The parameters that are trained, in an order that is the same on all ranks.
    options : Options
    as_array : callable
        Makes an array of the module's library from a NumPy array, over the same memory.
    gpu_memory : GpuMemory or None
        For parameters on the GPU; None if there cannot be any.
    follows_order : bool
        Whether buckets follow the order of the first round; their memory then changes once.
    first_tag : int
        Distinguishes this reducer's calls from others of the group.

    Attributes
    ----------
    specs : tuple of ParameterSpec
    buckets : list of Bucket
    bucket_of : list of Bucket
        By number of the parameter.
    memory : BucketMemory
        Of these buckets.
    ranks_may_leave : bool
        Whether ranks may run out of data: every round then begins with a roll call.
    must_compare : bool
        Whether any rank has asked, in the last round, that the parameters of all be compared.
    statistics : Statistics
        Of the last round.
    """

    def __init__(
        self,
        specs: Sequence[ParameterSpec],
        options: Options,
        as_array: Callable[[NumpyArray], Any],
        *,
        gpu_memory: GpuMemory | None,
        follows_order: bool,
        first_tag: int,
    ) -> None:
        self.backend = backend = options.backend
        self.averaging = options.averaging
        self._under_way = _under_way.setdefault(backend, weakref.WeakSet())
        self.statistics = Statistics()
        self.ranks_may_leave = self.must_compare = False
        self._as_array = as_array
        self._gpu_memory = gpu_memory
        self._bucket_nbytes = options.bucket_nbytes
        self._compress = options.compress
        self._kept: dict[str, Any] = {}
        # Ranks may differ in this. A user's own reduction runs on the user's thread.
        self._may_overlap = options.is_overlapped_with(specs) and not callable(options.compress)
        self._follows_order = follows_order
        self._agreed_places: dict[str, int] = {}  # of parameters in the order of readiness, by name
        self._first_tag = first_tag
        has_both = backend.device is not None and backend.moves_host_arrays
        self._agreement = Agreement(backend) if has_both and backend.world_size > 1 else None
        # Gradients on the CPU and on GPUs become ready on different threads.
        self._lock = threading.RLock()
        self._round = _Round()
        self.lay_out(specs)

    # Layout

    def lay_out(self, specs: Sequence[ParameterSpec]) -> None:
        """Make buckets for these parameters.

        Gradients that lie in earlier buckets keep them alive.
        """
        self.specs = tuple(specs)
        # Also if there is no memory for them: the next round tries again.
        self._must_lay_out = True
        # Let go of those before: their memory may be used again.
        self.buckets: list[Bucket] = []
        self.bucket_of: list[Bucket] = []
        # A rank that alone freezes parameters, and unfreezes them before the others notice, must
        # return to the order of all ranks: so no layout forgets that order.
        places = self._agreed_places
        self._has_order = not self._follows_order or all(spec.name in places for spec in specs)
        self._order = self._expected_order()
        numbers = {spec.name: number for number, spec in enumerate(specs)}
        groups = assign_buckets([specs[number] for number in self._order], self._bucket_nbytes)
        self.buckets = [
            self._make_bucket(index, [numbers[spec.name] for spec in group], group)
            for index, group in enumerate(groups)
        ]
        self._index_buckets()
        self._tag = self._first_tag + _digest(specs, self._order)
        self._must_lay_out = False
        self._reset()
        self._round = _Round()

    def _expected_order(self) -> tuple[int, ...]:
        """Return the numbers of parameters as their gradients are expected to become ready."""
        # Backward finishes the last layers first, so their bucket fills first.
        order = list(range(len(self.specs) - 1, -1, -1))
        if self._follows_order and self._has_order:
            order.sort(key=lambda number: self._agreed_places[self.specs[number].name])
        return tuple(order)

    def _make_bucket(self, index: int, members: list[int], specs: list[ParameterSpec]) -> Bucket:
        # Every bucket has control lanes, so that its layout does not depend on its index.
        layout = BucketLayout(specs, NUM_CONTROLS)
        wire = wire_dtype(self._compress, layout.dtype)
        if specs[0].is_on_gpu:
            from ferro_dist.parallel.buckets.gpu_bucket import GpuBucket

            assert self._gpu_memory is not None, "no module has parameters out of reach"
            return GpuBucket(index, members, layout, self._gpu_memory, wire, self._kept)
        if wire is None:
            buffer = self.backend.empty(layout.count, layout.dtype)
            return Bucket(index, members, layout, buffer, self._as_array, kept=self._kept)
        buffer = np.empty(layout.count, layout.dtype)
        sent = self.backend.empty(layout.count, wire)
        return Bucket(index, members, layout, buffer, self._as_array, sent)

    def _index_buckets(self) -> None:
        """Note about the buckets what would take long to find out in a round."""
        buckets = self.buckets
        self.memory = BucketMemory(buckets)
        self._is_on_gpu = any(bucket.is_on_gpu for bucket in buckets)
        by_number = {number: bucket for bucket in buckets for number in bucket.members}
        self.bucket_of = [by_number[number] for number in range(len(self.specs))]
        self._streamed = {
            bucket.members[position]: position
            for bucket in buckets
            for position in bucket.layout.streamed
        }
        place_of = {number: place for place, number in enumerate(self._order)}
        # How many gradients have come by the time each bucket is full, if they come in this order.
        self._full_at = [1 + max(map(place_of.__getitem__, b.members)) for b in buckets]

    # A round

    @property
    def is_idempotent(self) -> bool:
        """Whether averaging again changes nothing; it does once ranks have left."""
        return self.averaging.is_idempotent and not self.ranks_may_leave

    def begin(
        self,
        gradients: Gradients,
        *,
        weight: float | None = None,
        is_present: bool = True,
        is_held: bool = False,
        wants_comparison: bool = False,
    ) -> None:
        """Open a round. All ranks do so, and finish it, with gradients or without.

        Parameters
        ----------
        gradients : Gradients
        weight : float, optional
            Of this rank's gradients, in a weighted average. Given on all ranks or on none.
        is_present : bool
            False for a rank that has run out of data.
        is_held : bool
            Whether this rank's gradients stay as and where they are until `finish`.
        wants_comparison : bool
            Whether the parameters of all ranks should be compared. If any rank wants this,
            `must_compare` says so after `finish`.
        """
        if self._must_lay_out:
            gradients.let_go()
            self.lay_out(self.specs)
        self._reset()
        self._round = current = _Round(
            gradients,
            is_held=is_held,
            is_overlapped=self._may_overlap and not self._under_way,
            wants_comparison=wants_comparison,
        )
        self.must_compare = False
        self._under_way.add(self)
        gradients.memory = self.memory
        if self._agreement is not None and self._is_on_gpu:
            self._agreement.ask(tag_of(self._tag, Call.AGREEMENT), wants_comparison)
        if self.ranks_may_leave or weight is not None:
            self._roll_call.ask(is_present, weight, tag_of(self._tag, Call.ROLL_CALL))
            current.has_roll_call = True
        self.statistics = Statistics(
            self.statistics.num_rounds + 1,
            current.is_overlapped,
            perf_counter(),
            buckets=[
                BucketTimes(bucket.layout.nbytes, bucket.layout.names) for bucket in self.buckets
            ],
        )

    def mark_ready(self, number: int) -> None:
        """Note that a gradient is there, and pack its bucket if it was the last."""
        # Runs for every parameter and step: what can wait until a bucket may be full does.
        if self._is_on_gpu:
            with self._lock:
                self.bucket_of[number].note_stream()
                self._ready_order.append(number)
                if len(self._ready_order) >= self._settle_at:
                    self._settle()
            return
        if number in self._streamed:
            self._pack_one(number)
        order = self._ready_order
        order.append(number)
        if len(order) >= self._settle_at:
            self._settle()

    def _settle(self) -> None:
        """Take in what has become ready since the last time."""
        current = self._round
        new = self._ready_order[current.num_settled :]
        current.num_settled += len(new)
        bucket = self.bucket_of[new[0]] if new else None
        # Nearly always these are the gradients of one bucket, in the expected order.
        if bucket is not None and bucket.num_missing == len(new) and set(new) == bucket.member_set:
            current.ready |= bucket.member_set
            bucket.num_missing = 0
            self._pack_full(bucket)
            foreseen = bisect.bisect_right(self._full_at, current.num_settled)
            if foreseen < len(self._full_at):
                self._settle_at = self._full_at[foreseen]
                return
        else:
            self._settle_each(new)
        # No bucket can be full before so many more have come.
        missing = (bucket.num_missing for bucket in self.buckets if bucket.num_missing)
        self._settle_at = current.num_settled + min(missing, default=1)

    def _settle_each(self, new: Iterable[int]) -> None:
        for number in new:
            bucket = self.bucket_of[number]
            if number in self._round.ready:
                self._note_late(bucket, number)
                continue
            self._round.ready.add(number)
            bucket.num_missing -= 1
            if not bucket.num_missing:
                self._pack_full(bucket)

    def _note_late(self, bucket: Bucket, number: int) -> None:
        self._round.has_late |= bucket.is_leaving
        if self._round.has_late and not self._reads_controls:
            raise RuntimeError(LATE_ON_GPU.format(name=self.specs[number].name))

    def _pack_one(self, number: int) -> None:
        """Copy a large gradient at once, while it is in the caches, and its memory is soon free."""
        bucket = self.bucket_of[number]
        if not self._round.is_held and not bucket.is_packed:
            self._round.gradients.pack_one(bucket, self._streamed[number])

    def _pack_full(self, bucket: Bucket) -> None:
        if self._round.is_held:
            return  # `finish` packs it
        is_overlapped = self._round.is_overlapped
        self._pack(bucket, is_leaving=is_overlapped and bucket is not self.buckets[-1])
        if is_overlapped:
            self._send_packed()

    def is_ready(self, number: int) -> bool:
        """Whether a gradient was marked ready in this round."""
        if self._round.num_settled < len(self._ready_order):
            self._settle()
        return number in self._round.ready

    def finish(self) -> Participation | None:
        """Reduce what was not reduced yet, hand everything back, close the round.

        Returns
        -------
        Participation or None
            None if there was no roll call.

        Raises
        ------
        WeightError
            Their weights allow no average. Nothing was packed; the group stays usable.
        CollectiveMismatch
            The ranks do not train the same parameters; names the first that differs. Gradients that
            had not left yet are again this rank's own; the group stays usable.
        DistributedError
            Whatever ended the group. Gradients are then undefined.
        """
        try:
            if self._agreement is not None and self._is_on_gpu:
                self.must_compare = self._agreement.require()
            participation = self._roll_call.result() if self._round.has_roll_call else None
            if participation is None or participation.present:
                self._reduce_all(participation)
        except BaseException as error:
            self.abandon()
            if isinstance(error, CollectiveMismatch):
                raise self._explained(error) from error
            raise
        self._close()
        self.statistics.end_s = perf_counter()
        return participation

    def abandon(self) -> None:
        """Close a round that cannot be finished."""
        self._round.gradients.take_back()
        self._close()

    def _close(self) -> None:
        self._under_way.discard(self)
        self._round.gradients = NoGradients()  # they may refer to the reducer in turn

    def _reset(self) -> None:
        self._under_way.discard(self)  # where an earlier round was not finished
        for bucket in self.buckets:
            bucket.reset()
        self._ready_order: list[int] = []
        # How many gradients must have come before a bucket can be full.
        self._settle_at = self._full_at[0] if self._full_at else 1

    # Steps of a round

    @functools.cached_property
    def _roll_call(self) -> RollCall:  # over NCCL alone it takes memory, and many never need one
        return RollCall(self.backend)

    def _pack(self, bucket: Bucket, is_leaving: bool) -> None:
        self.statistics.buckets[bucket.index].ready_s = perf_counter()
        bucket.join_streams()
        self._round.gradients.pack(bucket, is_leaving)
        bucket.release_streams()
        bucket.is_packed, bucket.is_leaving = True, is_leaving

    def _send_packed(self) -> None:
        """Start every bucket whose turn it is, except the last: its control lanes are not known."""
        if self._agreement is not None and not self._agreement.is_reached():
            return  # `finish` says so
        current, buckets = self._round, self.buckets
        while current.num_sent < len(buckets) - 1 and buckets[current.num_sent].is_packed:
            bucket = buckets[current.num_sent]
            current.num_sent += 1
            self._send(bucket, self.averaging.reduce_op, async_op=True)

    def _reduce_all(self, participation: Participation | None) -> None:
        self.statistics.backward_end_s = perf_counter()
        # Raises, if at all, while gradients are where they were.
        op = self.averaging.reduce_op
        factor = None if participation is None else participation.factor(op)
        self._pack_rest()
        if not self.buckets:
            return
        self._reduce_rest(op if factor is None else self._weigh(factor))
        if self._reads_controls:
            self.must_compare |= self.buckets[-1].has_control(COMPARE)
            if self.buckets[-1].has_control(LATE):
                self._reduce_late()
        for bucket in self.buckets:
            self.averaging.complete(bucket)
            self._round.gradients.put(bucket, bucket.contributed())
        if not self._has_order:
            self._agree_on_order()

    def _pack_rest(self) -> None:
        self._settle()
        # All are packed before any is handed back: one gradient may lie in two of them.
        for bucket in self.buckets:
            if not bucket.is_packed:
                self._pack(bucket, is_leaving=False)

    def _reduce_rest(self, op: ReduceOp) -> None:
        self.buckets[-1].set_control(LATE, self._round.has_late)
        wants_comparison = self._round.wants_comparison and self._reads_controls
        self.buckets[-1].set_control(COMPARE, wants_comparison)
        for bucket in self.buckets[self._round.num_sent :]:
            # On a GPU the host does not wait, and the call's state can be queried later.
            self._send(bucket, op, async_op=bucket.is_on_gpu)
        for bucket in self.buckets:
            self._await(bucket)

    @property
    def _reads_controls(self) -> bool:
        """Whether all ranks read the control lanes of the last bucket in this round."""
        return not self.buckets[-1].is_on_gpu or not self._has_order

    def _weigh(self, factor: float) -> ReduceOp:
        """Multiply gradients by their weight; return how to reduce them."""
        for bucket in self.buckets:
            bucket.scale(factor)
        return ReduceOp.SUM

    def _send(self, bucket: Bucket, op: ReduceOp, *, async_op: bool) -> None:
        times = self.statistics.buckets[bucket.index]
        times.start_s = perf_counter()
        bucket.join_streams()
        tag = tag_of(self._tag, bucket.index)
        if callable(self._compress):
            reduce_by(self._compress, bucket, self.backend, op, tag)
        else:
            bucket.to_wire()
            wire = bucket.wire
            work = allreduce(wire, self.backend, op, out=wire, async_op=async_op, tag=tag)
            bucket.work = cast(Work, work) if async_op else None
        if bucket.work is None:
            self._arrive(bucket, times.start_s)

    def _await(self, bucket: Bucket) -> None:
        if bucket.work is not None:
            began_at = perf_counter()
            bucket.work.wait()
            self._arrive(bucket, began_at)

    def _arrive(self, bucket: Bucket, waiting_since_s: float) -> None:
        bucket.from_wire()
        times, seen_s = self.statistics.buckets[bucket.index], perf_counter()
        times.end_s = getattr(bucket.work, "ended_s", None) or seen_s  # the engine's work tells
        times.exposed_s += seen_s - waiting_since_s

    def _reduce_late(self) -> None:
        """Reduce what came after its bucket had left, on any rank, and add it."""
        self._may_overlap = False
        for bucket in self.buckets:
            in_time = bucket.copy()
            self._round.gradients.pack_late(bucket)
            self._send(bucket, self.averaging.reduce_op, async_op=bucket.is_on_gpu)
            self._await(bucket)
            bucket.add(in_time)

    def _agree_on_order(self) -> None:
        """Lay the buckets out in the order in which rank 0's gradients became ready."""
        seen = dict.fromkeys(self._ready_order)  # some came twice
        order = np.array([*seen, *(n for n in self._order if n not in seen)], np.int64)
        agreed = broadcast_row(order, self.backend, tag_of(self._tag, Call.ORDER)).tolist()
        self._agreed_places.update((self.specs[n].name, place) for place, n in enumerate(agreed))
        self._has_order = True
        self._must_lay_out = tuple(agreed) != self._order
        # A GPU's memory is given back; and the next round may be captured in a graph.
        if self._must_lay_out and self._is_on_gpu:
            self.lay_out(self.specs)

    # Ranks that disagree

    def _explained(self, error: CollectiveMismatch) -> CollectiveMismatch:
        """Return the error that names the parameter on which the ranks disagree, if any."""
        for bucket in self.buckets:
            with contextlib.suppress(CollectiveMismatch):
                if bucket.work is not None:
                    bucket.work.wait()
        lines = [f"trained parameter {number} {spec}" for number, spec in enumerate(self.specs)]
        remedy = FREEZE_BEFORE_JOIN if self.ranks_may_leave else BUILD_THE_SAME
        return explain_mismatch(error, lines, self.backend, "DDP", len(self.buckets), remedy)


def _digest(specs: Sequence[ParameterSpec], order: Iterable[int]) -> int:
    """31 bits of the layout: part of every tag, so that ranks that differ get a mismatch."""
    text = "\0".join(map(str, [*specs, *order])).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=4).digest(), "little") >> 1
