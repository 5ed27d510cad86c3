"""Fixtures of several test files."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # tests run side by side: threads would spin
os.environ.setdefault("OMP_NUM_THREADS", "1")

import depth  # noqa: F401
import pytest
from hypothesis import settings
from program import SHOP, Cli

import optsched
from optsched.testing import check_runs, check_watching

# other processes may be busy: what a solver must do soon it may do later here, yet never at its end
check_runs.OVERRUN = 10.0
check_watching.LATE, check_watching.SOON, check_watching.LONG = 10.0, 30.0, 120.0

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as in the background of a script
    signal.signal(signal.SIGINT, signal.default_int_handler)  # processes inherit it too

settings.load_profile("fast")  # --hypothesis-profile goes before it

COMPILE = """
import contextlib, importlib, sys
from optsched.cli.warmup import kernel_modules
for name in kernel_modules()[::int(sys.argv[1])]:
    with contextlib.suppress(ImportError):  # an optional dependency
        importlib.import_module(name)
"""


def pytest_sessionstart(session: pytest.Session) -> None:
    """Compile the kernels once, before several processes do so within the limits of their tests.

    Two processes begin at the two ends of the list; what one has compiled the other loads.
    """
    if getattr(session.config.option, "numprocesses", None):
        ends = [subprocess.Popen([sys.executable, "-c", COMPILE, step]) for step in ("1", "-1")]
        assert [end.wait() for end in ends] == [0, 0]


@pytest.fixture
def cli(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> Cli:
    """The program, run in an empty folder that has shop.txt, plan.json and graph.json."""
    monkeypatch.chdir(tmp_path)
    Path("shop.txt").write_text(SHOP)
    shop = optsched.JobShop.read("shop.txt")
    optsched.solve(shop, "dispatch").schedule.write("plan.json")  # type: ignore[union-attr]
    shop.graph().write("graph.json")
    return Cli(tmp_path, monkeypatch, capsys)
