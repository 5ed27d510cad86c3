"""Fixtures of several test files."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # tests run side by side: threads would spin
os.environ.setdefault("OMP_NUM_THREADS", "1")
# processes of tests import what these use
os.environ["PYTHONPATH"] = os.pathsep.join(
    [*map(str, Path(__file__).parents[:2]), *filter(None, [os.environ.get("PYTHONPATH")])]
)

import depth  # noqa: F401
import pytest
from hypothesis import settings
from program import SHOP, Cli

import optsched
from optsched.testing import checks

checks.OVERRUN = 10.0  # other processes may be busy

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as in the background of a script
    signal.signal(signal.SIGINT, signal.default_int_handler)  # processes inherit it too

settings.load_profile("fast")  # --hypothesis-profile goes before it


def pytest_sessionstart(session: pytest.Session) -> None:
    """Compile the kernels once, before several processes do so within the limits of their tests."""
    if getattr(session.config.option, "numprocesses", None):
        from optsched.kernels.background import all_entries, compile_all

        compile_all(all_entries()[0], 2)


@pytest.fixture
def cli(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> Cli:
    """The program, run in an empty folder that has shop.txt, plan.json and graph.json."""
    monkeypatch.chdir(tmp_path)
    Path("shop.txt").write_text(SHOP)
    shop = optsched.JobShop.read("shop.txt")
    optsched.solve(shop, "dispatch").schedule.write("plan.json")  # type: ignore[union-attr]
    shop.graph().write("graph.json")
    return Cli(tmp_path, monkeypatch, capsys)
