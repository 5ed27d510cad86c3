"""Small random clusters with work for them, on which policies are tested."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, NamedTuple

from optsched.cluster.workload.job import WORK, Curve, Job
from optsched.cluster.workload.nodes import NodeChange, Nodes
from optsched.cluster.workload.speedup import Amdahl
from optsched.cluster.workload.workload import Group, Workload
from optsched.cluster.world.settings import Settings

if TYPE_CHECKING:
    from typing import Any

_RIGID = ((1,), (1,), (2,), (3,), (4,), (6,))
_ELASTIC = ((1, 2), (1, 2, 3, 4), (1, 2, 4), (2, 3), (2, 4, 8))


class World(NamedTuple):
    """One case; `name` is for messages."""

    name: str
    workload: Workload
    nodes: Nodes
    settings: Settings


def policy_worlds(
    count: int = 40, *, seed: int = 0, zero_slot: bool = False, non_preemptible: bool = True
) -> list[World]:
    """Cases of all kinds: gangs, elastic jobs, passes, curves, targets, groups, restarts, nodes."""
    return [_world(seed + i, i, zero_slot, non_preemptible) for i in range(count)]


def _world(seed: int, index: int, zero_slot: bool, non_preemptible: bool) -> World:
    dice = random.Random(f"policy world {seed}")
    sizes = [dice.choice((2, 4)) for _ in range(dice.randint(1, 4))]
    nodes = Nodes.of(sizes, zero_slots=2)
    kind = ("rigid", "elastic", "mixed")[index % 3]
    rows = {"rigid": _RIGID, "elastic": _ELASTIC, "mixed": _RIGID + _ELASTIC}[kind]
    jobs = [_job(dice, i, rows, nodes.total, non_preemptible) for i in range(dice.randint(3, 12))]
    if zero_slot:
        jobs += [
            Job(name=f"z{i}", submit=7 * i, sizes=(0,), work=dice.randint(1, 20) * WORK)
            for i in range(3)
        ]  # fmt: skip
    groups = [Group("a", 1.0), Group("b", 2.0, max_concurrent=dice.choice([None, 2]))]
    changes: list[NodeChange] = []
    if index % 4 == 3 and len(sizes) > 1:
        out = dice.choice(("drain", "remove"))
        changes = [NodeChange(dice.randint(5, 40), 0, out), NodeChange(60, 0, "add")]  # type: ignore[arg-type]
    settings = Settings(
        restart_cost=dice.choice((0, 0, 3)),
        resize="anytime" if index % 5 == 4 else "pass",
        checkpoint="pass" if index % 7 == 6 else "immediate",
        round=dice.choice((0, 0, 10)),
        changes=tuple(changes),
    )
    workload = Workload.of(jobs, groups=groups, name=f"policy-{kind}-{seed}", seed=seed)
    return World(f"case {index} ({kind}, seed {seed})", workload, nodes, settings)


def _job(dice: random.Random, i: int, rows: Any, total: int, non_preemptible: bool) -> Job:
    row = tuple(size for size in dice.choice(rows) if size <= total) or (1,)
    passes = dice.choice((1, 1, 4, 9))
    pass_time = dice.randint(1, 12)
    template = dice.choice(("", "x", "y"))
    curve, to_target = None, False
    if template and passes > 1:
        to_target = i % 2 == 0
        target = 0.3 if to_target else None
        curve = Curve(0.9, 0.1, dice.uniform(0.2, 0.6), target=target, noise=0.02)
    submit = dice.choice((0, dice.randint(0, 50)))
    work = passes * pass_time * WORK * dice.randint(1, 3) + dice.randint(0, WORK)
    return Job(
        name=f"j{i}",
        submit=submit,
        sizes=row,
        work=work,
        speedup=Amdahl(dice.choice((0.0, 0.1, 0.5))),
        passes=passes,
        curve=curve,
        priority=dice.randint(1, 99),
        weight=dice.choice((0.5, 1.0, 2.0)),
        group=dice.choice(("a", "b")),
        preemptible=not (non_preemptible and dice.random() < 0.2),
        template=template,
        estimate=int(dice.choice((0.5, 1.0, 1.7)) * work),
    )
