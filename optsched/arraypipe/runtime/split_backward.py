"""Backward in two blocks: gradients of a stage's inputs (I) first, of its weights (W) later.

A weight's gradient needs the gradients that arrive at the nodes where its branch of the autograd
graph leaves the paths to the inputs. I notes these gradients, W runs the branches with them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from torch import Tensor

Gradients: TypeAlias = "tuple[Tensor | None, ...]"


@dataclass(eq=False)
class Branches:
    """Nodes with common weights below them, and those weights."""

    nodes: list[Node]  # on paths to inputs
    weights: dict[int, Tensor]  # by identity
    arrived: dict[Node, Gradients] = field(default_factory=dict)  # at the nodes
    outputs: list[tuple[GradientEdge, Tensor]] = field(default_factory=list)
    """Outputs of the stage that depend on no input, with their gradients."""

    def run(self) -> None:
        """Accumulate the gradients of the weights."""
        pairs = list(self.outputs)
        for node, row in self.arrived.items():
            pairs += [(GradientEdge(node, k), g) for k, g in enumerate(row) if g is not None]
        if not pairs:
            return
        # a path from one node to another would add its gradient a second time
        handles = [
            node.register_prehook(partial(_replaced, row)) for node, row in self.arrived.items()
        ]
        edges, given = zip(*pairs, strict=True)
        try:
            torch.autograd.backward(
                edges, given, retain_graph=True, inputs=list(self.weights.values())
            )
        finally:
            for handle in handles:
                handle.remove()


def _replaced(row: Gradients, gradients: Gradients) -> Gradients:
    return row


def backward_input(
    roots: Sequence[Tensor], given: Sequence[Tensor], inputs: Sequence[Tensor]
) -> list[Branches]:
    """Run the backward of some outputs down to the inputs only.

    Parameters
    ----------
    roots, given
        Outputs and their gradients.
    inputs
        Leaves; those without `requires_grad` are left out.

    Returns
    -------
    list of Branches
        To be run for the gradients of the weights.
    """
    leaves = [t for t in inputs if t.requires_grad]
    edges = [get_gradient_edge(root) for root in roots]
    below = _Below([edge.node for edge in edges], {id(t) for t in leaves})
    branches = below.branches()
    inner = [k for k, edge in enumerate(edges) if below.reaches[edge.node]]
    for edge, gradient in zip(edges, given, strict=True):
        weights = below.weights[edge.node]
        if weights and not below.reaches[edge.node]:
            part = Branches([], dict(weights), outputs=[(edge, gradient)])
            branches = _joined(branches, part)
    handles = []
    for part in branches:
        for node in part.nodes:
            handles.append(node.register_prehook(partial(_note, part.arrived, node)))
    try:
        if inner:
            torch.autograd.backward(
                [roots[k] for k in inner], [given[k] for k in inner], retain_graph=True,
                inputs=leaves,
            )  # fmt: skip
    finally:
        for handle in handles:
            handle.remove()
    return branches


def _note(found: dict[Node, Gradients], node: Node, gradients: Gradients) -> None:
    found[node] = gradients


def _joined(groups: Sequence[Branches], part: Branches) -> list[Branches]:
    """The groups with one more, joined to those with which it has weights in common."""
    apart = []
    for group in groups:
        if group.weights.keys() & part.weights.keys():
            part.nodes += group.nodes
            part.weights |= group.weights
            part.outputs += group.outputs
        else:
            apart.append(group)
    return [*apart, part]


class _Below:
    """What the nodes of a graph lead to: inputs, and weights."""

    def __init__(self, roots: Iterable[Node], targets: set[int]) -> None:
        self.reaches: dict[Node, bool] = {}
        self.weights: dict[Node, dict[int, Tensor]] = {}
        for node in _bottom_up(roots):
            leaf: Any = getattr(node, "variable", None)
            children = [child for child, _ in node.next_functions if child is not None]
            if leaf is not None:
                self.reaches[node] = id(leaf) in targets
                self.weights[node] = {} if id(leaf) in targets else {id(leaf): leaf}
                continue
            self.reaches[node] = any(self.reaches[child] for child in children)
            found: dict[int, Tensor] = {}
            for child in children:
                if not self.reaches[child]:
                    found |= self.weights[child]
            self.weights[node] = found

    def branches(self) -> list[Branches]:
        """Nodes on paths to inputs that have weights below them, by common weights."""
        groups: list[Branches] = []
        for node, weights in self.weights.items():
            if self.reaches[node] and weights:
                groups = _joined(groups, Branches([node], dict(weights)))
        return groups


def _bottom_up(roots: Iterable[Node]) -> list[Node]:
    """All nodes below some roots, every one after those below it."""
    order: list[Node] = []
    seen: set[Node] = set()
    stack: list[tuple[Node, bool]] = [(root, False) for root in roots]
    while stack:
        node, done = stack.pop()
        if done:
            order.append(node)
        elif node not in seen:
            seen.add(node)
            stack.append((node, True))
            stack += [(child, False) for child, _ in node.next_functions if child is not None]
    return order
