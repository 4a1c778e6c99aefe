"""How DDP reads a module: its parameters and gradients, by name.

Arrays in host memory are read as NumPy arrays, those on a GPU stay what they are. A module is an
object with ``parameters()`` and ``grads()``, each of which returns a dict of name to array or a
list of arrays, or it is the dict or list of parameters itself. The arrays of a list are named by
their position.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, MutableMapping, MutableSequence, Sequence
from typing import Any, cast

import numpy as np

from ferro_dist import interop
from ferro_dist.arguments import in_order
from ferro_dist.errors import InvalidArray
from ferro_dist.parallel.buckets.averaging import check_averageable
from ferro_dist.parallel.buckets.bucket import Bucket, ParameterSpec, misplaced
from ferro_dist.parallel.ddp.reducer import Gradients

__all__ = ["ArrayGradients", "ModuleAdapter"]

NumpyArray = np.ndarray[Any, Any]


class ModuleAdapter:
    """A module's parameters and gradients, checked each time they are asked for.

    Parameters
    ----------
    module : object

    Attributes
    ----------
    module : object
    is_collection : bool
        Whether the module is just a dict or list of parameters, without gradients.
    specs : dict of str to ParameterSpec
        The parameters at construction. Later arrays must fit them.
    devices : dict of str to int or None
        The GPU of each parameter; None for one in host memory.
    """

    def __init__(self, module: object) -> None:
        self.module = module
        self.is_collection = isinstance(module, (Mapping, list, tuple))
        if not self.is_collection:
            _check_has_methods(module)
        arrays = _named("parameter", self._parameters())
        self.specs = {name: _spec_of(name, array) for name, array in arrays.items()}
        again = self.parameters()
        self.devices = {name: _device_of(array) for name, array in again.items()}
        if not self.specs:
            raise ValueError(f"DDP: {type(module).__name__} has no parameters")
        # `arrays` is kept until here: freed, it might leave its addresses to the next ones.
        for name, array in arrays.items():
            if not interop.have_same_address(_view("parameter", name, array), again[name]):
                raise ValueError(
                    f"DDP: parameters() makes a new array for {name!r} at each call, where the "
                    "values of other ranks would be lost. Return the arrays that the module works "
                    "with"
                )

    @property
    def example_on_gpu(self) -> Any:
        """Some parameter on the GPU; None if there is none."""
        on_gpu = [name for name, spec in self.specs.items() if spec.is_on_gpu]
        return self.parameters()[on_gpu[0]] if on_gpu else None

    def parameters(self) -> dict[str, Any]:
        """Return views of all parameters."""
        views = self._views("parameter", self._parameters())
        for name in self.specs:
            if name not in views:
                raise ValueError(f"DDP: the module no longer has the parameter {name!r}")
        return views

    def gradients(self, grads: Any = None, of: Iterable[str] | None = None) -> ArrayGradients:
        """Return views of the gradients given, or of the module's own.

        Those of the parameters `of` (None: of all) that are absent must have a place for the ones
        of other ranks.
        """
        holder = cast(Any, self.module).grads() if grads is None else grads
        views = self._views("gradient", holder)
        absent = None
        if len(views) < len(self.specs):
            names = self.specs if of is None else of
            absent = next((name for name in names if name not in views), None)
        if absent is not None and not self._keeps(holder, is_own=grads is None):
            raise ValueError(
                f"DDP: there is no gradient of {absent!r} here, and no place to put the one that "
                "another rank may have. Fill it with zeros, or let grads() return the same dict "
                "or list at each call."
            )
        return ArrayGradients(views, holder)

    def _parameters(self) -> Any:
        return self.module if self.is_collection else cast(Any, self.module).parameters()

    def _keeps(self, holder: Any, is_own: bool) -> bool:
        """Whether the owner of `holder` will find what is put into it."""
        if not isinstance(holder, (MutableMapping, MutableSequence)):
            return False
        if isinstance(holder, MutableSequence) and len(holder) < len(self.specs):
            return False
        return not is_own or cast(Any, self.module).grads() is holder

    def _views(self, kind: str, arrays: Any) -> dict[str, Any]:
        """Return views of the arrays that are there."""
        views = {}
        for name, array in _named(kind, arrays).items():
            spec = self.specs.get(name)
            if spec is None:
                raise ValueError(f"DDP: {kind} {name!r} belongs to no parameter that was wrapped")
            if array is not None:
                views[name] = _fitting_view(kind, spec, array)
        return views


class ArrayGradients(Gradients):
    """One step's gradients.

    Attributes
    ----------
    views : dict of str to array
        Those that are there.
    holder : dict or list
        What they were taken from.
    """

    def __init__(self, views: dict[str, Any], holder: Any) -> None:
        self.views = views
        self.holder = holder

    def pack(self, bucket: Bucket, is_leaving: bool) -> None:
        gradients = [self.views.get(spec.name) for spec in bucket.layout.specs]
        for position, gradient in enumerate(gradients):
            if gradient is not None and self._is_misplaced(gradient, bucket.views[position]):
                raise misplaced(bucket.layout.names[position])
        for position, gradient in enumerate(gradients):
            bucket.put_in(position, gradient)
        bucket.mark([gradient is not None for gradient in gradients])

    def put(self, bucket: Bucket, is_contributed: Sequence[bool] | None) -> None:
        specs = bucket.layout.specs
        flags = [True] * len(specs) if is_contributed is None else is_contributed
        for position, (spec, is_wanted) in enumerate(zip(specs, flags, strict=True)):
            if is_wanted:
                self._put(spec.name, bucket, position)

    def _is_misplaced(self, gradient: Any, slot: Any) -> bool:
        own = interop.as_view(gradient)
        if not own.nbytes or not self.memory.contains(own.address):
            return False
        return own.address != interop.as_view(slot).address or not own.is_contiguous

    def _put(self, name: str, bucket: Bucket, position: int) -> None:
        """Replace a gradient, or set one that was absent."""
        view = self.views.get(name)
        if view is None:
            key = name if isinstance(self.holder, Mapping) else int(name)
            self.holder[key] = interop.copy(bucket.views[position])
        else:
            bucket.take_out(position, view)


def _check_has_methods(module: object) -> None:
    for method in ("parameters", "grads"):
        if not callable(getattr(module, method, None)):
            raise TypeError(
                f"DDP: {type(module).__name__} has no method {method}(). A module is an object "
                "with parameters() and grads(), or a dict or list of parameters."
            )


def _named(kind: str, arrays: Any) -> Mapping[str, Any]:
    if isinstance(arrays, Mapping):
        for name in arrays:
            if not isinstance(name, str):
                raise TypeError(f"DDP: a {kind} must be named by a str, not by {name!r}")
        return arrays
    if isinstance(arrays, Iterable) and not hasattr(arrays, "dtype"):
        return {str(position): array for position, array in enumerate(in_order(arrays))}
    raise TypeError(
        f"DDP: {kind}s must be a dict or list of arrays, not one {type(arrays).__name__}"
    )


def _spec_of(name: str, array: Any) -> ParameterSpec:
    spec = _described(name, _view("parameter", name, array))
    remedy = " Leave what is not trained out of parameters()."
    check_averageable(f"parameter {name!r}", spec.dtype, remedy)
    return spec


def _fitting_view(kind: str, spec: ParameterSpec, array: Any) -> Any:
    view = _view(kind, spec.name, array)
    found = _described(spec.name, view)
    if found != spec:
        raise ValueError(
            f"DDP: {kind} {spec.name!r} is {_kind_of(found)}; "
            f"the parameter that was wrapped is {_kind_of(spec)}"
        )
    return view


def _kind_of(spec: ParameterSpec) -> str:
    return f"{spec.dtype.name} {spec.shape}{' on the GPU' if spec.is_on_gpu else ''}"


def _described(name: str, view: Any) -> ParameterSpec:
    if type(view) is np.ndarray:
        return ParameterSpec(name, view.shape, view.dtype)
    dtype = interop.numpy_dtype(interop.as_view(view).dtype)
    return ParameterSpec(name, tuple(view.shape), dtype, is_on_gpu=True)


def _device_of(view: Any) -> int | None:
    return None if type(view) is np.ndarray else interop.as_view(view).device_id


def _view(kind: str, name: str, array: Any) -> Any:
    """Return what can be written to: NumPy's view, or for an array on a GPU the array itself."""
    if type(array) is np.ndarray or not _is_on_gpu(array):
        return _host_view(kind, name, array)
    if interop.as_view(array).is_readonly:
        raise InvalidArray(f"DDP: {kind} {name!r} is read-only", op="DDP")
    return array


