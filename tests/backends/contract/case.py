"""Cases of the contract: what each rank of a group does, and what must hold there.

A body is called on every rank with a group that all of them share, and leaves it as it
was: usable, with no call under way. One that ends its group makes a group of its own, by
`split`. A body fails by raising.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

import ferro_dist as fd

__all__ = ["Array", "Case", "Group", "assert_same_bits", "case", "cases", "clone", "raised"]

Array = Any
Group = Any  # a Backend; that a result is no Work is known from the arguments
Body = Callable[..., None]
Error = TypeVar("Error", bound=BaseException)


@dataclass(frozen=True)
class Case:
    """One body, and what it needs.

    Attributes
    ----------
    body : callable
        Called with the group and `arguments`.
    min_ranks : int
        The smallest group in which it means anything.
    max_ranks : int
        The largest group in which it tells more than in a smaller one.
    library : str
        A module that it needs, or "".
    """

    body: Body
    arguments: tuple[Any, ...]
    min_ranks: int
    max_ranks: int
    library: str

    def run(self, group: Group) -> None:
        self.body(group, *self.arguments)


cases: dict[str, Case] = {}


def case(
    *,
    each: Sequence[str] = (),
    min_ranks: int = 1,
    max_ranks: int = sys.maxsize,
    library: str = "",
) -> Callable[[Body], Body]:
    """Make a function a case of its name, or one for each word, which it is then given."""

    def register(body: Body) -> Body:
        name = body.__name__
        named: dict[str, tuple[str, ...]] = {f"{word}_{name}": (word,) for word in each}
        named = named or {name: ()}
        for full_name, arguments in named.items():
            assert full_name not in cases, f"two cases are called {full_name}"
            cases[full_name] = Case(body, arguments, min_ranks, max_ranks, library)
        return body

    return register


def raised(kind: type[Error], function: Callable[..., Any], *args: Any, **options: Any) -> Error:
    """Call a function and return what it raises, which must be a `kind`."""
    try:
        result = function(*args, **options)
    except kind as error:
        return error
    raise AssertionError(f"no {kind.__name__} was raised: the result was {result!r}")


def assert_same_bits(group: Group, *arrays: Array) -> None:
    """Compare arrays with those of all other ranks, byte by byte."""
    digest = hashlib.sha256()
    for array in arrays:
        digest.update(np.ascontiguousarray(array).tobytes())
    digests = fd.all_gather(np.frombuffer(digest.digest(), np.uint8), group)
    assert (digests.reshape(group.world_size, -1) == digests[: digest.digest_size]).all(), (
        "ranks have different bits"
    )


def clone(group: Group, timeout: float | None = None) -> Group:
    """Make another group of the same ranks."""
    other = group.split(range(group.world_size))
    if timeout is not None:
        other.timeout = timeout
    return other
