"""Small host arrays that all ranks gather from all, over any group.

A group for GPU arrays alone takes no array in host memory: there they travel through GPU memory.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import numpy as np

from ferro_dist.backends.nccl import WATCHDOG_GRACE_S
from ferro_dist.collective import all_gather, broadcast

if TYPE_CHECKING:
    from ferro_dist.backends.base import Backend
    from ferro_dist.backends.nccl import NcclBackend
    from ferro_dist.work import Work

__all__ = ["Rows", "all_gather_bytes", "all_gather_rows", "broadcast_row"]

NumpyArray = np.ndarray[Any, Any]


def all_gather_bytes(data: bytes, backend: Backend) -> list[bytes]:
    """Return what each rank gave, by rank. Called by all ranks; two all_gathers."""
    lengths = all_gather_rows(np.array([len(data)], np.int64), backend)[:, 0]
    longest = int(lengths.max())
    if not longest:
        return [b""] * backend.world_size
    padded = np.frombuffer(data.ljust(longest, b"\0"), np.uint8)
    rows = all_gather_rows(padded, backend)
    return [row[:length].tobytes() for row, length in zip(rows, lengths, strict=True)]


def all_gather_rows(
    row: NumpyArray, backend: Backend, timeout: float | None = None, tag: int = 0
) -> NumpyArray:
    """Return the arrays of all ranks, by rank; they have the same shape and dtype."""
    if backend.moves_host_arrays:
        rows = np.asarray(all_gather(row, backend, timeout=timeout, tag=tag))
        return rows.reshape(backend.world_size, *row.shape)
    return Rows(row.shape, row.dtype, backend).start(row, tag, timeout).wait()


def broadcast_row(row: NumpyArray, backend: Backend, tag: int = 0) -> NumpyArray:
    """Return the array of rank 0, on all ranks."""
    if backend.moves_host_arrays:
        return np.asarray(broadcast(row, backend, 0, tag=tag))
    first: NumpyArray = all_gather_rows(row, backend, tag=tag)[0]
    return first


class Rows:
    """The arrays of all ranks, gathered any number of times.

    Parameters
    ----------
    shape : tuple of int
        The shape of one rank's array, which is not empty.
    dtype : numpy.dtype
    backend : Backend
    """

    def __init__(self, shape: tuple[int, ...], dtype: Any, backend: Backend) -> None:
        self._backend = backend
        self._row = np.empty(shape, dtype)
        self._rows = np.empty((backend.world_size, *shape), dtype)
        is_detour = not backend.moves_host_arrays
        self._detour = _Detour(self._row.nbytes, cast("Any", backend)) if is_detour else None
        self._timeout: float | None = None

    def start(self, row: NumpyArray, tag: int = 0, timeout: float | None = None) -> Rows:
        """Give this rank's array. Called by all ranks, once the previous ones were waited for."""
        self._row[...] = row
        self._timeout = timeout
        if self._detour is not None:
            self._detour.start(self._row, tag, timeout)
            return self
        work = all_gather(
            self._row, self._backend, out=self._rows, async_op=True, timeout=timeout, tag=tag
        )
        self._work = cast("Work", work)
        return self

    def wait(self) -> NumpyArray:
        """Return the arrays of all ranks, by rank."""
        if self._detour is None:
            self._work.wait()
        else:
            self._detour.wait(self._rows, self._timeout)
        return self._rows


class _Detour:
    """An all_gather of host arrays through the memory of the group's GPU.

    All of it is on the group's own stream: the caller's may have a backward under way,
    which it need not wait for.
    """

    def __init__(self, row_nbytes: int, backend: NcclBackend) -> None:
        from ferro_dist._native.cuda_memory import DeviceMemory, PinnedMemory

        nbytes = row_nbytes * backend.world_size
        self._backend = backend
        self._own = _OnStream(DeviceMemory(row_nbytes, backend.device))
        self._all = _OnStream(DeviceMemory(nbytes, backend.device))
        # Pinned: a copy from other memory may wait for the GPU, where only `wait` should.
        self._sent: Any = PinnedMemory(row_nbytes)
        self._received: Any = PinnedMemory(nbytes)

    def start(self, row: NumpyArray, tag: int, timeout: float | None) -> None:
        from ferro_dist._native.cuda_memory import copy_async

        stream = self._backend.stream
        self._own.stream = self._all.stream = stream.handle
        np.frombuffer(self._sent, np.uint8)[:] = np.frombuffer(row.tobytes(), np.uint8)
        copy_async(self._own.memory.address, self._sent.address, row.nbytes, stream)
        self._work = self._backend.all_gather(self._own, self._all, True, timeout, tag)
        copy_async(
            self._received.address, self._all.memory.address, self._all.memory.nbytes, stream
        )
        self._arrival = stream.record()

    def wait(self, rows: NumpyArray, timeout: float | None) -> None:
        seconds = self._backend.timeout if timeout is None else timeout
        self._work.wait(seconds + WATCHDOG_GRACE_S)
        self._arrival.synchronize()  # for the copy, which nothing can hold up any more
        rows[...] = np.frombuffer(self._received, rows.dtype).reshape(rows.shape)


class _OnStream:
    """Bytes on a GPU that say on which stream they are used."""

    def __init__(self, memory: Any) -> None:
        self.memory = memory
        self.stream = 0

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        interface: dict[str, Any] = self.memory.__cuda_array_interface__
        return {**interface, "stream": self.stream}

    def __dlpack_device__(self) -> tuple[int, int]:
        device: tuple[int, int] = self.memory.__dlpack_device__()
        return device
