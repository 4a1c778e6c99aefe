"""Stages that are JAX functions: backward is `jax.vjp`.

A forward is compiled together with the residuals that its backward needs, and so is each half of
the backward: XLA leaves out of each what only the other one needs. Cotangents on the way to weights
deep in a stage are computed in both halves.
"""

from __future__ import annotations

import contextlib
import itertools
import secrets
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ferro_dist import interop
from ferro_dist.errors import InvalidArray
from ferro_dist.integrations.jax.leaves import dtype_of, fault_of, is_array, is_number
from ferro_dist.parallel.pipeline import pytree
from ferro_dist.parallel.pipeline.activation_channel import ArraySpec, Parcel
from ferro_dist.parallel.pipeline.stage import ForwardInput, LossOf, Stage, takes_rng

if TYPE_CHECKING:
    from ferro_dist.backends.base import Backend

__all__ = ["JaxStage"]

Array = Any
Tree = Any


@jax.tree_util.register_static
class _Structure:
    """What a compiled function returns besides arrays."""

    def __init__(self, structure: pytree.Structure) -> None:
        self.structure = structure

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Structure) and self.structure == other.structure

    def __hash__(self) -> int:
        return hash(self.structure)


class _Saved(NamedTuple):
    vjp: Any
    """Maps gradients of the output's differentiable arrays to those of weights and input."""
    is_input_differentiable: list[bool]
    is_output_differentiable: list[bool]
    outputs: list[jax.ShapeDtypeStruct]
    """The differentiable arrays of the output."""
    of_loss: list[Array] | None
    """The gradients of the loss in these arrays, if one was applied to the output; else None."""


class JaxStage:
    """A stage that is a function of its parameters and its input.

    Parameters
    ----------
    apply : function
        ``apply(params, x) -> y``; with a parameter named `rng`, it is given a key of its own for
        each microbatch. It is compiled, as by `jax.jit`: what it closes over, flags for training
        included, stays as it was then. What may change goes into `params` or travels in `x`.
    params : tree of floating-point arrays, of any kind that JAX knows

    Attributes
    ----------
    params : tree
        To be replaced by the caller after an optimizer's step.
    grads : tree or None
        Like `params`, summed since it was last None.

    Examples
    --------
    >>> from ferro_dist.integrations.jax.stage import JaxStage
    >>> stage = JaxStage(lambda params, x: jnp.tanh(x @ params["w"]), {"w": w})
    >>> pipe = Pipeline(stage, backend, 8, "1f1b")
    >>> loss = pipe.step(x, y, lambda out, y: ((out - y) ** 2).mean())
    >>> stage.params = jax.tree.map(lambda p, g: p - 0.1 * g, stage.params, stage.grads)
    >>> stage.grads = None
    """

    def __init__(self, apply: Callable[..., Tree], params: Tree) -> None:
        _check_params(params)
        self.params = params
        self.grads: Tree = None
        self._apply = apply
        self._takes_rng = takes_rng(apply)
        self._owners: dict[str, object] = {}  # what names a gradient of each weight
        # Keyed by what is compiled in besides arrays: the structure of the input, and which of its
        # arrays are differentiable. The loss is not compiled.
        self._compiled: dict[Any, Callable[..., Any]] = {}

    def _forward_of(
        self, structure: pytree.Structure, flags: tuple[bool, ...]
    ) -> Callable[..., Any]:
        key = structure, flags
        compiled = self._compiled.get(key)
        if compiled is None:
            compiled = self._compiled[key] = self._compile(structure, flags)
        return compiled

    def _compile(self, structure: pytree.Structure, flags: tuple[bool, ...]) -> Callable[..., Any]:
        apply, takes_rng = self._apply, self._takes_rng

        def forward(params: Tree, inputs: Any, others: Any, key: Any) -> Any:
            def run(params: Tree, inputs: Any) -> Any:
                x = pytree.unflatten(structure, _merged(inputs, others, flags))
                y = apply(params, x, rng=key) if takes_rng else apply(params, x)
                out_structure, outs = pytree.flatten(y)
                out_flags = tuple(map(_is_differentiable, outs))
                differentiable, rest = _divided(outs, out_flags)
                return differentiable, (rest, _Structure((out_flags, out_structure)))

            outputs, vjp, (rest, about) = jax.vjp(run, params, inputs, has_aux=True)
            return (outputs, rest, about), vjp

        compiled: Callable[..., Any] = jax.jit(forward)
        return compiled


