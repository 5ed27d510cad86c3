"""`advise`: one job per GPU, one job at a time through a pipeline (1F1B), or the job array."""

from __future__ import annotations

import heapq
import textwrap
from dataclasses import asdict, dataclass
from math import inf
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np
from msgspec.structs import replace

from optsched.analysis.occupancy import peak_memory
from optsched.arraypipe.profile.document import Profile
from optsched.arraypipe.profile.problem import RESERVE, chosen_jobs, standing_bytes
from optsched.io.text import bytes_text
from optsched.io.values import bytes_of, integer
from optsched.pipelines import balanced, one_f_one_b
from optsched.problems.jobarray.merging import merged
from optsched.solving.solve import solve

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Iterator, Sequence

    from optsched.arraypipe.profile.document import ProfiledJob
    from optsched.problems.jobarray.problem import JobArray

MOST_DEVICES: Final = 4096
_BLOCKS: Final = 4_000  # of a schedule; more micro-batches are taken to be as fast
_TIE: Final = 0.005  # relative lead below which two options count as equal


@dataclass(frozen=True)
class Option:
    """One way to train all jobs.

    Parameters
    ----------
    name
        Such as ``"1F1B"``.
    seconds
        Per round, an iteration of every job; None if it does not fit.
    needed
        Bytes of the fullest device.
    fits
        Whether the memory suffices; None if the memory is unknown.
    reason
        Where the time comes from, or what does not fit.
    """

    name: str
    seconds: float | None
    needed: int
    fits: bool | None
    reason: str


@dataclass(frozen=True)
class Advice:
    """Options to train jobs on devices, the fastest first; `print` shows them as a table."""

    options: tuple[Option, ...]
    jobs: int
    devices: int
    memory: int
    spread: float

    def __getitem__(self, name: str) -> Option:
        """The option of a name."""
        return {option.name: option for option in self.options}[name]

    @property
    def best(self) -> Option | None:
        """The fastest option that fits; of equal times the simplest. None if none fits."""
        return next((option for option in self.options if option.seconds is not None), None)

    @property
    def verdict(self) -> str:
        """The answer in one sentence; a lead within the profile's IQR is too close to call."""
        times = [(option.seconds, option.name) for option in self.options if option.seconds]
        if not times:
            return "no option fits: use more or larger devices, recomputation, or fewer jobs"
        seconds, name = times[0]
        if len(times) == 1:
            return f"best: {name}"
        lead = times[1][0] / seconds
        if lead - 1 <= max(self.spread, _TIE):
            return f"too close to call: {name} leads {times[1][1]} by {lead - 1:.1%}"
        return f"best: {name}, {lead:.2f}x as fast as {times[1][1]}"

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        best = None if self.best is None else self.best.name
        return {"best": best, "verdict": self.verdict, **asdict(self)}

    def __str__(self) -> str:
        memory = bytes_text(self.memory) if self.memory else "unknown memory"
        lines = [
            f"{self.jobs} jobs on {self.devices} devices of {memory}; a round is one iteration of "
            "every job",
            "",
            f"{'':15}  {'s / round':>11}  {'memory':>10}  why",
        ]
        for option in self.options:
            time = "-" if option.seconds is None else f"{option.seconds:.4g}"
            lead = f"{option.name:15}  {time:>11}  {bytes_text(option.needed):>10}  "
            lines += textwrap.wrap(
                option.reason, 100, initial_indent=lead, subsequent_indent=" " * len(lead)
            )
        return "\n".join([*lines, "", self.verdict])


class _Run(NamedTuple):
    """Time of a round and bytes of the fullest device, for some jobs on a group of devices."""

    time_ns: float
    needed: int


