"""Collectives over MPI, through mpi4py: the engine that CPU clusters already run."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np

from ferro_dist import arguments
from ferro_dist.arguments import UnevenCounts
from ferro_dist.backends.base import Array, P2POp
from ferro_dist.backends.mpi_agreement import Fingerprint
from ferro_dist.backends.mpi_assembly import duplicate
from ferro_dist.backends.mpi_group import MpiGroup
from ferro_dist.backends.mpi_library import claim_mpi, intracomm
from ferro_dist.backends.mpi_memory import (
    Numbers,
    Source,
    Target,
    block_of,
    chunks_of,
    is_same_memory,
    overlap,
    piece_length,
    pieces,
)
from ferro_dist.backends.mpi_messages import mpi_tag_of
from ferro_dist.backends.mpi_progress import Call, MpiWork, Steps
from ferro_dist.backends.mpi_reduction import Reduction
from ferro_dist.backends.results import allocate_chunk, allocate_rows
from ferro_dist.deadline import Deadline
from ferro_dist.interop import BufferView
from ferro_dist.reduce_op import ReduceOp
from ferro_dist.work import JointWork, Work

__all__ = ["MpiBackend"]


class MpiBackend(MpiGroup):
    """A group of MPI processes.

    All ranks of `comm` make it together, like a collective. Calls are checked for agreement before
    data moves, at the price of one small message to every rank.

    MPI itself cannot lose a process: most launchers end the whole job when one dies. Calls with
    ``async_op=True`` progress only while some call of the group waits or their `Work` is queried,
    since MPI makes progress only inside its own functions. A progress thread here would take the
    interpreter's lock from the computation that it should overlap; MPICH has one of its own
    (``MPIR_CVAR_ASYNC_PROGRESS=1``).

    `split` ends in a call to MPI that has no timeout and ignores Ctrl-C. It takes only moments,
    since no rank begins it before all have arrived, unless one is stopped just then.

    Parameters
    ----------
    comm : mpi4py.MPI.Intracomm, optional
        By default ``MPI.COMM_WORLD``. It is duplicated, so that its own traffic never mixes with
        that of the backend.
    timeout : float
        Seconds after which a blocking call that names no timeout gives up.

    Raises
    ------
    BackendUnavailable
        mpi4py or an MPI library is missing.
    Timeout
        Not all ranks of `comm` made their backends in time; MPI does not tell which.
    LockPoisoned
        This process was forked from one that has made an MpiBackend, even if it has closed it.
    TypeError
        `comm` is no intracommunicator.
    """

    name = "mpi"

    def __init__(self, comm: Any = None, *, timeout: float = 300.0) -> None:
        mpi = claim_mpi()
        parent = mpi.COMM_WORLD if comm is None else intracomm(mpi, comm)
        timeout = arguments.check_timeout(timeout)
        deadline = Deadline(timeout)
        self._init_from("init", mpi, duplicate("init", parent, deadline), deadline, timeout)

    # Reductions

    def allreduce(
        self,
        x: Array,
        out: Array | None,
        op: ReduceOp,
        async_op: bool,
        timeout: float | None,
        tag: int,
    ) -> Array | Work:
        source = self._operands.source("allreduce", x)
        target = self._operands.target("allreduce", x, source, out, source.view.count)
        reduction = self._operands.reduction("allreduce", source, op)
        fingerprint = _fingerprint("allreduce", source.view, op=op, tag=tag)

        def start(numbers: Numbers) -> Any:
            message = [numbers, numbers.size, reduction.mpi_type]
            return self._comm.Iallreduce(self._mpi.IN_PLACE, message, reduction.mpi_op)

        def move() -> Steps:
            yield from self._reduce_in_place(start, source, target, reduction)
            return target.result()

        return self._collective(fingerprint, move, async_op, timeout)

    def reduce(
        self,
        x: Array,
        out: Array | None,
        op: ReduceOp,
        root: int,
        async_op: bool,
        timeout: float | None,
        tag: int,
    ) -> Array | Work | None:
        root = self._operands.root("reduce", root)
        source = self._operands.source("reduce", x)
        is_root = self._rank == root
        target = (
            self._operands.target("reduce", x, source, out, source.view.count)
            if is_root
            else Target.scratch(source)
        )
        reduction = self._operands.reduction("reduce", source, op)
        fingerprint = _fingerprint("reduce", source.view, op=op, root=root, tag=tag)

        def start(numbers: Numbers) -> Any:
            message = [numbers, numbers.size, reduction.mpi_type]
            buffers = (self._mpi.IN_PLACE, message) if is_root else (message, None)
            return self._comm.Ireduce(*buffers, reduction.mpi_op, root)

        def move() -> Steps:
            yield from self._reduce_in_place(start, source, target, reduction)
            return target.result()

        return self._collective(fingerprint, move, async_op, timeout)

    def reduce_scatter(
        self,
        x: Array,
        out: Array | None,
        op: ReduceOp,
        async_op: bool,
        timeout: float | None,
        tag: int,
    ) -> Array | Work:
        source = self._operands.source("reduce_scatter", x)
        chunk = self._operands.chunk("reduce_scatter", source.view.count)
        own = self._rank * chunk * source.view.itemsize
        make = partial(allocate_chunk, x, self._world_size)
        target = self._operands.target("reduce_scatter", x, source, out, chunk, make, in_place=own)
        reduction = self._operands.reduction("reduce_scatter", source, op)
        fingerprint = _fingerprint("reduce_scatter", source.view, op=op, tag=tag)

        def move() -> Steps:
            yield from self._reduce_and_scatter(source, target, chunk, reduction)
            return target.result()

        return self._collective(fingerprint, move, async_op, timeout)

    def _reduce_in_place(
        self,
        start: Callable[[Numbers], Any],
        source: Source,
        target: Target,
        reduction: Reduction,
    ) -> Iterator[None]:
        """Reduce `source` into `target`, in pieces that MPI can count."""
        if self._world_size == 1:
            target.numbers[:] = source.numbers
            return
        total = result = target.numbers
        if reduction.is_direct(total.dtype):
            if not is_same_memory(source.view, target.view):
                total[:] = source.numbers
        else:
            total = source.numbers.astype(reduction.working_dtype)
        for piece in pieces(total):
            yield from self._requests.complete(start(piece))
        if target.is_wanted:
            reduction.finish(total, self._world_size, result)

    def _reduce_and_scatter(
        self, source: Source, target: Target, chunk: int, reduction: Reduction
    ) -> Iterator[None]:
        if self._world_size == 1:
            target.numbers[:] = source.numbers
            return
        chunks = source.numbers.astype(reduction.working_dtype, copy=False)
        chunks = chunks.reshape(self._world_size, chunk)
        result = target.numbers
        is_direct = reduction.is_direct(result.dtype)
        if is_direct and overlap(source.view, target.view):
            chunks = chunks.copy()
        total = result if is_direct else np.empty(chunk, reduction.working_dtype)
        length = piece_length(self._world_size)
        for first in range(0, chunk, length):
            parts = np.ascontiguousarray(chunks[:, first : first + length])
            piece = total[first : first + length]
            request = self._comm.Ireduce_scatter_block(
                [parts, piece.size, reduction.mpi_type],
                [piece, piece.size, reduction.mpi_type],
                reduction.mpi_op,
            )
            yield from self._requests.complete(request)
        reduction.finish(total, self._world_size, result)

    # Movements

    def broadcast(
        self,
        x: Array,
        out: Array | None,
        root: int,
        async_op: bool,
        timeout: float | None,
        tag: int,
    ) -> Array | Work:
        root = self._operands.root("broadcast", root)
        source = self._operands.source("broadcast", x)
        target = self._operands.target("broadcast", x, source, out, source.view.count)
        fingerprint = _fingerprint("broadcast", source.view, root=root, tag=tag)

        def move() -> Steps:
            if self._rank == root and not is_same_memory(source.view, target.view):
                target.octets[:] = source.octets
            if self._world_size > 1:
                for piece in pieces(target.octets):
                    message = [piece, piece.size, self._mpi.BYTE]
                    yield from self._requests.complete(self._comm.Ibcast(message, root))
            return target.result()

        return self._collective(fingerprint, move, async_op, timeout)

    def all_gather(
        self, x: Array, out: Array | None, async_op: bool, timeout: float | None, tag: int
    ) -> Array | Work:
        source = self._operands.source("all_gather", x)
        target = self._operands.gathering_target("all_gather", x, source, out)
        fingerprint = _fingerprint("all_gather", source.view, tag=tag)

        def move() -> Steps:
            octets = source.apart_from(target)
            with block_of(octets.size) as block:
                send, receive = [octets, *block], [target.octets, *block]
                yield from self._requests.complete(self._comm.Iallgather(send, receive))
            return target.result()

        return self._collective(fingerprint, move, async_op, timeout)

    def gather(
        self,
        x: Array,
        out: Array | None,
        root: int,
        async_op: bool,
        timeout: float | None,
        tag: int,
    ) -> Array | Work | None:
        root = self._operands.root("gather", root)
        source = self._operands.source("gather", x)
        is_root = self._rank == root
        target = self._operands.gathering_target("gather", x, source, out) if is_root else None
        fingerprint = _fingerprint("gather", source.view, root=root, tag=tag)

        def move() -> Steps:
            octets = source.octets if target is None else source.apart_from(target)
            with block_of(octets.size) as block:
                receive = None if target is None else [target.octets, *block]
                yield from self._requests.complete(
                    self._comm.Igather([octets, *block], receive, root)
                )
            return None if target is None else target.result()

        return self._collective(fingerprint, move, async_op, timeout)

    def scatter(
        self,
        x: Array | None,
        out: Array,
        root: int,
        async_op: bool,
        timeout: float | None,
        tag: int,
    ) -> Array | Work:
        root = self._operands.root("scatter", root)
        source, target = self._operands.scatter_operands(x, out, root)
        fingerprint = _fingerprint("scatter", target.view, root=root, tag=tag)

        def move() -> Steps:
            with block_of(target.view.nbytes) as block:
                send = None if source is None else [source.apart_from(target), *block]
                yield from self._requests.complete(
                    self._comm.Iscatter(send, [target.octets, *block], root)
                )
            return target.result()

        return self._collective(fingerprint, move, async_op, timeout)

    def all_to_all(
        self,
        x: Array,
        out: Array | None,
        send_counts: Sequence[int] | None,
        recv_counts: Sequence[int] | None,
        async_op: bool,
        timeout: float | None,
        tag: int,
    ) -> Array | Work:
        source = self._operands.source("all_to_all", x)
        counts = arguments.uneven_counts(
            send_counts,
            recv_counts,
            x_count=source.view.count,
            rank=self._rank,
            world_size=self._world_size,
        )
        if counts is None:
            return self._even_all_to_all(x, source, out, async_op, timeout, tag)
        return self._uneven_all_to_all(x, source, out, counts, async_op, timeout, tag)

    def _even_all_to_all(
        self,
        x: Array,
        source: Source,
        out: Array | None,
        async_op: bool,
        timeout: float | None,
        tag: int,
    ) -> Any:
        self._operands.chunk("all_to_all", source.view.count)
        target = self._operands.target("all_to_all", x, source, out, source.view.count)
        fingerprint = _fingerprint("all_to_all", source.view, tag=tag)

        def move() -> Steps:
            octets = source.apart_from(target)
            with block_of(octets.size // self._world_size) as block:
                send, receive = [octets, *block], [target.octets, *block]
                yield from self._requests.complete(self._comm.Ialltoall(send, receive))
            return target.result()

        return self._collective(fingerprint, move, async_op, timeout)

    def _uneven_all_to_all(
        self,
        x: Array,
        source: Source,
        out: Array | None,
        counts: UnevenCounts,
        async_op: bool,
        timeout: float | None,
        tag: int,
    ) -> Any:
        count = sum(counts.recv)
        make = partial(allocate_rows, x, count)
        target = self._operands.target("all_to_all", x, source, out, count, make, in_place=None)
        fingerprint = Fingerprint.of_uneven(source.view.dtype, arguments.check_tag(tag))
        itemsize = source.view.itemsize

        def move() -> Steps:
            yield from self._agreement.reach_on_counts(counts)
            with (
                chunks_of(counts.send, itemsize) as sent,
                chunks_of(counts.recv, itemsize) as expected,
            ):
                send, receive = [source.octets, *sent], [target.octets, *expected]
                yield from self._requests.complete(self._comm.Ialltoallw(send, receive))
            return target.result()

        return self._collective(fingerprint, move, async_op, timeout)

    def barrier(self, async_op: bool, timeout: float | None, tag: int) -> Work | None:
        def move() -> Steps:
            # Nobody can have every fingerprint before everybody has come.
            yield from ()

        fingerprint = Fingerprint("barrier", tag=arguments.check_tag(tag))
        passed: Work | None = self._collective(fingerprint, move, async_op, timeout)
        return passed

    # Messages

    def send(
        self, x: Array, dst: int, async_op: bool, timeout: float | None, tag: int
    ) -> Work | None:
        call, _ = self._message("send", True, x, dst, timeout, tag)
        work = MpiWork(self._progress, call)
        sent: Work | None = self._exchange("send", [call], work, async_op)
        return sent

    def recv(
        self, out: Array, src: int, async_op: bool, timeout: float | None, tag: int
    ) -> Array | Work:
        call, _ = self._message("recv", False, out, src, timeout, tag)
        return self._exchange("recv", [call], MpiWork(self._progress, call), async_op)

    def sendrecv(
        self,
        x: Array,
        out: Array,
        dst: int,
        src: int,
        async_op: bool,
        timeout: float | None,
        tag: int,
    ) -> Array | Work:
        # Both are checked before either is posted.
        sent, read = self._message("sendrecv", True, x, dst, timeout, tag)
        received, written = self._message("sendrecv", False, out, src, timeout, tag)
        if overlap(read, written):
            arguments.raise_overlap("sendrecv", what="x and out overlap", rank=self._rank)
        return self._run_together("sendrecv", [sent, received], out, async_op)

    def batch(
        self, ops: Sequence[P2POp], async_op: bool, timeout: float | None, tag: int
    ) -> Work | None:
        messages = [
            self._message("batch", op.is_send, op.array, op.peer, timeout, tag) for op in ops
        ]
        arguments.check_disjoint(ops, [view for _, view in messages], rank=self._rank)
        self._seconds(timeout)  # of an empty batch, too
        calls = [call for call, _ in messages]
        done: Work | None = self._run_together("batch", calls, None, async_op)
        return done

    def _run_together(self, op: str, calls: list[Call], result: Any, async_op: bool) -> Any:
        works = [MpiWork(self._progress, call) for call in calls]
        return self._exchange(op, calls, JointWork(works, result), async_op)

    def _message(
        self, op: str, is_send: bool, array: Array, peer: int, timeout: float | None, tag: int
    ) -> tuple[Call, BufferView]:
        """Check one message of the call `op`; return what moves it, and the memory it uses."""
        peer = arguments.check_peer(op, peer, rank=self._rank, world_size=self._world_size)
        if is_send:
            source = self._operands.source(op, array)
            view = source.view
            steps = partial(self._messages.send, source, peer, mpi_tag_of(view, tag))
        else:
            view = self._operands.output_view(op, array)
            target = Target(array, view, None)
            steps = partial(self._messages.recv, target, peer, mpi_tag_of(view, tag))
        return Call(op, (is_send, peer), steps, lambda: [peer], self._seconds(timeout)), view


def _fingerprint(
    name: str, view: BufferView, *, op: ReduceOp | None = None, root: int = -1, tag: int = 0
) -> Fingerprint:
    reduce_op = -1 if op is None else int(op)
    return Fingerprint(name, reduce_op, view.dtype, root, view.count, arguments.check_tag(tag))
