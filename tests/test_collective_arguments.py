"""Arguments that are none: each is refused by a message that names it, and the group goes on."""

from __future__ import annotations

import contextlib
import copy
import pickle
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import numpy as np
import pytest

import ferro_dist as fd
from ferro_dist.backends.base import Backend
from ferro_dist.errors import (
    CollectiveMismatch,
    InvalidRank,
    InvalidWorldSize,
    SizeMismatch,
    Timeout,
    UnsupportedOp,
)


class Index:
    """An integer that is no int."""

    def __init__(self, value: int) -> None:
        self._value = value

    def __index__(self) -> int:
        return self._value


# No fixture: pytest would hold its group, and with it the memory, until after the test.
@contextlib.contextmanager
def world_of_one() -> Iterator[Backend]:
    (backend,) = fd.SimulatedBackend.create_group(1)
    with backend:
        yield backend
        assert fd.allreduce(np.ones(1), backend) == 1  # whatever was refused


def _barrier(backend: Backend, **options: Any) -> None:
    fd.barrier(backend, **options)


def _allreduce(backend: Backend, **options: Any) -> None:
    fd.allreduce(np.ones(3), backend, **options)


def _scatter(backend: Backend, **options: Any) -> None:
    fd.scatter(np.ones(3), backend, **options)


CALLS = pytest.mark.parametrize("call", [_barrier, _allreduce, _scatter])


@CALLS
@pytest.mark.parametrize("tag", [1.0, 1.5, "1", None, [1]])
def test_a_tag_that_is_no_integer_is_refused(call: Callable[..., None], tag: Any) -> None:
    with world_of_one() as backend, pytest.raises(TypeError, match="tag must be an integer"):
        call(backend, tag=tag)


@CALLS
@pytest.mark.parametrize("tag", [-1, 2**32, 2**70])
def test_a_tag_that_does_not_fit_is_refused(call: Callable[..., None], tag: int) -> None:
    with world_of_one() as backend, pytest.raises(OverflowError, match="tag must be from 0"):
        call(backend, tag=tag)


@CALLS
@pytest.mark.parametrize("tag", [0, 2**32 - 1, np.int64(5), np.uint8(5)])
def test_a_tag_may_be_any_integer_of_32_bits(call: Callable[..., None], tag: int) -> None:
    with world_of_one() as backend:
        call(backend, tag=tag)


