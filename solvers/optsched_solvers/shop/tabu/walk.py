"""One tabu walk: the state that lives from slice to slice, and the calls that move it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from optsched.model.graph import machine_orders
from optsched_solvers.shop.tabu import neighbourhoods, state
from optsched_solvers.shop.tabu.state import NO_LIMIT

if TYPE_CHECKING:
    from optsched.model.schedule import Csr, IntArray, Schedule

NO_TARGET = -1


class Walk:
    """A schedule of a graph that moves by N7 tabu search.

    A schedule is given and kept as one topological order of all operations, which holds the order
    on every resource. The same calls of `load` and `run` give the same schedules, however the
    moves are cut into calls of `run`. Operations hold at most one resource; deadlines are ignored.
    """

    def __init__(self, graph: Schedule, seed: int = 0) -> None:
        self.graph = graph
        self.state = state.state_of(graph, seed)
        self.control = self.state.control[0]
        self._general = not state.is_classic(graph)

    @property
    def moves(self) -> int:
        """Moves made since the walk was made."""
        return int(self.control["moves"])

    @property
    def value(self) -> int:
        """Makespan of the present schedule."""
        return int(self.control["value"])

    @property
    def best(self) -> int:
        """Least makespan since the last `load`; `best_order` is its schedule."""
        return int(self.control["best"])

    @property
    def best_order(self) -> IntArray:
        """A topological order of the best schedule since the last `load`."""
        return self.state.best_order

    @property
    def order(self) -> IntArray:
        """A topological order of the present schedule."""
        return self.state.order.astype(np.int64)

    def load(self, order: IntArray) -> int:
        """Begin at a schedule, given as a topological order; returns its makespan."""
        self.state.order[:] = order
        last = np.full(self.graph.n_resources, len(order), np.int64)
        value: int = state.load(self.state, last)
        self.control["value"] = self.control["best"] = value
        self.control["stale"] = 0
        self.state.best_order[:] = order
        return value

    def run(self, moves: int, *, patience: int = NO_LIMIT, target: int = NO_TARGET) -> int:
        """Make up to so many moves.

        Parameters
        ----------
        moves
            Limit of this call.
        patience
            Ends the walk after so many moves since `load` or the last improvement.
        target
            Ends the walk at a makespan of at most this.

        Returns
        -------
        int
            `neighbourhoods.RUNNING`, or why it ended: `STUCK` (no move left) or `DONE`.
        """
        self.control["patience"], self.control["target"] = patience, target
        status: int = neighbourhoods.walk(self._general, self.state, moves)
        return status

    def best_sequences(self) -> Csr:
        """Machine orders of the best schedule since the last `load`."""
        return machine_orders(self.graph, self.best_order)
