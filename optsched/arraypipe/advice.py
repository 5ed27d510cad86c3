"""`advise`: one job per GPU, one job at a time through a pipeline (1F1B), or the job array."""

from __future__ import annotations

import heapq
from dataclasses import asdict, dataclass
from math import inf
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from optsched.analysis.occupancy import peak_memory
from optsched.arraypipe.profile import RESERVE, Profile
from optsched.io.text import NANOSECONDS, aligned, bytes_text
from optsched.io.values import bytes_of, integer
from optsched.pipelines import balanced, one_f_one_b
from optsched.problems.jobarray.derived import merged
from optsched.solving.solve import solve

if TYPE_CHECKING:
    import os
    from collections.abc import Sequence

    from optsched.arraypipe.profile import ProfiledJob
    from optsched.problems.jobarray.problem import JobArray

MOST_DEVICES: Final = 4096
BLOCKS: Final = 4_000  # of a schedule; more micro-batches are taken to be as fast
LEFT_OUT: Final = (
    "not predicted: drawing batches, time between blocks, devices that share cores or links"
)
TIE: Final = 0.05  # relative lead below which two options count as equal


@dataclass(frozen=True)
class Option:
    """One way to train all jobs.

    `seconds` are those of a round, an iteration of every job, None if it does not fit; `needed` are
    bytes of the fullest device; `fits` is None if the memory is unknown; `recompute` says that all
    jobs recompute, without which it does not fit.
    """

    name: str
    seconds: float | None
    needed: int
    fits: bool | None
    recompute: bool = False


@dataclass(frozen=True)
class Advice:
    """Options to train jobs on devices, the fastest first; `print` shows them as a table.

    Examples
    --------
    >>> from optsched.arraypipe import Advice
    >>> Advice(options=(), jobs=2, devices=2, memory=10**9).verdict
    'no option fits: use more or larger devices, smaller micro-batches, fewer jobs'
    """

    options: tuple[Option, ...]
    jobs: int
    devices: int
    memory: int

    def __getitem__(self, name: str) -> Option:
        """Return the option of a name."""
        return {option.name: option for option in self.options}[name]

    @property
    def best(self) -> Option | None:
        """The fastest option that fits; of equal times the simplest. None if none fits."""
        return next((option for option in self.options if option.seconds is not None), None)

    @property
    def verdict(self) -> str:
        """The answer in one sentence; a lead below 5 % is too close to call."""
        times = [(option.seconds, option.name) for option in self.options if option.seconds]
        if not times:
            return "no option fits: use more or larger devices, smaller micro-batches, fewer jobs"
        (seconds, name), *others = times
        if not others:
            return f"best: {name}"
        lead = others[0][0] / seconds
        if lead - 1 <= TIE:
            return f"too close to call: {name} leads {others[0][1]} by {lead - 1:.1%}"
        return f"best: {name}, {lead:.2f}x as fast as {others[0][1]}"

    def as_dict(self) -> dict[str, Any]:
        """Return plain values, for JSON."""
        best = None if self.best is None else self.best.name
        return {"best": best, "verdict": self.verdict, **asdict(self)}

    def __str__(self) -> str:
        memory = bytes_text(self.memory) if self.memory else "unknown memory"
        head = f"{self.jobs} jobs on {self.devices} devices of {memory}"
        rows = [["", "s a round", "memory", "fits", ""]]
        for option in self.options:
            time = "-" if option.seconds is None else f"{option.seconds:.4g}"
            fits = {True: "yes", False: "no", None: "?"}[option.fits]
            again = "all jobs recompute" * option.recompute
            rows.append([option.name, time, bytes_text(option.needed), fits, again])
        return "\n".join([
            f"{head}; a round is one iteration of every job", LEFT_OUT, "", *aligned(rows), "",
            self.verdict,
        ])  # fmt: skip


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

    Examples
    --------
    >>> import torch
    >>> from torch import nn
    >>> from optsched.arraypipe import ArrayTrainer, Job, advise
    >>> model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    >>> rows = [(torch.ones(2), torch.zeros(2))] * 8
    >>> trainer = ArrayTrainer(model, rows, stages=2, loss=nn.MSELoss())
    >>> profile = trainer.with_jobs([Job(0, 8, torch.optim.SGD)]).profile()
    >>> sorted(option.name for option in advise(profile, memory="40GB").options)
    ['1F1B', 'job array', 'one job per GPU']
    """
    known = profile if isinstance(profile, Profile) else Profile.read(profile)
    picked, states = known.chosen(jobs)
    count = known.n_stages if devices is None else integer("devices", devices, 1, MOST_DEVICES)
    total = known.device.memory_bytes if memory is None else bytes_of(memory)
    limit = total * (1 - RESERVE) if total else inf
    options: dict[str, Option] = {}
    for again in (False, True):  # as the jobs are set, and with recomputation if that does not fit
        array = known.problem(jobs, recompute_mode="always" if again else None)
        for name, (time, needed) in _compared(known, array, picked, states, count).items():
            fits = needed <= limit
            if name not in options or options[name].fits is False:
                options[name] = Option(
                    name,
                    time / 1e9 if fits else None,
                    needed,
                    None if limit == inf else fits,
                    again,
                )
    ranked = sorted(options.values(), key=lambda option: option.seconds or inf)
    return Advice(tuple(ranked), len(picked), count, total)


def _compared(
    known: Profile,
    array: JobArray,
    jobs: Sequence[ProfiledJob],
    states: Sequence[Sequence[int]],
    count: int,
) -> dict[str, tuple[float, int]]:
    """Return nanoseconds of a round and bytes of the fullest device, by option."""
    width, every = min(known.n_stages, count), range(len(jobs))
    cuts = balanced(_loads(array).sum(axis=0).tolist(), width)
    staged = merged(array, cuts)

    def held(*rows: int) -> list[int]:
        some = known.standing_bytes([jobs[j] for j in rows], [states[j] for j in rows])
        return np.add.reduceat(some, cuts[:-1]).tolist()  # type: ignore[no-any-return]

    found = {"one job per GPU": _in_turn([_alone(array, j, sum(held(j))) for j in every], count)}
    if width > 1:
        piped = [_scheduled(staged.subset([j]), held(j), "1F1B") for j in every]
        found["1F1B"] = _in_turn(piped, count // width)
    groups = _longest_first(_loads(staged).sum(axis=1).tolist(), count // width)
    runs = [_scheduled(staged.subset(row), held(*row), "job array") for row in groups]
    found["job array"] = max(time for time, _ in runs), max(needed for _, needed in runs)
    return found


def _loads(array: JobArray) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Return time of an iteration of every job on every stage, in nanoseconds; shape (K, S)."""
    again = array.recompute * np.array([*array.recomputes], np.int64)[:, None]
    passes = array.micro_batches[:, None] * (array.forward + array.backward + again)
    loads: np.ndarray[Any, np.dtype[np.int64]] = passes + array.update
    return NANOSECONDS[array.time_unit] * loads


