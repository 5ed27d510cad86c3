"""Jobs as columns: what the simulator reads."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from optsched.cluster.workload.columns import COLUMNS, checked, column, csr, picked
from optsched.cluster.workload.job import (
    MOST_RATE,
    MOST_SPEED,
    MOST_WORK,
    Curve,
    Job,
    ascending,
    line,
    rates,
)
from optsched.errors import InputError
from optsched.io.strict_json import placed
from optsched.io.values import format_value, integer, number

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    import numpy.typing as npt

    from optsched.cluster.workload.speedup import Speedup
    from optsched.model.schedule import IntArray


class Group(NamedTuple):
    """Describe a group of jobs: a user, a queue, an experiment.

    `max_slots` bounds the GPUs of its running jobs, under policies that honour it (`fair_share`;
    `simulate` refuses it for others); `max_concurrent` how many of its unfinished tasks (the first,
    by submit time) policies see at all; `priority` 1 to 99 goes before the jobs'.

    Examples
    --------
    >>> from optsched.cluster import Group, Job, Workload
    >>> jobs = [Job(name="a", sizes=(1,), work=10**6, group="ann")]
    >>> Workload.of(jobs, groups=[Group("ann", weight=2.0)]).groups[0].weight
    2.0
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
    """Hold all jobs of a simulation, sorted by submit time, then as given.

    Columns have one value per job and are read-only; rows of sizes are in CSR form. Made by
    `Workload.of`, `read_trace`, `synthetic` or `entropy_workload`.

    Examples
    --------
    >>> from optsched.cluster import Job, Workload
    >>> Workload.of([Job(name=name, sizes=(2,), work=10**8) for name in "ab"], name="two")
    <Workload 'two': 2 jobs, submitted 0..0 s>
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
        """Columns of these jobs, sorted by submit time, equal times in the order given.

        Groups that only jobs name are added to `groups`. `time_unit` is ``"s"``, ``"ms"``, ``"us"``
        or ``"ns"``. The noise of a curve depends on `seed` and on the job's name.

        Raises
        ------
        InputError
            No job, two of one name, a target that is never reached, or times that could overflow.
        """
        return cls(**_columns_of(jobs, groups, seed), time_unit=time_unit, name=name)

    def __len__(self) -> int:
        return len(self.submit)

    def __getitem__(self, key: slice) -> Workload:
        """The workload of a slice of the jobs."""
        if not isinstance(key, slice):
            raise InputError(f"workload: expected a slice, got {format_value(key)}")
        return self.take(np.arange(len(self))[key])

    def take(self, jobs: npt.ArrayLike) -> Workload:
        """The workload of these jobs (numbers, or a mask), in their present order."""
        chosen = np.asarray(jobs)
        if chosen.dtype == np.bool_ and chosen.shape == (len(self),):
            chosen = np.flatnonzero(chosen)
        if chosen.size == 0:
            raise InputError("jobs: none chosen; a workload has at least one")
        if chosen.ndim != 1 or chosen.dtype.kind not in "iu":
            raise InputError("jobs: expected numbers of jobs, or one truth value per job")
        if chosen.min() < 0 or chosen.max() >= len(self):
            raise InputError(f"jobs: expected numbers in 0..{len(self) - 1}")
        chosen = np.sort(chosen)
        new: dict[str, Any] = {key: getattr(self, key)[chosen] for key in (*COLUMNS, "speeds")}
        for key, ptr in (("size", "size_ptr"), ("rate", "size_ptr"), ("observed", "observed_ptr")):
            new[ptr], new[key] = picked(getattr(self, ptr), getattr(self, key), chosen)
        new["names"] = tuple(self.names[i] for i in chosen.tolist())
        return replace(self, **new)

    def with_estimate_error(self, sigma: float, seed: int) -> Workload:
        """Multiply every estimate by a seeded lognormal factor exp(sigma * normal)."""
        sigma = number("sigma", sigma, 0.0, 10.0)
        random = np.random.default_rng(integer("seed", seed))
        factor = np.exp(sigma * random.standard_normal(len(self)))
        scaled = np.clip(np.rint(self.estimate * factor), 1, float(MOST_WORK)).astype(np.int64)
        return self.changed(estimate=np.where(factor == 1, self.estimate, scaled))

    def changed(self, **columns: Any) -> Workload:
        """The same workload with other columns, checked again.

        With `work` or `passes` the `pass_work` follows unless it is given too.
        """
        known = sorted(f.name for f in fields(self))
        for key in columns:
            if key not in known:
                what = f"no column {format_value(key)} (there are {', '.join(known)})"
                raise InputError(f"workload: {what}")
        if columns.keys() & {"work", "passes"}:
            columns = {"pass_work": None} | columns
        return replace(self, **columns)

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
        return all(
            np.array_equal(x, y, equal_nan=x.dtype.kind == "f") if isinstance(x, np.ndarray)
            else x == y
            for x, y in ((getattr(self, f.name), getattr(other, f.name)) for f in fields(self))
        )  # fmt: skip

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
    submit = column("submit", [job.submit for job in rows], [str(job.name) for job in rows])
    rows = [rows[i] for i in np.argsort(submit, kind="stable").tolist()]
    for key in ("group", "template"):
        for text in dict.fromkeys(getattr(job, key) for job in rows):
            line(key, text)
    found: dict[str, Any] = {key: [getattr(job, key) for job in rows] for key in _COPIED}
    found["work"], found["passes"] = ([getattr(j, key) for j in rows] for key in ("work", "passes"))
    reports: list[list[float]] = [[] for _ in rows]
    target, initial = np.full((2, len(rows)), np.nan)
    sizes = []
    for i, job in enumerate(rows):
        with placed(f"job {format_value(job.name)}: "):
            sizes.append(ascending("sizes", job.sizes))
            if not isinstance(job.speeds, Mapping):
                what = 'expected speeds by type such as {"A100": 2.0}'
                raise InputError(f"speeds: {what}, got {format_value(job.speeds)}")
            for kind, speed in job.speeds.items():
                number(f"speeds[{format_value(kind)}]", speed, 0.0, MOST_SPEED)
            if job.curve is not None:
                reports[i], found["work"][i] = _reports(job, job.curve, seed)
                initial[i] = job.curve.initial
                if job.curve.target is not None:
                    found["passes"][i], target[i] = len(reports[i]), job.curve.target
    pairs = zip(rows, found["work"], strict=True)
    found["estimate"] = [work if job.estimate is None else job.estimate for job, work in pairs]
    types = tuple(dict.fromkeys(kind for job in rows for kind in job.speeds))
    speeds = [[job.speeds.get(kind, 1.0) for kind in types] for job in rows] if types else None
    names = [job.name for job in rows]
    observed_ptr, observed = csr(reports, np.float64)
    return found | {
        **sized(names, sizes, [job.speedup for job in rows]), "names": tuple(names),
        **numbered([job.group for job in rows], [job.template for job in rows], groups),
        "types": types, "speeds": speeds, "source": [job.template for job in rows],
        "restart_cost": [-1 if job.restart_cost is None else job.restart_cost for job in rows],
        "observed_ptr": observed_ptr, "observed": observed, "target": target, "initial": initial,
    }  # fmt: skip


def _reports(job: Job, curve: Curve, seed: int) -> tuple[list[float], int]:
    """Reports of a job after every pass, and its true work."""
    if not isinstance(curve, Curve):
        raise InputError(f"curve: expected a Curve, got {format_value(curve)}")
    integer("passes of a job with a curve", job.passes, 1, 10**6)
    if curve.target is None:
        return curve.reported(job.passes, seed, job.name).tolist(), job.work
    found = curve.reached(seed, job.name).tolist()
    if len(found) == job.passes:
        return found, job.work
    work = -(-integer("work", job.work, 1, MOST_WORK) // job.passes) * len(found)
    return found, integer("work until the target", work, 1, MOST_WORK)


def sized(
    names: Sequence[str], sizes: Sequence[Sequence[int]], speedups: Sequence[Speedup]
) -> dict[str, Any]:
    """Sizes with their rates in CSR form."""
    known: dict[tuple[int, tuple[int, ...]], tuple[int, ...]] = {}
    rows = []
    for name, one, speedup in zip(names, sizes, speedups, strict=True):
        key = id(speedup), tuple(one)
        if key not in known:
            with placed(f"job {format_value(name)}: "):
                known[key] = rates(speedup, key[1])
        rows.append(known[key])
    size_ptr, size = csr(sizes, np.int64)
    return {"size_ptr": size_ptr, "size": size, "rate": csr(rows, np.int64)[1]}


def numbered(
    group: Sequence[str], template: Sequence[str], given: Sequence[Group] = ()
) -> dict[str, Any]:
    """Groups (those given, then others in the order of their jobs) and templates by number."""
    known: dict[str, Group] = {}
    for g, one in enumerate(given):
        if not isinstance(one, Group):
            raise InputError(f"groups[{g}]: expected a Group, got {format_value(one)}")
        if one.name in known:
            raise InputError(f"groups[{g}].name: {format_value(one.name)} appears twice")
        known[one.name] = one
    for name in group:
        known.setdefault(name, Group(name))
    templates = sorted({*template} - {""})
    at = {name: k for k, name in enumerate(known)}
    place = {name: k for k, name in enumerate(templates)} | {"": -1}
    return {
        "groups": tuple(known.values()), "group": np.array([at[name] for name in group], np.int64),
        "templates": tuple(templates),
        "template": np.array([place[name] for name in template], np.int64),
    }  # fmt: skip
