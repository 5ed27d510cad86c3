"""Jobs as columns: what the simulator reads."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, NamedTuple, overload

import numpy as np

from optsched.cluster.workload.columns import COLUMNS, checked, column, csr, picked
from optsched.cluster.workload.curve import Curve
from optsched.cluster.workload.job import (
    MOST_RATE,
    MOST_SPEED,
    MOST_WORK,
    Job,
    ascending,
    line,
    rates,
)
from optsched.errors import InputError
from optsched.io.values import format_value, integer, number

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    import numpy.typing as npt

    from optsched.cluster.workload.speedup import Speedup
    from optsched.model.schedule import IntArray


class Group(NamedTuple):
    """A group of jobs: a user, a queue, an experiment.

    `max_slots` bounds the GPUs of its running jobs, under policies that honour it (`fair_share`;
    `simulate` refuses it for others); `max_concurrent` how many of its unfinished tasks (the first,
    by submit time) policies see at all; `priority` 1 to 99 goes before the jobs'.
    """

    name: str
    weight: float = 1.0
    max_slots: int | None = None
    max_concurrent: int | None = None
    priority: int | None = None


_LATER: Any = None
"""Default of columns that `columns.checked` fills."""

_COPIED = ("submit", "priority", "weight", "preemptible", "cpus_per_gpu", "memory_per_gpu_gb")
"""Columns that are fields of jobs."""


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class Workload:
    """All jobs of a simulation, sorted by submit time, then as given (traces: by id).

    Columns have one value per job and are read-only; rows of sizes are in CSR form. Made by
    `Workload.of`, `read_trace`, `synthetic` or `entropy_workload`.
    """

    name: str = ""
    time_unit: str = "s"
    names: tuple[str, ...]
    submit: IntArray
    work: IntArray
    """True total work (for target jobs: until the curve is at the target)."""
    size_ptr: IntArray
    size: IntArray
    rate: IntArray
    """round(`WORK` * f(size)) beside every size; `WORK` beside size 0 (zero-slot tasks)."""
    speedups: tuple[Speedup, ...]
    speedup: IntArray = _LATER
    groups: tuple[Group, ...] = ()
    group: IntArray = _LATER
    estimate: IntArray = _LATER
    """Estimated total work: what policies see that are not clairvoyant."""
    passes: IntArray = _LATER
    """True number of passes."""
    pass_work: IntArray = _LATER
    """ceil(work / passes): pass p ends when min(p * pass_work, work) is done."""
    priority: IntArray = _LATER
    weight: npt.NDArray[np.float64] = _LATER
    preemptible: npt.NDArray[np.bool_] = _LATER
    restart_cost: IntArray = _LATER
    """-1: that of the simulation."""
    templates: tuple[str, ...] = ()
    template: IntArray = _LATER
    """-1: none."""
    observed_ptr: IntArray = _LATER
    observed: npt.NDArray[np.float64] = _LATER
    """Uncertainty that every job will report after each pass (CSR by job; none: empty row)."""
    target: npt.NDArray[np.float64] = _LATER
    """Uncertainty at which the job is done; NaN if it does not end so."""
    initial: npt.NDArray[np.float64] = _LATER
    """Uncertainty before the first pass; NaN without a curve."""
    source: npt.NDArray[np.str_] = _LATER
    """Free text of the trace's column ``type``; the template of jobs made one by one."""
    cpus_per_gpu: npt.NDArray[np.float64] = _LATER
    memory_per_gpu_gb: npt.NDArray[np.float64] = _LATER
    """Needed beside every GPU; 0: nothing."""
    types: tuple[str, ...] = ()
    speeds: npt.NDArray[np.float64] = _LATER
    """(jobs, types): factor on the speed on every type of GPU, 0: not on that one; 1 on others."""
    curves: Mapping[int, Curve] = field(default_factory=dict)
    """Curve of every job that has one, by its number."""

    def __post_init__(self) -> None:
        self.__dict__.update(checked(self.__dict__))

    @classmethod
    def of(
        cls,
        jobs: Iterable[Job],
        *,
        groups: Sequence[Group] = (),
        time_unit: str = "s",
        name: str = "",
        seed: int = 0,
    ) -> Workload:
        """Columns of these jobs.

        Parameters
        ----------
        jobs
            Any order; they are sorted by submit time, equal times in the order given.
        groups
            Groups with a weight, limits or a priority; those that only jobs name are added.
        time_unit
            ``"s"``, ``"ms"``, ``"us"`` or ``"ns"``.
        name
            Label.
        seed
            Of the noise of curves; the noise of a job depends on its name, not on its place.

        Raises
        ------
        InputError
            No job, two of one name, a target that is never reached, or times that could overflow.
        """
        return cls(**_columns_of(jobs, groups, seed), time_unit=time_unit, name=name)

    def __len__(self) -> int:
        return len(self.submit)

    def __iter__(self) -> Iterator[Job]:
        return (self[i] for i in range(len(self)))

    @overload
    def __getitem__(self, key: int) -> Job: ...
    @overload
    def __getitem__(self, key: slice) -> Workload: ...
    def __getitem__(self, key: int | slice) -> Job | Workload:
        """One job, or the workload of a slice of them."""
        if isinstance(key, slice):
            return self.take(np.arange(len(self))[key])
        try:
            i = range(len(self))[key]
        except TypeError:
            what = f"expected a number or a slice, got {format_value(key)}"
            raise InputError(f"workload: {what}") from None
        template, cost = int(self.template[i]), int(self.restart_cost[i])
        copied = (*_COPIED, "work", "passes", "estimate")
        return Job(
            name=self.names[i],
            sizes=tuple(self.sizes_of(i).tolist()),
            speedup=self.speedups[int(self.speedup[i])],
            curve=self.curves.get(i),
            group=self.groups[int(self.group[i])].name,
            restart_cost=None if cost < 0 else cost,
            template="" if template < 0 else self.templates[template],
            speeds=dict(zip(self.types, self.speeds[i].tolist(), strict=True)),
            **{name: getattr(self, name)[i].item() for name in copied},
        )

    def take(self, jobs: npt.ArrayLike) -> Workload:
        """The workload of these jobs (numbers, or a mask), in their present order."""
        chosen = np.asarray(jobs)
        if chosen.size == 0:
            raise InputError("jobs: none chosen; a workload has at least one")
        if chosen.dtype == np.bool_ and chosen.shape == (len(self),):
            chosen = np.flatnonzero(chosen)
        if chosen.ndim != 1 or chosen.dtype.kind not in "iu":
            raise InputError("jobs: expected numbers of jobs, or one truth value per job")
        if chosen.min(initial=0) < 0 or chosen.max(initial=0) >= len(self):
            raise InputError(f"jobs: expected numbers in 0..{len(self) - 1}")
        chosen = np.sort(chosen)
        new: dict[str, Any] = {f.name: getattr(self, f.name) for f in fields(self)}
        new |= {key: new[key][chosen] for key in (*COLUMNS, "speeds")}
        for key, ptr in (("size", "size_ptr"), ("rate", "size_ptr"), ("observed", "observed_ptr")):
            new[ptr], new[key] = picked(getattr(self, ptr), new[key], chosen)
        new["names"] = tuple(self.names[i] for i in chosen.tolist())
        place = {old: k for k, old in enumerate(chosen.tolist())}
        new["curves"] = {place[i]: c for i, c in self.curves.items() if i in place}
        return Workload(**new)

    def with_estimate_error(self, sigma: float, seed: int) -> Workload:
        """Multiply every estimate by a seeded lognormal factor exp(sigma * normal).

        Parameters
        ----------
        sigma
            Standard deviation of the factor's logarithm, in [0, 10].
        seed
            Of the factors.
        """
        sigma = number("sigma", sigma, 0.0, 10.0)
        random = np.random.default_rng(integer("seed", seed))
        factor = np.exp(sigma * random.standard_normal(len(self)))
        most = float(MOST_WORK)
        scaled = np.clip(np.rint(self.estimate * factor), 1, most).astype(np.int64)
        return self.changed(estimate=np.where(factor == 1, self.estimate, scaled))

    def changed(self, **columns: Any) -> Workload:
        """The same workload with other columns, checked again.

        With `work` or `passes` the `pass_work` follows unless it is given too.
        """
        known = {f.name for f in fields(self)}
        for key in columns:
            if key not in known:
                raise InputError(
                    f"workload: no column {format_value(key)} (there are "
                    f"{', '.join(sorted(known))})"
                )
        new = {f.name: getattr(self, f.name) for f in fields(self)} | columns
        if columns.keys() & {"work", "passes"} and "pass_work" not in columns:
            new["pass_work"] = None
        return Workload(**new)

    def sizes_of(self, job: int) -> IntArray:
        """Allowed sizes of a job, ascending."""
        return self.size[self.size_ptr[job] : self.size_ptr[job + 1]]

    def rates_of(self, job: int) -> IntArray:
        """Speeds at these sizes, in work per unit of time."""
        return self.rate[self.size_ptr[job] : self.size_ptr[job + 1]]

    def rates_on(self, kind: str) -> IntArray:
        """`rate` on a type of GPU: times the jobs' speeds, rounded, at least 1; 0 if not there."""
        if kind not in self.types:
            return self.rate
        speed = np.repeat(self.speeds[:, self.types.index(kind)], np.diff(self.size_ptr))
        rate = np.clip(np.rint(self.rate * speed), 1, MOST_RATE).astype(np.int64)
        return np.asarray(np.where(speed > 0, rate, 0), np.int64)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Workload):
            return NotImplemented
        for f in fields(self):
            mine, its = getattr(self, f.name), getattr(other, f.name)
            if isinstance(mine, np.ndarray):
                nan = mine.dtype.kind == "f"
                if not np.array_equal(mine, its, equal_nan=nan):
                    return False
            elif mine != its:
                return False
        return True

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        span = f"{self.submit[0]}..{self.submit[-1]} {self.time_unit}"
        return f"<Workload {self.name!r}: {len(self)} jobs, submitted {span}>"


