"""Buckets: many gradients in one array, so that one allreduce moves them all.

A collective has a fixed cost that small arrays do not justify, and a model has many small
parameters. `assign_buckets` divides parameters into groups of one dtype, `BucketLayout` gives each
its slot in one flat array, `Bucket` is that array. A *slot* is an array, the part of the bucket
that holds one gradient; a *position* counts the gradients of a bucket, a *number* the parameters of
the module.

    | gradient | gradient | gradient | a lane for each gradient | control lanes |

Lanes are elements of the same dtype that travel with the same allreduce. Each rank that contributes
a gradient *i* writes 1 to the lane of *i*; reduced, the lanes tell whether any rank had one, or, if
they are summed, how many. So ranks agree on what was used without another message, and without
walking a graph. Control lanes are the reducer's, for anything else that ranks must agree on.
"""

from __future__ import annotations

import bisect
import functools
import math
import numbers
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ferro_dist import interop
from ferro_dist._native.host import copy_plain
from ferro_dist.arguments import as_float
from ferro_dist.errors import InvalidArray

if TYPE_CHECKING:
    from ferro_dist.work import Work

__all__ = [
    "STREAMED_NBYTES",
    "Bucket",
    "BucketLayout",
    "BucketMemory",
    "ParameterSpec",
    "assign_buckets",
    "bucket_nbytes_of",
    "is_same_view",
    "misplaced",
    "real_parts",
    "view_of",
]

NumpyArray = np.ndarray[Any, Any]

MIB = 1 << 20
FIRST_BUCKET_NBYTES = MIB

ALIGNMENT_NBYTES = 64
"""A cache line, and the widest vector load: where a gradient of a bucket may start."""

STREAMED_NBYTES = MIB
"""From this size on, the slot of a gradient is in no cache when the gradient is copied there."""


