"""Cut a chain of layers into stages: equal counts, least largest stage, or the best schedule."""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np

from optsched.analysis.occupancy import peak_memory
from optsched.errors import InputError
from optsched.io.values import bytes_of, integer
from optsched.problems.jobarray.derived import merged
from optsched.problems.jobarray.problem import JobArray

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from optsched.model.schedule import IntArray, Schedule

MakeSchedule: TypeAlias = "Callable[[JobArray], Schedule | None]"


@dataclass(frozen=True, eq=False)
class Partition:
    """Best cut found; `names` is what ``ArrayTrainer(stages=...)`` takes.

    Parameters
    ----------
    cuts
        First layer of stages 1, 2, ...
    names
        Names of these layers.
    array
        The job array of the stages, with the memory that is left.
    schedule
        Its best schedule.
    value
        Period or makespan of the schedule.
    lower_bound
        No cut into so many stages, and no schedule, has a smaller value.
    tried
        Every candidate with its value; None: no schedule fits into the memory.

    Examples
    --------
    >>> from optsched import pipelines
    >>> layers = optsched.JobArray([[1, 2, 2, 2, 5]], [[2, 4, 4, 4, 10]], micro_batches=8)
    >>> pipelines.partition(layers, 3, schedule=pipelines.one_f_one_b).names
    ('2', '4')
    """

    cuts: tuple[int, ...]
    names: tuple[str, ...]
    array: JobArray
    schedule: Schedule
    value: int
    lower_bound: int
    tried: tuple[tuple[tuple[int, ...], int | None], ...]

    def __str__(self) -> str:
        above = self.value / max(1, self.lower_bound) - 1
        return (
            f"stages begin at {', '.join(self.names) or 'the first layer'}: {self.array.objective} "
            f"{self.value} {self.array.time_unit}, {above:.1%} above the lower bound of all cuts "
            f"({len(self.tried)} scheduled)"
        )


def partition(
    layers: Any,
    stages: int,
    memory: str | int | None = None,
    *,
    schedule: MakeSchedule | None = None,
    candidates: int = 8,
    in_flight: Sequence[int] | None = None,
    place: Sequence[int] | None = None,
) -> Partition:
    """Find the cut of measured layers with the best schedule.

    A dynamic programme gives the cuts with the least bottleneck (load of a stage, or of a link)
    that fit into the memory, exactly; the best few are scheduled, because the best cut of one job
    need not be that of an array.

    Parameters
    ----------
    layers
        A `JobArray` with one stage per layer, or a measured `Profile` with one stage per block.
    memory
        Bytes of a device. States, gradients and shared tensors of a profile (of a `JobArray` its
        ``state``) are subtracted. None = unlimited.
    schedule
        Function from a `JobArray` to a `Schedule`, such as `optsched.pipelines.one_f_one_b`. None:
        the ``"dispatch"`` solver.
    candidates
        Number of cuts that are scheduled.
    in_flight
        Micro-batches of the largest job that a stage keeps at once, for every stage; a cut must
        have memory for them. Default 1.
    place
        Device of every stage, such as `wrapped` gives; default stage v on device v.

    Examples
    --------
    >>> from optsched import JobArray
    >>> from optsched.pipelines import one_f_one_b, partition
    >>> layers = JobArray([[1, 2, 2, 2, 5]], [[2, 4, 4, 4, 10]], micro_batches=8)
    >>> found = partition(layers, 3, schedule=one_f_one_b)
    >>> found.cuts, found.value, found.lower_bound
    ((2, 4), 141, 141)
    """
    chain = _chain(layers, memory)
    integer("stages", stages, 1, chain.array.n_stages)
    integer("candidates", candidates, 1, None)
    flight = [1] * stages if in_flight is None else [*in_flight]
    if len(flight) != stages:
        raise InputError(f"in_flight: expected {stages} numbers, one per stage, got {len(flight)}")
    found = best_cuts(
        _loads(chain.array), stages, candidates, links=_link_loads(chain.array),
        fits=chain.fits_in(flight),
    )  # fmt: skip
    if not found:
        raise InputError(
            f"memory: no cut into {stages} stages fits into {chain.limit} bytes per device; use "
            "more stages, recompute_mode='always', smaller micro-batches or fewer jobs"
        )
    made = [_staged(chain, one.cuts, place) for one in found]
    planned = [_planned(array, schedule or _dispatched) for array in made]
    values = [None if one is None else one[0] for one in planned]
    possible = [(one[0], k, one[1]) for k, one in enumerate(planned) if one is not None]
    if not possible:
        raise InputError(
            f"memory: none of the {len(found)} best cuts has a schedule that fits into "
            f"{chain.limit} bytes; say how many micro-batches a stage keeps with in_flight=, or "
            "raise candidates="
        )
    value, k, best = min(possible, key=lambda one: one[:2])
    starts = [tuple(one.cuts[1:-1]) for one in found]
    return Partition(
        starts[k], tuple(chain.names[v] for v in starts[k]), made[k], best, value,
        _lower_bound(chain.array, stages, place), tuple(zip(starts, values, strict=True)),
    )  # fmt: skip


