"""Run the command of every claim, of five papers and of ours, and record a verdict.

    python -m benchmarks.evidence --list
    python -m benchmarks.evidence [--claim NAME ...] [--quick] [--keep] [--dirty] [--data DIR]
        [--peers DIR]

The claims are in `benchmarks/claims.toml`. A claim has one number; `read` is the regular expression
that finds it in the output of the command (two groups: their ratio; of several matches the last,
or the one that `pick` names). Inside `accept` the verdict is "reproduced", or "under these
assumptions" if the claim has some, outside "refuted"; a claim without a command is not tried.

Results go to `benchmarks/results/evidence.csv`, row by row, and to the tables that `claims.toml`
lists as figures; `python -m benchmarks.pages` then writes the pages. A claim that has a row of this
commit (with `--keep`: of any) is not run again, and a command that several claims share runs once.
A checkout with changes is refused; with `--dirty` its rows name the commit and "+", and the next
call runs them again. If the checkout changes while a command runs, nothing is recorded of it.
Outputs stay in `out/evidence/`. DIR of `--data` has the folders arraypipe, bandpilot, jssp,
traces of published data, DIR of `--peers` the environments of other libraries; claims that need a
folder which is not given are left out. The exit code is 1 if a command fails or prints no number,
or if the checkout changes.
"""

from __future__ import annotations

import argparse
import csv
import io
import os
import platform
import re
import shlex
import statistics
import subprocess
import sys
import time
import tomllib
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec

from benchmarks.machine import hardware
from optsched.io.files import write_atomic

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

ROOT: Final = Path(__file__).parent.parent
CLAIMS: Final = Path(__file__).parent / "claims.toml"
EVIDENCE: Final = Path(__file__).parent / "results" / "evidence.csv"
COLUMNS: Final = (
    "claim", "number", "verdict", "seconds", "commit", "date", "machine", "versions",
)  # fmt: skip
PICKS: Final = {
    "last": lambda found: found[-1], "first": lambda found: found[0], "least": min, "most": max,
    "mean": statistics.mean, "sum": sum, "count": len,
}  # fmt: skip


