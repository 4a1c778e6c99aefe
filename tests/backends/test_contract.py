"""Every backend over the engine keeps the contract; `test_mpi` asks the same of MPI."""

from __future__ import annotations

from collections.abc import Iterator

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


@pytest.fixture(scope="session")
def kept(request: pytest.FixtureRequest) -> Iterator[Kept]:
    kept = Kept(*request.param)
    yield kept
    kept.ranks.close()


@pytest.fixture
def ranks(kept: Kept) -> Iterator[rank_groups.Ranks]:
    yield kept.ranks
    if not kept.ranks.is_usable:
        kept.renew()


def _is_worth_it(backend: str, world_size: int, name: str) -> bool:
    """Whether to run a case here: every process takes seconds to import torch or JAX."""
    return not CASES[name].library or backend == "simulated" or (backend, world_size) == ("host", 2)


CASES_BY_SIZE = [
    pytest.param((backend, size), name, id=f"{backend}-{size}-{name}")
    for backend, size in SIZES
    for name in names_for(size)
    if _is_worth_it(backend, size, name)
]


@pytest.mark.parametrize(("kept", "name"), CASES_BY_SIZE, indirect=["kept"])
def test_contract(ranks: rank_groups.Ranks, name: str) -> None:
    library = CASES[name].library
    if library:
        pytest.importorskip(library)
    ranks.run(name)
