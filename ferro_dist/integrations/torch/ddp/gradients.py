"""The gradients of torch parameters, in buckets and out of them."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import (
    Callable,
    Iterable,
    Mapping,
    MutableMapping,
    MutableSequence,
    Sequence,
)
from typing import Any, TypeAlias

import torch

from ferro_dist._native.host import copy_plain
from ferro_dist.integrations.torch.ddp.accumulation import (
    Accumulation,
    Trace,
    elements_of,
    version_of,
)
from ferro_dist.integrations.torch.ddp.kept_views import leave_kept, may_be_kept
from ferro_dist.integrations.torch.gradient import as_dense, copy_or_clear, dtype_of_gradient
from ferro_dist.interop import dtype_code, numpy_dtype
from ferro_dist.parallel.buckets.bucket import (
    STREAMED_NBYTES,
    Bucket,
    BucketMemory,
    ParameterSpec,
    misplaced,
)
from ferro_dist.parallel.ddp.reducer import Gradients, NoGradients

__all__ = ["GivenGradients", "NoTorchGradients", "TorchGradients", "gpu_view", "spec_of"]

Tensor: TypeAlias = Any

# One thread copies 64 MiB past the caches in 5.4 ms, where two of torch's take 12.7 through them.
# If torch has more threads than these, it copies what is worth sharing among them.
FEW_THREADS = 4
SHARED_NBYTES = 64 << 10

_NOTHING_TO_DO = contextlib.nullcontext()


class TorchGradients(Accumulation, Gradients):
    """``grad`` of each parameter that is trained, in buckets.

    Attributes
    ----------
    is_ready : callable
        Whether a gradient was marked ready in this round.
    """

    def __init__(self) -> None:
        super().__init__()
        self.is_ready: Callable[[int], bool] = lambda number: False

    def let_go(self) -> None:
        for number, parameter in enumerate(self.parameters):
            if parameter.grad is None:
                self._averaged[number] = None
                self._traces.pop(number, None)

    def pack(self, bucket: Bucket, is_leaving: bool) -> None:
        parameters = [self.parameters[number] for number in bucket.members]
        gradients = [parameter.grad for parameter in parameters]
        if may_be_kept(bucket, gradients, self._averaged):
            leave_kept(bucket, gradients, self._averaged, self._aside)
        _renew_views(bucket)
        marks = self._mark(bucket, gradients)
        left = _copy_plain(bucket, bucket.views, gradients, self.memory)
        if left:
            self._copy(bucket, left, gradients, marks)
        if is_leaving:
            for parameter in parameters:
                parameter.grad = None
            return
        averaged = self._averaged
        for number, parameter, gradient, view in zip(
            bucket.members, parameters, gradients, bucket.views, strict=True
        ):
            if gradient is None:
                continue
            averaged[number] = view  # also where it was this rank's own, and lies there already
            if gradient is not view:
                parameter.grad = view

    def pack_one(self, bucket: Bucket, position: int) -> None:
        number = bucket.members[position]
        parameter = self.parameters[number]
        gradient = parameter.grad
        leave_kept(bucket, [gradient], self._averaged, self._aside, position)
        _renew_view(bucket, position)
        view = bucket.views[position]
        if gradient is None or gradient is view:
            return
        with torch.no_grad(), contextlib.suppress(TypeError, RuntimeError):
            if self.memory.contains(gradient.data_ptr()):
                return  # `pack` sees whether it is another's slot
            if _copy_plain(bucket, [view], [gradient], self.memory):
                view.copy_(gradient)
            parameter.grad = self._averaged[number] = view

    def pack_late(self, bucket: Bucket) -> None:
        late = [
            None if self.parameters[number].grad is view else self.parameters[number].grad
            for number, view in zip(bucket.members, bucket.views, strict=True)
        ]
        bucket.clear()
        with torch.no_grad():
            copy_or_clear(bucket.views, late)

    def put(self, bucket: Bucket, is_contributed: Sequence[bool] | None) -> None:
        is_here = not bucket.num_missing and not bucket.is_leaving
        if is_here:
            self._refuse_taken(bucket)  # by a hook on autograd's node, which runs after all others
        if self._is_idempotent and is_here:
            return  # all have been in place since packing, and were contributed by this rank
        parameters, averaged = self.parameters, self._averaged
        if self._is_idempotent and is_contributed is None:
            for number, view in zip(bucket.members, bucket.views, strict=True):
                parameters[number].grad = averaged[number] = view
            return
        flags = is_contributed or [True] * len(bucket.members)
        contents = [] if self._is_idempotent else bucket.own_views
        for position, (number, view, is_wanted) in enumerate(
            zip(bucket.members, bucket.views, flags, strict=True)
        ):
            parameter = parameters[number]
            aside = self._aside.pop(number, None)
            if aside is not None:
                view += aside.averaged
            if is_wanted or aside is not None or parameter.grad is not None:
                averaged[number] = view
                if parameter.grad is not view:
                    parameter.grad = view
                if not self._is_idempotent:
                    self._traces[number] = Trace(version_of(view), contents[position])

    def make_way_for(self, given: GivenGradients, memory: BucketMemory) -> None:
        """Move what lies in buckets to memory of its own, save for what is given itself."""
        numbers = range(len(self.parameters))
        dense = [g for g in map(given.get, numbers) if g is not None and not _is_sparse(g)]
        addresses = {gradient.data_ptr() for gradient in dense}
        for number in numbers:
            gradient = self.parameters[number].grad
            if gradient is None:
                self._averaged[number] = None  # or it would pass for one that the user keeps
            if gradient is None or _is_sparse(gradient):
                continue
            address = gradient.data_ptr()
            if memory.contains(address) and address not in addresses:
                self._replace(number, gradient.detach().clone())

    def leave_kept(self, bucket: Bucket) -> None:
        """Leave averages to a user who keeps them, as the bucket will be filled by others alone."""
        gradients = [self.parameters[number].grad for number in bucket.members]
        leave_kept(bucket, gradients, self._averaged)
        _renew_views(bucket)

    def take_back(self) -> None:
        # The slots in buckets hold this rank's own gradients again. Those that were averaged
        # before, and are not put aside, are contributed once more, by all ranks, which changes
        # nothing.
        self._averaged = [None] * len(self.parameters)
        for number in self._aside:
            own = self.parameters[number].grad
            # It is kept beside the sum that is shown, while other rounds fill the bucket.
            if own is not None and not _is_sparse(own) and self.memory.contains(own.data_ptr()):
                self.parameters[number].grad = own.detach().clone()
        self.end_local()

    def _mark(self, bucket: Bucket, gradients: Sequence[Tensor]) -> list[tuple[Tensor, Tensor]]:
        """Mark what this rank contributes, save for what `Bucket.mark_all` leaves to be copied."""
        if not bucket.num_missing:
            return bucket.mark_all()
        is_given = [
            gradient is not None
            and (gradient is not self._averaged[number] or self.is_ready(number))
            for number, gradient in zip(bucket.members, gradients, strict=True)
        ]
        bucket.mark(is_given)
        return []

    def _copy(
        self,
        bucket: Bucket,
        left: Sequence[int],
        gradients: Sequence[Tensor],
        marks: list[tuple[Tensor, Tensor]],
    ) -> None:
        """Copy the gradients that are left, and marks, all with one call."""
        targets = [*(bucket.views[position] for position in left), *(lanes for lanes, _ in marks)]
        contents = [*(gradients[position] for position in left), *(mark for _, mark in marks)]
        copy: Callable[..., object] = torch._foreach_copy_
        if not _are_elsewhere(gradients, self.memory):
            self._refuse_taken(bucket)
            _refuse_misplaced(bucket, gradients, self.memory)
            copy = copy_or_clear
        # Backward has turned it off already, and to do so again takes longer than to ask.
        with torch.no_grad() if torch.is_grad_enabled() else _NOTHING_TO_DO:
            copy(targets, contents)

    def _refuse_taken(self, bucket: Bucket) -> None:
        parameters = self.parameters
        for number in [n for n in bucket.members if parameters[n].grad is None]:
            if not self.is_ready(number):
                continue
            name = bucket.layout.names[bucket.members.index(number)]
            if not parameters[number].requires_grad:
                raise RuntimeError(
                    f"DDP: parameter {name!r} was frozen between forward and backward. Freeze "
                    "before forward, on all ranks."
                )
            raise RuntimeError(
                f"DDP: the gradient of {name!r} was set to None in backward, before it was "
                "averaged, perhaps by a hook that steps an optimizer. Use "
                "ddp.step_in_backward(optimizer), which steps with averages."
            )


class NoTorchGradients(NoGradients):
    """The gradients of a rank that has run out of data. Earlier averages stay with their user.

    Parameters
    ----------
    own : TorchGradients
        The earlier ones.
    """

    def __init__(self, own: TorchGradients) -> None:
        self._own = own

    def let_go(self) -> None:
        self._own.let_go()

    def pack(self, bucket: Bucket, is_leaving: bool) -> None:
        self._own.leave_kept(bucket)
        super().pack(bucket, is_leaving)


def _renew_views(bucket: Bucket) -> None:
    """Replace views that the user, whose ``grad`` they are, has made something else of.

    ``grad.data = ...`` gives them other memory, ``grad.t_()`` another order in it; an operation on
    ``grad`` outside of ``no_grad`` gives them a graph, which would grow with every step.
    """
    views, strides = bucket.views, bucket.layout.strides
    is_there = list(map(torch.Tensor.data_ptr, views)) == bucket.addresses
    is_as_made = is_there and list(map(torch.Tensor.stride, views)) == strides
    if is_as_made and True not in [view.requires_grad for view in views]:
        return
    for position in range(len(views)):
        _renew_view(bucket, position)


def _renew_view(bucket: Bucket, position: int) -> None:
    view = bucket.views[position]
    is_there = view.data_ptr() == bucket.addresses[position]
    is_as_made = is_there and view.stride() == bucket.layout.strides[position]
    if not is_as_made or view.requires_grad:
        bucket.views[position] = bucket.new_view(position)


def _are_elsewhere(gradients: Iterable[Tensor], memory: BucketMemory) -> bool:
    """Whether all are there, dense and in no bucket, as nearly always; costs little to find out."""
    try:
        return not memory.contains_any(map(torch.Tensor.data_ptr, gradients))
    except (TypeError, RuntimeError):  # one is None, or sparse
        return False


def _refuse_misplaced(bucket: Bucket, gradients: Sequence[Tensor], memory: BucketMemory) -> None:
    """Refuse gradients that lie in other gradients' slots, where they are overwritten."""
    names = bucket.layout.names
    for name, view, gradient in zip(names, bucket.views, gradients, strict=True):
        if gradient is None or gradient is view or _is_sparse(gradient) or not gradient.numel():
            continue
        if memory.contains(gradient.data_ptr()) and elements_of(gradient) != elements_of(view):
            raise misplaced(name)