class Claim(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A sentence with a number, how to find the number, and when it confirms the sentence."""

    name: str
    source: str
    text: str
    where: str = ""
    """Table, figure or section of the source."""
    published: str = ""
    """What the source states; "not available" if we do not have it."""
    unit: str = ""
    command: str = ""
    """Parts between "&&" run one after the other; {data} and {peers} stand for the folders."""
    read: str = ""
    pick: str = "last"
    accept: tuple[float, float] = (0.0, 0.0)
    assumptions: str = ""
    """What the number holds under, other than what the source states."""
    reason: str = ""
    """Why the claim is not tried, or what a refuted one means."""
    quick: bool = False
    minutes: float = 0.0
    """About how long the command takes on two cores."""


class Figures(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Rows of a table of results that the output of a claim's command holds."""

    claim: str
    of: str
    """File and benchmark: gpus/large."""
    line: str
    """Regular expression with named groups, a match a row."""
    row: str
    metrics: dict[str, str]
    """Metric and value; these and `row` name groups of the line in braces."""
    names: dict[str, str] = {}
    """What stands in the table instead of the text of a group."""


def main(given: Sequence[str] | None = None) -> int:
    """List claims, or run and record them."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--list", action="store_true", help="list the claims and their verdicts")
    parser.add_argument("--claim", nargs="+", metavar="NAME", help="these claims only")
    parser.add_argument("--quick", action="store_true", help="claims that take seconds only")
    parser.add_argument("--keep", action="store_true", help="keep results of other commits")
    parser.add_argument("--dirty", action="store_true", help="record in spite of changed files")
    parser.add_argument("--data", type=Path, default=os.environ.get("OPTSCHED_DATA"))
    parser.add_argument("--peers", type=Path, default=os.environ.get("OPTSCHED_PEERS"))
    options = parser.parse_args(given)
    known = {claim.name: claim for claim in claims()}
    if missing := [name for name in options.claim or () if name not in known]:
        parser.error(f"--claim: no claim {missing[0]!r}; --list names them")
    chosen = [known[name] for name in options.claim] if options.claim else list(known.values())
    if options.quick:
        chosen = [claim for claim in chosen if claim.quick]
    if options.list:
        show(chosen)
        return 0
    if state_of_the_checkout().endswith("+") and not options.dirty:
        parser.error("the checkout has changes: commit them, or record them with --dirty")
    folders = {"data": options.data, "peers": options.peers}
    return run(chosen, folders, keep=options.keep)


def claims(path: Path = CLAIMS) -> list[Claim]:
    """Return the claims of a file, checked."""
    found = msgspec.convert(tomllib.loads(path.read_text())["claim"], list[Claim])
    for claim in found:
        if bool(claim.command) != bool(claim.read) or not (claim.command or claim.reason):
            raise ValueError(f"{claim.name}: expected a command with read, or a reason")
        if claim.pick not in PICKS or claim.accept[0] > claim.accept[1]:
            raise ValueError(f"{claim.name}: expected pick of {[*PICKS]} and accept [low, high]")
    if len({claim.name for claim in found}) < len(found):
        raise ValueError(f"{path}: names of claims repeat")
    return found


def tables(path: Path = CLAIMS) -> list[Figures]:
    """Return what outputs of commands fill in."""
    return msgspec.convert(tomllib.loads(path.read_text()).get("figures", []), list[Figures])


def newest(path: Path = EVIDENCE) -> dict[str, dict[str, str]]:
    """Return the recorded row of every claim."""
    return {row["claim"]: row for row in lines(path)} if path.exists() else {}


def lines(path: Path) -> list[dict[str, str]]:
    """Return the rows of a CSV file by column."""
    with path.open(newline="", encoding="utf-8") as text:
        return list(csv.DictReader(text))


def write_lines(rows: Sequence[dict[str, str]], path: Path) -> None:
    """Replace a CSV file, whole or not at all."""
    text = io.StringIO()
    table = csv.DictWriter(text, list(rows[0]), lineterminator="\n")
    table.writeheader()
    table.writerows(rows)
    write_atomic(path, text.getvalue())


def run(
    chosen: Iterable[Claim],
    folders: dict[str, Path | None],
    *,
    keep: bool = False,
    path: Path = EVIDENCE,
    outputs: Path = ROOT / "out" / "evidence",
) -> int:
    """Run the commands of claims without a result and record verdicts; 1 if one failed."""
    first, failed = state_of_the_checkout(), 0
    rows, same = newest(path), None if first.endswith("+") else first  # changes may differ
    by_command: dict[str, list[Claim]] = {}
    for claim in chosen:
        known = rows.get(claim.name)
        if claim.command and not (known and (keep or known["commit"] == same)):
            by_command.setdefault(claim.command, []).append(claim)
    for command, of in by_command.items():
        names = ", ".join(claim.name for claim in of)
        if absent := [name for name, at in folders.items() if f"{{{name}}}" in command and not at]:
            print(f"{names}: needs --{absent[0]}")
            continue
        commit = state_of_the_checkout()
        if commit.endswith("+") and same:
            print(f"{names}: not run, the checkout was {first} and is {commit}", flush=True)
            failed = 1
            continue
        print(f"{names}: {command}", flush=True)
        outputs.mkdir(parents=True, exist_ok=True)  # commands write there too
        begin = time.perf_counter()
        text, code = output(command, folders)
        seconds = time.perf_counter() - begin
        (outputs / f"{of[0].name}.txt").write_text(text)
        if (after := state_of_the_checkout()) != commit:
            print(f"{names}: not recorded, the checkout was {commit} and is {after}", flush=True)
            failed = 1
            continue
        for figures in tables():
            if not code and path == EVIDENCE and figures.claim in {claim.name for claim in of}:
                record(figures, text, command, commit)
        for claim in of:
            number = None if code else read(claim, text)
            if number is None:
                print(
                    f"{claim.name}: {f'exit code {code}' if code else 'no number'}\n{text[-500:]}"
                )
                failed = 1
                continue
            rows = newest(path) | {claim.name: row(claim, number, seconds, commit)}
            write_lines([rows[name] for name in sorted(rows)], path)
            print(f"{claim.name}: {rows[claim.name]['number']} {claim.unit}, "
                  f"{rows[claim.name]['verdict']}", flush=True)  # fmt: skip
    return failed


def record(
    figures: Figures, text: str, command: str, commit: str, folder: Path = EVIDENCE.parent
) -> bool:
    """Replace the figures of a benchmark, all of them or none, and the date of its run."""
    file, _, benchmark = figures.of.partition("/")
    rows, runs = (lines(folder / f"{name}.csv") for name in (file, "runs"))
    found = {}
    for match in re.finditer(figures.line, text, re.MULTILINE):
        groups = {key: figures.names.get(value, value) for key, value in match.groupdict().items()}
        for metric, value in figures.metrics.items():
            key = figures.row.format(**groups), metric.format(**groups)
            found[key] = f"{float(value.format(**groups)):.6g}"
    own = [row for row in rows if row["benchmark"] == benchmark]
    if missing := [row for row in own if (row["row"], row["metric"]) not in found]:
        print(f"{figures.of}: not recorded, the output has no {missing[0]['row']}, "
              f"{missing[0]['metric']}")  # fmt: skip
        return False
    for row in own:
        row["value"] = found[row["row"], row["metric"]]
    stamp = {
        "command": command.format(data="DATA", peers="PEERS", commit="COMMIT"), "commit": commit,
        "date": datetime.now(UTC).date().isoformat(),
        "machine": f"{hardware()}, Python {platform.python_version()}",
    }  # fmt: skip
    next(run for run in runs if run["benchmark"] == benchmark).update(stamp)
    for name, content in ((file, rows), ("runs", runs)):
        write_lines(content, folder / f"{name}.csv")
    print(f"{figures.of}: {len(own)} figures")
    return True


def output(command: str, folders: dict[str, Path | None]) -> tuple[str, int]:
    """Run a command in the root of the checkout; return what it prints and its exit code."""
    path = os.pathsep.join([str(ROOT), str(ROOT / "solvers"), os.environ.get("PYTHONPATH", "")])
    text = ""
    for part in command.format(commit=state_of_the_checkout(), **folders).split(" && "):
        words = shlex.split(part)
        known = {"python": [], "pytest": ["-m", "pytest"],
                 "optsched": ["-c", "from optsched.cli import main; main()"]}  # fmt: skip
        if words[0] in known:
            words = [sys.executable, *known[words[0]], *words[1:]]
        done = subprocess.run(
            words, cwd=ROOT, env={**os.environ, "PYTHONPATH": path}, check=False, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        text += done.stdout
        if done.returncode:
            return text, done.returncode
    return text, 0


def read(claim: Claim, text: str) -> float | None:
    """Find the number of a claim in an output; None if a match is no number, or there is none."""
    found = []
    for match in re.finditer(claim.read, text, re.MULTILINE):
        try:
            parts = [float(part.replace(",", "")) for part in match.groups() if part is not None]
            found.append(parts[0] / parts[1] if len(parts) > 1 else (parts or [0.0])[0])
        except (ValueError, ZeroDivisionError):
            return None
    return float(PICKS[claim.pick](found)) if found else None


def verdict(claim: Claim, number: float) -> str:
    """Judge a number."""
    if not claim.accept[0] <= number <= claim.accept[1]:
        return "refuted"
    return "under these assumptions" if claim.assumptions else "reproduced"


def row(claim: Claim, number: float, seconds: float, commit: str) -> dict[str, str]:
    """Return a line of the results."""
    packages = ("optsched", "numpy", "numba", "ortools")
    versions = " ".join(f"{name} {version(name)}" for name in packages)
    values = (
        claim.name, f"{number:.6g}", verdict(claim, number), f"{seconds:.1f}", commit,
        datetime.now(UTC).date().isoformat(), hardware(),
        f"Python {platform.python_version()} {versions}",
    )  # fmt: skip
    return dict(zip(COLUMNS, values, strict=True))


def state_of_the_checkout() -> str:
    """Return the commit, with a + if files other than results and pages differ."""

    def git(*words: str) -> str:
        done = subprocess.run(
            ["git", *words], cwd=ROOT, capture_output=True, text=True, check=False
        )
        return done.stdout.strip()

    other = (":!benchmarks/results", ":!docs")
    changed = git("status", "--porcelain", "--untracked-files=no", "--", ".", *other)
    return (git("rev-parse", "--short=8", "HEAD") or "unknown") + "+" * bool(changed)


def show(chosen: Iterable[Claim]) -> None:
    """Print a line a claim."""
    rows = newest()
    for claim in chosen:
        known = rows.get(claim.name)
        told = (
            "not tried" if known is None else f"{known['number']} {claim.unit}: {known['verdict']}"
        )
        stamp = f"{known['date']} {known['commit']}" if known else ""
        time_taken = f"about {claim.minutes:g} min" if claim.command else "no command"
        print(f"{claim.source:10} {claim.name:32} {time_taken:14} {told:44} {stamp}")


if __name__ == "__main__":
    sys.exit(main())
