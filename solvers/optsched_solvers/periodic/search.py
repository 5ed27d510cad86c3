"""Local search for periods: tabu walks on ordered cycles, restarted near the best orders."""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING, Final

import numpy as np

from optsched.errors import CyclicOrder
from optsched.io.values import integer
from optsched.kernels.cycle_ratio import cycle_time
from optsched.solving.result import Result
from optsched.solving.solver import Support
from optsched_solvers._loading import load
from optsched_solvers._random import random_state
from optsched_solvers.periodic.construct import first_orders
from optsched_solvers.shop import hand_made

if TYPE_CHECKING:
    from collections.abc import Mapping

    from optsched.model.schedule import Problem, Schedule
    from optsched.solving.limits import Limits
    from optsched.solving.monitor import Monitor
    from optsched.solving.result import PeriodicOrders

PATIENCE: Final = 1000
"""Moves without improvement after which a walk ends and the next one starts elsewhere."""

NOISE: Final = (5, 20)
"""Random moves at the beginning of a walk: at least, below."""

WORSE: Final = 0.002
"""A walk starts where the last one ended if that is worse by at most this share."""

RETURN: Final = 20
"""Number of walks after which the search returns to the best orders."""

TENURE: Final = (12, 6)
"""Moves for which a pair is tabu: at least, and the range of the random part."""

SLICE: Final = 3600
"""Operations times moves of a slice, some 10 ms: the monitor is polled between slices."""

STUCK_COST: Final = 100
"""Moves counted for a walk that cannot make any."""

_ANY: Final = 1 << 60


def solve(problem: Problem, limits: Limits, monitor: Monitor, patience: int = PATIENCE) -> Result:
    """Walk from the monitor's or from constructed orders, until a limit.

    One iteration is one move (or one construction). Nothing is ever proved.
    """
    graph = problem.graph()
    begin(problem, limits, monitor)
    if not monitor.should_stop() and load(monitor, "periodic.orders", "periodic.walk"):
        _Search(graph, limits, monitor, patience).run()
    return Result("unknown")


def begin(problem: Problem, limits: Limits, monitor: Monitor) -> None:
    """Constructed and hand-made orders; at least one job after the other, which always fits."""
    is_new = monitor.solution is None and limits.iterations != 0
    first_orders(problem, limits, monitor)
    if is_new:
        hand_made.offer(problem, monitor)


class CycleWalk:
    """Orders of a cycle that move by tabu search; `floor` is a lower bound (>= 1) of the period.

    The same calls of `load` and `run` give the same orders, however the moves are cut into calls
    of `run`. Operations hold at most one resource.
    """

    def __init__(self, graph: Schedule, seed: int, floor: int) -> None:
        from optsched_solvers.periodic import walk
        from optsched_solvers.periodic.orders import Cycle, State

        self.graph, self._kernel = graph, walk.walk
        self.cycle, self.state = Cycle.of(graph), State.of(graph)
        self._zeros = np.zeros(graph.n_operations, np.int64)
        self.control = control = np.zeros(1, walk.CONTROL)
        control["random"] = random_state(seed)
        control["columns"] = np.diff(graph.users.indptr).max(initial=1)
        control["setups"], control["floor"] = graph.has_setups, floor
        control["tenure"], control["spread"] = TENURE

    @property
    def moves(self) -> int:
        """Moves made since the walk was made."""
        return int(self.control["moves"][0])

    @property
    def value(self) -> int:
        """Least period of the present orders."""
        return int(self.control["value"][0])

    @property
    def best(self) -> int:
        """Least period since the last `load`, that of the orders given not counted."""
        return int(self.control["best"][0])

    def load(self, orders: PeriodicOrders, noise: int = 0) -> int:
        """Begin anew at feasible orders, with so many random moves; returns their period."""
        from optsched_solvers.periodic.orders import load as load_orders

        control, given = self.control, (self.cycle, self.state, orders.sequences.ids, orders.offset)
        self.state.order[:] = np.arange(len(orders.offset))
        control["value"] = load_orders(*given, self._zeros, int(control["floor"][0]))
        control["best"], control["stale"], control["noise"] = _ANY, 0, noise
        return self.value

    def run(self, moves: int, *, patience: int = _ANY, target: int = 0) -> int:
        """Make up to so many moves; end after `patience` of them in vain, or at the target.

        Returns
        -------
        int
            `walk.RUNNING`, or why it ended: `STUCK` (no move left) or `DONE`.
        """
        self.control["patience"] = patience
        self.control["target"] = max(target, int(self.control["floor"][0]))
        status: int = self._kernel(self.cycle, self.state, self.control, moves)
        return status

    def best_orders(self) -> PeriodicOrders:
        """The best orders since the last `load`."""
        return self.state.best(self.graph)


