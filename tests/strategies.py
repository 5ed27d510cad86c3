"""Hypothesis strategies for small graphs, correct schedules of them, and correct periodic plans.

Correct by construction: a tiny list scheduler in pure Python that shares nothing with the library.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np
from hypothesis import strategies as st

from optsched.model.schedule import NO_DEADLINE, Arcs, Csr, Objective, Resource, Schedule

KINDS = ("F", "B", "U", "")


@st.composite
def graphs(draw: st.DrawFn, max_operations: int = 7, max_resources: int = 3) -> Schedule:
    """Small instances with every feature of the format; a schedule of each exists.

    Lags (also negative), setups by family, releases, deadlines, held memory in acquire/free pairs,
    workspace, gangs, operations without resource, zero durations.
    """
    return draw(schedules(max_operations, max_resources)).graph()


@st.composite
def schedules(draw: st.DrawFn, max_operations: int = 7, max_resources: int = 3) -> Schedule:
    """Correct schedules of small graphs: random dispatch in topological order, semi-active."""
    raw = draw(_raw_graphs(max_operations, max_resources))
    n = len(raw.duration)
    release = draw(_integers(n, 0, 6)) if draw(st.booleans()) else [0] * n
    raw.setup_out, raw.setup_in = draw(_integers(n, 0, 4)), draw(_integers(n, 0, 2))
    order = _random_topological_order(draw, raw)
    start = _semi_active(raw, order, release)
    sequences = [[i for i in order if r in raw.resources[i]] for r in range(raw.n_resources)]
    memory = [
        draw(_limit(peak))
        for peak in _peaks(raw, [[(i, 0) for i in row] for row in sequences], [0] * raw.n_resources)
    ]
    end = [s + p for s, p in zip(start, raw.duration, strict=True)]
    slack = draw(st.lists(st.none() | st.integers(0, 3), min_size=n, max_size=n))
    deadline = [NO_DEADLINE if x is None else e + x for e, x in zip(end, slack, strict=True)]
    return replace(
        raw.graph(memory),
        release=np.array(release, np.int64),
        deadline=np.array(deadline, np.int64),
        sequences=Csr.of(sequences),
        start=np.array(start, np.int64),
        objective=Objective("makespan", max(end, default=0)),
    )


@st.composite
def periodic_schedules(
    draw: st.DrawFn, max_operations: int = 6, max_resources: int = 3
) -> Schedule:
    """Correct periodic plans: operations placed one by one on a circle (modulo scheduling).

    Setups depend on the family alone (so they obey the triangle inequality), distances are at
    most 2, operations of one resource start at different times of the cycle.
    """
    raw = draw(_raw_graphs(max_operations, max_resources))
    by_family = draw(_integers(3, 0, 3)), draw(_integers(3, 0, 2))
    raw.setup_out, raw.setup_in = ([side[f] for f in raw.family] for side in by_family)
    shortest = max([1, *raw.duration])
    period = draw(st.integers(shortest, shortest + 8))
    shift = draw(_integers(len(raw.duration), 0, 4))
    while (absolute := _on_circle(raw, period, shift)) is None:
        period += 3
    start, offset = [t % period for t in absolute], [t // period for t in absolute]
    sequences = [
        sorted((i for i in range(len(start)) if r in raw.resources[i]), key=lambda i: start[i])
        for r in range(raw.n_resources)
    ]
    _add_distant_arcs(draw, raw, absolute, period)
    memory = [draw(_limit(peak)) for peak in _steady_peaks(raw, sequences, offset)]
    return replace(
        raw.graph(memory, period),
        offset=np.array(offset, np.int64),
        sequences=Csr.of(sequences),
        start=np.array(start, np.int64),
        objective=Objective("period", period),
    )


@dataclass
class _Raw:
    """A graph under construction, in plain lists; operations are in a topological order."""

    n_resources: int
    duration: list[int]
    resources: list[list[int]]
    arcs: list[tuple[int, int, int, int]]
    family: list[int]
    acquire: list[int]
    free: list[int]
    workspace: list[int]
    kind: list[str]
    setup_out: list[int] = field(default_factory=list)
    setup_in: list[int] = field(default_factory=list)

    def setup(self, i: int, j: int) -> int:
        return 0 if self.family[i] == self.family[j] else self.setup_out[i] + self.setup_in[j]

    def graph(self, memory: list[int], period: int | None = None) -> Schedule:
        columns = {
            key: np.array(getattr(self, key), np.int64)
            for key in (
                "duration", "family", "acquire", "free", "workspace", "setup_out", "setup_in",
            )
        }  # fmt: skip
        return Schedule(
            resources=tuple(Resource(f"gpu{r}", m) for r, m in enumerate(memory)),
            op_resources=Csr.of(self.resources),
            arcs=Arcs.of(self.arcs),
            kind=np.array(self.kind, np.str_),
            job=columns["family"],
            stage=np.arange(len(self.duration)),
            period=period,
            **columns,
        )


def _integers(n: int, low: int, high: int) -> st.SearchStrategy[list[int]]:
    return st.lists(st.integers(low, high), min_size=n, max_size=n)


def _limit(peak: int) -> st.SearchStrategy[int]:
    """No limit, or room for what the sequences need and little more."""
    return st.sampled_from([0, max(peak, 1), max(peak, 1), peak + 2])


@st.composite
def _raw_graphs(draw: st.DrawFn, max_operations: int, max_resources: int) -> _Raw:
    n = draw(st.integers(1, max_operations))
    n_resources = draw(st.integers(1, max_resources))
    duration = draw(_integers(n, 0, 5))
    held = st.lists(st.integers(0, n_resources - 1), min_size=1, max_size=1)
    gang = st.lists(st.integers(0, n_resources - 1), max_size=n_resources, unique=True)
    resources = draw(st.lists(held | gang, min_size=n, max_size=n))
    arcs = []
    for i in range(n):
        for j in range(i + 1, n):
            if draw(st.integers(0, 3)) == 0:
                arcs.append((i, j, draw(st.integers(-duration[i], 3)), 0))
    acquire, free = [0] * n, [0] * n
    for i in range(n):
        partners = [j for j in range(i + 1, n) if resources[i] and resources[j] == resources[i]]
        if partners and draw(st.booleans()):
            j, size = draw(st.sampled_from(partners)), draw(st.integers(1, 9))
            acquire[i] += size
            free[j] += size
            arcs.append((i, j, 0, 0))
    workspace = [draw(st.integers(0, 3)) if row else 0 for row in resources]
    return _Raw(
        n_resources, duration, resources, arcs, draw(_integers(n, 0, 2)), acquire, free, workspace,
        draw(st.lists(st.sampled_from(KINDS), min_size=n, max_size=n)),
    )  # fmt: skip


def _random_topological_order(draw: st.DrawFn, raw: _Raw) -> list[int]:
    left = set(range(len(raw.duration)))
    order: list[int] = []
    while left:
        waiting = {head for tail, head, _, _ in raw.arcs if tail in left}
        order.append(draw(st.sampled_from(sorted(left - waiting))))
        left.discard(order[-1])
    return order


def _semi_active(raw: _Raw, order: list[int], release: list[int]) -> list[int]:
    """Earliest starts if every operation goes behind all that were dispatched before it."""
    start = [0] * len(order)
    last: dict[int, int] = {}
    for j in order:
        ready = [release[j]]
        ready += [start[i] + raw.duration[i] + lag for i, k, lag, _ in raw.arcs if k == j]
        for r in raw.resources[j]:
            if r in last:
                ready.append(start[last[r]] + raw.duration[last[r]] + raw.setup(last[r], j))
            last[r] = j
        start[j] = max(ready)
    return start


def _on_circle(raw: _Raw, period: int, shift: list[int]) -> list[int] | None:
    """Absolute starts of iteration 0 that collide with no other iteration, or None."""
    start: list[int] = []
    for j in range(len(raw.duration)):
        ready = [start[i] + raw.duration[i] + lag for i, k, lag, _ in raw.arcs if k == j]
        first = max([0, *ready]) + shift[j]
        free = (t for t in range(first, first + period) if _fits(raw, period, [*start, t]))
        if (begin := next(free, None)) is None:
            return None
        start.append(begin)
    return start


def _fits(raw: _Raw, period: int, start: list[int]) -> bool:
    for r in range(raw.n_resources):
        ring = [(start[i] % period, i) for i in range(len(start)) if r in raw.resources[i]]
        ring.sort()
        if len({t for t, _ in ring}) < len(ring):
            return False
        following = [*ring[1:], *((t + period, i) for t, i in ring[:1])]
        for (t, i), (u, j) in zip(ring, following, strict=True):
            if t + raw.duration[i] + raw.setup(i, j) > u:
                return False
    return True


def _add_distant_arcs(draw: st.DrawFn, raw: _Raw, absolute: list[int], period: int) -> None:
    """Arcs between iterations, as far apart as the starts need (and a little more)."""
    n = len(absolute)
    for _ in range(draw(st.integers(0, 3))):
        i, j = draw(st.integers(0, n - 1)), draw(st.integers(0, n - 1))
        lag = draw(st.integers(-raw.duration[i], 2))
        missing = absolute[i] + raw.duration[i] + lag - absolute[j]
        distance = max(1, -(-missing // period)) + draw(st.integers(0, 1))
        if distance <= 2:
            raw.arcs.append((i, j, lag, distance))


def _peaks(raw: _Raw, sequences: list[list[tuple[int, int]]], level: list[int]) -> list[int]:
    """Most bytes in use on every resource; sequence entries are (operation, anything)."""
    peaks = []
    for row, held in zip(sequences, level, strict=True):
        peak = 0
        for i, _ in row:
            held += raw.acquire[i]
            peak = max(peak, held + raw.workspace[i])
            held -= raw.free[i]
        peaks.append(peak)
    return peaks


def _steady_peaks(raw: _Raw, sequences: list[list[int]], offset: list[int]) -> list[int]:
    """Peaks while the plan runs from cold until every operation has run twice."""
    cycles = range(max(offset, default=0) + 2)
    long = [[(i, c) for c in cycles for i in row if c >= offset[i]] for row in sequences]
    return _peaks(raw, long, [0] * raw.n_resources)


@st.composite
def spoilt(draw: st.DrawFn, correct: st.SearchStrategy[Schedule]) -> Schedule:
    """Correct schedules with one to four changes, many of which break a rule.

    Held memory changes at most once, and family setups as a whole, so that spoilt periodic plans
    stay comparable with their unrolled form.
    """
    schedule = draw(correct)
    changes = draw(st.lists(st.sampled_from(_CHANGES), min_size=1, max_size=4, unique=True))
    for change in changes:
        schedule = change(draw, schedule)
    return schedule


def _with(schedule: Schedule, key: str, i: int, value: int) -> Schedule:
    column = np.array(getattr(schedule, key))
    column[i] = value
    return replace(schedule, **{key: column})


def _operation(draw: st.DrawFn, s: Schedule) -> int:
    return draw(st.integers(0, s.n_operations - 1))


def _move_start(draw: st.DrawFn, s: Schedule) -> Schedule:
    i = _operation(draw, s)
    last = int(s.start.max()) + 3 if s.period is None else s.period - 1
    near = max(0, min(last, int(s.start[i]) + draw(st.sampled_from([-2, -1, 1, 2]))))
    return _with(s, "start", i, draw(st.just(near) | st.integers(0, last)))


def _change_entries(draw: st.DrawFn, s: Schedule) -> Schedule:
    rows = s.sequences.to_lists()
    row = draw(st.sampled_from(rows))
    how = draw(st.sampled_from(["swap", "swap", "rotate", "drop", "double", "foreign"]))
    if how == "foreign" or not row:
        row.insert(draw(st.integers(0, len(row))), _operation(draw, s))
        return replace(s, sequences=Csr.of(rows))
    a, b = (draw(st.integers(0, len(row) - 1)) for _ in range(2))
    if how == "swap":
        row[a], row[b] = row[b], row[a]
    elif how == "rotate":
        row[:] = row[a:] + row[:a]
    elif how == "drop":
        del row[a]
    else:
        row.insert(b, row[a])
    return replace(s, sequences=Csr.of(rows))


def _lengthen(draw: st.DrawFn, s: Schedule) -> Schedule:
    i = _operation(draw, s)
    return _with(s, "duration", i, int(s.duration[i]) + draw(st.integers(1, 3)))


def _raise_lag(draw: st.DrawFn, s: Schedule) -> Schedule:
    if not len(s.arcs.lag):
        return s
    lag = s.arcs.lag.copy()
    lag[draw(st.integers(0, len(lag) - 1))] += draw(st.integers(1, 3))
    return replace(s, arcs=s.arcs._replace(lag=lag))


def _raise_setup(draw: st.DrawFn, s: Schedule) -> Schedule:
    of_family = s.family == draw(st.sampled_from(s.family.tolist()))
    return replace(s, setup_out=s.setup_out + of_family)


def _shrink_memory(draw: st.DrawFn, s: Schedule) -> Schedule:
    r = draw(st.integers(0, s.n_resources - 1))
    memory = [m for _, m in s.resources]
    memory[r] = max(1, memory[r] - draw(st.integers(1, 3))) if memory[r] else 4
    return replace(s, resources=tuple(Resource(f"gpu{q}", m) for q, m in enumerate(memory)))


def _change_bytes(draw: st.DrawFn, s: Schedule) -> Schedule:
    users = np.flatnonzero(np.diff(s.op_resources.indptr)).tolist()
    if not users:
        return s
    i, key = draw(st.sampled_from(users)), draw(st.sampled_from(["acquire", "free"]))
    old = int(getattr(s, key)[i])
    return _with(s, key, i, draw(st.sampled_from([old + 1, old // 2])))


def _change_repetition(draw: st.DrawFn, s: Schedule) -> Schedule:
    """Windows of a one-shot schedule; offsets, distances or the period of a periodic one."""
    i = _operation(draw, s)
    if s.period is None:
        key, limit = draw(
            st.sampled_from([("release", s.start[i] + 1), ("deadline", s.end[i] - 1)])
        )
        return _with(s, key, i, max(0, int(limit)))
    how = draw(st.sampled_from(["offset", "distance", "period"]))
    if how == "offset":
        return _with(s, "offset", i, max(0, int(s.offset[i]) + draw(st.sampled_from([-1, 1]))))
    if how == "period":
        return replace(s, period=max(int(s.start.max()) + 1, s.period - draw(st.integers(1, 3))))
    forward = s.arcs.tail < s.arcs.head  # dropping the others could close a cycle of arcs
    return replace(
        s, arcs=s.arcs._replace(distance=s.arcs.distance - (forward & (s.arcs.distance > 0)))
    )


_CHANGES = [
    _move_start, _change_entries, _lengthen, _raise_lag, _raise_setup, _shrink_memory,
    _change_bytes, _change_repetition,
]  # fmt: skip
