"""A node of the Giffler-Thompson tree, compiled: decide and take back, bound, and its children.

A decision puts one operation next on its machine. *Sequenced* operations have their place; an
operation is *settled* once all its ancestors (arcs, and those in front of it on its machine) are
sequenced too, so that its head is its true start; it is *ready* if it is next to be settled.
Everything is undone exactly, so that the search may jump from node to node.

Tables of one row per field are passed instead of many arrays: that compiles three times as fast.
"""

from __future__ import annotations

import numpy as np
from numba import types

from optsched.kernels.compile import BOOL, INT, INTS, helper
from optsched_solvers.shop.proof.one_machine import carlier_search, jackson_on, schrage_on

NO_LIMIT = int(np.iinfo(np.int64).max)
INFINITE = 2**61
"""A makespan above every other."""

# the problem, read-only tables: per operation, arc, resource, residence of bytes
(
    DURATION, RESOURCE, FAMILY, SETUP_IN, SETUP_OUT, ACQUIRE, FREE, WORKSPACE, TAIL, LATEST, LONGER,
    URGENCY, ARCS_FROM, ARCS_TO,
) = range(14)  # fmt: skip
SUCCESSOR, WEIGHT, PREDECESSOR = range(3)
USERS_FROM, MEMORY, MOST_WORKSPACE, TRIANGULAR, TIDY, HELD_FROM = range(6)
HELD_SIZE, HELD_FIRST, HELD_LAST, HELD_TIME = range(4)
# where the search stands: per operation, slot of a machine, resource, change of a head; scalars
(
    HEAD, PLACE, POSITION, WAIT, SETTLED, IN_QUEUE, STAMP, MARK, QUEUE, CHAIN, DONE_OP, DECISION,
    TRAIL_AT, DONE_AT, LONGEST_AT, PATH_SERIAL, N_VAR,
) = range(17)  # fmt: skip
LEFT, SEQ = range(2)
N_LEFT, N_SEQ, LEVEL, NEED, TOUCHED, N_USE = range(6)
TRAIL_OP, TRAIL_HEAD = range(2)
DEPTH, TRAIL, DONE, EPOCH, LONGEST, MARKS, N_COUNTERS = range(7)
# of the children of a node
CANDIDATE, CANDIDATE_BOUND, CANDIDATE_START, N_CANDIDATE = range(4)

GIVEN = types.Array(types.int64, 2, "C", readonly=True)
TABLE = types.Array(types.int64, 2, "C")
GRAPH = types.UniTuple(GIVEN, 4)
"""(operations, arcs, resources, residences)"""
STATE = types.Tuple((TABLE, TABLE, TABLE, TABLE, INTS, INTS))
"""(operations, slots, resources, trail, work space, counters)"""


@helper(INT, GIVEN, INT, INT)
def _gap(op, i, j):  # type: ignore[no-untyped-def]
    """Setup time between neighbours i, j."""
    return 0 if op[FAMILY, i] == op[FAMILY, j] else op[SETUP_OUT, i] + op[SETUP_IN, j]


@helper(BOOL, GIVEN, GIVEN, TABLE, INT)
def _fits(op, res, use, i):  # type: ignore[no-untyped-def]
    """Whether i may come next on its machine as far as bytes go."""
    r = op[RESOURCE, i]
    level = use[LEVEL, r] + op[ACQUIRE, i]
    return level <= res[MEMORY, r] - op[WORKSPACE, i] and level >= op[FREE, i]


@helper(INT, GIVEN, TABLE, INT, INT)
def _start(op, var, last, i):  # type: ignore[no-untyped-def]
    """Earliest start of i right behind `last` (-1: first of its machine)."""
    start = var[HEAD, i]
    if last >= 0:
        end = var[HEAD, last] + op[DURATION, last] + _gap(op, last, i)
        if end > start:
            start = end
    return start


# one node: decide and take back


