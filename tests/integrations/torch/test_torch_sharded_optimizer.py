"""A sharded optimizer takes the steps of a plain one, and keeps a share of its state."""

from __future__ import annotations

import contextlib
import copy
import threading
from collections.abc import Callable
from typing import Any, cast

import pytest
from ranks_as_threads import OnRanks

import ferro_dist as fd
from ferro_dist.testing import run_ranks

torch = pytest.importorskip("torch", reason="torch is not installed")

from integrations.torch.torch_regression import (  # noqa: E402 - needs torch
    assert_same,
    backward,
    own,
    randomize,
    weights,
)
from parallel.refused_memory import assert_lack_is_told  # noqa: E402
from torch.optim import SGD, Optimizer  # noqa: E402

DEADLINE_S = 300.0  # a busy machine takes long to import torch alone

OPTIMIZERS: dict[str, tuple[str, dict[str, Any]]] = {
    "sgd": ("SGD", {"lr": 0.05, "momentum": 0.9, "weight_decay": 0.01}),
    "adamw": ("AdamW", {"lr": 0.01}),
    "rmsprop": ("RMSprop", {"lr": 0.01, "momentum": 0.5}),
    # Looks at a matrix as a whole: must not be given a part of one.
    "adafactor": ("Adafactor", {"lr": 0.01}),
}


def model() -> Any:
    return randomize(
        torch.nn.Sequential(
            torch.nn.Linear(7, 9), torch.nn.Tanh(), torch.nn.Linear(9, 3), torch.nn.PReLU()
        )
    )


def make(kind: str) -> tuple[type, dict[str, Any]]:
    name, options = OPTIMIZERS[kind]
    return getattr(torch.optim, name), options


def train_plain(kind: str, steps: int = 20, clip: float | None = None) -> Any:
    net = model()
    cls, options = make(kind)
    optimizer = cls(net.parameters(), **options)
    for _ in range(steps):
        optimizer.zero_grad()
        backward(net, slice(None))
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(net.parameters(), clip)
        optimizer.step()
    return net, optimizer


def train_sharded(backend: Any, kind: str, steps: int = 20, clip: float | None = None) -> Any:
    net = model()
    with torch.no_grad():
        for p in net.parameters():
            p.add_(backend.rank)  # made equal by the construction
    cls, options = make(kind)
    optimizer = fd.ShardedOptimizer(net.parameters(), cls, backend, **options)
    for _ in range(steps):
        optimizer.zero_grad()
        backward(net, own(backend))
        if clip is not None:
            optimizer.clip_grad_norm_(clip)
        optimizer.step()
    return net, optimizer


def weights_after_training(backend: Any, kind: str) -> Any:
    return weights(train_sharded(backend, kind)[0])


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_steps_are_those_of_the_plain_optimizer(
    on_ranks: OnRanks, kind: str, world_size: int
) -> None:
    outcomes = on_ranks(world_size, weights_after_training, kind)
    assert_same(outcomes[0], weights(train_plain(kind)[0]))
    assert all(outcome == outcomes[0] for outcome in outcomes)


def test_steps_of_processes_are_those_of_the_plain_optimizer() -> None:
    outcomes = run_ranks(2, weights_after_training, "adamw", timeout=DEADLINE_S)
    assert_same(outcomes[0], weights(train_plain("adamw")[0]))
    assert outcomes[0] == outcomes[1]


