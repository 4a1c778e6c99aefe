"""One test for each case of the contract and each group, over ranks that are kept between them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
from backends.contract.suite import CASES
from backends.rank_groups import Ranks

__all__ = ["as_tests"]


class Kept:
    """The ranks of one group, started again after a case has failed."""

    def __init__(self, start: Callable[[], Ranks]) -> None:
        self._start = start
        self.ranks = start()

    def renew(self) -> None:
        self.ranks.close()
        self.ranks = self._start()


def as_tests(label: str, start: Callable[[], Ranks], names: Sequence[str]) -> dict[str, Any]:
    """Make the fixture that keeps a group, and the test of every case on it, by their names.

    One fixture with groups for parameters would not do: pytest tears it down whenever
    any other parameter of a test changes.
    """

    @pytest.fixture(scope="module", name=label)
    def kept() -> Iterator[Kept]:
        kept = Kept(start)
        yield kept
        kept.ranks.close()

    @pytest.mark.usefixtures(label)
    @pytest.mark.parametrize("name", names)
    def test(request: pytest.FixtureRequest, name: str) -> None:
        library = CASES[name].library
        if library:
            pytest.importorskip(library)
        kept: Kept = request.getfixturevalue(label)
        try:
            kept.ranks.run(name)
        finally:
            if not kept.ranks.is_usable:
                kept.renew()

    return {label: kept, f"test_contract_on_{label}": test}
