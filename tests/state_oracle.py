"""The best makespan of small graphs by dynamic programming over sets of placed operations."""

from __future__ import annotations

from optsched.model.schedule import NO_DEADLINE, Schedule

State = tuple[int, tuple[int, ...]]  # placed operations as bits, last operation on each resource


def best_by_states(graph: Schedule) -> int | None:
    """Optimal makespan, or None if nothing is feasible; shares no code with the library.

    Operations are placed one by one behind their predecessors and behind all that is on their
    resources. Two ways to place the same set with the same last operations differ only in what
    the rest has to wait for: a way that is later in every respect is dropped. Exact for every
    feature of the format; three jobs on three stages (18 operations) take well under a second.
    """
    n = graph.n_operations
    duration, release = graph.duration.tolist(), graph.release.tolist()
    deadline, family = graph.deadline.tolist(), graph.family.tolist()
    out, into = graph.setup_out.tolist(), graph.setup_in.tolist()
    acquire, free = graph.acquire.tolist(), graph.free.tolist()
    workspace, memory = graph.workspace.tolist(), [r.memory for r in graph.resources]
    needs = graph.op_resources.to_lists()
    users = [sum(1 << i for i in range(n) if r in needs[i]) for r in range(len(memory))]
    arcs = list(zip(*(column.tolist() for column in graph.arcs[:3]), strict=True))
    before = [sum({1 << tail for tail, head, _ in arcs if head == i}) for i in range(n)]
    after = [[(h, duration[i] + lag) for t, h, lag in arcs if t == i] for i in range(n)]

    def fits(done: int, i: int) -> bool:
        for r in needs[i]:
            level = sum(acquire[k] - free[k] for k in range(n) if done & users[r] & 1 << k)
            if memory[r] and level + acquire[i] + workspace[i] > memory[r]:
                return False
            if level + acquire[i] - free[i] < 0:
                return False
        return True

    tail = list(duration)  # ids need not be topological: relax until nothing changes
    for _ in range(n):
        for i in range(n):
            tail[i] = max([tail[i], *(weight + tail[k] for k, weight in after[i])])

    def search(width: int | None, below: float) -> int | None:
        # a way: earliest start of every operation so far, end of the last per resource, makespan
        first = (*release, *[0] * len(memory), 0)
        layer: dict[State, list[tuple[int, ...]]] = {(0, (-1,) * len(memory)): [first]}
        for _ in range(n):
            following: dict[State, list[tuple[int, ...]]] = {}
            for (done, last), ways in layer.items():
                for i in range(n):
                    if done >> i & 1 or before[i] & ~done or not fits(done, i):
                        continue
                    left = ~done & ~(1 << i)
                    latest = tuple(
                        -1 if not users[r] & left else i if r in needs[i] else k
                        for r, k in enumerate(last)
                    )
                    kept = following.setdefault((done | 1 << i, latest), [])
                    for way in ways:
                        new = place(way, last, i, left)
                        if new is not None and max(new[-1], bound(new, left)) <= below:
                            _keep(kept, new)
            layer = {state: ways for state, ways in following.items() if ways}
            if width is not None:  # a quick first answer
                layer = {state: sorted(ways, key=sum)[:width] for state, ways in layer.items()}
        return min((way[-1] for ways in layer.values() for way in ways), default=None)

    def place(
        way: tuple[int, ...], last: tuple[int, ...], i: int, left: int
    ) -> tuple[int, ...] | None:
        start = way[i]
        for r in needs[i]:
            k = last[r]
            same = k < 0 or family[k] == family[i]
            start = max(start, way[n + r] + (0 if same else out[k] + into[i]))
        end = start + duration[i]
        if deadline[i] != NO_DEADLINE and end > deadline[i]:
            return None
        new = list(way)
        new[i] = 0
        for k, weight in after[i]:
            new[k] = max(new[k], start + weight)
        for r in needs[i]:
            new[n + r] = end if users[r] & left else 0
        new[-1] = max(new[-1], end)
        return tuple(new)

    def bound(way: tuple[int, ...], left: int) -> int:
        return max((way[k] + tail[k] for k in range(n) if left >> k & 1), default=0)

    quick = search(1, float("inf"))
    return search(None, float("inf") if quick is None else quick)


def _keep(ways: list[tuple[int, ...]], new: tuple[int, ...]) -> None:
    """Add a way unless a known one is nowhere later; drop those it beats."""
    if any(all(a <= b for a, b in zip(old, new, strict=True)) for old in ways):
        return
    ways[:] = [o for o in ways if not all(a <= b for a, b in zip(new, o, strict=True))]
    ways.append(new)