@helper(BOOL, GRAPH, STATE, INT, INT)
def append(graph, state, y, limit):  # type: ignore[no-untyped-def]
    """Put y next on its machine and raise the heads behind it.

    False, with heads incomplete, once a longest path meets `limit` or a deadline is missed; to be
    undone by `take_back` either way. The trail must have room for one entry per operation.
    """
    op, arc, res, _ = graph
    var, slot, use, trail, _, counters = state
    k = op[RESOURCE, y]
    base = res[USERS_FROM, k]
    at = counters[DEPTH]
    var[DECISION, at], var[TRAIL_AT, at], var[DONE_AT, at] = y, counters[TRAIL], counters[DONE]
    var[LONGEST_AT, at] = counters[LONGEST]
    counters[DEPTH] = at + 1
    counters[EPOCH] += 1
    epoch = counters[EPOCH]
    use[TOUCHED, k] = epoch
    use[N_LEFT, k] -= 1
    other = slot[LEFT, base + use[N_LEFT, k]]
    slot[LEFT, base + var[PLACE, y]], slot[LEFT, base + use[N_LEFT, k]] = other, y
    var[PLACE, other], var[PLACE, y] = var[PLACE, y], use[N_LEFT, k]
    use[LEVEL, k] += op[ACQUIRE, y] - op[FREE, y]
    use[NEED, k] -= op[ACQUIRE, y]
    var[POSITION, y] = use[N_SEQ, k]
    slot[SEQ, base + use[N_SEQ, k]] = y
    use[N_SEQ, k] += 1
    last = slot[SEQ, base + var[POSITION, y] - 1] if var[POSITION, y] > 0 else -1
    start = _start(op, var, last, y)
    if last >= 0 and not var[SETTLED, last]:
        var[WAIT, y] += 1

    # heads: first in, first out
    n_trail, size = counters[TRAIL], var.shape[1]
    if start > var[HEAD, y]:
        trail[TRAIL_OP, n_trail] = y
        trail[TRAIL_HEAD, n_trail] = var[HEAD, y]
        n_trail += 1
        var[STAMP, y] = epoch
        var[HEAD, y] = start
    longest = max(counters[LONGEST], start + op[TAIL, y])
    fine = longest < limit and start <= op[LATEST, y]
    var[QUEUE, 0] = y
    var[IN_QUEUE, y] = 1
    first, n_queue = 0, 1
    while n_queue > 0:
        i = var[QUEUE, first]
        first = (first + 1) % size
        n_queue -= 1
        var[IN_QUEUE, i] = 0
        if not fine:
            continue
        end = var[HEAD, i] + op[DURATION, i]
        r = op[RESOURCE, i]
        n_arcs = op[ARCS_FROM, i + 1] - op[ARCS_FROM, i]
        n_machine, after = 0, 0
        if r >= 0 and var[POSITION, i] >= 0:
            after = res[USERS_FROM, r] + var[POSITION, i] + 1
            n_machine = 1 if var[POSITION, i] + 1 < use[N_SEQ, r] else use[N_LEFT, r]
        for e in range(n_arcs + n_machine):
            if e < n_arcs:
                j = arc[SUCCESSOR, op[ARCS_FROM, i] + e]
                start = var[HEAD, i] + arc[WEIGHT, op[ARCS_FROM, i] + e]
            else:
                is_next = var[POSITION, i] + 1 < use[N_SEQ, r]
                j = slot[SEQ, after] if is_next else slot[LEFT, res[USERS_FROM, r] + e - n_arcs]
                start = end
                if is_next or res[TRIANGULAR, r]:
                    start += _gap(op, i, j)
            if start <= var[HEAD, j]:
                continue
            if var[STAMP, j] != epoch:
                var[STAMP, j] = epoch
                trail[TRAIL_OP, n_trail] = j
                trail[TRAIL_HEAD, n_trail] = var[HEAD, j]
                n_trail += 1
            var[HEAD, j] = start
            if op[RESOURCE, j] >= 0:
                use[TOUCHED, op[RESOURCE, j]] = epoch
            if start + op[TAIL, j] > longest:
                longest = start + op[TAIL, j]
            if longest >= limit or start > op[LATEST, j]:
                fine = False
            if not var[IN_QUEUE, j]:
                var[IN_QUEUE, j] = 1
                var[QUEUE, (first + n_queue) % size] = j
                n_queue += 1
    counters[TRAIL] = n_trail
    counters[LONGEST] = longest

    # who is settled now: `queue` serves as a stack
    n_done = counters[DONE]
    n_queue = 0
    if var[WAIT, y] == 0:
        var[QUEUE, 0] = y
        n_queue = 1
    while n_queue > 0:
        n_queue -= 1
        i = var[QUEUE, n_queue]
        var[SETTLED, i] = 1
        var[DONE_OP, n_done] = i
        n_done += 1
        for e in range(op[ARCS_FROM, i], op[ARCS_FROM, i + 1]):
            j = arc[SUCCESSOR, e]
            var[WAIT, j] -= 1
            if var[WAIT, j] == 0 and (op[RESOURCE, j] < 0 or var[POSITION, j] >= 0):
                var[QUEUE, n_queue] = j
                n_queue += 1
        r = op[RESOURCE, i]
        if r >= 0 and var[POSITION, i] + 1 < use[N_SEQ, r]:
            j = slot[SEQ, res[USERS_FROM, r] + var[POSITION, i] + 1]
            var[WAIT, j] -= 1
            if var[WAIT, j] == 0:
                var[QUEUE, n_queue] = j
                n_queue += 1
    counters[DONE] = n_done
    return fine


