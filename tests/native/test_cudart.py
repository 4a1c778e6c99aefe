"""Streams, events and memory, over an emulated GPU."""

from __future__ import annotations

import ctypes
import os
import threading
from functools import partial
from typing import Any

import numpy as np
import pytest
from nccl_ranks import full, hold, shallow_gpu, wait_until_asleep

from ferro_dist._native.buffer_view import as_view
from ferro_dist.errors import BackendUnavailable, InvalidArray, LockPoisoned
from ferro_dist.testing import emulated_gpu, run_ranks


def alone(body: Any, *args: Any) -> Any:
    return run_ranks(1, body, *args, emulate_gpu=True)[0]


def copy_there_and_back(_: Any) -> list[Any]:
    emulated_gpu()
    from ferro_dist._native.cuda_memory import DeviceMemory, PinnedMemory, copy_async, fill_async
    from ferro_dist._native.cuda_stream import Stream

    stream = Stream()
    device, pinned = DeviceMemory(8), PinnedMemory(8)
    host = np.frombuffer(pinned, np.uint8)  # type: ignore[call-overload]
    host[:] = range(8)
    copy_async(device.address, pinned.address, 4, stream)
    fill_async(device.address + 4, 9, 4, stream)
    copy_async(pinned.address, device.address, 8, stream)
    stream.synchronize()
    device.close()
    device.close()
    stream.close()
    stream.close()
    result: list[Any] = host.tolist()
    return result


def test_copies_run_in_the_order_of_their_stream() -> None:
    assert alone(copy_there_and_back) == [0, 1, 2, 3, 9, 9, 9, 9]


def wait_for_an_event(_: Any) -> None:
    gpu = emulated_gpu()
    from ferro_dist._native.cuda_memory import DeviceMemory, fill_async
    from ferro_dist._native.cuda_stream import Stream

    gpu.set_delay(20_000)
    first, second = Stream(), Stream()
    memory = DeviceMemory(4)
    fill_async(memory.address, 1, 4, first)
    event = first.record()
    second.wait(event)
    fill_async(memory.address, 2, 4, second)
    second.synchronize()
    assert event.is_done()
    assert first.is_done()
    gpu.set_delay(0)


def test_stream_that_waits_for_an_event_comes_after_it() -> None:
    alone(wait_for_an_event)


def accept_streams(_: Any) -> None:
    emulated_gpu()
    from ferro_dist._native.cuda_stream import Stream

    class Torch:
        cuda_stream = 0

    class Protocol:
        def __init__(self, handle: Any) -> None:
            self.handle = handle

        def __cuda_stream__(self) -> tuple[int, int]:
            return 0, self.handle

    class Property:
        def __init__(self, *answer: int) -> None:
            self.__cuda_stream__ = answer

    class CuPy:
        def __init__(self, handle: int) -> None:
            self.ptr = handle

    own = Stream()
    for stream in (own, own.handle, Protocol(own.handle), CuPy(own.handle)):
        assert Stream.borrow(stream, 0).handle == own.handle
    assert Stream.borrow(Torch(), 0).handle == 0
    for wrong in (None, "0", True, 1.5, object(), -1, CuPy(-1), CuPy(1 << 64)):
        with pytest.raises(TypeError, match="stream must be"):
            Stream.borrow(wrong, 0)
    malformed: Any
    for malformed in (Protocol(-1), Protocol(1 << 64), Protocol("0"), Property(), Property(7)):
        with pytest.raises(TypeError, match="__cuda_stream__ must give a version and the address"):
            Stream.borrow(malformed, 0)


def test_streams_of_all_libraries_are_accepted() -> None:
    alone(accept_streams)


def describe_addresses(_: Any) -> list[str]:
    emulated_gpu()
    from ferro_dist._native.cuda_memory import DeviceMemory, PinnedMemory, location_of

    device, pinned, plain = DeviceMemory(8), PinnedMemory(8), np.zeros(8)
    return [location_of(at)[0] for at in (device.address, pinned.address, plain.ctypes.data)]


def test_location_of_an_address_is_known() -> None:
    assert alone(describe_addresses) == ["device", "host", "unregistered"]


def name_no_device(_: Any) -> None:
    emulated_gpu(devices=2)
    from ferro_dist._native.cuda_memory import DeviceMemory
    from ferro_dist._native.cuda_stream import Stream
    from ferro_dist._native.nccl_memory import NcclMemory

    for make in (Stream, partial(DeviceMemory, 8), partial(NcclMemory, 8)):
        with pytest.raises(BackendUnavailable, match="GPU 2 is not among the 2 that"):
            make(2)
        made: Any = make(np.int64(1))
        assert made.device == 1
        made.close()


