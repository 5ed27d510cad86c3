"""Instances as plain lists, and the check of start times against them: no code of optsched."""

from __future__ import annotations

from itertools import pairwise
from typing import Any, TypeAlias

Jobs: TypeAlias = list[list[list[int]]]
"""Chains of [machine, duration]."""

Graph: TypeAlias = dict[str, Any]
"""duration, machine (-1 for none), family, setup_in, setup_out, acquire, free, workspace, release
by operation; arcs [tail, head, start-to-start weight]; memory by machine, 0 for unlimited."""

PER_OPERATION = ("family", "setup_in", "setup_out", "acquire", "free", "workspace", "release")


class WrongSchedule(Exception):
    """Start times that break a rule."""


def graph_of_jobs(jobs: Jobs) -> Graph:
    """A classic job shop as a graph; operations row by row."""
    duration = [p for job in jobs for _, p in job]
    machine = [k for job in jobs for k, _ in job]
    arcs, first = [], 0
    for job in jobs:
        steps = range(first, first + len(job))
        arcs += [[i, j, duration[i]] for i, j in pairwise(steps)]
        first += len(job)
    graph: Graph = {name: [0] * len(duration) for name in PER_OPERATION}
    return graph | {
        "duration": duration,
        "machine": machine,
        "arcs": arcs,
        "memory": [0] * (1 + max(machine, default=-1)),
        "holdings": [],
    }


def makespan(graph: Graph, starts: list[int]) -> int:
    """The makespan of a schedule given by its start times; `WrongSchedule` if it is none."""
    duration = graph["duration"]
    if len(starts) != len(duration):
        raise WrongSchedule(f"{len(starts)} starts for {len(duration)} operations")
    for i, start in enumerate(starts):
        if type(start) is not int or start < graph["release"][i]:
            raise WrongSchedule(f"operation {i} starts at {start!r}")
    for i, j, weight in graph["arcs"]:
        if starts[j] < starts[i] + weight:
            raise WrongSchedule(
                f"operation {j} starts at {starts[j]}, {weight} after {i} at {starts[i]} is later"
            )
    on: list[list[int]] = [[] for _ in graph["memory"]]
    for i, k in enumerate(graph["machine"]):
        if k >= 0:
            on[k].append(i)
    for k, operations in enumerate(on):
        # an instant may touch another operation, never lie inside it
        order = sorted(operations, key=lambda i: (starts[i], starts[i] + duration[i]))
        _check_machine(graph, starts, k, order)
    return max((s + p for s, p in zip(starts, duration, strict=True)), default=0)


def _check_machine(graph: Graph, starts: list[int], k: int, order: list[int]) -> None:
    duration, family = graph["duration"], graph["family"]
    for i, j in pairwise(order):
        setup = 0 if family[i] == family[j] else graph["setup_out"][i] + graph["setup_in"][j]
        if starts[j] < starts[i] + duration[i] + setup:
            raise WrongSchedule(
                f"operations {i} and {j} overlap on machine {k}: {i} ends at "
                f"{starts[i] + duration[i]}, setup {setup}, {j} starts at {starts[j]}"
            )
    limit = graph["memory"][k]
    level = 0
    for i in order:
        level += graph["acquire"][i]
        if limit and level + graph["workspace"][i] > limit:
            raise WrongSchedule(f"machine {k} holds {level} bytes at operation {i}, has {limit}")
        level -= graph["free"][i]
