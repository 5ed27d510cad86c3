"""Job arrays, sibling training jobs on a pipeline of one GPU or more: of a request, of a plan."""

from __future__ import annotations

import json
from functools import cached_property
from typing import TYPE_CHECKING, Annotated, Any, Final

import msgspec
import numpy as np

from optsched.errors import InputError
from optsched.io.strict_json import decode, placed
from optsched.io.text import NANOSECONDS, one_line
from optsched.pipelines.cuts import balanced
from optsched.problems.jobarray import document
from optsched.problems.jobarray.problem import JobArray

if TYPE_CHECKING:
    from optsched.model.schedule import Schedule

_Positive = Annotated[int, msgspec.Meta(ge=1)]

_TIMES: Final = (
    "forward", "backward", "weight", "recompute", "update", "switch", "lag_forward", "lag_backward"
)  # fmt: skip


class ArrayRequest(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True,
    dict=True,
):  # fmt: skip
    """Sibling jobs that share their GPUs. A plan decides how many, up to `PlanJob.gpus`.

    Parameters
    ----------
    problem
        A `JobArray`, or the document ``optsched.jobarray/1``: its iterations repeat without a
        barrier (objective ``"period"``). Its number of stages is the most GPUs that it can use.
    least
        Least number of GPUs.
    steps
        Iterations of every job.
    weight
        Importance of a busy GPU, 0.001 to 1000, such as the uncertainty of its results.
    script
        ``FILE.py:FUNCTION`` that makes its trainer (`optsched arraypipe run`).

    Examples
    --------
    >>> import optsched
    >>> from optsched import plan
    >>> request = plan.ArrayRequest(problem=optsched.JobArray([[1, 1]] * 3, [[2, 2]] * 3), weight=2)
    >>> request.periods  # lower bounds in ns, by number of GPUs
    {1: 18000, 2: 9000}
    """

    problem: Any
    least: Annotated[int, msgspec.Meta(ge=1, le=2**22)] = 1
    steps: Annotated[int, msgspec.Meta(ge=1, le=2**40)] = 100
    weight: Annotated[float, msgspec.Meta(ge=1e-3, le=1e3)] = 1.0
    script: str = ""

    def __post_init__(self) -> None:
        if isinstance(self.problem, JobArray):
            msgspec.structs.force_setattr(self, "problem", json.loads(document.write(self.problem)))

    def __repr__(self) -> str:
        return f"<ArrayRequest of {one_line(str(self.problem), 60)}, {self.steps} steps>"

    @cached_property
    def array(self) -> JobArray:
        """The jobs, with times in ns, to repeat without a barrier."""
        if not isinstance(self.problem, dict):
            raise InputError(
                f"problem: expected the document optsched.jobarray/1, got {self.problem!r:.60} "
                "(only the command line reads files)"
            )
        array = document.from_tree(self.problem, "problem")
        factor = NANOSECONDS[array.time_unit]
        tables = {key: getattr(array, key) for key in _TIMES if getattr(array, key) is not None}
        with placed("problem: "):
            return array.replace(
                objective="period", time_unit="ns",
                **{key: [[factor * t for t in row] for row in table.tolist()]
                   for key, table in tables.items()},
            )  # fmt: skip

    @cached_property
    def loads(self) -> list[int]:
        """Busy time of every stage in a cycle of all jobs."""
        array = self.array
        graph = array.graph([False] * array.n_jobs) if array.chooses else array.graph()
        busy = np.bincount(graph.stage, graph.duration, array.n_stages)
        return [int(time) for time in busy]

    def on(self, gpus: int) -> JobArray:
        """Return the array on a number of GPUs; neighboring stages share one, loads are balanced.

        GPUs with a limited memory are as large as the smallest of the document's, with states.
        """
        array = self.array
        if gpus == array.n_devices:
            return array
        place = np.repeat(np.arange(gpus), np.diff(balanced(self.loads, gpus)))
        crossing = place[1:] != place[:-1]
        memory = None
        if array.memory.any():
            held = array.state.sum(axis=0)
            before = np.bincount(array.devices_of(0), held, array.n_devices)
            total = (array.memory + before)[array.memory > 0].min()
            memory = (total - np.bincount(place, held, gpus)).astype(np.int64)
            if (memory <= 0).any():
                raise InputError(f"problem: {gpus} GPUs of {total:.0f} bytes cannot hold its state")
        return array.replace(
            place=place.tolist(), memory=memory, devices=None, servers=None,
            lag_forward=array.lag_forward * crossing, lag_backward=array.lag_backward * crossing,
        )  # fmt: skip

    @cached_property
    def periods(self) -> dict[int, int]:
        """Lower bound on the period by number of GPUs, for numbers on which it can run."""
        found, why = {}, ""
        for gpus in range(self.least, self.array.n_stages + 1):
            try:
                array = self.on(gpus)
                why = array.infeasibility()
            except InputError as error:
                why = str(error)
            if not why:
                found[gpus] = array.lower_bound()
        if not found:
            most = self.array.n_stages
            raise InputError(why or f"least: {self.least} GPUs, but it has only {most} stages")
        return found

    def busy(self, gpus: int) -> float:
        """Return a bound on the mean number of its GPUs that compute."""
        return sum(self.loads) / max(1, self.periods[gpus])

    def seconds(self, period: int) -> int:
        """Return the time of all steps with a period in ns."""
        cycles = -(-self.steps // int(self.array.multiplicity.min()))
        return max(1, round(cycles * period / 1e9))


class PlannedArray(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A job array in a plan: its GPUs, its jobs in the schedule, its expected time.

    Examples
    --------
    >>> import optsched
    >>> from optsched import bandwidth, plan
    >>> array = plan.ArrayRequest(problem=optsched.JobArray([[1, 1]] * 3, [[2, 2]] * 3))
    >>> cluster = bandwidth.Cluster.uniform(bandwidth.HostType("h100", 8), 1)
    >>> state = bandwidth.ClusterState.idle(cluster)
    >>> snapshot = plan.ClusterSnapshot(state, [plan.PlanJob(name="a", gpus=2, array=array)])
    >>> document = plan.order_arrays(plan.plan(snapshot))
    >>> plan.planned_arrays(document)[0].gpus
    [0, 1]
    """

    name: str
    gpus: list[int]
    first_job: int
    """Number of its first job in the schedule of the plan."""
    jobs: _Positive
    steps: int
    seconds: int
    """Expected time of all steps."""
    period: _Positive
    """Time of a cycle of all its jobs in ns."""
    cycles: _Positive
    """Of this array in a cycle of the plan."""
    bound: int
    """Lower bound on the period with so many GPUs."""
    busy: float
    """Mean number of its GPUs that compute, times its weight."""
    sha256: str
    """Of the array on so many GPUs."""
    script: str = ""
    recompute: list[bool] = []
    """Which jobs recompute, if the solver chose."""


def planned_arrays(document: Schedule) -> list[PlannedArray]:
    """Return the arrays of a document of `order_arrays`; none of another plan.

    Examples
    --------
    >>> import optsched
    >>> from optsched import bandwidth, plan
    >>> array = plan.ArrayRequest(problem=optsched.JobArray([[1, 1]] * 3, [[2, 2]] * 3))
    >>> cluster = bandwidth.Cluster.uniform(bandwidth.HostType("h100", 8), 1)
    >>> state = bandwidth.ClusterState.idle(cluster)
    >>> snapshot = plan.ClusterSnapshot(state, [plan.PlanJob(name="a", gpus=2, array=array)])
    >>> document = plan.order_arrays(plan.plan(snapshot))
    >>> [one.name for one in plan.planned_arrays(document)]
    ['a']
    """
    arrays = decode(document.provenance.get("arrays", []), list[PlannedArray], "provenance.arrays")
    for one in arrays:
        if not one.gpus or not all(0 <= gpu < document.n_resources for gpu in one.gpus):
            raise InputError(f"provenance.arrays: {one.name!r:.60} has GPUs {one.gpus!r:.60}")
    return arrays
