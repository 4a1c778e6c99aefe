"""The emulated GPUs of this process, for Python."""

from __future__ import annotations

import contextlib
import ctypes
import math
import os
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import ml_dtypes  # noqa: F401  NumPy then knows its dtypes by name, such as "bfloat16"
import numpy as np

from ferro_dist import arguments
from ferro_dist._emulation.libraries import load
from ferro_dist._native import cuda_runtime
from ferro_dist._native.emulated_array import (
    EmulatedArray,
    current_stream,
    set_current_stream,
)

__all__ = [
    "EmulatedEvent",
    "EmulatedGpu",
    "EmulatedGraph",
    "EmulatedStream",
    "array_over",
    "gpu_of_process",
]

_H2D, _D2H = 1, 2  # cudaMemcpyKind
_NON_BLOCKING = 1
_NO_TIMING = 2
_NO_DEVICE = 100
_NOT_READY = 600
_RELAXED = 2  # cudaStreamCaptureMode
_CAPTURE_MODES = {"global": 0, "thread_local": 1, "relaxed": _RELAXED}
# As the libraries have it for their variables: runtime.cpp, stream.cpp.
_MOST_DEVICES = 64
_LONGEST_DELAY_US = 10_000_000


_gpu: EmulatedGpu | None = None


def gpu_of_process(cuda: int = 12, devices: int | None = None) -> EmulatedGpu:
    """Load the emulated libraries, unless they are, and return the object that uses them."""
    global _gpu
    if _gpu is None:
        if devices is not None:
            count = _checked("devices", devices, _MOST_DEVICES)
            os.environ["FERRO_EMULATION_DEVICES"] = str(count)  # read by the libraries once
        _gpu = EmulatedGpu(*load(cuda))
        # Our own calls go to it from now on, though JAX, imported later, brings a real one.
        cuda_runtime.runtime_version()
    if devices is not None and _gpu.device_count != devices:
        raise ValueError(f"there are {_gpu.device_count} emulated devices already, not {devices}")
    return _gpu


def _checked(name: str, value: int, most: int) -> int:
    number = arguments.named_integer("emulated_gpu", name, value)
    if not 0 <= number <= most:
        raise ValueError(f"{name} must be from 0 to {most}, not {number}")
    return number


