"""What the kinds of DDP that average gradients in rounds of a `Reducer` have in common."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any, Generic, TypeVar

from ferro_dist.parallel.ddp.ddp import DDP
from ferro_dist.parallel.ddp.options import Options
from ferro_dist.parallel.ddp.participation import Participation
from ferro_dist.parallel.ddp.reducer import NoGradients, Reducer
from ferro_dist.parallel.ddp.statistics import Statistics
from ferro_dist.parallel.interruption import interrupt, telling
from ferro_dist.parallel.manifest import agree_on_manifest

__all__ = ["ReducingDDP"]

ModuleT = TypeVar("ModuleT")


class ReducingDDP(DDP[ModuleT], Generic[ModuleT]):
    """DDP of modules that hold their parameters and gradients.

    Its kinds set `_reducer` in `_prepare`, and open each round themselves.
    """

    __slots__ = ("_last_present", "_no_sync_depth", "_reducer")

    _reducer: Reducer
    _no_sync_depth: int
    _last_present: tuple[int, ...]  # inside `join`: the ranks that took part in the last round

    def _start(self, options: Options, first_tag: int) -> None:
        self._no_sync_depth = 0
        super()._start(options, first_tag)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        self._no_sync_depth += 1
        try:
            yield
        finally:
            self._no_sync_depth -= 1

    @contextlib.contextmanager
    def join(self, *optimizers: Any) -> Iterator[None]:
        if self._reducer.ranks_may_leave:
            # Once the inner block had ended, nothing could tell the outer one that all are done.
            raise RuntimeError("DDP.join: this is inside a block of join() already. Leave one out.")
        lines = self._lines_of_optimizers(optimizers)
        agree_on_manifest(lines, self._backend, op="DDP.join")
        self._reducer.ranks_may_leave, self._last_present = True, ()
        try:
            yield
            while self._attend():
                pass
        finally:
            self._reducer.ranks_may_leave = False
        self._follow_the_last(optimizers)

    def statistics(self) -> Statistics:
        return self._reducer.statistics

    def _attend(self) -> bool:
        """Take part in a round of the others; return whether there were any others."""
        with telling(self._tell_the_others):
            self._reducer.begin(self._no_gradients(), is_present=False)
        return self._finish_round()

    def _no_gradients(self) -> NoGradients:
        """Return what this rank gives to rounds of the others."""
        return NoGradients()

    def _follow_the_last(self, optimizers: Sequence[Any]) -> None:
        root = min(self._last_present, default=None)
        self.broadcast_parameters(root)
        if root is not None:  # else nobody had a batch, and nothing has changed
            self._broadcast_optimizers(optimizers, root)
            self._match_gradients(root)

    def _match_gradients(self, root: int) -> None:
        """Have a gradient, whatever it is, of those parameters alone of which one rank has one."""

    def _lines_of_optimizers(self, optimizers: Sequence[Any]) -> list[str]:
        """Return a line for each thing that ranks must agree on in optimizers given to `join`."""
        if optimizers:
            kind = type(optimizers[0]).__name__
            raise TypeError(f"DDP.join takes optimizers of torch, not {kind}")
        return []

    def _broadcast_optimizers(self, optimizers: Sequence[Any], root: int) -> None:
        """Overwrite the state of the optimizers given to `join`, and of any that DDP steps."""
        assert not optimizers  # they have been refused

    # A round

    def _finish_round(self) -> bool:
        """Reduce what is left of the open round; return whether any rank took part."""
        with telling(self._tell_the_others):
            participation = self._reducer.finish()
            if participation is not None and not participation.present:
                return False
            if participation is not None:
                self._last_present = participation.present
            self._after_round(self._root_among(participation), participation)
        return True

    def _after_round(self, root: int, participation: Participation | None) -> None:
        """Do what all ranks do once gradients are averaged."""

    def _tell_the_others(self, error: BaseException) -> None:
        interrupt(self._backend, error)

    def _root_among(self, participation: Participation | None) -> int:
        root = self._options.root
        if participation is None or root in participation.present:
            return root
        return min(participation.present)
