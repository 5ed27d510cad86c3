"""Jobs that start, progress and stop on GPUs of the simulated cluster: kernels."""

from __future__ import annotations

from typing import Final

from optsched.cluster.world.layout import HALF_A, HALF_B, PENDING, RUNS, WHOLE, WORLD
from optsched.kernels.compile import INT, helper

NEVER: Final = 2**62
"""Later than any horizon."""
PARTS: Final = 10**6
"""Speeds of pairs are in millionths."""

# columns that policies see


@helper(INT, WORLD, INT, counted=False)
def position(w, job):  # type: ignore[no-untyped-def]
    """Position of an active job, or where it is to be put; -1 for job -1."""
    low, high = 0, w.state[0].active
    while low < high:
        middle = (low + high) >> 1
        if w.active[middle] < job:
            low = middle + 1
        else:
            high = middle
    return low if job >= 0 else -1


@helper(INT, WORLD, INT, counted=False)
def done_now(w, j):  # type: ignore[no-untyped-def]
    """Work done until now, at most all."""
    job, s = w.job[j], w.state[0]
    done = job.done
    if job.slot >= 0 and s.time > job.since:
        done += job.rate * (s.time - job.since)
    return min(done, w.given[j].work_total)


@helper(INT, WORLD, INT, INT, counted=False)
def show(w, i, columns):  # type: ignore[no-untyped-def]
    """Fill column i of these rows of `World.present`; rows as in `columns.PRESENT`."""
    s = w.state[0]
    j, out, now = w.active[i], w.present, s.time
    job = w.job[j]
    runs = job.slot >= 0
    if columns & 1:
        out[0, i] = job.gpus
    if columns & 2:
        out[1, i] = 1 if runs else 0
    if columns & 12:
        out[2, i] = done_now(w, j)
        left = max(1, w.given[j].estimate - out[2, i])
        if s.clairvoyant == 1:
            left = w.given[j].work_total - out[2, i]
        out[3, i] = left
    if columns & 16:
        out[4, i] = 1 if not runs or job.pass_end == now else 0
    if columns & 480:
        out[5, i], out[6, i] = job.passes, job.starts
        out[7, i], out[8, i] = job.first_start, job.entered
    if columns & 512:
        out[9, i] = job.attained + job.gpus * (now - job.stay)
    if columns & 1024:
        out[10, i] = position(w, job.partner)
    return i


# running jobs by their next event: a binary heap in which every job has its row


@helper(INT, WORLD, INT, counted=False)
def _sift(w, i):  # type: ignore[no-untyped-def]
    """Move row i to its place: up while it is earlier (equal: lower job), else down."""
    time, job, n = w.heap[i, 0], w.heap[i, 1], w.state[0].running_now
    while i > 0:
        up = (i - 1) >> 1
        other = w.heap[up, 0]
        if other < time or (other == time and w.heap[up, 1] < job):
            break
        w.heap[i, 0], w.heap[i, 1] = other, w.heap[up, 1]
        w.job[w.heap[i, 1]].slot = i
        i = up
    down = 2 * i + 1
    while down < n:
        other = w.heap[down, 0]
        if down + 1 < n:
            right = w.heap[down + 1, 0]
            if right < other or (right == other and w.heap[down + 1, 1] < w.heap[down, 1]):
                down, other = down + 1, right
        if time < other or (time == other and job < w.heap[down, 1]):
            break
        w.heap[i, 0], w.heap[i, 1] = other, w.heap[down, 1]
        w.job[w.heap[i, 1]].slot = i
        i, down = down, 2 * down + 1
    w.heap[i, 0], w.heap[i, 1] = time, job
    w.job[job].slot = i
    return i


# progress of a job


@helper(INT, WORLD, INT, counted=False)
def sync(w, j):  # type: ignore[no-untyped-def]
    """Add the progress of running job j until now."""
    job, s = w.job[j], w.state[0]
    if s.time > job.since:
        job.done, job.since = done_now(w, j), s.time
    return job.done


