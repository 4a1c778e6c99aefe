"""Where an array of any library lies in memory, and what it holds.

The ways to find out, quickest first: NumPy's own object head; DLPack's C exchange
table (torch); ``__cuda_array_interface__``; the buffer protocol; a DLPack capsule.
"""

import sys

cimport cython
from cpython.buffer cimport (
    PyBUF_FULL_RO, PyBuffer_Release, PyObject_CheckBuffer, PyObject_GetBuffer,
)
from cpython.mem cimport PyMem_Free, PyMem_Malloc
from cpython.object cimport PyObject, PyObject_TypeCheck, PyTypeObject
from cpython.pycapsule cimport PyCapsule_GetPointer, PyCapsule_IsValid, PyCapsule_SetName
from cpython.ref cimport Py_INCREF
from libc.stdint cimport int64_t, SIZE_MAX, uint32_t, uintptr_t

from ferro_dist._native.dlpack cimport (
    BFLOAT, BOOL, COMPLEX, CPU, CUDA, CUDA_HOST, CUDA_MANAGED, DLDataType, DLExchangeApi,
    DLManagedTensor, DLManagedTensorVersioned, DLPACK_MAJOR, DLPACK_READ_ONLY, DLTensor, FLOAT,
    FLOAT8_E4M3FN, FLOAT8_E5M2, INT, UINT,
)
from ferro_dist._native.numpy_abi cimport (
    NPY_BOOL, NPY_BYTE, NPY_C_CONTIGUOUS, NPY_CDOUBLE, NPY_CFLOAT, NPY_DOUBLE,
    NPY_FIRST_USER_TYPE, NPY_FLOAT, NPY_HALF, NPY_INT, NPY_LONG, NPY_LONGLONG, NPY_SHORT,
    NPY_UBYTE, NPY_UINT, NPY_ULONG, NPY_ULONGLONG, NPY_USHORT, NPY_WRITEABLE, NumpyArray,
)

import numpy

from ferro_dist.errors import InvalidArray

__all__ = ["BufferView", "as_output", "as_view"]

cdef extern from *:
    """
    static inline int already_raised(void) { return -1; }
    """
    int already_raised() except -1


cdef int UNSUPPORTED = -1

cdef enum:  # DLPack's names of a consumer's stream
    NO_STREAM = -1
    LEGACY_STREAM = 1

cdef int[<int> DTYPE_COUNT] ITEM_SIZES
ITEM_SIZES[:] = [1, 1, 1, 2, 2, 4, 4, 8, 8, 2, 2, 4, 8, 8, 16, 1, 1]
cdef size_t MAX_ITEM_SIZE = 16

SUPPORTED = (
    "bool, int8 to int64, uint8 to uint64, float16, bfloat16, float32, float64, complex64, "
    "complex128, float8_e4m3fn and float8_e5m2"
)


@cython.freelist(32)
@cython.no_gc_clear  # the owner must outlive what an ExportedView gives back
cdef class BufferView:
    """A description of the memory of an array; made by `as_view`.

    The memory stays valid for as long as the view lives, unless its owner is told
    to move it (``tensor.resize_``, ``ndarray.resize(refcheck=False)``).
    """

    def __init__(self):
        raise TypeError("BufferView is made by as_view(array)")

    @property
    def address(self):
        """Where the first element lies, as a number."""
        return <uintptr_t> self.data

    def __repr__(self):
        return (
            f"<BufferView, count {self.count}, dtype {self.dtype}, at {self.address:#x}, "
            f"device ({self.device_type}, {self.device_id})>"
        )


@cython.final
@cython.no_gc_clear
cdef class ExportedView(BufferView):
    """A view that gives back what its owner has handed out."""

    def __dealloc__(self):
        if self._buffer != NULL:
            PyBuffer_Release(self._buffer)
            PyMem_Free(self._buffer)
        if self._capsule != NULL and self._capsule.deleter != NULL:
            self._capsule.deleter(self._capsule)
        if self._versioned != NULL and self._versioned.deleter != NULL:
            self._versioned.deleter(self._versioned)


def as_view(array):
    """Describe the memory of `array` for reading.

    Parameters
    ----------
    array : array
        NumPy, torch, JAX or CuPy array, or anything with the buffer protocol,
        ``__cuda_array_interface__`` or ``__dlpack__``. Any shape and strides.

    Returns
    -------
    BufferView

    Raises
    ------
    InvalidArray
        What it holds cannot be moved: its dtype, byte order, layout or device.
    """
    return view_of(array)


