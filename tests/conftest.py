"""What all tests share: none of them may leave anything behind."""

from __future__ import annotations

import multiprocessing.forkserver
import multiprocessing.resource_tracker
from collections.abc import Generator, Iterator

import pytest
from leaks import nothing_is_left

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
    multiprocessing.resource_tracker.ensure_running()
    multiprocessing.forkserver.ensure_running()


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
