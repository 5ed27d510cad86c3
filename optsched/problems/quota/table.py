"""All that a quota plan's jobs may choose, as flat arrays with integer costs."""

from __future__ import annotations

from bisect import bisect_right
from itertools import chain
from typing import TYPE_CHECKING, Final, NamedTuple, TypeAlias

import numpy as np

from optsched.errors import InputError
from optsched.problems.quota.job import of_kind

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

    from optsched.model.schedule import IntArray
    from optsched.problems.quota.job import QuotaJob
    from optsched.problems.quota.problem import QuotaPlan

    FloatArray: TypeAlias = npt.NDArray[np.float64]

MOST_OPTIONS: Final = 2 * 10**7
"""Beyond that no table is made; plans by bounds alone need none."""

LARGEST: Final = 2**53
"""Documents hold integers up to that."""


class Table(NamedTuple):
    """Options of all jobs (CSR by job), ascending by type, then size; size 0 first if allowed."""

    ptr: IntArray
    kind: IntArray
    size: IntArray
    cost: IntArray
    """What is minimised: added up, or the highest of all."""

    def rows(self) -> IntArray:
        """The job of every option."""
        return np.repeat(np.arange(len(self.ptr) - 1), np.diff(self.ptr))


Span: TypeAlias = "tuple[int, int, int, tuple[int, ...] | None]"
"""A type, smallest and largest size on it within the budget, and the list if it is one."""


def spans_of(job: QuotaJob, kinds: tuple[str, ...], budgets: tuple[int, ...]) -> list[Span]:
    """What a job may get on each type, empty ones left out."""
    found: list[Span] = []
    for k, kind in enumerate(kinds):
        low, high, listed = bounds_of(job, kind, budgets[k])
        if low <= high:
            found.append((k, low, high, listed))
    return found


def bounds_of(job: QuotaJob, kind: str, budget: int) -> tuple[int, int, tuple[int, ...] | None]:
    """Smallest and largest size within the budget and the list if it is one; (1, 0) if none."""
    allowed = job.allowed(kind)
    if allowed is None:
        return 1, 0, None
    low, high, sizes = allowed
    if sizes is not None:
        sizes = sizes[: bisect_right(sizes, budget)]
        return (sizes[0], sizes[-1], sizes) if sizes else (low, 0, None)
    return low, budget if high is None else min(high, budget), None


def table_of(plan: QuotaPlan) -> Table:
    """The options of a plan.

    Raises
    ------
    InputError
        Too many, or costs beyond 2^53.
    """
    if plan.n_options > MOST_OPTIONS:
        raise InputError(
            f"jobs: together they have {plan.n_options} allowed sizes, more than {MOST_OPTIONS}; "
            "give each a maximum, or a list of sizes"
        )
    sizes: list[range | tuple[int, ...]] = []
    kinds: list[tuple[int, int]] = []
    numbers: list[tuple[float, ...]] = []
    counts = []
    wanted = {"sum": "utility", "max_min": "utility", "makespan": "rates"}.get(plan.objective)
    for job, span in zip(plan.jobs, plan.spans, strict=True):
        total = 0
        if not job.must_run:
            sizes.append((0,))
            kinds.append((0, 1))
            numbers.append((job.idle,))
            total = 1
        for k, low, high, listed in span:
            some = range(low, high + 1) if listed is None else listed
            sizes.append(some)
            kinds.append((k, len(some)))
            total += len(some)
            table = None if wanted is None else of_kind(getattr(job, wanted), plan.kinds[k])
            numbers.append(some if table is None else table[: len(some)])  # type: ignore[arg-type]
        counts.append(total)
    ptr = np.zeros(len(counts) + 1, np.int64)
    np.cumsum(counts, out=ptr[1:])
    size = np.fromiter(chain.from_iterable(sizes), np.int64, int(ptr[-1]))
    pairs = np.array(kinds, np.int64).reshape(-1, 2)
    kind_of = np.repeat(pairs[:, 0], pairs[:, 1])
    number = np.fromiter(chain.from_iterable(numbers), np.float64, int(ptr[-1]))
    row = np.repeat(np.arange(len(counts)), counts)
    cost = _costs(plan, row, size, number)
    for array in (ptr, size, kind_of, cost):
        array.flags.writeable = False
    _check_total(plan, ptr, cost)
    return Table(ptr, kind_of, size, cost)


