"""NcclBackend and HybridBackend keep the contract, but for what `gpu.exclusions` names."""

from __future__ import annotations

import fnmatch
from functools import partial

from backends.contract.suite import CASES, names_for
from backends.contract_tests import as_tests
from gpu.exclusions import EXCLUDED, EXCLUDED_ON_REAL_GPUS, names_on_gpu
from gpu.gpu_ranks import start


def test_exclusions_name_cases() -> None:
    patterns = [*EXCLUDED, *EXCLUDED_ON_REAL_GPUS]
    assert [pattern for pattern in patterns if not fnmatch.filter(CASES, pattern)] == []


def _names(backend: str, world_size: int) -> list[str]:
    # Torch and JAX have no arrays on emulated GPUs: test_real_gpu asks them on real ones.
    named = names_on_gpu(backend, names_for(world_size))
    return [name for name in named if not CASES[name].library]


# Each size once: HybridBackend hands arrays of a GPU to an NcclBackend.
for _backend, _sizes in (("nccl", (1, 2, 4)), ("hybrid", (3,))):
    for _size in _sizes:
        _start = partial(start, _backend, _size)
        globals().update(as_tests(f"{_backend}_{_size}", _start, _names(_backend, _size)))

# The host's arrays go their old way, whose sizes test_contract has: one tells that they do.
globals().update(
    as_tests("hybrid_host_2", partial(start, "hybrid_host", 2), _names("hybrid_host", 2))
)
