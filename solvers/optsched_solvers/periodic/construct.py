"""First orders for cycles: list schedules of many cycles and insertion, folded into one period.

A list schedule of the cycle unrolled several times settles into a rhythm. The starts of one late
instance of every operation, modulo the lower bound or the rate reached, give orders whose least
period is computed exactly. It often is the lower bound itself.
"""

from __future__ import annotations

from itertools import islice
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from optsched.errors import CyclicOrder
from optsched.model.schedule import Arcs, Csr, Schedule
from optsched.solving.result import PeriodicOrders, Result
from optsched.solving.solver import Support
from optsched_solvers._loading import load, loaded
from optsched_solvers.shop.rules import (
    RULES,
    Dispatcher,
    Variant,
    one_job_at_a_time,
    quick_schedule,
    variants,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from optsched.model.schedule import IntArray, Problem
    from optsched.solving.limits import Limits
    from optsched.solving.monitor import Monitor

MODULES: Final = (
    "periodic.orders", "periodic.insertion", "optsched.kernels.list_schedule",
    "optsched.kernels.longest_path",
)  # fmt: skip
"""Modules that compile; insertion needs the first two."""

CYCLES: Final = 6
"""Length of an unrolled cycle; its second half is folded."""

ROLLING: Final = (
    "fifo", "b_first", "job_lpt", "one_f_one_b", "valley", "job_spt", "f_first", "tail", "mwkr",
)  # fmt: skip
"""Rules for unrolled cycles, those first that met the bound most often."""

MAX_UNROLLED: Final = 60_000
"""Operations of an unrolled cycle without memory limits."""

MAX_CAPPED: Final = 10_000
"""The same with memory limits, where the banker's check of a block looks at all open blocks."""

CHECK: Final = 3e-9
"""Seconds that the banker's check spends on one micro-batch."""

SLACK: Final = (1.0, 1.01, 1.02, 1.035, 1.05, 1.075, 1.1, 1.15, 1.2, 1.3, 1.5, 1.75, 2.0)
"""Lengths of the circle that insertion tries, over the lower bound."""

ONE_BY_ONE: Final = "one job at a time"


class Found(NamedTuple):
    """Orders and the least period that they allow."""

    orders: PeriodicOrders
    period: int


class Dispatch:
    """The best of all rules and of insertion, folded into one period; one iteration is one."""

    name = "dispatch"
    kinds = ("periodic",)
    options: Mapping[str, str] = MappingProxyType({"rules": "list of rules to try instead of all"})

    def supports(self, problem: Problem) -> Support:
        """Every rolling array."""
        return Support(True)

    def solve(self, problem: Problem, limits: Limits, monitor: Monitor) -> Result:
        """Try every rule; stop early at a limit or a proof."""
        from optsched_solvers.shop.dispatch import checked_options

        rules, _ = checked_options(limits.options)
        chosen = rules if "rules" in limits.options else None
        first_answers(problem.graph(), monitor, most=limits.iterations, rules=chosen)
        return Result("unknown")


def first_orders(problem: Problem, limits: Limits, monitor: Monitor) -> int:
    """Offer constructed orders if there are none; at least one job after the other, always fit.

    Returns the number of constructions, each of which is an iteration.
    """
    graph, made = problem.graph(), 0
    if monitor.objective is None and limits.iterations != 0:
        from optsched_solvers.shop import hand_made

        hand_made.offer_first(problem, limits, monitor)
        made = first_answers(graph, monitor, most=limits.iterations)
    if monitor.objective is None:
        from optsched.kernels.cycle_ratio import cycle_time

        monitor.incumbent(one_by_one(graph), cycle_time(graph, graph.users).period, ONE_BY_ONE)
    return made


def first_answers(
    graph: Schedule,
    monitor: Monitor,
    most: int | None = None,
    rules: tuple[str, ...] | None = None,
) -> int:
    """Report the improvements of insertion and of rolling rules to the monitor.

    `graph` is a cycle with at most one resource an operation. At most `most` constructions are
    made, by these rules (default: all, and insertion). Returns their number; 0 if the kernels were
    not loaded in time (then an answer of `offer_quick` may have been reported).
    """
    if most == 0:
        return 0
    if not loaded(*MODULES) and monitor.objective is None and most is None:
        offer_quick(graph, monitor)
    if not load(monitor, *(MODULES if rules is not None else MODULES[:2])):
        return 0
    made, best = 0, None
    for found, source in constructions(graph, monitor, rules):
        made += 1
        monitor.advance(1)
        if found is not None and (best is None or found.period < best):
            best = found.period
            monitor.incumbent(found.orders, best, f"dispatch {source}")
        if _is_over(monitor) or made == most or not load(monitor, *MODULES):
            break
    return made


def _is_over(monitor: Monitor) -> bool:
    """Whether to stop; without any answer only the time counts."""
    return monitor.remaining <= 0 or (monitor.objective is not None and monitor.should_stop())


def offer_quick(graph: Schedule, monitor: Monitor) -> None:
    """Offer one job after the other and the first rule's iteration repeated, in plain Python.

    For the seconds in which the kernels are compiled.
    """
    from optsched.analysis.rolling import rolling
    from optsched.model.graph import machine_orders
    from optsched.model.verify import verify

    once = Dispatcher(unrolled(graph, 1), 0)
    offers = [(ONE_BY_ONE, machine_orders(once.graph, one_job_at_a_time(once.graph)))]
    rule = next(variants(once.graph, RULES))
    listed = quick_schedule(once, rule)
    if listed is not None:
        offers.append((f"dispatch {rule}, one iteration", listed[0]))
    for source, sequences in offers:
        schedule = rolling(graph, sequences)
        if schedule.sequences is not None and schedule.period is not None and not verify(schedule):
            orders = PeriodicOrders(schedule.sequences, schedule.offset)
            monitor.incumbent(orders, schedule.period, source)


# orders from starts


class Folder:
    """Make orders from starts, and compute their least period; `least` is a bound of any orders."""

    def __init__(self, graph: Schedule, least: int = 1) -> None:
        from optsched_solvers.periodic.orders import Cycle, State, load

        self.graph, self.least, self._load = graph, least, load
        self.cycle, self._state = Cycle.of(graph), State.of(graph)
        self._instant = bool((self.cycle.operation.least <= 0).any())
        by_duration = np.argsort(graph.duration, kind="stable")
        self._placed = by_duration[graph.single_resource[by_duration] >= 0]

    def fold(self, start: IntArray, period: int) -> Found | None:
        """Order operations by start modulo a period; None if that contradicts arcs or memory.

        Starts are of one instance of every operation, at any absolute time; those of one resource
        may overlap modulo the period. The orders' least period may be longer or shorter than it.
        """
        offset, phase = np.divmod(start, period)
        placed = self._placed  # of equal phases blocks of no time come first
        key = self.graph.single_resource[placed] * period + phase[placed]
        row = placed[np.argsort(key, kind="stable")]
        orders = PeriodicOrders(Csr(self.graph.users.indptr, row), offset - offset.min())
        return self.evaluate(orders, start, phase)

    def evaluate(
        self, orders: PeriodicOrders, start: IntArray | None = None, phase: IntArray | None = None
    ) -> Found | None:
        """Compute the least period of orders; None for a contradiction or too little memory.

        Starts that nearly fit make it faster.
        """
        state, op = self._state, self.cycle.operation
        if start is None or phase is None:
            start = phase = np.zeros(self.graph.n_operations, np.int64)
        state.order[:] = np.argsort(phase, kind="stable")
        ids, offset = orders.sequences.ids, orders.offset
        period = int(self._load(self.cycle, state, ids, offset, start, self.least))
        level = state.node.level
        if not period or (level < 0).any() or (level + op.need > op.capacity).any():
            return None
        if self._instant:  # blocks of no time in a deadlock: no period is too short for them
            from optsched.kernels.cycle_ratio import cycle_time

            try:
                cycle_time(self.graph, orders.sequences, orders.offset)
            except CyclicOrder:
                return None
        return Found(orders, period)

    def best_fold(self, starts: IntArray, best: Found | None = None) -> Found | None:
        """Return the best orders of late instances, cut at the bound, at the rates and between.

        `starts` are of every operation in every unrolled cycle, shape (cycles, n_operations).
        """
        cycles, least = len(starts), self.least
        for c in range(min(cycles - 1, cycles // 2), max(1, cycles - 1)):
            rates = starts[c + 1] - starts[c] if c + 1 < cycles else starts[c].max(keepdims=True)
            rate = int(rates.mean())
            for period in sorted({least, (least + rate) // 2, rate, int(rates.max())}):
                if period < least or (best is not None and best.period == least):
                    continue
                found = self.fold(starts[c], period)
                if found is not None and (best is None or found.period < best.period):
                    best = found
        return best


# constructions


def one_by_one(graph: Schedule) -> PeriodicOrders:
    """One job after the other, which fits whenever every job does: ids are job-major."""
    return PeriodicOrders(graph.users, np.zeros(graph.n_operations, np.int64))


def constructions(
    graph: Schedule, monitor: Monitor, rules: tuple[str, ...] | None = None
) -> Iterator[tuple[Found | None, str]]:
    """Yield constructed orders with the name of their rule, quick and promising rules first.

    Repeating a single iteration works whenever a list schedule of it does.
    """
    folder = Folder(graph, monitor.lower_bound or 1)
    cycles = cycles_of(graph, CYCLES)
    while cycles >= 3 and list_seconds(graph, cycles) > monitor.remaining:
        cycles -= 1
    capped = bool(graph.memory.any())
    if capped:
        yield folder.evaluate(one_by_one(graph)), ONE_BY_ONE
    inserted = _inserted(folder, monitor) if rules is None and not capped else iter(())
    rules = RULES if rules is None else rules
    if cycles >= 3:
        yield from islice(inserted, 1)
        yield from _rolled(folder, cycles, rules, monitor)
    yield from _repeated(folder, rules, monitor)
    yield from inserted


def _rolled(
    folder: Folder, cycles: int, rules: tuple[str, ...], monitor: Monitor
) -> Iterator[tuple[Found | None, str]]:
    """Fold list schedules of several cycles, as long as the next one ends in time."""
    graph = folder.graph
    seconds = list_seconds(graph, cycles)
    dispatcher = Dispatcher(unrolled(graph, cycles), 0)
    for name, priority, variant in _rolling(dispatcher, graph.n_operations, rules):
        if seconds > monitor.remaining:
            return
        found = dispatcher.listed(
            priority, variant.active, first_come=variant.rule == "fifo",
            few=variant.rule == "one_f_one_b",
        )  # fmt: skip
        starts = None if found is None else found[1].reshape(cycles, -1)
        yield None if starts is None else folder.best_fold(starts), name


def _repeated(
    folder: Folder, rules: tuple[str, ...], monitor: Monitor
) -> Iterator[tuple[Found | None, str]]:
    """Repeat and fold list schedules of a single iteration, as long as the next ends in time."""
    graph = folder.graph
    seconds = list_seconds(graph, 1)
    once = Dispatcher(unrolled(graph, 1), 0)
    for variant in variants(once.graph, tuple(rule for rule in rules if rule in RULES)):
        if seconds > monitor.remaining:
            return
        listed = None if variant.backwards else once.sequences(variant)
        if listed is not None:  # one iteration after the other is feasible if one is
            orders = PeriodicOrders(listed[0], np.zeros(graph.n_operations, np.int64))
            best = folder.best_fold(listed[1][None, :], folder.evaluate(orders))
            yield best, f"{variant}, one iteration"


def _inserted(folder: Folder, monitor: Monitor) -> Iterator[tuple[Found | None, str]]:
    """Insert into longer and longer circles, until everything fits into one."""
    from optsched_solvers.periodic.insertion import Units, inserted

    units = Units.of(folder.graph)
    for factor in SLACK:
        period = int(folder.least * factor)
        start = inserted(folder.cycle, units, period, lambda: _is_over(monitor))
        found = None if start is None else folder.fold(start, period)
        yield found, "insertion"
        if found is not None:
            return


def cycles_of(graph: Schedule, most: int) -> int:
    """Return the number of cycles, at least 1, whose list schedule stays quick."""
    operations = MAX_CAPPED if graph.memory.any() else MAX_UNROLLED
    return max(1, min(most, operations // max(1, graph.n_operations)))


def list_seconds(graph: Schedule, cycles: int) -> float:
    """Estimate the seconds of one list schedule of some cycles, at most.

    With workspaces the banker's check of every forward block looks at every open micro-batch, again
    and again (`list_schedule`).
    """
    units = len(np.unique(np.stack([graph.job, graph.iteration, graph.microbatch]), axis=1).T)
    checks = (units * cycles) ** 2 if graph.memory.any() and graph.workspace.any() else 1000
    return CHECK * checks * graph.n_operations * cycles


def unrolled(graph: Schedule, cycles: int) -> Schedule:
    """Repeat a graph as a one-shot one; operation i of cycle c is ``c * n + i``."""
    n = graph.n_operations
    tail, head, lag, distance = graph.arcs
    cycle = np.arange(cycles)[:, None]
    inside = cycle + distance < cycles
    columns: dict[str, Any] = {
        key: np.tile(getattr(graph, key), cycles)
        for key in ("duration", "kind", "job", "stage", "microbatch", "family", "setup_in",
                    "setup_out", "acquire", "free", "workspace")
    }  # fmt: skip
    copies = int(graph.iteration.max(initial=0)) + 1
    counts = np.tile(np.diff(graph.op_resources.indptr), cycles)
    return Schedule(
        resources=graph.resources,
        op_resources=Csr(
            np.concatenate([[0], np.cumsum(counts)]), np.tile(graph.op_resources.ids, cycles)
        ),
        iteration=(cycle * copies + graph.iteration).ravel(),
        arcs=Arcs(
            (cycle * n + tail)[inside],
            ((cycle + distance) * n + head)[inside],
            np.broadcast_to(lag, inside.shape)[inside],
            np.zeros(int(inside.sum()), np.int64),
        ),
        **columns,
    )


def _rolling(
    dispatcher: Dispatcher, n: int, rules: tuple[str, ...]
) -> Iterator[tuple[str, IntArray, Variant]]:
    """Priorities for an unrolled cycle: the rule, then by cycle, then by cycle among F and B."""
    graph = dispatcher.graph
    cycle = np.arange(graph.n_operations) // n
    forward = graph.kind == "F"
    late = np.isin(graph.kind, ("W", "U"))
    found = [v for v in variants(graph, rules) if v.rule in ROLLING and not v.backwards]
    found.sort(key=lambda v: ROLLING.index(v.rule))
    for variant in found:
        priority = dispatcher.priority(variant)
        yield str(variant), priority, variant
        if variant.rule == "fifo":
            continue
        keys = (priority, cycle, forward if variant.rule != "f_first" else ~forward)
        for k in (2, 3):
            rank = np.empty(len(priority), np.int64)
            rank[np.lexsort((*keys[:k], late & variant.defer))] = np.arange(len(priority))
            yield f"{variant}, cycle by cycle", rank, variant
