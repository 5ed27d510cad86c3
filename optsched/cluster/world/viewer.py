"""The view of a running simulation: cheap columns at once, the others when they are first used."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import numpy as np

from optsched.cluster.world.apply import turn
from optsched.cluster.world.layout import PRESENT, STATE
from optsched.cluster.world.policy import ClusterView

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy.typing as npt

    from optsched.cluster.workload.nodes import Nodes
    from optsched.cluster.workload.workload import Workload
    from optsched.cluster.world.layout import World
    from optsched.cluster.world.settings import Settings
    from optsched.model.schedule import IntArray

_OF_WORKLOAD: Final = (
    "submit", "pass_work", "priority", "weight", "group", "template", "preemptible",
)  # fmt: skip

_TIME, _ACTIVE, _VERSION, _COLUMNS = map(
    list(STATE.names or ()).index, ("time", "active", "version", "columns")
)


class EngineView(ClusterView):
    """A `ClusterView` that reads the world of its `Viewer`."""

    def __init__(self, columns: dict[str, Any]) -> None:
        self.__dict__ = columns

    def __getattr__(self, name: str) -> Any:
        """Compute a column that was not needed before."""
        viewer: Viewer | None = self.__dict__.get("_viewer")
        make = None if viewer is None else _LATER.get(name)
        if viewer is None or make is None:
            raise AttributeError(f"'ClusterView' object has no attribute {name!r}")
        if self.__dict__["_decision"] != viewer.decisions:
            raise RuntimeError(
                f"view.{name}: this view is of an earlier instant; policies read it within decide()"
            )
        make(viewer, self.__dict__)
        return self.__dict__[name]


class Viewer:
    """Makes the views of one simulation; keeps what only changes with the set of active jobs.

    Parameters
    ----------
    world
        Its state.
    workload, nodes, settings
        What it was made from.
    """

    def __init__(self, world: World, workload: Workload, nodes: Nodes, settings: Settings) -> None:
        self.world, self.workload = world, workload
        self.fixed = {"workload": workload, "settings": settings, "nodes": nodes}
        self.decisions = 0
        self.version = -1
        self.kept: dict[str, Any] = {}
        cost = workload.restart_cost
        self.cost = np.where(cost < 0, settings.restart_cost, cost)
        self.one_size = len(workload.size) == len(workload) and bool((workload.size > 0).all())
        self.steps = _frozen(np.arange(len(workload) + 1))
        self.state = world.state.view(np.int64)

    def look(self) -> EngineView:
        """The view of the present instant; earlier ones are over."""
        state = self.state
        self.decisions += 1
        if self.version != state[_VERSION]:
            self.version = int(state[_VERSION])
            self.kept = self.fixed | {"job": _frozen(self.world.active[: state[_ACTIVE]].copy())}
        columns = self.kept.copy()
        columns["_viewer"], columns["_decision"] = self, self.decisions
        columns["time"] = int(state[_TIME])
        return EngineView(columns)


def _frozen(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    array.setflags(write=False)
    return array


def _keep(viewer: Viewer, columns: dict[str, Any], **values: Any) -> None:
    """Put in columns that stay while the set of active jobs does."""
    for key, value in values.items():
        columns[key] = viewer.kept[key] = _frozen(value)


def _column(name: str) -> Callable[[Viewer, dict[str, Any]], None]:
    return lambda viewer, columns: _keep(
        viewer, columns, **{name: getattr(viewer.workload, name)[columns["job"]]}
    )


def _present(name: str) -> Callable[[Viewer, dict[str, Any]], None]:
    """Read a row that `turn` fills; from the first time on it does so at every instant."""
    row, flag = PRESENT.index(name), name in ("running", "at_pass_end")

    def read(viewer: Viewer, columns: dict[str, Any]) -> None:
        if not viewer.state[_COLUMNS] >> row & 1:
            turn(viewer.world.address, 1 << row)
        column = viewer.world.present[row, : len(columns["job"])]
        columns[name] = _frozen(column != 0 if flag else column.copy())

    return read


def _costs(viewer: Viewer, columns: dict[str, Any]) -> None:
    _keep(viewer, columns, restart_cost=viewer.cost[columns["job"]])


def _sizes(viewer: Viewer, columns: dict[str, Any]) -> None:
    jobs, workload = columns["job"], viewer.workload
    if viewer.one_size:
        ptr, source = viewer.steps[: len(jobs) + 1], jobs
    else:
        first = workload.size_ptr[jobs]
        length = workload.size_ptr[jobs + 1] - first
        ptr, source = _rows(first, np.where(workload.size[first] == 0, 0, length))
    size, rate = workload.size[source], workload.rate[source]
    _keep(viewer, columns, size_ptr=ptr, size=size, rate=rate)


def _rows(first: IntArray, length: IntArray) -> tuple[IntArray, IntArray]:
    """Pointers of rows of these lengths, and where their values come from."""
    ptr = np.zeros(len(first) + 1, np.int64)
    np.cumsum(length, out=ptr[1:])
    return ptr, np.repeat(first - ptr[:-1], length) + np.arange(ptr[-1])


def _observed(viewer: Viewer, columns: dict[str, Any]) -> None:
    jobs, workload = columns["job"], viewer.workload
    first = workload.observed_ptr[jobs]
    known = workload.observed_ptr[jobs + 1] - first
    ptr, source = _rows(first, np.minimum(known, viewer.world.job["passes"][jobs]))
    columns["observed_ptr"] = _frozen(ptr)
    columns["observed"] = _frozen(workload.observed[source])


def _held(viewer: Viewer, columns: dict[str, Any]) -> None:
    w, job = viewer.world, viewer.world.job[columns["job"]]
    stay, runs = w.log[job["row"]], job["row"] >= 0
    task = runs & (job["gpus"] == 0)
    length = np.where(runs, stay["end_node"] - stay["first"], 0)
    ptr, source = _rows(stay["first"], np.where(task, 1, length))
    rows = w.log_node[np.minimum(source, len(w.log_node) - 1)]
    node, count = rows[:, 0].copy(), rows[:, 1].copy()
    node[ptr[:-1][task]], count[ptr[:-1][task]] = job["unit"][task], 0
    columns["held_ptr"], columns["held_node"] = _frozen(ptr), _frozen(node)
    columns["held_count"] = _frozen(count)


def _draining(viewer: Viewer, columns: dict[str, Any]) -> None:
    view = EngineView(columns)
    closed = viewer.world.node["takes"][view.held_node] == 0
    rows = np.repeat(np.arange(len(view.job)), np.diff(view.held_ptr))
    found = np.zeros(len(view.job), bool)
    found[rows[closed]] = view.gpus[rows[closed]] > 0
    columns["draining"] = _frozen(found)


def _of_nodes(name: str, column: str) -> Callable[[Viewer, dict[str, Any]], None]:
    return lambda viewer, columns: columns.update(
        {name: _frozen(viewer.world.node[column] * viewer.world.node["takes"])}
    )


_LATER: Final[dict[str, Callable[[Viewer, dict[str, Any]], None]]] = {
    **{name: _column(name) for name in _OF_WORKLOAD},
    **{name: _present(name) for name in PRESENT},
    "restart_cost": _costs,
    "size_ptr": _sizes, "size": _sizes, "rate": _sizes,
    "observed_ptr": _observed, "observed": _observed,
    "held_ptr": _held, "held_node": _held, "held_count": _held,
    "free": _of_nodes("free", "free"), "capacity": _of_nodes("capacity", "capacity"),
    "node_type": lambda viewer, columns: columns.update(
        node_type=_frozen(viewer.world.supply[:, 0] - 1)
    ),
    "draining": _draining,
    "finished": lambda viewer, columns: columns.update(
        finished=_frozen(viewer.world.finished.copy())
    ),
    "zero_free": _of_nodes("zero_free", "free_units"),
}  # fmt: skip
