"""Few requests on a plan's instances: the batches of a clairvoyant routing, and their history."""

from __future__ import annotations

import math
from collections import Counter
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from optsched.errors import InputError
from optsched.problems.routing.log import BATCH, ENTRY, INSTANCE, Log
from optsched_solvers.routing.windows_bound import hosts_of, kinds

if TYPE_CHECKING:
    from collections.abc import Iterable

    from optsched.problems.routing import Routing
    from optsched.problems.routing.plan import Plan


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
        kind = kinds(problem)
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
