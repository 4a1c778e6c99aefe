"""DDP of a torch module on ranks that fail, and modules that it refuses."""

from __future__ import annotations

import _thread
import contextlib
import functools
import threading
from collections.abc import Callable
from typing import Any

import pytest
from ranks_as_threads import OnRanks

torch = pytest.importorskip("torch", reason="torch is not installed")

from integrations.torch.torch_failures import Raises, lose_rank_1  # noqa: E402
from integrations.torch.torch_scale import OVERLAP, Scale, gradients_of, scale  # noqa: E402
from parallel.refused_memory import refuse_memory_of_rank_1  # noqa: E402
from parallel.refused_reduction import assert_refusal_is_told  # noqa: E402
from torch import nn  # noqa: E402 - needs torch
from torch.utils.checkpoint import checkpoint  # noqa: E402

import ferro_dist as fd  # noqa: E402
from ferro_dist.integrations.torch.ddp.module import ModuleParameters  # noqa: E402


@OVERLAP
def test_an_exception_in_one_backward_reaches_the_others(on_ranks: OnRanks, overlap: Any) -> None:
    first, *others = on_ranks(3, lose_rank_1, Raises, overlap, bool(overlap))
    assert others == [first] * 2


def test_an_interrupt_as_backward_ends_is_not_lost() -> None:
    (backend,) = fd.SimulatedBackend.create_group(1)
    ddp = scale(backend)
    queue = torch.autograd.Variable._execution_engine.queue_callback
    # Called after the wrapper's own callback, and without a line of Python behind it.
    ddp.module.weight.register_hook(lambda _: queue(_thread.interrupt_main))
    loss = ddp(1.0).sum()
    with backend, pytest.raises(KeyboardInterrupt):
        loss.backward()


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


@pytest.mark.usefixtures("traces_in_threads")
@pytest.mark.parametrize("is_seen", [True, False])
@pytest.mark.parametrize("is_local", [True, False])
def test_a_backward_under_compiled_autograd_is_refused(
    on_ranks: OnRanks, is_seen: bool, is_local: bool
) -> None:
    from torch._dynamo import compiled_autograd

    # Alone: torch knows one compiler for all threads.
    def body(backend: Any) -> None:
        ddp = scale(backend)
        loss = (ddp if is_seen else ddp.module)(1.0).sum()
        enable = getattr(compiled_autograd, "_enable", None) or compiled_autograd.enable
        may_sync = ddp.no_sync() if is_local else contextlib.nullcontext()
        refused = pytest.raises(RuntimeError, match="compiled autograd")
        with may_sync, enable(lambda graph: graph), refused:
            loss.backward()
        ddp.zero_grad()
        ddp(2.0).sum().backward()
        assert gradients_of(ddp) == (2, 1)

    on_ranks(1, body)


def step_one_parameter(parameter: Any) -> None:
    with torch.no_grad():
        parameter -= 0.1 * parameter.grad
    parameter.grad = None


@OVERLAP
@pytest.mark.parametrize("is_seen", [True, False])
def test_a_hook_that_steps_before_gradients_are_averaged_is_refused(
    on_ranks: OnRanks, is_seen: bool, overlap: Any
) -> None:
    def body(backend: Any) -> None:
        ddp = scale(backend, overlap=overlap)
        for parameter in ddp.parameters():
            parameter.register_post_accumulate_grad_hook(step_one_parameter)
        with pytest.raises(RuntimeError, match=r"set to None in backward.*step_in_backward"):
            (ddp if is_seen else ddp.module)(1.0).sum().backward()

    on_ranks(1, body)


def test_a_step_in_an_inner_backward_is_refused(on_ranks: OnRanks) -> None:
    def body(backend: Any) -> Any:
        ddp = scale(backend)
        ddp.step_in_backward(torch.optim.SGD(ddp.parameters(), lr=1))
        x = torch.ones(1, dtype=torch.float64, requires_grad=True)
        with pytest.raises(RuntimeError, match="part of another one"):
            checkpoint(ddp.module, x, use_reentrant=True).sum().backward()
        unchanged = [p.item() for p in ddp.parameters()]
        ddp.zero_grad()
        checkpoint(ddp, x, use_reentrant=False).sum().backward()
        return unchanged, [p.item() for p in ddp.parameters()]

    assert on_ranks(1, body) == [([1, 0], [0, -1])]


