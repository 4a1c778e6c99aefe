"""Torch gradients that were averaged, and what has been added to them since."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import torch

__all__ = ["Accumulation", "add", "as_dense", "version_of"]

Tensor: TypeAlias = Any


class Version(NamedTuple):
    """What tells whether a gradient was written to, converted, or given other memory."""

    changes: int
    address: int
    dtype: torch.dtype

    def next(self) -> Version:
        """Return that of the gradient after one addition to it."""
        return self._replace(changes=self.changes + 1)

    def is_converted(self, now: Version) -> bool:
        """Whether the gradient has another dtype now, and nothing was written to it."""
        return now.dtype != self.dtype and now.changes == self.changes

    def is_added_to(self, now: Version) -> bool:
        """Whether something was added to the gradient, once, perhaps after a conversion."""
        after = self.next()
        return now == after or after.is_converted(now)


class Accumulation:
    """``grad`` of some parameters, over several backward passes.

    A gradient is *averaged* from the end of a round until something is added to it, or it is
    replaced. Averaged gradients are contributed again where that changes nothing: in a mean, what
    all ranks have in common stays, and what each has added is averaged. Otherwise they are put
    aside while a round is open, and added to its result; one that the user has written to meanwhile
    counts as this rank's own.

    Attributes
    ----------
    parameters : list of torch.nn.Parameter
        By number.
    """

    def __init__(self) -> None:
        self.parameters: list[Tensor] = []
        self._is_idempotent = True
        self._averaged: list[Tensor] = []
        # Of averaged gradients; unknown for those that were left where they are.
        self._versions: dict[int, Version] = {}
        self._aside: dict[int, _Aside] = {}
        # Of parameters that are not among these now, and may come back: frozen ones.
        self._left: dict[int, _Record] = {}

    def adopt(self, parameters: Sequence[Tensor]) -> None:
        """Replace the parameters by these; some may be the same, or have been here before."""
        records = {**self._left, **{id(each.parameter): each for each in self._records()}}
        self.parameters = list(parameters)
        own = [records.pop(id(parameter), None) for parameter in parameters]
        self._left = records
        self._averaged = [None if each is None else each.averaged for each in own]
        known = [(number, each) for number, each in enumerate(own) if each is not None]
        self._versions = {n: each.version for n, each in known if each.version is not None}
        self._aside = {n: each.aside for n, each in known if each.aside is not None}

    def forget(self) -> None:
        """Let go of all parameters and gradients."""
        self.adopt(())
        self._left.clear()

    def _records(self) -> Iterator[_Record]:
        """Yield what is known of each parameter whose gradient is averaged, or a sum of one."""
        for number, (parameter, averaged) in enumerate(
            zip(self.parameters, self._averaged, strict=True)
        ):
            aside = self._aside.get(number)
            if averaged is not None or aside is not None:
                yield _Record(parameter, averaged, self._versions.get(number), aside)

    def note_versions(self) -> None:
        """Note the versions, to notice what is written to averaged gradients from now on."""
        for number, gradient in enumerate(self._averaged):
            if gradient is not None:
                self._versions[number] = version_of(gradient)

    def are_averaged(self) -> list[bool]:
        """Whether each gradient that there is was averaged, and nothing was added to it since."""
        pairs = zip(self.parameters, self._averaged, strict=True)
        return [p.grad is averaged for p, averaged in pairs if p.grad is not None]

    def was_added_to(self, parameter: Tensor) -> bool:
        """Whether something was added, once, to a gradient that is averaged, or to a sum of one."""
        number = next((n for n, each in enumerate(self.parameters) if each is parameter), None)
        if number is None:
            return False
        known = self._known_version(number, parameter.grad)
        return known is not None and known.is_added_to(version_of(parameter.grad))

    def begin(self, is_idempotent: bool) -> None:
        """Prepare for a backward, or for an average without one.

        Parameters
        ----------
        is_idempotent : bool
            Whether averaging again changes nothing.

        Raises
        ------
        RuntimeError
            What would be put aside has another dtype or shape now. All gradients are as they were.
        """
        self._is_idempotent = is_idempotent
        # What has been replaced meanwhile must not keep a whole bucket alive.
        self._left = {key: each for key, each in self._left.items() if each.is_current()}
        if is_idempotent:
            self._aside.clear()  # it is part of the sums that are shown
            return
        for number, parameter in enumerate(self.parameters):
            self._refuse_changed(number, parameter)
        for number, parameter in enumerate(self.parameters):
            self._put_aside(number, parameter)

    def note_local(self, number: int) -> None:
        """Note that this rank has added to a gradient what others have not."""
        self._averaged[number] = None

    def end_local(self) -> None:
        """Show the sums of what was put aside and what has come since."""
        for number, kept in list(self._aside.items()):
            parameter = self.parameters[number]
            own = parameter.grad
            if own is None:
                parameter.grad = self._averaged[number] = kept.averaged
                self._versions[number] = version_of(kept.averaged)
                del self._aside[number]
            else:
                kept.show(parameter, own)

    def _known_version(self, number: int, gradient: Tensor) -> Version | None:
        """Return what is known of a gradient if it was averaged, or is a sum of an average."""
        kept = self._aside.get(number)
        if kept is not None:
            return kept.version if gradient is kept.shown else None
        return self._versions.get(number) if gradient is self._averaged[number] else None

    def _refuse_changed(self, number: int, parameter: Tensor) -> None:
        gradient = parameter.grad
        if gradient is None:
            return
        known = self._known_version(number, gradient)
        if known is None:
            return
        if known.is_converted(version_of(gradient)):
            raise _converted(parameter)
        if gradient.shape != parameter.shape:
            raise _resized(parameter)

    def _put_aside(self, number: int, parameter: Tensor) -> None:
        gradient = parameter.grad
        kept = self._aside.pop(number, None)
        if gradient is None:
            return
        if kept is not None and kept.is_shown_by(gradient):
            parameter.grad = kept.own
            self._aside[number] = kept
        elif gradient is self._averaged[number]:
            if version_of(gradient) == self._versions.get(number, version_of(gradient)):
                parameter.grad = None
                # A copy: it lies in the bucket that will be filled.
                self._aside[number] = _Aside(gradient.clone())
            else:
                self._averaged[number] = None


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
    version : Version or None
        Of the sum, as it was made.
    """

    averaged: Tensor
    own: Tensor = None
    shown: Tensor = None
    version: Version | None = None

    def show(self, parameter: Tensor, own: Tensor) -> None:
        with torch.no_grad():
            self.own, self.shown = own, add(self.averaged, own)
        parameter.grad = self.shown
        self.version = version_of(self.shown)

    def is_shown_by(self, gradient: Tensor) -> bool:
        """Whether this is the sum, and nobody has written to it: zeroed it, for instance."""
        return gradient is self.shown and version_of(gradient) == self.version


