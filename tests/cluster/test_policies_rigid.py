"""Policies that run a job at one size: what they promise, and examples."""

from __future__ import annotations

import numpy as np
import pytest
from depth import depth
from oracles.policy_checks import check_policy
from oracles.policy_worlds import policy_worlds
from rigid_workloads import same, workload

from optsched.cluster import Job, Linear, Nodes, Settings, Workload, synthetic
from optsched.cluster.policies import get
from optsched.cluster.simulate import simulate
from optsched.cluster.workload.job import PER_SECOND
from optsched.errors import InputError


@pytest.mark.parametrize("name", ["fifo", "sjf", "srtf", "las", "lucid"])
def test_conformance(name):
    """The library's own suite for policies."""
    check_policy(get(name), worlds=policy_worlds(depth(8, 40), zero_slot=True))


@pytest.mark.slow
def test_long_simulation_grows_its_record():
    """Many preemptions: the record of stays is doubled under way."""
    n = 400
    jobs = workload([i * 3 for i in range(n)], [3] * n, [5 * (n - i) + 9 for i in range(n)])
    for name, options in (("srtf", {}), ("las", {"thresholds": (1, 5, 20, 99), "round": 0})):
        policy = get(name, **options)
        fast = simulate(jobs, policy, Nodes(2, gpus=4)).log
        assert len(fast.job) > 2 * n - 8
        assert same(fast, simulate(jobs, policy, Nodes(2, gpus=4), engine="generic").log)


def test_easy_does_not_delay_the_first():
    """A short job passes the blocked one, a long one does not; first fit lets both pass."""
    rows = [("runs", 5, 10), ("blocked", 8, 10), ("short", 2, 8), ("long", 1, 9)]
    jobs = Workload.of(
        Job(name=name, submit=i, sizes=(g,), work=d * g * 10**6, speedup=Linear())
        for i, (name, g, d) in enumerate(rows)
    )
    starts = {}
    for backfill in ("none", "easy", "first_fit"):
        log = simulate(jobs, get("fifo", backfill=backfill), Nodes(1)).log
        starts[backfill] = dict(zip(log.job.tolist(), log.start.tolist(), strict=True))
    assert starts["none"] == {0: 0, 1: 10, 2: 20, 3: 20}
    assert starts["easy"] == {0: 0, 2: 2, 1: 10, 3: 20}
    assert starts["first_fit"] == {0: 0, 2: 2, 3: 3, 1: 12}


@pytest.mark.parametrize(
    ("name", "options", "field"),
    [
        ("fifo", {"backfill": "soon"}, "backfill"), ("sjf", {"backfill": 3}, "backfill"),
        ("srtf", {"gang": 0}, "gang"), ("srtf", {"gang": True}, "gang"),
        ("fifo", {"gang": 2.5}, "gang"), ("las", {"round": -1}, "round"),
        ("las", {"thresholds": (3, 3)}, "thresholds"), ("las", {"thresholds": "abc"}, "thresholds"),
        ("las", {"thresholds": (float("nan"),)}, "thresholds"), ("las", {"round": 2**60}, "round"),
        ("lucid", {"table": {}}, "table"), ("lucid", {"memory_limit": 0}, "memory_limit"),
        ("lucid", {"memory_limit": float("nan")}, "memory_limit"),
    ],
)  # fmt: skip
def test_wrong_options_are_named(name, options, field):
    """One sentence that begins with the option."""
    with pytest.raises(InputError) as caught:
        get(name, **options)
    assert str(caught.value).startswith(field)
    assert "\n" not in str(caught.value)


# las: the defaults are times, whatever the workload's unit is


def scaled(jobs: Workload, unit: str) -> Workload:
    """The same jobs in a finer unit of time."""
    more = PER_SECOND[unit]
    return jobs.changed(
        submit=jobs.submit * more,
        work=jobs.work * more,
        estimate=jobs.estimate * more,
        time_unit=unit,
    )


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
