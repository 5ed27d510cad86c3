"""Quota plans: how many GPUs every job gets now, and on which nodes."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar, Final, Literal, NamedTuple

import numpy as np

from optsched.errors import InputError
from optsched.io.strict_json import without_collector
from optsched.io.values import integer, label
from optsched.model.schedule import TIME_UNITS, Problem, Resource, Rows
from optsched.problems.quota.job import QuotaJob
from optsched.problems.quota.table import LARGEST, linear_levels, spans_of, table_of

if TYPE_CHECKING:
    import os
    from collections.abc import Sequence

    import numpy.typing as npt

    from optsched.model.schedule import IntArray, Schedule
    from optsched.problems.quota.table import Table

OBJECTIVES: Final = ("sum", "max_min", "proportional", "makespan")

MOST_GPUS: Final = 10**6
"""Of a plan: each has a name, and a place in the schedule."""

_NAMES: Final = {
    "sum": "utility", "max_min": "level", "proportional": "deviation", "makespan": "longest job",
}  # fmt: skip


class Node(NamedTuple):
    """One machine: GPUs that the plan may use (with those its jobs hold now), and their type."""

    gpus: int
    type: str = ""
    name: str = ""


class QuotaPlan(Problem):
    """How many GPUs every job gets, and which ones; an exact integer program.

    Minimised is the negative of a maximised objective, in parts of `resolution`: all backends
    compare the same integers. With nodes, ties are broken by fewest nodes spanned, then fewest
    GPUs moved, then fewest free GPUs on partly used nodes (exactly so by `cpsat`).

    Parameters
    ----------
    jobs
        What each may get.
    budget
        GPUs in all, or a mapping from type to GPUs; without nodes.
    nodes
        Free GPUs of every node (with those that jobs of the plan hold now): numbers, or `Node`s.
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

    Raises
    ------
    InputError
        A field of a wrong type, a number that cannot be or that overflows; the message names it.
    """

    problem_kind: ClassVar[str] = "quota"

    jobs: tuple[QuotaJob, ...]
    nodes: tuple[Node, ...]
    kinds: tuple[str, ...]
    budgets: tuple[int, ...]
    objective: str
    resolution: int
    time_unit: str
    name: str

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
        if not isinstance(jobs, (list, tuple)):
            raise InputError(f"jobs: expected a list of QuotaJobs, got {jobs!r:.60}")
        if not isinstance(objective, str) or objective not in OBJECTIVES:
            known = ", ".join(OBJECTIVES)
            raise InputError(f"objective: expected one of {known}, got {objective!r:.60}")
        if not isinstance(time_unit, str) or time_unit not in TIME_UNITS:
            known = ", ".join(TIME_UNITS)
            raise InputError(f"time_unit: expected one of {known}, got {time_unit!r:.60}")
        if (budget is None) == (nodes is None):
            raise InputError("budget, nodes: expected one of them")
        machines = () if nodes is None else _nodes(nodes)
        kinds, budgets = _budgets(budget, machines)
        if sum(budgets) > MOST_GPUS:
            raise InputError(
                f"{'nodes' if machines else 'budget'}: a plan names every GPU and takes at most "
                f"{MOST_GPUS}, got {sum(budgets)}; share more by the functions on bare arrays of "
                "optsched_solvers.quota"
            )
        values: dict[str, Any] = {
            "jobs": tuple(jobs), "nodes": machines, "kinds": kinds, "budgets": budgets,
            "objective": objective, "time_unit": time_unit, "name": label("name", name),
            "resolution": integer("resolution", resolution, 1, 10**12),
        }  # fmt: skip
        self.__dict__.update(values)
        from optsched.problems.quota.checks import check_jobs

        check_jobs(self)
        self.__dict__["spans"] = [spans_of(job, kinds, budgets) for job in self.jobs]
        if self.bounds is None or not self._is_plain:
            self.table  # noqa: B018 (overflow is an error now, not later)
        else:
            self._check_plain()

    spans: list[list[tuple[int, int, int, tuple[int, ...] | None]]]
    """What every job may get on each type, see `optsched.problems.quota.table.Span`."""

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
        """Of a proportional plan, as integers up to 2^32 (`quota_shares.quantised`)."""
        from optsched.problems.quota.shares import quantised

        return quantised([job.score or 0.0 for job in self.jobs])

    @cached_property
    def share(self) -> IntArray:
        """Of a proportional plan: exact shares in parts of the resolution, rounded down."""
        from optsched.problems.quota.shares import shares

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
    def held(self) -> tuple[IntArray, IntArray, IntArray]:
        """Where the jobs are now (CSR): row pointers, nodes, GPUs there."""
        at = {node.name: n for n, node in enumerate(self.nodes)}
        rows = [sorted((at[n], gpus) for n, gpus in job.current.items()) for job in self.jobs]
        ptr = np.zeros(len(rows) + 1, np.int64)
        np.cumsum([len(row) for row in rows], out=ptr[1:])
        pairs = np.array([pair for row in rows for pair in row], np.int64).reshape(-1, 2)
        return ptr, pairs[:, 0].copy(), pairs[:, 1].copy()

    def changed(self, **fields: Any) -> QuotaPlan:
        """The same plan with other fields."""
        kept: dict[str, Any] = {
            key: getattr(self, key)
            for key in ("jobs", "objective", "resolution", "time_unit", "name")
        }
        if unknown := set(fields) - {*kept, "budget", "nodes"}:
            raise InputError(f"changed: there is no field {min(unknown)!r:.60}")
        if "budget" not in fields and "nodes" not in fields:
            if self.nodes:
                kept["nodes"] = self.nodes
            else:
                plain = self.kinds == ("",)
                kept["budget"] = self.budgets[0] if plain else dict(
                    zip(self.kinds, self.budgets, strict=True)
                )  # fmt: skip
        return QuotaPlan(**{**kept, **fields})

    # judging

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

    def evaluate(self, schedule: Schedule) -> int:
        """Objective of a schedule of `scheduled`, in its minimised sign."""
        return self.worth(*self.sizes(self.chosen(schedule)))

    def value(self, schedule: Schedule) -> int:
        """Objective in its natural sign, in parts of the resolution (makespan: time units)."""
        worth = self.evaluate(schedule)
        return -worth if self.objective in ("sum", "max_min") else worth

    def quota(self, schedule: Schedule) -> dict[str, int]:
        """GPUs of every job by name, 0 for those that do not run."""
        counts = np.diff(self.chosen(schedule).indptr).tolist()
        return {job.name: count for job, count in zip(self.jobs, counts, strict=True)}

    def placement(self, schedule: Schedule) -> dict[str, dict[str, int]]:
        """Node (or type, without nodes) to GPUs there, of every job that runs."""
        from optsched.problems.quota.schedule import counts

        names = [node.name for node in self.nodes] or list(self.kinds)
        ptr, pool, count = (part.tolist() for part in counts(self, self.chosen(schedule)))
        return {
            job.name: {names[pool[i]]: count[i] for i in range(ptr[j], ptr[j + 1])}
            for j, job in enumerate(self.jobs)
            if ptr[j] < ptr[j + 1]
        }

    def tidiness(self, schedule: Schedule) -> tuple[int, int, int]:
        """Nodes spanned by all jobs, GPUs moved, free GPUs on partly used nodes, for ties."""
        from optsched.problems.quota.schedule import tidiness

        return tidiness(self, self.chosen(schedule))

    def describe(self, objective: int | None) -> str:
        """An objective as people read it: ``utility 12.5``, ``level 2``, ``3600 s``."""
        if objective is None:
            return "none"
        if self.objective == "makespan":
            return f"longest job {objective} {self.time_unit}"
        value = abs(objective) if self.hands_out_all else -objective
        unit = " GPUs" if self.hands_out_all else ""
        return f"{self.objective_name} {value / self.resolution:.10g}{unit}"

    def lower_bound(self) -> int:
        """No answer costs less: the hull (Lagrangian) bound, or the level all can reach."""
        from optsched.problems.quota.bounds import lower_bound

        return lower_bound(self)

    def infeasibility(self) -> str:
        """Why no answer exists, naming the jobs, if counting GPUs shows it; else ``""``."""
        from optsched.problems.quota.checks import infeasibility

        return infeasibility(self)

    # schedules

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
        """The jobs' current runs, one operation each on the lowest GPUs of their nodes."""
        return self._graph

    @cached_property
    def _graph(self) -> Schedule:
        from optsched.problems.quota.schedule import snapshot

        return snapshot(self, self.holding, "running")

    @cached_property
    def holding(self) -> Rows:
        """GPUs that every job holds now."""
        from optsched.problems.quota.schedule import number

        return number(self, *self.held)

    def numbered(self, ptr: IntArray, node: IntArray, count: IntArray) -> Rows:
        """The answer with so many GPUs of each node (CSR by job): held ones are kept first."""
        from optsched.problems.quota.schedule import number

        return number(self, ptr, node, count, self.holding if len(self.held[1]) else None)

    def scheduled(self, answer: Rows) -> Schedule:
        """One operation ``epoch`` per job that runs, on its GPUs, for one pass.

        Parameters
        ----------
        answer
            Row j holds the numbers of the GPUs of job j; GPUs are numbered node by node.

        Raises
        ------
        InputError
            A GPU given twice, a number of them that is not allowed, two types, a locality broken.
        """
        from optsched.problems.quota.schedule import snapshot, with_sequences

        faults = self.faults(answer)
        if faults:
            raise InputError(faults[0])
        return with_sequences(snapshot(self, answer, "epoch"))

    def chosen(self, schedule: Schedule) -> Rows:
        """GPUs of every job in a schedule of `scheduled`.

        Raises
        ------
        InputError
            The schedule is not of this plan.
        """
        from optsched.problems.quota.schedule import chosen

        return chosen(self, schedule)

    def sizes(self, answer: Rows) -> tuple[IntArray, IntArray]:
        """Numbers of GPUs, and number of the type of the first, of every row of an answer."""
        sizes = np.diff(answer.indptr)
        kinds = np.zeros(len(sizes), np.int64)
        if len(self.kinds) > 1:
            kind, _, first = self.pools
            some = sizes > 0
            gpu = answer.ids[answer.indptr[:-1][some]]
            kinds[some] = kind[np.searchsorted(first, gpu, side="right") - 1]
        return sizes, kinds

    def answer(self, schedule: Schedule) -> Rows:
        """The inverse of `scheduled`, for a start to begin with."""
        found = self.chosen(schedule)
        faults = self.faults(found)
        if faults:
            raise InputError(faults[0])
        return found

    def check(self, schedule: Schedule) -> list[str]:
        """What the verifier cannot know, a sentence each: sizes, types, localities, must_run."""
        return self.faults(self.chosen(schedule))

    def faults(self, answer: Rows) -> list[str]:
        """What is wrong with an answer, a sentence each; see `check`."""
        from optsched.problems.quota.checks import faults

        return faults(self, answer)

    # identity and files

    @cached_property
    def sha256(self) -> str:
        """Hash of jobs, nodes and objective."""
        from optsched.formats.quota_json import content

        return hashlib.sha256(content(self)).hexdigest()

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> QuotaPlan:
        """Read a document ``optsched.quota/1``; `InputError` names path, rule and value."""
        from optsched.formats.quota_json import read

        return read(path)

    def write(self, path: str | os.PathLike[str]) -> None:
        """Write a document ``optsched.quota/1``, all of it or nothing."""
        from optsched.formats.quota_json import to_json
        from optsched.io.files import write_atomic

        write_atomic(path, to_json(self))

    def __repr__(self) -> str:
        where = f"{len(self.nodes)} nodes, " if self.nodes else ""
        return (
            f"<QuotaPlan {self.name!r}: {len(self.jobs)} jobs, {where}{self.n_gpus} GPUs, "
            f"{self.objective}>"
        )

    def _check_plain(self) -> None:
        """Costs of plans without a table stay within what a document holds, and count."""
        most = 2.0 * self.resolution * self.n_gpus
        if self.objective == "max_min":
            most = self.resolution * self.n_gpus / float(self.weights.min(initial=1.0))
        if most > LARGEST:
            raise InputError(
                f"resolution: {self.resolution} parts of {self.n_gpus} GPUs are beyond 2^53; "
                "lower it"
            )
        if self.objective == "max_min":
            _, high = self.required_bounds
            levels = linear_levels(self.resolution, self.weights, high)
            for j in np.flatnonzero((levels == 0) & (high > 0))[:1].tolist():
                job = self.jobs[j]
                raise InputError(
                    f"job {job.name!r}.weight: {high[j]} GPUs divided by {job.weight:g} count as 0 "
                    f"at resolution {self.resolution}; raise the resolution or lower the weights"
                )


