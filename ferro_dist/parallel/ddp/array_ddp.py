"""DDP of modules whose parameters and gradients are arrays that can be written to."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Generic, TypeVar, cast

from ferro_dist import interop
from ferro_dist.collective import broadcast
from ferro_dist.parallel.buckets.gpu_memory import GpuMemory
from ferro_dist.parallel.ddp.adapter import ArrayGradients, ModuleAdapter
from ferro_dist.parallel.ddp.options import Options
from ferro_dist.parallel.ddp.reducer import Reducer
from ferro_dist.parallel.ddp.reducing_ddp import ReducingDDP
from ferro_dist.parallel.group_checks import check_reach
from ferro_dist.parallel.interruption import telling

__all__ = ["ArrayDDP"]

ModuleT = TypeVar("ModuleT")


class ArrayDDP(ReducingDDP[ModuleT], Generic[ModuleT]):
    """DDP of an object with ``parameters()`` and ``grads()``, or of a dict or list of arrays.

    To avoid the copies in and out of buckets, let the module compute its gradients in them:
    ``model.gradients = ddp.gradient_buffers()``. To reduce while backward goes on, call `ready`
    after each layer.
    """

    __slots__ = ("__weakref__", "_adapter", "_gave_buffers", "_given")

    def _wrap(self, module: ModuleT, options: Options) -> list[str]:
        self._adapter: ModuleAdapter | None = ModuleAdapter(module)
        self._gave_buffers = False
        self._given: ArrayGradients | None = None
        for name, device in self._adapter.devices.items():
            check_reach(f"parameter {name!r}", device, options.backend)
        options.check_parameters(tuple(self._adapter.specs.values()))
        return [f"parameter {i} {spec}" for i, spec in enumerate(self._adapter.specs.values())]

    def _prepare(self, options: Options, first_tag: int) -> None:
        adapter = self._checked_adapter()
        example = adapter.example_on_gpu
        self._reducer = Reducer(
            tuple(adapter.specs.values()),
            options,
            lambda buffer: buffer,
            gpu_memory=None if example is None else GpuMemory(options.backend, example),
            follows_order=False,  # gradient_buffers are always the same arrays
            first_tag=first_tag,
        )

    @property
    def _held(self) -> Any:
        return None if self._adapter is None else self._adapter.module

    def _release(self) -> None:
        self._adapter = None
        self._reducer.lay_out(())

    def gradient_buffers(self) -> dict[str, Any]:
        """Return arrays to compute gradients in, which `sync_gradients` need not copy.

        Returns
        -------
        dict of str to array
            One for each parameter, of its shape and dtype, in the same kind of memory: from NumPy,
            or on a GPU from the parameters' library. Zero at first; always the same arrays. They
            lie in buckets, and hold the average after `sync_gradients`.
        """
        specs = self._checked_adapter().specs
        self._gave_buffers = True
        views = {
            spec.name: view
            for bucket in self._reducer.buckets
            for spec, view in zip(bucket.layout.specs, bucket.views, strict=True)
        }
        return {name: views[name] for name in specs}

    def ready(self, layer: str | int) -> None:
        """Say that gradients are final, so that they may be reduced while backward goes on.

        `sync_gradients` does the rest. Until then these gradients must not be touched.

        Parameters
        ----------
        layer : str or int
            A parameter's name, or the part before the dot in the names of several; in a list the
            position of one. The gradients are those of the module's ``grads()``, or for a dict or
            list of parameters those of `gradient_buffers`.

        Raises
        ------
        ValueError
            There is no such parameter, or its gradient has been reported since the last
            `sync_gradients`.
        """
        adapter = self._checked_adapter()
        name = str(layer)
        own = {
            number: known
            for number, known in enumerate(adapter.specs)
            if known == name or known.startswith(f"{name}.")
        }
        if not own:
            raise ValueError(f"DDP.ready: there is no parameter {name!r}, nor any of such a layer")
        if self._no_sync_depth:
            return
        grads = self._buffers_in_use() if adapter.is_collection else None
        gradients = adapter.gradients(grads, of=own.values())  # others may come until the end
        if self._given is None:
            self._given = ArrayGradients({}, gradients.holder)
            self._reducer.begin(self._given)
        for number, known in own.items():
            if self._reducer.is_ready(number):
                raise ValueError(f"DDP.ready: the gradient of {known!r} was ready before")
        self._given.views.update(gradients.views)
        with telling(self._tell_the_others):
            for number in own:
                self._reducer.mark_ready(number)

    def _average(self, grads: Any, weight: float | None) -> Any:
        adapter = self._checked_adapter()
        if self._given is not None and (grads is not None or weight is not None):
            raise ValueError("DDP.sync_gradients: after ready() it takes neither grads nor weight")
        if grads is None and adapter.is_collection:
            grads = self._buffers_in_use()
        gradients = adapter.gradients(grads)
        if self._no_sync_depth:
            return gradients.holder
        if self._given is None:
            self._reducer.begin(gradients, weight=weight)
        else:
            self._given.views.update(gradients.views)
            self._given.holder = gradients.holder
            self._given = None
        self._finish_round()
        return gradients.holder

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module."""
        return cast(Any, self.module)(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        # Called for attributes that the wrapper lacks. Protocols such as copying look up dunder
        # names: the module's own would speak for the wrong object.
        if name.startswith("__") or hasattr(type(self), name):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        if self._held is None:
            raise AttributeError(f"this DDP has no {name!r}: into_inner() gave its module back")
        return getattr(self.module, name)

    def __setattr__(self, name: str, value: Any) -> None:
        # Attributes read through the wrapper are also written through it: a setting left on the
        # wrapper would never reach the module.
        if hasattr(type(self), name):
            object.__setattr__(self, name, value)
        else:
            setattr(self.module, name, value)

    def __delattr__(self, name: str) -> None:
        if hasattr(type(self), name):
            object.__delattr__(self, name)
        else:
            delattr(self.module, name)

    def __repr__(self) -> str:
        if self._adapter is None:
            return "<DDP, module given back>"
        group = f"rank {self._backend.rank} of {self._backend.world_size}"
        size = f"{len(self._adapter.specs)} parameters, {len(self._reducer.buckets)} buckets"
        return f"<DDP of {type(self.module).__name__}, {group}, {size}>"

    def _broadcast(self, root: int) -> None:
        for array in self._checked_adapter().parameters().values():
            if interop.as_view(array).is_contiguous:
                broadcast(array, self._backend, root, out=array)
            else:
                array[...] = broadcast(array, self._backend, root)

    def _fingerprints(self) -> Iterable[tuple[str, bytes]]:
        for name, array in self._checked_adapter().parameters().items():
            yield f"parameter {name!r}", interop.content_of(array)

    def _checked_adapter(self) -> ModuleAdapter:
        if self._adapter is None:
            raise ValueError("this DDP gave its module back with into_inner()")
        return self._adapter

    def _buffers_in_use(self) -> dict[str, Any]:
        if not self._gave_buffers:
            raise ValueError(
                "DDP.sync_gradients: a dict or list of parameters has no gradients of its own. "
                "Pass them, or compute them in gradient_buffers()."
            )
        return self.gradient_buffers()
