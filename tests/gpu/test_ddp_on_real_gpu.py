"""DDP of torch modules on a real GPU, which two ranks share, beside torch's own."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from gpu.gpu_ranks import connect
from gpu.real_gpu import need, share_gpu

import ferro_dist as fd
from ferro_dist.testing import run_ranks

DEADLINE_S = 300.0
pytestmark = pytest.mark.timeout(900)
STEPS = 10
# Longer than a backward's launches take on any machine.
LONG_KERNEL_CYCLES = 4_000_000_000

GPU_BACKENDS = pytest.mark.parametrize("kind", ["nccl", "hybrid"])


def ranks(body: Callable[..., Any], *args: Any) -> list[Any]:
    return run_ranks(2, body, *args, backend="none", timeout=DEADLINE_S)


def make_cnn() -> Any:
    from torch import nn

    return nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 4)
    )


def gradients_of(module: Any) -> dict[str, Any]:
    return {name: p.grad for name, p in module.named_parameters()}


def train_beside_torch(
    rank: int, world_size: int, addr: str, kind: str, port_file: str, overlap: bool
) -> None:
    import torch
    import torch.distributed as dist

    share_gpu(rank)
    dist.init_process_group(
        "nccl", init_method=f"file://{port_file}", rank=rank, world_size=world_size
    )
    torch.manual_seed(7)
    module = make_cnn().cuda().to(memory_format=torch.channels_last)
    theirs = torch.nn.parallel.DistributedDataParallel(copy.deepcopy(module), device_ids=[0])
    with connect(kind, rank, world_size, addr) as backend:
        ours = fd.DDP(module, backend, bucket_mb=1e-3, overlap=overlap)
        optimizers = [torch.optim.SGD(m.parameters(), 0.1, 0.9) for m in (ours, theirs)]
        generator = torch.Generator().manual_seed(rank)
        for _ in range(STEPS):
            x = torch.randn(5, 3, 8, 8, generator=generator).cuda()
            for each, optimizer in zip((ours, theirs), optimizers, strict=True):
                optimizer.zero_grad()
                each(x).square().mean().backward()
                optimizer.step()
        ours.verify()
        assert ours.statistics().is_overlapped == overlap
        # Its buffers are those of rank 0 after each round, torch's before each forward.
        theirs.eval()(x)
        states = ours.state_dict(), theirs.module.state_dict()
        # The mean of two is exact in both; kernels of cuDNN may add in another order.
        torch.testing.assert_close(*states, rtol=1e-4, atol=1e-5)
    dist.destroy_process_group()


@GPU_BACKENDS
@pytest.mark.parametrize("overlap", [True, False], ids=["overlapped", "afterwards"])
def test_training_equals_that_of_torchs_ddp(kind: str, overlap: bool, tmp_path: Path) -> None:
    need("torch")
    ranks(train_beside_torch, kind, str(tmp_path / "meeting"), overlap)


def train_what_torch_gets_wrong(rank: int, world_size: int, addr: str, kind: str) -> None:
    import torch
    from integrations.torch.torch_cases import Branches, Repeated, reentrant

    share_gpu(rank)
    with connect(kind, rank, world_size, addr) as backend:
        one = torch.nn.Linear(1, 1).cuda()
        ddp = fd.DDP(one, backend, bucket_mb=1e-5)
        for scale in (1.0, 2.0):
            ddp.zero_grad()
            y = ddp(torch.full((1, 1), scale * (rank + 1), device="cuda"))
            y.sum().backward(retain_graph=True)
            (10 * y).sum().backward()
            assert one.weight.grad.item() == 16.5 * scale
            with ddp.no_sync():
                ddp(torch.ones(1, 1, device="cuda")).sum().backward()
            ddp(torch.ones(1, 1, device="cuda")).sum().backward()
            assert one.bias.grad.item() == 13

        x = torch.ones(2, 6, device="cuda", dtype=torch.float64)
        branches = fd.DDP(Branches().double().cuda(), backend, bucket_mb=1e-5)
        for which, used in (("left", {"trunk", "left"}), ("right", {"trunk", "left", "right"})):
            branches.zero_grad()
            branches(x, which if rank else "left").sum().backward()
            have = {n.split(".")[0] for n, g in gradients_of(branches).items() if g is not None}
            assert have == used

        layers = fd.DDP(Repeated(reentrant).double().cuda(), backend, bucket_mb=1e-5)
        plain = copy.deepcopy(layers.module)
        for _ in range(3):
            for each in (layers, plain):
                each.zero_grad()
                each(x).sum().backward()
            torch.testing.assert_close(gradients_of(layers.module), gradients_of(plain))


@GPU_BACKENDS
def test_gradients_are_right_where_torchs_are_not(kind: str) -> None:
    need("torch")
    ranks(train_what_torch_gets_wrong, kind)


def average_in_every_way(rank: int, world_size: int, addr: str, kind: str) -> None:
    import torch

    share_gpu(rank)
    with connect(kind, rank, world_size, addr) as backend:
        ways: list[tuple[dict[str, Any], float]] = [
            ({"average": "sum"}, 3.0),
            ({"average": "contributors"}, 1.5),
            ({"compress": "bf16"}, 1.5),
        ]
        for options, expected in ways:
            module = torch.nn.Linear(1, 1).cuda()
            ddp = fd.DDP(module, backend, **options)
            for _ in range(2):  # the second adds to what was averaged
                ddp(torch.full((1, 1), rank + 1.0, device="cuda")).sum().backward()
            assert module.weight.grad.item() == 2 * expected
        ddp = fd.DDP(torch.nn.Linear(1, 1).cuda(), backend)
        with ddp.no_sync():
            ddp(torch.full((1, 1), rank + 1.0, device="cuda")).sum().backward()
        ddp.sync_gradients(weight=1 + 2 * rank)
        assert ddp.module.weight.grad.item() == 1.75
        ddp.module.weight.requires_grad_(False)
        ddp.zero_grad()
        ddp(torch.full((1, 1), rank + 1.0, device="cuda")).sum().backward()
        assert (ddp.module.weight.grad, ddp.module.bias.grad.item()) == (None, 1)


@GPU_BACKENDS
def test_gradients_are_averaged_as_asked(kind: str) -> None:
    need("torch")
    ranks(average_in_every_way, kind)


def keep_averages(rank: int, world_size: int, addr: str, kind: str) -> None:
    import torch

    share_gpu(rank)
    with connect(kind, rank, world_size, addr) as backend:
        module = torch.nn.Linear(64, 64).cuda()
        with torch.inference_mode():  # in which no buckets may be made
            ddp = fd.DDP(module, backend)
        kept = []
        for step in range(4):
            ddp.zero_grad()
            ddp(torch.full((1, 64), rank + step + 1.0, device="cuda")).sum().backward()
            kept.append(module.weight.grad)
        for step, gradient in enumerate(kept):
            assert (gradient == step + 1.5).all()


@GPU_BACKENDS
def test_averages_that_are_kept_stay_as_they_are(kind: str) -> None:
    need("torch")
    ranks(keep_averages, kind)


def train_on_both_devices(rank: int, world_size: int, addr: str) -> None:
    import torch
    from torch import nn

    class OnBoth(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(4, 3)
            self.head = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)).cuda()

        def forward(self, tokens: Any) -> Any:
            return self.head(self.embedding(tokens).cuda())

    share_gpu(rank)
    with connect("hybrid", rank, world_size, addr) as backend:
        torch.manual_seed(rank)
        ddp = fd.DDP(OnBoth(), backend, bucket_mb=1e-5)
        for step in range(3):
            ddp.zero_grad()
            ddp(torch.tensor([rank, 1 + step, 3])).square().mean().backward()
        gradients = [g.cpu() for g in gradients_of(ddp.module).values()]
        for gradient in gradients:
            of_ranks = fd.all_gather(gradient.reshape(1, -1), backend)
            assert torch.equal(of_ranks[0], of_ranks[1])
        devices = {p.grad.device.type for p in ddp.parameters()}
        assert devices == {"cpu", "cuda"}
        ddp.cuda()
        ddp.zero_grad()
        ddp(torch.tensor([rank, 1, 3], device="cuda")).square().mean().backward()
        assert {p.grad.device.type for p in ddp.parameters()} == {"cuda"}
        ddp.verify()


def test_a_module_may_be_on_both_devices() -> None:
    need("torch")
    ranks(train_on_both_devices)


def return_before_the_gpu(rank: int, world_size: int, addr: str, kind: str) -> None:
    import torch

    share_gpu(rank)
    with connect(kind, rank, world_size, addr) as backend:
        ddp = fd.DDP(torch.nn.Linear(8, 8).cuda(), backend)
        x = torch.ones(2, 8, device="cuda")
        for _ in range(2):  # in the first round ranks agree on an order
            ddp(x).sum().backward()
        torch.cuda.synchronize()
        torch.cuda._sleep(LONG_KERNEL_CYCLES)
        slept = torch.cuda.Event()
        slept.record()
        ddp(x).sum().backward()
        assert not slept.query()
        torch.cuda.synchronize()


@GPU_BACKENDS
def test_backward_returns_before_the_gpu_is_done(kind: str) -> None:
    need("torch")
    ranks(return_before_the_gpu, kind)


def compute_on_two_streams(rank: int, world_size: int, addr: str, kind: str) -> None:
    import torch

    share_gpu(rank)
    with connect(kind, rank, world_size, addr) as backend:
        first, second = torch.nn.Linear(64, 64).cuda(), torch.nn.Linear(64, 64).cuda()
        ddp = fd.DDP(torch.nn.ModuleList([first, second]), backend)
        streams = [torch.cuda.Stream() for _ in range(2)]
        for step in range(20):
            ddp.zero_grad()
            x = torch.full((8, 64), rank + step + 1.0, device="cuda")
            outputs = []
            for layer, stream in zip((first, second), streams, strict=True):
                stream.wait_stream(torch.cuda.current_stream())
                with torch.cuda.stream(stream):
                    torch.cuda._sleep(1_000_000)
                    outputs.append(layer(x).sum())
            for stream in streams:
                torch.cuda.current_stream().wait_stream(stream)
            sum(outputs).backward()
            for layer in (first, second):
                assert (layer.weight.grad == 8 * (step + 1.5)).all()


@GPU_BACKENDS
def test_gradients_of_several_streams_are_waited_for(kind: str) -> None:
    need("torch")
    ranks(compute_on_two_streams, kind)


def raise_in_forward(rank: int, world_size: int, addr: str) -> None:
    import torch

    share_gpu(rank)
    with connect("hybrid", rank, world_size, addr) as backend:
        ddp = fd.DDP(torch.nn.Linear(2, 2).cuda(), backend)
        right = torch.ones(1, 2, device="cuda")
        ddp(right).sum().backward()

        def step() -> None:
            ddp(right).sum().backward()
            backend.synchronize_nccl()

        if rank == 1:
            with pytest.raises(RuntimeError, match="shapes"):
                ddp(torch.ones(1, 3, device="cuda"))
        else:
            with pytest.raises(fd.DistributedError) as caught:
                step()
            assert caught.value.peer == 1


def test_an_exception_in_one_forward_reaches_the_others() -> None:
    need("torch")
    ranks(raise_in_forward)


def average_arrays_of_cupy(rank: int, world_size: int, addr: str) -> None:
    import cupy

    share_gpu(rank)
    with connect("nccl", rank, world_size, addr) as backend:
        parameters = {"a": cupy.zeros((3, 2)), "b": cupy.zeros(4, "float32")}
        ddp = fd.DDP(parameters, backend)
        gradients = ddp.gradient_buffers()
        assert all(isinstance(gradient, cupy.ndarray) for gradient in gradients.values())
        for name in ("b", "a"):
            gradients[name][...] = rank
            ddp.ready(name)
        ddp.sync_gradients()
        assert all((gradient == 0.5).all() for gradient in gradients.values())
        transposed = {"a": cupy.full((2, 3), float(rank)).T}
        ddp.sync_gradients(transposed)
        assert (transposed["a"] == 0.5).all()
        assert "b" not in transposed


def test_arrays_of_cupy_are_averaged() -> None:
    need("cupy")
    ranks(average_arrays_of_cupy)


def average_arrays_of_jax(rank: int, world_size: int, addr: str) -> None:
    import jax

    share_gpu(rank)
    with connect("hybrid", rank, world_size, addr) as backend:
        for group in (backend, backend.tcp):  # the latter is given no array of a GPU
            ddp = fd.DDP({"w": jax.numpy.full(3, 7.0 + rank)}, group)
            assert ddp.module["w"].tolist() == [7] * 3
            for step in range(2):
                mean = ddp.sync_gradients({"w": jax.numpy.full(3, rank + step + 1.0)})["w"]
                assert mean.devices() == ddp.module["w"].devices()
                assert mean.tolist() == [step + 1.5] * 3


def test_gradients_of_jax_on_the_gpu_are_averaged_through_the_host() -> None:
    need("jax")
    ranks(average_arrays_of_jax)
