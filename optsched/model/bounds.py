"""Lower bounds of the makespan that need no solver, and reasons why nothing is feasible."""

from __future__ import annotations

import heapq
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from optsched.model.graph import Evaluation, describe, evaluate
from optsched.model.schedule import NO_DEADLINE, IntArray, Schedule

if TYPE_CHECKING:
    from collections.abc import Sequence


class Holding(NamedTuple):
    """Bytes that stay on a resource from the start of one operation to the end of another."""

    resource: int
    size: int
    first: int
    last: int
    """The operation that frees them; -1 if nobody does."""


def makespan_bound(graph: Schedule) -> int:
    """The best of all bounds here; see `makespan_bounds`."""
    return max(makespan_bounds(graph).values(), default=0)


def makespan_bounds(graph: Schedule) -> dict[str, int]:
    """Lower bounds of the makespan of a graph, by name.

    Returns
    -------
    dict
        ``chain``: longest path of the arcs. ``load``: per resource least head + load (with the
        setups that nobody can avoid) + least tail. ``one_machine``: Jackson's preemptive schedule
        per resource, durations lengthened by unavoidable setups. ``energy``: memory x time.
    """
    paths = evaluate(graph)
    loss = setup_loss(graph)
    one_machine = 0
    for r in range(graph.n_resources):
        on = graph.users[r]
        duration = graph.duration[on] + loss[r]  # the last one loses nothing: less is behind it
        value = jackson_preemptive(paths.head[on], duration, paths.tail[on] - duration)
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

    Parameters
    ----------
    graph
        The disjunctive graph.
    paths
        `evaluate` of the graph, if known.
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
    after: Sequence[int] | IntArray,
) -> int:
    """Makespan of Jackson's preemptive schedule: a lower bound of 1 | r_j, q_j | Cmax.

    Parameters
    ----------
    head
        Release dates r.
    duration
        Processing times p.
    after
        Delivery times behind the end of each operation (its tail without p); may be negative.

    Returns
    -------
    int
        ``max(C_j + after_j)`` when always the released job of longest delivery time runs
        (Carlier 1982); 0 without jobs.
    """
    jobs = sorted(zip(_ints(head), _ints(duration), _ints(after), strict=True))
    ready: list[list[int]] = []  # [-after, remaining]
    now = best = 0
    k = 0
    while k < len(jobs) or ready:
        if not ready:
            now = max(now, jobs[k][0])
        while k < len(jobs) and jobs[k][0] <= now:
            heapq.heappush(ready, [-jobs[k][2], jobs[k][1]])
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
    """Time that a resource loses behind every operation unless that is its last one.

    Behind i comes either another family, which costs at least the cheapest setup, or an operation
    k of its own family, before which the resource waits at least as long as the arcs between i and
    k demand. So the loss is the smaller of the two: it may be far below the setup time, because
    the resource may idle and keep the job.

    Returns
    -------
    list of IntArray
        Per resource, one value for each of its users in the order of `Schedule.users`.
    """
    if not graph.has_setups:
        return [np.zeros(len(graph.users[r]), np.int64) for r in range(graph.n_resources)]
    losses = []
    for r in range(graph.n_resources):
        loss = np.minimum(_cheapest_change(graph, graph.users[r]), _chain_waits(graph, r))
        losses.append(np.where(loss == _NEVER, 0, loss))  # nothing can follow: it is the last one
    return losses


def holdings(graph: Schedule) -> list[Holding]:
    """Who holds how many bytes for how long: acquired bytes matched with who frees them.

    Within one (job, micro-batch, iteration, stage, resource) bytes are freed in the order in which
    they were acquired, by operation id. What nobody frees is held to the end (`last` = -1).
    """
    found: list[Holding] = []
    groups: dict[tuple[int, ...], list[int]] = {}
    touching = np.flatnonzero((graph.acquire > 0) | (graph.free > 0)).tolist()
    labels = np.stack([graph.job, graph.microbatch, graph.iteration, graph.stage], axis=1).tolist()
    for i in touching:
        for r in graph.op_resources[i].tolist():
            groups.setdefault((*labels[i], r), []).append(i)
    for key, operations in groups.items():
        held: list[list[int]] = []  # [bytes, operation], oldest first
        for i in operations:
            if graph.acquire[i]:
                held.append([int(graph.acquire[i]), i])
            given_back = int(graph.free[i])
            while given_back and held:
                part = min(given_back, held[0][0])
                found.append(Holding(key[-1], part, held[0][1], i))
                given_back -= part
                held[0][0] -= part
                if not held[0][0]:
                    held.pop(0)
        found.extend(Holding(key[-1], size, i, -1) for size, i in held)
    return found


