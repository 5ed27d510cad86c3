"""Checks of the fields of a `Schedule`: types, shapes, ranges, acyclic arcs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from optsched.errors import CyclicOrder, InputError
from optsched.io.strict_json import MAX_INTEGER, format_json
from optsched.io.values import (
    format_value,
    frozen,
    int_array,
    integer,
    json_value,
    label,
    listed,
    one_of,
)
from optsched.model.cycles import cycle_of
from optsched.model.objectives import check_sums, goal_of, graph_goal
from optsched.model.schedule import (
    COLUMNS,
    MAX_KIND,
    NO_DEADLINE,
    STATUSES,
    TIME_UNITS,
    Arcs,
    Csr,
    Goal,
    IntArray,
    Objective,
    Resource,
    Schedule,
)

if TYPE_CHECKING:
    import numpy.typing as npt

_LISTED = 12  # operations of a cycle that a message lists


def normalise(raw: Schedule) -> dict[str, Any]:
    """Checked, read-only versions of the graph's fields of a schedule under construction."""
    duration = _counts("duration", raw.duration)
    n = len(duration)
    values: dict[str, Any] = {"duration": duration, "resources": _resources(raw.resources)}
    for key in COLUMNS:
        given, absent = getattr(raw, key), NO_DEADLINE if key == "deadline" else 0
        if key == "kind":
            values[key] = _kinds(given, n)
        elif key != "duration":
            values[key] = _counts(key, np.full(n, absent) if given is None else given, n)
    values["op_resources"] = _op_resources(raw.op_resources, n, len(values["resources"]))
    _no_memory_without_resource(values)
    values["arcs"] = _arcs(raw.arcs, duration, raw.period is not None)
    values["name"] = label("name", raw.name)
    unit = raw.time_unit
    values["time_unit"] = unit if unit == "" else one_of("time_unit", unit, TIME_UNITS)
    _check_period(raw.period, values)
    latest = _check_sums(values)
    values["goal"] = _goal(raw.goal, raw.period, values, latest)
    return values


def solution(
    graph: Schedule, sequences: Any, start: Any, objective: Any, provenance: Any
) -> dict[str, Any]:
    """Checked orders, starts and claims for a graph that has been checked."""
    n, values = graph.n_operations, {"sequences": sequences, "start": start, "objective": objective}
    if (sequences is None) != (start is None):
        absent, given = ("starts", "sequences") if start is None else ("sequences", "starts")
        raise InputError(f"{absent}: missing, but {given} are given (give both or neither)")
    if sequences is not None:
        values["sequences"] = _sequences(sequences, n, graph.resources)
        values["start"] = _starts(start, n, graph.period)
        late = values["start"] + graph.duration > MAX_INTEGER
        if (i := _first(late)) is not None:
            raise InputError(f"starts[{i}]: the operation would end beyond 2^53")
    if objective is not None:
        values["objective"] = _objective(objective)
    if not isinstance(provenance, Mapping):
        raise InputError(f"provenance: expected a mapping, got {format_value(provenance)}")
    values["provenance"] = json_value("provenance", provenance)
    return values


def cycle(graph: Schedule, period: Any, offset: Any) -> dict[str, Any]:
    """A checked period and checked offsets for a graph that has been checked."""
    values = {"offset": _counts("offset", offset, graph.n_operations)}
    _check_period(period, {"release": graph.release, "deadline": graph.deadline})
    return {"period": int(period), **values}


def _first(bad: npt.NDArray[np.bool_]) -> int | None:
    return int(np.argmax(bad)) if bad.any() else None


def _column(key: str, given: Any, n: int) -> IntArray:
    array = int_array(key, given)
    if len(array) != n:
        raise InputError(f"{key}: expected {n} values, one per operation, got {len(array)}")
    return array


def _counts(key: str, given: Any, n: int | None = None) -> IntArray:
    """An array of integers in 0..2^53, one per operation."""
    array = int_array(key, given) if n is None else _column(key, given, n)
    if (i := _first(array < 0)) is not None:
        raise InputError(f"operations[{i}].{key}: expected an integer >= 0, got {array[i]}")
    beyond = array > MAX_INTEGER
    if key == "deadline":
        beyond &= array != NO_DEADLINE
    if (i := _first(beyond)) is not None:
        raise InputError(f"operations[{i}].{key}: expected an integer <= 2^53, got {array[i]}")
    return array


