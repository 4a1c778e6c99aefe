"""Where a process finds its rank."""

from __future__ import annotations

import shutil
import socket
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ferro_dist.errors import InvalidRank, InvalidWorldSize, NoConnection
from ferro_dist.rendezvous.address import DERIVED_PORTS, Address, derived_addr, parse_addresses
from ferro_dist.rendezvous.environment import Placement, placement
from ferro_dist.rendezvous.rank_zero import first_host

Environ = dict[str, str]


def ferrorun(rank: int, size: int) -> Environ:
    own = {
        "FERRO_RANK": str(rank),
        "FERRO_WORLD_SIZE": str(size),
        "FERRO_LOCAL_RANK": str(rank),
        "FERRO_LOCAL_WORLD_SIZE": str(size),
        "FERRO_ADDR": "127.0.0.1:4242",
        "FERRO_DIST_EPOCH": "3",
        "FERRO_DIST_TOKEN": "secret",
    }
    return own | torchrun(rank, size, agent=False)


def torchrun(rank: int, size: int, *, local: int | None = None, agent: bool = True) -> Environ:
    local = local or size
    own = {
        "RANK": str(rank),
        "WORLD_SIZE": str(size),
        "LOCAL_RANK": str(rank % local),
        "LOCAL_WORLD_SIZE": str(local),
        "MASTER_ADDR": "node0",
        "MASTER_PORT": "29500",
    }
    agents = {
        "GROUP_WORLD_SIZE": str(size // local),
        "TORCHELASTIC_RUN_ID": "run",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }
    return own | agents if agent else own


def openmpi(rank: int, size: int, local: int | None = None) -> Environ:
    return {
        "OMPI_COMM_WORLD_RANK": str(rank),
        "OMPI_COMM_WORLD_SIZE": str(size),
        "OMPI_COMM_WORLD_LOCAL_RANK": str(rank % (local or size)),
        "OMPI_COMM_WORLD_LOCAL_SIZE": str(local or size),
        "PMIX_NAMESPACE": "prterun-node0-77@1",
    }


def slurm(rank: int, size: int, nodes: int = 1) -> Environ:
    per_node = size // nodes
    return {
        "SLURM_JOB_ID": "12",
        "SLURM_STEP_ID": "0",
        "SLURM_STEP_NUM_TASKS": str(size),
        "SLURM_STEP_NUM_NODES": str(nodes),
        "SLURM_STEP_TASKS_PER_NODE": f"{per_node}(x{nodes})",
        "SLURM_STEP_NODELIST": "rack2n[03-06,9]",
        "SLURM_PROCID": str(rank),
        "SLURM_LOCALID": str(rank % per_node),
        "SLURM_NODEID": str(rank // per_node),
    }


def test_nothing_is_a_world_of_one() -> None:
    assert placement(environ={}) == Placement(0, 1, None, 0, 1, "none", "file", "")


def test_arguments_overrule_the_environment() -> None:
    place = placement(1, 2, "host:5", environ=torchrun(3, 4))
    assert (place.rank, place.world_size, place.addr) == (1, 2, "host:5")
    assert place.launcher == "arguments"


def test_ferrorun_sets_everything() -> None:
    place = placement(environ=ferrorun(1, 4))
    expected = Placement(
        1, 4, "127.0.0.1:4242", 1, 4, "ferrorun", "FERRO_DIST_TOKEN", "3", listen_fd=None
    )
    assert place == expected


def test_torchrun_master_port_is_never_taken_from_the_agent() -> None:
    environ = torchrun(5, 8, local=4)
    addr = placement(environ=environ).addr
    assert addr is not None
    ports = [address.port for address in parse_addresses(addr)]
    assert len(ports) > 1
    assert 29500 not in ports
    assert {address.host for address in parse_addresses(addr)} == {"node0"}


def test_torchrun_ranks_agree_on_an_address() -> None:
    for local in (4, 8):
        assert len({placement(environ=torchrun(r, 8, local=local)).addr for r in range(8)}) == 1


def test_torchrun_hosts_with_different_restart_counts_agree() -> None:
    # Each agent counts only the restarts that its own ranks have caused.
    environ = torchrun(0, 8, local=4)
    other = environ | {"TORCHELASTIC_RESTART_COUNT": "1"}
    assert placement(environ=environ) == placement(environ=other)


def test_torchrun_restart_on_one_host_is_another_epoch() -> None:
    environ = torchrun(0, 2)
    again = placement(environ=environ | {"TORCHELASTIC_RESTART_COUNT": "1"})
    assert again.epoch != placement(environ=environ).epoch
    assert again.addr != placement(environ=environ).addr


def test_torchrun_on_one_host_needs_no_port() -> None:
    addr = placement(environ=torchrun(0, 2)).addr
    assert addr is not None
    assert addr.startswith("unix:@")


def test_master_port_without_an_agent_is_tried_first() -> None:
    environ = torchrun(0, 2, agent=False)
    addr = placement(environ=environ).addr
    assert addr is not None
    assert addr.startswith("node0:29500,")


def test_ipv6_master_addr_is_bracketed() -> None:
    addr = placement(environ=torchrun(0, 2, agent=False) | {"MASTER_ADDR": "fd00::1"}).addr
    assert addr is not None
    assert parse_addresses(addr)[0] == Address("[fd00::1]:29500", "fd00::1", 29500)


def test_openmpi_on_one_host_derives_an_address() -> None:
    places = [placement(environ=openmpi(rank, 3)) for rank in range(3)]
    assert [place.rank for place in places] == [0, 1, 2]
    assert len({place.addr for place in places}) == 1
    assert places[0].launcher == "openmpi"


def test_openmpi_on_several_hosts_needs_an_address() -> None:
    with pytest.raises(NoConnection, match="FERRO_ADDR=host:port"):
        placement(environ=openmpi(0, 4, local=2))
    environ = openmpi(0, 4, local=2) | {"FERRO_ADDR": "node0:7000"}
    assert placement(environ=environ).addr == "node0:7000"


def test_slurm_step_on_several_hosts() -> None:
    place = placement(environ=slurm(5, 8, nodes=2))
    assert (place.rank, place.world_size) == (5, 8)
    assert (place.local_rank, place.local_world_size) == (1, 4)
    assert place.addr is not None
    assert parse_addresses(place.addr)[0].host == "rack2n03"
    assert place.addr == placement(environ=slurm(0, 8, nodes=2)).addr


def test_slurm_steps_have_different_addresses() -> None:
    first = placement(environ=slurm(0, 8, nodes=2))
    second = placement(environ=slurm(0, 8, nodes=2) | {"SLURM_STEP_ID": "1"})
    assert first.addr != second.addr


@pytest.mark.parametrize(
    "environ",
    [
        {"SLURM_PROCID": "0", "SLURM_NTASKS": "4", "SLURM_JOB_ID": "1"},
        slurm(0, 4) | {"SLURM_PTY_PORT": "40000"},
        slurm(0, 4) | {"SLURM_STEP_NUM_TASKS": "1"},
        slurm(0, 1) | {"PMIX_RANK": "0", "PMIX_NAMESPACE": "slurm.pmix.4242.0"},
    ],
    ids=["batch script", "interactive", "one task", "one task with PMIx"],
)
def test_slurm_outside_a_step_is_a_world_of_one(environ: Environ) -> None:
    assert placement(environ=environ).world_size == 1


def test_pmi_of_slurm_takes_the_address_of_the_step() -> None:
    environ = slurm(3, 4, nodes=2) | {"PMI_RANK": "3", "PMI_SIZE": "4"}
    place = placement(environ=environ)
    assert place.launcher == "mpich"
    assert place.addr is not None
    assert place.addr.startswith("rack2n03:")
    assert place.local_rank == 1


def test_torchrun_started_by_srun_is_no_contradiction() -> None:
    place = placement(environ=torchrun(5, 8, local=4) | slurm(1, 2, nodes=2))
    assert (place.rank, place.world_size, place.launcher) == (5, 8, "torchrun")


def test_mpirun_started_by_srun_is_no_contradiction() -> None:
    environ = openmpi(5, 6, local=2) | {"FERRO_ADDR": "a:1"} | slurm(0, 2, nodes=2)
    assert placement(environ=environ).rank == 5


@pytest.mark.parametrize(
    ("environ", "error", "names"),
    [
        (ferrorun(1, 4) | {"RANK": "2"}, InvalidRank, ("FERRO_RANK", "RANK")),
        (ferrorun(1, 4) | {"WORLD_SIZE": "8"}, InvalidWorldSize, ("FERRO_WORLD_SIZE", "WORLD_")),
        (
            {"RANK": "0", "WORLD_SIZE": "1"} | openmpi(1, 2),
            InvalidWorldSize,
            ("WORLD_SIZE", "OMPI_COMM_WORLD_SIZE"),
        ),
        (
            {"RANK": "0", "WORLD_SIZE": "2"} | openmpi(1, 2),
            InvalidRank,
            ("RANK", "OMPI_COMM_WORLD_RANK"),
        ),
    ],
)
def test_contradicting_sources_are_both_named(
    environ: Environ, error: type[Exception], names: tuple[str, str]
) -> None:
    with pytest.raises(error) as caught:
        placement(environ=environ)
    for name in names:
        assert name in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "error", "name"),
    [
        ({"RANK": "one"}, InvalidRank, "RANK='one'"),
        ({"RANK": "-1"}, InvalidRank, "RANK='-1'"),
        ({"RANK": "1_0"}, InvalidRank, "RANK='1_0'"),
        ({"RANK": "２"}, InvalidRank, "RANK='２'"),
        ({"RANK": ""}, InvalidRank, "RANK=''"),
        ({"RANK": "4"}, InvalidRank, "RANK=4"),
        ({"WORLD_SIZE": "0"}, InvalidWorldSize, "WORLD_SIZE='0'"),
        ({"WORLD_SIZE": "9" * 30}, InvalidWorldSize, "WORLD_SIZE="),
        ({"WORLD_SIZE": None}, InvalidWorldSize, "WORLD_SIZE is not"),
        ({"RANK": None}, InvalidRank, "RANK is not"),
        ({"LOCAL_RANK": "x"}, InvalidRank, "LOCAL_RANK='x'"),
        ({"LOCAL_WORLD_SIZE": "9"}, InvalidWorldSize, "LOCAL_WORLD_SIZE=9"),
        ({"MASTER_PORT": "http"}, NoConnection, "MASTER_PORT='http'"),
        ({"MASTER_PORT": "70000"}, NoConnection, "MASTER_PORT='70000'"),
        ({"MASTER_ADDR": None}, NoConnection, "FERRO_ADDR"),
    ],
)
def test_a_bad_value_is_named(
    changes: Mapping[str, str | None], error: type[Exception], name: str
) -> None:
    merged = {**torchrun(1, 4), **changes}
    environ = {key: value for key, value in merged.items() if value is not None}
    with pytest.raises(error) as caught:
        placement(environ=environ)
    assert name in str(caught.value)


