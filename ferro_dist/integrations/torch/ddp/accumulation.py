"""Torch gradients that were averaged, and what has been added to them since."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import torch

from ferro_dist.integrations.torch.gradient import add

__all__ = ["Accumulation", "Trace", "elements_of", "trace_of", "version_of"]

Tensor: TypeAlias = Any

# What a module may have been converted to meanwhile. Wider dtypes round nothing.
NARROWER = (torch.float32, torch.float16, torch.bfloat16)
NARROWER_COMPLEX = (torch.complex64,)


class Version(NamedTuple):
    """What tells whether a gradient was written to, converted, or given other memory.

    The address of what has no elements is 0, and tells it from no other such gradient.
    """

    changes: int
    address: int
    dtype: torch.dtype

    def is_written_to(self, now: Version) -> bool:
        """Whether there were changes. A tensor made of ``grad.data`` begins to count anew."""
        return now.changes > self.changes

    def is_in_place(self, now: Version) -> bool:
        """Whether the gradient is where it was, perhaps as another tensor, and not written to."""
        is_there = now.address == self.address and now.dtype == self.dtype
        return is_there and not self.is_written_to(now)

    def is_elsewhere(self, now: Version) -> bool:
        """Whether the gradient was given other memory or another dtype, and not written to."""
        return not self.is_in_place(now) and not self.is_written_to(now)

    def is_added_to(self, now: Version) -> bool:
        """Whether something was added to the gradient, once, wherever it was by then."""
        return now.changes == self.changes + 1


class Trace(NamedTuple):
    """What an average was when it was handed back.

    Attributes
    ----------
    version : Version
    content : torch.Tensor
        Another tensor over the same memory: it stays there if ``grad`` is given other memory.
    """

    version: Version
    content: Tensor


class Accumulation:
    """``grad`` of some parameters, over several backward passes.

    A gradient is *averaged* from the end of a round until something is added to it, or it is
    replaced. Averaged gradients are contributed again where that changes nothing: in a mean, what
    all ranks have in common stays, and what each has added is averaged. Otherwise they are put
    aside while a round is open, and added to its result; one that the user has written to meanwhile
    counts as this rank's own.

    Three tables hold what is known of each gradient, by number. Where ``grad`` is no longer what
    they say, it is this rank's own.

    | ``grad`` is | ``_averaged`` | ``_traces`` | ``_aside`` |
    |---|---|---|---|
    | this rank's own | None | | |
    | an average | itself | its trace, if it will be put aside | |
    | what came after one, in an open round | None; its view, once packed | | the average |
    | a sum, after a round that averaged nothing | None | | the average, what came, the sum |

    ``_left`` holds the same of parameters that are not among `parameters` now, and may come back:
    frozen ones.

    Attributes
    ----------
    parameters : list of torch.nn.Parameter
        By number.
    """

    def __init__(self) -> None:
        self.parameters: list[Tensor] = []
        self._names: list[str] = []
        self._is_idempotent = True
        self._averaged: list[Tensor] = []
        self._traces: dict[int, Trace] = {}
        self._aside: dict[int, _Aside] = {}
        self._left: dict[int, _Record] = {}  # by the identity of the parameter

    def adopt(self, parameters: Mapping[str, Tensor]) -> None:
        """Replace the parameters by these; some may be the same, or have been here before."""
        records = {**self._left, **{id(each.parameter): each for each in self._records()}}
        self._names, self.parameters = list(parameters), list(parameters.values())
        own = [records.pop(id(parameter), None) for parameter in self.parameters]
        self._left = records
        self._averaged = [None if each is None else each.averaged for each in own]
        known = [(number, each) for number, each in enumerate(own) if each is not None]
        self._traces = {n: each.trace for n, each in known if each.trace is not None}
        self._aside = {n: each.aside for n, each in known if each.aside is not None}

    def forget(self) -> None:
        """Let go of all parameters and gradients."""
        self.adopt({})
        self._left.clear()

    def _records(self) -> Iterator[_Record]:
        """Yield what is known of each parameter whose gradient is averaged, or a sum of one."""
        for record in map(self._record, range(len(self.parameters))):
            if record.averaged is not None or record.aside is not None:
                yield record

    def note_averages(self) -> None:
        """Note what averaged gradients are, to notice what becomes of them from now on."""
        for number, gradient in enumerate(self._averaged):
            if gradient is not None:
                self._traces[number] = trace_of(gradient)

    def are_averaged(self) -> list[bool]:
        """Whether each gradient that there is was averaged, and nothing was added to it since."""
        pairs = zip(self.parameters, self._averaged, strict=True)
        return [p.grad is averaged for p, averaged in pairs if p.grad is not None]

    def was_added_to(self, parameter: Tensor) -> bool:
        """Whether something was added, once, to a gradient that is averaged, or to a sum of one."""
        number = next((n for n, each in enumerate(self.parameters) if each is parameter), None)
        if number is None or not parameter.numel():
            return False  # what has no elements has nothing added to it, whatever its version
        known = self._known_version(number)
        return known is not None and known.is_added_to(version_of(parameter.grad))

    def check(self) -> None:
        """Check that `begin` can put averages aside, which it does if `is_idempotent` is False.

        Raises
        ------
        RuntimeError
            What would be put aside has another dtype or shape now, or lies elsewhere.
        """
        for number, parameter in enumerate(self.parameters):
            self._refuse_changed(number, parameter)

    def begin(self, is_idempotent: bool) -> None:
        """Prepare for a backward, or for an average without one.

        Parameters
        ----------
        is_idempotent : bool
            Whether averaging again changes nothing.
        """
        self._is_idempotent = is_idempotent
        # What has been replaced meanwhile must not keep a whole bucket alive.
        self._left = {key: each for key, each in self._left.items() if each.is_current()}
        if is_idempotent:
            self._aside.clear()  # it is part of the sums that are shown
            self._traces.clear()
            return
        for number, parameter in enumerate(self.parameters):
            self._put_aside(number, parameter)

    def note_local(self, number: int) -> None:
        """Note that this rank has added to a gradient what others have not."""
        self._averaged[number] = None

    def end_local(self) -> None:
        """Show the sums of what was put aside and what has come since."""
        for number, aside in list(self._aside.items()):
            parameter = self.parameters[number]
            own = parameter.grad
            if own is None:
                parameter.grad = self._averaged[number] = aside.averaged
                self._traces[number] = trace_of(aside.averaged)
                del self._aside[number]
            else:
                aside.show(parameter, own)

    def _replace(self, number: int, copy: Tensor) -> None:
        """Put a copy in place of a gradient, which counts as that did."""
        parameter = self.parameters[number]
        is_average = self._is_average(number, parameter.grad)
        trace = self._traces.pop(number, None)
        if trace is not None and is_average:
            self._traces[number] = trace_of(copy)
        self._averaged[number] = copy if is_average else None
        parameter.grad = copy

    def _is_average(self, number: int, gradient: Tensor) -> bool:
        """Whether a gradient was averaged, and not written to since."""
        trace = self._traces.get(number)
        if trace is None:
            return gradient is self._averaged[number]
        if not trace.version.address and gradient is not self._averaged[number]:
            return False
        is_in_place = trace.version.is_in_place(version_of(gradient))
        # One that was transposed is refused when it is copied over itself.
        return is_in_place and elements_of(gradient) == elements_of(trace.content)

    def _known_version(self, number: int) -> Version | None:
        """Return what is known of a gradient if it was averaged, or is a sum of an average."""
        record = self._record(number)
        return record.version if record.is_current() else None

    def _record(self, number: int) -> _Record:
        trace, aside = self._traces.get(number), self._aside.get(number)
        return _Record(self.parameters[number], self._averaged[number], trace, aside)

    def _known_content(self, number: int) -> Tensor:
        """Return what the gradient was whose version is known."""
        aside = self._aside.get(number)
        return self._traces[number].content if aside is None else add(aside.averaged, aside.own)

    def _refuse_changed(self, number: int, parameter: Tensor) -> None:
        gradient = parameter.grad
        if gradient is None:
            return
        known = self._known_version(number)
        if known is None:
            return
        name = self._names[number]
        if known.is_elsewhere(version_of(gradient)):
            if gradient.dtype != known.dtype:
                raise _converted(name, parameter)
            if _is_rounded(self._known_content(number), gradient):
                raise _moved(name)
        if gradient.shape != parameter.shape:
            raise _resized(name, parameter)

    def _put_aside(self, number: int, parameter: Tensor) -> None:
        gradient = parameter.grad
        aside = self._aside.pop(number, None)
        is_average = gradient is not None and self._is_average(number, gradient)
        self._averaged[number] = None
        self._traces.pop(number, None)
        if aside is not None:
            if gradient is not None and aside.is_shown_by(gradient):
                parameter.grad = aside.own
                self._aside[number] = aside
        elif is_average:
            parameter.grad = None
            # A copy: it lies in the bucket that will be filled.
            self._aside[number] = _Aside(gradient.detach().clone())


@dataclass
class _Aside:
    """A gradient that was averaged already, and what has been added to it since.

    Attributes
    ----------
    averaged : torch.Tensor
    own : torch.Tensor or None
        What this rank has added.
    shown : torch.Tensor or None
        The sum of both, which the user sees.
    trace : Trace or None
        Of the sum, as it was made. While it is known, nothing else comes to lie in its memory, such
        as the same sum rounded.
    """

    averaged: Tensor
    own: Tensor = None
    shown: Tensor = None
    trace: Trace | None = None

    def show(self, parameter: Tensor, own: Tensor) -> None:
        with torch.no_grad():
            self.own, self.shown = own, add(self.averaged, own)
        parameter.grad = self.shown
        self.trace = trace_of(self.shown)

    def is_shown_by(self, gradient: Tensor) -> bool:
        """Whether this is the sum, and nobody has written to it: zeroed it, for instance."""
        if self.trace is None or not self.trace.version.is_in_place(version_of(gradient)):
            return False
        if not self.trace.version.address and gradient is not self.shown:
            return False
        # What is written through `grad.data` is not in the version.
        sum_values, values = _values_of(add(self.averaged, self.own)), _values_of(gradient)
        return sum_values.shape == values.shape and _are_equal(sum_values, values)


class _Record(NamedTuple):
    """What is known of one parameter's gradient."""

    parameter: Tensor
    averaged: Tensor
    trace: Trace | None
    aside: _Aside | None

    @property
    def version(self) -> Version | None:
        """The version that the gradient had when the user was given it."""
        trace = self.trace if self.aside is None else self.aside.trace
        return None if trace is None else trace.version

    def is_current(self) -> bool:
        """Whether the parameter still has that gradient."""
        gradient, version = self.parameter.grad, self.version
        if gradient is None:
            return False
        shown = self.averaged if self.aside is None else self.aside.shown
        if gradient is shown or version is None or not version.address:
            return gradient is shown
        # Perhaps as another tensor over the same memory, such as `grad.detach()`.
        return version_of(gradient).address == version.address


