"""Our declarations against NVIDIA's own header, where a wheel has brought it."""

from __future__ import annotations

import itertools
import re
import subprocess
from pathlib import Path

import pytest

from ferro_dist._native.cuda_libraries import wheel_libraries

ROOT = Path(__file__).parents[2]
ABI = ROOT / "csrc" / "abi" / "nccl.h"

# What nccl.h includes of CUDA, as far as it uses it. The wheels have not all of it.
CUDA_HEADERS = {
    "cuda_runtime.h": (
        "#define CUDART_VERSION 12000\n"
        "typedef struct CUstream_st* cudaStream_t;\ntypedef struct CUevent_st* cudaEvent_t;\n"
    ),
    "cuda_fp16.h": "",
    "cuda_bf16.h": "#define __CUDA_BF16_TYPES_EXIST__\n",  # up to NCCL 2.23
    "cuda_fp8.h": "",
}
STRUCTS = ("ncclUniqueId", "ncclConfig_t", "ncclWaitSignalDesc_t")


@pytest.fixture(scope="module")
def real_header() -> Path:
    for library in wheel_libraries("libnccl.so.2"):
        header = Path(library).parents[1] / "include" / "nccl.h"
        if header.exists():
            return header
    pytest.skip("no nccl.h: pip install nvidia-nccl-cu12 or nvidia-nccl-cu13")


def code_of(header: Path) -> str:
    return re.sub(r"//[^\n]*|/\*.*?\*/", "", header.read_text(), flags=re.DOTALL)


def prototypes(header: Path) -> dict[str, str]:
    """Return each function's return type and parameters, without the parameters' names."""
    code = re.sub(r"^\s*#.*", "", code_of(header), flags=re.MULTILINE)
    found = re.findall(r"(ncclResult_t|const char\s*\*)\s*(nccl\w+)\s*\(([^()]*)\)\s*;", code)
    return {name: normal(f"{result}({parameters})") for result, name, parameters in found}


def normal(text: str) -> str:
    text = re.sub(r"\s+", " ", text).replace(" *", "*").replace("* ", "*")
    return re.sub(r"([\w*]) ?\b(?!const\b|int\b|char\b)\w+(?=[,)])", r"\1", text).replace(" ", "")


def constants(header: Path) -> list[str]:
    """Name the enumerators and the numeric macros that a header of ours declares."""
    code = code_of(header)
    enumerators = [
        name
        for body in re.findall(r"enum \{(.*?)\}", code, re.DOTALL)
        for name in re.findall(r"(\w+) = ", body)
    ]
    return enumerators + re.findall(r"#define (NCCL_\w+) (?!NULL|INT_MIN)\S+", code)


def fields(header: Path, struct: str) -> list[str]:
    """Name the fields of a struct in their order; none where the header has no such struct."""
    body = re.search(rf"struct (?:\w+ )?\{{([^}}]*)\}} {struct};", code_of(header))
    return re.findall(r"(\w+)(?:\[\w+\]| = [^;]+)?;", body.group(1)) if body else []


def numbers_to_compare(ours: Path, real: Path) -> dict[str, str]:
    """Return what both headers know of, as expressions of C by their names.

    Another version lacks names, or has the end of a struct otherwise: its beginning is shared.
    """
    words = set(re.findall(r"\w+", code_of(real)))
    changing = ("NCCL_VERSION_CODE", "ncclNumResults", "ncclNumTypes")
    expressions = {name: name for name in constants(ours) if name in words and name not in changing}
    for struct in STRUCTS:
        known, there = fields(ours, struct), fields(real, struct)
        shared = min(len(known), len(there))
        assert known[:shared] == there[:shared]
        if there == known:
            expressions[f"sizeof {struct}"] = f"sizeof({struct})"
        for field in known[:shared]:
            expressions[f"{struct}.{field}"] = f"offsetof({struct}, {field})"
    return expressions


def values(
    folder: Path, include: str, folders: list[Path], expressions: dict[str, str]
) -> dict[str, int]:
    """Compile and run a program that prints what expressions are in the eyes of a header."""
    prints = [f'P({code}, "{name}")' for name, code in expressions.items()]
    source = folder / "layout.cpp"
    source.write_text(
        f"#include <cstddef>\n#include <cstdio>\n#include {include}\n"
        '#define P(value, name) std::printf("%s=%lld\\n", name, (long long)(value));\n'
        "int main() {\n" + "\n".join(prints) + "\n}\n"
    )
    flags = itertools.chain.from_iterable(("-I", str(each)) for each in folders)
    program = folder / "layout"
    command = ["g++", "-std=c++17", *flags, str(source), "-o", str(program)]
    subprocess.run(command, check=True, capture_output=True, timeout=120)
    printed = subprocess.run(
        [str(program)], check=True, capture_output=True, text=True, timeout=300
    ).stdout
    return {name: int(value) for name, _, value in (x.partition("=") for x in printed.splitlines())}


def test_prototypes_are_those_of_nccl(real_header: Path) -> None:
    real, ours = prototypes(real_header), prototypes(ABI)
    assert len(ours) > 40
    # A library that is older than a function has no prototype of it either.
    common = {name: real[name] for name in ours if name in real}
    assert len(common) >= 28
    assert {name: ours[name] for name in common} == common


def test_numbers_and_layouts_are_those_of_nccl(real_header: Path, tmp_path: Path) -> None:
    for name, text in CUDA_HEADERS.items():
        (tmp_path / name).write_text(text)
    expressions = numbers_to_compare(ABI, real_header)
    assert len(expressions) >= 40
    ours = values(tmp_path, '"abi/nccl.h"', [ROOT / "csrc"], expressions)
    assert ours == values(tmp_path, f'"{real_header}"', [tmp_path], expressions)