def test_rank_alone_must_agree_with_the_environment() -> None:
    assert placement(rank=1, environ=torchrun(1, 4)).world_size == 4
    with pytest.raises(InvalidRank, match="rank=2"):
        placement(rank=2, environ=torchrun(1, 4))
    with pytest.raises(InvalidRank, match="give both"):
        placement(rank=0, environ={})
    with pytest.raises(InvalidWorldSize, match="world_size=3"):
        placement(world_size=3, environ=torchrun(1, 4))
    with pytest.raises(InvalidWorldSize, match="addr='node0:5' was given without rank"):
        placement(addr="node0:5", environ={})
    assert placement(world_size=1, environ={}).world_size == 1
    assert placement(world_size=1, addr="node0:5", environ={}).world_size == 1


@pytest.mark.parametrize("rank", [-1, 2, True, 1.0, "0"])
def test_a_bad_rank_argument(rank: int) -> None:
    with pytest.raises(InvalidRank):
        placement(rank, 2, environ={})


@pytest.mark.parametrize("environ", [{}, torchrun(1, 4)])
def test_a_backend_in_place_of_the_rank_is_told_where_it_belongs(environ: Environ) -> None:
    with pytest.raises(InvalidRank, match="not 'nccl'; backend= names"):
        placement("nccl", environ=environ)  # type: ignore[arg-type]


