"""Simulated annealing over the orders in which jobs enter and leave a pipeline.

A point is two orders of units (pairs of job and micro-batch): one for forward blocks, one for
backward blocks, and two flags per device: whether it prefers backward blocks, and whether it waits
for a block of higher priority (active instead of non-delay). A point is decoded by a list schedule
in which units enter the pipeline in the first order and a forward block is placed only where its
memory fits, so memory caps need no repair. Its value is the makespan.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numba import types

from optsched.kernels import longest_path
from optsched.kernels.compile import INT, INTS, entry, helper, record, records
from optsched.kernels.list_schedule import ARC, OPERATION, DispatchGraph
from optsched.model.graph import machine_orders
from optsched_solvers.shop.rules import Dispatcher, is_pipeline

if TYPE_CHECKING:
    from optsched.model.schedule import Csr, IntArray, Schedule
    from optsched.solving.monitor import Monitor

DEVICE = record(
    "memory initial level first_ready n_ready free_at last best best_time drains_first waits"
)
BLOCK = record("unit phase n_before available waiting start")
UNIT = record("job enters drains new_enters new_drains enter_rank drain_rank entry")
JOB = record("first_unit n_seen kind")
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

    Parameters
    ----------
    graph
        Without effect unless it is a pipeline of F and B (or I) blocks.
    monitor
        Receives every improvement, and stops the search.
    seed
        Equal seeds and numbers of iterations give equal schedules.
    iterations, seconds
        Limits: list schedules in all, time.
    from_rules
        Whether the first round starts from the best job rule; others start from random orders.
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
            search.begin(walk, random.permutation(len(walk.job)))
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
        chosen = order = np.arange(len(walk.job))
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
    """State of one walk on a pipeline; `run` continues it.

    Parameters
    ----------
    graph
        A pipeline of F and B (or I) blocks (`optsched_solvers.shop.rules.is_pipeline`).
    seed
        Equal seeds and numbers of moves at equal temperatures give equal walks.
    mirrored
        Search the time-mirrored problem, in which backward blocks fill the pipeline.
    """

    def __init__(self, graph: Schedule, seed: int, mirrored: bool = False) -> None:
        arrays = DispatchGraph.of(graph)
        if mirrored:
            arrays = arrays.reversed()
        self.graph, self.mirrored = graph, mirrored
        self.operation, self.arc = arrays.operation, arrays.arc
        self.device = _devices(arrays.machine)
        self.block, self.unit, self.job = _units(graph, mirrored)
        self.block["n_before"] = self.operation["n_before"]
        self.walk = np.zeros(1, WALK)
        self.walk["random"] = np.random.default_rng(seed).integers(1, 2**62)
        self.ready, self.order, self.best_order = np.empty((3, graph.n_operations), np.int64)

    def begin(self, jobs: IntArray) -> None:
        """Start from the jobs in one order, the micro-batches of a job one after the other."""
        sequence = np.repeat(jobs, np.bincount(self.unit["job"])[jobs])
        for name in ("enters", "drains"):
            self.unit[name] = sequence
        self.walk["value"] = self.walk["best"] = NEVER
        self.run(0, 1.0)

    @property
    def best(self) -> int:
        """Least makespan so far; a very large number if every list schedule got stuck."""
        return int(self.walk["best"][0])

    def run(self, moves: int, temperature: float) -> None:
        """Try moves; with 0 only decode the current point."""
        anneal(
            self.operation, self.arc, self.device, self.block, self.unit, self.job, self.walk,
            self.ready, self.order, self.best_order, moves, temperature,
        )  # fmt: skip

    def sequences(self) -> Csr:
        """Machine orders of the best point."""
        order = self.best_order
        return machine_orders(self.graph, order[::-1] if self.mirrored else order)


def _devices(machine: Any) -> Any:
    device = np.zeros(len(machine), DEVICE)
    for name, of in (("memory", "memory"), ("initial", "level"), ("first_ready", "first_ready")):
        device[name] = machine[of]
    device["drains_first"] = 1
    return device


def _units(graph: Schedule, mirrored: bool) -> tuple[Any, Any, Any]:
    """Blocks with unit and phase, units in the order in which those of a job enter, jobs."""
    pairs = np.stack([graph.job, -graph.microbatch if mirrored else graph.microbatch])
    labels, of = np.unique(pairs, axis=1, return_inverse=True)
    block, unit = np.zeros(graph.n_operations, BLOCK), np.zeros(labels.shape[1], UNIT)
    block["unit"] = of.ravel()
    is_late, is_forward = np.isin(graph.kind, ("W", "U")), graph.kind == "F"
    fills = is_late | ~is_forward if mirrored else is_forward
    block["phase"] = np.where(fills, FILLS, np.where(is_late, LATE, DRAINS))
    unit["job"] = labels[0]
    for blocks in (np.arange(graph.n_operations), np.flatnonzero(fills & ~is_late)):
        first = blocks if mirrored else blocks[::-1]  # what is assigned last stays
        unit["entry"][block["unit"][first]] = first
    job = np.zeros(int(labels[0].max()) + 1, JOB)
    job["first_unit"] = np.searchsorted(labels[0], np.arange(len(job)))
    job["kind"] = _kinds(graph)
    return block, unit, job


def _kinds(graph: Schedule) -> IntArray:
    """Equal numbers for jobs whose blocks are equal: exchanging them changes nothing."""
    columns = np.stack([
        np.unique(graph.kind, return_inverse=True)[1].ravel(), graph.duration,
        graph.single_resource, graph.setup_in, graph.setup_out, graph.acquire,
        graph.free, graph.workspace, graph.release,
    ])  # fmt: skip
    found: dict[bytes, int] = {}
    n_jobs = int(graph.job.max()) + 1
    return np.array([
        found.setdefault(columns[:, graph.job == j].tobytes(), len(found)) for j in range(n_jobs)
    ])  # fmt: skip


@helper(counted=False, inline=True)
def _random_below(w, n):  # type: ignore[no-untyped-def]
    """Pseudo-random number in 0..n-1 (xorshift)."""
    x = w.random
    x ^= x << 13
    x ^= (x >> 7) & 0x01FFFFFFFFFFFFFF  # a logical shift
    x ^= x << 17
    w.random = x
    return ((x >> 16) & 0xFFFFFFFFFFFF) % n


@helper(counted=False, inline=True)
def _key(device, block, unit, n_units, i):  # type: ignore[no-untyped-def]
    """Priority of block i on its device: the least goes first."""
    u = unit[block[i].unit]
    if block[i].phase == FILLS:
        return u.enter_rank + n_units * device.drains_first
    if block[i].phase == DRAINS:
        return u.drain_rank
    return 2 * n_units + u.drain_rank


@helper(counted=False, inline=True)
def _fits(op, device, i):  # type: ignore[no-untyped-def]
    """Whether the memory left is enough, and what the block frees is held."""
    level = device.level
    return level + op[i].need <= device.memory and level + op[i].acquire >= op[i].free


@helper(counted=False, inline=True)
def _start(op, device, block, i):  # type: ignore[no-untyped-def]
    """Earliest start of block i at the end of its device's order."""
    at = device.free_at
    if device.last >= 0 and op[device.last].family != op[i].family:
        at += op[device.last].setup_out + op[i].setup_in
    return max(at, block[i].available)


