"""Arrays in the memory of an emulated GPU, as libraries exchange them.

Enough to hand memory to a library, to write to it and to look at it afterwards. The little
that is computed here is computed by NumPy, on copies, in the order of the current stream.
Made by `ferro_dist.testing.emulated_gpu`.
"""

cimport cython
from cpython.mem cimport PyMem_Free, PyMem_Malloc
from cpython.object cimport PyObject
from cpython.pycapsule cimport PyCapsule_GetPointer, PyCapsule_IsValid, PyCapsule_New
from cpython.ref cimport Py_DECREF, Py_INCREF
from libc.stdint cimport int32_t, int64_t, uintptr_t

from ferro_dist._native.dlpack cimport (
    BFLOAT, CUDA, DLDataType, DLDevice, DLExchangeApi, DLManagedTensor, DLManagedTensorVersioned,
    DLPACK_MAJOR, DLTensor, DLVersion, FLOAT8_E4M3FN, FLOAT8_E5M2,
)
from ferro_dist._native.dlpack_export cimport dlpack_dtype_of, drop_capsule, new_managed

import numpy

__all__ = ["EmulatedArray", "current_stream", "set_current_stream"]

cdef extern from *:
    """
    // Each thread has its own, as in the libraries of GPU arrays.
    static thread_local void* stream_of_thread = nullptr;
    static void** current_stream_slot() { return &stream_of_thread; }
    """
    void** current_stream_slot() noexcept nogil

cdef DLExchangeApi exchange_api  # filled in at the end

cdef enum:
    MAX_NDIM = 16
    LEGACY_STREAM = 1  # its number in DLPack and in __cuda_array_interface__


def current_stream():
    """Return the address of the calling thread's current stream; 0 for the default one."""
    return <uintptr_t> current_stream_slot()[0]


def set_current_stream(uintptr_t stream):
    """Make a stream the current one of the calling thread."""
    current_stream_slot()[0] = <void*> stream


