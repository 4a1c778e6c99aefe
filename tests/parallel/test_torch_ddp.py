"""DDP of a torch module: what torch's own gets wrong, and that it behaves as the module does."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from parallel.torch_cases import Branches, Raises, Repeated, non_reentrant, reentrant  # noqa: E402
from torch import nn  # noqa: E402 - needs torch

import ferro_dist as fd  # noqa: E402
from ferro_dist.integrations.torch_gradients import gpu_view  # noqa: E402
from ferro_dist.integrations.torch_module import ModuleParameters  # noqa: E402
from ferro_dist.parallel.bucket import ParameterSpec  # noqa: E402

OnRanks = Callable[..., list[Any]]
OVERLAP = pytest.mark.parametrize("overlap", [False, "always"])

torch.set_num_threads(1)


class Scale(nn.Module):
    """y = weight * x + bias, one element each: every gradient is known by heart."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1, dtype=torch.float64))
        self.bias = nn.Parameter(torch.zeros(1, dtype=torch.float64))
        self.learning_rate = 0.1

    def forward(self, x: float) -> Any:
        return self.weight * x + self.bias


def scale(backend: Any, **options: Any) -> Any:
    return fd.DDP(Scale(), backend, bucket_mb=1e-5, **options)


def gradients_of(ddp: Any) -> tuple[float | None, ...]:
    return tuple(None if p.grad is None else p.grad.item() for p in ddp.parameters())


# Where torch's DDP is silently wrong, or raises


@OVERLAP
def test_two_backwards_after_one_forward_add_up(on_ranks: OnRanks, overlap: Any) -> None:
    def body(backend: Any) -> Any:
        ddp = scale(backend, overlap=overlap)
        y = ddp(backend.rank + 1.0)
        y.sum().backward(retain_graph=True)
        (10 * y).sum().backward()
        return gradients_of(ddp)

    assert on_ranks(2, body) == [(1.5 + 15, 1 + 10)] * 2


@OVERLAP
@pytest.mark.parametrize(
    ("average", "expected"), [("sum", (3 + 30, 2 + 20)), ("contributors", (1.5 + 15, 1 + 10))]
)
def test_an_average_of_before_is_not_averaged_again(
    on_ranks: OnRanks, overlap: Any, average: str, expected: tuple[float, float]
) -> None:
    def body(backend: Any) -> Any:
        ddp = scale(backend, average=average, overlap=overlap)
        ddp(backend.rank + 1.0).sum().backward()
        (10 * ddp(backend.rank + 1.0)).sum().backward()
        before = gradients_of(ddp)
        ddp.sync_gradients()
        assert gradients_of(ddp) == before
        return before

    assert on_ranks(2, body) == [expected] * 2


@pytest.mark.parametrize("is_local", [False, True])
def test_an_average_that_backward_has_added_to_before_it_was_seen_is_refused(
    on_ranks: OnRanks, is_local: bool
) -> None:
    def body(backend: Any) -> Any:
        ddp = scale(backend, average="sum")
        ddp(1.0).sum().backward()
        if is_local:
            with ddp.no_sync():
                ddp(1.0).sum().backward()
        with pytest.raises(RuntimeError, match="no output of forward was seen"):
            ddp.module(1.0).sum().backward()

    on_ranks(2, body)


def test_a_backward_that_was_not_seen_adds_to_what_is_a_ranks_own(on_ranks: OnRanks) -> None:
    def body(backend: Any) -> Any:
        ddp = scale(backend, average="sum")
        ddp(1.0).sum().backward()
        ddp.zero_grad(set_to_none=False)
        ddp.module(1.0).sum().backward()
        return gradients_of(ddp)

    assert on_ranks(2, body) == [(2, 2)] * 2


@OVERLAP
def test_a_parameter_unfrozen_after_wrapping_is_averaged(on_ranks: OnRanks, overlap: Any) -> None:
    def body(backend: Any) -> Any:
        module = Scale()
        module.weight.requires_grad_(False)
        ddp = fd.DDP(module, backend, overlap=overlap)
        ddp(backend.rank + 1.0).sum().backward()
        assert gradients_of(ddp) == (None, 1)
        module.weight.requires_grad_(True)
        ddp.zero_grad()
        ddp(backend.rank + 1.0).sum().backward()
        return gradients_of(ddp)

    assert on_ranks(2, body) == [(1.5, 1)] * 2


@OVERLAP
def test_a_parameter_may_be_frozen_after_wrapping(on_ranks: OnRanks, overlap: Any) -> None:
    def body(backend: Any) -> Any:
        ddp = scale(backend, overlap=overlap)
        ddp.module.weight.requires_grad_(False)
        ddp(backend.rank + 1.0).sum().backward()
        return gradients_of(ddp)

    assert on_ranks(2, body) == [(None, 1)] * 2


def test_one_rank_that_freezes_a_parameter_is_named(on_ranks: OnRanks) -> None:
    def body(backend: Any) -> str:
        ddp = scale(backend)
        ddp(1.0).sum().backward()
        if backend.rank == 2:
            ddp.module.weight.requires_grad_(False)
        with pytest.raises(fd.CollectiveMismatch) as caught:
            ddp(1.0).sum().backward()
        fd.barrier(backend)
        return str(caught.value)

    for message in on_ranks(3, body):
        assert "trained parameter 0 'weight' float64 (1,) on ranks 0, 1" in message
        assert "trained parameter 0 'bias' float64 (1,) on rank 2" in message


def test_ranks_that_freeze_while_buckets_are_under_way_are_named(on_ranks: OnRanks) -> None:
    def body(backend: Any) -> str:
        layers = [nn.Linear(2, 2) for _ in range(6)]
        ddp = fd.DDP(nn.Sequential(*layers), backend, bucket_mb=1e-5, overlap="always")
        ddp(torch.ones(1, 2)).sum().backward()
        if backend.rank == 0:
            layers[3].requires_grad_(False)
        with pytest.raises(fd.CollectiveMismatch) as caught:
            ddp(torch.ones(1, 2)).sum().backward()
        fd.barrier(backend)
        return str(caught.value)

    for message in on_ranks(2, body):
        assert "trained parameter 6 '4.weight'" in message


