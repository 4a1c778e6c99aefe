"""DDP of a pytree of JAX arrays: as that of a torch module, but that averages are returned."""

from __future__ import annotations

import enum
import itertools
import math
import os
from typing import Any

import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

import ferro_dist as fd
from ferro_dist.interop import jax_full_width
from ferro_dist.testing import run_ranks

jax = pytest.importorskip("jax", reason="JAX is not installed")

DEADLINE_S = 500.0  # a busy machine compiles for minutes
STEPS = 20
ROWS = 12
SIZES = (6, 16, 8, 3)
# Not drawn by JAX: each of the ways would take longer to compile that than to compile the model.
BATCHES = np.random.default_rng(4).normal(size=(STEPS, ROWS, SIZES[0])).astype("float32")


def halved(bucket: Any, backend: Any, op: Any) -> Any:
    """Reduce the halves of a bucket, one in the background."""
    first, second = np.array_split(bucket.gradients, 2)
    work = fd.allreduce(first, backend, op, out=first, async_op=True)
    return [work, fd.allreduce(second, backend, op, out=second)]


WAYS: dict[str, dict[str, Any]] = {
    "tap": {"bucket_mb": 1e-4, "overlap": "always"},
    "one bucket": {"overlap": "always"},
    "not compiled": {"bucket_mb": 1e-6, "overlap": "always"},
    "after the step": {},
    "tap after backward": {"overlap": False, "compress": "fp16"},
    "accumulated": {"bucket_mb": 1e-4},
    "PowerSGD": {"compress": fd.PowerSGD(2)},
    "own reduction": {"bucket_mb": 1e-4, "overlap": "always", "compress": halved},
}


def make_params(seed: int = 0) -> Any:
    rng = np.random.default_rng(seed)
    return [
        {"weight": jax.numpy.asarray(rng.normal(size=(n, m)) / 3), "bias": jax.numpy.zeros(m)}
        for n, m in itertools.pairwise(SIZES)
    ]


def loss(params: Any, rows: slice, step: Any) -> Any:
    """Of a share of the step's data; the last layer is used every other step."""
    x = jax.numpy.asarray(BATCHES)[step, rows]
    first, second, third = params
    x = jax.numpy.tanh(x @ first["weight"] + first["bias"])
    y = jax.numpy.tanh(x @ second["weight"] + second["bias"])
    z = jax.numpy.where(step % 2, y @ third["weight"] + third["bias"], x[:, :3])
    return ((z - 1) ** 2).mean()


@jax.jit  # type: ignore[untyped-decorator]
def descend(params: Any, grads: Any) -> Any:
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)


def as_numpy(tree: Any) -> Any:
    return jax.tree.map(np.asarray, tree)


def train(backend: Any) -> dict[str, Any]:
    """Train in each of the ways that there are; return what the parameters have become."""
    rows = slice(backend.rank, None, backend.world_size)
    trained = {}
    for name, options in WAYS.items():
        ddp = fd.DDP(make_params(seed=backend.rank), backend, **options)
        params = ddp.module

        def gradient(params: Any, step: Any, tap: Any = ddp.tap) -> Any:
            return jax.grad(lambda p: loss(tap(p), rows, step))(params)

        if name != "not compiled":
            gradient = jax.jit(gradient)
        for step in range(STEPS):
            if name == "accumulated":
                with ddp.no_sync():
                    # Compiled in the block, and used outside of it: what counts is when it runs.
                    own = gradient(params, step)
                first = ddp.sync_gradients(own, weight=7)
                grads = jax.tree.map(lambda a, b: (a + b) / 2, first, gradient(params, step))
            elif name == "after the step":
                grads = ddp.sync_gradients(jax.grad(loss)(params, rows, step))
            else:
                grads = gradient(params, step)
            params = descend(params, grads)
        ddp.verify(params)
        trained[name] = as_numpy(params)
    return trained


def train_alone() -> Any:
    params = make_params()
    gradient = jax.jit(jax.grad(lambda p, i: loss(p, slice(None), i)))
    for step in range(STEPS):
        params = descend(params, gradient(params, step))
    return as_numpy(params)


