"""Giffler-Thompson branch and bound: the tree over "which operation comes next on this machine".

The method of ArrayPipe's Algorithm 1, made exact. It is the reference and the teaching version:
expect proofs up to about ten jobs on five machines.
`optsched_solvers.shop.proof.failure_directed` proves far more.
"""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING, Final, TypeAlias

import numpy as np

from optsched.kernels import longest_path
from optsched.model import bounds as core
from optsched.model.graph import evaluate
from optsched.model.schedule import NO_DEADLINE, Arcs, IntArray, Rows, Schedule
from optsched.solving.result import Result
from optsched_solvers.literature import giffler_thompson_node as at_node
from optsched_solvers.literature import giffler_thompson_tree as in_tree
from optsched_solvers.literature.giffler_thompson_node import INFINITE, NO_LIMIT
from optsched_solvers.shop.proof.one_machine import one_machine_bound
from optsched_solvers.shop.proof.symmetry import ordered_alike
from optsched_solvers.shop.rules import try_rules

if TYPE_CHECKING:
    from collections.abc import Iterable

    import numpy.typing as npt

    from optsched.solving.limits import Limits
    from optsched.solving.monitor import Monitor

Table: TypeAlias = "npt.NDArray[np.int64]"

CARLIER_NODES: Final = 30
"""Schrage schedules that a machine of a node is worth, where Jackson's bound does not cut it."""

CARLIER_EFFORT: Final = 6000  # the same times operations of the machine: fewer on large ones

MOST_NODES: Final = 2**22
"""Open nodes and their ancestors (0.4 GB) after which best first becomes depth first."""

STACK: Final = 2**16
"""Nodes by which that many grow at a time: more than depth first adds as a rule."""

NAME: Final = "giffler-thompson"
"""The engine behind incumbents and bounds."""

ROOT_EFFORT: Final = 20_000  # nodes of Carlier's method x operations, per machine

BUILD: Final = 40e-6  # seconds per operation until the first node

SLICE: Final = 0.008  # seconds between two looks at the limits


