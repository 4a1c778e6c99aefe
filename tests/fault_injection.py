"""What the fault tests share: ranks that die at a chosen moment, and what the others say of it."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any

import numpy as np
from leaks import settled

import ferro_dist as fd
from ferro_dist import Backend
from ferro_dist.errors import DistributedError

# What must come well before a test's own deadline; nothing here takes a second.
PATIENCE_S = 60.0
# What is over long before somebody's patience, on any machine.
SOON_S = PATIENCE_S / 2
# Half of what ranks listen to each other for when their group has ended.
TOGETHER_S = 0.25
MAX_RUNS = 30

COLLECTIVES = (
    "all_gather",
    "all_to_all",
    "all_to_all_uneven",
    "allreduce",
    "barrier",
    "broadcast",
    "gather",
    "reduce",
    "reduce_scatter",
    "scatter",
)
MESSAGES = ("send_recv", "sendrecv", "batch")


@dataclass(frozen=True)
class Told:
    """What an error says, in a form that travels between processes."""

    kind: str
    message: str
    op: str | None
    rank: int | None
    peer: int | None
    sequence: int | None
    missing: tuple[int, ...]
    cause: str


def told(error: BaseException) -> Told:
    return Told(
        kind=type(error).__name__,
        message=str(error),
        op=getattr(error, "op", None),
        rank=getattr(error, "rank", None),
        peer=getattr(error, "peer", None),
        sequence=getattr(error, "sequence", None),
        missing=tuple(getattr(error, "missing", ())),
        cause=type(error.__cause__).__name__,
    )


def error_of(call: Callable[[], Any]) -> Told:
    """Return what `call` raised."""
    try:
        outcome = call()
    except (DistributedError, KeyboardInterrupt) as error:
        return told(error)
    raise AssertionError(f"no error, but {outcome!r}")


def call_of(op: str, backend: Backend, count: int) -> Callable[[], Any]:
    """Return a call without arguments of the operation named, with `count` floats per rank."""
    size, rank = backend.world_size, backend.rank
    chunk = np.ones(count, np.float32)
    chunks = np.ones(count * size, np.float32)
    right, left = (rank + 1) % size, (rank - 1) % size
    out = np.empty_like(chunk)

    def send_recv() -> None:
        if rank % 2 == 0:
            fd.send(chunk, backend, right)
            fd.recv(out, backend, left)
        else:
            fd.recv(out, backend, left)
            fd.send(chunk, backend, right)

    def uneven() -> None:
        sent = [count * (1 + (rank + peer) % 2) for peer in range(size)]
        fd.all_to_all(np.ones(sum(sent), np.float32), backend, send_counts=sent, recv_counts=sent)

    calls: dict[str, Callable[[], Any]] = {
        "all_gather": lambda: fd.all_gather(chunk, backend),
        "all_to_all": lambda: fd.all_to_all(chunks, backend),
        "all_to_all_uneven": uneven,
        "allreduce": lambda: fd.allreduce(chunk, backend),
        "barrier": lambda: fd.barrier(backend),
        "broadcast": lambda: fd.broadcast(chunk, backend, root=size - 1),
        "gather": lambda: fd.gather(chunk, backend, root=0),
        "reduce": lambda: fd.reduce(chunk, backend, root=0),
        "reduce_scatter": lambda: fd.reduce_scatter(chunks, backend),
        "scatter": lambda: fd.scatter(chunks if rank == 0 else None, backend, out=out),
        "send_recv": send_recv,
        "sendrecv": lambda: fd.sendrecv(chunk, out, backend, right, left),
        "batch": lambda: fd.batch(
            [fd.P2POp("send", chunk, right), fd.P2POp("recv", out, left)], backend
        ),
    }
    return calls[op]


def public_name(op: str) -> str:
    """Return the name by which errors know the operation."""
    return "all_to_all" if op == "all_to_all_uneven" else op


def meet(backend: Backend, victim: int) -> None:
    """Wait for all. The victim waits until nobody is on the way out of here any more."""
    fd.barrier(backend)
    nothing = np.empty(0)
    if backend.rank != victim:
        fd.send(nothing, backend, victim)
        return
    for peer in range(backend.world_size):
        if peer != victim:
            fd.recv(nothing, backend, peer)


def state_of(pid: int) -> str:
    """Return the letter that the kernel has for the state of a process's main thread."""
    with open(f"/proc/{pid}/stat", encoding="ascii") as file:
        return file.read().rpartition(")")[2].split()[0]


def wait_until_called(name: str, count: int = 1) -> None:
    """Return once so many threads of this process are in a Python function of that name."""
    found = settled(lambda: _num_threads_in(name), count)
    assert found == count, f"{found} threads are in {name}, not {count}"


def _num_threads_in(name: str) -> int:
    return sum(_is_in_call(frame, name) for frame in sys._current_frames().values())


def _is_in_call(frame: FrameType | None, name: str) -> bool:
    while frame is not None and frame.f_code.co_name != name:
        frame = frame.f_back
    return frame is not None


@dataclass(frozen=True)
class Lesson:
    """When a rank learnt of its group's end, and for how long it had been kept from running."""

    learnt_s: float  # on the clock that all processes share
    stalled_s: float


class Pulse:
    """Notes, while a rank waits for its group's end, whether the machine keeps it from running."""

    def __init__(self) -> None:
        self._is_over = threading.Event()
        self._longest_s = 0.0
        self._thread = threading.Thread(target=self._beat, daemon=True)
        self._thread.start()

    def _beat(self) -> None:
        last_s = time.monotonic()
        is_over = False
        while not is_over:
            is_over = self._is_over.wait(TOGETHER_S / 10)
            now_s = time.monotonic()
            self._longest_s = max(self._longest_s, now_s - last_s)
            last_s = now_s

    def end(self) -> Lesson:
        learnt_s = time.monotonic()
        self._is_over.set()
        self._thread.join()
        return Lesson(learnt_s, self._longest_s)


def run_undisturbed(
    run: Callable[[], list[Any]], lessons: Callable[[list[Any]], Sequence[Lesson]]
) -> list[Any]:
    """Run ranks, again where the machine kept one from running, or from learning with the others.

    A rank that does not run has stopped, for all that the others can know, and they name it. The
    last of these runs is returned as it is, for the test to judge.
    """
    for _ in range(MAX_RUNS):
        outcomes = run()
        learnt = lessons(outcomes)
        moments = [lesson.learnt_s for lesson in learnt]
        stalled_s = max(lesson.stalled_s for lesson in learnt)
        if max(stalled_s, max(moments) - min(moments)) < TOGETHER_S:
            break
    return outcomes


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def die_within(seconds: float) -> None:
    """Be killed in `seconds`, whatever this process does then."""
    thread = threading.Timer(seconds, die)
    thread.daemon = True
    thread.start()
