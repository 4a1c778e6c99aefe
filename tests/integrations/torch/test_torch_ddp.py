"""DDP of a torch module: what torch's own gets wrong, and what it tells of itself."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from ranks_as_threads import OnRanks

torch = pytest.importorskip("torch", reason="torch is not installed")

from integrations.torch.torch_cases import Branches, Repeated, reentrant  # noqa: E402
from integrations.torch.torch_scale import (  # noqa: E402
    OVERLAP,
    Scale,
    Upwards,
    gradients_of,
    note_copies,
    scale,
)
from torch import nn  # noqa: E402 - needs torch

import ferro_dist as fd  # noqa: E402
from ferro_dist.integrations.torch.ddp import gradients as torch_gradients  # noqa: E402
from ferro_dist.integrations.torch.ddp.writes import ParameterWrites  # noqa: E402
from ferro_dist.parallel.ddp.agreement import Agreement  # noqa: E402

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


class Orders(nn.Module):
    """Parameters of several sizes and memory orders, whose gradients differ in each element."""

    def __init__(self) -> None:
        super().__init__()
        self.small = nn.Parameter(torch.zeros(3))
        self.large = nn.Parameter(torch.zeros(20_000))  # more than 64 KiB
        self.streamed = nn.Parameter(torch.zeros(512, 513))  # more than 1 MiB
        self.streamed_turned = nn.Parameter(torch.zeros(513, 512).T)
        channels_last = torch.zeros(2, 3, 4, 5).to(memory_format=torch.channels_last)
        self.channels_last = nn.Parameter(channels_last)
        self.turned = nn.Parameter(torch.zeros(4, 5).T)
        self.scalar = nn.Parameter(torch.zeros(()))
        # These and the next two lie side by side in the bucket, and are copied in one go.
        self.rows = nn.ParameterList(nn.Parameter(torch.zeros(n, 16)) for n in (2, 3, 1))
        self.bias = nn.Parameter(torch.zeros(16))
        self.another = nn.Parameter(torch.zeros(5))

    def forward(self, x: float) -> Any:
        return x * sum((p * weights_like(p)).sum() for p in self.parameters())


def weights_like(p: Any) -> Any:
    return torch.arange(1.0, p.numel() + 1).reshape(p.shape)


@OVERLAP
def test_gradients_of_all_sizes_and_memory_orders_come_to_their_elements(
    on_ranks: OnRanks, overlap: Any
) -> None:
    def body(backend: Any) -> None:
        ddp = fd.DDP(Orders(), backend, overlap=overlap)
        for step in range(1, 4):
            ddp(step * (backend.rank + 1.0)).backward()
            for p in ddp.parameters():
                assert torch.equal(p.grad, 1.5 * step * weights_like(p))
            ddp.zero_grad(set_to_none=step == 1)

    on_ranks(2, body)


class LargeThenSmall(nn.Module):
    """A large layer, used twice in each of two checkpoints, between small ones of its bucket."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 600)
        self.large = nn.Linear(600, 600)  # more than 1 MiB: copied when its gradient is ready
        self.last = nn.Linear(600, 2)

    def forward(self, x: Any) -> Any:
        h = self.first(x)
        for _ in range(2):
            h = reentrant(nn.Sequential(self.large, nn.Tanh(), self.large), h)
        return self.last(h).square().sum()


@OVERLAP
def test_large_gradients_that_come_more_than_once_are_those_of_all_uses(
    on_ranks: OnRanks, overlap: Any
) -> None:
    x = torch.randn(6, 4, generator=torch.Generator().manual_seed(1))
    model = LargeThenSmall()

    def body(backend: Any) -> None:
        alone = copy.deepcopy(model)
        ddp = fd.DDP(copy.deepcopy(model), backend, average="sum", overlap=overlap)
        for step in range(4):
            ddp(x[3 * backend.rank :][:3]).backward()
            alone(x).backward()
            for one, other in zip(ddp.parameters(), alone.parameters(), strict=True):
                # Sums over six rows in another order.
                torch.testing.assert_close(one.grad, other.grad, rtol=1e-4, atol=1e-5)
            ddp.zero_grad(set_to_none=step != 1)
            alone.zero_grad()

    on_ranks(2, body)


