"""Simulated annealing over the orders in which jobs enter and leave a pipeline.

A point is two orders of units (pairs of job and micro-batch): one for forward blocks, one for
backward blocks, and two flags per device: whether it prefers backward blocks, and whether it waits
for a block of higher priority (active instead of non-delay). A point is decoded by a list schedule
in which units enter the pipeline in the first order and a forward block is placed only where its
memory fits, so memory caps need no repair. Its value is the makespan.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np
from numba import types

from optsched.kernels import longest_path
from optsched.kernels.compile import INT, INTS, entry, helper, record, records
from optsched.kernels.list_schedule import ARC, OPERATION, DispatchGraph
from optsched.model.graph import machine_orders
from optsched_solvers._random import accepted_rise, random_below, random_state
from optsched_solvers.shop.proof.symmetry import identical_jobs
from optsched_solvers.shop.rules import Dispatcher, is_pipeline

if TYPE_CHECKING:
    from optsched.model.schedule import Csr, IntArray, Schedule
    from optsched.solving.monitor import Monitor

DEVICE = record(
    "memory initial level first_ready n_ready free_at last best best_time"
    " drains_first waits kept_drains_first kept_waits"
)
BLOCK = record("unit phase available waiting")
# job: of which a unit enters (drains) at this place, in the point that is tried, and kept_job in
# the present one; unit: the unit at this place; rank: the place of the unit of this number
PLACE = record("job kept_job unit rank")
JOB = record("first_unit next_unit kind")
WALK = record("random value best")

FILLS, DRAINS, LATE = 0, 1, 2
"""Phases of a block: forward; backward; weight gradients and updates, which nothing waits for."""

STUCK: Final = -1
"""Value of a point whose list schedule cannot go on: no block fits into the memory left."""

NEVER: Final = int(np.iinfo(np.int64).max)

ROUND = 25_000
"""Moves between two starts; results of longer rounds are no better."""

ROUNDS = ((0.004, False), (0.01, True), (0.01, False), (0.004, True))
"""First temperature, as a share of the makespan, and direction of time of the rounds, in turn."""

COLDEST = 1e-4
"""Last temperature of a round, as a share of the makespan."""

SLICE = 100_000
"""Operations placed between two checks of the limits."""

MOST_MOVES = 200
"""Moves at one temperature."""

JOB_RULES = ("valley", "b_first", "job_lpt", "job_spt")
"""Rules whose orders of jobs are tried first."""


def improve(
    graph: Schedule,
    monitor: Monitor,
    *,
    seed: int,
    iterations: int | None = None,
    seconds: float = float("inf"),
    from_rules: bool = True,
) -> int:
    """Anneal in rounds until a limit; returns the number of list schedules made.

    Without effect unless the graph is a pipeline of F and B (or I) blocks. Equal seeds and numbers
    of iterations give equal schedules. `from_rules`: whether the first round starts from the best
    job rule; others start from random orders.
    """
    if not is_pipeline(graph):
        return 0
    search = _Rounds(graph, monitor, monitor.elapsed + seconds, iterations)
    random, k = np.random.default_rng(seed), 0
    while not search.is_over():
        hottest, mirrored = ROUNDS[k % len(ROUNDS)]
        walk = Annealing(graph, int(random.integers(2**62)), mirrored)
        if k == 0 and from_rules:
            search.begin_with_rules(walk, Dispatcher(graph, seed))
        else:
            search.begin(walk, random.permutation(walk.n_jobs))
        search.anneal(walk, hottest)
        k += 1
    return search.made


class _Rounds:
    """Limits of a search and the number of list schedules made so far."""

    def __init__(
        self, graph: Schedule, monitor: Monitor, until: float, iterations: int | None
    ) -> None:
        self.graph, self.monitor, self.made = graph, monitor, 0
        self.until, self.iterations = until, iterations
        self.slice = max(1, min(MOST_MOVES, SLICE // max(1, graph.n_operations)))

    def is_over(self) -> bool:
        spent = self.iterations is not None and self.made >= self.iterations
        return spent or self.monitor.elapsed >= self.until or self.monitor.should_stop()

    def begin_with_rules(self, walk: Annealing, dispatcher: Dispatcher) -> None:
        """Start from the best order of the job rules."""
        best = NEVER
        chosen = order = np.arange(walk.n_jobs)
        for rule in JOB_RULES:
            if self.is_over():
                return
            order = np.argsort(dispatcher.job_rank(rule), kind="stable")
            self.begin(walk, order)
            if walk.best < best:
                best, chosen = walk.best, order
        if chosen is not order:
            walk.begin(chosen)

    def begin(self, walk: Annealing, order: IntArray) -> None:
        """Start from jobs that enter and leave in this order."""
        walk.begin(order)
        self.count(walk, 1, NEVER)

    def anneal(self, walk: Annealing, hottest: float) -> None:
        """One round: the temperature falls geometrically with the moves, or with the time."""
        first, begun, most = self.made, self.monitor.elapsed, ROUND
        if self.iterations is not None:
            most = min(most, self.iterations - self.made)
        while self.made - first < most and not self.is_over():
            share = (self.made - first) / most
            if self.iterations is None:
                share = max(share, (self.monitor.elapsed - begun) / (self.until - begun))
            before = walk.best
            moves = min(self.slice, most - (self.made - first))
            walk.run(moves, hottest * (COLDEST / hottest) ** share * before)
            self.count(walk, moves, before)

    def count(self, walk: Annealing, moves: int, before: int) -> None:
        """Add to the moves made; report the walk's best schedule if it is a new incumbent."""
        self.made += moves
        self.monitor.advance(moves)
        known = self.monitor.objective
        if walk.best < before and (known is None or walk.best < known):
            sequences = walk.sequences()
            end = longest_path.evaluate(self.graph, sequences).makespan
            self.monitor.incumbent(sequences, end, "job orders")


