from typing import Any

__all__ = ["functions"]

functions: Any
