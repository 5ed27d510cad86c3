"""Rules on one machine against all subsets and all sequences, in plain Python."""

from __future__ import annotations

from itertools import combinations, permutations
from random import Random
from typing import TYPE_CHECKING

import numpy as np
from depth import seeds

from optsched_solvers.shop.proof.propagation import (
    DEADLINE,
    HEAD,
    LATE_FIRST,
    NEW,
    PROCESS,
    head_rules,
)

if TYPE_CHECKING:
    from optsched.model.schedule import IntArray

Windows = tuple[list[int], list[int], list[int]]


def raise_heads(head: IntArray, duration: IntArray, deadline: IntArray) -> IntArray | None:
    """Heads after one pass of the rules, run as plain Python; None if nothing fits."""
    n, by_head = len(head), np.argsort(head, kind="stable")
    t = np.zeros((6, n), np.int64)
    t[HEAD] = t[NEW] = head[by_head]
    t[PROCESS], t[DEADLINE] = duration[by_head], deadline[by_head]
    t[LATE_FIRST] = np.argsort(-t[DEADLINE], kind="stable")
    if not head_rules(n, t) or (t[NEW] + t[PROCESS] > t[DEADLINE]).any():
        return None
    heads = np.empty(n, np.int64)
    heads[by_head] = t[NEW]
    return heads


def tighten(
    head: IntArray, duration: IntArray, deadline: IntArray
) -> tuple[IntArray, IntArray] | None:
    """Heads and deadlines when neither direction changes anything more."""
    early, late = head, deadline
    while True:
        raised = raise_heads(early, duration, late)
        mirrored = None if raised is None else raise_heads(-late, duration, -raised)
        if raised is None or mirrored is None:
            return None
        if np.array_equal(raised, early) and np.array_equal(-mirrored, late):
            return early, late
        early, late = raised, -mirrored


def windows(rng: Random, most: int = 6) -> Windows:
    """Heads, durations and deadlines of a machine that is nearly full; ties and zeros abound."""
    n = rng.randint(1, most)
    duration = [rng.choice([0, 1, 1, 2, 3, 5]) for _ in range(n)]
    span = sum(duration) + rng.randint(0, 4)
    head = [rng.randint(0, max(0, span - p)) if rng.random() < 0.7 else 0 for p in duration]
    deadline = [
        r + p + rng.randint(0, max(0, span - r - p) + rng.randint(0, 2))
        for r, p in zip(head, duration, strict=True)
    ]
    return head, duration, deadline


def sequences(given: Windows) -> list[list[int]]:
    """Earliest starts of every feasible sequence."""
    head, duration, deadline = given
    feasible = []
    for order in permutations(range(len(head))):
        now, start = -(10**9), [0] * len(head)
        for i in order:
            start[i] = max(now, head[i])
            now = start[i] + duration[i]
        if all(s + p <= d for s, p, d in zip(start, duration, deadline, strict=True)):
            feasible.append(start)
    return feasible


def subsets(members: list[int]) -> list[tuple[int, ...]]:
    """All but the empty one."""
    return [c for k in range(1, len(members) + 1) for c in combinations(members, k)]


def earliest_end(given: Windows, some: tuple[int, ...]) -> int:
    """Largest head + load of a part of these operations."""
    head, duration, _ = given
    parts = subsets(list(some))
    return max(min(head[i] for i in part) + sum(duration[i] for i in part) for part in parts)


def edge_finding_by_definition(given: Windows) -> list[int]:
    """Heads raised by all sets that an operation must follow (Carlier & Pinson 1990)."""
    head, duration, deadline = given
    new = list(head)
    for i in range(len(head)):
        for some in subsets([k for k in range(len(head)) if k != i]):
            begin = min(head[i], *(head[k] for k in some))
            load = duration[i] + sum(duration[k] for k in some)
            if begin + load > max(deadline[k] for k in some):
                new[i] = max(new[i], earliest_end(given, some))
    return new


def not_first_by_definition(given: Windows) -> list[int]:
    """Heads raised by all sets that an operation cannot precede (Torres & Lopez 2000)."""
    head, duration, deadline = given
    mirrored = ([-d for d in deadline], duration, [-r for r in head])
    new = list(head)
    for i in range(len(head)):
        for some in subsets([k for k in range(len(head)) if k != i]):
            latest_start = -earliest_end(mirrored, some)
            if head[i] + duration[i] > latest_start:
                new[i] = max(new[i], min(head[k] + duration[k] for k in some))
    return new


@seeds(100, 600)
def test_no_feasible_start_is_lost(seed: int) -> None:
    """Heads and deadlines hold in every feasible sequence; infeasible is said only if it is."""
    given = windows(Random(seed))
    head, duration, deadline = given
    feasible = sequences(given)
    found = tighten(*map(np.array, given))
    if found is None:
        assert not feasible
        return
    early, late = (column.tolist() for column in found)
    assert all(a >= b for a, b in zip(early, head, strict=True))
    assert all(a <= b for a, b in zip(late, deadline, strict=True))
    for start in feasible:
        assert all(s >= e for s, e in zip(start, early, strict=True)), (given, start, early)
    mirrored = ([-d for d in deadline], duration, [-r for r in head])
    for start in sequences(mirrored):
        assert all(-s <= d for s, d in zip(start, late, strict=True)), (given, start, late)


@seeds(60, 300)
def test_against_the_definition(seed: int) -> None:
    """As strong as edge finding over all subsets, never stronger than that and not-first."""
    given = windows(Random(seed), most=5)
    head = given[0]
    found = raise_heads(*map(np.array, given))
    if found is None:
        return
    least = edge_finding_by_definition(given)
    most = [max(a, b) for a, b in zip(least, not_first_by_definition(given), strict=True)]
    for new, low, high, old in zip(found.tolist(), least, most, head, strict=True):
        assert old <= low <= new <= high, (given, found)
