"""The state of a search on stderr, for anything that takes over a second."""

from __future__ import annotations

import shutil
import sys
from time import monotonic
from typing import TYPE_CHECKING, Self, TextIO

from optsched.io.text import plain
from optsched.solving.progress import EVERY, FIRST_AFTER, LOGGER

if TYPE_CHECKING:
    import logging
    from collections.abc import Callable
    from types import TracebackType

    from optsched.solving.progress import Progress


class ProgressLine:
    """Callable for ``on_progress``: on a terminal one line that rewrites itself.

    Elsewhere a line every five seconds, through the logger of `optsched.solving.progress`.
    """

    def __init__(self, enabled: bool = True, stream: TextIO | None = None) -> None:
        self.stream = stream or sys.stderr
        self.live = enabled and self.stream.isatty()
        self.logs = enabled and not self.live
        self.open = False
        self._source = ""
        self._handler: logging.Handler | None = None

    def __call__(self, progress: Progress) -> None:
        """Show the state, and the engine of the last news."""
        self._source = progress.source or self._source
        if self.live and progress.elapsed >= FIRST_AFTER:
            width = shutil.get_terminal_size().columns - 1  # a second line could not be taken back
            text = str(progress._replace(source=self._source))
            self._write(f"\r\x1b[2K{text[:width]}")
            self.open = True

    def _write(self, text: str) -> None:
        try:
            self.stream.write(text)
            self.stream.flush()
        except OSError:  # nobody looks any more: no reason to lose the search
            self.live = self.open = False

    def __enter__(self) -> Self:
        if self.logs:
            import logging

            # of errors in writing it says nothing, as above
            self._handler = type("Lines", (logging.StreamHandler,), {"handleError": _ignore})(
                self.stream
            )
            logger = logging.getLogger(LOGGER)
            logger.addHandler(self._handler)
            logger.setLevel(logging.INFO)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self.open:
            self._write("\r\x1b[2K")
        if self._handler is not None:
            import logging

            logger = logging.getLogger(LOGGER)
            logger.removeHandler(self._handler)
            logger.setLevel(logging.NOTSET)


def _ignore(*_: object) -> None:
    pass


class Bar:
    """A bar on a terminal for what takes over a second; elsewhere a line every five seconds.

    Parameters
    ----------
    what
        What is counted, for the lines; without it there are none.
    """

    def __init__(self, what: str = "", *, quiet: bool = False) -> None:
        from rich.progress import (
            BarColumn,
            MofNCompleteColumn,
            Progress,
            TextColumn,
            TimeElapsedColumn,
        )

        from optsched.cli.output import console

        self.what, self.console = what, console(errors=True, quiet=quiet)
        columns = (
            TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn(),
            TimeElapsedColumn(),
        )  # fmt: skip
        self.shown = self.console.is_terminal and not quiet
        self._bar = Progress(
            *columns, console=self.console, transient=True, disable=not self.shown,
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
        self.console.print(plain(text, 300))

    def stop(self) -> None:
        """Take the bar away."""
        self._bar.stop()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
