"""Columns of a workload: their ranges, checks, and how they are made from jobs."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import fields
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from optsched.cluster.workload.curve import Curve
from optsched.cluster.workload.job import (
    CONTROL,
    MOST_AMOUNT,
    MOST_RATE,
    MOST_SPEED,
    MOST_WORK,
    Job,
    ascending,
    line,
    rates,
)
from optsched.errors import InputError
from optsched.io.strict_json import MAX_INTEGER
from optsched.io.values import MAX_NAME, boolean, format_value, integer, label, number, one_of
from optsched.model.schedule import TIME_UNITS

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    import numpy.typing as npt

    from optsched.cluster.workload.speedup import Speedup
    from optsched.cluster.workload.workload import Group, Workload
    from optsched.model.schedule import IntArray


class Column(NamedTuple):
    """Type and range of a column with one value per job, and the value of one left out."""

    type: type
    least: float = -math.inf
    most: float = math.inf
    default: Any = None
    above: bool = False
    """Whether `least` itself is excluded."""


COLUMNS: Final = {
    "submit": Column(int, 0, MAX_INTEGER, 0),
    "work": Column(int, 1, MOST_WORK),
    "estimate": Column(int, 1, MOST_WORK),
    "passes": Column(int, 1, MAX_INTEGER, 1),
    "pass_work": Column(int, 1, MOST_WORK),
    "priority": Column(int, 1, 99, 50),
    "weight": Column(float, 0, math.inf, 1.0, above=True),
    "group": Column(int, 0, MAX_INTEGER, 0),
    "preemptible": Column(bool, default=True),
    "restart_cost": Column(int, -1, MAX_INTEGER, -1),
    "template": Column(int, -1, MAX_INTEGER, -1),
    "speedup": Column(int, 0, MAX_INTEGER, 0),
    "cpus_per_gpu": Column(float, 0, MOST_AMOUNT, 0.0),
    "memory_per_gpu_gb": Column(float, 0, MOST_AMOUNT, 0.0),
    "target": Column(float, default=math.nan),
    "initial": Column(float, default=math.nan),
    "source": Column(str, default=""),
}
"""`estimate` is `work` and `pass_work` ceil(work / passes) if they are left out."""

_ROWS: Final = {"size": "size_ptr", "rate": "size_ptr", "observed": "observed_ptr"}


# checks


def checked(w: Workload) -> dict[str, Any]:
    """Read-only columns of the right types and ranges; `InputError` names job and column."""
    names = tuple(w.names)
    n = len(names)
    if n == 0:
        raise InputError("jobs: empty; a workload has at least one job")
    label("name", w.name)
    one_of("time_unit", w.time_unit, TIME_UNITS)
    _check_names(names)
    found: dict[str, Any] = {"names": names}
    for key, rule in COLUMNS.items():
        given = getattr(w, key)
        if given is None:
            given = {"estimate": found.get("work"), "pass_work": None}.get(key)
            if key == "pass_work":
                given = -(-found["work"] // found["passes"])
            elif given is None:
                given = np.full(n, rule.default)
        found[key] = column(key, given, names)
    for key in ("size_ptr", "size", "rate", "observed_ptr"):
        given = getattr(w, key)
        found[key] = flat(key, np.zeros(n + 1, np.int64) if given is None else given, "iu")
    found["observed"] = flat("observed", () if w.observed is None else w.observed, "iuf")
    short = found["passes"] > found["work"]
    if short.any():
        i = int(np.argmax(short))
        what = f"{found['passes'][i]} passes of less than one unit of work"
        raise InputError(f"{_job(names, i)}passes: {what}")
    found["types"] = tuple(line("types", kind, empty=False) for kind in w.types)
    found["speeds"] = _speeds(w, found["types"], names)
    for text in found["source"][[bool(CONTROL.search(t)) for t in found["source"].tolist()]]:
        line("source", text)
    _check_rows(found, n)
    for key, values in (("group", w.groups), ("template", w.templates), ("speedup", w.speedups)):
        if found[key].max() >= len(values):
            raise InputError(f"{key}: {found[key].max()} but there are {len(values)} of them")
    _check_times(found, names)
    for g, group in enumerate(w.groups):
        _check_group(f"groups[{g}]", group)
    for k, template in enumerate(w.templates):
        line(f"templates[{k}]", template)
    return found | {"groups": tuple(w.groups), "templates": tuple(w.templates)}


def _job(names: Sequence[str], i: int) -> str:
    return f"job {format_value(names[i])}: "


def _check_names(names: tuple[Any, ...]) -> None:
    """Refuse names that are empty, long or repeated, a million of them in one search."""
    try:
        text = "".join(names)
        valid = "" not in names and not CONTROL.search(text) and max(map(len, names)) <= MAX_NAME
        text.encode()
    except (TypeError, UnicodeEncodeError):
        valid = False
    if not valid:
        for i, name in enumerate(names):
            line(f"jobs[{i}].name", name, empty=False)
    if len(set(names)) < len(names):
        first: dict[str, int] = {}
        twice = next(i for i, name in enumerate(names) if first.setdefault(name, i) != i)
        raise InputError(f"jobs[{twice}].name: {format_value(names[twice])} is there twice")


def column(key: str, given: Any, names: Sequence[str]) -> npt.NDArray[Any]:
    """One value per job, read-only; the value of a job is refused with its name."""
    rule = COLUMNS[key]
    if rule.type is str:
        return _frozen(np.asarray(given, np.str_), key, len(names))
    if isinstance(given, (list, tuple)) and len(given) == len(names):
        exact = {int, float} if rule.type is float else {rule.type}
        if not set(map(type, given)) <= exact:
            given = [_value(key, value, names, i) for i, value in enumerate(given)]
    array = flat(key, given, {int: "iu", float: "iuf", bool: "b"}[rule.type])
    array = _frozen(array, key, len(names))
    bad = array <= rule.least if rule.above else array < rule.least
    if rule.least > -math.inf:
        bad |= ~(array <= rule.most) | (np.isinf(array) if rule.type is float else False)
    if bad.any():
        _value(key, array[int(np.argmax(bad))], names, int(np.argmax(bad)))
    return array


def _value(key: str, value: Any, names: Sequence[str], i: int) -> Any:
    rule, place = COLUMNS[key], f"{_job(names, i)}{key}"
    if rule.type is bool:
        return boolean(place, value)
    if rule.type is int:
        return integer(place, value, int(rule.least), int(rule.most))
    return number(place, value, rule.least, rule.most, above=rule.above)


def flat(key: str, given: Any, kinds: str) -> npt.NDArray[Any]:
    """A read-only array of one dimension, of integers or floats."""
    what = {"iu": "integers", "b": "truth values"}.get(kinds, "numbers")
    try:
        array = np.asarray(given)
    except (ValueError, OverflowError):
        raise InputError(f"{key}: expected a flat array of {what}") from None
    if array.size == 0 and array.dtype.kind == "f":
        array = array.astype(np.int64)
    if array.dtype.kind not in kinds or array.ndim != 1:
        raise InputError(f"{key}: expected a flat array of {what}, got {array.dtype} values")
    wide = {"iu": np.int64, "b": np.bool_}.get(kinds, np.float64)
    return _frozen(array.astype(wide, copy=False), key)


def _frozen(array: npt.NDArray[Any], key: str, n: int | None = None) -> npt.NDArray[Any]:
    """Read-only and contiguous; a writable array is copied."""
    if array.ndim != 1 or (n is not None and len(array) != n):
        raise InputError(f"{key}: expected {n} values, one per job, got shape {array.shape}")
    if array.flags.writeable or not array.flags.c_contiguous:
        array = np.array(array, order="C")
        array.flags.writeable = False
    return array


def _speeds(w: Workload, types: tuple[str, ...], names: Sequence[str]) -> npt.NDArray[np.float64]:
    speeds = np.array(() if w.speeds is None else w.speeds, np.float64)
    speeds = speeds.reshape(-1, max(1, len(types)))
    if speeds.shape[0] != len(names) * bool(types) or len(set(types)) < len(types):
        raise InputError(f"speeds: expected {len(names)} rows for {len(types)} distinct types")
    bad = np.argwhere(~((speeds >= 0) & (speeds <= MOST_SPEED)))
    for i, t in bad[:1].tolist():
        place = f"{_job(names, i)}speeds[{format_value(types[t])}]"
        number(place, float(speeds[i, t]), 0.0, MOST_SPEED)
    speeds.flags.writeable = False
    return speeds.reshape(len(names), len(types))


def _check_rows(found: dict[str, Any], n: int) -> None:
    for key, values in (("size_ptr", "size"), ("observed_ptr", "observed")):
        ptr = found[key]
        if len(ptr) != n + 1 or ptr[0] != 0 or (np.diff(ptr) < 0).any():
            raise InputError(f"{key}: expected {n + 1} ascending numbers from 0")
        if ptr[-1] != len(found[values]):
            raise InputError(f"{key}: ends with {ptr[-1]}, there are {len(found[values])} values")
    if len(found["rate"]) != len(found["size"]):
        raise InputError("rate: expected one for every size")
    if (np.diff(found["size_ptr"]) == 0).any():
        raise InputError("size: empty row; every job has a size ((0,) for a task without GPUs)")
    size, rate, first = found["size"], found["rate"], found["size_ptr"][:-1]
    rising = np.diff(size) > 0
    rising[first[1:] - 1] = True
    alone = np.repeat(np.diff(found["size_ptr"]) == 1, np.diff(found["size_ptr"]))
    if not rising.all() or (size < 0).any() or ((size == 0) & ~alone).any():
        raise InputError("size: expected ascending sizes in every row, 0 only alone")
    if (rate < 1).any() or (rate > MOST_RATE).any():
        raise InputError("rate: expected 1..2^53")


def _check_times(found: dict[str, Any], names: tuple[str, ...]) -> None:
    """Refuse an order that is not by submit time, and amounts that could overflow in a kernel."""
    if (np.diff(found["submit"]) < 0).any():
        raise InputError("submit: not ascending; a workload is sorted by submit time")
    slowest = np.minimum.reduceat(found["rate"], found["size_ptr"][:-1])
    speeds = found["speeds"]
    if speeds.size:
        least = np.where(speeds > 0, speeds, 1.0).min(1, initial=1.0)
        slowest = np.maximum(slowest * least, 1).astype(np.int64)
    longest = -(-found["work"] // slowest)
    late = found["submit"] > MAX_INTEGER - longest
    if late.any():
        i = int(np.argmax(late))
        raise InputError(
            f"{_job(names, i)}takes {longest[i]} units of time after {found['submit'][i]} "
            "and would end beyond 2^53"
        )
    total = float(longest.sum(dtype=np.float64)) + float(found["submit"][-1])
    if total > MAX_INTEGER:
        raise InputError(
            f"jobs: take {total:.3g} units of time one after the other, more than 2^53; "
            "use a coarser time_unit"
        )
    widest = found["size"][found["size_ptr"][1:] - 1]
    if float((widest * longest.astype(np.float64)).sum()) > MOST_WORK:
        raise InputError("jobs: their GPUs times their times add up to more than 2^62")


def _check_group(place: str, group: Group) -> None:
    line(f"{place}.name", group.name)
    number(f"{place}.weight", group.weight)
    if group.max_slots is not None:
        integer(f"{place}.max_slots", group.max_slots)
    if group.max_concurrent is not None:
        integer(f"{place}.max_concurrent", group.max_concurrent, 1)
    if group.priority is not None:
        integer(f"{place}.priority", group.priority, 1, 99)


# from jobs and back


def columns_of(jobs: Iterable[Job], groups: Sequence[Group], seed: int) -> dict[str, Any]:
    """Columns of jobs, sorted by submit time; what cannot become a column is refused."""
    integer("seed", seed)
    if isinstance(jobs, (str, bytes)) or not hasattr(jobs, "__iter__"):
        raise InputError(f"jobs: expected a list of Job, got {format_value(jobs)}")
    rows = list(jobs)
    for i, job in enumerate(rows):
        if not isinstance(job, Job):
            raise InputError(f"jobs[{i}]: expected a Job, got {format_value(job)}")
        line(f"jobs[{i}].name", job.name, empty=False)
    names = [job.name for job in rows]
    submit = column("submit", [job.submit for job in rows], names)
    rows = [rows[i] for i in np.argsort(submit, kind="stable").tolist()]
    names = [job.name for job in rows]
    listed = {
        key: [getattr(job, key) for job in rows]
        for key in ("submit", "priority", "weight", "preemptible", "cpus_per_gpu",
                    "memory_per_gpu_gb", "group", "template")
    }  # fmt: skip
    for key in ("group", "template"):
        for text in dict.fromkeys(listed[key]):
            line(f"{_job(names, listed[key].index(text))}{key}", text)
    templates = tuple(sorted({*listed["template"]} - {""}))
    number_of = {name: k for k, name in enumerate(templates)} | {"": -1}
    all_groups = grouped(listed["group"], groups)
    at = {group.name: k for k, group in enumerate(all_groups)}
    curves = {i: job.curve for i, job in enumerate(rows) if job.curve is not None}
    reports, passes, work = _passes(rows, curves, seed)
    observed_ptr, observed = csr(reports, np.float64)
    bare = [math.nan] * len(rows)
    target, initial = bare.copy(), bare.copy()
    for i, curve in curves.items():
        initial[i], target[i] = curve.initial, math.nan if curve.target is None else curve.target
    estimate = zip([job.estimate for job in rows], work, strict=True)
    cost = [-1 if job.restart_cost is None else job.restart_cost for job in rows]
    sizes = [ascending(f"{_job(names, i)}sizes", job.sizes) for i, job in enumerate(rows)]
    return {
        **listed, **sized(names, sizes, [job.speedup for job in rows]), **_typed(rows, names),
        "names": tuple(names), "work": work, "passes": passes,
        "estimate": [true if given is None else given for given, true in estimate],
        "group": [at[name] for name in listed["group"]], "groups": all_groups,
        "template": [number_of[name] for name in listed["template"]], "templates": templates,
        "source": listed["template"], "restart_cost": cost,
        "observed_ptr": observed_ptr, "observed": observed, "target": target, "initial": initial,
        "curves": curves,
    }  # fmt: skip


def sized(
    names: Sequence[str], sizes: Sequence[Sequence[int]], speedups: Sequence[Speedup]
) -> dict[str, Any]:
    """Distinct speed-ups, that of every job, and sizes with their rates in CSR form."""
    distinct: dict[Any, int] = {}
    known: dict[tuple[int, tuple[int, ...]], tuple[int, ...]] = {}
    which, rows = [], []
    for i, (one, speedup) in enumerate(zip(sizes, speedups, strict=True)):
        allowed = tuple(one)
        if getattr(speedup, "__hash__", None) is None:
            rates(speedup, allowed, _job(names, i))
        k = distinct.setdefault(speedup, len(distinct))
        which.append(k)
        if (k, allowed) not in known:
            known[k, allowed] = rates(speedup, allowed, _job(names, i))
        rows.append(known[k, allowed])
    size_ptr, size = csr(sizes, np.int64)
    columns = {"speedups": tuple(distinct), "speedup": np.array(which, np.int64)}
    return columns | {"size_ptr": size_ptr, "size": size, "rate": csr(rows, np.int64)[1]}


def _typed(rows: Sequence[Job], names: Sequence[str]) -> dict[str, Any]:
    """Types of GPUs that jobs name, and the jobs' speeds there."""
    for i, job in enumerate(rows):
        if not isinstance(job.speeds, Mapping):
            raise InputError(
                f'{_job(names, i)}speeds: expected speeds by type such as {{"A100": 2.0}}, got '
                f"{format_value(job.speeds)}"
            )
        for kind, speed in job.speeds.items():
            number(f"{_job(names, i)}speeds[{format_value(kind)}]", speed, 0.0, MOST_SPEED)
    types = tuple(dict.fromkeys(kind for job in rows for kind in job.speeds))
    speeds = [[job.speeds.get(kind, 1.0) for kind in types] for job in rows] if types else None
    return {"types": types, "speeds": speeds}