class PipelinedJaxStage(Stage):
    """A `JaxStage` as one stage of one pipeline; it may be other stages, too."""

    module: JaxStage
    library = "JAX"

    def __init__(self, module: JaxStage) -> None:
        super().__init__(module)
        # Of each weight among the leaves, by the tree's structure: the user may replace the
        # parameters by a tree of another structure.
        self._positions: dict[Any, dict[str, int]] = {}
        # Whether the caller's thread uses types of 64 bits; those that receive must do as it does.
        self._is_full_width = False

    # Arrays between stages

    def check_given(self, array: Array, name: str) -> None:
        if not isinstance(array, (jax.Array, np.ndarray, np.generic)):
            raise TypeError(
                f"Pipeline: {name} holds a {type(array).__module__}.{type(array).__qualname__}, "
                "and the stage is a JaxStage: give arrays of JAX or NumPy"
            )
        if isinstance(array, np.ma.MaskedArray):
            raise TypeError(f"Pipeline: {name} is masked, and would lose its mask: give filled()")

    def describe(self, array: Array) -> ArraySpec:
        # For JAX on a GPU, too: its arrays go through the host.
        is_on_host = True
        dtype = str(array.dtype)
        return ArraySpec(dtype, tuple(array.shape), _is_differentiable(array), is_on_host)

    def allocate(self, spec: ArraySpec) -> Array:
        return self.pool.take(spec.shape, interop.numpy_dtype(interop.dtype_code(spec.dtype)))

    def note_thread(self) -> None:
        self._is_full_width = jax.config.jax_enable_x64

    def deliver(self, spec: ArraySpec, received: Array) -> Array:
        with interop.jax_full_width() if self._is_full_width else contextlib.nullcontext():
            return jax.device_put(received)

    def converted(self, gradients: Sequence[Array | None]) -> list[Array | None]:
        # What JAX calls the gradient is the conjugate of torch's.
        return [
            gradient.conj() if gradient is not None and jnp.iscomplexobj(gradient) else gradient
            for gradient in gradients
        ]

    def item(self, loss: Array) -> float:
        return float(loss)

    def one_like(self, loss: Array) -> Array:
        return jnp.ones_like(loss)

    def zeros(self, like: Array) -> Array:
        with interop.jax_full_width():
            return jnp.zeros_like(like)

    # Weights

    def parameters(self) -> dict[str, Array]:
        return {name: _as_array(leaf) for name, leaf in _named(self.module.params).items()}

    def parameter(self, name: str) -> Array:
        leaves, _, positions = self._flattened(self.module.params)
        return _as_array(leaves[positions[name]])

    def gradient_owner(self, name: str) -> object:
        # Each has its own, also of weights that begin as one array.
        return self.module._owners.setdefault(name, object())

    def check_shareable(self, what: str, array: Array) -> None:
        fault = fault_of(array)
        if fault:
            raise InvalidArray(f"Pipeline: {what} {fault}", op="Pipeline")

    def load(self, name: str, value: Array) -> None:
        leaves, structure, positions = self._flattened(self.module.params)
        leaves[positions[name]] = value
        self.module.params = jax.tree.unflatten(structure, leaves)

    def gradients(self, names: Sequence[str]) -> list[Array | None]:
        if self.module.grads is None:
            return [None] * len(names)
        leaves, _, positions = self._flattened(self.module.grads)
        return [leaves[positions[name]] for name in names]

    def set_gradients(self, names: Sequence[str], gradients: Sequence[Array]) -> None:
        given = dict(zip(names, gradients, strict=True))
        if not given:
            return
        is_new = self.module.grads is None
        tree = self.module.params if is_new else self.module.grads
        leaves, structure, positions = self._flattened(tree)
        for number, name in enumerate(positions):
            if name in given:
                leaves[number] = given[name]
            elif is_new:
                leaves[number] = jnp.zeros_like(leaves[number])
        self.module.grads = jax.tree.unflatten(structure, leaves)

    def take_gradients(self, names: Sequence[str]) -> list[Array | None]:
        taken = self.gradients(names)
        if len(names) == len(jax.tree.leaves(self.module.grads)):
            self.module.grads = None
        elif self.module.grads is not None:
            self.set_gradients(names, [jnp.zeros_like(gradient) for gradient in taken])
        return taken

    def add_gradients(self, names: Sequence[str], gradients: Sequence[Array]) -> None:
        pairs = zip(self.gradients(names), gradients, strict=True)
        self.set_gradients(names, [new if here is None else here + new for here, new in pairs])

    def plain(self, weight: Array) -> Array:
        return jnp.asarray(weight)

    def new_bucket(self, group: Backend, like: Array, count: int) -> Array:
        bucket = group.empty(count, str(like.dtype))
        bucket[...] = 0
        return bucket

    def place(self, bucket: Array, offset: int, like: Array) -> Array:
        return bucket[offset : offset + like.size].reshape(like.shape)

    def write(self, places: Sequence[Array], gradients: Sequence[Array | None]) -> None:
        for place, gradient in zip(places, gradients, strict=True):
            place[...] = 0 if gradient is None else np.asarray(gradient, place.dtype)

    def read(self, places: Sequence[Array]) -> list[Array]:
        # Copies: JAX may take over memory that it is given, and the bucket will be written again.
        return [jnp.array(place, copy=True) for place in places]

    def mark(self, bucket: Array, first: int, are_there: Sequence[bool]) -> None:
        bucket[first:] = are_there

    @contextlib.contextmanager
    def untouched(self) -> Iterator[None]:
        grads = self.module.grads
        self.module.grads = None
        try:
            yield
        finally:
            self.module.grads = grads

    # Forward and backward

    def _run_forward(self, given: ForwardInput) -> tuple[Parcel, _Saved]:
        return self._run_with(self.module.params, given)

    def _run_with(self, params: Tree, given: ForwardInput) -> tuple[Parcel, _Saved]:
        parcel, seed, loss_of = given
        is_input_differentiable = [_is_differentiable(x) for x in parcel.arrays]
        inputs, others = _divided(parcel.arrays, is_input_differentiable)
        forward = self.module._forward_of(parcel.structure, tuple(is_input_differentiable))
        (outputs, other_outputs, structure), vjp = forward(params, inputs, others, self._key(seed))
        flags, out_structure = structure.structure
        shapes = [jax.ShapeDtypeStruct(y.shape, y.dtype) for y in outputs]
        saved = _Saved(vjp, is_input_differentiable, list(flags), shapes, None)
        arrays = _merged(outputs, other_outputs, flags)
        output = parcel._replace(structure=out_structure, arrays=arrays)
        if loss_of is None:
            return output, saved
        return self._with_loss(output, saved, loss_of)

    def _with_loss(self, output: Parcel, saved: _Saved, loss_of: LossOf) -> tuple[Parcel, _Saved]:
        """Differentiate the loss of an output on the spot; backward only scales that."""
        flags = saved.is_output_differentiable
        differentiable, others = _divided(output.arrays, flags)

        def loss(arrays: Sequence[Array]) -> Array:
            whole = _merged(arrays, others, flags)
            return _checked_loss(loss_of.value(pytree.unflatten(output.structure, whole)))

        value, gradients = jax.value_and_grad(loss)(differentiable)
        if not loss_of.counts:
            gradients = [jnp.zeros_like(gradient) for gradient in gradients]
        return output._replace(structure=pytree.ARRAY, arrays=[value]), saved._replace(
            of_loss=gradients
        )

    def _run_unsaved(self, given: ForwardInput, will_replay: bool) -> Parcel:
        return self._run_forward(given)[0]

    def _run_replayable(self, given: ForwardInput) -> tuple[Parcel, Any]:
        params = self.module.params  # by backward, the caller may have replaced them
        return self._run_with(params, given)[0], (params, given)

    def _replay(self, kept: Any) -> _Saved:
        return self._run_with(*kept)[1]

    def _run_backward(self, saved: _Saved, gradients: Sequence[Any]) -> list[Array | None]:
        of_params, of_inputs = _pull_back(saved.vjp, _cotangents(saved, gradients))
        self._accumulate(of_params)
        return _spread(of_inputs, saved.is_input_differentiable)

    def _run_backward_input(
        self, saved: _Saved, gradients: Sequence[Any]
    ) -> tuple[list[Array | None], Any]:
        cotangents = _cotangents(saved, gradients)
        of_inputs = _pull_back_input(saved.vjp, cotangents)
        return _spread(of_inputs, saved.is_input_differentiable), (saved.vjp, cotangents)

    def _run_backward_weight(self, deferred: Any) -> None:
        self._accumulate(_pull_back_params(*deferred))

    def _accumulate(self, of_params: Tree) -> None:
        self.module.grads = (
            of_params if self.module.grads is None else _add(self.module.grads, of_params)
        )

    def _draw_seed(self, will_replay: bool) -> int | None:
        return secrets.randbits(63) if self.module._takes_rng else None

    def _key(self, seed: int | None) -> Array:
        if not self.module._takes_rng:
            return None
        assert seed is not None
        # Without jax_enable_x64 a key is made of 32 bits, so that a seed takes two steps.
        return jax.random.fold_in(jax.random.key(seed & 0xFFFFFFFF), seed >> 32)

    def _flattened(self, tree: Tree) -> tuple[list[Array], Any, dict[str, int]]:
        """Return the leaves of a tree, its structure, and the position of each weight's leaf."""
        leaves, structure = jax.tree.flatten(tree)
        positions = self._positions.get(structure)
        if positions is None:
            positions = {name: position for position, name in enumerate(_named(tree))}
            self._positions[structure] = positions
        return leaves, structure, positions


