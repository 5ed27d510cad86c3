"""One row a solve: the CSV file of a run, and what can be computed from a row."""

from __future__ import annotations

import csv
import os
from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

Step = tuple[float, int | None, int | None]
"""Seconds, objective, bound from then on."""

SLACK = 0.1
"""Seconds of CPU time that start and end of a process may differ by."""


class Known(NamedTuple):
    """Best published bounds of an instance."""

    lower: int
    upper: int


@dataclass(frozen=True)
class Row:
    """One solve of one instance.

    ``wall`` and ``cpu`` are seconds of the whole process, ``startup`` its budget used before the
    search, ``ended`` the budget used when the solver returned; ``trace`` holds every incumbent and
    bound as ``seconds:objective:bound``; ``checked`` is ``ok`` or what is wrong with the starts.
    """

    instance: str
    solver: str
    workers: int
    seconds: float
    clock: str
    seed: int
    objective: int | None
    bound: int | None
    status: str
    wall: float
    cpu: float
    startup: float
    ended: float
    checked: str
    trace: str
    versions: str
    machine: str
    note: str

    @property
    def key(self) -> tuple[object, ...]:
        """What may be there only once in a file."""
        return (self.instance, self.solver, self.workers, self.seconds, self.clock, self.seed)

    @property
    def finished(self) -> bool:
        """Whether the solver ended by itself: a proof, or nothing left to try."""
        return self.status in ("optimal", "infeasible") or (
            self.checked == "ok" and self.ended < 0.9 * self.seconds
        )

    @property
    def cpu_expected(self) -> float:
        """CPU seconds of an undisturbed run: one core to start, then all workers."""
        if self.clock == "cpu":
            return self.seconds * self.workers
        if self.clock == "warm":  # the warm-up is not in `seconds`
            return self.seconds * self.workers
        start = min(self.startup, self.seconds)
        return start + (self.seconds - start) * self.workers

    @property
    def valid(self) -> bool:
        """Schedule right, and the solver got its CPU time within 10 % (or finished before)."""
        if self.checked != "ok":
            return False
        if self.finished:
            return True
        low, high = 0.9 * self.cpu_expected - SLACK, 1.1 * self.seconds * self.workers + SLACK
        return low <= self.cpu and (self.clock == "warm" or self.cpu <= high)

    @property
    def steps(self) -> list[Step]:
        """The trace."""
        found = []
        for step in self.trace.split():
            at, objective, bound = step.split(":")
            found.append((float(at), _whole(objective), _whole(bound)))
        return found

    @property
    def time_to_best(self) -> float | None:
        """Seconds to the first schedule as good as the last."""
        return next((at for at, value, _ in self.steps if value == self.objective), None) if (
            self.objective is not None
        ) else None  # fmt: skip

    @property
    def time_to_proof(self) -> float | None:
        """Seconds until the solver returned with a proof."""
        return self.ended if self.status == "optimal" else None

    def objective_at(self, seconds: float) -> int | None:
        """The best schedule so many seconds after the start of the search."""
        best = None
        for at, value, _ in self.steps:
            if at - self.startup <= seconds and value is not None:
                best = value
        return best


def incumbents(steps: Sequence[Step]) -> list[tuple[float, int]]:
    """Seconds and values of the schedules in a trace; see `optsched.solving.result`."""
    return [(at, value) for at, value, _ in steps if value is not None]


def gap(objective: int | None, reference: int | None) -> float | None:
    """``objective / reference - 1``."""
    if objective is None or not reference:
        return None
    return objective / reference - 1


def bound_gap(bound: int | None, reference: int | None) -> float | None:
    """``1 - bound / reference``: how far below the best known bound."""
    if bound is None or not reference:
        return None
    return 1 - bound / reference


def trace_text(steps: Iterable[Sequence[float | int | None]]) -> str:
    """Steps in one CSV field."""
    shown = (("" if value is None else str(value) for value in step) for step in steps)
    return " ".join(":".join(step) for step in shown)


def read(path: Path) -> list[Row]:
    """All rows of a file; none if there is no file."""
    if not path.exists():
        return []
    rows = []
    with path.open(newline="") as stream:
        reader = csv.DictReader(stream)
        names = [field.name for field in fields(Row)]
        if reader.fieldnames is not None and list(reader.fieldnames) != names:
            raise SystemExit(f"{path}: has other columns than this version writes; use a new file")
        for line in reader:
            if None in line.values():
                break  # torn: a run was killed while writing it
            rows.append(_row(line))
    return rows


def append(path: Path, row: Row) -> None:
    """Add a row; the file is complete after every call."""
    path.parent.mkdir(parents=True, exist_ok=True)
    new = not path.exists() or path.stat().st_size == 0
    if not new:
        _drop_torn_line(path)
    with path.open("a", newline="") as stream:
        writer = csv.DictWriter(stream, [field.name for field in fields(Row)], lineterminator="\n")
        if new:
            writer.writeheader()
        writer.writerow({k: _cell(v) for k, v in asdict(row).items()})
        stream.flush()
        os.fsync(stream.fileno())


def known_bounds(path: Path | None) -> dict[str, Known]:
    """Best published bounds by instance, from a CSV file with columns instance, lb, ub."""
    if path is None:
        return {}
    with path.open(newline="") as stream:
        return {
            line["instance"]: Known(int(line["lb"]), int(line["ub"]))
            for line in csv.DictReader(stream)
            if line["lb"] and line["ub"]
        }


def _row(line: dict[str, str]) -> Row:
    numbers = {name: float(line[name]) for name in ("seconds", "wall", "cpu", "startup", "ended")}
    counts = {name: int(line[name]) for name in ("workers", "seed")}
    optional = {name: _whole(line[name]) for name in ("objective", "bound")}
    return Row(**{**line, **numbers, **counts, **optional})  # type: ignore[arg-type]


def _whole(text: str) -> int | None:
    return int(text) if text else None


def _cell(value: object) -> str:
    return "" if value is None else " ".join(str(value).split())


def _drop_torn_line(path: Path) -> None:
    content = path.read_bytes()
    if not content.endswith(b"\n"):
        path.write_bytes(content[: content.rfind(b"\n") + 1])
