"""A pool of workers in simulated time: the scheduler of real jobs without processes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from optsched.cluster import ClusterView, Decision
from optsched.elastic.live import LiveJob, PassTimes
from optsched.elastic.scheduler import Scheduler
from optsched.elastic.workers import Event, Order, Processes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from optsched.elastic import TrainingJob


class Replay:
    """Give every pass the workers that it had in another run; jobs have to be preemptible."""

    name = "replay"
    clairvoyant = False

    def __init__(self, quotas: Mapping[str, Sequence[int]]) -> None:
        self.quotas = quotas

    def decide(self, view: ClusterView) -> Decision:
        """The sizes by pass (the last one for later passes), while there are workers."""
        left = int(view.capacity.sum() - view.gpus[~view.at_pass_end].sum())
        quota = view.gpus.copy()
        for i in np.flatnonzero(view.at_pass_end).tolist():
            row = self.quotas[view.workload.names[view.job[i]]]
            size = row[min(int(view.passes[i]), len(row) - 1)] if row else 0
            quota[i] = size if size <= left else 0
            left -= int(quota[i])
        return Decision(quota)


class SimulatedPool(Processes):
    """Workers that take given times; a job's payload is its name.

    Parameters
    ----------
    pass_time
        Milliseconds of a pass of a job on so many workers.
    start
        Milliseconds to join a job.
    """

    def __init__(self, slots: int, pass_time: Callable[[str, int], int], start: int = 0) -> None:
        self.pass_time, self.start = pass_time, start
        self.time = 0
        self.devices = ["cpu"] * slots
        self.vacant = set()
        self.due: list[tuple[int, Event]] = []
        self.open: dict[str, tuple[Order, int, int, float]] = {}  # order, begin, end, part done
        self.stopped: dict[str, tuple[Order, float]] = {}
        self.job: list[str | None] = [None] * slots
        self.late = 0  # of the clock, as of real ones
        self.deadly = ""  # the job whose workers die in every pass
        self.metric: Callable[[str, int], float] = lambda name, done: 0.0
        self.joins: list[tuple[str, int]] = []
        self.missing: dict[str, dict[int, Any]] = {}  # records of passes saved but not reported

    def now(self) -> int:
        """Milliseconds since the start."""
        return self.time + self.late

    def join(self, slots: Sequence[int], job: bytes, folder: str, done: int) -> None:
        """Every slot answers after `start`."""
        self.joins.append((job.decode(), done))
        missing = self.missing.get(job.decode(), {}).pop(done, None)
        for slot in slots:
            assert self.job[slot] is None, "a worker has two jobs"
            self.job[slot] = job.decode()
            answer = (1000, 0.1, missing, self.stopped.get(job.decode()))
            self.due.append((self.time + self.start, Event(slot, "joined", answer)))

    def order(self, slots: Sequence[int], order: Order) -> None:
        """Every slot answers after the pass time, or after what is left of it."""
        name = self.job[slots[0]]
        assert name is not None
        assert {self.job[slot] for slot in slots} == {name}
        _, part = self.stopped.get(name, (None, 0.0))
        assert part or len(order.samples) == len(order.batches) == len(slots)
        record = {
            "samples": order.samples, "batches": order.batches, "rate": order.rate, "loss": 0.0,
            "uncertainty": 0.9 / (1 + order.number),
            "entropy": [0.9 / (1 + order.number)] * len(slots),
            "margin": [0.5] * len(slots), "metric": self.metric(name, order.number + 1),
        }  # fmt: skip
        end = self.time + round(self.pass_time(name, len(slots)) * (1 - part))
        self.open[name] = (order, self.time, end, part)
        if name == self.deadly:
            self.due.append((self.time + 5, Event(slots[-1], "died")))
        self.due += [(end, Event(slot, "passed", record)) for slot in slots]

    def stop(self, slots: Sequence[int]) -> None:
        """Every slot answers at once, with the part of the pass that is done."""
        name = self.job[slots[0]]
        assert name is not None
        order, begin, end, part = self.open[name]
        part += (1 - part) * (self.time - begin) / (end - begin)
        self.stopped[name] = (order, part)
        self.due = [row for row in self.due if row[1].slot not in slots]
        self.due += [(self.time, Event(slot, "stopped", part)) for slot in slots]

    def leave(self, slots: Iterable[int]) -> None:
        """Free slots."""
        for slot in slots:
            assert self.job[slot] is not None
            self.job[slot] = None

    def kill(self, slots: Iterable[int]) -> None:
        """Free slots, whatever they do."""
        for slot in slots:
            self.job[slot] = None
            self.due = [(time, event) for time, event in self.due if event.slot != slot]

    def dead(self, slots: Iterable[int]) -> bool:
        """No slot dies without an event."""
        return False

    def wait(self, until: int | None) -> list[Event]:
        """The next events."""
        first = min((time for time, _ in self.due), default=None)
        assert first is not None or until is not None, "waits for ever"
        if first is None or (until is not None and until < first):
            assert until is not None
            self.time = max(self.time, until)
            return []
        self.time = max(self.time, first)
        events = [event for time, event in self.due if time == first]
        self.due = [(time, event) for time, event in self.due if time != first]
        return events


def scheduled(
    jobs: Sequence[TrainingJob], pool: SimulatedPool, policy: Any, times: PassTimes | None = None,
    anytime: bool = False,
) -> Scheduler:  # fmt: skip
    """The scheduler after a run of these jobs, which are in order of arrival."""
    known = [
        LiveJob(spec, i, spec.name.encode(), round(spec.submit * 1e3))
        for i, spec in enumerate(jobs)
    ]
    scheduler = Scheduler(known, pool, policy, "", times or PassTimes(), anytime=anytime)
    assert scheduler.run()
    return scheduler
