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
    "cuda_bf16.h": "",
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


def prototypes(header: Path) -> dict[str, str]:
    """Return each function's return type and parameters, without the parameters' names."""
    code = re.sub(r"//[^\n]*|/\*.*?\*/", "", header.read_text(), flags=re.DOTALL)
    code = re.sub(r"^\s*#.*", "", code, flags=re.MULTILINE)
    found = re.findall(r"(ncclResult_t|const char\s*\*)\s*(nccl\w+)\s*\(([^()]*)\)\s*;", code)
    return {name: normal(f"{result}({parameters})") for result, name, parameters in found}


def normal(text: str) -> str:
    text = re.sub(r"\s+", " ", text).replace(" *", "*").replace("* ", "*")
    return re.sub(r"([\w*]) ?\b(?!const\b|int\b|char\b)\w+(?=[,)])", r"\1", text).replace(" ", "")


def constants(header: Path) -> list[str]:
    """Name the enumerators and the numeric macros that a header of ours declares."""
    code = re.sub(r"//.*", "", header.read_text())
    enumerators = [
        name
        for body in re.findall(r"enum \{(.*?)\}", code, re.DOTALL)
        for name in re.findall(r"(\w+) = ", body)
    ]
    return enumerators + re.findall(r"#define (NCCL_\w+) (?!NULL|INT_MIN)\S+", code)


def fields(header: Path, struct: str) -> list[str]:
    code = re.sub(r"//.*", "", header.read_text())
    body = re.search(rf"struct (?:\w+ )?\{{([^}}]*)\}} {struct};", code)
    assert body is not None
    return re.findall(r"(\w+)(?:\[\w+\])?;", body.group(1))


def layout(folder: Path, include: str, folders: list[Path]) -> str:
    """Compile and run a program that prints every number which both headers must share."""
    names = [name for name in constants(ABI) if name not in ("NCCL_VERSION_CODE", "ncclNumResults")]
    prints = [f'P({name}, "{name}")' for name in names]
    for struct in STRUCTS:
        prints.append(f'P(sizeof({struct}), "sizeof {struct}")')
        prints += [
            f'P(offsetof({struct}, {field}), "{struct}.{field}")' for field in fields(ABI, struct)
        ]
    source = folder / "layout.cpp"
    source.write_text(
        f"#include <cstddef>\n#include <cstdio>\n#include {include}\n"
        '#define P(value, name) std::printf("%s %lld\\n", name, (long long)(value));\n'
        "int main() {\n" + "\n".join(prints) + "\n}\n"
    )
    flags = itertools.chain.from_iterable(("-I", str(each)) for each in folders)
    program = folder / "layout"
    command = ["g++", "-std=c++17", *flags, str(source), "-o", str(program)]
    subprocess.run(command, check=True, capture_output=True, timeout=120)
    return subprocess.run(
        [str(program)], check=True, capture_output=True, text=True, timeout=60
    ).stdout


def test_prototypes_are_those_of_nccl(real_header: Path) -> None:
    real, ours = prototypes(real_header), prototypes(ABI)
    assert len(ours) > 40
    # A library that is older than a function has no prototype of it either.
    common = {name: real[name] for name in ours if name in real}
    assert len(common) >= 28
    assert {name: ours[name] for name in common} == common


def test_numbers_and_layouts_are_those_of_nccl(real_header: Path, tmp_path: Path) -> None:
    if "NCCL_SUSPEND_MEM" not in real_header.read_text():
        pytest.skip("this nccl.h is older than 2.29.7, and lacks names that are compared")
    for name, text in CUDA_HEADERS.items():
        (tmp_path / name).write_text(text)
    ours = layout(tmp_path, '"abi/nccl.h"', [ROOT / "csrc"])
    real = layout(tmp_path, f'"{real_header}"', [tmp_path])
    assert ours == real
