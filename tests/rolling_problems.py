"""Random periodic job arrays and random orders of their cycles, from a `random.Random`."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Any

import numpy as np

from optsched import InputError, JobArray
from optsched.model.schedule import Csr

if TYPE_CHECKING:
    from random import Random

    from optsched import Schedule
    from optsched.model.schedule import IntArray


def awkward_array(rng: Random, most: int = 40) -> JobArray:
    """A periodic array with blocks of no time, gradients that leave early and every other option.

    At most so many pairs of blocks share a device. A lag may be as low as minus the time of its
    block, so that the next one may start at the same moment.
    """
    while True:
        with suppress(InputError):
            array = _awkward(
                rng, *rng.choice([(1, 1), (1, 2), (1, 3), (2, 1), (2, 2), (3, 1), (2, 3), (3, 2)])
            )
            users = np.diff(array.graph().users.indptr)
            if (users * (users - 1)).sum() <= 2 * most:
                return array


def _awkward(rng: Random, jobs: int, stages: int) -> JobArray:
    """Options at random, some of which do not go together."""
    zeros, longest = rng.choice([0.3, 0.5, 0.8, 1.0]), rng.choice([1, 2, 4])

    def times(zeros: float = zeros, longest: int = longest) -> list[list[int]]:
        def value() -> int:
            return 0 if rng.random() < zeros else rng.randint(1, longest)

        return [[value() for _ in range(stages)] for _ in range(jobs)]

    def lags(block: list[list[int]], cuts: range) -> list[list[int]]:
        return [[rng.choice([-row[v], 0, rng.randint(-row[v], 3)]) for v in cuts] for row in block]

    forward, backward = times(), times()
    fields: dict[str, Any] = {}
    if rng.random() < 0.3:
        fields["weight"] = times()
    if rng.random() < 0.4:
        fields["update_mode"] = rng.choice(["fused", "block", "global", "none"])
        fields |= {"update": times(), "update_blocks_gradient": rng.random() < 0.3}
    if rng.random() < 0.6:
        fields["lag_forward"] = lags(forward, range(stages - 1))
        fields["lag_backward"] = lags(backward, range(1, stages))
    place = [v if rng.random() < 0.9 else 0 for v in range(stages)]
    fields |= {"place": place, "devices": [f"gpu{v}" for v in range(stages)]}
    if rng.random() < 0.3:
        fields["switch"] = [[row[d] for d in place] for row in times(0.5, 3)]
    if rng.random() < 0.25:
        fields["recompute_mode"] = [rng.random() < 0.5 for _ in range(jobs)]
        fields |= {"recompute": times(), "recompute_as_block": rng.random() < 0.5}
    if rng.random() < 0.35:
        fields |= {"activation": times(0.3, 3), "checkpoint": times(0.3, 2)}
        fields["recompute_workspace"] = times(0.3, 2)
        fields["memory"] = [rng.choice([0, 2, 3, 4, 5]) for _ in range(stages)]
    if rng.random() < 0.25:
        fields["multiplicity"] = [rng.randint(1, 2) for _ in range(jobs)]
    if rng.random() < 0.25:
        fields["micro_batches"] = [rng.randint(1, 2) for _ in range(jobs)]
        fields["microbatch_order"] = rng.choice(["fixed", "free"])
    return JobArray(forward, backward, objective="period", **fields)


def random_orders(rng: Random, graph: Schedule, least: int = 0) -> tuple[Csr, IntArray]:
    """Any orders, with offsets from `least` to 1: most of them are deadlocks."""
    rows = [rng.sample(row, len(row)) for row in graph.users.to_lists()]
    offsets = [rng.randint(least, 1) for _ in range(graph.n_operations)]
    return Csr.of(rows), np.array(offsets)


def circular_orders(rng: Random, graph: Schedule) -> tuple[Csr, IntArray]:
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
    return Csr.of(rows), start // period
