"""Dispatching rules: priorities for the list scheduler, applied in four ways."""

from __future__ import annotations

import sys
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from optsched.errors import CyclicOrder
from optsched.model.graph import evaluate, machine_orders, scheduled
from optsched.model.objectives import MAKESPAN, TOTAL, objective_value, per_job
from optsched.model.schedule import NO_DEADLINE, Csr
from optsched.solving.solver import Support
from optsched_solvers._loading import load, loaded

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from optsched.kernels.list_schedule import DispatchGraph
    from optsched.model.schedule import IntArray, Problem, Schedule
    from optsched.solving.limits import Limits
    from optsched.solving.monitor import Monitor

SHOP_RULES = ("mwkr", "tail", "spt", "lpt", "lwkr", "mopnr", "fifo", "est", "random")
"""Rules for any graph: most/least work remaining, longest tail, shortest/longest operation, most
operations remaining, first come first served, earliest start, random order."""

PIPELINE_RULES = ("valley", "b_first", "job_lpt", "job_spt", "one_f_one_b", "f_first")
"""Rules for graphs of F and B (or I, W) blocks: valley (jobs small, large, small), backward first,
jobs by total work, at most S - s in flight on stage s, forward first."""

RULES = (*PIPELINE_RULES, *SHOP_RULES)

SLOW_UP_TO = 1000
"""Operations of a list schedule that Python without kernels makes in a tenth of a second."""

KERNELS = ("optsched.kernels.longest_path", "optsched.kernels.list_schedule")
"""Modules that compile."""


class Variant(NamedTuple):
    """One list schedule: a rule, and how it is applied."""

    rule: str
    active: bool = False  # Giffler-Thompson instead of non-delay
    backwards: bool = False  # on the time-mirrored problem
    defer: bool = False  # W and U only when nothing else is ready

    def __str__(self) -> str:
        marks = [self.rule, "active" if self.active else "non-delay"]
        marks += ["backwards"] * self.backwards + ["deferred updates"] * self.defer
        return " ".join(marks)


def supported_graph(graph: Schedule) -> Support:
    """Whether list scheduling takes this graph."""
    counts = np.diff(graph.op_resources.indptr)
    if (counts > 1).any():
        i = int(np.argmax(counts > 1))
        return Support(False, f"operation {i} holds {counts[i]} resources at once")
    return supported_objective(graph, MAKESPAN, TOTAL)


def supported_objective(problem: Problem, *objectives: str) -> Support:
    """Whether the objective is one of these, of one iteration."""
    if problem.objective_name not in objectives:
        known, what = " or ".join(objectives), problem.objective_name
        return Support(False, f"only the {known} of one iteration is supported, not the {what}")
    return Support(True)


def try_rules(
    graph: Schedule,
    limits: Limits,
    monitor: Monitor,
    rules: tuple[str, ...] = RULES,
    keep: Callable[[Csr], object] | None = None,
) -> int:
    """Report the schedules of all rules; returns the number of list schedules.

    `keep` is called with the orders of each.
    """
    dispatcher = Dispatcher(graph, limits.seed)
    most = len(RULES) * 8 if limits.iterations is None else limits.iterations
    if most and rules == RULES and monitor.objective is None and not loaded(*KERNELS):
        offer_quick(graph, limits, monitor)
        if monitor.objective is not None and monitor.should_stop():
            return 1
    if not load(monitor, *KERNELS):
        return 0
    tried = 0
    for variant in variants(graph, rules):
        # one list schedule takes microseconds: a first answer is given even at time limit 0
        if tried >= most or (monitor.objective is not None and monitor.should_stop()):
            break
        found = dispatcher.sequences(variant)
        tried += 1
        monitor.advance(1)
        if found is not None:
            monitor.incumbent(
                found[0], objective_value(graph, found[1] + graph.duration), f"dispatch {variant}"
            )
            if keep is not None:
                keep(found[0])
    return tried


def offer_quick(graph: Schedule, limits: Limits, monitor: Monitor) -> None:
    """Report the first rule's schedule, made without kernels.

    One job after the other where that takes too long, or the rule gets stuck.
    """
    dispatcher = Dispatcher(graph, limits.seed)
    if not graph.n_operations:
        return
    variant = next(variants(graph, RULES))
    ready = "numba" in sys.modules or load(monitor, "optsched.kernels.compile")
    found = quick_schedule(dispatcher, variant) if ready else None
    if found is not None:
        reached = objective_value(graph, found[1] + graph.duration)
        monitor.incumbent(found[0], reached, f"dispatch {variant}")
    elif limits.iterations is None:  # with a limit of steps, answers never depend on time
        _offer_checked(dispatcher, one_job_at_a_time(graph), monitor, "one job at a time")