@helper(counted=False, inline=True)
def _select(op, device, block, unit, ready):  # type: ignore[no-untyped-def]
    """The next block of a device: the first to start, by priority among several.

    A device that waits takes the first by priority of all that can start before another ends.
    """
    device.best = -1
    device.best_time = NEVER
    best_key = 0
    latest = NEVER
    begin = device.first_ready
    if device.waits:
        for k in range(begin, begin + device.n_ready):
            i = ready[k]
            if _fits(op, device, i):
                latest = min(latest, _start(op, device, block, i) + op[i].duration)
    for k in range(begin, begin + device.n_ready):
        i = ready[k]
        if not _fits(op, device, i):
            continue
        at = _start(op, device, block, i)
        if device.waits:
            if at >= latest and device.best >= 0:
                continue
        elif at > device.best_time:
            continue
        key = _key(device, block, unit, len(unit), i)
        is_first = at < device.best_time and not device.waits
        if device.best < 0 or is_first or key < best_key:
            device.best = k
            device.best_time = at
            best_key = key


@helper(counted=False, inline=True)
def _rank(unit, job):  # type: ignore[no-untyped-def]
    """Ranks of units from the sequences of jobs; micro-batches of a job keep their order."""
    for j in range(len(job)):
        job[j].n_seen = 0
    for p in range(len(unit)):
        j = unit[p].new_enters
        unit[job[j].first_unit + job[j].n_seen].enter_rank = p
        job[j].n_seen += 1
    for j in range(len(job)):
        job[j].n_seen = 0
    for p in range(len(unit)):
        j = unit[p].new_drains
        unit[job[j].first_unit + job[j].n_seen].drain_rank = p
        job[j].n_seen += 1