class Annealing:
    """State of one walk on a pipeline of F and B (or I) blocks; `run` continues it.

    Equal seeds and numbers of moves at equal temperatures give equal walks. `mirrored`: search the
    time-mirrored problem, in which backward blocks fill the pipeline.
    """

    def __init__(self, graph: Schedule, seed: int, mirrored: bool = False) -> None:
        self.graph, self.mirrored = graph, mirrored
        self.state = _state_of(graph, mirrored)
        self.walk = self.state.walk
        self.walk["random"] = random_state(seed)
        self.n_jobs = len(self.state.job)

    def begin(self, jobs: IntArray) -> None:
        """Start from the jobs in one order, the micro-batches of a job one after the other."""
        state = self.state
        n_units = np.diff(state.job["first_unit"], append=len(state.entry))
        for sequence in (state.enters, state.drains):
            sequence["job"] = np.repeat(jobs, n_units[jobs])
        self.walk["value"] = self.walk["best"] = NEVER
        self.run(0, 1.0)

    @property
    def best(self) -> int:
        """Least makespan so far; a very large number if every list schedule got stuck."""
        return int(self.walk["best"][0])

    def run(self, moves: int, temperature: float) -> None:
        """Try moves; with 0 only decode the current point."""
        anneal(self.state, moves, temperature)

    def sequences(self) -> Csr:
        """Machine orders of the best point."""
        order = self.state.best_order
        return machine_orders(self.graph, order[::-1] if self.mirrored else order)


class State(NamedTuple):
    """A pipeline, the present point, the one that is tried, and its list schedule."""

    op: Any
    arc: Any
    device: Any
    block: Any
    job: Any
    enters: Any  # places of the order in which units enter
    drains: Any
    entry: IntArray  # by unit, units of a job in the order in which they enter: its first block
    ready: IntArray
    order: IntArray  # blocks in the order of their start
    best_order: IntArray
    walk: Any  # one


