"""An NCCL 2.21, which lacks all that came later: the emulated one, with those names removed."""

from __future__ import annotations

import ctypes
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from nccl_ranks import connect, ranked, values

import ferro_dist as fd
from ferro_dist import interop
from ferro_dist._emulation.libraries import FOLDER
from ferro_dist._native.cuda_libraries import load_nccl
from ferro_dist.errors import BackendUnavailable, UnsupportedOp
from ferro_dist.parallel.buckets.gpu_memory import GpuMemory
from ferro_dist.testing import emulated_gpu, run_ranks

ABI = Path(__file__).parents[2] / "csrc/abi/nccl.h"


@pytest.fixture(scope="module")
def old_library(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Make a libnccl in which the linker finds no function that this package takes for new."""
    library = (FOLDER / "libnccl.so.2").read_bytes()
    weak = re.findall(rb"__attribute__\(\(weak\)\) ncclResult_t (\w+)", ABI.read_bytes())
    assert len(weak) > 10
    for name in weak:
        assert b"\0" + name + b"\0" in library
        library = library.replace(b"\0" + name + b"\0", b"\0X" + name[1:] + b"\0")
    path = tmp_path_factory.mktemp("old") / "libnccl.so.2"
    path.write_bytes(library)
    return str(path)


def load(path: str) -> Any:
    os.environ["FERRO_EMULATION_NCCL_VERSION"] = "22100"
    ctypes.CDLL(path, mode=os.RTLD_NOW | os.RTLD_GLOBAL)  # the first of its name counts
    emulated_gpu()
    nccl = load_nccl()
    assert nccl.get_version() == (2, 21, 0)
    return nccl


def move_parts(backend: Any, path: str) -> dict[str, list[float]]:
    load(path)
    gpu = emulated_gpu()
    communicator = connect(backend)
    x = ranked(10 * backend.rank, 6)
    outs = {"all_to_all": gpu.empty(6), "gather": gpu.empty(18), "scatter": gpu.empty(2)}
    communicator.all_to_all(x, outs["all_to_all"])
    communicator.gather(x, outs["gather"] if backend.rank == 1 else None, 1)
    communicator.scatter(x if backend.rank == 1 else None, outs["scatter"], 1)
    results = {name: values(out) for name, out in outs.items()}
    communicator.close()
    return results


def test_parts_are_moved_by_sends_and_receives(old_library: str) -> None:
    x = [np.arange(6.0) + 10 * rank for rank in range(3)]
    for rank, results in enumerate(run_ranks(3, move_parts, old_library)):
        mine = slice(2 * rank, 2 * rank + 2)
        assert results["all_to_all"] == np.concatenate([each[mine] for each in x]).tolist()
        assert results["scatter"] == x[1][mine].tolist()
        if rank == 1:
            assert results["gather"] == np.concatenate(x).tolist()


def ask_for_what_is_newer(backend: Any, path: str) -> None:
    nccl = load(path)
    from ferro_dist._native.nccl_memory import NcclMemory

    communicator = connect(backend)
    memory = NcclMemory(4096)
    x = ranked(0)
    ids = [nccl.get_unique_id(), nccl.get_unique_id()]
    calls: list[tuple[str, str, Callable[[], Any]]] = [
        ("ncclCommInitRankScalable", "2.23", lambda: nccl.Communicator.init_rank(1, ids, 0)),
        ("ncclCommShrink", "2.27", lambda: communicator.shrink([1 - backend.rank])),
        ("ncclCommWindowRegister", "2.27", lambda: communicator.register_window(memory)),
        ("ncclCommRevoke", "2.28.7", communicator.revoke),
        ("ncclCommGrow", "2.29.2", lambda: communicator.grow(3)),
        ("ncclCommGrow", "2.29.2", lambda: nccl.Communicator.join(2, ids[0], 1)),
        ("ncclCommGetUniqueId", "2.29.2", communicator.unique_id),
        ("ncclSignal", "2.29.2", lambda: communicator.signal(1, stream=0)),
        ("ncclWaitSignal", "2.29.2", lambda: communicator.wait_signal(1, stream=0)),
        ("ncclCommSuspend", "2.29.7", communicator.suspend),
        ("ncclCommResume", "2.29.7", communicator.resume),
        ("ncclCommMemStats", "2.29.7", communicator.memory_statistics),
        ("The option traffic_class", "2.26", lambda: communicator.split(0, 0, traffic_class=1)),
        ("The option comm_name", "2.27", lambda: communicator.split(0, 0, comm_name="new")),
    ]
    for name, version, call in calls:
        if backend.rank == 1 and "ignal" in name:
            continue  # to itself
        with pytest.raises(BackendUnavailable, match=f"{name} came with NCCL {version}"):
            call()
    communicator.allreduce(x, x)  # nothing of it harmed the communicator
    communicator.close()


def test_what_is_newer_is_refused_with_the_version_that_has_it(old_library: str) -> None:
    run_ranks(2, ask_for_what_is_newer, old_library)


def make_room_for_buckets(backend: Any, path: str) -> None:
    load(path)
    gpu = emulated_gpu()
    group = fd.NcclBackend(0, 1, fd.get_unique_id(), timeout=20)
    with group:
        memory = GpuMemory(group, gpu.array(np.zeros(1)))
        # Half a gigabyte for each is more than the GPU has.
        for x in [memory.empty(4, "float32") for _ in range(20)]:
            fd.allreduce(x, group, out=x)
        group.synchronize()


def test_buckets_take_little_more_memory_than_they_need(old_library: str) -> None:
    run_ranks(1, make_room_for_buckets, old_library)


def move_fp8(backend: Any, path: str) -> None:
    load(path)
    communicator = connect(backend)
    dtype = interop.numpy_dtype(interop.dtype_code("float8_e5m2"))
    x = emulated_gpu().array(np.full(4, backend.rank + 1), dtype)
    with pytest.raises(UnsupportedOp, match="float8_e5m2"):
        communicator.allreduce(x, x)
    number = fd.dtype_to_nccl("float8_e5m2")
    with pytest.raises(UnsupportedOp, match="float8_e5m2"):
        communicator.reduce_scatter_raw(x.address, x.address, 2, number, 0, 0)
    communicator.broadcast(x, x, 1)  # as the bytes that they are
    assert values(x) == [2.0] * 4
    communicator.broadcast_raw(x.address, x.address, 4, number, 0, 0)
    communicator.close()


def test_fp8_is_moved_where_it_cannot_be_reduced(old_library: str) -> None:
    run_ranks(2, move_fp8, old_library)
