"""A libnccl and a libcudart that return at once, to measure what is around them.

Every function of ``csrc/abi`` returns success and does nothing, but for the few that must
answer something. No GPU, and no result of it is a GPU's.
"""

from __future__ import annotations

import ctypes
import re
import subprocess
from pathlib import Path

ABI = Path(__file__).parent.parent / "csrc" / "abi"

# What must answer: handles that are not null, and a world of one.
ANSWERS = {
    "ncclGetVersion": "int ncclGetVersion(int* v) { *v = 23203; return 0; }",
    "ncclGetErrorString": 'const char* ncclGetErrorString(int r) { return "no error"; }',
    "ncclGetLastError": 'const char* ncclGetLastError(void* c) { return ""; }',
    "ncclCommInitRankConfig": """
        typedef struct { char internal[128]; } Id;
        int ncclCommInitRankConfig(void** c, int n, Id id, int rank, void* config) {
          *c = (void*)0x1000;
          return 0;
        }""",
    "ncclCommInitRankScalable": """
        int ncclCommInitRankScalable(void** c, int n, int rank, int ids, void* id, void* config) {
          *c = (void*)0x1000;
          return 0;
        }""",
    "ncclCommGetAsyncError": "int ncclCommGetAsyncError(void* c, int* e) { *e = 0; return 0; }",
    "ncclCommCount": "int ncclCommCount(void* c, int* n) { *n = 1; return 0; }",
    "ncclCommUserRank": "int ncclCommUserRank(void* c, int* r) { *r = 0; return 0; }",
    "ncclCommCuDevice": "int ncclCommCuDevice(void* c, int* d) { *d = 0; return 0; }",
    "cudaGetErrorName": 'const char* cudaGetErrorName(int e) { return "cudaSuccess"; }',
    "cudaGetErrorString": 'const char* cudaGetErrorString(int e) { return "no error"; }',
    "cudaRuntimeGetVersion": "int cudaRuntimeGetVersion(int* v) { *v = 13000; return 0; }",
    "cudaDriverGetVersion": "int cudaDriverGetVersion(int* v) { *v = 13000; return 0; }",
    "cudaGetDeviceCount": "int cudaGetDeviceCount(int* n) { *n = 1; return 0; }",
    "cudaGetDevice": "int cudaGetDevice(int* d) { *d = 0; return 0; }",
    "cudaStreamCreateWithFlags": """
        int cudaStreamCreateWithFlags(void** s, unsigned f) { *s = (void*)0x2000; return 0; }""",
    "cudaStreamCreateWithPriority": """
        int cudaStreamCreateWithPriority(void** s, unsigned f, int p) {
          *s = (void*)0x2000;
          return 0;
        }""",
    "cudaStreamIsCapturing": "int cudaStreamIsCapturing(void* s, int* c) { *c = 0; return 0; }",
    "cudaEventCreateWithFlags": """
        int cudaEventCreateWithFlags(void** e, unsigned f) { *e = (void*)0x3000; return 0; }""",
}

# cuda.core, on which nccl4py stands, asks the driver; it finds functions by their names.
DRIVER = """
#include <string.h>
static int nothing(void) { return 0; }
static int one(int* n) { *n = 1; return 0; }
static int zero(int* n) { *n = 0; return 0; }
static int version(int* v) { *v = 13000; return 0; }
static int context(void** c) { *c = (void*)0x7000; return 0; }
static int pointer_attributes(unsigned n, int* attributes, void** data, unsigned long long p) {
  for (unsigned i = 0; i < n; ++i) {
    if (attributes[i] == 2) *(unsigned*)data[i] = 2;  /* memory type: of a device */
    if (attributes[i] == 8) *(unsigned*)data[i] = 0;  /* not managed */
    if (attributes[i] == 9) *(int*)data[i] = 0;       /* device 0 */
  }
  return 0;
}
static const struct { const char* name; int (*function)(); } answers[] = {
  {"cuCtxGetCurrent", context}, {"cuCtxGetDevice", zero}, {"cuDeviceGet", zero},
  {"cuDeviceGetCount", one}, {"cuDevicePrimaryCtxRetain", context},
  {"cuDriverGetVersion", version}, {"cuPointerGetAttributes", pointer_attributes},
};
int cuGetProcAddress_v2(const char* name, void** f, int v, unsigned long long flags, int* status) {
  if (status) *status = 0;
  *f = (void*)nothing;
  for (unsigned i = 0; i < sizeof answers / sizeof *answers; ++i)
    if (!strcmp(name, answers[i].name)) *f = (void*)answers[i].function;
  if (!strcmp(name, "cuGetProcAddress")) *f = (void*)cuGetProcAddress_v2;
  return 0;
}
int cuInit(unsigned flags) { return 0; }
"""

