"""Contention by bandwidth models, against the definition on states made by hand."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
from oracles.best_gpus import Tables
from toy_policies import Greedy

from optsched.bandwidth import ClusterState
from optsched.bandwidth.models import contention as sharing
from optsched.cluster import Job, Nodes, Workload, simulate
from optsched.cluster.contention import BandwidthContention, Placement
from optsched.errors import InputError

MODEL = Tables(random.Random(1), [4, 4, 4])


def placement(rows: list[dict[int, int]], partner: list[int]) -> Placement:
    """Jobs with GPUs by node."""
    jobs = Workload.of(Job(name=f"j{i}", sizes=(1,), work=1) for i in range(len(rows)))
    return Placement(
        job=np.arange(len(rows)), gpus=np.array([sum(r.values()) for r in rows]),
        rate=np.full(len(rows), 10**6), node_ptr=np.cumsum([0, *map(len, rows)]),
        joined=np.zeros(len(rows), bool),
        node=np.array([n for r in rows for n in r]), partner=np.array(partner),
        count=np.array([c for r in rows for c in r.values()]), workload=jobs,
    )  # fmt: skip


def test_factors_follow_the_shares() -> None:
    """Three jobs; two of them on two hosts, and both on host 1."""
    rows: list[dict[int, int]] = [{0: 2, 1: 2}, {1: 2, 2: 2}, {0: 2}]
    found = BandwidthContention(MODEL, 0.4).factors(placement(rows, [-1, -1, -1]))
    gpus = [(0, 1, 4, 5), (6, 7, 8, 9), (2, 3)]
    for i, own in enumerate(gpus):
        others = [_job(f"o{k}", gpus[k]) for k in range(3) if k != i]
        state = ClusterState.idle(MODEL.cluster).with_jobs(others)
        wants = list(sharing.demands(MODEL, state, "heavy"))
        got = sharing.share(MODEL, state, own, wants)
        assert found[i] == 1 / (1 + 0.4 * (got.standalone / got.value - 1))
    assert (found[:2] < 1).all() and found[2] == 1


def _job(name: str, gpus: tuple[int, ...]) -> Any:
    from optsched.bandwidth.topology.state import Job as Running

    return Running(name, gpus)


def test_alone_or_silent_is_full_speed() -> None:
    """No neighbour, no communication, or nobody asks for anything."""
    rows = [{0: 2, 1: 2}, {1: 2, 2: 2}]
    assert BandwidthContention(MODEL, 1).factors(placement(rows[:1], [-1])).tolist() == [1]
    assert BandwidthContention(MODEL, 0).factors(placement(rows, [-1, -1])).tolist() == [1, 1]
    quiet = BandwidthContention(MODEL, 1, traffic="idle")
    assert quiet.factors(placement(rows, [-1, -1])).tolist() == [1, 1]


def test_a_pair_holds_its_gpus_once() -> None:
    """Partners fill a node of four together."""
    found = BandwidthContention(MODEL, 0.5).factors(placement([{0: 4}, {0: 4}], [1, 0]))
    assert found.tolist() == [1, 1]


def test_in_a_simulation() -> None:
    """Two jobs across hosts slow each other, and end later than one after the other's end."""
    jobs = [Job(name=n, sizes=(6,), work=600 * 10**6) for n in "ab"]
    alone = simulate(jobs[:1], Greedy(), Nodes(3, 4)).jct
    both = simulate(jobs, Greedy(), Nodes(3, 4), contention=BandwidthContention(MODEL, 0.5))
    assert (both.jct > alone[0]).all()
    with pytest.raises(InputError, match="node 3 is no host"):
        simulate(jobs, Greedy(), Nodes(6, 2), contention=BandwidthContention(MODEL, 0.5))


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ((3, 0.5), "model"), ((MODEL, 1.5), "communication"), ((MODEL, float("nan")), "commun"),
    ],
)  # fmt: skip
def test_arguments(arguments: Any, told: str) -> None:
    """One sentence each."""
    with pytest.raises(InputError, match=told):
        BandwidthContention(*arguments)