STATE: Final[Any] = types.NamedTuple(
    (
        records(OPERATION, readonly=True), records(ARC, readonly=True), records(DEVICE),
        records(BLOCK), records(JOB), records(PLACE), records(PLACE), INTS, INTS, INTS, INTS,
        records(WALK),
    ),
    State,
)  # fmt: skip


def _state_of(graph: Schedule, mirrored: bool) -> State:
    """Records of a pipeline, without a point yet."""
    arrays = DispatchGraph.of(graph)
    if mirrored:
        arrays = arrays.reversed()
    device = np.zeros(len(arrays.machine), DEVICE)
    for name, of in (("memory", "memory"), ("initial", "level"), ("first_ready", "first_ready")):
        device[name] = arrays.machine[of]
    device["drains_first"] = 1
    pairs = np.stack([graph.job, -graph.microbatch if mirrored else graph.microbatch])
    labels, unit = np.unique(pairs, axis=1, return_inverse=True)
    n, n_units = graph.n_operations, labels.shape[1]
    block, entry_of = np.zeros(n, BLOCK), np.zeros(n_units, np.int64)
    block["unit"] = unit.ravel()
    is_late, is_forward = np.isin(graph.kind, ("W", "U")), graph.kind == "F"
    fills = is_late | ~is_forward if mirrored else is_forward
    block["phase"] = np.where(fills, FILLS, np.where(is_late, LATE, DRAINS))
    for blocks in (np.arange(n), np.flatnonzero(fills & ~is_late)):
        first = blocks if mirrored else blocks[::-1]  # what is assigned last stays
        entry_of[block["unit"][first]] = first
    job = np.zeros(int(labels[0].max()) + 1, JOB)
    job["first_unit"] = np.searchsorted(labels[0], np.arange(len(job)))
    job["kind"] = np.arange(len(job))
    for group in identical_jobs(graph):  # to exchange them changes nothing
        job["kind"][graph.job[[blocks[0] for blocks in group]]] = graph.job[group[0][0]]
    enters, drains = np.zeros((2, n_units), PLACE)
    ready, order, best_order = np.empty((3, n), np.int64)
    return State(
        arrays.operation, arrays.arc, device, block, job, enters, drains, entry_of,
        ready, order, best_order, np.zeros(1, WALK),
    )  # fmt: skip


@helper(counted=False, inline=True)
def _key(s, device, i):  # type: ignore[no-untyped-def]
    """Priority of block i on its device: the least goes first."""
    u, n_units = s.block[i].unit, len(s.entry)
    if s.block[i].phase == FILLS:
        return s.enters[u].rank + n_units * device.drains_first
    if s.block[i].phase == DRAINS:
        return s.drains[u].rank
    return 2 * n_units + s.drains[u].rank


@helper(counted=False, inline=True)
def _fits(op, device, i):  # type: ignore[no-untyped-def]
    """Whether the memory left is enough, and what the block frees is held."""
    level = device.level
    return level + op[i].need <= device.memory and level + op[i].acquire >= op[i].free


@helper(counted=False, inline=True)
def _start(s, device, i):  # type: ignore[no-untyped-def]
    """Earliest start of block i at the end of its device's order."""
    op, at = s.op, device.free_at
    if device.last >= 0 and op[device.last].family != op[i].family:
        at += op[device.last].setup_out + op[i].setup_in
    return max(at, s.block[i].available)


@helper(counted=False, inline=True)
def _select(s, m):  # type: ignore[no-untyped-def]
    """The next block of device m: the first to start, by priority among several.

    A device that waits takes the first by priority of all that can start before another ends.
    """
    op, device, ready = s.op, s.device[m], s.ready
    device.best = -1
    device.best_time = NEVER
    best_key = 0
    latest = NEVER
    begin = device.first_ready
    if device.waits:
        for k in range(begin, begin + device.n_ready):
            i = ready[k]
            if _fits(op, device, i):
                latest = min(latest, _start(s, device, i) + op[i].duration)
    for k in range(begin, begin + device.n_ready):
        i = ready[k]
        if not _fits(op, device, i):
            continue
        at = _start(s, device, i)
        if device.waits:
            if at >= latest and device.best >= 0:
                continue
        elif at > device.best_time:
            continue
        key = _key(s, device, i)
        is_first = at < device.best_time and not device.waits
        if device.best < 0 or is_first or key < best_key:
            device.best = k
            device.best_time = at
            best_key = key


