"""Arrays of all libraries: their dtypes, memory, and what comes back to their owner."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis.extra import numpy as hnp
from numpy.testing import assert_array_equal

from ferro_dist.backends import results
from ferro_dist.dtypes import DTYPE_NAMES
from ferro_dist.errors import InvalidArray
from ferro_dist.interop import (
    allocate,
    as_output,
    as_view,
    contiguous,
    copy,
    deliver,
    dtype_code,
    dtype_name,
    jax_full_width,
    numpy_dtype,
    shape_of,
)

NumpyArray = np.ndarray[Any, Any]

CODES = range(len(DTYPE_NAMES))


@pytest.fixture(scope="module")
def torch() -> Any:
    return pytest.importorskip("torch", reason="torch is not installed")


@pytest.fixture(scope="module")
def jnp() -> Any:
    return pytest.importorskip("jax.numpy", reason="jax is not installed")


# dtypes


@pytest.mark.parametrize("code", CODES)
def test_names_codes_and_numpy_dtypes_agree(code: int) -> None:
    assert dtype_code(dtype_name(code)) == code
    assert dtype_code(numpy_dtype(code)) == code
    assert dtype_code(numpy_dtype(code).type) == code
    assert as_view(np.zeros(1, numpy_dtype(code))).dtype == code


@pytest.mark.parametrize("code", CODES)
def test_torch_shares_the_names(torch: Any, code: int) -> None:
    dtype = getattr(torch, dtype_name(code))
    assert dtype_code(dtype) == code
    assert as_view(torch.zeros(2, dtype=dtype)).dtype == code


@pytest.mark.parametrize("spelling", [float, "<f8", "d", np.float64, ml_dtypes.finfo("f8").dtype])
def test_other_spellings_are_understood(spelling: Any) -> None:
    assert dtype_name(dtype_code(spelling)) == "float64"


@pytest.mark.parametrize("spelling", [object, ">f8", "float80", "M8[s]", None.__class__, 3, "U2"])
def test_unknown_dtypes_are_refused(spelling: Any) -> None:
    with pytest.raises(InvalidArray, match="there is no dtype"):
        dtype_code(spelling)


def test_an_array_is_no_dtype() -> None:
    tensor = SimpleNamespace(dtype="its own")  # which NumPy, too, tries
    with pytest.raises(InvalidArray, match="there is no dtype"):
        dtype_code(tensor)


# NumPy


@given(hnp.arrays(np.float32, hnp.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=4)))
def test_contiguous_keeps_values_and_shape(x: NumpyArray) -> None:
    turned = x.T
    made = contiguous(turned)
    assert as_view(made).is_contiguous
    assert made.shape == turned.shape
    assert_array_equal(made, turned)


def test_contiguous_copies_only_what_has_gaps() -> None:
    x = np.ones((3, 4))
    assert contiguous(x) is x
    assert not np.shares_memory(contiguous(x.T), x)


def test_allocate_is_contiguous_whatever_the_input() -> None:
    made = allocate(np.ones((3, 4), np.int16).T)
    assert made.shape == (4, 3)
    assert made.dtype == np.int16
    assert as_output(made).is_contiguous
    assert allocate(made, (2, 4, 3)).shape == (2, 4, 3)
    assert deliver(made, made) is made


@pytest.mark.filterwarnings("ignore:the matrix subclass")
def test_results_of_subclasses_are_plain_arrays() -> None:
    assert type(allocate(np.matrix([[1.0]]))) is np.ndarray


# torch


def test_torch_tensors_are_described(torch: Any) -> None:
    x = torch.arange(6.0).reshape(2, 3)
    view = as_view(x)
    assert (view.address, view.count, view.nbytes) == (x.data_ptr(), 6, 24)
    assert view.is_contiguous
    assert not view.is_readonly
    assert as_view(x[:, 1:]).address == x.data_ptr() + 4
    assert not as_view(x.T).is_contiguous
    assert as_view(torch.tensor(1.0)).count == 1
    assert as_view(torch.zeros(0, 3)).count == 0
    assert not as_view(torch.ones(1).expand(4)).is_contiguous


def test_a_torch_without_an_exchange_table_is_not_asked_for_its_cuda_interface(torch: Any) -> None:
    class Old(torch.Tensor):
        __dlpack_c_exchange_api__ = None

        @property
        def __cuda_array_interface__(self) -> dict[str, Any]:
            assert not self.requires_grad, "Can't get it on Variable that requires grad"
            return {"version": 2, "shape": (2,), "typestr": "<f2", "data": (1 << 40, False)}

    x = torch.ones(2, dtype=torch.bfloat16).as_subclass(Old)
    assert dtype_name(as_view(x).dtype) == "bfloat16"
    assert as_view(x.requires_grad_()).address == x.data_ptr()


def test_torch_results_are_tensors_of_the_same_kind(torch: Any) -> None:
    x = torch.ones(3, 4, dtype=torch.bfloat16).T
    made = allocate(x)
    assert type(made) is torch.Tensor
    assert (made.shape, made.dtype, made.device) == (x.shape, x.dtype, x.device)
    assert made.is_contiguous()
    assert allocate(x, (2, 5)).shape == (2, 5)
    assert deliver(x, made) is made
    assert shape_of(x) == (4, 3)
    assert torch.equal(contiguous(x), x)
    assert contiguous(made) is not None
    assert contiguous(made).data_ptr() == made.data_ptr()


def test_a_channels_last_tensor_is_not_contiguous(torch: Any) -> None:
    x = torch.arange(36.0).reshape(1, 3, 3, 4).to(memory_format=torch.channels_last)
    assert not as_view(x).is_contiguous
    assert as_view(contiguous(x)).is_contiguous
    assert torch.equal(contiguous(x), x)
    assert as_output(allocate(x)).is_contiguous


def test_a_parameter_can_be_read_but_not_written(torch: Any) -> None:
    parameter = torch.nn.Parameter(torch.ones(3))
    assert as_view(parameter).address == parameter.data_ptr()
    with pytest.raises(InvalidArray, match=r"\.detach\(\)"):
        as_output(parameter)
    assert as_output(parameter.detach()).address == parameter.data_ptr()
    assert not allocate(parameter).requires_grad
    assert not contiguous(parameter).requires_grad


def test_frozen_parameters_can_be_written(torch: Any) -> None:
    assert as_output(torch.nn.Parameter(torch.ones(3), requires_grad=False)).count == 3


def test_a_subclass_of_a_tensor_is_a_tensor(torch: Any) -> None:
    class Sub(torch.Tensor):
        pass

    x = torch.ones(3).as_subclass(Sub)
    assert as_view(x).address == x.data_ptr()
    assert isinstance(allocate(x), torch.Tensor)


def test_pending_conjugation_is_refused(torch: Any) -> None:
    x = torch.ones(3, dtype=torch.complex64)
    with pytest.raises(InvalidArray, match="resolve_conj"):
        as_view(x.conj())
    assert as_view(x.conj().resolve_conj()).count == 3


@pytest.mark.parametrize("shape", [(), (1,), (4,), (2, 1), (1, 3)])
def test_pending_negation_is_refused(torch: Any, shape: tuple[int, ...]) -> None:
    imaginary = torch.ones(shape, dtype=torch.complex64).conj().imag
    with pytest.raises(InvalidArray, match="resolve_neg"):
        as_view(imaginary)
    assert as_view(imaginary.resolve_neg()).count == imaginary.numel()


@pytest.mark.parametrize("dtype", ["complex64", "complex128"])
@pytest.mark.parametrize("shape", [(1,), (1, 1)])
def test_pending_negation_of_one_number_is_refused_whatever_its_strides(
    torch: Any, dtype: str, shape: tuple[int, ...]
) -> None:
    number = torch.ones(3, dtype=getattr(torch, dtype)).conj()[1].imag.reshape(shape)
    assert number.stride() == torch.ones(shape).stride()
    with pytest.raises(InvalidArray, match="resolve_neg"):
        as_view(number)


def test_pending_negation_is_refused_where_torch_has_no_exchange_table(torch: Any) -> None:
    class OldTensor(torch.Tensor):  # as up to torch 2.9
        __dlpack_c_exchange_api__ = None

    x = torch.ones(4, dtype=torch.complex64).conj().imag
    with pytest.raises(InvalidArray, match="resolve_neg"):
        as_view(x.as_subclass(OldTensor))


def test_tensors_without_memory_are_refused(torch: Any) -> None:
    with pytest.raises(InvalidArray, match="no memory of its own"):
        as_view(torch._efficientzerotensor(3))
    with pytest.raises(InvalidArray, match="meta tensor has no data"):
        as_view(torch.ones(3, device="meta"))


def test_what_a_lazy_module_has_not_made_yet_is_refused(torch: Any) -> None:
    for lazy in (torch.nn.LazyLinear(2).weight, torch.nn.LazyBatchNorm1d().running_mean):
        with pytest.raises(InvalidArray, match="Run a batch through its module"):
            as_view(lazy)


def test_sparse_tensors_are_refused(torch: Any) -> None:
    with pytest.raises(InvalidArray, match="to_dense"):
        as_view(torch.ones(3).to_sparse())


def test_float8_kinds_that_are_not_ours_are_named(torch: Any) -> None:
    with pytest.raises(InvalidArray, match="float8_e4m3fnuz"):
        as_view(torch.ones(3).to(torch.float8_e4m3fnuz))


@pytest.mark.parametrize("bits", range(1, 8))
def test_integers_of_less_than_a_byte_are_refused(torch: Any, bits: int) -> None:
    for name in (f"uint{bits}", f"int{bits}"):
        if hasattr(torch, name):  # not in older versions
            x = torch.empty(3, dtype=getattr(torch, name))
            with pytest.raises(InvalidArray, match=f"its dtype is torch.{name};"):
                as_view(x)
            assert as_view(x.view(torch.uint8)).count == 3


def test_messages_carry_no_stack_of_torch(torch: Any) -> None:
    with pytest.raises(InvalidArray) as error:
        as_view(torch.ones(3).to_sparse())
    assert "\n" not in str(error.value)


# JAX


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float8_e4m3fn", "bool", "complex64"])
def test_jax_arrays_are_described_and_read_only(jnp: Any, dtype: str) -> None:
    x = jnp.ones((2, 3), dtype)
    view = as_view(x)
    assert view.address == x.unsafe_buffer_pointer()
    assert (view.count, dtype_name(view.dtype)) == (6, dtype)
    assert view.is_readonly
    assert view.is_contiguous
    with pytest.raises(InvalidArray, match="read-only"):
        as_output(x)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
@pytest.mark.parametrize("shape", [(), (0, 3), (5,), (4, 3)])
def test_jax_results_are_new_jax_arrays(jnp: Any, dtype: str, shape: tuple[int, ...]) -> None:
    x = jnp.zeros(7, dtype)
    written = allocate(x, shape)
    assert as_output(written).is_contiguous
    written[...] = 3
    result = deliver(x, written)
    assert type(result) is type(x)
    assert (result.shape, result.dtype, result.devices()) == (shape, x.dtype, x.devices())
    assert_array_equal(np.asarray(result), np.full(shape, 3, x.dtype))


@pytest.mark.parametrize("dtype", ["int64", "uint64", "float64", "complex128"])
def test_jax_results_keep_64_bits_also_where_x64_is_off(jnp: Any, dtype: str) -> None:
    with jax_full_width():
        x = jnp.zeros(2, dtype)
    written = allocate(x)
    written[...] = 2**40 + 1
    result = deliver(x, written)
    assert result.dtype == dtype
    assert_array_equal(np.asarray(result), np.full(2, 2**40 + 1, dtype))


def test_jax_takes_the_result_over_without_a_copy(jnp: Any) -> None:
    x = jnp.zeros(1000)
    written = allocate(x)
    address = as_view(written).address
    assert deliver(x, written).unsafe_buffer_pointer() == address


def test_traced_jax_values_are_refused(jnp: Any) -> None:
    import jax

    with pytest.raises(InvalidArray, match="Tracer: it has no value while JAX traces"):
        jax.jit(as_view)(jnp.ones(3))


SPREAD = """
import jax
from ferro_dist.interop import aligned_empty, deliver
a, b = jax.devices()
spread = jax.NamedSharding(jax.sharding.Mesh([a, b], "i"), jax.sharding.PartitionSpec("i"))
for x in (jax.device_put(jax.numpy.zeros(4), spread), jax.device_put(jax.numpy.zeros(4), b)):
    written = aligned_empty(x.shape, x.dtype)
    written[:] = 7
    y = deliver(x, written)
    assert y.tolist() == [7] * 4
    assert (y.sharding, y.committed) == (x.sharding, True), y.sharding
