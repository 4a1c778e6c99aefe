"""HybridBackend: each array its way, one group of two, made on all ranks or on none."""

from __future__ import annotations

import contextlib
import os
import signal
from typing import Any

import numpy as np
import pytest
from gpu.gpu_ranks import connect, ranks

import ferro_dist as fd
from ferro_dist.backends import hybrid, nccl
from ferro_dist.backends.host import HostBackend
from ferro_dist.errors import (
    BackendUnavailable,
    CollectiveMismatch,
    DistributedError,
    InvalidArray,
    Io,
    LockPoisoned,
    Timeout,
)
from ferro_dist.testing import RankDeath, emulated_gpu, run_ranks

DEADLINE_S = 60.0
# Half of it is how long ranks that a busy machine keeps from running are waited for.
SILENCE_S = 8.0


def reduce_both_kinds(rank: int, world_size: int, addr: str) -> tuple[Any, ...]:
    gpu = emulated_gpu()
    with connect("hybrid", rank, world_size, addr) as group:
        assert (group.tcp.name, group.nccl.name) == ("host", "nccl")
        host = fd.allreduce(np.full(3, rank), group)
        assert group.nccl.comm is not None
        device = fd.allreduce(gpu.array(np.full(3, rank)), group)
        data = fd.all_gather(bytes([rank]), group)
        fd.barrier(group)
        group.synchronize_nccl()
        return type(host).__name__, type(device).__name__, data.tolist(), device.numpy().tolist()


def test_arrays_go_by_where_they_live() -> None:
    outcome = ("ndarray", "EmulatedArray", [0, 1, 2], [3, 3, 3])
    assert ranks(3, reduce_both_kinds) == [outcome] * 3


def scatter_beside_what_is_not_read(rank: int, world_size: int, addr: str) -> list[float]:
    gpu = emulated_gpu()
    with connect("hybrid", rank, world_size, addr) as group:
        x = gpu.array(np.arange(4.0)) if rank == 0 else np.zeros(4)
        out = gpu.empty(2, "float64")
        with pytest.raises(fd.InvalidRank, match="scatter: root"):
            fd.scatter(x, group, np.array([0, 1]), out=out)  # type: ignore[arg-type]
        fd.scatter(x, group, out=out)
        numbers: list[float] = out.numpy().tolist()
        return numbers


def test_scatter_goes_by_what_is_read_and_written() -> None:
    assert ranks(2, scatter_beside_what_is_not_read) == [[0.0, 1.0], [2.0, 3.0]]


def batch_both_kinds(rank: int, world_size: int, addr: str) -> None:
    gpu = emulated_gpu(delay_us=300)
    other = 1 - rank
    with connect("hybrid", rank, world_size, addr) as group:
        for is_async in (False, True):
            host, device = np.empty(200_000), gpu.empty(1000)
            ops = [
                fd.P2POp("recv", device, other),
                fd.P2POp("send", np.full(200_000, rank), other),
                fd.P2POp("send", gpu.array(np.full(1000, rank, np.float32)), other),
                fd.P2POp("recv", host.view(np.int64), other),
            ]
            work = fd.batch(ops, group, async_op=is_async)
            if is_async:
                work.wait()
            assert (host.view(np.int64) == other).all()
            assert (device.numpy() == other).all()


def test_a_batch_may_hold_both_kinds() -> None:
    ranks(2, batch_both_kinds)


def batch_with_a_mistake(rank: int, world_size: int, addr: str) -> None:
    """In either half: then no half of it is under way."""
    gpu = emulated_gpu()
    other = 1 - rank
    with connect("hybrid", rank, world_size, addr) as group:
        host, device = np.full(4, rank), gpu.array(np.full(4, rank))
        mistakes = [
            (InvalidArray, fd.P2POp("recv", np.arange(8)[::2], other)),
            (InvalidArray, fd.P2POp("recv", gpu.empty(8)[::2], other)),
            (fd.InvalidRank, fd.P2POp("send", host, 7)),
            (fd.InvalidRank, fd.P2POp("send", device, 7)),
        ]
        for error, mistake in mistakes:
            good = [fd.P2POp("send", host, other), fd.P2POp("send", device, other)]
            with pytest.raises(error):
                fd.batch([*good, mistake], group)
        outs = np.empty(4, np.int64), gpu.empty(4, "int64")
        received = [fd.P2POp("recv", out, other) for out in outs]
        fd.batch([fd.P2POp("send", host, other), fd.P2POp("send", device, other), *received], group)
        assert outs[0].tolist() == outs[1].numpy().tolist() == [other] * 4
        assert group.nccl.comm is not None


