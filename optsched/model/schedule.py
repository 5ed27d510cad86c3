"""Disjunctive graphs and schedules, the type that every part of optsched exchanges."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar, Final

import numpy as np
import numpy.typing as npt

from optsched.errors import InputError
from optsched.io.values import int_array
from optsched.model.arrays import (
    Adjacency,
    Arcs,
    Csr,
    Goal,
    IntArray,
    Objective,
    Resource,
    grouped,
)

if TYPE_CHECKING:
    import os
    from collections.abc import Mapping, Sequence

    import networkx
    import pandas
    from matplotlib.figure import Figure

NO_DEADLINE: Final = int(np.iinfo(np.int64).max)
"""Value of `Schedule.deadline` for an operation without one."""

TIME_UNITS: Final = ("ns", "us", "ms", "s")
"""Units of times; schedules and job shops may have none, ``""``."""
MAX_KIND: Final = 16
"""Characters of `Schedule.kind`."""

STATUSES: Final = ("optimal", "feasible", "infeasible", "unknown")

COLUMNS: Final = (
    "duration", "kind", "job", "stage", "microbatch", "iteration", "offset", "family", "release",
    "deadline", "setup_in", "setup_out", "acquire", "free", "workspace",
)  # fmt: skip
"""Arrays of a `Schedule` with one value per operation, except its starts."""


_WHOLE: Final = ("resources", "time_unit", "period", "op_resources", "goal")


class Problem(ABC):
    """An immutable, hashable instance that has a disjunctive graph.

    Subclasses set `name` and `problem_kind`, and implement `graph` and `sha256`.
    """

    name: str
    problem_kind: ClassVar[str] = "jobshop"
    """Group of solvers for this problem; see `optsched.solvers`."""

    @property
    def objective_name(self) -> str:
        """What is minimised, as in `Objective.name`."""
        from optsched.model.objectives import objective_name

        return objective_name(self.graph())

    @property
    @abstractmethod
    def sha256(self) -> str:
        """Hash of the content, 64 hexadecimal digits, without the instance's name and format."""

    @abstractmethod
    def graph(self) -> Schedule:
        """Return the disjunctive graph: a `Schedule` without sequences and starts."""

    @property
    def job_names(self) -> Sequence[str]:
        """Names of jobs 0, 1, ...; empty if jobs have numbers only."""
        return ()

    @property
    def n_operations(self) -> int:
        """Operations of its schedules."""
        return self.graph().n_operations

    def lower_bound(self) -> int:
        """Compute the best lower bound of `optsched.model.objective_bounds`."""
        from optsched.model.objective_bounds import objective_bounds

        return max(objective_bounds(self).values())

    def scheduled(self, answer: Any) -> Schedule:
        """Make the schedule of a solution: orders on every resource, or the problem's own type.

        Raises `InputError` for a solution of another problem.
        """
        from optsched.model.graph import scheduled

        return scheduled(self.graph(), answer)

    def answer(self, schedule: Schedule) -> Any:
        """Extract the solution of a schedule, such as a warm start: the inverse of `scheduled`.

        Raises `InputError` for a schedule of another instance, without orders or not feasible.
        """
        from optsched.model.verify import verify

        self.check_same_graph(schedule)
        if schedule.sequences is None:
            raise InputError("has no orders")
        violations = verify(schedule)
        if violations:
            raise InputError(violations[0].message)
        return schedule.sequences

    def check(self, schedule: Schedule) -> list[str]:
        """Broken rules of this problem that the graph does not express, one sentence each.

        Raises `InputError` for a schedule of another instance.
        """
        self.check_same_graph(schedule)
        return []

    def check_same_graph(self, schedule: Schedule) -> None:
        """Raise `InputError` for a schedule of another instance."""
        if not self.graph().same_graph(schedule):
            raise self.other_instance(schedule)

    def other_instance(self, schedule: Schedule, graph: Schedule | None = None) -> InputError:
        """Error for a schedule of a different instance, with the first difference of the graphs."""
        from optsched.model.difference import difference

        named = str(schedule.provenance.get("instance_sha256", schedule.graph().sha256))[:12]
        found = difference(schedule, self.graph() if graph is None else graph)
        detail = f": {found}" if found else ""
        if named == self.sha256[:12]:
            return InputError(f"names this instance ({named}), but its graph is another{detail}")
        return InputError(f"belongs to another instance ({named}, not {self.sha256[:12]}){detail}")

    def infeasibility(self) -> str:
        """Explain in one sentence why no schedule can exist; ``""`` if no simple check shows it."""
        from optsched.model import bounds

        return bounds.infeasibility(self.graph())

    def evaluate(self, schedule: Schedule) -> int:
        """Compute the objective value of a schedule of this instance, feasible or not.

        Raises `InputError` for a schedule of another instance or without starts.
        """
        from optsched.model.objectives import objective_value

        self.check_same_graph(schedule)
        return objective_value(schedule, schedule.end)

    def describe(self, objective: int) -> str:
        """Format an objective value with its unit."""
        return f"{objective} {self.graph().time_unit}".rstrip()

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Problem):
            return NotImplemented
        same = type(self) is type(other) and self.name == other.name
        return same and self.sha256 == other.sha256

    def __hash__(self) -> int:
        return int(self.sha256[:15], 16)


