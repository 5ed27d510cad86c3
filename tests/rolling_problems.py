"""Random periodic job arrays and random orders of their cycles, from a `random.Random`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from random_problems import random_array

from optsched.schedule import Rows

if TYPE_CHECKING:
    from random import Random

    from optsched import JobArray, Schedule
    from optsched.schedule import IntArray


def random_rolling(rng: Random, jobs: int = 2, stages: int = 2) -> JobArray:
    """A tiny periodic array with every option of job arrays, some jobs twice a cycle."""
    array = random_array(rng, jobs, stages)
    copies = [rng.choice([1, 1, 1, 2]) for _ in range(array.n_jobs)]
    if array.graph().n_operations > 8:
        copies = [1] * array.n_jobs
    return array.replace(release=0, objective="period", multiplicity=copies)


def random_orders(rng: Random, graph: Schedule, least: int = 0) -> tuple[Rows, IntArray]:
    """Any orders, with offsets from `least` to 1: most of them are deadlocks."""
    rows = [rng.sample(row, len(row)) for row in graph.users.to_lists()]
    offsets = [rng.randint(least, 1) for _ in range(graph.n_operations)]
    return Rows.of(rows), np.array(offsets)


def circular_orders(rng: Random, graph: Schedule) -> tuple[Rows, IntArray]:
    """Orders and offsets of a schedule: every block at a random time after what it waits for."""
    period = graph.period or 1
    start = np.zeros(graph.n_operations, np.int64)
    tail, head, lag, distance = graph.arcs
    first = {}
    for i in range(graph.n_operations):  # ids are topological
        into = (head == i) & (distance == 0)
        ready = (start[tail] + graph.duration[tail] + lag)[into]
        begin = first.setdefault(int(graph.job[i]), rng.randrange(2 * period))
        start[i] = max(begin, ready.max(initial=0)) + rng.choice([0, 0, 1, 5])
    rows = [
        sorted(row, key=lambda i: (int(start[i]) % period, i)) for row in graph.users.to_lists()
    ]
    return Rows.of(rows), start // period
