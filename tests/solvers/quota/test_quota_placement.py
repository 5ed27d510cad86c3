"""Placement: quotas against all placements, streams of tasks against plain walks of each rule."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from optsched.errors import InputError
from optsched.problems.quota.data import Quotas
from optsched_solvers.quota.placement import place_quotas
from optsched_solvers.quota.placement_stream import RULES, place_stream, task_classes

Node = list[int]
Classes = list[tuple[int, int]]
KINDS = [60, 230, 470, 500, 810, 1000, 2000, 4000]

# quotas onto nodes


def legal(
    quota: list[int], free: list[int], locality: list[int], placed: list[dict[int, int]]
) -> bool:
    """Whether a complete placement respects capacities and localities."""
    used = [sum(job.get(n, 0) for job in placed) for n in range(len(free))]
    if any(u > f for u, f in zip(used, free, strict=True)):
        return False
    for g, where, job in zip(quota, locality, placed, strict=True):
        if sum(job.values()) != g or any(c <= 0 for c in job.values()):
            return False
        if where == 1 and g <= max(free) and len(job) > 1:
            return False
        if where == 2 and sum(c < free[n] for n, c in job.items()) > (1 if len(job) > 1 else 9):
            return False
    return True


def splits(g: int, nodes: int) -> list[dict[int, int]]:
    """All ways of putting g GPUs on nodes."""
    ways = [ways for ways in product(range(g + 1), repeat=nodes) if sum(ways) == g]
    return [{n: c for n, c in enumerate(way) if c} for way in ways]


def measure(
    placed: list[dict[int, int]], held: list[dict[int, int]], quota: list[int]
) -> tuple[int, int]:
    """Nodes spanned, GPUs moved."""
    moved = 0
    for g, job, before in zip(quota, placed, held, strict=True):
        kept = sum(min(c, before.get(n, 0)) for n, c in job.items())
        moved += min(g, sum(before.values())) - kept
    return sum(len(job) for job in placed), moved


def solve(
    quota: list[int], free: list[int], held: list[dict[int, int]], locality: list[int]
) -> tuple[list[dict[int, int]], int]:
    """`place_quotas` on dictionaries."""
    flat = [(j, n, c) for j, job in enumerate(held) for n, c in job.items()]
    now = Quotas.of(len(held), *np.array(flat, np.int64).reshape(-1, 3).T)
    found, failed = place_quotas(*(np.array(x, np.int64) for x in (quota, free)), now,
                                 np.array(locality, np.int64))  # fmt: skip
    rows: list[dict[int, int]] = [{} for _ in quota]
    for j, n, c in zip(found.rows.tolist(), found.node.tolist(), found.count.tolist(), strict=True):
        rows[j][n] = c
    assert all(list(row) == sorted(row) for row in rows)
    return rows, failed


def random_plan(
    random: np.random.Generator, jobs: int, nodes: int
) -> tuple[list[int], list[int], list[dict[int, int]], list[int]]:
    """Quotas that fit in sum, and present placements that fit as well."""
    free = random.integers(1, 5, nodes).tolist()
    left, held = list(free), []
    for _ in range(jobs):
        job: dict[int, int] = {}
        for n in range(nodes):
            take = int(random.integers(0, left[n] + 1)) if random.random() < 0.4 else 0
            if take:
                job[n] = take
                left[n] -= take
        held.append(job)
    quota = [int(random.integers(0, 5)) for _ in range(jobs)]
    while sum(quota) > sum(free):
        quota[int(np.argmax(quota))] -= 1
    return quota, free, held, random.integers(0, 3, jobs).tolist()


def test_quotas_against_all_placements() -> None:
    """Legal; `any` never fails; seldom fails or spans more where all placements are known."""
    random = np.random.default_rng(1)
    feasible = failed_any = missed = wider = moved_more = 0
    for _ in range(400):
        quota, free, held, locality = random_plan(random, 3, 3)
        _, failed = solve(quota, free, held, [0] * 3)
        failed_any += failed >= 0
        options = [
            [way for way in splits(g, 3) if all(c <= free[n] for n, c in way.items())]
            for g in quota
        ]
        good = [
            list(ways) for ways in product(*options) if legal(quota, free, locality, list(ways))
        ]
        placed, failed = solve(quota, free, held, locality)
        if failed < 0:
            assert legal(quota, free, locality, placed)
        if not good:
            assert failed >= 0
            continue
        feasible += 1
        if failed >= 0:
            missed += 1
            continue
        best = min(measure(ways, held, quota) for ways in good)
        mine = measure(placed, held, quota)
        assert mine >= best
        wider += mine[0] > best[0]
        moved_more += mine[0] == best[0] and mine[1] > best[1]
    assert failed_any == 0
    assert feasible > 250
    assert missed <= 0.01 * feasible
    assert wider <= 0.01 * feasible
    assert moved_more <= 0.04 * feasible


@given(st.integers(0, 10**6))
def test_quotas_stay_where_they_are(seed: int) -> None:
    """Jobs on one node each with unchanged quotas do not move."""
    random = np.random.default_rng(seed)
    free = random.integers(1, 9, 6)
    left, held = free.copy(), []
    for _ in range(8):
        n = int(random.integers(6))
        take = int(random.integers(0, left[n] + 1))
        left[n] -= take
        held.append({n: take} if take else {})
    quota = [sum(job.values()) for job in held]
    locality = random.integers(0, 3, 8).tolist()
    placed, failed = solve(quota, free.tolist(), held, locality)
    assert failed == -1
    assert placed == held


def test_quotas_shrink_in_place_and_spread_only_if_needed() -> None:
    """A smaller quota stays on its node; a large one takes the roomiest nodes."""
    assert solve([2], [8, 8], [{1: 4}], [0]) == ([{1: 2}], -1)
    assert solve([10], [4, 8, 8], [{}], [0]) == ([{0: 2, 1: 8}], -1)
    assert solve([5, 5], [8, 4], [{}, {}], [1, 1])[1] == 1
    assert solve([9], [8, 1, 4], [{}], [2]) == ([{0: 8, 1: 1}], -1)


def test_quotas_more_than_there_are() -> None:
    """The job that fails is named, and the others keep their places."""
    placed, failed = solve([4, 4, 4], [4, 4], [{0: 4}, {}, {1: 4}], [0, 0, 0])
    assert failed == 1
    assert placed == [{0: 4}, {}, {1: 4}]


def test_quotas_of_nobody() -> None:
    """No jobs, or no nodes."""
    assert solve([], [4], [], []) == ([], -1)
    assert solve([0], [], [{}], [0]) == ([{}], -1)
    assert solve([1], [], [{}], [0]) == ([{}], 0)


# streams of tasks


def fits(node: Node, demand: int) -> bool:
    """A share of one GPU, or whole idle GPUs."""
    if demand < 1000:
        return max(node, default=0) >= demand
    return sum(share == 1000 for share in node) >= demand // 1000


def f(node: Node, classes: Classes) -> int:
    """Weng et al.: all free shares if the class cannot run, else those below min(demand, 1)."""
    total = 0
    for demand, popularity in classes:
        if fits(node, demand):
            unusable = sum(share for share in node if share < min(demand, 1000))
        else:
            unusable = sum(node)
        total += popularity * unusable
    return total


def ways(node: Node, demand: int) -> list[tuple[int, Node]]:
    """Mask of GPUs and shares afterwards of everything that the task may take."""
    if not fits(node, demand):
        return []
    found = []
    if demand < 1000:
        for g, share in enumerate(node):
            if share >= demand:
                found.append((1 << g, [*node[:g], share - demand, *node[g + 1 :]]))
        return found
    taken = [g for g, share in enumerate(node) if share == 1000][: demand // 1000]
    after = [0 if g in taken else share for g, share in enumerate(node)]
    return [(sum(1 << g for g in taken), after)]


def plain_stream(
    shares: list[Node], demand: list[int], rule: str, classes: Classes
) -> tuple[list[int], list[int]]:
    """Node and GPUs of every task, everything recomputed at every step."""
    nodes = [list(node) for node in shares]
    where, mask = [-1] * len(demand), [0] * len(demand)
    for e in range(len(demand)):
        best = None
        for n, node in enumerate(nodes):
            for bits, after in ways(node, demand[e]):
                g = bits.bit_length() - 1
                key = {
                    "fgd": (f(after, classes) - f(node, classes), n, g),
                    "best_fit": (sum(node), n, node[g], g),
                    "worst_fit": (-sum(node), n, -node[g], g),
                    "first_fit": (n, g),
                }[rule]
                if best is None or key < best[0]:
                    best = (key, n, bits, after)
        if best is not None:
            _, where[e], mask[e], nodes[where[e]] = best
    return where, mask


def random_shares(random: np.random.Generator, nodes: int, gpus: int) -> np.ndarray:
    """Idle, partly taken, taken and missing GPUs."""
    shares = random.choice([0, 190, 530, 1000, 1000], (nodes, gpus))
    return np.where(random.random((nodes, gpus)) < 0.2, random.integers(0, 1001), shares)


@pytest.mark.parametrize("rule", ["fgd", "best_fit", "worst_fit", "first_fit"])
def test_stream_against_plain_recomputation(rule: str) -> None:
    """Only changed nodes are scored again, with the same result."""
    random = np.random.default_rng(2)
    dropped = 0
    for _ in range(60):
        shares = random_shares(random, 4, 4)
        demand = random.choice(KINDS, 25)
        given_classes = random.random() < 0.5
        classes = task_classes(random.choice(KINDS, 9) if given_classes else demand)
        placed = place_stream(shares, demand, rule, classes=classes if given_classes else None)
        where, mask = plain_stream(
            shares.tolist(), demand.tolist(), rule, [(d, p) for d, p in classes.tolist()]
        )
        assert placed.node.tolist() == where
        assert placed.gpus.tolist() == mask
        dropped += (placed.node < 0).sum()
    assert dropped > 50


@given(st.sampled_from(sorted(RULES)), st.integers(0, 10**6))
def test_nothing_is_shared_beyond_a_gpu(rule: str, seed: int) -> None:
    """Shares stay within [0, 1], are conserved, and a dropped task had no node."""
    random = np.random.default_rng(seed)
    shares = random_shares(random, 4, 3)
    demand = random.choice(KINDS, 12)
    before = shares.copy()
    placed = place_stream(shares, demand, rule, seed=seed)
    assert (shares == before).all()
    assert placed.free_shares.min() >= 0
    taken = demand[placed.node >= 0].sum()
    assert before.sum() - placed.free_shares.sum() == taken
    again = place_stream(shares, demand, rule, seed=seed)
    assert (again.node == placed.node).all()
    for i in np.flatnonzero(placed.node < 0):  # shares only shrink here: it fits nowhere at the end
        assert not any(fits(node, int(demand[i])) for node in placed.free_shares.tolist())


def test_random_is_uniform_and_seeded() -> None:
    """Every node that fits is taken about as often; another seed, another walk."""
    shares = np.full((5, 2), 1000)
    shares[3] = 400
    times = np.zeros(5)
    walks = set()
    for seed in range(500):
        placed = place_stream(shares, [500], "random", seed=seed)
        times[placed.node[0]] += 1
        walks.add((int(placed.node[0]), int(placed.gpus[0])))
    assert times[3] == 0
    assert times[[0, 1, 2, 4]].min() > 85
    assert len(walks) == 8


def test_nothing_to_place() -> None:
    """No nodes, no tasks, no classes."""
    assert place_stream(np.zeros((0, 4), int), [1000]).node.tolist() == [-1]
    assert place_stream([[1000]], []).node.tolist() == []
    assert task_classes([]).shape == (0, 2)


@pytest.mark.parametrize(
    ("shares", "classes", "said"),
    [
        ([[1001]], [[1, 1]], r"free_shares: entry 0 is not in 0\.\.1000 \(1001\)"),
        ([[-1]], [[1, 1]], r"entry 0 is not in 0\.\.1000"),
        ([1000], [[1, 1]], "free_shares: expected shape"),
        ([[0.5]], [[1, 1]], "free_shares: expected whole numbers"),
        ([[0] * 63], [[1, 1]], "at most 62 GPUs"),
        ([[1000]], [[1500, 1]], "classes: entry 0 is 1500 thousandths"),
        ([[1000]], [[0, 1]], "entry 0 is 0 thousandths"),
        ([[1000]], [[1, -1]], "classes: entry 0 is not in"),
        ([[1000]], [1, 1], "classes: expected shape"),
        ([[1000]], [[0.5, 1.0]], "classes: expected whole numbers"),
    ],
)
def test_refusals(shares: object, classes: object, said: str) -> None:
    """One sentence that names array, place and value."""
    with pytest.raises(InputError, match=said):
        place_stream(shares, [500], classes=classes)
    with pytest.raises(InputError, match="rule: 'worst' is none of best_fit"):
        place_stream([[1000]], [500], "worst")
    with pytest.raises(InputError, match="seed: expected"):
        place_stream([[1000]], [500], seed=-1)
