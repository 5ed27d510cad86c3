"""The scheduler of real jobs: at the end of every pass a policy says who gets how many workers."""

from __future__ import annotations

import dataclasses
import time
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from optsched.cluster.world.errors import PolicyError, Stalled
from optsched.cluster.world.policy import Decision
from optsched.cluster.world.settings import Settings
from optsched.elastic import live
from optsched.elastic.live import ENDED, FAILED, JOINING, PENDING, RUNNING, UNBORN
from optsched.elastic.workers import MOST_CRASHES, Order
from optsched.errors import InputError
from optsched.io.values import format_value

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from optsched.cluster.workload.workload import Workload
    from optsched.cluster.world.policy import ClusterView, Policy
    from optsched.elastic.live import LiveJob, PassTimes
    from optsched.elastic.workers import Event, Processes


class Stay(NamedTuple):
    """A job on the same workers; times in ms."""

    job: int
    start: int
    end: int
    restart: int  # until its workers were ready
    slots: tuple[int, ...]
    passes: int  # completed in it


class Scheduler:
    """Asks the policy at arrivals, ends of passes and crashes, and tells the workers.

    Jobs are by submit time, each with a folder for checkpoints below `folder`; `times` are the pass
    times and `stays` the stays known before; `on_event` is called after every change.
    """

    def __init__(
        self, jobs: Sequence[LiveJob], pool: Processes, slots: int, policy: Policy, folder: str,
        times: PassTimes, stays: Sequence[Stay] = (),
        on_event: Callable[[Scheduler], object] | None = None,
    ) -> None:  # fmt: skip
        self.jobs, self.pool, self.slots = jobs, pool, slots
        self.policy, self.folder = policy, folder
        self.times, self.stays, self.on_event = times, list(stays), on_event
        self.signal = signal_of(policy)
        self.now, self.busy = 0, 0.0  # ms; seconds spent on decisions and bookkeeping
        self._owner: list[LiveJob | None] = [None] * slots
        self._ask = self._news = True
        self._wake: int | None = None
        self._work: Workload | None = None

    def rehearse(self) -> None:
        """Let the policy decide once for nobody: what it compiles is compiled then."""
        record = {"samples": [1], "uncertainty": 0.5, "metric": 0.1}
        fields: dict[str, Any] = {"target": 0.5, "template": "t", "sizes": (1,), "passes": 9,
                                  "micro": None}  # fmt: skip
        job = live.LiveJob(
            dataclasses.replace(self.jobs[0].spec, **fields), 0, phase=RUNNING, at_end=True,
            slots=(0,), log=[record, record],
        )  # fmt: skip
        work = live.workload([job], self.times, self.signal)
        self.policy.decide(live.view([job], work, self.settings(), self.slots, 1))

    def run(self) -> bool:
        """Until all jobs are over; False: interrupted."""
        try:
            self._told([])
            while any(job.phase not in (ENDED, FAILED) for job in self.jobs):
                events = self.pool.wait(self._until())
                self._told(events)
        except KeyboardInterrupt:
            return False
        finally:
            self.now = self.pool.now()
            for job in self.jobs:
                if job.slots:
                    self._release(job)
                    job.phase = PENDING
        return True

    def _told(self, events: list[Event]) -> None:
        """Take in what has happened at this instant, and decide."""
        begun = time.perf_counter()
        now = self.pool.now()
        if self._wake is not None and now >= self._wake:
            self.now, self._news = self._wake, True  # at the very instant: `las` looks at it
            self._decide()
        self.now = now
        for event in events:
            self._hear(event)
        for job in self.jobs:
            if job.phase == UNBORN and job.submit <= self.now:
                job.phase, job.entered, self._ask = PENDING, job.submit, True
        while self._ask:
            self._news = True
            self._decide()
        if self._news and self.on_event is not None:
            self.on_event(self)
        self._news = False
        self.busy += time.perf_counter() - begun

    def _until(self) -> int | None:
        """When something happens that no worker says; `Stalled` if nothing ever does."""
        times = [job.submit for job in self.jobs if job.phase == UNBORN]
        times += [] if self._wake is None else [self._wake]
        if not times and not any(job.slots for job in self.jobs):
            waiting = ", ".join(
                format_value(job.spec.name) for job in self.jobs if job.phase == PENDING
            )
            raise Stalled(
                f"policy {format_value(self.policy.name)} starts none of them, ever: {waiting}"
            )
        return min(times, default=None)

    def _hear(self, event: Event) -> None:
        job = self._owner[event.slot]
        if job is None:
            if event.kind == "died":
                self.pool.kill([event.slot])
            return
        # who loses the connection to a dead worker may be heard first
        if event.kind == "died" or (event.kind == "failed" and self.pool.dead(job.slots)):
            self._crash(job)
            return
        if event.kind == "failed":
            self._fail(job, event.told)
            return
        job.answers.discard(event.slot)
        if event.slot == job.slots[0]:
            job.told = event.told
        if job.answers:
            return
        if job.phase == JOINING:
            self._joined(job)
        else:
            self.times.add(job.spec, len(job.slots), self.now - job.began)
            self._passed(job, job.told)

    def _joined(self, job: LiveJob) -> None:
        job.samples, job.rate, untold = job.told
        if job.samples < len(job.slots):
            self._fail(job, f"{job.samples} training samples for {len(job.slots)} workers")
            return
        job.phase, job.joined, self._news = RUNNING, self.now, True
        self.times.starts.append(self.now - job.stay)
        if untold is None:
            self._begin(job)
        else:  # of the pass in which a worker died
            self._passed(job, untold)

    def _passed(self, job: LiveJob, record: dict[str, Any]) -> None:
        job.log.append(record)
        job.crashes, self._work, self._ask = 0, None, True
        if job.done:
            self._release(job)
            job.phase, job.finished = ENDED, self.now
        else:
            job.at_end = True

    def _crash(self, job: LiveJob) -> None:
        """A worker is dead; its job goes on from its checkpoint."""
        self._release(job, kill=True)
        job.crashes += 1
        job.controller = None  # it has been asked for the pass that is done again
        job.phase, job.entered = PENDING, self.now
        if job.crashes >= MOST_CRASHES:
            self._fail(job, f"its workers died {job.crashes} times in pass {job.passes + 1}")

    def _fail(self, job: LiveJob, reason: str) -> None:
        if job.slots:
            self._release(job, kill=True)
        job.phase, job.reason, self._ask = FAILED, reason, True

    def _release(self, job: LiveJob, kill: bool = False) -> None:
        """Take all its workers from a job."""
        (self.pool.kill if kill else self.pool.leave)(job.slots)
        self.stays.append(self._stay(job))
        job.attained += len(job.slots) * (self.now - job.stay)
        for slot in job.slots:
            self._owner[slot] = None
        job.slots, job.at_end, self._ask = (), False, True
        job.answers.clear()

    def _stay(self, job: LiveJob) -> Stay:
        """The open stay of a job, as if it ended now."""
        restart = (self.now if job.phase == JOINING else job.joined) - job.stay
        done = job.passes - job.stay_passes
        return Stay(job.number, job.stay, self.now, restart, job.slots, done)

    def all_stays(self) -> list[Stay]:
        """Those that have ended, and the open ones up to now."""
        return self.stays + [self._stay(job) for job in self.jobs if job.slots]

    def _begin(self, job: LiveJob) -> None:
        """The next pass on the workers that it has."""
        try:
            order = next_pass(job)
        except InputError as error:
            self._fail(job, f"micro: {error}")
            return
        job.at_end, job.began, job.answers = False, self.now, set(job.slots)
        self.pool.order(job.slots, order)

    def workload(self) -> Workload:
        """The jobs by what is measured so far."""
        if self._work is None:
            self._work = live.workload(self.jobs, self.times, self.signal)
        return self._work

    def settings(self) -> Settings:
        """How a simulation would treat these jobs."""
        cost = round(float(np.mean(self.times.starts or [0])))
        return Settings(restart_cost=cost, resize="pass", checkpoint="pass")

    def _decide(self) -> None:
        self._ask, self._wake = False, None
        if not any(job.active for job in self.jobs):
            return
        view = live.view(self.jobs, self.workload(), self.settings(), self.slots, self.now)
        decision = self.policy.decide(view)
        quota = self._checked(view, decision)
        active = [self.jobs[j] for j in view.job]
        for job, gpus in zip(active, quota, strict=True):
            if job.at_end and gpus != len(job.slots):
                self._release(job)
                job.phase, job.entered = PENDING, self.now
                job.preemptions += gpus == 0
        free = [slot for slot, owner in enumerate(self._owner) if owner is None]
        order = [] if decision.order is None else decision.order.tolist()
        starting, left = [], len(free)
        for i in dict.fromkeys([*order, *range(len(active))]):
            if active[i].phase == PENDING and 0 < quota[i] <= left:
                starting.append(i)
                left -= quota[i]
        for i in sorted(starting):
            self._start(active[i], tuple(free[: quota[i]]))
            del free[: quota[i]]
        self._ask = False  # what was released here has been given away
        for job in active:
            if job.at_end:  # as before
                self._begin(job)

    def _start(self, job: LiveJob, slots: tuple[int, ...]) -> None:
        job.phase, job.slots, job.answers = JOINING, slots, set(slots)
        job.stay = job.entered = self.now
        job.stay_passes = job.passes
        job.starts += 1
        if job.first_start < 0:
            job.first_start = self.now
        for slot in slots:
            self._owner[slot] = job
        self.pool.join(slots, job.payload, f"{self.folder}/{job.spec.name}", job.passes)

    def _checked(self, view: ClusterView, decision: Decision) -> list[int]:
        """The quotas, if they can be."""
        place = f"policy {format_value(self.policy.name)} at {self.now} ms"
        if not isinstance(decision, Decision) or decision.share:
            raise PolicyError(
                f"{place}: expected a Decision without share, got {format_value(decision)}"
            )
        quota = np.asarray(decision.quota)
        if quota.shape != view.job.shape or quota.dtype.kind not in "iu":
            raise PolicyError(
                f"{place}: expected {len(view.job)} quotas, got {format_value(quota)}"
            )
        for i, gpus in enumerate(quota.tolist()):
            job = self.jobs[view.job[i]]
            held, wrong = len(job.slots), ""
            if gpus and gpus not in job.spec.sizes:
                sizes = ", ".join(map(str, job.spec.sizes))
                wrong = f"quota {gpus} is none of its sizes ({sizes})"
            elif held and gpus != held and not job.at_end:
                wrong = f"is within a pass, where its quota stays {held}, got {gpus}"
            elif held and not gpus and not job.spec.preemptible:
                wrong = "is not preemptible, but would lose all workers"
            if wrong:
                raise PolicyError(f"{place}: job {format_value(job.spec.name)}: {wrong}")
        if quota.sum() > self.slots and not decision.best_effort:
            raise PolicyError(f"{place}: over-allocation: {quota.sum()} workers of {self.slots}")
        if (wake := decision.wake_at) is not None:
            if wake <= self.now:
                raise PolicyError(
                    f"{place}: wake_at: expected a time after now, got {format_value(wake)}"
                )
            self._wake = int(wake)
        return [*map(int, quota)]


def signal_of(policy: Policy) -> str:
    """The curve of a job that a policy is shown."""
    return str(getattr(policy, "signal", "uncertainty"))


def next_pass(job: LiveJob) -> Order:
    """The shares of the next pass: equal ones, or by the micro level from the last pass."""
    workers = len(job.slots)
    if job.spec.micro is None or not job.log:
        samples = job.spec.pass_samples(workers, job.samples)
        equal = [_equal(total, workers) for total in (samples, job.spec.batch_size)]
        return Order(job.passes, equal[0], equal[1], 1.0)
    if job.controller is None:  # at first, and again after a resumption: from all that is logged
        job.controller = job.spec.controller(workers, job.samples, job.rate)
        for k, record in enumerate(job.log[:-1]):
            following = len(job.log[k + 1]["samples"])
            job.controller.step(record["entropy"], record["margin"], following)
    last = job.log[-1]
    step = job.controller.step(last["entropy"], last["margin"], workers)
    return Order(job.passes, step.samples.tolist(), step.batches.tolist(), step.rate_factor)


def _equal(total: int, parts: int) -> list[int]:
    return [total // parts + (k < total % parts) for k in range(parts)]
