"""How many cores processes may use, as their affinity and their cgroups say."""

from __future__ import annotations

from pathlib import Path

import pytest

import ferro_dist as fd
from ferro_dist import cores
from ferro_dist._launch.command_line import usable_cores
from ferro_dist.cores import CpuLimit, count_usable, cpu_limit


@pytest.mark.parametrize(
    ("masks", "limits", "num_cores"),
    [
        ([0b1111, 0b1111], [], 4),
        ([0b0011, 0b0110], [("", 0), ("", 0)], 3),
        ([0b1111], [("a", 2500)], 2),
        ([0b1111], [("a", 100)], 1),
        ([0b1111, 0b1111], [("a", 1000), ("a", 1000)], 1),
        ([0b1111, 0b1111], [("a", 1000), ("b", 1000)], 2),
        ([0b1111, 0b1111], [("a", 1000), ("", 0)], 4),
        ([0b1], [("a", 8000)], 1),
    ],
)
def test_cores_are_those_of_all_ranks(
    masks: list[int], limits: list[tuple[str, int]], num_cores: int
) -> None:
    assert count_usable(masks, [CpuLimit(*limit) for limit in limits]) == num_cores


def test_the_tightest_cgroup_limit_counts(tmp_path: Path) -> None:
    inner = tmp_path / "outer" / "inner"
    inner.mkdir(parents=True)
    (inner / "cpu.max").write_text("max 100000\n")
    (tmp_path / "outer" / "cpu.max").write_text("150000 100000\n")
    (tmp_path / "self").write_text("0::/outer/inner\n")
    limit = cpu_limit(str(tmp_path / "self"), str(tmp_path))
    assert limit.millicores == 1500


def test_a_cgroup_of_version_1(tmp_path: Path) -> None:
    folder = tmp_path / "cpu" / "job"
    folder.mkdir(parents=True)
    (folder / "cpu.cfs_quota_us").write_text("50000\n")
    (folder / "cpu.cfs_period_us").write_text("100000\n")
    (tmp_path / "self").write_text("3:cpu,cpuacct:/job\n2:memory:/job\n")
    limit = cpu_limit(str(tmp_path / "self"), str(tmp_path))
    assert limit.millicores == 500


def test_no_cgroup_is_no_limit(tmp_path: Path) -> None:
    limit = cpu_limit(str(tmp_path / "none"), str(tmp_path))
    assert (limit.cgroup, limit.millicores) == ("", 0)


def test_launcher_and_groups_heed_the_quota(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cores, "cpu_limit", lambda: CpuLimit("job", 1000))
    assert len(usable_cores()) == 1
    with fd.HostBackend(0, 1, None) as host:
        assert host.cores_per_rank == 1.0
    first, second = fd.SimulatedBackend.create_group(2)
    with first, second:
        assert first.cores_per_rank == 0.5
