"""Streams and events: the order in which a GPU works.

All calls of CUDA's let go of the interpreter: while a stream is full, CUDA keeps whoever calls it
waiting until there is room, for which another thread may have to do something.
"""

import contextlib
import sys

cimport cython
from cpython.object cimport PyObject
from cpython.ref cimport Py_REFCNT
from libc.stdint cimport SIZE_MAX, uintptr_t
from libcpp.vector cimport vector

from ferro_dist._native.buffer_view cimport (
    BufferView, current_stream_of, is_of_jax, order_before_legacy_stream,
)
from ferro_dist._native.cuda_runtime cimport CHECK_CUDA, cudart, num_forks
from ferro_dist._native.libcudart cimport (
    Capture, capture_of, cudaErrorNotReady, cudaError_t, cudaEvent_t, cudaEventDisableTiming, cudaStream_t,
    cudaStreamLegacy, cudaStreamNonBlocking, cudaStreamPerThread, cudaSuccess, Cudart, on_own_device, relaxed,
)

from ferro_dist._native.buffer_view import as_view
from ferro_dist._native.cuda_runtime import current_device, DeviceGuard, device_number
from ferro_dist.errors import InvalidArray

__all__ = ["Event", "LEGACY_STREAM", "STREAM_PER_THREAD", "Stream", "current_stream_of_array"]

# CUDA's other name of the default stream, whose address is null, and its name of the default stream of
# whatever thread uses it. DLPack's and __cuda_array_interface__'s numbers of these are the same.
LEGACY_STREAM = <uintptr_t> cudaStreamLegacy
STREAM_PER_THREAD = <uintptr_t> cudaStreamPerThread

cdef object NO_GUARD = contextlib.nullcontext()


@cython.final
cdef class HeldStream:
    """A stream's address, and what keeps it valid.

    Whoever lets go of the interpreter holds one: `Stream.close` in another thread then destroys
    nothing in use.
    """

    def __init__(self):
        raise TypeError("A HeldStream is made by Stream")

    def __dealloc__(self):
        self.destroy()

    cdef cudaError_t destroy(self):
        """Destroy a stream of our own; what is queued still runs."""
        cdef const Cudart* cuda
        cdef cudaError_t status
        if not self.is_own or self._num_forks != num_forks():  # in a forked child it is the parent's
            return cudaSuccess
        self.is_own = False
        cuda = cudart()
        with nogil:
            status = on_own_device(cuda[0], self.device, cuda.cudaStreamDestroy, self.stream)
        return status


