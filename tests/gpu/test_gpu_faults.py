"""Ranks that die, hang, leave or fail: what the others are told, and that they go on."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from typing import Any

import numpy as np
import pytest
from gpu.gpu_ranks import connect, ranks
from nccl_ranks import hold, wait_until_stuck

import ferro_dist as fd
from ferro_dist._native.cuda_libraries import load_nccl
from ferro_dist.errors import DistributedError, Timeout
from ferro_dist.testing import RankDeath, emulated_gpu, run_ranks

# What must pass, but not before ranks that a busy machine keeps from running have come.
LATE_S = 3.0


def outcome_of(group: Any, x: Any) -> tuple[str, str, str | None]:
    """Call, wait, and say what was raised, and by whom, and what the next call raises."""
    with pytest.raises(DistributedError) as told:
        call_and_wait(group, x)
    with pytest.raises(DistributedError) as again:
        fd.allreduce(x, group)
    assert type(again.value.__cause__) is type(told.value)
    return type(told.value).__name__, type(again.value).__name__, told.value.op


def call_and_wait(group: Any, x: Any) -> None:
    fd.allreduce(x, group)
    group.synchronize()


def receive_and_wait(group: Any, out: Any) -> None:
    fd.recv(out, group, 1)
    group.synchronize()


def connect_with_patience(rank: int, world_size: int, addr: str, seconds: float) -> Any:
    """Make a group whose calls have `seconds`; making it, which is not tested, has longer."""
    group = connect("nccl", rank, world_size, addr)
    group.timeout = seconds
    return group


def hang(rank: int, world_size: int, addr: str) -> tuple[Any, float]:
    """NCCL knows who is missing as little as anybody; the call, the time, and the group's end."""
    faults = "point=allreduce,act=hang" if rank == 1 else ""
    gpu = emulated_gpu(faults=faults)
    group = connect_with_patience(rank, world_size, addr, 0.5)
    started = time.monotonic()
    outcome = outcome_of(group, gpu.array(np.ones(4)))
    group.close()
    return outcome, time.monotonic() - started


def test_a_call_that_hangs_is_a_timeout_that_names_it() -> None:
    for outcome, seconds in ranks(2, hang):
        assert outcome == ("Timeout", "LockPoisoned", "allreduce")
        assert seconds > 0.4


def fill_the_stream(rank: int, world_size: int, addr: str, depth: int) -> tuple[str, str]:
    """A stream that is full keeps whoever gives it more from returning, with all of CUDA."""
    os.environ["FERRO_EMULATION_STREAM_DEPTH"] = str(depth)
    gpu = emulated_gpu(faults="point=allreduce,act=hang")
    group = connect_with_patience(rank, world_size, addr, 0.5)
    x = gpu.array(np.ones(4))
    with contextlib.suppress(DistributedError):
        for _ in range(200):
            fd.allreduce(x, group, out=x, async_op=True)
    with pytest.raises(DistributedError) as told:
        group.synchronize()
    group.close()
    return type(told.value).__name__, type(told.value.__cause__).__name__


# A call is four operations of the group's stream: each of them meets the end once.
@pytest.mark.parametrize("depth", range(61, 65))
def test_a_full_stream_keeps_no_timeout_from_being_told(depth: int) -> None:
    outcomes = run_ranks(1, fill_the_stream, depth, backend="none")
    assert outcomes == [("LockPoisoned", "Timeout")]


def miss_a_rank(rank: int, world_size: int, addr: str) -> str:
    gpu = emulated_gpu()
    with fd.HostBackend(rank, world_size, f"{addr}-host") as host:
        group = connect_with_patience(rank, world_size, addr, 0.5)
        message = ""
        if rank != 1:
            with pytest.raises(Timeout) as told:
                call_and_wait(group, gpu.array(np.ones(4)))
            message = f"{told.value.op}: {told.value}"
        fd.barrier(host)
        group.abort()
    return message


def test_ranks_that_do_not_come_are_a_timeout_and_the_message_says_what_to_do() -> None:
    messages = ranks(3, miss_a_rank)
    for message in (messages[0], messages[2]):
        assert message.startswith("allreduce: ")
        assert "other ranks are missing" in message
        assert "NCCL_DEBUG=INFO" in message


