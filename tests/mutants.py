"""Small faults put into the verifier of schedules: its tests must notice every one.

    python tests/mutants.py [--every N]     prints the mutants that no test notices

A mutant changes one comparison, sign, number, condition or statement of `FILES` and runs `TESTS`
in a child process. Texts of messages, annotations and refusals of wrong types are left as they are.
"""

from __future__ import annotations

import argparse
import ast
import copy
import importlib
import os
import signal
import sys
from pathlib import Path
from types import CodeType, FunctionType
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest
from depth import PROFILES
from hypothesis import HealthCheck, Phase, settings

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).parent.parent
MODULES = ("optsched.model.verify", "optsched.model.verify_resources")
TESTS = [
    str(ROOT / "tests" / "model" / f"test_verify{part}.py")
    for part in ("", "_periodic", "_problem")
]
EQUIVALENT = {
    "if not (step < 0).any():  # starts never fall along edges, so they are equal on a cycle": (
        "only the time"
    ),
    "if start is None or sequences is None:": "a schedule has both or neither",
    "most = _HUGE // max(plan.period, 1)  # clipping keeps the sign and avoids overflow": "a limit",
    'verb = "gains" if amount > 0 else "loses" => amount > 0 -> amount >= 0': "it is not 0",
    "ends = np.flatnonzero(np.diff(resource, append=-1))  # the last place of every resource": (
        "no resource has the number"
    ),
    "if not (s.acquire.any() or s.free.any() or s.workspace.any()): => "
    "if not (s.acquire.any() or s.free.any() or s.workspace.any()): -> if False:": "only the time",
    "late = np.flatnonzero((schedule.offset > 0) & (schedule.free != schedule.acquire)) "
    "=> (schedule.offset > 0) & (schedule.free != schedule.acquire) "
    "-> (schedule.offset > 0) | (schedule.free != schedule.acquire)": "the others carry nothing",
    "late = np.flatnonzero((schedule.offset > 0) & (schedule.free != schedule.acquire)) "
    "=> schedule.offset > 0 -> schedule.offset >= 0": "the others carry nothing",
    "exact = any(abs(level) > _SAFE for level in levels) "
    "=> abs(level) > _SAFE -> abs(level) >= _SAFE": "a limit",
    "return np.array(levels, dtype=object if exact else np.int64) "
    "=> object if exact else np.int64 -> object if True else np.int64": "only the time",
    "shift[ends] = period or 0 => 0 -> 1": "without a period these pairs are left out",
}
"""Lines whose mutants change no answer, or a line and one of its mutants, and why."""
SECONDS = 60
"""A child that uses more processor time is in an endless loop: the fault is noticed."""

settings.register_profile(  # a failure need not be made smaller
    "mutants", max_examples=PROFILES["fast"], deadline=None, derandomize=True,
    phases=[Phase.explicit, Phase.generate], suppress_health_check=list(HealthCheck),
)  # fmt: skip
SWAPS: dict[type[ast.AST], type[ast.AST]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq, ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn,
    ast.NotIn: ast.In, ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Add,
    ast.FloorDiv: ast.Mult, ast.Mod: ast.FloorDiv, ast.And: ast.Or, ast.Or: ast.And,
    ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd,
}  # fmt: skip


class Mutant(NamedTuple):
    """A module with one fault."""

    module: str
    line: int
    what: str
    tree: ast.Module

    def __str__(self) -> str:
        return f"{self.module}:{self.line}: {self.what}"


def mutants() -> Iterator[Mutant]:
    """Yield every mutant, in the order of the source."""
    for module in MODULES:
        tree = original(module)
        lines = path_of(module).read_text().splitlines()
        found = [(node, change) for node in _code(tree) for change in _changes(node)]
        for node, change in found:
            before = ast.unparse(node).partition("\n")[0]
            undo = change(node)
            what = f"{before} -> {ast.unparse(node).partition(chr(10))[0]}"
            line = getattr(node, "lineno", 0)
            text = lines[line - 1].strip()
            if not {text, f"{text} => {what}"} & EQUIVALENT.keys():
                yield Mutant(module, line, what, copy.deepcopy(tree))
            undo()


def path_of(module: str) -> Path:
    """The file of a module."""
    return ROOT / (module.replace(".", "/") + ".py")


