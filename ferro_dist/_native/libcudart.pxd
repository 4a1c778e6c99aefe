# The CUDA runtime as a table of functions: csrc/abi/cudart.h and cudart_table.hpp,
# which says why it is a table. `load_cudart` in cuda_libraries.py finds it.


cdef extern from "abi/cudart.h" nogil:
    ctypedef void* cudaStream_t
    ctypedef void* cudaEvent_t

    ctypedef enum cudaError_t:
        cudaSuccess
        cudaErrorMemoryAllocation
        cudaErrorInitializationError
        cudaErrorInsufficientDriver
        cudaErrorNoDevice
        cudaErrorNotReady
        cudaErrorStreamCaptureImplicit

    cudaStream_t cudaStreamLegacy
    cudaStream_t cudaStreamPerThread

    enum:
        cudaStreamNonBlocking
        cudaEventDisableTiming
        cudaHostAllocDefault

    enum cudaMemcpyKind:
        cudaMemcpyDefault

    enum cudaMemoryType:
        cudaMemoryTypeUnregistered
        cudaMemoryTypeHost
        cudaMemoryTypeDevice
        cudaMemoryTypeManaged

    enum cudaDeviceAttr:
        cudaDevAttrComputeCapabilityMajor
        cudaDevAttrComputeCapabilityMinor

    struct cudaPointerAttributes:
        cudaMemoryType type
        int device


cdef extern from "abi/cudart_table.hpp" namespace "ferro" nogil:
    cdef cppclass Cudart:
        Cudart() noexcept

        const char* cudaGetErrorName(cudaError_t error) noexcept
        const char* cudaGetErrorString(cudaError_t error) noexcept
        cudaError_t cudaGetLastError() noexcept
        cudaError_t cudaRuntimeGetVersion(int* version) noexcept
        cudaError_t cudaDriverGetVersion(int* version) noexcept

        cudaError_t cudaGetDeviceCount(int* count) noexcept
        cudaError_t cudaGetDevice(int* device) noexcept
        cudaError_t cudaSetDevice(int device) noexcept
        cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attr, int device) noexcept

        cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned int flags) noexcept
        cudaError_t cudaStreamCreateWithPriority(
            cudaStream_t* stream, unsigned int flags, int priority) noexcept
        cudaError_t cudaStreamDestroy(cudaStream_t stream) noexcept
        cudaError_t cudaStreamSynchronize(cudaStream_t stream) noexcept
        cudaError_t cudaStreamQuery(cudaStream_t stream) noexcept
        cudaError_t cudaStreamWaitEvent(
            cudaStream_t stream, cudaEvent_t event, unsigned int flags) noexcept

        cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned int flags) noexcept
        cudaError_t cudaEventDestroy(cudaEvent_t event) noexcept
        cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) noexcept
        cudaError_t cudaEventQuery(cudaEvent_t event) noexcept
        cudaError_t cudaEventSynchronize(cudaEvent_t event) noexcept

        cudaError_t cudaMalloc(void** data, size_t nbytes) noexcept
        cudaError_t cudaFree(void* data) noexcept
        cudaError_t cudaHostAlloc(void** data, size_t nbytes, unsigned int flags) noexcept
        cudaError_t cudaFreeHost(void* data) noexcept
        cudaError_t cudaMemcpyAsync(
            void* target, const void* source, size_t nbytes, cudaMemcpyKind kind,
            cudaStream_t stream) noexcept
        cudaError_t cudaMemsetAsync(
            void* data, int value, size_t nbytes, cudaStream_t stream) noexcept
        cudaError_t cudaPointerGetAttributes(
            cudaPointerAttributes* attributes, const void* data) noexcept


cdef extern from "abi/stream_capture.hpp" namespace "ferro" nogil:
    cdef enum class Capture:
        none
        active
        implicit

    cudaError_t capture_of(const Cudart& cuda, cudaStream_t stream, Capture* capture) noexcept
    # relaxed(cuda, cuda.cudaFree, data); it is C++ that checks the arguments.
    cudaError_t relaxed(const Cudart& cuda, ...) noexcept


cdef extern from "abi/own_device.hpp" namespace "ferro" nogil:
    # on_own_device(cuda, device, cuda.cudaFree, data)
    cudaError_t on_own_device(const Cudart& cuda, int device, ...) noexcept