@helper(types.void, GRAPH, STATE)
def take_back(graph, state):  # type: ignore[no-untyped-def]
    """Undo the last decision."""
    op, arc, res, _ = graph
    var, slot, use, trail, _, counters = state
    at = counters[DEPTH] - 1
    y = var[DECISION, at]
    k = op[RESOURCE, y]
    for d in range(counters[DONE] - 1, var[DONE_AT, at] - 1, -1):
        i = var[DONE_OP, d]
        var[SETTLED, i] = 0
        for e in range(op[ARCS_FROM, i], op[ARCS_FROM, i + 1]):
            var[WAIT, arc[SUCCESSOR, e]] += 1
        r = op[RESOURCE, i]
        if r >= 0 and var[POSITION, i] + 1 < use[N_SEQ, r]:
            var[WAIT, slot[SEQ, res[USERS_FROM, r] + var[POSITION, i] + 1]] += 1
    for t in range(counters[TRAIL] - 1, var[TRAIL_AT, at] - 1, -1):
        var[HEAD, trail[TRAIL_OP, t]] = trail[TRAIL_HEAD, t]
    at_slot = res[USERS_FROM, k] + var[POSITION, y]
    if var[POSITION, y] > 0 and not var[SETTLED, slot[SEQ, at_slot - 1]]:
        var[WAIT, y] -= 1
    use[N_SEQ, k] -= 1
    use[N_LEFT, k] += 1
    var[POSITION, y] = -1
    use[LEVEL, k] -= op[ACQUIRE, y] - op[FREE, y]
    use[NEED, k] += op[ACQUIRE, y]
    counters[DEPTH], counters[TRAIL], counters[DONE] = at, var[TRAIL_AT, at], var[DONE_AT, at]
    counters[LONGEST] = var[LONGEST_AT, at]


# one node: bound and children


