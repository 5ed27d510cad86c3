"""A line on stderr with incumbent and bound, for anything that takes over a second."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Self, TextIO

if TYPE_CHECKING:
    from types import TracebackType

    from optsched.monitor import Progress

FIRST_AFTER = 1.0  # seconds of silence
PLAIN_EVERY = 5.0  # seconds between lines when stderr is no terminal


class ProgressLine:
    """Callable for ``on_progress``: one line that rewrites itself, or plain lines in a log."""

    def __init__(self, enabled: bool = True, stream: TextIO | None = None) -> None:
        self.stream = stream or sys.stderr
        self.enabled = enabled
        self.live = self.stream.isatty()
        self.last = FIRST_AFTER - PLAIN_EVERY
        self.open = False

    def __call__(self, progress: Progress) -> None:
        """Show the state, if it is time to."""
        if not self.enabled or progress.elapsed < FIRST_AFTER:
            return
        if self.live:
            self._write(f"\r\x1b[2K{self.text(progress)}")
            self.open = True
        elif progress.elapsed >= self.last + PLAIN_EVERY:
            self._write(f"{self.text(progress)}\n")
            self.last = progress.elapsed

    def _write(self, text: str) -> None:
        try:
            self.stream.write(text)
            self.stream.flush()
        except OSError:  # nobody looks any more: no reason to lose the search
            self.enabled = self.open = False

    @staticmethod
    def text(progress: Progress) -> str:
        """``12.3 s  objective 930  bound 915  gap 1.61 %  cpsat``."""
        gap = "-" if progress.gap is None else f"{progress.gap:.2%}"
        best = "-" if progress.objective is None else str(progress.objective)
        bound = "-" if progress.lower_bound is None else str(progress.lower_bound)
        return (
            f"{progress.elapsed:7.1f} s  objective {best}  bound {bound}  gap {gap}  "
            f"{progress.source}"
        ).rstrip()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self.open:
            self._write("\r\x1b[2K")