# An array of 16 float32 on GPU 0, and a current stream. Objects lie at least 16 bytes apart: four
# times its object's address is a place of 64 bytes that no other array has.
TENSOR = """
#include <stddef.h>
#include <stdint.h>
typedef struct {
  void* data;
  int32_t device_type, device_id, ndim;
  uint8_t code, bits;
  uint16_t lanes;
  int64_t *shape, *strides;
  uint64_t byte_offset;
} DLTensor;
static int64_t shape[1] = {16}, strides[1] = {1};
static int describe(void* array, DLTensor* out) {
  const DLTensor tensor = {(void*)((uintptr_t)array * 4), 2, 0, 1, 2, 32, 1, shape, strides, 0};
  *out = tensor;
  return 0;
}
static int current_stream(int32_t device_type, int32_t device_id, void** stream) {
  *stream = (void*)0x5000;
  return 0;
}
static struct {
  uint32_t major, minor;
  void *previous, *allocate, *export_managed, *import_managed;
  int (*describe)(void*, DLTensor*);
  int (*current_stream)(int32_t, int32_t, void**);
} api = {1, 3, NULL, NULL, NULL, NULL, describe, current_stream};
void* table(void) { return &api; }
"""


def build(folder: Path) -> None:
    """Compile libnccl, two libcudart and libcuda into `folder`, by the names they are loaded by.

    Raises
    ------
    OSError, subprocess.CalledProcessError
        There is no C compiler, or it fails.
    """
    _compile(folder, "libnccl.so.2", _definitions(_functions("nccl.h")))
    for soname in ("libcudart.so.12", "libcudart.so.13"):
        _compile(folder, soname, _definitions(_functions("cudart.h")), is_versioned=True)
    _compile(folder, "libcuda.so.1", DRIVER)
    _compile(folder, "tensor.so", TENSOR)


def tensor_type(folder: Path) -> type:
    """Make a type whose objects say through DLPack's exchange table that they are on a GPU.

    So do torch's CUDA tensors, but they need a torch with CUDA, and a GPU. These cost as much,
    less the time that torch takes to fill in the shape.
    """
    library = ctypes.CDLL(str(folder / "tensor.so"))
    library.table.restype = ctypes.c_void_p
    new_capsule = ctypes.pythonapi.PyCapsule_New
    new_capsule.restype = ctypes.py_object
    new_capsule.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
    capsule = new_capsule(library.table(), b"dlpack_exchange_api", None)
    attributes = {"__dlpack_c_exchange_api__": capsule, "requires_grad": False}
    return type("InstantTensor", (), attributes)


def _compile(folder: Path, soname: str, code: str, is_versioned: bool = False) -> None:
    source = folder / f"{soname}.c"
    source.write_text(code)
    command = ["cc", "-O2", "-w", "-shared", "-fPIC", f"-Wl,-soname,{soname}"]
    if is_versioned:
        command.append("-Wl,--version-script=/dev/stdin")
    subprocess.run(
        [*command, "-o", str(folder / soname), str(source)],
        input=f"{soname} {{ global: *; }};",
        text=True,
        check=True,
        capture_output=True,
    )


def _functions(header: str) -> list[str]:
    code = re.sub(r"//.*", "", (ABI / header).read_text(encoding="utf-8"))
    return re.findall(
        r"^(?:__attribute__.*? )?(?:ncclResult_t|cudaError_t|const char\*) (\w+)\(", code, re.M
    )


def _definitions(names: list[str]) -> str:
    """Return C that defines the functions: those that must answer do, the others succeed."""
    code = (ANSWERS.get(name, f"int {name}(void) {{ return 0; }}") for name in names)
    return "\n".join(code) + "\n"
