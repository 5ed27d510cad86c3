"""Claims are run once, recorded one by one and judged by their range; pages are up to date."""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT)]

from benchmarks import evidence, pages  # noqa: E402
from benchmarks.evidence import Claim  # noqa: E402

COUNTER = """
import pathlib, sys
at = pathlib.Path(sys.argv[1])
at.write_text(at.read_text() + "x" if at.exists() else "x")
print("ratio 3.0 of 2.0")
print("slowest 1,250 ms")
"""


@pytest.fixture
def counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[str, Path]:
    """Return a command that counts its runs, and the file in which it does; nothing is changed."""
    monkeypatch.setattr(evidence, "state_of_the_checkout", lambda: "one")
    script = tmp_path / "count.py"
    script.write_text(COUNTER)
    return f"python {script} {tmp_path / 'runs'}", tmp_path / "runs"


def run(claims: list[Claim], folder: Path, **options: bool) -> int:
    """Run claims with a file of results of their own."""
    return evidence.run(
        claims, {"data": None}, path=folder / "evidence.csv", outputs=folder / "out", **options
    )


def made(command: str) -> list[Claim]:
    """Return two claims of one command."""
    common = {"source": "ours", "text": "t", "command": command}
    return [
        Claim(name="ratio", read=r"ratio ([\d.]+) of ([\d.]+)", accept=(1, 2), **common),
        Claim(name="slow", read=r"slowest ([\d,]+)", accept=(0, 1000), **common),
    ]


def test_a_command_runs_once_and_its_numbers_are_judged(
    tmp_path: Path, counted: tuple[str, Path]
) -> None:
    """Two claims share it; a second call finds both recorded."""
    command, runs = counted
    assert run(made(command), tmp_path) == 0
    rows = evidence.newest(tmp_path / "evidence.csv")
    assert (rows["ratio"]["number"], rows["ratio"]["verdict"]) == ("1.5", "reproduced")
    assert (rows["slow"]["number"], rows["slow"]["verdict"]) == ("1250", "refuted")
    assert rows["slow"]["versions"].startswith("Python ") and rows["slow"]["machine"]
    assert run(made(command), tmp_path) == 0
    assert runs.read_text() == "x"


