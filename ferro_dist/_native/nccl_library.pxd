# What the binding of NCCL asks of the library itself.

from ferro_dist._native.libnccl cimport ncclConfig_t, ncclResult_t, ncclUniqueId


cdef class UniqueId:
    cdef ncclUniqueId _id


# Fills in what is given; texts must live in `options` until the communicator has copied them.
cdef ncclConfig_t config_of(dict options) except *

# NCCL's words for a result.
cdef str result_name(ncclResult_t result)