@OVERLAP
def test_large_gradients_that_are_given_other_memory_are_averaged(
    on_ranks: OnRanks, overlap: Any
) -> None:
    def body(backend: Any) -> None:
        ddp = fd.DDP(Orders(), backend, overlap=overlap)
        for step in range(3):
            ddp(1.0).backward()
            masked = ddp.get_parameter("streamed").grad
            masked.data = torch.zeros_like(masked)
            ddp.zero_grad(set_to_none=step == 0)
            ddp(backend.rank + 1.0).backward()
            for p in ddp.parameters():
                assert torch.equal(p.grad, 1.5 * weights_like(p))
            ddp.zero_grad()

    on_ranks(2, body)


def test_large_gradients_of_a_backward_that_fails_count_as_this_ranks_own() -> None:
    (backend,) = fd.SimulatedBackend.create_group(1)  # a group of one outlives the failure
    ddp = fd.DDP(Orders(), backend)
    for _ in range(2):  # buckets stay where they are after the first
        ddp.zero_grad()
        ddp(1.0).backward()
    ddp.zero_grad()
    with backend:
        handle = ddp.get_parameter("small").register_hook(fail)
        with pytest.raises(ZeroDivisionError):
            ddp(1.0).backward()
        handle.remove()
        large = ddp.get_parameter("streamed")
        if large.grad is not None:  # whichever came first
            assert torch.equal(large.grad, weights_like(large))
        ddp.zero_grad(set_to_none=False)
        ddp(2.0).backward()
        for p in ddp.parameters():
            assert torch.equal(p.grad, 2 * weights_like(p))


def fail(gradient: Any) -> Any:
    raise ZeroDivisionError


@OVERLAP
@pytest.mark.parametrize("name", ["rows.0", "large", "streamed", "scalar"])
def test_an_average_that_a_graph_has_saved_does_not_change_unnoticed(
    on_ranks: OnRanks, name: str, overlap: Any
) -> None:
    def body(backend: Any) -> None:
        ddp = fd.DDP(Orders(), backend, overlap=overlap)
        for _ in range(2):  # buckets stay where they are after the first
            ddp.zero_grad()
            ddp(1.0).backward()
        factor = torch.ones((), requires_grad=True)
        of_average = (factor * ddp.get_parameter(name).grad).sum()
        ddp.zero_grad()
        ddp(2.0).backward()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            of_average.backward()

    on_ranks(2, body)


@OVERLAP
@pytest.mark.parametrize("average", ["mean", "sum"])
def test_averages_that_are_kept_do_not_change(
    on_ranks: OnRanks, average: str, overlap: Any
) -> None:
    def body(backend: Any) -> None:
        ddp = fd.DDP(Orders(), backend, average=average, overlap=overlap)
        kept = []
        for x in (1.0, 2.0, 3.0, 4.0):
            ddp.zero_grad()
            ddp(x).backward()
            kept.append([p.grad for p in ddp.parameters()])
        factor = 1 if average == "mean" else backend.world_size
        for x, gradients in zip((1.0, 2.0, 3.0, 4.0), kept, strict=True):
            for p, gradient in zip(ddp.parameters(), gradients, strict=True):
                torch.testing.assert_close(gradient, factor * x * weights_like(p))
        # The last ones are in use, and added to, as without DDP.
        ddp(6.0).backward()
        for p, gradient in zip(ddp.parameters(), kept[-1], strict=True):
            assert p.grad.data_ptr() == gradient.data_ptr()

    on_ranks(2, body)


@OVERLAP
@pytest.mark.parametrize(
    "other", [torch.Tensor.detach, torch.Tensor.t, torch.Tensor.flatten, torch.Tensor.view_as]
)
def test_views_of_averages_that_a_graph_has_saved_do_not_change_unnoticed(
    on_ranks: OnRanks, overlap: Any, other: Callable[..., Any]
) -> None:
    def body(backend: Any) -> None:
        ddp = fd.DDP(nn.Linear(4, 2, bias=False), backend, overlap=overlap)
        ddp(torch.ones(4)).sum().backward()
        average = ddp.get_parameter("weight").grad
        view = other(average, average) if other is torch.Tensor.view_as else other(average)
        factor = torch.ones((), requires_grad=True)
        of_view = (factor * view).sum()
        ddp.zero_grad()
        ddp(2 * torch.ones(4)).sum().backward()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            of_view.backward()
        assert torch.equal(average, torch.ones(2, 4))

    on_ranks(2, body)