@helper(INT, GRAPH, STATE, INT)
def energy_at(graph, state, r):  # type: ignore[no-untyped-def]
    """Memory x time still to be spent on r, between its least head and its least tail."""
    op, _, res, held = graph
    var, slot, use, _, _, _ = state
    begin = behind = INFINITE
    for k in range(res[USERS_FROM, r], res[USERS_FROM, r] + use[N_LEFT, r]):
        if op[WORKSPACE, slot[LEFT, k]] > 0:
            begin = min(begin, var[HEAD, slot[LEFT, k]])
    for h in range(res[HELD_FROM, r], res[HELD_FROM, r + 1]):
        if var[POSITION, held[HELD_FIRST, h]] < 0:
            begin = min(begin, var[HEAD, held[HELD_FIRST, h]])
    if begin == INFINITE:
        return 0
    room, work = float(res[MEMORY, r]), 0.0  # bytes x time does not fit an integer
    for k in range(res[USERS_FROM, r], res[USERS_FROM, r] + use[N_LEFT, r]):
        i = slot[LEFT, k]
        if op[WORKSPACE, i] > 0:
            work += op[WORKSPACE, i] / room * op[DURATION, i]
            behind = min(behind, op[TAIL, i] - op[DURATION, i])
    for h in range(res[HELD_FROM, r], res[HELD_FROM, r + 1]):
        k = held[HELD_LAST, h]
        if var[POSITION, k] >= 0:
            continue
        time = held[HELD_TIME, h]
        if var[POSITION, held[HELD_FIRST, h]] >= 0:  # held already: from `begin` on
            time = max(0, var[HEAD, k] + op[DURATION, k] - begin)
        work += held[HELD_SIZE, h] / room * time
        behind = min(behind, op[TAIL, k] - op[DURATION, k])
    return begin + int(np.ceil(work * (1.0 - 1e-9) - 1e-9)) + behind


@helper(INT, GRAPH, STATE, INT, INT, INT)
def bound_node(graph, state, bound, upper, carlier_nodes):  # type: ignore[no-untyped-def]
    """Lower bound of a node right after `append`; below `upper` no machine is left out.

    The longest path, and per machine whose heads moved: memory x time, Jackson's preemptive value
    and, where that stays below `upper` and Schrage's schedule does not, Carlier's.
    """
    op, _, res, _ = graph
    var, slot, use, _, space, counters = state
    bound = max(bound, counters[LONGEST])
    head, longer, urgency = var[HEAD], op[LONGER], op[URGENCY]
    for r in range(use.shape[1]):
        m = use[N_LEFT, r]
        if use[TOUCHED, r] != counters[EPOCH] or m == 0:
            continue
        if bound >= upper:
            break
        on = slot[LEFT, res[USERS_FROM, r] : res[USERS_FROM, r] + m]
        if res[MEMORY, r] < NO_LIMIT:
            bound = max(bound, energy_at(graph, state, r))
        bound = max(bound, jackson_on(on, m, head, longer, urgency, space))
        if bound >= upper or upper == INFINITE or carlier_nodes == 0:
            continue
        if schrage_on(on, m, head, longer, urgency, space, var[CHAIN]) < upper:
            continue
        heads, durations = np.empty(m, np.int64), np.empty(m, np.int64)
        tails = np.empty(m, np.int64)
        for k in range(m):
            i = on[k]
            heads[k], durations[k], tails[k] = head[i], longer[i], op[TAIL, i]
        bound = max(bound, carlier_search(heads, durations, tails, carlier_nodes, upper)[1])
    return bound


@helper(BOOL, GRAPH, STATE, INT)
def _behind_another(graph, state, y):  # type: ignore[no-untyped-def]
    """Whether an operation that is not sequenced, on y's own machine, is an ancestor of y."""
    op, arc, res, _ = graph
    var, slot, use, _, _, counters = state
    counters[MARKS] += 1
    var[QUEUE, 0] = y
    var[MARK, y] = counters[MARKS]
    n_stack = 1
    while n_stack > 0:
        n_stack -= 1
        i = var[QUEUE, n_stack]
        r = op[RESOURCE, i]
        n_arcs = op[ARCS_TO, i + 1] - op[ARCS_TO, i]
        for e in range(n_arcs + 1):
            if e < n_arcs:
                j = arc[PREDECESSOR, op[ARCS_TO, i] + e]
            else:
                if r < 0:
                    continue
                at = (var[POSITION, i] if var[POSITION, i] >= 0 else use[N_SEQ, r]) - 1
                if at < 0:
                    continue
                j = slot[SEQ, res[USERS_FROM, r] + at]
            if var[SETTLED, j] or var[MARK, j] == counters[MARKS]:
                continue
            if op[RESOURCE, j] == op[RESOURCE, y] and var[POSITION, j] < 0:
                return True
            var[MARK, j] = counters[MARKS]
            var[QUEUE, n_stack] = j
            n_stack += 1
    return False


