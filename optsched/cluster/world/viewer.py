"""The view of a running simulation: its columns are computed when they are first used."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import numpy as np

from optsched.cluster.world.apply import turn
from optsched.cluster.world.layout import PRESENT, STATE
from optsched.cluster.world.policy import ClusterView

if TYPE_CHECKING:
    from collections.abc import Callable

    from optsched.cluster.workload.nodes import Nodes
    from optsched.cluster.workload.workload import Workload
    from optsched.cluster.world.layout import World
    from optsched.cluster.world.settings import Settings
    from optsched.model.schedule import IntArray

    Columns = dict[str, Any]

_TIME, _ACTIVE, _VERSION, _COLUMNS = map(
    list(STATE.names or ()).index, ("time", "active", "version", "columns")
)


class EngineView(ClusterView):
    """A `ClusterView` that reads the world of its `Viewer`."""

    def __init__(self, columns: Columns) -> None:
        self.__dict__ = columns

    def __getattr__(self, name: str) -> Any:
        """Compute a column that was not needed before."""
        viewer: Viewer | None = self.__dict__.get("_viewer")
        make = _KEPT.get(name) or _LATER.get(name)
        if viewer is None or make is None:
            raise AttributeError(f"'ClusterView' object has no attribute {name!r}")
        if self.__dict__["_decision"] != viewer.decisions:
            raise RuntimeError(
                f"view.{name}: this view is of an earlier instant; policies read it within decide()"
            )
        made = make(viewer, self.job)
        for column in made.values():
            column.setflags(write=False)
        self.__dict__.update(made)
        if name in _KEPT:
            viewer.kept.update(made)
        return made[name]


class Viewer:
    """Make the views of one simulation; keep what only changes with the set of active jobs."""

    def __init__(self, world: World, workload: Workload, nodes: Nodes, settings: Settings) -> None:
        self.world, self.workload = world, workload
        self.fixed = {"workload": workload, "settings": settings, "nodes": nodes, "_viewer": self}
        self.decisions, self.version = 0, -1
        self.kept: Columns = {}
        self.one_size = len(workload.size) == len(workload) and bool((workload.size > 0).all())
        self.steps = np.arange(len(workload) + 1)
        self.state = world.state.view(np.int64)

    def look(self) -> EngineView:
        """The view of the present instant; earlier views are over."""
        state = self.state
        self.decisions += 1
        if self.version != state[_VERSION]:
            self.version = int(state[_VERSION])
            jobs = self.world.active[: state[_ACTIVE]].copy()
            jobs.setflags(write=False)
            self.kept = self.fixed | {"job": jobs}
        columns = self.kept.copy()
        columns["_decision"], columns["time"] = self.decisions, int(state[_TIME])
        return EngineView(columns)


def _of_jobs(name: str) -> Callable[[Viewer, IntArray], Columns]:
    return lambda viewer, jobs: {name: getattr(viewer.workload, name)[jobs]}


def _present(name: str) -> Callable[[Viewer, IntArray], Columns]:
    """Read a row that `turn` fills; from the first time on it does so at every instant."""
    row, flag = PRESENT.index(name), name in ("running", "at_pass_end")

    def read(viewer: Viewer, jobs: IntArray) -> Columns:
        if not viewer.state[_COLUMNS] >> row & 1:
            turn(viewer.world.address, 1 << row)
        column = viewer.world.present[row, : len(jobs)]
        return {name: column != 0 if flag else column.copy()}

    return read


def _of_nodes(name: str, column: str) -> Callable[[Viewer, IntArray], Columns]:
    return lambda viewer, _: {name: viewer.world.node[column] * viewer.world.node["takes"]}


def _rows(first: IntArray, length: IntArray) -> tuple[IntArray, IntArray]:
    """Pointers of rows of these lengths, and where their values come from."""
    ptr = np.zeros(len(first) + 1, np.int64)
    np.cumsum(length, out=ptr[1:])
    return ptr, np.repeat(first - ptr[:-1], length) + np.arange(ptr[-1])


def _sizes(viewer: Viewer, jobs: IntArray) -> Columns:
    workload = viewer.workload
    if viewer.one_size:
        ptr, source = viewer.steps[: len(jobs) + 1], jobs
    else:
        first = workload.size_ptr[jobs]
        length = workload.size_ptr[jobs + 1] - first
        ptr, source = _rows(first, np.where(workload.size[first] == 0, 0, length))
    return {"size_ptr": ptr, "size": workload.size[source], "rate": workload.rate[source]}


def _observed(viewer: Viewer, jobs: IntArray) -> Columns:
    workload = viewer.workload
    first = workload.observed_ptr[jobs]
    known = workload.observed_ptr[jobs + 1] - first
    ptr, source = _rows(first, np.minimum(known, viewer.world.job["passes"][jobs]))
    return {"observed_ptr": ptr, "observed": workload.observed[source]}


def _held(viewer: Viewer, jobs: IntArray) -> Columns:
    w, job = viewer.world, viewer.world.job[jobs]
    stay, runs = w.log[job["row"]], job["row"] >= 0
    task = runs & (job["gpus"] == 0)
    length = np.where(runs, stay["end_node"] - stay["first"], 0)
    ptr, source = _rows(stay["first"], np.where(task, 1, length))
    rows = w.log_node[np.minimum(source, len(w.log_node) - 1)]
    node, count = rows[:, 0].copy(), rows[:, 1].copy()
    node[ptr[:-1][task]], count[ptr[:-1][task]] = job["unit"][task], 0
    return {"held_ptr": ptr, "held_node": node, "held_count": count}


def _draining(viewer: Viewer, jobs: IntArray) -> Columns:
    ptr, node, count = _held(viewer, jobs).values()
    closed = (viewer.world.node["takes"][node] == 0) & (count > 0)
    found = np.zeros(len(jobs), bool)
    found[np.repeat(np.arange(len(jobs)), np.diff(ptr))[closed]] = True
    return {"draining": found}


_KEPT: Final[dict[str, Callable[[Viewer, IntArray], Columns]]] = {
    **{name: _of_jobs(name) for name in (
        "submit", "pass_work", "priority", "weight", "group", "template", "preemptible",
    )},
    "restart_cost": lambda viewer, jobs: {"restart_cost": viewer.world.given["cost"][jobs]},
    **dict.fromkeys(("size_ptr", "size", "rate"), _sizes),
}  # fmt: skip
"""Columns that stay as they are while the set of active jobs does."""

_LATER: Final[dict[str, Callable[[Viewer, IntArray], Columns]]] = {
    **{name: _present(name) for name in PRESENT},
    **dict.fromkeys(("observed_ptr", "observed"), _observed),
    **dict.fromkeys(("held_ptr", "held_node", "held_count"), _held),
    "draining": _draining,
    "free": _of_nodes("free", "free"), "capacity": _of_nodes("capacity", "capacity"),
    "zero_free": _of_nodes("zero_free", "free_units"),
    "node_type": lambda viewer, _: {"node_type": viewer.world.supply[:, 0] - 1},
    "finished": lambda viewer, _: {"finished": viewer.world.finished.copy()},
}  # fmt: skip
"""Columns of one instant."""
