"""Policies that get nowhere are stopped, patient ones are not; odd clusters end in a sentence."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from toy_policies import Greedy

from optsched.cluster import (
    Decision,
    Group,
    Job,
    NodeChange,
    Nodes,
    Stalled,
    Workload,
    simulate,
)
from optsched.cluster.policies import get
from optsched.cluster.policies.allocation import OBJECTIVES
from optsched.cluster.world import engine
from optsched.errors import InputError

UNIT = 10**6


def jobs(*names: str, work: int = 10, **more: Any) -> list[Job]:
    """Jobs of so many units of time on one GPU."""
    return [Job(name=name, **({"sizes": (1,), "work": work * UNIT} | more)) for name in names]


class Turns(Greedy):
    """The jobs get the GPU in turn, each for so many units of time."""

    name = "turns"

    def __init__(self, each: int) -> None:
        self.each = each

    def decide(self, view: Any) -> Decision:  # noqa: D102
        quota = np.zeros(len(view.job), np.int64)
        quota[view.time // self.each % len(quota)] = 1
        return Decision(quota, wake_at=view.time + 1)


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    """A patience of 500 decisions."""
    monkeypatch.setattr(engine, "MOST_VAIN", 500)


@pytest.mark.parametrize("each", [1, 3, 10])
def test_restarts_without_end(hasty: None, each: int) -> None:
    """Two jobs take turns that are too short for the restart cost."""
    with pytest.raises(
        Stalled, match=r'"turns" makes no progress: from time 499 to 999 .*cost to 0'
    ):
        simulate(jobs("a", "b", work=30), Turns(each), Nodes(1, 1), restart_cost=10)


def test_turns_that_are_long_enough(hasty: None) -> None:
    """One unit of work a turn of eleven."""
    run = simulate(jobs("a", "b", work=100), Turns(11), Nodes(1, 1), restart_cost=10)
    assert run.log.finished.min() > 1000


def test_work_that_is_always_lost(hasty: None) -> None:
    """Passes of eight, turns of seven: told later, for the work might last."""
    with pytest.raises(Stalled, match=r"before the end of a pass, whose work is lost"):
        simulate(jobs("a", "b", work=8), Turns(7), Nodes(1, 1), checkpoint="pass")
    run = simulate(jobs("a", "b", work=8), Turns(9), Nodes(1, 1), checkpoint="pass")
    assert run.log.finished.tolist() == [8, 16]


def test_a_long_restart_is_no_standstill(hasty: None) -> None:
    """Asked 5,000 times during it; and 5,000 times while all wait for a late job."""

    class Once(Turns):
        def decide(self, view: Any) -> Decision:
            quota = np.zeros(len(view.job), np.int64)
            quota[0 if view.time >= 3 or len(quota) == 1 else 1] = 1
            return Decision(quota, wake_at=view.time + 1)

    first, late = jobs("a", "b", restart_cost=5000)
    more = jobs("late", submit=20_000)
    run = simulate([first, late, *more], Once(1), Nodes(1, 1))
    assert (run.log.finished > 0).all()

    class Patient(Greedy):
        def decide(self, view: Any) -> Decision:
            if len(view.job) < 2:
                return Decision(np.zeros(1, np.int64), wake_at=view.time + 1)
            return super().decide(view)

    run = simulate([*jobs("a"), *jobs("late", submit=5000)], Patient(), Nodes(1, 2))
    assert run.log.finished.tolist() == [5010, 5010]


# limits of groups


@pytest.mark.parametrize("policy", [Greedy(), "elastic", "fifo", "priority", "allocation"])
def test_limits_of_slots_that_would_be_ignored(policy: Any) -> None:
    """Only policies that honour them get them."""
    group = Group("g", max_slots=2)
    work = Workload.of(jobs("a", group="g"), groups=[Group("f"), group])
    with pytest.raises(InputError, match=r"groups\[1\]\.max_slots: policy .*ignore.*fair_share"):
        simulate(work, policy, Nodes(1))
    simulate(work.changed(groups=(Group("f"), Group("g"))), policy, Nodes(1))


@pytest.mark.parametrize("most", [0, 2])
def test_limits_below_the_smallest_size(most: int) -> None:
    """Refused before the start; tasks without GPUs need none."""
    rows = [*jobs("a", group="g"), *jobs("wide", group="g", sizes=(3, 4)), *jobs("b")]
    work = Workload.of(rows, groups=[Group("g", max_slots=most)])
    job = "wide" if most else "a"
    with pytest.raises(InputError, match=rf'max_slots: group "g" has at most {most}.*"{job}" need'):
        simulate(work, "fair_share", Nodes(1))
    idle = Workload.of(jobs("z", group="g", sizes=(0,)), groups=[Group("g", max_slots=0)])
    assert simulate(idle, "fair_share", Nodes(1)).log.finished.tolist() == [10]
    nobody = Workload.of(jobs("a"), groups=[Group("", max_slots=4)])
    with pytest.raises(InputError, match="without a group"):
        simulate(nobody, "fair_share", Nodes(1))


# odd clusters

POLICIES = [
    Greedy(), "fifo", "sjf", "srtf", "las", "lucid", "fair_share", "priority", "sia", "elastic",
    "entropy", "time_to_target",
    *(get("allocation", objective=objective) for objective in OBJECTIVES),
    get("elastic", order="srtf", preempt="order"), get("elastic", surplus="marginal"),
]  # fmt: skip


@pytest.mark.parametrize("engine", ["auto", "generic"])
@pytest.mark.parametrize("policy", POLICIES, ids=lambda one: getattr(one, "name", one))
def test_odd_clusters(policy: Any, engine: Any) -> None:
    """Only tasks without GPUs, also on a node without any; a node that comes late, or too late."""
    idle = jobs("x", "y", "z", sizes=(0,))
    run = simulate(idle, policy, Nodes(1, gpus=1, zero_slots=2), engine=engine)
    assert sorted(run.log.finished.tolist()) == [10, 10, 20]
    assert run.metrics.utilisation == 0
    run = simulate(idle, policy, Nodes(1, gpus=0, zero_slots=2), engine=engine)
    assert sorted(run.log.finished.tolist()) == [10, 10, 20]
    with pytest.raises(InputError, match="needs 1 GPUs, the cluster has 0"):
        simulate(jobs("a"), policy, Nodes(1, gpus=0), engine=engine)
    late = simulate(
        jobs("a", "b", sizes=(2,)), policy, Nodes.of([1, 1]), engine=engine,
        changes=[NodeChange(50, 1, "add")],
    )  # fmt: skip
    first = late.log.start.min()
    assert 50 <= first <= 120 and (late.log.finished > first).all()
    with pytest.raises(Stalled):
        simulate(
            jobs("a", work=100, sizes=(2,)), policy, Nodes.of([1, 1]), engine=engine,
            changes=[NodeChange(5, 1, "remove")] if engine == "auto" else
            [NodeChange(0, 1, "drain")],
        )  # fmt: skip


@pytest.mark.parametrize(
    ("kinds", "finished"),
    [
        (("remove", "add"), 14),  # loses the two units since its pass, and goes on at once
        (("drain", "remove", "add"), 14),
        (("drain", "add"), 12),
        (("remove", "drain", "add", "remove", "add"), 14),
    ],
)
def test_changes_of_one_instant(kinds: Any, finished: int) -> None:
    """In the order given; a node that goes and comes back at once loses the open passes."""
    changes = [NodeChange(6, 0, kind) for kind in kinds]
    run = simulate(jobs("a", work=12, passes=3), Greedy(), Nodes(1, 1), changes=changes)
    assert run.log.finished.tolist() == [finished]
    at_end = [NodeChange(8, 0, kind) for kind in kinds]  # where a pass ends, nothing is lost
    run = simulate(jobs("a", work=12, passes=3), Greedy(), Nodes(1, 1), changes=at_end)
    assert run.log.finished.tolist() == [12]