def test_state_is_divided_by_the_number_of_ranks(on_ranks: OnRanks) -> None:
    def body(backend: Any) -> int:
        _, optimizer = train_sharded(backend, "adamw", steps=1)
        states = optimizer._inner.state.values()
        return sum(s["exp_avg"].untyped_storage().nbytes() for s in states)

    whole = sum(p.numel() * 8 for p in model().parameters())
    for nbytes in on_ranks(4, body):
        assert nbytes <= -(-whole // 4 // 8) * 8 + 8


@pytest.mark.parametrize("clip", [0.05, 100.0])
@pytest.mark.parametrize("kind", ["sgd", "adafactor"])
def test_clipping_is_that_of_the_whole_gradient(on_ranks: OnRanks, kind: str, clip: float) -> None:
    def body(backend: Any) -> Any:
        return weights(train_sharded(backend, kind, 5, clip)[0])

    assert_same(on_ranks(3, body)[0], weights(train_plain(kind, 5, clip)[0]))


@pytest.mark.parametrize("norm_type", [1.0, 2.0, float("inf")])
def test_the_norm_is_that_of_torch(on_ranks: OnRanks, norm_type: float) -> None:
    def body(backend: Any) -> float:
        net = model()
        optimizer = fd.ShardedOptimizer(net.parameters(), torch.optim.SGD, backend, lr=0.1)
        backward(net, own(backend))
        return float(optimizer.clip_grad_norm_(0.1, norm_type))

    net = model()
    backward(net, slice(None))
    norm = float(torch.nn.utils.clip_grad_norm_(net.parameters(), 0.1, norm_type))
    assert on_ranks(3, body) == pytest.approx([norm] * 3, rel=1e-12)


def test_an_infinite_norm_raises_on_all_ranks_if_asked(on_ranks: OnRanks) -> None:
    def body(backend: Any) -> None:
        net = model()
        optimizer = fd.ShardedOptimizer(net.parameters(), torch.optim.SGD, backend, lr=0.1)
        backward(net, own(backend))
        if backend.rank == 1:
            net[0].bias.grad[0] = float("nan")
        with pytest.raises(RuntimeError, match="norm of the gradients is nan"):
            optimizer.clip_grad_norm_(1.0, error_if_nonfinite=True)

    on_ranks(2, body)


def test_clipping_after_a_skipped_step_is_of_the_new_gradients(on_ranks: OnRanks) -> None:
    def body(backend: Any) -> list[float]:
        net = torch.nn.Linear(3, 1, bias=False)
        optimizer = fd.ShardedOptimizer(net.parameters(), torch.optim.SGD, backend, lr=0.1)
        norms = []
        for factor in (1.0, 10.0):
            net.zero_grad()
            (factor * net(torch.ones(1, 3))).sum().backward()
            norms.append(float(optimizer.clip_grad_norm_(1.0)))
        optimizer.step()
        return norms

    for norms in on_ranks(2, body):
        assert norms == pytest.approx([3**0.5, 10 * 3**0.5])


def test_gradients_must_not_change_after_clipping(on_ranks: OnRanks) -> None:
    def body(backend: Any) -> None:
        net = model()
        optimizer = fd.ShardedOptimizer(net.parameters(), torch.optim.SGD, backend, lr=0.1)
        backward(net, own(backend))
        optimizer.clip_grad_norm_(1.0)
        backward(net, own(backend))
        with pytest.raises(RuntimeError, match="Clip last"):
            optimizer.step()
        optimizer.zero_grad()
        backward(net, own(backend))
        optimizer.step()

    on_ranks(2, body)


def test_parameters_must_not_be_added_after_clipping(on_ranks: OnRanks) -> None:
    def body(backend: Any) -> None:
        net, added = model(), torch.nn.Parameter(torch.ones(2))
        optimizer = fd.ShardedOptimizer(net.parameters(), torch.optim.SGD, backend, lr=0.1)
        backward(net, own(backend))
        optimizer.clip_grad_norm_(1.0)
        optimizer.add_param_group({"params": [added]})
        with pytest.raises(RuntimeError, match="Clip last"):
            optimizer.step()
        optimizer.clip_grad_norm_(1.0)
        optimizer.step()

    on_ranks(2, body)


def test_what_changed_on_one_rank_is_refused_on_all(on_ranks: OnRanks) -> None:
    def body(backend: Any) -> None:
        net = model()
        optimizer = fd.ShardedOptimizer(net.parameters(), torch.optim.SGD, backend, lr=0.1)
        for is_zeroed in (False, True):
            optimizer.zero_grad()
            backward(net, own(backend))
            optimizer.clip_grad_norm_(1.0)
            if backend.rank == 1 and is_zeroed:
                optimizer.zero_grad()
            elif backend.rank == 1:
                backward(net, own(backend))
            with pytest.raises(RuntimeError, match="Clip last"):
                optimizer.step()
        optimizer.zero_grad()
        backward(net, own(backend))
        optimizer.step()

    on_ranks(2, body)


def test_clipping_again_is_of_the_new_gradients_if_one_rank_has_any(on_ranks: OnRanks) -> None:
    def body(backend: Any) -> list[float]:
        net = torch.nn.Linear(3, 1, bias=False)
        optimizer = fd.ShardedOptimizer(net.parameters(), torch.optim.SGD, backend, lr=0.1)
        norms = []
        for factor in (1.0, 10.0):
            # Rank 1 has run out of data: its second gradient is that of the first batch.
            if backend.rank == 0 or factor == 1:
                net.zero_grad()
                (factor * net(torch.ones(1, 3))).sum().backward()
            norms.append(float(optimizer.clip_grad_norm_(1.0)))
        optimizer.step()
        return norms

    for norms in on_ranks(2, body):
        assert norms == pytest.approx([3**0.5, (10 + 1) / 2 * 3**0.5])


@pytest.mark.parametrize("clip", [None, 0.5])
def test_all_ranks_skip_a_step_that_overflows_on_one(on_ranks: OnRanks, clip: float | None) -> None:
    def body(backend: Any) -> list[list[float]]:
        p = torch.nn.Parameter(torch.zeros(3))
        optimizer = fd.ShardedOptimizer([p], torch.optim.SGD, backend, lr=1.0)
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        seen = []
        for step in range(3):
            optimizer.zero_grad()
            is_too_large = step == 1 and backend.rank == 1
            scaler.scale(
                (p * (float("inf") if is_too_large else backend.rank + 1)).sum()
            ).backward()
            if clip is not None:
                scaler.unscale_(optimizer)
                optimizer.clip_grad_norm_(clip)
            scaler.step(optimizer)
            scaler.update()
            seen.append(p.tolist())
        return seen

    first, second = on_ranks(2, body)
    assert first == second
    step = 1.5 if clip is None else 0.5 / 3**0.5
    for values, expected in zip(first, [-step, -step, -2 * step], strict=True):
        assert values == pytest.approx([expected] * 3, rel=1e-5)


@pytest.mark.parametrize("kind", ["adamw", "adafactor"])
def test_state_goes_to_a_plain_optimizer_and_back(on_ranks: OnRanks, kind: str) -> None:
    def save(backend: Any) -> Any:
        net, optimizer = train_sharded(backend, kind, steps=7)
        optimizer.consolidate_state_dict(root=None)
        return net.state_dict(), optimizer.state_dict()

    (net_state, state), *_ = on_ranks(3, save)

    net = model()
    net.load_state_dict(net_state)
    cls, options = make(kind)
    plain = cls(net.parameters(), **options)
    assert plain.state_dict()["param_groups"] == state["param_groups"]
    plain.load_state_dict(copy.deepcopy(state))
    for _ in range(13):
        plain.zero_grad()
        backward(net, slice(None))
        plain.step()
    assert_same(weights(net), weights(train_plain(kind)[0]))

    def resume(backend: Any) -> Any:
        net = model()
        net.load_state_dict(net_state)
        sharded = fd.ShardedOptimizer(net.parameters(), cls, backend, **options)
        sharded.load_state_dict(state)
        for _ in range(13):
            sharded.zero_grad()
            backward(net, own(backend))
            sharded.step()
        return weights(net)

    # Over another number of ranks than it was saved by.
    assert_same(on_ranks(2, resume)[0], weights(train_plain(kind)[0]))


def test_a_state_that_differs_between_ranks_is_not_loaded(on_ranks: OnRanks) -> None:
    def body(backend: Any) -> None:
        p = torch.nn.Parameter(torch.ones(3))
        optimizer = fd.ShardedOptimizer([p], torch.optim.Adam, backend, lr=1.0)

        def saved() -> Any:
            p.grad = torch.ones(3)
            optimizer.step()
            optimizer.consolidate_state_dict(None)
            return optimizer.state_dict()

        states = [saved(), saved()]
        with pytest.raises(fd.CollectiveMismatch, match=r"'step': 2.*\nLoad the same state"):
            optimizer.load_state_dict(states[backend.rank])
        empty = {**states[0], "state": {}}
        with pytest.raises(fd.CollectiveMismatch, match=r"with state {} on rank 1\."):
            optimizer.load_state_dict([states[0], empty][backend.rank])
        assert saved()["state"][0]["step"] == 3

    on_ranks(2, body)


def test_a_state_that_one_rank_alone_loads_is_noticed(on_ranks: OnRanks) -> None:
    def body(backend: Any) -> None:
        p = torch.nn.Parameter(torch.ones(3))
        optimizer = fd.ShardedOptimizer([p], torch.optim.Adam, backend, lr=1.0)
        optimizer.consolidate_state_dict(None)
        state = optimizer.state_dict()
        with pytest.raises(fd.CollectiveMismatch):
            optimizer.step() if backend.rank else optimizer.load_state_dict(state)

    on_ranks(2, body)


def test_state_is_brought_together_on_demand_alone(on_ranks: OnRanks) -> None:
    def body(backend: Any) -> None:
        net, optimizer = train_sharded(backend, "adamw", steps=1)
        with pytest.raises(RuntimeError, match="consolidate_state_dict"):
            optimizer.state_dict()
        optimizer.consolidate_state_dict(root=1)
        if backend.rank == 1:
            assert len(optimizer.state_dict()["state"]) == len(list(net.parameters()))
        else:
            with pytest.raises(RuntimeError, match="consolidate_state_dict"):
                optimizer.state_dict()
        optimizer.step()  # what was consolidated is out of date
        with pytest.raises(RuntimeError, match="after the last step"):
            optimizer.state_dict()

    on_ranks(2, body)


class Forgetful(SGD):
    """Keeps what no other rank may be given: at first a function, later a class."""

    def step(self, closure: Any = None) -> Any:
        for p in (p for group in self.param_groups for p in group["params"]):
            self.state[p]["kept"] = torch.Generator if self.state[p] else lambda: None
        return super().step(closure)


@pytest.mark.parametrize("root", [1, None])
def test_a_state_that_cannot_be_sent_is_told_on_all_ranks(
    on_ranks: OnRanks, root: int | None
) -> None:
    def body(backend: Any) -> None:
        p = torch.nn.Parameter(torch.ones(30))
        optimizer = fd.ShardedOptimizer([p], Forgetful, backend, divides_parameters=True, lr=1.0)
        for reason in ("<lambda>", "torch._C.Generator"):
            p.grad = torch.ones(30)
            optimizer.step()
            with pytest.raises(ValueError, match=f"state of Forgetful cannot be given.*{reason}"):
                optimizer.consolidate_state_dict(root)

    on_ranks(3, body)


def test_a_state_is_loaded_by_its_own_numbers_as_hooks_leave_it(on_ranks: OnRanks) -> None:
    def body(backend: Any) -> Any:
        a, b = torch.nn.Parameter(torch.zeros(3)), torch.nn.Parameter(torch.zeros(5))
        optimizer = fd.ShardedOptimizer([a, b], torch.optim.SGD, backend, lr=1, momentum=0.5)

        def halve(_: Any, given: Any) -> Any:
            buffers = {n: each["momentum_buffer"] / 2 for n, each in given["state"].items()}
            return {**given, "state": {n: {"momentum_buffer": b} for n, b in buffers.items()}}

        optimizer.register_load_state_dict_pre_hook(halve)
        (group,) = torch.optim.SGD([a, b], lr=1, momentum=0.5).state_dict()["param_groups"]
        state = {n: {"momentum_buffer": torch.full((n,), 4.0)} for n in (3, 5)}
        optimizer.load_state_dict({"state": state, "param_groups": [{**group, "params": [3, 5]}]})
        optimizer.consolidate_state_dict(root=None)
        state = optimizer.state_dict()["state"]
        return [state[number]["momentum_buffer"].tolist() for number in (0, 1)]

    assert on_ranks(2, body) == [[[2.0] * 3, [2.0] * 5]] * 2


def test_a_schedule_and_groups_act_on_the_shares(on_ranks: OnRanks) -> None:
    def train(net: Any, make_optimizer: Callable[[Any], Any], rows: slice) -> Any:
        first, second = net[0].parameters(), net[2].parameters()
        groups = [{"params": list(first), "lr": 0.2}, {"params": list(second), "weight_decay": 0.1}]
        optimizer = make_optimizer(groups)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)
        for step in range(6):
            if step == 3:
                optimizer.add_param_group({"params": list(net[3].parameters()), "lr": 0.3})
            optimizer.zero_grad()
            backward(net, rows)
            optimizer.step()
            schedule.step()
        return weights(net)

    def body(backend: Any) -> Any:
        def sharded(groups: Any) -> Any:
            return fd.ShardedOptimizer(groups, torch.optim.SGD, backend, lr=0.1, momentum=0.9)

        return train(model(), sharded, own(backend))

    def plain(groups: Any) -> Any:
        return torch.optim.SGD(groups, lr=0.1, momentum=0.9)

    assert_same(on_ranks(3, body)[0], train(model(), plain, slice(None)))