# columns from jobs


def _columns_of(jobs: Iterable[Job], groups: Sequence[Group], seed: int) -> dict[str, Any]:
    """Columns of jobs, sorted by submit time; what cannot become a column is refused."""
    integer("seed", seed)
    if isinstance(jobs, (str, bytes)) or not hasattr(jobs, "__iter__"):
        raise InputError(f"jobs: expected a list of Job, got {format_value(jobs)}")
    rows = list(jobs)
    for i, job in enumerate(rows):
        if not isinstance(job, Job):
            raise InputError(f"jobs[{i}]: expected a Job, got {format_value(job)}")
        line(f"jobs[{i}].name", job.name, empty=False)
    submit = column("submit", [job.submit for job in rows], [job.name for job in rows])
    rows = [rows[i] for i in np.argsort(submit, kind="stable").tolist()]
    names = [job.name for job in rows]
    places = [f"job {format_value(name)}: " for name in names]
    for key in ("group", "template"):
        for text in dict.fromkeys(getattr(job, key) for job in rows):
            line(key, text)
    templates = tuple(sorted({job.template for job in rows} - {""}))
    number_of = {name: k for k, name in enumerate(templates)} | {"": -1}
    all_groups = grouped([job.group for job in rows], groups)
    at = {group.name: k for k, group in enumerate(all_groups)}
    curves = {i: job.curve for i, job in enumerate(rows) if job.curve is not None}
    reports, passes, work = _passes(rows, places, seed)
    observed_ptr, observed = csr(reports, np.float64)
    target, initial = np.full((2, len(rows)), np.nan)
    for i, curve in curves.items():
        initial[i], target[i] = curve.initial, np.nan if curve.target is None else curve.target
    sizes = [ascending(f"{places[i]}sizes", job.sizes) for i, job in enumerate(rows)]
    return {
        **{key: [getattr(job, key) for job in rows] for key in _COPIED},
        **sized(names, sizes, [job.speedup for job in rows]), **_typed(rows, places),
        "names": tuple(names), "work": work, "passes": passes,
        "estimate": [work[i] if job.estimate is None else job.estimate
                     for i, job in enumerate(rows)],
        "group": [at[job.group] for job in rows], "groups": all_groups,
        "template": [number_of[job.template] for job in rows], "templates": templates,
        "source": [job.template for job in rows],
        "restart_cost": [-1 if job.restart_cost is None else job.restart_cost for job in rows],
        "observed_ptr": observed_ptr, "observed": observed, "target": target, "initial": initial,
        "curves": curves,
    }  # fmt: skip


