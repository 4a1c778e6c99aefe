# Bytes of a GPU, and who may free them.


cdef class GpuBytes:
    cdef void* _data
    cdef readonly size_t nbytes
    cdef readonly int device
    cdef int _num_forks

    # On the current device if that is None.
    cdef int describe(self, size_t nbytes, device) except -1
    # Whether this process allocated them, and not one that it was forked from.
    cdef bint is_own(self) noexcept
