"""Tables on the terminal: one look for all commands."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich import box
from rich.table import Table
from rich.text import Text

from optsched.cli.output import console
from optsched.io.text import one_line

if TYPE_CHECKING:
    from collections.abc import Container, Sequence

    from rich.console import Console, ConsoleOptions, RenderableType, RenderResult

WORD = 10
"""Letters that a column of words keeps beside its numbers."""


class WholeTable(Table):
    """A table that rather outgrows a narrow terminal than cut a number."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        least = sum((column.min_width or 0) + 3 for column in self.columns)  # and blanks between
        wide = options.update(width=max(options.max_width, least))
        yield from super().__rich_console__(console, wide)


def table(
    heads: Sequence[str], rows: Sequence[Sequence[str | Text]], left: Container[int] = (0,)
) -> Table:
    """A table of numbers, at the right of their columns.

    Parameters
    ----------
    heads, rows
        Texts are shown as they are, never as markup.
    left
        Numbers of the columns of words, which give way where there is no room.
    """
    made = WholeTable(box=box.SIMPLE_HEAD, pad_edge=False)
    for k, head in enumerate(heads):
        widest = max(len(cell) for cell in (head, *(row[k] for row in rows)))
        made.add_column(
            Text(one_line(head)), justify="left" if k in left else "right", overflow="ellipsis",
            no_wrap=k not in left, min_width=min(widest, WORD) if k in left else widest,
        )  # fmt: skip
    for row in rows:
        made.add_row(*(Text(one_line(c, 300)) if isinstance(c, str) else c for c in row))
    return made


def display(*parts: RenderableType) -> None:
    """Print tables and texts; where the terminal is too narrow, it breaks lines."""
    console().print(*parts, sep="\n", crop=False)
