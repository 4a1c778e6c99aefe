"""Results for libraries whose arrays are immutable, in the memory of a GPU, which is emulated."""

from __future__ import annotations

import contextlib
import sys
import types
from typing import Any

import numpy as np
import pytest

from ferro_dist import interop
from ferro_dist.testing import emulated_gpu, run_ranks

DELAY_US = 2_000  # of every operation in a stream: far more than a call takes


class GpuArrayOfJax:
    """What JAX shows of an array on a GPU, which it cannot make on this machine."""

    def __init__(self, array: Any) -> None:
        self.array = array
        self.shape, self.dtype = array.shape, array.dtype

    def devices(self) -> set[str]:
        return {"gpu"}

    def block_until_ready(self) -> None:
        emulated_gpu().synchronize()

    def __dlpack_device__(self) -> tuple[int, int]:
        device: tuple[int, int] = self.array.__dlpack_device__()
        return device

    def __dlpack__(self, **options: Any) -> Any:
        if "stream" in options:
            raise RuntimeError("cudaErrorInvalidResourceHandle")  # of -1, which it does not know
        return self.array.__dlpack__(stream=-1, **options)

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        """Says where the array is, computed or not; some dtypes have no name there."""
        return {**self.array.__cuda_array_interface__, "version": 2, "stream": None}


GpuArrayOfJax.__module__ = "jaxlib._jax"


def library_like_jax(stream: Any, is_told: bool) -> types.ModuleType:
    """Make a module whose ``dlpack.from_dlpack`` reads in a stream of its own, as XLA does.

    Some of XLA's clients do not tell which stream that is.
    """

    def from_dlpack(external: Any, device: Any = None) -> np.ndarray[Any, Any]:
        gpu = emulated_gpu()
        external.__dlpack__(stream=stream.handle if is_told else None)
        with stream:
            return gpu.copy_out(array_at(external))

    module = types.ModuleType("jax")
    module.enable_x64 = contextlib.nullcontext  # type: ignore[attr-defined]
    module.dlpack = types.SimpleNamespace(from_dlpack=from_dlpack)  # type: ignore[attr-defined]
    return module


def array_at(external: Any) -> Any:
    from ferro_dist._native.emulated_array import EmulatedArray

    memory = emulated_gpu().empty(1).memory
    return EmulatedArray(memory, external.address, external.shape, None, external.dtype, 0)


def reduce_like_jax(rank: int, world_size: int, addr: str, dtype: str, is_told: bool) -> None:
    from gpu.gpu_ranks import connect

    import ferro_dist as fd
    from ferro_dist._native.cuda_memory import copy_async

    gpu = emulated_gpu()
    sys.modules["jax"] = library_like_jax(gpu.stream(), is_told)
    with connect("nccl", rank, world_size, addr) as group:
        values = np.arange(6).reshape(2, 3).astype(interop.numpy_dtype(interop.dtype_code(dtype)))
        with gpu.stream():  # one that no other waits for
            source, computed = gpu.array(values), gpu.array(np.zeros_like(values))
            gpu.set_delay(DELAY_US)
            for part in (0, 0, 0, 0, values.nbytes):  # the last comes long after a call's own delay
                copy_async(computed.address, source.address, part, gpu.current_stream)
        x: Any = GpuArrayOfJax(computed)
        for result, wanted in (
            (fd.allreduce(x, group), 2 * values),
            (fd.allreduce(x, group, async_op=True).result(), 2 * values),
            (fd.all_gather(x, group), np.concatenate([values] * 2)),
        ):
            assert (result.shape, result.dtype) == (wanted.shape, values.dtype)
            np.testing.assert_array_equal(result, wanted)
        gpu.set_delay(0)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("is_told", [True, False], ids=["its stream", "no stream"])
def test_results_like_a_gpu_array_of_jax_stay_there_and_are_in_order(
    dtype: str, is_told: bool
) -> None:
    run_ranks(2, reduce_like_jax, dtype, is_told, backend="none", emulate_gpu=True)


def export(rank: int, world_size: int, addr: str) -> None:
    from ferro_dist._native.device_array import DeviceArray

    emulated_gpu()
    array = DeviceArray((2, 0, 3), "float64", 0)
    view = interop.as_output(array)
    assert (view.count, view.device_type, view.device_id) == (0, 2, 0)
    view = interop.as_output(DeviceArray((), "complex64", 0))
    assert (view.count, view.itemsize) == (1, 8)
    capsule = array.__dlpack__(stream=-1)
    del array, capsule  # nobody took it
    with pytest.raises(BufferError):
        DeviceArray((1,), "int8", 0).__dlpack__(copy=True)
    with pytest.raises(ValueError, match="64 axes"):
        DeviceArray((1,) * 65, "int8", 0)


def test_exports_say_what_the_array_is() -> None:
    run_ranks(1, export, backend="none", emulate_gpu=True)
