"""Data-parallel training: every rank sees other data, all ranks take the same step.

Each rank holds a replica of the model and computes gradients on its share of the batch.
Before the optimizer steps, gradients are averaged over the ranks, bucket by bucket
(`ferro_dist.parallel.ddp.reducer`).

`DDP` is what users construct. It documents what they call, checks arguments, and leaves the rest to
its kinds. Each knows one sort of module: where its parameters are, when a gradient is ready, when
backward has ended.

=====================================  ==================================================
module                                 kind
=====================================  ==================================================
``torch.nn.Module``                    `ferro_dist.integrations.torch.ddp.ddp.TorchDDP`
pytree with JAX arrays                 `ferro_dist.integrations.jax.ddp.JaxDDP`
with ``parameters()`` and ``grads()``  `ferro_dist.parallel.ddp.array_ddp.ArrayDDP`
dict or list of arrays                 `ferro_dist.parallel.ddp.array_ddp.ArrayDDP`
=====================================  ==================================================

Torch modules and arrays are averaged in rounds: `ferro_dist.parallel.ddp.reducing_ddp.ReducingDDP`.
"""

from __future__ import annotations

import functools
import hashlib
import sys
from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Generic, TypeVar, cast

from ferro_dist.arguments import check_root
from ferro_dist.backends.base import Backend
from ferro_dist.parallel.buckets.compression import Compression
from ferro_dist.parallel.ddp.options import Options
from ferro_dist.parallel.ddp.participation import check_weight
from ferro_dist.parallel.ddp.statistics import Statistics
from ferro_dist.parallel.group_checks import check_group
from ferro_dist.parallel.integration import TORCH_MODULE, has_base, integration
from ferro_dist.parallel.interruption import interrupt, telling
from ferro_dist.parallel.manifest import agree_on_manifest

__all__ = ["DDP", "compare"]

ModuleT = TypeVar("ModuleT")
if TYPE_CHECKING:
    Wrapper = Any  # a DDP may be whatever it wraps: what takes a torch.nn.Module takes one
else:
    Wrapper = object


