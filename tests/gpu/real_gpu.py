"""What this machine has of real GPUs, found out in a process of its own."""

from __future__ import annotations

import functools
import importlib
import os
from collections.abc import Callable
from typing import Any

import pytest
from visible_gpus import show_gpus

import ferro_dist as fd
import ferro_dist.testing
from ferro_dist.testing import run_ranks

__all__ = ["need", "need_torch_without_cuda", "share_gpu"]

_TIMEOUT_S = 120.0

# Whether a library that can be imported can also use a GPU. CuPy compiles what it computes with,
# for which it may lack CUDA's headers.
_CAN_COMPUTE: dict[str, Callable[[Any], bool]] = {
    "torch": lambda torch: torch.cuda.is_available(),
    "jax": lambda jax: jax.default_backend() == "gpu",
    "cupy": lambda cupy: int(cupy.arange(3).sum()) == 3,
}


def need(*libraries: str) -> None:
    """Skip unless there is a GPU, and these libraries can use it; say exactly what is missing."""
    for library in ("nccl", *libraries):
        reason = _why_not(library)
        if reason:
            pytest.skip(reason)


def share_gpu(rank: int) -> None:
    """Let a rank see the GPU, and share it with others. First of all that it does."""
    show_gpus()
    ferro_dist.testing.share_gpu(rank)


def need_torch_without_cuda() -> None:
    """Skip unless torch can be imported into a process with emulated GPUs."""
    torch = pytest.importorskip("torch", reason="torch is not installed")
    if torch.version.cuda is not None:
        pytest.skip(
            "this torch brings the real libcudart and libnccl: none is emulated beside them"
        )


@functools.cache
def _why_not(library: str) -> str:
    reason: str = run_ranks(1, _look_for, library, backend="none", timeout=_TIMEOUT_S)[0]
    return reason


def _look_for(rank: int, world_size: int, addr: str, library: str) -> str:
    show_gpus()
    if library == "nccl":
        return _look_for_nccl()
    # Asked for its backend, JAX takes most of the GPU, where others' tests are running.
    os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
    try:
        module: Any = importlib.import_module(library)
    except ImportError:
        return f"{library} is not installed"
    try:
        can_compute = _CAN_COMPUTE[library](module)
        problem = "" if can_compute else "it finds none"
    except Exception as error:  # of whatever kind the library raises
        problem = f"{' '.join(str(error).split()):.200}"
    return problem and f"{library} {module.__version__} cannot use a GPU: {problem}"


def _look_for_nccl() -> str:
    from ferro_dist._native.cuda_libraries import load_nccl

    try:
        load_nccl()
        from ferro_dist._native.cuda_runtime import device_count

        return "" if device_count() else "no GPU: cudaGetDeviceCount says 0"
    except fd.BackendUnavailable as error:
        return f"no GPU: {' '.join(str(error).split())}"
