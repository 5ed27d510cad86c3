"""`check_policy` passes good policies and says what is wrong with bad ones."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from depth import depth, seeds
from oracles.policy_checks import check_policy
from oracles.policy_worlds import policy_worlds
from toy_policies import Anything, Greedy

from optsched.cluster import Decision


@pytest.mark.parametrize("policy", [Greedy(), Anything(5), Anything(6, wild=False)])
def test_good_policies_pass(policy: Any) -> None:
    """With zero-slot tasks, packing, named nodes and everything else."""
    check_policy(policy, worlds=policy_worlds(depth(12, 40), zero_slot=True))


class Writes(Greedy):
    """Puts its answer into the view."""

    def decide(self, view: Any) -> Decision:  # noqa: D102
        view.remaining[:] = 0
        return super().decide(view)


class Remembers(Greedy):
    """Starts nothing the first time that it sees a new set of jobs."""

    def __init__(self) -> None:
        self.known: set[tuple[int, ...]] = set()

    def decide(self, view: Any) -> Decision:  # noqa: D102
        key = tuple(view.job.tolist())
        if key in self.known:
            return super().decide(view)
        self.known.add(key)
        return Decision(np.where(view.running & (view.gpus == 0), -1, view.gpus),
                        wake_at=view.time + 1)  # fmt: skip


class Follows(Greedy):
    """Wakes up by what it saw last, and starts afresh when time goes back."""

    last = 0

    def decide(self, view: Any) -> Decision:  # noqa: D102
        gap = max(0, view.time - self.last)
        self.last = view.time
        return Decision(super().decide(view).quota, wake_at=view.time + 1 + gap % 3)


class Peeps(Greedy):
    """Says that it is not clairvoyant, and starts short jobs only."""

    def decide(self, view: Any) -> Decision:  # noqa: D102
        decision = super().decide(view)
        short = view.workload.work[view.job] <= np.median(view.workload.estimate[view.job])
        keep = view.running | (short | ~short.any())
        return Decision(np.where(keep, decision.quota, 0))


class Sorts(Greedy):
    """Starts in the order of a key: what is true of a job, or what is estimated."""

    def __init__(self, key: Any) -> None:
        self.key = key

    def decide(self, view: Any) -> Decision:  # noqa: D102
        quota, free = np.array(view.gpus), int(view.free.sum())
        for i in np.argsort(self.key(view.workload)[view.job], kind="stable"):
            size = int(view.size[view.size_ptr[i]])
            if not view.running[i] and size <= free:
                quota[i], free = size, free - size
        return Decision(quota)


CHEATS = {
    "work": lambda jobs: jobs.work,
    "passes": lambda jobs: jobs.passes,
    "reports": lambda jobs: np.diff(jobs.observed_ptr),
    "last report": lambda jobs: np.append(jobs.observed, 0)[jobs.observed_ptr[1:] - 1],
    "estimate": lambda jobs: jobs.estimate / jobs.work,
}


@pytest.mark.parametrize("key", CHEATS)
def test_a_cheat_that_only_sorts_is_caught(key: str) -> None:
    """By every column that holds the truth, also where all jobs become longer alike."""
    with pytest.raises(AssertionError, match="depends on what is not known yet"):
        check_policy(Sorts(CHEATS[key]))


@seeds(5, 20)
def test_the_other_truth_is_not_seen(seed: int) -> None:
    """Estimates, pass work, known passes and past reports stay; all else is another, legal."""
    world = policy_worlds(1, seed=seed)[0]
    known = []

    class Keeps(Greedy):
        def decide(self, view: Any) -> Decision:
            known.append(view.workload)
            assert (view.workload.work[view.job] > view.done).all()
            assert (view.workload.passes[view.job] > view.passes).all()
            jobs, rows = view.workload, view.observed_ptr
            for i, j in enumerate(view.job.tolist()):
                row = jobs.observed[jobs.observed_ptr[j] : jobs.observed_ptr[j + 1]]
                seen = view.observed[rows[i] : rows[i + 1]]
                assert row[: len(seen)].tolist() == seen.tolist()
                if not np.isnan(jobs.target[j]):
                    assert len(row) == jobs.passes[j]
                    assert (row[:-1] > jobs.target[j]).all() and row[-1] <= jobs.target[j]
            return super().decide(view)

    check_policy(Keeps(), worlds=[world])
    others = [jobs for jobs in known if jobs is not world.workload]
    assert others
    for jobs in others:
        fixed = np.isnan(jobs.target)
        assert (jobs.passes == world.workload.passes)[fixed].all()
        for key in ("estimate", "pass_work", "submit", "size", "rate", "initial", "template"):
            assert (getattr(jobs, key) == getattr(world.workload, key))[
                ~np.isnan(getattr(jobs, key))
            ].all()
    assert any((jobs.work != world.workload.work).any() for jobs in others)


def test_a_truth_near_the_limits() -> None:
    """Jobs so long that longer ones would be refused get shorter truths."""
    from optsched.cluster import Job, Nodes, Settings, Workload

    jobs = [Job(name=f"j{i}", sizes=(1,), work=2**60 - i) for i in range(3)]
    world = policy_worlds(1)[0]._replace(
        workload=Workload.of(jobs), nodes=Nodes(1, 1), settings=Settings()
    )
    check_policy(Sorts(lambda jobs: jobs.estimate), worlds=[world])
    with pytest.raises(AssertionError, match="not known yet"):
        check_policy(Sorts(CHEATS["work"]), worlds=[world])


class Starves(Greedy):
    """Never runs job 2."""

    def decide(self, view: Any) -> Decision:  # noqa: D102
        decision = super().decide(view)
        return Decision(np.where(view.job == 2, 0, decision.quota))


class Everything(Greedy):
    """Gives everybody the largest size."""

    def decide(self, view: Any) -> Decision:  # noqa: D102
        return Decision(view.size[view.size_ptr[1:] - 1])


class Oversizes(Greedy):
    """Gives one GPU more than a size."""

    def decide(self, view: Any) -> Decision:  # noqa: D102
        decision = super().decide(view)
        first = (np.arange(len(view.job)) == 0) & ~view.running
        return Decision(np.where(first, 5, decision.quota))


class OffCompiled(Greedy):
    """Compiled, it forgets the preemptions."""

    def compiled(self, workload: Any, nodes: Any, settings: Any) -> Any:  # noqa: D102
        from optsched.cluster.world.engine import simulate_generic

        log = simulate_generic(workload, self, nodes, settings).log
        return log._replace(finished=log.finished + 1)


class Sleepless(Greedy):
    """Wakes up for ever and starts nothing."""

    def decide(self, view: Any) -> Decision:  # noqa: D102
        return Decision(np.zeros(len(view.job), np.int64) + np.where(view.running, view.gpus, 0),
                        wake_at=view.time + 1)  # fmt: skip


@pytest.mark.parametrize(
    ("bad", "told"),
    [
        (Writes(), "changes the view"),
        (Remembers(), "two simulations differ"),
        (Follows(), "remembers"),
        (Peeps(), "true work"),
        (Starves(), "starts none of"),
        (Everything(), "over-allocation"),
        (Oversizes(), "not one of its sizes"),
        (OffCompiled(), "compiled, it differs in log.finished"),
        (Sleepless(), "nothing runs"),
    ],
    ids=lambda x: type(x).__name__ if not isinstance(x, str) else "",
)
def test_bad_policies_are_caught(bad: Any, told: str) -> None:
    """Each for what it does wrong, with its name and the case."""
    with pytest.raises(AssertionError, match=told) as caught:
        check_policy(bad, non_preemptible=False)
    assert str(caught.value).startswith(f"{bad.name}, case ")


@pytest.mark.parametrize("broken", [{"name": ""}, {"name": 3}, {"clairvoyant": 1}, {"decide": 2}])
def test_attributes(broken: dict[str, Any]) -> None:
    """A name, a truth value, a method."""
    policy = type("Broken", (Greedy,), broken)()
    with pytest.raises(AssertionError, match=next(iter(broken))):
        check_policy(policy)


def test_no_cases_is_no_check() -> None:
    """An empty list is refused."""
    with pytest.raises(AssertionError, match="no cases"):
        check_policy(Greedy(), worlds=[])


def test_cases_are_rich() -> None:
    """The default cases hold what they promise."""
    worlds = policy_worlds(zero_slot=True)
    assert any(w.settings.changes for w in worlds)
    assert {w.settings.resize for w in worlds} == {"pass", "anytime"}
    assert {w.settings.checkpoint for w in worlds} == {"pass", "immediate"}
    assert any((w.workload.size == 0).any() for w in worlds)
    assert any(not w.workload.preemptible.all() for w in worlds)
    assert any(len(w.workload.observed) for w in worlds)
    assert any((w.workload.target > 0).any() for w in worlds)
    assert any(g.max_concurrent for w in worlds for g in w.workload.groups)
    assert policy_worlds(3)[2].workload == policy_worlds(3)[2].workload