def as_output(array):
    """Describe the memory of `array` for writing.

    Raises
    ------
    InvalidArray
        As `as_view`, and if `array` is read-only, not C-contiguous, or requires grad.
    """
    return output_view_of(array)


cdef BufferView view_of(object array):
    cdef PyTypeObject* array_type = (<PyObject*> array).ob_type
    if array_type == ndarray_type:
        return _view_of_ndarray(array)
    cdef DLExchangeApi* api = _cached_exchange_api(array_type)
    if api != NULL:
        return _view_through_exchange_api(array, api)
    return _view_of_any(array)


cdef BufferView output_view_of(object array):
    cdef BufferView view = view_of(array)
    if view.is_readonly:
        raise InvalidArray(
            f"cannot write into this {_name(array)}: it is read-only. Pass a writable array, such as "
            "NumPy's; a collective without `out` returns a new one."
        )
    if not view.is_contiguous:
        raise InvalidArray(
            f"cannot write into this {_name(array)}: it is not C-contiguous. Pass a contiguous "
            "array as `out` and copy from it."
        )
    if _requires_grad(array):
        raise InvalidArray(
            f"cannot write into this {_name(array)}: it requires grad, and autograd would not "
            "know of the write. Pass its .detach(), which shares its memory."
        )
    return view


cdef bint is_output(BufferView view):
    return not view.is_readonly and view.is_contiguous and not _requires_grad(view.owner)


cdef bint current_stream_of(BufferView view, void** stream) except -1:
    cdef DLExchangeApi* api = _cached_exchange_api((<PyObject*> view.owner).ob_type)
    if api == NULL or api.current_stream == NULL:
        return False
    if api.current_stream(CUDA, view.device_id, stream) != 0:
        raise InvalidArray(f"the current stream of this {_name(view.owner)} is not known")
    return True


cdef bint is_of_jax(object array):
    return hasattr(array, "block_until_ready")


cdef inline bint _requires_grad(object array):
    if (<PyObject*> array).ob_type == ndarray_type:
        return False
    return getattr(array, "requires_grad", False) is True


cdef inline BufferView _new_view(object owner):
    cdef BufferView view = BufferView.__new__(BufferView)
    view.owner = owner
    return view


cdef inline ExportedView _new_exported(object owner):
    cdef ExportedView view = ExportedView.__new__(ExportedView)
    view.owner = owner
    return view


cdef inline void _set_size(BufferView view, int dtype, size_t count) noexcept:
    view.dtype = dtype
    view.itemsize = ITEM_SIZES[dtype]
    view.count = count
    view.nbytes = count * <size_t> view.itemsize


cdef str _name(object array):
    """Name a type for a message: ``torch.Tensor``."""
    cls = type(array)
    if cls.__module__ == "builtins":
        return cls.__qualname__
    return f"{cls.__module__}.{cls.__qualname__}"


cdef str _first_line(object cause):
    """Leave out the C++ stack that torch appends to its messages."""
    return str(cause).partition("\n")[0].rstrip(".")


cdef object _unsupported_dtype(object array, object dtype):
    remedy = "Convert the array."
    if not getattr(dtype, "hasobject", False):  # references mean nothing to another process
        remedy = "Convert the array, or view its bytes as uint8."
    return InvalidArray(
        f"cannot move this {_name(array)}: its dtype is {dtype}; ferro_dist moves {SUPPORTED}. {remedy}"
    )


cdef object _foreign_byte_order(object array, object dtype):
    return InvalidArray(
        f"cannot move this {_name(array)}: its dtype is {dtype}, of another byte order than this "
        "machine's. "
        'Convert it: array.astype(array.dtype.newbyteorder("=")).'
    )


# --- NumPy ------------------------------------------------------------------------------

cdef PyTypeObject* ndarray_type = <PyTypeObject*> <PyObject*> numpy.ndarray
cdef PyTypeObject* scalar_type = <PyTypeObject*> <PyObject*> numpy.generic
cdef char FOREIGN_BYTE_ORDER = b">" if sys.byteorder == "little" else b"<"