def test_twenty_steps_equal_one_process() -> None:
    alone = train_alone()
    first, *others = run_ranks(2, train, timeout=DEADLINE_S)
    for other in others:
        jax.tree.map(assert_array_equal, first, other)
    for name, params in first.items():
        # float32 sums in other order, over 20 steps of descent; 11 bits for float16.
        # PowerSGD catches up on what it leaves out.
        tolerance = {"tap after backward": 5e-3, "PowerSGD": 1e-2}.get(name, 1e-4)
        jax.tree.map(
            lambda a, b, bound=tolerance: assert_allclose(a, b, rtol=bound, atol=bound),
            params,
            alone,
        )


def behave(backend: Any) -> None:
    """Check what a wrapper does beside training."""
    rank = backend.rank
    params = {
        "w": jax.numpy.full(3, 1.0 + rank),
        "half": jax.numpy.full(2, 1.0 + rank, "bfloat16"),
        "steps": jax.numpy.asarray(5 + rank),
        "key": jax.random.key(rank),
        "activation": np.tanh,
    }
    ddp = fd.DDP(params, backend, root=1)
    assert isinstance(ddp, fd.DDP)
    assert_array_equal(ddp.module["w"], [2] * 3)
    assert int(ddp.module["steps"]) == 6
    assert ddp.module["activation"] is np.tanh
    assert_array_equal(
        jax.random.key_data(ddp.module["key"]),
        jax.random.key_data(params["key"]) if rank == 1 else jax.random.key_data(jax.random.key(1)),
    )
    assert_array_equal(params["w"], [1.0 + rank] * 3)  # what was passed stays as it was
    ddp.verify()

    again = ddp.broadcast_parameters(0, params)
    assert again is ddp.module
    assert_array_equal(again["w"], [1] * 3)
    with pytest.raises(fd.CollectiveMismatch, match="broadcast_parameters: the ranks disagree"):
        ddp.broadcast_parameters(0, {"wv"[rank]: params["w"]})
    assert ddp.module is again
    params["w"] = params["w"].at[1].set(3.0 + rank)
    with pytest.raises(fd.CollectiveMismatch, match=r"leaf \"\['w'\]\", bits"):
        ddp.verify({**again, "w": params["w"]})
    ddp.verify()

    grads = {"w": jax.numpy.full(3, 2.0 * rank), "half": jax.numpy.full(2, rank, "bfloat16")}
    mean = ddp.sync_gradients(grads, weight=[3, 1][rank])
    assert_array_equal(mean["w"], [0.5] * 3)
    assert mean["half"].dtype == "bfloat16"
    assert_array_equal(mean["half"].astype("f4"), [0.25] * 2)
    no_numbers = jax.tree.map(lambda leaf: leaf * float("nan"), grads)
    of_one = ddp.sync_gradients(grads if rank else no_numbers, weight=rank)
    assert_array_equal(of_one["w"], [2.0] * 3)
    with pytest.raises(ValueError, match="weights of all ranks are 0"):
        ddp.sync_gradients(grads, weight=0)
    with ddp.no_sync():
        assert ddp.sync_gradients(grads) is grads
    assert_array_equal(ddp.sync_gradients(grads)["w"], [1] * 3)

    statistics = ddp.statistics()
    assert statistics.num_rounds == 3
    assert statistics.begin_s <= statistics.backward_end_s <= statistics.end_s
    assert {name for bucket in statistics.buckets for name in bucket.names} == {"['w']", "['half']"}
    for bucket in statistics.buckets:
        assert statistics.begin_s <= bucket.ready_s <= bucket.start_s <= bucket.end_s

    inner = ddp.into_inner()
    assert_array_equal(inner["w"], [1] * 3)
    for use in (ddp.verify, ddp.broadcast_parameters, lambda: ddp.sync_gradients(grads)):
        with pytest.raises(ValueError, match="into_inner"):
            use()


def move_what_is_spread(backend: Any) -> None:
    """The group is given host arrays alone; what is made of them lies where it lay."""
    os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=2"
    mesh = jax.sharding.Mesh(jax.devices(), "i")
    spread = jax.NamedSharding(mesh, jax.sharding.PartitionSpec("i"))
    own = jax.device_put(jax.numpy.full(4, 1.0 + backend.rank), spread)
    ddp = fd.DDP({"w": own}, backend, root=1)
    mean = ddp.sync_gradients({"w": own})["w"]
    for result, value in ((ddp.module["w"], 2), (mean, 1.5)):
        assert_array_equal(result, [value] * 4)
        assert result.sharding == spread


