"""DDP on simulated ranks: gradients, parameters, and what it refuses."""

from __future__ import annotations

import copy
import inspect
import pickle
from collections.abc import Callable
from types import MappingProxyType, SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.testing import assert_allclose, assert_array_equal
from parallel.refused_memory import assert_lack_is_told
from ranks_as_threads import OnRanks

import ferro_dist as fd
from ferro_dist.testing import run_ranks

Array = np.ndarray[Any, Any]

WORLD_SIZES = [1, 2, 3, 4]
DTYPES = ["float16", ml_dtypes.bfloat16, "float32", "float64", "complex64", "complex128"]


class Linear:
    """y = x @ weight + bias, with the gradients of the squared error summed over the rows."""

    def __init__(self, seed: int = 0, dtype: Any = "float64") -> None:
        rng = np.random.default_rng(seed)
        self.weights = {
            "weight": rng.normal(size=(5, 3)).astype(dtype),
            "bias": rng.normal(size=3).astype(dtype),
        }
        self.gradients: dict[str, Any] = {k: np.zeros_like(v) for k, v in self.weights.items()}
        self.is_training = True

    def parameters(self) -> dict[str, Array]:
        return self.weights

    def grads(self) -> dict[str, Any]:
        return self.gradients

    def __call__(self, x: Array) -> Array:
        y: Array = x @ self.weights["weight"] + self.weights["bias"]
        return y

    def backward(self, x: Array, error: Array) -> None:
        np.matmul(x.T, error, out=self.gradients["weight"])
        np.sum(error, axis=0, out=self.gradients["bias"])

    def eval(self) -> None:
        self.is_training = False


class FreshGrads(Linear):
    """Makes a new dict of gradients at each call."""

    def grads(self) -> dict[str, Any]:
        return dict(self.gradients)


def data(rows: int) -> tuple[Array, Array]:
    rng = np.random.default_rng(7)
    return rng.normal(size=(rows, 5)), rng.normal(size=(rows, 3))


# Gradients


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_gradients_become_their_mean(on_ranks: OnRanks, world_size: int) -> None:
    def body(backend: Any) -> Array:
        model = Linear()
        ddp = fd.DDP(model, backend)
        model.gradients["bias"][:] = backend.rank
        model.gradients["weight"][:] = 10 * backend.rank
        ddp.sync_gradients()
        assert_array_equal(model.gradients["weight"], 10 * model.gradients["bias"][0])
        bias: Array = model.gradients["bias"]
        return bias

    mean = sum(range(world_size)) / world_size
    for bias in on_ranks(world_size, body):
        assert_array_equal(bias, [mean] * 3)


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_gradients_become_their_sum_on_request(on_ranks: OnRanks, world_size: int) -> None:
    def body(backend: Any) -> Array:
        ddp = fd.DDP(Linear(), backend, average="sum")
        ddp.gradients["bias"][:] = backend.rank + 1
        ddp.sync_gradients()
        bias: Array = ddp.gradients["bias"]
        return bias

    for bias in on_ranks(world_size, body):
        assert_array_equal(bias, [sum(range(1, world_size + 1))] * 3)


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: np.dtype(dtype).name)
def test_every_dtype_of_gradients_is_averaged(on_ranks: OnRanks, dtype: Any) -> None:
    def body(backend: Any) -> Array:
        ddp = fd.DDP(Linear(dtype=dtype), backend)
        ddp.gradients["bias"][:] = np.asarray([1, 2, 4]) * (backend.rank + 1)
        ddp.sync_gradients()
        bias: Array = ddp.gradients["bias"]
        return bias

    for bias in on_ranks(3, body):
        assert bias.dtype == np.dtype(dtype)
        assert_array_equal(bias.astype("complex128"), [2, 4, 8])


def test_a_module_may_mix_dtypes(on_ranks: OnRanks) -> None:
    def body(backend: Any) -> dict[str, Array]:
        names = [np.dtype(dtype).name for dtype in DTYPES]
        parameters = {n: np.zeros(4, d) for n, d in zip(names, DTYPES, strict=True)}
        grads = {n: np.full(4, 2 * backend.rank, p.dtype) for n, p in parameters.items()}
        synchronized: dict[str, Array] = fd.DDP(parameters, backend).sync_gradients(grads)
        return synchronized

    for grads in on_ranks(2, body):
        for name, grad in grads.items():
            assert grad.dtype.name == name
            assert_array_equal(grad.astype("complex128"), [1, 1, 1, 1])


