"""Gradients of several backward passes, with weights, and of ranks that run out of data."""

from __future__ import annotations

from collections.abc import Callable
from threading import get_ident
from typing import Any

import numpy as np
import pytest
from ranks_as_threads import OnRanks

torch = pytest.importorskip("torch", reason="torch is not installed")

from integrations.torch.torch_scale import OVERLAP, Scale, gradients_of, note_copies, scale  # noqa: E402
from torch import nn  # noqa: E402 - needs torch
from torch.multiprocessing.reductions import StorageWeakRef  # noqa: E402

import ferro_dist as fd  # noqa: E402
from ferro_dist.integrations.torch.ddp import accumulation  # noqa: E402

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


@pytest.mark.parametrize("is_local", [False, True])
@pytest.mark.parametrize("average", ["mean", "sum"])
def test_gradients_that_are_zeroed_through_data_start_anew(
    on_ranks: OnRanks, average: str, is_local: bool
) -> None:
    def body(backend: Any) -> Any:
        ddp = scale(backend, average=average)
        for _ in range(3):
            ddp(7.0).sum().backward()
            if is_local:
                with ddp.no_sync():
                    ddp(7.0).sum().backward()
            for parameter in ddp.parameters():
                parameter.grad.data.zero_()
        ddp(backend.rank + 1.0).sum().backward()
        return gradients_of(ddp)

    factor = 1 if average == "mean" else 2
    assert on_ranks(2, body) == [(1.5 * factor, 1 * factor)] * 2


@OVERLAP
@pytest.mark.parametrize("average", ["mean", "sum"])
@pytest.mark.parametrize("is_kept", [False, True])
def test_gradients_may_be_given_other_memory(
    on_ranks: OnRanks, is_kept: bool, average: str, overlap: Any
) -> None:
    def body(backend: Any) -> Any:
        ddp = scale(backend, average=average, overlap=overlap)
        found = []
        for _ in range(3):
            ddp(backend.rank + 1.0).sum().backward()
            found.append(gradients_of(ddp))
            for parameter in ddp.parameters():
                parameter.grad.data = 0 * parameter.grad.data
            if not is_kept:
                ddp.zero_grad()
        return found

    factor = 1 if average == "mean" else 2
    assert on_ranks(2, body) == [[(1.5 * factor, 1 * factor)] * 3] * 2


@pytest.mark.parametrize("average", ["mean", "sum"])
def test_what_is_given_other_memory_is_a_ranks_own(on_ranks: OnRanks, average: str) -> None:
    def body(backend: Any) -> Any:
        ddp = scale(backend, average=average)
        ddp(1.0).sum().backward()
        for parameter in ddp.parameters():
            parameter.grad.data = torch.full_like(parameter, backend.rank)
        ddp.sync_gradients()
        return gradients_of(ddp)

    average_of_ranks = 0.5 if average == "mean" else 1
    assert on_ranks(2, body) == [(average_of_ranks, average_of_ranks)] * 2


@OVERLAP
@pytest.mark.parametrize("average", ["mean", "sum"])
def test_a_gradient_may_be_transposed_in_place_before_it_is_dropped(
    on_ranks: OnRanks, average: str, overlap: Any
) -> None:
    def body(backend: Any) -> Any:
        ddp = fd.DDP(nn.Linear(2, 2, bias=False), backend, average=average, overlap=overlap)
        x = (backend.rank + 1) * torch.tensor([1.0, 10.0])
        found = []
        for _ in range(3):
            ddp(x)[0].backward()
            found.append(ddp.weight.grad.tolist())
            if backend.rank == 0:
                ddp.weight.grad.t_()
            ddp.zero_grad()
        return found

    factor = 1.5 if average == "mean" else 3.0
    assert on_ranks(2, body) == [[[[factor, 10 * factor], [0, 0]]] * 3] * 2


@pytest.mark.parametrize("is_local", [False, True])
@pytest.mark.parametrize("average", ["mean", "sum"])
def test_an_average_that_is_converted_counts_once_or_is_refused(
    on_ranks: OnRanks, average: str, is_local: bool
) -> None:
    def body(backend: Any) -> Any:
        ddp = scale(backend, average=average)
        ddp(1.0).sum().backward()
        if is_local:
            with ddp.no_sync():
                ddp(10.0).sum().backward()
        ddp.float()
        if average == "sum":
            with pytest.raises(RuntimeError, match=r"converted to torch.float32 together"):
                ddp(100.0).sum().backward()
            return None
        ddp(100.0).sum().backward()
        return gradients_of(ddp)

    expected = (111, 3) if is_local else (101, 2)
    assert on_ranks(2, body) == [expected if average == "mean" else None] * 2


