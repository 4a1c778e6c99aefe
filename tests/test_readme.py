"""The README, taken at its word: its scripts run, and print what it says they print.

A Python block that begins with ``# name.py`` is that file; commands that follow use it.
The ``text`` block after a script, or after its first command, is its output.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from mpi_wheels import MPI_WHEELS

import ferro_dist as fd

DEADLINE_S = 500
ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
DOCUMENTS = [
    "README.md",
    "ARCHITECTURE.md",
    "CONTRIBUTING.md",
    "benchmarks/README.md",
    "csrc/ferro/ALGORITHMS.md",
    "docs/emulation.md",
    "docs/gpus.md",
    "docs/performance.md",
    "docs/porting.md",
]
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)

NAME = re.compile(r"# (\w+\.py)\n")
SCRIPT = re.compile(r"(?<!\S)\w+\.py(?!\S)")
RANK_MARK = re.compile(r"^\[\d+\] ", re.MULTILINE)
SECONDS = re.compile(r"\d+\.\d s\b")


def script_name(index: int) -> str:
    named = NAME.match(BLOCKS[index][1])
    return named[1] if named else f"block_{index}.py"


def find_outputs() -> dict[str, str]:
    """Return what each script must print."""
    outputs: dict[str, str] = {}
    script = ""
    for index, (language, text) in enumerate(BLOCKS):
        if language == "python":
            script = script_name(index)
        elif language == "text":
            outputs.setdefault(script, text)
    return outputs


SCRIPTS = {
    script_name(i): text for i, (language, text) in enumerate(BLOCKS) if language == "python"
}
OUTPUTS = find_outputs()
COMMANDS = [line for language, text in BLOCKS if language == "sh" for line in text.splitlines()]
IN_COMMANDS = {script for command in COMMANDS for script in SCRIPT.findall(command)}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, text in SCRIPTS.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    return tmp_path


def run(command: list[str], folder: Path, **environ: str) -> str:
    ran = subprocess.run(
        command,
        cwd=folder,
        env={**os.environ, **environ},
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return ran.stdout


def comparable(output: str) -> list[str]:
    """Return lines without what may differ: the order of ranks, their marks, measured times."""
    text = SECONDS.sub("N s", RANK_MARK.sub("", output))
    return sorted(line for line in text.splitlines() if line)


def commands(program: str) -> list[str]:
    return [command for command in COMMANDS if command.startswith(f"{program} ")]


def skip_without_libraries(command: str) -> None:
    for library in ("torch", "jax"):
        is_used = any(f"import {library}" in SCRIPTS[each] for each in SCRIPT.findall(command))
        if is_used and not importlib.util.find_spec(library):
            pytest.skip(f"{library} is not installed")


def check_output(command: str, output: str) -> None:
    (script,) = SCRIPT.findall(command)
    assert comparable(output) == comparable(OUTPUTS[script])


def check_mixed_output(command: str, output: str) -> None:
    """The same for launchers that may put the lines of two ranks into one."""
    (script,) = SCRIPT.findall(command)
    lines = comparable(OUTPUTS[script])
    assert [line for line in lines if line not in output] == []
    assert len(output.replace("\n", "")) == len("".join(lines))


@pytest.mark.parametrize("script", sorted(SCRIPTS.keys() - IN_COMMANDS))
def test_script_prints_what_the_readme_says(script: str, folder: Path) -> None:
    output = run([sys.executable, script], folder)
    assert comparable(output) == comparable(OUTPUTS[script])


@pytest.mark.parametrize("command", commands("ferrorun"))
def test_ferrorun_prints_what_the_readme_says(command: str, folder: Path) -> None:
    skip_without_libraries(command)
    program = [sys.executable, "-m", "ferro_dist.launch"]
    arguments = shlex.split(command)[1:]
    if "--nnodes" in arguments:
        plan = run([*program, "--dry-run", *arguments], folder, FERRO_DIST_TOKEN="secret")
        assert "FERRO_WORLD_SIZE=4" in plan
        assert "192.0.2.1:29400" in plan
        return
    check_output(command, run([*program, *arguments], folder))


@pytest.mark.skipif(not importlib.util.find_spec("torch"), reason="torch is not installed")
@pytest.mark.parametrize("command", commands("torchrun"))
def test_torchrun_prints_what_the_readme_says(command: str, folder: Path) -> None:
    program = [sys.executable, "-m", "torch.distributed.run"]
    check_mixed_output(command, run([*program, *shlex.split(command)[1:]], folder))


@pytest.mark.parametrize("implementation", MPI_WHEELS)
@pytest.mark.parametrize("command", commands("mpiexec"))
def test_mpiexec_prints_what_the_readme_says(
    command: str, implementation: str, folder: Path
) -> None:
    wheel = MPI_WHEELS[implementation]
    wheel.need()
    if "with_mpi" in command:
        pytest.importorskip("mpi4py", reason="mpi4py is not installed")
    arguments = [sys.executable if a == "python" else a for a in shlex.split(command)[1:]]
    output = run([*wheel.launch, *arguments], folder, MPI4PY_LIBMPI=str(wheel.library))
    check_mixed_output(command, output)


@pytest.mark.parametrize("command", commands("pytest"))
def test_example_of_a_test_passes(command: str, folder: Path) -> None:
    output = run([sys.executable, "-m", *shlex.split(command), "-p", "no:cacheprovider"], folder)
    assert "3 passed" in output


def test_example_of_the_document_on_emulation_passes(tmp_path: Path) -> None:
    text = (ROOT / "docs/emulation.md").read_text(encoding="utf-8")
    (example,) = re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    (tmp_path / "test_emulation.py").write_text(example, encoding="utf-8")
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "test_emulation.py"]
    assert "1 passed" in run(command, tmp_path)


def test_program_of_the_document_on_porting_prints_what_it_says(tmp_path: Path) -> None:
    text = (ROOT / "docs/porting.md").read_text(encoding="utf-8")
    blocks = dict(re.findall(r"^```(\w+)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL))
    (tmp_path / "porting.py").write_text(blocks["python"], encoding="utf-8")
    arguments = shlex.split(blocks["sh"])[1:]
    output = run([sys.executable, "-m", "ferro_dist.launch", *arguments], tmp_path)
    assert comparable(output) == comparable(blocks["text"])
    assert set(re.findall(r"\bfd\.(\w+)", text)) <= set(fd.__all__)


@pytest.mark.parametrize("command", commands("pip"))
def test_install_commands_name_what_there_is(command: str) -> None:
    # That they work is not for a test to find out that is run by one of them.
    (extra,) = re.findall(r'pip install "\.\[(\w+)\]"', command)
    assert f"\n{extra} = [" in (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    for module in re.findall(r"-m ([\w.]+)", command):
        assert importlib.util.find_spec(module)


def test_every_command_is_one_that_is_tested() -> None:
    tested = {"ferrorun", "torchrun", "mpiexec", "pytest", "pip"}
    # srun is not run: on a cluster that would queue a job. tests/rendezvous plays its variables.
    assert {command.split()[0] for command in COMMANDS} == tested | {"export", "srun"}


def test_every_script_in_a_command_is_in_the_readme() -> None:
    assert SCRIPTS.keys() >= IN_COMMANDS


def test_every_script_has_an_output_or_tests_itself() -> None:
    assert {name for name in SCRIPTS if not name.startswith("test_")} == OUTPUTS.keys()


def test_names_of_the_readme_are_public() -> None:
    assert set(re.findall(r"\bfd\.(\w+)", README)) <= set(fd.__all__)


@pytest.mark.parametrize("document", DOCUMENTS)
def test_files_that_a_document_names_exist(document: str) -> None:
    text = (ROOT / document).read_text(encoding="utf-8")
    links = [link.partition("#")[0] for link in re.findall(r"\]\(([^)]+)\)", text)]
    local = [link for link in links if link and "://" not in link]
    assert [link for link in local if not (ROOT / document).parent.joinpath(link).exists()] == []

    named = re.findall(r"`([\w./]+\.(?:py|pyx|pxd|pyi|hpp|cpp|inc|md|pml))`", text)
    folders = ["ferro_dist", "csrc", "tests", "benchmarks"]
    paths = [
        f"/{path.relative_to(ROOT)}" for name in folders for path in (ROOT / name).rglob("*.*")
    ]
    paths += [f"/{path.name}" for path in ROOT.glob("*.*")]
    missing = [name for name in named if not any(path.endswith(f"/{name}") for path in paths)]
    assert [name for name in missing if name not in SCRIPTS] == []


def test_what_a_model_stands_for_exists() -> None:
    text = (ROOT / "tests/model/README.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `\w+\.pml` \|[^|]*\|([^|]*)\|$", text, re.MULTILINE)
    files = [*(ROOT / "csrc/ferro").glob("*.?pp"), *(ROOT / "tests/model").glob("*.pml")]
    names = {file.name for file in files}
    for file in files:
        names.update(re.findall(r"~?\w+", file.read_text(encoding="utf-8")))
    named = re.findall(r"`(?:\w+::)*([^`()]+)(?:\(\))?`", "".join(rows))
    assert named
    assert [name for name in named if name not in names] == []


def test_every_picture_is_in_a_document() -> None:
    # Of results, those with a date are kept.
    pictures = [*(ROOT / "docs").glob("*.png"), *(ROOT / "benchmarks/results").glob("*-20*.png")]
    text = "".join((ROOT / document).read_text(encoding="utf-8") for document in DOCUMENTS)
    assert [picture.name for picture in pictures if picture.name not in text] == []
