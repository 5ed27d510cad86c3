"""What recomputing costs in time and saves in bytes, per job and device; bounds from both.

Every device bounds the objective twice, by its load and by bytes x time over its memory. Each of
these bounds is a sum over the jobs, and recomputing moves a job's part of it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np

from optsched.model.bounds import family_changes, longest_arcs
from optsched.problems.jobarray.graph import build
from optsched.problems.jobarray.period import device_loads, job_energy

if TYPE_CHECKING:
    import numpy.typing as npt

    from optsched.model.schedule import Schedule
    from optsched.problems.jobarray.problem import JobArray

    Floats = npt.NDArray[np.float64]
    Flags = npt.NDArray[np.bool_]

STEPS: Final = 300
"""Weightings of the bounds that are tried."""

ROUNDING: Final = 1e-9
"""Share by which sums of floats may be too large."""


@dataclass(frozen=True)
class Tradeoff:
    """Bounds of the objective that are linear in the choice; rows: loads, then energies."""

    base: Floats
    """What no job adds, shape (rows,)."""
    kept: Floats
    """What every job adds without recomputation, shape (K, rows)."""
    again: Floats
    """The same with it."""
    energy: Flags
    """Which rows are about bytes, shape (rows,)."""
    must: Flags
    """Jobs that recompute in any case, shape (K,)."""
    never: Flags
    """Jobs that recompute in no case."""

    def rows(self, choice: npt.ArrayLike, packing: float = 1.0) -> Floats:
        """All bounds of a choice (of shares in 0..1 too), energies times `packing`."""
        share = np.asarray(choice, np.float64)
        parts = share @ self.again + (1 - share) @ self.kept
        rows: Floats = self.base + parts * np.where(self.energy, packing, 1.0)
        return rows

    def bound(self, choice: npt.ArrayLike) -> int:
        """A lower bound of the objective with this choice."""
        return int(np.ceil(self.rows(choice).max() * (1 - ROUNDING)))

    def relaxed(self, packing: float = 1.0) -> tuple[float, Floats]:
        """A bound for every choice, and shares of jobs that nearly meet it.

        The rows are weighted, and every job chooses what is less in the weighted sum: that bounds
        the least largest row from below whatever the weights. Rows that come out large gain weight
        (multiplicative weights; Arora, Hazan & Kale 2012).

        Parameters
        ----------
        packing
            How much more than bytes x time the memory has to offer; a bound only if 1.
        """
        scale = np.where(self.energy, packing, 1.0)
        base, kept, again = self.base, self.kept * scale, self.again * scale
        best, total = 0.0, np.zeros(len(self.must))
        largest = max(1.0, float(self.rows(self.must, packing).max()))
        log_weight = np.zeros(len(base))
        for step in range(STEPS):
            weight = np.exp(log_weight - log_weight.max())
            weight /= weight.sum()
            share = np.where(again @ weight < kept @ weight, 1.0, 0.0)
            share[self.must], share[self.never] = 1.0, 0.0
            rows = base + share @ again + (1 - share) @ kept
            best = max(best, float(weight @ rows))
            if step >= STEPS // 2:
                total += share
            log_weight += rows / largest * (10 / np.sqrt(step + 1))
        return best * (1 - ROUNDING), total / (STEPS - STEPS // 2)


def tradeoff(array: JobArray, must: Flags, never: Flags) -> Tradeoff:
    """Loads and energies of an array whose recomputation is to be chosen.

    Parameters
    ----------
    array
        Any array; its own `recompute_mode` does not count.
    must, never
        Jobs that recompute in any case, and in no case; shape (K,).
    """
    ways = [build(array, [way] * array.n_jobs) for way in (False, True)]
    periodic = array.objective == "period"
    times = array.multiplicity if periodic else np.ones_like(array.multiplicity)
    capped = np.flatnonzero(array.memory)
    room = array.memory[capped].astype(object)
    kept, again = (
        np.hstack([
            durations(graph, array.n_jobs) * times[:, None],
            (job_energy(graph)[:, capped] * times[:, None] / room).astype(np.float64),
        ])
        for graph in ways
    )  # fmt: skip
    if periodic:
        plain = kept[:, : array.n_devices].sum(axis=0)
        base = np.append(device_loads(array, ways[0]) - plain, np.zeros(len(capped)))
    else:
        ends, changes = _around(ways[0])
        base = np.append(ends + changes, ends[capped])
    energy = np.arange(len(base)) >= array.n_devices
    return Tradeoff(base, kept, again, energy, must, never)


def durations(graph: Schedule, jobs: int) -> Floats:
    """Time of every job's blocks on every device, shape (jobs, devices)."""
    total = np.zeros((jobs, graph.n_resources))
    placed = graph.single_resource >= 0
    np.add.at(total, (graph.job[placed], graph.single_resource[placed]), graph.duration[placed])
    return total


def _around(graph: Schedule) -> tuple[Floats, Floats]:
    """Per device the least time before its first and behind its last block, and all its setups."""
    paths = longest_arcs(graph)
    ends, changes = np.zeros((2, graph.n_resources))
    for d in range(graph.n_resources):
        on = graph.users[d]
        if len(on):
            ends[d] = paths.head[on].min() + (paths.tail[on] - graph.duration[on]).min()
            changes[d] = family_changes(graph, on)
    return ends, changes
