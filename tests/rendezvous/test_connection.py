"""Ranks that find each other, and what happens when they do not."""

from __future__ import annotations

import contextlib
import fcntl
import gc
import json
import multiprocessing
import os
import resource
import signal
import socket
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
from fault_injection import PATIENCE_S, SOON_S, wait_until_called
from hypothesis import given, settings
from hypothesis import strategies as st

from ferro_dist.arguments import check_place
from ferro_dist.backends.host import HostBackend
from ferro_dist.deadline import Deadline
from ferro_dist.errors import (
    CollectiveMismatch,
    DistributedError,
    InvalidRank,
    InvalidWorldSize,
    Io,
    NoConnection,
    PeerLostError,
    Timeout,
)
from ferro_dist.rendezvous import (
    Wiring,
    authentication,
    connect,
    connect_through,
    connection,
    control_plane,
    event_loop,
    frame,
    machine,
)
from ferro_dist.rendezvous.address import RESOLVER_THREAD, derived_unix_addr, target_of
from ferro_dist.rendezvous.authentication import Claim, Role, find_token, group_digest
from ferro_dist.rendezvous.event_loop import EventLoop
from ferro_dist.rendezvous.member import Member
from ferro_dist.rendezvous.wiring import SOCKET_ROLES, _Mesh, _Wirer
from ferro_dist.testing import run_ranks

TOKEN = b"a secret of these tests"
# A time that must pass, but not before ranks that a busy machine keeps from running have come.
SHORT_S = 3.0

Body = Callable[[int], Any]


def make_segment(num_ranks: int) -> int:
    fd = os.memfd_create("segment")
    os.truncate(fd, 4096 * num_ranks)
    return fd


def local_listener(host: str = "127.0.0.1") -> tuple[socket.socket, str]:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.create_server((host, 0), family=family, backlog=128)
    shown = f"[{host}]" if ":" in host else host
    return listener, f"{shown}:{listener.getsockname()[1]}"


_reserved: list[socket.socket] = []


def free_addr() -> str:
    """Return an address where nobody listens, and where nobody else will in this test.

    A socket that is bound to it keeps the kernel from giving its port to others.
    """
    _reserved.append(socket.socket())
    _reserved[-1].setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as those have who listen
    _reserved[-1].bind(("127.0.0.1", 0))
    return f"127.0.0.1:{_reserved[-1].getsockname()[1]}"


def unix_addr() -> str:
    return derived_unix_addr(os.urandom(8).hex())


