"""Pipelines whose activations stay in the memory of (emulated) GPUs."""

from __future__ import annotations

import os
import signal
from typing import Any

import numpy as np
import pytest
from gpu.gpu_ranks import connect, ranks
from numpy.testing import assert_allclose

import ferro_dist as fd
from ferro_dist.parallel.schedules import placement_for
from ferro_dist.testing import RankDeath, emulated_gpu, run_ranks

WIDTH = 4
DELAY_US = 300
CASES = [("gpipe", 2, 1), ("1f1b", 3, 1), ("zb_h1", 3, 1), ("interleaved_1f1b", 2, 2)]
LARGE = 200_000


class GpuLayer:
    """y = tanh(x @ weight + shift), in a GPU's memory, but for the shift.

    Emulated arrays compute nothing, so NumPy does. The last one returns a host array, since a
    loss is computed of it.
    """

    def __init__(self, stage: int, is_last: bool) -> None:
        self.gpu = emulated_gpu()
        rng = np.random.default_rng(stage)
        self.weight = self.gpu.array(rng.normal(size=(WIDTH, WIDTH)))
        self.gradient = self.gpu.array(np.zeros((WIDTH, WIDTH)))
        self.shift, self.of_shift = np.zeros((2, WIDTH))
        self.is_last = is_last
        self.kinds: set[str] = set()

    def parameters(self) -> dict[str, Any]:
        return {"weight": self.weight, "shift": self.shift}

    def grads(self) -> dict[str, Any]:
        return {"weight": self.gradient, "shift": self.of_shift}

    def forward(self, x: Any) -> Any:
        self.kinds.add(type(x["h"]).__name__)
        h = on_host(x["h"])
        y = np.tanh(h @ self.weight.numpy() + self.shift)
        out = y if self.is_last else self.gpu.array(y)
        return {"h": out, "ids": x["ids"], "none": None}, (h, y)

    def backward(self, saved: Any, gradient: Any) -> Any:
        self.backward_weight(saved, gradient)
        return self.backward_input(saved, gradient)

    def backward_input(self, saved: Any, gradient: Any) -> Any:
        before = on_host(gradient["h"]) * (1 - saved[1] ** 2)
        return {"h": self.gpu.array(before @ self.weight.numpy().T)}

    def backward_weight(self, saved: Any, gradient: Any) -> None:
        before = on_host(gradient["h"]) * (1 - saved[1] ** 2)
        self.gradient += saved[0].T @ before
        self.of_shift += before.sum(axis=0)


def on_host(x: Any) -> Any:
    return x if isinstance(x, np.ndarray) else x.numpy()


def square(output: Any, target: Any) -> Any:
    error = output["h"] - target
    assert (output["ids"] >= 0).all()
    return float((error**2).mean()), {"h": 2 * error / error.size}


def batch(rows: int) -> tuple[Any, Any]:
    rng = np.random.default_rng(3)
    x, y = rng.normal(size=(2, rows, WIDTH))
    return {"h": x, "ids": np.arange(rows), "none": None}, y


def train(group: Any, schedule: str, per_rank: int, rows: int, dp: Any = None) -> Any:
    gpu = emulated_gpu(delay_us=DELAY_US)
    placement = placement_for(schedule, group.world_size, per_rank)
    numbers = [stage for stage, rank in enumerate(placement) if rank == group.rank]
    x, y = batch(rows)
    if dp is not None:
        part = slice(dp.rank, None, dp.world_size)
        x, y = {"h": x["h"][part], "ids": x["ids"][part], "none": None}, y[part]
    with gpu.stream():
        layers = [GpuLayer(stage, stage == len(placement) - 1) for stage in numbers]
        x["h"] = gpu.array(x["h"])
        module = layers if per_rank > 1 else layers[0]
        with fd.Pipeline(module, group, 3, schedule, dp=dp) as pipe:
            losses = [pipe.step(x, y, square) for _ in range(2)]
        of_input = None if pipe.input_grad is None else pipe.input_grad["h"]
        gradients = {
            s: (r.gradient.numpy(), r.of_shift) for s, r in zip(numbers, layers, strict=True)
        }
        assert all(layer.kinds == {"EmulatedArray"} for layer in layers)
        assert of_input is None or type(of_input).__name__ == "EmulatedArray"
        return losses, gradients


def train_on_hybrid(rank: int, world_size: int, addr: str, schedule: str, per_rank: int) -> Any:
    with connect("hybrid", rank, world_size, addr) as group:
        return train(group, schedule, per_rank, 7)


def run_whole(num_stages: int, rows: int) -> tuple[float, list[Any]]:
    x, y = batch(rows)
    weights = [np.random.default_rng(s).normal(size=(WIDTH, WIDTH)) for s in range(num_stages)]
    inputs = [x["h"]]
    for weight in weights:
        inputs.append(np.tanh(inputs[-1] @ weight))
    error = inputs.pop() - y
    gradient, output, gradients = 2 * error / error.size, error + y, []
    for weight, h in zip(reversed(weights), reversed(inputs), strict=True):
        before = gradient * (1 - output**2)
        gradients.append((h.T @ before, before.sum(axis=0)))
        gradient, output = before @ weight.T, h
    return float((error**2).mean()), gradients[::-1]


