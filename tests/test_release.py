"""The files of a release agree with each other."""

from __future__ import annotations

import re
import runpy
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from optsched.version import __version__

ROOT = Path(__file__).parent.parent


def test_notes_of_the_version_and_of_no_other() -> None:
    """Version, changelog and citation agree; an unknown tag is refused."""
    notes: Any = runpy.run_path(str(ROOT / ".ci" / "release.py"))["notes"]
    text = notes(f"v{__version__}")
    assert 100 < len(text.split()) < 700, "the highlights fill one page"
    with pytest.raises(SystemExit, match="no section"):
        notes("v0.0.0")


def test_conda_environment_has_all_dependencies() -> None:
    """The bounds of environment.yml are those of pyproject.toml; pip installs OR-Tools."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    conda = yaml.safe_load((ROOT / "environment.yml").read_text())["dependencies"]
    bounds = {re.split("[ >]", text)[0]: text.replace(" ", "") for text in conda[:-1]}
    for dependency in project["dependencies"]:
        name = dependency.split(">=")[0]
        assert name == "ortools" or bounds[name] == dependency


@pytest.mark.parametrize("path", sorted((ROOT / ".github").rglob("*.yml")), ids=lambda p: p.stem)
def test_commands_of_workflows_exist(path: Path) -> None:
    """Scripts, make targets and modules that a workflow runs are there."""
    text = path.read_text()
    yaml.safe_load(text)
    for script in re.findall(r"\.ci/[\w.]+", text):
        assert (ROOT / script).is_file()
    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(r"run: make (\S+)", text):
        assert target == ".venv/.ready" or re.search(rf"^{target}:", makefile, re.MULTILINE)
    for module in re.findall(r"-m (benchmarks[\w.]*)", text):
        assert (ROOT / (module.replace(".", "/") + ".py")).is_file()
