"""A model as if the lower, or the upper, end of every interval were true."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import numpy as np

from optsched.bandwidth.models.model import BandwidthModel, Which
from optsched.bandwidth.models.tables import CountTables
from optsched.bandwidth.topology.rates import UNMEASURED

if TYPE_CHECKING:
    from optsched.bandwidth.models.model import Selection
    from optsched.model.schedule import IntArray


class End(BandwidthModel):
    """One end of a model's intervals."""

    def __init__(self, model: BandwidthModel, end: Literal["low", "high"]) -> None:
        self.model, self.end, self.cluster = model, end, model.cluster
        self.op, self.payload = model.op, model.payload
        self.intra_monotone = model.intra_monotone

    def predict(self, selection: Selection) -> IntArray:
        """That end of B(S)."""
        return self.model.interval(selection)[0 if self.end == "low" else 1]

    def tables(self, which: Which = "value") -> CountTables | None:
        """Tables of that end."""
        return self.model.tables(self.end)


def measured_only(model: BandwidthModel) -> CountTables | None:
    """Tables in which every pattern that is not known exactly is unmeasured."""
    value, low, high = (model.tables(which) for which in ("value", "low", "high"))
    if value is None or low is None or high is None:
        return None
    sure = low.network == high.network
    return CountTables.of(model.cluster, np.where(sure, value.network, UNMEASURED), value.intra)