def test_gradients_that_come_after_their_bucket_left_are_not_lost(on_ranks: OnRanks) -> None:
    def body(backend: Any) -> None:
        torch.manual_seed(0)
        ddp = fd.DDP(Repeated(reentrant).double(), backend, bucket_mb=1e-5, overlap="always")
        plain = copy.deepcopy(ddp.module)
        for _ in range(3):
            x = torch.ones(2, 6, dtype=torch.float64)
            ddp(x).sum().backward()
            plain(x).sum().backward()
            for ours, theirs in zip(ddp.parameters(), plain.parameters(), strict=True):
                torch.testing.assert_close(ours.grad, theirs.grad)
            ddp.zero_grad()
            plain.zero_grad()
        # The first round had some on all ranks; the others wait for the end.
        assert not ddp.statistics().is_overlapped

    on_ranks(2, body)


def test_ranks_whose_parameters_have_another_order_are_refused(on_ranks: OnRanks) -> None:
    class Reversed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bias = nn.Parameter(torch.zeros(1, dtype=torch.float64))
            self.weight = nn.Parameter(torch.ones(1, dtype=torch.float64))

    def body(backend: Any) -> str:
        with pytest.raises(fd.CollectiveMismatch) as caught:
            fd.DDP(Reversed() if backend.rank else Scale(), backend)
        return str(caught.value)

    for message in on_ranks(2, body):
        assert "parameter 0 'weight' float64 (1,) on rank 0; parameter 0 'bias'" in message


@pytest.mark.parametrize(
    ("change", "quoted"),
    [
        (lambda m: m.float(), "parameter 0 'weight' float32"),
        (lambda m: m.requires_grad_(False), "parameter 0 'weight' float64 (1,), frozen"),
        (lambda m: m.register_buffer("mean", torch.zeros(2)), "buffer 0 'mean' float32 (2,)"),
    ],
    ids=["dtype", "requires_grad", "buffers"],
)
def test_modules_that_differ_are_refused(
    on_ranks: OnRanks, change: Callable[[Any], Any], quoted: str
) -> None:
    def body(backend: Any) -> str:
        module = Scale()
        if backend.rank == 1:
            change(module)
        with pytest.raises(fd.CollectiveMismatch) as caught:
            fd.DDP(module, backend)
        fd.barrier(backend)
        return str(caught.value)

    for message in on_ranks(2, body):
        assert f"{quoted} on rank 1" in message or quoted in message


def test_memory_orders_that_differ_are_refused(on_ranks: OnRanks) -> None:
    def body(backend: Any) -> str:
        module = nn.Conv2d(2, 2, 3)
        if backend.rank:
            module.to(memory_format=torch.channels_last)
        with pytest.raises(fd.CollectiveMismatch) as caught:
            fd.DDP(module, backend)
        return str(caught.value)

    for message in on_ranks(2, body):
        assert "in the order of dimensions (0, 2, 3, 1) on rank 1" in message


@OVERLAP
def test_a_parameter_that_nobody_uses_keeps_no_gradient(on_ranks: OnRanks, overlap: Any) -> None:
    def body(backend: Any) -> Any:
        ddp = fd.DDP(Branches(), backend, overlap=overlap)
        used = []
        for which in ("left", "right"):
            ddp(torch.ones(1, 6), which if backend.rank else "left").sum().backward()
            used.append({n for n, p in ddp.named_parameters() if p.grad is not None})
            ddp.zero_grad()
        return used

    trunk, left, right = ({f"{n}.weight", f"{n}.bias"} for n in ("trunk", "left", "right"))
    assert on_ranks(2, body) == [[trunk | left, trunk | left | right]] * 2


@pytest.mark.parametrize(("average", "expected"), [("mean", 1.5), ("sum", 3), ("contributors", 3)])
def test_a_gradient_of_one_rank_is_averaged_as_asked(
    on_ranks: OnRanks, average: str, expected: float
) -> None:
    class Sometimes(Scale):
        def forward(self, x: float) -> Any:
            return self.weight * x if x else self.bias

    def body(backend: Any) -> Any:
        ddp = fd.DDP(Sometimes(), backend, average=average)
        ddp(3.0 * backend.rank).sum().backward()
        return ddp.module.weight.grad.item()

    assert on_ranks(2, body) == [expected] * 2


# Accumulation


@OVERLAP
@pytest.mark.parametrize("average", ["mean", "sum"])
def test_gradients_of_no_sync_are_averaged_with_the_next(
    on_ranks: OnRanks, overlap: Any, average: str
) -> None:
    def body(backend: Any) -> Any:
        ddp = scale(backend, average=average, overlap=overlap)
        steps = []
        for _ in range(2):
            with ddp.no_sync():
                ddp(backend.rank + 1.0).sum().backward()
                own = gradients_of(ddp)
                (10 * ddp(backend.rank + 1.0)).sum().backward()
            (100 * ddp(backend.rank + 1.0)).sum().backward()
            steps.append((own, gradients_of(ddp)))
            ddp.zero_grad()
        return steps

    factor = 1 if average == "mean" else 2
    total = (166.5 * factor, 111 * factor)
    assert on_ranks(2, body) == [[((rank + 1, 1), total)] * 2 for rank in range(2)]


@pytest.mark.parametrize("average", ["mean", "sum"])
def test_no_sync_after_an_average_shows_the_sum_of_both(on_ranks: OnRanks, average: str) -> None:
    def body(backend: Any) -> Any:
        ddp = scale(backend, average=average)
        ddp(backend.rank + 1.0).sum().backward()
        with ddp.no_sync():
            (10 * ddp(backend.rank + 1.0)).sum().backward()
        shown = gradients_of(ddp)
        (100 * ddp(backend.rank + 1.0)).sum().backward()
        return shown, gradients_of(ddp)

    factor = 1 if average == "mean" else 2
    for rank, (shown, total) in enumerate(on_ranks(2, body)):
        assert shown == (1.5 * factor + 10 * (rank + 1), factor + 10)
        assert total == (166.5 * factor, 111 * factor)


