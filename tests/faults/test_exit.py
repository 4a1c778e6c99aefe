"""A process ends without closing its group, at any stage: nothing hangs, nothing crashes."""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys
from collections.abc import Sequence

import pytest

PATIENCE_S = 60.0

PRELUDE = """
import atexit, gc, os, sys, threading
import numpy as np
import ferro_dist as fd

rank, world_size, addr, transport = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4]
kind = {"host": fd.HostBackend, "tcp": fd.TcpBackend}[transport]


def connect():
    return kind(rank, world_size, addr, timeout=40.0)


def in_daemon_thread(call):
    inside = threading.Event()
    def body():
        inside.set()
        try:
            call()
        except Exception:
            pass
    threading.Thread(target=body, daemon=True).start()
    inside.wait()
"""

# How rank 0 leaves, while its peer waits for it.
WAYS_TO_LEAVE = {
    "the end of the program": "backend = connect()",
    "sys.exit": "backend = connect(); sys.exit(0)",
    "the end of a function": """
def main():
    backend = connect()
    fd.barrier(backend)
main()
""",
    "a collective under way": """
backend = connect()
work = fd.allreduce(np.ones(3_000_000), backend, async_op=True)
""",
    "a forgotten collective under way": """
backend = connect()
fd.allreduce(np.ones(3_000_000), backend, async_op=True)
""",
    "many collectives queued": """
backend = connect()
works = [fd.allreduce(np.ones(3), backend, async_op=True) for _ in range(100)]
""",
    "a receive posted": """
backend = connect()
work = fd.recv(np.empty(3), backend, 1, async_op=True)
""",
    "a group dropped with work under way": """
backend = connect()
work = fd.recv(np.empty(3), backend, 1, async_op=True)
fd.allreduce(np.ones(3_000_000), backend, async_op=True)
del backend
gc.collect()
""",
    "a group in a cycle with work under way": """
backend = connect()
backend.itself = backend
backend.work = fd.allreduce(np.ones(3_000_000), backend, async_op=True)
del backend
gc.collect()
""",
    "symmetric arrays alive": """
backend = connect()
x = fd.empty(1000, "float32", backend)
x[:] = 1
sys.modules["kept"] = x
""",
    "a thread in a collective": """
backend = connect()
in_daemon_thread(lambda: fd.allreduce(np.ones(3_000_000), backend))
""",
    "a thread in a receive": """
backend = connect()
in_daemon_thread(lambda: fd.recv(np.empty(3), backend, 1))
""",
    "a thread that waits for work": """
backend = connect()
in_daemon_thread(fd.barrier(backend, async_op=True).wait)
""",
    "threads in two groups": """
backend = connect()
pair = backend.split([0, 1])
in_daemon_thread(lambda: fd.barrier(backend))
in_daemon_thread(lambda: fd.barrier(pair))
""",
    "a thread that calls again and again": """
backend = connect()
def calls():
    while True:
        fd.send(np.empty(7), backend, 1)
in_daemon_thread(calls)
""",
    "an exit handler that still uses the group": """
backend = connect()
def last_words():
    fd.allreduce(np.ones(2), backend, async_op=True)
atexit.register(last_words)
""",
    "a group that only a module holds": """
backend = connect()
sys.modules["kept"] = backend
work = fd.barrier(backend, async_op=True)
""",
    "os._exit": "backend = connect(); fd.recv(np.empty(3), backend, 1, async_op=True); os._exit(0)",
}

# A peer: it waits until rank 0 is gone, and must hear whose fault it is.
WAIT_FOR_RANK_0 = """
backend = connect()
if world_size == 2 and "two groups" in sys.argv[5]:
    pair = backend.split([0, 1])
try:
    while True:
        fd.recv(np.empty(7), backend, 0)
except fd.ChannelClosed as error:
    assert error.peer == 0, error
"""
WAIT_IN_BARRIERS = """
backend = connect()
try:
    while True:
        fd.barrier(backend)
except fd.ChannelClosed as error:
    assert error.peer == 0, error
"""


