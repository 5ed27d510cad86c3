"""The search for cycles in arbitrary directed graphs."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from optsched.model.cycles import disjoint_cycles

VERTEX = st.integers(0, 7)


def has_cycle(edges: list[tuple[int, int]]) -> bool:
    """Whether anything is left once vertices that nothing enters are taken away repeatedly."""
    left = {i for edge in edges for i in edge}
    while True:
        edges = [(i, j) for i, j in edges if i in left and j in left]
        entered = {j for _, j in edges}
        if entered >= left:
            return bool(left)
        left &= entered


def search(edges: list[tuple[int, int]]) -> list[list[int]]:
    """Cycles as lists of edge numbers."""
    table = np.array(edges, np.int64).reshape(-1, 2)
    return disjoint_cycles(table[:, 0], table[:, 1])


@given(st.lists(st.tuples(VERTEX, VERTEX), max_size=20))
def test_cycles_are_closed_disjoint_and_leave_none(edges: list[tuple[int, int]]) -> None:
    """Each is a closed walk of distinct vertices; without those vertices no cycle is left."""
    used: set[int] = set()
    for cycle in search(edges):
        walk = [edges[e] for e in cycle]
        assert [j for _, j in walk] == [i for i, _ in walk[1:] + walk[:1]]
        vertices = {i for i, _ in walk}
        assert len(vertices) == len(walk)
        assert used.isdisjoint(vertices)
        used |= vertices
    assert not has_cycle([(i, j) for i, j in edges if i not in used and j not in used])


def test_a_graph_with_many_paths_is_searched_once() -> None:
    """2^200 paths through 200 diamonds, yet every edge is looked at once; and no recursion."""
    ladder = [
        (3 * k + a, 3 * k + b) for k in range(200) for a, b in ((0, 1), (0, 2), (1, 3), (2, 3))
    ]
    assert search(ladder) == []
    chain = [(i, i + 1) for i in range(5000)]
    assert search([*chain, (5000, 0)]) == [list(range(5001))]