def test_a_parameter_used_nowhere_is_not_stepped(on_ranks: OnRanks) -> None:
    def body(backend: Any) -> None:
        used, somewhere, nowhere = (torch.nn.Parameter(torch.ones(5)) for _ in range(3))
        optimizer = fd.ShardedOptimizer(
            [used, somewhere, nowhere], torch.optim.AdamW, backend, lr=0.1, weight_decay=0.5
        )
        (used.sum() + (somewhere.sum() if backend.rank == 1 else 0)).backward()
        optimizer.step()
        assert (used != 1).all()
        assert (somewhere != 1).all()
        assert (nowhere == 1).all()

    on_ranks(2, body)


def test_sum_adds_the_gradients(on_ranks: OnRanks) -> None:
    def body(backend: Any) -> Any:
        p = torch.nn.Parameter(torch.zeros(3))
        optimizer = fd.ShardedOptimizer([p], torch.optim.SGD, backend, average="sum", lr=1.0)
        (p * (backend.rank + 1)).sum().backward()
        optimizer.step()
        return p.tolist()

    assert on_ranks(2, body) == [[-3.0] * 3] * 2


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "complex64"])
def test_dtypes_may_be_mixed(on_ranks: OnRanks, dtype: str) -> None:
    def body(backend: Any) -> Any:
        a = torch.nn.Parameter(torch.ones(5, dtype=getattr(torch, dtype)))
        b = torch.nn.Parameter(torch.ones(2, 2, dtype=torch.float64))
        optimizer = fd.ShardedOptimizer([a, b], torch.optim.SGD, backend, lr=0.25)
        a.grad, b.grad = torch.full_like(a, 1 + backend.rank), torch.full_like(b, 3 - backend.rank)
        optimizer.step()
        return a.dtype, a.detach().to(torch.complex128).tolist(), b.tolist()

    low = getattr(torch, dtype)
    expected = (low, [1 - 0.25 * 1.5 + 0j] * 5, [[1 - 0.25 * 2.5] * 2] * 2)
    assert on_ranks(2, body) == [expected] * 2


