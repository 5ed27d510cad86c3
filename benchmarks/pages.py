"""Write the tables of the pages of results from the CSV files.

    python -m benchmarks.pages            write them
    python -m benchmarks.pages --check    exit with 1 if a page is not up to date

`benchmarks/tables.toml` defines the tables; one stands in a page between a comment that names it
and `<!-- end -->`. `head` and `row` are cells between bars: {metric} is the value of the row, {row}
its name, {unit} the unit of its first value. Text in brackets is left out where a metric is
missing, and a cell that lacks one is "–". The commands, date, commit and machine of the run follow
the table. `<!-- claims NAME -->` holds the claims of a source with their verdicts.
"""

from __future__ import annotations

import argparse
import csv
import io
import re
import sys
import tomllib
from functools import cache
from pathlib import Path
from typing import Any, Final

from benchmarks.evidence import Claim, claims, lines, newest
from optsched.io.files import write_atomic

ROOT: Final = Path(__file__).parent.parent
RESULTS: Final = Path(__file__).parent / "results"
PAGES: Final = ("docs/results/*.md", "docs/reference/papers.md")
BLOCK: Final = re.compile(r"(<!-- (table|claims) (.*?) -->\n)(.*?)(<!-- end -->)", re.DOTALL)
WIDTHS: Final = "40 12 12 36"


def main() -> int:
    """Write the pages, or list those that are not up to date."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="write nothing")
    check = parser.parse_args().check
    old = outdated()
    for path, text in old.items():
        print(f"{path.relative_to(ROOT)}: {'not up to date' if check else 'written'}")
        if not check:
            write_atomic(path, text)
    return int(check and bool(old))


def outdated() -> dict[Path, str]:
    """Return the pages that would change, with their new text."""
    paths = sorted(path for pattern in PAGES for path in ROOT.glob(pattern))
    texts = {path: path.read_text(encoding="utf-8") for path in paths}
    return {path: new for path, text in texts.items() if (new := filled(text)) != text}


def filled(text: str) -> str:
    """Return the text with every table generated anew."""

    def block(found: re.Match[str]) -> str:
        table = figures(found[3]) if found[2] == "table" else verdicts(found[3])
        return f"{found[1]}{table}\n{found[5]}"

    return BLOCK.sub(block, text)


def figures(name: str) -> str:
    """Return a table of figures, and the commands of their run."""
    table = tables()[name]
    file, _, benchmark = table["of"].partition("/")
    found, parts = values(file)[benchmark], cells(table["row"])
    shown = [cells(table["head"])]
    for row in table.get("rows", found):
        shown.append([cell(part, row, found[row]) for part in parts])
    return f"{directive(shown)}\n{origin(runs()[benchmark])}"


def directive(rows: list[list[str]], widths: str = "auto") -> str:
    """Return a table of MyST, the first line its header."""
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(rows)
    return f"```{{csv-table}}\n:header-rows: 1\n:widths: {widths}\n\n{text.getvalue()}```"


def cells(line: str) -> list[str]:
    """Return the parts of a line between bars."""
    return [part.strip() for part in line.split("|")]


def cell(template: str, row: str, metrics: dict[str, str]) -> str:
    """Fill in a template; "-" if it needs a metric that the row does not have."""
    known = {"row": row, **metrics}

    def fill(text: str) -> str | None:
        if any(name not in known for name in re.findall(r"\{(.*?)\}", text)):
            return None
        return re.sub(r"\{(.*?)\}", lambda name: known[name[1]], text)

    text = re.sub(r"\[(.*?)\]", lambda part: fill(part[1]) or "", template)
    return (fill(text) or "–").strip()


def origin(run: dict[str, str]) -> str:
    """Return commands, date, commit and machine of a run as a block."""
    commands = [f"$ {command}" for command in run["command"].split(" && ")]
    stamp = f"# {run['date']}, commit {run['commit']}: {run['machine']}"
    return "\n".join(["```text", *commands, stamp, "```"])


def verdicts(source: str) -> str:
    """Return a table of the claims of a source: published number, ours, verdict."""
    recorded, rows = newest(), [["claim", "published", "here", "verdict"]]
    rows += [
        judged(claim, recorded.get(claim.name)) for claim in claims() if claim.source == source
    ]
    return directive(rows, WIDTHS)


def judged(claim: Claim, row: dict[str, str] | None) -> list[str]:
    """Return the cells of a claim."""
    text = f"{claim.text} ({claim.where})" if claim.where else claim.text
    if row is None:
        reason = claim.reason if not claim.command else f"`--claim {claim.name}` runs it"
        return [text, claim.published or "–", "–", f"not tried: {reason}"]
    comment = {"refuted": claim.reason, "reproduced": ""}.get(row["verdict"], claim.assumptions)
    word = f"{row['verdict']}: {comment}" if comment else row["verdict"]
    value = float(row["number"])
    number = f"{f'{value:.3g}' if abs(value) < 100 else f'{value:,.0f}'} {claim.unit}".strip()
    return [text, claim.published or "–", number, f"{word} (`{claim.name}`, {row['date']})"]


@cache
def tables() -> dict[str, dict[str, Any]]:
    """Return the definitions of all tables."""
    return tomllib.loads((Path(__file__).parent / "tables.toml").read_text())


@cache
def values(file: str) -> dict[str, dict[str, dict[str, str]]]:
    """Return {benchmark: {row: {metric: value}}} of a CSV file."""
    found: dict[str, dict[str, dict[str, str]]] = {}
    for line in read(file):
        rows = found.setdefault(line["benchmark"], {})
        rows.setdefault(line["row"], {"unit": line["unit"]})[line["metric"]] = line["value"]
    return found


@cache
def runs() -> dict[str, dict[str, str]]:
    """Return {benchmark: its commands, date, commit, machine, note}."""
    return {line["benchmark"]: line for line in read("runs")}


def read(file: str) -> list[dict[str, str]]:
    """Return the lines of a CSV file of results."""
    return lines(RESULTS / f"{file}.csv")


if __name__ == "__main__":
    sys.exit(main())
