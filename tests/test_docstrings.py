"""Docstrings of public names: examples run, and the reference lists every name once."""

from __future__ import annotations

import doctest
import inspect
import re
from collections import Counter
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from optsched import elastic, serving

PUBLIC = [
    "optsched", "optsched.arraypipe", "optsched.bandwidth", "optsched.cluster",
    "optsched.cluster.determined", "optsched.cluster.policies", "optsched.serving",
    "optsched.plan", "optsched.elastic", "optsched.formats.registry", "optsched.plots",
    "optsched.pipelines", "optsched.service.client", "optsched.solving.stop", "optsched.testing",
]  # fmt: skip
"""Modules whose names users import."""

INNER = (
    "optsched.analysis.report:report", "optsched.bench.rows:Results",
    "optsched.formats.perfetto:trace", "optsched.formats.pipelining_csv:from_text",
    "optsched.formats.pipelining_csv:to_csv", "optsched.formats.read_problem:read_problem",
    "optsched.formats.standard:to_text", "optsched.formats.taillard:to_text",
    "optsched.plots.html:page",
)  # fmt: skip
"""Further names that pages use."""

LATE = {
    "optsched.elastic": {*elastic._PLACES} - {*elastic.__all__},
    "optsched.serving": {name for names in serving._LATE.values() for name in names},
}
"""Public names outside of `__all__`: they need torch, which is loaded on first use."""


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


API = Path(__file__).parent.parent / "docs" / "reference" / "api"


def reference_names() -> Counter[str]:
    """Full names in the tables of the reference, with modules and constants."""
    found: Counter[str] = Counter()
    for page in API.glob("*.rst"):
        module = ""
        for line in page.read_text().splitlines():
            if heading := re.match(r"\.\. (currentmodule|automodule|py:data):: (\S+)", line):
                module = heading[2] if heading[1] != "py:data" else module
                if heading[1] != "currentmodule":
                    found[heading[2]] += 1
            elif (name := re.match(r"   (\w+)$", line)) and module:
                found[f"{module}.{name[1]}"] += 1
    return found


def test_the_reference_has_every_name_once() -> None:
    """Functions and classes as the module has them, constants and modules too."""
    listed = reference_names()
    assert [name for name, n in listed.items() if n > 1] == []
    expected = set()
    for module in PUBLIC:
        loaded = import_module(module)
        for name in getattr(loaded, "__all__", public_names(module)):
            value = getattr(loaded, name)
            if name != "__version__" and not (inspect.ismodule(value) and value.__name__ in PUBLIC):
                expected.add(value.__name__ if inspect.ismodule(value) else f"{module}.{name}")
    expected |= {f"{module}.{name}" for module, names in LATE.items() for name in names}
    packages = {"optsched.formats"}  # in the list as a registry
    assert expected - packages <= listed.keys(), expected - packages - listed.keys()
    for name in listed:  # they can be imported
        module, _, attribute = name.rpartition(".")
        assert hasattr(import_module(module), attribute), name


CASES = [(module, name) for module in PUBLIC for name in public_names(module)]
CASES += [(module, name) for module, _, name in (one.partition(":") for one in INNER)]
CASES += [(module, name) for module, names in LATE.items() for name in sorted(names)]


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
    assert tests and tests[0].name == name and tests[0].examples, f"{name} has no example"
    for test in tests:
        report: list[str] = []
        failed, _ = doctest.DocTestRunner(verbose=False).run(test, out=report.append)
        assert not failed, "".join(report)
    assert list(tmp_path.iterdir()) == []
