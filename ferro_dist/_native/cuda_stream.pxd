# Streams and events, own or borrowed.

from cpython.object cimport PyObject
from libcpp.vector cimport vector

from ferro_dist._native.buffer_view cimport BufferView
from ferro_dist._native.libcudart cimport cudaError_t, cudaEvent_t, cudaStream_t


cdef class HeldStream:
    cdef cudaStream_t stream
    cdef int device           # -1 if the lender did not say
    cdef object _lender       # keeps a borrowed stream alive; None if it is our own
    cdef bint is_own
    cdef int _num_forks

    cdef cudaError_t destroy(self)


cdef class Stream:
    cdef HeldStream _held  # None once the stream is closed
    cdef readonly int device

    cdef HeldStream open(self)


cdef class Event:
    cdef cudaEvent_t _handle
    cdef int _device
    cdef int _num_forks


# The handle of `stream`: an integer, one of our streams, or an object of torch, CuPy,
# cuda.core, Numba or anything with __cuda_stream__.
cdef cudaStream_t stream_handle(object stream) except? NULL

# The same, held for as long as the result lives, even if the stream is one of ours and closed meanwhile.
cdef HeldStream held_stream(object stream)

# The context in which to use a stream. Each device has its own default streams, of which the current
# device's would be used.
cdef object on_device_of(HeldStream held)

# The stream on which the owner of `view` works now.
cdef cudaStream_t current_stream(BufferView view) except? NULL

# The streams on which the array libraries that are imported work now, in this thread.
cdef vector[cudaStream_t] streams_of_thread(int device) except *

# The last answer of a library, for many arrays in a row: those of one type that has an exchange
# table, on one device, share one current stream. Begins as KnownStream(NULL, -1, NULL).
cdef struct KnownStream:
    void* array_type
    int device
    cudaStream_t stream


# current_stream, asking again only where the answer may be a different one.
cdef inline cudaStream_t known_stream(BufferView view, KnownStream* known) except? NULL:
    cdef void* array_type = <void*> (<PyObject*> view.owner).ob_type
    if known.array_type == array_type and known.device == view.device_id:
        return known.stream
    return learn_stream(view, known)

# current_stream, kept in `known` where other arrays share it.
cdef cudaStream_t learn_stream(BufferView view, KnownStream* known) except? NULL