class DDP(Generic[ModuleT], Wrapper):  # noqa: PYI059 - nothing can follow object
    """Keep the replicas of a module equal while each rank trains on its own data.

    All ranks construct it together, with the same arguments. It checks that names, order, shapes
    and dtypes of all parameters, and which of them are trained, are the same on all ranks, then
    gives every rank the parameters of `root`.

    Parameters
    ----------
    module : object
        One of these, whose parameters are float16, bfloat16, float32, float64, complex64 or
        complex128:

        - A ``torch.nn.Module``. DDP is then one, too, and every backward that reaches its
          parameters ends with averaged gradients: `ferro_dist.integrations.torch.ddp.ddp.TorchDDP`.
        - A pytree with JAX arrays: `ferro_dist.integrations.jax.ddp.JaxDDP`.
        - An object with ``parameters()`` and ``grads()``, each of which returns a dict of name to
          array, or a list of arrays in a fixed order; or the dict or list of parameters itself. The
          arrays are writable, from NumPy, CuPy or torch. `sync_gradients` averages the gradients;
          `ferro_dist.parallel.ddp.array_ddp.ArrayDDP` tells how to do so during backward.
    backend : Backend
        The group; closing it is left to the caller. No wait for other ranks lasts longer than its
        `timeout`. Arrays must be where it can move them: in host memory, on the GPU of an
        `NcclBackend`, or some in each for a `HybridBackend`.
    bucket_mb : float, default 25
        Largest bucket, in MiB.
    average : {"mean", "sum", "contributors"}, default "mean"
        How the gradients of the ranks are combined. ``"sum"`` is right if each rank has divided its
        loss by the size of the whole batch. ``"contributors"`` divides each gradient by the number
        of ranks that had one, not by the number of all ranks. A gradient that was zeroed in place,
        as by ``zero_grad(set_to_none=False)``, counts as one. They are counted in the dtype as
        which the gradient travels: in bfloat16 up to 256 ranks, in float16 up to 2048.
    compress : {None, "fp16", "bf16"}, PowerSGD or callable, optional
        How real gradients of 32 and 64 bits travel. A callable gets a
        `ferro_dist.parallel.buckets.bucket.Bucket`, the backend and a `ReduceOp`, and reduces
        ``bucket.gradients`` (or its ``views``) in place, alike on all ranks. It returns None, what
        it has reduced, or a `Work` to wait for.
    overlap : bool or "always", default True
        Whether buckets are reduced while backward goes on. True does so if each rank has two cores:
        a reduction in shared memory keeps a core busy, and where backward and reduction share one,
        running one after the other is faster. Results are the same. If a backward passes several
        wrappers of one group, only the first that it reaches overlaps.
    sync_buffers : bool, default True
        Whether all ranks get the buffers of `root` (such as running means of a BatchNorm) with
        every average. They may be added, removed, resized, converted and replaced later, if all
        ranks do so before the same average.
    root : int, default 0
        The rank whose parameters all ranks start with.
    find_unused_parameters, static_graph, gradient_as_bucket_view : optional
        Accepted for those who come from torch's DDP, but without effect: parameters may be unused
        at any time, on any rank, and gradients always lie in buckets.

    Raises
    ------
    TypeError, ValueError
        Bad arguments, or a module that cannot be wrapped. Nothing was sent.
    CollectiveMismatch
        The ranks hold different modules. Raised on all of them, naming the first
        parameter that differs. The group stays usable.

    Notes
    -----
    Attributes that the wrapper does not have are those of the module, to read, to set and to call:
    ``ddp(inputs)``, ``ddp.learning_rate = 0.1``.

    For torch, replicas that drift apart are noticed by how often each rank has written to its
    parameters: if only some ranks take a step, or forward writes to a parameter what depends on the
    batch, a later backward raises `CollectiveMismatch` on all ranks. This does not see writes
    through ``parameter.data``, writes between a backward inside `no_sync` and the next average
    (with SAM or MAML, replicas are meant to differ there), nor anything inside `join`, over an
    `NcclBackend` or if all gradients are sparse. `verify` compares the parameters themselves.

    Where ``backward`` is given ``inputs``, these must be alike on all ranks, and the loss of each
    rank must depend on one of them: autograd does not tell of a backward that has nothing to do.

    A gradient that no rank has stays None. One that only some ranks have is averaged with zeros for
    the others.

    An exception on a single rank ends the group, as the others would wait for that rank. This holds
    for a torch module's forward (but not in evaluation mode, inside `no_sync` or under
    ``torch.no_grad()``), for backward once it has reached the module's outputs, and while gradients
    are averaged. An exception elsewhere, such as in the loss or its own part of backward, should
    end its rank, which tells the others: if the rank goes on, they wait, and its next batch is
    averaged with their last. To skip a batch that does not fit, check it beforehand, or give all
    ranks another. The group's ``shrink`` makes a new group. A group of one rank goes on.

    Gradients are views of buckets: the next average overwrites what this one left. Copy what you
    want to keep. For torch, a former ``grad`` that somebody still holds is copied first; what else
    there is over its memory, such as ``grad.detach()``, changes.

    On a GPU only streams wait: a call returns when the work is queued, and raises errors that are
    known by then. A host waits for the reduction only if its rank lacks a gradient that another
    rank may have, or with ``average="contributors"``; over a `HybridBackend` it also waits until
    the other ranks have reached the same backward. If a rank is lost, averages under way are
    undefined, as is a step that was queued behind them: go on from a checkpoint. `HybridBackend`
    soon names the rank that failed; NCCL alone tells nobody, and the others find out when a call
    times out. Nor does NCCL compare calls: over an `NcclBackend`, freeze, unfreeze, convert and
    resize parameters on all ranks before the same forward. If one rank does so alone, its calls
    differ from the others', and the result is undefined.

    Examples
    --------
    With torch only the wrapping is new:

    >>> ddp = DDP(model, backend)
    >>> for inputs, targets in my_share_of_the_data:
    ...     loss_fn(ddp(inputs), targets).backward()
    ...     optimizer.step()
    ...     optimizer.zero_grad()

    Otherwise say when gradients are ready:

    >>> ddp = DDP(model, backend)
    >>> for inputs, targets in my_share_of_the_data:
    ...     ddp.backward(ddp(inputs), targets)  # the module's own methods
    ...     ddp.sync_gradients()
    ...     optimizer.step()
    """

    __slots__ = ("_backend", "_options")

    _backend: Backend
    _options: Options

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
        lines = self._wrap(module, options)
        # Drawn at random for this wrapper: two of the same shape, synchronized in different order
        # on different ranks, would otherwise mix up their gradients unnoticed.
        first_tag = agree_on_manifest([f"settings {options}", *lines], backend, op="DDP")
        with telling(functools.partial(interrupt, backend)):
            self._start(options, first_tag)
            self._broadcast(options.root)

    def _start(self, options: Options, first_tag: int) -> None:
        self._backend, self._options = options.backend, options
        self._prepare(options, first_tag)

    if TYPE_CHECKING:  # the kinds get these from the module

        def __call__(self, *args: Any, **kwargs: Any) -> Any: ...

        def __getattr__(self, name: str) -> Any: ...

        def __setattr__(self, name: str, value: Any) -> None: ...

    @property
    def module(self) -> ModuleT:
        """The wrapped module."""
        module = self._held
        if module is None:
            raise ValueError("this DDP gave its module back with into_inner()")
        return module

    @property
    def backend(self) -> Backend:
        """The group over which gradients are averaged."""
        return self._backend

    def into_inner(self) -> ModuleT:
        """Give the module back; the wrapper is useless afterwards.

        Returns
        -------
        object
            `module`.

        Raises
        ------
        ValueError
            It was given back before.
        """
        module = self.module
        self._release()
        return module

    def broadcast_parameters(self, root: int | None = None, params: Any = None) -> Any:
        """Overwrite the parameters and buffers of all ranks with those of one.

        Called by all ranks, after parameters were changed outside training, for instance by loading
        a checkpoint on one rank.

        Parameters
        ----------
        root : int, optional
            The rank whose parameters are used. None means the `root` given to the constructor.
        params : pytree, optional
            Of JAX arrays, by default `module`. Other modules hold their parameters themselves.

        Returns
        -------
        None or pytree
            For JAX, the new parameters, which are those of `module` from now on.

        Raises
        ------
        InvalidRank, TypeError, ValueError
            A bad `root`, or `params` for a module that is no pytree; or the module was given back.
            Nothing was sent.
        CollectiveMismatch
            The ranks named different roots, or trees of different structure. Raised on all ranks;
            the group stays usable.
        """
        _refuse_params("broadcast_parameters", params)
        _ = self.module  # raises if it was given back
        self._broadcast(self._checked_root(root))

    def sync_gradients(self, grads: Any = None, *, weight: float | None = None) -> Any:
        """Replace each gradient by its average over all ranks.

        Called by all ranks, after backward and before the optimizer's step. With torch every
        backward does this by itself; call it for what `no_sync` left alone, and for gradients that
        were set by hand.

        Parameters
        ----------
        grads : dict of str to array, or list of arrays, optional
            With the shapes and dtypes of the parameters; overwritten. By default those of the
            module.
        weight : float, optional
            How much this rank's gradients count, at least 0; given on all ranks or on none. The
            mean is then the weighted mean: with the number of tokens as the weight, and a loss that
            is a mean over tokens, it is the mean over the tokens of all ranks. In a sum each
            gradient is multiplied by its weight. With torch, call backward inside `no_sync` before.

        Returns
        -------
        dict or list
            The gradients that were averaged: `grads` itself, if given.

        Raises
        ------
        TypeError, ValueError
            Gradients that do not fit the parameters, or an invalid weight. Nothing was sent. Or the
            weights of all ranks are 0, or one is for gradients that backward has averaged: raised
            on all; the group stays usable.
        CollectiveMismatch
            Only some ranks gave a weight (inside `join` that is a ValueError), or they train
            different parameters. Raised on all ranks; the group stays usable.

        Notes
        -----
        A gradient that is None, or absent from a dict, counts as zeros. If every rank lacks it, it
        stays absent; if another rank has it, the average takes its place, so that all ranks take
        the same step.

        With torch, and an average other than the mean, gradients that have been averaged already
        are left as they are, unless they were written to since: then they count as this rank's own,
        also in the next backward. To clip them or the like, wait for the last average of a step.
        What is written through ``grad.data``, NumPy or DLPack is not noticed. A module that still
        has such gradients when it is moved or converted is refused.
        """
        _ = self.module  # raises if it was given back
        return self._average(grads, self._checked_weight(weight))

    def no_sync(self) -> AbstractContextManager[None]:
        """Do not average gradients inside the block, to accumulate those of several batches.

        What counts is where backward is called. The first backward after the block averages
        everything that was accumulated, and the average replaces it.
        """
        raise NotImplementedError

    def join(self, *optimizers: Any) -> AbstractContextManager[None]:
        """Let ranks run out of data at different times, inside the block.

        All ranks enter it. A rank that reaches its end goes on to take part in the averages of the
        others, without a gradient of its own, until all have reached it; then all get the
        parameters of a rank that was among the last. A mean counts ranks that are done with zeros;
        with ``average="contributors"`` they do not count.

        Use it with one wrapper at a time: ranks that train two in turn must leave both together.
        Freeze and unfreeze before the block: for a rank that is done, what is trained stays as it
        was. Inside the block each average costs one more small all_gather. At the end all ranks
        have gradients of the same parameters, but not equal ones: set them to zero after the block.
        Before it, too, if `no_sync` has added to averages: all of that would count as the rank's
        own.

        Parameters
        ----------
        *optimizers : torch.optim.Optimizer
            All ranks get their state and options too, from the same rank: an optimizer with
            moments, such as Adam, would otherwise go on differently on ranks that were done early,
            and the replicas would drift apart. The one of `step_in_backward` need not be named. A
            scheduler that steps with every batch, a ``GradScaler``, and the moments of those who
            train without torch are left to the caller.

        Raises
        ------
        TypeError, ValueError
            An argument is no torch optimizer, has parameters of another module, or is a
            `ShardedOptimizer`; or a layer is a `SyncBatchNorm` in training, which waits for all
            ranks. Nothing was sent. Or, at the end of the block and on all ranks, its
            state holds something other than tensors and plain values. The group stays usable.
        RuntimeError
            The block is inside another of the same wrapper. Nothing was sent.
        CollectiveMismatch
            The optimizers of the ranks differ. The group stays usable.
        """
        raise NotImplementedError

    def verify(self, params: Any = None) -> None:
        """Compare the parameters and buffers of all ranks, bit for bit. Called by all ranks.

        Parameters
        ----------
        params : pytree, optional
            Of JAX arrays. Other modules hold their parameters themselves.

        Raises
        ------
        CollectiveMismatch
            Names the first that differs, and which ranks have which value. Raised on all ranks; the
            group stays usable.
        """
        _refuse_params("verify", params)
        _ = self.module  # raises if it was given back
        compare(self._fingerprints(), self._backend, "DDP.verify")

    def statistics(self) -> Statistics:
        """When each bucket of the last average was ready, sent and reduced, on this rank."""
        raise NotImplementedError

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

    # What each kind does in its own way, as it does `no_sync`, `join` and `statistics`

    def _wrap(self, module: ModuleT, options: Options) -> list[str]:
        """Take the module; return a line for each thing that ranks must agree on."""
        raise NotImplementedError

    def _prepare(self, options: Options, first_tag: int) -> None:
        """Set up the averaging of gradients, now that all ranks agree."""
        raise NotImplementedError

    @property
    def _held(self) -> ModuleT | None:
        """The module, or None after it was given back."""
        raise NotImplementedError

    def _release(self) -> None:
        """Let go of the module."""
        raise NotImplementedError

    def _average(self, grads: Any, weight: float | None) -> Any:
        """Do what `sync_gradients` says; the weight has been checked."""
        raise NotImplementedError

    def _broadcast(self, root: int) -> None:
        """Overwrite all that must be equal on all ranks."""
        raise NotImplementedError

    def _fingerprints(self) -> Iterable[tuple[str, bytes]]:
        """Name and content of all that must be equal on all ranks."""
        raise NotImplementedError


