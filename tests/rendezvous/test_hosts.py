"""A group over two hosts, which are network namespaces."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from namespaces import Host, cabled_hosts

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
