"""Tables of a result file: medians over seeds, means over instances, ratios to a base."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from typing import TYPE_CHECKING, NamedTuple

from benchmarks.shop.engines import RAW_CPSAT
from benchmarks.shop.rows import Known, Row, bound_gap, gap, incumbents
from optsched.solving.result import primal_integral

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

BEST_OF_RAW = "cpsat-raw (best of 4)"
"""Row made of the best raw CP-SAT setting for every instance and figure."""


class Cell(NamedTuple):
    """A solver on an instance: medians over seeds; infinite where more than half have none."""

    objective: float
    bound: float
    gap: float
    bound_gap: float
    certified: float
    integral: float
    to_best: float
    to_proof: float
    wall: float
    early: float
    """Gap 0.1 s after the search began."""


Table = dict[str, dict[str, Cell]]
"""Cells by solver, then instance."""


def references(rows: Iterable[Row], known: Mapping[str, Known]) -> dict[str, Known]:
    """What gaps are measured against: published bounds, else the best values in the rows."""
    found = dict(known)
    for name in {row.instance for row in rows} - known.keys():
        mine = [row for row in rows if row.instance == name and row.checked == "ok"]
        upper = [row.objective for row in mine if row.objective is not None]
        lower = [row.bound for row in mine if row.bound is not None]
        if upper:
            found[name] = Known(max(lower, default=0), min(upper))
    return found


def contradictions(rows: Sequence[Row], known: Mapping[str, Known]) -> list[str]:
    """Everything that cannot be: wrong schedules, false bounds, values beyond the published."""
    best: dict[str, int] = {}
    for row in rows:
        if row.checked == "ok" and row.objective is not None:
            best[row.instance] = min(row.objective, best.get(row.instance, row.objective))
    found = []
    for row in rows:
        who = f"{row.instance}, {row.solver}, seed {row.seed}"
        if row.checked != "ok":
            found.append(f"{who}: {row.checked}")
        if row.bound is not None and row.bound > best.get(row.instance, row.bound):
            found.append(f"{who}: bound {row.bound}, but a schedule of {best[row.instance]} exists")
        if row.instance not in known:
            continue
        lower, upper = known[row.instance]
        if row.bound is not None and row.bound > upper:
            found.append(f"{who}: bound {row.bound} above the published schedule of {upper}")
        if row.objective is not None and row.objective < lower:
            found.append(f"{who}: objective {row.objective} below the published bound of {lower}")
    return found


def tabulate(rows: Iterable[Row], reference: Mapping[str, Known]) -> Table:
    """Medians over seeds, and the row made of the best raw CP-SAT settings."""
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        groups.setdefault((row.solver, row.instance), []).append(row)
    table: Table = {}
    for (solver, name), group in groups.items():
        table.setdefault(solver, {})[name] = _cell(group, reference.get(name, Known(0, 0)))
    raw = [table[name] for name in RAW_CPSAT if name in table]
    if len(raw) == len(RAW_CPSAT):
        shared = [name for name in raw[0] if all(name in cells for cells in raw)]
        table[BEST_OF_RAW] = {name: _best([cells[name] for cells in raw]) for name in shared}
    return table


def summary(table: Table, base: str, counts: Mapping[str, tuple[int, int]]) -> list[str]:
    """One Markdown line a solver.

    Means are over the instances that it has a schedule for; the ratio to `base` is of mean gaps
    over the instances that both have a schedule for.
    """
    columns = (
        "solver", "solved", "mean gap", "worst gap", "bound gap", "certified gap", "proved",
        "s to proof: median, worst", "s to best", "primal integral", "gap after 0.1 s", "wall s",
        "rows (left out)", f"gap / {base}",
    )  # fmt: skip
    lines = [_line(columns), "|---|" + "--:|" * (len(columns) - 1)]
    for solver, cells in table.items():
        solved = {name: c for name, c in cells.items() if math.isfinite(c.objective)}
        some = list(solved.values())
        proofs = [cell.to_proof for cell in some if math.isfinite(cell.to_proof)]
        kept, left = counts.get(solver, (0, 0))
        shown = (
            solver,
            f"{len(some)} of {len(cells)}",
            _percent(_mean(c.gap for c in some)),
            _percent(max((c.gap for c in some), default=math.nan)),
            _percent(_mean(c.bound_gap for c in some)),
            _percent(_mean(c.certified for c in some)),
            str(len(proofs)),
            f"{statistics.median(proofs):.2f}, {max(proofs):.2f}" if proofs else "-",
            _number(_mean(c.to_best for c in some), 2),
            _number(_mean(c.integral for c in cells.values()), 4),
            _percent(_mean(c.early for c in some)),
            f"{statistics.median(c.wall for c in cells.values()):.2f}",
            f"{kept} ({left})" if solver in counts else "",
            _ratio(solved, table.get(base, {})),
        )
        lines.append(_line(shown))
    return lines


def details(table: Table, reference: Mapping[str, Known]) -> list[str]:
    """One Markdown line an instance: objective and bound of every solver, seconds of a proof."""
    names = list(dict.fromkeys(name for cells in table.values() for name in cells))
    solvers = [solver for solver in table if solver != BEST_OF_RAW]
    lines = [_line(("instance", "best known", *solvers)), "|---|--:|" + "--:|" * len(solvers)]
    for name in names:
        lower, upper = reference.get(name, Known(0, 0))
        best = f"{upper}" if lower == upper else f"{lower}-{upper}"
        shown = [_details_cell(table[solver].get(name)) for solver in solvers]
        lines.append(_line((name, best, *shown)))
    return lines


def report(
    rows: Sequence[Row], known: Mapping[str, Known], base: str, keep_invalid: bool
) -> tuple[str, bool]:
    """All tables of a result file as Markdown, and whether nothing in it is impossible."""
    lines = [
        f"machine: {'; '.join(sorted({row.machine for row in rows}))}  ",
        *(f"{text}  " for text in sorted({row.versions for row in rows if row.versions})),
        *sorted({f"{row.solver}: {row.note}  " for row in rows if row.note}),
    ]
    wrong = contradictions(rows, known)
    reference = references(rows, known)
    for seconds, clock in sorted({(row.seconds, row.clock) for row in rows}):
        part = [row for row in rows if (row.seconds, row.clock) == (seconds, clock)]
        kept = [row for row in part if row.valid or (keep_invalid and row.checked == "ok")]
        used, all_of = (Counter(row.solver for row in some) for some in (kept, part))
        counts = {solver: (used[solver], all_of[solver] - used[solver]) for solver in all_of}
        seeds = len({row.seed for row in part})
        lines += ["", f"**{seconds:g} s, clock {clock}, {seeds} seeds**", ""]
        if not kept:
            lines.append("no valid rows: the processes did not get their CPU time")
            continue
        table = tabulate(kept, reference)
        lines += [*summary(table, base, counts), "", *details(table, reference)]
    if any(row.instance not in known for row in rows):
        lines += ["", "Gaps of instances without published bounds are to the best in this file."]
    lines += ["", *(f"IMPOSSIBLE: {text}" for text in wrong)]
    return "\n".join(lines).rstrip(), not wrong


def _cell(group: Sequence[Row], reference: Known) -> Cell:
    lower, upper = reference

    def median(value: Callable[[Row], float | int | None]) -> float:
        values = [value(row) for row in group]
        return statistics.median_low([math.inf if v is None else float(v) for v in values])

    return Cell(
        objective=median(lambda row: row.objective),
        bound=-median(lambda row: None if row.bound is None else -row.bound),
        gap=median(lambda row: gap(row.objective, upper)),
        bound_gap=median(lambda row: bound_gap(row.bound, lower)),
        certified=median(lambda row: gap(row.objective, row.bound)),
        integral=median(lambda row: primal_integral(incumbents(row.steps), upper, row.seconds)),
        to_best=median(lambda row: row.time_to_best),
        to_proof=median(lambda row: row.time_to_proof),
        wall=median(lambda row: row.wall),
        early=median(lambda row: gap(row.objective_at(0.1), upper)),
    )


def _best(cells: Sequence[Cell]) -> Cell:
    best = Cell(*(min(values) for values in zip(*cells, strict=True)))
    return best._replace(bound=max(cell.bound for cell in cells))


def _ratio(cells: Mapping[str, Cell], base: Mapping[str, Cell]) -> str:
    shared = [name for name in cells if name in base and math.isfinite(base[name].gap)]
    below = _mean(base[name].gap for name in shared)
    return f"{_mean(cells[name].gap for name in shared) / below:.3f}" if below > 0 else "-"


def _details_cell(cell: Cell | None) -> str:
    if cell is None or not math.isfinite(cell.objective):
        return "-"
    if math.isfinite(cell.to_proof):
        return f"{cell.objective:.0f} in {cell.to_proof:.2f} s"
    bound = f"{cell.bound:.0f}" if math.isfinite(cell.bound) else "-"
    return f"{cell.objective:.0f} ({bound})"


def _mean(values: Iterable[float]) -> float:
    given = list(values)
    return sum(given) / len(given) if given else math.nan


def _percent(value: float) -> str:
    return f"{100 * value:.2f} %" if math.isfinite(value) else "-"


def _number(value: float, digits: int) -> str:
    return f"{value:.{digits}f}" if math.isfinite(value) else "-"


def _line(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"