cdef int[24] NUMPY_DTYPES
NUMPY_DTYPES[:] = [UNSUPPORTED] * 24
NUMPY_DTYPES[<int> NPY_BOOL] = BOOLEAN
NUMPY_DTYPES[<int> NPY_BYTE] = INT8
NUMPY_DTYPES[<int> NPY_UBYTE] = UINT8
NUMPY_DTYPES[<int> NPY_SHORT] = INT16
NUMPY_DTYPES[<int> NPY_USHORT] = UINT16
NUMPY_DTYPES[<int> NPY_INT] = INT32
NUMPY_DTYPES[<int> NPY_UINT] = UINT32
NUMPY_DTYPES[<int> NPY_LONG] = INT64 if sizeof(long) == 8 else INT32
NUMPY_DTYPES[<int> NPY_ULONG] = UINT64 if sizeof(long) == 8 else UINT32
NUMPY_DTYPES[<int> NPY_LONGLONG] = INT64
NUMPY_DTYPES[<int> NPY_ULONGLONG] = UINT64
NUMPY_DTYPES[<int> NPY_HALF] = FLOAT16
NUMPY_DTYPES[<int> NPY_FLOAT] = FLOAT32
NUMPY_DTYPES[<int> NPY_DOUBLE] = FLOAT64
NUMPY_DTYPES[<int> NPY_CFLOAT] = COMPLEX64
NUMPY_DTYPES[<int> NPY_CDOUBLE] = COMPLEX128

# ml_dtypes registers its dtypes with NumPy as it is imported; their numbers are found then.
cdef int bfloat16_number = -1
cdef int e4m3_number = -1
cdef int e5m2_number = -1


cdef BufferView _view_of_ndarray(object array):
    cdef NumpyArray* head = <NumpyArray*> <PyObject*> array
    cdef int number = head.dtype.type_number
    cdef int dtype = NUMPY_DTYPES[number] if 0 <= number < 24 else _extension_dtype(number)
    if dtype == UNSUPPORTED:
        raise _unsupported_dtype(array, array.dtype)
    if head.dtype.byte_order == FOREIGN_BYTE_ORDER:
        raise _foreign_byte_order(array, array.dtype)
    cdef size_t count = 1
    cdef int axis
    for axis in range(head.ndim):
        count *= <size_t> head.shape[axis]
    cdef BufferView view = _new_view(array)
    _set_size(view, dtype, count)
    view.data = head.data
    view.device_type = CPU
    view.is_readonly = not head.flags & NPY_WRITEABLE
    view.is_contiguous = head.flags & NPY_C_CONTIGUOUS
    return view


cdef int _extension_dtype(int number) except? -1:
    """Find the number of a dtype that is not NumPy's own among those of ml_dtypes."""
    if number < NPY_FIRST_USER_TYPE:
        return UNSUPPORTED
    if bfloat16_number < 0:
        _learn_extension_dtypes()
    if number == bfloat16_number:
        return BFLOAT16
    if number == e4m3_number:
        return E4M3
    return E5M2 if number == e5m2_number else UNSUPPORTED


cdef int _learn_extension_dtypes() except -1:
    global bfloat16_number, e4m3_number, e5m2_number
    import ml_dtypes

    e4m3_number = numpy.dtype(ml_dtypes.float8_e4m3fn).num
    e5m2_number = numpy.dtype(ml_dtypes.float8_e5m2).num
    bfloat16_number = numpy.dtype(ml_dtypes.bfloat16).num
    return 0


cdef int _check_numpy_abi() except -1:
    """Compare what is read with what NumPy says, once: a NumPy with another head must not pass."""
    array = numpy.arange(6, dtype=numpy.int16).reshape(2, 3)[:, 1:]
    array.flags.writeable = False
    copy = array.copy()
    cdef NumpyArray* head = <NumpyArray*> <PyObject*> array
    cdef NumpyArray* copy_head = <NumpyArray*> <PyObject*> copy
    if (
        <uintptr_t> head.data != array.ctypes.data
        or head.ndim != 2 or head.shape[1] != 2 or head.strides[0] != 6
        or head.dtype.type_number != array.dtype.num
        or head.dtype.byte_order != ord(array.dtype.byteorder)
        or head.flags & (NPY_C_CONTIGUOUS | NPY_WRITEABLE)
        or ~copy_head.flags & (NPY_C_CONTIGUOUS | NPY_WRITEABLE)
    ):
        raise ImportError(
            f"ferro_dist cannot read the arrays of NumPy {numpy.__version__}; "
            "it knows NumPy 1.23 to 2.x"
        )
    return 0


_check_numpy_abi()


# --- DLPack's C exchange table ----------------------------------------------------------

# By exact type, as the protocol has it: a subclass may bring its own table. Few types ever
# have one (torch: Tensor, Parameter, Buffer), so a walk beats a dict. Guarded by the GIL.
cdef struct CachedApi:
    PyTypeObject* array_type
    DLExchangeApi* api

