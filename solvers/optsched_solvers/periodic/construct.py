"""First answers for cycles: list schedules of many cycles and insertion, folded into one period.

A list schedule of the cycle unrolled several times settles into a rhythm; the starts of one late
instance of every operation, seen modulo the lower bound or the rate reached, give orders whose
least period is found exactly. It often is the lower bound itself.
"""

from __future__ import annotations

from itertools import chain, islice
from time import monotonic
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from optsched.errors import CyclicOrder
from optsched.kernels.plain_python import in_python
from optsched.model.schedule import Arcs, Csr, Schedule
from optsched.solving.result import Result
from optsched.solving.solution import PeriodicOrders
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

INSERTION: Final = "insertion"
"""The construction by insertion, among the names of rules."""

MODULES: Final = (
    "periodic.orders", "periodic.insertion", "optsched.kernels.list_schedule",
    "optsched.kernels.longest_path",
)  # fmt: skip
"""Modules that compile; insertion needs the first two."""

CYCLES: Final = 6
"""Of an unrolled cycle; instances from the middle on are looked at."""

ROLLING: Final = (
    "fifo", "b_first", "job_lpt", "one_f_one_b", "valley", "job_spt", "f_first", "tail", "mwkr",
)  # fmt: skip
"""Rules for unrolled cycles, those first that met the bound most often."""

MAX_UNROLLED: Final = 60_000
"""Operations of an unrolled cycle without memory caps."""

MAX_CAPPED: Final = 10_000
"""With caps, where every block asks whether all that are begun can still end."""

LOOK: Final = 3e-9
"""Seconds for a look of a list schedule at a micro-batch."""

QUICK: Final = 400
"""Operations of a cycle that insertion and rules take in plain Python."""

QUICK_TIME: Final = 0.5
"""Seconds after which no other rule is tried in plain Python."""

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
        first_answers(problem.graph(), monitor, most=limits.iterations, rules=rules)
        return Result("unknown")


def first_orders(problem: Problem, limits: Limits, monitor: Monitor) -> int:
    """Offer constructed orders if there are none; at least one job after the other, always fit.

    Returns the number of constructions, each of which is an iteration.
    """
    graph, made = problem.graph(), 0
    if monitor.objective is None and limits.iterations != 0:
        from optsched_solvers import _cold_start

        _cold_start.offer_first(problem, limits, monitor)
        made = first_answers(graph, monitor, most=limits.iterations)
    if monitor.objective is None:
        from optsched.kernels.cycle_ratio import cycle_time

        monitor.incumbent(one_by_one(graph), cycle_time(graph, graph.users).period, ONE_BY_ONE)
    return made