def search(
    graph: Schedule,
    limits: Limits,
    monitor: Monitor,
    *,
    order: str = "depth",
    width: int = 0,
    as_printed: bool = False,
    symmetry: bool = True,
) -> Result:
    """Explore the tree until a proof or a limit; one iteration is one node, or a rule tried before.

    Parameters
    ----------
    graph
        One-shot disjunctive graph of at most one resource per operation.
    limits, monitor
        As for every engine. Without a schedule in the monitor the tree starts from the dispatching
        rules; a beam does not, so that what it gives is its own.
    order, width, as_printed, symmetry
        See `Tree`, `order` is its `search`.

    Returns
    -------
    Result
        ``"unknown"``: all is with the monitor. ``"infeasible"``: the whole tree holds nothing.
    """
    tried = 0
    if not width and monitor.objective is None:
        tried = try_rules(graph, limits, monitor)
    too_late = monitor.remaining < BUILD * graph.n_operations
    if too_late and monitor.objective is None:
        try_rules(graph, limits, monitor)
    if too_late or (monitor.objective is not None and monitor.should_stop()):
        return Result("unknown")
    most_users = int(np.diff(graph.users.indptr).max(initial=1))
    monitor.bound(one_machine_bound(graph, ROOT_EFFORT // most_users + 1), NAME)
    tree = Tree(graph, search=order, width=width, as_printed=as_printed, symmetry=symmetry)
    _run(tree, limits, monitor, tried)
    if tree.is_beam:
        if monitor.objective is None:  # every node of some level was a dead end
            try_rules(graph, limits, monitor)
    elif tree.exhausted:
        if tree.upper == INFINITE and monitor.objective is None:
            return Result("infeasible", reason=NOTHING_FOUND)
        monitor.bound(tree.upper, NAME)
    return Result("unknown")


NOTHING_FOUND: Final = (
    "no order of the operations keeps every deadline and memory limit (all were tried)"
)


def _run(tree: Tree, limits: Limits, monitor: Monitor, tried: int) -> None:
    """Explore slice by slice; report what is found to the monitor."""
    repeatable = limits.iterations is not None
    most = INFINITE if limits.iterations is None else max(0, limits.iterations - tried)
    known, proved = monitor.objective, monitor.lower_bound or 0
    reported, steps, slices = INFINITE, 1, 0
    while True:
        if not repeatable:  # what other engines found meanwhile
            known, proved = monitor.objective, monitor.lower_bound or 0
        if known is not None:
            tree.cut(known)
        left = min(steps, most - tree.nodes)
        begin = time.perf_counter()
        done = tree.explore(left, max(proved, limits.target or 0))
        spent = time.perf_counter() - begin
        monitor.advance(done)
        if tree.value < reported:
            reported, orders = tree.value, tree.best()
            value = longest_path.evaluate(tree.graph, orders).makespan
            monitor.incumbent(orders, value, NAME)
        if tree.exhausted:
            return
        over, slices = tree.nodes >= most or monitor.should_stop(), slices + 1
        # looking at millions of open nodes takes longer than a slice
        if not tree.is_beam and (over or slices % (1 + tree.n_open // STACK) == 0):
            monitor.bound(min(tree.lower_bound(), tree.upper), NAME)
        if over or monitor.proved:
            return
        # how the search is cut into slices has no influence on it
        if done == left:
            steps = max(1, min(2 * steps, int(steps * SLICE / max(spent, 1e-6))))


class Tree:
    """One search tree and where it stands; `explore` goes on from there.

    A node fixes the first operations of every machine. Its children: on the machine of the ready
    operation o* of least end, each operation that may come next. Whoever could start only when o*
    and the setup behind it are over is left out, where setups are triangular and o* takes no bytes
    that others might need; elsewhere every candidate is a child (Giffler and Thompson's cut-off
    loses the optimum there). Bound of a node: the longest path, memory x time, and per machine
    Jackson's preemptive schedule, or Carlier's where that could cut.

    Parameters
    ----------
    graph
        One-shot disjunctive graph of at most one resource per operation.
    search
        ``"depth"``: children by (bound, head, id); ``"best"``: least bound of all open nodes first.
    width
        Keep so many best nodes of each level and never go back: a beam, which proves nothing. 1 is
        the paper's Algorithm 1. 0: the whole tree.
    as_printed
        The paper's ``<=``: of equal nodes of a level the last is kept, not the one of least head.
    carlier
        Schrage schedules per machine and node; 0: Jackson's bound only.
    symmetry
        Order identical jobs, where that loses nothing.

    Attributes
    ----------
    nodes
        Nodes bounded so far.
    value
        Makespan of the best leaf so far; `at_node.INFINITE` without one.
    exhausted
        Nothing is left to explore: no schedule is better than the least upper bound given, or
        found (not so for a beam).
    """

    def __init__(
        self,
        graph: Schedule,
        *,
        search: str = "depth",
        width: int = 0,
        as_printed: bool = False,
        carlier: int = CARLIER_NODES,
        symmetry: bool = True,
    ) -> None:
        self.graph = with_symmetry_broken(graph) if symmetry else graph
        self.is_beam = width > 0
        self._graph = _graph_tables(self.graph, graph)
        self._state = _state(self.graph)
        self._search = _search(self.graph)
        scalars = self._scalars
        discipline = in_tree.BEST_FIRST if search == "best" else in_tree.DEPTH_FIRST
        if self.is_beam:
            discipline = in_tree.AS_PRINTED if as_printed else in_tree.BEAM
        scalars[in_tree.DISCIPLINE], scalars[in_tree.WIDTH] = discipline, width
        most_users = int(np.diff(graph.users.indptr).max(initial=1))
        scalars[in_tree.CARLIER] = min(carlier, CARLIER_EFFORT // most_users)
        self.exhausted = not len(graph.users.ids)
        if self.exhausted:  # no machine, nothing to decide
            scalars[in_tree.BEST] = self._state[-1][at_node.LONGEST]

    @property
    def _scalars(self) -> IntArray:
        return self._search[-1]

    @property
    def nodes(self) -> int:
        """Nodes bounded so far."""
        return int(self._scalars[in_tree.NODES])

    @property
    def n_open(self) -> int:
        """Nodes bounded and not explored yet."""
        return int(self._scalars[in_tree.N_OPEN])

    @property
    def value(self) -> int:
        """Makespan of the best leaf so far; `INFINITE` without one."""
        return int(self._scalars[in_tree.BEST])

    @property
    def upper(self) -> int:
        """Only schedules below this are still looked for; `INFINITE` in a beam."""
        return int(self._scalars[in_tree.UPPER])

    def best(self) -> Rows:
        """Orders of the best leaf; meaningless before one was found."""
        return Rows(self.graph.users.indptr, self._search[2].copy())

    def lower_bound(self) -> int:
        """Least bound of the open nodes: no schedule that is still to be found is better.

        Schedules already known may be: the minimum of both is a bound of the problem.
        """
        node, scalars = self._search[0], self._scalars
        found = node[in_tree.BOUND]
        is_open = node[in_tree.OPEN, : self.n_open]
        if scalars[in_tree.DISCIPLINE] == in_tree.BEST_FIRST:
            is_open = is_open[:1]
        least = int(found[is_open].min(initial=INFINITE))
        if scalars[in_tree.PHASE] != in_tree.TO_PICK:
            least = min(least, int(found[scalars[in_tree.NODE]]))
        return least

    def cut(self, upper: int) -> None:
        """Look only for schedules below `upper` from now on; a beam keeps to its way."""
        if not self.is_beam:
            self._scalars[in_tree.UPPER] = min(upper, self.upper)

    def explore(self, steps: int, goal: int = 0) -> int:
        """Bound up to `steps` further nodes; stop early at a leaf of value <= `goal`.

        Returns
        -------
        int
            How many were bounded. The way the search takes depends only on what `cut` was told,
            and when in terms of nodes, not on how it is sliced.
        """
        begin = self.nodes
        while not self.exhausted:
            left = steps - (self.nodes - begin)
            why = in_tree.explore(self._graph, self._state, self._search, left, goal)
            if why in (in_tree.SLICE_OVER, in_tree.GOAL_MET):
                break
            self.exhausted = why == in_tree.EXHAUSTED
            if why == in_tree.TRAIL_FULL:
                trail = self._state[3]
                self._state = (*self._state[:3], _longer(trail, trail.shape[1]), *self._state[4:])
            elif why == in_tree.NODES_FULL:
                size = self._search[0].shape[1]
                if size >= MOST_NODES:
                    self._dive()
                table = _longer(self._search[0], size if size < MOST_NODES else STACK)
                self._search = (table, *self._search[1:])
        return self.nodes - begin

    def _dive(self) -> None:
        """Go on depth first from the best of the open nodes: their number grows no more."""
        node, scalars = self._search[0], self._scalars
        if scalars[in_tree.DISCIPLINE] == in_tree.BEST_FIRST:
            scalars[in_tree.DISCIPLINE] = in_tree.DEPTH_FIRST
            is_open = node[in_tree.OPEN, : scalars[in_tree.N_OPEN]]
            keys = (in_tree.SERIAL, in_tree.FIRST_TIE, in_tree.BOUND)
            is_open[:] = is_open[np.lexsort([node[key, is_open] for key in keys])[::-1]]


def with_symmetry_broken(graph: Schedule) -> Schedule:
    """The graph with an arc between identical jobs' blocks where `ordered_alike` allows it.

    Its optimum is the same.
    """
    resource = graph.single_resource
    pairs = [(i, k) for i, k in ordered_alike(graph) if resource[i] >= 0]
    if not pairs:
        return graph
    extra = np.array([(i, k, 0, 0) for i, k in pairs], np.int64)
    arcs = Arcs(*(np.concatenate([a, extra[:, c]]) for c, a in enumerate(graph.arcs)))
    return replace(graph, arcs=arcs)


def is_triangular(graph: Schedule, on: IntArray) -> bool:
    """Whether s(a, c) <= s(a, b) + p_b + s(b, c) for all of these operations.

    Only triples with two equal families can fail, so per family the largest setup out (in) is
    compared with the smallest duration + setup out (in).
    """
    if not graph.has_setups:
        return True
    family = graph.family[on]
    for setup in (graph.setup_out[on], graph.setup_in[on]):
        for f in np.unique(family):
            of = family == f
            if of.sum() > 1 and setup[of].max() > (graph.duration[on] + setup)[of].min():
                return False
    return True


def _graph_tables(graph: Schedule, given: Schedule) -> tuple[Table, Table, Table, Table]:
    """What `at_node.GRAPH` names, read-only; `given` is the graph without the arcs of symmetry.

    Paths between operations are looked for in that one: they stay within a job, and are few.
    """
    paths, users, n = core.longest_arcs(graph), graph.users, graph.n_operations
    after, before = graph.successors, graph.predecessors
    longer = graph.duration.copy()
    for r, loss in enumerate(core.setup_loss(given)):
        longer[users[r]] += loss
    rows = [users[r] for r in range(graph.n_resources)]
    tidy, held_from, held = _held(given)
    operations = (
        graph.duration, graph.single_resource, graph.family, graph.setup_in, graph.setup_out,
        graph.acquire, graph.free, graph.workspace, paths.tail, _latest(graph), longer,
        longer - paths.tail, after.indptr, before.indptr,
    )  # fmt: skip
    resources = (
        users.indptr, np.where(graph.memory == 0, NO_LIMIT, graph.memory),
        [graph.workspace[on].max(initial=0) for on in rows],
        [is_triangular(graph, on) for on in rows], tidy, held_from,
    )  # fmt: skip
    tables = (
        _table(operations, n + 1),
        _table((after.other, after.weight, before.other), len(after.other)),
        _table(resources, graph.n_resources + 1),
        held,
    )
    for table in tables:
        table.flags.writeable = False
    return tables


def _latest(graph: Schedule) -> IntArray:
    """Latest start of every operation by its own deadline and those behind it."""
    latest = np.where(graph.deadline == NO_DEADLINE, INFINITE, graph.deadline - graph.duration)
    if (graph.deadline != NO_DEADLINE).any():
        after = graph.successors
        for i in evaluate(graph).order[::-1].tolist():
            arcs = slice(after.indptr[i], after.indptr[i + 1])
            in_time = latest[after.other[arcs]] - after.weight[arcs]
            latest[i] = min(latest[i], in_time.min(initial=INFINITE))
    return latest


def _table(rows: Iterable[npt.ArrayLike], width: int) -> Table:
    """Rows of at most this width, filled up with zeros."""
    arrays = [np.asarray(row, np.int64) for row in rows]
    table = np.zeros((len(arrays), width), np.int64)
    for k, row in enumerate(arrays):
        table[k, : len(row)] = row
    return table


def _held(graph: Schedule) -> tuple[list[bool], IntArray, Table]:
    """Per resource whether bytes are freed by who must come later; then residences by resource.

    Those as CSR pointers and a table: bytes, who takes them, who frees them, least time between.
    """
    reach: dict[int, dict[int, int]] = {}
    held = core.holdings(graph)
    tidy = [
        not graph.free[graph.users[r]].any() or core.frees_in_order(graph, r, held, reach)
        for r in range(graph.n_resources)
    ]
    rows = sorted(
        (r, size, i, k, reach[i][k] + int(graph.duration[k]))
        for r, size, i, k in held if k >= 0 and tidy[r] and graph.memory[r]
    )  # fmt: skip
    table = np.array(rows, np.int64).reshape(-1, 5)
    pointers = np.searchsorted(table[:, 0], np.arange(graph.n_resources + 1))
    return tidy, pointers.astype(np.int64), np.ascontiguousarray(table[:, 1:].T)


def _state(graph: Schedule) -> tuple[Table, Table, Table, Table, IntArray, IntArray]:
    """What `at_node.STATE` names, at the root: nothing is sequenced."""
    n, users, paths = graph.n_operations, graph.users, core.longest_arcs(graph)
    var = np.zeros((at_node.N_VAR, n + 1), np.int64)
    var[at_node.HEAD, :n], var[at_node.POSITION] = paths.head, -1
    wait, settled = var[at_node.WAIT, :n], var[at_node.SETTLED]
    wait[:] = np.diff(graph.predecessors.indptr)
    after, free = graph.successors, np.flatnonzero(graph.single_resource < 0)
    # without resource, and behind such only: settled for good
    for i in evaluate(graph).order.tolist() if len(free) else []:
        if wait[i] == 0 and graph.single_resource[i] < 0:
            settled[i] = 1
            np.subtract.at(wait, after.other[after.indptr[i] : after.indptr[i + 1]], 1)
    use = np.zeros((at_node.N_USE, graph.n_resources), np.int64)
    use[at_node.N_LEFT] = np.diff(users.indptr)
    for r in range(graph.n_resources):
        var[at_node.PLACE, users[r]] = np.arange(len(users[r]))
        use[at_node.NEED, r] = graph.acquire[users[r]].sum()
    slots = np.zeros((2, len(users.ids)), np.int64)
    slots[at_node.LEFT] = users.ids
    counters = np.zeros(at_node.N_COUNTERS, np.int64)
    counters[at_node.LONGEST] = paths.makespan
    trail = np.zeros((2, 4 * n + 256), np.int64)
    return var, slots, use, trail, np.zeros(3 * n, np.int64), counters


def _search(graph: Schedule) -> tuple[Table, Table, IntArray, IntArray]:
    """What `at_node.SEARCH` names, with nothing but the root, which is open."""
    most = int(np.diff(graph.users.indptr).max(initial=0))
    scalars = np.zeros(in_tree.N_SCALARS, np.int64)
    scalars[in_tree.UPPER] = scalars[in_tree.BEST] = INFINITE
    scalars[in_tree.N_USED] = scalars[in_tree.N_OPEN] = 1
    return (
        np.zeros((in_tree.N_NODE, 1024 + 4 * most), np.int64),
        np.zeros((at_node.N_CANDIDATE, most), np.int64),
        np.zeros(len(graph.users.ids), np.int64),
        scalars,
    )


def _longer(table: Table, more: int) -> Table:
    longer = np.empty((len(table), table.shape[1] + more), np.int64)
    longer[:, : table.shape[1]] = table  # the rest is written before it is read
    return longer
