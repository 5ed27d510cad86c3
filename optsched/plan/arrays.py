"""Orders of the job arrays of a plan, each on its GPUs."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final

import msgspec

from optsched.errors import Infeasible
from optsched.io.strict_json import shortened
from optsched.io.text import duration
from optsched.io.values import number
from optsched.plan.array_document import PlannedArray, join, planned_arrays, schedule_of
from optsched.solving.solve import solve
from optsched.solving.stop import Gap

if TYPE_CHECKING:
    from collections.abc import Sequence

    from optsched.model.schedule import Schedule
    from optsched.plan.starts import Plan

GOOD: Final = 0.002
"""Gap to the bound at which the search for an order ends."""

_LEAST: Final = 0.05
"""Seconds for the order of an array, in any case."""

_MOST: Final = 1000
"""Blocks of an array in a cycle of the plan, where the periods of others are longer."""


def order_arrays(
    plan: Plan, *, time_limit: float = 10.0, previous: Schedule | None = None
) -> Schedule:
    """Order the blocks of all arrays that start, and return one schedule of the whole cluster.

    GPUs are resources, blocks of the arrays are operations. The schedule repeats with the period
    of the slowest array; a faster one runs several cycles in it. Other jobs hold their GPUs all
    the time. `schedule_of` returns the schedule of one array. Without arrays it is
    `Plan.schedule`.

    Parameters
    ----------
    plan
        Of a snapshot with job arrays.
    time_limit
        Seconds for all orders together; equal arrays are solved once.
    previous
        Document of a former plan: arrays with the same GPUs keep their order.

    Raises
    ------
    Infeasible
        No order of an array was found in this time.

    Examples
    --------
    >>> import optsched
    >>> from optsched import bandwidth, plan
    >>> array = plan.ArrayRequest(problem=optsched.JobArray([[1, 1]] * 3, [[2, 2]] * 3))
    >>> cluster = bandwidth.Cluster.uniform(bandwidth.HostType("h100", 8), 1)
    >>> state = bandwidth.ClusterState.idle(cluster)
    >>> snapshot = plan.ClusterSnapshot(state, [plan.PlanJob(name="a", gpus=2, array=array)])
    >>> document = plan.order_arrays(plan.plan(snapshot))
    >>> optsched.verify(document)
    []
    """
    number("time_limit", time_limit, what="seconds")
    former = {} if previous is None else {
        one.name: (one.sha256, _named(previous, one.gpus)) for one in planned_arrays(previous)
    }  # fmt: skip
    chosen = [(one, one.job.array, one.job.array.on(len(one.gpus))) for one in plan.verdicts
              if one.gpus and one.job.array is not None]  # fmt: skip
    orders: dict[str, Schedule] = {}
    made: list[tuple[PlannedArray, Schedule]] = []
    jobs, end = list[str](), time.perf_counter() + time_limit
    for k, (one, request, array) in enumerate(chosen):
        name, key = one.job.name, array.sha256
        if previous and former.get(name) == (key, _named(plan.schedule, one.gpus)):
            schedule = schedule_of(previous, name)
        elif key in orders:
            schedule = orders[key]
        else:  # searches that end early leave their time to the others
            left = len({other.sha256 for *_, other in chosen[k:]} - orders.keys())
            share = max(_LEAST, (end - time.perf_counter()) * min(1, 2 / left))
            found = solve(array, time_limit=share, stop=Gap(GOOD)).schedule
            if found is None:
                raise Infeasible(f"jobs[{name!r:.60}]: no order in {share:.3g} s; give more time")
            orders[key] = schedule = found
        period, size = schedule.period or 1, len(one.gpus)
        made.append((PlannedArray(
            name, [*one.gpus], len(jobs), array.n_jobs, request.steps, request.seconds(period),
            period, 1, request.periods[size], request.weight * sum(request.loads) / period, key,
            request.script, [*schedule.provenance.get("recompute", [])],
        ), schedule))  # fmt: skip
        jobs += [f"{name}/{job}" for job in array.names]
    if not made:
        return plan.schedule
    longest = max(one.period for one, _ in made)
    arrays = []
    for entry, schedule in made:
        cycles = max(1, min(longest // entry.period, _MOST // schedule.n_operations))
        arrays.append((msgspec.structs.replace(entry, cycles=cycles), schedule))
    held = {job.name: where.gpus for job, where in plan.snapshot.running}
    held |= {one.job.name: one.gpus for one in plan.verdicts if one.gpus and not one.job.array}
    return join(
        arrays, held, plan.schedule.resources, name=plan.snapshot.name,
        provenance={
            **plan.schedule.provenance, "jobs": [*jobs, *held], "busy_bound": plan.busy_bound,
            "arrays": [msgspec.to_builtins(one) for one, _ in arrays],
        },
    )  # fmt: skip


def _named(document: Schedule, gpus: Sequence[int]) -> list[str]:
    """Return the names of GPUs."""
    return [document.resources[gpu].name for gpu in gpus]


def explain_arrays(document: Schedule, previous: Schedule | None = None) -> list[str]:
    """Describe every array of a plan in a sentence, and what differs from a former plan.

    Examples
    --------
    >>> import optsched
    >>> from optsched import bandwidth, plan
    >>> array = plan.ArrayRequest(problem=optsched.JobArray([[1, 1]] * 3, [[2, 2]] * 3))
    >>> cluster = bandwidth.Cluster.uniform(bandwidth.HostType("h100", 8), 1)
    >>> state = bandwidth.ClusterState.idle(cluster)
    >>> snapshot = plan.ClusterSnapshot(state, [plan.PlanJob(name="a", gpus=2, array=array)])
    >>> document = plan.order_arrays(plan.plan(snapshot))
    >>> plan.explain_arrays(document)[0].partition(",")[0]
    'a starts on n01/0'
    """
    before = {} if previous is None else {
        one.name: shortened(_named(previous, one.gpus), 8)
        for one in planned_arrays(previous)
    }  # fmt: skip
    sentences, arrays = [], planned_arrays(document)
    for one in arrays:
        gpus = shortened(_named(document, one.gpus), 8)
        old = before.pop(one.name, None)
        place = f"starts on {gpus}" if old is None else f"moves from {old} to {gpus}"
        sentences.append(
            f"{one.name} {f'keeps {gpus}' if old == gpus else place}: {one.jobs} jobs every "
            f"{duration(one.period)}, at most {one.period / max(1, one.bound) - 1:.1%} "
            f"above the least; {one.steps:,} steps in {one.seconds:,} s."
        )
    sentences += [f"{name} leaves {gpus}." for name, gpus in before.items()]
    bound = document.provenance.get("busy_bound")
    if arrays and isinstance(bound, float):
        used = sum(one.busy for one in arrays)
        proof = f"by its rules no plan exceeds {bound:.1f}"
        sentences.append(f"Busy GPUs (times weight): {used:.1f}; {proof}.")
    return sentences