@helper(counted=False, inline=True)
def _rank(job, sequence):  # type: ignore[no-untyped-def]
    """Units and ranks of a sequence of jobs; micro-batches of a job keep their order."""
    for j in range(len(job)):
        job[j].next_unit = job[j].first_unit
    for p in range(len(sequence)):
        j = sequence[p].job
        u = job[j].next_unit
        job[j].next_unit = u + 1
        sequence[p].unit = u
        sequence[u].rank = p


@helper(counted=False, inline=True)
def _reset(s):  # type: ignore[no-untyped-def]
    """Begin a list schedule; returns the number of loose blocks, those without a device."""
    op, block, device = s.op, s.block, s.device
    for m in range(len(device)):
        device[m].level = device[m].initial
        device[m].n_ready = 0
        device[m].free_at = 0
        device[m].last = -1
    for i in range(len(op)):
        block[i].available = op[i].release
        block[i].waiting = op[i].n_before
    for u in range(len(s.entry)):
        if s.enters[u].rank > 0:  # a unit enters behind the one before it
            block[s.entry[u]].waiting += 1
    n_loose = 0
    for i in range(len(op)):
        if block[i].waiting == 0:
            n_loose = _make_ready(s, n_loose, i)
    for m in range(len(device)):
        _select(s, m)
    return n_loose


@helper(counted=False, inline=True)
def _make_ready(s, n_loose, i):  # type: ignore[no-untyped-def]
    """Add a block to the ready ones of its device, or to the loose ones; returns their number."""
    m = s.op[i].resource
    if m < 0:
        s.order[len(s.order) - 1 - n_loose] = i
        return n_loose + 1
    device = s.device[m]
    s.ready[device.first_ready + device.n_ready] = i
    device.n_ready += 1
    return n_loose


@helper(counted=False)
def _decode(s, limit):  # type: ignore[no-untyped-def]
    """Makespan of the list schedule of a point, STUCK, or a number above `limit`.

    Invariant: the ready blocks of a device are ``ready[first_ready : first_ready + n_ready]``, and
    ``best`` is the place among them of the one to be placed next, for every device whose level,
    end or ready blocks did not change since. Loose blocks lie at the end of `order`.
    """
    op, arc, block, ready, order = s.op, s.arc, s.block, s.ready, s.order
    _rank(s.job, s.enters)
    _rank(s.job, s.drains)
    n_loose = _reset(s)
    end = 0
    for count in range(len(op)):
        if n_loose > 0:
            i = order[len(op) - n_loose]
            n_loose -= 1
            at = block[i].available
            r = -1
        else:
            r = 0
            for m in range(1, len(s.device)):
                if s.device[m].best_time < s.device[r].best_time:
                    r = m
            device = s.device[r]
            if device.best < 0:
                return STUCK
            at = device.best_time
            i = ready[device.best]
            device.n_ready -= 1
            ready[device.best] = ready[device.first_ready + device.n_ready]
            device.free_at = at + op[i].duration
            device.last = i
            device.level += op[i].acquire - op[i].free
        order[count] = i
        end = max(end, at + op[i].duration)
        if end > limit:
            return end
        for e in range(op[i].first_arc, op[i].end_arc):
            j = arc[e].head
            block[j].available = max(block[j].available, at + arc[e].weight)
            n_loose = _offer(s, n_loose, r, j)
        u = block[i].unit
        if s.entry[u] == i and s.enters[u].rank + 1 < len(s.entry):
            following = s.enters[s.enters[u].rank + 1].unit
            n_loose = _offer(s, n_loose, r, s.entry[following])
        if r >= 0:
            _select(s, r)
    return end