@pytest.mark.parametrize("average", ["mean", "sum"])
def test_gradients_that_are_zeroed_in_place_start_anew(on_ranks: OnRanks, average: str) -> None:
    def body(backend: Any) -> Any:
        ddp = scale(backend, average=average)
        with ddp.no_sync():
            ddp(7.0).sum().backward()
        for _ in range(3):
            ddp.zero_grad(set_to_none=False)
            ddp(backend.rank + 1.0).sum().backward()
        return gradients_of(ddp)

    factor = 1 if average == "mean" else 2
    assert on_ranks(2, body) == [(1.5 * factor, 1 * factor)] * 2


def test_no_sync_is_judged_where_backward_is_called(on_ranks: OnRanks) -> None:
    def body(backend: Any) -> Any:
        ddp = scale(backend)
        with ddp.no_sync():
            y = ddp(backend.rank + 1.0)
        y.sum().backward()
        inside = gradients_of(ddp)
        ddp.zero_grad()
        y = ddp(backend.rank + 1.0)
        with ddp.no_sync():
            y.sum().backward()
        return inside, gradients_of(ddp)

    assert on_ranks(2, body) == [((1.5, 1), (1, 1)), ((1.5, 1), (2, 1))]


def test_a_weight_makes_the_mean_a_weighted_one(on_ranks: OnRanks) -> None:
    def body(backend: Any) -> Any:
        ddp = scale(backend)
        with ddp.no_sync():
            ddp(backend.rank + 1.0).sum().backward()
        named = ddp.sync_gradients(weight=[1, 3][backend.rank])
        assert named["weight"] is ddp.module.weight.grad
        return gradients_of(ddp)

    assert on_ranks(2, body) == [((1 * 1 + 2 * 3) / 4, 1)] * 2


def test_a_weight_on_some_ranks_or_of_nothing_is_refused_on_all(on_ranks: OnRanks) -> None:
    def body(backend: Any) -> None:
        ddp = scale(backend)
        with pytest.raises(ValueError, match="weights of all ranks are 0"):
            ddp.sync_gradients(weight=0)
        with pytest.raises(fd.CollectiveMismatch):
            ddp.sync_gradients(weight=None if backend.rank else 2.0)
        for weight in (-1, float("nan"), True, "3"):
            with pytest.raises((TypeError, ValueError)):
                ddp.sync_gradients(weight=weight)
        with pytest.raises(ValueError, match="takes no weight"):
            scale(backend, average="contributors").sync_gradients(weight=1)
        fd.barrier(backend)

    on_ranks(2, body)


def refuse_weights(ddp: Any, weights: tuple[Any, ...]) -> None:
    with pytest.raises((ValueError, fd.CollectiveMismatch)):
        ddp.sync_gradients(weight=weights[ddp.backend.rank])


REFUSED = pytest.mark.parametrize("weights", [(0, 0), (2.0, None)], ids=["of nothing", "on one"])


@REFUSED
@pytest.mark.parametrize(("average", "factor"), [("mean", 1), ("sum", 2)])
def test_gradients_whose_weights_were_refused_are_still_this_ranks_own(
    on_ranks: OnRanks, average: str, factor: int, weights: tuple[Any, ...]
) -> None:
    def body(backend: Any) -> Any:
        ddp = scale(backend, average=average)
        with ddp.no_sync():
            (ddp(2.0) if backend.rank else ddp.module.bias * 4).sum().backward()
        own = gradients_of(ddp)
        refuse_weights(ddp, weights)
        assert gradients_of(ddp) == own
        ddp.sync_gradients()
        return gradients_of(ddp)

    assert on_ranks(2, body) == [(factor, 2.5 * factor)] * 2


@REFUSED
def test_averages_that_were_put_aside_survive_weights_that_are_refused(
    on_ranks: OnRanks, weights: tuple[Any, ...]
) -> None:
    class Sometimes(Scale):
        def forward(self, x: float) -> Any:
            return self.weight * x + self.bias if x else self.bias + 0

    def body(backend: Any) -> Any:
        ddp = fd.DDP(Sometimes(), backend, bucket_mb=1e-5, average="sum")
        ddp(backend.rank + 1.0).sum().backward()
        with ddp.no_sync():
            (10 * ddp(0.0)).sum().backward()
        shown = gradients_of(ddp)
        refuse_weights(ddp, weights)
        after = gradients_of(ddp)
        ddp.sync_gradients()
        return shown, after, gradients_of(ddp)

    assert on_ranks(2, body) == [((3, 12), (3, 12), (3, 22))] * 2


def test_gradients_set_by_hand_are_averaged(on_ranks: OnRanks) -> None:
    def body(backend: Any) -> Any:
        ddp = scale(backend)
        ddp.module.weight.grad = torch.full((1,), 2.0 * backend.rank, dtype=torch.float64)
        ddp.sync_gradients()
        return gradients_of(ddp)

    assert on_ranks(3, body) == [(2, None)] * 3


def test_gradients_handed_over_are_averaged_in_place(on_ranks: OnRanks) -> None:
    def body(backend: Any) -> Any:
        ddp = scale(backend)
        own = torch.full((1,), 2.0 * backend.rank, dtype=torch.float64)
        grads = {"weight": own} if backend.rank else {}
        assert ddp.sync_gradients(grads) is grads
        assert gradients_of(ddp) == (None, None)
        for wrong in ({"other": own}, {"weight": own.float()}, {"weight": 3.0}, [own], 7):
            with pytest.raises((TypeError, ValueError)):
                ddp.sync_gradients(wrong)
        return {name: grad.item() for name, grad in grads.items()}

    assert on_ranks(2, body) == [{"weight": 1}] * 2


