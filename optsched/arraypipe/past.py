"""What a process remembers of the blocks it has run: all of a short run, the end of a long one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from optsched.arraypipe.course import Record

if TYPE_CHECKING:
    from collections.abc import Sequence

MOST: Final = 200_000
"""Blocks that a process remembers at most, unless half a cycle has more.

With their messages they take some 100 MB; thousands of cycles are enough for medians and slopes.
"""

Moment = tuple[int, int]
"""Segment and cycle."""

Row = tuple[int, int, int, int, int, int]
"""A block as in `Record`; plain, because there are many."""


class Past:
    """Blocks from a cycle on, in the order in which they were run here.

    When there are too many, the older half is left out, whole cycles of all devices, so that a
    block costs the same however long the run is.
    """

    def __init__(self) -> None:
        self.rows: list[Row] = []
        self.exposed: list[int] = []  # of every row, where states move: waited for copies before
        self.cut: Moment = (0, 0)  # everything before it has been left out
        self.left_out = 0  # blocks
        self._limit = MOST

    def trim(self) -> list[int] | None:
        """Forget the older half if there are too many; which rows stay, None if all do."""
        if len(self.rows) < self._limit:
            return None
        segment, _, cycle, *_ = self.rows[-(MOST // 2)]
        self.cut = max(self.cut, (segment, cycle))
        kept = self.close()
        self._limit = max(MOST, 2 * len(self.rows))
        return kept

    def close(self) -> list[int] | None:
        """Forget also blocks that came after others of later cycles, and now begin before all."""
        if self.cut == (0, 0):
            return None
        kept = [k for k, row in enumerate(self.rows) if (row[0], row[2]) >= self.cut]
        self.left_out += len(self.rows) - len(kept)
        # in place: whoever notes blocks holds these lists
        self.rows[:] = [self.rows[k] for k in kept]
        if self.exposed:
            self.exposed[:] = [self.exposed[k] for k in kept]
        return kept

    @property
    def begin(self) -> int:
        """When the first block that is remembered began."""
        return min((row[4] for row in self.rows), default=0)

    @property
    def records(self) -> list[Record]:
        """The blocks that are remembered."""
        return [*map(Record._make, self.rows)]


def since(cut: Moment, records: Sequence[Record]) -> list[Record]:
    """Those from a cycle on."""
    return [r for r in records if (r.segment, r.cycle) >= cut]
