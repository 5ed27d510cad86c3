"""A policy's answer is read into the world; errors that end a simulation."""

from __future__ import annotations

import os
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from optsched.cluster.world import layout
from optsched.cluster.world.policy import Decision, PolicyError, Stalled, of_free_gpus
from optsched.errors import InputError
from optsched.io.strict_json import MAX_INTEGER
from optsched.io.values import format_value

if TYPE_CHECKING:
    from collections.abc import Sequence

    from optsched.cluster.workload.workload import Workload
    from optsched.cluster.world.layout import World

_LIBRARY: Final = str(Path(__file__).parents[2]) + os.sep
_SIZES: Final = 8
_JOBS: Final = 5
_BROKEN: Final = {
    layout.NOT_PREEMPTIBLE: "runs and is not preemptible, but would lose its GPUs",
    layout.MID_PASS: "would go from {about} to {other} GPUs (or move) within a pass, which "
    'resize="pass" allows only at the end of one',
    layout.TOO_MANY: "over-allocation: needs {about} GPUs when {other} are left",
    layout.UNKNOWN_NODE: "there is no node {about} (0..{nodes})",
    layout.NODE_SUM: "its nodes give {about} GPUs (each at least 1), its quota is {other}",
    layout.NODE_FULL: "a node that it is to run on has too few free GPUs or takes no work",
    layout.SHARE: "shares the GPUs of a job that is not running on as many GPUs, that shares them "
    "already, or beside which its speed was not measured",
}


def failed(w: World, policy: str, error: BaseException) -> PolicyError:
    """The exception that says where the code of a policy broke: the last line in its file."""
    frames = traceback.extract_tb(error.__traceback__)
    outside = [one for one in frames if not one.filename.startswith(_LIBRARY)] or frames[-1:]
    place = [one for one in outside if one.filename == outside[0].filename][-1]
    return _at(w, policy, f"decide() raised {type(error).__name__}: {error} "
               f"({place.filename}:{place.lineno})")  # fmt: skip


def check_end(w: World, workload: Workload, policy: str, status: int) -> None:
    """Raise if a simulation ended by an answer of `turn` other than that all jobs have ended."""
    if status < 0:
        raise _at(w, policy, _broken(w, workload, -status))
    now = int(w.state["time"][0])
    if status == layout.TOO_LATE:
        running = w.heap[: w.state["running_now"][0], 1].tolist()
        raise InputError(
            f"time: the next event under policy {policy!r:.60} lies behind {w.state['horizon'][0]};"
            f" running then: {_names(workload, running) or 'nothing'} (use a coarser unit of time)"
        )
    if status == layout.STALLED:
        active = w.active[: w.state["active"][0]]
        waiting = active[w.job["phase"][active] == layout.PENDING].tolist()
        total = int(w.node["capacity"][w.node["takes"] == 1].sum())
        least = int(workload.size[workload.size_ptr[waiting[0]]])
        reason = of_free_gpus(least, int(w.state["free_gpus"][0]), total, policy)
        raise Stalled(
            f"policy {policy!r:.60} starts none of {len(waiting)} pending jobs at time {now}, "
            f"nothing runs, and no event is left: {_names(workload, waiting)} "
            f"(the first {reason.text})"
        )


def _at(w: World, policy: str, what: str) -> PolicyError:
    return PolicyError(f"policy {format_value(policy)} at time {w.state['time'][0]}: {what}")


def _names(workload: Workload, jobs: Sequence[int]) -> str:
    """The first names of these jobs."""
    listed = ", ".join(f"{workload.names[j]!s:.40}" for j in jobs[:_JOBS])
    return listed + (f" and {len(jobs) - _JOBS} more" if len(jobs) > _JOBS else "")


def _broken(w: World, workload: Workload, rule: int) -> str:
    """The rule in words."""
    s = w.state[0]
    if rule == layout.ORDER:
        return f"order: expected positions 0..{s['active'] - 1}, got {s['about']}"
    j = int(w.active[s["at"]])
    job = f"job {format_value(workload.names[j])}"
    if rule != layout.SIZE:
        numbers = {"about": s["about"], "other": s["other"], "nodes": len(w.node) - 1}
        return f"{job}: {_BROKEN[rule].format(**numbers)}"
    sizes = workload.sizes_of(j).tolist()
    if sizes == [0]:
        return f"{job}: quota {s['about']}, but a zero-slot task takes -1 (run) or 0"
    allowed = ", ".join(map(str, sizes[:_SIZES])) + (", ..." if len(sizes) > _SIZES else "")
    return f"{job}: quota {s['about']} is not one of its sizes ({allowed}) or 0"