def test_a_batch_with_a_mistake_sends_nothing() -> None:
    ranks(2, batch_with_a_mistake)


def mix_in_one_call(rank: int, world_size: int, addr: str) -> None:
    gpu = emulated_gpu()
    with connect("hybrid", rank, world_size, addr) as group:
        host, device = np.ones(4), gpu.array(np.ones(4))
        for x, out in ((host, device), (device, host)):
            with pytest.raises(InvalidArray, match="different devices"):
                fd.allreduce(x, group, out=out)
            with pytest.raises(InvalidArray, match="different devices"):
                fd.sendrecv(x, out, group, 1 - rank, 1 - rank)
            with pytest.raises(InvalidArray, match="different devices"):
                fd.scatter(x, group, rank, out=out[:2])
        assert fd.allreduce(host, group)[0] == 2
        assert fd.allreduce(device, group).numpy()[0] == 2


def test_one_call_with_both_kinds_is_refused() -> None:
    ranks(2, mix_in_one_call)


# All ranks or none


def join_without_gpu(rank: int, world_size: int, addr: str) -> str:
    emulated_gpu(devices=0 if rank == 1 else 1)
    with pytest.raises(BackendUnavailable) as told:
        fd.HybridBackend(rank, world_size, addr, timeout=20)
    return str(told.value)


def test_one_rank_without_gpu_keeps_all_from_a_group() -> None:
    messages = run_ranks(3, join_without_gpu, backend="none")
    assert all("NCCL cannot be used on rank 1" in message for message in messages)
    assert "no CUDA-capable device" in messages[1]


class Deadly:
    """An option that kills the rank that gives it to NCCL."""

    def __index__(self) -> int:
        os.kill(os.getpid(), signal.SIGKILL)
        return 0


def join_while_one_fails(
    rank: int, world_size: int, addr: str, config: Any, faults: str = ""
) -> Any:
    """Rank 1 connects on the host's side, and never on that of the GPUs."""
    emulated_gpu(faults=faults)
    with pytest.raises((DistributedError, TypeError)) as told:
        connect("hybrid", rank, world_size, addr, config=config if rank == 1 else None)
    return type(told.value).__name__, getattr(told.value, "peer", None)


# NCCL may tell of the broken connection before the host's side has told of the death.
@pytest.mark.parametrize("faults", ["", "point=init,act=remote_error"])
def test_a_rank_that_dies_while_gpus_connect_is_named(faults: str) -> None:
    outcomes = ranks(3, join_while_one_fails, {"max_ctas": Deadly()}, faults, may_die=[1])
    assert (outcomes[0], outcomes[2]) == (("PeerLostError", 1),) * 2


def test_a_rank_that_fails_while_gpus_connect_is_named() -> None:
    outcomes = ranks(3, join_while_one_fails, {"no_such_option": 1})
    assert outcomes == [("ChannelClosed", 1), ("TypeError", None), ("ChannelClosed", 1)]


def give_own_unique_id(rank: int, world_size: int, addr: str, unique_id: bytes) -> list[float]:
    gpu = emulated_gpu()
    with fd.HybridBackend(rank, world_size, addr, unique_id, timeout=20) as group:
        numbers: list[float] = fd.allreduce(gpu.array([1.0, rank]), group).numpy().tolist()
    return numbers


def make_unique_id(rank: int, world_size: int, addr: str) -> list[float]:
    """As a program that has its own way to carry the id."""
    with fd.HostBackend(rank, world_size, f"{addr}-id") as carrier:
        mine = bytes(fd.get_unique_id()) if rank == 0 else bytes(128)
        unique_id = fd.broadcast(np.frombuffer(mine, np.uint8), carrier).tobytes()
    return give_own_unique_id(rank, world_size, addr, unique_id)


