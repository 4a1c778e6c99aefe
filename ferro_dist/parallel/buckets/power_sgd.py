"""PowerSGD: gradients sent as products of two narrow matrices.

For each gradient M, n × m, of which Q, m × r, is the right factor of the step before:

1. M ← gradient + error, which is what the previous steps have left out.
2. P ← mean over ranks of M Q;  P ← orthonormal basis of its columns.
3. Q ← mean over ranks of Mᵀ P.
4. gradient ← P Qᵀ;  error ← M − P Qᵀ.

With a sum in place of the mean, a rank's error is M less its own part of P Qᵀ.

This is one step of subspace iteration: as gradients change slowly, P and Q approach the leading
singular vectors of their mean. r (n + m) elements travel instead of n m.

References
----------
T. Vogels, S. P. Karimireddy, M. Jaggi, "PowerSGD: Practical Low-Rank Gradient Compression
for Distributed Optimization", NeurIPS 2019.
"""

from __future__ import annotations

import math
import threading
import weakref
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ferro_dist.arguments import integer
from ferro_dist.collective import allreduce
from ferro_dist.errors import InvalidArray
from ferro_dist.reduce_op import ReduceOp

if TYPE_CHECKING:
    from ferro_dist.backends.base import Backend
    from ferro_dist.parallel.buckets.bucket import Bucket, ParameterSpec

__all__ = ["PowerSGD"]

NumpyArray = np.ndarray[Any, Any]

_MIN_SAVING = 2
"""The factor by which compressing a gradient must reduce the elements that travel."""


class PowerSGD:
    """Send an approximation of each gradient, and make up for its error in later steps.

    Pass it to `DDP` as ``compress=PowerSGD(rank)``.

    Parameters
    ----------
    rank : int, default 4
        Columns of the factors. More columns are more exact, but more to send.

    Raises
    ------
    TypeError, ValueError
        `rank` is not an integer of at least 1.

    Notes
    -----
    Gradients of real floats with two or more dimensions are compressed if less than half of the
    elements then travel; the others are reduced as they are. Computation is in float32, or in
    float64 for gradients of that dtype. Each rank keeps the errors, which take as much memory as
    the compressed gradients.

    A gradient with NaN or infinity, or whose average is too large for its dtype, becomes NaN on all
    ranks, and leaves no error behind.

    All ranks compute the product of the factors themselves: they get the same bits if their
    processors and BLAS are the same.
    """

    def __init__(self, rank: int = 4) -> None:
        try:
            self.rank = integer(rank)
        except TypeError as error:
            raise TypeError(f"PowerSGD: rank {error}") from None
        if self.rank < 1:
            raise ValueError(f"PowerSGD: rank must be at least 1, not {rank}")
        # For each bucket as long as the bucket exists. The lock is for ranks that are threads and
        # share this object.
        self._lock = threading.Lock()
        self._factors: weakref.WeakKeyDictionary[Bucket, _Factors] = weakref.WeakKeyDictionary()

    def __call__(self, bucket: Bucket, backend: Backend, op: ReduceOp) -> None:
        """Replace the gradients in a bucket by an approximate mean or sum over the ranks.

        Called by all ranks, for the same buckets in the same order.

        Parameters
        ----------
        bucket : Bucket
            Its ``buffer``, ``layout`` and ``kept`` are used, and its lanes, which have been
            reduced; with ``is_on_gpu`` it is refused.
        backend : Backend
        op : ReduceOp
            `MEAN` or `SUM`.
        """
        if backend.world_size == 1:
            return  # nothing to send, so nothing to leave out
        gradients = _gradients_of(bucket)
        with self._lock:
            factors = self._factors.get(bucket)
            if factors is None:
                factors = self._factors[bucket] = _Factors(bucket, gradients, backend, self.rank)
        with np.errstate(invalid="ignore", over="ignore"):  # NaN is passed on, and seen there
            factors.reduce(gradients, bucket.contributed(), backend, op)

    def check_reach(self, specs: Iterable[ParameterSpec]) -> None:
        """Raise InvalidArray if any of these parameters is on a GPU."""
        for spec in specs:
            if spec.is_on_gpu:
                raise _out_of_reach(f"parameter {spec.name!r} is")

    def __reduce__(self) -> Any:
        # What is kept belongs to buckets, which stay in their process.
        return type(self), (self.rank,)

    def __repr__(self) -> str:
        return f"PowerSGD({self.rank})"


