"""Data-parallel training: every rank sees other data, all ranks take the same step.

Each rank holds a replica of the model and computes gradients on its share of the batch.
Before the optimizer steps, gradients are averaged over the ranks, bucket by bucket:

1. Pack: each gradient goes to its place in a bucket, a flat array in memory that all
   ranks of a host can reach. A gradient that was computed there costs nothing.
2. Reduce: one allreduce for each bucket, in place, with the division fused into it.
3. Put back: the average goes to where the gradient came from.

The three do not interleave: a tied parameter has one gradient under two names, and would
be packed a second time with the sum already in it.

References
----------
S. Li et al., "PyTorch Distributed: Experiences on Accelerating Data Parallel Training",
VLDB 2020: why buckets, and why in reverse order.
"""

from __future__ import annotations

import math
import operator
from typing import TYPE_CHECKING, Any, Generic, TypeVar, cast

import numpy as np

from ferro_dist.collective import allreduce, broadcast
from ferro_dist.errors import InvalidRank
from ferro_dist.parallel.adapter import ModuleAdapter
from ferro_dist.parallel.bucket import Bucket, BucketLayout, assign_buckets
from ferro_dist.parallel.manifest import agree_on_manifest
from ferro_dist.reduce_op import ReduceOp

if TYPE_CHECKING:
    from ferro_dist.backends.base import Backend

__all__ = ["DDP"]

ModuleT = TypeVar("ModuleT")

MIB = 1 << 20
FIRST_BUCKET_NBYTES = MIB
REDUCE_OPS = {"mean": ReduceOp.MEAN, "sum": ReduceOp.SUM}


