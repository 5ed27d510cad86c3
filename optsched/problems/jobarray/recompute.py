"""Which jobs recompute, where the solver chooses: solutions, and bounds linear in the choice."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from optsched.errors import InputError
from optsched.model.bounds import family_changes
from optsched.model.graph import evaluate
from optsched.model.memory_bounds import residences
from optsched.problems.jobarray.bounds import device_loads
from optsched.problems.jobarray.graph import build, overflows
from optsched.solving.result import Orders, PeriodicOrders

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

    from optsched.model.schedule import Csr, Schedule
    from optsched.problems.jobarray.fields import JobArrayFields

    Floats = npt.NDArray[np.float64]
    Flags = npt.NDArray[np.bool_]

STEPS: Final = 300
"""Weightings of the bounds that are tried."""

ROUNDING: Final = 1e-9
"""Relative error of sums of floats."""


def with_choice(
    solution: Csr | PeriodicOrders, recompute: Sequence[bool]
) -> Orders | PeriodicOrders:
    """Return a solution for a fixed choice as one of the array that leaves it open."""
    chosen = tuple(map(bool, recompute))
    if isinstance(solution, PeriodicOrders):
        return replace(solution, recompute=chosen)
    return Orders(solution, chosen)


def choice_of(array: JobArrayFields, schedule: Schedule) -> list[bool]:
    """Return which jobs recompute in a schedule: its ``provenance["recompute"]``."""
    given: Any = schedule.provenance.get("recompute")
    right = isinstance(given, (list, tuple)) and all(isinstance(r, bool) for r in given)
    if not right or len(given) != array.n_jobs:
        raise InputError(
            f"does not say which jobs recompute: expected {array.n_jobs} times true or false as "
            "provenance.recompute"
        )
    return list(given)


def settled(array: JobArrayFields) -> tuple[Flags, Flags]:
    """Return jobs that fit alone only with recomputation, and only without; bools of shape (K,)."""
    always, never = np.zeros((2, array.n_jobs), bool)
    if array.memory.any():
        always[list(overflows(array, [False] * array.n_jobs))] = True
        never[list(overflows(array, [True] * array.n_jobs))] = True
    return always, never


@dataclass(frozen=True)
class Tradeoff:
    """Bounds of the objective that are linear in the choice; rows: loads, then energies."""

    base: Floats
    """Part that no job adds, shape (rows,)."""
    kept: Floats
    """Part that every job adds without recomputation, shape (K, rows)."""
    again: Floats
    """The same with it."""
    energy: Flags
    """Which rows are about bytes, shape (rows,)."""
    always: Flags
    """Jobs that recompute in any case, shape (K,)."""
    never: Flags
    """Jobs that recompute in no case."""

    def rows(self, choice: npt.ArrayLike, packing: float = 1.0) -> Floats:
        """Return all bounds of a choice (or of shares in 0..1), energies times `packing`."""
        share = np.asarray(choice, np.float64)
        parts = share @ self.again + (1 - share) @ self.kept
        rows: Floats = self.base + parts * np.where(self.energy, packing, 1.0)
        return rows

    def bound(self, choice: npt.ArrayLike) -> int:
        """Return a lower bound of the objective with this choice."""
        return int(np.ceil(self.rows(choice).max() * (1 - ROUNDING)))

    def relaxed(self, packing: float = 1.0) -> tuple[float, Floats]:
        """Return a bound for every choice, and shares of jobs that nearly meet it.

        For any weights of the rows, the least weighted sum over all choices is a lower bound of the
        largest row. Large rows gain weight (multiplicative weights; Arora, Hazan & Kale 2012).
        `packing` is a factor of all energies for memory that is not filled; a bound only if 1.
        """
        scale = np.where(self.energy, packing, 1.0)
        base, kept, again = self.base, self.kept * scale, self.again * scale
        best, total = 0.0, np.zeros(len(self.always))
        largest = max(1.0, float(self.rows(self.always, packing).max()))
        log_weight = np.zeros(len(base))
        for step in range(STEPS):
            weight = np.exp(log_weight - log_weight.max())
            weight /= weight.sum()
            share = np.where(again @ weight < kept @ weight, 1.0, 0.0)
            share[self.always], share[self.never] = 1.0, 0.0
            rows = base + share @ again + (1 - share) @ kept
            best = max(best, float(weight @ rows))
            if step >= STEPS // 2:
                total += share
            log_weight += rows / largest * (10 / np.sqrt(step + 1))
        return best * (1 - ROUNDING), total / (STEPS - STEPS // 2)


def tradeoff(array: JobArrayFields) -> Tradeoff:
    """Return loads and energies of an array as functions of the choice which jobs recompute."""
    graphs = [build(array, [choice] * array.n_jobs) for choice in (False, True)]
    periodic = array.objective == "period"
    times = array.multiplicity if periodic else np.ones_like(array.multiplicity)
    capped = np.flatnonzero(array.memory)
    memory = array.memory[capped].astype(object)
    kept, again = (
        np.hstack([
            _durations(graph, array.n_jobs) * times[:, None],
            (_job_energy(graph)[:, capped] * times[:, None] / memory).astype(np.float64),
        ])
        for graph in graphs
    )  # fmt: skip
    if periodic:
        durations = kept[:, : array.n_devices].sum(axis=0)
        base = np.append(device_loads(array, graphs[0]) - durations, np.zeros(len(capped)))
    else:
        ends, changes = _around(graphs[0])
        base = np.append(ends + changes, ends[capped])
    energy = np.arange(len(base)) >= array.n_devices
    return Tradeoff(base, kept, again, energy, *settled(array))


def _durations(graph: Schedule, jobs: int) -> Floats:
    """Time of every job's blocks on every device, shape (jobs, devices)."""
    total = np.zeros((jobs, graph.n_resources))
    placed = graph.single_resource >= 0
    np.add.at(total, (graph.job[placed], graph.single_resource[placed]), graph.duration[placed])
    return total


def _job_energy(once: Schedule) -> npt.NDArray[np.object_]:
    """Bytes x shortest residence of an iteration of every job on every device, as Python integers.

    Of holdings that another order may end sooner only the workspaces count.
    """
    work = np.zeros((int(once.job.max(initial=-1)) + 1, once.n_resources), object)
    for r, size, i, _, time in residences(once):
        work[once.job[i], r] += size * time
    return work


def _around(graph: Schedule) -> tuple[Floats, Floats]:
    """Least time before the first and after the last block of every device, and its setups."""
    paths = evaluate(graph)
    ends, changes = np.zeros((2, graph.n_resources))
    for d in range(graph.n_resources):
        on = graph.users[d]
        if len(on):
            ends[d] = paths.head[on].min() + (paths.tail[on] - graph.duration[on]).min()
            changes[d] = family_changes(graph, on)
    return ends, changes