def sized(
    names: Sequence[str], sizes: Sequence[Sequence[int]], speedups: Sequence[Speedup]
) -> dict[str, Any]:
    """Distinct speed-ups, that of every job, and sizes with their rates in CSR form."""
    distinct: dict[Any, int] = {}
    known: dict[tuple[int, tuple[int, ...]], tuple[int, tuple[int, ...]]] = {}
    for i, (one, speedup) in enumerate(zip(sizes, speedups, strict=True)):
        key = id(speedup), tuple(one)
        if key not in known:
            rate = rates(speedup, key[1], f"job {format_value(names[i])}: ")
            known[key] = distinct.setdefault(speedup, len(distinct)), rate
    rows = [known[id(s), tuple(one)] for one, s in zip(sizes, speedups, strict=True)]
    size_ptr, size = csr(sizes, np.int64)
    return {
        "speedups": tuple(distinct), "speedup": np.array([which for which, _ in rows], np.int64),
        "size_ptr": size_ptr, "size": size, "rate": csr([row for _, row in rows], np.int64)[1],
    }  # fmt: skip


def _typed(rows: Sequence[Job], places: Sequence[str]) -> dict[str, Any]:
    """Types of GPUs that jobs name, and the jobs' speeds there."""
    for place, job in zip(places, rows, strict=True):
        if not isinstance(job.speeds, Mapping):
            what = 'expected speeds by type such as {"A100": 2.0}'
            raise InputError(f"{place}speeds: {what}, got {format_value(job.speeds)}")
        for kind, speed in job.speeds.items():
            number(f"{place}speeds[{format_value(kind)}]", speed, 0.0, MOST_SPEED)
    types = tuple(dict.fromkeys(kind for job in rows for kind in job.speeds))
    speeds = [[job.speeds.get(kind, 1.0) for kind in types] for job in rows] if types else None
    return {"types": types, "speeds": speeds}


def grouped(names: Iterable[str], given: Sequence[Group]) -> tuple[Group, ...]:
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


def _passes(
    rows: Sequence[Job], places: Sequence[str], seed: int
) -> tuple[list[list[float]], list[Any], list[Any]]:
    """Reports, true passes, and true work of every job."""
    reports: list[list[float]] = [[] for _ in rows]
    passes, work = [job.passes for job in rows], [job.work for job in rows]
    for i, (job, place) in enumerate(zip(rows, places, strict=True)):
        curve = job.curve
        if curve is None:
            continue
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