def test_an_optimizer_steps_where_gradients_are_averaged_alone(on_ranks: OnRanks) -> None:
    def body(backend: Any) -> list[float]:
        ddp = scale(backend)
        ddp.step_in_backward(torch.optim.SGD(ddp.parameters(), lr=1))
        weights = []
        with ddp.no_sync():
            ddp(backend.rank + 1.0).sum().backward()
        weights.append(ddp.weight.item())
        ddp(backend.rank + 1.0).sum().backward()
        weights.append(ddp.weight.item())
        with ddp.join():
            for _ in range(backend.rank):
                ddp(5.0).sum().backward()
        weights.append(ddp.weight.item())
        ddp.step_in_backward(None)
        ddp(1.0).sum().backward()
        assert gradients_of(ddp) == (1, 1)
        return [*weights, ddp.weight.item()]

    assert on_ranks(2, body) == [[1, -2, -4.5, -4.5]] * 2


def test_optimizers_that_cannot_step_in_backward_are_refused(on_ranks: OnRanks) -> None:
    def body(backend: Any) -> None:
        ddp = scale(backend)
        with pytest.raises(TypeError, match="takes an optimizer"):
            ddp.step_in_backward(torch.optim.SGD)
        with pytest.raises(ValueError, match="LBFGS"):
            ddp.step_in_backward(torch.optim.LBFGS(ddp.parameters()))
        with pytest.raises(ValueError, match="none of the module's"):
            ddp.step_in_backward(torch.optim.SGD(Scale().parameters(), lr=1))
        mine = [ddp.weight] if backend.rank else list(ddp.parameters())
        with pytest.raises(fd.CollectiveMismatch, match="'bias' in group 0 on rank 0"):
            ddp.step_in_backward(torch.optim.SGD(mine, lr=1))
        ddp(1.0).sum().backward()
        assert gradients_of(ddp) == (1, 1)

    on_ranks(2, body)


@pytest.mark.parametrize("is_backward", [True, False], ids=["backward", "sync_gradients"])
def test_an_optimizer_that_fails_on_one_rank_tells_the_others(
    on_ranks: OnRanks, is_backward: bool
) -> None:
    def refuse(*_: Any) -> None:
        raise KeyError("no such step")

    def body(backend: Any) -> None:
        ddp = fd.DDP(nn.BatchNorm1d(2), backend)
        optimizer = torch.optim.SGD(ddp.parameters(), lr=1)
        ddp.step_in_backward(optimizer)
        if backend.rank == 1:
            optimizer.register_step_pre_hook(refuse)
        loss = ddp(torch.randn(4, 2)).sum()
        error = KeyError if backend.rank == 1 else fd.DistributedError
        with pytest.raises(error, match=r"no such step|rank 1"):
            loss.backward() if is_backward else ddp.sync_gradients()

    on_ranks(2, body)


# Uneven numbers of batches


@OVERLAP
@pytest.mark.parametrize(("average", "share"), [("mean", 1 / 3), ("contributors", 1)])
def test_ranks_may_run_out_of_data_one_by_one(
    on_ranks: OnRanks, overlap: Any, average: str, share: float
) -> None:
    def body(backend: Any) -> Any:
        module = nn.Sequential(nn.BatchNorm1d(2), nn.Linear(2, 1))
        ddp = fd.DDP(module, backend, average=average, overlap=overlap, bucket_mb=1e-5)
        seen = []
        with ddp.join():
            for _ in range(2 * backend.rank + 1):
                ddp.zero_grad()
                ddp(torch.randn(3, 2)).sum().backward()
                seen.append(ddp.module[1].bias.grad.item())
                module[1].bias.data += 1
        ddp.verify()
        ddp.zero_grad()
        ddp(torch.randn(3, 2)).sum().backward()
        assert ddp.module[1].bias.grad.item() == pytest.approx(3)
        return seen, module[1].bias.item()

    outcomes = on_ranks(3, body)
    assert [len(seen) for seen, _ in outcomes] == [1, 3, 5]
    last = outcomes[2][0]
    # Each bias has a gradient of 3, the rows of a batch; after two steps rank 2 is alone.
    assert last[0] == pytest.approx(3)
    assert last[4] == pytest.approx(3 * share)
    assert len({bias for _, bias in outcomes}) == 1


def test_weighted_averages_may_run_out_too(on_ranks: OnRanks) -> None:
    def body(backend: Any) -> Any:
        ddp = scale(backend)
        seen = []
        with ddp.join():
            for _ in range(backend.rank + 1):
                ddp.zero_grad()
                with ddp.no_sync():
                    ddp(backend.rank + 1.0).sum().backward()
                ddp.sync_gradients(weight=backend.rank + 1.0)
                seen.append(ddp.module.weight.grad.item())
        return seen

    assert on_ranks(2, body) == [[pytest.approx(5 / 3)], [pytest.approx(5 / 3), 2]]


@OVERLAP
@pytest.mark.parametrize(("average", "expected"), [("mean", 1.5), ("sum", 3), ("contributors", 2)])
def test_gradients_add_up_where_ranks_have_run_out(
    on_ranks: OnRanks, overlap: Any, average: str, expected: float
) -> None:
    def body(backend: Any) -> Any:
        ddp = scale(backend, average=average, overlap=overlap)
        with ddp.join():
            for _ in range(2 - backend.rank):
                ddp(1.0).sum().backward()
        return gradients_of(ddp)

    assert on_ranks(2, body)[0] == (expected, expected)


def test_gradients_of_no_sync_add_up_where_ranks_have_run_out(on_ranks: OnRanks) -> None:
    def body(backend: Any) -> Any:
        ddp = scale(backend)
        seen = []
        ddp(1.0).sum().backward()
        with ddp.join():
            for _ in range(2 - 2 * backend.rank):
                with ddp.no_sync():
                    (10 * ddp(1.0)).sum().backward()
                (100 * ddp(1.0)).sum().backward()
                seen.append(gradients_of(ddp)[0])
            with ddp.no_sync():
                (1000 * ddp(1.0)).sum().backward()
            seen.append(gradients_of(ddp)[0])
        if backend.rank:
            ddp.zero_grad()  # what it has is of before the others went on
        (10000 * ddp(1.0)).sum().backward()
        return seen, gradients_of(ddp)[0]

    (first, total), (second, _) = on_ranks(2, body)
    assert first == [56, 111, 1111]
    assert second == [1001]
    assert total == 1111 / 2 + 10000


