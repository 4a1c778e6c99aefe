"""The MPI library behind mpi4py: found and loaded."""

from __future__ import annotations

import importlib.util
import os
from typing import Any

from ferro_dist.errors import BackendUnavailable, LockPoisoned

__all__ = ["claim_mpi", "intracomm", "load_mpi"]

_owner_pid = 0  # of the process with groups; its forked children find MPI loaded, too


def claim_mpi() -> Any:
    """Load MPI for groups of this process.

    Raises LockPoisoned in a child that was forked from one with groups: it would take the messages
    of its parent.
    """
    global _owner_pid
    if _owner_pid not in (0, os.getpid()):
        raise LockPoisoned(
            "MPI belongs to the parent process: a forked child cannot use it. Other groups can be "
            "made there, such as a HostBackend.",
            op="init",
        )
    mpi = load_mpi()
    _owner_pid = os.getpid()
    return mpi


def load_mpi() -> Any:
    """Import mpi4py, which initialises MPI, and so only on demand."""
    try:
        from mpi4py import MPI
    except ImportError as error:
        # On many clusters it was built for one library, which may not be found now.
        if importlib.util.find_spec("mpi4py") is not None:
            raise BackendUnavailable(
                f"mpi4py cannot be loaded ({error}). Make the MPI library available for which it "
                "was built, for example by its environment module, or install mpi4py anew."
            ) from error
        raise BackendUnavailable(
            "MpiBackend needs mpi4py: pip install mpi4py, and an MPI library, "
            "for example: pip install mpich"
        ) from error
    except RuntimeError as error:
        raise BackendUnavailable(
            f"mpi4py found no MPI library ({str(error).splitlines()[0]}). Install one, for "
            "example: pip install mpich; or name it in the variable MPI4PY_LIBMPI."
        ) from error
    return MPI


def intracomm(mpi: Any, comm: Any) -> Any:
    """Return `comm` if a group can be made of it."""
    if not isinstance(comm, mpi.Intracomm) or comm == mpi.COMM_NULL:
        raise TypeError(f"comm must be an mpi4py.MPI.Intracomm, not {comm!r}")
    return comm
