# For `except +raise_nccl`: turns the error of csrc/nccl into Python's.

cdef int raise_nccl() except -1

# Names the ranks, of which there is at least one.
cdef str who_is_missing(tuple missing)

# From here on, errors of threads that the interpreter does not wait for are held back: nobody reads them.
cdef void begin_exit() noexcept
