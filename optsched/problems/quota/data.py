"""All that a quota plan's jobs may choose, as flat arrays with integer costs; exact shares."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeAlias

import numpy as np

from optsched.errors import InputError
from optsched.io.strict_json import without_collector
from optsched.model.schedule import Resource
from optsched.problems.quota.job import of_kind

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

    from optsched.model.schedule import IntArray
    from optsched.problems.quota.job import QuotaJob

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


class Node(NamedTuple):
    """One machine: GPUs that the plan may use (with those its jobs hold now), and their type."""

    gpus: int
    type: str = ""
    name: str = ""


@dataclass(frozen=True, eq=False)
class Quotas:
    """GPUs of every job, by node (or by type, without nodes): what solvers find.

    Parameters
    ----------
    ptr
        Job j has the rows ``ptr[j]`` to ``ptr[j + 1] - 1``; shape (jobs + 1,).
    node, count
        Nodes, ascending within a job, and GPUs there, at least 1.
    """

    ptr: IntArray
    node: IntArray
    count: IntArray

    @classmethod
    def of(cls, jobs: int, job: IntArray, node: IntArray, count: IntArray) -> Quotas:
        """Of rows in any order."""
        order = np.lexsort((node, job))
        ptr = np.zeros(jobs + 1, np.int64)
        np.cumsum(np.bincount(job, minlength=jobs), out=ptr[1:])
        return cls(ptr, node[order], count[order])

    @property
    def rows(self) -> IntArray:
        """The job of every row."""
        return np.repeat(np.arange(len(self.ptr) - 1), np.diff(self.ptr))

    @property
    def gpus(self) -> IntArray:
        """GPUs of every job."""
        found: IntArray = np.zeros(len(self.ptr) - 1, np.int64)
        np.add.at(found, self.rows, self.count)
        return found

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Quotas):
            return NotImplemented
        pairs = ((getattr(self, key), getattr(other, key)) for key in ("ptr", "node", "count"))
        return all(np.array_equal(mine, theirs) for mine, theirs in pairs)

    __hash__ = None  # type: ignore[assignment]


class PlanData:
    """What a plan is made of, and what solvers read; `QuotaPlan` adds the doors for users."""

    jobs: tuple[QuotaJob, ...]
    nodes: tuple[Node, ...]
    kinds: tuple[str, ...]
    budgets: tuple[int, ...]
    objective: str
    resolution: int
    time_unit: str
    name: str
    spans: list[list[Span]]
    """What every job may get on each type."""

    @property
    def n_gpus(self) -> int:
        """GPUs of all types."""
        return sum(self.budgets)

    @property
    def highest(self) -> bool:
        """Whether the highest cost of a job counts, not their sum."""
        return self.objective in ("max_min", "makespan")

    @property
    def hands_out_all(self) -> bool:
        """Whether the GPUs handed out are a given number, `total`."""
        return self.objective == "proportional"

    @cached_property
    def total(self) -> int:
        """GPUs that a proportional plan hands out: all, or what the maxima allow."""
        _, high = self.required_bounds
        return min(self.n_gpus, int(high.sum()))

    @cached_property
    def n_options(self) -> int:
        """Allowed sizes of all jobs, none included."""
        count = sum(not job.must_run for job in self.jobs)
        for span in self.spans:
            for _, low, high, listed in span:
                count += high - low + 1 if listed is None else len(listed)
        return count

    @cached_property
    def table(self) -> Table:
        """All options with their costs."""
        return table_of(self)

    @cached_property
    def bounds(self) -> tuple[IntArray, IntArray] | None:
        """Least and most GPUs of every job, if all between are allowed; one type only."""
        if len(self.kinds) != 1:
            return None
        low, high = np.ones(len(self.jobs), np.int64), np.zeros(len(self.jobs), np.int64)
        for j, span in enumerate(self.spans):
            for _, first, last, listed in span:
                if listed is not None and last - first + 1 != len(listed):
                    return None
                low[j], high[j] = first, last
        return low, high

    @property
    def required_bounds(self) -> tuple[IntArray, IntArray]:
        """`bounds` of a plan that has them: proportional ones do, and whatever `is_plain`."""
        assert self.bounds is not None, "proportional plans have bounds"
        return self.bounds

    @cached_property
    def _is_plain(self) -> bool:
        """Whether costs follow from bounds alone: then a table may be far too large."""
        no_tables = self.objective == "max_min" and all(job.utility is None for job in self.jobs)
        return self.objective == "proportional" or no_tables

    @property
    def is_plain(self) -> bool:
        """Proportional, or max-min of g / w, within bounds: needs no table of options."""
        return self._is_plain and self.bounds is not None

    @cached_property
    def weights(self) -> npt.NDArray[np.float64]:
        """Of the jobs, as floats."""
        return np.array([job.weight for job in self.jobs], np.float64)

    @cached_property
    def scores(self) -> IntArray:
        """Of a proportional plan, as integers up to 2^32 (`options.quantised`)."""
        return quantised([job.score or 0.0 for job in self.jobs])

    @cached_property
    def share(self) -> IntArray:
        """Of a proportional plan: exact shares in parts of the resolution, rounded down."""
        low, high = self.required_bounds
        return shares(self.scores, low, high, self.total, self.resolution)

    @cached_property
    def pools(self) -> tuple[IntArray, IntArray, IntArray]:
        """Type, GPUs and first GPU of every node, or of every budget if there are no nodes."""
        if self.nodes:
            of = {kind: k for k, kind in enumerate(self.kinds)}
            kind = np.array([of[node.type] for node in self.nodes], np.int64)
            gpus = np.array([node.gpus for node in self.nodes], np.int64)
        else:
            kind, gpus = np.arange(len(self.kinds)), np.array(self.budgets, np.int64)
        first = np.zeros(len(gpus), np.int64)
        np.cumsum(gpus[:-1], out=first[1:])
        return kind, gpus, first

    @cached_property
    def held(self) -> Quotas:
        """Where the jobs are now."""
        at = {node.name: n for n, node in enumerate(self.nodes)}
        rows = [(j, at[n], gpus) for j, job in enumerate(self.jobs)
                for n, gpus in job.current.items()]  # fmt: skip
        job, node, count = np.array(rows, np.int64).reshape(-1, 3).T
        return Quotas.of(len(self.jobs), job, node, count)

    def costs(self, sizes: IntArray, kinds: IntArray | None = None) -> IntArray:
        """What every job's GPUs cost, if all sizes are allowed.

        Parameters
        ----------
        sizes
            GPUs of every job, 0 for none; shape (jobs,).
        kinds
            Number of their type; by default all are of the first.
        """
        if self.is_plain:
            if self.objective == "max_min":
                return -linear_levels(self.resolution, self.weights, sizes)
            off: IntArray = np.abs(self.resolution * sizes - self.share)
            return off
        found = self._find(sizes, kinds)
        if len(found) and (found < 0).any():
            job = self.jobs[int(np.argmin(found))].name
            raise InputError(f"job {job!r} may not get {sizes[int(np.argmin(found))]} GPUs")
        return self.table.cost[found]

    def worth(self, sizes: IntArray, kinds: IntArray | None = None) -> int:
        """The objective, minimised, of numbers of GPUs; see `costs`."""
        costs = self.costs(sizes, kinds)
        if self.highest:
            return int(costs.max()) if len(costs) else 0
        return int(costs.sum())

    def _find(self, sizes: IntArray, kinds: IntArray | None) -> IntArray:
        """Where in the table each job's option is, -1 if it is not allowed."""
        kinds = np.zeros(len(sizes), np.int64) if kinds is None else np.where(sizes, kinds, 0)
        wanted = (np.arange(len(sizes)) * len(self.kinds) + kinds) * (self.n_gpus + 1) + sizes
        at = np.searchsorted(self._keys, wanted)
        good = at < len(self._keys)
        good[good] = self._keys[at[good]] == wanted[good]
        return np.where(good, at, -1)

    @cached_property
    def _keys(self) -> IntArray:
        table = self.table
        return (table.rows() * len(self.kinds) + table.kind) * (self.n_gpus + 1) + table.size

    def allowed(self, sizes: IntArray, kinds: IntArray) -> npt.NDArray[np.bool_]:
        """Whether each job may get so many GPUs of this type; booleans, shape (jobs,)."""
        if self.is_plain:
            low, high = self.required_bounds
            inside: npt.NDArray[np.bool_] = (sizes >= low) & (sizes <= high)
            return inside
        good: npt.NDArray[np.bool_] = self._find(sizes, kinds) >= 0
        return good

    def sizes(self, quotas: Quotas) -> tuple[IntArray, IntArray]:
        """Numbers of GPUs, and number of the type of the first, of every job of an answer."""
        kinds = np.zeros(len(quotas.ptr) - 1, np.int64)
        some = np.diff(quotas.ptr) > 0
        kinds[some] = self.pools[0][quotas.node[quotas.ptr[:-1][some]]]
        return quotas.gpus, kinds

    @cached_property
    def resources(self) -> tuple[Resource, ...]:
        """The GPUs: ``n0/g1``; ``g1``, or ``type/g1``, without nodes."""
        if self.nodes:
            names = [f"{node.name}/g{i}" for node in self.nodes for i in range(node.gpus)]
        elif self.kinds == ("",):
            names = [f"g{i}" for i in range(self.budgets[0])]
        else:
            pairs = zip(self.kinds, self.budgets, strict=True)
            names = [f"{kind}/g{i}" for kind, gpus in pairs for i in range(gpus)]
        with without_collector():  # a third of the time
            return tuple(map(Resource, names))


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


