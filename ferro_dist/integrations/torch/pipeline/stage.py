"""Stages that are torch modules: backward is autograd's.

The input is a leaf of the stage's own graph. Of the output only its node in that graph is kept, so
that its memory is freed once it has been sent.
"""

from __future__ import annotations

import contextlib
import functools
import math
import operator
import warnings
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge

from ferro_dist.integrations.torch.gradient import add, copy_or_clear, dtype_of_gradient
from ferro_dist.integrations.torch.inference_mode import outside_inference_mode
from ferro_dist.integrations.torch.memory import as_tensor, zeros_in_group
from ferro_dist.integrations.torch.outputs import find_tensors
from ferro_dist.integrations.torch.pipeline.backward_split import WeightPart, run_input_part
from ferro_dist.integrations.torch.pipeline.surroundings import Buffers, Modes, Surroundings
from ferro_dist.integrations.torch.random import Seeded, draw_seed
from ferro_dist.integrations.torch.shareable import check_buffer, check_shareable
from ferro_dist.integrations.torch.sync_batch_norm import groups_in_use
from ferro_dist.integrations.torch.version_counter import version_counter
from ferro_dist.interop import dtype_code, numpy_dtype
from ferro_dist.parallel.pipeline import pytree
from ferro_dist.parallel.pipeline.activation_channel import ArraySpec, Parcel
from ferro_dist.parallel.pipeline.receive_pool import SMALLEST_NBYTES
from ferro_dist.parallel.pipeline.stage import ForwardInput, Stage

if TYPE_CHECKING:
    from ferro_dist.backends.base import Backend

__all__ = ["TorchStage"]

Tensor = Any


class _Saved(NamedTuple):
    inputs: list[Tensor | None]
    """The inputs that need a gradient; None in place of others."""
    outputs: list[GradientEdge | None]
    loss: Tensor | None
    """An empty tensor of the loss's dtype and device, if the output is one."""


class _Checkpoint(NamedTuple):
    """What is kept of a microbatch whose forward will be run again."""

    given: ForwardInput
    versions: list[int | None]
    """The version counter of each array of the input, before the first forward."""
    surroundings: Surroundings


