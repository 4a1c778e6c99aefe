"""How arrays are described to the engine, by every protocol through which they come."""

from __future__ import annotations

import array
import ctypes
import gc
import mmap
import sys
import weakref
from typing import Any, cast

import ml_dtypes
import numpy as np
import pytest
from foreign_tensor import ForeignTensor
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from ferro_dist._native.buffer_view import BufferView, as_output, as_view
from ferro_dist.dtypes import DTYPE_NAMES
from ferro_dist.errors import InvalidArray
from ferro_dist.interop import numpy_dtype
from ferro_dist.testing import emulated_gpu, run_ranks

DTYPES = [numpy_dtype(code) for code in range(len(DTYPE_NAMES))]

NumpyArray = np.ndarray[Any, Any]


def assert_describes(view: BufferView, expected: NumpyArray) -> None:
    assert view.address == expected.ctypes.data or expected.size == 0
    assert view.count == expected.size
    assert view.nbytes == expected.nbytes
    assert view.itemsize == expected.itemsize
    assert DTYPE_NAMES[view.dtype] == expected.dtype.name
    assert view.is_contiguous == expected.flags.c_contiguous
    assert view.is_readonly != expected.flags.writeable
    assert (view.device_type, view.device_id) == (1, 0)


@st.composite
def arrays_with_any_strides(draw: st.DrawFn) -> NumpyArray:
    dtype = draw(st.sampled_from(DTYPES))
    shape = draw(hnp.array_shapes(min_dims=0, max_dims=5, min_side=0, max_side=5))
    x = np.zeros(shape, dtype)
    x = x.transpose(draw(st.permutations(range(x.ndim))))
    x = x[draw(hnp.basic_indices(x.shape, allow_newaxis=True, allow_ellipsis=True))]
    x = np.asarray(x)
    x.flags.writeable = draw(st.booleans())
    return x


# NumPy


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_is_described(dtype: np.dtype[Any]) -> None:
    x = np.zeros((2, 3), dtype)
    assert_describes(as_view(x), x)


@given(arrays_with_any_strides())
def test_any_shape_and_strides_are_described(x: NumpyArray) -> None:
    assert_describes(as_view(x), x)


@given(arrays_with_any_strides())
def test_the_buffer_protocol_describes_the_same(x: NumpyArray) -> None:
    if DTYPE_NAMES[as_view(x).dtype] in ("bfloat16", "float8_e4m3fn", "float8_e5m2"):
        with pytest.raises(ValueError, match="buffer"):
            memoryview(cast(Any, x))
        return
    assert_describes(as_view(x.data), x)


@pytest.mark.parametrize("code", ["l", "L", "q", "Q", "i", "I", "h", "H", "b", "B", "e", "f", "d"])
def test_c_types_of_equal_size_are_one_dtype(code: str) -> None:
    x = np.zeros(2, code)
    assert_describes(as_view(x), x)
    assert_describes(as_view(x.data), x)


def test_unaligned_arrays_are_described() -> None:
    x = np.zeros(9, np.uint8)[1:].view(np.float64)
    assert not x.flags.aligned
    assert_describes(as_view(x), x)


def test_broadcast_arrays_are_not_contiguous() -> None:
    assert not as_view(np.broadcast_to(np.float32(1), (4,))).is_contiguous


@pytest.mark.filterwarnings("ignore:the matrix subclass")
def test_subclasses_are_read_as_the_array_below(tmp_path: Any) -> None:
    mapped = np.memmap(tmp_path / "data", np.float32, "w+", shape=(3,))
    matrix = np.matrix([[1.0, 2.0]])
    for x in (mapped, matrix):
        assert_describes(as_view(x), x)


def test_masked_arrays_are_refused() -> None:
    with pytest.raises(InvalidArray, match="mask would be lost"):
        as_view(np.ma.array([1.0, 2.0], mask=[True, False]))