class NoNumber:
    """Raises what an array of some library raises that is taken for a number."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    def __add__(self, other: float) -> float:
        raise self._error


@CALLS
@pytest.mark.parametrize(
    "timeout",
    [
        *("5", b"5", [5], 5j, timedelta(seconds=5), True, np.True_, np.ones(2)),
        *(NoNumber(ValueError()), NoNumber(RuntimeError())),
    ],
)
def test_a_timeout_that_is_no_number_is_refused(call: Callable[..., None], timeout: Any) -> None:
    with world_of_one() as backend:
        work = fd.barrier(backend, async_op=True)
        for use in (
            lambda: call(backend, timeout=timeout),
            lambda: setattr(backend, "timeout", timeout),
            lambda: fd.SimulatedBackend.create_group(1, timeout=timeout),
            lambda: work.wait(timeout),
        ):
            with pytest.raises(TypeError, match="timeout must be a number of seconds"):
                use()


@CALLS
@pytest.mark.parametrize(
    "timeout", [0, 0.0, -1, -1.0, pytest.param(-(10**400), id="-huge"), float("nan")]
)
def test_a_timeout_that_is_not_positive_is_refused(
    call: Callable[..., None], timeout: float
) -> None:
    with world_of_one() as backend:
        for use in (
            lambda: call(backend, timeout=timeout),
            lambda: setattr(backend, "timeout", timeout),
            lambda: fd.SimulatedBackend.create_group(1, timeout=timeout),
        ):
            with pytest.raises(ValueError, match="timeout must be a positive number of seconds"):
                use()


@CALLS
@pytest.mark.parametrize("timeout", [float("inf"), pytest.param(10**400, id="huge")])
def test_a_timeout_may_be_endless(call: Callable[..., None], timeout: float) -> None:
    with world_of_one() as backend:
        call(backend, timeout=timeout)
    with fd.HostBackend(0, 1, None, timeout=timeout) as alone:
        call(alone)


@pytest.mark.parametrize("timeout", [-1, float("nan")])
def test_work_cannot_be_awaited_for_less_than_no_time(timeout: float) -> None:
    with world_of_one() as backend:
        work = fd.allreduce(np.ones(1), backend, async_op=True)
        with pytest.raises(ValueError, match="seconds of at least 0, not"):
            work.wait(timeout)
        work.wait()


@CALLS
@pytest.mark.parametrize("timeout", [1, 0.5, np.float32(1), np.int16(1), float("inf"), Index(1)])
def test_a_timeout_may_be_any_positive_number(call: Callable[..., None], timeout: float) -> None:
    with world_of_one() as backend:
        call(backend, timeout=timeout)


@pytest.mark.parametrize("one", [1, np.int64(1), np.uint8(1), Index(1)])
def test_an_integer_may_be_of_any_type(one: Any) -> None:
    group = fd.SimulatedBackend.create_group(one.__class__(2))
    x = np.ones(2)
    other = threading.Thread(target=play_rank_1, args=(group[1], x), daemon=True)
    other.start()
    fd.broadcast(x, group[0], root=one, tag=one, timeout=one)
    for rooted in (fd.reduce, fd.gather):
        rooted(x, group[0], root=one)
    fd.scatter(None, group[0], root=one, out=np.empty(1))
    fd.send(x, group[0], one, tag=one)
    fd.recv(x, group[0], one)
    fd.sendrecv(x, np.empty(2), group[0], one, one)
    fd.batch([fd.P2POp("send", x, one)], group[0])
    counts = [one, one]
    fd.all_to_all(x, group[0], send_counts=counts, recv_counts=counts)
    assert group[0].split([one]) is None
    other.join()


def play_rank_1(backend: fd.Backend, x: Any) -> None:
    fd.broadcast(x, backend, root=1, tag=1)
    for rooted in (fd.reduce, fd.gather):
        rooted(x, backend, root=1)
    fd.scatter(x, backend, root=1)
    fd.recv(x.copy(), backend, 0, tag=1)
    fd.send(x, backend, 0)
    fd.sendrecv(x, np.empty(2), backend, 0, 0)
    fd.recv(x.copy(), backend, 0)
    fd.all_to_all(x, backend, send_counts=[1, 1], recv_counts=[1, 1])
    backend.split([1])


@pytest.mark.parametrize("no", [True, np.True_])
def test_a_bool_is_no_integer(no: Any) -> None:
    x = np.ones(1)
    with world_of_one() as backend:
        for error, use in (
            (InvalidRank, lambda: fd.broadcast(x, backend, root=no)),
            (InvalidRank, lambda: fd.send(x, backend, no)),
            (InvalidRank, lambda: backend.split([no])),
            (InvalidWorldSize, lambda: fd.SimulatedBackend.create_group(no)),
            (InvalidWorldSize, lambda: fd.HostBackend(0, no, None)),
            (InvalidRank, lambda: fd.HostBackend(not no, 1, None)),
            (TypeError, lambda: fd.barrier(backend, tag=no)),
            (SizeMismatch, lambda: fd.all_to_all(x, backend, send_counts=[no], recv_counts=[no])),
        ):
            with pytest.raises(error):
                use()


@pytest.mark.parametrize(
    ("ops", "message"),
    [
        ([1], "holds 1"),
        ([(True, np.ones(1), 0)], "holds "),
        (None, "not None"),
        (5, "not 5"),
        ({fd.P2POp("send", "an array", 1)}, "not {P2POp('send', 'an array', 1)}"),
        (fd.P2POp("recv", np.ones(1), 0), "not P2POp('recv', array([1.]), 0)"),
    ],
)
def test_a_batch_of_no_messages_is_refused(ops: Any, message: str) -> None:
    with (
        world_of_one() as backend,
        pytest.raises(TypeError, match="ops must be a sequence of P2POp") as told,
    ):
        fd.batch(ops, backend)
    assert message in str(told.value)


@pytest.mark.parametrize("members", [None, 0, 1.5, {0}, {0: 1}, b"\0", "0"])
def test_members_that_are_no_sequence_are_refused(members: Any) -> None:
    with (
        world_of_one() as backend,
        pytest.raises(TypeError, match="members must be a sequence of ranks, not"),
    ):
        backend.split(members)


def test_members_may_be_the_keys_of_a_mapping() -> None:
    hosts: Any = {0: "a"}
    with world_of_one() as backend:
        part = backend.split(hosts.keys())
        assert part is not None
        part.close()


@pytest.mark.parametrize("shape", [2.5, "3", "", b"\x02", None, {2, 3}, (2, 3.0), True, (2, True)])
def test_a_shape_that_is_none_is_refused(shape: Any) -> None:
    with (
        world_of_one() as backend,
        pytest.raises(TypeError, match="shape must be an integer or a sequence of them"),
    ):
        fd.empty(shape, "float32", backend)


@pytest.mark.parametrize("shape", [2**61, 2**64, (2**32, 2**32)])
def test_an_array_larger_than_any_memory_is_refused(shape: Any) -> None:
    with world_of_one() as backend, pytest.raises(MemoryError, match="no room for"):
        fd.empty(shape, "float32", backend)


@pytest.mark.parametrize(
    ("world_size", "error", "text"),
    [
        (5000, UnsupportedOp, "at most 1024 ranks"),
        (2**31 - 1, InvalidWorldSize, "an integer from 1 to 8190"),
    ],
)
def test_more_ranks_than_there_can_be_are_refused(
    world_size: int, error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text):
        fd.SimulatedBackend.create_group(world_size)


@pytest.mark.parametrize("use", [pickle.dumps, copy.copy, copy.deepcopy])
def test_a_backend_is_not_copied(use: Callable[[Backend], Any]) -> None:
    with (
        world_of_one() as backend,
        pytest.raises(TypeError, match="SimulatedBackend cannot be pickled or copied"),
    ):
        use(backend)


@pytest.mark.parametrize("op", [fd.send, True, "isend", None, np.ones(2)])
def test_a_message_of_a_batch_is_sent_or_received(op: Any) -> None:
    with pytest.raises(ValueError, match="op must be 'send' or 'recv'"):
        fd.P2POp(op, np.ones(1), 0)


@pytest.mark.parametrize("backend", [None, "sum", np.ones(2), fd.HostBackend, []], ids=repr)
def test_what_is_no_group_is_named(backend: Any) -> None:
    calls: dict[str, Callable[[], Any]] = {
        "allreduce": lambda: fd.allreduce(np.ones(2), backend),
        "barrier": lambda: fd.barrier(backend),
        "send": lambda: fd.send(np.ones(2), backend, 1),
        "empty": lambda: fd.empty(2, "float32", backend),
        "gpu_allreduce": lambda: fd.gpu_allreduce(np.ones(2), backend),
    }
    for op, call in calls.items():
        with pytest.raises(TypeError, match=f"{op}: backend must be a group"):
            call()


class StandIn:
    """What a program may test its handling of errors with."""

    rank = 0

    def barrier(self, *_: Any) -> None:
        raise Timeout("rank 1 did not come", missing=[1])


def test_the_error_of_a_stand_in_for_a_group_is_raised() -> None:
    stand_in: Any = StandIn()
    with pytest.raises(Timeout, match="barrier: rank 1 did not come") as error:
        fd.barrier(stand_in)
    assert (error.value.rank, error.value.global_ranks) == (0, None)


def test_an_array_in_the_place_of_a_name_or_rank_does_not_fill_the_message() -> None:
    x: Any = np.ones((30, 30))
    with world_of_one() as backend:
        calls: list[Callable[[], Any]] = [
            lambda: fd.allreduce(x, backend, x),
            lambda: fd.broadcast(x, backend, x),
            lambda: fd.barrier(backend, tag=x),
        ]
        for call in calls:
            with pytest.raises((UnsupportedOp, InvalidRank, TypeError)) as error:
                call()
            assert len(str(error.value)) < 200


def test_one_element_is_not_several() -> None:
    with world_of_one() as backend:
        with pytest.raises(SizeMismatch, match="out has 1 element instead of 3"):
            fd.allreduce(np.ones(3), backend, out=np.empty(1))
        with pytest.raises(SizeMismatch, match="out has 2 elements instead of 1"):
            fd.allreduce(np.ones(1), backend, out=np.empty(2))


def test_counts_of_rows_are_told_to_be_elements() -> None:
    x = np.ones((3, 4))
    told = "add up to 3, but x has 12 elements; count elements, not rows"
    with world_of_one() as backend, pytest.raises(SizeMismatch, match=told):
        fd.all_to_all(x, backend, send_counts=[3], recv_counts=[3])


def test_ranks_that_split_for_their_own_part_are_told_how_to() -> None:
    def split(backend: fd.Backend) -> None:
        with pytest.raises(CollectiveMismatch, match="let all ranks call split for each in turn"):
            backend.split([backend.rank])
        fd.barrier(backend)

    group = fd.SimulatedBackend.create_group(2)
    with group[0], group[1], ThreadPoolExecutor(2) as threads:
        list(threads.map(split, group))
