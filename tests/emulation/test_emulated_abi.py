"""What the emulated libraries export, against our declarations and NVIDIA's headers."""

from __future__ import annotations

import importlib.util
import re
import subprocess
from pathlib import Path

import pytest

from ferro_dist._emulation.libraries import FOLDER
from ferro_dist._native.cuda_libraries import OLDEST_NCCL

CSRC = Path(__file__).parents[2] / "csrc"
EMULATED_NCCL = (2, 32, 3)
CUDARTS = ("libcudart.so.12", "libcudart.so.13")


def exported(library: str) -> set[str]:
    """Name the functions that a library gives to the dynamic linker."""
    listing = subprocess.run(
        ["readelf", "--dyn-syms", "--wide", str(FOLDER / library)],
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    pattern = r"FUNC\s+(?:GLOBAL|WEAK)\s+DEFAULT\s+\d+ ([A-Za-z_]\w*)"
    return {
        name for name in re.findall(pattern, listing) if name.startswith(("cuda", "nccl", "ferro"))
    }


def declared(header: Path) -> set[str]:
    code = re.sub(r"//[^\n]*|/\*.*?\*/", "", header.read_text(encoding="utf-8"), flags=re.DOTALL)
    return set(re.findall(r"\b((?:nccl|cuda)[A-Z]\w+)\(", code))


def header_of_wheel(*places: str) -> Path:
    """Return a header that NVIDIA's wheels have installed; skip where there is none."""
    spec = importlib.util.find_spec("nvidia")
    for site in (spec.submodule_search_locations or ()) if spec is not None else ():
        for place in places:
            if (path := Path(site) / place).exists():
                return path
    pytest.skip(f"no wheel here has installed nvidia/{places[0]}")


def test_the_emulated_nccl_has_every_function_that_the_binding_declares() -> None:
    assert declared(CSRC / "abi" / "nccl.h") - exported("libnccl.so.2") == set()


@pytest.mark.parametrize("library", CUDARTS)
def test_the_emulated_cudart_has_every_function_that_the_binding_declares(library: str) -> None:
    assert declared(CSRC / "abi" / "cudart.h") - exported(library) == set()


@pytest.mark.parametrize("library", CUDARTS)
def test_the_emulated_cudart_has_the_version_node_of_the_real_one(library: str) -> None:
    versions = subprocess.run(
        ["readelf", "--version-info", str(FOLDER / library)],
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    assert f"Name: {library}" in versions


def versions_of_functions(header: Path) -> dict[str, tuple[int, ...]]:
    """Read the first NCCL that has each function out of the comments of our own header."""
    versions: dict[str, tuple[int, ...]] = {}
    since: tuple[int, ...] = OLDEST_NCCL
    for line in header.read_text(encoding="utf-8").splitlines():
        if heading := re.fullmatch(r"// Since ([\d.]+)\.", line):
            since = tuple(map(int, heading[1].split(".")))
        elif function := re.search(r"\b(nccl[A-Z]\w+)\(", line):
            versions[function[1]] = since
    return versions


def version_of(header: Path) -> tuple[int, ...]:
    parts = dict(re.findall(r"#define NCCL_(MAJOR|MINOR|PATCH) +(\d+)", header.read_text()))
    return tuple(int(parts[name]) for name in ("MAJOR", "MINOR", "PATCH"))


def test_functions_are_in_the_real_nccl_from_the_version_on_that_is_said() -> None:
    header = header_of_wheel("nccl/include/nccl.h")
    versions = versions_of_functions(CSRC / "abi" / "nccl.h")
    assert len(versions) > 40
    there = {name for name, since in versions.items() if since <= version_of(header)}
    assert there == declared(header) & set(versions)


def test_nothing_is_exported_that_a_real_nccl_has_not() -> None:
    header = header_of_wheel("nccl/include/nccl.h")
    if version_of(header) < EMULATED_NCCL:
        pytest.skip(f"this nccl.h is of {version_of(header)}, older than the emulated NCCL")
    invented = exported("libnccl.so.2") - declared(header)
    assert {name for name in invented if not name.startswith("ferroEmulation")} == set()


def test_nothing_is_exported_that_a_real_cudart_has_not() -> None:
    real = declared(
        header_of_wheel(
            "cuda_runtime/include/cuda_runtime_api.h", "cu13/include/cuda_runtime_api.h"
        )
    )
    invented = exported("libcudart.so.12") - real
    assert {name for name in invented if not name.startswith("ferroEmulation")} == set()


def test_the_constants_beyond_the_binding_are_those_of_the_real_cudart() -> None:
    header = header_of_wheel("cuda_runtime/include/driver_types.h", "cu13/include/driver_types.h")
    real = dict(re.findall(r"\b(cudaError\w+)\s*=\s*(\d+)", header.read_text(encoding="utf-8")))
    ours = (CSRC / "emulation" / "cudart" / "cuda_abi.hpp").read_text(encoding="utf-8")
    constants = dict(
        re.findall(r"cudaError_t (cudaError\w+) = static_cast<cudaError_t>\((\d+)\)", ours)
    )
    assert constants.items() <= real.items()
    assert len(constants) > 5