class DDP(Generic[ModuleT]):
    """Keep the replicas of a module equal while each rank trains on other data.

    All ranks construct it together, with the same arguments. It compares names, order,
    shapes and dtypes of all parameters over the ranks, then gives every rank the
    parameters of `root`.

    Parameters
    ----------
    module : object
        One with ``parameters()`` and ``grads()``, each of which returns a dict of name
        to array, or a list of arrays in a fixed order. Or the dict or list of parameters
        itself. Arrays are NumPy's or others in host memory, writable; float16, bfloat16,
        float32, float64, complex64 or complex128.
    backend : Backend
        The group. It stays the caller's to close.
    bucket_mb : float, default 25
        Largest bucket, in MiB.
    average : {"mean", "sum"}, default "mean"
        What becomes of the gradients of the ranks. ``"sum"`` is right where each rank
        has divided its loss by the size of the whole batch.
    root : int, default 0
        Whose parameters all ranks start with.

    Raises
    ------
    TypeError, ValueError
        Arguments or a module that cannot be wrapped. Nothing was sent.
    CollectiveMismatch
        The ranks hold different modules. Raised on all of them, naming the first
        parameter that differs. The group stays usable.

    Notes
    -----
    What is not an attribute of the wrapper is one of the module, to read, to set and to
    call: ``ddp(inputs)``, ``ddp.learning_rate = 0.1``.

    Examples
    --------
    >>> ddp = DDP(model, backend)
    >>> for inputs, targets in my_share_of_the_data:
    ...     ddp.backward(ddp(inputs), targets)  # the module's own methods
    ...     ddp.sync_gradients()
    ...     optimizer.step()

    To spare the copies in and out of buckets, let the module compute its gradients in
    them: ``model.gradients = ddp.gradient_buffers()``.
    """

    __slots__ = (
        "__weakref__",
        "_adapter",
        "_backend",
        "_buckets",
        "_first_tag",
        "_gave_buffers",
        "_op",
        "_root",
    )

    def __init__(
        self,
        module: ModuleT,
        backend: Backend,
        *,
        bucket_mb: float = 25,
        average: str = "mean",
        root: int = 0,
    ) -> None:
        adapter = ModuleAdapter(module)
        bucket_nbytes = _bucket_nbytes(bucket_mb)
        self._op = _reduce_op(average)
        self._backend = backend
        self._root = _checked_root(root, backend)
        # Drawn by lot for this wrapper: two of one shape, synchronized in different order
        # on different ranks, would otherwise exchange their gradients unnoticed.
        self._first_tag = agree_on_manifest(
            [
                f"settings bucket_mb={bucket_mb}, average={average!r}, root={root}",
                *(f"parameter {i} {spec}" for i, spec in enumerate(adapter.specs.values())),
            ],
            backend,
            op="DDP",
        )
        self._adapter: ModuleAdapter | None = adapter
        self._buckets = _make_buckets(adapter, backend, bucket_nbytes)
        self._gave_buffers = False
        self.broadcast_parameters()

    @property
    def module(self) -> ModuleT:
        """The wrapped module."""
        return cast(ModuleT, self._wrapped().module)

    @property
    def backend(self) -> Backend:
        """The group that gradients are averaged over."""
        return self._backend

    def into_inner(self) -> ModuleT:
        """Give the module back; the wrapper is of no use afterwards."""
        module = self.module
        self._adapter = None
        self._buckets = []
        return module

    def broadcast_parameters(self, root: int | None = None) -> None:
        """Overwrite the parameters of all ranks with those of one.

        Called by all ranks, where parameters were changed outside training: a checkpoint
        that one rank has loaded.

        Parameters
        ----------
        root : int, optional
            Whose parameters. None means the `root` that DDP was constructed with.
        """
        root = self._root if root is None else _checked_root(root, self._backend)
        for array in self._wrapped().parameters().values():
            if array.flags.c_contiguous:
                broadcast(array, self._backend, root, out=array)
            else:
                np.copyto(array, broadcast(array, self._backend, root))

    def gradient_buffers(self) -> dict[str, np.ndarray[Any, Any]]:
        """Return arrays to compute gradients in, which `sync_gradients` need not copy.

        Returns
        -------
        dict of str to numpy.ndarray
            One for each parameter, of its shape and dtype, at first zero; always the
            same arrays. They lie in buckets, and hold the average after
            `sync_gradients`.
        """
        specs = self._wrapped().specs
        self._gave_buffers = True
        views = {name: view for b in self._buckets for name, view in b.gradients.items()}
        return {name: views[name] for name in specs}

    def sync_gradients(self, grads: Any = None) -> Any:
        """Replace each gradient by its average over all ranks.

        Called by all ranks, after backward and before the optimizer's step.

        A gradient that is None, or absent from a dict, counts as zeros. Where every rank
        lacks it, it stays absent; where another rank has it, the average is put in its
        place, so that all ranks take the same step.

        Parameters
        ----------
        grads : dict of str to array, or list of arrays, optional
            Shapes and dtypes as those of the parameters; overwritten. By default what
            the module's ``grads()`` returns; for a dict or list of parameters, the
            `gradient_buffers`.

        Returns
        -------
        dict or list
            The gradients that were averaged: `grads` itself, if given.

        Raises
        ------
        TypeError, ValueError
            Gradients that do not fit the parameters. Nothing was sent.
        """
        adapter = self._wrapped()
        if grads is None and adapter.is_collection:
            grads = self._buffers_in_use()
        gradients = adapter.gradients(grads)
        for bucket in self._buckets:
            bucket.pack(gradients.views)
        for tag, bucket in enumerate(self._buckets, start=self._first_tag):
            allreduce(bucket.buffer, self._backend, self._op, out=bucket.buffer, tag=tag)
        for bucket in self._buckets:
            for name in bucket.contributed():
                gradients.put(name, bucket.gradients[name])
        return gradients.holder

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module."""
        return cast(Any, self.module)(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        # Reached for what the wrapper lacks. Protocols such as copying look up dunder
        # names: the module's own would speak for the wrong object.
        if name.startswith("__") or hasattr(type(self), name):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(self.module, name)

    def __setattr__(self, name: str, value: Any) -> None:
        # What is read through the wrapper is written through it too: a setting left on
        # the wrapper would never reach the module.
        if hasattr(type(self), name):
            object.__setattr__(self, name, value)
        else:
            setattr(self.module, name, value)

    def __repr__(self) -> str:
        if self._adapter is None:
            return "<DDP, module given back>"
        group = f"rank {self._backend.rank} of {self._backend.world_size}"
        size = f"{len(self._adapter.specs)} parameters, {len(self._buckets)} buckets"
        return f"<DDP of {type(self.module).__name__}, {group}, {size}>"

    def _wrapped(self) -> ModuleAdapter:
        if self._adapter is None:
            raise ValueError("this DDP gave its module back with into_inner()")
        return self._adapter

    def _buffers_in_use(self) -> dict[str, np.ndarray[Any, Any]]:
        if not self._gave_buffers:
            raise ValueError(
                "DDP.sync_gradients: a dict or list of parameters has no gradients of its own. "
                "Pass them, or compute them in gradient_buffers()."
            )
        return self.gradient_buffers()


def _make_buckets(adapter: ModuleAdapter, backend: Backend, bucket_nbytes: int) -> list[Bucket]:
    # Reverse order: backward finishes the last layers first, so their bucket fills first.
    ready_order = reversed(adapter.specs.values())
    first_bucket_nbytes = min(FIRST_BUCKET_NBYTES, bucket_nbytes)
    layouts = [
        BucketLayout(specs)
        for specs in assign_buckets(ready_order, bucket_nbytes, first_bucket_nbytes)
    ]
    return [Bucket(layout, backend.empty(layout.count, layout.dtype)) for layout in layouts]


def _reduce_op(average: str) -> ReduceOp:
    if average not in REDUCE_OPS:
        raise ValueError(f"average must be 'mean' or 'sum', not {average!r}")
    return REDUCE_OPS[average]


def _bucket_nbytes(bucket_mb: float) -> int:
    if not 0 < bucket_mb < math.inf:
        raise ValueError(f"bucket_mb must be a positive number, not {bucket_mb!r}")
    return math.ceil(bucket_mb * MIB)


def _checked_root(root: int, backend: Backend) -> int:
    root = operator.index(root)
    if not 0 <= root < backend.world_size:
        raise InvalidRank(
            f"root {root} is not a rank of a group of {backend.world_size}",
            op="DDP",
            rank=backend.rank,
        )
    return root
