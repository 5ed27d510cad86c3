"""One option of every row within a budget, for the greatest sum: exact multiple choice.

The upper hulls give a price, a bound and a first solution (Sinha & Zoltners 1979); a core of rows
near the price is expanded until nothing better is possible (Pisinger 1995); the full table of
budgets is the fall-back.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple, overload

import numpy as np

from optsched.errors import OptschedError
from optsched.kernels.plain_python import in_python, is_in_python
from optsched_solvers.quota.certificate import Certificate
from optsched_solvers.quota.multiple_choice_core import ALLOWED, BEST, PROVED, core, expand, fill
from optsched_solvers.quota.multiple_choice_hull import (
    BOUND,
    GAIN,
    NUMBERS,
    PRICE,
    PROMISE,
    SCALE,
    SLACK,
    relax,
)
from optsched_solvers.quota.multiple_choice_input import Options, options
from optsched_solvers.quota.multiple_choice_table import cells, table

if TYPE_CHECKING:
    import numpy.typing as npt

    Ints = npt.NDArray[np.int64]

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


class HardChoice(OptschedError):
    """The proof takes more memory than allowed.

    Parameters
    ----------
    chosen
        Sizes of the best solution found.
    value, bound
        Its value, and what no solution can beat.
    """

    def __init__(self, chosen: Ints, value: int, bound: int) -> None:
        super().__init__(
            f"choice: not proved optimal within memory: value {value}, bound {bound}; use a "
            "coarser resolution, fewer sizes, or `cpsat`"
        )
        self.chosen, self.value, self.bound = chosen, value, bound


@overload
def choice(
    ptr: Any,
    size: Any,
    value: Any,
    budget: int | np.integer,
    *,
    certificate: Literal[False] = False,
) -> Ints: ...
@overload
def choice(
    ptr: Any, size: Any, value: Any, budget: int | np.integer, *, certificate: Literal[True]
) -> tuple[Ints, Certificate]: ...
def choice(
    ptr: Any, size: Any, value: Any, budget: int | np.integer, *, certificate: bool = False
) -> Ints | tuple[Ints, Certificate]:
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
    certificate
        Also return a proof that is checked on the answer alone. `holds` is true only if the bound
        at the price, or a table of budgets within a limit of work (`RECHECK`), proves the answer;
        the answer is optimal also where that is too much work and `holds` is false.

    Returns
    -------
    int64 array, shape (rows,)
        The chosen sizes; the same input always gives the same of several optima.

    Raises
    ------
    InputError
        The smallest sizes exceed the budget (rows are named), a row is empty, its sizes are not
        ascending, or numbers are too large.
    HardChoice
        Neither core nor table can prove an optimum in memory; carries the best solution.
    """
    given = options(ptr, size, value, budget)
    solved = _solve(given)
    chosen = given.size[solved.position]
    if not certificate:
        return chosen
    return chosen, _certify(given, solved)


def hull_bound(ptr: Any, size: Any, value: Any, budget: int | np.integer) -> int:
    """What no choice is worth more than: a linear relaxation, rounded down.

    It is at most the floor of the plain linear relaxation, which lets options be mixed, and often
    lower: first the budget beyond all smallest sizes is cut to a multiple of the greatest common
    divisor of what options take beyond the smallest of their row (no choice uses more), and options
    that take more than that are left out (no choice has them).

    Parameters and errors are those of `choice`.
    """
    given = options(ptr, size, value, budget)
    return given.smallest + int(_relaxed(given).numbers[BOUND])


def hull_greedy(ptr: Any, size: Any, value: Any, budget: int | np.integer) -> Ints:
    """A good choice without proof: hull edges by price, then what still fits.

    Parameters, result and errors are those of `choice`.
    """
    given = options(ptr, size, value, budget)
    relaxed = _relaxed(given)
    position, _ = _first(given, relaxed)
    return given.size[position]


class _Relaxed(NamedTuple):
    """The linear relaxation, as `relax` fills it."""

    hull_ptr: Ints
    hull: Ints
    base: Ints
    centre: Ints
    numbers: Ints


class _Solved(NamedTuple):
    """Positions of the chosen options, with the scaled price and the scale of the relaxation."""

    position: Ints
    price: int
    scale: int


def _relaxed(given: Options) -> _Relaxed:
    rows = len(given.ptr) - 1
    relaxed = _Relaxed(
        np.empty(rows + 1, np.int64), np.empty(len(given.size), np.int64),
        np.empty(rows, np.int64), np.empty(rows, np.int64), np.empty(NUMBERS, np.int64),
    )  # fmt: skip
    relax(given.ptr, given.size, given.value, given.spare, *relaxed)
    return relaxed


def _first(given: Options, relaxed: _Relaxed) -> tuple[Ints, int]:
    """A first solution and its gain."""
    chosen = np.empty(len(given.ptr) - 1, np.int64)
    numbers = relaxed.numbers
    gain = fill(
        given.ptr, given.size, given.value, relaxed.hull_ptr, relaxed.hull, relaxed.centre,
        numbers[SCALE], numbers[PRICE], numbers[SLACK], chosen,
    )  # fmt: skip
    return chosen, int(numbers[GAIN]) + gain


