"""Clairvoyant routing of few requests on a plan's instances: CP-SAT, whole and in windows."""

from __future__ import annotations

import math
import random
from collections import Counter
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from optsched.errors import InputError
from optsched.problems.routing import Routing
from optsched.problems.routing.log import BATCH, ENTRY, INSTANCE, Log
from optsched.registry import Support
from optsched.result import Result
from optsched_solvers.cores import confined
from optsched_solvers.cpsat_call import STOP, Call
from optsched_solvers.loading import load
from optsched_solvers.routing_windows_bound import hosts_of, one_segment_bound

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from optsched.limits import Limits
    from optsched.monitor import Monitor
    from optsched.problem import Problem
    from optsched.problems.routing.plan import Plan

MOST: Final = 100_000
"""Requests times tuples."""

EFFORT: Final = (8.0, 1.5)
"""CP-SAT's deterministic seconds for the whole at first, and for a window."""

WINDOW: Final = 6
"""Requests of the first windows; they grow when none improves."""


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
        rows, entries = [], []
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
        """Whether the plan's instances are there in it from the beginning to the end."""
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
    Options, threads and iterations are those of `CpSat`.
    """
    window = Window(problem, plan)
    best: tuple[int, list[Batch]] | None = None
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
    if monitor.objective is None or monitor.should_stop():
        return Result("unknown")
    if claims:
        least = one_segment_bound(problem, window.hosts, monitor.objective, monitor.should_stop)
        monitor.bound(least, "one segment")
    if best is None or monitor.should_stop() or not load(monitor, "ortools.sat.python.cp_model"):
        return Result("unknown")
    _Run(window, best, claims and window.is_full, limits, monitor).run()
    return Result("unknown")


class _Run(Call):
    """Many calls: the whole problem, then windows of it, all others' batches kept."""

    def __init__(
        self, window: Window, best: tuple[int, list[Batch]], claims: bool, limits: Limits,
        monitor: Monitor,
    ) -> None:  # fmt: skip
        self.window, self.best, self.claims = window, best, claims
        self.spent, self.effort, self.whole = 0.0, 0.0, False
        self.built: Any = None
        super().__init__(None, limits, monitor)

    def _search(self) -> None:
        n = self.window.problem.n_requests
        dice = random.Random(self.limits.seed)
        with confined(self.cores):
            if self._try(range(n), EFFORT[0]):
                return
            size, effort = WINDOW, EFFORT[1]
            while size < n:
                before = self.best[0]
                firsts = list(range(-(size // 2), n - size // 2, max(1, size // 2)))
                dice.shuffle(firsts)
                for first in firsts:
                    if self._ended():
                        return
                    self._try(range(max(0, first), min(n, first + size)), effort)
                if self.best[0] == before:
                    size, effort = size + 2, effort * 1.5
            while not self._ended():
                effort *= 4
                if self._try(range(n), effort):
                    return

    def _ended(self) -> bool:
        most = self.limits.iterations
        used_up = most is not None and self.spent * 1e6 >= most
        return used_up or self.invalid or self.failure is not None or self.monitor.should_stop()

    def _try(self, free: range, effort: float) -> bool:
        """Improve the batches of these requests; whether an optimum was proved."""
        from optsched_solvers.routing_windows_model import Model

        if self._ended():
            return False
        cost, batches = self.best
        self.whole, self.effort = len(free) == self.window.problem.n_requests, effort
        least = self.monitor.lower_bound or 0 if self.claims else 0
        self.built = Model(self.window, batches, cost, least, free)
        self.model = self.built.model
        self.solver = self._solver()
        if self.whole and self.claims:
            self.solver.best_bound_callback = self._bound
        solved = self._solved()
        self.spent += max(1e-3, self.solver.response_proto.deterministic_time)
        if solved and self.whole:
            self._bound(self.solver.best_objective_bound)
        return solved and self.whole

    def _solution(self, value: Callable[[Any], int]) -> None:
        log = self.window.log(self.built.batches(value))
        if log.cost < self.best[0]:
            found = self.window.batches(log)
            assert found is not None
            self.best = log.cost, found
            self.monitor.incumbent(log.rows(), log.cost, "cpsat")

    def _bound(self, bound: float) -> None:
        try:
            if self.claims and abs(bound) <= 2**53:
                self.monitor.bound(math.ceil(bound - 1e-3), "cpsat")
        except BaseException as error:
            self._fail(error)

    def _solver(self) -> Any:
        solver = super()._solver()
        given, limits = solver.parameters, self.limits
        if "max_deterministic_time" not in limits.options.get("parameters", {}):
            left = self.effort
            if limits.iterations is not None:
                left = min(left, max(1e-6, limits.iterations * 1e-6 - self.spent))
            given.max_deterministic_time = left
        if limits.time_limit is not None:
            given.max_time_in_seconds = max(0.0, self.monitor.remaining - STOP)
        return solver
