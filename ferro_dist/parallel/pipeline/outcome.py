"""How a step ends: every rank learns the loss, or what went wrong and where.

All ranks exchange one small row each: whether they failed, and their part of the loss. If one has
failed, it tells all what happened: so an exception on one rank is raised on all, and the group
stays as usable as before. The replicas of a rank are each in another pipeline, so after a second
exchange, among them, whatever happened anywhere is known everywhere. Only one thing is not: that
some replicas' group has ended in this exchange. So the ranks of a pipeline tell each other in a
third. `StepRun.abandon` in `executor.py` tells how ranks that wait for the one that failed get
here.
"""

from __future__ import annotations

import dataclasses
import json
import struct
import traceback
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import numpy as np

from ferro_dist.collective import all_gather, broadcast
from ferro_dist.errors import (
    ChannelClosed,
    CollectiveMismatch,
    DistributedError,
    InvalidArray,
    Io,
    LockPoisoned,
    PeerLostError,
    Timeout,
    UnsupportedOp,
)
from ferro_dist.parallel.interruption import interrupt
from ferro_dist.parallel.pipeline.activation_channel import PeerAborted

if TYPE_CHECKING:
    from ferro_dist.backends.base import Backend

__all__ = [
    "BadArgument",
    "FailureReport",
    "StageFailed",
    "among_replicas",
    "run_on_all",
    "share_outcome",
]

ResultT = TypeVar("ResultT")

_ROW = struct.Struct("<dI??")
"""Part of the loss, length of the report, whether its kind is "end", whether a group has ended."""
_ENDS = (PeerLostError, ChannelClosed, Timeout, Io, LockPoisoned)
"""Errors that end a group, and are not caused by a stage."""
_ARGUMENT_ERRORS: dict[str, type[Exception]] = {
    kind.__name__: kind
    for kind in (
        ValueError,
        TypeError,
        IndexError,
        RuntimeError,
        CollectiveMismatch,
        InvalidArray,
        UnsupportedOp,
    )
}


class StageFailed(DistributedError):
    """A stage raised an exception. All ranks of the pipeline raise this; the group stays usable.

    If a group has ended nevertheless, as that of a replica, the message says so.
    Gradients of the step are incomplete: zero them before the next one.

    Attributes
    ----------
    peer : int
        The rank whose stage it was; there, the ``__cause__`` is the original exception.
    replica : int or None
        In which of several parallel pipelines it happened, if there are several.
    stage, microbatch : int or None
        What was being computed.
    traceback_text : str
        The traceback, as that rank would have printed it.
    """

    def __init__(
        self,
        message: str,
        *,
        rank: int | None = None,
        peer: int | None = None,
        replica: int | None = None,
        stage: int | None = None,
        microbatch: int | None = None,
        traceback_text: str = "",
    ) -> None:
        super().__init__(message, op="Pipeline", rank=rank, peer=peer)
        self.replica = replica
        self.stage = stage
        self.microbatch = microbatch
        self.traceback_text = traceback_text


class BadArgument(Exception):
    """Wraps a mistake of the caller's, which all ranks raise as it is."""


@dataclasses.dataclass(frozen=True)
class FailureReport:
    """What one rank tells the others of an exception."""

    kind: str
    """``"stage"``, ``"argument"``, or ``"end"``: that of a group in which others are."""
    error: str
    message: str
    traceback_text: str
    rank: int
    replica: int | None = None
    stage: int | None = None
    microbatch: int | None = None
    has_group_ended: bool = False
    """Whether the group of a pipeline, or of replicas, has ended."""

    @classmethod
    def of(
        cls,
        error: BaseException,
        rank: int,
        replica: int | None,
        where: tuple[int, int] | None,
    ) -> FailureReport:
        kind = "stage"
        if isinstance(error, BadArgument):
            kind, error = "argument", error.__cause__ or error
        elif (end := _end_behind(error)) is not None:
            kind, error = "end", _why_ended(end)
        text = _traceback_of(error)
        stage, microbatch = where if where is not None else (None, None)
        name = type(error).__name__
        return cls(kind, name, _words(error), text, rank, replica, stage, microbatch)

    def to_error(self, rank: int) -> Exception:
        """Return what a rank raises to which this has been reported."""
        if self.kind == "argument":
            return self._to_argument_error(rank)
        who = f"rank {self.rank}" + ("" if self.replica is None else f" of replica {self.replica}")
        if self.kind == "end":
            # No peer: the rank at fault has that number in the other group.
            ends = {kind.__name__: kind for kind in _ENDS}
            return ends.get(self.error, ChannelClosed)(
                f"Pipeline: another group of {who} has ended: "
                + self.message.removeprefix("Pipeline: "),
                op="Pipeline",
                rank=rank,
            )
        where = "" if self.stage is None else f" in stage {self.stage}"
        which = "" if self.microbatch is None else f", microbatch {self.microbatch},"
        what = f": {self.message}" if self.message else ""
        state = "The group is still usable"
        if self.has_group_ended:
            state = "A group has ended, too: make new groups for all replicas"
        return StageFailed(
            f"Pipeline: {self.error}{where}{which} on {who}{what}\n"
            # The launcher knows it by the end of this line.
            f"{state}; zero the gradients before the next step.\n\n"
            f"{self.traceback_text}",
            rank=rank,
            peer=self.rank,
            replica=self.replica,
            stage=self.stage,
            microbatch=self.microbatch,
            traceback_text=self.traceback_text,
        )

    def _to_argument_error(self, rank: int) -> Exception:
        error = _ARGUMENT_ERRORS.get(self.error, ValueError)(self.message)
        if isinstance(error, DistributedError):
            error.op, error.rank = "Pipeline", rank
        return error