def run_threads(count: int, body: Body) -> list[Any]:
    """Run ranks as threads; return what each returned or raised."""
    outcomes: list[Any] = [None] * count

    def run(index: int) -> None:
        try:
            outcomes[index] = body(index)
        except BaseException as error:
            outcomes[index] = error

    threads = [threading.Thread(target=run, args=(index,), daemon=True) for index in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
    assert not any(thread.is_alive() for thread in threads), "a rank hangs"
    return outcomes


def keep(wiring: Wiring) -> Wiring:
    return wiring


SETTINGS: dict[str, Any] = {
    "token": TOKEN,
    "timeout": PATIENCE_S,
    "create_segment": make_segment,
    "adopt": keep,
}


def join(rank: int, size: int, addr: str | None, **options: Any) -> Wiring:
    wiring: Wiring = connect(rank, size, addr, **{**SETTINGS, **options})
    return wiring


def join_all(size: int, **options: Any) -> list[Wiring]:
    listener, addr = local_listener()

    def body(rank: int) -> Wiring:
        return join(rank, size, addr, listener=listener if rank == 0 else None, **options)

    outcomes = run_threads(size, body)
    assert all(isinstance(outcome, Wiring) for outcome in outcomes), outcomes
    return outcomes


def live_fds() -> list[int]:
    fds = [int(name) for name in os.listdir("/proc/self/fd")]
    return [fd for fd in fds if os.path.lexists(f"/proc/self/fd/{fd}")]


@pytest.fixture(autouse=True)
def _patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give ranks that end together longer to hear of each other than a busy machine may take."""
    for name in ("FAREWELL_S", "LATECOMERS_S", "VERDICT_S"):
        monkeypatch.setattr(control_plane, name, SHORT_S)
    monkeypatch.setattr(connection, "DUPLICATE_CHECK_S", SHORT_S)


@pytest.fixture(autouse=True)
def _give_back_addresses() -> Iterator[None]:
    yield
    while _reserved:
        _reserved.pop().close()


@contextlib.contextmanager
def closing(wirings: Sequence[Wiring]) -> Iterator[None]:
    try:
        yield
    finally:
        for wiring in wirings:
            wiring.close()


# A healthy group


def test_a_listener_that_does_not_listen_is_refused() -> None:
    idle = socket.socket()
    with pytest.raises(ValueError, match="call its listen"):
        join(0, 2, "127.0.0.1:5", listener=idle)
    assert idle.fileno() < 0  # whoever is given it closes it
    with pytest.raises(TypeError, match="listener must be a socket"):
        join(0, 2, "127.0.0.1:5", listener=3)


def test_a_world_of_one_needs_no_address() -> None:
    wiring = connect(0, 1, None, create_segment=make_segment, adopt=keep)
    assert (wiring.hosts, wiring.segment_fd, wiring.sockets) == (((0,),), None, {})
    assert wiring.num_colocated == 1
    assert wiring.num_cores >= 1


@pytest.mark.parametrize("size", [2, 3, 4])
def test_ranks_of_a_host_share_one_segment(size: int) -> None:
    wirings = join_all(size)
    with closing(wirings):
        assert [wiring.rank for wiring in wirings] == list(range(size))
        assert all(wiring.hosts == (tuple(range(size)),) for wiring in wirings)
        assert all(wiring.sockets == {} for wiring in wirings)
        statuses = [os.fstat(wiring.segment_fd or -1) for wiring in wirings]
        assert len({status.st_ino for status in statuses}) == 1
        assert statuses[0].st_size == 4096 * size
        assert len({wiring.num_cores for wiring in wirings}) == 1
        assert {wiring.num_colocated for wiring in wirings} == {size}


@pytest.mark.parametrize("size", [2, 4])
def test_without_shared_memory_every_pair_has_two_sockets(size: int) -> None:
    wirings = join_all(size, create_segment=None)
    with closing(wirings):
        for wiring in wirings:
            assert wiring.segment_fd is None
            assert wiring.hosts == tuple((rank,) for rank in range(size))
            assert wiring.num_colocated == size
            assert sorted(wiring.sockets) == [r for r in range(size) if r != wiring.rank]
        check_sockets(wirings)


def check_sockets(wirings: Sequence[Wiring]) -> None:
    """Each socket leads to the right peer and purpose, and is as the engine needs it."""
    for wiring in wirings:
        for peer, fds in wiring.sockets.items():
            for purpose, fd in enumerate(fds):
                check_socket_options(fd)
                os.write(fd, bytes([wiring.rank, peer, purpose]))
    for wiring in wirings:
        for peer, fds in wiring.sockets.items():
            for purpose, fd in enumerate(fds):
                assert os.read(fd, 100) == bytes([peer, wiring.rank, purpose])


def check_socket_options(fd: int) -> None:
    assert fcntl.fcntl(fd, fcntl.F_GETFD) & fcntl.FD_CLOEXEC
    assert not os.get_blocking(fd)
    sock = socket.socket(fileno=os.dup(fd))
    with sock:
        assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


def test_a_passed_segment_is_not_inherited() -> None:
    with closing(wirings := join_all(2)):
        fd = wirings[1].segment_fd
        assert fd is not None
        assert fcntl.fcntl(fd, fcntl.F_GETFD) & fcntl.FD_CLOEXEC


def test_over_ipv6() -> None:
    try:
        listener, addr = local_listener("::1")
    except OSError as error:
        pytest.skip(f"no IPv6 loopback: {error}")

    def body(rank: int) -> Wiring:
        own = listener if rank == 0 else None
        return join(rank, 2, addr, listener=own, create_segment=None)

    with closing(wirings := run_threads(2, body)):
        assert wirings[0].addresses == ("::1", "::1")
        check_sockets(wirings)


@pytest.mark.parametrize("create_segment", [make_segment, None])
def test_over_a_unix_socket(create_segment: Any) -> None:
    addr = unix_addr()
    body = lambda rank: join(rank, 3, addr, create_segment=create_segment)  # noqa: E731
    with closing(wirings := run_threads(3, body)):
        check_sockets(wirings)


STRICT = """
from concurrent.futures import ThreadPoolExecutor
from ferro_dist import HostBackend

def join(rank):
    HostBackend(rank, 2, {addr!r}, token="t").close()

with ThreadPoolExecutor(2) as threads:
    list(threads.map(join, range(2)))
"""


def test_warnings_may_be_errors() -> None:
    # A socket at an abstract address has a repr that warns under -b.
    program = STRICT.format(addr=unix_addr())
    strict = [sys.executable, "-bb", "-W", "error", "-X", "dev", "-c", program]
    subprocess.run(strict, check=True)


def test_rank_0_may_come_last() -> None:
    addr = unix_addr()
    is_first_dialling = threading.Event()

    def body(rank: int) -> Wiring:
        if rank == 0:
            is_first_dialling.wait(PATIENCE_S)
        else:
            is_first_dialling.set()
        return join(rank, 2, addr)

    with closing(wirings := run_threads(2, body)):
        assert wirings[0].hosts == ((0, 1),)


def test_rank_0_binds_and_the_others_dial_an_address() -> None:
    addr = free_addr()
    with closing(wirings := run_threads(2, lambda rank: join(rank, 2, addr))):
        assert wirings[1].hosts == ((0, 1),)


def test_a_taken_address_among_several_is_left_out() -> None:
    stranger, taken = local_listener()
    with stranger:
        addr = f"{taken},{free_addr()}"
        with closing(wirings := run_threads(3, lambda rank: join(rank, 3, addr))):
            assert wirings[2].hosts == ((0, 1, 2),)


def test_groups_follow_each_other_at_one_address() -> None:
    addr = free_addr()
    for _ in range(3):
        for wiring in run_threads(2, lambda rank: join(rank, 2, addr)):
            wiring.close()


def test_groups_of_one_token_do_not_mix() -> None:
    # Both are told the same two addresses, in another order.
    first, second = free_addr(), free_addr()
    addrs = {"one": f"{first},{second}", "two": f"{second},{first}"}

    def body(index: int) -> Wiring:
        group = ("one", "two")[index % 2]
        return join(index // 2, 3, addrs[group], group=group)

    wirings = run_threads(6, body)
    with closing(wirings):
        inodes = [os.fstat(wiring.segment_fd or -1).st_ino for wiring in wirings]
        assert len(set(inodes[::2])) == len(set(inodes[1::2])) == 1
        assert inodes[0] != inodes[1]


def test_nothing_listens_afterwards() -> None:
    listener, addr = local_listener()

    def body(rank: int) -> Wiring:
        own = listener if rank == 0 else None
        return join(rank, 2, addr, listener=own, create_segment=None)

    with closing(run_threads(2, body)):
        host, _, port = addr.rpartition(":")
        # Not from the same address: its port may be given to a socket that meets itself there.
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection((host, int(port)), source_address=("127.0.0.2", 0))


def test_connecting_two_ranks_costs_little() -> None:
    # Processor time: the clock on the wall would measure what else the machine does. That of a
    # virtual machine may go on while it does not run: one attempt in many is enough.
    assert any(cost_of_connecting() < 0.03 for _ in range(50))


def cost_of_connecting() -> float:
    start = time.process_time()
    wirings = join_all(2)
    cost = time.process_time() - start
    for wiring in wirings:
        wiring.close()
    return cost


# Processes


def process_body(rank: int, size: int, addr: str, report: Any) -> None:
    wiring = join(rank, size, addr)
    report.send((os.fstat(wiring.segment_fd or -1).st_ino, wiring.hosts, wiring.num_cores))
    wiring.close()


@contextlib.contextmanager
def spawned(
    ranks: Sequence[int], size: int, addr: str, body: Callable[..., None]
) -> Iterator[list[Any]]:
    """Start ranks as processes; give each process and the pipe on which it reports."""
    context = multiprocessing.get_context("spawn")
    started = []
    try:
        for rank in ranks:
            receiver, sender = context.Pipe(duplex=False)
            process = context.Process(target=body, args=(rank, size, addr, sender))
            process.start()
            sender.close()
            started.append((process, receiver))
        yield started
    finally:
        for process, receiver in started:
            process.join(PATIENCE_S)
            process.kill()
            process.join()
            process.close()
            receiver.close()


def test_processes_share_a_segment() -> None:
    with spawned(range(3), 3, unix_addr(), process_body) as started:
        reports = [report.recv() for _, report in started if report.poll(PATIENCE_S)]
    assert len(reports) == 3
    assert len(set(reports)) == 1
    inode, hosts, _ = reports[0]
    assert inode != 0
    assert hosts == ((0, 1, 2),)


def joining_body(rank: int, size: int, addr: str, report: Any) -> None:
    """Report once this rank has joined."""

    def watch() -> None:
        wait_until_joined(1)
        report.send("joined")

    threading.Thread(target=watch, daemon=True).start()
    join(rank, size, addr)


def wait_until_joined(count: int) -> None:
    """Return once so many threads of this process have begun to exchange who they are."""
    wait_until_called("all_gather", count)


@pytest.mark.parametrize("victim", [0, 2])
def test_a_killed_process_is_named_to_the_others(victim: int) -> None:
    addr = unix_addr()
    survivors = [rank for rank in range(3) if rank != victim]
    # Rank 3 never comes: the others are still waiting when one of them is killed.
    with spawned([victim], 4, addr, joining_body) as [(process, report)]:

        def kill() -> None:
            assert report.poll(PATIENCE_S)
            wait_until_joined(2)
            os.kill(process.pid, signal.SIGKILL)

        killer = threading.Thread(target=kill)
        killer.start()
        outcomes = run_threads(2, lambda index: join(survivors[index], 4, addr))
        killer.join()
    assert_all(outcomes, PeerLostError, f"rank {victim} ended")
    assert all(outcome.peer == victim for outcome in outcomes)


# What goes wrong


def assert_all(outcomes: Sequence[Any], error: type[DistributedError], *texts: str) -> None:
    for outcome in outcomes:
        assert type(outcome) is error, outcome
        for text in texts:
            assert text in str(outcome), outcome


def test_an_absent_rank_is_named_on_every_rank() -> None:
    listener, addr = local_listener()

    def body(rank: int) -> Wiring:
        return join(rank, 4, addr, timeout=SHORT_S, listener=listener if rank == 0 else None)

    outcomes = run_threads(2, body)
    assert_all(outcomes, Timeout, "ranks 2, 3 of 4")
    assert all(outcome.missing == (2, 3) for outcome in outcomes)


def test_a_rank_whose_time_is_up_first_learns_who_is_missing() -> None:
    listener, addr = local_listener()

    def body(rank: int) -> Wiring:
        own = listener if rank == 0 else None
        return join(rank, 3, addr, timeout=(PATIENCE_S, SHORT_S)[rank], listener=own)

    outcomes = run_threads(2, body)
    assert_all(outcomes, Timeout, "rank 2 of 3", "Rank 1 waits no longer")
    assert all(outcome.missing == (2,) for outcome in outcomes)


def coordinator(loop: EventLoop, deadline: Deadline) -> control_plane.Coordinator:
    claim = Claim(Role.CONTROL, 0, 2, bytes(16))
    return control_plane.Coordinator(loop, None, b"a secret", claim, deadline)


def test_a_rank_that_knows_why_it_waits_gives_up_before_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(control_plane, "FIRST_HAND_S", PATIENCE_S)
    monkeypatch.setattr(control_plane, "VERDICT_FRACTION", 0.999)
    deadline = Deadline(PATIENCE_S)
    with contextlib.closing(EventLoop()) as loop:
        exchange = coordinator(loop, deadline)
        with pytest.raises(Timeout, match="Rank 1 is not reached"):
            exchange.wait(lambda: False, lambda: [1], lambda: " Rank 1 is not reached.")
    assert time.monotonic() < deadline.at


def test_a_rank_that_knows_why_it_waits_does_so_when_all_have_come_late() -> None:
    deadline = Deadline(100 * control_plane.FIRST_HAND_S)
    deadline.at = time.monotonic() + control_plane.FIRST_HAND_S  # the rest has passed
    answers: list[bool] = []
    with contextlib.closing(EventLoop()) as loop:
        loop.call_at(time.monotonic(), lambda: answers.append(True))
        exchange = coordinator(loop, deadline)
        exchange.wait(lambda: bool(answers), lambda: [1], lambda: " Rank 1: no answer.")
    assert answers


def test_an_absent_rank_0_is_named_with_its_address() -> None:
    addr, start = free_addr(), time.monotonic()
    with pytest.raises(Timeout, match=addr) as caught:
        join(1, 2, addr, timeout=0.3)
    assert caught.value.missing == (0,)
    assert "refused" in str(caught.value)
    assert time.monotonic() - start < SOON_S


def test_a_rank_0_whose_port_is_open_before_it_comes_is_absent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(event_loop, "HANDSHAKE_S", SHORT_S / 8)
    listener, addr = local_listener()
    with listener, pytest.raises(Timeout, match="Check that rank 0 runs") as error:
        join(1, 2, addr, timeout=SHORT_S)
    assert error.value.missing == (0,)


def test_an_unreachable_host() -> None:
    # TEST-NET-1 is never assigned: no route, or nobody answers.
    start = time.monotonic()
    with pytest.raises(Timeout, match=r"192\.0\.2\.1:9"):
        join(1, 2, "192.0.2.1:9", timeout=0.3)
    assert time.monotonic() - start < SOON_S


def test_an_unknown_name() -> None:
    start = time.monotonic()
    with pytest.raises(NoConnection, match=r"nowhere\.invalid"):
        join(1, 2, "nowhere.invalid:9", timeout=0.3)
    assert time.monotonic() - start < SOON_S
    # The resolver cannot be interrupted; it ends by itself.
    for thread in threading.enumerate():
        if thread.name == RESOLVER_THREAD:
            thread.join(PATIENCE_S)


def test_a_rank_started_twice_is_named_to_all() -> None:
    listener, addr = local_listener()

    def body(index: int) -> Wiring:
        rank = (0, 1, 1)[index]
        if index == 2:
            wait_until_joined(2)
        return join(rank, 3, addr, listener=listener if index == 0 else None)

    outcomes = run_threads(3, body)
    assert_all(outcomes, InvalidRank, "rank 1 was started twice")
    assert all(outcome.peer == 1 for outcome in outcomes)


def test_rank_0_started_twice() -> None:
    addr = unix_addr()
    outcomes = run_threads(2, lambda _: join(0, 2, addr))
    assert_all(outcomes, InvalidRank, "rank 0 was started twice")


def test_world_sizes_that_differ_are_both_named() -> None:
    listener, addr = local_listener()

    def body(rank: int) -> Wiring:
        if rank == 2:
            wait_until_joined(2)
        return join(rank, (3, 3, 4)[rank], addr, listener=listener if rank == 0 else None)

    outcomes = run_threads(3, body)
    assert_all(outcomes, InvalidWorldSize, "world size 4", "rank 0 with 3", "rank 2")


def test_a_rank_that_comes_after_the_failure_is_told() -> None:
    listener, addr = local_listener()
    has_failed = threading.Event()

    def body(index: int) -> Wiring:
        if index == 2:
            has_failed.wait(PATIENCE_S)
        try:
            rank, size = ((0, 3), (1, 4), (2, 3))[index]
            return join(rank, size, addr, listener=listener if index == 0 else None)
        finally:
            has_failed.set()

    assert_all(run_threads(3, body), InvalidWorldSize, "world size 4")


def test_a_taken_port_is_named() -> None:
    stranger, addr = local_listener()
    with stranger, pytest.raises(NoConnection, match=f"{addr}: .*Another program"):
        join(0, 2, addr)


def test_an_address_of_another_machine_is_not_said_to_be_taken() -> None:
    # Of RFC 5737: no machine has it.
    with pytest.raises(NoConnection, match=r"192\.0\.2\.1:29511: .*of the machine on which rank 0"):
        join(0, 2, "192.0.2.1:29511")


@pytest.mark.parametrize("words", [b"", b"HTTP/1.1 400 Bad Request\r\n\r\n" + b"x" * 100])
def test_a_listener_that_is_not_ours(words: bytes) -> None:
    stranger, addr = local_listener()

    def answer() -> None:
        with contextlib.suppress(OSError):
            while True:
                sock, _ = stranger.accept()
                with sock, contextlib.suppress(OSError):
                    sock.sendall(words)

    thread = threading.Thread(target=answer)
    thread.start()
    try:
        with pytest.raises(NoConnection, match="could not prove"):
            join(1, 2, addr, timeout=SHORT_S)
    finally:
        stranger.shutdown(socket.SHUT_RDWR)
        thread.join()
        stranger.close()


def test_a_wrong_token_is_told_on_both_sides() -> None:
    listener, addr = local_listener()

    def body(rank: int) -> Wiring:
        own = listener if rank == 0 else None
        return join(rank, 2, addr, token=(b"one", b"two")[rank], timeout=SHORT_S, listener=own)

    outcomes = run_threads(2, body)
    assert_all(outcomes[1:], NoConnection, "authentication failed", addr)
    assert_all(outcomes[:1], Timeout, "did not authenticate")


def test_another_group_at_the_address_is_told_even_once_it_has_gone() -> None:
    listener, addr = local_listener()

    def body(rank: int) -> Wiring:
        if rank == 0:
            return join(0, 2, addr, group="one", timeout=SHORT_S, listener=listener)
        return join(1, 2, addr, group="two", timeout=2 * SHORT_S)

    outcomes = run_threads(2, body)
    assert_all(outcomes[1:], Timeout, "before that, what listens there belongs to another group")


def come_with_another_version_first(rank: int, world_size: int, addr: str) -> None:
    own = authentication.VERSION
    if rank == 1:
        authentication.VERSION = own + 1
        with pytest.raises(NoConnection, match=rf"speaks version {own} .* version {own + 1}"):
            HostBackend(rank, world_size, addr)
        authentication.VERSION = own
    HostBackend(rank, world_size, addr).close()


def test_another_version_is_told() -> None:
    run_ranks(2, come_with_another_version_first, backend="none")
    claim = Claim(Role.CONTROL, 1, 2, bytes(16))
    hello = bytearray(claim.hello(bytes(32)))
    hello[4:6] = (authentication.VERSION + 1).to_bytes(2, "big")
    with pytest.raises(frame.ProtocolError, match=f"version {authentication.VERSION + 1}"):
        drive(authentication.answer(TOKEN, 0, bytes(16)), bytes(hello))


def test_a_lasting_wrong_token_ends_before_the_timeout() -> None:
    listener, addr = local_listener()

    def body(rank: int) -> Wiring:
        if rank == 0:
            return join(0, 3, addr, token=b"one", listener=listener)
        start = time.monotonic()
        with pytest.raises(NoConnection, match="authentication failed"):
            join(1, 3, addr, token=b"two")
        assert time.monotonic() - start < SOON_S
        return join(1, 3, addr, token=b"one", timeout=SHORT_S)

    assert_all(run_threads(2, body), Timeout, "rank 2 of 3")


def test_shared_memory_wanted_by_some_only() -> None:
    listener, addr = local_listener()

    def body(rank: int) -> Wiring:
        own = listener if rank == 0 else None
        create_segment = None if rank == 2 else make_segment
        return join(rank, 3, addr, create_segment=create_segment, listener=own)

    told = "rank 0 shares memory with others on its host, rank 2 does not"
    assert_all(run_threads(3, body), CollectiveMismatch, told)


def failing_segment(_: int) -> int:
    raise MemoryError("no memory left")


@pytest.mark.parametrize("through_parent", [False, True])
def test_a_segment_that_cannot_be_made_ends_all_ranks(through_parent: bool) -> None:
    outcomes = start_group(3, through_parent, create_segment=failing_segment)
    assert isinstance(outcomes[0], MemoryError)
    assert_all(outcomes[1:], Io, "rank 0 failed: MemoryError: no memory left")
    assert all(outcome.peer == 0 for outcome in outcomes[1:])


def forbidden_segment(_: int) -> int:
    raise Io("The group: memfd_create: Operation not permitted.")


def test_forbidden_shared_memory_is_told_with_what_needs_none() -> None:
    outcomes = start_group(2, through_parent=False, create_segment=forbidden_segment)
    assert_all(outcomes, Io, "memfd_create: Operation not permitted", "TcpBackend needs none")


@pytest.mark.parametrize("through_parent", [False, True])
def test_a_rank_that_cannot_make_its_part_of_a_group_is_named_on_all(through_parent: bool) -> None:
    def adopt(wiring: Wiring) -> Wiring:
        if wiring.rank == 1:
            raise Io("The group: fallocate of shared memory: No space left on device.")
        return wiring

    outcomes = start_group(3, through_parent, adopt=adopt)
    told = "No space left on device.\nRank 1 could not make its part of the group"
    assert_all(outcomes, Io, told)
    assert [outcome.rank for outcome in outcomes] == [0, 1, 2]
    assert all(outcome.op == "init" for outcome in outcomes)


def start_group(size: int, through_parent: bool, **options: Any) -> list[Any]:
    if through_parent:
        parent = Parent(size)
        return run_threads(size, lambda rank: split(parent, rank, **options))
    addr = unix_addr()
    return run_threads(size, lambda rank: join(rank, size, addr, **options))


def test_an_interrupted_rank_is_named_to_the_others() -> None:
    addr = unix_addr()

    def interrupted(_: int) -> int:
        raise KeyboardInterrupt

    outcomes = run_threads(3, lambda rank: join(rank, 3, addr, create_segment=interrupted))
    assert isinstance(outcomes[0], KeyboardInterrupt)
    assert_all(outcomes[1:], PeerLostError, "rank 0 was interrupted")


# Between the system call that makes a socket and the instruction that keeps it, an interrupt
# leaves it to the collector.
@pytest.mark.filterwarnings("ignore:unclosed <socket:ResourceWarning")
@pytest.mark.parametrize("rank", [0, 1])
def test_ctrl_c_acts_long_before_the_timeout(rank: int) -> None:
    addr, start = unix_addr(), time.monotonic()
    main = threading.main_thread().ident
    assert main is not None

    def interrupt() -> None:
        wait_until_called("run_until")
        signal.pthread_kill(main, signal.SIGINT)

    interrupter = threading.Thread(target=interrupt)
    interrupter.start()
    with pytest.raises(KeyboardInterrupt):
        join(rank, 2, addr)
    assert time.monotonic() - start < SOON_S
    interrupter.join()
    gc.collect()


@pytest.mark.parametrize(
    ("rank", "num_sockets"),
    [(0, 1), (0, 2), (1, 1)],
    ids=["listening", "accepted", "dialling"],
)
def test_an_interrupted_rank_closes_its_sockets(
    rank: int, num_sockets: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[socket.socket] = []

    def be_interrupted(sock: socket.socket, _: bool) -> None:
        made.append(sock)
        if len(made) == num_sockets:
            raise KeyboardInterrupt

    listener, addr = local_listener()
    host, _, port = addr.rpartition(":")
    with listener, socket.create_connection((host, int(port))):
        # What happens to every socket first.
        monkeypatch.setattr(socket.socket, "setblocking", be_interrupted)
        with pytest.raises(KeyboardInterrupt):
            join(rank, 2, addr, listener=listener if rank == 0 else None)
    assert [sock.fileno() for sock in made] == [-1] * num_sockets


def test_too_few_descriptors_are_told() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    listener, addr = local_listener()

    def body(rank: int) -> Wiring:
        own = listener if rank == 0 else None
        return join(rank, 4, addr, create_segment=None, listener=own, timeout=SHORT_S)

    taken = set(live_fds())
    free = [fd for fd in range(len(taken) + 20) if fd not in taken]
    resource.setrlimit(resource.RLIMIT_NOFILE, (free[12], hard))
    try:
        outcomes = run_threads(4, body)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert all(isinstance(outcome, DistributedError) for outcome in outcomes), outcomes
    assert any("oo many open files" in str(outcome) for outcome in outcomes), outcomes


@pytest.mark.parametrize(
    ("rank", "size", "error"),
    [
        (2, 2, InvalidRank),
        (-1, 2, InvalidRank),
        ("0", 2, InvalidRank),
        (0, 0, InvalidWorldSize),
        (0, 1 << 40, InvalidWorldSize),
        (0, 1.5, InvalidWorldSize),
        (0, True, InvalidWorldSize),
        (False, 2, InvalidRank),
    ],
)
def test_what_is_no_place(rank: Any, size: Any, error: type[Exception]) -> None:
    with pytest.raises(error):
        check_place(rank, size)


@pytest.mark.parametrize(
    ("timeout", "error"),
    [
        (0, ValueError),
        (-1, ValueError),
        (float("nan"), ValueError),
        ("1", TypeError),
        (None, TypeError),
        (True, TypeError),
    ],
)
def test_what_is_no_timeout(timeout: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match="timeout"):
        join(0, 2, free_addr(), timeout=timeout)


def test_a_missing_address() -> None:
    with pytest.raises(NoConnection, match="knows no address"):
        join(1, 2, None)


def test_port_zero_is_refused() -> None:
    with pytest.raises(NoConnection, match="port 0"):
        join(0, 2, "127.0.0.1:0")


# Strangers


def garbage() -> list[bytes]:
    hello = Claim(Role.CONTROL, 1, 2, group_digest("world", "")).hello(bytes(32))
    return [
        b"",
        b"\x00",
        b"GET / HTTP/1.1\r\n\r\n" * 20,
        hello[:40],
        hello + bytes(32),
        hello + bytes(10),
        os.urandom(4096),
    ]


def test_strangers_disturb_nobody() -> None:
    listener, addr = local_listener()
    host, _, port = addr.rpartition(":")
    strangers = [socket.create_connection((host, int(port))) for _ in range(100)]
    for index, stranger in enumerate(strangers):
        stranger.sendall(garbage()[index % 7])
    is_over = threading.Event()

    def pester() -> None:
        while not is_over.is_set():
            with contextlib.suppress(OSError), socket.create_connection((host, int(port))) as sock:
                sock.sendall(os.urandom(64))

    pest = threading.Thread(target=pester)
    pest.start()

    def body(rank: int) -> Wiring:
        own = listener if rank == 0 else None
        return join(rank, 4, addr, listener=own, create_segment=None)

    try:
        with closing(wirings := run_threads(4, body)):
            assert all(isinstance(wiring, Wiring) for wiring in wirings), wirings
            check_sockets(wirings)
    finally:
        is_over.set()
        pest.join()
        for stranger in strangers:
            stranger.close()


def test_a_rank_whose_turn_comes_late_is_let_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """Strangers may fill the queue of rank 0 faster than it turns them away."""
    monkeypatch.setattr(event_loop, "HANDSHAKE_S", 0.1)
    listener, addr = local_listener()
    listener.setblocking(False)
    claim = Claim(Role.CONTROL, 1, 2, bytes(16))
    accepted: list[Claim] = []
    connected: list[socket.socket] = []

    def take_turn(sock: socket.socket) -> None:
        def finish(sock: socket.socket, claim: Claim) -> None:
            accepted.append(claim)
            sock.close()

        conversation = authentication.answer(TOKEN, 0, claim.group_id)
        event_loop.Stream(loop, sock, conversation, finish, lambda error: None).start()

    def wait_for_turn(_: int) -> None:
        sock = loop.own(listener.accept()[0])
        event_loop.set_options(sock)
        loop.call_at(time.monotonic() + 0.5, lambda: take_turn(sock))

    with contextlib.closing(EventLoop()) as loop:
        loop.watch(listener, event_loop.READ, wait_for_turn)
        host, _, port = addr.rpartition(":")
        dialler = event_loop.Dialler(
            loop,
            target_of(host, int(port)),
            lambda be_patient: authentication.introduce(TOKEN, claim, 0, be_patient),
            connected.append,
        )
        dialler.dial()
        assert loop.run_until(lambda: bool(connected and accepted), time.monotonic() + SOON_S)
    connected[0].close()
    assert accepted == [claim]


@pytest.mark.parametrize("failed", SOCKET_ROLES)
def test_of_two_connections_to_a_peer_the_one_that_failed_is_described(failed: Role) -> None:
    def answer(_: object) -> frame.Conversation:
        raise AssertionError("nobody dials here")

    mesh = _Mesh(Wiring(1, 2, ((0,), (1,))))
    with contextlib.closing(mesh), contextlib.closing(EventLoop()) as loop:
        for peer, role in mesh.to_dial():
            keep = mesh.taker(peer, role)
            dialler = event_loop.Dialler(loop, target_of("127.0.0.1", 9), answer, keep)
            mesh.diallers[peer, role] = dialler
            if role is failed:
                dialler.last_error = ConnectionRefusedError("nobody listens")
            else:
                keep(socket.socket())
        assert mesh.describe_failures() == (
            " Rank 1 could not reach rank 0 at 127.0.0.1:9: nobody listens."
        )


def test_a_replayed_handshake_is_refused() -> None:
    claim = Claim(Role.CONTROL, 1, 2, bytes(16))
    recorded = handshake(claim, TOKEN, TOKEN)
    acceptor = authentication.answer(TOKEN, 0, bytes(16))
    next(acceptor)
    acceptor.send(recorded[0])
    next_wanted = acceptor.send(b"")
    assert next_wanted == len(recorded[2])
    with pytest.raises(authentication.AuthenticationFailed):
        acceptor.send(recorded[2])


def test_a_reflected_proof_is_refused() -> None:
    acceptor = authentication.answer(TOKEN, 0, bytes(16))
    next(acceptor)
    challenge = acceptor.send(Claim(Role.CONTROL, 1, 2, bytes(16)).hello(bytes(32)))
    assert isinstance(challenge, bytes)
    acceptor.send(b"")
    with pytest.raises(authentication.AuthenticationFailed):
        acceptor.send(challenge[-32:])


def test_an_impostor_learns_no_proof() -> None:
    with pytest.raises(authentication.AuthenticationFailed):
        handshake(Claim(Role.CONTROL, 1, 2, bytes(16)), TOKEN, b"guessed")


def handshake(claim: Claim, token: bytes, acceptor_token: bytes) -> list[bytes]:
    """Let both sides speak; return all messages."""
    dialler = authentication.introduce(token, claim, 0, lambda: None)
    acceptor = authentication.answer(acceptor_token, 0, claim.group_id)
    messages = []
    next(acceptor)
    speaker: Any = dialler
    message = next(dialler)
    while True:
        assert isinstance(message, bytes)
        messages.append(message)
        listener = acceptor if speaker is dialler else dialler
        try:
            speaker.send(b"")
        except StopIteration:
            return messages
        try:
            reply = listener.send(message)
        except StopIteration:
            return messages
        speaker, message = listener, reply


# Tokens


def test_the_token_file_is_private_and_shared(tmp_path: Any) -> None:
    environ = {"HOME": str(tmp_path)}
    tokens = run_threads(4, lambda _: find_token(None, environ))
    assert len(set(tokens)) == 1
    token, is_shared = tokens[0]
    assert len(token) == 64
    assert not is_shared
    folder = tmp_path / ".cache" / "ferro_dist"
    assert [path.name for path in folder.iterdir()] == ["token"]
    assert stat.S_IMODE((folder / "token").stat().st_mode) == 0o600


def test_xdg_runtime_dir_is_preferred(tmp_path: Any) -> None:
    find_token(None, {"XDG_RUNTIME_DIR": str(tmp_path), "HOME": "/nonexistent"})
    assert (tmp_path / "ferro_dist" / "token").exists()


def test_a_user_without_a_home_gets_no_token_file(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def is_unknown(uid: int) -> None:
        raise KeyError(uid)

    monkeypatch.setattr("pwd.getpwuid", is_unknown)
    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.chdir(tmp_path)
    for environ in ({}, {"HOME": "relative"}):
        with pytest.raises(NoConnection, match="no home folder; set FERRO_DIST_TOKEN"):
            find_token(None, environ)
    assert not list(tmp_path.iterdir())


def test_a_token_file_that_others_may_read_is_refused(tmp_path: Any) -> None:
    environ = {"HOME": str(tmp_path)}
    find_token(None, environ)
    (tmp_path / ".cache" / "ferro_dist" / "token").chmod(0o644)
    with pytest.raises(NoConnection, match="nobody else"):
        find_token(None, environ)


def test_a_token_file_that_is_a_link_is_refused(tmp_path: Any) -> None:
    folder = tmp_path / ".cache" / "ferro_dist"
    folder.mkdir(parents=True)
    (folder / "token").symlink_to("/etc/passwd")
    with pytest.raises(NoConnection, match="FERRO_DIST_TOKEN"):
        find_token(None, {"HOME": str(tmp_path)})


def test_an_empty_token_is_refused() -> None:
    for environ in ({"FERRO_DIST_TOKEN": ""}, {"FERRO_DIST_TOKEN": " \n"}):
        with pytest.raises(NoConnection, match="FERRO_DIST_TOKEN is empty"):
            find_token(None, environ)
    with pytest.raises(NoConnection, match="token is empty"):
        find_token(b"", {})


@pytest.mark.parametrize("token", [1234, 0, True, ["a"]])
def test_a_token_that_is_no_text_is_refused(token: Any) -> None:
    with pytest.raises(TypeError, match="token must be bytes or str"):
        find_token(token, {})


def test_the_token_comes_through_a_descriptor() -> None:
    read, write = os.pipe()
    os.write(write, b"through a pipe\n")
    os.close(write)
    environ = {"FERRO_DIST_TOKEN_FD": str(read)}
    assert find_token(None, environ) == (b"through a pipe", True)
    assert find_token(None, environ) == (b"through a pipe", True)
    authentication._tokens_of_fds.clear()
    os.close(read)
    with pytest.raises(NoConnection, match="FERRO_DIST_TOKEN_FD"):
        find_token(None, environ)


def test_a_token_that_never_ends_is_given_up_in_time() -> None:
    read, write = os.pipe()
    try:
        os.write(write, b"through a pipe that stays open")
        with pytest.raises(NoConnection, match="came to no end in time"):
            join(
                1,
                2,
                "127.0.0.1:1",
                token=None,
                timeout=0.1,
                environ={"FERRO_DIST_TOKEN_FD": str(read)},
            )
    finally:
        authentication._unfinished_tokens.clear()
        os.close(read)
        os.close(write)


def test_a_token_that_comes_late_is_whole_at_the_next_attempt() -> None:
    read, write = os.pipe()
    environ = {"FERRO_DIST_TOKEN_FD": str(read)}
    try:
        os.write(write, b"through ")
        with pytest.raises(NoConnection, match="came to no end in time"):
            find_token(None, environ, time.monotonic())
        os.write(write, b"a pipe")
    finally:
        os.close(write)
    assert find_token(None, environ) == (b"through a pipe", True)
    authentication._tokens_of_fds.clear()
    os.close(read)


def test_other_machines_are_let_in_only_with_a_token(tmp_path: Any) -> None:
    environ = {"HOME": str(tmp_path)}
    for rank in (0, 1):
        with pytest.raises(NoConnection, match="set FERRO_DIST_TOKEN"):
            join(rank, 2, "0.0.0.0:29511", token=None, environ=environ)
    listener, addr = local_listener("0.0.0.0")
    with pytest.raises(NoConnection, match="set FERRO_DIST_TOKEN"):
        join(0, 2, addr, token=None, environ=environ, listener=listener)


def test_the_token_file_serves_this_machine(tmp_path: Any) -> None:
    environ = {"HOME": str(tmp_path)}
    with closing(join_all(2, token=None, environ=environ)):
        pass


def test_a_rank_0_that_waits_itself_is_not_named_as_missing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    share_segment = _Wirer._share_segment
    are_others_done = threading.Event()

    def share_late(wirer: Any, made: Wiring, server: socket.socket) -> None:
        if wirer._rank == 1:
            are_others_done.wait(PATIENCE_S)
        share_segment(wirer, made, server)

    monkeypatch.setattr(_Wirer, "_share_segment", share_late)
    addr = unix_addr()

    def body(rank: int) -> Wiring:
        try:
            # Rank 2 has all that it needs, and is the first to give up.
            return join(rank, 3, addr, timeout=SHORT_S if rank == 2 else PATIENCE_S)
        finally:
            if rank != 1:
                are_others_done.set()

    for outcome in run_threads(3, body)[::2]:
        assert isinstance(outcome, Timeout), outcome
        assert outcome.missing == (1,), outcome


# Through a group that exists


class Parent:
    """All ranks' byte strings, gathered among threads."""

    def __init__(self, size: int) -> None:
        self._parts: list[bytes] = [b""] * size
        self._barrier = threading.Barrier(size, timeout=PATIENCE_S)

    def all_gather(self, rank: int) -> Callable[[bytes], list[bytes]]:
        def gather(part: bytes) -> list[bytes]:
            self._parts[rank] = part
            self._barrier.wait()
            parts = list(self._parts)
            self._barrier.wait()
            return parts

        return gather


def split(parent: Parent, rank: int, **options: Any) -> Wiring:
    size = parent._barrier.parties
    gather = options.pop("gather", parent.all_gather(rank))
    settings = {**SETTINGS, "addresses": ["127.0.0.1"] * size}
    wiring: Wiring = connect_through(gather, rank, size, **{**settings, **options})
    return wiring


@pytest.mark.parametrize("create_segment", [make_segment, None])
def test_a_group_made_through_another(create_segment: Any) -> None:
    with closing(wirings := start_group(3, True, create_segment=create_segment)):
        assert len({wiring.segment_fd is None for wiring in wirings}) == 1
        check_sockets(wirings)


def test_a_timeout_through_another_group_names_the_missing() -> None:
    parent = Parent(2)

    def body(rank: int) -> Wiring:
        # They are both there, but neither lets the other in.
        token = (b"one secret", b"another")[rank]
        return split(parent, rank, token=token, create_segment=None, timeout=SHORT_S)

    outcomes = run_threads(2, body)
    assert_all(outcomes, Timeout, "came, but without a connection to every other within")
    assert {outcome.missing for outcome in outcomes} <= {(0,), (1,)}


def rewrite(part: bytes, **facts: Any) -> bytes:
    member = Member.decode(part[1:])
    return part[:1] + Member(**{**vars(member), **facts}).encode()


def tampering(gather: Callable[[bytes], list[bytes]], facts: dict[int, dict[str, Any]]) -> Any:
    """Change what the ranks say of themselves, in the first exchange."""
    rounds = iter(range(100))

    def tampered(part: bytes) -> list[bytes]:
        parts = gather(part)
        if next(rounds) == 0:
            parts = [rewrite(part, **facts.get(rank, {})) for rank, part in enumerate(parts)]
        return parts

    return tampered


def start_tampered(size: int, facts: dict[int, dict[str, Any]], **options: Any) -> list[Any]:
    parent = Parent(size)

    def body(rank: int) -> Wiring:
        gather = tampering(parent.all_gather(rank), facts)
        return split(parent, rank, gather=gather, **options)

    return run_threads(size, body)


def test_two_hosts_share_memory_inside_and_sockets_between() -> None:
    facts = {rank: {"host": "another"} for rank in (1, 3)}
    with closing(wirings := start_tampered(4, facts)):
        assert all(wiring.hosts == ((0, 2), (1, 3)) for wiring in wirings), wirings
        inodes = [os.fstat(wiring.segment_fd or -1).st_ino for wiring in wirings]
        assert inodes[0] == inodes[2] != inodes[1] == inodes[3]
        assert sorted(wirings[0].sockets) == [1, 3]
        check_sockets(wirings)


def test_ranks_that_cannot_pass_a_descriptor_use_sockets() -> None:
    # Nobody listens where rank 0 says it does.
    with closing(wirings := start_tampered(3, {0: {"socket": "00" * 16}})):
        assert all(wiring.hosts == ((0,), (1,), (2,)) for wiring in wirings), wirings
        check_sockets(wirings)


def test_a_malformed_member_is_an_error_on_all_ranks() -> None:
    parent = Parent(2)

    def body(rank: int) -> Wiring:
        gather = parent.all_gather(rank)

        def cut_short(part: bytes) -> list[bytes]:
            parts = gather(part)
            return [parts[0], parts[1][:-3]]

        return split(parent, rank, gather=cut_short)

    outcomes = run_threads(2, body)
    assert_all(outcomes, Io, "rank 1 sent no JSON")
    assert [outcome.peer for outcome in outcomes] == [1, 1]


# The protocol's bytes


def drive(conversation: frame.Conversation, data: bytes) -> Any:
    """Feed a conversation from a byte string; return its result, None if it wants more."""
    try:
        wanted = next(conversation)
        at = 0
        while True:
            if isinstance(wanted, bytes):
                wanted = conversation.send(b"")
                continue
            # Nothing is taken before it is there: a length cannot make the reader reserve memory.
            if wanted > len(data) - at:
                return None
            piece, at = data[at : at + wanted], at + wanted
            wanted = conversation.send(piece)
    except StopIteration as stop:
        return stop.value
    finally:
        conversation.close()


@given(st.binary(max_size=200), st.integers(0, 100))
def test_any_bytes_are_a_frame_or_a_protocol_error(data: bytes, limit: int) -> None:
    with contextlib.suppress(frame.ProtocolError):
        found = drive(frame.read_frame(limit), data)
        if found is not None:
            kind, body = found
            assert len(body) <= limit
            assert data.startswith(frame.encode_frame(kind, body))


@given(st.sampled_from(frame.FrameKind), st.binary(max_size=300))
def test_a_frame_is_read_as_it_was_written(kind: frame.FrameKind, body: bytes) -> None:
    assert drive(frame.read_frame(300), frame.encode_frame(kind, body)) == (kind, body)


@given(st.binary(max_size=200), st.integers(0, 5))
def test_any_bytes_are_a_list_or_a_protocol_error(data: bytes, count: int) -> None:
    with contextlib.suppress(frame.ProtocolError):
        assert frame.pack_list(frame.unpack_list(data, count)) == data


@given(st.lists(st.binary(max_size=20), max_size=5))
def test_a_list_is_read_as_it_was_written(parts: list[bytes]) -> None:
    assert frame.unpack_list(frame.pack_list(parts), len(parts)) == parts


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=9), inner),
    max_leaves=5,
)