class _Record(NamedTuple):
    """What is known of one parameter's gradient."""

    parameter: Tensor
    averaged: Tensor
    version: Version | None
    aside: _Aside | None

    def is_current(self) -> bool:
        """Whether the parameter still has that gradient."""
        shown = self.averaged if self.aside is None else self.aside.shown
        return self.parameter.grad is shown


def _converted(parameter: Tensor) -> RuntimeError:
    # As a rank's own it would count once for each rank.
    return RuntimeError(
        f"DDP: a parameter of shape {tuple(parameter.shape)} was converted to {parameter.dtype} "
        "together with a gradient that was averaged before, to which this backward would add. Set "
        "gradients to None before you convert a module."
    )


def _resized(parameter: Tensor) -> RuntimeError:
    # One that can be broadcast to the new shape would be added to all of it.
    return RuntimeError(
        f"DDP: a parameter was given shape {tuple(parameter.shape)}, and still has a gradient of "
        f"shape {tuple(parameter.grad.shape)} that was averaged before, to which this backward "
        "would add. Set gradients to None before you give parameters another shape."
    )


def version_of(gradient: Tensor) -> Version:
    """Return what will differ after a change of the gradient."""
    is_dense = gradient.layout is torch.strided
    return Version(gradient._version, gradient.data_ptr() if is_dense else 0, gradient.dtype)


def add(a: Tensor, b: Tensor) -> Tensor:
    """Return the sum of two gradients, of which any may be sparse."""
    return b + a if a.layout is not torch.strided else a + b


def as_dense(gradient: Tensor) -> Tensor:
    """Return a gradient as a dense tensor; itself, if it is one."""
    return gradient if gradient.layout is torch.strided else gradient.to_dense()
