"""The state of a search as a line of a log, every five seconds."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import logging

    from optsched.solving.monitor import Progress

LOGGER = "optsched"
"""Name of the logger; lines have level INFO."""

FIRST_AFTER = 1.0  # seconds of silence
EVERY = 5.0  # seconds


class ProgressLog:
    """Hears every event of a search and lets a line through from time to time."""

    def __init__(self, logger: logging.Logger) -> None:
        self.logger = logger
        self._next = FIRST_AFTER
        self._better = False
        self._source = ""

    @classmethod
    def if_wanted(cls) -> ProgressLog | None:
        """One, if somebody listens: who has never imported `logging` does not, and saves that."""
        logging = sys.modules.get("logging")
        if logging is None:
            return None
        logger = logging.getLogger(LOGGER)
        return cls(logger) if logger.isEnabledFor(logging.INFO) else None

    def __call__(self, progress: Progress) -> None:
        """Log the state, if it is time to; ``H`` marks a better schedule since the last line."""
        self._better = self._better or progress.event == "incumbent"
        self._source = progress.source or self._source
        if progress.elapsed < self._next:
            return
        # a state does not know of the events between it and the last line
        event = "incumbent" if self._better else "tick"
        self.logger.info("%s", progress._replace(event=event, source=self._source))
        self._better = False
        self._next = progress.elapsed + EVERY