def _named(tree: Tree) -> dict[str, Array]:
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
    return {jax.tree_util.keystr(path): leaf for path, leaf in leaves}


def _as_array(weight: Any) -> Array:
    """Return a weight that may be a number of Python, of which `jax.grad` gives a gradient, too."""
    return jnp.asarray(weight) if is_number(weight) else weight


# Compiled separately: what a half does not return, XLA does not compute.


_Compiled = Callable[..., Any]
_pull_back: _Compiled = jax.jit(lambda vjp, cotangents: vjp(cotangents))
_pull_back_params: _Compiled = jax.jit(lambda vjp, cotangents: vjp(cotangents)[0])
_pull_back_input: _Compiled = jax.jit(lambda vjp, cotangents: vjp(cotangents)[1])
_add: _Compiled = jax.jit(lambda a, b: jax.tree.map(jnp.add, a, b))


def _checked_loss(loss: Any) -> Array:
    what = f"one of shape {loss.shape}" if pytree.is_array(loss) else f"a {type(loss).__qualname__}"
    if not isinstance(loss, (jax.Array, np.ndarray, np.generic)) or loss.size != 1:
        raise ValueError(f"Pipeline: the loss must be a JAX array with one element, not {what}")
    return jnp.reshape(loss, ())


def _check_params(params: Tree) -> None:
    """Raise TypeError for weights without gradients, which `jax.grad` refuses as well."""
    for path, leaf in jax.tree_util.tree_flatten_with_path(params)[0]:
        kind = dtype_of(leaf) if is_array(leaf) else f"a {type(leaf).__qualname__}"
        if not (is_array(leaf) and jnp.issubdtype(kind, jnp.inexact)):
            raise TypeError(
                f"JaxStage: params{jax.tree_util.keystr(path)} is {kind}, which has no gradient. "
                "Keep it out of params, in what `apply` closes over"
            )


