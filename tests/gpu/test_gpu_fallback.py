"""Arrays of a GPU on groups that reach none: an error, or by way of the host if it is allowed."""

from __future__ import annotations

import os
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from backends.contract.reference import COLLECTIVES, REDUCING, call, expected, inputs

import ferro_dist as fd
from ferro_dist.errors import GpuFallbackWarning, InvalidArray, UnsupportedOp
from ferro_dist.testing import emulated_gpu, run_ranks

VARIABLE = "FERROTORCH_ENABLE_GPU_FALLBACK"
# More than the three buffers of 4 MiB that a round trip has.
MANY = 4_200_011


def ranks(world_size: int, body: Any, *args: Any, backend: str = "host") -> list[Any]:
    return run_ranks(world_size, body, *args, backend=backend, emulate_gpu=True)


def call_on_gpu(op: str, group: Any, x: Any, out: Any = None, **options: Any) -> Any:
    """Call a collective; away from the root of a scatter, with an output of the right size."""
    if op == "scatter" and group.rank != 0:
        rows = x.shape[0] // group.world_size
        return fd.scatter(None, group, out=x.empty((rows, *x.shape[1:])), **options)
    return call(op, group, x, out=out, **options)


def warnings_of(function: Any) -> tuple[Any, list[str]]:
    """Call a function; return its result and the texts of the fallback's warnings."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result = function()
    package = str(Path(fd.__file__).parent)
    blamed = [each.filename for each in caught]  # the caller's line, not one of ours
    assert not any(filename.startswith(package) for filename in blamed), blamed
    return result, [str(each.message) for each in caught if each.category is GpuFallbackWarning]


# Whether it is taken


def reduce_with(group: Any, value: str | None) -> str:
    os.environ.pop(VARIABLE, None)
    if value is not None:
        os.environ[VARIABLE] = value
    x = emulated_gpu().array(np.ones(3))
    try:
        y, texts = warnings_of(lambda: fd.allreduce(x, group))
    except UnsupportedOp as error:
        fd.barrier(group)  # it goes on
        return f"rank {error.rank}, {error}"
    assert y.numpy().tolist() == [group.world_size] * 3
    assert len(texts) == 1
    return texts[0]


@pytest.mark.parametrize("value", [None, "", "0", "false", "False", " FALSE "])
def test_off_means_an_error_that_names_the_ways_out(value: str | None) -> None:
    for rank, message in enumerate(ranks(2, reduce_with, value)):
        assert message.startswith(f"rank {rank}, allreduce: the array is on a GPU")
        for word in ("NcclBackend", "HybridBackend", f"{VARIABLE}=1"):
            assert word in message


@pytest.mark.parametrize("value", ["1", "true", "yes"])
def test_on_means_a_warning_that_names_the_call_and_the_remedy(value: str) -> None:
    for message in ranks(2, reduce_with, value):
        assert message.startswith("allreduce of a GPU array goes through host memory")
        assert "Use HybridBackend" in message
        assert f"unset {VARIABLE}" in message


def warn_at_each_call(group: Any) -> list[int]:
    os.environ[VARIABLE] = "1"
    x = emulated_gpu().array(np.ones(3))
    with warnings.catch_warnings(record=True) as caught:  # with the filters as users have them
        for _ in range(3):
            fd.allreduce(x, group)
            fd.broadcast(x, group)
    return [each.category is GpuFallbackWarning for each in caught]


def test_every_call_warns_and_not_each_line_once() -> None:
    assert ranks(1, warn_at_each_call) == [[True] * 6]


def raise_warnings(group: Any) -> bool:
    os.environ[VARIABLE] = "1"
    x = emulated_gpu().array(np.ones(3))
    with warnings.catch_warnings():
        warnings.simplefilter("error", GpuFallbackWarning)
        with pytest.raises(GpuFallbackWarning):
            fd.allreduce(x, group)
    return bool(fd.allreduce(np.ones(1), group)[0] == group.world_size)


def test_a_warning_that_is_an_error_leaves_the_group_usable() -> None:
    assert ranks(2, raise_warnings) == [True, True]


# What it gives


def check_collective(group: Any, op: str) -> None:
    for shape, dtype in (((5, 3), "float32"), ((0, 2), "int64"), ((20_011,), "int16")):
        arrays = inputs(op, group, shape, dtype)
        wanted = expected(op, arrays, group.rank)
        x = emulated_gpu().array(arrays[group.rank])
        for has_out in (False, True):
            for is_async in (False, True):
                out = (
                    emulated_gpu().empty(wanted.shape, dtype)
                    if has_out and wanted is not None
                    else None
                )
                check_call(op, group, x, out, wanted, is_async)
        np.testing.assert_array_equal(x.numpy(), arrays[group.rank])


def check_call(op: str, group: Any, x: Any, out: Any, wanted: Any, is_async: bool) -> None:
    y, texts = warnings_of(lambda: call_on_gpu(op, group, x, out, async_op=is_async))
    assert len(texts) == 1
    assert texts[0].startswith(f"{op} of")
    y = y.result() if is_async else y
    assert (y is None) == (wanted is None)
    if y is not None:
        assert out is None or (op == "scatter" and group.rank) or y is out
        np.testing.assert_array_equal(y.numpy(), wanted)


def run_collectives(group: Any) -> None:
    os.environ[VARIABLE] = "1"
    emulated_gpu(delay_us=50)
    for op in COLLECTIVES:
        check_collective(group, op)


@pytest.mark.parametrize("world_size", [1, 3])
def test_collectives_give_what_numpy_gives(world_size: int) -> None:
    ranks(world_size, run_collectives)


def run_simulated(rank: int, world_size: int, addr: str) -> None:
    groups = fd.SimulatedBackend.create_group(2, timeout=30)
    os.environ[VARIABLE] = "1"
    gpu = emulated_gpu()
    failures: list[BaseException] = []

    def body(group: Any) -> None:
        try:
            x = gpu.array(np.arange(6.0) + group.rank)
            assert fd.allreduce(x, group).numpy().tolist() == [1, 3, 5, 7, 9, 11]
            assert fd.all_gather(x, group).numpy().shape == (12,)
        except BaseException as error:
            failures.append(error)
            group.close()

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        threads = [threading.Thread(target=body, args=(group,)) for group in groups]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    for group in groups:
        group.close()
    if failures:
        raise failures[0]


def test_simulated_groups_take_it_too() -> None:
    ranks(1, run_simulated, backend="none")


def go_in_pieces(group: Any, op: str) -> None:
    """Larger arrays than the buffers hold together, while each copy is late."""
    os.environ[VARIABLE] = "1"
    gpu = emulated_gpu(delay_us=300)
    x = np.arange(MANY, dtype=np.float32) % 1000
    with gpu.stream(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(2):
            device = gpu.array(x + group.rank)
            y = call(op, group, device)
            z = call(op, group, device, out=device)
            if op == "allreduce" or group.rank == 0 or op == "broadcast":
                wanted = x if op == "broadcast" else 2 * x + 1
                np.testing.assert_array_equal(y.numpy(), wanted)
                np.testing.assert_array_equal(z.numpy(), wanted)
    gpu.set_delay(0)


@pytest.mark.parametrize("op", ["allreduce", "broadcast", "reduce"])
def test_large_arrays_go_in_pieces(op: str) -> None:
    ranks(2, go_in_pieces, op)


def gather_again_and_again(group: Any) -> None:
    from ferro_dist.gpu_fallback import _spare

    os.environ[VARIABLE] = "1"
    warnings.simplefilter("ignore")
    x = emulated_gpu().array(np.ones(3))
    fd.all_gather(x, group)
    kept = set(map(id, _spare))
    assert len(kept) == 2  # for what is sent, and for what is received
    for _ in range(3):
        fd.all_gather(x, group)
        assert set(map(id, _spare)) == kept


def test_pinned_memory_is_used_again() -> None:
    ranks(2, gather_again_and_again)


def take_long_for_each_piece(group: Any) -> bool:
    """Each piece takes rank 1 less than the timeout, and all five together take longer."""
    os.environ[VARIABLE] = "1"
    gpu = emulated_gpu(delay_us=300_000 if group.rank == 1 else 0)
    x = gpu.array(np.zeros(MANY, np.float32))
    gpu.synchronize()
    group.barrier(False, None, 0)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            fd.allreduce(x, group, out=x, timeout=1.0 if group.rank == 0 else 60.0)
    except fd.ChannelClosed:
        return False
    except fd.Timeout as error:
        return error.rank == 0 and error.missing == (1,)
    finally:
        gpu.set_delay(0)
    return False


def test_the_timeout_is_that_of_the_whole_call() -> None:
    assert ranks(2, take_long_for_each_piece)[0]


def differ_by_a_whole_piece(group: Any) -> None:
    os.environ[VARIABLE] = "1"
    x = emulated_gpu().array(np.zeros((2 + group.rank) << 20, np.float32))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(fd.CollectiveMismatch):
            fd.allreduce(x, group)


def test_ranks_with_more_pieces_than_others_are_noticed() -> None:
    ranks(2, differ_by_a_whole_piece)


def read_gaps(group: Any) -> None:
    os.environ[VARIABLE] = "1"
    gpu = emulated_gpu()
    table = np.arange(24.0).reshape(4, 6)
    x = gpu.array(table + group.rank)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        y = fd.allreduce(x[:, ::2], group)
        np.testing.assert_array_equal(y.numpy(), (2 * table + 1)[:, ::2])
        np.testing.assert_array_equal(x.numpy(), table + group.rank)
        with pytest.raises(InvalidArray):
            fd.allreduce(x, group, out=gpu.empty((4, 12), "float64")[:, ::2])
        with pytest.raises(InvalidArray):
            fd.allreduce(x, group, out=gpu.empty((4, 6), "float32"))


def test_inputs_with_gaps_are_read_and_outputs_with_gaps_refused() -> None:
    ranks(2, read_gaps)


class OnStream:
    """An array whose library names the stream on which it works."""

    def __init__(self, array: Any, stream: Any) -> None:
        self.__cuda_array_interface__ = {**array.__cuda_array_interface__, "stream": stream.handle}


def write_late_on_another_stream(group: Any) -> list[float]:
    os.environ[VARIABLE] = "1"
    warnings.simplefilter("ignore")
    gpu = emulated_gpu()
    x, out = gpu.array(np.full(4, group.rank + 1.0)), gpu.empty(4, "float64")
    ours, other = gpu.stream(), gpu.stream()
    gpu.synchronize()
    gpu.set_delay(200_000)
    with other:
        gpu.write(out, np.zeros(4))
    gpu.set_delay(0)
    fd.all_to_all(OnStream(x, ours), group, out=OnStream(out, other))
    gpu.synchronize()
    result: list[float] = out.numpy().tolist()
    return result


def test_what_another_library_still_writes_comes_first() -> None:
    assert ranks(2, write_late_on_another_stream) == [[1, 1, 2, 2]] * 2


def take_from_a_device_that_is_not_current(group: Any) -> list[float]:
    os.environ[VARIABLE] = "1"
    warnings.simplefilter("ignore")
    gpu = emulated_gpu(devices=2)
    with gpu.device(1):
        x, out = gpu.array(np.full(4, group.rank + 1.0)), gpu.empty(4, "float64")
        stream = gpu.stream()
        gpu.synchronize()
    fd.all_to_all(OnStream(x, stream), group, out=OnStream(out, stream))
    result: list[float] = out.numpy().tolist()
    return result


def test_arrays_need_not_tell_their_device() -> None:
    assert run_ranks(2, take_from_a_device_that_is_not_current) == [[1, 1, 2, 2]] * 2


def mix_devices(group: Any) -> None:
    os.environ[VARIABLE] = "1"
    gpu = emulated_gpu()
    host, device = np.ones(4), gpu.array(np.ones(4))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for x, out in ((host, device), (device, host)):
            with pytest.raises(InvalidArray, match=r"device|GPU"):
                fd.allreduce(x, group, out=out)
    assert fd.allreduce(host, group)[0] == group.world_size


def test_arrays_of_two_devices_in_one_call_are_refused() -> None:
    ranks(2, mix_devices)


def send_without_nccl(group: Any) -> None:
    gpu = emulated_gpu()
    other = 1 - group.rank
    x, out = gpu.array(np.full(3, group.rank)), gpu.empty(3, "int64")
    os.environ[VARIABLE] = "1"
    refusals: list[Callable[[], Any]] = [
        lambda: fd.send(x, group, other),
        lambda: fd.recv(out, group, other),
        lambda: fd.sendrecv(x, out, group, other, other),
        lambda: fd.batch([fd.P2POp("send", x, other)], group),
    ]
    for refused in refusals:
        with pytest.raises(UnsupportedOp, match="HybridBackend") as told:
            refused()
        assert VARIABLE not in str(told.value)
    fd.barrier(group)


def test_messages_never_take_it() -> None:
    ranks(2, send_without_nccl)


def capture_the_round_trip(group: Any) -> None:
    os.environ[VARIABLE] = "1"
    gpu = emulated_gpu()
    x = gpu.array(np.ones(4))
    warnings.simplefilter("ignore")
    refusal = pytest.raises(UnsupportedOp, match="CUDA graph")
    with gpu.stream() as stream, gpu.capture(stream), refusal:
        fd.allreduce(x, group)
    assert fd.allreduce(np.ones(1), group)[0] == 1


def test_a_round_trip_is_refused_in_a_graph() -> None:
    ranks(1, capture_the_round_trip)


# gpu_allreduce, gpu_broadcast


def insist_on_gpu(group: Any) -> None:
    gpu = emulated_gpu()
    x = gpu.array(np.full(3, group.rank + 1.0))
    for function in (fd.gpu_allreduce, fd.gpu_broadcast):
        name = function.__name__
        with pytest.raises(InvalidArray, match=f"ferro_dist.{name.removeprefix('gpu_')}") as told:
            function(np.ones(3), group)
        assert (told.value.op, told.value.rank) == (name, group.rank)
        os.environ.pop(VARIABLE, None)
        with pytest.raises(UnsupportedOp, match="HybridBackend"):
            function(x, group)
    os.environ[VARIABLE] = "1"
    y, texts = warnings_of(lambda: fd.gpu_allreduce(x, group, "max"))
    assert (y.numpy().tolist(), len(texts)) == ([2.0] * 3, 1)
    assert texts[0].startswith("gpu_allreduce of a GPU array")
    y, texts = warnings_of(lambda: fd.gpu_broadcast(x, group, 1, async_op=True).result())
    assert (y.numpy().tolist(), len(texts)) == ([2.0] * 3, 1)
    assert texts[0].startswith("gpu_broadcast of a GPU array")


def test_gpu_collectives_insist_on_arrays_of_a_gpu() -> None:
    ranks(2, insist_on_gpu)


def refuse_reductions(group: Any) -> None:
    os.environ[VARIABLE] = "1"
    gpu = emulated_gpu()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for op in REDUCING:
            with pytest.raises(UnsupportedOp, match="mean of integers"):
                call(op, group, gpu.array(np.ones(2, np.int32)), reduce_op="mean")
    assert fd.allreduce(np.ones(1), group)[0] == group.world_size


def test_what_the_host_refuses_is_refused() -> None:
    ranks(2, refuse_reductions)
