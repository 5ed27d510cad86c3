"""Lower bounds of the makespan that need no search, and simple proofs of infeasibility."""

from __future__ import annotations

import heapq
from typing import TYPE_CHECKING

import numpy as np

from optsched.model.graph import Evaluation, describe, evaluate
from optsched.model.memory_bounds import energy_bound, paths_from
from optsched.model.schedule import NO_DEADLINE, IntArray, Schedule

if TYPE_CHECKING:
    from collections.abc import Sequence


def makespan_bound(graph: Schedule) -> int:
    """The best of all bounds here; see `makespan_bounds`."""
    return max(makespan_bounds(graph).values(), default=0)


def makespan_bounds(graph: Schedule) -> dict[str, int]:
    """Lower bounds of the makespan of a graph, by name.

    ``chain``: longest path of the arcs. ``load``: per resource least head + load (with unavoidable
    setups) + least tail. ``one_machine``: Jackson's preemptive schedule per resource, durations
    lengthened by unavoidable setups. ``energy``: memory x time of what fits together
    (`optsched.model.memory_bounds`).
    """
    paths = evaluate(graph)
    loss = setup_loss(graph)
    one_machine = 0
    for r in range(graph.n_resources):
        on = graph.users[r]
        # valid for the last operation too, which loses nothing: its tail shrinks by the loss
        duration = graph.duration[on] + loss[r]
        value = jackson_preemptive(paths.head[on], duration, paths.tail[on])
        one_machine = max(one_machine, value)
    return {
        "chain": paths.makespan,
        "load": load_bound(graph, paths),
        "one_machine": one_machine,
        "energy": energy_bound(graph, paths),
    }


def horizon(graph: Schedule) -> int:
    """A makespan that no feasible orders exceed: every operation and largest gap once."""
    lag = graph.arcs.lag
    total = graph.duration.sum() + lag[lag > 0].sum() + graph.setup_in.sum() + graph.setup_out.sum()
    return int(total + graph.release.max(initial=0))


def load_bound(graph: Schedule, paths: Evaluation | None = None) -> int:
    """Per resource least head + durations + setups that every order pays + least tail.

    `paths` is `evaluate` of the graph, if known.
    """
    paths = evaluate(graph) if paths is None else paths
    best = 0
    for r in range(graph.n_resources):
        on = graph.users[r]
        if len(on):
            duration = graph.duration[on]
            total = int(duration.sum()) + family_changes(graph, on)
            after = paths.tail[on] - duration
            best = max(best, int(paths.head[on].min()) + total + int(after.min()))
    return best


def jackson_preemptive(
    head: Sequence[int] | IntArray,
    duration: Sequence[int] | IntArray,
    tail: Sequence[int] | IntArray,
) -> int:
    """Makespan of Jackson's preemptive schedule: a lower bound of 1 | r_j, q_j | Cmax.

    The released job with the longest delivery time runs at any time (Carlier 1982: optimal with
    preemption). `tail`: durations plus delivery times, as `Evaluation.tail`; delivery times may be
    negative.
    """
    jobs = sorted(zip(_ints(head), _ints(duration), _ints(tail), strict=True))
    ready: list[list[int]] = []  # [-delivery time, remaining]
    now = best = 0
    k = 0
    while k < len(jobs) or ready:
        if not ready:
            now = max(now, jobs[k][0])
        while k < len(jobs) and jobs[k][0] <= now:
            heapq.heappush(ready, [jobs[k][1] - jobs[k][2], jobs[k][1]])
            k += 1
        negated, remaining = ready[0]
        until = jobs[k][0] if k < len(jobs) else now + remaining
        run = min(remaining, until - now)
        now += run
        if run == remaining:
            heapq.heappop(ready)
            best = max(best, now - negated)
        else:
            ready[0][1] = remaining - run
    return best


