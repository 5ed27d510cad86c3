"""What every problem class shares: name, hash, graph, bound, and how to judge a schedule."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

from optsched.errors import InputError

if TYPE_CHECKING:
    from optsched.model.schedule import Schedule


class Problem(ABC):
    """An immutable, hashable instance that can be turned into a disjunctive graph.

    Subclasses set `name` and implement `graph` and `sha256`; the rest follows from the graph.
    """

    name: str

    @property
    def answers(self) -> str:
        """What a solver finds.

        ``"orders"`` of resources; ``"periodic orders"``, with the offset of every operation as a
        last row; either ``"... with recomputation"``, with the jobs that recompute as a last row
        (`optsched.problems.jobarray.choice`); which ``"resources"``; or ``"quotas"``.
        """
        return "orders"

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
            The order of operations on every resource; a class of problems whose solutions are no
            orders says itself what its rows mean.

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

        self.check_own(schedule)
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
        self.check_own(schedule)
        return []

    def check_own(self, schedule: Schedule) -> None:
        """Refuse a schedule of another instance with an `InputError`."""
        if not self.graph().same_graph(schedule):
            raise self.foreign(schedule)

    def foreign(self, schedule: Schedule, graph: Schedule | None = None) -> InputError:
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
            The schedule belongs to another graph (both hashes are named), or has no starts.
        """
        graph = self.graph()
        if not graph.same_graph(schedule):
            raise InputError(
                f"the schedule belongs to another instance: its graph has sha-256 "
                f"{schedule.sha256[:12]}, expected {graph.sha256[:12]} ({self.name or 'unnamed'})"
            )
        return schedule.makespan

    def describe(self, objective: int) -> str:
        """An objective as people read it, with its unit."""
        return f"{objective} {self.graph().time_unit}"

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Problem):
            return NotImplemented
        return type(self) is type(other) and self.sha256 == other.sha256

    def __hash__(self) -> int:
        return int(self.sha256[:15], 16)
