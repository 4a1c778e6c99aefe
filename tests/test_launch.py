"""ferrorun, run as users run it: real processes, told apart by what they write.

A test never sleeps. Ranks report through a pipe whose write end every process of the
job inherits: its end of file proves that none of them is left.
"""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import signal
import socket
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest

from ferro_dist import arguments
from ferro_dist._launch import command_line, ports
from ferro_dist._launch.command_line import LaunchError, Options, parse, usable_cores
from ferro_dist._launch.kernel import prctl
from ferro_dist._launch.output import LINE_NBYTES, Stream
from ferro_dist._launch.plan import Rendezvous, describe, plan

DEADLINE_S = 60.0
PR_CAPBSET_DROP, CAP_KILL = 24, 5
FERRORUN = [sys.executable, "-m", "ferro_dist.launch"]

# What the scripts of the tests begin with.
PRELUDE = """
import os, select, signal, subprocess, sys
rank = int(os.environ["FERRO_RANK"])
# A signal that comes just before a rank goes to sleep must not find it asleep: it writes here.
wakeup, written_to = os.pipe()
os.set_blocking(written_to, False)
signal.set_wakeup_fd(written_to)
def report(text):
    os.write(int(os.environ["REPORT_FD"]), f"{text}\\n".encode())
def wait_for_ever():
    while True:
        os.read(wakeup, 1)
def wait_for_order():
    orders = int(os.environ["ORDERS_FD"])
    while orders not in select.select([orders, wakeup], [], [])[0]:
        os.read(wakeup, 1)
"""


class Launched:
    """A ferrorun under way, and the pipe through which its processes report."""

    def __init__(
        self,
        tmp_path: Path,
        script: str,
        *arguments: str,
        env: Mapping[str, str] | None = None,
        stdin: int = subprocess.DEVNULL,
        stdout: int = subprocess.PIPE,
        stderr: int = subprocess.PIPE,
        preexec_fn: Callable[[], object] | None = None,
    ) -> None:
        path = tmp_path / "script.py"
        path.write_text(PRELUDE + script)
        orders, self._orders = os.pipe()
        self.reports, write_end = os.pipe()
        self._unread = b""
        environ = os.environ | {"REPORT_FD": str(write_end), "ORDERS_FD": str(orders)}
        self.process = subprocess.Popen(
            [*FERRORUN, *arguments, str(path)],
            env=environ | dict(env or {}),
            pass_fds=[write_end, orders],
            stdin=stdin,
            stdout=stdout,
            stderr=stderr,
            preexec_fn=preexec_fn,
        )
        os.close(write_end)
        os.close(orders)

    def report(self) -> str:
        """Return the next line that a rank reports; empty when all processes are gone."""
        while b"\n" not in self._unread:
            assert select.select([self.reports], [], [], DEADLINE_S)[0], "no report in time"
            data = os.read(self.reports, 4096)
            if not data:
                return ""
            self._unread += data
        line, _, self._unread = self._unread.partition(b"\n")
        return line.decode()

    def sorted_reports(self, count: int) -> list[str]:
        """Return that many reports, in order of their text."""
        return sorted(self.report() for _ in range(count))

    def order(self) -> None:
        """Let the ranks that wait for an order go on, those that will wait later too."""
        if self._orders >= 0:
            os.close(self._orders)
            self._orders = -1

    def finish(self) -> tuple[int, str, str]:
        """Return the exit code and both outputs, once no process of the job is left."""
        out, err = self.process.communicate(timeout=DEADLINE_S)
        self.assert_nothing_left()
        return self.process.returncode, (out or b"").decode(), (err or b"").decode()

    def assert_nothing_left(self) -> None:
        while self.report():
            pass

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        for pipe in (self.process.stdout, self.process.stderr, self.process.stdin):
            if pipe is not None:
                pipe.close()
        self.process.wait(DEADLINE_S)
        os.close(self.reports)
        self.order()


Launch = Callable[..., Launched]


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[Launch]:
    started: list[Launched] = []

    def start(*args: str, **kwargs: object) -> Launched:
        folder = tmp_path / str(len(started))
        folder.mkdir()
        started.append(Launched(folder, *args, **kwargs))  # type: ignore[arg-type]
        return started[-1]

    yield start
    for launched in started:
        launched.close()


def ferrorun(*arguments: str, env: Mapping[str, str] | None = None) -> tuple[int, str, str]:
    done = subprocess.run(
        [*FERRORUN, *arguments],
        env=os.environ | dict(env or {}),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        timeout=DEADLINE_S,
    )
    return done.returncode, done.stdout.decode(), done.stderr.decode()


def supervisor_of(front: int) -> int:
    """Return the process id of the front's only child."""
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            stat = Path(f"/proc/{name}/stat").read_bytes()
        except OSError:
            continue
        if int(stat.rpartition(b")")[2].split()[1]) == front:
            return int(name)
    raise AssertionError("the front has no child")


# The command line.


def parsed(*argv: str, environ: Mapping[str, str] | None = None) -> Options:
    return parse(argv, environ or {}, cores=[0, 1, 2, 3])


def test_nproc_defaults_to_the_usable_cores() -> None:
    assert parsed("-m", "x").nproc == 4
    assert set(usable_cores()) <= os.sched_getaffinity(0)


@pytest.mark.parametrize("words", [["-np", "3"], ["--nproc-per-node", "3"], ["--nproc_per_node=3"]])
def test_nproc_may_be_given_as_to_other_launchers(words: list[str]) -> None:
    options = parsed(*words, "-m", "x", "-np")
    assert (options.nproc, options.command) == (3, ["x", "-np"])


def test_the_scripts_own_options_are_left_alone() -> None:
    options = parsed("-n", "2", "-m", "train", "-n", "9", "--env", "--", "-m")
    assert (options.nproc, options.command) == (2, ["train", "-n", "9", "--env", "--", "-m"])