def table_of(plan: PlanData) -> Table:
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


def _costs(plan: PlanData, row: IntArray, size: IntArray, number: FloatArray) -> IntArray:
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
    plan: PlanData, row: IntArray, size: IntArray, number: FloatArray, exact: FloatArray
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


def _told(plan: PlanData, row: IntArray, size: IntArray, number: FloatArray, at: int) -> str:
    """Where a number of the table is from, it, and what is done with the weight."""
    job = plan.jobs[int(row[at])]
    field = "idle" if size[at] == 0 else "utility"
    done = "times" if plan.objective == "sum" else "divided by"
    return f"job {job.name!r}.{field}: {number[at]:g} {done} the weight {job.weight:g}"


def _check_total(plan: PlanData, ptr: IntArray, cost: IntArray) -> None:
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


# shares of the proportional rule: q = clip(mu S, lo, hi) with a given sum

BITS: Final = 32
"""Of the highest score after quantisation."""


def quantised(scores: Sequence[float]) -> IntArray:
    """Scores as integers, divided by a power of two (ratios of small integers stay exact).

    All ones if all are zero.
    """
    given = np.asarray(scores, np.float64)
    most = float(given.max(initial=0.0))
    if most == 0.0:
        return np.ones(len(given), np.int64)
    exponent = int(np.frexp(most)[1])
    whole: IntArray = np.rint(np.ldexp(given, BITS - exponent)).astype(np.int64)
    return whole


