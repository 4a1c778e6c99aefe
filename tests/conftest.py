"""What all tests share: none of them may leave anything behind."""

from __future__ import annotations

import gc
import multiprocessing.forkserver
import multiprocessing.resource_tracker
import os
import signal
from collections.abc import Generator, Iterator
from pathlib import Path

import package_under_test  # noqa: F401  before what it chooses
import pytest
from hypothesis import HealthCheck, settings
from leaks import nothing_is_left
from ranks_as_threads import on_ranks, traces_in_threads  # noqa: F401  fixtures
from visible_gpus import hide_gpus

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
    multiprocessing.forkserver.set_forkserver_preload(["preloaded"])
    multiprocessing.resource_tracker.ensure_running()
    with pytest.MonkeyPatch.context() as patch:
        # Where the server looks for modules: of sys.path it learns from Python 3.14 on.
        patch.setenv("PYTHONPATH", str(Path(__file__).parent), prepend=os.pathsep)
        multiprocessing.forkserver.ensure_running()
    gc.freeze()  # thousands of tests, and what they have imported, are not searched for cycles


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
