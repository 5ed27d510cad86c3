"""One option of every row within a budget, for the greatest sum: exact multiple choice.

The best price of a GPU gives a bound (the Lagrangian dual), a first choice, and the loss of every
option at that price. A choice worth one unit more than the best known loses less than the bound
exceeds that by, so that few options remain. Over these a dynamic programme goes row by row; its
states are the sums of size and value so far, without those that are dominated or lose too much
(Pisinger 1995). Its work depends on that gap, not on the budget.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeAlias

import numpy as np

from optsched.errors import InputError
from optsched.io.values import integer
from optsched.problems.quota.options import Table, cheapest, exact_sum, multipliers
from optsched_solvers.quota.arguments import MOST_GPUS, integers, row_pointers, spare
from optsched_solvers.quota.certificate import Certificate, Proof
from optsched_solvers.quota.shares import admit

if TYPE_CHECKING:
    from optsched_solvers.quota.arguments import IntArray

STATES: Final = 5 * 10**6
"""Most states of the dynamic programme: a second or less."""
HEADROOM: Final = 2**59
"""Scaled values of all rows together stay below this."""
LARGEST_SIZE: Final = 2**31 - 1
_FINEST: Final = 2**30
_FAR: Final = 2**61
"""Cost of an option that is larger than the budget."""


class Options(NamedTuple):
    """Checked options; sizes and values count from the first option of their row."""

    ptr: IntArray
    size: IntArray
    value: IntArray
    spare: int
    """Budget above the smallest options, cut to a multiple of what all sizes are multiples of."""
    first_size: IntArray
    first_value: int
    """Sum of the values of all first options."""


Row: TypeAlias = "tuple[int, IntArray, IntArray, IntArray]"
"""Number of a row, positions of its options, and their sizes and values against the chosen one."""


class Relaxed(NamedTuple):
    """Lagrangian relaxation at a price of a GPU, scaled."""

    scale: int
    price: int
    loss: IntArray
    """What an option loses against the best of its row at the price."""
    promise: int
    """No choice is worth more."""


class Solved(NamedTuple):
    """Positions of the chosen options, and what no choice exceeds in value."""

    position: IntArray
    bound: int
    relaxed: Relaxed


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
        GPUs in all.

    Returns
    -------
    int64 array, shape (rows,), and a `Certificate`
        The chosen sizes; the same input always gives the same of several optima. Where the
        programme takes more than `STATES` states the answer is the best one found, and the
        certificate, which does not hold, carries the bound.
    """
    given = options(ptr, size, value, budget)
    solved = solve(given)
    chosen = given.first_size + given.size[solved.position]
    what = "sum of the values of one option a row, at most the budget in size"
    return chosen, Certificate(what, lambda: _certify(given, solved.relaxed, chosen))


def options(ptr: Any, size: Any, value: Any, budget: Any) -> Options:
    """Check everything once; see `choice`."""
    most = integer("budget", budget, 0, None)
    sizes, values = integers("size", size), integers("value", value)
    starts = row_pointers(ptr, len(sizes))
    if len(sizes) != len(values):
        raise InputError(f"value: expected {len(sizes)} values, one a size, got {len(values)}")
    row = np.repeat(np.arange(len(starts) - 1), np.diff(starts))
    falls = np.append(False, (sizes[1:] <= sizes[:-1]) & (row[1:] == row[:-1]))
    for at in np.flatnonzero((sizes < 0) | (sizes > LARGEST_SIZE) | falls)[:1]:
        here = f"size: row {row[at]}, option {at - starts[row[at]]} ({sizes[at]})"
        if falls[at]:
            raise InputError(
                f"{here} is not above the one before it ({sizes[at - 1]}); sizes of a row must be "
                "ascending and distinct"
            )
        raise InputError(f"{here} is not in 0..{LARGEST_SIZE}")
    if not len(row):
        return Options(starts, sizes, values, 0, sizes, 0)
    first = starts[:-1]
    reach = np.maximum.reduceat(np.abs(values.astype(np.float64)), first)
    for j in np.flatnonzero(np.cumsum(2 * reach) > HEADROOM)[:1]:
        raise InputError(
            f"value: the sum up to row {j} is beyond 2^58 in size; use a coarser resolution"
        )
    left = min(spare(sizes[first], most), sum((sizes[starts[1:] - 1] - sizes[first]).tolist()))
    extra = sizes - sizes[first][row]
    step = max(int(np.gcd.reduce(extra)), 1)
    return Options(
        starts, extra, values - values[first][row], left - left % step, sizes[first],
        int(values[first].sum()),
    )  # fmt: skip


