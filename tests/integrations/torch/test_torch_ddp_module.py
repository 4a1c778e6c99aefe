"""DDP of a torch module behaves as the module does."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from ranks_as_threads import OnRanks

torch = pytest.importorskip("torch", reason="torch is not installed")

from integrations.torch.torch_cases import non_reentrant  # noqa: E402
from integrations.torch.torch_scale import OVERLAP, Scale, Upwards, gradients_of, scale  # noqa: E402
from torch import nn  # noqa: E402 - needs torch

import ferro_dist as fd  # noqa: E402
from ferro_dist.integrations.torch.ddp.gradients import gpu_view  # noqa: E402
from ferro_dist.integrations.torch.uncompiled import uncompiled  # noqa: E402
from ferro_dist.parallel.buckets.bucket import ParameterSpec  # noqa: E402

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


def test_a_parameter_may_be_a_buffer_as_well(on_ranks: OnRanks) -> None:
    def body(backend: Any) -> Any:
        layer = torch.nn.Linear(1, 1, bias=False)
        layer.register_buffer("kernel", layer.weight)
        ddp = fd.DDP(layer, backend)
        ddp(torch.full((1, 1), float(backend.rank))).sum().backward()
        return layer.weight.grad.item()

    assert on_ranks(2, body) == [0.5, 0.5]


def test_buffers_may_be_resized_and_converted(on_ranks: OnRanks) -> None:
    def body(backend: Any) -> Any:
        norm = nn.BatchNorm1d(2)
        norm.register_buffer("mask", torch.ones(1))
        ddp = fd.DDP(norm, backend, root=1)
        ddp(torch.randn(4, 2)).sum().backward()
        norm.mask = torch.full((3,), float(backend.rank))
        ddp.double()
        ddp(torch.full((4, 2), backend.rank, dtype=torch.float64)).sum().backward()
        ddp.verify()
        return norm.mask.dtype, norm.mask.tolist()

    assert on_ranks(2, body) == [(torch.float64, [1, 1, 1])] * 2


def test_a_rank_that_resizes_a_buffer_alone_is_named(on_ranks: OnRanks) -> None:
    def body(backend: Any) -> Any:
        layer = nn.Linear(2, 1)
        layer.register_buffer("mask", torch.zeros(2))
        ddp = fd.DDP(layer, backend)
        if backend.rank == 1:
            layer.mask = torch.zeros(1, 2)  # of as many bytes
        with pytest.raises(fd.CollectiveMismatch, match=r"'mask' float32 \(1, 2\) on rank 1"):
            ddp(torch.ones(1, 2)).sum().backward()
        layer.mask = torch.full((1, 2), backend.rank + 1.0)
        ddp(torch.ones(1, 2)).sum().backward()
        return layer.mask.tolist()

    assert on_ranks(3, body) == [[[1, 1]]] * 3


def test_buffers_may_come_and_go(on_ranks: OnRanks) -> None:
    def body(backend: Any) -> Any:
        layer = nn.Linear(2, 1)
        layer.register_buffer("scale", None)
        ddp = fd.DDP(layer, backend)
        ddp(torch.ones(1, 2)).sum().backward()
        layer.scale = torch.full((2,), backend.rank + 1.0)
        layer.register_buffer("count", torch.tensor(backend.rank + 5))
        with pytest.raises(fd.CollectiveMismatch, match="buffer 'scale'"):
            ddp.verify()
        ddp(torch.ones(1, 2)).sum().backward()
        ddp.verify()
        shared = layer.scale.tolist(), layer.count.item()
        layer.scale = None
        ddp(torch.ones(1, 2)).sum().backward()
        return shared

    assert on_ranks(2, body) == [([1, 1], 5)] * 2


def test_a_rank_whose_buffer_is_gone_is_named(on_ranks: OnRanks) -> None:
    def body(backend: Any) -> None:
        norm = nn.BatchNorm1d(2)
        ddp = fd.DDP(norm, backend)
        loss = ddp(torch.randn(4, 2)).sum()
        if backend.rank == 1:
            norm.running_mean = None
        with pytest.raises(fd.CollectiveMismatch, match=r"'running_mean'.*rank 1"):
            loss.backward()

    on_ranks(2, body)


def test_a_graph_that_is_kept_survives_the_exchange_of_buffers(on_ranks: OnRanks) -> None:
    def body(backend: Any) -> None:
        ddp = fd.DDP(nn.BatchNorm1d(2), backend)
        y = ddp(torch.randn(4, 2))
        y.square().sum().backward(retain_graph=True)
        y.square().sum().backward()

    on_ranks(2, body)


@pytest.mark.filterwarnings("ignore:`torch.jit.script")  # of torch's own
def test_buffers_of_a_scripted_module_are_those_of_root(on_ranks: OnRanks) -> None:
    def body(backend: Any, norm: Any) -> Any:
        ddp = fd.DDP(norm, backend)
        for _ in range(2):
            ddp(torch.full((4, 2), 1.0 + backend.rank)).sum().backward()
            ddp.verify()
        return norm.running_mean.tolist(), norm.bias.grad.tolist()

    norms = [torch.jit.script(nn.BatchNorm1d(2)) for _ in range(2)]
    results = on_ranks(2, lambda backend: body(backend, norms[backend.rank]))
    assert results == [(pytest.approx([0.19, 0.19]), [8, 8])] * 2


def without_weights(size: int) -> nn.Module:
    return nn.BatchNorm1d(size, affine=False)


def test_buffers_of_a_part_that_was_replaced_are_those_of_root(on_ranks: OnRanks) -> None:
    def body(backend: Any) -> Any:
        net = nn.Sequential(nn.Linear(2, 2), without_weights(2))
        ddp = fd.DDP(net, backend)
        outcome = []
        for part in (without_weights(2), nn.Sequential(nn.Softmax(-1), without_weights(2))):
            net[1] = part
            torch.manual_seed(backend.rank)
            ddp(torch.randn(4, 2)).sum().backward()
            ddp.verify()
            outcome.append(next(iter(part.buffers())).tolist())
        net[1] = nn.Identity()
        ddp(torch.randn(4, 2)).sum().backward()
        return outcome

    first, second = on_ranks(2, body)
    assert first == second
    assert any(first[1])


def test_a_rank_that_replaces_a_part_alone_is_named(on_ranks: OnRanks) -> None:
    def body(backend: Any) -> None:
        net = nn.Sequential(nn.Linear(2, 2), without_weights(2))
        ddp = fd.DDP(net, backend)
        if backend.rank == 1:
            net[1] = nn.Identity()
        with pytest.raises(fd.CollectiveMismatch, match=r"'1\.running_mean'.*rank 1"):
            ddp(torch.randn(4, 2)).sum().backward()
        net[1] = nn.Identity()
        ddp(torch.randn(4, 2)).sum().backward()

    on_ranks(2, body)


class Scaled(nn.Module):
    """Divides by a running scale, which has a part in the gradients."""

    def __init__(self, update: Callable[[Any, Any], None]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.register_buffer("scale", torch.ones(2))
        self.update = update

    def forward(self, x: Any) -> Any:
        y = x * self.weight
        with torch.no_grad():
            self.update(self, y.std(0))
        return y / self.scale


def replace_scale(layer: Any, scale: Any) -> None:
    layer.scale = 0.5 * layer.scale + 0.5 * scale


@pytest.mark.parametrize(
    "update", [replace_scale, lambda layer, scale: layer.scale.lerp_(scale, 0.5)]
)
def test_a_graph_does_not_go_on_with_the_buffer_of_another_rank(
    on_ranks: OnRanks, update: Callable[[Any, Any], None]
) -> None:
    def body(backend: Any) -> None:
        ddp = fd.DDP(Scaled(update), backend)
        torch.manual_seed(backend.rank)
        for _ in range(2):
            y = ddp(torch.randn(4, 2))
            y.sum().backward(retain_graph=True)
            with ddp.no_sync(), pytest.raises(RuntimeError, match="modified by an inplace"):
                y.sum().backward()

    on_ranks(2, body)


def test_a_graph_goes_on_with_a_buffer_that_stays_as_it_is(on_ranks: OnRanks) -> None:
    def body(backend: Any) -> None:
        ddp = fd.DDP(Scaled(lambda layer, scale: None), backend)
        for _ in range(2):
            y = ddp(torch.randn(4, 2))
            y.sum().backward(retain_graph=True)
            y.sum().backward()

    on_ranks(2, body)


def test_a_graph_does_not_go_on_with_parameters_of_another_rank(on_ranks: OnRanks) -> None:
    def body(backend: Any) -> None:
        layer = nn.Linear(2, 1, bias=False)
        ddp = fd.DDP(layer, backend)
        loss = ddp(torch.ones(1, 2).requires_grad_()).sum()
        ddp.broadcast_parameters()
        with pytest.raises(RuntimeError, match="modified by an inplace"):
            loss.backward()

    on_ranks(1, body)


# As the module behaves


def test_the_wrapper_is_a_module(on_ranks: OnRanks) -> None:
    has_long_text = sys.version_info >= (3, 11)
    unknown = "'Scale' object has no attribute" if has_long_text else "^no_such_attribute$"

    def body(backend: Any) -> None:
        ddp = scale(backend)
        assert isinstance(ddp, fd.DDP)
        assert isinstance(ddp, nn.Module)
        assert ddp.backend is backend
        assert ddp.learning_rate == 0.1
        ddp.learning_rate = 0.2
        assert ddp.module.learning_rate == 0.2
        del ddp.learning_rate
        assert not hasattr(ddp.module, "learning_rate")
        assert ddp.weight is ddp.module.weight
        ddp.register_buffer("mean", torch.zeros(1))
        assert ddp.register_buffer.__qualname__ == "ModuleWrapper.register_buffer"
        assert list(ddp.state_dict()) == ["weight", "bias", "mean"]
        assert not ddp.eval().module.training
        assert ddp.train().module.training
        assert [name for name, _ in ddp.named_parameters()] == ["weight", "bias"]
        assert not hasattr(ddp, "no_such_attribute")
        with pytest.raises(AttributeError):
            ddp.module = Scale()
        with pytest.raises(AttributeError):
            del ddp.module
        with pytest.raises(AttributeError, match=unknown):
            del ddp.no_such_attribute
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


class Nested(Scale):
    """Has a child of the name that a wrapper gives to its module."""

    def __init__(self) -> None:
        super().__init__()
        self.module = Scale()
        self.module.module = Scale()


@pytest.mark.parametrize("is_enclosed", [False, True])
@pytest.mark.parametrize("wrapper", ["", "module."])
def test_a_child_may_have_the_name_that_wrappers_give(
    on_ranks: OnRanks, is_enclosed: bool, wrapper: str
) -> None:
    def body(backend: Any) -> None:
        module = Nested()
        numbers = {name: torch.full((1,), float(n)) for n, name in enumerate(module.state_dict())}
        ddp: Any = fd.DDP(module, backend)
        loads, prefix = (nn.ModuleDict({"x": ddp}), "x.") if is_enclosed else (ddp, "")
        loads.load_state_dict({prefix + wrapper + name: n for name, n in numbers.items()})
        assert module.state_dict() == numbers

    on_ranks(1, body)


class Versioned(nn.Linear):
    """Knows only states of its own version, as some modules of torchvision do."""

    _version = 2

    def _load_from_state_dict(self, state: Any, prefix: str, metadata: Any, *args: Any) -> None:
        assert metadata.get("version") == 2
        super()._load_from_state_dict(state, prefix, metadata, *args)


def test_a_state_keeps_the_versions_of_what_it_is_of(on_ranks: OnRanks) -> None:
    def body(backend: Any) -> None:
        module = nn.Sequential(Versioned(1, 1))
        ddp = fd.DDP(module, backend)
        ddp.load_state_dict(module.state_dict())
        ddp.load_state_dict(ddp.state_dict())
        ddp.load_state_dict(nn.ModuleDict({"module": module}).state_dict())
        assert list(ddp.state_dict()._metadata) == ["", "0"]
        for outer in (nn.Sequential(ddp), nn.Sequential(nn.Sequential(ddp))):
            outer.load_state_dict(outer.state_dict())

    on_ranks(1, body)


@pytest.mark.parametrize("is_enclosed", [False, True])
def test_hooks_of_the_state_are_called(on_ranks: OnRanks, is_enclosed: bool) -> None:
    def body(backend: Any) -> Any:
        ddp = scale(backend)
        whole = nn.Sequential(ddp) if is_enclosed else ddp
        called: list[str] = []
        ddp.register_state_dict_pre_hook(lambda *_: called.append("before"))
        ddp.register_state_dict_post_hook(lambda *_: called.append("after"))
        ddp.register_load_state_dict_pre_hook(lambda *_: called.append("before loading"))
        ddp.register_load_state_dict_post_hook(lambda *_: called.append("after loading"))
        state = whole.state_dict()
        assert called == ["before", "after"]
        whole.load_state_dict(state)
        return called[-2:]

    assert on_ranks(1, body) == [["before loading", "after loading"]]


def test_what_is_no_state_is_refused_by_torch(on_ranks: OnRanks) -> None:
    def body(backend: Any) -> None:
        with pytest.raises(TypeError, match="state_dict to be dict-like"):
            scale(backend).load_state_dict(None)

    on_ranks(1, body)


@OVERLAP
def test_gradients_of_another_dtype_are_averaged_in_it(on_ranks: OnRanks, overlap: Any) -> None:
    def body(backend: Any) -> Any:
        module = Scale().bfloat16()
        for parameter in module.parameters():
            parameter.grad_dtype = torch.float32
        ddp = fd.DDP(module, backend, overlap=overlap)
        ddp(backend.rank + 1.0).sum().backward()
        averages = [p.grad.dtype for p in ddp.parameters()], gradients_of(ddp)
        given = ddp.sync_gradients([torch.full((1,), backend.rank + 0.001) for _ in range(2)])
        assert torch.allclose(given[0], torch.tensor(0.501)), "more than bfloat16 can hold"
        return averages

    assert on_ranks(2, body) == [([torch.float32] * 2, (1.5, 1))] * 2


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


def test_names_of_parts_are_those_of_the_module(on_ranks: OnRanks) -> None:
    def body(backend: Any) -> None:
        ddp = fd.DDP(nn.Sequential(nn.Linear(1, 1), nn.BatchNorm1d(1)), backend)
        outer = nn.ModuleDict({"inner": ddp})
        assert [name for name, _ in ddp.named_modules()] == ["", "", "0", "1"]
        tensors = {**dict(outer.named_parameters()), **dict(outer.named_buffers())}
        assert set(tensors) == set(outer.state_dict())
        joined = {
            f"{n}.{key}": p for n, m in ddp.named_modules() for key, p in m._parameters.items()
        }
        assert joined == dict(ddp.named_parameters())
        assert [type(m) for m in ddp.modules()] == [
            type(ddp),
            nn.Sequential,
            nn.Linear,
            nn.BatchNorm1d,
        ]

    on_ranks(1, body)


def test_parts_together_have_every_parameter_once(on_ranks: OnRanks) -> None:
    def body(backend: Any) -> None:
        ddp = fd.DDP(nn.BatchNorm1d(1), backend)
        parts = list(ddp.modules())
        assert [p for m in parts for p in m.parameters(recurse=False)] == [ddp.weight, ddp.bias]
        assert len([b for m in parts for b in m.buffers(recurse=False)]) == 3

    on_ranks(1, body)


@pytest.mark.parametrize("strict", [True, False])
def test_the_wrapper_is_exported_as_its_module_is(on_ranks: OnRanks, strict: bool) -> None:
    def body(backend: Any) -> None:
        ddp = fd.DDP(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)), backend).eval()
        x = torch.randn(3, 2)
        exported = torch.export.export(ddp, (x,), strict=strict)
        assert list(exported.state_dict) == list(ddp.state_dict())
        assert torch.equal(exported.module()(x), ddp(x))

    on_ranks(1, body)


def test_a_module_may_be_wrapped_in_inference_mode(on_ranks: OnRanks) -> None:
    def body(backend: Any) -> Any:
        module = Scale()
        with torch.inference_mode():
            ddp = fd.DDP(module, backend)
        ddp(backend.rank + 1.0).sum().backward()
        return gradients_of(ddp)

    assert on_ranks(2, body) == [(1.5, 1)] * 2


@pytest.mark.parametrize("is_given", [False, True])
def test_gradients_may_be_averaged_in_inference_mode(on_ranks: OnRanks, is_given: bool) -> None:
    def body(backend: Any) -> Any:
        module = nn.Sequential(Scale(), Scale(), nn.BatchNorm1d(1)).double()
        ddp: Any = fd.DDP(module, backend)
        optimizer = torch.optim.SGD(ddp.parameters(), 1.0, momentum=0.5)
        ddp.step_in_backward(None if is_given else optimizer)
        module[0].requires_grad_(False)  # buckets are laid out anew
        x = torch.tensor([[1.0], [2.0 + backend.rank]]).double()
        with torch.inference_mode():
            grads = {n: torch.ones_like(p) for n, p in ddp.named_parameters() if p.requires_grad}
            ddp.sync_gradients(grads if is_given else None)
        ddp(x).square().sum().backward()
        ddp.verify()
        return [p.grad is None for p in ddp.parameters()]

    assert on_ranks(2, body) == [[True, True] + [not is_given] * 4] * 2


def test_backward_may_lay_buckets_out_in_inference_mode(on_ranks: OnRanks) -> None:
    def body(backend: Any) -> None:
        ddp: Any = fd.DDP(Upwards([Scale(), Scale()]), backend)
        ddp(1.0).sum().backward()
        ddp.zero_grad()
        y = ddp(1.0).sum()
        with torch.inference_mode():
            y.backward()
        ddp.zero_grad()
        for _ in range(2):
            ddp(backend.rank + 1.0).sum().backward()
        assert [p.grad.item() for p in ddp.parameters()] == [3, 2, 3, 2]

    on_ranks(2, body)


@pytest.mark.parametrize("is_sparse", [False, True])
@pytest.mark.parametrize("average", ["mean", "sum"])
def test_the_first_backward_may_run_in_inference_mode(
    on_ranks: OnRanks, average: str, is_sparse: bool
) -> None:
    def body(backend: Any) -> Any:
        embedding = nn.Embedding(3, 1, sparse=is_sparse)
        ddp: Any = fd.DDP(embedding, backend, average=average)
        for number in range(3):
            y = ddp(torch.tensor([0, 0, 1 + backend.rank])).sum()
            with torch.inference_mode(number == 0):
                y.backward()
        return embedding.weight.grad.to_dense().flatten().tolist()

    factor = 1 if average == "mean" else 2
    assert on_ranks(2, body) == [[6 * factor, 1.5 * factor, 1.5 * factor]] * 2


def test_a_step_in_backward_may_be_taken_in_inference_mode(on_ranks: OnRanks) -> None:
    def body(backend: Any) -> Any:
        ddp: Any = scale(backend)
        ddp.step_in_backward(torch.optim.SGD(ddp.parameters(), 1.0, momentum=0.5))
        for number in range(2):
            y = ddp(backend.rank + 1.0).sum()
            with torch.inference_mode(number == 0):
                y.backward()
        return ddp.weight.item()

    assert on_ranks(2, body) == [1 - 1.5 * (1 + 1.5)] * 2


def test_an_optimizer_that_was_joined_in_inference_mode_goes_on_after_it(
    on_ranks: OnRanks,
) -> None:
    def body(backend: Any) -> Any:
        ddp: Any = scale(backend)
        optimizer = torch.optim.SGD(ddp.parameters(), 1.0, momentum=0.5)

        def step() -> None:
            ddp(1.0).sum().backward()
            optimizer.step()
            ddp.zero_grad()

        with torch.inference_mode(), ddp.join(optimizer), torch.inference_mode(False):
            for _ in range(backend.rank):
                step()
        step()
        return ddp.weight.item()

    # In the first step rank 0 counts with a gradient of 0.
    assert on_ranks(2, body) == [1 - 0.5 - (0.25 + 1)] * 2


@OVERLAP
@pytest.mark.parametrize("compress", [None, fd.PowerSGD(1)], ids=["plain", "power_sgd"])
@pytest.mark.parametrize("shape", [(3, 4), (6, 2), (12,)])
def test_parameters_may_be_given_another_shape(
    on_ranks: OnRanks, shape: tuple[int, ...], compress: Any, overlap: Any
) -> None:
    def body(backend: Any) -> Any:
        module = nn.ParameterList([torch.ones(4, 3), torch.ones(2)])
        ddp = fd.DDP(module, backend, compress=compress, overlap=overlap)
        for _ in range(2):
            ((backend.rank + 1) * (module[0].sum() + module[1].sum())).backward()
            ddp.zero_grad()
        module[0].data = torch.ones(shape)
        ((backend.rank + 1) * (module[0].sum() + module[1].sum())).backward()
        return [torch.allclose(p.grad, torch.full_like(p, 1.5)) for p in module]

    assert on_ranks(2, body) == [[True, True]] * 2


def test_a_rank_that_alone_changes_a_shape_is_named(on_ranks: OnRanks) -> None:
    def body(backend: Any) -> Any:
        ddp = scale(backend)
        if backend.rank == 1:
            ddp.weight.data = torch.ones(2, dtype=torch.float64)
        with pytest.raises(fd.CollectiveMismatch, match=r"'weight' .*\(2,\) on rank 1"):
            ddp(1.0).sum().backward()

    on_ranks(2, body)


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


def test_an_expanded_parameter_may_be_empty(on_ranks: OnRanks) -> None:
    def body(backend: Any) -> None:
        full, empty = nn.ParameterList([torch.ones(1), torch.ones(1, 0).expand(3, 0)])
        ddp = fd.DDP(nn.ParameterList([full, empty]), backend)
        (full * (backend.rank + 1) + empty.sum()).sum().backward()
        assert (full.grad.item(), empty.grad.shape) == (1.5, (3, 0))
        ddp.verify()

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


def test_a_copy_has_the_hooks_of_the_wrapper(on_ranks: OnRanks) -> None:
    def body(backend: Any) -> None:
        ddp = scale(backend)
        ddp.register_forward_pre_hook(lambda _, inputs: (10 * inputs[0],))
        ddp.register_forward_hook(lambda _, __, output: 2 * output)
        ddp.register_full_backward_hook(lambda *_: seen.append(1))
        seen: list[int] = []
        for each in (ddp, copy.deepcopy(ddp), copy.deepcopy(copy.deepcopy(ddp))):
            output = each(torch.ones(1, requires_grad=True))
            assert output == 20
            output.backward()
        assert len(seen) == 3

    on_ranks(1, body)


def test_gradients_of_a_copy_of_a_copy_are_not_taken_for_those_of_another(
    on_ranks: OnRanks,
) -> None:
    def body(backend: Any) -> None:
        ddp = scale(backend)
        second_hand = copy.deepcopy(copy.deepcopy(ddp))
        twin = copy.deepcopy(ddp)
        with pytest.raises(fd.CollectiveMismatch):
            (twin if backend.rank else second_hand)(1.0).sum().backward()

    on_ranks(2, body)


@pytest.mark.usefixtures("traces_in_threads")
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


@pytest.mark.usefixtures("traces_in_threads")
@pytest.mark.skipif(
    not hasattr(torch._C._dynamo.eval_frame, "set_code_exec_strategy"),
    reason="this version of torch cannot mark code as not to be compiled",
)
@pytest.mark.filterwarnings("ignore:`torch.jit.script")  # of torch's own
@pytest.mark.parametrize("sharded", [False, True])
def test_a_compiled_step_compiles_no_reduction(on_ranks: OnRanks, sharded: bool) -> None:
    from torch._dynamo.convert_frame import register_bytecode_hook

    package = Path(fd.__file__).parent
    compiled: dict[bool, set[str]] = {True: set(), False: set()}  # whether it is the package's

    def note(code: Any, _: Any) -> None:
        compiled[package in Path(code.co_filename).parents].add(code.co_name)

    def body(backend: Any) -> Any:
        module = nn.Linear(1, 1)
        weight = module.weight.item()
        ddp = fd.DDP(module, backend)
        of_all = (fd.ShardedOptimizer, torch.optim.SGD, backend) if sharded else (torch.optim.SGD,)
        optimizer = of_all[0](ddp.parameters(), *of_all[1:], lr=0.5)

        def step(x: Any) -> None:
            ddp(x).sum().backward()
            optimizer.step()

        torch.compile(step, backend="eager")(torch.full((1, 1), 3.0))
        assert ddp.statistics().num_rounds == 1
        return module.weight.item() - weight

    handle = register_bytecode_hook(note)
    try:
        assert on_ranks(1, body) == [pytest.approx(-1.5)]
    finally:
        handle.remove()
    assert any("step" in name for name in compiled[False])
    assert compiled[True] <= {"forward"}


@pytest.mark.parametrize("change", [{}, {"_FrameExecStrategy": lambda action: action}])
def test_torch_may_change_how_code_is_marked(
    monkeypatch: pytest.MonkeyPatch, change: dict[str, Any]
) -> None:
    known = {"_FrameAction": SimpleNamespace(SKIP=1), "set_code_exec_strategy": print}
    monkeypatch.setattr(torch._C._dynamo, "eval_frame", SimpleNamespace(**known, **change))
    assert uncompiled(scale) is scale


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
