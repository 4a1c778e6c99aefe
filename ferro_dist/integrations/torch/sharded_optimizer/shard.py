"""Parameters of one dtype and device, divided among the ranks, for torch.

All ranks hold all parameters; each has its own part of the optimizer's work. One flat array serves
both directions of a step:

1. Pack the gradients, all rows; reduce_scatter in place; this rank's row gets the average.
2. The optimizer changes this rank's fragments, which are views of the parameters.
3. Pack this rank's fragments into its row; all_gather in place; unpack the other rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from ferro_dist.collective import all_gather, broadcast, reduce_scatter
from ferro_dist.integrations.torch.gradient import copy_or_clear, dtype_of_gradient
from ferro_dist.integrations.torch.memory import zeros_in_group
from ferro_dist.parallel.shard_layout import Fragment, ShardLayout

if TYPE_CHECKING:
    from ferro_dist.backends.base import Backend
    from ferro_dist.reduce_op import ReduceOp

__all__ = ["Shard"]

Tensor = Any


class Shard:
    """This rank's part of some parameters.

    Parameters
    ----------
    parameters : sequence of torch.Tensor
        Of one dtype and device, as are their gradients; the same on every rank, in the same order.
    backend : Backend
    divides_parameters : bool
        See `ShardLayout`.
    tag : int

    Attributes
    ----------
    owned : list of (torch.Tensor, Fragment, torch.Tensor)
        Each fragment of this rank: its parameter, its place, and the elements themselves,
        with this rank's average of their gradient as ``grad``.
    """

    def __init__(
        self, parameters: Sequence[Tensor], backend: Backend, divides_parameters: bool, tag: int
    ) -> None:
        self.parameters = tuple(parameters)
        self._backend = backend
        self._tag = tag
        counts = [p.numel() for p in self.parameters]
        self._layout = ShardLayout(counts, backend.world_size, divides_parameters)
        self._fragments = [fragment for row in self._layout.fragments for fragment in row]
        start = sum(map(len, self._layout.fragments[: backend.rank]))
        self._own = range(start, start + len(self._layout.fragments[backend.rank]))
        self._dtype_of_gradients = dtype_of_gradient(self.parameters[0])
        self._flats: dict[Any, _Flat] = {}  # by dtype
        self.owned: list[tuple[Tensor, Fragment, Tensor]] = [
            (p, fragment, _owned_elements(p, fragment))
            for fragment in self._layout.fragments[backend.rank]
            for p in (self.parameters[fragment.parameter],)
        ]

    def broadcast_parameters(self) -> None:
        """Give all ranks the parameters of rank 0."""
        flat = self._flat_of_parameters().rows.view(-1)
        counts = [p.numel() for p in self.parameters]
        *places, _ = flat.split([*counts, flat.numel() - sum(counts)])
        is_root = self._backend.rank == 0
        if is_root:
            for place, p in zip(places, self.parameters, strict=True):
                place.view(p.shape).copy_(p.detach())
        whole = flat[: sum(counts)]
        broadcast(whole, self._backend, out=whole, tag=self._tag)
        if not is_root:
            for place, p in zip(places, self.parameters, strict=True):
                p.detach().copy_(place.view(p.shape))

    def reduce_gradients(self, op: ReduceOp) -> None:
        """Average or sum the gradients over the ranks; each gets those of its fragments."""
        flat = self._flat(self._dtype_of_gradients)
        own_row = flat.rows[self._backend.rank]
        self._pack_gradients(flat)
        reduce_scatter(flat.rows, self._backend, op, out=own_row, tag=self._tag)
        lanes = own_row[self._layout.lanes_offset :].tolist()
        for (_, _, elements), number, lane in zip(self.owned, self._own, lanes, strict=False):
            elements.grad = flat.places[number].view(elements.shape) if lane else None

    def take_gradients(self) -> None:
        """Give the fragments this rank's gradients as they are: they are equal on all ranks."""
        for parameter, fragment, elements in self.owned:
            grad = parameter.grad
            # A copy, which may be clipped: ``p.grad`` stays the same on all ranks.
            elements.grad = None if grad is None else _elements(grad, fragment).clone()

    def drop_gradients(self) -> None:
        """Drop what `reduce_gradients` or `take_gradients` gave."""
        for _, _, elements in self.owned:
            elements.grad = None

    def look_again(self) -> None:
        """Follow parameters whose memory has changed since: ``module.to``, ``p.data = ...``."""
        for parameter, fragment, elements in self.owned:
            elements.data = _elements(parameter, fragment)

    def share_parameters(self) -> None:
        """Give all ranks this rank's fragments, and this rank those of all."""
        rows, places = self._flat_of_parameters()
        own_row = rows[self._backend.rank]
        own_places = [places[number] for number in self._own]
        copy_or_clear(own_places, [elements.view(-1) for _, _, elements in self.owned])
        all_gather(own_row, self._backend, out=rows, tag=self._tag)
        targets, sources = [], []
        for number, (fragment, place) in enumerate(zip(self._fragments, places, strict=True)):
            parameter = self.parameters[fragment.parameter]
            if not parameter.is_contiguous():
                _write(parameter, fragment, place)
            elif number not in self._own:
                targets.append(_elements(parameter, fragment).view(-1))
                sources.append(place)
        copy_or_clear(targets, sources)

    def _pack_gradients(self, flat: _Flat) -> None:
        gradients = [None if p.grad is None else p.grad.reshape(-1) for p in self.parameters]
        copy_or_clear(flat.places, [_piece(gradients[f.parameter], f) for f in self._fragments])
        offset = self._layout.lanes_offset
        for row, fragments in zip(flat.rows, self._layout.fragments, strict=True):
            # Not only the lanes: what is left besides them would grow with every sum.
            row[fragments[-1].place.stop if fragments else 0 :].zero_()
            lanes = [gradients[fragment.parameter] is not None for fragment in fragments]
            row[offset : offset + len(lanes)].copy_(torch.tensor(lanes, device="cpu"))

    def _flat_of_parameters(self) -> _Flat:
        return self._flat(self.parameters[0].dtype)

    def _flat(self, dtype: Any) -> _Flat:
        """Return the flat array: that of gradients is another one if their dtype is."""
        device = self.parameters[0].device
        flat = self._flats.get(dtype)
        if flat is None or flat.rows.device != device:
            shape = self._backend.world_size, self._layout.row_count
            rows = zeros_in_group(shape, dtype, device, self._backend)
            places = [
                row[fragment.place]
                for row, fragments in zip(rows, self._layout.fragments, strict=True)
                for fragment in fragments
            ]
            flat = self._flats[dtype] = _Flat(rows, places)
        return flat


class _Flat(NamedTuple):
    """A flat array: one row for each rank, and in these the place of each fragment."""

    rows: Tensor
    places: list[Tensor]


def _piece(gradient: Tensor | None, fragment: Fragment) -> Tensor | None:
    """Return what a flat gradient has for a fragment."""
    if gradient is None or fragment.size == gradient.numel():
        return gradient
    return gradient[fragment.start : fragment.stop]


def _owned_elements(parameter: Tensor, fragment: Fragment) -> Tensor:
    elements = _elements(parameter, fragment)
    elements.grad_dtype = parameter.grad_dtype
    return elements


def _elements(tensor: Tensor, fragment: Fragment) -> Tensor:
    """Return a fragment's elements: a view, unless the tensor is not contiguous."""
    if fragment.size == tensor.numel():
        return tensor.detach().contiguous()
    return tensor.detach().reshape(-1)[fragment.start : fragment.stop]


def _write(parameter: Tensor, fragment: Fragment, values: Tensor) -> None:
    target = parameter.detach()
    if target.is_contiguous():
        target.view(-1)[fragment.start : fragment.stop].copy_(values)
        return
    whole = target.reshape(-1)  # a copy
    whole[fragment.start : fragment.stop] = values
    target.copy_(whole.view(target.shape))