def test_two_dashes_end_the_options() -> None:
    options = parsed("-n2", "--no-python", "--", "-x", "--", "y")
    assert options.command == ["-x", "--", "y"]


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["-n", "0", "-m", "x"], "--nproc takes a whole number of at least 1, not '0'"),
        (["-n", "two", "-m", "x"], "not 'two'"),
        (["-n", "²", "-m", "x"], "not '²'"),
        (["-n", "9" * 5000, "-m", "x"], "whole number"),
        (["-n", "100000", "-m", "x"], "at most 8190 ranks, not 100000"),
        (["-n", "-1", "-m", "x"], "not '-1'"),
        (["--nope", "-m", "x"], "there is no option --nope"),
        (["-n"], "--nproc needs a value"),
        (["-x"], "there is no option -x"),
        (["--module=x"], "--module takes no value"),
        ([], "no script given"),
        (["-m"], "no script given"),
        ([""], "no script given"),
        (["--no-python", "", "x"], "no script given"),
        (["-m", "--no-python", "x"], "exclude each other"),
        (["--env", "A", "-m", "x"], "--env takes KEY=VALUE, not 'A'"),
        (["--env", "=1", "-m", "x"], "--env takes KEY=VALUE"),
        (["--env", "RANK=1", "-m", "x"], "may not set RANK"),
        (["--bind-to", "socket", "-m", "x"], "--bind-to takes core or none"),
        (["--rdzv-endpoint", "here", "-m", "x"], "takes host:port"),
        (["--rdzv-endpoint", "h:65535", "-m", "x"], "a port from 1 to 65534"),
        (["--rdzv-endpoint", "h:0", "-m", "x"], "takes host:port"),
        (["--node-rank", "1", "-m", "x"], "not below --nnodes 1"),
        (["--nnodes", "2", "-m", "x"], "--nnodes needs --rdzv-endpoint"),
        (["--nnodes", "2", "--rdzv-endpoint", "h:1", "-m", "x"], "needs -n"),
        (["-n1", "--nnodes", "2", "--rdzv-endpoint", "h:1", "-m", "x"], "set FERRO_DIST_TOKEN"),
    ],
)
def test_a_wrong_option_is_refused(argv: list[str], message: str) -> None:
    with pytest.raises(LaunchError) as raised:
        parsed(*argv)
    assert message in str(raised.value)
    assert raised.value.exit_code == 2


def test_as_many_ranks_can_be_started_as_a_group_can_have() -> None:
    header = Path(__file__).parents[1] / "csrc" / "ferro" / "error.hpp"
    limit = re.search(r"kMaxWorldSize = (\d+);", header.read_text(encoding="utf-8"))
    assert limit is not None
    assert command_line.MAX_WORLD_SIZE == arguments.MAX_WORLD_SIZE == int(limit[1])


def test_a_wrong_option_exits_with_2_and_one_line() -> None:
    code, out, err = ferrorun("--nope")
    assert (code, out) == (2, "")
    assert err == "ferrorun: there is no option --nope (see ferrorun --help)\n"


def test_version_is_printed_on_stdout() -> None:
    code, out, err = ferrorun("--version")
    assert (code, err) == (0, "")
    assert re.fullmatch(r"ferrorun of ferro_dist (\d\S*|\(used from .*\))\n", out)


def test_help_is_printed_on_stdout() -> None:
    code, out, err = ferrorun("--help")
    assert (code, err) == (0, "")
    assert out.startswith("usage: ferrorun")


# The plan.

SINGLE = Rendezvous("127.0.0.1:5000", "127.0.0.1", "5001", "secret", "9")


def test_each_rank_is_told_who_it_is() -> None:
    first, second = plan(parsed("-n", "2", "-m", "train", "--fast"), SINGLE, {})
    assert second.argv == [sys.executable, "-m", "train", "--fast"]
    assert second.env == {
        "FERRO_RANK": "1",
        "FERRO_WORLD_SIZE": "2",
        "FERRO_LOCAL_RANK": "1",
        "FERRO_LOCAL_WORLD_SIZE": "2",
        "FERRO_ADDR": "127.0.0.1:5000",
        "FERRO_DIST_TOKEN": "secret",
        "FERRO_DIST_EPOCH": "0",
        "RANK": "1",
        "WORLD_SIZE": "2",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "2",
        "GROUP_RANK": "0",
        "GROUP_WORLD_SIZE": "1",
        "ROLE_RANK": "1",
        "ROLE_WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "5001",
        "OMP_NUM_THREADS": "2",
        "PYTHONUNBUFFERED": "1",
    }
    assert first.env["FERRO_LISTEN_FD"] == "9"


def test_an_outer_launchers_rank_is_not_passed_on() -> None:
    outer = {
        "OMPI_COMM_WORLD_RANK": "3",
        "PMI_RANK": "3",
        "SLURM_PROCID": "3",
        "TORCHELASTIC_RUN_ID": "x",
        "ROLE_NAME": "trainer",
        "FERRO_LISTEN_FD": "5",
        "FERRO_RANK": "3",
        "SLURM_JOB_ID": "7",
    }
    _, second = plan(parsed("-n", "2", "-m", "x"), SINGLE, outer)
    environment = second.environment(outer)
    assert environment["SLURM_JOB_ID"] == "7"
    assert environment["FERRO_RANK"] == "1"
    assert not environment.keys() & (outer.keys() - {"SLURM_JOB_ID", "FERRO_RANK"})


def test_the_users_own_settings_win() -> None:
    options = parsed("-n", "2", "--env", "A=1=2", "--env", "MASTER_PORT=1", "-m", "x")
    first, _ = plan(options, SINGLE, {"OMP_NUM_THREADS": "7", "PYTHONUNBUFFERED": ""})
    assert (first.env["A"], first.env["MASTER_PORT"]) == ("1=2", "1")
    assert not first.env.keys() & {"OMP_NUM_THREADS", "PYTHONUNBUFFERED"}


def test_ranks_of_the_second_host_follow_those_of_the_first() -> None:
    options = parsed(
        *("-n", "3", "--nnodes", "2", "--node-rank", "1", "--rdzv-endpoint", "[fe80::1]:700"),
        *("-m", "x"),
        environ={"FERRO_DIST_TOKEN": "shared"},
    )
    commands = plan(options, Rendezvous.placeholder(options), {"FERRO_DIST_EPOCH": "4"})
    assert [command.rank for command in commands] == [3, 4, 5]
    last = commands[-1].env
    assert (last["RANK"], last["LOCAL_RANK"], last["WORLD_SIZE"]) == ("5", "2", "6")
    assert (last["GROUP_RANK"], last["GROUP_WORLD_SIZE"]) == ("1", "2")
    assert (last["FERRO_ADDR"], last["MASTER_PORT"]) == ("[fe80::1]:700", "701")
    assert last["FERRO_DIST_EPOCH"] == "4"
    assert all("FERRO_LISTEN_FD" not in command.env for command in commands)


def test_bind_to_core_goes_round_the_cores() -> None:
    commands = plan(parsed("-n", "6", "--bind-to", "core", "-m", "x"), SINGLE, {})
    assert [command.core for command in commands] == [0, 1, 2, 3, 0, 1]
    assert commands[0].env["OMP_NUM_THREADS"] == "1"


