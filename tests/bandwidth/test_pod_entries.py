"""What pods may contribute beside tenants: the count vectors that none dominates."""

from __future__ import annotations

from itertools import combinations, product
from typing import TYPE_CHECKING

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from random_pods import plain_bandwidth, random_case

from optsched.bandwidth.search.pod_entries import COUNT, FIRST, JOINT, OWN, TOUCHED, pod_entries

if TYPE_CHECKING:
    from random_pods import Case

Entry = tuple[int, ...]


def plain_entries(case: Case, pod: int, k: int) -> set[Entry]:
    """Count, touched jobs, own, first and joint values of all vectors that none dominates."""
    model, state = case.model, case.state
    cluster, hosts = model.cluster, model.hosts_of[pod]
    first = cluster.first.tolist()
    here = [j for j in range(len(state.jobs)) if state.held[j][list(hosts)].any()]
    single = int(model.single()[pod])

    def value(gpus: list[int]) -> int:
        return single if len(gpus) == 1 else plain_bandwidth(model, gpus) or 0

    found: set[Entry] = set()
    for counts in product(*(range(int(state.room[h]) + 1) for h in hosts)):
        if not 0 < sum(counts) <= k:
            continue
        free = [[g for g in state.free if cluster.host_of[g] == h] for h in hosts]
        ways = product(*(combinations(f, c) for f, c in zip(free, counts, strict=True)))
        own = max(value([g for part in way for g in part]) for way in ways)
        joint = []
        for j in (None, *here):
            held = [0 if j is None else int(state.held[j][h]) for h in hosts]
            both = zip(hosts, counts, held, strict=True)
            joint.append(value([first[h] + i for h, c, its in both for i in range(c + its)]))
        used = [h for h, c in zip(hosts, counts, strict=True) if c]
        touched = sum(1 << j for j in here if state.held[j][used].any())
        found.add((sum(counts), touched, own, *joint))

    def dominated(entry: Entry) -> bool:
        return any(
            other != entry
            and other[0] == entry[0]
            and not other[1] & ~entry[1]
            and all(a >= b for a, b in zip(other[2:], entry[2:], strict=True))
            for other in found
        )

    return {entry for entry in found if not dominated(entry)}


@given(st.integers(0, 10**9), st.integers(0, 4), st.integers(1, 8))
def test_entries_equal_their_plain_twin(seed: int, jobs: int, k: int) -> None:
    """Of every pod, as a set; and every code is that of a count vector of its size."""
    case = random_case(seed, gpus=12, jobs=jobs)
    model, state = case.model, case.state
    tables = model.pod_tables
    for p, hosts in enumerate(model.hosts_of):
        here = [j for j in range(len(state.jobs)) if state.held[j][list(hosts)].any()]
        held = np.ascontiguousarray(state.held[here][:, list(hosts)]).reshape(-1)
        rooms = [int(state.room[h]) for h in hosts]
        vectors = int(np.prod([room + 1 for room in rooms]))
        size = JOINT + len(here)
        entries = np.zeros((vectors + 2) * size, np.int64)
        entries[:4] = size, -1, -1, -1
        end = pod_entries(
            tables.words[tables.pods[4 * p] : tables.pods[4 * p + 1]], state.masks[list(hosts)],
            held, len(hosts), k, tables.single[p], np.array(here, np.int64),
            np.zeros(3 * len(here), np.int64), entries, size, np.zeros(vectors + 2, np.int64),
            np.zeros(k + 1, np.int64),
        )  # fmt: skip
        rows = entries[size:end].reshape(-1, size)
        rows = rows[rows[:, COUNT] > 0]
        places = [COUNT, TOUCHED, OWN, FIRST, *range(JOINT, size)]
        assert {tuple(row) for row in rows[:, places].tolist()} == plain_entries(case, p, k)
        assert len(np.unique(rows[:, places], axis=0)) == len(rows)
        for count, code in zip(rows[:, COUNT].tolist(), rows[:, 4].tolist(), strict=True):
            left, total = code, 0
            for room in rooms:
                total, left = total + left % (room + 1), left // (room + 1)
            assert (total, left) == (count, 0)
