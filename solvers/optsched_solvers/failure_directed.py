"""Failure-directed search for the shortest schedule: proof from above, climb from below.

Two trees over the same arrays. The *proof* asks for a schedule better than the best known one: it
finds one, or refutes that there is any. The *climb* raises the lower bound (`destructive`). A small
gap gives most of the work to the proof. Vilim, Laborie & Shaw (2015); edge finding and shaving:
Carlier & Pinson (1990), Martin & Shmoys (1996).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

from optsched.result import Result
from optsched.schedule import NO_DEADLINE, Rows
from optsched_solvers.destructive import Climb
from optsched_solvers.disjunctive_state import MOST_LITERALS, n_literals
from optsched_solvers.disjunctive_tree import REFUTED, SHAVED, DisjunctiveTree
from optsched_solvers.rules import supported_graph, try_rules

if TYPE_CHECKING:
    from optsched.limits import Limits
    from optsched.monitor import Monitor
    from optsched.schedule import Schedule

SOURCE: Final = "failure-directed"

SMALL_GAP: Final = 0.03
"""Up to this relative gap the proof gets `PROOF_SHARE` of all nodes, above it the rest."""
PROOF_SHARE: Final = 0.75
FIRST_ROUND: Final = 2000
"""Nodes of the first round of proof and climb together; rounds grow by half."""

FIRST_POLISH: Final = 20_000
"""Moves of tabu search before the first round."""
POLISH_MOVES: Final = 5
"""Moves of tabu search for every node; a node takes as long as about twenty."""
POLISH_SLICE: Final = 4000


def search(graph: Schedule, limits: Limits, monitor: Monitor, *, polish: bool = True) -> Result:
    """Prove optimality, or as much as the limits allow.

    Parameters
    ----------
    graph
        One-shot graph: lags, setups, memory, releases, deadlines, gangs, zero durations.
    limits
        ``iterations`` are nodes of the tree and probes of shaving; what comes of them does not
        depend on the clock.
    monitor
        Gets schedules and bounds as they are found. Without an iteration limit those of other
        engines are used as soon as they are there.
    polish
        Improve schedules by tabu search now and then, where that takes the graph. Pass False if
        another engine looks for schedules.

    Returns
    -------
    Result
        Status ``"infeasible"`` if that was proved, else ``"unknown"``: see the monitor.
    """
    if graph.n_operations == 0:
        monitor.incumbent(Rows.of([[]] * graph.n_resources), 0, SOURCE)
        return Result("unknown")
    if monitor.sequences is None and supported_graph(graph):
        try_rules(graph, limits, monitor)
    if monitor.should_stop() or limits.iterations == 0 or n_literals(graph) > MOST_LITERALS:
        return Result("unknown")
    return _Search(graph, limits, monitor, polish).run()


class _Search:
    """Rounds of polishing, proof and climb, until they meet or a limit is reached."""

    def __init__(self, graph: Schedule, limits: Limits, monitor: Monitor, polish: bool) -> None:
        self.graph, self.limits, self.monitor = graph, limits, monitor
        self.proof = DisjunctiveTree(graph, stop=self._stop_proof, on_leaf=self._found)
        self.climb_tree = DisjunctiveTree(graph, stop=self._stop_climb)
        self.upper = self.proof.horizon + 1
        self.lower = 0
        if monitor.objective is not None:
            self.upper = min(self.upper, monitor.objective)
        self.sequences = monitor.sequences
        self.lower = monitor.lower_bound or 0
        self.climb: Climb | None = None
        self.alone = limits.iterations is not None
        self.polishes = polish and _can_polish(graph)
        self.polished = 0
        self.told = 0

    def run(self) -> Result:
        """Work until proof or limit."""
        if not self.proof.possible:
            return self._refuted()
        self._polish(FIRST_POLISH)
        tree, nodes = self.proof, float(FIRST_ROUND)
        begun = False
        self.climb = Climb(
            self.climb_tree, self.lower, self.upper, on_bound=self._bound, on_schedule=self._found
        )
        self.climb.work(0)  # by propagation alone
        while not self._over():
            share = PROOF_SHARE if self._gap() <= SMALL_GAP else 1 - PROOF_SHARE
            if not begun:
                begun = True
                if not tree.reset(self.upper - 1):
                    return self._refuted()
            if self._prove(self._allowed(share * nodes)):
                return self._refuted()
            if self._over():
                break
            self.climb.lower, self.climb.upper = self.lower, self.upper
            if self.climb.work(self._allowed((1 - share) * nodes)):
                break
            self._polish(int(POLISH_MOVES * nodes))
            nodes *= 1.5
        if self.lower >= self.upper and self.sequences is None:
            return self._refuted()
        self._bound(self.lower)
        self._advance()
        return Result("unknown")

    def _prove(self, nodes: int) -> bool:
        """Some work below the best schedule; whether nothing is there."""
        tree = self.proof
        end = tree.nodes + nodes
        tree.lower(self.upper - 1)
        if not tree.shaved:
            answer = tree.shave(end)
            if answer != SHAVED:
                return answer == REFUTED
        return tree.nodes < end and tree.search(end) == REFUTED

    def _refuted(self) -> Result:
        """No schedule ends by the proof's target."""
        self._advance()
        if self.sequences is None:
            return Result("infeasible", reason="tree search proved that no schedule exists")
        self._bound(self.proof.target + 1 if self.proof.possible else self.upper)
        return Result("unknown")

    # what the trees report and ask

    def _found(self, sequences: Rows, makespan: int) -> None:
        if makespan >= self.upper:
            return
        self.upper, self.sequences = makespan, sequences
        self.proof.lower(makespan - 1)
        self.monitor.incumbent(sequences, makespan, SOURCE)

    def _bound(self, value: int) -> None:
        self.lower = max(self.lower, value)
        if self.sequences is not None:  # else it may be the horizon of something infeasible
            self.monitor.bound(min(self.lower, self.upper), SOURCE)

    def _look_around(self) -> None:
        """Take what other engines have found."""
        self._advance()
        if self.alone:
            return
        value, sequences = self.monitor.best
        if value is not None and value < self.upper:
            self.upper, self.sequences = value, sequences
            self.proof.lower(value - 1)
        self.lower = max(self.lower, self.monitor.lower_bound or 0)
        if self.climb is not None:
            self.climb.lower = max(self.climb.lower, self.lower)
            self.climb.upper = min(self.climb.upper, self.upper)

    def _stop_proof(self) -> bool:
        self._look_around()
        return self._over()

    def _stop_climb(self) -> bool:
        self._look_around()
        return self._over()

    def _over(self) -> bool:
        spent = self.limits.iterations is not None and self._nodes() >= self.limits.iterations
        return spent or self.lower >= self.upper or self.monitor.should_stop()

    def _nodes(self) -> int:
        return self.proof.nodes + self.climb_tree.nodes

    def _advance(self) -> None:
        nodes = self._nodes()
        self.monitor.advance(nodes - self.told)
        self.told = nodes

    def _allowed(self, nodes: float) -> int:
        if self.limits.iterations is None:
            return int(nodes)
        return min(int(nodes), max(0, self.limits.iterations - self._nodes()))

    def _gap(self) -> float:
        return (self.upper - self.lower) / max(1, self.lower)

    def _polish(self, moves: int) -> None:
        """Tabu moves from the best schedule, in short walks."""
        if not self.polishes or self.sequences is None:
            return
        from optsched_solvers import tabu

        while moves > 0 and not self._over():
            self.polished += 1
            seed = (self.limits.seed + self.polished) % 2**31
            sequences, makespan = tabu.polish(
                self.graph, self.sequences, min(moves, POLISH_SLICE), seed
            )
            self._found(sequences, makespan)
            self._look_around()
            moves -= POLISH_SLICE


def _can_polish(graph: Schedule) -> bool:
    single = bool((np.diff(graph.op_resources.indptr) <= 1).all())
    return single and not bool((graph.deadline != NO_DEADLINE).any())