def miss_a_barrier(rank: int, world_size: int, addr: str) -> None:
    """No array is there whose stream could wait in place of the host."""
    emulated_gpu()
    with connect("hybrid", rank, world_size, addr) as group:
        fd.barrier(group.nccl)
        if rank == 0:
            work = fd.barrier(group.nccl, async_op=True, timeout=0.5)
            with pytest.raises(Timeout):
                work.wait()
        fd.barrier(group)


def test_the_host_waits_for_a_barrier_that_runs_in_the_background() -> None:
    ranks(2, miss_a_barrier)


def miss_some_ranks(rank: int, world_size: int, addr: str) -> tuple[Any, ...]:
    """Rank 1 stays away, rank 2 makes fewer calls: those who wait name both."""
    gpu = emulated_gpu()
    group = connect("hybrid", rank, world_size, addr)
    x = gpu.array(np.ones(4))
    fd.allreduce(x, group)
    group.synchronize_nccl()
    group.nccl.timeout = LATE_S
    told = None
    if rank in (0, 3):
        with pytest.raises(Timeout) as told:
            call_and_wait(group.nccl, x)
    fd.barrier(group)
    group.close()
    if told is None:
        return ()
    return told.value.rank, told.value.missing, told.value.op, str(told.value).splitlines()[0]


def test_a_hybrid_group_names_the_ranks_that_do_not_come() -> None:
    outcomes = ranks(4, miss_some_ranks)
    for rank in (0, 3):
        assert outcomes[rank][:3] == (rank, (1, 2), "allreduce")
        assert "ranks 1, 2 have not made the call" in outcomes[rank][3]


def miss_the_connecting(rank: int, world_size: int, addr: str) -> tuple[int, ...]:
    """The very first call: NCCL connects the ranks before it launches anything."""
    gpu = emulated_gpu()
    group = connect("hybrid", rank, world_size, addr)
    missing: tuple[int, ...] = ()
    if rank != 1:
        with pytest.raises(Timeout) as told:
            fd.allreduce(gpu.array(np.ones(4)), group, timeout=LATE_S)
        missing = told.value.missing
    fd.barrier(group)
    group.close()
    return missing


def test_the_missing_are_named_where_the_first_call_waits_for_them() -> None:
    assert ranks(3, miss_the_connecting) == [(1,), (), (1,)]


def miss_a_message(rank: int, world_size: int, addr: str) -> tuple[int, ...]:
    gpu = emulated_gpu()
    with connect("hybrid", rank, world_size, addr) as group:
        out = gpu.empty(4)
        if rank == 1:
            fd.send(gpu.array(np.ones(4, np.float32)), group, 0)
        if rank == 0:
            fd.recv(out, group, 1)
            group.synchronize_nccl()
            group.nccl.timeout = 0.3
            with pytest.raises(Timeout) as told:
                receive_and_wait(group.nccl, out)  # rank 1 has sent but one
        fd.barrier(group)
        return told.value.missing if rank == 0 else ()


def test_a_message_that_does_not_come_names_the_sender() -> None:
    assert ranks(3, miss_a_message)[0] == (1,)


def give_up_waiting(rank: int, world_size: int, addr: str) -> list[Any]:
    """Rank 1 comes late; who waits behind a call waits for whom that one waits for."""
    gpu = emulated_gpu()
    x = gpu.array(np.ones(4))
    told: list[Any] = []
    with connect("hybrid", rank, world_size, addr) as group, group.split([2, 1, 0]) as part:
        fd.allreduce(x, part)
        works = [] if rank == 1 else [fd.allreduce(x, part, async_op=True) for _ in range(2)]
        fd.barrier(group)
        for wait in (*(work.wait for work in works), *(part.synchronize_nccl for _ in works[1:])):
            with pytest.raises(Timeout, match="wait again") as late:
                wait(0.01)
            told.append((late.value.rank, late.value.missing, str(late.value)))
        fd.barrier(group)
        for _ in range(2 - len(works)):
            fd.allreduce(x, part)
        part.synchronize_nccl()
    return told


