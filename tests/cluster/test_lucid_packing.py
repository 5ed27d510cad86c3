"""Lucid's packing: events against ticks, halves of GPUs, and the policy's own decisions."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from lucid_packing_oracle import Packed
from lucid_packing_oracle import simulate as tick
from rigid_workloads import SECOND

from optsched.cluster import Job, Nodes, Workload
from optsched.cluster.contention import PackingTable
from optsched.cluster.policies import get
from optsched.cluster.simulate import simulate
from optsched.cluster.world.log import HALF_A, HALF_B, WHOLE
from optsched.model.verify import verify

KINDS = ("a", "b", "c")


@st.composite
def tables(draw: st.DrawFn) -> tuple[PackingTable, dict]:
    """A table, and its speeds in millionths, both ways round."""
    speed = st.sampled_from([0.333333, 0.5, 0.61, 0.75, 0.9, 1.0])
    speeds, whole = {}, {}
    for i, own in enumerate(KINDS):
        for host in KINDS[i:]:
            if draw(st.integers(0, 5)) == 0:
                continue
            pair = (draw(speed),) * 2 if own == host else (draw(speed), draw(speed))
            speeds[own, host] = pair
            both = tuple(int(Fraction(str(s)) * SECOND) for s in pair)
            whole[own, host], whole[host, own] = both, both[::-1]
    memory = {kind: float(draw(st.sampled_from([2000, 9000, 13000]))) for kind in KINDS}
    score = {kind: float(draw(st.integers(0, 2))) for kind in KINDS}
    return PackingTable(speeds, memory, score), whole


@st.composite
def packed_jobs(draw: st.DrawFn) -> list[tuple[int, int, int, str, float]]:
    """Rows of submit, gpus, duration, kind, estimate."""
    horizon, longest = draw(st.sampled_from([0, 60, 600])), draw(st.sampled_from([4, 60, 900]))
    row = st.tuples(
        st.integers(0, horizon), st.sampled_from([1, 1, 1, 2, 2, 4, 8, 3, 16, 12]),
        st.integers(1, longest), st.sampled_from(KINDS), st.sampled_from([1.0, 1.0, 0.3, 2.0]),
    )  # fmt: skip
    return sorted(draw(st.lists(row, min_size=1, max_size=35)), key=lambda r: r[0])


def workload(rows: list[tuple[int, int, int, str, float]]) -> Workload:
    """Rows as jobs; the type is the template."""
    return Workload.of(
        Job(
            name=f"j{i}",
            submit=s,
            sizes=(g,),
            work=d * g * SECOND,
            template=kind,
            estimate=int(e * d * g * SECOND),
        )
        for i, (s, g, d, kind, e) in enumerate(rows)
    )


@given(packed_jobs(), tables(), st.sampled_from([2, 3, 4, 8]))
def test_events_equal_ticks(rows, table, nodes):
    """Every job's end, with pairs that come and go."""
    table, speeds = table
    jobs = workload(rows)
    run = simulate(jobs, get("lucid", table=table), Nodes(nodes), timing="lucid")
    cost = -(-jobs.estimate // jobs.rate) * jobs.size
    slow = [
        Packed(s, g, kind, int(c), d * SECOND)
        for (s, g, d, kind, _), c in zip(rows, cost, strict=True)
    ]
    finished = tick(slow, nodes, speeds, table.memory, table.share_score, 24576.0)
    assert run.log.finished.tolist() == finished


@given(packed_jobs(), tables(), st.sampled_from(["lucid", "event"]))
def test_history_is_accepted(rows, table, timing):
    """Halves of GPUs are held by one job at a time, in both timings."""
    table, _ = table
    more = {"contention": table} if timing == "event" else {}
    run = simulate(workload(rows), get("lucid", table=table), Nodes(3), timing=timing, **more)
    assert verify(run.history) == []
    assert (run.log.finished > 0).all()


@pytest.mark.parametrize("timing", ["lucid", "event"])
def test_a_pair_shares_and_slows(timing):
    """Two jobs of 8 GPUs on one node: at 0.5 each, both need twice the time together."""
    table = PackingTable({("a", "a"): (0.5, 0.5)}, {"a": 1.0}, {"a": 1.0})
    jobs = workload([(0, 8, 100, "a", 1.0), (10, 8, 100, "a", 1.0)])
    more = {"contention": table} if timing == "event" else {}
    run = simulate(jobs, get("lucid", table=table), Nodes(1), timing=timing, **more)
    late = int(timing == "lucid")
    # 90 s are left at t = 10, which takes 180 s; then 10 s are left of the other
    assert run.log.finished.tolist() == [190 + late, 200 + late]
    assert run.log.half.tolist() == [HALF_A, HALF_B]
    assert run.log.partner is not None
    assert run.log.partner.tolist() == [-1, 0]
    alone = simulate(jobs, "lucid", Nodes(1), timing=timing).log
    assert alone.half.tolist() == [WHOLE, WHOLE]
    assert alone.finished.tolist() == [100 + late, 200 + 2 * late]


@pytest.mark.parametrize(
    ("memory", "score", "estimate", "packs"),
    [
        (1.0, 1.0, 1.0, True), (12.0, 1.0, 1.0, False), (11.9, 1.0, 1.0, True),
        (1.0, 1.5, 1.0, False), (1.0, 1.0, 2.0, True), (1.0, 1.0, 2.1, False),
    ],
)  # fmt: skip
def test_conditions_of_a_pair(memory, score, estimate, packs):
    """Memory below the limit, scores of at most 2, at most twice the partner's cost."""
    table = PackingTable({("a", "a"): (1.0, 1.0)}, {"a": memory}, {"a": score})
    jobs = workload([(0, 4, 100, "a", 1.0), (10, 4, 100, "a", estimate)])
    policy = get("lucid", table=table, memory_limit=24.0)
    for timing, more in (("lucid", {}), ("event", {"contention": table})):
        half = simulate(jobs, policy, Nodes(1), timing=timing, **more).log.half
        assert bool(np.any(half != WHOLE)) == packs
