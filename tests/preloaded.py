"""What ranks need not import each for itself: their server imports it, before it forks them.

pytest, which the files of their bodies import, is most of what a short-lived rank would compute.
torch takes two seconds, and two more when the first optimizer is made, which imports its compiler.
A torch with CUDA would bring libcudart with it, in place of which ranks put the emulated one.
"""

from __future__ import annotations

import contextlib
import gc
import importlib.metadata

import hypothesis  # noqa: F401
import pytest  # noqa: F401

import ferro_dist.backends.host
import ferro_dist.testing  # noqa: F401

with contextlib.suppress(importlib.metadata.PackageNotFoundError):
    if importlib.metadata.version("torch").endswith("+cpu"):
        import torch._dynamo  # noqa: F401

# No rank searches this for cycles: a search writes to every object, and copies the page it is on.
gc.freeze()
