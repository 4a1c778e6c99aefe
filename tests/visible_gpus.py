"""Which GPUs the tests' processes see: none, but for those that ask for them.

Torch initializes CUDA in passing, which opens descriptors; JAX puts its arrays on a GPU that it
finds, and takes most of its memory. Tests of the host's arrays are to run alike everywhere.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

__all__ = ["hide_gpus", "show_gpus", "with_gpus"]

# What the variables were where pytest was started: "=value", or "" for one that was not set.
_HIDDEN = {"CUDA_VISIBLE_DEVICES": "", "JAX_PLATFORMS": "cpu"}
_PREFIX = "FERRO_DIST_TESTS_FOUND_"


def hide_gpus() -> None:
    """Hide them from this process and from all that it starts."""
    for name, value in _HIDDEN.items():
        found = os.environ.get(name)
        # A worker of xdist finds what its parent has set.
        os.environ.setdefault(_PREFIX + name, "" if found is None else f"={found}")
        os.environ[name] = value


def show_gpus() -> None:
    """Let this process see them after all, if it has not used CUDA or JAX yet."""
    shown = with_gpus(os.environ)
    for name in _HIDDEN:
        os.environ.pop(name, None)
        if name in shown:
            os.environ[name] = shown[name]


def with_gpus(environ: Mapping[str, str]) -> dict[str, str]:
    """Return an environment for a process that sees them."""
    shown = dict(environ)
    for name in _HIDDEN:
        found = shown.pop(_PREFIX + name, None)
        if found is not None:
            shown.pop(name, None)
        if found:
            shown[name] = found[1:]
    return shown
