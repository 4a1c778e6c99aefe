"""Which libcudart and libnccl this process uses.

The extension modules name the libraries that they need (``DT_NEEDED``), and the dynamic
linker finds them: one that is loaded already, by torch or CuPy for instance, else one in
``LD_LIBRARY_PATH``, else the wheels' beside this package (``RUNPATH``), else the system's.
Where this package is not in the same ``site-packages`` as the wheels, as in a source tree,
this module searches for the wheel and loads its library first: the system's may be too old for
a torch that is imported later, and would serve it, too.
"""

from __future__ import annotations

import ctypes
import importlib
import importlib.util
import itertools
import os
from collections.abc import Iterator
from types import ModuleType
from typing import Any

from ferro_dist.errors import BackendUnavailable

__all__ = ["OLDEST_NCCL", "is_loaded", "load_cudart", "load_nccl", "wheel_libraries"]

OLDEST_NCCL = (2, 21)

INSTALL = 'Install it: pip install "ferro_dist[cu12]" for CUDA 12, "ferro_dist[cu13]" for CUDA 13'

# The packages of the wheels, and their folders of libraries.
_WHEELS = {
    "libnccl.so.2": ("nvidia/nccl/lib",),
    "libcudart.so.12": ("nvidia/cuda_runtime/lib",),
    "libcudart.so.13": ("nvidia/cu13/lib",),
}
_CUDART_VERSIONS = (13, 12)


def load_cudart() -> ModuleType:
    """Import the module of the CUDA runtime that suits this process.

    That is the runtime which is loaded already, else the newest installed one that the driver
    supports, else the newest installed.

    Raises
    ------
    BackendUnavailable
        There is none.
    """
    loaded = [version for version in _CUDART_VERSIONS if is_loaded(f"libcudart.so.{version}")]
    found, problems = [], []
    for version in loaded[:1] or _CUDART_VERSIONS:
        try:
            found.append(_import(f"cudart{version}", f"libcudart.so.{version}"))
        except (ImportError, OSError) as problem:
            problems.append(str(problem))
            continue
        if _is_served(found[-1]):
            return found[-1]
    if not found:
        raise BackendUnavailable(
            f"The CUDA runtime cannot be loaded ({'; '.join(problems)}). {INSTALL}."
        )
    return found[0]


def load_nccl() -> Any:
    """Import the binding of NCCL.

    Raises
    ------
    BackendUnavailable
        libnccl is not installed, cannot be loaded, or is older than `OLDEST_NCCL`.
    """
    try:
        return _import("nccl", "libnccl.so.2")
    except BackendUnavailable:
        raise
    except (ImportError, OSError) as problem:
        raise BackendUnavailable(f"NCCL cannot be loaded ({problem}). {INSTALL}.") from problem


def is_loaded(soname: str) -> bool:
    """Whether a library of this name is loaded already."""
    try:
        ctypes.CDLL(soname, mode=os.RTLD_NOLOAD | os.RTLD_LAZY)
    except OSError:
        return False
    return True


def wheel_libraries(soname: str) -> Iterator[str]:
    """Yield the paths at which wheels have installed a library of this name."""
    spec = importlib.util.find_spec("nvidia")
    for site in spec.submodule_search_locations or () if spec is not None else ():
        for folder in _WHEELS[soname]:
            path = os.path.join(os.path.dirname(site), folder, soname)
            if os.path.exists(path):
                yield path


def _import(name: str, soname: str) -> ModuleType:
    """Import a compiled module, after the library that it is to use, unless one is loaded."""
    path = next(itertools.chain(_in_library_path(soname), wheel_libraries(soname)), None)
    if path is not None and not is_loaded(soname):
        ctypes.CDLL(path)
    return importlib.import_module(f"ferro_dist._native.{name}")


def _in_library_path(soname: str) -> Iterator[str]:
    """Yield the paths in ``LD_LIBRARY_PATH``, which the linker reads only when a process begins."""
    for folder in os.environ.get("LD_LIBRARY_PATH", "").split(os.pathsep):
        path = os.path.join(folder, soname)
        if folder and os.path.exists(path):
            yield path


def _is_served(cudart: ModuleType) -> bool:
    """Whether the driver is new enough for this runtime, or there is none at all."""
    from ferro_dist._native.cuda_runtime import versions_of

    runtime, driver = versions_of(cudart.functions)
    return driver == 0 or driver // 1000 >= runtime // 1000