@helper(counted=False)
def _decode(op, arc, device, block, unit, job, ready, order, limit):  # type: ignore[no-untyped-def]
    """Makespan of the list schedule of a point, STUCK, or a number above `limit`.

    Invariant: the ready blocks of a device are ``ready[first_ready : first_ready + n_ready]``, and
    ``best`` is the place among them of the one to be placed next, for every device whose level,
    end or ready blocks did not change since.
    """
    _rank(unit, job)
    n_units = len(unit)
    for m in range(len(device)):
        device[m].level = device[m].initial
        device[m].n_ready = 0
        device[m].free_at = 0
        device[m].last = -1
        device[m].best = -1
        device[m].best_time = NEVER
    for i in range(len(op)):
        block[i].available = op[i].release
        block[i].waiting = block[i].n_before
    for u in range(n_units):
        if unit[u].enter_rank > 0:  # a unit enters behind the one before it
            block[unit[u].entry].waiting += 1
    n_loose = 0
    for i in range(len(op)):
        if block[i].waiting == 0:
            r = op[i].resource
            if r < 0:
                order[len(op) - 1 - n_loose] = i
                n_loose += 1
            else:
                ready[device[r].first_ready + device[r].n_ready] = i
                device[r].n_ready += 1
    for m in range(len(device)):
        _select(op, device[m], block, unit, ready)
    end = 0
    for count in range(len(op)):
        if n_loose > 0:
            i = order[len(op) - n_loose]
            n_loose -= 1
            at = block[i].available
            r = -1
        else:
            r = 0
            for m in range(1, len(device)):
                if device[m].best_time < device[r].best_time:
                    r = m
            if device[r].best < 0:
                return STUCK
            place = device[r].best
            at = device[r].best_time
            i = ready[place]
            device[r].n_ready -= 1
            ready[place] = ready[device[r].first_ready + device[r].n_ready]
            device[r].free_at = at + op[i].duration
            device[r].last = i
            device[r].level += op[i].acquire - op[i].free
        block[i].start = at
        order[count] = i
        end = max(end, at + op[i].duration)
        if end > limit:
            return end
        for e in range(op[i].first_arc, op[i].end_arc):
            j = arc[e].head
            block[j].available = max(block[j].available, at + arc[e].weight)
            n_loose = _offer(op, device, block, unit, ready, order, n_loose, r, j)
        u = block[i].unit
        if unit[u].entry == i and unit[u].enter_rank + 1 < n_units:
            x = unit[unit[u].enter_rank + 1].new_enters  # the next unit of the sequence
            j = unit[_unit_at(unit, job, x, unit[u].enter_rank + 1)].entry
            n_loose = _offer(op, device, block, unit, ready, order, n_loose, r, j)
        if r >= 0:
            _select(op, device[r], block, unit, ready)
    return end


@helper(counted=False, inline=True)
def _unit_at(unit, job, j, rank):  # type: ignore[no-untyped-def]
    """The unit of job j that enters at a rank."""
    u = job[j].first_unit
    while unit[u].enter_rank != rank:
        u += 1
    return u


@helper(counted=False, inline=True)
def _offer(op, device, block, unit, ready, order, n_loose, r, j):  # type: ignore[no-untyped-def]
    """Count one predecessor of block j as placed; the last one makes it ready."""
    block[j].waiting -= 1
    if block[j].waiting > 0:
        return n_loose
    m = op[j].resource
    if m < 0:
        order[len(op) - 1 - n_loose] = j
        return n_loose + 1
    ready[device[m].first_ready + device[m].n_ready] = j
    device[m].n_ready += 1
    if m != r:
        _select(op, device[m], block, unit, ready)
    return n_loose


