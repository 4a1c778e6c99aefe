"""What is loaded when: nothing large by the import, no torch and no CUDA by the first use."""

from __future__ import annotations

import ast
import inspect
import subprocess
import sys

import pytest

import ferro_dist as fd

FIRST_USE = """
import ferro_dist, numpy
with ferro_dist.init(rank=0, world_size=1) as backend:
    assert ferro_dist.allreduce(numpy.ones(3), backend).tolist() == [1, 1, 1]
"""
# Whatever an interpreter of this machine loads by itself, through .pth files for example.
LOADED = """
import sys
before = set(sys.modules)
{statement}
print(*sorted({{name.partition(".")[0] for name in set(sys.modules) - before}}))
"""
LIBRARIES = """
print(*sorted({line.split("/")[-1].strip() for line in open("/proc/self/maps") if ".so" in line}))
"""


def run(program: str) -> list[str]:
    ran = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=300, check=True
    )
    return ran.stdout.split()


def test_import_alone_loads_no_other_package() -> None:
    loaded = run(LOADED.format(statement="import ferro_dist"))
    assert [name for name in loaded if name not in sys.stdlib_module_names] == ["ferro_dist"]


def test_import_alone_loads_no_submodule() -> None:
    program = "import sys, ferro_dist; print(*(m for m in sys.modules if 'ferro_dist.' in m))"
    assert run(program) == []


def test_first_allreduce_loads_numpy_and_ml_dtypes_alone() -> None:
    loaded = run(LOADED.format(statement=FIRST_USE))
    others = [name for name in loaded if name not in sys.stdlib_module_names]
    assert set(others) - {"numpy", "ml_dtypes", "ferro_dist"} <= cython_runtime(others)


def cython_runtime(names: list[str]) -> set[str]:
    """Return the modules that every Cython extension registers: no packages."""
    return {name for name in names if name.startswith(("_cython_", "cython_runtime"))}


def test_first_allreduce_loads_no_library_of_cuda_or_mpi() -> None:
    libraries = run(FIRST_USE + LIBRARIES)
    unwanted = ("libcuda", "libcudart", "libnccl", "libnvidia", "libtorch", "libmpi")
    assert [name for name in libraries if name.startswith(unwanted)] == []


@pytest.mark.parametrize("name", fd.__all__)
def test_every_public_name_loads_and_has_a_docstring(name: str) -> None:
    thing = getattr(fd, name)
    assert thing.__doc__
    if inspect.isclass(thing):
        members = [member for member in vars(thing) if not member.startswith("_")]
        assert [m for m in members if not inspect.getdoc(getattr(thing, m))] == []


def test_public_names_are_listed() -> None:
    assert set(fd.__all__) <= set(dir(fd))


def test_type_checkers_are_told_of_the_names_that_are_loaded() -> None:
    told = {
        alias.name: node.module
        for node in ast.walk(ast.parse(inspect.getsource(fd)))
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("ferro_dist.")
        for alias in node.names
    }
    assert told == {name: f"ferro_dist.{module}" for name, module in fd._MODULE_OF.items()}


def test_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'all_reduce'"):
        _ = fd.all_reduce  # type: ignore[attr-defined]  # and so to mypy, else it would say so


def test_every_listed_name_loads_without_torch() -> None:
    # A finder that knows nothing of torch, as where it is not installed; help() does the rest.
    program = """
import importlib.machinery, inspect, sys
find = importlib.machinery.PathFinder.find_spec
importlib.machinery.PathFinder.find_spec = (
    lambda name, *args: None if name.partition(".")[0] == "torch" else find(name, *args)
)
import ferro_dist
names = [name for name, _ in inspect.getmembers(ferro_dist)]
print(*(name for name in ("DDP", "ShardedOptimizer", "TYPE_CHECKING") if name in names))
"""
    assert run(program) == ["DDP"]


def test_subinterpreter_is_refused() -> None:
    # By itself NumPy, too, refuses to be loaded twice, but not to be loaded in another interpreter.
    is_old = sys.version_info < (3, 13)
    program = f"""
import {"_xxsubinterpreters" if is_old else "_interpreters"} as interpreters
other = interpreters.create({"isolated=False" if is_old else "'legacy'"})
interpreters.run_string(other, '''
try:
    import ferro_dist._native
except ImportError as error:
    print(error)
''')
{FIRST_USE}
"""
    assert " ".join(run(program)).startswith("ferro_dist works in the main interpreter only")