def original(module: str) -> ast.Module:
    """The source of a module."""
    return ast.parse(path_of(module).read_text())


def _code(tree: ast.AST) -> Iterator[ast.AST]:
    """Nodes of functions that decide something."""
    for child in ast.iter_child_nodes(tree):
        if isinstance(child, (ast.JoinedStr, ast.Raise, ast.arguments, ast.AnnAssign)):
            continue
        if isinstance(child, ast.Assign) and ast.unparse(child.targets[0]) in _TEXTS:
            continue
        if not isinstance(tree, ast.Module) or isinstance(child, (ast.FunctionDef, ast.ClassDef)):
            yield child
            yield from _code(child)


_TEXTS = ("message", "after", "cycles", "text", "rule", "deadline", "release")
"""Variables of messages."""


def _changes(node: ast.AST) -> Iterator[Any]:
    """Functions that change a node in place; each returns a function that undoes it."""
    if isinstance(node, ast.Compare):
        for k, op in enumerate(node.ops):
            if type(op) in SWAPS:
                yield lambda n, k=k, op=op: _put(n.ops, k, SWAPS[type(op)]())
    elif isinstance(node, (ast.BinOp, ast.BoolOp)) and type(node.op) in SWAPS:
        yield lambda n: _set(n, "op", SWAPS[type(n.op)]())
    elif isinstance(node, ast.Constant) and type(node.value) in (int, bool):
        yield lambda n: _set(
            n, "value", not n.value if n.value is True or n.value is False else n.value + 1
        )
    elif isinstance(node, (ast.If, ast.IfExp)):
        for value in (True, False):
            yield lambda n, value=value: _set(n, "test", ast.Constant(value))
    elif isinstance(node, ast.AugAssign):
        yield lambda n: _set(n, "value", ast.List([], ast.Load()))


def _set(node: Any, name: str, value: Any) -> Any:
    old = getattr(node, name)
    if isinstance(value, ast.expr):
        value = ast.fix_missing_locations(ast.copy_location(value, node))
    setattr(node, name, value)
    return lambda: setattr(node, name, old)


def _put(row: list[Any], k: int, value: Any) -> Any:
    old, row[k] = row[k], value

    def undo() -> None:
        row[k] = old

    return undo


def run() -> int:
    """Run the tests up to the first failure, and return the exit code of pytest."""
    options = ["-x", "-q", "-p", "no:cacheprovider", "-p", "no:xdist"]
    return int(pytest.main([*options, "--hypothesis-profile", "mutants", *TESTS]))


def noticed(mutant: Mutant) -> bool:
    """Whether the tests of the verifier fail with a mutant, in a child process."""
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) != 0
    signal.setitimer(signal.ITIMER_PROF, SECONDS)
    try:
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, 1)
        os.dup2(null, 2)
        code = compile(ast.fix_missing_locations(mutant.tree), mutant.module, "exec")
        _replace(vars(importlib.import_module(mutant.module)), code)
        os._exit(run())
    except BaseException:
        os._exit(99)


def _replace(namespace: dict[str, Any], code: CodeType) -> None:
    """Give functions of a module the code of the same functions in other code."""
    for one in code.co_consts:
        if isinstance(one, CodeType) and one.co_name in namespace:
            old = namespace[one.co_name]
            if isinstance(old, FunctionType):
                old.__code__ = one
            else:
                _replace(dict(vars(old)), one)


def main() -> int:
    """Print all mutants that no test notices; 1 if there are any."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--every", type=int, default=1, help="try every n-th mutant only")
    given = parser.parse_args()
    chosen = list(mutants())[:: given.every]
    if run():  # in this process: the children inherit what it imports
        print("the tests fail without a fault too", file=sys.stderr)
        return 2
    alive = 0
    for number, mutant in enumerate(chosen):
        if not noticed(mutant):
            alive += 1
            print(f"not noticed: {mutant}", flush=True)
        if number % 20 == 19:
            print(f"{number + 1} of {len(chosen)} tried, {alive} not noticed", file=sys.stderr)
    print(f"{len(chosen)} mutants, {alive} not noticed")
    return min(alive, 1)


if __name__ == "__main__":
    sys.exit(main())
