"""Columns of a workload: made of jobs, cut, changed, and turned back into a job."""

from __future__ import annotations

from dataclasses import fields
from typing import TYPE_CHECKING, Any

import numpy as np

from optsched.cluster.workload.checks import ints
from optsched.cluster.workload.job import Job, rates
from optsched.cluster.workload.job_checks import AMOUNTS, MOST_WORK
from optsched.cluster.workload.workload import Group, Workload, csr
from optsched.errors import InputError
from optsched.io.values import format_value, integer

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    import numpy.typing as npt

    from optsched.cluster.workload.speedup import Speedup
    from optsched.model.schedule import IntArray


def columns_of(jobs: Iterable[Job], groups: Sequence[Group], seed: int) -> dict[str, Any]:
    """Columns of jobs, sorted by submit time; `InputError` names the job."""
    integer("seed", seed)
    if isinstance(jobs, (str, bytes)) or not hasattr(jobs, "__iter__"):
        raise InputError(f"jobs: expected a list of Job, got {format_value(jobs)}")
    rows = list(jobs)
    for i, job in enumerate(rows):
        if not isinstance(job, Job):
            raise InputError(f"jobs[{i}]: expected a Job, got {format_value(job)}")
    rows.sort(key=lambda job: job.submit)
    n = len(rows)
    names = tuple(job.name for job in rows)
    templates = tuple(sorted({job.template for job in rows} - {""}))
    types = tuple(dict.fromkeys(kind for job in rows for kind in job.speeds))
    number = {name: k for k, name in enumerate(templates)} | {"": -1}
    speedups, speedup, size_ptr, size, rate = sized(
        names, [job.sizes for job in rows], [job.speedup for job in rows]
    )
    group_names = [job.group for job in rows]
    all_groups = grouped(group_names, groups)
    at = {group.name: k for k, group in enumerate(all_groups)}
    curves = {i: job.curve for i, job in enumerate(rows) if job.curve is not None}
    reports, passes, work = _passes(rows, seed)
    observed_ptr, observed = csr(reports, np.float64)
    estimate = [
        w if job.estimate is None else job.estimate for job, w in zip(rows, work, strict=True)
    ]
    target, initial = np.full(n, np.nan), np.full(n, np.nan)
    for i, curve in curves.items():
        initial[i] = curve.initial
        target[i] = np.nan if curve.target is None else curve.target
    costs = [-1 if job.restart_cost is None else job.restart_cost for job in rows]
    return {
        "names": names,
        "submit": np.array([job.submit for job in rows], np.int64),
        "work": work,
        "estimate": np.array(estimate, np.int64),
        "passes": passes,
        "pass_work": -(-work // passes),
        "size_ptr": size_ptr,
        "size": size,
        "rate": rate,
        "priority": np.array([job.priority for job in rows], np.int64),
        "weight": np.array([job.weight for job in rows]),
        "group": np.array([at[name] for name in group_names], np.int64),
        "groups": all_groups,
        "preemptible": np.array([job.preemptible for job in rows], np.bool_),
        "restart_cost": np.array(costs, np.int64),
        "template": np.array([number[job.template] for job in rows], np.int64),
        "templates": templates,
        "observed_ptr": observed_ptr,
        "observed": observed,
        "target": target,
        "initial": initial,
        "source": np.array([job.template for job in rows], np.str_),
        **{key: np.array([getattr(job, key) for job in rows]) for key in AMOUNTS},
        "types": types,
        "speeds": np.array([[job.speeds.get(kind, 1.0) for kind in types] for job in rows]),
        "speedup": speedup,
        "speedups": speedups,
        "curves": curves,
    }


def sized(
    names: Sequence[str], sizes: Sequence[tuple[int, ...]], speedups: Sequence[Speedup]
) -> tuple[tuple[Speedup, ...], IntArray, IntArray, IntArray, IntArray]:
    """Distinct speed-ups, that of every job, and sizes with their rates in CSR form."""
    distinct: dict[Speedup, int] = {}
    known: dict[tuple[int, tuple[int, ...]], tuple[int, ...]] = {}
    which, rows = [], []
    for name, allowed, speedup in zip(names, sizes, speedups, strict=True):
        k = distinct.setdefault(speedup, len(distinct))
        which.append(k)
        if (k, allowed) not in known:
            known[k, allowed] = rates(speedup, allowed, f"job {format_value(name)}: ")
        rows.append(known[k, allowed])
    size_ptr, size = csr(sizes, np.int64)
    _, rate = csr(rows, np.int64)
    return tuple(distinct), np.array(which, np.int64), size_ptr, size, rate


def grouped(names: Sequence[str], given: Sequence[Group]) -> tuple[Group, ...]:
    """The groups given, then those that jobs name, in the order in which their jobs come."""
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


def _passes(rows: Sequence[Job], seed: int) -> tuple[list[list[float]], IntArray, IntArray]:
    """Reports, true passes, and true work of every job."""
    reports: list[list[float]] = []
    passes = np.array([job.passes for job in rows], np.int64)
    work = np.array([job.work for job in rows], np.int64)
    for i, job in enumerate(rows):
        if job.curve is None:
            reports.append([])
            continue
        if job.curve.target is None:
            integer(
                f"job {format_value(job.name)}: passes of a job with a curve", job.passes, 1, 10**6
            )
            reports.append(job.curve.reported(job.passes, seed, job.name).tolist())
            continue
        try:
            found = job.curve.reached(seed, job.name)
        except InputError as error:
            raise InputError(f"job {format_value(job.name)}: {error.args[0]}") from None
        reports.append(found.tolist())
        passes[i] = len(found)
        if len(found) != job.passes:
            total = -(-job.work // job.passes) * len(found)
            work[i] = integer(
                f"job {format_value(job.name)}: work until the target", total, 1, MOST_WORK
            )
    return reports, passes, work


def job_of(workload: Workload, i: int) -> Job:
    """The job that gives this row; for a target job with its true number of passes."""
    w = workload
    template, cost = int(w.template[i]), int(w.restart_cost[i])
    return Job(
        name=w.names[i],
        submit=int(w.submit[i]),
        sizes=tuple(w.sizes_of(i).tolist()),
        work=int(w.work[i]),
        speedup=w.speedups[int(w.speedup[i])],
        passes=int(w.passes[i]),
        curve=w.curves.get(i),
        priority=int(w.priority[i]),
        weight=float(w.weight[i]),
        group=w.groups[int(w.group[i])].name,
        preemptible=bool(w.preemptible[i]),
        restart_cost=None if cost < 0 else cost,
        template="" if template < 0 else w.templates[template],
        estimate=int(w.estimate[i]),
        speeds=dict(zip(w.types, w.speeds[i].tolist(), strict=True)),
        cpus_per_gpu=float(w.cpus_per_gpu[i]),
        memory_per_gpu_gb=float(w.memory_per_gpu_gb[i]),
    )


_ROWS = {"size": "size_ptr", "rate": "size_ptr", "observed": "observed_ptr"}


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
            value = value[_entries(ptr, chosen)]
        elif f.name.endswith("_ptr"):
            value = np.concatenate(([0], np.cumsum(np.diff(value)[chosen])))
        elif isinstance(value, np.ndarray):
            value = value[chosen]
        columns[f.name] = value
    columns["names"] = tuple(workload.names[i] for i in chosen.tolist())
    place = {old: new for new, old in enumerate(chosen.tolist())}
    columns["curves"] = {place[i]: c for i, c in workload.curves.items() if i in place}
    return columns


def _entries(ptr: IntArray, rows: IntArray) -> IntArray:
    """Positions of the entries of these rows, one row after the other."""
    length = np.diff(ptr)[rows]
    begins = np.repeat(ptr[rows] - np.concatenate(([0], np.cumsum(length)[:-1])), length)
    return np.asarray(begins + np.arange(length.sum()), np.int64)


def followed(workload: Workload, columns: Mapping[str, Any]) -> dict[str, Any]:
    """All columns, some of them other, and what follows from those."""
    new = {f.name: getattr(workload, f.name) for f in fields(workload)} | dict(columns)
    given = set(columns)
    n = len(workload)
    for key in given & {"work", "passes"}:  # `pass_work` is made of them
        new[key] = ints(key, new[key], n)
    cut = bool(given & {"work", "passes"}) and new["passes"].min(initial=1) > 0
    if cut and "pass_work" not in given:
        new["pass_work"] = -(-new["work"] // new["passes"])
    return new


__all__ = ["columns_of", "grouped", "job_of", "sized", "taken"]
