"""Stages with a hand-written backward, for NumPy, CuPy, torch, or other arrays.

From another rank a stage receives arrays in host memory as NumPy arrays, whatever it computes with;
on a GPU, as arrays of the library of its ``parameters()``, which is CuPy or torch. From a stage of
the same rank, as under zb_v, it gets them as that has made them.

A module is an object with

``forward(x) -> (y, saved)``
    `saved` is whatever backward needs for this microbatch. Other microbatches pass between a
    forward and its backward, and would overwrite what is kept in the module itself.
``backward(saved, gradient) -> gradient of x``
    Adds to the weights' gradients.
``parameters()`` and ``grads()``, for ``dp=`` and ``tied=``
    A dict of name to array, each; the same arrays at each call. On a GPU ``parameters()`` also
    tells where the stage works. Otherwise it does not matter what is in them.

and if its backward can be divided for zero-bubble schedules,

``backward_input(saved, gradient) -> gradient of x``, ``backward_weight(saved, gradient)``

Gradients are trees like the values, with None for no gradient. Those of complex arrays are, between
all kinds of stages, as torch defines them: the conjugates of what ``jax.grad`` returns. A forward
that has a parameter named `rng` is given a ``numpy.random.Generator`` of its own for each
microbatch. The loss function returns the loss and its gradient. Without one, the last stage returns
the loss, one number, and its backward is given the gradient of that.
"""

from __future__ import annotations

import contextlib
import copy
import math
import numbers
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ferro_dist import interop
from ferro_dist.arguments import in_order
from ferro_dist.errors import InvalidArray
from ferro_dist.parallel.pipeline import pytree
from ferro_dist.parallel.pipeline.activation_channel import ArraySpec, Parcel
from ferro_dist.parallel.pipeline.stage import ForwardInput, LossOf, Stage, takes_rng

if TYPE_CHECKING:
    from ferro_dist.backends.base import Backend

__all__ = ["HandwrittenStage"]

Array = Any


class _Saved(NamedTuple):
    inputs: pytree.Structure
    input_shapes: tuple[tuple[int, ...], ...]
    outputs: pytree.Structure
    of_module: Any
    of_loss: list[Array | None] | None
    """The gradient of the loss for each array of the output, if there is a loss."""


