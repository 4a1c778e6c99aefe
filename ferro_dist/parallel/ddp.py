"""Data-parallel training: every rank sees other data, all ranks take the same step.

Each rank holds a replica of the model and computes gradients on its share of the batch.
Before the optimizer steps, gradients are averaged over the ranks, bucket by bucket
(`ferro_dist.parallel.reducer`).

`DDP` is what users construct and what all kinds have in common. A kind knows one sort of
module: where its parameters are, when a gradient is there, when backward has ended.

=====================================  ==================================================
module                                 kind
=====================================  ==================================================
``torch.nn.Module``                    `ferro_dist.integrations.torch_ddp.TorchDDP`
pytree with arrays of JAX              `ferro_dist.integrations.jax_ddp.JaxDDP`
with ``parameters()`` and ``grads()``  `ferro_dist.parallel.array_ddp.ArrayDDP`
dict or list of arrays                 `ferro_dist.parallel.array_ddp.ArrayDDP`
=====================================  ==================================================
"""

from __future__ import annotations

import abc
import contextlib
import hashlib
import importlib
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Generic, TypeVar, cast

from ferro_dist.arguments import check_root
from ferro_dist.backends.base import Backend
from ferro_dist.parallel.attendance import Attendance, check_weight
from ferro_dist.parallel.compression import Compression
from ferro_dist.parallel.interruption import interrupt, telling
from ferro_dist.parallel.manifest import agree_on_manifest
from ferro_dist.parallel.options import Options, check_group
from ferro_dist.parallel.reducer import NoGradients, Reducer
from ferro_dist.parallel.statistics import Statistics

__all__ = ["DDP", "Kind"]

ModuleT = TypeVar("ModuleT")


class Kind(abc.ABC):
    """What `DDP` asks of those who know one sort of module.

    Beside `DDP`, not above it: a class with abstract methods could not be what users construct.
    """

    __slots__ = ()

    @abc.abstractmethod
    def _adopt(self, module: Any, options: Options) -> list[str]:
        """Look at the module; return a line for each thing that ranks must agree on."""

    @abc.abstractmethod
    def _prepare(self, options: Options, first_tag: int) -> None:
        """Make what averages gradients, now that all ranks agree."""

    @property
    @abc.abstractmethod
    def _held(self) -> Any:
        """The module; None once it was given back."""

    @abc.abstractmethod
    def _release(self) -> None:
        """Let go of the module."""

    @abc.abstractmethod
    def _average(self, grads: Any, weight: float | None) -> Any:
        """Do what `DDP.sync_gradients` says, with a weight that was checked."""

    @abc.abstractmethod
    def _broadcast(self, root: int) -> None:
        """Overwrite all that must be equal on all ranks."""

    @abc.abstractmethod
    def _fingerprints(self) -> Iterable[tuple[str, bytes]]:
        """Name and content of all that must be equal on all ranks."""

    def _lines_of_optimizers(self, optimizers: Sequence[Any]) -> list[str]:
        """Return a line for each thing that ranks must agree on in optimizers given to `join`."""
        if optimizers:
            kind = type(optimizers[0]).__name__
            raise TypeError(f"DDP.join takes optimizers of torch, not {kind}")
        return []

    def _broadcast_optimizers(self, optimizers: Sequence[Any], root: int) -> None:
        """Overwrite the state of optimizers: those given to `join`, and any that DDP steps."""
        assert not optimizers  # they have been refused


