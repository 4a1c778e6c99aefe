"""On a real GPU, which up to four ranks share: the contract, and torch's own NCCL beside it."""

from __future__ import annotations

import fnmatch
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from backends.contract.suite import CASES, names_for
from gpu.exclusions import EXCLUDED_ON_REAL_GPUS, names_on_gpu
from gpu.gpu_ranks import connect, start_on_real_gpus
from gpu.real_gpu import need, share_gpu
from visible_gpus import with_gpus

import ferro_dist as fd
from ferro_dist.testing import run_ranks

SIZES = (1, 2, 3, 4)
DEADLINE_S = 300.0
# Ranks that share a GPU take turns on it, some milliseconds each: a case has many calls.
pytestmark = pytest.mark.timeout(1800)
# A HybridBackend moves a GPU's arrays by the NcclBackend that it holds: one size tells of both.
GROUPS = [*(("nccl", world_size) for world_size in SIZES), ("hybrid", 2)]


def ranks(world_size: int, body: Any, *args: Any) -> list[Any]:
    return run_ranks(world_size, body, *args, backend="none", timeout=DEADLINE_S)


@pytest.mark.parametrize(("backend", "world_size"), GROUPS)
def test_groups_keep_the_contract(backend: str, world_size: int) -> None:
    need("torch")
    group = start_on_real_gpus(backend, world_size)
    try:
        for name in names_on_gpu(backend, names_for(world_size)):
            excluded = any(fnmatch.fnmatch(name, pattern) for pattern in EXCLUDED_ON_REAL_GPUS)
            if not excluded and not CASES[name].library:
                group.run(name)
    finally:
        group.close()


def reduce_like_torch(rank: int, world_size: int, addr: str, port_file: str) -> None:
    import torch
    import torch.distributed as dist

    share_gpu(rank)
    dist.init_process_group(
        "nccl", init_method=f"file://{port_file}", rank=rank, world_size=world_size
    )
    with connect("nccl", rank, world_size, addr) as group:
        for dtype in (torch.float32, torch.float64, torch.int32, torch.int64):
            x = (torch.arange(10_007, device="cuda") % 97 + rank).to(dtype)
            theirs = x.clone()
            dist.all_reduce(theirs)
            assert torch.equal(fd.allreduce(x, group), theirs)
            gathered = torch.empty(10_007 * world_size, dtype=dtype, device="cuda")
            dist.all_gather_into_tensor(gathered, x)
            assert torch.equal(fd.all_gather(x, group), gathered)
            theirs = x.clone()
            dist.broadcast(theirs, world_size - 1)
            assert torch.equal(fd.broadcast(x, group, world_size - 1), theirs)
        for dtype, rtol in ((torch.float16, 2e-3), (torch.bfloat16, 2e-2)):
            x = torch.rand(10_007, device="cuda").to(dtype)
            theirs = x.clone()
            dist.all_reduce(theirs)
            torch.testing.assert_close(fd.allreduce(x, group), theirs, rtol=rtol, atol=0)
    dist.destroy_process_group()


@pytest.mark.parametrize("world_size", SIZES)
def test_results_are_those_of_torchs_nccl(world_size: int, tmp_path: Path) -> None:
    need("torch")
    ranks(world_size, reduce_like_torch, str(tmp_path / "meeting"))


def order_torch_streams(rank: int, world_size: int, addr: str) -> None:
    import torch

    share_gpu(rank)
    with connect("nccl", rank, world_size, addr) as group:
        fd.allreduce(torch.ones(1, device="cuda"), group)
        with torch.cuda.stream(torch.cuda.Stream()):
            for number in range(50):
                x = torch.zeros(1 << 20, device="cuda")
                torch.cuda._sleep(1_000_000)
                x += number
                y = fd.allreduce(x, group)
                del x
                assert (y + 1 == number * world_size + 1).all()


@pytest.mark.parametrize("world_size", [1, 2])
def test_calls_are_in_order_with_torchs_streams(world_size: int) -> None:
    need("torch")
    ranks(world_size, order_torch_streams)


def capture_in_a_graph(rank: int, world_size: int, addr: str) -> None:
    import torch

    share_gpu(rank)
    with connect("nccl", rank, world_size, addr) as group:
        x = torch.ones(1000, device="cuda")
        fd.allreduce(x, group, out=x)  # connects, which no graph can hold
        group.synchronize()
        x.fill_(1)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            fd.allreduce(x, group, out=x)
        for _ in range(3):
            graph.replay()
        assert (x == world_size**3).all()
        del graph  # before the communicator that it captured
        torch.cuda.synchronize()


@pytest.mark.parametrize("world_size", [1, 2])
def test_calls_are_captured_in_graphs(world_size: int) -> None:
    need("torch")
    ranks(world_size, capture_in_a_graph)


def reduce_arrays_of(rank: int, world_size: int, addr: str, library: str) -> None:
    share_gpu(rank)
    if library == "cupy":
        import cupy as numpy_like
    else:
        import jax.numpy as numpy_like
    with connect("nccl", rank, world_size, addr) as group:
        x = numpy_like.arange(1000, dtype="float32") + rank
        y = fd.allreduce(x, group)
        assert type(y) is type(x)
        wanted = world_size * np.arange(1000) + sum(range(world_size))
        assert (numpy_like.asarray(wanted) == y).all()


@pytest.mark.parametrize("library", ["cupy", "jax"])
@pytest.mark.parametrize("world_size", [1, 2])
def test_arrays_of_other_libraries_are_reduced(library: str, world_size: int) -> None:
    need(library)
    ranks(world_size, reduce_arrays_of, library)


PROGRAM = """
import torch
import ferro_dist as fd
with fd.NcclBackend(0, 1, fd.get_unique_id()) as group:
    x = torch.ones(1000, device="cuda")
    for _ in range(3):
        x = fd.allreduce(x, group)
        fd.all_gather(x, group)
    fd.barrier(group)
    assert (x == 1).all()
"""


def test_compute_sanitizer_finds_nothing() -> None:
    need("torch")
    path = os.pathsep.join([os.environ["PATH"], "/usr/local/cuda/bin"])
    sanitizer = shutil.which("compute-sanitizer", path=path)
    if sanitizer is None:
        pytest.skip("compute-sanitizer is not installed")
    # Of memory alone: torch and NCCL find out by calls that fail what the machine can do, and
    # whoever asks for an event that is not ready yet is told so by an error.
    options = ("--tool=memcheck", "--report-api-errors=no", "--error-exitcode=9")
    done = subprocess.run(
        [sanitizer, *options, sys.executable, "-c", PROGRAM],
        env=with_gpus(os.environ),
        capture_output=True,
        text=True,
        timeout=3 * DEADLINE_S,  # it instruments all of NCCL's kernels
        check=False,
    )
    said = done.stdout + done.stderr
    if "Device not supported" in said:
        pytest.skip("compute-sanitizer does not support this GPU, or what virtualizes it")
    assert done.returncode == 0, said
