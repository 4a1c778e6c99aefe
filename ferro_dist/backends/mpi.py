"""Collectives over MPI, through mpi4py: the engine that CPU clusters already run."""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from ferro_dist import arguments
from ferro_dist.arguments import UnevenCounts
from ferro_dist.backends.base import Array, Backend, P2POp
from ferro_dist.backends.mpi_agreement import Agreement, Failure, Fingerprint, left_error
from ferro_dist.backends.mpi_farewell import (
    GOODBYE_TAG,
    Farewell,
    close_at_exit,
    free_left_groups,
)
from ferro_dist.backends.mpi_library import duplicate, intracomm, load_mpi
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
from ferro_dist.backends.mpi_progress import BatchWork, Call, MpiWork, Progress, Steps, mpi_lock
from ferro_dist.backends.mpi_reduction import Reduction, reduction_of
from ferro_dist.backends.results import allocate_chunk, allocate_gathered, allocate_rows
from ferro_dist.errors import (
    ChannelClosed,
    DistributedError,
    Io,
    PeerLostError,
    SizeMismatch,
    Timeout,
    UnsupportedOp,
)
from ferro_dist.interop import (
    BufferView,
    allocate,
    as_output,
    as_view,
    contiguous,
    dtype_code,
    dtype_name,
    numpy_dtype,
)
from ferro_dist.reduce_op import ReduceOp
from ferro_dist.work import Work

__all__ = ["MpiBackend"]

_CPU = 1
_COLLECTIVES = "collectives"

# A message's MPI tag tells its dtype and ten bits of a hash of the caller's tag: MPI
# promises tags up to 32767.
_TAG_BITS = 10
_TAG_MULTIPLIER = 2654435761  # Knuth's: all bits of a tag have a say in the upper ten

_ALIGNMENT = 64