def test_gradients_written_to_are_a_ranks_own_where_others_have_run_out(
    on_ranks: OnRanks,
) -> None:
    def body(backend: Any) -> Any:
        ddp = scale(backend)
        ddp(1.0).sum().backward()
        with ddp.join():
            for value in [6.0, 4.0][: 2 - 2 * backend.rank]:
                ddp.module.weight.grad.fill_(value)
                ddp.sync_gradients()
        return gradients_of(ddp)

    assert on_ranks(2, body)[0] == (2, 1)


def test_an_exception_inside_join_passes_through(on_ranks: OnRanks) -> None:
    def body(backend: Any) -> None:
        ddp = scale(backend)
        with pytest.raises(KeyError), ddp.join():
            raise KeyError("no such batch")
        ddp(1.0).sum().backward()
        assert gradients_of(ddp) == (1, 1)

    on_ranks(2, body)


# Backward passes that are none of DDP's


def test_autograd_grad_on_one_rank_communicates_nothing(on_ranks: OnRanks) -> None:
    def body(backend: Any) -> Any:
        ddp = scale(backend)
        x = torch.ones(1, dtype=torch.float64, requires_grad=True)
        if backend.rank == 0:
            torch.autograd.grad(ddp(x).sum(), x)
            torch.autograd.grad(ddp(x).sum(), list(ddp.parameters()))
        assert ddp.statistics().num_rounds == 0
        ddp(x).sum().backward()
        return gradients_of(ddp)

    assert on_ranks(2, body) == [(1, 1)] * 2


def test_a_rank_whose_loss_reaches_no_parameter_takes_part(on_ranks: OnRanks) -> None:
    class Skips(Scale):
        def forward(self, x: Any) -> Any:
            return x * 2 if x.item() == 0 else super().forward(x)

    def body(backend: Any) -> Any:
        ddp = fd.DDP(Skips(), backend)
        x = torch.full((1,), 2.0 * backend.rank, dtype=torch.float64, requires_grad=True)
        ddp(x).sum().backward()
        return gradients_of(ddp)

    assert on_ranks(2, body) == [(1, 0.5)] * 2


def test_backward_with_respect_to_some_parameters_is_averaged(on_ranks: OnRanks) -> None:
    def body(backend: Any) -> Any:
        ddp = scale(backend)
        ddp(backend.rank + 1.0).sum().backward(inputs=[ddp.module.weight])
        return gradients_of(ddp)

    assert on_ranks(2, body) == [(1.5, None)] * 2


def test_gradients_that_would_be_differentiated_further_are_refused(on_ranks: OnRanks) -> None:
    def body(backend: Any) -> None:
        ddp = scale(backend)
        with pytest.raises(RuntimeError, match="create_graph"):
            ddp(1.0).sum().backward(create_graph=True)

    on_ranks(2, body)


def test_gradients_may_be_differentiated_before_they_are_averaged(on_ranks: OnRanks) -> None:
    def body(backend: Any) -> Any:
        ddp = scale(backend)
        with ddp.no_sync():
            # d/dw (w x)^2 = 2 w x^2, whose derivative is 2 x^2.
            (ddp.module.weight * (backend.rank + 1.0)).square().sum().backward(create_graph=True)
            slope = ddp.module.weight.grad
            ddp.module.weight.grad = None
            slope.sum().backward()
        ddp.sync_gradients()
        return gradients_of(ddp)

    assert on_ranks(2, body) == [((2 * 1 + 2 * 4) / 2, None)] * 2


# Failures


