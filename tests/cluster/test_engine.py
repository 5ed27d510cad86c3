"""The event-driven engine against a plain tick simulator."""

from __future__ import annotations

import random
from functools import partial
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from tick_oracle import simulate_by_ticks
from toy_policies import Anything

from optsched.cluster import (
    ClusterView,
    Group,
    Job,
    NodeChange,
    Nodes,
    PackingTable,
    Settings,
    Workload,
)
from optsched.cluster.world.engine import simulate_generic

TABLE = PackingTable({("x", "x"): (0.5, 0.8), ("x", "y"): (0.7, 0.6), ("y", "y"): (1.2, 0.4)})


class Slow:
    """A speed-up whose rates are no round numbers."""

    def of(self, gpus: int) -> float:
        """Sublinear."""
        return float(gpus) ** 0.731


def random_world(seed: int) -> tuple[Workload, Nodes, Settings]:
    """A small cluster with everything that can happen, rich from the first seed on."""
    dice = random.Random(seed)
    gpus = [dice.randint(1, 4) for _ in range(dice.randint(1, 4))]
    nodes = Nodes.of(gpus, zero_slots=dice.randint(1, 2))
    rows = [(1,), (2,), (1, 2), (1, 2, 4), (2, 3), (1, 3), (2, 4), (0,)]
    jobs = []
    for i in range(dice.randint(2, 9)):
        sizes = tuple(s for s in dice.choice(rows) if s <= nodes.total) or (1,)
        jobs.append(
            Job(
                name=f"j{i}", submit=dice.randint(0, 25), sizes=sizes,
                work=dice.randint(8, 60 * 10**6), passes=dice.randint(1, 8), speedup=Slow(),
                preemptible=dice.random() < 0.8, estimate=dice.randint(8, 60 * 10**6),
                restart_cost=dice.choice([None, 0, 3]), template=dice.choice("xy"),
                group=dice.choice(["", "g"]),
            )
        )  # fmt: skip
    workload = Workload.of(jobs, groups=[Group("g", max_concurrent=dice.choice([None, 1, 2]))])
    changes = [
        NodeChange(time, dice.randrange(len(gpus)), dice.choice(["add", "drain", "remove"]))
        for time in dice.choices(range(50), k=dice.choice([0, 0, 2, 5]))
    ]
    for change in changes[:2]:  # at one instant: drained and removed, or gone and back
        changes.append(NodeChange(change.time, change.node, dice.choice(["add", "remove"])))
    changes += [NodeChange(1000 + i, i, "add") for i in range(len(gpus)) if changes]
    return workload, nodes, Settings(
        restart_cost=dice.randint(0, 4), resize=dice.choice(["pass", "anytime"]),
        checkpoint=dice.choice(["immediate", "pass"]), changes=tuple(changes),
        round=dice.choice([0, 0, 5]),
    )  # fmt: skip


worlds = partial(st.builds, random_world, st.integers(0, 2**32))


def stays(log: Any) -> list[list[Any]]:
    """Rows of a log, as the oracle writes them."""
    rows = []
    for i in range(len(log.job)):
        on = slice(log.node_ptr[i], log.node_ptr[i + 1])
        rows.append(
            [*(int(getattr(log, key)[i])
               for key in ("job", "start", "end", "restart", "gpus", "half", "work")),
             dict(zip(log.node[on].tolist(), log.count[on].tolist(), strict=True))]
        )  # fmt: skip
    return rows


def compared(workload: Workload, nodes: Nodes, how: Settings, policy: Any) -> Any:
    """Simulate both ways, and compare all that came of it; the log."""
    plain = simulate_by_ticks(workload, policy, nodes, how)
    log = simulate_generic(workload, policy, nodes, how).log
    assert log.finished.tolist() == plain.finished
    assert log.preemptions.tolist() == plain.preemptions
    assert stays(log) == plain.stays
    return log


@given(worlds(), st.integers(0, 10**6))
def test_everything_against_ticks(world: Any, seed: int) -> None:
    """Passes, resizes, restarts, losses, packing, named nodes, drains, groups, rounds, wake-ups."""
    log = compared(*world, Anything(seed, table=TABLE if seed % 2 else None))
    assert (log.finished >= 0).all()


@given(worlds(), st.integers(0, 10**6))
def test_views_are_the_oracles(world: Any, seed: int) -> None:
    """Every column of every view, also the lazy ones."""
    workload, nodes, how = world
    seen: list[dict[str, Any]] = []

    class Watched(Anything):
        def decide(self, view: Any) -> Any:
            seen.append({
                key: np.array(getattr(view, key)) for key in ClusterView.__dataclass_fields__
                if key not in ("workload", "settings", "nodes")
            })  # fmt: skip
            return super().decide(view)

    simulate_generic(workload, Watched(seed, table=TABLE), nodes, how)
    events, seen = seen, []
    simulate_by_ticks(workload, Watched(seed, table=TABLE), nodes, how)
    assert len(events) == len(seen)
    for one, other in zip(events, seen, strict=True):
        for key, value in one.items():
            assert np.array_equal(value, other[key]), (key, one["time"], value, other[key])
