"""A sweep on several ranks: the first one asks the study, the others make the same jobs."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from optuna.trial import FixedTrial
from torch.distributed import PrefixStore, distributed_c10d  # type: ignore[attr-defined]

from optsched.arraypipe.distributed.group import join, together
from optsched.arraypipe.plan.segments import places
from optsched.arraypipe.sweep.trials import Offer, made
from optsched.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from optsched.arraypipe.plan.plan import ExecutionPlan
    from optsched.arraypipe.sweep.trials import Suggest, Supply


_made = 0  # sweeps of this process; all ranks make theirs in the same order


class Letters:
    """What the first rank writes for the others, one letter after the other.

    They lie in the store of the process group, which is made here if there is none yet.
    """

    def __init__(self) -> None:
        global _made
        join()
        _made += 1
        store = distributed_c10d._get_default_store()
        self._store: Any = PrefixStore(f"optsched/sweep/{_made}", store)
        self._count = 0

    def write(self, content: Any) -> None:
        """The next letter."""
        self._store.set(str(self._count), json.dumps(content))
        self._count += 1

    def read(self) -> Any:
        """Wait for the next letter."""
        content = json.loads(self._store.get(str(self._count)))
        self._count += 1
        return content


class Leading:
    """The supply of the first rank: what it gives it also tells the others."""

    def __init__(self, source: Supply, letters: Letters) -> None:
        self.source, self.letters = source, letters

    def first(self, width: int) -> list[Offer]:
        """See `Supply`."""
        offers = together(lambda: self.source.first(width))
        self.letters.write([_row(offer) for offer in offers])
        together(_nothing)  # the others have made them
        return offers

    def instead(self) -> Offer | None:
        """See `Supply`; all ranks have seen that a job cannot run."""
        offer = together(self.source.instead)
        self.letters.write(offer and _row(offer))
        together(_nothing)
        return offer

    def next(self) -> Offer | None:
        """See `Supply`; the others ask only when there was a job."""
        offer = self.source.next()
        if offer is not None:
            self.letters.write(_row(offer))
        return offer


class Following:
    """The supply of the other ranks: the same jobs, made from the parameters of the trials."""

    def __init__(self, suggest: Suggest, letters: Letters) -> None:
        self.suggest, self.letters = suggest, letters

    def first(self, width: int) -> list[Offer]:
        """See `Supply`."""
        together(_nothing)  # the first rank has them
        return together(lambda: [self._offer(*row) for row in self.letters.read()])

    def instead(self) -> Offer | None:
        """See `Supply`."""
        together(_nothing)
        row = self.letters.read()
        return together(lambda: row and self._offer(*row))

    def next(self) -> Offer | None:
        """See `Supply`."""
        return self._offer(*self.letters.read())

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


def _nothing() -> None:
    """What a rank makes while another makes something."""


def _row(offer: Offer) -> Sequence[Any]:
    return offer.number, offer.params
