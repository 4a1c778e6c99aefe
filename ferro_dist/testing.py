"""Tools to test code that runs on many ranks, and on GPUs: `run_ranks` runs all ranks.

>>> def body(backend):
...     return ferro_dist.allreduce(numpy.ones(2), backend).tolist()
>>> run_ranks(2, body)
[[2.0, 2.0], [2.0, 2.0]]

`body` is a module-level function, so that the processes find it by its name.

`emulated_gpu` puts GPUs into a process that has none: the CUDA runtime and NCCL over host memory.
It is an emulation: wrong order, early frees and calls on which ranks disagree show as on a GPU, but
no time measured on it says anything about a GPU.
"""

from __future__ import annotations

import contextlib
import faulthandler
import fcntl
import multiprocessing
import os
import pickle
import secrets
import signal
import struct
import sys
import time
import traceback
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import TYPE_CHECKING, Any

from ferro_dist import arguments
from ferro_dist._launch import signals
from ferro_dist._native.cuda_libraries import load_nccl
from ferro_dist.errors import ChannelClosed

if TYPE_CHECKING:
    from ferro_dist._emulation.gpu import EmulatedGpu

__all__ = ["RankDeath", "RankFailed", "emulated_gpu", "run_ranks", "share_gpu"]

# From a server that has imported the package already: a process takes milliseconds
# to start, and inherits no thread, lock or descriptor of the caller.
_CONTEXT = multiprocessing.get_context("forkserver")
_PRELOADED = ["ferro_dist.backends.host", "ferro_dist.testing"]

# A rank whose group ends with its failure tells the others so a little before it tells the caller.
_CAUSE_S = 1.0

# How long all ranks together may take to exit once their bodies have returned.
_EXIT_S = 30.0

# The most that the caller sleeps at a time: poll() takes no infinite timeout, and no very long one.
_LONGEST_WAIT_S = 3600.0

# Asks a rank where it is: a signal that programs hardly use for something else.
_SHOW_STACK = signal.SIGRTMAX - 1
_STACK = b"(most recent call first)"
# The answer comes in pieces: it is complete when none has come for so long.
_SILENCE_S = 0.5

_READ_NBYTES = 1 << 20
_NBYTES = struct.Struct("!Q")  # before each message


class RankFailed(AssertionError):
    """A rank raised, died or did not end in time; the message holds its traceback.

    Attributes
    ----------
    rank : int
    """

    def __init__(self, rank: int, what: str) -> None:
        super().__init__(rank, what)  # what pickle and copy make another one from
        self.rank = rank

    def __str__(self) -> str:
        rank, what = self.args
        return f"rank {rank} {what}"


@dataclass(frozen=True)
class RankDeath:
    """The result of a rank that ended without one, as it was allowed to.

    Attributes
    ----------
    exitcode : int
        Negative for a signal.
    """

    exitcode: int


@dataclass(frozen=True)
class _Job:
    """What all ranks are told."""

    body: Callable[..., Any]
    args: Sequence[Any]
    world_size: int
    backend: str
    addr: str
    token: bytes
    timeout: float
    emulates_gpu: bool
    environ: dict[str, str]


@dataclass(frozen=True, order=True)
class _Failure:
    """What a body has raised; the least is the first, before those that came of it."""

    has_lost_another: bool  # it may come of another rank's failure, which is told later
    when: float  # on the clock of all processes
    what: str


@dataclass
class _Rank:
    number: int
    process: BaseProcess
    connection: Connection
    lifeline: Connection  # never written to; the rank dies when it closes
    mail: bytearray = field(default_factory=bytearray)  # what of its message has come
    is_mute: bool = False  # it has closed its end of the connection
    result: Any = None
    failure: _Failure | None = None
    is_done: bool = False


