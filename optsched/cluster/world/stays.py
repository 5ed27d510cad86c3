"""Jobs that start, progress and stop on GPUs of the simulated cluster: kernels."""

from __future__ import annotations

from typing import Final

from optsched.cluster.world.heap import enter, move, withdraw
from optsched.cluster.world.layout import LUCID_NODE, PENDING, RUNS, WORLD
from optsched.cluster.world.log import HALF_A, HALF_B, WHOLE
from optsched.kernels.compile import INT, entry, helper

NEVER: Final = 2**62
"""Later than any horizon."""


# what a job has got until now


@entry(INT, WORLD, INT, counted=False)
def done_now(w, j):  # type: ignore[no-untyped-def]
    """Work done, at most all."""
    done = w.job[j].done
    if w.job[j].slot >= 0 and w.state[0].time > w.job[j].since:
        done += w.job[j].rate * (w.state[0].time - w.job[j].since)
    return min(done, w.given[j].work_total)


@helper(INT, WORLD, INT, INT, counted=False)
def remaining_now(w, j, clairvoyant):  # type: ignore[no-untyped-def]
    """Work left, the true one (clairvoyant = 1) or that by the estimate, at least 1."""
    if clairvoyant == 1:
        return w.given[j].work_total - done_now(w, j)
    return max(1, w.given[j].estimate - done_now(w, j))


@helper(INT, WORLD, INT, counted=False)
def attained_now(w, j):  # type: ignore[no-untyped-def]
    """GPU-time received, restarts included."""
    if w.job[j].slot < 0:
        return w.job[j].attained
    return w.job[j].attained + w.job[j].gpus * (w.state[0].time - w.job[j].stay)


@helper(INT, WORLD, INT, counted=False)
def at_pass_end(w, j):  # type: ignore[no-untyped-def]
    """1 if job j is pending or ended a pass at this instant."""
    return 1 if w.job[j].slot < 0 or w.job[j].pass_end == w.state[0].time else 0


@helper(INT, WORLD, INT, INT, counted=False)
def is_size(w, j, gpus):  # type: ignore[no-untyped-def]
    """1 if the job may run on so many GPUs (-1: it is a zero-slot task)."""
    wanted = 0 if gpus == -1 else gpus
    if gpus == 0 or gpus < -1:
        return 0
    for k in range(w.given[j].first_size, w.given[j].end_size):
        if w.size[k] == wanted:
            return 1
    return 0


@helper(INT, WORLD, INT, INT, INT, counted=False)
def rate_of(w, j, gpus, kind):  # type: ignore[no-untyped-def]
    """Work per unit of time at an allowed size, without contention; 0 if it is not allowed.

    On a type of GPU (0: any), 0 if the job does not run on that.
    """
    wanted = 0 if gpus == -1 else gpus
    for k in range(w.given[j].first_size, w.given[j].end_size):
        if w.size[k] == wanted:
            return w.rate[k + kind * w.size.shape[0]]
    return 0


# its progress


@helper(INT, WORLD, INT, counted=False)
def sync(w, j):  # type: ignore[no-untyped-def]
    """Book the progress of running job j until now."""
    now = w.state[0].time
    if now > w.job[j].since:
        done = w.job[j].done + w.job[j].rate * (now - w.job[j].since)
        w.job[j].done, w.job[j].since = min(done, w.given[j].work_total), now
    return w.job[j].done


@helper(INT, WORLD, INT, counted=False)
def foresee(w, j):  # type: ignore[no-untyped-def]
    """Set `JOB.next` of a synchronised job: the first time at which a pass or all work is done."""
    goal = min((w.job[j].passes + 1) * w.given[j].pass_work, w.given[j].work_total)
    left, rate = goal - w.job[j].done, w.job[j].rate
    wait = (left + rate - 1) // rate
    if goal == w.given[j].work_total:
        wait += w.state[0].late
    w.job[j].next = NEVER if wait > w.state[0].horizon else w.job[j].since + wait
    return w.job[j].next