cdef CachedApi[8] cache
cdef int cached_count = 0
# Types that are known to have none, with the same limit: asking costs as much as a view.
cdef PyTypeObject* without_api[8]
cdef int without_count = 0


cdef inline DLExchangeApi* _cached_exchange_api(PyTypeObject* array_type) noexcept:
    cdef int i
    for i in range(cached_count):
        if cache[i].array_type == array_type:
            return cache[i].api
    return NULL


cdef inline bint _is_known_without_api(PyTypeObject* array_type) noexcept:
    cdef int i
    for i in range(without_count):
        if without_api[i] == array_type:
            return True
    return False


cdef int _remember_without_api(object array) except -1:
    global without_count
    if without_count < 8:
        Py_INCREF(type(array))  # for good: a new type at the same address must not match
        without_api[without_count] = (<PyObject*> array).ob_type
        without_count += 1
    return 0


cdef DLExchangeApi* _find_exchange_api(object array) except? NULL:
    """Look the type's table up and remember it; null if it has none that we can read."""
    global cached_count
    if _is_known_without_api((<PyObject*> array).ob_type):
        return NULL
    capsule = getattr(type(array), "__dlpack_c_exchange_api__", None)
    if capsule is None or not PyCapsule_IsValid(capsule, "dlpack_exchange_api"):
        _remember_without_api(array)
        return NULL
    cdef DLExchangeApi* api = <DLExchangeApi*> PyCapsule_GetPointer(capsule, "dlpack_exchange_api")
    while api != NULL and api.version.major != DLPACK_MAJOR:
        api = api.previous
    if api == NULL or api.describe == NULL:
        return NULL
    if cached_count < 8:
        Py_INCREF(type(array))  # for good: a new type at the same address must not match
        cache[cached_count] = CachedApi((<PyObject*> array).ob_type, api)
        cached_count += 1
    return api


cdef BufferView _view_through_exchange_api(object array, DLExchangeApi* api):
    cdef DLTensor tensor
    if api.describe(<PyObject*> array, &tensor) != 0:
        _refuse_undescribed(array)
    cdef BufferView view = _new_view(array)
    _fill(view, &tensor)
    return view


cdef int _refuse_undescribed(object array) except -1:
    """Put what the array's library has raised into our words.

    A function of its own: a ``try`` costs time in its function even where nothing is raised.
    """
    try:
        already_raised()
    except Exception as cause:
        raise InvalidArray(
            f"cannot move this {_name(array)}: {_first_line(cause)}. {_remedy(array)}"
        ) from cause


# --- DLPack tensors ---------------------------------------------------------------------

cdef int _fill(BufferView view, const DLTensor* tensor) except -1:
    cdef int dtype = _dtype_of_dlpack(tensor.dtype)
    if dtype == UNSUPPORTED:
        raise _unsupported_dtype(
            view.owner, getattr(view.owner, "dtype", _dlpack_name(tensor.dtype)))
    cdef size_t count = 1
    cdef int axis
    for axis in range(tensor.ndim):
        count *= <size_t> tensor.shape[axis]
    _set_size(view, dtype, count)
    view.data = NULL if tensor.data == NULL else <char*> tensor.data + tensor.byte_offset
    view.is_contiguous = _is_contiguous(tensor.ndim, tensor.shape, tensor.strides, 1)
    _set_device(view, tensor.device.device_type, tensor.device.device_id)
    return _check_values(view, tensor)


cdef inline int _dtype_of_dlpack(DLDataType dtype) noexcept:
    cdef int size = dtype.bits >> 3  # bytes
    if dtype.lanes != 1 or dtype.bits & 7:
        return UNSUPPORTED
    if dtype.code == FLOAT:
        return _float_of_size(size)
    if dtype.code == BFLOAT:
        return BFLOAT16 if size == 2 else UNSUPPORTED
    if dtype.code == INT:
        return _integer_of_size(size, True)
    if dtype.code == UINT:
        return _integer_of_size(size, False)
    if dtype.code == COMPLEX:
        return _complex_of_size(size)
    if size != 1:
        return UNSUPPORTED
    if dtype.code == BOOL:
        return BOOLEAN
    if dtype.code == FLOAT8_E4M3FN:
        return E4M3
    return E5M2 if dtype.code == FLOAT8_E5M2 else UNSUPPORTED


cdef inline int _float_of_size(int size) noexcept:
    return FLOAT32 if size == 4 else FLOAT64 if size == 8 else FLOAT16 if size == 2 else UNSUPPORTED


