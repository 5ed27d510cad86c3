"""The hand-made schedules of `optsched.pipelines` as starts: no answer is worse than they are."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Final

import numpy as np

from optsched.errors import CyclicOrder, InputError
from optsched.model.graph import scheduled
from optsched.model.schedule import Csr
from optsched.solving.solution import PeriodicOrders

if TYPE_CHECKING:
    from collections.abc import Iterator

    from optsched.model.schedule import Problem, Schedule
    from optsched.problems.jobarray.problem import JobArray
    from optsched.solving.monitor import Monitor

NAMES: Final = ("one_f_one_b", "zb_h1", "interleaved", "hanayo", "zb_h2", "gpipe", "vanilla")
"""Those of any job; Chimera's needs two directions."""


def offer(problem: Problem, monitor: Monitor, *, of_many: bool = False) -> None:
    """Offer every hand-made schedule that keeps to the memory, until a proof.

    Parameters
    ----------
    problem
        A `JobArray` of one job (for a period each schedule is one iteration, repeated), or a graph
        like Chimera's; nothing is done for any other.
    monitor
        Takes the schedules.
    of_many
        Arrays of several jobs too, one job after the other: rules soon find better ones.
    """
    for name, schedule in _pipelines(problem) if of_many else _schedules(problem):
        if monitor.objective is not None and monitor.should_stop():
            return
        try:
            answer = problem.answer(schedule)
        except InputError:  # it needs more memory than there is
            continue
        monitor.incumbent(answer, schedule.period or schedule.makespan, f"pipelines.{name}")


def _schedules(problem: Problem) -> Iterator[tuple[str, Schedule]]:
    from optsched.problems.jobarray.problem import JobArray

    if isinstance(problem, JobArray) and problem.objective_name == "period":
        yield from _repeated(problem)
    elif problem.objective_name == "makespan" and len(np.unique(problem.graph().job)) == 1:
        yield from _of_one_iteration(problem)


def _of_one_iteration(problem: Problem) -> Iterator[tuple[str, Schedule]]:
    graph = problem.graph()
    yield from _pipelines(problem)
    if _runs_both_ways(graph):
        with suppress(CyclicOrder):
            yield "chimera", scheduled(graph, by_slots(graph))


def _pipelines(job: Problem) -> Iterator[tuple[str, Schedule]]:
    from optsched import pipelines
    from optsched.problems.jobarray.problem import JobArray

    for name in NAMES if isinstance(job, JobArray) else ():
        try:
            yield name, getattr(pipelines, name)(job)
        except InputError:  # another place, no weight blocks, ...
            continue


def _repeated(array: JobArray) -> Iterator[tuple[str, Schedule]]:
    """Orders of one iteration as orders of the cycle."""
    if array.n_jobs > 1 or (array.multiplicity > 1).any():
        return
    offsets = np.zeros(array.n_operations, np.int64)
    for name, once in _of_one_iteration(array.with_objective("makespan")):
        assert once.sequences is not None
        yield name, array.scheduled(PeriodicOrders(once.sequences, offsets))


def by_slots(graph: Schedule) -> Csr:
    """Chimera's order: slots of one block, F of stage v in slot v + 2k, B in slot 2V - 1 - v + 2k.

    k counts the micro-batches of a direction; as many as half of the stages make a unit, and units
    follow each other 2V slots apart (Li & Hoefler 2021). Other blocks come last.
    """
    stages = int(graph.stage.max()) + 1
    number = np.zeros(graph.n_operations, np.int64)
    device = graph.single_resource
    for d, v in np.unique(np.stack([device, graph.stage]), axis=1).T.tolist():
        on = np.flatnonzero((device == d) & (graph.stage == v))
        number[on] = np.unique(graph.microbatch[on], return_inverse=True)[1].ravel()
    unit, k = np.divmod(number, max(1, stages // 2))
    depth = np.where(graph.kind == "F", graph.stage, 2 * stages - 1 - graph.stage)
    slot = 2 * stages * unit + 2 * k + depth
    last = ~np.isin(graph.kind, ("F", "B", "I"))
    order = np.lexsort((graph.microbatch, slot, last, device))
    return Csr(graph.users.indptr, order[device[order] >= 0])


def _runs_both_ways(graph: Schedule) -> bool:
    """Whether forward blocks of one stage run on several devices."""
    if (np.diff(graph.op_resources.indptr) > 1).any():
        return False
    blocks = np.stack([graph.stage, graph.single_resource])[:, graph.kind == "F"]
    pairs = np.unique(blocks, axis=1)
    return bool(len(np.unique(pairs[0])) < pairs.shape[1])
