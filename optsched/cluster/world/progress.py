"""Whether a policy gets anywhere, or starts and stops jobs for ever before they do any work."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from optsched.cluster.world.errors import Stalled
from optsched.cluster.world.layout import RUNS
from optsched.io.values import format_value

if TYPE_CHECKING:
    from optsched.cluster.world.layout import World

MOST_VAIN: Final = 100_000
"""Decisions in a row that may start jobs of which none works, and from check to check."""
MOST_LOST: Final = 10
"""So many times as long all work may be lost again (``checkpoint="pass"``)."""


class Progress:
    """What had happened at the last check; between two checks nothing is counted."""

    def __init__(self) -> None:
        self.every = MOST_VAIN
        self.time = self.since = -1
        self.rows = self.started = self.lost = 0
        self.events: tuple[int, ...] = ()

    def check(self, w: World, decisions: int, policy: str) -> None:
        """Raise `Stalled` if all that was started since the last look was stopped before it worked.

        A stay that began before the last look is progress: it works, or pays a restart cost that
        ends one day. So is a sleep in which nothing is started: it ends, or `advance` says so.
        """
        if decisions % self.every:
            return
        s = w.state
        events = (int(s["arrivals"][0]), int(s["changes"][0]), int(s["unfinished"][0]))
        rows = int(s["log_rows"][0])
        if events != self.events or rows == self.rows or self._lasts(w):
            self.since, self.started, self.lost = int(s["time"][0]), rows, 0
        else:
            self.lost += 1
            worked = self._worked(w)
            if not worked or self.lost >= MOST_LOST:
                first, before = (self.since, self.started) if worked else (self.time, self.rows)
                without = "a pass, whose work is lost" if worked else "their restart cost"
                raise Stalled(
                    f"policy {format_value(policy)} makes no progress: from time {first} to "
                    f"{s['time'][0]} it "
                    f"started jobs {rows - before} times and stopped them all before the end of "
                    f"{without}; nothing arrived, ended or changed ({s['active'][0]} jobs are "
                    "active)"
                )
        self.time, self.rows, self.events = int(s["time"][0]), rows, events

    def _lasts(self, w: World) -> bool:
        """Whether any work was done since then that was not lost, or an older stay goes on."""
        log = w.log[: w.state["log_rows"][0]]
        job = w.job[w.active[: w.state["active"][0]]]
        older = (job["phase"] == RUNS) & (job["stay"] <= self.time)
        kept = (log["end"] > self.time) & (log["work"] > 0)
        return bool(older.any() or kept.any())

    def _worked(self, w: World) -> bool:
        """Whether any work was done since then, lost or not."""
        log = w.log[: w.state["log_rows"][0]]
        ended = (log["end"] > self.time) & (log["end"] - log["start"] > log["restart"])
        job = w.job[w.active[: w.state["active"][0]]]
        works = (job["phase"] == RUNS) & (job["since"] < w.state["time"][0])
        return bool(ended.any() or works.any())
