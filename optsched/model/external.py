"""Schedules from start times or machine orders that another tool computed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from optsched.errors import InputError
from optsched.io.strict_json import format_json, shortened
from optsched.io.values import format_value, int_array, integer, is_integer
from optsched.model.graph import describe, evaluate
from optsched.model.memory_bounds import paths_from
from optsched.model.schedule import Csr, Problem, Schedule

if TYPE_CHECKING:
    from optsched.model.schedule import IntArray


def from_starts(problem: Problem, starts: Any, period: int | None = None) -> Schedule:
    """See `Schedule.from_starts`."""
    operations = _Operations(graph := _graph(problem))
    if not isinstance(starts, Mapping) and hasattr(starts, "columns"):  # a data frame
        starts = _by_machine(operations, _rows(starts), (".job", ".machine", ".start"))
    elif _are_rows(graph, starts):
        starts = _by_machine(operations, starts)
    start = int_array("starts", operations.values("starts", starts))
    provenance = _provenance(problem)
    if graph.period is None:
        if period is not None:
            raise InputError("period: this problem has none (its objective is not the period)")
        return graph.with_orders(_sequences(graph, start, graph), start, None, provenance)
    if period is None:
        raise InputError("period: missing; the starts of a rolling problem need it")
    begin = start % integer("period", period, 1)
    return graph.with_cycle(
        period, start // period, _sequences(graph, begin, None), begin, None, provenance
    )


def from_orders(problem: Problem, orders: Any) -> Schedule:
    """See `Schedule.from_orders`."""
    graph = _graph(problem)
    if graph.period is not None:
        raise InputError("orders: a rolling problem needs starts and a period, use from_starts")
    operations = _Operations(graph)
    if isinstance(orders, (Csr, np.ndarray)):
        orders = orders.to_lists() if isinstance(orders, Csr) else orders.tolist()
    rows: list[Any] = [None] * graph.n_resources
    if isinstance(orders, Mapping):
        for key, row in orders.items():
            r = _machine(graph, "orders", key)
            if rows[r] is not None:
                raise InputError(f"orders: {graph.resources[r].name} is given twice")
            rows[r] = row
    elif isinstance(orders, Sequence) and len(orders) == graph.n_resources:
        rows = list(orders)
    else:
        raise InputError(
            f"orders: expected {graph.n_resources} rows, one per machine, or a mapping by the name "
            f"of the machine, got {format_value(orders)}"
        )
    named = list[list[int]]()
    for r, row in enumerate(rows):
        keys = row.tolist() if isinstance(row, np.ndarray) else () if row is None else row
        if not isinstance(keys, Sequence) or isinstance(keys, (str, bytes)):
            raise InputError(f"orders[{r}]: expected a list of operations, got {format_value(row)}")
        named.append([operations.index(f"orders[{r}]", key, r) for key in keys])
    schedule = problem.scheduled(Csr.of(named))
    return schedule.with_orders(schedule.sequences, schedule.start, None, _provenance(problem))  # type: ignore[arg-type]


class _Operations:
    """Finds operations of a graph by index, by (job, position) or by name."""

    def __init__(self, graph: Schedule) -> None:
        self.graph = graph
        self.by_job: dict[int, list[int]] = {}
        self._free: dict[tuple[int, int], list[int]] = {}
        for i, j in enumerate(graph.job.tolist()):
            self.by_job.setdefault(j, []).append(i)
            for r in graph.op_resources[i].tolist():
                self._free.setdefault((j, r), []).append(i)
        self.jobs = {graph.job_name(j): j for j in self.by_job}
        if not graph.job_names:  # the default of `names`
            self.jobs |= {f"job{j}": j for j in self.by_job}
        self._names: dict[str, list[int]] = {}

    def job(self, key: Any) -> int:
        """Number of a job, given its name or number; -1 if there is none."""
        return self.jobs.get(key, -1) if isinstance(key, str) else key if is_integer(key) else -1

    def index(self, place: str, key: Any, r: int = -1) -> int:
        """Index of the operation that a key names; a job stands for its next one on machine r."""
        n = self.graph.n_operations
        if is_integer(key) and 0 <= key < n:
            return int(key)
        if isinstance(key, tuple) and len(key) == 2 and is_integer(key[1]):
            row = self.by_job.get(self.job(key[0]), [])
            if 0 <= key[1] < len(row):
                return row[key[1]]
        if isinstance(key, str) and r >= 0 and key in self.jobs:
            return self.next(place, key, r)
        if isinstance(key, str):
            if not self._names:
                for i in range(n):
                    self._names.setdefault(describe(self.graph, i), []).append(i)
            found = self._names.get(key, [])
            if len(found) == 1:
                return found[0]
            if found:
                raise InputError(
                    f"{place}: operations {found[:2]} are called {format_json(key)}; use indices"
                )
        raise InputError(
            f"{place}: no operation {format_value(key)}; expected an index in 0..{n - 1}, "
            f"(job, position) or a name such as {format_json(describe(self.graph, 0)) if n else ''}"
        )

    def next(self, place: str, job: Any, r: int) -> int:
        """Take the next operation of a job on a machine; their order must be fixed."""
        graph = self.graph
        if not (ids := self._free.get((self.job(job), r), [])):
            what, machine = format_value(job), graph.resources[r].name
            raise InputError(f"{place}: job {what} has no further operation on {machine}")
        if len(ids) > 1 and (graph.period is not None or ids[1] not in paths_from(graph, ids[0])):
            one, two = (describe(graph, i) for i in ids[:2])
            raise InputError(f"{place}: the order of {one} and {two} is not fixed; give such names")
        return ids.pop(0)

    def values(self, place: str, given: Any) -> list[Any]:
        """One value per operation, from a mapping, a flat list or one row per job."""
        n = self.graph.n_operations
        if isinstance(given, Mapping):
            found: dict[int, Any] = {}
            for key, value in given.items():
                i = self.index(place, key)
                if i in found:
                    raise InputError(f"{place}: {describe(self.graph, i)} is given twice")
                found[i] = value
            if missing := [i for i in range(n) if i not in found]:
                what = describe(self.graph, missing[0])
                raise InputError(f"{place}: {what}, operation {missing[0]}, is missing")
            return [found[i] for i in range(n)]
        flat = given.tolist() if isinstance(given, np.ndarray) else given
        if not isinstance(flat, Sequence) or isinstance(flat, (str, bytes)):
            raise InputError(f"{place}: expected a list or a mapping, got {format_value(given)}")
        if not any(isinstance(row, (list, tuple, np.ndarray)) for row in flat):
            if len(flat) != n:
                raise InputError(f"{place}: expected {n} values, one an operation, got {len(flat)}")
            return list(flat)
        jobs = [self.by_job[j] for j in sorted(self.by_job)]
        sizes = [len(row) if isinstance(row, (list, tuple, np.ndarray)) else -1 for row in flat]
        if sizes != [len(row) for row in jobs]:
            raise InputError(f"{place}: expected one row per job, one value per operation of it")
        ids, given = [i for row in jobs for i in row], [value for row in flat for value in row]
        return [given[k] for k in np.argsort(ids)]


def _graph(problem: Problem) -> Schedule:
    if not isinstance(problem, Problem):
        raise InputError(f"problem: expected a JobShop, a JobArray or a graph, got {problem!r:.60}")
    if getattr(problem, "chooses", False):
        raise InputError(
            "problem: which jobs recompute is left to the solver; fix it first (recompute_mode)"
        )
    graph = problem.graph()
    if names := list(problem.job_names):
        graph = graph._sharing({"provenance": {"jobs": names}})
    return graph


def _are_rows(graph: Schedule, starts: Any) -> bool:
    """Whether starts are rows (job, machine, start), and not the starts of one job each."""
    rows = list(starts) if isinstance(starts, (list, tuple)) else []
    triples = all(isinstance(row, (list, tuple)) and len(row) == 3 for row in rows)
    named = triples and any(isinstance(cell, str) for row in rows for cell in row)
    return triples and bool(rows) and (named or len(rows) == graph.n_operations)


def _rows(frame: Any) -> list[tuple[Any, ...]]:
    """Rows (job, machine, start) of a data frame; its column may be called resource."""
    names = ("job", "machine" if "machine" in frame.columns else "resource", "start")
    if missing := [name for name in names if name not in frame.columns]:
        raise InputError(f"starts: column {missing[0]} is missing; needed: job, machine, start")
    start = [int(n) if isinstance(n, float) and n.is_integer() else n for n in frame["start"]]
    return list(zip(frame[names[0]], frame[names[1]], start, strict=True))


def _by_machine(operations: _Operations, rows: Any, at: Any = ("", "", "[2]")) -> dict[int, int]:
    """Starts by index; operations of a job on one machine are matched in their fixed order."""
    given = [(integer(f"starts[{k}]{at[2]}", row[2]), k) for k, row in enumerate(rows)]
    found: dict[int, int] = {}
    for start, k in sorted(given):
        r = _machine(operations.graph, f"starts[{k}]{at[1]}", rows[k][1])
        i = operations.next(f"starts[{k}]{at[0]}", rows[k][0], r)
        if found.setdefault(i, start) != start:  # it holds several machines
            what = describe(operations.graph, i)
            raise InputError(f"starts[{k}]: {what} starts at {found[i]}, not {start}")
    return found


def _provenance(problem: Problem) -> dict[str, Any]:
    names = {"jobs": list(problem.job_names)} if problem.job_names else {}
    return {"instance_sha256": problem.sha256, **names}


def _sequences(graph: Schedule, start: IntArray, arcs: Schedule | None) -> Csr:
    """Users of every resource by start; at equal starts shorter ones first, then along the arcs."""
    rank = np.arange(graph.n_operations)
    if arcs is not None:
        rank[evaluate(arcs).order] = np.arange(graph.n_operations)
    on = graph.users.ids
    resource = np.repeat(np.arange(graph.n_resources), np.diff(graph.users.indptr))
    order = np.lexsort((rank[on], graph.duration[on], start[on], resource))
    return Csr(graph.users.indptr, on[order])


def _machine(graph: Schedule, place: str, key: Any) -> int:
    names = [resource.name for resource in graph.resources]
    if isinstance(key, str) and key in names:
        return names.index(key)
    if is_integer(key) and 0 <= key < len(names):
        return int(key)
    raise InputError(f"{place}: no machine {format_value(key)}; there are {shortened(names, 8)}")