class Square(nn.Module):
    """Two parameters of one shape."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = (nn.Parameter(torch.ones(2, 2)) for _ in range(2))

    def forward(self, x: Any) -> Any:
        return ((self.a + 2 * self.b) * x).sum()


def exchange(module: Any) -> None:
    module.a.grad, module.b.grad = module.b.grad, module.a.grad


def share(module: Any) -> None:
    module.b.grad = module.a.grad


def transpose(module: Any) -> None:
    module.a.grad = module.a.grad.t()


def transpose_in_place(module: Any) -> None:
    module.a.grad.t_()


@OVERLAP
@pytest.mark.parametrize("bucket_mb", [1, 1e-5])
@pytest.mark.parametrize("assign", [exchange, share, transpose, transpose_in_place])
def test_gradients_that_lie_where_others_come_are_refused(
    on_ranks: OnRanks, assign: Callable[[Any], None], bucket_mb: float, overlap: Any
) -> None:
    def body(backend: Any) -> None:
        ddp = fd.DDP(Square(), backend, bucket_mb=bucket_mb, overlap=overlap)
        for _ in range(2):
            ddp.zero_grad()
            ddp(1.0).backward()
        assign(ddp.module)
        grads = {name: parameter.grad for name, parameter in ddp.named_parameters()}
        with pytest.raises(RuntimeError, match="shares memory"):
            ddp.sync_gradients(grads)
        with pytest.raises(RuntimeError, match="shares memory"):
            ddp(1.0).backward()

    on_ranks(1, body)


@OVERLAP
def test_freezing_between_forward_and_backward_is_refused(on_ranks: OnRanks, overlap: Any) -> None:
    def body(backend: Any) -> None:
        ddp = scale(backend, overlap=overlap)
        loss = ddp(1.0).sum()
        ddp.module.weight.requires_grad_(False)
        with pytest.raises(RuntimeError, match="'weight' was frozen between forward and backward"):
            loss.backward()

    on_ranks(1, body)


@OVERLAP
@pytest.mark.parametrize("average", ["mean", "sum"])
def test_a_hook_of_an_accumulator_that_steps_is_refused(
    on_ranks: OnRanks, average: str, overlap: Any
) -> None:
    def body(backend: Any) -> None:
        ddp = scale(backend, overlap=overlap, average=average)
        accumulators = []  # autograd keeps none of them
        for parameter in ddp.parameters():
            accumulators.append(torch.autograd.graph.get_gradient_edge(parameter).node)
            accumulators[-1].register_hook(functools.partial(drop_gradient, parameter))
        with pytest.raises(RuntimeError, match=r"set to None in backward.*step_in_backward"):
            ddp(1.0).sum().backward()

    on_ranks(1, body)


def drop_gradient(parameter: Any, *_: Any) -> None:
    parameter.grad = None


def test_a_reduction_of_the_users_own_that_fails_tells_the_others(on_ranks: OnRanks) -> None:
    def make(backend: Any, **options: Any) -> Any:
        ddp = scale(backend, **options)
        ddp.module.weight.grad = torch.ones(1, dtype=torch.float64)
        return ddp

    assert_refusal_is_told(on_ranks, make)


class LastFirst(nn.Module):
    """Runs its second layer first: buckets are laid out again after the first backward."""

    def __init__(self) -> None:
        super().__init__()
        self.last, self.first = nn.Linear(2, 2), nn.Linear(2, 2)

    def forward(self, x: Any) -> Any:
        return self.last(self.first(x))


def test_a_rank_without_data_that_has_no_memory_tells_the_others(
    on_ranks: OnRanks, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = threading.Barrier(2)

    def body(backend: Any) -> None:
        ddp = fd.DDP(LastFirst(), backend)
        if backend.rank == 1:
            monkeypatch.setattr(ddp._reducer, "lay_out", refuse)
        error = MemoryError if backend.rank == 1 else fd.DistributedError
        with pytest.raises(error, match=r"no room|rank 1 was interrupted"):
            train(ddp, num_batches=2 if backend.rank == 0 else 0)
        told.wait(60)  # before any rank leaves the group

    def train(ddp: Any, num_batches: int) -> None:
        with ddp.join():
            for _ in range(num_batches):
                ddp(torch.ones(1, 2)).sum().backward()

    def refuse(_: Any) -> None:
        raise MemoryError("no room")

    on_ranks(2, body)


def test_a_graph_outlives_its_wrapper(on_ranks: OnRanks) -> None:
    def body(backend: Any) -> Any:
        module = Scale()
        ddp = fd.DDP(module, backend)
        loss = ddp(backend.rank + 1.0).sum()
        ddp.into_inner()
        loss.backward()
        return gradients_of(module)

    assert on_ranks(2, body) == [(1, 1), (2, 1)]


def test_rows_that_forward_shortens_are_trained_by_one_rank_alone(on_ranks: OnRanks) -> None:
    def body(backend: Any) -> None:
        net = nn.Sequential(nn.Embedding(3, 2, max_norm=1), nn.Linear(2, 1))
        net[0].weight.requires_grad_(False)
        ddp = fd.DDP(net, backend)
        net[0].weight.requires_grad_(True)
        if backend.world_size == 1:
            ddp(torch.tensor([0])).sum().backward()
        else:
            with pytest.raises(ValueError, match=r"'0\.weight' is the table"):
                ddp(torch.tensor([0]))

    on_ranks(1, body)
    on_ranks(2, body)


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


def test_a_module_can_be_wrapped_anew_where_the_error_of_its_wrapper_is_handled(
    on_ranks: OnRanks, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = threading.Barrier(2)

    def body(backend: Any) -> Any:
        module = Scale()
        try:
            fd.DDP(module, backend)
        except (MemoryError, fd.DistributedError):
            told.wait(60)  # before any rank leaves the group
            (alone,) = fd.SimulatedBackend.create_group(1)
            with alone:
                fd.DDP(module, alone)(3.0).sum().backward()
        return gradients_of(module)

    refuse_memory_of_rank_1(monkeypatch)
    assert on_ranks(2, body) == [(3, 1)] * 2


def test_a_parameter_of_two_wrappers_cannot_be_unfrozen(on_ranks: OnRanks) -> None:
    class Sum(nn.Module):
        def __init__(self, shared: nn.Module) -> None:
            super().__init__()
            self.shared, self.own = shared, Scale()

        def forward(self, x: float) -> Any:
            return self.shared(x) + self.own(x)

    def body(backend: Any) -> None:
        shared = Scale().requires_grad_(False)
        first, second = (fd.DDP(Sum(shared), backend) for _ in range(2))
        shared.requires_grad_(True)
        first(1.0).sum().backward()
        with pytest.raises(ValueError, match=r"'shared\.weight' is wrapped by another DDP"):
            second.sync_gradients()
        shared.requires_grad_(False)
        second(1.0 + backend.rank).sum().backward()
        assert second.module.own.weight.grad.item() == 1.5
        shared.requires_grad_(True)
        with pytest.raises(ValueError, match=r"'shared\.weight' is wrapped by another DDP"):
            second(1.0)

    on_ranks(2, body)


@pytest.mark.parametrize(
    "change",
    [
        lambda ddp: ddp.module.add_module("extra", nn.Linear(1, 1)),
        lambda ddp: ddp.register_module("extra", nn.Linear(1, 1)),
        lambda ddp: ddp.register_parameter("extra", nn.Parameter(torch.ones(1))),
        lambda ddp: ddp.module.load_state_dict(ddp.state_dict(), assign=True),
        lambda ddp: delattr(ddp.module, "bias"),
    ],
    ids=["added", "module", "parameter", "replaced", "removed"],
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


def forward_of_a_lost_wrapper(backend: Any, weight: Any) -> Any:
    layer = nn.Linear(1, 1, bias=False)
    layer.weight = weight
    return fd.DDP(layer, backend)(torch.ones(1, 1))


def test_a_backward_without_the_wrapper_is_refused(on_ranks: OnRanks) -> None:
    def body(backend: Any) -> None:
        weight = nn.Parameter(torch.ones(1, 1))
        output = forward_of_a_lost_wrapper(backend, weight)
        (gradient,) = torch.autograd.grad(output, weight, retain_graph=True)  # averages nothing
        assert gradient.item() == 1.0
        with pytest.raises(RuntimeError, match="wrapper is gone"):
            output.backward()
        assert weight.grad is None

    on_ranks(2, body)


def test_another_wrapper_takes_over_from_one_that_is_gone(on_ranks: OnRanks) -> None:
    def body(backend: Any) -> Any:
        layer = nn.Linear(1, 1, bias=False)
        output = forward_of_a_lost_wrapper(backend, layer.weight)
        ddp = fd.DDP(layer, backend)
        (output * backend.rank).backward()
        assert ddp.module is layer
        assert layer.weight.grad is not None
        return layer.weight.grad.item()

    assert on_ranks(2, body) == [0.5, 0.5]


def test_a_wrapper_over_one_rank_is_not_missed(on_ranks: OnRanks) -> None:
    def body(backend: Any) -> None:
        forward_of_a_lost_wrapper(backend, nn.Parameter(torch.ones(1, 1))).backward()

    on_ranks(1, body)


def with_buffer(buffer: Any) -> Any:
    module = nn.Linear(1, 1)
    module.register_buffer("extra", buffer)
    return module


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: nn.LazyLinear(2), ValueError, "has no shape yet"),
        (
            lambda: nn.Sequential(nn.Linear(1, 1), nn.LazyBatchNorm1d(affine=False)),
            ValueError,
            r"buffer '1\.running_mean' has no shape yet",
        ),
        (lambda: nn.Linear(2, 2, device="meta"), fd.InvalidArray, "is on meta"),
        (
            lambda: nn.ParameterList([torch.ones(2, dtype=torch.complex64).conj()]),
            fd.InvalidArray,
            "parameter '0'.* conjugation is pending",
        ),
        (
            lambda: nn.ParameterList([torch.ones(1).expand(2)]),
            fd.InvalidArray,
            "parameter '0' was expanded",
        ),
        (
            lambda: with_buffer(torch.ones(1).to(torch.float8_e5m2fnuz)),
            fd.InvalidArray,
            "buffer 'extra'.* its dtype is torch.float8_e5m2fnuz",
        ),
        (
            lambda: with_buffer(torch.zeros(1, requires_grad=True)),
            ValueError,
            "buffer 'extra' requires grad.*make it a parameter",
        ),
        (nn.ReLU, ValueError, "ReLU has no parameters"),
        (lambda: nn.Embedding(3, 2, max_norm=1), ValueError, "'weight' is the table .* max_norm"),
    ],
    ids=[
        *("lazy", "lazy buffer", "meta", "conjugated", "expanded", "float8"),
        *("trained buffer", "nothing to train", "shortened rows"),
    ],
)
def test_modules_that_cannot_be_wrapped(
    on_ranks: OnRanks, make: Callable[[], Any], error: type[Exception], message: str
) -> None:
    def body(backend: Any) -> None:
        with pytest.raises(error, match=message):
            fd.DDP(make(), backend)
        fd.barrier(backend)

    on_ranks(2, body)


def test_a_torch_that_is_too_old_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", "2.9.1+cu128")
    refusal = r'DDP and Pipeline need torch 2\.10 or newer, and this is 2\.9\.1\+cu128: .*"torch>='
    with (
        fd.init(rank=0, world_size=1) as backend,
        pytest.raises(fd.BackendUnavailable, match=refusal),
    ):
        fd.DDP(nn.Linear(1, 1), backend)


@pytest.mark.parametrize("version", ["2.10.0a0+git1a2b", "3.0", "main"])
def test_other_versions_of_torch_are_taken(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    monkeypatch.setattr(torch, "__version__", version)
    with fd.init(rank=0, world_size=1) as backend:
        assert isinstance(fd.DDP(nn.Linear(1, 1), backend), nn.Module)