def test_who_gives_up_waiting_hears_who_is_missing() -> None:
    message = (
        "The call is still under way after 0.01 s: rank 1 has not made the call. It goes on; wait "
        "again.\nThese are ranks of group (2, 1, 0)."
    )
    outcomes = ranks(3, give_up_waiting)
    assert outcomes == [[(2, (1,), message)] * 3, [], [(0, (1,), message)] * 3]


def leave_early(
    rank: int, world_size: int, addr: str, how: str, peer_death: str
) -> tuple[Any, ...]:
    """Rank 1 makes one call less than the others, and leaves."""
    os.environ["FERRO_EMULATION_PEER_DEATH"] = peer_death
    gpu = emulated_gpu(delay_us=2_000)
    group = connect("hybrid", rank, world_size, addr)
    x, out = gpu.array(np.ones(4)), gpu.empty(4, "float64")
    work = fd.allreduce(x, group, async_op=True)
    if rank == 1:
        group.nccl.abort() if how == "abort" else None
        group.close()
        return ()
    if how != "abort":
        work.wait(20.0)
        assert work.result().numpy().tolist() == [3.0] * 4  # what all have called is done
    with pytest.raises(fd.ChannelClosed) as told:
        receive_and_wait(group.nccl, out) if how == "message" else call_and_wait(group.nccl, x)
    with pytest.raises(fd.ChannelClosed):
        fd.barrier(group)  # the host's side knows, too
    group.close()
    return type(told.value).__name__, told.value.peer, told.value.rank


@pytest.mark.parametrize(
    ("how", "peer_death"),
    [
        ("close", "hang"),
        ("abort", "hang"),
        ("message", "hang"),
        ("close", "remote_error"),
        ("abort", "remote_error"),
    ],
)
def test_a_rank_that_leaves_ends_the_calls_that_it_has_not_made(how: str, peer_death: str) -> None:
    """Over a network NCCL reports that as an error, which names nobody."""
    outcomes = ranks(3, leave_early, how, peer_death)
    assert outcomes == [("ChannelClosed", 1, 0), (), ("ChannelClosed", 1, 2)]


def reduce_as_one(groups: list[Any], x: Any) -> None:
    with load_nccl().Group():
        for group in groups:
            group.nccl.comm.allreduce(x, x)


def fail_several_groups(rank: int, world_size: int, addr: str) -> float:
    """Each has its own witness, who knows of nobody's end."""
    gpu = emulated_gpu()
    first: Any = connect("hybrid", rank, world_size, addr)
    groups = [first, *(first.split([0, 1]) for _ in range(20))]
    x = gpu.array(np.ones(4))
    for group in groups:
        fd.allreduce(x, group)
    fd.barrier(first)
    gpu.set_faults("point=allreduce,act=system_error")
    begin = time.monotonic()
    with pytest.raises(fd.DistributedError):
        reduce_as_one(groups, x)
    elapsed_s = time.monotonic() - begin
    for group in groups:
        group.close()
    return elapsed_s


def test_the_groups_of_a_call_wait_for_their_witnesses_at_once() -> None:
    """Half a second for all of them, not for each; a busy machine may take more."""
    assert max(ranks(2, fail_several_groups)) < 8


def give_up_one_after_the_other(rank: int, world_size: int, addr: str) -> tuple[Any, ...]:
    """Rank 0 leaves in order, once rank 2 and then rank 1 have given up."""
    gpu = emulated_gpu()
    group = connect("hybrid", rank, world_size, addr)
    x = gpu.array(np.ones(4))
    call_and_wait(group.nccl, x)
    for quitter in (2, 1):
        fd.barrier(group.tcp)
        if rank == quitter:
            group.nccl.abort()
    fd.barrier(group.tcp)
    told: Any = None
    if rank == 0:
        group.nccl.close()
        with pytest.raises(fd.ChannelClosed) as told:
            fd.allreduce(x, group.nccl)
    fd.barrier(group.tcp)
    group.close()
    return () if told is None else (told.value.peer, told.value.rank)


def test_of_ranks_that_gave_up_a_rank_that_leaves_in_order_names_the_first() -> None:
    assert ranks(3, give_up_one_after_the_other) == [(2, 0), (), ()]


