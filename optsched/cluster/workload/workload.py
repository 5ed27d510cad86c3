"""Jobs as columns: what the simulator reads."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, NamedTuple, overload

import numpy as np

from optsched.cluster.workload.job import MOST_RATE, MOST_WORK
from optsched.errors import InputError
from optsched.io.values import format_value, integer, number

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    import numpy.typing as npt

    from optsched.cluster.workload.curve import Curve
    from optsched.cluster.workload.job import Job
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
        from optsched.cluster.workload.columns import checked

        self.__dict__.update(checked(self))

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
        from optsched.cluster.workload.columns import columns_of

        return cls(**columns_of(jobs, groups, seed), time_unit=time_unit, name=name)

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
        from optsched.cluster.workload.columns import job_of

        try:
            i = range(len(self))[key]
        except TypeError:
            raise InputError(
                f"workload: expected a number or a slice, got {format_value(key)}"
            ) from None
        return job_of(self, i)

    def take(self, jobs: npt.ArrayLike) -> Workload:
        """The workload of these jobs (numbers, or a mask), in their present order."""
        from optsched.cluster.workload.columns import taken

        return Workload(**taken(self, jobs))

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
