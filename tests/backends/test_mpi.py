"""MpiBackend on real ranks: under MPICH's launcher and library, and under Open MPI's."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("mpi4py", reason="mpi4py is not installed")

RANKS = str(Path(__file__).parent / "mpi_ranks.py")
DEADLINE_S = 60

RESULTS = [
    "allreduce_equals_numpy",
    "allreduce_works_in_place",
    "allreduce_of_special_values_is_the_same_on_all_ranks",
    "half_precision_rounds_once",
    "random_floats_have_the_same_bits_everywhere",
    "reduce_gives_the_root_alone_a_result",
    "broadcast_copies_the_roots_array",
    "all_gather_concatenates_in_rank_order",
    "all_gather_takes_its_input_from_within_out",
    "reduce_scatter_leaves_each_rank_its_chunk",
    "all_to_all_exchanges_even_chunks",
    "all_to_all_exchanges_uneven_chunks",
    "uneven_chunks_keep_whole_rows",
    "gather_collects_on_the_root",
    "scatter_deals_out_the_roots_chunks",
    "barrier_waits_for_the_last_rank",
    "large_arrays_go_in_pieces",
    "blocks_beyond_one_unit_keep_their_order",
    "a_batch_passes_a_ring",
    "async_collectives_run_in_order",
    "polling_completes_a_call",
    "two_groups_are_used_by_two_threads",
    "split_makes_a_group_in_the_given_order",
    "a_given_communicator_is_duplicated",
    "a_closed_group_refuses_calls",
    "a_forked_child_is_refused",
    "empty_knows_every_dtype",
    "gaps_in_the_input_are_copied",
    "bad_arguments_are_refused_before_anything_is_sent",
    "reductions_that_do_not_exist_are_refused",
]
BETWEEN_RANKS = [
    "sendrecv_moves_both_ways_at_once",
    "messages_arrive_in_order",
    "posted_receives_match_in_order",
    "a_message_that_does_not_fit_is_dropped",
    "mismatches_name_both_sides_and_leave_the_group_usable",
    "uneven_counts_that_disagree_are_a_mismatch",
    "a_late_rank_is_named_by_the_timeout",
    "a_receive_times_out_and_names_its_peer",
    "waiting_for_work_may_give_up_and_try_again",
    "control_c_ends_a_wait",
]


class Job:
    """Ranks that run one test body after the other."""

    def __init__(self, implementation: str, ranks: int) -> None:
        library, launcher = find_implementation(implementation)
        self._process = subprocess.Popen(
            [*launcher, "-n", str(ranks), sys.executable, "-X", "faulthandler", RANKS],
            env={**os.environ, "MPI4PY_LIBMPI": library},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def run(self, body: str) -> None:
        """Run `body` on all ranks; fail with the tracebacks of those where it failed."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{body}\n")
        self._process.stdin.flush()
        readable, _, _ = select.select([self._process.stdout], [], [], DEADLINE_S)
        line = self._process.stdout.readline() if readable else ""
        if not line:
            self.kill()
            what = "the job ended" if readable else f"no answer within {DEADLINE_S} s"
            pytest.fail(f"{body}: {what}")
        failures = [f"rank {rank}:\n{text}" for rank, text in enumerate(json.loads(line)) if text]
        assert not failures, "\n".join(failures)

    def close(self) -> int:
        """Let all ranks end; the launcher's exit code."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            # Open MPI's launcher does not tell its ranks that their input has ended.
            self._process.stdin.write("exit\n")
            self._process.stdin.flush()
        try:
            return self._process.wait(20)
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

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None


def find_implementation(name: str) -> tuple[str, list[str]]:
    """Library and launcher of a wheel; skips the test where the wheel is missing."""
    # Both wheels install bin/mpiexec, over each other: these names are their own.
    soname, program, options = {
        "mpich": ("libmpi.so.12", "mpiexec.hydra", []),
        "openmpi": (
            "libmpi.so.40",
            "prterun",
            ["--personality", "ompi", "--map-by", ":OVERSUBSCRIBE", "--bind-to", "none"],
        ),
    }[name]
    library = Path(sys.prefix, "lib", soname)
    launcher = shutil.which(program, path=sysconfig.get_path("scripts"))
    if launcher is None or not library.exists():
        pytest.skip(f"the {name} wheel is not installed in {sys.prefix}")
    if name == "openmpi" and os.geteuid() == 0:
        options = ["--allow-run-as-root", *options]
    return str(library), [launcher, *options]


class Jobs:
    """Jobs that are kept from test to test: starting one takes a second."""

    def __init__(self) -> None:
        self._jobs: dict[tuple[str, int], Job] = {}

    def get(self, implementation: str, ranks: int) -> Job:
        key = implementation, ranks
        if key not in self._jobs or not self._jobs[key].is_alive:
            self._jobs[key] = Job(implementation, ranks)
        return self._jobs[key]

    def close(self) -> None:
        for job in self._jobs.values():
            if job.is_alive:
                job.close()


@pytest.fixture(scope="module")
def jobs() -> Iterator[Jobs]:
    kept = Jobs()
    yield kept
    kept.close()


@pytest.fixture(params=["mpich", "openmpi"])
def implementation(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("body", RESULTS)
def test_mpi(jobs: Jobs, implementation: str, body: str, ranks: int) -> None:
    jobs.get(implementation, ranks).run(body)


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("body", BETWEEN_RANKS)
def test_mpi_between_ranks(jobs: Jobs, implementation: str, body: str, ranks: int) -> None:
    jobs.get(implementation, ranks).run(body)


@pytest.mark.skipif(not importlib.util.find_spec("torch"), reason="torch is not installed")
def test_torch_tensors_come_back_as_tensors(jobs: Jobs, implementation: str) -> None:
    jobs.get(implementation, 2).run("torch_tensors_come_back_as_tensors")


@pytest.mark.skipif(not importlib.util.find_spec("jax"), reason="jax is not installed")
def test_jax_arrays_come_back_as_new_arrays(jobs: Jobs, implementation: str) -> None:
    jobs.get(implementation, 2).run("jax_arrays_come_back_as_new_arrays")


def test_a_job_ends_well_after_a_timeout(implementation: str) -> None:
    job = Job(implementation, 2)
    try:
        job.run("a_late_rank_is_named_by_the_timeout")
        assert job.close() == 0
    finally:
        job.kill()


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
