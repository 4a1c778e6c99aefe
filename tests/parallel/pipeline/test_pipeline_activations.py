"""What may travel between stages, and what comes back for it."""

from __future__ import annotations

import copy
import threading
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from ranks_as_threads import OnRanks

torch = pytest.importorskip("torch", reason="torch is not installed")

from parallel.pipeline.pipeline_models import (  # noqa: E402 - needs torch
    SCHEDULES,
    WIDTH,
    Block,
    Case,
    assert_same,
    batch,
    by_name,
    chain,
    make_pipeline,
    mean_square,
    run_pipelined,
    run_whole,
)
from torch import nn  # noqa: E402

import ferro_dist as fd  # noqa: E402
from ferro_dist.parallel.pipeline.activation_channel import ArraySpec  # noqa: E402
from ferro_dist.parallel.pipeline.stage import make_stage  # noqa: E402
from ferro_dist.parallel.schedules import generate, simulate  # noqa: E402


class Tupled(nn.Module):
    """Passes a tuple on, of which a part is used by the next stage only."""

    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Linear(WIDTH, WIDTH)
        self.right = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Any) -> Any:
        a, b = x if isinstance(x, tuple) else (x, x)
        return torch.tanh(self.left(a)) + b, self.right(b)


class Mapped(nn.Module):
    """Passes on a dict with everything that a tree may have."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Any) -> Any:
        if not isinstance(x, dict):
            x = {
                "h": x,
                "count": 0,
                "flag": True,
                "none": None,
                "scale": 0.5,
                "name": "stage",
                3: [torch.arange(len(x)), (torch.ones(len(x), dtype=torch.bool),)],
            }
        assert type(x["count"]) is int
        assert x["flag"] is True
        assert x["none"] is None
        assert x["scale"] == 0.5
        assert x["name"] == "stage"
        rows, (mask,) = x[3]
        assert rows.dtype == torch.int64
        assert mask.dtype == torch.bool
        h = torch.tanh(self.layer(x["h"])) * mask[:, None] + x["scale"]
        return {**x, "h": h, "count": x["count"] + 1}


class Tokens(nn.Module):
    """A first stage whose input has no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, WIDTH)

    def forward(self, tokens: Any) -> Any:
        return self.embedding(tokens)


def of_first(output: Any, target: Any) -> Any:
    return mean_square(output[0], target) + 0.1 * output[1].square().mean()


def of_mapping(output: Any, target: Any) -> Any:
    return mean_square(output["h"], target) * output["count"]


@pytest.mark.parametrize("num_microbatches", [1, 3])
@pytest.mark.parametrize("case", SCHEDULES, ids=by_name)
def test_tuples_travel(
    on_ranks: OnRanks, case: tuple[str, int, int], num_microbatches: int
) -> None:
    model = chain(Case(*case).num_stages, lambda _: Tupled())
    x, y = batch(7)
    pipelined = run_pipelined(
        on_ranks, Case(*case), model, x, y, num_microbatches, loss_fn=of_first
    )
    assert_same(pipelined, run_whole(model, x, y, of_first))


@pytest.mark.parametrize("num_microbatches", [1, 3])
@pytest.mark.parametrize("case", SCHEDULES, ids=by_name)
def test_dicts_none_numbers_and_masks_travel(
    on_ranks: OnRanks, case: tuple[str, int, int], num_microbatches: int
) -> None:
    model = chain(Case(*case).num_stages, lambda _: Mapped())
    x, y = batch(7)
    pipelined = run_pipelined(
        on_ranks, Case(*case), model, x, y, num_microbatches, loss_fn=of_mapping
    )
    assert_same(pipelined, run_whole(model, x, y, of_mapping))


@pytest.mark.parametrize("case", SCHEDULES, ids=by_name)
def test_integers_enter_without_a_gradient(on_ranks: OnRanks, case: tuple[str, int, int]) -> None:
    size = Case(*case)
    base = chain(size.num_stages)
    model = nn.Sequential(nn.Sequential(Tokens().double(), base[0]), *base[1:])
    tokens = torch.arange(9) % 11
    _, y = batch(9)
    pipelined = run_pipelined(on_ranks, size, model, tokens, y, 4)
    assert_same(pipelined, run_whole(model, tokens, y))


