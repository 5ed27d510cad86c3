"""First answers for cycles: list schedules of many cycles and insertion, folded into one period.

A list schedule of the cycle unrolled several times settles into a rhythm; the starts of one late
instance of every operation, seen modulo the lower bound or the rate reached, give orders whose
least period is found exactly. It often is the lower bound itself.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np

from optsched.model.schedule import Arcs, Rows, Schedule
from optsched.solving.result import Result
from optsched.solving.solver import Support
from optsched_solvers._loading import load, loaded
from optsched_solvers.shop.late_acceptance import NOTHING
from optsched_solvers.shop.rules import (
    INSERTION,
    RULES,
    Dispatcher,
    Variant,
    quick_schedule,
    variants,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from optsched.model.schedule import IntArray, Problem
    from optsched.solving.limits import Limits
    from optsched.solving.monitor import Monitor
    from optsched_solvers.periodic.insertion import Circle
    from optsched_solvers.periodic.orders import CyclicOrders

MODULES = (
    "periodic.insertion", "periodic.orders", "optsched.kernels.cycle_ratio", "shop.list_schedule",
    "optsched.kernels.longest_path",
)  # fmt: skip
"""Modules that compile; insertion needs the first two."""

CYCLES = 6
"""Of an unrolled cycle; instances from the middle on are looked at."""

ROLLING = (
    "fifo", "b_first", "job_lpt", "one_f_one_b", "valley", "job_spt", "f_first", "tail", "mwkr",
)  # fmt: skip
"""Rules for unrolled cycles, those first that met the bound most often."""

MAX_UNROLLED = 60_000
"""Operations of an unrolled cycle without memory caps."""

MAX_CAPPED = 10_000
"""With caps, where every block asks whether all that are begun can still end."""

LOOK = 3e-9
"""Seconds for a look of a list schedule at a micro-batch."""

SLACK = (1.0, 1.01, 1.02, 1.035, 1.05, 1.075, 1.1, 1.15, 1.2, 1.3, 1.5, 1.75, 2.0)
"""Lengths of the circle that insertion tries, over the lower bound."""


def first_answers(
    graph: Schedule,
    monitor: Monitor,
    least: int | None = None,
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
        Takes every improvement as ``(answer, period, source)``; stops the rest when it should.
    least
        A lower bound of the period; default the monitor's, else the busiest resource.
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
    made, best = 0, NOTHING
    for found in constructions(graph, monitor, least or monitor.lower_bound, rules):
        made += 1
        monitor.advance(1)
        if found is not None and found[0].period < best:
            best = found[0].period
            monitor.incumbent(found[0].answer, best, f"dispatch {found[1]}")
        if _is_over(monitor) or made == most or not load(monitor, *MODULES):
            break
    return made


def _is_over(monitor: Monitor) -> bool:
    """Whether to stop; without any answer only the time counts."""
    return monitor.remaining <= 0 or (monitor.objective is not None and monitor.should_stop())


def offer_quick(graph: Schedule, monitor: Monitor) -> None:
    """One job after the other, and the first rule's order of one iteration, repeated.

    Made in plain Python, while the kernels are compiled.
    """
    from optsched.analysis.rolling import rolling
    from optsched.model.verify import verify
    from optsched.problems.jobarray.cycle import answer_of
    from optsched_solvers.shop.quick_list import one_job_at_a_time

    once = Dispatcher(unrolled(graph, 1), 0)
    offers = [("one job at a time", once.split(one_job_at_a_time(once.graph)))]
    rule = next(variants(once.graph, RULES))
    listed = quick_schedule(once, rule)
    if listed is not None:
        offers.append((f"dispatch {rule}, one iteration", listed[0]))
    for source, sequences in offers:
        schedule = rolling(graph, sequences)
        if schedule.period is not None and not verify(schedule):
            monitor.incumbent(answer_of(schedule), schedule.period, source)


def constructions(
    graph: Schedule,
    monitor: Monitor,
    least: int | None = None,
    rules: tuple[str, ...] = (*RULES, INSERTION),
) -> Iterator[tuple[CyclicOrders, str] | None]:
    """Constructed orders with the name of their rule, quick and likely good ones first.

    To repeat a single iteration works whenever a list schedule of it does.
    """
    from optsched_solvers.periodic.insertion import Circle

    circle = Circle.of(graph)
    bound = least or busiest(graph)
    cycles = cycles_of(graph, CYCLES)
    while cycles >= 3 and list_seconds(graph, cycles) > monitor.remaining:
        cycles -= 1
    if graph.memory.any():
        yield _one_by_one(graph, circle, bound)
    if INSERTION in rules and cycles >= 3:
        yield _inserted(graph, circle, bound, 1.0, monitor)
    if cycles >= 3:
        yield from _rolled(graph, circle, bound, cycles, rules, monitor)
    yield from _repeated(graph, circle, bound, rules, monitor)
    if INSERTION in rules:
        for factor in SLACK[cycles >= 3 :]:
            inserted = _inserted(graph, circle, bound, factor, monitor)
            yield inserted
            if inserted is not None:
                break


def _rolled(
    graph: Schedule,
    circle: Circle,
    least: int,
    cycles: int,
    rules: tuple[str, ...],
    monitor: Monitor,
) -> Iterator[tuple[CyclicOrders, str] | None]:
    """List schedules of some cycles, folded, as long as another one ends in time."""
    seconds = list_seconds(graph, cycles)
    dispatcher = Dispatcher(unrolled(graph, cycles), 0)
    for name, priority, variant in _rolling(dispatcher, graph.n_operations, rules):
        if seconds > monitor.remaining:
            return
        found = dispatcher.listed(
            priority, variant.active, first_come=variant.rule == "fifo",
            few=variant.rule == "one_f_one_b",
        )  # fmt: skip
        best = None
        if found is not None:
            best = best_fold(circle, found[1].reshape(cycles, -1), least)
        yield None if best is None else (best, name)


def _repeated(
    graph: Schedule, circle: Circle, least: int, rules: tuple[str, ...], monitor: Monitor
) -> Iterator[tuple[CyclicOrders, str] | None]:
    """List schedules of a single iteration, repeated and folded; in time as well."""
    seconds = list_seconds(graph, 1)
    once = Dispatcher(unrolled(graph, 1), 0)
    for variant in variants(once.graph, tuple(rule for rule in rules if rule in RULES)):
        if seconds > monitor.remaining:
            return
        if not variant.backwards:
            listed = once.sequences(variant)
            if listed is not None:
                best = best_fold(circle, listed[1][None, :], least, listed[0])
                yield None if best is None else (best, f"{variant}, one iteration")


def busiest(graph: Schedule) -> int:
    """The load of the busiest resource, at least 1."""
    load = np.zeros(graph.n_resources + 1, np.int64)
    np.add.at(load, graph.single_resource, graph.duration)
    return max(1, int(load[:-1].max(initial=0)))


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
        op_resources=Rows(
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


def best_fold(
    circle: Circle, starts: IntArray, least: int, sequences: Rows | None = None
) -> CyclicOrders | None:
    """The best orders of late instances, folded at the bound, at the rates reached and between.

    Parameters
    ----------
    circle
        The cycle.
    starts
        Of every operation in every unrolled cycle, shape (cycles, n_operations).
    least
        A lower bound of the period.
    sequences
        Orders of a single iteration, to be repeated as they are as well.
    """
    from optsched_solvers.periodic.orders import CyclicOrders, evaluated, folded

    best: CyclicOrders | None = None
    if sequences is not None:  # one iteration after the other is feasible if one is
        none = np.zeros(len(circle.duration), np.int64)
        period = evaluated(circle, sequences, none, least)
        best = CyclicOrders(sequences, none, period) if period else None
    cycles = len(starts)
    for c in range(min(cycles - 1, cycles // 2), max(1, cycles - 1)):
        rates = starts[c + 1] - starts[c] if c + 1 < cycles else starts[c].max(keepdims=True)
        rate = int(rates.mean())
        for period in sorted({least, (least + rate) // 2, rate, int(rates.max())}):
            if period < least or (best is not None and best.period == least):
                continue
            found = folded(circle, starts[c], period, least)
            if found is not None and (best is None or found.period < best.period):
                best = found
    return best


def _one_by_one(graph: Schedule, circle: Circle, least: int) -> tuple[CyclicOrders, str] | None:
    """One job after the other, which fits whenever every job does: ids are job-major."""
    from optsched_solvers.periodic.orders import CyclicOrders, evaluated

    offsets = np.zeros(graph.n_operations, np.int64)
    period = evaluated(circle, graph.users, offsets, least)
    return (CyclicOrders(graph.users, offsets, period), "one job at a time") if period else None


def _inserted(
    graph: Schedule, circle: Circle, least: int, factor: float, monitor: Monitor
) -> tuple[CyclicOrders, str] | None:
    """Insertion of jobs of most work first into a circle of this length."""
    from optsched_solvers.periodic.insertion import inserted
    from optsched_solvers.periodic.orders import folded

    period = int(least * factor)
    order = job_order(graph, circle)
    start = inserted(circle, order, period, lambda: _is_over(monitor))
    found = None if start is None else folded(circle, start, period, least)
    return None if found is None else (found, "insertion")


def job_order(graph: Schedule, circle: Circle) -> IntArray:
    """Units by job, jobs of most work first."""
    work = np.zeros(int(graph.job.max(initial=-1)) + 1, np.int64)
    np.add.at(work, graph.job, graph.duration)
    job = graph.job[circle.unit_operations[circle.unit_indptr[:-1]]]
    return np.lexsort((np.arange(len(job)), job, -work[job]))


class Dispatch:
    """The best of all rules and of insertion, folded into one period; one iteration is one."""

    name = "dispatch"
    kinds = ("periodic",)
    options: Mapping[str, str] = MappingProxyType(
        {
            "rules": "list of rules to try instead of all",
            "search": "after the rules, local search until a limit (true or false)",
        }
    )

    def supports(self, problem: Problem) -> Support:
        """Every rolling array."""
        return Support(True)

    def solve(self, problem: Problem, limits: Limits, monitor: Monitor) -> Result:
        """Try every rule; stop early at a limit or a proof."""
        from optsched_solvers.shop.dispatch import checked_options

        rules, search = checked_options(limits.options)
        graph = problem.graph()
        made = first_answers(graph, monitor, most=limits.iterations, rules=rules)
        if search and not monitor.should_stop():
            from optsched_solvers.periodic.rolling_search import improve

            left = None if limits.iterations is None else limits.iterations - made
            improve(graph, monitor, seed=limits.seed, iterations=left)
        return Result("unknown")
