# The CUDA runtime of this process, and what every call of it goes through.

from ferro_dist._native.libcudart cimport Cudart, cudaError_t, cudaStreamCaptureMode


# The runtime's functions. Loads the library on first use; raises BackendUnavailable.
cdef const Cudart* cudart() except NULL

# Turns the status of the call on its line into an exception.
cdef int CHECK_CUDA(cudaError_t status, str function) except -1

# The same with the number of a status, for those who have no cudaError_t.
cdef int raise_cuda(int status, str function) except -1

# How often this process was forked from another: objects of CUDA's are those of the process in
# which they were made.
cdef int num_forks() noexcept


# What this thread may do while a graph is captured, by whichever thread; returns what it might
# before. Unless it is relaxed, to ask whether something is done, to wait for it, to allocate or to
# free ends the capture of somebody who has nothing to do with it.
cdef inline cudaStreamCaptureMode exchange_capture_mode(
    const Cudart* cuda, cudaStreamCaptureMode mode
) noexcept nogil:
    cuda.cudaThreadExchangeStreamCaptureMode(&mode)
    return mode