def test_dry_run_prints_commands_for_a_shell_and_no_secret(tmp_path: Path) -> None:
    (tmp_path / "a script.py").touch()
    code, out, err = ferrorun(
        *("-n", "2", "--dry-run", "--nnodes", "2", "--rdzv-endpoint", "a:9"),
        *("--env", "X=1 2", str(tmp_path / "a script.py"), "it's"),
        env={"FERRO_DIST_TOKEN": "hush", "PMI_RANK": "1"},
    )
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert lines[0] == "# rank 0"
    assert lines[3].startswith("env -u PMI_RANK FERRO_RANK=1 FERRO_WORLD_SIZE=4 ")
    assert "'X=1 2'" in lines[3]
    assert lines[3].endswith("a script.py' 'it'\"'\"'s'")
    assert "hush" not in out
    _, out, _ = ferrorun("-n1", "--dry-run", "--env", "FERRO_DIST_TOKEN=hush", "-m", "x")
    assert "'FERRO_DIST_TOKEN=<secret>'" in out
    assert "hush" not in out


def test_a_closed_reader_of_a_dry_run_does_no_harm() -> None:
    read_end, write_end = os.pipe()
    os.close(read_end)
    done = subprocess.run(
        [*FERRORUN, "-n", "2", "--dry-run", "-m", "this"],
        stdout=write_end,
        stderr=subprocess.PIPE,
        timeout=DEADLINE_S,
    )
    os.close(write_end)
    assert (done.returncode, done.stderr) == (0, b"")


def test_no_warning_is_raised_in_development_mode() -> None:
    command = [sys.executable, "-X", "dev", "-W", "error", "-m", "ferro_dist.launch"]
    done = subprocess.run(
        [*command, "-n2", "--no-python", "true"], capture_output=True, timeout=DEADLINE_S
    )
    assert (done.returncode, done.stderr) == (0, b"")


def test_describe_names_the_core() -> None:
    options = parsed("-n", "1", "--bind-to", "core", "-m", "x")
    assert describe(plan(options, SINGLE, {})).startswith("# rank 0, bound to core 0\n")


# Start.


def test_ranks_see_their_environment(launch: Launch) -> None:
    job = launch(
        "report(' '.join(os.environ[k] for k in"
        " ('RANK', 'WORLD_SIZE', 'FERRO_DIST_TOKEN', 'GREETING')))",
        *("-n", "2", "--env", "GREETING=hi there"),
    )
    first, second = job.sorted_reports(2)
    token = first.split()[2]
    assert len(bytes.fromhex(token)) == 32
    assert (first, second) == (f"0 2 {token} hi there", f"1 2 {token} hi there")
    assert job.finish() == (0, "", "")


def test_every_job_has_its_own_token(launch: Launch) -> None:
    script = "report(os.environ['FERRO_DIST_TOKEN'])"
    assert launch(script, "-n1").report() != launch(script, "-n1").report()


def test_rank_0_inherits_the_listening_socket(launch: Launch) -> None:
    job = launch(
        """
import socket
host, port = os.environ["FERRO_ADDR"].split(":")
if rank == 0:
    listener = socket.socket(fileno=int(os.environ["FERRO_LISTEN_FD"]))
    assert listener.getsockname() == (host, int(port))
    connection, _ = listener.accept()
    report(connection.recv(5).decode())
else:
    assert "FERRO_LISTEN_FD" not in os.environ
    socket.create_connection((host, int(port))).sendall(b"hello")
""",
        *("-n", "2"),
    )
    assert job.report() == "hello"
    assert job.finish() == (0, "", "")


def test_nobody_listens_once_rank_0_has_let_go(launch: Launch) -> None:
    job = launch(
        """
import socket
host, port = os.environ["FERRO_ADDR"].split(":")
os.close(int(os.environ["FERRO_LISTEN_FD"]))
try:
    # Not from the same address: its port may be given to a socket that meets itself there.
    socket.create_connection((host, int(port)), source_address=("127.0.0.2", 0))
except ConnectionRefusedError:
    report("refused")
""",
        "-n1",
    )
    assert job.report() == "refused"


@pytest.mark.parametrize("close_fds", [False, True])
def test_a_child_of_rank_0_needs_its_socket(launch: Launch, close_fds: bool) -> None:
    job = launch(
        f"""
import subprocess
program = "import ferro_dist; ferro_dist.init().close()"
subprocess.run([sys.executable, "-c", program], close_fds={close_fds}, check=True)
""",
        "-n2",
    )
    code, _, err = job.finish()
    assert (code != 0, "with close_fds=False" in err) == (close_fds, close_fds)


def test_master_port_can_be_bound_by_the_ranks_only(launch: Launch) -> None:
    job = launch(
        """
import socket
address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
assert os.environ["MASTER_PORT"] != os.environ["FERRO_ADDR"].split(":")[1]
report(address[1])
wait_for_order()
server = socket.create_server(address)
socket.create_connection(address)
server.accept()
report("served")
""",
        "-n1",
    )
    address = ("127.0.0.1", int(job.report()))
    with socket.socket() as stranger, pytest.raises(OSError, match="in use"):
        stranger.bind(address)
    job.order()
    assert job.report() == "served"


def test_a_taken_rendezvous_port_is_an_error() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        endpoint = f"127.0.0.1:{server.getsockname()[1]}"
        code, out, err = ferrorun("-n1", "--rdzv-endpoint", endpoint, "-m", "this")
    assert (code, out) == (1, "")
    assert err.startswith(f"ferrorun: cannot listen on {endpoint}: Address already in use.")
    assert err.count("\n") == 1


def test_a_name_that_no_host_can_have_is_an_error() -> None:
    code, out, err = ferrorun("-n1", "--rdzv-endpoint", "a..b:29500", "-m", "this")
    assert (code, out) == (1, "")
    assert err.startswith("ferrorun: cannot listen on a..b:29500: ")
    assert err.count("\n") == 1


def test_ranks_that_cannot_reach_each_other_are_not_started() -> None:
    isolated = ["unshare", "--user", "--map-root-user", "--net"]
    try:
        subprocess.run([*isolated, "true"], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"no network namespaces here: {error}")
    job = [*isolated, *FERRORUN, "-n2", "--no-python", "true"]
    done = subprocess.run(job, capture_output=True, text=True, timeout=DEADLINE_S)
    assert done.returncode == 1
    assert "the ranks cannot reach 127.0.0.1: Network is unreachable. The loopback" in done.stderr


def test_the_loopback_is_blamed_only_where_there_is_no_route() -> None:
    broadcast = "127.255.255.255"  # which the kernel refuses to a socket that has not asked for it
    with pytest.raises(LaunchError) as told:
        ports._check_route(broadcast, 9)
    assert str(told.value) == f"the ranks cannot reach {broadcast}: Permission denied"


