# A native communicator, and what must be true to call it.

from cpython.object cimport PyObject
from libcpp cimport bool as cpp_bool
from libcpp.memory cimport shared_ptr

from ferro_dist._native.cuda_runtime cimport num_forks
from ferro_dist._native.libnccl cimport Native, ncclCommMemStat_t, Patience
from ferro_dist._native.nccl_operation cimport Member


cdef class Connection(Member):
    cdef shared_ptr[Native] _native
    cdef readonly bint is_blocking
    cdef double timeout_s
    cdef object _first_error
    # What its ranks are in the group that it was made from, for errors; empty if that calls them the same.
    cdef readonly tuple global_ranks
    # The views of the memory that NCCL has made windows of, and whether those are symmetric: a dict, as a
    # reference that the garbage collector does not see: it would finalize the memory before the
    # communicator has ended. Where the memory's owner holds the communicator, only close() ends the cycle.
    cdef PyObject* _window_views
    cdef int _num_forks

    # Takes over what is in _native.
    cdef int adopt(self, double timeout, bint is_blocking) except -1
    # The patience of one call, which it also checks can be made.
    cdef Patience patience(self, timeout) except *
    # Raises the reason why it cannot be called.
    cdef int refuse(self) except -1
    # Names this rank and its group in an error, and remembers the one that ended the communicator.
    cdef int note(self, object error) except -1
    # The same for a call on arrays, which `used` keeps alive. One that was given up, say because it took too
    # long, may still begin in NCCL's own thread until the communicator has ended: they are kept that long.
    cdef int note_of_call(self, object error, object used) except -1

    # A call's timeout; None stands for the connection's own.
    cdef double seconds(self, timeout) except? -1

    cdef int _check_own(self) except -1
    cdef object _memory(self, ncclCommMemStat_t statistic)


# Whether it was made in this process, and not in one that this was forked from.
cdef inline bint is_own(Connection connection) noexcept:
    return connection._num_forks == num_forks()


cdef inline dict window_views(Connection connection):
    return <dict> connection._window_views


cdef inline int check_usable(Connection connection) except -1:
    if connection._first_error is not None or not is_own(connection):
        connection.refuse()
    return 0


# For the reaper's thread, which has no interpreter: asks the main thread to give up a reference to
# an object. False if it cannot be asked now.
cdef cpp_bool let_go(void* held) noexcept nogil


# `with Noting(connection), nogil:` stands around every call of NCCL that may fail. Where that is too
# slow, note() is called directly.
cdef class Noting:
    cdef Connection _connection
