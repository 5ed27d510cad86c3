"""One option of every row within a budget, for the greatest sum: exact multiple choice.

The upper hulls give a price, a bound and a first solution (Sinha & Zoltners 1979); a core of rows
near the price is expanded until nothing better is possible (Pisinger 1995); the full table of
budgets is the fall-back.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from optsched.errors import InputError
from optsched.kernels.plain_python import in_python, is_in_python
from optsched_solvers.quota import multiple_choice_core as kernel
from optsched_solvers.quota.arrays import Certificate, Proof, integers, row_pointers

if TYPE_CHECKING:
    from optsched_solvers.quota.arrays import IntArray

PLAIN_STATES: Final = 1 << 15
"""Partial solutions in plain Python, before kernels are compiled for them."""
FEW_STATES: Final = 1 << 21
"""Partial solutions before the table of budgets is tried, and after it is found too large."""
MANY_STATES: Final = 1 << 25
PLAIN_CELLS: Final = 200_000
"""Steps that the table of budgets may take in plain Python."""
CELLS: Final = 4 * 10**9
"""Steps that the table of budgets may take: some seconds."""
RECHECK: Final = 3 * 10**8
"""Steps that a certificate may take."""
MEMORY: Final = 1 << 28
"""Bytes of back-pointers at once; beyond it the rows are halved, and solved twice."""


class Options(NamedTuple):
    """Checked options, and the budget above the smallest ones."""

    ptr: IntArray
    size: IntArray
    value: IntArray
    spare: int
    """Budget above the smallest options, cut to a multiple of what all sizes are multiples of."""
    smallest: int
    """Value of all rows' first options."""


class Solved(NamedTuple):
    """Positions of the chosen options, with the scaled price and the scale of the relaxation."""

    position: IntArray
    price: int
    scale: int
    value: int
    bound: int
    """What no choice is worth more than; equal to the value if the search was finished."""


def choice(
    ptr: Any, size: Any, value: Any, budget: int | np.integer
) -> tuple[IntArray, Certificate]:
    """Choose exactly one option of every row with the greatest sum of values within a budget.

    Parameters
    ----------
    ptr
        Row j has the options ``ptr[j]`` to ``ptr[j + 1] - 1``; shape (rows + 1,).
    size
        GPUs of every option, ascending and distinct within a row, 0 allowed.
    value
        Integer worth of every option, of either sign, in any shape of table.
    budget
        GPUs that there are.

    Returns
    -------
    int64 array, shape (rows,), and a `Certificate`
        The chosen sizes; the same input always gives the same of several optima. The certificate
        holds only if the bound at the price, or a table of budgets within a limit of work
        (`RECHECK`), proves the answer. The answer is optimal also where that is too much work,
        unless neither core nor table fitted into memory (`solve` tells).

    Raises
    ------
    InputError
        The smallest sizes exceed the budget (rows are named), a row is empty, its sizes are not
        ascending, or numbers are too large.
    """
    given = options(ptr, size, value, budget)
    solved = solve(given)
    what = "sum of the values of one option a row, at most the budget in size"
    return given.size[solved.position], Certificate(what, lambda: certify(given, solved))


def options(ptr: Any, size: Any, value: Any, budget: Any) -> Options:
    """Check everything once; see `choice`."""
    if isinstance(budget, (bool, np.bool_)) or not isinstance(budget, (int, np.integer)):
        raise InputError(f"budget: expected an integer, got {budget!r:.60}")
    if budget < 0:
        raise InputError(f"budget: must not be negative, got {budget}")
    sizes, values = integers("size", size), integers("value", value)
    starts = row_pointers("ptr", ptr, len(sizes))
    if len(sizes) != len(values):
        raise InputError(f"value: expected {len(sizes)} values, one a size, got {len(values)}")
    for j in np.flatnonzero(starts[1:] == starts[:-1])[:1]:
        raise InputError(f"ptr: row {j} is empty; give every row an option (size 0 for none)")
    facts, first = np.zeros(kernel.FACTS, np.int64), starts[:-1]
    wrong = kernel.solve(starts, sizes, values, 0, -1, facts, facts)
    least, most, step, at = facts[:4].tolist()
    if wrong:
        j = int(np.searchsorted(starts, at, "right")) - 1
        here = f"size: row {j}, option {at - starts[j]} ({sizes[at]})"
        if wrong == kernel.LARGE:
            raise InputError(f"{here} is not in 0..{kernel.LARGEST_WEIGHT}")
        if wrong == kernel.UNSORTED:
            raise InputError(
                f"{here} is not above the one before it ({sizes[at - 1]}); sizes of a row must be "
                "ascending and distinct"
            )
        raise InputError(
            f"value: the sum up to row {j} is beyond 2^59 in size; use a coarser resolution"
        )
    if least > budget:
        raise InputError(_infeasible(sizes[first], least, int(budget)))
    spare = min(int(budget), most) - least
    return Options(starts, sizes, values, spare - spare % step, int(values[first].sum()))


def _infeasible(needs: IntArray, least: int, budget: int) -> str:
    """Name the rows that need most."""
    order = np.argsort(-needs, kind="stable")
    named = [f"{j} ({needs[j]})" for j in order[:5].tolist() if needs[j] > 0]
    more = int((needs > 0).sum()) - len(named)
    rest = f" and {more} more" if more > 0 else ""
    return (
        f"budget: the smallest sizes need {least} in sum, the budget is {budget}; leave out some "
        f"of the rows {', '.join(named)}{rest}"
    )


