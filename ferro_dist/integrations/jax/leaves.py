"""Leaves of JAX pytrees: which have gradients, what ranks must agree on, where averages go."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from ferro_dist import interop
from ferro_dist.collective import broadcast
from ferro_dist.dtypes import DTYPE_NAMES
from ferro_dist.errors import InvalidArray
from ferro_dist.parallel.buckets.averaging import check_averageable
from ferro_dist.parallel.buckets.bucket import ParameterSpec
from ferro_dist.parallel.exchange import all_gather_bytes

if TYPE_CHECKING:
    from ferro_dist.backends.base import Backend

__all__ = [
    "as_jax_array",
    "broadcast_leaf",
    "check_movable",
    "check_values",
    "delivered",
    "describe_leaves",
    "dtype_of",
    "fault_of",
    "float_positions",
    "is_array",
    "is_number",
    "is_traced",
    "refuse_unaveraged",
    "specs_of",
    "text_of",
]

NumpyArray = np.ndarray[Any, Any]
Pytree = Any


def is_array(leaf: object) -> bool:
    """Whether a leaf is an array or a number; trees of layers also hold functions."""
    return _has_dtype(leaf) or is_number(leaf)


def is_number(leaf: object) -> bool:
    """Whether a leaf is a number of Python, such as an option of a layer, which it may test."""
    return isinstance(leaf, (bool, int, float, complex)) and not hasattr(leaf, "dtype")


def _has_dtype(leaf: object) -> bool:
    return hasattr(leaf, "dtype") and not isinstance(leaf, type)  # jnp.float32 has one, too


def is_traced(tree: Pytree) -> bool:
    """Whether any leaf stands for a value that is computed later, in a program."""
    return any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(tree))


# JAX 0.6 narrows even its own arrays to 32 bits where x64 is off.


def as_jax_array(leaf: Any) -> Any:
    """Return an array-like leaf as a JAX array, and one of JAX as it is."""
    return leaf if isinstance(leaf, jax.Array) else jnp.asarray(leaf)


def dtype_of(leaf: Any) -> Any:
    """Return the dtype that a leaf has as a JAX array."""
    return leaf.dtype if isinstance(leaf, jax.Array) else jnp.result_type(leaf)


def describe_leaves(tree: Pytree) -> list[str]:
    """Return a line for each leaf: its name, dtype and shape."""
    lines = []
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        name = jax.tree_util.keystr(path)
        what = f"{dtype_of(leaf)} {jnp.shape(leaf)}" if _has_dtype(leaf) else type(leaf)
        lines.append(f"{name!r} {what}")
    return lines


def check_values(tree: Pytree, of: str = "") -> None:
    """Raise InvalidArray for a leaf that looks like an array, but has no values for JAX to read."""
    for position, leaf in enumerate(jax.tree.leaves(tree)):
        fault = fault_of(leaf)
        if fault:
            path, _ = jax.tree_util.tree_leaves_with_path(tree)[position]
            name = jax.tree_util.keystr(path)
            raise InvalidArray(f"DDP: leaf {name!r}{of} {fault}", op="DDP")


def fault_of(leaf: Any) -> str:
    """Return why JAX cannot read an array, in words to follow its name; none if it can."""
    if isinstance(leaf, np.ma.MaskedArray):
        return "is masked, and would lose its mask"
    if isinstance(leaf, jax.Array):
        is_gone = not isinstance(leaf, jax.core.Tracer) and leaf.is_deleted()
        return "was deleted, or donated to a computation" if is_gone else ""
    if not _has_dtype(leaf):
        return ""
    # jax.ShapeDtypeStruct, for instance, or a tensor of torch.
    if not (isinstance(leaf, (np.ndarray, np.generic)) or hasattr(leaf, "__jax_array__")):
        return (
            f"is a {type(leaf).__module__}.{type(leaf).__qualname__}, not an array of JAX or NumPy"
        )
    try:
        dtype_of(leaf)
    except TypeError:
        return f"is {leaf.dtype}, which JAX does not have"
    return ""


def check_movable(tree: Pytree) -> None:
    """Raise InvalidArray for an array that cannot be given to other ranks."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        if not _has_dtype(leaf) or jnp.issubdtype(dtype_of(leaf), jax.dtypes.prng_key):
            continue
        if str(dtype_of(leaf)) not in DTYPE_NAMES:
            raise InvalidArray(
                f"DDP: leaf {jax.tree_util.keystr(path)!r} is {dtype_of(leaf)}; ferro_dist moves "
                f"{', '.join(DTYPE_NAMES)}.",
                op="DDP",
            )