def solve(given: Options) -> Solved:
    """Return an optimal choice; where the programme takes too many states, the best one found."""
    if len(given.ptr) == 1:
        nothing = np.zeros(0, np.int64)
        return Solved(nothing, 0, Relaxed(1, 0, nothing, 0))
    relaxed = relax(given)
    position = first_choice(given, relaxed)
    position, is_best = improved(given, relaxed, position)
    bound = relaxed.promise // relaxed.scale
    if is_best:
        bound = int(given.value[position].sum())
    return Solved(position, given.first_value + bound, relaxed)


def relax(given: Options) -> Relaxed:
    """Find the best integer price of a GPU for values times a power of two."""
    fits = given.size <= given.spare
    value = np.where(fits, given.value, 0)
    first = given.ptr[:-1]
    spread = np.maximum.reduceat(value, first) - np.minimum.reduceat(value, first)
    total, scale = int(spread.sum()), 1
    while scale < _FINEST and total < HEADROOM // (2 * scale):
        scale *= 2
    cost = np.where(fits, -scale * value, _FAR)
    table = Table(given.ptr, np.zeros(len(cost), np.int64), given.size, cost)
    price = multipliers(table, [given.spare])[1]
    picked, least = cheapest(table, price)
    if exact_sum(given.size[picked]) > given.spare:  # a higher price fits, and loses little
        price = price + 1
        picked, least = cheapest(table, price)
    rate = int(price[0])
    loss = cost + np.minimum(given.size, _FAR // max(rate, 1)) * rate
    loss -= np.repeat(least, np.diff(given.ptr))
    return Relaxed(scale, rate, loss, rate * given.spare - exact_sum(least))


def first_choice(given: Options, relaxed: Relaxed) -> IntArray:
    """Take the best options at the price, then others as good, then those that lose least.

    Options that are equal at the price differ in size: at a price lower by 1 the larger win.
    """
    ptr, size, value = given.ptr, given.size, given.value
    none = np.flatnonzero(relaxed.loss == 0)
    position = none[np.searchsorted(none, ptr[:-1])]
    cheap = relaxed.loss - np.minimum(size, _FAR)
    equal = np.flatnonzero(cheap == np.repeat(np.minimum.reduceat(cheap, ptr[:-1]), np.diff(ptr)))
    larger = equal[np.searchsorted(equal, ptr[1:]) - 1]
    left = given.spare - exact_sum(size[position])
    more = np.where(relaxed.price > 0, size[larger] - size[position], 0)
    order = np.flatnonzero((more > 0) & (more <= left))
    order = order[np.argsort(-more[order], kind="stable")]
    raised = np.flatnonzero(admit(order, np.maximum(more, 0), min(left, MOST_GPUS)))
    position[raised] = larger[raised]
    left -= int(more[raised].sum())
    row = np.repeat(np.arange(len(position)), np.diff(ptr))
    while left > 0:
        costs, gains = size - size[position][row], value - value[position][row]
        able = np.flatnonzero((gains > 0) & (costs <= left))
        if not len(able):
            break
        lost = relaxed.loss[able] - relaxed.loss[position][row[able]]
        at = able[np.lexsort((-gains[able], lost))[0]]
        left -= int(costs[at])
        position[row[at]] = at
    return position


def improved(given: Options, relaxed: Relaxed, position: IntArray) -> tuple[IntArray, bool]:
    """Return a best choice by dynamic programming from a choice within the budget.

    False: there were more than `STATES` states. A state is a sum of sizes and values of the rows so
    far against those of the choice; all others stay.
    """
    scale, price = relaxed.scale, relaxed.price
    left = given.spare - exact_sum(given.size[position])
    allowed = relaxed.promise - scale * (int(given.value[position].sum()) + 1)
    if allowed < 0:
        return position, True
    rows, rates = _core(given, relaxed, position, allowed)
    behind = np.cumsum([0, *(max(-int(sizes.min()), 0) for _, _, sizes, _ in reversed(rows))])[::-1]
    size, value = np.zeros(1, np.int64), np.zeros(1, np.int64)
    lost = made = best = 0
    end: tuple[int, int] | None = None
    trail: list[tuple[IntArray, IntArray]] = []
    for k, (j, at, sizes, values) in enumerate(rows):
        lost += int(relaxed.loss[position[j]])
        made += len(size) * len(at)
        if made > STATES:
            return _traced(position, rows, trail, end), False
        sums, worth = np.add.outer(size, sizes).ravel(), np.add.outer(value, values).ravel()
        # later rows give back at most `behind`, and lose the next rate at least for every GPU that
        # they take or give back; a GPU left loses the price
        rate = min(price, int(rates[k + 1]))
        loss = lost + price * sums - scale * worth
        loss += np.minimum(np.abs(left - sums), allowed // max(rate, 1) + 1) * rate
        some = np.flatnonzero((loss <= allowed) & (sums - int(behind[k + 1]) <= left))
        some = some[np.lexsort((-worth[some], sums[some]))]
        size, value = sums[some], worth[some]
        rises = np.ones(len(some), np.bool_)
        rises[1:] = value[1:] > np.maximum.accumulate(value)[:-1]
        some, size, value = some[rises], size[rises], value[rises]
        trail.append((some // len(at), at[some % len(at)]))
        last = int(np.searchsorted(size, left, "right")) - 1
        if last >= 0 and value[last] > best:
            end, allowed = (k, last), allowed - scale * (int(value[last]) - best)
            best = int(value[last])
        if allowed < 0 or not len(size):
            break
    return _traced(position, rows, trail, end), True


def _core(
    given: Options, relaxed: Relaxed, position: IntArray, allowed: int
) -> tuple[list[Row], IntArray]:
    """Return the rows with other options that lose little, by rate, and their rates.

    The rate is the least loss per GPU; an infinite one is appended.
    """
    row = np.repeat(np.arange(len(position)), np.diff(given.ptr))
    kept = np.flatnonzero(relaxed.loss <= allowed)
    kept = np.union1d(kept, position)
    owner = row[kept]
    sizes = given.size[kept] - given.size[position][owner]
    values = given.value[kept] - given.value[position][owner]
    rate = relaxed.loss[kept] // np.maximum(np.abs(sizes), 1)
    rate[kept == position[owner]] = _FAR
    begin = np.searchsorted(kept, given.ptr)
    least = np.minimum.reduceat(rate, begin[:-1])
    order = np.argsort(least, kind="stable")
    order = order[least[order] < _FAR]
    rows = [
        (j, kept[a:b], sizes[a:b], values[a:b])
        for j, a, b in zip(order.tolist(), begin[order], begin[order + 1], strict=True)
    ]
    return rows, np.append(least[order], _FAR)


def _traced(
    position: IntArray,
    rows: list[Row],
    trail: list[tuple[IntArray, IntArray]],
    end: tuple[int, int] | None,
) -> IntArray:
    """Follow the parents of the best state back."""
    if end is None:
        return position
    found = position.copy()
    k, state = end
    for (j, _, _, _), (parent, at) in zip(rows[k::-1], trail[k::-1], strict=True):
        found[j] = at[state]
        state = int(parent[state])
    return found


def _certify(given: Options, relaxed: Relaxed, chosen: IntArray) -> Proof:
    """Check the sizes, and the answer against the bound at the price, else by the programme."""
    price = relaxed.price / relaxed.scale if relaxed.price > 0 else None
    if not len(chosen):
        return Proof(0, 0, None, True, "dual bound")
    extra = np.repeat(chosen - given.first_size, np.diff(given.ptr))
    position = np.flatnonzero(given.size == extra)
    bound = given.first_value + relaxed.promise // relaxed.scale
    if len(position) != len(chosen) or exact_sum(given.size[position]) > given.spare:
        return Proof(0, bound, price, False, "dual bound")
    reached = given.first_value + int(given.value[position].sum())
    if bound <= reached:
        return Proof(reached, bound, price, True, "dual bound")
    best, is_best = improved(given, relaxed, position)
    if is_best:
        bound = given.first_value + int(given.value[best].sum())
    return Proof(reached, bound, price, is_best and bound == reached, "dynamic programme")
