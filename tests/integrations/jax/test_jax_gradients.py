"""Pytrees of gradients: averaged after a step, or tapped inside of a compiled backward."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

import ferro_dist as fd
from ferro_dist.testing import run_ranks

jax = pytest.importorskip("jax", reason="JAX is not installed")

DEADLINE_S = 500.0  # a busy machine compiles for minutes


def wrap(backend: Any, bucket_mb: float = 25, average: str = "mean") -> Any:
    """Wrap a tree of its own; the trees of gradients are others."""
    tree = [jax.numpy.ones(1)]
    return fd.DDP(tree, backend, bucket_mb=bucket_mb, average=average, overlap="always")


def as_numpy(tree: Any) -> Any:
    return jax.tree.map(np.asarray, tree)


def tap_everything(backend: Any) -> Any:
    """Exercise what else a backward may be; return what to compare."""
    ddp = wrap(backend, bucket_mb=1e-6)
    w = jax.numpy.full(3, 2.0)
    scale = backend.rank + 1.0
    outcome: dict[str, Any] = {}

    def gradient(function: Any, params: Any) -> Any:
        return as_numpy(jax.jit(jax.grad(lambda p: function(ddp.tap(p))))(params))

    outcome["checkpoint"] = gradient(
        jax.checkpoint(lambda p: scale * (p["a"] ** 2).sum()), {"a": w}
    )
    outcome["unused"] = gradient(lambda p: scale * p["used"].sum(), {"used": w, "unused": w})
    # Compiled differently on each rank: one of them does not know that b was used.
    outcome["elsewhere"] = gradient(
        lambda p: p["x"].sum() + (p["b"].sum() if backend.rank else 0.0), {"b": w, "x": w}
    )
    outcome["tied"] = gradient(lambda p: scale * (p["t"] * p["t"]).sum(), {"t": w})
    low = {"h": w.astype("bfloat16"), "s": w, "c": w.astype("complex64")}
    outcome["mixed"] = gradient(
        lambda p: scale * (p["h"].astype("float32") + p["s"] + p["c"].real).sum(), low
    )

    def body(p: Any, x: Any) -> tuple[Any, Any]:
        g = jax.grad(lambda q: scale * x * (ddp.tap({"z": q})["z"] ** 2).sum())(p)
        return p - 0.1 * g, None

    outcome["scan"] = np.asarray(jax.jit(lambda p: jax.lax.scan(body, p, np.ones(3, "f4"))[0])(w))
    return outcome


def test_backward_of_any_kind_is_averaged() -> None:
    first, second = run_ranks(2, tap_everything, timeout=DEADLINE_S)
    jax.tree.map(assert_array_equal, first, second)
    assert_array_equal(first["checkpoint"]["a"], [6] * 3)
    assert_array_equal(first["unused"]["used"], [1.5] * 3)
    assert_array_equal(first["unused"]["unused"], [0] * 3)
    assert_array_equal(first["elsewhere"]["b"], [0.5] * 3)
    assert_array_equal(first["tied"]["t"], [6] * 3)
    assert [first["mixed"][k].dtype.name for k in "hsc"] == ["bfloat16", "float32", "complex64"]
    for leaf in first["mixed"].values():
        assert_array_equal(leaf.astype("complex64"), [1.5] * 3)
    # p - 0.1 * 2 * 1.5 * p, three times
    assert_allclose(first["scan"], 2 * 0.7**3 * np.ones(3), rtol=1e-6)


def synchronize_trees(backend: Any) -> Any:
    ddp = wrap(backend, average="sum")
    params = {"a": jax.numpy.ones(3), "count": jax.numpy.asarray(backend.rank + 1), "f": None}
    grads = jax.grad(lambda p: (p["a"] * p["count"]).sum(), allow_int=True)(params)
    synced = ddp.sync_gradients(grads)
    assert isinstance(synced["a"], jax.Array)
    assert synced["count"].dtype == jax.dtypes.float0  # which is to say that there is no gradient
    first = np.asarray(synced["a"])
    ddp.sync_gradients({"a": jax.numpy.zeros(3)})
    assert_array_equal(first, [3, 3, 3])  # results of one step are not the next one's
    with pytest.raises(TypeError, match="traced"):
        jax.jit(ddp.sync_gradients)(grads)
    return first


def test_trees_are_synchronized_outside_of_jit() -> None:
    for a in run_ranks(2, synchronize_trees, timeout=DEADLINE_S):
        assert_array_equal(a, [3, 3, 3])


def weigh_beside_an_infinity(backend: Any) -> Any:
    gradient = np.array([complex(np.inf, 6), 3 + 6j], "complex64")
    grads = {"a": jax.numpy.asarray(gradient), "scalar": jax.numpy.asarray(gradient[0])}
    return as_numpy(wrap(backend).sync_gradients(grads, weight=2.0))


def test_a_weight_keeps_what_stands_beside_an_infinity() -> None:
    for mean in run_ranks(2, weigh_beside_an_infinity, timeout=DEADLINE_S):
        assert mean["a"].tolist() == [complex(np.inf, 6), 3 + 6j]
        assert mean["scalar"].tolist() == complex(np.inf, 6)


def test_leaves_that_have_no_average_are_named() -> None:
    ones, key = jax.numpy.ones(3), jax.random.key(0)
    with fd.SimulatedBackend.create_group(1)[0] as backend:
        ddp = wrap(backend)
        for leaf, kind in (ones.astype("int32"), "int32"), (True, "bool"), (key, "key<fry>"):
            with pytest.raises(TypeError, match=rf"\['n'\].* is {kind}, which has no average"):
                ddp.sync_gradients({"a": ones, "n": leaf})
        with pytest.raises(fd.InvalidArray, match=r"\['n'\].* is masked"):
            ddp.sync_gradients({"a": ones, "n": np.ma.masked_less(np.arange(3.0), 1)})


def trace_anew_on_one_rank(backend: Any) -> list[float]:
    ddp = wrap(backend, bucket_mb=1e-6)
    gradient = jax.jit(jax.grad(lambda p, x: (ddp.tap(p)["a"] * x.sum() + p["b"] * 0).sum()))
    params = {"a": jax.numpy.ones(2), "b": jax.numpy.ones(2)}
    # The last batch of rank 1 is shorter: it alone compiles a second time.
    sizes = [4, 4] if backend.rank == 0 else [4, 2]
    return [float(gradient(params, jax.numpy.ones(size))["a"][0]) for size in sizes]


def test_ranks_may_compile_at_different_times() -> None:
    assert run_ranks(2, trace_anew_on_one_rank, timeout=DEADLINE_S) == [[4.0, 3.0]] * 2


def disagree(backend: Any) -> None:
    ddp = wrap(backend)
    with pytest.raises(fd.CollectiveMismatch, match=r"float32 \(3,\)"):
        ddp.sync_gradients([jax.numpy.ones(2 + backend.rank)])
    # A batch of trees is more than one gradient for each leaf.
    w = jax.numpy.ones(2)
    batched = jax.vmap(jax.grad(lambda p, x: (ddp.tap([p])[0] * x).sum()), (None, 0))
    with pytest.raises(Exception, match="outside of vmap"):
        jax.block_until_ready(batched(w, jax.numpy.ones((3, 2))))
    with pytest.raises(
        RuntimeError, match="an earlier step has failed: tap: a gradient came twice"
    ):
        ddp.sync_gradients([w])


def test_trees_that_differ_and_batches_of_trees_are_refused() -> None:
    run_ranks(2, disagree, timeout=DEADLINE_S)


def weigh_on_one_rank(backend: Any) -> None:
    ddp = wrap(backend, bucket_mb=1e-6, average="sum")
    grads = {name: jax.numpy.full(2, backend.rank + 1.0) for name in "abc"}

    def loss_of(params: Any) -> Any:
        return sum((backend.rank + 1) * leaf.sum() for leaf in ddp.tap(params).values())

    tapped = jax.jit(jax.grad(loss_of))

    def assert_both_go_on() -> None:
        for synced in (ddp.sync_gradients(grads), tapped(grads)):
            for leaf in synced.values():
                assert_array_equal(leaf, [3] * 2)

    assert_both_go_on()
    weight = 5 if backend.rank else None
    with pytest.raises(fd.CollectiveMismatch):
        ddp.sync_gradients(grads, weight=weight)
    assert_both_go_on()
    with pytest.raises(fd.CollectiveMismatch if weight else Exception) as caught:
        jax.block_until_ready(ddp.sync_gradients(grads, weight=5) if weight else tapped(grads))
    assert weight or "CollectiveMismatch" in str(caught.value)
    assert_both_go_on()
    # One of them knows the tree, and has three buckets under way.
    other = {"new": jax.numpy.ones(2)}
    with pytest.raises(fd.CollectiveMismatch, match="'new'"):
        ddp.sync_gradients(other if weight else grads)
    assert_both_go_on()


def test_ranks_that_disagree_go_on_afterwards() -> None:
    run_ranks(2, weigh_on_one_rank, timeout=DEADLINE_S)


def test_a_gradient_that_is_known_when_its_program_is_made_is_averaged_in_each_run() -> None:
    (backend,) = fd.SimulatedBackend.create_group(1)
    with backend:
        ddp = wrap(backend)
        step = jax.jit(jax.grad(lambda x: ddp.tap([x])[0]))
        for number in range(1, 4):
            assert step(jax.numpy.float32(7)) == 1
            assert ddp.statistics().num_rounds == number


def test_a_step_that_is_not_compiled_makes_no_program_for_its_gradients(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delattr("ferro_dist.integrations.jax.tap.io_callback")
    (backend,) = fd.SimulatedBackend.create_group(1)
    with backend:
        ddp = wrap(backend, bucket_mb=1e-6)
        gradients = jax.grad(lambda p: (ddp.tap(p)["a"] * 3 + p["b"]).sum())(
            {"a": jax.numpy.ones(2), "b": jax.numpy.ones(2)}
        )
        assert_array_equal(gradients["a"], [3, 3])
        assert ddp.statistics().num_rounds == 1
