"""The examples in docstrings, taken at their word, where they say what is printed."""

from __future__ import annotations

import doctest

import pytest

import ferro_dist as fd
from ferro_dist.parallel import schedules


def find_examples() -> dict[str, doctest.DocTest]:
    """Return those of public names, by name."""
    public = {name: getattr(fd, name) for name in fd.__all__}
    public |= {name: getattr(schedules, name) for name in schedules.__all__}
    parser = doctest.DocTestParser()
    tests = {
        name: parser.get_doctest(each.__doc__ or "", dict(public), name, None, None)
        for name, each in public.items()
        if callable(each)  # a number has the docstring of int
    }
    return {name: test for name, test in tests.items() if any(each.want for each in test.examples)}


EXAMPLES = find_examples()


@pytest.mark.parametrize("name", sorted(EXAMPLES))
def test_example_prints_what_the_docstring_says(name: str) -> None:
    runner = doctest.DocTestRunner()
    runner.run(EXAMPLES[name])
    assert (runner.tries > 0, runner.failures) == (True, 0)


def test_examples_are_found() -> None:
    assert EXAMPLES.keys() >= {"allreduce", "init", "parse_schedule", "simulate"}
