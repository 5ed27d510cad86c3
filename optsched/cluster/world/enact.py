"""A policy's answer is read into the world and applied; what is wrong names job and rule."""

from __future__ import annotations

import traceback
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from optsched.cluster.world.errors import PolicyError
from optsched.cluster.world.layout import (
    MID_PASS,
    NODE_FULL,
    NODE_SUM,
    NOT_PREEMPTIBLE,
    SHARE,
    SIZE,
    TOO_MANY,
    UNKNOWN_NODE,
    addressed,
)
from optsched.cluster.world.policy import Decision
from optsched.io.strict_json import MAX_INTEGER
from optsched.io.values import format_value

if TYPE_CHECKING:
    from optsched.cluster.workload.workload import Workload
    from optsched.cluster.world.layout import World
    from optsched.cluster.world.policy import ClusterView

_LISTED: Final = 8


def read(w: World, workload: Workload, policy: str, view: ClusterView, decision: Any) -> World:
    """Write what a policy says into the world (which gets more room, if need be)."""
    try:
        if not isinstance(decision, Decision):
            raise PolicyError(f"decide() answered {format_value(decision)}, expected a Decision")
        return _read(w, workload, view, decision)
    except PolicyError as error:
        raise PolicyError(f"policy {format_value(policy)} at time {view.time}: {error}") from None


def refused(w: World, workload: Workload, policy: str, rule: int) -> PolicyError:
    """The exception that says which rule the decision breaks."""
    sentence = _broken(w, workload, rule)
    return PolicyError(f"policy {format_value(policy)} at time {w.state['time'][0]}: {sentence}")


def failed(w: World, policy: str, error: Exception) -> PolicyError:
    """The exception that says where the code of a policy broke."""
    place = traceback.extract_tb(error.__traceback__)[-1]
    return PolicyError(
        f"policy {format_value(policy)} at time {w.state['time'][0]}: decide() raised "
        f"{type(error).__name__}: {error} ({place.filename}:{place.lineno})"
    )


def _read(w: World, workload: Workload, view: ClusterView, decision: Decision) -> World:
    """Write a decision into the world."""
    n, s = len(view.job), w.state
    w.quota[:n] = _integers("quota", decision.quota, n)
    if not isinstance(decision.best_effort, (bool, np.bool_)):
        raise PolicyError(
            f"best_effort: expected True or False, got {format_value(decision.best_effort)}"
        )
    s["best_effort"][0] = decision.best_effort
    s["decided"][0], s["ordered"][0] = 1, 0
    if decision.order is not None:
        order = _integers("order", decision.order)
        if len(order) > n:
            raise PolicyError(f"order: expected at most {n} positions, got {len(order)}")
        s["ordered"][0], w.order[: len(order)] = len(order), order
    s["named"][0] = bool(decision.nodes)
    if decision.nodes:
        w = _name_nodes(w, workload, view, decision.nodes)
    s["sharing"][0] = bool(decision.share)
    if decision.share:
        w.share[:n] = -1
        for i, partner in _pairs("share", decision.share, n):
            w.share[i] = _position(f"share[{i}]", partner, n)
    if decision.wake_at is not None:
        s["wake"][0] = _wake(view.time, decision.wake_at)
    return w


def _integers(place: str, values: Any, n: int | None = None) -> Any:
    """One number for every active job."""
    array = np.asarray(values)
    kind = array.dtype.kind
    if array.ndim != 1 or (kind != "i" and kind != "u" and array.size):
        raise PolicyError(f"{place}: expected a row of integers, got {format_value(values)}")
    if n is not None and len(array) != n:
        raise PolicyError(f"{place}: expected {n} numbers, one per active job, got {len(array)}")
    if kind == "u" and array.size and array.max() > MAX_INTEGER:
        raise PolicyError(f"{place}: {array.max()} is no number of GPUs or position")
    return array.astype(np.int64, copy=False)


def _position(place: str, value: Any, n: int) -> int:
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or not 0 <= value < n:
        raise PolicyError(f"{place}: expected a position 0..{n - 1}, got {format_value(value)}")
    return int(value)


