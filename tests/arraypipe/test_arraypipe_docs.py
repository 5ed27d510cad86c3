"""The code on the executor's pages runs, block after block, and prints what the pages say."""

from __future__ import annotations

import re
import warnings
from pathlib import Path
from typing import Any

import pytest

DOCS = Path(__file__).parents[2] / "docs"
PAGES = {
    "executor": 6, "executor-advise": 2, "executor-life": 6, "executor-memory": 2,
    "executor-models": 3, "executor-profile": 4, "executor-report": 2, "executor-sweeps": 4,
}  # fmt: skip


@pytest.mark.parametrize("page", PAGES)
def test_code_on_the_page_runs(
    page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every python block runs in one namespace; a following text block is its output."""
    pytest.importorskip("torch")
    if page == "executor-sweeps":
        pytest.importorskip("optuna")
    monkeypatch.chdir(tmp_path)
    Path("instances").symlink_to(DOCS.parent / "instances")
    path = DOCS / f"{page}.md"
    blocks = re.findall(r"```(python|text)\n(.*?)```", path.read_text(encoding="utf-8"), re.S)
    assert sum(language == "python" for language, _ in blocks) >= PAGES[page]
    namespace: dict[str, Any] = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a busy machine, by a profile
        for language, code in blocks:
            if language == "python":
                capsys.readouterr()
                exec(compile(code, str(path), "exec"), namespace)
            else:
                assert capsys.readouterr().out == code
