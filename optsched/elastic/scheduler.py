"""The scheduler of running jobs: at the ends of passes a policy decides the workers of each."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from optsched.cluster.world.policy import Decision, PolicyError, Stalled
from optsched.cluster.world.settings import Settings
from optsched.elastic import live
from optsched.elastic.live import ENDED, FAILED, JOINING, PENDING, RUNNING, STOPPING, UNBORN
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
    """Interval of a job on the same workers; times in ms."""

    job: int
    start: int
    end: int
    restart: int  # until its workers were ready
    slots: tuple[int, ...]
    passes: float  # done in it


class Scheduler:
    """Decide at arrivals, ends of passes and crashes, and give the workers their orders.

    Jobs are by submit time, with checkpoints below `folder`; `times` and `stays` are those measured
    before; `on_event` is called after every change. `anytime`: preemption within passes.
    """

    def __init__(
        self, jobs: Sequence[LiveJob], pool: Processes, policy: Policy, folder: str,
        times: PassTimes, stays: Sequence[Stay] = (),
        on_event: Callable[[Scheduler], object] | None = None, anytime: bool = False,
    ) -> None:  # fmt: skip
        self.jobs, self.pool, self.policy, self.folder = jobs, pool, policy, folder
        self.times, self.stays, self.on_event = times, list(stays), on_event
        self.anytime = anytime
        self.signal = str(getattr(policy, "signal", "uncertainty"))
        self.now = 0
        self.slots = len(pool.devices)
        self._owner: list[LiveJob | None] = [None] * self.slots
        self._due = self._changed = True  # a decision, a call of `on_event`
        self._wake: int | None = None
        self._work: Workload | None = None

    def run(self) -> bool:
        """Run until all jobs have ended or failed; False: interrupted."""
        events: list[Event] = []
        with suppress(KeyboardInterrupt):
            while not self.pool.interrupted:
                self._advance(events)
                if all(job.phase in (ENDED, FAILED) for job in self.jobs):
                    return True
                events = self.pool.wait(self._until())
            for event in events:
                self._receive(event)
        return False

    def stop(self, keep: bool) -> None:
        """Take all workers from all jobs; `keep`: stop passes after a step, with a checkpoint."""
        with suppress(KeyboardInterrupt):
            for job in self.jobs if keep else ():
                if job.phase == RUNNING and job.answers:
                    job.phase = STOPPING
                    self.pool.stop(job.slots)
            while keep and any(job.answers for job in self.jobs if job.phase == STOPPING):
                for event in self.pool.wait(None):
                    self._receive(event)
        self.now = self.pool.now()
        for job in self.jobs:
            if job.slots:
                self._release(job)
                job.phase = PENDING

    def _advance(self, events: list[Event]) -> None:
        """Take in the events of this instant, and decide."""
        now = self.pool.now()
        if self._wake is not None and now >= self._wake:
            self.now, self._changed = self._wake, True  # at the exact time: `las` compares it
            self._decide()
        self.now = now
        for event in events:
            self._receive(event)
        for job in self.jobs:
            if job.phase == UNBORN and job.submit <= self.now:
                job.phase, job.entered, self._due = PENDING, job.submit, True
        while self._due:
            self._changed = True
            self._decide()
        if self._changed and self.on_event is not None:
            self.on_event(self)
        self._changed = False

    def _until(self) -> int | None:
        """Time of the next arrival or wake-up; `Stalled` if nothing can ever happen."""
        times = [job.submit for job in self.jobs if job.phase == UNBORN]
        times += [] if self._wake is None else [self._wake]
        if not times and not self.pool.vacant and not any(job.slots for job in self.jobs):
            waiting = [format_value(job.spec.name) for job in self.jobs if job.phase == PENDING]
            name = format_value(self.policy.name)
            raise Stalled(f"policy {name} starts none of them, ever: {', '.join(waiting)}")
        return min(times, default=None)

    def _receive(self, event: Event) -> None:
        job = self._owner[event.slot]
        if job is None:
            if event.kind == "died":
                self.pool.kill([event.slot])
            self._due = True  # there is a worker more or less
            return
        # a rank that loses its connection to a dead one may report first
        if event.kind == "died" or (event.kind == "failed" and self.pool.dead(job.slots)):
            self._crash(job)
            return
        if event.kind == "failed":
            self._fail(job, event.content)
            return
        job.answers.discard(event.slot)
        if event.slot == job.slots[0]:
            job.answer = event.content
        if job.answers:
            return
        if job.phase == JOINING:
            self._joined(job)
        elif event.kind == "stopped":
            job.part = job.answer
            self._release(job)
            job.phase, job.entered = PENDING, self.now
            job.preemptions += not self.pool.interrupted
        else:
            if not job.part:
                self.times.add(job.spec, len(job.slots), self.now - job.began)
            self._passed(job, job.answer)

    def _joined(self, job: LiveJob) -> None:
        job.samples, job.rate, record, open_pass = job.answer
        if job.samples < len(job.slots):
            self._fail(job, f"{job.samples} training samples for {len(job.slots)} workers")
            return
        job.phase, job.joined, self._changed = RUNNING, self.now, True
        where, job.part = (None, 0.0) if open_pass is None else open_pass
        job.stopped = None if where is None else Order(*where)
        self.times.starts.append(self.now - job.stay)
        if record is None:
            self._begin(job)
        else:  # of the pass in which a worker died
            self._passed(job, record)

    def _passed(self, job: LiveJob, record: dict[str, Any]) -> None:
        job.log.append(record)
        job.part, job.stopped = 0.0, None
        job.crashes, self._work, self._due = 0, None, True
        if job.done:
            self._release(job)
            job.phase, job.finished = ENDED, self.now
        else:
            job.phase, job.at_end = RUNNING, True

    def _crash(self, job: LiveJob) -> None:
        """A worker is dead; its job goes on from its checkpoint."""
        self._release(job, kill=True)
        job.crashes += 1
        job.controller = None  # it has planned the pass that is repeated
        job.phase, job.entered = PENDING, self.now
        if job.crashes >= MOST_CRASHES:
            self._fail(job, f"its workers died {job.crashes} times in pass {job.passes + 1}")

    def _fail(self, job: LiveJob, reason: str) -> None:
        if job.slots:
            self._release(job, kill=True)
        job.phase, job.reason, self._due = FAILED, reason, True

    def _release(self, job: LiveJob, kill: bool = False) -> None:
        """Take all its workers from a job."""
        (self.pool.kill if kill else self.pool.leave)(job.slots)
        self.stays.append(self._stay(job))
        job.attained += len(job.slots) * (self.now - job.stay)
        for slot in job.slots:
            self._owner[slot] = None
        job.slots, job.at_end, self._due = (), False, True
        job.answers.clear()

    def _stay(self, job: LiveJob) -> Stay:
        """The open stay of a job, as if it ended now."""
        restart = (self.now if job.phase == JOINING else job.joined) - job.stay
        done = job.passes + job.part - job.stay_passes
        return Stay(job.number, job.stay, self.now, restart, job.slots, done)

    def all_stays(self) -> list[Stay]:
        """Stays that have ended, and open stays up to now."""
        return self.stays + [self._stay(job) for job in self.jobs if job.slots]

    def _begin(self, job: LiveJob) -> None:
        """Order the next pass, or the remainder of one that was stopped."""
        try:
            order = next_pass(job) if job.stopped is None else job.stopped
        except InputError as error:
            self._fail(job, f"micro: {error}")
            return
        job.at_end, job.began, job.answers = False, self.now, set(job.slots)
        self.pool.order(job.slots, order)

    def workload(self) -> Workload:
        """The jobs with the measurements so far."""
        if self._work is None:
            self._work = live.workload(self.jobs, self.times, self.signal)
        return self._work

    def settings(self) -> Settings:
        """Settings with which a simulation treats the jobs in the same way."""
        cost = round(float(np.mean(self.times.starts or [0])))
        loss: Any = "immediate" if self.anytime else "pass"
        return Settings(restart_cost=cost, resize="pass", checkpoint=loss)

    def _decide(self) -> None:
        self._due, self._wake = False, None
        slots = self.slots - len(self.pool.vacant)
        if not slots or not any(job.phase in live.ACTIVE for job in self.jobs):
            return
        view = live.view(self.jobs, self.workload(), self.settings(), slots, self.now)
        decision = self.policy.decide(view)
        quota = self._checked(view, decision)
        active = [self.jobs[j] for j in view.job]
        for job, gpus in zip(active, quota, strict=True):
            if job.at_end and gpus != len(job.slots):
                self._release(job)
                job.phase, job.entered = PENDING, self.now
                job.preemptions += gpus == 0
            elif job.phase == RUNNING and job.slots and not gpus:
                job.phase = STOPPING
                self.pool.stop(job.slots)
        out = self.pool.vacant
        free = [k for k, owner in enumerate(self._owner) if owner is None and k not in out]
        order = [] if decision.order is None else decision.order.tolist()
        starting, left = [], len(free)
        for i in dict.fromkeys([*order, *range(len(active))]):
            if active[i].phase == PENDING and 0 < quota[i] <= left:
                starting.append(i)
                left -= quota[i]
        for i in sorted(starting):
            self._start(active[i], tuple(free[: quota[i]]))
            del free[: quota[i]]
        self._due = False  # the slots released here are assigned
        for job in active:
            if job.at_end:  # as before
                self._begin(job)

    def _start(self, job: LiveJob, slots: tuple[int, ...]) -> None:
        job.phase, job.slots, job.answers = JOINING, slots, set(slots)
        job.stay = job.entered = self.now
        job.stay_passes = job.passes + job.part
        job.starts += 1
        if job.first_start < 0:
            job.first_start = self.now
        for slot in slots:
            self._owner[slot] = job
        self.pool.join(slots, job.payload, f"{self.folder}/{job.spec.name}", job.passes)

    def _checked(self, view: ClusterView, decision: Decision) -> list[int]:
        """The quotas, if they are possible."""
        place = f"policy {format_value(self.policy.name)} at {self.now} ms"
        if not isinstance(decision, Decision) or decision.share:
            got = format_value(decision)
            raise PolicyError(f"{place}: expected a Decision without share, got {got}")
        quota = np.asarray(decision.quota)
        if quota.shape != view.job.shape or quota.dtype.kind not in "iu":
            got = format_value(quota)
            raise PolicyError(f"{place}: expected {len(view.job)} quotas, got {got}")
        for i, gpus in enumerate(quota.tolist()):
            job = self.jobs[view.job[i]]
            held, wrong = len(job.slots), ""
            if gpus and gpus not in job.spec.sizes:
                sizes = ", ".join(map(str, job.spec.sizes))
                wrong = f"quota {gpus} is none of its sizes ({sizes})"
            elif held and gpus != held and not job.at_end and (gpus or not self.anytime):
                wrong = f"is within a pass, where its quota stays {held}, got {gpus}"
            elif held and not gpus and not job.spec.preemptible:
                wrong = "is not preemptible, but would lose all workers"
            if wrong:
                raise PolicyError(f"{place}: job {format_value(job.spec.name)}: {wrong}")
        slots = self.slots - len(self.pool.vacant)
        if quota.sum() > slots and not decision.best_effort:
            raise PolicyError(f"{place}: over-allocation: {quota.sum()} workers of {slots}")
        if (wake := decision.wake_at) is not None:
            if wake <= self.now:
                got = format_value(wake)
                raise PolicyError(f"{place}: wake_at: expected a time after now, got {got}")
            self._wake = int(wake)
        return [*map(int, quota)]


def next_pass(job: LiveJob) -> Order:
    """Plan the next pass: its samples by the quota (12), shared equally or by the micro level."""
    workers = len(job.slots)
    if job.spec.micro is None or not job.log:
        samples = job.spec.pass_samples(workers, job.samples)
        equal = [
            [total // workers + (k < total % workers) for k in range(workers)]
            for total in (samples, job.spec.batch_size)
        ]
        return Order(job.passes, equal[0], equal[1], 1.0)
    if job.controller is None:  # at first, and from the whole log after a crash or resumption
        job.controller = job.spec.controller(workers, job.samples, job.rate)
        for k, record in enumerate(job.log[:-1]):
            following = len(job.log[k + 1]["samples"])
            job.controller.step(record["entropy"], record["margin"], following)
    last = job.log[-1]
    step = job.controller.step(last["entropy"], last["margin"], workers)
    return Order(job.passes, step.samples.tolist(), step.batches.tolist(), step.rate_factor)
