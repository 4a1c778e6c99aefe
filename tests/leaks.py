"""What a process holds of the system, to find what a test has left behind."""

from __future__ import annotations

import contextlib
import gc
import os
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeVar

__all__ = ["Resources", "nothing_is_left", "settled"]

T = TypeVar("T")

# A thread that has been joined, or a process that has been waited for, may show in
# /proc for some microseconds longer, or until a busy machine lets it end.
_GRACE_S = 30.0


@dataclass(frozen=True)
class Resources:
    """Descriptors, threads, descendants and mapped files of this process."""

    in_use: frozenset[str]
    mappings: frozenset[str]  # of files, as address ranges

    @classmethod
    def now(cls, has_gpu: bool = False) -> Resources:
        """Look at what there is. A GPU's libraries open descriptors when they first need them."""
        descriptors = () if has_gpu else _descriptors()
        in_use = frozenset([*descriptors, *_threads(), *_descendants("self")])
        return cls(in_use, frozenset(_mappings()))

    def beyond(self, earlier: Resources) -> list[str]:
        """Name what has come since. Of mapped files, shared segments: libraries stay."""
        new = self.mappings - earlier.mappings
        segments = [f"mapping {each}" for each in _segments() if each in new] if new else []
        return sorted([*map(_with_command, self.in_use - earlier.in_use), *segments])


@contextlib.contextmanager
def nothing_is_left(has_gpu: bool = False) -> Iterator[None]:
    """Raise AssertionError if the block leaves something behind; not if it raises itself."""
    before = Resources.now(has_gpu)
    yield
    left = Resources.now(has_gpu).beyond(before)
    if left:
        gc.collect()  # a cycle is no leak
        left = settled(lambda: Resources.now(has_gpu).beyond(before), [])
    assert not left, f"left behind: {', '.join(left)}"


def settled(look: Callable[[], T], expected: T) -> T:
    """Return what `look` finds, once that is `expected` or has had the time to become it."""
    deadline = time.monotonic() + _GRACE_S
    while (found := look()) != expected and time.monotonic() < deadline:
        time.sleep(1e-3)
    return found


def _descriptors() -> Iterator[str]:
    for entry in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # that of this very listing
            yield f"descriptor {entry} of {os.readlink(f'/proc/self/fd/{entry}')}"


def _threads() -> Iterator[str]:
    """Yield the threads of Python, and those of the engine, which has given them names."""
    for thread in threading.enumerate():
        yield f"thread {thread.name} ({thread.ident})"
    for task in os.listdir("/proc/self/task"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            name = _read(f"/proc/self/task/{task}/comm").strip()
            if name.startswith("ferro-"):
                yield f"engine thread {name} ({task})"


def _descendants(process: str) -> Iterator[str]:
    """Yield children and theirs: the forkserver's are the ranks."""
    tasks: list[str] = []
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        tasks = os.listdir(f"/proc/{process}/task")
    for task in tasks:
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            for child in _read(f"/proc/{process}/task/{task}/children").split():
                # Not its command line, which changes while it starts.
                yield f"process {child}"
                yield from _descendants(child)


def _with_command(name: str) -> str:
    kind, _, process = name.partition(" ")
    if kind != "process":
        return name
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        command = _read(f"/proc/{process}/cmdline").replace("\0", " ")
        return f"{name} ({command.strip()[:60]})"
    return f"{name} (gone)"


def _mappings() -> list[str]:
    """Return the addresses at which files are mapped."""
    try:
        return os.listdir("/proc/self/map_files")
    except FileNotFoundError:  # in some sandboxes
        return [line.split()[0] for line in _read("/proc/self/maps").splitlines()]


def _segments() -> Iterator[str]:
    """Yield where shared segments are mapped: slow, since the kernel writes every file's name."""
    for line in _read("/proc/self/maps").splitlines():
        if "memfd:ferro_dist" in line:
            yield line.split()[0]


def _read(path: str) -> str:
    # Not through pathlib: this is done some twenty times around each of thousands of tests.
    with open(path) as file:
        return file.read()
