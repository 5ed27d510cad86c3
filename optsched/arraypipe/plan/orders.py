"""Orders that no solver has made: drawn at random, or what is left of one without some jobs."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from optsched.arraypipe.plan.plan import training_arcs
from optsched.arraypipe.plan.types import Block
from optsched.errors import InputError
from optsched.model.graph import evaluate, scheduled
from optsched.model.schedule import Arcs, Resource, Rows, Schedule

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Sequence


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
        Device of every stage; by default one each.
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
    kind, job_of, stage, microbatch = zip(*labels, strict=True)
    blocks = [Block(i, *label, 0, devices[label[2]], 0) for i, label in enumerate(labels)]
    rows = training_arcs(blocks, microbatches, [1] * len(microbatches), together)
    arcs = {(tail, head) for tail, head, distance in rows if not distance}
    sequences: list[list[int]] = [[] for _ in range(max(devices) + 1)]
    for i in topological(len(labels), arcs, random.Random(seed)):
        sequences[blocks[i].device].append(i)
    graph = Schedule(
        name=f"random order {seed}",
        resources=tuple(Resource(f"device{d}") for d in range(len(sequences))),
        duration=[_DURATION[k] for k in kind],  # type: ignore[arg-type]
        op_resources=Rows.of([[b.device] for b in blocks]),
        arcs=Arcs.of(sorted(arcs)),
        kind=kind, job=job_of, stage=stage, microbatch=microbatch,  # type: ignore[arg-type]
    )  # fmt: skip
    orders = Rows.of(sequences)
    provenance = {"order": "random", "seed": seed}
    return graph.with_orders(orders, evaluate(graph, orders).head, None, provenance)


def topological(n: int, arcs: Iterable[tuple[int, int]], draw: random.Random) -> list[int]:
    """A random topological order of 0..n-1."""
    after: list[list[int]] = [[] for _ in range(n)]
    waiting = [0] * n
    for i, j in sorted(arcs):
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


def without(schedule: Schedule, jobs: Collection[int]) -> Schedule:
    """The schedule without some jobs: the others keep their order, and start as early as it allows.

    It is feasible if the schedule was, and its period (or makespan) is no longer, as long as no
    family of setups spans two jobs. Jobs, and families if they are jobs, are numbered anew.
    `InputError` if there is no such job, or none would be left.
    """
    if schedule.sequences is None:
        raise InputError("this graph is not scheduled: it has no sequences")
    known = set(schedule.job.tolist())
    for job in jobs:
        if isinstance(job, bool) or job not in known:
            raise InputError(f"jobs: the schedule has no job {job!r}")
    if known <= set(jobs):
        raise InputError(f"jobs: none would be left of {len(known)}")
    kept = schedule.subset(~np.isin(schedule.job, np.array([*jobs], np.int64)))
    number = np.unique(kept.job, return_inverse=True)[1].astype(np.int64)
    family = number if np.array_equal(kept.family, kept.job) else kept.family
    kept = replace(kept, job=number, family=family)
    assert kept.sequences is not None
    provenance = {"order": "jobs deleted", "jobs": sorted(set(jobs))}
    if kept.period is None:
        return scheduled(kept.graph(), kept.sequences, provenance)
    from optsched.analysis.rolling import rolling  # compiled

    return rolling(kept.graph(), kept.sequences, kept.offset, provenance)
