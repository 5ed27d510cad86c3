"""Exact choice of k GPUs across pods beside running jobs, by sets of jobs to touch."""

# numba compiles the kernels: they are typed by signatures
# mypy: disable-error-code="no-untyped-call"

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

from optsched.bandwidth.models.contention import share
from optsched.bandwidth.models.model import UnmeasuredPattern
from optsched.bandwidth.models.pods import UNIT_BITS
from optsched.bandwidth.search import pod_entries as entry
from optsched.bandwidth.search import pod_sets as sets
from optsched.bandwidth.search import pod_windows as windows
from optsched.bandwidth.search.ask import gpus_of
from optsched.bandwidth.search.pod_local import POD
from optsched.bandwidth.search.pod_search import PodChoice, idle_choice
from optsched.bandwidth.topology.rates import NO_LIMIT
from optsched.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from optsched.bandwidth.models.pods import PodBandwidth
    from optsched.bandwidth.topology.state import ClusterState
    from optsched.model.schedule import IntArray

MOST_VECTORS: Final = 1_000_000
"""Count vectors of all pods together up to which they are enumerated."""


def choose_beside_tenants(
    model: PodBandwidth, state: ClusterState, k: int, demands: Sequence[int], work: int
) -> PodChoice:
    """Best k >= 2 free GPUs beside jobs with these demands; see `choose_pods`.

    With over 62 jobs across hosts, or very large pods, it is the idle choice with its bound.
    """
    team = [
        j
        for j, (demand, held) in enumerate(zip(demands, state.held, strict=True))
        if demand > 0 and np.count_nonzero(held) > 1 and state.room[held > 0].any()
    ]
    idle = idle_choice(model, state, k)
    bar = _value_of(model, state, demands, idle.gpus)
    if bar == idle.value:
        return idle
    rooms = np.array([np.prod(state.room[list(hosts)] + 1.0) for hosts in model.hosts_of])
    if len(team) > sets.MOST_JOBS or rooms.sum() > MOST_VECTORS:
        return PodChoice(bar, idle.gpus, idle.value, False)
    team.sort(key=lambda j: demands[j])
    return _by_sets(model, state, k, demands, team, idle._replace(value=bar), work)


def _value_of(
    model: PodBandwidth, state: ClusterState, demands: Sequence[int], gpus: Sequence[int]
) -> int:
    """Value of one choice; -1 if something is not measured."""
    try:
        return share(model, state, gpus, demands).value
    except UnmeasuredPattern:
        return -1


