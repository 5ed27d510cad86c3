"""A plain tick simulator: every unit of time, every job, in Python; the engine must agree with it.

It shares nothing with the kernels but the view and the decision that a policy reads and writes.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np

from optsched.cluster import ClusterView, Nodes, Settings, Workload


def simulate_by_ticks(
    work: Workload, policy: Any, nodes: Nodes, settings: Settings, most: int = 5000
) -> SimpleNamespace:
    """Ends, preemptions and stays (job, start, end, restart, gpus, half, work, nodes)."""
    jobs = [_job(work, settings, j) for j in range(len(work))]
    place = [SimpleNamespace(free=g, units=nodes.zero_slots, up=True) for g in nodes.gpus]
    for change in sorted(settings.changes, key=lambda c: c.time)[::-1]:
        place[change.node].up = change.kind != "add"
    stays: list[list[Any]] = []
    wake = None
    for t in range(most):
        happened = wake == t
        wake = None if wake is not None and wake <= t else wake
        for x in jobs:  # a tick of progress
            if x.on and t > x.ready:
                x.done += x.rate
        for x in [x for x in jobs if x.on]:
            if x.done >= x.work:
                x.done, x.end, happened = x.work, t, True
                _stop(x, place, t, stays)
            elif x.done // x.pass_work > x.passes:
                x.passes, x.passed, x.kept, happened = x.done // x.pass_work, t, x.done, True
        for change in settings.changes:
            if change.time == t:
                happened, node = True, place[change.node]
                node.up = change.kind == "add"
                for x in [x for x in jobs if x.on and change.node in x.on]:
                    if change.kind == "remove":
                        x.done = x.kept
                        _stop(x, place, t, stays)
                        x.preempted += 1
        happened |= any(x.submit == t for x in jobs)
        active = _active(work, jobs, t)
        if all(x.end >= 0 for x in jobs):
            break
        if active and (happened or (settings.round and t % settings.round == 0)):
            decision = policy.decide(_view(work, settings, jobs, active, place, t, policy))
            _apply(work, settings, active, place, decision, t, stays)
            wake = decision.wake_at
            _contend(work, getattr(policy, "table", None), jobs)
    return SimpleNamespace(
        finished=[x.end for x in jobs],
        preemptions=[x.preempted for x in jobs],
        stays=sorted(stays, key=lambda row: (row[1], row[0])),
    )


def _job(work: Workload, settings: Settings, j: int) -> SimpleNamespace:
    cost = int(work.restart_cost[j])
    sizes = work.sizes_of(j).tolist()
    return SimpleNamespace(
        j=j, submit=int(work.submit[j]), work=int(work.work[j]), pass_work=int(work.pass_work[j]),
        rates=dict(zip(sizes, work.rates_of(j).tolist(), strict=True)), on={}, gpus=0, done=0,
        rate=0, ready=0, kept=0, passes=0, passed=-1, end=-1, preempted=0, starts=0, first=-1,
        entered=-1, attained=0, since=0, base=0, cost=0, partner=None, half=0, row=None,
        own_cost=settings.restart_cost if cost < 0 else cost,
    )  # fmt: skip


def _active(work: Workload, jobs: list[Any], t: int) -> list[Any]:
    seen: dict[int, int] = {}
    found = []
    for x in jobs:
        group = int(work.group[x.j])
        most = work.groups[group].max_concurrent
        if x.submit > t or x.end >= 0:
            continue
        seen[group] = seen.get(group, 0) + 1
        if most is None or seen[group] <= most:
            if x.entered < 0:
                x.entered = t
            found.append(x)
    return found


def _stop(x: Any, place: list[Any], t: int, stays: list[Any]) -> None:
    """Off its GPUs; those that a partner still uses stay taken."""
    stays.append(
        [x.j, x.since, t, min(x.cost, t - x.since), x.gpus, x.row[0], x.done - x.base,
         {} if x.gpus == 0 else dict(sorted(x.on.items()))]
    )  # fmt: skip
    for n, count in x.on.items():
        place[n].units += x.gpus == 0
        place[n].free += 0 if x.partner else count
    x.attained += x.gpus * (t - x.since)
    if x.partner:
        x.partner.partner = x.partner = None
    x.on, x.gpus, x.entered = {}, 0, t


def _start(x: Any, on: dict[int, int], gpus: int, half: list[int], t: int) -> None:
    x.on, x.gpus, x.rate, x.since, x.entered = on, gpus, x.rates[gpus], t, t
    x.cost = x.own_cost if x.starts else 0
    x.first = t if x.starts == 0 else x.first
    x.starts, x.ready, x.base, x.kept, x.row = x.starts + 1, t + x.cost, x.done, x.done, half
    x.joined = half != [0]


def _best_fit(place: list[Any], need: int) -> dict[int, int] | None:
    free = {n: p.free for n, p in enumerate(place) if p.up}
    if need > sum(free.values()):
        return None
    on = {}
    while need:
        fits = [(f, n) for n, f in free.items() if f >= need]
        f, n = min(fits) if fits else max((f, -n) for n, f in free.items())
        n = n if fits else -n
        on[n] = min(f, need)
        free[n] -= on[n]
        need -= on[n]
    return on


def _apply(
    work: Workload, settings: Settings, active: list[Any], place: list[Any], decision: Any,
    t: int, stays: list[Any],
) -> None:  # fmt: skip
    """What changes leaves first; then it is placed, in order; what finds no place is pending."""
    coming = []
    partners = [x.partner for x in active]
    for i, x in enumerate(active):
        q = int(decision.quota[i])
        named, other = decision.nodes.get(i), decision.share.get(i)
        same = bool(x.on) and q != 0 and x.gpus == max(q, 0)
        same = same and (named is None or named == x.on)
        same = same and (other is None or partners[i] is active[other])
        if same or (q == 0 and not x.on):
            continue
        resized = bool(x.on)
        if x.on:
            if settings.checkpoint == "pass":
                x.done = x.kept
            _stop(x, place, t, stays)
        x.preempted += resized and q == 0
        if q != 0:
            coming.append((i, x, q, resized))
    order = list(range(len(active))) if decision.order is None else list(decision.order)
    for i, x, q, resized in sorted(coming, key=lambda c: order.index(c[0])):
        named, other, on, half = decision.nodes.get(i), decision.share.get(i), None, [0]
        if other is not None:
            y = active[other]
            if y.on and y is not x and y.partner is None and y.gpus == q:
                on, y.row[0] = dict(y.on), y.row[0] or 1
                half, x.partner, y.partner = [3 - y.row[0]], y, x
                y.joined = False
        elif named is not None:
            if all(place[n].up and place[n].free >= c for n, c in named.items()):
                on = dict(named)
        elif q > 0:
            on = _best_fit(place, q)
        if q < 0 and on is None:
            on = {n: 0 for n, p in enumerate(place) if p.up and p.units}
            on = dict(list(on.items())[:1])
        if not on:
            assert decision.best_effort, "the toy policy broke a rule"
            x.preempted += resized
            continue
        for n, count in on.items():
            place[n].units -= q < 0
            place[n].free -= count if other is None else 0
        _start(x, on, max(q, 0), half, t)


def _contend(work: Workload, table: Any, jobs: list[Any]) -> None:
    """Speeds of pairs by a table of measured ones."""
    for x in [x for x in jobs if x.on]:
        x.rate = alone = x.rates[x.gpus]
        if table is None or not x.partner:
            continue
        own, other = (work.templates[work.template[y.j]] for y in (x, x.partner))
        speed = table.speeds[own, other][int(own == other and not x.joined)]
        x.rate = max(1, (alone * round(speed * 10**6) + 500_000) // 10**6)


def _view(
    work: Workload, settings: Settings, jobs: list[Any], active: list[Any], place: list[Any],
    t: int, policy: Any,
) -> ClusterView:  # fmt: skip
    def ints(values: Any) -> Any:
        return np.array(list(values), np.int64)

    job = ints(x.j for x in active)
    rows = [[(g, r) for g, r in x.rates.items() if g] for x in active]
    held = [sorted(x.on.items()) for x in active]
    seen = [work.observed[work.observed_ptr[j] : work.observed_ptr[j + 1]] for j in job]
    seen = [row[: x.passes] for row, x in zip(seen, active, strict=True)]
    true = policy.clairvoyant
    return ClusterView(
        time=t, job=job, gpus=ints(x.gpus for x in active),
        running=np.array([bool(x.on) for x in active], bool), submit=work.submit[job],
        first_start=ints(x.first for x in active), entered=ints(x.entered for x in active),
        attained=ints(x.attained + x.gpus * (t - x.since) * bool(x.on) for x in active),
        done=ints(x.done for x in active),
        remaining=ints(
            x.work - x.done if true else max(1, int(work.estimate[x.j]) - x.done) for x in active
        ),
        passes=ints(x.passes for x in active), pass_work=work.pass_work[job],
        at_pass_end=np.array([not x.on or x.passed == t for x in active], bool),
        starts=ints(x.starts for x in active),
        size_ptr=np.cumsum(ints([0, *map(len, rows)])), size=ints(g for r in rows for g, _ in r),
        rate=ints(v for r in rows for _, v in r), priority=work.priority[job],
        weight=work.weight[job], group=work.group[job], template=work.template[job],
        preemptible=work.preemptible[job], restart_cost=ints(x.own_cost for x in active),
        observed_ptr=np.cumsum(ints([0, *map(len, seen)])),
        observed=np.concatenate([*seen, np.empty(0)]),
        free=ints(p.free * p.up for p in place),
        capacity=ints(g * p.up for g, p in zip(_gpus(place, jobs), place, strict=True)),
        held_ptr=np.cumsum(ints([0, *map(len, held)])),
        held_node=ints(n for r in held for n, _ in r),
        held_count=ints(c for r in held for _, c in r), workload=work, settings=settings,
        draining=np.array(
            [x.gpus > 0 and any(not place[n].up for n in x.on) for x in active], bool
        ),
        finished=ints(x.end for x in jobs),
        zero_free=ints(p.units * p.up for p in place),
        partner=ints(
            next((i for i, y in enumerate(active) if y is x.partner), -1) for x in active
        ),
    )  # fmt: skip


def _gpus(place: list[Any], jobs: list[Any]) -> list[int]:
    """Sizes of the nodes: what is free, and what is held (once by a pair)."""
    total = [p.free for p in place]
    for x in jobs:
        if not x.partner or x.partner.j > x.j:
            for n, count in x.on.items():
                total[n] += count
    return total
