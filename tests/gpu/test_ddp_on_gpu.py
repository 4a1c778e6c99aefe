"""DDP of arrays on GPUs, emulated ones: over NCCL alone, and beside the host's arrays.

Models on the GPU are of arrays: torch makes no tensor over the memory of an emulated one. Its
modules are trained on the CPU beside it here, and on real GPUs in `gpu.test_ddp_on_real_gpu`.
"""

from __future__ import annotations

import gc
import os
import threading
from typing import Any

import numpy as np
import pytest
from fault_injection import meet
from gpu.gpu_ranks import connect, ranks
from gpu.real_gpu import need_torch_without_cuda
from nccl_ranks import hold

import ferro_dist as fd
from ferro_dist.parallel.buckets import gpu_memory
from ferro_dist.parallel.buckets.bucket import BucketLayout, ParameterSpec
from ferro_dist.parallel.buckets.gpu_bucket import GpuBucket
from ferro_dist.parallel.buckets.gpu_memory import GpuMemory
from ferro_dist.parallel.ddp.reducer import NoGradients
from ferro_dist.testing import emulated_gpu, run_ranks

GPU_BACKENDS = pytest.mark.parametrize("kind", ["nccl", "hybrid"])
DELAY_US = 300  # a wait that is missing between streams then shows
TIMEOUT_S = 60.0
DEADLINE_S = 300.0  # a busy machine takes long to import torch alone

Array = Any


def on_gpus(world_size: int, body: Any, *args: Any) -> list[Any]:
    return ranks(world_size, body, *args, timeout=DEADLINE_S)


def zeros(where: str, *shape: int, dtype: str = "float64") -> Array:
    host = np.zeros(shape, dtype)
    return emulated_gpu().array(host) if where == "gpu" else host


def to_host(x: Array) -> np.ndarray[Any, Any]:
    values: np.ndarray[Any, Any] = x if isinstance(x, np.ndarray) else x.numpy()
    return values


class Linear:
    """y = x @ weight + bias; computes on the host, and keeps all it has where it is told."""

    def __init__(self, where: str, weight_on: str | None = None) -> None:
        self.weights = {
            "weight": zeros(weight_on or where, 3, 2),
            "bias": zeros(where, 2),
            "unused": zeros(where, 5),
        }
        self.gradients: dict[str, Array] = dict.fromkeys(self.weights)

    def parameters(self) -> dict[str, Array]:
        return self.weights

    def grads(self) -> dict[str, Array]:
        return self.gradients

    def backward(self, x: Any, y: Any, put: Any) -> None:
        weight, bias = to_host(self.weights["weight"]), to_host(self.weights["bias"])
        error = 2 * (x @ weight + bias - y) / y.size
        put("weight", x.T @ error)
        put("bias", error.sum(axis=0))

    def step(self) -> None:
        for name in ("weight", "bias"):
            # Written to in place: the averages are left as they are.
            self.weights[name][...] = to_host(self.weights[name]) - 0.1 * to_host(
                self.gradients[name]
            )


def data(step: int) -> tuple[Any, Any]:
    rng = np.random.default_rng(step)
    return rng.normal(size=(12, 3)), rng.normal(size=(12, 2))


def train_alone() -> dict[str, Any]:
    model = Linear("host")
    for step in range(20):
        model.backward(*data(step), model.gradients.__setitem__)
        model.step()
    return model.weights