def test_two_hosts_meet_at_the_endpoint(launch: Launch) -> None:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind(("127.0.0.1", 0))
        endpoint = f"127.0.0.1:{probe.getsockname()[1]}"
        jobs = [
            launch(
                'report(f\'{rank} {os.environ["FERRO_ADDR"]} {"FERRO_LISTEN_FD" in os.environ}\')',
                *("-n", "1", "--nnodes", "2", "--node-rank", str(node)),
                *("--rdzv-endpoint", endpoint),
                env={"FERRO_DIST_TOKEN": "shared"},
            )
            for node in range(2)
        ]
        assert jobs[0].report() == f"0 {endpoint} True"
        assert jobs[1].report() == f"1 {endpoint} False"


def test_bind_to_core_binds_each_rank(launch: Launch) -> None:
    job = launch("report(*os.sched_getaffinity(0))", "-n", "2", "--bind-to", "core")
    cores = usable_cores()
    assert job.sorted_reports(2) == sorted(str(cores[i % len(cores)]) for i in range(2))


def test_signals_are_as_the_user_left_them(launch: Launch) -> None:
    job = launch(
        """
masks = [line for line in open("/proc/self/status") if line.startswith(("SigBlk", "SigIgn"))]
report(" ".join(m.split()[1] for m in masks))
""",
        "-n1",
        preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN),
    )
    # Whoever started the tests may have left more signals ignored.
    status = Path("/proc/self/status").read_text()
    own = next(line.split()[1] for line in status.splitlines() if line.startswith("SigIgn"))
    blocked, ignored = (int(mask, 16) for mask in job.report().split())
    assert (blocked, ignored) == (0, int(own, 16) | 1 << (signal.SIGHUP - 1))


def test_a_module_is_run_as_python_does(tmp_path: Path) -> None:
    (tmp_path / "greet.py").write_text("import sys; print(__name__, sys.argv[1:])")
    # The tests of an installed package may run with it.
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONSAFEPATH"}
    done = subprocess.run(
        [*FERRORUN, "-n1", "-m", "greet", "-n", "5"],
        cwd=tmp_path,
        env=environ,
        capture_output=True,
        timeout=DEADLINE_S,
    )
    assert done.stdout == b"[0] __main__ ['-n', '5']\n"


def test_a_script_may_be_called_like_an_option(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("-x.py").write_text("import sys; print(*sys.argv)\n")
    assert ferrorun("-n1", "--", "-x.py", "-y") == (0, "[0] -x.py -y\n", "")


def test_no_python_runs_any_command() -> None:
    assert ferrorun("-n1", "--no-python", "--", "echo", "$HOME") == (0, "[0] $HOME\n", "")


def test_a_script_that_cannot_be_found_exits_with_127() -> None:
    assert ferrorun("-n2", "/no/such.py") == (127, "", "ferrorun: cannot find /no/such.py\n")
    code, _, errors = ferrorun("-n2", "env", "script.py")
    assert code == 127
    assert "commands after --no-python" in errors


@pytest.mark.parametrize("script", ["-", "/dev/stdin", "/dev/fd/0"])
def test_a_script_that_one_rank_alone_could_read_is_refused(script: str) -> None:
    code, _, errors = ferrorun("-n2", script)
    assert (code, errors) == (
        2,
        f"ferrorun: only one rank could read the script from {script}: write it to a file\n",
    )


@pytest.mark.parametrize("script", ["-", "/dev/stdin"])
def test_a_rank_that_is_alone_reads_its_script_from_anywhere(script: str) -> None:
    done = subprocess.run(
        [*FERRORUN, "-n1", script], input="print('here')", capture_output=True, text=True
    )
    assert (done.returncode, done.stdout) == (0, "[0] here\n")


def test_a_script_in_a_pipe_is_refused(tmp_path: Path) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    with pytest.raises(LaunchError, match="only one rank could read the script"):
        parsed("-n2", str(fifo))


def test_a_command_that_cannot_be_found_exits_with_127() -> None:
    found = ferrorun("-n2", "--no-python", "no-such-command")
    assert found == (127, "", "ferrorun: cannot find no-such-command\n")


def test_a_command_that_cannot_be_run_exits_with_126(tmp_path: Path) -> None:
    path = tmp_path / "data"
    path.touch(mode=0o644)
    found = ferrorun("-n2", "--no-python", str(path))
    assert found == (126, "", f"ferrorun: cannot run {path}: Permission denied\n")


@pytest.mark.parametrize(("limit", "what"), [(8, "a job"), (20, r"rank \d+")])
def test_too_few_descriptors_stop_the_start(launch: Launch, limit: int, what: str) -> None:
    import resource

    job = launch(
        "wait_for_ever()",
        *("-n", "16"),
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit)),
    )
    code, _, err = job.finish()
    assert code == 126
    assert re.fullmatch(f"ferrorun: cannot start {what}: Too many open files\n", err)


def test_a_front_that_cannot_fork_says_so() -> None:
    # RLIMIT_NPROC does not hold for root, so that the tests cannot set it.
    program = """
import errno, os, sys
import ferro_dist.launch

def refuse():
    raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))

os.fork = refuse
sys.exit(ferro_dist.launch.main(["-n1", "--no-python", "true"]))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 126
    assert done.stderr == "ferrorun: cannot start a job: Resource temporarily unavailable\n"


def test_starting_ferrorun_imports_nothing_heavy() -> None:
    listing = """
import sys
before = set(sys.modules)
import ferro_dist.launch
print(*set(sys.modules) - before)
"""
    out = subprocess.run([sys.executable, "-c", listing], capture_output=True, check=True).stdout
    heavy = {
        "numpy",
        "argparse",
        "subprocess",
        "typing",
        "dataclasses",
        "getopt",
        "inspect",
        "logging",
    }
    assert not heavy & set(out.decode().split())


# Standard input.


def test_rank_0_has_the_standard_input(launch: Launch) -> None:
    job = launch("report(f'{rank} {sys.stdin.read()!r}')", "-n2", stdin=subprocess.PIPE)
    assert job.process.stdin is not None
    job.process.stdin.write(b"all of it")
    job.process.stdin.close()
    job.process.stdin = None
    assert job.sorted_reports(2) == ["0 'all of it'", "1 ''"]


def test_the_launcher_does_not_hold_the_standard_input(launch: Launch) -> None:
    read_end, write_end = os.pipe()
    job = launch("os.close(0)\nreport('closed')\nwait_for_order()", "-n1", stdin=read_end)
    os.close(read_end)
    assert job.report() == "closed"
    poller = select.poll()
    poller.register(write_end, 0)
    assert poller.poll(DEADLINE_S * 1e3), "somebody could still read"
    os.close(write_end)
    job.order()
    assert job.finish()[0] == 0


# Output.


def test_each_stream_keeps_its_place(launch: Launch) -> None:
    job = launch("print('out', rank)\nprint('err', rank, file=sys.stderr)", "-n2")
    code, out, err = job.finish()
    assert code == 0
    assert sorted(out.splitlines()) == ["[0] out 0", "[1] out 1"]
    assert sorted(err.splitlines()) == ["[0] err 0", "[1] err 1"]


def test_lines_of_different_ranks_never_mix(launch: Launch) -> None:
    script = """
