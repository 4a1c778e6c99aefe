"""What the ranks of an MPI communicator do together before they are a group."""

from __future__ import annotations

import json
import time
from typing import Any

import numpy as np

from ferro_dist.cores import CpuLimit, affinity_mask, count_usable, cpu_limit
from ferro_dist.deadline import Deadline
from ferro_dist.errors import Timeout
from ferro_dist.rendezvous import machine

__all__ = ["count_cores_per_rank", "duplicate"]

_LOOK_S = 0.0001


def duplicate(op: str, parent: Any, deadline: Deadline) -> Any:
    """Duplicate a communicator for the call `op`."""
    comm, request = parent.Idup()
    _complete(op, parent, request, deadline)
    return comm


def count_cores_per_rank(op: str, comm: Any, deadline: Deadline) -> float:
    """Divide the cores of this rank's machine among the ranks that run on it."""
    limit = cpu_limit()
    own = machine.host_identity(), f"{affinity_mask():x}", limit.cgroup, limit.millicores
    every = [json.loads(text) for text in _all_gather(op, comm, json.dumps(own), deadline)]
    here = [facts for host, *facts in every if host == own[0]]
    num_cores = count_usable(
        [int(mask, 16) for mask, _, _ in here],
        [CpuLimit(cgroup, millicores) for _, cgroup, millicores in here],
    )
    return num_cores / len(here)


def _all_gather(op: str, comm: Any, text: str, deadline: Deadline) -> list[str]:
    own = text.encode()
    sizes = np.empty(comm.size, np.int64)
    _complete(op, comm, comm.Iallgather(np.array([len(own)]), sizes), deadline)
    width = int(sizes.max())
    rows = np.empty((comm.size, width), np.uint8)
    padded = np.frombuffer(own.ljust(width), np.uint8)
    _complete(op, comm, comm.Iallgather(padded, rows), deadline)
    return [row.tobytes().decode() for row in rows]


def _complete(op: str, comm: Any, request: Any, deadline: Deadline) -> None:
    while not request.Test():
        if time.monotonic() > deadline.at:
            raise Timeout(
                f"{op} failed on rank {comm.rank}: not all {comm.size} ranks of the "
                f"communicator made their MpiBackend {deadline}.",
                seconds=deadline.seconds,
                op=op,
                rank=comm.rank,
            )
        time.sleep(_LOOK_S)