class Frozen(nn.Module):
    """A stage with nothing to train, in a dtype of its own."""

    def __init__(self, dtype: Any) -> None:
        super().__init__()
        self.dtype = dtype

    def forward(self, x: Any) -> Any:
        return (x * 2).to(self.dtype)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "complex64"])
def test_every_floating_dtype_travels_with_its_gradient(on_ranks: OnRanks, dtype: str) -> None:
    model = nn.Sequential(
        nn.Linear(WIDTH, WIDTH), Frozen(getattr(torch, dtype)), Frozen(torch.complex64)
    )
    x = batch(4)[0].float()

    def loss_fn(output: Any) -> Any:
        return output.real.square().mean()

    def body(backend: Any) -> Any:
        own = copy.deepcopy(model)
        pipe = fd.Pipeline(own[backend.rank], backend, 2, "zb_h1")
        pipe.step(x, loss_fn=loss_fn)
        return own[0].weight.grad

    loss_fn(model(x)).backward()
    torch.testing.assert_close(on_ranks(3, body)[0], model[0].weight.grad)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_outputs_are_joined_in_their_own_dtype_under_autocast(
    on_ranks: OnRanks, dtype: str
) -> None:
    x, _ = batch(4)
    wanted = getattr(torch, dtype)

    def body(backend: Any) -> Any:
        pipe = fd.Pipeline(Frozen(wanted), backend, 2)
        with torch.autocast("cpu", torch.bfloat16):
            return pipe.eval(x)

    _, output = on_ranks(2, body)
    torch.testing.assert_close(output, ((x * 2).to(wanted) * 2).to(wanted))


def test_arrays_may_be_strided_empty_or_scalar(on_ranks: OnRanks) -> None:
    class Odd(nn.Module):
        def forward(self, x: Any) -> Any:
            h = x[0] if isinstance(x, tuple) else x
            return h.t().contiguous().t(), h[:, :0], h.sum()

    x, _ = batch(5)
    given = x.clone().requires_grad_()

    def body(backend: Any) -> None:
        pipe = fd.Pipeline(Odd(), backend, 2, "1f1b")
        pipe.step(given if backend.rank == 0 else None, loss_fn=lambda o: o[2])

    on_ranks(3, body)
    # 3 of 5 rows, and 2: the loss is a sum, weighted by the share of rows.
    expected = torch.tensor([3 / 5] * 3 + [2 / 5] * 2, dtype=x.dtype)[:, None].expand_as(x)
    torch.testing.assert_close(given.grad, expected)


def test_conjugates_and_negatives_that_are_pending_travel(on_ranks: OnRanks) -> None:
    class Conjugate(nn.Module):
        def forward(self, x: Any) -> Any:
            z = torch.complex(x, 2 * x).conj()
            return z, z.imag  # of a conjugate: a negative that is pending

    class Parts(nn.Module):
        def forward(self, parts: Any) -> Any:
            z, imaginary = parts
            return z.real + 3 * z.imag + 5 * imaginary

    model = chain(3, lambda s: (nn.Linear(WIDTH, WIDTH), Conjugate(), Parts())[s])
    x, y = batch(6)
    for schedule in ("1f1b", "zb_h1"):
        pipelined = run_pipelined(on_ranks, Case(schedule, 3, 1), model, x, y, 3)
        assert_same(pipelined, run_whole(copy.deepcopy(model), x, y))


def test_gradients_that_are_conjugates_or_sparse_travel(on_ranks: OnRanks) -> None:
    class Table(nn.Module):
        def forward(self, x: Any) -> Any:
            return x[:3], torch.complex(x, 2 * x)

    class Use(nn.Module):
        is_sparse = True

        def forward(self, inputs: Any) -> Any:
            table, z = inputs
            rows = torch.arange(len(z)) % 3
            looked_up = nn.functional.embedding(rows, table, sparse=self.is_sparse)
            return looked_up + (z.conj() * (1 + 2j)).real

    model = chain(3, lambda s: (nn.Linear(WIDTH, WIDTH), Table(), Use())[s])
    whole: Any = copy.deepcopy(model)
    whole[2].is_sparse = False
    x, y = batch(6)
    expected = run_whole(whole, x, y)
    for schedule in ("1f1b", "zb_h1"):
        assert_same(run_pipelined(on_ranks, Case(schedule, 3, 1), model, x, y, 1), expected)