@pytest.mark.parametrize("average", ["mean", None])
def test_gradients_of_another_dtype_are_averaged_and_stepped_in_it(
    on_ranks: OnRanks, average: str | None
) -> None:
    def body(backend: Any) -> Any:
        p = torch.nn.Parameter(torch.zeros(5, dtype=torch.bfloat16))
        p.grad_dtype = torch.float32
        optimizer = fd.ShardedOptimizer([p], torch.optim.SGD, backend, average=average, lr=1.0)
        own = (1 if backend.rank else -1) if average else 0
        p.grad = torch.full((5,), 2.0**-10 + 256 * own)  # more than bfloat16 can hold
        optimizer.step()
        return p.dtype, p.tolist()

    assert on_ranks(2, body) == [(torch.bfloat16, [-(2.0**-10)] * 5)] * 2


class DescentIn8Bits(Optimizer):
    def __init__(self, params: Any) -> None:
        super().__init__(params, {})

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                with torch.no_grad():
                    p.copy_(p.float() - p.grad.float())


@pytest.mark.parametrize("average", ["mean", None])
def test_parameters_of_8_bits_are_stepped_by_wider_gradients(
    on_ranks: OnRanks, average: str | None
) -> None:
    def body(backend: Any) -> Any:
        p = torch.nn.Parameter(torch.zeros(5).to(torch.float8_e5m2))
        p.grad_dtype = torch.float32
        optimizer = fd.ShardedOptimizer([p], DescentIn8Bits, backend, average=average)
        p.grad = torch.full((5,), 2.0 * backend.rank if average else 1.0)
        optimizer.step()
        return p.float().tolist()

    assert on_ranks(2, body) == [[-1.0] * 5] * 2