# Equality with one process


def train_linear(model: Any, rows: slice, synchronize: Callable[[], object]) -> None:
    x, y = data(rows=50)
    for _ in range(20):
        error = model(x[rows]) - y[rows]
        model.backward(x[rows], error / len(x))
        synchronize()
        for name, weight in model.weights.items():
            weight -= 0.1 * model.gradients[name]


def train_replica(backend: Any, own_buffers: bool) -> dict[str, Array]:
    ddp = fd.DDP(Linear(seed=backend.rank), backend, average="sum")
    if own_buffers:
        ddp.gradients = ddp.gradient_buffers()
    # 50 rows: uneven shares on three ranks and on four.
    train_linear(ddp, slice(backend.rank, None, backend.world_size), ddp.sync_gradients)
    return ddp.into_inner().weights


def assert_equal_to_training_alone(replicas: list[dict[str, Array]]) -> None:
    alone = Linear()
    train_linear(alone, slice(None), lambda: None)
    for weights in replicas:
        for name, weight in weights.items():
            # float64 sums of 50 terms in another order, over 20 contracting steps.
            assert_allclose(weight, alone.weights[name], rtol=1e-12, atol=1e-13)
            assert_array_equal(weight, replicas[0][name])


@pytest.mark.parametrize("own_buffers", [False, True], ids=["copied", "in buckets"])
@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_twenty_steps_equal_one_process_on_the_whole_batch(
    on_ranks: OnRanks, world_size: int, own_buffers: bool
) -> None:
    assert_equal_to_training_alone(on_ranks(world_size, train_replica, own_buffers))


@pytest.mark.parametrize("backend", ["host", "tcp"])
@pytest.mark.parametrize("world_size", [2, 3])
def test_twenty_steps_of_processes_equal_one_process(world_size: int, backend: str) -> None:
    assert_equal_to_training_alone(run_ranks(world_size, train_replica, True, backend=backend))