@dataclass(frozen=True, eq=False, kw_only=True)
class Schedule(Problem):
    """A disjunctive graph and, once solved, the order on every resource and the start times.

    Arrays have one value per operation unless noted otherwise and are read-only; times are integers
    in `time_unit`, memory is in bytes. Without `sequences` and `start` it is an instance, itself a
    problem that `optsched.solve` accepts.

    Parameters
    ----------
    resources
        The unary machines, names distinct.
    duration
        Processing times p >= 0.
    op_resources
        Resources that each operation holds from start to end; a row may be empty.
    arcs
        Conjunctive arcs; ``lag >= -duration[tail]``; ``distance`` in cycles (periodic only).
    job, kind, stage, microbatch, iteration
        Labels: job and stage, and what the operation does (``"F"``, ``"B"``, ...).
    family, setup_in, setup_out
        Setup between immediate neighbours i, j of one resource: 0 if the families are equal,
        else ``setup_out[i] + setup_in[j]``.
    release, deadline
        Time window of an operation (`NO_DEADLINE` = none).
    acquire, free, workspace
        Bytes kept from the start on, given back at the end, needed while running.
    offset, period
        Periodic schedules: instance c of i starts at ``start[i] + (c + offset[i]) * period``.
    goal
        Objective of one iteration with the weights or due dates of jobs (None: the makespan).
    sequences, start
        The order of operations on every resource, and start times; both or neither.
    objective, provenance
        Claimed value and bound; origin of the schedule.

    Raises
    ------
    InputError
        A field has a wrong type, shape or range; the message names it. `CyclicOrder` for arcs
        that form a cycle.

    Examples
    --------
    >>> graph = optsched.Schedule(resources=(optsched.Resource("gpu0"),), duration=[3, 4],
    ...                           op_resources=[[0], [0]], arcs=[(0, 1)])
    >>> optsched.solve(graph).schedule.start.tolist()
    [0, 3]
    """

    resources: tuple[Resource, ...]
    duration: IntArray
    op_resources: Csr
    arcs: Arcs = field(default_factory=lambda: Arcs.of([]))
    name: str = ""
    time_unit: str = "us"
    job: IntArray = None  # type: ignore[assignment]  # zeros, like all that follow
    kind: npt.NDArray[np.str_] = None  # type: ignore[assignment]
    stage: IntArray = None  # type: ignore[assignment]
    microbatch: IntArray = None  # type: ignore[assignment]
    iteration: IntArray = None  # type: ignore[assignment]
    offset: IntArray = None  # type: ignore[assignment]
    family: IntArray = None  # type: ignore[assignment]
    release: IntArray = None  # type: ignore[assignment]
    deadline: IntArray = None  # type: ignore[assignment]
    setup_in: IntArray = None  # type: ignore[assignment]
    setup_out: IntArray = None  # type: ignore[assignment]
    acquire: IntArray = None  # type: ignore[assignment]
    free: IntArray = None  # type: ignore[assignment]
    workspace: IntArray = None  # type: ignore[assignment]
    period: int | None = None
    goal: Goal | None = None
    sequences: Csr | None = None
    start: IntArray | None = None
    objective: Objective | None = None
    provenance: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        from optsched.model.checks import normalise, solution

        given = (self.sequences, self.start, self.objective, self.provenance)
        self.__dict__.update(normalise(self))
        self.__dict__.update(solution(self, *given))

    # sizes and views

    @property
    def n_operations(self) -> int:
        """Number of operations."""
        return len(self.duration)

    @cached_property
    def job_names(self) -> Sequence[str]:
        """Names of the jobs: ``provenance["jobs"]``; empty if it does not name every job."""
        names = self.provenance.get("jobs")
        if not isinstance(names, (list, tuple)) or not all(isinstance(x, str) for x in names):
            return ()
        return names if int(self.job.max(initial=0)) < len(names) else ()

    def job_name(self, job: int) -> str:
        """Return the name of a job, or its number."""
        return (self.job_names[job] if self.job_names else "") or str(job)

    @property
    def n_resources(self) -> int:
        """Number of resources."""
        return len(self.resources)

    @property
    def is_scheduled(self) -> bool:
        """Whether it has orders and start times."""
        return self.start is not None

    @property
    def end(self) -> IntArray:
        """Completion times ``start + duration``; `InputError` for an instance."""
        if self.start is None:
            raise InputError("this graph is not scheduled: it has no starts")
        return self.start + self.duration

    @property
    def makespan(self) -> int:
        """Latest completion time of any operation; 0 without operations."""
        return int(self.end.max(initial=0))

    @cached_property
    def memory(self) -> IntArray:
        """Memory of every resource in bytes, 0 = unlimited; shape (n_resources,)."""
        return int_array("memory", [resource.memory for resource in self.resources])

    @cached_property
    def has_setups(self) -> bool:
        """Whether any setup time is positive."""
        return bool(self.setup_in.any() or self.setup_out.any())

    @cached_property
    def successors(self) -> Adjacency:
        """Arcs by tail."""
        return self._adjacency(self.arcs.tail, self.arcs.head)

    @cached_property
    def predecessors(self) -> Adjacency:
        """Arcs by head; weights are start-to-start, as in `successors`."""
        return self._adjacency(self.arcs.head, self.arcs.tail)

    def _adjacency(self, near: IntArray, far: IntArray) -> Adjacency:
        indptr, order = grouped(near, self.n_operations)
        weight = self.duration[self.arcs.tail] + self.arcs.lag
        return Adjacency(indptr, far[order], weight[order])

    @cached_property
    def users(self) -> Csr:
        """Operations that need each resource, ascending."""
        counts = np.diff(self.op_resources.indptr)
        operation = np.repeat(np.arange(self.n_operations), counts)
        indptr, order = grouped(self.op_resources.ids, self.n_resources)
        return Csr(indptr, operation[order])

    @cached_property
    def single_resource(self) -> IntArray:
        """The resource of every operation, -1 for none; `InputError` if one holds several."""
        counts = np.diff(self.op_resources.indptr)
        if (counts > 1).any():
            gang = int(np.argmax(counts > 1))
            raise InputError(
                f"operations[{gang}].resources: holds {counts[gang]} resources at once"
            )
        resource = np.full(self.n_operations, -1, np.int64)
        resource[counts == 1] = self.op_resources.ids
        resource.flags.writeable = False
        return resource

    def setup(self, i: int, j: int) -> int:
        """Return the setup time if j immediately follows i on a resource."""
        if self.family[i] == self.family[j]:
            return 0
        return int(self.setup_out[i] + self.setup_in[j])

    def setups(self, before: IntArray, after: IntArray) -> IntArray:
        """Return setup times of many pairs of immediate neighbors; see `setup`."""
        same_family = self.family[before] == self.family[after]
        return np.where(same_family, 0, self.setup_out[before] + self.setup_in[after])

    # schedules from this one, or from another tool

    def with_orders(
        self,
        sequences: Csr,
        start: npt.ArrayLike,
        objective: Objective | None = None,
        provenance: Mapping[str, Any] | None = None,
    ) -> Schedule:
        """Return the same graph with these orders and start times, which may break rules."""
        from optsched.model.checks import solution

        origin = self.provenance if provenance is None else provenance
        return self._sharing(solution(self, sequences, np.asarray(start), objective, origin))

    def with_cycle(
        self,
        period: int,
        offset: npt.ArrayLike,
        sequences: Csr,
        start: npt.ArrayLike,
        objective: Objective | None = None,
        provenance: Mapping[str, Any] | None = None,
    ) -> Schedule:
        """Return the same graph with a period, offsets, orders and starts; rules may break."""
        from optsched.model.checks import cycle, solution

        bare = self._sharing(cycle(self, period, offset))
        origin = self.provenance if provenance is None else provenance
        return bare._sharing(solution(bare, sequences, np.asarray(start), objective, origin))

    @classmethod
    def from_starts(cls, problem: Problem, starts: Any, *, period: int | None = None) -> Schedule:
        """Make the schedule of a problem from start times of another tool, for `optsched.verify`.

        Machine orders follow from the starts. The result may break rules; it claims no objective.

        Parameters
        ----------
        problem
            The instance.
        starts
            One per operation: rows ``(job, machine, start)`` or a data frame with these columns, a
            list by index, one list per job, or a mapping. Its keys are indices, ``(job, position)``
            with a job number or name, or names such as ``"F(job 3, stage 2)"``.
        period
            Of a rolling problem; starts are then those of one iteration, in absolute time.

        Raises
        ------
        InputError
            Starts are missing, doubled, wrong or on another machine; the operation is named.

        Examples
        --------
        >>> shop = optsched.JobShop([[(0, 3), (1, 2)], [(1, 4), (0, 1)]])
        >>> schedule = optsched.Schedule.from_starts(shop, [[0, 3], [0, 4]])
        >>> print(*optsched.verify(schedule, problem=shop), sep="; ")  # doctest: +ELLIPSIS
        operation 1 (job 0, stage 1) starts 1 before operation 2 (job 1, stage 0) ends on m1...
        """
        from optsched.model.external import from_starts

        return from_starts(problem, starts, period)

    @classmethod
    def from_orders(cls, problem: Problem, orders: Any) -> Schedule:
        """Make the earliest schedule of a problem with machine orders of another tool.

        Parameters
        ----------
        problem
            The instance.
        orders
            Operations on every machine in order, as rows or as a mapping from machine names;
            operations by index, ``(job, position)`` or name as in `from_starts`, or jobs by name.

        Raises
        ------
        InputError
            An order misses, repeats or adds an operation; `CyclicOrder` if orders contradict.

        Examples
        --------
        >>> shop = optsched.JobShop([[(0, 3), (1, 2)], [(1, 4), (0, 1)]], names=["a", "b"])
        >>> optsched.Schedule.from_orders(shop, [["a", "b"], ["b", "a"]]).makespan
        6
        """
        from optsched.model.external import from_orders

        return from_orders(problem, orders)

    def _sharing(self, changes: dict[str, Any]) -> Schedule:
        """A copy with other orders and claims that shares the checked graph."""
        copy = object.__new__(Schedule)
        copy.__dict__.update(self.__dict__)
        copy.__dict__.update(changes)
        if "provenance" in changes:
            copy.__dict__.pop("job_names", None)  # follow from it
        if "offset" in changes:
            copy.__dict__.pop("sha256", None)
        return copy

    def same_graph(self, other: Schedule) -> bool:
        """Test whether both are the same instance; names, orders, starts and claims may differ."""
        pairs = [(getattr(self, key), getattr(other, key)) for key in (*_WHOLE, *COLUMNS, "arcs")]
        if all(a is b for a, b in pairs):  # the common case
            return True
        whole, columns = pairs[: len(_WHOLE)], pairs[len(_WHOLE) : -1]
        arrays = [*columns, *zip(self.arcs, other.arcs, strict=True)]
        return all(a == b for a, b in whole) and all(np.array_equal(a, b) for a, b in arrays)

    def same_cycle(self, other: Schedule) -> bool:
        """`same_graph`, where periods and offsets may differ."""
        if self.period is None or other.period is None:
            return self.same_graph(other)
        ours = {"period": self.period, "offset": self.offset}
        return self.same_graph(other._sharing(ours))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Schedule):
            return NotImplemented
        starts = (self.start is None) == (other.start is None) and (
            self.start is None or np.array_equal(self.start, other.start)  # type: ignore[arg-type]
        )
        return (
            self.same_graph(other)
            and starts
            and self.name == other.name
            and self.sequences == other.sequences
            and self.objective == other.objective
            and dict(self.provenance) == dict(other.provenance)
        )

    __hash__ = None  # type: ignore[assignment]

    # a graph is itself a problem

    def graph(self) -> Schedule:
        """Return the instance without orders and starts."""
        return self._sharing(
            {"sequences": None, "start": None, "objective": None, "provenance": {}}
        )

    def unroll(self, cycles: int) -> Schedule:
        """Write the first cycles of a periodic schedule as a one-shot one."""
        from optsched.analysis.unroll import unroll

        return unroll(self, cycles)

    def to_networkx(self) -> networkx.DiGraph[int]:
        """Make a networkx graph: operations are nodes, arcs and machine arcs are edges."""
        from optsched.analysis.links import to_networkx

        return to_networkx(self)

    def to_pandas(self) -> pandas.DataFrame:
        """Make a data frame with one row per operation.

        Returns
        -------
        pandas.DataFrame
            Columns ``job`` (name or number), ``name`` (as in messages of the verifier), ``kind``,
            ``stage``, ``microbatch``, ``iteration``, ``resource`` (several joined by ``+``),
            ``duration``, ``start``, ``end``, ``unit``; periodic schedules also have ``offset``.
            An instance has no ``start`` and ``end``.

        Raises
        ------
        MissingExtra
            pandas is not installed.

        Examples
        --------
        >>> shop = optsched.JobShop([[(0, 3), (1, 2)], [(1, 4), (0, 1)]], ["saw", "mill"])
        >>> frame = optsched.solve(shop).schedule.to_pandas()
        >>> frame[frame.resource == "saw"][["job", "start", "end"]].to_dict("list")
        {'job': ['0', '1'], 'start': [0, 4], 'end': [3, 5]}
        """
        from optsched.plots.notebook import operations

        return operations(self)

    def plot(self, path: str | os.PathLike[str] | None = None, **options: Any) -> Figure:
        """Draw a Gantt chart; options are those of `optsched.plots.gantt`.

        Examples
        --------
        >>> shop = optsched.JobShop([[(0, 3), (1, 2)], [(1, 4), (0, 1)]])
        >>> figure = optsched.solve(shop).schedule.plot(width=8)
        """
        from optsched.plots.gantt_chart import gantt

        return gantt(self, path, **options)

    @cached_property
    def sha256(self) -> str:
        """Hash of all that `same_graph` compares, independent of `name` and of file formats."""
        import hashlib

        period = None if self.period is None else int(self.period)
        goal = () if self.goal is None else (tuple(self.goal),)
        whole = (self.time_unit, period, self.resources, self.kind.tolist(), *goal)
        digest = hashlib.sha256(repr(whole).encode())
        columns = [getattr(self, key) for key in COLUMNS if key != "kind"]
        for array in (*columns, self.op_resources.indptr, self.op_resources.ids, *self.arcs):
            digest.update(array.astype("<i8", copy=False).tobytes())
        return digest.hexdigest()

    # files

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> Schedule:
        """Read a ``*.schedule.json`` document strictly."""
        from optsched.io.files import read_text
        from optsched.model.document import read

        return read(read_text(path), str(path))

    def write(self, path: str | os.PathLike[str]) -> None:
        """Write a ``*.schedule.json`` document atomically."""
        from optsched.io.files import write_atomic
        from optsched.model.document import write

        write_atomic(path, write(self))

    def _repr_html_(self) -> str:
        from optsched.plots.notebook import schedule_view

        return schedule_view(self)

    def __repr__(self) -> str:
        state = f", makespan {self.makespan}" if self.is_scheduled else ""
        return (
            f"<Schedule {self.name!r:.60}: {self.n_operations} operations "
            f"on {self.n_resources} resources{state}>"
        )


__all__ = [
    "COLUMNS", "MAX_KIND", "NO_DEADLINE", "STATUSES", "TIME_UNITS", "Adjacency", "Arcs", "Csr",
    "Goal", "IntArray", "Objective", "Problem", "Resource", "Schedule",
]  # fmt: skip