for i in range(300):
    stream = (sys.stdout, sys.stderr)[i % 2]
    for part in (f"{i:03d}", str(rank) * 997, "\\n"):
        stream.write(part); stream.flush()
"""
    job = launch(script, "-n3", stderr=subprocess.STDOUT)
    code, out, _ = job.finish()
    lines = out.splitlines()
    assert code == 0
    assert sorted(lines) == sorted(
        f"[{rank}] {i:03d}{str(rank) * 997}" for rank in range(3) for i in range(300)
    )


def test_output_appears_while_the_rank_still_runs(launch: Launch) -> None:
    job = launch("print('working')\nwait_for_order()", "-n1")
    assert job.process.stdout is not None
    assert job.process.stdout.readline() == b"[0] working\n"
    job.order()
    assert job.finish()[0] == 0


def test_the_last_line_needs_no_newline(launch: Launch) -> None:
    assert launch("print('the end', end='')", "-n1").finish() == (0, "[0] the end\n", "")


CAUGHT_BEFORE = """
import traceback
try:
    1 / 0
except ZeroDivisionError:
    traceback.print_exc()
print("going on\\n" * 20, file=sys.stderr)
sys.exit("no data")
"""


@pytest.mark.parametrize(
    ("script", "words"),
    [
        ("raise ValueError('two\\nlines')", "ValueError: two ... lines"),
        ("raise ValueError('a cause') from OSError('deeper')", "ValueError: a cause"),
        ("assert 0, 'a\\n\\n  list:\\n  - of two\\n  - things'", "AssertionError: a ... - things"),
        ("sys.exit('no data')", "no data"),
        (CAUGHT_BEFORE, "no data"),
        ("sys.exit('no data\\n+------')", "+------"),
        pytest.param(
            "raise ExceptionGroup('both', [OSError('first'), ValueError('last')])",
            "ExceptionGroup: both (2 sub-exceptions) ... ValueError: last",
            marks=pytest.mark.skipif(sys.version_info < (3, 11), reason="no exception groups"),
        ),
    ],
)
def test_the_job_ends_with_how_its_errors_end(launch: Launch, script: str, words: str) -> None:
    code, _, err = launch(script, "-n1").finish()
    assert code == 1
    assert err.splitlines()[-1] == f"ferrorun: rank 0 exited with code 1: {words}"


def test_a_very_long_line_survives(launch: Launch) -> None:
    job = launch("print(str(rank) * 5_000_000)", "-n2")
    code, out, _ = job.finish()
    assert code == 0
    assert sorted(out.splitlines()) == [f"[{r}] " + str(r) * 5_000_000 for r in range(2)]


def test_binary_garbage_survives(launch: Launch) -> None:
    job = launch("sys.stdout.buffer.write(bytes(range(256)) * 1000)", "-n1")
    assert job.process.stdout is not None
    out = job.process.stdout.read()
    marked = (bytes(range(256)) * 1000).replace(b"\n", b"\n[0] ")
    assert out == b"[0] " + marked + b"\n"


def test_an_endless_line_is_broken() -> None:
    read_end, write_end = os.pipe()
    stream = Stream(read_end, 1, 0, None)
    assert stream.feed(b"x" * LINE_NBYTES) == b""
    assert stream.feed(b"y") == b"x" * LINE_NBYTES + b"y\n"
    assert not stream.has_partial
    os.close(read_end)
    os.close(write_end)


def test_a_rank_may_close_its_outputs_and_go_on(launch: Launch) -> None:
    job = launch("os.close(1); os.close(2); report('alive'); wait_for_order(); os._exit(3)", "-n1")
    assert job.report() == "alive"
    job.order()
    assert job.finish() == (3, "", "ferrorun: rank 0 exited with code 3\n")


def test_a_closed_reader_ends_the_job_quietly(launch: Launch) -> None:
    job = launch("while True: print('more')", "-n2")
    assert job.process.stdout is not None
    job.process.stdout.readline()
    job.process.stdout.close()
    job.process.stdout = None
    assert job.finish() == (141, "", "")


def test_a_full_disk_is_an_error(launch: Launch) -> None:
    with open("/dev/full", "w") as full:
        job = launch("print('x')\nwait_for_ever()", "-n1", stdout=full.fileno())
    code, _, err = job.finish()
    assert code == 1
    assert err == "ferrorun: cannot write the ranks' output: No space left on device\n"


def test_a_reader_that_does_not_read_holds_up_the_ranks_and_no_signal(launch: Launch) -> None:
    job = launch("report('go')\nwhile True: print('x' * 1000)", "-n2")
    assert job.sorted_reports(2) == ["go", "go"]
    assert job.process.stdout is not None
    assert select.select([job.process.stdout], [], [], DEADLINE_S)[0]
    job.process.send_signal(signal.SIGINT)
    job.assert_nothing_left()


def test_closed_standard_descriptors_do_no_harm(launch: Launch) -> None:
    def close_all() -> None:
        for fd in (0, 1, 2):
            os.close(fd)

    job = launch("print('lost')\nreport('ran')", "-n2", preexec_fn=close_all)
    assert job.sorted_reports(2) == ["ran", "ran"]
    assert job.finish() == (0, "", "")


def test_log_dir_keeps_each_ranks_output_unmarked(launch: Launch, tmp_path: Path) -> None:
    logs = tmp_path / "new" / "logs"
    job = launch("print('line', rank)\nsys.stderr.write('end')", "-n2", "--log-dir", str(logs))
    code, out, _ = job.finish()
    assert (code, sorted(out.splitlines())) == (0, ["[0] line 0", "[1] line 1"])
    found = {path.name: sorted(path.read_text().splitlines()) for path in logs.iterdir()}
    assert found == {f"rank{rank}.log": ["end", f"line {rank}"] for rank in range(2)}


def test_a_log_dir_that_cannot_be_written_starts_nothing(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    code, out, err = ferrorun("-n1", "--log-dir", str(tmp_path / "file" / "x"), "-m", "this")
    assert (code, out) == (1, "")
    assert err.startswith("ferrorun: cannot write to --log-dir: ")


# The terminal.


class Terminal:
    """A terminal of its own for one ferrorun."""

    def __init__(self, launch: Launch, script: str, *arguments: str, **env: str) -> None:
        self.master, slave = pty.openpty()
        settings = termios.tcgetattr(slave)
        settings[1] &= ~termios.OPOST
        settings[3] &= ~termios.ECHO
        termios.tcsetattr(slave, termios.TCSANOW, settings)

        def take() -> None:
            os.setsid()
            fcntl.ioctl(0, termios.TIOCSCTTY, 0)

        self.job = launch(
            script,
            *arguments,
            stdin=slave,
            stdout=slave,
            stderr=slave,
            preexec_fn=take,
            env={"TERM": "xterm", "NO_COLOR": ""} | env,
        )
        os.close(slave)
        self.seen = b""

    def expect(self, text: bytes) -> None:
        """Read until `text` appears."""
        deadline = time.monotonic() + DEADLINE_S
        while text not in self.seen:
            left = deadline - time.monotonic()
            assert select.select([self.master], [], [], max(0, left))[0], self.seen
            self.seen += os.read(self.master, 4096)

    def close(self) -> None:
        os.close(self.master)


@pytest.fixture
def terminal(launch: Launch) -> Iterator[Callable[..., Terminal]]:
    opened: list[Terminal] = []

    def open_one(*args: str, **env: str) -> Terminal:
        opened.append(Terminal(launch, *args, **env))
        return opened[-1]

    yield open_one
    for one in opened:
        one.close()


def test_marks_are_coloured_on_a_terminal(terminal: Callable[..., Terminal]) -> None:
    one = terminal("print('hello')", "-n1")
    one.expect(b"\x1b[36m[0]\x1b[0m hello\n")
    assert one.job.process.wait(DEADLINE_S) == 0


@pytest.mark.parametrize("env", [{"NO_COLOR": "1"}, {"TERM": "dumb"}])
def test_no_colour_where_it_is_not_wanted(
    terminal: Callable[..., Terminal], env: dict[str, str]
) -> None:
    one = terminal("print('hello')", "-n1", **env)
    one.expect(b"hello\n")
    assert one.seen == b"[0] hello\n"


def test_a_prompt_is_shown_and_answered_on_a_terminal(terminal: Callable[..., Terminal]) -> None:
    one = terminal("print(input('name? ').upper()) if rank == 0 else None", "-n2", NO_COLOR="1")
    one.expect(b"[0] name? ")
    os.write(one.master, b"ferris\n")
    one.expect(b"FERRIS\n")
    assert one.job.process.wait(DEADLINE_S) == 0


@pytest.mark.parametrize("busy_rank", [0, 1])
def test_an_unfinished_line_is_shown_however_much_else_is_written(
    terminal: Callable[..., Terminal], busy_rank: int
) -> None:
    script = f"""
