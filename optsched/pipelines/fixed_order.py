"""From hand-made steps per device to a schedule: the longest path of one order per device."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias

from optsched.errors import InputError
from optsched.io.values import format_value
from optsched.model.graph import scheduled
from optsched.model.schedule import Rows

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from optsched.model.schedule import Schedule
    from optsched.problems.jobarray.problem import JobArray

Block: TypeAlias = tuple[str, int, int, int, int]
"""Kind, job, iteration, micro-batch and virtual stage of an operation: unique in a graph."""


class Step(NamedTuple):
    """One step of a hand-made order.

    ``B`` is the whole backward pass: recomputation, input gradient and weight gradient, as far as
    the job has blocks of its own for them. ``I`` leaves out the weight gradient, ``W`` is only it.
    """

    kind: Literal["F", "B", "I", "W"]
    unit: int
    stage: int


class Unit(NamedTuple):
    """A micro-batch of an iteration of a job; orders number them through all jobs."""

    job: int
    iteration: int
    microbatch: int


def units(array: JobArray) -> list[Unit]:
    """The micro-batches of all jobs, one job after the other, and one iteration after the other."""
    return [unit for one in iterations(array) for unit in one]


def iterations(array: JobArray) -> list[list[Unit]]:
    """Per iteration of a cycle the micro-batches of the jobs that have so many; makespan: one."""
    periodic = array.objective == "period"
    copies = array.multiplicity.tolist() if periodic else [1] * array.n_jobs
    return [
        [
            Unit(j, a, m)
            for j in range(array.n_jobs)
            if a < copies[j]
            for m in range(int(array.micro_batches[j]))
        ]
        for a in range(max(copies))
    ]


def ordered(
    array: JobArray, name: str, steps: Callable[[list[Unit]], list[list[Step]]]
) -> Schedule:
    """The schedule of one iteration after the other, each with the steps made of its units alone.

    A stage ends an iteration of a job before it begins the next one, as its weights demand.
    """
    rows: list[list[Step]] = []
    before = 0  # units of earlier iterations
    for one in iterations(array):
        made = steps(one)
        rows = rows or [[] for _ in made]
        for row, more in zip(rows, made, strict=True):
            row += [step._replace(unit=before + step.unit) for step in more]
        before += len(one)
    return fixed(array, name, rows)


def fixed(array: JobArray, name: str, rows: Sequence[Sequence[Step]]) -> Schedule:
    """The schedule that runs the given steps on every device, as early as they allow.

    Memory is not checked: `optsched.verify` does. With
    ``objective="period"`` the order is repeated for ever with the least period it allows.

    Devices without steps may be left out at the end of `rows`. Updates follow the last gradient
    block of their stage, or end the iteration in the row if other devices finish first. Refuses
    blocks that are missing, doubled or on the wrong device, and steps that wait for each other.
    """
    graph = array.graph()
    sequences = Rows.of(operations(array, graph, rows))
    provenance: dict[str, Any] = {"pipeline": name}
    if array.job_names:
        provenance["jobs"] = list(array.job_names)
    if graph.period is None:
        return scheduled(graph, sequences, provenance)
    from optsched.analysis.rolling import rolling  # its kernels need a compiler

    return rolling(graph, sequences, provenance=provenance)


def operations(array: JobArray, graph: Schedule, rows: Sequence[Sequence[Step]]) -> list[list[int]]:
    """The steps of every device as operations of the graph, with the updates; one row a device."""
    number, resource = numbered(graph), graph.single_resource
    units_ = units(array)
    # clipping needs the gradients of other devices, and so do two copies of the weights
    waits = array.update_mode == "global" or not isinstance(array.place[0], int)
    found: list[list[int]] = []
    for row in rows:
        left = Counter((units_[step.unit][:2], step.stage) for step in row if step.kind in "BW")
        order: list[int] = []
        updates: list[int] = []
        iteration = 0
        for step in row:
            unit = units_[step.unit]
            if unit.iteration > iteration:
                order, updates, iteration = order + updates, [], unit.iteration
            order += [number[b] for b in blocks(step, unit) if b in number]
            here = (unit[:2], step.stage)
            if step.kind not in "BW":
                continue
            left[here] -= 1
            update = number.get(("U", unit.job, unit.iteration, 0, step.stage))
            if update is None or left[here] or resource[update] != resource[order[-1]]:
                continue
            (updates if waits else order).append(update)
        found.append(order + updates)
    return found + [[] for _ in range(graph.n_resources - len(found))]


def numbered(graph: Schedule) -> dict[Block, int]:
    """The operation of every block."""
    columns = (graph.kind, graph.job, graph.iteration, graph.microbatch, graph.stage)
    keys = zip(*(column.tolist() for column in columns), strict=True)
    return {key: i for i, key in enumerate(keys)}


def blocks(step: Step, unit: Unit) -> list[Block]:
    """The blocks of a step that a graph may have, in order."""
    kinds = {"F": ("F",), "B": ("R", "B", "I", "W"), "I": ("R", "I"), "W": ("W",)}[step.kind]
    return [(kind, *unit, step.stage) for kind in kinds]


def one_stage_a_device(array: JobArray, name: str) -> int:
    """The number of stages; `InputError` unless this is an array with stage v on device v."""
    check_array(array, name)
    if array.place != tuple(range(array.n_stages)):
        raise InputError(f"{name}: needs stage v on device v, leave out place")
    return array.n_stages


def check_array(array: JobArray, name: str) -> None:
    """Refuse what is no job array."""
    from optsched.problems.jobarray.problem import JobArray

    if not isinstance(array, JobArray):
        raise InputError(f"{name}: expected a JobArray, got {format_value(array)}")
