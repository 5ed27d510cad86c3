"""The course of a run: which segment follows which, as jobs end, come in, and are re-scheduled."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol

from optsched.arraypipe.planning.segments import Segment

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from optsched.arraypipe.plan import ExecutionPlan
    from optsched.arraypipe.planning.messages import Routes


class Runner(Protocol):
    """What the course has to know of a job."""

    begin: int  # first iteration that no segment has run yet
    end: int  # first iteration that will not be run

    @property
    def over(self) -> bool:
        """Whether it has done all its iterations, or failed."""

    def rest(self) -> None:
        """No segment will run it any more."""


class Change(NamedTuple):
    """Another plan, or other jobs on its seats, from the next possible moment on."""

    plan: ExecutionPlan
    seats: tuple[int, ...]


class Planner(Protocol):
    """Wishes for a change of plan or seats."""

    def poll(self, segment: Segment) -> Change | None:
        """A change, if one is wanted now; asked once a cycle and at the end, never waited for."""

    @property
    def joined(self) -> Sequence[tuple[int, int]]:
        """New jobs so far: after which job each has come, and from which iteration it goes on."""

    def join(self, rows: Sequence[tuple[int, int]]) -> None:
        """On another rank: make the jobs that have joined on the first one."""


class Record(NamedTuple):
    """One executed block; times in nanoseconds of a monotonic clock."""

    segment: int  # its position in the course
    operation: int
    cycle: int
    iteration: int
    start: int
    end: int


class Course:
    """Makes the segments of a run.

    Parameters
    ----------
    plan
        The first plan; seat j is job j.
    runs
        All jobs; may grow while the run goes on.
    routes_of
        Messages of a plan.
    """

    def __init__(
        self,
        plan: ExecutionPlan,
        runs: Sequence[Runner],
        routes_of: Callable[[ExecutionPlan], Routes],
    ) -> None:
        self.runs, self.routes_of = runs, routes_of
        self.segments: list[Segment] = []
        self.name = plan.schedule.name
        self.forgotten = 0  # segments of which only the number is left
        self.follow(Change(plan, tuple(range(plan.n_jobs))))

    @property
    def now(self) -> Segment:
        """The segment that was begun last."""
        return self.segments[-1]

    def close(self) -> None:
        """Note that the segment is over: its jobs have done what it ran."""
        segment = self.now
        for seat, job in enumerate(segment.seats):
            run = self.runs[job]
            run.begin = segment.first[seat] + segment.count[seat]
            if run.begin >= run.end:
                run.rest()
        segment.drop_tables()

    def follow(self, change: Change) -> Segment:
        """Begin another segment; jobs go on where the one before has left them."""
        self.segments.append(self.segment(change))
        return self.now

    def forget(self, number: int) -> None:
        """Keep nothing of the segments before this one: no block of theirs is remembered."""
        if number > self.forgotten:
            here = self.segments[number]
            empty = Segment(here.plan, here.routes, (), [], [])
            self.segments[self.forgotten : number] = [empty] * (number - self.forgotten)
            self.forgotten = number

    def segment(self, change: Change) -> Segment:
        """What would follow if the present segment were over."""
        plan = change.plan
        runs = [self.runs[job] for job in change.seats]
        known = [s.routes for s in self.segments[-1:] if s.plan is plan]
        routes = known[0] if known else self.routes_of(plan)
        return Segment(
            plan, routes, change.seats, [run.begin for run in runs],
            [max(0, run.end - run.begin) for run in runs],
        )  # fmt: skip