def read(w: World, workload: Workload, policy: str, decision: Any) -> World:
    """Write what a policy says into the world (which gets more room, if need be)."""
    try:
        if not isinstance(decision, Decision):
            raise PolicyError(f"decide() answered {format_value(decision)}, expected a Decision")
        return _read(w, workload, decision)
    except PolicyError as error:
        raise _at(w, policy, str(error)) from None


def _read(w: World, workload: Workload, decision: Decision) -> World:
    """Write a decision into the world."""
    s = w.state
    n, now = int(s["active"][0]), int(s["time"][0])
    quota = _integers("quota", decision.quota)
    if len(quota) != n:
        raise PolicyError(f"quota: expected {n} numbers, one per active job, got {len(quota)}")
    w.quota[:n] = quota
    if not isinstance(decision.best_effort, (bool, np.bool_)):
        best_effort = format_value(decision.best_effort)
        raise PolicyError(f"best_effort: expected True or False, got {best_effort}")
    s["best_effort"][0] = decision.best_effort
    s["decided"][0], s["ordered"][0] = 1, 0
    if decision.order is not None:
        order = _integers("order", decision.order)
        if len(order) > n:
            raise PolicyError(f"order: expected at most {n} positions, got {len(order)}")
        s["ordered"][0], w.order[: len(order)] = len(order), order
    s["named"][0], s["sharing"][0] = bool(decision.nodes), bool(decision.share)
    if decision.nodes:
        w = _name_nodes(w, workload, decision.nodes)
    if decision.share:
        w.share[:n] = -1
        for i, partner in _pairs("share", decision.share, n):
            w.share[i] = _integer(f"share[{i}]", partner, 0, n - 1)
    if decision.wake_at is not None:
        wake = _integer("wake_at", decision.wake_at, now + 1, None, "a time after now, or None")
        s["wake"][0] = min(wake, 2**62 - 1)
    return w


def _integers(place: str, values: Any) -> Any:
    """A row of integers."""
    array = np.asarray(values)
    kind = array.dtype.kind
    if array.ndim != 1 or (kind != "i" and kind != "u" and array.size):
        raise PolicyError(f"{place}: expected a row of integers, got {format_value(values)}")
    if kind == "u" and array.size and array.max() > MAX_INTEGER:
        raise PolicyError(f"{place}: {array.max()} is no number of GPUs or position")
    return array.astype(np.int64, copy=False)


def _integer(place: str, value: Any, least: int, most: int | None, what: str = "") -> int:
    """An integer within limits, else an error; the default is that it is a position."""
    is_integer = isinstance(value, (int, np.integer)) and not isinstance(value, bool)
    if not is_integer or value < least or (most is not None and value > most):
        what = what or f"a position {least}..{most}"
        raise PolicyError(f"{place}: expected {what}, got {format_value(value)}")
    return int(value)


def _pairs(place: str, mapping: Any, n: int) -> list[tuple[int, Any]]:
    """Items of a mapping by position, ascending."""
    if not isinstance(mapping, Mapping):
        raise PolicyError(f"{place}: expected a mapping by position, got {format_value(mapping)}")
    return sorted({_integer(place, key, 0, n - 1): x for key, x in mapping.items()}.items())


def _name_nodes(w: World, workload: Workload, nodes: Any) -> World:
    """Write chosen nodes as rows by position."""
    n = int(w.state["active"][0])
    rows: list[tuple[int, int]] = []
    w.named_ptr[: n + 1] = 0
    for i, chosen in _pairs("nodes", nodes, n):
        place = f"nodes: job {format_value(workload.names[int(w.active[i])])}"
        if not isinstance(chosen, Mapping):
            raise PolicyError(f"{place}: expected node -> GPUs, got {format_value(chosen)}")
        rows += sorted(
            (_integer(place, node, -1, 2**62, "the number of a node"),
             _integer(place, count, -(2**62), 2**62, "a number of GPUs"))
            for node, count in chosen.items()
        )  # fmt: skip
        w.named_ptr[i + 1] = len(chosen)
    np.cumsum(w.named_ptr[: n + 1], out=w.named_ptr[: n + 1])
    if len(rows) > len(w.named):
        w = layout.addressed(w._replace(named=np.zeros((2 * len(rows), 2), np.int64)))
    if rows:
        w.named[: len(rows)] = rows
    return w
