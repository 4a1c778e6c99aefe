"""Random numbers of one forward of a stage, drawn from a seed of its own.

torch has one generator for all threads of a process, and ranks may be threads: a rank that draws
from a seed holds the generators exclusively. While it waits for another rank it releases them, as
the other may be a thread, too, and wait for them.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import torch

__all__ = ["Seeded", "draw_seed", "while_others_draw"]

_lock = threading.Lock()
_of_thread = threading.local()


class Seeded:
    """A context in which generators start from a seed; after it, they are as they were.

    Entered for every microbatch; a generator function would take twice as long.
    """

    def __init__(self, generators: Sequence[Any], seed: int) -> None:
        self._generators = generators
        self._seed = seed
        self._before: list[Any] = []
        self._held: list[bool] = []  # one entry while this context has the generators

    def __enter__(self) -> None:
        self._take()
        try:
            for generator in self._generators:
                generator.manual_seed(self._seed)
        except BaseException:
            self._give_back()
            raise

    def __exit__(self, *_: object) -> None:
        self._give_back()

    @contextlib.contextmanager
    def let_go(self) -> Iterator[None]:
        """Give the generators back for a while, then go on from where they were."""
        own = [generator.get_state() for generator in self._generators]
        self._give_back()
        try:
            yield
        finally:
            self._take()
            self._set(own)

    def _take(self) -> None:
        try:
            # Taken and noted in one call: Ctrl-C between two would leave the lock taken for ever.
            self._held.extend(map(_lock.acquire, (True,)))
            self._before = [generator.get_state() for generator in self._generators]
        except BaseException:
            self._release()
            raise
        _of_thread.seeded = self

    def _give_back(self) -> None:
        if not self._held:  # Ctrl-C came in `let_go`, while another rank held them
            return
        _of_thread.seeded = None
        try:
            self._set(self._before)
        finally:
            self._release()

    def _release(self) -> None:
        held, self._held = self._held, []
        if held:
            _lock.release()

    def _set(self, states: Sequence[Any]) -> None:
        for generator, state in zip(self._generators, states, strict=True):
            generator.set_state(state)


def while_others_draw() -> contextlib.AbstractContextManager[None]:
    """Return the context in which to wait for other ranks inside a forward."""
    seeded: Seeded | None = getattr(_of_thread, "seeded", None)
    return contextlib.nullcontext() if seeded is None else seeded.let_go()


def draw_seed() -> int:
    """Draw a seed from the user's generator."""
    with _lock:
        return int(torch.randint(1 << 62, (), device="cpu"))