def test_the_unique_id_may_be_the_callers() -> None:
    assert ranks(2, make_unique_id) == [[2, 1]] * 2


def disagree_on_the_unique_id(rank: int, world_size: int, addr: str, givers: str) -> str:
    emulated_gpu()
    unique_id = fd.get_unique_id() if str(rank) in givers else None
    with pytest.raises(CollectiveMismatch) as told:
        fd.HybridBackend(rank, world_size, addr, unique_id)
    return str(told.value).splitlines()[0].partition("disagree: rank ")[2]


@pytest.mark.parametrize(
    ("givers", "messages"),
    [
        ("0", ["0 was given a unique_id, rank 1 none.", "1 was given no unique_id, rank 0 one."]),
        ("01", [f"{rank} was given a unique_id, rank {1 - rank} another." for rank in (0, 1)]),
    ],
)
def test_ranks_that_disagree_on_the_unique_id_are_told(givers: str, messages: list[str]) -> None:
    """Else they would wait for each other, each in another place."""
    assert ranks(2, disagree_on_the_unique_id, givers) == messages


def initialize(rank: int, world_size: int, addr: str) -> tuple[Any, ...]:
    gpu = emulated_gpu(devices=2)
    made: Any = fd.init(rank, world_size, addr, backend="hybrid", device=rank, timeout=20)
    with made as group:
        assert gpu.current_device == rank
        y = fd.allreduce(gpu.array([1.0]), group)
        return group.name, group.nccl.device, y.device, y.numpy().tolist()


def initialize_with_options(rank: int, world_size: int, addr: str) -> dict[str, Any]:
    emulated_gpu()
    options: Any = {"unique_id": bytes(fd.get_unique_id()), "config": {"max_ctas": 4}}
    for name, value in options.items():
        with pytest.raises(ValueError, match=f'{name} is for backend="hybrid"'):
            fd.init(0, 1, addr, **{name: value})
    made: Any = fd.init(0, 1, addr, backend="hybrid", timeout=20, **options)
    with made as group:
        config: dict[str, Any] = group.nccl.config
    return config


def test_init_passes_options_of_nccl_on() -> None:
    assert ranks(1, initialize_with_options) == [{"max_ctas": 4}]


def test_init_makes_hybrid_groups_on_the_named_device() -> None:
    outcomes = run_ranks(2, initialize, backend="none")
    assert outcomes == [("hybrid", rank, rank, [2.0]) for rank in range(2)]


# Ends


def segments_in_use() -> list[int]:
    """List the sizes in bytes of shared segments, but for the page in which calls are noted."""
    with open("/proc/self/maps", encoding="utf-8") as file:
        mappings = [line.split("-", 1) for line in file if "memfd:ferro_dist" in line]
    sizes = [int(end.split(" ", 1)[0], 16) - int(begin, 16) for begin, end in mappings]
    return [size for size in sizes if size > 4096]


def close_and_keep(rank: int, world_size: int, addr: str) -> None:
    emulated_gpu()
    group = connect("hybrid", rank, world_size, addr)
    fd.barrier(group, async_op=True).wait()
    assert len(segments_in_use()) == 1
    group.close()
    assert segments_in_use() == []
    assert group.is_closed


def test_a_closed_group_that_is_kept_holds_no_segment() -> None:
    ranks(2, close_and_keep)


def lose_a_peer(
    rank: int, world_size: int, addr: str, peer_death: str, faults: str
) -> tuple[str, int | None]:
    os.environ["FERRO_EMULATION_PEER_DEATH"] = peer_death
    gpu = emulated_gpu(faults=faults)
    group = connect("hybrid", rank, world_size, addr)
    x = gpu.array(np.ones(1000))
    fd.allreduce(x, group)
    group.synchronize_nccl()
    fd.barrier(group)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)

    def wait_for_the_dead() -> None:
        fd.allreduce(x, group)
        group.synchronize_nccl()

    with pytest.raises(DistributedError) as told:
        wait_for_the_dead()
    group.close()
    return type(told.value).__name__, told.value.peer