def setup_loss(graph: Schedule) -> list[IntArray]:
    """Least idle or setup time of a resource after every operation but its last one.

    The next operation after i is either of another family, which costs at least the cheapest
    setup, or an operation k of the same family, which cannot start before the arcs from i to k
    allow. The loss is the smaller of the two, so it may be far below the setup time. Per resource,
    in the order of `Schedule.users`.
    """
    if not graph.has_setups:
        return [np.zeros(len(graph.users[r]), np.int64) for r in range(graph.n_resources)]
    losses = []
    for r in range(graph.n_resources):
        loss = np.minimum(_cheapest_change(graph, graph.users[r]), _chain_waits(graph, r))
        losses.append(np.where(loss == _NEVER, 0, loss))  # nothing can follow: i is the last one
    return losses


def infeasibility(graph: Schedule) -> str:
    """One sentence why no schedule of this graph exists, or ``""`` if these checks show none."""
    if (graph.deadline != NO_DEADLINE).any():
        paths = evaluate(graph)
        late = paths.head + graph.duration > graph.deadline
        if late.any():
            i = int(np.argmax(late))
            return (
                f"{describe(graph, i)}, operation {i}, cannot end before "
                f"{paths.head[i] + graph.duration[i]}, its deadline is {graph.deadline[i]}"
            )
    for i in np.flatnonzero(graph.acquire + graph.workspace).tolist():
        for r in graph.op_resources[i].tolist():
            need, limit = int(graph.acquire[i] + graph.workspace[i]), int(graph.memory[r])
            if 0 < limit < need:
                return (
                    f"{describe(graph, i)}, operation {i}, needs {need} bytes alone, "
                    f"{graph.resources[r].name} has {limit}"
                )
    return ""


_NEVER = int(np.iinfo(np.int64).max // 4)


def _ints(values: Sequence[int] | IntArray) -> list[int]:
    return values.tolist() if isinstance(values, np.ndarray) else list(values)


def family_changes(graph: Schedule, on: IntArray) -> int:
    """Setup time that every order of these operations pays."""
    if not graph.has_setups:
        return 0
    families = np.unique(graph.family[on], return_inverse=True)[1]
    n = int(families.max()) + 1
    out, into = np.full(n, np.iinfo(np.int64).max), np.full(n, np.iinfo(np.int64).max)
    np.minimum.at(out, families, graph.setup_out[on])
    np.minimum.at(into, families, graph.setup_in[on])
    # every family but the last is left, every one but the first is entered, each at least once
    return int(out.sum() - out.max() + into.sum() - into.max())


def _cheapest_change(graph: Schedule, on: IntArray) -> IntArray:
    """Least setup from each of these operations to one of another family."""
    cheapest: dict[int, int] = {}
    for family, into in zip(graph.family[on].tolist(), graph.setup_in[on].tolist(), strict=True):
        cheapest[family] = min(into, cheapest.get(family, into))
    ranked = sorted((into, family) for family, into in cheapest.items())
    loss = []
    for family, out in zip(graph.family[on].tolist(), graph.setup_out[on].tolist(), strict=True):
        other = next((into for into, f in ranked if f != family), None)
        loss.append(_NEVER if other is None else out + other)
    return np.array(loss, np.int64)


def _chain_waits(graph: Schedule, r: int) -> IntArray:
    """Least idle time of resource r from each user to a later one of the same family.

    0 if one may follow directly; `_NEVER` if none can follow.
    """
    on = graph.users[r].tolist()
    members: dict[int, set[int]] = {}
    for i in on:
        members.setdefault(int(graph.family[i]), set()).add(i)
    reach = {i: paths_from(graph, i) for i in on if len(members[int(graph.family[i])]) > 1}
    waits = []
    for i in on:
        wait = _NEVER
        for k in members[int(graph.family[i])] - {i}:
            if k in reach[i]:
                wait = min(wait, reach[i][k] - int(graph.duration[i]))
            elif i not in reach[k]:  # unrelated: may follow directly
                wait = 0
        waits.append(max(0, wait))
    return np.array(waits, np.int64)
