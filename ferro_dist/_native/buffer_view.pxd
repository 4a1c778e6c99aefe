# The border between arrays of any library and raw memory: what host.pyx and
# nccl.pyx read of an array.

cdef class BufferView:
    cdef readonly object owner          # keeps the memory alive
    cdef void* data                     # null only where count is 0
    cdef readonly size_t count          # elements
    cdef readonly size_t nbytes
    cdef readonly int itemsize
    cdef readonly int dtype             # a value of ferro::DType
    cdef readonly int device_type       # DLPack's number: 1 CPU, 2 CUDA
    cdef readonly int device_id
    cdef readonly bint is_readonly
    cdef readonly bint is_contiguous    # C order, no gaps


# Raises InvalidArray or UnsupportedOp for what cannot be moved; never copies.
cdef BufferView view_of(object array)