@cython.final
cdef class Stream:
    """A CUDA stream: of our own, or borrowed from whoever made it.

    Parameters
    ----------
    device : int, optional
        Where a stream of our own works; the current device if not given.
    priority : int, optional
        Lower comes first; 0 is the default, and CUDA's limits apply.

    Notes
    -----
    A stream of our own does not wait for the legacy default stream (``cudaStreamNonBlocking``).
    """

    def __init__(self, device=None, *, int priority=0):
        cdef HeldStream made = HeldStream.__new__(HeldStream)
        cdef const Cudart* cuda = cudart()
        cdef cudaError_t status
        self.device = device_number(device)
        with DeviceGuard(self.device):
            with nogil:
                status = cuda.cudaStreamCreateWithPriority(&made.stream, cudaStreamNonBlocking, priority)
            CHECK_CUDA(status, "cudaStreamCreateWithPriority")
            made.is_own = True
            made.device = self.device
            made._num_forks = num_forks()
        self._held = made

    @staticmethod
    def borrow(stream, int device):
        """Use a stream of somebody else, who alone may destroy it.

        Parameters
        ----------
        stream : stream
            An address, or an object of torch, CuPy, cuda.core or anything with
            ``__cuda_stream__``, which is kept alive.
        device : int
            The device that it works on.
        """
        cdef Stream borrowed = Stream.__new__(Stream)
        borrowed._held = held_stream(stream)
        if borrowed._held.device < 0:
            borrowed._held.device = device
        borrowed.device = device
        return borrowed

    @property
    def handle(self):
        """The stream's address, as other libraries take it."""
        return <uintptr_t> self.open().stream

    @property
    def is_closed(self):
        return self._held is None

    def __cuda_stream__(self):
        return 0, self.handle

    def synchronize(self):
        """Block until all that was queued so far is done."""
        cdef HeldStream held = self.open()
        cdef const Cudart* cuda = cudart()
        cdef cudaError_t status
        with on_device_of(held), nogil:
            status = relaxed(cuda[0], cuda.cudaStreamSynchronize, held.stream)
        CHECK_CUDA(status, "cudaStreamSynchronize")

    def is_done(self):
        """Tell whether all that was queued so far is done."""
        cdef HeldStream held = self.open()
        cdef const Cudart* cuda = cudart()
        cdef cudaError_t status
        with on_device_of(held), nogil:
            status = relaxed(cuda[0], cuda.cudaStreamQuery, held.stream)
        return _is_ready(status, "cudaStreamQuery")

    def is_capturing(self):
        """Tell whether the stream's work goes into a CUDA graph now.

        True, too, of the legacy default stream while one is captured that it would wait for: it
        can be given nothing then.
        """
        cdef HeldStream held = self.open()
        cdef const Cudart* cuda = cudart()
        cdef Capture capture = Capture.none
        cdef cudaError_t status
        with on_device_of(held), nogil:
            status = capture_of(cuda[0], held.stream, &capture)
        CHECK_CUDA(status, "cudaStreamIsCapturing")
        return capture != Capture.none

    def wait(self, Event event not None):
        """Let all that is queued from now on wait for `event`. Blocks no host."""
        cdef HeldStream held = self.open()
        cdef const Cudart* cuda = cudart()
        cdef cudaError_t status
        with on_device_of(held), nogil:
            status = cuda.cudaStreamWaitEvent(held.stream, event._handle, 0)
        CHECK_CUDA(status, "cudaStreamWaitEvent")

    def record(self, Event event=None):
        """Mark this point of the stream with `event`, a new one if not given; return it."""
        if event is None:
            with DeviceGuard(self.device):
                event = Event()
        cdef HeldStream held = self.open()
        cdef const Cudart* cuda = cudart()
        cdef cudaError_t status
        with on_device_of(held), nogil:
            status = cuda.cudaEventRecord(event._handle, held.stream)
        CHECK_CUDA(status, "cudaEventRecord")
        return event

    def close(self):
        """Give the stream back; what is queued still runs. Idempotent.

        Where other threads are in the middle of a call on it, the last of these ends the stream.
        """
        cdef HeldStream held = self._held
        self._held = None
        if held is not None and Py_REFCNT(held) == 1:  # nobody else has it, nor can get it now
            CHECK_CUDA(held.destroy(), "cudaStreamDestroy")

    cdef HeldStream open(self):
        if self._held is None:
            raise ValueError("This stream is closed.")
        return self._held

    def __repr__(self):
        state = "closed" if self._held is None else f"{<uintptr_t> self._held.stream:#x}"
        return f"<Stream {state} on device {self.device}>"


@cython.final
cdef class Event:
    """A point in a stream's work, that other streams and the host can wait for."""

    def __init__(self):
        cdef cudaEvent_t handle = NULL
        cdef const Cudart* cuda = cudart()
        cdef int device = current_device()
        cdef cudaError_t status
        with nogil:
            status = cuda.cudaEventCreateWithFlags(&handle, cudaEventDisableTiming)
        CHECK_CUDA(status, "cudaEventCreateWithFlags")
        self._handle = handle
        self._device = device
        self._num_forks = num_forks()

    @property
    def handle(self):
        """The event's address, as other libraries take it."""
        return <uintptr_t> self._handle

    def is_done(self):
        """Tell whether the point was reached; true for an event that was never recorded."""
        cdef const Cudart* cuda = cudart()
        cdef cudaError_t status
        with nogil:
            status = relaxed(cuda[0], cuda.cudaEventQuery, self._handle)
        return _is_ready(status, "cudaEventQuery")

    def synchronize(self):
        """Block until the point is reached."""
        cdef const Cudart* cuda = cudart()
        cdef cudaError_t status
        with nogil:
            status = relaxed(cuda[0], cuda.cudaEventSynchronize, self._handle)
        CHECK_CUDA(status, "cudaEventSynchronize")

    def __dealloc__(self):
        # In a forked child the event is the parent's.
        cdef const Cudart* cuda
        if self._handle != NULL and self._num_forks == num_forks():
            cuda = cudart()
            with nogil:
                on_own_device(cuda[0], self._device, cuda.cudaEventDestroy, self._handle)


cdef bint _is_ready(cudaError_t status, str function) except -1:
    if status == cudaErrorNotReady:
        cudart().cudaGetLastError()  # else whoever asks next would get this error
        return False
    CHECK_CUDA(status, function)
    return True


