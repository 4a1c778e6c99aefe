# The CUDA runtime of this process, and what every call of it goes through.

from ferro_dist._native.libcudart cimport Cudart, cudaError_t


# The runtime's functions. Loads the library on first use; raises BackendUnavailable.
cdef const Cudart* cudart() except NULL

# Turns the status of the call on its line into an exception.
cdef int CHECK_CUDA(cudaError_t status, str function) except -1

# The same with the number of a status, for those who have no cudaError_t.
cdef int raise_cuda(int status, str function) except -1

# How often this process was forked from another: objects of CUDA's are those of the process in
# which they were made.
cdef int num_forks() noexcept
