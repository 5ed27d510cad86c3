"""One tabu walk: the arrays that live from slice to slice, and the calls that move it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from optsched.model.graph import machine_orders
from optsched_solvers.shop.tabu import neighbourhoods as nb
from optsched_solvers.shop.tabu import state as st
from optsched_solvers.shop.tabu.arrays import NO_LIMIT, SearchArrays, is_classic

if TYPE_CHECKING:
    from optsched.model.schedule import Csr, IntArray, Schedule

NO_TARGET = -1
TABU_ENTRIES = 2**17
"""At most; more arcs than that share entries."""


class Walk:
    """A schedule of a graph that moves by N7 tabu search.

    A schedule is given and kept as one topological order of all operations, which holds the order
    on every resource. The same calls of `load` and `run` give the same schedules, however the
    moves are cut into calls of `run`.

    Parameters
    ----------
    graph
        At most one resource per operation; deadlines are not looked at.
    seed
        Of the walk's own random numbers.
    """

    def __init__(self, graph: Schedule, seed: int = 0) -> None:
        self.graph = graph
        self.arrays = tuple(SearchArrays.of(graph))
        n = graph.n_operations
        columns = int(np.diff(graph.users.indptr).max(initial=1))
        links = np.full((n + 1, st.LINK), n, np.uint32)
        links[graph.arcs.head, st.JP] = graph.arcs.tail
        links[graph.arcs.tail, st.JS] = graph.arcs.head
        for r in range(graph.n_resources):
            links[graph.users[r], st.RANK] = np.arange(len(graph.users[r]))
        links[:, st.MARK] = 0
        self._links = links.ravel()
        self._times = np.zeros((n + 1) * st.TIME, np.int64)
        self._times[st.P :: st.TIME][:n] = graph.duration
        self._order = np.arange(n, dtype=np.uint32)
        self.state = (self._links, self._times, self._order)
        self._scratch = (
            np.zeros((nb.INDEX_ROWS, n + 3), np.uint32),
            np.zeros((nb.TIME_ROWS, n + 3), np.int64),
            np.zeros(nb.CHOICE, np.int64),
        )
        arcs = max(1, min(n * columns, TABU_ENTRIES))
        self._until = np.zeros(1 << (arcs - 1).bit_length(), np.int64)
        self.best_order = np.arange(n)
        self.control = np.zeros(nb.CONTROL, np.int64)
        self.control[nb.RANDOM] = (seed * 0x9E3779B97F4A7C15 + 0x2545F4914F6CDD1D) % 2**62 | 1
        self.control[nb.PATIENCE] = NO_LIMIT
        self.control[nb.TARGET] = NO_TARGET
        self.control[nb.COLUMNS] = columns
        self.control[nb.TENURE], self.control[nb.SPREAD] = _tenure(graph)
        self.control[nb.HAS_SETUPS] = graph.has_setups
        self._general = not is_classic(graph)

    @property
    def moves(self) -> int:
        """Moves made since the walk was made."""
        return int(self.control[nb.MOVES])

    @property
    def value(self) -> int:
        """Makespan of the present schedule."""
        return int(self.control[nb.VALUE])

    @property
    def best(self) -> int:
        """Least makespan since the last `load`; `best_order` is its schedule."""
        return int(self.control[nb.BEST])

    @property
    def order(self) -> IntArray:
        """A topological order of the present schedule."""
        return self._order.astype(np.int64)

    @property
    def heads(self) -> IntArray:
        """Head of every operation in the present schedule."""
        return (self._times[st.END :: st.TIME] - self._times[st.P :: st.TIME])[:-1]

    @property
    def tails(self) -> IntArray:
        """Tail of every operation in the present schedule, its duration included."""
        return self._times[st.Q :: st.TIME][:-1]

    @property
    def levels(self) -> IntArray:
        """Bytes held on the resource of every operation before it begins."""
        return self._times[st.LEVEL :: st.TIME][:-1]

    def load(self, order: IntArray) -> int:
        """Begin anew at a schedule, given as a topological order; returns its makespan."""
        self._order[:] = order
        last = np.full(self.graph.n_resources, len(order), np.int64)
        value: int = st.load(self.arrays, self.state, last)
        self.control[nb.VALUE] = self.control[nb.BEST] = value
        self.control[nb.STALE] = 0
        self.best_order[:] = order
        return value

    def run(self, moves: int, *, patience: int = NO_LIMIT, target: int = NO_TARGET) -> int:
        """Make up to so many moves.

        Parameters
        ----------
        moves
            Of this call.
        patience
            Ends the walk after so many moves since `load` or the last improvement.
        target
            Ends the walk at a makespan of at most this.

        Returns
        -------
        int
            `neighbourhoods.RUNNING`, or why it ended: `STUCK` (no move left) or `DONE`.
        """
        self.control[nb.PATIENCE], self.control[nb.TARGET] = patience, target
        status: int = nb.walk(
            self._general, self.arrays, self.state, self.control, self._scratch, self.best_order,
            self._until, moves,
        )  # fmt: skip
        return status

    def best_sequences(self) -> Csr:
        """The machine orders of the best schedule since the last `load`."""
        return machine_orders(self.graph, self.best_order)


def _tenure(graph: Schedule) -> tuple[int, int]:
    """Least tabu tenure, and by how much it may be longer (Zhang, Li, Guan & Rao 2007)."""
    jobs, machines = len(np.unique(graph.job)), max(1, graph.n_resources)
    least = 10 + jobs // machines
    longest = 1.4 * least if jobs <= 2 * machines else 1.5 * least
    return least, int(longest) - least
