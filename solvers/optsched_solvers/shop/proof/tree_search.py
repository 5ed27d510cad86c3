# ruff: noqa: I001  (constants side by side, not one per line)
"""The compiled tree: failure-directed branching, restarts, nogoods, and shaving at the root.

Vilim, Laborie & Shaw (2015): branch on the pair whose two sides promise to fail soonest. One
kernel, one loop: propagate, then take the next step of the task. All state is in the arrays of
`disjunctive_state`, so work may be cut into slices without changing what is done.
"""

from __future__ import annotations

import math
from typing import Final

from optsched.kernels.compile import INT, entry, helper
from optsched_solvers.shop.proof.propagation import (
    EVERYTHING, decide, fixpoint, forget, lower_start, raise_start, touch, undo,
)  # fmt: skip
from optsched_solvers.shop.proof.state import (
    ARRAYS, CURSOR, CURSOR_END, DECISION, DURATION, ENTRIES, EST, FAILED, FAILURES, FALSE, GOOD,
    LEVEL, LEVELS, LEVEL_OF, LST, MARK, NEGATION, NODES, NOGOODS, NOGOOD_LITERALS, N_OPEN, OPEN,
    PAIRS, PROBE, RESTART_AT, ROOT_TARGET, STEP, TARGET, TARGET_OF, TRAIL, TRUE, WATCHED,
)  # fmt: skip

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

# what `number[PROBE]` says has just been propagated in shaving
_NOTHING, _PAIR, _WINDOW, _CUT_PAIR, _CUT_WINDOW = range(5)


@helper(counted=False)
def _retarget(s):  # type: ignore[no-untyped-def]
    """Nothing ends after the present target."""
    good = True
    for i in range(s.op.shape[1] - 1):
        good = good and lower_start(s, i, s.number[TARGET] - s.op[DURATION, i])
    return good


@helper(counted=False)
def _decision_above(s, at):  # type: ignore[no-untyped-def]
    """The nearest entry before `at` that is a decision, not a refuted one; -1 at the root."""
    at -= 1
    while at >= 0 and s.entry[MARK, at] < 0:
        at -= 1
    return at


@helper(counted=False)
def _up_to_date(s):  # type: ignore[no-untyped-def]
    """Apply a target lowered meanwhile to the present level; False if that refutes it."""
    number = s.number
    above = _decision_above(s, number[ENTRIES])
    applied = number[ROOT_TARGET] if above < 0 else s.entry[TARGET_OF, above]
    if applied <= number[TARGET]:
        return True
    if above < 0:
        number[ROOT_TARGET] = number[TARGET]
    else:
        s.entry[TARGET_OF, above] = number[TARGET]
    return _retarget(s)


@helper(counted=False)
def _enter(s, m):  # type: ignore[no-untyped-def]
    """A new level, with m as its decision."""
    number = s.number
    number[LEVELS] += 1
    at = number[ENTRIES]
    s.entry[DECISION, at] = m
    s.entry[MARK, at] = number[TRAIL]
    s.entry[LEVEL_OF, at] = number[LEVELS]
    s.entry[TARGET_OF, at] = number[TARGET]  # `_up_to_date` holds here
    number[ENTRIES] += 1
    number[LEVEL] = number[LEVELS]


@helper(counted=False)
def _leave(s, at):  # type: ignore[no-untyped-def]
    """Undo the level of entry `at` and everything below it."""
    undo(s, s.entry[MARK, at])
    above = _decision_above(s, at)
    s.number[LEVEL] = 0 if above < 0 else s.entry[LEVEL_OF, above]
    s.number[ENTRIES] = at


@helper(counted=False)
def _volume(s):  # type: ignore[no-untyped-def]
    """Sum of the logarithms of all windows: the size of the search space."""
    total = 1e-9
    for i in range(s.op.shape[1] - 1):
        total += math.log2(1.0 + s.op[LST, i] - s.op[EST, i])
    return total


@helper(counted=False)
def _local(s, good, volume):  # type: ignore[no-untyped-def]
    """How far the branch is from a failure: 0 for a failure, up to 2 if nothing followed."""
    return 1.0 + 2.0 ** (0.5 * (_volume(s) - volume)) if good else 0.0


@helper(counted=False)
def _rate(s, m, local):  # type: ignore[no-untyped-def]
    """Vilim, Laborie & Shaw (2015), section 3.2: smoothed, relative to others at this depth."""
    depth = min(s.number[ENTRIES], s.average.shape[1] - 1)
    s.average[0, depth] += local
    s.average[1, depth] += 1.0
    usual = s.average[0, depth] / s.average[1, depth]
    share = local / usual if usual > 0.0 else 1.0
    s.rating[m] = SMOOTHING * s.rating[m] + (1.0 - SMOOTHING) * share


