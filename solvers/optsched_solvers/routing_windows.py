"""Clairvoyant routing of few requests on a plan's instances: annealing, CP-SAT, and a bound."""

from __future__ import annotations

import math
from collections import Counter
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from optsched.errors import InputError
from optsched.problems.routing import Routing
from optsched.problems.routing.log import BATCH, ENTRY, INSTANCE, Log
from optsched.registry import Support
from optsched.result import Result
from optsched_solvers.cores import confined
from optsched_solvers.cpsat_call import Call
from optsched_solvers.loading import load
from optsched_solvers.routing_windows_bound import hosts_of, one_segment_bound
from optsched_solvers.routing_windows_search import EVERY, Annealing

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from optsched.limits import Limits
    from optsched.monitor import Monitor
    from optsched.problem import Problem
    from optsched.problems.routing.plan import Plan

MOST: Final = 30_000
"""Requests times tuples."""

PROVED: Final = 3_000
"""Requests times tuples up to which CP-SAT follows; above, it finds and proves nothing."""

STEPS: Final = 2_000
"""Of annealing per request, before CP-SAT."""

BOUNDING: Final = 0.35
"""Share of the time that the bound of single segments gets."""

STEP: Final = 100
"""Iterations that a step of annealing counts."""

_Best = tuple[int, list["Batch"]]


class Batch(NamedTuple):
    """Requests that run together."""

    segment: int
    pool: int
    width: int
    start: int
    requests: tuple[int, ...]


class Window:
    """A problem, the pools of its plan, and what requests take alone.

    A pool is all instances of a segment and width on servers that take the same times: without
    contention and links nothing tells them apart.
    """

    def __init__(self, problem: Routing, plan: Plan) -> None:
        self.problem, self.plan = problem, plan
        times = [(int(a), b.tobytes()) for a, b in zip(problem.launch, problem.cost, strict=True)]
        kind = [times.index(one) for one in times]
        self.of = [(k, w, kind[s]) for s, k, w in plan.instances]
        self.pools = sorted(set(self.of))
        self.counts = [self.of.count(one) for one in self.pools]
        missing = set(range(problem.n_segments)) - {k for k, _, _ in self.pools}
        if missing:
            raise InputError(
                f"plan: it has no instance of segment {min(missing)}, and cpsat loads none at run "
                "time; give a plan that has one of every segment"
            )
        held = Counter[int]()
        for s, k, w in plan.instances:
            held[s] += int(problem.vram[k, w])
        self.room = [round(x.vram_mb * 1000) - held[s] for s, x in enumerate(problem.servers)]
        self.hosts = hosts_of(problem, plan, self.room)

    @property
    def is_full(self) -> bool:
        """Whether no server has room for another instance."""
        return max(self.room) < int(self.problem.vram.min())

    def duration(self, pool: int, before: int, width: int, images: int) -> int:
        """A batch's ns, by the widest input."""
        k, _, s = self.pools[pool]
        cost = float(self.problem.cost[s, k, before, width])
        return math.ceil(int(self.problem.launch[s]) + images * cost)

    def log(self, batches: Iterable[Batch]) -> Log:
        """The history in which batches start as early as their order allows."""
        problem = self.problem
        free = [0] * len(self.of)
        there = problem.arrival.tolist()
        before = [0] * problem.n_requests
        rows = []
        entries: list[tuple[int, int]] = []
        for batch in sorted(batches, key=lambda one: (one.start, one.segment)):
            k, pool, w, _, requests = batch
            own = [i for i, of in enumerate(self.of) if of == self.pools[pool]]
            i = min(own, key=free.__getitem__)
            start = max(free[i], *(there[r] for r in requests))
            end = start + self.duration(pool, max(before[r] for r in requests), w, len(requests))
            free[i] = end
            for r in requests:
                there[r], before[r] = end, w
            rows.append((i, k, w, start, end, requests))
        at = Counter[int]()
        instances = []
        for s, k, w in self.plan.instances:
            instances.append((s, at[s], k, w, 0, 0, -1))
            at[s] += 1
        found = []
        for i, k, w, start, end, requests in sorted(rows, key=lambda row: (row[3], row[1])):
            found.append((*instances[i][:2], k, w, start, end, len(requests), len(entries)))
            entries += [(r, start) for r in requests]
        return Log(
            problem, np.array(found, BATCH), np.array(entries, ENTRY),
            np.array(instances, INSTANCE), len(found),
        )  # fmt: skip

    def batches(self, log: Log) -> list[Batch] | None:
        """The batches of a history on just the plan's instances; None of another one."""
        if self.loads(log) or not self.keeps(log):
            return None
        of = {(row["server"], row["id"]): row for row in log.instances}
        found = []
        for row in log.batches:
            there = of[row["server"], row["instance"]]
            same = self.plan.instances.index(
                tuple(int(there[key]) for key in ("server", "segment", "width"))
            )
            requests = log.entries["request"][row["first"] : row["first"] + row["images"]]
            found.append(
                Batch(
                    int(row["segment"]), self.pools.index(self.of[same]), int(row["width"]),
                    int(row["start"]), tuple(sorted(requests.tolist())),
                )
            )  # fmt: skip
        return found

    def loads(self, log: Log) -> bool:
        """Whether a history has other instances than the plan's."""
        return len(log.instances) > len(self.of)

    def keeps(self, log: Log) -> bool:
        """Whether the plan's instances are there all the time, and all requests are served."""
        if log.horizon is not None or len(log.entries) != self.problem.n_operations:
            return False
        kept = log.instances[(log.instances["ready"] == 0) & (log.instances["unload"] < 0)]
        rows = Counter(map(tuple, kept[["server", "segment", "width"]].tolist()))
        return not Counter(self.plan.instances) - rows


