"""Jobs that start, progress and stop on GPUs of the simulated cluster: kernels."""

from __future__ import annotations

from typing import Final

from optsched.cluster.world.heap import enter, move, withdraw
from optsched.cluster.world.layout import (
    ALONE,
    ATTAINED,
    BELIEVED,
    CONSOLIDATED,
    COST,
    COUNT,
    DONE,
    END_SIZE,
    ENTERED,
    FIRST_SIZE,
    FIRST_START,
    FOLLOWING,
    FREE,
    FREE_GPUS,
    FREE_UNITS,
    FREE_ZERO,
    GPUS,
    HELD,
    HORIZON,
    KEPT,
    LATE,
    LOG_END,
    LOG_END_NODE,
    LOG_FIRST,
    LOG_GPUS,
    LOG_HALF,
    LOG_JOB,
    LOG_NODES,
    LOG_PARTNER,
    LOG_RESTART,
    LOG_ROWS,
    LOG_START,
    LOG_WORK,
    LOSES_PASS,
    LUCID_NODE,
    NEXT,
    OWED,
    PARTNER,
    PASS_END,
    PASS_WORK,
    PASSES,
    PENDING,
    PHASE,
    PREEMPTED,
    RATE,
    ROW,
    RUNS,
    SINCE,
    SLOT,
    SPARE,
    STARTS,
    STAY,
    STAY_DONE,
    TAKES,
    TIME,
    WHERE,
    WORK_TOTAL,
    WORLD,
)
from optsched.cluster.world.log import HALF_A, HALF_B, WHOLE
from optsched.kernels.compile import INT, entry, helper

NEVER: Final = 2**62
"""Later than any horizon."""


# what a job has got until now


@entry(INT, WORLD, INT, counted=False)
def done_now(w, j):  # type: ignore[no-untyped-def]
    """Work done, at most all."""
    done = w.job[j, DONE]
    if w.job[j, SLOT] >= 0 and w.state[TIME] > w.job[j, SINCE]:
        done += w.job[j, RATE] * (w.state[TIME] - w.job[j, SINCE])
    return min(done, w.given[j, WORK_TOTAL])


@helper(INT, WORLD, INT, INT, counted=False)
def remaining_now(w, j, clairvoyant):  # type: ignore[no-untyped-def]
    """Work left, the true one (clairvoyant = 1) or that by the estimate, at least 1."""
    if clairvoyant == 1:
        return w.given[j, WORK_TOTAL] - done_now(w, j)
    return max(1, w.given[j, BELIEVED] - done_now(w, j))


@helper(INT, WORLD, INT, counted=False)
def attained_now(w, j):  # type: ignore[no-untyped-def]
    """GPU-time received, restarts included."""
    if w.job[j, SLOT] < 0:
        return w.job[j, ATTAINED]
    return w.job[j, ATTAINED] + w.job[j, GPUS] * (w.state[TIME] - w.job[j, STAY])


@helper(INT, WORLD, INT, counted=False)
def at_pass_end(w, j):  # type: ignore[no-untyped-def]
    """1 if job j is pending or ended a pass at this instant."""
    return 1 if w.job[j, SLOT] < 0 or w.job[j, PASS_END] == w.state[TIME] else 0


@helper(INT, WORLD, INT, INT, counted=False)
def is_size(w, j, gpus):  # type: ignore[no-untyped-def]
    """1 if the job may run on so many GPUs (-1: it is a zero-slot task)."""
    wanted = 0 if gpus == -1 else gpus
    if gpus == 0 or gpus < -1:
        return 0
    for k in range(w.given[j, FIRST_SIZE], w.given[j, END_SIZE]):
        if w.size[k] == wanted:
            return 1
    return 0


@helper(INT, WORLD, INT, INT, counted=False)
def rate_of(w, j, gpus):  # type: ignore[no-untyped-def]
    """Work per unit of time at an allowed size, without contention; 0 if it is not allowed."""
    wanted = 0 if gpus == -1 else gpus
    for k in range(w.given[j, FIRST_SIZE], w.given[j, END_SIZE]):
        if w.size[k] == wanted:
            return w.rate[k]
    return 0


