# Who may ask NCCL for what, and how it is written down.

from libc.stdint cimport uintptr_t

from ferro_dist._native.buffer_view cimport BufferView
from ferro_dist._native.libnccl cimport ncclDataType_t, Op, Operation


cdef class Member:
    cdef readonly int rank
    cdef readonly int world_size
    cdef readonly int device
    cdef int _compute_capability  # of the device, ten times; 0 until somebody asks

    # The array's view, checked: on this device, contiguous.
    cdef BufferView input(self, object array, str op)
    cdef BufferView output(self, object array, str op)
    cdef int check_device(self, BufferView view, str op) except -1
    # `in_place` is how many bytes past the start of x an out that shares its memory has to begin.
    cdef int check_output(
        self, str op, BufferView src, BufferView dst, size_t count, Py_ssize_t in_place) except -1
    cdef int check_float8(self, str op, int dtype) except -1
    cdef int root(self, str op, root) except -1
    cdef int peer(self, str op, peer) except -1
    cdef size_t chunk(self, str op, BufferView view) except? 0

    # Each checks the arguments of one call and writes the call down in `o`, all but the stream.
    cdef int describe_allreduce(
        self, Operation* o, BufferView src, BufferView dst, reduce_op) except -1
    cdef int describe_broadcast(self, Operation* o, BufferView src, BufferView dst, root) except -1
    cdef int describe_reduce(
        self, Operation* o, BufferView src, BufferView dst, root, reduce_op) except -1
    cdef int describe_all_gather(self, Operation* o, BufferView src, BufferView dst) except -1
    cdef int describe_reduce_scatter(
        self, Operation* o, BufferView src, BufferView dst, reduce_op) except -1
    cdef int describe_all_to_all(self, Operation* o, BufferView src, BufferView dst) except -1
    cdef int describe_gather(self, Operation* o, BufferView src, BufferView dst, root) except -1
    cdef int describe_scatter(self, Operation* o, BufferView src, BufferView dst, root) except -1
    cdef int describe_send(self, Operation* o, BufferView src, peer) except -1
    cdef int describe_recv(self, Operation* o, BufferView dst, peer) except -1

    # The same for device pointers, which are taken on trust. Peer and reduction are the caller's to fill in.
    cdef int describe_raw(
        self, Operation* o, Op op, str name, uintptr_t sendbuf, uintptr_t recvbuf, size_t count,
        int dtype) except -1
    cdef int _set_raw_float8(self, Operation* o, str name) except -1

    # Fills in the dtype and count of `view` as NCCL has them, for moving.
    cdef int set_elements(self, Operation* o, str op, BufferView view, size_t count) except -1
    # The same for reducing, after set_elements.
    cdef int set_summands(self, Operation* o, str op, BufferView view) except -1
    cdef int set_reduction(self, Operation* o, str op, BufferView view, reduce_op) except -1
    # For reductions that are not numbers: names of a ReduceOp, or what only some communicators know.
    cdef int set_own_reduction(self, Operation* o, str op, BufferView view, reduce_op) except -1
    cdef int _refuse_reduction(self, str op, int dtype, reduce_op) except -1
    cdef int _demand(self, str op, str name, BufferView view) except -1


# The place among our dtypes of a float dtype that NCCL can multiply.
cdef int float_code(str dtype) except -1

# NCCL's number for one of our dtypes.
cdef ncclDataType_t nccl_dtype(int code) noexcept