def test_parameters_of_any_layout_are_stepped(on_ranks: OnRanks) -> None:
    x = torch.ones(2, 3, 5, 5, dtype=torch.float64)

    def body(backend: Any) -> Any:
        net = randomize(torch.nn.Conv2d(3, 4, 3)).to(memory_format=torch.channels_last)
        optimizer = fd.ShardedOptimizer(net.parameters(), torch.optim.SGD, backend, lr=0.1)
        net(x).sum().backward()
        optimizer.step()
        assert net.weight.is_contiguous(memory_format=torch.channels_last)
        return weights(net)

    net = randomize(torch.nn.Conv2d(3, 4, 3))
    net(x).sum().backward()
    torch.optim.SGD(net.parameters(), lr=0.1).step()
    for outcome in on_ranks(3, body):
        for a, b in zip(outcome, weights(net), strict=True):
            torch.testing.assert_close(torch.tensor(a), torch.tensor(b))


def test_parameters_may_move_to_other_memory(on_ranks: OnRanks) -> None:
    def body(backend: Any) -> Any:
        p = torch.nn.Parameter(torch.ones(6))
        optimizer = fd.ShardedOptimizer([p], torch.optim.SGD, backend, lr=1.0)
        p.data = torch.full((6,), 5.0)
        p.sum().backward()
        optimizer.step()
        return p.tolist()

    assert on_ranks(2, body) == [[4.0] * 6] * 2


