"""Memory of a GPU that is written here, then taken over by a library whose arrays are immutable."""

cimport cython
from cpython.pycapsule cimport PyCapsule_New
from libc.stdint cimport int32_t, int64_t, uintptr_t

from ferro_dist._native.dlpack cimport CUDA, DLDataType, DLDevice, DLManagedTensor
from ferro_dist._native.dlpack_export cimport dlpack_dtype_of, drop_capsule, new_managed

import math
import time

import numpy

from ferro_dist._native.cuda_memory import DeviceMemory
from ferro_dist._native.cuda_runtime import DeviceGuard
from ferro_dist._native.cuda_stream import LEGACY_STREAM, Stream

__all__ = ["DeviceArray"]

cdef double BETWEEN_LOOKS_S = 50e-6

cdef enum:
    MAX_NDIM = 64
    NO_STREAM = -1  # whoever asks puts streams in order itself


@cython.final
cdef class DeviceArray:
    """A C-contiguous array, not initialized, that DLPack hands out.

    For whoever takes it, what was queued on the legacy default stream before comes first.

    Parameters
    ----------
    shape : tuple of int
    dtype : numpy.dtype
        Of NumPy or ml_dtypes.
    device : int
    """

    cdef readonly tuple shape
    cdef readonly object dtype
    cdef readonly int device
    cdef object _memory
    cdef DLDataType _dlpack_dtype
    cdef int64_t[MAX_NDIM] _extents

    def __init__(self, tuple shape, dtype, int device):
        if len(shape) > MAX_NDIM:
            raise ValueError(f"an array of a GPU has up to {MAX_NDIM} axes here, not {len(shape)}")
        self.shape = shape
        self.dtype = numpy.dtype(dtype)
        self.device = device
        self._dlpack_dtype = dlpack_dtype_of(self.dtype)
        # Some memory even for no elements: for zero bytes CUDA returns a null pointer.
        self._memory = DeviceMemory(max(1, math.prod(shape) * self.dtype.itemsize), device)
        for axis, extent in enumerate(shape):
            self._extents[<Py_ssize_t> axis] = extent

    @property
    def address(self):
        """Where the first element lies, as a number."""
        return self._memory.address

    def __dlpack_device__(self):
        return CUDA, self.device

    def __dlpack__(self, *, stream=None, max_version=None, dl_device=None, copy=None):
        if dl_device is not None and tuple(dl_device) != self.__dlpack_device__():
            raise BufferError("this array is handed out on its own device only")
        if copy:
            raise BufferError("this array is handed out without a copy only")
        if stream is None:
            self._await_written()
        elif stream not in (NO_STREAM, LEGACY_STREAM):
            self._order_before(stream)
        return PyCapsule_New(_export(self), "dltensor", drop_capsule)

    def _order_before(self, stream):
        with DeviceGuard(self.device):
            Stream.borrow(stream, self.device).wait(self._written())

    def _await_written(self):
        """Block: JAX names no stream where its client has none to tell, but works on one all the same."""
        with DeviceGuard(self.device):
            written = self._written()
            while not written.is_done():
                time.sleep(BETWEEN_LOOKS_S)

    def _written(self):
        return Stream.borrow(LEGACY_STREAM, self.device).record()


# The shape lies in the array, which its exports keep alive.
cdef DLManagedTensor* _export(DeviceArray array) except NULL:
    cdef DLManagedTensor* managed = new_managed(array)
    managed.tensor.data = <void*> <uintptr_t> array.address
    managed.tensor.device = DLDevice(CUDA, array.device)
    managed.tensor.ndim = <int32_t> len(array.shape)
    managed.tensor.dtype = array._dlpack_dtype
    managed.tensor.shape = array._extents
    managed.tensor.strides = NULL
    managed.tensor.byte_offset = 0
    return managed
