"""The job shop: chains of operations on fixed machines, with optional releases and deadlines."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import pairwise
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypedDict

import numpy as np

from optsched.errors import InputError
from optsched.io.values import (
    format_value,
    frozen,
    int_array,
    json_value,
    label,
    labels,
    one_of,
    refuse_unknown,
)
from optsched.model.objectives import MAKESPAN, check_sums, goal_of, graph_goal
from optsched.model.schedule import (
    NO_DEADLINE,
    TIME_UNITS,
    Arcs,
    Csr,
    Goal,
    IntArray,
    Problem,
    Resource,
    Schedule,
)
from optsched.problems.jobshop.checks import (
    chains_of,
    check_total,
    deadlines,
    machine_names,
    releases,
)

if TYPE_CHECKING:
    import os
    from collections.abc import Iterable, Mapping, Sequence
    from typing import Unpack

    import numpy.typing as npt


class ShopFields(TypedDict, total=False):
    """What `JobShop` takes besides jobs and machines; explained there."""

    release: Sequence[int] | npt.NDArray[np.integer[Any]] | None
    deadline: Sequence[int | None] | npt.NDArray[np.integer[Any]] | None
    objective: str
    job_weight: Sequence[int] | npt.NDArray[np.integer[Any]] | None
    due: Sequence[int] | npt.NDArray[np.integer[Any]] | None
    names: Sequence[str] | None
    name: str
    time_unit: str
    metadata: Mapping[str, Any] | None


@dataclass(frozen=True, init=False, eq=False, repr=False)
class JobShop(Problem):
    """Job j is a chain of operations, each on one machine; minimise the latest end (J || Cmax).

    Machines may be visited several times or not at all. Operation ids are row-major: all of job
    0, then job 1. Times are integers >= 0 in `time_unit`; numbers are never rescaled.

    Parameters
    ----------
    jobs
        One list of pairs ``(machine, duration)`` a job; machines are numbered from 0.
    machines
        Their names, distinct; default ``m0, m1, ...`` up to the largest number used.
    release
        Earliest start of every job (default 0).
    deadline
        Latest end of every job; `None` for a job (or altogether) means none.
    objective
        ``"makespan"``, ``"total_weighted_completion"`` or ``"maximum_lateness"``.
    job_weight, due
        Weight (default 1) and due date (default 0) of every job, for these objectives.
    names
        Names of the jobs, distinct; default ``job0, job1, ...``.
    name, time_unit
        Labels; the unit is one of ``ns us ms s``, or none (``""``).
    metadata
        Facts about the instance that no solver reads, e.g. published bounds.

    Attributes
    ----------
    first : IntArray, shape (n_jobs + 1,)
        Job j owns the operations ``first[j] .. first[j + 1] - 1``.
    machine, duration : IntArray, shape (n_operations,)
        Machine number and processing time of every operation.
    release, deadline : IntArray, shape (n_jobs,)
        Windows of the jobs; `optsched.model.schedule.NO_DEADLINE` = none.
    job_weight, due : IntArray, shape (n_jobs,)
        Weights and due dates of the jobs.

    Raises
    ------
    InputError
        A job without operations, a value of a wrong type or out of range, or times that add up
        to more than 2^53; the message names the place, e.g. ``jobs[3][2]``.

    Examples
    --------
    >>> shop = optsched.JobShop([[(0, 3), (1, 2)], [(1, 4), (0, 1)]], name="toy")
    >>> shop.n_operations, shop.lower_bound(), optsched.solve(shop).objective
    (4, 6, 6)
    """

    machines: tuple[str, ...]
    first: IntArray
    machine: IntArray
    duration: IntArray
    release: IntArray
    deadline: IntArray
    objective: str
    job_weight: IntArray
    due: IntArray
    names: tuple[str, ...]
    name: str
    time_unit: str
    metadata: Mapping[str, Any]

    def __init__(
        self,
        jobs: Iterable[Iterable[Sequence[int]]],
        machines: Sequence[str] | None = None,
        **fields: Unpack[ShopFields],
    ) -> None:
        refuse_unknown(fields, ShopFields.__annotations__, "a JobShop")
        known = None if machines is None else machine_names(machines)
        first, machine, duration = chains_of(jobs, None if known is None else len(known))
        if known is None:
            known = tuple(f"m{k}" for k in range(max(machine) + 1))
        n = len(first) - 1
        given, unit = fields.get("metadata") or {}, fields.get("time_unit", "")
        facts = json_value("metadata", given)
        if not isinstance(facts, dict):
            raise InputError(f"metadata: expected a mapping, got {format_value(given)}")
        if unit:
            one_of("time_unit", unit, TIME_UNITS)
        objective = fields.get("objective", MAKESPAN)
        goal = goal_of(n, objective, fields.get("job_weight"), fields.get("due"))
        checked: dict[str, Any] = {
            "first": frozen(np.array(first, np.int64)),
            "machine": frozen(np.array(machine, np.int64)),
            "duration": frozen(np.array(duration, np.int64)),
            "release": frozen(releases(fields.get("release"), n)),
            "deadline": frozen(deadlines(fields.get("deadline"), n)),
            "objective": goal.objective,
            "job_weight": frozen(np.array(goal.job_weight or [1] * n, np.int64)),
            "due": frozen(np.array(goal.due or [0] * n, np.int64)),
            "machines": known,
            "names": labels("names", fields.get("names"), n, "job"),
            "name": label("name", fields.get("name", "")),
            "time_unit": unit,
            "metadata": MappingProxyType(facts),
        }
        check_sums(goal, n, check_total(checked["duration"], checked["release"]))
        self.__dict__.update(checked)

    @classmethod
    def from_matrices(
        cls, durations: npt.ArrayLike, machines: npt.ArrayLike, **fields: Unpack[ShopFields]
    ) -> JobShop:
        """Build a shop from two matrices: entry [j, i] is the i-th operation of job j.

        Both have shape (n_jobs, n_steps) and integer dtypes; machines are numbered from 0.
        """
        times, places = int_array("durations", durations, 2), int_array("machines", machines, 2)
        if times.shape != places.shape:
            raise InputError(f"machines: shape {places.shape}, but durations have {times.shape}")
        pairs = zip(places.tolist(), times.tolist(), strict=True)
        return cls([list(zip(row, p, strict=True)) for row, p in pairs], **fields)

    @classmethod
    def from_table(
        cls, table: Any, time_unit: str = "", *, tick: str = "", **fields: Any
    ) -> JobShop:
        """Build a shop from rows of a CSV file, a data frame, or mappings.

        Parameters
        ----------
        table
            As in `JobArray.from_table`, with columns ``job``, ``machine`` (name or number) and
            ``duration``; a row per operation, in the order of the rows or of a column ``step``.
            Optional columns ``release``, ``deadline``, ``due`` and ``job_weight`` repeat the value
            of the job.
        time_unit, tick
            As in `JobArray.from_table`; without a unit only integers are accepted.
        fields
            Those of `JobShop` that are not in the table.

        Examples
        --------
        >>> rows = [{"job": "a", "machine": "saw", "duration": 1.5}]
        >>> optsched.JobShop.from_table(rows, "ms").duration.tolist()
        [1500]
        """
        from optsched.formats.job_table import job_shop

        return job_shop(table, time_unit, tick, **fields)

    # sizes and views

    @property
    def n_jobs(self) -> int:
        """Number of jobs."""
        return len(self.first) - 1

    @property
    def job_names(self) -> tuple[str, ...]:
        """Names of the jobs; empty if they are ``job0``, ``job1``, ..."""
        return () if self.names == labels("names", None, self.n_jobs, "job") else self.names

    @property
    def n_machines(self) -> int:
        """Number of machines, unused ones included."""
        return len(self.machines)

    @property
    def n_operations(self) -> int:
        """Number of operations."""
        return len(self.duration)

    @cached_property
    def jobs(self) -> tuple[tuple[tuple[int, int], ...], ...]:
        """The chains as tuples of pairs ``(machine, duration)``."""
        pairs = list(zip(self.machine.tolist(), self.duration.tolist(), strict=True))
        ends = self.first.tolist()
        return tuple(tuple(pairs[a:b]) for a, b in pairwise(ends))

    @property
    def has_windows(self) -> bool:
        """Whether any job has a release above 0 or a deadline."""
        return bool(self.release.any() or (self.deadline != NO_DEADLINE).any())

    @cached_property
    def visits_every_machine_once(self) -> bool:
        """Whether the machines of every job are a permutation of all machines."""
        if (np.diff(self.first) != self.n_machines).any():
            return False
        rows = np.sort(self.machine.reshape(self.n_jobs, self.n_machines), axis=1)
        return bool((rows == np.arange(self.n_machines)).all())

    @cached_property
    def goal(self) -> Goal:
        """The objective with weights and due dates."""
        return goal_of(self.n_jobs, self.objective, self.job_weight, self.due)

    @property
    def objective_name(self) -> str:
        """What is minimised, as in `Objective.name`."""
        return self.objective

    def with_objective(self, objective: str) -> JobShop:
        """Return the same shop with another objective; weights and due dates stay."""
        build, chains = self.__reduce__()
        shop: JobShop = build(*chains, objective=objective)
        return shop

    @property
    def is_classic(self) -> bool:
        """Every job visits every machine exactly once, and there are no windows."""
        return self.visits_every_machine_once and not self.has_windows

    def reversed(self) -> JobShop:
        """Return the mirrored shop, every chain backwards; it has the same optimal makespan."""
        if self.objective != MAKESPAN:
            raise InputError("objective: only the makespan of a mirrored shop is the same")
        if self.has_windows:
            raise InputError(
                "a shop with releases or deadlines has no mirror image: "
                "a release would become a delivery time"
            )
        chains = [chain[::-1] for chain in self.jobs]
        return JobShop(
            chains, self.machines, names=self.names, name=self.name, time_unit=self.time_unit
        )

    # as a problem

    def graph(self) -> Schedule:
        """Return the disjunctive graph; operation ids row-major, `stage` = position in the job."""
        return self._graph

    @cached_property
    def _graph(self) -> Schedule:
        n, first = self.n_operations, self.first
        job = np.repeat(np.arange(self.n_jobs), np.diff(first))
        ids = np.arange(n)
        tail = np.delete(ids, first[1:] - 1)  # all but the last of every job
        zeros = np.zeros(len(tail), np.int64)
        release = np.zeros(n, np.int64)
        release[first[:-1]] = self.release
        deadline = np.full(n, NO_DEADLINE)
        deadline[first[1:] - 1] = self.deadline
        return Schedule(
            name=self.name,
            time_unit=self.time_unit,
            resources=tuple(Resource(machine) for machine in self.machines),
            duration=self.duration,
            op_resources=Csr(np.arange(n + 1), self.machine),
            arcs=Arcs(tail, tail + 1, zeros, zeros),
            job=job,
            stage=ids - first[job],
            release=release,
            deadline=deadline,
            goal=graph_goal(self.goal),
        )

    def infeasibility(self) -> str:
        """Return why no schedule can exist if a chain shows it, else ``""``."""
        chain = np.add.reduceat(self.duration, self.first[:-1])
        late = self.release + chain > self.deadline
        if late.any():
            j, unit = int(np.argmax(late)), f" {self.time_unit}" * bool(self.time_unit)
            since = f" from its release at {self.release[j]}{unit} on" if self.release[j] else ""
            return (
                f"job {j} needs {chain[j]}{unit} for its chain{since}, "
                f"but its deadline is {self.deadline[j]}{unit}"
            )
        return super().infeasibility()

    @cached_property
    def sha256(self) -> str:
        """Hash of the canonical standard text, followed by the windows if there are any."""
        from optsched.problems.jobshop.document import standard_text

        text = standard_text(self)
        if self.has_windows:
            ends = ("-" if d == NO_DEADLINE else str(d) for d in self.deadline.tolist())
            text += f"release {' '.join(map(str, self.release.tolist()))}\n"
            text += f"deadline {' '.join(ends)}\n"
        if self.goal != Goal():
            text += f"{tuple(self.goal)}\n"
        return hashlib.sha256(text.encode()).hexdigest()

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, JobShop):
            return NotImplemented
        labels = ("sha256", "machines", "names", "time_unit", "name")  # most are not in the hash
        return all(getattr(self, key) == getattr(other, key) for key in labels)

    __hash__ = Problem.__hash__

    def __reduce__(self) -> tuple[Any, ...]:
        # by way of the constructor: unpickled arrays would be writeable
        fields = {key: getattr(self, key) for key in ShopFields.__annotations__}
        fields["metadata"] = dict(self.metadata)
        return partial(JobShop, **fields), (self.jobs, self.machines)

    def __repr__(self) -> str:
        return (
            f"<JobShop {self.name!r}: {self.n_jobs} jobs, {self.n_machines} machines, "
            f"{self.n_operations} operations>"
        )

    # files

    @classmethod
    def read(
        cls, path: str | os.PathLike[str], format: str = "auto", reentrant: bool = False
    ) -> JobShop:
        """Read a job shop; see `optsched.formats.read_problem` for the arguments."""
        from optsched.formats.read_problem import read_job_shop

        return read_job_shop(path, format, reentrant)

    def write(self, path: str | os.PathLike[str], format: str = "json") -> None:
        """Write a file, all of it or nothing; text formats hold no windows, weights or names.

        Parameters
        ----------
        format
            ``"json"`` (``optsched.jobshop/1``), ``"standard"`` (JSPLIB text), ``"taillard"``, or
            the name of another one of `optsched.formats.registry` that can be written.
        """
        from optsched.formats.registry import writable, written
        from optsched.io.files import write_atomic
        from optsched.problems.jobshop.document import to_json

        one_of("format", format, ["json", *writable()])
        write_atomic(path, to_json(self) if format == "json" else written(self, format))
