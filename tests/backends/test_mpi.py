"""MpiBackend on real ranks: under MPICH's launcher and library, and under Open MPI's."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from backends.contract.suite import CASES, names_for
from leaks import settled
from mpi_wheels import MPI_WHEELS

pytest.importorskip("mpi4py", reason="mpi4py is not installed")

RANKS = str(Path(__file__).parent / "mpi_ranks.py")
DEADLINE_S = 250

# Beside the contract: what only this backend has.
OF_ANY_SIZE = [
    "random_floats_have_the_same_bits_everywhere",
    "large_arrays_go_in_pieces",
    "blocks_beyond_one_unit_keep_their_order",
    "a_given_communicator_is_duplicated",
    "what_is_no_communicator_is_refused",
    "ranks_share_the_cores_of_their_own_host",
    "a_forked_child_is_refused",
    "groups_that_were_left_are_freed",
]
BETWEEN_RANKS = [
    "arrays_that_share_no_byte_are_taken",
    "a_group_that_is_dropped_is_left",
    "arrays_of_a_group_that_is_dropped_stay_while_mpi_uses_them",
    "messages_left_behind_do_not_reach_the_next_group",
    "late_ranks_are_named_by_the_timeout",
    "the_cause_of_an_ended_part_names_its_ranks",
    "a_call_behind_another_keeps_its_own_timeout",
    "a_failure_is_told_to_all_ranks",
    "an_error_keeps_nothing_of_who_waited",
    "an_error_keeps_nothing_of_what_was_handled_when_it_came",
    "control_c_ends_a_wait",
    "control_c_ends_a_call_that_has_not_begun_to_wait",
    "any_exception_of_a_handler_ends_a_wait",
    "an_exception_that_strikes_a_call_is_raised_once",
    "a_batch_names_who_left",
    "a_rank_that_leaves_in_a_call_ends_it_for_the_others",
    "work_that_only_has_to_be_looked_at_is_over_when_a_rank_leaves",
    "a_signal_handler_may_close_amid_a_step",
    "a_group_left_amid_the_comparison_of_counts_is_not_freed",
]
# Each size once. Open MPI has the one that leaves every rank a core: its ranks never sleep.
SIZES = [("mpich", 1), ("openmpi", 2), ("mpich", 3), ("mpich", 4)]


PR_SET_PDEATHSIG = 1
LIBC = ctypes.CDLL(None)


def _end_with_parent() -> None:
    """Have the launcher told to end, and its ranks with it, where these tests are killed."""
    LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


class Job:
    """Ranks that run one test body after the other."""

    def __init__(self, implementation: str, ranks: int) -> None:
        wheel = MPI_WHEELS[implementation]
        command = [*wheel.launch, "-n", str(ranks)]
        self._process = subprocess.Popen(
            [*command, sys.executable, "-X", "faulthandler", RANKS],
            env={**os.environ, "MPI4PY_LIBMPI": str(wheel.library)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
            preexec_fn=_end_with_parent,
        )
        self.is_usable = True

    @property
    def session(self) -> int:
        return self._process.pid

    def await_start(self) -> None:
        """Wait until all ranks are ready for a body."""
        self._await_answer("the start")

    def run(self, body: str) -> None:
        """Run `body` on all ranks; fail with the tracebacks of those where it failed."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{body}\n")
        self._process.stdin.flush()
        outcomes = self._await_answer(body)
        failures = [f"rank {rank}:\n{text}" for rank, text in enumerate(outcomes) if text]
        self.is_usable = not failures
        assert not failures, "\n".join(failures)

    def _await_answer(self, body: str) -> list[str | None]:
        assert self._process.stdout is not None
        readable, _, _ = select.select([self._process.stdout], [], [], DEADLINE_S)
        line = self._process.stdout.readline() if readable else ""
        if not line:
            self.kill()
            self.is_usable = False
            what = "the job ended" if readable else f"no answer within {DEADLINE_S} s"
            pytest.fail(f"{body}: {what}")
        outcomes: list[str | None] = json.loads(line)
        return outcomes

    def close(self) -> int:
        """Let all ranks end; the launcher's exit code."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            # Open MPI's launcher does not tell its ranks that their input has ended.
            self._process.stdin.write("exit\n")
            self._process.stdin.flush()
        try:
            return self._process.wait(DEADLINE_S)
        finally:
            self.kill()

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        self._process.stdout.close()


class Jobs:
    """One job of each size, all of them started before the first test, which none may be in."""

    def __init__(self) -> None:
        self._jobs = {size: Job(*size) for size in SIZES if MPI_WHEELS[size[0]].is_installed}
        for job in self._jobs.values():
            job.await_start()

    def get(self, size: tuple[str, int]) -> Job:
        """Return the job of this implementation and size; a new one if a body failed in it."""
        MPI_WHEELS[size[0]].need()
        if not self._jobs[size].is_usable:
            self._jobs[size].kill()
            self._jobs[size] = Job(*size)
            self._jobs[size].await_start()
        return self._jobs[size]

    def close(self) -> None:
        for job in self._jobs.values():
            job.close()


@pytest.fixture(scope="module")
def jobs() -> Iterator[Jobs]:
    jobs = Jobs()
    yield jobs
    jobs.close()


# One job tells what becomes of the arrays of a library: every rank takes seconds to import it.
WITH_LIBRARIES = next(
    (each for each in SIZES if each[1] == 2 and MPI_WHEELS[each[0]].is_installed), None
)


def bodies_for(size: tuple[str, int]) -> list[str]:
    cases = [n for n in names_for(size[1]) if not CASES[n].library or size == WITH_LIBRARIES]
    return [*cases, *OF_ANY_SIZE, *(BETWEEN_RANKS if size[1] > 1 else [])]


BODIES = [
    pytest.param(size, body, id=f"{size[0]}-{size[1]}-{body}")
    for size in SIZES
    for body in bodies_for(size)
]


@pytest.mark.parametrize(("size", "body"), BODIES)
def test_mpi(jobs: Jobs, size: tuple[str, int], body: str) -> None:
    library = CASES[body].library if body in CASES else ""
    if library:
        pytest.importorskip(library)
    jobs.get(size).run(body)


@pytest.fixture(params=MPI_WHEELS)
def implementation(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


def test_a_job_ends_well_after_a_timeout(implementation: str) -> None:
    MPI_WHEELS[implementation].need()
    job = Job(implementation, 2)
    try:
        job.await_start()
        job.run("late_ranks_are_named_by_the_timeout")
        assert job.close() == 0
    finally:
        job.kill()


BE_KILLED = """
import os, signal, sys
from backends.test_mpi import Job
job = Job(sys.argv[1], 2)
job.await_start()
print(job.session, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def alive_in(session: int) -> list[str]:
    alive = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            state, _, _, its_session = stat.read_text().rpartition(")")[2].split()[:4]
            if int(its_session) == session and state not in "ZX":
                alive.append(stat.parent.name)
    return alive


def test_a_job_does_not_outlive_tests_that_are_killed(implementation: str) -> None:
    MPI_WHEELS[implementation].need()
    killed = subprocess.run(
        [sys.executable, "-c", BE_KILLED, implementation],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        stdout=subprocess.PIPE,
        text=True,
        timeout=DEADLINE_S,
    )
    assert killed.returncode == -signal.SIGKILL
    session = int(killed.stdout)
    try:
        assert settled(lambda: bool(alive_in(session)), False) is False
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(session, signal.SIGKILL)


@pytest.mark.parametrize("variable", ["", "/nonexistent/libmpi.so"])
def test_a_missing_library_is_named(variable: str) -> None:
    program = (
        "import sys\n"
        "if not sys.argv[1]: sys.modules['mpi4py'] = None\n"
        "from ferro_dist.backends.mpi import MpiBackend\n"
        "from ferro_dist.errors import BackendUnavailable\n"
        "try: MpiBackend()\n"
        "except BackendUnavailable as error: print(error)\n"
    )
    environment = {**os.environ, **({"MPI4PY_LIBMPI": variable} if variable else {})}
    ran = subprocess.run(
        [sys.executable, "-c", program, variable],
        env=environment,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=True,
    )
    assert "pip install mpich" in ran.stdout


def test_importing_the_backend_does_not_initialise_mpi() -> None:
    program = "import sys, ferro_dist.backends.mpi; sys.exit('mpi4py.MPI' in sys.modules)"
    subprocess.run([sys.executable, "-c", program], timeout=DEADLINE_S, check=True)
