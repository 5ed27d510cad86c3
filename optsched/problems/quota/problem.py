"""Quota plans: how many GPUs every job gets now, and on which nodes."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar, Final, Literal

import numpy as np

from optsched.errors import InputError
from optsched.io.files import write_atomic
from optsched.io.values import integer, label
from optsched.model.schedule import TIME_UNITS, Problem
from optsched.problems.quota import bounds as quick
from optsched.problems.quota.answer import chosen, faults, snapshot, tidiness, with_sequences
from optsched.problems.quota.checks import check_jobs, infeasibility
from optsched.problems.quota.data import (
    LARGEST,
    Node,
    PlanData,
    Quotas,
    linear_levels,
    spans_of,
)
from optsched.problems.quota.job import QuotaJob

if TYPE_CHECKING:
    import os
    from collections.abc import Sequence

    from optsched.model.schedule import Schedule

OBJECTIVES: Final = ("sum", "max_min", "proportional", "makespan")

MOST_GPUS: Final = 10**6
"""Of a plan: each has a name, and a place in the schedule."""

_NAMES: Final = {
    "sum": "utility", "max_min": "level", "proportional": "deviation", "makespan": "longest job",
}  # fmt: skip


class QuotaPlan(PlanData, Problem):
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
        check_jobs(self)
        self.__dict__["spans"] = [spans_of(job, kinds, budgets) for job in self.jobs]
        if self.bounds is None or not self._is_plain:
            self.table  # noqa: B018 (overflow is an error now, not later)
        else:
            self._check_plain()

    # what solvers read

    @property
    def objective_name(self) -> str:
        """``"utility"``, ``"level"``, ``"deviation"`` or ``"longest job"``; minimised."""
        return _NAMES[self.objective]

    @property
    def n_operations(self) -> int:
        """Jobs."""
        return len(self.jobs)

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

    def evaluate(self, schedule: Schedule) -> int:
        """Objective of a schedule of `scheduled`, in its minimised sign."""
        return self.worth(*self.sizes(chosen(self, schedule)))

    def value(self, schedule: Schedule) -> int:
        """Objective in its natural sign, in parts of the resolution (makespan: time units)."""
        worth = self.evaluate(schedule)
        return -worth if self.objective in ("sum", "max_min") else worth

    def quota(self, schedule: Schedule) -> dict[str, int]:
        """GPUs of every job by name, 0 for those that do not run."""
        counts = chosen(self, schedule).gpus.tolist()
        return {job.name: count for job, count in zip(self.jobs, counts, strict=True)}

    def placement(self, schedule: Schedule) -> dict[str, dict[str, int]]:
        """Node (or type, without nodes) to GPUs there, of every job that runs."""
        names = [node.name for node in self.nodes] or list(self.kinds)
        found = chosen(self, schedule)
        where: dict[str, dict[str, int]] = {}
        for j, n, c in zip(found.rows.tolist(), found.node.tolist(), found.count.tolist(),
                           strict=True):  # fmt: skip
            where.setdefault(self.jobs[j].name, {})[names[n]] = c
        return where

    def tidiness(self, schedule: Schedule) -> tuple[int, int, int]:
        """Nodes spanned by all jobs, GPUs moved, free GPUs on partly used nodes, for ties."""
        return tidiness(self, chosen(self, schedule))

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
        return 0 if self.infeasibility() else quick.lower_bound(self)

    def infeasibility(self) -> str:
        """Why no answer exists, naming the jobs, if counting GPUs shows it; else ``""``."""
        return infeasibility(self)

    # schedules

    def graph(self) -> Schedule:
        """The jobs' current runs, one operation each on the lowest GPUs of their nodes."""
        return self._graph

    @cached_property
    def _graph(self) -> Schedule:
        return snapshot(self, self.held, "running")

    def scheduled(self, answer: Quotas) -> Schedule:
        """One operation ``epoch`` per job that runs, on its GPUs, for one pass.

        GPUs are numbered node by node; every job keeps the lowest of those it holds.

        Raises
        ------
        InputError
            More GPUs than a node has, a number of them that is not allowed, two types, a locality
            broken.
        """
        if wrong := self.faults(answer):
            raise InputError(wrong[0])
        return with_sequences(snapshot(self, answer, "epoch"))

    def answer(self, schedule: Schedule) -> Quotas:
        """The inverse of `scheduled`, for a start to begin with.

        Raises
        ------
        InputError
            The schedule is not of this plan, or breaks a rule.
        """
        found = chosen(self, schedule)
        if wrong := self.faults(found):
            raise InputError(wrong[0])
        return found

    def check(self, schedule: Schedule) -> list[str]:
        """What the verifier cannot know, a sentence each: sizes, types, localities, must_run."""
        return self.faults(chosen(self, schedule))

    def faults(self, answer: Quotas) -> list[str]:
        """What is wrong with an answer, a sentence each; see `check`."""
        return faults(self, answer)

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


__all__ = ["OBJECTIVES", "Node", "QuotaJob", "QuotaPlan", "Quotas"]
