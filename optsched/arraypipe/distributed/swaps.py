"""What the first rank announces to the others: the next segment, or the end of the run."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from optsched.arraypipe.plan.plan import ExecutionPlan, compile
from optsched.arraypipe.plan.segments import Change
from optsched.model import document

if TYPE_CHECKING:
    from collections.abc import Sequence


class Announcement(NamedTuple):
    """The next segment: none (the end of the run), or another plan and other seats.

    `ends` are the ends of all jobs as rank 0 knows them: a job that has ended by then takes no part
    in the next segment. With `halts` the run is over. `joined` are the jobs that `refill` has given
    so far: for each the job that had ended, and the iteration that it begins at. `sizes` are those
    of the messages of all jobs on the seats (`Capacity.rows`): ranks must not differ about them.
    """

    change: Change | None
    ends: list[int]
    halts: bool = False
    joined: Sequence[tuple[int, int]] = ()
    sizes: Sequence[Sequence[Sequence[int]]] = ((), ())

    def write(self, plans: Sequence[ExecutionPlan]) -> dict[str, Any]:
        """The same as values of JSON; `plans` are those that all ranks have run."""
        row = self._asdict()
        row["joined"] = [*self.joined]
        del row["change"]
        if self.change is not None:
            plan = self.change.plan
            row["seats"] = self.change.seats
            # the newest: older segments may have been forgotten, here or there
            same = (k for k, other in reversed([*enumerate(plans)]) if other is plan)
            row["plan"] = next(same, -1)
            if row["plan"] < 0:
                row["barrier"], row["together"] = plan.barrier, sorted(plan.together)
                row["schedule"] = document.write(plan.schedule).decode()
        return row

    @classmethod
    def read(cls, row: dict[str, Any], plans: Sequence[ExecutionPlan]) -> Announcement:
        """What `write` has made."""
        change = None
        if "plan" in row:
            plan = plans[row["plan"]] if row["plan"] >= 0 else _compiled(row)
            change = Change(plan, tuple(row["seats"]))
        joined = [(int(ended), int(at)) for ended, at in row["joined"]]
        return cls(change, row["ends"], row["halts"], joined, row["sizes"])


def _compiled(row: dict[str, Any]) -> ExecutionPlan:
    schedule = document.read(row["schedule"])
    return compile(schedule, barrier=row["barrier"], together=row["together"])
