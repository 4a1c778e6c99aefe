"""What the kernel knows about processes, for front and supervisor alike."""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from typing import NoReturn

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
# From SIGKILL until a process that the kernel does not let die (state D) is given up.
UNKILLABLE_S = 2.0


def open_standard_fds() -> None:
    """Fill closed standard descriptors, so that no pipe of the launcher takes their numbers."""
    for fd in (0, 1, 2):
        if not _is_open(fd):
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)


def _is_open(fd: int) -> bool:
    try:
        os.fstat(fd)
    except OSError:
        return False
    return True


def show(text: str) -> None:
    """Write requested text to standard output, for as long as somebody reads."""
    data = text.encode(errors="surrogateescape")
    with contextlib.suppress(BrokenPipeError):
        while data:
            data = data[os.write(1, data) :]


def complain(message: str) -> None:
    """Write a line of the launcher's own to standard error, past sys.stderr: it may be None."""
    with contextlib.suppress(OSError):
        os.write(2, f"ferrorun: {message}\n".encode(errors="surrogateescape"))


def prctl(option: int, argument: int) -> None:
    """Call prctl(2) with one argument."""
    libc = ctypes.CDLL(None, use_errno=True)
    zero = ctypes.c_ulong(0)
    if libc.prctl(ctypes.c_int(option), ctypes.c_ulong(argument), zero, zero, zero):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def descendants(root: int) -> list[int]:
    """Return the ids of all processes below `root`."""
    children: dict[int, list[int]] = {}
    for pid in (int(name) for name in os.listdir("/proc") if name.isdigit()):
        try:
            with open(f"/proc/{pid}/stat", "rb") as file:
                # After the name, which may hold anything: state, parent, ...
                parent = int(file.read().rpartition(b")")[2].split()[1])
        except (OSError, IndexError):
            continue  # It has just ended.
        children.setdefault(parent, []).append(pid)
    found = [root]
    for pid in found:
        found += children.get(pid, [])
    return found[1:]


def kill_all(pids: Iterable[int], signum: int) -> None:
    """Send a signal to each of them that is still there."""
    for pid in pids:
        # A set-uid process cannot be killed; the job's deadline reports it.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signum)


def exit_with(body: Callable[[], int]) -> NoReturn:
    """End a forked process with what `body` returns, never returning into the parent's code."""
    code = 70
    try:
        code = body()
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        os._exit(code)
    raise AssertionError("unreachable")
