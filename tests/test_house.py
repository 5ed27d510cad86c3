"""The house rules: which room may import which, how large rooms, folders, files, signatures are."""

from __future__ import annotations

import ast
from collections import Counter
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).parent.parent

FLOORS = (
    "errors version io", "model", "kernels", "solving", "analysis", "problems", "pipelines",
    "bandwidth", "cluster", "plan", "elastic serving arraypipe", "optsched_solvers", "formats",
    "plots bench testing", "optsched", "service", "cli",
)  # fmt: skip
"""Imports run downward or stay on their floor, also those for types alone."""

MOST: dict[str, dict[str, int]] = {
    "lines": {
        "analysis": 991, "arraypipe": 13600, "bandwidth": 10177, "bench": 977, "cli": 3970,
        "cluster": 10540, "elastic": 2996, "errors": 110, "formats": 3560, "io": 893,
        "kernels": 1565, "model": 3018, "optsched": 200, "optsched_solvers": 13194,
        "pipelines": 1747, "plots": 1444, "problems": 4184, "service": 2883, "serving": 6610,
        "solving": 1424, "plan": 2204, "testing": 1500, "version": 100,
    },
    "files over 700 lines": {},
    "files of a folder over 24": {"optsched/cli": 25},
    "imports upward": {},
    "modules in circles of imports": {},
    "compiled entries": {"library": 40},
    "functions of too many parameters": {},
}  # fmt: skip
"""By rule and room the limit, 0 for rooms that are not named. Lines fall when a room shrinks."""

POSITIONAL, KERNEL, ALL = 8, 12, 15
"""Most parameters of a function without those by keyword, of a kernel, of a function with them.
Every parameter of a command is an option of the command line: they are not counted."""

SLACK = {"lines": 1.05}
"""Share of a limit that may be used: mending a fault must not turn the suite red."""


@cache
def modules() -> dict[str, tuple[Path, ast.Module]]:
    """Path and tree of every module of the product."""
    found = {}
    for top in (ROOT / "optsched", ROOT / "solvers" / "optsched_solvers"):
        for path in sorted(top.rglob("*.py")):
            name = ".".join(path.relative_to(top.parent).with_suffix("").parts)
            found[name.removesuffix(".__init__")] = path, ast.parse(path.read_text())
    return found


def room(name: str) -> str:
    """``optsched.io.values`` is in ``io``, ``optsched_solvers.quota.tree`` in the solvers."""
    first, *rest = name.split(".")
    return first if first == "optsched_solvers" or not rest else rest[0]


def statements(node: ast.AST, inside: bool = True) -> Iterator[ast.AST]:
    """All statements below a node, those `inside` of functions too."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, (ast.stmt, ast.ExceptHandler)):
            yield child
            if inside or not isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef)):
                yield from statements(child, inside)


def imports(name: str) -> set[str]:
    """Modules that this one imports when it loads or for types; not those inside functions."""
    known, found = modules(), set[str]()
    for node in statements(known[name][1], inside=False):
        if isinstance(node, ast.ImportFrom):
            full = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= full & known.keys() or {node.module or ""}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    return found & known.keys() - {name}


@cache
def counted() -> dict[str, Counter[str]]:
    """By rule and room what there is to count."""
    found = {rule: Counter[str]() for rule in MOST}
    floor = {name: k for k, names in enumerate(FLOORS) for name in names.split()}
    graph = {name: imports(name) for name in modules()}
    folders = Counter(str(path.parent.relative_to(ROOT)) for path, _ in modules().values())
    found["files of a folder over 24"].update({key: n for key, n in folders.items() if n > 24})
    for name, (path, tree) in modules().items():
        own, lines = room(name), path.read_text().count("\n")
        found["lines"][own] += lines
        found["files over 700 lines"][own] += lines > 700
        for other in graph[name]:
            if floor[room(other)] > floor[own]:
                found["imports upward"][f"{own} -> {room(other)}"] += 1
        reached, left = set[str](), [*graph[name]]
        while left:
            if (one := left.pop()) not in reached:
                reached.add(one)
                left += graph[one]
        found["modules in circles of imports"][own] += name in reached and own != "optsched"
        for node in statements(tree):
            if isinstance(node, ast.FunctionDef):
                by = {ast.unparse(one).split("(")[0].split(".")[-1] for one in node.decorator_list}
                entry = by & {"kernel", "njit", "jit", "entry"}
                found["compiled entries"]["library"] += bool(entry)
                given = node.args.posonlyargs + node.args.args
                n = len(given) - bool(given and given[0].arg in ("self", "cls"))
                kernel = by & {"kernel", "njit", "entry", "helper", "inlined"}
                most = KERNEL if kernel else POSITIONAL
                many = n > most or n + len(node.args.kwonlyargs) > max(most, ALL)
                command = own == "cli" and "Annotated[" in ast.unparse(node.args)
                found["functions of too many parameters"][own] += many and not command
    return found


@pytest.fixture(autouse=True, scope="module")
def no_trees_stay() -> Iterator[None]:
    """Later tests collect garbage: they need not look at syntax trees."""
    yield
    counted.cache_clear()
    modules.cache_clear()


@pytest.mark.parametrize("rule", MOST)
def test_rule(rule: str) -> None:
    """No room breaks it more often than it is known to."""
    most = {key: n * SLACK.get(rule, 1) for key, n in MOST[rule].items()}
    there = {key: n for key, n in counted()[rule].items() if n > most.get(key, 0)}
    assert not there, f"{rule}: {there}, at most { ({key: most.get(key, 0) for key in there}) }"
