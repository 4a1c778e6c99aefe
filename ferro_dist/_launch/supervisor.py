"""The parent of the ranks: starts them, copies their output, reaps them."""

from __future__ import annotations

import enum
import errno
import os
import select
import signal
import time

from ferro_dist._launch.command_line import EXIT_NOT_FOUND, LaunchError, Options
from ferro_dist._launch.kernel import (
    PR_SET_CHILD_SUBREAPER,
    UNKILLABLE_S,
    complain,
    descendants,
    kill_all,
    prctl,
)
from ferro_dist._launch.output import (
    EXIT_CANNOT_WRITE,
    PIPE_NBYTES,
    READ_NBYTES,
    Log,
    Output,
    Stream,
    open_logs,
)
from ferro_dist._launch.plan import RankCommand, plan
from ferro_dist._launch.ports import listen
from ferro_dist._launch.ranks import EXIT_CANNOT_RUN, Rank, Spawner
from ferro_dist._launch.signals import (
    EXIT_SIGNALLED,
    FROM_TERMINAL,
    STOPPING,
    TERMINAL_SENDS,
    InheritedSignals,
    name_of,
)

# From SIGTERM to SIGKILL. With the kill itself, stragglers are gone within 5 s.
GRACE_S = 4.0
# A rank that has lost another may be gone before that one, which still tidies up or dumps core.
CAUSE_S = 2.0
# A signalled job waits for a reader of its last output no longer than this.
READER_S = 1.0
# A terminal shows an unfinished line (a prompt, a progress bar) after this long.
PARTIAL_LINE_S = 0.1


def supervise(
    options: Options,
    signals: InheritedSignals,
    control: int,
    terminal_group: int | None,
) -> int:
    """Run the job in the supervisor's process; return its exit code."""
    signals.shield_supervisor()
    os.setpgid(0, 0)
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    output = Output(os.environ)
    try:
        rendezvous, sockets = listen(options)
        logs = open_logs(options)
        commands = plan(options, rendezvous, os.environ)
        spawner = Spawner(signals, terminal_group, sockets)
        job = Job(commands, spawner, output, logs, control, options.keeps_going)
    except LaunchError as error:
        complain(str(error))
        return error.exit_code
    except OSError as error:
        complain(f"cannot start a job: {error.strerror}")
        return EXIT_CANNOT_RUN
    return job.run()


class Phase(enum.IntEnum):
    """How far a job has come. All but the first and the last end by themselves after some time."""

    RUNNING = 0
    IN_DOUBT = 1  # the rank that failed has only lost another, which may be heard of yet
    STOPPING = 2  # the ranks, or the processes that they have left, were asked to end
    KILLING = 3
    FINISHED = 4  # all processes have ended; output may be left to write


_SECONDS_OF = {Phase.IN_DOUBT: CAUSE_S, Phase.STOPPING: GRACE_S, Phase.KILLING: UNKILLABLE_S}


