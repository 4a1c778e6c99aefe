"""A group over two hosts, which are network namespaces."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from namespaces import Host, cabled_hosts, ip

from ferro_dist.errors import Timeout
from ferro_dist.rendezvous import connect

PORT = 29555  # the namespaces are this test's own: nobody else can be there
PATIENCE_S = 60.0

RANK = """
import json, os, select, sys
from ferro_dist.rendezvous import connect

rank, addr = int(sys.argv[1]), sys.argv[2]
segment = lambda num_ranks: os.memfd_create("segment")
keep = lambda wiring: wiring
wiring = connect(
    rank, 4, addr, token=b"a secret", timeout=60, create_segment=segment, adopt=keep
)
for pair in wiring.sockets.values():
    for fd in pair:
        os.write(fd, bytes([rank]))
heard = {}
for peer, pair in wiring.sockets.items():
    for fd in pair:
        select.select([fd], [], [])
    heard[peer] = [list(os.read(fd, 9)) for fd in pair]
inode = os.fstat(wiring.segment_fd).st_ino
print(json.dumps([wiring.hosts, wiring.addresses, inode, heard]), flush=True)
sys.stdin.read()
"""


@pytest.fixture
def hosts() -> Iterator[list[Host]]:
    with cabled_hosts(2) as hosts:
        yield hosts


def run_ranks(places: Sequence[tuple[Host, str]]) -> list[Any]:
    """Run a rank for each host and address; return what each reports."""
    ranks = [
        subprocess.Popen(
            host.command(sys.executable, "-c", RANK, str(rank), addr),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank, (host, addr) in enumerate(places)
    ]
    try:
        # Nobody leaves before all have read: communicate() closes the input one by one.
        return [json.loads(rank.stdout.readline() if rank.stdout else "") for rank in ranks]
    finally:
        for rank in ranks:
            rank.communicate(timeout=PATIENCE_S)


def check(reports: Sequence[Any]) -> None:
    inodes = [inode for _, _, inode, _ in reports]
    assert inodes[0] == inodes[1]
    assert inodes[2] == inodes[3]
    for rank, (hosts, _, _, heard) in enumerate(reports):
        assert hosts == [[0, 1], [2, 3]]
        others = [2, 3] if rank < 2 else [0, 1]
        assert heard == {str(peer): [[peer], [peer]] for peer in others}


def test_hosts_share_memory_inside_and_sockets_between(hosts: list[Host]) -> None:
    addr = f"{hosts[0].address}:{PORT}"
    reports = run_ranks([(hosts[0], addr), (hosts[0], addr), (hosts[1], addr), (hosts[1], addr)])
    check(reports)
    for _, addresses, _, _ in reports:
        assert addresses == [hosts[0].address] * 2 + [hosts[1].address] * 2


def test_ranks_that_reach_rank_0_by_loopback_are_reached_from_elsewhere(
    hosts: list[Host],
) -> None:
    wildcard, loopback, addr = (
        f"{address}:{PORT}" for address in ("0.0.0.0", "127.0.0.1", hosts[0].address)
    )
    places = [(hosts[0], wildcard), (hosts[0], loopback), (hosts[1], addr), (hosts[1], addr)]
    check(run_ranks(places))


NAMED_RANK = """
import os, sys
from ferro_dist.rendezvous import connect, placement

place = placement(*map(int, sys.argv[1:3]), *sys.argv[3:])
connect(
    place.rank, 2, place.addr, timeout=60, listener=place.listener(),
    create_segment=lambda num_ranks: os.memfd_create("segment"), adopt=lambda wiring: wiring,
)
print("connected", flush=True)
"""


# What rank 0's own host says of its name. The other one always knows it by the same address.
@pytest.mark.parametrize(
    "addresses",
    [["127.0.1.1"], ["127.0.1.1", "10.9.0.1"], ["10.9.9.9", "10.9.0.1"]],
    ids=["loopback", "loopback and another", "another host's first"],
)
@pytest.mark.parametrize("is_launched", [False, True], ids=["by hand", "ferrorun"])
def test_rank_0_is_reached_by_a_name_that_means_something_else_to_itself(
    hosts: list[Host], addresses: list[str], is_launched: bool, tmp_path: Path
) -> None:
    files = tmp_path / "0", tmp_path / "1"
    files[0].write_text("".join(f"{address} head\n" for address in addresses))
    files[1].write_text(f"{hosts[0].address} head\n")
    script, addr = tmp_path / "rank.py", f"head:{PORT}"
    script.write_text(NAMED_RANK)
    ranks = []
    for rank, (host, file) in enumerate(zip(hosts, files, strict=True)):
        launcher = ["-m", "ferro_dist.launch", "-n", "1", "--nnodes", "2", "--node-rank", str(rank)]
        words = (
            [*launcher, "--rdzv-endpoint", addr, str(script)]
            if is_launched
            else [str(script), str(rank), "2", addr]
        )
        ranks.append(
            subprocess.Popen(
                host.command_with_names(str(file), sys.executable, *words),
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                env={**os.environ, "FERRO_DIST_TOKEN": "a secret"},
            )
        )
    outputs = [rank.communicate(timeout=2 * PATIENCE_S)[0] for rank in ranks]
    assert all("connected" in output for output in outputs), outputs


def join_in_vain(host: Host, rank: int, addr: str, timeout: float) -> Timeout:
    host.enter()
    with pytest.raises(Timeout) as raised:
        connect(
            rank,
            3,
            addr,
            token=b"a secret",
            timeout=timeout,
            create_segment=lambda num_ranks: os.memfd_create("segment"),
            adopt=lambda wiring: wiring,
        )
    return raised.value


def test_a_rank_that_cannot_be_reached_is_not_said_to_be_absent() -> None:
    with cabled_hosts(3) as hosts, ThreadPoolExecutor(3) as pool:
        ip("-n", hosts[2].name, "route", "add", "unreachable", hosts[1].address)
        addr = f"{hosts[0].address}:{PORT}"
        timeouts = [PATIENCE_S, PATIENCE_S, 4.0]
        joining = [pool.submit(join_in_vain, hosts[r], r, addr, timeouts[r]) for r in range(3)]
        for error in [each.result() for each in joining]:
            assert error.missing == (1,)
            assert "rank 1 of 3 came, but" in str(error)
            assert f"Rank 2 could not reach rank 1 at {hosts[1].address}:" in str(error)