def _is_rounded(average: Tensor, gradient: Tensor) -> bool:
    """Whether a gradient is an average that was moved, and perhaps rounded on its way.

    A module may have been converted several times. Zeros count as nothing, once or many times.
    """
    if average.shape != gradient.shape or average.layout is not gradient.layout:
        return False
    average = average.to(gradient.device)
    if gradient.layout is torch.sparse_coo:
        average, gradient = average.coalesce(), gradient.coalesce()
        if not torch.equal(average.indices(), gradient.indices()):
            return False
    average, gradient = _values_of(average), _values_of(gradient)
    if not gradient.any():
        return False
    dtypes = NARROWER_COMPLEX if gradient.is_complex() else NARROWER
    for length in range(len(dtypes) + 1):
        for chain in itertools.permutations(dtypes, length):
            rounded = average
            for dtype in (*chain, gradient.dtype):
                rounded = rounded.to(dtype)
            if _are_equal(rounded, gradient):
                return True
    return False


def _are_equal(a: Tensor, b: Tensor) -> bool:
    return bool(torch.allclose(a, b, rtol=0, atol=0, equal_nan=True))


def _converted(name: str, parameter: Tensor) -> RuntimeError:
    # As a rank's own it would count once for each rank.
    return RuntimeError(
        f"DDP: parameter {name!r} was converted to {parameter.dtype} together with a gradient "
        "that was averaged before, to which this backward would add. Set gradients to None before "
        "you convert a module."
    )


