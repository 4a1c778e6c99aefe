"""How many cores processes may use: those in their affinity, up to the quota of their cgroup.

The launcher imports this, too, so no import here may take milliseconds.
"""

from __future__ import annotations

import os

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["CpuLimit", "affinity_mask", "count_own", "count_usable", "cpu_limit"]


class CpuLimit:
    """The CPU time that a cgroup grants to all its processes together.

    Parameters
    ----------
    cgroup : str
        The cgroup that sets the limit; "" if none does.
    millicores : int
        Thousandths of a core; 0 means as much as there is.
    """

    def __init__(self, cgroup: str = "", millicores: int = 0) -> None:
        self.cgroup = cgroup
        self.millicores = millicores


def affinity_mask() -> int:
    """Return the cores that this thread may run on, one bit for each."""
    return sum(1 << core for core in os.sched_getaffinity(0))


def count_own() -> int:
    """Count the cores that this process may use."""
    return count_usable([affinity_mask()], [cpu_limit()])


def count_usable(masks: Iterable[int], limits: Iterable[CpuLimit]) -> int:
    """Count the cores that processes may use together, at least 1.

    Parameters
    ----------
    masks : iterable of int
        Each process's affinity.
    limits : iterable of CpuLimit
        Each process's limit. One process without a limit may use any core.
    """
    union = 0
    for mask in masks:
        union |= mask
    granted = {limit.cgroup: limit.millicores for limit in limits}
    cores = bin(union).count("1")
    if granted and all(granted.values()):
        # Half a core more does not let one more rank spin.
        cores = min(cores, sum(granted.values()) // 1000)
    return max(1, cores)


def cpu_limit(proc: str = "/proc/self/cgroup", root: str = "/sys/fs/cgroup") -> CpuLimit:
    """Return the tightest limit of the cgroups that this process is in."""
    candidates = []
    for folder, is_v2 in _cgroup_folders(proc, root):
        millicores = _limit_v2(folder) if is_v2 else _limit_v1(folder)
        if millicores:
            candidates.append(CpuLimit(_identity(folder), millicores))
    return min(candidates, key=lambda limit: limit.millicores, default=CpuLimit())


def _cgroup_folders(proc: str, root: str) -> list[tuple[str, bool]]:
    """Return the folders of the process's CPU cgroup and of all above it."""
    folders = []
    for line in _read(proc).splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        is_v2 = not controllers
        if not is_v2 and "cpu" not in controllers.split(","):
            continue
        top = root if is_v2 else os.path.join(root, "cpu")
        folders += [(folder, is_v2) for folder in _with_parents(top, path)]
    return folders


def _with_parents(top: str, path: str) -> list[str]:
    parts = [part for part in path.split("/") if part not in ("", "..")]
    return [os.path.join(top, *parts[:count]) for count in range(len(parts), -1, -1)]


def _limit_v2(folder: str) -> int:
    quota, _, period = _read(os.path.join(folder, "cpu.max")).strip().partition(" ")
    return _millicores(quota, period)


def _limit_v1(folder: str) -> int:
    quota = _read(os.path.join(folder, "cpu.cfs_quota_us")).strip()
    return _millicores(quota, _read(os.path.join(folder, "cpu.cfs_period_us")).strip())


def _millicores(quota: str, period: str) -> int:
    # "max" and "-1" mean no limit.
    if not (quota.isdigit() and period.isdigit() and int(period)):
        return 0
    return max(1, 1000 * int(quota) // int(period))


def _identity(folder: str) -> str:
    try:
        status = os.stat(folder)
    except OSError:
        return folder
    return f"{status.st_dev}:{status.st_ino}"


def _read(path: str) -> str:
    try:
        with open(path, encoding="utf-8") as file:
            return file.read(1 << 16)
    except (OSError, ValueError):
        return ""
