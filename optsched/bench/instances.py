"""Instances of a benchmark and their published bounds."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from optsched.errors import InputError
from optsched.io.csv_rows import csv_records
from optsched.io.files import read_text
from optsched.io.values import file_label

if TYPE_CHECKING:
    import os
    from collections.abc import Iterable, Sequence

    from optsched.model.schedule import Problem

_FAMILY = re.compile(r"[A-Za-z_]+")
_NUMBER = re.compile(r"-?[0-9]{1,16}")
_COLUMNS = (("name", "bound", "value"), ("instance", "lb", "ub"))
"""Name and bounds in a table of best-known values, and in one of published bounds."""


class Instance(NamedTuple):
    """A problem and its source: a path, or the name of a published instance."""

    source: str
    name: str
    problem: Problem

    @property
    def family(self) -> str:
        """Leading letters of the name: ``ta`` of ta21."""
        found = _FAMILY.match(self.name)
        return found.group().rstrip("_") or "other" if found else "other"

    @property
    def size(self) -> str:
        """``20x15`` (jobs by machines, or operations by resources of a graph)."""
        graph = self.problem.graph()
        jobs = getattr(self.problem, "n_jobs", graph.n_operations)
        return f"{jobs}x{graph.n_resources}"


class Known(NamedTuple):
    """Published bounds of an instance, and its family if the table has one."""

    lower: int
    upper: int
    family: str = ""


def load(source: str) -> Instance:
    """Read an instance from a file of any format, or by its published name."""
    from optsched.formats.read_problem import read_problem

    problem = read_problem(source)
    return Instance(source, problem.name or file_label(Path(source).stem), problem)


def load_all(sources: Sequence[str]) -> list[Instance]:
    """Read instances, each once; refuse two of one name, and one under two names."""
    found: dict[str, Instance] = {}
    of_hash: dict[str, Instance] = {}
    for source in sources:
        instance = load(source)
        other = of_hash.setdefault(instance.problem.sha256, instance)
        if other.name != instance.name:
            raise InputError(f"{source}: is the same instance as {other.source}; leave one out")
        other = found.setdefault(instance.name, instance)
        if other.problem.sha256 != instance.problem.sha256:
            raise InputError(
                f"{source}: another instance is called {instance.name} too ({other.source})"
            )
    return list(found.values())


def published_bounds(instances: Iterable[tuple[str, str]]) -> dict[str, Known]:
    """Return the best known bounds of published job shops, recognized by name and hash."""
    from optsched.problems.jobshop import published

    known = published.bounds()
    return {
        name: Known(*known[name])
        for name, sha256 in dict.fromkeys(instances)
        if name in known and published.instance(name).sha256 == sha256
    }


def read_bounds(path: str | os.PathLike[str]) -> dict[str, Known]:
    """Read known bounds by instance name from a CSV.

    The columns are ``name``, ``bound`` and ``value``, or ``instance``, ``lb`` and ``ub``.
    ``family`` groups the instances; other columns, and rows without both bounds, are ignored.
    """
    found: dict[str, Known] = {}
    text = read_text(path)
    header = {cell.strip('" \r') for cell in text.partition("\n")[0].split(",")}
    columns = max(reversed(_COLUMNS), key=lambda one: len(header.intersection(one)))
    for place, row in csv_records(text, str(path), (), columns):
        known = _known(row, place, columns[1:])
        if known is None:
            continue
        name = row[columns[0]]
        if name in found:
            raise InputError(f"{place}: {name!r:.60} comes twice")
        found[name] = known
    return found


def _known(row: dict[str, str], place: str, columns: Sequence[str]) -> Known | None:
    values = []
    for key in columns:
        text = row[key]
        if not text:
            return None
        if not _NUMBER.fullmatch(text):
            raise InputError(f"{place}: {key}: expected an integer, got {text!r:.60}")
        values.append(int(text))
    if values[0] > values[1]:
        raise InputError(f"{place}: {columns[0]}: {values[0]} is above {columns[1]} {values[1]}")
    return Known(values[0], values[1], row.get("family", ""))
