"""What must be equal on all ranks of a torch module: its parameters and its buffers."""

from __future__ import annotations

import dataclasses
import itertools
import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import torch

from ferro_dist import interop
from ferro_dist.collective import broadcast
from ferro_dist.errors import CollectiveMismatch
from ferro_dist.integrations.torch.ddp.gradients import spec_of
from ferro_dist.integrations.torch.gradient import dtype_of_gradient
from ferro_dist.integrations.torch.inference_mode import outside_inference_mode
from ferro_dist.integrations.torch.shareable import check_buffer, check_shareable, gets_gradient
from ferro_dist.integrations.torch.version_counter import version_counter
from ferro_dist.parallel.buckets.averaging import check_averageable
from ferro_dist.parallel.buckets.bucket import ParameterSpec
from ferro_dist.parallel.buckets.gpu_memory import GpuMemory
from ferro_dist.parallel.group_checks import check_reach
from ferro_dist.parallel.manifest import agree_on_manifest, explain_mismatch

if TYPE_CHECKING:
    from ferro_dist.backends.base import Backend

__all__ = [
    "BufferShare",
    "ModuleParameters",
    "broadcast_tensor",
    "fingerprints",
    "show_changes",
    "specs_of",
]

Tensor: TypeAlias = Any

_END = object()
_KNOWS_GPUS = torch.backends.cuda.is_built()

_SHORTENED = (
    "DDP: parameter {name!r} is the table of an embedding with max_norm, which in forward shortens "
    "the rows that this rank looks up, and no others: replicas would drift apart. Build it without "
    "max_norm, and shorten all rows after each step, under torch.no_grad(): "
    "weight.renorm_(norm_type, 0, max_norm)."
)

ALIGNMENT_NBYTES = 64  # a cache line, and more than any dtype needs


class _Members:
    """What is in some tables of modules: notices what is put in, taken out or replaced."""

    def __init__(self, tables: Iterable[Mapping[str, object]]) -> None:
        self._tables = list(tables)
        self._noted = list(self._current())

    def have_changed(self) -> bool:
        # A twentieth of the time of `module.parameters()`: this is asked at every forward.
        return not all(map(operator.is_, self._current(), self._noted))

    def _current(self) -> Iterator[object]:
        """Yield all of them, then a mark, as their number may have changed."""
        values = map(operator.methodcaller("values"), self._tables)
        return itertools.chain(itertools.chain.from_iterable(values), (_END,))


def _members_of(modules: Iterable[Any]) -> _Members:
    """Return their parameters and the modules in them."""
    return _Members(table for part in modules for table in (part._parameters, part._modules))


class ModuleParameters:
    """A module's parameters, and what about them may change after it was wrapped.

    Parameters
    ----------
    module : torch.nn.Module
    backend : Backend
        The group that must reach them.

    Attributes
    ----------
    named : dict of str to torch.nn.Parameter
        Tied ones once, by their first name.
    """

    def __init__(self, module: Any, backend: Backend) -> None:
        self.named: dict[str, Tensor] = dict(module.named_parameters())
        self._backend = backend
        self._module = module
        self._modules = list(module.modules())
        self._members = _members_of(self._modules)
        kinds = (torch.nn.Embedding, torch.nn.EmbeddingBag)
        embeddings = [part for part in self._modules if isinstance(part, kinds)]
        self._sparse_ids = {id(part.weight) for part in embeddings if part.sparse}
        self._shortened_ids = {id(part.weight) for part in embeddings if part.max_norm is not None}
        self._check()
        self._all = list(self.named.values())
        self._states = self._current_states()

    @property
    def trained(self) -> dict[str, Tensor]:
        """The parameters that require grad."""
        return {name: p for name, p in self.named.items() if p.requires_grad}

    @property
    def dense(self) -> dict[str, Tensor]:
        """The trained parameters whose gradients lie in buckets."""
        return {name: p for name, p in self.trained.items() if id(p) not in self._sparse_ids}

    @property
    def sparse(self) -> dict[str, Tensor]:
        """The trained parameters of layers that were made with ``sparse=True``."""
        return {name: p for name, p in self.trained.items() if id(p) in self._sparse_ids}

    def labelled(self) -> Iterator[tuple[str, Tensor]]:
        """Yield each with what errors call it."""
        for name, parameter in self.named.items():
            yield f"parameter {name!r}", parameter

    def lines(self) -> list[str]:
        """Return a line for each parameter, of what ranks must agree on."""
        return [
            f"parameter {number} {spec_of(name, p)}"
            f"{', with sparse gradients' if id(p) in self._sparse_ids else ''}"
            f"{'' if p.requires_grad else ', frozen'}"
            for number, (name, p) in enumerate(self.named.items())
        ]

    def have_changed(self) -> bool:
        """Whether trained parameters, their places, dtypes or shapes differ from those accepted.

        Raises
        ------
        ValueError
            Parameters were added, removed or replaced.
        InvalidArray
            They were moved or converted in a way that prevents averaging.
        """
        if self._members.have_changed():
            self._refuse_others()
        if self._current_states() == self._states:
            return False
        self._check()
        return True

    def accept_changes(self) -> None:
        """Accept what is trained now."""
        self._states = self._current_states()

    def _check(self) -> None:
        for name, parameter in self.named.items():
            _check_place(f"parameter {name!r}", parameter, self._backend)
            if parameter.requires_grad:
                _trainable_spec(name, parameter)
                if id(parameter) in self._shortened_ids and self._backend.world_size > 1:
                    raise ValueError(_SHORTENED.format(name=name))

    def _current_states(self) -> list[Any]:
        parameters = self._all
        return [
            [p.requires_grad for p in parameters],
            [p.dtype for p in parameters],
            list(map(torch.Tensor.size, parameters)),
            [p.is_cuda for p in parameters] if _KNOWS_GPUS else [],
        ]

    def _refuse_others(self) -> None:
        current = dict(self._module.named_parameters())
        for name in [*current, *self.named]:
            if current.get(name) is not self.named.get(name):
                raise ValueError(
                    f"DDP: parameter {name!r} was added, removed or replaced after the module was "
                    "wrapped. Call into_inner() and wrap the module again, on all ranks. Inside of "
                    "torch.func call the module itself, and sync_gradients() of what comes out."
                )
        # A module of the same parameters in another place.
        self._modules = list(self._module.modules())
        self._members = _members_of(self._modules)


