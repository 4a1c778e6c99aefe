"""Every backend over the engine keeps the contract; `test_mpi` asks the same of MPI."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from backends import rank_groups
from backends.contract.suite import CASES, names_for

SIZES = [(backend, size) for backend in ("simulated", "host", "tcp") for size in (1, 2, 3, 4)]


class Kept:
    """The ranks of one backend and size, started again after a case has failed."""

    def __init__(self, backend: str, world_size: int) -> None:
        self._what = backend, world_size
        self.ranks = rank_groups.start(backend, world_size)

    def renew(self) -> None:
        self.ranks.close()
        self.ranks = rank_groups.start(*self._what)


def _is_worth_it(backend: str, world_size: int, name: str) -> bool:
    """Whether to run a case here: every process takes seconds to import torch or JAX."""
    return not CASES[name].library or backend == "simulated" or (backend, world_size) == ("host", 2)


def _tests_of(backend: str, world_size: int) -> tuple[Any, Any]:
    """Make the fixture that keeps a group, and the test of every case on it.

    One fixture with groups for parameters would not do: pytest tears it down whenever
    any other parameter of a test changes.
    """
    fixture_name = f"{backend}_{world_size}"

    @pytest.fixture(scope="module", name=fixture_name)
    def kept() -> Iterator[Kept]:
        kept = Kept(backend, world_size)
        yield kept
        kept.ranks.close()

    names = [name for name in names_for(world_size) if _is_worth_it(backend, world_size, name)]

    @pytest.mark.usefixtures(fixture_name)
    @pytest.mark.parametrize("name", names)
    def test(request: pytest.FixtureRequest, name: str) -> None:
        library = CASES[name].library
        if library:
            pytest.importorskip(library)
        kept: Kept = request.getfixturevalue(fixture_name)
        try:
            kept.ranks.run(name)
        finally:
            if not kept.ranks.is_usable:
                kept.renew()

    return kept, test


for _backend, _size in SIZES:
    _kept, _test = _tests_of(_backend, _size)
    globals()[f"{_backend}_{_size}"] = _kept
    globals()[f"test_contract_on_{_backend}_{_size}"] = _test
