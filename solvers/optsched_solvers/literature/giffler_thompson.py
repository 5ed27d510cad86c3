"""Giffler and Thompson's tree (1960) with one-machine bounds, in plain Python: to read and teach.

The method of ArrayPipe's Algorithm 1, which keeps one node of every level; here all are explored,
depth first, so that the answer is proved: expect that up to some eight jobs on five machines.
`branch_and_bound` proves far more.
"""

from __future__ import annotations

from itertools import pairwise
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from optsched.model.bounds import jackson_preemptive
from optsched.model.graph import evaluate
from optsched.model.memory_bounds import frees_in_order, holdings
from optsched.model.schedule import NO_DEADLINE, Csr
from optsched.solving.result import Result
from optsched.solving.solver import Support
from optsched_solvers.shop import rules

if TYPE_CHECKING:
    from collections.abc import Mapping

    from optsched.model.schedule import Problem, Schedule
    from optsched.solving.limits import Limits
    from optsched.solving.monitor import Monitor


class Node(NamedTuple):
    """Operations placed so far in this order, and the earliest start of every operation."""

    bound: int
    placed: tuple[int, ...]
    head: list[int]


class GifflerThompson:
    """Branch on which operation comes next on the machine of the earliest possible end."""

    name = "giffler_thompson"
    options: Mapping[str, str] = MappingProxyType({})

    def supports(self, problem: Problem) -> Support:
        """One iteration, at most one machine an operation, no setups, memory or deadlines."""
        goal = rules.supported_objective(problem)
        if not goal:
            return goal
        graph = problem.graph()
        for what, is_there in (
            ("setups", graph.has_setups),
            ("deadlines", bool((graph.deadline != NO_DEADLINE).any())),
            ("memory limits", bool(graph.memory.any())),
        ):
            if is_there:
                return Support(False, f"{what} are not kept by Giffler and Thompson's tree")
        support, held = rules.supported_graph(graph), holdings(graph)
        if support and not all(
            frees_in_order(graph, r, held, {}) for r in range(graph.n_resources)
        ):
            return Support(False, "bytes might be freed before they are taken")
        return support

    def solve(self, problem: Problem, limits: Limits, monitor: Monitor) -> Result:
        """Explore until a proof or a limit; one iteration is a rule's schedule or a node."""
        graph = problem.graph()
        made = rules.try_rules(graph, limits, monitor) if monitor.objective is None else 0
        tree = _Tree(graph)
        open_nodes = [tree.node((), graph.release.tolist())]
        monitor.bound(open_nodes[0].bound, self.name)
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
            open_nodes += sorted(children, reverse=True)  # the least bound is explored first
        if monitor.objective is not None:
            monitor.bound(monitor.objective, self.name)
        return Result("unknown")


class _Tree:
    """What all nodes share."""

    def __init__(self, graph: Schedule) -> None:
        self.graph = graph
        n, after = graph.n_operations, graph.successors
        none = graph.single_resource < 0  # each such operation has a machine of its own
        machine = np.where(none, graph.n_resources + np.arange(n), graph.single_resource)
        self.duration, self.machine = graph.duration.tolist(), machine.tolist()
        self.users = [np.flatnonzero(machine == r).tolist() for r in range(graph.n_resources)]
        self.order = evaluate(graph).order.tolist()
        self.after_end = (evaluate(graph).tail - graph.duration).tolist()
        ends = after.indptr.tolist()
        arcs = list(zip(after.other.tolist(), after.weight.tolist(), strict=True))
        self.after = [arcs[a:b] for a, b in pairwise(ends)]
        self.before: list[list[int]] = [[] for _ in range(n)]
        for i, row in enumerate(self.after):
            for k, _ in row:
                self.before[k].append(i)

    def conflict(self, node: Node) -> list[int]:
        """Who could start on the machine of the earliest end before that end (Algorithm 1)."""
        done = set(node.placed)
        ready = [i for i in self.order if i not in done and done.issuperset(self.before[i])]
        first = min(ready, key=lambda i: node.head[i] + self.duration[i])
        end = node.head[first] + self.duration[first]
        rivals = [i for i in ready if self.machine[i] == self.machine[first]]
        return [i for i in rivals if i == first or node.head[i] < end]

    def rivals(self, i: int) -> list[int]:
        """Operations on the machine of i."""
        return self.users[self.machine[i]] if self.machine[i] < len(self.users) else [i]

    def child(self, node: Node, i: int) -> Node:
        """The node in which i comes next on its machine."""
        head, placed = node.head.copy(), (*node.placed, i)
        for k in set(self.rivals(i)).difference(placed):
            head[k] = max(head[k], head[i] + self.duration[i])
        return self.node(placed, head)

    def node(self, placed: tuple[int, ...], head: list[int]) -> Node:
        """Its bound: Jackson's preemptive schedule of what is left on each machine."""
        for i in self.order:
            for k, weight in self.after[i]:
                head[k] = max(head[k], head[i] + weight)
        done = set(placed)
        columns = head, self.duration, self.after_end
        bound = max(map(sum, zip(*columns, strict=True)), default=0)
        for users in self.users:
            left = [i for i in users if i not in done]
            bound = max(
                bound, jackson_preemptive(*([column[i] for i in left] for column in columns))
            )
        return Node(bound, placed, head)

    def orders(self, leaf: Node) -> Csr:
        """The order on every machine."""
        rank = {i: k for k, i in enumerate(leaf.placed)}
        return Csr.of([sorted(users, key=rank.__getitem__) for users in self.users])
