"""Report what this machine offers: versions, transports, devices, and the launcher.

    python -m ferro_dist [--help] [--version]

For what is missing it gives the reason and the remedy. Nothing large is imported: versions of other
packages are read from their metadata. The exit code is 1 if the engine itself cannot be loaded,
else 0.
"""

from __future__ import annotations

import argparse
import glob
import importlib.metadata
import importlib.util
import os
import platform
import signal
import socket
import sys
from collections.abc import Iterable, Sequence

import ferro_dist

Row = tuple[str, str]

# What to install for it, and under which names it is published.
OPTIONAL_PACKAGES = (
    ("torch", 'pip install "ferro_dist[torch]"', ("torch",)),
    ("jax", 'pip install "ferro_dist[jax]"', ("jax",)),
    ("cupy", "pip install cupy-cuda13x", ("cupy", "cupy-cuda11x", "cupy-cuda12x", "cupy-cuda13x")),
)
HUGE_PAGES = "/sys/kernel/mm/transparent_hugepage/shmem_enabled"
CONGESTION_CONTROL = "/proc/sys/net/ipv4/tcp_congestion_control"
NVIDIA_DRIVER = "/proc/driver/nvidia/version"
NOT_BUILT = "no: the binding is missing: pip install . in the source tree builds it"


def main(argv: Sequence[str] = ()) -> int:
    """Print the report and return the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m ferro_dist",
        description="Report what this machine offers: versions, transports, devices, and the "
        "launcher. For what is missing it gives the reason and the remedy.",
        epilog="exit code: 1 if the engine itself cannot be loaded, else 0.",
        allow_abbrev=False,
    )
    version = f"ferro_dist {ferro_dist.__version__}"
    parser.add_argument("--version", action="version", version=version)
    parser.parse_args(argv)
    engine_problem = find_engine_problem()
    sections: list[tuple[str, Iterable[Row]]] = [
        ("versions", versions()),
        ("engine", engine(engine_problem)),
        ("transports", transports(engine_problem)),
        ("devices", devices()),
        ("launcher", launcher()),
    ]
    for title, rows in sections:
        print(title)
        for name, text in rows:
            print(f"  {name:14} {text}")
    return 0 if engine_problem is None else 1


# Versions


def versions() -> list[Row]:
    """Return the versions of this package, of Python, and of the array libraries."""
    rows = [
        ("ferro_dist", ferro_dist.__version__),
        ("python", f"{platform.python_version()} ({sys.executable})"),
        ("system", f"{platform.system()} {platform.release()} on {platform.machine()}"),
        ("numpy", version_of("numpy") or "not installed: pip install numpy"),
        ("ml_dtypes", version_of("ml_dtypes") or "not installed: pip install ml_dtypes"),
    ]
    for name, remedy, distributions in OPTIONAL_PACKAGES:
        found = next(filter(None, map(version_of, distributions)), None)
        rows.append((name, found or f"not installed (optional): {remedy}"))
    return rows


def version_of(distribution: str) -> str | None:
    """Return the version that is installed, None if none is."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


# The engine


def find_engine_problem() -> str | None:
    """Return why the compiled half cannot be loaded, None if it can."""
    try:
        importlib.import_module("ferro_dist._native.host")
    except ImportError as error:
        return f"cannot be loaded: {error}"
    return None


def engine(problem: str | None) -> list[Row]:
    """Return how reductions are computed, and on how many cores."""
    return [("kernels", problem or kernels()), ("cores", cores())]


def kernels() -> str:
    """Name the instruction set of the reductions."""
    from ferro_dist._native.host import kernel_isa

    return kernel_isa()


def cores() -> str:
    """Count the cores that a rank started here may use, and say what limits them."""
    from ferro_dist.cores import count_own, cpu_limit

    limit = cpu_limit()
    text = f"{count_own()} usable of {os.cpu_count()}"
    if limit.millicores:
        text += f" (the cgroup grants {limit.millicores / 1000:g})"
    return text


# Transports


def transports(engine_problem: str | None) -> list[Row]:
    """Return what can carry arrays from rank to rank."""
    return [
        ("shared memory", "no: the engine is missing" if engine_problem else shared_memory()),
        ("TCP", "no: the engine is missing" if engine_problem else tcp()),
        ("MPI", mpi()),
        ("NCCL", nccl()),
    ]


