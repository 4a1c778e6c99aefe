"""Arrays of emulated GPUs, and how a process comes by them."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from ferro_dist._emulation.libraries import FOLDER
from ferro_dist.testing import emulated_gpu, run_ranks

NAMES = ("bool", "int8", "uint16", "int64", "float16", "float64", "complex64")
DTYPES = (*NAMES, ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2)


def run_alone(body: Any, *args: Any) -> Any:
    return run_ranks(1, body, *args, backend="none", emulate_gpu=True)[0]


def copy_in_and_out(rank: int, world_size: int, addr: str) -> list[bool]:
    gpu = emulated_gpu(delay_us=300)
    same = []
    for dtype in DTYPES:
        host = np.arange(24).reshape(2, 3, 4).astype(dtype)
        device = gpu.array(host)
        keys: list[Any] = [(...,), 1, (0, slice(None, None, -1), 2), (None, 1, 2, 3)]
        same += [(device[key].numpy() == host[key]).all() for key in keys]
        same.append(bool((device.reshape(-1, 2).numpy() == host.reshape(-1, 2)).all()))
        same.append(bool((device[:, ::2].copy().numpy() == host[:, ::2]).all()))
    return [bool(each) for each in same]


def name_dtypes_of_ml_dtypes(rank: int, world_size: int, addr: str) -> list[str]:
    gpu = emulated_gpu()
    names = ("bfloat16", "float8_e4m3fn", "float8_e5m2")
    return [str(x.dtype) for name in names for x in (gpu.array([1], name), gpu.empty(1, name))]


def test_dtypes_of_ml_dtypes_have_names() -> None:
    names = run_alone(name_dtypes_of_ml_dtypes)
    assert names == sorted(2 * ["bfloat16", "float8_e4m3fn", "float8_e5m2"])


def drop_an_array_on_another_device(rank: int, world_size: int, addr: str) -> float:
    gpu = emulated_gpu(devices=2, delay_us=10_000)
    with gpu.device(1):
        x, y = gpu.array(np.ones(4)), gpu.empty(4, "float64")
        gpu.check(
            gpu.cudart.cudaMemcpyAsync(*map(ctypes.c_void_p, (y.address, x.address, 32)), 3, 0)
        )
    del x
    return float(y.numpy().sum())


def test_an_array_is_freed_in_order_with_its_own_devices_default_stream() -> None:
    assert run_ranks(1, drop_an_array_on_another_device, backend="none") == [4.0]


def copy_arrays_with_gaps(rank: int, world_size: int, addr: str) -> bool:
    gpu = emulated_gpu()
    table = np.arange(90_000).reshape(300, 300)
    made = [gpu.array(table.T[::3]), gpu.array(table).copy()]
    made.append(gpu.array(table.T)[::3].copy())
    rows, whole = table.T[::3], table
    return all((x.numpy() == y).all() for x, y in zip(made, (rows, whole, rows), strict=True))


def test_arrays_with_gaps_are_copied_whole() -> None:
    assert run_alone(copy_arrays_with_gaps)


def test_arrays_of_every_dtype_come_back_as_they_were_and_sliced() -> None:
    assert all(run_alone(copy_in_and_out))


def compute_in_place(rank: int, world_size: int, addr: str) -> list[list[Any]]:
    gpu = emulated_gpu(delay_us=300)
    with gpu.stream():
        x = gpu.array(np.arange(6.0).reshape(2, 3))
        x[0] = 7
        x *= 2
        x += gpu.array(np.ones((2, 3)))
        x[:, 1] = [5, 6]
        x /= 2
        half = gpu.empty(6, "float16")
        half[...] = x.reshape(6)
        return [x.numpy().tolist(), half.numpy().tolist()]


def test_arrays_are_written_to_and_scaled_in_the_order_of_the_stream() -> None:
    expected = [[7.5, 2.5, 7.5], [3.5, 3, 5.5]]
    assert run_alone(compute_in_place) == [expected, expected[0] + expected[1]]


def misuse_arrays(rank: int, world_size: int, addr: str) -> list[Any]:
    gpu = emulated_gpu()
    x, numbers = gpu.array(np.ones(3, np.float32)), gpu.array(np.arange(3))
    calls: tuple[Callable[[], object], ...] = (
        lambda: np.asarray(x),
        lambda: np.add(np.ones(3), x),
        lambda: gpu.array(x),
    )
    for call in calls:
        with pytest.raises(TypeError, match=r"by its numpy\(\) alone"):
            call()
    with pytest.raises(TypeError, match="Cannot cast"):
        numbers /= 2
    with pytest.raises(TypeError, match="Cannot cast"):
        numbers += x
    with pytest.raises(ValueError, match="must not be negative"):
        gpu.empty(-1)
    with pytest.raises(TypeError, match="shape must be an integer"):
        gpu.empty(2.5)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="no name for >f4"):  # DLPack has none for a byte order
        gpu.array(np.ones(3, ">f4"))
    with pytest.raises(TypeError, match="no name for >f4"):
        gpu.empty(3, ">f4")
    return [numbers.numpy().tolist(), gpu.empty(np.int64(3)).shape]


def test_arrays_do_no_more_than_those_of_a_gpu() -> None:
    assert run_alone(misuse_arrays) == [[0, 1, 2], (3,)]


def describe(rank: int, world_size: int, addr: str) -> dict[str, Any]:
    from ferro_dist._native.buffer_view import as_view

    gpu = emulated_gpu()
    stream = gpu.stream()
    seen: dict[str, Any] = {}
    with stream:
        a = gpu.array(np.ones((3, 4), np.float32))
        strided = a[:, ::2]
        interface = strided.__cuda_array_interface__
        seen["interface"] = interface | {"data": None, "stream": None}
        seen["stream"] = interface["stream"] == stream.handle
        view = as_view(strided)
        seen["view"] = (view.device_type, view.device_id, view.count, view.is_contiguous)
        seen["address"] = view.address == a.address
    wide = gpu.array(np.ones(3, ml_dtypes.bfloat16))
    seen["bfloat16"] = hasattr(wide, "__cuda_array_interface__")
    seen["device"] = wide.__dlpack_device__()
    with pytest.raises(BufferError):
        wide.__dlpack__(dl_device=(1, 0))
    with pytest.raises(ValueError, match="contiguous"):
        a[:, :3].reshape(9)
    return seen


def test_arrays_are_described_to_other_libraries() -> None:
    assert run_alone(describe) == {
        "interface": {
            "shape": (3, 2),
            "typestr": "<f4",
            "data": None,
            "strides": (16, 8),
            "stream": None,
            "version": 3,
        },
        "stream": True,
        "view": (2, 0, 6, False),
        "address": True,
        "bfloat16": False,
        "device": (2, 0),
    }


def export(rank: int, world_size: int, addr: str) -> list[int]:
    gpu = emulated_gpu()
    references = []
    for version in (None, (1, 0)):
        a = gpu.array(np.ones(3))
        before = sys.getrefcount(a)
        capsule = a.__dlpack__(max_version=version)
        references.append(sys.getrefcount(a) - before)
        del capsule  # nobody took it
        references.append(sys.getrefcount(a) - before)
    return references


def test_an_export_keeps_the_array_until_it_is_dropped() -> None:
    assert run_alone(export) == [1, 0, 1, 0]


def hand_to_another_stream(rank: int, world_size: int, addr: str) -> list[float]:
    """Let a consumer's stream read what the producer's has not written yet."""
    gpu = emulated_gpu(delay_us=20_000)
    producer, consumer = gpu.stream(), gpu.stream()
    with producer:
        a = gpu.array(np.ones(3, np.float32))
        a.__dlpack__(stream=consumer.handle)
    with consumer:
        numbers: list[float] = a.numpy().tolist()
    return numbers


def test_dlpack_orders_the_consumers_stream_after_the_producers() -> None:
    assert run_alone(hand_to_another_stream) == [1, 1, 1]


def drop_after_its_own_work(rank: int, world_size: int, addr: str) -> list[float]:
    gpu = emulated_gpu(delay_us=5_000)
    stream = gpu.stream()
    with stream:
        kept = gpu.empty(4)
        for turn in range(5):
            source = gpu.array(np.full(4, turn, np.float32))
            ends = ctypes.c_void_p(kept.address), ctypes.c_void_p(source.address)
            gpu.check(gpu.cudart.cudaMemcpyAsync(*ends, ctypes.c_size_t(16), 3, _p(stream)))
            del source  # freed in the stream's order, as by torch and CuPy
        numbers: list[float] = kept.numpy().tolist()
    return numbers


def test_memory_is_freed_in_the_order_of_its_own_stream() -> None:
    assert run_alone(drop_after_its_own_work) == [4, 4, 4, 4]


def _p(stream: Any) -> ctypes.c_void_p:
    return ctypes.c_void_p(stream.handle)


def ask_twice(rank: int, world_size: int, addr: str) -> bool:
    for devices in (-1, 65):
        with pytest.raises(ValueError, match="devices must be from 0 to 64"):
            emulated_gpu(devices=devices)
    gpu = emulated_gpu(cuda=13)
    with pytest.raises(ValueError, match="delay_us must be from 0 to 10000000, not -1"):
        emulated_gpu(delay_us=-1)
    with pytest.raises(TypeError, match="delay_us must be an integer, not '300'"):
        emulated_gpu(delay_us="300")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="1 emulated devices already"):
        emulated_gpu(devices=2)
    for plan in ("nonsense", "point=all_reduce,act=hang", "rank=0,point=malloc,act=out_of_memory"):
        with pytest.raises(ValueError, match="cannot read the fault"):
            emulated_gpu(faults=plan)
    with pytest.raises(TypeError, match="faults must be a str, not 3"):
        emulated_gpu(faults=3)  # type: ignore[arg-type]
    version = ctypes.c_int()
    gpu.check(gpu.cudart.cudaRuntimeGetVersion(ctypes.byref(version)))
    assert version.value == 13000
    return emulated_gpu() is gpu


def test_there_is_one_emulated_gpu_in_a_process() -> None:
    assert run_ranks(1, ask_twice, backend="none") == [True]


def load_a_newer_cudart(rank: int, world_size: int, addr: str) -> int:
    """As the import of JAX does, which brings the real one."""
    emulated_gpu(cuda=12)
    ctypes.CDLL(str(FOLDER / "libcudart.so.13"))
    from ferro_dist._native.cuda_runtime import runtime_version

    return runtime_version() // 1000


def test_a_library_that_comes_later_takes_nobodys_place() -> None:
    assert run_ranks(1, load_a_newer_cudart, backend="none") == [12]


def find_a_real_library(rank: int, world_size: int, addr: str, path: str) -> str:
    ctypes.CDLL(path)
    with pytest.raises(ImportError) as raised:
        emulated_gpu()
    return str(raised.value)


@pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler to make a library with")
def test_a_real_library_that_is_loaded_already_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "libcudart.so.12"
    soname = "-Wl,-soname,libcudart.so.12"
    (tmp_path / "empty.c").touch()
    subprocess.run(
        ["cc", "-shared", soname, "-o", str(path), str(tmp_path / "empty.c")], check=True
    )
    [message] = run_ranks(1, find_a_real_library, str(path), backend="none")
    assert "A real libcudart.so.12 is loaded" in message
    assert "ferrorun --emulate-gpu" in message


SCRIPT = """
import ctypes
ctypes.CDLL("libcudart.so.12")  # found by the linker
from ferro_dist.testing import emulated_gpu
gpu = emulated_gpu()
print(gpu.device_count, gpu.array([1.5, 2.5]).numpy().tolist())
"""


def test_ferrorun_gives_each_rank_an_emulated_device(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    job = [sys.executable, "-m", "ferro_dist.launch", "-n", "3", "--emulate-gpu", str(script)]
    done = subprocess.run(job, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == [f"[{rank}] 3 [1.5, 2.5]" for rank in range(3)]