def _kinds(given: Any, n: int) -> npt.NDArray[np.str_]:
    kinds = [""] * n if given is None else listed("kind", given, "a list of strings")
    if len(kinds) != n:
        raise InputError(f"kind: expected {n} values, one per operation, got {len(kinds)}")
    good: set[str] = set()
    for i, kind in enumerate(kinds):
        if kind.__class__ is not str or kind not in good:  # few kinds, many operations
            good.add(label(f"operations[{i}].kind", kind, MAX_KIND))
            if kind.endswith("\0"):  # NumPy would drop it
                raise InputError(f"operations[{i}].kind: ends with U+0000, got {format_json(kind)}")
    return frozen(np.array(kinds, dtype=np.str_))  # after the check: a long kind fills the memory


_recent: list[tuple[Resource, ...]] = [()]
"""Cache of the last valid tuple: schedules of one cluster share it, and checks take time."""


def _resources(given: Any) -> tuple[Resource, ...]:
    if given is _recent[0]:
        return given
    seen: dict[str, int] = {}
    found = []
    for r, row in enumerate(listed("resources", given, "a list of Resource(name, memory)")):
        if not isinstance(row, tuple) or not 1 <= len(row) <= 2:
            raise InputError(
                f"resources[{r}]: expected Resource(name, memory), got {format_value(row)}"
            )
        name, memory = Resource(*row)
        if label(f"resources[{r}].name", name) in seen:
            raise InputError(
                f"resources[{r}].name: {format_json(name)} is also the name of "
                f"resources[{seen[name]}]"
            )
        seen[name] = r
        found.append(Resource(name, integer(f"resources[{r}].memory", memory)))
    checked = type(given) is tuple and all(
        type(row) is Resource and type(row.memory) is int for row in given
    )
    valid: tuple[Resource, ...] = given if checked else tuple(found)
    _recent[0] = valid  # another thread may replace it at any time
    return valid


def _op_resources(rows: Csr, n: int, n_resources: int) -> Csr:
    if not isinstance(rows, Csr):
        rows = Csr.of(rows)
    if len(rows) != n:
        raise InputError(f"op_resources: expected {n} rows, one per operation, got {len(rows)}")
    owner = np.repeat(np.arange(n), np.diff(rows.indptr))
    if (k := _first((rows.ids < 0) | (rows.ids >= n_resources))) is not None:
        raise InputError(
            f"operations[{owner[k]}].resources: there is no resource {rows.ids[k]} "
            f"(there are {n_resources})"
        )
    if (np.diff(rows.indptr) > 1).any():
        order = np.lexsort((rows.ids, owner))
        same = (np.diff(owner[order]) == 0) & (np.diff(rows.ids[order]) == 0)
        if (k := _first(same)) is not None:
            i, r = owner[order][k], rows.ids[order][k]
            raise InputError(f"operations[{i}].resources: names resource {r} twice")
    return rows


def _no_memory_without_resource(values: dict[str, Any]) -> None:
    idle = np.diff(values["op_resources"].indptr) == 0
    for key in ("acquire", "free", "workspace"):
        if (i := _first(idle & (values[key] > 0))) is not None:
            raise InputError(
                f"operations[{i}].{key}: {values[key][i]} bytes, but the operation has no resource"
            )


def _arcs(given: Any, duration: IntArray, periodic: bool) -> Arcs:
    arcs = given if isinstance(given, Arcs) else Arcs.of(given)
    tail, head, lag, distance = (
        int_array(f"arcs.{key}", column) for key, column in zip(Arcs._fields, arcs, strict=True)
    )
    n = len(duration)
    if not len(tail) == len(head) == len(lag) == len(distance):
        raise InputError("arcs: the four columns differ in length")
    for column, end in ((tail, "tail"), (head, "head")):
        if (a := _first((column < 0) | (column >= n))) is not None:
            raise InputError(f"arcs[{a}]: {end} {column[a]} is no operation (there are {n})")
    if (a := _first((tail == head) & (distance == 0))) is not None:
        raise InputError(f"arcs[{a}]: operation {tail[a]} before itself")
    if (a := _first((lag < -duration[tail]) | (lag > MAX_INTEGER))) is not None:
        raise InputError(
            f"arcs[{a}]: lag {lag[a]} is outside -{duration[tail[a]]}..2^53 "
            f"(not below minus the duration of operation {tail[a]})"
        )
    if (a := _first((distance < 0) | (distance > MAX_INTEGER))) is not None:
        raise InputError(f"arcs[{a}]: expected a distance >= 0, got {distance[a]}")
    if not periodic and (a := _first(distance != 0)) is not None:
        raise InputError(f"arcs[{a}]: distance {distance[a]}, but the schedule has no period")
    now = distance == 0
    cycle = cycle_of(tail[now], head[now])
    if cycle:
        path = " -> ".join(map(str, cycle[:_LISTED]))
        path += " -> ..." if len(cycle) > _LISTED else f" -> {cycle[0]}"
        raise CyclicOrder(f"arcs: operations {path} form a cycle", cycle)
    return Arcs(tail, head, lag, distance)


