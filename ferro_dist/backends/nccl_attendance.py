"""Which NCCL calls the ranks of a host have made: memory that they all see.

NCCL cannot tell who is missing in a call. Ranks that share memory note their calls there
(`csrc/nccl/attendance.hpp`), so that the error of one that waited in vain names the missing ones.
"""

from __future__ import annotations

import fcntl
import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ferro_dist.backends.host import HostBackend
    from ferro_dist.backends.nccl import NcclBackend

__all__ = ["share_attendance"]


def share_attendance(host: HostBackend, nccl: NcclBackend) -> None:
    """Let `nccl` see the calls of the ranks in `host`'s group that share memory with this one.

    Collective over the ranks of a host, before the first call.
    """
    members = host.local_ranks

    def adopt(fd: int) -> NcclBackend:
        nccl.attend(fd, members)
        return nccl

    if len(members) > 1:
        host.share_memory(_create, adopt)


def _create(num_members: int) -> int:
    """Make the memory, filled with zeros, which no member can shrink under the others."""
    from ferro_dist._native.nccl_group import attendance_nbytes

    fd = os.memfd_create("ferro_dist", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.posix_fallocate(fd, 0, attendance_nbytes(num_members))
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
    except BaseException:
        os.close(fd)
        raise
    return fd
