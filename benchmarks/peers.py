"""The systems that are compared, each with every configuration that may be its best.

Untuned, MPI loses time to page faults of its temporaries in large collectives, and in small
ones to locks that a single-threaded program does not need; to be faster than that proves
nothing. The configurations here are the best that were found; the untuned ones run as well.

The tuning of memory puts the caller's arrays into huge pages, too, which every library copies
faster. So ferro_dist also runs with and without it, and tuned systems are compared with tuned
ones, untuned with untuned.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import os
import shutil
import sys
import sysconfig
from collections.abc import Iterator, Mapping
from pathlib import Path

WORKER = str(Path(__file__).parent / "worker.py")

# glibc gives freed blocks of over 32 MiB back to the kernel at once, however often they
# are needed again. With these settings it keeps them, in huge pages.
_KEEP_MEMORY = {
    "GLIBC_TUNABLES": ":".join(
        (
            "glibc.malloc.mmap_threshold=4294967296",
            "glibc.malloc.trim_threshold=8589934592",
            "glibc.malloc.top_pad=268435456",
            "glibc.malloc.hugetlb=1",
        )
    )
}
_TUNED_MPI = {**_KEEP_MEMORY, "MPI4PY_RC_THREAD_LEVEL": "single"}


@dataclasses.dataclass(frozen=True)
class System:
    """One system in one configuration.

    Attributes
    ----------
    family : str
        What it is: ``"ferro_dist"``, ``"gloo"``, ``"openmpi"``, ``"mpich"``.
    configuration : str
        How it is set up; unique in its family.
    adapter : str
        The class of ``worker.py`` that drives it.
    command : tuple of str
        Starts all ranks. Empty if the parent starts them one by one.
    environment : mapping
        Variables on top of the parent's.
    missing : str
        Why it cannot run here; empty if it can.
    """

    family: str
    configuration: str
    adapter: str
    command: tuple[str, ...] = ()
    environment: Mapping[str, str] = dataclasses.field(default_factory=dict)
    missing: str = ""

    @property
    def name(self) -> str:
        return f"{self.family}/{self.configuration}"

    @property
    def is_ours(self) -> bool:
        return self.family == "ferro_dist"

    @property
    def is_tuned(self) -> bool:
        return self.configuration != "untuned"


def systems(ranks: int, transport: str) -> list[System]:
    """Every system that the comparison should have, those that are missing included."""
    return [
        *_ferro(ranks),
        *_gloo(),
        *_openmpi(ranks, transport),
        *_mpich(ranks, transport),
    ]


SELDOM_BEST = frozenset({"gloo/untuned", "gloo/unbound", "openmpi/coll_sm", "mpich/cma"})
"""Left out by --quick, unless they are named."""


def ferrorun(ranks: int, worker: str) -> tuple[str, ...]:
    """Return the command that starts a program of Python on all ranks."""
    return (
        *(sys.executable, "-m", "ferro_dist.launch", "-n", str(ranks)),
        *("--no-python", sys.executable, worker),
    )


def _ferro(ranks: int) -> Iterator[System]:
    command = ferrorun(ranks, WORKER)
    missing = "" if _has("ferro_dist") else "ferro_dist is not installed: pip install ."
    yield System("ferro_dist", "keep_memory", "FerroDist", command, _KEEP_MEMORY, missing)
    yield System("ferro_dist", "untuned", "FerroDist", command, {}, missing)


def _gloo() -> Iterator[System]:
    missing = "" if _has("torch") else "torch is not installed: pip install torch"
    local = {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    tuned = {**local, **_KEEP_MEMORY}
    yield System("gloo", "untuned", "Gloo", (), local, missing)
    yield System("gloo", "default", "Gloo", (), tuned, missing)
    # A rank's threads hand work to each other: all on one core, or each on whichever is free.
    yield System("gloo", "unbound", "Gloo", (), {**tuned, "BENCHMARK_UNBOUND": "1"}, missing)


# Open MPI


def _openmpi(ranks: int, transport: str) -> Iterator[System]:
    library, launcher = _find_library("libmpi.so.40"), _find_program("prterun")
    missing = _missing_mpi("openmpi", library, launcher)
    command = (
        launcher,
        *(("--allow-run-as-root",) if os.geteuid() == 0 else ()),
        *("--personality", "ompi", "--map-by", ":OVERSUBSCRIBE", "--bind-to", "none"),
        *("-n", str(ranks), sys.executable, WORKER),
    )
    choices = _OPENMPI_TCP if transport == "tcp" else _OPENMPI_SHARED_MEMORY
    for configuration, settings in choices.items():
        environment = {"MPI4PY_LIBMPI": library, **settings}
        if configuration != "untuned" and _is_crowded(ranks):
            environment["OMPI_MCA_mpi_yield_when_idle"] = "1"
        yield System("openmpi", configuration, "Mpi", command, environment, missing)


_OPENMPI_SHARED_MEMORY: dict[str, dict[str, str]] = {
    "untuned": {},
    "default": _TUNED_MPI,
    "ucx": {
        **_TUNED_MPI,
        "OMPI_MCA_pml": "ucx",
        "OMPI_MCA_opal_common_ucx_tls": "any",
        "OMPI_MCA_opal_common_ucx_devices": "any",
        "UCX_TLS": "sm,self",
    },
    "no_cma": {
        **_TUNED_MPI,
        "OMPI_MCA_pml": "ob1",
        "OMPI_MCA_btl": "self,sm",
        "OMPI_MCA_smsc": "^cma",
    },
    "coll_sm": {**_TUNED_MPI, "OMPI_MCA_coll_sm_priority": "100"},
}

_LOOPBACK = {
    "OMPI_MCA_pml": "ob1",
    "OMPI_MCA_btl": "self,tcp",
    "OMPI_MCA_btl_tcp_if_include": "lo",
}
_OPENMPI_TCP: dict[str, dict[str, str]] = {
    "untuned": _LOOPBACK,
    "default": {**_TUNED_MPI, **_LOOPBACK},
    "tcp_eager": {
        **_TUNED_MPI,
        **_LOOPBACK,
        "OMPI_MCA_btl_tcp_eager_limit": "1048576",
        "OMPI_MCA_btl_tcp_rndv_eager_limit": "1048576",
        "OMPI_MCA_btl_tcp_max_send_size": "1048576",
    },
}


# MPICH


def _mpich(ranks: int, transport: str) -> Iterator[System]:
    library, launcher = _find_library("libmpi.so.12"), _find_program("mpiexec.hydra")
    missing = _missing_mpi("mpich", library, launcher)
    command = (launcher, "-n", str(ranks), sys.executable, WORKER)
    choices = _MPICH_TCP if transport == "tcp" else _MPICH_SHARED_MEMORY
    for configuration, settings in choices.items():
        environment = {"MPI4PY_LIBMPI": library, **settings}
        if configuration != "untuned" and _is_crowded(ranks):
            environment["MPIR_CVAR_POLLS_BEFORE_YIELD"] = "1"
        yield System("mpich", configuration, "Mpi", command, environment, missing)


_MPICH_SHARED_MEMORY: dict[str, dict[str, str]] = {
    "untuned": {},
    "default": _TUNED_MPI,
    "release_gather": {
        **_TUNED_MPI,
        "MPIR_CVAR_ALLREDUCE_POSIX_INTRA_ALGORITHM": "release_gather",
        "MPIR_CVAR_BARRIER_POSIX_INTRA_ALGORITHM": "release_gather",
        "MPIR_CVAR_BCAST_POSIX_INTRA_ALGORITHM": "release_gather",
        "MPIR_CVAR_REDUCE_POSIX_INTRA_ALGORITHM": "release_gather",
    },
    "cma": {**_TUNED_MPI, "MPIR_CVAR_CH4_CMA_ENABLE": "1"},
}

_LIBFABRIC_TCP = {
    "MPIR_CVAR_NOLOCAL": "1",
    "MPIR_CVAR_CH4_NETMOD": "ofi",
    "FI_PROVIDER": "tcp",
    "FI_TCP_IFACE": "lo",
}
_MPICH_TCP: dict[str, dict[str, str]] = {
    "untuned": _LIBFABRIC_TCP,
    "default": {**_TUNED_MPI, **_LIBFABRIC_TCP},
}


def _is_crowded(ranks: int) -> bool:
    """Whether ranks must share cores: one that spins then keeps off the one it waits for."""
    return ranks > len(os.sched_getaffinity(0))


# What is installed


def _has(module: str) -> bool:
    return importlib.util.find_spec(module) is not None


def _missing_mpi(wheel: str, library: str, launcher: str) -> str:
    if not _has("mpi4py"):
        return "mpi4py is not installed: pip install mpi4py"
    if not library or not launcher:
        return f"the {wheel} wheel is not installed: pip install {wheel}"
    return ""


def _find_library(soname: str) -> str:
    path = Path(sys.prefix, "lib", soname)
    return str(path) if path.exists() else ""


def _find_program(name: str) -> str:
    # Both wheels install a bin/mpiexec, and the later one wins: these names are their own.
    return shutil.which(name, path=sysconfig.get_path("scripts")) or ""
