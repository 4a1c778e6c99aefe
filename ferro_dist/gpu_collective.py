"""Collectives that insist on GPU arrays.

They go through NCCL where the group has it (`NcclBackend`, `HybridBackend`). Elsewhere they raise
`UnsupportedOp`. On groups of the engine (`HostBackend`, `TcpBackend`, `SimulatedBackend`)
``FERROTORCH_ENABLE_GPU_FALLBACK`` allows the detour through host memory; each call then gives a
`GpuFallbackWarning`. The ordinary collectives treat GPU arrays in the same way, and take host
arrays as well; messages have no such detour.
"""

from __future__ import annotations

from typing import Any

from ferro_dist import collective, interop
from ferro_dist.arguments import name_call
from ferro_dist.backends.base import Array, Backend
from ferro_dist.errors import InvalidArray
from ferro_dist.reduce_op import ReduceOp

__all__ = ["gpu_allreduce", "gpu_broadcast"]


def gpu_allreduce(
    x: Array,
    backend: Backend,
    op: ReduceOp | str = ReduceOp.SUM,
    *,
    out: Array | None = None,
    async_op: bool = False,
    timeout: float | None = None,
    tag: int = 0,
) -> Any:
    """Reduce a GPU array over all ranks and give every rank the result, on its GPU.

    Parameters and errors are those of `ferro_dist.allreduce`.

    Parameters
    ----------
    x : array, any shape
        On a GPU; from torch, CuPy or JAX.

    Returns
    -------
    array, shape of `x`, or Work

    Raises
    ------
    InvalidArray
        `x` is in host memory.
    UnsupportedOp
        The group has no NCCL, and the detour through host memory is not allowed, or does not exist
        (MPI).
    """
    _check_on_gpu(x, "gpu_allreduce", backend)
    return collective.allreduce(
        x, backend, op, out=out, async_op=async_op, timeout=timeout, tag=tag
    )


def gpu_broadcast(
    x: Array,
    backend: Backend,
    root: int = 0,
    *,
    out: Array | None = None,
    async_op: bool = False,
    timeout: float | None = None,
    tag: int = 0,
) -> Any:
    """Give every rank the root's array, on its GPU.

    Parameters and errors are those of `ferro_dist.broadcast`.

    Parameters
    ----------
    x : array, any shape
        On a GPU. On the root, what is sent; elsewhere it gives only dtype and size.

    Returns
    -------
    array, shape of `x`, or Work

    Raises
    ------
    InvalidArray, UnsupportedOp
        As for `gpu_allreduce`.
    """
    _check_on_gpu(x, "gpu_broadcast", backend)
    return collective.broadcast(
        x, backend, root, out=out, async_op=async_op, timeout=timeout, tag=tag
    )


def _check_on_gpu(x: Array, op: str, backend: Backend) -> None:
    try:
        if not interop.is_on_gpu(x):
            raise InvalidArray(
                f"this {type(x).__qualname__} is in host memory. "
                f"Call ferro_dist.{op.removeprefix('gpu_')}, which takes both kinds."
            )
    except Exception as error:
        name_call(error, op, backend)
        raise