class HandwrittenStage(Stage):
    """A stage with ``forward`` and ``backward`` methods."""

    def __init__(self, module: Any) -> None:
        super().__init__(module)
        self._gpu_parameters: list[Array] = []
        self._receiving: list[Callable[[], contextlib.AbstractContextManager[Any]]] = []
        self._takes_rng = takes_rng(module.forward)
        self._is_divided = all(
            callable(getattr(module, name, None)) for name in ("backward_input", "backward_weight")
        )

    def describe(self, array: Array) -> ArraySpec:
        view = _view_of(array)
        dtype = interop.dtype_name(view.dtype)
        is_differentiable = "float" in dtype or "complex" in dtype
        is_on_host = view.device_type == interop.CPU
        return ArraySpec(dtype, tuple(array.shape), is_differentiable, is_on_host)

    def allocate(self, spec: ArraySpec) -> Array:
        dtype = interop.numpy_dtype(interop.dtype_code(spec.dtype))
        if spec.is_on_host:
            return self.pool.take(spec.shape, dtype)
        parameter = self._gpu_parameter()
        self._check_stream(parameter)
        return interop.empty_beside(parameter, spec.shape, dtype)

    def note_thread(self) -> None:
        self._gpu_parameters = [x for x in self.parameters().values() if _is_on_gpu(x)]
        self._receiving = [interop.same_stream(x) for x in self._gpu_parameters[:1]]

    def receiving(self) -> contextlib.AbstractContextManager[Any]:
        return self._receiving[0]() if self._receiving else contextlib.nullcontext()

    def _gpu_parameter(self) -> Array:
        if self._gpu_parameters:
            return self._gpu_parameters[0]
        raise TypeError(
            f"Pipeline: stage {self.number} is sent an array in GPU memory, but has no "
            "parameters() there, which would tell its device and its array library. "
            "Give it some, or let the previous stage return a host array"
        )

    def _check_stream(self, parameter: Array) -> None:
        from ferro_dist._native.cuda_stream import STREAM_PER_THREAD, current_stream_of_array

        # Called by the thread that receives, whose stream of that name is another one: its library
        # would reuse memory there that the stage's own stream still reads.
        if current_stream_of_array(parameter) == STREAM_PER_THREAD:
            raise TypeError(
                f"Pipeline: stage {self.number} is sent an array in GPU memory, but works on the "
                "default stream of a thread, which is another one in the thread that receives. "
                "Make a stream the current one, or unset CUPY_CUDA_PER_THREAD_DEFAULT_STREAM"
            )

    def item(self, loss: Array) -> float:
        return float(loss)

    def one_like(self, loss: Array) -> Array:
        one = interop.allocate(loss)
        one[...] = 1
        return one

    def zeros(self, like: Array) -> Array:
        zeros = interop.allocate(like)
        zeros[...] = 0
        return zeros

    def parameters(self) -> dict[str, Array]:
        return self._named("parameters")

    def gradient_owner(self, name: str) -> object:
        gradient = self._named("grads").get(name)
        if gradient is None:
            raise self._lack_of_gradient(name)
        return gradient

    def check_lasting(self, names: Iterable[str]) -> None:
        if not callable(parameters := getattr(self.module, "parameters", dict)):
            raise TypeError(
                f"Pipeline: {type(self.module).__qualname__}.parameters must be a method, not "
                f"{type(parameters).__qualname__}: it would count as having no weights"
            )
        names = list(names)
        if not names:  # as in a stage without weights, which needs no grads()
            return
        for method in ("parameters", "grads"):
            # Both are kept: an array that was freed might leave its address to the next one.
            arrays, again = self._named(method), self._named(method)
            for name in names:
                if method == "grads" and arrays.get(name) is None:
                    raise self._lack_of_gradient(name)
                if not interop.have_same_address(arrays[name], again[name]):
                    raise ValueError(
                        f"Pipeline: {method}() of stage {self.number} makes a new array for "
                        f"{name!r} at each call, where the values of other ranks would be lost. "
                        "Return the arrays that the stage works with"
                    )

    def _lack_of_gradient(self, name: str) -> ValueError:
        return ValueError(
            f"Pipeline: grads() of stage {self.number} lacks {name!r}, which parameters() has"
        )

    def check_shareable(self, what: str, array: Array) -> None:
        if _view_of(array).is_readonly:
            raise InvalidArray(
                f"Pipeline: {what} is read-only. Give an array that can be overwritten with that "
                "of another rank",
                op="Pipeline",
            )

    def load(self, name: str, value: Array) -> None:
        self.parameters()[name][...] = value

    def gradients(self, names: Sequence[str]) -> list[Array | None]:
        arrays = self._named("grads")
        return [arrays[name] for name in names]

    def set_gradients(self, names: Sequence[str], gradients: Sequence[Array]) -> None:
        arrays = self._named("grads")
        for name, gradient in zip(names, gradients, strict=True):
            arrays[name][...] = gradient

    def take_gradients(self, names: Sequence[str]) -> list[Array | None]:
        arrays = self._named("grads")
        taken = [_copy(arrays[name]) for name in names]
        for name in names:
            arrays[name][...] = 0
        return taken

    def add_gradients(self, names: Sequence[str], gradients: Sequence[Array]) -> None:
        arrays = self._named("grads")
        for name, gradient in zip(names, gradients, strict=True):
            here = arrays[name]
            here += gradient

    def new_bucket(self, group: Backend, like: Array, count: int) -> Array:
        if _is_numpy(like):
            bucket = group.empty(count, like.dtype)
        else:
            # An evaluation may come first, and steps write to it.
            with interop.outside_inference_mode(like):
                bucket = interop.allocate(like, (count,))
        bucket[...] = 0
        return bucket

    def place(self, bucket: Array, offset: int, like: Array) -> Array:
        with interop.outside_inference_mode(bucket):
            return bucket[offset : offset + math.prod(like.shape)].reshape(like.shape)

    def write(self, places: Sequence[Array], gradients: Sequence[Array | None]) -> None:
        for place, gradient in zip(places, gradients, strict=True):
            place[...] = gradient

    def read(self, places: Sequence[Array]) -> list[Array]:
        return [_copy(place) for place in places]

    def mark(self, bucket: Array, first: int, are_there: Sequence[bool]) -> None:
        bucket[first:] = 1  # its gradients are always there

    def are_marked(self, bucket: Array, first: int) -> list[bool]:
        return [True] * (len(bucket) - first)

    @contextlib.contextmanager
    def untouched(self) -> Iterator[None]:
        module = self.module
        try:
            # A copy runs, and is dropped: others may hold anything that is in the module.
            self.module = copy.deepcopy(module)
        except Exception as error:
            raise TypeError(
                "Pipeline: a plan() before the first step leaves stages as they were, and a "
                f"{type(module).__qualname__} cannot be copied for that: {error}. Take a step first"
            ) from error
        try:
            yield
        finally:
            self.module = module

    def _named(self, method: str) -> dict[str, Array]:
        if not callable(getattr(self.module, method, None)):
            if method == "parameters":
                return {}
            raise TypeError(f"Pipeline: {type(self.module).__qualname__} has no method {method}()")
        arrays = getattr(self.module, method)()
        if isinstance(arrays, Mapping):
            return dict(arrays)
        try:
            listed = iter(in_order(arrays))
        except TypeError:
            raise TypeError(
                f"Pipeline: {method}() of {type(self.module).__qualname__} must return a dict or "
                f"list of arrays, not {type(arrays).__qualname__}"
            ) from None
        return {str(position): array for position, array in enumerate(listed)}

    def _run_forward(self, given: ForwardInput) -> tuple[Parcel, _Saved]:
        parcel, seed, loss_of = given
        result = self.module.forward(
            pytree.unflatten(parcel.structure, parcel.arrays), **self._rng(seed)
        )
        output, of_module = _pair(result, "forward() must return (output, saved)")
        is_loss = loss_of is not None and loss_of.function is None
        if is_loss and isinstance(output, numbers.Real):
            output = np.asarray(output)  # a plain number has no gradient
        structure, arrays = pytree.flatten(output)
        shapes = tuple(tuple(array.shape) for array in parcel.arrays)
        saved = _Saved(parcel.structure, shapes, structure, of_module, None)
        if loss_of is None:
            return parcel._replace(structure=structure, arrays=arrays), saved
        loss, of_output = self._loss(output, loss_of)
        of_loss = pytree.gradients_like(
            structure, [array.shape for array in arrays], of_output, "loss_fn returned", "output"
        )
        if not loss_of.counts:
            of_loss = [None if array is None else self.zeros(array) for array in of_loss]
        loss_parcel = parcel._replace(structure=pytree.ARRAY, arrays=[loss])
        return loss_parcel, saved._replace(of_loss=of_loss)

    def _loss(self, output: Any, loss_of: LossOf) -> tuple[Any, Any]:
        """Return the loss of an output, and its gradient."""
        if loss_of.function is not None:
            demand = "loss_fn must return (loss, gradient)"
            loss, of_output = _pair(loss_of.function(output), demand)
            return _checked_loss(loss, f"{demand}, and the loss"), of_output
        what_it_is = "without a loss_fn, the output of the last stage is the loss, and"
        return _checked_loss(output, what_it_is), self.one_like(output)

    def _run_unsaved(self, given: ForwardInput, will_replay: bool) -> Parcel:
        if will_replay:
            # Nothing shows whether the module writes into its input, which is needed again.
            copies = [_copy(x) for x in given.parcel.arrays]
            given = given._replace(parcel=given.parcel._replace(arrays=copies))
        return self._run_forward(given)[0]

    def _run_backward(self, saved: _Saved, gradients: Sequence[Any]) -> list[Array | None]:
        gradient = _gradient_tree(saved, gradients)
        return _input_gradients(saved, self.module.backward(saved.of_module, gradient))

    def _run_backward_input(
        self, saved: _Saved, gradients: Sequence[Any]
    ) -> tuple[list[Array | None], Any]:
        if not self._is_divided:
            return super()._run_backward_input(saved, gradients)
        gradient = _gradient_tree(saved, gradients)
        of_input = self.module.backward_input(saved.of_module, gradient)
        return _input_gradients(saved, of_input), (saved.of_module, gradient)

    def _run_backward_weight(self, deferred: Any) -> None:
        if deferred is not None:
            self.module.backward_weight(*deferred)

    def _draw_seed(self, will_replay: bool) -> int | None:
        return secrets.randbits(63) if self._takes_rng else None

    def _rng(self, seed: int | None) -> dict[str, Any]:
        if not self._takes_rng:
            return {}
        return {"rng": np.random.default_rng(seed)}


