"""The best makespan of tiny graphs by trying every order on every resource; shares no code."""

from __future__ import annotations

from itertools import pairwise, permutations, product

from optsched.schedule import NO_DEADLINE, Schedule


def best_makespan(graph: Schedule) -> int | None:
    """Optimal makespan over all machine orders, or None if no order is feasible."""
    n = graph.n_operations
    duration, release = graph.duration.tolist(), graph.release.tolist()
    deadline = graph.deadline.tolist()
    arcs = [
        (int(i), int(j), duration[i] + int(lag)) for i, j, lag, _ in zip(*graph.arcs, strict=True)
    ]
    users = graph.users.to_lists()
    best: int | None = None
    choices = [
        [row for row in permutations(on) if _memory_fits(graph, r, row)]
        for r, on in enumerate(users)
    ]
    for rows in product(*choices):
        edges = list(arcs)
        for row in rows:
            for i, j in pairwise(row):
                same = graph.family[i] == graph.family[j]
                setup = 0 if same else int(graph.setup_out[i] + graph.setup_in[j])
                edges.append((i, j, duration[i] + setup))
        start = _longest(n, release, edges)
        if start is None:
            continue
        ends = [s + p for s, p in zip(start, duration, strict=True)]
        if any(d != NO_DEADLINE and e > d for e, d in zip(ends, deadline, strict=True)):
            continue
        value = max(ends, default=0)
        best = value if best is None else min(best, value)
    return best


def _memory_fits(graph: Schedule, r: int, row: tuple[int, ...]) -> bool:
    level, capacity = 0, graph.resources[r].memory
    for i in row:
        if capacity and level + graph.acquire[i] + graph.workspace[i] > capacity:
            return False
        level += int(graph.acquire[i] - graph.free[i])
        if level < 0:
            return False
    return True


def _longest(n: int, release: list[int], edges: list[tuple[int, int, int]]) -> list[int] | None:
    """Earliest starts by repeated relaxation; None if the orders form a cycle."""
    waiting = [0] * n
    for _, j, _ in edges:
        waiting[j] += 1
    start, ready, done = list(release), [i for i in range(n) if not waiting[i]], 0
    while ready:
        i = ready.pop()
        done += 1
        for a, j, weight in edges:
            if a == i:
                start[j] = max(start[j], start[i] + weight)
                waiting[j] -= 1
                if not waiting[j]:
                    ready.append(j)
    return start if done == n else None