def quick_schedule(dispatcher: Dispatcher, variant: Variant) -> tuple[Csr, IntArray] | None:
    """The kernel's schedule, made without kernels; None if stuck, or for too many operations."""
    small = dispatcher.graph.n_operations <= SLOW_UP_TO
    return dispatcher.sequences(variant) if small else None


def order_of(graph: Schedule, sequences: Csr) -> IntArray:
    """Return one topological order of all operations that agrees with arcs and sequences."""
    from optsched.kernels import longest_path

    heads = longest_path.evaluate(graph, sequences).heads
    # operations joined by arcs of weight 0 may have equal heads: then arcs have to be followed
    if (graph.successors.weight > 0).all() and (graph.duration > 0).all():
        return np.argsort(heads, kind="stable")
    return evaluate(graph, sequences).order


def one_job_at_a_time(graph: Schedule) -> IntArray:
    """All operations, job by job, in the order of the arcs: needs the least memory.

    Arcs between jobs may contradict this order: check the schedule.
    """
    position = np.empty(graph.n_operations, np.int64)
    position[evaluate(graph).order] = np.arange(graph.n_operations)
    return np.lexsort([position, graph.job])


def _offer_checked(
    dispatcher: Dispatcher, operations: IntArray, monitor: Monitor, source: str
) -> None:
    """Offer the semi-active schedule of one global order, if it is feasible."""
    from optsched.model.verify import verify

    sequences = machine_orders(dispatcher.graph, operations)
    try:
        schedule = scheduled(dispatcher.graph, sequences)
    except CyclicOrder:
        return
    if not verify(schedule):
        monitor.incumbent(sequences, objective_value(schedule, schedule.end), source)


def is_pipeline(graph: Schedule) -> bool:
    """Whether the graph has forward and backward blocks."""
    kinds = set(np.unique(graph.kind).tolist())
    return "F" in kinds and bool(kinds & {"B", "I"})


def variants(graph: Schedule, rules: tuple[str, ...]) -> Iterator[Variant]:
    """All ways to apply those of the rules that fit the graph, forward first."""
    pipeline = is_pipeline(graph)
    late = pipeline and bool(np.isin(graph.kind, ("W", "U")).any())
    for backwards in (False, True):
        for active in (False, True):
            for rule in rules:
                if rule in PIPELINE_RULES and not pipeline:
                    continue
                yield Variant(rule, active, backwards)
                if late:
                    yield Variant(rule, active, backwards, defer=True)


