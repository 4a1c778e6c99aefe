"""Sparse gradients: the rows of all ranks, whichever ranks have any."""

from __future__ import annotations

import contextlib
import math
from typing import Any

import pytest
from ranks_as_threads import OnRanks

import ferro_dist as fd

torch = pytest.importorskip("torch", reason="torch is not installed")

from torch import nn  # noqa: E402 - needs torch


def table(backend: Any, **options: Any) -> Any:
    """Wrap six rows of one number each; gradients are how often a row was looked up."""
    module = nn.Embedding(6, 1, sparse=True).double()
    return fd.DDP(module, backend, **options)


def sparse(indices: Any, values: Any, shape: tuple[int, int]) -> Any:
    return torch.sparse_coo_tensor(indices, values, shape, check_invariants=True)


def look_up(ddp: Any, *rows: int) -> None:
    ddp(torch.tensor(rows, dtype=torch.int64)).sum().backward()


def gradient_of(ddp: Any) -> list[float]:
    grad = ddp.module.weight.grad
    assert grad.is_sparse
    assert grad.is_coalesced()
    rows: list[float] = grad.to_dense().flatten().tolist()
    return rows


@pytest.mark.parametrize(
    ("average", "expected"),
    [
        ("mean", [1 / 3, 2 / 3, 0, 0, 0, 1]),
        ("sum", [1, 2, 0, 0, 0, 3]),
        ("contributors", [1 / 2, 1, 0, 0, 0, 3 / 2]),
    ],
)
def test_rows_of_all_ranks_are_averaged(
    on_ranks: OnRanks, average: str, expected: list[float]
) -> None:
    def body(backend: Any) -> Any:
        ddp = table(backend, average=average)
        if backend.rank == 2:  # whose loss does not reach the table
            ddp.sync_gradients()
        else:
            look_up(ddp, *[(1, 5, 1), (5, 0, 5)][backend.rank])
        return gradient_of(ddp)

    for rows in on_ranks(3, body):
        assert rows == pytest.approx(expected)


def test_a_table_that_nobody_uses_keeps_no_gradient(on_ranks: OnRanks) -> None:
    def body(backend: Any) -> None:
        ddp = table(backend)
        ddp.sync_gradients()
        assert ddp.module.weight.grad is None
        look_up(ddp)  # a gradient without any row
        assert gradient_of(ddp) == [0] * 6

    on_ranks(2, body)


def test_a_gradient_that_is_dense_on_one_rank_is_dense_on_all(on_ranks: OnRanks) -> None:
    def body(backend: Any) -> Any:
        ddp = table(backend)
        if backend.rank == 0:
            look_up(ddp, 4, 4)
        elif backend.rank == 1:
            (3 * ddp.module.weight).sum().backward()
        else:
            ddp.sync_gradients()
        grad = ddp.module.weight.grad
        assert grad.layout is torch.strided
        return grad.flatten().tolist()

    for rows in on_ranks(3, body):
        assert rows == pytest.approx([1, 1, 1, 1, 1 + 2 / 3, 1])


def test_a_sparse_gradient_that_nobody_announced_becomes_dense(on_ranks: OnRanks) -> None:
    class Functional(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(4, 1, dtype=torch.float64))
            self.scale = nn.Parameter(torch.ones(1, dtype=torch.float64))

        def forward(self, rows: Any) -> Any:
            return self.scale + nn.functional.embedding(rows, self.weight, sparse=True)

    def body(backend: Any) -> Any:
        ddp = fd.DDP(Functional(), backend)
        for _ in range(2):
            ddp(torch.tensor([backend.rank, 3])).sum().backward()
        return ddp.module.weight.grad.flatten().tolist(), ddp.module.scale.grad.item()

    assert on_ranks(2, body) == [([1, 1, 0, 2], 4)] * 2


@pytest.mark.parametrize(("average", "factor"), [("mean", 1), ("sum", 2)])
def test_rows_accumulate_over_backward_passes(on_ranks: OnRanks, average: str, factor: int) -> None:
    def body(backend: Any) -> Any:
        ddp = table(backend, average=average)
        look_up(ddp, 0)
        with ddp.no_sync():
            look_up(ddp, 1 + backend.rank)
        shown = gradient_of_local(ddp)
        look_up(ddp, 3)
        return shown, gradient_of(ddp)

    def gradient_of_local(ddp: Any) -> list[float]:
        rows: list[float] = ddp.module.weight.grad.to_dense().flatten().tolist()
        return rows

    half = factor / 2
    expected = [factor, half, half, factor, 0, 0]
    own = [[factor, 1, 0, 0, 0, 0], [factor, 0, 1, 0, 0, 0]]
    assert on_ranks(2, body) == [(own[rank], expected) for rank in range(2)]


