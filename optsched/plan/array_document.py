"""One periodic schedule of a cluster with the blocks of several job arrays, and back."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Final

import msgspec
import numpy as np

from optsched.errors import InputError
from optsched.io.strict_json import decode
from optsched.model.schedule import COLUMNS, Arcs, Csr, Objective, Resource, Schedule

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_NUMBERS: Final = ("job", "family")
"""Columns with numbers of jobs."""

_Positive = Annotated[int, msgspec.Meta(ge=1)]


class PlannedArray(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A job array in a plan: its GPUs, its jobs in the schedule, its expected time.

    Examples
    --------
    >>> import optsched
    >>> from optsched import bandwidth, plan
    >>> array = plan.ArrayRequest(problem=optsched.JobArray([[1, 1]] * 3, [[2, 2]] * 3))
    >>> cluster = bandwidth.Cluster.uniform(bandwidth.HostType("h100", 8), 1)
    >>> state = bandwidth.ClusterState.idle(cluster)
    >>> snapshot = plan.ClusterSnapshot(state, [plan.PlanJob(name="a", gpus=2, array=array)])
    >>> document = plan.order_arrays(plan.plan(snapshot))
    >>> plan.planned_arrays(document)[0].gpus
    [0, 1]
    """

    name: str
    gpus: list[int]
    first_job: int
    """Number of its first job in the schedule of the plan."""
    jobs: _Positive
    steps: int
    seconds: int
    """Expected time of all steps."""
    period: _Positive
    """Time of a cycle of all its jobs in ns."""
    cycles: _Positive
    """Of this array in a cycle of the plan."""
    bound: int
    """Lower bound on the period with so many GPUs."""
    busy: float
    """Mean number of its GPUs that compute, times its weight."""
    sha256: str
    """Of the array on so many GPUs."""
    script: str = ""
    recompute: list[bool] = []
    """Which jobs recompute, if the solver chose."""


def planned_arrays(document: Schedule) -> list[PlannedArray]:
    """Return the arrays of a document of `order_arrays`; none of another plan.

    Examples
    --------
    >>> import optsched
    >>> from optsched import bandwidth, plan
    >>> array = plan.ArrayRequest(problem=optsched.JobArray([[1, 1]] * 3, [[2, 2]] * 3))
    >>> cluster = bandwidth.Cluster.uniform(bandwidth.HostType("h100", 8), 1)
    >>> state = bandwidth.ClusterState.idle(cluster)
    >>> snapshot = plan.ClusterSnapshot(state, [plan.PlanJob(name="a", gpus=2, array=array)])
    >>> document = plan.order_arrays(plan.plan(snapshot))
    >>> [one.name for one in plan.planned_arrays(document)]
    ['a']
    """
    arrays = decode(document.provenance.get("arrays", []), list[PlannedArray], "provenance.arrays")
    for one in arrays:
        if not one.gpus or not all(0 <= gpu < document.n_resources for gpu in one.gpus):
            raise InputError(f"provenance.arrays: {one.name!r:.60} has GPUs {one.gpus!r:.60}")
    return arrays


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
