"""Hand-made schedules of `optsched.pipelines` as starts: no answer is worse than they are."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

from optsched.errors import InputError
from optsched.solving.result import PeriodicOrders
from optsched_solvers._loading import loaded
from optsched_solvers.shop import rules

if TYPE_CHECKING:
    from collections.abc import Iterator

    from optsched.model.schedule import Problem, Schedule
    from optsched.problems.jobarray.problem import JobArray
    from optsched.solving.limits import Limits
    from optsched.solving.monitor import Monitor

NAMES: Final = ("one_f_one_b", "zb_h1", "interleaved", "hanayo", "zb_h2", "gpipe", "vanilla")
"""Schedules of any job; Chimera's needs a graph of two directions."""


def offer(problem: Problem, monitor: Monitor, *, of_many: bool = False) -> None:
    """Report every hand-made schedule of a `JobArray` that fits into the memory, until a proof.

    Of an array of one job (for a period each schedule is one iteration, repeated); with `of_many`
    of several jobs too, one job after the other, though rules soon find better ones.
    """
    for name, schedule in _schedules(problem, of_many):
        if monitor.objective is not None and monitor.should_stop():
            return
        try:
            answer = problem.answer(schedule)
        except InputError:  # too little memory
            continue
        monitor.incumbent(answer, problem.evaluate(schedule), f"pipelines.{name}")


def offer_first(problem: Problem, limits: Limits, monitor: Monitor) -> None:
    """Report a rule's schedule and all hand-made ones while kernels have to be compiled.

    Without effect with an iteration limit: then answers never depend on what is compiled.
    Operations hold at most one resource each.
    """
    from optsched_solvers.periodic import construct

    periodic = problem.objective_name == "period"
    if limits.iterations is not None or loaded(*(construct.MODULES if periodic else rules.KERNELS)):
        return
    if periodic:
        construct.offer_quick(problem.graph(), monitor)
    else:
        rules.offer_quick(problem.graph(), limits, monitor)
    offer(problem, monitor, of_many=True)


def _schedules(problem: Problem, of_many: bool) -> Iterator[tuple[str, Schedule]]:
    from optsched.problems.jobarray.problem import JobArray

    if not isinstance(problem, JobArray):
        return
    if of_many:
        yield from _pipelines(problem)
    elif problem.objective_name != "period":
        if problem.n_jobs == 1:
            yield from _pipelines(problem)
    elif problem.n_jobs == 1 and (problem.multiplicity <= 1).all():
        offsets = np.zeros(problem.n_operations, np.int64)
        for name, once in _pipelines(problem.with_objective("makespan")):
            assert once.sequences is not None
            yield name, problem.scheduled(PeriodicOrders(once.sequences, offsets))


def _pipelines(array: JobArray) -> Iterator[tuple[str, Schedule]]:
    from optsched import pipelines

    for name in NAMES:
        try:
            yield name, getattr(pipelines, name)(array)
        except InputError:  # requires another placement, weight blocks, ...
            continue
