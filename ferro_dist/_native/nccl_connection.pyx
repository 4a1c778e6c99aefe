# A communicator's state and its end. Who may call it when is in csrc/nccl/communicator.hpp.

import atexit
import copy

cimport cython
from cpython.ref cimport Py_DECREF, Py_INCREF
from libc.stdint cimport uint64_t
from libcpp cimport bool as cpp_bool
from libcpp.memory cimport shared_ptr
from libcpp.utility cimport move

from ferro_dist._native cimport libnccl
from ferro_dist._native.cuda_runtime cimport num_forks
from ferro_dist._native.libnccl cimport (
    Native, ncclCommMemStat_t, ncclResult_t, ncclStatGpuMemPersist, ncclStatGpuMemSuspend,
    ncclStatGpuMemSuspended, ncclStatGpuMemTotal, ncclSuccess, Patience,
)
from ferro_dist._native.nccl_error cimport begin_exit
from ferro_dist._native.nccl_library cimport result_name
from ferro_dist._native.nccl_operation cimport Member
from ferro_dist._native.nccl_patience cimport patience_of

from ferro_dist import arguments
from ferro_dist._native.nccl_library import get_last_error
from ferro_dist.errors import DistributedError, LockPoisoned, Timeout

__all__ = ["Connection", "Noting"]

cdef extern from "Python.h":
    int Py_AddPendingCall(int (*function)(void*), void* argument) noexcept nogil

cdef double ABORT_GRACE = 5  # seconds that NCCL may take to abort
cdef double EXIT_GRACE = 5  # seconds, for all communicators together