@given(st.dictionaries(st.sampled_from(sorted(ferrorun(0, 2) | slurm(0, 2))), st.text(max_size=8)))
def test_any_environment_is_a_place_or_a_named_error(environ: Environ) -> None:
    try:
        place = placement(environ=environ)
    except (InvalidRank, InvalidWorldSize, NoConnection):
        return
    assert 0 <= place.rank < place.world_size


@pytest.mark.parametrize(
    ("nodelist", "host"),
    [
        ("node0", "node0"),
        ("node0,node1", "node0"),
        ("node[07,09-12],login", "node07"),
        ("node[001-128]", "node001"),
        ("rack[2-3]node[5,7]", "rack2node5"),
        ("a-b.example.org", "a-b.example.org"),
        ("gpu[1-2].cluster,x", "gpu1.cluster"),
    ],
)
def test_first_host_of_a_slurm_node_list(nodelist: str, host: str) -> None:
    assert first_host(nodelist) == host


@pytest.mark.parametrize("nodelist", ["", ",a", "n[", "n[]", "a b", "n[1-2"])
def test_what_is_no_node_list(nodelist: str) -> None:
    with pytest.raises(NoConnection, match="no list of hosts"):
        first_host(nodelist)


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [("a:1", "a", 1), ("[::1]:65535", "::1", 65535), ("10.0.0.1:80", "10.0.0.1", 80)],
)
def test_addresses_are_parsed(text: str, host: str, port: int) -> None:
    assert parse_addresses(text) == (Address(text, host, port),)