@given(st.binary(max_size=100) | JSON.map(lambda value: json.dumps(value).encode()))
def test_any_bytes_are_an_error_or_a_protocol_error(data: bytes) -> None:
    for parse in (lambda body: frame.decode_error(body, 0), Member.decode):
        with contextlib.suppress(frame.ProtocolError):
            assert isinstance(parse(data), (DistributedError, Member))


@given(
    st.fixed_dictionaries(
        {
            "class": st.sampled_from(sorted(frame.ERRORS)) | st.text(),
            "message": st.text() | JSON,
            "peer": st.none() | st.integers() | JSON,
        },
        optional={"missing": JSON | st.lists(st.integers()), "seconds": JSON | st.floats()},
    )
)
def test_nearly_right_errors(facts: dict[str, Any]) -> None:
    with contextlib.suppress(frame.ProtocolError):
        error = frame.decode_error(json.dumps(facts).encode(), 0)
        assert isinstance(error, DistributedError)


def test_deeply_nested_json_is_a_protocol_error() -> None:
    with pytest.raises(frame.ProtocolError):
        frame.decode_json(b"[" * 100_000)


@given(st.text(), st.lists(st.integers(0, 1 << 20), max_size=2000))
def test_an_error_fits_into_a_contribution(message: str, missing: list[int]) -> None:
    body = frame.encode_error(Timeout(message, missing=missing, peer=3, seconds=1.5))
    assert len(body) <= frame.MAX_CONTRIBUTION_NBYTES
    error = frame.decode_error(body, 7)
    assert isinstance(error, Timeout)
    assert (error.rank, error.peer, error.seconds) == (7, 3, 1.5)


@given(st.binary(max_size=200))
def test_any_hello_is_refused_without_the_token(data: bytes) -> None:
    with contextlib.suppress(frame.ProtocolError):
        assert drive(authentication.answer(TOKEN, 0, bytes(16)), data) is None


@given(st.binary(min_size=0, max_size=200))
@settings(max_examples=50)
def test_any_challenge_is_refused_without_the_token(data: bytes) -> None:
    claim = Claim(Role.COLLECTIVE, 1, 2, bytes(16))
    gave_proof: list[bool] = []
    with contextlib.suppress(frame.ProtocolError):
        drive(authentication.introduce(TOKEN, claim, 0, lambda: gave_proof.append(True)), data)
    assert not gave_proof


# The machine


def test_this_process_shares_memory_with_itself() -> None:
    assert machine.host_identity() == machine.host_identity()
    assert machine.host_identity().startswith(machine.network_identity().partition(":")[0])


def test_an_infinite_timeout_is_none() -> None:
    assert Deadline(float("inf")).at == float("inf")
    with closing(join_all(2, timeout=float("inf"))):
        pass