def supports(problem: Problem) -> Support:
    """Few requests, on servers whose batches neither slow each other nor wait for anything else."""
    if not isinstance(problem, Routing):
        return Support(False, "it routes requests (optsched.Routing)")
    for one in problem.servers:
        if one.contention is not None:
            return Support(
                False, f"batches slow each other down on server {one.id!r} (contention), which "
                "its model does not know"
            )  # fmt: skip
    for wrong, what in (
        (problem.link is not None, "moving activations takes time (link)"),
        (problem.router > 0, "decisions take time (router_ms)"),
        (problem.ms_per_joule > 0, "energy has a price (ms_per_joule)"),
    ):
        if wrong:
            return Support(False, f"{what}, which its model does not know")
    size = problem.n_requests * len(problem.tuples)
    if size > MOST:
        return Support(
            False, f"it takes up to {MOST} requests times tuples of widths, here are {size}"
        )
    return Support(True)


def solve(
    problem: Routing, plan: Plan, hints: Iterable[Log], limits: Limits, monitor: Monitor
) -> Result:
    """Improve the best of some histories, and bound what any with this plan can reach.

    The bound is one on histories in which the plan's instances are resident all the time, whatever
    else is loaded where a server has room for it; it is not told if a warm start is no such one.
    Options and threads are those of `CpSat`; a step of annealing counts `STEP` iterations.
    """
    window = Window(problem, plan)
    best: _Best | None = None
    claims = True
    if monitor.sequences is not None:
        warm = Log.of_rows(problem, monitor.sequences)
        claims = window.keeps(warm)
        hints = [warm, *hints]
    for log in hints:
        monitor.incumbent(log.rows(), log.cost, "online")
        batches = window.batches(log)
        if batches is not None and (best is None or log.cost < best[0]):
            best = log.cost, batches
        if monitor.should_stop():
            break
    if monitor.objective is None or monitor.should_stop():
        return Result("unknown")
    if claims:
        end = monitor.elapsed + BOUNDING * monitor.remaining
        monitor.bound(
            one_segment_bound(
                problem, window.hosts, monitor.objective,
                lambda: monitor.should_stop() or monitor.elapsed > end,
                2 if limits.iterations is None else 1,
            ), "one segment",
        )  # fmt: skip
    if best is not None and problem.n_requests and not monitor.should_stop():
        best = _anneal(window, best, monitor, limits)
        small = _is_small(problem) and not monitor.should_stop()
        if small and load(monitor, "ortools.sat.python.cp_model"):
            _Run(window, best, claims and window.is_full, limits, monitor).run()
    return Result("unknown")


def _is_small(problem: Routing) -> bool:
    return problem.n_requests * len(problem.tuples) <= PROVED


def _anneal(window: Window, best: _Best, monitor: Monitor, limits: Limits) -> _Best:
    """Better batches: all the time for many requests, a few steps where a proof may follow."""
    annealing = Annealing(window, best[1], limits.seed)
    most: float = STEPS * window.problem.n_requests if _is_small(window.problem) else math.inf
    if limits.iterations is not None:
        most = min(most, limits.iterations / STEP)
    began, left = monitor.elapsed, monitor.remaining

    def progress(step: int) -> float:
        if step:
            monitor.advance(EVERY * STEP)
        if monitor.should_stop():
            return 1.0
        return max(step / most, (monitor.elapsed - began) / left)

    def improved() -> None:
        nonlocal best
        log = window.log(annealing.batches())
        if log.cost < best[0]:
            best = log.cost, window.batches(log) or []
            monitor.incumbent(log.rows(), log.cost, "annealing")

    annealing.run(progress, improved)
    return best


class _Run(Call):
    """One call of CP-SAT."""

    def __init__(self, window: Window, best: _Best, claims: bool, limits: Limits, monitor: Monitor):
        from optsched_solvers.routing_windows_model import Model

        self.window, self.claims = window, claims
        self.built = Model(window, best[1], best[0], (monitor.lower_bound or 0) * claims)
        super().__init__(self.built.model, limits, monitor)
        self.solver.best_bound_callback = self._bound

    def _search(self) -> None:
        with confined(self.cores):
            if self._solved():
                self._bound(self.solver.best_objective_bound)

    def _solution(self, value: Callable[[Any], int]) -> None:
        log = self.window.log(self.built.batches(value))
        self.monitor.incumbent(log.rows(), log.cost, "cpsat")

    def _bound(self, bound: float) -> None:
        try:
            if self.claims and abs(bound) <= 2**53:
                self.monitor.bound(math.ceil(bound - 1e-3), "cpsat")
        except BaseException as error:
            self._fail(error)
