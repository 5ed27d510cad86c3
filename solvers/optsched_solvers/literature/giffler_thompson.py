"""ArrayPipe's Algorithm 1: active schedules, bounded by exact one-machine problems.

A node is a partial schedule in the disjunctive graph. Its children are the operations that can come
next on the machine of the earliest possible end (Giffler & Thompson 1960). A node is bounded by
1|r_j|Lmax on every machine: release dates are heads, due dates follow from tails, and Carlier's
algorithm (1982) solves it exactly. `branch_and_bound` proves far more; this one is short.
"""

from __future__ import annotations

from itertools import pairwise
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from optsched.io.values import integer
from optsched.model.graph import evaluate
from optsched.model.memory_bounds import frees_in_order, holdings
from optsched.model.objectives import MAKESPAN
from optsched.model.schedule import NO_DEADLINE, Csr
from optsched.solving.result import Result
from optsched.solving.solver import Support
from optsched_solvers._loading import load
from optsched_solvers.shop import rules

if TYPE_CHECKING:
    from collections.abc import Mapping

    from optsched.model.schedule import IntArray, Problem, Schedule
    from optsched.solving.limits import Limits
    from optsched.solving.monitor import Monitor


class Node(NamedTuple):
    """Scheduled operations in their order, and the earliest start of every operation."""

    bound: int
    placed: tuple[int, ...]
    head: list[int]


class GifflerThompson:
    """Branch on the next operation of the machine of the earliest possible end."""

    name = "giffler_thompson"
    options: Mapping[str, str] = MappingProxyType(
        {
            "children": "children explored of every node, those of the least bounds (default all; "
            "1 is Algorithm 1 as printed, which proves nothing)"
        }
    )

    def supports(self, problem: Problem) -> Support:
        """One iteration, at most one machine an operation, no setups, memory or deadlines."""
        goal = rules.supported_objective(problem, MAKESPAN)
        if not goal:
            return goal
        graph = problem.graph()
        for what, is_used in (
            ("setups", graph.has_setups),
            ("deadlines", bool((graph.deadline != NO_DEADLINE).any())),
            ("memory limits", bool(graph.memory.any())),
        ):
            if is_used:
                return Support(False, f"{what} are not kept by Giffler and Thompson's tree")
        support, held = rules.supported_graph(graph), holdings(graph)
        if support and not all(
            frees_in_order(graph, r, held, {}) for r in range(graph.n_resources)
        ):
            return Support(False, "bytes might be freed before they are taken")
        return support

    def solve(self, problem: Problem, limits: Limits, monitor: Monitor) -> Result:
        """Explore until a proof or a limit; one iteration is a rule's schedule or a node."""
        width = integer("options.children", limits.options.get("children", 2**31), 1, 2**31)
        graph, made = problem.graph(), 0
        if monitor.objective is None and width > 1:
            made = rules.try_rules(graph, limits, monitor)
        if not load(monitor, "shop.proof.one_machine"):
            return Result("unknown")
        tree = Tree(graph)
        open_nodes = [tree.node((), graph.release.tolist())]
        monitor.bound(open_nodes[0].bound, self.name)
        # invariant: every schedule below the incumbent completes an open node, unless one was cut
        is_cut = False
        while open_nodes:
            node = open_nodes.pop()
            if monitor.objective is not None and node.bound >= monitor.objective:
                continue
            if len(node.placed) == graph.n_operations:
                monitor.incumbent(tree.orders(node), node.bound, self.name)
                continue
            children = []
            for i in tree.conflict(node):
                if made == limits.iterations or monitor.should_stop():
                    return Result("unknown")
                children.append(tree.child(node, i))
                monitor.advance(1)
                made += 1
            children.sort(reverse=True)  # the least bound is explored first
            is_cut = is_cut or len(children) > width
            open_nodes += children[-width:]
        if monitor.objective is not None and not is_cut:
            monitor.bound(monitor.objective, self.name)
        return Result("unknown")


class Tree:
    """The disjunctive graph of all nodes, and the bound of a node."""

    def __init__(self, graph: Schedule) -> None:
        n, after, paths = graph.n_operations, graph.successors, evaluate(graph)
        # an operation without a resource has a machine of its own
        self.machine = np.where(
            graph.single_resource < 0, graph.n_resources + np.arange(n), graph.single_resource
        ).tolist()
        self.users: list[IntArray] = [graph.users[r] for r in range(graph.n_resources)]
        self.order = paths.order.tolist()
        self.durations, self.tails = graph.duration, paths.tail  # tails include the duration
        self.duration = graph.duration.tolist()
        arcs = list(zip(after.other.tolist(), after.weight.tolist(), strict=True))
        self.after = [arcs[a:b] for a, b in pairwise(after.indptr.tolist())]
        self.before: list[list[int]] = [[] for _ in range(n)]
        for i, row in enumerate(self.after):
            for k, _ in row:
                self.before[k].append(i)

    def conflict(self, node: Node) -> list[int]:
        """Find the ready operations of the machine of the earliest end that can start before it."""
        done = set(node.placed)
        ready = [i for i in self.order if i not in done and done.issuperset(self.before[i])]
        first = min(ready, key=lambda i: node.head[i] + self.duration[i])
        end = node.head[first] + self.duration[first]
        rivals = [i for i in ready if self.machine[i] == self.machine[first]]
        return [i for i in rivals if i == first or node.head[i] < end]

    def child(self, node: Node, i: int) -> Node:
        """Schedule i next on its machine: select the arcs from i to all operations after it."""
        head, placed = node.head.copy(), (*node.placed, i)
        users = self.users[self.machine[i]].tolist() if self.machine[i] < len(self.users) else []
        for k in set(users).difference(placed):
            head[k] = max(head[k], head[i] + self.duration[i])
        return self.node(placed, head)

    def node(self, placed: tuple[int, ...], head: list[int]) -> Node:
        """Propagate heads along the arcs, then bound every machine's remaining operations."""
        for i in self.order:
            for k, weight in self.after[i]:
                head[k] = max(head[k], head[i] + weight)
        heads = np.array(head, np.int64)
        bound = int((heads + self.tails).max(initial=0))
        is_open = np.ones(len(head), bool)
        is_open[list(placed)] = False
        for users in self.users:
            left = users[is_open[users]]
            if len(left) > 1:  # a single operation is on the longest path
                exact = one_machine_value(heads[left], self.durations[left], self.tails[left])
                bound = max(bound, exact)
        return Node(bound, placed, head)

    def orders(self, leaf: Node) -> Csr:
        """Return the order on every machine."""
        rank = {i: k for k, i in enumerate(leaf.placed)}
        return Csr.of([sorted(users.tolist(), key=rank.__getitem__) for users in self.users])


def one_machine_value(head: IntArray, duration: IntArray, tail: IntArray) -> int:
    """Solve 1|r_j|Lmax as makespan with tails; tails include the duration."""
    from optsched_solvers.shop.proof.one_machine import carlier

    return carlier(head, duration, tail).lower_bound
