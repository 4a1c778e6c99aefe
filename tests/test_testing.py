"""run_ranks says what became of each rank."""

from __future__ import annotations

import fcntl
import math
import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ferro_dist as fd
from ferro_dist import testing
from ferro_dist.testing import RankDeath, RankFailed, run_ranks


def rank_of(backend: fd.Backend) -> int:
    return backend.rank


def give_back(backend: fd.Backend, x: Any) -> Any:
    return x


def environment_of(backend: fd.Backend) -> dict[str, str]:
    return dict(os.environ)


def modules_of(backend: fd.Backend) -> set[str]:
    return set(sys.modules)


def raise_on_rank_1(backend: fd.Backend) -> None:
    if backend.rank == 1:
        raise KeyError("mine")
    fd.barrier(backend)


def raise_on_rank_1_and_end_late(rank: int, world_size: int, addr: str) -> None:
    group = fd.HostBackend(rank, world_size, addr)
    try:
        if rank == 1:
            raise KeyError("mine")
        fd.barrier(group)
    finally:
        group.close()
        if rank == 1:
            time.sleep(0.2)  # until the others have told what they raised


def lose_rank_1(backend: fd.Backend) -> None:
    if backend.rank == 1:
        os._exit(3)
    fd.barrier(backend)


def wait_for_each_other(backend: fd.Backend) -> None:
    fd.recv(np.empty(1), backend, 1 - backend.rank, timeout=60)


def return_a_closure(backend: fd.Backend) -> Callable[[], int]:
    return lambda: backend.rank


def die(backend: fd.Backend) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def return_a_tensor(backend: fd.Backend) -> Any:
    import torch

    return torch.arange(3)


def exit_early(backend: fd.Backend) -> None:
    os._exit(5)


def die_at_exit(backend: fd.Backend) -> int:
    Finalize(None, os.kill, (os.getpid(), signal.SIGSEGV), exitpriority=0)
    return backend.rank


def fail_to_be_read() -> None:
    raise ValueError("not for you")


class Unreadable:
    def __reduce__(self) -> Any:
        return fail_to_be_read, ()


def return_what_cannot_be_read(backend: fd.Backend) -> Unreadable:
    return Unreadable()


def send_a_part(signum: int) -> None:
    """Be stopped or killed when a part of the outcome has been sent."""
    connection = sys._getframe(2).f_locals["connection"]
    os.write(connection.fileno(), b"\0\0\0")
    os.kill(os.getpid(), signum)


def be_stopped_halfway(backend: fd.Backend) -> None:
    send_a_part(signal.SIGSTOP)


def pause_on_rank_1(backend: fd.Backend) -> None:
    if backend.rank == 1:
        signal.pause()
    fd.barrier(backend)


def be_killed_halfway(backend: fd.Backend) -> None:
    send_a_part(signal.SIGKILL)


def close_everything_and_stay(rank: int, world_size: int, addr: str) -> None:
    os.closerange(3, 1024)
    signal.pause()


def die_at_exit_on_rank_1(backend: fd.Backend) -> None:
    if backend.rank == 1:
        die_at_exit(backend)
    else:
        never_exit(backend)


def never_exit(backend: fd.Backend) -> int:
    Finalize(None, signal.pause, exitpriority=0)
    return backend.rank


def test_tensors_of_torch_may_be_returned() -> None:
    pytest.importorskip("torch", reason="torch is not installed")
    for tensor in run_ranks(2, return_a_tensor, timeout=300):
        assert tensor.tolist() == [0, 1, 2]


def test_the_tests_own_ranks_begin_with_what_their_server_has_imported() -> None:
    assert run_ranks(1, modules_of)[0] >= {"preloaded", "hypothesis", "pytest"}


def test_results_come_by_rank() -> None:
    assert run_ranks(3, rank_of) == [0, 1, 2]
    assert [x.sum() for x in run_ranks(2, give_back, np.ones(3_000_000))] == [3e6, 3e6]


def test_ranks_have_the_environment_of_the_call(monkeypatch: pytest.MonkeyPatch) -> None:
    run_ranks(1, rank_of)  # the server has started
    monkeypatch.setenv("SET_FOR_THIS_TEST", "\udcff")
    monkeypatch.delenv("PATH")
    assert run_ranks(1, environment_of) == [dict(os.environ)]


def test_the_failure_of_which_others_came_is_raised() -> None:
    with pytest.raises(RankFailed, match=r"rank 1 raised:\n(.|\n)*KeyError: 'mine'"):
        run_ranks(3, raise_on_rank_1_and_end_late, backend="none")
    with pytest.raises(RankFailed, match="rank 1 ended with code 3"):
        run_ranks(3, lose_rank_1)
    with pytest.raises(RankFailed, match="PeerLostError"):  # if there is no other
        run_ranks(2, lose_rank_1, may_die=[1])