def test_a_device_that_is_not_there_is_refused() -> None:
    run_ranks(1, name_no_device)


def view_closed_memory(_: Any) -> None:
    emulated_gpu()
    from ferro_dist._native.cuda_memory import DeviceMemory

    memory = DeviceMemory(8)
    memory.close()
    with pytest.raises(InvalidArray, match="no memory"):
        as_view(memory)


def test_closed_memory_is_no_array() -> None:
    alone(view_closed_memory)


def ask_in_a_child(_: Any) -> int:
    emulated_gpu()
    from ferro_dist._native.cuda_runtime import current_device

    current_device()
    child = os.fork()
    if child == 0:
        try:
            current_device()
        except LockPoisoned as error:
            os._exit(7 if "spawn" in str(error) else 2)
        finally:
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def test_a_forked_child_is_told_how_to_use_cuda() -> None:
    assert alone(ask_in_a_child) == 7


def work_beside_a_capture(_: Any) -> list[float]:
    """In CUDA's default mode a capture ends with what any thread does that may wait."""
    gpu = emulated_gpu()
    from ferro_dist._native.cuda_memory import DeviceMemory, PinnedMemory, copy_async
    from ferro_dist._native.cuda_stream import Stream
    from ferro_dist._native.nccl_memory import NcclMemory

    stream, other = gpu.stream(), Stream()
    x, out = gpu.array(np.arange(4.0)), gpu.array(np.zeros(4))
    gpu.synchronize()

    def work() -> None:
        DeviceMemory(4).close()
        NcclMemory(4).close()
        del_memory, del_pinned = DeviceMemory(4), PinnedMemory(4)
        del del_memory, del_pinned
        event = other.record()
        while not (event.is_done() and other.is_done()):
            os.sched_yield()
        event.synchronize()
        other.synchronize()

    with gpu.capture(stream) as graph:
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        work()
        copy_async(out.address, x.address, x.nbytes, stream)
    graph.launch(stream)
    stream.synchronize()
    result: list[float] = out.numpy().tolist()
    graph.close()
    return result


def test_a_capture_goes_on_beside_what_may_wait() -> None:
    assert alone(work_beside_a_capture) == [0.0, 1.0, 2.0, 3.0]


def look_at_the_default_stream_beside_a_capture(_: Any) -> None:
    """While a blocking stream is captured, CUDA refuses to tell of the default one."""
    gpu = emulated_gpu()
    from ferro_dist._native.cuda_stream import Stream
    from ferro_dist._native.nccl_memory import NcclMemory

    stream, memory, default = gpu.stream(is_blocking=True), NcclMemory(4), Stream.borrow(1, 0)
    is_captured = []

    def work() -> None:
        is_captured.append(default.is_capturing())
        memory.close()
        assert gpu.cudart.cudaGetLastError() == 0  # somebody else would take it for his own

    with gpu.capture(stream) as graph:
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    graph.close()
    assert is_captured == [True]
    assert not default.is_capturing()


def test_the_default_stream_is_left_alone_beside_a_capture_that_it_waits_for() -> None:
    alone(look_at_the_default_stream_beside_a_capture)


def free_beside_a_capture(_: Any) -> list[str]:
    """What the default stream was given uses the memory, and CUDA does not tell when it is done."""
    gpu = emulated_gpu()
    from ferro_dist._native.cuda_memory import copy_async, location_of
    from ferro_dist._native.cuda_stream import Stream
    from ferro_dist._native.nccl_memory import NcclMemory

    stream, default, target = gpu.stream(is_blocking=True), Stream.borrow(1, 0), gpu.empty(1)
    closed, dropped = NcclMemory(4), [NcclMemory(4)]
    addresses = [closed.address, dropped[0].address]
    go_on = hold(gpu)
    for address in addresses:
        copy_async(target.address, address, 4, default)

    def let_go() -> None:
        closed.close()
        dropped.clear()

    with gpu.capture(stream) as graph:
        thread = threading.Thread(target=let_go)
        thread.start()
        thread.join()
    graph.close()
    kinds = [location_of(address)[0] for address in addresses]
    go_on()
    for address in addresses:
        while location_of(address)[0] != "unregistered":  # freed within this test's time
            os.sched_yield()
    return kinds


