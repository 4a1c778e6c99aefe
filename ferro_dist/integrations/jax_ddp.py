"""DDP of pytrees of JAX arrays, which are immutable: averages are returned."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from ferro_dist.errors import UnsupportedOp
from ferro_dist.integrations.jax_gradients import PytreeReducer, await_callbacks
from ferro_dist.integrations.jax_leaves import (
    as_jax_array,
    describe_leaves,
    float_positions,
    is_array,
    is_number,
    text_of,
)
from ferro_dist.parallel.ddp import DDP, compare

if TYPE_CHECKING:
    from ferro_dist.parallel.options import Options
    from ferro_dist.parallel.statistics import Statistics

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

    __slots__ = ("__weakref__", "_pytrees", "_tree")

    def _wrap(self, module: Pytree, options: Options) -> list[str]:
        if _is_traced(module):
            raise TypeError("DDP: these parameters are traced. Wrap them outside jit and grad.")
        if not float_positions(jax.tree.leaves(module)):
            raise ValueError("DDP: the pytree has no parameters: none of its leaves are floats")
        self._tree = module
        self._pytrees = PytreeReducer(options)
        self._pytrees.check(module)
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
        average of each bucket is under way while the rest of backward runs.

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
        return self._pytrees.tap(params)

    def broadcast_parameters(self, root: int | None = None, params: Pytree = None) -> Pytree:
        """Return the parameters of one rank, on all of them; `module` then holds these.

        Parameters
        ----------
        root : int, optional
            The rank whose parameters are used. None means the `root` given to the constructor.
        params : pytree, optional
            Of the same structure on all ranks. None means `module`, which was broadcast last.
        """
        tree = self.module if params is None else params
        self._tree = self._pytrees.broadcast_parameters(tree, self._checked_root(root))
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
        with self._pytrees.no_sync():
            yield

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
        return self._pytrees.statistics()

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
        return self._pytrees.sync_gradients(grads, weight=weight)

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


def _is_traced(tree: Pytree) -> bool:
    return any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(tree))


def _content_of(leaf: Any) -> bytes:
    if is_number(leaf):
        return text_of(leaf)
    array = as_jax_array(leaf)
    if jnp.issubdtype(array.dtype, jax.dtypes.prng_key):
        array = jax.random.key_data(array)
    return np.asarray(array).tobytes()