@pytest.mark.parametrize("average", ["mean", "sum"])
@pytest.mark.parametrize("set_to_none", [False, True])
def test_averages_are_looked_at_one_by_one_only_where_some_may_be_kept(
    on_ranks: OnRanks, monkeypatch: pytest.MonkeyPatch, average: str, set_to_none: bool
) -> None:
    looks = []

    def look(*args: Any) -> None:
        looks.append(args)

    def body(backend: Any) -> None:
        ddp = scale(backend, average=average)
        for step in range(5):
            ddp(1.0).sum().backward()
            ddp.zero_grad(set_to_none=set_to_none)
            if step == 2:  # buckets stay where they are after the first
                fd.barrier(backend)
                looks.clear()
                fd.barrier(backend)

    monkeypatch.setattr(torch_gradients, "leave_kept", look)
    on_ranks(2, body)
    assert not looks


def test_averages_that_are_not_kept_are_not_copied(
    on_ranks: OnRanks, monkeypatch: pytest.MonkeyPatch
) -> None:
    def body(backend: Any) -> None:
        ddp = fd.DDP(Orders(), backend)
        for set_to_none in (True, True, False, False, True, True):
            for _ in range(2):
                ddp(1.0).backward()
            ddp.zero_grad(set_to_none=set_to_none)

    copies = note_copies(monkeypatch)
    on_ranks(2, body)
    assert not copies


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
        with pytest.raises(RuntimeError, match="has passed no known output of forward"):
            ddp.module(1.0).sum().backward()

    on_ranks(2, body)


def test_a_penalty_on_parameters_alone_is_told_to_join_the_loss(on_ranks: OnRanks) -> None:
    def body(backend: Any) -> None:
        ddp = scale(backend, average="sum")
        ddp(1.0).sum().backward()
        with pytest.raises(RuntimeError, match="add a penalty on parameters or gradients to the"):
            ddp.weight.square().sum().backward()

    on_ranks(2, body)


class WithoutElements(Scale):
    """Has a parameter without elements, whose gradient comes first."""

    def __init__(self) -> None:
        super().__init__()
        self.none = nn.Parameter(torch.empty(0, dtype=torch.float64))

    def forward(self, x: float) -> Any:
        return super().forward(x) + self.none.sum()


def test_a_backward_that_is_seen_at_a_gradient_without_elements_has_added_nothing(
    on_ranks: OnRanks,
) -> None:
    def body(backend: Any) -> Any:
        ddp = fd.DDP(WithoutElements(), backend, average="sum")
        ddp(1.0).sum().backward()
        ddp.module(10.0).sum().backward()
        return ddp.weight.grad.item()

    assert on_ranks(2, body) == [22] * 2


@pytest.mark.parametrize("average", ["sum", "contributors"])
def test_gradients_without_elements_are_told_apart(on_ranks: OnRanks, average: str) -> None:
    def body(backend: Any) -> Any:
        ddp = fd.DDP(WithoutElements(), backend, average=average)
        ddp(1.0).sum().backward()
        ddp.zero_grad()
        if backend.rank == 0:
            ddp.none.grad = torch.zeros_like(ddp.none)  # no average, though none has an address
        ddp.sync_gradients()
        return ddp.none.grad is not None

    assert on_ranks(2, body) == [True, True]


def test_a_backward_that_was_not_seen_adds_to_what_is_a_ranks_own(on_ranks: OnRanks) -> None:
    def body(backend: Any) -> Any:
        ddp = scale(backend, average="sum")
        ddp(1.0).sum().backward()
        ddp.zero_grad(set_to_none=False)
        ddp.module(1.0).sum().backward()
        return gradients_of(ddp)

    assert on_ranks(2, body) == [(2, 2)] * 2


