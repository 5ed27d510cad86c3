"""Pods on Kubernetes: the default scheduler, and gangs (the coscheduling plugin).

A task is a pod, on one node; a group is a job, which works as soon as `Group.min_members` of its
pods run. Neither mode preempts.
"""

from __future__ import annotations

from functools import cache, partial
from typing import TYPE_CHECKING

import numpy as np

from optsched.cluster.determined.fitting import Outcome, explained, place_each, unplaced
from optsched.cluster.world.policy import Reason, Why

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from optsched.cluster.determined.fitting import Agents, Explain, Places, Tasks


def place_pods(
    agents: Agents, tasks: Tasks, needed: Mapping[int, int], gang: bool
) -> tuple[Outcome, Explain]:
    """Place waiting pods by priority, then submission, where they fit; smaller pods may pass.

    The default scheduler takes pod by pod, so that two jobs with pods in turns can each hold
    half of the cluster and wait for ever. A gang starts only together with the `needed` pods of
    its job (by group), among them those that run.
    """
    queue = np.argsort(tasks.level, kind="stable")
    queue = queue[~tasks.running[queue]]
    running = np.bincount(tasks.group, tasks.running)
    start: dict[int, Places] = {} if gang else place_each(agents.copy(), tasks, queue)
    now = agents
    for group in dict.fromkeys(tasks.group[queue].tolist()) if gang else ():
        trial = now.copy()
        placed = place_each(trial, tasks, queue[tasks.group[queue] == group])
        if len(placed) + running[group] >= needed[group]:
            start |= placed
            now = trial
    outcome = Outcome(start)
    return outcome, partial(_reasons, agents, tasks, outcome, needed, gang)


def _reasons(
    agents: Agents, tasks: Tasks, outcome: Outcome, needed: Mapping[int, int], gang: bool,
    names: Sequence[str],
) -> dict[int, Reason]:  # fmt: skip
    """Why pods wait."""
    after, found = unplaced(agents, tasks, outcome, range(len(tasks.group)))
    works = tasks.running.copy()
    works[[*outcome.start]] = True
    running = np.bincount(tasks.group, works).astype(int)

    @cache
    def together(group: int) -> Reason:
        every, least = np.flatnonzero(tasks.group == group), needed[group]
        text = f"its job starts {least} pods together"
        most = len(place_each(agents.idle(), tasks, every))
        if most < least:
            few = f"it has {len(every)}" if len(every) < least else f"idle agents hold {most}"
            return Reason(Why.NEVER, f"{text}, {few}")
        fit = len(place_each(after.copy(), tasks, every[~works[every]]))
        return Reason(Why.GANG, f"{text}, {fit} of them fit")

    def of_its_job(i: int, misfit: Reason | None) -> Reason | None:
        group = int(tasks.group[i])
        if running[group] >= needed[group]:
            return None
        if gang and needed[group] > 1:
            return together(group)
        assert misfit, "a pod that fits alone is placed"
        job = f"its job holds the slots of {running[group]} pods, but works with {needed[group]}"
        return misfit._replace(text=f"{misfit.text}; {job}") if running[group] else None

    return explained(names, outcome, found, (), of_its_job)
