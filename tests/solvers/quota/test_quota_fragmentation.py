"""Fragmentation and FGD against their definition, written out in plain Python."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from optsched.errors import InputError
from optsched_solvers.quota.fragmentation import fragmentation, task_classes
from optsched_solvers.quota.placement_stream import RULES, place_stream

Node = list[int]
Classes = list[tuple[int, int]]
KINDS = [60, 230, 470, 500, 810, 1000, 2000, 4000]


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
    shares: list[Node], demand: list[int], rule: str, classes: Classes, events: list[int]
) -> tuple[list[int], list[int]]:
    """Node and GPUs of every task, everything recomputed at every step."""
    nodes = [list(node) for node in shares]
    where, mask = [-1] * len(demand), [0] * len(demand)
    for e in events:
        if e < 0:
            if where[~e] >= 0:
                for g in range(len(nodes[where[~e]])):
                    if mask[~e] >> g & 1:
                        nodes[where[~e]][g] += min(demand[~e], 1000)
            continue
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


def test_fragmentation_is_the_definition() -> None:
    """Random nodes and classes; popularity 0, and shares of 0 that are no GPUs at all."""
    random = np.random.default_rng(1)
    for _ in range(300):
        shares = random_shares(random, 5, int(random.integers(1, 6)))
        classes = [(int(d), int(random.integers(0, 9))) for d in random.choice(KINDS, 4)]
        assert fragmentation(shares, classes).tolist() == [
            f(node, classes) for node in shares.tolist()
        ]


def test_fragmentation_by_hand() -> None:
    """Two GPUs with .5 and 1 free: nothing, half a GPU, or all of it is a fragment."""
    shares = [[500, 1000]]
    assert fragmentation(shares, [[300, 1]]).tolist() == [0]
    assert fragmentation(shares, [[700, 1]]).tolist() == [500]
    assert fragmentation(shares, [[1000, 1]]).tolist() == [500]
    assert fragmentation(shares, [[2000, 1]]).tolist() == [1500]
    assert fragmentation(shares, [[700, 3], [2000, 2]]).tolist() == [4500]


@pytest.mark.parametrize("rule", ["fgd", "best_fit", "worst_fit", "first_fit"])
def test_stream_against_plain_recomputation(rule: str) -> None:
    """Only changed nodes are scored again, with the same result; tasks end in between."""
    random = np.random.default_rng(2)
    dropped = 0
    for _ in range(60):
        shares = random_shares(random, 4, 4)
        demand = random.choice(KINDS, 25)
        given_classes = random.random() < 0.5
        classes = task_classes(random.choice(KINDS, 9) if given_classes else demand)
        events: list[int] = []
        running: list[int] = []
        for i in range(len(demand)):
            events.append(i)
            running.append(i)
            if random.random() < 0.5:
                events.append(~running.pop(int(random.integers(len(running)))))
        placed = place_stream(
            shares, demand, rule, classes=classes if given_classes else None, events=events
        )
        where, mask = plain_stream(
            shares.tolist(), demand.tolist(), rule, [(d, p) for d, p in classes.tolist()], events
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
    assert fragmentation([[1000]], np.zeros((0, 2), int)).tolist() == [0]


@pytest.mark.parametrize(
    ("shares", "classes", "said"),
    [
        ([[1001]], [[1, 1]], "entry 0 is above 1000"),
        ([[-1]], [[1, 1]], "entry 0 is negative"),
        ([1000], [[1, 1]], "expected integers of shape"),
        ([[0.5]], [[1, 1]], "expected integers of shape"),
        ([[0] * 63], [[1, 1]], "63 GPUs a node"),
        ([[1000]], [[1500, 1]], "entry 0 is 1500 thousandths"),
        ([[1000]], [[0, 1]], "entry 0 is 0 thousandths"),
        ([[1000]], [[1, -1]], "entry 0 is negative"),
        ([[1000]], [1, 1], "classes: expected shape"),
        ([[1000]], [[0.5, 1.0]], "array of integers"),
        ([[1000]], [[1, 2**31 - 1]] * 600, "popularities sum to more"),
    ],
)
def test_refusals(shares: object, classes: object, said: str) -> None:
    """One sentence that names array, place and value."""
    with pytest.raises(InputError, match=said):
        fragmentation(shares, classes)