def test_several_addresses_keep_their_order() -> None:
    assert [a.text for a in parse_addresses("b:2, unix:@x,a:1,b:2")] == ["b:2", "unix:@x", "a:1"]


@pytest.mark.parametrize(
    "text",
    ["", "host", "host:", ":1", "::1:80", "[a]:1", "h:99999", "h:-1", "\0:1", "unix:/x", "a:1,"],
)
def test_what_is_no_address(text: str) -> None:
    with pytest.raises(NoConnection, match="is not an address"):
        parse_addresses(text)


def test_port_zero_is_refused() -> None:
    with pytest.raises(NoConnection, match="port 0"):
        parse_addresses("127.0.0.1:0")


@given(st.text(max_size=30))
def test_parsing_addresses_never_fails_otherwise(text: str) -> None:
    try:
        parsed = parse_addresses(text)
    except NoConnection:
        return
    assert all(address.is_unix or 1 <= address.port <= 65535 for address in parsed)


@given(st.text(), st.text())
def test_derived_ports_are_in_range(key: str, other: str) -> None:
    addresses = parse_addresses(derived_addr("node0", key, other))
    assert len(addresses) > 1
    assert all(address.port in DERIVED_PORTS for address in addresses)


def test_the_listener_of_ferrorun_is_used_by_rank_0_alone() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        environ = ferrorun(0, 2) | {
            "FERRO_ADDR": f"127.0.0.1:{server.getsockname()[1]}",
            "FERRO_LISTEN_FD": str(server.fileno()),
        }
        listener = placement(environ=environ).listener()
        assert listener is not None
        with listener:
            assert listener.getsockname() == server.getsockname()
            assert not listener.get_inheritable()
        assert placement(environ=environ | {"FERRO_RANK": "1", "RANK": "1"}).listener() is None


def test_a_stale_listener_descriptor_is_ignored() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, open("/dev/null", "rb") as null:
        for fd in (server.fileno(), null.fileno(), 999):
            environ = ferrorun(0, 2) | {"FERRO_LISTEN_FD": str(fd)}
            assert placement(environ=environ).listener() is None


SHOW = (
    "import os; from ferro_dist.rendezvous.environment import placement; place = placement(); "
    # One write: the launcher mixes the ranks' lines by writes.
    "os.write(1, f'{place.rank} {place.addr}\\n'.encode())"
)


@pytest.mark.parametrize("launcher", ["mpiexec.hydra", "mpiexec.gforker"])
def test_mpich_ranks_find_each_other(launcher: str) -> None:
    mpiexec = shutil.which(launcher, path=str(Path(sys.executable).parent))
    if mpiexec is None:
        pytest.skip(f"{launcher} of the mpich wheel is not installed")
    # Through a shell, so that the launcher is not the parent.
    command = [mpiexec, "-n", "2", "sh", "-c", f'{sys.executable} -c "{SHOW}"; true']
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
    ranks, addrs = zip(*(line.split() for line in done.stdout.splitlines()), strict=True)
    assert sorted(ranks) == ["0", "1"]
    assert len(set(addrs)) == 1
    assert addrs[0].startswith("unix:@")


@pytest.mark.parametrize("allocation", [{}, slurm(0, 1)], ids=["alone", "within Slurm"])
def test_a_launcher_that_hides_the_world_size_is_refused(allocation: Environ) -> None:
    with pytest.raises(InvalidWorldSize, match="PMIX_RANK"):
        placement(environ={**allocation, "PMIX_RANK": "1", "PMIX_NAMESPACE": "prterun-1"})


def test_an_address_alone_does_not_make_a_world_of_one() -> None:
    environ = {"FERRO_ADDR": "node0:7000"}
    with pytest.raises(InvalidWorldSize, match="FERRO_ADDR='node0:7000' is set, but nothing says"):
        placement(environ=environ)
    assert placement(world_size=1, environ=environ).world_size == 1
    assert placement(0, 1, environ=environ).world_size == 1


def test_arguments_may_be_integers_of_any_kind() -> None:
    place = placement(np.int64(1), np.int32(2), "127.0.0.1:1", environ={})
    assert (place.rank, place.world_size) == (1, 2)
