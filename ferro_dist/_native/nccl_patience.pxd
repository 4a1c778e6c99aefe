# How long a call waits for NCCL.

from libcpp cimport bool as cpp_bool

from ferro_dist._native.libnccl cimport Patience

cdef extern from "interpreter_lock.hpp" namespace "ferro::python":
    cpp_bool is_interrupted(void*) noexcept nogil


# Ctrl-C ends the wait, too. Calls of a hundred nanoseconds construct it themselves, without a copy.
cdef inline Patience patience_of(double seconds) noexcept:
    return Patience(seconds, is_interrupted, NULL)