CONVERSIONS = {
    "other order": lambda module: module.to(memory_format=torch.channels_last),
    "shared memory": lambda module: module.share_memory(),
    "to and fro": lambda module: module.float().double(),
    "rounded twice": lambda module: module.half().bfloat16().double(),
    "copied": lambda module: module._apply(torch.clone),
}
PLACES = {
    "wrapper": lambda ddp: ddp,
    "module": lambda ddp: ddp.module,
    "part": lambda ddp: ddp.module[0],
}


def images(rank: int) -> Any:
    generator = torch.Generator().manual_seed(rank)
    return torch.rand(3, 2, 2, 5, 5, dtype=torch.float64, generator=generator)


def test_memory_of_a_sum_that_was_converted_is_not_used_for_its_successor(
    on_ranks: OnRanks,
) -> None:
    def body(backend: Any) -> None:
        ddp = fd.DDP(nn.Linear(40, 1, bias=False).double(), backend, average="sum")
        x = torch.ones(40, dtype=torch.float64)
        ddp(x).sum().backward()
        with ddp.no_sync():
            ddp(x).sum().backward()
        memory = StorageWeakRef(ddp.module.weight.grad.untyped_storage())
        ddp.float()
        # Gradients are known by their addresses, too: a rounded one must not come back to this one.
        assert not memory.expired()

    on_ranks(2, body)


@pytest.mark.parametrize("is_local", [False, True])
@pytest.mark.parametrize("average", ["mean", "sum", "contributors"])
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("conversion", CONVERSIONS)
def test_an_average_that_is_moved_counts_once_or_is_refused(
    on_ranks: OnRanks, conversion: str, place: str, average: str, is_local: bool
) -> None:
    def body(backend: Any) -> Any:
        first, second, third = images(backend.rank)
        module = nn.Sequential(nn.Conv2d(2, 2, 3, bias=False), nn.Conv2d(2, 2, 1, bias=False))
        ddp = fd.DDP(module.double(), backend, average=average)
        with torch.no_grad():
            for parameter in ddp.parameters():
                parameter.fill_(0.5)  # which no dtype rounds
        ddp(first).sum().backward()
        if is_local:
            with ddp.no_sync():
                ddp(second).sum().backward()
        CONVERSIONS[conversion](PLACES[place](ddp))
        if average != "mean":
            with pytest.raises(RuntimeError, match=r"'0.weight', .* other memory now"):
                ddp(third).sum().backward()
            return None
        ddp(third).sum().backward()
        return [parameter.grad for parameter in ddp.parameters()]

    def expected() -> list[Any]:
        module = nn.Sequential(nn.Conv2d(2, 2, 3, bias=False), nn.Conv2d(2, 2, 1, bias=False))
        for parameter in module.double().parameters():
            nn.init.constant_(parameter, 0.5)
        for rank in range(2):
            first, second, third = images(rank)
            for batch in (first, second, third) if is_local else (first, third):
                (module(batch).sum() / 2).backward()
        return [parameter.grad for parameter in module.parameters()]

    for found in on_ranks(2, body):
        if average == "mean":
            # Some are rounded to bfloat16, of 8 bits.
            torch.testing.assert_close(found, expected(), rtol=2.0**-7, atol=0)


def test_an_average_that_is_moved_is_refused_with_a_weight(on_ranks: OnRanks) -> None:
    def body(backend: Any) -> None:
        ddp = scale(backend, average="sum")
        ddp(1.0).sum().backward()
        with ddp.no_sync():
            ddp(10.0).sum().backward()
        ddp.module.share_memory()
        with pytest.raises(RuntimeError, match=r"'weight'.* other memory now"):
            ddp.sync_gradients(weight=1.0)

    on_ranks(2, body)


def test_an_average_that_is_moved_is_refused_among_ranks_that_leave(on_ranks: OnRanks) -> None:
    def body(backend: Any) -> None:
        ddp = scale(backend)
        ddp(1.0).sum().backward()
        with ddp.join():
            ddp.share_memory()
            with ddp.no_sync(), pytest.raises(RuntimeError, match="other memory now"):
                ddp(1.0).sum().backward()

    on_ranks(2, body)


