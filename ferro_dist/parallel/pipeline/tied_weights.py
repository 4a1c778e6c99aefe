"""Weights that stages on several ranks share, such as an embedding and its inverse."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from ferro_dist.parallel.exchange import all_gather_bytes
from ferro_dist.parallel.pipeline.gradient_reduction import GradientReduction, Weight
from ferro_dist.parallel.pipeline.stage import Stage
from ferro_dist.reduce_op import ReduceOp

if TYPE_CHECKING:
    from ferro_dist.backends.base import Backend

__all__ = [
    "Members",
    "TiedWeight",
    "agree_on_ties",
    "find_tied_weights",
    "split_for_ties",
    "tie_weights",
]

Members = tuple[int, ...]


class TiedWeight(NamedTuple):
    """A weight of this rank, and what must be the same on other ranks that share it."""

    weight: Weight
    spec: str


def find_tied_weights(
    tied: Mapping[str, Any], stages: Mapping[int, Stage]
) -> dict[str, TiedWeight]:
    """Return this rank's tied weights, given as parameters or by name.

    Raises
    ------
    ValueError
        There is no such weight, two names stand for the same one, or one name for several; or it
        cannot be made equal.
    """
    found: dict[str, TiedWeight] = {}
    key_of: dict[Weight, str] = {}
    for key, value in tied.items():
        weight = _find(key, value, stages)
        other = key_of.setdefault(weight, key)
        if other != key:
            raise ValueError(
                f"Pipeline: tied weights {other!r} and {key!r} are one parameter on this rank. "
                "Give it one name, the same on all ranks that have it"
            )
        weight.stage.check_lasting([weight.name])
        weight.stage.check_shareable(f"tied weight {key!r}", weight.value)
        found[key] = TiedWeight(weight, str(weight.stage.describe(weight.value)))
    return found


def agree_on_ties(weights: Mapping[str, TiedWeight], backend: Backend) -> dict[Members, list[str]]:
    """Return which weights are tied over which ranks, the same on all of them.

    Raises
    ------
    ValueError
        On all ranks: no other rank has a weight, or it has a different shape there.
    """
    own = json.dumps({key: weight.spec for key, weight in weights.items()})
    of_ranks = [json.loads(text) for text in all_gather_bytes(own.encode(), backend)]
    keys_of: dict[Members, list[str]] = defaultdict(list)
    for key in sorted({key for specs in of_ranks for key in specs}):
        members = tuple(rank for rank, specs in enumerate(of_ranks) if key in specs)
        if len(members) < 2:
            raise ValueError(
                f"Pipeline: only rank {members[0]} has a tied weight {key!r}. Give it on each rank "
                "that has it; stages of one rank, as the first and the last under zb_v, share a "
                "weight without being told, if they hold one parameter"
            )
        if len({of_ranks[rank][key] for rank in members}) > 1:
            specs = ", ".join(f"{of_ranks[rank][key]} on rank {rank}" for rank in members)
            raise ValueError(f"Pipeline: tied weight {key!r} is not the same: {specs}")
        keys_of[members].append(key)
    return dict(sorted(keys_of.items()))


def split_for_ties(ties: Iterable[Members], backend: Backend) -> dict[Members, Backend]:
    """Return the group of each tie that this rank is in. Called by all ranks."""
    groups = {}
    for members in ties:
        is_all = len(members) == backend.world_size
        group = backend if is_all else backend.split(members)
        if group is not None:
            groups[members] = group
    return groups


def tie_weights(
    weights: Mapping[str, TiedWeight],
    ties: Mapping[Members, Sequence[str]],
    groups: Mapping[Members, Backend],
    bucket_nbytes: int,
) -> list[GradientReduction]:
    """Make the sums of gradients that keep tied weights equal. Called by all ranks.

    Parameters
    ----------
    weights : mapping of str to TiedWeight
        This rank's.
    ties : mapping of tuple of int to sequence of str
        What `agree_on_ties` has returned.
    groups : mapping of tuple of int to Backend
        What `split_for_ties` has returned.
    bucket_nbytes : int

    Returns
    -------
    reductions that this rank takes part in
    """
    return [
        GradientReduction(
            [weights[key].weight for key in ties[members]], group, ReduceOp.SUM, bucket_nbytes
        )
        for members, group in groups.items()
    ]


def _find(key: str, value: Any, stages: Mapping[int, Stage]) -> Weight:
    found: dict[int, tuple[object, Weight]] = {}  # by what each gradient has of its own
    for stage in stages.values():
        for name, parameter in stage.parameters().items():
            if parameter is value or (isinstance(value, str) and name == value):
                owner = stage.gradient_owner(name)
                found.setdefault(id(owner), (owner, Weight(stage, name)))
    if len(found) > 1:
        numbers = [weight.stage.number for _, weight in found.values()]
        remedy = (
            "Give the parameter itself, or another name in each stage"
            if isinstance(value, str)
            else "They hold one array, and a gradient of it each: give the name of one of them"
        )
        raise ValueError(
            f"Pipeline: tied weight {key!r} could be one of several parameters on this rank, those "
            f"of stages {numbers}. {remedy}"
        )
    if found:
        ((_, weight),) = found.values()
        return weight
    names = sorted({name for stage in stages.values() for name in stage.parameters()})
    shown = ", ".join(names[:8]) + (", ..." if len(names) > 8 else "")
    raise ValueError(
        f"Pipeline: tied weight {key!r} is no parameter that a stage on this rank trains; these "
        f"are: {shown}"
    )