@settings(
    max_examples=25,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(
    bucket_mb=st.floats(1e-5, 0.1),
    shapes=st.lists(st.lists(st.integers(0, 20), max_size=3), min_size=1, max_size=12),
)
def test_any_size_of_buckets_gives_the_same_gradients(
    on_ranks: OnRanks, bucket_mb: float, shapes: list[list[int]]
) -> None:
    def body(backend: Any) -> list[Array]:
        rng = np.random.default_rng(backend.rank)
        grads = [rng.integers(-99, 99, shape).astype("float32") for shape in shapes]
        ddp = fd.DDP([np.zeros_like(g) for g in grads], backend, average="sum", bucket_mb=bucket_mb)
        synchronized: list[Array] = ddp.sync_gradients(grads)
        return synchronized

    of_ranks = [np.random.default_rng(rank) for rank in range(2)]
    expected = [sum(rng.integers(-99, 99, shape) for rng in of_ranks) for shape in shapes]
    for grads in on_ranks(2, body):
        for grad, total in zip(grads, expected, strict=True):
            assert_array_equal(grad, total)


# Where gradients lie


def test_gradients_in_buckets_are_not_copied(on_ranks: OnRanks) -> None:
    def body(backend: Any) -> None:
        ddp = fd.DDP(Linear(), backend)
        buffers = ddp.gradient_buffers()
        ddp.gradients = buffers
        ddp.sync_gradients()
        assert ddp.module.gradients is buffers
        assert all(view is buffers[name] for name, view in ddp.gradient_buffers().items())
        assert list(buffers) == list(ddp.parameters())
        owners = {id(view.base) for view in buffers.values()}
        assert len(owners) == 1, "both lie in one bucket"

    on_ranks(2, body)


@pytest.mark.parametrize("bucket_mb", [1, 1e-5])
def test_gradients_in_the_places_of_others_are_refused(on_ranks: OnRanks, bucket_mb: float) -> None:
    def body(backend: Any) -> None:
        ddp = fd.DDP({"a": np.ones((2, 2)), "b": np.ones((2, 2))}, backend, bucket_mb=bucket_mb)
        buffers = ddp.gradient_buffers()
        a, b = buffers["a"], buffers["b"]
        for grads in [{"a": b, "b": a}, {"a": a, "b": a}, {"a": a.T, "b": b}]:
            with pytest.raises(RuntimeError, match="shares memory"):
                ddp.sync_gradients(grads)

    on_ranks(1, body)


def test_gradients_side_by_side_in_an_array_of_the_callers_are_averaged(on_ranks: OnRanks) -> None:
    def body(backend: Any) -> Array:
        ddp = fd.DDP({"a": np.ones((2, 2)), "b": np.ones(2)}, backend)
        flat: Array = np.arange(6.0) * (1 + backend.rank)
        for _ in range(2):
            ddp.sync_gradients({"b": flat[:2], "a": flat[2:].reshape(2, 2).T})
        return flat

    for flat in on_ranks(2, body):
        assert_array_equal(flat, np.arange(6) * 1.5)


def test_gradients_of_any_layout_are_averaged(on_ranks: OnRanks) -> None:
    def body(backend: Any) -> Array:
        ddp = fd.DDP({"w": np.zeros((3, 4))}, backend)
        gradient = np.asfortranarray(np.arange(12.0).reshape(3, 4) * 2 * backend.rank)
        ddp.sync_gradients({"w": gradient})
        return gradient

    for gradient in on_ranks(2, body):
        assert_array_equal(gradient, np.arange(12).reshape(3, 4))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_torch_tensors_are_averaged_in_place(on_ranks: OnRanks, dtype: str) -> None:
    torch = pytest.importorskip("torch")

    def body(backend: Any) -> tuple[Any, Any]:
        options = {"dtype": getattr(torch, dtype)}
        weight = torch.nn.Parameter(torch.full((2, 2), 1.0 + backend.rank, **options))
        gradient = torch.full((2, 2), 4.0, **options)
        fd.DDP({"w": weight}, backend).sync_gradients({"w": gradient.mul_(backend.rank)})
        return weight, gradient

    for weight, gradient in on_ranks(2, body):
        assert weight.tolist() == [[1, 1], [1, 1]]
        assert gradient.tolist() == [[2, 2], [2, 2]]


def test_one_gradient_under_two_names_is_summed_once(on_ranks: OnRanks) -> None:
    def body(backend: Any) -> Array:
        tied = np.zeros(3)
        ddp = fd.DDP({"embedding": tied, "head": tied}, backend, average="sum", bucket_mb=1e-5)
        gradient = np.full(3, backend.rank + 1.0)
        ddp.sync_gradients({"embedding": gradient, "head": gradient})
        return gradient

    for gradient in on_ranks(2, body):
        assert_array_equal(gradient, [3, 3, 3])


def test_gradients_are_returned(on_ranks: OnRanks) -> None:
    def body(backend: Any) -> None:
        model = Linear()
        ddp = fd.DDP(model, backend)
        assert ddp.sync_gradients() is model.gradients
        given = {"weight": np.ones((5, 3)), "bias": np.ones(3)}
        assert ddp.sync_gradients(given) is given

    on_ranks(2, body)


def test_a_plain_dict_is_trained_through_its_gradient_buffers(on_ranks: OnRanks) -> None:
    def body(backend: Any) -> Array:
        ddp = fd.DDP({"w": np.zeros(2)}, backend)
        ddp.gradient_buffers()["w"][:] = backend.rank
        ddp.sync_gradients()
        gradient: Array = ddp.gradient_buffers()["w"]
        return gradient

    for gradient in on_ranks(2, body):
        assert_array_equal(gradient, [0.5, 0.5])


def test_a_list_of_gradients_belongs_to_a_list_of_parameters(on_ranks: OnRanks) -> None:
    def body(backend: Any) -> list[Array]:
        ddp = fd.DDP([np.zeros(2), np.zeros((2, 2))], backend)
        grads = [np.full(2, 1.0 * backend.rank), np.full((2, 2), 3.0 * backend.rank)]
        ddp.sync_gradients(grads)
        return grads

    for first, second in on_ranks(2, body):
        assert_array_equal(first, np.full(2, 0.5))
        assert_array_equal(second, np.full((2, 2), 1.5))


# Absent gradients


def test_a_gradient_absent_on_every_rank_stays_absent(on_ranks: OnRanks) -> None:
    def body(backend: Any) -> None:
        ddp = fd.DDP(Linear(), backend)
        ddp.gradients["weight"] = None
        del ddp.gradients["bias"]
        ddp.sync_gradients()
        assert ddp.gradients == {"weight": None}

    on_ranks(3, body)


def test_a_gradient_absent_on_some_ranks_counts_as_zeros(on_ranks: OnRanks) -> None:
    def body(backend: Any) -> Array:
        ddp = fd.DDP(Linear(), backend)
        ddp.gradients["bias"] = np.full(3, 6.0) if backend.rank == 1 else None
        ddp.sync_gradients()
        assert not np.shares_memory(ddp.gradients["bias"], ddp.gradient_buffers()["bias"])
        bias: Array = ddp.gradients["bias"]
        return bias

    for bias in on_ranks(3, body):
        assert_array_equal(bias, [2, 2, 2])


def test_an_absent_gradient_without_a_place_for_the_average_is_refused(on_ranks: OnRanks) -> None:
    def body(backend: Any) -> None:
        ddp = fd.DDP(FreshGrads(), backend)
        ddp.gradients["bias"] = None
        with pytest.raises(ValueError, match="no gradient of 'bias'"):
            ddp.sync_gradients()
        with pytest.raises(ValueError, match="no gradient of 'bias'"):
            ddp.sync_gradients(MappingProxyType({"weight": np.zeros((5, 3))}))
        of_a_list = fd.DDP([np.zeros(1), np.zeros(2)], backend)
        for grads in [(np.zeros(1), None), [np.zeros(1)]]:
            with pytest.raises(ValueError, match="no gradient of '1'"):
                of_a_list.sync_gradients(grads)
        fd.barrier(backend)

    on_ranks(2, body)


# Parameters


def test_the_signature_names_the_keywords() -> None:
    assert {"bucket_mb", "average", "compress"} <= inspect.signature(fd.DDP).parameters.keys()


@pytest.mark.parametrize("root", [0, 2])
def test_construction_gives_all_ranks_the_parameters_of_root(on_ranks: OnRanks, root: int) -> None:
    def body(backend: Any) -> dict[str, Array]:
        return fd.DDP(Linear(seed=backend.rank), backend, root=root).module.weights

    for weights in on_ranks(3, body):
        for name, weight in Linear(seed=root).weights.items():
            assert_array_equal(weights[name], weight)


def test_parameters_that_are_copies_are_told(on_ranks: OnRanks) -> None:
    class Copies(Linear):
        def parameters(self) -> dict[str, Array]:
            return {name: weight.copy() for name, weight in self.weights.items()}

    def body(backend: Any) -> None:
        with pytest.raises(ValueError, match=r"makes a new array for 'w.*' at each call"):
            fd.DDP(Copies(seed=backend.rank), backend)

    on_ranks(2, body)


class ReadByNumpy:
    """An array that NumPy reads, but cannot be exported by DLPack."""

    def __init__(self, array: Array) -> None:
        self.array, self.dtype = array, array.dtype

    def __array__(self, dtype: Any = None, copy: Any = None) -> Array:
        return self.array

    def __dlpack__(self, **kwargs: Any) -> Any:
        raise BufferError

    def __dlpack_device__(self) -> tuple[int, int]:
        return 1, 0


def test_parameters_may_be_wrapped_anew_at_each_call(on_ranks: OnRanks) -> None:
    class Wrapped(Linear):
        def parameters(self) -> dict[str, Any]:
            return {name: ReadByNumpy(weight) for name, weight in self.weights.items()}

    def body(backend: Any) -> dict[str, Array]:
        return fd.DDP(Wrapped(seed=backend.rank), backend).module.weights

    for weights in on_ranks(2, body):
        assert_array_equal(weights["weight"], Linear(seed=0).weights["weight"])


def test_broadcast_parameters_overwrites_them_in_place(on_ranks: OnRanks) -> None:
    def body(backend: Any) -> tuple[Array, Array]:
        contiguous, transposed = np.zeros((2, 3)), np.zeros((3, 2)).T
        ddp = fd.DDP({"c": contiguous, "t": transposed}, backend)
        contiguous += backend.rank
        transposed += 10 * backend.rank
        ddp.broadcast_parameters(root=1)
        return contiguous, transposed

    for contiguous, transposed in on_ranks(3, body):
        assert_array_equal(contiguous, np.full((2, 3), 1))
        assert_array_equal(transposed, np.full((2, 3), 10))


# The wrapper


def test_the_module_is_reached_through_the_wrapper(on_ranks: OnRanks) -> None:
    def body(backend: Any) -> None:
        model: Any = Linear()
        ddp = fd.DDP(model, backend)
        assert ddp.module is model
        assert ddp.backend is backend
        assert ddp.parameters() is model.weights
        ddp.eval()
        assert not model.is_training
        ddp.is_training = True
        assert model.is_training
        x, _ = data(rows=2)
        assert_array_equal(ddp(x), model(x))
        del ddp.is_training
        assert "is_training" not in vars(model)
        assert not hasattr(ddp, "no_such_attribute")
        assert "Linear, rank 0 of 1, 2 parameters, 1 buckets" in repr(ddp)

    on_ranks(1, body)


def test_the_wrapper_has_attributes_that_cannot_be_replaced(on_ranks: OnRanks) -> None:
    def body(backend: Any) -> None:
        ddp: Any = fd.DDP(Linear(), backend)
        with pytest.raises(AttributeError):
            ddp.module = Linear()
        with pytest.raises(AttributeError):
            del ddp.module

    on_ranks(1, body)


def test_a_module_that_defines_its_own_copying_does_not_speak_for_the_wrapper(
    on_ranks: OnRanks,
) -> None:
    class Copied(Linear):
        def __deepcopy__(self, memo: Any) -> str:
            return "the module's"

    def body(backend: Any) -> None:
        ddp: Any = fd.DDP(Copied(), backend)
        assert copy.deepcopy(ddp.module) == "the module's"
        with pytest.raises(AttributeError):
            ddp.__deepcopy__  # noqa: B018

    on_ranks(1, body)


@pytest.mark.parametrize("copier", [copy.copy, copy.deepcopy, pickle.dumps])
def test_the_wrapper_is_not_copied(on_ranks: OnRanks, copier: Callable[[Any], Any]) -> None:
    def body(backend: Any) -> None:
        with pytest.raises(TypeError, match="A DDP cannot be pickled or copied"):
            copier(fd.DDP(Linear(), backend))

    on_ranks(1, body)


def test_into_inner_gives_the_module_back(on_ranks: OnRanks) -> None:
    def body(backend: Any) -> None:
        model = Linear()
        ddp = fd.DDP(model, backend)
        assert ddp.into_inner() is model
        assert not hasattr(ddp, "weights")
        with pytest.raises(AttributeError, match=r"no 'weights': into_inner\(\) gave"):
            _ = ddp.weights
        for use in (lambda: ddp.module, ddp.sync_gradients, ddp.into_inner):
            with pytest.raises(ValueError, match="into_inner"):
                use()
        assert repr(ddp) == "<DDP, module given back>"

    on_ranks(1, body)


# Ranks that disagree


def disagreement(backend: Any, module: Any, **options: Any) -> fd.CollectiveMismatch:
    with pytest.raises(fd.CollectiveMismatch) as caught:
        fd.DDP(module, backend, **options)
    total = fd.allreduce(np.ones(1), backend)
    assert total[0] == backend.world_size, "the group stays usable"
    return caught.value


@pytest.mark.parametrize(
    ("odd", "quoted"),
    [
        ({"a": np.zeros(2), "B": np.zeros(3)}, "parameter 1 'B' float64 (3,) on rank 1"),
        ({"a": np.zeros(2), "b": np.zeros(4)}, "parameter 1 'b' float64 (4,) on rank 1"),
        ({"a": np.zeros(2, "f4"), "b": np.zeros(3)}, "parameter 0 'a' float32 (2,) on rank 1"),
        ({"a": np.zeros(2)}, "nothing on rank 1"),
        (
            {"a": np.zeros(2), "b": np.zeros(3), "c": np.zeros(3)},
            "nothing on ranks 0, 2; parameter 2 'c' float64 (3,) on rank 1",
        ),
    ],
    ids=["name", "shape", "dtype", "fewer", "more"],
)
def test_the_first_parameter_that_differs_is_named(
    on_ranks: OnRanks, odd: dict[str, Array], quoted: str
) -> None:
    def body(backend: Any) -> fd.CollectiveMismatch:
        usual = {"a": np.zeros(2), "b": np.zeros(3)}
        return disagreement(backend, odd if backend.rank == 1 else usual)

    for rank, error in enumerate(on_ranks(3, body)):
        assert quoted in str(error)
        assert (error.op, error.rank, error.peer) == ("DDP", rank, 1)


def test_in_a_part_of_a_group_the_part_is_named(on_ranks: OnRanks) -> None:
    def body(backend: Any) -> fd.CollectiveMismatch | None:
        part = backend.split([2, 1])
        if part is None:
            return None
        with part:
            return disagreement(part, {"a": np.zeros(part.rank)})

    _, *errors = on_ranks(3, body)
    for error in errors:
        assert "on rank 1.\n" in str(error)
        assert "These are ranks of group (2, 1)." in str(error)
        assert error.global_ranks == (2, 1)


def test_call_of_the_program_that_meets_one_of_ddp_is_told_whose_tag_that_is(
    on_ranks: OnRanks,
) -> None:
    def body(backend: Any) -> str:
        ddp = fd.DDP({"a": np.zeros(2)}, backend)
        if backend.rank == 0:
            with pytest.raises(fd.DistributedError) as mismatch:
                ddp.sync_gradients({"a": np.ones(2)})
            return str(mismatch.value.__context__)
        with pytest.raises(fd.CollectiveMismatch) as mismatch:
            fd.allreduce(np.ones(3), backend)
        return str(mismatch.value)

    for error in on_ranks(2, body):
        assert "tag that is not your own marks a call that DDP" in error


def test_order_matters_even_where_shapes_are_equal(on_ranks: OnRanks) -> None:
    def body(backend: Any) -> fd.CollectiveMismatch:
        names = ["a", "b"] if backend.rank == 0 else ["b", "a"]
        return disagreement(backend, {name: np.zeros(2) for name in names})

    for error in on_ranks(2, body):
        assert "parameter 0 'a' float64 (2,) on rank 0; parameter 0 'b'" in str(error)
        assert error.peer is None, "of two that differ, neither is the odd one"


def test_settings_that_differ_are_named(on_ranks: OnRanks) -> None:
    def body(backend: Any) -> fd.CollectiveMismatch:
        return disagreement(backend, Linear(), average=["mean", "sum"][backend.rank])

    for error in on_ranks(2, body):
        assert "average='sum', root=0 on rank 1" in str(error)


def test_ranks_of_power_sgd_that_differ_are_named(on_ranks: OnRanks) -> None:
    def body(backend: Any) -> fd.CollectiveMismatch:
        return disagreement(backend, Linear(), compress=fd.PowerSGD(2 + backend.rank))

    for error in on_ranks(2, body):
        assert "compress=PowerSGD(3), " in str(error)


def test_names_that_differ_far_behind_are_told_apart(on_ranks: OnRanks) -> None:
    def body(backend: Any) -> fd.CollectiveMismatch:
        return disagreement(backend, {"layer." * 200 + str(backend.rank): np.zeros(1)})

    for error in on_ranks(2, body):
        assert "on rank 0; parameter 0" in str(error)
        assert len(str(error)) < 1500


def test_wrappers_synchronized_in_different_order_raise(on_ranks: OnRanks) -> None:
    def body(backend: Any) -> None:
        wrappers = [fd.DDP(Linear(), backend), fd.DDP(Linear(), backend)]
        with pytest.raises(fd.CollectiveMismatch):
            wrappers[backend.rank].sync_gradients()

    on_ranks(2, body)


def test_a_rank_without_memory_for_buckets_tells_the_others(
    on_ranks: OnRanks, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert_lack_is_told(on_ranks, monkeypatch, lambda backend: fd.DDP(Linear(), backend))


# What is refused, before anything is sent


def read_only(array: Array) -> Array:
    array.flags.writeable = False
    return array


@pytest.mark.parametrize(
    ("module", "error", "message"),
    [
        (object(), TypeError, "object has no method parameters"),
        (None, TypeError, "NoneType has no method parameters"),
        ({}, ValueError, "dict has no parameters"),
        ({"a": 1.0}, TypeError, "parameter 'a' is float, not an array$"),
        ([(np.zeros(1),)], TypeError, "'0' is tuple, not an array. A nested tree .* JAX's"),
        ({1: np.zeros(1)}, TypeError, "named by a str, not by 1"),
        ({"a": np.zeros(1, int)}, fd.InvalidArray, "parameter 'a' is int64"),
        ({"a": np.zeros(1, ">f4")}, fd.InvalidArray, "'a' is not in native byte order"),
        ({"a": read_only(np.zeros(1))}, fd.InvalidArray, "'a' is read-only"),
        ({"a": np.ma.masked_less(np.zeros(1), 1)}, fd.InvalidArray, "'a' is masked"),
        (np.zeros(3), TypeError, "ndarray has no method parameters"),
        (SimpleNamespace(parameters=set, grads=set), TypeError, "a set is not a sequence"),
    ],
    ids=[
        "object",
        "None",
        "empty",
        "number",
        "tree",
        "int name",
        "int",
        "byte order",
        "read-only",
        "masked",
        "array",
        "set",
    ],
)
def test_a_module_that_cannot_be_wrapped(
    on_ranks: OnRanks, module: Any, error: type[Exception], message: str
) -> None:
    def body(backend: Any) -> None:
        with pytest.raises(error, match=message):
            fd.DDP(module, backend)
        fd.barrier(backend)

    on_ranks(2, body)


def test_what_is_no_group_is_refused() -> None:
    closed = fd.SimulatedBackend.create_group(1)[0]
    closed.close()
    backend: Any
    for backend, error, message in [
        (None, TypeError, "must be a group, .* not None"),
        ("host", TypeError, "not str"),
        (closed, fd.ChannelClosed, "the group given as backend is closed"),
    ]:
        with pytest.raises(error, match=message):
            fd.DDP(Linear(), backend)
    with pytest.raises(TypeError, match=r"DDP\(module, backend\). Here the module is a Simulated"):
        fd.DDP(closed, Linear())  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="a module, not its class Linear"):
        fd.DDP(Linear, closed)


def test_a_module_without_grads_is_refused(on_ranks: OnRanks) -> None:
    class OnlyParameters:
        def parameters(self) -> list[Array]:
            return [np.zeros(1)]

    def body(backend: Any) -> None:
        with pytest.raises(TypeError, match=r"OnlyParameters has no method grads\(\)"):
            fd.DDP(OnlyParameters(), backend)

    on_ranks(1, body)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"bucket_mb": 0}, ValueError, "bucket_mb"),
        ({"bucket_mb": float("nan")}, ValueError, "bucket_mb"),
        ({"bucket_mb": "25"}, ValueError, "bucket_mb must be a positive number, not '25'"),
        ({"bucket_mb": 10**400}, ValueError, "bucket_mb must be"),
        ({"average": "median"}, ValueError, "'sum' or 'contributors', not 'median'"),
        ({"compress": "zip"}, ValueError, "compress must be None, 'fp16', 'bf16' or callable"),
        ({"compress": 16}, TypeError, "compress must be"),
        ({"compress": ["fp16"]}, TypeError, "compress must be"),
        ({"compress": fd.PowerSGD}, TypeError, r"not the class PowerSGD: PowerSGD\(\)"),
        ({"overlap": "sometimes"}, ValueError, "overlap must be"),
        ({"root": 2}, fd.InvalidRank, "DDP: root 2 is not a rank of this group"),
        ({"root": -1}, fd.InvalidRank, "root -1"),
        ({"overlap": np.ones(2)}, ValueError, "overlap must be"),
        ({"sync_buffers": "no"}, ValueError, "sync_buffers must be"),
        ({"root": 0.5}, fd.InvalidRank, "root 0.5"),
        ({"root": True}, fd.InvalidRank, "root True"),
    ],
)
def test_arguments_that_make_no_sense(
    on_ranks: OnRanks, options: dict[str, Any], error: type[Exception], message: str
) -> None:
    def body(backend: Any) -> None:
        with pytest.raises(error, match=message):
            fd.DDP(Linear(), backend, **options)
        fd.barrier(backend)

    on_ranks(2, body)