def run_ranks(
    world_size: int,
    body: Callable[..., Any],
    *args: Any,
    backend: str = "host",
    timeout: float = 60.0,
    may_die: Collection[int] = (),
    emulate_gpu: bool = False,
) -> list[Any]:
    """Run ``body(backend, *args)`` in `world_size` processes and return what each returned.

    The processes end with this one, even if it is killed.

    Parameters
    ----------
    world_size : int
    body : callable
        A module-level function. The processes import its module; if that is a script, it calls
        `run_ranks` below ``if __name__ == "__main__":``.
    *args
        Anything that can be pickled; the same for every rank.
    backend : str
        ``"host"``, ``"tcp"``, or ``"none"`` for a body that makes its own group: it is called as
        ``body(rank, world_size, addr, *args)``, with an `addr` for `HostBackend`.
    timeout : float
        Seconds within which all bodies must return.
    may_die : collection of int
        Ranks that may end without a result, which is then a `RankDeath`, or die after it.
    emulate_gpu : bool
        Call `emulated_gpu` in each process first.

    Returns
    -------
    list, by rank
        What `body` returned, pickled on the way.

    Raises
    ------
    RankFailed
        Some rank failed, even while it exited; raised for the first, not for those that then lost
        it. The others are killed.
    InvalidWorldSize, TypeError, ValueError
        Bad arguments, such as a `body` that other processes could not import. What pickle raises
        for one of `args` is passed on. No body was called.
    """
    if backend not in ("host", "tcp", "none"):
        raise ValueError(f"backend must be 'host', 'tcp' or 'none', not {backend!r}")
    world_size = arguments.check_world_size(world_size)
    timeout = arguments.check_timeout(timeout)
    mortal = _ranks(may_die)
    _check_body(body)
    job = _Job(
        body,
        args,
        world_size,
        backend,
        addr=f"unix:@ferro-dist-test-{secrets.token_hex(8)}",
        token=secrets.token_bytes(16),
        timeout=timeout,
        emulates_gpu=emulate_gpu,
        environ=dict(os.environ),
    )
    _preload()
    ranks: list[_Rank] = []
    with _killing_survivors(ranks):
        for rank in range(world_size):
            receiving, sending = _CONTEXT.Pipe(duplex=False)
            alive, lifeline = _CONTEXT.Pipe(duplex=False)
            process = _CONTEXT.Process(
                target=_play, args=(rank, job, sending, alive), name=f"rank {rank}"
            )
            ranks.append(_Rank(rank, process, receiving, lifeline))
            os.set_blocking(receiving.fileno(), False)
            with sending, alive:
                process.start()
        _collect(ranks, time.monotonic() + timeout, mortal)
        _await_exits(ranks, time.monotonic() + _EXIT_S, mortal)
    return [each.result for each in ranks]


def _preload() -> None:
    """Let the server, if it is not running yet, import the package besides what the user wants."""
    wanted = forkserver._forkserver._preload_modules  # type: ignore[attr-defined]
    if wanted == ["__main__"]:  # the default: nobody has asked for it, and it may be large
        wanted = []
    _CONTEXT.set_forkserver_preload(list(dict.fromkeys([*wanted, *_PRELOADED])))


def _ranks(may_die: Collection[int]) -> set[int]:
    try:
        return set(map(arguments.integer, may_die))
    except TypeError:
        raise TypeError(f"may_die must be a collection of ranks, not {may_die!r:.80}") from None


def _check_body(body: Callable[..., Any]) -> None:
    if not callable(body):
        raise TypeError(f"body must be a function, not {body!r:.80}")
    cause = None
    try:
        pickle.dumps(body)
        if getattr(body, "__module__", None) != "__main__" or _is_main_a_file():
            return
    except Exception as error:
        cause = error
    raise TypeError(
        "body must be a function at the top level of a module in a file, which other processes can "
        f"import; {body!r:.80} is not. In a notebook or at a prompt, let ranks be threads: see "
        "SimulatedBackend.create_group"
    ) from cause


def _is_main_a_file() -> bool:
    """Tell a script, or ``python -m``, from a notebook and a prompt."""
    main = sys.modules["__main__"]
    return main.__spec__ is not None or os.path.isfile(getattr(main, "__file__", ""))


def _play(rank: int, job: _Job, connection: Connection, alive: Connection) -> None:
    """Be one rank: in its own process."""
    _die_with_caller(alive)
    faulthandler.register(_SHOW_STACK, connection.fileno())
    try:
        # The server's is what the first run found.
        os.environ.clear()
        os.environ.update(job.environ)
        if job.emulates_gpu:
            emulated_gpu()
        outcome = ("result", _call_body(rank, job, connection))
    except BaseException:
        outcome = _failure("raised")
    try:
        _send(connection, outcome)
    except Exception:
        _send(connection, _failure("returned what cannot be sent to the caller"))
    faulthandler.unregister(_SHOW_STACK)
    connection.close()