def test_numpy_scalars_are_read_only() -> None:
    view = as_view(np.float32(3))
    assert (view.count, DTYPE_NAMES[view.dtype], view.is_readonly) == (1, "float32", True)


@pytest.mark.parametrize(
    "scalar", [np.datetime64("2026"), np.timedelta64(1, "s"), np.bytes_(b"ab"), np.str_("ab")]
)
def test_numpy_scalars_are_what_they_are_in_an_array(scalar: Any) -> None:
    with pytest.raises(InvalidArray, match="its dtype is"):
        as_view(scalar)  # whose own buffer holds bytes


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, ml_dtypes.float8_e5m2])
def test_scalars_of_ml_dtypes_are_described(dtype: Any) -> None:
    view = as_view(dtype(2))
    assert (view.count, DTYPE_NAMES[view.dtype]) == (1, np.dtype(dtype).name)


@pytest.mark.parametrize(
    ("dtype", "name"),
    [
        (object, "object"),
        ("U3", "<U3"),
        ("S3", "|S3"),
        ("M8[s]", "datetime64"),
        ("m8[s]", "timedelta64"),
        ([("a", "f4")], "'a'"),
        (np.longdouble, np.dtype(np.longdouble).name),
        (np.clongdouble, np.dtype(np.clongdouble).name),
        ("V2", "V2"),
        (ml_dtypes.float8_e4m3fnuz, "float8_e4m3fnuz"),
        (ml_dtypes.int4, "int4"),
    ],
)
def test_dtypes_that_cannot_move_are_named(dtype: Any, name: str) -> None:
    with pytest.raises(InvalidArray, match="its dtype is") as error:
        as_view(np.zeros(2, dtype))
    assert name in str(error.value)
    # Of objects there are only addresses.
    assert ("as uint8" in str(error.value)) == (dtype is not object)


@pytest.mark.parametrize("dtype", ["i2", "f4", "f8", "c8"])
def test_a_foreign_byte_order_is_refused(dtype: str) -> None:
    x = np.zeros(2, np.dtype(dtype).newbyteorder())
    for array_or_buffer in (x, x.data):
        with pytest.raises(InvalidArray, match="byte order"):
            as_view(array_or_buffer)


def test_single_bytes_have_no_byte_order() -> None:
    assert as_view(np.zeros(2, ">i1")).count == 2


# Lifetime


def test_a_view_keeps_its_array_alive() -> None:
    x = np.ones(3)
    alive = weakref.ref(x)
    view = as_view(x)
    del x
    gc.collect()
    assert alive() is view.owner
    del view
    gc.collect()
    assert alive() is None


def test_a_view_gives_back_every_reference() -> None:
    x = np.ones(3)
    before = sys.getrefcount(x)
    for _ in range(100):
        as_view(x)
    assert sys.getrefcount(x) == before


def test_a_cycle_through_a_view_is_collected() -> None:
    class Owner(np.ndarray[Any, Any]):
        own_view: BufferView

    x = np.ones(3).view(Owner)
    x.own_view = as_view(x)
    alive = weakref.ref(x)
    del x
    gc.collect()
    assert alive() is None


def test_a_buffer_stays_exported_while_its_view_lives() -> None:
    block = bytearray(8)
    view = as_view(block)
    with pytest.raises(BufferError, match="export"):
        block.append(1)
    del view
    block.append(1)


def test_views_cannot_be_made_by_hand() -> None:
    with pytest.raises(TypeError, match="as_view"):
        BufferView()


# The buffer protocol


def test_bytes_are_read_only_uint8() -> None:
    view = as_view(b"abc")
    assert (view.count, DTYPE_NAMES[view.dtype], view.is_readonly) == (3, "uint8", True)


def test_mutable_buffers_can_be_written() -> None:
    with mmap.mmap(-1, 16) as mapped:
        buffers = (bytearray(16), array.array("d", [1, 2]), (ctypes.c_float * 4)(), mapped)
        for buffer in buffers:
            assert as_output(buffer).nbytes == 16
        del buffer, buffers


