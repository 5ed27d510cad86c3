"""Tables on the terminal, for all commands."""

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

NARROWEST = 10
"""Least width of a text column."""


class WholeTable(Table):
    """A table that exceeds a narrow terminal rather than truncate a number."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        least = sum((column.min_width or 0) + 3 for column in self.columns)  # with blanks between
        wide = options.update(width=max(options.max_width, least))
        yield from super().__rich_console__(console, wide)


def table(
    heads: Sequence[str], rows: Sequence[Sequence[str | Text]], left: Container[int] = (0,)
) -> Table:
    """Make a table of right-aligned numbers; texts are data, never markup.

    `left` are the indices of text columns, which are truncated on a narrow terminal.
    """
    made = WholeTable(box=box.SIMPLE_HEAD, pad_edge=False)
    for k, head in enumerate(heads):
        widest = max(len(cell) for cell in (head, *(row[k] for row in rows)))
        made.add_column(
            Text(one_line(head)), justify="left" if k in left else "right", overflow="ellipsis",
            no_wrap=k not in left, min_width=min(widest, NARROWEST) if k in left else widest,
        )  # fmt: skip
    for row in rows:
        made.add_row(*(Text(one_line(c, 300)) if isinstance(c, str) else c for c in row))
    return made


def display(*parts: RenderableType) -> None:
    """Print tables and texts; a narrow terminal breaks lines."""
    console().print(*parts, sep="\n", crop=False)