class TorchStage(Stage):
    """A stage that is a ``torch.nn.Module``."""

    library = "torch"

    def __init__(self, module: Any) -> None:
        super().__init__(module)
        self._functions_warned_of: set[str] = set()
        self._gpu: Any = None
        self._receive_stream: Any = None

    def check_given(self, array: Any, name: str) -> None:
        if not isinstance(array, torch.Tensor):
            raise TypeError(
                f"Pipeline: {name} holds a {type(array).__module__}.{type(array).__qualname__}, "
                "and the stage is a torch module: give tensors, see torch.as_tensor"
            )
        if array.is_nested:
            raise TypeError(
                f"Pipeline: {name} holds a nested tensor, which cannot be cut into microbatches: "
                "give to_padded_tensor()"
            )
        if array.layout is not torch.strided:
            raise TypeError(
                f"Pipeline: {name} holds a tensor of layout {array.layout}, which cannot be cut "
                "into microbatches: give to_dense()"
            )

    def describe(self, array: Tensor) -> ArraySpec:
        is_on_host = array.is_cpu
        return ArraySpec(_name(array.dtype), tuple(array.shape), array.requires_grad, is_on_host)

    def describe_gradient(self, weight: Tensor) -> ArraySpec:
        return self.describe(weight)._replace(dtype=_name(dtype_of_gradient(weight)))

    def allocate(self, spec: ArraySpec) -> Tensor:
        dtype: torch.dtype = getattr(torch, spec.dtype)
        if not spec.is_on_host and self._gpu is None:
            raise TypeError(
                f"Pipeline: stage {self.number} is sent a tensor on a GPU, but torch has used none "
                "in this process: move the module with module.cuda(), or let the previous stage "
                "return .cpu()"
            )
        if not spec.is_on_host:
            return torch.empty(spec.shape, dtype=dtype, device=self._gpu)
        if math.prod(spec.shape) * dtype.itemsize < SMALLEST_NBYTES:
            return torch.empty(spec.shape, dtype=dtype, device="cpu")
        return as_tensor(self.pool.take(spec.shape, numpy_dtype(dtype_code(spec.dtype))))

    def note_thread(self) -> None:
        if not torch.cuda.is_initialized():
            return
        device = self._own_device()
        self._gpu = device if device.type == "cuda" else torch.device(torch.cuda.current_device())
        if self._receive_stream is None or self._receive_stream.device != self._gpu:
            # A separate stream: what arrives need not wait for what is being computed.
            self._receive_stream = torch.cuda.Stream(self._gpu)

    def receiving(self) -> contextlib.AbstractContextManager[Any]:
        if self._receive_stream is None:
            return contextlib.nullcontext()
        stream: contextlib.AbstractContextManager[Any] = torch.cuda.stream(self._receive_stream)
        return stream

    def take_over(self, received: Tensor) -> None:
        # It was allocated on the receiving stream: its memory must not be reused before the current
        # stream is done with it.
        received.record_stream(torch.cuda.current_stream(received.device))

    def deliver(self, spec: ArraySpec, received: Tensor) -> Tensor:
        return received.requires_grad_(spec.wants_gradient and _is_differentiable(received))

    def microbatch_input(self, part: Tensor, whole: Tensor) -> Tensor:
        return part.detach().requires_grad_(whole.requires_grad)

    def deliver_input_gradients(
        self, arrays: Sequence[Tensor], gradients: Sequence[Tensor | None]
    ) -> None:
        pairs = zip(arrays, gradients, strict=True)
        wanted = [(x, g) for x, g in pairs if x.requires_grad and g is not None]
        if wanted:
            # All at once: they may come from one graph, which backward frees.
            torch.autograd.backward([x for x, _ in wanted], [g for _, g in wanted])

    def item(self, loss: Tensor) -> float:
        return float(loss.detach())

    def one_like(self, loss: Tensor) -> Tensor:
        return torch.ones_like(loss, requires_grad=False)

    def zeros(self, like: Tensor) -> Tensor:
        return torch.zeros_like(like, requires_grad=False)

    def interrupt(self, error: BaseException) -> None:
        for group in groups_in_use(self.module):
            group.interrupt(error)

    @contextlib.contextmanager
    def evaluation(self) -> Iterator[None]:
        modes = Modes(self.module)
        try:
            self.module.eval()
            yield
        finally:
            modes.restore()

    @contextlib.contextmanager
    def untouched(self) -> Iterator[None]:
        buffers = Buffers(self.module)
        gradients = [(p, p.grad) for p in self.module.parameters()]
        try:
            for parameter, _ in gradients:
                parameter.grad = None
            with _without_gradient_hooks(self.module):
                yield
        finally:
            buffers.restore()
            for parameter, gradient in gradients:
                parameter.grad = gradient

    def parameters(self) -> dict[str, Tensor]:
        return {n: p for n, p in self.module.named_parameters() if p.requires_grad}

    def parameter(self, name: str) -> Tensor:
        return _find(self.module, name)

    def buffers(self) -> dict[str, Tensor]:
        frozen = {n: p for n, p in self.module.named_parameters() if not p.requires_grad}
        return {**frozen, **dict(self.module.named_buffers())}

    def check_shareable(self, what: str, array: Tensor) -> None:
        check_shareable("Pipeline", what, array)
        check_buffer("Pipeline", what, array, self.module)

    def load(self, name: str, value: Tensor) -> None:
        _find(self.module, name).data.copy_(value)

    def gradients(self, names: Sequence[str]) -> list[Tensor | None]:
        return [_find(self.module, name).grad for name in names]

    def set_gradients(self, names: Sequence[str], gradients: Sequence[Tensor]) -> None:
        for name, gradient in zip(names, gradients, strict=True):
            _find(self.module, name).grad = gradient

    def take_gradients(self, names: Sequence[str]) -> list[Tensor | None]:
        parameters = [_find(self.module, name) for name in names]
        gradients = [parameter.grad for parameter in parameters]
        for parameter in parameters:
            parameter.grad = None
        return gradients

    def add_gradients(self, names: Sequence[str], gradients: Sequence[Tensor]) -> None:
        for name, gradient in zip(names, gradients, strict=True):
            parameter = _find(self.module, name)
            added, parameter.grad = parameter.grad, gradient
            if added is None:
                continue
            if gradient.layout is torch.strided:
                # Where it was, as autograd adds: others may hold it, or memory that it is part of.
                with torch.no_grad():
                    gradient += added
            else:
                parameter.grad = add(added, gradient)

    def new_bucket(self, group: Backend, like: Tensor, count: int) -> Tensor:
        with outside_inference_mode():  # an evaluation may come first; steps write to it
            return zeros_in_group(count, dtype_of_gradient(like), like.device, group)

    def place(self, bucket: Tensor, offset: int, like: Tensor) -> Tensor:
        with outside_inference_mode():
            return bucket[offset : offset + like.numel()].view(like.shape)

    def write(self, places: Sequence[Tensor], gradients: Sequence[Tensor | None]) -> None:
        with torch.no_grad():
            copy_or_clear(places, gradients)

    def read(self, places: Sequence[Tensor]) -> list[Tensor]:
        return [place.clone() for place in places]

    def mark(self, bucket: Tensor, first: int, are_there: Sequence[bool]) -> None:
        bucket[first:] = 1
        # One by one: to bring them all to a GPU, the host would have to wait for it.
        for number in [number for number, is_there in enumerate(are_there) if not is_there]:
            bucket[first + number] = 0

    def _own_device(self) -> torch.device:
        """Return where the module is now: the user may move it between steps."""
        tensors = (*self.module.parameters(), *self.module.buffers())
        return next((tensor.device for tensor in tensors), torch.device("cpu"))

    def plain(self, weight: Tensor) -> Tensor:
        return weight.detach().contiguous()

    def _run_forward(self, given: ForwardInput) -> tuple[Parcel, _Saved]:
        parcel, _, loss_of = given
        if torch.is_inference_mode_enabled():
            # Autograd would record nothing, and backward find nothing to do.
            raise RuntimeError(
                "Pipeline: under torch.inference_mode() nothing can be kept for backward, while "
                "torch.no_grad() does no harm. If you need only outputs, call eval()"
            )
        with torch.enable_grad(), self._random_numbers(given):
            with _explaining_writes(self.number):
                output = self.module(pytree.unflatten(parcel.structure, parcel.arrays))
            if loss_of is not None:
                if not loss_of.counts:
                    _stop_gradients(output, parcel.arrays)
                output = _checked_loss(loss_of.value(output))
                self._check_dependence(output, parcel)
            structure, arrays = _flatten_tensors(output)
        saved = _Saved(
            [x if isinstance(x, torch.Tensor) and x.requires_grad else None for x in parcel.arrays],
            [get_gradient_edge(y) if y.requires_grad else None for y in arrays],
            None if loss_of is None else output.new_empty(0),
        )
        detached = [y.detach().requires_grad_(y.requires_grad) for y in arrays]
        return parcel._replace(structure=structure, arrays=detached), saved

    def _run_unsaved(self, given: ForwardInput, will_replay: bool) -> Parcel:
        parcel, _, loss_of = given
        with torch.no_grad(), self._random_numbers(given):
            output = self.module(pytree.unflatten(parcel.structure, parcel.arrays))
            if loss_of is not None:
                output = _checked_loss(loss_of.value(output))
        structure, arrays = _flatten_tensors(output)
        # Which of them will need a gradient is not known yet.
        arrays = [y.detach().requires_grad_(will_replay and _is_differentiable(y)) for y in arrays]
        return parcel._replace(structure=structure, arrays=arrays)

    def _run_replayable(self, given: ForwardInput) -> tuple[Parcel, _Checkpoint]:
        parcel = given.parcel
        versions = [version_counter(x) for x in parcel.arrays]
        checkpoint = _Checkpoint(given, versions, Surroundings(self.module))
        # Not the inputs themselves: the module may register a hook on one in both runs, and both
        # hooks would fire in backward.
        inputs = [x.detach().requires_grad_(x.requires_grad) for x in parcel.arrays]
        first = given._replace(parcel=parcel._replace(arrays=inputs))
        output = self._run_unsaved(first, will_replay=True)
        self._check_unchanged(checkpoint)
        checkpoint.surroundings.keep_changed()
        return output, checkpoint

    def _replay(self, kept: _Checkpoint) -> _Saved:
        self._check_unchanged(kept)
        changed = kept.surroundings.changed_weight()
        if changed is not None:
            raise ValueError(
                f"Pipeline: stage {self.number} is checkpointed, so its forward runs twice, and "
                f"its weight {changed!r} has been written to or replaced since the first time. Let "
                "the optimizer step once backward is through, not between forward and backward or "
                "in a hook."
            )
        with kept.surroundings.again():
            return self._run_forward(kept.given)[1]

    def _check_unchanged(self, checkpoint: _Checkpoint) -> None:
        if [version_counter(x) for x in checkpoint.given.parcel.arrays] == checkpoint.versions:
            return
        raise ValueError(
            f"Pipeline: stage {self.number} is checkpointed, so its forward runs twice, and its "
            "input has been written to since the first time. If the module does that, as "
            "ReLU(inplace=True) at its beginning, let it work out of place; if you do, between "
            "forward and backward, pass a copy."
        )

    def _check_dependence(self, loss: Tensor, inputs: Parcel) -> None:
        """Raise ValueError for a loss that would leave everything without a gradient."""
        if loss.requires_grad:
            return
        trained = (*self.module.parameters(), *inputs.arrays)
        if any(isinstance(x, torch.Tensor) and x.requires_grad for x in trained):
            raise ValueError(
                "Pipeline: the loss depends on no weight, so nothing would be trained: loss_fn "
                "(or the stage) detaches it, converts it, or makes it under torch.no_grad()"
            )

    def _run_backward(self, saved: _Saved, gradients: Sequence[Any]) -> list[Tensor | None]:
        edges, given = _with_gradient(saved, gradients)
        if edges:
            torch.autograd.backward(edges, given)
        return [_take_gradient(x) for x in saved.inputs]

    def _run_backward_input(
        self, saved: _Saved, gradients: Sequence[Any]
    ) -> tuple[list[Tensor | None], WeightPart]:
        edges, given = _with_gradient(saved, gradients)
        if not edges:
            return [None] * len(saved.inputs), WeightPart()
        inputs = [x for x in saved.inputs if x is not None]
        weight_part = run_input_part(edges, given, inputs, self._warn_of_undivided)
        return [_take_gradient(x) for x in saved.inputs], weight_part

    def _run_backward_weight(self, deferred: WeightPart) -> None:
        deferred.run()

    def _draw_seed(self, will_replay: bool) -> int | None:
        if not will_replay:
            return None
        # The second run must draw what the first has drawn.
        return draw_seed()

    def _random_numbers(self, given: ForwardInput) -> contextlib.AbstractContextManager[Any]:
        """Draw random numbers by a microbatch's seed, and leave the user's as they were."""
        if given.seed is None:
            return contextlib.nullcontext()
        generators = [torch.default_generator]
        if torch.cuda.is_initialized():
            generators += [torch.cuda.default_generators[i] for i in self._gpus_of(given.parcel)]
        return Seeded(generators, given.seed)

    def _gpus_of(self, inputs: Parcel) -> set[int]:
        """Return the GPUs on which the module draws random numbers: its own, and its input's."""
        devices = [self._own_device(), *(x.device for x in inputs.arrays)]
        return {device.index for device in devices if device.type == "cuda"}

    def _warn_of_undivided(self, function: str) -> None:
        if function in self._functions_warned_of:
            return
        self._functions_warned_of.add(function)
        warnings.warn(
            f"Pipeline stage {self.number}: the backward of {function} computes the gradients of "
            "input and weights together, and would run twice if it were divided. It is run whole, "
            "with the input's gradient: results are right, but these weights' gradients are not "
            "deferred.",
            RuntimeWarning,
            stacklevel=2,
        )