@helper(counted=False)
def _choose(s):  # type: ignore[no-untyped-def]
    """The better side of the open pair of least rating; -1 if everything is decided."""
    best = -1
    least = 1e300
    for r in range(s.machine.shape[1] - 1):
        at = s.machine[PAIRS, r]
        for x in range(at, at + s.machine[N_OPEN, r]):
            m = s.literal[OPEN, x]
            rating = s.rating[m] + s.rating[s.literal[NEGATION, m]]
            if rating < least or (rating == least and m < best):
                least = rating
                best = m
    if best >= 0 and s.rating[s.literal[NEGATION, best]] < s.rating[best]:
        best = s.literal[NEGATION, best]
    return best


@helper(counted=False)
def _turn_back(s):  # type: ignore[no-untyped-def]
    """Undo the last decision and enter its opposite; -1 if there is none left.

    `number[GOOD]` tells whether that is worth propagating.
    """
    number = s.number
    at = _decision_above(s, number[ENTRIES])
    if at < 0:
        return -1
    opposite = s.literal[NEGATION, s.entry[DECISION, at]]
    _leave(s, at)
    s.entry[DECISION, at] = opposite
    s.entry[MARK, at] = -1
    number[ENTRIES] = at + 1
    number[GOOD] = _up_to_date(s) and decide(s, opposite)
    return opposite


