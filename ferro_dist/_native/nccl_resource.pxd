# What NCCL keeps for a communicator.

from ferro_dist._native.buffer_view cimport BufferView
from ferro_dist._native.libnccl cimport ncclRedOp_t, ncclWindow_t
from ferro_dist._native.nccl_connection cimport Connection


# What a group must find open when it is launched. Holds no object: the collector must not clear what
# __dealloc__ needs, and a base class that it can clear would have it do so.
cdef class Resource:
    cdef bint _is_closed

    cdef int check_open(self) except -1


cdef class PreMulSum(Resource):
    cdef Connection _connection
    cdef ncclRedOp_t _reduce_op
    cdef int _dtype

    # NCCL's number of it, if it can be used in such a call.
    cdef ncclRedOp_t open(self, Connection connection, str op, int dtype) except *


cdef class Registration:
    cdef Connection _connection
    cdef BufferView _view
    cdef void* _registration


cdef class Window(Resource):
    cdef Connection _connection
    cdef BufferView _view
    cdef ncclWindow_t _window  # also null where NCCL makes none

    cdef ncclWindow_t open(self, Connection connection) except NULL
    cdef int check_room(self, BufferView src, offset) except -1


cdef PreMulSum make_premul_sum(Connection connection, scalar, str dtype, timeout)
cdef Registration make_registration(Connection connection, BufferView view, timeout)
cdef Window make_window(Connection connection, BufferView view, int flags, timeout)
cdef int check_in_window(Connection connection, BufferView view) except -1
