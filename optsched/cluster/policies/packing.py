"""The compiled decider of `Lucid` with the timing of its simulator.

A job's work is counted in millionths of a second alone; on shared GPUs it does as many a second as
the table says. Lucid's simulator looks at every second: only ends, arrivals, and the second after a
job started on GPUs of its own (a partner for jobs that were passed over) can change anything.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np
from numba import types

from optsched.cluster.policies.rigid import NEVER, rigid
from optsched.cluster.world.advance import set_rate, start, step
from optsched.cluster.world.build import frozen, world
from optsched.cluster.world.compiled import run
from optsched.cluster.world.layout import ARRIVED, ASK, COMPLETED, INTS2, LUCID_NODE, RUNS, WORLD
from optsched.cluster.world.packing_table import packable, type_of
from optsched.cluster.world.stays import start_beside
from optsched.kernels.compile import INT, INTS, entry, helper, record, records

if TYPE_CHECKING:
    import numpy.typing as npt

    from optsched.cluster.workload.nodes import Nodes
    from optsched.cluster.workload.workload import Workload
    from optsched.cluster.world.log import Log
    from optsched.cluster.world.packing_table import PackingTable
    from optsched.cluster.world.settings import Settings
    from optsched.model.schedule import IntArray

MILLION: Final = 10**6
NO_PAIR: Final = -1
_LONGEST: Final = 2**36
"""Millionths of it, and its product with many GPUs, fit 64 bits."""

JOB: Final = record("gang kind cost chance number partner")
"""`kind`: its type; `chance`: its row in `Packing.failed`; `number`: how many started before it."""

# `Packing.n`
_PENDING: Final = 0
_FROM: Final = 1
"""Pending jobs before this one cannot start: nothing has changed for them."""
_AGAIN: Final = 2
"""Look at the pending jobs again at this time."""
_STARTED: Final = 3


class Packing(NamedTuple):
    """What the decider knows beside the world."""

    job: npt.NDArray[np.void]
    """`JOB`."""
    pending: IntArray
    """Pending jobs by cost, then number."""
    by_number: IntArray
    """Jobs in the order of their starts."""
    hosts: IntArray
    """By gang up to a node: numbers of the running jobs alone on their GPUs, ascending."""
    alone: IntArray
    """How many these are."""
    size: IntArray
    """By chance: the gang, 0 above a node."""
    failed: IntArray
    """By chance (gang and kind, or a gang above a node): `version` when a job could not start."""
    version: IntArray
    """By gang: counts what may give one a chance."""
    pairs: IntArray
    """Row by row kind that joins, kind there: both speeds, in millionths; `NO_PAIR`."""
    kinds: IntArray
    """Their number, shape (1,)."""
    n: IntArray


PACKING: Final[Any] = types.NamedTuple(
    [records(JOB), INTS, INTS, INTS2, INTS, INTS, INTS, INTS, INTS2, INTS, INTS], Packing
)


def simulate_packing(
    workload: Workload, nodes: Nodes, settings: Settings, table: PackingTable | None,
    memory_limit: float, gang: int | None, name: str,
) -> Log | None:  # fmt: skip
    """The log of `Lucid` with ``timing="lucid"``; None if not compiled."""
    r = rigid(workload, nodes, settings, gang)
    if r is None:
        return None
    size, n = r.job["gang"], len(workload)
    duration = -(-workload.work // r.job["rate"])
    if max(duration.max(), r.job["estimate"].max()) > _LONGEST:
        return None
    kind, pairs = _speeds(workload, table, memory_limit)
    kinds = int(kind.max()) + 1
    keys = np.where(size <= LUCID_NODE, size * kinds + kind, -size)
    chances, chance = np.unique(keys, return_inverse=True)
    job = np.zeros(n, JOB)
    job["gang"], job["kind"], job["cost"] = size, kind, r.job["estimate"] * size
    job["chance"], job["partner"] = chance, -1
    p = Packing(
        job, np.zeros(n, np.int64), np.zeros(n, np.int64),
        np.zeros((LUCID_NODE + 1, min(n, 2 * nodes.total) + 1), np.int64),
        np.zeros(LUCID_NODE + 1, np.int64), np.maximum(chances, 0) // kinds,
        np.full(len(chances), -1), np.zeros(LUCID_NODE + 1, np.int64), pairs,
        np.array([kinds]), np.array([0, 0, NEVER, 0]),
    )  # fmt: skip
    w = world(workload, nodes, settings)
    w.state["late"] = 1
    given = w.given.copy()
    given["work_total"] = given["pass_work"] = duration * MILLION
    w = w._replace(given=frozen(given), rate=frozen(np.full_like(w.rate, MILLION)))
    log = run(lambda w: pack(w, p), w, workload, name)
    return log._replace(work=workload.work[log.job])


def _speeds(
    workload: Workload, table: PackingTable | None, memory_limit: float
) -> tuple[IntArray, IntArray]:
    """Kind of every job, and speeds of all pairs of kinds (see `Packing.pairs`)."""
    if table is None:
        return np.zeros(len(workload), np.int64), np.full((1, 2), NO_PAIR)
    names = [type_of(workload, j) for j in range(len(workload))]
    known = {name: i for i, name in enumerate(dict.fromkeys(names))}
    speeds = np.full((len(known), len(known), 2), NO_PAIR)
    for own, i in known.items():
        for host, k in known.items():
            pair = table.pair(own, host)
            if pair is not None and packable(table, memory_limit, own, host):
                speeds[i, k] = np.maximum(np.rint(np.array(pair) * MILLION), 1)
    return np.array([known[name] for name in names]), speeds.reshape(-1, 2)


@helper(INT, PACKING, INT, INT, counted=False)
def _host_at(p, gang, number):  # type: ignore[no-untyped-def]
    """Where a number stands, or is to be put, among the hosts of a gang."""
    low, high = 0, p.alone[gang]
    while low < high:
        middle = (low + high) >> 1
        if p.hosts[gang, middle] < number:
            low = middle + 1
        else:
            high = middle
    return low


@helper(INT, PACKING, INT, counted=False)
def _be_host(p, job):  # type: ignore[no-untyped-def]
    """A running job is alone on its GPUs."""
    gang, number = p.job[job].gang, p.job[job].number
    if gang > LUCID_NODE:
        return 0
    p.version[gang] += 1
    at = p.alone[gang]
    p.alone[gang] += 1
    while at > 0 and p.hosts[gang, at - 1] > number:
        p.hosts[gang, at] = p.hosts[gang, at - 1]
        at -= 1
    p.hosts[gang, at] = number
    return 1


@helper(INT, PACKING, INT, counted=False)
def _be_none(p, job):  # type: ignore[no-untyped-def]
    """It is so no longer."""
    gang = p.job[job].gang
    if gang > LUCID_NODE:
        return 0
    at = _host_at(p, gang, p.job[job].number)
    p.alone[gang] -= 1
    for i in range(at, p.alone[gang]):
        p.hosts[gang, i] = p.hosts[gang, i + 1]
    return 1


@helper(INT, WORLD, PACKING, INT, counted=False)
def _ended(w, p, job):  # type: ignore[no-untyped-def]
    """A job has ended: its partner has the GPUs, or they are free."""
    partner = p.job[job].partner
    if partner < 0:
        _be_none(p, job)
        for gang in range(LUCID_NODE + 1):
            p.version[gang] += 1
        return 0
    p.job[job].partner = p.job[partner].partner = -1
    if w.job[partner].phase == RUNS:
        if p.job[partner].number > p.job[job].number:  # it got this second at full speed already
            w.job[partner].done += MILLION - w.job[partner].rate
        set_rate(w, partner, MILLION)
        _be_host(p, partner)
    else:
        for gang in range(LUCID_NODE + 1):
            p.version[gang] += 1
    return 1


@helper(INT, PACKING, INT, counted=False)
def _arrive(p, job):  # type: ignore[no-untyped-def]
    """Put a job behind all pending ones of no greater cost."""
    low, high = 0, p.n[_PENDING]
    while low < high:
        middle = (low + high) >> 1
        if p.job[p.pending[middle]].cost <= p.job[job].cost:
            low = middle + 1
        else:
            high = middle
    for i in range(p.n[_PENDING], low, -1):
        p.pending[i] = p.pending[i - 1]
    p.pending[low] = job
    p.n[_PENDING] += 1
    p.n[_FROM] = min(p.n[_FROM], low)
    p.failed[p.job[job].chance] = -1  # it may start where costlier ones could not
    return low


@helper(INT, PACKING, INT, INT, counted=False)
def _pair(p, job, host):  # type: ignore[no-untyped-def]
    """Row of their speeds."""
    return p.job[job].kind * p.kinds[0] + p.job[host].kind


@helper(INT, PACKING, INT, counted=False)
def _find_host(p, job):  # type: ignore[no-untyped-def]
    """The first job that a pending one may join; -1 if there is none."""
    gang = p.job[job].gang
    if gang > LUCID_NODE:
        return -1
    for i in range(p.alone[gang]):
        host = p.by_number[p.hosts[gang, i]]
        pair = _pair(p, job, host)
        if p.pairs[pair, 0] != NO_PAIR and p.job[job].cost <= 2 * p.job[host].cost:
            return host
    return -1


@helper(INT, WORLD, PACKING, INT, counted=False)
def _try_start(w, p, job):  # type: ignore[no-untyped-def]
    """Start a job beside another (2) or on GPUs of its own (1), if it can."""
    host = _find_host(p, job)
    if host < 0 and start(w, job, p.job[job].gang) == 0:
        return 0
    p.job[job].number = p.n[_STARTED]
    p.by_number[p.n[_STARTED]] = job
    p.n[_STARTED] += 1
    if host < 0:
        _be_host(p, job)
        return 1
    start_beside(w, job, host)
    _be_none(p, host)
    p.job[job].partner, p.job[host].partner = host, job
    pair = _pair(p, job, host)
    set_rate(w, job, p.pairs[pair, 0])
    set_rate(w, host, p.pairs[pair, 1])
    return 2


@helper(INT, WORLD, PACKING, counted=False)
def _decide(w, p):  # type: ignore[no-untyped-def]
    """Try all pending jobs in order, those without a new chance excepted."""
    kept = p.n[_FROM]
    p.n[_AGAIN] = NEVER
    for i in range(kept, p.n[_PENDING]):
        job = p.pending[i]
        chance = p.job[job].chance
        started = 0
        if p.failed[chance] != p.version[p.size[chance]]:
            started = _try_start(w, p, job)
            if started == 0:
                p.failed[chance] = p.version[p.size[chance]]
            elif started == 1:
                p.n[_AGAIN] = w.state[0].time + 1
        if started == 0:
            p.pending[kept] = job
            kept += 1
    p.n[_PENDING] = p.n[_FROM] = kept
    if kept == 0:
        p.n[_AGAIN] = NEVER
    return kept


@entry(INT, WORLD, PACKING, counted=False)
def pack(w, p):  # type: ignore[no-untyped-def]
    """By cost, beside a running job or on free GPUs; nobody blocks the next."""
    s = w.state[0]
    while True:
        status = step(w)
        if status != ASK:
            return status
        if s.time == p.n[_AGAIN]:
            p.n[_FROM] = 0
        for i in range(s.events):
            job = w.event[i, 1]
            if w.event[i, 0] == ARRIVED:
                _arrive(p, job)
            elif w.event[i, 0] == COMPLETED:
                _ended(w, p, job)
                p.n[_FROM] = 0
        if s.running_now == 0:  # an instant that left no active job was not told
            for gang in range(LUCID_NODE + 1):
                p.alone[gang] = 0
                p.version[gang] += 1
        if p.n[_FROM] < p.n[_PENDING]:
            _decide(w, p)
        s.wake = p.n[_AGAIN] if p.n[_AGAIN] < NEVER else -1
