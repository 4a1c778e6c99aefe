"""Frameworks by name.

Code that knows one is a layer above this package, and is imported only when the user passes in
something of it.
"""

from __future__ import annotations

import importlib
import sys
from typing import Any

from ferro_dist.errors import BackendUnavailable

__all__ = ["JAX_STAGE", "TORCH_MODULE", "TORCH_MODULE_LIST", "has_base", "integration"]

TORCH_MODULE = "torch.nn.modules.module.Module"
TORCH_MODULE_LIST = "torch.nn.modules.container.ModuleList"
JAX_STAGE = "ferro_dist.integrations.jax.stage.JaxStage"

_OLDEST_TORCH = (2, 10)


def has_base(value: object, name: str) -> bool:
    """Whether the type of a value, or a base class of it, is the one of this full name."""
    return any(f"{base.__module__}.{base.__name__}" == name for base in type(value).__mro__)


def integration(name: str) -> Any:
    """Return a module of `ferro_dist.integrations`; its framework must be there.

    Parameters
    ----------
    name : str
        Within that package: ``"jax.stage"``.

    Raises
    ------
    BackendUnavailable
        It is a torch too old for it.
    """
    if name.startswith("torch."):
        _check_torch(sys.modules["torch"].__version__)
    return importlib.import_module(f"ferro_dist.integrations.{name}")


def _check_torch(version: str) -> None:
    # Others have names of their own, perhaps without numbers: as they come.
    major, _, rest = version.partition(".")
    minor = rest.partition(".")[0]
    if major.isdecimal() and minor.isdecimal() and (int(major), int(minor)) < _OLDEST_TORCH:
        oldest = ".".join(map(str, _OLDEST_TORCH))
        raise BackendUnavailable(
            f"DDP and Pipeline need torch {oldest} or newer, and this is {version}: "
            f'pip install "torch>={oldest}". Collectives take tensors of older ones, too.'
        )
