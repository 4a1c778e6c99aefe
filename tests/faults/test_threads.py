"""Several threads of one rank: closing under a call, one group each, and one group for two."""

from __future__ import annotations

import functools
import random
import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

import numpy as np
import pytest
from fault_injection import PATIENCE_S, Told, error_of, told

import ferro_dist as fd
from ferro_dist.errors import DistributedError
from ferro_dist.testing import run_ranks

LARGE = 3_000_000

CALLS: dict[str, Callable[[fd.Backend], Any]] = {
    "barrier": fd.barrier,
    "allreduce": lambda b: fd.allreduce(np.ones(LARGE, np.float32), b),
    "recv": lambda b: fd.recv(np.empty(2), b, 1),
    "send": lambda b: fd.send(np.ones(LARGE), b, 1),
    "work": lambda b: fd.barrier(b, async_op=True).wait(),
    "receive work": lambda b: fd.recv(np.empty(2), b, 1, async_op=True).wait(),
    "behind work": lambda b: (fd.barrier(b, async_op=True), fd.barrier(b)),
}


class Thread(threading.Thread):
    """A thread whose result, or error of ours, is returned by `outcome`."""

    def __init__(self, call: Callable[[], Any]) -> None:
        super().__init__(daemon=True)
        self._call = call
        self._outcome: Any = None
        self.start()

    def run(self) -> None:
        try:
            self._outcome = self._call()
        except DistributedError as error:
            self._outcome = told(error)

    def outcome(self) -> Any:
        self.join(PATIENCE_S)
        assert not self.is_alive(), "a thread hangs"
        return self._outcome


def close_under(backend: fd.Backend, name: str) -> list[Told]:
    if backend.rank == 1:
        return [error_of(lambda: fd.recv(np.empty(9), backend, 2))]
    if backend.rank == 2:
        return [error_of(lambda: fd.recv(np.empty(9), backend, 1))]
    is_on_its_way = threading.Event()

    def call() -> Any:
        is_on_its_way.set()
        return CALLS[name](backend)

    thread = Thread(call)
    is_on_its_way.wait()
    # From here the call is anywhere between its first instruction and its sleep.
    threading.Event().wait(random.Random(name).uniform(0, 0.02))
    # The peers miss something even if the call has yet to begin.
    fd.recv(np.empty(1), backend, 1, async_op=True)
    backend.close()
    outcome = thread.outcome()
    backend.close()
    return [outcome, error_of(lambda: fd.barrier(backend)), error_of(lambda: fd.barrier(backend))]


@pytest.mark.parametrize("transport", ["host", "tcp"])
@pytest.mark.parametrize("name", CALLS)
def test_close_ends_the_call_of_another_thread(name: str, transport: str) -> None:
    outcomes = run_ranks(3, close_under, name, backend=transport)
    for outcome in outcomes[0]:
        assert outcome.kind == "ChannelClosed", outcome
        assert "This rank has closed the group" in outcome.message
    for (outcome,) in outcomes[1:]:
        assert (outcome.kind, outcome.peer) == ("ChannelClosed", 0), outcome


def call_while_another_is_refused(backend: fd.Backend) -> list[Told]:
    errors = []

    def call_too(frame: FrameType, _event: str, _arg: object) -> None:
        if frame.f_code.co_name == "closed_error":
            sys.setprofile(None)
            errors.append(error_of(lambda: fd.barrier(backend)))

    backend.close()
    sys.setprofile(call_too)
    errors.append(error_of(lambda: fd.barrier(backend, async_op=True)))
    return errors


@pytest.mark.parametrize("transport", ["host", "tcp"])
def test_a_call_may_be_made_while_another_is_being_refused(transport: str) -> None:
    """As by another thread, to which the one that makes the error lets go of the interpreter."""
    for errors in run_ranks(2, call_while_another_is_refused, backend=transport):
        assert [error.kind for error in errors] == ["ChannelClosed"] * 2