def test_parameters_may_be_spread_over_devices() -> None:
    run_ranks(2, move_what_is_spread, timeout=DEADLINE_S)


def go_on_after_a_failed_step(backend: Any) -> None:
    """JAX never forgets the failure of a program on several devices."""
    os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=2"
    mesh = jax.sharding.Mesh(jax.devices(), "i")
    on_all, spread = (
        jax.NamedSharding(mesh, jax.sharding.PartitionSpec(axis)) for axis in (None, "i")
    )
    params = jax.device_put({"w": jax.numpy.ones(3)}, on_all)
    x = jax.device_put(jax.numpy.ones((2, 3)), spread)
    group = backend.split([0, 1])
    ddp = fd.DDP(params, group)
    step = jax.jit(jax.grad(lambda p, x: (ddp.tap(p)["w"] * x).sum()))
    jax.block_until_ready(step(params, x))
    if backend.rank == 0:
        with pytest.raises(Exception, match="rank 1 left the group"):
            jax.block_until_ready(step(params, x))
        with pytest.raises(RuntimeError, match="an earlier step has failed"):
            ddp.sync_gradients(params)
        with group.shrink() as survivors:
            survivor = fd.DDP(params, survivors)
            assert_array_equal(survivor.sync_gradients(params)["w"], [1] * 3)
            survivor.verify()
    else:
        group.close()
    fd.barrier(backend)


def test_survivors_go_on_after_a_failed_step_on_several_devices() -> None:
    run_ranks(2, go_on_after_a_failed_step, timeout=DEADLINE_S)


def test_parameters_and_gradients_keep_64_bits_also_where_x64_is_off() -> None:
    with jax_full_width():
        params = {"w": jax.numpy.full(2, 2.0**40 + 1, "float64")}
    (backend,) = fd.SimulatedBackend.create_group(1)
    with backend:
        ddp = fd.DDP(params, backend)
        for tree in (ddp.module, ddp.sync_gradients(params)):
            assert tree["w"].dtype == "float64"
            assert_array_equal(np.asarray(tree["w"]), [2.0**40 + 1] * 2)


def compress_badly(bucket: Any, backend: Any, op: Any) -> Any:
    del bucket, op
    if backend.rank == 1:
        raise KeyError("no such gradient")
    return fd.allreduce(np.ones(3), backend)


def tell_of_bad_reductions(backend: Any) -> None:
    with pytest.raises(fd.CollectiveMismatch, match="compress="):
        fd.DDP([jax.numpy.ones(3)], backend, compress=[halved, None][backend.rank])
    ddp = fd.DDP([jax.numpy.ones(3)], backend, compress=compress_badly)
    error: type[Exception] = [fd.ChannelClosed, KeyError][backend.rank]
    with pytest.raises(error, match=r"rank 1 was interrupted|no such gradient"):
        ddp.sync_gradients([jax.numpy.ones(3)])


def test_a_reduction_that_fails_on_one_rank_is_told_to_all() -> None:
    run_ranks(2, tell_of_bad_reductions, timeout=DEADLINE_S)


def keep_numbers(backend: Any) -> None:
    """Train a layer whose options are leaves of the tree, as those of Equinox are."""
    rank = backend.rank
    weight = jax.numpy.ones(3)
    layer = {"weight": weight, "rate": 0.1 + rank, "is_on": rank == 0, "size": 2**40 + rank}
    ddp = fd.DDP(layer, backend)
    options = {name: value for name, value in ddp.module.items() if name != "weight"}
    assert options == {"rate": 0.1, "is_on": True, "size": 2**40}
    kinds = {"rate": float, "is_on": bool, "size": int}
    assert {name: type(value) for name, value in options.items()} == kinds
    ddp.verify()

    def scaled_loss(weight: Any) -> Any:
        tapped = ddp.tap({"weight": weight, **options})
        assert tapped["is_on"]  # which no traced value can tell
        return (rank + 1) * (tapped["weight"] * tapped["rate"]).sum()

    assert_allclose(jax.jit(jax.grad(scaled_loss))(weight), [0.15] * 3, rtol=1e-6)
    with pytest.raises(fd.CollectiveMismatch, match=r"\['size'\]"):
        ddp.verify({**ddp.module, "size": 2**40 + rank})
    with pytest.raises(fd.CollectiveMismatch, match="class 'bool'"):
        fd.DDP({"weight": weight, "is_on": [True, 1.0][rank]}, backend)


