# cython: annotation_typing=False
"""Messages from one rank to another.

Messages between two ranks arrive in the order in which they were sent. They are independent of the
group's collectives: a receive may be posted ahead with ``async_op=True`` and stay pending through
any number of them.

A send returns when the array may be changed again, which may be before the peer has received it.
Two ranks that both send something large before they receive wait for each other in vain; `sendrecv`
and `batch` progress both directions together.

Several threads may call these functions on one group at once: one that blocks in a receive does not
keep others from sending. Messages of one thread to one peer keep their order; threads that send to
the same peer must arrange the order among themselves.

A message whose dtype, size or tag is not what the receive expects raises `SizeMismatch` at the
receiver and is dropped. The group stays usable.

`timeout`, `async_op`, `tag` and the other errors are as in `ferro_dist.collective`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ferro_dist.arguments import in_order, name_call
from ferro_dist.backends.base import Array, Backend, P2POp

__all__ = ["P2POp", "batch", "recv", "send", "sendrecv"]


def send(
    x: Array,
    backend: Backend,
    dst: int,
    *,
    async_op: bool = False,
    timeout: float | None = None,
    tag: int = 0,
) -> Any:
    """Send an array to rank `dst`.

    Parameters and errors not listed here are common to all: see `ferro_dist.point_to_point`.

    Parameters
    ----------
    x : array, any shape
    dst : int

    Returns
    -------
    None or Work

    Raises
    ------
    SelfSend
        `dst` is this rank.
    """
    try:
        return backend.send(x, dst, async_op, timeout, tag)
    except Exception as error:
        name_call(error, "send", backend)
        raise


def recv(
    out: Array,
    backend: Backend,
    src: int,
    *,
    async_op: bool = False,
    timeout: float | None = None,
    tag: int = 0,
) -> Any:
    """Receive an array from rank `src` into `out`.

    Parameters and errors not listed here are common to all: see `ferro_dist.point_to_point`.

    Parameters
    ----------
    out : array, C-contiguous and writable
        The dtype and number of elements that were sent. Not of JAX, whose arrays cannot be written:
        receive into one of NumPy.
    src : int

    Returns
    -------
    `out` or Work

    Raises
    ------
    SizeMismatch
        Something else was sent; it was dropped.
    """
    try:
        return backend.recv(out, src, async_op, timeout, tag)
    except Exception as error:
        name_call(error, "recv", backend)
        raise


def sendrecv(
    x: Array,
    out: Array,
    backend: Backend,
    dst: int,
    src: int,
    *,
    async_op: bool = False,
    timeout: float | None = None,
    tag: int = 0,
) -> Any:
    """Send `x` to rank `dst` while receiving `out` from rank `src`.

    Parameters and errors not listed here are common to all: see `ferro_dist.point_to_point`.

    Parameters
    ----------
    x : array, any shape
    out : array, C-contiguous and writable
        The dtype and number of elements that `src` sends. It may not overlap `x`.
    dst, src : int
        They may be the same rank.

    Returns
    -------
    `out` or Work

    Raises
    ------
    SelfSend
        `dst` or `src` is this rank.
    SizeMismatch
        Something else was sent; it was dropped.
    """
    try:
        return backend.sendrecv(x, out, dst, src, async_op, timeout, tag)
    except Exception as error:
        name_call(error, "sendrecv", backend)
        raise


def batch(
    ops: Sequence[P2POp],
    backend: Backend,
    *,
    async_op: bool = False,
    timeout: float | None = None,
    tag: int = 0,
) -> Any:
    """Progress many sends and receives together, and return when all are done.

    Parameters and errors not listed here are common to all: see `ferro_dist.point_to_point`.

    Parameters
    ----------
    ops : sequence of P2POp
        Those with the same peer and direction keep their order.

    Returns
    -------
    None or Work

    Raises
    ------
    TypeError
        `ops` holds something other than P2POp. Nothing was sent.
    InvalidArray
        An array that is received into shares memory with another of the batch. Nothing was sent.

    Examples
    --------
    >>> fd.batch([fd.P2POp("send", x, right), fd.P2POp("recv", y, left)], backend)
    """
    messages = _checked(ops)
    try:
        return backend.batch(messages, async_op, timeout, tag)
    except Exception as error:
        name_call(error, "batch", backend)
        raise


def _checked(ops: Sequence[P2POp]) -> list[P2POp]:
    try:
        messages = list(in_order(ops))
    except TypeError:
        raise TypeError(f"batch: ops must be a sequence of P2POp, not {ops!r}.") from None
    for message in messages:
        if not isinstance(message, P2POp):
            raise TypeError(f"batch: ops must be a sequence of P2POp, and holds {message!r}.")
    return messages
