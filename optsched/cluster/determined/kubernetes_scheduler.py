"""Pods on Kubernetes: the default scheduler, and gangs (the coscheduling plugin).

A task is a pod, on one node; a group is a job, which works as soon as `Group.min_members` of its
pods run. Neither mode preempts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from optsched.cluster.determined.fitting import Outcome
from optsched.cluster.determined.reasons import never_or_not_now
from optsched.cluster.world.reasons import Reason, Why

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from optsched.cluster.determined.fitting import Agents, Places, Tasks


def place_pods(agents: Agents, tasks: Tasks, needed: Mapping[int, int], gang: bool) -> Outcome:
    """Place waiting pods by priority, then submission, where they fit; smaller pods may pass.

    The default scheduler takes pod by pod, so that two jobs with pods in turns can each hold
    half of the cluster and wait for ever. A gang starts only together with the `needed` pods of
    its job (by group), among them those that run.
    """
    queue = np.lexsort((np.arange(len(tasks.level)), tasks.level))
    queue = queue[~tasks.running[queue]]
    if not gang:
        return Outcome(_placed(agents.copy(), tasks, queue.tolist()), [])
    start: dict[int, Places] = {}
    for group in dict.fromkeys(tasks.group[queue].tolist()):
        trial = agents.copy()
        placed = _placed(trial, tasks, queue[tasks.group[queue] == group].tolist())
        if len(placed) + _running(tasks, group) >= needed[group]:
            start |= placed
            agents = trial
    return Outcome(start, [])


def pod_reasons(
    agents: Agents, tasks: Tasks, outcome: Outcome, needed: Mapping[int, int], gang: bool
) -> dict[int, Reason]:
    """Why pods wait."""
    after, answer = agents.copy(), {}
    for places in outcome.start.values():
        after.place(places)
    waiting = [i for i in np.flatnonzero(~tasks.running).tolist() if i not in outcome.start]
    text = never_or_not_now(agents, after, {int(tasks.kind[i]) for i in waiting}, tasks.kinds)
    for group in dict.fromkeys(tasks.group[waiting].tolist()):
        pods = [i for i in waiting if tasks.group[i] == group]
        started = sum(int(tasks.group[i]) == group for i in outcome.start)
        running, least = _running(tasks, group) + started, needed[group]
        together = Reason(Why.GANG, "")
        if gang and running < least:
            fit = len(_placed(after.copy(), tasks, pods))
            most = len(_placed(agents.idle(), tasks, np.flatnonzero(tasks.group == group).tolist()))
            together = Reason(Why.GANG, f"its job starts {least} pods together, {fit} of them fit")
            if most < least:
                text_ = f"its job starts {least} pods together, idle agents hold {most} of them"
                together = Reason(Why.NEVER, text_)
        for i in pods:
            reason = text.get(int(tasks.kind[i]), together)
            if together.text and reason.why is not Why.NEVER:
                reason = together
            elif 0 < running < least:
                job = f"its job holds the slots of {running} pods, but works with {least}"
                reason = reason._replace(text=f"{reason.text}; {job}")
            answer[i] = reason
    return answer


def _running(tasks: Tasks, group: int) -> int:
    return int((tasks.running & (tasks.group == group)).sum())


def _placed(agents: Agents, tasks: Tasks, pods: Sequence[int]) -> dict[int, Places]:
    """Pods that fit one after the other; takes their slots."""
    found = {}
    for i in pods:
        places = agents.find(tasks.kinds[tasks.kind[i]], int(tasks.first[i]))
        if places:
            agents.place(places)
            found[i] = places
    return found