@helper(INT, WORLD, INT, INT, counted=False)
def set_rate(w, j, rate):  # type: ignore[no-untyped-def]
    """Another speed from now on, for neighbours came or went; 1 if it changed."""
    if rate == w.job[j].rate:
        return 0
    sync(w, j)
    w.job[j].rate = rate
    foresee(w, j)
    move(w, j)
    return 1


# its GPUs


@helper(INT, WORLD, INT, INT, counted=False)
def _note(w, node, count):  # type: ignore[no-untyped-def]
    """Write a row of the stay that is being opened: nodes ascending."""
    i = w.state[0].log_nodes
    first = w.log[w.state[0].log_rows].first
    while i > first and w.log_node[i - 1, 0] > node:
        w.log_node[i, 0], w.log_node[i, 1] = w.log_node[i - 1, 0], w.log_node[i - 1, 1]
        i -= 1
    w.log_node[i, 0], w.log_node[i, 1] = node, count
    w.state[0].log_nodes += 1
    return i


@helper(INT, WORLD, INT, INT, INT, counted=False)
def _take(w, j, node, count):  # type: ignore[no-untyped-def]
    """Take GPUs of a node that has them, with CPUs and memory."""
    w.node[node].free -= count
    w.state[0].free_gpus -= count
    _supply(w, j, node, -count)
    return _note(w, node, count)


@helper(INT, WORLD, INT, INT, INT, counted=False)
def _supply(w, j, node, count):  # type: ignore[no-untyped-def]
    """Give back the CPUs and memory of so many GPUs of job j."""
    if w.supply.shape[0] > 0:
        w.supply[node, 1] += count * w.demand[j, 0]
        w.supply[node, 2] += count * w.demand[j, 1]
    return count


