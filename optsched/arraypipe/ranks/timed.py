"""When messages and copies were under way: what all ranks have noted, on the clock of the first."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from optsched.arraypipe.trace import Copied, Moved

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

SentRow = tuple[int, int, int, int]
"""Segment, message, cycle of the block that takes it; when it was handed over to the links."""
CameRow = tuple[int, int, int, int, int, int]
"""The same three; when its receive was posted, when its block asked for it, when it was there."""


class Noted(NamedTuple):
    """What one rank has noted beside its blocks; rows are plain tuples."""

    sent: Sequence[SentRow]
    came: Sequence[CameRow]
    copies: Sequence[tuple[int, str, int, int, int, int, int]]  # as in `Copied`

    def on(self, clock: Callable[[int], int]) -> Noted:
        """The same on another clock."""
        return Noted(
            [(s, m, c, clock(at)) for s, m, c, at in self.sent],
            [(s, m, c, clock(p), clock(a), clock(at)) for s, m, c, p, a, at in self.came],
            [(*row[:4], clock(row[4]), clock(row[5]), row[6]) for row in self.copies],
        )


def messages(rows: Sequence[Noted]) -> list[Moved]:
    """All messages that came to any rank, in the order in which a rank took them.

    A message is on its way from when both ends are ready for it, until it is there. That is seen
    when its block asks for it, not before.
    """
    left = {(s, m, c): at for row in rows for s, m, c, at in row.sent}
    found = []
    for row in rows:
        for s, m, c, posted, asked, there in row.came:
            start = max(posted, left.get((s, m, c), posted))
            found.append(Moved(s, m, c, min(start, there), there, asked))
    return found


def copies(rows: Sequence[Noted]) -> list[Copied]:
    """The copies of all ranks."""
    return [Copied(*copy) for row in rows for copy in row.copies]