@OVERLAP
def test_an_exception_in_one_backward_reaches_the_others(on_ranks: OnRanks, overlap: Any) -> None:
    def body(backend: Any) -> Any:
        module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        ddp = fd.DDP(module, backend, bucket_mb=1e-5, overlap=overlap)
        optimizer = torch.optim.Adam(ddp.parameters())
        if overlap:
            ddp.step_in_backward(optimizer)
        ddp(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        before = copy.deepcopy((module.state_dict(), optimizer.state_dict()))
        y = module[0](torch.ones(1, 2))
        y = module[1](Raises.apply(y) if backend.rank == 1 else y)
        if backend.rank == 1:
            with pytest.raises(KeyError, match="in backward"):
                y.sum().backward()
        else:
            with pytest.raises(fd.DistributedError) as caught:
                y.sum().backward()
            assert caught.value.peer == 1
        after = (module.state_dict(), optimizer.state_dict())
        torch.testing.assert_close(after, before, rtol=0, atol=0)
        with backend.shrink() as rest:
            again = fd.DDP(ddp.into_inner(), rest, bucket_mb=1e-5, overlap=overlap)
            again.zero_grad()
            again(torch.full((1, 2), rest.rank + 1.0)).sum().backward()
            again.verify()
            return again.module[0].weight.grad.sum().item()

    first, *others = on_ranks(3, body)
    assert others == [first] * 2


@OVERLAP
def test_an_exception_in_one_forward_reaches_the_others(on_ranks: OnRanks, overlap: Any) -> None:
    def body(backend: Any) -> None:
        ddp = fd.DDP(nn.Linear(2, 2), backend, overlap=overlap)
        wrong, right = torch.ones(1, 3), torch.ones(1, 2)
        with torch.no_grad(), pytest.raises(RuntimeError, match="shapes"):
            ddp(wrong)  # nobody waits for gradients of this one
        with ddp.no_sync(), pytest.raises(RuntimeError, match="shapes"):
            ddp(wrong)
        ddp(right).sum().backward()
        if backend.rank == 1:
            with pytest.raises(RuntimeError, match="shapes"):
                ddp(wrong)
        else:
            with pytest.raises(fd.DistributedError) as caught:
                ddp(right).sum().backward()
            assert caught.value.peer == 1

    on_ranks(3, body)


def test_an_exception_ends_no_group_in_which_nobody_waits(on_ranks: OnRanks) -> None:
    def body(backend: Any) -> None:
        ddp = fd.DDP(nn.Linear(2, 2), backend)
        wrong, right = torch.ones(1, 3), torch.ones(1, 2)
        ddp.eval()
        with pytest.raises(RuntimeError, match="shapes"):
            ddp(wrong)
        ddp.train()
        if backend.world_size == 1:
            with pytest.raises(RuntimeError, match="shapes"):
                ddp(wrong)
            with pytest.raises(KeyError, match="in backward"):
                ddp(Raises.apply(right.clone().requires_grad_())).sum().backward()
        ddp.zero_grad()
        ddp(right).sum().backward()
        assert ddp.module.bias.grad.tolist() == [1, 1]

    for world_size in (1, 2):
        on_ranks(world_size, body)


def create_graph(ddp: Any) -> None:
    ddp(1.0).sum().backward(create_graph=True)


def replace_a_parameter(ddp: Any) -> None:
    ddp.module.bias = nn.Parameter(torch.zeros(1, dtype=torch.float64))
    ddp(1.0)


def replace_a_parameter_after_forward(ddp: Any) -> None:
    loss = ddp.module(1.0).sum()
    ddp.module.bias = nn.Parameter(torch.zeros(1, dtype=torch.float64))
    loss.backward()


@pytest.mark.parametrize(
    "fail", [create_graph, replace_a_parameter, replace_a_parameter_after_forward]
)
def test_a_backward_that_is_refused_on_one_rank_tells_the_others(
    on_ranks: OnRanks, fail: Callable[[Any], None]
) -> None:
    told = threading.Event()

    def body(backend: Any) -> None:
        ddp = scale(backend)
        if backend.rank == 1:
            with pytest.raises((RuntimeError, ValueError), match=r"create_graph|replaced"):
                fail(ddp)
            assert told.wait(60), "before this rank leaves the group"
        else:
            with pytest.raises(fd.DistributedError) as caught:
                ddp(1.0).sum().backward()
            told.set()
            assert caught.value.peer == 1

    on_ranks(2, body)


def test_a_reduction_of_the_users_own_that_fails_tells_the_others(on_ranks: OnRanks) -> None:
    def compress(bucket: Any, backend: Any, op: Any) -> None:
        if backend.rank == 1:
            raise KeyError("no such reduction")
        fd.allreduce(bucket.gradients, backend, op, out=bucket.gradients)

    told = threading.Event()

    def body(backend: Any) -> None:
        ddp = scale(backend, compress=compress)
        ddp.module.weight.grad = torch.ones(1, dtype=torch.float64)
        if backend.rank == 1:
            with pytest.raises(KeyError, match="no such reduction"):
                ddp.sync_gradients()
            assert told.wait(60), "before this rank leaves the group"
        else:
            with pytest.raises(fd.DistributedError, match="rank 1"):
                ddp.sync_gradients()
            told.set()

    on_ranks(2, body)


def test_a_graph_outlives_its_wrapper(on_ranks: OnRanks) -> None:
    def body(backend: Any) -> Any:
        module = Scale()
        fd.DDP(module, backend)(backend.rank + 1.0).sum().backward()
        ddp = fd.DDP(module, backend)
        loss = ddp(backend.rank + 1.0).sum()
        ddp.into_inner()
        loss.backward()
        return gradients_of(module)

    assert on_ranks(2, body) == [(2, 2), (4, 2)]


def test_a_change_is_seen_until_it_is_accepted(on_ranks: OnRanks) -> None:
    def body(backend: Any) -> None:
        module = Scale()
        parameters = ModuleParameters(module, backend)
        module.bias.requires_grad_(False)
        # What all ranks must agree on first may be refused, and is asked again.
        assert parameters.have_changed()
        assert parameters.have_changed()
        parameters.accept_changes()
        assert not parameters.have_changed()

    on_ranks(1, body)


def test_a_module_is_wrapped_once_at_a_time(on_ranks: OnRanks) -> None:
    def body(backend: Any) -> Any:
        module = Scale()
        ddp = fd.DDP(module, backend)
        with pytest.raises(ValueError, match="wrapped by another DDP already"):
            fd.DDP(nn.Sequential(module), backend)
        del ddp
        ddp = fd.DDP(module, backend, average="sum")
        assert ddp.into_inner() is module
        module(1.0).sum().backward()
        assert gradients_of(module) == (1, 1), "nothing of a wrapper is left"
        with pytest.raises(ValueError, match="into_inner"):
            ddp(1.0)

    on_ranks(2, body)


@pytest.mark.parametrize(
    "change",
    [
        lambda ddp: ddp.module.add_module("extra", nn.Linear(1, 1)),
        lambda ddp: ddp.module.load_state_dict(ddp.state_dict(), assign=True),
        lambda ddp: delattr(ddp.module, "bias"),
    ],
    ids=["added", "replaced", "removed"],
)
def test_other_parameters_than_those_wrapped_are_refused(
    on_ranks: OnRanks, change: Callable[[Any], Any]
) -> None:
    def body(backend: Any) -> None:
        ddp = scale(backend)
        change(ddp)
        with pytest.raises(ValueError, match="after the module was wrapped"):
            ddp(1.0)

    on_ranks(2, body)


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: nn.LazyLinear(2), ValueError, "has no shape yet"),
        (lambda: nn.Linear(2, 2, device="meta"), fd.InvalidArray, "is on meta"),
        (nn.ReLU, ValueError, "ReLU has no parameters"),
    ],
    ids=["lazy", "meta", "nothing to train"],
)
def test_modules_that_cannot_be_wrapped(
    on_ranks: OnRanks, make: Callable[[], Any], error: type[Exception], message: str
) -> None:
    def body(backend: Any) -> None:
        with pytest.raises(error, match=message):
            fd.DDP(make(), backend)
        fd.barrier(backend)

    on_ranks(2, body)