class _Search:
    """Walks until the monitor says stop or the moves are used up."""

    def __init__(self, graph: Schedule, limits: Limits, monitor: Monitor, patience: int) -> None:
        self.graph, self.monitor, self.patience = graph, monitor, patience
        self.target = limits.target or 0
        self.left = limits.iterations  # moves
        self.walk = CycleWalk(graph, limits.seed, max(1, monitor.lower_bound or 1))
        self.random = np.random.default_rng(limits.seed)
        self.known: PeriodicOrders | None = None
        self.known_value = _ANY

    def run(self) -> None:
        """Walk from the best orders, then again and again from near the end of the last walk."""
        self.take_over()
        assert self.known is not None
        base, value = self.known, self.known_value
        noise, walks = 0, 0
        while not self.is_over():
            ended = self.explore(base, noise)
            if ended is not None and ended[1] <= value * (1 + WORSE):
                base, value = ended
            walks += 1
            if walks % RETURN == 0 or self.take_over():
                base, value = self.known, self.known_value
            noise = int(self.random.integers(*NOISE))

    def explore(self, base: PeriodicOrders, noise: int) -> tuple[PeriodicOrders, int] | None:
        """Walk once; return the best orders and their period, None if no move was made."""
        from optsched_solvers.periodic.walk import RUNNING

        walk = self.walk
        walk.load(base, noise)
        first, status = walk.moves, RUNNING
        while status == RUNNING and not self.is_over():
            moves, before = max(4, SLICE // max(1, self.graph.n_operations)), walk.moves
            if self.left is not None:
                moves = min(moves, self.left)
            status = walk.run(moves, patience=self.patience, target=self.target)
            self.spend(walk.moves - before)
            if walk.best < self.known_value and not self.report():
                return None
        if walk.moves == first:
            self.spend(STUCK_COST)
            return None
        return walk.best_orders(), walk.best

    def report(self) -> bool:
        """Report new best orders; False if blocks of no time turn out to be in a deadlock."""
        orders = self.walk.best_orders()
        try:
            period = cycle_time(self.graph, orders.sequences, orders.offset).period
        except CyclicOrder:
            return False
        self.known, self.known_value = orders, period
        self.monitor.incumbent(self.known, period, "tabu")
        return True

    def take_over(self) -> bool:
        """Adopt the monitor's orders if they are better; with counted moves only at the start."""
        if self.known is not None and self.left is not None:
            return False
        value, answer = self.monitor.best
        if answer is None or value is None or value >= self.known_value:
            return False
        self.known, self.known_value = answer, value
        return True

    def spend(self, moves: int) -> None:
        self.monitor.advance(moves)
        if self.left is not None:
            self.left -= moves

    def is_over(self) -> bool:
        return self.monitor.should_stop() or (self.left is not None and self.left <= 0)


class Tabu:
    """Tabu search on the orders of a cycle; one iteration is one move, nothing is ever proved."""

    name = "tabu"
    kinds = ("periodic",)
    options: Mapping[str, str] = MappingProxyType(
        {"patience": f"moves without improvement before a walk ends (default {PATIENCE})"}
    )

    def supports(self, problem: Problem) -> Support:
        """Every rolling array."""
        return Support(True)

    def solve(self, problem: Problem, limits: Limits, monitor: Monitor) -> Result:
        """Walk from the best known or from constructed orders, until a limit."""
        patience = integer("options.patience", limits.options.get("patience", PATIENCE), 1, 2**31)
        return solve(problem, limits, monitor, patience)
