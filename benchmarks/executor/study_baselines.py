"""Fixed pipelines of the ArrayPipe study: jobs one after another, and the paper's own arrays."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np

import optsched
from optsched import JobArray, pipelines
from optsched.analysis.occupancy import horizon, setup_times
from optsched.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from benchmarks.executor.study_cases import Case
    from optsched.model.schedule import Schedule

PARTS: Final = ("forward", "backward", "recompute", "update", "switch", "bubble")

SINGLE: Final = ("vanilla", "gpipe", "hanayo", "one_f_one_b", "interleaved", "zb_h1")
"""Jobs one after another; the first three are the paper's."""

ROLLING: Final = ("gpipe", "one_f_one_b", "interleaved", "hanayo", "zb_h1", "zb_h2")
"""The same without waiting at the end of an iteration, and what is made for that."""

ARRAYS: Final = ("gpipe", "hanayo", "one_f_one_b")
"""Fixed orders over the jobs of an array; the first two are the paper's."""


@dataclass(frozen=True)
class Run:
    """Time of one iteration of some jobs, device time by `PARTS`, how it was reached, a bound.

    The bound is that of the solver, for the micro-batches it was given; 0 without one.
    """

    time: int
    parts: dict[str, int]
    how: str = ""
    bound: int = 0


def sum_of(runs: Iterable[Run]) -> Run:
    """Runs one after another."""
    found = list(runs)
    parts = {name: sum(run.parts[name] for run in found) for name in PARTS}
    how = "; ".join(dict.fromkeys(run.how for run in found if run.how))
    return Run(sum(run.time for run in found), parts, how, sum(run.bound for run in found))


def run_of(array: JobArray, schedule: Schedule, how: str = "", bound: int = 0) -> Run:
    """What a schedule of an array costs; `SystemExit` if it is not correct."""
    violations = optsched.verify(schedule)
    if violations:
        raise SystemExit(f"{array.name}: wrong schedule: {violations[0].message}")
    recomputes = np.array(array.recomputes)
    blocks = array.micro_batches[:, None]
    backward = array.backward if array.weight is None else array.backward + array.weight
    parts = {
        "forward": int((blocks * array.forward).sum()),
        "backward": int((blocks * backward).sum()),
        "recompute": int((recomputes[:, None] * blocks * array.recompute).sum()),
        "update": int(array.update.sum()),
        "switch": int(setup_times(schedule)[: array.n_devices].sum()),
    }
    span = horizon(schedule)
    parts["bubble"] = array.n_devices * span - sum(parts.values())
    return Run(span, parts, how, bound)


def one_after_another(case: Case, name: str, objective: str = "makespan") -> Run | None:
    """All jobs in turn, each by its best way to run a pipeline; None if one does not fit.

    Objective ``"period"`` lets an iteration begin while the one before it ends.
    """
    found = []
    for size, count in sorted(Counter(case.batch_sizes(0)).items()):
        one = best_single(case, name, size, objective)
        if one is None:
            return None
        parts = {part: count * value for part, value in one.parts.items()}
        found.append(Run(count * one.time, parts, f"{size}: {one.how}"))
    return sum_of(found)


def best_single(case: Case, name: str, size: int, objective: str = "makespan") -> Run | None:
    """The best of all micro-batch counts, chunks, and recomputing or not, that fits."""
    best: Run | None = None
    for job, how in _ways(case, name, size):
        job = job.with_objective(objective)
        if best is not None and _load(job) >= best.time:
            continue
        schedule = built(name, job)
        if schedule is None or optsched.verify(schedule):  # more memory than there is
            continue
        run = run_of(job, schedule, how)
        if best is None or run.time < best.time:
            best = run
    return best


def array_in_groups(case: Case, name: str, seed: int) -> Run | None:
    """The paper's arrays: a pipeline whose micro-batches are jobs, in groups as large as fits.

    Groups of 4, 8, ... consecutive jobs follow each other with a barrier; the best size.
    """
    sizes, best = case.batch_sizes(seed), None
    for k in (size for size in (4, 8, 16, 32, 64) if len(sizes) % size == 0):
        for mode in case.recompute_modes:
            run = _grouped(case, name, [sizes[i : i + k] for i in range(0, len(sizes), k)], mode)
            if run is not None and (best is None or run.time < best.time):
                best = Run(run.time, run.parts, f"groups of {k}, {_words(mode)}")
    return best


def built(name: str, job: JobArray) -> Schedule | None:
    """The fixed order of a job or an array; None where the pipeline does not take it."""
    try:
        schedule: Schedule = getattr(pipelines, name)(job)
    except InputError:
        return None
    return schedule


def _ways(case: Case, name: str, size: int) -> Iterator[tuple[JobArray, str]]:
    """All ways to run a job: from the least work to the most."""
    counts = [m for m in range(1, size + 1) if size % m == 0]
    if case.assumption == "m = S":
        counts = [m for m in counts if m == case.stages]
    split = name in ("zb_h1", "zb_h2")
    for m in counts:
        for chunks in _chunks(case, name):
            for mode in case.recompute_modes:
                options = {"chunks": chunks, "split_backward": split, "recompute_mode": mode}
                try:
                    job = case.single(size, micro_batches=m, **options)
                except InputError:  # more chunks than layers
                    continue
                waves = f", {len(chunks) // case.stages} chunks" if chunks else ""
                yield job, f"{m} micro-batches{waves}, {_words(mode)}"


def _chunks(case: Case, name: str) -> list[tuple[int, ...]]:
    """Places that a pipeline tries, () for one stage a device."""
    place = {"hanayo": pipelines.zigzag, "interleaved": pipelines.wrapped}.get(name)
    return [()] if place is None else [place(case.stages, c) for c in (2, 4)]


def _grouped(case: Case, name: str, groups: list[list[int]], mode: str) -> Run | None:
    best: Run | None = None
    for chunks in _chunks(case, name):
        runs = []
        for sizes in groups:
            try:
                array = case.array(sizes, chunks=chunks, recompute_mode=mode)
            except InputError:  # more chunks than layers
                return best
            schedule = built(name, array)
            if schedule is None or optsched.verify(schedule):
                break
            runs.append(run_of(array, schedule))
        if len(runs) < len(groups):
            continue
        run = sum_of(runs)
        if best is None or run.time < best.time:
            best = run
    return best


def _load(job: JobArray) -> int:
    """Work of the busiest device of one job."""
    blocks = job.forward + job.backward + (0 if job.weight is None else job.weight)
    blocks = blocks + (job.recompute if job.recomputes[0] else 0)
    work = np.zeros(job.n_devices, np.int64)
    np.add.at(work, job.devices_of(0), (job.micro_batches[:, None] * blocks + job.update)[0])
    return int(work.max())


def _words(mode: str) -> str:
    return {"never": "no recomputation", "always": "recomputing"}[mode]
