"""`las`: the defaults are times, whatever the workload's unit is."""

from __future__ import annotations

import numpy as np
import pytest

from optsched.cluster import Nodes, Settings, Workload, simulate, synthetic
from optsched.cluster.policies import get
from optsched.cluster.workload.job import PER_SECOND


def scaled(jobs: Workload, unit: str) -> Workload:
    """The same jobs in a finer unit of time."""
    more = PER_SECOND[unit]
    return jobs.changed(submit=jobs.submit * more, work=jobs.work * more, time_unit=unit)


@pytest.mark.parametrize("unit", ["ms", "us"])
def test_defaults_are_seconds(unit):
    """Rounds and thresholds follow the unit, so the same happens, asked or compiled."""
    jobs, nodes = synthetic(80, 3, 1), Nodes(2, gpus=4)
    base = simulate(jobs, "las", nodes).log
    assert base.preemptions.sum() > 0
    finer = scaled(jobs, unit)
    for engine in ("auto", "generic"):
        log = simulate(finer, "las", nodes, engine=engine).log
        assert np.array_equal(log.start, base.start * PER_SECOND[unit])
        assert np.array_equal(log.end, base.end * PER_SECOND[unit])


def test_given_options_are_in_the_unit():
    """What is asked is not scaled: the thresholds of the default, by hand."""
    jobs, nodes = scaled(synthetic(40, 3, 1), "ms"), Nodes(1, gpus=8)
    by_hand = get("las", thresholds=(18_000_000,), round=60_000)
    logs = [
        policy.compiled(jobs, nodes, Settings())
        for policy in (by_hand, get("las"), get("las", thresholds=(18_000,), round=60_000))
    ]
    assert np.array_equal(logs[0].start, logs[1].start)
    assert not np.array_equal(logs[0].start, logs[2].start)