def naive(n_layers: int, stages: int) -> list[int]:
    """First layer of every stage and the end: layer counts that differ by at most one.

    Stage v holds the layers ``cuts[v] .. cuts[v + 1] - 1``.
    """
    _check(n_layers, stages)
    return [v * n_layers // stages for v in range(stages + 1)]


def balanced(costs: Sequence[int], stages: int) -> list[int]:
    """Cut costs into stages so that the costliest stage costs least, exactly.

    Costs are integers >= 0; every stage gets at least one layer. The result is as of `naive`.

    Examples
    --------
    >>> from optsched import pipelines
    >>> pipelines.balanced([1, 4, 4, 4, 9], 3)  # layers 0-1, 2-3 and 4
    [0, 2, 4, 5]
    """
    _check(len(costs), stages)
    return best_cuts(costs, stages, 1)[0].cuts


class Cuts(NamedTuple):
    """A cut into stages: its bottleneck, and the sum of the loads of the links that it uses."""

    bottleneck: int
    link_load: int
    cuts: list[int]


def best_cuts(
    loads: Sequence[int],
    stages: int,
    count: int,
    *,
    links: Sequence[int] | None = None,
    fits: Callable[[int, int, int], bool] = lambda stage, first, end: True,
) -> list[Cuts]:
    """The `count` cuts of least bottleneck, exactly, by dynamic programming.

    ``best[v][i]`` = the least bottlenecks of v stages over the first i layers = the least over j
    of max(best[v-1][j], load of j .. i-1, link before j). Ties are broken by less link load.

    `links` has the load of the link after every layer, ``fits(stage, first, end)`` says whether
    layers ``first .. end - 1`` fit into the memory of a stage.
    """
    n, total = len(loads), [0, *accumulate(loads)]
    between = [0] * n if links is None else [0, *links]
    # entries: bottleneck, link load, first layer of the last stage, rank of the entry there
    best = [[(total[i], 0, 0, 0)] if i and fits(0, 0, i) else [] for i in range(n + 1)]
    rows = [best]
    for v in range(1, stages):
        row: list[list[tuple[int, int, int, int]]] = [[] for _ in range(n + 1)]
        for i in range(v + 1, n + 1):
            row[i] = heapq.nsmallest(
                count,
                (
                    (max(b, total[i] - total[j], between[j]), link + between[j], j, rank)
                    for j in range(v, i)
                    if fits(v, j, i)
                    for rank, (b, link, _, _) in enumerate(best[j])
                ),
            )
        best = row
        rows.append(row)
    return [_traced(rows, n, rank) for rank in range(len(best[n]))]


def _traced(rows: list[list[list[tuple[int, int, int, int]]]], n: int, rank: int) -> Cuts:
    """The cut that an entry of the last row stands for."""
    bottleneck, link = rows[-1][n][rank][:2]
    cuts, i = [n], n
    for row in reversed(rows):
        _, _, i, rank = row[i][rank]
        cuts.append(i)
    return Cuts(bottleneck, link, cuts[::-1])


class _Chain(NamedTuple):
    """Layers to cut: their array and names, bytes that each holds all along, bytes of a device."""

    array: JobArray
    names: list[str]
    held: list[int]
    limit: int | None

    def fits_in(self, flight: Sequence[int]) -> Callable[[int, int, int], bool]:
        """Whether layers fit into the memory of a stage, with so many micro-batches in flight."""
        again = np.array([*self.array.recomputes], np.bool_)[:, None]
        kept = np.where(again, self.array.checkpoint, self.array.activation).max(axis=0)
        standing = [0, *accumulate(self.held)]
        passing = [0, *accumulate(kept.tolist())]

        def fits(stage: int, first: int, end: int) -> bool:
            needed = flight[stage] * (passing[end] - passing[first])
            needed += standing[end] - standing[first]
            return self.limit is None or needed <= self.limit

        return fits


def _chain(layers: Any, memory: str | int | None) -> _Chain:
    limit = None if memory is None else bytes_of(memory)
    if isinstance(layers, JobArray):
        names = [str(v) for v in range(layers.n_stages)]
        return _Chain(layers, names, layers.state.sum(axis=0).tolist(), limit)
    if not hasattr(layers, "problem") or not hasattr(layers, "standing_bytes"):
        raise InputError(f"layers: expected a JobArray or a Profile, got {layers!r:.60}")
    names = [stage.name for stage in layers.stages]
    return _Chain(layers.problem(), names, layers.standing_bytes(), limit)


def _loads(array: JobArray) -> list[int]:
    """Time of all jobs in a cycle on every layer."""
    passes = array.forward + array.backward + (0 if array.weight is None else array.weight)
    passes = passes + array.recompute * np.array([*array.recomputes], np.int64)[:, None]
    updates = 0 if array.update_mode == "none" else array.update
    once = array.micro_batches[:, None] * passes + updates
    loads: list[int] = (_copies(array) @ once).tolist()
    return loads


def _link_loads(array: JobArray) -> list[int]:
    """Time of all messages of a cycle over the link after every layer, the slower direction."""
    weights = _copies(array) * array.micro_batches
    loads: list[int] = np.maximum(
        weights @ array.lag_forward, weights @ array.lag_backward
    ).tolist()
    return loads


def _copies(array: JobArray) -> IntArray:
    """Iterations of every job that the objective covers."""
    return array.multiplicity if array.objective == "period" else np.ones_like(array.multiplicity)


def _staged(chain: _Chain, cuts: Sequence[int], place: Sequence[int] | None) -> JobArray:
    """The array of the stages, with the memory that is left for activations."""
    devices = np.arange(len(cuts) - 1) if place is None else np.array(place)
    changes: dict[str, Any] = {} if place is None else {"place": tuple(devices.tolist())}
    if chain.limit is not None:
        taken = np.zeros(1 + devices.max(), np.int64)
        np.add.at(taken, devices, np.add.reduceat(np.array(chain.held, np.int64), cuts[:-1]))
        changes["memory"] = np.maximum(chain.limit - taken, 1).tolist()  # 0 would be unlimited
    return merged(chain.array, cuts, **changes)


def _planned(array: JobArray, make: MakeSchedule) -> tuple[int, Schedule] | None:
    """Value and schedule; None if there is none or it does not fit into the memory."""
    schedule = make(array)
    if schedule is None:
        return None
    limits = array.memory.tolist()
    if any(limit and peak_memory(schedule, d) > limit for d, limit in enumerate(limits)):
        return None
    return array.evaluate(schedule), schedule


def _dispatched(array: JobArray) -> Schedule | None:
    from optsched.solving.solve import solve

    return None if array.infeasibility() else solve(array, "dispatch").schedule


def _lower_bound(array: JobArray, stages: int, place: Sequence[int] | None) -> int:
    """Least load of the busiest device over all cuts, or the bound of one layer per device."""
    loads, alone = _loads(array), array.replace(lag_forward=0, lag_backward=0, memory=0)
    devices = len(set(place or range(stages)))
    load = best_cuts(loads, stages, 1)[0].bottleneck if devices == stages else 0
    return max(load, -(-sum(loads) // devices), alone.lower_bound())


def _check(n_layers: int, stages: int) -> None:
    if not 1 <= stages <= n_layers:
        raise InputError(f"stages: expected 1..{n_layers}, the number of layers, got {stages}")