def lose_a_member(rank: int, world_size: int, addr: str) -> tuple[Any, ...]:
    """Rank 2 dies, which is rank 1 of those that call each other; rank 0 has left the others."""
    os.environ["FERRO_EMULATION_PEER_DEATH"] = "remote_error"
    gpu = emulated_gpu()
    group = connect("hybrid", rank, world_size, addr)
    members = group.nccl.split([1, 2])
    if rank == 0:
        group.nccl.abort()
    else:
        call_and_wait(members, gpu.array(np.ones(4)))
    fd.barrier(group.tcp)
    if rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    if rank == 0:
        return ()
    with pytest.raises(DistributedError) as told:
        call_and_wait(members, gpu.array(np.ones(4)))
    members.abort()
    return type(told.value).__name__, told.value.peer


def test_a_group_that_was_split_off_names_nobody_by_another_groups_numbers() -> None:
    assert ranks(3, lose_a_member, may_die=[2])[:2] == [(), ("PeerLostError", None)]


def leave_while_others_connect(rank: int, world_size: int, addr: str) -> tuple[Any, ...]:
    """The others wait for rank 1 inside NCCL, which has launched nothing yet."""
    gpu = emulated_gpu()
    group = connect("hybrid", rank, world_size, addr)
    if rank == 1:
        group.close()
        return ()
    with pytest.raises(fd.ChannelClosed) as told:
        fd.allreduce(gpu.array(np.ones(4)), group)
    group.close()
    return told.value.peer, told.value.op


def test_a_rank_that_leaves_before_the_first_call_is_named() -> None:
    assert ranks(3, leave_while_others_connect) == [(1, "allreduce"), (), (1, "allreduce")]


def connect_alone(rank: int, world_size: int, addr: str) -> str:
    emulated_gpu()
    with pytest.raises(Timeout) as told:
        fd.NcclBackend(0, 2, fd.get_unique_id(), timeout=0.3)
    return str(told.value)


def test_a_group_whose_ranks_do_not_all_come_is_a_timeout() -> None:
    assert "other ranks are missing" in ranks(1, connect_alone)[0]


def fail(rank: int, world_size: int, addr: str, act: str) -> tuple[str, str, str | None]:
    gpu = emulated_gpu(faults=f"point=allreduce,act={act}")
    group = connect("nccl", rank, world_size, addr, timeout=20)
    outcome = outcome_of(group, gpu.array(np.ones(4)))
    group.close()
    return outcome


@pytest.mark.parametrize(
    ("act", "error"),
    [("remote_error", "PeerLostError"), ("async_error", "Io"), ("system_error", "Io")],
)
def test_errors_of_nccl_end_the_group_with_their_names(act: str, error: str) -> None:
    for raised, again, _ in ranks(2, fail, act):
        assert raised == error
        assert again == "LockPoisoned"


def fail_while_nccl_is_busy(rank: int, world_size: int, addr: str) -> str:
    """NCCL takes one call at a time on a device; another group is inside as the error comes."""
    gpu = emulated_gpu()
    with connect("nccl", rank, world_size, addr) as group, group.split([0]) as other:
        registration = other.comm.register(gpu.array(np.ones(4)))
        gpu.set_faults("point=allreduce,act=remote_error;point=deregister,act=stuck")
        go_on = hold(gpu)
        fd.allreduce(gpu.array(np.ones(4)), group)
        del registration
        wait_until_stuck(gpu, 1)
        go_on()
        timer = threading.Timer(0.3, gpu.set_faults, [""])
        timer.start()
        with pytest.raises(DistributedError) as told:
            group.synchronize()
        timer.join()
        return type(told.value).__name__


def test_an_error_that_comes_while_nccl_is_busy_is_told() -> None:
    assert ranks(1, fail_while_nccl_is_busy) == ["PeerLostError"]


def fail_alone(rank: int, world_size: int, addr: str) -> tuple[str, int | None]:
    gpu = emulated_gpu(faults="rank=0,point=allreduce,act=remote_error")
    group = connect("hybrid", rank, world_size, addr)
    with pytest.raises(DistributedError) as told:
        call_and_wait(group.nccl, gpu.array(np.ones(4)))
    group.close()
    return type(told.value).__name__, told.value.peer


def test_a_lost_connection_that_no_rank_has_ended_names_nobody() -> None:
    """The rank that gives up for it is the one that the others name."""
    assert ranks(2, fail_alone) == [("PeerLostError", None), ("ChannelClosed", 0)]