def _die_with_caller(alive: Connection) -> None:
    """Have the kernel kill this process when its caller ends, even without having cleaned up.

    Nobody writes to this pipe, so that its end is the only event there. That of multiprocessing's
    own sentinel has brought this process its orders: the kernel may signal a write only when its
    reader is long through. PR_SET_PDEATHSIG would watch the server, which lives as long as its last
    rank.
    """
    fcntl.fcntl(alive, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(alive, fcntl.F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(alive, fcntl.F_SETFL, fcntl.fcntl(alive, fcntl.F_GETFL) | os.O_ASYNC)
    if alive.poll():  # It has ended before.
        os.kill(os.getpid(), signal.SIGKILL)


def _call_body(rank: int, job: _Job, connection: Connection) -> Any:
    if job.backend == "none":
        os.environ["FERRO_DIST_TOKEN"] = job.token.hex()
        return job.body(rank, job.world_size, job.addr, *job.args)
    from ferro_dist.backends.host import HostBackend, TcpBackend

    kind = {"host": HostBackend, "tcp": TcpBackend}[job.backend]
    with kind(rank, job.world_size, job.addr, token=job.token, timeout=job.timeout) as group:
        try:
            return job.body(group, *job.args)
        except BaseException:
            # Before the group's end here makes the others fail, too.
            _send(connection, _failure("raised"))
            raise


def _send(connection: Connection, outcome: tuple[str, Any]) -> None:
    # By value: a torch tensor, as multiprocessing sends it, would end with this process.
    data = pickle.dumps(outcome)
    with open(connection.fileno(), "wb", closefd=False) as file:
        file.write(_NBYTES.pack(len(data)))
        file.write(data)


def _failure(what: str) -> tuple[str, _Failure]:
    has_lost_another = isinstance(sys.exc_info()[1], ChannelClosed)
    when, trace = time.monotonic(), traceback.format_exc()
    return "failure", _Failure(has_lost_another, when, f"{what}:\n{trace}")


def _collect(ranks: list[_Rank], deadline: float, may_die: set[int]) -> None:
    first: tuple[_Failure, int] | None = None
    while running := [rank for rank in ranks if not rank.is_done and rank.failure is None]:
        sources = [rank.connection for rank in running if not rank.is_mute]
        sentinels = [rank.process.sentinel for rank in running]
        left = max(0.0, deadline - time.monotonic())
        ready = wait([*sources, *sentinels], min(left, _LONGEST_WAIT_S))
        if not ready and time.monotonic() >= deadline:
            if first is not None:
                break
            names = ", ".join(str(rank.number) for rank in running)
            what = f"did not end in time (still running: {names})"
            raise RankFailed(running[0].number, what + _stacks(running))
        for rank in running:
            if rank.connection in ready or rank.process.sentinel in ready:
                _settle(rank, rank.process.sentinel in ready, may_die)
        failures = [(rank.failure, rank.number) for rank in ranks if rank.failure is not None]
        if failures and first is None:
            deadline = min(deadline, time.monotonic() + _CAUSE_S)
        first = min(failures, default=None)
        if first is not None and not first[0].has_lost_another:
            break
    if first is not None:
        failure, number = first
        raise RankFailed(number, failure.what)


def _stacks(ranks: list[_Rank]) -> str:
    """Return where each of these ranks is, as part of a message."""
    for rank in ranks:
        _read(rank)
        rank.mail = bytearray()  # a part of an outcome
        assert rank.process.pid is not None
        with contextlib.suppress(ProcessLookupError):
            os.kill(rank.process.pid, _SHOW_STACK)
    while wait([rank.connection for rank in ranks if not rank.is_mute], _SILENCE_S):
        for rank in ranks:
            _read(rank)
    # An outcome that comes after all begins with a byte of 0.
    stacks = {rank.number: bytes(rank.mail).partition(b"\0")[0] for rank in ranks}
    return "".join(
        f"\nRank {number} is here:\n{stack.decode(errors='replace').rstrip()}"
        for number, stack in stacks.items()
        if _STACK in stack
    )


def _settle(rank: _Rank, has_ended: bool, may_die: set[int]) -> None:
    """Take a rank's outcome, if it is complete. It may have been sent just before the end."""
    _read(rank)
    head, body = rank.mail[: _NBYTES.size], memoryview(rank.mail)[_NBYTES.size :]
    if len(head) == _NBYTES.size and len(body) >= (nbytes := _NBYTES.unpack(head)[0]):
        try:
            kind, value = pickle.loads(body[:nbytes])
        except Exception as error:
            what = f"returned what its caller cannot read: {type(error).__name__}: {error}"
            raise RankFailed(rank.number, what) from error
        rank.mail = bytearray()
        if kind == "failure":
            rank.failure = value
        else:
            rank.result, rank.is_done = value, True
    elif has_ended:
        rank.process.join()
        death = RankDeath(rank.process.exitcode or 0)
        if rank.number not in may_die:
            raise RankFailed(rank.number, _describe_end(death.exitcode, "before its body returned"))
        rank.result, rank.is_done = death, True


def _read(rank: _Rank) -> None:
    """Take in what has come, without waiting for more: the rank may be stopped halfway."""
    with contextlib.suppress(BlockingIOError):
        while not rank.is_mute:
            data = os.read(rank.connection.fileno(), _READ_NBYTES)
            rank.mail += data
            rank.is_mute = not data


def _await_exits(ranks: list[_Rank], deadline: float, may_die: set[int]) -> None:
    """Wait until ranks whose bodies have returned exit: crashes and hangs at exit count, too."""
    running = [rank for rank in ranks if rank.number not in may_die]
    while running:
        # All at once: one that crashes may be what another, which comes first here, waits for.
        sentinels = [rank.process.sentinel for rank in running]
        ready = wait(sentinels, max(0.0, deadline - time.monotonic()))
        if not ready:
            raise RankFailed(running[0].number, "did not exit in time after its body had returned")
        for rank in running:
            if rank.process.sentinel in ready:
                rank.process.join()
                if exitcode := rank.process.exitcode:
                    what = _describe_end(exitcode, "after its body had returned")
                    raise RankFailed(rank.number, what)
        running = [rank for rank in running if rank.process.sentinel not in ready]
    for rank in ranks:
        rank.process.join(max(0.0, deadline - time.monotonic()))


def _describe_end(exitcode: int, when: str) -> str:
    how = (
        f"was killed by {signals.name_of(-exitcode)}"
        if exitcode < 0
        else f"ended with code {exitcode}"
    )
    return f"{how} {when}"


@contextlib.contextmanager
def _killing_survivors(ranks: list[_Rank]) -> Iterator[None]:
    try:
        yield
    finally:
        started = [rank for rank in ranks if rank.process.pid is not None]
        for rank in started:
            rank.process.kill()  # does nothing if it has ended
        for rank in started:
            rank.process.join()
        for rank in ranks:
            rank.process.close()
            rank.connection.close()
            rank.lifeline.close()


def emulated_gpu(
    *,
    cuda: int = 12,
    devices: int | None = None,
    delay_us: int | None = None,
    faults: str | None = None,
) -> EmulatedGpu:
    """Put emulated GPUs into this process, in place of libcudart and libnccl.

    Call it before anything loads a real one: before the first import of torch or CuPy, and
    before the first `NcclBackend`. A second call gives the same object. The repository's
    ``docs/emulation.md`` tells what an emulation shows, and how `faults` are written.

    Parameters
    ----------
    cuda : int
        12 or 13: the version of the CUDA runtime, where ferrorun has not chosen one.
    devices : int, optional
        Their number; by default ``FERRO_EMULATION_DEVICES``, else 1. The first call decides.
    delay_us : int, optional
        Microseconds by which every operation in a stream is late; by default
        ``FERRO_EMULATION_DELAY_US``, else 0.
    faults : str, optional
        Faults on demand; by default ``FERRO_EMULATION_FAULT``, else none.

    Returns
    -------
    EmulatedGpu
        Makes arrays, streams and graphs.

    Raises
    ------
    BackendUnavailable
        A real library is loaded already, or the emulated ones were not built.
    ValueError, TypeError
        A value that an option cannot have, or other `devices` than in the first call.
    """
    if cuda not in (12, 13):
        raise ValueError(f"cuda must be 12 or 13, not {cuda!r}")
    from ferro_dist._emulation.gpu import gpu_of_process

    gpu = gpu_of_process(cuda, devices)
    if delay_us is not None:
        gpu.set_delay(delay_us)
    if faults is not None:
        gpu.set_faults(faults)
    return gpu


def share_gpu(rank: int) -> None:
    """Let several ranks share one GPU, which NCCL refuses by default.

    Call it on every rank before the first group is made, and before JAX looks for its devices: both
    read their environment once. JAX then takes memory as it needs it; otherwise it would take most
    of the GPU's at once, and leave the other ranks none.

    Parameters
    ----------
    rank : int
        This process's own.

    Raises
    ------
    BackendUnavailable
        NCCL is not installed.
    """
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    if load_nccl().get_version() >= (2, 30):
        os.environ["NCCL_MULTI_RANK_GPU_ENABLE"] = "1"
        os.environ["NCCL_MAX_CTAS"] = "4"  # all ranks' kernels must run at the same time
    else:
        os.environ["NCCL_HOSTID"] = f"rank{rank}"
        os.environ["NCCL_SOCKET_IFNAME"] = "lo"
        os.environ["NCCL_IB_DISABLE"] = "1"
