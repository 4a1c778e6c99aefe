"""BatchNorm over all ranks gives what one process gives on the whole batch."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
from ranks_as_threads import OnRanks

import ferro_dist as fd
from ferro_dist.testing import run_ranks

torch = pytest.importorskip("torch", reason="torch is not installed")

from torch import nn  # noqa: E402 - needs torch
from torch.nn.utils import parametrize, prune  # noqa: E402

DEADLINE_S = 300.0  # a busy machine takes long to import torch alone

COUNTS = [(4, 4), (5, 2), (3, 0, 6), (1, 1)]
"""Rows on each rank: even, uneven, none at all, too few for a BatchNorm of its own."""


def batch(rows: int, *shape: int, seed: int = 3) -> Any:
    generator = torch.Generator().manual_seed(seed)
    return 3 + 2 * torch.randn(rows, *shape, generator=generator, dtype=torch.float64)


def own_rows(counts: tuple[int, ...], rank: int) -> slice:
    first = sum(counts[:rank])
    return slice(first, first + counts[rank])


def layer(num_features: int = 3, **options: Any) -> Any:
    norm = torch.nn.BatchNorm2d(num_features, dtype=torch.float64, **options)
    if norm.affine:
        with torch.no_grad():
            norm.weight.copy_(torch.linspace(0.5, 2, num_features))
            norm.bias.copy_(torch.linspace(-1, 1, num_features))
    return norm


def trained(norm: Any, x: Any, target: Any) -> dict[str, Any]:
    """Three forwards and backwards; the loss is a sum, so that those of ranks add up."""
    for _ in range(3):
        x = x.detach().requires_grad_()
        y = norm(x)
        (y * target).sin().sum().backward()
    return {
        "y": y.detach(),
        "x": x.grad,
        "weight": norm.weight.grad,
        "bias": norm.bias.grad,
        **{f"buffer {name}": buffer for name, buffer in norm.named_buffers()},
    }


def train_on_own_rows(backend: Any, counts: tuple[int, ...]) -> dict[str, Any]:
    rows = own_rows(counts, backend.rank)
    norm = fd.convert_sync_batchnorm(layer(), backend)
    x, target = batch(sum(counts), 3, 2, 2), batch(sum(counts), 3, 2, 2, seed=4)
    return trained(norm, x[rows], target[rows])


def assert_equals_one_process(outcomes: list[Any], counts: tuple[int, ...]) -> None:
    total = sum(counts)
    whole = trained(layer(), batch(total, 3, 2, 2), batch(total, 3, 2, 2, seed=4))
    # Sums of other order: some units in the last place of float64.
    near = {"rtol": 1e-10, "atol": 1e-12}
    for name in ("y", "x"):
        joined = torch.cat([outcome[name] for outcome in outcomes])
        torch.testing.assert_close(joined, whole[name], **near)
    for name in ("weight", "bias"):
        torch.testing.assert_close(sum(outcome[name] for outcome in outcomes), whole[name], **near)
    for outcome in outcomes:
        for name in whole.keys() - {"y", "x", "weight", "bias"}:
            torch.testing.assert_close(outcome[name], whole[name], **near)


@pytest.mark.parametrize("counts", COUNTS, ids=str)
def test_ranks_together_equal_one_process(on_ranks: OnRanks, counts: tuple[int, ...]) -> None:
    assert_equals_one_process(on_ranks(len(counts), train_on_own_rows, counts), counts)


def train_in_process(backend: Any, counts: tuple[int, ...]) -> Any:
    return {k: v.tolist() for k, v in train_on_own_rows(backend, counts).items()}


@pytest.mark.parametrize("kind", ["host", "tcp"])
def test_processes_together_equal_one_process(kind: str) -> None:
    counts = (5, 2)
    outcomes = run_ranks(2, train_in_process, counts, backend=kind, timeout=DEADLINE_S)
    tensors = [
        {k: torch.tensor(v, dtype=torch.float64) for k, v in outcome.items()}
        for outcome in outcomes
    ]
    for outcome in tensors:
        name = "buffer num_batches_tracked"
        outcome[name] = outcome[name].long()
    assert_equals_one_process(tensors, counts)


def test_gradients_are_those_of_finite_differences(on_ranks: OnRanks) -> None:
    def body(backend: Any) -> bool:
        norm = fd.convert_sync_batchnorm(layer(2), backend)
        whole = batch(5, 2, 1, 1)

        def loss(x: Any, weight: Any) -> Any:
            # Every rank perturbs the same element of the whole batch, and looks at the
            # losses of all: so its own is a function of the whole.
            with torch.no_grad():
                norm.weight.copy_(weight)
            y = norm(x[own_rows((3, 2), backend.rank)])
            return y.sin().sum()

        x = whole.clone().requires_grad_()
        loss(x, norm.weight.detach()).backward()
        analytic = fd.allreduce(x.grad, backend)
        numeric, step = torch.zeros_like(whole), 1e-5
        for index in range(whole.numel()):
            sides = []
            for sign in (1, -1):
                moved = whole.clone()
                moved.view(-1)[index] += sign * step
                own = loss(moved, norm.weight.detach()).detach()
                sides.append(fd.allreduce(own, backend))
            numeric.view(-1)[index] = (sides[0] - sides[1]) / (2 * step)
        return bool(torch.allclose(analytic, numeric, rtol=1e-6, atol=1e-8))

    assert all(on_ranks(2, body))


def second_order(norm: Any, x: Any) -> Any:
    x = x.detach().requires_grad_()
    (grad,) = torch.autograd.grad(norm(x).sin().sum(), x, create_graph=True)
    grad.cos().sum().backward()
    return x.grad


def test_the_gradient_can_be_differentiated(on_ranks: OnRanks) -> None:
    def body(backend: Any) -> Any:
        norm = fd.convert_sync_batchnorm(layer(), backend)
        return second_order(norm, batch(7, 3, 2, 2)[own_rows((4, 3), backend.rank)])

    whole = second_order(layer(), batch(7, 3, 2, 2))
    torch.testing.assert_close(torch.cat(on_ranks(2, body)), whole, rtol=1e-9, atol=1e-10)


def count_calls(backend: Any, name: str, calls: list[str]) -> None:
    method = getattr(backend, name)

    def counted(*args: Any) -> Any:
        calls.append(name)
        return method(*args)

    setattr(backend, name, counted)


def test_one_collective_forward_and_one_backward(on_ranks: OnRanks) -> None:
    def body(backend: Any) -> list[str]:
        norm = fd.convert_sync_batchnorm(layer(), backend)
        calls: list[str] = []
        for name in ("all_gather", "allreduce", "broadcast", "reduce"):
            count_calls(norm._group.backend, name, calls)
        norm(batch(4, 3, 2, 2).requires_grad_()).sum().backward()
        return calls

    assert on_ranks(2, body) == [["all_gather", "allreduce"]] * 2


def test_evaluation_is_local(on_ranks: OnRanks) -> None:
    def body(backend: Any) -> bool:
        norm = fd.convert_sync_batchnorm(layer(), backend).eval()
        x = batch(4, 3, 2, 2)
        # Rank 1 alone: a collective would wait for rank 0.
        return backend.rank == 0 or bool(torch.equal(norm(x), layer().eval()(x)))

    assert all(on_ranks(2, body))


def test_a_large_mean_costs_no_precision(on_ranks: OnRanks) -> None:
    def body(backend: Any) -> Any:
        norm = fd.convert_sync_batchnorm(torch.nn.BatchNorm1d(3), backend)
        x = (1e4 + batch(40, 3)[own_rows((30, 10), backend.rank)]).float()
        return norm(x).detach()

    y = torch.cat(on_ranks(2, body))
    exact = torch.nn.BatchNorm1d(3, dtype=torch.float64)((1e4 + batch(40, 3)).float().double())
    # float32 holds 1e4 to 1e-3, the deviation of 2 then to about 1e-3 of itself at worst.
    torch.testing.assert_close(y, exact.detach().float(), rtol=0, atol=2e-3)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_low_precision_keeps_its_dtype(on_ranks: OnRanks, dtype: str) -> None:
    def body(backend: Any) -> Any:
        norm = fd.convert_sync_batchnorm(torch.nn.BatchNorm1d(3), backend)
        x = batch(4, 3).to(getattr(torch, dtype)).requires_grad_()
        y = norm(x)
        y.sum().backward()
        return y.dtype, x.grad.dtype, norm.weight.grad.dtype

    own = getattr(torch, dtype)
    assert on_ranks(2, body) == [(own, own, torch.float32)] * 2


def test_options_of_batch_norm_are_kept(on_ranks: OnRanks) -> None:
    def body(backend: Any) -> None:
        rows = own_rows((4, 3), backend.rank)
        for options in (
            {"affine": False},
            {"track_running_stats": False},
            {"momentum": None},
            {"eps": 0.5},
        ):
            plain, x = layer(**options), batch(7, 3, 2, 2)
            sync = fd.convert_sync_batchnorm(copy.deepcopy(plain), backend)
            for _ in range(2):
                torch.testing.assert_close(sync(x[rows]), plain(x)[rows], rtol=1e-9, atol=1e-10)
            assert sync.state_dict().keys() == plain.state_dict().keys()
            for name, value in plain.state_dict().items():
                torch.testing.assert_close(sync.state_dict()[name], value)

    on_ranks(2, body)


def test_conversion_replaces_every_place_and_keeps_parameters(on_ranks: OnRanks) -> None:
    def body(backend: Any) -> None:
        shared = torch.nn.BatchNorm1d(3)
        model = torch.nn.Sequential(
            shared,
            torch.nn.Sequential(torch.nn.InstanceNorm1d(3), shared),
            torch.nn.SyncBatchNorm(3),
        )
        before = list(model.parameters())
        assert fd.convert_sync_batchnorm(model, backend) is model
        assert model[0] is model[1][1]
        assert [type(m).__module__.partition(".")[0] for m in (model[0], model[2])] == [
            "ferro_dist"
        ] * 2
        assert type(model[1][0]) is torch.nn.InstanceNorm1d
        assert all(a is b for a, b in zip(before, model.parameters(), strict=True))
        plain = torch.nn.Sequential(
            torch.nn.BatchNorm1d(3), torch.nn.Sequential(), torch.nn.BatchNorm1d(3)
        )
        plain.load_state_dict(model.state_dict(), strict=False)

    on_ranks(2, body)


def test_hooks_stay_and_can_be_removed_after_conversion(on_ranks: OnRanks) -> None:
    def body(backend: Any) -> None:
        norm, seen = layer(), []
        handles = [
            norm.register_forward_hook(lambda *_: seen.append("forward")),
            norm.register_full_backward_hook(lambda *_: seen.append("backward")),
        ]
        sync = fd.convert_sync_batchnorm(norm, backend)
        x = batch(4, 3, 2, 2).requires_grad_()
        sync(x).sum().backward()
        assert seen == ["forward", "backward"]
        for handle in handles:
            handle.remove()
        sync(x).sum().backward()
        assert len(seen) == 2

    on_ranks(2, body)


class Activated(nn.BatchNorm2d):
    def forward(self, x: Any) -> Any:
        return super().forward(x).relu()


def forward_replaced() -> Any:
    norm = layer()
    norm.forward = torch.relu
    return norm


def pruned() -> Any:
    return prune.identity(layer(), "weight")


def parametrized() -> Any:
    norm = layer()
    parametrize.register_parametrization(norm, "weight", torch.nn.Softplus())
    return norm


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Activated(3), "Activated '1' has a forward of its own"),
        (forward_replaced, "BatchNorm2d '1' has a forward of its own"),
        (pruned, "'1' has 'weight_orig', 'weight_mask'"),
        (parametrized, "'1' has 'parametrizations'"),
    ],
)
def test_what_a_replacement_would_lack_is_refused(
    on_ranks: OnRanks, make: Callable[[], Any], message: str
) -> None:
    def body(backend: Any) -> None:
        model = torch.nn.Sequential(layer(), make())
        with pytest.raises(ValueError, match=message):
            fd.convert_sync_batchnorm(model, backend)
        assert type(model[0]) is torch.nn.BatchNorm2d

    on_ranks(2, body)


def test_a_copy_stays_in_the_group_and_a_pickle_leaves_it(on_ranks: OnRanks) -> None:
    def body(backend: Any) -> None:
        norm = fd.convert_sync_batchnorm(layer(), backend)
        copied = copy.deepcopy(norm)
        x = batch(4, 3, 2, 2)
        assert torch.equal(copied(x), norm(x))
        unpickled = pickle.loads(pickle.dumps(norm))
        with pytest.raises(RuntimeError, match="convert_sync_batchnorm"):
            unpickled(x)
        again = fd.convert_sync_batchnorm(unpickled, backend)
        assert again is unpickled
        assert torch.equal(again(x), norm(x))

    on_ranks(2, body)


def test_one_rank_alone_is_batch_norm(on_ranks: OnRanks) -> None:
    def body(backend: Any) -> bool:
        x = batch(4, 3, 2, 2)
        return bool(torch.equal(fd.convert_sync_batchnorm(layer(), backend)(x), layer()(x)))

    assert on_ranks(1, body) == [True]


def test_too_few_values_are_refused_on_all_ranks(on_ranks: OnRanks) -> None:
    def body(backend: Any) -> None:
        norm = fd.convert_sync_batchnorm(torch.nn.BatchNorm1d(3), backend)
        with pytest.raises(ValueError, match="1 values for each channel"):
            norm(torch.ones(1 - backend.rank, 3))
        norm(torch.ones(2, 3))  # the group stays usable

    on_ranks(2, body)


def test_different_modules_are_told_apart(on_ranks: OnRanks) -> None:
    def body(backend: Any) -> None:
        model = torch.nn.Sequential(torch.nn.BatchNorm1d(3 + backend.rank))
        with pytest.raises(fd.CollectiveMismatch, match="BatchNorm1d '0' of 4"):
            fd.convert_sync_batchnorm(model, backend)

    on_ranks(2, body)


def test_what_cannot_be_converted_is_refused(on_ranks: OnRanks) -> None:
    def body(backend: Any) -> None:
        with pytest.raises(TypeError, match="torch module"):
            fd.convert_sync_batchnorm({"weight": 1}, backend)
        nothing: Any = None
        with pytest.raises(TypeError, match="backend must be a group"):
            fd.convert_sync_batchnorm(torch.nn.BatchNorm1d(3), nothing)
        with pytest.raises(ValueError, match="lazy"):
            fd.convert_sync_batchnorm(torch.nn.LazyBatchNorm1d(), backend)
        norm = fd.convert_sync_batchnorm(torch.nn.BatchNorm1d(3), backend)
        with pytest.raises(ValueError, match=r"\(batch, 3, \.\.\.\)"):
            norm(torch.ones(2, 4))

    on_ranks(2, body)
