"""The conformance suite of bandwidth models: ours pass it, and broken ones are caught."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from depth import half
from oracles.model_checks import check_bandwidth_model

from optsched.bandwidth import (
    BottleneckBandwidth,
    MeasuredBandwidth,
    MeasurementTable,
    synthetic,
)
from optsched.bandwidth.models.model import Interval

CLUSTER = synthetic.cluster(["nvswitch", "nvlink_pairs"], 3)
TABLE = synthetic.network(CLUSTER)
SOME = MeasurementTable(TABLE.rows[::9], TABLE.op, TABLE.payload)


def test_ours_pass() -> None:
    """Prior, learnt, measured in part, one end of the intervals, rack-sized hosts."""
    prior = BottleneckBandwidth(CLUSTER)
    check_bandwidth_model(prior)
    check_bandwidth_model(prior.fit(SOME))
    check_bandwidth_model(MeasuredBandwidth(CLUSTER, SOME))
    check_bandwidth_model(Interval(prior.fit(SOME), "low"))
    check_bandwidth_model(BottleneckBandwidth(synthetic.cluster("nvl72", 2)))


class Single(BottleneckBandwidth):
    """A single GPU has traffic."""

    def predict(self, selection: Any) -> Any:
        """One more everywhere."""
        return super().predict(selection) + 1


class Company(BottleneckBandwidth):
    """The value of a set depends on what else is asked."""

    def predict(self, selection: Any) -> Any:
        """Less, the more rows there are."""
        values = super().predict(selection)
        return np.maximum(values - len(values), 0)


class Careless(BottleneckBandwidth):
    """Takes anything."""

    def checked(self, selection: Any) -> Any:
        """No check at all."""
        given = np.atleast_2d(np.asarray(selection)).astype(np.bool_)
        return np.resize(given, (len(given), self.cluster.n_gpus))


class Stale(BottleneckBandwidth):
    """Its tables are not its predictions."""

    def predict(self, selection: Any) -> Any:
        """Half of what the tables say."""
        return super().predict(selection) // 2

    def interval(self, selection: Any) -> Any:
        """Anything."""
        values = self.predict(selection)
        return values * 0, values * 4


class Sure(BottleneckBandwidth):
    """Its intervals miss its values."""

    def interval(self, selection: Any) -> Any:
        """Too low."""
        values = self.predict(selection)
        return values * 0, values // 2


@pytest.mark.parametrize(
    ("broken", "words"),
    half(
        [
            (Single, "less than two GPUs"),
            (Company, "another value among others"),
            (Careless, "predict: takes"),
            (Stale, "tables:"),
            (Sure, "does not hold the value"),
        ]
    ),
)
def test_broken_models_are_caught(broken: Any, words: str) -> None:
    """With a line that says what is wrong."""
    with pytest.raises(AssertionError, match=f"{broken.__name__} fails"):
        check_bandwidth_model(broken(CLUSTER))
    try:
        check_bandwidth_model(broken(CLUSTER))
    except AssertionError as error:
        assert words in str(error)
