"""Quota plans: how many GPUs every job gets, and on which nodes."""

from __future__ import annotations

import hashlib
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar, Final, Literal

import numpy as np

from optsched.errors import InputError
from optsched.io.files import write_atomic
from optsched.io.strict_json import without_collector
from optsched.io.values import integer, label, listed, one_of, refuse_unknown
from optsched.model.schedule import TIME_UNITS, Csr, Problem, Resource, Schedule
from optsched.problems.quota.answer import Node, Quotas, gpu_numbers, kept_gpus
from optsched.problems.quota.checks import (
    check_jobs,
    check_total,
    infeasibility,
    places_of,
)
from optsched.problems.quota.job import QuotaJob, of_kind
from optsched.problems.quota.options import (
    MOST_OPTIONS,
    Span,
    Table,
    exact_sum,
    linear_levels,
    multipliers,
    quantised,
    shares,
    table_of,
    times_of,
)

if TYPE_CHECKING:
    import os
    from collections.abc import Mapping, Sequence

    import numpy.typing as npt

    from optsched.model.schedule import IntArray

OBJECTIVES: Final = ("sum", "max_min", "proportional", "makespan")

_NAMES: Final = {
    "sum": "utility", "max_min": "level", "proportional": "deviation", "makespan": "longest job",
}  # fmt: skip


NO_SIZE: Final = 2**40
"""Size that no budget allows."""


