"""The state of a `ShardedOptimizer`: collected from the ranks, and divided again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from ferro_dist.integrations.torch.optimizer_state import broadcast_saved, loaded

if TYPE_CHECKING:
    from ferro_dist.backends.base import Backend
    from ferro_dist.parallel.shard_layout import Fragment

__all__ = ["cut_state", "gather_states", "join_states"]

Tensor = Any
State = dict[str, Any]
"""What an optimizer keeps for one parameter."""

Pieces = dict[tuple[int, int, int], State]
"""States of fragments: number of the parameter, start and stop."""


def gather_states(
    own: Pieces, what: str, backend: Backend, root: int | None, device: Any, tag: int
) -> Pieces | None:
    """Return the states of all ranks, on `root` or, if that is None, on every rank.

    Each rank broadcasts in turn, so that no rank holds more than one share besides what it keeps.
    """
    keeps = root is None or backend.rank == root
    states: Pieces = {}
    for source in range(backend.world_size):
        received = broadcast_saved(
            "ShardedOptimizer", what, lambda: own, backend, source, device, tag
        )
        if keeps:
            states.update(loaded(received))
    return states if keeps else None


def join_states(pieces: Pieces, parameters: Sequence[Tensor]) -> dict[int, State]:
    """Return the state of each parameter, by number, from those of its fragments."""
    by_parameter: dict[int, list[tuple[int, int, State]]] = {}
    for (number, start, stop), state in sorted(pieces.items(), key=lambda piece: piece[0]):
        by_parameter.setdefault(number, []).append((start, stop, state))
    return {n: _join(fragments, parameters[n]) for n, fragments in by_parameter.items()}


def cut_state(state: Mapping[str, Any], parameter: Tensor, fragment: Fragment) -> State:
    """Return a copy of a fragment's part of the state of a parameter."""

    def cut(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        is_divided = value.shape == parameter.shape and fragment.size < parameter.numel()
        part = value.reshape(-1)[fragment.start : fragment.stop] if is_divided else value
        # A view would keep the whole state alive, and a count of steps, which an optimizer adds to
        # in place, may be loaded on several ranks of one process.
        return part.clone()

    return {key: cut(value) for key, value in state.items()}


def _join(fragments: list[tuple[int, int, State]], parameter: Tensor) -> State:
    first_start, first_stop, first = fragments[0]
    if len(fragments) == 1:
        return first
    # A fragment that was cut off is flat, as is what is kept for each of its elements; a count of
    # steps is the same for all.
    return {
        key: torch.cat([state[key] for _, _, state in fragments]).view(parameter.shape)
        if isinstance(value, torch.Tensor) and value.shape == (first_stop - first_start,)
        else value
        for key, value in first.items()
    }