def _alone(array: JobArray, job: int, held: int) -> tuple[float, int]:
    """Return time and bytes of a job on one device, without messages."""
    again = array.recomputes[job]
    kept = (array.checkpoint if again else array.activation)[job].sum()
    workspace = array.recompute_workspace[job].max() if again else 0
    return int(_loads(array)[job].sum()), held + int(kept + workspace)


def _scheduled(array: JobArray, held: Sequence[int], how: str) -> tuple[float, int]:
    """Return time of a round and bytes of the fullest device, by 1F1B or rolling.

    Scheduled with so few micro-batches that it is quick.
    """
    most = max(4, BLOCKS // (2 * array.n_jobs * array.n_stages))
    fewer = array.replace(micro_batches=np.minimum(array.micro_batches, most))
    if how == "1F1B":
        mode = "global" if array.update_mode == "global" else "block"
        schedule = one_f_one_b(fewer.replace(update_mode=mode))
    else:
        schedule = solve(fewer, "dispatch", iterations=60).schedule  # type: ignore[assignment]
    scale = _loads(array).sum(axis=0).max() / _loads(fewer).sum(axis=0).max()
    needed = max(bytes_ + peak_memory(schedule, d) for d, bytes_ in enumerate(held))
    assert schedule.period is not None
    return schedule.period * NANOSECONDS[array.time_unit] * scale, needed


def _in_turn(runs: Sequence[tuple[float, int]], groups: int) -> tuple[float, int]:
    """One job at a time on each of some groups of devices, the longest first."""
    times = [round(time) for time, _ in runs]
    rows = _longest_first(times, groups)
    return max(sum(times[j] for j in row) for row in rows), max(needed for _, needed in runs)


def _longest_first(times: Sequence[int], machines: int) -> list[list[int]]:
    """P||Cmax by LPT: at most 4/3 - 1/(3 machines) of the best makespan (Graham 1969)."""
    free = [(0, m) for m in range(machines)]
    rows: list[list[int]] = [[] for _ in range(machines)]
    for j in sorted(range(len(times)), key=lambda j: (-times[j], j)):
        busy, m = free[0]
        rows[m].append(j)
        heapq.heapreplace(free, (busy + times[j], m))
    return [row for row in rows if row]
