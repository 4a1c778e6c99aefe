"""How DDP reads a module: its parameters and gradients, by name, as NumPy sees them.

A module is an object with ``parameters()`` and ``grads()``, each of which returns a dict
of name to array or a list of arrays, or it is the dict or list of parameters itself. The
arrays of a list are named by their position.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, MutableMapping, MutableSequence
from typing import Any, cast

import numpy as np

from ferro_dist.errors import InvalidArray
from ferro_dist.parallel.bucket import ParameterSpec, is_same_memory

__all__ = ["Gradients", "ModuleAdapter"]

NumpyArray = np.ndarray[Any, Any]

GRADIENT_DTYPES = ("float16", "bfloat16", "float32", "float64", "complex64", "complex128")


class ModuleAdapter:
    """A module's parameters and gradients, checked each time they are asked for.

    Parameters
    ----------
    module : object

    Attributes
    ----------
    module : object
    is_collection : bool
        Whether the module is a mere dict or list of parameters, without gradients.
    specs : dict of str to ParameterSpec
        The parameters at construction. Later arrays must fit them.
    """

    def __init__(self, module: object) -> None:
        self.module = module
        self.is_collection = isinstance(module, (Mapping, list, tuple))
        if not self.is_collection:
            _check_has_methods(module)
        self.specs = {
            name: _spec_of(name, array)
            for name, array in _named("parameter", self._parameters()).items()
        }
        if not self.specs:
            raise ValueError(f"DDP: {type(module).__name__} has no parameters")

    def parameters(self) -> dict[str, NumpyArray]:
        """Return views of all parameters."""
        views = self._views("parameter", self._parameters())
        for name in self.specs:
            if name not in views:
                raise ValueError(f"DDP: the module no longer has the parameter {name!r}")
        return views

    def gradients(self, grads: Any = None) -> Gradients:
        """Return views of the gradients given, or of those the module has."""
        holder = cast(Any, self.module).grads() if grads is None else grads
        views = self._views("gradient", holder)
        if len(views) < len(self.specs) and not self._keeps(holder, is_own=grads is None):
            absent = next(name for name in self.specs if name not in views)
            raise ValueError(
                f"DDP: there is no gradient of {absent!r} here, and no place to put the one that "
                "another rank may have. Fill it with zeros, or let grads() return the same dict "
                "or list at each call."
            )
        return Gradients(views, holder)

    def _parameters(self) -> Any:
        return self.module if self.is_collection else cast(Any, self.module).parameters()

    def _keeps(self, holder: Any, is_own: bool) -> bool:
        """Whether what is put into `holder` will be found there by its owner."""
        if not isinstance(holder, (MutableMapping, MutableSequence)):
            return False
        if isinstance(holder, MutableSequence) and len(holder) < len(self.specs):
            return False
        return not is_own or cast(Any, self.module).grads() is holder

    def _views(self, kind: str, arrays: Any) -> dict[str, NumpyArray]:
        """Return views of the arrays that are there."""
        views = {}
        for name, array in _named(kind, arrays).items():
            spec = self.specs.get(name)
            if spec is None:
                raise ValueError(f"DDP: {kind} {name!r} belongs to no parameter that was wrapped")
            if array is not None:
                views[name] = _fitting_view(kind, spec, array)
        return views


class Gradients:
    """One step's gradients.

    Attributes
    ----------
    views : dict of str to numpy.ndarray
        Those that are there.
    holder : dict or list
        What they were taken from.
    """

    def __init__(self, views: dict[str, NumpyArray], holder: Any) -> None:
        self.views = views
        self.holder = holder

    def put(self, name: str, average: NumpyArray) -> None:
        """Replace a gradient, or set one that was absent."""
        view = self.views.get(name)
        if view is None:
            key = name if isinstance(self.holder, Mapping) else int(name)
            self.holder[key] = average.copy()
        elif not is_same_memory(view, average):
            np.copyto(view, average)


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
        return {str(position): array for position, array in enumerate(arrays)}
    raise TypeError(
        f"DDP: {kind}s must be a dict or list of arrays, not one {type(arrays).__name__}"
    )


def _spec_of(name: str, array: Any) -> ParameterSpec:
    view = _host_view("parameter", name, array)
    if view.dtype.name not in GRADIENT_DTYPES:
        raise InvalidArray(
            f"DDP: parameter {name!r} is {view.dtype}; gradients are averaged in "
            f"{', '.join(GRADIENT_DTYPES)}. Leave what is not trained out of parameters().",
            op="DDP",
        )
    return ParameterSpec(name, view.shape, view.dtype)


def _fitting_view(kind: str, spec: ParameterSpec, array: Any) -> NumpyArray:
    view = _host_view(kind, spec.name, array)
    if view.shape != spec.shape or view.dtype != spec.dtype:
        raise ValueError(
            f"DDP: {kind} {spec.name!r} is {view.dtype.name} {view.shape}; "
            f"the parameter that was wrapped is {spec.dtype.name} {spec.shape}"
        )
    return view


def _host_view(kind: str, name: str, array: Any) -> NumpyArray:
    """NumPy's view of a writable array in host memory, without a copy."""
    if type(array) is np.ndarray:
        view = array
    elif isinstance(array, np.ma.MaskedArray):
        raise InvalidArray(f"DDP: {kind} {name!r} is masked, and would lose its mask", op="DDP")
    elif hasattr(array, "__dlpack__") and hasattr(array, "__array__"):
        view = np.asarray(array)
    else:
        raise TypeError(f"DDP: {kind} {name!r} is {type(array).__name__}, not an array")
    if not view.dtype.isnative:
        raise InvalidArray(f"DDP: {kind} {name!r} is not in native byte order", op="DDP")
    if not view.flags.writeable:
        raise InvalidArray(f"DDP: {kind} {name!r} is read-only", op="DDP")
    return view
