"""How the compiled modules find libcudart and libnccl, and which they refuse."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import ferro_dist._native
from ferro_dist._native.cuda_libraries import wheel_libraries

ROOT = Path(__file__).parents[2]
NATIVE = Path(ferro_dist._native.__path__[0])

# A libnccl with what 2.21 has: no function declared weak.
ANSWERS = {
    "ncclGetVersion": "int ncclGetVersion(int* v) { *v = VERSION; return 0; }",
    "ncclGetErrorString": 'const char* ncclGetErrorString(int r) { return "some error"; }',
    "ncclGetLastError": 'const char* ncclGetLastError(void* c) { return ""; }',
}


def build_old_nccl(folder: Path, version: int) -> None:
    code = re.sub(r"//.*", "", (ROOT / "csrc" / "abi" / "nccl.h").read_text())
    names = re.findall(r"^(?:ncclResult_t|const char\*) (\w+)\(", code, re.MULTILINE)
    source = folder / "nccl.c"
    stubs = [ANSWERS.get(name, f"int {name}(void) {{ return 0; }}") for name in names]
    source.write_text(f"#define VERSION {version}\n" + "\n".join(stubs) + "\n")
    target = folder / "libnccl.so.2"
    command = ["cc", "-shared", "-fPIC", "-w", "-Wl,-soname,libnccl.so.2", "-o", str(target)]
    subprocess.run([*command, str(source)], check=True, capture_output=True, timeout=300)


def run(program: str, *folders: Path, expected: int = 0) -> str:
    """Run a program with libraries of `folders` before all others; return what it printed."""
    path = os.pathsep.join(map(str, folders))
    ran = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "LD_LIBRARY_PATH": path},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert ran.returncode == expected, ran.stderr
    return ran.stdout


@pytest.mark.parametrize(
    ("module", "soname", "folder"),
    [
        ("libferro_nccl", "libnccl.so.2", "nvidia/nccl/lib"),
        ("nccl_library", "libnccl.so.2", "nvidia/nccl/lib"),
        ("cudart12", "libcudart.so.12", "nvidia/cuda_runtime/lib"),
        ("cudart13", "libcudart.so.13", "nvidia/cu13/lib"),
    ],
)
def test_modules_need_the_real_library_and_look_for_the_wheels(
    module: str, soname: str, folder: str
) -> None:
    (path,) = NATIVE.glob(f"{module}.*so")
    ran = subprocess.run(["readelf", "-d", str(path)], capture_output=True, text=True, check=True)
    assert f"Shared library: [{soname}]" in ran.stdout
    assert f"Library runpath: [$ORIGIN/../../{folder}]" in ran.stdout
    assert "(RPATH)" not in ran.stdout


def test_only_the_modules_of_cuda_need_cuda() -> None:
    linked = []
    for path in NATIVE.glob("*.so"):
        ran = subprocess.run(
            ["readelf", "-d", str(path)], capture_output=True, text=True, check=True
        )
        if re.search(r"\[lib(nccl|cudart)", ran.stdout):
            linked.append(path.name.partition(".")[0])
    assert sorted(linked) == ["cudart12", "cudart13", "libferro_nccl", "nccl_library"]


WITH_A_WHEEL = """
import importlib
from ferro_dist._native import cuda_libraries
import_module = importlib.import_module
def import_after_telling(name):
    print(cuda_libraries.is_loaded("libnccl.so.2"))
    return import_module(name)
