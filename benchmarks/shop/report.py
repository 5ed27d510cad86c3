"""Tables of a results file: those of `optsched bench`, and objectives by instance."""

from __future__ import annotations

import csv
import json
from statistics import fmean
from typing import TYPE_CHECKING

from rich.console import Console

from benchmarks.shop.engines import RAW_CPSAT
from benchmarks.shop.instances import OPTIMA
from optsched.bench.summary import grouped, labels, summarise
from optsched.bench.table import render

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from optsched.bench.instances import Known
    from optsched.bench.rows import Row
    from optsched.bench.summary import Reference, Summary

BEST_OF_RAW = "cpsat-raw, best of 4"
"""Solver of the rows made of the best raw CP-SAT setting for every instance and seed."""


def show(rows: Sequence[Row], known: Mapping[str, Known]) -> bool:
    """Print all tables; whether nothing in the file is wrong."""
    rows = [*rows, *best_of_raw(rows)]
    summary = summarise(rows, known)
    for text in sorted({f"{row.machine}; {row.versions}" for row in rows}):
        print(text)
    render(summary, Console(width=200))
    print("\n".join(details(rows, summary.references)))
    print("\n".join(overall(rows, summary)))
    return not (summary.contradictions or summary.errors)


def overall(rows: Sequence[Row], summary: Summary) -> list[str]:
    """Return one line a solver: proofs, gaps to the best known value and to its own bound."""
    label, lines = labels(rows), []
    for mean in summary.means[-len(summary.configurations) :]:
        own = [
            row.objective / row.lower_bound - 1
            for row in rows
            if label[row.key] == mean.configuration and row.objective and row.lower_bound
        ]
        if own and mean.gap is not None and mean.worst_gap is not None:
            lines.append(
                f"overall {mean.configuration}: {mean.proved} of {mean.runs} proved, "
                f"gap mean {mean.gap:.2%} worst {mean.worst_gap:.2%}, "
                f"of the bounds {mean.bound_gap or 0.0:.2%}, "
                f"to its bound mean {fmean(own):.2%} worst {max(own):.2%}"
            )
    return lines


def logs(path: Path) -> None:
    """Print what the authors' logs of a genetic algorithm end with, beside proved optima."""
    with path.open(newline="", encoding="utf-8") as lines:
        for row in csv.DictReader(lines):
            if best := OPTIMA.get(row["instance"]):
                last = float(row["final_best"])
                print(f"{row['instance']}: {last:.0f}, optimum {best}, +{last / best - 1:.2%}")


def best_of_raw(rows: Sequence[Row]) -> list[Row]:
    """A row for every instance and seed: best values of the settings of raw CP-SAT that count."""
    raw = [row for row in rows if row.solver in RAW_CPSAT and not row.error]
    found = []
    for there in grouped(raw, lambda row: (row.sha256, row.seed, row.time_limit)).values():
        values = [row.objective for row in there if row.objective is not None]
        objective = min(values, default=None)
        bound = max((row.lower_bound for row in there if row.lower_bound is not None), default=None)
        steps = sorted(
            (step for row in there for step in row.steps if step[1] is not None),
            key=lambda step: step[0],
        )
        proofs = [row.time_to_proof for row in there if row.time_to_proof is not None]
        firsts = [at for at, value, _ in steps if value == objective]
        found.append(there[0]._replace(
            solver=BEST_OF_RAW, objective=objective, lower_bound=bound,
            status="optimal" if objective is not None and objective == bound else "feasible",
            time_to_best=min(firsts, default=None), time_to_proof=min(proofs, default=None),
            history=json.dumps(steps),
        ))  # fmt: skip
    return found


def details(rows: Sequence[Row], references: Mapping[str, Reference]) -> list[str]:
    """One Markdown line an instance: objective and bound of every solver, or seconds to a proof.

    Of several seeds the row with the lower median objective.
    """
    label = labels(rows)
    names = list(dict.fromkeys(label.values()))
    lines = [f"| instance | best known | {' | '.join(names)} |", "|---" * (2 + len(names)) + "|"]
    for instance, there in grouped(rows, lambda row: row.instance).items():
        lower, upper = references[instance][:2]
        best = f"{upper}" if lower == upper else f"{lower}-{upper}"
        cells = [_cell([row for row in there if label[row.key] == name]) for name in names]
        lines.append(f"| {instance} | {best} | {' | '.join(cells)} |")
    return lines


def _cell(rows: Sequence[Row]) -> str:
    good = [row for row in rows if not row.error and row.objective is not None]
    if not good:
        return "-"
    row = sorted(good, key=lambda row: row.objective or 0)[(len(good) - 1) // 2]
    if row.time_to_proof is not None:
        return f"{row.objective} in {row.time_to_proof:.2f} s"
    return f"{row.objective} ({'-' if row.lower_bound is None else row.lower_bound})"
