"""How the package is built."""

from __future__ import annotations

import fcntl
import os
import runpy
import shutil
import subprocess
import sys
import types
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


def copy_build_files(folder: Path) -> None:
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder)


def waits_for_a_lock(process_id: int) -> bool:
    locks = Path("/proc/locks").read_text(encoding="utf-8").splitlines()
    return any("->" in line and str(process_id) in line.split() for line in locks)


def test_builds_of_one_tree_take_turns(tmp_path: Path) -> None:
    pytest.importorskip("setuptools", "77", reason="setuptools is missing, or too old")
    if not Path("/proc/locks").exists():
        pytest.skip("this system does not tell who waits for a lock")
    copy_build_files(tmp_path)
    (tmp_path / "build").mkdir()
    with open(tmp_path / "build/.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        command = [sys.executable, "setup.py", "egg_info"]
        build = subprocess.Popen(
            command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
        while not waits_for_a_lock(build.pid):
            assert build.poll() is None, "it did not wait for the build that has begun"
    said, _ = build.communicate(timeout=300)
    assert build.returncode == 0, said.decode()


def test_a_build_does_not_wait_for_one_that_it_is_part_of(tmp_path: Path) -> None:
    pytest.importorskip("setuptools", "80", reason="setuptools is missing, or builds by itself")
    copy_build_files(tmp_path)
    (tmp_path / "build").mkdir()
    take_turn = "import fcntl; fcntl.flock(open('build/.lock', 'w'), fcntl.LOCK_EX)"
    (tmp_path / "pip.py").write_text(take_turn, encoding="utf-8")
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}  # so that it is found first
    develop = [sys.executable, "setup.py", "develop"]
    subprocess.run(develop, cwd=tmp_path, env=environment, check=True, timeout=300)


@pytest.mark.parametrize(
    ("environment", "is_kept"),
    [({}, False), ({"CFLAGS": "-g"}, True), ({"CXXFLAGS": "-O1 -g"}, True)],
)
def test_debug_information_is_there_if_it_was_asked_for(
    environment: dict[str, str], is_kept: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    setuptools = pytest.importorskip("setuptools", "77", reason="setuptools is missing, or too old")
    monkeypatch.setattr(setuptools, "setup", lambda **_: None)
    for name in ("CFLAGS", "CXXFLAGS"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    compiler = types.SimpleNamespace(compiler_so_cxx=["c++", "-g", "-fPIC"])
    monkeypatch.chdir(ROOT)
    runpy.run_path("setup.py")["strip_debug_information"](compiler)
    assert ("-g" in compiler.compiler_so_cxx) == is_kept