@pytest.mark.parametrize("average", ["mean", "sum", "contributors"])
def test_what_is_trained_may_change_before_a_forward_past_the_wrapper(
    on_ranks: OnRanks, average: str
) -> None:
    def body(backend: Any) -> Any:
        ddp = scale(backend, average=average)
        seen = []
        for is_trained in (True, False, True):
            ddp.weight.requires_grad_(is_trained)
            ddp.zero_grad()
            ddp.module(backend.rank + 1.0).sum().backward()
            seen.append(gradients_of(ddp))
        return seen

    both = (3, 2) if average == "sum" else (1.5, 1)
    assert on_ranks(2, body) == [[both, (None, both[1]), both]] * 2


@pytest.mark.parametrize("frozen", ["weight", "bias"])
def test_a_parameter_may_be_frozen_after_a_forward_past_the_wrapper(
    on_ranks: OnRanks, frozen: str
) -> None:
    def body(backend: Any) -> Any:
        ddp = scale(backend)
        output = ddp.module(backend.rank + 1.0)
        getattr(ddp, frozen).requires_grad_(False)
        output.sum().backward()
        return gradients_of(ddp)

    expected = (None, 1) if frozen == "weight" else (1.5, None)
    assert on_ranks(2, body) == [expected] * 2


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


def test_a_parameter_may_be_unfrozen_between_forward_and_one_past_the_wrapper(
    on_ranks: OnRanks,
) -> None:
    def body(backend: Any) -> Any:
        module = Scale()
        module.weight.requires_grad_(False)
        ddp = fd.DDP(module, backend)
        ddp(backend.rank + 1.0)  # and no backward
        module.weight.requires_grad_(True)
        module(backend.rank + 1.0).sum().backward()
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


class Parts(nn.ModuleList):
    """Two layers, of which each call uses one."""

    def __init__(self) -> None:
        super().__init__([Scale(), Scale()])

    def forward(self, x: Any, part: int) -> Any:
        return self[part](x)


@OVERLAP
def test_one_backward_may_pass_wrappers_of_which_ranks_use_other_parts(
    on_ranks: OnRanks, overlap: Any
) -> None:
    def body(backend: Any) -> Any:
        first, second = (
            fd.DDP(Parts(), backend, bucket_mb=1e-5, overlap=overlap) for _ in range(2)
        )
        for _ in range(3):
            first.zero_grad()
            second.zero_grad()
            hidden = first(backend.rank + 1.0, backend.rank)
            second(hidden, 1 - backend.rank).sum().backward()
        return gradients_of(first), gradients_of(second)

    assert on_ranks(2, body) == [((0.5, 0.5, 1, 0.5), (1, 0.5, 0.5, 0.5))] * 2


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
        (lambda m: m.float(), "parameter 0 'weight' float32 (1,)"),
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
        assert f"{quoted} on rank 1" in message


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


def test_a_module_converted_to_what_cannot_count_its_ranks_is_refused(
    on_ranks: OnRanks, monkeypatch: pytest.MonkeyPatch
) -> None:
    def body(backend: Any) -> None:
        ddp = scale(backend, average="contributors")
        ddp.bfloat16()
        with monkeypatch.context() as patch:
            patch.setattr(type(backend), "world_size", 257)
            with pytest.raises(ValueError, match="up to 256 ranks, not 257"):
                ddp(1.0)

    on_ranks(1, body)


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


class Skipped(Scale):
    def forward(self, x: Any) -> Any:
        return super().forward(x) if x else x


def test_a_rank_whose_forward_returns_its_input_takes_part(on_ranks: OnRanks) -> None:
    def body(backend: Any) -> Any:
        ddp = fd.DDP(Skipped(), backend)
        x = torch.tensor([2.0 * backend.rank], dtype=torch.float64, requires_grad=True)
        for _ in range(3):
            ddp.zero_grad()
            ddp(x).sum().backward()
        found = gradients_of(ddp), x.grad.item()
        if backend.rank == 0:
            (x + 1).sum().backward()  # no output of forward: the other rank knows of nothing
        ddp(x).sum().backward()
        return found

    assert on_ranks(2, body) == [((1, 0.5), 3)] * 2


