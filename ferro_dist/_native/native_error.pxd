# For `except +raise_native`: turns the engine's error into Python's.

cdef int raise_native() except -1