def first_answers(
    graph: Schedule,
    monitor: Monitor,
    most: int | None = None,
    rules: tuple[str, ...] = (*RULES, INSERTION),
) -> int:
    """Insertion and rolling rules; every improvement is told to the monitor.

    Parameters
    ----------
    graph
        A cycle (`JobArray.graph` with ``objective="period"``); operations hold at most one
        resource each.
    monitor
        Takes every improvement; stops the rest when it should.
    most
        Constructions to make at most; default all.
    rules
        Names of the rules to try; where memory is limited one job at a time comes first.

    Returns
    -------
    int
        Constructions made; 0 if the kernels were not loaded in time (the monitor may have an
        answer then, made without them).
    """
    if most == 0:
        return 0
    if not loaded(*MODULES) and monitor.objective is None and most is None:
        offer_quick(graph, monitor)
    if not load(monitor, *(MODULES if INSERTION not in rules else MODULES[:2])):
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
    """One job after the other, the first rule's order of one iteration, insertion, rolling rules.

    Made in plain Python, while the kernels are compiled.
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
    if graph.n_operations > QUICK or graph.memory.any() or _is_over(monitor):
        return
    folder, until = Folder(graph, monitor.lower_bound or busiest(graph)), monotonic() + QUICK_TIME
    with in_python():
        rolled = _rolled(folder, CYCLES, RULES, monitor)
        for found, source in chain(_inserted(folder, monitor), rolled):
            if found is not None:
                monitor.incumbent(found.orders, found.period, f"dispatch {source}")
            if _is_over(monitor) or monotonic() > until:
                return


# orders from starts


class Folder:
    """Makes orders of starts, and finds out what they are worth.

    Parameters
    ----------
    graph
        The cycle.
    least
        A lower bound of the period of any orders.
    """

    def __init__(self, graph: Schedule, least: int = 1) -> None:
        from optsched_solvers.periodic.orders import Cycle, State, load

        self.graph, self.least, self._load = graph, least, load
        self.cycle, self._state = Cycle.of(graph), State.of(graph)
        self._instant = bool((self.cycle.operation.least <= 0).any())
        by_duration = np.argsort(graph.duration, kind="stable")
        self._placed = by_duration[graph.single_resource[by_duration] >= 0]

    def fold(self, start: IntArray, period: int) -> Found | None:
        """The orders of starts seen modulo a period, if they can be repeated and fit the memory.

        Parameters
        ----------
        start
            Of one instance of every operation, at any absolute time; those of one resource may
            overlap modulo the period.
        period
            Where to cut; the orders' own least period may be longer or shorter.
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
        """The least period of orders; None for a contradiction or too little memory.

        It is found sooner if starts are known that nearly fit.
        """
        cycle, state = self.cycle, self._state
        if start is None or phase is None:
            start = phase = np.zeros(self.graph.n_operations, np.int64)
        state.order[:] = np.argsort(phase, kind="stable")
        ids, offset = orders.sequences.ids, orders.offset
        period = int(self._load(cycle, state, ids, offset, start, self.least))
        full = (state.node.level < 0) | (
            state.node.level + cycle.operation.need > cycle.operation.capacity
        )
        if not period or full.any() or (self._instant and self._waits_for_ever(orders)):
            return None
        return Found(orders, period)

    def _waits_for_ever(self, orders: PeriodicOrders) -> bool:
        """Whether blocks of no time wait for each other: no period is too short for them."""
        from optsched.kernels.cycle_ratio import cycle_time

        try:
            cycle_time(self.graph, orders.sequences, orders.offset)
        except CyclicOrder:
            return True
        return False

    def best_fold(self, starts: IntArray, best: Found | None = None) -> Found | None:
        """The best orders of late instances, folded at the bound, at the rates reached and between.

        Parameters
        ----------
        starts
            Of every operation in every unrolled cycle, shape (cycles, n_operations).
        best
            Known ones.
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
    graph: Schedule, monitor: Monitor, rules: tuple[str, ...] = (*RULES, INSERTION)
) -> Iterator[tuple[Found | None, str]]:
    """Constructed orders with the name of their rule, quick and likely good ones first.

    To repeat a single iteration works whenever a list schedule of it does.
    """
    folder = Folder(graph, monitor.lower_bound or busiest(graph))
    cycles = cycles_of(graph, CYCLES)
    while cycles >= 3 and list_seconds(graph, cycles) > monitor.remaining:
        cycles -= 1
    capped = bool(graph.memory.any())
    if capped:
        yield folder.evaluate(one_by_one(graph)), ONE_BY_ONE
    inserted = _inserted(folder, monitor) if INSERTION in rules and not capped else iter(())
    if cycles >= 3:
        yield from islice(inserted, 1)
        yield from _rolled(folder, cycles, rules, monitor)
    yield from _repeated(folder, rules, monitor)
    yield from inserted


def _rolled(
    folder: Folder, cycles: int, rules: tuple[str, ...], monitor: Monitor
) -> Iterator[tuple[Found | None, str]]:
    """List schedules of some cycles, folded, as long as another one ends in time."""
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
    """List schedules of a single iteration, repeated and folded; in time as well."""
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
    """Insertion into longer and longer circles, until one has room."""
    from optsched_solvers.periodic.insertion import Units, inserted

    units = Units.of(folder.graph)
    for factor in SLACK:
        period = int(folder.least * factor)
        start = inserted(folder.cycle, units, period, lambda: _is_over(monitor))
        found = None if start is None else folder.fold(start, period)
        yield found, INSERTION
        if found is not None:
            return


def busiest(graph: Schedule) -> int:
    """The load of the busiest resource, at least 1."""
    total = np.zeros(graph.n_resources + 1, np.int64)
    np.add.at(total, graph.single_resource, graph.duration)
    return max(1, int(total[:-1].max(initial=0)))


def cycles_of(graph: Schedule, most: int) -> int:
    """How many cycles a list schedule of the unrolled graph may have to stay quick, at least 1."""
    operations = MAX_CAPPED if graph.memory.any() else MAX_UNROLLED
    return max(1, min(most, operations // max(1, graph.n_operations)))


def list_seconds(graph: Schedule, cycles: int) -> float:
    """About the seconds of one list schedule of so many cycles, at most.

    With workspaces every forward block asks again and again whether it may begin, which takes a
    look at every micro-batch that is under way (`list_schedule`).
    """
    units = len(np.unique(np.stack([graph.job, graph.iteration, graph.microbatch]), axis=1).T)
    looks = (units * cycles) ** 2 if graph.memory.any() and graph.workspace.any() else 1000
    return LOOK * looks * graph.n_operations * cycles


def unrolled(graph: Schedule, cycles: int) -> Schedule:
    """The first cycles of a graph as a one-shot one; operation i of cycle c is ``c * n + i``."""
    n = graph.n_operations
    tail, head, lag, distance = graph.arcs
    cycle = np.arange(cycles)[:, None]
    there = cycle + distance < cycles
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
            (cycle * n + tail)[there],
            ((cycle + distance) * n + head)[there],
            np.broadcast_to(lag, there.shape)[there],
            np.zeros(int(there.sum()), np.int64),
        ),
        **columns,
    )


def _rolling(
    dispatcher: Dispatcher, n: int, rules: tuple[str, ...]
) -> Iterator[tuple[str, IntArray, Variant]]:
    """Rules for an unrolled cycle: by themselves, earlier cycles first, and so among F and B."""
    graph = dispatcher.graph
    cycle = np.arange(graph.n_operations) // n
    forward = graph.kind == "F"
    late = np.isin(graph.kind, ("W", "U"))
    found = [v for v in variants(graph, rules) if v.rule in ROLLING and not v.backwards]
    found.sort(key=lambda v: ROLLING.index(v.rule))
    for variant in found:
        own = dispatcher.priority(variant)
        yield str(variant), own, variant
        if variant.rule == "fifo":
            continue
        keys = (own, cycle, forward if variant.rule != "f_first" else ~forward)
        for k in (2, 3):
            rank = np.empty(len(own), np.int64)
            rank[np.lexsort((*keys[:k], late & variant.defer))] = np.arange(len(own))
            yield f"{variant}, cycle by cycle", rank, variant
