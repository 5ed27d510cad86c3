"""Heads, tails and makespan of given orders, compiled; as `optsched.model.graph.evaluate`."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numba import types

from optsched.errors import InputError
from optsched.kernels.compile import INT, INTS, READ, entry
from optsched.model.graph import check_permutations, cyclic_order

if TYPE_CHECKING:
    from optsched.model.schedule import Csr, IntArray, Schedule


class LongestPath(NamedTuple):
    """Heads, tails (the operation's own duration included) and makespan."""

    heads: IntArray
    tails: IntArray
    makespan: int


def evaluate(graph: Schedule, sequences: Csr) -> LongestPath:
    """Longest paths of a one-shot graph under the given machine orders.

    Gangs, lags, setups and releases count. Errors are those of `optsched.model.graph.evaluate`.
    """
    if graph.period is not None:
        raise InputError("a periodic schedule has no single longest path; unroll it first")
    check_permutations(graph, sequences)
    after = graph.successors
    heads, tails, waiting, placed = _evaluate(
        graph.duration, graph.release, graph.family, graph.setup_in, graph.setup_out,
        after.indptr, after.other, after.weight, sequences.indptr, sequences.ids,
    )  # fmt: skip
    if placed < graph.n_operations:
        raise cyclic_order(graph, sequences, np.flatnonzero(waiting > 0).tolist())
    return LongestPath(heads, tails, int((heads + graph.duration).max(initial=0)))


@entry(
    types.Tuple((INTS, INTS, INTS, INT)),
    READ, READ, READ, READ, READ, READ, READ, READ, READ, READ,
)  # fmt: skip
def _evaluate(  # type: ignore[no-untyped-def]
    duration, release, family, setup_in, setup_out, indptr, head_of, weight, seq_indptr, seq
):
    """Kahn over arcs and sequences at once; n operations, arcs and sequences in CSR form.

    Returns heads, tails, unplaced predecessors per operation, and the number of placed operations.
    """
    n = len(duration)
    n_slots = len(seq)
    waiting = np.zeros(n, np.int64)
    # places of an operation in the sequences: linked list, since it may hold several resources
    first = np.full(n, -1, np.int64)
    following = np.full(n_slots, -1, np.int64)
    last_in_row = np.zeros(n_slots, np.int64)
    for r in range(len(seq_indptr) - 1):
        for k in range(seq_indptr[r], seq_indptr[r + 1]):
            following[k] = first[seq[k]]
            first[seq[k]] = k
            if k > seq_indptr[r]:
                waiting[seq[k]] += 1
            last_in_row[k] = k + 1 == seq_indptr[r + 1]
    for e in range(len(head_of)):
        waiting[head_of[e]] += 1
    heads = release.copy()
    order = np.empty(n, np.int64)
    placed = 0
    for i in range(n):
        if waiting[i] == 0:
            order[placed] = i
            placed += 1
    at = 0
    while at < placed:
        i = order[at]
        at += 1
        for e in range(indptr[i], indptr[i + 1]):
            j = head_of[e]
            heads[j] = max(heads[j], heads[i] + weight[e])
            waiting[j] -= 1
            if waiting[j] == 0:
                order[placed] = j
                placed += 1
        k = first[i]
        while k >= 0:
            if not last_in_row[k]:
                j = seq[k + 1]
                setup = 0 if family[i] == family[j] else setup_out[i] + setup_in[j]
                heads[j] = max(heads[j], heads[i] + duration[i] + setup)
                waiting[j] -= 1
                if waiting[j] == 0:
                    order[placed] = j
                    placed += 1
            k = following[k]
    tails = duration.copy()
    for at in range(placed - 1, -1, -1):
        i = order[at]
        for e in range(indptr[i], indptr[i + 1]):
            tails[i] = max(tails[i], weight[e] + tails[head_of[e]])
        k = first[i]
        while k >= 0:
            if not last_in_row[k]:
                j = seq[k + 1]
                setup = 0 if family[i] == family[j] else setup_out[i] + setup_in[j]
                tails[i] = max(tails[i], duration[i] + setup + tails[j])
            k = following[k]
    return heads, tails, waiting, placed
