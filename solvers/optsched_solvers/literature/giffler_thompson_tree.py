"""The search on the Giffler-Thompson tree, compiled: depth first, best first, or a beam."""

from __future__ import annotations

from numba import types

from optsched.kernels.compile import BOOL, INT, INTS, entry, helper
from optsched_solvers.literature.giffler_thompson_node import (
    CANDIDATE,
    CANDIDATE_BOUND,
    CANDIDATE_START,
    CHAIN,
    DEPTH,
    GRAPH,
    INFINITE,
    LONGEST,
    PATH_SERIAL,
    SEQ,
    STATE,
    TABLE,
    TRAIL,
    append,
    bound_node,
    candidates,
    take_back,
)  # fmt: skip

# per node, and scalars
(
    PARENT, CHOICE, BOUND, FIRST_TIE, SECOND_TIE, NODE_DEPTH, SERIAL, CHILDREN, SPARE, OPEN,
    IN_LEVEL, N_NODE,
) = range(12)  # fmt: skip
(
    DISCIPLINE, WIDTH, CARLIER, PHASE, NODE, N_FOUND, AT, N_OPEN, N_SPARE, N_USED, N_LEVEL,
    LEVEL_AT, LAST_SERIAL, NODES, UPPER, BEST, N_SCALARS,
) = range(17)  # fmt: skip
DEPTH_FIRST, BEST_FIRST, BEAM, AS_PRINTED = range(4)
TO_PICK, TO_SWITCH, TO_BOUND = range(3)
# why a slice ends
SLICE_OVER, EXHAUSTED, GOAL_MET, TRAIL_FULL, NODES_FULL = range(5)

SEARCH = types.Tuple((TABLE, TABLE, INTS, INTS))
"""(nodes, candidates, orders of the best leaf, scalars)"""


@helper(BOOL, TABLE, INT, INT)
def _better(node, a, b):  # type: ignore[no-untyped-def]
    """Whether node a is to be explored before node b."""
    for key in (BOUND, FIRST_TIE, SECOND_TIE):
        if node[key, a] != node[key, b]:
            return node[key, a] < node[key, b]
    return node[SERIAL, a] < node[SERIAL, b]