@pytest.mark.parametrize("change", ["share_memory", "float"])
def test_an_average_that_is_moved_is_refused_by_a_backward_past_the_wrapper(
    on_ranks: OnRanks, change: str
) -> None:
    def body(backend: Any) -> None:
        ddp = scale(backend, average="sum")
        ddp(1.0).sum().backward()
        getattr(ddp, change)()
        with pytest.raises(RuntimeError, match="Set gradients to None"):
            ddp.module(100.0).sum().backward()

    on_ranks(2, body)


def test_an_average_that_torch_swapped_for_another_tensor_is_refused(on_ranks: OnRanks) -> None:
    def body(backend: Any) -> None:
        ddp = scale(backend, average="sum")
        ddp(1.0).sum().backward()
        for parameter in ddp.parameters():
            average, parameter.grad = parameter.grad, None
            torch.utils.swap_tensors(average, average.clone())
            parameter.grad = average
        with pytest.raises(RuntimeError, match="other memory now"):
            ddp(1.0).sum().backward()

    on_ranks(2, body)


def test_an_average_that_was_moved_may_be_zeroed_or_dropped(on_ranks: OnRanks) -> None:
    def body(backend: Any) -> Any:
        ddp = scale(backend, average="sum")
        found = []
        for is_dropped in (True, False, False):
            ddp(backend.rank + 1.0).sum().backward()
            found.append(gradients_of(ddp))
            ddp.share_memory()
            ddp.zero_grad(set_to_none=is_dropped)
            ddp.float().double()
        return found

    assert on_ranks(2, body) == [[(3, 2)] * 3] * 2


@pytest.mark.parametrize("is_local", [False, True])
def test_a_converted_average_is_refused_again_and_kept(on_ranks: OnRanks, is_local: bool) -> None:
    def body(backend: Any) -> Any:
        ddp = fd.DDP(nn.Sequential(Scale().float(), Scale()), backend, average="sum")
        ddp(1.0).sum().backward()
        with ddp.no_sync():
            if is_local:
                ddp(10.0).sum().backward()
            ddp.float()
            before = [parameter.grad.tolist() for parameter in ddp.parameters()]
            for _ in range(2):
                with pytest.raises(RuntimeError, match="converted"):
                    ddp(100.0).sum().backward()
        return before == [parameter.grad.tolist() for parameter in ddp.parameters()]

    assert on_ranks(2, body) == [True, True]


@pytest.mark.parametrize("is_local", [False, True])
def test_an_average_of_another_shape_is_refused(on_ranks: OnRanks, is_local: bool) -> None:
    def body(backend: Any) -> None:
        ddp = scale(backend, average="sum")
        ddp(1.0).sum().backward()
        if is_local:
            with ddp.no_sync():
                ddp(10.0).sum().backward()
        ddp.weight.data = torch.ones(4, dtype=torch.float64)
        with pytest.raises(RuntimeError, match=r"'weight' was given shape \(4,\), .* shape \(1,\)"):
            ddp(100.0).sum().backward()

    on_ranks(2, body)


REPLACED = {
    "detached": torch.Tensor.detach,
    "as data": lambda gradient: gradient.data,
    "expanded": lambda gradient: gradient.expand(1),
}


@pytest.mark.parametrize("is_local", [False, True])
@pytest.mark.parametrize("average", ["mean", "sum"])
@pytest.mark.parametrize("replaced", REPLACED)
def test_an_average_may_be_another_tensor_over_its_memory(
    on_ranks: OnRanks, replaced: str, average: str, is_local: bool
) -> None:
    def body(backend: Any) -> Any:
        ddp = scale(backend, average=average)
        ddp(backend.rank + 1.0).sum().backward()
        if is_local:
            with ddp.no_sync():
                ddp(10 * (backend.rank + 1.0)).sum().backward()
        for parameter in ddp.parameters():
            parameter.grad = REPLACED[replaced](parameter.grad)
        ddp(100 * (backend.rank + 1.0)).sum().backward()
        return gradients_of(ddp)

    factor = 1 if average == "mean" else 2
    total = (166.5, 3) if is_local else (151.5, 2)
    assert on_ranks(2, body) == [tuple(factor * each for each in total)] * 2


