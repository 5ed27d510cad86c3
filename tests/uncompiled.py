"""Kernels as they are before anything is compiled."""

from __future__ import annotations

import sys
from importlib import import_module
from pkgutil import walk_packages
from typing import TYPE_CHECKING, Any

import optsched_solvers
from optsched.kernels.plain_python import is_in_python
from optsched_solvers import _loading as loading

if TYPE_CHECKING:
    from types import ModuleType

    import pytest


for _module in walk_packages(optsched_solvers.__path__, "optsched_solvers."):
    import_module(_module.name)  # one that is imported later would keep a stand-in for ever


class Uncompiled:
    """A kernel that can only run as Python, and only for those who want that."""

    ready = False

    def __init__(self, kernel: Any) -> None:
        self.py_func = kernel.py_func

    def __call__(self, *arguments: Any) -> Any:
        """Run as Python."""
        assert is_in_python(), f"{self.py_func.__name__} would be compiled"
        return self.py_func(*arguments)


def uncompile(monkeypatch: pytest.MonkeyPatch, *modules: ModuleType) -> None:
    """Let the kernels in these modules be as if nothing were compiled."""
    for module in modules:
        for name, value in vars(module).copy().items():
            if hasattr(value, "py_func"):
                monkeypatch.setattr(module, name, Uncompiled(value))


def never_load(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    """Let every solver hear that no kernel is there, nor comes in time; or only one of the two."""
    for name in names or ("loaded", "load"):
        known = getattr(loading, name)
        for module in list(sys.modules.values()):
            if module.__name__.startswith("optsched_solvers") and vars(module).get(name) is known:
                monkeypatch.setattr(module, name, _never)


def _never(*_: object) -> bool:
    return False