@helper(counted=False)
def _shave_on(s, until, volume):  # type: ignore[no-untyped-def]
    """The next probe, of earliest and latest starts first, then of literals; see `run`.

    What fails when tried is excluded: the opposite order, or the starts that were tried. Windows
    are cut from their end: steps double while they fail, then halve.
    """
    number = s.number
    at = number[CURSOR]
    i, late = at >> 1, at & 1
    m = at - 2 * (s.op.shape[1] - 1)
    probe, good = number[PROBE], number[GOOD]
    step = number[STEP]
    if probe >= _CUT_PAIR:
        if not good:
            return REFUTED
        number[PROBE] = _NOTHING
        if probe == _CUT_PAIR:
            number[CURSOR] += 1
    elif probe == _PAIR:
        s.rating[m] = 0.0
        _rate(s, m, _local(s, good, volume))
        s.rating[m] /= 1.0 - SMOOTHING  # this probe alone
        _leave(s, 0)
        number[PROBE] = _NOTHING
        if not good:
            number[PROBE] = _CUT_PAIR
            number[GOOD] = decide(s, s.literal[NEGATION, m])
            return GO_ON
        number[CURSOR] += 1
    elif probe == _WINDOW:
        _leave(s, 0)
        number[PROBE] = _NOTHING
        growing = step >= 0
        width = step if growing else -step - 1
        if good and width == 0:
            number[CURSOR] += 1
            number[STEP] = 0
        elif growing and not good:
            number[STEP] = 2 * step + 1
        else:  # halve; the last cut of width 0 ends it
            number[STEP] = -(width // 2) - 1
        if not good:
            number[PROBE] = _CUT_WINDOW
            if late:
                number[GOOD] = lower_start(s, i, s.op[LST, i] - width - 1)
            else:
                number[GOOD] = raise_start(s, i, s.op[EST, i] + width + 1)
            if width == 0 and not growing:
                number[CURSOR] += 1
                number[STEP] = 0
            return GO_ON
    return _next_probe(s, until)


@helper(counted=False)
def _next_probe(s, until):  # type: ignore[no-untyped-def]
    number = s.number
    windows = 2 * (s.op.shape[1] - 1)
    while number[CURSOR] < number[CURSOR_END]:
        if number[NODES] >= until:
            return SLICE_OVER
        if number[TRAIL] + 2 * s.op.shape[1] + len(s.value) >= s.trail.shape[1]:
            return FULL
        at = number[CURSOR]
        if at >= windows:
            m = at - windows
            if s.literal[NEGATION, m] == m or s.value[m]:
                number[CURSOR] += 1
                continue
            number[PROBE] = _PAIR
            _enter(s, m)
            number[GOOD] = decide(s, m)
        else:
            i, late = at >> 1, at & 1
            width = number[STEP] if number[STEP] >= 0 else -number[STEP] - 1
            slack = s.op[LST, i] - s.op[EST, i]
            if slack == 0:
                number[CURSOR] += 1
                number[STEP] = 0
                continue
            if width >= slack:
                width = slack // 2
                number[STEP] = -width - 1
            number[PROBE] = _WINDOW
            _enter(s, 0)
            if late:
                number[GOOD] = raise_start(s, i, s.op[LST, i] - width)
            else:
                number[GOOD] = lower_start(s, i, s.op[EST, i] + width)
        number[NODES] += 1
        return GO_ON
    return DONE


@helper(counted=False)
def _to_root(s):  # type: ignore[no-untyped-def]
    """Back to the root; every refuted decision becomes a nogood with the decisions above it.

    Reduced nld-nogoods (Lecoutre, Sais, Tabary & Vidal 2007). There must be room for them.
    """
    number = s.number
    entries = number[ENTRIES]
    first = 0
    while first < entries and s.entry[MARK, first] < 0:
        first += 1
    if first < entries:
        _leave(s, first)
    number[ENTRIES] = 0
    good = _up_to_date(s)
    for x in range(entries):
        good = good and (s.entry[MARK, x] >= 0 or _learn(s, x))
    return good


@helper(counted=False)
def _learn(s, x):  # type: ignore[no-untyped-def]
    """Entry x was refuted under the decisions before it: keep that, without what the root knows."""
    number = s.number
    k = number[NOGOODS]
    at = s.nogood_ptr[k]
    end = at
    for y in range(x + 1):
        m = s.entry[DECISION, y]
        if y < x and s.entry[MARK, y] < 0:
            continue
        if y == x:
            m = s.literal[NEGATION, m]
        if s.value[m] == FALSE:
            return True  # can never happen again
        if s.value[m] != TRUE:
            s.nogood[end] = m
            end += 1
    if end == at:
        return False
    if end == at + 1:
        return decide(s, s.literal[NEGATION, s.nogood[at]])
    s.nogood[at], s.nogood[end - 1] = s.nogood[end - 1], s.nogood[at]
    for side in range(2):
        watch = 2 * k + side
        m = s.nogood[at + side]
        s.next_watch[watch] = s.literal[WATCHED, m]
        s.literal[WATCHED, m] = watch
    s.nogood_ptr[k + 1] = end
    number[NOGOODS] = k + 1
    number[NOGOOD_LITERALS] = end
    return True


@entry(INT, ARRAYS, INT, INT, counted=False)
def run(s, task, until):  # type: ignore[no-untyped-def]
    """Work on a task until `number[NODES]` reaches `until`, or something has to be told.

    Returns REFUTED: no schedule ends by the target; DONE: propagated, or shaved from
    `number[CURSOR]` up to `number[CURSOR_END]`; LEAF: all pairs are decided; FULL: trail or entries
    must grow; RESTART_DUE: after enough failures, with nothing undone yet; SLICE_OVER.
    """
    number = s.number
    good = True
    m = -1  # the decision that is propagated next
    if task == DECIDE:
        return DONE if decide(s, until) else REFUTED
    if task == PROPAGATE:
        good = _retarget(s)
        for r in range(s.machine.shape[1] - 1):
            touch(s, r, EVERYTHING)
    elif task == RESTART:
        good = _to_root(s)
    elif task == SEARCH_ON or (task == SEARCH and number[FAILED]):
        good = False
    elif task == SEARCH:
        good = _up_to_date(s)
    number[FAILED] = 0
    at_root = task in (PROPAGATE, RESTART)
    volume = 1.0
    while True:
        if good:
            good = fixpoint(s)
        if not good:
            forget(s)
        if at_root:
            return DONE if good else REFUTED
        if task == SHAVE:
            number[GOOD] = good
            answer = _shave_on(s, until, volume)
            if answer != GO_ON:
                return answer
            volume = _volume(s)
            good = number[GOOD] != 0
            continue
        if m >= 0:
            _rate(s, m, _local(s, good, volume))
        if not good:
            if number[NODES] >= until:
                number[FAILED] = 1  # the next call goes on from here
                return SLICE_OVER
            number[FAILURES] += 1
            m = _turn_back(s)
            if m < 0:
                return REFUTED
            good = number[GOOD] != 0
        else:
            m = -1
            if number[NODES] >= until:
                return SLICE_OVER
            if number[TRAIL] + 2 * s.op.shape[1] + len(s.value) >= s.trail.shape[1]:
                return FULL
            if number[ENTRIES] + 1 >= s.entry.shape[1]:
                return FULL
            if number[FAILURES] >= number[RESTART_AT]:
                return RESTART_DUE
            m = _choose(s)
            if m < 0:
                return LEAF
            _enter(s, m)
            good = decide(s, m)
        volume = _volume(s)
        number[NODES] += 1