def shared_memory() -> str:
    """Make a segment for a single rank, as a group would, and throw it away."""
    from ferro_dist._native.host import create_segment, kernel_notices_deaths

    try:
        os.close(create_segment(1))
    except (OSError, MemoryError) as error:
        return f"no: {error}"
    text = f"yes: sealed memfd, {huge_pages()}"
    if kernel_notices_deaths():
        return text
    return f"{text}; a rank's death is found by timeouts alone: set_robust_list is refused"


def huge_pages() -> str:
    """Say whether the kernel gives shared memory huge pages on request."""
    # The chosen word is the one in brackets: "always within_size [advise] never".
    chosen = read(HUGE_PAGES).partition("[")[2].partition("]")[0]
    if chosen in ("always", "within_size", "advise", "force"):
        return f"huge pages ({chosen})"
    why = f"says {chosen!r}; root may write 'advise' to it" if chosen else "is missing"
    return f"small pages ({HUGE_PAGES} {why})"


def tcp() -> str:
    """Listen on the loopback address for a moment."""
    try:
        with socket.create_server(("127.0.0.1", 0)):
            pass
    except OSError as error:
        return f"no: cannot listen at 127.0.0.1: {error}"
    return f"yes: congestion control {read(CONGESTION_CONTROL) or 'unknown'}"


def mpi() -> str:
    """Name the MPI library that MpiBackend would use. It is loaded, but not initialised."""
    if importlib.util.find_spec("mpi4py") is not None:
        import mpi4py

        mpi4py.rc.initialize = False
    from ferro_dist.backends.mpi_library import load_mpi
    from ferro_dist.errors import BackendUnavailable

    try:
        library = load_mpi().Get_library_version()
    except BackendUnavailable as error:
        return f"no: {error}"
    # "Open MPI v5.0.11, package: ..." and "MPICH Version:      5.0.2", then many lines.
    name = library.strip("\0 \n").splitlines()[0].split(",")[0].replace("Version:", "")
    return f"yes: {' '.join(name.split())}, through mpi4py {version_of('mpi4py')}"


def nccl() -> str:
    """Name the NCCL that NcclBackend would use. It is loaded, but connects to nobody."""
    if not is_built("nccl"):
        return NOT_BUILT
    from ferro_dist._native.cuda_libraries import load_nccl
    from ferro_dist.errors import BackendUnavailable

    try:
        version = ".".join(map(str, load_nccl().get_version()))
    except BackendUnavailable as error:
        return f"no: {one_line(error)}"
    text = f"yes: {library(f'NCCL {version}', 'libnccl.so.2')}"
    mixed = mixed_nccl()
    return f"{text}; {mixed}" if mixed else text


def mixed_nccl() -> str:
    """Say what is wrong where NCCL and the CUDA runtime are for two versions, "" if nothing is.

    Both NCCL wheels install the same file: the last one wins, whatever the others need.
    """
    found = {major: version_of(f"nvidia-nccl-cu{major}") for major in (12, 13)}
    if all(found.values()):
        return (
            f"MIXED: nvidia-nccl-cu12 {found[12]} and nvidia-nccl-cu13 {found[13]} overwrite each "
            "other's libnccl.so.2; uninstall both, then install one"
        )
    runtimes = {12: version_of("nvidia-cuda-runtime-cu12"), 13: version_of("nvidia-cuda-runtime")}
    for major, other in ((12, 13), (13, 12)):
        if found[major] and runtimes[other] and not runtimes[major]:
            return (
                f"MIXED: NCCL is for CUDA {major} and the CUDA runtime {runtimes[other]} for "
                f'{other}; pip install "ferro_dist[cu{major}]"'
            )
        if found[major] and not runtimes[major]:
            return mixed_with_system(major)
    return ""


