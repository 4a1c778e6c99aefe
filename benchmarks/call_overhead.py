"""What a call costs before anything moves: from Python to the engine and back.

A group of one has nothing to communicate, so `fd.allreduce(x, backend, out=x)` of one
element is arguments, checks, the border to C++ and back. Beside it: the same through
mpi4py on ``MPI.COMM_SELF``, torch.distributed on its fake backend, and the floor, a
Python function that takes the same arguments and does nothing.

    python benchmarks/call_overhead.py

A second table is of NCCL: from Python to ``ncclAllReduce``, on a libnccl and a libcudart that
return at once (`instant_cuda.py`). No GPU takes part, and the arrays only say that they are
on one. Beside it ctypes, alone and as pynccl uses it, and nccl4py where it is installed. CAI
stands for an object that has ``__cuda_array_interface__`` and nothing else.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import dataclasses
import functools
import os
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

# Before mpi4py reads it: locks between threads are not what is compared.
os.environ.setdefault("MPI4PY_RC_THREAD_LEVEL", "single")

import instant_cuda
import measure
import numpy as np

CALLS = 2_000


@dataclasses.dataclass
class Contestant:
    """One way to make the call."""

    name: str
    statement: str
    loop: measure.Loop
    times_ns: list[float] = dataclasses.field(default_factory=list)


Maker = Callable[[contextlib.ExitStack], list[Contestant]]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="fewer rounds")
    parser.add_argument(
        "--output",
        type=measure.new_file,
        help="file for the JSON lines; NCCL's go to nccl-overhead.jsonl beside it",
    )
    parser.add_argument("--nccl", metavar="FOLDER", help=argparse.SUPPRESS)
    options = parser.parse_args()
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    makers = nccl_makers(Path(options.nccl)) if options.nccl else HOST_MAKERS
    with contextlib.ExitStack() as stack:
        made, missing = measure.make_all(makers, stack)
        for reason in missing:
            measure.say(f"missing: {reason}")
        contestants = [contestant for some in made for contestant in some]
        file = stack.enter_context(measure.RecordFile(options.output, "call-overhead"))
        try:
            run_rounds(contestants, 20 if options.quick else 200)
        finally:
            if all(each.times_ns for each in contestants):
                print_table(contestants)
                file.write(*map(record, contestants))
    if not options.nccl:
        run_nccl(options.quick, file.path.with_name("nccl-overhead.jsonl"))


def run_nccl(is_quick: bool, path: Path) -> None:
    """Measure NCCL in a process of its own: the libraries are chosen when it starts."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            instant_cuda.build(Path(folder))
        except (OSError, subprocess.CalledProcessError) as error:
            detail = getattr(error, "stderr", "") or error
            measure.say(f"missing: libraries that return at once: {detail}")
            return
        command = [sys.executable, __file__, "--nccl", folder, "--output", str(path)]
        command += ["--quick"] if is_quick else []
        path_of_libraries = ":".join(filter(None, (folder, os.environ.get("LD_LIBRARY_PATH"))))
        environ = {**os.environ, "LD_LIBRARY_PATH": path_of_libraries}
        subprocess.run(command, env=environ, check=True)


def run_rounds(contestants: list[Contestant], rounds: int) -> None:
    """Let all take turns, so that a busy machine is busy for all."""
    with measure.GarbageCollectorOff():
        for turn in range(rounds + 1):
            for contestant in measure.rotated(contestants, turn):
                elapsed = measure.time_ns(contestant.loop, CALLS)
                if turn:  # the first warms up
                    contestant.times_ns.append(elapsed / CALLS)


def print_table(contestants: list[Contestant]) -> None:
    measure.say(f"\n{'ns a call':<38} {'p50':>8} {'p95':>8}  statement")
    for each in contestants:
        p50 = measure.p50(each.times_ns)
        p95 = measure.p95(each.times_ns)
        measure.say(f"{each.name:<38} {p50:>8.0f} {p95:>8.0f}  {each.statement}")


def record(contestant: Contestant) -> dict[str, Any]:
    return {
        "benchmark": "call_overhead",
        "name": contestant.name,
        "statement": contestant.statement,
        "p50_ns": round(measure.p50(contestant.times_ns), 1),
        "p95_ns": round(measure.p95(contestant.times_ns), 1),
        "samples": len(contestant.times_ns),
        "calls_per_sample": CALLS,
    }


# Contestants


def floor(stack: contextlib.ExitStack) -> list[Contestant]:
    def nothing(x: Any, backend: Any, *, out: Any = None) -> Any:
        return x

    names = {"nothing": nothing, "x": np.zeros(1, np.float32), "backend": None}
    return [contestant("Python function that does nothing", "nothing(x, backend, out=x)", names)]