def test_inputs_that_forward_returns_are_noticed_while_their_graph_is_kept(
    on_ranks: OnRanks,
) -> None:
    def body(backend: Any) -> Any:
        ddp = fd.DDP(Skipped(), backend)
        x = torch.tensor([2.0 * backend.rank], dtype=torch.float64, requires_grad=True)
        loss = ddp(x).sum()
        for is_kept in True, False:
            loss.backward(retain_graph=is_kept)
        assert not x._backward_hooks
        return gradients_of(ddp), ddp.statistics().num_rounds

    assert on_ranks(2, body) == [((2, 1), 2)] * 2


def test_inputs_that_forwards_return_are_noticed_until_their_own_backward(
    on_ranks: OnRanks,
) -> None:
    class Passed(Scale):
        def forward(self, x: Any) -> Any:
            return x, super().forward(x) if x else x + 1

    def body(backend: Any) -> Any:
        ddp = fd.DDP(Passed(), backend)
        inputs = [
            torch.tensor([backend.rank * i], dtype=torch.float64, requires_grad=True)
            for i in (2.0, 4.0)
        ]
        (_, y), (x, z) = map(ddp, inputs)
        found = []
        for output in y, z if backend.rank else x:
            ddp.zero_grad()
            output.sum().backward()
            found.append(gradients_of(ddp))
        assert not any(x._backward_hooks for x in inputs)
        return found

    assert on_ranks(2, body) == [[(1, 0.5), (2, 0.5)]] * 2


def test_what_torch_func_differentiates_is_averaged_when_backward_comes(on_ranks: OnRanks) -> None:
    def body(backend: Any) -> Any:
        ddp = scale(backend)
        x = torch.tensor([backend.rank + 1.0], dtype=torch.float64)
        slope = torch.func.grad(lambda x: (ddp(x) ** 2).sum())(x)  # 2 weight (weight x + bias)
        slope.sum().backward()
        return slope.item(), gradients_of(ddp)

    assert on_ranks(2, body) == [(2 * (rank + 1), (6, 2)) for rank in range(2)]


def test_backward_with_respect_to_some_parameters_is_averaged(on_ranks: OnRanks) -> None:
    def body(backend: Any) -> Any:
        ddp = scale(backend)
        ddp(backend.rank + 1.0).sum().backward(inputs=[ddp.module.weight])
        return gradients_of(ddp)

    assert on_ranks(2, body) == [(1.5, None)] * 2


def test_a_rank_whose_loss_reaches_none_of_some_parameters_takes_part(on_ranks: OnRanks) -> None:
    class Skips(Scale):
        def forward(self, x: Any) -> Any:
            return x * self.bias if x.item() == 0 else super().forward(x)

    def body(backend: Any) -> Any:
        ddp = fd.DDP(Skips(), backend)
        found = []
        for size in backend.rank, 5.0:
            x = torch.full((1,), size, dtype=torch.float64, requires_grad=True)
            ddp(x).sum().backward(inputs=[x, ddp.module.weight])
            found.append(gradients_of(ddp))
            ddp.zero_grad()
        return found

    assert on_ranks(2, body) == [[(0.5, None), (5, None)]] * 2


def test_backward_with_respect_to_inputs_alone_communicates_nothing(on_ranks: OnRanks) -> None:
    def body(backend: Any) -> Any:
        ddp = scale(backend)
        x = torch.ones(2, dtype=torch.float64, requires_grad=True)
        if backend.rank == 0:
            for inputs in x, [x]:
                ddp(x).sum().backward(inputs=inputs)
        assert ddp.statistics().num_rounds == 0
        ddp(x).sum().backward()
        return gradients_of(ddp)

    assert on_ranks(2, body) == [(2, 2)] * 2


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
        assert "broadcast_parameters()" in message


def step_alone(backend: Any, loss: Callable[[Any], Any]) -> None:
    """Take steps, of which rank 0 leaves out the third."""
    ddp = scale(backend)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    for number in range(5):
        loss(ddp).backward()
        if number != 2 or backend.rank:
            optimizer.step()


