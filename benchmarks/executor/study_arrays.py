"""Solved job arrays of the ArrayPipe study: with a barrier, rolling, and in groups."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

import optsched
from benchmarks.executor.study_baselines import Run, run_of, sum_of
from optsched.analysis.rolling import rolling

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping

    from benchmarks.executor.study_cases import Case
    from optsched import JobArray, Schedule

MICRO_BATCHES: Final = (1, 2, 4)
ENOUGH: Final = 1.005  # no more micro-batches are tried if a schedule is so near its bound


class Search(NamedTuple):
    """Seconds and cores of a solve, and the seed of everything random."""

    seconds: float
    workers: int
    seed: int


class Found(NamedTuple):
    """A verified schedule, the array with its choice of who recomputes, and what it costs."""

    array: JobArray
    schedule: Schedule
    run: Run


def solved(case: Case, search: Search, objectives: Collection[str]) -> dict[str, Run | None]:
    """The array of all jobs in one order, with the micro-batches that do best, by objective.

    Every job is one micro-batch first. If that is not near its bound, 2 and 4 are tried. Rolling is
    searched from nothing (jobs of one micro-batch only), and from the barrier's schedule, repeated.
    """
    best: dict[str, Run | None] = dict.fromkeys(objectives)
    for m in (1,) if case.assumption == "one block" else MICRO_BATCHES:
        found = _by_objective(case, case.batch_sizes(search.seed), m, search, objectives, best)
        for objective, run in found.items():
            best[objective] = _shorter(best[objective], run)
        if all(run is not None and run.time <= ENOUGH * run.bound for run in best.values()):
            break
    return best


def as_published(case: Case, search: Search) -> Run | None:
    """The paper's array: with a barrier, a job is one micro-batch, all jobs recompute."""
    if "always" not in case.recompute_modes:
        return None
    array = case.array(case.batch_sizes(search.seed), recompute_mode="always")
    found = _solve(array, search)
    return None if found is None else found.run


def in_groups(case: Case, size: int, search: Search) -> dict[str, Run | None]:
    """The jobs as several arrays one after another, `size` jobs each; by objective."""
    sizes = case.batch_sizes(search.seed)
    share = search._replace(seconds=max(0.5, search.seconds * size / len(sizes)))
    objectives: dict[str, Run | None] = {"makespan": None, "period": None}
    found = [
        _by_objective(case, sizes[i : i + size], 1, share, objectives, objectives)
        for i in range(0, len(sizes), size)
    ]
    complete = {o: all(o in group for group in found) for o in objectives}
    return {o: sum_of(g[o] for g in found) if complete[o] else None for o in objectives}


def _by_objective(
    case: Case,
    sizes: list[int],
    micro_batches: int,
    search: Search,
    objectives: Collection[str],
    known: Mapping[str, Run | None],
) -> dict[str, Run]:
    """Schedules of an array, unless its bounds say that they are no better than known ones."""
    modes, found = case.recompute_modes, {}
    mode = modes[0] if len(modes) == 1 else "choose"
    array = case.array(sizes, recompute_mode=mode, micro_batches=micro_batches)
    barrier = None
    if _promising(array, known["makespan"]):
        first = [_solve(array, search)]
        if micro_batches == 1 and array.chooses:  # a short search may choose worse than no choice
            recomputing = array.replace(recompute_mode="always")
            first.append(_solve(recomputing, search, bound=array.lower_bound()))
        barrier = _shortest(first)
    if barrier is not None:
        found["makespan"] = barrier.run
    if "period" not in objectives:
        return found
    rolling_array = array.with_objective("period")
    if not _promising(rolling_array, known["period"]):
        return found
    tries: list[Found | None] = []
    if barrier is not None:
        repeated = barrier.array.with_objective("period")
        assert barrier.schedule.sequences is not None
        start = rolling(repeated.graph(), barrier.schedule.sequences)
        tries.append(_solve(repeated, search, start, rolling_array.lower_bound()))
    if barrier is None or micro_batches == 1:
        tries.append(_solve(rolling_array, search))
    best = _shortest(tries)
    if best is not None:
        found["period"] = best.run
    return found


def _shortest(found: Iterable[Found | None]) -> Found | None:
    there = [each for each in found if each is not None]
    return min(there, key=lambda each: each.run.time, default=None)


def _promising(array: JobArray, known: Run | None) -> bool:
    return known is None or array.lower_bound() < known.time


def _shorter(one: Run | None, other: Run) -> Run:
    return other if one is None or other.time < one.time else one


def _solve(
    array: JobArray, search: Search, start: Schedule | None = None, bound: int | None = None
) -> Found | None:
    """Solve, verify, and account; `bound` is that of the array before a choice was made."""
    seconds, workers, seed = search
    result = optsched.solve(array, time_limit=seconds, workers=workers, seed=seed, warm_start=start)
    if result.schedule is None:
        return None
    if array.chooses:
        array = array.replace(recompute_mode=result.schedule.provenance["recompute"])
    recomputing = sum(array.recomputes)
    how = f"{array.micro_batches[0]} micro-batches, {recomputing} of {array.n_jobs} recompute"
    if bound is None:
        bound = result.lower_bound or 0
    return Found(array, result.schedule, run_of(array, result.schedule, how, bound))