def _by_sets(
    model: PodBandwidth,
    state: ClusterState,
    k: int,
    demands: Sequence[int],
    team: list[int],
    start: PodChoice,
    work: int,
) -> PodChoice:
    """By sets of touched jobs, at least as good as `start`; not exact if `work` ran out."""
    tables = model.pod_tables
    n_pods, n_jobs = len(model.pods), len(team)
    first = tables.pods[2::POD]
    inside = np.logical_or.reduceat(state.held[team][:, tables.hosts] > 0, first, axis=1)
    slots = np.where(inside, np.cumsum(inside, axis=0) - 1, -1).T.reshape(-1).astype(np.int64)
    static = np.full((n_jobs, n_pods), NO_LIMIT, np.int64)
    held_of = []
    for p in range(n_pods):
        begin, end, at, n_hosts = tables.pods[p * POD : (p + 1) * POD].tolist()
        hosts = tables.hosts[at : at + n_hosts]
        here = [j for j in range(n_jobs) if inside[j, p]]
        held = np.ascontiguousarray(state.held[[team[j] for j in here]][:, hosts]).reshape(-1)
        held_of.append((np.array(here, np.int64), hosts, held))
        for i, j in enumerate(here):
            static[j, p] = entry.held_value(
                tables.words[begin:end], held, i * n_hosts, n_hosts, tables.single[p]
            )
    wide = inside.argmax(axis=1), n_pods - 1 - inside[:, ::-1].argmax(axis=1)
    jobs = np.stack([np.array(demands)[team], *wide, np.zeros(n_jobs, np.int64)], axis=1)
    entries, begins = _entries(model, state, k, jobs, static, held_of)
    rooms = np.add.reduceat(state.room[tables.hosts], first)
    reach = np.cumsum(-np.sort(-rooms))
    fewest = max(2, int(np.searchsorted(reach, k)) + 1)
    size = int(entries[0])
    for j in range(n_jobs):
        caps = [-1]
        for p in np.flatnonzero(inside[j]).tolist():
            rows = entries[begins[p] : begins[p + 1]].reshape(-1, size)
            touching = (rows[:, entry.TOUCHED] >> j & 1 == 1) & (rows[:, entry.COUNT] > 0)
            joint = rows[touching, entry.JOINT + slots[p * n_jobs + j]]
            caps.append(int(joint.max(initial=-1)))
        jobs[j, windows.CAP] = max(caps)
    hosts_of_jobs = (state.held[team] > 0).T @ (1 << np.arange(n_jobs))
    out = np.full(windows.ENTRIES + n_pods, -1, np.int64)
    out[windows.VALUE] = max(int(entries[1]), start.value)
    width = min(k, int(rooms.max())) + 1
    value = int(
        sets.search_sets(
            entries, begins, slots, n_jobs, jobs.reshape(-1), static.reshape(-1), tables.powers,
            np.stack([state.room, hosts_of_jobs, model.pod_of], axis=1).reshape(-1),
            width, fewest, k, start.upper_bound, work, out,
        )
    )  # fmt: skip
    if value < 0:
        which = "every" if out[windows.COMPLETE] else "every tried"
        raise InputError(f"k: {which} choice of {k} GPUs needs a pattern that is not measured")
    chosen = np.zeros(model.cluster.n_hosts, np.int64)
    picked = [
        (p, int(entries[e + entry.CODE])) for p, e in enumerate(out[windows.ENTRIES :]) if e >= 0
    ]
    if not picked and int(entries[1]) == value:
        picked = [(int(entries[3]), int(entries[2]))]
    for p, code in picked:
        entry.decode(tables.words, tables.pods, tables.hosts, p, code, state.masks, chosen)
    gpus = gpus_of(state, enumerate(chosen.tolist())) if picked else start.gpus
    exact = bool(out[windows.COMPLETE])
    bound = value if exact else min(int(out[windows.BOUND]), start.upper_bound)
    return PodChoice(value, gpus, bound, exact or bound == value)


def _entries(
    model: PodBandwidth,
    state: ClusterState,
    k: int,
    jobs: IntArray,
    static: IntArray,
    held_of: list[tuple[IntArray, IntArray, IntArray]],
) -> tuple[IntArray, IntArray]:
    """Entries of all pods, and where each begins; see `pod_entries`."""
    tables = model.pod_tables
    vectors = sum(int(np.prod(state.room[hosts] + 1)) for _, hosts, _ in held_of)
    size = entry.JOINT + max(len(here) for here, _, _ in held_of)
    entries = np.empty((vectors + 2) * size, np.int64)
    entries[:4] = size, -1, -1, -1
    after, head = np.empty(vectors + 2, np.int64), np.empty(k + 1, np.int64)
    begins, end = [], size
    for p, (here, hosts, held) in enumerate(held_of):
        begins.append(end)
        start, stop = tables.pods[p * POD], tables.pods[p * POD + 1]
        rest = np.zeros((len(here), 3), np.int64)
        for i, j in enumerate(here):
            others = np.delete(static[j], p)
            n = int((others != NO_LIMIT).sum())
            span = jobs[j, windows.TO] - jobs[j, windows.FROM]
            power = tables.powers[span + n - 1] if n else 1 << UNIT_BITS
            rest[i] = power, others.min(initial=NO_LIMIT), jobs[j, windows.DEMAND]
        end = entry.pod_entries(
            tables.words[start:stop], state.masks[hosts], held, len(hosts), k, tables.single[p],
            here, rest.reshape(-1), entries, end, after, head,
        )  # fmt: skip
        if entries[3] == -1 and entries[1] >= 0:
            entries[3] = p
    return entries, np.array([*begins, end], np.int64)