# its progress


@helper(INT, WORLD, INT, counted=False)
def sync(w, j):  # type: ignore[no-untyped-def]
    """Book the progress of running job j until now."""
    now = w.state[TIME]
    if now > w.job[j, SINCE]:
        done = w.job[j, DONE] + w.job[j, RATE] * (now - w.job[j, SINCE])
        w.job[j, DONE], w.job[j, SINCE] = min(done, w.given[j, WORK_TOTAL]), now
    return w.job[j, DONE]


@helper(INT, WORLD, INT, counted=False)
def foresee(w, j):  # type: ignore[no-untyped-def]
    """Set `NEXT` of a synchronised job: the first time at which a pass or all work is done."""
    goal = min((w.job[j, PASSES] + 1) * w.given[j, PASS_WORK], w.given[j, WORK_TOTAL])
    left, rate = goal - w.job[j, DONE], w.job[j, RATE]
    wait = (left + rate - 1) // rate
    if goal == w.given[j, WORK_TOTAL]:
        wait += w.state[LATE]
    w.job[j, NEXT] = NEVER if wait > w.state[HORIZON] else w.job[j, SINCE] + wait
    return w.job[j, NEXT]


@helper(INT, WORLD, INT, INT, counted=False)
def set_rate(w, j, rate):  # type: ignore[no-untyped-def]
    """Another speed from now on, for neighbours came or went; 1 if it changed."""
    if rate == w.job[j, RATE]:
        return 0
    sync(w, j)
    w.job[j, RATE] = rate
    foresee(w, j)
    move(w, j)
    return 1


# its GPUs


@helper(INT, WORLD, INT, INT, counted=False)
def _note(w, node, count):  # type: ignore[no-untyped-def]
    """Write a row of the stay that is being opened: nodes ascending."""
    i = w.state[LOG_NODES]
    first = w.log[w.state[LOG_ROWS], LOG_FIRST]
    while i > first and w.log_node[i - 1, 0] > node:
        w.log_node[i, 0], w.log_node[i, 1] = w.log_node[i - 1, 0], w.log_node[i - 1, 1]
        i -= 1
    w.log_node[i, 0], w.log_node[i, 1] = node, count
    w.state[LOG_NODES] += 1
    return i


@helper(INT, WORLD, INT, INT, counted=False)
def _take(w, node, count):  # type: ignore[no-untyped-def]
    """Take GPUs of a node that has them."""
    w.node[node, FREE] -= count
    w.state[FREE_GPUS] -= count
    return _note(w, node, count)


@helper(INT, WORLD, INT, counted=False)
def _best_fit(w, gpus):  # type: ignore[no-untyped-def]
    """Take GPUs best-fit: the fullest node that fits; else the emptiest ones wholly, and so on."""
    need = gpus
    while need > 0:
        best = most = -1
        least, greatest = NEVER, 0
        for n in range(w.node.shape[0]):
            free = w.node[n, FREE]
            if w.node[n, TAKES] == 0 or free == 0:
                continue
            if need <= free < least:
                best, least = n, free
                if free == need:
                    break
            if free > greatest:
                most, greatest = n, free
        if best >= 0:
            return _take(w, best, need)
        _take(w, most, greatest)
        need -= greatest
    return 0


@helper(INT, WORLD, INT, counted=False)
def _consolidated(w, gpus):  # type: ignore[no-untyped-def]
    """Take GPUs as Lucid's simulator does, at most one node not wholly; 0 if that is impossible.

    Within a node the fullest that fits; else idle nodes, and the rest on the emptiest other one.
    """
    whole, rest = gpus // LUCID_NODE, gpus % LUCID_NODE
    if gpus <= LUCID_NODE:
        whole, rest = 0, gpus
    idle, best, least, most = 0, -1, NEVER, 0
    for n in range(w.node.shape[0]):
        free = w.node[n, FREE]
        if whole > 0:
            if free == LUCID_NODE and idle < whole:
                idle += 1
            elif free > most:
                best, most = n, free
        elif rest <= free < least:
            best, least, most = n, free, free
    if idle < whole or most < rest:
        return 0
    if rest > 0:
        _take(w, best, rest)
    for n in range(w.node.shape[0]):
        if whole > 0 and w.node[n, FREE] == LUCID_NODE and n != best:
            _take(w, n, LUCID_NODE)
            whole -= 1
    return 1


