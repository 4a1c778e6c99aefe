"""What ranks need not import each for itself: their server imports it, before it forks them.

pytest, which the files of their bodies import, is most of what a short-lived rank would compute.
torch takes two seconds, and two more when the first optimizer is made, which imports its compiler;
JAX takes one and a half. Builds with CUDA would bring libcudart with them, in place of which ranks
put the emulated one.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib.metadata

import hypothesis  # noqa: F401
import pytest  # noqa: F401

import ferro_dist.backends.host
import ferro_dist.testing  # noqa: F401

with contextlib.suppress(importlib.metadata.PackageNotFoundError):
    if importlib.metadata.version("torch").endswith("+cpu"):
        import torch._dynamo  # noqa: F401

        with contextlib.suppress(ImportError):
            import jax  # noqa: F401  starts no thread before its first array

_HUGE_PAGE_NBYTES = 2 << 20
_MADV_COLLAPSE = 25  # Linux 6.1; older ones refuse it, and nothing changes


def _collapse_into_huge_pages() -> None:
    """Let a fork copy hundreds of entries for pages, not 60,000: with torch, half of its time."""
    libc = ctypes.CDLL(None)
    with open("/proc/self/maps") as file:
        mappings = [line.split() for line in file]
    for addresses, access, _, _, _, *name in mappings:
        if access != "rw-p" or name not in ([], ["[heap]"]):
            continue
        start, end = (int(address, 16) for address in addresses.split("-"))
        start = -(-start // _HUGE_PAGE_NBYTES) * _HUGE_PAGE_NBYTES
        for page in range(start, end - _HUGE_PAGE_NBYTES + 1, _HUGE_PAGE_NBYTES):
            libc.madvise(ctypes.c_void_p(page), ctypes.c_size_t(_HUGE_PAGE_NBYTES), _MADV_COLLAPSE)


# No rank searches this for cycles: a search writes to every object, and copies the page it is on.
gc.freeze()
_collapse_into_huge_pages()
