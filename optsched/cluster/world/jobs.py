"""Jobs that start, progress and stop on GPUs of the simulated cluster: kernels."""

from __future__ import annotations

from typing import Final

from optsched.cluster.world.layout import HALF_A, HALF_B, PENDING, RUNS, WHOLE
from optsched.cluster.world.pointers import WORLD
from optsched.kernels.compile import INT, helper

NEVER: Final = 2**62
"""Later than any horizon."""
PARTS: Final = 10**6
"""Speeds of pairs are in millionths."""

# columns that policies see


@helper(INT, WORLD, INT, counted=False)
def position(w, job):  # type: ignore[no-untyped-def]
    """Position of an active job, or where it is to be put; -1 for job -1."""
    low, high = 0, w.state.active
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
    job, now = w.job[j], w.state.time
    done = job.done
    if job.slot >= 0 and now > job.since:
        done += job.rate * (now - job.since)
    return min(done, w.given[j].work_total)


@helper(INT, WORLD, INT, INT, counted=False)
def show(w, i, columns):  # type: ignore[no-untyped-def]
    """Fill column i of these rows of `World.present`; rows as in `PRESENT`."""
    s, j, n, out = w.state, w.active[i], len(w.job), w.present
    job, now = w.job[j], s.time
    if columns & 1:
        out[i] = job.gpus
    if columns & 2:
        out[n + i] = 1 if job.slot >= 0 else 0
    if columns & 12:
        done = done_now(w, j)
        out[2 * n + i] = done
        out[3 * n + i] = max(1, w.given[j].estimate - done)
        if s.clairvoyant == 1:
            out[3 * n + i] = w.given[j].work_total - done
    if columns & 16:
        out[4 * n + i] = 1 if job.slot < 0 or job.pass_end == now else 0
    if columns & 480:
        out[5 * n + i], out[6 * n + i] = job.passes, job.starts
        out[7 * n + i], out[8 * n + i] = job.first_start, job.entered
    if columns & 512:
        out[9 * n + i] = job.attained + job.gpus * (now - job.stay)
    if columns & 1024:
        out[10 * n + i] = position(w, job.partner)
    return i


# running jobs by their next event: a binary heap in which every job has its row


@helper(INT, WORLD, INT, counted=False)
def _sift(w, i):  # type: ignore[no-untyped-def]
    """Move row i to its place: up while it is earlier (equal: lower job), else down."""
    row, n = w.heap[i], w.state.running_now
    time, job = row.time, row.job
    down = n
    while i > 0:
        other = w.heap[(i - 1) >> 1]
        if other.time < time or (other.time == time and other.job < job):
            down = 2 * i + 1
            break
        row.time, row.job = other.time, other.job
        w.job[row.job].slot = i
        i, row = (i - 1) >> 1, other
    if i == 0:
        down = 1
    while down < n:
        other = w.heap[down]
        if down + 1 < n:
            right = w.heap[down + 1]
            if right.time < other.time or (right.time == other.time and right.job < other.job):
                down, other = down + 1, right
        if time < other.time or (time == other.time and job < other.job):
            break
        row.time, row.job = other.time, other.job
        w.job[row.job].slot = i
        i, down, row = down, 2 * down + 1, other
    row.time, row.job = time, job
    w.job[job].slot = i
    return i


# progress of a job


@helper(INT, WORLD, INT, counted=False)
def sync(w, j):  # type: ignore[no-untyped-def]
    """Add the progress of running job j until now."""
    job, now = w.job[j], w.state.time
    if now > job.since:
        job.done = done_now(w, j)
        job.since = now
    return job.done


@helper(INT, WORLD, INT, counted=False)
def foresee(w, j):  # type: ignore[no-untyped-def]
    """Set when a pass or all work of synchronized running job j is done: its row of the heap."""
    job, given, s = w.job[j], w.given[j], w.state
    left, rate = min((job.passes + 1) * given.pass_work, given.work_total) - job.done, job.rate
    wait = (left + rate - 1) // rate
    job.next = NEVER if wait > s.horizon else job.since + wait
    if job.slot < 0:
        job.slot = s.running_now
        s.running_now += 1
    row = w.heap[job.slot]
    row.time, row.job = job.next, j
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
    if gpus == 0 or gpus < -1:
        return 0
    for k in range(w.given[j].first_size, w.given[j].end_size):
        if w.size[k] == max(gpus, 0):
            return w.rate[k + kind * len(w.size)]
    return 0


# GPUs of a job: rows of `World.log_node` from `LOG.first` to `end_node` of its open stay


