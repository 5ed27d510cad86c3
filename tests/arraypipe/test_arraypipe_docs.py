"""The executor's pages: their code runs and prints what they say, and so do their commands."""

from __future__ import annotations

import re
import shlex
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from optsched.arraypipe import random_schedule

if TYPE_CHECKING:
    from program import Cli

ROOT = Path(__file__).parents[2]
PAGES = {
    "executor-batches": 4,
    "executor": 6, "executor-life": 6, "executor-memory": 1,
    "executor-models": 3, "executor-profile": 3, "executor-report": 2, "executor-sweeps": 2,
}  # fmt: skip


def text_of(page: str) -> str:
    """A page."""
    return (ROOT / "docs" / f"{page}.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("page", PAGES)
def test_code_on_the_page_runs(
    page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every python block runs in one namespace; a following text block is its output."""
    pytest.importorskip("torch")
    if page == "executor-sweeps":
        pytest.importorskip("optuna")
    if page == "executor-models":
        pytest.importorskip("transformers")
    monkeypatch.chdir(tmp_path)
    Path("instances").symlink_to(ROOT / "instances")
    blocks = re.findall(r"```(python|text)\n(.*?)```", text_of(page), re.S)
    assert sum(language == "python" for language, _ in blocks) >= PAGES[page]
    namespace: dict[str, Any] = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a busy machine, by a profile
        for language, code in blocks:
            if language == "python":
                capsys.readouterr()
                exec(compile(code, page, "exec"), namespace)
            else:
                assert capsys.readouterr().out == code


@pytest.mark.torch
def test_commands_on_the_page_run(cli: Cli) -> None:
    """In the order of the page (the demo has a test of its own), with fewer steps."""
    (code,) = re.findall(r"```python\n(.*?)```", text_of("executor-cli"), re.S)
    Path("train.py").write_text(code)
    random_schedule([1, 1, 1], 2, seed=0).write("x.schedule.json")
    commands = re.findall(r"^\| `optsched (.*?)` \|", text_of("executor-cli"), re.M)
    assert len(commands) == 7
    for command in commands[:-1]:
        done = cli(*shlex.split(command.replace("1000", "3")))
        assert done.code == 0, (command, done.err)
