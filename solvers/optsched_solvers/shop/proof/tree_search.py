"""The compiled tree: failure-directed branching, restarts, nogoods, and shaving at the root.

Vilim, Laborie & Shaw (2015): branch on the pair of which both sides should fail soonest. One
kernel, one loop: propagate, then take the next step of the task. Everything is in the records of
`State`, so work may be cut into slices without changing what is done.
"""

from __future__ import annotations

import math
from typing import Final

from optsched.kernels.compile import INT, entry, helper
from optsched_solvers.shop.proof.propagation import (
    EVERYTHING,
    decide,
    fixpoint,
    forget,
    lower_start,
    raise_start,
    touch,
    undo,
)
from optsched_solvers.shop.proof.state import FALSE, STATE, TRUE

# tasks of `run`
DECIDE: Final = 0
"""Make literal `until` true for good."""
PROPAGATE: Final = 1
"""The target, at the root."""
SHAVE: Final = 2
SEARCH: Final = 3
SEARCH_ON: Final = 4
"""The leaf that was handed out last is refuted: go on."""
RESTART: Final = 5
"""Back to the root, learning nogoods."""

# answers of `run`
GO_ON, SLICE_OVER, REFUTED, DONE, LEAF, FULL, RESTART_DUE = range(7)

SMOOTHING: Final = 0.95

_NOTHING, _WINDOW, _WINDOW_CUT, _PAIR, _PAIR_CUT = range(5)
"""What shaving has just propagated: a start or an order on trial, or the exclusion that follows
when the trial failed."""


@helper(counted=False)
def _retarget(s):  # type: ignore[no-untyped-def]
    """Nothing ends after the present target."""
    good = True
    for i in range(len(s.op) - 1):
        good = good and lower_start(s, i, s.search[0].target - s.op[i].duration)
    return good


@helper(counted=False)
def _decision_above(s, at):  # type: ignore[no-untyped-def]
    """The nearest entry before `at` that is a decision, not a refuted one; -1 at the root."""
    at -= 1
    while at >= 0 and s.entry[at].mark < 0:
        at -= 1
    return at


@helper(counted=False)
def _up_to_date(s):  # type: ignore[no-untyped-def]
    """Apply a target lowered meanwhile to the present level; False if that refutes it."""
    search = s.search[0]
    above = _decision_above(s, search.entries)
    applied = search.root_target if above < 0 else s.entry[above].target
    if applied <= search.target:
        return True
    if above < 0:
        search.root_target = search.target
    else:
        s.entry[above].target = search.target
    return _retarget(s)


@helper(counted=False)
def _push_level(s, m):  # type: ignore[no-untyped-def]
    """A new level, with m as its decision."""
    search = s.search[0]
    search.levels += 1
    at = search.entries
    s.entry[at].decision = m
    s.entry[at].mark = search.trail
    s.entry[at].level = search.levels
    s.entry[at].target = search.target  # `_up_to_date` holds here
    search.entries += 1
    search.level = search.levels


@helper(counted=False)
def _leave(s, at):  # type: ignore[no-untyped-def]
    """Undo the level of entry `at` and everything below it."""
    undo(s, s.entry[at].mark)
    above = _decision_above(s, at)
    s.search[0].level = 0 if above < 0 else s.entry[above].level
    s.search[0].entries = at


@helper(counted=False)
def _volume(s):  # type: ignore[no-untyped-def]
    """Sum of the logarithms of all windows: the size of the search space."""
    total = 1e-9
    for i in range(len(s.op) - 1):
        total += math.log2(1.0 + s.op[i].lst - s.op[i].est)
    return total


@helper(counted=False)
def _local(s, good, volume):  # type: ignore[no-untyped-def]
    """How far the branch is from a failure: 0 for a failure, up to 2 if nothing followed."""
    return 1.0 + 2.0 ** (0.5 * (_volume(s) - volume)) if good else 0.0


@helper(counted=False)
def _rate(s, m, local):  # type: ignore[no-untyped-def]
    """Vilim, Laborie & Shaw (2015), section 3.2: smoothed, relative to others at this depth."""
    depth = min(s.search[0].entries, s.average.shape[1] - 1)
    s.average[0, depth] += local
    s.average[1, depth] += 1.0
    mean = s.average[0, depth] / s.average[1, depth]
    share = local / mean if mean > 0.0 else 1.0
    s.rating[m] = SMOOTHING * s.rating[m] + (1.0 - SMOOTHING) * share


