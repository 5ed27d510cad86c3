"""The one in-memory type: a disjunctive graph, and with orders and starts a schedule."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING, Any, ClassVar, Final, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from optsched.errors import InputError
from optsched.io.strict_json import MAX_INTEGER

if TYPE_CHECKING:
    import os
    from collections.abc import Iterable, Mapping, Sequence

    import networkx

IntArray: TypeAlias = npt.NDArray[np.int64]

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
"""Arrays of a `Schedule` with one value per operation, but for its starts."""


_WHOLE: Final = ("resources", "time_unit", "period", "op_resources")


class Resource(NamedTuple):
    """A unary machine; ``memory`` in bytes, 0 means unlimited."""

    name: str
    memory: int = 0


class Objective(NamedTuple):
    """What a schedule claims to be worth, and the bound and status its solver proved."""

    name: str
    value: int | None = None
    lower_bound: int | None = None
    status: str = "unknown"


class Arcs(NamedTuple):
    """Conjunctive arcs: ``start[head] >= start[tail] + duration[tail] + lag - tokens * period``."""

    tail: IntArray
    head: IntArray
    lag: IntArray
    distance: IntArray

    @classmethod
    def of(cls, rows: Iterable[Sequence[int]]) -> Arcs:
        """Arcs from rows ``(tail, head[, lag[, distance]])``."""
        try:
            given = list(rows)
            full = [(*row, *(0,) * (4 - len(row))) for row in given]
        except TypeError:
            raise InputError("arcs: expected rows (tail, head[, lag[, distance]])") from None
        for a, row in enumerate(given):
            if not 2 <= len(row) <= 4:
                raise InputError(f"arcs[{a}]: expected 2 to 4 integers, got {len(row)}")
        try:
            table = np.array(full) if full else np.zeros((0, 4), np.int64)
        except ValueError:
            raise InputError("arcs: expected integers") from None
        if table.shape != (len(full), 4):
            raise InputError("arcs: expected rows (tail, head[, lag[, distance]])")
        return cls(*(_frozen("arcs", table[:, c]) for c in range(4)))


class Csr:
    """Ragged integer rows in compressed form (CSR): row r is ``ids[indptr[r]:indptr[r+1]]``.

    Used for the resources of every operation and for the order of operations on every resource.
    """

    __slots__ = ("ids", "indptr")

    def __init__(self, indptr: npt.ArrayLike, ids: npt.ArrayLike) -> None:
        self.indptr = _frozen("indptr", indptr)
        self.ids = _frozen("ids", ids)
        steps = np.diff(self.indptr)
        if len(self.indptr) == 0 or self.indptr[0] != 0 or (steps < 0).any():
            raise InputError("indptr: expected an ascending array that starts with 0")
        if self.indptr[-1] != len(self.ids):
            raise InputError(
                f"indptr: ends with {self.indptr[-1]}, but there are {len(self.ids)} ids"
            )

    @classmethod
    def of(cls, rows: Iterable[Iterable[int]]) -> Csr:
        """Compress a list of rows."""
        try:
            lists = [[_plain_int(i) for i in row] for row in rows]
        except TypeError:
            raise InputError("rows: expected a list of lists of integers") from None
        indptr = np.zeros(len(lists) + 1, np.int64)
        np.cumsum([len(row) for row in lists], out=indptr[1:])
        return cls(indptr, [i for row in lists for i in row])

    def __len__(self) -> int:
        return len(self.indptr) - 1

    def __getitem__(self, row: int) -> IntArray:
        if not 0 <= row < len(self):
            raise IndexError(row)
        return self.ids[self.indptr[row] : self.indptr[row + 1]]

    def part(self, keep: npt.NDArray[np.bool_]) -> Csr:
        """Those entries of all rows that are kept; `keep` has one flag for each."""
        return Csr(np.concatenate([[0], np.cumsum(keep)])[self.indptr], self.ids[keep])

    def to_lists(self) -> list[list[int]]:
        """The rows as lists of Python integers."""
        ids, bounds = self.ids.tolist(), self.indptr.tolist()
        return [ids[a:b] for a, b in pairwise(bounds)]

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Csr):
            return NotImplemented
        return np.array_equal(self.indptr, other.indptr) and np.array_equal(self.ids, other.ids)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"Csr({self.to_lists()!r})" if len(self.ids) <= 64 else f"<Rows of {len(self)}>"


class Adjacency(NamedTuple):
    """Arcs grouped by one end (CSR): the other end, start-to-start ``duration[tail] + lag``."""

    indptr: IntArray
    other: IntArray
    weight: IntArray


class Problem(ABC):
    """An immutable, hashable instance that can be turned into a disjunctive graph.

    Subclasses set `name` and `problem_kind`, implement `graph` and `sha256`; the rest follows.
    """

    name: str
    problem_kind: ClassVar[str] = "jobshop"
    """Which solvers take it: ``"jobshop"`` (any graph), ``"jobarray"``, ``"periodic"``,
    ``"quota"`` or ``"gpus"`` (see `optsched.solvers`)."""

    @property
    def objective_name(self) -> str:
        """What is minimised, as in `Objective.name`."""
        return "makespan"

    @property
    @abstractmethod
    def sha256(self) -> str:
        """Hash of the instance, 64 hexadecimal digits, the same in every process."""

    @abstractmethod
    def graph(self) -> Schedule:
        """The disjunctive graph: a `Schedule` without sequences and starts."""

    @property
    def job_names(self) -> Sequence[str]:
        """Names of jobs 0, 1, ...; empty if they have none but their numbers."""
        return ()

    @property
    def n_operations(self) -> int:
        """Operations of its schedules."""
        return self.graph().n_operations

    def lower_bound(self) -> int:
        """A lower bound of the objective (`optsched.model.bounds.makespan_bound` of the graph)."""
        from optsched.model import bounds

        return bounds.makespan_bound(self.graph())

    def scheduled(self, answer: Any) -> Schedule:
        """The schedule that a solver's answer stands for.

        Parameters
        ----------
        answer
            The order of operations on every resource; a kind of problems whose solutions are no
            orders has a class of its own for them.

        Raises
        ------
        InputError
            The answer is none to this problem.
        """
        from optsched.model.graph import scheduled

        return scheduled(self.graph(), answer)

    def answer(self, schedule: Schedule) -> Any:
        """The inverse of `scheduled`, for a start to begin with.

        Raises
        ------
        InputError
            The schedule belongs to another instance, has no orders, or is not feasible.
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
        """What is wrong with a schedule that only the problem knows, a sentence each.

        Raises
        ------
        InputError
            The schedule is not of this problem.
        """
        self.check_same_graph(schedule)
        return []

    def check_same_graph(self, schedule: Schedule) -> None:
        """Refuse a schedule of another instance with an `InputError`."""
        if not self.graph().same_graph(schedule):
            raise self.other_instance(schedule)

    def other_instance(self, schedule: Schedule, graph: Schedule | None = None) -> InputError:
        """What is said of a schedule of another instance, whose graph differs from this one's."""
        from optsched.model.difference import difference

        theirs = str(schedule.provenance.get("instance_sha256", schedule.graph().sha256))[:12]
        found = difference(schedule, self.graph() if graph is None else graph)
        what = f": {found}" if found else ""
        if theirs == self.sha256[:12]:
            return InputError(f"names this instance ({theirs}), but its graph is another{what}")
        return InputError(f"belongs to another instance ({theirs}, not {self.sha256[:12]}){what}")

    def infeasibility(self) -> str:
        """Why no schedule can exist, in one sentence, if that is easy to see; else ``""``."""
        from optsched.model import bounds

        return bounds.infeasibility(self.graph())

    def evaluate(self, schedule: Schedule) -> int:
        """Makespan of a schedule of this very instance.

        Parameters
        ----------
        schedule
            A schedule with start times; whether it is feasible is `optsched.verify`'s question.

        Raises
        ------
        InputError
            The schedule belongs to another instance, or has no starts.
        """
        self.check_same_graph(schedule)
        return schedule.makespan

    def describe(self, objective: int) -> str:
        """An objective as people read it, with its unit."""
        return f"{objective} {self.graph().time_unit}".rstrip()

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Problem):
            return NotImplemented
        return type(self) is type(other) and self.sha256 == other.sha256

    def __hash__(self) -> int:
        return int(self.sha256[:15], 16)


