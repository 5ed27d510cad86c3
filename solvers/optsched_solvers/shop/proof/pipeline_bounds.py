"""Bounds of pipelines by `order_relaxations`: a quick one, and one that grows while time lasts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

from optsched.model import bounds
from optsched_solvers.shop.proof.order_relaxations import Relaxation, number_of_states, relaxations
from optsched_solvers.shop.proof.order_states import KIND, NEVER, SEARCH, explore

if TYPE_CHECKING:
    from optsched.model.schedule import IntArray, Schedule
    from optsched.solving.monitor import Monitor

SLICE: Final = 1 << 14
"""States between two looks at the monitor, a few milliseconds."""
SOURCE: Final = "pipeline_bounds"
ROUGHLY: Final = 1000
"""Inverse precision of the first round: a thousandth of the bound."""


class Probe:
    """Decide in slices whether some order ends by a deadline."""

    def __init__(self, relaxation: Relaxation, deadline: int, finish: IntArray) -> None:
        copies, pairs = relaxation.copies, relaxation.pairs
        families = [f for group in relaxation.groups for f in group]
        first = np.cumsum([0, *(len(group) for group in relaxation.groups)]).tolist()
        space = (pairs, deadline, 0, relaxation.states, relaxation.capacity, 0, *first)
        self.space = np.array([space], SEARCH)
        sizes = [number_of_states([c], pairs) for c in copies.tolist()]
        stride = np.cumprod([1, *sizes[:-1]], dtype=np.int64)
        columns = zip(copies.tolist(), stride.tolist(), relaxation.table.tolist(), strict=True)
        self.kinds = np.array([(c, s, *row, 0, 0) for c, s, row in columns], KIND)
        self.base = np.array([f.base for f in families], np.int64).ravel()
        weight = np.array([f.weight for f in families], np.int64).reshape(-1, len(copies))
        self.weight = weight.ravel()
        self.sums = np.zeros(len(families), np.int64)
        for group in (1, 3):  # at first no row has passed
            rows = slice(first[group], first[group + 1])
            self.sums[rows] = weight[rows] @ copies
        self.finish = finish[: relaxation.states]
        self.finish[:] = NEVER
        self.finish[0] = 0

    def advance(self, states: int) -> bool | None:
        """Whether the deadline can be met; None if more slices are needed."""
        end = explore(
            self.space, self.kinds, self.base, self.weight, self.sums, self.finish, states
        )
        return None if end == -1 else bool(end < NEVER)


def improve(
    graph: Schedule,
    monitor: Monitor,
    *,
    iterations: int | None = None,
) -> int:
    """Report better and better bounds to a monitor; returns the number of deadlines tried.

    Nothing happens if the rows of the one-shot graph have no common route.
    """
    search = _Search(graph, monitor, iterations)
    everything: list[Relaxation] = []
    for relaxation in relaxations(graph):
        if monitor.should_stop():
            return 0
        everything.append(relaxation)
    singles = [r for r in everything if not r.pairs]
    exact = [r for r in everything if r.pairs and not r.merged]
    merged = [r for r in everything if r.pairs and r.merged]
    # what the best machine proves first, last digits later
    rounds = ((singles, ROUGHLY), (exact, ROUGHLY), (singles, None), (exact, None), (merged, None))
    for some, closeness in rounds:
        # where rows in one order proved most, two orders should prove more
        ranked = sorted(some, key=lambda r: -search.proved.get(r.machine, 0))
        if not all(search.raise_bound(r, closeness) for r in ranked):
            break
    return search.tried


class _Search:
    """Deadlines tried so far, and what came out."""

    def __init__(self, graph: Schedule, monitor: Monitor, iterations: int | None) -> None:
        self.horizon = bounds.horizon(graph)
        self.monitor = monitor
        self.most = iterations
        self.tried = 0
        self.reached: dict[str, int] = {}  # least deadline met, by relaxation
        self.proved: dict[int, int] = {}  # best bound by machine
        self.space = np.empty(0, np.int64)

    def raise_bound(self, relaxation: Relaxation, closeness: int | None) -> bool:
        """Bisection on the deadline, to the last digit or roughly; False if all must stop."""
        monitor, name, step = self.monitor, relaxation.name, 0
        while True:
            known = monitor.lower_bound or 0
            reached = self.reached.get(name)
            if reached is None:
                deadline = known + step
            elif reached - known <= (known // closeness if closeness else 0):
                return True
            else:
                deadline = (known + reached - 1) // 2
            if monitor.objective is not None:
                deadline = min(deadline, monitor.objective - 1)
            deadline = min(deadline, self.horizon)  # beyond: nothing fits into the memory
            if deadline < known:
                return True
            met = self._met(relaxation, deadline)
            if met is None:
                return False
            if met:
                self.reached[name] = deadline
            else:
                self.proved[relaxation.machine] = deadline + 1
                monitor.bound(deadline + 1, SOURCE)
                step = max(2 * step, 1 + known // 1000)

    def _met(self, relaxation: Relaxation, deadline: int) -> bool | None:
        """Whether the deadline can be met; None if there is no time left to find out."""
        if self.most is not None and self.tried >= self.most:
            return None
        self.tried += 1
        if len(self.space) < relaxation.states:
            self.space = np.empty(relaxation.states, np.int64)
        probe = Probe(relaxation, deadline, self.space)
        while not self.monitor.should_stop():
            answer = probe.advance(SLICE)
            if answer is not None:
                return answer
        return None