@helper(INT, WORLD, INT, INT, INT, INT, counted=False)
def _room(w, j, node, kind, count):  # type: ignore[no-untyped-def]
    """How many of these GPUs of a node job j may use: of this type, with its CPUs and memory."""
    if w.supply[node, 0] != kind:
        return 0
    for k in range(2):
        if w.demand[j, k] > 0:
            count = min(count, w.supply[node, k + 1] // w.demand[j, k])
    return count


@helper(INT, WORLD, INT, INT, counted=False)
def _fastest(w, j, gpus):  # type: ignore[no-untyped-def]
    """The type on which job j is fastest among those with room; -1: none has room."""
    if w.supply.shape[0] == 0:
        return 0
    best, fastest = -1, 0
    for kind in range(1, w.rate.shape[0] // w.size.shape[0]):
        rate = rate_of(w, j, gpus, kind)
        if rate <= fastest:
            continue
        room = 0
        for n in range(w.node.shape[0]):
            room += _room(w, j, n, kind, w.node[n].free * w.node[n].takes)
        if room >= gpus:
            best, fastest = kind, rate
    return best


@helper(INT, WORLD, INT, INT, INT, counted=False)
def _best_fit(w, j, gpus, kind):  # type: ignore[no-untyped-def]
    """Take GPUs best-fit: the fullest node that fits; else the emptiest ones wholly, and so on."""
    need, limited = gpus, w.supply.shape[0] > 0
    while need > 0:
        best = most = -1
        least, greatest = NEVER, 0
        for n in range(w.node.shape[0]):
            free = w.node[n].free
            if w.node[n].takes == 0 or free == 0:
                continue
            if limited:
                free = _room(w, j, n, kind, free)
            if need <= free < least:
                best, least = n, free
                if free == need:
                    break
            if free > greatest:
                most, greatest = n, free
        if best >= 0:
            return _take(w, j, best, need)
        _take(w, j, most, greatest)
        need -= greatest
    return 0


@helper(INT, WORLD, INT, INT, counted=False)
def _consolidated(w, j, gpus):  # type: ignore[no-untyped-def]
    """Take GPUs as Lucid's simulator does, at most one node not wholly; 0 if that is impossible.

    Within a node the fullest that fits; else idle nodes, and the rest on the emptiest other one.
    """
    whole, rest = gpus // LUCID_NODE, gpus % LUCID_NODE
    if gpus <= LUCID_NODE:
        whole, rest = 0, gpus
    idle, best, least, most = 0, -1, NEVER, 0
    for n in range(w.node.shape[0]):
        free = w.node[n].free
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
        _take(w, j, best, rest)
    for n in range(w.node.shape[0]):
        if whole > 0 and w.node[n].free == LUCID_NODE and n != best:
            _take(w, j, n, LUCID_NODE)
            whole -= 1
    return 1


@helper(INT, WORLD, INT, INT, counted=False)
def _take_unit(w, node, hold):  # type: ignore[no-untyped-def]
    """Take a zero-slot unit of this node (-1: of the first that has one)."""
    if node < 0:
        node = 0
        while w.node[node].takes == 0 or w.node[node].free_units == 0:
            node += 1
    w.node[node].free_units -= 1
    w.state[0].free_zero -= 1
    row = w.state[0].spare
    w.state[0].spare = w.held[row].following
    w.held[row].where, w.held[row].count, w.held[row].following = node, 0, -1
    w.job[hold].held = row
    return node


@helper(INT, WORLD, INT, INT, INT, counted=False)
def _open(w, j, gpus, half):  # type: ignore[no-untyped-def]
    """Let job j run on what was noted for it, after its restart cost."""
    now, row = w.state[0].time, w.state[0].log_rows
    cost = w.given[j].cost + w.job[j].owed if w.job[j].starts > 0 else 0
    last = -1
    for i in range(w.log[row].first, w.state[0].log_nodes):
        spare = w.state[0].spare
        w.state[0].spare = w.held[spare].following
        w.held[spare].where, w.held[spare].count = w.log_node[i, 0], w.log_node[i, 1]
        w.held[spare].following = -1
        if last < 0:
            w.job[j].held = spare
        else:
            w.held[last].following = spare
        last = spare
    w.log[row].job, w.log[row].start, w.log[row].end = j, now, -1
    w.log[row].restart, w.log[row].gpus, w.log[row].half = cost, gpus, half
    w.log[row].work, w.log[row].partner = 0, -1
    w.log[row].end_node = w.state[0].log_nodes
    w.state[0].log_rows += 1
    w.job[j].phase, w.job[j].gpus, w.job[j].row, w.job[j].stay = RUNS, gpus, row, now
    w.job[j].entered = now
    if w.job[j].starts == 0:
        w.job[j].first_start = now
    w.job[j].starts += 1
    w.job[j].since, w.job[j].stay_done = now + cost, w.job[j].done
    w.job[j].kept = w.job[j].done
    kind = w.supply[w.log_node[w.log[row].first, 0], 0] if gpus > 0 and w.supply.shape[0] > 0 else 0
    w.job[j].rate = w.job[j].alone = rate_of(w, j, gpus if gpus > 0 else -1, kind)
    foresee(w, j)
    return enter(w, j)


@helper(INT, WORLD, INT, INT, counted=False)
def start(w, j, gpus):  # type: ignore[no-untyped-def]
    """Run pending job j best-fit on so many GPUs (-1: a zero-slot task); 0 if it does not fit.

    Also the second half of a resize, after ``release(w, j, 1)``. All releases of an instant come
    before its starts.
    """
    w.log[w.state[0].log_rows].first = w.state[0].log_nodes
    if gpus < 0:
        if w.state[0].free_zero == 0:
            return 0
        _take_unit(w, -1, j)
    else:
        if gpus > w.state[0].free_gpus:
            return 0
        if w.state[0].consolidated == 0:
            kind = _fastest(w, j, gpus)
            if kind < 0:
                return 0
            _best_fit(w, j, gpus, kind)
        elif _consolidated(w, j, gpus) == 0:
            return 0
    _open(w, j, max(gpus, 0), WHOLE)
    return 1


@helper(INT, WORLD, INT, INT, INT, INT, counted=False)
def start_on(w, j, gpus, first, end):  # type: ignore[no-untyped-def]
    """The same on the nodes of rows ``first:end`` of `World.named`; 0 if one has too few."""
    limited = w.supply.shape[0] > 0
    kind = w.supply[w.named[first, 0], 0] if limited else 0
    if limited and rate_of(w, j, gpus, kind) == 0:
        return 0
    for i in range(first, end):
        node, count = w.named[i, 0], w.named[i, 1]
        if w.node[node].takes == 0 or w.node[node].free < count:
            return 0
        if limited and _room(w, j, node, kind, count) < count:
            return 0
        if gpus < 0 and w.node[node].free_units == 0:
            return 0
    w.log[w.state[0].log_rows].first = w.state[0].log_nodes
    if gpus < 0:
        _take_unit(w, w.named[first, 0], j)
    else:
        for i in range(first, end):
            _take(w, j, w.named[i, 0], w.named[i, 1])
    _open(w, j, max(gpus, 0), WHOLE)
    return 1


@helper(INT, WORLD, INT, INT, counted=False)
def start_beside(w, j, partner):  # type: ignore[no-untyped-def]
    """Run pending job j on the GPUs of a running job that shares them with nobody; else 0."""
    if partner == j or w.job[partner].phase != RUNS or w.job[partner].partner >= 0:
        return 0
    if w.job[partner].gpus == 0:
        return 0
    w.log[w.state[0].log_rows].first = w.state[0].log_nodes
    row = w.job[partner].held
    limited = w.supply.shape[0] > 0
    kind = w.supply[w.held[row].where, 0] if limited else 0
    if limited and rate_of(w, j, w.job[partner].gpus, kind) == 0:
        return 0
    while row >= 0 and limited:
        if _room(w, j, w.held[row].where, kind, w.held[row].count) < w.held[row].count:
            return 0
        row = w.held[row].following
    row = w.job[partner].held
    while row >= 0:
        _supply(w, j, w.held[row].where, -w.held[row].count)
        _note(w, w.held[row].where, w.held[row].count)
        row = w.held[row].following
    theirs = w.job[partner].row
    if w.log[theirs].half == WHOLE:
        w.log[theirs].half = HALF_A
    half = HALF_B if w.log[theirs].half == HALF_A else HALF_A
    _open(w, j, w.job[partner].gpus, half)
    w.log[w.job[j].row].partner = theirs
    w.job[j].partner, w.job[partner].partner = partner, j
    return 1


@helper(INT, WORLD, INT, counted=False)
def vacate(w, j):  # type: ignore[no-untyped-def]
    """Close the stay of synchronised running job j and give back what it holds alone."""
    now, row, partner = w.state[0].time, w.job[j].row, w.job[j].partner
    w.log[row].end, w.log[row].work = now, w.job[j].done - w.job[j].stay_done
    w.log[row].restart = min(w.log[row].restart, now - w.job[j].stay)
    w.job[j].attained += w.job[j].gpus * (now - w.job[j].stay)
    spare = w.job[j].held
    while spare >= 0:
        node, count, following = (
            w.held[spare].where,
            w.held[spare].count,
            w.held[spare].following,
        )
        _supply(w, j, node, count)
        if w.job[j].gpus == 0:
            w.node[node].free_units += 1
            w.state[0].free_zero += w.node[node].takes
        elif partner < 0:
            w.node[node].free += count
            w.state[0].free_gpus += count * w.node[node].takes
        w.held[spare].following = w.state[0].spare
        w.state[0].spare = spare
        spare = following
    if partner >= 0:
        w.job[partner].partner = w.job[j].partner = -1
    w.job[j].held = w.job[j].row = -1
    w.job[j].gpus = w.job[j].rate = w.job[j].alone = 0
    return withdraw(w, j)


@helper(INT, WORLD, INT, INT, counted=False)
def release(w, j, keeps):  # type: ignore[no-untyped-def]
    """Take running job j off its GPUs: for a resize (keeps = 1: `start` follows) or preempted."""
    if w.state[0].late == 1:
        w.job[j].owed = max(0, w.job[j].since - w.state[0].time)
    sync(w, j)
    if w.state[0].loses_pass == 1:
        w.job[j].done = w.job[j].kept
    vacate(w, j)
    w.job[j].phase, w.job[j].entered = PENDING, w.state[0].time
    if keeps == 0:
        w.job[j].preempted += 1
    return 0
