"""Failure-directed search for the shortest schedule: proof from above, climb from below.

Two trees over the same arrays. The *proof* searches for a schedule better than the best known one,
or refutes that there is any. The *climb* raises the lower bound (`destructive`). A small gap gives
most of the work to the proof. Vilim, Laborie & Shaw (2015); edge finding and shaving:
Carlier & Pinson (1990), Martin & Shmoys (1996).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from optsched.model.schedule import Csr
from optsched.solving.limits import Limits
from optsched.solving.result import Result
from optsched_solvers._loading import load
from optsched_solvers._portfolio import SubSearch
from optsched_solvers.shop.proof.destructive import Climb
from optsched_solvers.shop.proof.state import MOST_LITERALS, n_literals
from optsched_solvers.shop.proof.tree import REFUTED, SHAVED, DisjunctiveTree
from optsched_solvers.shop.rules import supported_graph, try_rules
from optsched_solvers.shop.tabu.solver import MODULES, Tabu

if TYPE_CHECKING:
    from optsched.model.schedule import Schedule
    from optsched.solving.monitor import Monitor

SOURCE: Final = "failure-directed"

PROOF_SHARES: Final = ((0.03, 0.95), (0.06, 0.7), (0.12, 0.5), (float("inf"), 0.15))
"""(relative gap, share of the nodes for the proof up to this gap; the others are for the climb)"""

FIRST_ROUND: Final = 2000
"""Nodes of the first round of proof and climb together; rounds grow by half."""

BUILD: Final = 1.2e-6
"""Seconds a literal to make the trees; with less time the rules' schedule is the answer."""

FIRST_POLISH: Final = 30_000
"""Moves of the first tabu walk, before the first round; each further search has twice as many."""
POLISH_MOVES: Final = 8
"""Moves of tabu search for every node, which takes the time of 20 to 40 moves."""
POLISH_TIME: Final = 0.1
"""Largest share of the remaining time for one search."""


def search(graph: Schedule, limits: Limits, monitor: Monitor, *, polish: bool = True) -> Result:
    """Prove optimality, or as much as the limits allow; the status is ``"infeasible"`` or unknown.

    Takes any one-shot graph: lags, setups, memory, releases, deadlines, gangs, zero durations.
    Iterations are nodes of the tree and probes of shaving; the result then does not depend on the
    clock, and bounds of other engines are not used. `polish` improves schedules by tabu search now
    and then; pass False if another engine searches for schedules.
    """
    if graph.n_operations == 0:
        monitor.incumbent(Csr.of([[]] * graph.n_resources), 0, SOURCE)
        return Result("unknown")
    nodes = limits.iterations
    if monitor.solution is None and supported_graph(graph):
        tried = try_rules(graph, limits, monitor)
        nodes = None if nodes is None else nodes - tried
    literals = n_literals(graph)
    if monitor.should_stop() or nodes == 0 or literals > MOST_LITERALS:
        return Result("unknown")
    if monitor.remaining < BUILD * literals and monitor.objective is not None:
        return Result("unknown")
    return _Search(graph, limits.seed, nodes, monitor, polish).run()


