"""The arrays that the compiled local search reads: a graph, laid out for short memory walks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from optsched.model.schedule import Csr, IntArray, Schedule

NO_LIMIT = np.iinfo(np.int64).max

FACTS: Final = 16
"""Length of a row of facts, one per operation."""

RELEASE, LEAST, FAMILY, SETUP_IN, SETUP_OUT, ACQUIRE, FREE, WORKSPACE, CAPACITY = range(9)
MACHINE, BEFORE, BEFORE_END, AFTER, AFTER_END = range(9, 14)
"""What a row of facts holds. LEAST: the smallest start-to-start weight of any arc out of the
operation, machine arcs included. CAPACITY: bytes of its resource, `NO_LIMIT` where unlimited.
MACHINE: -1 for none. BEFORE to BEFORE_END: its rows of `SearchArrays.arcs` for arcs that end here,
AFTER to AFTER_END for those that begin here."""


class SearchArrays(NamedTuple):
    """What the kernels of `neighbourhoods` read; few arrays, since every kernel passes them on."""

    facts: IntArray
    """`FACTS` integers per operation, flat."""
    arcs: IntArray
    """Pairs, flat: arcs by head as (tail, lag), then by tail as (head, start-to-start weight)."""
    ends: IntArray
    """Operations that can be the last to end."""

    @classmethod
    def of(cls, graph: Schedule) -> SearchArrays:
        """Arrays of a graph whose operations hold at most one resource each."""
        n = graph.n_operations
        before, after = graph.predecessors, graph.successors
        least = graph.duration.copy()
        np.minimum.at(least, graph.arcs.tail, graph.duration[graph.arcs.tail] + graph.arcs.lag)
        machine = graph.single_resource
        memory = np.append(graph.memory, 0)[machine]
        facts = np.zeros((n, FACTS), np.int64)
        columns = {
            RELEASE: graph.release, LEAST: least, FAMILY: graph.family,
            SETUP_IN: graph.setup_in, SETUP_OUT: graph.setup_out,
            ACQUIRE: graph.acquire, FREE: graph.free, WORKSPACE: graph.workspace,
            CAPACITY: np.where(memory == 0, NO_LIMIT, memory), MACHINE: machine,
            BEFORE: before.indptr[:-1], BEFORE_END: before.indptr[1:],
            AFTER: len(before.other) + after.indptr[:-1],
            AFTER_END: len(before.other) + after.indptr[1:],
        }  # fmt: skip
        for column, values in columns.items():
            facts[:, column] = values
        other = np.concatenate([before.other, after.other])
        lag = before.weight - graph.duration[before.other]
        weight = np.concatenate([lag, after.weight])
        covered = np.zeros(n, bool)  # some successor never ends earlier
        late = graph.arcs.lag + graph.duration[graph.arcs.head] >= 0
        covered[graph.arcs.tail[late]] = True
        return cls(
            facts.ravel(), np.stack([other, weight], axis=1).ravel(), np.flatnonzero(~covered)
        )


def is_classic(graph: Schedule) -> bool:
    """Whether every operation has at most one arc in and out, and no field but duration counts.

    Such graphs get kernels without releases, lags, setups and memory.
    """
    one_in = np.diff(graph.predecessors.indptr).max(initial=0) <= 1
    one_out = np.diff(graph.successors.indptr).max(initial=0) <= 1
    plain = not (graph.arcs.lag.any() or graph.release.any() or graph.has_setups)
    return bool(one_in and one_out and plain and not has_memory(graph))


def has_memory(graph: Schedule) -> bool:
    """Whether the order on some resource can be infeasible by its bytes."""
    return bool(graph.acquire.any() or graph.free.any() or graph.workspace.any())


def order_of(graph: Schedule, sequences: Csr) -> IntArray:
    """One topological order of all operations that agrees with arcs and sequences.

    Raises
    ------
    CyclicOrder
        There is none.
    """
    from optsched.kernels import longest_path

    heads = longest_path.evaluate(graph, sequences).heads
    # arcs of weight 0 leave ties among heads, which only a walk along the arcs can break
    if (graph.successors.weight > 0).all() and (graph.duration > 0).all():
        return np.argsort(heads, kind="stable")
    from optsched.model.graph import evaluate

    return evaluate(graph, sequences).order