def solve(given: Options) -> Solved:
    """An optimal solution; or, where neither core nor table fits into memory, a good one."""
    if is_in_python():
        with in_python():
            found, proved = _search(given, PLAIN_STATES)
        if proved:
            return found
    with in_python(False):  # of several optima it gives the same as ever
        found, proved = _search(given, FEW_STATES)
        if proved:
            return found
        done, better = _by_table(given, found, found.value - given.smallest + 1, CELLS)
        if not done:
            return _search(given, MANY_STATES)[0]
    position = found.position if better is None else better
    value = int(given.value[position].sum())
    return found._replace(position=position, value=value, bound=value)


def _search(given: Options, limit: int) -> tuple[Solved, bool]:
    """A solution, and whether it is proved within so many partial solutions."""
    position, facts = np.empty(len(given.ptr) - 1, np.int64), np.zeros(kernel.FACTS, np.int64)
    kernel.solve(*given[:4], limit, position, facts)
    value, bound = (given.smallest + int(facts[k]) for k in (kernel.BEST, kernel.BOUND))
    proved = bool(facts[kernel.PROVED]) or value >= bound
    price, scale = int(facts[kernel.PRICE]), int(facts[kernel.SCALE])
    return Solved(position, price, scale, value, value if proved else bound), proved


def _by_table(
    given: Options, solved: Solved, least: int, most: int
) -> tuple[bool, IntArray | None]:
    """Whether the table could search all solutions of at least a gain, and a best of them.

    Options that lose more at the price cannot be part of such a solution, and are left out. Not
    searched if the table takes more than `most` steps; None if there is no such solution.
    """
    ptr, size, value = given.ptr, given.size, given.value
    loss, promise = _losses(given, solved)
    allowed = promise - solved.scale * least
    kept = np.flatnonzero(loss <= allowed)
    rows = len(ptr) - 1
    owner = np.repeat(np.arange(rows), np.diff(ptr))[kept]
    counts = np.bincount(owner, minlength=rows)
    if (counts == 0).any():
        return True, None
    first = kept[np.cumsum(counts) - counts]
    room = given.spare - int((size[first] - size[ptr[:-1]]).sum())
    if room < 0:
        return True, None
    free = np.flatnonzero(counts > 1)
    found = first.copy()
    if len(free):
        where = kept[counts[owner] > 1]
        widths = counts[free]
        starts = np.concatenate((np.zeros(1, np.int64), np.cumsum(widths)))
        extra = size[where] - np.repeat(size[first[free]], widths)
        gain = value[where] - np.repeat(value[first[free]], widths)
        step = int(np.gcd.reduce(extra))
        extra, room = extra // step, room // step
        room = min(room, int(extra[starts[1:] - 1].sum()))
        steps = int(starts[-1]) * (room + 1)
        if steps > most:
            return False, None
        with in_python(is_in_python() and steps <= PLAIN_CELLS):
            found[free] = where[table(starts, extra, gain, room)]
    worth = int((value[found] - value[ptr[:-1]]).sum())
    return True, found if worth >= least else None


def table(
    ptr: IntArray, size: IntArray, value: IntArray, room: int, memory: int = MEMORY
) -> IntArray:
    """Position of every row's option in a best solution of at most `room`.

    Every row's first size is 0; among equals that of the smaller size in later rows. `memory`:
    bytes of back-pointers at once.
    """
    rows = len(ptr) - 1
    wide = 1 if int(np.diff(ptr).max(initial=0)) > 256 else 0
    need = rows * (room + 1) * (2 if wide else 1)
    chosen = np.empty(rows, np.int64)
    if rows <= 1 or need <= memory:
        kernel.table(ptr, size, value, room, wide, np.empty(need, np.uint8), chosen)
        return chosen
    half = rows // 2
    left, right = ptr[: half + 1], ptr[half:] - ptr[half]
    size_right, value_right = size[ptr[half] :], value[ptr[half] :]
    worth, other, nothing = *np.empty((2, room + 1), np.int64), np.empty(0, np.uint8)
    kernel.table(left, size, value, room, -1, nothing, worth)
    kernel.table(right, size_right, value_right, room, -1, nothing, other)
    share = int(np.argmax(worth + other[::-1]))
    chosen[:half] = table(left, size, value, share, memory)
    chosen[half:] = table(right, size_right, value_right, room - share, memory) + ptr[half]
    return chosen


def _losses(given: Options, solved: Solved) -> tuple[IntArray, int]:
    """What every option gives away at the price, scaled, and the scaled gain without losses."""
    ptr, size, value = given.ptr, given.size, given.value
    if len(ptr) == 1:
        return np.zeros(0, np.int64), 0
    rows = np.diff(ptr)
    extra = size - np.repeat(size[ptr[:-1]], rows)
    gain = value - np.repeat(value[ptr[:-1]], rows)
    worth = np.where(extra <= given.spare, solved.scale * gain - solved.price * extra, -(2**61))
    most = np.maximum.reduceat(worth, ptr[:-1])
    return np.repeat(most, rows) - worth, int(most.sum()) + solved.price * given.spare


def certify(given: Options, solved: Solved) -> Proof:
    """Check the sizes, and the answer against the price, else against what the price leaves."""
    ptr, value, position = given.ptr, given.value, solved.position
    reached = int(value[position].sum())
    used = int((given.size[position] - given.size[ptr[:-1]]).sum())
    holds = used <= given.spare and bool(((ptr[:-1] <= position) & (position < ptr[1:])).all())
    bound = given.smallest + _losses(given, solved)[1] // solved.scale
    proof = "dual bound"
    if bound > reached:
        searched, better = _by_table(given, solved, reached - given.smallest + 1, RECHECK)
        if searched:
            best = reached if better is None else int(value[better].sum())
            bound, proof = max(best, reached), "dynamic programme"
    price = solved.price / solved.scale if solved.price > 0 else None
    return Proof(reached, bound, price, holds and reached == bound, proof)
