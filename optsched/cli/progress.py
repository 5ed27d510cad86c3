"""The state of a search on stderr, for anything that takes over a second."""

from __future__ import annotations

import shutil
import sys
from contextlib import contextmanager, suppress
from time import monotonic
from typing import TYPE_CHECKING, Self

from optsched.io.text import one_line

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from optsched.solving.progress import Progress


FIRST_AFTER = 1.0
"""Seconds before the first line."""

EVERY = 5.0
"""Seconds between two lines."""


@contextmanager
def progress_line(*, quiet: bool = False) -> Iterator[Callable[[Progress], None]]:
    """A function for ``on_progress``: on a terminal it rewrites one line.

    Elsewhere it writes a line every five seconds, with ``H`` after a new best since the last one.
    """
    live = not quiet and sys.stderr.isatty()
    shown, source, better, due = False, "", False, FIRST_AFTER

    def write(text: str) -> None:
        with suppress(OSError):  # a closed pipe must not end the search
            sys.stderr.write(text)
            sys.stderr.flush()

    def show(progress: Progress) -> None:
        nonlocal shown, source, better, due
        source = progress.source or source  # the engine of the last event
        better = better or progress.event == "incumbent"
        if quiet or progress.elapsed < due:
            return
        if live:
            width = shutil.get_terminal_size().columns - 1  # a second line could not be erased
            write(f"\r\x1b[2K{str(progress._replace(source=source))[:width]}")
            shown = True
        else:
            event = "incumbent" if better else "tick"
            write(f"{progress._replace(event=event, source=source)}\n")
            better, due = False, progress.elapsed + EVERY

    try:
        yield show
    finally:
        if shown:
            write("\r\x1b[2K")


class Bar:
    """A bar on a terminal for what takes over a second; elsewhere a line every five seconds.

    Parameters
    ----------
    what
        What is counted, for the lines; without it there are none.
    """

    def __init__(self, what: str = "", *, quiet: bool = False) -> None:
        from rich import progress as rich

        from optsched.cli.output import console

        self.what, self.console = what, console(errors=True, quiet=quiet)
        self.shown = self.console.is_terminal and not quiet
        self._bar = rich.Progress(
            rich.TextColumn("{task.description}", markup=False), rich.BarColumn(),
            rich.MofNCompleteColumn(), rich.TimeElapsedColumn(), console=self.console,
            transient=True, disable=not self.shown,
            redirect_stdout=sys.stdout.isatty(),  # not what goes to a file
        )  # fmt: skip
        self._begin = self._said = monotonic()

    def task(self, name: str, total: int | None = None) -> Callable[..., None]:
        """What is to be told ``done``, or ``done, total``."""
        task = self._bar.add_task(name, total=total, visible=self.shown)

        def tell(done: int, of: int | None = total) -> None:
            now = monotonic()
            if now >= self._begin + FIRST_AFTER:
                self._bar.start()
            self._bar.update(task, completed=done, total=of)
            if self.what and not self.shown and now >= self._said + EVERY:
                self._said = now
                self.say(f"{done:,} of {of:,} {self.what}")

        return tell

    def say(self, text: str) -> None:
        """A line above the bar."""
        self.console.print(one_line(text, 300))

    def stop(self) -> None:
        """Take the bar away."""
        self._bar.stop()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
