"""Job arrays of a plan: the orders of each on its GPUs, and one periodic schedule of all."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, Final

import msgspec
import numpy as np

from optsched.errors import Infeasible, InputError
from optsched.io.strict_json import shortened
from optsched.io.text import duration
from optsched.io.values import number
from optsched.model.schedule import COLUMNS, Arcs, Csr, Objective, Resource, Schedule
from optsched.plan.array_request import PlannedArray, planned_arrays
from optsched.solving.solve import solve
from optsched.solving.stop import Gap

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from optsched.plan.starts import Plan

GOOD: Final = 0.002
"""Gap to the bound at which the search for an order ends."""

_LEAST: Final = 0.05
"""Seconds for the order of an array, in any case."""

_MOST: Final = 1000
"""Blocks of an array in a cycle of the plan, where the periods of others are longer."""

_NUMBERS: Final = ("job", "family")
"""Columns with numbers of jobs."""


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


# one schedule of several arrays, and back


def schedule_of(document: Schedule, name: str) -> Schedule:
    """Return the schedule of one array of a plan, with its GPUs as devices.

    Examples
    --------
    >>> import optsched
    >>> from optsched import bandwidth, plan
    >>> array = plan.ArrayRequest(problem=optsched.JobArray([[1, 1]] * 3, [[2, 2]] * 3))
    >>> cluster = bandwidth.Cluster.uniform(bandwidth.HostType("h100", 8), 1)
    >>> state = bandwidth.ClusterState.idle(cluster)
    >>> snapshot = plan.ClusterSnapshot(state, [plan.PlanJob(name="a", gpus=2, array=array)])
    >>> document = plan.order_arrays(plan.plan(snapshot))
    >>> plan.schedule_of(document, "a").n_resources
    2
    """
    arrays = {one.name: one for one in planned_arrays(document)}
    if name not in arrays:
        known = ", ".join(arrays) or "none"
        raise InputError(f"array: no array {name!r:.60} in this plan; there are {known:.200}")
    one, starts, orders = arrays[name], document.start, document.sequences
    end = one.first_job + one.jobs
    ids = np.flatnonzero((document.job >= one.first_job) & (document.job < end))
    count, device = len(ids) // one.cycles, {gpu: d for d, gpu in enumerate(one.gpus)}
    used = [document.op_resources[i].tolist() for i in ids.tolist()]
    fits = count * one.cycles == len(ids) > 0 and all(gpu in device for row in used for gpu in row)
    if starts is None or orders is None or not fits:
        raise InputError(f"array: the blocks of {name!r:.60} do not fit provenance.arrays")
    ids, first, (tail, head, lag, distance) = ids[:count], int(ids[0]), document.arcs
    inner = (tail >= first) & (tail < first + count)
    cycle, head = np.divmod(head[inner] - first, count)
    rows = [orders[gpu][: len(orders[gpu]) // one.cycles] - first for gpu in one.gpus]
    columns: dict[str, Any] = {key: getattr(document, key)[ids] for key in COLUMNS}
    columns |= {key: columns[key] - columns[key].min() for key in _NUMBERS}
    columns["offset"] = columns["offset"] * one.cycles + starts[ids] // one.period
    return Schedule(
        resources=tuple(document.resources[gpu] for gpu in one.gpus), time_unit="ns", name=name,
        op_resources=Csr.of([[device[gpu] for gpu in row] for row in used[:count]]),
        arcs=Arcs(tail[inner] - first, head, lag[inner], distance[inner] * one.cycles + cycle),
        sequences=Csr.of([(row % count).tolist() for row in rows]), period=one.period,
        start=starts[ids] % one.period, objective=_claim(one.period, one.bound), **columns,
        provenance={
            "jobs": list(document.job_names[one.first_job : end]), "array": name,
            **({"recompute": one.recompute} if one.recompute else {}),
        },
    )  # fmt: skip


def join(
    arrays: Sequence[tuple[PlannedArray, Schedule]], held: Mapping[str, Sequence[int]],
    resources: Sequence[Resource], **fields: Any,
) -> Schedule:  # fmt: skip
    """Return one schedule of arrays on different GPUs, and of jobs that hold other GPUs.

    Instance n of an operation becomes instance ``n // cycles`` of copy ``n % cycles``. The longer
    period of the plan keeps orders feasible: tokens of arcs are >= 0, as starts lie within it.
    """
    period, bound = (max(getattr(one, key) for one, _ in arrays) for key in ("period", "bound"))
    named, holder = list(resources), {gpu: i for i, row in enumerate(held.values()) for gpu in row}
    for one, made in arrays:
        for gpu, memory in zip(one.gpus, made.memory.tolist(), strict=True):
            named[gpu] = Resource(named[gpu].name, memory)
    every, number = range(len(named)), np.arange(len(held))
    others = Schedule(
        resources=tuple(named), op_resources=Csr.of([[*row] for row in held.values()]), job=number,
        family=number, period=period, duration=0 * number + period, start=0 * number,
        kind=np.full(len(held), "job"),
        sequences=Csr.of([[holder[gpu]] if gpu in holder else [] for gpu in every]),
    )  # fmt: skip
    parts = [(made, one.gpus, one.cycles) for one, made in arrays]
    columns: dict[str, list[Any]] = {key: [] for key in (*COLUMNS, "start")}
    by_gpu, rows, arcs, jobs = [list[int]() for _ in every], list[list[int]](), list[Any](), 0
    for made, gpus, cycles in (*parts, (others, [*every], 1)):
        assert made.sequences is not None and made.period is not None
        first, count, (tail, head, lag, distance) = len(rows), made.n_operations, made.arcs
        copy, of_arc = (np.repeat(np.arange(cycles), n) for n in (count, len(tail)))
        turn, target = copy + np.tile(made.offset, cycles), of_arc + np.tile(distance, cycles)
        cells = {key: np.tile(getattr(made, key), cycles) for key in columns}
        cells["start"] = cells["start"] + turn % cycles * made.period
        cells["offset"] = turn // cycles
        cells["iteration"] = cells["iteration"] + copy * (1 + made.iteration.max(initial=0))
        for key, values in columns.items():
            values.append(cells[key] + jobs if key in _NUMBERS else cells[key])
        arcs.append([np.tile(tail, cycles) + of_arc * count + first,
                     np.tile(head, cycles) + target % cycles * count + first,
                     np.tile(lag, cycles), target // cycles])  # fmt: skip
        # the copy of an operation that starts in a window of the period of the array
        window = np.empty((cycles, count), np.int64)
        window[turn % cycles, np.tile(np.arange(count), cycles)] = np.arange(cycles * count)
        rows += [[gpus[d] for d in row] for row in made.op_resources.to_lists()] * cycles
        for gpu, row in zip(gpus, made.sequences.to_lists(), strict=True):
            by_gpu[gpu] += (first + window[:, row]).ravel().tolist()
        jobs += int(made.job.max(initial=-1)) + 1
    table: dict[str, Any] = {key: np.concatenate(row) for key, row in columns.items()}
    return Schedule(
        resources=tuple(named), time_unit="ns", period=period, op_resources=Csr.of(rows),
        arcs=Arcs(*np.concatenate(arcs, axis=1)), sequences=Csr.of(by_gpu),
        objective=_claim(period, bound), **table, **fields,
    )  # fmt: skip


def _claim(period: int, bound: int) -> Objective:
    return Objective("period", period, bound, "optimal" if period == bound else "feasible")