# Buffers


def test_buffers_are_those_of_root_after_each_average(on_ranks: OnRanks) -> None:
    def body(backend: Any) -> Any:
        norm = nn.BatchNorm1d(2)
        ddp = fd.DDP(norm, backend, root=1)
        torch.manual_seed(backend.rank)
        # Two forwards before a backward: as a critic sees real and generated samples.
        x = [torch.randn(4, 2), torch.randn(4, 2)]
        (ddp(x[0]).square().sum() + ddp(x[1]).sum()).backward()
        ddp.verify()
        return norm.running_mean.tolist(), norm.num_batches_tracked.item(), x

    outcomes = on_ranks(3, body)
    x = outcomes[1][2]
    expected = 0.9 * 0.1 * x[0].mean(0) + 0.1 * x[1].mean(0)
    for mean, batches, _ in outcomes:
        assert mean == pytest.approx(expected.tolist(), rel=1e-5)
        assert batches == 2


def test_buffers_are_left_alone_on_request(on_ranks: OnRanks) -> None:
    def body(backend: Any) -> Any:
        norm = nn.BatchNorm1d(2)
        ddp = fd.DDP(norm, backend, sync_buffers=False)
        ddp(torch.full((4, 2), 1.0 + backend.rank)).sum().backward()
        ddp.verify()
        return norm.running_mean[0].item()

    assert on_ranks(2, body) == pytest.approx([0.1, 0.2])


def test_a_rank_whose_buffers_have_changed_tells_the_others(on_ranks: OnRanks) -> None:
    def body(backend: Any) -> None:
        norm = nn.BatchNorm1d(2)
        ddp = fd.DDP(norm, backend)
        loss = ddp(torch.randn(4, 2)).sum()
        if backend.rank == 1:
            norm.running_mean = torch.zeros(3)
        error = ValueError if backend.rank == 1 else fd.DistributedError
        with pytest.raises(error, match="running_mean" if backend.rank == 1 else "rank 1"):
            loss.backward()

    on_ranks(2, body)


def test_a_graph_that_is_kept_survives_the_exchange_of_buffers(on_ranks: OnRanks) -> None:
    def body(backend: Any) -> None:
        ddp = fd.DDP(nn.BatchNorm1d(2), backend)
        y = ddp(torch.randn(4, 2))
        y.square().sum().backward(retain_graph=True)
        y.square().sum().backward()

    on_ranks(2, body)


# As the module behaves


def test_the_wrapper_is_a_module(on_ranks: OnRanks) -> None:
    def body(backend: Any) -> None:
        ddp = scale(backend)
        assert isinstance(ddp, fd.DDP)
        assert isinstance(ddp, nn.Module)
        assert ddp.backend is backend
        assert ddp.learning_rate == 0.1
        ddp.learning_rate = 0.2
        assert ddp.module.learning_rate == 0.2
        assert ddp.weight is ddp.module.weight
        assert not ddp.eval().module.training
        assert ddp.train().module.training
        assert [name for name, _ in ddp.named_parameters()] == ["weight", "bias"]
        assert not hasattr(ddp, "no_such_attribute")
        with pytest.raises(AttributeError):
            ddp.module = Scale()
        assert "Scale" in repr(ddp)

    on_ranks(1, body)


def test_the_state_is_that_of_the_module(on_ranks: OnRanks) -> None:
    def body(backend: Any) -> None:
        module = nn.Sequential(Scale(), nn.BatchNorm1d(1))
        ddp = fd.DDP(module, backend)
        state = ddp.state_dict()
        assert list(state) == list(module.state_dict())
        of_torch = {f"module.{name}": tensor + 1 for name, tensor in state.items()}
        ddp.load_state_dict(of_torch)
        assert module[0].weight.item() == 2
        ddp.load_state_dict({**ddp.state_dict(), "0.weight": torch.full((1,), 5.0)})
        assert module[0].weight.item() == 5
        with pytest.raises(RuntimeError, match=r"0\.weight"):
            ddp.load_state_dict({})

    on_ranks(1, body)


def test_a_wrapper_inside_a_module_saves_and_loads(on_ranks: OnRanks) -> None:
    def body(backend: Any) -> None:
        outer = nn.ModuleDict({"inner": fd.DDP(Scale(), backend)})
        assert list(outer.state_dict()) == ["inner.weight", "inner.bias"]
        for prefix in ("inner.", "inner.module."):
            state = {f"{prefix}{n}": torch.full((1,), 3.0) for n in ("weight", "bias")}
            outer.load_state_dict(state)
            assert outer["inner"].weight.item() == 3
            outer["inner"].weight.data.zero_()

    on_ranks(1, body)


@OVERLAP
def test_a_converted_module_goes_on(on_ranks: OnRanks, overlap: Any) -> None:
    def body(backend: Any) -> Any:
        ddp = scale(backend, overlap=overlap)
        ddp(1.0).sum().backward()
        ddp.zero_grad()
        ddp.float()
        ddp(backend.rank + 1.0).sum().backward()
        assert ddp.weight.grad.dtype == torch.float32
        return gradients_of(ddp)

    assert on_ranks(2, body) == [(1.5, 1)] * 2


def test_gradients_keep_the_memory_order_of_their_parameters(on_ranks: OnRanks) -> None:
    def body(backend: Any) -> None:
        conv = nn.Conv2d(2, 3, 3).to(memory_format=torch.channels_last)
        ddp = fd.DDP(conv, backend)
        ddp(torch.ones(1, 2, 4, 4)).sum().backward()
        assert conv.weight.grad.stride() == conv.weight.stride()

    on_ranks(2, body)


