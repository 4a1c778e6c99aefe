"""DDP of pytrees of JAX arrays, which are immutable: averages are returned."""

from __future__ import annotations

import contextlib
from collections.abc import Hashable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from ferro_dist.errors import CollectiveMismatch, UnsupportedOp
from ferro_dist.integrations.jax.gradients import ReducerContext, TreeReducer, await_callbacks
from ferro_dist.integrations.jax.leaves import (
    as_jax_array,
    broadcast_leaf,
    check_movable,
    check_values,
    delivered,
    describe_leaves,
    float_positions,
    is_array,
    is_number,
    is_traced,
    refuse_unaveraged,
    specs_of,
    text_of,
)
from ferro_dist.integrations.jax.tap import tap_leaves
from ferro_dist.parallel.buckets.averaging import REDUCE_OPS
from ferro_dist.parallel.buckets.compression import name_of
from ferro_dist.parallel.ddp.ddp import DDP, compare
from ferro_dist.parallel.manifest import agree_on_manifest

if TYPE_CHECKING:
    from ferro_dist.parallel.ddp.options import Options
    from ferro_dist.parallel.ddp.statistics import Statistics

__all__ = ["JaxDDP", "has_jax_arrays"]

Pytree = Any


class JaxDDP(DDP[Any]):
    """DDP of a pytree of parameters: of dicts and lists, of Flax, of Equinox.

    The caller keeps the parameters, and passes them to `tap`, to `verify` and to
    `broadcast_parameters`; training begins with `module`, the parameters of the root.

    Gradients averaged over all ranks come from `sync_gradients`, applied to what a step returned,
    or from `tap`, inside a compiled step. Leaves that are not floats, such as counters and random
    keys, are made equal on construction, and have no gradients. Numbers of Python, such as the
    options of Equinox's layers, are made equal and stay what they are.

    `average` may be ``"mean"`` or ``"sum"``: every leaf has a gradient, if only zeros, so that all
    ranks contribute. If `compress` is a function, its bucket holds NumPy arrays; it must not call
    JAX, as a compiled step may be waiting for it. `PowerSGD` adds what it leaves out of one tree to
    the next of the same names and shapes: gradients of two models need two wrappers. A pytree has
    no buffers to be synchronized.

    An error inside a compiled program surfaces as JAX's own, with that of ferro_dist in its text;
    the next call on the group raises the latter.

    Ranks that tap their steps must be processes: JAX runs the programs of all threads in one queue,
    in which a rank might wait for another that is behind it.

    Examples
    --------
    >>> ddp = fd.DDP(params, backend)
    >>> params = ddp.module
    >>> @jax.jit
    ... def step(params, batch):
    ...     gradients = jax.grad(lambda p: loss(ddp.tap(p), batch))(params)
    ...     return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients)

    Or, where communication need not overlap:

    >>> gradients = ddp.sync_gradients(jax.jit(jax.grad(loss))(params, batch))
    """

    __slots__ = ("__weakref__", "_context", "_reducers", "_tree")

    def _wrap(self, module: Pytree, options: Options) -> list[str]:
        if is_traced(module):
            raise TypeError("DDP: these parameters are traced. Wrap them outside jit and grad.")
        check_values(module)
        floats = float_positions(jax.tree.leaves(module))
        if not floats:
            raise ValueError("DDP: the pytree has no parameters: none of its leaves are floats")
        self._tree = module
        self._context = _context_of(options)
        # By structure of the tree: if a program is traced again on one rank alone, for another
        # batch size, the ranks must not have to agree again.
        self._reducers: dict[Hashable, TreeReducer] = {}
        specs_of(module, floats)  # raises if there is a float whose gradient cannot be averaged
        check_movable(module)
        return [f"leaf {number} {line}" for number, line in enumerate(describe_leaves(module))]

    def _prepare(self, options: Options, first_tag: int) -> None:
        return  # trees of gradients are compared as they come: they may be parts of this one

    @property
    def _held(self) -> Pytree:
        return self._tree

    def _release(self) -> None:
        self._tree = None

    def tap(self, params: Pytree) -> Pytree:
        """Return `params` unchanged; their gradients will be averages over the ranks.

        Called inside the function that is differentiated, compiled or not, once per step. The
        average of each bucket is under way while the rest of backward runs. On every rank the loss
        must depend on some of them: if not, JAX runs no backward here, and the other ranks wait.

        A program on several devices of a rank gives the averages to the first of them. Use them in
        the same program: outside of it, JAX cannot combine them with arrays on all of the devices.

        Parameters
        ----------
        params : pytree
            All parameters or some; trees of the same structure on each rank.

        Raises
        ------
        CollectiveMismatch
            The trees of the ranks differ. Raised while the program is traced.
        """
        _ = self.module  # raises if it was given back
        leaves, tree = jax.tree.flatten(params)
        # A number has no gradient here, or `jax.grad` would have made an array of it. The layer
        # that it is an option of may test it.
        floats = [i for i in float_positions(leaves) if not is_number(leaves[i])]
        if not floats:
            return params
        reducer = self._reducer_of(params, floats)
        step = object()  # tells one call of tap from another
        tapped = tap_leaves(
            [leaves[position] for position in floats],
            reducer.groups,
            lambda number, gradients: reducer.ready(step, number, gradients),
            lambda: reducer.finish(step),
        )
        for position, leaf in zip(floats, tapped, strict=True):
            leaves[position] = leaf
        return tree.unflatten(leaves)

    def sync_gradients(self, grads: Pytree = None, *, weight: float | None = None) -> Pytree:
        """Return the averages of a tree of gradients. Called outside compiled programs.

        Parameters
        ----------
        grads : pytree
            Of floats. Leaves that are no arrays or numbers are left alone, as are the ``float0``
            that `jax.grad` gives for an integer.
        weight : float, optional
            How much this rank's gradients count, at least 0; given on all ranks or on none. The
            mean is then the weighted mean; in a sum each gradient is multiplied by its weight.

        Raises
        ------
        TypeError
            A leaf is an integer, a bool or a random key, is traced, or has no values, as a masked,
            deleted or abstract array; or the weight is no number. Nothing was sent.
        CollectiveMismatch
            The trees of the ranks differ, or only some gave a weight. Raised on all of them; the
            group and this wrapper stay usable.
        ValueError
            No gradients were given, the weight is negative or not finite, or the module was given
            back: nothing was sent. Or the weights of all ranks are 0: raised on all of them.
        """
        return super().sync_gradients(grads, weight=weight)

    def broadcast_parameters(self, root: int | None = None, params: Pytree = None) -> Pytree:
        """Return the parameters of one rank, on all of them; `module` then holds these.

        Called outside compiled programs. Arrays come as those of JAX, numbers of Python as such.
        Other leaves, such as the functions in a tree of layers, are left alone.

        Parameters
        ----------
        root : int, optional
            The rank whose parameters are used. None means the `root` given to the constructor.
        params : pytree, optional
            Of the same structure on all ranks. None means `module`, which was broadcast last.

        Raises
        ------
        InvalidArray
            A leaf has no values, as a masked, deleted or abstract array. Nothing was sent.
        CollectiveMismatch
            The ranks' trees or roots differ. Raised on all of them; the group stays usable.
        """
        tree = self.module if params is None else params
        backend, root = self._backend, self._checked_root(root)
        check_values(tree)
        await_callbacks()
        lines = [f"root {root}", *describe_leaves(tree)]
        agree_on_manifest(lines, backend, op="broadcast_parameters")
        self._tree = jax.tree.map(lambda leaf: broadcast_leaf(leaf, backend, root), tree)
        return self._tree

    def verify(self, params: Pytree = None) -> None:
        """Compare the parameters of all ranks, bit for bit. Called by all ranks.

        Parameters
        ----------
        params : pytree, optional
            None means `module`, which was broadcast last.

        Raises
        ------
        CollectiveMismatch
            Names the first that differs, and which ranks have which value. Raised on all ranks; the
            group stays usable.
        """
        _ = self.module  # raises if it was given back
        compare(self._fingerprints(params), self._backend, "DDP.verify")

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Do not average gradients inside the block, to add up those of several batches.

        A step that taps its parameters, whether compiled outside the block or inside, returns this
        rank's own gradients. Average their sum with `sync_gradients`.
        """
        # Programs run asynchronously: those from before, and those of the block, must have ended.
        await_callbacks()
        before, self._context.is_local = self._context.is_local, True
        try:
            yield
            await_callbacks()
        finally:
            self._context.is_local = before

    def join(self, *optimizers: Any) -> Any:
        """Refuse: see the error."""
        raise UnsupportedOp(
            "DDP.join: a rank without data cannot take part in a compiled step. Let a rank that "
            "has run out call sync_gradients(zeros, weight=0) as often as the others call it "
            "with their weights.",
            op="DDP.join",
        )

    def statistics(self) -> Statistics:
        """When each bucket of the last average was ready, sent and reduced, on this rank."""
        return self._context.statistics

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"DDP of a pytree has no attribute {name!r}; the parameters are ddp.module"
        )

    def __repr__(self) -> str:
        if self._tree is None:
            return "<DDP, module given back>"
        count = len(float_positions(jax.tree.leaves(self._tree)))
        return f"<DDP of {count} leaves, rank {self._backend.rank} of {self._backend.world_size}>"

    def _average(self, grads: Pytree, weight: float | None) -> Pytree:
        if grads is None:
            raise ValueError("DDP.sync_gradients: pass the gradients; a pytree has none of its own")
        if is_traced(grads):
            raise TypeError(
                "sync_gradients: these gradients are traced, not computed. Call it on what the "
                "compiled function returns, or use tap() inside of it."
            )
        check_values(grads, of=" of the gradients")
        leaves, tree = jax.tree.flatten(grads)
        floats = float_positions(leaves)
        refuse_unaveraged(grads, floats)
        if not floats or self._context.is_local:
            return grads
        await_callbacks()
        # Read all of them first: an error must come before the others wait for this rank.
        own = [np.asarray(leaves[position]) for position in floats]
        reducer = self._reducer_of(grads, floats)
        if weight is not None:
            reducer.weigh(weight)
        step = object()
        for number, group in enumerate(reducer.groups):
            reducer.ready(step, number, [own[i] for i in group])
        averages = delivered([leaves[i] for i in floats], reducer.finish(step))
        for position, average in zip(floats, averages, strict=True):
            leaves[position] = average
        return tree.unflatten(leaves)

    def _reducer_of(self, tree: Pytree, floats: Sequence[int]) -> TreeReducer:
        specs = specs_of(tree, floats)
        reducer = self._reducers.get(specs)
        if reducer is None:
            await_callbacks()
            context = self._context
            settings = (
                f"{context.reduce_op.name}, buckets of {context.bucket_nbytes} bytes, "
                f"compress={name_of(context.compress)}"
            )
            lines = [settings, *(f"leaf {spec}" for spec in specs)]
            try:
                tag = agree_on_manifest(lines, context.backend, op="DDP")
            except CollectiveMismatch as error:
                raise context.explained(error, lines) from None
            reducer = self._reducers[specs] = TreeReducer(context, specs, lines, tag)
        return reducer

    def _broadcast(self, root: int) -> None:
        self.broadcast_parameters(root)

    def _fingerprints(self, params: Pytree = None) -> Iterable[tuple[str, bytes]]:
        await_callbacks()
        tree = self._tree if params is None else params
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
            if is_array(leaf):
                yield f"leaf {jax.tree_util.keystr(path)!r}", _content_of(leaf)


def has_jax_arrays(module: object) -> bool:
    """Whether this is a pytree with at least one JAX array."""
    try:
        leaves = jax.tree.leaves(module)
    except (TypeError, ValueError):  # a dict whose keys cannot be sorted, for instance
        return False
    return any(isinstance(leaf, jax.Array) for leaf in leaves)


def _context_of(options: Options) -> ReducerContext:
    backend, compress = options.backend, options.compress
    if options.average not in REDUCE_OPS:
        raise ValueError(
            "DDP: average must be 'mean' or 'sum' for JAX, where all ranks contribute to "
            "every gradient, if only zeros"
        )
    if not backend.moves_host_arrays:
        raise UnsupportedOp(
            f"DDP of JAX arrays averages in host memory, but {type(backend).__name__} moves "
            "only GPU arrays. Use a HybridBackend.",
            op="DDP",
            rank=backend.rank,
        )
    reduce_op = REDUCE_OPS[options.average]
    # A user's own reduction runs on the thread that needs the averages.
    is_overlapped = options.is_overlapped and not callable(compress)
    return ReducerContext(backend, reduce_op, options.bucket_nbytes, compress, is_overlapped)


def _content_of(leaf: Any) -> bytes:
    if is_number(leaf):
        return text_of(leaf)
    array = as_jax_array(leaf)
    if jnp.issubdtype(array.dtype, jax.dtypes.prng_key):
        array = jax.random.key_data(array)
    return np.asarray(array).tobytes()