@pytest.mark.parametrize(
    ("dtype", "compress", "limit"),
    [("float16", None, 2048), (ml_dtypes.bfloat16, None, 256), ("float32", "bf16", 256)],
)
def test_more_ranks_than_a_dtype_counts_are_refused(
    on_ranks: OnRanks, monkeypatch: pytest.MonkeyPatch, dtype: Any, compress: Any, limit: int
) -> None:
    def body(backend: Any) -> None:
        parameters = {"double": np.zeros(1, "complex128"), "w": np.zeros(1, dtype)}
        with monkeypatch.context() as patch:
            patch.setattr(type(backend), "world_size", limit + 1)
            with pytest.raises(ValueError, match=f"of 'w' .* up to {limit} ranks, .* Use"):
                fd.DDP(parameters, backend, average="contributors", compress=compress)

    on_ranks(1, body)


def reduce_a_copy(bucket: Any, backend: Any, op: Any) -> Any:
    return fd.allreduce(bucket.gradients, backend, op)


def reduce_in_place(bucket: Any, backend: Any, op: Any) -> Any:
    return [fd.allreduce(view, backend, op, out=view) for view in bucket.views]


def begin_to_reduce(bucket: Any, backend: Any, op: Any) -> Any:
    gradients = bucket.gradients
    return fd.allreduce(gradients, backend, op, out=gradients, async_op=True)