orders = int(os.environ["ORDERS_FD"])
if rank == 0:
    print("name? ", end="", flush=True)
while orders not in select.select([orders], [], [], 0.01)[0]:
    if rank == {busy_rank}:
        print("\\rbusy", end="\\n" * rank, flush=True)
"""
    one = terminal(script, "-n2", NO_COLOR="1")
    one.expect(b"[0] name? ")
    one.job.order()
    assert one.job.process.wait(DEADLINE_S) == 0


def test_an_unfinished_line_is_not_mixed_with_anothers(terminal: Callable[..., Terminal]) -> None:
    script = """
if rank == 0:
    print("10%", end="\\r", flush=True); report("shown")
    wait_for_order()
    print("20%", flush=True)
else:
    wait_for_order()
    print("other")
"""
    one = terminal(script, "-n2", NO_COLOR="1")
    assert one.job.report() == "shown"
    one.expect(b"[0] 10%\r")
    one.job.order()
    one.expect(b"other\n")
    one.expect(b"20%\n")
    assert b"[1] other\n" in one.seen
    assert one.seen.startswith((b"[0] 10%\r[0] \n[1] other\n", b"[0] 10%\r[0] 20%\n"))


def test_ctrl_c_reaches_every_rank_once(terminal: Callable[..., Terminal]) -> None:
    script = """
count = 0
def on_interrupt(*_):
    global count
    count += 1
    report("interrupted")
signal.signal(signal.SIGINT, on_interrupt)
signal.signal(signal.SIGTERM, lambda *_: (report(f"{rank} {count}"), sys.exit()))
report("ready")
wait_for_ever()
"""
    one = terminal(script, "-n2")
    assert one.job.sorted_reports(2) == ["ready", "ready"]
    os.write(one.master, b"\x03")
    assert one.job.sorted_reports(2) == ["interrupted", "interrupted"]
    one.job.process.send_signal(signal.SIGTERM)
    assert one.job.sorted_reports(2) == ["0 1", "1 1"]
    assert one.job.process.wait(DEADLINE_S) == 0


def test_ctrl_z_stops_the_front_and_the_ranks(terminal: Callable[..., Terminal]) -> None:
    script = """
signal.signal(signal.SIGCONT, lambda *_: report("continued"))
report(os.getpid())
wait_for_order()
"""
    one = terminal(script, "-n2")
    pids = one.job.sorted_reports(2)
    front = one.job.process.pid
    os.kill(front, signal.SIGTSTP)
    _, status = os.waitpid(front, os.WUNTRACED)
    assert os.WIFSTOPPED(status)
    deadline = time.monotonic() + DEADLINE_S
    while any(Path(f"/proc/{pid}/stat").read_text().split()[2] != "T" for pid in pids):
        assert time.monotonic() < deadline, "the ranks go on"
        os.sched_yield()
    os.kill(front, signal.SIGCONT)
    assert one.job.sorted_reports(2) == ["continued", "continued"]
    one.job.order()
    assert one.job.process.wait(DEADLINE_S) == 0


# The end of the job.


def test_success_exits_with_0(launch: Launch) -> None:
    assert launch("pass", "-n3").finish() == (0, "", "")


def test_the_failing_rank_ends_the_job_and_is_named(launch: Launch) -> None:
    script = """
if rank == 1:
    wait_for_order()
    sys.stderr.write("Traceback\\n\\x1b[31mValueError: bad input\\x1b[0m\\n\\n")
    sys.exit(7)
report("waiting")
wait_for_ever()
"""
    job = launch(script, "-n3")
    job.sorted_reports(2)
    job.order()
    code, _, err = job.finish()
    assert code == 7
    assert err.endswith("\nferrorun: rank 1 exited with code 7: ValueError: bad input\n")
    assert err.count("ferrorun:") == 1


LOSE_ANOTHER = """
def lose_another():
    raise RuntimeError("ferro_dist.errors.ChannelClosed: rank 1 left the group")
"""


def wait_for_the_end_of(pid: int) -> None:
    try:
        process = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        assert select.select([process], [], [], DEADLINE_S)[0], "no end in time"
    finally:
        os.close(process)


@pytest.mark.parametrize(
    ("end", "code", "verdict"),
    [
        ("raise SystemExit(7)", 7, "exited with code 7"),
        ("os.kill(os.getpid(), signal.SIGSEGV)", 139, "was killed by SIGSEGV"),
    ],
)
def test_a_rank_that_ends_after_those_that_have_lost_it_is_named(
    launch: Launch, end: str, code: int, verdict: str
) -> None:
    script = f"""
