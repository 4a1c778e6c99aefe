# Memory of GPUs that NCCL allocates.

import sys

cimport cython
from libcpp.vector cimport vector

from ferro_dist._native cimport libnccl
from ferro_dist._native.cuda_memory cimport GpuBytes
from ferro_dist._native.cuda_runtime cimport cudart
from ferro_dist._native.cuda_stream cimport streams_of_thread
from ferro_dist._native.libcudart cimport Cudart, cudaStream_t
from ferro_dist._native.libnccl cimport Patience
from ferro_dist._native.nccl_patience cimport patience_of

__all__ = ["NcclMemory"]

cdef double TIMEOUT = 300  # seconds


@cython.final
cdef class NcclMemory(GpuBytes):
    """`GpuBytes` that NCCL allocates in the way that suits it best."""

    cdef int allocate(self) except -1:
        cdef const Cudart* cuda = cudart()
        cdef Patience patience = patience_of(TIMEOUT)
        with nogil:
            self._data = libnccl.allocate(cuda[0], self.device, self.nbytes, patience)
        return 0

    def close(self):
        """Free the memory, once the stream on which this thread works is done with it. Idempotent.

        Other streams that use it must be done with it before.
        """
        cdef void* data = self._data
        cdef const Cudart* cuda = cudart()
        self._data = NULL
        if data == NULL or not self.is_own():
            return
        cdef vector[cudaStream_t] users = streams_of_thread(self.device)
        cdef Patience patience = patience_of(TIMEOUT)
        with nogil:
            libnccl.free(cuda[0], self.device, data, users, patience)

    def __del__(self):
        # Not __dealloc__, which must not call Python: only the libraries know their streams.
        if self._data == NULL or not self.is_own() or sys.is_finalizing():
            return
        cdef void* data = self._data
        cdef const Cudart* cuda = cudart()
        cdef vector[cudaStream_t] users = streams_of_thread(self.device)
        self._data = NULL
        with nogil:  # a stream that is full keeps whoever marks it waiting
            libnccl.free_later(cuda[0], self.device, data, users)