importlib.import_module = import_after_telling
print(".".join(map(str, cuda_libraries.load_nccl().get_version())))
"""


def test_a_wheel_comes_before_the_system_and_behind_the_library_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wheel, other = tmp_path / "nvidia" / "nccl" / "lib", tmp_path / "other"
    for folder, version in ((wheel, 22301), (other, 22302)):
        folder.mkdir(parents=True)
        build_old_nccl(folder, version)
    # As NCCL 2.21 has it: where its wheel is installed, that would hide a mere folder of this name.
    (tmp_path / "nvidia" / "__init__.py").touch()
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    monkeypatch.setenv("PYTHONPATH", path)
    assert run(WITH_A_WHEEL).split() == ["True", "2.23.1"]
    assert run(WITH_A_WHEEL, other).split() == ["True", "2.23.2"]
    # The linker does not see what a program sets itself.
    set_late = f"import os; os.environ['LD_LIBRARY_PATH'] = {str(other)!r}\n"
    assert run(set_late + WITH_A_WHEEL).split() == ["True", "2.23.2"]


def test_library_that_cannot_be_loaded_comes_with_the_remedy(tmp_path: Path) -> None:
    (tmp_path / "libnccl.so.2").touch()
    program = (
        "from ferro_dist._native.cuda_libraries import load_nccl\n"
        "from ferro_dist.errors import BackendUnavailable\n"
        "try: load_nccl()\n"
        "except BackendUnavailable as error: print(error)\n"
    )
    assert 'pip install "ferro_dist[cu12]"' in run(program, tmp_path)


def build_cudart(folder: Path, body: str, code: str = "") -> None:
    """Build runtimes of both versions; each function has this `body`, unless `code` has it."""
    header = (ROOT / "csrc" / "abi" / "cudart.h").read_text()
    names = re.findall(r"^cudaError_t (\w+)\(", re.sub(r"//.*", "", header), re.MULTILINE)
    words = "".join(
        f'const char* cudaGetError{what}(int e) {{ return "{text}"; }}\n'
        for what, text in (("Name", "cudaErrorUnknown"), ("String", "it is broken"))
    )
    others = [name for name in names if f" {name}(" not in code]
    (folder / "cudart.c").write_text(
        words + code + "".join(f"int {name}(void) {{ {body} }}\n" for name in others)
    )
    for version in (12, 13):
        soname = f"libcudart.so.{version}"
        script = folder / f"{version}.map"
        script.write_text(f"{soname} {{ global: *; }};")
        options = f"-Wl,-soname,{soname}", f"-Wl,--version-script,{script}"
        command = ["cc", "-shared", "-fPIC", *options]
        paths = ["-o", str(folder / soname), str(folder / "cudart.c")]
        subprocess.run([*command, *paths], check=True, capture_output=True, timeout=300)


def test_a_runtime_that_fails_is_told_with_its_own_words(tmp_path: Path) -> None:
    build_cudart(tmp_path, "return 999;")
    program = (
        "from ferro_dist._native.cuda_libraries import load_cudart\n"
        "try: load_cudart()\n"
        "except Exception as error: print(type(error).__name__, error)\n"
    )
    assert "it is broken (cudaErrorUnknown)" in run(program, tmp_path)


# Calls that begin by starting the driver or making a context. They end once another thread says so.
SLOW_CALLS = """
#include <unistd.h>
static volatile int is_inside, may_end;
int is_in_a_call(void) { return is_inside; }
void end_call(void) { may_end = 1; }
static int begin(void) {
  may_end = 0;
  is_inside = 1;
  for (int i = 0; i < 10000 && !may_end; ++i) usleep(1000);
  is_inside = 0;
  return may_end ? 0 : 999;
}
int cudaGetDeviceCount(int* count) { *count = 2; return begin(); }
int cudaSetDevice(int device) { return begin(); }
int cudaPointerGetAttributes(void* attributes, const void* data) { return begin(); }
int cudaGetDevice(int* device) { *device = 0; return 0; }
int cudaRuntimeGetVersion(int* version) { *version = 13000; return 0; }
int cudaDriverGetVersion(int* version) { *version = 13000; return 0; }
"""

CALL_SLOWLY = """
import ctypes, os, threading
from ferro_dist._native import cuda_libraries
from ferro_dist._native.cuda_memory import location_of
from ferro_dist._native.cuda_runtime import DeviceGuard, device_count, set_device
cuda_libraries.load_cudart()
library = ctypes.CDLL("libcudart.so.13")

def end_calls():
    while True:
        while not library.is_in_a_call():
            os.sched_yield()
        library.end_call()

threading.Thread(target=end_calls, daemon=True).start()
device_count()
set_device(1)
location_of(0)
with DeviceGuard(1):
    pass
print("done")
"""


def test_other_threads_go_on_while_the_driver_starts(tmp_path: Path) -> None:
    build_cudart(tmp_path, "return 0;", SLOW_CALLS)
    assert run(CALL_SLOWLY, tmp_path) == "done\n"


def test_library_that_is_too_old_is_refused(tmp_path: Path) -> None:
    build_old_nccl(tmp_path, 22005)
    program = (
        "from ferro_dist._native.cuda_libraries import load_nccl\n"
        "from ferro_dist.errors import BackendUnavailable\n"
        "try: load_nccl()\n"
        "except BackendUnavailable as error: print(error)\n"
    )
    printed = run(program, tmp_path)
    assert "NCCL 2.20.5 is loaded" in printed
    assert "2.21 is the oldest" in printed


@pytest.mark.skipif(
    not any(wheel_libraries("libnccl.so.2")),
    reason="no NCCL: pip install nvidia-nccl-cu12 or nvidia-nccl-cu13",
)
def test_real_nccl_answers_without_a_gpu() -> None:
    program = (
        "from ferro_dist._native.cuda_libraries import load_nccl\n"
        "nccl = load_nccl()\n"
        "print(nccl.get_version() >= (2, 21), len(bytes(nccl.get_unique_id())))\n"
    )
    assert run(program).split() == ["True", "128"]