def train_replica(
    rank: int, world_size: int, addr: str, kind: str, weight_on: str, overlap: Any
) -> Any:
    gpu = emulated_gpu(delay_us=DELAY_US)
    with connect(kind, rank, world_size, addr, timeout=TIMEOUT_S) as backend, gpu.stream():
        model = Linear("gpu", weight_on)
        ddp = fd.DDP(model, backend, bucket_mb=1e-5, overlap=overlap)
        own = slice(rank * 12 // world_size, (rank + 1) * 12 // world_size)

        def put(name: str, gradient: Any) -> None:
            if ddp.gradients[name] is None:
                ddp.gradients[name] = ddp.gradient_buffers()[name]
            ddp.gradients[name][...] = gradient
            ddp.ready(name)

        for step in range(20):
            x, y = data(step)
            model.backward(x[own], y[own], put)
            ddp.sync_gradients()
            model.step()
        ddp.verify()
        assert ddp.gradients["unused"] is None
        assert ddp.statistics().is_overlapped == bool(overlap)
        is_on_gpu = {name: type(array) is not np.ndarray for name, array in model.weights.items()}
        assert is_on_gpu == {"weight": weight_on == "gpu", "bias": True, "unused": True}
        return {name: to_host(array) for name, array in model.weights.items()}


@pytest.mark.parametrize(
    ("world_size", "kind", "weight_on", "overlap"),
    [
        (2, "nccl", "gpu", True),
        (4, "nccl", "gpu", False),
        (2, "hybrid", "gpu", True),
        (3, "hybrid", "host", True),
        (2, "hybrid", "host", False),
    ],
)
def test_twenty_steps_equal_one_process_on_the_whole_batch(
    world_size: int, kind: str, weight_on: str, overlap: bool
) -> None:
    alone = train_alone()
    for replica in on_gpus(world_size, train_replica, kind, weight_on, overlap):
        for name, expected in alone.items():
            # Parts of a batch are summed apart: a few last bits in each of 20 steps.
            np.testing.assert_allclose(replica[name], expected, rtol=1e-12, atol=1e-12)


def average_in_every_way(rank: int, world_size: int, addr: str, kind: str) -> None:
    gpu = emulated_gpu(delay_us=DELAY_US)

    def grads(value: float, *names: str) -> dict[str, Any]:
        return {name: gpu.array(np.full(4, float(value))) for name in names}

    def values(gradients: dict[str, Any]) -> dict[str, float]:
        return {name: to_host(gradient)[0] for name, gradient in gradients.items()}

    with connect(kind, rank, world_size, addr, timeout=TIMEOUT_S) as backend:
        parameters = grads(rank, "a", "b", "c")
        means = fd.DDP(parameters, backend, root=1)
        assert values(parameters) == {"a": 1, "b": 1, "c": 1}
        # b is given by one rank, c by none.
        some = means.sync_gradients(grads(3 + rank, "a", "b") if rank else grads(3, "a"))
        assert values(some) == {"a": 3.5, "b": 2}
        weighted = means.sync_gradients(grads(4 * rank, "a", "b", "c"), weight=1 + 2 * rank)
        assert values(weighted) == {"a": 3, "b": 3, "c": 3}
        with means.join():
            for _ in range(1 + rank):
                lonely = means.sync_gradients(grads(6, "a"))
        assert values(lonely) == {"a": 3 if rank else 6}

        contributors = fd.DDP(parameters, backend, average="contributors")
        some = contributors.sync_gradients(grads(3 + rank, "a", "b") if rank else grads(3, "a"))
        assert values(some) == {"a": 3.5, "b": 4}
        sums = fd.DDP(parameters, backend, average="sum", compress="bf16")
        assert values(sums.sync_gradients(grads(3, "a", "b", "c"))) == {"a": 6, "b": 6, "c": 6}
        with pytest.raises(fd.InvalidArray, match="PowerSGD computes with NumPy"):
            fd.DDP(parameters, backend, compress=fd.PowerSGD(1)).sync_gradients(grads(3, "a"))


@GPU_BACKENDS
def test_gradients_are_averaged_as_asked(kind: str) -> None:
    on_gpus(2, average_in_every_way, kind)


def mix_memories(rank: int, world_size: int, addr: str) -> Any:
    emulated_gpu(delay_us=DELAY_US)
    with connect("hybrid", rank, world_size, addr, timeout=TIMEOUT_S) as backend:
        parameters = {
            "a": zeros("gpu", 3),
            "b": zeros("host", 3),
            "c": zeros("gpu", 3),
            "d": zeros("host", 3, dtype="float32"),
        }
        ddp = fd.DDP(parameters, backend)
        for buffer in ddp.gradient_buffers().values():
            buffer[...] = rank
        ddp.sync_gradients()
        means = {name: to_host(g).tolist() for name, g in ddp.gradient_buffers().items()}
        return means, sorted(bucket.names for bucket in ddp.statistics().buckets)


def test_each_memory_has_buckets_of_its_own() -> None:
    for means, buckets in on_gpus(2, mix_memories):
        assert means == {name: [0.5] * 3 for name in "abcd"}
        assert buckets == [("b",), ("c", "a"), ("d",)]


def compute_on_several_streams(rank: int, world_size: int, addr: str, kind: str) -> None:
    gpu = emulated_gpu(delay_us=DELAY_US)
    streams = [gpu.stream() for _ in range(3)]
    with connect(kind, rank, world_size, addr, timeout=TIMEOUT_S) as backend:
        parameters = {name: zeros("gpu", 1 << 12) for name in "abc"}
        gpu.synchronize()
        go_on = hold(gpu)  # what is done to the buffers first must not be done on this stream
        ddp = fd.DDP(parameters, backend)
        for step in range(3):
            made: dict[str, Any] = {}
            for name, stream in zip("cba", streams, strict=True):
                with stream:
                    made[name] = gpu.array(np.full(1 << 12, rank + step + 1.0))
                    ddp.gradient_buffers()[name][...] = made[name]
                    ddp.ready(name)
            go_on()
            with streams[0]:
                ddp.sync_gradients()
                for gradient in ddp.gradient_buffers().values():
                    assert (gradient.numpy() == step + 1.5).all()
            gpu.synchronize()


@GPU_BACKENDS
def test_gradients_of_several_streams_are_waited_for(kind: str) -> None:
    on_gpus(2, compute_on_several_streams, kind)


def count_host_waits(rank: int, world_size: int, addr: str, kind: str) -> None:
    gpu = emulated_gpu()
    with connect(kind, rank, world_size, addr, timeout=TIMEOUT_S) as backend:
        parameters = {name: zeros("gpu", 8) for name in "ab"}
        ddp = fd.DDP(parameters, backend)
        gradients = {name: gpu.array(np.ones(8)) for name in "ab"}
        ddp.sync_gradients(gradients)
        gpu.synchronize()
        stream = gpu.stream()
        # A graph holds no copy from the host and no wait of it: were there one, this raised.
        with gpu.capture(stream) as graph:
            ddp.sync_gradients(gradients)
        for value in (2.0, 3.0):
            with stream:
                for gradient in gradients.values():
                    gradient[...] = value * rank
                graph.launch()
                for gradient in gradients.values():
                    assert gradient.numpy().tolist() == [value / 2] * 8
        graph.close()


@GPU_BACKENDS
def test_the_host_waits_for_nothing_where_all_gradients_are_given(kind: str) -> None:
    on_gpus(2, count_host_waits, kind)


def let_go_of_what_is_read(rank: int, world_size: int, addr: str) -> None:
    from ferro_dist._native.cuda_memory import copy_async

    gpu = emulated_gpu()
    with connect("nccl", rank, world_size, addr, timeout=TIMEOUT_S) as backend, gpu.stream():
        ddp = fd.DDP({"w": zeros("gpu", 1000)}, backend)
        gradient, copied = ddp.gradient_buffers()["w"], gpu.empty(1000, "float64")
        gradient[...] = 5
        go_on = hold(gpu)
        # As an optimizer does, before its gradients are dropped.
        copy_async(copied.address, gradient.address, gradient.nbytes, gpu.current_stream)
        del ddp, gradient
        gc.collect()
        assert gpu_memory._pending
        go_on()
        assert (copied.numpy() == 5).all()
        gpu_memory.free_unused_memory()
        assert not gpu_memory._pending


def test_buckets_may_be_let_go_of_while_the_gpu_reads_them() -> None:
    on_gpus(2, let_go_of_what_is_read)


class FoundAtOnce(list[Any]):
    """Memory that is to be freed, which another thread, on its own stream, finds at once."""

    def append(self, pending: Any) -> None:
        super().append(pending)
        other = threading.Thread(target=self._release)
        other.start()
        other.join()

    def _release(self) -> None:
        gpu_memory.free_unused_memory()
        emulated_gpu().synchronize(0)
        gpu_memory.free_unused_memory()


def let_go_beside_a_thread(rank: int, world_size: int, addr: str) -> None:
    gpu = emulated_gpu()
    with connect("nccl", rank, world_size, addr, timeout=TIMEOUT_S) as backend, gpu.stream():
        x = GpuMemory(backend, zeros("gpu", 1)).empty(1, "float64")
        x[...] = 5
        gpu_memory._pending = FoundAtOnce()
        go_on = hold(gpu)
        del x
        assert gpu_memory._pending
        go_on()
        gpu.synchronize(gpu.current_stream)
        gpu_memory.free_unused_memory()
        assert not gpu_memory._pending


def test_memory_waits_for_the_stream_of_the_thread_that_lets_go_of_it() -> None:
    on_gpus(1, let_go_beside_a_thread)


def mark_in_part(rank: int, world_size: int, addr: str) -> None:
    os.environ["FERRO_EMULATION_PAGEABLE_ACCESS"] = "1"
    gpu = emulated_gpu()
    with connect("nccl", rank, world_size, addr, timeout=TIMEOUT_S) as backend, gpu.stream():
        memory = GpuMemory(backend, zeros("gpu", 1))
        specs = [ParameterSpec(name, (2,), np.dtype("float64"), is_on_gpu=True) for name in "ab"]
        bucket = GpuBucket(0, [0, 1], BucketLayout(specs), memory)
        go_on = hold(gpu)
        bucket.mark([True, False])
        taken = [np.full(2, 7.0) for _ in range(100)]  # what was let go of, among others
        go_on()
        assert bucket._reduced_lanes().tolist() == [1.0, 0.0]
        del taken


def test_what_the_host_writes_is_kept_until_the_gpu_has_read_it() -> None:
    on_gpus(1, mark_in_part)


def be_refused(rank: int, world_size: int, addr: str) -> None:
    gpu = emulated_gpu(devices=2)
    on_gpu, on_host = {"w": zeros("gpu", 2)}, {"w": zeros("host", 2)}
    with connect("hybrid", rank, world_size, addr, timeout=TIMEOUT_S) as backend:
        with pytest.raises(fd.InvalidArray, match="'w' is in host memory, but NcclBackend"):
            fd.DDP(on_host, backend.nccl)
        with pytest.raises(fd.InvalidArray, match="'w' is on GPU 0, but HostBackend"):
            fd.DDP(on_gpu, backend.tcp)
        with gpu.device(1):
            on_another = {"w": zeros("gpu", 2)}
        with pytest.raises(fd.InvalidArray, match="'w' is on GPU 1, but this"):
            fd.DDP(on_another, backend)
        with pytest.raises(ValueError, match=r"is float64 \(2,\); .* float64 \(2,\) on the GPU"):
            fd.DDP(on_gpu, backend).sync_gradients({"w": np.zeros(2)})


def test_arrays_out_of_reach_are_refused() -> None:
    run_ranks(1, be_refused, backend="none")


def disagree(rank: int, world_size: int, addr: str, kind: str) -> str:
    where = "gpu" if kind == "nccl" or rank < 2 else "host"
    with connect(kind, rank, world_size, addr, timeout=TIMEOUT_S) as backend:
        with pytest.raises(fd.CollectiveMismatch) as caught:
            fd.DDP({"w": zeros(where, 2 + rank // 2)}, backend)
        fd.barrier(backend)
        return str(caught.value)


@pytest.mark.parametrize(("kind", "place"), [("nccl", " on the GPU"), ("hybrid", "")])
def test_the_first_parameter_that_differs_is_named(kind: str, place: str) -> None:
    for message in on_gpus(3, disagree, kind):
        assert "'w' float64 (2,) on the GPU on ranks 0, 1" in message
        assert f"'w' float64 (3,){place} on rank 2" in message


def synchronize_in_another_order(rank: int, world_size: int, addr: str, overlap: bool) -> None:
    emulated_gpu()
    with connect("hybrid", rank, world_size, addr, timeout=TIMEOUT_S) as backend:
        parameters = {"w": zeros("gpu", 2), "v": zeros("gpu", 2)}
        pair = [fd.DDP(parameters, backend, bucket_mb=1e-5, overlap=overlap) for _ in range(2)]
        for ddp in pair:
            ddp.gradient_buffers()["w"][...] = 7
            ddp.gradient_buffers()["v"][...] = rank
        ddp = pair[rank]
        ddp.ready("v")
        with pytest.raises(fd.CollectiveMismatch):
            ddp.sync_gradients()
        # Nothing had been sent, and the group goes on.
        for ddp in pair:
            ddp.gradient_buffers()["v"][...] = rank
            ddp.sync_gradients()
            assert ddp.gradient_buffers()["v"].numpy().tolist() == [0.5] * 2


@pytest.mark.parametrize("overlap", [True, False], ids=["overlapped", "afterwards"])
def test_ranks_that_disagree_are_told_before_the_gpu_works(overlap: bool) -> None:
    on_gpus(2, synchronize_in_another_order, overlap)


def ask_for_a_comparison(rank: int, world_size: int, addr: str, memory: str) -> None:
    emulated_gpu()
    with connect("hybrid", rank, world_size, addr, timeout=TIMEOUT_S) as backend:
        # The last bucket, with the control lanes, is that of the first parameter.
        parameters = {"w": zeros(memory.split()[0], 2), "v": zeros(memory.split()[-1], 2)}
        reducer = fd.DDP(parameters, backend, bucket_mb=1e-5)._reducer
        heard = []
        for wants_comparison in (False, rank == 1, False):
            reducer.begin(NoGradients(), wants_comparison=wants_comparison)
            reducer.finish()
            heard.append(reducer.must_compare)
        assert heard == [False, True, False]


@pytest.mark.parametrize("memory", ["gpu", "host", "gpu and host", "host and gpu"])
def test_a_rank_that_asks_for_a_comparison_is_heard_by_all(memory: str) -> None:
    on_gpus(2, ask_for_a_comparison, memory)


def fail_between_calls(rank: int, world_size: int, addr: str) -> None:
    gpu = emulated_gpu()
    with connect("hybrid", rank, world_size, addr, timeout=TIMEOUT_S) as backend:
        ddp = fd.DDP({"w": zeros("gpu", 2)}, backend)

        def average() -> None:
            ddp.sync_gradients({"w": gpu.array(np.ones(2))})  # waits on the GPU, if at all
            backend.synchronize_nccl()

        meet(backend, 1)
        if rank == 1:
            backend.interrupt(KeyError("no such batch"))
        else:
            with pytest.raises(fd.DistributedError) as caught:
                average()
            assert caught.value.peer == 1
        with backend.shrink() as rest:
            again = fd.DDP(ddp.into_inner(), rest)
            gradients = {"w": gpu.array(np.full(2, rank + 1.0))}
            assert again.sync_gradients(gradients)["w"].numpy().tolist() == [1.5] * 2


def test_a_rank_that_fails_is_named_and_the_others_go_on() -> None:
    on_gpus(2, fail_between_calls)


def train_torch_beside_gpus(rank: int, world_size: int, addr: str) -> None:
    emulated_gpu()
    import torch

    torch.set_num_threads(1)
    with connect("hybrid", rank, world_size, addr, timeout=TIMEOUT_S) as backend:
        with pytest.raises(fd.InvalidArray, match="in host memory, but NcclBackend"):
            fd.DDP(torch.nn.Linear(2, 1), backend.nccl)
        ddp = fd.DDP(torch.nn.Linear(2, 1), backend)
        for step in range(3):
            ddp.zero_grad()
            ddp(torch.full((1, 2), rank + float(step))).sum().backward()
            assert ddp.module.weight.grad.tolist() == [[0.5 + step] * 2]
        if rank == 1:
            with pytest.raises(RuntimeError, match="shapes"):
                ddp(torch.ones(1, 3))
        else:
            with pytest.raises(fd.DistributedError) as caught:
                ddp(torch.ones(1, 2)).sum().backward()
            assert caught.value.peer == 1


def test_torch_modules_on_the_cpu_train_over_hybrid_groups() -> None:
    need_torch_without_cuda()
    on_gpus(2, train_torch_beside_gpus)


def wrap_jax_over_nccl(rank: int, world_size: int, addr: str) -> None:
    emulated_gpu()
    jax = pytest.importorskip("jax", reason="jax is not installed")
    parameters = {"w": jax.numpy.zeros(2)}
    refused = pytest.raises(fd.UnsupportedOp, match="averages in host memory, but NcclBackend")
    with connect("nccl", rank, world_size, addr, timeout=TIMEOUT_S) as backend, refused:
        fd.DDP(parameters, backend)


def test_arrays_of_jax_are_not_averaged_by_nccl() -> None:
    pytest.importorskip("jax", reason="jax is not installed")
    on_gpus(1, wrap_jax_over_nccl)