class QuotaPlan(Problem):
    """How many GPUs every job gets, and on which nodes; an exact integer program.

    Minimised is the negative of a maximised objective, in parts of `resolution`: all backends
    compare the same integers. Equal quotas are placed on the fewest nodes, then with the fewest
    GPUs moved, then with the fewest free GPUs on partly used nodes, by a heuristic.

    Parameters
    ----------
    jobs
        The jobs, with the sizes that each may get.
    budget
        GPUs in total, or a mapping from type to GPUs; instead of nodes.
    nodes
        Free GPUs of every node (with those that jobs of the plan hold now): numbers or `Node`.
    objective
        ``"sum"``: the sum of weight x utility; ``"max_min"``: the lowest utility / weight;
        ``"proportional"``: the distance from the shares of the scores, all GPUs handed out;
        ``"makespan"``: the longest of remaining work / rate. The last three need all jobs to
        run (``must_run``).
    resolution
        Parts of a unit of utility, of a GPU (proportional) or of a rate that count. Refused if a
        job's utilities are not all 0 but would all count as 0.
    time_unit
        Of `QuotaJob.work` and `QuotaJob.pass_work`.
    name
        Label.

    Examples
    --------
    >>> a = optsched.QuotaJob("a", sizes=[1, 2, 4], utility=[1, 1.8, 3.1])
    >>> b = optsched.QuotaJob("b", minimum=1, maximum=2, utility=[1.5, 2])
    >>> plan = optsched.QuotaPlan([a, b], budget=5)
    >>> plan.quota(optsched.solve(plan).schedule)
    {'a': 4, 'b': 1}
    """

    problem_kind: ClassVar[str] = "quota"

    jobs: tuple[QuotaJob, ...]
    nodes: tuple[Node, ...]
    kinds: tuple[str, ...]
    """Types of GPUs; ``("",)`` if there is one without a name."""
    budgets: tuple[int, ...]
    """GPUs of each type."""
    objective: str
    resolution: int
    time_unit: str
    name: str
    spans: list[list[Span]]
    """Sizes of every job on each type."""

    def __init__(
        self,
        jobs: Sequence[QuotaJob],
        *,
        budget: int | Mapping[str, int] | None = None,
        nodes: Sequence[int | Node | tuple[Any, ...]] | None = None,
        objective: Literal["sum", "max_min", "proportional", "makespan"] = "sum",
        resolution: int = 10**6,
        time_unit: str = "s",
        name: str = "",
    ) -> None:
        jobs = listed("jobs", jobs, "a list of QuotaJobs")
        machines, kinds, budgets = places_of(budget, nodes)
        self.__dict__.update(
            jobs=tuple(jobs), nodes=machines, kinds=kinds, budgets=budgets,
            objective=one_of("objective", objective, OBJECTIVES),
            time_unit=one_of("time_unit", time_unit, TIME_UNITS), name=label("name", name),
            resolution=integer("resolution", resolution, 1, 10**12),
        )  # fmt: skip
        check_jobs(self.jobs, machines, kinds, objective, self.resolution)
        pools = [(k, kind, gpus) for k, (kind, gpus) in enumerate(zip(kinds, budgets, strict=True))]
        self.__dict__["spans"] = [
            [(k, sizes) for k, kind, gpus in pools if (sizes := job.allowed(kind, gpus))]
            for job in self.jobs
        ]
        if self.hands_out_all:
            most = 2 * self.resolution * self.n_gpus
            check_total(most, objective, time_unit, self.n_gpus)
        elif self.is_plain:
            self._table([[(k, (some[0], some[-1])) for k, some in span] for span in self.spans])
        else:
            self.table  # noqa: B018 (overflow is an error now, not later)

    # what solvers read

    @property
    def objective_name(self) -> str:
        """``"utility"``, ``"level"``, ``"deviation"`` or ``"longest job"``; minimised."""
        return _NAMES[self.objective]

    @property
    def n_operations(self) -> int:
        """Jobs."""
        return len(self.jobs)

    @property
    def budget(self) -> int | dict[str, int]:
        """GPUs in total, or by type, as given."""
        of = dict(zip(self.kinds, self.budgets, strict=True))
        return of[""] if self.kinds == ("",) else of

    def changed(self, **fields: Any) -> QuotaPlan:
        """Return the same plan with other fields."""
        kept: dict[str, Any] = {
            key: getattr(self, key)
            for key in ("jobs", "objective", "resolution", "time_unit", "name")
        }
        refuse_unknown(fields, {*kept, "budget", "nodes"}, "a QuotaPlan")
        if "budget" not in fields and "nodes" not in fields:
            kept.update({"nodes": self.nodes} if self.nodes else {"budget": self.budget})
        return QuotaPlan(**{**kept, **fields})

    @property
    def n_gpus(self) -> int:
        """GPUs of all types."""
        return sum(self.budgets)

    @property
    def highest(self) -> bool:
        """Whether the highest cost of a job counts instead of the sum."""
        return self.objective in ("max_min", "makespan")

    @property
    def hands_out_all(self) -> bool:
        """Whether exactly `total` GPUs are handed out."""
        return self.objective == "proportional"

    @cached_property
    def total(self) -> int:
        """GPUs that a proportional plan hands out: all, or what the maxima allow."""
        _, high = self.required_bounds
        return min(self.n_gpus, int(high.sum()))

    @cached_property
    def n_options(self) -> int:
        """Allowed sizes of all jobs, none included."""
        some = sum(not job.must_run for job in self.jobs)
        return some + sum(len(sizes) for span in self.spans for _, sizes in span)

    @cached_property
    def table(self) -> Table:
        """All options with their costs; an `InputError` if there are too many."""
        if self.n_options > MOST_OPTIONS:
            raise InputError(
                f"jobs: together they have {self.n_options} allowed sizes, more than "
                f"{MOST_OPTIONS}; give each a maximum, or a list of sizes"
            )
        return self._table(self.spans)

    def _table(self, spans: list[list[Span]]) -> Table:
        share = self.share if self.hands_out_all else None
        found = table_of(self.jobs, spans, self.kinds, self.objective, self.resolution, share)
        if len(found.cost):
            some = found.ptr[:-1][np.diff(found.ptr) > 0]
            most = np.maximum.reduceat(np.abs(found.cost), some)
            total = int(most.max()) if self.highest else exact_sum(most)
            check_total(total, self.objective, self.time_unit, self.n_gpus)
        return found

    @cached_property
    def bounds(self) -> tuple[IntArray, IntArray] | None:
        """Least and most GPUs of every job, if all between are allowed; one type only."""
        if len(self.kinds) != 1:
            return None
        low, high = np.ones(len(self.jobs), np.int64), np.zeros(len(self.jobs), np.int64)
        for j, span in enumerate(self.spans):
            for _, sizes in span:
                low[j], high[j] = sizes[0], sizes[-1]
                if high[j] - low[j] + 1 != len(sizes):
                    return None
        return low, high

    @property
    def required_bounds(self) -> tuple[IntArray, IntArray]:
        """`bounds` of a plan that has them, as all with `is_plain` do."""
        assert self.bounds is not None, "proportional plans have bounds"
        return self.bounds

    @cached_property
    def is_plain(self) -> bool:
        """Proportional, or max-min of g / w, within bounds: needs no table of options."""
        no_tables = self.objective == "max_min" and all(job.utility is None for job in self.jobs)
        return self.hands_out_all or (no_tables and self.bounds is not None)

    @cached_property
    def weights(self) -> npt.NDArray[np.float64]:
        """Weights of the jobs, as floats."""
        return np.array([job.weight for job in self.jobs], np.float64)

    @cached_property
    def scores(self) -> IntArray:
        """Of a proportional plan, as integers up to 2^32 (`options.quantised`)."""
        return quantised([job.score or 0.0 for job in self.jobs])[0]

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
        """Current placement of the jobs."""
        at = {node.name: n for n, node in enumerate(self.nodes)}
        rows = [(j, at[n], gpus) for j, job in enumerate(self.jobs)
                for n, gpus in job.current.items()]  # fmt: skip
        job, node, count = np.array(rows, np.int64).reshape(-1, 3).T
        return Quotas.of(len(self.jobs), job, node, count)

    # judging

    def costs(self, sizes: IntArray, kinds: IntArray | None = None) -> IntArray:
        """Return the cost of GPUs of every job (0 for none), of the first type by default."""
        if self.hands_out_all:
            off: IntArray = np.abs(self.resolution * sizes - self.share)
            return off
        if self.is_plain:
            return -linear_levels(self.resolution, self.weights, sizes)
        found = self._find(sizes, kinds)
        if len(found) and (found < 0).any():
            job = self.jobs[int(np.argmin(found))].name
            raise InputError(f"job {job!r} may not get {sizes[int(np.argmin(found))]} GPUs")
        return self.table.cost[found]

    def worth(self, sizes: IntArray, kinds: IntArray | None = None) -> int:
        """Return the minimised objective of numbers of GPUs; see `costs`."""
        costs = self.costs(sizes, kinds)
        if self.highest:
            return int(costs.max()) if len(costs) else 0
        return int(costs.sum())

    def _find(self, sizes: IntArray, kinds: IntArray | None) -> IntArray:
        """Return the position of every job's option in the table, -1 if it is not allowed."""
        kinds = np.zeros(len(sizes), np.int64) if kinds is None else np.where(sizes, kinds, 0)
        keys = (np.arange(len(sizes)) * len(self.kinds) + kinds) * (self.n_gpus + 1) + sizes
        at = np.searchsorted(self._keys, keys)
        good = at < len(self._keys)
        good[good] = self._keys[at[good]] == keys[good]
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
        """Return the GPUs of every job of an answer, and the number of their type."""
        kinds = np.zeros(len(quotas.ptr) - 1, np.int64)
        some = np.diff(quotas.ptr) > 0
        kinds[some] = self.pools[0][quotas.node[quotas.ptr[:-1][some]]]
        return quotas.gpus, kinds

    def evaluate(self, schedule: Schedule) -> int:
        """Objective of a schedule of `scheduled`, in its minimised sign."""
        return self.worth(*self.sizes(self._quotas(schedule)))

    def value(self, schedule: Schedule) -> int:
        """Objective in its natural sign, in parts of the resolution (makespan: time units)."""
        worth = self.evaluate(schedule)
        return -worth if self.objective in ("sum", "max_min") else worth

    def quota(self, schedule: Schedule) -> dict[str, int]:
        """Return the GPUs of every job by name, 0 for those that do not run."""
        counts = self._quotas(schedule).gpus.tolist()
        return {job.name: count for job, count in zip(self.jobs, counts, strict=True)}

    def placement(self, schedule: Schedule) -> dict[str, dict[str, int]]:
        """Return, of every job that runs, its GPUs by node (or by type, without nodes)."""
        names = [node.name for node in self.nodes] or list(self.kinds)
        found = self._quotas(schedule)
        where: dict[str, dict[str, int]] = {}
        for j, n, c in zip(found.rows.tolist(), found.node.tolist(), found.count.tolist(),
                           strict=True):  # fmt: skip
            where.setdefault(self.jobs[j].name, {})[names[n]] = c
        return where

    def tidiness(self, schedule: Schedule) -> tuple[int, int, int]:
        """Return nodes spanned by all jobs, GPUs moved, free GPUs on partly used nodes."""
        quotas, gpus = self._quotas(schedule), self.pools[1]
        used = np.zeros(len(gpus), np.int64)
        np.add.at(used, quotas.node, quotas.count)
        part = (used > 0) & (used < gpus)
        moved = np.minimum(self.held.gpus, quotas.gpus) - kept_gpus(quotas, self.held)
        return len(quotas.node), int(moved.sum()), int((gpus - used)[part].sum())

    def describe(self, objective: int | None) -> str:
        """Format an objective: ``utility 12.5``, ``level 2``, ``3600 s``."""
        if objective is None:
            return "none"
        if self.objective == "makespan":
            return f"longest job {objective} {self.time_unit}"
        value = abs(objective) if self.hands_out_all else -objective
        unit = " GPUs" if self.hands_out_all else ""
        return f"{self.objective_name} {value / self.resolution:.10g}{unit}"

    def lower_bound(self) -> int:
        """Return a bound by duality, `level` or largest remainders, without localities.

        Exact with one type, but for sums.
        """
        if not self.jobs or self.infeasibility():
            return 0
        if self.highest:
            return self.level
        if not self.hands_out_all:
            return multipliers(self.table, self.budgets)[0]
        low, part = np.divmod(self.share, self.resolution)
        highest = np.sort(part)[::-1][: self.total - int(low.sum())]
        return int(part.sum()) + int((self.resolution - 2 * highest).sum())

    @cached_property
    def level(self) -> int:
        """Least cost that all jobs can reach within the GPUs of all types together."""
        if self.is_plain:
            low, high = self.required_bounds
            best, worst = int(self.costs(high).max()), int(self.costs(low).max())
        else:
            table = self.table
            best = int(np.minimum.reduceat(table.cost, table.ptr[:-1]).max())
            worst = int(table.cost.max())
        while best < worst:
            middle = (best + worst) // 2
            if int(self.sizes_within(middle).sum()) <= self.n_gpus:
                worst = middle
            else:
                best = middle + 1
        return worst

    def sizes_within(self, cost: int) -> IntArray:
        """Return the smallest size of each job, of any type, that costs at most so much.

        `NO_SIZE` where there is none.
        """
        if not self.is_plain:
            table = self.table
            size = np.where(table.cost <= cost, table.size, NO_SIZE)
            found: IntArray = np.minimum.reduceat(size, table.ptr[:-1])
            return found
        low, high = self.required_bounds
        weights = self.weights
        size = np.maximum(np.ceil(-cost * weights / self.resolution).astype(np.int64), 1)
        # floats may be off by one: the definition decides
        size -= linear_levels(self.resolution, weights, size - 1) >= -cost
        size += linear_levels(self.resolution, weights, size) < -cost
        size = np.maximum(size, low)
        return np.where(size > high, NO_SIZE, size)

    def infeasibility(self) -> str:
        """Return why no answer exists if the numbers of GPUs show it, else ``""``."""
        return infeasibility(self.jobs, self.spans, self.kinds, self.budgets)

    # schedules

    @property
    def job_names(self) -> tuple[str, ...]:
        """Names of the jobs."""
        return tuple(job.name for job in self.jobs)

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

    def graph(self) -> Schedule:
        """Return the current runs of jobs, one operation each on the lowest GPUs of its nodes."""
        return self._graph

    @cached_property
    def _graph(self) -> Schedule:
        return self._snapshot(self.held, "running")

    def _snapshot(self, quotas: Quotas, kind: str) -> Schedule:
        """One operation ``epoch`` (or ``running``) for every job with GPUs, without orders."""
        running = kind == "running"
        numbers = gpu_numbers(self.pools[2], self.n_gpus, quotas, None if running else self.held)
        sizes, kinds = self.sizes(quotas)
        jobs = np.flatnonzero(sizes)
        indptr = np.zeros(len(jobs) + 1, np.int64)
        np.cumsum(sizes[jobs], out=indptr[1:])
        duration = np.ones(len(jobs), np.int64) if running else self._durations(jobs, sizes, kinds)
        return Schedule(
            name=self.name, time_unit=self.time_unit, resources=self.resources, duration=duration,
            op_resources=Csr(indptr, numbers.ids), job=jobs, kind=np.full(len(jobs), kind),
        )  # fmt: skip

    def _durations(self, jobs: IntArray, sizes: IntArray, kinds: IntArray) -> IntArray:
        """Time of one pass with so many GPUs; 1 for jobs without `pass_work`."""
        found = np.ones(len(jobs), np.int64)
        for i, j in enumerate(jobs.tolist()):
            job = self.jobs[j]
            if job.pass_work is None:
                continue
            kind = self.kinds[int(kinds[j])]
            at = job.allowed(kind).index(int(sizes[j]))
            rate = of_kind(job.rates, kind)[at : at + 1]
            found[i] = times_of(self.resolution, np.array([job.pass_work]), rate)[0]
        return found

    def scheduled(self, answer: Quotas) -> Schedule:
        """Return a schedule of one operation ``epoch`` per job that runs, for one pass.

        GPUs are numbered node by node; every job keeps the lowest of those it holds. `InputError`
        names the first of `faults`.
        """
        if found := self.faults(answer):
            raise InputError(found[0])
        graph = self._snapshot(answer, "epoch")  # all at time 0, each alone on its GPUs
        rows, gpus = np.arange(graph.n_operations), graph.op_resources.ids
        order = np.argsort(gpus)
        indptr = np.searchsorted(gpus[order], np.arange(graph.n_resources + 1))
        owner = np.repeat(rows, np.diff(graph.op_resources.indptr))[order]
        return graph.with_orders(Csr(indptr, owner), np.zeros(len(rows), np.int64))

    def _quotas(self, schedule: Schedule) -> Quotas:
        """GPUs of every job in a schedule; see `answer`."""
        if not isinstance(schedule, Schedule):
            raise InputError(f"schedule: expected a Schedule, got {schedule!r:.60}")
        if schedule.resources is not self.resources and schedule.resources != self.resources:
            raise InputError("the schedule belongs to another plan: it has other GPUs")
        job, rows = schedule.job, schedule.op_resources
        n = len(self.jobs)
        strange = (schedule.kind != "epoch").any() or (np.diff(job) <= 0).any()
        if strange or (len(job) and not 0 <= int(job[0]) <= int(job[-1]) < n):
            raise InputError(
                "the schedule belongs to another plan: expected at most one epoch of each of "
                f"{n} jobs"
            )
        first = self.pools[2]
        pool = np.searchsorted(first, rows.ids, side="right") - 1
        key, count = np.unique(
            np.repeat(job, np.diff(rows.indptr)) * len(first) + pool, return_counts=True
        )
        found = Quotas.of(n, key // len(first), key % len(first), count)
        sizes, kinds = self.sizes(found)
        try:
            expected = self._durations(job, sizes, kinds)
        except (IndexError, ValueError):
            raise InputError("the schedule belongs to another plan: it has other sizes") from None
        if not np.array_equal(schedule.duration, expected):
            raise InputError("the schedule belongs to another plan: its passes take other times")
        return found

    def answer(self, schedule: Schedule) -> Quotas:
        """Return the quotas of a schedule of this plan, the inverse of `scheduled`."""
        answer = self._quotas(schedule)
        if found := self.faults(answer):
            raise InputError(found[0])
        return answer

    def check(self, schedule: Schedule) -> list[str]:
        """Return broken rules beyond the verifier's: sizes, types, localities, must_run."""
        return self.faults(self._quotas(schedule))

    def faults(self, answer: Quotas) -> list[str]:
        """Return what is wrong with an answer, a sentence each; see `check`."""
        if not isinstance(answer, Quotas):
            raise InputError(f"answer: expected Quotas, got {answer!r:.60}")
        kind, gpus, _ = self.pools
        if len(answer.ptr) - 1 != len(self.jobs):
            return [f"expected a row for each of {len(self.jobs)} jobs, got {len(answer.ptr) - 1}"]
        for n in answer.node[(answer.node < 0) | (answer.node >= len(gpus))][:1]:
            return [f"there is no node {n}, the plan has 0..{len(gpus) - 1}"]
        used = np.bincount(answer.node, answer.count, len(gpus)).astype(np.int64)
        where = [node.name for node in self.nodes] or [kind or "the budget" for kind in self.kinds]
        found = [f"{used[n]} GPUs of {where[n]} are given away, it has {gpus[n]}"
                 for n in np.flatnonzero(used > gpus).tolist()]  # fmt: skip
        sizes, kinds = self.sizes(answer)
        for j in np.flatnonzero(~self.allowed(sizes, kinds)).tolist():
            name = self.kinds[int(kinds[j])] if sizes[j] else ""
            of = f" of type {name}" if name else ""
            found.append(
                f"job {self.jobs[j].name!r} gets {sizes[j]} GPUs{of}, which is not allowed"
            )
        if self.hands_out_all and int(sizes.sum()) != self.total:
            found.append(f"{int(sizes.sum())} GPUs are handed out, all {self.total} must be")
        for j in np.unique(answer.rows[kind[answer.node] != kinds[answer.rows]]).tolist():
            found.append(f"job {self.jobs[j].name!r} gets GPUs of several types")
        largest = [int(gpus[kind == k].max(initial=0)) for k in range(len(self.kinds))]
        for j in np.flatnonzero(np.diff(answer.ptr) > 1).tolist():
            name, rule = self.jobs[j].name, self.jobs[j].locality
            here = slice(answer.ptr[j], answer.ptr[j + 1])
            if rule == "single" and sizes[j] <= largest[int(kinds[j])]:
                on = here.stop - here.start
                found.append(f"job {name!r} must be within one node, it is on {on}")
            part = answer.node[here][answer.count[here] < gpus[answer.node[here]]].tolist()
            if rule == "whole" and len(part) > 1:
                names = " and ".join(self.nodes[n].name for n in part[:2])
                found.append(f"job {name!r} must hold its nodes wholly, {names} are shared")
        return found

    # identity and files

    @cached_property
    def sha256(self) -> str:
        """Hash of jobs, nodes and objective."""
        from optsched.problems.quota.document import content

        return hashlib.sha256(content(self)).hexdigest()

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> QuotaPlan:
        """Read a document ``optsched.quota/1``; `InputError` names path, rule and value."""
        from optsched.problems.quota.document import read

        return read(path)

    def write(self, path: str | os.PathLike[str]) -> None:
        """Write a document ``optsched.quota/1``, all of it or nothing."""
        from optsched.problems.quota.document import to_json

        write_atomic(path, to_json(self))

    def __repr__(self) -> str:
        where = f"{len(self.nodes)} nodes, " if self.nodes else ""
        return (
            f"<QuotaPlan {self.name!r}: {len(self.jobs)} jobs, {where}{self.n_gpus} GPUs, "
            f"{self.objective}>"
        )


__all__ = ["OBJECTIVES", "Node", "QuotaJob", "QuotaPlan", "Quotas"]