cdef inline int _complex_of_size(int size) noexcept:
    return COMPLEX64 if size == 8 else COMPLEX128 if size == 16 else UNSUPPORTED


cdef inline int _integer_of_size(int size, bint is_signed) noexcept:
    if size == 8:
        return INT64 if is_signed else UINT64
    if size == 4:
        return INT32 if is_signed else UINT32
    if size == 2:
        return INT16 if is_signed else UINT16
    if size == 1:
        return INT8 if is_signed else UINT8
    return UNSUPPORTED


cdef str _dlpack_name(DLDataType dtype):
    return f"DLPack({dtype.code}, {dtype.bits} bits, {dtype.lanes} lanes)"


ctypedef fused extent:
    int64_t
    Py_ssize_t


cdef inline bint _is_contiguous(
    int ndim, const extent* shape, const extent* strides, extent step
) noexcept:
    """Tell whether elements lie in C order without gaps; `step` is then the last axis' stride."""
    cdef extent expected = step
    cdef bint has_gaps = False
    cdef int axis
    if strides == NULL:
        return True
    for axis in range(ndim - 1, -1, -1):
        if shape[axis] == 0:
            return True
        if shape[axis] != 1 and strides[axis] != expected:
            has_gaps = True
        expected *= shape[axis]
    return not has_gaps


cdef inline int _set_device(BufferView view, int device_type, int device_id) except -1:
    if device_type == CPU or device_type == CUDA_HOST:
        view.device_type = CPU
        view.device_id = 0
    elif device_type == CUDA or device_type == CUDA_MANAGED:
        view.device_type = CUDA
        view.device_id = device_id
    else:
        raise InvalidArray(
            f"cannot move this {_name(view.owner)}: it lives on a device of DLPack's type "
            f"{device_type}. Copy it to the CPU (1) or a CUDA device (2) first."
        )
    return 0


cdef int _check_values(BufferView view, const DLTensor* tensor) except -1:
    """Refuse tensors whose memory does not hold their values; DLPack does not tell which."""
    array = view.owner
    if (view.dtype == INT8 or view.dtype == UINT8) and _is_of_torch(array):
        _refuse_narrow_integers(array)
    if view.count == 0:
        return _refuse_lazy(array)
    # Gradients of unused inputs come as tensors of zeros without memory; subclasses that
    # wrap other tensors (DTensor) have none either.
    if view.data == NULL:
        raise InvalidArray(
            f"cannot move this {_name(array)}: it has no memory of its own. Pass its .clone(), "
            "or the tensor that it wraps."
        )
    cdef bint is_complex = view.dtype == COMPLEX64 or view.dtype == COMPLEX128
    if is_complex and _is_of_torch(array) and array.is_conj():
        raise InvalidArray(
            f"cannot move this {_name(array)}: its conjugation is pending. Pass .resolve_conj()."
        )
    # A negation is pending in the imaginary part of a pending conjugate and in views of it, which take
    # every second number in memory. Asking costs as much as all the rest, so only tensors that
    # may be such are asked: by their strides or, where a single number was given new ones, by its address.
    cdef bint is_second = view.count == 1 and <uintptr_t> view.data % <uintptr_t> (2 * view.itemsize) != 0
    cdef bint may_be_part = view.dtype >= FLOAT16 and (is_second or not _has_dense_strides(tensor))
    if may_be_part and _is_of_torch(array) and array.is_neg():
        raise InvalidArray(
            f"cannot move this {_name(array)}: its negation is pending. Pass .resolve_neg()."
        )
    return 0


cdef int _refuse_narrow_integers(object array) except -1:
    """Refuse torch's integers of 1 to 7 bits, which the table gives out as integers of 8 bits."""
    torch = sys.modules["torch"]
    dtype = array.dtype
    if dtype is not torch.uint8 and dtype is not torch.int8:
        raise _unsupported_dtype(array, dtype)
    return 0


cdef int _refuse_lazy(object array) except -1:
    """Refuse torch's parameters and buffers of lazy modules, which look like empty tensors."""
    if _is_of_torch(array) and sys.modules["torch"].nn.parameter.is_lazy(array):
        raise InvalidArray(
            f"cannot move this {_name(array)}: it has no shape yet. Run a batch through its module first."
        )
    return 0


cdef bint _is_of_torch(object array):
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(array, torch.Tensor)