def test_what_autograd_has_recorded_of_gradients_does_not_outlast_them(on_ranks: OnRanks) -> None:
    def body(backend: Any) -> Any:
        ddp = scale(backend)
        found = []
        for _ in range(2):
            ddp(backend.rank + 1.0).sum().backward()
            assert not ddp.weight.grad.requires_grad
            for parameter in ddp.parameters():
                parameter.grad += 2 * parameter
            found.append(gradients_of(ddp))
            ddp.zero_grad()
        return found

    assert on_ranks(2, body) == [[(3.5, 1)] * 2] * 2


@pytest.mark.parametrize("is_detached", [False, True])
@pytest.mark.parametrize("is_local", [False, True])
def test_an_average_outlasts_a_backward_in_which_its_parameter_is_frozen(
    on_ranks: OnRanks, is_local: bool, is_detached: bool
) -> None:
    def body(backend: Any) -> Any:
        ddp = scale(backend, average="sum")
        ddp(backend.rank + 1.0).sum().backward()
        if is_local:
            with ddp.no_sync():
                ddp(100.0).sum().backward()
        ddp.weight.requires_grad_(False)
        if is_detached:
            ddp.weight.grad = ddp.weight.grad.detach()
        ddp(1000.0).sum().backward()
        ddp.weight.requires_grad_(True)
        ddp(10.0).sum().backward()
        return gradients_of(ddp)

    assert on_ranks(2, body) == [(223, 8) if is_local else (23, 6)] * 2


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
        with pytest.raises(ValueError, match="sum of the weights of all ranks is infinite"):
            ddp.sync_gradients(weight=1e308)
        with pytest.raises(fd.CollectiveMismatch):
            ddp.sync_gradients(weight=None if backend.rank else 2.0)
        for weight in (-1, float("nan"), True, "3"):
            with pytest.raises((TypeError, ValueError)):
                ddp.sync_gradients(weight=weight)
        with pytest.raises(ValueError, match="takes no weight"):
            scale(backend, average="contributors").sync_gradients(weight=1)
        fd.barrier(backend)

    on_ranks(2, body)


@pytest.mark.parametrize("average", ["mean", "sum"])
def test_a_weight_for_what_backward_has_averaged_is_refused(
    on_ranks: OnRanks, average: str
) -> None:
    def body(backend: Any) -> Any:
        ddp = scale(backend, average=average)
        ddp(1.0).sum().backward()
        with pytest.raises(ValueError, match=r"Call backward inside no_sync\(\)"):
            ddp.sync_gradients(weight=1)
        with ddp.no_sync():
            ddp(backend.rank * 4.0).sum().backward()
        ddp.sync_gradients(weight=[1, 3][backend.rank])
        return gradients_of(ddp)

    expected = (1 + 3, 2) if average == "mean" else (2 + 12, 2 + 4)
    assert on_ranks(2, body) == [expected] * 2


def test_a_weight_for_what_was_averaged_in_its_place_is_refused(on_ranks: OnRanks) -> None:
    def body(backend: Any) -> Any:
        ddp = scale(backend)
        ddp(1.0).sum().backward()
        with ddp.no_sync():
            ddp(1.0).sum().backward()
        ddp(1.0).sum().backward()
        with pytest.raises(ValueError, match=r"Call backward inside no_sync\(\)"):
            ddp.sync_gradients(weight=1 + backend.rank)

    on_ranks(2, body)


@pytest.mark.parametrize("weights", [(0, 1), (1, 1)])
def test_a_weight_for_what_backward_has_averaged_is_refused_on_all(
    on_ranks: OnRanks, weights: tuple[int, int]
) -> None:
    def body(backend: Any) -> Any:
        ddp = scale(backend)
        ddp(1.0).sum().backward()
        if backend.rank == 0:
            ddp.zero_grad()
            with ddp.no_sync():
                ddp(8.0).sum().backward()
        for _ in range(2):
            with pytest.raises(ValueError, match=r"Call backward inside no_sync\(\)"):
                ddp.sync_gradients(weight=weights[backend.rank])
        ddp.sync_gradients()
        return gradients_of(ddp)

    assert on_ranks(2, body) == [((8 + 1) / 2, 1)] * 2


def test_gradients_may_be_written_where_weighted_averages_were(on_ranks: OnRanks) -> None:
    def body(backend: Any) -> Any:
        ddp = scale(backend)
        for parameter in ddp.parameters():
            parameter.grad = torch.empty_like(parameter)
        found = []
        for step in range(3):
            for parameter in ddp.parameters():
                parameter.grad.fill_(4.0 * backend.rank + step)
            ddp.sync_gradients(weight=[1, 3][backend.rank])
            found.append(gradients_of(ddp))
        return found

    assert on_ranks(2, body) == [[(3, 3), (4, 4), (5, 5)]] * 2


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