# Over a network NCCL notices it, too, perhaps first, as in the last case, but does not say who.
@pytest.mark.parametrize(
    ("peer_death", "faults"),
    [("hang", ""), ("remote_error", ""), ("hang", "point=allreduce,hit=2,act=remote_error")],
)
def test_a_dead_peer_ends_the_gpus_calls_and_close_does_not_hang(
    peer_death: str, faults: str
) -> None:
    outcomes = ranks(3, lose_a_peer, peer_death, faults, may_die=[1])
    assert outcomes == [("PeerLostError", 1), RankDeath(-signal.SIGKILL), ("PeerLostError", 1)]


def close_after_a_death(rank: int, world_size: int, addr: str) -> bool:
    """With work under way on the GPU that nobody has waited for."""
    gpu = emulated_gpu()
    group = connect("hybrid", rank, world_size, addr, timeout=10 * DEADLINE_S)
    fd.barrier(group)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    with contextlib.suppress(DistributedError):  # it may be known already
        for _ in range(5):
            fd.allreduce(gpu.array(np.ones(1000)), group)
    group.close()
    return bool(group.is_closed)


def test_close_with_work_that_waits_for_the_dead_does_not_hang() -> None:
    assert ranks(2, close_after_a_death, may_die=[1], timeout=DEADLINE_S)[0] is True


def shrink_after_a_death(rank: int, world_size: int, addr: str) -> Any:
    gpu = emulated_gpu()
    group = connect("hybrid", rank, world_size, addr)
    fd.allreduce(gpu.array(np.ones(10)), group)
    group.synchronize_nccl()
    fd.barrier(group)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(DistributedError):
        fd.barrier(group)
    with group.shrink() as smaller:
        numbers = fd.allreduce(gpu.array([1.0, rank]), smaller).numpy().tolist()
        assert fd.allreduce(np.ones(1), smaller)[0] == 2
        survivors = smaller.survivors
    group.close()
    return numbers, survivors


def test_survivors_go_on_with_both_kinds() -> None:
    outcomes = ranks(3, shrink_after_a_death, may_die=[1])
    assert outcomes[0] == outcomes[2] == ([2, 2], (0, 2))


def interrupt_the_gpus_split(
    rank: int, world_size: int, addr: str, step: str
) -> tuple[str, int | None]:
    with connect("hybrid", rank, world_size, addr) as group, pytest.MonkeyPatch.context() as patch:
        if rank == 0:
            patch.setattr(nccl.NcclBackend, step, _interrupt)
        with pytest.raises((DistributedError, KeyboardInterrupt)) as told:
            group.split(range(world_size))
        if rank == 0:
            # The others hear of it from the split, not from the end of this rank's process.
            with pytest.raises(LockPoisoned):
                group.tcp.batch([], False, None, 0)
        return told.typename, vars(told.value).get("peer")


def _interrupt(*_: Any) -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize("step", ["_check_agreement", "_init_from"])
def test_a_split_that_is_interrupted_between_its_halves_ends_the_group(step: str) -> None:
    outcomes = ranks(3, interrupt_the_gpus_split, step)
    assert outcomes == [("KeyboardInterrupt", None), *[("ChannelClosed", 0)] * 2]


def fail_to_split_on_the_host(rank: int, world_size: int, addr: str) -> tuple[str, list[float]]:
    gpu = emulated_gpu()

    def fail(*_: Any) -> None:
        raise Io("no luck")

    with connect("hybrid", rank, world_size, addr) as group:
        outcome = "none of its business"
        with pytest.MonkeyPatch.context() as patch:
            if rank == 1:
                patch.setattr(HostBackend, "_new_from", fail)
            try:
                assert group.split([0, 1]) is None
            except Io as error:
                outcome = str(error).splitlines()[1]
        return outcome, fd.allreduce(gpu.array(np.ones(1)), group).numpy().tolist()


def test_ranks_outside_a_split_that_fails_on_the_host_wait_for_nobody() -> None:
    first, second, third = ranks(3, fail_to_split_on_the_host)
    assert first == second == ("Rank 1 could not make its part of the group", [3.0])
    assert third == ("none of its business", [3.0])