@pytest.mark.parametrize("compress", [reduce_in_place, begin_to_reduce])
def test_a_reduction_may_return_what_it_did(
    on_ranks: OnRanks, compress: Callable[..., Any]
) -> None:
    def body(backend: Any) -> Any:
        ddp = fd.DDP({"w": np.zeros(1 << 20)}, backend, compress=compress)
        return ddp.sync_gradients({"w": np.full(1 << 20, float(backend.rank))})["w"]

    for average in on_ranks(2, body):
        assert_array_equal(average, np.full(1 << 20, 0.5))


def test_a_reduction_that_is_not_in_place_is_refused(on_ranks: OnRanks) -> None:
    def body(backend: Any) -> None:
        ddp = fd.DDP({"w": np.zeros(3)}, backend, compress=reduce_a_copy)
        with pytest.raises(TypeError, match=r"in place.* It returned ndarray"):
            ddp.sync_gradients({"w": np.ones(3)})

    on_ranks(1, body)


@pytest.mark.parametrize(
    ("weight", "error"),
    [
        (-1, ValueError),
        (np.nan, ValueError),
        (np.float32(np.inf), ValueError),
        (10**400, ValueError),
        ("1", TypeError),
        (True, TypeError),
        (1j, TypeError),
        (np.ones(2), TypeError),
    ],
)
def test_weights_that_are_none(on_ranks: OnRanks, weight: Any, error: type[Exception]) -> None:
    def body(backend: Any) -> None:
        ddp = fd.DDP({"w": np.zeros(3)}, backend)
        with pytest.raises(error, match="weight must be a"):
            ddp.sync_gradients({"w": np.ones(3)}, weight=weight)

    on_ranks(1, body)


