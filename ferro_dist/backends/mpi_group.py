"""A group of MPI ranks: how its calls run one after another, and how it ends."""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from ferro_dist import arguments
from ferro_dist.backends.base import Array, Backend
from ferro_dist.backends.mpi_agreement import Agreement, Failure, Fingerprint
from ferro_dist.backends.mpi_assembly import count_cores_per_rank, duplicate
from ferro_dist.backends.mpi_farewell import Farewell, close_at_exit, free_left_groups
from ferro_dist.backends.mpi_messages import Messages
from ferro_dist.backends.mpi_operands import Operands
from ferro_dist.backends.mpi_progress import Call, MpiWork, Progress, Requests, Steps, mpi_lock
from ferro_dist.deadline import Deadline
from ferro_dist.errors import (
    ChannelClosed,
    DistributedError,
    Io,
    PeerLostError,
    Timeout,
    UnsupportedOp,
)
from ferro_dist.interop import aligned_empty, dtype_code, numpy_dtype
from ferro_dist.work import Work

if TYPE_CHECKING:
    from typing_extensions import Self  # in typing from Python 3.11

__all__ = ["MpiGroup"]

_COLLECTIVES = "collectives"


class MpiGroup(Backend):
    """One rank's side of a group, without the operations: see `MpiBackend`."""

    _is_closed = True  # until `_init_from` is through: there is nothing to leave before

    def _init_from(self, op: str, mpi: Any, comm: Any, deadline: Deadline, timeout: float) -> None:
        """Make this the group of `comm`, which it owns, in place of __init__; all ranks call it."""
        messages = duplicate(op, comm, deadline)
        self._cores_per_rank = count_cores_per_rank(op, comm, deadline)
        for owned in (comm, messages):
            owned.Set_errhandler(mpi.ERRORS_RETURN)
        self._mpi = mpi
        self._comm = comm
        self._message_comm = messages  # sends and receives, apart from the fingerprints
        self._rank: int = comm.rank
        self._world_size: int = comm.size
        self._timeout = timeout
        self._sequence = 0
        self._message_numbers = itertools.count()  # which several threads may draw at once
        self._pid = os.getpid()
        self._requests = Requests()
        self._agreement = Agreement(mpi, comm, self._requests)
        self._messages = Messages(mpi, messages, self._agreement, self._requests)
        self._operands = Operands(mpi, self._rank, self._world_size)
        own_errors = (DistributedError, MemoryError, mpi.Exception)
        self._progress = Progress(
            self._rank, own_errors, self._translate, self._listen, self._announce
        )
        self._is_closed = False
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

    @property
    def cores_per_rank(self) -> float:
        return self._cores_per_rank

    def empty(self, shape: int | Sequence[int], dtype: Any) -> Array:
        self._check_open("empty")
        resolved = numpy_dtype(dtype_code(dtype))
        return aligned_empty(arguments.check_shape(shape), resolved)

    def split(self, members: Sequence[int], timeout: float | None = None) -> Self | None:
        def move() -> Steps:
            yield from ()

        with self._splitting():
            chosen = arguments.check_members(members, rank=self._rank, world_size=self._world_size)
            deadline = Deadline(self._seconds(timeout))
            self._collective(Fingerprint.of_members(chosen), move, False, timeout)
        # MPI has no split that could be given up. All ranks are here or about to be, and one that
        # dies takes the job along: only a rank that is stopped now holds up the others.
        is_member = self._rank in chosen
        colour = 0 if is_member else self._mpi.UNDEFINED
        with self._lock_for_blocking():
            comm = self._comm.Split(colour, chosen.index(self._rank) if is_member else 0)
        if not is_member:
            return None
        group = type(self).__new__(type(self))
        group._init_from("split", self._mpi, comm, deadline, self._timeout)
        return group._set_global_ranks(self, chosen)

    def _set_global_ranks(self, parent: Backend, members: Sequence[int]) -> Self:
        super()._set_global_ranks(parent, members)
        self._progress.global_ranks = self._global_ranks
        return self

    def shrink(self, timeout: float | None = None) -> Self:
        raise UnsupportedOp(
            "shrink: MPI ends the whole job when a rank dies. Use HostBackend, whose groups "
            "go on without it.",
            op="shrink",
            rank=self._rank,
        )

    def close(self) -> None:
        if self._leave():
            free_left_groups()

    def __del__(self) -> None:
        # MPI writes into the memory of the receives until they are over, and the peers of a rank
        # that just vanished would wait for it.
        self._leave()

    def _leave(self) -> bool:
        """Say goodbye; whether there was anything to leave."""
        if self._is_closed or os.getpid() != self._pid:
            return False
        self._is_closed = True
        with mpi_lock:
            is_finalized = self._mpi.Is_finalized()
            if not is_finalized:
                self._progress.advance()  # what has come already is no reason to end the group
            is_idle = self._progress.first_call() is None
            self._progress.poison(arguments.closed_error(rank=self._rank), is_announced=True)
            if is_finalized:
                return False
            # A goodbye ends only calls that have yet to hear from this rank. In those that it has
            # begun with the others, and drives no further, they would wait in vain.
            if not is_idle:
                self._agreement.say_failure("left", self._rank)
            comms = [self._comm, self._message_comm]
            is_sound = self._requests.num_under_way == 0
            departed = self._messages.departed
            Farewell(self._mpi, self._agreement, comms, departed, is_sound).begin()
        return True

    def interrupt(self, error: BaseException) -> None:
        if not self._is_closed and os.getpid() == self._pid:
            self._progress.poison(self._interruption(None, error))

    def _interruption(self, op: str | None, error: BaseException) -> _Interrupted:
        what = f"{op or 'The group'} was interrupted on rank {self._rank}"
        return _Interrupted(
            f"{what} by {type(error).__name__}.", op=op, rank=self._rank, peer=self._rank
        )

    def _collective(
        self,
        fingerprint: Fingerprint,
        move: Callable[[], Steps],
        async_op: bool,
        timeout: float | None,
    ) -> Any:
        """Run `move` once all ranks have come with the same fingerprint."""
        sequence = self._sequence

        def steps(_call: Call) -> Steps:
            yield from self._agreement.reach(fingerprint, sequence)
            return (yield from move())

        limit = self._seconds(timeout)
        awaited = self._agreement.awaited
        call = Call(fingerprint.op, _COLLECTIVES, steps, awaited, limit, sequence)
        self._sequence += 1
        return self._run(fingerprint.op, [call], MpiWork(self._progress, call), async_op)

    def _exchange(self, op: str, calls: list[Call], work: Work, async_op: bool) -> Any:
        """Run the messages of one call, which is counted apart from collectives."""
        number = next(self._message_numbers)
        for call in calls:
            call.sequence = number
        return self._run(op, calls, work, async_op)

    def _run(self, op: str, calls: list[Call], work: Work, async_op: bool) -> Any:
        """Run the calls that `work` waits for; return that, or its result unless `async_op`."""
        self._check_open(op)
        self._progress.check_usable(op)
        try:
            self._progress.submit(calls)
            if async_op:
                return work
            for call in calls:
                call.start_clock()
            return work.result()
        except BaseException as error:
            if not (isinstance(error, DistributedError) and all(call.is_done for call in calls)):
                # Ctrl-C, or what another signal handler raises. The calls would go on in MPI and
                # write to their arrays, and nobody would ever learn of their end.
                self._progress.poison(self._interruption(op, error))
            raise

    def _check_open(self, op: str) -> None:
        if self._is_closed:
            raise arguments.closed_error(op, rank=self._rank)

    def _translate(self, call: Call, error: BaseException) -> DistributedError:
        """Translate what ended a call into an error of ferro_dist."""
        failed = f"{call.label} failed on rank {self._rank}"
        if isinstance(error, MemoryError):
            kind, reason = DistributedError, f"{type(error).__name__}: {error}"
        elif isinstance(error, self._mpi.Exception):
            lost = {getattr(self._mpi, name, None) for name in ("ERR_PROC_FAILED", "ERR_REVOKED")}
            kind = PeerLostError if error.Get_error_class() in lost else Io
            reason = f"MPI says: {error.Get_error_string()}"
        else:
            return self._interruption(call.op, error)
        return kind(f"{failed}: {reason}.", op=call.op, rank=self._rank, sequence=call.sequence)

    def _listen(self) -> None:
        """Take in what peers report, and end the group if it failed on one of them."""
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

    def _announce(self, error: DistributedError) -> None:
        """Tell the peers why the group ended here."""
        kinds = {Timeout: "timeout", ChannelClosed: "left", _Interrupted: "interrupted"}
        culprit = -1 if error.peer is None else error.peer
        self._agreement.say_failure(kinds.get(type(error), "error"), culprit)

    @contextlib.contextmanager
    def _lock_for_blocking(self) -> Iterator[None]:
        """Keep other threads out of MPI during a blocking call, where MPI demands that."""
        if self._mpi.Query_thread() == self._mpi.THREAD_MULTIPLE:
            yield
            return
        with mpi_lock:
            yield


class _Interrupted(ChannelClosed):
    """A call of this rank was ended by Ctrl-C or another exception of a signal handler."""
