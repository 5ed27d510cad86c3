"""Orders of the job arrays of a plan, each on its GPUs, in one schedule of the cluster."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated, Any, Final

import msgspec
import numpy as np
from msgspec.structs import replace

from optsched.errors import Infeasible, InputError
from optsched.io.strict_json import decode, shortened
from optsched.io.text import time_text
from optsched.model.schedule import COLUMNS, Arcs, Csr, Objective, Resource, Schedule
from optsched.solving.solve import solve
from optsched.solving.stop import Gap

if TYPE_CHECKING:
    from optsched.plan.starts import Plan
    from optsched.problems.jobarray.problem import JobArray

GOOD: Final = 0.002
"""Gap to the bound at which the search for an order ends."""

_LEAST: Final = 0.05
"""Seconds for the order of an array, in any case."""

_MOST: Final = 1000
"""Blocks of an array in the schedule of all, where the period of others is longer."""

_NUMBERS: Final = ("job", "family")
"""Columns with numbers of jobs."""

_Positive = Annotated[int, msgspec.Meta(ge=1)]


class PlannedArray(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A job array in a plan: its GPUs, its jobs in the schedule, its expected time."""

    name: str
    gpus: list[int]
    first_job: int
    """Number of its first job in the schedule of the plan."""
    jobs: _Positive
    steps: int
    seconds: int
    """Expected time of all steps."""
    period: _Positive
    """Time of a cycle of all jobs in ns."""
    cycles: _Positive
    """Of this array in a cycle of the schedule."""
    bound: int
    """Lower bound on the period with so many GPUs."""
    busy: float
    """Mean number of its GPUs that compute, times its weight."""
    sha256: str
    """Of the array on so many GPUs."""
    script: str = ""


def planned_arrays(document: Schedule) -> list[PlannedArray]:
    """Return the arrays of a document of `order_arrays`; none of another plan."""
    found = document.provenance.get("arrays", [])
    arrays = decode(found, list[PlannedArray], "provenance.arrays")
    for one in arrays:
        if not one.gpus or not all(0 <= gpu < document.n_resources for gpu in one.gpus):
            raise InputError(f"provenance.arrays: {one.name!r:.60} has GPUs {one.gpus!r:.60}")
    return arrays


