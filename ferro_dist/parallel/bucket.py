"""Buckets: many gradients in one array, so that one allreduce moves them all.

A collective has a cost that no small array can earn back, and a model has many small
parameters. `assign_buckets` divides parameters into groups of one dtype, `BucketLayout`
gives each its place in one flat array, `Bucket` is that array.

    | gradient | gradient | gradient | one lane per gradient |

The lanes are elements of the same dtype that travel with the same allreduce. Lane *i*
says whether this rank had a gradient *i* to give; reduced, it says whether any rank had.
So ranks agree on what was used without another message, and without walking a graph.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

__all__ = ["Bucket", "BucketLayout", "ParameterSpec", "assign_buckets"]

NumpyArray = np.ndarray[Any, Any]

ALIGNMENT_NBYTES = 64
"""A cache line, and the widest vector load: where a gradient of a bucket may start."""


@dataclass(frozen=True)
class ParameterSpec:
    """What all ranks must agree on about one parameter."""

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]

    @property
    def count(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def padded_count(self) -> int:
        """Number of elements up to where the next gradient may start."""
        line = max(1, ALIGNMENT_NBYTES // self.dtype.itemsize)
        return -(-self.count // line) * line

    @property
    def padded_nbytes(self) -> int:
        """Size of the gradient in a bucket."""
        return self.padded_count * self.dtype.itemsize

    def __str__(self) -> str:
        return f"{self.name!r} {self.dtype.name} {self.shape}"


def assign_buckets(
    parameters: Iterable[ParameterSpec], bucket_nbytes: int, first_bucket_nbytes: int
) -> list[list[ParameterSpec]]:
    """Divide parameters into buckets of one dtype and bounded size.

    Greedy, in one pass: each dtype has one open bucket, which is closed by the first
    parameter that does not fit.

    Parameters
    ----------
    parameters : iterable of ParameterSpec
        In the order in which their gradients become ready.
    bucket_nbytes : int
        The largest bucket. A parameter that is larger has a bucket to itself.
    first_bucket_nbytes : int
        The largest first bucket. A small one is full early, so that communication
        starts while most of backward is still to come.

    Returns
    -------
    list of list of ParameterSpec
        Every parameter once, in the order given within its bucket; buckets in the order
        in which their last gradient becomes ready.
    """
    closed: list[_OpenBucket] = []
    by_dtype: dict[np.dtype[Any], _OpenBucket] = {}
    is_first = True
    for position, spec in enumerate(parameters):
        bucket = by_dtype.get(spec.dtype)
        if bucket is None or not bucket.has_room_for(spec):
            if bucket is not None:
                closed.append(bucket)
            bucket = _OpenBucket(first_bucket_nbytes if is_first else bucket_nbytes)
            by_dtype[spec.dtype] = bucket
            is_first = False
        bucket.add(spec, position)
    ready_order = sorted([*closed, *by_dtype.values()], key=lambda bucket: bucket.last_position)
    return [bucket.specs for bucket in ready_order]


class _OpenBucket:
    """A bucket while it is being filled."""

    def __init__(self, limit_nbytes: int) -> None:
        self.specs: list[ParameterSpec] = []
        self.last_position = -1
        self._room_nbytes = limit_nbytes

    def has_room_for(self, spec: ParameterSpec) -> bool:
        return spec.padded_nbytes <= self._room_nbytes

    def add(self, spec: ParameterSpec, position: int) -> None:
        self.specs.append(spec)
        self.last_position = position
        self._room_nbytes -= spec.padded_nbytes


class BucketLayout:
    """Where each gradient of a bucket lies.

    Parameters
    ----------
    specs : sequence of ParameterSpec
        One or more, of one dtype.

    Attributes
    ----------
    dtype : numpy.dtype
    offsets : tuple of int
        First element of each gradient.
    lanes_offset : int
        First of the lanes; there is one per gradient.
    count : int
        Elements in the bucket.
    """

    def __init__(self, specs: Sequence[ParameterSpec]) -> None:
        self.specs = tuple(specs)
        self.dtype = self.specs[0].dtype
        offsets, end = [], 0
        for spec in self.specs:
            offsets.append(end)
            end += spec.padded_count
        self.offsets = tuple(offsets)
        self.lanes_offset = end
        self.count = end + len(self.specs)


class Bucket:
    """Gradients that are reduced together, as views of one flat array.

    Parameters
    ----------
    layout : BucketLayout
    buffer : numpy.ndarray, shape (layout.count,), dtype layout.dtype
        Its content is overwritten with zeros.

    Attributes
    ----------
    buffer : numpy.ndarray
        What is reduced.
    gradients : dict of str to numpy.ndarray
        The views, by the name of their parameter.
    """

    def __init__(self, layout: BucketLayout, buffer: NumpyArray) -> None:
        # Padding is reduced too: memory as it came may hold signalling or slow values.
        buffer.fill(0)
        self.buffer = buffer
        self.gradients: dict[str, NumpyArray] = {
            spec.name: buffer[offset : offset + spec.count].reshape(spec.shape)
            for spec, offset in zip(layout.specs, layout.offsets, strict=True)
        }
        self._lanes = buffer[layout.lanes_offset :]

    def pack(self, gradients: Mapping[str, NumpyArray]) -> None:
        """Bring this rank's gradients into the bucket.

        A gradient that is the bucket's own view stays where it is; one that is absent
        contributes zeros.
        """
        self._lanes.fill(1)
        for lane, (name, view) in enumerate(self.gradients.items()):
            gradient = gradients.get(name)
            if gradient is None:
                view.fill(0)
                self._lanes[lane] = 0
            elif not is_same_memory(gradient, view):
                np.copyto(view, gradient)

    def contributed(self) -> list[str]:
        """Names of the gradients that some rank gave, once the bucket has been reduced."""
        lanes = self._lanes
        if lanes.all():
            return list(self.gradients)
        return [name for name, lane in zip(self.gradients, lanes, strict=True) if lane]


def is_same_memory(a: NumpyArray, b: NumpyArray) -> bool:
    """Whether two arrays of one shape and dtype are the same elements in the same order."""
    if a is b:
        return True
    # Asking for an address costs a microsecond: first the bounds, which mostly differ.
    return (
        np.may_share_memory(a, b)
        and a.__array_interface__["data"][0] == b.__array_interface__["data"][0]
        and a.strides == b.strides
    )
