"""Feasible schedules drawn at random: what exactness is tested on when no solver is at hand."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import numpy as np

from optsched.errors import InputError
from optsched.model.schedule import Arcs, Resource, Rows, Schedule

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from optsched.problems.jobarray.problem import JobArray


_DURATION = {"F": 2, "R": 2, "B": 4, "U": 1}


def random_schedule(
    microbatches: Sequence[int],
    n_stages: int,
    *,
    place: Sequence[int] | None = None,
    recompute: Collection[int] = (),
    update: Collection[int] = (),
    together: Collection[int] = (),
    seed: int = 0,
) -> Schedule:
    """One iteration of a job array in an order that is feasible and otherwise arbitrary.

    Parameters
    ----------
    microbatches
        Micro-batches per job.
    n_stages
        Stages of every job.
    place
        Device of every stage; by default each has its own.
    recompute, update
        Jobs whose recompute and whose update are blocks of their own.
    together
        Of those with update blocks: jobs that update when the gradients of all stages are there.
    seed
        Of the random topological order.

    Returns
    -------
    Schedule
        Durations are made up (F 2, R 2, B 4, U 1); starts are the earliest for the orders.
    """
    if len(microbatches) == 0 or min(microbatches) < 1:
        raise InputError(f"microbatches: expected a number >= 1 for every job, got {microbatches}")
    if n_stages < 1:
        raise InputError(f"n_stages: expected a number >= 1, got {n_stages}")
    devices = list(range(n_stages)) if place is None else list(place)
    labels: list[tuple[str, int, int, int]] = []
    for job, n_micro in enumerate(microbatches):
        for m in range(n_micro):
            labels += [("F", job, s, m) for s in range(n_stages)]
            for s in reversed(range(n_stages)):
                labels += [("R", job, s, m)] * (job in recompute) + [("B", job, s, m)]
        labels += [("U", job, s, 0) for s in range(n_stages)] * (job in update)
    arcs = _arcs(labels, microbatches, together)
    order = _topological(len(labels), arcs, random.Random(seed))
    sequences: list[list[int]] = [[] for _ in range(max(devices) + 1)]
    for i in order:
        sequences[devices[labels[i][2]]].append(i)
    duration = [_DURATION[label[0]] for label in labels]
    kind, job_of, stage, microbatch = zip(*labels, strict=True)
    return Schedule(
        name=f"random order {seed}",
        resources=tuple(Resource(f"device{d}") for d in range(len(sequences))),
        duration=duration,  # type: ignore[arg-type]
        op_resources=Rows.of([[devices[s]] for s in stage]),
        arcs=Arcs.of(arcs),
        kind=kind,  # type: ignore[arg-type]
        job=job_of,  # type: ignore[arg-type]
        stage=stage,  # type: ignore[arg-type]
        microbatch=microbatch,  # type: ignore[arg-type]
        sequences=Rows.of(sequences),
        start=_earliest(order, arcs, duration, [devices[s] for s in stage]),  # type: ignore[arg-type]
        provenance={"order": "random", "seed": seed},
    )


def random_rolling(array: JobArray, *, spread: int = 2, seed: int = 0) -> Schedule:
    """A periodic schedule of a job array, feasible (memory apart) and otherwise arbitrary.

    Every job draws random times for its blocks, in an order that its dependencies allow and all
    within one cycle of the job's first; the orders of the devices follow from these times.

    Parameters
    ----------
    array
        A job array of the objective ``"period"``.
    spread
        Every job begins up to so many whole cycles late, which its offsets say.
    seed
        Of all that is drawn.

    Returns
    -------
    Schedule
        With the least period of its orders and starts that keep it.
    """
    from optsched.analysis.rolling import rolling  # compiled: only for those who need it

    draw = random.Random(seed)
    graph = array.graph()
    now = graph.arcs.distance == 0
    inside = list(zip(graph.arcs.tail[now].tolist(), graph.arcs.head[now].tolist(), strict=True))
    begin = [draw.random() for _ in range(array.n_jobs)]
    late = np.array([draw.randint(0, spread) for _ in begin])
    order = _topological(graph.n_operations, inside, draw)
    ascending = sorted(draw.random() for _ in order)
    time = np.zeros(graph.n_operations)
    for i, later in zip(order, ascending, strict=True):
        time[i] = begin[graph.job[i]] + later
    rows = [sorted(row, key=lambda i: time[i] % 1) for row in graph.users.to_lists()]
    found = rolling(graph, rows, time.astype(np.int64), {"order": "random, rolling", "seed": seed})
    assert found.period is not None and found.sequences is not None and found.start is not None
    return found.with_cycle(
        found.period, found.offset + late[found.job], found.sequences, found.start, found.objective
    )


def _arcs(
    labels: Sequence[tuple[str, int, int, int]],
    microbatches: Sequence[int],
    together: Collection[int],
) -> list[tuple[int, int]]:
    at = {label: i for i, label in enumerate(labels)}
    arcs: list[tuple[int, int]] = []
    for (kind, job, s, m), i in at.items():
        before: list[tuple[str, int, int, int]] = []
        if kind == "F":
            before = [("F", job, s - 1, m), ("F", job, s, m - 1)]
        elif kind == "R":
            before = [("F", job, s, m)]
        elif kind == "B":
            before = [
                ("F", job, s, m),
                ("R", job, s, m),
                ("B", job, s + 1, m),
                ("B", job, s, m - 1),
            ]
        elif kind == "U":
            last = microbatches[job] - 1
            before = [("B", job, s, last)]
            if job in together and s:
                before += [("B", job, 0, last)]
        arcs += [(at[label], i) for label in before if label in at]
    return arcs


def _topological(n: int, arcs: Sequence[tuple[int, int]], draw: random.Random) -> list[int]:
    after: list[list[int]] = [[] for _ in range(n)]
    waiting = [0] * n
    for i, j in arcs:
        after[i].append(j)
        waiting[j] += 1
    ready = [i for i in range(n) if not waiting[i]]
    order = []
    while ready:
        i = ready.pop(draw.randrange(len(ready)))
        order.append(i)
        for j in after[i]:
            waiting[j] -= 1
            if not waiting[j]:
                ready.append(j)
    return order


def _earliest(
    order: Sequence[int],
    arcs: Sequence[tuple[int, int]],
    duration: Sequence[int],
    device: Sequence[int],
) -> list[int]:
    before: list[list[int]] = [[] for _ in duration]
    for i, j in arcs:
        before[j].append(i)
    start, free = [0] * len(duration), [0] * (max(device) + 1)
    for i in order:
        ends = [start[k] + duration[k] for k in before[i]]
        start[i] = max(free[device[i]], *ends, 0)
        free[device[i]] = start[i] + duration[i]
    return start