def _nodes(given: Any) -> tuple[Node, ...]:
    if isinstance(given, np.ndarray) and given.ndim == 1:
        given = given.tolist()
    if not isinstance(given, (list, tuple)):
        raise InputError(f"nodes: expected a list of GPU numbers or Nodes, got {given!r:.60}")
    if not given:
        raise InputError("nodes: expected at least one, got an empty list")
    found, seen = [], set()
    for n, row in enumerate(given):
        if isinstance(row, tuple) and not 1 <= len(row) <= 3:
            raise InputError(f"nodes[{n}]: expected Node(gpus, type, name), got {row!r:.60}")
        node = Node(*row) if isinstance(row, tuple) else Node(row)
        gpus = _gpus(f"nodes[{n}].gpus", node.gpus)
        kind = label(f"nodes[{n}].type", node.type)
        name = label(f"nodes[{n}].name", node.name) or f"n{n}"
        if name in seen:
            raise InputError(f"nodes[{n}].name: {name!r} is also the name of another node")
        seen.add(name)
        found.append(Node(gpus, kind, name))
    return tuple(found)


def _budgets(given: Any, nodes: tuple[Node, ...]) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """Types in the order in which they appear, and GPUs of each."""
    if nodes:
        of: dict[str, int] = {}
        for node in nodes:
            of[node.type] = of.get(node.type, 0) + node.gpus
        return tuple(of), tuple(of.values())
    if not isinstance(given, Mapping):
        return ("",), (_gpus("budget", given),)
    if not given:
        raise InputError("budget: expected at least one type, got an empty mapping")
    kinds = tuple(label("budget type", kind) for kind in given)
    return kinds, tuple(_gpus(f"budget[{kind!r}]", gpus) for kind, gpus in given.items())


def _gpus(place: str, given: Any) -> int:
    """A number of GPUs; too large ones pass, the plan's sum says what to do about them."""
    large = isinstance(given, (int, np.integer)) and given > MOST_GPUS
    return integer(place, given, 0, LARGEST if large else MOST_GPUS)


__all__ = ["OBJECTIVES", "Node", "QuotaJob", "QuotaPlan"]
