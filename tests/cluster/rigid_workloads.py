"""Hypothesis strategies for rigid jobs on small clusters."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from optsched.cluster import Amdahl, Group, Job, Linear, Log, Nodes, Workload

SECOND = 10**6


def workload(submit: list[int], gpus: list[int], duration: list[int]) -> Workload:
    """Trace rows as jobs."""
    return Workload.of(
        Job(name=f"j{i}", submit=s, sizes=(g,), work=d * g * SECOND)
        for i, (s, g, d) in enumerate(zip(submit, gpus, duration, strict=True))
    )


@st.composite
def clusters(draw: st.DrawFn, most: int = 25) -> tuple[Workload, Nodes, dict[str, Any]]:
    """Jobs with estimates, speed-ups, several sizes and passes; nodes; arguments of `simulate`."""
    capacity = draw(st.lists(st.sampled_from([1, 2, 4, 8]), min_size=1, max_size=5))
    total = sum(capacity)
    horizon, longest = draw(st.sampled_from([0, 8, 100])), draw(st.sampled_from([3, 40, 300]))
    plain = draw(st.booleans())
    gang = st.one_of(st.sampled_from([1, 1, 2, 4]), st.integers(1, total))
    jobs = []
    for i in range(draw(st.integers(1, most))):
        sizes = {min(draw(gang), total)}
        if draw(st.integers(0, 4)) == 0:
            sizes |= {min(draw(gang), total)}
        odd = draw(st.sampled_from([0, 0, 1, 999_999]))
        work = draw(st.integers(1, longest)) * max(sizes) * SECOND + odd
        factor = 1.0 if plain else draw(st.sampled_from([1.0, 0.01, 0.5, 2.0]))
        jobs.append(Job(
            name=f"j{i}", submit=draw(st.integers(0, horizon)), sizes=tuple(sorted(sizes)),
            work=work, estimate=int(work * factor),
            speedup=draw(st.sampled_from([Linear(), Amdahl(0.3)])),
            passes=1 if plain else draw(st.sampled_from([1, 3])),
            restart_cost=draw(st.sampled_from([None, None, 0, 7])),
            preemptible=plain or draw(st.integers(0, 5)) > 0,
            group=draw(st.sampled_from(["", "", "g"])),
        ))  # fmt: skip
    settings = {
        "restart_cost": draw(st.sampled_from([0, 5, 40])),
        "round": 0 if plain else draw(st.sampled_from([0, 7])),
        "checkpoint": "immediate" if plain else draw(st.sampled_from(["immediate", "pass"])),
    }
    limit = draw(st.sampled_from([None, 1, 3]))
    return (
        Workload.of(jobs, groups=[Group("g", max_concurrent=limit)]),
        Nodes.of(capacity),
        settings,
    )


def same(first: Log, second: Log) -> bool:
    """Whether two logs are equal in every column."""
    return all(
        (a is None and b is None) or (a is not None and b is not None and a.tolist() == b.tolist())
        for a, b in zip(first, second, strict=True)
    )
