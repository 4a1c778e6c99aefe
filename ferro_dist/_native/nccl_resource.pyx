# What NCCL keeps for a communicator until it is given back, or the communicator ends.

cimport cython
from cpython.ref cimport Py_INCREF
from libc.stdint cimport uintptr_t

from ferro_dist._native.buffer_view cimport BufferView, E4M3
from ferro_dist._native.libnccl cimport (
    ncclDataType_t, ncclRedOp_t, ncclScalarHostImmediate, NCCL_WIN_COLL_SYMMETRIC,
    NCCL_WIN_REQUIRED_ALIGNMENT, ncclWindow_t, Patience,
)
from ferro_dist._native.nccl_connection cimport Connection, is_own, let_go, Noting, window_views
from ferro_dist._native.nccl_operation cimport float_code, nccl_dtype

import numpy

from ferro_dist.dtypes import DTYPE_NAMES
from ferro_dist.errors import InvalidArray, UnsupportedOp

__all__ = ["PreMulSum", "Registration", "Resource", "Window"]


cdef class Resource:
    """What a communicator's operations may use until it is closed."""

    cdef int check_open(self) except -1:
        if self._is_closed:
            raise ValueError(f"This {type(self).__name__} is closed.")
        return 0


@cython.final
@cython.no_gc_clear  # __dealloc__ needs the communicator
cdef class PreMulSum(Resource):
    """A reduction that multiplies each rank's input by a number of its own, then sums.

    Made by `Communicator.premul_sum`, for that communicator and one dtype.
    """

    def __init__(self):
        raise TypeError("A PreMulSum is made by Communicator.premul_sum")

    @property
    def value(self):
        """NCCL's number of the reduction, for the methods that take raw pointers."""
        return <int> self.open(self._connection, "premul_sum", self._dtype)

    def close(self, *, timeout=None):
        """Give the reduction back. Idempotent."""
        if self._is_closed or not is_own(self._connection) or self._connection.is_closed:
            return
        cdef Patience patience = self._connection.patience(timeout)
        self._is_closed = True
        with Noting(self._connection), nogil:
            self._connection._native.get().destroy_reduce_op(self._reduce_op, patience)

    cdef ncclRedOp_t open(self, Connection connection, str op, int dtype) except *:
        self.check_open()
        if connection is not self._connection:
            raise UnsupportedOp(f"{op}: this PreMulSum is another communicator's.", op=op)
        if dtype != self._dtype:
            raise InvalidArray(
                f"{op}: x is {DTYPE_NAMES[dtype]}, and this PreMulSum multiplies "
                f"{DTYPE_NAMES[self._dtype]}.", op=op, rank=connection.rank)
        return self._reduce_op

    def __dealloc__(self):
        if self._is_closed or self._connection is None:
            return
        if is_own(self._connection):
            self._connection._native.get().destroy_reduce_op_later(self._reduce_op)


cdef PreMulSum make_premul_sum(Connection connection, scalar, str dtype, timeout):
    cdef PreMulSum made = PreMulSum.__new__(PreMulSum)
    cdef int code = float_code(dtype)
    if code >= E4M3:
        connection.check_float8("premul_sum", code)
        if connection.world_size == 1:
            raise UnsupportedOp(
                f"premul_sum: NCCL does not multiply {dtype} where there is one rank alone.", op="premul_sum",
                rank=connection.rank)
    cdef bytes value = numpy.array(_float(scalar), _numpy_dtype(dtype)).tobytes()
    cdef char* data = value
    cdef ncclDataType_t native_dtype = nccl_dtype(code)
    cdef Patience patience = connection.patience(timeout)
    with Noting(connection), nogil:
        made._reduce_op = connection._native.get().create_premul_sum(
            data, native_dtype, ncclScalarHostImmediate, patience)
    made._connection = connection
    made._dtype = code
    return made


def _float(scalar):
    try:
        if not isinstance(scalar, str):
            return float(scalar)
    except OverflowError:
        raise ValueError("premul_sum: scalar is an integer beyond all floats.") from None
    except (TypeError, ValueError):
        pass
    raise TypeError(f"premul_sum: scalar must be a number, not {scalar!r:.50}.")


def _numpy_dtype(str dtype):
    if dtype in ("bfloat16", "float8_e4m3fn", "float8_e5m2"):
        import ml_dtypes

        return numpy.dtype(getattr(ml_dtypes, dtype))
    return numpy.dtype(dtype)