@dataclass(frozen=True)
class ParameterSpec:
    """What all ranks must agree on about one parameter.

    Attributes
    ----------
    name : str
    shape : tuple of int
    dtype : numpy.dtype
    axes : tuple of int
        Dimensions from the outermost in memory to the innermost; empty for C order.
    is_on_gpu : bool
        Whether it is in the memory of the rank's GPU.
    """

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    axes: tuple[int, ...] = ()
    is_on_gpu: bool = False

    @property
    def count(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def strides(self) -> tuple[int, ...]:
        """Elements from one to the next along each dimension of its gradient's slot."""
        strides, step = [0] * len(self.shape), 1
        for axis in reversed(self.axes or range(len(self.shape))):
            strides[axis] = step
            step *= max(1, self.shape[axis])
        return tuple(strides)

    @property
    def padded_count(self) -> int:
        """Number of elements up to where the next gradient may start."""
        line = max(1, ALIGNMENT_NBYTES // self.dtype.itemsize)
        return -(-self.count // line) * line

    @property
    def padded_nbytes(self) -> int:
        """Size of the gradient in a bucket."""
        return self.padded_count * self.dtype.itemsize

    @property
    def is_streamed(self) -> bool:
        """Whether its gradient is copied past the caches: a third less goes through memory so."""
        is_large = self.padded_nbytes >= STREAMED_NBYTES
        return is_large and not (self.axes or self.is_on_gpu)

    def __str__(self) -> str:
        order = f" in the order of dimensions {self.axes}" if self.axes else ""
        memory = " on the GPU" if self.is_on_gpu else ""
        return f"{self.name!r} {self.dtype.name} {self.shape}{order}{memory}"


def bucket_nbytes_of(bucket_mb: Any, caller: str) -> int:
    """Return the size of the largest bucket.

    Parameters
    ----------
    bucket_mb : float
        In MiB, as the user gives it.
    caller : str
        The name of the class that takes it.

    Raises
    ------
    ValueError
        It is not a positive number.
    """
    is_number = isinstance(bucket_mb, numbers.Real) and not isinstance(bucket_mb, bool)
    mib = as_float(bucket_mb) if is_number else math.nan
    if not 0 < mib < math.inf:
        raise ValueError(f"{caller}: bucket_mb must be a positive number, not {bucket_mb!r}")
    return math.ceil(mib * MIB)


def assign_buckets(
    parameters: Iterable[ParameterSpec],
    bucket_nbytes: int,
    first_bucket_nbytes: int = FIRST_BUCKET_NBYTES,
) -> list[list[ParameterSpec]]:
    """Divide parameters into buckets of one dtype, in one memory, of bounded size.

    Greedy, in one pass: each dtype has one open bucket in each memory, which is closed by the
    first parameter that does not fit.

    Parameters
    ----------
    parameters : iterable of ParameterSpec
        In the order in which their gradients become ready.
    bucket_nbytes : int
        The largest bucket. A parameter that is larger has a bucket to itself.
    first_bucket_nbytes : int
        The first bucket is closed once it holds so much, if that is less. A small one is filled
        early, so that communication starts while most of backward is still to come.

    Returns
    -------
    list of list of ParameterSpec
        Every parameter once, in the order given within its bucket; buckets in the order
        in which their last gradient becomes ready.
    """
    closed: list[_OpenBucket] = []
    by_kind: dict[tuple[np.dtype[Any], bool], _OpenBucket] = {}
    # Not its limit: a large parameter would close it while there is next to nothing in it.
    enough_nbytes = first_bucket_nbytes if first_bucket_nbytes < bucket_nbytes else math.inf
    for position, spec in enumerate(parameters):
        kind = spec.dtype, spec.is_on_gpu
        bucket = by_kind.get(kind)
        if bucket is None or not bucket.has_room_for(spec):
            if bucket is not None:
                closed.append(bucket)
            bucket = _OpenBucket(bucket_nbytes, enough_nbytes)
            by_kind[kind] = bucket
            enough_nbytes = math.inf
        bucket.add(spec, position)
    ready_order = sorted([*closed, *by_kind.values()], key=lambda bucket: bucket.last_position)
    return [bucket.specs for bucket in ready_order]


class _OpenBucket:
    """A bucket while it is being filled."""

    def __init__(self, limit_nbytes: int, enough_nbytes: float) -> None:
        self.specs: list[ParameterSpec] = []
        self.last_position = -1
        self._limit_nbytes = limit_nbytes
        self._enough_nbytes = enough_nbytes
        self._nbytes = 0

    def has_room_for(self, spec: ParameterSpec) -> bool:
        is_open = self._nbytes < self._enough_nbytes
        return is_open and self._nbytes + spec.padded_nbytes <= self._limit_nbytes

    def add(self, spec: ParameterSpec, position: int) -> None:
        self.specs.append(spec)
        self.last_position = position
        self._nbytes += spec.padded_nbytes


class BucketLayout:
    """Where each gradient of a bucket lies.

    Parameters
    ----------
    specs : sequence of ParameterSpec
        One or more, of one dtype.
    num_controls : int
        Control lanes.

    Attributes
    ----------
    dtype : numpy.dtype
    names : tuple of str
        Of the parameters.
    offsets : tuple of int
        First element of each gradient.
    strides : list of tuple of int
        Of each gradient's slot, in elements.
    streamed : list of int
        Positions of gradients that are copied past the caches.
    lanes_offset : int
        First of the lanes of gradients.
    controls_offset : int
        First of the control lanes.
    count : int
        Elements in the bucket.
    """

    def __init__(self, specs: Sequence[ParameterSpec], num_controls: int = 0) -> None:
        self.specs = tuple(specs)
        self.dtype = self.specs[0].dtype
        self.names = tuple(spec.name for spec in self.specs)
        offsets, end = [], 0
        for spec in self.specs:
            offsets.append(end)
            end += spec.padded_count
        self.offsets = tuple(offsets)
        self.strides = [spec.strides for spec in self.specs]
        self.streamed = [n for n, each in enumerate(self.specs) if each.is_streamed]
        self.lanes_offset = end
        self.controls_offset = end + len(self.specs)
        self.count = self.controls_offset + num_controls

    @property
    def nbytes(self) -> int:
        """Size of the bucket."""
        return self.count * self.dtype.itemsize


class Bucket:
    """Gradients that are reduced together, as views of one flat array in host memory.

    `ferro_dist.parallel.buckets.gpu_bucket.GpuBucket` is the same in GPU memory. It overrides what
    differs there; all other methods leave alone what the host cannot reach.

    Parameters
    ----------
    index : int
        Where it stands in the order of all buckets.
    members : sequence of int
        The number of each gradient's parameter. Also kept as `member_set`.
    layout : BucketLayout
    buffer : numpy.ndarray, shape (layout.count,), dtype layout.dtype
        Its content is overwritten with zeros.
    as_array : callable
        Makes an array of the module's library from a NumPy array, over the same memory.
    wire : numpy.ndarray, optional
        What is reduced instead of the buffer: as many elements of another dtype.
    kept : dict, optional
        What a user's own reduction keeps for parameters, by name. It is passed on to the buckets
        that replace this one, and is empty at first.

    Attributes
    ----------
    flat : array
        The buffer, in the module's library.
    views : list of array
        The gradients' slots, as arrays of the module's library.
    lanes : numpy.ndarray, shape (gradients,)
    controls : numpy.ndarray
    num_missing : int
        Gradients that are not ready yet.
    is_packed, is_leaving : bool
        Whether this rank's gradients are in it; whether its reduction may be under way.
    is_full : bool
        Whether this rank gave all gradients of this round.
    work : Work or None
        Its reduction while that is under way.
    """

    is_on_gpu = False

    buffer: Any
    flat: Any
    wire: Any
    views: list[Any]
    lanes: NumpyArray
    controls: NumpyArray

    def __init__(
        self,
        index: int,
        members: Sequence[int],
        layout: BucketLayout,
        buffer: NumpyArray,
        as_array: Callable[[NumpyArray], Any],
        wire: NumpyArray | None = None,
        kept: dict[str, Any] | None = None,
    ) -> None:
        # Padding is reduced, too: uninitialized memory may hold signalling or slow values.
        buffer.fill(0)
        self._set_layout(index, members, layout, kept)
        self._as_array = as_array
        self.buffer = buffer
        self.flat = as_array(buffer)
        self.wire = buffer if wire is None else wire
        self._flat_wire = self.flat if wire is None else as_array(wire)
        self.views = list(map(self.new_view, range(len(members))))
        self.lanes = buffer[layout.lanes_offset : layout.controls_offset]
        self.controls = buffer[layout.controls_offset :]
        self.reset()

    def _set_layout(
        self,
        index: int,
        members: Sequence[int],
        layout: BucketLayout,
        kept: dict[str, Any] | None,
    ) -> None:
        self.index = index
        self.members = tuple(members)
        self.member_set = frozenset(members)
        self.layout = layout
        self.kept: dict[str, Any] = {} if kept is None else kept

    def reset(self) -> None:
        """Expect all gradients again."""
        self.num_missing = len(self.members)
        self.is_packed = self.is_leaving = self.is_full = False
        self.work: Work | None = None

    @property
    def extent(self) -> tuple[int, int]:
        """Address of its first byte, and of the first one after it."""
        whole = interop.as_view(self.flat)
        return whole.address, whole.address + whole.nbytes

    @property
    def gradients(self) -> Any:
        """The flat array without its lanes."""
        return self.flat[: self.layout.lanes_offset]

    # Lanes

    def clear(self) -> None:
        """Fill it with zeros, which say that this rank contributes nothing."""
        self.buffer.fill(0)
        self.is_full = False

    def mark(self, is_contributed: Sequence[bool] | None = None) -> None:
        """Write into the lanes which gradients this rank contributes; None for all of them."""
        self.is_full = is_contributed is None or all(is_contributed)
        self.lanes[:] = 1 if is_contributed is None else is_contributed

    def contributors(self) -> list[int]:
        """How many ranks contributed each gradient, once the bucket has been summed."""
        counts: list[int] = self._reduced_lanes().real.astype(int).tolist()
        return counts

    def contributed(self) -> list[bool] | None:
        """Whether any rank contributed each gradient, once it was reduced; None if all were."""
        if self.is_full:
            return None
        is_given = self._reduced_lanes() != 0
        if is_given.all():
            return None
        flags: list[bool] = is_given.tolist()
        return flags

    def mark_all(self) -> list[tuple[Any, Any]]:
        """Do what `mark` does if all gradients are there, save for what this returns.

        Returns
        -------
        list of tuple of array
            Targets, and what the caller copies to each, as it copies gradients to their slots.
        """
        self.mark()
        return []

    def set_control(self, control: int, is_set: bool) -> None:
        """Write a control lane, by which this rank tells the others. Called after `mark`."""
        self.controls[control] = is_set

    def has_control(self, control: int) -> bool:
        """Whether any rank has set a control lane, once the bucket was reduced."""
        return bool(self.controls[control])

    def _reduced_lanes(self) -> NumpyArray:
        return self.lanes

    # Gradients

    def new_view(self, position: int) -> Any:
        """Return the slot of a gradient, as an array of the module's library."""
        # Made from the buffer: torch's views of one tensor share its version counter.
        offset, spec = self.layout.offsets[position], self.layout.specs[position]
        return self._as_array(view_of(self.buffer, offset, spec))

    @functools.cached_property
    def own_views(self) -> list[Any]:
        """The slots of all gradients once more, in arrays that no user ever has in hand."""
        return list(map(self.new_view, range(len(self.members))))

    @functools.cached_property
    def addresses(self) -> list[int]:
        """Where in memory the slot of each gradient begins; 0 for one without elements."""
        start, nbytes = self.extent[0], self.layout.dtype.itemsize
        slots = zip(self.layout.specs, self.layout.offsets, strict=True)
        return [start + offset * nbytes if spec.count else 0 for spec, offset in slots]

    def put_in(self, position: int, gradient: Any) -> None:
        """Copy a gradient to its slot, where it may be already; zeros for None."""
        view = self.views[position]
        if gradient is None:
            view.fill(0)
        elif copy_plain(
            [view], [gradient], streamed_nbytes=STREAMED_NBYTES, limit_nbytes=sys.maxsize
        ):
            np.copyto(view, gradient)

    def take_out(self, position: int, gradient: Any) -> None:
        """Overwrite a gradient with what is in its slot, which may be the gradient itself."""
        view = self.views[position]
        if not is_same_view(gradient, view):
            np.copyto(gradient, view)

    def scale(self, factor: float) -> None:
        """Multiply all gradients. Times zero they become zero, even NaN."""
        for part in real_parts(self.gradients, self.layout.dtype):
            if factor:
                part *= factor
            else:
                part[...] = 0

    def to_wire(self) -> None:
        """Copy the content into what is reduced."""
        if self.wire is not self.buffer:
            self._flat_wire[...] = self.flat

    def from_wire(self) -> None:
        """Copy back what was reduced."""
        if self.wire is not self.buffer:
            self.flat[...] = self._flat_wire

    def contains(self, thing: object) -> bool:
        """Whether this is an array in the bucket's memory."""
        try:
            view = interop.as_view(thing)
        except (TypeError, InvalidArray):  # no array
            return False
        if not view.nbytes:  # an empty array has no address
            return True
        start, stop = self.extent
        return start <= view.address and view.address + view.nbytes <= stop

    def copy(self) -> Any:
        """Return a copy of the content, for `add`."""
        return self._as_array(self.buffer.copy())

    def add(self, content: Any) -> None:
        """Add earlier content."""
        flat = self.flat
        flat += content

    # Streams of a GPU

    def note_stream(self) -> None:
        """Note the stream on which a gradient has become ready."""

    def join_streams(self) -> None:
        """Let the current stream wait for those on which gradients have become ready."""

    def release_streams(self) -> None:
        """Let those streams wait in turn, before they free the gradients that were packed."""


class BucketMemory:
    """Where some buckets lie.

    Attributes
    ----------
    start, stop : int
        Addresses between which all of them lie, and perhaps other things.
    """

    def __init__(self, buckets: Iterable[Bucket] = ()) -> None:
        # Where each begins and ends, in turns, as buckets do not overlap.
        self._bounds = sorted(bound for bucket in buckets for bound in bucket.extent)
        self.start = self._bounds[0] if self._bounds else 0
        self.stop = self._bounds[-1] if self._bounds else 0

    def contains(self, address: int) -> bool:
        """Whether a byte belongs to a bucket."""
        return bisect.bisect_right(self._bounds, address) % 2 == 1

    def contains_any(self, addresses: Iterable[int]) -> bool:
        """Whether any of these bytes belongs to a bucket."""
        bounds, find = self._bounds, bisect.bisect_right
        return 1 in [find(bounds, address) % 2 for address in addresses]


def misplaced(name: str) -> RuntimeError:
    """Return the error for a gradient in others' slots, where it would be overwritten."""
    return RuntimeError(
        f"DDP: the gradient of {name!r} shares memory with that of another parameter, or with its "
        "own transposed. Let it be a copy."
    )


def view_of(buffer: Any, offset: int, spec: ParameterSpec) -> Any:
    """View of the elements of one gradient, in the memory order of its parameter."""
    elements = buffer[offset : offset + spec.count]
    if not spec.axes:
        return elements.reshape(spec.shape)
    stored = elements.reshape([spec.shape[axis] for axis in spec.axes])
    return stored.transpose([spec.axes.index(axis) for axis in range(stored.ndim)])


def real_parts(array: Any, dtype: np.dtype[Any]) -> tuple[Any, ...]:
    """Return views of the real and the imaginary parts, or the array itself if it is real.

    Averages are those of the parts. Libraries multiply and divide complex numbers by complex
    ones, which makes NaN of what stands beside an infinity.
    """
    return (array.real, array.imag) if dtype.kind == "c" else (array,)


def is_same_view(a: NumpyArray, b: NumpyArray) -> bool:
    """Whether two arrays of one shape and dtype are the same elements in the same order."""
    if a is b:
        return True
    # Asking for an address costs a microsecond: compare first the bounds, which mostly differ.
    return (
        np.may_share_memory(a, b)
        and a.__array_interface__["data"][0] == b.__array_interface__["data"][0]
        and a.strides == b.strides
    )
