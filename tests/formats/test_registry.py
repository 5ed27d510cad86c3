"""Formats that other packages add: the page's example, installed outside of the repository."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import optsched
from optsched.formats.registry import readers, writable

PAGE = (Path(__file__).parents[2] / "docs" / "orders" / "formats.md").read_text()


WORDS = "wordshop of saw, mill\nsaw for 3, mill for 2\nmill for 4, saw for 1\n"


def block(name: str) -> str:
    """The fenced block of the page that is a file of this name."""
    (text,) = re.findall(rf"```\w+\n(# {name}\n.*?)```", PAGE, re.DOTALL)
    return str(text)


def installed(folder: Path, points: str, module: str) -> dict[str, str]:
    """Variables of a process that sees a package with these entry points, as pip would place it."""
    info = folder / "site" / "wordshop-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: wordshop\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(points)
    (folder / "site" / "wordshop.py").write_text(module)
    ours = Path(optsched.__file__).parents[1]
    paths = [str(folder / "site"), str(ours), os.environ.get("PYTHONPATH", "")]
    return os.environ | {"PYTHONPATH": os.pathsep.join(paths)}


def run(folder: Path, environment: dict[str, str], *words: str) -> subprocess.CompletedProcess[str]:
    """``optsched`` in a process of its own, in that folder."""
    return subprocess.run(
        [sys.executable, "-c", "from optsched.cli import main; main()", *words],
        cwd=folder, env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip


def test_the_format_of_the_page_is_installed(tmp_path: Path) -> None:
    """One module and one line: read, told by its content, and written by its ending."""
    entries = tomllib.loads(block("pyproject.toml"))["project"]["entry-points"]["optsched.formats"]
    (points,) = (f"[optsched.formats]\n{name} = {value}\n" for name, value in entries.items())
    environment = installed(tmp_path, points, block("wordshop.py"))
    (tmp_path / "shop.words").write_text(WORDS)
    made = run(tmp_path, environment, "convert", "shop.words", "shop.jobshop.json")
    assert (made.returncode, made.stderr) == (0, ""), made
    shop = optsched.JobShop.read(tmp_path / "shop.jobshop.json")
    assert shop.machines == ("saw", "mill")
    assert shop.jobs == (((0, 3), (1, 2)), ((1, 4), (0, 1)))
    back = run(tmp_path, environment, "convert", "shop.jobshop.json", "again.words")
    assert back.stdout == "wrote again.words\n", back
    assert (tmp_path / "again.words").read_text() == WORDS
    (tmp_path / "bad.words").write_text("wordshop of saw\nsaw for ever\n")
    bad = run(tmp_path, environment, "show", "bad.words")
    assert bad.returncode == 2
    assert "bad.words:2: expected MACHINE for TIME, got 'saw for ever'" in bad.stderr
    late = optsched.JobShop([[(0, 1)]], time_unit="ms")
    late.write(tmp_path / "late.json")
    lost = run(tmp_path, environment, "convert", "late.json", "late.words")
    assert "late.words would lose its time unit (ms)" in lost.stderr
    published = run(tmp_path, environment, "convert", "ft06", "ft06.words")
    assert published.stdout == "wrote ft06.words\n", published
    unknown = run(tmp_path, environment, "convert", "late.json", "x.words", "--to", "x")
    assert "words" in unknown.stderr and "taillard" in unknown.stderr


def test_a_log_of_another_package(tmp_path: Path) -> None:
    """A reader of kind `trace` is one of `optsched cluster workload`, and none of `convert`."""
    module = (
        "from decimal import Decimal\n"
        "from optsched.formats.job_logs import Run\n"
        "from optsched.formats.registry import Reader\n"
        "def read(source):\n"
        "    for i, line in enumerate(source.text.split()[1:], 1):\n"
        "        gpus, seconds = map(Decimal, line.split('x'))\n"
        "        yield Run(f'{source.file}:{i}', f'j{i}', Decimal(i), Decimal(i), seconds, gpus)\n"
        "READER = Reader('mylog', lambda s: s.text.startswith('mylog'), read, kind='trace')\n"
    )
    environment = installed(tmp_path, "[optsched.formats]\nw = wordshop:READER\n", module)
    (tmp_path / "a.log").write_text("mylog\n2x60\n1x0\n")
    made = run(
        tmp_path, environment, "cluster", "workload", "a.log", "-o", "t.csv", "--zero", "keep"
    )
    assert (made.returncode, made.stdout) == (0, "mylog: 2 of 2 jobs\nwrote t.csv\n"), made
    rows = (tmp_path / "t.csv").read_text().splitlines()[1:]
    assert rows == ["0,j1,2,60,,", "1,j2,1,1,,"]
    other = run(tmp_path, environment, "convert", "a.log", "x.json", "--from", "mylog")
    assert other.returncode == 2 and "from: expected one of" in other.stderr


@pytest.mark.parametrize(
    ("module", "message"),
    [
        ("READER = 3\n", "entry point words of optsched.formats: wordshop:READER is not a Reader"),
        (
            "from optsched.formats.standard import READER\n",
            "entry points of optsched.formats: two formats are called 'standard'",
        ),
    ],
)
def test_a_wrong_package_is_named(tmp_path: Path, module: str, message: str) -> None:
    """One sentence that says whose entry point it is."""
    points = "[optsched.formats]\nwords = wordshop:READER\n"
    environment = installed(tmp_path, points, module)
    (tmp_path / "a.txt").write_text("1 1\n0 1\n")
    done = run(tmp_path, environment, "convert", "a.txt", "b.json")
    assert done.returncode == 2 and message in done.stderr


def test_ours_are_listed() -> None:
    """The table of the page names all formats, and which can be written."""
    rows = re.findall(r"^\| `(\w+)` \|.*\| (yes|no).*\|$", PAGE, re.MULTILINE)
    ours = {name: name in writable() for name in readers()}
    assert {name: said == "yes" for name, said in rows} == ours
