"""Examples in the docstrings of public names run; complete rooms have one for every name."""

from __future__ import annotations

import doctest
import inspect
from importlib import import_module
from typing import Any

import pytest

PUBLIC = [
    "optsched", "optsched.arraypipe", "optsched.bandwidth", "optsched.cluster",
    "optsched.cluster.determined", "optsched.cluster.policies", "optsched.serving",
    "optsched.plan", "optsched.elastic", "optsched.formats.registry", "optsched.plots",
    "optsched.pipelines", "optsched.service.client", "optsched.solving.stop", "optsched.testing",
]  # fmt: skip
"""Modules whose names users import."""

COMPLETE = {
    "optsched", "optsched.formats.registry", "optsched.pipelines", "optsched.plots",
    "optsched.solving.stop", "optsched.testing",
}  # fmt: skip
"""Modules of the list above in which every function and class has an example."""


def public_names(module: str) -> list[str]:
    """Functions and classes of `__all__`, or, without it, those that the module defines."""
    loaded = import_module(module)
    own = [name for name, value in vars(loaded).items() if _is_of(value, module)]
    return [name for name in getattr(loaded, "__all__", own) if documented(getattr(loaded, name))]


def _is_of(value: Any, module: str) -> bool:
    """Whether a module defines a public value."""
    return getattr(value, "__module__", "") == module and value.__name__[0] != "_"


def documented(value: Any) -> bool:
    """Whether a value is a function or a class of this project."""
    inner = inspect.unwrap(value) if callable(value) else value
    return (inspect.isclass(inner) or inspect.isroutine(inner)) and inner.__module__.startswith(
        "optsched"
    )


CASES = [(module, name) for module in PUBLIC for name in public_names(module)]


def examples(module: str, name: str) -> list[doctest.DocTest]:
    """Examples of a name, and of the public methods of a class."""
    value = getattr(import_module(module), name)
    found = doctest.DocTestFinder(recurse=False).find(
        value, name, globs={"optsched": import_module("optsched"), "__name__": "__main__"}
    )
    for method in vars(value) if inspect.isclass(value) else ():
        if not method.startswith("_"):
            part = vars(value)[method]
            part = getattr(part, "__func__", getattr(part, "fget", part))
            if inspect.isfunction(part):
                found += doctest.DocTestFinder(recurse=False).find(
                    part, f"{name}.{method}", globs={"optsched": import_module("optsched")}
                )
    return found


@pytest.mark.parametrize(("module", "name"), CASES)
def test_examples(module: str, name: str, tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """They print what they promise and leave no file behind."""
    monkeypatch.chdir(tmp_path)
    tests = examples(module, name)
    if module in COMPLETE:
        assert tests and tests[0].name == name and tests[0].examples, f"{name} has no example"
    for test in tests:
        report: list[str] = []
        failed, _ = doctest.DocTestRunner(verbose=False).run(test, out=report.append)
        assert not failed, "".join(report)
    assert list(tmp_path.iterdir()) == []


def test_complete_modules_are_public() -> None:
    """The table has no name that the first list lacks."""
    assert {*PUBLIC} >= COMPLETE