@pytest.mark.parametrize("average", ["mean", "sum"])
def test_gradients_of_parameters_outlast_those_that_are_handed_over(
    on_ranks: OnRanks, average: str
) -> None:
    def body(backend: Any) -> Any:
        ddp = scale(backend, average=average)
        ddp(backend.rank + 1.0).sum().backward()
        for _ in range(2):
            ddp.sync_gradients({"weight": torch.full((1,), 5.0, dtype=torch.float64)})
        after = gradients_of(ddp)
        ddp(10 * (backend.rank + 1.0)).sum().backward()
        return after, gradients_of(ddp)

    factor = 1 if average == "mean" else 2
    assert on_ranks(2, body) == [((1.5 * factor, factor), (16.5 * factor, 2 * factor))] * 2


@pytest.mark.parametrize("average", ["mean", "sum"])
def test_gradients_may_be_handed_over_and_set_in_inference_mode(
    on_ranks: OnRanks, average: str
) -> None:
    def body(backend: Any) -> Any:
        ddp = scale(backend, average=average)
        ddp(backend.rank + 1.0).sum().backward()
        with torch.inference_mode():
            ddp.sync_gradients({"bias": torch.ones(1, dtype=torch.float64)})
        ddp(10 * (backend.rank + 1.0)).sum().backward()
        after = gradients_of(ddp)
        with torch.inference_mode():
            ddp.weight.grad = torch.full((1,), backend.rank + 1.0, dtype=torch.float64)
        ddp.sync_gradients()
        return after, gradients_of(ddp)

    factor = 1 if average == "mean" else 2
    assert on_ranks(2, body) == [((16.5 * factor, 2 * factor), (1.5 * factor, 2 * factor))] * 2


def test_what_a_mismatch_leaves_beside_an_average_outlasts_what_is_handed_over(
    on_ranks: OnRanks,
) -> None:
    def body(backend: Any) -> Any:
        ddp = scale(backend, average="sum")
        ddp(1.0).sum().backward()
        ddp.bias.requires_grad_(backend.rank == 0)
        with pytest.raises(fd.CollectiveMismatch):
            ddp(10.0).sum().backward()
        ddp.bias.requires_grad_(True)
        ddp.sync_gradients({"weight": torch.full((1,), 5.0, dtype=torch.float64)})
        ddp(100.0).sum().backward()
        return gradients_of(ddp)

    # Rank 1 has added nothing to the bias, which was frozen there.
    assert on_ranks(2, body) == [(222, 5)] * 2


def test_gradients_of_parameters_may_be_handed_over_themselves(on_ranks: OnRanks) -> None:
    def body(backend: Any) -> Any:
        ddp = scale(backend)
        ddp(backend.rank + 1.0).sum().backward()
        ddp.weight.grad.fill_(backend.rank)
        ddp.sync_gradients({"weight": ddp.weight.grad})
        return gradients_of(ddp)

    assert on_ranks(2, body) == [(0.5, 1)] * 2


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


def test_gradients_handed_over_do_not_change_with_the_next(on_ranks: OnRanks) -> None:
    def body(backend: Any) -> Any:
        ddp = scale(backend)
        outcomes = [
            ddp.sync_gradients([torch.full_like(p, x + backend.rank) for p in ddp.parameters()])
            for x in (1.0, 2.0, 3.0)
        ]
        return [[gradient.item() for gradient in outcome] for outcome in outcomes]

    assert on_ranks(2, body) == [[[1.5, 1.5], [2.5, 2.5], [3.5, 3.5]]] * 2


def test_averages_that_are_kept_can_be_used_after_an_average_in_inference_mode(
    on_ranks: OnRanks,
) -> None:
    def body(backend: Any) -> None:
        ddp = scale(backend)
        ddp(1.0).sum().backward()
        kept = [p.grad for p in ddp.parameters()]
        ddp.zero_grad()
        with torch.inference_mode():
            ddp.sync_gradients([torch.ones_like(p) for p in ddp.parameters()])
        for gradient in kept:
            gradient.requires_grad_().square().sum().backward()

    on_ranks(2, body)