def ferro_dist_numpy(stack: contextlib.ExitStack) -> list[Contestant]:
    names = ferro_dist_names(stack)
    names["x"] = np.zeros(1, np.float32)
    return [
        contestant("ferro_dist, NumPy", "allreduce(x, backend, out=x)", names),
        contestant("ferro_dist, NumPy, new result", "allreduce(x, backend)", names),
        contestant(
            "ferro_dist, NumPy, through a Work",
            "allreduce(x, backend, out=x, async_op=True).wait()",
            names,
        ),
        contestant("ferro_dist, barrier", "barrier(backend)", names),
    ]


def ferro_dist_torch(stack: contextlib.ExitStack) -> list[Contestant]:
    torch = import_torch()
    names = ferro_dist_names(stack)
    names["x"] = torch.zeros(1)
    return [
        contestant("ferro_dist, torch", "allreduce(x, backend, out=x)", names),
        contestant("ferro_dist, torch, new result", "allreduce(x, backend)", names),
    ]


def ferro_dist_names(stack: contextlib.ExitStack) -> dict[str, Any]:
    try:
        import ferro_dist as fd
    except ImportError as error:
        raise measure.MissingError(f"ferro_dist is not installed: {error}") from None
    backend = stack.enter_context(fd.HostBackend(0, 1, None))
    return {"allreduce": fd.allreduce, "barrier": fd.barrier, "backend": backend}


def mpi(stack: contextlib.ExitStack) -> list[Contestant]:
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        raise measure.MissingError(f"mpi4py or its MPI library: {error}".splitlines()[0]) from None
    x = np.zeros(1, np.float32)
    names = {"Allreduce": MPI.COMM_SELF.Allreduce, "IN_PLACE": MPI.IN_PLACE, "x": x}
    names["spelled_out"] = [x, 1, MPI.FLOAT]
    library = MPI.Get_library_version().split()[0].strip(",")
    return [
        contestant(f"mpi4py on {library}", "Allreduce(IN_PLACE, x)", names),
        contestant(f"mpi4py on {library}, type given", "Allreduce(IN_PLACE, spelled_out)", names),
    ]


def torch_fake(stack: contextlib.ExitStack) -> list[Contestant]:
    torch = import_torch()
    try:
        import torch.distributed as dist
        from torch.testing._internal.distributed.fake_pg import FakeStore
    except ImportError as error:
        raise measure.MissingError(f"torch.distributed's fake backend: {error}") from None
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    stack.callback(dist.destroy_process_group)
    names = {"all_reduce": dist.all_reduce, "x": torch.zeros(1)}
    return [contestant("torch.distributed, fake backend", "all_reduce(x)", names)]


HOST_MAKERS: tuple[Maker, ...] = (floor, ferro_dist_numpy, ferro_dist_torch, mpi, torch_fake)


# Contestants of NCCL. What they call returns at once: only the way there is measured.


def nccl_makers(folder: Path) -> tuple[Maker, ...]:
    tensor = instant_cuda.tensor_type(folder)
    arrays = {"x": tensor(), "out": tensor(), "tensors": [tensor() for _ in range(100)]}
    makers = (nccl_ferro_dist, nccl_ferro_dist_groups, nccl_ctypes, nccl4py)
    return tuple(functools.partial(make, arrays) for make in makers)


def instant_communicator(stack: contextlib.ExitStack) -> tuple[Any, Any]:
    try:
        from ferro_dist._native.cuda_libraries import load_nccl
    except ImportError as error:
        raise measure.MissingError(f"ferro_dist is not installed: {error}") from None
    nccl = load_nccl()
    communicator = nccl.Communicator.init_rank(1, nccl.get_unique_id(), 0, device=0)
    stack.callback(communicator.close)
    return nccl, communicator


def nccl_ferro_dist(arrays: dict[str, Any], stack: contextlib.ExitStack) -> list[Contestant]:
    _, communicator = instant_communicator(stack)
    from ferro_dist import interop
    from ferro_dist._native.nccl_group import NcclGroup
    from ferro_dist.reduce_op import ReduceOp

    group = NcclGroup(communicator, interop)
    names = {**arrays, "SUM": ReduceOp.SUM, "raw": communicator.allreduce_raw}
    names |= {"on_stream": communicator.allreduce, "allreduce": group.allreduce}
    return [
        contestant("NCCL: ferro_dist, raw pointers", "raw(4096, 8192, 16, 7, 0, 0)", names),
        contestant("NCCL: ferro_dist, one stream", "on_stream(x, out, SUM)", names),
        contestant(
            "NCCL: ferro_dist, order and lifetime", "allreduce(x, out, SUM, False, None, 0)", names
        ),
        contestant("NCCL: ferro_dist, in place", "allreduce(x, x, SUM, False, None, 0)", names),
        contestant(
            "NCCL: ferro_dist, CAI, in place",
            "allreduce(x, x, SUM, False, None, 0)",
            {**names, "x": InterfaceArray()},
        ),
        contestant(
            "NCCL: ferro_dist, through a Work",
            "allreduce(x, out, SUM, True, None, 0).wait()",
            names,
        ),
    ]


