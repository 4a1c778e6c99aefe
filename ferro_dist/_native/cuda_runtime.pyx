"""The CUDA runtime of this process: its versions, its devices, its errors.

Calls that may start the driver, or make a context on a device, let go of the interpreter: either takes
a good part of a second, or more.
"""

cimport cython
from cpython.pycapsule cimport PyCapsule_GetPointer

from ferro_dist._native.libcudart cimport (
    Cudart, cudaDevAttrComputeCapabilityMajor, cudaDevAttrComputeCapabilityMinor, cudaError_t,
    cudaErrorInitializationError, cudaErrorInsufficientDriver, cudaErrorMemoryAllocation,
    cudaErrorNoDevice, cudaErrorStreamCaptureImplicit, cudaSuccess,
)

from ferro_dist import arguments
from ferro_dist._native.cuda_libraries import load_cudart
from ferro_dist.errors import BackendUnavailable, Io, LockPoisoned

__all__ = [
    "DeviceGuard",
    "compute_capability",
    "current_device",
    "device_count",
    "device_number",
    "driver_version",
    "runtime_version", "set_device",
    "versions_of",
]

cdef const Cudart* loaded = NULL  # set once, with the GIL; its module is never unloaded

cdef extern from "nccl/fork.hpp" namespace "ferro::nccl":
    int count_of_forks "ferro::nccl::num_forks" () noexcept


cdef int num_forks() noexcept:
    return count_of_forks()


cdef const Cudart* cudart() except NULL:
    global loaded
    if loaded == NULL:
        loaded = _table(load_cudart().functions)
        num_forks()  # counts from here on
    return loaded


cdef const Cudart* _table(object capsule) except NULL:
    return <const Cudart*> PyCapsule_GetPointer(capsule, "ferro_dist.Cudart")


cdef int CHECK_CUDA(cudaError_t status, str function) except -1:
    if status != cudaSuccess:
        raise_cuda(<int> status, function)
    return 0


cdef int raise_cuda(int status, str function) except -1:
    return _raise_of(cudart(), status, function)


cdef int _raise_of(const Cudart* cuda, int status, str function) except -1:
    cdef cudaError_t error = <cudaError_t> status
    name = cuda.cudaGetErrorName(error).decode()
    text = cuda.cudaGetErrorString(error).decode()
    cuda.cudaGetLastError()  # else others who ask for the last error would get ours
    message = f"{function} failed: {text} ({name})."
    if error == cudaErrorMemoryAllocation:
        raise MemoryError(message)
    if error == cudaErrorInsufficientDriver or error == cudaErrorNoDevice:
        raise BackendUnavailable(
            f"{message}\nThere is no GPU that this process can use: check nvidia-smi, "
            "CUDA_VISIBLE_DEVICES, and that the driver is new enough for the CUDA installed.")
    if error == cudaErrorStreamCaptureImplicit:
        raise Io(
            f"{message}\nThe default stream cannot be used while a stream is captured that it waits for: "
            "work on another one meanwhile, or capture on one made with cudaStreamNonBlocking.")
    if error == cudaErrorInitializationError and num_forks() != 0:
        raise LockPoisoned(
            f"{message}\nThis process was forked from one that uses CUDA, which does not work here. "
            "Start the child with the spawn method.")
    raise Io(message)


def versions_of(functions):
    """Return the versions of a runtime, given its table, and of the driver; 0 if there is none."""
    cdef const Cudart* cuda = _table(functions)
    cdef int runtime = 0
    cdef int driver = 0
    # Not CHECK_CUDA, which asks for the table that is being chosen.
    cdef cudaError_t status = cuda.cudaRuntimeGetVersion(&runtime)
    if status != cudaSuccess:
        _raise_of(cuda, <int> status, "cudaRuntimeGetVersion")
    status = cuda.cudaDriverGetVersion(&driver)
    if status != cudaSuccess:
        _raise_of(cuda, <int> status, "cudaDriverGetVersion")
    return runtime, driver


def runtime_version():
    """Return the version of the CUDA runtime, 12040 for 12.4."""
    cdef int version = 0
    CHECK_CUDA(cudart().cudaRuntimeGetVersion(&version), "cudaRuntimeGetVersion")
    return version


def driver_version():
    """Return the newest version of CUDA that the driver supports, 0 if there is no driver."""
    cdef int version = 0
    CHECK_CUDA(cudart().cudaDriverGetVersion(&version), "cudaDriverGetVersion")
    return version


def device_count():
    """Count the GPUs that this process sees."""
    cdef int count = 0
    cdef const Cudart* cuda = cudart()
    cdef cudaError_t status
    with nogil:
        status = cuda.cudaGetDeviceCount(&count)
    CHECK_CUDA(status, "cudaGetDeviceCount")
    return count


def current_device():
    """Return the number of this thread's current device."""
    cdef int device = 0
    CHECK_CUDA(cudart().cudaGetDevice(&device), "cudaGetDevice")
    return device


def device_number(device):
    """Return the number of a device, of this thread's current one for None.

    Raises
    ------
    BackendUnavailable
        This process sees no such GPU.
    """
    if device is None:
        return current_device()
    try:
        number = arguments.integer(device)
    except TypeError:
        raise TypeError(f"device must be the number of a GPU, not {device!r}.") from None
    num_devices = device_count()
    if not 0 <= number < num_devices:
        raise BackendUnavailable(
            f"GPU {number} is not among the {num_devices} that this process sees, counted from 0: "
            "check CUDA_VISIBLE_DEVICES.")
    return number


def set_device(int device):
    """Make a device this thread's current one."""
    cdef const Cudart* cuda = cudart()
    cdef cudaError_t status
    with nogil:
        status = cuda.cudaSetDevice(device)
    CHECK_CUDA(status, "cudaSetDevice")


def compute_capability(int device):
    """Return a device's compute capability as in the names of architectures: 90 for sm_90."""
    cdef int major = 0
    cdef int minor = 0
    cdef const Cudart* cuda = cudart()
    CHECK_CUDA(
        cuda.cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device),
        "cudaDeviceGetAttribute")
    CHECK_CUDA(
        cuda.cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device),
        "cudaDeviceGetAttribute")
    return 10 * major + minor


@cython.final
cdef class DeviceGuard:
    """Make a device current for the duration of a ``with`` block, in this thread."""

    cdef int _device
    cdef int _before

    def __init__(self, int device):
        self._device = device

    def __enter__(self):
        CHECK_CUDA(cudart().cudaGetDevice(&self._before), "cudaGetDevice")
        if self._before != self._device:
            set_device(self._device)
        return self

    def __exit__(self, *exception):
        if self._before != self._device:
            set_device(self._before)