class DDP(Generic[ModuleT]):
    """Keep the replicas of a module equal while each rank trains on other data.

    All ranks construct it together, with the same arguments. It compares names, order,
    shapes and dtypes of all parameters over the ranks, and which of them are trained, then
    gives every rank the parameters of `root`.

    Parameters
    ----------
    module : object
        A ``torch.nn.Module``: DDP is one too, and every backward that reaches its
        parameters ends with averaged gradients. Or a pytree of parameters in which there are
        arrays of JAX: see `ferro_dist.integrations.jax_ddp.JaxDDP`. Or an object with
        ``parameters()`` and ``grads()``, each of which returns a dict of name to array, or a
        list of arrays in a fixed order; or the dict or list of parameters itself:
        `sync_gradients` averages their gradients. Arrays are writable, of NumPy, CuPy or torch;
        float16, bfloat16, float32, float64, complex64 or complex128.
    backend : Backend
        The group. It stays the caller's to close. Arrays are where it moves them: in host
        memory, on the GPU of an `NcclBackend`, or some here and some there for a `HybridBackend`.
    bucket_mb : float, default 25
        Largest bucket, in MiB.
    average : {"mean", "sum", "contributors"}, default "mean"
        What becomes of the gradients of the ranks. ``"sum"`` is right where each rank
        has divided its loss by the size of the whole batch. ``"contributors"`` divides each
        gradient by the number of ranks that had one, in place of the number of ranks.
    compress : {None, "fp16", "bf16"} or callable, optional
        How real gradients of 32 and 64 bits travel. A callable gets a
        `ferro_dist.parallel.bucket.Bucket`, the backend and a `ReduceOp`, and reduces
        ``bucket.gradients`` (or its ``views``) in place, the same on all ranks. It returns
        nothing, what it has reduced, or a `Work` to wait for.
    overlap : bool or "always", default True
        Whether buckets are reduced while backward goes on. True does so where each rank has two
        cores: a reduction in shared memory is work for a core, and where backward
        and reduction share one, doing one after the other is faster. Results are the same.
    sync_buffers : bool, default True
        Whether all ranks get the buffers of `root` (running means of a BatchNorm) with
        every average: those that the module has when it is wrapped.
    root : int, default 0
        Whose parameters all ranks start with.
    find_unused_parameters, static_graph, gradient_as_bucket_view : optional
        Accepted for those who come from torch's DDP, and of no effect: parameters may be
        unused at any time, on any rank, and gradients always lie in buckets.

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

    A gradient that no rank has stays None. One that some ranks have is averaged with zeros
    for the others.

    An exception on one rank alone ends the group, as the others would wait for that rank:
    in a torch module's forward, save in evaluation mode, inside `no_sync` and under
    ``torch.no_grad()``; in backward, once that has come to the module's outputs; and while
    gradients are averaged. An exception elsewhere, in the computation of the loss say, is to end
    its rank: one that goes on with its next batch has it averaged with the others' last. To skip
    a batch that does not fit, check it before, or give all ranks another. The group's ``shrink``
    makes a new one. A group of one rank goes on.

    Gradients are views of buckets: the next average overwrites what this one left. Copy what
    is to be kept.

    On a GPU nothing waits but streams: a call returns when the work is queued, and raises what
    is known by then. Only where a rank lacks a gradient, which another one may have, does its
    host wait for the reduction, and with ``average="contributors"``; over a `HybridBackend` it
    waits until the other hosts have come to the same backward. If a rank is lost, averages
    under way are undefined, and a step that was queued behind them as well: go on from a
    checkpoint. `HybridBackend` names the rank that failed, soon; NCCL alone tells nobody, and
    the others find out when a call's time is up. Nor does it compare calls: over an `NcclBackend`
    freeze, unfreeze and convert parameters on all ranks before the same forward. One that does so
    alone makes another call than the others, and what comes of that is undefined.

    Examples
    --------
    With torch nothing but the wrapping changes:

    >>> ddp = DDP(model, backend)
    >>> for inputs, targets in my_share_of_the_data:
    ...     loss_fn(ddp(inputs), targets).backward()
    ...     optimizer.step()
    ...     optimizer.zero_grad()

    Elsewhere say when gradients are there:

    >>> ddp = DDP(model, backend)
    >>> for inputs, targets in my_share_of_the_data:
    ...     ddp.backward(ddp(inputs), targets)  # the module's own methods
    ...     ddp.sync_gradients()
    ...     optimizer.step()
    """

    __slots__ = ("_backend", "_last_present", "_no_sync_depth", "_options", "_reducer")

    _backend: Backend
    _options: Options
    _reducer: Reducer  # of kinds that have rounds
    _no_sync_depth: int
    _last_present: tuple[int, ...]

    def __new__(cls, module: ModuleT, *args: Any, **kwargs: Any) -> DDP[ModuleT]:
        kind = _kind_of(module) if cls is DDP else cls
        return object.__new__(kind)

    def __init__(
        self,
        module: ModuleT,
        backend: Backend,
        *,
        bucket_mb: float = 25,
        average: str = "mean",
        compress: Compression = None,
        overlap: bool | str = True,
        sync_buffers: bool = True,
        root: int = 0,
        find_unused_parameters: bool | None = None,
        static_graph: bool | None = None,
        gradient_as_bucket_view: bool | None = None,
    ) -> None:
        _check_arguments(module, backend)
        options = Options(backend, bucket_mb, average, compress, overlap, sync_buffers, root)
        lines = self._kind._adopt(module, options)
        # Drawn by lot for this wrapper: two of one shape, synchronized in different order
        # on different ranks, would otherwise exchange their gradients unnoticed.
        first_tag = agree_on_manifest([f"settings {options}", *lines], backend, op="DDP")
        self._start(options, first_tag)
        self._kind._broadcast(options.root)

    @property
    def _kind(self) -> Kind:
        return cast(Kind, self)  # `__new__` has made it one

    def _start(self, options: Options, first_tag: int) -> None:
        self._backend, self._options = options.backend, options
        self._no_sync_depth, self._last_present = 0, ()
        self._kind._prepare(options, first_tag)

    if TYPE_CHECKING:  # what the kinds have of the module

        def __call__(self, *args: Any, **kwargs: Any) -> Any: ...

        def __getattr__(self, name: str) -> Any: ...

        def __setattr__(self, name: str, value: Any) -> None: ...

    @property
    def module(self) -> ModuleT:
        """The wrapped module."""
        module: ModuleT | None = self._kind._held
        if module is None:
            raise ValueError("this DDP gave its module back with into_inner()")
        return module

    @property
    def backend(self) -> Backend:
        """The group that gradients are averaged over."""
        return self._backend

    def into_inner(self) -> ModuleT:
        """Give the module back; the wrapper is of no use afterwards."""
        module = self.module
        self._kind._release()
        return module

    def broadcast_parameters(self, root: int | None = None, params: Any = None) -> Any:
        """Overwrite the parameters and buffers of all ranks with those of one.

        Called by all ranks, where parameters were changed outside training: a checkpoint
        that one rank has loaded.

        Parameters
        ----------
        root : int, optional
            Whose parameters. None means the `root` that DDP was constructed with.
        params : pytree, optional
            Of arrays of JAX, which are returned anew. Other modules hold their parameters.
        """
        _refuse_params("broadcast_parameters", params)
        _ = self.module  # raises if it was given back
        self._kind._broadcast(self._checked_root(root))

    def sync_gradients(self, grads: Any = None, *, weight: float | None = None) -> Any:
        """Replace each gradient by its average over all ranks.

        Called by all ranks, after backward and before the optimizer's step. With torch
        every backward does it by itself; this is for what `no_sync` left alone, and for
        gradients that were set by hand.

        Parameters
        ----------
        grads : dict of str to array, or list of arrays, optional
            Shapes and dtypes as those of the parameters; overwritten. By default those of
            the module.
        weight : float, optional
            What this rank's gradients count, at least 0; on all ranks or on none. The mean is
            then the weighted mean: with the number of tokens as the weight, and a loss that
            is a mean over tokens, that over the tokens of all ranks. A sum has each
            gradient multiplied by its weight.

        Returns
        -------
        dict or list
            The gradients that were averaged: `grads` itself, if given.

        Raises
        ------
        TypeError, ValueError
            Gradients that do not fit the parameters, or a weight that is none. Nothing was
            sent. Or the weights of all ranks are 0: raised on all; the group stays usable.
        CollectiveMismatch
            Only some ranks gave a weight (inside `join` that is a ValueError), or they train
            other parameters. Raised on all ranks; the group stays usable.

        Notes
        -----
        A gradient that is None, or absent from a dict, counts as zeros. Where every rank
        lacks it, it stays absent; where another rank has it, the average is put in its
        place, so that all ranks take the same step.

        With torch, and an average other than the mean, gradients that were averaged already
        are left as they are, unless they were written to since.
        """
        _ = self.module  # raises if it was given back
        return self._kind._average(grads, self._checked_weight(weight))

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Leave gradients as they are, inside the block: to accumulate those of several batches.

        What counts is where backward is called. The first backward after the block averages
        all that was accumulated, in place of it.
        """
        self._no_sync_depth += 1
        try:
            yield
        finally:
            self._no_sync_depth -= 1

    @contextlib.contextmanager
    def join(self, *optimizers: Any) -> Iterator[None]:
        """Let ranks run out of data one by one, inside the block.

        All ranks enter it. A rank that leaves it goes on to take part in the averages of the
        others, without a gradient of its own, until all have left; then all get the parameters
        of one that was there to the last. A mean counts those that have left with zeros; with
        ``average="contributors"`` they do not count.

        One wrapper at a time: ranks that train two in turn must leave both together. Inside
        the block each average costs one more small all_gather. Gradients are not sent: set them to
        zero after the block.

        Parameters
        ----------
        *optimizers : torch.optim.Optimizer
            All ranks get their state and options too, from the same rank: one with moments, such
            as Adam, would otherwise go on differently on ranks that have left early, and the
            replicas drift apart. That of `step_in_backward` needs no mention. A scheduler that
            steps with every batch and a ``GradScaler`` are the caller's to bring along, and so are
            the moments of who trains without torch.

        Raises
        ------
        TypeError, ValueError
            It is no optimizer of torch, has parameters of another module, or is a
            `ShardedOptimizer`. Nothing was sent. Or, at the end of the block and on all ranks, its
            state holds other things than tensors and plain values. The group stays usable.
        CollectiveMismatch
            The optimizers of the ranks differ. The group stays usable.
        """
        lines = self._kind._lines_of_optimizers(optimizers)
        agree_on_manifest(lines, self._backend, op="DDP.join")
        self._reducer.is_attended, self._last_present = True, ()
        try:
            yield
            while self._attend():
                pass
        finally:
            self._reducer.is_attended = False
        self._follow_the_last(optimizers)

    def _follow_the_last(self, optimizers: Sequence[Any]) -> None:
        root = min(self._last_present, default=None)
        self.broadcast_parameters(root)
        if root is not None:  # else nobody had a batch, and all is as it was
            self._kind._broadcast_optimizers(optimizers, root)

    def verify(self, params: Any = None) -> None:
        """Compare the parameters and buffers of all ranks, bit for bit. Called by all ranks.

        Parameters
        ----------
        params : pytree, optional
            Of arrays of JAX. Other modules hold their parameters.

        Raises
        ------
        CollectiveMismatch
            Names the first that differs, and which ranks have what. Raised on all ranks; the
            group stays usable.
        """
        _refuse_params("verify", params)
        _ = self.module  # raises if it was given back
        fingerprints = self._kind._fingerprints()
        lines = [f"{name}, bits {_digest(content)}" for name, content in fingerprints]
        agree_on_manifest(lines, self._backend, op="DDP.verify")

    def statistics(self) -> Statistics:
        """When each bucket of the last average was ready, sent and reduced, on this rank."""
        return self._reducer.statistics

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError(
            "A DDP cannot be pickled or copied: it is one rank's part of a group. Save or copy its "
            "module's parameters, or the module, and wrap that on all ranks."
        )

    def _checked_weight(self, weight: float | None) -> float | None:
        if weight is not None and self._options.average == "contributors":
            raise ValueError(
                "DDP.sync_gradients: average='contributors' counts ranks, and takes no weight"
            )
        return check_weight(weight)

    def _checked_root(self, root: int | None) -> int:
        if root is None:
            return self._options.root
        backend = self._backend
        return check_root("DDP", root, rank=backend.rank, world_size=backend.world_size)

    # Rounds, of kinds that have a `Reducer`

    def _after_round(self, root: int, attendance: Attendance | None) -> None:
        """Do what all ranks do once gradients are averaged."""

    def _finish_round(self) -> bool:
        """Reduce what is left of the open round; whether any rank took part."""
        with telling(self._tell_the_others):
            attendance = self._reducer.finish()
            if attendance is not None and not attendance.present:
                return False
            if attendance is not None:
                self._last_present = attendance.present
            self._after_round(self._root_among(attendance), attendance)
        return True

    def _tell_the_others(self, error: BaseException) -> None:
        interrupt(self._backend, error)

    def _attend(self) -> bool:
        """Take part in a round of the others; whether there was anybody else."""
        self._reducer.begin(NoGradients(), is_present=False)
        return self._finish_round()

    def _root_among(self, attendance: Attendance | None) -> int:
        root = self._options.root
        if attendance is None or root in attendance.present:
            return root
        return min(attendance.present)


def _kind_of(module: object) -> type[DDP[Any]]:
    """Return the kind for a module, told by the classes that its own descends from."""
    # Integrations by their names: what knows a framework stands above this package, and is
    # imported once somebody has brought such a module along.
    for base in type(module).__mro__:
        if base.__module__.partition(".")[0] == "torch" and base.__name__ == "Module":
            return cast("type[DDP[Any]]", _integration("torch_ddp").TorchDDP)
    if "jax" in sys.modules and _integration("jax_ddp").has_jax_arrays(module):
        return cast("type[DDP[Any]]", _integration("jax_ddp").JaxDDP)
    from ferro_dist.parallel.array_ddp import ArrayDDP

    return ArrayDDP


def _integration(name: str) -> Any:
    return importlib.import_module(f"ferro_dist.integrations.{name}")


def _check_arguments(module: object, backend: object) -> None:
    if isinstance(module, Backend):
        raise TypeError(
            "DDP takes the module first, then the backend: DDP(module, backend). "
            f"Here the module is a {type(module).__name__}."
        )
    if isinstance(module, type):
        raise TypeError(f"DDP takes a module, not its class {module.__name__}")
    check_group("DDP", backend)


def _refuse_params(method: str, params: object) -> None:
    if params is not None:
        raise TypeError(
            f"DDP.{method} takes parameters of JAX alone; this module holds its own. A rank is "
            "named by root=."
        )


def _digest(content: bytes) -> str:
    return hashlib.blake2b(content, digest_size=16).hexdigest()
