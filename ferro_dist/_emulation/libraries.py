"""Loading the emulated libraries in place of the real ones."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

from ferro_dist.errors import BackendUnavailable

__all__ = ["FOLDER", "load", "loaded_cudart"]

FOLDER = Path(__file__).parent

_NCCL = "libnccl.so.2"
_CUDARTS = ("libcudart.so.12", "libcudart.so.13")


def load(cuda: int) -> tuple[ctypes.CDLL, ctypes.CDLL]:
    """Load the emulated CUDA runtime and NCCL for the whole process; repeating it is harmless.

    Raises
    ------
    BackendUnavailable
        A real one is loaded already, or the emulated ones were not built.
    """
    loaded = {soname: _loaded(soname) for soname in (*_CUDARTS, _NCCL)}
    for soname, library in loaded.items():
        if library is not None and not _is_emulated(library):
            raise BackendUnavailable(
                f"A real {soname} is loaded in this process already. Call emulated_gpu() before "
                "the first import of torch, CuPy or anything else that uses CUDA, or start with "
                "ferrorun --emulate-gpu."
            )
    cudart = loaded_cudart() or _open(f"libcudart.so.{cuda}")
    return cudart, loaded[_NCCL] or _open(_NCCL)


def loaded_cudart() -> ctypes.CDLL | None:
    """Return the emulated CUDA runtime that is loaded, by `load` or by the linker."""
    libraries = [_loaded(soname) for soname in _CUDARTS]
    return next((each for each in libraries if each is not None and _is_emulated(each)), None)


def _loaded(soname: str) -> ctypes.CDLL | None:
    try:
        # Seen by everybody from now on, whoever loaded it.
        return ctypes.CDLL(soname, mode=os.RTLD_NOLOAD | os.RTLD_NOW | os.RTLD_GLOBAL)
    except OSError:
        return None


def _is_emulated(library: ctypes.CDLL) -> bool:
    return hasattr(library, "ferroEmulationIsEmulated")


def _open(soname: str) -> ctypes.CDLL:
    path = FOLDER / soname
    if not path.exists():
        raise BackendUnavailable(
            f"The emulated {soname} was not built: it is missing in {FOLDER}. "
            "Install ferro_dist anew, or run: python setup.py build_ext --inplace"
        )
    return ctypes.CDLL(str(path), mode=os.RTLD_NOW | os.RTLD_GLOBAL)
