"""`check_policy` passes good policies and says what is wrong with bad ones."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from depth import depth
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