def test_a_wrapper_that_is_checkpointed_ends_no_group(on_ranks: OnRanks) -> None:
    def body(backend: Any) -> None:
        ddp = fd.DDP(nn.Sequential(nn.Linear(2, 2), nn.Tanh(), nn.Linear(2, 1)), backend)
        x = torch.full((1, 2), backend.rank + 1.0, requires_grad=True)
        # What is computed anew stops by an exception, which passes through forward.
        torch.autograd.grad(non_reentrant(ddp, x).sum(), x)
        assert ddp.statistics().num_rounds == 0
        non_reentrant(ddp, x).sum().backward()
        gradient = ddp.module[0].weight.grad
        assert torch.equal(fd.broadcast(gradient, backend), gradient)

    on_ranks(2, body)


def test_places_in_one_tensor_count_their_changes_apart() -> None:
    flat = torch.zeros(300)
    order = (0, 2, 3, 1)
    specs = [
        ParameterSpec("w", (2, 3), np.dtype("f4")),
        ParameterSpec("c", (2, 3, 4, 5), np.dtype("f4"), order),
    ]
    w, c = (gpu_view(flat, offset, spec) for offset, spec in zip((0, 16), specs, strict=True))
    assert c.is_contiguous(memory_format=torch.channels_last)
    before = c._version
    w += 1
    assert c._version == before
    c += 2
    assert flat.sum().item() == w.numel() + 2 * c.numel()
    assert flat[16:136].eq(2).all()


def test_a_copy_trains_by_itself(on_ranks: OnRanks) -> None:
    def body(backend: Any) -> Any:
        ddp = scale(backend, average="sum")
        twin = copy.deepcopy(ddp)
        assert twin.module is not ddp.module
        twin(backend.rank + 1.0).sum().backward()
        assert gradients_of(ddp) == (None, None)
        ddp(10.0 * backend.rank).sum().backward()
        return gradients_of(twin), gradients_of(ddp)

    assert on_ranks(2, body) == [((3, 2), (10, 2))] * 2


@pytest.mark.parametrize("outside", [False, True], ids=["module", "wrapper"])
def test_compiled_modules_are_averaged(on_ranks: OnRanks, outside: bool) -> None:
    def body(backend: Any) -> Any:
        module = nn.Linear(1, 1)
        compiled = torch.compile(module, backend="eager")
        ddp = fd.DDP(module if outside else compiled, backend)
        call = torch.compile(ddp, backend="eager") if outside else ddp
        call(torch.full((1, 1), backend.rank + 1.0)).sum().backward()
        return [p.grad.item() for p in module.parameters()]

    # One at a time: the compiler is not made for threads.
    assert on_ranks(1, body) == [[1, 1]]


def test_gradients_lie_in_memory_that_all_ranks_reach(on_ranks: OnRanks) -> None:
    def body(backend: Any) -> None:
        ddp = scale(backend)
        ddp(1.0).sum().backward()
        buffers = [bucket.buffer for bucket in ddp._reducer.buckets]
        for parameter in ddp.parameters():
            gradient = parameter.grad.numpy()
            assert any(np.shares_memory(gradient, buffer) for buffer in buffers)

    on_ranks(2, body)


def test_clipping_by_the_global_norm_is_the_same_on_all_ranks(on_ranks: OnRanks) -> None:
    def body(backend: Any) -> Any:
        ddp = scale(backend)
        ddp(3.0 * backend.rank).sum().backward()
        norm = torch.nn.utils.clip_grad_norm_(ddp.parameters(), 0.5)
        return norm.item(), gradients_of(ddp)

    outcomes = on_ranks(3, body)
    assert outcomes == [outcomes[0]] * 3
    assert outcomes[0][0] == pytest.approx(10**0.5)


# Diagnosis


def test_parameters_that_differ_are_found(on_ranks: OnRanks) -> None:
    def body(backend: Any) -> str:
        ddp = scale(backend)
        ddp.verify()
        if backend.rank == 2:
            ddp.weight.data += 1e-15
        with pytest.raises(fd.CollectiveMismatch) as caught:
            ddp.verify()
        ddp.broadcast_parameters(2)
        ddp.verify()
        assert caught.value.peer == 2
        return str(caught.value)

    for message in on_ranks(3, body):
        assert "parameter 'weight', bits" in message


@OVERLAP
def test_statistics_tell_the_times_of_each_bucket(on_ranks: OnRanks, overlap: Any) -> None:
    def body(backend: Any) -> None:
        ddp = scale(backend, overlap=overlap)
        for _ in range(3):
            ddp(1.0).sum().backward()
        statistics = ddp.statistics()
        assert statistics.num_rounds == 3
        assert statistics.is_overlapped == bool(overlap)
        assert statistics.begin_s <= statistics.backward_end_s <= statistics.end_s
        assert sorted(b.names for b in statistics.buckets) == [("bias",), ("weight",)]
        for bucket in statistics.buckets:
            assert statistics.begin_s <= bucket.ready_s <= bucket.start_s <= bucket.end_s
            assert 0 <= bucket.exposed_s <= statistics.end_s - statistics.begin_s
        assert statistics.nbytes == sum(bucket.nbytes for bucket in statistics.buckets)

    on_ranks(2, body)


def test_buckets_follow_the_order_in_which_gradients_become_ready(on_ranks: OnRanks) -> None:
    class Shuffled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.last, self.first = nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)

        def forward(self, x: Any) -> Any:
            return self.last(self.first(x))

    def body(backend: Any) -> Any:
        ddp = fd.DDP(Shuffled(), backend, bucket_mb=1e-5)
        for _ in range(2):
            ddp(torch.ones(1, 2)).sum().backward()
        return [bucket.names for bucket in ddp.statistics().buckets]

    assert on_ranks(2, body) == [[("last.weight",), ("first.weight",)]] * 2


def test_words_of_torch_are_accepted(on_ranks: OnRanks) -> None:
    def body(backend: Any) -> None:
        scale(backend, find_unused_parameters=True, static_graph=True, gradient_as_bucket_view=True)
        with pytest.raises(TypeError):
            scale(backend, no_such_word=True)

    on_ranks(1, body)
