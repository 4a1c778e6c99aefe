# For `except +raise_nccl`: turns the error of csrc/nccl into Python's.

cdef int raise_nccl() except -1