def mixed_with_system(major: int) -> str:
    """Say what is wrong where the wheel of NCCL is for another CUDA version than the system's."""
    if not is_built("cuda_runtime"):
        return ""
    from ferro_dist._native.cuda_runtime import runtime_version
    from ferro_dist.errors import BackendUnavailable

    try:
        runtime = runtime_version()
    except BackendUnavailable:
        return ""
    if runtime // 1000 == major:
        return ""
    return (
        f"MIXED: the wheel nvidia-nccl-cu{major} is for CUDA {major}, and the CUDA runtime of this "
        f"system is {cuda_version(runtime)}; pip uninstall nvidia-nccl-cu{major}, then "
        f'pip install "ferro_dist[cu{runtime // 1000}]"'
    )


def cuda() -> str:
    """Name the CUDA runtime that GPU arrays would use, and the version that the driver supports."""
    if not is_built("cuda_runtime"):
        return NOT_BUILT
    from ferro_dist._native import cuda_runtime
    from ferro_dist.errors import BackendUnavailable

    try:
        runtime = cuda_runtime.runtime_version()
        driver = cuda_runtime.driver_version()
    except BackendUnavailable as error:
        return f"no: {one_line(error)}"
    served = f"the driver serves {cuda_version(driver)}" if driver else "no driver"
    named = library(f"runtime {cuda_version(runtime)}", f"libcudart.so.{runtime // 1000}")
    return f"{named}; {served}"


def cuda_version(code: int) -> str:
    """Write 12040 as 12.4."""
    return f"{code // 1000}.{code % 1000 // 10}"


def library(what: str, name: str) -> str:
    """Say what a library of this process is, and its file; and if it only emulates a GPU, that."""
    from ferro_dist._emulation.libraries import FOLDER

    path = loaded_path(name)
    is_emulation = os.path.dirname(path) == os.path.realpath(FOLDER)
    return f"an emulation of {what} ({path})" if is_emulation else f"{what} ({path})"


def loaded_path(name: str) -> str:
    """Return the file from which a library of this process was loaded."""
    for line in read("/proc/self/maps", limit=1 << 24).splitlines():
        path = line.split(maxsplit=5)[-1]  # it may hold spaces
        if os.path.basename(path).startswith(name):
            return path
    return "loaded from an unknown file"


def is_built(module: str) -> bool:
    """Whether a compiled module is there, whatever it takes to load it."""
    try:
        return importlib.util.find_spec(f"ferro_dist._native.{module}") is not None
    except ImportError:  # none of them is
        return False


def one_line(error: BaseException) -> str:
    """Join the lines of an error's message."""
    return " ".join(str(error).split())


# Devices


def devices() -> list[Row]:
    """Return the CUDA runtime, and the GPUs that the driver shows to this process."""
    return [("CUDA", cuda()), *gpus()]


def gpus() -> list[Row]:
    """Return the GPUs that the driver shows to this process."""
    paths = sorted(glob.glob("/dev/nvidia[0-9]*"))
    if not paths:
        return [("GPU", "none: no /dev/nvidia* (no driver, or a container that was given none)")]
    driver = read(NVIDIA_DRIVER).partition("\n")[0]
    return [("GPU", f"{len(paths)} ({', '.join(paths)}); {driver or 'driver unknown'}")]


# The launcher


def launcher() -> list[Row]:
    """Return what ``ferro_dist.init()`` would find in the environment of this process."""
    from ferro_dist.errors import DistributedError
    from ferro_dist.rendezvous.environment import placement

    try:
        place = placement()
    except DistributedError as error:
        return [("init()", f"would raise {type(error).__name__}: {error}")]
    if place.launcher == "none":
        return [("init()", "a world of one: no launcher's variables are set")]
    rows = [("init()", f"rank {place.rank} of {place.world_size}, from {place.launcher}")]
    if place.local_rank is not None and place.local_world_size is not None:
        rows.append(("on this host", f"rank {place.local_rank} of {place.local_world_size}"))
    if place.addr is not None:
        rows.append(("rank 0 is at", place.addr))
        rows.append(("token from", place.token_source))
    return rows


def read(path: str, limit: int = 4096) -> str:
    """Return the first `limit` characters of a kernel file, "" if it does not exist."""
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read(limit).strip()
    except OSError:
        return ""


if __name__ == "__main__":
    # End as other programs do when the reader, like head, has enough.
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    sys.exit(main(sys.argv[1:]))