def assert_like_whole(outcomes: list[Any], num_stages: int, rows: int) -> None:
    loss, gradients = run_whole(num_stages, rows)
    for losses, own in outcomes:
        assert losses == pytest.approx([loss] * 2, rel=1e-12)
        for stage, of_stage in own.items():
            for gradient, expected in zip(of_stage, gradients[stage], strict=True):
                assert_allclose(gradient, 2 * expected, rtol=1e-9)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case[0])
def test_step_equals_the_unpipelined_layers(case: tuple[str, int, int]) -> None:
    schedule, num_ranks, per_rank = case
    outcomes = ranks(num_ranks, train_on_hybrid, schedule, per_rank)
    assert_like_whole(outcomes, num_ranks * per_rank, 7)


def train_on_grid(rank: int, world_size: int, addr: str) -> Any:
    with (
        connect("hybrid", rank, world_size, addr) as group,
        fd.RankGrid(group, pipeline=2) as grid,
    ):
        return train(grid.pipeline, "zb_h1", 1, 8, grid.data)


def test_replicas_average_gradients_on_the_gpu() -> None:
    assert_like_whole(ranks(4, train_on_grid), 2, 8)


def tie_on_hybrid(rank: int, world_size: int, addr: str) -> Any:
    gpu = emulated_gpu(delay_us=DELAY_US)
    x, y = batch(6)
    x["h"] = gpu.array(x["h"])
    layer = GpuLayer(rank, rank == world_size - 1)
    with (
        connect("hybrid", rank, world_size, addr) as group,
        fd.Pipeline(layer, group, 3, "1f1b", checkpoint=True, tied={"w": "weight"}) as pipe,
    ):
        pipe.step(x, y, square)
        return layer.weight.numpy(), layer.gradient.numpy()


def test_weights_are_tied_on_the_gpu() -> None:
    (weight, gradient), other = ranks(2, tie_on_hybrid)
    assert_allclose(weight, other[0], rtol=0)
    assert_allclose(gradient, other[1], rtol=0)
    assert gradient.any()


class Doubling:
    """Its activations are large, in both directions."""

    def __init__(self, is_last: bool) -> None:
        self.gpu = emulated_gpu()
        self.scale = self.gpu.array(np.ones(1))
        self.is_last = is_last

    def parameters(self) -> dict[str, Any]:
        return {"scale": self.scale}

    def forward(self, x: Any) -> Any:
        y = 2 * on_host(x)
        return (y if self.is_last else self.gpu.array(y)), None

    def backward(self, saved: Any, gradient: Any) -> Any:
        return self.gpu.array(2 * on_host(gradient))


def pass_large_arrays(rank: int, world_size: int, addr: str) -> Any:
    gpu = emulated_gpu(delay_us=DELAY_US)
    last = 2 * world_size - 1
    with connect("hybrid", rank, world_size, addr) as group:
        x = gpu.array(np.ones((6, LARGE)))
        stages = [Doubling(number == last) for number in (rank, rank + world_size)]
        with fd.Pipeline(stages, group, 6, "interleaved_1f1b") as pipe:
            loss = pipe.step(x, loss_fn=lambda y: (y.mean(), np.ones_like(y)))
        gradient = pipe.input_grad
        return loss, None if gradient is None else gradient.numpy().min()


def test_large_messages_that_pass_each_other_do_not_wait_for_each_other() -> None:
    (loss, gradient), (of_second, _) = ranks(2, pass_large_arrays)
    assert loss == of_second == pytest.approx(16)
    assert gradient == pytest.approx(16 / 6)


def train_beside_other_gpus(rank: int, world_size: int, addr: str) -> list[bool]:
    gpu = emulated_gpu(devices=world_size + 1)
    own = rank + 1
    with connect("hybrid", rank, world_size, addr, device=own) as group:
        train(group, "1f1b", 1, 6)
    return [gpu.has_context(number) for number in range(world_size + 1)]


def test_threads_that_receive_put_nothing_on_gpus_of_other_ranks() -> None:
    assert run_ranks(2, train_beside_other_gpus, backend="none") == [
        [False, True, False],
        [False, False, True],
    ]


class Homecoming(GpuLayer):
    """Works on the GPU; what it gives others is in host memory."""

    def __init__(self, stage: int) -> None:
        super().__init__(stage, is_last=True)

    def backward_input(self, saved: Any, gradient: Any) -> Any:
        return {"h": super().backward_input(saved, gradient)["h"].numpy()}


def pass_host_arrays_beside_other_gpus(rank: int, world_size: int, addr: str) -> list[bool]:
    gpu = emulated_gpu(devices=2)
    x, y = batch(6)
    gpu.check(gpu.cudart.cudaSetDevice(1))
    with fd.HostBackend(rank, world_size, addr) as group:
        fd.Pipeline(Homecoming(rank), group, 3, "1f1b").step(x, y, square)
    return [gpu.has_context(number) for number in range(2)]


def test_threads_that_receive_host_arrays_use_no_gpu() -> None:
    outcomes = run_ranks(2, pass_host_arrays_beside_other_gpus, backend="none")
    assert outcomes == [[False, True]] * 2


