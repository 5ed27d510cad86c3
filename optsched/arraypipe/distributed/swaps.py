"""How all ranks change to the same next segment, although none waits for another."""

from __future__ import annotations

import json
import time
from contextlib import suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NamedTuple

from torch.distributed import PrefixStore, distributed_c10d  # type: ignore[attr-defined]

from optsched.arraypipe.distributed.transport import PeerLost, Stalled
from optsched.arraypipe.plan.plan import ExecutionPlan, compile
from optsched.arraypipe.plan.segments import Change, places
from optsched.errors import InputError
from optsched.model import document

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from optsched.arraypipe.distributed.transport import GlooLinks
    from optsched.arraypipe.runtime.state import JobRun


_PATIENCE = 3.0  # seconds for which a diagnosis waits for the words of other ranks
_LONGEST = 0.05  # seconds between two looks at the store
_BEATS = 4  # signs of life within the timeout


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


class Notices:
    """What ranks tell each other outside of the channels, through the store of the process group.

    Collective: all ranks make theirs at the same point.
    """

    def __init__(self, links: GlooLinks) -> None:
        store = distributed_c10d._get_default_store()
        # named after the group of this run: words of an earlier one are not read
        self._store: Any = PrefixStore(f"optsched/{links.group.group_name}", store)
        self._own: dict[int, Announcement] = {}
        self._rank, self._ranks = links.rank, links.size
        self._timeout = links.timeout.total_seconds()
        self._every, self._due = int(1e9 * self._timeout / _BEATS), 0  # nanoseconds

    def put(self, number: int, news: Announcement, plans: Sequence[ExecutionPlan]) -> None:
        """Write down what the segment with this number will be; `plans` are those of the others."""
        row: dict[str, Any] = {"ends": news.ends, "halts": news.halts, "joined": [*news.joined]}
        row["sizes"] = news.sizes
        if news.change is not None:
            plan = news.change.plan
            row["seats"] = news.change.seats
            # the newest: older segments may have been forgotten, here or there
            same = (k for k, other in reversed([*enumerate(plans)]) if other is plan)
            row["plan"] = next(same, -1)
            if row["plan"] < 0:
                row["barrier"], row["together"] = plan.barrier, sorted(plan.together)
                row["schedule"] = document.write(plan.schedule).decode()
        self._own[number] = news
        self._store.set(f"segment/{number}", json.dumps(row))

    def get(self, number: int, plans: Sequence[ExecutionPlan]) -> Announcement:
        """Read it, when rank 0 has written it."""
        if number in self._own:
            return self._own.pop(number)
        row = json.loads(self._await(f"segment/{number}"))
        change = None
        if "plan" in row:
            plan = plans[row["plan"]] if row["plan"] >= 0 else _compiled(row)
            change = Change(plan, tuple(row["seats"]))
        joined = [(int(ended), int(at)) for ended, at in row["joined"]]
        return Announcement(change, row["ends"], row["halts"], joined, row["sizes"])

    def beat(self, now: int) -> None:
        """Show now and then that this device gets on, to ranks that wait in `get`; nanoseconds."""
        if now >= self._due:
            self._due = now + self._every
            with suppress(RuntimeError):  # whoever misses the store will say so
                self._store.add("beats", 1)

    def assemble(self) -> None:
        """Wait until all ranks have done all their blocks."""
        with suppress(RuntimeError):
            self._store.set(f"done/{self._rank}", "")
        for rank in range(self._ranks):
            self._await(f"done/{rank}")

    def tell(self, word: str) -> None:
        """Say what this device is waiting for, or why it ends."""
        with suppress(RuntimeError):  # the store may have died with rank 0
            self._store.set(f"word/{self._rank}", word)
            self._store.set("over", "")

    def diagnosis(self, whereabouts: str, reason: str) -> str:
        """What every device is waiting for, as far as it says so soon."""
        lines = [reason]
        until = time.monotonic() + _PATIENCE
        self.tell(whereabouts)
        for rank in range(self._ranks):
            try:
                left = max(0.01, until - time.monotonic())
                self._store.wait([f"word/{rank}"], timedelta(seconds=left))
                word = bytes(self._store.get(f"word/{rank}")).decode()
            except RuntimeError:
                word = "no word from it"
            lines.append(f"device {rank}: {word}")
        return "\n".join(lines)

    def why(self, sentence: str) -> str:
        """Why another rank has ended, if it says so soon; else the sentence."""
        others = [rank for rank in range(self._ranks) if rank != self._rank]
        until = time.monotonic() + _PATIENCE
        with suppress(RuntimeError):
            while time.monotonic() < until:
                for rank in others:
                    if self._store.check([f"word/{rank}"]):
                        word = bytes(self._store.get(f"word/{rank}")).decode()
                        return f"rank {rank}: {word}"
                time.sleep(_LONGEST)
        return sentence

    def _await(self, key: str) -> str:
        """Wait for a word for as long as any rank gets on: who waits here has nothing else to do.

        A rank may be without work for hours, while jobs on other devices go on.
        """
        pause, until, seen = 0.001, 0.0, -1
        try:
            while not self._store.check([key]):
                if self._store.check(["over"]):
                    raise PeerLost("another rank has ended")
                if (now := time.monotonic()) > until:
                    beats = self._store.add("beats", 0)
                    if beats == seen:
                        raise Stalled(f"no rank has done a block for {self._timeout:.3g} s")
                    seen, until = beats, now + self._timeout
                time.sleep(pause)
                pause = min(2 * pause, _LONGEST)
            return bytes(self._store.get(key)).decode()
        except RuntimeError as error:
            raise PeerLost("the store is lost, the process that has it has ended") from error


def _compiled(row: dict[str, Any]) -> ExecutionPlan:
    schedule = document.read(row["schedule"])
    return compile(schedule, barrier=row["barrier"], together=row["together"])


def stay_in_place(
    change: Change, homes: Mapping[int, tuple[int, ...]], runs: Sequence[JobRun], ranks: int
) -> None:
    """A running job stays where its state is: refuse a plan that has its stages elsewhere."""
    if len(change.plan.devices) != ranks:
        raise InputError(
            f"the new plan has {len(change.plan.devices)} devices, there are {ranks} processes"
        )
    for seat, job in enumerate(change.seats):
        wanted = places(change.plan, seat)
        if job in homes and homes[job] != wanted and runs[job].end > runs[job].begin:
            raise InputError(
                f"the new plan has the stages of job {runs[job].title} on devices {wanted}; they "
                f"are on {homes[job]} and cannot move while it is trained"
            )
