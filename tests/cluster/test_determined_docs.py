"""Everything docs/determined.md shows is run."""

from __future__ import annotations

import json
import re
import shlex
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from program import Cli

from optsched.cluster.determined import Task, document

ROOT = Path(__file__).parents[2]


def blocks(language: str) -> list[str]:
    """Fenced code blocks of one language."""
    text = (ROOT / "docs/determined.md").read_text()
    return re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)


def test_python_blocks_run() -> None:
    """In order, in one namespace; they assert what the page claims."""
    namespace: dict[str, object] = {}
    for block in blocks("python"):
        exec(compile(block, "docs/determined.md", "exec"), namespace)


def test_commands_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    """Every `$ optsched ...` line exits with 0."""
    shutil.copytree(ROOT / "instances", tmp_path / "instances")
    lines = [line[2:] for block in blocks("console") for line in block.splitlines()]
    monkeypatch.chdir(tmp_path)
    run = Cli(tmp_path, monkeypatch, capsys)
    assert len(lines) >= 6
    for line in lines:
        done = run(*shlex.split(line)[1:])
        assert done.code == 0, (line, done.err)


def test_documents_are_read() -> None:
    """The one in the page, and those of the instances."""
    (text,) = blocks("json")
    pools, _ = document.from_tree(json.loads(text), "page")
    assert pools[0].decide().release == ("old",)
    for path in (ROOT / "instances/determined").glob("*.json"):
        pools, _ = document.from_tree(json.loads(path.read_text()), str(path))
        assert pools[0].decide()


def test_the_example_prints_both_walks(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Steps of both variants."""
    monkeypatch.syspath_prepend(ROOT / "examples")
    import determined_walks

    determined_walks.main()
    out = capsys.readouterr().out
    assert out.count("running {'eight': 8}") == 2 and "variant docs" in out


def test_the_example_does_not_go_round_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two tasks that displace each other are told after some rounds."""
    monkeypatch.syspath_prepend(ROOT / "examples")
    from determined_walks import Cluster

    cluster = Cluster("code")
    tasks = (Task("a", 8, position=2), Task("b", 8, submitted=1))
    cluster.state = replace(cluster.state, tasks=tasks)
    with pytest.raises(RuntimeError, match="two: not settled after 100 rounds"):
        cluster.settle("two")