@contextlib.contextmanager
def _without_gradient_hooks(module: Any) -> Iterator[None]:
    """Call no hook that a user has on an added gradient: it may let an optimizer step."""
    hooks = [p._post_accumulate_grad_hooks for p in module.parameters()]
    # The dicts stay the same: torch holds on to them, and so do the handles that remove hooks.
    kept = [(of_weight, dict(of_weight)) for of_weight in hooks if of_weight]
    for of_weight, before in kept:
        of_weight.update(dict.fromkeys(before, _do_nothing))
    try:
        yield
    finally:
        for of_weight, before in kept:
            of_weight.update((key, before[key]) for key in before.keys() & of_weight.keys())


def _do_nothing(_weight: Tensor) -> None:
    return


@contextlib.contextmanager
def _explaining_writes(stage: int) -> Iterator[None]:
    """Say that a stage writes into its input, where autograd's message speaks of leaves."""
    try:
        yield
    except RuntimeError as error:
        if "leaf Variable that requires grad" not in str(error):
            raise
        raise ValueError(
            f"Pipeline: the module of stage {stage} writes into its input, as "
            "ReLU(inplace=True) at its beginning does, or into a weight. Let it work out of "
            f"place ({error})"
        ) from error


def _checked_loss(loss: Any) -> Tensor:
    if isinstance(loss, torch.Tensor) and loss.numel() == 1 and not loss.is_complex():
        return loss.reshape(())
    what = repr(type(loss).__name__)
    if pytree.is_array(loss):
        what = f"{_name(loss.dtype)} of shape {tuple(loss.shape)}"
    raise ValueError(
        "Pipeline: the loss must be a tensor with one element that is a real number, not "
        f"{what}. It is what loss_fn returns or, without a loss_fn, the last stage"
    )


