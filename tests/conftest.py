"""Fixtures of several test files."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # tests run side by side: threads would spin

import pytest
from hypothesis import settings
from program import SHOP, Cli

import optsched

settings.register_profile("optsched", deadline=None)  # other processes may be busy
settings.load_profile("optsched")


@pytest.fixture
def cli(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> Cli:
    """The program, run in an empty folder that has shop.txt, plan.json and graph.json."""
    monkeypatch.chdir(tmp_path)
    Path("shop.txt").write_text(SHOP)
    shop = optsched.JobShop.read("shop.txt")
    optsched.solve(shop, "dispatch").schedule.write("plan.json")  # type: ignore[union-attr]
    shop.graph().write("graph.json")
    return Cli(tmp_path, monkeypatch, capsys)