class _Factors:
    """What is kept for one bucket: errors, right factors, and the arrays that travel.

    Errors outlive the bucket: they are found again by the names of their parameters.
    """

    def __init__(
        self, bucket: Bucket, gradients: Sequence[NumpyArray], backend: Backend, rank: int
    ) -> None:
        dtype = _compute_dtype(gradients[0].dtype)
        is_low_rank = [_is_worthwhile(gradient, rank) for gradient in gradients]
        self._compressed = [i for i, is_low in enumerate(is_low_rank) if is_low]
        self._others = [i for i, is_low in enumerate(is_low_rank) if not is_low]
        shapes = [_matrix_shape(gradients[i]) for i in self._compressed]
        # Factors of one side travel together, and what is not compressed with the first.
        counts = [gradients[i].size for i in self._others]
        self._first, views = _flat_views(
            backend, dtype, [(n, rank) for n, _ in shapes] + [(count,) for count in counts]
        )
        self._left, self._uncompressed = views[: len(shapes)], views[len(shapes) :]
        self._second, self._right = _flat_views(backend, dtype, [(m, rank) for _, m in shapes])
        self._errors = [
            _error_of(bucket.layout.names[i], shape, dtype, bucket.kept)
            for i, shape in zip(self._compressed, shapes, strict=True)
        ]
        for k in range(len(shapes)):
            self._draw(k)

    def reduce(
        self,
        gradients: Sequence[NumpyArray],
        is_contributed: Sequence[bool] | None,
        backend: Backend,
        op: ReduceOp,
    ) -> None:
        """Replace gradients by products of factors; reduce those not compressed exactly.

        Errors of gradients that no rank contributes now are kept for later. None means that each
        has a contributor.
        """
        flags = is_contributed or [True] * len(gradients)
        self._pack(gradients, flags)
        allreduce(self._first, backend, op, out=self._first)
        for view, i in zip(self._uncompressed, self._others, strict=True):
            gradients[i][...] = view.reshape(gradients[i].shape)
        if not self._compressed:
            return
        for error, left, right in zip(self._errors, self._left, self._right, strict=True):
            # NaN here is NaN on every rank: all pass it on alike.
            if np.isfinite(left).all():
                left[:] = np.linalg.qr(left)[0]
            np.matmul(error.T, left, out=right)
        allreduce(self._second, backend, op, out=self._second)
        num_parts = backend.world_size if op is ReduceOp.SUM else 1
        for k, i in enumerate(self._compressed):
            if flags[i]:
                self._put(k, gradients[i], num_parts)

    def _pack(self, gradients: Sequence[NumpyArray], flags: Sequence[bool]) -> None:
        for k, i in enumerate(self._compressed):
            matrix = self._errors[k]  # the error of the last step becomes this one's M
            if flags[i]:
                matrix += gradients[i].reshape(matrix.shape)
            np.matmul(matrix, self._right[k], out=self._left[k])
        for view, i in zip(self._uncompressed, self._others, strict=True):
            view[:] = gradients[i].reshape(-1)

    def _put(self, k: int, gradient: NumpyArray, num_parts: int) -> None:
        left, right, error = self._left[k], self._right[k], self._errors[k]
        gradient[...] = (left @ right.T).reshape(gradient.shape)
        # What was really written: for 16-bit floats that includes the rounding, and what overflows.
        written = gradient.reshape(error.shape).astype(error.dtype)
        if not np.isfinite(written).all():
            gradient.fill(np.nan)
            self._forget(k)
            return
        written /= num_parts
        error -= written

    def _forget(self, k: int) -> None:
        """Start over with the k-th matrix."""
        self._errors[k].fill(0)
        self._draw(k)

    def _draw(self, k: int) -> None:
        # Seeded by its number, so that all ranks draw the same.
        self._right[k][:] = np.random.default_rng(k).standard_normal(self._right[k].shape)


def _gradients_of(bucket: Bucket) -> list[NumpyArray]:
    """Return views of a bucket's gradients, whatever the library of the module is."""
    if bucket.is_on_gpu:
        raise _out_of_reach("these gradients are")
    layout = bucket.layout
    return [
        bucket.buffer[offset : offset + spec.count].reshape(spec.shape)
        for spec, offset in zip(layout.specs, layout.offsets, strict=True)
    ]


def _out_of_reach(what: str) -> InvalidArray:
    return InvalidArray(
        f"DDP: PowerSGD computes with NumPy, and {what} on a GPU. Use compress='bf16'.", op="DDP"
    )


def _error_of(
    name: str, shape: tuple[int, int], dtype: np.dtype[Any], kept: dict[str, Any]
) -> NumpyArray:
    """Return what was left out of a parameter's gradients so far."""
    error: NumpyArray | None = kept.get(name)
    if error is None or error.shape != shape or error.dtype != dtype:
        error = kept[name] = np.zeros(shape, dtype)
    return error


def _matrix_shape(gradient: NumpyArray) -> tuple[int, int]:
    return gradient.shape[0], gradient.size // max(1, gradient.shape[0])


def _is_worthwhile(gradient: NumpyArray, rank: int) -> bool:
    if gradient.ndim < 2 or gradient.dtype.kind == "c":
        return False
    n, m = _matrix_shape(gradient)
    return min(n, m) > rank and _MIN_SAVING * rank * (n + m) < n * m


def _compute_dtype(dtype: np.dtype[Any]) -> np.dtype[Any]:
    if dtype.kind == "c" or dtype == np.float64:
        return dtype
    return np.dtype(np.float32)


def _flat_views(
    backend: Backend, dtype: np.dtype[Any], shapes: Sequence[tuple[int, ...]]
) -> tuple[NumpyArray, list[NumpyArray]]:
    """Return one array, and views of these shapes one after the other in it."""
    counts = [math.prod(shape) for shape in shapes]
    flat: NumpyArray = backend.empty(sum(counts), dtype)
    views, end = [], 0
    for shape, count in zip(shapes, counts, strict=True):
        views.append(flat[end : end + count].reshape(shape))
        end += count
    return flat, views