def _copy_plain(
    bucket: Bucket, slots: list[Tensor], gradients: list[Tensor | None], memory: BucketMemory
) -> Sequence[int]:
    """Copy gradients to their slots as `copy_plain` does; return the positions of those left."""
    if bucket.is_on_gpu:
        return range(len(slots))
    left = copy_plain(
        slots,
        gradients,
        start=memory.start,
        stop=memory.stop,
        streamed_nbytes=STREAMED_NBYTES,
        limit_nbytes=sys.maxsize if torch.get_num_threads() <= FEW_THREADS else SHARED_NBYTES,
    )
    torch.autograd.graph.increment_version(slots)
    return left


class GivenGradients(Gradients):
    """Gradients that the user passes in, in place of those of the parameters.

    Parameters
    ----------
    grads : dict of str to torch.Tensor, or list of torch.Tensor
        Absent ones are None, or not in the dict.
    parameters : dict of str to torch.nn.Parameter
        Those that are trained.
    order : sequence of int
        The positions of parameters in the dict, by number.

    Raises
    ------
    TypeError, ValueError
        They do not fit the parameters.
    """

    def __init__(self, grads: Any, parameters: Mapping[str, Tensor], order: Sequence[int]) -> None:
        is_named = isinstance(grads, MutableMapping)
        if not is_named and not isinstance(grads, MutableSequence):
            raise TypeError(f"DDP: gradients must be a dict or a list, not {type(grads).__name__}")
        self._holder = grads
        keys: list[Any] = list(parameters) if is_named else list(range(len(parameters)))
        self._keys = [keys[position] for position in order]
        if len(grads) != len(parameters) and not is_named:
            raise ValueError(f"DDP: {len(grads)} gradients for {len(parameters)} parameters")
        for name in set(grads).difference(parameters) if is_named else ():
            raise ValueError(f"DDP: gradient {name!r} belongs to no parameter that is trained")
        for key, (name, parameter) in zip(keys, parameters.items(), strict=True):
            _check_fits(name, grads.get(key) if is_named else grads[key], parameter)

    def pack(self, bucket: Bucket, is_leaving: bool) -> None:
        gradients = [self.get(number) for number in bucket.members]
        leave_kept(bucket, gradients)
        _renew_views(bucket)
        _refuse_misplaced(bucket, gradients, self.memory)
        for gradient, view in zip(gradients, bucket.views, strict=True):
            if gradient is None:
                view.zero_()
            else:
                view.copy_(as_dense(gradient.detach()))
        bucket.mark([gradient is not None for gradient in gradients])

    def put(self, bucket: Bucket, is_contributed: Sequence[bool] | None) -> None:
        flags = is_contributed or [True] * len(bucket.members)
        for number, view, is_wanted in zip(bucket.members, bucket.views, flags, strict=True):
            gradient = self.get(number)
            if gradient is not None and not _is_sparse(gradient):
                self.replace(number, view)
            elif gradient is not None or is_wanted:
                self.replace(number, view.clone())  # the slot will be filled again

    def get(self, number: int) -> Tensor:
        """Return a gradient; None if there is none."""
        key = self._keys[number]
        return self._holder.get(key) if isinstance(key, str) else self._holder[key]

    def replace(self, number: int, average: Tensor) -> None:
        """Overwrite a gradient; where there is none, or a sparse one, give a new one."""
        gradient = self.get(number)
        if gradient is None or _is_sparse(gradient) or _is_sparse(average):
            self._holder[self._keys[number]] = average
        else:
            gradient.detach().copy_(average)