def _is_on_gpu(array: Any) -> bool:
    if not hasattr(array, "__dlpack_device__"):
        return False
    return int(array.__dlpack_device__()[0]) == interop.CUDA


def _host_view(kind: str, name: str, array: Any) -> NumpyArray:
    """NumPy's view of a writable array in host memory, without a copy."""
    if type(array) is np.ndarray:
        view = array
    elif isinstance(array, np.ma.MaskedArray):
        raise InvalidArray(f"DDP: {kind} {name!r} is masked, and would lose its mask", op="DDP")
    elif hasattr(array, "__dlpack__") and hasattr(array, "__array__"):
        view = _numpy_view(array)
    else:
        hint = ""
        if isinstance(array, dict | list | tuple):
            hint = (
                ". A nested tree is taken if its leaves are JAX's: "
                "jax.tree.map(jax.numpy.asarray, params) makes them so"
            )
        raise TypeError(f"DDP: {kind} {name!r} is {type(array).__name__}, not an array{hint}")
    if not view.dtype.isnative:
        raise InvalidArray(f"DDP: {kind} {name!r} is not in native byte order", op="DDP")
    if not view.flags.writeable:
        hint = ""
        if type(array).__module__.partition(".")[0] in ("jax", "jaxlib"):
            hint = (
                ", as all of JAX's are. Wrap the pytree of the parameters itself, "
                "DDP(params, backend): its sync_gradients returns new arrays"
            )
        raise InvalidArray(f"DDP: {kind} {name!r} is read-only{hint}", op="DDP")
    return view


def _numpy_view(array: Any) -> NumpyArray:
    # A torch parameter gives access to its memory once it is detached.
    array = array.detach() if getattr(array, "requires_grad", False) else array
    if str(array.dtype) != "torch.bfloat16":
        return np.asarray(array)
    # NumPy does not take these from torch, but takes integers of the same bits.
    integers = np.asarray(array.view(sys.modules["torch"].int16))
    return integers.view(interop.numpy_dtype(interop.dtype_code("bfloat16")))