@helper(INT, WORLD, INT, INT, INT, counted=False)
def _hold(w, j, node, gpus):  # type: ignore[no-untyped-def]
    """Take CPUs and memory for GPUs (< 0: give back), and the GPUs too unless a partner does."""
    if len(w.supply) > 0:
        w.supply[node].cpus -= gpus * w.demand[j].cpus
        w.supply[node].memory -= gpus * w.demand[j].memory
    if w.job[j].partner < 0:
        w.node[node].free -= gpus
        w.state.free_gpus -= gpus * w.node[node].takes
    return gpus


@helper(INT, WORLD, INT, INT, INT, counted=False)
def _take(w, j, node, gpus):  # type: ignore[no-untyped-def]
    """Take GPUs of a node for the stay that is being opened; its rows ascend by node."""
    s = w.state
    i, first = s.log_nodes, w.log[s.log_rows].first
    row = w.log_node[i]
    while i > first and w.log_node[i - 1].node > node:
        i -= 1
        before = w.log_node[i]
        row.node, row.gpus = before.node, before.gpus
        row = before
    row.node, row.gpus = node, gpus
    s.log_nodes += 1
    return _hold(w, j, node, gpus)


@helper(INT, WORLD, INT, INT, INT, INT, counted=False)
def _usable(w, j, node, kind, count):  # type: ignore[no-untyped-def]
    """How many of these GPUs of a node job j may use: of this type, with its CPUs and memory."""
    if len(w.supply) == 0:
        return count
    offer, need = w.supply[node], w.demand[j]
    if offer.block != kind:
        return 0
    if need.cpus > 0:
        count = min(count, offer.cpus // need.cpus)
    if need.memory > 0:
        count = min(count, offer.memory // need.memory)
    return count


@helper(INT, WORLD, INT, INT, counted=False)
def fastest(w, j, gpus):  # type: ignore[no-untyped-def]
    """The type on which job j is fastest among those with enough GPUs; -1: none has them."""
    best = -1
    if len(w.supply) == 0:
        return 0 if gpus <= w.state.free_gpus else -1
    most = 0
    for kind in range(1, len(w.rate) // len(w.size)):
        rate = rate_of(w, j, gpus, kind)
        if rate <= most:
            continue
        free = 0
        for n in range(len(w.node)):
            free += _usable(w, j, n, kind, w.node[n].free * w.node[n].takes)
        if free >= gpus:
            best, most = kind, rate
    return best


@helper(INT, WORLD, INT, INT, counted=False)
def _best_fit(w, j, gpus):  # type: ignore[no-untyped-def]
    """Take GPUs best-fit: the fullest node that fits; else the emptiest nodes wholly, and so on."""
    kind, need = fastest(w, j, gpus), gpus
    if kind < 0:
        return 0
    while need > 0:
        best = most = -1
        least, greatest = NEVER, 0
        for n in range(len(w.node)):
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


@helper(INT, WORLD, INT, INT, INT, counted=False)
def _open(w, j, gpus, half):  # type: ignore[no-untyped-def]
    """Run job j on the GPUs that were taken for it, after its restart cost."""
    job, s = w.job[j], w.state
    now, row = s.time, s.log_rows
    stay, cost = w.log[row], w.given[j].cost if job.starts > 0 else 0
    stay.job, stay.start, stay.end = j, now, -1
    stay.restart, stay.gpus, stay.half = cost, gpus, half
    stay.work, stay.partner = 0, -1
    stay.end_node = s.log_nodes
    s.log_rows += 1
    if job.starts == 0:
        job.first_start = now
    job.starts += 1
    job.phase, job.gpus, job.row, job.stay, job.entered = RUNS, gpus, row, now, now
    job.since, job.stay_done, job.kept = now + cost, job.done, job.done
    kind, held = 0, gpus if gpus > 0 else -1
    if gpus > 0 and len(w.supply) > 0:
        kind = w.supply[w.log_node[stay.first].node].block
    job.rate = job.alone = rate_of(w, j, held, kind)
    w.assigned[position(w, j)] = held
    return foresee(w, j)


@helper(INT, WORLD, INT, INT, INT, INT, counted=False)
def start(w, j, gpus, first, end):  # type: ignore[no-untyped-def]
    """Run pending job j on so many GPUs (-1: a zero-slot task); 0 if it does not fit.

    On the nodes of rows ``first:end`` of `World.named`, or best-fit if there are none. All
    releases of an instant come before its starts.
    """
    s = w.state
    w.log[s.log_rows].first = s.log_nodes
    if gpus < 0:
        node, last = 0, len(w.node) - 1
        if end > first:
            node = last = w.named[first].node
        while node <= last and (w.node[node].takes == 0 or w.node[node].free_units == 0):
            node += 1
        if node > last:
            return 0
        w.node[node].free_units -= 1
        w.job[j].unit = node
    elif end == first:
        if _best_fit(w, j, gpus) == 0:
            return 0
    else:
        kind = w.supply[w.named[first].node].block if len(w.supply) > 0 else 0
        if rate_of(w, j, gpus, kind) == 0:
            return 0
        for i in range(first, end):
            node, count = w.named[i].node, w.named[i].gpus
            if w.node[node].takes == 0 or w.node[node].free < count:
                return 0
            if _usable(w, j, node, kind, count) < count:
                return 0
        for i in range(first, end):
            _take(w, j, w.named[i].node, w.named[i].gpus)
    _open(w, j, max(gpus, 0), WHOLE)
    return 1


@helper(INT, WORLD, INT, INT, counted=False)
def start_shared(w, j, partner):  # type: ignore[no-untyped-def]
    """Run pending job j on the GPUs of a running job that shares them with no other; else 0.

    With measured pairs (`World.pair`) both change their speeds; other pairs are refused.
    """
    job, given, s, other = w.job[j], w.given[j], w.state, w.job[partner]
    if partner == j or other.gpus == 0 or other.partner >= 0:
        return 0
    kinds, pair = given.kinds, given.kind * given.kinds + w.given[partner].kind
    if kinds > 0 and w.pair[pair].joining == 0:
        return 0
    stay = w.log[other.row]
    kind = w.supply[w.log_node[stay.first].node].block if len(w.supply) > 0 else 0
    if rate_of(w, j, other.gpus, kind) == 0:
        return 0
    for i in range(stay.first, stay.end_node):
        held = w.log_node[i]
        if _usable(w, j, held.node, kind, held.gpus) < held.gpus:
            return 0
    w.log[s.log_rows].first = s.log_nodes
    job.partner, other.partner = partner, j
    for i in range(stay.first, stay.end_node):
        _take(w, j, w.log_node[i].node, w.log_node[i].gpus)
    if stay.half == WHOLE:
        stay.half = HALF_A
    _open(w, j, other.gpus, HALF_B if stay.half == HALF_A else HALF_A)
    w.log[job.row].partner = other.row
    if kinds > 0:
        _set_speed(w, j, w.pair[pair].joining)
        _set_speed(w, partner, w.pair[pair].host)
    return 1


@helper(INT, WORLD, INT, counted=False)
def vacate(w, j):  # type: ignore[no-untyped-def]
    """Close the stay of synchronized running job j and free what it holds alone."""
    job, s = w.job[j], w.state
    now, stay, partner = s.time, w.log[job.row], job.partner
    stay.end, stay.work = now, job.done - job.stay_done
    stay.restart = min(stay.restart, now - job.stay)
    job.attained += job.gpus * (now - job.stay)
    if job.gpus == 0:
        w.node[job.unit].free_units += 1
    for i in range(stay.first, stay.end_node):
        _hold(w, j, w.log_node[i].node, -w.log_node[i].gpus)
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
    if i < s.running_now:
        row, last = w.heap[i], w.heap[s.running_now]
        row.time, row.job = last.time, last.job
        _sift(w, i)
    return 0


@helper(INT, WORLD, INT, INT, counted=False)
def release(w, j, preempted):  # type: ignore[no-untyped-def]
    """Take running job j off its GPUs: preempted, or for a resize, after which `start` follows."""
    job, s = w.job[j], w.state
    sync(w, j)
    if s.loses_pass == 1:
        job.done = job.kept
    vacate(w, j)
    job.phase, job.entered = PENDING, s.time
    job.preempted += preempted
    return show(w, position(w, j), s.columns)


@helper(INT, WORLD, INT, INT, counted=False)
def has_room(w, j, gpus):  # type: ignore[no-untyped-def]
    """Whether running job j could be placed at this size (0 if it shares its GPUs)."""
    stay = w.log[w.job[j].row]
    for i in range(stay.first, stay.end_node):
        _hold(w, j, w.log_node[i].node, -w.log_node[i].gpus)
    kind = fastest(w, j, gpus)
    for i in range(stay.first, stay.end_node):
        _hold(w, j, w.log_node[i].node, w.log_node[i].gpus)
    return 1 if kind >= 0 and w.job[j].partner < 0 else 0