@pytest.mark.parametrize("buffer", [memoryview(b"abcd")[::2], memoryview(bytearray(4))[::-1]])
def test_buffers_with_gaps_are_described(buffer: memoryview) -> None:
    assert not as_view(buffer).is_contiguous


def test_text_buffers_are_refused() -> None:
    with pytest.raises(InvalidArray, match="struct module"):
        as_view(array.array("u" if sys.version_info < (3, 13) else "w", "ab"))


@pytest.mark.parametrize("x", [3, 1.5, None, [1, 2], "text", object()])
def test_what_is_no_array_is_refused(x: object) -> None:
    with pytest.raises(InvalidArray, match=r"numpy\.(asarray|empty)"):
        as_view(x)


# Writing


def test_read_only_arrays_cannot_be_written() -> None:
    x = np.ones(3)
    x.flags.writeable = False
    for readonly in (x, b"abc", np.float32(1)):
        with pytest.raises(InvalidArray, match="read-only"):
            as_output(readonly)


def test_arrays_with_gaps_cannot_be_written() -> None:
    with pytest.raises(InvalidArray, match="not C-contiguous"):
        as_output(np.ones((3, 3))[:, 1])


# DLPack capsules


@pytest.mark.parametrize("version", [None, (1, 0), (1, 99)])
def test_a_capsule_is_described_and_given_back_once(version: tuple[int, int] | None) -> None:
    x = ForeignTensor((2, 3), strides=(3, 1), byte_offset=64, version=version)
    view = as_view(x)
    assert (view.address, view.count, DTYPE_NAMES[view.dtype]) == (4096 + 64, 6, "float32")
    assert view.is_contiguous
    assert x.deleted == 0
    del view
    assert x.deleted == 1


def test_a_capsule_without_strides_is_contiguous() -> None:
    assert as_view(ForeignTensor((2, 3), version=None)).is_contiguous


def test_a_capsule_with_gaps_is_described() -> None:
    assert not as_view(ForeignTensor((2, 3), strides=(1, 2))).is_contiguous


def test_a_capsule_may_be_read_only() -> None:
    assert as_view(ForeignTensor((2,), flags=1)).is_readonly
    assert not as_view(ForeignTensor((2,))).is_readonly


def test_a_cuda_capsule_is_described_without_waiting() -> None:
    x = ForeignTensor((4,), address=1 << 40, device=(2, 3))
    view = as_view(x)
    assert (view.device_type, view.device_id, view.address) == (2, 3, 1 << 40)
    assert x.asked_stream == -1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dtype": (11, 8, 1)}, "dtype"),
        ({"dtype": (2, 32, 4)}, "dtype"),
        ({"dtype": (17, 4, 1)}, "dtype"),
        ({"device": (10, 0)}, "type 10"),
        ({"version": (2, 0)}, "version 2"),
    ],
)
def test_a_refused_capsule_is_given_back_once(options: dict[str, Any], message: str) -> None:
    x = ForeignTensor((2,), **options)
    with pytest.raises(InvalidArray, match=message):
        as_view(x)
    gc.collect()
    assert x.deleted == 1


def view_another_librarys_table(rank: int, world_size: int, addr: str) -> list[int]:
    """Only torch's tensors have pending conjugations, and methods that tell of them."""
    gpu = emulated_gpu()
    x = gpu.array(np.arange(6).reshape(2, 3), dtype="complex64")
    return [as_view(array).count for array in (x, x[0, 0], x[:, 1])]


def test_what_exports_something_else_than_a_capsule_is_refused() -> None:
    class Exporter:
        def __dlpack_device__(self) -> tuple[int, int]:
            return (1, 0)

        def __dlpack__(self, **_options: Any) -> Any:
            return 3

    with pytest.raises(InvalidArray, match="its __dlpack__ returns no tensor"):
        as_view(Exporter())