def test_output_that_is_the_input_passes_the_gradient_on(on_ranks: OnRanks) -> None:
    model = chain(3, lambda s: nn.Identity() if s < 2 else nn.Linear(WIDTH, WIDTH))
    x, y = batch(6)
    for schedule in ("1f1b", "zb_h1"):
        pipelined = run_pipelined(on_ranks, Case(schedule, 3, 1), model, x, y, 3)
        assert_same(pipelined, run_whole(copy.deepcopy(model), x, y))


def test_trees_go_in_as_inputs_and_targets(on_ranks: OnRanks) -> None:
    class Sum(nn.Module):
        def forward(self, x: Any) -> Any:
            return x["a"] + x["b"] if isinstance(x, dict) else x * 2

    x, y = batch(6)

    def body(backend: Any) -> Any:
        pipe = fd.Pipeline(Sum(), backend, 2, "gpipe")
        a = x.clone().requires_grad_()
        loss = pipe.step(
            {"a": a, "b": y, "c": None, "d": 7},
            (y, {"z": x}),
            lambda o, t: (o - t[0]).square().mean() + t[1]["z"].mean(),
        )
        return loss, a.grad, pipe.input_grad

    loss, gradient, of_tree = on_ranks(2, body)[0]
    a = x.clone().requires_grad_()
    expected = (2 * (a + y) - y).square().mean() + x.mean()
    expected.backward()
    assert loss == pytest.approx(float(expected.detach()), rel=1e-12)
    torch.testing.assert_close(gradient, a.grad)
    assert of_tree["b"] is None
    torch.testing.assert_close(of_tree["a"], a.grad)


def test_input_that_is_no_leaf_gets_its_gradient_back(on_ranks: OnRanks) -> None:
    model = chain(2)
    x, y = batch(6)
    scale = torch.tensor(3.0, dtype=torch.float64, requires_grad=True)

    def body(backend: Any) -> None:
        pipe = fd.Pipeline(copy.deepcopy(model)[backend.rank], backend, 3, "1f1b")
        pipe.step(x * scale if backend.rank == 0 else None, y, mean_square)

    on_ranks(2, body)
    again = torch.tensor(3.0, dtype=torch.float64, requires_grad=True)
    mean_square(model(x * again), y).backward()
    torch.testing.assert_close(scale.grad, again.grad)


def test_inputs_of_one_graph_get_their_gradients_back(on_ranks: OnRanks) -> None:
    class Sum(nn.Module):
        def forward(self, x: Any) -> Any:
            return x["once"] + x["again"].square() + x["twice"]

    def gradient(train: Callable[[Any, Any], object]) -> Any:
        x, y = batch(6)
        scale = torch.tensor(3.0, dtype=torch.float64, requires_grad=True)
        h = (x * scale).tanh()
        train({"once": h, "again": h, "twice": 2 * h}, y)
        return scale.grad

    def body(backend: Any) -> Any:
        stage = Sum() if backend.rank == 0 else nn.Identity()
        pipe = fd.Pipeline(stage, backend, 3, "1f1b")
        return gradient(lambda x, y: pipe.step(x, y, mean_square))

    ours, _ = on_ranks(2, body)
    torch.testing.assert_close(ours, gradient(lambda x, y: mean_square(Sum()(x), y).backward()))


@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1"])
def test_input_that_some_microbatches_do_not_use_has_zeros_there(
    on_ranks: OnRanks, schedule: str
) -> None:
    class Gate(nn.Module):
        def forward(self, x: Any) -> Any:
            (open_rows,) = x["gate"].nonzero(as_tuple=True)
            if not len(open_rows):
                return x["base"].detach()
            return x["base"].index_add(0, open_rows, x["more"][open_rows])

    x, y = batch(6)
    model = nn.Sequential(Gate(), chain(1))
    gate = torch.tensor([0, 0, 1, 0, 0, 0])

    def inputs() -> dict[str, Any]:
        return {"base": y, "gate": gate, "more": x.clone().requires_grad_()}

    def body(backend: Any) -> Any:
        pipe = fd.Pipeline(copy.deepcopy(model)[backend.rank], backend, 3, schedule)
        own = inputs()
        pipe.step(own, y, mean_square)
        return pipe.input_grad, own["more"].grad

    of_tree, gradient = on_ranks(2, body)[0]
    whole = inputs()
    mean_square(model(whole), y).backward()
    assert of_tree["gate"] is None
    for found in (of_tree["more"], gradient):
        torch.testing.assert_close(found, whole["more"].grad)


