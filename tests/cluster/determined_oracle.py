"""Determined's two schedulers word by word, slow: no index, every fit looked for anew."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import dataclass
from hashlib import md5
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable

    from optsched.cluster.determined import State, Task


@dataclass
class Machine:
    """An agent that changes."""

    name: str
    slots: int
    used: int
    zero_slots: int
    zero_used: int
    drained: bool
    disabled: bool

    @property
    def total(self) -> int:
        """Slots that count."""
        return self.used if self.drained else 0 if self.disabled else self.slots

    @property
    def free(self) -> int:
        """Free slots."""
        return 0 if self.drained or self.disabled else self.slots - self.used

    @property
    def zero_total(self) -> int:
        """Zero-slot units that count."""
        return self.zero_used if self.drained else 0 if self.disabled else self.zero_slots

    @property
    def zero_free(self) -> int:
        """Free units."""
        return 0 if self.drained or self.disabled else self.zero_slots - self.zero_used


def machines(state: State) -> list[Machine]:
    """The agents, with what their tasks hold."""
    found = []
    for agent in state.agents:
        held = [t.allocation[agent.name] for t in state.tasks if agent.name in (t.allocation or {})]
        used = sum(held) if agent.used is None else agent.used
        zero = held.count(0) if agent.zero_used is None else agent.zero_used
        found.append(
            Machine(agent.name, agent.slots, used, agent.zero_slots, zero, agent.drained,
                    agent.disabled)
        )  # fmt: skip
    return found


def number(name: str) -> int:
    """First 8 bytes of the md5, little-endian."""
    return sum(byte << (8 * i) for i, byte in enumerate(md5(name.encode()).digest()[:8]))


def score(task: Task, m: Machine, fit: str) -> float:
    """The soft constraint."""
    if m.used or task.slots:
        return 1 / (1 + m.free) if fit == "best" else m.free / m.total
    if not m.zero_total:
        return 0.0
    return 1 / (1 + m.zero_free) if fit == "best" else m.zero_free / m.zero_total


def fits(task: Task, cluster: list[Machine], state: State) -> list[tuple[Machine, int]]:
    """Agents and slots on each."""

    def key(m: Machine) -> tuple[float, int, str]:
        distance = (number(task.name) - number(m.name)) % 2**64
        return -score(task, m, state.fit), distance, m.name

    allowed = [m for m in cluster if m.name not in task.blocked]
    shared = [m for m in allowed if m.free >= task.slots and (task.slots > 0 or m.zero_free > 0)]
    if shared:
        return [(min(shared, key=key), task.slots)]
    if task.single_agent or task.slots <= 1:
        return []
    idle = [m for m in allowed if m.used == 0 and m.free > 0]
    sizes = sorted({m.free for m in idle}, reverse=True)
    for n in sizes:
        same = sorted((m for m in idle if m.free == n), key=key)
        if task.slots % n == 0 and len(same) * n >= task.slots:
            return [(m, n) for m in same[: task.slots // n]]
    if state.heterogeneous:
        found, left = [], task.slots
        for n in sizes:
            same = sorted((m for m in idle if m.free == n), key=key)[: left // n]
            found += [(m, n) for m in same]
            left -= n * len(same)
            if left == 0:
                return found
    return []


def book(found: list[tuple[Machine, int]]) -> None:
    """Put a task."""
    for m, slots in found:
        if slots:
            m.used += slots
        else:
            m.zero_used += 1


def told(found: list[tuple[Machine, int]]) -> dict[str, int]:
    """As the library says it."""
    return {m.name: slots for m, slots in found}


def in_order(state: State) -> list[Task]:
    """Task order."""
    return sorted(state.tasks, key=lambda t: (t.submitted, t.requested, t.name))


def settings(state: State, task: Task) -> tuple[str, float, int | None, int]:
    """Group, weight, limit, priority."""
    for group in state.groups:
        if group.name == task.group:
            return group.name, group.weight, group.max_slots, group.priority
    return (f"group {task.group}" if task.group is not None else f"task {task.name}"), 1.0, None, 42


def fair_share(state: State) -> tuple[dict[str, dict[str, int]], list[str]]:
    """The ``code`` variant."""
    cluster = machines(state)
    start: dict[str, dict[str, int]] = {}
    for task in in_order(state):
        if task.slots == 0 and not task.is_running and (found := fits(task, cluster, state)):
            start[task.name] = told(found)
    capacity = everything = sum(m.total for m in cluster)
    groups: dict[str, dict[str, Any]] = {}
    for task in in_order(state):
        if task.slots == 0 or task.slots > everything:
            continue
        if not task.is_running and not fits(task, cluster, state):
            continue
        name, weight, limit, _ = settings(state, task)
        group = groups.setdefault(
            name, {"w": weight, "limit": limit, "reg": task.submitted, "tasks": [], "off": False}
        )
        group["tasks"].append(task)
    for g in groups.values():
        g["d"] = sum(t.slots for t in g["tasks"])
        if g["limit"] is not None:
            g["d"] = min(g["d"], g["limit"])
        g["a"] = sum(t.slots for t in g["tasks"] if t.is_running)
        g["o"] = g["e"] = sum(t.slots for t in g["tasks"] if t.is_running and not t.preemptible)
        capacity -= g["o"]
    capacity = max(capacity, 0)
    ordered = sorted(groups.values(), key=lambda g: (g["d"], g["reg"]))

    latest = list(ordered)
    if len(latest) > 12:
        latest.sort(key=lambda g: -g["reg"])
    else:
        for i in range(1, len(latest)):
            j = i
            while j >= 1 and ordered[j]["reg"] > ordered[j - 1]["reg"]:
                latest[j], latest[j - 1] = latest[j - 1], latest[j]
                j -= 1

    def weights() -> float:
        total = 0.0
        for g in ordered:
            if not g["off"] and g["o"] < g["d"]:
                total += g["w"]
        return total

    while True:
        before, visited = capacity, False
        for g in ordered:
            if g["off"] or g["o"] >= g["d"]:
                continue
            visited = True
            total = weights()
            x = min(max(1, int(before * g["w"] / total) if total else 1), capacity, g["d"] - g["o"])
            if g["e"] > 0:
                if g["e"] == x:
                    g["e"] = x = 0
                elif g["e"] > x:
                    g["e"] -= x
                    x = 0
                else:
                    g["e"] = 0
            g["o"] += x
            capacity -= x
        if capacity == 0:
            for g in latest:
                waiting = [t.slots for t in g["tasks"] if not t.is_running]
                if not g["off"] and g["o"] < g["d"] and waiting and min(waiting) > g["o"]:
                    capacity, g["o"], g["off"] = g["o"], 0, True
                    break
            else:
                break
        elif not visited:
            break
    release = []
    for g in ordered:
        if g["a"] > g["o"]:
            for t in g["tasks"]:
                if t.is_running and t.preemptible and g["a"] > g["o"]:
                    release.append(t.name)
                    g["a"] -= t.slots
        elif g["a"] < g["o"]:
            budget = g["o"] - g["a"]
            for t in g["tasks"]:
                if not t.is_running and t.slots <= budget and (found := fits(t, cluster, state)):
                    start[t.name] = told(found)
                    budget -= t.slots
    return start, release


def priority(
    state: State, order: list[str], preemption: bool, backfill: bool
) -> tuple[dict[str, dict[str, int]], list[str]]:
    """Both runs; `order` as `determined.order` says."""
    start: dict[str, dict[str, int]] = {}
    release: list[str] = []
    by_name = {t.name: t for t in state.tasks}
    for zero in (False, True):
        tasks = [by_name[name] for name in order if (by_name[name].slots == 0) is zero]
        cluster = machines(state)
        gone: list[str] = []
        blocked = False
        level = {t.name: settings(state, t)[3] for t in tasks}
        for p in range(1, 100):
            placed, misfits = [], []
            for t in tasks:
                if t.is_running or level[t.name] != p:
                    continue
                if found := fits(t, cluster, state):
                    book(found)
                    placed.append((t, told(found)))
                else:
                    misfits.append(t)
            if not gone:
                for t, where in placed:
                    if not blocked or (backfill and preemption and t.preemptible):
                        start[t.name] = where
            blocked = blocked or bool(misfits)
            for t in misfits if preemption else ():
                if found := fits(t, cluster, state):
                    book(found)
                    continue
                copy, taken = deepcopy(cluster), []
                for q in range(99, p - 1, -1):
                    done = False
                    for victim in reversed(
                        [v for v in tasks if v.is_running and level[v.name] == q]
                    ):
                        if q == p and (t.position or 0) >= (victim.position or 0):
                            break
                        if not victim.preemptible or victim.name in gone:
                            continue
                        for m in copy:
                            if (held := (victim.allocation or {}).get(m.name)) is not None:
                                m.used = max(0, m.used - held)
                                m.zero_used = max(0, m.zero_used - (held == 0))
                        taken.append(victim.name)
                        if found := fits(t, copy, state):
                            book(found)
                            done = True
                            break
                    if done:
                        cluster, gone = copy, gone + taken
                        break
        release += gone
    return start, release


def second_look(state: State, names: Iterable[str]) -> tuple[dict[str, dict[str, int]], list[str]]:
    """Where they start, each on the cluster as the earlier ones leave it; who is too late."""
    cluster, by_name = machines(state), {t.name: t for t in state.tasks}
    start: dict[str, dict[str, int]] = {}
    late = []
    for name in names:
        if found := fits(by_name[name], cluster, state):
            book(found)
            start[name] = told(found)
        else:
            late.append(name)
    return start, late


def by_positions(state: State) -> list[str]:
    """Insertion sort, as Go does it up to 12 elements, of tasks by submission."""
    found = sorted(state.tasks, key=lambda t: (t.submitted, t.requested, t.name))

    def passes(t: Task, u: Task) -> bool:
        """Whether a task goes before an older one."""
        level, other = settings(state, t)[3], settings(state, u)[3]
        if level != other:
            return bool(level < other)
        if t.position is None or u.position is None or t.position == u.position:
            return False
        if t.position < 0 or u.position < 0:
            return t.position > 0
        return t.position < u.position

    for i in range(1, len(found)):
        while i > 0 and passes(found[i], found[i - 1]):
            found[i], found[i - 1] = found[i - 1], found[i]
            i -= 1
    return [t.name for t in found]
