"""Progress on stderr of everything that takes more than a second."""

from __future__ import annotations

import shutil
import sys
from contextlib import suppress
from threading import Event, Thread
from time import monotonic
from typing import TYPE_CHECKING, Self

from optsched.io.text import one_line

if TYPE_CHECKING:
    from collections.abc import Callable

    from optsched.solving.progress import Progress

FIRST_AFTER = 1.0
"""Seconds without output."""

EVERY = 5.0
"""Seconds between lines where stderr is not a terminal."""


class Bar:
    """A status line on a terminal, rewritten in place; elsewhere a line every five seconds.

    Call it with a `Progress` (``optsched.solve(..., on_progress=bar)``), or count by `task`. It
    never raises an error of stderr.
    """

    def __init__(self, *, quiet: bool = False) -> None:
        self.quiet = quiet
        self.live = not quiet and sys.stderr.isatty()
        """Whether there is a terminal with a status line."""
        self._due = monotonic() + FIRST_AFTER
        self._counts: dict[str, str] = {}
        self._state = ""
        self._source, self._better = "", False
        self._ended, self._ticker = Event(), Thread()

    def __call__(self, progress: Progress) -> None:
        """Show the state of a search; ``H`` marks a better schedule since the last line."""
        self._better = self._better or progress.event == "incumbent"
        self._source = progress.source or self._source
        event = "incumbent" if self._better else "tick"
        if self._show(str(progress._replace(event=event, source=self._source))):
            self._better = False

    def task(self, name: str, total: int | None = None) -> Callable[..., None]:
        """Return a function to call with ``done``, or ``done, total``."""

        def update(done: int, of: int | None = total) -> None:
            whole = "" if of is None else f"/{of:,}"
            self._counts[name] = f"{one_line(name, 40)} {done:,}{whole}"
            self._show("  ".join(self._counts.values()))

        return update

    def clock(self, name: str) -> Self:
        """Show the elapsed seconds of work that reports nothing, until `stop`."""
        began = monotonic()
        self._due = began + (FIRST_AFTER if self.live else EVERY)

        def tick() -> None:
            while not self._ended.wait(0.5):
                self._show(f"{name}, {monotonic() - began:.0f} s")

        self._ticker = Thread(target=tick, daemon=True)
        self._ticker.start()
        return self

    def _show(self, text: str) -> bool:
        """Show a state if it is time to; return whether it was shown."""
        if self.quiet or monotonic() < self._due:
            return False
        if self.live:
            self._state = text[: shutil.get_terminal_size().columns - 1]  # one line, to be erased
            self._write(f"\r\x1b[2K{self._state}")
        else:
            self._due = monotonic() + EVERY
            self._write(f"{text}\n")
        return True

    def print(self, text: str) -> None:
        """Print a line above the status line."""
        if not self.quiet:
            erase = "\r\x1b[2K" * bool(self._state)
            self._write(f"{erase}{one_line(text, 300)}\n{self._state}")

    def stop(self) -> None:
        """End the clock and erase the status line."""
        self._ended.set()
        if self._ticker.is_alive():
            self._ticker.join()
        if self._state:
            self._write("\r\x1b[2K")
            self._state = ""

    def _write(self, text: str) -> None:
        with suppress(OSError):  # a closed terminal must not end the work
            sys.stderr.write(text)
            sys.stderr.flush()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