class EmulatedGpu:
    """The emulated devices, their memory and streams; `emulated_gpu` returns the only instance.

    Attributes
    ----------
    cudart, nccl : ctypes.CDLL
        The emulated libraries, for calls that are not wrapped here.
    streams : mapping of int to EmulatedStream
        Those made here, by their handles.
    """

    def __init__(self, cudart: ctypes.CDLL, nccl: ctypes.CDLL) -> None:
        self.cudart = cudart
        self.nccl = nccl
        self.streams: weakref.WeakValueDictionary[int, EmulatedStream] = (
            weakref.WeakValueDictionary()
        )
        cudart.cudaGetErrorString.restype = ctypes.c_char_p

    # Arrays

    def array(self, values: Any, dtype: Any = None, stream: Any = None) -> EmulatedArray:
        """Copy `values` to the current device, in `stream` or the current one.

        Parameters
        ----------
        values : array_like
            What `numpy.asarray` takes.
        dtype : dtype, optional
        stream : EmulatedStream or int, optional
        """
        host = np.asarray(values, dtype, order="C")
        device = self._allocate(host.shape, host.dtype, stream)
        self._copy(device.address, host.ctypes.data, host.nbytes, _H2D, stream)
        return device

    def empty(self, shape: int | Sequence[int], dtype: Any = "float32") -> EmulatedArray:
        """Make an uninitialized array on the current device."""
        return self._allocate(arguments.check_shape(shape), np.dtype(dtype), None)

    def write(self, array: EmulatedArray, values: Any) -> None:
        """Overwrite an array, after what is queued in the current stream.

        Parameters
        ----------
        array : EmulatedArray
        values : EmulatedArray or array_like
            Converted to the dtype and broadcast to the shape of `array`.
        """
        source = values.numpy() if isinstance(values, EmulatedArray) else values
        first, raw, view = _host_room_for(array)
        with self.device(array.device):
            if not array.is_contiguous:  # what lies in between must stay as it is
                self._bring(raw, array.address + first)
            np.copyto(view, source, casting="unsafe")
            self._copy(array.address + first, raw.ctypes.data, raw.nbytes, _H2D, None)

    def copy_out(self, array: EmulatedArray) -> np.ndarray[Any, Any]:
        """Copy an array to NumPy, after what is queued in the current stream."""
        first, raw, view = _host_room_for(array)
        with self.device(array.device):
            self._bring(raw, array.address + first)
        return np.array(view)

    # Streams

    def stream(self, *, is_blocking: bool = False) -> EmulatedStream:
        """Make a stream; one that is blocking is ordered with the legacy default stream."""
        return EmulatedStream(self, is_blocking)

    def event(self, *, has_timing: bool = False) -> EmulatedEvent:
        return EmulatedEvent(self, has_timing)

    @property
    def current_stream(self) -> int:
        """Address of the calling thread's current stream; 0 for the legacy default one."""
        return current_stream()

    def synchronize(self, stream: Any = None) -> None:
        """Wait for a stream, or for everything on the current device."""
        if stream is None:
            self.check(self.cudart.cudaDeviceSynchronize())
        else:
            self.check(self.cudart.cudaStreamSynchronize(_handle(stream)))

    def order(self, earlier: Any, later: Any) -> None:
        """Make what `later` is given from now on wait for what `earlier` has now."""
        with self.event() as event:
            event.record(earlier)
            self.check(self.cudart.cudaStreamWaitEvent(_handle(later), _handle(event), 0))

    @contextlib.contextmanager
    def capture(self, stream: EmulatedStream, mode: str = "global") -> Iterator[EmulatedGraph]:
        """Record what `stream` is given into a graph, without running it.

        Parameters
        ----------
        stream : EmulatedStream
        mode : str
            ``"global"``, ``"thread_local"`` or ``"relaxed"``, as in CUDA.
        """
        graph = EmulatedGraph(self)
        begin = self.cudart.cudaStreamBeginCapture
        self.check(begin(_handle(stream), _CAPTURE_MODES[mode]))
        with stream:
            try:
                yield graph
            except BaseException:
                abandoned = ctypes.c_void_p()
                self.cudart.cudaStreamEndCapture(_handle(stream), ctypes.byref(abandoned))
                self.cudart.cudaGraphDestroy(abandoned)  # communicators wait for it
                self.cudart.cudaGetLastError()
                raise
        graph.end_capture(stream)

    # Devices

    @property
    def device_count(self) -> int:
        count = ctypes.c_int()
        status = self.cudart.cudaGetDeviceCount(ctypes.byref(count))
        if status == _NO_DEVICE:
            self.cudart.cudaGetLastError()
            return 0
        self.check(status)
        return count.value

    @property
    def current_device(self) -> int:
        device = ctypes.c_int()
        self.check(self.cudart.cudaGetDevice(ctypes.byref(device)))
        return device.value

    def has_context(self, number: int) -> bool:
        """Return whether this process has a context on a device, which would take GPU memory."""
        return bool(self.cudart.ferroEmulationHasContext(number))

    @contextlib.contextmanager
    def device(self, number: int) -> Iterator[None]:
        """Make a device the current one of the calling thread."""
        before = self.current_device
        self.check(self.cudart.cudaSetDevice(number))
        try:
            yield
        finally:
            self.check(self.cudart.cudaSetDevice(before))

    # Exposing faults

    def set_delay(self, microseconds: int) -> None:
        """Delay every operation of every stream by so much.

        With 300 µs, a missing wait or memory that is freed too early shows in nearly every run.
        """
        delay = _checked("delay_us", microseconds, _LONGEST_DELAY_US)
        self.cudart.ferroEmulationSetDelay(delay)

    def set_faults(self, plan: str) -> None:
        """Replace the faults on demand, ``FERRO_EMULATION_FAULT``, and count from 1 again.

        Parameters
        ----------
        plan : str
            ``"rank=1,point=allreduce,hit=3,act=remote_error"``; several are separated by
            semicolons, none is the empty string.
        """
        if not isinstance(plan, str):
            raise TypeError(f"emulated_gpu: faults must be a str, not {plan!r:.50}")
        text = plan.encode()
        if self.nccl.ferroEmulationSetFaults(text) or self.cudart.ferroEmulationSetMemoryFaults(
            text
        ):
            raise ValueError(f"cannot read the fault {plan!r}; see docs/emulation.md")

    @property
    def stuck_count(self) -> int:
        """How many NCCL calls do not return at the moment, because of a fault on demand."""
        return int(self.nccl.ferroEmulationCountStuck())

    @property
    def stream_count(self) -> int:
        """How many streams exist or still have work, default streams included."""
        return int(self.cudart.ferroEmulationCountStreams())

    def check(self, status: int) -> None:
        """Raise RuntimeError for a ``cudaError_t`` that is not a success."""
        if status != 0:
            self.cudart.cudaGetLastError()
            text = self.cudart.cudaGetErrorString(status).decode()
            raise RuntimeError(f"emulated CUDA error {status}: {text}")

    def _allocate(self, shape: tuple[int, ...], dtype: Any, stream: Any) -> EmulatedArray:
        nbytes = math.prod(shape) * dtype.itemsize
        where = current_stream() if stream is None else stream
        memory = _Memory(self, nbytes, self.streams.get(where, where))
        return EmulatedArray(memory, memory.address, shape, None, dtype, self.current_device)

    def _copy(self, target: int, source: int, nbytes: int, kind: int, stream: Any) -> None:
        where = _handle(current_stream() if stream is None else stream)
        if self._is_captured(where):
            raise RuntimeError(
                "A graph would copy from or to host memory that is gone when it runs. Make arrays "
                "before the capture, and look at them after the launch."
            )
        ends = ctypes.c_void_p(target), ctypes.c_void_p(source)
        self.check(self.cudart.cudaMemcpyAsync(*ends, ctypes.c_size_t(nbytes), kind, where))

    def _bring(self, raw: np.ndarray[Any, Any], source: int) -> None:
        self._copy(raw.ctypes.data, source, raw.nbytes, _D2H, None)
        self.synchronize(current_stream())

    def _is_captured(self, stream: ctypes.c_void_p) -> bool:
        status = ctypes.c_int()
        self.check(self.cudart.cudaStreamIsCapturing(stream, ctypes.byref(status)))
        return status.value != 0