def linear_levels(resolution: int, weights: FloatArray, sizes: IntArray) -> IntArray:
    """Levels ``floor(resolution * g / w)`` of jobs without utilities."""
    found: IntArray = np.floor(resolution * sizes / weights).astype(np.int64)
    return found


def times_of(resolution: int, work: IntArray, rate: IntArray) -> IntArray:
    """``ceil(work / rate)`` with rates in parts of `resolution`."""
    return -((-work * resolution) // rate)


def scaled_rates(resolution: int, rates: Sequence[float] | FloatArray) -> IntArray:
    """Rates as integers, as the simulator counts them: ``round(resolution * f)``."""
    found: IntArray = np.rint(resolution * np.asarray(rates)).astype(np.int64)
    return found


def _costs(plan: QuotaPlan, row: IntArray, size: IntArray, number: FloatArray) -> IntArray:
    unit = plan.resolution
    if plan.objective == "proportional":
        off: IntArray = np.abs(unit * size - plan.share[row])
        return off
    if plan.objective == "makespan":
        work = np.array([job.work for job in plan.jobs], np.int64)
        return times_of(unit, work[row], scaled_rates(unit, number))
    weight = np.array([job.weight for job in plan.jobs])
    with np.errstate(over="ignore", invalid="ignore"):
        if plan.objective == "sum":
            exact = -np.rint(number * (weight * unit)[row])
        else:
            exact = -np.floor(unit * number / weight[row])
    fits = np.abs(exact) <= LARGEST
    if not fits.all():
        raise InputError(
            f"{_told(plan, row, size, number, int(np.argmin(fits)))} is beyond 2^53 at resolution "
            f"{unit}; lower the resolution or the scale"
        )
    _check_lost(plan, row, size, number, exact)
    whole: IntArray = exact.astype(np.int64)
    return whole


def _check_lost(
    plan: QuotaPlan, row: IntArray, size: IntArray, number: FloatArray, exact: FloatArray
) -> None:
    """A job that is worth something must not count as worth nothing."""
    worth = number != 0 if plan.objective == "sum" else number > 0
    lost = np.bincount(row, worth, len(plan.jobs)) > 0
    lost &= np.bincount(row, exact != 0, len(plan.jobs)) == 0
    for j in np.flatnonzero(lost)[:1]:
        at = int(np.argmax(np.where(row == j, np.abs(number), -1.0)))
        raise InputError(
            f"{_told(plan, row, size, number, at)} counts as 0 at resolution {plan.resolution}; "
            "raise the resolution or the scale"
        )


def _told(plan: QuotaPlan, row: IntArray, size: IntArray, number: FloatArray, at: int) -> str:
    """Where a number of the table is from, it, and what is done with the weight."""
    job = plan.jobs[int(row[at])]
    field = "idle" if size[at] == 0 else "utility"
    done = "times" if plan.objective == "sum" else "divided by"
    return f"job {job.name!r}.{field}: {number[at]:g} {done} the weight {job.weight:g}"


def _check_total(plan: QuotaPlan, ptr: IntArray, cost: IntArray) -> None:
    """The sum of what each could cost at most must be an integer that a document holds."""
    if not len(cost):
        return
    begins = ptr[:-1][np.diff(ptr) > 0]
    most = np.maximum.reduceat(np.abs(cost), begins)
    high = int(most.max()) if plan.highest else sum(most.tolist())
    if high > LARGEST and plan.objective == "makespan":
        raise InputError(
            f"work: the longest job would take {high} {plan.time_unit}, more than 2^53; use a "
            "larger time unit"
        )
    if high > LARGEST:
        raise InputError(
            f"utility: all jobs together are worth up to {high} parts of the resolution, more "
            "than 2^53; lower the resolution"
        )


__all__ = [
    "LARGEST", "MOST_OPTIONS", "Span", "Table", "bounds_of", "linear_levels", "scaled_rates",
    "spans_of", "table_of", "times_of",
]  # fmt: skip