class BufferShare:
    """A module's buffers: those of each memory in one array that the group moves without a copy.

    They are written behind autograd's back, which would otherwise consider graphs that it still has
    invalid: a BatchNorm saves its running means, but does not use them in training. Only where
    autograd has seen the module itself change a buffer, it is shown this change, too: a graph that
    uses the buffer would otherwise go on with that of another rank.

    Parameters
    ----------
    module : torch.nn.Module
    backend : Backend
        The group that must reach them.
    """

    def __init__(self, module: Any, backend: Backend) -> None:
        self._backend = backend
        self._module = module
        self._collect()
        self._check()
        current = [buffer for _, buffer in self.named()]
        self._kinds = list(map(_kind, current))
        self._parts: list[_BufferPart] = []
        self._note(current, [buffer.data for buffer in current])

    def _collect(self) -> None:
        """Note where buffers may be."""
        parts = list(self._module.named_modules())
        self._tables = [(f"{prefix}." if prefix else "", part._buffers) for prefix, part in parts]
        self._members = _Members(part._modules for _, part in parts)

    def named(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the buffers that there are now: some may have been put in or taken out since."""
        if self._members.have_changed():
            self._collect()
        seen = set()
        for prefix, table in self._tables:
            for key, buffer in table.items():
                if buffer is not None and id(buffer) not in seen:
                    seen.add(id(buffer))
                    yield prefix + key, buffer

    def labelled(self) -> Iterator[tuple[str, Tensor]]:
        """Yield each with what errors call it."""
        for name, buffer in self.named():
            yield f"buffer {name!r}", buffer

    def lines(self) -> list[str]:
        """Return a line for each buffer, of what ranks must agree on."""
        return [
            f"buffer {number} {spec_of(name, buffer.contiguous())}"
            for number, (name, buffer) in enumerate(self.named())
        ]

    def broadcast(self, root: int, tag: int) -> None:
        """Overwrite the buffers of all ranks with those of one, with one call for each memory.

        Raises
        ------
        CollectiveMismatch
            Buffers have been added, removed, converted, resized or moved, or parts replaced, but
            not alike on all ranks; names the first that differs. The group stays usable.
        """
        current = [buffer for _, buffer in self.named()]
        buffers = [buffer.data for buffer in current]
        kinds = list(map(_kind, current))
        try:
            if kinds != self._kinds:
                self._follow(kinds)
                self._note(current, buffers)
            if buffers and not self._parts:
                with outside_inference_mode():  # they are written to in backward
                    self._parts = self._laid_out(buffers)
            for part in self._parts:
                part.broadcast(buffers, self._backend, root, tag)
        except CollectiveMismatch as error:
            raise explain_mismatch(error, self.lines(), self._backend, "DDP", 0) from error
        if self._backend.world_size > 1:
            self._show_changes_of_module(current, buffers)

    def _show_changes_of_module(self, buffers: Sequence[Tensor], memory: list[Tensor]) -> None:
        """Show autograd, on all ranks, that buffers were written to which the module changes."""
        before = zip(self._noted, self._versions, strict=True)
        for buffer, now, (noted, known) in zip(buffers, memory, before, strict=True):
            if version_counter(buffer) != known or now.data_ptr() != noted.data_ptr():
                show_changes([buffer])
        self._note(buffers, memory)

    def _note(self, buffers: Sequence[Tensor], memory: list[Tensor]) -> None:
        # Their memory is kept until then: it cannot become that of a new buffer.
        self._noted = memory
        self._versions = list(map(version_counter, buffers))

    def _follow(self, kinds: list[Any]) -> None:
        """Accept buffers of other kinds, if all ranks have the same."""
        self._check()
        agree_on_manifest(self.lines(), self._backend, "DDP")
        self._kinds, self._parts = kinds, []

    def _check(self) -> None:
        for label, buffer in self.labelled():
            _check_place(label, buffer, self._backend)
            if self._backend.world_size > 1:
                check_buffer("DDP", label, buffer, self._module)

    def _laid_out(self, buffers: Sequence[Tensor]) -> list[_BufferPart]:
        numbers_of: dict[bool, list[int]] = {}
        for number, buffer in enumerate(buffers):
            numbers_of.setdefault(buffer.is_cuda, []).append(number)
        return [_BufferPart(numbers, buffers, self._backend) for numbers in numbers_of.values()]


def _kind(buffer: Tensor) -> tuple[Any, ...]:
    return buffer.shape, buffer.dtype, buffer.is_cuda, gets_gradient(buffer)


class _BufferPart:
    """The buffers of one memory.

    Parameters
    ----------
    numbers : sequence of int
        Which of the buffers.
    buffers : sequence of torch.Tensor
        All of them.
    backend : Backend
    """

    def __init__(self, numbers: Sequence[int], buffers: Sequence[Tensor], backend: Backend) -> None:
        self._numbers = numbers
        own = [buffers[number] for number in numbers]
        ends = list(
            itertools.accumulate(-(-b.nbytes // ALIGNMENT_NBYTES) * ALIGNMENT_NBYTES for b in own)
        )
        if own[0].is_cuda:
            flat = self._array = GpuMemory(backend, own[0]).empty(ends[-1], np.uint8)
        else:
            self._array = backend.empty(ends[-1], "uint8")
            flat = torch.from_numpy(self._array)
        flat.zero_()
        self._views = [
            flat.data[start : start + b.nbytes].view(b.dtype).view(b.shape)
            for b, start in zip(own, [0, *ends], strict=False)
        ]

    def broadcast(self, buffers: Sequence[Tensor], backend: Backend, root: int, tag: int) -> None:
        own = [buffers[number] for number in self._numbers]
        if backend.rank == root:
            torch._foreach_copy_(self._views, own)
        broadcast(self._array, backend, root, out=self._array, tag=tag)
        if backend.rank != root:
            torch._foreach_copy_(own, self._views)


def broadcast_tensor(tensor: Tensor, backend: Backend, root: int) -> None:
    """Overwrite a tensor on all ranks with that of one rank."""
    data = tensor.detach()
    if data.is_contiguous():
        broadcast(data, backend, root, out=data)
    else:
        data.copy_(broadcast(data.contiguous(), backend, root))


def show_changes(tensors: Iterable[Tensor]) -> None:
    """Let autograd refuse graphs that have saved any of these tensors."""
    for tensor in tensors:
        if not tensor.is_inference():  # no graph has saved it
            torch.autograd.graph.increment_version(tensor)


def fingerprints(labelled: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, bytes]]:
    """Yield each label with the bytes of its tensor's elements in C order."""
    for label, tensor in labelled:
        yield label, interop.content_of(tensor.detach())


def specs_of(named: dict[str, Tensor]) -> tuple[ParameterSpec, ...]:
    """Describe parameters that are trained."""
    return tuple(_trainable_spec(name, p) for name, p in named.items())


def _check_place(what: str, tensor: Tensor, backend: Backend) -> None:
    check_shareable("DDP", what, tensor)
    check_reach(what, tensor.device.index if tensor.is_cuda else None, backend)


def _trainable_spec(name: str, parameter: Tensor) -> ParameterSpec:
    spec = spec_of(name, parameter)
    dtype = dtype_of_gradient(parameter)
    if dtype != parameter.dtype:
        spec = dataclasses.replace(spec, dtype=interop.numpy_dtype(interop.dtype_code(dtype)))
    check_averageable(f"parameter {name!r}", spec.dtype)
    return spec
