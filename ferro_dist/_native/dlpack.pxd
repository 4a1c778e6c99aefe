# DLPack 1.x as arrays hand it out (https://dmlc.github.io/dlpack): declared here
# because its header cannot be relied on to exist where this package is built.

from cpython.object cimport PyObject
from libc.stdint cimport int32_t, int64_t, uint8_t, uint16_t, uint32_t, uint64_t

cdef enum:
    DLPACK_MAJOR = 1
    DLPACK_READ_ONLY = 1  # bit of DLManagedTensorVersioned.flags

cdef enum DeviceType:
    CPU = 1
    CUDA = 2
    CUDA_HOST = 3      # pinned memory of the host
    CUDA_MANAGED = 13  # memory that host and device share

cdef enum TypeCode:
    INT = 0
    UINT = 1
    FLOAT = 2
    BFLOAT = 4
    COMPLEX = 5
    BOOL = 6
    FLOAT8_E4M3FN = 10
    FLOAT8_E5M2 = 12

cdef struct DLVersion:
    uint32_t major
    uint32_t minor

cdef struct DLDevice:
    int32_t device_type
    int32_t device_id

cdef struct DLDataType:
    uint8_t code
    uint8_t bits
    uint16_t lanes

cdef struct DLTensor:
    void* data
    DLDevice device
    int32_t ndim
    DLDataType dtype
    int64_t* shape
    int64_t* strides  # in elements; null in old producers: contiguous
    uint64_t byte_offset

cdef struct DLManagedTensor:
    DLTensor tensor
    void* manager_context
    void (*deleter)(DLManagedTensor*) noexcept

cdef struct DLManagedTensorVersioned:
    DLVersion version
    void* manager_context
    void (*deleter)(DLManagedTensorVersioned*) noexcept
    uint64_t flags
    DLTensor tensor

# The table behind `type(array).__dlpack_c_exchange_api__`. It lives as long as the process.
cdef struct DLExchangeApi:
    DLVersion version
    DLExchangeApi* previous  # of an older major version, or null
    void* allocate
    void* export_managed
    void* import_managed
    # Null where not supported. Return 0, or anything else once they have raised.
    int (*describe)(PyObject* array, DLTensor* out) noexcept
    int (*current_stream)(int32_t device_type, int32_t device_id, void** stream) noexcept