cdef class Connection(Member):
    """All of `Communicator` but how it is made and what it moves."""

    def __cinit__(self):
        self._num_forks = -1  # nobody's until it is adopted
        self.world_size = 1  # arguments are checked, and divided by it, before the call is refused
        self.global_ranks = ()
        views = {}
        Py_INCREF(views)
        self._window_views = <PyObject*> views

    def __init__(self):
        raise TypeError("A Communicator is made by Communicator.init_rank")

    cdef int adopt(self, double timeout, bint is_blocking) except -1:
        self.rank = self._native.get().rank()
        self.world_size = self._native.get().world_size()
        self.device = self._native.get().device()
        self.timeout_s = timeout
        self.is_blocking = is_blocking
        self._num_forks = num_forks()
        return 0

    def __dealloc__(self):
        # The collector may run inside a group of this thread: NCCL must not be called here.
        if self._native.get() == NULL or not is_own(self) or not window_views(self):
            Py_DECREF(window_views(self))
        else:
            self._native.get().let_go_once_ended(let_go, self._window_views)
        if self._native.get() == NULL:
            return
        if not is_own(self):
            new shared_ptr[Native](move(self._native))  # the parent's: its locks may be held
        else:
            libnccl.end(move(self._native), EXIT_GRACE)

    def __repr__(self):
        state = ", closed" if self.is_closed else ""
        return f"<Communicator rank {self.rank} of {self.world_size} on device {self.device}{state}>"

    @property
    def timeout(self):
        """Seconds that calls may take which are given no timeout of their own."""
        return self.timeout_s

    @timeout.setter
    def timeout(self, seconds):
        self.timeout_s = arguments.check_timeout(seconds)

    @property
    def is_closed(self):
        """Whether it was closed or aborted, or has failed, and NCCL is done with it."""
        return self._native.get() == NULL or self._native.get().is_ended()

    def async_error(self):
        """Ask NCCL for the communicator's state.

        Returns
        -------
        str
            ``"no error"``, ``"operation in progress"``, or NCCL's name for an error.
        """
        cdef Patience patience = self.patience(None)
        cdef ncclResult_t result = ncclSuccess
        with Noting(self), nogil:
            result = self._native.get().async_error(patience)
        return result_name(result)

    def last_error(self):
        """Return NCCL's words for what went wrong last, "" if nothing did.

        NCCL keeps them per process: they may be about another communicator.
        """
        self._check_own()
        return get_last_error()

    def memory_statistics(self):
        """Return the bytes of GPU memory that NCCL holds (NCCL 2.29.7).

        Returns
        -------
        dict
            ``total``, ``persistent``, ``suspendable`` in bytes, and ``is_suspended``.
        """
        return {
            "total": self._memory(ncclStatGpuMemTotal),
            "persistent": self._memory(ncclStatGpuMemPersist),
            "suspendable": self._memory(ncclStatGpuMemSuspend),
            "is_suspended": self._memory(ncclStatGpuMemSuspended) != 0,
        }

    cdef object _memory(self, ncclCommMemStat_t statistic):
        cdef Patience patience = self.patience(None)
        cdef uint64_t value = 0
        with Noting(self), nogil:
            value = self._native.get().memory(statistic, patience)
        return value

    def suspend(self, *, timeout=None):
        """Free GPU memory that `resume` gets back; no calls may be made in between (NCCL 2.29.7).

        Called by all ranks. Waits for everything that the GPU was given.
        """
        cdef Patience patience = self.patience(timeout)
        with Noting(self), nogil:
            self._native.get().suspend(patience)

    def resume(self, *, timeout=None):
        """Get back what `suspend` freed. Called by all ranks."""
        cdef Patience patience = self.patience(timeout)
        with Noting(self), nogil:
            self._native.get().resume(patience)

    # ---- Its end ----------------------------------------------------------------

    def finalize(self, *, timeout=None):
        """Wait until all that was launched is done on all ranks; then only `close` may follow."""
        cdef Patience patience = self.patience(timeout)
        with Noting(self), nogil:
            self._native.get().finalize(patience)

    def revoke(self, *, timeout=None):
        """Stop what is under way; then only `split`, `shrink` and `close` may follow (NCCL 2.28.7)."""
        cdef Patience patience = self.patience(timeout)
        with Noting(self), nogil:
            self._native.get().revoke(patience)

    def abort(self):
        """End the communicator at once, whatever other threads and the GPU are doing with it.

        Other ranks are not told. Idempotent. Returns when NCCL is done with it, or after a few
        seconds: CUDA graphs that captured its calls keep NCCL from freeing its memory for as long
        as they live, and until then `is_closed` is false.
        """
        cdef shared_ptr[Native] native = self._native
        if not is_own(self) or native.get() == NULL:
            return
        cdef Patience patience = patience_of(ABORT_GRACE)
        try:
            with nogil:
                native.get().abort()
                native.get().wait_ended(patience)
            window_views(self).clear()
        except Timeout:
            pass  # it can no longer be called, which is what was asked for

    def close(self, *, timeout=None):
        """End the communicator, after waiting for what was launched. Idempotent.

        A healthy one is finalized and destroyed, which takes until the other ranks do so, at most
        `timeout` seconds; after that, or after an error, it is aborted.

        Raises
        ------
        Timeout
            NCCL still keeps it: CUDA graphs that captured its calls are alive, and must go first.
        """
        cdef shared_ptr[Native] native = self._native
        if not is_own(self) or native.get() == NULL:
            return
        cdef double seconds = self.seconds(timeout)
        # Longer than that: aborting takes a moment too.
        cdef Patience patience = patience_of(seconds + ABORT_GRACE)
        with Noting(self), nogil:
            libnccl.end(native, seconds)
            native.get().wait_ended(patience)
        window_views(self).clear()

    destroy = close

    # ---- Whether it can be called -------------------------------------------------

    cdef int _check_own(self) except -1:
        if self._native.get() == NULL:
            raise TypeError("A Communicator is made by Communicator.init_rank, not by __new__.")
        if not is_own(self):
            raise LockPoisoned(
                "This communicator belongs to the parent process: a forked child cannot use it, nor "
                "CUDA. Start the child with the spawn method, and make one there.", rank=self.rank)
        return 0

    cdef int refuse(self) except -1:
        self._check_own()
        raise LockPoisoned(
            "The communicator ended with an earlier error: "
            f"{arguments.first_line(self._first_error)}\nMake a new one.",
            rank=self.rank, op=getattr(self._first_error, "op", None),
            global_ranks=self.global_ranks or None) from self._first_error

    cdef int note(self, object error) except -1:
        """Name this rank and its group in an error, and remember the one that ended the communicator."""
        if isinstance(error, DistributedError):
            if error.rank is None:
                error.rank = self.rank
            arguments.name_group(error, self)
        if self._first_error is None and self._native.get() != NULL and self._native.get().has_failed():
            # A copy, without the traceback, whose frames would keep the caller's arrays alive.
            self._first_error = copy.copy(error)
        return 0

    cdef int note_of_call(self, object error, object used) except -1:
        self.note(error)
        if not is_own(self) or not self._native.get().has_failed() or self._native.get().is_ended():
            return 0
        Py_INCREF(used)  # the reaper's
        self._native.get().let_go_once_ended(let_go, <void*> used)
        return 0

    cdef Patience patience(self, timeout) except *:
        check_usable(self)
        return patience_of(self.seconds(timeout))

    @cython.final
    cdef double seconds(self, timeout) except? -1:
        if timeout is None:
            return self.timeout_s
        if type(timeout) is float and timeout > 0:
            return timeout
        return arguments.check_timeout(timeout)


cdef cpp_bool let_go(void* held) noexcept nogil:
    return Py_AddPendingCall(_forget, held) == 0


cdef int _forget(void* held) noexcept with gil:
    Py_DECREF(<object> held)
    return 0


@cython.final
cdef class Noting:
    """Let a connection note the error with which a ``with`` block ends."""

    def __init__(self, Connection connection not None):
        self._connection = connection

    def __enter__(self):
        return self

    def __exit__(self, exc_type, error, traceback):
        if error is not None:
            self._connection.note(error)


def _shut_down():
    """End what is left, while the interpreter and CUDA are still whole."""
    begin_exit()
    with nogil:
        libnccl.shut_down(EXIT_GRACE)


atexit.register(_shut_down)
