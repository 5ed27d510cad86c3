"""Where the jobs of a sweep come from: the study is asked, on ranks by the first of them."""

from __future__ import annotations

import math
import time
from itertools import count
from typing import TYPE_CHECKING, Any, Final

from optuna.trial import FixedTrial

from optsched.arraypipe.plan.segments import places
from optsched.arraypipe.sweep.trials import Entry, Trials, made
from optsched.errors import InputError

if TYPE_CHECKING:
    from optsched.arraypipe.distributed.group import Group
    from optsched.arraypipe.plan.plan import ExecutionPlan
    from optsched.arraypipe.sweep.trials import Suggest

_SWEEPS: Final = count()  # of this process; all ranks make theirs in the same order


class Supply:
    """Gives trials with their jobs until there are no more; those that a former run has left first.

    On several ranks the first one asks the study, and the others, which have no `trials`, make the
    same jobs of the same parameters.
    """

    def __init__(
        self,
        suggest: Suggest,
        trials: Trials | None,
        n_trials: int | None,
        timeout: float | None,
        on_ranks: bool,
    ) -> None:
        self.suggest, self.trials = suggest, trials
        self.until = math.inf if timeout is None else time.monotonic() + timeout
        self.left: float = math.inf if n_trials is None else n_trials
        self.waiting: list[Entry] = []
        if trials is not None and trials.files is not None:
            self.left -= trials.files.count
            self.waiting = trials.adopt()
        self.group: Group | None = None
        if on_ranks:
            from optsched.arraypipe.distributed.group import Group, join

            join()
            self.group = Group(name=f"sweep{next(_SWEEPS)}")

    def take(self, most: int) -> list[Entry]:
        """So many, fewer if there are no more; all ranks call it alike."""
        if self.group is None:
            return self._asked(most)
        from optsched.arraypipe.distributed.group import agree

        own: list[Entry] = []

        def rows() -> list[tuple[int, dict[str, Any]]]:
            own.extend(self._asked(most) if self.trials is not None else [])
            return [(entry.trial.number, entry.trial.params) for entry in own]

        asked = agree(rows, of_first=True)
        return agree(lambda: own or [self._made(*row) for row in asked])

    def next(self) -> Entry | None:
        """One for a seat that has become free; the other ranks ask only when the first had one."""
        if self.trials is None:
            assert self.group is not None
            return self._made(*self.group.hear())
        entry = next(iter(self._asked(1)), None)
        if entry is not None and self.group is not None:
            self.group.broadcast((entry.trial.number, entry.trial.params))
        return entry

    def _asked(self, most: int) -> list[Entry]:
        assert self.trials is not None
        found, self.waiting = self.waiting[:most], self.waiting[most:]
        while len(found) < most and self.left > 0 and time.monotonic() < self.until:
            self.left -= 1
            if (entry := self.trials.ask()) is not None:
                found.append(entry)
        return found

    def _made(self, number: int, params: dict[str, Any]) -> Entry:
        trial = FixedTrial(params, number)
        return Entry(trial, made(self.suggest, trial, number))


def check_hears(plan: ExecutionPlan) -> None:
    """The first rank must see every job's losses: they come with the gradients."""
    deaf = [seat for seat in range(plan.n_jobs) if 0 not in places(plan, seat)]
    if deaf:
        raise InputError(
            f"schedule: the first device has no stage of job {deaf[0]}; the first rank reports the "
            f"losses of all trials, so it needs a stage of each"
        )
