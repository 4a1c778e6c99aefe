# Bytes of a GPU, and who may free them.


cdef class GpuBytes:
    cdef void* _data
    cdef readonly size_t nbytes
    cdef readonly int device
    cdef int _num_forks

    # Sets _data, on this device.
    cdef int allocate(self) except -1
    # Whether this process allocated them, and not one that it was forked from.
    cdef bint is_own(self) noexcept