def test_rows_have_weights_and_ranks_may_run_out(on_ranks: OnRanks) -> None:
    def body(backend: Any) -> Any:
        ddp = table(backend)
        seen = []
        with ddp.join():
            for _ in range(backend.rank + 1):
                ddp.zero_grad()
                with ddp.no_sync():
                    look_up(ddp, backend.rank)
                ddp.sync_gradients(weight=1 + 2 * backend.rank)
                seen.append(gradient_of(ddp)[:2])
        return seen

    assert on_ranks(2, body) == [[[0.25, 0.75]], [[0.25, 0.75], [0, 1]]]


def test_rows_that_weigh_nothing_may_be_no_numbers(on_ranks: OnRanks) -> None:
    def body(backend: Any) -> Any:
        ddp = table(backend)
        with ddp.no_sync():
            look_up(ddp, 1)
        if backend.rank == 0:
            ddp.weight.grad *= float("nan")
        ddp.sync_gradients(weight=backend.rank)
        return gradient_of(ddp)[:2]

    assert on_ranks(2, body) == [[0, 1]] * 2


def test_rows_accumulate_where_ranks_have_run_out(on_ranks: OnRanks) -> None:
    def body(backend: Any) -> Any:
        ddp = table(backend)
        with ddp.join():
            for _ in range(2 - backend.rank):
                look_up(ddp, 0)
        return gradient_of(ddp)[0]

    assert on_ranks(2, body)[0] == 1.5


def test_rows_handed_over_are_averaged(on_ranks: OnRanks) -> None:
    def body(backend: Any) -> Any:
        ddp = table(backend)
        own = sparse([[backend.rank]], torch.ones(1, 1).double(), (6, 1))
        for grads in ({"weight": own}, [own]):
            synced = ddp.sync_gradients(grads)
            assert synced is grads
            average = grads["weight"] if isinstance(grads, dict) else grads[0]
            assert average.to_dense().flatten().tolist() == [0.5, 0.5, 0, 0, 0, 0]
        assert ddp.module.weight.grad is None

    on_ranks(2, body)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_rows_of_any_dtype_are_averaged(on_ranks: OnRanks, dtype: str) -> None:
    def body(backend: Any) -> Any:
        module = nn.Embedding(3, 2, sparse=True).to(getattr(torch, dtype))
        ddp = fd.DDP(module, backend)
        value = torch.full((1, 2), backend.rank, dtype=getattr(torch, dtype))
        module.weight.grad = sparse([[2]], value, (3, 2))
        ddp.sync_gradients()
        assert module.weight.grad.dtype == getattr(torch, dtype)
        return module.weight.grad.to_dense()[2].tolist()

    assert on_ranks(2, body) == [[0.5, 0.5]] * 2


@pytest.mark.parametrize("is_dense", [False, True])
@pytest.mark.parametrize(
    ("average", "weight", "factor"),
    [("mean", None, 1), ("contributors", None, 1), ("mean", 2.0, 1), ("sum", 2.0, 4)],
)
def test_what_stands_beside_an_infinity_is_kept(
    on_ranks: OnRanks, average: str, weight: float | None, factor: int, is_dense: bool
) -> None:
    def body(backend: Any) -> Any:
        zeros = torch.zeros(3, 1, dtype=torch.complex128)
        module = nn.Embedding.from_pretrained(zeros, freeze=False, sparse=True)
        rows = [[complex(math.inf, 5)], [1j], [3 + 6j]]
        module.weight.grad = sparse([[2, 2, 0]], zeros.new_tensor(rows), (3, 1))
        if is_dense and backend.rank:
            module.weight.grad = zeros.new_tensor([[3 + 6j], [0], [complex(math.inf, 6)]])
        fd.DDP(module, backend, average=average).sync_gradients(weight=weight)
        grad = module.weight.grad
        if is_dense:
            return grad[[0, 2]].flatten().tolist()
        assert grad.indices().tolist() == [[0, 2]]
        return grad.values().flatten().tolist()

    expected = [(3 + 6j) * factor, complex(math.inf, 6 * factor)]
    assert on_ranks(2, body) == [expected] * 2


@pytest.mark.parametrize("is_dense", [False, True])
def test_a_mean_of_16_bits_has_room_for_its_sum(on_ranks: OnRanks, is_dense: bool) -> None:
    def body(backend: Any) -> Any:
        module = nn.Embedding(3, 1, sparse=True).half()
        ddp = fd.DDP(module, backend)
        value = torch.full((1, 1), 60000.0, dtype=torch.float16)  # the largest is 65504
        gradient = sparse([[2]], value, (3, 1))
        module.weight.grad = gradient.to_dense() if is_dense and backend.rank else gradient
        ddp.sync_gradients()
        assert (module.weight.grad.layout is torch.strided) == is_dense
        return module.weight.grad.to_dense().flatten().tolist()

    assert on_ranks(2, body) == [[0, 0, 60000]] * 2


def test_dense_gradients_handed_over_for_a_table_are_overwritten(on_ranks: OnRanks) -> None:
    def body(backend: Any) -> Any:
        own = torch.full((6, 1), 1.0 + backend.rank, dtype=torch.float64)
        grads = table(backend).sync_gradients({"weight": own})
        assert grads["weight"] is own
        return own.flatten().tolist()

    assert on_ranks(2, body) == [[1.5] * 6] * 2