class _Memory:
    """An allocation of one stream.

    It is freed after its last array, as by the allocators of GPU libraries: once what the stream
    was given is done. Work in other streams is not waited for, and faults. It keeps its stream
    alive: nothing could wait for the work of one that is gone.
    """

    def __init__(self, gpu: EmulatedGpu, nbytes: int, stream: Any) -> None:
        self.gpu = gpu
        address = ctypes.c_void_p()
        with _relaxed_capture(gpu):
            gpu.check(gpu.cudart.cudaMalloc(ctypes.byref(address), ctypes.c_size_t(nbytes)))
        self.address = address.value or 0
        # Not at exit: streams may still be working, as they may be on a GPU.
        made_by = gpu.current_device, os.getpid()
        weakref.finalize(self, _free, gpu, self.address, stream, *made_by).atexit = False


def array_over(memory: Any, shape: tuple[int, ...], dtype: Any) -> EmulatedArray:
    """Make an array over memory that somebody else has allocated, and keep that alive."""
    owner = _Lent(gpu_of_process(), memory)
    return EmulatedArray(owner, memory.address, shape, None, dtype, memory.device)


class _Lent:
    def __init__(self, gpu: EmulatedGpu, memory: Any) -> None:
        self.gpu = gpu
        self.memory = memory


class EmulatedStream:
    """A stream; ``with stream:`` makes it the current one of the thread."""

    def __init__(self, gpu: EmulatedGpu, is_blocking: bool) -> None:
        self._gpu = gpu
        handle = ctypes.c_void_p()
        flags = 0 if is_blocking else _NON_BLOCKING
        gpu.check(gpu.cudart.cudaStreamCreateWithFlags(ctypes.byref(handle), flags))
        self.handle = handle.value or 0
        self._before: list[int] = []
        gpu.streams[self.handle] = self
        weakref.finalize(self, _destroy_stream, gpu, self.handle).atexit = False

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self.handle

    def __enter__(self) -> EmulatedStream:
        self._before.append(current_stream())
        set_current_stream(self.handle)
        return self

    def __exit__(self, *_: object) -> None:
        set_current_stream(self._before.pop())

    def synchronize(self) -> None:
        self._gpu.synchronize(self)

    def wait(self, event: EmulatedEvent) -> None:
        """Make what the stream is given from now on wait for `event`."""
        self._gpu.check(self._gpu.cudart.cudaStreamWaitEvent(_handle(self), _handle(event), 0))


class EmulatedEvent:
    """A point in a stream's work. As a context manager it is destroyed at the end."""

    def __init__(self, gpu: EmulatedGpu, has_timing: bool) -> None:
        self._gpu = gpu
        handle = ctypes.c_void_p()
        flags = 0 if has_timing else _NO_TIMING
        gpu.check(gpu.cudart.cudaEventCreateWithFlags(ctypes.byref(handle), flags))
        self.handle = handle.value or 0
        self._finalizer = weakref.finalize(self, _destroy_event, gpu, self.handle)
        self._finalizer.atexit = False

    def __enter__(self) -> EmulatedEvent:
        return self

    def __exit__(self, *_: object) -> None:
        self._finalizer()

    def record(self, stream: Any = None) -> None:
        """Mark what `stream`, or the current one, has been given so far."""
        where = _handle(current_stream() if stream is None else stream)
        self._gpu.check(self._gpu.cudart.cudaEventRecord(_handle(self), where))

    def is_reached(self) -> bool:
        status = self._gpu.cudart.cudaEventQuery(_handle(self))
        if status == _NOT_READY:
            self._gpu.cudart.cudaGetLastError()
            return False
        self._gpu.check(status)
        return True

    def synchronize(self) -> None:
        self._gpu.check(self._gpu.cudart.cudaEventSynchronize(_handle(self)))


