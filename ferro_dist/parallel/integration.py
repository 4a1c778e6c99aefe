"""Frameworks by name.

Code that knows one is a layer above this package, and is imported only when the user passes in
something of it.
"""

from __future__ import annotations

import importlib
from typing import Any

__all__ = ["JAX_STAGE", "TORCH_MODULE", "TORCH_MODULE_LIST", "has_base", "integration"]

TORCH_MODULE = "torch.nn.modules.module.Module"
TORCH_MODULE_LIST = "torch.nn.modules.container.ModuleList"
JAX_STAGE = "ferro_dist.integrations.jax_stage.JaxStage"


def has_base(value: object, name: str) -> bool:
    """Whether the type of a value, or a base class of it, is the one of this full name."""
    return any(f"{base.__module__}.{base.__name__}" == name for base in type(value).__mro__)


def integration(name: str) -> Any:
    """Return a module of `ferro_dist.integrations`; its framework must be there."""
    return importlib.import_module(f"ferro_dist.integrations.{name}")