def _pairs(place: str, mapping: Any, n: int) -> list[tuple[int, Any]]:
    """Items of a mapping by position, ascending."""
    if not isinstance(mapping, Mapping):
        raise PolicyError(f"{place}: expected a mapping by position, got {format_value(mapping)}")
    found = {_position(place, key, n): value for key, value in mapping.items()}
    return sorted(found.items())


def _wake(now: int, wake: Any) -> int:
    if isinstance(wake, bool) or not isinstance(wake, (int, np.integer)) or wake <= now:
        raise PolicyError(f"wake_at: expected a time after now, or None, got {format_value(wake)}")
    return min(int(wake), 2**62 - 1)


def _name_nodes(w: World, workload: Workload, view: ClusterView, nodes: Any) -> World:
    """Write chosen nodes as rows by position."""
    n = int(w.state["active"][0])
    chosen_rows: list[tuple[int, int]] = []
    w.named_ptr[: n + 1] = 0
    for i, chosen in _pairs("nodes", nodes, n):
        job = format_value(workload.names[int(view.job[i])])
        if not isinstance(chosen, Mapping):
            raise PolicyError(
                f"nodes: job {job}: expected node -> GPUs, got {format_value(chosen)}"
            )
        for key, value in chosen.items():
            for number in (key, value):
                if isinstance(number, bool) or not isinstance(number, (int, np.integer)):
                    raise PolicyError(f"nodes: job {job}: not an integer: {format_value(number)}")
            if not -(2**62) < int(value) < 2**62 or not -1 <= int(key) < 2**62:
                raise PolicyError(
                    f"nodes: job {job}: no such node or number: {format_value(chosen)}"
                )
        chosen_rows += sorted((int(node), int(count)) for node, count in chosen.items())
        w.named_ptr[i + 1] = len(chosen)
    np.cumsum(w.named_ptr[: n + 1], out=w.named_ptr[: n + 1])
    if len(chosen_rows) > len(w.named):
        w = addressed(w._replace(named=np.zeros((2 * len(chosen_rows), 2), np.int64)))
    if chosen_rows:
        w.named[: len(chosen_rows)] = chosen_rows
    return w


def _broken(w: World, workload: Workload, rule: int) -> str:
    """The rule in words."""
    s = w.state
    at, about, other = int(s["at"][0]), int(s["about"][0]), int(s["other"][0])
    j = int(w.active[at])
    job = f"job {format_value(workload.names[j])}"
    if rule == SIZE:
        sizes = workload.size[workload.size_ptr[j] : workload.size_ptr[j + 1]].tolist()
        allowed = ", ".join(map(str, sizes[:_LISTED])) + (", ..." if len(sizes) > _LISTED else "")
        if sizes == [0]:
            return f"{job}: quota {about}, but a zero-slot task takes -1 (run) or 0"
        return f"{job}: quota {about} is not one of its sizes ({allowed}) or 0"
    if rule == NOT_PREEMPTIBLE:
        return f"{job}: runs and is not preemptible, but would lose its GPUs"
    if rule == MID_PASS:
        return (
            f"{job}: would go from {about} to {other} GPUs (or move) within a pass, which "
            'resize="pass" allows only at the end of one'
        )
    if rule == TOO_MANY:
        return f"{job}: over-allocation: needs {about} GPUs when {other} are left"
    if rule == UNKNOWN_NODE:
        return f"{job}: there is no node {about} (0..{len(w.node) - 1})"
    if rule == NODE_SUM:
        return f"{job}: its nodes give {about} GPUs (each at least 1), its quota is {other}"
    if rule == NODE_FULL:
        return f"{job}: a node that it is to run on has too few free GPUs or takes no work"
    if rule == SHARE:
        return (
            f"{job}: shares the GPUs of a job that is not running on as many GPUs, that shares "
            "them already, or beside which its speed was not measured"
        )
    return f"order: expected positions 0..{int(s['active'][0]) - 1}, got {about}"