def advise(
    profile: Profile | str | os.PathLike[str],
    jobs: Sequence[Any] | None = None,
    devices: int | None = None,
    *,
    memory: str | int | None = None,
) -> Advice:
    """Compare one job per GPU, 1F1B with one job at a time, and the job array.

    Times are in the steady state of long training, with all states on the devices.

    Parameters
    ----------
    profile
        A measured `Profile`, or the path of its ``*.profile.json``.
    jobs
        As in `Profile.problem`. All profiled jobs by default.
    devices
        Number of equal devices; by default one per profiled stage.
    memory
        Bytes of a device, or a size such as ``"40GB"``; by default the profiled device's. 5 % are
        left for fragmentation.

    Raises
    ------
    InputError
        Naming the argument, its value and what was expected.
    """
    known = profile if isinstance(profile, Profile) else Profile.read(profile)
    chosen = chosen_jobs(known, jobs)
    picked, states = [job for job, _ in chosen], [state for _, state in chosen]
    count = known.n_stages if devices is None else integer("devices", devices, 1, MOST_DEVICES)
    total = known.device.memory_bytes if memory is None else bytes_of(memory)
    limit = total * (1 - RESERVE) if total else inf
    best: dict[str, Option] = {}
    for setting, changed in _settings(known, picked):
        for name, run, reason in _compared(known, setting, states, count):
            option = _option(name, run, reason + changed, limit)
            best[name] = min(best.get(name, option), option, key=_rank)
    ranked = sorted(best.values(), key=lambda option: option.seconds or inf)
    return Advice(tuple(ranked), len(picked), count, total, known.spread)


def _rank(option: Option) -> tuple[float, int]:
    return option.seconds or inf, option.needed if option.seconds is None else 0


