"""Averages that the user keeps, told by counting the references to each view of a bucket.

Whoever keeps ``grad`` of one step, say in a list, and sets it to None expects it to stay as it is;
but it is a view of a bucket, which the next step fills. A view to which there are more references
than ours is given memory of its own first. All of ours are counted:

- that of the list `Bucket.views`, and those of ``sys.getrefcount`` itself while `map` calls it:
  together `_REFERENCES`, which is measured, as it depends on the version of Python;
- that of `Accumulation._averaged`, where this is the view's average;
- where a gradient to be packed is the view itself, those of ``grad``, which only newer versions of
  torch count, and of the caller's list and variables. Such views are recognised by their identity,
  whatever their count, and stay where they are;
- that of `_Aside.own`, which is not counted: such numbers are `in_use`, and stay, too.

`Bucket.own_views` and `Trace.content` are other tensors over the same memory: no references to the
views.

While references are counted, nothing else may refer to a view: a slice or another list of them, a
loop or comprehension over them, a local variable for one of them, here or in a caller, would each
pass for a user. So the code below hands views from `map` to functions written in C, and has one in
a variable only after its count. Whoever keeps views in yet another table has to count that, too.
"""

from __future__ import annotations

import itertools
import operator
import sys
from collections.abc import Container, Sequence
from typing import Any, TypeAlias

import torch

from ferro_dist.integrations.torch.inference_mode import outside_inference_mode
from ferro_dist.parallel.buckets.bucket import Bucket

__all__ = ["leave_kept", "may_be_kept"]

Tensor: TypeAlias = Any

# How many there are of each element of a list, as `map` passes it.
_REFERENCES = next(map(sys.getrefcount, [object()]))


def may_be_kept(
    bucket: Bucket, gradients: Sequence[Tensor | None], averaged: Sequence[Tensor | None]
) -> bool:
    """Whether `leave_kept` has to look at each view: a quick question, before each packing."""
    views = bucket.views
    if all(map(operator.is_, views, gradients)):
        return False  # all are in place
    are_averaged = all(map(operator.is_, views, map(averaged.__getitem__, bucket.members)))
    return max(map(sys.getrefcount, views)) > _REFERENCES + are_averaged


def leave_kept(
    bucket: Bucket,
    gradients: Sequence[Tensor | None],
    averaged: Sequence[Tensor | None] = (),
    in_use: Container[int] = (),
    first: int = 0,
) -> None:
    """Leave views to a user who keeps them, in memory of their own, before theirs is filled again.

    What else there is over the same memory, such as ``grad.detach()``, is not noticed, and changes;
    graphs that have saved it are refused.

    Parameters
    ----------
    bucket : Bucket
    gradients : sequence of torch.Tensor or None
        Those to be copied to the bucket, from the position `first` on.
    averaged : sequence of torch.Tensor or None
        By number, where there may be another reference to each view.
    in_use : container of int
        The numbers of gradients that this will be added to, where they are.
    first : int
    """
    given = set(map(id, gradients))
    counts = map(sys.getrefcount, itertools.islice(bucket.views, first, None))
    for position, (gradient, count) in enumerate(zip(gradients, counts, strict=False), first):
        number = bucket.members[position]
        is_averaged = bool(averaged) and averaged[number] is bucket.views[position]
        if count <= _REFERENCES + is_averaged or number in in_use:
            continue
        address, view = bucket.addresses[position], bucket.views[position]  # counted by now
        if id(view) in given:
            continue  # in its own slot, or in another's, which is refused
        if _is_at(address, view) and not _is_at(address, gradient):
            # What stays behind counts changes with it, and no longer with what fills the slot.
            torch.autograd.graph.increment_version(view)
            with outside_inference_mode():  # it stays a tensor that autograd takes
                view.data = view.detach().clone()


def _is_at(address: int, gradient: Tensor) -> bool:
    is_dense = gradient is not None and gradient.layout is torch.strided
    return is_dense and gradient.data_ptr() == address