def test_numbers_of_python_are_made_equal_and_stay_numbers() -> None:
    run_ranks(2, keep_numbers, timeout=DEADLINE_S)


class Kind(enum.IntEnum):
    FIRST, SECOND = 0, 1


def keep_numbers_of_any_size(backend: Any) -> None:
    rank = backend.rank
    number_of = [2**70, 5, 2**63, -0.0, math.nan, 1 - 0j, Kind.FIRST]
    others = [5, 2**70, 5, 0.0, 1.0, 2j, Kind.SECOND]
    ones = jax.numpy.ones(1)
    ddp = fd.DDP([ones, *(others if rank else number_of)], backend)
    assert repr(ddp.module[1:]) == repr(number_of)
    ddp.verify()
    with pytest.raises(fd.CollectiveMismatch, match=r"\[1\]"):
        ddp.verify([ones, 2**70 + rank])


def leave_dtypes_alone(backend: Any) -> None:
    """Wrap a tree that holds what names a dtype, as layers may."""
    tree = {"x": jax.numpy.ones(1), "dtypes": (jax.numpy.float32, np.float32, np.dtype("f4"))}
    ddp = fd.DDP(tree, backend)
    assert ddp.module["dtypes"] == tree["dtypes"]
    assert ddp.sync_gradients(tree)["dtypes"] == tree["dtypes"]
    ddp.verify()


def test_dtypes_in_a_tree_are_left_alone() -> None:
    run_ranks(2, leave_dtypes_alone, timeout=DEADLINE_S)


def test_numbers_of_python_are_of_any_size() -> None:
    run_ranks(2, keep_numbers_of_any_size, timeout=DEADLINE_S)


def refuse(backend: Any) -> None:
    """Check what is refused, and that the group is as usable as before."""
    ones = jax.numpy.ones(3)
    with pytest.raises(fd.CollectiveMismatch, match=r"leaf 0 \"\['a'\]\" float32 \(3,\) on rank 0"):
        fd.DDP({"a" if backend.rank == 0 else "b": ones}, backend)
    refusals: list[tuple[Any, dict[str, Any], type[Exception], str]] = [
        ([ones], {"average": "contributors"}, ValueError, "'mean' or 'sum' for JAX"),
        ([jax.numpy.arange(3)], {}, ValueError, "no parameters"),
        ([ones.astype("float8_e5m2")], {}, fd.InvalidArray, "float8_e5m2"),
        ([ones, ones.astype("int4")], {}, fd.InvalidArray, r"\[1\].* is int4; ferro_dist moves"),
    ]
    gone = jax.numpy.ones(1)
    gone.delete()
    unreadable: list[tuple[Any, str]] = [
        (np.ma.masked_less(np.zeros(1), 1), "is masked, and would lose its mask"),
        (gone, "was deleted, or donated to a computation"),
        (jax.ShapeDtypeStruct((1,), "float32"), r"is a jax.*ShapeDtypeStruct, not an array"),
        (np.ones(1, ">f4"), "is >f4, which JAX does not have"),
    ]
    refusals += [([ones, x], {}, fd.InvalidArray, rf"\[1\].* {why}") for x, why in unreadable]
    for module, options, error, message in refusals:
        with pytest.raises(error, match=message):
            fd.DDP(module, backend, **options)
    with pytest.raises(TypeError, match="traced"):
        jax.jit(lambda p: fd.DDP(p, backend).module)(ones)
    ddp = fd.DDP([ones], backend)
    with pytest.raises(fd.UnsupportedOp, match="weight=0"):
        ddp.join()
    with pytest.raises(ValueError, match="pass the gradients"):
        ddp.sync_gradients()
    for x, why in unreadable:
        with pytest.raises(fd.InvalidArray, match=rf"\[0\].* of the gradients {why}"):
            ddp.sync_gradients([x])
        with pytest.raises(fd.InvalidArray, match=rf"\[0\].* {why}"):
            ddp.broadcast_parameters(params=[x])
    with pytest.raises(AttributeError, match=r"ddp\.module"):
        ddp.learning_rate  # noqa: B018
    fd.barrier(backend)


def behave_and_refuse(backend: Any) -> None:
    behave(backend)
    refuse(backend)


def test_a_pytree_is_wrapped_as_a_module_is() -> None:
    run_ranks(2, behave_and_refuse, timeout=DEADLINE_S)
