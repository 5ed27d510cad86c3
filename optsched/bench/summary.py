"""Gaps, proofs and times of a results file: medians over seeds, means over instances."""

from __future__ import annotations

import json
from collections import defaultdict
from statistics import fmean, median
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from optsched.bench.instances import Known
    from optsched.bench.rows import Row

ALL = "all"
"""Name of the family of all instances."""


class Reference(NamedTuple):
    """Reference values of the gaps of an instance."""

    lower: int | None
    upper: int | None
    family: str
    size: str
    known: bool
    """Whether the bounds are known ones, and not the best of the rows."""


class Cell(NamedTuple):
    """One configuration on one instance: medians over seeds; None if undefined."""

    configuration: str
    instance: str
    runs: int
    errors: int
    proved: int
    gap: float | None
    """``objective / best upper bound - 1``; a run without a schedule counts as infinite."""
    bound_gap: float | None
    """``1 - bound / best lower bound``."""
    time_to_best: float | None
    time_to_proof: float | None
    primal_integral: float | None
    wall_seconds: float | None
    cpu_seconds: float | None


class Mean(NamedTuple):
    """One configuration on one family: means of the cells."""

    configuration: str
    family: str
    instances: int
    solved: int
    """Instances with a schedule in more than half of the runs; the gaps are theirs."""
    proved: int
    """Runs."""
    runs: int
    errors: int
    gap: float | None
    worst_gap: float | None
    bound_gap: float | None
    primal_integral: float | None
    time_to_best: float | None
    time_to_proof: float | None
    wall_seconds: float | None
    cpu_seconds: float | None


class Summary(NamedTuple):
    """All of a results file."""

    configurations: list[str]
    references: dict[str, Reference]
    cells: list[Cell]
    means: list[Mean]
    contradictions: list[str]
    """Sentences: a bound above a schedule's value, or results beyond the known bounds."""
    errors: list[str]


def summarise(rows: Sequence[Row], known: Mapping[str, Known] | None = None) -> Summary:
    """Compare all rows of a results file; the last row of an experiment replaces earlier ones.

    `known` are published bounds; by default the best of all rows.
    """
    rows = list({row.key: row for row in rows}.values())
    label = labels(rows)
    references = {
        name: _reference(found, (known or {}).get(name))
        for name, found in grouped(rows, lambda row: row.instance).items()
    }
    horizon = max((row.seconds or 0.0 for row in rows), default=0.0)
    cells = [
        _cell(configuration, name, found, references[name], horizon)
        for (name, configuration), found in grouped(
            rows, lambda row: (row.instance, label[row.key])
        ).items()
    ]
    names = list(dict.fromkeys(label[row.key] for row in rows))
    families = list(dict.fromkeys(reference.family for reference in references.values()))
    means = [
        _mean(name, family, [c for c in cells if c.configuration == name], references)
        for family in [*families, ALL][len(families) == 1 :]
        for name in names
    ]
    errors = [f"{row.instance}, {label[row.key]}: {row.error}" for row in rows if row.error]
    return Summary(names, references, cells, means, _contradictions(rows, known or {}), errors)


def labels(rows: Iterable[Row]) -> dict[tuple[str, ...], str]:
    """Name the configuration of every row: solver, options, and other settings that differ."""
    rows = list(rows)

    def settings(row: Row) -> list[tuple[str, str]]:
        limit = "" if row.time_limit is None else f"{row.time_limit:g} s"
        steps = "" if row.iterations is None else f"{row.iterations} steps"
        return [
            ("limit", limit), ("steps", steps), ("workers", f"{row.workers} workers"),
            ("version", row.version), ("machine", row.machine),
        ]  # fmt: skip

    seen: dict[str, set[str]] = defaultdict(set)
    for row in rows:
        for key, text in settings(row):
            seen[key].add(text)
    names = {}
    for row in rows:
        options = [f"{key}={_short(value)}" for key, value in json.loads(row.options).items()]
        differing = [text for key, text in settings(row) if len(seen[key]) > 1 and text]
        names[row.key] = ", ".join([" ".join([row.solver, *options]), *differing])
    return names


def grouped(rows: Iterable[Row], key: Any) -> dict[Any, list[Row]]:
    """Group rows by key, in order of first appearance."""
    found: dict[Any, list[Row]] = {}
    for row in rows:
        found.setdefault(key(row), []).append(row)
    return found


def _reference(rows: Sequence[Row], known: Known | None) -> Reference:
    size = rows[0].size
    if known is not None:
        return Reference(known.lower, known.upper, known.family or rows[0].family, size, True)
    values = [row.objective for row in rows if row.objective is not None]
    bounds = [row.lower_bound for row in rows if row.lower_bound is not None]
    upper, lower = min(values, default=None), max(bounds, default=None)
    return Reference(lower, upper, rows[0].family, size, False)