if rank == 1:
    wait_for_order(); {end}
report(os.getpid())
lose_another()
"""
    job = launch(LOSE_ANOTHER + script, "-n3")
    for pid in job.sorted_reports(2):
        wait_for_the_end_of(int(pid))
    job.order()
    found, _, err = job.finish()
    assert (found, err.splitlines()[-1]) == (code, f"ferrorun: rank 1 {verdict}")


def test_a_rank_that_says_in_its_own_words_that_it_has_lost_another_is_not_named(
    launch: Launch,
) -> None:
    script = """
if rank == 1:
    wait_for_order(); raise SystemExit(7)
report(os.getpid())
try:
    lose_another()
except RuntimeError as error:
    raise ValueError("no training without all ranks") from error
"""
    job = launch(LOSE_ANOTHER + script, "-n2")
    wait_for_the_end_of(int(*job.sorted_reports(1)))
    job.order()
    code, _, err = job.finish()
    assert (code, err.splitlines()[-1]) == (7, "ferrorun: rank 1 exited with code 7")


CLIMB = """
def climb(depth, then): return climb_on(depth - 1, then) if depth else then()
def climb_on(depth, then): return climb(depth, then)
"""


def test_a_rank_that_has_lost_another_deep_inside_is_not_named(launch: Launch) -> None:
    script = """
if rank == 1:
    wait_for_order(); raise SystemExit(7)
report(os.getpid())
climb(450, lose_another)
"""
    job = launch(LOSE_ANOTHER + CLIMB + script, "-n2")
    wait_for_the_end_of(int(*job.sorted_reports(1)))
    job.order()
    code, _, err = job.finish()
    assert len(err) > 1 << 16
    assert (code, err.splitlines()[-1]) == (7, "ferrorun: rank 1 exited with code 7")


def test_an_error_from_deep_inside_is_shown_as_any_other(launch: Launch) -> None:
    script = (
        CLIMB
        + r"""
def fail(): raise ValueError("bad input\nin line 3")
climb(450, fail)
"""
    )
    _, _, err = launch(script, "-n1").finish()
    verdict = "ferrorun: rank 0 exited with code 1: ValueError: bad input ... in line 3"
    assert err.splitlines()[-1] == verdict


def test_of_a_pipelines_ranks_the_one_whose_stage_failed_is_named(launch: Launch) -> None:
    script = """
import numpy as np
import ferro_dist as fd

class Stage:
    weight, gradient = np.ones(3), np.zeros(3)
    def parameters(self): return [self.weight]
    def grads(self): return [self.gradient]
    def backward(self, x, gradient): return gradient
    def forward(self, x):
        if rank == 1:
            raise ValueError("no such token")
        return x, x

with fd.init() as backend:
    pipe = fd.Pipeline(Stage(), backend, 2)
    try:
        pipe.step(np.ones((4, 3)), loss_fn=lambda y: (y.sum(), np.ones_like(y)))
    except fd.StageFailed:
        if rank == 1:
            wait_for_order()
        else:
            report(os.getpid())
        raise
"""
    job = launch(script, "-n3")
    for pid in job.sorted_reports(2):
        wait_for_the_end_of(int(pid))
    job.order()
    code, _, err = job.finish()
    verdict = "ferrorun: rank 1 exited with code 1: ValueError: no such token"
    assert (code, err.splitlines()[-1]) == (1, verdict)


def test_a_rank_that_has_lost_another_is_named_if_no_other_fails(launch: Launch) -> None:
    script = "if rank:\n    wait_for_ever()\nlose_another()"
    code, _, err = launch(LOSE_ANOTHER + script, "-n2").finish()
    assert code == 1
    assert err.splitlines()[-1].startswith("ferrorun: rank 0 exited with code 1: RuntimeError: ")


def test_a_rank_killed_by_a_signal_is_named(launch: Launch) -> None:
    job = launch("os.kill(os.getpid(), signal.SIGSEGV) if rank else wait_for_ever()", "-n2")
    assert job.finish() == (139, "", "ferrorun: rank 1 was killed by SIGSEGV\n")


def test_keep_going_lets_the_others_outlive_a_rank_that_was_killed(launch: Launch) -> None:
    script = """
if rank == 1:
    os.kill(os.getpid(), signal.SIGKILL)
wait_for_order()
print("done")
"""
    job = launch(script, "-n2", "--keep-going")
    assert job.process.stderr is not None
    said = job.process.stderr.readline()
    assert said == b"ferrorun: rank 1 was killed by SIGKILL; the others go on\n"
    job.order()
    assert job.finish()[:2] == (0, "[0] done\n")


def test_keep_going_takes_an_interrupt_from_the_terminal_for_no_loss(
    terminal: Callable[..., Terminal],
) -> None:
    # As after a Ctrl-C that rank 0, in the terminal's group, has got before ferrorun.
    script = """
signal.signal(signal.SIGINT, signal.SIG_DFL)
if rank == 0:
    os.kill(os.getpid(), signal.SIGINT)
wait_for_ever()
"""
    one = terminal(script, "-n2", "--keep-going")
    one.expect(b"ferrorun: rank 0 was killed by SIGINT\n")
    assert one.job.process.wait(DEADLINE_S) == 130


def test_keep_going_ends_with_a_rank_that_exits_with_an_error(launch: Launch) -> None:
    job = launch("sys.exit(7) if rank else wait_for_ever()", "-n2", "--keep-going")
    assert job.finish() == (7, "", "ferrorun: rank 1 exited with code 7\n")


def test_keep_going_fails_when_the_last_rank_is_killed(launch: Launch) -> None:
    job = launch("os.kill(os.getpid(), signal.SIGSEGV)", "-n1", "--keep-going")
    assert job.finish() == (139, "", "ferrorun: rank 0 was killed by SIGSEGV\n")


def test_a_rank_that_ends_well_leaves_the_others_running(launch: Launch) -> None:
    job = launch("report(rank)\nif rank == 1: wait_for_order(); print('done')", "-n2")
    job.sorted_reports(2)
    job.order()
    assert job.finish() == (0, "[1] done\n", "")


def test_stragglers_get_sigterm_and_time_to_clean_up(launch: Launch) -> None:
    script = """
if rank == 1:
    wait_for_order(); sys.exit(1)
signal.signal(signal.SIGTERM, lambda *_: (print("cleaned up"), sys.exit()))
report("ready")
wait_for_ever()
"""
    job = launch(script, "-n2")
    assert job.report() == "ready"
    job.order()
    code, out, err = job.finish()
    assert (code, out) == (1, "[0] cleaned up\n")
    assert err == "ferrorun: rank 1 exited with code 1\n"


def test_stragglers_that_ignore_sigterm_are_killed(launch: Launch) -> None:
    script = """
