"""The state of a search on stderr, for anything that takes over a second."""

from __future__ import annotations

import shutil
import sys
from contextlib import contextmanager, suppress
from time import monotonic
from typing import TYPE_CHECKING, Self

from optsched.io.text import one_line
from optsched.solving.progress import EVERY, FIRST_AFTER, LOGGER

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from optsched.solving.progress import Progress


@contextmanager
def progress_line(*, quiet: bool = False) -> Iterator[Callable[[Progress], None]]:
    """To be called with ``on_progress``: on a terminal one line that rewrites itself.

    Elsewhere a line every five seconds, through the logger of `optsched.solving.progress`.
    """
    live = not quiet and sys.stderr.isatty()
    shown, source = False, ""

    def write(text: str) -> None:
        with suppress(OSError):  # nobody looks any more: no reason to lose the search
            sys.stderr.write(text)
            sys.stderr.flush()

    def show(progress: Progress) -> None:
        nonlocal shown, source
        source = progress.source or source  # the engine of the last news
        if live and progress.elapsed >= FIRST_AFTER:
            width = shutil.get_terminal_size().columns - 1  # a second line could not be taken back
            write(f"\r\x1b[2K{str(progress._replace(source=source))[:width]}")
            shown = True

    import logging

    logger, lines = logging.getLogger(LOGGER), None
    if not quiet and not live:
        # of errors in writing it says nothing, as above
        silent = type("Lines", (logging.StreamHandler,), {"handleError": lambda *_: None})
        lines = silent(sys.stderr)
        logger.addHandler(lines)
        logger.setLevel(logging.INFO)
    try:
        yield show
    finally:
        if shown:
            write("\r\x1b[2K")
        if lines is not None:
            logger.removeHandler(lines)
            logger.setLevel(logging.NOTSET)


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