def shrink_within_no_time(rank: int, world_size: int, addr: str) -> float:
    gpu = emulated_gpu()
    with connect("hybrid", rank, world_size, addr) as group:
        with pytest.raises(ValueError, match="timeout must be"):
            group.shrink(-1)
        total: float = fd.allreduce(gpu.array(np.ones(2)), group).numpy()[0]
        return total


def test_a_shrink_with_a_bad_timeout_leaves_the_group_as_it_was() -> None:
    assert ranks(2, shrink_within_no_time) == [2.0, 2.0]


def strike_while_gpus_connect(
    rank: int, world_size: int, addr: str, step: str, how: str, seconds: float
) -> Any:
    """Lose rank 1, then let rank 2 fail in a step of the successor's making."""
    gpu = emulated_gpu()
    group = connect("hybrid", rank, world_size, addr, timeout=DEADLINE_S)
    pids = fd.all_gather(np.array([os.getpid()]), group)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(DistributedError):
        fd.barrier(group)
    errors: list[Any] = []
    with contextlib.ExitStack() as patches:
        if rank == 2:
            patch = patches.enter_context(pytest.MonkeyPatch.context())
            patch.setattr(hybrid, step, lambda *_: _strike(how))
        try:
            smaller = group.shrink(seconds)
        except (DistributedError, _Refused) as error:
            errors.append((type(error).__name__, vars(error).get("op"), vars(error).get("peer")))
            assert not group.is_closed
    if errors:
        if how == "stop":
            with contextlib.suppress(ProcessLookupError):  # the other survivor may be first
                os.kill(pids[2], signal.SIGKILL)
        smaller = group.shrink()
    with smaller:
        assert smaller.timeout == DEADLINE_S
        numbers = fd.allreduce(gpu.array([1.0, rank]), smaller).numpy().tolist()
        assert group.is_closed
        return errors, smaller.survivors, numbers


class _Refused(Exception):
    pass


def _strike(how: str) -> None:
    if how == "raise":
        raise _Refused
    os.kill(os.getpid(), signal.SIGKILL if how == "die" else signal.SIGSTOP)


each_step = pytest.mark.parametrize(
    "step", ["_check_all_have_gpus", "_exchange_unique_id", "_connect_gpus", "share_attendance"]
)


@each_step
def test_survivors_go_on_after_a_death_while_their_gpus_connect(step: str) -> None:
    outcomes = ranks(4, strike_while_gpus_connect, step, "die", DEADLINE_S, may_die=[1, 2])
    assert outcomes[0] == outcomes[3] == ([], (0, 3), [2.0, 3.0])


@each_step
def test_a_rank_whose_shrink_failed_can_shrink_again(step: str) -> None:
    outcomes = ranks(4, strike_while_gpus_connect, step, "raise", DEADLINE_S, may_die=[1])
    expected = (0, 2, 3), [3.0, 5.0]
    assert outcomes[0] == outcomes[3] == ([], *expected)
    assert outcomes[2] == ([("_Refused", None, None)], *expected)


def test_shrink_waits_no_longer_for_gpus_than_it_may() -> None:
    step, may_die = "_check_all_have_gpus", [1, 2]
    outcomes = ranks(4, strike_while_gpus_connect, step, "stop", SILENCE_S, may_die=may_die)
    assert outcomes[0] == outcomes[3] == ([("Timeout", "shrink", 2)], (0, 3), [2.0, 3.0])


def shrink_a_part_whose_gpus_are_late(rank: int, world_size: int, addr: str) -> Any:
    emulated_gpu()

    def be_late(*_: Any) -> None:
        raise Timeout("rank 1 is late", missing=[1])

    with connect("hybrid", rank, world_size, addr) as group, group.split([1, 0]) as part:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(hybrid, "_check_all_have_gpus", be_late)
            with pytest.raises(Timeout) as late:
                part.shrink()
        return str(late.value).splitlines()[-1], late.value.global_ranks


def test_a_part_that_cannot_shrink_names_itself() -> None:
    outcome = ("These are ranks of group (1, 0).", (1, 0))
    assert ranks(2, shrink_a_part_whose_gpus_are_late) == [outcome] * 2