if rank == 1:
    wait_for_order(); sys.exit(9)
signal.signal(signal.SIGTERM, signal.SIG_IGN)
subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"], close_fds=False)
report("ready")
wait_for_ever()
"""
    job = launch(script, "-n2")
    assert job.report() == "ready"
    job.order()
    code, _, err = job.finish()
    assert (code, err) == (9, "ferrorun: rank 1 exited with code 9\n")


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT])
def test_signals_are_forwarded_to_all_ranks(launch: Launch, signum: signal.Signals) -> None:
    script = f"""
def on_signal(signum, frame):
    report(f"got {{signum}}")
    sys.exit()
signal.signal({int(signum)}, on_signal)
report("ready")
wait_for_ever()
"""
    job = launch(script, "-n2")
    assert job.sorted_reports(2) == ["ready", "ready"]
    job.process.send_signal(signum)
    assert job.sorted_reports(2) == [f"got {int(signum)}"] * 2
    assert job.finish() == (0, "", "")


def lose_the_right_to_signal_others() -> None:
    prctl(PR_CAPBSET_DROP, CAP_KILL)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may change the user of a rank")
def test_a_rank_that_may_not_be_signalled_keeps_no_signal_from_the_others(launch: Launch) -> None:
    script = """
if rank == 0:
    os.setuid(65534)
signal.signal(signal.SIGTERM, lambda *_: report("told"))
report("ready")
wait_for_order()
"""
    job = launch(script, "-n2", preexec_fn=lose_the_right_to_signal_others)
    assert job.sorted_reports(2) == ["ready"] * 2
    job.process.terminate()
    assert job.report() == "told"
    job.order()
    assert job.finish() == (0, "", "")


def test_an_interrupted_job_exits_with_130(launch: Launch) -> None:
    job = launch("report('ready')\nwait_for_ever()", "-n2")
    job.sorted_reports(2)
    job.process.send_signal(signal.SIGINT)
    code, _, err = job.finish()
    assert code == 130
    assert "was killed by SIGINT: KeyboardInterrupt\n" in err


def test_a_job_can_be_called_off_while_its_ranks_are_being_started() -> None:
    # Rank 0 signals the front, which is the supervisor's parent, as soon as it runs.
    script = (
        'read -r _ _ _ front _ < /proc/$PPID/stat; echo up; [ "$RANK" != 0 ] || kill -TERM $front;'
        "exec sleep 600"
    )

    def count_started() -> int:
        code, out, _ = ferrorun("-n", "300", "--no-python", "sh", "-c", script)
        assert code == 128 + signal.SIGTERM
        return len(out.splitlines())

    # A busy machine may keep rank 0 from running until all of them have started, but not often.
    assert any(count_started() < 300 for _ in range(10))


def test_clean_up_after_an_interrupt_is_not_disturbed(launch: Launch) -> None:
    script = """
signal.signal(signal.SIGTERM, lambda *_: report("disturbed"))
try:
    report("ready")
    wait_for_ever()
except KeyboardInterrupt:
    if rank == 1: raise
    wait_for_order()
    report("saved")
"""
    job = launch(script, "-n2")
    job.sorted_reports(2)
    job.process.send_signal(signal.SIGINT)
    assert job.process.stderr is not None
    while b"KeyboardInterrupt" not in job.process.stderr.readline():
        pass
    job.order()
    assert job.report() == "saved"
    assert job.finish()[0] == 130


def test_a_second_interrupt_kills(launch: Launch) -> None:
    script = """
signal.signal(signal.SIGINT, lambda *_: report("ignored"))
report("ready")
wait_for_ever()
"""
    job = launch(script, "-n2")
    job.sorted_reports(2)
    job.process.send_signal(signal.SIGINT)
    assert job.sorted_reports(2) == ["ignored", "ignored"]
    job.process.send_signal(signal.SIGINT)
    code, _, err = job.finish()
    assert (code, err) == (130, "ferrorun: interrupted twice: killed all ranks\n")


FAMILY = """
# A child in the rank's group, and one that left it and its parent.
child = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"],
                         close_fds=False, stdout=2)
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        report("ready")
        wait_for_ever()
    os._exit(0)
"""
# The daemon's parent exits, so that it is the supervisor's to find.


def test_no_orphan_survives_the_launchers_sigkill(launch: Launch) -> None:
    job = launch(FAMILY + "wait_for_ever()", "-n2")
    assert job.sorted_reports(2) == ["ready", "ready"]
    job.process.kill()
    job.assert_nothing_left()


def test_no_orphan_survives_the_supervisors_sigkill(launch: Launch) -> None:
    job = launch(FAMILY + "wait_for_ever()", "-n2")
    assert job.sorted_reports(2) == ["ready", "ready"]
    os.kill(supervisor_of(job.process.pid), signal.SIGKILL)
    code, _, err = job.finish()
    assert (code, err) == (137, "ferrorun: the supervisor was killed by SIGKILL\n")


def test_no_rank_survives_the_sigkill_of_both(launch: Launch) -> None:
    job = launch("report('ready')\nwait_for_ever()", "-n2")
    assert job.sorted_reports(2) == ["ready", "ready"]
    supervisor = supervisor_of(job.process.pid)
    os.kill(job.process.pid, signal.SIGSTOP)
    os.kill(supervisor, signal.SIGKILL)
    os.kill(job.process.pid, signal.SIGKILL)
    job.assert_nothing_left()


def test_a_signal_sent_to_front_and_supervisor_by_name_is_forwarded(launch: Launch) -> None:
    script = """
signal.signal(signal.SIGTERM, lambda *_: (report("told"), sys.exit()))
report("ready")
wait_for_ever()
"""
    job = launch(script, "-n1")
    assert job.report() == "ready"
    for pid in (supervisor_of(job.process.pid), job.process.pid):
        os.kill(pid, signal.SIGTERM)
    assert job.report() == "told"
    assert job.finish() == (0, "", "")


def test_a_finished_job_leaves_no_daemon(launch: Launch) -> None:
    job = launch(FAMILY, "-n2")
    assert job.finish() == (0, "", "")


def test_a_failed_job_leaves_no_daemon(launch: Launch) -> None:
    job = launch(FAMILY + "sys.exit(3) if rank else wait_for_ever()", "-n2")
    code, _, err = job.finish()
    assert (code, err) == (3, "ferrorun: rank 1 exited with code 3\n")


def test_a_stopped_rank_does_not_outlive_the_job(launch: Launch) -> None:
    job = launch(
        """
if rank == 0:
    report("stopping"); os.kill(os.getpid(), signal.SIGSTOP)
wait_for_order(); sys.exit(5)
""",
        "-n2",
    )
    assert job.report() == "stopping"
    job.order()
    assert job.finish()[0] == 5
