"""When each bucket of the last synchronized backward was ready, sent and reduced."""

from __future__ import annotations

from dataclasses import dataclass, field

__all__ = ["BucketTimes", "Statistics"]


@dataclass
class BucketTimes:
    """One bucket of one round. Times are `time.perf_counter`'s, in seconds.

    Attributes
    ----------
    nbytes : int
    names : tuple of str
        The parameters whose gradients it holds.
    ready_s : float
        Its last gradient was there, or backward had ended without some of them.
    start_s : float
        Its allreduce was started.
    end_s : float
        Its allreduce ended. One that ran during backward may have ended earlier, unnoticed, if it
        was of up to 64 KiB, or over MPI.
    exposed_s : float
        How long the rank did nothing but wait for it. On a GPU the host hardly waits: there all
        times are those at which work was queued.
    """

    nbytes: int
    names: tuple[str, ...]
    ready_s: float = 0.0
    start_s: float = 0.0
    end_s: float = 0.0
    exposed_s: float = 0.0


@dataclass
class Statistics:
    """One round of synchronization, as this rank saw it.

    Attributes
    ----------
    num_rounds : int
        Rounds so far, this one included.
    is_overlapped : bool
        Whether buckets were reduced while backward went on.
    begin_s, backward_end_s, end_s : float
        Backward began, backward had ended, everything was reduced and handed back.
    buckets : list of BucketTimes
        In the order in which they were reduced.
    """

    num_rounds: int = 0
    is_overlapped: bool = False
    begin_s: float = 0.0
    backward_end_s: float = 0.0
    end_s: float = 0.0
    buckets: list[BucketTimes] = field(default_factory=list)

    @property
    def nbytes(self) -> int:
        """Bytes that were reduced."""
        return sum(bucket.nbytes for bucket in self.buckets)

    @property
    def exposed_s(self) -> float:
        """How long the rank did nothing but wait for others or reduce with them."""
        return sum(bucket.exposed_s for bucket in self.buckets)