def _settings(
    profile: Profile, jobs: Sequence[ProfiledJob]
) -> Iterator[tuple[list[ProfiledJob], str]]:
    """The jobs as they are set; with recomputation, and with smaller measured micro-batches."""
    sizes = sorted({b.batch for b in profile.blocks}, reverse=True)
    seen = set()
    for most in (None, *sizes):
        for again in (False, True):
            row = []
            for job in jobs:
                parts = job.microbatches if most is None else -(-job.batch_size // most)
                one = replace(
                    job, microbatches=max(parts, job.microbatches), recompute=again or job.recompute
                )
                measured = one.batch in profile.sizes(one.precision)
                row.append(one if measured else replace(job, recompute=one.recompute))
            if (key := tuple(row)) not in seen:
                seen.add(key)
                changed = f"; micro-batches of up to {most}" * (row[0].batch != jobs[0].batch)
                yield row, changed + "; all jobs recompute" * again


def _compared(
    profile: Profile, jobs: Sequence[ProfiledJob], states: Sequence[Any], count: int
) -> Iterator[tuple[str, _Run, str]]:
    """Time and bytes of the options."""
    width = min(profile.n_stages, count)
    array = profile.problem(jobs)
    cuts = balanced(_loads(array).sum(axis=0).tolist(), width)
    staged = merged(array, cuts)

    def held(rows: Sequence[int]) -> list[int]:
        state = np.array([states[j] for j in rows]).T.tolist()
        found = standing_bytes(profile, [jobs[j] for j in rows], state)
        return np.add.reduceat(found, cuts[:-1]).tolist()  # type: ignore[no-any-return]

    alone = [_alone(array, j, sum(held([j]))) for j in range(len(jobs))]
    yield _in_turn("one job per GPU", alone, count, jobs)
    if width > 1:
        piped = [_pipelined(staged.subset([j]), held([j])) for j in range(len(jobs))]
        yield _in_turn("1F1B", piped, count // width, jobs)
    yield _arrays(staged, held, count // width)


def _option(name: str, run: _Run, reason: str, limit: float) -> Option:
    """An option, if it fits into the memory of a device."""
    if run.needed > limit:
        reason = (
            f"needs {bytes_text(run.needed)} on a device of {bytes_text(int(limit))}: use more "
            "stages or devices, recomputation, or smaller micro-batches"
        )
        return Option(name, None, run.needed, False, reason)
    return Option(name, run.time_ns / 1e9, run.needed, None if limit == inf else True, reason)


def _loads(array: JobArray) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Time of an iteration of every job on every stage, in nanoseconds; shape (K, S)."""
    again = array.recompute * np.array([*array.recomputes], np.int64)[:, None]
    passes = array.micro_batches[:, None] * (array.forward + array.backward + again)
    unit_ns = {"ns": 1, "us": 1000}[array.time_unit]
    loads: np.ndarray[Any, np.dtype[np.int64]] = unit_ns * (passes + array.update)
    return loads


def _alone(array: JobArray, job: int, held: int) -> _Run:
    """A job on one device, without messages."""
    kept = array.checkpoint if array.recomputes[job] else array.activation
    workspace = int(array.recompute_workspace[job].max()) if array.recomputes[job] else 0
    return _Run(int(_loads(array)[job].sum()), held + int(kept[job].sum()) + workspace)


def _pipelined(job: JobArray, held: Sequence[int]) -> _Run:
    """One job through the pipeline, iteration after iteration, by 1F1B."""
    mode = "global" if job.update_mode == "global" else "block"
    fewer = _fewer(job).replace(update_mode=mode)
    schedule = one_f_one_b(fewer)
    scale = _loads(job).sum(axis=0).max() / _loads(fewer).sum(axis=0).max()
    return _scheduled(schedule, fewer, held, scale)


def _arrays(
    staged: JobArray, held: Callable[[Sequence[int]], list[int]], groups: int
) -> tuple[str, _Run, str]:
    """All jobs at once, in as many arrays side by side as there are devices for."""
    loads = _loads(staged)
    rows = _longest_first(loads.sum(axis=1).tolist(), min(groups, staged.n_jobs))
    runs = []
    for row in rows:
        array = staged.subset(row)
        fewer = _fewer(array)
        schedule = solve(fewer, "dispatch", iterations=60).schedule
        scale = _loads(array).sum(axis=0).max() / _loads(fewer).sum(axis=0).max()
        runs.append(_scheduled(schedule, fewer, held(row), scale))
    side = f"{len(rows)} arrays side by side; " if len(rows) > 1 else ""
    bound = max(loads[row].sum(axis=0).max() for row in rows) / 1e9
    run = _Run(max(one.time_ns for one in runs), max(one.needed for one in runs))
    return "job array", run, f"{side}rolling, by a quick schedule; load of a device {bound:.4g} s"


def _scheduled(schedule: Any, array: JobArray, held: Sequence[int], scale: float) -> _Run:
    needed = max(h + peak_memory(schedule, d) for d, h in enumerate(held))
    return _Run(schedule.period * {"ns": 1, "us": 1000}[array.time_unit] * scale, needed)


def _fewer(array: JobArray) -> JobArray:
    """The array with so few micro-batches that it is quickly scheduled."""
    most = max(4, _BLOCKS // (2 * array.n_jobs * array.n_stages))
    return array.replace(micro_batches=np.minimum(array.micro_batches, most))


def _in_turn(
    name: str, runs: Sequence[_Run], groups: int, jobs: Sequence[ProfiledJob]
) -> tuple[str, _Run, str]:
    """One job at a time on each of some groups of devices, the longest first."""
    times = [round(run.time_ns) for run in runs]
    rows = _longest_first(times, groups)
    time = max(sum(times[j] for j in row) for row in rows)
    largest = max(range(len(runs)), key=lambda j: runs[j].needed)
    where = f" in {groups} pipelines" if name == "1F1B" and groups > 1 else ""
    reason = f"jobs in turn{where}; the largest is {jobs[largest].name}"
    return name, _Run(time, runs[largest].needed), reason


def _longest_first(times: Sequence[int], machines: int) -> list[list[int]]:
    """P||Cmax by LPT: at most 4/3 - 1/(3 machines) of the best makespan (Graham 1969)."""
    free = [(0, m) for m in range(machines)]
    rows: list[list[int]] = [[] for _ in range(machines)]
    for j in sorted(range(len(times)), key=lambda j: (-times[j], j)):
        busy, m = free[0]
        rows[m].append(j)
        heapq.heapreplace(free, (busy + times[j], m))
    return [row for row in rows if row]
