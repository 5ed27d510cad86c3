"""The files of a release agree with each other."""

from __future__ import annotations

import os
import re
import runpy
import subprocess
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


def test_the_source_distribution_has_what_the_tests_read() -> None:
    """Files of the root that a test names, and their folders."""
    build = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]
    shipped = {path[1:] for path in build["targets"]["sdist"]["include"]} | {"pyproject.toml"}
    texts = [path.read_text() for path in (ROOT / "tests").rglob("*.py")]
    named = {name for text in texts for name in re.findall(r'\bROOT / "([.\w-]+)', text)}
    there = {name for name in named if (ROOT / name).is_file()}
    assert {".containerignore", "Makefile"} <= there <= shipped


def test_hooks_accept_the_files_of_the_repository() -> None:
    """Pictures end lines with blanks, manifests have several documents, mypy runs before a push."""
    config = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())
    hooks = {hook["id"]: hook for repository in config["repos"] for hook in repository["hooks"]}
    stages = {stage for hook in hooks.values() for stage in hook.get("stages", ["pre-commit"])}
    assert stages == {*config["default_install_hook_types"]}
    left_out = re.compile(hooks["trailing-whitespace"]["exclude"])
    for path in (ROOT / "docs").rglob("*.*"):
        if path.suffix in (".md", ".svg") and not left_out.search(str(path.relative_to(ROOT))):
            assert not re.search("[ \t]$", path.read_text(), re.MULTILINE), path
    for path in (ROOT / "examples").rglob("*.yaml"):
        several = len([*yaml.safe_load_all(path.read_text())]) > 1
        assert not several or "--allow-multiple-documents" in hooks["check-yaml"]["args"]


PYTHON = """#!/bin/sh
case "$*" in
  "-m venv "*) mkdir -p "$3/bin" && cp "$0" "$3/bin/python" && cp "$0" "$3/bin/optsched";;
esac
case "${0##*/} $1 $3" in
  "optsched show -o") if test "$FAULT" = picture; then : > "$4"; else echo drawn > "$4"; fi;;
  "optsched arraypipe ") test "$FAULT" = hint || echo "pip install" >&2; exit 2;;
  "optsched verify ") test "$FAULT" = trace && echo Traceback >&2; test "$FAULT" = code || exit 2;;
esac
"""
"""Stands for Python and for the program, with one fault."""


@pytest.mark.parametrize("fault", ["", "picture", "hint", "trace", "code"])
def test_the_smoke_test_notices_faults(tmp_path: Path, fault: str) -> None:
    """An empty picture, no hint, a traceback or a wrong exit code ends it."""
    python = tmp_path / "python"
    python.write_text(PYTHON)
    python.chmod(0o755)
    (tmp_path / "a.whl").touch()
    env = os.environ | {"PYTHON": str(python), "WHEEL": str(tmp_path / "a.whl"), "FAULT": fault}
    done = subprocess.run(
        ["bash", ROOT / ".ci" / "smoke"], env=env, capture_output=True, text=True, check=False
    )
    assert (done.returncode != 0) == bool(fault), done.stderr
    assert ("smoke test passed" in done.stdout) == (not fault)
