# cython: annotation_typing=False
"""Operations that all ranks of a group take part in.

Every rank must call the same functions in the same order, with arrays of the same dtype and size.
If the calls differ, all ranks raise `CollectiveMismatch` before anything is sent (not on GPUs:
`NcclBackend`). After most other errors the group is unusable: see below.

Parameters that all functions share:

backend : Backend
    The group.
out : array, optional
    Where the result is written: C-contiguous, writable, of the same dtype as the input. It may be
    the input itself. Without it, a new array of the input's library, dtype and device is returned.
    torch's autograd does not record the call: a new tensor does not require grad.
async_op : bool
    Return a `Work` at once. The arrays must not be touched until it is done.
timeout : float, optional
    In seconds; by default the backend's. It ends the call with `Timeout`, naming the ranks that did
    not take part.
tag : int
    A number of your own, from 0 to 2**32 - 1, that tells apart the calls of a program. Ranks that
    give different tags raise `CollectiveMismatch`.

Arrays may come from any library with the buffer protocol or DLPack: NumPy, torch, JAX, CuPy. They
are in host memory; with `NcclBackend` on a GPU, with `HybridBackend` on either. Input that is not
C-contiguous is copied first. Of the ranks' shapes only the number of elements must agree. Arrays
may be empty or 0-dimensional if they are so on all ranks.

Dtypes: booleans (MIN and MAX), integers (all but MEAN), floats of 16 to 64 bits (all), complex
numbers (SUM, MEAN, PROD). 16-bit floats are summed in float32. All ranks get the same bits. 8-bit
floats (float8_e4m3fn, float8_e5m2) can be moved, not reduced. `NcclBackend` tells what differs on
GPUs.

Algorithms, with their costs and sources: ``csrc/ferro/ALGORITHMS.md``.

Errors that all functions share: `InvalidArray`, `UnsupportedOp`, `SizeMismatch`, `InvalidRank`,
`ValueError` (timeout), `OverflowError` (tag) and `TypeError` (either) mean that this rank's
arguments are wrong and nothing was sent. After these and after `CollectiveMismatch` the group stays
usable; after `Timeout`, `PeerLostError`, `ChannelClosed` and `Io` it does not. `LockPoisoned` says
that an earlier error has ended it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ferro_dist.arguments import name_call, reduce_op_of
from ferro_dist.backends.base import Array, Backend
from ferro_dist.reduce_op import ReduceOp

__all__ = [
    "all_gather",
    "all_to_all",
    "allreduce",
    "barrier",
    "broadcast",
    "empty",
    "gather",
    "reduce",
    "reduce_scatter",
    "scatter",
]


def allreduce(
    x: Array,
    backend: Backend,
    op: ReduceOp | str = ReduceOp.SUM,
    *,
    out: Array | None = None,
    async_op: bool = False,
    timeout: float | None = None,
    tag: int = 0,
) -> Any:
    """Reduce over all ranks and give every rank the result.

    Parameters and errors not listed here are common to all: see `ferro_dist.collective`.

    Parameters
    ----------
    x : array, any shape
        The same dtype and number of elements on every rank.
    op : ReduceOp or str
        ``"sum"``, ``"mean"``, ``"prod"``, ``"min"`` or ``"max"``.

    Returns
    -------
    array, shape of `x`, or Work

    Examples
    --------
    >>> import ferro_dist as fd, numpy as np
    >>> with fd.init() as backend:
    ...     fd.allreduce(np.ones(3), backend)
    array([1., 1., 1.])
    """
    try:
        if type(op) is not ReduceOp:
            op = reduce_op_of(op)
        return backend.allreduce(x, out, op, async_op, timeout, tag)
    except Exception as error:
        name_call(error, "allreduce", backend)
        raise


def broadcast(
    x: Array,
    backend: Backend,
    root: int = 0,
    *,
    out: Array | None = None,
    async_op: bool = False,
    timeout: float | None = None,
    tag: int = 0,
) -> Any:
    """Give every rank the root's array.

    Parameters and errors not listed here are common to all: see `ferro_dist.collective`.

    Parameters
    ----------
    x : array, any shape
        On the root, what is sent; elsewhere it gives only dtype and size, and is not read.
    root : int

    Returns
    -------
    array, shape of `x`, or Work
    """
    try:
        return backend.broadcast(x, out, root, async_op, timeout, tag)
    except Exception as error:
        name_call(error, "broadcast", backend)
        raise


def reduce(
    x: Array,
    backend: Backend,
    op: ReduceOp | str = ReduceOp.SUM,
    root: int = 0,
    *,
    out: Array | None = None,
    async_op: bool = False,
    timeout: float | None = None,
    tag: int = 0,
) -> Any:
    """Reduce over all ranks and give the root the result.

    Parameters and errors not listed here are common to all: see `ferro_dist.collective`.

    Parameters
    ----------
    x : array, any shape
    op : ReduceOp or str
    root : int
    out : array, optional
        Read on the root only.

    Returns
    -------
    array, shape of `x`, on the root and None elsewhere, or Work
    """
    try:
        return backend.reduce(x, out, reduce_op_of(op), root, async_op, timeout, tag)
    except Exception as error:
        name_call(error, "reduce", backend)
        raise


def all_gather(
    x: Array,
    backend: Backend,
    *,
    out: Array | None = None,
    async_op: bool = False,
    timeout: float | None = None,
    tag: int = 0,
) -> Any:
    """Give every rank the arrays of all, joined along the first axis in rank order.

    Parameters and errors not listed here are common to all: see `ferro_dist.collective`.

    Parameters
    ----------
    x : array, shape (n, ...)
        0-dimensional arrays count as shape (1,).
    out : array, optional
        ``world_size`` times as many elements as `x`. In place if `x` is this rank's chunk of it.

    Returns
    -------
    array, shape (world_size * n, ...), or Work
    """
    try:
        return backend.all_gather(x, out, async_op, timeout, tag)
    except Exception as error:
        name_call(error, "all_gather", backend)
        raise


def reduce_scatter(
    x: Array,
    backend: Backend,
    op: ReduceOp | str = ReduceOp.SUM,
    *,
    out: Array | None = None,
    async_op: bool = False,
    timeout: float | None = None,
    tag: int = 0,
) -> Any:
    """Reduce over all ranks and leave each rank with its own chunk.

    Parameters and errors not listed here are common to all: see `ferro_dist.collective`.

    Parameters
    ----------
    x : array, shape (world_size * n, ...)
    op : ReduceOp or str
    out : array, optional
        ``n * ...`` elements. In place if it is this rank's chunk of `x`.

    Returns
    -------
    array, shape (n, ...), or Work
    """
    try:
        return backend.reduce_scatter(x, out, reduce_op_of(op), async_op, timeout, tag)
    except Exception as error:
        name_call(error, "reduce_scatter", backend)
        raise


def all_to_all(
    x: Array,
    backend: Backend,
    *,
    out: Array | None = None,
    send_counts: Sequence[int] | None = None,
    recv_counts: Sequence[int] | None = None,
    async_op: bool = False,
    timeout: float | None = None,
    tag: int = 0,
) -> Any:
    """Send chunk i of the array to rank i, and join the chunks received in rank order.

    Parameters and errors not listed here are common to all: see `ferro_dist.collective`.

    Parameters
    ----------
    x : array, shape (world_size * n, ...)
        Any shape if the counts are given.
    send_counts, recv_counts : sequence of int, optional
        Elements (not rows) to and from each rank, packed without gaps. What a rank
        sends to another must be what that one expects, else `CollectiveMismatch`.

    Returns
    -------
    array or Work
        Shape of `x`; with counts, rows like those of `x` if only whole rows arrive, else flat.
    """
    try:
        return backend.all_to_all(x, out, send_counts, recv_counts, async_op, timeout, tag)
    except Exception as error:
        name_call(error, "all_to_all", backend)
        raise


def gather(
    x: Array,
    backend: Backend,
    root: int = 0,
    *,
    out: Array | None = None,
    async_op: bool = False,
    timeout: float | None = None,
    tag: int = 0,
) -> Any:
    """Give the root the arrays of all, joined along the first axis in rank order.

    Parameters and errors not listed here are common to all: see `ferro_dist.collective`.

    Parameters
    ----------
    x : array, shape (n, ...)
    root : int
    out : array, optional
        Read on the root only.

    Returns
    -------
    array, shape (world_size * n, ...), on the root and None elsewhere, or Work
    """
    try:
        return backend.gather(x, out, root, async_op, timeout, tag)
    except Exception as error:
        name_call(error, "gather", backend)
        raise


def scatter(
    x: Array | None,
    backend: Backend,
    root: int = 0,
    *,
    out: Array | None = None,
    async_op: bool = False,
    timeout: float | None = None,
    tag: int = 0,
) -> Any:
    """Give each rank its own chunk of the root's array.

    Parameters and errors not listed here are common to all: see `ferro_dist.collective`.

    Parameters
    ----------
    x : array, shape (world_size * n, ...)
        Read on the root only; None elsewhere.
    root : int
    out : array
        ``n * ...`` elements. Only the root, which knows the shape, may omit it.

    Returns
    -------
    `out`, or without it a new array, shape (n, ...), or Work
    """
    try:
        return backend.scatter(x, out, root, async_op, timeout, tag)
    except Exception as error:
        name_call(error, "scatter", backend)
        raise


def barrier(
    backend: Backend, *, async_op: bool = False, timeout: float | None = None, tag: int = 0
) -> Any:
    """Wait until every rank has called this.

    Parameters and errors not listed here are common to all: see `ferro_dist.collective`.

    Returns
    -------
    None or Work
    """
    try:
        return backend.barrier(async_op, timeout, tag)
    except Exception as error:
        name_call(error, "barrier", backend)
        raise


def empty(shape: int | Sequence[int], dtype: Any, backend: Backend) -> Any:
    """Make an uninitialized array in the memory that suits `backend` best.

    For a `HostBackend` this is memory that all ranks of the host can reach: collectives whose
    arrays are all there avoid needless copies. It belongs to the calling rank alone; no other rank
    needs to call this.

    Parameters
    ----------
    shape : int or sequence of int
    dtype : anything that NumPy takes, or "bfloat16"

    Returns
    -------
    numpy.ndarray
        torch and JAX view it without a copy: ``torch.from_numpy(x)``, or of bfloat16, which NumPy
        does not export, ``torch.from_numpy(x.view("int16")).view(torch.bfloat16)``. With
        `NcclBackend` a torch or CuPy array on this rank's GPU. It stays valid after the group is
        closed.

    Raises
    ------
    TypeError, ValueError
        A bad or negative `shape`.
    InvalidArray
        `dtype` is not supported.
    MemoryError
        There is no room for it.
    ChannelClosed, LockPoisoned
        The group has ended.
    """
    try:
        return backend.empty(shape, dtype)
    except Exception as error:
        name_call(error, "empty", backend)
        raise
