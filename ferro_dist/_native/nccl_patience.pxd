# How long a call waits for NCCL.

from libcpp cimport bool as cpp_bool

from ferro_dist._native.libnccl cimport Patience

cdef extern from "Python.h":
    int PyErr_CheckSignals() noexcept


cdef inline cpp_bool is_interrupted(void* unused) noexcept nogil:
    """Run Python's signal handlers in the middle of a long wait; true if one raised."""
    with gil:
        return PyErr_CheckSignals() != 0


# Ctrl-C ends the wait, too. Calls of a hundred nanoseconds construct it themselves, without a copy.
cdef inline Patience patience_of(double seconds) noexcept:
    return Patience(seconds, is_interrupted, NULL)