def _moved(name: str) -> RuntimeError:
    # Were it a rank's own, which by chance equals the average, it would have to be summed.
    return RuntimeError(
        f"DDP: the gradient of {name!r}, to which this backward would add, was averaged before, "
        "and lies in other memory now. Set gradients to None before you move or convert a module, "
        "or let it share its memory."
    )


def _resized(name: str, parameter: Tensor) -> RuntimeError:
    # One that can be broadcast to the new shape would be added to all of it.
    return RuntimeError(
        f"DDP: {name!r} was given shape {tuple(parameter.shape)}, and still has a gradient of "
        f"shape {tuple(parameter.grad.shape)} that was averaged before, to which this backward "
        "would add. Set gradients to None before you give parameters another shape."
    )


def version_of(gradient: Tensor) -> Version:
    """Return what will differ after a change of the gradient."""
    # Of tensors that were made in inference mode torch counts no changes. No average is one.
    changes = 0 if gradient.is_inference() else gradient._version
    return Version(changes, _values_of(gradient).data_ptr(), gradient.dtype)


def trace_of(gradient: Tensor) -> Trace:
    """Return what tells later whether the gradient is what it is now."""
    return Trace(version_of(gradient), gradient.detach())


def _values_of(gradient: Tensor) -> Tensor:
    if gradient.layout is torch.strided:
        return gradient
    return gradient._values() if gradient.layout is torch.sparse_coo else gradient.values()


def elements_of(gradient: Tensor) -> tuple[int, list[int]]:
    """Tell apart tensors of one shape that are not the same elements in the same order."""
    values = _values_of(gradient)
    lengths = zip(values.shape, values.stride(), strict=True)
    return values.data_ptr(), [stride for length, stride in lengths if length > 1]