def optimize_by_own_loss(backend: Any, loss: Callable[[Any], Any]) -> None:
    """Let each rank decide by its own loss how far to go."""
    ddp = scale(backend)
    optimizer = torch.optim.LBFGS(ddp.parameters(), lr=0.5)

    def closure() -> Any:
        optimizer.zero_grad()
        own = (loss(ddp) - backend.rank).square()
        own.backward()
        return own

    for _ in range(5):
        optimizer.step(closure)


def shorten_own_rows(backend: Any, _: object) -> None:
    """Write in forward to rows that depend on the batch."""

    class Rows(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(4, 2))

        def forward(self, rows: Any) -> Any:
            return nn.functional.embedding(rows, self.weight, max_norm=1.0)

    ddp = fd.DDP(Rows(), backend)
    ddp(torch.tensor([backend.rank])).sum().backward()


def write_by_hand(backend: Any, loss: Callable[[Any], Any]) -> None:
    ddp = scale(backend)
    if backend.rank:
        with torch.no_grad():
            ddp.weight.add_(1)
    loss(ddp).backward()


@OVERLAP
@pytest.mark.parametrize(
    "train", [step_alone, optimize_by_own_loss, shorten_own_rows, write_by_hand]
)
def test_replicas_that_drift_apart_are_noticed(
    on_ranks: OnRanks, train: Callable[..., None], overlap: Any
) -> None:
    def body(backend: Any) -> None:
        with pytest.raises(fd.CollectiveMismatch, match=r"parameter 'weight', bits .* on rank 0;"):
            train(backend, lambda ddp: ddp(backend.rank + 1.0).sum())
        fd.barrier(backend)  # the group is usable

    on_ranks(2, body)


def test_a_rank_may_write_other_weights_and_take_them_back(on_ranks: OnRanks) -> None:
    def body(backend: Any) -> Any:
        ddp = scale(backend)
        for number in range(4):
            if backend.rank == 0 and number:
                with torch.no_grad():
                    ddp.weight.mul_(2).div_(2)
            ddp.zero_grad()
            ddp(backend.rank + 1.0).sum().backward()
        return gradients_of(ddp)

    assert on_ranks(2, body) == [(1.5, 1)] * 2


def test_ranks_may_step_apart_inside_no_sync(on_ranks: OnRanks) -> None:
    """Each starts from its own loss, as in MAML, and one alone takes more steps than the other."""

    def body(backend: Any) -> None:
        ddp = scale(backend)
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
        for number in range(4):
            before = copy.deepcopy(ddp.state_dict())
            for _ in range(1 + backend.rank * number):
                with ddp.no_sync():
                    ddp(backend.rank + 1.0).square().sum().backward()
                optimizer.step()
                optimizer.zero_grad()
            ddp(backend.rank + 1.0).square().sum().backward()
            ddp.load_state_dict(before)
            optimizer.step()
            optimizer.zero_grad()
        ddp.verify()

    on_ranks(2, body)


def test_a_step_that_one_rank_leaves_out_is_noticed_after_a_round_that_failed(
    on_ranks: OnRanks,
) -> None:
    def body(backend: Any) -> None:
        ddp = scale(backend)
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
        for number in range(3):
            ddp(backend.rank + 1.0).sum().backward()
            if number != 2 or backend.rank:
                optimizer.step()
        ddp.weight.requires_grad_(backend.rank == 0)
        with pytest.raises(fd.CollectiveMismatch, match="trained parameter"):
            ddp(1.0).sum().backward()
        ddp.weight.requires_grad_(True)
        optimizer.step()
        with pytest.raises(fd.CollectiveMismatch, match="They were equal once"):
            ddp(1.0).sum().backward()

    on_ranks(2, body)


def test_parameters_that_were_made_equal_are_not_compared(on_ranks: OnRanks) -> None:
    def body(backend: Any) -> Any:
        ddp = scale(backend)
        if backend.rank == 0:
            with torch.no_grad():
                ddp.weight.add_(1)
        ddp.broadcast_parameters()
        ddp(1.0).sum().backward()
        return ddp._reducer.must_compare

    assert on_ranks(2, body) == [False] * 2