@helper(INT, WORLD, INT, INT, counted=False)
def _take_unit(w, node, hold):  # type: ignore[no-untyped-def]
    """Take a zero-slot unit of this node (-1: of the first that has one)."""
    if node < 0:
        node = 0
        while w.node[node, TAKES] == 0 or w.node[node, FREE_UNITS] == 0:
            node += 1
    w.node[node, FREE_UNITS] -= 1
    w.state[FREE_ZERO] -= 1
    row = w.state[SPARE]
    w.state[SPARE] = w.held[row, FOLLOWING]
    w.held[row, WHERE], w.held[row, COUNT], w.held[row, FOLLOWING] = node, 0, -1
    w.job[hold, HELD] = row
    return node


@helper(INT, WORLD, INT, INT, INT, counted=False)
def _open(w, j, gpus, half):  # type: ignore[no-untyped-def]
    """Let job j run on what was noted for it, after its restart cost."""
    now, row = w.state[TIME], w.state[LOG_ROWS]
    cost = w.given[j, COST] + w.job[j, OWED] if w.job[j, STARTS] > 0 else 0
    last = -1
    for i in range(w.log[row, LOG_FIRST], w.state[LOG_NODES]):
        spare = w.state[SPARE]
        w.state[SPARE] = w.held[spare, FOLLOWING]
        w.held[spare, WHERE], w.held[spare, COUNT] = w.log_node[i, 0], w.log_node[i, 1]
        w.held[spare, FOLLOWING] = -1
        if last < 0:
            w.job[j, HELD] = spare
        else:
            w.held[last, FOLLOWING] = spare
        last = spare
    w.log[row, LOG_JOB], w.log[row, LOG_START], w.log[row, LOG_END] = j, now, -1
    w.log[row, LOG_RESTART], w.log[row, LOG_GPUS], w.log[row, LOG_HALF] = cost, gpus, half
    w.log[row, LOG_WORK], w.log[row, LOG_PARTNER] = 0, -1
    w.log[row, LOG_END_NODE] = w.state[LOG_NODES]
    w.state[LOG_ROWS] += 1
    w.job[j, PHASE], w.job[j, GPUS], w.job[j, ROW], w.job[j, STAY] = RUNS, gpus, row, now
    w.job[j, ENTERED] = now
    if w.job[j, STARTS] == 0:
        w.job[j, FIRST_START] = now
    w.job[j, STARTS] += 1
    w.job[j, SINCE], w.job[j, STAY_DONE] = now + cost, w.job[j, DONE]
    w.job[j, KEPT] = w.job[j, DONE]
    w.job[j, RATE] = w.job[j, ALONE] = rate_of(w, j, gpus if gpus > 0 else -1)
    foresee(w, j)
    return enter(w, j)


@helper(INT, WORLD, INT, INT, counted=False)
def start(w, j, gpus):  # type: ignore[no-untyped-def]
    """Run pending job j best-fit on so many GPUs (-1: a zero-slot task); 0 if it does not fit.

    Also the second half of a resize, after ``release(w, j, 1)``. All releases of an instant come
    before its starts.
    """
    w.log[w.state[LOG_ROWS], LOG_FIRST] = w.state[LOG_NODES]
    if gpus < 0:
        if w.state[FREE_ZERO] == 0:
            return 0
        _take_unit(w, -1, j)
    else:
        if gpus > w.state[FREE_GPUS]:
            return 0
        if w.state[CONSOLIDATED] == 0:
            _best_fit(w, gpus)
        elif _consolidated(w, gpus) == 0:
            return 0
    _open(w, j, max(gpus, 0), WHOLE)
    return 1