cdef inline bint _has_dense_strides(const DLTensor* tensor) noexcept:
    """Tell whether every stride is that of a fresh array, even along axes of size 1."""
    cdef int64_t expected = 1
    cdef int axis
    if tensor.strides == NULL:
        return True
    for axis in range(tensor.ndim - 1, -1, -1):
        if tensor.strides[axis] != expected:
            return False
        expected *= tensor.shape[axis]
    return tensor.ndim > 0


# --- All other arrays -------------------------------------------------------------------

cdef BufferView _view_of_any(object array):
    cdef DLExchangeApi* api = _find_exchange_api(array)
    if api != NULL:
        return _view_through_exchange_api(array, api)
    if PyObject_TypeCheck(array, ndarray_type):
        return _view_of_ndarray_subclass(array)
    if PyObject_TypeCheck(array, scalar_type):
        return _view_of_scalar(array)
    cdef BufferView view = None
    # Through that interface, JAX neither waits for an array nor keeps it from being donated to a computation;
    # versions of torch older than the exchange table call bfloat16 float16 there, and raise for what
    # requires grad.
    if not is_of_jax(array) and not _is_of_torch(array):
        view = _view_through_cuda_array_interface(array)
    # Afterwards: CuPy exports memory that the host reaches, too, as a buffer, and gives the number of its
    # elements for that of its bytes.
    if view is None and PyObject_CheckBuffer(array):
        view = _view_through_buffer(array)
    if view is None:
        view = _view_through_capsule(array)
    if view is None:
        raise InvalidArray(_why_no_view(array))
    return view


cdef BufferView _view_of_ndarray_subclass(object array):
    if isinstance(array, numpy.ma.MaskedArray):
        raise InvalidArray(
            f"cannot move this {_name(array)}: its mask would be lost. Pass .filled() or .data."
        )
    return _view_of_ndarray(array)


cdef BufferView _view_of_scalar(object scalar):
    """Describe a copy of a scalar of NumPy: its own buffer shows a date or text as bytes."""
    cdef BufferView view = _view_of_ndarray(numpy.asarray(scalar))
    view.is_readonly = True
    return view


cdef str _why_no_view(object array):
    if array is None:
        return (
            "None is not an array. Even where an array is not read, one is needed for its dtype and "
            "size, such as numpy.empty(shape, dtype)."
        )
    return (
        f"cannot move this {_name(array)}: it has neither the buffer protocol, nor DLPack, nor "
        "__cuda_array_interface__. Pass an array; numpy.asarray(x) makes one of a list or a number."
    )


cdef str _remedy(object array):
    if getattr(array, "is_quantized", False):
        return "Pass its .int_repr() or .dequantize()."
    if str(getattr(array, "device", "")) == "meta":
        return "A meta tensor has no data: materialize it with torch.empty_like(x, device=...)."
    if str(getattr(array, "layout", "torch.strided")) != "torch.strided":
        return "Pass its .to_dense()."
    return "Pass a dense tensor on the CPU or a CUDA device."


# --- The buffer protocol ----------------------------------------------------------------

cdef BufferView _view_through_buffer(object array):
    """Describe through the buffer protocol; None if the type has it but this array does not.

    JAX's bfloat16 arrays and those on a GPU are such.
    """
    cdef ExportedView view = _new_exported(array)
    cdef Py_buffer* buffer = <Py_buffer*> PyMem_Malloc(sizeof(Py_buffer))
    if buffer == NULL:
        raise MemoryError
    try:
        PyObject_GetBuffer(array, buffer, PyBUF_FULL_RO)
    except (BufferError, TypeError, ValueError):
        PyMem_Free(buffer)
        return None
    except BaseException:
        PyMem_Free(buffer)
        raise
    view._buffer = buffer  # from here on __dealloc__ releases it
    cdef Py_ssize_t count = buffer.len // buffer.itemsize if buffer.itemsize > 0 else 0
    _set_size(view, _dtype_of_buffer(array, buffer), count)
    _check_suboffsets(array, buffer)
    view.data = buffer.buf
    view.device_type = CPU
    view.is_readonly = buffer.readonly
    view.is_contiguous = _is_contiguous[Py_ssize_t](
        buffer.ndim, buffer.shape, buffer.strides, buffer.itemsize
    )
    return view


