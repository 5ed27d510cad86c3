"""Kernels as they are before anything is compiled."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from optsched_solvers import loading

if TYPE_CHECKING:
    from types import ModuleType

    import pytest


class Uncompiled:
    """A kernel that can only run as Python; an entry refuses to be called."""

    ready = False

    def __init__(self, kernel: Any, entries: tuple[str, ...]) -> None:
        self.py_func = kernel.py_func
        self.is_entry = kernel.py_func.__name__ in entries

    def __call__(self, *arguments: Any) -> Any:
        """Run as Python, as other kernels ask it to."""
        assert not self.is_entry, f"{self.py_func.__name__} would be compiled"
        return self.py_func(*arguments)


def uncompile(monkeypatch: pytest.MonkeyPatch, *modules: ModuleType, entries: str) -> None:
    """Let these modules be as if nothing were compiled; `entries`: kernels that Python calls."""
    for module in modules:
        for name, value in vars(module).copy().items():
            if hasattr(value, "py_func"):
                monkeypatch.setattr(module, name, Uncompiled(value, tuple(entries.split())))


def never_load(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    """Let every solver hear that no kernel is there, nor comes in time; or only one of the two."""
    for name in names or ("loaded", "load"):
        known = getattr(loading, name)
        for module in list(sys.modules.values()):
            if module.__name__.startswith("optsched_solvers") and vars(module).get(name) is known:
                monkeypatch.setattr(module, name, _never)


def _never(*_: object) -> bool:
    return False
