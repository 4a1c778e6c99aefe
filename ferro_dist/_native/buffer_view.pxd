# The border between arrays of any library and raw memory: what host.pyx and
# nccl_operation.pyx read of an array.

from ferro_dist._native.dlpack cimport DLManagedTensor, DLManagedTensorVersioned


# ferro::DType, in its order.
cdef enum DType:
    BOOLEAN
    INT8
    UINT8
    INT16
    UINT16
    INT32
    UINT32
    INT64
    UINT64
    FLOAT16
    BFLOAT16
    FLOAT32
    FLOAT64
    COMPLEX64
    COMPLEX128
    E4M3
    E5M2
    DTYPE_COUNT


cdef class BufferView:
    cdef readonly object owner          # keeps the memory alive
    cdef void* data                     # null only where count is 0
    cdef readonly size_t count          # elements
    cdef readonly size_t nbytes
    cdef readonly int itemsize
    cdef readonly int dtype             # a DType
    cdef readonly int device_type       # DLPack's number: 1 CPU, 2 CUDA
    cdef readonly int device_id         # -1 where a CUDA array does not tell
    cdef readonly bint is_readonly
    cdef readonly bint is_contiguous    # C order, no gaps


# A view whose memory was handed out by its owner, and must be given back; one of the three is set.
# A class of its own, since all other views are made and freed faster without these.
cdef class ExportedView(BufferView):
    cdef Py_buffer* _buffer
    cdef DLManagedTensor* _capsule
    cdef DLManagedTensorVersioned* _versioned


# An array to read from. Raises InvalidArray for what cannot be moved; never copies.
# An array with gaps is described, not refused: look at is_contiguous.
cdef BufferView view_of(object array)

# An array to write into. Also raises InvalidArray for one that is read-only, has
# gaps, or whose autograd history a write would falsify.
cdef BufferView output_view_of(object array)

# Whether output_view_of would return this very view.
cdef bint is_output(BufferView view)

# Whether it is an array of JAX, for whose pending work a view waits, since JAX has no current stream.
cdef bint is_of_jax(object array)

# The view of the array that a call on x writes, of which `src` is a view. In place one view serves for
# both, provided that the array may be written at all.
cdef inline BufferView output_of(object written, object x, BufferView src):
    if written is x and src.owner is x and is_output(src):
        return src
    return output_view_of(written)

# What such a call returns: what was allocated for it becomes an array of the library of `like`, its x.
# None where the caller gave what is written.
cdef inline object delivered(object arrays, object written, object like):
    if like is None or type(written) is type(like):
        return written
    return arrays.deliver(like, written)

# Finds the stream on which the owner's library currently works, for libraries that tell it through
# DLPack's exchange table (torch). False for others.
cdef bint current_stream_of(BufferView view, void** stream) except -1

cdef extern from "Python.h":
    # In place of how many bytes past the start of x an out that shares its memory has to begin: it must
    # not share it.
    const Py_ssize_t NEVER_IN_PLACE "PY_SSIZE_T_MIN"

# Whether they share memory.
cdef inline bint overlap(BufferView a, BufferView b) noexcept:
    return (<char*> a.data < <char*> b.data + b.nbytes and <char*> b.data < <char*> a.data + a.nbytes
            and a.nbytes != 0 and b.nbytes != 0)

# Has the library of a GPU array put its work before that of the legacy default stream, as DLPack offers.
cdef int order_before_legacy_stream(object array) except -1
