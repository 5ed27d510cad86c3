"""docs/executor-cli.md: its script makes a trainer, and the commands of its table are there."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from optsched.arraypipe import random_schedule

if TYPE_CHECKING:
    from program import Cli

PAGE = (Path(__file__).parents[2] / "docs" / "executor-cli.md").read_text(encoding="utf-8")


@pytest.mark.torch
def test_commands_on_the_page_run(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the order of the page (the demo has a test of its own), with fewer steps."""
    profile = pytest.importorskip("optsched.arraypipe.profile.measure")
    monkeypatch.setattr(profile, "PATIENCE", 0.0)
    (code,) = re.findall(r"```python\n(.*?)```", PAGE, re.S)
    Path("train.py").write_text(code)
    random_schedule([1, 1, 1], 2, seed=0).write("x.schedule.json")
    commands = re.findall(r"^\| `optsched (.*?)` \|", PAGE, re.M)
    assert len(commands) == 7
    for command in commands[:-1]:
        done = cli(*shlex.split(command.replace("1000", "3")))
        assert done.code == 0, (command, done.err)
