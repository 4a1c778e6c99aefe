"""Signals inside every wait: Ctrl-C ends it, other handlers do not, and the peers are told."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from functools import partial
from types import FrameType
from typing import Any

import numpy as np
import pytest
from fault_injection import PATIENCE_S, SOON_S, Told, error_of, state_of, told

import ferro_dist as fd
from ferro_dist.errors import DistributedError
from ferro_dist.testing import RankDeath, run_ranks

LARGE = 3_000_000

# What each makes, which may sleep on the way, and returns: the call that waits.
WAITS: dict[str, Callable[[fd.Backend], Callable[[], Any]]] = {
    "allreduce": lambda b: partial(fd.allreduce, np.ones(LARGE, np.float32), b),
    "barrier": lambda b: partial(fd.barrier, b),
    "recv": lambda b: partial(fd.recv, np.empty(2), b, 1),
    "send": lambda b: partial(fd.send, np.ones(LARGE), b, 1),
    "batch": lambda b: partial(
        fd.batch, [fd.P2POp("recv", np.empty(2), peer) for peer in (1, 2)], b
    ),
    "work": lambda b: fd.allreduce(np.ones(2), b, async_op=True).wait,
    "recv work": lambda b: fd.recv(np.empty(2), b, 1, async_op=True).wait,
    "behind work": lambda b: behind(fd.barrier(b, async_op=True), b),
    "split": lambda b: partial(b.split, [0, 1]),
}


def behind(_work: fd.Work, backend: fd.Backend) -> Callable[[], Any]:
    return partial(fd.allreduce, np.ones(2), backend)


class Signaller:
    """Lets one rank send a signal to another once that one waits.

    The target announces a call in the pipe; from then on its main thread sleeps only in the call.
    """

    def __init__(self, backend: fd.Backend, fifo: str, *, sender: int, target: int) -> None:
        pids = fd.all_gather(np.array([os.getpid()]), backend)
        self._pid = int(pids[target])
        if backend.rank in (sender, target):
            self._file = os.open(fifo, os.O_WRONLY if backend.rank == target else os.O_RDONLY)
        # No rank is still on its way out of a collective when the target ends the group.
        for peer in range(backend.world_size):
            if peer != sender and backend.rank == sender:
                fd.recv(np.empty(0), backend, peer)
            if peer == backend.rank != sender:
                fd.send(np.empty(0), backend, sender)

    def announce(self) -> None:
        os.write(self._file, b"!")

    def await_announcement(self) -> None:
        assert os.read(self._file, 1) == b"!"

    def send(self, number: signal.Signals) -> float:
        """Return when, on the clock that all processes share."""
        self.await_announcement()
        while state_of(self._pid) != "S":
            os.sched_yield()
        now = time.monotonic()
        os.kill(self._pid, number)
        return now


def wait_in_vain(backend: fd.Backend) -> Told:
    """Receive what nobody sends: nothing that rank 0 does can end it well."""
    peer = 0 if backend.world_size == 2 else 3 - backend.rank
    return error_of(lambda: fd.recv(np.empty(5), backend, peer))


def be_interrupted(backend: fd.Backend, wait: str, fifo: str) -> tuple[Told, float, Told | None]:
    signaller = Signaller(backend, fifo, sender=1, target=0)
    if backend.rank == 1:
        sent_s = signaller.send(signal.SIGINT)
        return wait_in_vain(backend), sent_s, None
    if backend.rank == 2:
        return wait_in_vain(backend), 0.0, None
    call = WAITS[wait](backend)
    signaller.announce()
    error = error_of(call)
    raised_s = time.monotonic()
    with backend:
        # A wait for work may be repeated, and ends nothing.
        later = None if "work" in wait else error_of(lambda: fd.barrier(backend))
    return error, raised_s, later


@pytest.mark.parametrize("transport", ["host", "tcp"])
@pytest.mark.parametrize("wait", WAITS)
def test_ctrl_c_ends_the_wait_and_peers_are_told_whose(
    wait: str, transport: str, fifo: str
) -> None:
    outcomes = run_ranks(3, be_interrupted, wait, fifo, backend=transport)
    (error, raised_s, later), (_, sent_s, _) = outcomes[:2]
    assert error.kind == "KeyboardInterrupt"
    # The contract says 200 ms, of which a busy machine knows nothing.
    assert raised_s - sent_s < SOON_S
    for peer_error, _, _ in outcomes[1:]:
        assert (peer_error.kind, peer_error.peer) == ("ChannelClosed", 0), peer_error
        assert "rank 0" in peer_error.message
    if later is not None:
        assert later.kind == "LockPoisoned"
        assert "KeyboardInterrupt" in later.message


def interrupt_the_making(rank: int, world_size: int, addr: str, target: int, fifo: str) -> str:
    # The pipe's other end is the only sign of life of the target: no group exists yet.
    if rank == target:
        file = os.open(fifo, os.O_WRONLY)
        os.write(file, b"%d!" % os.getpid())
        try:
            fd.HostBackend(rank, world_size, addr)
        except KeyboardInterrupt:
            return "KeyboardInterrupt"
        return "connected"
    file = os.open(fifo, os.O_RDONLY)
    pid = b""
    while not pid.endswith(b"!"):
        pid += os.read(file, 1)
    while state_of(int(pid[:-1])) != "S":
        os.sched_yield()
    os.kill(int(pid[:-1]), signal.SIGINT)
    # It does not come, and neither do we: but we try, with little patience.
    return error_of(lambda: fd.HostBackend(rank, world_size, addr, timeout=2.0)).kind


@pytest.mark.parametrize("target", [0, 1])
def test_ctrl_c_ends_the_making_of_a_group(target: int, fifo: str) -> None:
    outcomes = run_ranks(2, interrupt_the_making, target, fifo, backend="none")
    assert outcomes[target] == "KeyboardInterrupt"
    assert outcomes[1 - target] in ("NoConnection", "Timeout", "ChannelClosed", "PeerLostError")


def go_on_after_signals(backend: fd.Backend, fifo: str) -> tuple[list[float], int]:
    signaller = Signaller(backend, fifo, sender=1, target=0)
    if backend.rank == 1:
        for _ in range(3):
            signaller.send(signal.SIGUSR1)
        return fd.allreduce(np.ones(2), backend).tolist(), 0
    num_signals = 0

    def count(_number: int, _frame: FrameType | None) -> None:
        nonlocal num_signals
        num_signals += 1
        if num_signals < 3:
            signaller.announce()

    signal.signal(signal.SIGUSR1, count)
    signaller.announce()
    return fd.allreduce(np.ones(2), backend).tolist(), num_signals


@pytest.mark.parametrize("transport", ["host", "tcp"])
def test_a_handler_that_does_not_raise_lets_the_wait_go_on(transport: str, fifo: str) -> None:
    outcomes = run_ranks(2, go_on_after_signals, fifo, backend=transport)
    assert outcomes == [([2.0, 2.0], 3), ([2.0, 2.0], 0)]


def call_from_a_handler(backend: fd.Backend, fifo: str) -> tuple[list[float], list[Told]]:
    signaller = Signaller(backend, fifo, sender=1, target=0)
    if backend.rank == 1:
        signaller.send(signal.SIGUSR1)
        signaller.await_announcement()
        result = fd.allreduce(np.ones(2), backend).tolist()
        fd.barrier(backend)
        return result, []
    refused = []
    pending: list[fd.Work] = []

    def call(_number: int, _frame: FrameType | None) -> None:
        refused.append(error_of(lambda: fd.barrier(backend)))
        # Behind this the next would queue, and this itself behind the call that is interrupted.
        pending.append(fd.barrier(backend, async_op=True))
        refused.append(error_of(lambda: fd.barrier(backend)))
        refused.append(error_of(pending[0].wait))
        signaller.announce()

    signal.signal(signal.SIGUSR1, call)
    signaller.announce()
    result = fd.allreduce(np.ones(2), backend).tolist()
    pending[0].wait()
    return result, refused


@pytest.mark.parametrize("transport", ["host", "tcp"])
def test_a_handler_cannot_make_a_collective_inside_another(transport: str, fifo: str) -> None:
    (result, refused), (other, _) = run_ranks(2, call_from_a_handler, fifo, backend=transport)
    assert result == other == [2.0, 2.0]
    assert len(refused) == 3
    for error in refused:
        assert (error.kind, error.op) == ("UnsupportedOp", "barrier")
        assert "which a signal handler has interrupted" in error.message


def leave_from_a_handler(backend: fd.Backend, wait: str, how: str, fifo: str) -> Told:
    signaller = Signaller(backend, fifo, sender=1, target=0)
    if backend.rank == 1:
        signaller.send(signal.SIGTERM)
    if backend.rank > 0:
        return wait_in_vain(backend)

    def leave(_number: int, _frame: FrameType | None) -> None:
        backend.close()
        if how == "exit":
            os._exit(5)

    signal.signal(signal.SIGTERM, leave)
    call = WAITS[wait](backend)
    signaller.announce()
    error = error_of(call)
    assert backend.is_closed
    return error


@pytest.mark.parametrize("transport", ["host", "tcp"])
@pytest.mark.parametrize("wait", ["barrier", "recv", "work", "recv work", "behind work"])
def test_a_handler_may_close_the_group_it_interrupts(wait: str, transport: str, fifo: str) -> None:
    outcomes = run_ranks(3, leave_from_a_handler, wait, "return", fifo, backend=transport)
    assert outcomes[0].kind == "ChannelClosed", outcomes[0]
    assert "This rank has closed the group" in outcomes[0].message
    for peer_error in outcomes[1:]:
        assert (peer_error.kind, peer_error.peer) == ("ChannelClosed", 0), peer_error


def test_a_handler_may_end_the_process(fifo: str) -> None:
    outcomes = run_ranks(3, leave_from_a_handler, "barrier", "exit", fifo, may_die=[0])
    assert outcomes[0] == RankDeath(5)
    for peer_error in outcomes[1:]:
        assert (peer_error.kind, peer_error.peer) == ("ChannelClosed", 0), peer_error


class Fed(Exception):
    """What a handler of these tests raises: any exception ends a wait."""


def raise_from_a_handler(backend: fd.Backend, kind: type[Exception], fifo: str) -> tuple[str, str]:
    signaller = Signaller(backend, fifo, sender=1, target=0)
    if backend.rank == 1:
        signaller.send(signal.SIGALRM)
        return "", wait_in_vain(backend).kind

    def raise_it(_number: int, _frame: FrameType | None) -> None:
        raise kind

    signal.signal(signal.SIGALRM, raise_it)
    signaller.announce()
    try:
        fd.barrier(backend, timeout=PATIENCE_S)
    except kind as error:
        later = error_of(lambda: fd.barrier(backend))
        assert kind.__name__ in later.message
        return type(error).__name__, later.kind
    except DistributedError as error:
        return "", told(error).message
    return "", ""


@pytest.mark.parametrize("kind", [Fed, MemoryError])
def test_any_exception_of_a_handler_ends_the_wait(kind: type[Exception], fifo: str) -> None:
    outcomes = run_ranks(2, raise_from_a_handler, kind, fifo)
    assert outcomes == [(kind.__name__, "LockPoisoned"), ("", "ChannelClosed")]


def split_and_be_struck(backend: fd.Backend, error: type[BaseException]) -> tuple[str, Told]:
    def strike(*_args: Any) -> Any:
        raise error

    if backend.rank == 0:
        # Between the calls that make up a split there is Python, where anything may be raised.
        backend._gather_for_split = strike  # type: ignore[attr-defined]
        try:
            backend.split([0, 1])
        except error as struck:
            return type(struck).__name__, error_of(lambda: fd.barrier(backend))
    return "", error_of(lambda: backend.split([0, 1]))


@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError])
def test_a_split_that_is_broken_off_ends_the_group(error: type[BaseException]) -> None:
    (kind, later), (_, peer_error) = run_ranks(2, split_and_be_struck, error)
    assert kind == error.__name__
    assert later.kind == "LockPoisoned"
    assert error.__name__ in later.message
    assert (peer_error.kind, peer_error.peer) == ("ChannelClosed", 0)
