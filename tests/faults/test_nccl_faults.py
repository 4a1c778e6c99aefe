"""Faults of NCCL that are met by a call or by nobody, over emulated GPUs."""

from __future__ import annotations

import contextlib
import threading
import time
from typing import Any

import pytest
from nccl_ranks import TIMEOUT_S, connect, ranked

from ferro_dist import interop
from ferro_dist.errors import DistributedError, LockPoisoned
from ferro_dist.reduce_op import ReduceOp
from ferro_dist.testing import emulated_gpu, run_ranks

SUM = ReduceOp.SUM


def ranks(world_size: int, body: Any, *args: Any) -> list[Any]:
    return run_ranks(world_size, body, *args, emulate_gpu=True)


def make_group(backend: Any, faults: str = "") -> Any:
    communicator = connect(backend)
    emulated_gpu().set_faults(faults)
    from ferro_dist._native.nccl_group import NcclGroup

    return NcclGroup(communicator, interop)


def call_until_it_raises(group: Any, x: Any) -> DistributedError:
    """Go on until an error is met, as the watchdog needs a moment to find one."""
    deadline = time.monotonic() + TIMEOUT_S
    try:
        while time.monotonic() < deadline:
            group.allreduce(x, x, SUM, False, None, 0)
            group.synchronize(TIMEOUT_S)
    except DistributedError as error:
        return error
    raise AssertionError(f"no error for {TIMEOUT_S} s")


def meet_fault(backend: Any, act: str) -> list[str]:
    group = make_group(backend, f"point=allreduce,hit=2,act={act}")
    x = ranked(backend.rank)
    first = call_until_it_raises(group, x)
    with pytest.raises(LockPoisoned) as later:
        group.allreduce(x, x, SUM, False, None, 0)
    cause = later.value.__cause__
    group.close()
    group.close()
    return [type(first).__name__, type(cause).__name__]


@pytest.mark.parametrize(
    ("act", "expected"),
    [
        ("remote_error", "PeerLostError"),
        ("async_error", "Io"),
        ("system_error", "Io"),
    ],
)
def test_fault_ends_the_group_with_its_first_error(act: str, expected: str) -> None:
    assert ranks(2, meet_fault, act) == [[expected, expected]] * 2


def notice_without_calling(backend: Any) -> bool:
    group = make_group(backend, "point=allreduce,act=async_error")
    x = ranked(backend.rank)
    with contextlib.suppress(DistributedError):  # where the error is there before the call is
        group.allreduce(x, x, SUM, False, None, 0)
    deadline = time.monotonic() + TIMEOUT_S
    while not group.communicator.is_closed and time.monotonic() < deadline:
        pass  # no call of NCCL from this thread: the watchdog is on its own
    was_aborted = group.communicator.is_closed
    group.close()
    return bool(was_aborted)


def test_watchdog_aborts_a_communicator_whose_error_nobody_met() -> None:
    assert ranks(2, notice_without_calling) == [True, True]


def abort_under_load(backend: Any) -> str:
    group = make_group(backend)
    emulated_gpu().set_delay(200)
    x = ranked(backend.rank)
    raised: list[BaseException] = []

    def call() -> None:
        raised.append(call_until_it_raises(group, x))

    thread = threading.Thread(target=call)
    thread.start()
    backend.barrier(False, None, 0)
    group.abort()
    thread.join(TIMEOUT_S)
    assert not thread.is_alive()
    group.close()
    emulated_gpu().set_delay(0)
    return type(raised[0]).__name__


def test_abort_under_load_ends_the_thread_that_calls() -> None:
    assert ranks(2, abort_under_load) == ["ChannelClosed", "ChannelClosed"]


def close_with_work_in_flight(backend: Any) -> list[float]:
    gpu = emulated_gpu()
    group = make_group(backend)
    gpu.set_delay(1_000)
    x = ranked(backend.rank, 2)
    for _ in range(20):
        group.allreduce(x, x, SUM, True, None, 0)
    group.close()
    gpu.set_delay(0)
    values: list[float] = gpu.copy_out(x).tolist()
    return values


def test_close_waits_for_work_in_flight() -> None:
    # 0 + 1 and 1 + 2, doubled by each of the 19 calls that follow.
    expected = [float(2**19), float(3 * 2**19)]
    assert ranks(2, close_with_work_in_flight) == [expected] * 2
