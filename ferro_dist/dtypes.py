"""The element types, by their numbers in ``ferro::DType`` (``csrc/ferro/types.hpp``)."""

from __future__ import annotations

__all__ = ["DTYPE_NAMES"]

DTYPE_NAMES = (
    "bool",
    "int8",
    "uint8",
    "int16",
    "uint16",
    "int32",
    "uint32",
    "int64",
    "uint64",
    "float16",
    "bfloat16",
    "float32",
    "float64",
    "complex64",
    "complex128",
    "float8_e4m3fn",
    "float8_e5m2",
)
"""Names in the spelling that NumPy, ml_dtypes, torch and JAX share, by ``ferro::DType``."""
