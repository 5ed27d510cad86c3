"""From hand-made steps per device to a schedule: the longest path of one order per device."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from optsched.errors import InputError
from optsched.io.values import format_value
from optsched.model.graph import scheduled
from optsched.model.schedule import Csr

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from optsched.model.schedule import Schedule
    from optsched.problems.jobarray.problem import JobArray


class Step(NamedTuple):
    """One step of a hand-made order.

    ``B`` is the whole backward pass: recomputation, input gradient and weight gradient, as far as
    the job has blocks of its own for them. ``I`` leaves out the weight gradient, ``W`` is only it.
    """

    kind: Literal["F", "B", "I", "W"]
    unit: int
    stage: int


BLOCKS = {"F": ("F",), "B": ("R", "B", "I", "W"), "I": ("R", "I"), "W": ("W",)}
"""Kinds of the blocks of a step that a graph may have, in order."""


class Unit(NamedTuple):
    """A micro-batch of an iteration of a job; orders number them through all jobs."""

    job: int
    iteration: int
    microbatch: int


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

    On every device the steps run as early as they allow. A stage ends an iteration of a job before
    it begins the next one, as its weights demand. Memory is not checked: `optsched.verify` does.
    With ``objective="period"`` the order is repeated for ever with the least period it allows.
    Blocks that are missing, doubled or on the wrong device, and steps that wait for each other, are
    refused.
    """
    graph = array.graph()
    columns = (graph.kind, graph.job, graph.iteration, graph.microbatch, graph.stage)
    keys = zip(*(column.tolist() for column in columns), strict=True)
    number = {key: i for i, key in enumerate(keys)}
    sequences: list[list[int]] = [[] for _ in range(graph.n_resources)]
    for units in iterations(array):
        for device, row in enumerate(steps(units)):
            sequences[device] += _operations(array, graph, number, row, units)
    provenance: dict[str, Any] = {"pipeline": name}
    if array.job_names:
        provenance["jobs"] = list(array.job_names)
    if graph.period is None:
        return scheduled(graph, Csr.of(sequences), provenance)
    from optsched.analysis.rolling import rolling  # its kernels need a compiler

    return rolling(graph, Csr.of(sequences), provenance=provenance)


def _operations(
    array: JobArray,
    graph: Schedule,
    number: dict[tuple[str, int, int, int, int], int],
    row: Sequence[Step],
    units: Sequence[Unit],
) -> list[int]:
    """The steps of a device in an iteration as operations of the graph, with the updates.

    Updates follow the last gradient block of their stage, or end the row if other devices finish
    first.
    """
    # clipping needs the gradients of other devices, and so do two copies of the weights
    waits = array.update_mode == "global" or not isinstance(array.place[0], int)
    left = Counter((units[step.unit].job, step.stage) for step in row if step.kind in "BW")
    order: list[int] = []
    updates: list[int] = []
    for step in row:
        unit = units[step.unit]
        keys = ((kind, *unit, step.stage) for kind in BLOCKS[step.kind])
        order += [number[key] for key in keys if key in number]
        if step.kind not in "BW":
            continue
        left[unit.job, step.stage] -= 1
        update = number.get(("U", unit.job, unit.iteration, 0, step.stage))
        resource = graph.single_resource
        if update is None or left[unit.job, step.stage] or resource[update] != resource[order[-1]]:
            continue
        (updates if waits else order).append(update)
    return order + updates


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
