"""Where the jobs of a sweep come from: unfinished trials first, then new ones."""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

if TYPE_CHECKING:
    from optsched.arraypipe.job import Job
    from optsched.arraypipe.sweeping.trials import Entry, Trials


class Offer(NamedTuple):
    """A job for a seat: the number of its trial and the parameters that make it."""

    job: Job
    number: int
    params: dict[str, Any]


class Supply(Protocol):
    """Gives jobs until there are no more."""

    def first(self, width: int) -> list[Offer]:
        """Jobs for so many seats, fewer if there are no more."""

    def instead(self) -> Offer | None:
        """One for a first job that cannot run."""

    def next(self) -> Offer | None:
        """One for a seat that has become free during the run."""


class Asked:
    """Jobs of trials that the study is asked for.

    Parameters
    ----------
    trials
        To ask.
    n_trials, timeout
        When to ask no more; None: never.
    resume
        Begin with what a former run has left.
    """

    def __init__(
        self, trials: Trials, n_trials: int | None, timeout: float | None, resume: bool
    ) -> None:
        self.trials = trials
        self.until = math.inf if timeout is None else time.monotonic() + timeout
        self.left: float = math.inf if n_trials is None else n_trials
        self.waiting: list[Entry] = []
        if resume:
            assert trials.files is not None
            self.left -= trials.files.count
            self.waiting = trials.adopt()

    def first(self, width: int) -> list[Offer]:
        """See `Supply`."""
        found: list[Offer] = []
        while len(found) < width and (offer := self.next()) is not None:
            found.append(offer)
        return found

    def instead(self) -> Offer | None:
        """See `Supply`."""
        return self.next()

    def next(self) -> Offer | None:
        """See `Supply`."""
        if self.waiting:
            return _offer(self.waiting.pop(0))
        while self.left > 0 and time.monotonic() < self.until:
            self.left -= 1
            entry = self.trials.ask()
            if entry is not None:
                return _offer(entry)
        return None


def _offer(entry: Entry) -> Offer:
    return Offer(entry.job, entry.trial.number, entry.trial.params)
