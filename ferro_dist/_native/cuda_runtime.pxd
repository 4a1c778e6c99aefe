# The CUDA runtime of this process, and what every call of it goes through.

from ferro_dist._native.libcudart cimport Cudart, cudaError_t


# The runtime's functions. Loads the library on first use; raises BackendUnavailable.
cdef const Cudart* cudart() except NULL

# Turns the status of the call on its line into an exception.
cdef int CHECK_CUDA(cudaError_t status, str function) except -1

# The same with the number of a status, for callers that have no cudaError_t.
cdef int raise_cuda(int status, str function) except -1

# How many forks have led to this process (nccl/fork.hpp): CUDA's objects belong to the process in
# which they were made.
cdef int num_forks() noexcept