@pytest.mark.parametrize("weights", [(0, 0), (2.0, None)], ids=["of nothing", "on one"])
def test_rows_survive_weights_that_are_refused(on_ranks: OnRanks, weights: tuple[Any, ...]) -> None:
    def body(backend: Any) -> Any:
        ddp = table(backend, average="sum")
        look_up(ddp, 0)
        with ddp.no_sync():
            look_up(ddp, 1)
        with pytest.raises((ValueError, fd.CollectiveMismatch)):
            ddp.sync_gradients(weight=weights[backend.rank])
        assert ddp.module.weight.grad.to_dense().flatten().tolist() == [2, 1, 0, 0, 0, 0]
        ddp.sync_gradients()
        return gradient_of(ddp)

    assert on_ranks(2, body) == [[2, 2, 0, 0, 0, 0]] * 2


def test_one_rank_that_freezes_a_table_is_named(on_ranks: OnRanks) -> None:
    class Tables(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = (nn.Embedding(3, 1, sparse=True) for _ in range(2))

        def forward(self, rows: Any) -> Any:
            return self.a(rows) + self.b(rows)

    def body(backend: Any) -> str:
        ddp = fd.DDP(Tables(), backend)
        (ddp.module.a if backend.rank else ddp.module.b).requires_grad_(False)
        with pytest.raises(fd.CollectiveMismatch) as caught:
            look_up(ddp, 1)
        return str(caught.value)

    for message in on_ranks(2, body):
        assert "sparse gradients 'a.weight'" in message
        assert "sparse gradients 'b.weight'" in message


def test_modules_that_differ_in_what_is_sparse_are_refused(on_ranks: OnRanks) -> None:
    def body(backend: Any) -> None:
        with pytest.raises(fd.CollectiveMismatch, match="with sparse gradients on rank 1"):
            fd.DDP(nn.Embedding(3, 1, sparse=backend.rank == 1), backend)
        fd.barrier(backend)

    on_ranks(2, body)


def test_rows_given_other_memory_are_a_ranks_own(on_ranks: OnRanks) -> None:
    def body(backend: Any) -> list[float]:
        ddp = table(backend, average="sum")
        look_up(ddp, 1, 2)
        own = torch.tensor([[1.0 + backend.rank]], dtype=torch.float64)
        ddp.module.weight.grad.data = sparse([[5]], own, (6, 1)).coalesce()
        look_up(ddp, 0)
        return gradient_of(ddp)

    assert on_ranks(2, body) == [[2, 0, 0, 0, 0, 3]] * 2


@pytest.mark.parametrize("is_local", [False, True])
def test_rows_that_were_averaged_and_moved_are_refused(on_ranks: OnRanks, is_local: bool) -> None:
    def body(backend: Any) -> None:
        ddp = table(backend, average="sum")
        look_up(ddp, 1, 2)
        if is_local:
            with ddp.no_sync():
                look_up(ddp, 3)
        kept = ddp.module.weight.grad.data  # or its memory might be given out again
        ddp.float().double()
        assert kept.dtype == torch.float64
        with pytest.raises(RuntimeError, match=r"'weight', .* other memory now"):
            look_up(ddp, 0)

    on_ranks(2, body)


class WeightedTable(nn.Module):
    """Six rows, and a factor whose gradient is dense."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Embedding.from_pretrained(torch.ones(6, 1), freeze=False, sparse=True)
        self.factor = nn.Parameter(torch.ones(1))

    def forward(self, x: Any) -> Any:
        return self.factor * self.rows(x)


@pytest.mark.parametrize("is_local", [False, True])
def test_dense_averages_outlast_a_backward_that_refuses_sparse_ones(
    on_ranks: OnRanks, is_local: bool
) -> None:
    def body(backend: Any) -> Any:
        ddp = fd.DDP(WeightedTable(), backend, average="sum")
        look_up(ddp, 1, 2)
        ddp.module.rows.double()
        place = ddp.no_sync() if is_local else contextlib.nullcontext()
        with place, pytest.raises(RuntimeError, match=r"'rows.weight' was converted"):
            look_up(ddp, 3)
        return ddp.module.factor.grad.tolist()

    assert on_ranks(2, body) == [[4]] * 2


def test_a_gradient_without_rows_counts_after_an_average_without_rows(on_ranks: OnRanks) -> None:
    def with_rows(*rows: float) -> Any:
        indices, values = torch.arange(len(rows))[None], torch.tensor(rows)[:, None]
        return torch.sparse_coo_tensor(indices, values, (3, 1))

    def body(backend: Any) -> Any:
        ddp = fd.DDP(nn.Embedding(3, 1, sparse=True), backend, average="contributors")
        ddp.weight.grad = with_rows()
        ddp.sync_gradients()
        ddp.weight.grad = with_rows(*[2.0] * backend.rank)
        ddp.sync_gradients()
        return ddp.weight.grad.to_dense().flatten().tolist()

    assert on_ranks(2, body) == [[1, 0, 0]] * 2
