"""The contract that every backend keeps, and that the contract suite in ``tests`` checks.

The functions of `ferro_dist.collective` and `ferro_dist.point_to_point` are the public face; they
call the methods here.
"""

from __future__ import annotations

import abc
import contextlib
from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, NoReturn

from ferro_dist.arguments import check_timeout, name_call
from ferro_dist.cores import count_own
from ferro_dist.errors import DistributedError
from ferro_dist.reduce_op import ReduceOp
from ferro_dist.work import Work

if TYPE_CHECKING:
    from typing_extensions import Self  # in typing from Python 3.11

__all__ = ["Array", "Backend", "P2POp"]

Array = Any
"""NumPy, torch, CuPy or JAX array, or anything with the buffer protocol."""


class P2POp:
    """One send or receive of a batch; see `ferro_dist.batch`.

    Parameters
    ----------
    op : {"send", "recv"}
    array : array
        What is sent, or what is received into, as for `ferro_dist.send` and `ferro_dist.recv`.
    peer : int
        Destination or source.

    Raises
    ------
    ValueError
        `op` is something else. Array and peer are checked by `batch`.
    """

    __slots__ = {
        "array": "What is sent, or what is received into.",
        "is_send": 'Whether `op` was ``"send"``.',
        "peer": "Destination or source.",
    }

    def __init__(self, op: Literal["send", "recv"], array: Array, peer: int) -> None:
        if not isinstance(op, str) or op not in ("send", "recv"):
            raise ValueError(f"P2POp: op must be 'send' or 'recv', not {op!r}.")
        self.is_send = op == "send"
        self.array = array
        self.peer = peer

    def __repr__(self) -> str:
        return f"P2POp({'send' if self.is_send else 'recv'!r}, {self.array!r}, {self.peer!r})"


