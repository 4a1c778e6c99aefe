"""A system under measurement as its parent sees it: processes that obey over sockets."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any

import measure
from peers import WORKER, System

START_TIMEOUT_S = 300.0  # torch with CUDA, read from a cold disk
ORDER_TIMEOUT_S = 120.0
EXIT_TIMEOUT_S = 5.0
# The kernel allows the path of a socket 107 bytes, of which a folder and its name need up to 50.
LONGEST_PARENT_NBYTES = 57


class SystemFailed(Exception):
    """A system could not be started, or died, or stopped answering."""


class CaseRefused(Exception):
    """A system answered that it cannot run a case; the others of its group go on."""


class Group:
    """The ranks of one system, asleep except while they carry out an order."""

    def __init__(self, system: System, ranks: int, transport: str, directory: Path) -> None:
        self.system = system
        self.about = ""
        self.is_alive = True
        self._ranks = ranks
        name = system.name.replace("/", "-")  # of files
        self._log = directory / f"{name}.log"
        self._processes: list[subprocess.Popen[bytes]] = []
        self._channels: list[_Channel] = []
        # A path of its own and short: see `scratch_directory`.
        self._socket_path = directory / f"{name}.socket"
        self._environment = {
            **os.environ,
            **system.environment,
            "BENCHMARK_ADAPTER": system.adapter,
            "BENCHMARK_NAME": system.name,
            "BENCHMARK_TRANSPORT": transport,
            "BENCHMARK_DIRECTORY": str(directory),
            "BENCHMARK_ID": name,
            "BENCHMARK_SOCKET": str(self._socket_path),
        }

    def launch(self) -> None:
        """Start all ranks, and return before they are there."""
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(self._socket_path))
        self._listener.listen(self._ranks)
        self._listener.settimeout(0.2)
        with self._log.open("wb") as log:
            self._launch(log)

    def join(self) -> None:
        """Wait until every rank has joined its group."""
        try:
            channels = self._accept_all(self._listener)
        except OSError as error:
            self.kill()
            raise SystemFailed(f"{self.system.name}: {error}{self._said()}") from None
        finally:
            self._listener.close()
        self._channels = [channels[rank] for rank in range(self._ranks)]

    def order(self, **order: Any) -> list[Any]:
        """Have every rank do the same thing; their answers, by rank."""
        try:
            for channel in self._channels:
                channel.send(order)
            answers = [channel.receive() for channel in self._channels]
        except OSError as error:
            self.kill()
            raise SystemFailed(
                f"{self.system.name}: {error or 'no answer'}{self._said()}"
            ) from None
        errors = [answer["error"] for answer in answers if "error" in answer]
        if errors:
            raise CaseRefused(errors[0])
        return [answer["value"] for answer in answers]

    def dismiss(self) -> None:
        """Tell all ranks to end, and return before they have."""
        with contextlib.suppress(OSError):
            for channel in self._channels:
                channel.send({"do": "exit"})

    def close(self) -> None:
        """Wait for the end of all ranks; end those that do not obey by force."""
        self.dismiss()
        deadline = time.monotonic() + EXIT_TIMEOUT_S
        for process in self._processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.1, deadline - time.monotonic()))
        self.kill()

    def kill(self) -> None:
        """End every process of the system that is left."""
        self.is_alive = False
        for channel in self._channels:
            channel.close()
        for number in (signal.SIGTERM, signal.SIGKILL):
            for process in self._processes:
                _end(process, number)

    def _launch(self, log: IO[bytes]) -> None:
        if self.system.command:
            self._spawn(self.system.command, {}, log)
            return
        for rank in range(self._ranks):
            own = {"RANK": str(rank), "WORLD_SIZE": str(self._ranks)}
            self._spawn((sys.executable, WORKER), own, log)

    def _spawn(self, command: tuple[str, ...], more: Mapping[str, str], log: IO[bytes]) -> None:
        process = subprocess.Popen(
            command,
            env={**self._environment, **more},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        self._processes.append(process)

    def _accept_all(self, listener: socket.socket) -> dict[int, _Channel]:
        channels: dict[int, _Channel] = {}
        deadline = time.monotonic() + START_TIMEOUT_S
        while len(channels) < self._ranks:
            try:
                connection, _ = listener.accept()
            except TimeoutError:
                self._check_started(deadline)
                continue
            channel = _Channel(connection)
            hello = channel.receive()
            self.about = hello["about"]
            channels[hello["rank"]] = channel
        return channels

    def _check_started(self, deadline: float) -> None:
        ended = [process for process in self._processes if process.poll() is not None]
        if not ended and time.monotonic() < deadline:
            return
        what = f"exit code {ended[0].returncode}" if ended else "not ready in time"
        self.kill()
        raise SystemFailed(f"{self.system.name}: {what}{self._said()}")

    def _said(self) -> str:
        lines = self._log.read_text(encoding="utf-8", errors="replace").split("\n")
        last = [line.strip() for line in lines if line.strip()]
        return f": {last[-1]}" if last else ""


def start_all(
    systems: Iterable[System],
    ranks: int,
    transport: str,
    directory: Path,
    stack: contextlib.ExitStack,
) -> list[Group]:
    """Start all systems at the same time, and say which are missing; `stack` ends the others."""
    groups = []
    for system in systems:
        if system.missing:
            measure.say(f"missing: {system.name}: {system.missing}")
            continue
        group = Group(system, ranks, transport, directory)
        stack.callback(group.close)
        group.launch()
        groups.append(group)
    return [group for group in groups if _joins(group)]


def _joins(group: Group) -> bool:
    """Wait for a group that was launched; say so if it does not come."""
    try:
        group.join()
    except SystemFailed as error:
        measure.say(f"missing: {error}")
        return False
    measure.say(f"{group.system.name}: {group.about}")
    return True


class _Channel:
    """Lines of JSON to and from one rank."""

    def __init__(self, connection: socket.socket) -> None:
        connection.settimeout(ORDER_TIMEOUT_S)
        self._connection = connection
        self._lines = connection.makefile("r", encoding="utf-8")

    def send(self, value: dict[str, Any]) -> None:
        self._connection.sendall(json.dumps(value).encode() + b"\n")

    def receive(self) -> dict[str, Any]:
        line = self._lines.readline()
        if not line:
            raise ConnectionError("a rank ended")
        value: dict[str, Any] = json.loads(line)
        return value

    def close(self) -> None:
        self._lines.close()
        self._connection.close()


def _end(process: subprocess.Popen[bytes], number: signal.Signals) -> None:
    if process.poll() is not None:
        return
    with contextlib.suppress(ProcessLookupError):
        # Each launcher leads a session of its own: its ranks are in it.
        os.killpg(process.pid, number)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(1.0)


@contextlib.contextmanager
def scratch_directory() -> Iterator[Path]:
    """Make a directory for sockets and logs, gone afterwards; in /tmp if TMPDIR is too long."""
    parent = tempfile.gettempdir()
    if len(os.fsencode(parent)) > LONGEST_PARENT_NBYTES:
        parent = "/tmp"
    with tempfile.TemporaryDirectory(prefix="ferro-bench-", dir=parent) as name:
        yield Path(name)