def _stop_gradients(output: Any, inputs: Sequence[Tensor]) -> None:
    """Replace what the loss will send back by zeros. Backward runs: replicas may wait in it."""
    for tensor in find_tensors(output):
        # Other leaves than inputs are weights, which other microbatches use.
        if not tensor.is_leaf or any(tensor is x for x in inputs):
            tensor.register_hook(torch.zeros_like)


def _flatten_tensors(output: Any) -> tuple[pytree.Structure, list[Tensor]]:
    structure, arrays = pytree.flatten(output)
    for array in arrays:
        if not isinstance(array, torch.Tensor):
            raise TypeError(
                "Pipeline: a torch stage returns tensors (and None, numbers, tuples, lists, "
                f"dicts), not {type(array).__module__}.{type(array).__qualname__}"
            )
        if array.is_nested:
            raise TypeError("Pipeline: a torch stage returns no nested tensor: to_padded_tensor()")
        if array.layout is not torch.strided:
            raise TypeError(
                f"Pipeline: a torch stage returns dense tensors, not {array.layout}: to_dense()"
            )
    return structure, [_resolved(array) for array in arrays]


def _with_gradient(
    saved: _Saved, gradients: Sequence[Any]
) -> tuple[list[GradientEdge], list[Tensor]]:
    """Return the outputs that lead somewhere and have a gradient, and these gradients."""
    if saved.loss is not None:
        gradients = [saved.loss.new_full((), gradients[0])]
    pairs = [
        (edge, gradient)
        for edge, gradient in zip(saved.outputs, gradients, strict=True)
        if edge is not None and gradient is not None
    ]
    return [edge for edge, _ in pairs], [gradient for _, gradient in pairs]


def _take_gradient(x: Tensor | None) -> Tensor | None:
    if x is None:
        return None
    gradient, x.grad = x.grad, None
    return None if gradient is None else _resolved(gradient.to_dense())


def _resolved(tensor: Tensor) -> Tensor:
    """Return what can be read as it lies in memory: not merely marked as conjugated or negated."""
    return tensor.resolve_conj().resolve_neg()


@functools.cache
def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _is_differentiable(tensor: Tensor) -> bool:
    return bool(tensor.is_floating_point() or tensor.is_complex())


def _find(module: Any, name: str) -> Tensor:
    return operator.attrgetter(name)(module)