def test_groups_close_under_calls_at_any_moment() -> None:
    moment = random.Random(1)
    names = list(CALLS)
    for i in range(100):
        group = fd.SimulatedBackend.create_group(2)
        call = CALLS[names[i % len(names)]]
        ranks = [Thread(functools.partial(call, backend)) for backend in group]
        if moment.random() < 0.5:
            threading.Event().wait(moment.uniform(0, 0.001))
        closers = [Thread(backend.close) for backend in group for _ in range(2)]
        for thread in [*closers, *ranks]:
            outcome = thread.outcome()
            # Rank 1 may not send to itself; all others were closed, or came too late.
            kinds = ("ChannelClosed", "LockPoisoned", "SelfSend")
            assert not isinstance(outcome, Told) or outcome.kind in kinds, outcome


def use_two_groups(backend: fd.Backend) -> list[float]:
    again = backend.split(range(backend.world_size))
    assert again is not None

    def sums(group: fd.Backend, value: float) -> float:
        total = 0.0
        for i in range(200):
            total += float(fd.allreduce(np.full(1 + 1000 * (i % 2), value), group)[0])
        return total

    threads = [
        Thread(functools.partial(sums, group, value))
        for value, group in enumerate([backend, again], 1)
    ]
    return [thread.outcome() for thread in threads]


@pytest.mark.parametrize("transport", ["host", "tcp"])
def test_two_threads_use_two_groups_at_once(transport: str) -> None:
    outcomes = run_ranks(3, use_two_groups, backend=transport)
    assert outcomes == [[600.0, 1200.0]] * 3


def share_one_group(backend: fd.Backend) -> list[Any]:
    peer = 1 - backend.rank

    def collectives() -> float:
        # Both threads call the same: it does not matter which of them meets which.
        return sum(float(fd.allreduce(np.ones(5), backend)[0]) for _ in range(300))

    def messages() -> float:
        total = 0.0
        out = np.empty(3)
        for _ in range(300):
            fd.sendrecv(np.ones(3), out, backend, peer, peer)
            total += float(out[0])
        return total

    threads = [Thread(call) for call in (collectives, collectives, messages, messages)]
    return [thread.outcome() for thread in threads]


def answer_while_the_other_thread_waits(backend: fd.Backend) -> list[Any]:
    peer = 1 - backend.rank
    answers = []
    for size in (1, 1000, 500_000):
        question, answer = np.full(size, 7.0), np.zeros(size)
        if backend.rank == 1:
            fd.recv(answer, backend, peer)
            fd.send(answer + 1, backend, peer)
            continue
        receiver = Thread(functools.partial(fd.recv, answer, backend, peer))
        fd.send(question, backend, peer)
        answers.append(float(receiver.outcome().mean()))
    return answers


@pytest.mark.parametrize("transport", ["host", "tcp"])
def test_a_thread_sends_while_another_receives(transport: str) -> None:
    outcomes = run_ranks(2, answer_while_the_other_thread_waits, backend=transport)
    assert outcomes == [[8.0] * 3, []]


def end_under_two_threads(backend: fd.Backend, how: str) -> list[Told]:
    if backend.rank != 0:
        return [error_of(lambda: fd.recv(np.empty(1), backend, 0))]
    waits = [Thread(functools.partial(fd.recv, np.empty(1), backend, peer)) for peer in (1, 2)]
    if how == "timeout":
        own = error_of(lambda: fd.recv(np.empty(1), backend, 2, timeout=0.2))
        return [own, *(thread.outcome() for thread in waits)]
    backend.close()
    return [thread.outcome() for thread in waits]


@pytest.mark.parametrize("transport", ["host", "tcp"])
@pytest.mark.parametrize("how", ["timeout", "close"])
def test_the_end_of_a_group_reaches_all_threads_inside(how: str, transport: str) -> None:
    outcomes = run_ranks(3, end_under_two_threads, how, backend=transport)
    # A thread, or a rank, that only comes when all is over finds that instead.
    kinds = ("Timeout", "LockPoisoned") if how == "timeout" else ("ChannelClosed",)
    for outcome in [outcome for outcomes_of_rank in outcomes for outcome in outcomes_of_rank]:
        assert outcome.kind in kinds, outcome


@pytest.mark.parametrize("transport", ["host", "tcp"])
def test_a_group_serializes_the_calls_of_several_threads(transport: str) -> None:
    outcomes = run_ranks(2, share_one_group, backend=transport)
    assert outcomes == [[600.0, 600.0, 300.0, 300.0]] * 2
