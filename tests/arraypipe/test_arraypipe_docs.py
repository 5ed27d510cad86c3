"""The code blocks of docs/executor.md run, one after the other, and say what the page says."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "executor.md"


def test_code_on_the_page_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every python block runs in one namespace; a following text block is its output."""
    pytest.importorskip("torch")
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"```(python|text)\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.S)
    assert sum(language == "python" for language, _ in blocks) >= 4
    namespace: dict[str, Any] = {}
    for language, code in blocks:
        if language == "python":
            capsys.readouterr()
            exec(compile(code, str(PAGE), "exec"), namespace)
        else:
            assert capsys.readouterr().out == code