def nccl_ferro_dist_groups(arrays: dict[str, Any], stack: contextlib.ExitStack) -> list[Contestant]:
    nccl, communicator = instant_communicator(stack)

    def in_a_block() -> None:
        with nccl.Group():
            for x in arrays["tensors"]:
                communicator.allreduce(x, x)

    names = {**arrays, "coalesced": communicator.allreduce_coalesced, "in_a_block": in_a_block}
    return [
        contestant("NCCL: ferro_dist, 100 in a list", "coalesced(tensors, tensors)", names),
        contestant("NCCL: ferro_dist, 100 in a group", "in_a_block()", names),
    ]


def nccl_ctypes(arrays: dict[str, Any], stack: contextlib.ExitStack) -> list[Contestant]:
    library = ctypes.CDLL("libnccl.so.2")
    pointer = ctypes.c_void_p
    library.ncclAllReduce.argtypes = [
        pointer, pointer, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, pointer, pointer
    ]  # fmt: skip
    pynccl = pynccl_allreduce(library)
    names = {"raw": library.ncclAllReduce, "pynccl": pynccl, "x": PyncclTensor()}
    return [
        contestant("NCCL: ctypes, raw pointers", "raw(4096, 8192, 16, 7, 0, 4096, 0)", names),
        contestant("NCCL: ctypes as pynccl calls it", "pynccl(x, x, 0, x.stream)", names),
    ]


class PyncclTensor:
    """What pynccl asks of a tensor, without the time that torch takes to answer."""

    dtype = "float32"
    stream = 0

    def data_ptr(self) -> int:
        return 4096

    def numel(self) -> int:
        return 16


def pynccl_allreduce(library: ctypes.CDLL) -> Callable[..., None]:
    dtypes = {"float32": 7}

    def check(result: int) -> None:
        if result != 0:
            raise RuntimeError(result)

    def allreduce(x: PyncclTensor, out: PyncclTensor, op: int, stream: int) -> None:
        check(
            library.ncclAllReduce(
                ctypes.c_void_p(x.data_ptr()),
                ctypes.c_void_p(out.data_ptr()),
                x.numel(),
                dtypes[x.dtype],
                op,
                ctypes.c_void_p(4096),
                ctypes.c_void_p(stream),
            )
        )

    return allreduce


def nccl4py(arrays: dict[str, Any], stack: contextlib.ExitStack) -> list[Contestant]:
    try:
        import nccl.core as nccl
        from cuda.core import Device
    except ImportError as error:
        raise measure.MissingError(f"nccl4py: {error}: pip install nccl4py cuda-bindings") from None
    Device(0).set_current()
    communicator = nccl.Communicator.init(1, 0, nccl.get_unique_id())
    names = {"allreduce": communicator.allreduce, "SUM": nccl.SUM}
    tensors = [tensor_said_to_be_on_a_gpu() for _ in range(100)]

    def in_a_group() -> None:
        with nccl.group():
            for x in tensors:
                communicator.allreduce(x, x, nccl.SUM)

    return [
        contestant("NCCL: nccl4py, torch", "allreduce(x, x, SUM)", {**names, "x": tensors[0]}),
        contestant("NCCL: nccl4py, CAI", "allreduce(x, x, SUM)", {**names, "x": InterfaceArray()}),
        contestant(
            "NCCL: nccl4py, 100 torch in a group", "in_a_group()", {"in_a_group": in_a_group}
        ),
    ]


def tensor_said_to_be_on_a_gpu() -> Any:
    """Make a tensor of which nccl4py believes that it is on a GPU: it asks the tensor alone."""
    torch = import_torch()
    name, bases = "SaidToBeOnAGpu", (torch.Tensor,)
    attributes = {
        "device": torch.device("cuda", 0),
        "__torch_function__": torch._C._disabled_torch_function_impl,  # as fast as a plain one
    }
    return torch.zeros(16).as_subclass(type(name, bases, attributes))


class InterfaceArray:
    """An array that says where it is through ``__cuda_array_interface__``."""

    __cuda_array_interface__: ClassVar[dict[str, Any]] = {
        "version": 3, "shape": (16,), "typestr": "<f4", "data": (4096, False), "strides": None,
        "stream": None,
    }  # fmt: skip


def import_torch() -> Any:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            import torch
    except ImportError:
        raise measure.MissingError("torch is not installed: pip install torch") from None
    torch.set_num_threads(1)
    return torch


def contestant(name: str, statement: str, names: dict[str, Any]) -> Contestant:
    return Contestant(name, statement, measure.compile_loop(statement, names))


if __name__ == "__main__":
    main()