def _check_period(period: Any, values: dict[str, Any]) -> None:
    if period is None:
        # a one-shot trace may carry the training iteration of a block, never an offset
        if (i := _first(values["offset"] > 0)) is not None:
            raise InputError(
                f"operations[{i}].offset: {values['offset'][i]}, but the schedule has no period"
            )
        return
    integer("period", period, 1)
    if (i := _first(values["release"] > 0)) is not None:
        raise InputError(f"operations[{i}].release: not allowed in a periodic schedule")
    if (i := _first(values["deadline"] != NO_DEADLINE)) is not None:
        raise InputError(f"operations[{i}].deadline: not allowed in a periodic schedule")


def _goal(given: Any, period: Any, values: dict[str, Any], latest: int) -> Goal | None:
    if given is None:
        return None
    if not isinstance(given, Goal):
        raise InputError(f"goal: expected a Goal, got {format_value(given)}")
    if period is not None:
        raise InputError("goal: not allowed in a periodic schedule, whose objective is the period")
    n_jobs = int(values["job"].max(initial=-1)) + 1
    goal = graph_goal(goal_of(n_jobs, *given))
    if goal is not None and not n_jobs:
        raise InputError(f"goal: {goal.objective} needs at least one operation")
    if goal is not None:
        check_sums(goal, n_jobs, latest)
    return goal


def _check_sums(values: dict[str, Any]) -> int:
    """Refuse sums beyond 2^53, so that no kernel can overflow; returns the sum of times."""
    lag = values["arcs"].lag
    parts = [values["duration"], values["setup_in"], values["setup_out"], lag[lag > 0]]
    total = sum(_exact_sum(part) for part in parts) + int(values["release"].max(initial=0))
    if total > MAX_INTEGER:
        raise InputError(f"operations: times add up to {total}, more than 2^53")
    for key in ("acquire", "free", "workspace"):
        if (size := _exact_sum(values[key])) > MAX_INTEGER:
            raise InputError(f"operations: {key} adds up to {size} bytes, more than 2^53")
    return total


def _exact_sum(array: IntArray) -> int:
    """Sum without overflow: of the upper and lower 32 bits separately."""
    return (int((array >> 32).sum()) << 32) + int((array & 0xFFFFFFFF).sum())


def _sequences(given: Any, n: int, resources: tuple[Resource, ...]) -> Csr:
    rows = given if isinstance(given, Csr) else Csr.of(given)
    if len(rows) != len(resources):
        raise InputError(
            f"sequences: expected {len(resources)} rows, one per resource, got {len(rows)}"
        )
    if (k := _first((rows.ids < 0) | (rows.ids >= n))) is not None:
        r = int(np.searchsorted(rows.indptr, k, side="right")) - 1
        raise InputError(f"sequences[{r}]: {rows.ids[k]} is no operation (there are {n})")
    return rows


def _starts(given: Any, n: int, period: int | None) -> IntArray:
    start = _column("starts", given, n)
    limit = MAX_INTEGER if period is None else period - 1
    if (i := _first((start < 0) | (start > limit))) is not None:
        legal = "0..2^53" if period is None else f"0..{limit} (below the period)"
        raise InputError(f"starts[{i}]: expected {legal}, got {start[i]}")
    return start


def _objective(given: Any) -> Objective:
    if not isinstance(given, Objective):
        raise InputError(f"objective: expected an Objective, got {format_value(given)}")
    for key, number in (("value", given.value), ("lower_bound", given.lower_bound)):
        if number is not None:
            integer(f"objective.{key}", number, -MAX_INTEGER)
    one_of("objective.status", given.status, STATUSES)
    value, bound = given.value, given.lower_bound
    if value is not None and bound is not None and bound > value:
        raise InputError(f"objective.lower_bound: {bound} is above the value {value}")
    if given.status == "optimal" and value != bound:
        raise InputError(
            f'objective.status: "optimal" needs lower_bound == value, got {bound}, {value}'
        )
    return Objective(
        label("objective.name", given.name),
        None if value is None else int(value),
        None if bound is None else int(bound),
        given.status,
    )
