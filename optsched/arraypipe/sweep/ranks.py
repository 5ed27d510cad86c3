"""A sweep on several ranks: the first one asks the study, the others make the same jobs."""

from __future__ import annotations

from itertools import count
from typing import TYPE_CHECKING, Any

from optuna.trial import FixedTrial

from optsched.arraypipe.distributed.group import Group, agree, join
from optsched.arraypipe.plan.segments import places
from optsched.arraypipe.sweep.trials import Offer, made
from optsched.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Callable

    from optsched.arraypipe.plan.plan import ExecutionPlan
    from optsched.arraypipe.sweep.trials import Suggest, Supply


_sweeps = count()  # of this process; all ranks make theirs in the same order


class SupplyOfRanks:
    """The supply of every rank: what the first one is given, the others make of its parameters.

    Parameters
    ----------
    suggest
        As for `ArraySweep`.
    source
        The supply of the first rank; None on the others.
    """

    def __init__(self, suggest: Suggest, source: Supply | None) -> None:
        join()
        self.suggest, self.source = suggest, source
        self.group = Group(name=f"sweep{next(_sweeps)}")

    def first(self, width: int) -> list[Offer]:
        """See `Supply`."""
        return self._shared(lambda source: source.first(width))

    def instead(self) -> Offer | None:
        """See `Supply`; all ranks have seen that a job cannot run."""
        found = self._shared(lambda source: [] if (one := source.instead()) is None else [one])
        return found[0] if found else None

    def next(self) -> Offer | None:
        """See `Supply`; the others ask only when there was a job."""
        if self.source is None:
            return self._offer(*self.group.hear())
        offer = self.source.next()
        if offer is not None:
            self.group.broadcast((offer.number, offer.params))
        return offer

    def _shared(self, ask: Callable[[Supply], list[Offer]]) -> list[Offer]:
        own: list[Offer] = []

        def rows() -> list[tuple[int, dict[str, Any]]]:
            if self.source is not None:
                own.extend(ask(self.source))
            return [(offer.number, offer.params) for offer in own]

        asked = agree(rows, of_first=True)
        return agree(lambda: own or [self._offer(*row) for row in asked])

    def _offer(self, number: int, params: dict[str, Any]) -> Offer:
        return Offer(made(self.suggest, FixedTrial(params, number), number), number, params)


def check_hears(plan: ExecutionPlan) -> None:
    """The first rank must see every job's losses: they come with the gradients."""
    deaf = [seat for seat in range(plan.n_jobs) if 0 not in places(plan, seat)]
    if deaf:
        raise InputError(
            f"schedule: the first device has no stage of job {deaf[0]}; the first rank reports the "
            f"losses of all trials, so it needs a stage of each"
        )