def _solve(given: Options) -> _Solved:
    """An optimal solution."""
    relaxed = _relaxed(given)
    position, best = _first(given, relaxed)
    numbers = relaxed.numbers
    scale, price = int(numbers[SCALE]), int(numbers[PRICE])
    allowed = int(numbers[PROMISE]) - scale * (best + 1)
    if best >= numbers[BOUND] or allowed < 0:
        return _Solved(position, price, scale)
    rows = len(given.ptr) - 1
    row, core_ptr = np.empty(rows, np.int64), np.empty(rows + 1, np.int64)
    option, out = np.empty(len(given.size), np.int64), np.empty(4, np.int64)
    first = position, best, allowed
    for limit in (PLAIN_STATES,) * is_in_python() + (FEW_STATES, MANY_STATES):
        is_plain = limit == PLAIN_STATES
        with in_python(is_plain):
            count = core(
                given.ptr, given.size, given.value, relaxed.hull, relaxed.base, relaxed.centre,
                given.spare, scale, price, allowed, row, core_ptr, option,
            )  # fmt: skip
            position = position.copy()
            expand(
                given.size, given.value, relaxed.hull, relaxed.base, relaxed.centre, row, core_ptr,
                option, count, numbers, best, limit, position, out,
            )  # fmt: skip
        best, allowed = int(out[BEST]), int(out[ALLOWED])
        if out[PROVED] or best >= numbers[BOUND]:
            return _Solved(position, price, scale)
        if is_plain:  # the compiled ones begin anew: of several optima they always give the same
            position, best, allowed = first
            continue
        done, better = _by_table(given, price, scale, allowed, CELLS)
        if done:
            if better is not None and given.value[better].sum() > given.value[position].sum():
                position = better
            return _Solved(position, price, scale)
    raise HardChoice(
        given.size[position], given.smallest + best, given.smallest + int(numbers[BOUND])
    )


def _by_table(
    given: Options, price: int, scale: int, allowed: int, most: int
) -> tuple[bool, Ints | None]:
    """Whether the table could search all solutions within an allowed loss, and a best of them.

    Options that lose more at the price cannot be part of such a solution, and are left out. Not
    searched if the table takes more than `most` steps; None if there is no such solution.
    """
    ptr, size, value = given.ptr, given.size, given.value
    rows = len(ptr) - 1
    owner = np.repeat(np.arange(rows), np.diff(ptr))
    loss, _ = _losses(given, price, scale)
    kept = np.flatnonzero((size - size[ptr[:-1]][owner] <= given.spare) & (loss <= allowed))
    counts = np.bincount(owner[kept], minlength=rows)
    if (counts == 0).any():
        return True, None
    start = np.concatenate((np.zeros(1, np.int64), np.cumsum(counts)))
    first = kept[start[:-1]]
    room = given.spare - int((size[first] - size[ptr[:-1]]).sum())
    if room < 0:
        return True, None
    free = np.flatnonzero(counts > 1)
    found = first.copy()
    if len(free):
        where = kept[counts[owner[kept]] > 1]
        widths = counts[free]
        starts = np.concatenate((np.zeros(1, np.int64), np.cumsum(widths)))
        extra = size[where] - np.repeat(size[first[free]], widths)
        gain = value[where] - np.repeat(value[first[free]], widths)
        step = int(np.gcd.reduce(extra))
        extra, room = extra // step, room // step
        room = min(room, int(extra[starts[1:] - 1].sum()))
        steps = cells(starts, room)
        if steps > most:
            return False, None
        with in_python(is_in_python() and steps <= PLAIN_CELLS):
            found[free] = where[table(starts, extra, gain, room)]
    return True, found


def _losses(given: Options, price: int, scale: int) -> tuple[Ints, int]:
    """What every option gives away at a price, scaled, and the scaled bound without losses."""
    ptr, size, value = given.ptr, given.size, given.value
    if len(ptr) == 1:
        return np.zeros(0, np.int64), 0
    owner = np.repeat(np.arange(len(ptr) - 1), np.diff(ptr))
    extra = size - size[ptr[:-1]][owner]
    worth = np.where(
        extra <= given.spare, scale * (value - value[ptr[:-1]][owner]) - price * extra, -(2**61)
    )
    most = np.maximum.reduceat(worth, ptr[:-1])
    return most[owner] - worth, int(most.sum()) + price * given.spare


def _certify(given: Options, solved: _Solved) -> Certificate:
    """Check the sizes, and the answer against the price, else against what the price leaves."""
    ptr, value, position = given.ptr, given.value, solved.position
    reached = int(value[position].sum())
    used = int((given.size[position] - given.size[ptr[:-1]]).sum())
    holds = used <= given.spare and bool(((ptr[:-1] <= position) & (position < ptr[1:])).all())
    _, promise = _losses(given, solved.price, solved.scale)
    bound, proof = given.smallest + promise // solved.scale, "dual bound"
    if bound > reached:
        allowed = promise - solved.scale * (reached - given.smallest + 1)
        searched, better = _by_table(given, solved.price, solved.scale, allowed, RECHECK)
        if searched:
            best = reached if better is None else int(value[better].sum())
            bound, proof = max(best, reached), "dynamic programme"
    price = solved.price / solved.scale if solved.price > 0 else None
    what = "sum of the values of one option a row, at most the budget in size"
    return Certificate(what, reached, bound, price, holds and reached == bound, proof)