class Backend(abc.ABC):
    """A group of ranks and the means to move arrays between them.

    All ranks call the methods in the same order, except `close`, which concerns one rank, and the
    point-to-point ones, which concern two. Programs call the functions of the same name in
    `ferro_dist`, which have defaults, and document shapes, dtypes and errors: the methods take all
    arguments, by position.

    In each collective, `out` None allocates the result with the library, dtype and device of `x`;
    `async_op` returns a `Work` at once; `timeout` is in seconds, None for the backend's own; `tag`
    is an int from 0 to 2**32 - 1, the same on all ranks.
    """

    name: str
    """``"host"``, ``"tcp"``, ``"simulated"``, ``"mpi"``, ``"nccl"`` or ``"hybrid"``."""

    _global_ranks: tuple[int, ...] = ()  # none if they are range(world_size)

    @property
    @abc.abstractmethod
    def rank(self) -> int:
        """This rank's number in the group."""

    @property
    @abc.abstractmethod
    def world_size(self) -> int:
        """How many ranks the group has."""

    @property
    @abc.abstractmethod
    def timeout(self) -> float:
        """Seconds after which a blocking call that names no timeout gives up."""

    @timeout.setter
    @abc.abstractmethod
    def timeout(self, seconds: float) -> None: ...

    @property
    @abc.abstractmethod
    def is_closed(self) -> bool:
        """Whether `close` has been called."""

    @abc.abstractmethod
    def allreduce(
        self,
        x: Array,
        out: Array | None,
        op: ReduceOp,
        async_op: bool,
        timeout: float | None,
        tag: int,
        /,
    ) -> Array | Work:
        """As `ferro_dist.allreduce`."""

    @abc.abstractmethod
    def broadcast(
        self,
        x: Array,
        out: Array | None,
        root: int,
        async_op: bool,
        timeout: float | None,
        tag: int,
        /,
    ) -> Array | Work:
        """As `ferro_dist.broadcast`."""

    @abc.abstractmethod
    def reduce(
        self,
        x: Array,
        out: Array | None,
        op: ReduceOp,
        root: int,
        async_op: bool,
        timeout: float | None,
        tag: int,
        /,
    ) -> Array | Work | None:
        """As `ferro_dist.reduce`."""

    @abc.abstractmethod
    def all_gather(
        self, x: Array, out: Array | None, async_op: bool, timeout: float | None, tag: int, /
    ) -> Array | Work:
        """As `ferro_dist.all_gather`."""

    @abc.abstractmethod
    def reduce_scatter(
        self,
        x: Array,
        out: Array | None,
        op: ReduceOp,
        async_op: bool,
        timeout: float | None,
        tag: int,
        /,
    ) -> Array | Work:
        """As `ferro_dist.reduce_scatter`."""

    @abc.abstractmethod
    def all_to_all(
        self,
        x: Array,
        out: Array | None,
        send_counts: Sequence[int] | None,
        recv_counts: Sequence[int] | None,
        async_op: bool,
        timeout: float | None,
        tag: int,
        /,
    ) -> Array | Work:
        """As `ferro_dist.all_to_all`."""

    @abc.abstractmethod
    def gather(
        self,
        x: Array,
        out: Array | None,
        root: int,
        async_op: bool,
        timeout: float | None,
        tag: int,
        /,
    ) -> Array | Work | None:
        """As `ferro_dist.gather`."""

    @abc.abstractmethod
    def scatter(
        self,
        x: Array | None,
        out: Array,
        root: int,
        async_op: bool,
        timeout: float | None,
        tag: int,
        /,
    ) -> Array | Work:
        """As `ferro_dist.scatter`."""

    @abc.abstractmethod
    def barrier(self, async_op: bool, timeout: float | None, tag: int, /) -> Work | None:
        """As `ferro_dist.barrier`."""

    @abc.abstractmethod
    def send(
        self, x: Array, dst: int, async_op: bool, timeout: float | None, tag: int, /
    ) -> Work | None:
        """As `ferro_dist.send`."""

    @abc.abstractmethod
    def recv(
        self, out: Array, src: int, async_op: bool, timeout: float | None, tag: int, /
    ) -> Array | Work:
        """As `ferro_dist.recv`."""

    @abc.abstractmethod
    def sendrecv(
        self,
        x: Array,
        out: Array,
        dst: int,
        src: int,
        async_op: bool,
        timeout: float | None,
        tag: int,
        /,
    ) -> Array | Work:
        """As `ferro_dist.sendrecv`."""

    @abc.abstractmethod
    def batch(
        self, ops: Sequence[P2POp], async_op: bool, timeout: float | None, tag: int, /
    ) -> Work | None:
        """As `ferro_dist.batch`."""

    @abc.abstractmethod
    def empty(self, shape: int | Sequence[int], dtype: Any) -> Array:
        """As `ferro_dist.empty`."""

    @abc.abstractmethod
    def split(self, members: Sequence[int], timeout: float | None = None) -> Self | None:
        """Make a sub-group of these ranks. Called by all ranks of this group.

        Parameters
        ----------
        members : sequence of int
            Ranks of this group, the same on all ranks. Their order is that of the new group:
            ``members[i]`` becomes its rank i.
        timeout : float, optional
            Seconds until the new group must be ready; None for the backend's own.

        Returns
        -------
        Backend or None
            Of the same kind, with the same timeout; None on ranks outside.

        Raises
        ------
        InvalidRank, TypeError, ValueError
            Bad `members` or `timeout`; nothing was sent.
        CollectiveMismatch
            The ranks named different members. This group stays usable.
        Timeout, PeerLostError, ChannelClosed
            As in every call. This group has ended.
        Io, NoConnection
            The members could not connect. This group stays usable.

        Examples
        --------
        To divide a group, as ``MPI_Comm_split`` does, all ranks call this for each part. Here a
        rank gets the group of those that share its row of a grid:

        >>> starts = range(0, backend.world_size, width)
        >>> rows = [backend.split(range(start, start + width)) for start in starts]
        >>> row = rows[backend.rank // width]
        """

    @property
    def cores_per_rank(self) -> float:
        """How many cores each rank has, when the ranks of a host share its cores.

        A backend that does not know who shares its host counts as if all ranks did.
        """
        return count_own() / self.world_size

    @property
    def device(self) -> int | None:
        """The GPU whose arrays this group moves without copying them to the host, or None."""
        return None

    @property
    def moves_host_arrays(self) -> bool:
        """Whether calls take arrays in host memory."""
        return True

    def interrupt(self, error: BaseException) -> None:
        """End the group on all ranks, because `error` struck between calls that belong together.

        The others get an error that names this rank, and need not wait for calls that it will never
        make. Returns at once; on a group that has ended or was closed it has no effect.
        """
        self.close()

    @property
    def global_ranks(self) -> tuple[int, ...]:
        """Each rank's number in the group that this one was made from.

        In the first one, if `split` or `shrink` made it from a group that was made so itself; in
        this one, if none did.
        """
        return self._global_ranks or tuple(range(self.world_size))

    @property
    def survivors(self) -> tuple[int, ...]:
        """Each rank's number in the group that was shrunk to this one, or here if none was."""
        return tuple(range(self.world_size))

    @abc.abstractmethod
    def shrink(self, timeout: float | None = None) -> Self:
        """Make a group of the ranks that are left, and close this one.

        Every survivor calls this once a call has failed with `PeerLostError`, `ChannelClosed` or
        `Timeout`; if all ranks of a healthy group call it, the new group has the same ranks. The
        survivors keep their order, and are numbered anew from 0.

        Parameters
        ----------
        timeout : float, optional
            Seconds until the new group must be ready; None for the backend's own. Ranks that died
            or closed the group are left out at once. Ranks that are silent, for instance because
            they are stopped or their host does not answer, are left out after half of this time,
            as are, where ranks share no memory, those that were killed after they had ended the
            group.

        Returns
        -------
        Backend
            Of the same kind. Its `survivors` are the members' ranks in this group, the
            same on all of them.

        Raises
        ------
        LockPoisoned
            The others went on without this rank, which was too late.
        Timeout
            It cannot be decided who goes on: where ranks share no memory, those that take part must
            be more than half of those not known to be dead, or half of them including the lowest,
            so that two groups can never go on. Or a member was lost or fell silent at the end.
        ChannelClosed
            This rank has closed the group.
        UnsupportedOp
            The backend cannot go on without a rank (MPI).

        Notes
        -----
        Results of calls that have not returned are lost, work under way ends with an error, and
        memory from `empty` stays readable but belongs to the old group: ask the new one for more.

        If it raises, this group remains as it was, and can only be closed or shrunk again.
        """

    @abc.abstractmethod
    def close(self) -> None:
        """Leave the group and free what it held. Idempotent."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _set_global_ranks(self, parent: Backend, members: Sequence[int]) -> Self:
        """Say which ranks of `parent` this group is made of: see `global_ranks`. Return it."""
        numbers = parent.global_ranks
        own = tuple(numbers[member] for member in members)
        self._global_ranks = () if own == tuple(range(len(own))) else own
        return self

    @contextlib.contextmanager
    def _splitting(self) -> Iterator[None]:
        """Let errors of the calls that a split consists of name the split, and this group."""
        try:
            yield
        except DistributedError as error:
            name_call(error, "split", self)
            error.op, error.rank = "split", self.rank
            raise

    def _seconds(self, timeout: float | None) -> float:
        return self.timeout if timeout is None else check_timeout(timeout)

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            f"A {type(self).__name__} cannot be pickled or copied: it is this process's own place "
            "in the group. Pass it on as it is, or let each process make its own."
        )

    def __repr__(self) -> str:
        state = ", closed" if self.is_closed else ""
        return f"<{type(self).__name__} rank {self.rank} of {self.world_size}{state}>"
