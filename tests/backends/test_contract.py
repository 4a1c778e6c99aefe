"""Every backend over the engine keeps the contract; others ask the same of MPI and of GPUs."""

from __future__ import annotations

from functools import partial

from backends import rank_groups
from backends.contract.suite import CASES, names_for
from backends.contract_tests import as_tests

SIZES = [(backend, size) for backend in ("simulated", "host", "tcp") for size in (1, 2, 3, 4)]


def _is_worth_it(backend: str, world_size: int, name: str) -> bool:
    """Whether to run a case here: every process takes seconds to import torch or JAX."""
    return not CASES[name].library or backend == "simulated" or (backend, world_size) == ("host", 2)


for _backend, _size in SIZES:
    _names = [name for name in names_for(_size) if _is_worth_it(_backend, _size, name)]
    _start = partial(rank_groups.start, _backend, _size)
    globals().update(as_tests(f"{_backend}_{_size}", _start, _names))
