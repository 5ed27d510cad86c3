"""
Determined's priority scheduler, step by step
=============================================

The walk of its documentation, by its code and by its text.

Eight GPUs, preemption on, seven steps. The older text of the documentation says that nothing of a
worse priority starts while a task of a better one waits; the code, and the later text, backfill:
they part at step 6.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace
from typing import Literal

from optsched.cluster.determined import Agent, Group, State, Task, apply, priority

Variant = Literal["code", "docs"]

ROUNDS = 100
"""Decisions in a row at most: tasks whose queue positions contradict each other never settle."""


@dataclass
class Step:
    """What a step comes to: slots by experiment, and how many tasks were preempted on the way."""

    text: str
    running: dict[str, int] = field(default_factory=dict)
    waiting: dict[str, int] = field(default_factory=dict)
    preempted: int = 0


class Cluster:
    """A state, and the decisions of the scheduler until it has nothing more to say."""

    def __init__(self, variant: Variant) -> None:
        levels = {"asha": 2, "distributed": 1, "notebook": 3, "eight": 1, "four": 2}
        groups = tuple(Group(name, priority=level) for name, level in levels.items())
        self.state = State((Agent("node", 8),), (), groups)
        self.variant: Variant = variant
        self.steps: list[Step] = []

    def submit(self, group: str, slots: int, count: int = 1, preemptible: bool = True) -> None:
        """New tasks of an experiment."""
        time = len(self.steps)
        new = (
            Task(f"{group}-{i:02}", slots, group, preemptible, submitted=time) for i in range(count)
        )
        self.state = replace(self.state, tasks=(*self.state.tasks, *new))

    def end(self, *groups: str) -> None:
        """All tasks of these experiments are done or killed."""
        rest = tuple(task for task in self.state.tasks if task.group not in groups)
        self.state = replace(self.state, tasks=rest)

    def settle(self, text: str) -> None:
        """Decide and act until nothing changes; released tasks stop between two decisions."""
        step = Step(text)
        for _ in range(ROUNDS):
            decision = priority(self.state, preemption=True, variant=self.variant)
            if not decision:
                break
            self.state = apply(self.state, decision)
            step.preempted += len(decision.release)
        else:
            raise RuntimeError(
                f"{text}: not settled after {ROUNDS} rounds; do tasks with and without queue "
                "positions displace each other?"
            )
        running, waiting = Counter[str](), Counter[str]()
        for task in self.state.tasks:
            (running if task.is_running else waiting)[task.group or ""] += task.slots
        step.running, step.waiting = dict(running), dict(waiting)
        self.steps.append(step)


def walk(variant: Variant) -> list[Step]:
    """The seven steps, and what happens once the last experiment but one is done."""
    cluster = Cluster(variant)
    cluster.submit("asha", 1, count=20)
    cluster.settle("1. a search of 20 single-GPU trials, priority 2: 8 run")
    cluster.submit("distributed", 4)
    cluster.settle("2. a 4-GPU experiment, priority 1: 4 trials are preempted for it")
    cluster.submit("notebook", 1, preemptible=False)
    cluster.settle("3. a notebook, priority 3: it waits")
    cluster.end("asha", "distributed")
    cluster.settle("4. both experiments end: the notebook runs")
    cluster.submit("eight", 8)
    cluster.settle("5. an 8-GPU experiment, priority 1: it waits, a notebook is not preemptible")
    cluster.submit("four", 4)
    cluster.settle("6. a 4-GPU experiment, priority 2: backfilled by the code, not by the docs")
    cluster.end("notebook")
    cluster.settle("7. the notebook is killed: the 8-GPU experiment runs")
    cluster.end("eight")
    cluster.settle("   it ends: the 4-GPU experiment runs")
    return cluster.steps


def main() -> None:
    """Print both walks."""
    variants: tuple[Variant, ...] = ("code", "docs")
    for variant in variants:
        print(f"variant {variant}")
        for step in walk(variant):
            facts = [f"running {step.running}"]
            if step.waiting:
                facts.append(f"waiting {step.waiting}")
            if step.preempted:
                facts.append(f"preempted {step.preempted}")
            print(f"  {step.text}\n     {', '.join(facts)}")


if __name__ == "__main__":
    main()