class EmulatedGraph:
    """What `EmulatedGpu.capture` recorded; to be destroyed before communicators that are in it."""

    def __init__(self, gpu: EmulatedGpu) -> None:
        self._gpu = gpu
        self._executable = 0
        self._finalizer: weakref.finalize[[EmulatedGpu, int], EmulatedGraph] | None = None

    def end_capture(self, stream: EmulatedStream) -> None:
        gpu = self._gpu
        graph, executable = ctypes.c_void_p(), ctypes.c_void_p()
        gpu.check(gpu.cudart.cudaStreamEndCapture(_handle(stream), ctypes.byref(graph)))
        gpu.check(
            gpu.cudart.cudaGraphInstantiate(ctypes.byref(executable), graph, ctypes.c_ulonglong(0))
        )
        gpu.check(gpu.cudart.cudaGraphDestroy(graph))
        self._executable = executable.value or 0
        self._finalizer = weakref.finalize(self, _destroy_graph, gpu, self._executable)
        self._finalizer.atexit = False

    def launch(self, stream: Any = None) -> None:
        """Run it once in `stream`, or in the current one."""
        where = _handle(current_stream() if stream is None else stream)
        self._gpu.check(self._gpu.cudart.cudaGraphLaunch(ctypes.c_void_p(self._executable), where))

    def close(self) -> None:
        """Destroy it. Idempotent."""
        if self._finalizer is not None:
            self._finalizer()


def _handle(stream: Any) -> ctypes.c_void_p:
    return ctypes.c_void_p(stream if isinstance(stream, int) else stream.handle)


def _host_room_for(
    array: EmulatedArray,
) -> tuple[int, np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Return where an array begins, as `_span` does; room for all it spans; the array in that."""
    first, nbytes = _span(array)
    raw = np.empty(nbytes, np.uint8)
    strides = tuple(stride * array.dtype.itemsize for stride in array.strides)
    return first, raw, np.ndarray(array.shape, array.dtype, raw, -first, strides)


def _span(array: EmulatedArray) -> tuple[int, int]:
    """Return the lowest byte of an array, relative to its first element, and how many it spans."""
    if array.size == 0:
        return 0, 0
    steps = [
        stride * (extent - 1) for stride, extent in zip(array.strides, array.shape, strict=True)
    ]
    lowest = sum(step for step in steps if step < 0)
    highest = sum(step for step in steps if step > 0)
    itemsize = array.dtype.itemsize
    return lowest * itemsize, (highest - lowest + 1) * itemsize


@contextlib.contextmanager
def _relaxed_capture(gpu: EmulatedGpu) -> Iterator[None]:
    """Permit what a capture in progress would forbid, as the allocators of GPU libraries do."""
    mode = ctypes.c_int(_RELAXED)
    gpu.cudart.cudaThreadExchangeStreamCaptureMode(ctypes.byref(mode))
    try:
        yield
    finally:
        gpu.cudart.cudaThreadExchangeStreamCaptureMode(ctypes.byref(mode))


def _free(gpu: EmulatedGpu, address: int, stream: Any, device: int, process: int) -> None:
    if process != os.getpid():
        return  # a forked child lets go of its parent's array, and has no GPU
    pointer = ctypes.c_void_p(address)
    # Each device has its own default stream.
    on_device = contextlib.nullcontext() if gpu.current_device == device else gpu.device(device)
    with on_device:
        if gpu.cudart.cudaFreeAsync(pointer, _handle(stream)) != 0:  # stream gone, or captured
            gpu.cudart.cudaGetLastError()
            with _relaxed_capture(gpu):
                gpu.cudart.cudaFree(pointer)


def _destroy_stream(gpu: EmulatedGpu, handle: int) -> None:
    gpu.cudart.cudaStreamDestroy(ctypes.c_void_p(handle))


def _destroy_event(gpu: EmulatedGpu, handle: int) -> None:
    gpu.cudart.cudaEventDestroy(ctypes.c_void_p(handle))


def _destroy_graph(gpu: EmulatedGpu, executable: int) -> None:
    gpu.cudart.cudaGraphExecDestroy(ctypes.c_void_p(executable))