def test_arrays_with_an_exchange_table_need_not_be_torchs() -> None:
    [counts] = run_ranks(1, view_another_librarys_table, backend="none", emulate_gpu=True)
    assert counts == [6, 1, 2]


# __cuda_array_interface__


class CudaArray:
    """What CuPy and Numba arrays look like from outside."""

    def __init__(self, **changes: Any) -> None:
        self.__cuda_array_interface__ = {
            "shape": (2, 3),
            "typestr": "<f4",
            "data": (1 << 40, False),
            "version": 3,
            **changes,
        }


def test_a_cuda_array_is_described() -> None:
    view = as_view(CudaArray())
    assert (view.address, view.count, DTYPE_NAMES[view.dtype]) == (1 << 40, 6, "float32")
    assert (view.device_type, view.device_id) == (2, -1)
    assert view.is_contiguous
    assert not view.is_readonly


class UnifiedArray(bytearray, CudaArray):
    """One of CuPy's that the host reaches, too: its buffer tells elements where bytes are due."""

    def __init__(self, **changes: Any) -> None:
        bytearray.__init__(self, 6)
        CudaArray.__init__(self, **changes)


def test_a_cuda_array_that_is_a_buffer_too_is_one_on_the_gpu() -> None:
    view = as_view(UnifiedArray())
    assert (view.address, view.count, DTYPE_NAMES[view.dtype]) == (1 << 40, 6, "float32")
    assert (view.device_type, view.device_id) == (2, -1)


def test_a_cuda_array_tells_strides_and_flags() -> None:
    assert as_view(CudaArray(strides=(12, 4))).is_contiguous
    assert not as_view(CudaArray(strides=(4, 8))).is_contiguous
    assert as_view(CudaArray(data=(8, True))).is_readonly
    assert as_view(CudaArray(shape=(0, 3), data=(0, False))).count == 0


def test_a_cuda_array_of_an_extension_dtype_is_named_by_its_array() -> None:
    x = CudaArray(typestr="<V2")
    x.dtype = np.dtype(ml_dtypes.bfloat16)  # type: ignore[attr-defined]
    assert DTYPE_NAMES[as_view(x).dtype] == "bfloat16"


@pytest.mark.parametrize(
    "changes",
    [
        {"typestr": ">f4"},
        {"typestr": "<V2"},
        {"typestr": "<M8"},
        {"mask": object()},
        {"data": (0, False)},
        {"data": 1 << 40},
        {"data": ("here", False)},
        {"shape": 6},
        {"shape": (-2, 3)},
        {"shape": (1 << 62, 1 << 62)},  # as many as none, with numbers of 64 bits
        {"typestr": None},
        {"strides": 4},
        {"strides": (4,)},
        {"strides": (24, 12, 4)},
    ],
)
def test_a_cuda_array_that_cannot_move_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(InvalidArray, match="cannot move this"):
        as_view(CudaArray(**changes))


class BrokenCudaArray:
    """Its library has something to say about the memory."""

    @property
    def __cuda_array_interface__(self) -> Any:
        raise RuntimeError("the context is gone\nand more")


def test_a_cuda_array_that_cannot_be_described_tells_why() -> None:
    for broken in (BrokenCudaArray(), EmptyInterface()):
        with pytest.raises(InvalidArray, match="__cuda_array_interface__ cannot be read") as told:
            as_view(broken)
        assert type(told.value.__cause__).__name__ in str(told.value)
    with pytest.raises(InvalidArray, match=r"the context is gone\)"):
        as_view(BrokenCudaArray())


class EmptyInterface:
    __cuda_array_interface__: dict[str, Any] = {}  # noqa: RUF012


def test_the_class_of_cuda_arrays_is_no_array() -> None:
    for array_class in (BrokenCudaArray, EmptyInterface):
        with pytest.raises(InvalidArray, match="cannot move this type: it has neither"):
            as_view(array_class)
