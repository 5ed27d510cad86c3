"""States of a cluster under a scheduler's verbs, against sets kept by hand."""

from __future__ import annotations

import json
import random
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from optsched.bandwidth import Cluster, ClusterState, Host, HostType, Job
from optsched.bandwidth.topology.documents import state_from_tree as from_tree
from optsched.bandwidth.topology.documents import state_json as to_json
from optsched.bandwidth.topology.rates import MOST
from optsched.errors import InputError

if TYPE_CHECKING:
    from pathlib import Path

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


# the document ``optsched.state/1``: nothing is lost, nothing wrong is read

CLUSTER = Cluster(
    (Host("n-01", "h"), Host("b.2", "rack"), Host("n03", "h")),
    (HostType("h", 4), HostType("rack", 20)),
)


@st.composite
def states(draw: st.DrawFn) -> ClusterState:
    """Any split of the GPUs into free ones, up to four jobs, and those down."""
    owner = [draw(st.integers(0, 5)) for _ in range(CLUSTER.n_gpus)]
    held: list[list[int]] = [[g for g, who in enumerate(owner) if who == w] for w in range(6)]
    names = draw(
        st.lists(st.text("aü \"'\\:", min_size=1, max_size=4), min_size=4, max_size=4, unique=True)
    )
    jobs = tuple(
        Job(name, tuple(gpus), draw(st.none() | st.integers(0, MOST - 1)))
        for name, gpus in zip(names, held[2:], strict=True)
        if gpus
    )
    return ClusterState(CLUSTER, tuple(held[0]), jobs, tuple(held[1]))


@given(states())
def test_round_trip(state: ClusterState) -> None:
    """The same state, demands to the kB/s, and the same text again."""
    text = to_json(state)
    again = from_tree(json.loads(text), CLUSTER, "s")
    assert again == state
    assert to_json(again) == text


def test_files(tmp_path: Path) -> None:
    """By way of a file, in words that people write; faults name it."""
    path = tmp_path / "s.json"
    path.write_text(
        '{"format": "optsched.state/1", "free": "n-01:0-2 b.2", "down": "n03:1-3",'
        ' "jobs": [{"name": "a", "gpus": "n03:0 n-01:3", "demand": 120.5}]}'
    )
    state = ClusterState.read(path, CLUSTER)
    assert (len(state.free), len(state.down)) == (23, 3)
    assert state.jobs == (Job("a", (3, 24), 120_500_000),)
    state.write(path)
    assert ClusterState.read(path, CLUSTER) == state
    path.write_text("{")
    with pytest.raises(InputError, match=r"s\.json:1:\d: not valid JSON"):
        ClusterState.read(path, CLUSTER)


JOB = {"name": "a", "gpus": "n03"}
BAD: list[tuple[dict[str, Any], str]] = [
    ({"format": "optsched.state/9"}, "s: format: .* is newer"),
    ({"jbos": []}, 's: top level: unknown field "jbos"'),
    ({"jobs": [{**JOB, "demands": 3}]}, r's: jobs\[0\]: unknown field "demands"'),
    ({"jobs": [{"name": "a"}]}, r's: jobs\[0\]: the field "gpus" is missing'),
    ({"jobs": [{**JOB, "demand": "3"}]}, r"s: jobs\[0\]\.demand: expected"),
    ({"jobs": [{**JOB, "demand": -3}]}, r"s: jobs\[0\]\.demand: expected GB/s >= 0"),
    ({"jobs": [{**JOB, "demand": 4e4}]}, r"s: jobs\[0\]\.demand: .*MB/s\?"),
    ({"jobs": [{**JOB, "gpus": "n09"}]}, r"s: jobs\[0\]\.gpus: there is no host 'n09'"),
    ({"jobs": [{**JOB, "gpus": "n03:4"}]}, r"s: jobs\[0\]\.gpus: 'n03:4': expected ids in 0\.\.3"),
    ({"jobs": [{**JOB, "gpus": "n03:0,0"}]}, "s: .*GPU n03/0 is given twice"),
    ({"jobs": [{**JOB, "gpus": ""}]}, "s: .*holds no GPU"),
    ({"jobs": [JOB, JOB]}, "s: jobs: expected distinct names"),
    ({"jobs": [{**JOB, "name": ""}]}, "s: jobs: expected distinct names"),
    ({"free": "n-01 b.2 n03:0", "jobs": [JOB]}, "s: GPU n03/0 is in two places: free and job 'a'"),
    ({"down": "n-01:0"}, "s: GPU n-01/0 is in two places: free and down"),
    ({"free": "n-01 b.2:0-18", "jobs": [JOB]}, r"s: 1 GPUs are neither .* b\.2:19"),
    ({"free": 3}, "s: free: expected a string, got 3"),
]


@pytest.mark.parametrize("at", range(len(BAD)))
def test_refused(at: int) -> None:
    """One field changed: the message has the file, the path and the rule."""
    change, message = BAD[at]
    tree = {"format": "optsched.state/1", "free": "n-01 b.2", "jobs": [JOB]}
    from_tree(tree, CLUSTER, "s")
    with pytest.raises(InputError, match=message):
        from_tree({**tree, **change}, CLUSTER, "s")