@helper(counted=False)
def _choose(s):  # type: ignore[no-untyped-def]
    """The better side of the open pair of least rating; -1 if everything is decided."""
    best = -1
    least = 1e300
    for r in range(len(s.machine) - 1):
        at = s.machine[r].pairs
        for x in range(at, at + s.machine[r].open):
            m = s.open[x]
            rating = s.rating[m] + s.rating[s.negation[m]]
            if rating < least or (rating == least and m < best):
                least = rating
                best = m
    if best >= 0 and s.rating[s.negation[best]] < s.rating[best]:
        best = s.negation[best]
    return best


@helper(counted=False)
def _turn_back(s):  # type: ignore[no-untyped-def]
    """Undo the last decision and enter its opposite; -1 if there is none left.

    `search.good`: whether that is not refuted yet.
    """
    search = s.search[0]
    at = _decision_above(s, search.entries)
    if at < 0:
        return -1
    opposite = s.negation[s.entry[at].decision]
    _leave(s, at)
    s.entry[at].decision = opposite
    s.entry[at].mark = -1
    search.entries = at + 1
    search.good = _up_to_date(s) and decide(s, opposite)
    return opposite


@helper(counted=False)
def _shave_on(s, until, volume):  # type: ignore[no-untyped-def]
    """What follows from the last probe, and the next one: see `run`.

    Earliest and latest starts come first, two numbers of the cursor for each operation, then
    literals. What fails when tried is excluded: the starts that were tried, or the order.
    """
    search = s.search[0]
    probe = search.probe
    search.probe = _NOTHING
    if probe == _WINDOW:
        _leave(s, 0)
        if _window_tried(s):
            return GO_ON
    elif probe == _PAIR:
        if _pair_tried(s, volume):
            return GO_ON
    elif probe != _NOTHING:
        if not search.good:
            return REFUTED
        if probe == _PAIR_CUT:
            search.cursor += 1
    return _next_probe(s, until)