def test_a_closure_is_called_once(on_ranks: OnRanks) -> None:
    def body(backend: Any) -> Any:
        p = torch.nn.Parameter(torch.ones(2))
        optimizer = fd.ShardedOptimizer([p], torch.optim.SGD, backend, lr=1.0)

        def closure() -> Any:
            optimizer.zero_grad()
            loss = p.sum()
            loss.backward()
            return loss.detach()

        return float(optimizer.step(closure)), p.tolist()

    assert on_ranks(3, body) == [(2.0, [0.0, 0.0])] * 3


class Refuses(SGD):
    """Refuses to step a parameter with a negative element."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            if any((p < 0).any() for p in group["params"]):
                raise KeyError("no such step")
        return super().step(closure)


@pytest.mark.parametrize("where", ["step", "closure"])
def test_a_step_that_fails_on_one_rank_tells_the_others(on_ranks: OnRanks, where: str) -> None:
    told = threading.Barrier(3)

    def body(backend: Any) -> None:
        p = torch.nn.Parameter(torch.ones(30))
        if where == "step":
            p.data[15] = -1  # in the share of rank 1
        optimizer = fd.ShardedOptimizer([p], Refuses, backend, divides_parameters=True, lr=1.0)

        def closure() -> None:
            p.grad = torch.ones(30)
            if where == "closure" and backend.rank == 1:
                raise KeyError("no such batch")

        error = KeyError if backend.rank == 1 else fd.DistributedError
        with pytest.raises(error, match=r"rank 1|no such"):
            optimizer.step(closure)
        told.wait(60)  # before any rank leaves the group

    on_ranks(3, body)


def test_a_rank_without_memory_for_its_share_tells_the_others(
    on_ranks: OnRanks, monkeypatch: pytest.MonkeyPatch
) -> None:
    def make(backend: Any) -> fd.ShardedOptimizer:
        p = torch.nn.Parameter(torch.ones(30))
        return fd.ShardedOptimizer([p], SGD, backend, lr=1.0)

    assert_lack_is_told(on_ranks, monkeypatch, make)


def test_ranks_that_disagree_are_told(on_ranks: OnRanks) -> None:
    def body(backend: Any) -> None:
        p = torch.nn.Parameter(torch.ones(2 + backend.rank))
        with pytest.raises(fd.CollectiveMismatch, match=r"float32 \(3,\)"):
            fd.ShardedOptimizer([p], torch.optim.SGD, backend, lr=1.0)
        q = torch.nn.Parameter(torch.ones(2))
        with pytest.raises(fd.CollectiveMismatch, match="'lr': 2"):
            fd.ShardedOptimizer([q], torch.optim.SGD, backend, lr=1.0 + backend.rank)
        rate = torch.tensor(1.0 + backend.rank)
        with pytest.raises(fd.CollectiveMismatch, match="'lr': 2"):
            fd.ShardedOptimizer([q], torch.optim.SGD, backend, lr=rate)
        betas = (torch.tensor(0.9 + 1e-5 * backend.rank), torch.tensor(0.999))
        with pytest.raises(fd.CollectiveMismatch, match=r"'betas': \(0\.9000"):
            fd.ShardedOptimizer([q], torch.optim.Adam, backend, betas=betas, foreach=False)

    on_ranks(2, body)


class Decaying(SGD):
    """Takes a function among its options."""

    def __init__(self, params: Any, lr: float, decay: Callable[[float], float]) -> None:
        super().__init__(params, lr=lr)
        for group in self.param_groups:
            group["decay"] = decay


def test_a_function_may_lie_elsewhere_on_each_rank(on_ranks: OnRanks) -> None:
    def body(backend: Any) -> None:
        p = torch.nn.Parameter(torch.ones(2))
        optimizer = fd.ShardedOptimizer([p], Decaying, backend, lr=1.0, decay=lambda x: x / 2)
        assert optimizer.param_groups[0]["decay"](4.0) == 2.0

    on_ranks(2, body)


def test_parameters_on_which_ranks_disagree_are_not_added(on_ranks: OnRanks) -> None:
    def body(backend: Any) -> None:
        p, q, r = (torch.nn.Parameter(torch.ones(2)) for _ in range(3))
        optimizer = fd.ShardedOptimizer([p], torch.optim.SGD, backend, lr=1.0)
        with pytest.raises(fd.CollectiveMismatch, match="'lr': 2"):
            optimizer.add_param_group({"params": [q], "lr": 1.0 + backend.rank})
        optimizer.add_param_group({"params": [r, q]})
        (p + q + r).sum().backward()
        optimizer.step()
        assert [each.tolist() for each in (p, q, r)] == [[0.0, 0.0]] * 3

    on_ranks(2, body)


class Choosy(SGD):
    """Refuses a negative momentum, which torch looks at in its constructor alone."""

    def add_param_group(self, param_group: Any) -> None:
        super().add_param_group(param_group)
        if param_group["momentum"] < 0:
            raise ValueError("choosy")


def test_parameters_that_the_optimizer_refuses_are_not_added(on_ranks: OnRanks) -> None:
    def body(backend: Any) -> None:
        p, q = (torch.nn.Parameter(torch.ones(4)) for _ in range(2))
        optimizer = fd.ShardedOptimizer([p], Choosy, backend, lr=1.0)
        with pytest.raises(ValueError, match="choosy"):
            optimizer.add_param_group({"params": [q], "momentum": -1.0})
        (p + q).sum().backward()
        optimizer.step()
        assert [each.tolist() for each in (p, q)] == [[0.0] * 4, [1.0] * 4]
        optimizer.add_param_group({"params": [q]})
        optimizer.step()
        assert [each.tolist() for each in (p, q)] == [[-1.0] * 4, [0.0] * 4]

    on_ranks(2, body)


def test_parameters_that_one_rank_refuses_are_noticed_in_the_next_step(on_ranks: OnRanks) -> None:
    def body(backend: Any) -> None:
        p, q = (torch.nn.Parameter(torch.ones(4)) for _ in range(2))
        is_refused = backend.rank == 1

        class ChoosyOnOneRank(Choosy):
            def add_param_group(self, param_group: Any) -> None:
                # What ranks compare is the same on all.
                momentum = -1.0 if is_refused and self.param_groups else 0.0
                super().add_param_group({**param_group, "momentum": momentum})

        optimizer = fd.ShardedOptimizer([p], ChoosyOnOneRank, backend, lr=1.0)
        with pytest.raises(ValueError, match="choosy") if is_refused else contextlib.nullcontext():
            optimizer.add_param_group({"params": [q]})
        with pytest.raises(fd.CollectiveMismatch):
            optimizer.step()

    on_ranks(2, body)


def test_what_cannot_be_divided_is_refused(on_ranks: OnRanks) -> None:
    def body(backend: Any) -> None:
        p = torch.nn.Parameter(torch.ones(2, 2))
        with pytest.raises(TypeError, match="LBFGS: it looks at all parameters"):
            fd.ShardedOptimizer([p], torch.optim.LBFGS, backend)
        with pytest.raises(TypeError, match="a set is not a sequence: give a list"):
            fd.ShardedOptimizer({p}, torch.optim.SGD, backend, lr=1.0)
        with pytest.raises(TypeError, match="a class of optimizers"):
            fd.ShardedOptimizer([p], torch.optim.SGD([p], lr=1.0), backend)
        for average in ("max", ["mean"]):
            with pytest.raises(ValueError, match="average must be 'mean', 'sum' or None, not"):
                fd.ShardedOptimizer(
                    [p], torch.optim.SGD, backend, average=cast(Any, average), lr=1.0
                )
        with pytest.raises(ValueError, match="divides_parameters must be True, False or None"):
            fd.ShardedOptimizer(
                [p], torch.optim.SGD, backend, divides_parameters=cast(Any, "x"), lr=1.0
            )
        with pytest.raises(ValueError, match="learning rate"):
            fd.ShardedOptimizer([p], torch.optim.SGD, backend, lr=-1.0)
        optimizer = fd.ShardedOptimizer([p], torch.optim.SGD, backend, lr=1.0)
        with pytest.raises(TypeError, match=r"backend must be a group.*not None"):
            fd.ShardedOptimizer([p], torch.optim.SGD, cast(Any, None), lr=1.0)
        for max_norm in (-1.0, float("nan")):
            with pytest.raises(ValueError, match="max_norm must be at least 0"):
                optimizer.clip_grad_norm_(max_norm)
        for root in (7, "0"):
            with pytest.raises(fd.InvalidRank, match=f"ShardedOptimizer: root {root!r} is not"):
                optimizer.consolidate_state_dict(cast(Any, root))
        with pytest.raises(TypeError, match="cannot be pickled"):
            copy.deepcopy(optimizer)
        p.grad = torch.ones(2, 2).to_sparse()
        with pytest.raises(TypeError, match="sparse"):
            optimizer.step()

    on_ranks(1, body)


def test_what_an_optimizer_refuses_by_its_shape_is_refused_on_all_ranks(on_ranks: OnRanks) -> None:
    def body(backend: Any) -> float:
        layer = torch.nn.Linear(4, 3)
        with pytest.raises(ValueError, match="only supports 2D parameters"):
            fd.ShardedOptimizer(layer.parameters(), torch.optim.Muon, backend)
        return float(fd.allreduce(torch.ones(1), backend))

    assert on_ranks(2, body) == [2.0, 2.0]


class Flattening(Optimizer):
    """Looks at parameters, and writes to them, in its constructor."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})
        for p in (p for group in self.param_groups for p in group["params"]):
            p.detach().view(-1).clamp_(min=0)

    def step(self, closure: Any = None) -> None:
        raise NotImplementedError