cdef cudaStream_t stream_handle(object stream) except? NULL:
    cdef object cls = type(stream)
    if cls is Stream:
        return (<Stream> stream).open().stream
    if isinstance(stream, int) and not isinstance(stream, bool) and 0 <= stream <= SIZE_MAX:
        return <cudaStream_t> <uintptr_t> stream
    protocol = getattr(stream, "__cuda_stream__", None)
    if protocol is not None:
        # A method; in the first releases of cuda.core, a property.
        answer = protocol() if callable(protocol) else protocol
        try:
            _version, handle = answer
            return <cudaStream_t> <uintptr_t> handle
        except (TypeError, ValueError, OverflowError):
            raise TypeError(
                f"__cuda_stream__ must give a version and the address of a CUDA stream, and gave "
                f"{answer!r:.80} for {stream!r:.80}.") from None
    for name in ("cuda_stream", "ptr", "handle"):  # torch, CuPy, Numba
        handle = getattr(stream, name, None)
        if hasattr(handle, "value"):  # a number of ctypes, with None for null
            handle = handle.value or 0
        if isinstance(handle, int) and 0 <= handle <= SIZE_MAX:
            return <cudaStream_t> <uintptr_t> handle
    raise TypeError(
        f"stream must be a stream of torch, CuPy, Numba or cuda.core, an object with __cuda_stream__, or "
        f"the address of a CUDA stream, not {stream!r}.")


cdef HeldStream held_stream(object stream):
    cdef HeldStream held
    if type(stream) is Stream:
        return (<Stream> stream).open()
    held = HeldStream.__new__(HeldStream)
    held.stream = stream_handle(stream)
    held.device = -1
    held._lender = stream
    return held


cdef object on_device_of(HeldStream held):
    cdef cudaStream_t stream = held.stream
    is_default = stream == NULL or stream == cudaStreamLegacy or stream == cudaStreamPerThread
    return DeviceGuard(held.device) if is_default and held.device >= 0 else NO_GUARD


cdef cudaStream_t current_stream(BufferView view) except? NULL:
    cdef void* stream = NULL
    if current_stream_of(view, &stream):
        return <cudaStream_t> stream
    return _stream_of_library(view)


cdef cudaStream_t learn_stream(BufferView view, KnownStream* known) except? NULL:
    cdef void* stream = NULL
    if not current_stream_of(view, &stream):
        return _stream_of_library(view)
    known.array_type = <void*> (<PyObject*> view.owner).ob_type
    known.device = view.device_id
    known.stream = <cudaStream_t> stream
    return known.stream


cdef vector[cudaStream_t] streams_of_thread(int device) except *:
    cdef vector[cudaStream_t] streams
    torch = sys.modules.get("torch")
    cupy = sys.modules.get("cupy")
    emulated_array = sys.modules.get("ferro_dist._native.emulated_array")
    if torch is not None and torch.cuda.is_initialized():
        streams.push_back(<cudaStream_t> <uintptr_t> torch.cuda.current_stream(device).cuda_stream)
    if cupy is not None:
        streams.push_back(<cudaStream_t> <uintptr_t> cupy.cuda.get_current_stream(device).ptr)
    if emulated_array is not None:
        streams.push_back(<cudaStream_t> <uintptr_t> emulated_array.current_stream())
    if streams.empty():
        streams.push_back(cudaStreamLegacy)
    return streams


cdef cudaStream_t _stream_of_library(BufferView view) except? NULL:
    """Ask the library of an array that has no exchange table.

    JAX has no current stream: its arrays were waited for when they were read, so any stream
    will do. Arrays that name a stream in ``__cuda_array_interface__`` are ready on that one.
    Others get the legacy default stream, which waits for all streams but non-blocking ones; for what
    is handed out by DLPack alone its library lets it wait for these, too.
    """
    package = type(view.owner).__module__.partition(".")[0]
    if package == "cupy":
        return <cudaStream_t> <uintptr_t> sys.modules["cupy"].cuda.get_current_stream(view.device_id).ptr
    if package == "torch":  # from before the exchange table
        torch = sys.modules["torch"]
        return <cudaStream_t> <uintptr_t> torch.cuda.current_stream(view.device_id).cuda_stream
    if is_of_jax(view.owner):
        return cudaStreamLegacy
    interface = getattr(view.owner, "__cuda_array_interface__", None)
    if interface is None:
        return _legacy_stream_after(view)
    named = interface.get("stream")
    try:
        return cudaStreamLegacy if named is None else <cudaStream_t> <uintptr_t> named
    except (TypeError, OverflowError):
        raise InvalidArray(
            f"the __cuda_array_interface__ of this {type(view.owner).__qualname__} names the stream "
            f"{named!r:.80}, which is not the address of one.") from None


cdef cudaStream_t _legacy_stream_after(BufferView view) except? NULL:
    # While a graph is captured that this would spoil, whoever is about to use the stream refuses to.
    if not Stream.borrow(LEGACY_STREAM, view.device_id).is_capturing():
        order_before_legacy_stream(view.owner)
    return cudaStreamLegacy


def current_stream_of_array(array):
    """Return the address of the stream on which an array's library works now.

    Takes a `BufferView` of an array, too, which saves half the time where one is asked often.
    """
    cdef BufferView view = array if type(array) is BufferView else as_view(array)
    return <uintptr_t> current_stream(view)