class Dispatcher:
    """Priorities and kernel arrays of one graph, shared by all its list schedules."""

    def __init__(self, graph: Schedule, seed: int) -> None:
        self.graph = graph
        self.seed = seed
        self.has_deadlines = bool((graph.deadline != NO_DEADLINE).any())
        self._tails: dict[bool, tuple[IntArray, IntArray, IntArray]] = {}
        counted = np.ones(int(graph.job.max(initial=-1)) + 1, np.int64)
        if graph.goal is not None:
            counted = np.array(per_job(graph), np.int64)
        self.weight = np.maximum(counted, 1e-9)  # of every job; 0 would divide by zero

    @cached_property
    def forward(self) -> DispatchGraph:
        """Kernel arrays of the graph."""
        from optsched.kernels.list_schedule import DispatchGraph

        return DispatchGraph.of(self.graph)

    @cached_property
    def mirrored(self) -> DispatchGraph:
        """Kernel arrays of the time-mirrored graph."""
        return self.forward.reversed()

    def sequences(self, variant: Variant) -> tuple[Csr, IntArray] | None:
        """Orders and semi-active starts of one variant; None if it fails."""
        return self.listed(
            self.priority(variant), variant.active, variant.backwards,
            first_come=variant.rule == "fifo", few=variant.rule == "one_f_one_b",
        )  # fmt: skip

    def listed(
        self,
        priority: IntArray,
        active: bool,
        backwards: bool = False,
        *,
        first_come: bool = False,
        few: bool = False,
    ) -> tuple[Csr, IntArray] | None:
        """The list schedule of a priority; `few`: at most S - s in flight on stage s."""
        from optsched.kernels import list_schedule, longest_path

        limit = None
        if few:
            limit = np.arange(int(self.graph.stage.max(initial=0)) + 1, 0, -1)
        mode = list_schedule.Mode.ACTIVE if active else list_schedule.Mode.NON_DELAY
        found = list_schedule.run(
            self.mirrored if backwards else self.forward, priority, mode,
            first_come=first_come, slot_limit=limit,
        )  # fmt: skip
        if found is None:
            return None
        operations, start = found
        sequences = machine_orders(self.graph, operations[::-1] if backwards else operations)
        if backwards:
            start = longest_path.evaluate(self.graph, sequences).heads
        if self.has_deadlines and (start + self.graph.duration > self.graph.deadline).any():
            return None
        return sequences, start

    def priority(self, variant: Variant) -> IntArray:
        """Rank of every operation under a rule: the smallest goes first."""
        graph, rule = self.graph, variant.rule
        keys: list[Any] = []
        if variant.defer:
            keys.append(np.isin(graph.kind, ("W", "U")))
        if rule in PIPELINE_RULES:
            first = np.isin(graph.kind, ("F", "I", "R", "B"))
            forward = graph.kind == "F"
            if rule == "f_first":
                keys += [~forward]
            elif variant.backwards:  # mirrored, forward blocks are what drains the pipeline
                keys += [~forward & first]
            else:
                keys += [forward]
            keys += [self.job_rank(rule)[graph.job], graph.microbatch]
        else:
            keys += self._shop_keys(rule, variant.backwards)
        keys.append(np.arange(graph.n_operations))
        if variant.backwards:
            keys[-1] = -keys[-1]
        rank = np.empty(graph.n_operations, np.int64)
        rank[np.lexsort(keys[::-1])] = np.arange(graph.n_operations)
        return rank

    def job_rank(self, rule: str) -> IntArray:
        """Rank of every job by number for the FIFO rules, by total work for the others.

        With weights of jobs the FIFO rules go by total work per weight (Smith 1956).
        """
        graph = self.graph
        jobs = int(graph.job.max(initial=-1)) + 1
        is_fifo = rule in ("b_first", "f_first", "one_f_one_b")
        if is_fifo and graph.goal is None:
            return np.arange(jobs)
        work = np.zeros(jobs, np.int64)
        np.add.at(work, graph.job, graph.duration)
        keys = work / self.weight if is_fifo else -work if rule == "job_lpt" else work
        ascending = np.argsort(keys, kind="stable")
        if rule == "valley":  # small ... large ... small
            ascending = np.concatenate([ascending[0::2], ascending[1::2][::-1]])
        rank = np.empty(jobs, np.int64)
        rank[ascending] = np.arange(jobs)
        return rank

    def _shop_keys(self, rule: str, backwards: bool) -> list[Any]:
        duration = self.graph.duration
        weight = self.weight[self.graph.job]
        if rule == "spt":
            return [duration / weight]
        if rule == "lpt":
            return [-duration]
        if rule == "random":
            return [np.random.default_rng(self.seed).permutation(len(duration))]
        if rule in ("fifo", "est"):
            return []
        tail, work, number = self._remaining(backwards)
        if rule == "lwkr":
            return [work / weight]
        return {"tail": [-tail], "mwkr": [-work], "mopnr": [-number]}[rule]

    def _remaining(self, backwards: bool) -> tuple[IntArray, IntArray, IntArray]:
        """Longest tail, work and number of operations of the job from each operation on."""
        if backwards not in self._tails:
            graph, n = self.graph, self.graph.n_operations
            paths = evaluate(graph)
            tail = paths.head + graph.duration if backwards else paths.tail
            position = np.empty(n, np.int64)
            position[paths.order] = np.arange(n)
            order = np.lexsort([position if backwards else -position, graph.job])
            work, number = np.empty(n, np.int64), np.empty(n, np.int64)
            job = graph.job[order]
            begins = np.flatnonzero(np.diff(job, prepend=-1))
            for column, values in ((work, graph.duration[order]), (number, np.ones(n, np.int64))):
                total = np.cumsum(values)
                before = np.repeat(total[begins] - values[begins], np.diff(np.append(begins, n)))
                column[order] = total - before
            self._tails[backwards] = (tail, work, number)
        return self._tails[backwards]