@helper(counted=False, inline=True)
def _move(w, device, unit, job):  # type: ignore[no-untyped-def]
    """Change the point in one respect: one order, both, or the flag of a device."""
    n = len(unit)
    choice = _random_below(w, 100)
    if choice >= 97:
        m = _random_below(w, len(device))
        if choice == 99:
            device[m].waits = 1 - device[m].waits
            return len(device) + m
        device[m].drains_first = 1 - device[m].drains_first
        return m
    a = _random_below(w, n)
    b = _random_below(w, n)
    enters = choice < 35 or choice >= 55
    swap = _random_below(w, 2) == 0
    if swap:
        for _ in range(20):
            x = unit[a].new_enters if enters else unit[a].new_drains
            y = unit[b].new_enters if enters else unit[b].new_drains
            if job[x].kind != job[y].kind:
                break
            b = _random_below(w, n)
    if enters and choice >= 55:  # the same change in both orders
        c = _place_in_drains(unit, a)
        d = _place_in_drains(unit, b) if swap else b
        _change_drains(unit, c, d, swap)
    if enters:
        _change_enters(unit, a, b, swap)
    else:
        _change_drains(unit, a, b, swap)
    return -1


@helper(counted=False, inline=True)
def _place_in_drains(unit, a):  # type: ignore[no-untyped-def]
    """Where the unit that enters at a drains."""
    x = unit[a].new_enters
    n_before = 0
    for p in range(a):
        n_before += unit[p].new_enters == x
    p = 0
    while True:
        if unit[p].new_drains == x:
            if n_before == 0:
                return p
            n_before -= 1
        p += 1


@helper(counted=False, inline=True)
def _change_enters(unit, a, b, swap):  # type: ignore[no-untyped-def]
    """Exchange two places, or move the job at a to b."""
    x = unit[a].new_enters
    if swap:
        unit[a].new_enters = unit[b].new_enters
    step = 1 if a < b else -1
    while a != b and not swap:
        unit[a].new_enters = unit[a + step].new_enters
        a += step
    unit[b].new_enters = x


@helper(counted=False, inline=True)
def _change_drains(unit, a, b, swap):  # type: ignore[no-untyped-def]
    """As `_change_enters`."""
    x = unit[a].new_drains
    if swap:
        unit[a].new_drains = unit[b].new_drains
    step = 1 if a < b else -1
    while a != b and not swap:
        unit[a].new_drains = unit[a + step].new_drains
        a += step
    unit[b].new_drains = x


@entry(
    INT, records(OPERATION, readonly=True), records(ARC, readonly=True), records(DEVICE),
    records(BLOCK), records(UNIT), records(JOB), records(WALK), INTS, INTS, INTS, INT,
    types.float64, counted=False,
)  # fmt: skip
def anneal(op, arc, device, block, unit, job, walk, ready, order, best_order, moves, temperature):  # type: ignore[no-untyped-def]
    """Metropolis moves at one temperature; returns the best makespan so far.

    A move is accepted if it raises the makespan by at most ``-temperature ln(u)``, u uniform: that
    threshold is drawn first, so that a list schedule is left as soon as it exceeds it.
    """
    w = walk[0]
    n = len(unit)
    for _ in range(max(moves, 1)):
        for p in range(n):
            unit[p].new_enters = unit[p].enters
            unit[p].new_drains = unit[p].drains
        flipped = -1
        if moves > 0:
            flipped = _move(w, device, unit, job)
        limit = w.value
        if w.value < NEVER:
            u = (_random_below(w, 1 << 30) + 1) / (1 << 30)
            limit += int(-temperature * math.log(u))
        value = _decode(op, arc, device, block, unit, job, ready, order, limit)
        if value == STUCK or value > limit:
            if flipped >= len(device):
                device[flipped - len(device)].waits = 1 - device[flipped - len(device)].waits
            elif flipped >= 0:
                device[flipped].drains_first = 1 - device[flipped].drains_first
            continue
        w.value = value
        for p in range(n):
            unit[p].enters = unit[p].new_enters
            unit[p].drains = unit[p].new_drains
        if value < w.best:
            w.best = value
            for i in range(len(order)):
                best_order[i] = order[i]
    return w.best