def float_positions(leaves: Sequence[Any]) -> list[int]:
    """Return which of the leaves have gradients."""
    return [
        position
        for position, leaf in enumerate(leaves)
        if is_array(leaf) and jnp.issubdtype(dtype_of(leaf), jnp.inexact)
    ]


def refuse_unaveraged(grads: Pytree, floats: Sequence[int]) -> None:
    """Refuse leaves that look like gradients, but would not be averaged, or not as they are."""
    averaged = set(floats)
    for position, (path, leaf) in enumerate(jax.tree_util.tree_leaves_with_path(grads)):
        if position in averaged or not is_array(leaf):
            continue
        dtype = dtype_of(leaf)
        if dtype != jax.dtypes.float0:
            raise TypeError(
                f"DDP: leaf {jax.tree_util.keystr(path)!r} of the gradients is {dtype}, which has "
                "no average. Replace it by None, or add up counts with allreduce()."
            )


def specs_of(tree: Pytree, positions: Sequence[int]) -> tuple[ParameterSpec, ...]:
    """Describe the leaves at these positions, whose gradients are averaged."""
    paths = jax.tree_util.tree_leaves_with_path(tree)
    return tuple(
        _spec(jax.tree_util.keystr(path), leaf)
        for path, leaf in (paths[position] for position in positions)
    )


def _spec(name: str, leaf: Any) -> ParameterSpec:
    dtype = np.dtype(dtype_of(leaf))
    check_averageable(f"leaf {name!r}", dtype)
    return ParameterSpec(name, jnp.shape(leaf), dtype)


def broadcast_leaf(leaf: Any, backend: Backend, root: int) -> Any:
    """Return that of one rank, an array as one of JAX; what is no array as it is here."""
    if not is_array(leaf):
        return leaf
    if is_number(leaf):
        texts = all_gather_bytes(text_of(leaf), backend)
        return type(leaf)(_plain_type(leaf)(texts[root].decode()))
    array = as_jax_array(leaf)
    if jnp.issubdtype(array.dtype, jax.dtypes.prng_key):
        state = broadcast_leaf(jax.random.key_data(array), backend, root)
        return jax.random.wrap_key_data(state, impl=jax.random.key_impl(array))
    # In host memory, as averages are: many groups reach no GPU, and a leaf may lie on several.
    written = interop.aligned_empty(array.shape, array.dtype)
    return interop.deliver(array, broadcast(np.asarray(array), backend, root, out=written))


def text_of(number: complex) -> bytes:
    """Return a number of Python as it is: JAX would narrow it, and an int may exceed 64 bits."""
    return repr(_plain_type(number)(number)).encode()


def _plain_type(number: Any) -> Callable[[Any], complex]:
    # One that reads its own text, which a bool does not.
    return next(plain for plain in (int, float, complex) if isinstance(number, plain))


def delivered(likes: Sequence[Any], averages: Sequence[NumpyArray]) -> list[Any]:
    """Return copies of the averages as JAX arrays, each where the leaf that it replaces is."""
    copies, positions_by_sharding = [], defaultdict(list)
    for position, (like, average) in enumerate(zip(likes, averages, strict=True)):
        # In host memory, where the average is, whatever device the leaf is on.
        copies.append(interop.aligned_empty(average.shape, average.dtype))
        np.copyto(copies[-1], average)
        positions_by_sharding[interop.jax_committed_sharding(like)].append(position)
    arrived: list[Any] = [None] * len(copies)
    for sharding, positions in positions_by_sharding.items():  # a call of JAX takes long
        with interop.jax_full_width():
            arrays = jax.device_put([copies[position] for position in positions], sharding)
        for position, array in zip(positions, arrays, strict=True):
            arrived[position] = array
    return arrived