@cython.final
cdef class EmulatedArray:
    """A strided array in the memory of an emulated GPU.

    Parameters
    ----------
    memory : object
        Keeps the memory, and is kept alive; its ``gpu`` copies, and orders streams.
    address : int
        Where the first element lies.
    shape : tuple of int
    strides : tuple of int or None
        In elements; C-contiguous if None.
    dtype : numpy.dtype
        Of NumPy or ml_dtypes.
    device : int
    """

    cdef readonly object memory
    cdef readonly tuple shape
    cdef readonly tuple strides
    cdef readonly object dtype
    cdef readonly int device
    cdef uintptr_t _address
    cdef DLDataType _dlpack_dtype
    cdef int64_t[MAX_NDIM] _shape
    cdef int64_t[MAX_NDIM] _strides

    def __init__(self, memory, uintptr_t address, tuple shape, tuple strides, dtype, int device):
        if len(shape) > MAX_NDIM:
            raise ValueError(f"an emulated array has up to {MAX_NDIM} axes, not {len(shape)}")
        self.memory = memory
        self.shape = shape
        self.strides = _contiguous_strides(shape) if strides is None else strides
        self.dtype = numpy.dtype(dtype)
        self.device = device
        self._address = address
        self._dlpack_dtype = dlpack_dtype_of(self.dtype)
        cdef int axis
        for axis in range(len(shape)):
            self._shape[axis] = shape[axis]
            self._strides[axis] = self.strides[axis]

    @property
    def address(self):
        """Where the first element lies, as a number."""
        return self._address

    @property
    def ndim(self):
        return len(self.shape)

    @property
    def size(self):
        """How many elements there are."""
        cdef Py_ssize_t size = 1
        for extent in self.shape:
            size *= extent
        return size

    @property
    def nbytes(self):
        return self.size * self.dtype.itemsize

    @property
    def is_contiguous(self):
        """Whether the elements lie in C order without gaps."""
        return self.size == 0 or all(
            stride == expected or extent == 1
            for stride, expected, extent in zip(
                self.strides, _contiguous_strides(self.shape), self.shape, strict=True)
        )

    def __len__(self):
        if not self.shape:
            raise TypeError("an array without axes has no length")
        return self.shape[0]

    def __repr__(self):
        return f"<EmulatedArray of shape {self.shape}, {self.dtype}, on emulated device {self.device}>"

    def __getitem__(self, key):
        """Return a view: integers, slices, None and Ellipsis."""
        # NumPy does the arithmetic, on an array of the same layout at the same address into which
        # nobody looks.
        shadow = self._shadow()
        view = shadow[key]
        if not isinstance(view, numpy.ndarray):
            view = shadow[(*(key if isinstance(key, tuple) else (key,)), Ellipsis)]
        if view.base is None:
            raise TypeError("an emulated array is indexed by integers, slices, None and Ellipsis")
        return self._view(view)

    def __setitem__(self, key, values):
        """Write numbers, or another array, which are converted and broadcast."""
        self.memory.gpu.write(self[key], values)

    def __iadd__(self, other):
        host = self.numpy()
        host += _on_host(other)
        self.memory.gpu.write(self, host)
        return self

    def __imul__(self, other):
        host = self.numpy()
        host *= _on_host(other)
        self.memory.gpu.write(self, host)
        return self

    def __itruediv__(self, other):
        host = self.numpy()
        host /= _on_host(other)
        self.memory.gpu.write(self, host)
        return self

    def reshape(self, *shape):
        """Return a view of another shape; the elements stay in their order."""
        if len(shape) == 1 and not isinstance(shape[0], int):
            shape = tuple(shape[0])
        view = self._shadow().reshape(shape)
        if self.size > 0 and view.ctypes.data != self._address:
            raise ValueError("this array is not contiguous: a reshape would have to copy it")
        return self._view(view)

    def numpy(self):
        """Copy to a new NumPy array, after what is queued in the current stream."""
        return self.memory.gpu.copy_out(self)

    def __array__(self, dtype=None, copy=None):
        """Refuse what NumPy would do with it, as the libraries of GPU arrays do."""
        raise TypeError("an emulated array is copied to NumPy by its numpy() alone")

    def copy(self):
        """Copy to a new C-contiguous array on the same device, in the current stream's order."""
        with self.memory.gpu.device(self.device):
            return self.memory.gpu.array(self.numpy())

    def empty(self, shape=None):
        """Make an uninitialized array of the same dtype on the same device."""
        with self.memory.gpu.device(self.device):
            return self.memory.gpu.empty(self.shape if shape is None else shape, self.dtype)

    def _shadow(self):
        itemsize = self.dtype.itemsize
        # NumPy does not look at memory that it only makes views of.
        holder = _Holder({
            "shape": self.shape,
            "strides": tuple(stride * itemsize for stride in self.strides),
            "typestr": f"|V{itemsize}",
            "data": (self._address, False),
            "version": 3,
        })
        return numpy.asarray(holder)

    def _view(self, shadow):
        itemsize = self.dtype.itemsize
        strides = tuple(stride // itemsize for stride in shadow.strides)
        return EmulatedArray(
            self.memory, shadow.ctypes.data, shadow.shape, strides, self.dtype, self.device)

    @property
    def __cuda_array_interface__(self):
        if self._dlpack_dtype.code in (BFLOAT, FLOAT8_E4M3FN, FLOAT8_E5M2):
            raise AttributeError(f"__cuda_array_interface__ has no name for {self.dtype}")
        itemsize = self.dtype.itemsize
        return {
            "shape": self.shape,
            "typestr": self.dtype.str,
            "data": (self._address, False),
            "strides": None if self.is_contiguous else tuple(s * itemsize for s in self.strides),
            "stream": <uintptr_t> current_stream_slot()[0] or LEGACY_STREAM,
            "version": 3,
        }

    def __dlpack_device__(self):
        return (<int> CUDA, self.device)

    def __dlpack__(self, *, stream=None, max_version=None, dl_device=None, copy=None):
        if dl_device is not None and tuple(dl_device) != self.__dlpack_device__():
            raise BufferError("an emulated array is handed out on its own device only")
        if copy:
            raise BufferError("an emulated array is handed out without a copy only")
        if stream != -1:
            self.memory.gpu.order(current_stream(), LEGACY_STREAM if stream is None else stream)
        if max_version is not None and max_version[0] >= DLPACK_MAJOR:
            return PyCapsule_New(_export_versioned(self), "dltensor_versioned", _drop_versioned)
        return PyCapsule_New(_export(self), "dltensor", drop_capsule)

    __dlpack_c_exchange_api__ = PyCapsule_New(&exchange_api, "dlpack_exchange_api", NULL)


class _Holder:
    def __init__(self, interface):
        self.__array_interface__ = interface


cdef object _on_host(object operand):
    return operand.numpy() if isinstance(operand, EmulatedArray) else operand


cdef tuple _contiguous_strides(tuple shape):
    cdef list strides = [1] * len(shape)
    cdef int axis
    for axis in range(len(shape) - 2, -1, -1):
        strides[axis] = strides[axis + 1] * shape[axis + 1]
    return tuple(strides)


# --- DLPack -----------------------------------------------------------------------------

# The shape and strides of an array lie in the array, which its exports keep alive.
cdef void _fill(EmulatedArray array, DLTensor* tensor) noexcept:
    tensor.data = <void*> array._address
    tensor.device = DLDevice(CUDA, array.device)
    tensor.ndim = <int32_t> len(array.shape)
    tensor.dtype = array._dlpack_dtype
    tensor.shape = array._shape
    tensor.strides = array._strides
    tensor.byte_offset = 0


cdef DLManagedTensor* _export(EmulatedArray array) except NULL:
    cdef DLManagedTensor* managed = new_managed(array)
    _fill(array, &managed.tensor)
    return managed


cdef DLManagedTensorVersioned* _export_versioned(EmulatedArray array) except NULL:
    cdef DLManagedTensorVersioned* managed = <DLManagedTensorVersioned*> PyMem_Malloc(
        sizeof(DLManagedTensorVersioned))
    if managed == NULL:
        raise MemoryError
    managed.version = DLVersion(DLPACK_MAJOR, 1)
    managed.flags = 0
    _fill(array, &managed.tensor)
    managed.manager_context = <void*> array
    managed.deleter = _delete_versioned
    Py_INCREF(array)
    return managed


cdef void _delete_versioned(DLManagedTensorVersioned* managed) noexcept with gil:
    Py_DECREF(<object> managed.manager_context)
    PyMem_Free(managed)


cdef void _drop_versioned(object capsule) noexcept:
    if PyCapsule_IsValid(capsule, "dltensor_versioned"):
        _delete_versioned(
            <DLManagedTensorVersioned*> PyCapsule_GetPointer(capsule, "dltensor_versioned"))


cdef int _describe(PyObject* array, DLTensor* tensor) except -1:
    _fill(<EmulatedArray?> <object> array, tensor)
    return 0


cdef int _export_managed(PyObject* array, DLManagedTensorVersioned** managed) except -1:
    managed[0] = _export_versioned(<EmulatedArray?> <object> array)
    return 0


cdef int _refuse_import(DLManagedTensorVersioned* managed, void** array) except -1:
    raise BufferError("emulated arrays are made by emulated_gpu().array(), not from DLPack")


# The caller's callback says why there is no memory: the error is the caller's.
cdef int _refuse_allocation(
    DLTensor* prototype, DLManagedTensorVersioned** managed, void* context,
    void (*set_error)(void*, const char*, const char*) noexcept
) noexcept:
    set_error(context, "RuntimeError", "emulated arrays are made by emulated_gpu().empty()")
    return -1


cdef int _current_stream(int32_t device_type, int32_t device_id, void** stream) noexcept:
    if device_type != CUDA:
        return -1
    stream[0] = current_stream_slot()[0]
    return 0


exchange_api.version = DLVersion(DLPACK_MAJOR, 3)
exchange_api.previous = NULL
exchange_api.allocate = <void*> _refuse_allocation
exchange_api.export_managed = <void*> _export_managed
exchange_api.import_managed = <void*> _refuse_import
exchange_api.describe = <int (*)(PyObject*, DLTensor*) noexcept> _describe  # it raises nevertheless
exchange_api.current_stream = _current_stream