def _copy(array: Array) -> Array:
    copied: Array = array.copy() if hasattr(array, "copy") else interop.copy(array)
    return copied


def _view_of(array: Array) -> interop.BufferView:
    # Weights are described before each step, without copying those of NumPy.
    is_read_as_is = isinstance(array, np.ndarray)
    return interop.as_view(array if is_read_as_is else interop.contiguous(array))


def _is_numpy(array: Array) -> bool:
    return isinstance(array, np.ndarray)


def _is_on_gpu(value: Any) -> bool:
    """Whether a parameter is an array on a GPU; it need not be an array at all."""
    if _is_numpy(value) or not (
        hasattr(value, "__dlpack_device__") or hasattr(value, "__cuda_array_interface__")
    ):
        return False
    return interop.is_on_gpu(value)


def _pair(result: Any, demand: str) -> tuple[Any, Any]:
    if type(result) is tuple and len(result) == 2:
        return result
    raise TypeError(f"Pipeline: {demand}, not {type(result).__qualname__}")


def _checked_loss(loss: Any, what_it_is: str) -> Any:
    """Return a loss that is one number, or an array without axes."""
    if pytree.is_array(loss):
        if math.prod(loss.shape) == 1 and "complex" not in str(loss.dtype):
            return loss.reshape(())
        what = f"{loss.dtype} of shape {tuple(loss.shape)}"
    elif isinstance(loss, numbers.Real):
        return loss
    else:
        what = f"a {type(loss).__qualname__}"
    raise ValueError(
        f"Pipeline: {what_it_is} must be one real number, not {what}: the mean over the microbatch"
    )


def _input_gradients(saved: _Saved, of_input: Any) -> list[Array | None]:
    """Return the gradients of the stage's inputs, after checking their shapes."""
    return pytree.gradients_like(
        saved.inputs, saved.input_shapes, of_input, "backward returned", "input"
    )


def _gradient_tree(saved: _Saved, gradients: Sequence[Any]) -> Any:
    """Return the gradient of the output, as the module's backward wants it."""
    if saved.of_loss is not None:
        (scale,) = gradients
        gradients = [None if array is None else array * scale for array in saved.of_loss]
    return pytree.unflatten(_without_constants(saved.outputs), gradients)


def _without_constants(structure: pytree.Structure) -> pytree.Structure:
    """Put None in place of what has no gradient."""
    kind = structure[0]
    if kind == "array":
        return pytree.ARRAY
    if kind in ("tuple", "list"):
        return (kind, *map(_without_constants, structure[1:]))
    if kind == "dict":
        return (kind, structure[1], *map(_without_constants, structure[2:]))
    return ("none",)