@cython.final
cdef class Registration:
    """Memory that a communicator knows of, kept alive; made by `Communicator.register`."""

    def __init__(self):
        raise TypeError("A Registration is made by Communicator.register")

    def close(self, *, timeout=None):
        """Let the communicator forget the memory. Idempotent."""
        cdef void* registration = self._registration
        cdef Patience patience
        self._registration = NULL
        if registration != NULL and is_own(self._connection) and not self._connection.is_closed:
            patience = self._connection.patience(timeout)
            with Noting(self._connection), nogil:
                self._connection._native.get().deregister_buffer(registration, patience)
        self._view = None  # last: until here NCCL knew of the memory

    def __del__(self):
        # Not __dealloc__, before which the collector would empty what it finds in a cycle with us, the
        # memory's owner too. It spares what somebody holds by now.
        if self._registration == NULL or not is_own(self._connection):
            return
        Py_INCREF(self._view)  # the reaper's
        self._connection._native.get().deregister_later(self._registration, let_go, <void*> self._view)
        self._registration = NULL
        self._view = None


cdef Registration make_registration(Connection connection, BufferView view, timeout):
    _check_some("register", connection, view)
    cdef Registration made = Registration.__new__(Registration)
    cdef Patience patience = connection.patience(timeout)
    made._connection = connection
    made._view = view
    with Noting(connection), nogil:
        made._registration = connection._native.get().register_buffer(
            view.data, view.nbytes, patience)
    return made


@cython.final
cdef class Window(Resource):
    """Memory that all ranks of a communicator reach; made by `Communicator.register_window`.

    Stays until it is closed, or its communicator is, and keeps the memory alive until then:
    giving it back is a call of all ranks, which no garbage collector can make.
    """

    def __init__(self):
        raise TypeError("A Window is made by Communicator.register_window")

    def close(self, *, timeout=None):
        """Give the window back, on all ranks. Idempotent."""
        cdef ncclWindow_t window = self._window
        cdef BufferView view = self._view
        cdef Patience patience
        self._window = NULL
        self._view = None
        self._is_closed = True
        if window != NULL and is_own(self._connection) and not self._connection.is_closed:
            patience = self._connection.patience(timeout)
            with Noting(self._connection), nogil:
                self._connection._native.get().deregister_window(window, patience)
        window_views(self._connection).pop(view, None)

    cdef ncclWindow_t open(self, Connection connection) except NULL:
        self.check_open()
        if self._window == NULL:
            raise UnsupportedOp(
                "put: NCCL has made no window of this memory, which happens where the ranks' GPUs do not "
                "reach each other's memory.", op="put")
        if connection is not self._connection:
            raise UnsupportedOp("put: this Window is another communicator's.", op="put")
        return self._window

    cdef int check_room(self, BufferView src, offset) except -1:
        """Raise where `src` does not fit behind `offset`: NCCL would write over what lies there."""
        if offset < 0 or offset > self._view.nbytes or src.nbytes > self._view.nbytes - offset:
            raise InvalidArray(
                f"put: {src.nbytes} bytes at offset {offset} do not fit into the window of "
                f"{self._view.nbytes} bytes.", op="put", rank=self._connection.rank)
        return 0


cdef Window make_window(Connection connection, BufferView view, int flags, timeout):
    _check_some("register_window", connection, view)
    if <uintptr_t> view.data % NCCL_WIN_REQUIRED_ALIGNMENT != 0:
        raise InvalidArray(
            f"register_window: the memory must begin at a multiple of {NCCL_WIN_REQUIRED_ALIGNMENT} bytes, "
            "as that of NcclMemory does.", op="register_window", rank=connection.rank)
    cdef Window made = Window.__new__(Window)
    cdef Patience patience = connection.patience(timeout)
    made._connection = connection
    made._view = view
    window_views(connection)[view] = flags & NCCL_WIN_COLL_SYMMETRIC != 0
    try:
        with Noting(connection), nogil:
            made._window = connection._native.get().register_window(
                view.data, view.nbytes, flags, patience)
    except BaseException:
        # A call that was given up may still go on in NCCL until the communicator has ended.
        if not connection._native.get().has_failed():
            window_views(connection).pop(view, None)
        raise
    return made


cdef int _check_some(str op, Connection connection, BufferView view) except -1:
    """Raise InvalidArray for an empty array, which has no memory that NCCL could know of."""
    if view.nbytes == 0:
        raise InvalidArray(f"{op}: the array is empty.", op=op, rank=connection.rank)
    return 0


cdef int check_in_window(Connection connection, BufferView view) except -1:
    """Raise InvalidArray unless the memory is part of a symmetric window: NCCL puts from no other."""
    cdef BufferView each
    cdef uintptr_t begin = <uintptr_t> view.data
    cdef uintptr_t start
    for each, is_symmetric in window_views(connection).items():
        start = <uintptr_t> each.data
        if is_symmetric and start <= begin and begin + view.nbytes <= start + each.nbytes:
            return 0
    raise InvalidArray(
        "put: x is in no symmetric window of this communicator, and NCCL puts from nowhere else.",
        op="put", rank=connection.rank)
