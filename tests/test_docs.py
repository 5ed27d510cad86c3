"""Everything the documentation shows is run."""

from __future__ import annotations

import re
import shlex
import shutil
from pathlib import Path
from typing import Any

import pytest
from program import Cli

ROOT = Path(__file__).parent.parent
PAGES = [
    "README.md", "docs/quickstart.md", "docs/schedule-format.md", "docs/jobarray.md",
    "docs/solvers.md", "docs/branch-and-bound.md", "docs/choosing-gpus.md",
    "docs/choosing-gpus-how.md", "docs/quota.md",
    "docs/simulator.md", "docs/policies.md", "docs/traces.md",
    "docs/pytorch-csv.md", "docs/pipelines.md", "docs/single-job.md",
    "docs/rolling.md", "docs/arraypipe-study.md", "docs/serving.md",
    "docs/elastic.md", "docs/formats.md", "docs/determined.md", "docs/plan-arrays.md",
]  # fmt: skip


def blocks(page: str, language: str) -> list[str]:
    """Fenced code blocks of one language."""
    text = (ROOT / page).read_text()
    return re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)


def write_files(page: str) -> None:
    """Blocks that begin with the name of a file, such as ``# model.py``, are that file."""
    for block in blocks(page, "python") + blocks(page, "toml"):
        if name := re.match(r"# (\w+\.(py|toml))\n", block):
            Path(name[1]).write_text(block)


COMMANDS = (
    "choosing-gpus", "quota", "simulator", "pipelines", "serving", "elastic", "scale-out",
)  # fmt: skip
"""Pages whose commands take long."""


@pytest.mark.parametrize("page", PAGES)
def test_python_blocks_run(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In order, in one namespace, in a folder with the instances; with less time to solve."""
    shutil.copytree(ROOT / "instances", tmp_path / "instances")
    monkeypatch.chdir(tmp_path)
    write_files(page)
    namespace: dict[str, object] = {"__name__": "__main__"}
    for block in blocks(page, "python"):
        exec(compile(block.replace("time_limit=5", "time_limit=3"), page, "exec"), namespace)


@pytest.mark.parametrize(
    "page",
    [
        "README.md",
        "docs/quickstart.md",
        "docs/determined.md",
        "docs/command-line.md",
        *(pytest.param(f"docs/{name}.md", marks=pytest.mark.slow) for name in COMMANDS),
    ],
)
def test_optsched_commands_run(
    page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """Every `$ optsched ...` line exits with 0; with less time to solve than is shown."""
    shutil.copytree(ROOT / "instances", tmp_path / "instances")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("optsched.bench.run.missing_kernels", lambda tasks: [])
    write_files(page)
    run = Cli(tmp_path, monkeypatch, capsys)
    lines = [line for block in blocks(page, "console") for line in block.splitlines()]
    commands = [line[2:] for line in lines if line.startswith("$ optsched ")]
    assert commands
    for command in commands:
        words = shlex.split(command.replace("--time 5", "--time 1"), comments=True)[1:]
        done = run(*words)
        assert done.code == 0, (command, done.err)


def test_the_example_document_is_correct() -> None:
    """The document in the format's page reads and verifies."""
    import optsched
    from optsched.model.document import read

    (text,) = blocks("docs/schedule-format.md", "json")
    assert optsched.verify(read(text)) == []


def test_the_example_instances_are_solved(tmp_path: Path) -> None:
    """The documents in the page on job arrays can be read."""
    import optsched
    from optsched.formats.read_problem import read_problem

    for k, text in enumerate(blocks("docs/jobarray.md", "json")):
        path = tmp_path / f"{k}.json"
        path.write_text(text)
        assert optsched.solve(read_problem(path), time_limit=600).status == "optimal"


def test_links_lead_somewhere() -> None:
    """Relative links of all pages."""
    for page in [*(ROOT / "docs").rglob("*.md"), ROOT / "README.md"]:
        for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text()):
            assert (page.parent / target).exists(), (page, target)