class Job:
    """The running job: a single loop over output, signals and ends of processes."""

    def __init__(
        self,
        commands: list[RankCommand],
        spawner: Spawner,
        output: Output,
        logs: list[Log] | None,
        control: int,
        keeps_going: bool,
    ) -> None:
        self._keeps_going = keeps_going
        self._commands = commands
        self._spawner = spawner
        self._output = output
        self._logs = logs
        self._control: int | None = control
        self._orders = b""  # read from it and not obeyed yet
        self._wakeup = _wake_on_sigchld()
        self._ranks: dict[int, Rank] = {}  # the living, by process id
        self._streams: dict[int, Stream] = {}  # the open ones, by descriptor
        self._exit_code: int | None = None  # settled by the first thing that goes wrong
        self._reason = ""
        self._culprit: Rank | None = None
        self._interrupts = 0
        self._was_told_to_stop = False
        self._phase = Phase.RUNNING
        self._deadline: float | None = None  # of the phase

    def run(self) -> int:
        """Start the ranks, see the job through to its end, and return its exit code."""
        self._start()
        while not (self._phase is Phase.FINISHED and self._output.is_settled):
            self._step()
        return self._exit_code or 0

    def _advance(self, phase: Phase) -> bool:
        """Enter a phase unless the job is as far as that; return whether it was not."""
        if self._phase >= phase:
            return False
        self._phase = phase
        seconds = _SECONDS_OF.get(phase)
        self._deadline = None if seconds is None else time.monotonic() + seconds
        return True

    # Start and end.

    def _start(self) -> None:
        try:
            for index, command in enumerate(self._commands):
                rank = self._spawner.start(command, self._logs[index] if self._logs else None)
                self._ranks[rank.pid] = rank
                self._streams.update((stream.fd, stream) for stream in rank.streams)
                if self._is_called_off():
                    break
        except OSError as error:
            number = len(self._ranks) + self._commands[0].rank
            self._settle(EXIT_CANNOT_RUN, f"cannot start rank {number}: {error.strerror}")
        self._spawner.release()
        for rank in self._ranks.values():
            self._check_started(rank)
        if self._exit_code is not None:
            self._kill()
        self._follow(self._orders)
        self._reap()

    def _is_called_off(self) -> bool:
        """Listen to the front between two starts: those of thousands of ranks take minutes."""
        assert self._control is not None
        if not select.select([self._control], [], [], 0)[0]:
            return False
        orders = self._hear()
        self._orders += orders
        told = (order & ~FROM_TERMINAL for order in orders)
        stopping = next((signum for signum in told if signum in STOPPING), None)
        if stopping is not None:
            self._settle(EXIT_SIGNALLED + stopping, "")
        return not orders or stopping is not None

    def _check_started(self, rank: Rank) -> None:
        error = rank.start_error()
        if not error:
            return
        name = rank.command.argv[0]
        if error == errno.ENOENT:
            self._settle(EXIT_NOT_FOUND, f"cannot find {name}")
        else:
            self._settle(EXIT_CANNOT_RUN, f"cannot run {name}: {os.strerror(error)}")

    def _settle(self, exit_code: int, reason: str, culprit: Rank | None = None) -> None:
        """Decide how the job ends, unless that is decided already."""
        if self._exit_code is None:
            self._exit_code, self._reason, self._culprit = exit_code, reason, culprit

    def _finish(self) -> None:
        """Show the rest of the output, and finally why the job ended."""
        for stream in list(self._streams.values()):
            # A process out of reach may hold the other end: do not wait for it.
            while self._read(stream):
                pass
            self._close(stream)
        self._output.end_line()
        if self._reason:
            words = self._culprit.last_words() if self._culprit else ""
            self._output.say(self._reason + words)
        self._advance(Phase.FINISHED)
        if self._was_told_to_stop:  # then there may be nobody to read what is left to write
            self._deadline = time.monotonic() + READER_S

    # The loop.

    def _step(self) -> None:
        ready = self._wait()
        for fd in [fd for fd in self._streams if fd in ready]:
            self._read(self._streams[fd])
        self._show_partial_lines()
        if self._control in ready:
            self._follow(self._hear())
        if self._wakeup in ready:
            os.read(self._wakeup, READ_NBYTES)
            self._reap()
        if self._deadline is not None and time.monotonic() >= self._deadline:
            self._expire()
        self._output.flush()
        if self._output.error is not None:
            self._lose_output(self._output.error)

    def _wait(self) -> set[int]:
        poller = select.poll()
        poller.register(self._wakeup, select.POLLIN)
        if self._control is not None:
            poller.register(self._control, select.POLLIN)
        for fd in () if self._output.is_full else self._streams:
            poller.register(fd, select.POLLIN)
        if self._output.blocked_fd is not None:
            poller.register(self._output.blocked_fd, select.POLLOUT)
        return {fd for fd, _ in poller.poll(self._timeout_ms())}

    def _timeout_ms(self) -> float | None:
        due = [
            stream.partial_since + PARTIAL_LINE_S
            for stream in self._streams.values()
            if self._waits_to_be_shown(stream)
        ]
        if self._deadline is not None:
            due.append(self._deadline)
        return max(0.0, min(due) - time.monotonic()) * 1e3 if due else None

    # Output.

    def _read(self, stream: Stream) -> bool:
        """Take in what the stream has now; return whether there may be more."""
        data = stream.read()
        if data == b"":
            self._close(stream)
        elif data:
            self._emit(stream, stream.feed(data))
        return bool(data)

    def _emit(self, stream: Stream, text: bytes) -> None:
        if not text:
            return
        self._output.write(stream, text)
        failure = stream.log.write(text) if stream.log else None
        if failure:
            self._output.say(failure)

    def _close(self, stream: Stream) -> None:
        if self._streams.pop(stream.fd, None) is None:
            return
        os.close(stream.fd)
        if stream.has_partial:
            self._emit(stream, stream.take_partial() + b"\n")

    def _waits_to_be_shown(self, stream: Stream) -> bool:
        return stream.has_partial and self._output.shows_partial_lines(stream)

    def _show_partial_lines(self) -> None:
        # Each in its own time: other output may never pause for so long.
        begun_by = time.monotonic() - PARTIAL_LINE_S
        for stream in self._streams.values():
            if self._waits_to_be_shown(stream) and stream.partial_since <= begun_by:
                self._emit(stream, stream.take_partial())

    def _lose_output(self, error: OSError) -> None:
        """Stop the job: nobody reads its output any more, or there is no room for it."""
        self._output.error = None
        if error.errno == errno.EPIPE:
            self._settle(EXIT_SIGNALLED + signal.SIGPIPE, "")
        else:
            self._settle(EXIT_CANNOT_WRITE, f"cannot write the ranks' output: {error.strerror}")
        self._stop()

    # Signals.

    def _hear(self) -> bytes:
        """Return what the front says; if it is dead, do what that calls for."""
        assert self._control is not None
        orders = os.read(self._control, PIPE_NBYTES)
        if not orders:
            self._abandon()
        return orders

    def _follow(self, orders: bytes) -> None:
        for order in orders:
            self._forward(signal.Signals(order & ~FROM_TERMINAL), bool(order & FROM_TERMINAL))

    def _abandon(self) -> None:
        """Kill what the dead front has left to this process."""
        self._control = None
        self._settle(EXIT_SIGNALLED + signal.SIGKILL, "")
        self._output.drop()
        self._kill()

    def _forward(self, signum: signal.Signals, is_from_terminal: bool) -> None:
        self._was_told_to_stop |= signum in STOPPING
        self._interrupts += signum == signal.SIGINT
        for rank in self._ranks.values():
            # The terminal has sent this to its foreground group itself.
            if rank.has_group or not is_from_terminal:
                rank.signal(signum)
        if self._interrupts > 1:
            self._settle(EXIT_SIGNALLED + signal.SIGINT, "interrupted twice: killed all ranks")
            self._output.drop()
            self._kill()
        if self._phase is Phase.FINISHED and signum in STOPPING:
            self._settle(EXIT_SIGNALLED + signum, "")
            self._output.drop()  # It only waited for a reader.

    # Ends of processes.

    def _reap(self) -> None:
        """Collect every child that has ended, and every process that has become one."""
        ended = []
        has_children = True
        while has_children:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                has_children = False
                break
            if pid == 0:
                break
            if pid in self._ranks:
                rank = self._ranks.pop(pid)
                rank.status = os.waitstatus_to_exitcode(status)
                ended.append(rank)
        self._judge(ended)
        if has_children:
            self._stop_leftovers()
        elif self._phase is not Phase.FINISHED:
            self._finish()

    def _judge(self, ended: list[Rank]) -> None:
        for stream in [rank.streams[1] for rank in ended]:
            if stream.fd in self._streams:
                self._read(stream)  # its last words: a pipe holds no more than is read at once
        # The kernel does not tell which of them was first. A rank that crashed is more likely the
        # cause than one that reports an error, or aborts because it lost its peer.
        ended.sort(key=lambda rank: rank.status >= 0 or rank.status == -signal.SIGABRT)
        ended.sort(key=Rank.has_lost_another)
        for rank in ended:
            if self._is_survived(rank):
                self._output.say(f"{_verdict(rank)[1]}; the others go on")
            elif rank.status:
                self._blame(rank)

    def _blame(self, rank: Rank) -> None:
        """End the job for this rank, or for the next that fails if this one has only lost it."""
        is_victim = rank.has_lost_another()
        is_in_doubt = self._phase is Phase.IN_DOUBT
        if is_in_doubt and is_victim:
            return
        if is_in_doubt and not self._was_told_to_stop:
            self._exit_code = None
        may_doubt = self._exit_code is None and not self._was_told_to_stop
        self._settle(*_verdict(rank), culprit=rank)
        if is_victim and may_doubt and self._ranks:
            self._advance(Phase.IN_DOUBT)
        else:
            self._stop()

    def _is_survived(self, rank: Rank) -> bool:
        """Whether others are to go on without a rank that was killed."""
        is_ending = self._was_told_to_stop or self._exit_code is not None
        # The terminal interrupts its own group itself, before the front can tell of a Ctrl-C.
        is_killed = rank.status < 0 and (rank.has_group or -rank.status not in TERMINAL_SENDS)
        return self._keeps_going and is_killed and bool(self._ranks) and not is_ending

    def _stop_leftovers(self) -> None:
        if self._phase >= Phase.KILLING:
            self._kill_descendants()
        elif not self._ranks:
            kill_all(descendants(os.getpid()), signal.SIGTERM)
            self._advance(Phase.STOPPING)

    def _stop(self) -> None:
        """Ask the ranks to end, and make sure that they do."""
        if not self._advance(Phase.STOPPING):
            return
        # After a Ctrl-C the ranks are ending already; do not disturb their clean-up.
        if not self._was_told_to_stop:
            for rank in self._ranks.values():
                rank.signal(signal.SIGTERM)
                rank.signal(signal.SIGCONT)  # It cannot clean up while it is stopped.

    def _expire(self) -> None:
        if self._phase is Phase.IN_DOUBT:
            self._stop()
        elif self._phase is Phase.STOPPING:
            self._kill()
        elif self._phase is Phase.KILLING:
            pids = ", ".join(str(pid) for pid in descendants(os.getpid()))
            self._output.say(f"the kernel does not end these processes: {pids}")
            self._finish()
        else:
            self._output.drop()

    def _kill(self) -> None:
        self._advance(Phase.KILLING)
        for rank in self._ranks.values():
            rank.signal(signal.SIGKILL)
        self._kill_descendants()

    def _kill_descendants(self) -> None:
        # A process forked after the list was made becomes this one's child when its parent dies,
        # and is found when that death is reaped.
        kill_all(descendants(os.getpid()), signal.SIGKILL)


def _verdict(rank: Rank) -> tuple[int, str]:
    number = rank.command.rank
    if rank.status > 0:
        return rank.status, f"rank {number} exited with code {rank.status}"
    return EXIT_SIGNALLED - rank.status, f"rank {number} was killed by {name_of(-rank.status)}"


def _wake_on_sigchld() -> int:
    """Return a descriptor that becomes readable when a child has ended."""
    read_fd, write_fd = os.pipe()
    os.set_blocking(read_fd, False)
    os.set_blocking(write_fd, False)
    signal.signal(signal.SIGCHLD, lambda signum, frame: None)
    signal.set_wakeup_fd(write_fd, warn_on_full_buffer=False)
    return read_fd
