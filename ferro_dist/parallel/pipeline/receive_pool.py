"""Memory for what is received, reused again and again.

Touching memory that is new to a process costs more than receiving into it. A block returns to the
pool when the last array that refers to it is gone, whoever holds that: a stage, autograd, or the
user.
"""

from __future__ import annotations

import math
import weakref
from collections import deque
from typing import Any, NamedTuple

import numpy as np

from ferro_dist import interop

__all__ = ["SMALLEST_NBYTES", "ReceivePool"]

NumpyArray = np.ndarray[Any, Any]

SMALLEST_NBYTES = 1 << 15
"""Below this size, malloc gives memory that has been touched already."""


class _Lease(NamedTuple):
    """A block in use, until the reference dies; then it returns to the pool."""

    end: weakref.ref[NumpyArray]
    block: NumpyArray
    home: deque[NumpyArray]


class ReceivePool:
    """Blocks by size. Any thread may take or release one."""

    def __init__(self) -> None:
        self._free: dict[int, deque[NumpyArray]] = {}
        self._taken_since_trim: set[int] = set()
        # By the identity of the reference: its hash would be that of an array, which is unhashable.
        self._leases: dict[int, _Lease] = {}

    def take(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> NumpyArray:
        """Return an uninitialized array."""
        nbytes = math.prod(shape) * dtype.itemsize
        if nbytes < SMALLEST_NBYTES:
            return np.empty(shape, dtype)
        self._taken_since_trim.add(nbytes)
        blocks = self._free.setdefault(nbytes, deque())
        try:
            block = blocks.pop()  # the last one: it may still be in a cache
        except IndexError:
            block = interop.aligned_empty((nbytes,), np.dtype(np.uint8))  # a stage may be JAX's
        # Views of a view refer directly to the array that owns the memory. A memoryview in between
        # prevents that: all of them keep `array`, which is gone only when they are.
        buffer: Any = block  # has the buffer protocol, which mypy knows from Python 3.12 on
        array = np.frombuffer(memoryview(buffer), np.uint8)
        # Not weakref.finalize, which takes longer than all the rest.
        end = weakref.ref(array, self._put_back)
        self._leases[id(end)] = _Lease(end, block, blocks)
        return array.view(dtype).reshape(shape)

    def _put_back(self, end: weakref.ref[NumpyArray]) -> None:
        lease = self._leases.pop(id(end))
        lease.home.append(lease.block)

    def trim(self) -> None:
        """Free blocks that have not been used since the last call: shapes may change."""
        for nbytes in self._free.keys() - self._taken_since_trim:
            del self._free[nbytes]
        self._taken_since_trim.clear()