def be_slow(rank: int, world_size: int, addr: str) -> list[float]:
    gpu = emulated_gpu(faults="rank=1,point=allreduce,act=slow,ms=100")
    with connect("nccl", rank, world_size, addr, timeout=20) as group:
        go_on = hold(gpu)
        x = gpu.array(np.ones(4))
        work = fd.allreduce(x, group, async_op=True)
        with pytest.raises(Timeout, match="wait again"):
            work.wait(0.01)
        go_on()
        work.wait(20.0)
        numbers: list[float] = work.result().numpy().tolist()
        return numbers


def test_a_slow_rank_is_waited_for_again() -> None:
    assert ranks(2, be_slow) == [[2.0] * 4] * 2


def run_out_of_memory(rank: int, world_size: int, addr: str) -> None:
    gpu = emulated_gpu()
    with connect("nccl", rank, world_size, addr) as group:
        x = gpu.array(np.ones(4))
        gpu.set_faults("point=malloc,act=out_of_memory")
        with pytest.raises(RuntimeError, match="out of memory"):
            fd.allreduce(x, group)  # the result's memory, before anything is sent
        gpu.set_faults("")
        assert fd.allreduce(x, group).numpy().tolist() == [2.0] * 4


def test_a_result_without_memory_leaves_the_group_usable() -> None:
    ranks(2, run_out_of_memory)


def die(rank: int, world_size: int, addr: str, peer_death: str) -> tuple[str, str, str | None]:
    os.environ["FERRO_EMULATION_PEER_DEATH"] = peer_death
    gpu = emulated_gpu()
    group = connect("nccl", rank, world_size, addr)
    x = gpu.array(np.ones(4))
    call_and_wait(group, x)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    if peer_death == "hang":
        group.timeout = 0.5
    outcome = outcome_of(group, x)
    group.close()
    return outcome


@pytest.mark.parametrize(
    ("peer_death", "error"), [("hang", "Timeout"), ("remote_error", "PeerLostError")]
)
def test_a_killed_rank_ends_the_others_calls(peer_death: str, error: str) -> None:
    """On one host NCCL tells nothing, and the time is what ends it; over a network it does."""
    outcomes = run_ranks(3, die, peer_death, backend="none", may_die=[1])
    assert outcomes[1] == RankDeath(-signal.SIGKILL)
    assert outcomes[0][0] == outcomes[2][0] == error


def interrupt_a_call(rank: int, world_size: int, addr: str) -> str:
    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    gpu = emulated_gpu()
    x = gpu.array(np.ones(4))
    with connect("hybrid", rank, world_size, addr) as group:
        refusal = ""
        if rank == 0:
            signal.signal(signal.SIGALRM, interrupt)
            signal.setitimer(signal.ITIMER_REAL, 0.3)
            with pytest.raises(KeyboardInterrupt):
                fd.allreduce(x, group)  # for which it waits for the other, which is not there
            with pytest.raises(fd.LockPoisoned) as refused:
                fd.allreduce(x, group)
            refusal = str(refused.value)
        fd.barrier(group)
        return refusal


def test_a_group_that_ctrl_c_has_ended_says_so() -> None:
    refusal, _ = ranks(2, interrupt_a_call)
    assert refusal.splitlines()[0].endswith("ended with an earlier error: KeyboardInterrupt")


def wait_in_a_part(rank: int, world_size: int, addr: str) -> Any:
    gpu = emulated_gpu()
    with connect("nccl", rank, world_size, addr) as group, group.split([1, 0]) as part:
        fd.allreduce(gpu.array(np.ones(1)), part)  # the first call waits for the others
        late = None
        if rank == 1:
            work = fd.barrier(part, async_op=True)
            with pytest.raises(Timeout) as waited:
                work.wait(0.1)
            late = waited.value.rank, waited.value.global_ranks
        fd.barrier(group)
        if rank == 0:
            work = fd.barrier(part, async_op=True)
        work.wait()
        return late


def test_work_names_the_part_of_a_group_that_it_is_of() -> None:
    assert ranks(2, wait_in_a_part) == [None, (0, (1, 0))]