@helper(counted=False)
def _window_tried(s):  # type: ignore[no-untyped-def]
    """The cursor's operation was held in one end of its window; whether that end is cut off.

    Widths double while cuts succeed, then halve (a step below 0 is -1 - width); the last has 0.
    """
    search = s.search[0]
    good, step = search.good, search.step
    growing = step >= 0
    width = step if growing else -step - 1
    if growing and not good:
        search.step = 2 * step + 1
    else:
        search.step = -(width // 2) - 1
    i, late = search.cursor >> 1, search.cursor & 1
    if width == 0 and (good or not growing):
        _next_window(s)
    if good:
        return False
    search.probe = _WINDOW_CUT
    if late:
        search.good = lower_start(s, i, s.op[i].lst - width - 1)
    else:
        search.good = raise_start(s, i, s.op[i].est + width + 1)
    return True


@helper(counted=False)
def _pair_tried(s, volume):  # type: ignore[no-untyped-def]
    """The cursor's literal was true on trial: rate it; whether its negation is now decided."""
    search = s.search[0]
    m = search.cursor - 2 * (len(s.op) - 1)
    s.rating[m] = 0.0
    _rate(s, m, _local(s, search.good, volume))
    s.rating[m] /= 1.0 - SMOOTHING  # this probe alone
    _leave(s, 0)
    if search.good:
        search.cursor += 1
        return False
    search.probe = _PAIR_CUT
    search.good = decide(s, s.negation[m])
    return True


@helper(counted=False)
def _next_probe(s, until):  # type: ignore[no-untyped-def]
    search = s.search[0]
    windows = 2 * (len(s.op) - 1)
    while search.cursor < search.cursor_end:
        if search.nodes >= until:
            return SLICE_OVER
        if _is_full(s):
            return FULL
        begun = _try_window(s) if search.cursor < windows else _try_pair(s, search.cursor - windows)
        if begun:
            search.nodes += 1
            return GO_ON
    return DONE


@helper(counted=False)
def _try_window(s):  # type: ignore[no-untyped-def]
    """Hold the cursor's operation in one end of its window; False if it has one start left."""
    search = s.search[0]
    i, late = search.cursor >> 1, search.cursor & 1
    op = s.op[i]
    slack = op.lst - op.est
    if slack == 0:
        _next_window(s)
        return False
    width = search.step if search.step >= 0 else -search.step - 1
    if width >= slack:
        width = slack // 2
        search.step = -width - 1
    search.probe = _WINDOW
    _push_level(s, 0)
    if late:
        search.good = raise_start(s, i, op.lst - width)
    else:
        search.good = lower_start(s, i, op.est + width)
    return True


@helper(counted=False)
def _next_window(s):  # type: ignore[no-untyped-def]
    s.search[0].cursor += 1
    s.search[0].step = 0


@helper(counted=False)
def _try_pair(s, m):  # type: ignore[no-untyped-def]
    """Make literal m true on trial; False if it is decided."""
    search = s.search[0]
    if s.negation[m] == m or s.value[m]:
        search.cursor += 1
        return False
    search.probe = _PAIR
    _push_level(s, m)
    search.good = decide(s, m)
    return True


@helper(counted=False)
def _is_full(s):  # type: ignore[no-untyped-def]
    """Whether the trail may be too short for one more level."""
    return s.search[0].trail + 2 * len(s.op) + len(s.value) >= len(s.trail)


@helper(counted=False)
def _to_root(s):  # type: ignore[no-untyped-def]
    """Back to the root; every refuted decision becomes a nogood with the decisions above it.

    Reduced nld-nogoods (Lecoutre, Sais, Tabary & Vidal 2007). There must be room for them.
    """
    search = s.search[0]
    entries = search.entries
    first = 0
    while first < entries and s.entry[first].mark < 0:
        first += 1
    if first < entries:
        _leave(s, first)
    search.entries = 0
    good = _up_to_date(s)
    for x in range(entries):
        good = good and (s.entry[x].mark >= 0 or _learn(s, x))
    return good


@helper(counted=False)
def _learn(s, x):  # type: ignore[no-untyped-def]
    """Entry x was refuted under the decisions before it: keep that as a nogood.

    Literals that are decided at the root are left out.
    """
    search = s.search[0]
    k = search.nogoods
    at = s.nogood_ptr[k]
    end = at
    for y in range(x + 1):
        m = s.entry[y].decision
        if y < x and s.entry[y].mark < 0:
            continue
        if y == x:
            m = s.negation[m]
        if s.value[m] == FALSE:
            return True  # can never happen again
        if s.value[m] != TRUE:
            s.nogood[end] = m
            end += 1
    if end == at:
        return False
    if end == at + 1:
        return decide(s, s.negation[s.nogood[at]])
    s.nogood[at], s.nogood[end - 1] = s.nogood[end - 1], s.nogood[at]
    for side in range(2):
        watch = 2 * k + side
        m = s.nogood[at + side]
        s.next_watch[watch] = s.literal[m].watched
        s.literal[m].watched = watch
    s.nogood_ptr[k + 1] = end
    search.nogoods = k + 1
    search.nogood_literals = end
    return True


@entry(INT, STATE, INT, INT, counted=False)
def run(s, task, until):  # type: ignore[no-untyped-def]
    """Work on a task until `search.nodes` is `until`, or the caller has to act.

    Returns REFUTED: no schedule ends by the target; DONE: propagated, or shaved from
    `search.cursor` up to `search.cursor_end`; LEAF: all pairs are decided; FULL: trail or entries
    must grow; RESTART_DUE: after enough failures, with nothing undone yet; SLICE_OVER.
    """
    search = s.search[0]
    good = True
    m = -1  # the decision that is propagated next
    if task == DECIDE:
        return DONE if decide(s, until) else REFUTED
    if task == PROPAGATE:
        good = _retarget(s)
        for r in range(len(s.machine) - 1):
            touch(s, r, EVERYTHING)
    elif task == RESTART:
        good = _to_root(s)
    elif task == SEARCH_ON or (task == SEARCH and search.failed):
        good = False
    elif task == SEARCH:
        good = _up_to_date(s)
    search.failed = 0
    at_root = task in (PROPAGATE, RESTART)
    volume = 1.0
    # invariant: `entry` is the path from the root, with its decisions on the trail; all branches
    # left of it are refuted, so a path that turns back beyond the root refutes the target
    while True:
        if good:
            good = fixpoint(s)
        if not good:
            forget(s)
        if at_root:
            return DONE if good else REFUTED
        if task == SHAVE:
            search.good = good
            answer = _shave_on(s, until, volume)
            if answer != GO_ON:
                return answer
            volume = _volume(s)
            good = search.good != 0
            continue
        if m >= 0:
            _rate(s, m, _local(s, good, volume))
        if not good:
            if search.nodes >= until:
                search.failed = 1  # the next call goes on from here
                return SLICE_OVER
            search.failures += 1
            m = _turn_back(s)
            if m < 0:
                return REFUTED
            good = search.good != 0
        else:
            m = -1
            if search.nodes >= until:
                return SLICE_OVER
            if _is_full(s):
                return FULL
            if search.entries + 1 >= len(s.entry):
                return FULL
            if search.failures >= search.restart_at:
                return RESTART_DUE
            m = _choose(s)
            if m < 0:
                return LEAF
            _push_level(s, m)
            good = decide(s, m)
        volume = _volume(s)
        search.nodes += 1