def test_a_sum_that_lies_where_buckets_were_is_left_alone(
    on_ranks: OnRanks, monkeypatch: pytest.MonkeyPatch
) -> None:
    places: dict[int, Any] = {}

    def add(a: Any, b: Any) -> Any:
        place = places.pop(get_ident(), None)
        return a + b if place is None else place.copy_(a + b)

    monkeypatch.setattr(accumulation, "add", add)

    def body(backend: Any) -> Any:
        ddp = scale(backend, average="sum")
        ddp(1.0).sum().backward()
        places[get_ident()] = ddp._reducer.bucket_of[0].flat[:1]  # as if it was freed since
        ddp.module.bias.requires_grad_(False)  # buckets are laid out anew
        with ddp.no_sync():
            ddp(10.0).sum().backward()
        ddp.sync_gradients([torch.ones(1, dtype=torch.float64)])
        ddp.sync_gradients()
        return gradients_of(ddp)

    assert on_ranks(2, body) == [(2 + 20, 2)] * 2
    assert not places


def test_averages_that_are_not_kept_are_not_copied_for_gradients_handed_over(
    on_ranks: OnRanks, monkeypatch: pytest.MonkeyPatch
) -> None:
    def body(backend: Any) -> None:
        ddp = scale(backend)
        for _ in range(3):
            ddp(1.0).sum().backward()
            ddp.zero_grad()
            ddp.sync_gradients([torch.ones_like(p) for p in ddp.parameters()])

    copies = note_copies(monkeypatch)
    on_ranks(2, body)
    assert not copies


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


def test_an_average_cannot_be_asked_for_in_a_backward(on_ranks: OnRanks) -> None:
    def body(backend: Any) -> None:
        ddp = scale(backend)
        hook = ddp.bias.register_hook(lambda _: ddp.sync_gradients())
        told = pytest.raises(RuntimeError, match="inside, call this once it has ended")
        with ddp.no_sync(), told:
            ddp(1.0).sum().backward()
        hook.remove()
        ddp(1.0).sum().backward()
        assert gradients_of(ddp) == (1, 1)

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


@pytest.mark.parametrize("is_stepped_in_backward", [False, True])
def test_optimizers_of_ranks_that_left_early_go_on_as_the_others(
    on_ranks: OnRanks, is_stepped_in_backward: bool
) -> None:
    def body(backend: Any) -> None:
        torch.manual_seed(1)
        ddp = fd.DDP(nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1)), backend)
        optimizer = torch.optim.Adam(ddp.parameters(), lr=0.1)
        if is_stepped_in_backward:
            ddp.step_in_backward(optimizer)
        for epoch in range(3):
            with ddp.join(*[] if is_stepped_in_backward else [optimizer]):
                for _ in range((backend.rank + epoch) % 3):
                    ddp(torch.randn(4, 3) + backend.rank).square().mean().backward()
                    if not is_stepped_in_backward:
                        optimizer.step()
                        optimizer.zero_grad()
            optimizer.zero_grad()
            ddp.verify()
            steps = [int(state["step"]) for state in optimizer.state.values()]
            assert steps == [2 * (epoch + 1)] * 4
        ddp(torch.randn(4, 3) + backend.rank).square().mean().backward()
        if not is_stepped_in_backward:
            optimizer.step()
        ddp.verify()

    on_ranks(3, body)


def train_rank_0_longer(backend: Any, make: Callable[[Any], Any], dtype: Any) -> Any:
    torch.manual_seed(1)
    ddp = fd.DDP(nn.Linear(3, 2).to(dtype), backend)
    optimizer = make(list(ddp.parameters()))

    def step() -> None:
        ddp(torch.randn(4, 3, dtype=dtype) + backend.rank).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    with ddp.join(optimizer):
        for _ in range(3 - 2 * backend.rank):
            step()
    optimizer.zero_grad()
    for _ in range(30):
        step()
    ddp.verify()
    return optimizer