class among_replicas:  # noqa: N801 - reads as contextlib's do
    """Around what replicas do together: end their group if they make different calls.

    A mismatch leaves it usable, but from then on a rank would meet the others in other calls than
    its own: an evaluation in a step.
    """

    __slots__ = ("_replicas",)

    def __init__(self, replicas: Backend | None) -> None:
        self._replicas = replicas

    def __enter__(self) -> None:
        return

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, CollectiveMismatch):
            interrupt(self._replicas, error)
            raise ChannelClosed(
                "Pipeline: the replicas make different calls. All ranks of all of them must make "
                "the same calls in the same order, eval() among these",
                op="Pipeline",
                rank=error.rank,
                global_ranks=error.global_ranks,
            ) from error


def run_on_all(part: Callable[[], ResultT], backend: Backend, replicas: Backend | None) -> ResultT:
    """Run a part that all ranks run, and raise on all of them what it raises on any.

    Parameters
    ----------
    part : callable
        If it calls collectives, it raises alike on all ranks that take part in them.
    backend : Backend
    replicas : Backend, optional

    Returns
    -------
    what `part` returns

    Raises
    ------
    ValueError, TypeError
        As `part` has raised it on the lowest of the ranks.
    StageFailed
        It has raised something else on some rank.
    DistributedError
        The pipeline's group has ended, or that of the replicas. The others have been told.
    BaseException
        `part` has raised what is no Exception, such as KeyboardInterrupt, on this rank. Both groups
        have ended.
    """
    try:
        return _run_and_share(part, backend, replicas)
    except Exception:
        raise
    except BaseException as error:
        # Ctrl-C strikes on this rank alone: the others may be inside a collective of `part`, or in
        # the exchange after it.
        for group in (backend, replicas):
            interrupt(group, error)
        raise


def _run_and_share(
    part: Callable[[], ResultT], backend: Backend, replicas: Backend | None
) -> ResultT:
    results: list[ResultT] = []
    failure: BaseException | None = None
    try:
        results.append(part())
    except (TypeError, ValueError) as error:
        failure = BadArgument()
        failure.__cause__ = error
    except Exception as error:
        failure = error
    share_outcome(backend, replicas, failure)
    (result,) = results
    return result


def share_outcome(
    backend: Backend,
    replicas: Backend | None,
    failure: BaseException | None,
    where: tuple[int, int] | None = None,
    loss: float = 0.0,
    is_averaged: bool = True,
) -> float:
    """Bring the loss, or a failure, to all ranks of a pipeline and then of its replicas.

    Parameters
    ----------
    backend : Backend
    replicas : Backend, optional
    failure : BaseException, optional
        What this rank has raised; `PeerAborted` if another rank is the cause.
    where : tuple of int, optional
        Stage and microbatch that were being computed.
    loss : float
        This rank's part of the pipeline's loss.
    is_averaged : bool
        Whether losses of replicas are averaged, not summed.

    Returns
    -------
    float
        The loss.

    Raises
    ------
    ValueError, TypeError, RuntimeError, StageFailed, PeerLostError
        What a rank has reported: the lowest one, in the first replica with a report.
    DistributedError
        The pipeline's group has ended, or that of the replicas. The others have been told.
    """
    replica = None if replicas is None else replicas.rank
    report = None
    if failure is not None and not isinstance(failure, PeerAborted):
        report = FailureReport.of(failure, backend.rank, replica, where)
    end: DistributedError | None = None
    try:
        report, losses = _exchange(backend, report, loss)
        loss = float(losses.sum())
    except DistributedError as error:
        end = error
        reason = _end_of_group(failure, error)
        report = _with_end(FailureReport.of(reason, backend.rank, replica, where))
    if replicas is not None:
        is_reachable = end is None
        try:
            with among_replicas(replicas):
                report, losses = _exchange(replicas, report, loss)
            loss = float(losses.mean() if is_averaged else losses.sum())
        except DistributedError as error:
            end = end or error
            report = _with_end(report or FailureReport.of(error, backend.rank, replica, None))
        if is_reachable:
            try:
                report, _ = _exchange(backend, report, loss)
            except DistributedError as error:
                end = end or error
    if end is not None:
        raise _end_of_group(failure, end) from None
    if report is not None:
        _raise_failure(failure, report, backend.rank)
    return loss