def test_memory_that_the_default_stream_uses_is_kept_beside_a_capture() -> None:
    assert alone(free_beside_a_capture) == ["device", "device"]


def close_a_stream_in_use(_: Any) -> tuple[int, int]:
    gpu = emulated_gpu()
    from ferro_dist._native.cuda_stream import Stream

    held, stream = gpu.stream(), Stream()
    with held:
        go_on = hold(gpu)
    stream.wait(Stream.borrow(held, 0).record())
    handle = ctypes.c_void_p(stream.handle)
    thread = threading.Thread(target=stream.synchronize)
    thread.start()
    wait_until_asleep(thread)
    stream.close()
    with pytest.raises(ValueError, match="closed"):
        stream.is_done()
    in_use = gpu.cudart.cudaStreamQuery(handle)
    go_on()
    thread.join()
    afterwards = gpu.cudart.cudaStreamQuery(handle)
    gpu.cudart.cudaGetLastError()
    return in_use, afterwards


def test_a_stream_that_is_closed_in_use_lives_to_the_end_of_the_call() -> None:
    not_ready, invalid_handle = 600, 400
    assert alone(close_a_stream_in_use) == (not_ready, invalid_handle)


def ask_while_a_stream_is_full(_: Any) -> None:
    """CUDA then keeps whoever asks waiting, until another thread has done something."""
    gpu = shallow_gpu()
    from ferro_dist._native.cuda_stream import Stream

    other = gpu.stream()
    stream = Stream()
    event = stream.record()
    calls = (event.is_done, stream.is_done, stream.is_capturing, stream.record)
    for call in (*calls, partial(stream.wait, event)):
        with full(other):
            call()


def test_other_threads_go_on_while_cuda_keeps_one_waiting() -> None:
    alone(ask_while_a_stream_is_full)


def drop_memory_while_a_stream_is_full(_: Any) -> None:
    gpu = shallow_gpu()
    from ferro_dist._native.nccl_memory import NcclMemory

    dropped = [NcclMemory(1)]
    stream = gpu.stream()
    with full(stream), stream:
        dropped.clear()  # marks the stream


def test_memory_may_be_dropped_while_cuda_keeps_a_stream_waiting() -> None:
    alone(drop_memory_while_a_stream_is_full)


def use_the_default_stream_of_another_device(_: Any) -> list[int]:
    gpu = emulated_gpu(devices=2)
    from ferro_dist._native.cuda_memory import PinnedMemory, copy_async, fill_async
    from ferro_dist._native.cuda_stream import Stream

    pinned, default, other = PinnedMemory(1), Stream.borrow(0, 1), Stream(1)
    with gpu.device(1):
        array = gpu.empty(1, "uint8")
        go_on = hold(gpu)
    fill_async(array.address, 7, 1, default)
    event = default.record()
    other.wait(event)
    copy_async(pinned.address, array.address, 1, other)
    copied = other.record()
    is_done = [default.is_done(), copied.is_done()]
    go_on()
    default.synchronize()
    assert event.is_done()
    default.wait(copied)
    copy_async(pinned.address, array.address, 1, default)
    default.synchronize()
    return [*is_done, memoryview(pinned)[0]]  # type: ignore[arg-type]


def test_the_default_stream_is_that_of_the_streams_device() -> None:
    assert run_ranks(1, use_the_default_stream_of_another_device) == [[False, False, 7]]


def find_current_stream(_: Any) -> None:
    gpu = emulated_gpu()
    from ferro_dist._native.cuda_stream import current_stream_of_array

    x = gpu.empty(4)
    before = current_stream_of_array(x)
    assert before == gpu.current_stream
    with gpu.stream() as stream:
        assert current_stream_of_array(x) == stream.__cuda_stream__()[1]
    assert current_stream_of_array(x) == before
    assert current_stream_of_array(OnStream(x, None)) == 1  # the legacy default one
    assert current_stream_of_array(OnStream(x, 7)) == 7
    for wrong in ("default", -5, 1 << 64):
        with pytest.raises(InvalidArray, match=r"names the stream .* is not the address of one"):
            current_stream_of_array(OnStream(x, wrong))


class OnStream:
    """An array that names its stream, as the protocol has it."""

    def __init__(self, array: Any, stream: Any) -> None:
        self.__cuda_array_interface__ = {**array.__cuda_array_interface__, "stream": stream}


def test_current_stream_is_that_of_the_arrays_library() -> None:
    alone(find_current_stream)
