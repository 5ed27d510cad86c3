"""States of a cluster under a scheduler's verbs, against sets kept by hand."""

from __future__ import annotations

import random

import numpy as np

from optsched.bandwidth import Cluster, ClusterState, Host, HostType, Job

KINDS = (HostType("a", 4), HostType("b", 8), HostType("rack", 20, tray=4))


class Sets:
    """What every GPU is doing, and what jobs ask."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.free, self.down = set(range(cluster.n_gpus)), set[int]()
        self.jobs: dict[str, tuple[set[int], int | None]] = {}

    def check(self, state: ClusterState) -> None:
        """A state says the same, and its arrays are those of the state made anew."""
        jobs = tuple(Job(name, tuple(sorted(g)), d) for name, (g, d) in self.jobs.items())
        anew = ClusterState(self.cluster, tuple(self.free), jobs, tuple(self.down))
        assert anew == state and hash(anew) == hash(state)
        for array in ("masks", "held", "room"):
            assert np.array_equal(getattr(anew, array), getattr(state, array)), array


def test_verbs() -> None:
    """take, give, resize, move, fail and repair in any order; words mean the same GPUs."""
    for seed in range(60):
        rng = random.Random(seed)
        hosts = tuple(Host(f"n{i}", rng.choice(KINDS).name) for i in range(4))
        cluster = Cluster(hosts, KINDS)
        state, sets = ClusterState.idle(cluster), Sets(cluster)
        if rng.random() < 0.8:
            sets.check(state)  # arrays are there from now on
        for step in range(25):
            verb = rng.choice(["take", "give", "resize", "move", "fail", "repair"])
            name = rng.choice([*sets.jobs, ""])
            own = sets.jobs[name][0] if name else set()
            some = sorted(sets.free | own if verb == "move" else sets.free)
            if verb == "take" and some:
                gpus, name = set(rng.sample(some, rng.randint(1, min(6, len(some))))), f"j{step}"
                demand = rng.choice([None, 5])
                sets.jobs[name] = gpus, demand
                sets.free -= gpus
                state = state.take([*gpus], name, demand)
            elif verb == "give" and name:
                sets.free |= sets.jobs.pop(name)[0]
                state = state.give(name)
            elif verb in ("resize", "move") and name:
                gpus = set(rng.sample(some, min(len(own) if verb == "move" else 3, len(some))))
                if verb == "resize":
                    gpus = own | gpus if rng.random() < 0.5 else set(sorted(own)[:2])
                sets.free = (sets.free | own) - gpus
                sets.jobs[name] = gpus, sets.jobs[name][1]
                assert state.job(name).gpus == tuple(sorted(own))
                state = getattr(state, verb)(name, gpus)
            elif verb in ("fail", "repair"):
                gpus = set(rng.sample(range(cluster.n_gpus), rng.randint(0, 9)))
                hit = {job for job, (held, _) in sets.jobs.items() if held & gpus}
                assert {*state.jobs_on(gpus)} == hit
                given = cluster.written(gpus) if rng.random() < 0.5 else gpus
                if verb == "repair":
                    sets.free |= sets.down & gpus
                    sets.down -= gpus
                else:
                    sets.free -= gpus
                    sets.down |= gpus
                    left = {job: (held - gpus, d) for job, (held, d) in sets.jobs.items()}
                    sets.jobs = {job: one for job, one in left.items() if one[0]}
                state = getattr(state, verb)(given)
            if rng.random() < 0.7:
                sets.check(state)
        sets.check(state)
        assert cluster.parse(cluster.written(state.free)) == state.free


def test_a_host_fails() -> None:
    """Its jobs keep what they have elsewhere; repair gives the GPUs back, not to the jobs."""
    cluster = Cluster.uniform(KINDS[0], 3)
    state = ClusterState.idle(cluster).take("n01:0-1 n02:0", "a", 7).take("n01:2", "b")
    assert state.jobs_on("n01") == ("a", "b")
    failed = state.fail("n01").fail("n01:3")
    assert failed.jobs == (Job("a", (4,), 7),) and failed.down == (0, 1, 2, 3)
    assert failed.jobs_on("n02:0 n01") == ("a",) and failed.jobs_on("n01") == ()
    assert failed.repair("n01 n02").free == (0, 1, 2, 3, 5, 6, 7, 8, 9, 10, 11)
