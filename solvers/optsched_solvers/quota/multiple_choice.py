"""One option of every row within a budget, for the greatest sum: exact multiple choice.

The upper hulls give a price, a bound and a first solution (Sinha & Zoltners 1979); a core of rows
near the price is expanded until nothing better is possible (Pisinger 1995).
"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from optsched.errors import InputError
from optsched.kernels.plain_python import in_python, is_in_python
from optsched_solvers.quota import multiple_choice_core as kernel
from optsched_solvers.quota.arguments import integers, row_pointers
from optsched_solvers.quota.certificate import Certificate, Proof

if TYPE_CHECKING:
    from optsched_solvers.quota.arguments import IntArray

PLAIN_STATES: Final = 1 << 15
"""Partial solutions in plain Python, before kernels are compiled for them."""
STATES: Final = 1 << 27
"""Partial solutions at most: 1 GiB, which thousands of rows of one shape may take."""
RECHECK: Final = 3 * 10**8
"""Additions that a certificate may take."""


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
        unless the core did not fit into memory (`solve` tells).

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
    starts = row_pointers(ptr, len(sizes))
    if len(sizes) != len(values):
        raise InputError(f"value: expected {len(sizes)} values, one a size, got {len(values)}")
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
    """An optimal solution; or, where the core does not fit into memory, a good one."""
    if is_in_python():
        with in_python():
            found = _search(given, PLAIN_STATES)
        if found.value == found.bound:
            return found
    with in_python(False):  # of several optima it gives the same as ever
        return _search(given, STATES)


def _search(given: Options, limit: int) -> Solved:
    """A solution; its bound is its value if so many partial solutions prove it."""
    position, facts = np.empty(len(given.ptr) - 1, np.int64), np.zeros(kernel.FACTS, np.int64)
    kernel.solve(*given[:4], limit, position, facts)
    price, scale, gain, proved, promise = (
        int(facts[k])
        for k in (kernel.PRICE, kernel.SCALE, kernel.BEST, kernel.PROVED, kernel.PROMISE)
    )
    best = gain if proved else promise // scale
    return Solved(position, price, scale, given.smallest + gain, given.smallest + best)


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


def _best_gain(given: Options, solved: Solved, least: int) -> int | None:
    """The greatest gain of all solutions if that is at least `least`, else less than that.

    Options that lose more at the price cannot be part of such a solution; a table of budgets goes
    through all others, row by row. None if that is too much work.
    """
    ptr, extra = given.ptr, given.size - np.repeat(given.size[given.ptr[:-1]], np.diff(given.ptr))
    loss, promise = _losses(given, solved)
    kept = np.flatnonzero(loss <= promise - solved.scale * least)
    rows = np.searchsorted(kept, ptr)
    if (rows[1:] == rows[:-1]).any():
        return least - 1
    first = extra[kept[rows[:-1]]]
    more = extra[kept] - np.repeat(first, np.diff(rows))
    gain = given.value[kept] - np.repeat(given.value[ptr[:-1]], np.diff(rows))
    step = max(int(np.gcd.reduce(more)), 1)
    room = (given.spare - int(first.sum())) // step
    if room < 0:
        return least - 1
    more //= step
    room = min(room, int(more[rows[1:] - 1].sum()))
    if len(kept) * (room + 1) > RECHECK:
        return None
    best = np.zeros(room + 1, np.int64)
    for begin, end in pairwise(rows.tolist()):
        new = best + gain[begin]
        for size, worth in zip(more[begin + 1 : end], gain[begin + 1 : end], strict=True):
            np.maximum(new[size:], best[: max(room + 1 - size, 0)] + worth, out=new[size:])
        best = new
    return int(best[-1])


def certify(given: Options, solved: Solved) -> Proof:
    """Check the sizes, and the answer against the price, else against what the price leaves."""
    ptr, value, position = given.ptr, given.value, solved.position
    reached = int(value[position].sum())
    used = int((given.size[position] - given.size[ptr[:-1]]).sum())
    holds = used <= given.spare and bool(((ptr[:-1] <= position) & (position < ptr[1:])).all())
    bound = given.smallest + _losses(given, solved)[1] // solved.scale
    proof = "dual bound"
    if bound > reached:
        best = _best_gain(given, solved, reached - given.smallest + 1)
        if best is not None:
            bound, proof = max(given.smallest + best, reached), "dynamic programme"
    price = solved.price / solved.scale if solved.price > 0 else None
    return Proof(reached, bound, price, holds and reached == bound, proof)
