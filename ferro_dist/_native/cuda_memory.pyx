"""Memory of GPUs, and of the host that GPUs can reach, for this library's own needs."""

cimport cython
from cpython.buffer cimport PyBuffer_FillInfo
from libc.stdint cimport SIZE_MAX, uintptr_t

from ferro_dist._native.cuda_runtime cimport CHECK_CUDA, cudart, num_forks
from ferro_dist._native.cuda_stream cimport held_stream, on_device_of, HeldStream
from ferro_dist._native.dlpack cimport CUDA
from ferro_dist._native.libcudart cimport (
    Cudart, cudaError_t, cudaHostAllocDefault, cudaMemcpyDefault, cudaMemoryTypeDevice,
    cudaMemoryTypeHost, cudaMemoryTypeManaged, cudaPointerAttributes,
    on_own_device, relaxed,
)

from ferro_dist._native.cuda_runtime import current_device, DeviceGuard, device_number

__all__ = [
    "DeviceMemory", "GpuBytes", "PinnedMemory", "copy_async", "fill_async", "location_of",
]


cdef class GpuBytes:
    """Bytes of a GPU, not initialized; exports ``__cuda_array_interface__`` as uint8.

    Parameters
    ----------
    nbytes : int
    device : int, optional
        The current device if not given.
    """

    def __init__(self, nbytes, device=None):
        if nbytes > SIZE_MAX:
            raise MemoryError(f"No GPU has room for {nbytes} bytes.")
        self.nbytes = nbytes
        self.device = device_number(device)
        self._num_forks = num_forks()
        self.allocate()

    cdef int allocate(self) except -1:
        raise TypeError("GpuBytes has no memory; DeviceMemory and NcclMemory have.")

    cdef bint is_own(self) noexcept:
        return self._num_forks == num_forks()

    @property
    def address(self):
        return <uintptr_t> self._data

    @property
    def __cuda_array_interface__(self):
        return {
            "version": 3, "shape": (self.nbytes,), "typestr": "|u1", "strides": None,
            "data": (self.address, False), "stream": None,
        }

    def __dlpack_device__(self):
        return <int> CUDA, self.device


@cython.final
cdef class DeviceMemory(GpuBytes):
    """`GpuBytes` that the CUDA runtime allocates."""

    cdef int allocate(self) except -1:
        cdef const Cudart* cuda = cudart()
        cdef cudaError_t status
        with DeviceGuard(self.device):
            with nogil:
                status = relaxed(cuda[0], cuda.cudaMalloc, &self._data, self.nbytes)
            CHECK_CUDA(status, "cudaMalloc")
        return 0

    def close(self):
        """Free the memory, once the device has done all its work. Idempotent."""
        cdef void* data = self._data
        cdef const Cudart* cuda = cudart()
        cdef cudaError_t status
        self._data = NULL
        if data == NULL or not self.is_own():
            return
        with nogil:
            status = on_own_device(cuda[0], self.device, cuda.cudaFree, data)
        CHECK_CUDA(status, "cudaFree")

    def __dealloc__(self):
        cdef const Cudart* cuda
        if self._data != NULL and self.is_own():
            cuda = cudart()
            with nogil:
                on_own_device(cuda[0], self.device, cuda.cudaFree, self._data)


@cython.final
cdef class PinnedMemory:
    """Page-locked memory of the host: GPUs copy from and to it while the host goes on.

    Exports the buffer protocol.
    """

    cdef void* _data
    cdef readonly size_t nbytes
    cdef int _device     # that was current
    cdef int _num_forks

    def __init__(self, size_t nbytes):
        cdef const Cudart* cuda = cudart()
        cdef cudaError_t status
        self.nbytes = nbytes
        self._device = current_device()
        self._num_forks = num_forks()
        with nogil:
            status = relaxed(cuda[0], cuda.cudaHostAlloc, &self._data, nbytes, cudaHostAllocDefault)
        CHECK_CUDA(status, "cudaHostAlloc")

    @property
    def address(self):
        return <uintptr_t> self._data

    def __getbuffer__(self, Py_buffer* buffer, int flags):
        PyBuffer_FillInfo(buffer, self, self._data, self.nbytes, False, flags)

    def __len__(self):
        return self.nbytes

    def __dealloc__(self):
        cdef const Cudart* cuda
        if self._data != NULL and self._num_forks == num_forks():
            cuda = cudart()
            with nogil:
                on_own_device(cuda[0], self._device, cuda.cudaFreeHost, self._data)


def copy_async(uintptr_t target, uintptr_t source, size_t nbytes, stream):
    """Copy bytes between any two places, in the order of `stream`.

    The caller keeps both alive until the stream has passed. From or to memory of the
    host that is not pinned, the call may block.
    """
    cdef HeldStream held = held_stream(stream)
    cdef const Cudart* cuda = cudart()
    cdef cudaError_t status
    with on_device_of(held), nogil:
        status = cuda.cudaMemcpyAsync(
            <void*> target, <const void*> source, nbytes, cudaMemcpyDefault, held.stream)
    CHECK_CUDA(status, "cudaMemcpyAsync")


def fill_async(uintptr_t target, unsigned char value, size_t nbytes, stream):
    """Set bytes of a GPU to `value`, in the order of `stream`."""
    cdef HeldStream held = held_stream(stream)
    cdef const Cudart* cuda = cudart()
    cdef cudaError_t status
    with on_device_of(held), nogil:
        status = cuda.cudaMemsetAsync(<void*> target, value, nbytes, held.stream)
    CHECK_CUDA(status, "cudaMemsetAsync")


def location_of(uintptr_t address):
    """Return the kind of memory at an address, and its device.

    Returns
    -------
    kind : str
        ``"device"``, ``"host"`` (pinned), ``"managed"``, or ``"unregistered"`` where CUDA knows
        nothing of it.
    device : int
    """
    cdef cudaPointerAttributes attributes
    cdef const Cudart* cuda = cudart()
    cdef cudaError_t status
    with nogil:
        status = cuda.cudaPointerGetAttributes(&attributes, <const void*> address)
    CHECK_CUDA(status, "cudaPointerGetAttributes")
    kinds = {
        <int> cudaMemoryTypeDevice: "device", <int> cudaMemoryTypeHost: "host",
        <int> cudaMemoryTypeManaged: "managed",
    }
    return kinds.get(<int> attributes.type, "unregistered"), attributes.device