def schedule_of(document: Schedule, name: str) -> Schedule:
    """Return the schedule of one array of a plan, with its GPUs as devices."""
    arrays = {one.name: one for one in planned_arrays(document)}
    if name not in arrays:
        known = ", ".join(arrays) or "none"
        raise InputError(f"array: no array {name!r:.60} in this plan; there are {known:.200}")
    one, starts, orders = arrays[name], document.start, document.sequences
    ids = np.flatnonzero(
        (document.job >= one.first_job) & (document.job < one.first_job + one.jobs)
    )
    count, device = len(ids) // one.cycles, {gpu: d for d, gpu in enumerate(one.gpus)}
    used = [document.op_resources[i].tolist() for i in ids.tolist()]
    fits = count * one.cycles == len(ids) > 0 and all(gpu in device for row in used for gpu in row)
    if starts is None or orders is None or not fits:
        raise InputError(f"array: the blocks of {name!r:.60} do not fit provenance.arrays")
    first, (tail, head, lag, distance) = int(ids[0]), document.arcs
    inner = (tail >= first) & (tail < first + count)
    cycle, head = np.divmod(head[inner] - first, count)
    rows = [orders[gpu][: len(orders[gpu]) // one.cycles] - first for gpu in one.gpus]
    columns = {key: getattr(document, key)[ids[:count]] for key in COLUMNS}
    columns |= {key: columns[key] - columns[key].min() for key in _NUMBERS}
    columns["offset"] = columns["offset"] * one.cycles + starts[ids[:count]] // one.period
    return Schedule(
        resources=tuple(document.resources[gpu] for gpu in one.gpus), time_unit="ns", name=name,
        op_resources=Csr.of([[device[gpu] for gpu in row] for row in used[:count]]),
        arcs=Arcs(tail[inner] - first, head, lag[inner], distance[inner] * one.cycles + cycle),
        sequences=Csr.of([(row % count).tolist() for row in rows]), period=one.period,
        start=starts[ids[:count]] % one.period, objective=_claim(one.period, one.bound), **columns,
        provenance={
            "jobs": list(document.job_names[one.first_job : one.first_job + one.jobs]),
            "array": name,
        },
    )  # fmt: skip


def _claim(period: int, bound: int) -> Objective:
    return Objective("period", period, bound, "optimal" if period == bound else "feasible")


def _repeated(one: Schedule, cycles: int) -> Schedule:
    """Return the schedule whose cycle is several cycles: instance n becomes n // cycles."""
    count, period = one.n_operations, one.period
    assert one.sequences is not None and one.start is not None and period is not None
    copy = np.repeat(np.arange(cycles), count)
    turn = copy + np.tile(one.offset, cycles)
    columns = {key: np.tile(getattr(one, key), cycles) for key in COLUMNS}
    columns |= {
        "offset": turn // cycles,
        "iteration": columns["iteration"] + copy * (1 + one.iteration.max(initial=0)),
    }
    at = np.repeat(np.arange(cycles), len(one.arcs.tail))
    target = at + np.tile(one.arcs.distance, cycles)
    # the copy of an operation in a window of the old period
    window = np.empty((cycles, count), np.int64)
    window[turn % cycles, np.tile(np.arange(count), cycles)] = np.arange(cycles * count)
    rows = [one.sequences[r] for r in range(one.n_resources)]
    return Schedule(
        resources=one.resources, time_unit="ns", period=cycles * period,
        op_resources=Csr.of(one.op_resources.to_lists() * cycles),
        arcs=Arcs(np.tile(one.arcs.tail, cycles) + at * count,
                  np.tile(one.arcs.head, cycles) + target % cycles * count,
                  np.tile(one.arcs.lag, cycles), target // cycles),
        sequences=Csr.of([window[:, row].ravel().tolist() for row in rows]),
        start=np.tile(one.start, cycles) + turn % cycles * period, **columns,
    )  # fmt: skip


def order_arrays(
    plan: Plan, *, time_limit: float = 10.0, previous: Schedule | None = None
) -> Schedule:
    """Order the blocks of all arrays that start, and return one schedule of the whole cluster.

    GPUs are resources, blocks of the arrays are operations. The schedule repeats with the period
    of the slowest array; `schedule_of` returns that of one array, which may be shorter. Other jobs
    hold their GPUs all the time. Without arrays it is `Plan.schedule`.

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
    """
    kept = {} if previous is None else {one.name: one for one in planned_arrays(previous)}
    chosen = [(one, one.job.array.on(len(one.gpus))) for one in plan.verdicts
              if one.gpus and one.job.array is not None]  # fmt: skip
    if not chosen:
        return plan.schedule
    orders, end = dict[str, Schedule](), time.perf_counter() + time_limit
    made, entries = list[Schedule](), list[PlannedArray]()
    for k, (one, array) in enumerate(chosen):
        name, key, before = one.job.name, array.sha256, kept.get(one.job.name)
        if previous and before and (before.gpus, before.sha256) == ([*one.gpus], key):
            schedule = schedule_of(previous, name)
        elif key in orders:
            schedule = orders[key]
        else:  # searches that end early leave their time to the others
            left = len({other.sha256 for _, other in chosen[k:]} - orders.keys())
            share = max(_LEAST, (end - time.perf_counter()) * min(1, 2 / left))
            found = solve(array, time_limit=share, stop=Gap(GOOD)).schedule
            if found is None:
                raise Infeasible(f"{name}: no order found in {share:.3g} s; give more time")
            orders[key] = schedule = found
        request, period = one.job.array, schedule.period
        assert request is not None and period is not None
        first = sum(other.n_jobs for _, other in chosen[:k])
        made.append(schedule)
        entries.append(PlannedArray(
            name, [*one.gpus], first, array.n_jobs, request.steps, request.seconds(period), period,
            1, request.periods[len(one.gpus)], request.weight * sum(request.loads) / max(1, period),
            key, request.script,
        ))  # fmt: skip
    longest = max(one.period for one in entries)
    for k, one in enumerate(entries):
        cycles = max(1, min(longest // max(1, one.period), _MOST // made[k].n_operations))
        made[k], entries[k] = _repeated(made[k], cycles), replace(one, cycles=cycles)
    return _joined(plan, made, entries, [array for _, array in chosen])


def _joined(
    plan: Plan, made: list[Schedule], entries: list[PlannedArray], arrays: list[JobArray]
) -> Schedule:
    """Join schedules on different GPUs, and the GPUs that other jobs hold.

    A longer period keeps each of them feasible: tokens of arcs are never negative, as starts lie
    within the period.
    """
    period, bound = (max(getattr(one, key) for one in entries) for key in ("period", "bound"))
    resources, gpus = list(plan.snapshot.cluster.resources), [one.gpus for one in entries]
    for devices, array in zip(gpus, arrays, strict=True):
        for gpu, memory in zip(devices, array.memory.tolist(), strict=True):
            resources[gpu] = Resource(resources[gpu].name, memory)
    held = {job.name: list(where.gpus) for job, where in plan.snapshot.running}
    held |= {one.job.name: list(one.gpus) for one in plan.verdicts if not one.job.array}
    held = {name: where for name, where in held.items() if where}
    holder = {gpu: i for i, where in enumerate(held.values()) for gpu in where}
    every, number = range(len(resources)), np.arange(len(held))
    parts = [*zip(made, gpus, strict=True), (Schedule(
        resources=tuple(resources), op_resources=Csr.of([*held.values()]), period=period,
        duration=0 * number + period, start=0 * number, job=number, family=number,
        kind=np.full(len(held), "job"),
        sequences=Csr.of([[holder[gpu]] if gpu in holder else [] for gpu in every]),
    ), [*every])]  # fmt: skip
    columns: dict[str, Any] = {key: [] for key in (*COLUMNS, "start")}
    by_gpu, rows, arcs, jobs = [list[int]() for _ in every], list[list[int]](), list[Any](), 0
    for one, devices in parts:
        assert one.sequences is not None
        first, (tail, head, lag, distance) = len(rows), one.arcs
        for key, values in columns.items():
            column = getattr(one, key)
            values.append(column + jobs if key in _NUMBERS else column)
        arcs.append(np.stack([tail + first, head + first, lag, distance]))
        rows += [[devices[d] for d in row] for row in one.op_resources.to_lists()]
        for gpu, row in zip(devices, one.sequences.to_lists(), strict=True):
            by_gpu[gpu] += [first + i for i in row]
        jobs += int(one.job.max(initial=-1)) + 1
    names = [f"{one.name}/{job}" for one, array in zip(entries, arrays, strict=True)
             for job in array.names]  # fmt: skip
    return Schedule(
        resources=tuple(resources), name=plan.snapshot.name, time_unit="ns", period=period,
        op_resources=Csr.of(rows), arcs=Arcs(*np.concatenate(arcs, axis=1)),
        sequences=Csr.of(by_gpu), **{key: np.concatenate(row) for key, row in columns.items()},
        objective=_claim(period, bound),
        provenance={
            **plan.schedule.provenance, "jobs": [*names, *held], "busy_bound": plan.busy_bound,
            "arrays": msgspec.to_builtins(entries),
        },
    )  # fmt: skip


def explain_arrays(document: Schedule, previous: Schedule | None = None) -> list[str]:
    """Describe every array of a plan in a sentence, and what differs from a former plan."""
    before = {} if previous is None else {one.name: one for one in planned_arrays(previous)}
    found, busy = [], 0.0
    for one in planned_arrays(document):
        gpus, old = _written(document, one), before.pop(one.name, None)
        place, busy = f"starts on {gpus}", busy + one.busy
        if previous is not None and old is not None:
            same = _written(previous, old)
            place = f"keeps {gpus}" if same == gpus else f"moves from {same} to {gpus}"
        found.append(
            f"{one.name} {place}: {one.jobs} jobs every {time_text(one.period, 'ns')}, at most "
            f"{one.period / max(1, one.bound) - 1:.1%} above the least; {one.steps:,} steps in "
            f"{one.seconds:,} s."
        )
    if previous is not None:
        found += [f"{one.name} leaves {_written(previous, one)}." for one in before.values()]
    if found and isinstance(bound := document.provenance.get("busy_bound"), float):
        found.append(f"The arrays keep {busy:.1f} GPUs busy; no plan keeps more than {bound:.1f}.")
    return found


def _written(document: Schedule, one: PlannedArray) -> str:
    return shortened([document.resources[gpu].name for gpu in one.gpus], 8)