@helper(counted=False, inline=True)
def _offer(s, n_loose, r, j):  # type: ignore[no-untyped-def]
    """Count one predecessor of block j as placed; the last one makes it ready."""
    s.block[j].waiting -= 1
    if s.block[j].waiting > 0:
        return n_loose
    n_loose = _make_ready(s, n_loose, j)
    m = s.op[j].resource
    if m >= 0 and m != r:
        _select(s, m)
    return n_loose


@helper(counted=False, inline=True)
def _move(s):  # type: ignore[no-untyped-def]
    """Change the point in one respect: one order, both, or the flag of a device."""
    w, job, n = s.walk[0], s.job, len(s.entry)
    choice = random_below(w, 100)
    if choice >= 97:
        device = s.device[random_below(w, len(s.device))]
        if choice == 99:
            device.waits = 1 - device.waits
        else:
            device.drains_first = 1 - device.drains_first
        return
    a = random_below(w, n)
    b = random_below(w, n)
    sequence = s.enters if choice < 35 or choice >= 55 else s.drains
    swap = random_below(w, 2) == 0
    if swap:
        for _ in range(20):
            if job[sequence[a].job].kind != job[sequence[b].job].kind:
                break
            b = random_below(w, n)
    if choice >= 55:  # the same change in both orders
        _rank(job, s.enters)
        _rank(job, s.drains)
        c = s.drains[s.enters[a].unit].rank
        d = s.drains[s.enters[b].unit].rank if swap else b
        _change(s.drains, c, d, swap)
    _change(sequence, a, b, swap)


@helper(counted=False, inline=True)
def _change(sequence, a, b, swap):  # type: ignore[no-untyped-def]
    """Exchange two places, or move the job at a to b."""
    x = sequence[a].job
    if swap:
        sequence[a].job = sequence[b].job
    step = 1 if a < b else -1
    while a != b and not swap:
        sequence[a].job = sequence[a + step].job
        a += step
    sequence[b].job = x


@helper(counted=False, inline=True)
def _keep(s):  # type: ignore[no-untyped-def]
    """Make the point that was tried the present one."""
    for p in range(len(s.entry)):
        s.enters[p].kept_job = s.enters[p].job
        s.drains[p].kept_job = s.drains[p].job
    for m in range(len(s.device)):
        s.device[m].kept_waits = s.device[m].waits
        s.device[m].kept_drains_first = s.device[m].drains_first


@helper(counted=False, inline=True)
def _take_back(s):  # type: ignore[no-untyped-def]
    """Return to the present point."""
    for p in range(len(s.entry)):
        s.enters[p].job = s.enters[p].kept_job
        s.drains[p].job = s.drains[p].kept_job
    for m in range(len(s.device)):
        s.device[m].waits = s.device[m].kept_waits
        s.device[m].drains_first = s.device[m].kept_drains_first


@entry(INT, STATE, INT, types.float64, counted=False)
def anneal(s, moves, temperature):  # type: ignore[no-untyped-def]
    """Metropolis moves at one temperature; returns the best makespan so far.

    By how much the makespan may rise is drawn first, so that a list schedule is left as soon as it
    exceeds that.
    """
    w = s.walk[0]
    if moves == 0:
        _keep(s)
    for _ in range(max(moves, 1)):
        if moves > 0:
            _move(s)
        limit = w.value
        if w.value < NEVER:
            limit += accepted_rise(w, temperature)
        value = _decode(s, limit)
        if value == STUCK or value > limit:
            _take_back(s)
            continue
        _keep(s)
        w.value = value
        if value < w.best:
            w.best = value
            for i in range(len(s.order)):
                s.best_order[i] = s.order[i]
    return w.best