def test_other_commits_are_measured_again_unless_kept(
    tmp_path: Path, counted: tuple[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The row of the former commit is replaced."""
    command, runs = counted
    for commit, keep, times in (("one", False, 1), ("two", True, 1), ("two", False, 2)):
        monkeypatch.setattr(evidence, "state_of_the_checkout", lambda commit=commit: commit)
        assert run(made(command), tmp_path, keep=keep) == 0
        assert len(runs.read_text()) == times
    assert evidence.newest(tmp_path / "evidence.csv")["ratio"]["commit"] == "two"


def test_changed_files_are_refused_and_never_the_same_state(
    tmp_path: Path, counted: tuple[str, Path], monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """Two states with changes differ, although both have the commit in their rows."""
    command, runs = counted
    monkeypatch.setattr(evidence, "state_of_the_checkout", lambda: "one+")
    for times in (1, 2):
        assert run(made(command), tmp_path) == 0
        assert len(runs.read_text()) == times
    assert evidence.newest(tmp_path / "evidence.csv")["ratio"]["commit"] == "one+"
    with pytest.raises(SystemExit, match="2"):
        evidence.main(["--claim", "gpus-latency"])
    assert "the checkout has changes" in capsys.readouterr().err


def test_a_checkout_that_changes_meanwhile_is_not_recorded(
    tmp_path: Path, counted: tuple[str, Path], monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """The numbers are of neither state; with uncommitted files no further command runs."""
    command, runs = counted
    later = "two"
    monkeypatch.setattr(
        evidence, "state_of_the_checkout", lambda: later if runs.exists() else "one"
    )
    assert run(made(command), tmp_path) == 1
    assert "not recorded, the checkout was one and is two" in capsys.readouterr().out
    runs.unlink()
    later = "one+"
    other = Claim(
        name="other", source="ours", text="t", command=f"{command} x", read="ratio (.*) of"
    )
    assert run([*made(command), other], tmp_path) == 1
    assert "other: not run, the checkout was one and is one+" in capsys.readouterr().out
    assert not (tmp_path / "evidence.csv").exists() and runs.read_text() == "x"


def test_a_failing_command_loses_nothing(tmp_path: Path, counted: tuple[str, Path]) -> None:
    """What was recorded stays; the failed claim has no row and the exit code is 1."""
    claims = made(counted[0])
    common = {"source": "ours", "text": "t"}
    failing = Claim(name="fails", command="python -c 'exit(3)'", read="(1)", **common)
    silent = Claim(name="silent", command="python -c 'print(1)'", read="ratio (.*)", **common)
    assert run([claims[0], failing, silent], tmp_path) == 1
    assert [*evidence.newest(tmp_path / "evidence.csv")] == ["ratio"]


def test_a_claim_without_its_folder_is_left_out(tmp_path: Path) -> None:
    """Neither run nor recorded, and no failure."""
    claim = Claim(name="c", source="ours", text="t", command="python {data}/x.py", read="(1)")
    assert run([claim], tmp_path) == 0 and not (tmp_path / "evidence.csv").exists()


def test_assumptions_change_the_word() -> None:
    """Inside the range; outside it is refuted anyway."""
    claim = Claim(name="c", source="ours", text="t", accept=(1, 2), assumptions="a model")
    assert evidence.verdict(claim, 1.5) == "under these assumptions"
    assert evidence.verdict(claim, 2.5) == "refuted"


@pytest.mark.parametrize(
    ("pick", "found"), [("last", 3), ("first", 5), ("least", 1), ("most", 5), ("count", 3)]
)
def test_several_matches(pick: str, found: float) -> None:
    """The rule says which of them is the number."""
    claim = Claim(name="c", source="ours", text="t", read=r"^(\d)$", pick=pick)
    assert evidence.read(claim, "5\n1\n3\n") == found
    assert evidence.read(claim, "none") is None
    ratio = Claim(name="c", source="ours", text="t", read=r"(\S+) of (\S+)", pick=pick)
    assert evidence.read(ratio, "1 of 2\n1 of 0\n") is None
    assert evidence.read(ratio, "1 of 2\n1.2.3 of 2\n") is None


@pytest.mark.parametrize(
    "text",
    [
        'name = "a"\ncommand = "x"',  # nothing to read
        'name = "a"',  # neither command nor reason
        'name = "a"\nreason = "r"\naccept = [2, 1]',
        'name = "a"\nreason = "r"\npick = "best"',
    ],
)
def test_wrong_claims_are_refused(text: str, tmp_path: Path) -> None:
    """By their name."""
    file = tmp_path / "claims.toml"
    file.write_text(f'[[claim]]\nsource = "ours"\ntext = "t"\n{text}\n')
    with pytest.raises(ValueError, match="a: expected"):
        evidence.claims(file)


def test_the_claims_of_the_repository() -> None:
    """They are read, and every row of results belongs to one and has its verdict."""
    known = {claim.name: claim for claim in evidence.claims()}
    for name, row in evidence.newest().items():
        assert row["verdict"] == evidence.verdict(known[name], float(row["number"])), name


def test_commands_exist() -> None:
    """Modules, scripts and tests that claims and runs name are there; claims read a number."""
    commands = [claim.command for claim in evidence.claims() if claim.command]
    commands += [run["command"] for run in pages.runs().values()]
    for part in (part for command in commands for part in command.split(" && ")):
        for module in re.findall(r"python -m (benchmarks[\w.]*)", part):
            assert (ROOT / (module.replace(".", "/") + ".py")).is_file(), part
        for file in re.findall(r"(?<!\S)\w[\w/]*\.py", part):
            assert (ROOT / file).is_file(), part
    for claim in evidence.claims():
        assert re.compile(claim.read).groups or claim.pick == "count" or not claim.command, claim


FIGURES = evidence.Figures(
    claim="c", of="gpus/large", line=r"^(?P<kind>flat|levels) +(?P<ms>[\d.]+)", row="{kind}",
    metrics={"median": "{ms}"}, names={"levels": "two levels"},
)  # fmt: skip


@pytest.fixture
def results(tmp_path: Path) -> Path:
    """Return a folder with two benchmarks of one file."""
    (tmp_path / "gpus.csv").write_text(
        "benchmark,row,metric,value,unit\nlarge,flat,median,1.0,ms\n"
        "large,two levels,median,2.0,ms\nother,flat,median,3.0,ms\n"
    )
    (tmp_path / "runs.csv").write_text(
        "benchmark,command,date,commit,machine,note\nlarge,old,2000-01-01,a,m,n\n"
        "other,old,2000-01-01,a,m,n\n"
    )
    return tmp_path


def test_an_output_fills_its_table(results: Path) -> None:
    """Values, command and commit of the benchmark change, nothing else does."""
    text = "kind  ms\nflat   4.5\nlevels 5.50\n"
    command = "python x.py {data}/b"
    assert evidence.record(FIGURES, text, command, "new", results)
    values = [row["value"] for row in evidence.lines(results / "gpus.csv")]
    assert values == ["4.5", "5.5", "3.0"]
    large, other = evidence.lines(results / "runs.csv")
    assert (large["commit"], large["command"]) == ("new", "python x.py DATA/b")
    assert other["commit"] == "a" and large["note"] == "n"


def test_an_output_that_lacks_a_row_changes_nothing(results: Path) -> None:
    """A table never has figures of two runs."""
    before = (results / "gpus.csv").read_text()
    assert not evidence.record(FIGURES, "flat 4.5\n", "x", "new", results)
    assert (results / "gpus.csv").read_text() == before
    assert "new" not in (results / "runs.csv").read_text()


def test_figures_of_the_repository_name_claims_and_benchmarks() -> None:
    """Each belongs to a claim with a command and to a benchmark that is there."""
    known = {claim.name for claim in evidence.claims() if claim.command}
    for figures in evidence.tables():
        file, _, benchmark = figures.of.partition("/")
        assert figures.claim in known and benchmark in pages.values(file)


def test_pages_are_up_to_date() -> None:
    """`python -m benchmarks.pages` writes them."""
    assert not pages.outdated()


def test_pictures_are_up_to_date() -> None:
    """`python -m benchmarks.plots` draws them: every value is a text of the picture."""
    plots = tomllib.loads((ROOT / "benchmarks" / "plots.toml").read_text())
    assert {path.stem for path in (ROOT / "docs/results/images").iterdir()} == plots.keys()
    for name, plot in plots.items():
        texts = re.findall(r">([^<\n]+)<", (ROOT / f"docs/results/images/{name}.svg").read_text())
        rows: dict[str, dict[str, str]] = {}
        for of in plot["of"]:
            file, _, benchmark = of.partition("/")
            rows |= pages.values(file)[benchmark]
        for row in plot.get("rows", rows):
            for metric in plot["metrics"]:
                assert f"{float(rows[row][metric]):g}" in texts, (name, row, metric)


def test_every_benchmark_has_its_command_and_every_metric_one_value() -> None:
    """Files of results, and runs.csv."""
    assert [*pages.runs()]
    for path in pages.RESULTS.glob("*.csv"):
        if path.stem in ("runs", "evidence"):
            continue
        lines = pages.read(path.stem)
        keys = {(line["benchmark"], line["row"], line["metric"]) for line in lines}
        assert len(keys) == len(lines), path.name
        assert {line["benchmark"] for line in lines} <= pages.runs().keys()


def test_cells() -> None:
    """Missing metrics: a part in brackets is left out, else the cell is a dash."""
    metrics = {"mean": "3.1", "worst": "9"}
    assert pages.cell("{row}: {mean} s[ ± {half}]", "a", metrics) == "a: 3.1 s"
    assert pages.cell("{mean}[ ± {worst}]", "a", metrics) == "3.1 ± 9"
    assert pages.cell("{half} s", "a", metrics) == "–"
