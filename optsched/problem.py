"""What every problem class shares: name, hash, graph, bound, and how to judge a schedule."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

from optsched.errors import InputError

if TYPE_CHECKING:
    from optsched.schedule import Schedule


class Problem(ABC):
    """An immutable, hashable instance that can be turned into a disjunctive graph.

    Subclasses set `name` and implement `graph` and `sha256`; the rest follows from the graph.
    """

    name: str

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

    def lower_bound(self) -> int:
        """A lower bound of the objective (`optsched.bounds.makespan_bound` of the graph)."""
        from optsched import bounds

        return bounds.makespan_bound(self.graph())

    def infeasibility(self) -> str:
        """Why no schedule can exist, in one sentence, if that is easy to see; else ``""``."""
        from optsched import bounds

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

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Problem):
            return NotImplemented
        return type(self) is type(other) and self.sha256 == other.sha256

    def __hash__(self) -> int:
        return int(self.sha256[:15], 16)