def test_what_weighs_nothing_may_be_no_number(on_ranks: OnRanks) -> None:
    def body(backend: Any) -> Any:
        ddp = fd.DDP({"w": np.zeros(3)}, backend)
        own = np.full(3, np.nan if backend.rank else 2.0)
        return ddp.sync_gradients({"w": own}, weight=1 - backend.rank)["w"]

    for average in on_ranks(2, body):
        assert_array_equal(average, np.full(3, 2.0))


@pytest.mark.parametrize(
    ("grads", "error", "message"),
    [
        ({"w": np.zeros((2, 3))}, ValueError, r"gradient 'w' is float64 \(2, 3\); the parameter"),
        ({"w": np.zeros((3, 2), "f4")}, ValueError, r"'w' is float32 \(3, 2\)"),
        ({"v": np.zeros((3, 2))}, ValueError, "gradient 'v' belongs to no parameter"),
        ({"w": read_only(np.zeros((3, 2)))}, fd.InvalidArray, "gradient 'w' is read-only"),
        ({"w": 0.0}, TypeError, "gradient 'w' is float, not an array"),
        (np.zeros((3, 2)), TypeError, "not one ndarray"),
        (7, TypeError, "not one int"),
    ],
    ids=["shape", "dtype", "name", "read-only", "scalar", "array", "int"],
)
def test_gradients_that_do_not_fit(
    on_ranks: OnRanks, grads: Any, error: type[Exception], message: str
) -> None:
    def body(backend: Any) -> None:
        ddp = fd.DDP({"w": np.zeros((3, 2))}, backend)
        with pytest.raises(error, match=message):
            ddp.sync_gradients(grads)
        fd.barrier(backend)

    on_ranks(2, body)


def test_a_plain_dict_without_gradients_is_refused(on_ranks: OnRanks) -> None:
    def body(backend: Any) -> None:
        with pytest.raises(ValueError, match="no gradients of its own"):
            fd.DDP({"w": np.zeros(2)}, backend).sync_gradients()

    on_ranks(1, body)


def test_a_parameter_that_changed_is_refused(on_ranks: OnRanks) -> None:
    def body(backend: Any) -> None:
        ddp = fd.DDP(Linear(), backend)
        bias = ddp.weights.pop("bias")
        with pytest.raises(ValueError, match="no longer has the parameter 'bias'"):
            ddp.broadcast_parameters()
        ddp.weights["bias"] = bias.astype("float32")
        with pytest.raises(ValueError, match="'bias' is float32"):
            ddp.broadcast_parameters()

    on_ranks(1, body)