def test_ranks_ask_each_other_only_if_writes_are_not_as_before(on_ranks: OnRanks) -> None:
    def body(backend: Any) -> list[int]:
        weight = nn.Parameter(torch.ones(1))
        writes = ParameterWrites([weight], backend)
        asked = []
        for number in range(30):
            if writes.are_unexpected():
                asked.append(number)
            writes.end_round()
            if number % 4 == 3 and number != 27:
                with torch.no_grad():
                    weight.add_(1)
        return asked

    # The first step, what follows it, and how many rounds do; then the step that was left out.
    assert on_ranks(2, body) == [[4, 5, 8, 28, 29]] * 2


def test_one_rank_sets_a_flag_for_all(on_ranks: OnRanks) -> None:
    def body(backend: Any) -> list[bool]:
        agreement = Agreement(backend)
        heard = []
        for flag in (backend.rank == 1, False):
            agreement.ask(tag=3, flag=flag)
            heard.append(agreement.require())
        return heard

    assert on_ranks(2, body) == [[True, False]] * 2


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


class Shuffled(nn.Module):
    """Layers that are registered in the order in which their gradients become ready."""

    def __init__(self) -> None:
        super().__init__()
        self.last, self.first = (nn.Linear(2, 2, bias=False) for _ in range(2))
        for layer in (self.last, self.first):
            nn.init.ones_(layer.weight)

    def forward(self, x: Any) -> Any:
        return self.last(self.first(x))


def test_buckets_follow_the_order_in_which_gradients_become_ready(on_ranks: OnRanks) -> None:
    def body(backend: Any) -> Any:
        ddp = fd.DDP(Shuffled(), backend, bucket_mb=1e-5)
        for _ in range(2):
            ddp(torch.ones(1, 2)).sum().backward()
        return [bucket.names for bucket in ddp.statistics().buckets]

    assert on_ranks(2, body) == [[("last.weight",), ("first.weight",)]] * 2


@OVERLAP
@pytest.mark.parametrize("is_told", [True, False])
def test_a_rank_that_froze_something_alone_comes_back_to_the_order_of_all(
    on_ranks: OnRanks, is_told: bool, overlap: Any
) -> None:
    def body(backend: Any) -> Any:
        ddp = fd.DDP(Shuffled(), backend, overlap=overlap)
        x = torch.full((1, 2), backend.rank + 1.0)
        ddp(x).sum().backward()
        ddp.module.first.requires_grad_(backend.rank == 0)
        if is_told:
            with pytest.raises(fd.CollectiveMismatch):
                ddp(x).sum().backward()
        else:
            ddp(x)
        ddp.module.first.requires_grad_(True)
        ddp.zero_grad()
        ddp(x).sum().backward()
        return [p.grad[0, 0].item() for p in ddp.parameters()]

    assert on_ranks(2, body) == [[3, 3]] * 2


def test_words_of_torch_are_accepted(on_ranks: OnRanks) -> None:
    def body(backend: Any) -> None:
        scale(backend, find_unused_parameters=True, static_graph=True, gradient_as_bucket_view=True)
        with pytest.raises(TypeError):
            scale(backend, no_such_word=True)

    on_ranks(1, body)


@OVERLAP
@pytest.mark.parametrize("is_seen", [True, False])
def test_hooks_see_a_ranks_own_gradients_and_may_change_them(
    on_ranks: OnRanks, is_seen: bool, overlap: Any
) -> None:
    def body(backend: Any) -> Any:
        ddp = scale(backend, overlap=overlap)
        seen: list[float] = []
        for parameter in ddp.parameters():
            parameter.register_post_accumulate_grad_hook(noting_and_doubling(seen))
        for _ in range(2):
            ddp.zero_grad()
            (ddp if is_seen else ddp.module)(backend.rank + 1.0).sum().backward()
        return sorted(seen), gradients_of(ddp)

    assert on_ranks(2, body) == [([1, 1, 1, 1], (3, 2)), ([1, 1, 2, 2], (3, 2))]


