"""Examples in the docstrings of public names run."""

from __future__ import annotations

import doctest

import pytest

import optsched

NAMES = [name for name in optsched.__all__ if name != "__version__"]


@pytest.mark.parametrize("name", NAMES)
def test_example(name: str) -> None:
    """Every public name has an example, and it prints what it promises."""
    value = getattr(optsched, name)
    finder = doctest.DocTestFinder(recurse=False)
    (test,) = finder.find(value, name, globs={"optsched": optsched}) or [None]
    assert test is not None and test.examples, f"{name} has no example"
    report: list[str] = []
    failed, _ = doctest.DocTestRunner(verbose=False).run(test, out=report.append)
    assert not failed, "".join(report)


@pytest.mark.parametrize("name", ["from_starts"])
def test_examples_of_methods(name: str) -> None:
    """Examples of constructors from data of other tools."""
    value = getattr(optsched.Schedule, name)
    for test in doctest.DocTestFinder(recurse=False).find(
        value, name, globs={"optsched": optsched}
    ):
        assert not doctest.DocTestRunner(verbose=False).run(test).failed