def _is_sparse(gradient: Tensor) -> bool:
    return gradient.layout is not torch.strided


def _check_fits(name: str, gradient: Tensor, parameter: Tensor) -> None:
    if gradient is None:
        return
    if not isinstance(gradient, torch.Tensor):
        raise TypeError(f"DDP: gradient {name!r} is {type(gradient).__name__}, not a tensor")
    dtype = dtype_of_gradient(parameter)
    if gradient.shape != parameter.shape or gradient.dtype != dtype:
        raise ValueError(
            f"DDP: gradient {name!r} is {gradient.dtype} {tuple(gradient.shape)}; "
            f"the parameter is {dtype} {tuple(parameter.shape)}"
        )


def gpu_view(flat: Tensor, offset: int, spec: ParameterSpec) -> Tensor:
    """Return the slot of a gradient in a flat tensor, in the memory order of its parameter."""
    # Through `data`: slices of one tensor share its version counter.
    elements = flat.data[offset : offset + spec.count]
    if not spec.axes:
        return elements.view(spec.shape)
    stored = elements.view([spec.shape[axis] for axis in spec.axes])
    return stored.permute([spec.axes.index(axis) for axis in range(stored.dim())])


def spec_of(name: str, tensor: Tensor) -> ParameterSpec:
    """Describe a tensor, with the order of its dimensions in memory if it is dense."""
    dtype = numpy_dtype(dtype_code(tensor.dtype))
    shape = tuple(tensor.shape)
    if tensor.is_contiguous():
        return ParameterSpec(name, shape, dtype, is_on_gpu=tensor.is_cuda)
    axes = tuple(sorted(range(tensor.dim()), key=lambda axis: -tensor.stride(axis)))
    is_dense = tensor.permute(axes).is_contiguous()
    return ParameterSpec(name, shape, dtype, axes if is_dense else (), tensor.is_cuda)