def grouped(names: Iterable[str], given: Sequence[Group]) -> tuple[Group, ...]:
    """The groups given, then those that jobs name, in the order in which their jobs come."""
    from optsched.cluster.workload.workload import Group

    known: dict[str, Group] = {}
    for g, group in enumerate(given):
        if not isinstance(group, Group):
            raise InputError(f"groups[{g}]: expected a Group, got {format_value(group)}")
        if group.name in known:
            raise InputError(f"groups[{g}].name: {format_value(group.name)} is there twice")
        known[group.name] = group
    for name in dict.fromkeys(names):
        known.setdefault(name, Group(name))
    return tuple(known.values())


def _passes(
    rows: Sequence[Job], curves: Mapping[int, Any], seed: int
) -> tuple[list[list[float]], list[Any], list[Any]]:
    """Reports, true passes, and true work of every job."""
    reports: list[list[float]] = [[] for _ in rows]
    passes, work = [job.passes for job in rows], [job.work for job in rows]
    for i, curve in curves.items():
        job, place = rows[i], f"job {format_value(rows[i].name)}: "
        if not isinstance(curve, Curve):
            raise InputError(f"{place}curve: expected a Curve, got {format_value(curve)}")
        integer(f"{place}passes of a job with a curve", job.passes, 1, 10**6)
        if curve.target is None:
            reports[i] = curve.reported(job.passes, seed, job.name).tolist()
            continue
        try:
            reports[i] = curve.reached(seed, job.name).tolist()
        except InputError as error:
            raise InputError(f"{place}{error.args[0]}") from None
        passes[i] = len(reports[i])
        if passes[i] != job.passes:
            total = -(-integer(f"{place}work", job.work, 1, MOST_WORK) // job.passes) * passes[i]
            work[i] = integer(f"{place}work until the target", total, 1, MOST_WORK)
    return reports, passes, work


def job_of(w: Workload, i: int) -> Job:
    """The job that gives this row; with a target, its true number of passes."""
    copied = ("submit", "work", "passes", "estimate", "priority", "weight", "preemptible",
             "cpus_per_gpu", "memory_per_gpu_gb")  # fmt: skip
    template, cost = int(w.template[i]), int(w.restart_cost[i])
    return Job(
        name=w.names[i],
        sizes=tuple(w.sizes_of(i).tolist()),
        speedup=w.speedups[int(w.speedup[i])],
        curve=w.curves.get(i),
        group=w.groups[int(w.group[i])].name,
        restart_cost=None if cost < 0 else cost,
        template="" if template < 0 else w.templates[template],
        speeds=dict(zip(w.types, w.speeds[i].tolist(), strict=True)),
        **{key: getattr(w, key)[i].item() for key in copied},
    )


def taken(workload: Workload, jobs: npt.ArrayLike) -> dict[str, Any]:
    """Columns of some jobs, in their present order."""
    chosen = np.asarray(jobs)
    if chosen.size == 0:
        raise InputError("jobs: none chosen; a workload has at least one")
    if chosen.dtype == np.bool_ and chosen.shape == (len(workload),):
        chosen = np.flatnonzero(chosen)
    if chosen.ndim != 1 or chosen.dtype.kind not in "iu":
        raise InputError("jobs: expected numbers of jobs, or one truth value per job")
    if chosen.min(initial=0) < 0 or chosen.max(initial=0) >= len(workload):
        raise InputError(f"jobs: expected numbers in 0..{len(workload) - 1}")
    chosen = np.sort(chosen)
    columns: dict[str, Any] = {}
    for f in fields(workload):
        value = getattr(workload, f.name)
        if f.name in _ROWS:
            ptr = getattr(workload, _ROWS[f.name])
            length = np.diff(ptr)[chosen]
            begins = np.cumsum(length) - length
            value = value[np.repeat(ptr[chosen] - begins, length) + np.arange(length.sum())]
        elif f.name.endswith("_ptr"):
            value = np.concatenate(([0], np.cumsum(np.diff(value)[chosen])))
        elif isinstance(value, np.ndarray):
            value = value[chosen]
        columns[f.name] = value
    columns["names"] = tuple(workload.names[i] for i in chosen.tolist())
    place = {old: new for new, old in enumerate(chosen.tolist())}
    columns["curves"] = {place[i]: c for i, c in workload.curves.items() if i in place}
    return columns


def csr(rows: Sequence[Sequence[Any]], dtype: Any) -> tuple[IntArray, npt.NDArray[Any]]:
    """Rows one after the other, and where each begins."""
    ptr = np.zeros(len(rows) + 1, np.int64)
    np.cumsum([len(row) for row in rows], out=ptr[1:])
    return ptr, np.array([value for row in rows for value in row], dtype)