def frees_in_order(
    graph: Schedule, r: int, held: Sequence[Holding], reach: dict[int, dict[int, int]]
) -> bool:
    """Whether all bytes freed on r are freed by someone who must come after who took them.

    Only then are holdings more than labels: else another order of operations may free bytes sooner
    than their `Holding` says, and no residence may be counted on.

    Parameters
    ----------
    graph, r
        The resource in question.
    held
        `holdings` of the graph.
    reach
        `paths_from` of operations looked at so far; grows.
    """
    freed = [h for h in held if h.resource == r and h.last >= 0]
    if sum(h.size for h in freed) != int(graph.free[graph.users[r]].sum()):
        return False
    for h in freed:
        if h.first not in reach:
            reach[h.first] = paths_from(graph, h.first)
        if h.last not in reach[h.first]:
            return False
    return True


def infeasibility(graph: Schedule) -> str:
    """Why no schedule of this graph can exist, as a sentence; ``""`` if none is easily seen."""
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
            need, there = int(graph.acquire[i] + graph.workspace[i]), int(graph.memory[r])
            if 0 < there < need:
                return (
                    f"{describe(graph, i)}, operation {i}, needs {need} bytes alone, "
                    f"{graph.resources[r].name} has {there}"
                )
    return ""


_NEVER = int(np.iinfo(np.int64).max // 4)


def _ints(values: Sequence[int] | IntArray) -> list[int]:
    return values.tolist() if isinstance(values, np.ndarray) else list(values)


def family_changes(graph: Schedule, on: IntArray) -> int:
    """Setup time that every order of these operations pays: all families but one are left."""
    if not graph.has_setups:
        return 0
    families = np.unique(graph.family[on], return_inverse=True)[1]
    n = int(families.max()) + 1
    out, into = np.full(n, np.iinfo(np.int64).max), np.full(n, np.iinfo(np.int64).max)
    np.minimum.at(out, families, graph.setup_out[on])
    np.minimum.at(into, families, graph.setup_in[on])
    # the last family is never left, the first never entered
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
    """Least wait of resource r between each user and the next of its own family.

    0 if a user of the same family may follow directly; a huge number if none can follow at all.
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
            elif i not in reach[k]:  # unrelated: may come next at once
                wait = 0
        waits.append(max(0, wait))
    return np.array(waits, np.int64)


def paths_from(graph: Schedule, source: int) -> dict[int, int]:
    """Longest start-to-start path from source to everything behind it."""
    indptr, other, weight = _successor_lists(graph)
    order: list[int] = []
    seen = {source}
    stack = [(source, indptr[source])]
    while stack:  # depth first, post-order
        i, edge = stack.pop()
        if edge == indptr[i + 1]:
            order.append(i)
            continue
        stack.append((i, edge + 1))
        if other[edge] not in seen:
            seen.add(other[edge])
            stack.append((other[edge], indptr[other[edge]]))
    far = {source: 0}
    for i in reversed(order):
        for edge in range(indptr[i], indptr[i + 1]):
            far[other[edge]] = max(far.get(other[edge], 0), far[i] + weight[edge])
    return far


def _successor_lists(graph: Schedule) -> tuple[list[int], ...]:
    """`Schedule.successors` as lists, kept with the graph: converting them takes O(arcs)."""
    kept: tuple[list[int], ...] | None = graph.__dict__.get("_successor_lists")
    if kept is None:
        kept = tuple(column.tolist() for column in graph.successors)
        graph.__dict__["_successor_lists"] = kept
    return kept


def energy_bound(graph: Schedule, paths: Evaluation | None = None) -> int:
    """Per capped resource: least head + bytes x shortest residence / memory + least tail.

    Parameters
    ----------
    graph
        The disjunctive graph.
    paths
        `evaluate` of the graph, if known.
    """
    if not graph.memory.any():
        return 0
    head, tail = (evaluate(graph) if paths is None else paths)[:2]
    work = np.zeros(graph.n_resources, object)
    first: dict[int, int] = {}
    last: dict[int, int] = {}

    def hold(r: int, size: int, i: int, k: int, residence: int) -> None:
        work[r] += size * residence
        behind = int(tail[k] - graph.duration[k])
        first[r] = min(first.get(r, int(head[i])), int(head[i]))
        last[r] = min(last.get(r, behind), behind)

    reach: dict[int, dict[int, int]] = {}
    held = [h for h in holdings(graph) if graph.memory[h.resource]]
    sound = {r for r in {h.resource for h in held} if frees_in_order(graph, r, held, reach)}
    for r, size, i, k in held:
        if r in sound and k >= 0:
            hold(r, size, i, k, reach[i][k] + int(graph.duration[k]))
    for i in np.flatnonzero(graph.workspace).tolist():
        for r in graph.op_resources[i].tolist():
            if graph.memory[r]:
                hold(r, int(graph.workspace[i]), i, i, int(graph.duration[i]))
    return max((first[r] + -(-work[r] // int(graph.memory[r])) + last[r] for r in first), default=0)