class MpiBackend(Backend):
    """A group of MPI processes.

    Made by all ranks of `comm` together, as every collective. Calls are checked for
    agreement before data moves, at the price of one small message to every rank.

    MPI itself cannot lose a process: most launchers end the whole job when one dies.

    Parameters
    ----------
    comm : mpi4py.MPI.Intracomm, optional
        Duplicated, so that its own traffic is never mixed with ours.
        ``MPI.COMM_WORLD`` by default.
    timeout : float
        Seconds after which a blocking call that names no timeout gives up.

    Raises
    ------
    BackendUnavailable
        mpi4py or an MPI library is missing.
    Timeout
        Not every rank of `comm` made its backend in time.
    """

    name = "mpi"

    def __init__(self, comm: Any = None, *, timeout: float = 300.0) -> None:
        mpi = load_mpi()
        parent = mpi.COMM_WORLD if comm is None else intracomm(mpi, comm)
        timeout = arguments.check_timeout(timeout)
        comm, messages = duplicate(parent, timeout, copies=2)
        self._join(mpi, comm, messages, timeout)

    def _join(self, mpi: Any, comm: Any, messages: Any, timeout: float) -> None:
        for owned in (comm, messages):
            owned.Set_errhandler(mpi.ERRORS_RETURN)
        self._mpi = mpi
        self._comm = comm
        self._messages = messages  # sends and receives, apart from the fingerprints
        self._rank: int = comm.rank
        self._world_size: int = comm.size
        self._timeout = timeout
        self._is_closed = False
        self._sequence = 0
        self._current_sequence = 0
        self._requests_under_way = 0
        self._silent_peers: set[int] = set()  # whose goodbye was their last message
        self._pid = os.getpid()
        self._agreement = Agreement(mpi, comm)
        self._progress = Progress(self._rank, self._translate, self._listen, self._announce)
        free_left_groups()
        close_at_exit(self)

    @property
    def rank(self) -> int:
        return self._rank

    @property
    def world_size(self) -> int:
        return self._world_size

    @property
    def timeout(self) -> float:
        return self._timeout

    @timeout.setter
    def timeout(self, seconds: float) -> None:
        self._timeout = arguments.check_timeout(seconds)

    @property
    def is_closed(self) -> bool:
        return self._is_closed

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
        source = self._source("allreduce", x)
        target = self._target("allreduce", x, source, out, source.view.count)
        reduction = self._reduction("allreduce", source, op)
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
        self._check_root("reduce", root)
        source = self._source("reduce", x)
        reduction = self._reduction("reduce", source, op)
        fingerprint = _fingerprint("reduce", source.view, op=op, root=root, tag=tag)
        is_root = self._rank == root
        target = (
            self._target("reduce", x, source, out, source.view.count)
            if is_root
            else Target.scratch(source)
        )

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
        source = self._source("reduce_scatter", x)
        chunk = self._chunk("reduce_scatter", "x", source.view.count)
        made = None if out is not None else allocate_chunk(x, self._world_size)
        own = self._rank * chunk * source.view.itemsize
        target = self._target("reduce_scatter", x, source, out, chunk, made, in_place=own)
        reduction = self._reduction("reduce_scatter", source, op)
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
        total = target.numbers
        if reduction.is_direct(total.dtype):
            if not is_same_memory(source.view, target.view):
                total[:] = source.numbers
        else:
            total = source.numbers.astype(reduction.working_dtype)
        for piece in pieces(total):
            yield from self._complete(start(piece))
        if target.is_wanted:
            reduction.finish(total, self._world_size)
            if total is not target.numbers:
                target.numbers[:] = total

    def _reduce_and_scatter(
        self, source: Source, target: Target, chunk: int, reduction: Reduction
    ) -> Iterator[None]:
        if self._world_size == 1:
            target.numbers[:] = source.numbers
            return
        chunks = source.numbers.astype(reduction.working_dtype, copy=False)
        chunks = chunks.reshape(self._world_size, chunk)
        is_direct = reduction.is_direct(target.numbers.dtype)
        if is_direct and overlap(source.view, target.view):
            chunks = chunks.copy()
        total = target.numbers if is_direct else np.empty(chunk, reduction.working_dtype)
        length = piece_length(self._world_size)
        for first in range(0, chunk, length):
            parts = np.ascontiguousarray(chunks[:, first : first + length])
            piece = total[first : first + length]
            request = self._comm.Ireduce_scatter_block(
                [parts, piece.size, reduction.mpi_type],
                [piece, piece.size, reduction.mpi_type],
                reduction.mpi_op,
            )
            yield from self._complete(request)
        reduction.finish(total, self._world_size)
        if not is_direct:
            target.numbers[:] = total

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
        self._check_root("broadcast", root)
        source = self._source("broadcast", x)
        target = self._target("broadcast", x, source, out, source.view.count)
        fingerprint = _fingerprint("broadcast", source.view, root=root, tag=tag)

        def move() -> Steps:
            if self._rank == root and not is_same_memory(source.view, target.view):
                target.octets[:] = source.octets
            if self._world_size > 1:
                for piece in pieces(target.octets):
                    message = [piece, piece.size, self._mpi.BYTE]
                    yield from self._complete(self._comm.Ibcast(message, root))
            return target.result()

        return self._collective(fingerprint, move, async_op, timeout)

    def all_gather(
        self, x: Array, out: Array | None, async_op: bool, timeout: float | None, tag: int
    ) -> Array | Work:
        source = self._source("all_gather", x)
        target = self._gathering_target("all_gather", x, source, out)
        fingerprint = _fingerprint("all_gather", source.view, tag=tag)

        def move() -> Steps:
            octets = source.apart_from(target)
            with block_of(octets.size) as block:
                send, receive = [octets, *block], [target.octets, *block]
                yield from self._complete(self._comm.Iallgather(send, receive))
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
        self._check_root("gather", root)
        source = self._source("gather", x)
        is_root = self._rank == root
        target = self._gathering_target("gather", x, source, out) if is_root else None
        fingerprint = _fingerprint("gather", source.view, root=root, tag=tag)

        def move() -> Steps:
            octets = source.octets if target is None else source.apart_from(target)
            with block_of(octets.size) as block:
                receive = None if target is None else [target.octets, *block]
                yield from self._complete(self._comm.Igather([octets, *block], receive, root))
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
        self._check_root("scatter", root)
        source, target = self._scatter_operands(x, out, root)
        fingerprint = _fingerprint("scatter", target.view, root=root, tag=tag)

        def move() -> Steps:
            with block_of(target.view.nbytes) as block:
                send = None if source is None else [source.apart_from(target), *block]
                yield from self._complete(self._comm.Iscatter(send, [target.octets, *block], root))
            return target.result()

        return self._collective(fingerprint, move, async_op, timeout)

    def _scatter_operands(
        self, x: Array | None, out: Array | None, root: int
    ) -> tuple[Source | None, Target]:
        if self._rank != root:
            if out is None:
                why = "only the root knows the shape of a chunk"
                arguments.raise_missing_array("scatter", "out", why, rank=self._rank)
            return None, Target(out, self._output_view("scatter", out), None)
        if x is None:
            why = f"rank {root} is the root, whose array is scattered"
            arguments.raise_missing_array("scatter", "x", why, rank=self._rank)
        source = self._source("scatter", x)
        chunk = self._chunk("scatter", "x", source.view.count)
        made = None if out is not None else allocate_chunk(x, self._world_size)
        own = self._rank * chunk * source.view.itemsize
        return source, self._target("scatter", x, source, out, chunk, made, in_place=own)

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
        source = self._source("all_to_all", x)
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
        self._chunk("all_to_all", "x", source.view.count)
        target = self._target("all_to_all", x, source, out, source.view.count)
        fingerprint = _fingerprint("all_to_all", source.view, tag=tag)

        def move() -> Steps:
            octets = source.apart_from(target)
            with block_of(octets.size // self._world_size) as block:
                send, receive = [octets, *block], [target.octets, *block]
                yield from self._complete(self._comm.Ialltoall(send, receive))
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
        made = None if out is not None else allocate_rows(x, source.view.count, count)
        target = self._target("all_to_all", x, source, out, count, made, in_place=None)
        fingerprint = Fingerprint.of_uneven(source.view.dtype, arguments.check_tag(tag))
        itemsize = source.view.itemsize

        def move() -> Steps:
            yield from self._agreement.reach_on_counts(counts, self._current_sequence)
            with (
                chunks_of(counts.send, itemsize) as sent,
                chunks_of(counts.recv, itemsize) as expected,
            ):
                send, receive = [source.octets, *sent], [target.octets, *expected]
                yield from self._complete(self._comm.Ialltoallw(send, receive))
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
        message = self._message("send", x, dst, timeout, tag)
        sent: Work | None = self._finish(self._post(message), async_op)
        return sent

    def recv(
        self, out: Array, src: int, async_op: bool, timeout: float | None, tag: int
    ) -> Array | Work:
        return self._finish(self._post(self._message("recv", out, src, timeout, tag)), async_op)

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
        sent = self._message("send", x, dst, timeout, tag)
        received = self._message("recv", out, src, timeout, tag)
        if overlap(as_view(x), as_view(out)):
            arguments.raise_overlap("sendrecv", rank=self._rank)
        return self._finish_all("sendrecv", [sent, received], out, async_op)

    def batch(
        self, ops: Sequence[P2POp], async_op: bool, timeout: float | None, tag: int
    ) -> Work | None:
        messages = [
            self._message("send" if op.is_send else "recv", op.array, op.peer, timeout, tag)
            for op in ops
        ]
        self._limit(timeout)
        done: Work | None = self._finish_all("batch", messages, None, async_op)
        return done

    def _finish_all(self, op: str, messages: list[_Message], result: Any, async_op: bool) -> Any:
        self._check_open(op)
        work = BatchWork([self._post(message) for message in messages], result)
        if async_op:
            return work
        with self._poisoned_by_interrupt(op):
            return work.result()

    def _message(
        self, op: str, array: Array, peer: int, timeout: float | None, tag: int
    ) -> _Message:
        arguments.check_peer(op, peer, rank=self._rank, world_size=self._world_size)
        if op == "send":
            source = self._source(op, array)
            steps = self._send_steps(source, peer, _message_tag(source.view, tag))
        else:
            target = Target(array, self._output_view(op, array), None)
            steps = self._recv_steps(target, peer, _message_tag(target.view, tag))
        limit = self._limit(timeout)
        return _Message((op, peer), Call(op, steps, lambda: [peer], limit))

    def _send_steps(self, source: Source, peer: int, mpi_tag: int) -> Steps:
        if self._agreement.has_left(peer):
            raise left_error("send", self._rank, peer)
        with block_of(source.view.nbytes) as block:
            yield from self._complete(self._messages.Isend([source.octets, *block], peer, mpi_tag))

    def _recv_steps(self, target: Target, peer: int, mpi_tag: int) -> Steps:
        status = self._mpi.Status()
        message = None
        while message is None:
            if peer in self._silent_peers:
                raise left_error("recv", self._rank, peer)
            # Any tag: the next message of this peer is the one that was meant.
            message = self._messages.Improbe(peer, self._mpi.ANY_TAG, status)
            if message is None:
                yield
        nbytes, sent_tag = status.Get_elements(self._mpi.BYTE), status.Get_tag()
        fits = nbytes == target.view.nbytes and sent_tag == mpi_tag
        octets = target.octets if fits else np.empty(nbytes, np.uint8)
        with block_of(nbytes) as block:
            yield from self._complete(message.Irecv([octets, *block]))
        if sent_tag == GOODBYE_TAG:
            self._silent_peers.add(peer)
            raise left_error("recv", self._rank, peer)
        if not fits:
            raise self._message_mismatch(peer, target.view, nbytes, sent_tag, mpi_tag)
        return target.result()

    def _message_mismatch(
        self, peer: int, view: BufferView, nbytes: int, sent_tag: int, mpi_tag: int
    ) -> SizeMismatch:
        sent, expected = sent_tag >> _TAG_BITS, mpi_tag >> _TAG_BITS
        itemsize = numpy_dtype(sent).itemsize
        if (sent, nbytes) != (expected, view.nbytes):
            difference = (
                f"rank {peer} sent {nbytes // itemsize} {dtype_name(sent)}, "
                f"rank {self._rank} expected {view.count} {dtype_name(expected)}"
            )
        else:
            difference = f"ranks {peer} and {self._rank} gave different tags"
        return SizeMismatch(
            f"recv: {difference}. The message was dropped.",
            op="recv",
            rank=self._rank,
            peer=peer,
        )

    def _post(self, message: _Message) -> MpiWork:
        self._check_open(message.call.op)
        self._progress.submit(message.lane, message.call)
        return MpiWork(self._progress, message.lane, message.call)

    # The group

    def empty(self, shape: int | Sequence[int], dtype: Any) -> Array:
        self._check_open("empty")
        resolved = numpy_dtype(dtype_code(dtype))
        dims = arguments.check_shape(shape)
        # On a cache line of its own, where vector instructions like it best.
        nbytes = math.prod(dims) * resolved.itemsize
        block = np.empty(nbytes + _ALIGNMENT, np.uint8)
        start = -block.ctypes.data % _ALIGNMENT
        return block[start : start + nbytes].view(resolved).reshape(dims)

    def split(self, members: Sequence[int], timeout: float | None = None) -> MpiBackend | None:
        chosen = arguments.check_members(members, rank=self._rank, world_size=self._world_size)

        def move() -> Steps:
            yield from ()

        self._collective(Fingerprint.of_members(chosen), move, False, timeout)
        # Everybody is here or about to be: this blocks for moments only.
        is_member = self._rank in chosen
        colour = 0 if is_member else self._mpi.UNDEFINED
        with self._lock_for_blocking():
            comm = self._comm.Split(colour, chosen.index(self._rank) if is_member else 0)
        if not is_member:
            return None
        group = MpiBackend.__new__(MpiBackend)
        (messages,) = duplicate(comm, self._limit(timeout), copies=1)
        group._join(self._mpi, comm, messages, self._timeout)
        return group

    def shrink(self, timeout: float | None = None) -> MpiBackend:
        raise UnsupportedOp(
            "shrink: MPI ends the whole job when a rank dies. Use HostBackend, whose groups "
            "go on without it.",
            op="shrink",
            rank=self._rank,
        )

    def close(self) -> None:
        if self._is_closed or os.getpid() != self._pid:
            return
        self._is_closed = True
        error = ChannelClosed("This rank has closed the group.", rank=self._rank)
        self._progress.poison(error, is_announced=True)
        if self._mpi.Is_finalized():
            return
        with mpi_lock:
            comms = [self._comm, self._messages]
            is_sound = self._requests_under_way == 0
            Farewell(self._mpi, self._agreement, comms, self._silent_peers, is_sound).begin()

    def _collective(
        self,
        fingerprint: Fingerprint,
        move: Callable[[], Steps],
        async_op: bool,
        timeout: float | None,
    ) -> Any:
        """Run `move` once all ranks have come with the same fingerprint."""
        self._check_open(fingerprint.op)
        sequence = self._sequence

        def steps() -> Steps:
            self._current_sequence = sequence
            yield from self._agreement.reach(fingerprint, sequence)
            return (yield from move())

        limit = self._limit(timeout)
        call = Call(fingerprint.op, steps(), self._agreement.awaited, limit, sequence)
        self._progress.submit(_COLLECTIVES, call)
        self._sequence += 1
        return self._finish(MpiWork(self._progress, _COLLECTIVES, call), async_op)

    def _complete(self, request: Any) -> Iterator[None]:
        """Wait for a request of MPI, which holds arrays until then."""
        self._requests_under_way += 1
        while not request.Test():
            yield
        self._requests_under_way -= 1

    def _finish(self, work: MpiWork, async_op: bool) -> Any:
        if async_op:
            return work
        with self._poisoned_by_interrupt(work.op):
            return work.result()

    @contextlib.contextmanager
    def _poisoned_by_interrupt(self, op: str) -> Iterator[None]:
        try:
            yield
        except (KeyboardInterrupt, SystemExit) as error:
            # The call goes on in MPI, but nobody would ever know its end.
            self._progress.poison(
                _Interrupted(
                    f"{op} was interrupted on rank {self._rank} by {type(error).__name__}.",
                    op=op,
                    rank=self._rank,
                    peer=self._rank,
                )
            )
            raise

    def _check_open(self, op: str) -> None:
        if self._is_closed:
            raise ChannelClosed(
                f"{op}: rank {self._rank} has closed this group.", op=op, rank=self._rank
            )

    def _limit(self, timeout: float | None) -> float:
        if timeout is None:
            return self._timeout
        return arguments.check_timeout(timeout)

    def _translate(self, call: Call, error: BaseException) -> DistributedError:
        """Put into our words what ended a call."""
        failed = f"{call.label} failed on rank {self._rank}"
        kind, reason = DistributedError, f"{type(error).__name__}: {error}"
        if isinstance(error, self._mpi.Exception):
            lost = {getattr(self._mpi, name, None) for name in ("ERR_PROC_FAILED", "ERR_REVOKED")}
            kind = PeerLostError if error.Get_error_class() in lost else Io
            reason = f"MPI says: {error.Get_error_string()}"
        return kind(f"{failed}: {reason}.", op=call.op, rank=self._rank, sequence=call.sequence)

    def _listen(self) -> None:
        """Hear what peers tell, and end the group if it failed on one of them."""
        self._agreement.listen()
        failure = self._agreement.failure
        if failure is not None and self._progress.first_error is None:
            self._progress.poison(self._reported(failure), is_announced=True)

    def _reported(self, failure: Failure) -> DistributedError:
        """Make the error of a group that failed on another rank."""
        call = self._progress.first_call()
        op, sequence = (None, None) if call is None else (call.op, call.sequence)
        where = "The group failed" if call is None else f"{call.label} failed"
        culprit = None if failure.culprit < 0 else failure.culprit
        reason = f"{where} on rank {self._rank}: {failure}."
        if failure.kind == "timeout":
            missing = () if culprit is None else (culprit,)
            return Timeout(
                reason, missing=missing, op=op, rank=self._rank, peer=culprit, sequence=sequence
            )
        peer = culprit if failure.kind == "left" else failure.reporter
        return ChannelClosed(reason, op=op, rank=self._rank, peer=peer, sequence=sequence)

    def _announce(self, error: BaseException) -> None:
        """Tell the peers why the group ended here."""
        kinds = {Timeout: "timeout", ChannelClosed: "left", _Interrupted: "interrupted"}
        culprit = getattr(error, "peer", None)
        self._agreement.say_failure(
            kinds.get(type(error), "error"), -1 if culprit is None else culprit
        )

    @contextlib.contextmanager
    def _lock_for_blocking(self) -> Iterator[None]:
        """Keep other threads out of MPI for a call that blocks, where MPI demands that."""
        if self._mpi.Query_thread() == self._mpi.THREAD_MULTIPLE:
            yield
            return
        with mpi_lock:
            yield

    # Arguments

    def _check_root(self, op: str, root: int) -> None:
        arguments.check_root(op, root, rank=self._rank, world_size=self._world_size)

    def _chunk(self, op: str, name: str, count: int) -> int:
        return arguments.per_rank_count(
            op, name, count, rank=self._rank, world_size=self._world_size
        )

    def _source(self, op: str, x: Array) -> Source:
        view = as_view(x)
        self._check_device(op, view)
        return Source(view if view.is_contiguous else as_view(contiguous(x)))

    def _output_view(self, op: str, out: Array) -> BufferView:
        view = as_output(out)
        self._check_device(op, view)
        return view

    def _target(
        self,
        op: str,
        x: Array,
        source: Source,
        out: Array | None,
        count: int,
        made: Array | None = None,
        *,
        in_place: int | None = 0,
    ) -> Target:
        """Check `out`, or take what was made (by default: like `x`) for the result.

        `in_place` is how many bytes past the start of `x` an `out` that shares its memory
        begins; None if it may not.
        """
        if out is None:
            made = allocate(x) if made is None else made
            return Target(made, as_output(made), x)
        view = self._output_view(op, out)
        dtypes = dtype_name(source.view.dtype), dtype_name(view.dtype)
        arguments.check_out_dtype(op, *dtypes, rank=self._rank)
        arguments.check_size(op, "out", view.count, count, rank=self._rank)
        is_in_place = in_place is not None and view.address == source.view.address + in_place
        if not is_in_place and overlap(source.view, view):
            arguments.raise_overlap(op, rank=self._rank)
        return Target(out, view, None)

    def _gathering_target(self, op: str, x: Array, source: Source, out: Array | None) -> Target:
        count = source.view.count * self._world_size
        made = None if out is not None else allocate_gathered(x, self._world_size)
        own = -self._rank * source.view.nbytes
        return self._target(op, x, source, out, count, made, in_place=own)

    def _reduction(self, op: str, source: Source, reduce_op: ReduceOp) -> Reduction:
        name = dtype_name(source.view.dtype)
        arguments.check_reduction(op, name, reduce_op, rank=self._rank)
        return reduction_of(self._mpi, name, reduce_op)

    def _check_device(self, op: str, view: BufferView) -> None:
        if view.device_type != _CPU:
            raise UnsupportedOp(
                f"{op}: the mpi backend moves arrays in host memory, and this one is on "
                f"GPU {view.device_id}. Copy it to the host first.",
                op=op,
                rank=self._rank,
            )


class _Interrupted(ChannelClosed):
    """A call of this rank was ended by Ctrl-C."""


class _Message(NamedTuple):
    """A send or receive that has been checked and not yet posted."""

    lane: tuple[str, int]
    call: Call


def _fingerprint(
    name: str, view: BufferView, *, op: ReduceOp | None = None, root: int = -1, tag: int = 0
) -> Fingerprint:
    reduce_op = -1 if op is None else int(op)
    return Fingerprint(name, reduce_op, view.dtype, root, view.count, arguments.check_tag(tag))


def _message_tag(view: BufferView, tag: int) -> int:
    mixed = arguments.check_tag(tag) * _TAG_MULTIPLIER % (1 << 32) >> (32 - _TAG_BITS)
    return view.dtype << _TAG_BITS | mixed