def _exchange(
    backend: Backend, report: FailureReport | None, loss: float
) -> tuple[FailureReport | None, np.ndarray[Any, Any]]:
    """Tell all ranks how the step went on this one.

    Parameters
    ----------
    backend : Backend
    report : FailureReport, optional
        The failure on this rank.
    loss : float

    Returns
    -------
    report of the lowest rank that has one or None, losses by rank
        A report that a group has ended counts only if there is no other; any other says so, too.
    """
    told = b"" if report is None else json.dumps(dataclasses.asdict(report)).encode()
    is_end = report is not None and report.kind == "end"
    has_ended = report is not None and report.has_group_ended
    row = np.frombuffer(_ROW.pack(loss, len(told), is_end, has_ended), np.uint8)
    rows = all_gather(row, backend).reshape(backend.world_size, _ROW.size)
    outcomes = [_ROW.unpack(other.tobytes()) for other in rows]
    losses = np.array([outcome[0] for outcome in outcomes])
    reporting = [rank for rank, outcome in enumerate(outcomes) if outcome[1]]
    if not reporting:
        return None, losses
    # The end of a group may be the consequence of another rank's exception.
    root = min(reporting, key=lambda rank: (outcomes[rank][2], rank))
    text = np.empty(outcomes[root][1], np.uint8)
    if root == backend.rank:
        text = np.frombuffer(told, np.uint8)
    text = broadcast(text, backend, root)
    report = FailureReport(**json.loads(text.tobytes()))
    return (_with_end(report) if any(outcome[3] for outcome in outcomes) else report), losses


def _with_end(report: FailureReport) -> FailureReport:
    return dataclasses.replace(report, has_group_ended=True)


def _raise_failure(failure: BaseException | None, told: FailureReport, rank: int) -> NoReturn:
    """Raise the same on all ranks; on the one that failed, with its exception as the cause."""
    if failure is not None and not isinstance(failure, Exception):
        raise failure  # Ctrl-C stays with whoever pressed it
    own = failure.__cause__ if isinstance(failure, BadArgument) else failure
    if told.kind == "argument" and own is not None and _words(own) == told.message:
        raise own
    raise told.to_error(rank) from (None if isinstance(own, PeerAborted) else own)


def _end_of_group(failure: BaseException | None, error: DistributedError) -> BaseException:
    """Return the first of the errors that tell why the group has ended."""
    if isinstance(failure, BadArgument):
        failure = failure.__cause__
    if isinstance(failure, DistributedError):
        return _why_ended(failure)
    if failure is None or isinstance(failure, PeerAborted) or _end_behind(failure) is not None:
        return _why_ended(error)
    return failure


def _end_behind(
    error: BaseException | None, seen: frozenset[int] = frozenset()
) -> DistributedError | None:
    """Return the end of a group that an exception is, contains alone, or was raised from."""
    # `raise error from error` makes a ring of causes.
    while error is not None and id(error) not in seen:
        if isinstance(error, _ENDS):
            return error
        seen |= {id(error)}
        ends = [_end_behind(part, seen) for part in _parts_of(error)]
        if ends and None not in ends:
            return ends[0]
        error = error.__cause__
    return None


def _parts_of(error: BaseException) -> Sequence[BaseException]:
    """Return what is in an ExceptionGroup, which Python has from 3.11 on; others have no parts."""
    parts = getattr(error, "exceptions", ())
    is_group = isinstance(parts, (list, tuple)) and all(isinstance(e, BaseException) for e in parts)
    return parts if is_group else ()


def _why_ended(error: DistributedError) -> DistributedError:
    """Return the same on all ranks, whether they heard of it in this call or in one before."""
    if isinstance(error, LockPoisoned) and isinstance(error.__cause__, DistributedError):
        return error.__cause__
    return error


def _words(error: BaseException) -> str:
    """Return an exception's message; one that has none must not keep others waiting."""
    try:
        return str(error)
    except Exception as another:
        return f"its message cannot be shown ({type(another).__name__} in its __str__)"


def _traceback_of(error: BaseException) -> str:
    """Return an exception's traceback, also of one that Python cannot show, as above."""
    try:
        return "".join(traceback.format_exception(type(error), error, error.__traceback__))
    except Exception as another:
        return "".join(traceback.format_tb(error.__traceback__)) + (
            f"(the exception itself cannot be shown: {type(another).__name__})\n"
        )