def _is_differentiable(array: Array) -> bool:
    return bool(jnp.issubdtype(array.dtype, jnp.inexact))


def _divided(values: Sequence[Any], flags: Sequence[bool]) -> tuple[list[Any], list[Any]]:
    """Return the values that have a flag, and the others."""
    pairs = list(zip(values, flags, strict=True))
    return [value for value, flag in pairs if flag], [value for value, flag in pairs if not flag]


def _merged(flagged: Iterable[Any], others: Iterable[Any], flags: Sequence[bool]) -> list[Any]:
    """Return what `_divided` has divided."""
    left, right = iter(flagged), iter(others)
    return [next(left if flag else right) for flag in flags]


def _spread(values: Sequence[Any], flags: Sequence[bool]) -> list[Any]:
    return _merged(values, itertools.repeat(None), flags)


def _cotangents(saved: _Saved, gradients: Sequence[Any]) -> list[Array]:
    """Return a gradient for each differentiable array of the output, of its dtype.

    None means zeros. A hand-written stage, or the user, may compute in another precision.
    """
    if saved.of_loss is not None:
        (scale,) = gradients
        return [gradient * scale for gradient in saved.of_loss]
    wanted, _ = _divided(gradients, saved.is_output_differentiable)
    return [
        jnp.zeros(like.shape, like.dtype) if gradient is None else jnp.asarray(gradient, like.dtype)
        for gradient, like in zip(wanted, saved.outputs, strict=True)
    ]