@pytest.mark.parametrize(
    ("body", "timeout", "what"),
    [
        # Not rank 0, whose barrier this ends: it may be heard of at the same time, but not before.
        (raise_on_rank_1, 60, r"rank 1 raised:\n(.|\n)*KeyError: 'mine'"),
        (die, 60, "rank 0 was killed by SIGKILL|rank 1 was killed by SIGKILL"),
        (exit_early, 60, "rank [01] ended with code 5 before its body returned"),
        (wait_for_each_other, 3, r"rank 0 did not end in time \(still running: 0, 1\)"),
        (return_a_closure, 60, "rank [01] returned what cannot be sent to the caller"),
        (return_what_cannot_be_read, 60, "rank [01] returned .* cannot read: ValueError: not for"),
        (be_killed_halfway, 60, "rank [01] was killed by SIGKILL before its body returned"),
        (be_stopped_halfway, 3, r"rank 0 did not end in time \(still running: 0, 1\)"),
        (die_at_exit, 60, "rank [01] was killed by SIGSEGV after its body had returned"),
        (die_at_exit_on_rank_1, 60, "rank 1 was killed by SIGSEGV after its body had returned"),
    ],
)
def test_what_became_of_a_rank_is_said(body: Callable[..., Any], timeout: float, what: str) -> None:
    with pytest.raises(RankFailed, match=what):
        run_ranks(2, body, timeout=timeout)


def test_ranks_that_do_not_end_are_shown_where_they_are() -> None:
    stacks = "".join(rf"\nRank {n} is here:\n(.|\n)* in pause_on_rank_1\n(.|\n)*" for n in (0, 1))
    with pytest.raises(RankFailed, match=stacks):
        run_ranks(2, pause_on_rank_1, timeout=3)


def test_a_rank_that_closes_all_its_descriptors_ends_with_the_timeout() -> None:
    with pytest.raises(RankFailed, match="rank 0 did not end in time"):
        run_ranks(1, close_everything_and_stay, backend="none", timeout=3)


@pytest.mark.parametrize("timeout", [1e9, math.inf])
def test_the_timeout_may_be_as_long_as_one_likes(timeout: float) -> None:
    assert run_ranks(2, rank_of, timeout=timeout) == [0, 1]


def test_ranks_that_may_die_leave_their_exit_code() -> None:
    assert run_ranks(2, exit_early, may_die=[0, 1]) == [RankDeath(5)] * 2
    assert run_ranks(2, die_at_exit, may_die=[0, 1]) == [0, 1]


def test_a_rank_that_hangs_at_exit_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(testing, "_EXIT_S", 0.1)
    with pytest.raises(RankFailed, match="rank 0 did not exit in time"):
        run_ranks(2, never_exit)


CALLER = """
import os
import time

from ferro_dist.testing import run_ranks


def stay(backend):
    os.write(1, b"here\\n")
    time.sleep(60)
    os.write(1, b"still here\\n")


if __name__ == "__main__":
    run_ranks(2, stay)
"""


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGKILL])
def test_ranks_end_with_a_caller_that_is_killed(signum: signal.Signals, tmp_path: Path) -> None:
    script = tmp_path / "caller.py"
    script.write_text(CALLER)
    with subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE) as caller:
        assert caller.stdout is not None
        assert [caller.stdout.readline() for _ in range(2)] == [b"here\n"] * 2
        caller.send_signal(signum)
        assert caller.stdout.read() == b""  # once the ranks, which could write to it, have ended


def listens_to_its_orders(backend: Any) -> bool:
    del backend
    caller = multiprocessing.parent_process()
    assert caller is not None
    return bool(fcntl.fcntl(caller.sentinel, fcntl.F_GETFL) & os.O_ASYNC)


def test_what_the_caller_writes_to_a_rank_cannot_kill_it() -> None:
    assert run_ranks(2, listens_to_its_orders) == [False, False]


def test_the_users_own_preloaded_modules_stay() -> None:
    program = """
import multiprocessing, multiprocessing.forkserver as server
multiprocessing.set_forkserver_preload(["decimal"])
import ferro_dist.testing
assert server._forkserver._preload_modules == ["decimal"]
ferro_dist.testing._preload()
assert server._forkserver._preload_modules[0] == "decimal"
"""
    subprocess.run([sys.executable, "-c", program], check=True)


@pytest.mark.parametrize("option", ["-c", "-"])
def test_a_function_that_was_typed_at_a_prompt_is_refused_at_once(option: str) -> None:
    program = """
from ferro_dist.testing import run_ranks
def body(backend): pass
try:
    run_ranks(2, body)
except TypeError as error:
    assert "in a file" in str(error) and "SimulatedBackend" in str(error), error
else:
    assert False
"""
    command = [sys.executable, option, *([program] if option == "-c" else [])]
    subprocess.run(command, input=program, text=True, check=True)


def test_a_failure_passes_from_process_to_process() -> None:
    failure = pickle.loads(pickle.dumps(RankFailed(1, "raised")))
    assert (str(failure), failure.rank) == ("rank 1 raised", 1)


def test_what_cannot_be_run_is_refused_at_once() -> None:
    with pytest.raises(fd.InvalidWorldSize):
        run_ranks(0, rank_of)
    with pytest.raises(TypeError, match="a function at the top level of a module"):
        run_ranks(2, lambda backend: backend.rank)
    with pytest.raises(TypeError, match="body must be a function, not 2"):
        run_ranks(2, 2)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="timeout must be a positive number"):
        run_ranks(2, rank_of, timeout=-1)
    with pytest.raises(ValueError, match="backend must be"):
        run_ranks(2, rank_of, backend="mpi")
    for may_die in (1, None, "1"):
        with pytest.raises(TypeError, match="may_die must be a collection of ranks"):
            run_ranks(2, rank_of, may_die=may_die)  # type: ignore[arg-type]