@helper(types.void, TABLE, INTS, INT)
def _open(node, scalars, new):  # type: ignore[no-untyped-def]
    """Add a node to the open ones: a stack (depth first) or a heap."""
    nodes = node[OPEN]
    at = scalars[N_OPEN]
    scalars[N_OPEN] += 1
    if scalars[DISCIPLINE] != DEPTH_FIRST:
        while at > 0 and _better(node, new, nodes[(at - 1) // 2]):
            nodes[at] = nodes[(at - 1) // 2]
            at = (at - 1) // 2
    nodes[at] = new


@helper(INT, TABLE, INTS)
def _next(node, scalars):  # type: ignore[no-untyped-def]
    """Take the next of the open nodes."""
    nodes = node[OPEN]
    scalars[N_OPEN] -= 1
    size = scalars[N_OPEN]
    if scalars[DISCIPLINE] == DEPTH_FIRST:
        return nodes[size]
    top = nodes[0]
    item = nodes[size]
    at = 0
    while True:
        child = 2 * at + 1
        if child >= size:
            break
        if child + 1 < size and _better(node, nodes[child + 1], nodes[child]):
            child += 1
        if not _better(node, nodes[child], item):
            break
        nodes[at] = nodes[child]
        at = child
    nodes[at] = item
    return top


@helper(types.void, TABLE, INTS, INT)
def _release(node, scalars, gone):  # type: ignore[no-untyped-def]
    """Forget a node without children, and its ancestors that have no other."""
    while gone > 0 and node[CHILDREN, gone] == 0:
        node[SPARE, scalars[N_SPARE]] = gone
        scalars[N_SPARE] += 1
        gone = node[PARENT, gone]
        node[CHILDREN, gone] -= 1


@helper(BOOL, GRAPH, STATE, TABLE, INT)
def _switch(graph, state, node, target):  # type: ignore[no-untyped-def]
    """Make the state that of a node; False if the trail is too short, to be called again then."""
    var, _, _, trail, _, counters = state
    n_chain = 0
    at = target
    while at > 0:
        depth = node[NODE_DEPTH, at]
        if depth <= counters[DEPTH] and var[PATH_SERIAL, depth - 1] == node[SERIAL, at]:
            break
        var[CHAIN, n_chain] = at
        n_chain += 1
        at = node[PARENT, at]
    while counters[DEPTH] > node[NODE_DEPTH, at]:
        take_back(graph, state)
    for step in range(n_chain - 1, -1, -1):
        if trail.shape[1] - counters[TRAIL] < var.shape[1]:
            return False
        at = var[CHAIN, step]
        var[PATH_SERIAL, counters[DEPTH]] = node[SERIAL, at]
        append(graph, state, node[CHOICE, at], INFINITE)
    return True


@helper(types.void, TABLE, TABLE, INTS)
def _adopt(node, found, scalars):  # type: ignore[no-untyped-def]
    """Open the children that survived: the best on top of the stack, or in the heap."""
    parent, count = scalars[NODE], 0
    for c in range(scalars[N_FOUND]):
        if found[CANDIDATE_BOUND, c] >= scalars[UPPER]:
            continue
        y, bound, start = found[CANDIDATE, c], found[CANDIDATE_BOUND, c], found[CANDIDATE_START, c]
        at = count
        while at > 0 and scalars[DISCIPLINE] != AS_PRINTED:  # by (bound, start, id)
            other = found[CANDIDATE_BOUND, at - 1]
            if other < bound or (other == bound and found[CANDIDATE_START, at - 1] <= start):
                break
            for key in (CANDIDATE, CANDIDATE_BOUND, CANDIDATE_START):
                found[key, at] = found[key, at - 1]
            at -= 1
        found[CANDIDATE, at], found[CANDIDATE_BOUND, at] = y, bound
        found[CANDIDATE_START, at] = start
        count += 1
    for k in range(count):
        c = count - 1 - k if scalars[DISCIPLINE] == DEPTH_FIRST else k
        if scalars[N_SPARE] > 0:
            scalars[N_SPARE] -= 1
            child = node[SPARE, scalars[N_SPARE]]
        else:
            child = scalars[N_USED]
            scalars[N_USED] += 1
        scalars[LAST_SERIAL] += 1
        node[PARENT, child], node[CHOICE, child] = parent, found[CANDIDATE, c]
        node[BOUND, child], node[SERIAL, child] = found[CANDIDATE_BOUND, c], scalars[LAST_SERIAL]
        node[NODE_DEPTH, child] = node[NODE_DEPTH, parent] + 1
        node[CHILDREN, child] = node[FIRST_TIE, child] = node[SECOND_TIE, child] = 0
        if scalars[DISCIPLINE] == BEST_FIRST:
            node[FIRST_TIE, child] = -node[NODE_DEPTH, child]
        elif scalars[DISCIPLINE] == BEAM:
            node[FIRST_TIE, child] = found[CANDIDATE_START, c]
            node[SECOND_TIE, child] = found[CANDIDATE, c]
        elif scalars[DISCIPLINE] == AS_PRINTED:  # `<=` keeps the last of equals
            node[FIRST_TIE, child] = -scalars[LAST_SERIAL]
        node[CHILDREN, parent] += 1
        _open(node, scalars, child)
    _release(node, scalars, parent)


@helper(INT, TABLE, INTS)
def _pick(node, scalars):  # type: ignore[no-untyped-def]
    """The node to be expanded next, -1 if there is none; a beam keeps `WIDTH` nodes per level."""
    if scalars[DISCIPLINE] <= BEST_FIRST:
        return _next(node, scalars) if scalars[N_OPEN] > 0 else -1
    if scalars[LEVEL_AT] == scalars[N_LEVEL]:
        scalars[LEVEL_AT] = scalars[N_LEVEL] = 0
        while scalars[N_OPEN] > 0:
            kept = _next(node, scalars)
            if scalars[N_LEVEL] < scalars[WIDTH]:
                node[IN_LEVEL, scalars[N_LEVEL]] = kept
                scalars[N_LEVEL] += 1
            else:
                _release(node, scalars, kept)
    if scalars[N_LEVEL] == 0:
        return -1
    scalars[LEVEL_AT] += 1
    return node[IN_LEVEL, scalars[LEVEL_AT] - 1]


@entry(INT, GRAPH, STATE, SEARCH, INT, INT)
def explore(graph, state, search, steps, goal):  # type: ignore[no-untyped-def]
    """Bound at most `steps` further nodes; returns why it stopped. Resumes where it stopped.

    Nodes that cannot beat ``scalars[UPPER]`` are cut; a complete sequence that does becomes the
    best leaf, of value ``scalars[BEST]``. At `goal` the search is over.
    """
    node, found, best_seq, scalars = search
    var, slot, _, trail, _, counters = state
    while True:
        if scalars[BEST] <= goal:
            return GOAL_MET
        if scalars[PHASE] == TO_PICK:
            picked = _pick(node, scalars)
            if picked < 0:
                return EXHAUSTED
            if node[BOUND, picked] >= scalars[UPPER]:
                if scalars[DISCIPLINE] == BEST_FIRST:  # so are all others
                    scalars[N_OPEN] = 0
                    return EXHAUSTED
                _release(node, scalars, picked)
                continue
            scalars[NODE], scalars[PHASE] = picked, TO_SWITCH
        if scalars[PHASE] == TO_SWITCH:
            if not _switch(graph, state, node, scalars[NODE]):
                return TRAIL_FULL
            scalars[N_FOUND] = candidates(graph, state, found)
            scalars[AT], scalars[PHASE] = 0, TO_BOUND
        if scalars[AT] == scalars[N_FOUND]:
            if node.shape[1] - scalars[N_USED] + scalars[N_SPARE] < scalars[N_FOUND]:
                return NODES_FULL
            _adopt(node, found, scalars)
            scalars[PHASE] = TO_PICK
            continue
        if steps <= 0:
            return SLICE_OVER
        if trail.shape[1] - counters[TRAIL] < var.shape[1]:
            return TRAIL_FULL
        c = scalars[AT]
        scalars[AT] += 1
        scalars[NODES] += 1
        steps -= 1
        value = INFINITE
        if append(graph, state, found[CANDIDATE, c], scalars[UPPER]):
            if counters[DEPTH] < slot.shape[1]:
                value = bound_node(
                    graph, state, node[BOUND, scalars[NODE]], scalars[UPPER], scalars[CARLIER]
                )
            elif counters[LONGEST] < scalars[BEST]:  # a leaf
                scalars[BEST] = counters[LONGEST]
                for k in range(slot.shape[1]):
                    best_seq[k] = slot[SEQ, k]
                if scalars[DISCIPLINE] <= BEST_FIRST and scalars[BEST] < scalars[UPPER]:
                    scalars[UPPER] = scalars[BEST]
        found[CANDIDATE_BOUND, c] = value
        take_back(graph, state)
