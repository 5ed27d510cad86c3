"""Policies that run a job at one size: what they promise, and examples."""

from __future__ import annotations

import pytest
from depth import depth, few_examples
from hypothesis import given
from rigid_workloads import clusters, same, workload

from optsched.cluster import Group, Job, Linear, Nodes, Workload
from optsched.cluster.policies import get
from optsched.cluster.simulate import simulate
from optsched.errors import InputError
from optsched.model.verify import verify
from optsched.testing import check_policy
from optsched.testing.policy_worlds import policy_worlds

CASES = [
    ("fifo", {}), ("sjf", {}), ("fifo", {"gang": 2}), ("fifo", {"backfill": "first_fit"}),
    ("sjf", {"backfill": "first_fit"}), ("fifo", {"backfill": "easy"}),
    ("sjf", {"backfill": "easy", "gang": 2}), ("srtf", {}), ("srtf", {"gang": 3}),
    ("las", {"thresholds": (50,), "round": 5}), ("las", {"thresholds": (5, 60, 900), "round": 0}),
    ("las", {"thresholds": ()}), ("lucid", {}), ("lucid", {"gang": 2}),
]  # fmt: skip


@pytest.mark.parametrize(("name", "options"), CASES)
@few_examples
@given(clusters(12))
def test_history_is_accepted(name, options, case):
    """The verifier accepts every run."""
    jobs, nodes, how = case
    assert verify(simulate(jobs, get(name, **options), nodes, **how).history) == []


@pytest.mark.parametrize("name", ["fifo", "sjf", "srtf", "las", "lucid"])
def test_conformance(name):
    """The library's own suite for policies."""
    check_policy(get(name), worlds=policy_worlds(depth(8, 40), zero_slot=True))


def test_long_simulation_grows_its_record():
    """Many preemptions: the record of stays is doubled under way."""
    n = 400
    jobs = workload([i * 3 for i in range(n)], [3] * n, [5 * (n - i) + 9 for i in range(n)])
    for name, options in (("srtf", {}), ("las", {"thresholds": (1, 5, 20, 99), "round": 0})):
        policy = get(name, **options)
        fast = simulate(jobs, policy, Nodes(2, gpus=4)).log
        assert len(fast.job) > 2 * n - 8
        assert same(fast, simulate(jobs, policy, Nodes(2, gpus=4), engine="generic").log)


def test_not_compiled_is_asked():
    """Jobs that must not be preempted, hidden jobs, node changes: asked, right answers."""
    jobs = [
        Job(name="long", sizes=(4,), work=400 * 10**6, preemptible=False),
        Job(name="short", submit=1, sizes=(4,), work=4 * 10**6),
        Job(name="zero", submit=2, sizes=(0,), work=5 * 10**6),
    ]
    for name in ("fifo", "sjf", "srtf", "las", "lucid"):
        run = simulate(Workload.of(jobs), name, Nodes(1, gpus=4))
        assert run.log.finished.tolist()[:2] == [100, 101 if name != "las" else 121]
        assert run.log.finished[2] == 7
    shown = [Job(name=f"j{i}", sizes=(1,), work=10**7, group="g") for i in range(4)]
    limited = Workload.of(shown, groups=[Group("g", max_concurrent=1)])
    assert simulate(limited, "fifo", Nodes(1)).log.finished.tolist() == [10, 20, 30, 40]


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