def test_sends_do_not_hold_up_compute(on_ranks: OnRanks) -> None:
    has_run_all = threading.Event()

    class First(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.left = 8

        def forward(self, x: Any) -> Any:
            self.left -= 1
            if not self.left:
                has_run_all.set()
            return x.repeat(1, 1 << 20)  # more than what any buffer holds

    class Second(nn.Module):
        def forward(self, x: Any) -> Any:
            assert has_run_all.wait(60), "rank 0 waits until what it has sent is received"
            return x.mean()

    def body(backend: Any) -> None:
        stage = Second() if backend.rank else First()
        # Without a seed: with one, threads run forward one at a time.
        fd.Pipeline(stage, backend, 8, "gpipe", seed=None).step(torch.zeros(8, 1))

    on_ranks(2, body)


# Memory


class Saves(torch.autograd.Function):  # type: ignore[name-defined]
    """Counts the tensors that it has saved and that are still there."""

    @staticmethod
    def forward(ctx: Any, x: Any, alive: set[Any], peak: list[int]) -> Any:
        saved = x * 1.0
        ctx.save_for_backward(saved)
        marker = object.__new__(Marker)
        ctx.marker = marker
        key = id(marker)
        alive.add(key)
        weakref.finalize(marker, alive.discard, key)
        peak[0] = max(peak[0], len(alive))
        return x * 2.0

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        (_,) = ctx.saved_tensors
        return gradient * 2.0, None, None


class Marker:
    """Lives as long as one node of a graph."""


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_1f1b_keeps_no_more_microbatches_than_ranks_below(
    on_ranks: OnRanks, num_ranks: int
) -> None:
    class Watched(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(WIDTH, WIDTH).double()
            self.alive: set[Any] = set()
            self.peak = [0]

        def forward(self, x: Any) -> Any:
            return Saves.apply(self.layer(x), self.alive, self.peak)

    x, y = batch(24)

    def body(backend: Any) -> Any:
        stage = Watched()
        fd.Pipeline(stage, backend, 12, "1f1b").step(x, y, mean_square)
        return stage.peak[0], len(stage.alive)

    for rank, (peak, left) in enumerate(on_ranks(num_ranks, body)):
        assert peak <= num_ranks - rank
        assert left == 0


class Saved:
    """What autograd has saved in one forward."""

    def __init__(self, tensor: Any, forward: object) -> None:
        self.tensor = tensor.detach()  # an output would keep itself, by way of its node
        self.forward = forward


class SavesCounted(Block):
    """Adds what autograd saves to a set, and notes of how many forwards something is there."""

    def __init__(self, alive: weakref.WeakSet[Saved], peak: list[int]) -> None:
        super().__init__()
        self.alive = alive
        self.peak = peak

    def forward(self, x: Any) -> Any:
        forward = object()

        def keep(tensor: Any) -> Saved:
            saved = Saved(tensor, forward)
            self.alive.add(saved)
            return saved

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda saved: saved.tensor):
            output = super().forward(x)
        self.peak[0] = max(self.peak[0], len({saved.forward for saved in self.alive}))
        return output


@pytest.mark.parametrize("case", SCHEDULES, ids=by_name)
def test_microbatches_are_live_as_long_as_in_the_simulation(
    on_ranks: OnRanks, case: tuple[str, int, int]
) -> None:
    """A divided backward keeps what it needs for the weights until it is through with them."""
    size = Case(*case)
    x, y = batch(24)

    def body(backend: Any) -> Any:
        alive, peak = weakref.WeakSet[Saved](), [0]
        model = nn.Sequential(*(SavesCounted(alive, peak) for _ in range(size.num_stages)))
        make_pipeline(model.double(), size, backend, 12).step(x, y, mean_square)
        return peak[0], len(alive)

    lists = generate(size.schedule, size.num_ranks, 12, size.stages_per_rank)
    expected = [(live, 0) for live in simulate(lists).peak_live]
    assert on_ranks(size.num_ranks, body) == expected


def test_output_is_released_once_it_has_been_sent(on_ranks: OnRanks) -> None:
    class Watched(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(WIDTH, WIDTH).double()
            self.outputs: list[Any] = []
            self.alive_in_backward: list[int] = []

        def forward(self, x: Any) -> Any:
            output = self.layer(x) + 1.0  # which saves nothing of its output
            self.outputs.append(weakref.ref(output.untyped_storage()))
            output.register_hook(self.count)
            return output

        def count(self, _: Any) -> None:
            self.alive_in_backward.append(sum(ref() is not None for ref in self.outputs))

    x, y = batch(16)

    def body(backend: Any) -> Any:
        stage = Watched()
        fd.Pipeline(stage, backend, 8, "gpipe").step(x, y, mean_square)
        return stage.alive_in_backward

    # Rank 1 has received all eight before it runs its first backward.
    alive = on_ranks(2, body)[0]
    assert alive[1:] == [0] * 7


def test_batch_is_released_after_its_step(on_ranks: OnRanks) -> None:
    def body(backend: Any) -> None:
        pipe = fd.Pipeline(chain(1), backend, 2, "1f1b")
        given = batch(4)
        pipe.step(*given, mean_square)
        kept = [weakref.ref(tensor) for tensor in given]
        del given
        assert [reference() for reference in kept] == [None, None]
        assert len(pipe.plan().spans) == 8

    on_ranks(2, body)


@pytest.mark.parametrize(
    ("case", "most"),
    [
        (("1f1b", 2, 1), 4),
        (("zb_h1", 3, 1), 9),
        (("interleaved_1f1b", 2, 2), 12),
        (("zb_v", 2, 2), 12),
    ],
)
def test_receive_buffers_do_not_grow_with_microbatches(
    on_ranks: OnRanks, case: tuple[str, int, int], most: int
) -> None:
    size = Case(*case)
    x, y = torch.zeros(64, 4096), torch.zeros(64, 4096)

    class Scaled(nn.Module):
        def forward(self, h: Any) -> Any:
            return h * 1.0

    def body(backend: Any) -> int:
        model = nn.Sequential(*(Scaled() for _ in range(size.num_stages)))
        pipe = make_pipeline(model, size, backend, 32)
        pipe.step(x, y, mean_square)
        pools = [stage.pool for stage in pipe._stages.values()]
        free = sum(len(blocks) for pool in pools for blocks in pool._free.values())
        return free + sum(len(pool._leases) for pool in pools)

    for num_blocks in on_ranks(size.num_ranks, body):
        assert num_blocks <= most


def test_stages_of_a_rank_may_compute_with_different_libraries(on_ranks: OnRanks) -> None:
    class Torch(nn.Linear):
        def forward(self, x: Any) -> Any:
            assert isinstance(x, torch.Tensor)
            return super().forward(x)

    class Numpy:
        def forward(self, x: Any) -> Any:
            assert isinstance(x, np.ndarray)
            return x * 2, None

        def backward(self, _: None, gradient: Any) -> Any:
            assert isinstance(gradient, np.ndarray)
            return gradient * 2

    def body(backend: Any) -> None:
        stages = [Torch(WIDTH, WIDTH).double(), Numpy()]
        pipe = fd.Pipeline(stages, backend, 8, "interleaved_1f1b")
        for _ in range(4):
            pipe.step(x, loss_fn=lambda output: (output.sum(), np.ones_like(output)))

    x, _ = batch(8)
    on_ranks(2, body)


def test_default_device_of_torch_is_not_where_messages_arrive() -> None:
    stage = make_stage(nn.Linear(WIDTH, WIDTH))
    with torch.device("meta"):
        assert stage.allocate(ArraySpec("float32", (2,), False, is_on_host=True)).is_cpu


def test_module_list_holds_the_stages_of_a_rank(on_ranks: OnRanks) -> None:
    case = Case("interleaved_1f1b", 2, 2)
    model = chain(4)
    x, y = batch(4)

    def body(backend: Any) -> Any:
        own = nn.ModuleList([model[s] for s in case.stages_of(backend.rank)])
        return fd.Pipeline(own, backend, 2, case.schedule).step(x, y, mean_square)

    expected = float(mean_square(model(x), y).detach())
    assert on_ranks(2, body) == pytest.approx([expected] * 2)
    group = fd.SimulatedBackend.create_group(2)
    with pytest.raises(ValueError, match=r"has stage 0, .* is 2\. In a list, each one is a stage"):
        fd.Pipeline(nn.ModuleList([model[0], model[1]]), group[0], 2, "1f1b")
    for backend in group:
        backend.close()
