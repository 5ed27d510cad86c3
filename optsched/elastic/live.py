"""Running jobs in the `ClusterView` of the simulator, with measured times."""

from __future__ import annotations

from dataclasses import dataclass, field
from operator import attrgetter
from statistics import fmean as mean
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from optsched.cluster.workload.columns import csr
from optsched.cluster.workload.job import WORK, Job
from optsched.cluster.workload.nodes import Nodes
from optsched.cluster.workload.speedup import Amdahl, Table
from optsched.cluster.workload.workload import Workload
from optsched.cluster.world.policy import ClusterView

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from optsched.cluster.world.settings import Settings
    from optsched.elastic.job import TrainingJob
    from optsched.elastic.micro import MicroController
    from optsched.elastic.workers import Order
    from optsched.model.schedule import IntArray

UNBORN, PENDING, JOINING = "unborn", "pending", "joining"
RUNNING, STOPPING, ENDED, FAILED = "running", "stopping", "ended", "failed"
ACTIVE: Final = (PENDING, JOINING, RUNNING)

UNMEASURED: Final = Amdahl(0.1)  # speed-up of sizes without measurements


@dataclass(eq=False)
class LiveJob:
    """State of a job in the scheduler; times in ms."""

    spec: TrainingJob
    number: int  # in the workload: by submit time, then as given
    payload: bytes = b""  # the pickled job
    submit: int = 0
    phase: str = UNBORN
    slots: tuple[int, ...] = ()
    answers: set[int] = field(default_factory=set)  # slots that have not answered yet
    answer: Any = None  # of rank 0
    log: list[dict[str, Any]] = field(default_factory=list)  # of `training.Member.train`
    controller: MicroController | None = None
    samples: int = 0  # of the training data, from the first worker that has read them
    rate: float = 0.0  # initial learning rate, likewise
    part: float = 0.0  # done of a pass that was stopped
    stopped: Order | None = None  # that pass
    at_end: bool = False  # whether it ended a pass at this very instant
    began: int = 0  # of the open pass
    stay: int = 0  # start of the open stay
    joined: int = 0  # when its workers were ready
    stay_passes: float = 0.0  # passes before the open stay
    attained: int = 0
    starts: int = 0
    first_start: int = -1
    entered: int = 0
    preemptions: int = 0
    crashes: int = 0  # in a row
    finished: int = -1
    reason: str = ""  # why it failed

    @property
    def passes(self) -> int:
        """Passes completed."""
        return len(self.log)

    @property
    def done(self) -> bool:
        """Whether its last pass was the last (1)."""
        spec = self.spec
        if not self.log or self.passes >= spec.passes:
            return bool(self.log)
        if spec.target is not None:
            return bool(self.log[-1]["metric"] >= spec.target)
        seen = sum(sum(record["samples"]) for record in self.log)
        return spec.samples is not None and seen >= spec.samples

    @property
    def expected(self) -> int:
        """Estimated passes to its end."""
        spec, most = self.spec, self.spec.passes
        if spec.target is not None:
            return min(spec.expected_passes or most, most)
        if spec.samples is not None and self.samples:
            each = spec.pass_samples(len(self.slots) or spec.sizes[0], self.samples)
            return min(-(-spec.samples // each), most)
        return most


class PassTimes:
    """Milliseconds of passes by template and size; the mean counts."""

    def __init__(
        self, known: dict[str, dict[int, list[int]]] | None = None, starts: Sequence[int] = ()
    ) -> None:
        self.known: dict[str, dict[int, list[int]]] = known or {}
        self.starts = list(starts)
        """From being given workers to the first pass."""

    def add(self, job: TrainingJob, size: int, time: int) -> None:
        """Add the measured time of a pass."""
        self.known.setdefault(_kind(job), {}).setdefault(size, []).append(max(1, time))

    def of(self, job: TrainingJob) -> tuple[float, Table]:
        """Time of a pass on one worker, and the speed-up at the job's sizes.

        Means of the job's template, `UNMEASURED` for other sizes; without any measurement
        `pass_seconds`, or a second.
        """
        known = {g: mean(times) for g, times in self.known.get(_kind(job), {}).items()}
        one = known.get(1)
        if one is None and known:
            nearest = min(known)
            one = known[nearest] * UNMEASURED.of(nearest)
        if one is None:
            one = 1e3 * (job.pass_seconds or 1.0)
        speeds = {g: one / known[g] if g in known else UNMEASURED.of(g) for g in job.sizes}
        return one, Table(speeds | {1: 1.0})


def _kind(job: TrainingJob) -> str:
    return f"template {job.template}" if job.template else f"job {job.name}"


def workload(jobs: Sequence[LiveJob], times: PassTimes, signal: str) -> Workload:
    """Build the workload of the jobs, by number; the curve is that of `signal`; times in ms."""
    rows, curves = [], []
    for job in jobs:
        spec, (one, speedup) = job.spec, times.of(job.spec)
        rows.append(Job(
            name=spec.name, submit=job.submit, sizes=spec.sizes, speedup=speedup,
            work=max(1, round(one * WORK)) * job.expected, passes=job.expected,
            priority=spec.priority, weight=spec.weight, group=spec.group,
            preemptible=spec.preemptible, template=spec.template,
        ))  # fmt: skip
        curve = [r["uncertainty"] if signal != "metric" else 1.0 - r["metric"] for r in job.log]
        curves.append(curve)
    made = Workload.of(rows, time_unit="ms")
    over = np.array([job.phase == ENDED for job in jobs])
    done = np.array([job.passes for job in jobs], np.int64)
    passes = np.where(over, done, np.maximum(made.passes, done + 1))
    ptr, observed = csr(curves, np.float64)
    return made.changed(
        passes=passes, pass_work=made.pass_work, work=made.pass_work * passes,
        target=1.0 - np.array([job.spec.target or np.nan for job in jobs]),
        observed_ptr=ptr, observed=observed,
    )  # fmt: skip


def view(
    jobs: Sequence[LiveJob], work: Workload, settings: Settings, slots: int, now: int
) -> ClusterView:
    """Show the active jobs at one instant; the slots are one node.

    A job within a pass is preemptible only if a stop loses nothing (``checkpoint="immediate"``).
    """
    active = [job for job in jobs if job.phase in ACTIVE]

    def each(value: Callable[[LiveJob], int]) -> IntArray:
        return np.array([value(job) for job in active], np.int64)

    ids, passes = each(attrgetter("number")), each(attrgetter("passes"))
    held = each(lambda job: len(job.slots))
    ends = each(lambda job: job.phase == PENDING or job.at_end) != 0
    pass_work = work.pass_work[ids]
    open_pass = each(lambda job: job.phase in (RUNNING, STOPPING) and not job.at_end) != 0
    within = np.where(open_pass, now - each(attrgetter("began")), 0)
    rates = each(
        lambda job: work.rates_of(job.number)[work.sizes_of(job.number) == len(job.slots)].sum()
    )
    before = pass_work * np.array([job.part for job in active])  # the stop of a pass
    done = passes * pass_work + np.minimum(before.astype(np.int64) + within * rates, pass_work)
    anytime = each(lambda job: job.phase == RUNNING and settings.checkpoint == "immediate") != 0
    size_ptr, at = csr([range(*work.size_ptr[j : j + 2]) for j in ids], np.int64)
    observed_ptr, seen = csr([range(*work.observed_ptr[j : j + 2]) for j in ids], np.int64)
    held_ptr, held_count = csr([[count] if count else [] for count in held.tolist()], np.int64)
    columns: dict[str, Any] = {
        key: each(attrgetter(key)) for key in ("first_start", "entered", "starts")
    } | {
        key: getattr(work, key)[ids]
        for key in ("submit", "pass_work", "priority", "weight", "group", "template")
    } | {
        "job": ids, "gpus": held, "running": held > 0, "done": done, "passes": passes,
        "attained": each(lambda job: job.attained) + held * (now - each(lambda job: job.stay)),
        "remaining": np.maximum(work.estimate[ids] - done, 1), "at_pass_end": ends,
        "size_ptr": size_ptr, "size": work.size[at], "rate": work.rate[at],
        "preemptible": work.preemptible[ids] & (ends | anytime),
        "restart_cost": np.full(len(ids), settings.restart_cost, np.int64),
        "observed_ptr": observed_ptr, "observed": work.observed[seen],
        "free": np.array([slots - int(held.sum())], np.int64),
        "capacity": np.array([slots], np.int64),
        "held_ptr": held_ptr, "held_node": np.zeros(len(held_count), np.int64),
        "held_count": held_count, "finished": np.array([job.finished for job in jobs], np.int64),
    }  # fmt: skip
    for column in columns.values():
        column.flags.writeable = False
    fixed: dict[str, Any] = {"workload": work, "settings": settings, "nodes": Nodes(1, slots)}
    return ClusterView(time=now, **fixed, **columns)