@dataclass(frozen=True, eq=False, kw_only=True)
class Schedule(Problem):
    """A disjunctive graph and, once solved, the order on every resource and the start times.

    Arrays have one value per operation unless said otherwise; times are integers in `time_unit`,
    memory is in bytes. Arrays are read-only: a graph is a value. Without `sequences` and `start`
    it is an instance, and itself a problem that `optsched.solve` accepts.

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
        Labels: whose operation it is, what it does (``"F"``, ``"B"``, ...), on which stage.
    family, setup_in, setup_out
        Setup between immediate neighbours i, j of one resource: 0 if the families are equal,
        else ``setup_out[i] + setup_in[j]``.
    release, deadline
        Time window of an operation (`NO_DEADLINE` = none).
    acquire, free, workspace
        Bytes kept from the start on, given back at the end, needed while running.
    offset, period
        Periodic schedules: instance c of i starts at ``start[i] + (c + offset[i]) * period``.
    sequences, start
        The order of operations on every resource, and start times; both or neither.
    objective, provenance
        Claimed value and bound; how the schedule came about.

    Raises
    ------
    InputError
        A field has a wrong type, shape or range; the message names it. `CyclicOrder` for arcs
        that form a cycle.
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
        """The name of a job, or its number."""
        return (self.job_names[job] if self.job_names else "") or str(job)

    @property
    def n_resources(self) -> int:
        """Number of resources."""
        return len(self.resources)

    @property
    def is_scheduled(self) -> bool:
        """Whether orders and start times are there."""
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
        return _frozen("memory", [resource.memory for resource in self.resources])

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
        order = np.argsort(near, kind="stable")
        indptr = np.zeros(self.n_operations + 1, np.int64)
        np.cumsum(np.bincount(near, minlength=self.n_operations), out=indptr[1:])
        weight = self.duration[self.arcs.tail] + self.arcs.lag
        return Adjacency(indptr, far[order], weight[order])

    @cached_property
    def users(self) -> Csr:
        """Operations that need each resource, ascending."""
        counts = np.diff(self.op_resources.indptr)
        operation = np.repeat(np.arange(self.n_operations), counts)
        order = np.argsort(self.op_resources.ids, kind="stable")
        indptr = np.zeros(self.n_resources + 1, np.int64)
        np.cumsum(np.bincount(self.op_resources.ids, minlength=self.n_resources), out=indptr[1:])
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
        """Setup time if j immediately follows i on a resource."""
        if self.family[i] == self.family[j]:
            return 0
        return int(self.setup_out[i] + self.setup_in[j])

    # making others of it

    def with_orders(
        self,
        sequences: Csr,
        start: npt.ArrayLike,
        objective: Objective | None = None,
        provenance: Mapping[str, Any] | None = None,
    ) -> Schedule:
        """The same graph with these orders and start times (nothing is repaired or checked)."""
        from optsched.model.checks import solution

        kept = self.provenance if provenance is None else provenance
        return self._sharing(solution(self, sequences, np.asarray(start), objective, kept))

    def with_cycle(
        self,
        period: int,
        offset: npt.ArrayLike,
        sequences: Csr,
        start: npt.ArrayLike,
        objective: Objective | None = None,
        provenance: Mapping[str, Any] | None = None,
    ) -> Schedule:
        """The same arcs and operations repeated with this period and these offsets and orders.

        Nothing is repaired, and only types and ranges are checked. Raises `InputError` like the
        constructor.
        """
        from optsched.model.checks import cycle, solution

        bare = self._sharing(cycle(self, period, offset))
        kept = self.provenance if provenance is None else provenance
        return bare._sharing(solution(bare, sequences, np.asarray(start), objective, kept))

    def _sharing(self, changes: dict[str, Any]) -> Schedule:
        """A copy with other orders and claims; the graph, checked once, is shared."""
        copy = object.__new__(Schedule)
        copy.__dict__.update(self.__dict__)
        copy.__dict__.update(changes)
        return copy

    def same_graph(self, other: Schedule) -> bool:
        """Whether both describe the same instance: all but names, orders, starts and claims."""
        pairs = [(getattr(self, key), getattr(other, key)) for key in (*_WHOLE, *COLUMNS, "arcs")]
        if all(a is b for a, b in pairs):  # mostly so
            return True
        whole, columns = pairs[: len(_WHOLE)], pairs[len(_WHOLE) : -1]
        arrays = [*columns, *zip(self.arcs, other.arcs, strict=True)]
        return all(a == b for a, b in whole) and all(np.array_equal(a, b) for a, b in arrays)

    def same_cycle(self, other: Schedule) -> bool:
        """Whether both repeat the same instance, whatever their periods and offsets are."""
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

    def subset(self, keep: npt.NDArray[np.bool_]) -> Schedule:
        """Some operations only, numbered anew in their order; `keep` has one entry for each.

        Arcs between them, orders, starts, offsets and period stay as they are; so do the resources,
        used or not. The objective goes.
        """
        number = np.where(keep, np.cumsum(keep) - 1, -1)
        tail, head, lag, distance = self.arcs
        inner = keep[tail] & keep[head]
        of = np.repeat(np.arange(len(keep)), np.diff(self.op_resources.indptr))
        own = self.op_resources.part(keep[of])
        rows = self.sequences
        rows = None if rows is None else rows.part(keep[rows.ids])
        return replace(
            self,
            op_resources=Csr(np.append(own.indptr[:-1][keep], own.indptr[-1]), own.ids),
            arcs=Arcs(number[tail[inner]], number[head[inner]], lag[inner], distance[inner]),
            sequences=None if rows is None else Csr(rows.indptr, number[rows.ids]),
            start=None if self.start is None else self.start[keep],
            objective=None,
            **{key: getattr(self, key)[keep] for key in COLUMNS},
        )

    def graph(self) -> Schedule:
        """The instance without orders and starts."""
        return self._sharing(
            {"sequences": None, "start": None, "objective": None, "provenance": {}}
        )

    def unroll(self, cycles: int) -> Schedule:
        """The first cycles of a periodic schedule as a one-shot one."""
        from optsched.analysis.unroll import unroll

        return unroll(self, cycles)

    def to_networkx(self) -> networkx.DiGraph[int]:
        """Operations as nodes, arcs and machine arcs as edges."""
        from optsched.model.graph import to_networkx

        return to_networkx(self)

    @cached_property
    def sha256(self) -> str:
        """Hash of the instance document."""
        import hashlib

        from optsched.model.document import write

        return hashlib.sha256(write(self.graph())).hexdigest()

    # files

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> Schedule:
        """Read a ``*.schedule.json`` document strictly."""
        from optsched.io.files import read_text
        from optsched.model.document import read

        return read(read_text(path), str(path))

    def write(self, path: str | os.PathLike[str]) -> None:
        """Write a ``*.schedule.json`` document (whole file or nothing)."""
        from optsched.io.files import write_atomic
        from optsched.model.document import write

        write_atomic(path, write(self))

    save = write

    def __repr__(self) -> str:
        state = f", makespan {self.makespan}" if self.is_scheduled else ""
        return (
            f"<Schedule {self.name!r}: {self.n_operations} operations "
            f"on {self.n_resources} resources{state}>"
        )


def _plain_int(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
        raise InputError(f"expected an integer, got {value!r:.60}")
    return int(value)


def _frozen(name: str, values: npt.ArrayLike) -> IntArray:
    """A read-only int64 array; integers only, `InputError` naming the field otherwise."""
    try:
        array = np.asarray(values)
    except (ValueError, OverflowError):
        raise InputError(f"{name}: expected a flat list of integers") from None
    if array.size == 0 and array.dtype.kind == "f":
        array = array.astype(np.int64)
    if array.dtype.kind == "u" and array.size and int(array.max()) > MAX_INTEGER:
        raise InputError(f"{name}: expected integers <= 2^53, got {array.max()}")
    if array.dtype.kind not in "iu":
        raise InputError(f"{name}: expected integers, got {array.dtype} values")
    if array.ndim != 1:
        raise InputError(f"{name}: expected a flat array, got shape {array.shape}")
    if not (array.dtype == np.int64 and array.flags.c_contiguous and not array.flags.writeable):
        array = np.array(array, dtype=np.int64, order="C")
        array.flags.writeable = False
    return array
