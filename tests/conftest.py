"""What all tests share: none of them may leave anything behind."""

from __future__ import annotations

import contextlib
import gc
import importlib.metadata
import multiprocessing.forkserver
import multiprocessing.resource_tracker
import signal
from collections.abc import Generator, Iterator

import package_under_test  # noqa: F401  before what it chooses
import pytest
from hypothesis import HealthCheck, settings
from leaks import nothing_is_left
from visible_gpus import hide_gpus

import ferro_dist.testing  # sets what it preloads itself, before what is set below

hide_gpus()

# A shell's background jobs ignore some signals, and so would all that the tests start.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
for number in (signal.SIGHUP, signal.SIGQUIT):
    if signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, signal.SIG_DFL)

# The same examples in every run, however long a busy machine takes over one of them.
settings.register_profile(
    "repeatable",
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("repeatable")

_has_failed = pytest.StashKey[bool]()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.failed:
        item.stash[_has_failed] = True
    return report


@pytest.fixture(scope="session", autouse=True)
def _servers_of_multiprocessing() -> None:
    """Start what `run_ranks` needs once and keeps, before anything is counted."""
    multiprocessing.forkserver.set_forkserver_preload(_modules_of_ranks())
    multiprocessing.resource_tracker.ensure_running()
    multiprocessing.forkserver.ensure_running()
    gc.freeze()  # thousands of tests, and what they have imported, are not searched for cycles


def _modules_of_ranks() -> list[str]:
    """Name what ranks need not import each for itself.

    pytest, which the files of their bodies import, is most of what a short-lived rank would
    compute; torch takes two seconds. One with CUDA would bring libcudart with it, in place of
    which ranks put the emulated one.
    """
    modules = ["ferro_dist.backends.host", ferro_dist.testing.__name__, "hypothesis", "pytest"]
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        if importlib.metadata.version("torch").endswith("+cpu"):
            modules.append("torch")
    return modules


@pytest.fixture(autouse=True)
def _leaves_nothing_behind(
    request: pytest.FixtureRequest, _servers_of_multiprocessing: None
) -> Iterator[None]:
    """Fail a test after which a descriptor, thread, process or shared segment is left.

    One that has failed anyway may leave things: its traceback, shown later, holds them.
    """
    leak_check = nothing_is_left()
    leak_check.__enter__()
    yield
    if _has_failed not in request.node.stash:
        leak_check.__exit__(None, None, None)
