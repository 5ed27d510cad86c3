"""Scenarios: valid states, the promised numbers, repeatable by seed."""

from __future__ import annotations

import pytest

from benchmarks.bandwidth.scenarios import SIZES, packed, uniform
from optsched.bandwidth import Cluster, ClusterState, Host, HostType
from optsched.bandwidth.topology.proximity import proximity
from optsched.errors import InputError


def cluster(sizes=(4, 4, 2)):  # type: ignore[no-untyped-def]
    """Hosts of these sizes."""
    kinds = {n: HostType(f"t{n}", n) for n in sizes}
    hosts = tuple(Host(f"n{i}", f"t{n}") for i, n in enumerate(sizes))
    return Cluster(hosts, tuple(kinds.values()))


@pytest.mark.parametrize("busy", ["pooled", "tenants"])
def test_uniform(busy):  # type: ignore[no-untyped-def]
    """Every k so often as promised, k..N GPUs free, the others held by the jobs that are named."""
    where = cluster()
    seen = list(uniform(where, busy=busy, repeats=40, seed=3))
    assert [k for _, k in seen] == [k for k in range(2, 10) for _ in range(40)]
    for state, k in seen:
        assert isinstance(state, ClusterState) and k <= len(state.free) <= 10 and not state.down
        held = [g for job in state.jobs for g in job.gpus]
        assert len(held) + len(state.free) == 10
        if busy == "pooled":
            assert len(state.jobs) == (len(state.free) < 10)
        else:
            assert all(len(job.gpus) in SIZES for job in state.jobs)
            left = sorted(held)
            for job in state.jobs:
                assert job.gpus == proximity(where, left, len(job.gpus))
                left = [g for g in left if g not in job.gpus]
    for k in (2, 9):
        free = {len(state.free) for state, asked in seen if asked == k}
        assert free == set(range(k, 11))
    often = [sum(g in state.free for state, k in seen if k == 2) for g in range(10)]
    assert min(often) > 10 and max(often) < 38


def test_seeds():  # type: ignore[no-untyped-def]
    """Same seed, same states; other seeds, other states."""
    where = cluster()
    for make in (
        lambda seed: uniform(where, repeats=5, seed=seed),
        lambda seed: uniform(where, repeats=5, seed=seed, busy="tenants"),
        lambda seed: packed(where, repeats=5, seed=seed),
    ):
        assert list(make(1)) == list(make(1)) != list(make(2))


@pytest.mark.parametrize("sizes", [(4, 4, 2), (8, 8, 8, 8), (1, 1, 6), (5,)])
def test_packed(sizes):  # type: ignore[no-untyped-def]
    """A job has at most one host that is not all its own."""
    where = cluster(sizes)
    several = across = 0
    for state, k in packed(where, repeats=25, seed=1, wanted=range(1, where.n_gpus + 1)):
        assert k <= len(state.free)
        for job, held in zip(state.jobs, state.held, strict=True):
            assert sum(0 < c < n for c, n in zip(held, where.sizes, strict=True)) <= 1
            assert len(job.gpus) <= max(SIZES)
            across += (held > 0).sum() > 1 and (held < where.sizes)[held > 0].any()
        several += len(state.jobs) > 1
    assert several > 10
    assert across > 10 or sizes in [(5,), (1, 1, 6)]
    rooms = [len(s.free) for s, k in packed(where, repeats=400, seed=2, wanted=[1])]
    assert set(rooms) == set(range(1, where.n_gpus + 1))


@pytest.mark.parametrize(
    ("call", "field"),
    [
        (lambda c: uniform(c, busy="none"), "busy"),
        (lambda c: uniform(c, repeats=-1), "repeats"),
        (lambda c: uniform(c, repeats=True), "repeats"),
        (lambda c: uniform(c, wanted=[11]), "wanted"),
        (lambda c: uniform(c, wanted=[0]), "wanted"),
        (lambda c: packed(c, seed="x"), "seed"),
        (lambda c: packed(c, wanted=[2.5]), "wanted"),
    ],
)
def test_hostile(call, field):  # type: ignore[no-untyped-def]
    """What cannot be is refused at the call, and by name."""
    with pytest.raises(InputError, match=field):
        call(cluster())
