# What nccl_group.pyx builds on.

from libcpp.vector cimport vector

from ferro_dist._native.buffer_view cimport BufferView
from ferro_dist._native.libnccl cimport GroupedOperation, ncclConfig_t, Operation
from ferro_dist._native.nccl_connection cimport Connection


cdef class Communicator(Connection):
    cdef int _num_signals   # of NCCL's, for one-sided operations
    cdef int _num_contexts
    # Launches on the operation's stream, or adds to the group that this thread collects
    # and that then keeps the views.
    cdef int launch(
        self, const Operation& operation, BufferView first, BufferView second, double timeout
    ) except -1

    cdef vector[int] _others_of(self, ranks) except *
    cdef Communicator adopted(self, double timeout, const ncclConfig_t& config)
    cdef int _raw_peer(self, str op, peer) except -1
    cdef int _launch_on(self, Operation* o, stream) except -1
    cdef int _issue(self, Operation* o, BufferView first, BufferView second, stream) except -1
    cdef int _signal_peer(self, str op, peer) except -1
    cdef int _set_signal(self, Operation* o, str op, signal, context) except -1
    cdef int _refuse_streams(self) except -1
    cdef int _refuse_stream_of_thread(self) except -1


cdef class Group:
    cdef vector[GroupedOperation] _operations
    cdef list _kept            # what keeps the operations' arrays alive, and streams that were named
    cdef list _communicators   # each at least once
    cdef list _resources       # reductions and windows that must be open when it is launched
    cdef bint _is_open
    cdef Group _outer          # the open group that this one is part of

    cdef int _begin(self, size_t size) except -1
    cdef int _finish(self) except -1
    cdef int _launch(self) except -1