@pytest.mark.parametrize("name", ["ASGD", "NAdam", "SGD"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_optimizers_go_on_alike_whatever_the_dtype_of_their_state(
    on_ranks: OnRanks, name: str, dtype: Any
) -> None:
    def body(backend: Any) -> Any:
        optimizer = train_rank_0_longer(backend, getattr(torch.optim, name), dtype)
        return [
            {key: getattr(value, "dtype", None) for key, value in state.items()}
            for state in optimizer.state.values()
        ]

    first, second = on_ranks(2, body)
    assert first == second


def test_options_that_are_tensors_or_numbers_of_numpy_are_brought_along(on_ranks: OnRanks) -> None:
    def body(backend: Any) -> Any:
        lr = torch.tensor(0.1 + backend.rank)
        betas = (np.float64(0.9), np.float64(0.99))

        def make(parameters: Any) -> Any:
            return torch.optim.Adam(parameters, lr=lr, betas=betas, foreach=False, amsgrad=True)

        (group,) = train_rank_0_longer(backend, make, torch.float32).param_groups
        assert group["lr"] is lr  # which others may hold, too
        return lr.item(), tuple(map(float, group["betas"]))

    first, second = on_ranks(2, body)
    assert first == second


def test_state_that_cannot_be_brought_along_is_told_on_all_ranks(on_ranks: OnRanks) -> None:
    def body(backend: Any) -> None:
        ddp = scale(backend)
        optimizer = torch.optim.SGD(ddp.parameters(), lr=1)
        told = pytest.raises(ValueError, match="state of SGD cannot be given to other ranks")
        with told, ddp.join(optimizer):
            ddp(1.0).sum().backward()
            optimizer.param_groups[0]["schedule"] = body
        fd.barrier(backend)

    on_ranks(2, body)


def test_an_optimizer_given_on_one_rank_alone_is_told(on_ranks: OnRanks) -> None:
    def body(backend: Any) -> None:
        ddp = scale(backend)
        optimizers = [torch.optim.SGD(ddp.parameters(), lr=1)] if backend.rank else []
        with (
            pytest.raises(fd.CollectiveMismatch, match="nothing on rank 0; SGD on rank 1"),
            ddp.join(*optimizers),
        ):
            pass
        fd.barrier(backend)

    on_ranks(2, body)


def test_a_sharded_optimizer_that_steps_in_backward_cannot_be_joined(on_ranks: OnRanks) -> None:
    def body(backend: Any) -> None:
        ddp = scale(backend)
        sharded = fd.ShardedOptimizer(
            ddp.parameters(), torch.optim.SGD, backend, average=None, lr=1
        )
        ddp.step_in_backward(sharded)
        with pytest.raises(ValueError, match="together"), ddp.join():
            pass

    on_ranks(2, body)


def test_optimizers_that_cannot_be_brought_along_are_refused(on_ranks: OnRanks) -> None:
    def body(backend: Any) -> None:
        ddp = scale(backend)
        stranger = torch.optim.SGD(Scale().parameters(), lr=1)
        sharded = fd.ShardedOptimizer(ddp.parameters(), torch.optim.SGD, backend, lr=1)
        for optimizer, told in [(1, "not int"), (stranger, "none of the"), (sharded, "together")]:
            with pytest.raises((TypeError, ValueError), match=told), ddp.join(optimizer):
                pass
        mine = [ddp.weight] if backend.rank else list(ddp.parameters())
        with (
            pytest.raises(fd.CollectiveMismatch, match="'bias' in group 0 on rank 0"),
            ddp.join(torch.optim.SGD(mine, lr=1)),
        ):
            pass
        ddp(1.0).sum().backward()
        assert gradients_of(ddp) == (1, 1)

    on_ranks(2, body)


def test_ranks_that_normalize_together_cannot_run_out(on_ranks: OnRanks) -> None:
    def body(backend: Any) -> None:
        module = nn.Sequential(nn.BatchNorm1d(1), Scale().float())
        ddp = fd.DDP(fd.convert_sync_batchnorm(module, backend), backend)
        with pytest.raises(ValueError, match="a SyncBatchNorm in training waits"), ddp.join():
            pass
        module[0].eval()
        with ddp.join():
            for _ in range(backend.rank):
                ddp(torch.ones(2, 1)).sum().backward()
        ddp.verify()

    on_ranks(2, body)


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


@OVERLAP
def test_what_was_averaged_in_its_place_counts_once_where_ranks_run_out(
    on_ranks: OnRanks, overlap: Any
) -> None:
    def body(backend: Any) -> Any:
        ddp = scale(backend, overlap=overlap)
        ddp(1.0).sum().backward()
        with ddp.no_sync():
            ddp(backend.rank + 1.0).sum().backward()
        ddp(1.0).sum().backward()
        with ddp.join():
            for _ in range(1 - backend.rank):
                (10 * ddp(1.0)).sum().backward()
        return gradients_of(ddp)

    assert on_ranks(2, body)[0] == (3.5 + 5, 3 + 5)


@pytest.mark.parametrize("change", ["unfreeze", "convert"])
def test_a_rank_without_any_batch_notices_what_has_become_of_the_module(
    on_ranks: OnRanks, change: str
) -> None:
    def body(backend: Any) -> Any:
        ddp = scale(backend)
        ddp.module.weight.requires_grad_(False)
        ddp(1.0).sum().backward()
        ddp.zero_grad()
        if change == "unfreeze":
            ddp.module.weight.requires_grad_(True)
        else:
            ddp.half()
        with ddp.join():
            for _ in range(backend.rank):
                ddp(1.0).sum().backward()
        return gradients_of(ddp)

    assert on_ranks(2, body)[1] == (0.5 if change == "unfreeze" else None, 0.5)


def test_a_rank_notices_what_it_unfreezes_after_its_last_batch(on_ranks: OnRanks) -> None:
    def body(backend: Any) -> Any:
        ddp = scale(backend)
        ddp.module.weight.requires_grad_(False)
        with ddp.join():
            for _ in range(1 + backend.rank):
                ddp(1.0).sum().backward()
                ddp.module.weight.requires_grad_(True)
        return gradients_of(ddp)

    assert on_ranks(2, body)[1] == (0.5, 1.5)


def test_what_is_unfrozen_where_a_rank_has_run_out_is_told_on_all(on_ranks: OnRanks) -> None:
    def body(backend: Any) -> None:
        ddp = scale(backend)
        ddp.module.weight.requires_grad_(False)
        reason = r"'weight'[^.]*\.\nInside join, .* before"
        told = pytest.raises(fd.CollectiveMismatch, match=reason)
        with told, ddp.join():
            for batch in range(2 * backend.rank):
                ddp.module.weight.requires_grad_(batch == 1)
                ddp(1.0).sum().backward()
                ddp.module.bias.data += 1
        ddp.broadcast_parameters(1)
        ddp.verify()

    on_ranks(2, body)


@pytest.mark.parametrize("is_frozen", [False, True])
@pytest.mark.parametrize("average", ["mean", "sum", "contributors"])
def test_gradients_of_join_that_are_zeroed_in_place_step_alike_on_all_ranks(
    on_ranks: OnRanks, average: str, is_frozen: bool
) -> None:
    def body(backend: Any) -> None:
        rows = nn.Embedding(2, 1, sparse=True).double()
        ddp = fd.DDP(nn.ModuleList([Scale(), Scale(), rows]), backend, average=average)
        optimizer = torch.optim.SGD(ddp.module[:2].parameters(), lr=0.1, momentum=0.9)

        def step(layer: int) -> None:
            ddp.module[layer](torch.tensor(1)).sum().backward()
            optimizer.step()

        with ddp.join(optimizer):
            step(1 - backend.rank)  # a layer whose last gradient is zeroed or dropped
            optimizer.zero_grad(set_to_none=backend.rank == 1)
            for layer in [0, 2] * backend.rank:
                step(layer)
        ddp.zero_grad(set_to_none=False)
        ddp.module[1].requires_grad_(not is_frozen)
        step(0)
        ddp.verify()
        assert [p.grad.is_sparse for p in ddp.parameters() if p.grad is not None][-1]
        assert [p.grad is None for p in ddp.parameters()] == [False, False, True, True, False]

    on_ranks(2, body)


@OVERLAP
@pytest.mark.parametrize("average", ["mean", "sum", "contributors"])
def test_averages_that_are_kept_stay_where_a_rank_has_run_out(
    on_ranks: OnRanks, average: str, overlap: Any
) -> None:
    def body(backend: Any) -> None:
        ddp = scale(backend, average=average, overlap=overlap)
        for _ in range(2):  # the order of buckets is settled
            ddp.zero_grad()
            ddp(1.0).sum().backward()
        kept = [p.grad for p in ddp.parameters()]
        before = gradients_of(ddp)
        ddp.zero_grad()
        with ddp.join():
            for _ in range(2 * backend.rank):
                ddp(7.0).sum().backward()
                ddp.zero_grad()
        ddp(5.0).sum().backward()
        assert tuple(gradient.item() for gradient in kept) == before
        assert gradients_of(ddp) == ((10, 2) if average == "sum" else (5, 1))

    on_ranks(2, body)


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