class _Search:
    """Rounds of polishing, proof and climb, until they meet or a limit is reached."""

    def __init__(
        self, graph: Schedule, seed: int, nodes: int | None, monitor: Monitor, polish: bool
    ) -> None:
        self.graph, self.seed, self.most, self.monitor = graph, seed, nodes, monitor
        self.proof = DisjunctiveTree(graph, stop=self._stop, on_leaf=self._found)
        self.climb_tree = DisjunctiveTree(graph, stop=self._stop)
        self.upper = self.proof.horizon + 1
        self.lower = 0
        if monitor.objective is not None:
            self.upper = min(self.upper, monitor.objective)
        self.sequences = monitor.solution
        self.lower = monitor.lower_bound or 0
        self.climb: Climb | None = None
        self.alone = nodes is not None
        self.polishes = polish and bool(Tabu().supports(graph))
        self.polishes_done = self.moves = 0
        self.rooted = False
        self.proving = self.upper  # upper bound when the root of the proof was last computed
        self.reported = 0

    def run(self) -> Result:
        """Work until proof or limit."""
        if not self.proof.possible:
            return self._refuted()
        self._polish()
        nodes = float(FIRST_ROUND)
        self.climb = Climb(
            self.climb_tree, self.lower, self.upper, on_bound=self._bound, on_schedule=self._found
        )
        self.climb.work(0)  # by propagation alone
        while not self._over():
            gap = (self.upper - self.lower) / max(1, self.lower)
            share = next(share for most, share in PROOF_SHARES if gap <= most)
            if self._prove(self._allowed(share * nodes)):
                return self._refuted()
            if self._over():
                break
            self.climb.lower, self.climb.upper = self.lower, self.upper
            if self.climb.work(self._allowed((1 - share) * nodes)):
                break
            self._polish()
            nodes *= 1.5
        if self.lower >= self.upper and self.sequences is None:
            return self._refuted()
        self._bound(self.lower)
        self._advance()
        return Result("unknown")

    def _prove(self, nodes: int) -> bool:
        """Search below the best schedule; whether it is refuted that a better one exists."""
        tree = self.proof
        end = tree.nodes + nodes
        if self.upper < self.proving or not self.rooted:  # shaving finds more with a lower target
            if self.rooted and not tree.keep_root():
                return True
            self.rooted, self.proving = True, self.upper
            if not tree.reset(self.upper - 1):
                return True
        answer = tree.shave(end)
        if answer == SHAVED and tree.nodes < end:
            answer = tree.search(end)
        return answer == REFUTED

    def _refuted(self) -> Result:
        """No schedule ends by the proof's target."""
        self._advance()
        if self.sequences is None:
            return Result("infeasible", reason="tree search proved that no schedule exists")
        self._bound(self.proof.target + 1 if self.proof.possible else self.upper)
        return Result("unknown")

    # callbacks of the trees

    def _found(self, sequences: Csr, makespan: int) -> None:
        if makespan >= self.upper:
            return
        self.upper, self.sequences = makespan, sequences
        self.proof.lower(makespan - 1)
        self.monitor.incumbent(sequences, makespan, SOURCE)

    def _bound(self, value: int) -> None:
        self.lower = max(self.lower, value)
        if self.sequences is not None:  # else it may be the horizon of something infeasible
            self.monitor.bound(min(self.lower, self.upper), SOURCE)

    def _import_results(self) -> None:
        """Use schedules and bounds of other engines."""
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

    def _stop(self) -> bool:
        self._import_results()
        return self._over()

    def _over(self) -> bool:
        spent = self.most is not None and self._nodes() >= self.most
        return spent or self.lower >= self.upper or self.monitor.should_stop()

    def _nodes(self) -> int:
        return self.proof.nodes + self.climb_tree.nodes

    def _advance(self) -> None:
        nodes = self._nodes()
        self.monitor.advance(nodes - self.reported)
        self.reported = nodes

    def _allowed(self, nodes: float) -> int:
        if self.most is None:
            return int(nodes)
        return min(int(nodes), max(0, self.most - self._nodes()))

    def _polish(self) -> None:
        """Tabu search from the best schedule, if there were enough nodes since the last one."""
        if not self.polishes or self.sequences is None or self._over():
            return
        if self.moves > FIRST_POLISH + POLISH_MOVES * self._nodes():
            return
        if not load(self.monitor, *MODULES):
            return
        moves = max(FIRST_POLISH, self.moves)
        self.moves += moves
        self.polishes_done += 1
        remaining, seconds = self.monitor.remaining, None
        if not self.alone and remaining < float("inf"):
            seconds = max(0.1, POLISH_TIME * remaining)
        seed = (self.seed + self.polishes_done) % 2**31
        limits = Limits(time_limit=seconds, iterations=moves, seed=seed)
        search = SubSearch(limits, self._over)
        search.incumbent(self.sequences, self.upper)
        search.bound(self.lower)
        Tabu().solve(self.graph, limits, search)
        makespan, sequences = search.best
        if makespan is not None and sequences is not None:
            self._found(sequences, makespan)
        self._import_results()