@helper(INT, WORLD, INT, counted=False)
def foresee(w, j):  # type: ignore[no-untyped-def]
    """Set `JOB.next` of synchronized job j, when a pass or all its work is done, and its row."""
    job, given, s = w.job[j], w.given[j], w.state[0]
    goal = min((job.passes + 1) * given.pass_work, given.work_total)
    left, rate = goal - job.done, job.rate
    wait = (left + rate - 1) // rate
    job.next = NEVER if wait > s.horizon else job.since + wait
    if job.slot < 0:
        job.slot = s.running_now
        s.running_now += 1
    w.heap[job.slot, 0], w.heap[job.slot, 1] = job.next, j
    return _sift(w, job.slot)


@helper(INT, WORLD, INT, INT, counted=False)
def _set_speed(w, j, parts):  # type: ignore[no-untyped-def]
    """From now on running job j is so fast, in millionths of its speed alone."""
    job = w.job[j]
    sync(w, j)
    job.rate = max(1, (job.alone * parts + PARTS // 2) // PARTS)
    return foresee(w, j)


@helper(INT, WORLD, INT, INT, INT, counted=False)
def rate_of(w, j, gpus, kind):  # type: ignore[no-untyped-def]
    """Work per unit of time on so many GPUs (-1: a zero-slot task); 0 if that is not a size.

    On a type of GPU (0: any), 0 if the job does not run on that.
    """
    given = w.given[j]
    if gpus == 0 or gpus < -1:
        return 0
    for k in range(given.first_size, given.end_size):
        if w.size[k] == max(gpus, 0):
            return w.rate[k + kind * w.size.shape[0]]
    return 0


# GPUs of a job: rows of `World.log_node` from `LOG.first` to `end_node` of its open stay


@helper(INT, WORLD, INT, INT, INT, counted=False)
def _take(w, j, node, count):  # type: ignore[no-untyped-def]
    """Take GPUs of a node for the stay that is being opened; its rows ascend by node."""
    w.node[node].free -= count
    w.state[0].free_gpus -= count
    return _note(w, j, node, count)


@helper(INT, WORLD, INT, INT, INT, counted=False)
def _note(w, j, node, count):  # type: ignore[no-untyped-def]
    """Write a row of the stay that is being opened, and take CPUs and memory."""
    s = w.state[0]
    if w.supply.shape[0] > 0:
        w.supply[node, 1] -= count * w.demand[j, 0]
        w.supply[node, 2] -= count * w.demand[j, 1]
    i = s.log_nodes
    first = w.log[s.log_rows].first
    while i > first and w.log_node[i - 1, 0] > node:
        w.log_node[i, 0], w.log_node[i, 1] = w.log_node[i - 1, 0], w.log_node[i - 1, 1]
        i -= 1
    w.log_node[i, 0], w.log_node[i, 1] = node, count
    s.log_nodes += 1
    return i


@helper(INT, WORLD, INT, INT, INT, INT, counted=False)
def _usable(w, j, node, kind, count):  # type: ignore[no-untyped-def]
    """How many of these GPUs of a node job j may use: of this type, with its CPUs and memory."""
    if w.supply.shape[0] == 0:
        return count
    if w.supply[node, 0] != kind:
        return 0
    for k in range(2):
        if w.demand[j, k] > 0:
            count = min(count, w.supply[node, k + 1] // w.demand[j, k])
    return count


@helper(INT, WORLD, INT, INT, counted=False)
def _fastest(w, j, gpus):  # type: ignore[no-untyped-def]
    """The type on which job j is fastest among those with enough GPUs; -1: none has them."""
    best, fastest = -1, 0
    for kind in range(1, w.rate.shape[0] // w.size.shape[0]):
        rate = rate_of(w, j, gpus, kind)
        if rate <= fastest:
            continue
        free = 0
        for n in range(w.node.shape[0]):
            free += _usable(w, j, n, kind, w.node[n].free * w.node[n].takes)
        if free >= gpus:
            best, fastest = kind, rate
    return best


@helper(INT, WORLD, INT, INT, counted=False)
def _best_fit(w, j, gpus):  # type: ignore[no-untyped-def]
    """Take GPUs best-fit: the fullest node that fits; else the emptiest ones wholly, and so on."""
    kind = 0 if w.supply.shape[0] == 0 else _fastest(w, j, gpus)
    if gpus > w.state[0].free_gpus or kind < 0:
        return 0
    need = gpus
    while need > 0:
        best = most = -1
        least, greatest = NEVER, 0
        for n in range(w.node.shape[0]):
            free = w.node[n].free
            if w.node[n].takes == 0 or free == 0:
                continue
            free = _usable(w, j, n, kind, free)
            if need <= free < least:
                best, least = n, free
                if free == need:
                    break
            if free > greatest:
                most, greatest = n, free
        if best >= 0:
            most, greatest = best, need
        _take(w, j, most, greatest)
        need -= greatest
    return 1


@helper(INT, WORLD, INT, INT, INT, INT, counted=False)
def _named(w, j, gpus, first, end):  # type: ignore[no-untyped-def]
    """Take the GPUs of rows ``first:end`` of `World.named`; 0 if a node has too few."""
    kind = w.supply[w.named[first, 0], 0] if w.supply.shape[0] > 0 else 0
    if rate_of(w, j, gpus, kind) == 0:
        return 0
    for i in range(first, end):
        node, count = w.named[i, 0], w.named[i, 1]
        if w.node[node].takes == 0 or w.node[node].free < count:
            return 0
        if _usable(w, j, node, kind, count) < count:
            return 0
    for i in range(first, end):
        _take(w, j, w.named[i, 0], w.named[i, 1])
    return 1


@helper(INT, WORLD, INT, INT, INT, counted=False)
def _open(w, j, gpus, half):  # type: ignore[no-untyped-def]
    """Run job j on the GPUs that were taken for it, after its restart cost."""
    job, s = w.job[j], w.state[0]
    now, row = s.time, s.log_rows
    cost = w.given[j].cost if job.starts > 0 else 0
    stay = w.log[row]
    stay.job, stay.start, stay.end = j, now, -1
    stay.restart, stay.gpus, stay.half = cost, gpus, half
    stay.work, stay.partner = 0, -1
    stay.end_node = s.log_nodes
    s.log_rows += 1
    job.phase, job.gpus, job.row, job.stay = RUNS, gpus, row, now
    job.entered = now
    if job.starts == 0:
        job.first_start = now
    job.starts += 1
    job.since, job.stay_done = now + cost, job.done
    job.kept = job.done
    kind = 0
    if gpus > 0 and w.supply.shape[0] > 0:
        kind = w.supply[w.log_node[stay.first, 0], 0]
    job.rate = job.alone = rate_of(w, j, gpus if gpus > 0 else -1, kind)
    w.assigned[position(w, j)] = gpus if gpus > 0 else -1
    return foresee(w, j)


@helper(INT, WORLD, INT, INT, INT, INT, counted=False)
def start(w, j, gpus, first, end):  # type: ignore[no-untyped-def]
    """Run pending job j on so many GPUs (-1: a zero-slot task); 0 if it does not fit.

    On the nodes of rows ``first:end`` of `World.named`, or best-fit if there are none. All
    releases of an instant come before its starts.
    """
    s = w.state[0]
    w.log[s.log_rows].first = s.log_nodes
    if gpus < 0:
        node = w.named[first, 0] if end > first else 0
        while (
            end == first
            and node < w.node.shape[0]
            and (w.node[node].takes == 0 or w.node[node].free_units == 0)
        ):
            node += 1
        if node == w.node.shape[0] or w.node[node].takes == 0 or w.node[node].free_units == 0:
            return 0
        w.node[node].free_units -= 1
        w.job[j].unit = node
    elif end > first:
        if _named(w, j, gpus, first, end) == 0:
            return 0
    elif _best_fit(w, j, gpus) == 0:
        return 0
    _open(w, j, max(gpus, 0), WHOLE)
    return 1


@helper(INT, WORLD, INT, INT, counted=False)
def start_shared(w, j, partner):  # type: ignore[no-untyped-def]
    """Run pending job j on the GPUs of a running job that shares them with no other; else 0.

    With measured pairs (`World.pair`) both change their speeds; other pairs are refused.
    """
    job, given, s = w.job[j], w.given[j], w.state[0]
    theirs, gpus = w.job[partner].row, w.job[partner].gpus
    if partner == j or gpus == 0 or w.job[partner].partner >= 0:
        return 0
    kinds, pair = given.kinds, given.kind * given.kinds + w.given[partner].kind
    if kinds > 0 and w.pair[pair, 0] == 0:
        return 0
    first, end = w.log[theirs].first, w.log[theirs].end_node
    kind = w.supply[w.log_node[first, 0], 0] if w.supply.shape[0] > 0 else 0
    if rate_of(w, j, gpus, kind) == 0:
        return 0
    for i in range(first, end):
        if _usable(w, j, w.log_node[i, 0], kind, w.log_node[i, 1]) < w.log_node[i, 1]:
            return 0
    w.log[s.log_rows].first = s.log_nodes
    for i in range(first, end):
        _note(w, j, w.log_node[i, 0], w.log_node[i, 1])
    if w.log[theirs].half == WHOLE:
        w.log[theirs].half = HALF_A
    _open(w, j, gpus, HALF_B if w.log[theirs].half == HALF_A else HALF_A)
    w.log[job.row].partner = theirs
    job.partner, w.job[partner].partner = partner, j
    if kinds > 0:
        _set_speed(w, j, w.pair[pair, 0])
        _set_speed(w, partner, w.pair[pair, 1])
    return 1


@helper(INT, WORLD, INT, counted=False)
def vacate(w, j):  # type: ignore[no-untyped-def]
    """Close the stay of synchronized running job j and free what it holds alone."""
    job, s = w.job[j], w.state[0]
    now, row, partner = s.time, job.row, job.partner
    stay = w.log[row]
    stay.end, stay.work = now, job.done - job.stay_done
    stay.restart = min(stay.restart, now - job.stay)
    job.attained += job.gpus * (now - job.stay)
    if job.gpus == 0:
        w.node[job.unit].free_units += 1
    for i in range(stay.first, stay.end_node):
        node, count = w.log_node[i, 0], w.log_node[i, 1]
        if w.supply.shape[0] > 0:
            w.supply[node, 1] += count * w.demand[j, 0]
            w.supply[node, 2] += count * w.demand[j, 1]
        if partner < 0:
            w.node[node].free += count
            s.free_gpus += count * w.node[node].takes
    if partner >= 0:
        w.job[partner].partner = job.partner = -1
        if w.job[partner].rate != w.job[partner].alone:
            _set_speed(w, partner, PARTS)
    job.row = -1
    job.gpus = job.rate = job.alone = 0
    w.assigned[position(w, j)] = 0
    i = job.slot
    job.slot = -1
    s.running_now -= 1
    last = s.running_now
    if i < last:
        w.heap[i, 0], w.heap[i, 1] = w.heap[last, 0], w.heap[last, 1]
        _sift(w, i)
    return 0


@helper(INT, WORLD, INT, INT, counted=False)
def release(w, j, preempted):  # type: ignore[no-untyped-def]
    """Take running job j off its GPUs: preempted, or for a resize, after which `start` follows."""
    job, s = w.job[j], w.state[0]
    sync(w, j)
    if s.loses_pass == 1:
        job.done = job.kept
    vacate(w, j)
    job.phase, job.entered = PENDING, s.time
    job.preempted += preempted
    return show(w, position(w, j), s.columns)