@pytest.mark.parametrize("divides_parameters", [False, True])
def test_an_optimizer_may_write_to_parameters_when_it_is_made(
    on_ranks: OnRanks, divides_parameters: bool
) -> None:
    def body(backend: Any) -> None:
        layer = torch.nn.Linear(4, 3)
        fd.ShardedOptimizer(
            layer.parameters(), Flattening, backend, divides_parameters=divides_parameters
        )

    on_ranks(2, body)


def test_the_default_device_of_torch_is_not_where_parameters_are(on_ranks: OnRanks) -> None:
    def body(backend: Any) -> list[float]:
        weight = torch.nn.Parameter(torch.zeros(3))
        optimizer = fd.ShardedOptimizer([weight], SGD, backend, lr=1.0)
        weight.grad = torch.full((3,), float(backend.rank))
        with torch.device("meta"):
            optimizer.clip_grad_norm_(100.0)
            optimizer.step()
        return cast("list[float]", weight.tolist())

    assert on_ranks(2, body) == [[-0.5] * 3] * 2


@pytest.mark.parametrize(
    ("p", "message"),
    [
        (torch.ones(3).to(torch.float8_e4m3fnuz), "its dtype is torch.float8_e4m3fnuz"),
        (torch.ones(3).to(torch.float8_e5m2), "is float8_e5m2; gradients are averaged in float16"),
        (torch.ones(3, device="meta"), "is on meta"),
        (torch.ones(1).expand(4), "was expanded"),
        (torch.eye(3).to_sparse(), "is torch.sparse_coo"),
    ],
)
def test_parameters_that_no_group_moves_are_refused_before_anything_is_sent(
    on_ranks: OnRanks, p: Any, message: str
) -> None:
    def body(backend: Any) -> None:
        plain = torch.nn.Parameter(torch.ones(3))
        optimizer = fd.ShardedOptimizer([plain], torch.optim.SGD, backend, lr=1.0)
        params = [torch.nn.Parameter(torch.ones(3)), torch.nn.Parameter(p)]
        refusal = f"ShardedOptimizer: parameter 1 of group {{}}.* {message}"
        with pytest.raises(fd.InvalidArray, match=refusal.format(0)):
            fd.ShardedOptimizer(params, torch.optim.SGD, backend, lr=1.0)
        with pytest.raises(fd.InvalidArray, match=refusal.format(1)):
            optimizer.add_param_group({"params": params})
        plain.grad = torch.ones(3)
        optimizer.step()

    on_ranks(2, body)


def test_a_sparse_gradient_of_one_rank_is_refused_on_all(on_ranks: OnRanks) -> None:
    def body(backend: Any) -> None:
        p = torch.nn.Parameter(torch.ones(2, 2))
        optimizer = fd.ShardedOptimizer([p], torch.optim.SGD, backend, lr=1.0)
        p.grad = torch.ones(2, 2).to_sparse() if backend.rank else torch.ones(2, 2)
        with pytest.raises(TypeError, match="sparse"):
            optimizer.step()
        p.grad = torch.ones(2, 2)
        optimizer.step()

    on_ranks(2, body)
