"""docs/executor-report.md: its commands print a report of the lines that the page shows."""

from __future__ import annotations

import re
import shlex
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from program import PATIENCE, PROGRAM

if TYPE_CHECKING:
    from program import Cli

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "executor-report.md").read_text(encoding="utf-8")
NUMBER = r"[-+]?[0-9][0-9.]*(e[-+][0-9]+)?( (s|ms|us|ns)\b|%|x)?"


def shape(text: str) -> list[str]:
    """Lines without numbers, which vary, nor columns, which are as wide as the numbers."""
    found = []
    for line in text.splitlines():
        words = " ".join(re.sub(NUMBER, "#", line).split())
        words = re.sub(r"(?<= )-(?= |$)", "#", words)  # not known
        found.append(re.sub(r"^[FRBU] of job", "block of job", words))
    return found


def example() -> str:
    """The report on the page."""
    (found,) = re.findall(r"```\n( +whole run .*?)```", PAGE, re.S)
    return str(found)


def test_the_example_adds_up() -> None:
    """Parts of every device are the time of the run, up to rounding to three digits."""
    sizes = {"s": 1e9, "ms": 1e6, "us": 1e3, "ns": 1.0}

    def times(line: str) -> list[float]:
        return [float(n) * sizes[unit] for n, unit in re.findall(r"([0-9.]+) (s|ms|us|ns)\b", line)]

    lines = example().splitlines()
    (wall,) = [times(line)[0] for line in lines if line.startswith("measured")]
    devices = [times(line) for line in lines if line.startswith("cpu")]
    assert len(devices) == 2
    for parts in devices:
        assert sum(parts[:5]) == pytest.approx(wall, rel=0.01)  # messages are among them


@pytest.mark.slow
@pytest.mark.torch
def test_the_commands_print_such_a_report(cli: Cli) -> None:
    """Line by line, but for the numbers; with fewer steps and a hasty solver."""
    pytest.importorskip("torch")
    Path("examples").symlink_to(ROOT / "examples")
    (block,) = re.findall(r"```console\n(.*?)```", PAGE, re.S)
    run, report = (shlex.split(line)[2:] for line in block.splitlines())
    run[run.index("--steps") + 1] = "8"
    done = subprocess.run(
        [*PROGRAM, *run, "--time-limit", "0.5", "--quiet"],
        capture_output=True, text=True, timeout=PATIENCE,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    told = cli(*report).out
    assert told in done.stdout
    assert shape(told[told.index("      whole run") :]) == shape(example())
