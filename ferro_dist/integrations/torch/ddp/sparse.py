"""Sparse gradients, such as those of ``Embedding(sparse=True)``: rows gathered and summed.

They are in no bucket, which would have a place for every row. After the buckets, all ranks

1. tell each other, for all such parameters at once, what they have: nothing, a sparse gradient
   with so many rows, or a dense one (of a weight that is tied to a dense layer);
2. for each parameter gather indices and rows, padded to the longest, and add up rows of one
   index; or reduce it like any other array, if a rank has a dense one.

The cost of a parameter is that of the rows used on all ranks together.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np
import torch

from ferro_dist.collective import all_gather, allreduce
from ferro_dist.errors import CollectiveMismatch, InvalidArray
from ferro_dist.integrations.torch.ddp.accumulation import Accumulation, trace_of
from ferro_dist.integrations.torch.gradient import add, as_dense
from ferro_dist.parallel.ddp.reducer import Call, tag_of
from ferro_dist.parallel.exchange import all_gather_rows
from ferro_dist.parallel.manifest import agree_on_manifest
from ferro_dist.reduce_op import ReduceOp

if TYPE_CHECKING:
    from ferro_dist.backends.base import Backend
    from ferro_dist.parallel.buckets.averaging import Averaging
    from ferro_dist.parallel.buckets.bucket import ParameterSpec

__all__ = ["SparseGradients", "lines_of", "without_rows"]

Tensor: TypeAlias = Any

ABSENT, SPARSE, DENSE = range(3)


class _Header(NamedTuple):
    """What a rank has of one gradient."""

    kind: int = ABSENT
    num_rows: int = 0
    num_sparse_dims: int = 0


class SparseGradients(Accumulation):
    """``grad`` of each parameter whose gradients are meant to be sparse.

    Parameters
    ----------
    averaging : Averaging
    backend : Backend
    first_tag : int
        Distinguishes these calls from others of the group.

    Attributes
    ----------
    is_used : bool
        Whether there are such parameters, or were: even if none is trained any more on this rank,
        the others may still ask.
    """

    def __init__(self, averaging: Averaging, backend: Backend, first_tag: int) -> None:
        super().__init__()
        self._averaging = averaging
        self._backend = backend
        self._first_tag = first_tag
        self._lines: list[str] = []
        self._tag = 0
        self.is_used = False

    def follow(self, specs: Sequence[ParameterSpec], parameters: Mapping[str, Tensor]) -> None:
        """Replace the parameters by these, some of which may be the same."""
        self.adopt(parameters)
        self.is_used |= bool(parameters)
        self._lines = lines_of(specs)
        digest = zlib.crc32("\0".join(self._lines).encode())
        self._tag = tag_of(self._first_tag + digest, Call.SPARSE)

    def own(self) -> list[Tensor]:
        """Return what this rank contributes."""
        return [parameter.grad for parameter in self.parameters]

    def average(
        self, gradients: Sequence[Tensor] | None, factor: float | None
    ) -> list[Tensor | None]:
        """Return the averages of all ranks; None for those that no rank has.

        Parameters
        ----------
        gradients : sequence of torch.Tensor, optional
            None on a rank that has run out of data.
        factor : float, optional
            The factor for this rank's gradients in a sum; None if they are not weighted.
        """
        own = list(gradients) if gradients is not None else [None] * len(self.parameters)
        with torch.no_grad():
            own = [_as_real(gradient) for gradient in own]
            if factor is not None:
                own = [None if gradient is None else _scaled(gradient, factor) for gradient in own]
            own = [_coalesced(gradient) for gradient in own]
            averages = [
                self._average(gradient, _as_real(parameter), headers, factor is not None)
                for gradient, parameter, headers in zip(
                    own, self.parameters, self._headers(own), strict=True
                )
            ]
            return [
                _as_complex(average) if parameter.is_complex() else average
                for average, parameter in zip(averages, self.parameters, strict=True)
            ]

    def put(self, averages: Sequence[Tensor | None]) -> None:
        """Give the averages to the parameters, and add what was put aside."""
        for number, (parameter, average) in enumerate(zip(self.parameters, averages, strict=True)):
            aside = self._aside.pop(number, None)
            if aside is not None:
                average = aside.averaged if average is None else add(average, aside.averaged)
            parameter.grad = self._averaged[number] = average
            if average is not None and not self._is_idempotent:
                self._traces[number] = trace_of(average)

    def _headers(self, own: Sequence[Tensor]) -> list[list[_Header]]:
        """Return, for each parameter, what each rank has."""
        # One more, so that it is never empty.
        table = np.array([*map(_header, own), _Header()], np.int64)
        try:
            tables = all_gather_rows(table, self._backend, tag=self._tag)
        except CollectiveMismatch:
            # Which parameter it is, if it is one that ranks disagree on.
            agree_on_manifest(self._lines, self._backend, "DDP")
            raise
        by_parameter = tables.swapaxes(0, 1)[:-1].tolist()
        return [[_Header(*header) for header in of_ranks] for of_ranks in by_parameter]

    def _average(
        self, own: Tensor, parameter: Tensor, headers: Sequence[_Header], is_weighted: bool
    ) -> Tensor | None:
        given = [header for header in headers if header.kind != ABSENT]
        if not given:
            return None
        is_sum = is_weighted or self._averaging.name == "sum"
        is_mean = self._averaging.name == "mean" and not is_sum
        # Sparse gradients of several kinds have no common indices.
        num_sparse_dims = {header.num_sparse_dims for header in given}
        if len(num_sparse_dims) == 1 and given[0].kind == SPARSE:
            divisor = 1 if is_sum else self._backend.world_size if is_mean else len(given)
            return self._gather(own, parameter, headers, num_sparse_dims.pop(), divisor)
        total = torch.zeros_like(parameter) if own is None else as_dense(own).clone()
        total = total.contiguous()
        # The mean is one reduction, whose sum has the range that 16 bits lack.
        op = ReduceOp.MEAN if is_mean else ReduceOp.SUM
        allreduce(total, self._backend, op, out=total, tag=self._tag)
        return total if is_sum or is_mean else total.div_(len(given))

    def _gather(
        self,
        own: Tensor,
        parameter: Tensor,
        headers: Sequence[_Header],
        num_sparse_dims: int,
        divisor: int,
    ) -> Tensor:
        shape = parameter.shape
        longest = max(header.num_rows for header in headers)
        indices = parameter.new_zeros((longest, num_sparse_dims), dtype=torch.int64)
        values = parameter.new_zeros((longest, *shape[num_sparse_dims:]))
        if own is not None:
            indices[: own._nnz()] = own.indices().T
            values[: own._nnz()] = own.values()
        if not longest:
            return _rows_tensor(indices, values, shape)
        counts = torch.tensor([header.num_rows for header in headers], device=parameter.device)
        rows = (torch.arange(longest, device=parameter.device) < counts[:, None]).flatten()
        all_indices = all_gather(indices, self._backend, tag=self._tag)[rows]
        all_values = all_gather(values, self._backend, tag=self._tag)[rows]
        if values.dtype in (torch.float16, torch.bfloat16):
            all_values = all_values.float()  # as in reductions of 16-bit floats
        return _rows_tensor(all_indices, all_values, shape).div_(divisor).to(values.dtype)


def _rows_tensor(indices: Tensor, values: Tensor, shape: Any) -> Tensor:
    # Unchecked: the indices come from tensors of the same shape.
    return torch.sparse_coo_tensor(indices.T, values, shape, check_invariants=False).coalesce()


def without_rows(parameter: Tensor) -> Tensor:
    """Return a sparse gradient that adds nothing."""
    indices = parameter.new_zeros((0, 1), dtype=torch.int64)
    return _rows_tensor(indices, parameter.new_zeros((0, *parameter.shape[1:])), parameter.shape)


def lines_of(specs: Sequence[ParameterSpec]) -> list[str]:
    """Return a line for each parameter, of what ranks must agree on."""
    return [f"trained parameter with sparse gradients {spec}" for spec in specs]


def _as_real(gradient: Tensor) -> Tensor:
    """Return a complex gradient with a last dimension for its real and imaginary parts.

    Averages are those of the parts. Torch multiplies complex numbers by complex ones, which makes
    NaN of what stands beside an infinity: even by 1, where it adds up rows or makes them dense.
    """
    if gradient is None or not gradient.is_complex():
        return gradient
    if gradient.layout is torch.strided:
        return torch.view_as_real(gradient.resolve_conj())
    if gradient.layout is not torch.sparse_coo:
        return gradient  # refused later
    values = torch.view_as_real(gradient._values().resolve_conj())
    return _with_values(gradient, values, (*gradient.shape, 2))


def _as_complex(average: Tensor) -> Tensor:
    if average is None:
        return None
    if average.layout is torch.strided:
        return torch.view_as_complex(average)
    return _with_values(average, torch.view_as_complex(average._values()), average.shape[:-1])


def _with_values(rows: Tensor, values: Tensor, shape: Any) -> Tensor:
    return torch.sparse_coo_tensor(
        rows._indices(),
        values,
        shape,
        is_coalesced=rows.is_coalesced(),
        check_invariants=False,
    )


def _scaled(gradient: Tensor, factor: float) -> Tensor:
    # Zero by assignment: NaN times zero would not be.
    return gradient * factor if factor else torch.zeros_like(gradient)


def _coalesced(gradient: Tensor) -> Tensor:
    if gradient is None or gradient.layout is not torch.sparse_coo:
        return gradient
    # What was made in inference mode fails an assertion of torch's outside it; a copy does not.
    return (gradient.clone() if gradient.is_inference() else gradient).coalesce()


def _header(gradient: Tensor) -> _Header:
    if gradient is None:
        return _Header()
    if gradient.layout is torch.strided:
        return _Header(DENSE)
    if gradient.layout is not torch.sparse_coo:
        raise InvalidArray(
            f"DDP: a gradient is {gradient.layout}; torch.sparse_coo and dense ones are averaged",
            op="DDP",
        )
    return _Header(SPARSE, gradient._nnz(), gradient.sparse_dim())
