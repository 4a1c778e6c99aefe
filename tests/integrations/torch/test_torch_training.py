"""Training of torch modules on many ranks equals training in one process."""

from __future__ import annotations

import io
from typing import Any

import pytest
from ranks_as_threads import OnRanks

torch = pytest.importorskip("torch", reason="torch is not installed")

from gpu.gpu_ranks import connect  # noqa: E402 - needs torch
from gpu.real_gpu import need_torch_without_cuda  # noqa: E402
from integrations.torch.torch_cases import (  # noqa: E402
    CASES,
    STEPS,
    Case,
    assert_trained_alike,
    batch,
    build,
    loss_of_output,
    mean_square,
    mlp,
    optimizer_of,
    state_of,
    train_alone,
    train_gan,
    train_on_ranks,
)

import ferro_dist as fd  # noqa: E402
from ferro_dist.testing import emulated_gpu, run_ranks  # noqa: E402

DEADLINE_S = 300.0  # a busy machine takes long to import torch alone

torch.set_num_threads(1)


@pytest.mark.parametrize("overlap", [False, "always"])
@pytest.mark.parametrize("name", CASES)
def test_twenty_steps_equal_one_process(on_ranks: OnRanks, name: str, overlap: Any) -> None:
    def body(backend: Any) -> dict[str, Any]:
        return train_on_ranks(backend, CASES[name], overlap=overlap)

    assert_trained_alike(CASES[name], on_ranks(3, body), train_alone(CASES[name], 3))


def train_cases(backend: Any, overlap: Any, names: list[str]) -> bytes:
    torch.set_num_threads(1)
    states = {name: train_on_ranks(backend, CASES[name], overlap=overlap) for name in names}
    file = io.BytesIO()  # pickled between processes, a tensor would bring shared memory along
    torch.save(states, file)
    return file.getvalue()


def assert_cases_trained_alike(names: list[str], saved: list[bytes]) -> None:
    replicas = [torch.load(io.BytesIO(states)) for states in saved]
    for name in names:
        of_case = [of_rank[name] for of_rank in replicas]
        assert_trained_alike(CASES[name], of_case, train_alone(CASES[name], len(saved)))


# Four are more than most machines of tests have cores: there those that differ in what they do.
SOME = ["mlp in many buckets", "cnn with batch norm", "branches", "sparse", "frozen and unfrozen"]


@pytest.mark.parametrize(
    ("world_size", "overlap", "names"),
    [(2, "always", list(CASES)), (3, True, list(CASES)), (4, "always", SOME)],
    ids=["2 beside", "3", "4 beside"],
)
def test_twenty_steps_of_processes_equal_one_process(
    world_size: int, overlap: Any, names: list[str]
) -> None:
    saved = run_ranks(world_size, train_cases, overlap, names, timeout=DEADLINE_S)
    assert_cases_trained_alike(names, saved)


def train_cases_beside_a_gpu(rank: int, world_size: int, addr: str, names: list[str]) -> bytes:
    emulated_gpu()
    with connect("hybrid", rank, world_size, addr) as backend:
        return train_cases(backend, "always", names)


def test_twenty_steps_beside_emulated_gpus_equal_one_process() -> None:
    """Of modules on the CPU: torch makes no tensor over the memory of an emulated GPU."""
    need_torch_without_cuda()
    names = [*SOME, "lstm", "tied transformer"]
    saved = run_ranks(
        2, train_cases_beside_a_gpu, names, backend="none", emulate_gpu=True, timeout=DEADLINE_S
    )
    assert_cases_trained_alike(names, saved)


# One process on the whole batch, in one forward


def train_on_whole_batches(world_size: int) -> dict[str, Any]:
    module = build(CASES["mlp"])
    optimizer = optimizer_of(module)
    for step in range(STEPS):
        whole = torch.cat([batch(CASES["mlp"], share, step) for share in range(world_size)])
        mean_square(module(whole)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return state_of(module)


def test_shares_equal_the_whole_batch(on_ranks: OnRanks) -> None:
    replicas = on_ranks(3, lambda backend: train_on_ranks(backend, CASES["mlp"]))
    assert_trained_alike(CASES["mlp"], replicas, train_on_whole_batches(3))


# Options of the average


@pytest.mark.parametrize(
    ("options", "tolerance"),
    [
        # Rounded to 11 and 8 bits in each step.
        ({"compress": "fp16"}, 2e-3),
        ({"compress": "bf16"}, 2e-2),
    ],
    ids=["fp16", "bf16"],
)
def test_compressed_gradients_train_alike(
    on_ranks: OnRanks, options: dict[str, Any], tolerance: float
) -> None:
    case = Case(mlp, loss_of_output, tolerance=tolerance)
    replicas = on_ranks(2, lambda backend: train_on_ranks(backend, case, **options))
    assert_trained_alike(case, replicas, train_alone(case, 2))


def reduce_by_hand(bucket: Any, backend: Any, op: Any) -> None:
    gradients = bucket.gradients
    gradients.copy_(fd.allreduce(gradients, backend, op))


def test_a_reduction_of_the_users_own_trains_alike(on_ranks: OnRanks) -> None:
    case = CASES["branches in many buckets"]
    replicas = on_ranks(
        2, lambda backend: train_on_ranks(backend, case, compress=reduce_by_hand, overlap="always")
    )
    assert_trained_alike(case, replicas, train_alone(case, 2))


# The optimizer's step in backward


@pytest.mark.parametrize("name", ["cnn with batch norm", "frozen and unfrozen", "sparse"])
def test_steps_in_backward_are_those_of_the_loop(on_ranks: OnRanks, name: str) -> None:
    case = CASES[name]

    plain = on_ranks(2, lambda backend: train_on_ranks(backend, case))
    for stepped in on_ranks(2, train_in_backward, case):
        for key, tensor in plain[0].items():
            assert torch.equal(stepped[key], tensor), key


def train_in_backward(backend: Any, case: Case) -> dict[str, Any]:
    ddp = fd.DDP(build(case), backend)
    ddp.step_in_backward(case.optimizer(ddp))
    for step in range(STEPS):
        case.prepare(ddp.module, step)
        case.loss(ddp, batch(case, backend.rank, step), backend.rank, step).backward()
        assert all(p.grad is None for p in ddp.parameters())
    ddp.verify()
    return state_of(ddp.into_inner())


# Generative adversarial networks: two wrappers, and gradients through one for the other


@pytest.mark.parametrize("overlap", [False, "always"])
def test_two_wrappers_train_against_each_other(on_ranks: OnRanks, overlap: Any) -> None:
    def body(backend: Any) -> dict[str, Any]:
        return train_gan(lambda m: fd.DDP(m, backend, overlap=overlap), [backend.rank])

    alone = train_gan(lambda module: module, [0, 1])
    assert_trained_alike(CASES["mlp"], on_ranks(2, body), alone)