def _cell(
    configuration: str, name: str, rows: list[Row], reference: Reference, horizon: float
) -> Cell:
    good = [row for row in rows if not row.error]
    upper, lower = reference.upper, reference.lower
    gaps = [_above(row.objective, upper) for row in good]
    integrals = []
    for row in good:
        until = row.time_limit or horizon or 1.0
        steps = [(at, z) for at, z, _ in row.steps if z is not None]
        integrals.append(primal_integral(steps, upper or 0, until))
    return Cell(
        configuration, name, len(rows), len(rows) - len(good),
        sum(row.status == "optimal" for row in good),
        _median(gaps if upper is not None else []),
        _median([_bound_gap(row.lower_bound or 0, lower) for row in good if lower is not None]),
        _median([_endless(row.time_to_best) for row in good]),
        _median([_endless(row.time_to_proof) for row in good]),
        _median(integrals),
        _median([row.wall_seconds for row in good]),
        _median([row.cpu_seconds for row in good if row.cpu_seconds is not None]),
    )  # fmt: skip


def _mean(
    configuration: str, family: str, cells: list[Cell], references: Mapping[str, Reference]
) -> Mean:
    cells = [c for c in cells if family in (ALL, references[c.instance].family)]

    def values(field: str) -> list[float]:
        return [value for c in cells if (value := getattr(c, field)) is not None]

    def mean(field: str) -> float | None:
        return fmean(values(field)) if values(field) else None

    return Mean(
        configuration, family, len(cells), len(values("time_to_best")),
        sum(c.proved for c in cells), sum(c.runs for c in cells), sum(c.errors for c in cells),
        mean("gap"), max(values("gap"), default=None), mean("bound_gap"), mean("primal_integral"),
        mean("time_to_best"), mean("time_to_proof"), mean("wall_seconds"), mean("cpu_seconds"),
    )  # fmt: skip


def _contradictions(rows: Sequence[Row], known: Mapping[str, Known]) -> list[str]:
    """Describe every best bound that exceeds a best objective, of rows and of published bounds."""
    found = []
    good = [row for row in rows if not row.error]
    for name, group in grouped(good, lambda row: row.instance).items():
        bounds = [(row.lower_bound, f"{row.solver} proved {row.lower_bound}")
                  for row in group if row.lower_bound is not None]  # fmt: skip
        values = [(row.objective, f"{row.solver} has a schedule of {row.objective}")
                  for row in group if row.objective is not None]  # fmt: skip
        lower, upper = sorted(bounds)[-1:], sorted(values)[:1]
        if name in known:
            least, most = known[name][:2]
            lower.append((least, f"{least} is known as a bound"))
            upper.append((most, f"{most} is known to be possible"))
        found += [
            f"{name}: {proof}, but {schedule}"
            for bound, proof in lower
            for value, schedule in upper
            if bound > value
        ]
    return found


def _above(value: int | None, reference: int | None) -> float:
    """``(value - reference) / |reference|``; infinite without a value or above 0."""
    if value is None or reference is None:
        return float("inf")
    if value == reference:
        return 0.0
    return (value - reference) / abs(reference) if reference else float("inf")


def _bound_gap(bound: int, reference: int) -> float:
    return max(0.0, (reference - bound) / abs(reference)) if reference else 0.0


def _endless(seconds: float | None) -> float:
    return float("inf") if seconds is None else seconds


def _median(values: Sequence[float]) -> float | None:
    """Return the median; None without values or if at least half of the runs failed."""
    found = median(values) if values else None
    return found if found is not None and found < float("inf") else None


def _short(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, separators=(",", ":"))


def primal_integral(found: list[tuple[float, int]], best_known: int, horizon: float) -> float:
    """Mean primal gap over time until the horizon: 0 (the best at once) to 1 (nothing found).

    The integral of gamma(t) dt / T (Berthold, Measuring the impact of primal heuristics, OR
    Letters 41, 2013): gamma is 1 before the first schedule, then the gap of the best value so far,
    ``(z - z*) / max(|z|, |z*|)``, and 0 if that beats z*.
    """
    area, since, gap = 0.0, 0.0, 1.0
    for at, value in found:
        if at >= horizon:
            break
        area += gap * (at - since)
        above = max(0, value - best_known)
        since, gap = at, min(1.0, above / (max(abs(value), abs(best_known)) or 1))
    return (area + gap * (horizon - since)) / horizon