def shares(scores: IntArray, low: IntArray, high: IntArray, total: int, unit: int) -> IntArray:
    """``floor(unit * q_j)`` of the shares q = clip(mu S, low, high) that add up to `total`.

    Jobs of score 0 share equally what is left when all others are at `high`.

    Parameters
    ----------
    scores
        Of `quantised`.
    low, high
        Bounds; ``sum(low) <= total <= sum(high)``.
    total
        GPUs to hand out.
    unit
        Parts of a GPU.
    """
    found = np.zeros(len(scores), np.int64)
    some = scores > 0
    first = min(total - int(low[~some].sum()), int(high[some].sum()))
    for chosen, weights, amount in (
        (some, scores[some], first),
        (~some, np.ones(int((~some).sum()), np.int64), total - first),
    ):
        if chosen.any():
            found[chosen] = _clipped(weights, low[chosen], high[chosen], amount, unit)
    return found


def _clipped(weights: IntArray, low: IntArray, high: IntArray, total: int, unit: int) -> IntArray:
    """Clip and recompute: fix the side that is farther off, until nothing is off."""
    n = len(weights)
    found = np.zeros(n, np.int64)
    free = np.arange(n)
    rest = total
    while len(free):
        weight: Any = weights[free]
        lo: Any = low[free]
        hi: Any = high[free]
        whole = int(weight.sum())
        if int(weight.max()) * max(rest, 1) * unit >= 2**62 or whole * int(hi.max()) >= 2**62:
            weight, lo, hi = (part.astype(object) for part in (weight, lo, hi))
        above = weight * rest - hi * whole
        below = lo * whole - weight * rest
        excess, lack = _positive(above), _positive(below)
        if excess == 0 and lack == 0:
            found[free] = weight * (unit * rest) // whole
            return found
        off, bound = (above > 0, high) if excess >= lack else (below > 0, low)
        fixed = free[off.astype(bool)]
        found[fixed] = unit * bound[fixed]
        rest -= int(bound[fixed].sum())
        free = free[~off.astype(bool)]
    return found


def _positive(amounts: Any) -> int:
    """Sum of the positive ones, without wrapping round."""
    return sum(value for value in amounts.tolist() if value > 0)