# help() shows the arguments of `__new__`, which passes on any.
DDP.__new__.__wrapped__ = DDP.__init__  # type: ignore[attr-defined]


def _kind_of(module: object) -> type[DDP[Any]]:
    """Return the kind for a module."""
    if has_base(module, TORCH_MODULE):
        return cast("type[DDP[Any]]", integration("torch.ddp.ddp").TorchDDP)
    if "jax" in sys.modules and integration("jax.ddp").has_jax_arrays(module):
        return cast("type[DDP[Any]]", integration("jax.ddp").JaxDDP)
    from ferro_dist.parallel.ddp.array_ddp import ArrayDDP

    return ArrayDDP


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
            f"DDP.{method} takes parameters only for JAX; this module holds its own. Name a rank "
            "by root=."
        )


def compare(
    fingerprints: Iterable[tuple[str, bytes]], backend: Backend, op: str, cause: str = ""
) -> None:
    """Raise CollectiveMismatch, on all ranks, for the first name whose content differs."""
    lines = [f"{name}, bits {_digest(content)}" for name, content in fingerprints]
    remedy = f"{cause}broadcast_parameters() gives all ranks those of one."
    agree_on_manifest(lines, backend, op, remedy=remedy)


def _digest(content: bytes) -> str:
    return hashlib.blake2b(content, digest_size=16).hexdigest()