"""


def test_results_for_jax_lie_where_the_array_lies(jnp: Any) -> None:
    environ = os.environ | {"XLA_FLAGS": "--xla_force_host_platform_device_count=2"}
    environ |= {"JAX_PLATFORMS": "cpu"}
    subprocess.run([sys.executable, "-c", SPREAD], check=True, env=environ)


REFUSED_PARTS = """
import jax
from ferro_dist.errors import InvalidArray
from ferro_dist.interop import as_view
mesh = jax.sharding.Mesh(jax.devices(), "i")
spread = jax.NamedSharding(mesh, jax.sharding.PartitionSpec("i"))
x = jax.device_put(jax.numpy.arange(4), spread)
try:
    as_view(x)
except InvalidArray as error:
    print(error, as_view(x.addressable_data(1)).count)
"""


def test_jax_arrays_on_several_devices_are_refused(jnp: Any) -> None:
    environ = os.environ | {"XLA_FLAGS": "--xla_force_host_platform_device_count=2"}
    done = subprocess.run(
        [sys.executable, "-c", REFUSED_PARTS],
        capture_output=True,
        text=True,
        check=True,
        env=environ | {"JAX_PLATFORMS": "cpu"},
    )
    assert "it is spread over several devices. Pass x.addressable_data(i)" in done.stdout
    assert done.stdout.endswith(" 2\n")


# Other buffers


def test_results_of_raw_buffers_are_numpy_arrays() -> None:
    made = allocate(b"abc")
    assert (made.dtype, made.shape) == (np.uint8, (3,))
    assert deliver(b"abc", made) is made
    assert shape_of(b"abc") == (3,)
    assert_array_equal(contiguous(memoryview(b"abcd")[::2]), [97, 99])


class Column:
    """An array that speaks DLPack and has no shape, like those of Arrow."""

    def __init__(self, x: Any) -> None:
        self._x = x

    def __dlpack__(self, **options: Any) -> Any:
        return self._x.__dlpack__(**options)

    def __dlpack_device__(self) -> tuple[int, int]:
        return (1, 0)


def test_results_of_arrays_without_a_shape_are_numpy_arrays() -> None:
    x = Column(np.ones((2, 3), np.float32))
    assert (shape_of(x), allocate(x).shape, allocate(x).dtype) == ((2, 3), (2, 3), np.float32)


def test_what_numpy_cannot_read_must_have_a_shape_and_no_gaps(torch: Any) -> None:
    x = torch.ones(2, 4, dtype=torch.bfloat16)
    with pytest.raises(InvalidArray, match=r"Column of bfloat16.* that has a `shape`"):
        shape_of(Column(x))
    with pytest.raises(InvalidArray, match="contiguous copy"):
        contiguous(Column(x[:, ::2]))


def test_what_is_no_array_has_no_shape() -> None:
    with pytest.raises(InvalidArray, match=r"numpy\.asarray"):
        shape_of([1, 2])


class DeviceArray:
    """One of a library that is not known here, and that tells no more than it must."""

    def __init__(self, **changes: Any) -> None:
        self.__cuda_array_interface__ = {
            "shape": (2, 2),
            "typestr": "<f4",
            "data": (4096, False),
            "version": 3,
            **changes,
        }


def test_a_device_array_of_an_unknown_library_needs_an_out() -> None:
    x = DeviceArray()
    assert shape_of(x) == (2, 2)
    makers: list[Callable[[], Any]] = [
        lambda: allocate(x),
        lambda: results.allocate_gathered(x, 2),
        lambda: results.allocate_chunk(x, 2),
        lambda: results.allocate_rows(x, 6),
    ]
    for make in makers:
        with pytest.raises(InvalidArray, match="Pass `out`"):
            make()


def test_a_device_array_of_an_unknown_library_is_not_copied() -> None:
    x, with_gaps = DeviceArray(), DeviceArray(strides=(16, 8))
    assert contiguous(x) is x
    with pytest.raises(InvalidArray, match="cannot copy this DeviceArray"):
        contiguous(with_gaps)
    with pytest.raises(InvalidArray, match="cannot copy this DeviceArray"):
        copy(x)