cdef int _dtype_of_buffer(object array, const Py_buffer* buffer) except -1:
    cdef bytes spelled = b"B" if buffer.format == NULL else buffer.format
    cdef str format = spelled.decode("latin-1")
    if buffer.itemsize > 1 and format[:1] in (">!" if sys.byteorder == "little" else "<"):
        raise _foreign_byte_order(array, format)
    cdef str code = format.lstrip("@=<>!")
    cdef int size = <int> buffer.itemsize
    cdef int dtype = UNSUPPORTED
    if code in ("b", "h", "i", "l", "q", "n"):
        dtype = _integer_of_size(size, True)
    elif code in ("B", "c", "H", "I", "L", "Q", "N"):
        dtype = _integer_of_size(size, False)
    elif code in ("e", "f", "d"):
        dtype = _float_of_size(size)
    elif code in ("Zf", "Zd", "F", "D"):
        dtype = _complex_of_size(size)
    elif code == "?" and size == 1:
        dtype = BOOLEAN
    if dtype == UNSUPPORTED:
        raise _unsupported_dtype(array, f'"{format}" in the notation of the struct module')
    return dtype


cdef int _check_suboffsets(object array, const Py_buffer* buffer) except -1:
    cdef int axis
    if buffer.suboffsets == NULL:
        return 0
    for axis in range(buffer.ndim):
        if buffer.suboffsets[axis] >= 0:
            raise InvalidArray(
                f"cannot move this {_name(array)}: its rows lie behind pointers. Copy it into one "
                "block: bytes(x) or numpy.array(x)."
            )
    return 0


# --- __cuda_array_interface__ -----------------------------------------------------------

cdef BufferView _view_through_cuda_array_interface(object array):
    """Describe a CuPy or Numba array; None where there is no such interface."""
    try:
        interface = getattr(array, "__cuda_array_interface__", None)
        return None if interface is None else _view_of_interface(array, interface)
    except (InvalidArray, MemoryError):
        raise
    except Exception as cause:  # of whatever kind the array's library raises
        if isinstance(array, type):  # the class of such arrays, which has the interface as they have it
            return None
        raise InvalidArray(
            f"cannot move this {_name(array)}: its __cuda_array_interface__ cannot be read "
            f"({type(cause).__name__}: {_first_line(cause)})."
        ) from cause


cdef BufferView _view_of_interface(object array, object interface):
    if interface.get("mask") is not None:
        raise InvalidArray(f"cannot move this {_name(array)}: its mask would be lost")
    cdef int dtype = _dtype_of_typestr(array, interface["typestr"])
    address, is_readonly = interface["data"]
    shape = tuple(interface["shape"])
    cdef BufferView view = _new_view(array)
    cdef size_t count = 1
    cdef size_t extent
    for size in shape:
        extent = size
        if extent != 0 and count > SIZE_MAX // MAX_ITEM_SIZE // extent:
            raise InvalidArray(f"cannot move this {_name(array)}: no memory holds an array of shape {shape}")
        count *= extent
    _set_size(view, dtype, count)
    view.data = <void*> <uintptr_t> (address or 0)
    if view.data == NULL and count != 0:
        raise InvalidArray(f"cannot move this {_name(array)}: it has no memory, or none any more.")
    view.is_readonly = is_readonly
    view.is_contiguous = _is_contiguous_tuple(shape, interface.get("strides"), view.itemsize)
    view.device_type = CUDA
    view.device_id = _cuda_device_of(array)
    return view


cdef int _dtype_of_typestr(object array, object typestr) except -1:
    """Read ``"<f4"`` and the like; ml_dtypes' dtypes are opaque there: the array names them."""
    cdef str name
    cdef object code = NATIVE_TYPESTRS.get(typestr)
    if code is not None:
        return code
    if typestr[0] == chr(FOREIGN_BYTE_ORDER) and typestr[1:] in TYPESTR_DTYPES:
        raise _foreign_byte_order(array, typestr)
    name = str(getattr(array, "dtype", typestr))
    code = EXTENSION_DTYPES.get(name)
    if code is None:
        raise _unsupported_dtype(array, name)
    return code


cdef dict EXTENSION_DTYPES = {
    "bfloat16": BFLOAT16, "float8_e4m3fn": E4M3, "float8_e5m2": E5M2,
}
cdef dict TYPESTR_DTYPES = {
    "b1": BOOLEAN, "i1": INT8, "u1": UINT8, "i2": INT16, "u2": UINT16, "i4": INT32, "u4": UINT32,
    "i8": INT64, "u8": UINT64, "f2": FLOAT16, "f4": FLOAT32, "f8": FLOAT64, "c8": COMPLEX64,
    "c16": COMPLEX128,
}

cdef str NATIVE_BYTE_ORDER = "<" if sys.byteorder == "little" else ">"
cdef dict NATIVE_TYPESTRS = {
    order + name: code
    for name, code in TYPESTR_DTYPES.items()
    for order in (NATIVE_BYTE_ORDER, "|", "=") + (("<", ">") if name[1:] == "1" else ())
}


