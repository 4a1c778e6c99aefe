"""What each launcher has left in the environment: this rank, and how many there are."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from ferro_dist.errors import InvalidRank, InvalidWorldSize

__all__ = ["FINDERS", "Environ", "Source", "number_of"]

Environ = Mapping[str, str]


@dataclass(frozen=True)
class Source:
    """What one launcher says, and which variables said it; None for what it leaves open."""

    launcher: str
    rank_variable: str
    size_variable: str
    rank: int
    world_size: int
    local_rank: int | None = None
    local_world_size: int | None = None
    num_hosts: int | None = None  # the machines, or launchers, that share the ranks

    def __str__(self) -> str:
        who = "the arguments say" if self.launcher == "arguments" else f"{self.launcher} says"
        return (
            f"{who} rank {self.rank} of {self.world_size} "
            f"({self.rank_variable}, {self.size_variable})"
        )

    @property
    def is_single_host(self) -> bool:
        """Whether all ranks are known to be on this host."""
        return self.num_hosts == 1

    def is_at_place_of(self, other: Source) -> bool:
        """Whether rank and world size are the same."""
        return (self.rank, self.world_size) == (other.rank, other.world_size)

    def agrees_with(self, other: Source) -> bool:
        """Whether both give the same place, or `other` only started this one's launcher."""
        if self.is_at_place_of(other):
            return True
        if self.num_hosts is None:
            return False
        # mpirun starts its daemons by srun, on fewer hosts than it uses itself.
        is_mpi_on_slurm = other.launcher == "slurm" and self.launcher in ("openmpi", "mpich")
        return is_mpi_on_slurm or other.world_size in (1, self.num_hosts)


def _from_ferrorun(environ: Environ) -> Source | None:
    return _read(
        environ,
        "ferrorun",
        ("FERRO_RANK", "FERRO_WORLD_SIZE", "FERRO_LOCAL_RANK", "FERRO_LOCAL_WORLD_SIZE"),
    )


def _from_torchrun(environ: Environ) -> Source | None:
    return _read(
        environ,
        "torchrun",
        ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
        "GROUP_WORLD_SIZE",
    )


def _from_openmpi(environ: Environ) -> Source | None:
    prefix = "OMPI_COMM_WORLD_"
    return _read(
        environ,
        "openmpi",
        (f"{prefix}RANK", f"{prefix}SIZE", f"{prefix}LOCAL_RANK", f"{prefix}LOCAL_SIZE"),
    )


def _from_mpich(environ: Environ) -> Source | None:
    return _read(environ, "mpich", ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"))


def _from_slurm(environ: Environ) -> Source | None:
    # A batch script also has SLURM_PROCID=0 and SLURM_NTASKS, but is no task of a step: it would
    # wait for the other ranks forever. So would an interactive shell (a pty).
    is_step = "SLURM_STEP_ID" in environ and "SLURM_PTY_PORT" not in environ
    if not is_step or (number_of(environ, "SLURM_STEP_NUM_TASKS") or 0) <= 1:
        return None
    if "SLURM_PROCID" not in environ:
        return None
    found = _read(
        environ,
        "slurm",
        ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", ""),
        "SLURM_STEP_NUM_NODES",
    )
    return found and replace(found, local_world_size=_tasks_on_this_node(environ))


def _tasks_on_this_node(environ: Environ) -> int | None:
    """Read ``SLURM_STEP_TASKS_PER_NODE``, such as ``"2(x3),1"``: three nodes with 2, one with 1."""
    counts: list[int] = []
    for part in environ.get("SLURM_STEP_TASKS_PER_NODE", "").split(","):
        match = re.fullmatch(r"([0-9]{1,6})(?:\(x([0-9]{1,6})\))?", part)
        if match is None:
            return None
        counts += [int(match[1])] * int(match[2] or 1)
    node = number_of(environ, "SLURM_NODEID")
    return counts[node] if node is not None and node < len(counts) else None


FINDERS: tuple[Callable[[Environ], Source | None], ...] = (
    _from_ferrorun,
    _from_torchrun,
    _from_openmpi,
    _from_mpich,
    _from_slurm,
)


def _read(
    environ: Environ,
    launcher: str,
    variables: tuple[str, str, str, str],
    hosts_variable: str | None = None,
) -> Source | None:
    """Read what a launcher has set; None if it is missing."""
    rank_variable, size_variable, local_rank_variable, local_size_variable = variables
    if rank_variable not in environ and size_variable not in environ:
        return None
    world_size = _world_size(environ, size_variable, rank_variable)
    rank = _rank(environ, rank_variable, size_variable, world_size)
    local_rank = local_size = None
    if environ.get(local_size_variable):
        local_size = _world_size(environ, local_size_variable, local_rank_variable)
        if local_size > world_size:
            raise InvalidWorldSize(
                f"{local_size_variable}={local_size} is more than {size_variable}={world_size}"
            )
    if environ.get(local_rank_variable):
        limit = local_size or world_size
        local_rank = _rank(environ, local_rank_variable, local_size_variable, limit)
    num_hosts = number_of(environ, hosts_variable) if hosts_variable else None
    if num_hosts is None and local_size is not None:
        num_hosts = -(-world_size // local_size)
    if local_size is None and num_hosts == 1:
        local_size = world_size
    return Source(launcher, *variables[:2], rank, world_size, local_rank, local_size, num_hosts)


def _world_size(environ: Environ, variable: str, other: str) -> int:
    if variable not in environ:
        raise InvalidWorldSize(f"{other}={environ[other]!r} is set, {variable} is not: set both")
    value = number_of(environ, variable)
    if value is None or value < 1:
        raise InvalidWorldSize(f"{variable}={environ[variable]!r} is no positive number")
    return value


def _rank(environ: Environ, variable: str, size_variable: str, size: int) -> int:
    if variable not in environ:
        raise InvalidRank(
            f"{size_variable}={environ[size_variable]!r} is set, {variable} is not: set both"
        )
    value = number_of(environ, variable)
    if value is None:
        raise InvalidRank(f"{variable}={environ[variable]!r} is no rank (0 or more)")
    if value >= size:
        raise InvalidRank(f"{variable}={value} is no rank of {size} ({size_variable})")
    return value


def number_of(environ: Environ, variable: str) -> int | None:
    """Return the number that a variable holds; None if it does not hold one."""
    # int() would also take "1_0", "+1" and digits of other scripts.
    text = environ.get(variable, "").strip()
    return int(text) if re.fullmatch("[0-9]{1,9}", text) else None
