"""Pods on Kubernetes: the default scheduler, and gangs (the coscheduling plugin).

A task is a pod, on one node; a group is a job, which works as soon as `Group.min_members` of its
pods run. Neither mode preempts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from optsched.cluster.determined.fitting import Outcome, place_each
from optsched.cluster.determined.reasons import unplaced
from optsched.cluster.world.reasons import Reason, Why

if TYPE_CHECKING:
    from collections.abc import Mapping

    from optsched.cluster.determined.fitting import Agents, Places, Tasks


def place_pods(agents: Agents, tasks: Tasks, needed: Mapping[int, int], gang: bool) -> Outcome:
    """Place waiting pods by priority, then submission, where they fit; smaller pods may pass.

    The default scheduler takes pod by pod, so that two jobs with pods in turns can each hold
    half of the cluster and wait for ever. A gang starts only together with the `needed` pods of
    its job (by group), among them those that run.
    """
    queue = np.argsort(tasks.level, kind="stable")
    queue = queue[~tasks.running[queue]]
    if not gang:
        return Outcome(place_each(agents.copy(), tasks, queue))
    start: dict[int, Places] = {}
    for group in dict.fromkeys(tasks.group[queue].tolist()):
        trial = agents.copy()
        placed = place_each(trial, tasks, queue[tasks.group[queue] == group])
        if len(placed) + _running(tasks, group) >= needed[group]:
            start |= placed
            agents = trial
    return Outcome(start)


def pod_reasons(
    agents: Agents, tasks: Tasks, outcome: Outcome, needed: Mapping[int, int], gang: bool
) -> dict[int, Reason]:
    """Why pods wait."""
    after, found = unplaced(agents, tasks, outcome, range(len(tasks.group)))
    answer = {}
    for group in dict.fromkeys(tasks.group[[*found]].tolist()):
        pods = [i for i in found if tasks.group[i] == group]
        started = sum(int(tasks.group[i]) == group for i in outcome.start)
        running, least = _running(tasks, group) + started, needed[group]
        together = None
        if gang and running < least:
            fit = len(place_each(after.copy(), tasks, pods))
            every = np.flatnonzero(tasks.group == group)
            most = len(place_each(agents.idle(), tasks, every))
            text = f"its job starts {least} pods together"
            together = Reason(Why.GANG, f"{text}, {fit} of them fit")
            if most < least:
                few = f"it has {len(every)}" if len(every) < least else f"idle agents hold {most}"
                together = Reason(Why.NEVER, f"{text}, {few}")
        for i in pods:
            reason = found[i] or together
            assert reason, "a pod that fits alone is placed"
            if together and reason.why is not Why.NEVER:
                reason = together
            elif 0 < running < least:
                job = f"its job holds the slots of {running} pods, but works with {least}"
                reason = reason._replace(text=f"{reason.text}; {job}")
            answer[i] = reason
    return answer


def _running(tasks: Tasks, group: int) -> int:
    return int((tasks.running & (tasks.group == group)).sum())