cdef int _is_contiguous_tuple(tuple shape, object strides, int itemsize) except -1:
    if strides is None:
        return True
    strides = tuple(strides)
    if len(strides) != len(shape):
        raise ValueError(f"strides {strides} for shape {shape}")
    if 0 in shape:
        return True
    expected = itemsize
    for size, stride in zip(reversed(shape), reversed(strides)):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True


cdef int _cuda_device_of(object array) except? -1:
    """Ask the array for its device's number, which the interface leaves out; -1 if it cannot tell."""
    number = getattr(getattr(array, "device", None), "id", None)
    if number is None and hasattr(array, "__dlpack_device__"):
        number = array.__dlpack_device__()[1]
    return -1 if number is None else number


# --- DLPack capsules --------------------------------------------------------------------

cdef BufferView _view_through_capsule(object array):
    """Describe through ``__dlpack__``; None where there is none. Never copies; waits only for JAX."""
    if not hasattr(array, "__dlpack__"):
        return None
    # Whoever uses the view orders streams.
    capsule = _capsule_of(array, NO_STREAM)
    # Renamed, as the protocol has it: the capsule's own destructor now leaves the tensor to us.
    if PyCapsule_IsValid(capsule, "dltensor_versioned"):
        return _adopt_versioned(array, capsule)
    if not PyCapsule_IsValid(capsule, "dltensor"):
        raise InvalidArray(f"cannot move this {_name(array)}: its __dlpack__ returns no tensor")
    return _adopt_unversioned(array, capsule)


cdef int order_before_legacy_stream(object array) except -1:
    if hasattr(array, "__dlpack__"):
        _capsule_of(array, LEGACY_STREAM)  # which nobody takes over: its own destructor gives it back
    return 0


cdef object _capsule_of(object array, int stream):
    try:
        return _export_capsule(array, stream)
    except (AttributeError, BufferError, RuntimeError, TypeError, ValueError) as cause:
        raise InvalidArray(_why_no_capsule(array, cause)) from cause


cdef str _why_no_capsule(object array, object cause):
    if "Tracer" in [cls.__name__ for cls in type(array).__mro__]:
        why = "it has no value while JAX traces. Make the call outside of jit, grad and vmap."
    elif is_of_jax(array) and len(getattr(array.sharding, "device_set", ())) > 1:
        why = (
            "it is spread over several devices. Pass x.addressable_data(i), its part on one of them, or "
            "a copy on one: jax.device_put(x, device)."
        )
    else:
        why = _first_line(cause)
    return f"cannot move this {_name(array)}: {why}"


cdef object _export_capsule(object array, int stream):
    array = _readable(array)
    options = {}
    # JAX takes no -1, and its arrays have been waited for.
    if array.__dlpack_device__()[0] in (CUDA, CUDA_MANAGED) and not is_of_jax(array):
        options["stream"] = stream
    try:
        return array.__dlpack__(max_version=(DLPACK_MAJOR, 0), **options)
    except TypeError:
        return array.__dlpack__(**options)  # from before DLPack 1.0


cdef object _readable(object array):
    """Wait for pending work of JAX; detach, since an old torch exports nothing that requires grad."""
    if is_of_jax(array):
        array.block_until_ready()
    return array.detach() if _requires_grad(array) else array


cdef BufferView _adopt_versioned(object array, object capsule):
    cdef ExportedView view = _new_exported(array)
    view._versioned = <DLManagedTensorVersioned*> PyCapsule_GetPointer(
        capsule, "dltensor_versioned"
    )
    PyCapsule_SetName(capsule, "used_dltensor_versioned")
    cdef uint32_t major = view._versioned.version.major
    if major != DLPACK_MAJOR:
        raise InvalidArray(
            f"cannot move this {_name(array)}: its DLPack is of version {major}, not {DLPACK_MAJOR}"
        )
    _fill(view, &view._versioned.tensor)
    view.is_readonly = view._versioned.flags & DLPACK_READ_ONLY
    return view


cdef BufferView _adopt_unversioned(object array, object capsule):
    cdef ExportedView view = _new_exported(array)
    view._capsule = <DLManagedTensor*> PyCapsule_GetPointer(capsule, "dltensor")
    PyCapsule_SetName(capsule, "used_dltensor")
    _fill(view, &view._capsule.tensor)
    # The old struct cannot say so, and JAX still hands it out for its immutable arrays.
    view.is_readonly = is_of_jax(array)
    return view