# Failures


def refuse_gpus_alone(rank: int, world_size: int, addr: str) -> str:
    with (
        connect("nccl", rank, world_size, addr) as group,
        pytest.raises(fd.UnsupportedOp, match=r"NcclBackend .* Use HybridBackend") as caught,
    ):
        fd.Pipeline(GpuLayer(0, False), group, 2)
    return str(caught.value)


def test_group_of_gpus_alone_is_refused_on_every_rank() -> None:
    assert len(set(ranks(2, refuse_gpus_alone))) == 1


class Faulty(GpuLayer):
    at = 2

    def forward(self, x: Any) -> Any:
        self.at -= 1
        if self.at < 0:
            raise ZeroDivisionError("the stage's own words")
        return super().forward(x)


def fail_and_go_on(rank: int, world_size: int, addr: str) -> None:
    emulated_gpu(delay_us=DELAY_US)
    x, y = batch(6)
    with connect("hybrid", rank, world_size, addr) as group:
        x["h"] = emulated_gpu().array(x["h"])
        stage = (Faulty if rank == 1 else GpuLayer)(rank, rank == world_size - 1)
        with fd.Pipeline(stage, group, 6, "1f1b") as pipe:
            with pytest.raises(fd.StageFailed, match="the stage's own words"):
                pipe.step(x, y, square)
            if rank == 1:
                stage.at = 100  # type: ignore[attr-defined]
            assert pipe.step(x, y, square) > 0


def test_exception_of_a_stage_leaves_the_gpus_usable() -> None:
    ranks(3, fail_and_go_on)


def leave_in_turn(group: Any) -> None:
    x, y = batch(4)
    x["h"] = emulated_gpu().array(x["h"])
    with fd.Pipeline(GpuLayer(group.rank, group.rank == 1), group, 2, "1f1b") as pipe:
        pipe.step(x, y, square)
        if group.rank == 1:
            # Before the end of a channel would have waited in vain for its other side.
            fd.barrier(group, timeout=group.timeout / 2)
        raise KeyError("the user's own")


def leave_by_an_exception(rank: int, world_size: int, addr: str) -> None:
    emulated_gpu()
    with connect("hybrid", rank, world_size, addr) as group:
        with pytest.raises(KeyError):
            leave_in_turn(group)
        if rank == 0:
            fd.barrier(group)


def test_exception_does_not_wait_for_the_end_of_channels() -> None:
    ranks(2, leave_by_an_exception)


class Homeless:
    """Nothing tells where it works."""

    def forward(self, x: Any) -> Any:
        return x, None

    def backward(self, saved: Any, gradient: Any) -> Any:
        return gradient


def send_to_a_homeless_stage(rank: int, world_size: int, addr: str) -> str:
    gpu = emulated_gpu()
    with connect("hybrid", rank, world_size, addr) as group:
        pipe = fd.Pipeline(Homeless(), group, 2, "1f1b")
        with pytest.raises((fd.DistributedError, TypeError)) as caught:
            pipe.step(gpu.array(np.ones((2, 3))), loss_fn=lambda y: (0.0, y))
        return str(caught.value)


def test_stage_that_cannot_make_room_says_so() -> None:
    messages = ranks(2, send_to_a_homeless_stage)
    assert "has no parameters() there" in messages[1]


def receive_on_the_stream_of_a_thread(rank: int, world_size: int, addr: str) -> str:
    gpu = emulated_gpu()
    from ferro_dist._native.emulated_array import set_current_stream

    set_current_stream(2)  # cudaStreamPerThread, as CuPy's may be
    with connect("hybrid", rank, world_size, addr) as group:
        pipe = fd.Pipeline(GpuLayer(rank, rank == 1), group, 2, "1f1b")
        x, y = batch(4)
        x["h"] = gpu.array(x["h"])
        with pytest.raises((fd.DistributedError, TypeError)) as caught:
            pipe.step(x, y, square)
        return str(caught.value)


def test_stage_on_the_default_stream_of_a_thread_receives_nothing_on_the_gpu() -> None:
    messages = ranks(2, receive_on_the_stream_of_a_thread)
    assert "default stream of a thread" in messages[1]


class Dying(GpuLayer):
    def forward(self, x: Any) -> Any:
        os.kill(os.getpid(), signal.SIGKILL)


def lose_a_rank(rank: int, world_size: int, addr: str) -> Any:
    x, y = batch(6)
    with connect("hybrid", rank, world_size, addr) as group:
        x["h"] = emulated_gpu().array(x["h"])
        stage = (Dying if rank == 1 else GpuLayer)(rank, rank == world_size - 1)
        try:
            fd.Pipeline(stage, group, 3, "1f1b").step(x, y, square)
        except fd.DistributedError as error:
            return type(error).__name__, error.peer
    return "no error"


def test_dead_stage_is_a_lost_peer() -> None:
    outcomes = ranks(3, lose_a_rank, may_die=[1])
    assert outcomes == [("PeerLostError", 1), RankDeath(-signal.SIGKILL), ("PeerLostError", 1)]