@helper(INT, WORLD, INT, INT, INT, INT, counted=False)
def start_on(w, j, gpus, first, end):  # type: ignore[no-untyped-def]
    """The same on the nodes of rows ``first:end`` of `World.named`; 0 if one has too few."""
    for i in range(first, end):
        node = w.named[i, 0]
        if w.node[node, TAKES] == 0 or w.node[node, FREE] < w.named[i, 1]:
            return 0
        if gpus < 0 and w.node[node, FREE_UNITS] == 0:
            return 0
    w.log[w.state[LOG_ROWS], LOG_FIRST] = w.state[LOG_NODES]
    if gpus < 0:
        _take_unit(w, w.named[first, 0], j)
    else:
        for i in range(first, end):
            _take(w, w.named[i, 0], w.named[i, 1])
    _open(w, j, max(gpus, 0), WHOLE)
    return 1


@helper(INT, WORLD, INT, INT, counted=False)
def start_beside(w, j, partner):  # type: ignore[no-untyped-def]
    """Run pending job j on the GPUs of a running job that shares them with nobody; else 0."""
    if partner == j or w.job[partner, PHASE] != RUNS or w.job[partner, PARTNER] >= 0:
        return 0
    if w.job[partner, GPUS] == 0:
        return 0
    w.log[w.state[LOG_ROWS], LOG_FIRST] = w.state[LOG_NODES]
    row = w.job[partner, HELD]
    while row >= 0:
        _note(w, w.held[row, WHERE], w.held[row, COUNT])
        row = w.held[row, FOLLOWING]
    theirs = w.job[partner, ROW]
    if w.log[theirs, LOG_HALF] == WHOLE:
        w.log[theirs, LOG_HALF] = HALF_A
    half = HALF_B if w.log[theirs, LOG_HALF] == HALF_A else HALF_A
    _open(w, j, w.job[partner, GPUS], half)
    w.log[w.job[j, ROW], LOG_PARTNER] = theirs
    w.job[j, PARTNER], w.job[partner, PARTNER] = partner, j
    return 1


@helper(INT, WORLD, INT, counted=False)
def vacate(w, j):  # type: ignore[no-untyped-def]
    """Close the stay of synchronised running job j and give back what it holds alone."""
    now, row, partner = w.state[TIME], w.job[j, ROW], w.job[j, PARTNER]
    w.log[row, LOG_END], w.log[row, LOG_WORK] = now, w.job[j, DONE] - w.job[j, STAY_DONE]
    w.log[row, LOG_RESTART] = min(w.log[row, LOG_RESTART], now - w.job[j, STAY])
    w.job[j, ATTAINED] += w.job[j, GPUS] * (now - w.job[j, STAY])
    spare = w.job[j, HELD]
    while spare >= 0:
        node, count, following = (
            w.held[spare, WHERE],
            w.held[spare, COUNT],
            w.held[spare, FOLLOWING],
        )
        if w.job[j, GPUS] == 0:
            w.node[node, FREE_UNITS] += 1
            w.state[FREE_ZERO] += w.node[node, TAKES]
        elif partner < 0:
            w.node[node, FREE] += count
            w.state[FREE_GPUS] += count * w.node[node, TAKES]
        w.held[spare, FOLLOWING] = w.state[SPARE]
        w.state[SPARE] = spare
        spare = following
    if partner >= 0:
        w.job[partner, PARTNER] = w.job[j, PARTNER] = -1
    w.job[j, HELD] = w.job[j, ROW] = -1
    w.job[j, GPUS] = w.job[j, RATE] = w.job[j, ALONE] = 0
    return withdraw(w, j)


@helper(INT, WORLD, INT, INT, counted=False)
def release(w, j, keeps):  # type: ignore[no-untyped-def]
    """Take running job j off its GPUs: for a resize (keeps = 1: `start` follows) or preempted."""
    if w.state[LATE] == 1:
        w.job[j, OWED] = max(0, w.job[j, SINCE] - w.state[TIME])
    sync(w, j)
    if w.state[LOSES_PASS] == 1:
        w.job[j, DONE] = w.job[j, KEPT]
    vacate(w, j)
    w.job[j, PHASE], w.job[j, ENTERED] = PENDING, w.state[TIME]
    if keeps == 0:
        w.job[j, PREEMPTED] += 1
    return 0