@helper(INT, GRAPH, STATE, INT)
def _first_to_end(graph, state, machine):  # type: ignore[no-untyped-def]
    """The ready operation of least end whose bytes fit; -1 without one.

    With a machine >= 0: of those on it that harm nobody by going first. They take no bytes that
    others might need, and free none that others might have to take before.
    """
    op, _, res, _ = graph
    var, slot, use, _, _, _ = state
    star, star_end = -1, 0
    for r in range(use.shape[1]):
        if use[N_LEFT, r] == 0 or (machine >= 0 and r != machine):
            continue
        base = res[USERS_FROM, r]
        last = slot[SEQ, base + use[N_SEQ, r] - 1] if use[N_SEQ, r] > 0 else -1
        if last >= 0 and not var[SETTLED, last]:
            continue
        plenty = use[LEVEL, r] + use[NEED, r] <= res[MEMORY, r] - res[MOST_WORKSPACE, r]
        for k in range(base, base + use[N_LEFT, r]):
            i = slot[LEFT, k]
            if var[WAIT, i] > 0 or not _fits(op, res, use, i):
                continue
            if machine >= 0:
                if not plenty and (op[ACQUIRE, i] > 0 or op[WORKSPACE, i] > 0):
                    continue
                if op[FREE, i] > 0 and not res[TIDY, r]:
                    continue
            end = _start(op, var, last, i) + op[DURATION, i]
            if star < 0 or end < star_end or (end == star_end and i < star):
                star, star_end = i, end
    return star


@helper(INT, GRAPH, STATE, TABLE)
def candidates(graph, state, found):  # type: ignore[no-untyped-def]
    """Operations that may come next on one machine, with their earliest starts; 0: dead end.

    The machine is that of the ready operation of least end. If setups are triangular there, and one
    of its ready operations, o*, may go first without harm, whoever could only start when o* and
    the setup behind it are over is left out; o* itself always stays.
    """
    op, _, res, _ = graph
    var, slot, use, _, _, _ = state
    star = _first_to_end(graph, state, -1)
    if star < 0:
        return 0
    machine = op[RESOURCE, star]
    base = res[USERS_FROM, machine]
    last = slot[SEQ, base + use[N_SEQ, machine] - 1] if use[N_SEQ, machine] > 0 else -1
    star = _first_to_end(graph, state, machine) if res[TRIANGULAR, machine] else -1
    star_end = _start(op, var, last, star) + op[DURATION, star] if star >= 0 else 0
    count = 0
    for k in range(base, base + use[N_LEFT, machine]):
        y = slot[LEFT, k]
        if not _fits(op, res, use, y):
            continue
        start = _start(op, var, last, y)
        if star >= 0 and y != star and start >= star_end + _gap(op, star, y):
            continue
        if var[WAIT, y] > 0 and _behind_another(graph, state, y):
            continue
        at = count  # by id
        while at > 0 and found[CANDIDATE, at - 1] > y:
            found[CANDIDATE, at] = found[CANDIDATE, at - 1]
            found[CANDIDATE_START, at] = found[CANDIDATE_START, at - 1]
            at -= 1
        found[CANDIDATE, at], found[CANDIDATE_START, at] = y, start
        count += 1
    return count