@OVERLAP
@pytest.mark.parametrize("when", ["before forward", "in forward", "after forward"])
def test_hooks_may_come_and_go_with_each_step(on_ranks: OnRanks, when: str, overlap: Any) -> None:
    def body(backend: Any) -> Any:
        ddp = scale(backend, overlap=overlap)
        seen: list[float] = []
        results, handles = [], []

        def register(*_: Any) -> None:
            for parameter in ddp.module.parameters():
                hook = noting_and_doubling(seen)
                handles.append(parameter.register_post_accumulate_grad_hook(hook))

        if when == "in forward":
            ddp.module.register_forward_hook(register)
        for _ in range(3):
            ddp.zero_grad()
            seen.clear()
            if when == "before forward":
                register()
            loss = ddp(backend.rank + 1.0).sum()
            if when == "after forward":
                register()
            loss.backward()
            while handles:
                handles.pop().remove()
            results.append((sorted(seen), gradients_of(ddp)))
        return results

    assert on_ranks(2, body) == [[([1, 1], (3, 2))] * 3, [([1, 2], (3, 2))] * 3]


def noting_and_doubling(seen: list[float]) -> Callable[[Any], None]:
    def hook(parameter: Any) -> None:
        seen.append(parameter.grad.item())
        parameter.grad *= 2

    return hook


# Memory


@OVERLAP
def test_memory_is_that_of_gradients_and_one_bucket(on_ranks: OnRanks, overlap: Any) -> None:
    layer_nbytes = 8 * 64 * 64

    def body(backend: Any) -> None:
        layers = [nn.Linear(64, 64, bias=False).double() for _ in range(8)]
        # A lane and padding beside each pair of layers.
        bucket_mb = (2 * layer_nbytes + 64) / 2**20
        ddp = fd.DDP(nn.Sequential(*layers), backend, bucket_mb=bucket_mb, overlap=overlap)
        in_no_bucket = []

        def count(_: Any) -> None:
            buckets = [bucket.buffer for bucket in ddp._reducer.buckets]
            own = [p.grad.numpy() for p in ddp.parameters() if p.grad is not None]
            in_no_bucket.append(
                sum(g.nbytes for g in own if not any(np.shares_memory(g, b) for b in buckets))
            )

        hooks = [p.register_post_accumulate_grad_hook(count) for p in ddp.parameters()]
        for _ in range(2):
            ddp(torch.ones(1, 64, dtype=torch.float64)).sum().backward()
            ddp.zero_grad()
        for hook in hooks:
            hook.remove()  # it holds the wrapper, in a cycle that Python cannot see
        assert len(in_no_bucket) == 2 * 8
        assert max(in_no_bucket) <= 2 * layer_nbytes
        lanes_nbytes = 8 * (8 + 2 * 4)  # of each gradient, and two control lanes for each bucket
        assert sum(bucket.buffer.nbytes for bucket in ddp._reducer.buckets) <= (
            8 * layer_nbytes + lanes_nbytes
        )

    on_ranks(2, body)


@OVERLAP
@pytest.mark.parametrize("average", ["mean", "sum"])
@pytest.mark.parametrize("is_joined", [False, True])
def test_buckets_in_another_order_take_the_memory_of_those_before(
    on_ranks: OnRanks, is_joined: bool, average: str, overlap: Any
) -> None:
    def memory_of(ddp: Any) -> tuple[int, int]:
        extents = [bucket.extent for bucket in ddp._reducer.buckets]
        return min(begin for begin, _ in extents), max(end for _, end in extents)

    def body(backend: Any) -> None:
        module = Upwards(nn.Linear(512, 512, bias=False) for _ in range(8))
        ddp = fd.DDP(module, backend, bucket_mb=2.5, average=average, overlap=overlap)
        begin, end = memory_of(ddp)
        with ddp.join() if is_joined else contextlib.nullcontext():
            for _ in range(1 if is_joined and not backend.rank else 3):
                ddp(torch.ones(1, 512)).sum().backward()
                ddp.zero_grad()
        names = [name for bucket in ddp.statistics().buckets for name in bucket.names]
        assert names == [f"layers.{number}.weight" for number in range(8)]
        new_begin, new_end = memory_of(ddp)
        assert begin <= new_begin
        assert new_end - end <= 2.5 * 2**20  # other buckets, of which one may be larger

    on_ranks(2, body)
