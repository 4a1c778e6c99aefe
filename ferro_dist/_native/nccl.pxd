# What nccl_group.pyx builds on.

from libc.stdint cimport uint64_t
from libcpp.memory cimport shared_ptr
from libcpp.vector cimport vector

from ferro_dist._native.buffer_view cimport BufferView
from ferro_dist._native.libcudart cimport cudaStream_t
from ferro_dist._native.libnccl cimport (
    GroupedOperation, Native, NativeLane, ncclCommMemStat_t, ncclRedOp_t, ncclUniqueId, Operation, Patience,
)


cdef class UniqueId:
    cdef ncclUniqueId _id


cdef class Communicator:
    cdef shared_ptr[Native] _native
    cdef readonly int rank
    cdef readonly int world_size
    cdef readonly int device
    cdef readonly bint is_blocking
    cdef public double timeout
    cdef object _first_error
    cdef int _num_forks
    cdef int _compute_capability  # of the device, ten times; 0 until somebody asks

    # Launches on the operation's stream, or adds to the group that this thread collects
    # and that then keeps the views.
    cdef int launch(
        self, const Operation& operation, BufferView first, BufferView second, double timeout
    ) except -1
    cdef int check_usable(self) except -1
    cdef int note(self, object error) except -1

    # The array's view, checked: on this device, contiguous.
    cdef BufferView input(self, object array, str op)
    cdef BufferView output(self, object array, str op)
    # Fills in the dtype and count of `view` as NCCL has them, for moving or for reducing.
    cdef int set_elements(self, Operation* o, str op, BufferView view, size_t count) except -1
    cdef int check_float8(self, str op, int dtype) except -1
    cdef int set_reduction(self, Operation* o, str op, BufferView view, reduce_op) except -1
    cdef int check_output(
        self, str op, BufferView src, BufferView dst, size_t count, Py_ssize_t in_place) except -1
    cdef int root(self, str op, root) except -1
    cdef int peer(self, str op, peer) except -1
    cdef size_t chunk(self, str op, BufferView view) except? 0

    # Each checks the arguments of one call and writes it down, all but the stream.
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

    cdef int _check_device(self, BufferView view, str op) except -1
    cdef int _refuse_reduction(self, str op, int dtype, reduce_op) except -1
    cdef int _demand(self, str op, str name, BufferView view) except -1
    cdef int _issue(self, Operation* o, BufferView first, BufferView second, stream) except -1
    cdef int _refuse_streams(self) except -1
    cdef int _check_own(self) except -1
    cdef int _refuse(self) except -1
    cdef object _memory(self, ncclCommMemStat_t statistic)
    cdef Patience _patience(self, double seconds) except *
    cdef double _seconds(self, timeout) except? -1


cdef class Group:
    cdef vector[GroupedOperation] _operations
    cdef list _kept            # what the operations' arrays are kept alive by
    cdef list _communicators   # each at least once
    cdef bint _is_open
    cdef bint _is_inner        # part of a group that is open already

    cdef int _begin(self, size_t size) except -1
    cdef int _finish(self) except -1
    cdef int _launch(self) except -1


# The communicator's stream, in order with everybody else's: csrc/nccl/lane.hpp. Its errors
# are the communicator's.
cdef class Lane:
    cdef shared_ptr[NativeLane] _lane
    cdef Communicator _communicator

    cdef uint64_t launch(
        self, const Operation* operations, size_t count, const cudaStream_t* callers,
        size_t num_callers, bint is_async, double seconds
    ) except? 0
    cdef int hand_back(
        self, uint64_t ticket, const cudaStream_t* callers, size_t num_callers) except -1
    cdef int synchronize(self, uint64_t ticket, double seconds) except -1
    cdef bint is_done(self, uint64_t ticket) except -1
    cdef uint64_t num_done(self) except? 0
    cdef uint64_t num_seen_done(self) noexcept
    cdef uint64_t num_launched(self) noexcept
    cdef cudaStream_t stream(self) noexcept
    cdef int heed(self, capsule) except -1
    cdef int attend(self, int fd, vector[int] members) except -1
    cdef void leave(self) noexcept


# On `stream`, or on one of its own if null.
cdef Lane open_lane(Communicator communicator, cudaStream_t stream)

# Lets the watchdog call `hook` when it has seen calls of lanes done.
cdef void on_done(void (*hook)() noexcept nogil) noexcept


cdef class PreMulSum:
    cdef Communicator _communicator
    cdef ncclRedOp_t _reduce_op
    cdef int _dtype
    cdef bint _is_closed

    cdef ncclRedOp_t open(self, Communicator communicator, str op, int dtype) except *


# The view of `out`; that of x where they are one array.
cdef BufferView output_of(object out, object x, BufferView src)