class Interpreters:
    """Ranks as real programs: their interpreters end as users' do."""

    def __init__(self, transport: str = "host", world_size: int = 2, about: str = "") -> None:
        addr = f"unix:@ferro-dist-test-{secrets.token_hex(8)}"
        self._arguments = [str(world_size), addr, transport, about]
        self._environment = {**os.environ, "FERRO_DIST_TOKEN": secrets.token_hex(16)}
        self._processes: list[subprocess.Popen[str]] = []

    def start(self, rank: int, program: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-X", "dev", "-c", PRELUDE + program, str(rank), *self._arguments],
            env=self._environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self._processes.append(process)
        return process

    def ends(self) -> list[tuple[int, str]]:
        """Return the exit code and what was written to standard error, by process."""
        try:
            outputs = [process.communicate(timeout=PATIENCE_S) for process in self._processes]
        finally:
            for process in self._processes:
                process.kill()
                process.wait()
        codes = [process.returncode for process in self._processes]
        return [(code, errors) for code, (_, errors) in zip(codes, outputs, strict=True)]


@pytest.mark.parametrize("transport", ["host", "tcp"])
@pytest.mark.parametrize("way", WAYS_TO_LEAVE)
def test_a_rank_may_exit_at_any_time(way: str, transport: str) -> None:
    ranks = Interpreters(transport, about=way)
    program = WAYS_TO_LEAVE[way]
    ranks.start(0, program)
    ranks.start(1, WAIT_IN_BARRIERS if "fd.barrier(backend)\n" in program else WAIT_FOR_RANK_0)
    assert ranks.ends() == [(0, ""), (0, "")]


SYMMETRIC = """
backend = connect()
x = fd.empty(1 << 20, "float32", backend)
x[:] = rank
fd.allreduce(x, backend, out=x)
assert x[0] == x[-1] == 1
"""


def test_ranks_may_exit_while_peers_still_look_at_symmetric_arrays() -> None:
    ranks = Interpreters()
    for rank in range(2):
        ranks.start(rank, SYMMETRIC + ("" if rank == 0 else "time = float(x.sum())"))
    assert ranks.ends() == [(0, ""), (0, "")]


@pytest.mark.parametrize("transport", ["host", "tcp"])
def test_an_uncaught_error_ends_the_program_as_any_other(transport: str) -> None:
    ranks = Interpreters(transport)
    ranks.start(0, "backend = connect(); fd.barrier(backend, async_op=True); raise KeyError('x')")
    ranks.start(1, WAIT_FOR_RANK_0)
    (code, errors), peer_end = ranks.ends()
    assert code == 1
    assert errors.splitlines()[-1] == "KeyError: 'x'"
    assert errors.count("Traceback") == 1
    assert peer_end == (0, "")


# The main thread ends while another still makes the group.
LEAVE_RENDEZVOUS = """
in_daemon_thread(connect)
"""


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_may_exit_while_its_group_is_made(rank: int) -> None:
    ranks = Interpreters()
    ranks.start(rank, LEAVE_RENDEZVOUS)
    assert ranks.ends() == [(0, "")]


SIMULATED = {
    "threads in calls": """
group = fd.SimulatedBackend.create_group(3)
in_daemon_thread(lambda: fd.barrier(group[0]))
in_daemon_thread(lambda: fd.recv(np.empty(1), group[1], 2))
""",
    "work under way": """
group = fd.SimulatedBackend.create_group(2)
work = fd.barrier(group[0], async_op=True)
fd.recv(np.empty(3), group[1], 0, async_op=True)
""",
    # Torch, to which it may have to go back through, would not let it be ended there.
    "a thread that must not come back to a dying interpreter": """
group = fd.SimulatedBackend.create_group(2)
recv = fd.recv  # not there: the thread would let go of the GIL while it imports it
def wait():
    try:
        recv(np.empty(1), group[0], 1)
    finally:
        os.write(2, b"came back")
sys.setswitchinterval(1000)  # this thread goes on once the other waits in the engine
in_daemon_thread(wait)
""",
    "work under way in dropped groups": """
for _ in range(20):
    group = fd.SimulatedBackend.create_group(2)
    fd.allreduce(np.ones(1000), group[0], async_op=True)
    fd.recv(np.empty(3), group[1], 0, async_op=True)
""",
}


@pytest.mark.parametrize("state", SIMULATED)
def test_a_process_may_exit_with_simulated_ranks(state: str) -> None:
    ranks = Interpreters()
    ranks.start(0, SIMULATED[state])
    assert ranks.ends() == [(0, "")]


def codes_of(ends: Sequence[tuple[int, str]]) -> list[int]:
    return [code for code, _ in ends]


RECEIVE_FROM_THE_NEXT = """
backend = connect()
work = fd.recv(np.ones(2), backend, (rank + 1) % world_size, async_op=True)
"""


@pytest.mark.parametrize("transport", ["host", "tcp"])
def test_all_ranks_may_exit_together_with_work_under_way(transport: str) -> None:
    ranks = Interpreters(transport, world_size=3)
    for rank in range(3):
        ranks.start(rank, RECEIVE_FROM_THE_NEXT)
    assert ranks.ends() == [(0, "")] * 3


WAIT_AT_THE_TERMINAL = """
backend = connect()
print("ready", flush=True)
fd.recv(np.empty(1), backend, 1 - rank)
"""


@pytest.mark.parametrize("transport", ["host", "tcp"])
def test_ctrl_c_ends_all_ranks_of_a_terminal(transport: str) -> None:
    ranks = Interpreters(transport)
    processes = [ranks.start(rank, WAIT_AT_THE_TERMINAL) for rank in range(2)]
    for process in processes:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
    for process in processes:
        process.send_signal(signal.SIGINT)
    ends = ranks.ends()
    # Whoever heard first tells the other, which may hear that before its own signal.
    assert -signal.SIGINT in codes_of(ends)
    assert set(codes_of(ends)) <= {-signal.SIGINT, 1}
    for _, errors in ends:
        last_line = errors.splitlines()[-1]
        assert last_line == "KeyboardInterrupt" or "ChannelClosed" in errors
